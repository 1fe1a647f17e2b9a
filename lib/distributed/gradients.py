"""Trees that cross the network, compressed on request: gradients of a step, changes of a round.

`none` and `bf16` can be summed on their way; int8 and topk cannot, so every rank receives what every other sent.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import mlx.core as mx
from mlx.utils import tree_flatten, tree_unflatten

from lib.config.schema import SyncSettings
from lib.distributed import compression
from lib.distributed.world import World

Arrays = dict[str, mx.array]


def gather(
    world: World, arrays: Mapping[str, mx.array], settings: SyncSettings, feedback: Mapping[str, mx.array], what: str
) -> tuple[list[Arrays], Arrays]:
    """Every rank's arrays as they arrive, float32, in rank order; and what was left out, for the next time.

    arrays: by name, with the same names and shapes on all ranks. feedback: what the last time left out of these.
    """
    names, kind = sorted(arrays), settings.compression
    wanted = {name: _with(arrays[name], feedback.get(name)) for name in names}
    sent = [compression.encode(wanted[name], kind, settings.topk_fraction) for name in names]
    received = world.gather_arrays([part for parts in sent for part in parts], what)
    decoded: list[Arrays] = []
    for theirs in received:
        rest = iter(theirs)
        decoded.append(
            {
                name: compression.decode([next(rest) for _ in parts], kind, arrays[name].shape)
                for name, parts in zip(names, sent, strict=True)
            }
        )
    left_out = {}
    if kind in compression.WITH_FEEDBACK:
        left_out = {name: wanted[name] - decoded[world.rank][name] for name in names}
    mx.eval(decoded, left_out)
    return decoded, left_out


def sum_gradients(
    world: World, gradients: Any, sums: mx.array, settings: SyncSettings, feedback: Mapping[str, mx.array]
) -> tuple[Any, mx.array, Arrays]:
    """A tree of float32 gradients and a float32 vector summed over all ranks; and what was left out of the gradients.

    The vector of sums and counts is never compressed.
    """
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
    return tree_unflatten(list(total.items())), sums, left_out


def _with(array: mx.array, left_out: mx.array | None) -> mx.array:
    array = array.astype(mx.float32)
    return array if left_out is None else array + left_out
