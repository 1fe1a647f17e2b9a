"""The plan of a pipelined run: each rank's blocks, the micro-batches of all, and what they are predicted to give."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate
from statistics import median

from lib.config.schema import Config
from lib.errors import UserError
from lib.plan.calibration import MEMORY_HEADROOM, BatchCurve, HostCalibration, nearest_curve
from lib.plan.cluster_plan import SHOWN_ALONE, ClusterPlan, Prediction, RankPlan, StagePlan
from lib.plan.pipeline_costs import ASSUMED_LINK, PipelineCosts, Speed, rates_of
from lib.plan.pipeline_cuts import Cut, CutCosts, Keeps, best_cut, cut_at, most_blocks, stage_bytes
from lib.plan.predictions import Cluster
from lib.plan.shares import DEFAULT_MICRO_BATCH_SIZE, split_evenly_sized
from lib.system.hardware import Device

SIZES = (1, 2, 3, 4, 6, 8)  # of micro-batches, in pairs, that are compared
DEEPER = (1, 2, 4)  # more micro-batches in flight, over links that a stage would wait for
WORTH_IT = 0.01  # of a step's time, that more micro-batches in flight have to save
SPEEDS: dict[Speed, str] = {
    "curves": "by the hosts' curves",
    "products": "by the hosts' matrix-product rates",
    "unknown": "as if all hosts were equally fast, since that is not measured (make calibrate)",
}


def plan_pipelined(config: Config, cluster: Cluster) -> ClusterPlan:
    """Cuts a model between blocks for the shortest step, with its prediction; plan.shares sets the cut.

    Raises:
        UserError: settings that do not fit the world or the model, or too little memory for any cut.
    """
    costs = pipeline_costs(config, cluster)
    blocks, reason, moved_at = _configured_blocks(config, costs), "blocks as plan.shares has them", None
    if blocks is None and (blocks := _blocks_as_left(config, costs)) is not None:
        moved_at = cluster.run.moved_at
        reason = f"blocks as they were moved after step {moved_at}"
    size, more_in_flight, cut = _choose(config, costs, blocks)
    at = costs.at(size, config.train.global_batch_size, more_in_flight)
    stages = _stages(costs, at, cut, size, config.train.global_batch_size)
    if blocks is None:
        reason = f"blocks for the shortest step, {SPEEDS[costs.speed]}"
    batch, hosts = config.train.global_batch_size, cluster.names
    plan = ClusterPlan(
        strategy="pipelined",
        global_batch_size=batch,
        ranks=tuple(RankPlan(rank, name, batch, split_evenly_sized(batch, size)) for rank, name in enumerate(hosts)),
        sync_seconds=0.0,
        reason=reason,
        warnings=tuple(_warnings(config, costs, stages)),
        curves=(None,) * len(hosts),
        stages=stages,
        pipeline_costs=costs,
        cut_costs=at,
        moved_at=moved_at,
    )
    return replace(plan, predictions=(_prediction(costs, plan, cut),))


def with_cut(plan: ClusterPlan, blocks: Sequence[int], at: CutCosts) -> ClusterPlan:
    """The plan of a pipeline with other blocks for each rank, at what blocks were seen to cost."""
    assert plan.pipeline_costs is not None
    costs, cut, size = plan.pipeline_costs, cut_at(at, blocks), max(plan.ranks[0].micro_batch_sizes)
    stages = _stages(costs, at, cut, size, plan.global_batch_size, is_measured=True)
    plan = replace(plan, stages=stages, warnings=(), divided_instead="")
    return replace(plan, predictions=(_prediction(costs, plan, cut, is_measured=True),))


def pipeline_costs(config: Config, cluster: Cluster) -> PipelineCosts:
    """What blocks cost on the hosts of a run."""
    run, hosts = cluster.run, cluster.hosts
    assert run.block_shape is not None
    curves = [_of_this_model(cluster, calibration) for calibration in cluster.calibrations]
    costs = PipelineCosts(
        shape=run.block_shape,
        method=config.model.method,
        hosts=hosts,
        rates=(),
        speed="unknown",
        run=run,
        link_of=cluster.link_between,
        may_checkpoint=bool(config.model.gradient_checkpointing) or config.model.may_turn_on_checkpointing,
        must_checkpoint=bool(config.model.gradient_checkpointing),
    )
    sent = {"none": costs.number_bytes, "bf16": 2, "int8": 1 + 4 / 256, "topk": costs.number_bytes}
    factor = min(1.0, sent[config.sync.compression] / costs.number_bytes)
    rates, speed = rates_of(
        lambda pairs: costs.whole_operations(pairs, run.key.gradient_checkpointing),
        curves,
        _product_rates(cluster),
        [host.device for host in hosts],
        costs.tokens,
    )
    updates = [curve.step_overhead_seconds for curve in curves if curve] if speed == "curves" else []
    outside = [curve.outside_blocks if curve else None for curve in curves] if speed == "curves" else []
    return replace(
        costs,
        rates=rates,
        speed=speed,
        activation_factor=factor,
        whole_update_seconds=updates,
        outside_blocks=known_or_alike(outside, [host.device for host in hosts]),
    )


def known_or_alike(shares: Sequence[float | None], devices: Sequence[Device | None]) -> list[float | None]:
    """What was measured on each host; else the median of those of the same kind of device; None where there is none.

    A share of a time depends on programs, which are the same there, more than on how fast a host is.
    """
    alike: dict[Device | None, list[float]] = {}
    for share, device in zip(shares, devices, strict=False):
        if share is not None:
            alike.setdefault(device, []).append(share)
    return [
        median(alike[device]) if share is None and device in alike else share
        for share, device in zip(shares, devices, strict=False)
    ]


def _of_this_model(cluster: Cluster, calibration: HostCalibration | None) -> BatchCurve | None:
    """A curve of the run's model, measured on this host or estimated from another one's."""
    key = cluster.run.key
    curve = nearest_curve(calibration.curves, key) if calibration else None
    return curve and curve.at_length(key.sequence_length)


def _product_rates(cluster: Cluster) -> list[float | None]:
    """Each host's GFLOP/s in matrix products: of all as calibrated, or as measured now; else as known or published."""
    calibrated = [one.gflops if one else None for one in cluster.calibrations]
    measured = [host.gflops for host in cluster.hosts]
    if all(calibrated):
        return calibrated
    if all(measured):
        return measured
    published = {one.machine.device_name: one.gflops for one in cluster.run.published}
    return [
        one or two or published.get(host.device_name or "")
        for one, two, host in zip(calibrated, measured, cluster.hosts, strict=True)
    ]


