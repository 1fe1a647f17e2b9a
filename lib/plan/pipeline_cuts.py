"""Where a model is cut into stages: the cut whose step takes least time, of those that every host's memory holds.

Ranks keep their order, each takes consecutive blocks. All costs are sums over blocks, so that a cut is looked at in a
few additions: the best by the schedule's bound is found by moving blocks between stages, then the schedule itself
(lib/plan/pipeline_schedule.py) chooses among its neighbours. Pure functions.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import IntEnum
from itertools import pairwise

import numpy as np

from lib.plan.pipeline_schedule import Hop, bound_seconds, step_seconds

STARTS = (1.0, 1.03, 1.1, 1.3, 2.0, np.inf)  # times the least longest stage: how long a stage may be, at the start
PLAYED = 16  # neighbours of a cut whose schedule is played, those with the lowest bounds
PLAYED_WHOLE = 256  # micro-batches x stages up to which all of a schedule is played
STEADY = (
    3,
    4,
)  # times the stages: of longer ones the micro-batches up to here; beyond, each takes what these last took


@dataclass(frozen=True, eq=False)
class CutCosts:
    """What blocks cost on each host, for micro-batches of one size: p hosts in their order, L blocks.

    Arrays over blocks are running sums, float64 [p, L + 1]: what the first n blocks cost there. Those of ends, [p], are
    of what a host has beside blocks: the first one the embedding, the last one the norm and the head.
    """

    forward_seconds: np.ndarray
    backward_seconds: np.ndarray
    held_bytes: np.ndarray  # weights, adapters, gradients, optimizer
    kept_bytes: np.ndarray  # activations that the backward pass of one micro-batch reads
    inputs_bytes: np.ndarray  # those of them that gradient checkpointing keeps: each block's input
    end_forward_seconds: np.ndarray
    end_backward_seconds: np.ndarray
    end_bytes: np.ndarray  # and what a micro-batch takes besides while it is at work
    block_bytes: np.ndarray  # [p], that gradient checkpointing takes besides: all of one block
    may_checkpoint: bool
    must_checkpoint: bool
    input_bytes: float  # of one micro-batch, between two stages
    room_bytes: np.ndarray  # [p], that may be planned for; inf where it is not known
    hops: tuple[Hop, ...]  # p - 1
    in_flight: tuple[int, ...]  # p
    micro_batches: int

    @property
    def hosts(self) -> int:
        return len(self.room_bytes)

    @property
    def blocks(self) -> int:
        return self.held_bytes.shape[1] - 1


class Keeps(IntEnum):
    """What a stage keeps of a micro-batch for its backward pass. All but the first cost another forward pass."""

    ACTIVATIONS = 0
    BLOCK_INPUTS = 1  # gradient checkpointing
    INPUT = 2  # of the stage alone: it makes all activations again, of one micro-batch at a time


@dataclass(frozen=True)
class Cut:
    """Stages of one cut, one number a rank, and a step's time."""

    blocks: tuple[int, ...]
    keeps: tuple[Keeps, ...]  # for the backward pass: activations, where they fit
    forward_seconds: tuple[float, ...]  # of one micro-batch
    backward_seconds: tuple[float, ...]
    activation_bytes: tuple[float, ...]  # of all micro-batches in flight
    fits: bool  # every host's memory
    step_seconds: float
    bound_seconds: float  # what the schedule takes at most, nearly

    def idle_fraction(self, rank: int, micro_batches: int) -> float:
        """Part of a step in which a stage has nothing to do: the bubble, and its waiting for slower ones."""
        busy = micro_batches * (self.forward_seconds[rank] + self.backward_seconds[rank])
        return 1 - busy / self.step_seconds if self.step_seconds else 0.0


@dataclass(frozen=True, eq=False)
class _Stages:
    """Many cuts at once: all arrays are [cuts, p]."""

    forward: np.ndarray
    backward: np.ndarray
    keeps: np.ndarray
    activation_bytes: np.ndarray
    fits: np.ndarray  # bool


def best_cut(costs: CutCosts) -> Cut | None:
    """The cut with the shortest step; None where no cut fits the hosts."""
    starts = _starts(costs)
    if not starts:
        return None
    found = {_descend(costs, start) for start in starts}
    nearest = sorted(found, key=lambda blocks: (_bounds(costs, [blocks])[0], blocks))[:2]
    return min((_polished(costs, blocks) for blocks in nearest), key=lambda cut: cut.step_seconds)


