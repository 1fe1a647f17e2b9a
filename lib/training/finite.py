"""Whether what is trained is still numbers: other weights become no checkpoint, and no adapter."""

from __future__ import annotations

from collections.abc import Iterable

import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers as optim
import numpy as np
from mlx.utils import tree_flatten

from lib.distributed.world import World
from lib.model import adapter_files


def are_finite(world: World, model: nn.Module, optimizer: optim.Optimizer) -> bool:
    """Whether no rank has an infinite number, or none at all, in its trained weights or its optimizer's state."""
    held = [*adapter_files.trainable(model).values(), *(array for _, array in tree_flatten(optimizer.state))]
    checks = [mx.isfinite(array).all() for array in held if mx.issubdtype(array.dtype, mx.floating)]
    mx.eval(checks)
    return not any(world.gather_text("" if all(check.item() for check in checks) else "not finite", "finite weights"))


def bits_are_finite(arrays: Iterable[tuple[mx.Dtype, np.ndarray]]) -> bool:
    """The same of arrays' bytes, uint8 [n], with their types; many small ones take a tenth of the time so."""
    return all(_is_finite(dtype, bits) for dtype, bits in arrays if mx.issubdtype(dtype, mx.floating))


def _is_finite(dtype: mx.Dtype, bits: np.ndarray) -> bool:
    if dtype == mx.bfloat16:  # the upper half of a float32, whose exponent has all bits then
        return not ((bits.view(np.uint16) & 0x7F80) == 0x7F80).any()
    return bool(np.isfinite(bits.view(np.float16 if dtype == mx.float16 else np.float32)).all())
