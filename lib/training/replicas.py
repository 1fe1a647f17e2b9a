"""What ranks hold alike: made the same where it drifted, and compared."""

from __future__ import annotations

import mlx.nn as nn
import mlx.optimizers as optim
from mlx.utils import tree_flatten, tree_unflatten

from lib.distributed.world import World
from lib.model import adapter_files
from lib.training.checkpoint import MovingReference


def share(
    world: World, model: nn.Module, optimizer: optim.Optimizer, reference: MovingReference | None = None
) -> list[int]:
    """Gives every rank rank 0's trained weights, optimizer state and moving reference, of what is replicated.

    Nothing travels where no bit differs. Returns the ranks that differed from rank 0.

    Raises:
        Stopped: a rank does not hold the same afterwards.
    """
    if world.size == 1:
        return []

    def digests() -> str:
        held = [{**adapter_files.trainable(model), **dict(tree_flatten(optimizer.state))}]
        held += [reference.arrays] if reference is not None else []
        return ",".join(adapter_files.digest(world.replicated(arrays)) for arrays in held)

    held = world.gather_text(digests(), "every rank's weights")
    if not (others := [rank for rank, digest in enumerate(held) if digest != held[0]]):
        return []
    if reference is not None:
        reference.arrays = dict(tree_flatten(world.align(tree_unflatten(list(reference.arrays.items())))))
    model.update(world.align(model.trainable_parameters()))
    optimizer.state = world.align(optimizer.state)
    world.require_identical("weights", digests())
    return others
