"""What is known of a loaded model beside its weights, and where it has its blocks, its backbone and its embedding.

These are found by what they are, not by name, so that it works for any family.
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass
from typing import TYPE_CHECKING

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten

if TYPE_CHECKING:
    from lib.model.pipeline_stage import Stage
    from lib.model.tensor_parallel import PositionsPart, VocabularyPart


@dataclass
class ModelLayout:
    """How a model is held and run.

    Args:
        attention_window: tokens that each attends to, itself included; None for all.
        stage: this rank's blocks, where ranks hold the model in stages.
        vocabulary: this rank's rows of embedding and head, where these are divided.
        positions: this rank's part of the head's positions, where ranks hold the blocks in parts.
        stream_fault: why a stream of tokens is not the same as whole rows; "" if it is; None while not known.
        ends_early: whether the last block may compute the scored tokens alone after its attention.
    """

    attention_window: int | None = None
    stage: Stage | None = None
    vocabulary: VocabularyPart | None = None
    positions: PositionsPart | None = None
    stream_fault: str | None = None
    ends_early: bool = False


_layouts: dict[int, tuple[weakref.ref[nn.Module], ModelLayout]] = {}


def layout_of(model: nn.Module) -> ModelLayout:
    """The model's layout, which those who load and divide it fill in. It lives as long as the model."""
    known = _layouts.get(id(model))
    if known is None or known[0]() is not model:
        key = id(model)
        known = weakref.ref(model, lambda _: _layouts.pop(key, None)), ModelLayout()
        _layouts[key] = known
    return known[1]


def backbone_of(model: nn.Module) -> tuple[nn.Module, str] | None:
    """The module that holds the backbone (the part that owns the blocks), and its name there; None without one."""
    blocks = [*map(id, model.layers)]  # which may be a new list at every look
    for holder in modules_outside_blocks(model):
        for name, part in holder.children().items():
            owns = isinstance(part, nn.Module) and part is not model and part.get("layers")
            if owns and [*map(id, owns)] == blocks:
                return holder, name
    return None


def block_list_of(model: nn.Module) -> list[nn.Module] | None:
    """The list in which a module of the model has its blocks; None without one."""
    wanted = [*map(id, model.layers)]
    for module in model.modules():
        for value in module.values():
            if isinstance(value, list) and [*map(id, value)] == wanted:
                return value
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


def embedding_of(model: nn.Module) -> tuple[nn.Module, str] | None:
    """The module that has the embedding of tokens among its parts, and its name there; None without one."""
    place = backbone_of(model)
    holder = model if place is None else place[0][place[1]]
    return next(((holder, name) for name, part in holder.children().items() if hasattr(part, "as_linear")), None)
