"""Trained arrays joined into one: an adapter has hundreds of them, which cost a GPU more to launch than to compute."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers as optim
import numpy as np
from mlx.utils import tree_flatten, tree_unflatten

ELEMENTWISE = (
    optim.SGD,
    optim.RMSprop,
    optim.Adagrad,
    optim.AdaDelta,
    optim.Adam,
    optim.AdamW,
    optim.Adamax,
    optim.Lion,
)  # MLX's optimizers that treat each number by itself
LARGEST_BYTES = 2**28  # of all arrays: an update makes every number anew before it lets the old ones go
WIDTH = 1024  # of the joined array's rows: sums of its squares are of a row first
NAME = "all"  # of the joined array, in a tree of gradients or of parameters


class JoinedArrays:
    """What is trained of a model as one array, in the order of MLX's tree_flatten; the optimizer's state, likewise.

    Between steps the model and `optimizer.state` hold views of these, under their usual names.
    """

    def __init__(self, model: nn.Module, optimizer: optim.Optimizer):
        arrays = tree_flatten(model.trainable_parameters())
        self.names = [name for name, _ in arrays]
        self.shapes = [array.shape for _, array in arrays]
        self.ends: list[int] = np.cumsum([array.size for _, array in arrays]).tolist()
        self.places = [_place(model, name) for name in self.names]
        self.named = optimizer
        """The optimizer whose state everybody sees."""
        self.optimizer = copy.copy(optimizer)
        """The one that updates the joined array."""
        self.whole: mx.array | None = None
        self.parts: list[mx.array] = []
        self.state: Mapping[str, Any] | None = None  # as all see it

    def join(self, tree: Mapping[str, Any]) -> dict[str, mx.array]:
        """A tree of trained arrays, or of their gradients, as a tree of one: [rows, WIDTH], zeros at its end."""
        return {NAME: _joined([array for _, array in tree_flatten(tree)])}

    def are_in_place(self) -> bool:
        """Whether the model has the views that it was given, and nobody has changed one."""
        return bool(self.parts) and all(
            module[key] is part for (module, key), part in zip(self.places, self.parts, strict=True)
        )

    def put_in_place(self) -> None:
        """Gives the model its views again."""
        for (module, key), part in zip(self.places, self.parts, strict=True):
            module[key] = part

    def parameters(self) -> dict[str, mx.array]:
        """The joined array, for an update; joined again where somebody else has replaced an array or the state."""
        whole = self.whole if self.are_in_place() else None
        if whole is None:
            whole = _joined([module[key] for module, key in self.places])
        if self.state is None or self.named.state is not self.state:
            self.optimizer.state = self._joined_state(self.named.state)
            self.optimizer.init({NAME: whole})
        self.state = None  # until `take`: an update that fails leaves nothing to go on with
        self.optimizer.learning_rate = self.named.learning_rate
        return {NAME: whole}

    def take(self, parameters: Mapping[str, Any]) -> None:
        """Gives the model and the optimizer their views of the updated array; the evaluation has begun."""
        whole = parameters[NAME]
        mx.async_eval(whole, self.optimizer.state)  # the device has its work before the views are made
        parts = self._parts(whole)
        moments = {key: self._parts(moment) for key, moment in self.optimizer.state[NAME].items()}
        others = {name: value for name, value in self.optimizer.state.items() if name != NAME}
        of_names = [(name, {key: views[i] for key, views in moments.items()}) for i, name in enumerate(self.names)]
        mx.async_eval(parts, moments)
        self.whole, self.parts = whole, parts
        self.put_in_place()
        self.named.state = self.state = others | dict(tree_unflatten(of_names))

    def _parts(self, whole: mx.array) -> list[mx.array]:
        *pieces, _ = mx.split(whole.reshape(-1), self.ends)
        return [piece.reshape(shape) for piece, shape in zip(pieces, self.shapes, strict=True)]

    def _joined_state(self, state: Mapping[str, Any]) -> dict[str, Any]:
        """An optimizer's state as that of the joined array; without what it has not begun yet."""
        flat = dict(tree_flatten(state))
        joined: dict[str, Any] = {name: value for name, value in state.items() if isinstance(value, mx.array)}
        keys = {name.rpartition(".")[2] for name in flat if name.startswith(f"{self.names[0]}.")}
        if keys:
            joined[NAME] = {key: _joined([flat[f"{name}.{key}"] for name in self.names]) for key in sorted(keys)}
        return joined


def is_worth_it(model: nn.Module, optimizer: optim.Optimizer) -> bool:
    """Whether what is trained can be updated as one array: float32, small, by an optimizer that looks at no shapes."""
    arrays = [array for _, array in tree_flatten(model.trainable_parameters())]
    return (
        type(optimizer) in ELEMENTWISE
        and len(arrays) > 1
        and all(array.dtype == mx.float32 for array in arrays)
        and sum(array.nbytes for array in arrays) <= LARGEST_BYTES
    )


def _joined(arrays: Sequence[mx.array]) -> mx.array:
    padding = mx.zeros(-sum(array.size for array in arrays) % WIDTH)
    return mx.concatenate([*(array.reshape(-1).astype(mx.float32) for array in arrays), padding]).reshape(-1, WIDTH)


def _place(model: nn.Module, name: str) -> tuple[Any, str]:
    """The module that has an array, and its name there."""
    holder: Any = model
    *path, key = name.split(".")
    for step in path:
        holder = holder[int(step)] if isinstance(holder, list) else holder[step]
    return holder, key
