"""Chunks of a file's rows, pulled by ranks at their own pace: each is done once, whoever does it, and kept on disk.

Rank 0 has the queue and the journal (work_journal.py); others reach it over TCP, where both ends prove that they know
the run's secret (lib/system/handshake.py) and a message of JSON goes each way for every chunk. When nothing is left to
begin, an idle rank begins what another has not finished, and the first result counts: a slow, stopped or dead rank
costs at most the chunk in its hands. Who asks meanwhile whether a chunk is still wanted can leave the one that another
has finished.
"""

from __future__ import annotations

import contextlib
import json
import secrets
import socket
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, TypedDict

import numpy as np

from lib.distributed.run_secret import run_secret
from lib.distributed.world import World
from lib.errors import UserError
from lib.evaluate.work_journal import Journal, Lines, opened_journal
from lib.system import handshake, network
from lib.system.mpi_and_blas import launch_environment

CONNECT_SECONDS = 10.0  # to one address, on machines that others keep busy
WAIT_SECONDS = 1.0  # for work, before a rank hears that there is none yet
PURPOSE = "the work queue"


class Queue(Protocol):
    """Where a rank gets its work."""

    def next(self, finished: int | None, lines: Lines) -> int | None:
        """Hands in a chunk's lines, and takes another chunk; None when all are done.

        Raises:
            UserError: some rank met a user's error, or the queue is gone.
        """

    def is_wanted(self, chunk: int) -> bool:
        """Whether nobody has handed in a chunk that this rank took."""

    def put(self, chunk: int, lines: Lines) -> None:
        """Hands in the lines of a chunk that the queue gave to nobody."""

    def fail(self, reason: str) -> None:
        """Tells all ranks of a user's error that this one met."""


# ---- The queue


class StillBusy(Exception):
    """Others work at all that is left, and nobody is done yet."""


class Dispatcher:
    """Which rank does what: the state behind the queue, for any number of threads.

    Args:
        report: called with chunks done and, by rank, how many it did, after each that counts.
        twice: whether an idle rank begins what another has not finished, and waits for the end of all chunks; else it
            is told at once that nothing is left to begin.
    """

    def __init__(
        self,
        journal: Journal,
        report: Callable[[int, dict[int, int]], None] = lambda done, by: None,
        twice: bool = True,
    ):
        self.journal, self.report, self.twice = journal, report, twice
        self.fresh: deque[int] = deque(np.flatnonzero(~journal.done).tolist())
        self.held: dict[int, list[int]] = {}  # chunk ➜ ranks that work at it, in the order in which they began
        self.by_rank: dict[int, int] = {}
        self.fault = ""
        self._changed = threading.Condition()

    @property
    def left(self) -> int:
        return len(self.fresh) + len(self.held)

    def next(
        self,
        rank: int,
        finished: int | None = None,
        lines: Lines = [],  # noqa: B006
        wait_seconds: float | None = None,
    ) -> int | None:
        """As Queue.next, for a rank. Waits while others work at all that is left, two at each.

        Raises:
            StillBusy: for `wait_seconds` nothing has changed.
        """
        with self._changed:
            if finished is not None and self.held.pop(finished, None) is not None:
                self._keep(rank, finished, lines)
            while True:
                if self.fault:
                    raise UserError(self.fault)
                chunk = self._choose(rank)
                if chunk is not None:
                    self.held.setdefault(chunk, []).append(rank)
                    return chunk
                if not self.left or not self.twice:
                    return None
                if not self._changed.wait(wait_seconds):
                    raise StillBusy

    def put(self, rank: int, chunk: int, lines: Lines) -> None:
        """Takes the lines of a chunk that nobody was told to make; the first result counts here, too."""
        with self._changed:
            if chunk in self.fresh:
                self.fresh.remove(chunk)
                self._keep(rank, chunk, lines)

    def _keep(self, rank: int, chunk: int, lines: Lines) -> None:
        try:
            self.journal.put(chunk, lines)
        except OSError as error:
            self.fault = f"{self.journal.path}: {error.strerror}; free some space, and start again"
        self.by_rank[rank] = self.by_rank.get(rank, 0) + 1
        self.report(int(self.journal.done.sum()), dict(self.by_rank))
        self._changed.notify_all()

    def is_wanted(self, chunk: int) -> bool:
        """Whether somebody works at a chunk, and nobody has finished it."""
        with self._changed:
            return chunk in self.held

    def _choose(self, rank: int) -> int | None:
        if self.fresh:
            return self.fresh.popleft()
        if not self.twice:
            return None
        return next((chunk for chunk, ranks in self.held.items() if len(ranks) < 2 and rank not in ranks), None)

    def lose(self, rank: int) -> None:
        """A rank is gone: what only it worked at is to be done again, first of all."""
        with self._changed:
            for chunk, ranks in list(self.held.items()):
                if rank in ranks:
                    ranks.remove(rank)
                if not ranks:
                    del self.held[chunk]
                    self.fresh.appendleft(chunk)
            self._changed.notify_all()

    def fail(self, reason: str) -> None:
        with self._changed:
            self.fault = self.fault or reason
            self._changed.notify_all()


