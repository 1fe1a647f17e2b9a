"""The plan of a run: every rank's share and micro-batches, or its part of a model; and why. Pure functions.

Efficiency is eta = (B / T) / sum of R_i, for a global batch of B pairs in T seconds: the achieved speed over the sum of
what the machines do alone, R_i = max over b of b / tau_i(b) (lib/plan/shares.py).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace

import numpy as np

from lib.model.partition import Division
from lib.plan.calibration import BatchCurve, CurveKey
from lib.plan.shares import (
    DEFAULT_MICRO_BATCH_SIZE,
    best_shares,
    check_count,
    check_memory,
    curve_identity,
    distribute_work,
    equal_shares,
    fastest_micro_batches,
    listed,
    solo_pairs_per_second,
    split_evenly_sized,
)

GOOD_EFFICIENCY = 0.95  # below it, a plan says which global batch would reach it


def gigabytes(size_bytes: float | None) -> str:
    return "unknown" if size_bytes is None else f"{size_bytes / 1e9:.3g}"


@dataclass(frozen=True)
class RankPlan:
    """One rank's part of every step."""

    rank: int
    host: str
    share: int  # pairs
    micro_batch_sizes: tuple[int, ...]  # pairs, in the order they are run; they add up to the share
    predicted_compute_seconds: float | None = None  # without the sync; None where nothing is measured
    solo_pairs_per_second: float | None = None  # R: at its best micro-batch, alone
    max_micro_batch_size: int | None = None  # larger ones ran out of memory there
    planned_bytes: int | None = None  # of its largest micro-batch, as measured, else by the formula
    memory_bytes: int | None = None  # that the rank may use

    def row(self, batch_size: int) -> dict[str, str]:
        """For the plan's table."""
        sizes = {size: self.micro_batch_sizes.count(size) for size in dict.fromkeys(self.micro_batch_sizes)}
        solo, seconds = self.solo_pairs_per_second, self.predicted_compute_seconds
        return {
            "share": f"{self.share} ({100 * self.share / batch_size:.0f} %)",
            "micro-batches": ", ".join(f"{n} x {s}" if n > 1 else str(s) for s, n in sizes.items()) or "none",
            "alone pairs/s": "not measured" if solo is None else f"{solo:.4g}",
            "compute s": "not measured" if seconds is None else f"{seconds:.4g}",
            "planned GB": gigabytes(self.planned_bytes),
            "of GB": gigabytes(self.memory_bytes),
        }


@dataclass(frozen=True)
class PartOfModel:
    """What one rank keeps of a sharded model."""

    kv_heads: int
    columns: int  # of the MLPs, or of every expert where there are no others
    share: float  # of all that is divided
    divided_bytes: int
    whole_bytes: int  # what every rank keeps
    training_bytes: int  # gradients and optimizer, of full training
    memory_bytes: int | None  # that the rank may use
    activation_bytes: int | None = None  # and adapters: what a micro-batch takes besides, by the formula

    @property
    def needed_bytes(self) -> int:
        """All but activations."""
        return self.divided_bytes + self.whole_bytes + self.training_bytes

    def row(self, batch_size: int) -> dict[str, str]:
        """For the plan's table."""
        return {
            "part": f"{100 * self.share:.1f} %",
            "KV heads": str(self.kv_heads),
            "MLP columns": str(self.columns),
            "its part GB": gigabytes(self.divided_bytes),
            "kept by all GB": gigabytes(self.whole_bytes),
            "training GB": gigabytes(self.training_bytes),
            "activations GB": gigabytes(self.activation_bytes),
            "memory GB": gigabytes(self.memory_bytes),
        }


