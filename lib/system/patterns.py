"""Regular expressions that come from settings or files, searched within limits of time and memory.

Python's `re` cannot be interrupted: `(a+)+$` takes for ever on forty letters, and no other thread runs meanwhile. So a
process of its own searches (pattern_worker.py), and is ended when it takes too long.
"""

from __future__ import annotations

import functools
import json
import sys
from pathlib import Path

from lib.errors import Stopped, UserError
from lib.system.worker_process import Ended, NotStarted, WorkerProcess

ROOT = Path(__file__).resolve().parent.parent.parent

SECONDS = 10.0  # for one search, which takes microseconds
MEMORY_BYTES = 2**30


def last_match(pattern: str, text: str) -> str | None:
    """The first group (the whole, where there is none) of a pattern's last match in a text of lines; None without one.

    Raises:
        UserError: it is no pattern, or takes more than SECONDS or MEMORY_BYTES.
        Stopped: what searches cannot be started.
    """
    found = _found(pattern, text, is_full=False)
    return None if found is None else str(found)


def is_match(pattern: str, text: str) -> bool:
    """Whether a pattern matches all of a text.

    Raises:
        UserError, Stopped: as `last_match`.
    """
    return bool(_found(pattern, text, is_full=True))


def _found(pattern: str, text: str, is_full: bool) -> object:
    what = f"the regular expression {pattern!r}"
    try:
        answer = _searcher().ask(json.dumps([pattern, text, is_full]).encode(), SECONDS)
    except NotStarted as error:
        raise Stopped(f"the process that searches for regular expressions does not start: {error}") from None
    except Ended as error:
        if not error.lacked_memory:
            raise UserError(f"{what} finds nothing in a text of {len(text):,} letters: {error}") from None
        raise UserError(_too_much(what, f"{MEMORY_BYTES:,} bytes", text)) from None
    except TimeoutError:
        raise UserError(_too_much(what, f"{SECONDS:g} s", text)) from None
    if "fault" in answer:
        raise UserError(f"{pattern!r} is no regular expression: {answer['fault']}")
    return answer["found"]


def _too_much(what: str, limit: str, text: str) -> str:
    return f"{what} takes more than {limit} on a text of {len(text):,} letters; nest no repetition in another"


@functools.cache
def _searcher() -> WorkerProcess:
    """The process that searches."""
    return WorkerProcess([sys.executable, "-m", "lib.system.pattern_worker", str(MEMORY_BYTES), str(SECONDS)], ROOT)
