"""A batch through the model's blocks as one stream of tokens, each token once: prompts are shared.

The blocks see the stream of lib/data/batch.py as N sequences of one token: every layer but attention computes each
token by itself, and the rotary embedding takes an offset for each. Attention recognises a stream by the type of its
cache: there the stream is laid out as rectangles, all of them causal, so that no mask is needed. The last block gives
its keys and values for all tokens, and computes what follows attention for those alone that the head sees. No model
file knows of it.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Required, TypedDict, cast

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx.utils import tree_flatten
from mlx_lm.models import base

from lib.config.settings import DataSettings
from lib.model.layout import backbone_of, block_list_of, embedding_of, layout_of
from lib.model.patches import attend_by_cache
from lib.model.quantised import device
from lib.system.hardware import Device


def length_multiple(settings: DataSettings) -> int:
    """What lengths are padded to: as set, else 64 on a GPU, where 1,023 positions took twice as long as 1,024."""
    return settings.length_multiple or (64 if mx.default_device() == mx.gpu else 16)


class StreamInputs(TypedDict, total=False):
    """The inputs of lib/data/batch.py's Batch, which says what each is, as MLX arrays."""

    prefix_length: Required[int]
    tokens: Required[mx.array]
    offsets: mx.array
    suffix_indices: mx.array
    suffix_uses: mx.array
    scored: mx.array
    targets: mx.array
    logp_indices: mx.array
    mask: Required[mx.array]
    noise_keys: mx.array
    noise_scales: mx.array
    rewards: mx.array
    completion_lengths: mx.array
    reward_deviations: mx.array
    sampling_logps: mx.array


def arrays_of(inputs: Mapping[str, int | np.ndarray]) -> StreamInputs:
    """A batch's `inputs` on the device."""
    arrays = {name: mx.array(value) if isinstance(value, np.ndarray) else value for name, value in inputs.items()}
    return cast(StreamInputs, arrays)


# ---- The blocks


def hidden_states(model: nn.Module, inputs: StreamInputs, window: int | None = None) -> mx.array:
    """What the head would see of every token of the stream: [N, D] (logits, of a model without a backbone).

    window: tokens that each attends to, itself included; for models that take a stream.
    """
    return _states(model, inputs, window, None)[0]


def scored_states(model: nn.Module, inputs: StreamInputs, window: int | None = None) -> mx.array:
    """What the head sees of the scored tokens: `hidden_states` of these, [M, D]."""
    scored = inputs["scored"]
    states, are_scored = _states(model, inputs, window, scored if layout_of(model).ends_early else None)
    return states if are_scored else mx.take(states, scored, axis=0)


def _states(
    model: nn.Module, inputs: StreamInputs, window: int | None, scored: mx.array | None
) -> tuple[mx.array, bool]:
    """What the head would see: of every token, or of the scored ones alone, where the last block ends with those."""
    tokens, (rows, completions, _) = inputs["tokens"], inputs["mask"].shape
    if model.training and "noise_keys" in inputs:
        place = embedding_of(model)
        assert place is not None, "a step without an embedding was made"
        silent: StreamInputs = {**inputs}
        keys, scales = silent.pop("noise_keys"), silent.pop("noise_scales")
        with Replaced(*place, _noisy(place[0][place[1]], keys, scales)):
            return _states(model, silent, window, scored)
    if inputs["prefix_length"] == 0 and "suffix_indices" not in inputs and window is None:
        hidden = run_backbone(model, tokens.reshape(rows * completions, -1))
        return hidden.reshape(len(tokens), -1), False
    stream = Stream(
        inputs["offsets"],
        rows,
        completions,
        inputs["prefix_length"],
        inputs.get("suffix_indices"),
        inputs.get("suffix_uses"),
        window,
    )
    blocks = block_list_of(model) if scored is not None else None
    if blocks is None or scored is None or not (ending := EndingBlock.at_end_of(blocks, stream, scored)):
        hidden = run_backbone(model, tokens[:, None], cache=[stream] * len(model.layers))
        return hidden.reshape(-1, hidden.shape[-1]), False
    blocks[ending.index] = ending  # type: ignore[call-overload]
    try:
        hidden = run_backbone(model, tokens[:, None], cache=[stream] * len(blocks))
    finally:
        blocks[ending.index] = ending.block
    return hidden.reshape(-1, hidden.shape[-1]), True


