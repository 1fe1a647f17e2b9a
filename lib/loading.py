"""Models as their ranks need them: whole, or each rank its part."""

from __future__ import annotations

import mlx.nn as nn

from lib import model as models
from lib import shard, sync
from lib.config import Config
from lib.division import Division, divide, shape_of
from lib.sync import ShardedWorld, World


def divided(model: nn.Module, division: Division | None, world: World) -> World:
    """Leaves every rank its part of a model, which may be loaded lazily; the world of ranks that share it.

    Raises:
        AgreedError: the model cannot be divided so.
    """
    if division is None:
        return world
    with world.agreeing("dividing the model"):
        parts, partial = shard.shard(model, division, world)
    return sync.sharded(world, division, parts, partial)


def load_reference(settings: Config, world: World) -> nn.Module:
    """The reference model; in parts, where the policy is.

    Raises:
        AgreedError: it cannot be loaded or divided, or ranks have unlike ones.
    """
    if world.size > 1:
        world.require_equal("reference model", models.reference_fingerprint(settings.model, settings.train.seed))
    weights = world.division.weights if isinstance(world, ShardedWorld) and world.division else None
    with world.agreeing("loading the reference"):
        model = models.load_reference(settings.model, settings.train.seed, lazy=weights is not None)
        stored = models.stored_config(models.reference_settings(settings.model))
        shape = shape_of(stored, settings.model.dtype) if weights else None
        division = divide(shape, weights, settings.model.shard_vocabulary) if shape and weights else None
    divided(model, division, world)
    return model
