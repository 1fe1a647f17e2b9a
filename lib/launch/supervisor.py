"""A job from its first start to its last: after a fault the ranks are started again, on the hosts that answer."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import functools
import os
import secrets
import signal
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any

from lib.errors import UserError
from lib.launch import reachable_hosts, topology
from lib.launch.agent_link import Link, connect
from lib.launch.attempt import Attempt, Outcome, prepare_standbys
from lib.launch.hostfile import Host
from lib.launch.job import Job, next_port, resume_command
from lib.launch.patience import Load, work_limit
from lib.launch.rank_console import Console
from lib.launch.rank_faults import Fault

ANSWER_SECONDS = 3.0  # for a host that has to show that it is there, where another one has
LOOK_SECONDS = 0.1  # between looks whether one has, or the user interrupts
PATIENCE_SECONDS = 900.0  # while none of the hosts answers
QUICK_STARTS = 2  # in a row without a new checkpoint, before others wait
LONGEST_PAUSE_SECONDS = 30.0
# By default where a host is a Mac: a lit display may end a rank there at any time (lib/system/metal.py).
MAC_RESTARTS = 3
HOPELESS = (
    "not started again: the updates are not finite, as before; lower train.learning_rate or look at the rows of that "
    "step, then --resume {run}"
)
LOOK_OUT_SECONDS = 1.0  # between looks for a host that is missing
AGAIN_SECONDS = 300.0  # until a host that was taken back and could not take part is looked for again; then twice that
INPUT_SECONDS = 1.0  # between looks whether the rank that was given input is still there


def pause_seconds(fruitless: int) -> float:
    """The pause before another start, after so many in a row without a new checkpoint: 0, 0, then 1, 2, 4 ... 30 s."""
    late = min(fruitless, 100) - QUICK_STARTS
    return min(2.0**late, LONGEST_PAUSE_SECONDS) if late >= 0 else 0.0


def usual_restarts(systems: Iterable[str]) -> int:
    """The default of --max-restarts: more than 0 if one of the hosts is a Mac."""
    return MAC_RESTARTS if "Darwin" in systems else 0


def holders_of_newest(
    before: Sequence[Host], told: Mapping[str, int], hosts: Sequence[Host], fault: Fault | None = None
) -> tuple[Host, ...]:
    """The hosts whose disks have the newest checkpoint: one of them has to be the first of the next start.

    All go on from the first host's. One that has just come back has older ones, until it has written the next.

    Args:
        before: those of whom one was the first of this start.
        told: what each host has written since, by WorldState.checkpoints.
        hosts: of this start.
        fault: that ended it: where it went behind what some disks have, by their ranks' own words.
    """
    if fault is not None and fault.kind == "behind":
        return tuple(host for host in hosts if host.name in fault.hosts)
    newest = max(told.values(), default=None)
    return tuple(before) if newest is None else tuple(host for host in hosts if told.get(host.name) == newest)


def is_led_by_another(fault: Fault | None, hosts: Sequence[Host]) -> bool:
    """Whether a disk has a newer checkpoint than the first of these hosts, by the ranks' own words."""
    return fault is not None and fault.kind == "behind" and not any(host.name in fault.hosts for host in hosts[:1])


def is_hopeless(fault: Fault | None, before: Fault | None, has_new_checkpoint: bool) -> bool:
    """Whether another start would end the same: twice in a row no update was finite, from one and the same checkpoint.

    Once it may have been a chip that failed, on a host that another start does without.
    """
    kinds = [one.kind if one is not None else "" for one in (before, fault)]
    return kinds == ["diverged", "diverged"] and not has_new_checkpoint


