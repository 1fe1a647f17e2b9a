"""Clients' labels for completions, in a file that trains as it is with train.loss=kto.

A completion can be labelled for a while after its end, by the key that asked for it. Until then it is in memory alone;
then its row is appended to serve.feedback, whole, and its text is forgotten.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import time
from collections import Counter, OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field

from lib.config import read_file
from lib.config.serve_settings import ServeSettings
from lib.errors import UserError
from lib.serve.openai_requests import JSON, BackendRequest, Kind, Part, RequestError
from lib.system import files

LABEL_BYTES = 4096  # of a request: an id and a label
OVERHEAD_BYTES = 1024  # of a completion in memory, beside its row
LONGEST_ROW = 2**24  # bytes
ROW_BEGINS = b'{"id": "'  # as `row_of` makes it
MINUTE = 60.0


class Label(Part):
    """POST /v1/feedback: whether the completion of this id is a good one."""

    id: Annotated[str, Field(min_length=1, max_length=200)]
    label: bool


@dataclass
class Completion:
    """A completion that may be labelled, or was.

    Args:
        row: as JSON, without its label; empty once it is written.
        ends: until when it may be labelled, by the feedback's clock.
    """

    owner: str
    ends: float
    row: bytes
    label: bool | None = None

    @property
    def bytes(self) -> int:
        return len(self.row) + OVERHEAD_BYTES


@dataclass
class _Labelled:
    """A label that an owner asked for: when, and how long the row is that it added to the file."""

    at: float
    bytes: int = 0


@dataclass
class Feedback:
    """The recent completions of a gateway, and the file of those that were labelled.

    Args:
        kind: which completions the model's training gives the tokens that they were served with: those of chats where
            it has a chat template, else those of texts.
        now: seconds, that never go back.
    """

    settings: ServeSettings
    path: Path
    kind: Kind
    now: Callable[[], float] = time.monotonic
    recent: OrderedDict[str, Completion] = field(default_factory=OrderedDict)  # by id, the oldest first
    held: dict[str, OrderedDict[str, None]] = field(default_factory=dict)  # their ids by owner, the oldest first
    held_bytes: Counter[str] = field(default_factory=Counter)  # by owner
    labelled: dict[str, deque[_Labelled]] = field(default_factory=dict)  # in the last minute, by owner
    writing: asyncio.Lock = field(default_factory=asyncio.Lock)

    def remember(self, owner: str, request: BackendRequest, answer: JSON) -> None:
        """Keeps a whole answer for as long as it may be labelled.

        One that was cut short (`max_tokens`) is not: training would teach the model to stop there.
        """
        choice = answer["choices"][0]
        if request.kind != self.kind or choice["finish_reason"] == "length":
            return
        row = row_of(request, answer)
        if row is None:
            return
        completion = Completion(owner, self.now() + self.settings.feedback_seconds, json.dumps(row).encode())
        id = str(answer["id"])
        self.recent[id] = completion
        self.held.setdefault(owner, OrderedDict())[id] = None
        self.held_bytes[owner] += completion.bytes
        self._forget()

    async def take(self, owner: str, given: Label) -> None:
        """Writes a label's row. The same label once more changes nothing.

        Raises:
            RequestError: the id is unknown to this key, or has the other label; too many labels; the disk is full.
        """
        self._forget()
        asked = self._limit(owner)
        completion = self.recent.get(given.id)
        if completion is None or completion.owner != owner:
            raise RequestError(
                404,
                f"no completion {given.id!r} can be labelled: it is unknown, older than serve.feedback_seconds="
                f"{self.settings.feedback_seconds:g}, not a {self.kind} completion, or was cut at max_tokens",
                "completion_not_found",
                "id",
            )
        async with self.writing:
            if completion.label is None:
                self._limit_bytes(owner, len(completion.row))
                row = json.loads(completion.row) | {"label": given.label, "time": round(time.time(), 3)}
                try:
                    await asyncio.to_thread(append, self.path, json.dumps(row, ensure_ascii=False) + "\n")
                except OSError as error:
                    reason = f"the label cannot be kept: {error.strerror}"
                    raise RequestError(503, reason, "feedback_not_written", retry_seconds=60) from None
                completion.label, asked.bytes = given.label, len(completion.row)
                if given.id in self.recent:  # not dropped meanwhile
                    self.held_bytes[owner] -= len(completion.row)
                completion.row = b""
        if completion.label != given.label:
            said = str(completion.label).lower()
            raise RequestError(409, f"completion {given.id!r} has the label {said} already", "already_labelled", "id")

    def _limit(self, owner: str) -> _Labelled:
        """Notes that this owner asks for one more."""
        most, now = self.settings.feedback_per_minute, self.now()
        recent = self.labelled.setdefault(owner, deque())
        while recent and recent[0].at <= now - MINUTE:
            recent.popleft()
        if len(recent) >= most:
            self._refuse(owner, f"serve.feedback_per_minute={most} labels")
        recent.append(_Labelled(now))
        return recent[-1]

    def _limit_bytes(self, owner: str, size: int) -> None:
        most, written = self.settings.feedback_bytes_per_minute, sum(one.bytes for one in self.labelled[owner])
        if written and written + size > most:
            self._refuse(owner, f"more than serve.feedback_bytes_per_minute={most}")

    def _refuse(self, owner: str, what: str) -> None:
        wait = max(1, round(self.labelled[owner][0].at + MINUTE - self.now()))
        message = f"{what} came in a minute; try again in {wait} s"
        raise RequestError(429, message, "rate_limit_exceeded", retry_seconds=wait)

    def _forget(self) -> None:
        """What is too old; and of too much the oldest of whoever has most."""
        while self.recent:
            id, oldest = next(iter(self.recent.items()))
            if oldest.ends > self.now():
                if self.held_bytes.total() <= self.settings.feedback_bytes:
                    return
                greedy = max(self.held_bytes, key=lambda owner: self.held_bytes[owner])
                id = next(iter(self.held[greedy]))
            self._drop(id)

    def _drop(self, id: str) -> None:
        one = self.recent.pop(id)
        del self.held[one.owner][id]
        self.held_bytes[one.owner] -= one.bytes
        if not self.held[one.owner]:
            del self.held[one.owner], self.held_bytes[one.owner]


def row_of(request: BackendRequest, answer: JSON) -> JSON | None:
    """A completion as a training record, without its label; None where nothing was answered."""
    asked, choice = request.body, answer["choices"][0]
    row: JSON = {"id": answer["id"], "model": request.model, "finish_reason": choice["finish_reason"]}
    if request.kind == "text":
        return row | {"prompt": asked["prompt"], "completion": choice["text"]} if choice["text"].strip() else None
    message: dict[str, Any] = {key: value for key, value in choice["message"].items() if value}
    if "reasoning" in message:  # as chat templates call it
        message["reasoning_content"] = message.pop("reasoning")
    if message.keys() == {"role"}:
        return None
    is_text = message.keys() == {"role", "content"}
    row |= {"prompt": asked["messages"], "completion": message["content"] if is_text else [message]}
    return row | ({"tools": asked["tools"]} if asked.get("tools") else {})


def open_file(path: Path) -> Path:
    """Makes sure that rows can be appended to a file, readable by its owner alone where it is new.

    A row that a killed gateway left half written goes, and a warning says so: nobody was told that it is kept.

    Raises:
        UserError: they cannot, or its last line has no end and is no row of ours.
    """
    read_file.require_regular(path, "serve.feedback")
    try:
        with os.fdopen(os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o600), "rb+", buffering=0) as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size - LONGEST_ROW))
            last = file.read(LONGEST_ROW).rpartition(b"\n")[2]
            if last.startswith(ROW_BEGINS) and not _is_json(last):
                file.truncate(size - len(last))
                what = f"the last {len(last):,} bytes were half a row, whose client got no answer; they are removed"
                print(f"warning: serve.feedback={path}: {what}", file=sys.stderr, flush=True)
                last = b""
    except OSError as error:
        raise UserError(f"serve.feedback={path} cannot be written: {error.strerror}") from None
    if last:
        raise UserError(f"serve.feedback={path}: its last line has no end; give it one, or name another file")
    return path


def _is_json(line: bytes) -> bool:
    try:
        json.loads(line)
    except (ValueError, RecursionError):
        return False
    return True


def append(path: Path, line: str) -> None:
    """Appends a line to a file, and flushes it to the disk; all of it or nothing.

    Raises:
        OSError: it cannot be written.
    """
    raw = line.encode()
    descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    try:
        size = os.fstat(descriptor).st_size
        try:
            written = 0
            while written < len(raw):
                written += os.write(descriptor, raw[written:])
            files.flush(descriptor)
        except OSError:
            os.ftruncate(descriptor, size)
            raise
    finally:
        os.close(descriptor)
