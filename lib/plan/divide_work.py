"""A global batch divided among ranks, or a model: as configured, else as measured, else by memory. Pure functions."""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from lib.config.schema import Config
from lib.errors import UserError
from lib.model.partition import Division, ModelShape, divide, rank_bytes
from lib.plan.calibration import MEMORY_HEADROOM, BatchCurve
from lib.plan.cluster_plan import ClusterPlan, PartOfModel, RankPlan, training_bytes_per_byte
from lib.plan.memory import MemoryModel, largest_micro_batch, rank_shape
from lib.plan.run_facts import RankHost
from lib.plan.shares import (
    DEFAULT_MICRO_BATCH_SIZE,
    best_shares,
    check_memory,
    check_micro_batch_sizes,
    check_shares,
    curve_identity,
    distribute_work,
    equal_shares,
    fastest_micro_batches,
    listed,
    solo_pairs_per_second,
    split_evenly_sized,
    within_memory,
)
from lib.system.hardware import Device

ALIKE = 0.05  # of a matmul rate, by which hosts may differ and still get equal parts, which can be compiled
ALIKE_CHIPS = 0.25  # the same of NVIDIA's GPUs of one name: measured quickly, at clocks that come and go
MOST_DIVISIONS = 20  # of a model, until a pair's activations fit beside every part
RESERVE_STEP = 0.005  # of a host's memory: whole heads and columns move no part by less
GOOD_EFFICIENCY = 0.95  # below it, a plan says which global batch would reach it


def make_plan(
    config: Config,
    hosts: Sequence[str],
    curves: Sequence[BatchCurve | None] | None = None,
    sync_seconds: float = 0.0,
    speeds: Sequence[float] | None = None,
    default_sizes: Sequence[int] | None = None,
) -> ClusterPlan:
    """The plan of a run: `plan_cluster` with the configuration's settings.

    Args:
        hosts: one name a rank, in the order of ranks.
        curves: one a rank, comparable with each other (calibration.choose_curves); None if nothing is known.
        sync_seconds: of one step's collective.
        speeds: one a rank, of the hosts beside each other, in any unit; for where a curve is missing.
        default_sizes: micro-batches of ranks without a curve, in pairs.

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
        speeds=speeds,
        default_sizes=default_sizes,
    )


def plan_cluster(
    hosts: Sequence[str],
    global_batch_size: int,
    *,
    shares: Sequence[int] | None = None,
    micro_batch_sizes: Sequence[int] | None = None,
    curves: Sequence[BatchCurve | None] | None = None,
    sync_seconds: float = 0.0,
    speeds: Sequence[float] | None = None,
    default_sizes: Sequence[int] | None = None,
) -> ClusterPlan:
    """Divides a global batch among ranks: as configured, else as measured, else by `speeds`, else equally.

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
    measured = [curve for curve in curves if curve is not None]

    if shares is not None:
        check_shares(shares, global_batch_size, world_size)
        reason = "shares as plan.shares has them"
    elif world_size == 1:
        shares, reason = [global_batch_size], "one rank does all"
    elif len(measured) == world_size:
        shares, reason = best_shares(hosts, measured, global_batch_size, sync_seconds, micro_batch_sizes)
    else:
        shares, reason = _shares_without_curves(hosts, curves, global_batch_size, speeds)

    if micro_batch_sizes is not None:
        batches = list(map(split_evenly_sized, shares, micro_batch_sizes))
    else:
        batches = _micro_batches(shares, curves, default_sizes or [DEFAULT_MICRO_BATCH_SIZE] * world_size)
    ranks = tuple(
        RankPlan(
            rank=rank,
            host=host,
            share=int(shares[rank]),
            micro_batch_sizes=sizes,
            predicted_compute_seconds=float(curve.seconds(np.array(sizes)).sum()) if curve else None,
            solo_pairs_per_second=solo_pairs_per_second(curve) if curve else None,
        )
        for rank, (host, sizes, curve) in enumerate(zip(hosts, batches, curves, strict=True))
    )
    is_alone = sum(share > 0 for share in shares) == 1
    return ClusterPlan(
        strategy="synchronous",
        global_batch_size=global_batch_size,
        ranks=ranks,
        sync_seconds=0.0 if is_alone else sync_seconds,
        reason=reason,
        warnings=_warnings(ranks, curves, global_batch_size),
        curves=tuple(curves),
    )


