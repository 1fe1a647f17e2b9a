"""The seeded order of the examples, and who takes which: pure functions over row numbers.

The whole state is a Position, (epoch, cursor). The order of an epoch follows from the seed, the lengths, the
global batch size and the window, so it is never saved; a run that is resumed, on however many ranks, goes on
with the same global batches, and every row is taken exactly once an epoch. Resume with the same global batch
size.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Position:
    """How far training is: `cursor` examples of epoch `epoch` have been taken."""

    epoch: int = 0
    cursor: int = 0


def epoch_order(
    lengths: np.ndarray, seed: int, epoch: int, global_batch_size: int, length_window: int
) -> np.ndarray:
    """Every row of the data set once, in the order of this epoch: int64 [n].

    lengths: int [n], what the model sees of each row. Rows are permuted; each window of `length_window`
    global batches is sorted by length, so that the rows of a batch need little padding; then the batches are
    shuffled. Inside a batch rows ascend in length. The ragged batch, if there is one, holds randomly chosen
    rows and stands last, so that every other batch starts at a multiple of global_batch_size.
    """
    count = len(lengths)
    # numpy promises the raw stream of a bit generator for ever, on every platform, but not what Generator
    # makes of it: so random keys are sorted, and nothing is drawn through Generator.
    source = np.random.Philox(np.random.SeedSequence([seed, epoch]))
    permutation = np.argsort(source.random_raw(count), kind="stable")
    full = count - count % global_batch_size
    window = length_window * global_batch_size
    parts = [permutation[start : min(start + window, full)] for start in range(0, full, window)]
    parts.append(permutation[full:])
    ordered = np.concatenate([part[np.argsort(lengths[part], kind="stable")] for part in parts])
    batches = ordered[:full].reshape(-1, global_batch_size)
    shuffled = batches[np.argsort(source.random_raw(len(batches)), kind="stable")]
    return np.concatenate([shuffled.reshape(-1), ordered[full:]]).astype(np.int64)


def global_batch(order: np.ndarray, position: Position, global_batch_size: int) -> np.ndarray:
    """The rows of the step that starts at `position`: int64 [global_batch_size], fewer at the epoch's end."""
    assert 0 <= position.cursor < len(order), (position, len(order))
    return order[position.cursor : position.cursor + global_batch_size]


def advance(position: Position, count: int, dataset_size: int) -> Position:
    """The position after `count` more examples, which have to lie within the epoch."""
    cursor = position.cursor + count
    assert count > 0 and cursor <= dataset_size, (position, count, dataset_size)
    return Position(position.epoch + 1, 0) if cursor == dataset_size else Position(position.epoch, cursor)


def split(rows: np.ndarray, lengths: np.ndarray, shares: Sequence[int]) -> list[np.ndarray]:
    """This step's rows of every rank: disjoint, together all of `rows`, each ascending in length.

    rows: int64 [n]. lengths: int [dataset], indexed by row. shares: rows per rank of a full batch. A ragged
    batch is divided in proportion by largest remainder, so a rank may get none. Ranks are interleaved along
    the sorted lengths: each gets short and long rows alike, and the planned shares stay right for the batch
    at hand.
    """
    total, count = sum(shares), len(rows)
    assert total > 0 and min(shares) >= 0, shares
    counts = np.array([count * share // total for share in shares])
    remainders = np.array([count * share % total for share in shares])
    counts[np.argsort(-remainders, kind="stable")[: count - counts.sum()]] += 1
    # The j-th of a rank's n rows belongs at the quantile (j + 1/2) / n of the lengths.
    quantiles = np.concatenate([(np.arange(n) + 0.5) / max(n, 1) for n in counts])
    owners = np.repeat(np.arange(len(shares)), counts)[np.argsort(quantiles, kind="stable")]
    ascending = rows[np.argsort(lengths[rows], kind="stable")]
    return [ascending[owners == rank] for rank in range(len(shares))]


def micro_batches(rows: np.ndarray, micro_batch_size: int) -> list[np.ndarray]:
    """Neighbours in `rows`, micro_batch_size at a time; the last may be smaller; no rows, no batches."""
    return [rows[start : start + micro_batch_size] for start in range(0, len(rows), micro_batch_size)]


def cut(rows: np.ndarray, sizes: Sequence[int]) -> list[np.ndarray]:
    """Neighbours in `rows`, by the plan's micro-batch sizes; a ragged batch has fewer rows and ends early."""
    ends = np.minimum(np.cumsum(sizes), len(rows)).tolist()
    assert len(rows) <= sum(sizes), (len(rows), sizes)
    return [rows[start:end] for start, end in zip([0, *ends], ends, strict=False) if start < end]
