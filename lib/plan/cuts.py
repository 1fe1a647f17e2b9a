"""Where a model is cut into pipeline stages, and the time that a step takes: 1F1B over unequal stages.

One forward, one backward (PipeDream-Flush, arXiv:2006.09503): a stage runs forward until as many micro-batches are in
flight as it keeps, then one backward and one forward in turn, and at last the backwards that are left. A step's time
comes from replaying these orders: each operation starts as soon as its stage is free and its input has arrived.

Ranks keep their order, each takes consecutive blocks. A bound of the schedule says which cuts are worth replaying.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import IntEnum
from itertools import pairwise
from typing import NamedTuple

import numpy as np

STARTS = (1.0, 1.1, 1.3, 2.0, np.inf)  # times the least longest stage: how long a stage may be, at the start
REPLAYED = 16  # neighbours of a cut whose schedule is replayed, those with the lowest bounds


class Operation(NamedTuple):
    """One pass of a stage over one micro-batch."""

    is_forward: bool
    micro_batch: int


class Hop(NamedTuple):
    """What a micro-batch's activations take from one stage to the next, and as long their gradients back."""

    seconds: float = 0.0  # that the link is busy, in one direction
    latency_seconds: float = 0.0  # until they arrive, beyond that


def operations(in_flight: int, micro_batches: int) -> list[Operation]:
    """What a stage does in a step, in order.

    in_flight: micro-batches that have gone forward and not yet backward, at most; the last stage has 1.
    """
    ahead = min(in_flight - 1, micro_batches)
    order = [Operation(True, index) for index in range(ahead)]
    for index in range(micro_batches):
        if index + ahead < micro_batches:
            order.append(Operation(True, index + ahead))
        order.append(Operation(False, index))
    return order


def depths(stages: int, more: int = 0) -> tuple[int, ...]:
    """Micro-batches in flight of each stage: as many as stages are left, itself included; the last one has 1.

    more: of all stages but the last, so that they need not wait for a slow link.
    """
    return tuple(stages - stage + more * (stage < stages - 1) for stage in range(stages))


def step_seconds(
    forward: Sequence[float],
    backward: Sequence[float],
    hops: Sequence[Hop],
    in_flight: Sequence[int],
    micro_batches: int,
) -> float:
    """From the first forward to the last backward.

    Args:
        forward, backward: seconds of one micro-batch, one number a stage.
        hops: one for each cut. Messages of one direction follow each other; a stage works while it sends.
        in_flight: one number a stage, never more than the stage before has.
    """
    stages = len(forward)
    orders = [operations(depth, micro_batches) for depth in in_flight]
    # When inputs arrive: [stage][micro-batch], of activations and of gradients, as far as replayed.
    activations: list[list[float]] = [[0.0] * micro_batches, *([] for _ in range(stages - 1))]
    gradients: list[list[float]] = [[] for _ in range(stages)]
    free, down, up = [0.0] * stages, [0.0] * stages, [0.0] * stages  # stages, and links in both directions
    finished = [0] * stages
    is_moving = True
    while is_moving:
        is_moving = False
        for stage in range(stages):
            while finished[stage] < len(orders[stage]):
                is_forward, micro_batch = orders[stage][finished[stage]]
                arrivals = activations[stage] if is_forward else gradients[stage]
                if micro_batch >= len(arrivals):
                    break
                seconds = forward[stage] if is_forward else backward[stage]
                now = free[stage] = max(free[stage], arrivals[micro_batch]) + seconds
                if is_forward and stage == stages - 1:
                    gradients[stage].append(now)
                elif is_forward:
                    down[stage] = max(down[stage], now) + hops[stage].seconds
                    activations[stage + 1].append(down[stage] + hops[stage].latency_seconds)
                elif stage:
                    up[stage] = max(up[stage], now) + hops[stage - 1].seconds
                    gradients[stage - 1].append(up[stage] + hops[stage - 1].latency_seconds)
                finished[stage] += 1
                is_moving = True
    assert finished == [len(order) for order in orders], "a stage keeps more micro-batches than the one before"
    return max(free)


