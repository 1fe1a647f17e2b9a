"""The plan of a step: every rank's share and micro-batches, or its part of a model. Pure functions.

Efficiency is eta = (B / T) / sum of R_i, for a global batch of B pairs in T seconds: the achieved speed over the sum of
what the machines do alone, R_i = max over b of b / tau_i(b) (lib/plan/shares.py).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace

from lib.config.schema import Config
from lib.model.adapter_layers import trained_part
from lib.model.partition import Division, ModelShape, divide, rank_bytes
from lib.plan.calibration import BatchCurve, CurveKey
from lib.plan.memory_trace import ADAM, OPTIMIZERS
from lib.plan.pipeline_costs import PipelineCosts
from lib.plan.pipeline_cuts import CutCosts

SHOWN_ALONE = 8  # single hosts in the table of predictions: the fastest ones


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
    planned_bytes: int | None = None  # of its largest micro-batch, as measured, else by the memory model
    memory_bytes: int | None = None  # that the rank may use


@dataclass(frozen=True)
class PartOfModel:
    """What one rank keeps of a model."""

    kv_heads: int
    columns: int  # of the MLPs, or of every expert where there are no others
    share: float  # of all that is divided
    divided_bytes: int
    whole_bytes: int  # what every rank keeps
    training_bytes: int  # gradients and optimizer, of full training
    memory_bytes: int | None  # that the rank may use
    activation_bytes: int | None = None  # and adapters: what a micro-batch takes besides, by the memory model

    @property
    def needed_bytes(self) -> int:
        """All but activations."""
        return self.divided_bytes + self.whole_bytes + self.training_bytes

    def row(self, rank: int, host: str) -> dict[str, str]:
        """For the plan's table."""
        return {
            "rank": str(rank),
            "host": host,
            "part": f"{100 * self.share:.1f} %",
            "KV heads": str(self.kv_heads),
            "MLP columns": str(self.columns),
            "its part GB": f"{self.divided_bytes / 1e9:.3g}",
            "kept by all GB": f"{self.whole_bytes / 1e9:.3g}",
            "training GB": f"{self.training_bytes / 1e9:.3g}",
            "activations GB": "unknown" if self.activation_bytes is None else f"{self.activation_bytes / 1e9:.3g}",
            "memory GB": "unknown" if self.memory_bytes is None else f"{self.memory_bytes / 1e9:.3g}",
        }


@dataclass(frozen=True)
class StagePlan:
    """One stage of a pipeline: consecutive blocks; on the first rank the embedding too, on the last norm and head."""

    first_block: int  # counted from 0
    blocks: int
    in_flight: int  # micro-batches of which it keeps the input or the activations at a time, at most
    recomputes: bool  # it keeps its input, and makes all activations again in the backward pass
    gradient_checkpointing: bool  # it keeps each block's input; with neither it keeps activations
    weight_bytes: int
    training_bytes: int  # adapters, gradients and optimizer
    activation_bytes: int | None  # of all micro-batches in flight; None: not known
    memory_bytes: int | None  # that the rank may use
    forward_seconds: float | None = None  # of one micro-batch; None: not known
    backward_seconds: float | None = None  # with the second forward pass, where it recomputes
    idle_fraction: float | None = None  # of a step: the bubble, and waiting for slower stages
    sent_bytes: float | None = None  # a step

    @property
    def needed_bytes(self) -> int:
        """All that it holds at its largest moment."""
        return self.weight_bytes + self.training_bytes + (self.activation_bytes or 0)

    def row(self, rank: int, host: str) -> dict[str, str]:
        """For the plan's table."""
        seconds = (self.forward_seconds or 0.0) + (self.backward_seconds or 0.0)
        kept = "input" if self.recomputes else "block inputs" if self.gradient_checkpointing else "activations"
        return {
            "rank": str(rank),
            "host": host,
            "blocks": f"{self.first_block + 1}-{self.first_block + self.blocks} ({self.blocks})",
            "in flight": str(self.in_flight),
            "keeps": kept,
            "micro-batch s": "unknown" if self.forward_seconds is None else f"{seconds:.3g}",
            "idle": "unknown" if self.idle_fraction is None else f"{self.idle_fraction:.0%}",
            "sent MB a step": "unknown" if self.sent_bytes is None else f"{self.sent_bytes / 1e6:.3g}",
            "weights GB": f"{self.weight_bytes / 1e9:.3g}",
            "training GB": f"{self.training_bytes / 1e9:.3g}",
            "activations GB": "unknown" if self.activation_bytes is None else f"{self.activation_bytes / 1e9:.3g}",
            "memory GB": "unknown" if self.memory_bytes is None else f"{self.memory_bytes / 1e9:.3g}",
        }


@dataclass(frozen=True)
class Prediction:
    """What one strategy, or one host alone, would give."""

    strategy: str
    hosts: tuple[str, ...]
    step_seconds: float | None  # None: it does not fit, or too little is measured
    efficiency: float | None  # over the sum of what all hosts of the run do alone
    chosen: bool = False
    memory_bytes: int | None = None  # the largest host's peak, as measured, or as weights and optimizer need at least
    bytes_per_step: float | None = None  # that each rank sends, on average


