"""Who does how much of each step: pure functions from measured curves to every rank's share.

Host i takes tau_i(b) seconds for a micro-batch of b pairs, and t_i(n) = min over b of t_i(n - b) + tau_i(b)
for n pairs in micro-batches of any sizes, and o_i for what it does besides (the update, ...), whatever n. A
global batch of B pairs is divided to minimise max t_i(n_i) + o_i: the slowest rank ends the step. Efficiency
is eta = (B / T) / sum of R_i, achieved speed over the sum of what the machines do alone, R_i = max over b of
b / tau_i(b).
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import numpy as np

from lib.calibration import MEMORY_HEADROOM, Curve, CurveChoice, CurveKey, HostCalibration, choose_curves
from lib.config import Config, Sync, UserError, as_sharded
from lib.division import Division, Shape, divide, rank_bytes

DEFAULT_MICRO_BATCH_SIZE = 8  # where nothing is measured
TIDY_TOLERANCE = 0.01  # of the step's time, given up for micro-batches of one size
GOOD_EFFICIENCY = 0.95  # below it, a plan says which global batch would reach it
FREE_SYNC = 0.05  # of a step: a sync that costs less is worth its exactness
SHOWN_ALONE = 8  # single hosts in the table of predictions: the fastest ones


class TooLarge(UserError):
    """A host's memory does not hold the model and one pair, which need so many bytes."""

    def __init__(self, message: str, needed_bytes: int):
        super().__init__(message)
        self.needed_bytes = needed_bytes


@dataclass(frozen=True)
class Plan:
    """One rank's part of every step."""

    rank: int
    host: str
    share: int  # pairs
    micro_batch_sizes: tuple[int, ...]  # pairs, in the order they are run; they add up to the share
    predicted_compute_seconds: float | None = None  # without the sync; None where nothing is measured
    solo_pairs_per_second: float | None = None  # R: at its best micro-batch, alone


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
            "memory GB": "unknown" if self.memory_bytes is None else f"{self.memory_bytes / 1e9:.3g}",
        }


@dataclass(frozen=True)
class Prediction:
    """What one way to run would give."""

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
    ranks: tuple[Plan, ...]
    sync_seconds: float  # of one step; a single host needs none
    reason: str
    warnings: tuple[str, ...] = ()
    curves: tuple[Curve | None, ...] = field(default=(), repr=False)  # what the predictions rest on
    calibrated: bool = False  # curves of this very model on every host: their seconds are this run's
    gradient_checkpointing: bool = False  # chosen because one pair does not fit without
    predictions: tuple[Prediction, ...] = ()
    division: Division | None = None  # of the model, where it is sharded
    parts: tuple[PartOfModel, ...] = ()  # then, what each rank keeps

    @property
    def workers(self) -> tuple[Plan, ...]:
        """Those among whom data are divided: all ranks, or, where they hold parts of one model, all as one."""
        return self.ranks[:1] if self.division else self.ranks

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
        """The slowest rank's compute and update, from one sync to the next, and the sync."""
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
        return [
            {
                "rank": str(plan.rank),
                "host": plan.host,
                "share": f"{plan.share} ({100 * plan.share / self.global_batch_size:.0f} %)",
                "micro-batches": _run_lengths(plan.micro_batch_sizes),
                "alone pairs/s": _number(plan.solo_pairs_per_second),
                "compute s": _number(plan.predicted_compute_seconds),
            }
            for plan in self.ranks
        ]

    def to_dict(self) -> dict[str, Any]:
        """For plan.json and the records; of the curves what can be drawn."""
        drawn = {"points", "memory_limit_bytes", "key", "source", "measured_at"}
        return {
            **asdict(replace(self, curves=())),
            "curves": [curve and curve.model_dump(mode="json", include=drawn) for curve in self.curves],
            "shares": self.shares,
            "predicted_step_seconds": self.predicted_step_seconds,
            "predicted_pairs_per_second": self.predicted_pairs_per_second,
            "solo_sum_pairs_per_second": self.solo_sum_pairs_per_second,
            "efficiency": self.efficiency,
        }


def make_plan(
    config: Config,
    hosts: Sequence[str],
    curves: Sequence[Curve | None] | None = None,
    sync_seconds: float = 0.0,
) -> ClusterPlan:
    """The plan of a run: `plan_cluster` with the configuration's settings.

    Args:
        hosts: one name a rank, in the order of ranks.
        curves: one a rank, comparable with each other (calibration.choose_curves); None if nothing is known.
        sync_seconds: of one step's collective.

    Raises:
        UserError: the settings do not fit the world, or a host's memory does not hold one pair.
    """
    return plan_cluster(
        hosts,
        config.train.global_batch_size,
        shares=config.plan.shares,
        micro_batch_sizes=config.plan.micro_batch_sizes,
        curves=curves,
        sync_seconds=sync_seconds,
    )


def plan_cluster(
    hosts: Sequence[str],
    global_batch_size: int,
    *,
    shares: Sequence[int] | None = None,
    micro_batch_sizes: Sequence[int] | None = None,
    curves: Sequence[Curve | None] | None = None,
    sync_seconds: float = 0.0,
) -> ClusterPlan:
    """Divides a global batch among ranks: as told, else as measured, else equally.

    Raises:
        UserError: as make_plan.
    """
    world_size = len(hosts)
    curves = list(curves) if curves is not None else [None] * world_size
    assert len(curves) == world_size, (len(curves), world_size)
    if micro_batch_sizes is not None:
        check_micro_batch_sizes(micro_batch_sizes, world_size)
    for host, curve in zip(hosts, curves, strict=True):
        if curve is not None:
            check_memory(host, curve)
    unknown = list(dict.fromkeys(host for host, curve in zip(hosts, curves, strict=True) if curve is None))
    known = [curve for curve in curves if curve is not None]

    if shares is not None:
        check_shares(shares, global_batch_size, world_size)
        reason = "shares as plan.shares has them"
    elif world_size == 1:
        shares, reason = [global_batch_size], "one rank does all"
    elif unknown:
        shares = equal_shares(global_batch_size, world_size)
        cause = f"no calibration of {', '.join(unknown)}" if known else "no calibration"
        reason = f"equal shares: {cause}; make calibrate measures the hosts, plan.shares overrules"
    else:
        shares, reason = best_shares(hosts, known, global_batch_size, sync_seconds, micro_batch_sizes)

    warnings = []
    ranks = []
    batches_of: dict[tuple[Any, ...], tuple[int, ...]] = {}
    for rank, (host, share, curve) in enumerate(zip(hosts, shares, curves, strict=True)):
        if micro_batch_sizes is not None:
            batches = split_evenly_sized(share, micro_batch_sizes[rank])
        elif curve is None:
            batches = split_evenly_sized(share, DEFAULT_MICRO_BATCH_SIZE)
        else:
            key = (*_identity(curve), share)
            if key not in batches_of:
                batches_of[key] = fastest_micro_batches(curve, share)
            batches = batches_of[key]
        if curve is not None and batches and max(batches) > curve.max_batch_size:
            warnings.append(
                f"rank {rank} ({host}): micro-batches of {max(batches)} pairs, "
                f"but at most {curve.max_batch_size} are known to fit"
            )
        ranks.append(
            Plan(
                rank=rank,
                host=host,
                share=int(share),
                micro_batch_sizes=batches,
                predicted_compute_seconds=float(curve.seconds(np.array(batches)).sum()) if curve else None,
                solo_pairs_per_second=solo_pairs_per_second(curve) if curve else None,
            )
        )
    if min(shares) == 0:
        idle = _listed([f"{plan.rank} ({plan.host})" for plan in ranks if plan.share == 0])
        warnings.append(f"no work at a global batch of {global_batch_size} for rank {idle}")
    alone = sum(share > 0 for share in shares) == 1
    return ClusterPlan(
        strategy="synchronous",
        global_batch_size=global_batch_size,
        ranks=tuple(ranks),
        sync_seconds=0.0 if alone else sync_seconds,
        reason=reason,
        warnings=tuple(warnings),
        curves=tuple(curves),
    )


