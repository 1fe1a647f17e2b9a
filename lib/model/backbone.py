"""Where a model of any family has its blocks, its backbone and its embedding: found by what they are, not by name."""

from __future__ import annotations

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten


def backbone_of(model: nn.Module) -> tuple[nn.Module, str] | None:
    """The module that holds the backbone (the part that owns the blocks), and its name there; None without one."""
    blocks = [*map(id, model.layers)]  # which may be a new list at every look
    for holder in modules_outside_blocks(model):
        for name, part in holder.children().items():
            owns = isinstance(part, nn.Module) and part is not model and part.get("layers")
            if owns and [*map(id, owns)] == blocks:
                return holder, name
    return None


def modules_outside_blocks(model: nn.Module) -> list[nn.Module]:
    """The model itself and its parts that are neither a block nor within one; each before its own parts."""
    known, found = set(map(id, model.layers)), [model]
    for module in found:  # which grows
        parts = tree_flatten(module.children(), is_leaf=nn.Module.is_module)
        found += [part for _, part in parts if id(part) not in known]
        known |= {id(part) for _, part in parts}
    return found


def parameters_outside_blocks(model: nn.Module) -> dict[str, mx.array]:
    """Trained parameters that belong to no block, by name."""
    blocks = {id(a) for layer in model.layers for _, a in tree_flatten(layer.trainable_parameters())}
    return {name: a for name, a in tree_flatten(model.trainable_parameters()) if id(a) not in blocks}


def is_frozen(model: nn.Module) -> bool:
    return not parameters_outside_blocks(model)


def embedding_of(model: nn.Module) -> tuple[nn.Module, str] | None:
    """The module that has the embedding of tokens among its parts, and its name there; None without one."""
    place = backbone_of(model)
    holder = model if place is None else place[0][place[1]]
    return next(((holder, name) for name, part in holder.children().items() if hasattr(part, "as_linear")), None)
