"""Ceilings: the largest micro-batches of hosts that ran out of memory before, and plans within them.

A ceiling holds for one host, model, method, type and length. It is written into the host's calibration when a step ran
out of memory, or when a run is resumed whose process was killed for that. A later calibration of the same key
overrules it.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NotRequired, TypedDict

import numpy as np

from lib.config import read_file
from lib.config.schema import Config
from lib.data.micro_batches import pieces
from lib.errors import UserError, shown
from lib.plan import calibration, calibrator
from lib.plan.calibration import Ceiling, CurveKey, HostCalibration
from lib.plan.cluster_plan import ClusterPlan
from lib.system import hardware, network, out_of_memory
from lib.system.records import lines_of

LONGEST_EVIDENCE = 1000  # letters of a note
MOST_PAIRS = 2**20  # in a micro-batch

# ---- Pure: plans below their ceilings


def halved(plan: ClusterPlan, ranks: Sequence[int]) -> ClusterPlan:
    """The plan with half the largest micro-batch on these ranks, and with every smaller one as it was."""
    most = [rank.max_micro_batch_size for rank in plan.ranks]
    for rank in ranks:
        most[rank] = max(1, max(plan.ranks[rank].micro_batch_sizes, default=1) // 2)
    return within(plan, most)


def within(plan: ClusterPlan, most: Sequence[int | None]) -> ClusterPlan:
    """The plan with micro-batches of at most so many pairs, one number a rank; each rank keeps its share."""
    ranks = []
    for rank, curve, limit in zip(plan.ranks, plan.curves, most, strict=True):
        limit = min((size for size in (limit, rank.max_micro_batch_size) if size), default=None)
        sizes = tuple(piece for size in rank.micro_batch_sizes for piece in pieces(size, limit))
        seconds = rank.predicted_compute_seconds
        if sizes != rank.micro_batch_sizes:
            seconds = float(curve.seconds(np.array(sizes)).sum()) if curve else None
        ranks.append(
            replace(rank, micro_batch_sizes=sizes, predicted_compute_seconds=seconds, max_micro_batch_size=limit)
        )
    return replace(plan, ranks=tuple(ranks))


def ceiling_of(known: HostCalibration | None, key: CurveKey) -> Ceiling | None:
    """A host's ceiling for rows of this length: that of the nearest length, in proportion to tokens."""
    if known is None:
        return None
    measured = {curve.key: curve.measured_at for curve in known.curves if curve.measured_at}
    comparable = [
        ceiling
        for ceiling in known.ceilings
        if ceiling.key.at_length(key.sequence_length) == key and not _is_older(ceiling, measured.get(ceiling.key))
    ]
    nearest = min(comparable, key=lambda one: abs(np.log(one.key.sequence_length / key.sequence_length)), default=None)
    if nearest is None or not nearest.max_pairs:
        return nearest
    scaled = nearest.max_pairs * nearest.key.sequence_length // key.sequence_length
    return nearest.model_copy(update={"key": key, "max_pairs": max(1, scaled)})


def _is_older(ceiling: Ceiling, measured_at: str | None) -> bool:
    return measured_at is not None and (ceiling.measured_at or "") < measured_at  # both ISO 8601, in UTC


def bounded(
    known: HostCalibration | None, key: CurveKey, memory_limit_bytes: int | None = None
) -> HostCalibration | None:
    """A calibration whose curves end at the ceiling, and at a limit that is lower than the one measured under."""
    ceiling = ceiling_of(known, key)
    if known is None or (not (ceiling and ceiling.max_pairs) and memory_limit_bytes is None):
        return known

    def bounded_curve(curve: calibration.BatchCurve) -> calibration.BatchCurve:
        changes: dict[str, int] = {}
        limits = [size for size in (curve.memory_limit_bytes, memory_limit_bytes) if size]
        if limits:
            changes["memory_limit_bytes"] = min(limits)
        if ceiling and ceiling.max_pairs and curve.key and curve.key.at_length(key.sequence_length) == key:
            changes["max_pairs"] = ceiling.max_pairs
        return curve.model_copy(update=changes)

    return known.model_copy(update={"curves": tuple(map(bounded_curve, known.curves))})


def applied(plan: ClusterPlan, known: Sequence[HostCalibration | None], may_checkpoint: bool) -> ClusterPlan:
    """The plan of a run within what every rank's host remembers, with a warning where it had to be changed.

    may_checkpoint: whether gradient checkpointing may be turned on where not even a single pair did without.
    """
    assert plan.key is not None
    key, warnings = plan.key, list(plan.warnings)
    recomputed = key.model_copy(update={"gradient_checkpointing": True})
    plain = key if not plan.gradient_checkpointing else recomputed
    ceilings = [ceiling_of(one, plain) for one in known]
    checkpointing = plan.gradient_checkpointing
    if may_checkpoint and not checkpointing and any(one is not None and one.max_pairs == 0 for one in ceilings):
        hosts = [rank.host for rank, one in zip(plan.ranks, ceilings, strict=True) if one and one.max_pairs == 0]
        warnings.append(
            "gradient checkpointing is turned on: a single pair ran out of memory on "
            f"{', '.join(dict.fromkeys(hosts))} without"
        )
        checkpointing, ceilings = True, [ceiling_of(one, recomputed) for one in known]
    most = [max(1, one.max_pairs) if one else None for one in ceilings]
    if plan.divides_model:  # every rank takes part in every micro-batch
        most = [min((size for size in most if size), default=None)] * len(most)
    for rank, limit in zip(plan.ranks, most, strict=True):
        largest = max(rank.micro_batch_sizes, default=0)
        if limit and largest > limit:
            warnings.append(
                f"rank {rank.rank} ({rank.host}): micro-batches of {limit} instead of {largest}, "
                "which ran out of memory there before (calibration/HOST.json, ceilings; make calibrate measures anew)"
            )
    return within(replace(plan, warnings=tuple(warnings), gradient_checkpointing=checkpointing), most)


