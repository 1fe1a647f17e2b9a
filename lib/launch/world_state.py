"""What the agents of all hosts have reported since a start: which ranks live, what they wait for, how they ended."""

from __future__ import annotations

import asyncio
import base64
import threading
import time
import zlib
from typing import cast

from lib.errors import UserError
from lib.launch import rank_faults
from lib.launch.agent_link import Link
from lib.launch.agent_messages import Beat, Message
from lib.launch.job import Job, local_run_folder
from lib.launch.log_copy import Copy
from lib.launch.patience import Punctuality, silence_limit
from lib.launch.rank_console import Console
from lib.launch.rank_faults import HostState, RankState
from lib.system import mlx_failures

LOOK_SECONDS = 0.5  # between two looks for a fault, at most; in a longer time this process itself was not there
MPIRUN = -1  # in place of a rank's number: mpirun, which starts the ranks


class WorldState:
    """The hosts and ranks of one start, by their agents' messages."""

    def __init__(self, job: Job, console: Console, address: str):
        """Nothing is known yet.

        Args:
            address: of the start; messages about another one are dropped.
        """
        self.job, self.console, self.address = job, console, address
        self.is_mpi = job.backend == "mpi"
        self.links: dict[str, Link] = {}
        self.hosts: dict[str, HostState] = {}
        self.punctuality: dict[str, Punctuality] = {}  # of the messages of each host
        self.looked = time.monotonic()
        self.ranks: dict[int, RankState] = {}
        self.ended: dict[str, asyncio.Event] = {}  # by host: all its ranks have ended
        self.run: str | None = None  # folder of the run
        self.checkpoint: int | None = None  # its newest step
        self.input_taken = threading.Event()  # rank 0 has the last piece of input
        self.log_copies: dict[str, Copy | None] = {}  # of other hosts' logs; None where they cannot be written

    def add_host(self, link: Link, ranks: list[int | None]) -> None:
        """From now on what the agent reports is taken in.

        ranks: that start there; None for mpirun.
        """
        self.links[link.name] = link
        now = time.monotonic()
        self.hosts[link.name] = HostState(link.name, now, closed=link.closed)
        self.punctuality[link.name] = link.punctuality
        link.punctuality.last = self.looked = now
        self.ended[link.name] = asyncio.Event()
        for rank in ranks:
            number = MPIRUN if rank is None else rank
            self.ranks[number] = RankState(number, link.name)

    def fault(self) -> rank_faults.Fault | None:
        """The first thing that is wrong now; None if nothing is."""
        now = self._look()
        limits = self.job.silent_seconds, self.job.wedged_seconds
        return rank_faults.diagnose(now, self.hosts, list(self.ranks.values()), *limits)

    def late_hosts(self, limit_seconds: float) -> list[str]:
        """The hosts that are connected, and have been silent for longer than a limit by now."""
        return rank_faults.late_hosts(self._look(), self.hosts, limit_seconds)

    def _look(self) -> float:
        """Brings what is known of the hosts up to now, which it returns, by time.monotonic()."""
        now = time.monotonic()
        self._excuse(now - self.looked - LOOK_SECONDS)
        self.looked = now
        for name, host in self.hosts.items():
            host.last_message = self.punctuality[name].last
            host.usual_lateness = self.punctuality[name].usual_lateness(now)
            host.round_trip_seconds = 0.0
        for rank in self.ranks.values():
            for other, heard in rank.heard.items():
                if other in self.ranks and (host := self.hosts[self.ranks[other].host]).name != rank.host:
                    host.last_sign = max(host.last_sign, heard.at)
                    host.round_trip_seconds = max(host.round_trip_seconds, heard.round_trip_seconds)
        return now

    def _excuse(self, absent_seconds: float) -> None:
        """Counts no time in which this process was stopped, or its machine slept: what came then is not read yet."""
        if absent_seconds <= 0:
            return
        for punctuality in self.punctuality.values():
            punctuality.excuse(absent_seconds)
        for rank in self.ranks.values():
            rank.waiting_since += absent_seconds
            rank.passing_since += absent_seconds
            if rank.stopped_since is not None:
                rank.stopped_since += absent_seconds

    def usual_lateness(self) -> float:
        """Of the messages of the host where it is longest, in seconds."""
        return max((host.usual_lateness for host in self.hosts.values()), default=0.0)

    def has_spoken(self, host: str, now: float, limit_seconds: float) -> bool:
        """Whether a host's agent has said something within a limit, as punctual as it usually is."""
        punctuality = self.punctuality[host]
        return now - punctuality.last <= silence_limit(limit_seconds, punctuality.usual_lateness(now))

    def load(self) -> float:
        """Processes that want each core of the busiest host."""
        return max((host.load for host in self.hosts.values()), default=1.0)

    def checkpoints(self) -> dict[str, int]:
        """The newest checkpoint of each host that has written one, as far as it was told: its step."""
        told: dict[str, int] = {}
        for rank in self.ranks.values():
            if rank.checkpoint is not None:
                told[rank.host] = max(rank.checkpoint, told.get(rank.host, 0))
        return told

    def processes(self) -> list[RankState]:
        """The processes whose end ends the start: the ranks, or mpirun."""
        return [self.ranks[MPIRUN]] if self.is_mpi else list(self.ranks.values())

    def is_running(self) -> bool:
        """Whether one of them has not ended."""
        return any(process.status is None for process in self.processes())

    def worst_status(self) -> int:
        """The exit status of all: that of the worst rank."""
        return max((rank_faults.exit_status(process.status or 0) for process in self.processes()), default=1)

    def receive(self, host: str, kind: str, fields: Message) -> None:
        """Takes in a message of a host's agent."""
        if kind == "foreign":  # no sign that the agent lives
            self.console.note(f"{host} says: {fields['text']}")
            return
        self.punctuality[host].note(time.monotonic())
        if kind == "output":
            self._print(host, fields["rank"], fields["stream"], fields["text"])
        elif kind == "warning":
            self.console.note(f"{host}: {fields['text']}")
        elif kind == "closed":
            self.hosts[host].closed = True
            self.ended[host].set()
        elif fields.pop("start", None) != self.address:
            return
        elif kind == "memory":
            self._rank(fields["rank"], host).memory = fields["text"]
        elif kind == "exit":
            self._note_exit(**fields)
        elif kind == "alive":
            self.hosts[host].load = fields["load"]
            self._note_states(host, fields["states"])
            for rank, status in fields["exits"]:
                self._note_exit(rank, status)
        elif kind == "beat":
            self._note_beat(host, cast(Beat, fields))
        elif kind == "log":
            self._copy_log(host, **fields)
        elif kind == "typed":
            self.input_taken.set()
        elif kind == "ended":
            self.ended[host].set()

    def _rank(self, rank: int, host: str) -> RankState:
        return self.ranks.setdefault(rank, RankState(rank, host))

    def _print(self, host: str, rank: int | None, stream: str, text: str) -> None:
        self.console.output(rank, host, stream, text)
        if rank is None:
            return
        if (cause := rank_faults.cause_of(text)) is not None:
            self._rank(rank, host).cause = cause
        if mlx_failures.NOTICED in text:
            self._rank(rank, host).lost_another = True

    def _note_exit(self, rank: int | None, status: int) -> None:
        number = rank if rank is not None else MPIRUN if self.is_mpi else 0
        self.ranks[number].status = status

    def _note_states(self, host: str, states: dict[str, str]) -> None:
        for rank, state in states.items():
            seen = self._rank(int(rank), host)
            if state != "stopped":
                seen.stopped_since = None
                if state == "gone" and self.is_mpi:
                    seen.status = 0  # how it ended is mpirun's to report
                    seen.ended_at = seen.ended_at or time.monotonic()
            elif seen.stopped_since is None:
                seen.stopped_since = time.monotonic()

    def _note_beat(self, host: str, beat: Beat) -> None:
        seen = self._rank(beat["rank"], host)
        now = time.monotonic()
        seen.beats = True
        seen.waiting, seen.waiting_since = beat["waiting"], now - beat["seconds"]
        seen.passing, seen.passing_since, seen.passes = beat["passing"], now - beat["passing_seconds"], beat["passes"]
        seen.heard_at = now
        seen.heard = {
            int(rank): rank_faults.Sign(
                now - known["seconds"], now - known["data_seconds"], known["round_trip_seconds"], known["calls"]
            )
            for rank, known in beat.get("heard", {}).items()
        }
        seen.diverged, seen.newer, seen.checkpoint = beat.get("diverged"), beat.get("newer"), beat.get("checkpoint")
        seen.refused = beat.get("refused", False)
        if beat["rank"] == 0:
            self.run, self.checkpoint = beat.get("run"), beat.get("checkpoint")

    def _copy_log(self, host: str, rank: int, run: str, offset: int, packed: str) -> None:
        """Writes a piece of a log of another host where the dashboard of this machine looks for it."""
        if host not in self.log_copies:
            self.log_copies[host] = Copy(local_run_folder(self.job, run) / "logs", self.links[host].machine)
        copy = self.log_copies[host]
        if copy is not None:
            try:
                copy.write(rank, offset, zlib.decompress(base64.b64decode(packed)))
            except (OSError, UserError) as error:
                why = error.strerror if isinstance(error, OSError) else error
                self.console.note(f"the logs of {host} are not copied to {copy.logs}: {why}")
                self.log_copies[host] = None
