"""Examples ➜ one micro-batch as a stream of tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from lib.data.batch_shapes import BatchShape, batch_shape_of, first_that_holds, need_of
from lib.data.dataset import Example


@dataclass(frozen=True, eq=False)
class Batch:
    """Examples of K completions as one stream of N tokens, each computed once: b rows, the last of them padding, maybe.

    The stream begins with the first P tokens of every prompt, b * P of them, row by row. What follows, the suffix, is
    either dense, the other T tokens of each of the b * K sequences (a prompt's end once for each completion),
    or ragged: what is left of a prompt, then its completions, without padding between them; then `suffix_indices` says
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
    places: np.ndarray
    """int32 [N, 2]: each token's row, of `rows`, and its number among the row's tokens, which no layout changes: those
    of the prompt, then of each completion; -1 for padding."""
    longest: np.ndarray
    """int32 [examples]: positions that the model sees of each row's longest sequence."""
    suffix_indices: np.ndarray | None
    """int32 [b, K, T]: where in the suffix a sequence's tokens from P on are; -1 past its end."""
    suffix_uses: np.ndarray | None
    """int32 [N - b * P, 1 or K]: the inverse: where in b * K * T a suffix token is used; -1 for nowhere."""
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
    labels: np.ndarray | None = None
    """bool [examples]: whether each completion is desirable; None for records without labels."""
    mismatched: Batch | None = None
    """The same rows' prompts with another prompt's completion each: they have no gradient."""
    noise_keys: np.ndarray | None = None
    """uint32 [N, 2]: of the noise on each token's embedding; None for none (lib/training/neftune.py)."""
    noise_scales: np.ndarray | None = None
    """float32 [N]: of the noise."""
    rewards: np.ndarray | None = None
    """float32 [b, K], of groups (lib/data/groups.py); NaN for completions that are left out."""
    reward_deviations: np.ndarray | None = None
    """float32 [b], of groups: the deviation of all rewards of the data set, in every row."""
    sampling_logps: np.ndarray | None = None
    """float32 [b, K, C], of groups: of the scored tokens, under the policy that sampled them; 0 where masked."""

    @property
    def inputs(self) -> dict[str, int | np.ndarray]:
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
            "noise_keys",
            "noise_scales",
            "rewards",
            "reward_deviations",
            "sampling_logps",
        )
        return {name: value for name in names if (value := getattr(self, name)) is not None}

    def padded(self, figures: np.ndarray) -> np.ndarray:
        """Figures of the examples, [examples, ...], with zeros for rows of padding: [b, ...]."""
        whole = np.zeros((len(self.mask), *figures.shape[1:]), figures.dtype)
        whole[: len(figures)] = figures
        return whole

    @property
    def shapes(self) -> tuple[object, ...]:
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

    Padding is on the right, where a causal model's real positions do not see it. Rows of padding come last and have no
    scored token. Scored are the tokens that are learnt, but not the first one after an empty prompt: no position comes
    before it.
    """
    assert examples, "a rank without rows has no batch"
    sequences = _Sequences(examples)
    need = need_of(
        sequences.prompts, sequences.seen.reshape(-1, sequences.count), sequences.scored.reshape(-1, sequences.count)
    )
    shape = first_that_holds(shapes, need) or batch_shape_of(
        need[None], sequences.count, length_multiple, shared_prompts
    )
    suffix_indices = _suffix_indices(sequences, shape)
    tokens, offsets, places = _stream(examples, sequences, shape, suffix_indices)
    scored, targets, logp_indices, mask = _scored(sequences, shape, suffix_indices)
    ragged_indices = ragged_uses = None
    if not shape.is_dense:
        is_used = np.arange(shape.length) < sequences.suffix_lengths(shape)[:, None]
        ragged_indices = _with_padding(np.where(is_used, suffix_indices, -1), shape, -1)
        ragged_uses = _invert(ragged_indices, shape.suffix_tokens, shape.uses)
    mask = _with_padding(mask, shape, False)
    return Batch(
        rows=np.array([e.row for e in examples], np.int64),
        prefix_length=shape.prefix,
        tokens=tokens,
        offsets=offsets,
        places=places,
        longest=sequences.seen.reshape(-1, sequences.count).max(axis=1).astype(np.int32),
        suffix_indices=None if ragged_indices is None else ragged_indices.astype(np.int32),
        suffix_uses=ragged_uses,
        scored=scored,
        targets=targets,
        logp_indices=_with_padding(logp_indices, shape, 0).astype(np.int32),
        mask=mask,
        completion_tokens=int(sequences.scored.sum()),
        computed_tokens=len(tokens),
        real_tokens=int(need["tokens"]),
        labels=None if examples[0].label is None else np.array([e.label for e in examples], bool),
        rewards=_rewards(examples, mask),
        reward_deviations=_reward_deviations(examples, mask),
        sampling_logps=_sampling_logps(examples, sequences, mask),
    )


def collate_trained(
    examples: Sequence[Example],
    length_multiple: int,
    shared_prompts: bool,
    has_mismatched: bool,
    shapes: Sequence[BatchShape] = (),
) -> Batch:
    """`collate` for a training step: a mismatched completion, the last of each example, is a batch of its own."""
    if not has_mismatched:
        return collate(examples, length_multiple, shared_prompts, shapes)
    own = [Example.of(example.row, example.stored[:-1], example.label) for example in examples]
    mismatched = [
        Example.of(example.row, [example.prompt_ids, example.stored[-1]], example.label) for example in examples
    ]
    batch = collate(own, length_multiple, shared_prompts, shapes)
    return replace(batch, mismatched=collate(mismatched, length_multiple, shared_prompts))


class _Sequences:
    """The prompts with each of their completions, row by row, and their lengths."""

    def __init__(self, examples: Sequence[Example]):
        self.count = len(examples[0].completions)
        """K: sequences of a row."""
        self.pairs = [(e.prompt_ids, completion) for e in examples for completion in e.completions]
        self.prompts = np.array([len(e.prompt_ids) for e in examples])
        """int64 [rows]: tokens of each prompt."""
        self.seen = np.array([len(prompt) + len(completion) - 1 for prompt, completion in self.pairs])
        """int64 [rows * K]: positions that the model sees."""
        self.scored_indices = [indices for e in examples for indices in e.scored_indices]
        """int64 [tokens scored] each: where in its completion."""
        self.scored = np.array([len(indices) for indices in self.scored_indices])
        """int64 [rows * K]: tokens that are scored."""

    def suffix_lengths(self, shape: BatchShape) -> np.ndarray:
        """int64 [rows * K]: positions from P on."""
        return np.maximum(self.seen - shape.prefix, 0)


def _suffix_indices(sequences: _Sequences, shape: BatchShape) -> np.ndarray:
    """Where in the suffix each sequence's tokens from P on are: int64 [rows * K, T]; past its end, anything."""
    if shape.is_dense:
        return np.arange(len(sequences.pairs) * shape.length).reshape(-1, shape.length)
    count = sequences.count
    shared = np.repeat(sequences.prompts - shape.prefix, count)  # suffix tokens that a row's completions share
    is_first = np.arange(len(sequences.pairs)) % count == 0
    own = sequences.suffix_lengths(shape) - shared  # tokens of a completion alone
    starts = np.cumsum(own + is_first * shared) - own  # of these, in the suffix
    prompt_ends = np.repeat(starts[::count], count)
    at = np.arange(shape.length)
    first = np.where(at < shared[:, None], prompt_ends[:, None] - shared[:, None], starts[:, None] - shared[:, None])
    return first + at


