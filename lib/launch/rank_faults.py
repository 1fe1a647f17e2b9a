"""What is wrong with a running world, from the last reports of its hosts and ranks. Pure functions."""

from __future__ import annotations

import re
import signal
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from lib.distributed import heartbeat
from lib.launch import patience
from lib.system import mlx_failures

# What a rank's last lines mean, where it could not say it itself: Metal ends a process in the middle of C++ code.
CAUSES = (
    (
        re.compile(r"Impacting ?Interactivity"),
        "macOS ended its GPU work for the sake of a lit display (mlx#3267); put the display to sleep (pmset "
        "displaysleepnow there, or metal.display=sleep for all hosts), then try a lower metal.evaluation_seconds",
    ),
    (
        re.compile(r"Caused GPU Timeout|kIOGPUCommandBufferCallbackErrorTimeout"),
        "macOS ended GPU work that took too long; lower metal.evaluation_seconds, put the display to sleep, and end "
        "what else uses that GPU",
    ),
)
MISSED_CALLS = 2  # in a row: one may be lost
NEW_ROUND_TRIP_SECONDS = 0.4  # the least that a host's system is given for an answer beyond the limit of silence
FAILED = re.compile(rf"^error: .*?({mlx_failures.FAILED}.*?)(?:; go on with .*)?$", re.MULTILINE)


class Sign(NamedTuple):
    """What the system of a rank's host knows of a neighbour's host, as of the rank's last beat."""

    at: float  # when anything came from there
    data_at: float  # when anything of what ranks send each other did
    round_trip_seconds: float  # within which an answer comes nearly always
    missed_calls: int  # since then, in a row


@dataclass
class HostState:
    """What the launcher knows of a host."""

    name: str
    last_message: float  # when its agent last sent one, in seconds of the launcher's clock
    last_sign: float = 0.0  # when another host's system last got anything from it, where one says so
    round_trip_seconds: float = 0.0  # within which its system nearly always answers those that say so
    closed: bool = False  # the connection ended
    usual_lateness: float = 0.0  # of its messages, in seconds
    load: float = 1.0  # processes that want each of its cores


@dataclass
class RankState:
    """What the launcher knows of a rank."""

    rank: int
    host: str
    status: int | None = None  # once it ended; negative: by that signal
    ended_at: float | None = None  # of one that mpirun started: when it was first seen to be gone
    stopped_since: float | None = None
    waiting: str | None = None  # what it waits for, in the words of who waits (lib/distributed/world.py)
    waiting_since: float = 0.0
    beats: bool = False  # it is one of ours, and reports what it waits for
    passing: str | None = None  # the pass through the model that it is in, in the words of its caller
    passing_since: float = 0.0
    passes: int = 1  # that this is long
    cause: str | None = None  # of its death, if it said something that has a known one
    lost_another: bool = False  # it ended because another rank was gone
    checkpoint: int | None = None  # the newest that it wrote to its disk in this start: its step
    memory: str | None = None  # what shows that it ran out of memory
    diverged: str | None = None  # why no further update can be made, whoever takes it
    newer: heartbeat.Reached | None = None  # what its disk has beyond the first host's, which the run may not undo
    refused: bool = False  # it met an error of what its host was given or has: then all ranks may end with it
    heard: Mapping[int, Sign] = field(default_factory=dict)  # what its host knows of those of its neighbours, by rank
    heard_at: float = 0.0  # when that was said


@dataclass(frozen=True)
class Fault:
    """Why a world cannot go on. kind: refused, died, diverged, behind, lost, silent, stopped, hung, late, wedged."""

    kind: str
    message: str
    hosts: tuple[str, ...]  # those to blame; all of them if nobody can tell


