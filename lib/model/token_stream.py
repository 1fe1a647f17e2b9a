"""A batch through the model's blocks as one stream of tokens, each token once: prompts are shared.

The blocks see the stream of lib/data/collate.py as N sequences of one token: every layer but attention computes each
token by itself, and the rotary embedding takes an offset for each. Attention recognises a stream by the type of its
cache: there the stream is laid out as rectangles, all of them causal, so that no mask is needed. The last block gives
its keys and values for all tokens, and computes what follows attention for those alone that the head sees. No model
file knows of it.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Required, TypedDict, cast

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx.utils import tree_flatten
from mlx_lm.models import base

from lib.config.schema import DataSettings
from lib.model.backbone import backbone_of, embedding_of
from lib.model.blocked_attention import causal_attention


def length_multiple(settings: DataSettings) -> int:
    """What lengths are padded to: as set, else 64 on a GPU, where 1,023 positions took twice as long as 1,024."""
    return settings.length_multiple or (64 if mx.default_device() == mx.gpu else 16)


class StreamInputs(TypedDict, total=False):
    """The inputs of lib/data/collate.py's Batch, which says what each is, as MLX arrays."""

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
    states, are_scored = _states(model, inputs, window, scored if getattr(model, "ends_early", False) else None)
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
    caches = [stream] * len(model.layers)
    last = copy.copy(stream)
    if scored is not None:
        last.scored = scored
        caches[_last_block(model)] = last
    hidden = run_backbone(model, tokens[:, None], cache=caches)
    return hidden.reshape(-1, hidden.shape[-1]), last.has_ended


