"""What a rank says of itself while it works: that it lives, and what it waits for.

The launcher's agent on this host listens at a Unix socket (in `TANDEM_AGENT_FOLDER`; under mpirun in `TANDEM_AGENT` and
this machine's own name). A thread of its own tells it, at least twice a second, which wait for other ranks goes on, and
which pass through the model. So a rank that was stopped, one that is late, one that hangs and one that waits for a dead
peer look different from outside.

Where the agent is gone, at the start or later, this process ends: nobody would end it any more, and it would keep the
run's folder from those who go on. Without the agent's folder nothing is sent: the variable is of a launch that is over.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import socket
import threading
import time
from collections.abc import Iterator
from typing import Any, TypedDict, Unpack

from lib.system import network

ADDRESS = "TANDEM_AGENT"
FOLDER = "TANDEM_AGENT_FOLDER"
SECONDS = 0.5  # the most between two words of it


class Reached(TypedDict):
    """How far a disk's newest checkpoint is."""

    step: int
    resume_ids: list[str]  # of every resume before it: a checkpoint without them is of a history that was left


Heard = dict[str, Any]


class Facts(TypedDict, total=False):
    """What a rank says of itself; nothing where nobody listens."""

    rank: int
    pid: int
    waiting: str | None  # for what, now
    since: float  # by time.monotonic()
    passing: str | None  # what pass through the model goes on
    passing_since: float
    passes: int  # that it is long
    run: str  # the folder to resume from
    checkpoint: int  # its newest step
    micro_batch_size: int
    gradient_checkpointing: bool
    machine: str
    ended: bool  # by itself: nobody killed it
    diverged: str  # why it ends, where another start would end the same
    newer: Reached  # what this disk alone has: it ends, since the first host's disk would undo it
    refused: bool  # it met an error of what its host was given or has, which all ranks end with
    heard: dict[int, Heard]  # of neighbours in a ring, by rank


NO_PASS: Facts = {"passing": None, "passing_since": 0.0, "passes": 1}

_facts: Facts = {}
_ended = threading.Event()
_changed = threading.Event()


def agent_folder() -> str:
    """The folder of this host's agent, with the host's name: hosts may share /tmp, and mpirun's variables.

    The network may give this machine another name while its agent lives: what the agent starts itself it tells.
    """
    return os.environ.get(FOLDER) or f"{os.environ[ADDRESS]}-{network.own_name()}"


def start(rank: int) -> None:
    """Begins to beat, if a launcher's agent listens."""
    if ADDRESS not in os.environ or _facts:
        return
    _facts.update({"rank": rank, "pid": os.getpid(), "waiting": None, "since": time.monotonic(), **NO_PASS})
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        listener.connect(f"{agent_folder()}/agent")
    except ConnectionRefusedError:  # it was killed, and had no time to remove its folder
        os._exit(1)
    except OSError:
        listener.close()
        return
    thread = threading.Thread(target=_beat, args=(listener,), name="heartbeat", daemon=True)
    thread.start()

    def end() -> None:  # a thread that lives on would spoil the exit status under mpirun
        _facts["ended"] = True
        _ended.set()
        _changed.set()
        thread.join(2)

    atexit.register(end)


def tell(**facts: Unpack[Facts]) -> None:
    """Adds to what is said, at once."""
    if _facts:
        _facts.update(facts)
        _changed.set()


@contextlib.contextmanager
def waiting(what: str) -> Iterator[None]:
    """Says that this rank waits for others while the block runs."""
    if _facts:
        _facts.update({"waiting": what, "since": time.monotonic()})
    try:
        yield
    finally:
        if _facts:
            _facts.update({"waiting": None, "since": time.monotonic()})


@contextlib.contextmanager
def passing(what: str, passes: int = 1) -> Iterator[None]:
    """Says that this rank computes while the block runs, which is so many passes long: without end, it hangs."""
    if _facts:
        _facts.update({"passing": what, "passing_since": time.monotonic(), "passes": passes})
    try:
        yield
    finally:
        if _facts:
            _facts.update(NO_PASS)


def _beat(listener: socket.socket) -> None:
    heard: dict[int, Heard] = {}
    try:
        with listener:
            listener.sendall(b'{"kind": "beat"}\n')
            while True:
                facts, now = _facts.copy(), time.monotonic()
                seconds = {"seconds": now - facts.pop("since"), "passing_seconds": now - facts.pop("passing_since")}
                listener.sendall(json.dumps({**facts, **seconds, "heard": heard}).encode() + b"\n")
                if _ended.is_set():
                    return
                _changed.wait(SECONDS)
                _changed.clear()
    except OSError:  # the agent is gone
        if not _ended.is_set():
            os._exit(1)
