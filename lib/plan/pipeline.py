"""A model cut into pipeline stages: what its blocks cost on each host, and the plan of the best cut.

Times are those of lib/plan/speeds.py, memory is the formula's (lib/plan/memory.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise

import numpy as np

from lib.errors import UserError
from lib.plan.calibration import MEMORY_HEADROOM, Link
from lib.plan.cuts import Cut, CutCosts, CutMemory, Hop, Keeps, best_cut, cut_at, depths, most_blocks
from lib.plan.facts import PlanFacts
from lib.plan.memory import (
    MemoryModel,
    activation_bytes_of_block,
    block_weights,
    head_bytes,
    trained_bytes_per_parameter,
    trained_parameters,
)
from lib.plan.plan import ClusterPlan, Prediction, RankPlan, StagePlan, sum_of
from lib.plan.shares import DEFAULT_MICRO_BATCH_SIZE, check_count, split_evenly_sized
from lib.plan.speeds import BACKWARD, HostSpeeds
from lib.system.hardware import Device

SIZES = (1, 2, 3, 4, 6, 8)  # of micro-batches, in pairs, that are compared
DEEPER = (1, 2, 4)  # more micro-batches in flight, over links that a stage would wait for
WORTH_IT = 0.01  # of a step's time, that more micro-batches in flight have to save
ASSUMED_LINK = Link(backend="ring", latency_seconds=5e-4, bandwidth_bytes_per_second=1.1e8)  # where none is measured


def cut_costs(facts: PlanFacts, speeds: HostSpeeds, pairs: int) -> CutCosts:
    """What blocks cost for the global batch in micro-batches of so many pairs at most."""
    assert facts.memory is not None
    hosts, shape, settings = facts.hosts, speeds.shape, facts.settings
    ranks, micro_batches = range(len(hosts)), -(-facts.batch_size // pairs)
    mean, backward = facts.batch_size / micro_batches, BACKWARD[settings.model.method]
    rates = np.array([speeds.per_second(rank, pairs) for rank in ranks])
    of_blocks, of_head = np.array([speeds.factors(rank, mean) for rank in ranks]).T
    forward = _running_sum(speeds.block_operations(mean)[None] * (of_blocks / rates)[:, None])
    head = np.where(np.array(ranks) == len(hosts) - 1, speeds.head_operations(mean) * of_head / rates, 0.0)
    batch = facts.memory.rows.batch(pairs, facts.memory.training.shared_prompts)
    memory = CutMemory(
        **_memory(facts.memory, [host.device or "metal" for host in hosts], pairs),
        may_checkpoint=settings.may_checkpoint,
        must_checkpoint=bool(settings.model.gradient_checkpointing),
        input=batch.tokens * shape.hidden_size * facts.item_bytes,
        room=np.array([(1 - MEMORY_HEADROOM) * host.memory_bytes if host.memory_bytes else np.inf for host in hosts]),
    )
    hops = tuple(_hop(facts, rank, speeds.tokens(mean)[0] * _sent_bytes(facts)) for rank in ranks[:-1])
    in_flight = depths(len(hosts))
    return CutCosts(forward, head, backward, memory, hops, in_flight, micro_batches)


def _memory(memory: MemoryModel, devices: Sequence[Device], pairs: int) -> dict[str, np.ndarray]:
    """What blocks and ends take on each host, in bytes; as in CutMemory."""
    shape, training = memory.shape, memory.training
    batch = memory.rows.batch(pairs, training.shared_prompts)
    numbers = np.arange(shape.blocks)
    sparse = numbers >= shape.blocks - shape.expert_blocks
    per_trained = trained_bytes_per_parameter(shape, training)
    block_training = replace(training, blocks=1, adapts_embeddings=False)
    held = np.zeros(shape.blocks)
    for is_sparse in (False, True):
        weights = block_weights(shape, is_sparse) * shape.weight_bytes + 2 * shape.hidden_size * shape.other_bytes
        trained = trained_parameters(replace(shape, blocks=1, expert_blocks=int(is_sparse)), block_training)[0]
        is_trained = numbers >= shape.blocks - (training.blocks or shape.blocks)
        held = np.where(sparse == is_sparse, weights + trained * per_trained * is_trained, held)
    each = [
        {one: activation_bytes_of_block(shape, training, batch, device, bool(one)) for one in set(sparse.tolist())}
        for device in devices
    ]
    trains_tables = training.method == "full" and training.blocks is None
    ends, work = np.zeros(len(devices)), np.array([max(b.at_work for b in blocks.values()) for blocks in each])
    table = shape.vocabulary * shape.hidden_size * (shape.weight_bytes + per_trained * trains_tables)
    ends[[0, -1]] += table if len(devices) > 1 else 2 * table
    work[-1] += head_bytes(shape, training, batch, devices[-1])
    kept = np.array([[blocks[one].kept for one in sparse.tolist()] for blocks in each])
    return {
        "held": _running_sum(np.tile(held, (len(devices), 1))),
        "kept": _running_sum(kept),
        "inputs": _running_sum(np.array([[blocks[one].input for one in sparse.tolist()] for blocks in each])),
        "ends": ends,
        "work": work,
        "block": kept.max(axis=1),
    }


def _sent_bytes(facts: PlanFacts) -> float:
    """Of a token between two stages."""
    assert facts.memory is not None
    item = facts.item_bytes
    sent = {"bf16": 2, "int8": 1 + 4 / 256}.get(facts.settings.sync.compression, item)
    return facts.memory.shape.hidden_size * min(sent, item)


def _hop(facts: PlanFacts, rank: int, size_bytes: float) -> Hop:
    link = facts.link_between(rank)
    if link is None and facts.names[rank] == facts.names[rank + 1]:
        return Hop()
    link = link or ASSUMED_LINK
    return Hop(max(0.0, link.seconds(size_bytes) - link.latency_seconds), link.latency_seconds)


def _running_sum(by_block: np.ndarray) -> np.ndarray:
    """Of the first n blocks: [p, L] as [p, L + 1]."""
    return np.concatenate([np.zeros((len(by_block), 1)), by_block.cumsum(axis=1)], axis=1)


# ---- The plan


@dataclass(frozen=True)
class SizedCut:
    """Micro-batches, and the cut for them."""

    size: int  # pairs of a micro-batch
    costs: CutCosts
    cut: Cut


def plan_pipelined(facts: PlanFacts) -> ClusterPlan:
    """Cuts a model between blocks for the shortest step, with its prediction; plan.shares sets the cut.

    A run that is resumed keeps its cut; where its ranks took other times than planned, and another cut is shorter by
    plan.replan_threshold with these, it takes that one.

    Raises:
        UserError: settings that do not fit the world or the model, or too little memory for any cut.
    """
    speeds, names, batch = HostSpeeds.of(facts), facts.names, facts.batch_size
    blocks, before = _configured_blocks(facts, speeds.shape.blocks), facts.stages_before
    chosen, known = _choose(facts, speeds, blocks), speeds.are_known
    reason = "blocks as plan.shares has them" if blocks else f"blocks for the shortest step, {speeds.source}"
    if blocks is None and before is not None and (resumed := _as_measured_before(facts, speeds)) is not None:
        chosen, known = resumed, known or bool(before.step_seconds)
        is_kept = chosen.cut.blocks == before.blocks
        reason = "blocks as before" if is_kept else f"blocks moved from {list(before.blocks)} by measured steps"
    stages = _stages(facts, chosen, known)
    sizes = split_evenly_sized(batch, chosen.size)
    updates = [curve.step_overhead_seconds for curve in speeds.curves]
    update = max((o * b / speeds.shape.blocks for o, b in zip(updates, chosen.cut.blocks, strict=False)), default=0.0)
    prediction = Prediction(
        f"pipelined, {sum_of(chosen.cut.blocks)} blocks",
        tuple(names),
        chosen.cut.step_seconds + update if known else None,
        None,
        True,
        max(stage.needed_bytes for stage in stages),
        sum(stage.sent_bytes for stage in stages) / len(stages),
    )
    return ClusterPlan(
        strategy="pipelined",
        global_batch_size=batch,
        ranks=tuple(RankPlan(rank, name, batch, sizes, part=stages[rank]) for rank, name in enumerate(names)),
        sync_seconds=0.0,
        reason=reason,
        warnings=_warnings(facts, stages),
        predictions=(prediction,),
    )


def _configured_blocks(facts: PlanFacts, blocks: int) -> tuple[int, ...] | None:
    """plan.shares, where it is given.

    Raises:
        UserError: it does not fit the world or the model, or there are more ranks than blocks.
    """
    shares, ranks = facts.settings.plan.shares, len(facts.hosts)
    if ranks > blocks:
        raise UserError(f"strategy=pipelined: {ranks} ranks, but the model has only {blocks} blocks; use fewer ranks")
    if shares is None:
        return None
    check_count("plan.shares", shares, ranks)
    if sum(shares) != blocks:
        raise UserError(
            f"plan.shares {list(shares)} sum to {sum(shares)}, but the model has {blocks} blocks, which "
            "strategy=pipelined assigns; make them equal"
        )
    return shares


def _choose(facts: PlanFacts, speeds: HostSpeeds, blocks: tuple[int, ...] | None) -> SizedCut:
    """The micro-batch and the cut of the shortest step. blocks: of a given cut.

    Raises:
        UserError: no cut fits the hosts' memory.
    """
    configured = facts.settings.plan.micro_batch_sizes
    sizes = list(configured[:1]) if configured else _sizes(facts)
    choices = []
    for size in sizes:
        costs = cut_costs(facts, speeds, size)
        cut = cut_at(costs, blocks) if blocks else best_cut(costs)
        choices += [SizedCut(size, costs, cut)] if cut else []
    if not choices:
        raise UserError(_why_not(facts, speeds, min(sizes)))
    best = min(choices, key=lambda one: (not one.cut.fits, one.cut.step_seconds, one.size))
    for more in DEEPER if any(map(sum, best.costs.hops)) else ():
        costs = replace(best.costs, in_flight=depths(len(facts.hosts), more))
        cut = cut_at(costs, blocks) if blocks else best_cut(costs)
        # One more costs no time: it makes up for links that are slower, and passes that vary more, than was measured.
        enough = 1.0 if more == 1 else 1 - WORTH_IT
        if cut is not None and cut.fits and cut.step_seconds <= enough * best.cut.step_seconds:
            best = SizedCut(best.size, costs, cut)
    return best


def _sizes(facts: PlanFacts) -> list[int]:
    assert facts.memory is not None
    most = min(facts.memory.most_pairs(host.device or "metal") for host in facts.hosts)
    return [size for size in SIZES if size <= min(most, facts.batch_size, DEFAULT_MICRO_BATCH_SIZE)] or [1]


def _as_measured_before(facts: PlanFacts, speeds: HostSpeeds) -> SizedCut | None:
    """The cut of the run that is resumed, or a better one for hosts as fast as they were; None: no cut to keep."""
    before, settings = facts.stages_before, facts.settings.plan
    if before is None or len(before.blocks) != len(facts.hosts) or sum(before.blocks) != speeds.shape.blocks:
        return None
    same = _choose(facts, speeds, before.blocks)
    if not same.cut.fits:
        return None
    if len(before.step_seconds) != len(facts.hosts) or not settings.replan:
        return same
    passes = np.array(same.cut.forward_seconds) + np.array(same.cut.backward_seconds)
    costs = same.costs.slowed(np.array(before.step_seconds) / (same.costs.micro_batches * passes))
    now, best = cut_at(costs, before.blocks), best_cut(costs)
    if best is None or now.step_seconds <= best.step_seconds * (1 + settings.replan_threshold):
        best = now
    return SizedCut(same.size, costs, best)


def _why_not(facts: PlanFacts, speeds: HostSpeeds, size: int) -> str:
    """Which host holds how much, what is missing, and the remedy."""
    costs = cut_costs(facts, speeds, size)
    most = most_blocks(costs)
    memory = [(host.memory_bytes or 0) / 1e9 for host in facts.hosts]
    held = ", ".join(f"{n} {b} of {m:.2f} GB" for n, b, m in zip(facts.names, most, memory, strict=True))
    missing = float(costs.memory.held[-1, -1] - costs.memory.held[-1, sum(most)]) / (1 - MEMORY_HEADROOM) / 1e9
    smaller = "lower plan.micro_batch_sizes, " * (size > 1)
    smaller += "try model.gradient_checkpointing=true, " * (facts.settings.model.gradient_checkpointing is False)
    return (
        f"strategy=pipelined: of {speeds.shape.blocks} blocks the hosts hold {sum(most)} ({held}, each less "
        f"{MEMORY_HEADROOM:.0%} headroom) with micro-batches of {size} pair{'s' * (size > 1)}; {smaller}add "
        f"{missing:.2f} GB of memory with another host, or take a quantised model with model.method=lora"
    )


def _stages(facts: PlanFacts, chosen: SizedCut, known: bool) -> tuple[StagePlan, ...]:
    costs, cut = chosen.costs, chosen.cut
    sent = facts.tokens(facts.batch_size)[0] * _sent_bytes(facts)  # over one cut, in one direction
    stages = []
    for rank, (first, blocks) in enumerate(zip(accumulate(cut.blocks, initial=0), cut.blocks, strict=False)):
        held = float(costs.memory.held[rank, first + blocks] - costs.memory.held[rank, first] + costs.memory.ends[rank])
        stage = StagePlan(
            first_block=first,
            blocks=blocks,
            in_flight=costs.in_flight[rank],
            recomputes=cut.keeps[rank] == Keeps.INPUT,
            gradient_checkpointing=cut.keeps[rank] == Keeps.BLOCK_INPUTS,
            held_bytes=round(held),
            activation_bytes=round(cut.activation_bytes[rank] + costs.memory.work[rank]),
            memory_bytes=facts.hosts[rank].memory_bytes,
            sent_bytes=sent * ((rank > 0) + (rank < costs.hosts - 1)),
        )
        if known:
            idle = cut.idle_fraction(rank, costs.micro_batches)
            forward, backward = cut.forward_seconds[rank], cut.backward_seconds[rank]
            stage = replace(stage, forward_seconds=forward, backward_seconds=backward, idle_fraction=idle)
        stages.append(stage)
    return tuple(stages)


def _warnings(facts: PlanFacts, stages: Sequence[StagePlan]) -> tuple[str, ...]:
    warnings = []
    unknown = [
        f"{a} to {b}" for rank, (a, b) in enumerate(pairwise(facts.names)) if a != b and not facts.link_between(rank)
    ]
    if unknown:
        warnings.append(
            f"link {', '.join(dict.fromkeys(unknown))}: not calibrated, planned with "
            f"{ASSUMED_LINK.bandwidth_bytes_per_second / 1e6:.0f} MB/s and {ASSUMED_LINK.latency_seconds * 1e3:g} ms "
            "of latency (1 Gbit/s); make calibrate measures it"
        )
    for name, stage in zip(facts.names, stages, strict=True):
        if stage.memory_bytes and stage.needed_bytes > (1 - MEMORY_HEADROOM) * stage.memory_bytes:
            warnings.append(
                f"host {name}: its {stage.blocks} blocks need {stage.needed_bytes / 1e9:.2f} GB, "
                f"of {stage.memory_bytes / 1e9:.2f} GB" + "; leave plan.shares out" * bool(facts.settings.plan.shares)
            )
    return tuple(warnings)