def _stream(
    examples: Sequence[Example], sequences: _Sequences, shape: BatchShape, suffix_indices: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The stream's tokens, and each one's position in its sequence: int32 [N] each; Batch's `places`."""
    rows, prefix = shape.rows, shape.prefix
    tokens = np.zeros(shape.tokens, np.int32)
    offsets = np.zeros_like(tokens)
    prefixes = tokens[: rows * prefix].reshape(rows, prefix)
    places = np.full((shape.tokens, 2), -1, np.int32)
    for row, e in enumerate(examples):
        prefixes[row] = e.prompt_ids[:prefix]
        places[row * prefix : (row + 1) * prefix] = np.stack([np.full(prefix, row), np.arange(prefix)], axis=1)
    offsets[: len(examples) * prefix] = np.tile(np.arange(prefix), len(examples))
    lengths = sequences.suffix_lengths(shape)
    for index, (prompt, completion) in enumerate(sequences.pairs):
        where = rows * prefix + suffix_indices[index, : lengths[index]]
        tokens[where] = np.concatenate([prompt[prefix:], completion[:-1]])
        positions = np.arange(prefix, sequences.seen[index])
        offsets[where] = positions
        row, k = divmod(index, sequences.count)
        earlier = sum(len(other) for _, other in sequences.pairs[index - k : index])  # of other completions
        places[where, 0], places[where, 1] = row, positions + earlier * (positions >= len(prompt))
    return tokens, offsets, places


def _scored(
    sequences: _Sequences, shape: BatchShape, suffix_indices: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Batch's `scored` and `targets`, int32 [M]; `logp_indices`, int64 [rows * K, C]; `mask`, bool [rows * K, C]."""
    rows, prefix, counts = shape.rows, shape.prefix, sequences.scored
    scored, targets = np.zeros((2, shape.scored), np.int32)
    mask = np.arange(shape.width) < counts[:, None]
    logp_indices = np.where(mask, (np.cumsum(counts) - counts)[:, None] + np.arange(shape.width), 0)
    for index, (prompt, completion) in enumerate(sequences.pairs):
        scored_indices = sequences.scored_indices[index]
        positions = len(prompt) - 1 + scored_indices  # the token before predicts it
        in_prefix = index // sequences.count * prefix + positions
        in_suffix = rows * prefix + suffix_indices[index, np.maximum(positions - prefix, 0)]
        where = logp_indices[index, : counts[index]]
        scored[where] = np.where(positions < prefix, in_prefix, in_suffix)
        targets[where] = completion[scored_indices]
    return scored, targets, logp_indices, mask


def _rewards(examples: Sequence[Example], mask: np.ndarray) -> np.ndarray | None:
    """Batch's `rewards`."""
    if examples[0].rewards is None:
        return None
    rewards = np.full(mask.shape[:2], np.nan, np.float32)
    rewards[: len(examples)] = np.stack([e.rewards for e in examples if e.rewards is not None])
    return rewards


def _reward_deviations(examples: Sequence[Example], mask: np.ndarray) -> np.ndarray | None:
    """Batch's `reward_deviations`."""
    deviation = examples[0].reward_deviation
    return None if deviation is None else np.full(len(mask), deviation, np.float32)


def _sampling_logps(examples: Sequence[Example], sequences: _Sequences, mask: np.ndarray) -> np.ndarray | None:
    """Batch's `sampling_logps`."""
    if examples[0].sampling_logps is None:
        return None
    of_sequences = [logps for e in examples for logps in e.sampling_logps or ()]
    scored = [logps[at] for logps, at in zip(of_sequences, sequences.scored_indices, strict=True)]
    laid_out = np.zeros(mask.shape, np.float32)
    laid_out[mask] = np.concatenate(scored)
    return laid_out


def _with_padding(array: np.ndarray, shape: BatchShape, filler: int) -> np.ndarray:
    """[rows * K, ...] ➜ [b, K, ...], rows of padding at the end."""
    whole = np.full((shape.rows * shape.completions, *array.shape[1:]), filler, array.dtype)
    whole[: len(array)] = array
    return whole.reshape(shape.rows, shape.completions, -1)


def _invert(suffix_indices: np.ndarray, size: int, uses: int) -> np.ndarray:
    """For each of `size` suffix tokens where in `suffix_indices` [b, K, T] it is used, in order: int32 [size, uses]."""
    suffix_uses = np.full((size, uses), -1, np.int32)
    flat = np.arange(suffix_indices.size).reshape(suffix_indices.shape)
    for k in reversed(range(suffix_indices.shape[1])):
        inside = suffix_indices[:, k] >= 0
        used = suffix_indices[:, k][inside]
        if uses > 1:
            suffix_uses[used, 1:] = suffix_uses[used, :-1]
        suffix_uses[used, 0] = flat[:, k][inside]
    return suffix_uses