def _noisy(embedding: nn.Module, keys: mx.array, scales: mx.array) -> Callable[[mx.array], mx.array]:
    """An embedding with noise on the tokens of a stream. keys: uint32 [N, 2]; scales: float32 [N], times sqrt(D)."""

    def call(tokens: mx.array) -> mx.array:
        embedded = embedding(tokens)
        size = embedded.shape[-1]
        noise = mx.vmap(lambda key: mx.random.uniform(-1, 1, (size,), key=key))(keys)
        return embedded + (scales[:, None] / size**0.5 * noise).reshape(embedded.shape).astype(embedded.dtype)

    return call


class Stream:
    """Passed to blocks as their cache: lays the stream out for attention.

    Args:
        offset: int32 [N], the name by which blocks ask for the positions.
        prefix: P.
        suffix_indices, suffix_uses: of a ragged stream (see lib/data/batch.py's Batch).
        window: tokens that each attends to, itself included.
    """

    attended: mx.array
    """What attention gave all tokens in the block that ran last."""

    def __init__(
        self,
        offset: mx.array,
        rows: int,
        completions: int,
        prefix: int,
        suffix_indices: mx.array | None,
        suffix_uses: mx.array | None,
        window: int | None = None,
    ):
        self.offset, self.rows, self.completions, self.prefix = offset, rows, completions, prefix
        self.suffix_indices, self.suffix_uses, self.window = suffix_indices, suffix_uses, window
        self.suffix_tokens = offset.size - rows * prefix
        self.length = self.suffix_tokens // (rows * completions) if suffix_indices is None else suffix_indices.shape[-1]
        if suffix_indices is not None and suffix_uses is not None:
            # A token that several sequences share takes its output from the first of them.
            flat = suffix_indices.reshape(-1)
            first = mx.take(suffix_uses[:, 0], mx.maximum(flat, 0)) == mx.arange(flat.size)
            self.suffix_indices, self.owned = flat, mx.where(first, flat, -1)

    def make_mask(self, N: int, return_array: bool = False, window_size: int | None = None) -> Window | None:
        return None if window_size is None else Window(window_size)

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        return keys, values

    def attend(
        self,
        queries: mx.array,
        keys: mx.array,
        values: mx.array,
        scale: float,
        mask: Window | None,
        **options: Any,
    ) -> mx.array:
        """[N, heads, 1, head_dim] each: every token attends to its own sequence up to itself."""
        if not (mask is None or isinstance(mask, Window)):
            raise TypeError("this model makes its own attention mask")

        windows = [window for window in (self.window, mask.size if mask else None) if window is not None]

        def attention(q: mx.array, k: mx.array, v: mx.array) -> mx.array:  # [sequences, heads, length, head_dim]
            out = local_attention(q, k, v, min(windows, default=None), scale=scale, **options)
            return out.swapaxes(1, 2).flatten(0, 1)

        outputs, prefixes = [], []
        # Split, not sliced: their gradients are joined then, and not each padded to all of it and added.
        parts = [mx.split(x.squeeze(2), [self.rows * self.prefix]) for x in (queries, keys, values)]
        if self.prefix:
            prefixes = [x.reshape(self.rows, self.prefix, *x.shape[1:]).swapaxes(1, 2) for x, _ in parts]
            outputs.append(attention(*prefixes))
        tails = [self._spread(x).reshape(-1, self.length, *x.shape[1:]).swapaxes(1, 2) for _, x in parts]
        if self.prefix:
            tails[1:] = [self._behind(*both) for both in zip(prefixes[1:], tails[1:], strict=True)]
        outputs.append(self._gather(attention(*tails)))
        self.attended = mx.concatenate(outputs)[:, :, None]
        return self.attended

    def _behind(self, prefix: mx.array, tails: mx.array) -> mx.array:
        """Each row's prefix, [b, heads, P, head_dim], before each of its tails: [b * K, heads, P + T, head_dim]."""
        tails = mx.unflatten(tails, 0, (self.rows, self.completions))
        prefixes = mx.broadcast_to(prefix[:, None], (*tails.shape[:3], *prefix.shape[2:]))
        return mx.concatenate([prefixes, tails], axis=3).flatten(0, 1)

    def _spread(self, x: mx.array) -> mx.array:
        """[N - b * P, ...] ➜ [b * K * T, ...]; what is at a sequence's padding is not used."""
        return (
            x
            if self.suffix_indices is None or self.suffix_uses is None
            else _move(x, self.suffix_indices, self.suffix_uses)
        )

    def _gather(self, x: mx.array) -> mx.array:
        """The way back."""
        return x if self.suffix_uses is None else _move(x, self.suffix_uses[:, 0], self.owned[:, None])


