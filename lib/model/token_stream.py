"""A batch through the model's blocks as one stream of tokens, each token once: prompts are shared.

The blocks see the stream of lib/data/batch.py as N sequences of one token: every layer but attention computes each
token by itself, and the rotary embedding takes an offset for each. Attention finds the stream in its cache, and lays it
out as rectangles, all of them causal, so that no mask is needed. A recurrence is run over these as a whole, each answer
from the state after its prompt. The last block computes what follows attention for the tokens alone that the head sees.
No model file knows of it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx.utils import tree_flatten, tree_map
from mlx_lm.models.base import create_causal_mask
from mlx_lm.models.cache import ArraysCache, make_prompt_cache

from lib.config.settings import DataSettings
from lib.model.layout import ModelLayout, backbone_of, block_list_of, embedding_of, layout_of
from lib.model.long_attention import local_attention


def length_multiple(settings: DataSettings) -> int:
    """What lengths are padded to: as set, else 64 on a GPU, where 1,023 positions took twice as long as 1,024."""
    return settings.length_multiple or (64 if mx.default_device() == mx.gpu else 16)


StreamInputs = dict[str, Any]  # the inputs of lib/data/batch.py's Batch, which says what each is, as MLX arrays


def arrays_of(inputs: Mapping[str, int | np.ndarray]) -> StreamInputs:
    """A batch's `inputs` on the device. Of a ragged stream indices of nothing become 0, and masks say which they are:
    made here they cost no kernels in the model. owned: int32 [b * K * T], as suffix_indices where that sequence gives
    the token its output: the first of those that share it."""
    arrays: dict[str, Any] = dict(inputs)
    if "suffix_indices" in arrays:
        flat, uses = arrays["suffix_indices"].reshape(-1), arrays["suffix_uses"]
        is_owned = (flat >= 0) & (uses[flat, 0] == np.arange(flat.size))
        arrays |= {"suffix_indices": np.maximum(flat, 0).reshape(arrays["suffix_indices"].shape)}
        arrays |= {"suffix_uses": np.maximum(uses, 0), "are_used": uses >= 0}
        arrays |= {"owned": np.where(is_owned, flat, 0)[:, None], "are_owned": is_owned[:, None]}
    return {name: mx.array(value) if isinstance(value, np.ndarray) else value for name, value in arrays.items()}


def hidden_states(model: nn.Module, inputs: StreamInputs, window: int | None = None) -> mx.array:
    """What the head sees of every token, [N, D] (or logits, without a backbone). window: tokens that each sees."""
    return states_of(model, inputs, window, None)[0]


def scored_states(model: nn.Module, inputs: StreamInputs, window: int | None = None) -> mx.array:
    """What the head sees of the scored tokens: `hidden_states` of these, [M, D]."""
    scored = inputs["scored"]
    states, are_scored = states_of(model, inputs, window, scored if layout_of(model).ends_early else None)
    return states if are_scored else mx.take(states, scored, axis=0)


def states_of(
    model: nn.Module, inputs: StreamInputs, window: int | None, scored: mx.array | None
) -> tuple[mx.array, bool]:
    """What the head would see, and whether of the scored tokens alone: where the last block ends with those."""
    tokens, (rows, completions, _) = inputs["tokens"], inputs["mask"].shape
    with contextlib.ExitStack() as stack:
        if model.training and "noise_keys" in inputs:
            layout = layout_of(model)
            layout.token_keys = inputs["noise_keys"]
            stack.callback(setattr, layout, "token_keys", None)
        if model.training and "noise_scales" in inputs:
            place = embedding_of(model)
            assert place is not None
            noisy = _noisy(place[0][place[1]], inputs["noise_keys"], inputs["noise_scales"])
            stack.enter_context(Replaced(*place, noisy))
        if inputs["prefix_length"] == 0 and "suffix_indices" not in inputs and window is None:
            hidden = run_backbone(model, tokens.reshape(rows * completions, -1))
            return hidden.reshape(len(tokens), -1), False
        stream = Stream(inputs, window, layout_of(model))
        if ending := None if scored is None else _ending(model, stream, scored):
            stack.enter_context(ending)
        caches = [stream] * max(len(model.layers), len(make_prompt_cache(model)))  # some loop over their blocks
        hidden = run_backbone(model, tokens[:, None], cache=caches)
    return hidden.reshape(-1, hidden.shape[-1]), ending is not None


def _noisy(embedding: nn.Module, keys: mx.array, scales: mx.array) -> Callable[[mx.array], mx.array]:
    """An embedding with noise on the tokens of a stream. keys: uint32 [N, 2]; scales: float32 [N], times sqrt(D)."""

    def call(tokens: mx.array) -> mx.array:
        embedded = embedding(tokens)
        size = embedded.shape[-1]
        noise = mx.vmap(lambda key: mx.random.uniform(-1, 1, (size,), key=key))(keys)
        return embedded + (scales[:, None] / size**0.5 * noise).reshape(embedded.shape).astype(embedded.dtype)

    return call


@dataclass(frozen=True)
class Window:
    """Passed to attention as its mask: attention to the last `size` positions only, or to all."""

    size: int | None


RAGGED = ("suffix_indices", "suffix_uses", "are_used", "owned", "are_owned")  # of `arrays_of`


class Past(ArraysCache):
    """Passed to a mixer as its cache: of each row its states after the positions before, or their keys and values."""

    offset = 0  # positions
    keys: mx.array | None = None
    values: mx.array | None = None

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        if self.keys is not None:
            keys, values = (mx.concatenate(both, axis=2) for both in ((self.keys, keys), (self.values, values)))
        self.keys, self.values = keys, values
        return keys, values

    def branched(self, positions: int, branches: int) -> Past:
        """The same after so many positions, of each row for so many branches."""
        past = Past(len(self.cache))
        past.offset = self.offset + positions
        past.keys, past.values, *past.cache = (
            None if x is None else mx.broadcast_to(x[:, None], (len(x), branches, *x.shape[1:])).flatten(0, 1)
            for x in (self.keys, self.values, *self.cache)
        )
        return past


class Stream:
    """Passed to blocks as their cache: lays the stream out for attention. offset: int32 [N], the tokens' positions."""

    mixed: Any  # the mixer's output for all tokens in the block that ran last,
    keeps_mixed = False  # if so: a recomputed block's compiled graph holds the stream, which is not to hold the graph
    of_scored: mx.array | None = None  # the same of the scored tokens alone: what attention gives from now on
    __iter__ = None  # of what a block takes for several caches each is the stream

    def __init__(self, inputs: StreamInputs, window: int | None = None, layout: ModelLayout | None = None):
        self.rows, self.completions, _ = inputs["mask"].shape
        self.offset, self.prefix, self.window = inputs["offsets"], inputs["prefix_length"], window
        self.ragged, self.layout = {name: inputs[name] for name in RAGGED if name in inputs}, layout or ModelLayout()
        self.length = (self.offset.size - self.rows * self.prefix) // (self.rows * self.completions)
        if self.ragged:
            self.length = self.ragged["suffix_indices"].shape[-1]

    def __getitem__(self, index: int) -> Stream:
        return self

    def make_mask(self, N: int, **of_attention: Any) -> Window | None:  # a recurrence's has no options
        return Window(of_attention["window_size"]) if of_attention else None

    def _window(self, mask: Window | None) -> int | None:
        return min((size for size in (self.window, mask.size if mask else None) if size is not None), default=None)

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        return keys, values

    def _sequences(self, x: mx.array) -> tuple[mx.array, mx.array]:
        """[N, ...] ➜ of the prefixes [b, P, ...], of what follows them [b * K, T, ...]."""
        # Split, not sliced: their gradients are joined then, and not each padded to all of it and added.
        prefixes, tails = mx.split(x, [self.rows * self.prefix])
        if self.ragged:
            uses = self.ragged["suffix_uses"], self.ragged["are_used"]
            tails = _move(tails, self.ragged["suffix_indices"].reshape(-1), *uses)
        return prefixes.reshape(self.rows, self.prefix, *x.shape[1:]), tails.reshape(-1, self.length, *x.shape[1:])

    def _tokens(self, prefixes: list[mx.array], tails: mx.array) -> mx.array:
        """`_sequences` back; of tokens that sequences share the first's. prefixes: one array, or none without any."""
        tails = tails.flatten(0, 1)
        if self.ragged:
            tails = _move(tails, self.ragged["suffix_uses"][:, 0], self.ragged["owned"], self.ragged["are_owned"])
        return mx.concatenate([*(x.flatten(0, 1) for x in prefixes), tails])

    def attend(
        self, queries: mx.array, keys: mx.array, values: mx.array, scale: float, mask: Window | None, **options: Any
    ) -> mx.array:
        """[N, heads, 1, head_dim] each: every token attends to its own sequence up to itself."""
        if not (mask is None or isinstance(mask, Window)):
            raise TypeError("this model makes its own attention mask")
        window = self._window(mask)

        def attention(inputs: tuple[list[mx.array], Past]) -> mx.array:
            q, k, v = (x.swapaxes(1, 2) for x in inputs[0])
            return local_attention(q, *inputs[1].update_and_fetch(k, v), window, scale=scale, **options).swapaxes(1, 2)

        output: mx.array = self.mix(([x.swapaxes(1, 2) for x in (queries, keys, values)], self), attention)
        return output.swapaxes(1, 2)

    def mix(self, inputs: Any, run: Callable[[Any], Any]) -> Any:
        """What a mixer makes of a stream. inputs: its arguments, a tree whose arrays for tokens, [N, 1, ...], `run`
        gets as [sequences, length, ...], and with its states instead of the stream."""
        if self.of_scored is not None:
            return self.of_scored
        keys, outputs, (states, count) = self.layout.token_keys, list[Any](), self.layout.past
        past: Any = [Past(states) for _ in range(count)] if count else Past(states)
        laid_out = [self._sequences(x.squeeze(1)) for _, x in tree_flatten(inputs) if self._is_of_tokens(x)]
        keys_laid_out = None if keys is None else self._sequences(keys)
        for i in (0, 1) if self.prefix else (1,):
            if outputs:
                past = tree_map(lambda each: each.branched(self.prefix, self.completions), past)
            parts = iter([both[i] for both in laid_out])
            self.layout.token_keys = keys_laid_out and keys_laid_out[i].flatten(0, 1)
            try:
                outputs.append(run(tree_map(lambda leaf: self._part(leaf, parts, past, i), inputs)))  # noqa: B023
            finally:
                self.layout.token_keys = keys
        mixed = tree_map(lambda tails, *prefixes: self._tokens([*prefixes], tails)[:, None], *outputs[::-1])
        self.mixed = mixed if self.keeps_mixed else None
        return mixed

    def _is_of_tokens(self, leaf: Any) -> bool:
        return isinstance(leaf, mx.array) and leaf.shape[:2] == (self.offset.size, 1)

    def _part(self, leaf: Any, parts: Iterator[mx.array], past: Any, index: int) -> Any:
        """An argument of a mixer for the prefixes (index 0), or for what follows them."""
        if self._is_of_tokens(leaf):
            return next(parts)
        offset = index * self.prefix
        if isinstance(leaf, Window):
            return create_causal_mask((self.prefix, self.length)[index], offset, window_size=self._window(leaf))
        return past if leaf is self else offset if leaf is self.offset else leaf


