"""Arrays made small for the network, and large again: pure functions on MLX arrays.

Kinds: `none` (float32), `bf16`, `int8` (a scale for each block of 256 values) and `topk` (the largest values and their
indices). What int8 and topk leave out is handed back by `encode`; whoever adds it to the next array loses nothing in
the long run (error feedback: arXiv:1809.07599, algorithm 1; arXiv:1901.09847).
"""

from __future__ import annotations

import math
from typing import Literal

import mlx.core as mx

Kind = Literal["none", "bf16", "int8", "topk"]


BLOCK = 256  # values that share a scale: 1.6 % more bytes
WITH_FEEDBACK: tuple[Kind, ...] = ("int8", "topk")


def encode(array: mx.array, kind: Kind, fraction: float = 1.0) -> list[mx.array]:
    """What travels of a float array; its shapes and types follow from the array's shape alone.

    Args:
        fraction: of the values that topk sends, at least one; each costs 8 bytes.
    """
    flat = array.reshape(-1).astype(mx.float32)
    if kind == "none":
        return [flat]
    if kind == "bf16":
        return [flat.astype(mx.bfloat16)]
    if kind == "int8":
        blocks = mx.pad(flat, (0, -flat.size % BLOCK)).reshape(-1, BLOCK)
        scales = mx.abs(blocks).max(axis=1, keepdims=True) / 127
        # A block of zeros has no scale; a value that is not finite makes its whole block so, and is noticed.
        values = mx.round(blocks / mx.where(scales == 0, 1.0, scales))
        return [values.astype(mx.int8).reshape(-1)[: flat.size], scales.reshape(-1)]
    count = kept(flat.size, fraction)
    indices = mx.argpartition(-mx.abs(flat), count - 1)[:count].astype(mx.uint32)
    # A value that is not finite need not be among the largest, but has to be noticed.
    return [indices, flat[indices] + (0 * flat).sum()]


def parts_of(size: int, kind: Kind) -> list[tuple[tuple[int, ...], mx.Dtype]]:
    """Shapes and types of what `encode` makes of so many numbers, but for topk."""
    if kind == "int8":
        return [((size,), mx.int8), ((-(-size // BLOCK),), mx.float32)]
    return [((size,), mx.bfloat16 if kind == "bf16" else mx.float32)]


def decode(parts: list[mx.array], kind: Kind, shape: tuple[int, ...]) -> mx.array:
    """The array that `encode` made small: float32 [*shape]."""
    size = math.prod(shape)
    if kind == "int8":
        values, scales = parts
        blocks = mx.pad(values, (0, -size % BLOCK)).astype(mx.float32).reshape(-1, BLOCK)
        return (blocks * scales[:, None]).reshape(-1)[:size].reshape(shape)
    if kind == "topk":
        indices, values = parts
        flat = mx.zeros(size, mx.float32)
        flat[indices] = values
        return flat.reshape(shape)
    return parts[0].astype(mx.float32).reshape(shape)


def kept(size: int, fraction: float) -> int:
    """How many of `size` values topk sends."""
    return min(size, max(1, math.ceil(fraction * size)))
