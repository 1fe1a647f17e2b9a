"""Answers of a model to prompts, sampled many at a time, with the log-probability of every token.

What a call of `Sampler.sample` gives follows from the model, its prompts, the settings and the seed, to the last bit:
from who samples, and from other calls, it does not. So ranks that take the same chunks of prompts, in whatever order,
make the same samples as one rank. The numbers that decide a token follow from (seed, prompt, k, position) alone.

A prompt's keys and values are kept once for all its answers: attention is that over the prompt and that over the row's
tokens, put together by their partition functions (bifurcated attention, arXiv:2403.08845, section 4).
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol, TypedDict

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx.utils import tree_map
from mlx_lm.models.cache import make_prompt_cache

from lib.data.batch import pad_length
from lib.data.tokenizer import Tokenizer
from lib.distributed.world import World
from lib.errors import Stopped
from lib.model.layout import layout_of
from lib.model.logps import head_of
from lib.model.long_attention import local_attention
from lib.model.patches import attend_by_cache
from lib.model.token_stream import Window, rounding_tolerance, run_backbone

# The logarithm of a threshold, of some 20 nats at most, is halved so often: tokens whose probabilities differ by less
# than a part of 2e-5 are kept together.
HALVINGS = 20


def uniforms(seed: Sequence[int], prompt_id: int, k: int, count: int) -> np.ndarray:
    """One number in [0, 1) for each position of the k-th sample of a prompt: float32 [count], multiples of 2^-23.

    They follow from these arguments alone (Philox, Salmon et al. 2011), and a longer row begins with the shorter one.
    """
    generator = np.random.Philox(np.random.SeedSequence([*seed, prompt_id, k]))
    numbers: np.ndarray = (generator.random_raw(count) >> np.uint64(41)).astype(np.float32) * np.float32(2.0**-23)
    return numbers


def draw(logits: mx.array, numbers: mx.array, temperature: float, top_p: float) -> tuple[mx.array, mx.array]:
    """The tokens drawn, int32 [B], and their log-probabilities, float32 [B].

    The log-probabilities are those of softmax(logits / temperature), before top_p leaves tokens out: the ratio in
    GRPO's loss compares them with a pass that has no top_p. A temperature of 0 takes the likeliest token; its
    log-probability is that at temperature 1.

    Args:
        logits: [B, V].
        numbers: float32 [B], in [0, 1): the token is the first whose cumulative probability exceeds its row's.
        top_p: the fewest tokens whose probabilities sum up to so much are drawn from (nucleus sampling,
            arXiv:1904.09751, section 3.1).
    """
    logits = logits.astype(mx.float32)
    if temperature:
        logits = logits / temperature
    partition = mx.logsumexp(logits, axis=-1, keepdims=True)
    if temperature:
        chosen = _first_beyond(nucleus(mx.exp(logits - partition), top_p), numbers)
    else:
        chosen = mx.argmax(logits, axis=-1)
    chosen = chosen.astype(mx.int32)
    return chosen, (mx.take_along_axis(logits, chosen[:, None], axis=-1) - partition).squeeze(-1)


def nucleus(probabilities: mx.array, top_p: float) -> mx.array:
    """The probabilities of the fewest tokens that sum up to top_p, 0 for all others: float32 [B, V], not scaled.

    Without sorting: the logarithm of the least probability that is kept is found by halving an interval. What is below
    (1 - top_p) / V has at most 1 - top_p together, so it need not be kept.
    """
    if top_p >= 1:
        return probabilities
    count, vocabulary = probabilities.shape
    low, high = mx.full((count, 1), math.log((1 - top_p) / vocabulary)), mx.zeros((count, 1))
    for _ in range(HALVINGS):
        middle = (low + high) / 2
        kept = mx.where(probabilities >= mx.exp(middle), probabilities, 0.0)
        is_enough = kept.sum(axis=-1, keepdims=True) >= top_p
        low, high = mx.where(is_enough, middle, low), mx.where(is_enough, high, middle)
    return mx.where(probabilities >= mx.exp(low), probabilities, 0.0)


def _first_beyond(weights: mx.array, numbers: mx.array) -> mx.array:
    """The first index whose cumulative weight exceeds that part of the total: [B]. Its own weight is not 0."""
    cumulative = mx.cumsum(weights, axis=-1)
    is_beyond = (cumulative > numbers[:, None] * cumulative[:, -1:]) & (weights > 0)
    return mx.argmax(is_beyond, axis=-1)


UNSEEN = -1e30  # a masked score: finite, since a row may see nothing of its prompt through a window


class PromptArrays(TypedDict):
    """P prompts, padded on the right to S tokens, and which rows go on from each."""

    keys: list[mx.array]
    """[P, heads, S, head_dim], one a block."""
    values: list[mx.array]
    lengths: mx.array
    """int32 [P]."""
    members: mx.array
    """int32 [P, W]: the rows of each prompt; some row where there are fewer than W."""
    homes: mx.array
    """int32 [B]: where in P * W each row is."""
    starts: mx.array
    """int32 [B]: the column of each row's first token."""


