"""A model cut into pipeline stages: what its blocks cost on each host, the best cut, and its plan.

One forward, one backward (PipeDream-Flush, arXiv:2006.09503): a stage runs forward until as many micro-batches are in
flight as it keeps, then one backward and one forward in turn, and at last the backwards that are left. A step's time
comes from replaying these orders: each operation starts as soon as its stage is free and its input has arrived.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import IntEnum
from itertools import accumulate, pairwise, permutations, zip_longest
from typing import NamedTuple

import numpy as np

from lib.errors import UserError
from lib.plan.calibration import MEMORY_HEADROOM
from lib.plan.facts import ASSUMED_LINK, BACKWARD, HostSpeeds, PlanFacts
from lib.plan.memory import head_bytes
from lib.plan.plan import ClusterPlan, PartOfModel, Prediction, RankPlan, StagePlan, sum_of
from lib.plan.shares import DEFAULT_MICRO_BATCH_SIZE, check_count, split_evenly_sized

SIZES = (1, 2, 3, 4, 6, 8)  # of micro-batches, in pairs, that are compared
DEEPER = (1, 2, 4)  # more micro-batches in flight, over links that a stage would wait for
WORTH_IT = 0.01  # of a step's time, that more micro-batches in flight have to save
REPLAYED = 16  # neighbours of a cut whose schedule is replayed, those whose slowest stage is fastest


class Operation(NamedTuple):
    """One pass of a stage over one micro-batch."""

    is_forward: bool
    micro_batch: int


class Hop(NamedTuple):
    """What a micro-batch's activations take from one stage to the next, and as long their gradients back."""

    seconds: float = 0.0  # that the link is busy, in one direction
    latency_seconds: float = 0.0  # until they arrive, beyond that


def operations(in_flight: int, micro_batches: int) -> list[Operation]:
    """What a stage does in a step, in order, with at most so many micro-batches gone forward and not yet backward."""
    ahead = min(in_flight - 1, micro_batches)
    forward = [Operation(True, index) for index in range(micro_batches)]
    backward = [Operation(False, index) for index in range(micro_batches)]
    pairs = zip_longest(forward[ahead:], backward)
    return forward[:ahead] + [operation for pair in pairs for operation in pair if operation]


def depths(stages: int, more: int = 0) -> tuple[int, ...]:
    """Micro-batches in flight of each stage: as many as stages are left, and `more` on all but the last."""
    return tuple(stages - stage + more * (stage < stages - 1) for stage in range(stages))


def step_seconds(
    forward: Sequence[float],
    backward: Sequence[float],
    hops: Sequence[Hop],
    in_flight: Sequence[int],
    micro_batches: int,
) -> float:
    """From the first forward to the last backward. Messages of a direction follow each other; a stage works meanwhile.
    forward, backward (of one micro-batch), in_flight (never more than the stage before): one a stage. hops: one a
    cut."""
    stages, free = len(forward), [0.0] * len(forward)
    orders = [deque(operations(depth, micro_batches)) for depth in in_flight]
    inputs = {(True, 0, index): 0.0 for index in range(micro_batches)}  # when the input of each pass arrives
    links: dict[tuple[int, int], float] = {}  # until when a link is busy, from stage to stage
    while any(orders):
        for stage, order in enumerate(orders):
            while order and (arrived := inputs.get((order[0].is_forward, stage, order[0].micro_batch))) is not None:
                is_forward, index = order.popleft()
                free[stage] = max(free[stage], arrived) + (forward if is_forward else backward)[stage]
                target = stage + 1 if is_forward else stage - 1
                if target == stages:
                    inputs[False, stage, index] = free[stage]
                elif target >= 0:
                    hop, link = hops[min(stage, target)], (stage, target)
                    links[link] = max(links.get(link, 0.0), free[stage]) + hop.seconds
                    inputs[is_forward, target, index] = links[link] + hop.latency_seconds
    return max(free)


class Keeps(IntEnum):
    """What a stage keeps of a micro-batch for its backward pass. All but the first cost another forward pass."""

    ACTIVATIONS = 0
    BLOCK_INPUTS = 1  # gradient checkpointing
    INPUT = 2  # of the stage alone: it computes all activations again, of one micro-batch at a time


@dataclass(frozen=True, eq=False)
class CutCosts:
    """What stages cost on each of p hosts, in their order, for micro-batches of one size."""

    blocks: int
    block_seconds: np.ndarray  # [p], of a block's forward pass
    end_seconds: np.ndarray  # [p], of a forward pass through what a host has beside blocks: the last one the head
    backward: float  # times a forward pass's time
    block_bytes: np.ndarray  # [3, p], by Keeps: of a block with its activations of all micro-batches in flight
    fixed_bytes: np.ndarray  # [3, p], of all else; inf: the host may not keep that
    room: np.ndarray  # [p], that may be planned for
    hops: tuple[Hop, ...]  # p - 1
    in_flight: tuple[int, ...]  # p
    micro_batches: int
    pairs: int = 0  # of a micro-batch

    @property
    def most(self) -> np.ndarray:
        """How many blocks fit each host at most: float64 [3, p], by Keeps."""
        return np.maximum(np.floor((self.room - self.fixed_bytes) / self.block_bytes + 1e-9), 0)