def _move(x: mx.array, index: mx.array, inverse: mx.array, are_used: mx.array) -> mx.array:
    """x[index] along the first axis, whose gradient gathers as well, in a fixed order: MLX would add it up atomically.
    inverse: [len(x), uses], where x's rows went, if `are_used`."""

    @mx.custom_function
    def move(x: mx.array) -> mx.array:
        return mx.take(x, index, axis=0)

    @move.vjp
    def move_vjp(_: Any, cotangent: mx.array, __: Any) -> mx.array:
        shape = (-1,) + (1,) * (cotangent.ndim - 1)
        parts = [
            mx.where(are_used[:, i].reshape(shape), mx.take(cotangent, inverse[:, i], axis=0), 0)
            for i in range(inverse.shape[1])
        ]
        return sum(parts[1:], parts[0])

    return move(x)


def _ending(model: nn.Module, stream: Stream, scored: mx.array) -> Replaced | None:
    """The last block run over all tokens, and over the scored ones with their attention: MLX computes what is used.
    None where it draws masks for all tokens, or is recomputed."""
    if (blocks := block_list_of(model)) is None:
        return None
    index = max(i for i, block in enumerate(blocks) if tree_flatten(block.parameters()))
    block = blocks[index]
    has_dropout = any(isinstance(part, nn.Dropout) and part._p_1 < 1 for part in block.modules())
    # Also for the reference: of equal weights policy and reference are equal to the bit.
    if (block.training and has_dropout) or getattr(block, "is_recomputed", False):
        return None

    def ending(x: mx.array, *args: Any, **options: Any) -> Any:
        stream.keeps_mixed = True
        block(x, *args, **options)
        stream.of_scored, stream.offset = mx.take(stream.mixed, scored, axis=0), stream.offset[scored]
        return block(mx.take(x, scored, axis=0), *args, **options)

    return Replaced(blocks, index, ending)


def run_backbone(model: nn.Module, tokens: mx.array, **options: Any) -> mx.array:
    """The backbone's output; of a model without one, the model's."""
    if (place := backbone_of(model)) is None:
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
    """Within a `with`, a function instead of a module's part or a block; its attributes can still be read."""

    def __init__(self, holder: Any, name: Any, function: Callable[..., mx.array]):
        self.holder, self.name, self.part, self.function = holder, name, holder[name], function

    def __enter__(self) -> None:
        self.holder[self.name] = self  # not by attribute: parameters keep their names

    def __exit__(self, *_: object) -> None:
        self.holder[self.name] = self.part

    def __call__(self, *args: Any, **kwargs: Any) -> mx.array:
        return self.function(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.part, name)
