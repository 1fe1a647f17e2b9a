"""Clients' labels for completions, in a file that trains as it is with train.loss=kto.

The key that asked for a completion can label it while it is among the newest. Until then it is in memory alone.
"""

from __future__ import annotations

import json
import os
import time
from collections import OrderedDict
from pathlib import Path
from typing import Annotated

from pydantic import Field

from lib.errors import UserError
from lib.serve.requests import JSON, RequestError, RequestPart
from lib.system import files

MOST_COMPLETIONS = 10_000  # in memory; the oldest go first


class Label(RequestPart):
    """POST /v1/feedback: whether the completion of this id is a good one."""

    id: Annotated[str, Field(min_length=1, max_length=200)]
    label: bool


class Feedback:
    """The recent completions of a server, and the file of those that were labelled. Raises UserError: the file cannot
    be written."""

    def __init__(self, path: Path) -> None:
        self.recent: OrderedDict[tuple[str, str], JSON | bool] = OrderedDict()  # training record or label, by owner, id
        try:
            self._file = os.fdopen(os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o600), "ab", buffering=0)
        except OSError as error:
            raise UserError(f"serve.feedback={path} cannot be written: {error.strerror}") from None

    def remember(self, owner: str, row: JSON) -> None:
        """Keeps a training record for as long as it may be labelled."""
        self.recent[owner, row["id"]] = row
        if len(self.recent) > MOST_COMPLETIONS:
            self.recent.popitem(last=False)

    def take(self, owner: str, label: Label) -> None:
        """Writes a label's row, all of it or nothing. The same label again changes nothing. Raises RequestError: the id
        is unknown to this key, or has the other label; the disk is full."""
        stored = self.recent.get((owner, label.id))
        if stored is None:
            message = f"no completion {label.id!r} can be labelled: it is unknown, too old, or was cut at max_tokens"
            raise RequestError(404, message, "completion_not_found", "id")
        if isinstance(stored, bool):
            if stored != label.label:
                message = f"completion {label.id!r} has the label {str(stored).lower()} already"
                raise RequestError(409, message, "already_labelled", "id")
            return
        row = stored | {"label": label.label, "time": round(time.time(), 3)}
        line, size = f"{json.dumps(row, ensure_ascii=False)}\n".encode(), os.fstat(self._file.fileno()).st_size
        try:
            if self._file.write(line) != len(line):
                raise OSError(28, "No space left on device")
            files.flush(self._file.fileno())
        except OSError as error:
            self._file.truncate(size)
            raise RequestError(503, f"the label cannot be kept: {error.strerror}", "feedback_not_written") from None
        self.recent[owner, label.id] = label.label