@dataclass(frozen=True)
class Cut:
    """Stages of one cut, one number a rank, and a step's time."""

    costs: CutCosts
    blocks: tuple[int, ...]
    keeps: tuple[Keeps, ...]  # for the backward pass: activations, where they fit
    forward_seconds: tuple[float, ...]  # of one micro-batch
    backward_seconds: tuple[float, ...]
    fits: bool  # every host's memory
    step_seconds: float


def best_cut(costs: CutCosts) -> Cut | None:
    """The cut with the shortest step among those that moving blocks leads to; None where no cut fits the hosts."""
    ranks = len(costs.in_flight)
    if ranks > costs.blocks or (most := costs.most.max(axis=0)).min() < 1 or most.sum() < costs.blocks:
        return None
    each, ends = (seconds * (1 + costs.backward) for seconds in (costs.block_seconds, costs.end_seconds))
    cuts = []
    for seconds in (each, np.ones(ranks)):
        blocks = np.ones(ranks, dtype=int)
        while blocks.sum() < costs.blocks:  # the next one to the stage that ends first with it
            blocks[np.argmin(np.where(blocks < most, ends + seconds * (blocks + 1), np.inf))] += 1
        cuts.append(_improved(cut_at(costs, blocks.tolist())))
    return min((cut for cut in cuts if cut.fits), key=lambda cut: cut.step_seconds, default=None)


def cut_at(costs: CutCosts, blocks: Sequence[int]) -> Cut:
    """A given cut, whether it fits or not."""
    forward, backward, keeps, fits = (array[0] for array in _stages_of(costs, np.array([blocks])))
    times = tuple(forward.tolist()), tuple(backward.tolist())
    seconds = step_seconds(*times, costs.hops, costs.in_flight, costs.micro_batches)
    return Cut(costs, tuple(map(int, blocks)), tuple(map(Keeps, keeps.tolist())), *times, bool(fits.all()), seconds)