def plan_sharded(
    config: Config,
    hosts: Sequence[str],
    shape: Shape,
    memory_bytes: Sequence[int | None],
    gflops: Sequence[float | None],
) -> ClusterPlan:
    """Divides a model among ranks: as plan.shares weighs them, else by speed, else by memory, else equally.

    Nobody gets more than fits, less the headroom that activations need.

    Args:
        hosts, memory_bytes, gflops: one a rank, in the order of ranks; None where it is not known.

    Raises:
        UserError: the settings do not fit the world, or the model does not fit the hosts' memory.
    """
    world_size, batch = len(hosts), config.train.global_batch_size
    if config.plan.shares is not None and len(config.plan.shares) != world_size:
        raise UserError(
            f"plan.shares {list(config.plan.shares)} has {len(config.plan.shares)} numbers, but there are {world_size} ranks; "
            "give one a rank"
        )
    if config.plan.shares is not None:
        weights, reason = [float(share) for share in config.plan.shares], "divided as plan.shares weighs the ranks"
    elif all(gflops):
        weights, reason = [float(rate or 0) for rate in gflops], "divided by the hosts' calibrated matmul rates"
    elif all(memory_bytes):
        weights, reason = [float(size or 0) for size in memory_bytes], "divided by memory: no calibration of every host"
    else:
        weights, reason = [1.0] * world_size, "divided equally: neither speed nor memory is known of every host"

    per_weight = _training_bytes_per_byte(config, shape)

    def parts_of(division: Division) -> tuple[PartOfModel, ...]:
        sizes = [rank_bytes(shape, division, rank) for rank in range(world_size)]
        total = sum(divided for divided, _ in sizes)
        return tuple(
            PartOfModel(
                kv_heads=division.kv_heads[rank],
                columns=(division.mlp_columns or division.expert_columns)[rank],
                share=divided / total,
                divided_bytes=divided,
                whole_bytes=whole,
                training_bytes=round(per_weight * (divided + whole)),
                memory_bytes=memory_bytes[rank],
            )
            for rank, (divided, whole) in enumerate(sizes)
        )

    warnings: list[str] = []
    division = divide(shape, weights, config.model.shard_vocabulary)
    parts = parts_of(division)
    if config.plan.shares is None and all(memory_bytes):
        total, whole = sum(part.divided_bytes for part in parts), parts[0].whole_bytes
        room = [(1 - MEMORY_HEADROOM) * (size or 0) / (1 + per_weight) - whole for size in memory_bytes]
        limited = within_memory(weights, [max(0.0, space) / total for space in room])
        if limited is None:
            needed = (1 + per_weight) * (total + world_size * whole)
            raise UserError(
                f"strategy=sharded: {world_size} ranks need {needed / 1e9:.2f} GB together for weights"
                f"{', gradients and optimizer' if per_weight else ''}, but have {sum(filter(None, memory_bytes)) / 1e9:.2f} GB less "
                f"{MEMORY_HEADROOM:.0%} headroom; add a host, or take a quantised model with model.method=lora"
            )
        if limited != weights:
            division, reason = (
                divide(shape, limited, config.model.shard_vocabulary),
                f"{reason}, as far as memory allows",
            )
            parts = parts_of(division)
    for host, part in zip(hosts, parts, strict=True):
        if part.memory_bytes and part.needed_bytes > (1 - MEMORY_HEADROOM) * part.memory_bytes:
            warnings.append(
                f"host {host}: its part needs {part.needed_bytes / 1e9:.2f} GB, of {part.memory_bytes / 1e9:.2f} GB"
            )
    size = (config.plan.micro_batch_sizes or (DEFAULT_MICRO_BATCH_SIZE,))[0]
    return ClusterPlan(
        strategy="sharded",
        global_batch_size=batch,
        ranks=tuple(Plan(rank, host, batch, split_evenly_sized(batch, size)) for rank, host in enumerate(hosts)),
        sync_seconds=0.0,
        reason=reason,
        warnings=tuple(warnings),
        curves=(None,) * world_size,
        division=division,
        parts=parts,
    )


def _training_bytes_per_byte(config: Config, shape: Shape) -> float:
    """What training adds to the weights: full training keeps for each that it trains, whatever its type, four float32 numbers.

    They are the gradient's sum, the two moments of an Adam, and what an update makes of them before the old is let go.
    """
    if config.model.method != "full":
        return 0.0
    return 4 * 4 / shape.weight_bytes * min(config.model.blocks or shape.blocks, shape.blocks) / shape.blocks


def whole_bytes(config: Config, shape: Shape) -> int:
    """What a host that keeps the whole model needs at least: all but activations."""
    weights, others = rank_bytes(shape, divide(shape, [1.0]), 0)
    return round((1 + _training_bytes_per_byte(config, shape)) * (weights + others))


def check_whole(config: Config, hosts: Sequence[str], shape: Shape, memory_bytes: Sequence[int | None]) -> None:
    """Whether every host can keep the whole model.

    Raises:
        TooLarge: one cannot; with what it needs and has.
    """
    needed = whole_bytes(config, shape)
    for host, size in zip(hosts, memory_bytes, strict=True):
        if size is not None and needed > (1 - MEMORY_HEADROOM) * size:
            raise TooLarge(
                f"host {host}: the model needs {needed / 1e9:.2f} GB for weights"
                f"{', gradients and optimizer' * (config.model.method == 'full')}, but it has {size / 1e9:.2f} GB "
                f"less {MEMORY_HEADROOM:.0%} headroom; take a quantised model with model.method=lora, or leave the host out",
                needed,
            )


