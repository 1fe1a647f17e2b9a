"""The seeded order of the rows, and which rank takes which: pure functions over row numbers.

The whole state is a Position. An epoch's order follows from the seed, the lengths and the global batch size, so a run
that is resumed, on however many ranks, goes on with the same global batches: every row is taken once an epoch.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TypeVar

import numpy as np

LENGTH_WINDOW = 32  # global batches among which rows are sorted by length


@dataclass(frozen=True)
class Position:
    """How far training is: `cursor` examples of epoch `epoch` have been taken."""

    epoch: int = 0
    cursor: int = 0


def epoch_order(
    lengths: np.ndarray,
    seed: int,
    epoch: int,
    global_batch_size: int,
    window: int = LENGTH_WINDOW,
    segments: np.ndarray | None = None,
) -> np.ndarray:
    """Every row of the data set once, in the order of this epoch: int64 [n]. Rows are permuted; each `window` of global
    batches is sorted by length; then the batches are shuffled. The ragged batch comes last. lengths: int [n], what the
    model sees of each row. segments: int64 [m + 1], bounds of rows that stand together (row groups); None for all rows
    in one."""
    if segments is not None:
        draws = np.random.Philox(np.random.SeedSequence([seed, epoch, 1])).random_raw(len(segments) - 1)
        parts = []
        for i in np.argsort(draws, kind="stable").tolist():
            start, end = segments[i : i + 2]
            parts.append(start + epoch_order(lengths[start:end], seed + i, epoch, global_batch_size, window))
        return np.concatenate(parts)
    count = len(lengths)
    # numpy promises the raw stream of a bit generator for ever, on every platform, but not what Generator
    # makes of it: so random keys are sorted, and nothing is drawn through Generator.
    source = np.random.Philox(np.random.SeedSequence([seed, epoch]))
    permutation = np.argsort(source.random_raw(count), kind="stable")
    full = count - count % global_batch_size
    size = window * global_batch_size
    parts = [permutation[start : min(start + size, full)] for start in range(0, full, size)]
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
    """The position after `count` more examples, which have to be within the epoch."""
    cursor = position.cursor + count
    assert count > 0 and cursor <= dataset_size, (position, count, dataset_size)
    return Position(position.epoch + 1, 0) if cursor == dataset_size else Position(position.epoch, cursor)


def divide_rows(count: int, shares: Sequence[float]) -> np.ndarray:
    """`count` rows in proportion to the shares, by largest remainder: int64 [ranks]."""
    exact = np.round(count * np.asarray(shares, np.float64) / sum(shares), 9)
    counts = np.floor(exact).astype(np.int64)
    counts[np.argsort(counts - exact, kind="stable")[: count - counts.sum()]] += 1
    return counts


def split(rows: np.ndarray, lengths: np.ndarray, shares: Sequence[int]) -> list[np.ndarray]:
    """This step's rows of every rank: disjoint, together all of `rows`, each ascending in length. rows: int64 [n].
    lengths: int [dataset]. shares: rows per rank of a full batch. Ranks are interleaved along the sorted lengths, and
    then exchange rows until their lengths add up to their shares."""
    counts = divide_rows(len(rows), shares)
    # The j-th of a rank's n rows belongs at the quantile (j + 1/2) / n of the lengths.
    quantiles = np.concatenate([(np.arange(n) + 0.5) / max(n, 1) for n in counts])
    owners = np.repeat(np.arange(len(shares)), counts)[np.argsort(quantiles, kind="stable")]
    ascending = rows[np.argsort(lengths[rows], kind="stable")]
    parts = [ascending[owners == rank] for rank in range(len(shares))]
    loads = np.array([lengths[part].sum() / max(share, 1) for part, share in zip(parts, shares, strict=True)])
    busy = np.flatnonzero(counts)
    for _ in range(4 * len(busy)):
        most, least = busy[np.argmax(loads[busy])], busy[np.argmin(loads[busy])]
        wanted = (loads[most] - loads[least]) / (1 / shares[most] + 1 / shares[least])
        moved = lengths[parts[most]][:, None] - lengths[parts[least]]
        i, j = np.unravel_index(np.argmin(np.abs(moved - wanted)), moved.shape)
        if not 0 < moved[i, j] < 2 * wanted:
            break
        parts[most][i], parts[least][j] = parts[least][j], parts[most][i]
        for rank in (most, least):
            loads[rank] = lengths[parts[rank]].sum() / shares[rank]
    return [part[np.argsort(lengths[part], kind="stable")] for part in parts]


def micro_batches(rows: np.ndarray, micro_batch_size: int) -> list[np.ndarray]:
    """Neighbours in `rows`, micro_batch_size at a time; the last may be smaller; no rows, no batches."""
    return [rows[start : start + micro_batch_size] for start in range(0, len(rows), micro_batch_size)]


def assign_micro_batches(
    rows: np.ndarray,
    lengths: np.ndarray,
    micro_batch_sizes: Sequence[Sequence[int]],
    cost: Callable[[np.ndarray], float],
) -> tuple[list[list[np.ndarray]], list[float]]:
    """This step's micro-batches of every rank, disjoint and together all of `rows`; and their cost by rank. rows: int64
    [n]. lengths: int [dataset]. micro_batch_sizes: of a full batch, a sequence a rank. cost: of a micro-batch's rows,
    in proportion to its time. Neighbours in length among a rank's rows share a micro-batch."""
    assert len(rows), "a step has rows"
    parts = zip(split(rows, lengths, [*map(sum, micro_batch_sizes)]), micro_batch_sizes, strict=True)
    whole = [np.split(part, np.cumsum(sizes, dtype=int)[:-1]) for part, sizes in parts]
    assigned = [[batch for batch in of_rank if len(batch)] for of_rank in whole]
    return assigned, [sum(map(cost, of_rank)) for of_rank in assigned]


T = TypeVar("T")


def prefetch(iterable: Iterable[T], depth: int) -> Generator[T, None, None]:
    """The items of `iterable`, up to `depth` of them made in advance by one thread; its exceptions are raised here."""
    iterator, end = iter(iterable), object()
    pool = ThreadPoolExecutor(1, thread_name_prefix="prefetch")
    try:
        pending = deque(pool.submit(next, iterator, end) for _ in range(max(depth, 1)))
        while (item := pending.popleft().result()) is not end:
            pending.append(pool.submit(next, iterator, end))
            yield item  # type: ignore[misc]
    finally:
        pool.shutdown(wait=True, cancel_futures=True)