class EndingBlock:
    """Stands for the last block on a stream, and gives the scored tokens alone.

    The block runs twice: over all tokens, and over the scored ones with what attention gave them. MLX computes of the
    first run what the second needs, its attention, and no queries, keys and values of the second.
    """

    def __init__(self, block: nn.Module, index: int, stream: Stream, scored: mx.array):
        self.block, self.index, self.stream, self.scored = block, index, stream, scored

    @classmethod
    def at_end_of(cls, blocks: list[nn.Module], stream: Stream, scored: mx.array) -> EndingBlock | None:
        """For the last block that has parameters; None where its masks are drawn for all tokens, or it is recomputed.

        Of a model that ranks hold in stages, other ranks have the parameters of the others.
        """
        index = max(i for i, block in enumerate(blocks) if tree_flatten(block.parameters()))
        block = blocks[index]
        has_dropout = any(isinstance(part, nn.Dropout) and part._p_1 < 1 for part in block.modules())
        # Also where the reference is asked: of equal weights policy and reference are equal to the bit.
        if (block.training and has_dropout) or getattr(block, "is_recomputed", False):
            return None
        return cls(block, index, stream, scored)

    def __call__(self, x: mx.array, *args: Any, **options: Any) -> mx.array:
        self.block(x, *args, **options)
        attended = mx.take(self.stream.attended, self.scored, axis=0)
        known = KnownAttention(self.stream.offset[self.scored], attended)
        args = tuple(known if arg is self.stream else arg for arg in args)
        options = {name: known if value is self.stream else value for name, value in options.items()}
        output: mx.array = self.block(mx.take(x, self.scored, axis=0), *args, **options)
        return output

    def __getattr__(self, name: str) -> Any:
        return getattr(self.block, name)


class KnownAttention:
    """Passed to the last block for the scored tokens alone: their attention is known."""

    def __init__(self, offset: mx.array, output: mx.array):
        self.offset, self.output = offset, output

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        return keys, values

    def attend(self, *_: Any, **__: Any) -> mx.array:
        return self.output


class Window:
    """Passed to attention as its mask: attention to the last `size` positions only."""

    def __init__(self, size: int):
        self.size = size


def local_attention(
    queries: mx.array, keys: mx.array, values: mx.array, window: int | None, **options: Any
) -> mx.array:
    """Attention of the last positions of a sequence to the `window` positions up to their own, or to all of those.

    queries: [sequences, heads, T, head_dim]; keys, values: [sequences, heads, S, head_dim], T <= S. Queries in blocks
    as long as the window attend to the keys of their own block and of the one before: time and memory grow with T *
    window (sliding windows as in Longformer, arXiv:2004.05150, section 3.1).
    """
    sequences, length = queries.shape[0], keys.shape[2]
    if window is None or length <= window:
        return causal_attention(queries, keys, values, **options)
    query_start = length - queries.shape[2]
    start = max(query_start, window)  # from here on every window is full
    early = start - query_start
    rest = length - start
    padding = [(0, 0), (0, 0), (0, -rest % window), (0, 0)]

    def blocks(x: mx.array) -> mx.array:  # [sequences, heads, length, ...] ➜ [sequences, blocks, heads, window, ...]
        return mx.unflatten(mx.pad(x, padding), 2, (-1, window)).swapaxes(1, 2)

    def with_one_before(x: mx.array) -> mx.array:
        x = blocks(x[:, :, start - window :])
        return mx.concatenate([x[:, :-1], x[:, 1:]], axis=3).flatten(0, 1)

    mask = base.create_causal_mask(window, offset=window, window_size=window)
    out = mx.fast.scaled_dot_product_attention(
        blocks(queries[:, :, early:]).flatten(0, 1),
        with_one_before(keys),
        with_one_before(values),
        mask=mask,
        **options,
    )
    out = mx.unflatten(out, 0, (sequences, -1)).swapaxes(1, 2).flatten(2, 3)[:, :, :rest]
    if early == 0:
        return out
    first = causal_attention(queries[:, :, :early], keys[:, :, :start], values[:, :, :start], **options)
    return mx.concatenate([first, out], axis=2)