def predict_sharded(
    plan: ClusterPlan,
    shape: Shape,
    curves: Sequence[Curve | None],
    tokens_per_pair: int,
    sum_seconds: Callable[[float], float] | None,
) -> Prediction:
    """What a divided model gives: each rank's part of the compute, and a block's four sums, two of them backward.

    A rank computes its heads and columns, and, unless the vocabulary is divided, the whole head. A sum carries a number
    for every token and hidden unit, and nobody goes on before it: their times add up. What the sums of the adapters'
    whole halves cost is left out. Of a mixture of experts, all are counted as if they ran.

    Args:
        plan: of plan_sharded.
        curves: one a rank, of the whole model on its host, or None.
        tokens_per_pair: that go through the blocks.
        sum_seconds: one sum of so many bytes over the slowest link; None if no link is measured.
    """
    assert plan.division is not None
    ranks, sizes = len(plan.ranks), np.array(plan.ranks[0].micro_batch_sizes)
    rows = plan.division.vocabulary
    head = shape.vocabulary * shape.hidden_size
    fractions = [
        (part.share * shape.divided_parameters + head * (rows[rank] / shape.vocabulary if rows else 1.0))
        / (shape.divided_parameters + head)
        for rank, part in enumerate(plan.parts)
    ]
    messages = sizes * tokens_per_pair * shape.hidden_size * shape.other_bytes
    per_batch = 4 * shape.blocks + bool(rows)  # a divided embedding is summed, too
    known = [curve for curve in curves if curve is not None]
    seconds, solo = None, None
    if len(known) == ranks:
        computes = [
            fraction * (float(curve.seconds(sizes).sum()) + curve.step_overhead_seconds)
            for fraction, curve in zip(fractions, known, strict=True)
        ]
        if all(curve.max_batch_size for curve in known):  # else some host does nothing alone
            solo = sum(map(solo_pairs_per_second, known))
        if sum_seconds is not None:
            seconds = max(computes) + per_batch * sum(sum_seconds(float(size)) for size in messages)
    # Of a block's activations every rank keeps its two inputs and their norms; the rest are of heads and columns.
    own = 2 * (shape.heads + shape.kv_heads) * shape.head_dim + 3 * (shape.mlp_columns or shape.expert_columns)
    kept_by_all = 4 * shape.hidden_size / (4 * shape.hidden_size + own)
    needed = []
    for part, fraction, curve in zip(plan.parts, fractions, curves, strict=True):
        peak = _peak(curve, int(sizes.max())) if curve else None
        whole = sum(part.divided_bytes for part in plan.parts) + part.whole_bytes
        activations = max(0.0, peak - whole) * (fraction + (1 - fraction) * kept_by_all) if peak else 0.0
        needed.append(part.needed_bytes + round(activations))
    return Prediction(
        "sharded, "
        + " + ".join(f"{part.share:.0%}" for part in plan.parts[:SHOWN_ALONE])
        + " + ..." * (ranks > SHOWN_ALONE),
        tuple(rank.host for rank in plan.ranks),
        seconds,
        plan.global_batch_size / seconds / solo if seconds and solo else None,
        plan.strategy == "sharded",
        max(needed),
        float(per_batch * messages.sum() * 2 * (ranks - 1) / ranks),
    )


def within_memory(weights: Sequence[float], room: Sequence[float]) -> list[float] | None:
    """Weights under which no rank gets more than its room, a fraction of all; None if all rooms together are too small.

    Those that are full stay full; what is left goes to the others in proportion to their weights.
    """
    total = sum(weights)
    shares = [weight / total for weight in weights]
    if all(share <= space for share, space in zip(shares, room, strict=True)):
        return list(weights)
    if sum(room) < 1:
        return None
    full: set[int] = set()
    while True:
        left = 1 - sum(room[rank] for rank in full)
        open_weight = sum(weight for rank, weight in enumerate(weights) if rank not in full)
        shares = [room[r] if r in full else left * weight / open_weight for r, weight in enumerate(weights)]
        over = {rank for rank, share in enumerate(shares) if share > room[rank] * (1 + 1e-12)}
        if not over:
            return shares
        full |= over


def with_micro_batches(plan: ClusterPlan, micro_batch_sizes: Sequence[Sequence[int]], reason: str) -> ClusterPlan:
    """The same hosts with other work, as a checkpoint keeps it."""
    ranks = [
        replace(
            rank,
            share=sum(sizes),
            micro_batch_sizes=tuple(sizes),
            predicted_compute_seconds=float(curve.seconds(np.array(sizes)).sum()) if curve else None,
        )
        for rank, sizes, curve in zip(plan.ranks, micro_batch_sizes, plan.curves, strict=True)
    ]
    return replace(plan, ranks=tuple(ranks), reason=reason, warnings=(), predictions=())


def sufficient_global_batch(
    hosts: Sequence[str],
    curves: Sequence[Curve],
    global_batch_size: int,
    sync_seconds: float = 0.0,
    efficiency: float = GOOD_EFFICIENCY,
) -> int | None:
    """The first of 1, 2, 4, ... 64 times global_batch_size that the hosts share at this efficiency, or None.

    A pair is the smallest part and a sync costs the same for any batch: the larger, the less either matters.
    """
    for pairs in (global_batch_size * 2**doubling for doubling in range(7)):
        plan = plan_cluster(hosts, pairs, curves=curves, sync_seconds=sync_seconds)
        if plan.efficiency is not None and plan.efficiency >= efficiency:
            return pairs
    return None


# ------------------------------------------------------------------------------------------------------------
# From what is known of the hosts


@dataclass(frozen=True)
class _Measured:
    """What is known of all hosts, as they are while all work."""

    hosts: Sequence[str]
    calibrations: Sequence[HostCalibration | None]
    longest: int
    backend: str
    versions: Mapping[str, str]
    device_names: Sequence[str] | None
    published: Sequence[HostCalibration]

    def choose(self, key: CurveKey, require_calibration: bool) -> CurveChoice:
        """Curves of all hosts, with the time of typical rows and the memory of the longest."""
        choice, of_longest = (
            choose_curves(
                self.hosts,
                self.calibrations,
                key.at_length(length),
                versions=self.versions,
                device_names=self.device_names,
                published=self.published,
                require_calibration=require_calibration,
            )
            for length in (key.sequence_length, self.longest)
        )
        if choice.curves is None or of_longest.curves is None:
            return choice
        pairs = zip(choice.curves, of_longest.curves, strict=True)
        return replace(choice, curves=tuple(_with_memory_of(curve, other) for curve, other in pairs))

    def of_this_model(self, key: CurveKey) -> list[Curve | None]:
        """Each host's own curve of this very model, where it has one."""
        found: list[Curve | None] = []
        for host, calibration in zip(self.hosts, self.calibrations, strict=True):
            choice = replace(self, hosts=[host], calibrations=[calibration], device_names=None, published=()).choose(
                key, require_calibration=False
            )
            found.append(choice.curves[0] if choice.curves and _measured_for(key, choice) else None)
        return found

    @property
    def link_is_known(self) -> bool:
        return any(link.backend == self.backend for one in self.calibrations if one for link in one.links)

    def sum_seconds(self, size_bytes: float) -> float:
        """One sum over the slowest link; 0 for a single host, and where nothing was measured."""
        links = [link for one in self.calibrations if one for link in one.links if link.backend == self.backend]
        sums = (link.seconds(size_bytes) for link in links if link.operation == "all_sum")
        return max(sums, default=0.0) * (len(self.hosts) > 1)