class Unfit:
    """Hosts that were taken back and could not take part: the run's folder, a disk or the data was not there."""

    def __init__(self) -> None:
        self.until: dict[str, float] = {}  # when each is looked for again, by time.monotonic()
        self.seconds: dict[str, float] = {}  # how long that was to be

    def note(self, outcome: Outcome, attempt: Attempt, before: Sequence[Host]) -> bool:
        """Whether a start ended by what a host lacks that it took back; then others go on without it for a while.

        Where ranks say whose error it was, that of a host which was there before is none of this kind.

        Args:
            before: of the start before it.
        """
        joined = [host.name for host in attempt.job.hosts if host.name not in {one.name for one in before}]
        has_others = 0 < len(joined) < len(attempt.job.hosts)
        if not has_others or outcome.rejoined or outcome.status != 2 or attempt.world.checkpoint is not None:
            return False
        refused = {rank.host for rank in attempt.world.ranks.values() if rank.refused}
        unfit = [name for name in joined if name in refused or not refused]
        for name in unfit:
            self.seconds[name] = 2 * self.seconds.get(name, AGAIN_SECONDS / 2)
            self.until[name] = time.monotonic() + self.seconds[name]
            attempt.console.note(
                f"{name} was taken back and cannot take part, as it says above; mend that: "
                f"it is taken back again in {self.seconds[name]:.0f} s"
            )
        return bool(unfit)

    def pause_seconds(self, host: Host) -> float:
        """Until a host is looked for."""
        return max(0.0, self.until.get(host.name, 0.0) - time.monotonic())

    def without(self, hosts: tuple[Host, ...], links: Mapping[str, Link]) -> tuple[Host, ...]:
        """The hosts but these, if one of the others is there."""
        others = tuple(host for host in hosts if not self.pause_seconds(host))
        return others if any(host.name in links and not links[host.name].closed for host in others) else hosts