# ---- Files


@dataclass(frozen=True)
class HostCeilings:
    """The ceilings of this rank's host, in its calibration file. folder: plan.calibration_dir."""

    folder: Path
    hosts: Sequence[str]
    rank: int
    key: CurveKey

    @classmethod
    def of(cls, config: Config, hosts: Sequence[str], rank: int, plan: ClusterPlan) -> HostCeilings:
        """Those for a run with this plan."""
        assert plan.key is not None
        return cls(Path(config.plan.calibration_dir), hosts, rank, plan.key)

    def remember(self, max_pairs: int, gradient_checkpointing: bool, note: str) -> str | None:
        """Writes a ceiling into the host's calibration, which is made if there is none; returns the fault, if any."""
        key = self.key.model_copy(update={"gradient_checkpointing": gradient_checkpointing})
        path = calibration.own_file(self.folder, list(self.hosts), self.rank)
        try:
            with _alone(self.folder):  # ranks of one host may run out of memory at once
                known = calibration.read_calibration(path) if path.exists() else None
                known = known or HostCalibration(machine=hardware.identify(self.hosts[self.rank]), curves=())
                others = tuple(one for one in known.ceilings if one.key != key)
                same = known.model_copy(update={"ceilings": tuple(one for one in known.ceilings if one.key == key)})
                former = ceiling_of(same, key)
                most = min(max_pairs, former.max_pairs) if former else max_pairs
                newest = Ceiling(key=key, max_pairs=most, measured_at=calibrator.time_now(), note=note)
                calibration.write_calibration(path, known.model_copy(update={"ceilings": (*others, newest)}))
        except (OSError, UserError) as error:
            return f"{path} does not remember it: {error}"
        return None

    def take_over(self, killed: Killed, folder: Path) -> str:
        """Writes the ceiling of a process that was killed before it could; returns a warning."""
        half, host = killed.micro_batch_size // 2, self.hosts[self.rank]
        fault = self.remember(half, killed.gradient_checkpointing, killed.evidence)
        if fault is None:
            forget(folder)
        warning = (
            f"{host} ran out of memory with micro-batches of {killed.micro_batch_size} ({killed.evidence}): "
            "goes on with half"
        )
        return f"{warning}; {fault}" if fault else warning


@contextlib.contextmanager
def _alone(folder: Path) -> Iterator[None]:
    folder.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


@dataclass(frozen=True)
class Killed:
    """A process of an earlier start of a run that was killed for its memory."""

    micro_batch_size: int
    gradient_checkpointing: bool
    evidence: str


def killed_before(
    folder: Path, host: str, machine_name: str, kills: Callable[[], dict[str, int]] = out_of_memory.kernel_kills
) -> Killed | None:
    """The smallest micro-batch with which a process of the run was killed for its memory on this host.

    The agent's note says so, or a log whose last start has no end, if the kernel has killed since then.

    Args:
        host: its name among the run's ranks.
        machine_name: this host's name as its launcher fixed it; it is in the name of the agent's note.
        kills: counts the kernel's kills so far.
    """
    killed = []
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        note = read_file.read_object(folder / out_of_memory.NOTE.format(host=machine_name), "the agent's note")
        size, checkpointing = int(note["micro_batch_size"]), bool(note["gradient_checkpointing"])
        if note["boot"] == hardware.boot_id():  # else the folder may be somebody's, whose machine is none of ours
            killed.append(
                Killed(size, checkpointing, shown(str(note["evidence"])[:LONGEST_EVIDENCE]).replace("\n", "␊"))
            )
    for log in sorted((folder / "logs").glob("rank-*.jsonl")):
        with contextlib.suppress(OSError, ValueError, KeyError, IndexError, TypeError, RecursionError):
            by_log = _killed_by_log(log, host, kills())
            killed += [by_log] if by_log else []
    killed = [
        one for one in killed if isinstance(one.micro_batch_size, int) and 1 <= one.micro_batch_size <= MOST_PAIRS
    ]
    return min(killed, key=lambda one: (not one.gradient_checkpointing, one.micro_batch_size), default=None)


class _RankFields(TypedDict):
    micro_batch_sizes: list[int]


class _PlanFields(TypedDict):
    """Of a plan's record, and of the plan in a start's record."""

    ranks: list[_RankFields]
    gradient_checkpointing: bool


class _StartRecord(TypedDict):
    rank: int
    host: str
    kernel_kills: NotRequired[dict[str, int] | None]


def _killed_by_log(log: Path, host: str, now: dict[str, int]) -> Killed | None:
    start: _StartRecord | None = None
    plan: _PlanFields | None = None
    with log.open("rb") as file:
        for line in lines_of(file):
            if not any(kind in line for kind in (b'"kind": "start"', b'"kind": "plan"', b'"kind": "end"')):
                continue
            record = json.loads(line)
            if record["kind"] == "end":
                start = None
            elif record["kind"] == "start":
                start, plan = record, record["plan"]
            elif record["kind"] == "plan":
                plan = record
    if (
        start is None
        or plan is None
        or start["host"] != host
        or not out_of_memory.has_killed(start.get("kernel_kills") or {}, now)
    ):
        return None
    size = max(plan["ranks"][start["rank"]]["micro_batch_sizes"])
    return Killed(size, plan["gradient_checkpointing"], "the kernel's out-of-memory killer ended it")


def forget(folder: Path) -> None:
    """Removes the agent's note."""
    with contextlib.suppress(OSError):
        (folder / out_of_memory.NOTE.format(host=network.host_name())).unlink()