def plan_run(
    config: Config,
    hosts: Sequence[str],
    calibrations: Sequence[HostCalibration | None],
    key: CurveKey,
    *,
    longest: int,
    backend: str,
    versions: Mapping[str, str],
    device_names: Sequence[str] | None = None,
    published: Sequence[HostCalibration] = (),
    dataset_size: int | None = None,
    shape: Shape | None = None,
    memory_bytes: Sequence[int | None] | None = None,
) -> ClusterPlan:
    """The plan of a run from every host's calibration, with the predictions of the ways to run it.

    Args:
        hosts, calibrations, device_names: one a rank.
        key: its sequence length is a typical row's, for the time; `longest`: the longest's, for the memory.
        backend: that carries the gradients.
        dataset_size: in pairs, which is a round of independent ranks unless the settings say otherwise.
        shape: of the model; None if it cannot be divided.
        memory_bytes: that each rank may use; a calibration may know of less.

    Raises:
        UserError: as make_plan, plan_sharded and choose_curves.
    """
    calibrations, warnings = _at_work_together(hosts, calibrations)
    measured = _Measured(hosts, calibrations, longest, backend, versions, device_names, published)
    memory = [
        min([size for size in (room, *_memory_limits(one)) if size], default=None)
        for room, one in zip(memory_bytes or [None] * len(hosts), calibrations, strict=True)
    ]

    def whole(settings: Config) -> ClusterPlan:
        """Every host keeps the model."""
        if settings.strategy in ("auto", "sharded") and shape is not None and len(hosts) > 1:
            curves = measured.of_this_model(key)
            rough = [  # what was measured together with its peak memory is known better
                rank for rank, curve in enumerate(curves) if curve is None or curve.points[0].peak_memory_bytes is None
            ]
            check_whole(settings, [hosts[rank] for rank in rough], shape, [memory[rank] for rank in rough])
        return _plan_replicas(settings, measured, key, dataset_size)

    def divided(settings: Config) -> ClusterPlan:
        """Every host keeps a part of it."""
        assert shape is not None
        gflops = [one.gflops if one else None for one in calibrations]
        plan = plan_sharded(as_sharded(settings), hosts, shape, memory, gflops)
        tokens = key.sequence_length * (1 if key.records == "sft" else 2)
        sums = measured.sum_seconds if measured.link_is_known else None
        return replace(plan, predictions=(predict_sharded(plan, shape, measured.of_this_model(key), tokens, sums),))

    can_divide = shape is not None and len(hosts) > 1
    is_open = config.strategy == "auto" and config.plan.shares is None
    told = {"shares": None, "micro_batch_sizes": None, "require_calibration": False}
    freely = config.model_copy(update={"plan": config.plan.model_copy(update=told)})  # for the other ways to run it
    too_large: TooLarge | None = None
    replicas: ClusterPlan | None = None
    try:
        replicas = whole(freely if config.strategy == "sharded" and can_divide else config)
    except TooLarge as error:
        if not can_divide or not (is_open or config.strategy == "sharded"):
            raise
        too_large = error
    if replicas is not None and (config.strategy != "sharded" or not can_divide):
        ways = list(replicas.predictions)
        if can_divide and replicas.calibrated:
            with contextlib.suppress(UserError):  # then that is no way to run it
                ways[2:2] = [replace(way, chosen=False) for way in divided(freely).predictions]
        return replace(replicas, predictions=tuple(ways), warnings=(*warnings, *replicas.warnings))

    assert shape is not None
    why, others = "as strategy has it", tuple[Prediction, ...]()
    if too_large is not None:
        needed = too_large.needed_bytes
        others = (Prediction("independent, synchronous: too large", tuple(hosts), None, None, memory_bytes=needed),)
    elif replicas is not None and replicas.calibrated:
        others = tuple(replace(way, chosen=False) for way in replicas.predictions)
    try:
        plan = divided(config)
    except UserError as error:
        if config.strategy == "sharded":
            raise
        raise UserError(f"{too_large}; nor can it be divided: {error}") from None
    if config.strategy == "auto":
        why = f"because {str(too_large).partition(';')[0]}"
    return replace(
        plan,
        reason=f"sharded, {why}; {plan.reason}",
        warnings=(*warnings, *plan.warnings),
        predictions=(*plan.predictions, *others),
    )


def _memory_limits(calibration: HostCalibration | None) -> list[int | None]:
    return [curve.memory_limit_bytes for curve in calibration.curves] if calibration else []