def _shares_without_curves(
    hosts: Sequence[str],
    curves: Sequence[BatchCurve | None],
    global_batch_size: int,
    speeds: Sequence[float] | None,
) -> tuple[list[int], str]:
    """Shares where some host has no curve, and why these: in proportion to speeds, else equal."""
    unknown = list(dict.fromkeys(host for host, curve in zip(hosts, curves, strict=True) if curve is None))
    if speeds is not None:
        return distribute_work(global_batch_size, speeds), (
            f"shares in proportion to the hosts' matrix-product rates, as no calibration is of {listed(unknown)}; "
            "the first steps correct them, make calibrate measures the hosts"
        )
    cause = f"no calibration of {', '.join(unknown)}" if any(curves) else "no calibration"
    return equal_shares(global_batch_size, len(hosts)), (
        f"equal shares: {cause}; make calibrate measures the hosts, plan.shares overrules"
    )


def _micro_batches(
    shares: Sequence[int], curves: Sequence[BatchCurve | None], default_sizes: Sequence[int]
) -> list[tuple[int, ...]]:
    """Every rank's micro-batches: the fastest by its curve, else of the default size. Equal ranks share one search."""
    fastest: dict[tuple[Hashable, int], tuple[int, ...]] = {}
    batches = []
    for share, curve, default_size in zip(shares, curves, default_sizes, strict=True):
        if curve is None:
            batches.append(split_evenly_sized(share, default_size))
            continue
        key = (curve_identity(curve), share)
        if key not in fastest:
            fastest[key] = fastest_micro_batches(curve, share)
        batches.append(fastest[key])
    return batches


def _warnings(
    ranks: Sequence[RankPlan], curves: Sequence[BatchCurve | None], global_batch_size: int
) -> tuple[str, ...]:
    """Micro-batches larger than any that is known to fit, and ranks without work."""
    warnings = []
    for rank, curve in zip(ranks, curves, strict=True):
        largest = max(rank.micro_batch_sizes, default=0)
        if curve is not None and largest > curve.max_batch_size:
            warnings.append(
                f"rank {rank.rank} ({rank.host}): micro-batches of {largest} pairs, "
                f"but at most {curve.max_batch_size} are known to fit"
            )
    if idle := [f"{rank.rank} ({rank.host})" for rank in ranks if rank.share == 0]:
        warnings.append(f"no work at a global batch of {global_batch_size} for rank {listed(idle)}")
    return tuple(warnings)


def plan_sharded(
    config: Config, hosts: Sequence[RankHost], shape: ModelShape, model: MemoryModel | None = None
) -> ClusterPlan:
    """Divides a model among ranks: as plan.shares weighs them, else by speed, else by memory, else equally.

    Nobody gets more than fits, less the headroom that activations need.

    Args:
        hosts: one a rank; of them the memory, the matmul rates and, for activations, the devices count.
        model: for the activations; None where it is not known.

    Raises:
        UserError: the settings do not fit the world, or the model does not fit the hosts' memory.
    """
    batch = config.train.global_batch_size
    parts, division, activations, reason = _divided(config, hosts, shape, model)
    size, checkpointing = (config.plan.micro_batch_sizes or (DEFAULT_MICRO_BATCH_SIZE,))[0], False
    warnings = [
        f"host {host.name}: its part needs {part.needed_bytes / 1e9:.2f} GB, of {part.memory_bytes / 1e9:.2f} GB"
        for host, part in zip(hosts, parts, strict=True)
        if part.memory_bytes and part.needed_bytes > (1 - MEMORY_HEADROOM) * part.memory_bytes
    ]
    if activations:
        size, checkpointing = activations.micro_batch_size()
        parts = activations.added(size, checkpointing)
        if checkpointing:
            warnings.append(
                "gradient checkpointing is turned on: one pair's activations do not fit beside the parts without"
            )
    return ClusterPlan(
        strategy="sharded",
        global_batch_size=batch,
        ranks=tuple(
            RankPlan(rank, host.name, batch, split_evenly_sized(batch, size)) for rank, host in enumerate(hosts)
        ),
        sync_seconds=0.0,
        reason=reason,
        warnings=tuple(warnings),
        curves=(None,) * len(hosts),
        division=division,
        parts=parts,
        gradient_checkpointing=checkpointing,
    )