def cut_at(costs: CutCosts, blocks: Sequence[int]) -> Cut:
    """A given cut, whether it fits or not."""
    stages = _stages(costs, np.array([blocks]))
    forward, backward = stages.forward[0].tolist(), stages.backward[0].tolist()
    schedule = (forward, backward, costs.hops, costs.in_flight, costs.micro_batches)
    return Cut(
        tuple(map(int, blocks)),
        tuple(map(Keeps, stages.keeps[0].tolist())),
        tuple(forward),
        tuple(backward),
        tuple(stages.activation_bytes[0].tolist()),
        bool(stages.fits.all()),
        step_seconds(*schedule),
        bound_seconds(*schedule),
    )


def most_blocks(costs: CutCosts) -> list[int]:
    """How many blocks each host holds at most, the hosts before it filled up; all of them less than L: no cut fits."""
    reached = [0, *_filled(costs, np.inf)]
    return [int(end - start) for start, end in pairwise(reached)]


def stage_bytes(costs: CutCosts, rank: int, first_block: int, blocks: int) -> float:
    """The fewest bytes of micro-batches in flight with which a host can hold these blocks."""
    without_room = replace(costs, room_bytes=np.full(costs.hosts, -np.inf))
    spans = _spans(without_room, np.array([rank]), np.array([first_block]), np.array([first_block + blocks]))
    return float(spans.activation_bytes[0])


# ---- Many cuts at a time


def _stages(costs: CutCosts, blocks: np.ndarray) -> _Stages:
    """What the stages of some cuts cost. blocks: int [cuts, p]."""
    ends = blocks.cumsum(axis=1)
    return _spans(costs, np.arange(costs.hosts), ends - blocks, ends)


def _spans(costs: CutCosts, ranks: np.ndarray, starts: np.ndarray, ends: np.ndarray) -> _Stages:
    """What blocks [start, end) cost on the hosts of some ranks; the arguments' shapes are broadcast."""

    def of(sums: np.ndarray) -> np.ndarray:
        spans: np.ndarray = sums[ranks, ends] - sums[ranks, starts]
        return spans

    forward, backward = of(costs.forward_seconds), of(costs.backward_seconds)
    room = costs.room_bytes[ranks] - of(costs.held_bytes) - costs.end_bytes[ranks]
    kept, in_flight = of(costs.kept_bytes), np.array(costs.in_flight)[ranks]
    needed = np.array(  # in the order of Keeps
        np.broadcast_arrays(
            np.where(costs.must_checkpoint, np.inf, in_flight * kept),
            np.where(costs.may_checkpoint, in_flight * of(costs.inputs_bytes) + costs.block_bytes[ranks], np.inf),
            np.where(costs.must_checkpoint | (ranks == costs.hosts - 1), np.inf, in_flight * costs.input_bytes + kept),
        )
    )
    holds = np.isfinite(needed[Keeps.ACTIVATIONS]) & (needed[Keeps.ACTIVATIONS] <= room)
    keeps = np.where(holds, Keeps.ACTIVATIONS, needed.argmin(axis=0))
    activations = np.take_along_axis(needed, keeps[None], axis=0)[0]
    return _Stages(
        forward + costs.end_forward_seconds[ranks],
        backward + costs.end_backward_seconds[ranks] + (keeps != Keeps.ACTIVATIONS) * forward,
        keeps,
        activations,
        activations <= room,
    )


def _bounds(costs: CutCosts, blocks: Sequence[Sequence[int]] | np.ndarray) -> np.ndarray:
    """`bound_seconds` of some cuts; inf where one does not fit. float64 [cuts]."""
    stages = _stages(costs, np.array(blocks))
    totals = stages.forward + stages.backward
    ways = np.array([2 * (hop.seconds + hop.latency_seconds) for hop in costs.hops] + [0.0])
    down_and_back = (totals + ways)[:, ::-1].cumsum(axis=1)[:, ::-1]
    slowest = np.maximum(totals, down_and_back / np.array(costs.in_flight)).max(axis=1)
    slowest = np.maximum(slowest, max((hop.seconds for hop in costs.hops), default=0.0))
    seconds: np.ndarray = down_and_back[:, 0] + (costs.micro_batches - 1) * slowest
    return np.where(stages.fits.all(axis=1), seconds, np.inf)