@dataclass(frozen=True)
class StagePlan:
    """One stage of a pipeline: consecutive blocks; on the first rank the embedding too, on the last norm and head."""

    first_block: int  # counted from 0
    blocks: int
    in_flight: int  # micro-batches of which it keeps the input or the activations at a time, at most
    recomputes: bool  # it keeps its input, and computes all activations again in the backward pass
    gradient_checkpointing: bool  # it keeps each block's input; with neither it keeps activations
    held_bytes: int  # weights, adapters, gradients, optimizer
    activation_bytes: int | None  # of all micro-batches in flight; None: not known
    memory_bytes: int | None  # that the rank may use
    forward_seconds: float | None = None  # of one micro-batch; None: not known
    backward_seconds: float | None = None  # with the second forward pass, where it recomputes
    idle_fraction: float | None = None  # of a step: the bubble, and waiting for slower stages
    sent_bytes: float | None = None  # a step

    @property
    def needed_bytes(self) -> int:
        """All that it holds at its largest moment."""
        return self.held_bytes + (self.activation_bytes or 0)

    def row(self, batch_size: int) -> dict[str, str]:
        """For the plan's table."""
        seconds = (self.forward_seconds or 0.0) + (self.backward_seconds or 0.0)
        return {
            "blocks": f"{self.first_block + 1}-{self.first_block + self.blocks} ({self.blocks})",
            "in flight": str(self.in_flight),
            "keeps": "input" if self.recomputes else "block inputs" if self.gradient_checkpointing else "activations",
            "micro-batch s": "unknown" if self.forward_seconds is None else f"{seconds:.3g}",
            "idle": "unknown" if self.idle_fraction is None else f"{self.idle_fraction:.0%}",
            "sent MB a step": "unknown" if self.sent_bytes is None else f"{self.sent_bytes / 1e6:.3g}",
            "weights and optimizer GB": gigabytes(self.held_bytes),
            "activations GB": gigabytes(self.activation_bytes),
            "memory GB": gigabytes(self.memory_bytes),
        }


@dataclass(frozen=True)
class Prediction:
    """What one strategy, or one host alone, would give."""

    strategy: str
    hosts: tuple[str, ...]
    step_seconds: float | None  # None: it does not fit, or too little is measured
    efficiency: float | None  # over the sum of what all hosts of the run do alone; None for one host
    chosen: bool = False
    memory_bytes: int | None = None  # the largest host's peak, as measured, or as weights and optimizer need at least
    bytes_per_step: float | None = None  # that each rank sends, on average


@dataclass(frozen=True)
class Basis:
    """What a plan's predictions rest on."""

    curves: tuple[BatchCurve | None, ...] = ()  # one a rank
    calibrated: bool = False  # curves of this very model on every host: their seconds are this run's
    key: CurveKey | None = None  # what calibrations know this run's model and rows by
    matmul_gflops: Mapping[str, Sequence[float]] = field(default_factory=dict)  # measured at the start, by host


@dataclass(frozen=True)
class ModelParts:
    """What each rank keeps of a divided model: parts of every block, or consecutive blocks."""

    division: Division | None = None
    parts: tuple[PartOfModel, ...] = ()
    stages: tuple[StagePlan, ...] = ()


@dataclass(frozen=True)
class Merging:
    """How often independent ranks merge."""

    steps_per_round: int  # global batches from one merge to the next, to begin with
    merges: int  # in the whole run, if it stays so
    reason: str


