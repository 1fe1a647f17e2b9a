"""From the gradients' sums to new parameters: one division, the norm, clipping, the optimizer."""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping, Sequence
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers as optim
import numpy as np
from mlx.utils import tree_flatten, tree_map, tree_unflatten

from lib.config.settings import TrainSettings
from lib.training.optimizers import LazyState, apply_gradients, evaluate_in_turn

Tree = Mapping[str, Any]  # MLX's tree of arrays: by name, nested
ELEMENTWISE = (
    *(optim.SGD, optim.RMSprop, optim.Adagrad, optim.AdaDelta),
    *(optim.Adam, optim.AdamW, optim.Adamax, optim.Lion),
)  # MLX's optimizers that treat each number by itself
LARGEST_BYTES = 2**28  # of joined arrays: an update makes every number anew before it lets the old ones go
WIDTH = 1024  # of the joined array's rows: sums of its squares are of a row first
JOINED = "joined"


def update_rule(model: nn.Module, optimizer: optim.Optimizer, train: TrainSettings, is_divided: bool) -> UpdateRule:
    """The rule for what is trained of a model. is_divided: whether ranks hold parts of one model."""
    arrays = [array for _, array in tree_flatten(model.trainable_parameters())]
    has_decay = bool(getattr(optimizer, "weight_decay", 0.0))
    is_joined = (
        compiles(train)
        and not is_divided
        and isinstance(optimizer, LazyState)
        and type(optimizer).__bases__[-1] in ELEMENTWISE
        and train.loraplus_lr_ratio is None
        and len(arrays) > 1
        and all(array.dtype == mx.float32 and (array.ndim > 1 or not has_decay) for array in arrays)
        and sum(array.nbytes for array in arrays) <= LARGEST_BYTES
    )
    return (JoinedUpdateRule if is_joined else UpdateRule)(model, optimizer, train)


class UpdateRule:
    """The update array by array; compiled on a GPU."""

    def __init__(self, model: nn.Module, optimizer: optim.Optimizer, train: TrainSettings):
        self.model, self.optimizer, self.train = model, optimizer, train
        self.optimizer_state: list[Any] = [optimizer.state]  # which a compiled update reads and writes
        self.mean, self._new = self._mean, self._new_parameters
        if compiles(train):
            self.mean = mx.compile(self._mean)
            self._new = mx.compile(self._new_parameters, inputs=self.optimizer_state, outputs=self.optimizer_state)

    def _mean(self, gradients: Tree, count: mx.array) -> tuple[Tree, dict[str, mx.array]]:
        """Mean gradients, and their squared norms by name."""
        mean = tree_map(lambda g: g / mx.maximum(count, 1), gradients)
        # Rows first: float32 forgets what is added to a sum of millions.
        return mean, {name: mx.square(mx.atleast_1d(g)).sum(axis=-1).sum() for name, g in tree_flatten(mean)}

    def _new_parameters(self, parameters: Tree, gradients: Tree, norm: mx.array) -> Tree:
        if self.train.max_grad_norm is not None:
            factor = mx.minimum(self.train.max_grad_norm / (norm + 1e-6), 1.0)
            gradients = tree_map(lambda g: g * factor, gradients)
        return apply_gradients(self.optimizer, gradients, parameters, self.train.loraplus_lr_ratio)

    def take(self, gradients: Tree, norm: mx.array, rate: float) -> None:
        """The update by mean gradients of this global norm; its evaluation has begun."""
        self.optimizer.learning_rate = rate
        self.optimizer_state[0] = self.optimizer.state  # another object after a resume
        self.model.update(self._new(self.model.trainable_parameters(), gradients, norm))
        evaluate_in_turn(self.model.trainable_parameters(), self.optimizer.state)


