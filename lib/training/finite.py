"""Whether what is trained is still numbers: other weights become no checkpoint, and no adapter."""

from __future__ import annotations

import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers as optim
from mlx.utils import tree_flatten

from lib.distributed.world import World
from lib.model import adapter_files


def are_finite(world: World, model: nn.Module, optimizer: optim.Optimizer) -> bool:
    """Whether no rank has an infinite number, or none at all, in its trained weights or its optimizer's state."""
    held = [*adapter_files.trainable(model).values(), *(array for _, array in tree_flatten(optimizer.state))]
    checks = [mx.isfinite(array).all() for array in held if mx.issubdtype(array.dtype, mx.floating)]
    mx.eval(checks)
    return not any(world.gather_text("" if all(check.item() for check in checks) else "not finite", "finite weights"))