def _last_block(model: nn.Module) -> int:
    """Of those that have parameters: of a model that ranks hold in stages, or of which some are left out, others do."""
    blocks = list(model.layers)
    return next(i for i in reversed(range(len(blocks))) if tree_flatten(blocks[i].parameters()))


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
        suffix_indices, suffix_uses: of a ragged stream (see lib/data/collate.py's Batch).
        window: tokens that each attends to, itself included.
    """

    scored: mx.array | None = None
    """int32 [M], of the last block's: where in the stream the tokens are that the head sees."""
    has_ended = False
    """Whether the block went on with these alone."""

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
        """[N, heads, 1, head_dim] each: every token attends to its own sequence up to itself.

        Raises:
            _Attended: in the last block.
        """
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
        output = mx.concatenate(outputs)[:, :, None]
        if self.scored is not None:
            raise _Attended(mx.take(output, self.scored, axis=0))
        return output

    def _behind(self, prefix: mx.array, tails: mx.array) -> mx.array:
        """Each row's prefix, [b, heads, P, head_dim], before each of its tails: [b * K, heads, P + T, head_dim]."""
        tails = mx.unflatten(tails, 0, (self.rows, self.completions))
        prefixes = mx.broadcast_to(prefix[:, None], (*tails.shape[:3], *prefix.shape[2:]))
        return mx.concatenate([prefixes, tails], axis=3).flatten(0, 1)

    def _spread(self, x: mx.array) -> mx.array:
        """[N - b * P, ...] ➜ [b * K * T, ...]; nobody reads what is at a sequence's padding."""
        return (
            x
            if self.suffix_indices is None or self.suffix_uses is None
            else _move(x, self.suffix_indices, self.suffix_uses)
        )

    def _gather(self, x: mx.array) -> mx.array:
        """The way back."""
        return x if self.suffix_uses is None else _move(x, self.suffix_uses[:, 0], self.owned[:, None])


class _Attended(Exception):
    """Ends a block's call at its attention: what that gives the scored tokens is known."""

    def __init__(self, output: mx.array):
        self.output = output


class _OfScored:
    """Passed to the last block for the scored tokens alone: their attention is known."""

    def __init__(self, offset: mx.array, output: mx.array):
        self.offset, self.output = offset, output

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        return keys, values

    def attend(self, *_: Any, **__: Any) -> mx.array:
        return self.output


def end_at_scored_tokens(model: nn.Module) -> None:
    """Lets a block that is handed the last block's stream give what the head sees of the scored tokens alone.

    It wraps the call of the blocks' class. The block runs twice: over all tokens up to its attention, and over the
    scored ones with what attention gives them. MLX computes no queries, keys and values of the second run: nobody asks.
    """
    for kind in {type(block) for block in model.layers}:
        if not getattr(kind.__call__, "ends_at_scored_tokens", False):
            kind.__call__ = _ending(kind.__call__)


def _ending(plain: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(plain)
    def call(block: nn.Module, *args: Any, **kwargs: Any) -> Any:
        stream = next((one for one in (*args, *kwargs.values()) if isinstance(one, Stream)), None)
        if stream is None or stream.scored is None:
            return plain(block, *args, **kwargs)
        if block.training and any(isinstance(part, nn.Dropout) and part._p_1 < 1 for part in block.modules()):
            stream.scored = None  # masks are drawn for all tokens, once
            return plain(block, *args, **kwargs)
        try:
            return plain(block, *args, **kwargs)
        except _Attended as attended:
            known = _OfScored(stream.offset[stream.scored], attended.output)

        def of_scored(leaf: Any) -> Any:
            return known if leaf is stream else mx.take(leaf, stream.scored, axis=0) if leaf is args[0] else leaf

        stream.has_ended = True
        return plain(block, *map(of_scored, args), **{name: of_scored(leaf) for name, leaf in kwargs.items()})

    call.ends_at_scored_tokens = True  # type: ignore[attr-defined]
    return call


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


def _attention_of(original: Callable[..., mx.array]) -> Callable[..., mx.array]:
    def scaled_dot_product_attention(
        queries: mx.array, keys: mx.array, values: mx.array, cache: Any, **options: Any
    ) -> mx.array:
        if hasattr(cache, "attend"):
            return cache.attend(queries, keys, values, **options)
        return original(queries, keys, values, cache=cache, **options)

    return scaled_dot_product_attention


def accept_streams(model: nn.Module) -> None:
    """Lets the attention of the model's family leave it to caches that attend by themselves; others are as before."""
    for module in {sys.modules[type(part).__module__] for part in model.modules()}:
        if getattr(module, "scaled_dot_product_attention", None) is base.scaled_dot_product_attention:
            attention = _attention_of(base.scaled_dot_product_attention)
            module.scaled_dot_product_attention = attention  # type: ignore[attr-defined]
    end_at_scored_tokens(model)


@dataclass(frozen=True)
class Tried:
    """What cannot_share_prompts said of a model."""

    why_not: str | None


def cannot_share_prompts(model: nn.Module) -> str | None:
    """None for a model to which a stream is the same as whole rows; else why not, in words.

    It is tried, on random tokens: recurrent layers, or an attention of the family's own, show there. A rank that holds
    a stage of the model tries its own blocks. Afterwards the model's `ends_early` says whether its last block may end
    with the scored tokens alone, and its `tried` what was returned.
    """
    accept_streams(model)
    model.tried = Tried(_why_not_shared(model))
    return model.tried.why_not


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
    was_training, stage = model.training, getattr(model, "stage", None)

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
    tolerance, model.ends_early = rounding_tolerance(model), False
    try:
        wanted = outputs(functools.partial(hidden_states, model), rows)[mx.array([*range(8), 13])]
        if (found := error(functools.partial(hidden_states, model), wanted)) > tolerance:
            return f"a stream of tokens would change its outputs by {found:.2g} of their norm"
        if stage is None or stage.is_last:
            with contextlib.suppress(Exception):  # of a family's own code, where its blocks give fewer tokens
                model.ends_early = error(of_scored, wanted[stream["scored"]]) <= tolerance
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
        return outputs[0][:1, :1]  # something for the head, whose result nobody evaluates

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