async def supervise(
    job: Job,
    console: Console,
    max_restarts: int | None,
    restart_with: str,
    here: Host | None = None,
    secret: bytes | None = None,
) -> int:
    """Runs the command to its end, starting it again as often as it may be; returns the exit status.

    Args:
        max_restarts: None for what suits the hosts' systems.
        restart_with: "all" waits for every host before another start; "survivors" goes on with those that answer.
        here, secret: as Attempt has them.
    """
    loop = asyncio.get_running_loop()
    interrupts = _interrupts(loop)
    links: dict[str, Link] = {}  # an agent that is there need not be reached again
    attempt = Attempt(job, console, here, links, None if max_restarts is None else max_restarts > 0, secret=secret)
    _hand_on_input(loop, lambda: attempt)
    everyone, hosts, run, starts, restarts, fruitless, is_first = job.hosts, job.hosts, None, 1, 0, 0, True
    holders = hosts
    fault_before: Fault | None = None
    unfit, hosts_before = Unfit(), job.hosts
    looking: asyncio.Future[Any] = asyncio.gather()
    try:
        while True:
            missing = tuple(host for host in everyone if host not in hosts)
            looking = looking_out(attempt, missing, everyone, unfit)
            outcome = await _outcome(attempt, interrupts, is_first)
            if max_restarts is None and attempt.systems:  # all hosts were there once
                max_restarts = usual_restarts(attempt.systems.values())
            looking.cancel()  # and not waited for: it may be about to end an agent that does not answer
            run = outcome.run or run
            if outcome.interrupted or (outcome.status == 0 and not outcome.rejoined):
                return outcome.status
            is_behind = here is None and is_led_by_another(outcome.fault, attempt.job.hosts)
            broken, fault_before = time.monotonic(), None if is_behind else fault_before
            fruitless = 0 if outcome.rejoined else fruitless  # it has made the checkpoint at which it ended
            if not outcome.rejoined and not is_behind and not unfit.note(outcome, attempt, hosts_before):
                is_wrong_input = outcome.status == 2 and is_first  # later it may be a disk that is full for a while
                if is_wrong_input or restarts >= (max_restarts or 0):
                    return outcome.status
                if is_hopeless(outcome.fault, fault_before, attempt.world.checkpoint is not None):
                    console.note(HOPELESS.format(run=run))
                    return outcome.status
                fault_before = outcome.fault
                restarts += 1
                fruitless = 0 if attempt.world.checkpoint is not None else fruitless + 1
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(pause_seconds(fruitless)):
                        return 128 + await interrupts.get()
            patience_seconds = PATIENCE_SECONDS if run else 0.0  # without a run there is nothing to lose
            hosts_before = attempt.job.hosts
            able = replace(job, hosts=unfit.without(job.hosts, links))
            hosts = await _next_hosts(able, console, links, restart_with == "all", patience_seconds, interrupts)
            holders = holders_of_newest(holders, attempt.world.checkpoints(), attempt.job.hosts, outcome.fault)
            placed = await _placed(attempt.job, links, hosts, everyone, outcome)
            # Where nobody has the newest checkpoint, those that were there are ahead of those that were not.
            placed = topology.led_by(holders, topology.led_by(attempt.job.hosts, placed))
            holders = holders if {host.name for host in holders} & {host.name for host in placed} else placed[:1]
            hosts = tuple(host for one in placed for host in hosts if host.name == one.name)
            if not interrupts.empty():
                return 128 + interrupts.get_nowait()
            has_newest = not is_behind or not is_led_by_another(outcome.fault, placed)
            if not hosts or (is_first and not has_newest):  # what it alone has would be undone
                who = "no host answers" if not hosts else "who has the newest checkpoint answers no more"
                console.note(f"{who}; " + (f"go on later by --resume {run}" if run else "nothing was saved"))
                return outcome.status
            starts, is_first = starts + 1, is_first and is_behind
            command = resume_command(job.command, run, hosts == everyone) if run else job.command
            lead = f", {placed[0].name} first" if is_behind else ""
            whence = f", going on with {run}" if run else ""
            seconds = time.monotonic() - broken
            console.note(f"start {starts}, {seconds:.1f} s later, {_on(hosts, everyone)}{lead}{whence}")
            again = replace(job, hosts=placed, command=command)
            attempt = Attempt(again, console, None, links, restarts < (max_restarts or 0), attempt.names)
    finally:
        looking.cancel()
        await asyncio.gather(looking, *(link.close() for link in links.values()), return_exceptions=True)


def _on(hosts: Sequence[Host], everyone: Sequence[Host]) -> str:
    """Where a start is made, for its line."""
    without = ", ".join(host.name for host in everyone if host not in hosts)
    return f"on {len(hosts)} of {len(everyone)} hosts" + (f" (without {without})" if without else "")


def _interrupts(loop: asyncio.AbstractEventLoop) -> asyncio.Queue[int]:
    """The signals that end the job, as they come. Under nohup the training is meant to outlive its terminal."""
    interrupts: asyncio.Queue[int] = asyncio.Queue()
    hangups = [signal.SIGHUP] if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN else []
    for number in (signal.SIGINT, signal.SIGTERM, *hangups):
        loop.add_signal_handler(number, interrupts.put_nowait, int(number))
    return interrupts


async def _reach(job: Job, links: dict[str, Link], host: Host) -> bool:
    """Whether a host answers; its agent then is among the links."""
    if host.name not in links or links[host.name].closed:
        if host.name in links:
            links[host.name].drop()
        try:
            links[host.name] = await connect(job, host)
        except (OSError, UserError):  # it is away, or no process can be started here now
            links.pop(host.name, None)
    return host.name in links


