"""Causal attention of long rows, and to a window, in blocks of queries: memory does not grow with the square."""

from __future__ import annotations

import functools
import io
from collections.abc import Sequence
from typing import Any

import mlx.core as mx
from mlx_lm.models import base

from lib.model import exponentials
from lib.model.quantised import device
from lib.system.hardware import Device

LONG = 2048  # positions: shorter rows are attended to at once
SCORE_BYTES = 2**27  # of scores at a time, over all sequences and heads
MULTIPLE = 64  # of a block's queries
TILE = 128  # queries of each sequence of which cuDNN's backward pass wants a multiple
FUSED_LONG = 8192  # queries: fewer are given to cuDNN at once
FUSED_BLOCKS = 4  # of more: each keeps a copy of the keys that it sees, so that more of them would want much memory


def after(x: mx.array, earlier: Sequence[mx.array]) -> mx.array:
    """The same array, made after others: MLX would make the logits or scores of many pieces at once, and hold all."""
    return mx.depends([x], [mx.stop_gradient(each) for each in earlier])[0] if earlier else x


def local_attention(
    queries: mx.array, keys: mx.array, values: mx.array, window: int | None, **options: Any
) -> mx.array:
    """Attention of the last positions of a sequence to the `window` positions up to their own, or to all of those.
    queries: [sequences, heads, T, head_dim]; keys, values: [sequences, heads, S, head_dim], T <= S. Queries in blocks
    attend to the keys of their own block and of the one before (as in Longformer, arXiv:2004.05150, section 3.1)."""
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
    of_blocks = blocks(queries[:, :, early:]).flatten(0, 1)
    out = mx.fast.scaled_dot_product_attention(
        of_blocks, with_one_before(keys), with_one_before(values), mask=mask, **options
    )
    out = mx.unflatten(out, 0, (sequences, -1)).swapaxes(1, 2).flatten(2, 3)[:, :, :rest]
    if early == 0:
        return out
    first = causal_attention(queries[:, :, :early], keys[:, :, :start], values[:, :, :start], **options)
    return mx.concatenate([first, out], axis=2)


def is_fused(device: Device, head_dim: int, item_bytes: int) -> bool:
    """Whether attention has a kernel that keeps no scores for the backward pass: cuDNN's, from Ampere on."""
    return device == "cuda" and item_bytes == 2 and head_dim <= 128 and head_dim % 8 == 0


@functools.cache
def has_backward_kernel(queries: tuple[int, ...], keys: tuple[int, ...], dtype: mx.Dtype) -> bool:
    """Whether MLX would take a kernel for the gradient of causal attention of these shapes: as its graph says, of which
    nothing is computed. Metal has one since MLX 0.32.4."""
    q, k = mx.zeros(queries, dtype), mx.zeros(keys, dtype)
    _, gradients = mx.vjp(lambda q, k, v: _causal(q, k, v, {"scale": 1.0}), [q, k, k], [q])
    mx.export_to_dot(graph := io.StringIO(), *gradients)
    return "ScaledDotProductAttentionVJP" in graph.getvalue()


