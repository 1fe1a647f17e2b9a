"""The shapes of micro-batches: what rows need, the cheapest layout for them, and a few shapes for a whole run."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from lib.config.settings import TrainSettings
from lib.data.dataset import Dataset, Sized
from lib.data.order import epoch_order, micro_batches
from lib.data.prompts import Prompts
from lib.data.streaming import StreamedDataset

# A ragged stream is gathered into rectangles for attention and back again, which costs about as much as this
# fraction of tokens more; below it, padding is cheaper.
RAGGED_COST = 0.03
# What a position of attention's rectangles, or a scored one, costs beside a token that goes through the blocks.
POSITION_COST = 1 / 32
# Micro-batches that are looked at together when shapes are chosen.
RUNS = 100
# What a micro-batch needs: rows, tokens of its prompts, positions of its longest sequence, tokens in all (prompts
# once), scored tokens in all and of the completion that has most.
FIGURES = ["rows", "shortest_prompt", "longest_prompt", "longest", "tokens", "scored", "widest"]
NEED = np.dtype([(name, np.int64) for name in FIGURES])
# Epochs of the order, and the most steps of each, whose micro-batches decide the shapes.
EPOCHS = 4
STEPS = 512
# Of estimated lengths: how much longer than the longest estimate rows of a micro-batch may be together. What is longer
# still is traced for itself.
MARGIN = 1.25
# What a pass without gradients costs, beside one with them: for each product of the forward pass the backward has two.
FORWARD_COST = 1 / 3


@dataclass(frozen=True)
class BatchShape:
    """The sizes of a Batch's arrays (lib/data/batch.py): b, K, P, T, the N - b * P suffix tokens, M and C."""

    rows: int
    completions: int
    prefix: int
    length: int
    suffix_tokens: int
    is_dense: bool
    uses: int  # Sequences that use a suffix token: K where completions share what is left of a prompt, else 1
    scored: int
    width: int

    @property
    def tokens(self) -> int:
        """N: what the blocks run over."""
        return self.rows * self.prefix + self.suffix_tokens

    @property
    def scores(self) -> int:
        """Of attention, for each head, with those that the causal mask hides."""
        return self.rows * (self.completions * self.length * (self.prefix + self.length) + self.prefix**2)

    @property
    def cost(self) -> float:
        """In proportion to the time that it takes, in tokens of a dense stream."""
        tokens = self.tokens if self.is_dense else self.tokens * (1 + RAGGED_COST)
        return tokens + POSITION_COST * (self.rows * self.completions * self.length + self.scored)

    def holds(self, need: np.ndarray) -> bool:
        """Whether a micro-batch of this need can be padded to this shape."""
        limits = {"rows": self.rows, "longest": self.prefix + self.length, "scored": self.scored, "widest": self.width}
        fits = need["shortest_prompt"] >= self.prefix and all(need[name] <= limits[name] for name in limits)
        if self.is_dense or not fits:
            return bool(fits)
        is_shared = self.uses > 1 or self.completions == 1 or need["longest_prompt"] <= self.prefix
        return bool(is_shared and need["tokens"] - need["rows"] * self.prefix <= self.suffix_tokens)


@dataclass(frozen=True)
class TraceCost:
    """What decides how many shapes a run has: the price of one more, and of a micro-batch that is small."""

    tokens: float = 0.0  # That the model computes in the time of a trace
    least_tokens: float = 0.0  # That a micro-batch costs at least, because launching its kernels takes that long


def need_of(prompts: np.ndarray, seen: np.ndarray, scored: np.ndarray) -> np.ndarray:
    """What rows need: NEED []. prompts: int [b], tokens. seen, scored: int [b, K], positions and scored tokens."""
    tokens = real_tokens(prompts, seen).sum()
    figures = len(prompts), prompts.min(), prompts.max(), seen.max(), tokens, scored.sum(), scored.max()
    return np.array(figures, NEED)


def real_tokens(prompts: np.ndarray, seen: np.ndarray) -> np.ndarray:
    """The fewest tokens that rows need, prompts once: int64 [b]. prompts: [b] tokens; seen: [b, K] positions."""
    return np.asarray(prompts + (seen - prompts[:, None]).sum(axis=1))