class Local:
    """The queue, in the process that has it."""

    def __init__(self, dispatcher: Dispatcher, rank: int = 0):
        self.dispatcher, self.rank = dispatcher, rank

    def next(self, finished: int | None, lines: Lines) -> int | None:
        return self.dispatcher.next(self.rank, finished, lines)

    def is_wanted(self, chunk: int) -> bool:
        return self.dispatcher.is_wanted(chunk)

    def put(self, chunk: int, lines: Lines) -> None:
        self.dispatcher.put(self.rank, chunk, lines)

    def fail(self, reason: str) -> None:
        self.dispatcher.fail(reason)


# ---- Over the network


class Address(TypedDict):
    """Where the queue is, for other processes."""

    port: int
    secret: str  # in hexadecimal digits; "" where the run's ranks have one already
    hosts: list[str]


class Request(TypedDict, total=False):
    """A message to the queue: first who asks, then what it finished, or met."""

    rank: int
    finished: int | None
    lines: Lines
    fault: str
    wanted: int  # is this chunk?
    put: int  # the chunk of these lines


class Answer(TypedDict, total=False):
    """A message from the queue: a chunk, or what some rank met."""

    chunk: int | None
    fault: str
    is_wanted: bool
    is_busy: bool  # nothing to do now; ask again


class Server:
    """Lets other processes at the queue. Only those that know the secret are heard."""

    def __init__(self, dispatcher: Dispatcher, everywhere: bool):
        self.dispatcher = dispatcher
        self._told = "" if run_secret() else secrets.token_hex(32)
        listening = socket.create_server(("" if everywhere else "127.0.0.1", 0))
        self._listener = handshake.Listener(listening, _secret(self._told), PURPOSE)
        self._connections: list[threading.Thread] = []
        threading.Thread(target=self._accept, name="queue", daemon=True).start()

    @property
    def address(self) -> Address:
        """What a Remote needs to know."""
        return {"port": self._listener.port, "secret": self._told, "hosts": network.own_addresses()}

    def _accept(self) -> None:
        with contextlib.suppress(OSError):  # closed
            while True:
                channel = self._listener.accept()
                thread = threading.Thread(target=self._serve, args=(channel,), name="queue", daemon=True)
                self._connections.append(thread)
                thread.start()

    def _serve(self, channel: handshake.Channel) -> None:
        rank, connection = None, channel.connection
        # A host that is off says nothing: the system notices within a minute, and its chunk goes to another.
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        idle = "TCP_KEEPIDLE" if hasattr(socket, "TCP_KEEPIDLE") else "TCP_KEEPALIVE"  # macOS' name for it
        for name, value in ((idle, 10), ("TCP_KEEPINTVL", 5), ("TCP_KEEPCNT", 4)):
            if hasattr(socket, name):
                connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError), connection:
            rank = int(_received(channel)["rank"])
            channel.send(b"{}")
            while True:
                asked = _received(channel)
                try:
                    answer = self._answer(rank, asked)
                except UserError as error:
                    answer = {"fault": str(error)}
                channel.send(json.dumps(answer).encode())
        if rank is not None:
            self.dispatcher.lose(rank)

    def _answer(self, rank: int, asked: Request) -> Answer:
        if "wanted" in asked:
            return {"is_wanted": self.dispatcher.is_wanted(asked["wanted"])}
        if "put" in asked:
            self.dispatcher.put(rank, asked["put"], asked["lines"])
            return {}
        if "fault" in asked:
            self.dispatcher.fail(asked["fault"])
        try:
            return {"chunk": self.dispatcher.next(rank, asked.get("finished"), asked.get("lines", []), WAIT_SECONDS)}
        except StillBusy:  # an answer nevertheless: a rank that hears nothing takes this one for gone
            return {"is_busy": True}

    def close(self, seconds: float) -> None:
        """Ends when all others have been told that there is nothing left, or after so many seconds."""
        deadline = time.monotonic() + seconds
        for thread in [thread for thread in self._connections if thread.is_alive()]:
            thread.join(max(0.0, deadline - time.monotonic()))
        self._listener.close()