def _configured_blocks(config: Config, costs: PipelineCosts) -> tuple[int, ...] | None:
    """plan.shares, where it is given.

    Raises:
        UserError: it does not fit the world or the model, or there are more ranks than blocks.
    """
    shares, ranks, blocks = config.plan.shares, len(costs.hosts), costs.shape.blocks
    if ranks > blocks:
        raise UserError(f"strategy=pipelined: {ranks} ranks, but the model has only {blocks} blocks; use fewer ranks")
    if shares is not None and len(shares) != ranks:
        raise UserError(
            f"plan.shares {list(shares)} has {len(shares)} numbers, but there are {ranks} ranks; give one a rank"
        )
    if shares is not None and sum(shares) != blocks:
        raise UserError(
            f"plan.shares {list(shares)} sum to {sum(shares)}, but the model has {blocks} blocks, which "
            "strategy=pipelined assigns; make them equal"
        )
    return shares


def _blocks_as_left(config: Config, costs: PipelineCosts) -> tuple[int, ...] | None:
    """Those of a run that goes on, if its cut had moved and still fits the hosts' memory."""
    blocks = costs.run.left_blocks
    if len(blocks) != len(costs.hosts) or sum(blocks) != costs.shape.blocks or not all(blocks):
        return None
    return blocks if _choose(config, costs, blocks)[2].fits else None


