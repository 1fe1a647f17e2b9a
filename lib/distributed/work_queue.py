"""A queue of items, served by rank 0 and taken by all ranks at their own pace, with its results on the disk.

Rank 0 keeps the journal, OUT.partial: one JSON line for each finished item. A run that was killed and starts again does
only what is missing, so each item is in the output once. When nothing is left to begin, an idle rank repeats an item
that another one has not finished, and the first result counts: a slow, stopped or dead rank costs at most its item.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from lib.distributed.connection import Channel, Listener, connect, new_key, run_key
from lib.distributed.world import World
from lib.errors import UserError
from lib.system import files
from lib.system.network import own_addresses

WAIT_SECONDS = 1.0  # that rank 0 holds a request back while there is nothing to do
CONNECT_SECONDS, CONNECT_TRIES = 1.0, 4  # for each of rank 0's addresses

Lines = list[str]  # of the output, without their line feeds
Answer = dict[str, Any]  # to a request: item, is_waiting, is_wanted or fault


class Journal:
    """The finished items of an output, in OUT.partial: a line that says of what they are, then one line an item."""

    def __init__(self, out: Path, key: str, count: int):
        """Opens the journal of `count` items, or begins it; a last line that was cut off is removed. key: a digest of
        model, data and settings. Raises UserError: the output exists, or the journal is of another key; OSError."""
        self.path = out.with_name(f"{out.name}.partial")
        self.offsets = [-1] * count  # of each item's line, in bytes; -1 while it is missing
        header = json.dumps({"key": key, "count": count}).encode() + b"\n"
        if not self.path.exists():
            files.require_absent(out)
        out.parent.mkdir(parents=True, exist_ok=True)
        self._file = self.path.open("a+b", buffering=0)  # nothing of a write that failed is left in a buffer
        with self.path.open("rb") as file:
            first, end = file.readline(len(header)), len(header)
            if not header.startswith(first):
                raise UserError(f"{self.path} is of another model, data or settings; remove it, or take another output")
            if first != header:
                self._file.truncate(0)
                self._append(header)
            for line in file if first == header else ():
                if line.endswith(b"\n"):
                    try:
                        self.offsets[json.loads(line)["item"]] = end
                    except (ValueError, KeyError, IndexError, TypeError) as error:
                        raise UserError(f"{self.path}: broken at byte {end} ({error!r}); remove it") from None
                    end += len(line)
        self._file.truncate(end)
        if out.exists() and self.missing:
            raise UserError(f"{out} is there already, and an unfinished {self.path.name}; remove one of them")

    @property
    def missing(self) -> list[int]:
        """Items that are not finished."""
        return [item for item, offset in enumerate(self.offsets) if offset < 0]

    def add(self, item: int, lines: Lines) -> None:
        """Stores an item's lines, the first time. Raises OSError: the disk is full."""
        if self.offsets[item] < 0:
            self.offsets[item] = self._append(json.dumps({"item": item, "lines": lines}).encode() + b"\n")

    def lines(self) -> Iterator[str]:
        """The lines of all items, in the items' order."""
        with self.path.open("rb") as file:
            for offset in self.offsets:
                file.seek(offset)
                yield from json.loads(file.readline())["lines"]

    def finish(self, out: Path) -> None:
        """Writes the output in the order of the items, whole or not at all, and removes the journal."""
        with files.replacing(out) as whole:
            whole.writelines(line.encode() + b"\n" for line in self.lines())
        self.close()
        self.path.unlink()

    def close(self) -> None:
        self._file.close()

    def _append(self, text: bytes) -> int:
        """Returns where the text begins."""
        begin = self._file.seek(0, os.SEEK_END)
        try:
            while text:  # a disk that is nearly full takes a part
                text = text[self._file.write(text) :]
        except OSError:
            self._file.truncate(begin)  # a half line would spoil the next one
            raise
        return begin


class WorkQueue:
    """The queue as one rank uses it: `take` an item, do it, `finish` it. Its methods may be called from any thread."""

    def take(self) -> int | None:
        """The next item; None when all are finished. Waits while other ranks do the last ones; UserError where a rank
        failed, or rank 0 left."""
        while "is_waiting" in (answer := self._request(kind="take")):
            pass
        if "fault" in answer:
            raise UserError(answer["fault"])
        return answer["item"]

    def finish(self, item: int, lines: Lines) -> None:
        """Hands in an item's lines; the first result of an item counts."""
        self._request(kind="finish", item=item, lines=lines)

    def is_wanted(self, item: int) -> bool:
        """Whether no rank has finished an item yet."""
        return bool(self._request(kind="wanted", item=item)["is_wanted"])

    def fail(self, reason: str) -> None:
        """Ends the work of all ranks: their next `take` raises a UserError with this reason."""
        self._request(kind="fail", reason=reason)

    def close(self, timeout_seconds: float) -> None:
        """Leaves the queue; rank 0 waits so long for the others to leave."""
        raise NotImplementedError

    def _request(self, **request: Any) -> Answer:
        raise NotImplementedError


