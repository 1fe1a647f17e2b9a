"""The plan of a run: every rank's share and micro-batches, or its part of a model; and why. Pure functions.

Efficiency is eta = (B / T) / sum of R_i, for a global batch of B pairs in T seconds: the achieved speed over the sum of
what the machines do alone, R_i = max over b of b / tau_i(b) (lib/plan/shares.py).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace

import numpy as np

from lib.config.settings import PlanSettings, TrainSettings
from lib.errors import UserError
from lib.model.partition import Division
from lib.plan import shares as work
from lib.plan.calibration import BatchCurve, CurveKey
from lib.plan.facts import DIVIDED
from lib.plan.shares import split_evenly_sized

SHOWN_NUMBERS = 8  # shares or blocks, in a line
DERIVED: tuple[str, ...] = (
    "calibrated",
    "steps_per_round",
    "shares",
    "blocks",
    "predicted_step_seconds",
    "efficiency",
)  # in plan.json
DERIVED += ("predicted_pairs_per_second", "solo_sum_pairs_per_second")


@dataclass(frozen=True)
class PartOfModel:
    """What one rank keeps of a sharded model."""

    kv_heads: int
    columns: int  # of the MLPs, or of every expert where there are no others
    share: float  # of all that is divided
    divided_bytes: int
    whole_bytes: int  # what every rank keeps
    training_bytes: int  # gradients and optimizer
    activation_bytes: int = 0  # what a micro-batch takes besides, by the formula

    @property
    def held_bytes(self) -> int:
        return self.divided_bytes + self.whole_bytes + self.training_bytes

    @property
    def needed_bytes(self) -> int:
        return self.held_bytes + self.activation_bytes


@dataclass(frozen=True)
class StagePlan:
    """One stage of a pipeline: consecutive blocks; on the first rank the embedding too, on the last norm and head."""

    first_block: int  # counted from 0
    blocks: int
    in_flight: int  # micro-batches of which it keeps the input or the activations at a time, at most
    recomputes: bool  # it keeps its input, and computes all activations again in the backward pass
    gradient_checkpointing: bool  # it keeps each block's input; with neither it keeps activations
    held_bytes: int  # weights, adapters, gradients, optimizer
    activation_bytes: int  # of all micro-batches in flight
    forward_seconds: float | None = None  # of one micro-batch; None: not known
    backward_seconds: float | None = None  # with the second forward pass, where it recomputes
    idle_fraction: float | None = None  # of a step: the bubble, and waiting for slower stages

    @property
    def needed_bytes(self) -> int:
        return self.held_bytes + self.activation_bytes


@dataclass(frozen=True)
class RankPlan:
    """One rank's part of every step."""

    rank: int
    host: str
    share: int  # pairs
    micro_batch_sizes: tuple[int, ...]  # pairs, in the order they are run; they add up to the share
    curve: BatchCurve | None = field(default=None, repr=False)  # what predictions rest on
    solo_pairs_per_second: float | None = None  # R: at its best micro-batch, alone
    max_micro_batch_size: int | None = None  # larger ones ran out of memory there
    planned_bytes: int | None = None  # that it holds at its largest moment, as measured, else by the formula
    memory_bytes: int | None = None  # that the rank may use
    part: PartOfModel | StagePlan | None = None  # of a divided model
    blas_threads: int | None = None  # of its products, on a CPU

    @property
    def predicted_compute_seconds(self) -> float | None:
        """Of a step, without the update and the sync; None where nothing is measured."""
        return float(self.curve.seconds(np.array(self.micro_batch_sizes)).sum()) if self.curve else None

    @property
    def update_seconds(self) -> float:
        return self.curve.step_overhead_seconds if self.curve else 0.0

    def row(self, batch_size: int) -> dict[str, str]:
        """For the plan's table; "-" where something is not known."""
        counts, part = Counter(self.micro_batch_sizes), self.part
        seconds, share = self.predicted_compute_seconds, f"{self.share} ({100 * self.share / batch_size:.0f} %)"
        if isinstance(part, PartOfModel):
            share = f"{100 * part.share:.1f} %: {part.kv_heads} KV heads, {part.columns} columns"
        elif part is not None:
            share = f"blocks {part.first_block + 1}-{part.first_block + part.blocks} ({part.blocks})"
            if part.forward_seconds is not None and part.backward_seconds is not None:
                seconds = len(self.micro_batch_sizes) * (part.forward_seconds + part.backward_seconds)
                share += f", idle {part.idle_fraction:.0%}"
        sizes = ", ".join(f"{count} x {size}" if count > 1 else str(size) for size, count in counts.items()) or "none"
        planned, memory = (size and size / 1e9 for size in (self.planned_bytes, self.memory_bytes))
        numbers = {"alone pairs/s": self.solo_pairs_per_second, "compute s": seconds, "planned GB": planned}
        shown = {name: "-" if of is None else f"{of:.4g}" for name, of in {**numbers, "of GB": memory}.items()}
        return {"rank": str(self.rank), "host": self.host, "share": share, "micro-batches": sizes, **shown}


