"""A global batch divided among ranks, or a model: as configured, else as measured, else by memory. Pure functions."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from lib.config.schema import Config
from lib.errors import UserError
from lib.model.partition import Division, ModelShape, divide, rank_bytes
from lib.plan.balance import (
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
from lib.plan.cluster_plan import ClusterPlan, PartOfModel, RankPlan, training_bytes_per_byte
from lib.plan.curves import MEMORY_HEADROOM, BatchCurve
from lib.plan.memory import Model, largest_micro_batch, rank_shape
from lib.plan.step_arrays import Backend

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
    unknown = list(dict.fromkeys(host for host, curve in zip(hosts, curves, strict=True) if curve is None))
    known = [curve for curve in curves if curve is not None]

    if shares is not None:
        check_shares(shares, global_batch_size, world_size)
        reason = "shares as plan.shares has them"
    elif world_size == 1:
        shares, reason = [global_batch_size], "one rank does all"
    elif unknown and speeds is not None:
        shares = distribute_work(global_batch_size, speeds)
        reason = (
            f"shares in proportion to the hosts' matrix-product rates, as no calibration is of {listed(unknown)}; "
            "the first steps correct them, make calibrate measures the hosts"
        )
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
            batches = split_evenly_sized(share, default_sizes[rank] if default_sizes else DEFAULT_MICRO_BATCH_SIZE)
        else:
            key = (*curve_identity(curve), share)
            if key not in batches_of:
                batches_of[key] = fastest_micro_batches(curve, share)
            batches = batches_of[key]
        if curve is not None and batches and max(batches) > curve.max_batch_size:
            warnings.append(
                f"rank {rank} ({host}): micro-batches of {max(batches)} pairs, "
                f"but at most {curve.max_batch_size} are known to fit"
            )
        ranks.append(
            RankPlan(
                rank=rank,
                host=host,
                share=int(share),
                micro_batch_sizes=batches,
                predicted_compute_seconds=float(curve.seconds(np.array(batches)).sum()) if curve else None,
                solo_pairs_per_second=solo_pairs_per_second(curve) if curve else None,
            )
        )
    if min(shares) == 0:
        idle = listed([f"{plan.rank} ({plan.host})" for plan in ranks if plan.share == 0])
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
    shape: ModelShape,
    memory_bytes: Sequence[int | None],
    gflops: Sequence[float | None],
    model: Model | None = None,
    devices: Sequence[Backend] | None = None,
) -> ClusterPlan:
    """Divides a model among ranks: as plan.shares weighs them, else by speed, else by memory, else equally.

    Nobody gets more than fits, less the headroom that activations need.

    Args:
        hosts, memory_bytes, gflops: one a rank, in the order of ranks; None where it is not known.
        model, devices: for the activations, where they are known; devices: one a rank.

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
        weights, reason = [float(rate or 0) for rate in gflops], "divided by the hosts' matmul rates"
    elif all(memory_bytes):
        weights, reason = [float(size or 0) for size in memory_bytes], "divided by memory: no calibration of every host"
    else:
        weights, reason = [1.0] * world_size, "divided equally: neither speed nor memory is known of every host"

    per_weight = training_bytes_per_byte(config, shape)

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
    checkpointed = False
    if model and devices:
        parts, size, checkpointed = _with_activations(config, hosts, parts, division, model, devices)
        if checkpointed:
            warnings.append(
                "gradient checkpointing is turned on: one pair's activations do not fit beside the parts without"
            )
    return ClusterPlan(
        strategy="sharded",
        global_batch_size=batch,
        ranks=tuple(RankPlan(rank, host, batch, split_evenly_sized(batch, size)) for rank, host in enumerate(hosts)),
        sync_seconds=0.0,
        reason=reason,
        warnings=tuple(warnings),
        curves=(None,) * world_size,
        division=division,
        parts=parts,
        gradient_checkpointing=checkpointed,
    )


def _with_activations(
    config: Config,
    hosts: Sequence[str],
    parts: Sequence[PartOfModel],
    division: Division,
    model: Model,
    devices: Sequence[Backend],
) -> tuple[tuple[PartOfModel, ...], int, bool]:
    """The parts with what a micro-batch takes besides, its pairs (as configured, else as many as fit every rank), and
    whether gradient checkpointing had to be turned on.

    Raises:
        UserError: one pair does not fit.
    """

    def besides(rank: int, pairs: int, checkpointing: bool) -> int:
        part = parts[rank]
        weights = part.divided_bytes + part.whole_bytes
        shape = rank_shape(model.shape, division, rank)
        return max(0, model.of_part(shape, weights, pairs, devices[rank], checkpointing).total - part.needed_bytes)

    def room(rank: int) -> float | None:
        size = parts[rank].memory_bytes
        return None if size is None else (1 - MEMORY_HEADROOM) * size - parts[rank].needed_bytes

    def largest(rank: int, checkpointing: bool) -> int:
        most = min(DEFAULT_MICRO_BATCH_SIZE, model.most_pairs(devices[rank]))
        return largest_micro_batch(lambda pairs: besides(rank, pairs, checkpointing), room(rank), most)

    configured, on = config.plan.micro_batch_sizes, model.training.checkpointing
    sizes = [largest(rank, on) for rank in range(len(parts))]
    turned_on = min(sizes) == 0 and config.model.gradient_checkpointing is None and not config.model.dropout
    if turned_on:
        on, sizes = True, [largest(rank, True) for rank in range(len(parts))]
    if min(sizes) == 0 and not configured and config.plan.shares is None:
        rank = sizes.index(0)
        part = parts[rank]
        raise UserError(
            f"strategy=sharded: host {hosts[rank]}: its part and one pair need "
            f"{(part.needed_bytes + besides(rank, 1, on)) / 1e9:.2f} GB by arithmetic, but it has "
            f"{(part.memory_bytes or 0) / 1e9:.2f} GB less {MEMORY_HEADROOM:.0%} headroom; add a host, or lower data.max_length"
        )
    size = configured[0] if configured else max(1, min(sizes))
    return tuple(replace(p, activation_bytes=besides(r, size, on)) for r, p in enumerate(parts)), size, turned_on


def with_memory(
    plan: ClusterPlan, memory_bytes: Sequence[int | None], planned_bytes: Callable[[int, int], int | None]
) -> ClusterPlan:
    """The plan with what every rank's largest micro-batch needs beside what the rank may use; warns where that is more.

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