class RowArrays(TypedDict):
    """B rows that are decoded, T columns wide."""

    tokens: mx.array
    """int32 [B]: the last token of each, which no block has seen yet."""
    offsets: mx.array
    """int32 [B]: its position in its sequence."""
    column: mx.array
    """int32 [1]: where its keys and values go."""
    keys: list[mx.array]
    """[B, heads, T, head_dim], one a block."""
    values: list[mx.array]


def prefill(model: nn.Module, tokens: mx.array, lengths: mx.array) -> tuple[mx.array, list[mx.array], list[mx.array]]:
    """The logits behind each prompt, [P, V], and every block's keys and values, [P, heads, S, head_dim].

    tokens: int32 [P, S], padded on the right; lengths: int32 [P].
    """
    caches = [_Prefill(layout_of(model).attention_window) for _ in model.layers]
    hidden = run_backbone(model, tokens, cache=caches)
    last = mx.take_along_axis(hidden, (lengths - 1)[:, None, None], axis=1).squeeze(1)
    return head_of(model)(last), [cache.keys for cache in caches], [cache.values for cache in caches]


def next_logits(model: nn.Module, rows: RowArrays, prompts: PromptArrays) -> tuple[mx.array, RowArrays]:
    """The logits behind each row's last token, [B, V], and the rows with this token's keys and values.

    The rows that come back have the same `tokens`: who draws the next ones puts them there.
    """
    layout = _Layout(rows, prompts, layout_of(model).attention_window)
    caches = [_Continued(layout, i) for i in range(len(model.layers))]
    logits = model(rows["tokens"][:, None], cache=caches).squeeze(1)
    after: RowArrays = {
        "tokens": rows["tokens"],
        "offsets": rows["offsets"] + 1,
        "column": rows["column"] + 1,
        "keys": [cache.keys for cache in caches],
        "values": [cache.values for cache in caches],
    }
    return logits, after


class _Prefill:
    """Keeps what a block computes of the prompts; padding on the right is not seen by what stands before it."""

    offset = 0

    def __init__(self, window: int | None):
        self.window = window
        self.keys = self.values = mx.array(0.0)

    def make_mask(self, N: int, return_array: bool = False, window_size: int | None = None) -> Window | None:
        return None if window_size is None else Window(window_size)

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        self.keys, self.values = keys, values
        return keys, values

    def attend(
        self, queries: mx.array, keys: mx.array, values: mx.array, scale: float, mask: Any, **options: Any
    ) -> mx.array:
        return local_attention(queries, keys, values, _narrowest(self.window, mask), scale=scale, **options)


class _Layout:
    """Who sees what, for all blocks."""

    def __init__(self, rows: RowArrays, prompts: PromptArrays, window: int | None):
        self.rows, self.prompts, self.window = rows, prompts, window
        self._visible: dict[int | None, tuple[mx.array, mx.array]] = {}  # by window

    def visible(self, window: int | None) -> tuple[mx.array, mx.array]:
        """Of the prompts, [P, 1, 1 or W, S], and of the rows' own columns, [B, 1, T]."""
        if window not in self._visible:
            rows, prompts = self.rows, self.prompts
            positions = mx.arange(prompts["keys"][0].shape[2])
            of_prompt = (positions < prompts["lengths"][:, None])[:, None, None]
            columns, column = mx.arange(rows["keys"][0].shape[2]), rows["column"]
            own = (columns >= prompts["starts"][:, None]) & (columns <= column)
            if window is not None:
                offsets = mx.take(rows["offsets"], prompts["members"])
                of_prompt = of_prompt & (offsets[:, None, :, None] - positions < window)
                own = own & (column - columns < window)
            self._visible[window] = of_prompt, own[:, None]
        return self._visible[window]