# ---- Micro-batches, and the cut for them


def _choose(config: Config, costs: PipelineCosts, blocks: tuple[int, ...] | None) -> tuple[int, int, Cut]:
    """Pairs of a micro-batch, how many more of them are in flight, and the cut: those of the shortest step.

    Raises:
        UserError: no cut fits the hosts' memory.
    """
    configured, batch = config.plan.micro_batch_sizes, config.train.global_batch_size
    sizes = configured[:1] if configured else _sizes(costs, batch)
    found = [(cut, size) for size in sizes if (cut := _cut(costs.at(size, batch), blocks)) is not None]
    if not found:
        raise UserError(_why_not(config, costs, min(sizes)))
    best, size = min(found, key=lambda one: (not one[0].fits, one[0].step_seconds, one[1]))
    more_in_flight = 0
    for more in DEEPER if any(map(sum, costs.at(size, batch).hops)) else ():
        cut = _cut(costs.at(size, batch, more), blocks)
        # One more costs no time: it makes up for links that are slower, and passes that vary more, than was measured.
        enough = 1.0 if more == 1 else 1 - WORTH_IT
        if cut is not None and cut.fits and cut.step_seconds <= enough * best.step_seconds:
            best, more_in_flight = cut, more
    return size, more_in_flight, best


def _cut(at: CutCosts, blocks: tuple[int, ...] | None) -> Cut | None:
    """The best one, or the configured one, whether it fits or not."""
    return cut_at(at, blocks) if blocks else best_cut(at)


def _sizes(costs: PipelineCosts, batch: int) -> list[int]:
    model = costs.run.memory_model
    most = min((model.most_pairs(host.device) for host in costs.hosts if model and host.device), default=batch)
    return [size for size in SIZES if size <= min(most, batch, DEFAULT_MICRO_BATCH_SIZE)] or [1]


def _why_not(config: Config, costs: PipelineCosts, size: int) -> str:
    """Which host holds how much, what is missing, and the smallest remedy."""
    at = costs.at(size, config.train.global_batch_size)
    most, blocks, names = most_blocks(at), costs.shape.blocks, [host.name for host in costs.hosts]
    pair = f"{size} pair{'s' * (size > 1)}"
    if 0 in most:
        rank = most.index(0)
        first = sum(most[:rank])
        needed = _needed_bytes(costs, at, rank, first, 1)
        ends = " with the embedding" * (rank == 0) + " with norm and head" * (rank == len(most) - 1)
        return (
            f"strategy=pipelined: host {names[rank]}: one block{ends} and micro-batches of {pair} need "
            f"{needed / 1e9:.2f} GB, but it has {_memory_of(costs, rank) / 1e9:.2f} GB less {MEMORY_HEADROOM:.0%} "
            f"headroom; {_smaller(config, size)}leave the host out, or put one with more memory at its place"
        )
    missing = blocks - sum(most)
    held = ", ".join(
        f"{name} {count} of {_memory_of(costs, rank) / 1e9:.2f} GB"
        for rank, (name, count) in enumerate(zip(names, most, strict=True))
    )
    more = float(at.held_bytes[-1, -1] - at.held_bytes[-1, blocks - missing])
    return (
        f"strategy=pipelined: of {blocks} blocks the hosts hold {sum(most)} ({held}, each less {MEMORY_HEADROOM:.0%} "
        f"headroom) with micro-batches of {pair}; {_smaller(config, size)}add {more / (1 - MEMORY_HEADROOM) / 1e9:.2f} "
        "GB of memory with another host, or take a quantised model with model.method=lora"
    )


def _smaller(config: Config, size: int) -> str:
    """The remedies that cost no machine."""
    return "lower plan.micro_batch_sizes, " * (size > 1) + "try model.gradient_checkpointing=true, " * (
        config.model.gradient_checkpointing is False
    )


def _memory_of(costs: PipelineCosts, rank: int) -> float:
    return float(costs.hosts[rank].memory_bytes or 0)