def _divided(
    config: Config, hosts: Sequence[RankHost], shape: ModelShape, model: MemoryModel | None
) -> tuple[tuple[PartOfModel, ...], Division, _Activations | None, str]:
    """Each rank's part, as far as memory allows with a pair's activations beside it; and why these.

    Raises:
        UserError: as plan_sharded.
    """
    weights, reason = _part_weights(config, hosts)
    division = divide(shape, weights, config.model.shard_vocabulary)
    parts = _parts(config, hosts, shape, division)
    devices = [host.device for host in hosts if host.device]
    knows_activations = model is not None and len(devices) == len(hosts)
    may_move = config.plan.shares is None and all(host.memory_bytes for host in hosts)
    activations, reserved = None, [0.0] * len(hosts)
    for _ in range(MOST_DIVISIONS):
        if may_move:
            limited = _weights_within_memory(config, shape, weights, parts, reserved)
            if limited != weights:
                division = divide(shape, limited, config.model.shard_vocabulary)
                parts = _parts(config, hosts, shape, division)
        if not knows_activations:
            break
        assert model is not None
        activations = _Activations(config, hosts, devices, parts, division, model)
        lacking = [activations.lacking_bytes(rank) for rank in range(len(hosts))]
        if not any(lacking) or not may_move or config.plan.micro_batch_sizes:
            break
        reserved = [
            kept + max(missing, RESERVE_STEP * (host.memory_bytes or 0)) if missing else kept
            for kept, missing, host in zip(reserved, lacking, hosts, strict=True)
        ]
    is_limited = division.weights != tuple(weights)
    return parts, division, activations, f"{reason}, as far as memory allows" if is_limited else reason


def _part_weights(config: Config, hosts: Sequence[RankHost]) -> tuple[list[float], str]:
    """How the model is divided as long as memory allows, and why so.

    Raises:
        UserError: plan.shares has not one number for each rank.
    """
    shares = config.plan.shares
    if shares is not None and len(shares) != len(hosts):
        raise UserError(
            f"plan.shares {list(shares)} has {len(shares)} numbers, but there are {len(hosts)} ranks; give one a rank"
        )
    if shares is not None:
        return [float(share) for share in shares], "divided as plan.shares weighs the ranks"
    if all(host.gflops for host in hosts):
        rates = [float(host.gflops or 0) for host in hosts]
        chips = {host.device_name for host in hosts}
        is_one_chip = len(chips) == 1 and None not in chips and all(host.device == "cuda" for host in hosts)
        if min(rates) > (1 - (ALIKE_CHIPS if is_one_chip else ALIKE)) * max(rates):
            return [1.0] * len(hosts), "divided equally: the hosts' matmul rates are alike"
        return rates, "divided by the hosts' matmul rates"
    if all(host.memory_bytes for host in hosts):
        memory = [float(host.memory_bytes or 0) for host in hosts]
        return memory, "divided by memory: no calibration of every host"
    return [1.0] * len(hosts), "divided equally: neither speed nor memory is known of every host"


def _parts(config: Config, hosts: Sequence[RankHost], shape: ModelShape, division: Division) -> tuple[PartOfModel, ...]:
    """What each rank keeps, without activations."""
    per_weight = training_bytes_per_byte(config, shape)
    sizes = [rank_bytes(shape, division, rank) for rank in range(len(hosts))]
    total = sum(divided for divided, _ in sizes)
    return tuple(
        PartOfModel(
            kv_heads=division.kv_heads[rank],
            columns=(division.mlp_columns or division.expert_columns)[rank],
            share=divided / total,
            divided_bytes=divided,
            whole_bytes=whole,
            training_bytes=round(per_weight * (divided + whole)),
            memory_bytes=hosts[rank].memory_bytes,
        )
        for rank, (divided, whole) in enumerate(sizes)
    )


def _weights_within_memory(
    config: Config, shape: ModelShape, weights: list[float], parts: Sequence[PartOfModel], reserved: Sequence[float]
) -> list[float]:
    """The weights, changed where a part would not fit its host. Every rank's memory is known.

    reserved: bytes of each host that a part leaves free.

    Raises:
        UserError: all hosts together have too little.
    """
    per_weight, world_size = training_bytes_per_byte(config, shape), len(parts)
    memory_bytes = [part.memory_bytes or 0 for part in parts]
    total, whole = sum(part.divided_bytes for part in parts), parts[0].whole_bytes
    room = [
        ((1 - MEMORY_HEADROOM) * size - kept) / (1 + per_weight) - whole
        for size, kept in zip(memory_bytes, reserved, strict=True)
    ]
    limited = within_memory(weights, [max(0.0, space) / total for space in room])
    if limited is None:
        needed = (1 + per_weight) * (total + world_size * whole) + sum(reserved)
        trained = ", gradients and optimizer" if per_weight else ""
        pair = " and one pair's activations" if any(reserved) else ""
        raise UserError(
            f"strategy=sharded: {world_size} ranks need {needed / 1e9:.2f} GB together for weights{trained}{pair}, "
            f"but have {sum(memory_bytes) / 1e9:.2f} GB less "
            f"{MEMORY_HEADROOM:.0%} headroom; add a host, or take a quantised model with model.method=lora"
        )
    return limited