@dataclass(frozen=True)
class ClusterPlan:
    """Every rank's part, what it is predicted to give, and why it was chosen."""

    strategy: str
    global_batch_size: int
    ranks: tuple[RankPlan, ...]
    sync_seconds: float  # of one step; a single host needs none
    reason: str
    warnings: tuple[str, ...] = ()
    gradient_checkpointing: bool = False  # chosen because one pair does not fit without
    predictions: tuple[Prediction, ...] = ()
    basis: Basis = field(default=Basis(), repr=False)
    model: ModelParts = ModelParts()
    rounds: Merging | None = None  # of independent ranks
    instead: str = ""  # what the other strategy would give and cost

    @property
    def curves(self) -> tuple[BatchCurve | None, ...]:
        """One a rank."""
        return self.basis.curves

    @property
    def calibrated(self) -> bool:
        """Whether predicted seconds are this run's."""
        return self.basis.calibrated

    @property
    def division(self) -> Division | None:
        """Of a sharded model."""
        return self.model.division

    @property
    def stages(self) -> tuple[StagePlan, ...]:
        """One a rank, where the model is pipelined."""
        return self.model.stages

    @property
    def steps_per_round(self) -> int | None:
        """Global batches from one merge of independent ranks to the next, to begin with."""
        return self.rounds.steps_per_round if self.rounds else None

    @property
    def merging(self) -> str:
        """How often independent ranks merge, and why so often."""
        return self.rounds.reason if self.rounds else ""

    @property
    def workers(self) -> tuple[RankPlan, ...]:
        """Those among whom data are divided: all ranks, or the first for all, where they hold parts of one model."""
        return self.ranks[:1] if self.divides_model else self.ranks

    @property
    def divides_model(self) -> bool:
        """Whether every rank has a part of one model, so that all take part in every micro-batch."""
        return bool(self.division or self.stages)

    def checkpoints_blocks(self, rank: int) -> bool:
        """Whether a rank's blocks recompute their inside in the backward pass."""
        return self.gradient_checkpointing or bool(self.stages and self.stages[rank].gradient_checkpointing)

    @property
    def blocks(self) -> tuple[int, ...]:
        """Consecutive blocks of each rank, where the model is pipelined."""
        return tuple(stage.blocks for stage in self.stages)

    @property
    def shares(self) -> list[int]:
        """Pairs a step, by worker."""
        return [plan.share for plan in self.workers]

    @property
    def micro_batch_sizes(self) -> list[tuple[int, ...]]:
        """The micro-batches of a step, by worker."""
        return [plan.micro_batch_sizes for plan in self.workers]

    @property
    def predicted_step_seconds(self) -> float | None:
        """The slowest rank's compute and update, from one sync to the next, and the sync; a pipeline's schedule."""
        if self.divides_model:
            return next((one.step_seconds for one in self.predictions if one.chosen), None)
        seconds = []
        for plan, curve in zip(self.ranks, self.curves, strict=True):
            if plan.predicted_compute_seconds is None or curve is None:
                return None
            if plan.share or sum(share > 0 for share in self.shares) > 1:
                seconds.append(plan.predicted_compute_seconds + curve.step_overhead_seconds)
        return max(seconds) + self.sync_seconds

    @property
    def predicted_pairs_per_second(self) -> float | None:
        """The cluster's speed."""
        seconds = self.predicted_step_seconds
        return self.global_batch_size / seconds if seconds else None

    @property
    def solo_sum_pairs_per_second(self) -> float | None:
        """What the machines do alone, added up."""
        known = [plan.solo_pairs_per_second for plan in self.ranks if plan.solo_pairs_per_second is not None]
        return sum(known) if len(known) == len(self.ranks) else None

    @property
    def efficiency(self) -> float | None:
        """eta, between 0 and 1, of several ranks; one machine has none."""
        speed, solo = self.predicted_pairs_per_second, self.solo_sum_pairs_per_second
        return speed / solo if speed and solo and len(self.ranks) > 1 else None

    def rows(self) -> list[dict[str, str]]:
        """One row a rank, for a table; the columns are the keys."""
        parts: Sequence[RankPlan | PartOfModel | StagePlan] = self.model.parts or self.stages or self.ranks
        return [
            {"rank": str(rank.rank), "host": rank.host, **part.row(self.global_batch_size)}
            for rank, part in zip(self.ranks, parts, strict=True)
        ]

    def decisions(self) -> list[object]:
        """What all ranks have to do alike, as JSON takes it, without any prediction."""
        division = self.division and asdict(self.division) | {"weights": ()}  # which may differ in a last digit
        sizes = [rank.micro_batch_sizes for rank in self.ranks]
        stages = [[s.blocks, s.in_flight, s.recomputes, s.gradient_checkpointing] for s in self.stages]
        return [self.strategy, self.shares, sizes, self.gradient_checkpointing, division, stages, self.steps_per_round]

    def to_dict(self) -> dict[str, object]:
        """For plan.json and the records; of the curves what can be drawn."""
        drawn = {"points", "memory_limit_bytes", "key", "source", "measured_at"}
        flat = asdict(replace(self, basis=Basis(), model=ModelParts(), rounds=None))
        for name in ("basis", "model", "rounds"):
            del flat[name]
        key = self.basis.key
        return {
            **flat,
            **asdict(self.model),
            "calibrated": self.calibrated,
            "matmul_gflops": dict(self.basis.matmul_gflops),
            "steps_per_round": self.steps_per_round,
            "merges": self.rounds and self.rounds.merges,
            "merging": self.merging,
            "key": key and key.model_dump(mode="json"),
            "curves": [curve and curve.model_dump(mode="json", include=drawn) for curve in self.curves],
            "shares": self.shares,
            "blocks": self.blocks,
            "predicted_step_seconds": self.predicted_step_seconds,
            "predicted_pairs_per_second": self.predicted_pairs_per_second,
            "solo_sum_pairs_per_second": self.solo_sum_pairs_per_second,
            "efficiency": self.efficiency,
        }

    # ---- Other micro-batches for the same hosts

    def with_micro_batches(self, micro_batch_sizes: Sequence[Sequence[int]], reason: str) -> ClusterPlan:
        """The same hosts with other work."""
        ranks = []
        for rank, sizes, curve in zip(self.ranks, micro_batch_sizes, self.curves, strict=True):
            seconds = float(curve.seconds(np.array(sizes)).sum()) if curve else None
            changed = {"share": sum(sizes), "micro_batch_sizes": tuple(sizes), "predicted_compute_seconds": seconds}
            ranks.append(replace(rank, **changed))  # type: ignore[arg-type]
        return replace(self, ranks=tuple(ranks), reason=reason, warnings=(), predictions=())

    def within(self, most: Sequence[int | None]) -> ClusterPlan:
        """The plan with micro-batches of at most so many pairs, one number a rank; each rank keeps its share."""
        limits = [
            min((size for size in (limit, rank.max_micro_batch_size) if size), default=None)
            for rank, limit in zip(self.ranks, most, strict=True)
        ]
        sizes = [
            [piece for size in rank.micro_batch_sizes for piece in split_evenly_sized(size, limit or size)]
            for rank, limit in zip(self.ranks, limits, strict=True)
        ]
        plan = self.with_micro_batches(sizes, self.reason)
        ranks = (replace(rank, max_micro_batch_size=limit) for rank, limit in zip(plan.ranks, limits, strict=True))
        return replace(plan, ranks=tuple(ranks), warnings=self.warnings, predictions=self.predictions)

    def halved(self, ranks: Sequence[int]) -> ClusterPlan:
        """The plan with half the largest micro-batch on these ranks, and with every smaller one as it was."""
        most = [rank.max_micro_batch_size for rank in self.ranks]
        for rank in ranks:
            most[rank] = max(1, max(self.ranks[rank].micro_batch_sizes, default=1) // 2)
        return self.within(most)


def plan_cluster(
    hosts: Sequence[str],
    global_batch_size: int,
    *,
    curves: Sequence[BatchCurve | None] | None = None,
    shares: Sequence[int] | None = None,
    micro_batch_sizes: Sequence[int] | None = None,
    sync_seconds: float = 0.0,
    speeds: Sequence[float] | None = None,
) -> ClusterPlan:
    """Divides a global batch among ranks: as configured, else as measured, else by `speeds`, else equally.

    Args:
        hosts: one name a rank, in the order of ranks.
        curves: one a rank, comparable with each other; None where nothing is known.
        sync_seconds: of one step's collective.
        speeds: one a rank, of the hosts beside each other, in any unit; for where a curve is missing.

    Raises:
        UserError: the settings do not fit the world.
        TooLarge: a host's memory does not hold one pair.
    """
    world_size = len(hosts)
    curves = list(curves) if curves is not None else [None] * world_size
    for host, curve in zip(hosts, curves, strict=True):
        if curve is not None:
            check_memory(host, curve)
    for name, numbers in (("shares", shares), ("micro_batch_sizes", micro_batch_sizes)):
        if numbers is not None:
            check_count(f"plan.{name}", numbers, world_size)
    reason = "shares as plan.shares has them"
    if shares is None:
        shares, reason = _shares(hosts, global_batch_size, curves, sync_seconds, micro_batch_sizes, speeds)
    fastest: dict[object, tuple[int, ...]] = {}  # of equal ranks
    ranks = []
    for rank, (host, curve) in enumerate(zip(hosts, curves, strict=True)):
        share = int(shares[rank])
        if micro_batch_sizes is not None:
            sizes = split_evenly_sized(share, micro_batch_sizes[rank])
        elif curve is None:
            sizes = split_evenly_sized(share, DEFAULT_MICRO_BATCH_SIZE)
        else:
            identity = curve_identity(curve), share
            sizes = fastest.get(identity) or fastest.setdefault(identity, fastest_micro_batches(curve, share))
        seconds, solo = None, None
        if curve is not None:
            seconds, solo = float(curve.seconds(np.array(sizes)).sum()), solo_pairs_per_second(curve)
        ranks.append(RankPlan(rank, host, share, sizes, seconds, solo))
    is_alone = sum(share > 0 for share in shares) == 1
    return ClusterPlan(
        strategy="synchronous",
        global_batch_size=global_batch_size,
        ranks=tuple(ranks),
        sync_seconds=0.0 if is_alone else sync_seconds,
        reason=reason,
        warnings=_warnings(ranks, curves, global_batch_size),
        basis=Basis(tuple(curves)),
    )


def _shares(
    hosts: Sequence[str],
    batch_size: int,
    curves: Sequence[BatchCurve | None],
    sync_seconds: float,
    micro_batch_sizes: Sequence[int] | None,
    speeds: Sequence[float] | None,
) -> tuple[list[int], str]:
    """Shares that no setting gives, and why these."""
    measured = [curve for curve in curves if curve is not None]
    if len(hosts) == 1:
        return [batch_size], "one rank does all"
    if len(measured) == len(hosts):
        return best_shares(hosts, measured, batch_size, sync_seconds, micro_batch_sizes)
    unknown = listed(list(dict.fromkeys(host for host, curve in zip(hosts, curves, strict=True) if curve is None)))
    if speeds is not None:
        return distribute_work(batch_size, speeds), (
            f"shares in proportion to the hosts' matrix-product rates, without a calibration of {unknown}; "
            "the first steps correct them, make calibrate measures the hosts"
        )
    return equal_shares(batch_size, len(hosts)), (
        f"equal shares: no calibration of {unknown}; make calibrate measures the hosts, plan.shares overrules"
    )


def _warnings(ranks: Sequence[RankPlan], curves: Sequence[BatchCurve | None], batch_size: int) -> tuple[str, ...]:
    """Micro-batches larger than any that is known to fit, and ranks without work."""
    warnings = [
        f"rank {rank.rank} ({rank.host}): micro-batches of {max(rank.micro_batch_sizes)} pairs, "
        f"but at most {curve.max_batch_size} are known to fit"
        for rank, curve in zip(ranks, curves, strict=True)
        if curve is not None and max(rank.micro_batch_sizes, default=0) > curve.max_batch_size
    ]
    if idle := [f"{rank.rank} ({rank.host})" for rank in ranks if rank.share == 0]:
        warnings.append(f"no work at a global batch of {batch_size} for rank {listed(idle)}")
    return tuple(warnings)


def sufficient_global_batch(
    hosts: Sequence[str], curves: Sequence[BatchCurve], global_batch_size: int, sync_seconds: float = 0.0
) -> int | None:
    """The first of 1, 2, 4, ... 64 times global_batch_size that the hosts share at GOOD_EFFICIENCY, or None."""
    for pairs in (global_batch_size * 2**doubling for doubling in range(7)):
        plan = plan_cluster(hosts, pairs, curves=curves, sync_seconds=sync_seconds)
        if plan.efficiency is not None and plan.efficiency >= GOOD_EFFICIENCY:
            return pairs
    return None


def sum_of(numbers: Sequence[object], most: int = 8) -> str:
    """The first of them, as they are shown: "24 + 8"."""
    return " + ".join(map(str, numbers[:most])) + (" + ..." if len(numbers) > most else "")