class JoinedUpdateRule(UpdateRule):
    """The update of all arrays as one: an adapter has hundreds, which cost a GPU more to launch than to compute.

    1B and 8B are 8 to 14 % slower on an H200 without it. Between steps the model holds views under their usual names,
    and so does `optimizer.state` once it is read; others that are put there (a resume, a merge) are joined anew.
    """

    def __init__(self, model: nn.Module, optimizer: LazyState, train: TrainSettings):
        private = copy.copy(optimizer)
        super().__init__(model, private, train)
        self.public, self.trained = optimizer, TrainedArrays(model)
        self.parameters, self.views = mx.array(0.0), list[mx.array]()
        self.public_state: Any = None  # what others saw last

    def _mean(self, gradients: Tree, count: mx.array) -> tuple[Tree, dict[str, mx.array]]:
        by_name = dict(tree_flatten(gradients))  # in the order of a sum over ranks
        return super()._mean({JOINED: _joined([by_name[name] for name in self.trained.names])}, count)

    def take(self, gradients: Tree, norm: mx.array, rate: float) -> None:
        arrays = self.trained.read()
        if [*map(id, arrays)] != [*map(id, self.views)]:
            self.parameters = _joined(arrays)
        if self.public.make_state is None and self.public.state is not self.public_state:
            self.optimizer.state = self._joined_state(self.public.state)
            self.optimizer.init({JOINED: self.parameters})
        self.optimizer.learning_rate = rate
        self.optimizer_state[0] = self.optimizer.state
        self.parameters = self._new({JOINED: self.parameters}, gradients, norm)[JOINED]
        mx.async_eval(self.parameters, self.optimizer.state)  # the device has its work before the views are made
        self.views = self._split(self.parameters)
        mx.async_eval(self.views)
        self.trained.write(self.views)
        self.public.make_state = self._state_by_name

    def _state_by_name(self) -> Tree:
        """The optimizer's state as others know it, evaluated: the one who reads it may be another thread."""
        state = self.optimizer.state
        moments = {key: self._split(array) for key, array in state[JOINED].items()}
        by_name = [
            (f"{name}.{key}", views[i]) for i, name in enumerate(self.trained.names) for key, views in moments.items()
        ]
        self.public_state = {name: value for name, value in state.items() if name != JOINED}
        self.public_state |= tree_unflatten(by_name) if by_name else {}
        mx.eval(self.public_state)
        return self.public_state

    def _split(self, joined: mx.array) -> list[mx.array]:
        """Views of a joined array, in the order of the trained arrays."""
        shapes = self.trained.shapes
        ends = np.cumsum([math.prod(shape) for shape in shapes]).tolist()
        return [p.reshape(shape) for p, shape in zip(mx.split(joined.reshape(-1), ends)[:-1], shapes, strict=True)]

    def _joined_state(self, state: Tree) -> dict[str, Any]:
        """An optimizer's state by name as that of the joined array; without what it has not begun yet."""
        flat, names = dict(tree_flatten(state)), self.trained.names
        joined: dict[str, Any] = {name: value for name, value in state.items() if isinstance(value, mx.array)}
        keys = sorted({name.rpartition(".")[2] for name in flat if name.startswith(f"{names[0]}.")})
        if keys:
            joined[JOINED] = {key: _joined([flat[f"{name}.{key}"] for name in names]) for key in keys}
        return joined


def _joined(arrays: Sequence[mx.array]) -> mx.array:
    """Arrays as one, float32 [rows, WIDTH], with zeros at its end."""
    padding = mx.zeros(-sum(array.size for array in arrays) % WIDTH)
    return mx.concatenate([*(array.reshape(-1).astype(mx.float32) for array in arrays), padding]).reshape(-1, WIDTH)


class TrainedArrays:
    """Where a model has what is trained: each array's module (or list) and its key there, in tree_flatten's order.

    To walk through all modules takes a large model milliseconds, in which its GPU has no work.
    """

    def __init__(self, model: nn.Module):
        arrays = tree_flatten(model.trainable_parameters())
        self.names, self.shapes = [name for name, _ in arrays], [array.shape for _, array in arrays]
        self.places = [_place(model, name) for name in self.names]

    def read(self) -> list[mx.array]:
        """The arrays as they are now."""
        return [holder[key] for holder, key in self.places]

    def write(self, arrays: Sequence[mx.array]) -> None:
        """Puts other arrays there, in the same order."""
        for (holder, key), array in zip(self.places, arrays, strict=True):
            holder[key] = array


def _place(model: nn.Module, name: str) -> tuple[Any, Any]:
    holder: Any = model
    *path, key = name.split(".")
    for part in path:
        holder = holder[int(part)] if isinstance(holder, list) else holder[part]
    return holder, int(key) if isinstance(holder, list) else key


def compiles(train: TrainSettings) -> bool:
    """Whether functions without collectives are compiled: on a GPU, unless the settings say otherwise."""
    return train.compile if train.compile is not None else mx.default_device() == mx.gpu