def _plan_replicas(config: Config, measured: _Measured, key: CurveKey, dataset_size: int | None) -> ClusterPlan:
    """The plan of hosts that all keep the whole model.

    Raises:
        TooLarge: a host's memory does not hold one pair.
        UserError: as make_plan and choose_curves.
    """
    hosts = measured.hosts
    warnings: tuple[str, ...] = ()

    def choose(key: CurveKey) -> CurveChoice:
        return measured.choose(key, config.plan.require_calibration)

    def planned() -> ClusterPlan:
        return make_plan(config, hosts, choice.curves, sync_seconds())

    def sync_seconds() -> float:
        """One sum of the gradients."""
        gradients = max((curve.gradient_bytes or 0 for curve in choice.curves or ()), default=0)
        return measured.sum_seconds(_compressed(gradients, config.sync)) if choice.curves else 0.0

    choice = choose(key)
    checkpointed = False
    try:
        plan = planned()
    except UserError as too_large:
        # Dropout is the one thing that MLX's gradient checkpointing gets wrong.
        if config.model.gradient_checkpointing is not None or config.model.dropout:
            raise
        key = key.model_copy(update={"gradient_checkpointing": True})
        choice = choose(key)
        if not _measured_for(key, choice):
            raise
        plan = planned()
        checkpointed = True
        warnings = (
            *warnings,
            f"gradient checkpointing is turned on: {str(too_large).partition(';')[0]} without",
        )

    apart = make_plan(config, hosts, choice.curves)
    strategy, why = choose_strategy(config, apart, sync_seconds() if measured.link_is_known else None)
    plan = apart if strategy == "independent" else plan

    reason = plan.reason
    if choice.curves is None:
        reason = choice.reason if plan.reason.startswith("equal shares") else plan.reason
    elif config.plan.shares is None:
        reason = f"{plan.reason} ({choice.reason})"
    if len(hosts) == 1 and choice.curves is None:
        reason = f"{plan.reason}, in micro-batches of {DEFAULT_MICRO_BATCH_SIZE} at most: no calibration"
    priced = [config.cost.watts, config.cost.rent_per_hour]
    strangers = {name for prices in priced if isinstance(prices, dict) for name in prices} - set(hosts)
    if strangers:
        warnings = (*warnings, f"cost: no host of this run is called {_listed(sorted(strangers))}")
    if plan.efficiency is not None and plan.efficiency < GOOD_EFFICIENCY and 1 < len(hosts) <= 64 and choice.curves:
        enough = sufficient_global_batch(hosts, choice.curves, plan.global_batch_size, sync_seconds())
        if enough and enough > plan.global_batch_size and config.plan.shares is None:
            reason += f"; a global batch of {enough} would reach {GOOD_EFFICIENCY:.0%} of their speed"
    plan = replace(
        plan,
        strategy=strategy,
        reason=f"{strategy}, {why}; {reason}" if len(hosts) > 1 else reason,
        warnings=(*warnings, *choice.warnings, *plan.warnings),
        calibrated=_measured_for(key, choice),
        gradient_checkpointing=checkpointed,
    )
    pairs_per_round = config.independent.pairs_per_round or dataset_size or plan.global_batch_size
    return replace(plan, predictions=_predict(plan, apart, sync_seconds(), pairs_per_round, config.sync))


def choose_strategy(config: Config, apart: ClusterPlan, sync_seconds: float | None) -> tuple[str, str]:
    """How the ranks work together, and why.

    Told is told. Otherwise ranks train apart where waiting for the network would cost FREE_SYNC of a step or more, and
    sum their gradients, which gives one machine's result, where it would not, or where nobody knows.

    Args:
        apart: the plan of ranks that train apart: no sync.
        sync_seconds: what one would take; None if nobody knows.
    """
    if config.strategy != "auto":
        cost = _cost_of_sync(apart, sync_seconds)
        said = ""
        if config.strategy == "independent" and cost is not None:
            said = f" (a sync would cost {cost:.1%} of a step{', less than is worth it' * (cost < FREE_SYNC)})"
        return config.strategy, f"as strategy has it{said}"
    if len(apart.ranks) == 1:
        return "synchronous", "one rank"
    if config.plan.shares is not None:
        return "synchronous", "which plan.shares is for"
    if len({rank.host for rank in apart.ranks}) == 1:
        return "synchronous", "all ranks are on one machine"
    if apart.predicted_step_seconds is None:
        return "synchronous", "as the hosts are not measured"
    if sync_seconds is None:
        return "synchronous", "as the link is not measured"
    cost = _cost_of_sync(apart, sync_seconds) or 0.0
    if cost < FREE_SYNC:
        return "synchronous", f"whose sync costs {cost:.1%} of a step"
    return "independent", f"because a sync would cost {cost:.0%} of a step"


def _cost_of_sync(apart: ClusterPlan, sync_seconds: float | None) -> float | None:
    """The part of a synchronous step that its sync takes."""
    seconds = apart.predicted_step_seconds
    return None if sync_seconds is None or not seconds else sync_seconds / (seconds + sync_seconds)


def _measured_for(key: CurveKey, choice: CurveChoice) -> bool:
    return choice.curves is not None and all(
        curve.key is not None and curve.key.at_length(key.sequence_length) == key for curve in choice.curves
    )


def _at_work_together(
    hosts: Sequence[str], calibrations: Sequence[HostCalibration | None]
) -> tuple[list[HostCalibration | None], tuple[str, ...]]:
    """Curves as they are when all ranks work: slower as measured, else by the number that share a machine.

    A rank's own file (HOST-0.json, ...; its machine is not called HOST) stands as it is. On CUDA every rank
    has a GPU of its own.
    """
    if len(hosts) == 1:
        return list(calibrations), ()
    ranks_of = Counter(hosts)
    together: list[HostCalibration | None] = []
    warnings = []
    for host, calibration in zip(hosts, calibrations, strict=True):
        if calibration is not None:
            own = calibration.machine.host != host or calibration.machine.device == "cuda"
            sharing = 1 if own else ranks_of[host]
            curves = [slower(curve, curve.slowdown_together or sharing, sharing) for curve in calibration.curves]
            rate = calibration.gflops and calibration.gflops / sharing
            calibration = calibration.model_copy(update={"curves": tuple(curves), "gflops": rate})
            if sharing > 1 and any(curve.slowdown_together is None for curve in curves):
                warnings.append(
                    f"{sharing} ranks share {host}, which was measured for one: each is taken to have "
                    f"1/{sharing} of its speed and memory; {host}-0.json, ... would say what each has"
                )
        together.append(calibration)
    return together, tuple(dict.fromkeys(warnings))


def slower(curve: Curve, factor: float, ranks_sharing_memory: int = 1) -> Curve:
    """The curve of a host that takes `factor` times as long."""
    points = [
        point.model_copy(
            update={
                "seconds_median": point.seconds_median * factor,
                "seconds_spread": point.seconds_spread * factor,
                "pairs_per_second": point.pairs_per_second / factor,
            }
        )
        for point in curve.points
    ]
    limit = curve.memory_limit_bytes and curve.memory_limit_bytes // ranks_sharing_memory
    overhead = curve.step_overhead_seconds * factor
    changed = {"points": tuple(points), "memory_limit_bytes": limit, "step_overhead_seconds": overhead}
    return curve.model_copy(update=changed)


def _with_memory_of(curve: Curve, longest: Curve) -> Curve:
    """The curve's times, with the peak memory and the limit of the longest rows' curve."""
    if longest.memory_limit_bytes is None or longest.points[0].peak_memory_bytes is None:
        return curve
    sizes = np.array([point.batch_size for point in longest.points], dtype=np.float64)
    peaks = np.array([point.peak_memory_bytes for point in longest.points], dtype=np.float64)
    a_pair_more = (peaks[-1] - peaks[0]) / (sizes[-1] - sizes[0])
    points = []
    for point in curve.points:
        beyond = max(0.0, point.batch_size - sizes[-1])
        peak = float(np.interp(point.batch_size, sizes, peaks)) + beyond * max(0.0, a_pair_more)
        points.append(point.model_copy(update={"peak_memory_bytes": int(peak)}))
    return curve.model_copy(update={"points": tuple(points), "memory_limit_bytes": longest.memory_limit_bytes})