def batch_shape_of(needs: np.ndarray, completions: int, length_multiple: int, shared_prompts: bool) -> BatchShape:
    """The cheapest shape for all of some micro-batches, NEED [m]; whole rows, unless shared_prompts. P is a multiple of
    length_multiple; T, N, M and C are padded to rungs of a ladder (pad_length)."""
    rows, longest = int(needs["rows"].max()), int(needs["longest"].max())
    scored = pad_length(int(needs["scored"].max()), length_multiple, 64)
    width = pad_length(int(needs["widest"].max()), length_multiple, 8)

    def shape(prefix: int, is_dense: bool) -> BatchShape:
        length = pad_length(longest - prefix, length_multiple)
        suffix_tokens = rows * completions * length
        if not is_dense:
            suffix_tokens = pad_length(int((needs["tokens"] - needs["rows"] * prefix).max()), length_multiple, 64)
        uses = completions if not is_dense and needs["longest_prompt"].max() > prefix else 1
        return BatchShape(rows, completions, prefix, length, suffix_tokens, is_dense, uses, scored, width)

    layouts = [shape(0, is_dense=True)]  # whole rows
    if shared_prompts:
        prefix = int(needs["shortest_prompt"].min()) // length_multiple * length_multiple
        layouts += [shape(prefix, is_dense=True), shape(prefix, is_dense=False)]
    return min(layouts, key=lambda shape: shape.cost)


def few_shapes(
    needs: Sequence[np.ndarray],
    largest: np.ndarray,
    most: int,
    completions: int,
    length_multiple: int,
    shared_prompts: bool,
    trace: TraceCost = TraceCost(),
) -> list[BatchShape]:
    """At most `most` shapes, the cheapest first, that every micro-batch can be padded to at little cost. needs: NEED,
    the micro-batches of some epochs. largest: what no micro-batch needs more than. They are put in order, and
    neighbours share a shape where that costs least, until there are few and no trace is worth its price. Each shape
    serves the first epoch."""
    together = np.concatenate(needs)
    together["widest"] = largest["widest"]  # costs nothing, and is one thing less that may not fit
    size = together["tokens"] if shared_prompts else together["rows"] * together["longest"]
    runs = np.array_split(together[np.argsort(size, kind="stable")], min(RUNS, len(together)))
    # Of each run two needs with a shape of their own that holds all of it; the last run holds the largest, too.
    ends = np.array([tuple(run[name].max() for name in FIGURES) for run in runs for _ in range(2)], NEED)
    ends["shortest_prompt"] = np.repeat([run["shortest_prompt"].min() for run in runs], 2)
    ends["rows"][1::2] = [run["rows"].min() for run in runs]
    ends, count = np.append(ends, largest), len(runs)

    @functools.cache
    def of_runs(start: int, end: int) -> BatchShape:
        held = ends[2 * start : 2 * end if end < count else None]
        return batch_shape_of(held, completions, length_multiple, shared_prompts)

    def cost(start: int, end: int) -> float:
        return trace.tokens + max(of_runs(start, end).cost, trace.least_tokens) * sum(map(len, runs[start:end]))

    edges = [*range(count + 1)]
    while len(edges) > 2:
        three = zip(edges, edges[1:], edges[2:], strict=False)
        added = [cost(start, end) - cost(start, edge) - cost(edge, end) for start, edge, end in three]
        if len(edges) <= most + 1 and min(added) >= 0:
            break
        del edges[int(np.argmin(added)) + 1]
    shapes = {of_runs(*bounds) for bounds in itertools.pairwise(edges)}
    ascending = sorted(shapes, key=lambda shape: shape.cost)
    # What holds everything has to stay: it replaces the largest of those that the first epoch uses, and so is used.
    first = {shape for need in needs[0] if (shape := first_that_holds(ascending, need)) is not None}
    holds_all = next(shape for shape in ascending if shape.holds(largest))
    used = sorted(first, key=lambda shape: shape.cost)
    return used if holds_all in used else sorted([*used[:-1], holds_all], key=lambda shape: shape.cost)