@dataclass(frozen=True)
class _Activations:
    """What micro-batches need beside every rank's part of the model."""

    config: Config
    hosts: Sequence[RankHost]
    devices: Sequence[Device]
    parts: Sequence[PartOfModel]
    division: Division
    model: MemoryModel

    def size_bytes(self, rank: int, pairs: int, checkpointing: bool) -> int:
        """Activations and adapters of a micro-batch."""
        part = self.parts[rank]
        weights = part.divided_bytes + part.whole_bytes
        shape = rank_shape(self.model.shape, self.division, rank)
        needed = self.model.of_part(shape, weights, pairs, self.devices[rank], checkpointing).total
        return max(0, needed - part.needed_bytes)

    def largest(self, checkpointing: bool) -> list[int]:
        """The most pairs of a micro-batch, one number a rank; 0 where one pair does not fit."""
        sizes = []
        for rank, part in enumerate(self.parts):
            most = min(DEFAULT_MICRO_BATCH_SIZE, self.model.most_pairs(self.devices[rank]))
            limit = part.memory_bytes
            room = None if limit is None else (1 - MEMORY_HEADROOM) * limit - part.needed_bytes
            needed = functools.partial(self.size_bytes, rank, checkpointing=checkpointing)
            sizes.append(largest_micro_batch(needed, room, most))
        return sizes

    def lacking_bytes(self, rank: int) -> float:
        """What is missing for one pair beside a rank's part, with gradient checkpointing where it may be turned on."""
        part, settings = self.parts[rank], self.config.model
        if part.memory_bytes is None:
            return 0.0
        checkpointing = self.model.training.checkpointing or settings.may_turn_on_checkpointing
        needed = part.needed_bytes + self.size_bytes(rank, 1, checkpointing)
        return max(0.0, needed - (1 - MEMORY_HEADROOM) * part.memory_bytes)

    def micro_batch_size(self) -> tuple[int, bool]:
        """Pairs of a micro-batch: as configured, else as fit every rank; and whether checkpointing is turned on.

        Raises:
            UserError: one pair does not fit.
        """
        settings, configured = self.config.model, self.config.plan.micro_batch_sizes
        checkpointing = self.model.training.checkpointing
        sizes = self.largest(checkpointing)
        turned_on = min(sizes) == 0 and settings.may_turn_on_checkpointing
        if turned_on:
            checkpointing, sizes = True, self.largest(True)
        if min(sizes) == 0 and not configured and self.config.plan.shares is None:
            rank = sizes.index(0)
            part = self.parts[rank]
            needed = part.needed_bytes + self.size_bytes(rank, 1, checkpointing)
            raise UserError(
                f"strategy=sharded: host {self.hosts[rank].name}: its part and one pair need "
                f"{needed / 1e9:.2f} GB by arithmetic, but it has {(part.memory_bytes or 0) / 1e9:.2f} GB "
                f"less {MEMORY_HEADROOM:.0%} headroom; add a host, or lower data.max_length"
            )
        return configured[0] if configured else max(1, min(sizes)), turned_on

    def added(self, pairs: int, turned_on: bool) -> tuple[PartOfModel, ...]:
        """The parts with the activations of such micro-batches. turned_on: gradient checkpointing, for their sake."""
        checkpointing = turned_on or self.model.training.checkpointing
        return tuple(
            replace(part, activation_bytes=self.size_bytes(rank, pairs, checkpointing))
            for rank, part in enumerate(self.parts)
        )


def with_memory(
    plan: ClusterPlan, memory_bytes: Sequence[int | None], planned_bytes: Callable[[int, int], int | None]
) -> ClusterPlan:
    """The plan with the memory that every rank's largest micro-batch needs and may use; warns where it needs more.

    planned_bytes: of (rank, pairs); None where nobody knows.
    """
    ranks, warnings = [], list(plan.warnings)
    for rank, limit in zip(plan.ranks, memory_bytes or [None] * len(plan.ranks), strict=True):
        planned = planned_bytes(rank.rank, max(rank.micro_batch_sizes)) if rank.micro_batch_sizes else None
        ranks.append(replace(rank, planned_bytes=planned, memory_bytes=limit))
        if planned and limit and planned > limit:
            warnings.append(
                f"rank {rank.rank} ({rank.host}): micro-batches of {max(rank.micro_batch_sizes)} pairs need "
                f"{planned / 1e9:.2f} GB of {limit / 1e9:.2f} GB; lower plan.micro_batch_sizes"
            )
    return replace(plan, ranks=tuple(ranks), warnings=tuple(warnings))


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
    curves: Sequence[BatchCurve],
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