def _compressed(size_bytes: float, sync: Sync) -> float:
    """What float32 values of that size are on their way (lib/compression.py)."""
    factor = {"none": 1.0, "bf16": 0.5, "int8": 0.25 * (1 + 4 / 256), "topk": 2 * sync.topk_fraction}
    return size_bytes * factor[sync.compression]


def _predict(
    plan: ClusterPlan, apart: ClusterPlan, sync_seconds: float, pairs_per_round: int, sync: Sync
) -> tuple[Prediction, ...]:
    """Both strategies, equal shares, and the fastest hosts each alone; nothing without curves. apart: without a sync."""
    solo = plan.solo_sum_pairs_per_second
    if solo is None or plan.predicted_step_seconds is None:
        return ()
    hosts = [rank.host for rank in plan.ranks]
    batch, size = plan.global_batch_size, len(plan.ranks)
    # One message of all that is trained, as a ring algorithm sends it.
    message = _compressed(max((curve.gradient_bytes or 0 for curve in plan.curves if curve), default=0), sync)
    to_sum = message * (2 * (size - 1) / size if sync.compression in ("none", "bf16") else size - 1)

    def prediction(
        name: str, ranks: Sequence[Plan], seconds: float, chosen: bool = False, bytes_sent: float = 0.0
    ) -> Prediction:
        return Prediction(
            name,
            tuple(rank.host for rank in ranks),
            seconds,
            batch / seconds / solo,
            chosen,
            _peak_memory(plan, ranks),
            bytes_sent if message or len(ranks) == 1 else None,
        )

    alone = [
        prediction(
            f"{rank.host} alone" if hosts.count(rank.host) == 1 else f"rank {rank.rank} ({rank.host}) alone",
            [rank],
            plan_cluster([rank.host], batch, curves=[plan.curves[rank.rank]]).predicted_step_seconds or 0.0,
        )
        for rank in sorted(plan.ranks, key=lambda rank: -(rank.solo_pairs_per_second or 0.0))[:SHOWN_ALONE]
    ]
    if len(hosts) == 1:
        return (replace(alone[0], chosen=True),)
    equal = plan_cluster(
        hosts,
        batch,
        shares=equal_shares(batch, len(hosts)),
        curves=plan.curves,
        sync_seconds=sync_seconds,
    )
    working = [rank for rank in plan.ranks if rank.share]
    seconds = plan.predicted_step_seconds - plan.sync_seconds + (sync_seconds if len(working) > 1 else 0.0)
    together = prediction(f"synchronous, {_sum_of(plan.shares)}", working, seconds, False, to_sum)
    # A merge's message is as large as a step's.
    merges = batch / pairs_per_round
    working = [rank for rank in apart.ranks if rank.share]
    seconds = _apart_seconds(apart, working) + sync_seconds * merges
    in_rounds = prediction(
        f"independent, {_sum_of(apart.shares)}", working, seconds, False, message * (size - 1) * merges
    )
    first, second = (in_rounds, together) if plan.strategy == "independent" else (together, in_rounds)
    return (
        replace(first, chosen=True),
        second,
        prediction("synchronous, equal shares", plan.ranks, equal.predicted_step_seconds or 0.0, False, to_sum),
        *alone,
    )


def _sum_of(shares: Sequence[int]) -> str:
    return " + ".join(map(str, shares[:SHOWN_ALONE])) + (" + ..." if len(shares) > SHOWN_ALONE else "")


def _apart_seconds(plan: ClusterPlan, working: Sequence[Plan]) -> float:
    """A global batch's time where each rank goes through its steps at its own pace."""
    speeds = []
    for rank in working:
        curve = plan.curves[rank.rank]
        assert curve is not None and rank.predicted_compute_seconds is not None
        speeds.append(rank.share / (rank.predicted_compute_seconds + curve.step_overhead_seconds))
    return plan.global_batch_size / sum(speeds)


def _peak_memory(plan: ClusterPlan, ranks: Sequence[Plan]) -> int | None:
    """The largest peak of these ranks' micro-batches, in bytes; None where it was not measured."""
    peaks = []
    for rank in ranks:
        curve = plan.curves[rank.rank]
        peak = _peak(curve, max(rank.micro_batch_sizes, default=1)) if curve else None
        if peak is None:
            return None
        peaks.append(peak)
    return max(peaks)


def _peak(curve: Curve, micro_batch_size: int) -> int | None:
    """The peak of a micro-batch, in bytes; beyond the measured sizes it grows as between them. None where it was not measured."""
    if curve.points[0].peak_memory_bytes is None:
        return None
    sizes = [point.batch_size for point in curve.points]
    peaks = [point.peak_memory_bytes or 0 for point in curve.points]
    beyond = max(0, micro_batch_size - sizes[-1])
    slope = (peaks[-1] - peaks[0]) / (sizes[-1] - sizes[0]) if len(sizes) > 1 else peaks[0] / sizes[0]
    return int(np.interp(micro_batch_size, sizes, peaks) + beyond * max(0.0, slope))


# ------------------------------------------------------------------------------------------------------------
# As told, or equally


def equal_shares(global_batch_size: int, world_size: int) -> list[int]:
    """Shares that differ by one pair at most; the first ranks take the remainder."""
    each, more = divmod(global_batch_size, world_size)
    return [each + (rank < more) for rank in range(world_size)]


def distribute_work(total_examples: int, ratios: Sequence[float]) -> list[int]:
    """Shares in proportion to `ratios`, rounded by largest remainder; they sum to total_examples."""
    exact = np.round(total_examples * np.asarray(ratios, dtype=np.float64) / sum(ratios), 9)
    shares = np.floor(exact).astype(int)
    most_cut_first = np.argsort(shares - exact, kind="stable")
    shares[most_cut_first[: total_examples - shares.sum()]] += 1
    return [int(share) for share in shares]


def check_shares(shares: Sequence[int], global_batch_size: int, world_size: int) -> None:
    """Whether given shares fit the world and the batch.

    Raises:
        UserError: they do not.
    """
    listed = list(shares)
    if len(listed) != world_size:
        raise UserError(
            f"plan.shares {listed} has {len(listed)} numbers, but there are {world_size} ranks; give one a rank"
        )
    if min(listed) < 0:
        raise UserError(f"plan.shares {listed}: a share of {min(listed)} pairs; the least is 0")
    if sum(listed) != global_batch_size:
        raise UserError(
            f"plan.shares {listed} sum to {sum(listed)}, but train.global_batch_size is {global_batch_size}; "
            "make them equal"
        )


