"""A rank's rows ➜ its micro-batches, in few shapes where the step is compiled."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

import numpy as np

from lib.config.schema import Config
from lib.data.batch_shapes import NEED, BatchShape, batch_shape_of, few_shapes, need_of, real_tokens
from lib.data.collate import Batch, collate_trained
from lib.data.dataset import Dataset, Sized
from lib.data.prompts import Prompts
from lib.data.row_order import epoch_order, micro_batches
from lib.data.streaming import StreamedDataset

# Epochs of the order, and the most steps of each, whose micro-batches decide the shapes.
EPOCHS = 4
STEPS = 512
# Of estimated lengths: how much longer than the longest estimate rows of a micro-batch may be together. What is longer
# still is traced for itself.
MARGIN = 1.25
# What a pass without gradients costs, beside one with them: for each product of the forward pass the backward has two.
FORWARD_COST = 1 / 3


class MicroBatches:
    """Makes the micro-batches of a rank's rows, each with its reference.

    Args:
        reference: float32 [n, K], log-probabilities by row of the data set, or None.
        length_multiple, shared_prompts: as `collate` takes them.
        is_compiled: whether every shape costs a trace: then there are at most train.max_traces of them, none of which
            is met for the first time after the first epoch.
    """

    def __init__(
        self,
        data: Dataset | StreamedDataset | Prompts,
        reference: np.ndarray | None,
        config: Config,
        length_multiple: int,
        shared_prompts: bool,
        is_compiled: bool,
    ):
        self.data, self.reference, self.config = data, reference, config
        self.length_multiple, self.shared_prompts, self.is_compiled = length_multiple, shared_prompts, is_compiled
        self._shapes = functools.cache(self._few_shapes)

    def of(self, parts: Sequence[np.ndarray], micro_batch_size: int) -> list[tuple[Batch, np.ndarray | None]]:
        """Micro-batches of these rows, without those that turn out to be unusable.

        micro_batch_size: the most rows in one.
        """
        shapes = self._shapes(micro_batch_size) if self.is_compiled else []
        read = ((self.data.examples(part.tolist()), part) for part in parts)
        return [
            (
                collate_trained(examples, self.length_multiple, self.shared_prompts, self.data.has_mismatched, shapes),
                None if self.reference is None else self.reference[part],
            )
            for examples, part in read
            if examples
        ]

    def within(
        self, made: list[tuple[Batch, np.ndarray | None]], most: int | None
    ) -> list[tuple[Batch, np.ndarray | None]]:
        """The same rows in micro-batches of at most so many; those that are small enough stay as they are."""
        if most is None:
            return made
        smaller = []
        for batch, reference in made:
            sizes = pieces(len(batch.rows), most)
            if len(sizes) == 1:
                smaller.append((batch, reference))
            else:
                smaller += self.of(np.split(batch.rows, np.cumsum(sizes)[:-1]), most)
        return smaller

    def _few_shapes(self, micro_batch_size: int) -> list[BatchShape]:
        """Shapes for micro-batches of up to so many rows, whichever they are: from data, seed and settings alone."""
        train, data = self.config.train, self.data
        prompts, seen, scored = data.trained
        tokens = real_tokens(prompts, seen)
        lengths = tokens if self.shared_prompts else data.lengths
        needs = []
        for epoch in range(EPOCHS):
            order = epoch_order(
                data.lengths, train.seed, epoch, train.global_batch_size, self.config.data.length_window
            )
            starts = range(0, len(order), train.global_batch_size)
            parts = [
                part
                for start in starts[:: -(-len(starts) // STEPS)]
                for rows in [order[start : start + train.global_batch_size]]
                for part in micro_batches(rows[np.argsort(lengths[rows], kind="stable")], micro_batch_size)
            ]
            needs.append(np.array([need_of(prompts[part], seen[part], scored[part]) for part in parts], NEED))

        most, count = self.config.data.max_length, seen.shape[1]

        def of_largest(figures: np.ndarray, bound: int) -> int:
            total = int(np.sort(figures)[-micro_batch_size:].sum())
            return min(int(MARGIN * total), micro_batch_size * bound) if data.is_estimated else total

        largest = np.array(
            (
                micro_batch_size,
                0 if data.is_estimated else prompts.min(),
                most if data.is_estimated else prompts.max(),
                most - 1 if data.is_estimated else seen.max(),
                of_largest(tokens, count * most),
                of_largest(scored.sum(axis=1), count * most),
                most - 1 if data.is_estimated else scored.max(),
            ),
            NEED,
        )
        return few_shapes(needs, largest, train.max_traces, count, self.length_multiple, self.shared_prompts)


def pieces(size: int, most: int | None) -> list[int]:
    """A micro-batch cut into as few as do, of about one size: 9 pairs by 4 are 3, 3, 3."""
    if most is None or size <= most:
        return [size]
    count = -(-size // most)
    return [size // count + (i < size % count) for i in range(count)]


def lengths_and_cost(
    dataset: Sized, length_multiple: int, shared_prompts: bool
) -> tuple[np.ndarray, Callable[[np.ndarray], float]]:
    """What `assign_micro_batches` needs: each row's length, int [n], and what a micro-batch costs, in tokens."""
    prompts, seen, scored = dataset.trained
    lengths = real_tokens(prompts, seen) if shared_prompts else seen.max(axis=1)

    def cost_of(rows: np.ndarray, seen: np.ndarray, scored: np.ndarray) -> float:
        need = need_of(prompts[rows], seen[rows], scored[rows])
        return batch_shape_of(need[None], seen.shape[1], length_multiple, shared_prompts).cost

    def cost(rows: np.ndarray) -> float:
        trained = cost_of(rows, seen, scored)
        if not dataset.has_mismatched:
            return trained
        return trained + FORWARD_COST * cost_of(rows, dataset.seen[:, -1:], dataset.scored_tokens[:, -1:])

    return lengths, cost