def _move(x: mx.array, index: mx.array, inverse: mx.array) -> mx.array:
    """x[index] along the first axis (x[0] where the index is -1), whose gradient gathers as well, in a fixed order.

    MLX would scatter the gradient with atomic additions: slower, and another sum every time.
    inverse: [len(x), uses], where x's rows went; -1 for nowhere.
    """

    @mx.custom_function
    def move(x: mx.array) -> mx.array:
        return mx.take(x, mx.maximum(index, 0), axis=0)

    @move.vjp
    def move_vjp(_: Any, cotangent: mx.array, __: Any) -> mx.array:
        shape = (-1,) + (1,) * (cotangent.ndim - 1)
        total = None
        for i in range(inverse.shape[1]):
            source = inverse[:, i]
            part = mx.where((source >= 0).reshape(shape), mx.take(cotangent, mx.maximum(source, 0), axis=0), 0)
            total = part if total is None else total + part
        return total

    return move(x)


def cannot_share_prompts(model: nn.Module) -> str | None:
    """None for a model to which a stream is the same as whole rows; else why not, in words.

    It is tried, on random tokens: recurrent layers, or an attention of the family's own, show there. A rank that holds
    a stage of the model tries its own blocks. The model's layout has the answer afterwards, and whether its last block
    may end with the scored tokens alone.
    """
    attend_by_cache(model)
    layout = layout_of(model)
    fault = _why_not_shared(model)
    layout.stream_fault = fault or ""
    return fault


def _why_not_shared(model: nn.Module) -> str | None:
    prompt, long, short = (np.random.default_rng(i).integers(0, 16, n).tolist() for i, n in enumerate((5, 3, 1)))
    mask = mx.ones((1, 2, 1))
    rows: StreamInputs = {"prefix_length": 0, "tokens": mx.array([*prompt, *long, *prompt, *short, 0, 0]), "mask": mask}
    stream: StreamInputs = {
        "prefix_length": 2,
        "tokens": mx.array([*prompt, *long, *short]),
        "offsets": mx.array([0, 1, 2, 3, 4, 5, 6, 7, 5]),
        "suffix_indices": mx.array([[[0, 1, 2, 3, 4, 5], [0, 1, 2, 6, -1, -1]]]),
        "suffix_uses": mx.array([[0, 6], [1, 7], [2, 8], [3, -1], [4, -1], [5, -1], [9, -1]]),
        "scored": mx.array([4, 5, 4, 8, 0]),
        "mask": mask,
    }
    was_training, layout = model.training, layout_of(model)
    stage = layout.stage

    def error(states_of: Callable[[StreamInputs], mx.array], wanted: mx.array) -> float:
        found: float = (mx.linalg.norm(outputs(states_of, stream) - wanted) / mx.linalg.norm(wanted)).item()
        return found

    def outputs(states_of: Callable[[StreamInputs], mx.array], inputs: StreamInputs) -> mx.array:
        if stage is None:
            return states_of(inputs).astype(mx.float32)
        table = mx.random.normal((16, stage.hidden_size), key=mx.random.key(0)).astype(stage.dtypes[0])
        given = None if stage.is_first else table[inputs["tokens"]]
        made: mx.array = stage.run(lambda: states_of(inputs), given)
        return made.astype(mx.float32)

    def of_scored(inputs: StreamInputs) -> mx.array:
        return _states(model, inputs, None, inputs["scored"])[0]

    model.eval()
    tolerance, layout.ends_early = rounding_tolerance(model), False
    try:
        wanted = outputs(functools.partial(hidden_states, model), rows)[mx.array([*range(8), 13])]
        if (found := error(functools.partial(hidden_states, model), wanted)) > tolerance:
            return f"a stream of tokens would change its outputs by {found:.2g} of their norm"
        if stage is None or stage.is_last:
            with contextlib.suppress(Exception):  # of a family's own code, where its blocks give fewer tokens
                layout.ends_early = error(of_scored, wanted[stream["scored"]]) <= tolerance
        return None
    except Exception as reason:  # a family's own code, handed what it does not expect, may raise anything
        return (
            f"its blocks do not take a stream of tokens ({type(reason).__name__}: {str(reason).splitlines()[0][:80]})"
        )
    finally:
        model.train(was_training)


