"""What the server records: one JSON object a line on standard output."""

from __future__ import annotations

import contextlib
import json
import logging
import time
from collections import OrderedDict
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any

Log = Callable[..., None]  # a kind, and the record's fields by name
MOST_A_SECOND = 20  # records of a sort that costs a client nothing
MOST_TOGETHER = 100  # the same of several sorts together
REMEMBERED = 4096  # sorts


def log(kind: str, **fields: Any) -> None:
    """One record, as a line of JSON on standard output; where its disk is full or its reader gone, serving goes on."""
    with contextlib.suppress(OSError):
        print(json.dumps({"kind": kind, "time": round(time.time(), 3), **fields}, default=str), flush=True)


@dataclass
class _Sort:
    """The records of a sort: when the second began that is counted, and how many were written in it, and left out."""

    since: float
    written: int = 0
    omitted: int = 0


class SparingLog:
    """A log of what a client can cause for nothing, as often as it likes: so many records in a second.

    The next one that is written says how many were left out (`omitted`); the metrics count them all.
    """

    def __init__(self, log: Log, clock: Callable[[], float] = time.monotonic):
        self._log, self._clock = log, clock
        self._sorts: OrderedDict[Hashable, _Sort] = OrderedDict()

    def __call__(self, sort: Hashable, kind: str, together: Hashable = None, **fields: Any) -> None:
        """Writes a record, or counts it. together: what all sorts are of that anybody may make more of."""
        one, all_of_these = self._of(sort), self._of(together) if together is not None else None
        if one.written >= MOST_A_SECOND or (all_of_these is not None and all_of_these.written >= MOST_TOGETHER):
            one.omitted += 1
            return
        self._log(kind, **fields, **({"omitted": one.omitted} if one.omitted else {}))
        one.written, one.omitted = one.written + 1, 0
        if all_of_these is not None:
            all_of_these.written += 1

    def _of(self, sort: Hashable) -> _Sort:
        now = self._clock()
        one = self._sorts.pop(sort, None) or _Sort(now)
        self._sorts[sort] = one
        if len(self._sorts) > REMEMBERED:
            self._sorts.popitem(last=False)
        if now - one.since >= 1:
            one.since, one.written = now, 0
        return one


class LibraryRecords(logging.Handler):
    """The warnings of libraries, as records of ours."""

    def __init__(self) -> None:
        super().__init__()
        self._log = SparingLog(log)

    def emit(self, record: logging.LogRecord) -> None:
        fault = record.exc_info and record.exc_info[1]
        self._log(
            (record.name, record.msg),
            "warning",
            logger=record.name,
            message=record.getMessage().strip(),
            **({"error": repr(fault)} if fault else {}),
        )
