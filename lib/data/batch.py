"""Micro-batches: the rows of a rank as streams of tokens, each prompt once, padded to one of a few shapes."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from lib.data.batch_shapes import BatchShape, RunShapes, batch_shape_of, first_that_holds, need_of
from lib.data.dataset import Dataset, Example
from lib.data.groups import group_arrays
from lib.data.prompts import Prompts
from lib.data.streaming import StreamedDataset

# Of a Batch, what the model needs.
INPUTS = ["prefix_length", "tokens", "offsets", "suffix_indices", "suffix_uses", "scored", "targets"]
INPUTS += ["logp_indices", "mask", "noise_keys", "noise_scales"]
INPUTS += ["rewards", "completion_lengths", "reward_deviations", "sampling_logps"]


@dataclass(frozen=True, eq=False)
class Batch:
    """Examples of K completions as one stream of N tokens: b rows, the last of them padding, maybe. First come P tokens
    of every prompt, row by row; then the suffix: dense, the other T tokens of each of the b * K sequences, or ragged:
    what is left of a prompt, then its completions. Sequences come without their last token."""

    rows: np.ndarray  # int64: the examples' rows in the data set, one for each row that is not padding
    prefix_length: int  # P
    tokens: np.ndarray  # int32 [N]
    offsets: np.ndarray  # int32 [N]: each token's position in its sequence; 0 for padding
    places: np.ndarray  # int32 [N, 2]: each token's row, and its number in prompt and completions; -1 for padding
    longest: np.ndarray  # int32 [examples]: positions that the model sees of each row's longest sequence
    suffix_indices: np.ndarray | None  # int32 [b, K, T], ragged: where a sequence's tokens from P on are, else -1
    suffix_uses: np.ndarray | None  # int32 [N - b * P, 1 or K]: where in b * K * T a suffix token is used, else -1
    scored: np.ndarray  # int32 [M]: where in the stream the scored tokens are predicted; 0 for padding
    targets: np.ndarray  # int32 [M]: the tokens that are scored; 0 for padding
    logp_indices: np.ndarray  # int32 [b, K, C]: where in M a completion's scored tokens are; 0 where masked
    mask: np.ndarray  # bool [b, K, C]: true where `logp_indices` means a token
    real_tokens: int  # The fewest that would do: every prompt once, every completion without its last token
    labels: np.ndarray | None = None  # bool [examples], of unpaired feedback: whether each completion is desirable
    mismatched: Batch | None = None  # the same prompts with another prompt's completion each, without gradient
    noise_keys: np.ndarray | None = None  # uint32 [N, 2]: of each token's dropout and noise
    noise_scales: np.ndarray | None = None  # float32 [N]: of the noise
    # Of groups (lib/data/groups.py):
    rewards: np.ndarray | None = None  # float32 [b, K]; NaN for completions that are left out
    completion_lengths: np.ndarray | None = None  # float32 [b, K]: tokens, masked ones too; 0 for those left out
    reward_deviations: np.ndarray | None = None  # float32 [b]: that of all rewards of the data set, in every row
    sampling_logps: np.ndarray | None = None  # float32 [b, K, C]: under the policy that sampled; 0 where masked

    @property
    def computed_tokens(self) -> int:
        """Positions that the model runs over, N."""
        return len(self.tokens)

    @property
    def inputs(self) -> dict[str, int | np.ndarray]:
        """What the model needs of it; absent entries left out."""
        return {name: value for name in INPUTS if (value := getattr(self, name)) is not None}

    def padded(self, figures: np.ndarray) -> np.ndarray:
        """Figures of the examples, [examples, ...], with zeros for rows of padding: [b, ...]."""
        whole = np.zeros((len(self.mask), *figures.shape[1:]), figures.dtype)
        whole[: len(figures)] = figures
        return whole

    @property
    def shapes(self) -> tuple[object, ...]:
        """Equal for batches that a compiled step needs no new trace for."""
        sizes = (value.shape for value in self.inputs.values() if isinstance(value, np.ndarray))
        return (self.prefix_length, *sizes, len(self.inputs))


MicroBatch = tuple[Batch, np.ndarray | None]  # with its reference's log-probabilities: [b, K]; of groups [b, K, C]


def collate(
    examples: Sequence[Example], length_multiple: int, shared_prompts: bool, shapes: Sequence[BatchShape] = ()
) -> Batch:
    """One micro-batch, padded to the first of `shapes` that holds it; to one of its own, where none does. Padding is on
    the right; rows of padding come last. Scored are the learnt tokens, but not the first one after an empty prompt: no
    position comes before it."""
    assert examples, "a rank without rows has no batch"
    seen = np.array([[len(e.prompt_ids) + len(completion) - 1 for completion in e.completions] for e in examples])
    counts = np.array([[*map(len, e.scored_indices)] for e in examples])
    need = need_of(np.array([len(e.prompt_ids) for e in examples]), seen, counts)
    shape = first_that_holds(shapes, need) or batch_shape_of(need[None], seen.shape[1], length_multiple, shared_prompts)
    return _batch(examples, shape, seen, int(need["tokens"]))


def _batch(examples: Sequence[Example], shape: BatchShape, seen: np.ndarray, real_tokens: int) -> Batch:
    b, prefix, length, completions = shape.rows, shape.prefix, shape.length, shape.completions
    tokens, offsets = np.zeros((2, shape.tokens), np.int32)
    places = np.full((shape.tokens, 2), -1, np.int32)
    suffix_indices = np.full((b, completions, length), -1, np.int32)
    suffix_uses = np.full((shape.suffix_tokens, shape.uses), -1, np.int32)
    scored, targets = np.zeros((2, shape.scored), np.int32)
    logp_indices = np.zeros((b, completions, shape.width), np.int32)
    mask = np.zeros(logp_indices.shape, bool)
    free = first = 0  # of the suffix, ragged; of the scored tokens
    for row, e in enumerate(examples):
        prompt, earlier = len(e.prompt_ids), 0
        shared = prompt - prefix  # tokens of the suffix that the completions share, where it is ragged
        shared_at, free = free, free + shared
        for k, (completion, scored_of) in enumerate(zip(e.completions, e.scored_indices, strict=True)):
            positions = np.arange(seen[row, k])
            behind, dense = np.arange(seen[row, k] - prefix), (row * completions + k) * length
            suffix = dense + behind  # where the sequence's tokens behind the prefix are in the suffix
            if not shape.is_dense:
                suffix = np.where(behind < shared, shared_at, free - shared) + behind
                free += len(completion) - 1
                suffix_indices[row, k, : len(suffix)] = suffix
                suffix_uses[suffix, np.where(behind < shared, k % shape.uses, 0)] = dense + behind
            at = np.concatenate([row * prefix + positions[:prefix], b * prefix + suffix])
            tokens[at], offsets[at] = np.concatenate([e.prompt_ids, completion[:-1]]), positions
            places[at, 0], places[at, 1] = row, positions + earlier * (positions >= prompt)
            earlier += len(completion)
            last = first + len(scored_of)
            scored[first:last], targets[first:last] = at[prompt - 1 + scored_of], completion[scored_of]
            of_completion = row, k, slice(len(scored_of))
            logp_indices[of_completion], mask[of_completion] = np.arange(first, last), True
            first = last
    return Batch(
        rows=np.array([e.row for e in examples], np.int64),
        prefix_length=prefix,
        tokens=tokens,
        offsets=offsets,
        places=places,
        longest=seen.max(axis=1).astype(np.int32),
        suffix_indices=None if shape.is_dense else suffix_indices,
        suffix_uses=None if shape.is_dense else suffix_uses,
        scored=scored,
        targets=targets,
        logp_indices=logp_indices,
        mask=mask,
        real_tokens=real_tokens,
        labels=None if examples[0].label is None else np.array([e.label for e in examples], bool),
        **group_arrays(examples, mask),
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
    trained = [Example.of(e.row, e.stored[:-1], e.label) for e in examples]
    mismatched = [Example.of(e.row, [e.prompt_ids, e.stored[-1]], e.label) for e in examples]
    batch = collate(trained, length_multiple, shared_prompts, shapes)
    return replace(batch, mismatched=collate(mismatched, length_multiple, shared_prompts))


class MicroBatches:
    """Makes the micro-batches of a rank's rows, each with its reference. reference: float32 [n, K] by row, or None.
    shapes: where the step is compiled."""

    def __init__(
        self,
        data: Dataset | StreamedDataset | Prompts,
        reference: np.ndarray | None,
        length_multiple: int,
        shared_prompts: bool,
        shapes: RunShapes | None = None,
    ):
        self.data, self.reference = data, reference
        self.length_multiple, self.shared_prompts = length_multiple, shared_prompts
        self.shapes_of: Callable[[int], list[BatchShape]] = functools.cache(shapes.of) if shapes else lambda _: []

    def of(self, parts: Sequence[np.ndarray], micro_batch_size: int) -> list[MicroBatch]:
        """Micro-batches of these rows, of at most micro_batch_size each, without those that turn out to be unusable."""
        layout = self.length_multiple, self.shared_prompts, self.data.has_mismatched, self.shapes_of(micro_batch_size)
        made = []
        for part in parts:
            if examples := self.data.examples(part.tolist()):
                reference = None if self.reference is None else self.reference[part]
                made.append((collate_trained(examples, *layout), reference))
        return made

    def within(self, made: list[MicroBatch], most: int | None) -> list[MicroBatch]:
        """The same rows in micro-batches of at most so many; those that are small enough stay as they are."""
        if most is None:
            return made
        smaller = []
        for pair in made:
            count = -(-len(pair[0].rows) // most)  # 9 pairs by 4 are 3, 3, 3
            smaller += [pair] if count == 1 else self.of(np.array_split(pair[0].rows, count), most)
        return smaller
