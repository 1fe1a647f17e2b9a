"""Reports of each rank to its launcher, once a second: that it lives, in which phase of its work, and for how long.

A rank (`start`, `phase`, `report`) connects to the watcher that TANDEM_HEARTBEAT=HOST:PORT names. The watcher knows
ranks that died (their connection ended), that stopped (no report comes) and that hang (a phase lasts longer than it
may). A rank whose watcher is gone ends: nothing else would end it, and it would keep the run's folder.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from lib.distributed.connection import Channel, Listener, connect, run_key

WATCHER = "TANDEM_HEARTBEAT"
BEAT_SECONDS = 1.0
CONNECT_SECONDS = 30.0
PASS_SECONDS = 600.0  # that one pass through the model may take


# ---- In a rank


@dataclass
class Phase:
    """A part of a rank's work. A wait for other ranks has no limit here: `World.deadline` has one."""

    name: str
    allowed_seconds: float | None
    is_wait: bool
    since: float = field(default_factory=time.monotonic)


_phases = [Phase("start", None, False)]  # the innermost one last
_facts: dict[str, Any] = {}
_changed = threading.Event()


def start(rank: int) -> None:
    """Connects to the watcher, if a launcher named one, and reports from a thread until the process ends.

    Raises:
        ConnectionError: the watcher is not reached.
        UserError: it has another key.
    """
    watcher, key = os.environ.get(WATCHER), run_key()
    if watcher is None or key is None or "rank" in _facts:
        return
    host, _, port = watcher.rpartition(":")
    channel = connect(host, int(port), key, CONNECT_SECONDS)
    _facts.update({"rank": rank, "pid": os.getpid()})
    thread = threading.Thread(target=_beat, args=(channel,), name="heartbeat", daemon=True)
    thread.start()

    def end() -> None:  # a thread that lives on would spoil the exit status under mpirun
        report(ended=True)
        thread.join(2 * BEAT_SECONDS)

    atexit.register(end)


@contextlib.contextmanager
def phase(name: str, allowed_seconds: float | None = None, is_wait: bool = False) -> Iterator[None]:
    """Reports the block as a phase that may be silent, without another phase within it, for so long."""
    _phases.append(Phase(name, allowed_seconds, is_wait))
    try:
        yield
    finally:
        _phases.pop()
        _phases[-1].since = time.monotonic()


@contextlib.contextmanager
def waiting(name: str) -> Iterator[None]:
    """Reports the block as a wait for other ranks."""
    with phase(name, is_wait=True):
        yield


@contextlib.contextmanager
def passing(name: str, passes: int = 1) -> Iterator[None]:
    """Reports the block as so many passes through the model."""
    with phase(name, passes * PASS_SECONDS):
        yield


def report(**facts: Any) -> None:
    """Adds facts to all further reports: the step, the newest checkpoint, why the run ends."""
    _facts.update(facts)
    _changed.set()


def _beat(channel: Channel) -> None:
    try:
        while not _facts.get("ended"):
            _send(channel)
            _changed.wait(BEAT_SECONDS)
            _changed.clear()
        _send(channel)
    except ConnectionError:
        if not _facts.get("ended"):
            print(f"error: rank {_facts['rank']}: the launcher is gone", file=sys.stderr, flush=True)
            os._exit(1)


def _send(channel: Channel) -> None:
    current = _phases[-1]
    channel.send(
        {
            **_facts,
            "phase": current.name,
            "is_wait": current.is_wait,
            "allowed_seconds": current.allowed_seconds,
            "silent_seconds": time.monotonic() - current.since,
        }
    )


# ---- In the launcher


@dataclass
class RankState:
    """A rank's last report, when it came (time.monotonic), and whether the rank is still connected."""

    report: dict[str, Any]
    reported_at: float
    is_connected: bool = True

    @property
    def has_ended(self) -> bool:
        """Whether it ended by itself; a killed rank could not say so."""
        return bool(self.report.get("ended"))


class Watcher:
    """Receives the reports of all ranks of a run; its methods may be called from any thread."""

    def __init__(self, host: str, port: int, key: bytes):
        self.states: dict[int, RankState] = {}
        self._listener = Listener(host, port, key, self._receive)
        self.address = self._listener.address

    def dead(self) -> list[int]:
        """Ranks whose connection ended before they said that they end."""
        return [rank for rank, state in self._states() if not state.is_connected and not state.has_ended]

    def stopped(self, limit_seconds: float) -> list[int]:
        """Ranks that are connected and have sent nothing for so long: stopped, or their host is off."""
        now = time.monotonic()
        return [
            rank for rank, state in self._states() if state.is_connected and now - state.reported_at > limit_seconds
        ]

    def hanging(self) -> list[int]:
        """Ranks whose phase lasts longer than it may."""
        return [
            rank
            for rank, state in self._states()
            if (allowed := state.report.get("allowed_seconds")) is not None and state.report["silent_seconds"] > allowed
        ]

    def close(self) -> None:
        self._listener.close()

    def _states(self) -> list[tuple[int, RankState]]:
        return sorted(self.states.copy().items())

    def _receive(self, channel: Channel) -> None:
        state: RankState | None = None
        try:
            while (message := channel.receive()) is not None:
                if state is None:
                    state = self.states[int(message["rank"])] = RankState(message, time.monotonic())
                state.report, state.reported_at = message, time.monotonic()
        finally:
            if state is not None:
                state.is_connected = False