def rounding_tolerance(model: nn.Module) -> float:
    """By how much of their norm two orders of the same operations may differ in hidden states."""
    if any(a.dtype not in (mx.float32, mx.uint32) for _, a in tree_flatten(model.parameters())):
        return 0.03
    # A GPU multiplies float32 in TF32, whose mantissa has 10 bits, unless MLX_ENABLE_TF32=0.
    return 1e-4 if mx.default_device() == mx.cpu else 0.01


def run_backbone(model: nn.Module, tokens: mx.array, **options: Any) -> mx.array:
    """The backbone's output, called as the model calls it; of a model without one, the model's."""
    place = backbone_of(model)
    if place is None:
        return model(tokens, **options)
    outputs = []

    def listen(*args: Any, **kwargs: Any) -> mx.array:
        outputs.append(backbone(*args, **kwargs))
        return outputs[0][:1, :1]  # something for the head, whose result is not evaluated

    backbone = place[0][place[1]]
    with Replaced(*place, listen):
        model(tokens, **options)
    return outputs[0]


class Replaced:
    """Within a `with`, a function instead of a module's part; the part's attributes can still be read."""

    def __init__(self, holder: nn.Module, name: str, function: Callable[..., mx.array]):
        self.holder, self.name, self.part, self.function = holder, name, holder[name], function

    def __enter__(self) -> None:
        dict.__setitem__(self.holder, self.name, self)  # not by attribute: parameters keep their names

    def __exit__(self, *_: object) -> None:
        dict.__setitem__(self.holder, self.name, self.part)

    def __call__(self, *args: Any, **kwargs: Any) -> mx.array:
        return self.function(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.part, name)


# ---- Causal attention of long rows, in blocks of queries


LONG = 2048  # positions: shorter rows are attended to at once
SCORE_BYTES = 2**27  # of scores at a time, over all sequences and heads
MULTIPLE = 64  # of a block's queries
TILE = 128  # queries of each sequence of which cuDNN's backward pass wants a multiple
FUSED_LONG = 8192  # queries: fewer are given to cuDNN at once
FUSED_BLOCKS = 4  # of more: each keeps a copy of the keys that it sees, so that more of them would want much memory


def is_fused(device: Device, head_dim: int, item_bytes: int) -> bool:
    """Whether attention has a kernel that keeps no scores for the backward pass: cuDNN's, from Ampere on."""
    return device == "cuda" and item_bytes == 2 and head_dim <= 128 and head_dim % 8 == 0


