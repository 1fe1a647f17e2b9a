"""Clients' labels for completions, in a file that trains as it is with train.loss=kto.

The key that asked for a completion can label it for a while after its end. Until then it is in memory alone.
"""

from __future__ import annotations

import json
import os
import time
from collections import OrderedDict
from dataclasses import dataclass
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


@dataclass
class LabelledCompletion:
    """A completion that may be labelled until `ends`, or was: `row` is empty once it is written."""

    owner: str
    ends: float
    row: JSON
    label: bool | None = None


class Feedback:
    """The recent completions of a server, and the file of those that were labelled.

    Args:
        seconds: for which a completion may be labelled after its end.

    Raises:
        UserError: the file cannot be written.
    """

    def __init__(self, path: Path, seconds: float) -> None:
        self.path, self.seconds = path, seconds
        self.recent: OrderedDict[str, LabelledCompletion] = OrderedDict()
        try:
            os.close(os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o600))
        except OSError as error:
            raise UserError(f"serve.feedback={path} cannot be written: {error.strerror}") from None

    def remember(self, owner: str, row: JSON) -> None:
        """Keeps a training record for as long as it may be labelled."""
        self.recent[row["id"]] = LabelledCompletion(owner, time.monotonic() + self.seconds, row)
        while len(self.recent) > MOST_COMPLETIONS or next(iter(self.recent.values())).ends < time.monotonic():
            self.recent.popitem(last=False)

    def take(self, owner: str, given: Label) -> None:
        """Writes a label's row. The same label again changes nothing.

        Raises:
            RequestError: the id is unknown to this key, or has the other label; the disk is full.
        """
        completion = self.recent.get(given.id)
        if completion is None or completion.owner != owner or completion.ends < time.monotonic():
            why = f"it is unknown, older than serve.feedback_seconds={self.seconds:g}, or was cut at max_tokens"
            message = f"no completion {given.id!r} can be labelled: {why}"
            raise RequestError(404, message, "completion_not_found", "id")
        if completion.label is None:
            row = completion.row | {"label": given.label, "time": round(time.time(), 3)}
            try:
                append(self.path, (json.dumps(row, ensure_ascii=False) + "\n").encode())
            except OSError as error:
                reason = f"the label cannot be kept: {error.strerror}"
                raise RequestError(503, reason, "feedback_not_written", retry=60) from None
            completion.label, completion.row = given.label, {}
        if completion.label != given.label:
            message = f"completion {given.id!r} has the label {str(completion.label).lower()} already"
            raise RequestError(409, message, "already_labelled", "id")


def append(path: Path, line: bytes) -> None:
    """Appends a line to a file and flushes it to the disk; all of it or nothing.

    Raises:
        OSError: it cannot be written.
    """
    with path.open("ab", buffering=0) as file:
        size = file.tell()
        try:
            if file.write(line) != len(line):
                raise OSError(28, "No space left on device")
            files.flush(file.fileno())
        except OSError:
            file.truncate(size)
            raise