@dataclass(frozen=True)
class Prediction:
    """What one strategy, or one host alone, would give."""

    strategy: str
    hosts: tuple[str, ...]
    step_seconds: float | None  # None: it does not fit, or too little is measured
    efficiency: float | None  # over the sum of what all hosts of the run do alone; None for one host
    chosen: bool = False
    memory_bytes: int | None = None  # the largest host's peak, as measured, or as weights and optimizer need at least


@dataclass(frozen=True)
class Merging:
    """How often independent ranks merge."""

    steps_per_round: int  # global batches from one merge to the next, to begin with
    merges: int  # in the whole run, if it stays so
    reason: str


@dataclass(frozen=True)
class Basis:
    """What a plan rests on."""

    key: CurveKey | None = None  # what calibrations know this run's model and rows by
    matmul_gflops: Mapping[str, Sequence[float]] = field(default_factory=dict)  # measured at the start, by host
    step_seconds: float | None = None  # by curves, else by matrix products and the model's operations
    needed_bytes: Callable[[int, int], int | None] | None = None  # of a rank, for micro-batches of so many pairs


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
    division: Division | None = None  # of a sharded model
    rounds: Merging | None = None  # of independent ranks
    basis: Basis = Basis()

    @property
    def curves(self) -> tuple[BatchCurve | None, ...]:
        return tuple(rank.curve for rank in self.ranks)

    @property
    def calibrated(self) -> bool:
        """Whether all curves were measured with this very model: predicted seconds are this run's."""
        return all(rank.curve is not None and rank.curve.source == "measured" for rank in self.ranks)

    @property
    def parts(self) -> tuple[PartOfModel, ...]:
        """Of a sharded model, one a rank."""
        return tuple(rank.part for rank in self.ranks if isinstance(rank.part, PartOfModel))

    @property
    def stages(self) -> tuple[StagePlan, ...]:
        """Of a pipelined model, one a rank."""
        return tuple(rank.part for rank in self.ranks if isinstance(rank.part, StagePlan))

    @property
    def blocks(self) -> tuple[int, ...]:
        return tuple(stage.blocks for stage in self.stages)

    @property
    def steps_per_round(self) -> int | None:
        return self.rounds.steps_per_round if self.rounds else None

    @property
    def divides_model(self) -> bool:
        """Whether every rank has a part of one model."""
        return any(rank.part for rank in self.ranks)

    @property
    def workers(self) -> tuple[RankPlan, ...]:
        """Those among whom data are divided: all ranks, or the first for all, where they hold parts of one model."""
        return self.ranks[:1] if self.divides_model else self.ranks

    def checkpoints_blocks(self, rank: int) -> bool:
        """Whether a rank's blocks recompute their inside in the backward pass."""
        return self.gradient_checkpointing or bool(self.stages and self.stages[rank].gradient_checkpointing)

    @property
    def shares(self) -> list[int]:
        """Pairs a step, by worker."""
        return [rank.share for rank in self.workers]

    @property
    def micro_batch_sizes(self) -> list[tuple[int, ...]]:
        return [rank.micro_batch_sizes for rank in self.workers]

    @property
    def predicted_step_seconds(self) -> float | None:
        """The slowest rank's compute and update, from one sync to the next, and the sync; a pipeline's schedule."""
        if self.divides_model:
            return next((way.step_seconds for way in self.predictions if way.chosen), None)
        if None in self.curves:
            return None
        is_alone = sum(share > 0 for share in self.shares) == 1
        working = [rank for rank in self.ranks if rank.share or not is_alone]
        return self.sync_seconds + max((r.predicted_compute_seconds or 0.0) + r.update_seconds for r in working)

    @property
    def predicted_pairs_per_second(self) -> float | None:
        seconds = self.predicted_step_seconds
        return self.global_batch_size / seconds if seconds else None

    @property
    def solo_sum_pairs_per_second(self) -> float | None:
        """What the machines do alone, added up."""
        each = [rank.solo_pairs_per_second for rank in self.ranks]
        return None if None in each else sum(filter(None, each))

    @property
    def efficiency(self) -> float | None:
        """eta, between 0 and 1, of several ranks; one machine has none."""
        speed, solo = self.predicted_pairs_per_second, self.solo_sum_pairs_per_second
        return speed / solo if speed and solo and len(self.ranks) > 1 else None

    def rows(self) -> list[dict[str, str]]:
        """One row a rank, for a table; the columns are the keys."""
        return [rank.row(self.global_batch_size) for rank in self.ranks]

    def decisions(self) -> list[object]:
        """What all ranks have to decide in the same way, as JSON takes it, without any prediction."""
        division = self.division and asdict(self.division) | {"weights": ()}  # which may differ in a last digit
        sizes = [rank.micro_batch_sizes for rank in self.ranks]
        stages = [[s.blocks, s.in_flight, s.recomputes, s.gradient_checkpointing] for s in self.stages]
        return [self.strategy, self.shares, sizes, self.gradient_checkpointing, division, stages, self.steps_per_round]

    def to_dict(self) -> dict[str, object]:
        """For plan.json and the records, without the curves."""
        ranks = [
            asdict(replace(rank, curve=None, part=None)) | {"predicted_compute_seconds": rank.predicted_compute_seconds}
            for rank in self.ranks
        ]
        stored = asdict(replace(self, ranks=(), basis=Basis()))
        del stored["basis"]
        return stored | {
            **{name: getattr(self, name) for name in DERIVED},
            "ranks": ranks,
            "parts": list(map(asdict, self.parts)),
            "stages": list(map(asdict, self.stages)),
            "key": self.basis.key and self.basis.key.model_dump(mode="json"),
            "matmul_gflops": dict(self.basis.matmul_gflops),
        }

    # ---- Other micro-batches for the same hosts

    def in_smaller(self, most: Sequence[int | None], reason: str) -> ClusterPlan:
        """The same shares in micro-batches of so many pairs, one number a rank; None: as they are. What was predicted
        of their time stays."""
        ranks = []
        for rank, size in zip(self.ranks, most, strict=True):
            sizes = split_evenly_sized(rank.share, size) if size else rank.micro_batch_sizes
            planned = self.basis.needed_bytes(rank.rank, max(sizes)) if self.basis.needed_bytes and sizes else None
            ranks.append(replace(rank, micro_batch_sizes=sizes, planned_bytes=planned))
        return replace(self, ranks=tuple(ranks), reason=reason)

    def within(self, most: Sequence[int | None]) -> ClusterPlan:
        """The plan with micro-batches of at most so many pairs, one number a rank; each rank keeps its share."""
        ranks = []
        for rank, limit in zip(self.ranks, most, strict=True):
            limit = min((size for size in (limit, rank.max_micro_batch_size) if size), default=None)
            sizes = [piece for size in rank.micro_batch_sizes for piece in split_evenly_sized(size, limit or size)]
            ranks.append(replace(rank, micro_batch_sizes=tuple(sizes), max_micro_batch_size=limit))
        return replace(self, ranks=tuple(ranks))

    def halved(self, ranks: Sequence[int]) -> ClusterPlan:
        """The plan with half the largest micro-batch on these ranks, and with every smaller one as it was."""
        halves = {rank: max(1, max(self.ranks[rank].micro_batch_sizes, default=1) // 2) for rank in ranks}
        return self.within([halves.get(rank.rank, rank.max_micro_batch_size) for rank in self.ranks])


def plan_cluster(
    hosts: Sequence[str],
    global_batch_size: int,
    shares: Sequence[int] | None = None,
    curves: Sequence[BatchCurve | None] | None = None,
    micro_batch_sizes: Sequence[int] | None = None,
    sync_seconds: float = 0.0,
    speeds: Sequence[float] | None = None,
) -> ClusterPlan:
    """Divides a global batch among ranks: as configured, else as measured, else by `speeds`, else equally. hosts,
    curves (comparable ones), speeds (in any unit; for where a curve is missing): one a rank. Raises UserError: the
    settings do not fit the world; TooLarge: a host's memory does not hold one pair."""
    size, curves = len(hosts), curves or [None] * len(hosts)
    measured = [curve for curve in curves if curve is not None]
    for host, curve in zip(hosts, curves, strict=True):
        if curve is not None and curve.max_batch_size == 0:
            first = curve.points[0]
            raise work.TooLarge(host, first.batch_size, first.peak_memory_bytes, curve.memory_limit_bytes)
    work.check_count("plan.shares", shares, size)
    work.check_count("plan.micro_batch_sizes", micro_batch_sizes, size)
    reason = "shares as plan.shares has them"
    if shares is None and len(measured) == size > 1:
        shares, reason = work.best_shares(hosts, measured, global_batch_size, sync_seconds, micro_batch_sizes)
    elif shares is None:
        shares, reason = work.distribute_work(global_batch_size, speeds or [1] * size), "one rank does all"
        if size > 1:
            by_rates = "shares in proportion to the hosts' matrix-product rates, which the first steps correct"
            reason = by_rates if speeds else "equal shares, as nothing is measured"
            if idle := [f"{host} (rank {rank})" for rank, host in enumerate(hosts) if not shares[rank]]:
                reason += f"; none for {work.listed(idle)}, too slow for one row of {global_batch_size}"
    ranks = []
    for rank, (host, curve, share) in enumerate(zip(hosts, curves, shares, strict=True)):
        if curve is not None and micro_batch_sizes is None:
            sizes = work.fastest_micro_batches(curve, share)
        else:
            sizes = split_evenly_sized(share, (micro_batch_sizes or [work.DEFAULT_MICRO_BATCH_SIZE] * size)[rank])
        ranks.append(RankPlan(rank, host, share, sizes, curve, work.solo_pairs_per_second(curve) if curve else None))
    sync_seconds = 0.0 if sum(share > 0 for share in shares) == 1 else sync_seconds
    return ClusterPlan("synchronous", global_batch_size, tuple(ranks), sync_seconds, reason)


def sum_of(numbers: Sequence[object]) -> str:
    """The first of them, as they are shown: "24 + 8"."""
    return " + ".join(map(str, numbers[:SHOWN_NUMBERS])) + " + ..." * (len(numbers) > SHOWN_NUMBERS)


NOTEWORTHY = 0.05  # of a step's time: less is not worth a word
HIGHEST_RATE = 1e-2  # of Adam, whose steps are about as long as its rate
ROOM_FOR_ACTIVATIONS = 0.5  # of a host's memory, left free beside weights, gradients and optimizer


def advised(settings: PlanSettings, train: TrainSettings, strategy: str, plan: ClusterPlan) -> ClusterPlan:
    """The plan, with a warning for each practice that it goes against. strategy: as the settings have it."""
    warnings = [slow_shares(settings, plan), needless_division(strategy, plan), not_calibrated(settings, plan)]
    return replace(plan, warnings=(*plan.warnings, *filter(None, warnings), *learning_rate(train)))


def slow_shares(settings: PlanSettings, plan: ClusterPlan) -> str:
    """Configured shares, often equal ones, that make a step longer than the hosts' curves allow."""
    if settings.shares is None or plan.divides_model or None in plan.curves:
        return ""
    hosts, sizes, sync = [rank.host for rank in plan.ranks], settings.micro_batch_sizes, plan.sync_seconds
    best = plan_cluster(hosts, plan.global_batch_size, micro_batch_sizes=sizes, curves=plan.curves, sync_seconds=sync)
    now, then = plan.predicted_step_seconds or 0.0, best.predicted_step_seconds or 0.0
    if now <= then * (1 + NOTEWORTHY):
        return ""
    equal = "equal shares of unequal hosts, " * (max(plan.shares) - min(plan.shares) <= 1)
    times = f"{now:.3g} s a step by the hosts' curves, where {best.shares} would take {then:.3g} s"
    return f"plan.shares {plan.shares}: {equal}{times}; leave plan.shares out"


def needless_division(strategy: str, plan: ClusterPlan) -> str:
    """A model that is divided although the smallest host could hold and train all of it; "auto" has its reasons."""
    smallest = min((rank.memory_bytes or 0 for rank in plan.ranks), default=0)
    if strategy not in DIVIDED or len(plan.ranks) < 2:
        return ""
    needed = sum(rank.part.held_bytes for rank in plan.ranks if rank.part)
    needed -= sum(part.whole_bytes for part in plan.parts[1:])
    if needed > (1 - ROOM_FOR_ACTIVATIONS) * smallest:
        return ""
    sizes = f"the whole model takes {needed / 1e9:.3g} GB and the smallest host has {smallest / 1e9:.3g} GB"
    return f"strategy={strategy}: {sizes}; parts wait for each other, replicas do not: strategy=auto"


def not_calibrated(settings: PlanSettings, plan: ClusterPlan) -> str:
    """Several hosts, of which one has no curve; raises UserError where plan.require_calibration refuses that."""
    hosts = ", ".join(dict.fromkeys(rank.host for rank in plan.ranks if rank.curve is None))
    if plan.divides_model or not hosts:
        return ""
    if settings.require_calibration:
        raise UserError(f"plan.require_calibration: no calibration of {hosts} for this model; run make calibrate there")
    if len({rank.host for rank in plan.ranks}) == 1:
        return ""
    corrected = "; the first steps correct the shares" * (settings.replan and settings.shares is None)
    return f"no calibration of {hosts}{corrected}; make calibrate HOSTS=hostfile"


def learning_rate(train: TrainSettings) -> list[str]:
    """A rate that was chosen for another global batch and is not scaled, or one that no model survives under Adam."""
    warnings, rate, batch = [], f"train.learning_rate={train.learning_rate:g}", train.global_batch_size
    if train.learning_rate_scaling == "none" and train.learning_rate_batch_size not in (None, batch):
        rule = "linear" if train.optimizer == "sgd" else "sqrt"  # arXiv:1706.02677 and arXiv:2205.10287
        was = f"train.global_batch_size is {batch}, but {rate} was chosen for {train.learning_rate_batch_size}"
        warnings.append(f"{was}; train.learning_rate_scaling={rule} scales it, train.learning_rate=... sets another")
    if train.optimizer != "sgd" and train.learning_rate > HIGHEST_RATE:
        usual = "LoRA takes 1e-5 to 1e-3, full training 1e-7 to 1e-4, DPO the lower end of it"
        warnings.append(f"{rate} is beyond what {train.optimizer} can train with: {usual}")
    return warnings


def uneven_labels(rows: int, desirable: int, train: TrainSettings) -> str | None:
    """Rows of one label that weigh more than twice those of the other."""
    undesirable = rows - desirable
    if not desirable or not undesirable:
        return f"all {rows:,} rows are {'' if desirable else 'un'}desirable: there is nothing to tell apart"
    ratio = train.desirable_weight * desirable / (train.undesirable_weight * undesirable)
    if 0.5 <= ratio <= 2:
        return None
    name, times = "undesirable" if ratio > 1 else "desirable", max(ratio, 1 / ratio)
    evened = f"train.{name}_weight={getattr(train, f'{name}_weight') * times:.3g} evens them out"
    return f"{desirable:,} rows are desirable and {undesirable:,} are not, {times:.3g} times the weight; {evened}"


def long_warm_up(steps: int, train: TrainSettings) -> str | None:
    """A run that ends before its learning rate has risen."""
    never = f"train.warmup_steps={train.warmup_steps} and {steps} steps in all: the learning rate never reaches "
    return f"{never}{train.learning_rate:g}" if train.warmup_steps >= steps else None