@dataclass(frozen=True, eq=False)
class RunShapes:
    """The few shapes of a run whose step is compiled: at most train.max_traces for micro-batches of so many rows, all
    met in the first epoch; from data, seed and settings alone. trace: what one more shape costs."""

    data: Dataset | StreamedDataset | Prompts
    train: TrainSettings
    max_length: int  # data.max_length
    length_multiple: int
    shared_prompts: bool
    trace: TraceCost

    def of(self, micro_batch_size: int) -> list[BatchShape]:
        """Shapes for micro-batches of up to so many rows, whichever they are."""
        data, train, batch_size = self.data, self.train, self.train.global_batch_size
        prompts, seen, scored = data.trained
        tokens, most, count = real_tokens(prompts, seen), self.max_length, seen.shape[1]
        lengths = tokens if self.shared_prompts else data.lengths
        needs, steps = [], 0
        for epoch in range(EPOCHS):
            batches = micro_batches(epoch_order(data.lengths, train.seed, epoch, batch_size), batch_size)
            batches = batches[:: -(-len(batches) // STEPS)]
            steps += len(batches)
            ascending = [rows[np.argsort(lengths[rows], kind="stable")] for rows in batches]
            parts = itertools.chain(*[micro_batches(rows, micro_batch_size) for rows in ascending])
            needs.append(np.array([need_of(prompts[part], seen[part], scored[part]) for part in parts], NEED))
        in_all = [int(np.sort(figures)[-micro_batch_size:].sum()) for figures in (tokens, scored.sum(axis=1))]
        bounds = [prompts.min(), prompts.max(), seen.max(), *in_all, scored.max()]
        if data.is_estimated:
            in_all = [min(int(MARGIN * total), micro_batch_size * count * most) for total in in_all]
            bounds = [0, most, most - 1, *in_all, most - 1]
        # Of one epoch, however many the run has: more steps, later, change no shape, and so no bit.
        epochs = steps / -(-len(data) // batch_size)
        trace, largest = replace(self.trace, tokens=self.trace.tokens * epochs), (micro_batch_size, *map(int, bounds))
        layout = train.max_traces, count, self.length_multiple, self.shared_prompts
        return few_shapes(needs, np.array(largest, NEED), *layout, trace)


def first_that_holds(shapes: Sequence[BatchShape], need: np.ndarray) -> BatchShape | None:
    """The first shape that a micro-batch can be padded to."""
    return next((shape for shape in shapes if shape.holds(need)), None)


def padded_lengths(lengths: np.ndarray, length_multiple: int) -> np.ndarray:
    """What whole rows of these lengths are padded to: int64, of the same shape."""
    return np.vectorize(pad_length, otypes=[np.int64])(lengths, length_multiple)


def pad_length(length: int, multiple: int, steps: int = 16) -> int:
    """The least rung >= length of a ladder: `steps` multiples of `multiple`, then steps / 2 an octave."""
    step = multiple
    while length > steps * step:
        step *= 2
    return -(-max(length, 1) // step) * step


def lengths_and_cost(
    dataset: Sized, length_multiple: int, shared_prompts: bool
) -> tuple[np.ndarray, Callable[[np.ndarray], float]]:
    """What `assign_micro_batches` needs: each row's length, int [n], and what a micro-batch costs, in tokens."""
    prompts, seen, scored = dataset.trained
    lengths = real_tokens(prompts, seen) if shared_prompts else seen.max(axis=1)

    def cost_of(rows: np.ndarray, seen: np.ndarray, scored: np.ndarray) -> float:
        need = need_of(prompts[rows], seen[rows], scored[rows])
        return batch_shape_of(need[None], seen.shape[1], length_multiple, shared_prompts).cost

    if not dataset.has_mismatched:
        return lengths, lambda rows: cost_of(rows, seen, scored)
    beside = dataset.seen[:, -1:], dataset.scored_tokens[:, -1:]
    return lengths, lambda rows: cost_of(rows, seen, scored) + FORWARD_COST * cost_of(rows, *beside)
