"""The shapes of micro-batches: what rows need, the cheapest layout for them, and a few shapes for a whole run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

# A ragged stream is gathered into rectangles for attention and back again, which costs about as much as this
# fraction of tokens more; below it, padding is cheaper.
RAGGED_COST = 0.03
# What a position of attention's rectangles, or a scored one, costs beside a token that goes through the blocks.
POSITION_COST = 1 / 32
# Micro-batches that are looked at together when shapes are chosen.
RUNS = 96
NEED = np.dtype(
    [
        (name, np.int64)
        for name in ("rows", "shortest_prompt", "longest_prompt", "longest", "tokens", "scored", "widest")
    ]
)
"""What a micro-batch needs: rows, tokens of its prompts, the positions of its longest sequence, tokens in all (prompts
once), scored tokens in all and of the completion that has most."""


@dataclass(frozen=True)
class BatchShape:
    """The sizes of a Batch's arrays (lib/data/collate.py): b, K, P, T, the N - b * P suffix tokens, M and C."""

    rows: int
    completions: int
    prefix: int
    length: int
    suffix_tokens: int
    is_dense: bool
    uses: int
    """Sequences that use a suffix token: K where completions share what is left of a prompt, else 1."""
    scored: int
    width: int

    @property
    def tokens(self) -> int:
        """N: what the blocks run over."""
        return self.rows * self.prefix + self.suffix_tokens

    @property
    def cost(self) -> float:
        """In proportion to the time that it takes, in tokens of a dense stream."""
        tokens = self.tokens if self.is_dense else self.tokens * (1 + RAGGED_COST)
        return tokens + POSITION_COST * (self.rows * self.completions * self.length + self.scored)

    def holds(self, need: np.ndarray) -> bool:
        """Whether a micro-batch of this need can be padded to this shape."""
        return bool(
            need["rows"] <= self.rows
            and need["shortest_prompt"] >= self.prefix
            and need["longest"] - self.prefix <= self.length
            and need["scored"] <= self.scored
            and need["widest"] <= self.width
            and (
                self.is_dense
                or (
                    need["tokens"] - need["rows"] * self.prefix <= self.suffix_tokens
                    and (self.uses > 1 or self.completions == 1 or need["longest_prompt"] <= self.prefix)
                )
            )
        )


def need_of(prompts: np.ndarray, seen: np.ndarray, scored: np.ndarray) -> np.ndarray:
    """What rows need: NEED [].

    prompts: int [b], tokens. seen, scored: int [b, K], positions of each whole sequence, and its scored tokens.
    """
    tokens = real_tokens(prompts, seen).sum()
    figures = len(prompts), prompts.min(), prompts.max(), seen.max(), tokens, scored.sum(), scored.max()
    return np.array(figures, NEED)


def real_tokens(prompts: np.ndarray, seen: np.ndarray) -> np.ndarray:
    """The fewest tokens that rows need, prompts once: int64 [b]. prompts: [b] tokens; seen: [b, K] positions."""
    tokens: np.ndarray = prompts + (seen - prompts[:, None]).sum(axis=1)
    return tokens


def batch_shape_of(needs: np.ndarray, completions: int, length_multiple: int, shared_prompts: bool) -> BatchShape:
    """The cheapest shape for all of some micro-batches (whole rows, unless shared_prompts). needs: NEED [m].

    P is a multiple of length_multiple that no prompt is shorter than. T, N, M and C are padded to rungs of a
    ladder (see pad_length), so that attention has aligned lengths.
    """
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
) -> list[BatchShape]:
    """At most `most` shapes, the cheapest first, that every micro-batch can be padded to at little cost.

    needs: NEED, the micro-batches of some epochs. largest: what no micro-batch needs more than. The micro-batches
    are put in order and cut into groups, each with the cheapest shape for all of it, so that the cost of all is
    least (dynamic programming). Each shape serves the first epoch: none is new after it.
    """

    def fitting(needs: np.ndarray) -> BatchShape:
        return batch_shape_of(needs, completions, length_multiple, shared_prompts)

    def bounds(needs: np.ndarray) -> np.ndarray:
        """Two needs with a shape of their own that holds all of these."""
        both = np.array([tuple(needs[name].max() for name in NEED.names or ())] * 2, NEED)
        both["shortest_prompt"], both["rows"][1] = needs["shortest_prompt"].min(), needs["rows"].min()
        return both

    together = np.concatenate(needs)
    together["widest"] = largest["widest"]  # costs nothing, and is one thing less that may not fit
    size = together["tokens"] if shared_prompts else together["rows"] * together["longest"]
    runs = np.array_split(together[np.argsort(size, kind="stable")], min(RUNS, len(together)))
    ends = [bounds(run) for run in runs]
    ends[-1] = np.append(ends[-1], largest)
    # cheapest[g, j]: the first j runs in g groups; costs[i, j]: runs i to j - 1 in one.
    costs = np.full((len(runs) + 1, len(runs) + 1), np.inf)
    for i in range(len(runs)):
        for j in range(i, len(runs)):
            costs[i, j + 1] = fitting(np.concatenate(ends[i : j + 1])).cost * sum(map(len, runs[i : j + 1]))
    cheapest, cuts = np.full((most + 1, len(runs) + 1), np.inf), np.zeros((most + 1, len(runs) + 1), np.int64)
    cheapest[0, 0] = 0
    for groups in range(1, most + 1):
        ways = cheapest[groups - 1][:, None] + costs
        cuts[groups], cheapest[groups] = ways.argmin(axis=0), ways.min(axis=0)
    shapes, end = set(), len(runs)
    for groups in range(int(cheapest[:, -1].argmin()), 0, -1):
        start = int(cuts[groups, end])
        shapes.add(fitting(np.concatenate(ends[start:end])))
        end = start
    ascending = sorted(shapes, key=lambda shape: shape.cost)
    # What holds everything has to stay: it replaces the largest of those that the first epoch uses, and so is used.
    used = {shape for need in needs[0] if (shape := first_that_holds(ascending, need)) is not None}
    holds_all = next(shape for shape in ascending if shape.holds(largest))
    if holds_all not in used:
        used = used - {max(used, key=lambda shape: shape.cost)} | {holds_all}
    return sorted(used, key=lambda shape: shape.cost)


def first_that_holds(shapes: Sequence[BatchShape], need: np.ndarray) -> BatchShape | None:
    """The first shape that a micro-batch can be padded to."""
    return next((shape for shape in shapes if shape.holds(need)), None)


def padded_lengths(lengths: np.ndarray, length_multiple: int) -> np.ndarray:
    """What whole rows of these lengths are padded to: int64, of the same shape."""
    distinct, inverse = np.unique(lengths, return_inverse=True)
    padded: np.ndarray = np.array([pad_length(n, length_multiple) for n in distinct.tolist()])[inverse]
    return padded


def pad_length(length: int, multiple: int, steps: int = 16) -> int:
    """The least rung >= length of a ladder: `steps` multiples of `multiple`, then steps / 2 an octave."""
    step = multiple
    while length > steps * step:
        step *= 2
    return -(-max(length, 1) // step) * step