def block_rows(is_fused: bool, sequences: int, heads: int, queries: int, keys: int, item_bytes: int) -> int:
    """Queries of each sequence that attend at a time. Without a fused kernel MLX's backward pass keeps the scores.
    cuDNN computes those that the mask hides: 8,192 queries at once took 1.2 times as long as 2,048 at a time (H200)."""
    if is_fused:
        in_blocks = queries >= FUSED_LONG and keys <= 2 * queries
        return -(-queries // FUSED_BLOCKS // TILE) * TILE if in_blocks else queries
    if keys <= LONG:
        return queries
    rows = SCORE_BYTES // (sequences * heads * keys * item_bytes) // MULTIPLE * MULTIPLE
    return min(queries, max(MULTIPLE, rows))


def causal_attention(queries: mx.array, keys: mx.array, values: mx.array, **options: Any) -> mx.array:
    """Attention of the last T of S positions to those up to their own, in blocks of `block_rows` queries; without a
    kernel the backward pass makes the scores again (arXiv:2112.05682, section 4). Shapes as in `local_attention`."""
    (sequences, heads, length, head_dim), positions = queries.shape, keys.shape[2]
    has_kernel = is_fused(device(), head_dim, queries.dtype.size)
    if has_kernel and length % TILE:
        # Whole tiles, by positions at the end that no earlier one sees: MLX leaves the backward pass of other lengths
        # to plain products, which keep the scores (832 queries of 1B's shape took an H200 six times as long as 896).
        more = [(0, 0), (0, 0), (0, -length % TILE), (0, 0)]
        return causal_attention(*(mx.pad(x, more) for x in (queries, keys, values)), **options)[:, :, :length]
    is_plain = not has_kernel and options.get("sinks") is None and keys.shape == values.shape
    if is_plain and has_backward_kernel(queries.shape, keys.shape, queries.dtype):
        return _causal(queries, keys, values, options)
    rows = block_rows(has_kernel, sequences, heads, length, positions, queries.dtype.size)
    if rows == length or (not has_kernel and options.get("sinks") is not None):  # whose gradient would be lost
        return _causal(queries, keys, values, options)
    return (_by_kernel if has_kernel else _recomputed)(queries, keys, values, rows, options)


def _causal(queries: mx.array, keys: mx.array, values: mx.array, options: dict[str, Any]) -> mx.array:
    if device() == "cpu" and queries.dtype == mx.float32 and options.get("sinks") is None:
        return exponentials.causal_attention(queries, keys, values, options["scale"])
    return mx.fast.scaled_dot_product_attention(queries, keys, values, mask="causal", **options)


def _by_kernel(queries: mx.array, keys: mx.array, values: mx.array, rows: int, options: dict[str, Any]) -> mx.array:
    length, before = queries.shape[2], keys.shape[2] - queries.shape[2]
    starts = list(range(rows, length, rows))
    outputs: list[mx.array] = []
    # From the last block on, and the keys cut for the one before: gradients add up in arrays that get shorter.
    for part, end in zip(mx.split(queries, starts, axis=2)[::-1], [*starts, length][::-1], strict=True):
        keys, values = keys[:, :, : before + end], values[:, :, : before + end]
        outputs.append(_causal(part, keys, values, options))
    return mx.concatenate(outputs[::-1], axis=2)


def _recomputed(queries: mx.array, keys: mx.array, values: mx.array, rows: int, options: dict[str, Any]) -> mx.array:
    length, before = queries.shape[2], keys.shape[2] - queries.shape[2]
    blocks = [(start, min(start + rows, length)) for start in range(0, length, rows)]

    @mx.custom_function
    def attention(queries: mx.array, keys: mx.array, values: mx.array) -> mx.array:
        outputs: list[mx.array] = []
        for start, end in blocks:
            part, seen = after(queries[:, :, start:end], outputs[-1:]), before + end
            outputs.append(_causal(part, keys[:, :, :seen], values[:, :, :seen], options))
        return mx.concatenate(outputs, axis=2)

    @attention.vjp
    def attention_vjp(primals: Any, dy: mx.array, _: Any) -> tuple[mx.array, ...]:
        queries, keys, values = primals
        d_queries: list[mx.array] = []
        d_both: list[mx.array] = []  # of keys and values
        for start, end in reversed(blocks):
            part, seen = after(queries[:, :, start:end], [*d_queries[-1:], *d_both]), before + end
            inputs = [part, keys[:, :, :seen], values[:, :, :seen]]
            _, (d_part, *d_seen) = mx.vjp(lambda q, k, v: _causal(q, k, v, options), inputs, [dy[:, :, start:end]])
            d_queries.append(d_part)
            d_whole = [mx.pad(d, [(0, 0), (0, 0), (0, keys.shape[2] - seen), (0, 0)]) for d in d_seen]
            d_both = [a + b for a, b in zip(d_whole, d_both, strict=True)] if d_both else d_whole
        return mx.concatenate(d_queries[::-1], axis=2), *d_both

    return attention(queries, keys, values)