async def _reach_all(
    job: Job, links: dict[str, Link], hosts: tuple[Host, ...], all_of_them: bool, interrupts: asyncio.Queue[int]
) -> list[bool]:
    """Whether each host answers, in as long as a first start allows; once one does, the others get less time.

    A login may take longer than usual, and is not to be cut off at every try.
    """
    tries = [asyncio.ensure_future(_reach(job, links, host)) for host in hosts]
    enough = time.monotonic() + work_limit(ANSWER_SECONDS, Load().look())  # of the other machines nothing is known
    try:
        while interrupts.empty() and not all(task.done() for task in tries):
            if not all_of_them and time.monotonic() > enough and any(task.done() and task.result() for task in tries):
                break
            await asyncio.wait(tries, timeout=LOOK_SECONDS)
    finally:
        for task in tries:
            task.cancel()
        await asyncio.gather(*tries, return_exceptions=True)
    return [task.done() and not task.cancelled() and task.result() for task in tries]


async def answering_hosts(
    job: Job,
    links: dict[str, Link],
    hosts: tuple[Host, ...],
    all_of_them: bool,
    patience_seconds: float,
    interrupts: asyncio.Queue[int],
) -> tuple[Host, ...]:
    """The hosts that answer, in their order; where all are wanted, waits until they do (or for an interrupt).

    Where none does, it may be the network of this machine: they are asked again, for as long as patience lasts.
    """
    connected = tuple(host for host in hosts if host.name in links and not links[host.name].closed)
    if connected and not all_of_them:  # a host that does not answer at once is taken in when it is back
        return connected
    deadline = time.monotonic() + patience_seconds
    while True:
        answered = await _reach_all(job, links, hosts, all_of_them, interrupts)
        enough = all(answered) if all_of_them else any(answered) or time.monotonic() > deadline
        if enough or not interrupts.empty():
            return tuple(host for host, there in zip(hosts, answered, strict=True) if there)
        await asyncio.sleep(1)


async def _next_hosts(
    job: Job,
    console: Console,
    links: dict[str, Link],
    all_of_them: bool,
    patience_seconds: float,
    interrupts: asyncio.Queue[int],
) -> tuple[Host, ...]:
    """The hosts that answer, in the job's order; all of them where they are wanted, or RDMA knows no other way."""
    hosts = await answering_hosts(job, links, job.hosts, all_of_them, patience_seconds, interrupts)
    is_rdma = len(hosts) > 1 and job.backend in topology.RDMA_BACKENDS
    if is_rdma and (wanted := topology.rdma_fault(job.backend, hosts)) is not None:
        console.note(f"{job.backend} wants {wanted}: waiting for all hosts")
        hosts = await answering_hosts(job, links, job.hosts, True, patience_seconds, interrupts)
    return hosts


async def _placed(
    before: Job, links: dict[str, Link], hosts: tuple[Host, ...], everyone: tuple[Host, ...], outcome: Outcome
) -> tuple[Host, ...]:
    """Those of the hosts that reach each other, where that is in doubt; each at an address that suits its neighbours.

    In a ring of cables a host's address is known to the one before it alone: it needs another for another neighbour. A
    host that the start before went without may answer the launcher, and still take no connection from the others.

    before: the job as it was started last.
    """
    if outcome.reached is not None and {host.name for host in outcome.reached} <= {host.name for host in hosts}:
        return outcome.reached
    is_cut = outcome.reached is not None or (outcome.fault is not None and outcome.fault.kind in ("wedged", "late"))
    is_moved = before.backend == "ring" and hosts != everyone and any(host.addresses for host in hosts)
    is_back = not {host.name for host in hosts} <= {host.name for host in before.hosts}
    if len(hosts) < 2 or not (is_cut or is_moved or is_back):
        return hosts
    return await reachable_hosts.reach_each_other(before, links, hosts) or hosts


async def _outcome(attempt: Attempt, interrupts: asyncio.Queue[int], is_first: bool) -> Outcome:
    """How an attempt ended. A host's name that cannot be looked up is the user's to mend at the first start alone.

    Raises:
        UserError: at the first start, what is wrong with the host file.
    """
    try:
        return await attempt.go(interrupts)
    except UserError as error:
        if is_first:
            raise
        attempt.console.note(f"refused: {error}")
        return Outcome(1, Fault("refused", str(error), ()))


