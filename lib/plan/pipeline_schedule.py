"""The order in which the stages of a pipeline work, and the time that a step takes: 1F1B over unequal stages.

One forward, one backward (PipeDream-Flush, arXiv:2006.09503): a stage runs forward until as many micro-batches are in
flight as it keeps, then one backward and one forward in turn, and at last the backwards that are left. Times come from
playing these orders, each operation as soon as its stage is free and its input has arrived. Pure functions.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple


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
    # When inputs arrive: [stage][micro-batch], of activations and of gradients, as far as played.
    activations: list[list[float]] = [[0.0] * micro_batches, *([] for _ in range(stages - 1))]
    gradients: list[list[float]] = [[] for _ in range(stages)]
    free, down, up = [0.0] * stages, [0.0] * stages, [0.0] * stages  # stages, and links in both directions
    played = [0] * stages
    waiting = True
    while waiting:
        waiting = False
        for stage in range(stages):
            order, index, now = orders[stage], played[stage], free[stage]
            arrived_forward, arrived_backward = activations[stage], gradients[stage]
            while index < len(order):
                is_forward, micro_batch = order[index]
                arrived = arrived_forward if is_forward else arrived_backward
                if micro_batch >= len(arrived):
                    break
                now = max(now, arrived[micro_batch]) + (forward if is_forward else backward)[stage]
                if is_forward and stage == stages - 1:
                    arrived_backward.append(now)
                elif is_forward:
                    down[stage] = max(down[stage], now) + hops[stage].seconds
                    activations[stage + 1].append(down[stage] + hops[stage].latency_seconds)
                elif stage:
                    up[stage] = max(up[stage], now) + hops[stage - 1].seconds
                    gradients[stage - 1].append(up[stage] + hops[stage - 1].latency_seconds)
                index += 1
            waiting |= index > played[stage]
            played[stage], free[stage] = index, now
    assert played == [len(order) for order in orders], "a stage keeps more micro-batches than the one before"
    return max(free)


def bound_seconds(
    forward: Sequence[float],
    backward: Sequence[float],
    hops: Sequence[Hop],
    in_flight: Sequence[int],
    micro_batches: int,
) -> float:
    """What a step takes at most, nearly: the way of one micro-batch down and back, and (m - 1) times the slowest part.

    The slowest part is a stage, a link in one direction, or the way from a stage down and back over what it keeps in
    flight. Of 60,000 random schedules without links, in which no backward pass is shorter than its forward pass, the
    longest takes 1.5 % more: a stage may have to wait for one that is not the slowest.
    """
    totals = [ahead + back for ahead, back in zip(forward, backward, strict=True)]
    ways = [2 * (hop.seconds + hop.latency_seconds) for hop in hops]
    slowest, way = max([0.0, *(hop.seconds for hop in hops)]), 0.0
    for stage in reversed(range(len(totals))):
        way += totals[stage] + (ways[stage] if stage < len(ways) else 0.0)
        slowest = max(slowest, totals[stage], way / in_flight[stage])
    return way + (micro_batches - 1) * slowest
