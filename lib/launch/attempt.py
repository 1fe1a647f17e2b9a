"""One start of all ranks: what their agents report, what is diagnosed from it, and how it ends."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import functools
import secrets
import signal
import threading
import time
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from lib.launch import diagnose, reachable_hosts, topology
from lib.launch.agent_link import Link, connect, run_here
from lib.launch.hostfile import Host
from lib.launch.rank_console import Console
from lib.launch.ranks import Launching, as_command, processes_of, resumed
from lib.system import network
from lib.telemetry.log_tail import Copy

TICK_SECONDS = 0.03
SETTLE_SECONDS = 0.5  # after a death, for the others to tell why they end
PREPARE_SECONDS = 60.0  # for a process to import and read everything
PREPARE_AFTER_SECONDS = 1.0  # the ranks that are about to train come first


@dataclass(frozen=True)
class Outcome:
    """How one start of all ranks ended."""

    status: int
    fault: diagnose.Fault | None = None
    run: str | None = None  # folder to resume from
    interrupted: bool = False
    rejoined: bool = False  # ended at a checkpoint, because a host that was missing is back
    reached: tuple[Host, ...] | None = None  # hosts that take connections from each other, where that was the fault


class Attempt:
    """All ranks, started once."""

    def __init__(
        self,
        launching: Launching,
        console: Console,
        here: Host | None = None,
        links: dict[str, Link] | None = None,
        spares: bool | None = False,
    ):
        """Says what is to be started, and how.

        Args:
            here: the only host whose ranks are started, where people start the others.
            links: agents that are there from an earlier attempt, by host; those that answer are there for the next one.
                By default all are ended with this one.
            spares: whether the hosts get processes ready for another attempt; None: where one of them is a Mac.
        """
        self.launching, self.console = launching, console
        self.hosts_to_start = [here] if here else list(launching.hosts)
        self.links: dict[str, Link] = {} if links is None else links
        self.keeps_links, self.spares = links is not None, spares
        self.address = ""
        self.hosts: dict[str, diagnose.HostSeen] = {}
        self.ranks: dict[int, diagnose.RankSeen] = {}
        self.ended: dict[str, asyncio.Event] = {}
        self.systems: dict[str, str] = {}  # by host, once all of them have answered: Darwin, Linux
        self.first: int = -1 if launching.backend == "mpi" else 0
        self.run: str | None = None
        self.checkpoint: int | None = None
        self.back = asyncio.Event()  # a host that was missing could take part again
        self.named: set[int] = set()
        self.typed = threading.Event()
        self.takes_input = False
        self.copies: dict[str, Copy | None] = {}  # of other hosts' logs; None where they cannot be written
        self.asked: list[asyncio.Future[Any]] = []
        self.look: asyncio.Future[tuple[Host, ...] | None] | None = None  # at who reaches whom
        self.reached: tuple[Host, ...] | None = None

    async def go(self, interrupts: asyncio.Queue[int]) -> Outcome:
        """Starts, watches, and ends all ranks."""
        new = [host for host in self.hosts_to_start if host.name not in self.links]
        reaching = asyncio.gather(*(connect(self.launching, host) for host in new), return_exceptions=True)
        interrupt = asyncio.ensure_future(interrupts.get())
        early: set[asyncio.Future[Any]] = {reaching, interrupt}
        await asyncio.wait(early, return_when=asyncio.FIRST_COMPLETED)
        if interrupt.done():
            reaching.cancel()
            await asyncio.gather(reaching, return_exceptions=True)
            return Outcome(128 + interrupt.result(), interrupted=True)
        interrupt.cancel()
        reached = reaching.result()
        self.links.update({link.name: link for link in reached if isinstance(link, Link)})
        failed = [str(error) for error in reached if isinstance(error, BaseException)]
        try:
            if failed:
                fault = diagnose.Fault(
                    "lost", "; ".join(failed), tuple({host.name for host in new} - self.links.keys())
                )
                self._tell(fault)
                return Outcome(1, fault)
            self.systems = {link.name: link.system for link in self._own_links()}
            if (refused := topology.refusal(self.launching.backend, self.systems)) is not None:
                fault = diagnose.Fault("refused", refused, tuple(self.systems))
                self._tell(fault)
                return Outcome(2, fault)
            if self.spares is None:
                self.spares = "Darwin" in self.systems.values()
            self._start()
            return await self._watch(interrupts)
        finally:
            for asked in self.asked:
                asked.cancel()
            if not self.keeps_links:
                await asyncio.gather(*(link.close() for link in self.links.values()))

    def _start(self) -> None:
        # Not in TMPDIR, which may differ: mpirun's ranks look for their host's agent where the first host has its own.
        self.address = f"/tmp/tandem-{secrets.token_hex(8)}"
        folders = {link.name: f"{self.address}-{link.machine}" for link in self.links.values()}
        hosts = self.launching.hosts
        work = processes_of(self.launching, [folders.get(host.name, "") for host in hosts])
        of_host = dict(zip((host.name for host in hosts), work, strict=True))
        links = self._own_links()
        names = network.distinct_names([(link.machine, link.identity) for link in links])
        now = time.monotonic()
        for link, name in zip(links, names, strict=True):
            processes, files = of_host[link.name]
            self.hosts[link.name] = diagnose.HostSeen(link.name, now, closed=link.closed)
            self.ended[link.name] = asyncio.Event()
            for process in processes:
                rank = self.first if process["rank"] is None else process["rank"]
                self.ranks[rank] = diagnose.RankSeen(rank, link.name)
            link.hear = functools.partial(self._hear, link.name)
            link.send(
                "start",
                address=self.address,
                processes=processes,
                files=files,
                directory=self.launching.directory,
                silent_seconds=max(5.0, self.launching.silent_seconds),
                nice=self.launching.nice,
                awake=True,
                sends_logs=not link.is_local,
                host=name,
                end_seconds=topology.end_seconds(self.launching.backend, is_fault=True),
            )
        self.takes_input = True

    def _own_links(self) -> list[Link]:
        return [self.links[host.name] for host in self.hosts_to_start if host.name in self.links]

    def type(self, text: str | None) -> None:
        """Hands input on to rank 0."""
        if (link := self.links.get(self.launching.hosts[0].name)) is not None:
            link.send("typed", text=text)

    async def _watch(self, interrupts: asyncio.Queue[int]) -> Outcome:
        limits = self._limits
        checkpoint = None
        while any(rank.status is None for rank in self._started()):
            now = time.monotonic()
            fault = diagnose.diagnose(now, self.hosts, list(self.ranks.values()), *limits)
            if fault is not None:
                return await self._fail(fault, interrupts)
            for rank in diagnose.stragglers(now, list(self.ranks.values()), max(5.0, self.launching.silent_seconds)):
                if rank.rank not in self.named:
                    self.named.add(rank.rank)
                    self.console.note(f"rank {rank.rank} on {rank.host} lets the others wait")
            if self.run is not None and self.spares and not self.asked:
                self.asked = [
                    asyncio.ensure_future(self._prepare(self.links[host.name], host, self.run))
                    for host in self.launching.hosts
                ]
            if (suspected := self._look_between(now)) is not None:
                return await self._fail(suspected, interrupts)
            if not self.back.is_set() or not all(asked.done() for asked in self.asked):
                checkpoint = self.checkpoint
            elif self.checkpoint != checkpoint:
                self.console.note(f"a host is back: all go on together from the checkpoint of step {self.checkpoint}")
                interrupted = await self._end(signal.SIGTERM, interrupts)
                return Outcome(130 if interrupted else 0, None, self.run, interrupted, rejoined=True)
            try:
                number = await asyncio.wait_for(interrupts.get(), TICK_SECONDS)
            except TimeoutError:
                continue
            self.console.note("ending every rank (once more: at once)")
            await self._end(signal.SIGINT, interrupts)
            return Outcome(128 + number, None, self.run, interrupted=True)
        fault = diagnose.diagnose(time.monotonic(), self.hosts, list(self.ranks.values()), *limits)
        await self._end(signal.SIGTERM, interrupts)  # nothing is left but last lines under way
        if fault is not None:
            self._tell(fault)
        return Outcome(self._worst(), fault, self.run)

    @property
    def _limits(self) -> tuple[float, float]:
        return self.launching.silent_seconds, self.launching.wedged_seconds

    def _look_between(self, now: float) -> diagnose.Fault | None:
        """Where all ranks wait, whether their hosts still reach each other: none has to wait for the limit to know."""
        waited, limit = diagnose.common_wait_seconds(now, list(self.ranks.values())), self.launching.silent_seconds
        if len(self.hosts_to_start) < 2 or self.launching.backend != "ring" or self.run is None or waited <= limit / 2:
            self.look = None
        elif self.look is None:
            hosts = self.launching.hosts
            looking = reachable_hosts.reach_each_other(
                self.launching, self.links, hosts, max(reachable_hosts.PROBE_SECONDS, limit / 2)
            )
            self.look = asyncio.ensure_future(looking)
        elif self.look.done() and (reached := self.look.result()) is not None and len(reached) < len(self.hosts):
            self.reached = reached
            cut_off = [name for name in self.hosts if name not in {host.name for host in reached}]
            return diagnose.cut_between(list(self.hosts), cut_off, waited)
        return None

    async def _prepare(self, link: Link, host: Host, run: str) -> None:
        await asyncio.sleep(PREPARE_AFTER_SECONDS)
        await prepared(self.launching, link, host, run)

    async def _fail(self, fault: diagnose.Fault, interrupts: asyncio.Queue[int]) -> Outcome:
        by_itself = any(rank.status is not None and 0 < rank.status < 128 for rank in self._started())
        if fault.kind == "died" and by_itself:  # the others may be about to tell more, and to end by themselves
            deadline = time.monotonic() + SETTLE_SECONDS
            while time.monotonic() < deadline and any(rank.status is None for rank in self._started()):
                await asyncio.sleep(0.02)
        elif fault.kind == "died" and self.first == -1 and len(self.hosts) > 1:  # of other hosts only their agents know
            await asyncio.sleep(SETTLE_SECONDS)
        if fault.kind == "died" and any(rank.memory for rank in self.ranks.values()):
            fault = diagnose.diagnose(time.monotonic(), self.hosts, list(self.ranks.values()), *self._limits) or fault
        status = self._worst() or 1
        self._tell(fault)
        if fault.kind in ("lost", "silent"):  # its agent ends its ranks by itself
            for name in fault.hosts:
                self._give_up(name)
        # A stopped process hears no other signal until it is continued, which an agent does after any other.
        is_stopped = fault.kind == "stopped" and self.launching.backend not in topology.RDMA_BACKENDS
        number = signal.SIGKILL if is_stopped else signal.SIGTERM
        interrupted = await self._end(number, interrupts, is_fault=True)
        return Outcome(status, fault, self.run, interrupted, reached=self.reached)

    def _give_up(self, name: str) -> None:
        self.hosts[name].closed = True
        self.links[name].drop()
        if self.keeps_links:
            del self.links[name]

    def _tell(self, fault: diagnose.Fault) -> None:
        self.console.note(f"{fault.kind}: {fault.message}")

    async def _end(self, number: signal.Signals, interrupts: asyncio.Queue[int], is_fault: bool = False) -> bool:
        """Ends every rank on every host; an interrupt kills at once. Returns whether there was one."""
        links = self._own_links()
        grace_seconds = topology.end_seconds(self.launching.backend, is_fault)
        for link in links:
            link.send("end", number=int(number), grace_seconds=grace_seconds)
        alive = [self.ended[link.name] for link in links if not self.hosts[link.name].closed]
        ended = asyncio.ensure_future(_all_set(alive))
        again = asyncio.ensure_future(interrupts.get())
        limit = grace_seconds + 1.0
        waits: set[asyncio.Future[Any]] = {ended, again}
        await asyncio.wait(waits, timeout=limit, return_when=asyncio.FIRST_COMPLETED)
        interrupted = again.done()
        if interrupted:
            for link in links:
                link.send("end", number=int(signal.SIGKILL), grace_seconds=0.0)
            await asyncio.wait({ended}, timeout=1.0)
        again.cancel()
        ended.cancel()
        for link in self._own_links() if self.keeps_links else []:
            if link.closed or not self.ended[link.name].is_set():  # who does not answer is connected anew, if at all
                self._give_up(link.name)
        return interrupted

    def _started(self) -> list[diagnose.RankSeen]:
        """The processes whose end ends the attempt: the ranks, or mpirun."""
        return [self.ranks[-1]] if self.first == -1 else list(self.ranks.values())

    def _worst(self) -> int:
        return max((diagnose.exit_status(rank.status or 0) for rank in self._started()), default=1)

    def _hear(self, host: str, kind: str, words: dict[str, Any]) -> None:
        """Takes in what a host's agent says."""
        if kind == "foreign":  # no sign that the agent lives
            self.console.note(f"{host} says: {words['text']}")
            return
        self.hosts[host].heard = time.monotonic()
        if kind == "output":
            self.console.output(words["rank"], host, words["stream"], words["text"])
            if words["rank"] is not None and (cause := diagnose.cause_of(words["text"])) is not None:
                self.ranks.setdefault(words["rank"], diagnose.RankSeen(words["rank"], host)).cause = cause
        elif kind == "warning":
            self.console.note(f"{host}: {words['text']}")
        elif kind == "closed":
            self.hosts[host].closed = True
            self.ended[host].set()
        elif words.pop("start", None) != self.address:
            return  # of an earlier start
        elif kind == "memory":
            self.ranks.setdefault(words["rank"], diagnose.RankSeen(words["rank"], host)).memory = words["text"]
        elif kind == "exit":
            self._note_exit(**words)
        elif kind == "alive":
            self._note_states(host, words["states"])
            for rank, status in words["exits"]:
                self._note_exit(rank, status)
        elif kind == "beat":
            self._note_beat(host, words)
        elif kind == "log":
            self._copy_log(host, **words)
        elif kind == "typed":
            self.typed.set()
        elif kind == "ended":
            self.ended[host].set()

    def _copy_log(self, host: str, rank: int, run: str, offset: int, packed: str) -> None:
        """Puts what a rank of another host records where the dashboard of this machine looks for it."""
        if host not in self.copies:
            self.copies[host] = Copy(run_here(self.launching, run) / "logs", self.links[host].machine)
        copy = self.copies[host]
        if copy is not None:
            try:
                copy.write(rank, offset, zlib.decompress(base64.b64decode(packed)))
            except OSError as error:
                self.console.note(f"the logs of {host} are not copied to {copy.logs}: {error.strerror}")
                self.copies[host] = None

    def _note_exit(self, rank: int | None, status: int) -> None:
        self.ranks[self.first if rank is None else rank].status = status

    def _note_states(self, host: str, states: dict[str, str]) -> None:
        for rank, state in states.items():
            seen = self.ranks.setdefault(int(rank), diagnose.RankSeen(int(rank), host))
            if state != "stopped":
                seen.stopped_since = None
                if state == "gone" and self.first == -1:
                    seen.status = 0  # how it ended is mpirun's to tell
            elif seen.stopped_since is None:
                seen.stopped_since = time.monotonic()

    def _note_beat(self, host: str, facts: dict[str, Any]) -> None:
        seen = self.ranks.setdefault(facts["rank"], diagnose.RankSeen(facts["rank"], host))
        seen.beats, seen.waiting = True, facts["waiting"]
        now = time.monotonic()
        seen.waiting_since, seen.passing_since = now - facts["seconds"], now - facts["passing_seconds"]
        seen.passing, seen.passes = facts["passing"], facts["passes"]
        if facts["rank"] == 0:
            self.run, self.checkpoint = facts.get("run"), facts.get("checkpoint")


async def prepared(launching: Launching, link: Link, host: Host, run: str) -> None:
    """Has a host keep a process ready for each of its ranks, to go on with a run. Those that mpirun starts cannot be kept."""
    command = as_command(launching)
    if launching.backend == "mpi" or len(command) < 2 or not command[1].endswith(".py"):
        return
    processes = []
    for place in range(host.slots):
        devices = {"CUDA_VISIBLE_DEVICES": str(place)} if launching.backend == "nccl" else {}
        environment = {**devices, "PYTHONUNBUFFERED": "1", **launching.environment}
        processes.append({"command": command, "environment": environment})
    with contextlib.suppress(ConnectionError):
        expected = resumed(launching.command, run, same_world=True)
        words = {"processes": processes, "directory": launching.directory, "expected": expected, "nice": launching.nice}
        await link.ask("prepare", PREPARE_SECONDS, **words)


async def _all_set(events: Sequence[asyncio.Event]) -> None:
    for event in events:
        await event.wait()