@dataclass(frozen=True)
class ClusterPlan:
    """Every rank's part, what it is predicted to give, and why it was chosen."""

    strategy: str
    global_batch_size: int
    ranks: tuple[RankPlan, ...]
    sync_seconds: float  # of one step; a single host needs none
    reason: str
    warnings: tuple[str, ...] = ()
    curves: tuple[BatchCurve | None, ...] = field(default=(), repr=False)  # what the predictions rest on
    calibrated: bool = False  # curves of this very model on every host: their seconds are this run's
    gradient_checkpointing: bool = False  # chosen because one pair does not fit without
    predictions: tuple[Prediction, ...] = ()
    division: Division | None = None  # of the model, where it is sharded
    parts: tuple[PartOfModel, ...] = ()  # then, what each rank keeps
    stages: tuple[StagePlan, ...] = ()  # one a rank, where it is pipelined
    steps_per_round: int | None = None  # of independent ranks: global batches from one merge to the next, to begin with
    merges: int | None = None  # in the whole run, if that stays so
    merging: str = ""  # how often ranks merge, and why so often
    synchronous_instead: str = ""  # what strategy=synchronous would give and cost
    pipeline_costs: PipelineCosts | None = field(default=None, repr=False)  # what a pipeline's cut rests on
    cut_costs: CutCosts | None = field(default=None, repr=False)  # the same, for its micro-batches
    moved_at: int | None = None  # the step after which a pipeline's cut was moved
    divided_instead: str = ""  # what the other way to divide the model would give and cost
    matmul_gflops: Mapping[str, Sequence[float]] = field(default_factory=dict)  # measured at the start, by host
    key: CurveKey | None = field(default=None, repr=False)  # what calibrations know this run's model and rows by

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
    def left_out(self) -> list[str]:
        """Hosts without work."""
        return [plan.host for plan in self.ranks if plan.share == 0]

    @property
    def predicted_step_seconds(self) -> float | None:
        """The slowest rank's compute and update, from one sync to the next, and the sync; a pipeline's schedule."""
        if self.stages:
            return next((way.step_seconds for way in self.predictions if way.chosen), None)
        computes = [plan.predicted_compute_seconds for plan in self.ranks]
        known = [seconds for seconds in computes if seconds is not None]
        if len(known) < len(computes):
            return None
        updates = [curve.step_overhead_seconds if curve else 0.0 for curve in self.curves]
        together = [compute + update for compute, update in zip(known, updates, strict=True)]
        working = [seconds for seconds, share in zip(together, self.shares, strict=True) if share]
        return max(working if len(working) == 1 else together) + self.sync_seconds

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
        """eta, between 0 and 1."""
        speed, solo = self.predicted_pairs_per_second, self.solo_sum_pairs_per_second
        return speed / solo if speed and solo else None

    def rows(self) -> list[dict[str, str]]:
        """One row a rank, for a table; the columns are the keys."""
        if self.division:
            return [part.row(rank.rank, rank.host) for rank, part in zip(self.ranks, self.parts, strict=True)]
        if self.stages:
            return [stage.row(rank.rank, rank.host) for rank, stage in zip(self.ranks, self.stages, strict=True)]
        return [
            {
                "rank": str(plan.rank),
                "host": plan.host,
                "share": f"{plan.share} ({100 * plan.share / self.global_batch_size:.0f} %)",
                "micro-batches": _run_lengths(plan.micro_batch_sizes),
                "alone pairs/s": _number(plan.solo_pairs_per_second),
                "compute s": _number(plan.predicted_compute_seconds),
                "planned GB": "unknown" if plan.planned_bytes is None else f"{plan.planned_bytes / 1e9:.3g}",
                "of GB": "unknown" if plan.memory_bytes is None else f"{plan.memory_bytes / 1e9:.3g}",
            }
            for plan in self.ranks
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
        return {
            **asdict(replace(self, curves=(), key=None, cut_costs=None, pipeline_costs=None)),
            "key": self.key and self.key.model_dump(mode="json"),
            "curves": [curve and curve.model_dump(mode="json", include=drawn) for curve in self.curves],
            "shares": self.shares,
            "blocks": self.blocks,
            "predicted_step_seconds": self.predicted_step_seconds,
            "predicted_pairs_per_second": self.predicted_pairs_per_second,
            "solo_sum_pairs_per_second": self.solo_sum_pairs_per_second,
            "efficiency": self.efficiency,
        }


LEAST_UPDATE = 0.5  # of all that is trained: what an update of small arrays makes on the way, as float32


def training_bytes_per_byte(config: Config, shape: ModelShape) -> float:
    """What training adds to each byte of the weights. Full training keeps float32 numbers for each trained weight.

    They are the gradient's sum, the optimizer's, and what the largest array's update makes on the way. A reference that
    moves is one more.
    """
    if config.model.method != "full":
        return 0.0
    optimizer = OPTIMIZERS.get(config.train.optimizer, ADAM)
    largest = shape.hidden_size * max(shape.vocabulary, shape.mlp_columns, shape.experts * shape.expert_columns)
    all_weights = sum(rank_bytes(shape, divide(shape, [1.0]), 0)) / shape.weight_bytes
    update = max(LEAST_UPDATE, optimizer.update * largest / all_weights)
    numbers = 1 + optimizer.moments + update + (config.reference_sync_steps is not None)
    return 4 * numbers / shape.weight_bytes * trained_part(config.model, shape.blocks)


def whole_bytes(config: Config, shape: ModelShape) -> int:
    """What a host that keeps the whole model needs at least: all but activations."""
    weights, others = rank_bytes(shape, divide(shape, [1.0]), 0)
    return round((1 + training_bytes_per_byte(config, shape)) * (weights + others))


def _run_lengths(sizes: Sequence[int]) -> str:
    """(8, 8, 4) as "2 x 8, 4"."""
    counts = {size: list(sizes).count(size) for size in dict.fromkeys(sizes)}
    return ", ".join(f"{count} x {size}" if count > 1 else str(size) for size, count in counts.items()) or "none"


def _number(value: float | None) -> str:
    return "not measured" if value is None else f"{value:.4g}"
