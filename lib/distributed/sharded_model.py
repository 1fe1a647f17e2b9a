"""Models as their ranks need them: whole, or each rank its part."""

from __future__ import annotations

import mlx.nn as nn
from mlx.utils import tree_flatten

from lib.config.schema import Config
from lib.data import tokenizer
from lib.distributed.sharded_world import ShardedWorld, sharded
from lib.distributed.world import World
from lib.model import load, tensor_parallel
from lib.model.partition import Division, divide, model_shape_of
from lib.system import metal


def divided(model: nn.Module, division: Division | None, world: World, wired: str | None = None) -> World:
    """Leaves every rank its part of a model, which may be loaded lazily; the world of ranks that share it.

    wired: on a Mac, whether to keep in memory what MLX holds, by this model's size (metal.wired).

    Raises:
        AgreedError: the model cannot be divided so.
    """
    if division is not None:
        with world.agreeing("dividing the model"):
            parts, partial = tensor_parallel.shard(model, division, world)
        world = sharded(world, division, parts, partial)
    if wired is not None:
        metal.keep_wired(wired, sum(array.nbytes for _, array in tree_flatten(model.parameters())))
    return world


def load_reference(settings: Config, world: World) -> nn.Module:
    """The reference model; in parts, where the policy is.

    Raises:
        AgreedError: it cannot be loaded or divided, or ranks have unlike ones.
    """
    if world.size > 1:
        world.require_equal("reference model", load.reference_fingerprint(settings.model, settings.train.seed))
    weights = world.division.weights if isinstance(world, ShardedWorld) and world.division else None
    with world.agreeing("loading the reference"):
        model = load.load_reference(settings.model, settings.train.seed, lazy=weights is not None)
        stored = tokenizer.stored_config(load.reference_settings(settings.model))
        shape = model_shape_of(stored, settings.model.dtype) if weights else None
        division = divide(shape, weights, settings.model.shard_vocabulary) if shape and weights else None
    divided(model, division, world)
    return model
