"""One attempt to run a job: all ranks are started on their hosts, watched, and ended together."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import secrets
import signal
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from lib.distributed import run_secret
from lib.launch import patience, rank_faults, reachable_hosts, topology
from lib.launch.agent_link import Link, connect
from lib.launch.agent_messages import RankProcess, Start
from lib.launch.host_ranks import KILLED_SECONDS, LAST_WORDS_SECONDS
from lib.launch.hostfile import Host
from lib.launch.job import Job, full_command, next_port, resume_command
from lib.launch.rank_console import Console
from lib.launch.rank_faults import Fault
from lib.launch.rank_processes import processes_of
from lib.launch.world_state import WorldState
from lib.system import network

TICK_SECONDS = 0.03
SETTLE_SECONDS = 0.5  # after a death, for the others to report why they end
END_ANSWER_SECONDS = 1.0  # for an agent to report that its ranks have ended, beyond what it may take to end them
PREPARE_SECONDS = 60.0  # for a process to import and read everything
PREPARE_AFTER_SECONDS = 1.0  # the ranks that are about to train come first
CUT_TIMES = (
    2.5  # the limit of silence: between hosts that both answer; a link of 1 Mbit/s loses much of what it is sent
)
CUT_SECONDS = 0.3  # for all hosts to say of which others they hear nothing
CALLED_SECONDS = 1.0  # within which all hosts call each other once: so far apart the links of one cut fall silent
PROBE_AGAIN_TIMES = 5.0  # the limit of silence, between two looks whether hosts reach each other, during one wait


@dataclass(frozen=True)
class Outcome:
    """How an attempt ended."""

    status: int
    fault: Fault | None = None
    run: str | None = None  # folder to resume from
    interrupted: bool = False
    rejoined: bool = False  # ended at a checkpoint, because a host that was missing is back
    reached: tuple[Host, ...] | None = None  # hosts that take connections from each other, where that was the fault


class HostNames:
    """What plan, logs and calibration call each host of a launch: fixed at its first start, for all that follow.

    Two machines of one name are two. Each stays so while the other is away, and whatever its network calls it. With
    them goes what each host's agent called its folder.
    """

    def __init__(self) -> None:
        self.machines: dict[str, tuple[str, str]] = {}  # name and machine id, by the host file's names
        self.names: dict[str, str] = {}
        self.agents: dict[str, str] = {}  # the folder of each host's agent, in the last start with that host

    def name_of_each(self, links: Sequence[Link]) -> list[str]:
        """The names of hosts that are about to start, in their order."""
        for link in links:
            self.machines.setdefault(link.name, (link.machine, link.identity))
        for host, name in zip(self.machines, network.distinct_names([*self.machines.values()]), strict=True):
            self.names.setdefault(host, name)
        return [self.names[link.name] for link in links]


class Attempt:
    """All ranks of a job, started once. `world` is what they have reported."""

    def __init__(
        self,
        job: Job,
        console: Console,
        here: Host | None = None,
        links: dict[str, Link] | None = None,
        standbys: bool | None = False,
        names: HostNames | None = None,
        secret: bytes | None = None,
    ):
        """Says what is to be started, and how.

        Args:
            here: the only host whose ranks are started, where people start the others.
            links: agents that are there from an earlier attempt, by host; those that answer are there for the next one.
                By default all are ended with this one.
            standbys: whether the hosts get processes ready for another attempt; None: where one of them is a Mac.
            names: those of an earlier attempt, which stay.
            secret: by which the ranks know each other, where other launchers start some of them; else a fresh one.
        """
        self.job, self.console = job, console
        self.hosts_to_start = [here] if here else list(job.hosts)
        self.links: dict[str, Link] = {} if links is None else links
        self.keeps_links, self.standbys = links is not None, standbys
        self.names = names or HostNames()
        self.secret = secret or secrets.token_bytes(32)
        # Not in TMPDIR, which may differ: mpirun's ranks look for their host's agent where the first host has its own.
        self.address = f"/tmp/tandem-{secrets.token_hex(8)}"
        self.world = WorldState(job, console, self.address)
        self.systems: dict[str, str] = {}  # by host, once all of them have answered: Darwin, Linux
        self.back: list[Link] = []  # to hosts that were missing, and could take part again
        self.takes_input = False
        self.named_stragglers: set[int] = set()
        self.preparing: list[asyncio.Future[None]] = []  # of standbys
        self.probing: asyncio.Future[tuple[Host, ...] | None] | None = None  # which hosts reach each other
        self.probed_from = self.probed = 0.0  # when that began and is over, by time.monotonic()
        self.cut_seen: float | None = None  # since when a host knows of a cut, by time.monotonic()
        self.reached: tuple[Host, ...] | None = None

    async def go(self, interrupts: asyncio.Queue[int]) -> Outcome:
        """Starts, watches, and ends all ranks."""
        new = [host for host in self.hosts_to_start if host.name not in self.links]
        connecting = asyncio.gather(*(connect(self.job, host) for host in new), return_exceptions=True)
        interrupt = asyncio.ensure_future(interrupts.get())
        early: set[asyncio.Future[Any]] = {connecting, interrupt}
        await asyncio.wait(early, return_when=asyncio.FIRST_COMPLETED)
        if interrupt.done():
            connecting.cancel()
            await asyncio.gather(connecting, return_exceptions=True)
            return Outcome(128 + interrupt.result(), interrupted=True)
        interrupt.cancel()
        connected = connecting.result()
        self.links.update({link.name: link for link in connected if isinstance(link, Link)})
        errors = [str(error) for error in connected if isinstance(error, BaseException)]
        try:
            if errors:
                away = {host.name for host in new} - self.links.keys()
                return self._not_started(1, Fault("lost", "; ".join(errors), tuple(away)))
            self.systems = {link.name: link.system for link in self._own_links()}
            if (refusal := topology.refusal(self.job.backend, self.systems)) is not None:
                return self._not_started(2, Fault("refused", refusal, tuple(self.systems)))
            if self.standbys is None:
                self.standbys = "Darwin" in self.systems.values()
            await self.start_ranks()
            return await self._watch(interrupts)
        finally:
            for task in self.preparing:
                task.cancel()
            if not self.keeps_links:
                await asyncio.gather(*(link.close() for link in self.links.values()))

    def type(self, text: str | None) -> None:
        """Hands input on to rank 0."""
        if (link := self.links.get(self.job.hosts[0].name)) is not None:
            link.send("typed", text=text)

    # ---- The start

    def _not_started(self, status: int, fault: Fault) -> Outcome:
        self._report(fault)
        return Outcome(status, fault)

    async def start_ranks(self) -> None:
        """Has every host's agent start its processes.

        Raises:
            UserError: the name of a host cannot be looked up.
        """
        folders = {link.name: f"{self.address}-{link.machine}" for link in self.links.values()}
        hosts = self.job.hosts
        self.names.agents.update({host.name: folders[host.name] for host in hosts if host.name in folders})
        # On a thread: a name may take seconds to look up, in which no agent would be pinged.
        work = await asyncio.to_thread(processes_of, self.job, [folders.get(host.name, "") for host in hosts])
        work_of_host = dict(zip((host.name for host in hosts), work, strict=True))
        links = self._own_links()
        for link, name in zip(links, self.names.name_of_each(links), strict=True):
            processes, files = work_of_host[link.name]
            self.world.add_host(link, [process["rank"] for process in processes])
            link.on_message = functools.partial(self.world.receive, link.name)
            request = Start(
                address=self.address,
                processes=processes,
                files={**files, run_secret.FILE: self.secret.hex()},
                directory=self.job.directory,
                silent_seconds=max(patience.LEAST_SILENCE_SECONDS, self.job.silent_seconds),
                nice=self.job.nice,
                awake=True,
                sends_logs=not link.is_local,
                host=name,
                end_seconds=topology.end_seconds(self.job.backend, is_fault=True),
            )
            link.send("start", **asdict(request))
        self.takes_input = True

    def _own_links(self) -> list[Link]:
        return [self.links[host.name] for host in self.hosts_to_start if host.name in self.links]

    # ---- While the ranks run

    async def _watch(self, interrupts: asyncio.Queue[int]) -> Outcome:
        world = self.world
        checkpoint = None  # the newest one when the hosts became complete again
        while world.is_running():
            fault = world.fault()
            if fault is None or fault.kind == "wedged":
                fault = self._look_for_a_cut(fault)
            if fault is not None:
                return await self._fail(fault, interrupts)
            self._name_stragglers()
            if world.run is not None and self.standbys and not self.preparing:
                self.preparing = [
                    asyncio.ensure_future(self._prepare(self.links[host.name], host, world.run))
                    for host in self.job.hosts
                ]
            is_complete = any(not link.closed for link in self.back)  # or more so than before
            if not is_complete or not all(task.done() for task in self.preparing):
                checkpoint = world.checkpoint
            elif world.checkpoint != checkpoint:
                step = world.checkpoint
                self.console.note(f"a host is back: all go on together from the checkpoint of step {step}")
                interrupted = await self._end(signal.SIGTERM, interrupts)
                return Outcome(130 if interrupted else 0, None, world.run, interrupted, rejoined=True)
            try:
                async with asyncio.timeout(TICK_SECONDS):
                    number = await interrupts.get()
            except TimeoutError:
                continue
            self.console.note("ending every rank (once more: at once)")
            await self._end(signal.SIGINT, interrupts)
            return Outcome(128 + number, None, world.run, interrupted=True)
        fault = world.fault()
        await self._end(signal.SIGTERM, interrupts)  # nothing is left but last lines under way
        if fault is not None:
            self._report(fault)
        return Outcome(world.worst_status(), fault, world.run)

    def _name_stragglers(self) -> None:
        after_seconds = max(patience.LEAST_SILENCE_SECONDS, self.job.silent_seconds)
        for rank in rank_faults.stragglers(time.monotonic(), list(self.world.ranks.values()), after_seconds):
            if rank.rank not in self.named_stragglers:
                self.named_stragglers.add(rank.rank)
                self.console.note(f"rank {rank.rank} on {rank.host} lets the others wait")

    def _look_for_a_cut(self, endless: Fault | None) -> Fault | None:
        """Where all ranks wait, asks whether their hosts still reach each other: sooner than --wedged-seconds.

        endless: the fault that their wait has no end, where it is beyond that limit. It names no host, so it is told
        only once the answer is there; that has a limit of its own.
        """
        world, limit = self.world, self.job.silent_seconds
        now = time.monotonic()
        if (cut := self._seen_cut(now)) is not None:
            return cut
        waited = rank_faults.common_wait_seconds(now, list(world.ranks.values()))
        if len(self.hosts_to_start) < 2 or self.job.backend != "ring" or waited <= limit / 2:
            self.probing = None
        elif self.probing is None or (self.probing.done() and now > self.probed + PROBE_AGAIN_TIMES * limit):
            # The kernel takes connections on a busy host as on any other; who asks and who answers may be late.
            seconds = patience.work_limit(max(reachable_hosts.PROBE_SECONDS, limit / 2), world.load())
            seconds = patience.silence_limit(seconds, world.usual_lateness())
            port = None if world.run else next_port(self.job)  # while they start, ranks listen at theirs
            probe = reachable_hosts.reach_each_other(self.job, self.links, self.job.hosts, seconds, port)
            self.probing, self.probed_from, self.probed = asyncio.ensure_future(probe), now, now + seconds
        elif self.probing.done() and (reached := self.probing.result()) is not None:
            # A new connection waits behind all that ranks have sent, on a link of 1 Mbit/s for seconds.
            there = {host.name for host in reached}
            there |= rank_faults.heard_both_ways(list(world.ranks.values()), self.probed_from)
            if cut_off := [name for name in world.hosts if name not in there]:
                self.reached = tuple(host for host in self.job.hosts if host.name in there)
                return rank_faults.cut_between(list(world.hosts), cut_off, waited)
        return endless if self.probing is None or self.probing.done() else None

    def _seen_cut(self, now: float) -> Fault | None:
        """What the systems of the ranks' hosts know of a cut between them, once all of them have had time to say so."""
        ranks, names = list(self.world.ranks.values()), list(self.world.hosts)
        links = rank_faults.cut_links(now, ranks, CUT_TIMES * self.job.silent_seconds)
        if not links or any(host.addresses for host in self.job.hosts):  # in a ring of cables each has its own
            self.cut_seen = None
            return None
        self.cut_seen = self.cut_seen or now
        if now - self.cut_seen < CUT_SECONDS:
            return None
        links = rank_faults.cut_links(now, ranks, CUT_TIMES * self.job.silent_seconds - CALLED_SECONDS)
        without = rank_faults.cut_off(names, links)
        self.reached = tuple(host for host in self.job.hosts if host.name not in without)
        return rank_faults.cut_between(names, without, CUT_TIMES * self.job.silent_seconds)

    async def _prepare(self, link: Link, host: Host, run: str) -> None:
        await asyncio.sleep(PREPARE_AFTER_SECONDS)
        await prepare_standbys(self.job, link, host, run)

    # ---- The end

    async def _fail(self, fault: Fault, interrupts: asyncio.Queue[int]) -> Outcome:
        world = self.world
        if fault.kind in ("died", "diverged", "behind"):
            fault = await self._settle(fault)
        status = world.worst_status() or 1
        self._report(fault)
        if fault.kind in ("lost", "silent"):  # its agent ends its ranks by itself
            late = world.late_hosts(self.job.silent_seconds / 2)
            for name in dict.fromkeys((*fault.hosts, *late)):  # one about to be silent as well is not waited for
                self._give_up(name)
        # A stopped process receives no other signal until it is continued, which an agent does after any other.
        is_stopped = fault.kind == "stopped" and self.job.backend not in topology.RDMA_BACKENDS
        number = signal.SIGKILL if is_stopped else signal.SIGTERM
        interrupted = await self._end(number, interrupts, is_fault=True)
        told = world.fault()
        if fault.kind == "died" and told is not None and told.kind in ("diverged", "behind"):  # told late
            self._report(fault := told)
        return Outcome(status, fault, world.run, interrupted, reached=self.reached)

    async def _settle(self, fault: Fault) -> Fault:
        """Waits a moment after a death: other ranks may say why, and end by themselves. Returns what is known then."""
        world = self.world
        by_itself = any(process.status is not None and 0 < process.status < 128 for process in world.processes())
        if by_itself:
            deadline = time.monotonic() + SETTLE_SECONDS
            while time.monotonic() < deadline and world.is_running():
                await asyncio.sleep(0.02)
        elif world.is_mpi and len(world.hosts) > 1:  # of other hosts only their agents know
            await asyncio.sleep(SETTLE_SECONDS)
        ranks = world.ranks.values()
        if any(one.memory or one.cause or one.lost_another or one.diverged or one.newer for one in ranks):
            return world.fault() or fault
        return fault

    def _give_up(self, name: str) -> None:
        self.world.hosts[name].closed = True
        self.links[name].drop()
        if self.keeps_links:
            del self.links[name]

    def _report(self, fault: Fault) -> None:
        self.console.note(f"{fault.kind}: {fault.message}")

    async def _end(self, number: signal.Signals, interrupts: asyncio.Queue[int], is_fault: bool = False) -> bool:
        """Ends every rank on every host; an interrupt kills at once. Returns whether there was one."""
        links, world = self._own_links(), self.world
        grace_seconds = topology.end_seconds(self.job.backend, is_fault)
        for link in links:
            link.send("end", number=int(number), grace_seconds=grace_seconds)
        alive = [link.name for link in links if not world.hosts[link.name].closed]
        ended = asyncio.ensure_future(self._hear_the_end(alive, grace_seconds))
        again = asyncio.ensure_future(interrupts.get())
        waits: set[asyncio.Future[Any]] = {ended, again}
        await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        interrupted = again.done()
        if interrupted:
            for link in links:
                link.send("end", number=int(signal.SIGKILL), grace_seconds=0.0)
            await asyncio.wait({ended}, timeout=1.0)
        again.cancel()
        ended.cancel()
        for link in self._own_links() if self.keeps_links else []:
            if link.closed or not world.ended[link.name].is_set():  # who does not answer is connected anew, if at all
                self._give_up(link.name)
        return interrupted

    async def _hear_the_end(self, names: Sequence[str], grace_seconds: float) -> None:
        """Waits until the hosts say that their ranks have ended; one that still speaks gets what its agent may take.

        One that is silent by now is not waited for: its agent ends its ranks by itself.
        """
        world, now = self.world, time.monotonic()
        answer_seconds = patience.work_limit(END_ANSWER_SECONDS, world.load())
        deadline = now + grace_seconds + answer_seconds
        longer = patience.work_limit(KILLED_SECONDS + LAST_WORDS_SECONDS, world.load())
        while now < deadline and not all(world.ended[name].is_set() for name in names):
            silent = world.late_hosts(self.job.silent_seconds)
            names = [name for name in names if name not in silent]
            await _all_set([world.ended[name] for name in names], TICK_SECONDS)
            now = time.monotonic()
        speak = [name for name in names if world.has_spoken(name, now, answer_seconds)]
        await _all_set([world.ended[name] for name in speak], deadline + longer - now)


async def prepare_standbys(job: Job, link: Link, host: Host, run: str) -> None:
    """Has a host keep a standby for each of its ranks, to resume a run. mpirun starts its ranks itself: none there."""
    command = full_command(job)
    if job.backend == "mpi" or len(command) < 2 or not command[1].endswith(".py"):
        return
    processes: list[RankProcess] = []
    for index in range(host.slots):
        devices = {"CUDA_VISIBLE_DEVICES": str(index)} if job.backend == "nccl" else {}
        environment = {**devices, "PYTHONUNBUFFERED": "1", **job.environment}
        processes.append({"rank": None, "command": command, "environment": environment})
    with contextlib.suppress(ConnectionError):
        expected = resume_command(job.command, run, same_world=True)
        await link.ask(
            "prepare",
            PREPARE_SECONDS,
            processes=processes,
            directory=job.directory,
            expected=expected,
            nice=job.nice,
        )


async def _all_set(events: Sequence[asyncio.Event], limit_seconds: float) -> None:
    """Waits for all of the events, at most so long."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(limit_seconds):
            for event in events:
                await event.wait()
