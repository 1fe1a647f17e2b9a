"""Reports of each rank to its launcher, once a second: that it lives, in which phase of its work, and for how long.

A rank (`start`, `phase`, `report`) connects to the watcher that TANDEM_HEARTBEAT=HOST:PORT names. The watcher knows
ranks that stopped (no report comes), that hang (a phase lasts longer than it may) and that wait for others in vain. A
rank whose watcher is gone ends: nothing else would end it, and it would keep the run's folder.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from lib.distributed.connection import Channel, Listener, connect, run_key

WATCHER = "TANDEM_HEARTBEAT"
BEAT_SECONDS = 1.0
CONNECT_SECONDS = 30.0
PASS_SECONDS = 600.0  # that one pass through the model may take


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
    """Connects to the watcher, if a launcher named one, and reports from a thread until the process ends. Raises
    ConnectionError: the watcher is not reached. Raises UserError: it has another key."""
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


def report_termination(rank: int) -> None:
    """Says at SIGTERM how to go on with the run, where no launcher does: mpirun sends it to the others where a rank is
    gone. A thread waits for it: the main one may wait for that rank, and Python runs no handler there."""
    if WATCHER in os.environ:
        return
    signals, sender = socket.socketpair()
    sender.setblocking(False)
    signal.signal(signal.SIGTERM, lambda *_: None)
    signal.set_wakeup_fd(sender.fileno())

    def wait() -> None:
        while (number := signals.recv(1)[0]) not in (0, signal.SIGTERM):
            pass
        if number:
            from lib.system import terminal  # brings rich, which a rank's start does not need

            why = f"rank {rank} got SIGTERM, as where another rank is gone"
            terminal.error(f"{why}; {terminal.way_on(Path(_facts['run']) if 'run' in _facts else None)}", "stopped")
            os._exit(128 + signal.SIGTERM)

    thread = threading.Thread(target=wait, name="termination", daemon=True)
    thread.start()
    atexit.register(thread.join)
    atexit.register(sender.send, b"\0")  # the last one registered is called first


@contextlib.contextmanager
def phase(name: str, allowed_seconds: float | None = None, is_wait: bool = False) -> Iterator[None]:
    """Reports the block as a phase that may be silent, without another phase within it, for so long."""
    _phases.append(Phase(name, allowed_seconds, is_wait))
    try:
        yield
    finally:
        _phases.pop()
        _phases[-1].since = time.monotonic()


def waiting(name: str) -> contextlib.AbstractContextManager[None]:
    """Reports the block as a wait for other ranks."""
    return phase(name, is_wait=True)


def passing(name: str, passes: int = 1) -> contextlib.AbstractContextManager[None]:
    """Reports the block as so many passes through the model."""
    return phase(name, passes * PASS_SECONDS)


def report(**facts: Any) -> None:
    """Adds facts to all further reports: the step, the newest checkpoint, why the run ends."""
    _facts.update(facts)
    _changed.set()


def _beat(channel: Channel) -> None:
    try:
        while True:
            has_ended, current = _facts.get("ended"), _phases[-1]
            of_phase = {name: getattr(current, name) for name in ("is_wait", "allowed_seconds")}
            of_phase |= {"phase": current.name, "silent_seconds": time.monotonic() - current.since}
            channel.send(_facts | of_phase)
            if has_ended:
                return
            _changed.wait(BEAT_SECONDS)
            _changed.clear()
    except ConnectionError:
        if not _facts.get("ended"):
            print(f"error: rank {_facts['rank']}: the launcher is gone", file=sys.stderr, flush=True)
            os._exit(1)


@dataclass
class RankState:
    """A rank's last report, when it came (time.monotonic), and whether the rank is still connected."""

    report: dict[str, Any]
    reported_at: float
    is_connected: bool = True


class Silence(NamedTuple):
    """Why a world of connected ranks cannot go on. kind: stopped, hung, late, wedged."""

    kind: str
    text: str
    ranks: list[int]  # at fault


class Watcher:
    """Receives the reports of all ranks of a run; its methods may be called from any thread."""

    def __init__(self, host: str, port: int, key: bytes, hosts: Sequence[str] = ()):
        """Listens at once. hosts: of every rank, for messages."""
        self.states: dict[int, RankState] = {}
        self.hosts = hosts
        self._listener = Listener(host, port, key, self._receive)
        self.address = self._listener.address

    def silence(self, silent_seconds: float, wedged_seconds: float) -> Silence | None:
        """The first of: a rank sends nothing; its phase lasts longer than it may; it waits too long for others."""
        now = time.monotonic()
        states = {rank: state for rank, state in sorted(self.states.copy().items()) if state.is_connected}
        for rank, state in states.items():
            if (seconds := now - state.reported_at) > silent_seconds:
                text = f"{self.name(rank)} sent nothing for {seconds:.0f} s: stopped, asleep or cut off"
                return Silence("stopped", text, [rank])
        for rank, state in states.items():
            seconds, allowed = state.report["silent_seconds"], state.report["allowed_seconds"]
            if allowed is not None and seconds > allowed:
                return Silence(
                    "hung", f"{self.name(rank)} hangs in {state.report['phase']} for {seconds:.0f} s", [rank]
                )
        waits = {rank: state.report for rank, state in states.items() if state.report["is_wait"]}
        longest = max(waits, key=lambda rank: float(waits[rank]["silent_seconds"]), default=None)
        if longest is None or (seconds := waits[longest]["silent_seconds"]) <= wedged_seconds:
            return None
        text = f"{self.name(longest)} waits for {waits[longest]['phase']} for {seconds:.0f} s"
        if late := [rank for rank in states if rank not in waits]:
            return Silence("late", f"{text}: {', '.join(map(self.name, late))} did not come to it", late)
        return Silence("wedged", f"{text}, as all ranks do: the network refuses their ports", [longest])

    def fact(self, name: str) -> Any:
        """What a rank reported under this name; None where none did."""
        states = self.states.copy().values()
        return next((state.report[name] for state in states if state.report.get(name)), None)

    def name(self, rank: int) -> str:
        """A rank, for messages."""
        return f"rank {rank} on {self.hosts[rank]}" if rank < len(self.hosts) else f"rank {rank}"

    def close(self) -> None:
        self._listener.close()

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
