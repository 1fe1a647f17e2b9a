"""Compression of what ranks exchange: gradients of a step, changes of a local SGD round.

Kinds: `none` (float32), `bf16`, `int8` (a scale for each block of 256 values) and `topk` (the largest values and their
indices). What int8 and topk leave out is handed back by `encode`; added to the next array, nothing is lost in
the long run (error feedback: arXiv:1809.07599, algorithm 1; arXiv:1901.09847). `none` and `bf16` can be summed on their
way; int8 and topk cannot, so every rank receives what every other one sent.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Literal

import mlx.core as mx
from mlx.utils import tree_flatten, tree_unflatten

from lib.config.settings import SyncSettings
from lib.distributed.world import World

Arrays = dict[str, mx.array]
Kind = Literal["none", "bf16", "int8", "topk"]


BLOCK = 256  # values that share a scale: 1.6 % more bytes
WITH_FEEDBACK: tuple[Kind, ...] = ("int8", "topk")


def encode(array: mx.array, kind: Kind, fraction: float = 1.0) -> list[mx.array]:
    """What travels of a float array; its shapes and types follow from the array's shape alone. fraction: of topk."""
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
    count = min(flat.size, max(1, math.ceil(fraction * flat.size)))
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


def gather(
    world: World, arrays: Mapping[str, mx.array], settings: SyncSettings, feedback: Mapping[str, mx.array], what: str
) -> tuple[list[Arrays], Arrays]:
    """Every rank's arrays as they arrive, float32, in rank order; and what was left out, for the next time. arrays: by
    name, with the same names and shapes on all ranks. feedback: what the last time left out of these."""
    kind, wanted = settings.compression, {name: arrays[name].astype(mx.float32) for name in sorted(arrays)}
    wanted = {name: array + feedback[name] if name in feedback else array for name, array in wanted.items()}
    sent = {name: encode(array, kind, settings.topk_fraction) for name, array in wanted.items()}
    decoded: list[Arrays] = []
    for theirs in world.gather_arrays([part for parts in sent.values() for part in parts], what):
        rest = iter(theirs)
        decoded.append({n: decode([next(rest) for _ in parts], kind, arrays[n].shape) for n, parts in sent.items()})
    left_out = {}
    if kind in WITH_FEEDBACK:
        left_out = {name: array - decoded[world.rank][name] for name, array in wanted.items()}
    mx.eval(decoded, left_out)
    return decoded, left_out


def sum_gradients(
    world: World, gradients: Any, sums: mx.array, settings: SyncSettings, feedback: Mapping[str, mx.array]
) -> tuple[Any, mx.array, Arrays]:
    """A tree of float32 gradients and a float32 vector summed over all ranks; and what was left out of the gradients.
    The vector of sums and counts is never compressed."""
    if world.size == 1 or settings.compression == "none":
        return *world.sum_gradients(gradients, sums), {}
    what, leaves = "the sum of the gradients", dict(sorted(tree_flatten(gradients)))
    left_out: Arrays = {}
    sums = world.all_sum(sums, what)
    if settings.compression == "bf16":
        summed = world.sum_arrays(list(leaves.values()), what, mx.bfloat16)
        total = {name: array.astype(mx.float32) for name, array in zip(leaves, summed, strict=True)}
    else:
        theirs, left_out = gather(world, leaves, settings, feedback, what)
        total = {name: sum((one[name] for one in theirs[1:]), theirs[0][name]) for name in leaves}
    return tree_unflatten(total), sums, left_out