def _starts(costs: CutCosts) -> list[tuple[int, ...]]:
    """Cuts to begin with: no stage longer than some time, filled from the first rank on. None where no cut fits."""
    hosts, blocks = costs.hosts, costs.blocks
    if hosts > blocks or _filled(costs, np.inf)[-1] < blocks:
        return []
    whole = _spans(costs, np.arange(hosts), np.zeros(hosts, int), np.full(hosts, blocks))
    too_short, enough = 0.0, float((whole.forward + whole.backward).max()) * 2
    for _ in range(40):
        middle = (too_short + enough) / 2
        too_short, enough = (too_short, middle) if _filled(costs, middle)[-1] >= blocks else (middle, enough)
    starts = {tuple(np.diff([0, *_filled(costs, enough * times)]).tolist()) for times in STARTS}
    return sorted(start for start in starts if min(start) > 0 and np.isfinite(_bounds(costs, [start])[0]))


def _filled(costs: CutCosts, seconds: float) -> list[int]:
    """Where each stage ends, if each takes as many blocks as fit its host and take no longer than `seconds`.

    One block is left for each stage to come. Less than L at the end: no cut does.
    """
    ends, start = [], 0
    for rank in range(costs.hosts):
        choices = np.arange(start, costs.blocks - (costs.hosts - 1 - rank) + 1)
        spans = _spans(costs, np.full(len(choices), rank), np.full(len(choices), start), choices)
        holds = spans.fits & (spans.forward + spans.backward <= seconds)
        holds[:1] = True  # nothing at all
        start += int(np.flatnonzero(holds)[-1]) if len(holds) else 0
        ends.append(start)
    return ends


def _moves(blocks: Sequence[int], most: int) -> np.ndarray:
    """The cut itself, then all with 1, 2, 4, ... up to `most` blocks moved from one stage to another: int [cuts, p]."""
    own, hosts = np.array(blocks), len(blocks)
    sizes = [2**power for power in range(most.bit_length()) if 2**power <= most]
    one = np.eye(hosts, dtype=int)
    moves = (one[:, None] - one[None, :]).reshape(-1, hosts)
    moves = moves[moves.any(axis=1)]
    cuts = np.concatenate([own[None], *(own + size * moves for size in sizes)])
    moved: np.ndarray = cuts[(cuts > 0).all(axis=1)]
    return moved


def _descend(costs: CutCosts, blocks: tuple[int, ...]) -> tuple[int, ...]:
    """The cut from which no move lowers the bound."""
    while True:
        cuts = _moves(blocks, costs.blocks // 2 or 1)
        bounds = _bounds(costs, cuts)
        best = int(bounds.argmin())
        if bounds[best] >= bounds[0] * (1 - 1e-12):
            return blocks
        blocks = tuple(cuts[best].tolist())


def _polished(costs: CutCosts, blocks: tuple[int, ...]) -> Cut:
    """The cut from which no move of a block or two to another stage shortens the schedule."""
    known: dict[tuple[int, ...], float] = {}
    while True:
        cuts = _moves(blocks, 2)
        bounds = _bounds(costs, cuts)
        order = [index for index in np.argsort(bounds, kind="stable")[:PLAYED] if np.isfinite(bounds[index])]
        near = {blocks, *(tuple(cuts[index].tolist()) for index in order)}
        for cut in near - known.keys():
            known[cut] = _seconds(costs, cut)
        best = min(near, key=lambda cut: (known[cut], cut))
        if known[best] >= known[blocks] * (1 - 1e-12):
            return cut_at(costs, blocks)
        blocks = best


def _seconds(costs: CutCosts, blocks: tuple[int, ...]) -> float:
    """A step's time, as played; of very many micro-batches only the first ones are."""
    stages = _stages(costs, np.array([blocks]))
    schedule = stages.forward[0].tolist(), stages.backward[0].tolist(), costs.hops, costs.in_flight
    few, more = (times * costs.hosts for times in STEADY)
    if costs.micro_batches <= more or costs.micro_batches * costs.hosts <= PLAYED_WHOLE:
        return step_seconds(*schedule, costs.micro_batches)
    before, after = step_seconds(*schedule, few), step_seconds(*schedule, more)
    return after + (costs.micro_batches - more) * (after - before) / (more - few)