def diagnose(
    now: float,
    hosts: Mapping[str, HostState],
    ranks: Sequence[RankState],
    silent_seconds: float,
    wedged_seconds: float,
) -> Fault | None:
    """The first thing that is wrong, the surest kind first; None if nothing is.

    Args:
        silent_seconds: a host that says nothing, or a rank that is stopped, for longer is given up.
        wedged_seconds: so are a wait for other ranks and a pass through the model that go on for longer.
            Both are longer for hosts that are busy (lib/launch/patience.py).
    """
    died = [rank for rank in ranks if rank.status]
    if died:
        starved = [rank for rank in ranks if rank.memory]
        if starved:  # the others end with them, or mpirun for them
            causes = [f"rank {rank.rank} on {rank.host} ran out of memory: {rank.memory}" for rank in starved]
            return Fault("died", "; ".join(causes), tuple({rank.host for rank in starved}))
        if diverged := [rank for rank in died if rank.diverged]:
            names = ", ".join(f"rank {rank.rank} on {rank.host}" for rank in diverged)
            return Fault("diverged", f"{names}: {diverged[0].diverged}", tuple({rank.host for rank in diverged}))
        if holders := holders_of_newer(ranks):
            have = "has" if len(holders) == 1 else "have"
            newest = f"the first host lacks the run's newest checkpoint, which {' and '.join(holders)} {have}"
            return Fault("behind", newest, holders)
        died = [rank for rank in died if not rank.lost_another] or died
        # mpirun's death is reported instead of its ranks'; what one of them printed is added.
        causes = [f"rank {rank.rank} on {rank.host}: {rank.cause}" for rank in ranks if rank.cause]
        return Fault("died", "; ".join([*map(_death, died), *causes]), tuple({rank.host for rank in died}))
    working = [rank for rank in ranks if rank.status is None]
    for host in hosts.values():
        mine = [str(rank.rank) for rank in working if rank.host == host.name]
        if not mine:
            continue
        if host.closed:
            message = (
                f"the connection to {host.name} ended (rank {', '.join(mine)}): it is off, or its sshd was stopped"
            )
            return Fault("lost", message, (host.name,))
        if _is_silent(now, host, silent_seconds):
            message = (
                f"{host.name} (rank {', '.join(mine)}) has said nothing for {now - host.last_message:.1f} s: "
                "it sleeps, is off, or is cut off"
            )
            return Fault("silent", message, (host.name,))
    for rank in working:
        if rank.stopped_since is not None and now - rank.stopped_since > silent_seconds:
            message = (
                f"rank {rank.rank} on {rank.host} has been stopped for {now - rank.stopped_since:.1f} s "
                "(SIGSTOP, Ctrl-Z, a debugger)"
            )
            return Fault("stopped", message, (rank.host,))
    for rank in working:
        seconds = now - rank.passing_since
        limit = patience.work_limit(wedged_seconds, hosts[rank.host].load if rank.host in hosts else 1.0)
        if rank.passing and not rank.waiting and seconds > rank.passes * limit:
            message = (
                f"rank {rank.rank} on {rank.host} has been computing for {seconds:.1f} s ({rank.passing}), "
                "and lives: it hangs"
            )
            return Fault("hung", message, (rank.host,))
    return _mpirun_alone(now, ranks, silent_seconds) or _endless_wait(now, hosts, working, wedged_seconds)


def holders_of_newer(ranks: Sequence[RankState]) -> tuple[str, ...]:
    """The hosts whose disks have what the first host's lacks: those that have most of it.

    None where two of them went on apart from each other: which of the two is meant is the user's to say.
    """
    found = [(rank.host, rank.newer["step"], rank.newer["resume_ids"]) for rank in ranks if rank.newer is not None]
    _, newest, ids = max(found, key=lambda one: (len(one[2]), one[1]), default=("", 0, []))
    if any(ids[: len(known)] != known for _, _, known in found):
        return ()
    return tuple(dict.fromkeys(host for host, step, known in found if (step, known) == (newest, ids)))


def late_hosts(now: float, hosts: Mapping[str, HostState], limit_seconds: float) -> list[str]:
    """The hosts that are connected, and have said nothing for longer than a limit and their usual lateness."""
    return [host.name for host in hosts.values() if not host.closed and _is_silent(now, host, limit_seconds)]


def _is_silent(now: float, host: HostState, limit_seconds: float) -> bool:
    """Whether neither a host's agent nor its system has given a sign of life within a limit and its usual lateness.

    A system that is called over a slow link answers a round trip later: that is added to its limit. A link may have
    just become slow: then its round trip is not known yet. What a system gives does not count for ever: its agent may
    be stopped, and nobody ends its ranks. It counts for long: of a full link's packets some are lost, and each that is
    keeps the agent's words back for seconds.
    """
    limit = patience.silence_limit(limit_seconds, host.usual_lateness)
    most = patience.MOST_TIMES * max(patience.LEAST_SILENCE_SECONDS, limit_seconds)
    silent = now - host.last_message
    round_trip_seconds = max(host.round_trip_seconds, NEW_ROUND_TRIP_SECONDS)
    return silent > limit and (now - host.last_sign > limit + round_trip_seconds or silent > most)


def cut_links(now: float, ranks: Sequence[RankState], limit_seconds: float) -> set[frozenset[str]]:
    """The pairs of hosts of which one's system has called the other's in vain, and heard nothing for so long.

    Where both answer the launcher, a firewall or a cable is between them. No process has to have a core for it. On a
    slow link calls wait behind what ranks send: the limit grows by the longest round trip of either host. There what a
    rank says comes late, too, and tells nothing of the time since.
    """
    hosts = {rank.rank: rank.host for rank in ranks}
    known = [
        (rank.host, hosts[other], sign, min(now, rank.heard_at + heartbeat.SECONDS) - sign.at)
        for rank in ranks
        for other, sign in rank.heard.items()
        if rank.status is None and hosts.get(other, rank.host) != rank.host
    ]
    slow: dict[str, float] = {}
    for one, other, sign, _ in known:
        for host in (one, other):
            slow[host] = max(slow.get(host, 0.0), sign.round_trip_seconds)
    return {
        frozenset((one, other))
        for one, other, sign, silent_seconds in known
        if sign.missed_calls >= MISSED_CALLS and silent_seconds > limit_seconds + max(slow[one], slow[other])
    }