def block_rows(is_fused: bool, sequences: int, heads: int, queries: int, keys: int, item_bytes: int) -> int:
    """Queries of each sequence that attend at a time; all of them where nothing is gained by blocks.

    Without a fused kernel MLX's backward pass of attention keeps the scores: memory would grow with the square of the
    length. cuDNN's keeps none, but takes nearly as long for scores that the causal mask hides as for others: with 8,192
    queries at once an H200 took 1.2 times as long as with 2,048 at a time, with 16,384 1.3 times as long as with 4,096.
    Where a query sees more keys than there are queries, the mask hides little.
    """
    if is_fused:
        in_blocks = queries >= FUSED_LONG and keys <= 2 * queries
        return -(-queries // FUSED_BLOCKS // TILE) * TILE if in_blocks else queries
    if keys <= LONG:
        return queries
    rows = SCORE_BYTES // (sequences * heads * keys * item_bytes) // MULTIPLE * MULTIPLE
    return min(queries, max(MULTIPLE, rows))


def causal_attention(queries: mx.array, keys: mx.array, values: mx.array, **options: Any) -> mx.array:
    """Attention of the last T of S positions to those up to their own: [sequences, heads, T, head_dim].

    Where `block_rows` says so, a block of queries after the other. Without a kernel scores are kept for none, and made
    again in the backward pass (Rabe and Staats, arXiv:2112.05682, section 4; a block's softmax is whole here, so that
    nothing is rescaled).

    queries: [sequences, heads, T, head_dim]; keys, values: [sequences, KV heads, S, head_dim], T <= S.
    options: of mx.fast.scaled_dot_product_attention.
    """
    (sequences, heads, length, head_dim), positions = queries.shape, keys.shape[2]
    has_kernel = is_fused(device(), head_dim, queries.dtype.size)
    if has_kernel and length % TILE:
        return _in_whole_tiles(queries, keys, values, options)
    rows = block_rows(has_kernel, sequences, heads, length, positions, queries.dtype.size)
    if has_kernel:
        return _by_kernel(queries, keys, values, rows, options)
    if rows == length or options.get("sinks") is not None:  # whose gradient would be lost in full training
        return _causal(queries, keys, values, options)
    before = positions - length
    blocks = [(start, min(start + rows, length)) for start in range(0, length, rows)]

    @mx.custom_function
    def attention(queries: mx.array, keys: mx.array, values: mx.array) -> mx.array:
        outputs: list[mx.array] = []
        for start, end in blocks:
            own, seen = after(queries[:, :, start:end], outputs[-1:]), before + end
            outputs.append(_causal(own, keys[:, :, :seen], values[:, :, :seen], options))
        return mx.concatenate(outputs, axis=2)

    @attention.vjp
    def attention_vjp(primals: Any, dy: mx.array, _: Any) -> tuple[mx.array, mx.array, mx.array]:
        """From the last block on: what it gives to positions that no earlier block sees is complete, and cut off."""
        queries, keys, values = primals
        d_queries: list[mx.array] = []
        complete: list[list[mx.array]] = [[], []]  # of keys and values, the last positions first
        open_ones: list[mx.array] = []  # of the earlier positions
        for start, end in reversed(blocks):
            own, seen = after(queries[:, :, start:end], [*d_queries[-1:], *open_ones]), before + end
            inputs = [own, keys[:, :, :seen], values[:, :, :seen]]
            _, (d_own, *d_both) = mx.vjp(lambda q, k, v: _causal(q, k, v, options), inputs, [dy[:, :, start:end]])
            d_queries.append(d_own)
            totals = [a + b for a, b in zip(d_both, open_ones, strict=True)] if open_ones else d_both
            cut = before + start if start else 0
            for done, total in zip(complete, totals, strict=True):
                done.append(total[:, :, cut:])
            open_ones = [total[:, :, :cut] for total in totals]
        d_keys, d_values = (mx.concatenate(done[::-1], axis=2) for done in complete)
        return mx.concatenate(d_queries[::-1], axis=2), d_keys, d_values

    return attention(queries, keys, values)


def _in_whole_tiles(queries: mx.array, keys: mx.array, values: mx.array, options: dict[str, Any]) -> mx.array:
    """With as many positions more at the end as make whole tiles: no earlier position sees them.

    MLX leaves the backward pass of other lengths to plain products, which keep the scores: 832 queries of 1B's shape
    took an H200 six times as long as 896.
    """
    length = queries.shape[2]
    more = [(0, 0), (0, 0), (0, -length % TILE), (0, 0)]
    return causal_attention(*(mx.pad(x, more) for x in (queries, keys, values)), **options)[:, :, :length]


def _by_kernel(queries: mx.array, keys: mx.array, values: mx.array, rows: int, options: dict[str, Any]) -> mx.array:
    """So many queries at a time, with the keys up to the last one's: the kernel keeps no scores."""
    length, before = queries.shape[2], keys.shape[2] - queries.shape[2]
    starts = list(range(rows, length, rows))
    outputs: list[mx.array] = []
    # From the last block on, and the keys cut for the one before: gradients add up in arrays that get shorter.
    for own, end in zip(mx.split(queries, starts, axis=2)[::-1], [*starts, length][::-1], strict=True):
        keys, values = keys[:, :, : before + end], values[:, :, : before + end]
        outputs.append(_causal(own, keys, values, options))
    return mx.concatenate(outputs[::-1], axis=2)


def _causal(queries: mx.array, keys: mx.array, values: mx.array, options: dict[str, Any]) -> mx.array:
    return mx.fast.scaled_dot_product_attention(queries, keys, values, mask="causal", **options)


def after(x: mx.array, earlier: Sequence[mx.array]) -> mx.array:
    """The same array, made after others: MLX would make the logits or scores of many pieces at once, and hold all."""
    return mx.depends([x], [mx.stop_gradient(each) for each in earlier])[0] if earlier else x
