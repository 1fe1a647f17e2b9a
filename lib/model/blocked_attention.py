"""Causal attention of long rows in blocks of queries: exact, with memory that grows with the length, not its square.

Where a kernel keeps no scores, blocks save time instead: what the mask hides of whole blocks is not computed.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mlx.core as mx

from lib.model.attention_blocks import TILE, block_rows, is_fused
from lib.model.quantised import device


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
            own, seen = _after(queries[:, :, start:end], outputs[-1:]), before + end
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
            own, seen = _after(queries[:, :, start:end], [*d_queries[-1:], *open_ones]), before + end
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


def _after(x: mx.array, earlier: Sequence[mx.array]) -> mx.array:
    """The same array, made after others: MLX would else make the scores of many blocks at once."""
    return mx.depends([x], list(earlier))[0] if earlier else x