@dataclass(frozen=True, eq=False)
class CutMemory:
    """What blocks take on each host, in bytes: as in CutCosts."""

    held: np.ndarray  # weights, adapters, gradients, optimizer
    kept: np.ndarray  # activations that the backward pass of one micro-batch reads
    inputs: np.ndarray  # those of them that gradient checkpointing keeps: each block's input
    ends: np.ndarray
    work: np.ndarray  # [p], that a micro-batch takes besides while it is at work
    block: np.ndarray  # [p], that gradient checkpointing takes besides: all of one block
    may_checkpoint: bool
    must_checkpoint: bool
    input: float  # of one micro-batch, between two stages
    room: np.ndarray  # [p], that may be planned for; inf where it is not known


@dataclass(frozen=True, eq=False)
class CutCosts:
    """What blocks cost on each host, for micro-batches of one size: p hosts in their order, L blocks.

    Arrays over blocks are running sums, float64 [p, L + 1]: what the first n blocks cost there. Those of ends, [p], are
    of what a host has beside blocks: the first one the embedding, the last one the norm and the head.
    """

    forward_seconds: np.ndarray
    end_seconds: np.ndarray
    backward: float  # times a forward pass's time
    memory: CutMemory
    hops: tuple[Hop, ...]  # p - 1
    in_flight: tuple[int, ...]  # p
    micro_batches: int

    @property
    def hosts(self) -> int:
        return len(self.in_flight)

    @property
    def blocks(self) -> int:
        return self.forward_seconds.shape[1] - 1

    def slowed(self, factors: np.ndarray) -> CutCosts:
        """The costs of hosts that take so many times as long. factors: [p]."""
        forward, ends = self.forward_seconds * factors[:, None], self.end_seconds * factors
        return replace(self, forward_seconds=forward, end_seconds=ends)


class Keeps(IntEnum):
    """What a stage keeps of a micro-batch for its backward pass. All but the first cost another forward pass."""

    ACTIVATIONS = 0
    BLOCK_INPUTS = 1  # gradient checkpointing
    INPUT = 2  # of the stage alone: it computes all activations again, of one micro-batch at a time


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

    def idle_fraction(self, rank: int, micro_batches: int) -> float:
        """Part of a step in which a stage has nothing to do: the bubble, and its waiting for slower ones."""
        busy = micro_batches * (self.forward_seconds[rank] + self.backward_seconds[rank])
        return 1 - busy / self.step_seconds if self.step_seconds else 0.0


class _Stages(NamedTuple):
    """The stages of many cuts: all arrays are [cuts, p]."""

    forward: np.ndarray
    backward: np.ndarray
    keeps: np.ndarray
    activation_bytes: np.ndarray
    fits: np.ndarray  # bool


def best_cut(costs: CutCosts) -> Cut | None:
    """The cut with the shortest step among those that moving blocks leads to; None where no cut fits the hosts."""
    hosts, blocks = costs.hosts, costs.blocks
    if hosts > blocks or _filled(costs, np.inf)[-1] < blocks:
        return None
    whole = _spans(costs, np.arange(hosts), np.zeros(hosts, int), np.full(hosts, blocks))
    too_short, enough = 0.0, float((whole.forward + whole.backward).max()) * 2
    for _ in range(40):
        middle = (too_short + enough) / 2
        too_short, enough = (too_short, middle) if _filled(costs, middle)[-1] >= blocks else (middle, enough)
    starts = {tuple(np.diff([0, *_filled(costs, enough * times)]).tolist()) for times in STARTS}
    cuts = [_improved(costs, cut_at(costs, start)) for start in sorted(starts) if min(start) > 0]
    return min((cut for cut in cuts if cut.fits), key=lambda cut: cut.step_seconds, default=None)


def cut_at(costs: CutCosts, blocks: Sequence[int]) -> Cut:
    """A given cut, whether it fits or not."""
    stages = _spans_of(costs, np.array([blocks]))
    forward, backward = stages.forward[0].tolist(), stages.backward[0].tolist()
    return Cut(
        tuple(map(int, blocks)),
        tuple(map(Keeps, stages.keeps[0].tolist())),
        tuple(forward),
        tuple(backward),
        tuple(stages.activation_bytes[0].tolist()),
        bool(stages.fits.all()),
        step_seconds(forward, backward, costs.hops, costs.in_flight, costs.micro_batches),
    )