def _stages_of(costs: CutCosts, blocks: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Forward and backward seconds, Keeps, and whether it fits, of every stage of some cuts. blocks: int [cuts, p]."""
    needed = costs.block_bytes[:, None] * blocks + costs.fixed_bytes[:, None]
    holds = needed <= costs.room * (1 + 1e-12)
    keeps = np.where(holds.any(axis=0), holds.argmax(axis=0), needed.argmin(axis=0))
    passes = blocks * costs.block_seconds
    forward = passes + costs.end_seconds
    return forward, costs.backward * forward + (keeps != Keeps.ACTIVATIONS) * passes, keeps, holds.any(axis=0)


def _improved(best: Cut) -> Cut:
    """The cut from which no move of a block to another stage shortens the replayed schedule."""
    unit, costs = np.eye(len(best.blocks), dtype=int), best.costs
    moves = np.array([to - of for to, of in permutations(unit, 2)])
    while True:
        cuts = np.array(best.blocks) + moves.reshape(-1, len(unit))
        forward, backward, _, fits = _stages_of(costs, cuts)
        both, possible = forward + backward, (fits & (cuts > 0)).all(axis=1)
        seconds = np.where(possible, both.sum(axis=1) + costs.micro_batches * both.max(axis=1), np.inf)  # nearly
        near = [cuts[index] for index in np.argsort(seconds, kind="stable")[:REPLAYED] if possible[index]]
        better = min((best, *(cut_at(costs, cut.tolist()) for cut in near)), key=lambda cut: cut.step_seconds)
        if better.step_seconds >= best.step_seconds * (1 - 1e-12):
            return best
        best = better


# ---- What stages cost, and the plan


def cut_costs(facts: PlanFacts, speeds: HostSpeeds, pairs: int, more_in_flight: int = 0) -> CutCosts:
    """What stages cost for the global batch in micro-batches of so many pairs at most. Blocks count as their mean."""
    hosts, model, ranks, memory = facts.hosts, facts.settings.model, len(facts.hosts), speeds.memory
    micro_batches, in_flight = -(-facts.batch_size // pairs), depths(ranks, more_in_flight)
    mean = facts.batch_size / micro_batches
    of_block, of_head = np.array([speeds.parts(rank, pairs) for rank in range(ranks)]).T * mean / pairs
    is_last = np.arange(ranks) == ranks - 1
    held, ends = memory.held_bytes(ranks)
    saved, inputs, work = np.array([memory.block_bytes(host.device, pairs) for host in hosts]).T
    batch = memory.rows.batch(pairs, memory.training.shared_prompts)
    work[-1] += head_bytes(memory.shape, memory.training, batch, hosts[-1].device)
    must, flying = bool(model.gradient_checkpointing), np.array(in_flight)
    message = batch.tokens * memory.shape.hidden_size * facts.item_bytes
    fixed = ends + work
    forbidden = [np.full(ranks, must), np.full(ranks, not (must or model.may_turn_on_checkpointing)), is_last | must]
    item = facts.item_bytes
    sent_item = min({"bf16": 2, "int8": 1 + 4 / 256}.get(facts.settings.sync.compression, item), item)
    sent = facts.tokens(pairs)[0] * mean / pairs * (memory.shape.hidden_size * sent_item)
    links = [facts.link_between(rank) for rank in range(ranks - 1)]
    passes = [(link.seconds(sent), link.latency_seconds) if link else (0.0, 0.0) for link in links]
    return CutCosts(  # in the order of Keeps
        blocks=memory.shape.blocks,
        block_seconds=of_block,
        end_seconds=np.where(is_last, of_head, 0.0),
        backward=BACKWARD[model.method],
        block_bytes=held + np.array([flying * saved, flying * inputs, saved]),
        fixed_bytes=np.where(forbidden, np.inf, [fixed, fixed + saved, fixed + flying * message]),
        room=np.array([host.room_bytes for host in hosts]),
        hops=tuple(Hop(max(0.0, seconds - latency), latency) for seconds, latency in passes),
        in_flight=in_flight,
        micro_batches=micro_batches,
        pairs=pairs,
    )


def plan_pipelined(facts: PlanFacts) -> ClusterPlan:
    """Cuts a model between blocks for the shortest step, or as plan.shares says, with its prediction; or UserError."""
    speeds, names = HostSpeeds.of(facts), facts.names
    blocks = configured_blocks(facts.settings.plan.shares, len(names), speeds.memory.shape.blocks)
    cut, measured = _choose(facts, speeds, blocks), speeds.are_measured
    reason = "blocks as plan.shares has them" if blocks else f"blocks for the shortest step, {speeds.source}"
    plan = plan_of_parts(facts, "pipelined", _stages(facts, cut, measured), cut.costs.pairs, reason)
    updates = [curve.step_overhead_seconds for curve in speeds.curves]
    parts = [o * b / speeds.memory.shape.blocks for o, b in zip(updates, cut.blocks, strict=False)]
    seconds = cut.step_seconds + max(parts, default=0.0) if measured else None
    warnings, pairs = list(plan.warnings), pairwise(names)
    unknown = [f"{a} to {b}" for rank, (a, b) in enumerate(pairs) if facts.link_between(rank) is ASSUMED_LINK]
    if unknown:
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
        needed, limit = part.needed_bytes, host.memory_bytes
        sizes = split_evenly_sized(batch, size)
        ranks.append(RankPlan(rank, host.name, batch, sizes, planned_bytes=needed, memory_bytes=limit, part=part))
        if limit and needed > host.room_bytes:
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
    most = min(speeds.memory.most_pairs(host.device) for host in facts.hosts)
    most = min(most, facts.batch_size, DEFAULT_MICRO_BATCH_SIZE)
    sizes = list(configured[:1]) if configured else [size for size in SIZES if size <= most]
    choices = [choice for choice in map(candidate, sizes) if choice]
    if not choices:
        fitting = cut_costs(facts, speeds, min(sizes)).most.max(axis=0).astype(int).tolist()
        total, per_block = speeds.memory.shape.blocks, speeds.memory.held_bytes(1)[0] / (1 - MEMORY_HEADROOM) / 1e9
        held = ", ".join(f"{name} {count}" for name, count in zip(facts.names, fitting, strict=True))
        raise UserError(
            f"strategy=pipelined: of {total} blocks the hosts hold {sum(fitting)} ({held}) in micro-batches of "
            f"{min(sizes)}; add {max(total - sum(fitting), fitting.count(0)) * per_block:.2f} GB of memory with "
            "another host, or take a quantised model with model.method=lora"
        )
    best = min(choices, key=lambda choice: (not choice.fits, choice.step_seconds, choice.costs.pairs))
    for more in DEEPER if any(map(sum, best.costs.hops)) else ():
        deeper = candidate(best.costs.pairs, more)
        # One more costs no time: it makes up for links that are slower, and passes that vary more, than was measured.
        enough = 1.0 if more == 1 else 1 - WORTH_IT
        if deeper and deeper.fits and deeper.step_seconds <= enough * best.step_seconds:
            best = deeper
    return best


def _stages(facts: PlanFacts, cut: Cut, measured: bool) -> list[StagePlan]:
    assert facts.memory is not None
    of_block, ends = facts.memory.held_bytes(len(facts.hosts))
    stages = []
    for rank, (first, blocks) in enumerate(zip(accumulate(cut.blocks, initial=0), cut.blocks, strict=False)):
        held, keeps = of_block * blocks + ends[rank], cut.keeps[rank]
        needed = cut.costs.block_bytes[keeps, rank] * blocks + cut.costs.fixed_bytes[keeps, rank]
        recomputes = keeps == Keeps.INPUT, keeps == Keeps.BLOCK_INPUTS
        stage = StagePlan(first, blocks, cut.costs.in_flight[rank], *recomputes, round(held), round(needed - held))
        if measured:
            forward, backward = cut.forward_seconds[rank], cut.backward_seconds[rank]
            idle = 1 - cut.costs.micro_batches * (forward + backward) / cut.step_seconds if cut.step_seconds else 0.0
            stage = replace(stage, forward_seconds=forward, backward_seconds=backward, idle_fraction=idle)
        stages.append(stage)
    return stages