def check_micro_batch_sizes(micro_batch_sizes: Sequence[int], world_size: int) -> None:
    """Whether given micro-batch sizes fit the world.

    Raises:
        UserError: they do not.
    """
    listed = list(micro_batch_sizes)
    if len(listed) != world_size:
        raise UserError(
            f"plan.micro_batch_sizes {listed} has {len(listed)} numbers, but there are {world_size} ranks; "
            "give one a rank"
        )
    if min(listed) < 1:
        raise UserError(f"plan.micro_batch_sizes {listed}: a micro-batch of {min(listed)} pairs; the least is 1")


def split_evenly_sized(share: int, micro_batch_size: int) -> tuple[int, ...]:
    """Micro-batches of one size, and what is left: 20 pairs by 8 are 8, 8, 4."""
    whole, rest = divmod(share, micro_batch_size)
    return (micro_batch_size,) * whole + ((rest,) if rest else ())


# ------------------------------------------------------------------------------------------------------------
# As measured


def check_memory(host: str, curve: Curve) -> None:
    """Whether the host can run the smallest measured micro-batch.

    Raises:
        TooLarge: it cannot; with what it needs and has.
    """
    if curve.max_batch_size == 0:
        smallest = curve.points[0]
        assert smallest.peak_memory_bytes is not None and curve.memory_limit_bytes is not None
        pairs = "one pair needs" if smallest.batch_size == 1 else f"{smallest.batch_size} pairs need"
        raise TooLarge(
            f"host {host}: {pairs} {smallest.peak_memory_bytes / 1e9:.2f} GB, but it has "
            f"{curve.memory_limit_bytes / 1e9:.2f} GB less {MEMORY_HEADROOM:.0%} headroom; try "
            "model.gradient_checkpointing=true or a smaller data.max_length, or leave the host out",
            smallest.peak_memory_bytes,
        )


def solo_pairs_per_second(curve: Curve) -> float:
    """R = max over b of b / tau(b), within memory."""
    sizes = np.arange(1, curve.max_batch_size + 1)
    return float(np.max(sizes / curve.seconds(sizes)))


def fastest_micro_batches(curve: Curve, share: int) -> tuple[int, ...]:
    """The micro-batches that attain t(share), the largest first; of equally fast ones, the largest sizes."""
    tau = curve.seconds(np.arange(1, curve.max_batch_size + 1))
    times = step_times(tau[None], share)[0]
    batches = []
    rest = share
    while rest:
        most = min(rest, len(tau))
        candidates = times[rest - most : rest][::-1] + tau[:most]
        near_best = np.flatnonzero(candidates <= times[rest] * (1 + 1e-12))
        batches.append(int(near_best[-1]) + 1)
        rest -= batches[-1]
    return tuple(sorted(batches, reverse=True))


def step_times(tau: np.ndarray, pairs: int) -> np.ndarray:
    """t(n) for n = 0..pairs, float64 [K, pairs + 1], from tau(1..M), [K, M]; inf marks what does not fit."""
    times = np.zeros((tau.shape[0], pairs + 1))
    for n in range(1, pairs + 1):
        most = min(n, tau.shape[1])
        times[:, n] = (times[:, n - most : n][:, ::-1] + tau[:, :most]).min(axis=1)
    return times


def best_shares(
    hosts: Sequence[str],
    curves: Sequence[Curve],
    global_batch_size: int,
    sync_seconds: float = 0.0,
    micro_batch_sizes: Sequence[int] | None = None,
) -> tuple[list[int], str]:
    """The shares of the shortest step, and why: all hosts together, or the best one alone, without a sync."""
    kinds = _Kinds(curves, micro_batch_sizes)
    shares, seconds, shortest = kinds.divide(global_batch_size)
    together = seconds + sync_seconds
    best_host, alone = kinds.best_alone(global_batch_size, together)
    if alone <= together:
        others = _listed([f"{host} (rank {rank})" for rank, host in enumerate(hosts) if rank != best_host])
        reason = (
            f"leave out {others}: {hosts[best_host]} alone takes {alone:.4g} s a step, together they take "
            f"{together:.4g} s, {sync_seconds:.4g} s of it sync; a larger train.global_batch_size may help"
        )
        return [global_batch_size * (rank == best_host) for rank in range(len(hosts))], reason
    equal = kinds.seconds(equal_shares(global_batch_size, len(hosts))) + sync_seconds
    reason = (
        f"shares from the hosts' curves: {together:.4g} s a step; equal shares {equal:.4g} s, "
        f"the best host alone ({hosts[best_host]}) {alone:.4g} s"
    )
    if seconds > shortest * (1 + 1e-9):
        reason += f"; in whole micro-batches of one size a host, {seconds / shortest - 1:.1%} above the least"
    return shares, reason