def most_blocks(costs: CutCosts) -> list[int]:
    """How many blocks each host holds at most, the hosts before it filled up; all of them less than L: no cut fits."""
    return [int(end - start) for start, end in pairwise([0, *_filled(costs, np.inf)])]


def _spans_of(costs: CutCosts, blocks: np.ndarray) -> _Stages:
    """What the stages of some cuts cost. blocks: int [cuts, p]."""
    ends = blocks.cumsum(axis=1)
    return _spans(costs, np.arange(costs.hosts), ends - blocks, ends)


def _spans(costs: CutCosts, ranks: np.ndarray, starts: np.ndarray, ends: np.ndarray) -> _Stages:
    """What blocks [start, end) cost on the hosts of some ranks; the arguments' shapes are broadcast."""

    def of(sums: np.ndarray) -> np.ndarray:
        spans: np.ndarray = sums[ranks, ends] - sums[ranks, starts]
        return spans

    memory, blocks = costs.memory, of(costs.forward_seconds)
    room = memory.room[ranks] - of(memory.held) - memory.ends[ranks] - memory.work[ranks]
    kept, in_flight, must = of(memory.kept), np.array(costs.in_flight)[ranks], memory.must_checkpoint
    needed = np.array(  # in the order of Keeps
        np.broadcast_arrays(
            np.where(must, np.inf, in_flight * kept),
            np.where(memory.may_checkpoint, in_flight * of(memory.inputs) + memory.block[ranks], np.inf),
            np.where(must | (ranks == costs.hosts - 1), np.inf, in_flight * memory.input + kept),
        )
    )
    holds = np.isfinite(needed[Keeps.ACTIVATIONS]) & (needed[Keeps.ACTIVATIONS] <= room)
    keeps = np.where(holds, Keeps.ACTIVATIONS, needed.argmin(axis=0))
    activations = np.take_along_axis(needed, keeps[None], axis=0)[0]
    forward = blocks + costs.end_seconds[ranks]
    backward = costs.backward * forward + (keeps != Keeps.ACTIVATIONS) * blocks
    return _Stages(forward, backward, keeps, activations, activations <= room)


def _bounds(costs: CutCosts, blocks: Sequence[Sequence[int]] | np.ndarray) -> np.ndarray:
    """What a step of some cuts takes at most, nearly; inf where one does not fit. float64 [cuts].

    The way of one micro-batch down and back, and (m - 1) times the slowest part: a stage, a link in one direction, or
    the way from a stage down and back over what it keeps in flight.
    """
    stages = _spans_of(costs, np.array(blocks))
    totals = stages.forward + stages.backward
    ways = np.array([2 * (hop.seconds + hop.latency_seconds) for hop in costs.hops] + [0.0])
    down_and_back = (totals + ways)[:, ::-1].cumsum(axis=1)[:, ::-1]
    slowest = np.maximum(totals, down_and_back / np.array(costs.in_flight)).max(axis=1)
    slowest = np.maximum(slowest, max((hop.seconds for hop in costs.hops), default=0.0))
    seconds: np.ndarray = down_and_back[:, 0] + (costs.micro_batches - 1) * slowest
    return np.where(stages.fits.all(axis=1), seconds, np.inf)


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
    unit = np.eye(len(blocks), dtype=int)
    moves = (unit[:, None] - unit[None, :]).reshape(-1, len(blocks))
    sizes = [2**power for power in range(max(1, most).bit_length())]
    cuts = np.array(blocks) + np.concatenate([moves[:1], *(size * moves[moves.any(axis=1)] for size in sizes)])
    positive: np.ndarray = cuts[(cuts > 0).all(axis=1)]
    return positive


def _improved(costs: CutCosts, best: Cut) -> Cut:
    """The cut from which no move to another stage shortens the replayed schedule."""
    while True:
        cuts = _moves(best.blocks, costs.blocks // 2)
        bounds = _bounds(costs, cuts)
        near = [index for index in np.argsort(bounds, kind="stable")[:REPLAYED] if np.isfinite(bounds[index])]
        better = min((cut_at(costs, cuts[index].tolist()) for index in near), key=lambda cut: cut.step_seconds)
        if better.step_seconds >= best.step_seconds * (1 - 1e-12):
            return best
        best = better