def heard_both_ways(ranks: Sequence[RankState], since: float) -> set[str]:
    """The hosts that heard of another one, and it of them, since then. What connects them is slow, and not cut.

    A firewall may let one way alone through.
    """
    hosts = {rank.rank: rank.host for rank in ranks}
    ways = {
        (rank.host, hosts[other])
        for rank in ranks
        for other, sign in rank.heard.items()
        if rank.status is None and sign.at > since and hosts.get(other, rank.host) != rank.host
    }
    return {host for host, other in ways if (other, host) in ways}


def cut_off(hosts: Sequence[str], links: Collection[frozenset[str]]) -> list[str]:
    """The hosts without which no link that is cut is left: first those with most of them; of equals the last."""
    left, without = set(links), []
    while left:
        worst = max(reversed(hosts), key=lambda host: sum(host in link for link in left))
        without.append(worst)
        left = {link for link in left if worst not in link}
    return without


def _mpirun_alone(now: float, ranks: Sequence[RankState], limit_seconds: float) -> Fault | None:
    """An mpirun that outlives all of its ranks; None where none does."""
    ends = [rank.ended_at for rank in ranks if rank.rank >= 0]
    alone = [rank for rank in ranks if rank.rank < 0 and rank.status is None]
    if not alone or not ends or None in ends or (seconds := now - max(end for end in ends if end)) <= limit_seconds:
        return None
    message = (
        f"mpirun on {alone[0].host} goes on {seconds:.1f} s after the last of its ranks: somebody may hold a "
        "connection to its ports (docs/security.md); what the ranks wrote is whole"
    )
    return Fault("hung", message, (alone[0].host,))


def _endless_wait(
    now: float, hosts: Mapping[str, HostState], working: Sequence[RankState], wedged_seconds: float
) -> Fault | None:
    """Why ranks have waited for others for longer than the limit; None where none has."""
    waiting = [rank for rank in working if rank.waiting]
    longest = max(waiting, key=lambda rank: now - rank.waiting_since, default=None)
    limit = patience.work_limit(wedged_seconds, max((host.load for host in hosts.values()), default=1.0))
    # As long as anything moves, where systems tell, a link is slow. Ranks do not come to a wait at one time then.
    moved_at = max((sign.data_at for rank in working for sign in rank.heard.values()), default=0.0)
    if longest is None or now - max(longest.waiting_since, moved_at) <= limit:
        return None
    since = f"for {now - longest.waiting_since:.1f} s"
    late = [rank for rank in working if rank.beats and not rank.waiting]
    if late:
        names = ", ".join(f"rank {rank.rank} on {rank.host}" for rank in late)
        message = f"rank {longest.rank} on {longest.host} has waited {since} for {longest.waiting}: "
        message += f"{names} did not come to it"
        return Fault("late", message, tuple(sorted({rank.host for rank in late})))
    awaited = sorted({str(rank.waiting) for rank in waiting})
    if len(awaited) > 1:
        message = f"the ranks have waited {since} for different things ({'; '.join(awaited)})"
    else:
        message = (
            f"all ranks have waited {since} for {awaited[0]}, and it does not end: "
            "the network between them is cut or refuses their ports"
        )
    return Fault("wedged", message, tuple(hosts))


def common_wait_seconds(now: float, ranks: Sequence[RankState]) -> float:
    """How long all ranks have waited for each other; 0 where one works."""
    working = [rank for rank in ranks if rank.status is None]
    return min((now - rank.waiting_since if rank.waiting else 0.0 for rank in working), default=0.0)


def cut_between(hosts: Sequence[str], cut_off: Sequence[str], seconds: float) -> Fault:
    """The fault that all hosts answer the launcher, but take no connections from each other at the run's ports."""
    connected = ", ".join(name for name in hosts if name not in cut_off)
    message = (
        f"all ranks have waited for {seconds:.1f} s, and {', '.join(cut_off)} and {connected} "
        "do not reach each other at the run's ports"
    )
    return Fault("wedged", message, tuple(cut_off))


def stragglers(now: float, ranks: Sequence[RankState], after_seconds: float) -> list[RankState]:
    """The ranks for which another has waited longer than that."""
    waits = [now - rank.waiting_since for rank in ranks if rank.status is None and rank.waiting]
    if max(waits, default=0.0) <= after_seconds:
        return []
    return [rank for rank in ranks if rank.status is None and rank.beats and not rank.waiting]


def cause_of(line: str) -> str | None:
    """What a line of a rank's output means, with the remedy; None for any other line."""
    failed = FAILED.search(line)
    return next((cause for pattern, cause in CAUSES if pattern.search(line)), failed and failed[1])


def exit_status(status: int) -> int:
    """A process's status as a shell gives it: 128 + the signal that ended it."""
    return 128 - status if status < 0 else status


def _death(rank: RankState) -> str:
    name = "mpirun" if rank.rank < 0 else f"rank {rank.rank}"
    status = rank.status or 0
    number = -status if status < 0 else status - 128
    if number in set(signal.Signals):
        return f"{name} on {rank.host} was ended by {signal.Signals(number).name}"
    return f"{name} on {rank.host} ended with status {status}"
