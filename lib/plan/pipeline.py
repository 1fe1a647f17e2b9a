"""A model cut into pipeline stages: what its blocks cost on each host, and the plan of the best cut.

Times are those of lib/plan/speeds.py, memory is the formula's (lib/plan/memory.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate, pairwise

import numpy as np

from lib.errors import UserError
from lib.plan.calibration import MEMORY_HEADROOM, Link
from lib.plan.cuts import Cut, CutCosts, Hop, Keeps, best_cut, cut_at, depths
from lib.plan.facts import PlanFacts
from lib.plan.memory import head_bytes
from lib.plan.plan import ClusterPlan, PartOfModel, Prediction, RankPlan, StagePlan, sum_of
from lib.plan.shares import DEFAULT_MICRO_BATCH_SIZE, check_count, split_evenly_sized
from lib.plan.speeds import BACKWARD, HostSpeeds

SIZES = (1, 2, 3, 4, 6, 8)  # of micro-batches, in pairs, that are compared
DEEPER = (1, 2, 4)  # more micro-batches in flight, over links that a stage would wait for
WORTH_IT = 0.01  # of a step's time, that more micro-batches in flight have to save
UNKNOWN_BYTES = 10**18  # of a host whose memory is not known: as much as is needed
ASSUMED_LINK = Link(backend="ring", latency_seconds=5e-4, bandwidth_bytes_per_second=1.1e8)  # where none is measured


def cut_costs(facts: PlanFacts, speeds: HostSpeeds, pairs: int, more_in_flight: int = 0) -> CutCosts:
    """What stages cost for the global batch in micro-batches of so many pairs at most. Blocks count as their mean."""
    hosts, model, ranks, memory = facts.hosts, facts.settings.model, len(facts.hosts), speeds.memory
    micro_batches, in_flight = -(-facts.batch_size // pairs), depths(ranks, more_in_flight)
    mean = facts.batch_size / micro_batches
    of_block, of_head = np.array([speeds.parts(rank, pairs) for rank in range(ranks)]).T * mean / pairs
    is_last = np.arange(ranks) == ranks - 1
    held, ends = memory.held_bytes(ranks)
    kept, inputs, work = np.array([memory.block_bytes(host.device or "metal", pairs) for host in hosts]).T
    batch = memory.rows.batch(pairs, memory.training.shared_prompts)
    work[-1] += head_bytes(memory.shape, memory.training, batch, hosts[-1].device or "metal")
    must, flying = bool(model.gradient_checkpointing), np.array(in_flight)
    message = batch.tokens * memory.shape.hidden_size * facts.item_bytes
    fixed = ends + work
    forbidden = [np.full(ranks, must), np.full(ranks, not (must or model.may_turn_on_checkpointing)), is_last | must]
    item = facts.item_bytes
    sent_item = min({"bf16": 2, "int8": 1 + 4 / 256}.get(facts.settings.sync.compression, item), item)
    sent = facts.tokens(pairs)[0] * mean / pairs * (memory.shape.hidden_size * sent_item)
    hops = []
    for rank in range(ranks - 1):
        link = facts.link_between(rank)
        if link is None and facts.names[rank] == facts.names[rank + 1]:
            hops.append(Hop())
            continue
        link = link or ASSUMED_LINK
        hops.append(Hop(max(0.0, link.seconds(sent) - link.latency_seconds), link.latency_seconds))
    return CutCosts(  # in the order of Keeps
        blocks=memory.shape.blocks,
        block_seconds=of_block,
        end_seconds=np.where(is_last, of_head, 0.0),
        backward=BACKWARD[model.method],
        block_bytes=held + np.array([flying * kept, flying * inputs, kept]),
        fixed_bytes=np.where(forbidden, np.inf, [fixed, fixed + kept, fixed + flying * message]),
        room=np.array([(1 - MEMORY_HEADROOM) * (host.memory_bytes or UNKNOWN_BYTES) for host in hosts]),
        hops=tuple(hops),
        in_flight=in_flight,
        micro_batches=micro_batches,
        pairs=pairs,
    )


# ---- The plan


def plan_pipelined(facts: PlanFacts) -> ClusterPlan:
    """Cuts a model between blocks for the shortest step, or as plan.shares says, with its prediction; or UserError."""
    speeds, names = HostSpeeds.of(facts), facts.names
    blocks = configured_blocks(facts.settings.plan.shares, len(names), speeds.memory.shape.blocks)
    cut, known = _choose(facts, speeds, blocks), speeds.are_known
    reason = "blocks as plan.shares has them" if blocks else f"blocks for the shortest step, {speeds.source}"
    plan = plan_of_parts(facts, "pipelined", _stages(facts, cut, known), cut.costs.pairs, reason)
    updates = [curve.step_overhead_seconds for curve in speeds.curves]
    parts = [o * b / speeds.memory.shape.blocks for o, b in zip(updates, cut.blocks, strict=False)]
    seconds = cut.step_seconds + max(parts, default=0.0) if known else None
    links = enumerate(pairwise(names))
    warnings = list(plan.warnings)
    if unknown := [f"{a} to {b}" for rank, (a, b) in links if a != b and not facts.link_between(rank)]:
        warnings.append(
            f"link {', '.join(dict.fromkeys(unknown))}: not calibrated, planned with 110 MB/s and 0.5 ms of latency "
            "(1 Gbit/s); make calibrate measures it"
        )
    largest = max(rank.planned_bytes or 0 for rank in plan.ranks)
    way = Prediction(f"pipelined, {sum_of(plan.blocks)} blocks", tuple(names), seconds, None, True, largest)
    return replace(plan, predictions=(way,), warnings=tuple(warnings))


def plan_of_parts(
    facts: PlanFacts, strategy: str, parts: Sequence[StagePlan | PartOfModel], size: int, reason: str
) -> ClusterPlan:
    """The plan of a divided model in micro-batches of `size` pairs; warns where a part does not fit its host."""
    batch, ranks, warnings = facts.batch_size, [], []
    for rank, (host, part) in enumerate(zip(facts.hosts, parts, strict=True)):
        needed, limit = part.held_bytes + part.activation_bytes, host.memory_bytes
        work = RankPlan(rank, host.name, batch, split_evenly_sized(batch, size), part=part)
        ranks.append(replace(work, planned_bytes=needed, memory_bytes=limit))
        if limit and needed > (1 - MEMORY_HEADROOM) * limit:
            warnings.append(f"host {host.name}: its part needs {needed / 1e9:.2f} GB, of {limit / 1e9:.2f} GB")
    return ClusterPlan(strategy, batch, tuple(ranks), 0.0, reason, tuple(warnings))


def configured_blocks(shares: Sequence[int] | None, ranks: int, blocks: int) -> tuple[int, ...] | None:
    """plan.shares as each rank's blocks; raises UserError where they do not fit the world or the model."""
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
    return tuple(shares)


