"""Where a model is cut into pipeline stages, and the time that a step takes: 1F1B over unequal stages.

One forward, one backward (PipeDream-Flush, arXiv:2006.09503): a stage runs forward until as many micro-batches are in
flight as it keeps, then one backward and one forward in turn, and at last the backwards that are left. A step's time
comes from replaying these orders: each operation starts as soon as its stage is free and its input has arrived.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import NamedTuple

import numpy as np

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
    """What a stage does in a step, in order, with at most so many micro-batches gone forward and not yet backward."""
    ahead = min(in_flight - 1, micro_batches)
    order = [Operation(True, index) for index in range(ahead)]
    for index in range(micro_batches):
        if index + ahead < micro_batches:
            order.append(Operation(True, index + ahead))
        order.append(Operation(False, index))
    return order


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

    forward, backward (of one micro-batch), in_flight (never more than the stage before): one a stage. hops: one a cut.
    """
    stages = len(forward)
    orders = [operations(depth, micro_batches) for depth in in_flight]
    # When inputs arrive: [stage][micro-batch], of activations and of gradients, as far as replayed.
    activations: list[list[float]] = [[0.0] * micro_batches, *([] for _ in range(stages - 1))]
    gradients: list[list[float]] = [[] for _ in range(stages)]
    free, down, up = [0.0] * stages, [0.0] * stages, [0.0] * stages  # stages, and links in both directions
    finished = [0] * stages
    while sum(finished) < 2 * micro_batches * stages:
        for stage in range(stages):
            while finished[stage] < len(orders[stage]):
                is_forward, micro_batch = orders[stage][finished[stage]]
                arrivals = activations[stage] if is_forward else gradients[stage]
                if micro_batch >= len(arrivals):
                    break
                now = max(free[stage], arrivals[micro_batch]) + (forward if is_forward else backward)[stage]
                free[stage] = now
                if is_forward and stage == stages - 1:
                    gradients[stage].append(now)
                elif is_forward:
                    down[stage] = max(down[stage], now) + hops[stage].seconds
                    activations[stage + 1].append(down[stage] + hops[stage].latency_seconds)
                elif stage:
                    up[stage] = max(up[stage], now) + hops[stage - 1].seconds
                    gradients[stage - 1].append(up[stage] + hops[stage - 1].latency_seconds)
                finished[stage] += 1
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
    forward, backward, keeps, fits = (array[0] for array in _stages(costs, np.array([blocks])))
    times = tuple(forward.tolist()), tuple(backward.tolist())
    seconds = step_seconds(*times, costs.hops, costs.in_flight, costs.micro_batches)
    return Cut(costs, tuple(map(int, blocks)), tuple(map(Keeps, keeps.tolist())), *times, bool(fits.all()), seconds)


def _stages(costs: CutCosts, blocks: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Forward and backward seconds, Keeps, and whether it fits, of every stage of some cuts. blocks: int [cuts, p]."""
    needed = costs.block_bytes[:, None] * blocks + costs.fixed_bytes[:, None]
    holds = needed <= costs.room * (1 + 1e-12)
    keeps = np.where(holds.any(axis=0), holds.argmax(axis=0), needed.argmin(axis=0))
    passes = blocks * costs.block_seconds
    forward = passes + costs.end_seconds
    return forward, costs.backward * forward + (keeps != Keeps.ACTIVATIONS) * passes, keeps, holds.any(axis=0)


def _bounds(costs: CutCosts, blocks: np.ndarray) -> np.ndarray:
    """What a step of some cuts takes at most, nearly; inf where one does not fit. float64 [cuts].

    One micro-batch down and back, and m - 1 times the slowest: stage, link, or way down and back over those in flight.
    """
    forward, backward, _, fits = _stages(costs, blocks)
    ways = np.array([2 * (hop.seconds + hop.latency_seconds) for hop in costs.hops] + [0.0])
    down_and_back = (forward + backward + ways)[:, ::-1].cumsum(axis=1)[:, ::-1]
    slowest = np.maximum(forward + backward, down_and_back / np.array(costs.in_flight)).max(axis=1)
    slowest = np.maximum(slowest, max((hop.seconds for hop in costs.hops), default=0.0))
    seconds: np.ndarray = down_and_back[:, 0] + (costs.micro_batches - 1) * slowest
    return np.where(fits.all(axis=1), seconds, np.inf)


def _improved(best: Cut) -> Cut:
    """The cut from which no move of 1, 2, 4, ... blocks to another stage shortens the replayed schedule."""
    unit = np.eye(len(best.blocks), dtype=int)
    moves = (unit[:, None] - unit[None, :]).reshape(-1, len(unit))
    moves = np.concatenate([2**power * moves[moves.any(axis=1)] for power in range(best.costs.blocks.bit_length())])
    while True:
        cuts = np.array(best.blocks) + moves
        cuts = cuts[(cuts > 0).all(axis=1)]
        bounds = _bounds(best.costs, cuts)
        near = [index for index in np.argsort(bounds, kind="stable")[:REPLAYED] if np.isfinite(bounds[index])]
        near_cuts = [cut_at(best.costs, cuts[index].tolist()) for index in near]
        better = min((best, *near_cuts), key=lambda cut: cut.step_seconds)
        if better.step_seconds >= best.step_seconds * (1 - 1e-12):
            return best
        best = better
