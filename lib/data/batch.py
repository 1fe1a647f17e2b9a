"""The shapes of micro-batches: what rows need, the cheapest layout for them, and a few shapes for a whole run."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from lib.config.settings import Config
from lib.data.dataset import Dataset, Example, Sized
from lib.data.order import epoch_order, micro_batches
from lib.data.prompts import Prompts
from lib.data.streaming import StreamedDataset

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
    """The sizes of a Batch's arrays (lib/data/batch.py): b, K, P, T, the N - b * P suffix tokens, M and C."""

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


@dataclass(frozen=True)
class TraceCost:
    """What decides how many shapes a run has: the price of one more, and of a micro-batch that is small."""

    tokens: float = 0.0
    """That the model computes in the time of a trace."""
    least_tokens: float = 0.0
    """That a micro-batch costs at least, because launching its kernels takes that long."""


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
    trace: TraceCost = TraceCost(),
) -> list[BatchShape]:
    """At most `most` shapes, the cheapest first, that every micro-batch can be padded to at little cost.

    needs: NEED, the micro-batches of some epochs. largest: what no micro-batch needs more than. trace: what a shape
    has to save in these epochs. The micro-batches are put in order and cut into groups, each with the cheapest shape
    for all of it, so that the cost of all and of the traces is least (dynamic programming). Each shape serves the
    first epoch: none is new after it.
    """

    def fitting(needs: np.ndarray) -> BatchShape:
        return batch_shape_of(needs, completions, length_multiple, shared_prompts)

    def bounds(needs: np.ndarray) -> np.ndarray:
        """Two needs with a shape of their own that holds all of these."""
        both = np.empty(2, NEED)
        for name in NEED.names or ():
            both[name] = needs[name].max()
        both["shortest_prompt"], both["rows"][1] = needs["shortest_prompt"].min(), needs["rows"].min()
        return both

    together = np.concatenate(needs)
    together["widest"] = largest["widest"]  # costs nothing, and is one thing less that may not fit
    size = together["tokens"] if shared_prompts else together["rows"] * together["longest"]
    runs = np.array_split(together[np.argsort(size, kind="stable")], min(RUNS, len(together)))
    ends = np.concatenate([*map(bounds, runs), largest[None]])  # two a run; the last run has to hold the largest, too

    def of_runs(start: int, end: int) -> BatchShape:
        return fitting(ends[2 * start : 2 * end if end < len(runs) else None])

    # cheapest[g, j]: the first j runs in g groups; costs[i, j]: runs i to j - 1 in one.
    costs = np.full((len(runs) + 1, len(runs) + 1), np.inf)
    for i in range(len(runs)):
        for j in range(i, len(runs)):
            cost = max(of_runs(i, j + 1).cost, trace.least_tokens)
            costs[i, j + 1] = cost * sum(map(len, runs[i : j + 1])) + trace.tokens
    cheapest, cuts = np.full((most + 1, len(runs) + 1), np.inf), np.zeros((most + 1, len(runs) + 1), np.int64)
    cheapest[0, 0] = 0
    for groups in range(1, most + 1):
        ways = cheapest[groups - 1][:, None] + costs
        cuts[groups], cheapest[groups] = ways.argmin(axis=0), ways.min(axis=0)
    shapes, end = set(), len(runs)
    for groups in range(int(cheapest[:, -1].argmin()), 0, -1):
        start = int(cuts[groups, end])
        shapes.add(of_runs(start, end))
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
    completion_lengths: np.ndarray | None = None
    """float32 [b, K], of groups: the completions' tokens, masked ones too; 0 for those that are left out."""
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
            "completion_lengths",
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
        computed_tokens=len(tokens),
        real_tokens=int(need["tokens"]),
        labels=None if examples[0].label is None else np.array([e.label for e in examples], bool),
        **_of_groups(examples, sequences, mask),
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


def _of_groups(examples: Sequence[Example], sequences: _Sequences, mask: np.ndarray) -> dict[str, Any]:
    """Batch's `rewards` and what else groups have; nothing for other examples."""
    if examples[0].rewards is None:
        return {}
    found: dict[str, np.ndarray] = {}
    for name, filler in (("rewards", np.nan), ("completion_lengths", 0.0)):
        if getattr(examples[0], name) is not None:
            found[name] = np.full(mask.shape[:2], filler, np.float32)
            found[name][: len(examples)] = [getattr(example, name) for example in examples]
    if examples[0].reward_deviation is not None:
        found["reward_deviations"] = np.full(len(mask), examples[0].reward_deviation, np.float32)
    if examples[0].sampling_logps is not None:
        of_sequences = [logps for e in examples for logps in e.sampling_logps or ()]
        scored = [logps[at] for logps, at in zip(of_sequences, sequences.scored_indices, strict=True)]
        found["sampling_logps"] = np.zeros(mask.shape, np.float32)
        found["sampling_logps"][mask] = np.concatenate(scored)
    return found


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
        trace: what a shape costs.
    """

    def __init__(
        self,
        data: Dataset | StreamedDataset | Prompts,
        reference: np.ndarray | None,
        config: Config,
        length_multiple: int,
        shared_prompts: bool,
        is_compiled: bool,
        trace: TraceCost = TraceCost(),
    ):
        self.trace = trace
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
        needs, steps = [], 0
        for epoch in range(EPOCHS):
            order = epoch_order(data.lengths, train.seed, epoch, train.global_batch_size)
            starts = range(0, len(order), train.global_batch_size)
            starts = starts[:: -(-len(starts) // STEPS)]
            steps += len(starts)
            parts = [
                part
                for start in starts
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
        # Of one epoch, however many the run has: more steps, later, change no shape, and so no bit.
        epochs = steps / -(-len(data) // train.global_batch_size)
        trace = TraceCost(self.trace.tokens * epochs, self.trace.least_tokens)
        return few_shapes(needs, largest, train.max_traces, count, self.length_multiple, self.shared_prompts, trace)


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
