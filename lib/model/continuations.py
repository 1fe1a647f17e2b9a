"""Many continuations of some prompts, decoded together: a prompt's keys and values are kept once for all of its own.

B rows go on from P prompts. Every step adds one column to the rows' own keys and values, the same column for all of
them; a row that began later has its first token further to the right. Attention is that over the prompt and that over
the row's own tokens, put together by their partition functions (bifurcated attention, arXiv:2403.08845, section 4).
Blocks take all of it as their cache, so no model file knows of it (lib/model/token_stream.py).
"""

from __future__ import annotations

from typing import Any, TypedDict

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from lib.model.layout import layout_of
from lib.model.logps import head_of
from lib.model.patches import attend_by_cache
from lib.model.token_stream import Window, local_attention, rounding_tolerance, run_backbone

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