def _choose(facts: PlanFacts, speeds: HostSpeeds, blocks: tuple[int, ...] | None) -> Cut:
    """The micro-batch and the cut of the shortest step. blocks: of a given cut."""

    def candidate(size: int, more: int = 0) -> Cut | None:
        costs = cut_costs(facts, speeds, size, more)
        return cut_at(costs, blocks) if blocks else best_cut(costs)

    configured = facts.settings.plan.micro_batch_sizes
    most = min(speeds.memory.most_pairs(host.device or "metal") for host in facts.hosts)
    most = min(most, facts.batch_size, DEFAULT_MICRO_BATCH_SIZE)
    sizes = list(configured[:1]) if configured else [size for size in SIZES if size <= most]
    choices = [choice for choice in map(candidate, sizes) if choice]
    if not choices:
        fitting = cut_costs(facts, speeds, min(sizes)).most.max(axis=0).astype(int).tolist()
        total, fits = speeds.memory.shape.blocks, sum(fitting)
        per_block = speeds.memory.held_bytes(1)[0] / (1 - MEMORY_HEADROOM) / 1e9
        hosts = zip(facts.hosts, fitting, strict=True)
        held = ", ".join(f"{host.name} {count} in {(host.memory_bytes or 0) / 1e9:.2f} GB" for host, count in hosts)
        raise UserError(
            f"strategy=pipelined: of {total} blocks the hosts hold {fits} ({held}, each less {MEMORY_HEADROOM:.0%} "
            f"headroom) in micro-batches of {min(sizes)}; lower plan.micro_batch_sizes, add "
            f"{max(total - fits, fitting.count(0)) * per_block:.2f} GB of memory with another host, or take a "
            "quantised model with model.method=lora"
        )
    best = min(choices, key=lambda choice: (not choice.fits, choice.step_seconds, choice.costs.pairs))
    for more in DEEPER if any(map(sum, best.costs.hops)) else ():
        deeper = candidate(best.costs.pairs, more)
        # One more costs no time: it makes up for links that are slower, and passes that vary more, than was measured.
        enough = 1.0 if more == 1 else 1 - WORTH_IT
        if deeper and deeper.fits and deeper.step_seconds <= enough * best.step_seconds:
            best = deeper
    return best


def _stages(facts: PlanFacts, cut: Cut, known: bool) -> list[StagePlan]:
    assert facts.memory is not None
    of_block, ends = facts.memory.held_bytes(len(facts.hosts))
    stages = []
    for rank, (first, blocks) in enumerate(zip(accumulate(cut.blocks, initial=0), cut.blocks, strict=False)):
        held, keeps = of_block * blocks + ends[rank], cut.keeps[rank]
        needed = cut.costs.block_bytes[keeps, rank] * blocks + cut.costs.fixed_bytes[keeps, rank]
        kept = keeps == Keeps.INPUT, keeps == Keeps.BLOCK_INPUTS
        stage = StagePlan(first, blocks, cut.costs.in_flight[rank], *kept, round(held), round(needed - held))
        if known:
            forward, backward = cut.forward_seconds[rank], cut.backward_seconds[rank]
            idle = 1 - cut.costs.micro_batches * (forward + backward) / cut.step_seconds if cut.step_seconds else 0.0
            stage = replace(stage, forward_seconds=forward, backward_seconds=backward, idle_fraction=idle)
        stages.append(stage)
    return stages