class ServedQueue(WorkQueue):
    """Rank 0's queue, which serves other ranks over TCP. report: takes the number of finished items, and
    those of each rank."""

    def __init__(self, journal: Journal):
        self.journal = journal
        self.report: Callable[[int, dict[int, int]], None] = lambda done, by_rank: None
        self.fresh: deque[int] = deque(journal.missing)
        self.begun: dict[int, set[int]] = {}  # item ➜ ranks that work at it
        self.finished_by: Counter[int] = Counter()
        self.fault = ""
        self.listener: Listener | None = None
        self._peers = 0
        self._changed = threading.Condition()

    def listen(self, host: str, key: bytes) -> int:
        """Begins to serve; the port."""
        self.listener = Listener(host, 0, key, self._serve)
        return self.listener.address[1]

    def close(self, timeout_seconds: float) -> None:
        with self._changed:
            self._changed.wait_for(lambda: not self._peers, timeout_seconds)
        if self.listener is not None:
            self.listener.close()
        self.journal.close()

    def _request(self, **request: Any) -> Answer:
        return self._answer(0, **request)

    def _serve(self, channel: Channel) -> None:
        rank = int((channel.receive() or {})["rank"])
        with self._changed:
            self._peers += 1
        try:
            with contextlib.suppress(EOFError, ConnectionError):
                channel.send({})
                while (request := channel.receive()) is not None:
                    channel.send(self._answer(rank, **request))
        finally:
            with self._changed:  # what only this rank worked at is done again, before all else
                self._peers -= 1
                for item in [item for item, ranks in self.begun.items() if ranks == {rank}]:
                    del self.begun[item]
                    self.fresh.appendleft(item)
                for ranks in self.begun.values():
                    ranks.discard(rank)
                self._changed.notify_all()

    def _answer(self, rank: int, kind: str, item: int = 0, lines: Sequence[str] = (), reason: str = "") -> Answer:
        with self._changed:
            if kind == "take":
                return self._take(rank, time.monotonic() + WAIT_SECONDS)
            if kind == "fail":
                self.fault = self.fault or reason
            is_wanted = self.journal.offsets[item] < 0
            if kind == "finish" and is_wanted:
                try:
                    self.journal.add(item, list(lines))
                except OSError as error:
                    self.fault = f"{self.journal.path}: {error.strerror}; free some space, and start again"
                self.begun.pop(item, None)
                if item in self.fresh:
                    self.fresh.remove(item)
                self.finished_by[rank] += 1
                self.report(len(self.journal.offsets) - len(self.journal.missing), dict(self.finished_by))
            self._changed.notify_all()
            return {"is_wanted": is_wanted}

    def _take(self, rank: int, deadline: float) -> Answer:
        """An item for a rank, None where none is left, or that it has to ask again."""
        while not self.fault:
            again = (item for item, ranks in self.begun.items() if len(ranks) < 2 and rank not in ranks)
            item = self.fresh.popleft() if self.fresh else next(again, None)
            if item is not None:
                self.begun.setdefault(item, set()).add(rank)
            if item is not None or not self.begun:
                return {"item": item}
            if not self._changed.wait(deadline - time.monotonic()):
                return {"is_waiting": True}
        return {"fault": self.fault}


class RemoteQueue(WorkQueue):
    """The queue from another rank. Raises UserError: rank 0 is not reached."""

    def __init__(self, addresses: list[str], port: int, key: bytes, rank: int, timeout_seconds: float):
        self.timeout_seconds = timeout_seconds
        self._lock = threading.Lock()
        for address in addresses * CONNECT_TRIES:
            with contextlib.suppress(ConnectionError):
                self._channel = connect(address, port, key, CONNECT_SECONDS)
                self._request(rank=rank)
                return
        where = f"at none of {', '.join(addresses)}, port {port}; open the firewall between them"
        raise UserError(f"rank {rank} on {socket.gethostname()} reaches rank 0 {where}")

    def close(self, timeout_seconds: float) -> None:
        self._channel.close()

    def _request(self, **request: Any) -> Answer:
        with self._lock, contextlib.suppress(EOFError, ConnectionError):
            self._channel.send(request)
            answer = self._channel.receive(self.timeout_seconds)
            if answer is not None:
                return answer
        raise UserError("rank 0, which has the work queue, left; start again: finished work stays")


def open_queue(world: World, out: Path, key: str, count: int) -> WorkQueue:
    """The queue of what an output lacks. All ranks call it; afterwards none waits for another in a collective. Raises
    AgreedError: the journal is of another key or cannot be written, or rank 0 is not reached."""
    served: ServedQueue | None = None
    hosts, port, secret = list[str](), 0, run_key() or new_key()
    with world.agreeing(f"opening {out}"):
        if world.rank == 0:
            served = ServedQueue(Journal(out, key, count))
            if world.size > 1:
                hosts, port = own_addresses()[::-1], served.listen("", secret)
    hosts, port, sent = world.broadcast_value([hosts, port, "" if run_key() else secret.decode()])
    with world.agreeing("reaching the work queue"):
        return served or RemoteQueue(hosts, port, run_key() or sent.encode(), world.rank, world.timeout_seconds)


def work(queue: WorkQueue, do: Callable[[int], Lines | None]) -> None:
    """Takes items and does them until all are finished. do: gives None for an item that it left unfinished. Raises
    UserError: here, or on another rank."""
    while (item := queue.take()) is not None:
        try:
            lines = do(item)
        except UserError as error:
            queue.fail(str(error))
            raise
        if lines is not None:
            queue.finish(item, lines)
