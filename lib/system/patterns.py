"""Regular expressions that come from settings or files, searched within limits of time and memory.

Python's `re` cannot be interrupted: `(a+)+$` takes for ever on forty letters, and no other thread runs meanwhile. So a
process of its own searches (pattern_worker.py), and is ended when it takes too long.
"""

from __future__ import annotations

import functools
import json
import sys
from pathlib import Path

from lib.errors import UserError
from lib.system.worker_process import WorkerProcess

SECONDS = 10.0  # for one search, which takes microseconds
MEMORY_BYTES = 2**30


def last_match(pattern: str, text: str) -> str | None:
    """The first group (the whole, where there is none) of a pattern's last match in a text of lines; None without one.

    Raises:
        UserError: it is no pattern, or takes more than SECONDS or MEMORY_BYTES.
    """
    found = _found(pattern, text, is_full=False)
    return None if found is None else str(found)


def is_match(pattern: str, text: str) -> bool:
    """Whether a pattern matches all of a text.

    Raises:
        UserError: as `last_match`.
    """
    return bool(_found(pattern, text, is_full=True))


def _found(pattern: str, text: str, is_full: bool) -> object:
    try:
        answer = _searcher().ask(json.dumps([pattern, text, is_full]).encode(), SECONDS)
    except (TimeoutError, EOFError) as error:
        limit = f"{SECONDS:g} s" if isinstance(error, TimeoutError) else f"{MEMORY_BYTES / 1e9:.1f} GB"
        what = f"takes more than {limit} on a text of {len(text):,} letters; nest no repetition in another"
        raise UserError(f"the regular expression {pattern!r} {what}") from None
    if "fault" in answer:
        raise UserError(f"{pattern!r} is no regular expression: {answer['fault']}")
    return answer["found"]


@functools.cache
def _searcher() -> WorkerProcess:
    """The process that searches. -S -E: it is there in 20 ms."""
    program = Path(__file__).with_name("pattern_worker.py")
    return WorkerProcess([sys.executable, "-S", "-E", str(program), str(MEMORY_BYTES)])
