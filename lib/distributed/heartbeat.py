"""What a rank says of itself while it works: that it lives, and what it waits for.

The launcher's agent on this host listens at a Unix socket (in `TANDEM_AGENT` and this machine's own name). A thread of its own tells it, twice a second,
how many waits for other ranks are over, which one goes on, and which pass through the model, so that a rank that was stopped,
one that is late, one that hangs and one that waits for a dead peer look different from outside. Where nobody listens nothing
is sent.
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
from typing import Any

from lib.system import network

ADDRESS = "TANDEM_AGENT"
SECONDS = 0.5
NO_PASS: dict[str, Any] = {"passing": None, "passing_since": 0.0, "passes": 1}


_facts: dict[str, Any] = {}
_ended = threading.Event()
_changed = threading.Event()


def agent_folder() -> str:
    """The folder of this host's agent. It has the host's name, because hosts may share /tmp; a variable that mpirun hands to all has not."""
    return f"{os.environ[ADDRESS]}-{network.own_name()}"


def start(rank: int) -> None:
    """Begins to beat, if a launcher's agent listens."""
    if ADDRESS not in os.environ or _facts:
        return
    _facts.update(rank=rank, pid=os.getpid(), waits=0, waiting=None, since=time.monotonic(), **NO_PASS)
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        listener.connect(f"{agent_folder()}/agent")
    except OSError:  # the agent is gone, and will end this process
        listener.close()
        return
    thread = threading.Thread(target=_beat, args=(listener,), name="heartbeat", daemon=True)
    thread.start()

    def end() -> None:  # a thread that lives on would spoil the exit status under mpirun
        _facts["ended"] = True  # by itself: nobody killed it
        _ended.set()
        _changed.set()
        thread.join(2)

    atexit.register(end)


def tell(**facts: Any) -> None:
    """Adds to what is told, at once: `run`, the folder to resume from; `checkpoint`, its newest step."""
    if _facts:
        _facts.update(facts)
        _changed.set()


@contextlib.contextmanager
def waiting(what: str) -> Iterator[None]:
    """Says that this rank waits for others while the block runs."""
    _facts.update(waiting=what, since=time.monotonic()) if _facts else None
    try:
        yield
    finally:
        _facts.update(waiting=None, since=time.monotonic(), waits=_facts["waits"] + 1) if _facts else None


@contextlib.contextmanager
def passing(what: str, passes: int = 1) -> Iterator[None]:
    """Says that this rank computes while the block runs, which is so many passes long: without end, it hangs."""
    _facts.update(passing=what, passing_since=time.monotonic(), passes=passes) if _facts else None
    try:
        yield
    finally:
        _facts.update(NO_PASS) if _facts else None


def _beat(listener: socket.socket) -> None:
    with listener, contextlib.suppress(OSError):  # the agent is gone
        listener.sendall(b'{"kind": "beat"}\n')
        while True:
            facts = dict(_facts)
            now = time.monotonic()
            facts["seconds"], facts["passing_seconds"] = now - facts.pop("since"), now - facts.pop("passing_since")
            listener.sendall(json.dumps(facts).encode() + b"\n")
            if _ended.is_set():
                return
            _changed.wait(SECONDS)
            _changed.clear()