class Remote:
    """The queue, from another process. Once there is one, the queue's end waits for it.

    Raises:
        UserError: rank 0 is not reached.
    """

    def __init__(self, address: Address, rank: int, timeout_seconds: float):
        secret = _secret(address["secret"])
        for host in address["hosts"]:
            with contextlib.suppress(OSError):
                self._channel = handshake.connect((host, address["port"]), secret, PURPOSE, CONNECT_SECONDS)
                self._channel.connection.settimeout(timeout_seconds)
                self._channel.send(json.dumps({"rank": rank}).encode())
                self._channel.receive()
                return
        raise UserError(
            f"rank {rank} reaches rank 0 at none of {', '.join(address['hosts'])}, port {address['port']}; "
            "open the firewall between them"
        )

    def next(self, finished: int | None, lines: Lines) -> int | None:
        answer = self._ask({"finished": finished, "lines": lines})
        while answer.get("is_busy"):
            answer = self._ask({"finished": None})
        if "fault" in answer:
            raise UserError(answer["fault"])
        return answer["chunk"]

    def is_wanted(self, chunk: int) -> bool:
        return self._ask({"wanted": chunk})["is_wanted"]

    def put(self, chunk: int, lines: Lines) -> None:
        self._ask({"put": chunk, "lines": lines})

    def fail(self, reason: str) -> None:
        self._ask({"fault": reason})

    def close(self) -> None:
        """Tells rank 0 that nothing more comes."""
        self._channel.close()

    def _ask(self, request: Request) -> Answer:
        try:
            self._channel.send(json.dumps(request).encode())
            answer: Answer = json.loads(self._channel.receive())
            return answer
        except (OSError, ValueError):
            raise UserError("rank 0, which has the queue, is gone; start again, what is finished is kept") from None


def _received(channel: handshake.Channel) -> Request:
    request: Request = json.loads(channel.receive())
    return request


def _secret(told: str) -> bytes:
    """What the queue and its ranks prove themselves by: the run's secret; where nobody gave it one, the queue's own."""
    return handshake.derived(bytes.fromhex(told) or run_secret() or b"", PURPOSE)


# ---- Of all ranks of a world


@dataclass(frozen=True)
class SharedQueue:
    """A queue that all ranks of a world take from.

    Args:
        dispatcher: on rank 0.
        server: there, where there are other ranks.
    """

    queue: Queue
    dispatcher: Dispatcher | None
    server: Server | None

    @classmethod
    def open(cls, out: Path, key: str, chunks: int, world: World, twice: bool = True) -> SharedQueue:
        """The queue of what an output lacks. All ranks enter; from then on none waits for another in a collective.

        Raises:
            AgreedError: the journal is of another key, or cannot be written, or rank 0 is not reached.
        """
        server = dispatcher = None
        with world.agreeing(f"opening {out}"):
            if world.rank == 0:
                dispatcher = Dispatcher(opened_journal(out, key, chunks), twice=twice)
                is_spread = launch_environment().local_size < world.size
                server = Server(dispatcher, everywhere=is_spread) if world.size > 1 else None
        address = json.loads(world.broadcast_text(json.dumps(server.address if server else None)))
        with world.agreeing("reaching the work queue"):  # rank 0 may be done, and gone, before another has come
            queue = Local(dispatcher) if dispatcher else Remote(address, world.rank, world.timeout_seconds)
        return cls(queue, dispatcher, server)

    def close(self, seconds: float) -> None:
        """Lets go of it; what is finished stays in the journal. seconds: the longest wait for the other ranks."""
        if isinstance(self.queue, Remote):
            self.queue.close()
        if self.server is not None:
            self.server.close(seconds)
        if self.dispatcher is not None:
            self.dispatcher.journal.close()


def work(queue: Queue, do: Callable[[int], Lines | None]) -> None:
    """Takes chunks and does them until there are none. do: None where it left a chunk that was not wanted any more.

    Raises:
        UserError: here, or on another rank.
    """
    chunk = queue.next(None, [])
    while chunk is not None:
        try:
            lines = do(chunk)
        except UserError as error:
            queue.fail(str(error))
            raise
        chunk = queue.next(None if lines is None else chunk, lines or [])
