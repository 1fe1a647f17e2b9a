"""Who takes which pairs of a round, so that each is trained exactly once: pure functions over indices into its stream.

A round is a stream of whole global batches, in the order in which one machine would train them. Ranks take chunks of
it, a chunk for each local step; what is left when the ranks synchronise is assigned again.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TypedDict

import numpy as np

from lib.data.row_order import Position, divide_rows, epoch_order, global_batch


@dataclass(frozen=True)
class Chunk:
    """What one rank trains in one local step."""

    indices: np.ndarray  # int64 [n], ascending, into the round's stream
    before: int  # pairs of the round that all ranks together take before it, as planned


@dataclass(frozen=True)
class Round:
    """The stream of one round: its rows, their epochs, and where its global batches begin and end."""

    first_step: int  # global batches before it
    last_step: int  # global batches up to its end
    rows: np.ndarray  # int64 [n]
    epochs: np.ndarray  # int64 [n]
    edges: np.ndarray  # int64 [batches + 1]


def open_round(
    first_step: int,
    steps: int,
    pairs: int,
    lengths: np.ndarray,
    seed: int,
    global_batch_size: int,
    length_window: int,
) -> Round:
    """The round that begins after `first_step` global batches: the fewest whole ones that hold `pairs`, until `steps`.

    The batches are those of a synchronous run (lib/data/row_order.py); within a batch, where that order ascends in
    length, rows stand in a random order, so that every part of it is a fair sample.
    """
    in_epoch = -(-len(lengths) // global_batch_size)
    batches, epochs, held, step = [], [], 0, first_step
    epoch, order = -1, np.zeros(0, np.int64)
    while step < steps and held < pairs:
        if step // in_epoch != epoch:
            epoch = step // in_epoch
            order = epoch_order(lengths, seed, epoch, global_batch_size, length_window)
        rows = global_batch(order, Position(epoch, step % in_epoch * global_batch_size), global_batch_size)
        keys = np.random.Philox(np.random.SeedSequence([seed, epoch, step, 1])).random_raw(len(rows))
        batches.append(rows[np.argsort(keys, kind="stable")])
        epochs.append(np.full(len(rows), epoch))
        held, step = held + len(rows), step + 1
    edges = np.cumsum([0, *map(len, batches)])
    return Round(first_step, step, np.concatenate(batches), np.concatenate(epochs), edges)


def is_tail(round: Round, pending: np.ndarray) -> bool:
    """Whether what is pending is all that comes after some whole global batch."""
    start = len(round.rows) - len(pending)
    return start in round.edges and bool((pending == np.arange(start, len(round.rows))).all())


def assign_planned(round: Round, pending: np.ndarray, shares: Sequence[int]) -> list[list[Chunk]]:
    """Every rank's chunks: of each global batch its share, whatever its speed. `pending` is a tail of whole ones."""
    queues: list[list[Chunk]] = [[] for _ in shares]
    for start, end in pairwise(round.edges.tolist()):
        if not len(pending) or end <= pending[0]:
            continue
        parts = np.split(np.arange(start, end), np.cumsum(divide_rows(end - start, shares))[:-1])
        for queue, part in zip(queues, parts, strict=True):
            if len(part):
                queue.append(Chunk(part, start))
    return queues


def assign_by_speed(
    round: Round, pending: np.ndarray, shares: Sequence[int], speeds: Sequence[float]
) -> list[list[Chunk]]:
    """Every rank's chunks, at most its share each: the next one goes to the rank that would be done with it first.

    pending: int64 [n], ascending indices into the stream that nobody has trained. speeds: pairs a second, by rank, of
    which one at least is positive; a rank without speed or share gets nothing.
    """
    queues: list[list[Chunk]] = [[] for _ in shares]
    seconds = [share / speed if share and speed else 0.0 for share, speed in zip(shares, speeds, strict=True)]
    upcoming = [(each, rank) for rank, each in enumerate(seconds) if each]
    heapq.heapify(upcoming)
    epoch_ends = [0, *(np.flatnonzero(np.diff(round.epochs[pending])) + 1).tolist(), len(pending)]
    taken = len(round.rows) - len(pending)
    for start, end in pairwise(epoch_ends):  # a step belongs to one epoch
        while start < end:
            done, rank = upcoming[0]
            indices = pending[start : min(start + shares[rank], end)]
            queues[rank].append(Chunk(indices, taken))
            start, taken = start + len(indices), taken + len(indices)
            heapq.heapreplace(upcoming, (done + seconds[rank], rank))
    return queues


def left_over(pending: np.ndarray, queues: Sequence[Sequence[Chunk]], done: Sequence[int]) -> np.ndarray:
    """What is pending after each rank has trained the first `done` chunks of its queue: int64, ascending."""
    trained = [chunk.indices for queue, count in zip(queues, done, strict=True) for chunk in queue[:count]]
    return np.setdiff1d(pending, np.concatenate(trained)) if trained else pending


class PendingState(TypedDict):
    """Pending indices, as a checkpoint keeps them: a few scattered ones, and all from `tail` on."""

    scattered: list[int]
    tail: int


def to_state(pending: np.ndarray, size: int) -> PendingState:
    """Pending indices of a stream of `size`, for a checkpoint."""
    expected = np.arange(size - len(pending), size)
    scattered = int(np.flatnonzero(pending != expected)[-1]) + 1 if (pending != expected).any() else 0
    tail = int(expected[scattered]) if scattered < len(pending) else size
    return {"scattered": pending[:scattered].tolist(), "tail": tail}


def from_state(scattered: list[int], tail: int, size: int) -> np.ndarray:
    """What `to_state` wrote, of a round that may have become shorter since: int64, ascending."""
    return np.concatenate([np.array([index for index in scattered if index < size], np.int64), np.arange(tail, size)])