class _Kinds:
    """Hosts grouped by equal curves, and the table t(n) of each kind, as long as is needed."""

    def __init__(self, curves: Sequence[Curve], micro_batch_sizes: Sequence[int] | None) -> None:
        sizes: Sequence[int | None] = micro_batch_sizes or [None] * len(curves)
        numbers: dict[tuple[Any, ...], int] = {}
        members: list[tuple[Curve, int | None]] = []
        self.of_rank = np.empty(len(curves), dtype=np.int64)
        for rank, (curve, size) in enumerate(zip(curves, sizes, strict=True)):
            identity = (*_identity(curve), size)
            if identity not in numbers:
                numbers[identity] = len(numbers)
                members.append((curve, size))
            self.of_rank[rank] = numbers[identity]
        self.counts = np.bincount(self.of_rank)
        self.fixed = np.array([size or 0 for _, size in members])
        self.measured = [[p.batch_size for p in c.points if p.batch_size <= c.max_batch_size] for c, _ in members]
        widest = max(size or curve.max_batch_size for curve, size in members)
        self.tau = np.full((len(members), widest), np.inf)
        for kind, (curve, size) in enumerate(members):
            most = size or curve.max_batch_size
            self.tau[kind, :most] = curve.seconds(np.arange(1, most + 1))
        self.rates = (np.arange(1, widest + 1) / self.tau).max(axis=1)
        self.overheads = np.array([curve.step_overhead_seconds for curve, _ in members])

    def times(self, kinds: np.ndarray, pairs: int) -> np.ndarray:
        """t(0..pairs) + o of some kinds, float64 [len(kinds), pairs + 1]."""
        times = step_times(self.tau[kinds], pairs)
        for row, kind in enumerate(kinds):
            told = self.fixed[kind]  # whole micro-batches of that size, and what is left
            if told:
                tau = np.concatenate([[0.0], self.tau[kind]])
                whole, rest = np.divmod(np.arange(pairs + 1), told)
                times[row] = whole * tau[told] + tau[rest]
        return times + self.overheads[kinds][:, None]

    def seconds(self, shares: Sequence[int] | np.ndarray) -> float:
        """max t_i(n_i) + o_i."""
        times = self.times(np.arange(len(self.counts)), max(shares))
        return float(times[self.of_rank, np.asarray(shares)].max())

    def best_alone(self, pairs: int, bound: float) -> tuple[int, float]:
        """The rank that does all pairs soonest, and its time.

        No kind can be faster than pairs / rate, so that most need no table of their own.
        """
        best, best_seconds = 0, np.inf
        for kind in np.argsort(pairs / self.rates, kind="stable"):
            if np.isfinite(best_seconds) and pairs / self.rates[kind] >= min(best_seconds, bound):
                break
            seconds = float(self.times(np.array([kind]), pairs)[0, -1])
            if seconds < best_seconds:
                best, best_seconds = int(np.flatnonzero(self.of_rank == kind)[0]), seconds
        return best, best_seconds

    def divide(self, pairs: int) -> tuple[list[int], float, float]:
        """argmin of max t_i(n_i) over sum n_i = pairs, up to TIDY_TOLERANCE; its time, and the least."""
        every = np.arange(len(self.counts))
        length = min(pairs, int(2 * pairs * self.rates.max() / (self.rates @ self.counts)) + self.tau.shape[1])
        while True:
            times = self.times(every, length)
            # Beyond the table no host is done before this: t(n) >= n / rate.
            horizon = np.inf if length == pairs else ((length + 1) / self.rates).min()
            # The most pairs that a kind can do within T; a noisy curve may fall, so look from the end.
            rising = np.minimum.accumulate(times[:, ::-1], axis=1)[:, ::-1]
            longest = min(float(rising[:, -1].max()), horizon * (1 - 1e-9))
            if _capacity(rising, longest) @ self.counts >= pairs:
                break
            length = min(pairs, 2 * length)

        too_short, enough = 0.0, longest
        while enough - too_short > 1e-12 * enough:
            middle = (too_short + enough) / 2
            if _capacity(rising, middle) @ self.counts >= pairs:
                enough = middle
            else:
                too_short = middle

        shares = self._fill(_capacity(rising, too_short), _capacity(rising, enough), pairs)
        seconds = float(times[self.of_rank, shares].max())
        # Filling up to a time is exact, unless fewer pairs somewhere take longer than more (a noisy curve).
        if seconds > enough * (1 + 1e-9):
            shares = _divide_exactly(times[self.of_rank], shares)
            seconds = float(times[self.of_rank, shares].max())
        tidy = self._tidy_shares(seconds, pairs)
        if tidy is not None:
            shares = tidy
        return [int(share) for share in shares], self.seconds(shares), seconds

    def _fill(self, base: np.ndarray, most: np.ndarray, pairs: int) -> np.ndarray:
        """Each host's capacity just before the last moment, then one more pair each in turn.

        In turn, and by rank: equal hosts differ by one pair at most, and the same input gives the same plan.
        """
        shares, room = base[self.of_rank], (most - base)[self.of_rank]
        left = pairs - int(shares.sum())
        while left:
            takers = np.flatnonzero(room)[:left]
            shares[takers] += 1
            room[takers] -= 1
            left -= len(takers)
        return shares

    def _tidy_shares(self, seconds: float, pairs: int) -> np.ndarray | None:
        """Shares of whole micro-batches, one measured size a host, if some fit within the tolerance.

        They rest on measured times and not on interpolated ones, and each host compiles one shape.
        """
        limit = seconds * (1 + TIDY_TOLERANCE)
        options: list[list[tuple[float, int]]] = []  # of each kind: (time, share)
        for kind, sizes in enumerate(self.measured):
            overhead = float(self.overheads[kind])
            best: dict[int, float] = {0: overhead}
            for size in [int(self.fixed[kind])] if self.fixed[kind] else sizes:
                tau = self.tau[kind, size - 1]
                most = min(int((limit - overhead) / tau), pairs // size)
                for count in range(max(1, most - 2), most + 1):
                    best[count * size] = min(best.get(count * size, np.inf), count * tau + overhead)
            options.append(sorted((time, share) for share, time in best.items()))
        for moment in sorted({time for some in options for time, _ in some if time >= seconds * (1 - 1e-9)}):
            shares = np.array([max(share for time, share in some if time <= moment) for some in options])
            if shares @ self.counts == pairs:
                return shares[self.of_rank]
        return None


def _capacity(rising: np.ndarray, seconds: float) -> np.ndarray:
    """The most pairs of each kind that are done within `seconds`: int [K]."""
    within: np.ndarray = np.maximum(np.sum(rising <= seconds, axis=1) - 1, 0)
    return within


def _divide_exactly(times: np.ndarray, near: np.ndarray) -> np.ndarray:
    """argmin of max t_i(n_i), by dynamic programming over hosts; of equally good ones, the closest to `near`.

    times: float64 [N, L + 1]; near: int [N], shares that add up to the pairs. A state is how many pairs the
    hosts so far are ahead of `near`, within a window: it holds every state for a few hosts, and for very many
    still more than the noise of one host needs.
    """
    bound = times[np.arange(len(near)), near].max()
    window = min(int(near.sum()), max(32, 16_384 // len(near)))
    states = 2 * window + 1
    best = np.full(states, np.inf)
    best[window] = 0.0
    choices = np.zeros((len(near), states), dtype=np.int64)
    for host, (row, centre) in enumerate(zip(times, near, strict=True)):
        new = np.full(states, np.inf)
        ahead = np.flatnonzero(row <= bound) - centre
        for more in sorted(ahead[np.abs(ahead) < states].tolist(), key=abs):
            reached = slice(max(0, more), states + min(0, more))
            candidate = np.maximum(best[max(0, -more) : states - max(0, more)], row[centre + more])
            better = candidate < new[reached]
            new[reached][better] = candidate[better]
            choices[host, reached][better] = more
        best = new
    shares = near.copy()
    state = window
    for host in reversed(range(len(near))):
        shares[host] += choices[host, state]
        state -= choices[host, state]
    return shares


def _identity(curve: Curve) -> tuple[Any, ...]:
    """What the planner sees of a curve."""
    return (
        curve.max_batch_size,
        curve.step_overhead_seconds,
        tuple((point.batch_size, point.seconds_median) for point in curve.points),
    )


def _run_lengths(sizes: Sequence[int]) -> str:
    """(8, 8, 4) as "2 x 8, 4"."""
    counts = {size: list(sizes).count(size) for size in dict.fromkeys(sizes)}
    return ", ".join(f"{count} x {size}" if count > 1 else str(size) for size, count in counts.items()) or "none"


def _listed(names: Sequence[str], most: int = 8) -> str:
    """The names, or the first of very many."""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more


def _number(value: float | None) -> str:
    return "not measured" if value is None else f"{value:.4g}"
