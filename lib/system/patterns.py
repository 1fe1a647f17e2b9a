"""Regular expressions that come from settings or files, searched within limits of time and memory.

Python's `re` cannot be interrupted: `(a+)+$` takes for ever on forty letters, and no other thread runs meanwhile. So a
process of its own searches (pattern_worker.py), and is ended when it takes too long. It starts with the first search,
and ends with this process.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import json
import os
import select
import subprocess
import sys
import threading
from pathlib import Path
from typing import IO

from lib.errors import UserError

SECONDS = 10.0  # for one search, which takes microseconds
MEMORY_BYTES = 2**30


def last_match(pattern: str, text: str) -> str | None:
    """The first group (the whole, where there is none) of a pattern's last match in a text of lines; None without one.

    Raises:
        UserError: it is no pattern, or takes more than SECONDS or MEMORY_BYTES.
    """
    found = _searcher().ask(pattern, text, is_full=False)
    return None if found is None else str(found)


def is_match(pattern: str, text: str) -> bool:
    """Whether a pattern matches all of a text.

    Raises:
        UserError: as `last_match`.
    """
    return bool(_searcher().ask(pattern, text, is_full=True))


class _Searcher:
    """The process that searches."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._owner = os.getpid()
        atexit.register(self._end)

    def ask(self, pattern: str, text: str, is_full: bool) -> object:
        with self._lock:
            if self._owner != os.getpid():  # a fork: its parent goes on with the other one
                self._process, self._owner = None, os.getpid()
            process = self._process = self._process or self._start()
            assert process.stdin is not None and process.stdout is not None
            try:
                process.stdin.write(json.dumps([pattern, text, is_full]).encode() + b"\n")
                process.stdin.flush()
                line = _line(process.stdout)
            except BrokenPipeError:
                line = b""
            if line is None or not line:
                self._end()
                limit = f"{SECONDS:g} s" if line is None else f"{MEMORY_BYTES / 1e9:.1f} GB"
                what = f"takes more than {limit} on a text of {len(text):,} letters; nest no repetition in another"
                raise UserError(f"the regular expression {pattern!r} {what}")
            answer = json.loads(line)
        if "fault" in answer:
            raise UserError(f"{pattern!r} is no regular expression: {answer['fault']}")
        return answer["found"]

    def _start(self) -> subprocess.Popen[bytes]:
        program = Path(__file__).with_name("pattern_worker.py")
        command = [sys.executable, "-S", "-E", str(program), str(MEMORY_BYTES)]  # -S -E: it is there in 20 ms
        return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)

    def _end(self) -> None:
        process, self._process = self._process, None
        if process is not None and self._owner == os.getpid():
            process.kill()
            with contextlib.suppress(OSError):
                process.communicate()


def _line(stream: IO[bytes]) -> bytes | None:
    """The next line; None where it does not come in time, empty where the process is gone."""
    ready, _, _ = select.select([stream], [], [], SECONDS)
    return stream.readline() if ready else None


@functools.cache
def _searcher() -> _Searcher:
    return _Searcher()
