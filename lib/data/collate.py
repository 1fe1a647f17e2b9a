"""Examples ➜ one micro-batch as a stream of tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from lib.data.batch_shapes import BatchShape, batch_shape_of, first_that_holds, need_of
from lib.data.dataset import Example


@dataclass(frozen=True, eq=False)
class Batch:
    """Examples of K completions as one stream of N tokens, each computed once: b rows, of which the last may be padding.

    The stream begins with the first P tokens of every prompt, b * P of them, row by row. What follows is
    either dense, the other T tokens of each of the b * K sequences (a prompt's end once for each completion),
    or ragged: what is left of a prompt, then its completions, without padding between them; `suffix_indices` then tells
    where each sequence's tokens are. Without shared prompts P is 0 and the stream is dense: whole rows of T
    tokens, one after the other. Sequences come without their last token, which nothing is predicted from.
    """

    rows: np.ndarray
    """int64: the examples' rows in the data set, one for each row that is not padding."""
    prefix_length: int
    """P."""
    tokens: np.ndarray
    """int32 [N]."""
    offsets: np.ndarray
    """int32 [N]: each token's position in its sequence; 0 for padding."""
    suffix_indices: np.ndarray | None
    """int32 [b, K, T]: where a sequence's tokens from P on are, counted suffix_tokens the prefixes; -1 past its end."""
    suffix_uses: np.ndarray | None
    """int32 [N - b * P, 1 or K]: the inverse, where in b * K * T a token is used; -1 for nowhere."""
    scored: np.ndarray
    """int32 [M]: where in the stream the scored tokens are predicted; 0 for padding."""
    targets: np.ndarray
    """int32 [M]: the tokens that are scored; 0 for padding."""
    logp_indices: np.ndarray
    """int32 [b, K, C]: where in M a completion's scored tokens are; 0 where masked."""
    mask: np.ndarray
    """bool [b, K, C]: true where `logp_indices` means a token."""
    completion_tokens: int
    """Tokens scored."""
    computed_tokens: int
    """Positions that the model runs over, N."""
    real_tokens: int
    """The fewest that would do: every prompt once, every completion without its last token."""

    @property
    def inputs(self) -> dict[str, Any]:
        """What the model needs of it; absent entries left out."""
        names = (
            "prefix_length",
            "tokens",
            "offsets",
            "suffix_indices",
            "suffix_uses",
            "scored",
            "targets",
            "logp_indices",
            "mask",
        )
        return {name: value for name in names if (value := getattr(self, name)) is not None}

    def padded(self, figures: np.ndarray) -> np.ndarray:
        """Figures of the examples, [examples, ...], with zeros for rows of padding: [b, ...]."""
        whole = np.zeros((len(self.mask), *figures.shape[1:]), figures.dtype)
        whole[: len(figures)] = figures
        return whole

    @property
    def shapes(self) -> tuple[Any, ...]:
        """Equal for batches that a compiled step needs no new trace for."""
        return (
            self.prefix_length,
            *(value.shape for value in self.inputs.values() if isinstance(value, np.ndarray)),
            len(self.inputs),
        )


def collate(
    examples: Sequence[Example], length_multiple: int, shared_prompts: bool, shapes: Sequence[BatchShape] = ()
) -> Batch:
    """One micro-batch, padded to the first of `shapes` that holds it; to one of its own, where none does.

    Padding stands on the right, where a causal model's real positions do not see it; rows of padding come last
    and have no scored token. The first completion token of an empty prompt has no position before it: it is not
    scored.
    """
    assert examples, "a rank without rows has no batch"
    sequences = [(e.prompt_ids, completion) for e in examples for completion in e.completions]
    count = len(examples[0].completions)
    seen = np.array([len(prompt) + len(completion) - 1 for prompt, completion in sequences])
    prompts = np.array([len(e.prompt_ids) for e in examples])
    counts = np.array([len(completion) - (not len(prompt)) for prompt, completion in sequences])  # scored
    need = need_of(prompts, seen.reshape(-1, count), counts.reshape(-1, count))
    shape = first_that_holds(shapes, need) or batch_shape_of(need[None], count, length_multiple, shared_prompts)
    rows, prefix, length, suffix_tokens = shape.rows, shape.prefix, shape.length, shape.suffix_tokens

    tails = np.maximum(seen - prefix, 0)
    inside = np.arange(length) < tails[:, None]
    shared_tails = np.repeat(prompts - prefix, count)  # tokens suffix_tokens the prefix that the completions share
    if shape.is_dense:
        suffix_indices = np.arange(len(sequences) * length).reshape(-1, length)
    else:
        first = np.arange(len(sequences)) % count == 0
        own = tails - shared_tails  # tokens of a completion alone
        starts = np.cumsum(own + first * shared_tails) - own  # of these, in the stream
        ends_of_prompts = np.repeat(starts[::count], count)
        at = np.arange(length)
        suffix_indices = (
            np.where(
                at < shared_tails[:, None],
                ends_of_prompts[:, None] - shared_tails[:, None],
                starts[:, None] - shared_tails[:, None],
            )
            + at
        )
    tokens = np.zeros(rows * prefix + suffix_tokens, np.int32)
    offsets = np.zeros_like(tokens)
    head = tokens[: rows * prefix].reshape(rows, prefix)
    for row, e in enumerate(examples):
        head[row] = e.prompt_ids[:prefix]
    offsets[: len(examples) * prefix] = np.tile(np.arange(prefix), len(examples))
    for index, (prompt, completion) in enumerate(sequences):
        where = rows * prefix + suffix_indices[index, : tails[index]]
        tokens[where] = np.concatenate([prompt[prefix:], completion[:-1]])
        offsets[where] = np.arange(prefix, seen[index])

    scored, targets = np.zeros((2, shape.scored), np.int32)
    mask = np.arange(shape.width) < counts[:, None]
    logp_indices = np.where(mask, (np.cumsum(counts) - counts)[:, None] + np.arange(shape.width), 0)
    for index, (_, completion) in enumerate(sequences):
        positions = np.arange(seen[index] - counts[index], seen[index])
        behind_prefix = rows * prefix + suffix_indices[index, np.maximum(positions - prefix, 0)]
        where = logp_indices[index, : counts[index]]
        scored[where] = np.where(positions < prefix, index // count * prefix + positions, behind_prefix)
        targets[where] = completion[len(completion) - counts[index] :]

    def with_padding(array: np.ndarray, filler: int) -> np.ndarray:
        """[sequences, ...] ➜ [b, K, ...], rows of padding at the end."""
        whole = np.full((rows * count, *array.shape[1:]), filler, array.dtype)
        whole[: len(array)] = array
        return whole.reshape(rows, count, -1)

    suffix_uses = None
    if not shape.is_dense:
        suffix_indices = with_padding(np.where(inside, suffix_indices, -1), -1)
        suffix_uses = _invert(suffix_indices, suffix_tokens, shape.uses)
    return Batch(
        rows=np.array([e.row for e in examples], np.int64),
        prefix_length=prefix,
        tokens=tokens,
        offsets=offsets,
        suffix_indices=None if shape.is_dense else suffix_indices.astype(np.int32),
        suffix_uses=suffix_uses,
        scored=scored,
        targets=targets,
        logp_indices=with_padding(logp_indices, 0).astype(np.int32),
        mask=with_padding(mask, False),
        completion_tokens=int(counts.sum()),
        computed_tokens=len(tokens),
        real_tokens=int(need["tokens"]),
    )


def _invert(suffix_indices: np.ndarray, size: int, uses: int) -> np.ndarray:
    """For each of `size` tokens the logp_indices in `suffix_indices` [b, K, T] that use it, in order: int32 [size, uses]."""
    suffix_uses = np.full((size, uses), -1, np.int32)
    flat = np.arange(suffix_indices.size).reshape(suffix_indices.shape)
    for k in reversed(range(suffix_indices.shape[1])):
        inside = suffix_indices[:, k] >= 0
        used = suffix_indices[:, k][inside]
        if uses > 1:
            suffix_uses[used, 1:] = suffix_uses[used, :-1]
        suffix_uses[used, 0] = flat[:, k][inside]
    return suffix_uses
