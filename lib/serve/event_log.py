"""What the server records: one JSON object a line on standard output."""

from __future__ import annotations

import contextlib
import json
import logging
import time
from collections.abc import Callable
from typing import Any

Log = Callable[..., None]  # a kind, and the record's fields by name


def log(kind: str, **fields: Any) -> None:
    """One record, as a line of JSON on standard output; where its disk is full or its reader gone, serving goes on."""
    with contextlib.suppress(OSError):
        print(json.dumps({"kind": kind, "time": round(time.time(), 3), **fields}, default=str), flush=True)


class LibraryRecords(logging.Handler):
    """The warnings of libraries, as records of ours."""

    def emit(self, record: logging.LogRecord) -> None:
        fault = record.exc_info and record.exc_info[1]
        log(
            "warning",
            logger=record.name,
            message=record.getMessage().strip(),
            **({"error": repr(fault)} if fault else {}),
        )