class _Continued:
    """One block's cache."""

    def __init__(self, layout: _Layout, block: int):
        self.layout = layout
        self.offset = layout.rows["offsets"]
        self.keys, self.values = layout.rows["keys"][block], layout.rows["values"][block]
        self.prompt_keys, self.prompt_values = layout.prompts["keys"][block], layout.prompts["values"][block]

    def make_mask(self, N: int, return_array: bool = False, window_size: int | None = None) -> Window | None:
        return None if window_size is None else Window(window_size)

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        column = self.layout.rows["column"]
        self.keys = mx.slice_update(self.keys, keys, column, axes=(2,))
        self.values = mx.slice_update(self.values, values, column, axes=(2,))
        return keys, values

    def attend(
        self, queries: mx.array, keys: mx.array, values: mx.array, scale: float, mask: Any, **options: Any
    ) -> mx.array:
        """[B, query heads, 1, head_dim] ➜ the same."""
        if any(option is not None for option in options.values()):
            raise TypeError(f"attention with {', '.join(options)}")
        (count, heads, _, size), kv_heads = queries.shape, keys.shape[1]
        of_prompt, own = self.layout.visible(_narrowest(self.layout.window, mask))
        queries = (queries * scale).reshape(count, kv_heads, heads // kv_heads, size)
        parts = [_partial(queries, self.keys, self.values, own[:, None]), self._over_prompts(queries, of_prompt)]
        top = mx.maximum(parts[0][1], parts[1][1])
        outputs, totals = (sum(part[i] * mx.exp(part[1] - top) for part in parts) for i in (0, 2))
        return (outputs / totals).astype(values.dtype).reshape(count, heads, 1, -1)

    def _over_prompts(self, queries: mx.array, visible: mx.array) -> tuple[mx.array, mx.array, mx.array]:
        """`_partial` over each row's prompt."""
        members, homes = self.layout.prompts["members"], self.layout.prompts["homes"]
        (prompts, width), (_, kv_heads, shared, size) = members.shape, queries.shape
        if visible.shape[2] > 1:
            visible = mx.repeat(visible, shared, axis=2)
        spread = mx.take(queries, members.reshape(-1), axis=0).reshape(prompts, width, kv_heads, shared, size)
        together = spread.swapaxes(1, 2).reshape(prompts, kv_heads, width * shared, size)

        def back(x: mx.array) -> mx.array:
            x = x.reshape(prompts, kv_heads, width, shared, -1).swapaxes(1, 2)
            return mx.take(x.reshape(prompts * width, kv_heads, shared, -1), homes, axis=0)

        outputs, top, total = map(back, _partial(together, self.prompt_keys, self.prompt_values, visible))
        return outputs, top, total


def _partial(
    queries: mx.array, keys: mx.array, values: mx.array, visible: mx.array
) -> tuple[mx.array, mx.array, mx.array]:
    """Attention over some of the positions: sum of exp(score - top) times values, top, and sum of exp(score - top)."""
    scores = mx.where(visible, (queries @ keys.swapaxes(-1, -2)).astype(mx.float32), UNSEEN)
    top = scores.max(axis=-1, keepdims=True)
    weights = mx.exp(scores - top)
    outputs = (weights.astype(values.dtype) @ values).astype(mx.float32)
    return outputs, top, weights.sum(axis=-1, keepdims=True)


def _narrowest(window: int | None, mask: Any) -> int | None:
    if not (mask is None or isinstance(mask, Window)):
        raise TypeError("this model makes its own attention mask")
    return min((size for size in (window, mask.size if mask else None) if size is not None), default=None)


def cannot_continue(model: nn.Module) -> str | None:
    """None for a model whose prompts and rows may be decoded so; else why not, in words.

    It is tried, on random tokens: recurrent layers, or an attention of the family's own, show there.
    """
    attend_by_cache(model)
    long, short = (np.random.default_rng(i).integers(0, 16, n).tolist() for i, n in enumerate((5, 3)))
    own = [[7, 2], [3, 9], [4, 4]]  # of the first prompt, the second, the first
    was_training = model.training
    model.eval()
    try:
        wanted = [model(mx.array([(long, short, long)[i] + own[i]]))[0, -1] for i in range(3)]
        logits, keys, values = prefill(model, mx.array([long, [*short, 0, 0]]), mx.array([5, 3]))
        empty = [mx.zeros((3, *x.shape[1:2], 3, x.shape[3]), x.dtype) for x in (*keys, *values)]
        prompts: PromptArrays = {
            "keys": keys,
            "values": values,
            "lengths": mx.array([5, 3]),
            "members": mx.array([[0, 2], [1, 1]]),
            "homes": mx.array([0, 2, 1]),
            "starts": mx.array([1, 1, 1]),
        }
        rows: RowArrays = {
            "tokens": mx.array([pair[0] for pair in own]),
            "offsets": mx.array([5, 3, 5]),
            "column": mx.array([1]),
            "keys": empty[: len(keys)],
            "values": empty[len(keys) :],
        }
        _, rows = next_logits(model, rows, prompts)
        made, _ = next_logits(model, {**rows, "tokens": mx.array([pair[1] for pair in own])}, prompts)
        whole = mx.stack([*wanted, model(mx.array([long]))[0, -1]]).astype(mx.float32)
        found = mx.concatenate([made, logits[:1]]).astype(mx.float32)
        error = (mx.linalg.norm(found - whole) / mx.linalg.norm(whole)).item()
    except Exception as reason:  # a family's own code, handed what it does not expect, may raise anything
        text = str(reason).splitlines()[0][:80] if str(reason) else ""
        return f"its blocks do not take rows that share a prompt ({type(reason).__name__}: {text})"
    finally:
        model.train(was_training)
    if error <= rounding_tolerance(model):
        return None
    return f"rows that share a prompt would change its outputs by {error:.2g} of their norm"


PREFILL_TOKENS = 16384  # of prompts in one pass
POSITIONS = 16  # what prompts are padded to; more where they are long
COLUMNS = 64  # what the rows' own keys and values grow by; more where there are many


class Rectangles:
    """B rows, T columns wide, and the P prompts that they go on from, as `next_logits` takes them.

    Padding is at the end: rows that are not read, prompts that no row has.
    """

    rows: RowArrays
    prompts: PromptArrays

    def __init__(self, model: nn.Module):
        self.model = model
        self.column = 0  # where the next keys and values go
        self.count = 0  # B
        self.groups = np.zeros(0, np.int64)  # of each row that is not padding: its prompt
        self.starts = np.zeros(0, np.int32)  # of these rows: the column of the first token
        self.lengths = np.zeros(0, np.int32)  # of each prompt that is not padding

    def would_shrink(self, live: int) -> bool:
        """Whether a smaller batch has room for so many rows."""
        return live > 0 and _row_count(live) < self.count

    def lay_out(self, kept: Sequence[int], prompts: Sequence[list[int]], samples: int) -> mx.array | None:
        """The kept rows, then `samples` rows for each of some new prompts, whose first tokens `set_tokens` sets.

        Returns:
            The logits behind the new prompts, [prompts, V]; None without any.
        """
        starts = self.starts[kept]
        first = int(starts.min(initial=self.column))  # columns before it are not read
        width, at = self.column - first, mx.array(kept, mx.int32)
        stay, groups = np.unique(self.groups[kept], return_inverse=True)
        new_lengths = np.array([len(prompt) for prompt in prompts], np.int32)
        lengths = np.concatenate([self.lengths[stay], new_lengths])
        new_groups = len(stay) + np.repeat(np.arange(len(prompts)), samples)
        length = pad_length(int(lengths.max()), POSITIONS)
        self.groups = np.concatenate([groups, new_groups])
        self.starts = np.concatenate([starts - first, np.full(len(new_groups), width, np.int32)])
        self.lengths, self.column, self.count = lengths, width, _row_count(len(self.groups))
        logits, new_arrays = self._prefilled(prompts, length) if prompts else (None, [])
        kept_prompts, kept_rows = ([], []) if not len(kept) else (self._prompt_arrays(stay), self._row_arrays(at))
        places, columns = pad_length(len(lengths), 4, 4), pad_length(width + 1, COLUMNS)
        joined = [
            _sized(mx.concatenate([_sized(x, len(x), length) for x in parts]), places, length)
            for parts in zip(*filter(None, (kept_prompts, new_arrays)), strict=True)
        ]
        own = [_sized(x[:, :, first : first + width], self.count, columns) for x in kept_rows] or [
            mx.zeros((self.count, x.shape[1], columns, x.shape[3]), x.dtype) for x in joined
        ]
        blocks = len(joined) // 2
        members, homes = _membership(self.groups, places, self.count)
        self.prompts = {
            "keys": joined[:blocks],
            "values": joined[blocks:],
            "lengths": mx.array(np.pad(lengths, (0, places - len(lengths)), constant_values=1)),
            "members": mx.array(members),
            "homes": mx.array(homes),
            "starts": mx.array(np.pad(self.starts, (0, self.count - len(self.starts)), constant_values=width)),
        }
        new_offsets = mx.array(np.repeat(new_lengths, samples))
        padding = mx.ones(self.count - len(self.groups), mx.int32)
        old_offsets = mx.take(self.rows["offsets"], at) if len(kept) else mx.zeros(0, mx.int32)
        old_tokens = mx.take(self.rows["tokens"], at) if len(kept) else mx.zeros(0, mx.int32)
        self.rows = {
            "tokens": mx.concatenate([old_tokens, mx.zeros_like(new_offsets), padding]),
            "offsets": mx.concatenate([old_offsets, new_offsets, padding]),
            "column": mx.array([width]),
            "keys": own[:blocks],
            "values": own[blocks:],
        }
        return logits

    def set_tokens(self, tokens: mx.array) -> None:
        """The first tokens of the rows that began last: int32 [new rows]."""
        end = len(self.groups)
        self.rows["tokens"] = mx.concatenate(
            [self.rows["tokens"][: end - len(tokens)], tokens, self.rows["tokens"][end:]]
        )

    def widen(self, steps: int) -> None:
        """Makes room for the keys and values of so many more tokens of each row."""
        columns = pad_length(self.column + steps, COLUMNS)
        for name in ("keys", "values"):
            self.rows[name] = [_sized(x, len(x), max(columns, x.shape[2])) for x in self.rows[name]]

    def _prompt_arrays(self, stay: np.ndarray) -> list[mx.array]:
        at = mx.array(stay)
        return [mx.take(x, at, axis=0) for x in (*self.prompts["keys"], *self.prompts["values"])]

    def _row_arrays(self, at: mx.array) -> list[mx.array]:
        return [mx.take(x, at, axis=0) for x in (*self.rows["keys"], *self.rows["values"])]

    def _prefilled(self, prompts: Sequence[list[int]], length: int) -> tuple[mx.array, list[mx.array]]:
        """Logits [prompts, V], and the keys of every block, then its values, [prompts, heads, length, head_dim]."""
        tokens = np.zeros((len(prompts), length), np.int32)
        for row, prompt in zip(tokens, prompts, strict=True):
            row[: len(prompt)] = prompt
        lengths, size = np.array([len(prompt) for prompt in prompts], np.int32), max(1, PREFILL_TOKENS // length)
        passes = []
        for start in range(0, len(prompts), size):
            rows = slice(start, start + size)
            logits, keys, values = prefill(self.model, mx.array(tokens[rows]), mx.array(lengths[rows]))
            passes.append([logits, *keys, *values])
            mx.eval(passes[-1])  # one pass's activations at a time
        logits, *arrays = (mx.concatenate(parts) for parts in zip(*passes, strict=True))
        return logits, arrays


def _row_count(rows: int) -> int:
    """B for so many rows."""
    return pad_length(rows, 8, 4)


def _membership(groups: np.ndarray, prompts: int, rows: int) -> tuple[np.ndarray, np.ndarray]:
    """PromptArrays' `members`, int32 [prompts, W], and `homes`, int32 [rows]. groups: [rows or fewer]."""
    order = np.argsort(groups, kind="stable")
    sizes = np.bincount(groups, minlength=prompts)
    index = np.empty(len(groups), np.int64)  # among the rows of its prompt
    index[order] = np.arange(len(groups)) - np.repeat(np.cumsum(sizes) - sizes, sizes)
    width = int(sizes.max())
    members, homes = np.zeros((prompts, width), np.int32), np.zeros(rows, np.int32)
    members[groups, index] = np.arange(len(groups))
    homes[: len(groups)] = groups * width + index
    return members, homes


def _sized(x: mx.array, count: int, length: int) -> mx.array:
    """[n, heads, l, head_dim] ➜ [count, heads, length, head_dim], cut or filled up with zeros at its ends."""
    x = x[:, :, :length]
    missing = count - x.shape[0], length - x.shape[2]
    return mx.pad(x, [(0, missing[0]), (0, 0), (0, missing[1]), (0, 0)]) if any(missing) else x


BLOCK = 16  # tokens between two looks at what was drawn: until then nothing waits for the device
PASS_TOKENS = 2048  # of a prompt in one pass, where prompts are answered one after the other
ROOM = 4  # new prompts begin once this part of the batch is free: laying it out anew costs about a token


@dataclass(frozen=True)
class Prompt:
    """What is answered."""

    id: int
    """Its row in the file of prompts."""
    tokens: list[int]
    """At least one."""


@dataclass(frozen=True)
class Sample:
    """One answer, and the policy's log-probabilities."""

    prompt_id: int
    k: int
    """Its number among the answers to this prompt, from 0."""
    prompt_tokens: list[int]
    tokens: list[int]
    """With the end token, where it was drawn; up to the token that completes a stop string."""
    logps: list[float]
    """float32, nats, one a token: of softmax(logits / temperature), before top_p leaves tokens out."""
    finish: Literal["stop", "length"]
    text: str
    """Without the end token, and without a stop string and what follows it."""


class Sampling(Protocol):
    """The settings: rollouts.* has them by these names."""

    @property
    def samples(self) -> int:
        """K, the answers to each prompt."""

    @property
    def temperature(self) -> float:
        """0 takes the likeliest token, always."""

    @property
    def top_p(self) -> float: ...
    @property
    def max_tokens(self) -> int: ...
    @property
    def stop(self) -> Sequence[str]: ...
    @property
    def batch_size(self) -> int:
        """The most answers that are written at the same time; never less than those to one prompt."""


@dataclass
class GrowingAnswer:
    """An answer that is being written."""

    prompt: Prompt
    k: int
    numbers: np.ndarray
    """float32: what decides its tokens."""
    tokens: list[int] = field(default_factory=list)
    logps: list[float] = field(default_factory=list)
    finish: Literal["stop", "length"] | None = None


class Sampler:
    """Samples answers; made once, so that what is compiled serves every call.

    Args:
        compiled: whether a step is traced once for every shape of the batch; by default on a GPU.
        world: whose ranks hold consecutive blocks of the model, if they do: all sample the same at the same time.

    Attributes:
        why_alone: why this model's prompts are answered one after the other; None where they are not.
    """

    def __init__(
        self,
        model: nn.Module,
        tokenizer: Tokenizer,
        settings: Sampling,
        compiled: bool | None = None,
        world: World = World(),  # noqa: B008  (frozen)
    ):
        self.model, self.tokenizer, self.settings, self.world = model, tokenizer, settings, world
        # To try it, ranks with unlike blocks would have to fail in the same way.
        self.why_alone = "it is pipelined" if world.divides_model else cannot_continue(model)
        self.end_tokens = sorted(tokenizer.eos_token_ids)
        self.step: Callable[[RowArrays, PromptArrays, mx.array], tuple[RowArrays, mx.array]] = self._step
        if mx.default_device() == mx.gpu if compiled is None else compiled:
            self.step = mx.compile(self._step, inputs=[model.state])

    def sample(
        self, prompts: Sequence[Prompt], seed: Sequence[int], is_wanted: Callable[[], bool] = lambda: True
    ) -> Iterator[Sample]:
        """`settings.samples` answers to each prompt: those of a prompt together and in order, prompts as they end.

        seed: whole numbers that no other call for the same prompts has, e.g. train.seed and the round. is_wanted: asked
        every few tokens; once it says no, nothing more comes.

        Raises:
            Stopped: a probability is not finite.
        """
        assert all(prompt.tokens for prompt in prompts), "nothing comes before the first token of an empty prompt"
        was_training = self.model.training
        self.model.eval()
        try:
            if self.why_alone is None:
                yield from self._together(prompts, seed, is_wanted)
            else:
                for prompt in prompts:
                    yield from self._alone(prompt, seed, is_wanted)
        finally:
            self.model.train(was_training)

    def _step(self, rows: RowArrays, prompts: PromptArrays, numbers: mx.array) -> tuple[RowArrays, mx.array]:
        logits, rows = next_logits(self.model, rows, prompts)
        tokens, logps = self._draw(logits, numbers)
        return {**rows, "tokens": tokens}, logps

    def _draw(self, logits: mx.array, numbers: mx.array) -> tuple[mx.array, mx.array]:
        tokens, logps = draw(logits, numbers, self.settings.temperature, self.settings.top_p)
        if self.world.divides_model:
            mx.eval(tokens, logps)  # first all ranks pass through the model, then they hear what the last one drew
            tokens, logps = self.world.workers.decide(tokens), self.world.workers.decide(logps)
        return tokens, logps

    # ---- All prompts together; where answers end, other prompts begin

    def _together(
        self, prompts: Sequence[Prompt], seed: Sequence[int], is_wanted: Callable[[], bool]
    ) -> Iterator[Sample]:
        size, samples = self.settings.batch_size, self.settings.samples
        waiting, groups = deque(prompts), list[list[GrowingAnswer]]()  # under way, as they began
        batch, answers = Rectangles(self.model), list[GrowingAnswer]()  # the rows of the batch
        while (waiting or groups) and is_wanted():
            live = [i for i, answer in enumerate(answers) if answer.finish is None]
            free, begun = size - len(live), list[list[GrowingAnswer]]()
            if waiting and (not live or free >= max(samples, size // ROOM)):
                begun = [
                    self._begin(waiting.popleft(), seed) for _ in range(min(len(waiting), max(1, free // samples)))
                ]
            if begun or batch.would_shrink(len(live)):
                new = [answer for group in begun for answer in group]
                logits = batch.lay_out(live, [group[0].prompt.tokens for group in begun], samples)
                answers = [answers[i] for i in live] + new
                groups += begun
                if logits is not None:
                    numbers = mx.array(np.stack([answer.numbers[0] for answer in new]))
                    tokens, logps = self._draw(mx.repeat(logits, samples, axis=0), numbers)
                    batch.set_tokens(tokens)
                    self._take(new, np.array(tokens)[None], np.array(logps)[None])
            batch.widen(BLOCK)
            drawn = []
            for numbers in self._numbers(answers, batch.count):
                batch.rows, logps = self.step(batch.rows, batch.prompts, numbers)
                batch.column += 1
                mx.async_eval(batch.rows, logps)
                drawn.append((batch.rows["tokens"], logps))
            if drawn:
                self._take(answers, *(np.array(mx.stack(each)) for each in zip(*drawn, strict=True)))
            over = [group for group in groups if all(answer.finish for answer in group)]
            groups = [group for group in groups if not all(answer.finish for answer in group)]
            for group in over:
                yield from map(self._finished, group)

    # ---- One prompt after the other, by the model's own cache

    def _alone(self, prompt: Prompt, seed: Sequence[int], is_wanted: Callable[[], bool]) -> Iterator[Sample]:
        """For layers whose state is their own affair: K rows of one length, so that nothing is padded."""
        answers, cache = self._begin(prompt, seed), make_prompt_cache(self.model)
        *before, last = prompt.tokens
        for start in range(0, len(before), PASS_TOKENS):
            self.model(mx.array([before[start : start + PASS_TOKENS]]), cache=cache)
            mx.eval([each.state for each in cache])
        for each in cache if before else ():
            each.state = tree_map(self._for_each_sample, each.state)
        tokens = mx.full((len(answers),), last, dtype=mx.int32)
        while any(answer.finish is None for answer in answers):
            if not is_wanted():
                return
            drawn = []
            for numbers in self._numbers(answers, len(answers)):
                tokens, logps = self._draw(self.model(tokens[:, None], cache=cache)[:, -1], numbers)
                mx.async_eval(tokens, logps)
                drawn.append((tokens, logps))
            self._take(answers, *(np.array(mx.stack(each)) for each in zip(*drawn, strict=True)))
        yield from map(self._finished, answers)

    def _for_each_sample(self, state: object) -> object:
        is_batch = isinstance(state, mx.array) and state.ndim > 0
        return mx.repeat(state, self.settings.samples, axis=0) if is_batch else state

    # ---- What was drawn

    def _begin(self, prompt: Prompt, seed: Sequence[int]) -> list[GrowingAnswer]:
        count = self.settings.max_tokens + BLOCK  # a row may be drawn on until the next look at it
        samples = range(self.settings.samples)
        return [GrowingAnswer(prompt, k, uniforms(seed, prompt.id, k, count)) for k in samples]

    def _numbers(self, answers: Sequence[GrowingAnswer], rows: int) -> list[mx.array]:
        """What decides the next tokens, at most BLOCK, of every row: float32 [rows] each; none where all are over."""
        left = [self.settings.max_tokens - len(answer.tokens) for answer in answers if answer.finish is None]
        count = min(BLOCK, max(left, default=0))
        numbers = np.zeros((rows, count), np.float32)
        for row, answer in zip(numbers, answers, strict=False):
            if answer.finish is None:
                row[:] = answer.numbers[len(answer.tokens) : len(answer.tokens) + count]
        return list(mx.array(numbers.T))

    def _take(self, answers: Sequence[GrowingAnswer], tokens: np.ndarray, logps: np.ndarray) -> None:
        """Adds what was drawn to the answers that are not over, up to where they end. tokens, logps: [n, rows]."""
        is_end = np.isin(tokens, self.end_tokens)
        until_end = np.where(is_end.any(axis=0), is_end.argmax(axis=0) + 1, len(tokens) + 1)
        for row, answer in enumerate(answers):
            if answer.finish is not None:
                continue
            before = len(answer.tokens)
            count = min(len(tokens), self.settings.max_tokens - before, int(until_end[row]))
            if not np.isfinite(logps[:count, row]).all():
                raise Stopped(f"the model's probabilities behind prompt {answer.prompt.id} are not finite")
            answer.tokens += tokens[:count, row].tolist()
            answer.logps += logps[:count, row].tolist()
            if (cut := self._stopped_at(answer, before)) is not None:
                del answer.tokens[cut:], answer.logps[cut:]
                answer.finish = "stop"
            elif count == until_end[row]:
                answer.finish = "stop"
            elif len(answer.tokens) == self.settings.max_tokens:
                answer.finish = "length"

    def _stopped_at(self, answer: GrowingAnswer, before: int) -> int | None:
        """How many of its tokens complete a stop string, which the first `before` do not; None where none do."""
        if not self.settings.stop:
            return None
        tokens = self._without_end(answer.tokens)
        reach = max(len(stop.encode()) for stop in self.settings.stop)  # the most tokens that a stop string comes in
        if self._stop_in(self.tokenizer.decode(tokens[max(0, before - reach - 1) :])) is None:
            return None
        lengths = range(before + 1, len(tokens) + 1)
        return next((n for n in lengths if self._stop_in(self.tokenizer.decode(tokens[:n])) is not None), None)

    def _stop_in(self, text: str) -> int | None:
        """Where the first stop string begins."""
        return min((at for stop in self.settings.stop if (at := text.find(stop)) >= 0), default=None)

    def _without_end(self, tokens: list[int]) -> list[int]:
        return tokens[:-1] if tokens and tokens[-1] in self.end_tokens else tokens

    def _finished(self, answer: GrowingAnswer) -> Sample:
        text = self.tokenizer.decode(self._without_end(answer.tokens))
        prompt, finish = answer.prompt, answer.finish or "length"
        return Sample(
            prompt.id, answer.k, prompt.tokens, answer.tokens, answer.logps, finish, text[: self._stop_in(text)]
        )