def looking_out(
    attempt: Attempt, missing: Sequence[Host], everyone: tuple[Host, ...], unfit: Unfit
) -> asyncio.Future[Any]:
    """Looks for missing hosts until it is cancelled. What goes wrong with one is noted, and is none of the others'."""

    async def look(host: Host) -> None:
        try:
            await asyncio.sleep(unfit.pause_seconds(host))
            await _look_out(attempt, host, everyone)
        except Exception as error:  # nobody waits for it
            attempt.console.note(f"{host.name} is not looked for any more: {error!r}")

    looking = asyncio.gather(*map(look, missing))
    looking.add_done_callback(lambda done: done.cancelled() or done.exception())  # asyncio would tell it as unseen
    return looking


async def _look_out(attempt: Attempt, host: Host, everyone: tuple[Host, ...]) -> None:
    """Looks for a missing host, while it could not take part again."""
    while True:
        await asyncio.sleep(LOOK_OUT_SECONDS)
        link = attempt.links.get(host.name)  # its ports were closed, its agent and what that keeps ready are there
        if link is not None and link in attempt.back and not link.closed:
            continue
        try:
            if link is None or link.closed:
                link = await connect(attempt.job, host)
        except (OSError, UserError):  # it is away, or no process can be started here now
            continue
        try:
            if await _could_join(attempt, link, host, everyone):
                attempt.links[host.name] = link
                attempt.back.append(link)
        finally:
            if attempt.links.get(host.name) is not link:
                await link.close()


async def _could_join(attempt: Attempt, link: Link, host: Host, everyone: tuple[Host, ...]) -> bool:
    """Whether a missing host takes connections at the run's ports from one that trains; then it prepares standbys.

    Not before the agent that was cut off there has ended its ranks: one of them owns the run's folder on that disk.
    """
    job, training, token = attempt.job, {one.name for one in attempt.job.hosts}, secrets.token_hex(32)
    before = [one.name for one in reversed(topology.in_ring_order(host, everyone)) if one.name in training]
    asking = attempt.links.get(before[0] if job.backend == "ring" else job.hosts[0].name)
    port = next_port(job)  # ranks listen at those before it
    try:
        folder = attempt.names.agents.get(host.name)
        if folder is not None and await link.ask("lives", ANSWER_SECONDS, folder=folder):
            return False
        door = reachable_hosts.Door(port, token, reachable_hosts.PROBE_SECONDS)
        await link.ask("listen", ANSWER_SECONDS, **asdict(door))
        if asking is None or asking.closed:
            return False
        if await reachable_hosts.first_address(asking, host, job.hosts, door) is None:
            return False
    except ConnectionError:
        return False
    if attempt.world.run is not None:
        await prepare_standbys(job, link, host, attempt.world.run)
    return not link.closed


def _hand_on_input(loop: asyncio.AbstractEventLoop, attempt: Callable[[], Attempt]) -> None:
    """Hands our standard input on to rank 0, a piece at a time; in the background of a terminal there is none."""

    def read() -> None:
        while True:
            try:
                piece = os.read(0, 2**16)
            except OSError:
                piece = b""
            while not attempt().takes_input:
                time.sleep(0.05)
            now, text = attempt(), base64.b64encode(piece).decode() if piece else None
            now.world.input_taken.clear()
            loop.call_soon_threadsafe(functools.partial(now.type, text=text))
            if not piece:
                return
            while not now.world.input_taken.wait(INPUT_SECONDS) and attempt() is now:
                pass  # the rank that had it may have died with it

    with contextlib.suppress(OSError):
        if os.isatty(0) and os.tcgetpgrp(0) != os.getpgrp():
            return
    signal.signal(signal.SIGTTIN, signal.SIG_IGN)  # after Ctrl-Z and bg there is no input, which stops nobody
    threading.Thread(target=read, daemon=True).start()
