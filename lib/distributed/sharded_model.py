"""Models as their ranks need them: whole, or each rank its part."""

from __future__ import annotations

import time
from dataclasses import replace

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten

from lib.config.schema import Config
from lib.data import tokenizer
from lib.distributed.links import links_of
from lib.distributed.pipelined_world import PipelinedWorld, pipelined
from lib.distributed.sharded_world import ShardedWorld, sharded
from lib.distributed.world import World
from lib.model import load, pipeline_stage, tensor_parallel
from lib.model.partition import Division, apportion, divide, model_shape_of
from lib.system import metal

Blocks = tuple[int, ...]  # consecutive blocks of each rank


def divided(model: nn.Module, division: Division | Blocks | None, world: World, wired: str | None = None) -> World:
    """Leaves every rank its part of a model, which may be loaded lazily; the world of ranks that share it.

    Args:
        division: of every block, or how many blocks each rank keeps; None: every rank keeps all.
        wired: on a Mac, whether to keep in memory what MLX holds, by this model's size (metal.wired).

    Raises:
        AgreedError: the model cannot be divided so.
    """
    if isinstance(division, tuple):
        links = world.links if isinstance(world, PipelinedWorld) else links_of(world)
        began = time.perf_counter()
        with world.agreeing("cutting the model"):
            stage = pipeline_stage.cut(model, division, world.rank, links)
            mx.eval(model.parameters())
        world = replace(pipelined(world, division, stage, links), loading_seconds=time.perf_counter() - began)
    elif division is not None:
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
    if isinstance(world, PipelinedWorld):
        with world.agreeing("loading the reference"):
            model = load.load_reference(settings.model, settings.train.seed, lazy=True)
            count = len(model.layers)
            blocks = world.blocks if count == sum(world.blocks) else apportion(count, world.blocks, what="blocks")
            pipeline_stage.cut(model, blocks, world.rank, world.links)
        return model
    with world.agreeing("loading the reference"):
        model = load.load_reference(settings.model, settings.train.seed, lazy=weights is not None)
        stored = tokenizer.stored_config(load.reference_settings(settings.model))
        shape = model_shape_of(stored, settings.model.dtype) if weights else None
        division = divide(shape, weights, settings.model.shard_vocabulary) if shape and weights else None
    divided(model, division, world)
    return model
