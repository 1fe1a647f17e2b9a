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
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TypedDict, Unpack

from lib.system import network

ADDRESS = "TANDEM_AGENT"
FOLDER = "TANDEM_AGENT_FOLDER"
SECONDS = 0.5  # the most between two words of it
LOOK_SECONDS = 0.2  # between two looks at what neighbours' hosts send; one that sent nothing for so long is called
CALL_SECONDS = 0.3  # for the system of a neighbour's host to answer a call, while nothing comes from there
AGAIN_SECONDS = 0.1  # between two such calls
LATE_SECONDS = 3.0  # the most that an answer may take: over a link that has become slow


class Reached(TypedDict):
    """How far a disk's newest checkpoint is."""

    step: int
    resume_ids: list[str]  # of every resume before it: a checkpoint without them is of a history that was left


class Heard(TypedDict):
    """What this host's system knows of another host's, whatever the processes do."""

    seconds: float  # since anything came from there
    data_seconds: float  # since anything of what ranks send each other did
    round_trip_seconds: float  # a bound: network.Contact
    calls: int  # that it has not answered in a row, where it answered others before


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


@dataclass
class _Neighbour:
    """A rank before or after this one in a ring."""

    rank: int
    connections: list[socket.socket]  # copies
    address: tuple[str, int]  # where it has listened
    answers: bool  # whether its system answers a call there: else some firewall passes over what nobody listens to
    missed: int = 0  # calls in a row
    answered_at: float = float("-inf")  # the last call, by time.monotonic()


NO_PASS: Facts = {"passing": None, "passing_since": 0.0, "passes": 1}

_facts: Facts = {}
_ended = threading.Event()
_changed = threading.Event()
_neighbours: list[_Neighbour] = []
_calls = network.Calls()


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


def watch(neighbours: Mapping[int, tuple[Sequence[socket.socket], tuple[str, int]]]) -> None:
    """From now on beats say whether the systems of these ranks' hosts answer.

    A host whose processes get no core, or whose words to the launcher are held up on a slow link, answers here; one
    whose ports a firewall closed answers the launcher alone.

    neighbours: connections to each rank, and an address where it has listened.
    """
    if _facts:
        answering = network.answering([address for _, address in neighbours.values()], CALL_SECONDS)
        for rank, (connections, address) in neighbours.items():
            _neighbours.append(_Neighbour(rank, [one.dup() for one in connections], address, address in answering))


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


def _heard() -> dict[int, Heard]:
    """What is known of all neighbours; where nothing comes from one, be it that it computes, its system is called."""
    known = [(one, contact) for one in _neighbours if (contact := network.contact(one.connections)) is not None]
    called = [one for one, contact in known if one.answers and contact.silent_seconds > LOOK_SECONDS]
    answering = _calls.answered([one.address for one in called], CALL_SECONDS, LATE_SECONDS)
    now = time.monotonic()
    heard: dict[int, Heard] = {}
    for one, contact in known:
        if one.address in answering:
            one.answered_at = now
        one.missed = one.missed + 1 if one in called and one.address not in answering else 0
        heard[one.rank] = Heard(
            seconds=min(contact.silent_seconds, now - one.answered_at),
            data_seconds=contact.data_seconds,
            round_trip_seconds=contact.round_trip_seconds,
            calls=one.missed,
        )
    return heard


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
                is_missed = any(known["calls"] for known in heard.values())
                _changed.wait(AGAIN_SECONDS if is_missed else LOOK_SECONDS if _neighbours else SECONDS)
                _changed.clear()
                with contextlib.suppress(OSError):  # too many open files, say: what was known stays
                    heard = _heard()
    except OSError:  # the agent is gone
        if not _ended.is_set():
            os._exit(1)
