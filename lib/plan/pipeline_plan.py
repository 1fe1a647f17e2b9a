"""The plan of a pipelined run: consecutive blocks for each rank. Pure functions."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

from lib.config.schema import Config
from lib.errors import UserError
from lib.model.partition import ModelShape, apportion
from lib.plan.cluster_plan import ClusterPlan, RankPlan, Stage
from lib.plan.run_facts import RankHost
from lib.plan.shares import DEFAULT_MICRO_BATCH_SIZE, split_evenly_sized


def plan_pipelined(config: Config, hosts: Sequence[RankHost], shape: ModelShape) -> ClusterPlan:
    """Cuts a model between blocks: as plan.shares has it, else by memory, else equally.

    Raises:
        UserError: plan.shares does not fit the model or the world, or there are more ranks than blocks.
    """
    shares, world_size = config.plan.shares, len(hosts)
    if world_size > shape.blocks:
        raise UserError(
            f"strategy=pipelined: {world_size} ranks, but the model has only {shape.blocks} blocks; use fewer ranks"
        )
    if shares is not None and len(shares) != world_size:
        raise UserError(
            f"plan.shares {list(shares)} has {len(shares)} numbers, but there are {world_size} ranks; give one a rank"
        )
    if shares is not None and sum(shares) != shape.blocks:
        raise UserError(
            f"plan.shares {list(shares)} sum to {sum(shares)}, but the model has {shape.blocks} blocks; "
            "with strategy=pipelined they are each rank's blocks, make them equal"
        )
    weights = [float(host.memory_bytes or 0) for host in hosts]
    blocks = shares or apportion(shape.blocks, weights if all(weights) else [1.0] * world_size)
    size = (config.plan.micro_batch_sizes or (DEFAULT_MICRO_BATCH_SIZE,))[0]
    batch = config.train.global_batch_size
    stages = tuple(
        Stage(first, count, world_size - rank, rank < world_size - 1, 0, 0, None, hosts[rank].memory_bytes)
        for rank, (first, count) in enumerate(zip(accumulate(blocks, initial=0), blocks, strict=False))
    )
    return ClusterPlan(
        strategy="pipelined",
        global_batch_size=batch,
        ranks=tuple(
            RankPlan(rank, host.name, batch, split_evenly_sized(batch, size)) for rank, host in enumerate(hosts)
        ),
        sync_seconds=0.0,
        reason="blocks as plan.shares has them" if shares else "blocks by memory",
        curves=(None,) * world_size,
        stages=stages,
    )