def _needed_bytes(costs: PipelineCosts, at: CutCosts, rank: int, first: int, blocks: int) -> float:
    """What a stage takes at least, whatever it keeps of a micro-batch."""
    held = float(at.held_bytes[rank, first + blocks] - at.held_bytes[rank, first] + at.end_bytes[rank])
    return held + stage_bytes(at, rank, first, blocks)


# ---- What the plan says


def _stages(
    costs: PipelineCosts, at: CutCosts, cut: Cut, size: int, batch_size: int, is_measured: bool = False
) -> tuple[StagePlan, ...]:
    stages, known = [], is_measured or costs.speed != "unknown"
    has_activations = costs.run.memory_model is not None and all(host.device for host in costs.hosts)
    sent = at.micro_batches * costs.message_bytes(batch_size / at.micro_batches)  # over one cut, in one direction
    for rank, (first, blocks) in enumerate(zip(accumulate(cut.blocks, initial=0), cut.blocks, strict=False)):
        weights = costs.weight_bytes(first, blocks)
        trained = costs.trained_bytes(rank, first, blocks, size)
        held = float(at.held_bytes[rank, first + blocks] - at.held_bytes[rank, first] + at.end_bytes[rank])
        neighbours = (rank > 0) + (rank < at.hosts - 1)
        stages.append(
            StagePlan(
                first_block=first,
                blocks=blocks,
                in_flight=at.in_flight[rank],
                recomputes=cut.keeps[rank] == Keeps.INPUT,
                gradient_checkpointing=cut.keeps[rank] == Keeps.BLOCK_INPUTS,
                weight_bytes=round(weights),
                training_bytes=round(trained),
                activation_bytes=round(held - weights - trained + cut.activation_bytes[rank])
                if has_activations
                else None,
                memory_bytes=costs.hosts[rank].memory_bytes,
                forward_seconds=cut.forward_seconds[rank] if known else None,
                backward_seconds=cut.backward_seconds[rank] if known else None,
                idle_fraction=cut.idle_fraction(rank, at.micro_batches) if known else None,
                sent_bytes=sent * neighbours,
            )
        )
    return tuple(stages)


def _prediction(costs: PipelineCosts, plan: ClusterPlan, cut: Cut, is_measured: bool = False) -> Prediction:
    known = is_measured or costs.speed != "unknown"
    cuts = " + ".join(map(str, cut.blocks[:SHOWN_ALONE])) + " + ..." * (len(cut.blocks) > SHOWN_ALONE)
    sent = [stage.sent_bytes or 0.0 for stage in plan.stages]
    return Prediction(
        f"pipelined, {cuts} blocks",
        tuple(rank.host for rank in plan.ranks),
        cut.step_seconds + costs.update_seconds(cut.blocks) if known else None,
        None,
        True,
        max(stage.needed_bytes for stage in plan.stages),
        sum(sent) / len(sent),
    )


def _warnings(config: Config, costs: PipelineCosts, stages: Sequence[StagePlan]) -> list[str]:
    warnings = []
    names = [host.name for host in costs.hosts]
    unknown = [f"{names[rank]} to {names[rank + 1]}" for rank in costs.assumed_links]
    if unknown:
        warnings.append(
            f"link {', '.join(dict.fromkeys(unknown))}: not calibrated, taken to carry "
            f"{ASSUMED_LINK.bandwidth_bytes_per_second / 1e6:.0f} MB/s with {ASSUMED_LINK.latency_seconds * 1e3:g} ms "
            "of latency (1 Gbit/s); make calibrate measures it"
        )
    for name, stage in zip(names, stages, strict=True):
        if stage.memory_bytes and stage.needed_bytes > (1 - MEMORY_HEADROOM) * stage.memory_bytes:
            warnings.append(
                f"host {name}: its {stage.blocks} blocks need {stage.needed_bytes / 1e9:.2f} GB, "
                f"of {stage.memory_bytes / 1e9:.2f} GB" + "; leave plan.shares out" * (config.plan.shares is not None)
            )
    return warnings
