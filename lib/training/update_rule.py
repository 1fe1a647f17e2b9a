"""From the gradients' sums to new parameters: one division, the norm, clipping, the optimizer."""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers as optim
import numpy as np
from mlx.utils import tree_flatten, tree_map, tree_unflatten

from lib.config.schema import TrainSettings
from lib.training.optimizers import apply_gradients, evaluate_in_turn

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
        and type(optimizer) in ELEMENTWISE
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

    1B and 8B are 8 to 14 % slower on an H200 without it. Between steps the model and `optimizer.state` hold views under
    their usual names; where somebody has put others there (a resume, a merge), these are joined anew.
    """

    def __init__(self, model: nn.Module, optimizer: optim.Optimizer, train: TrainSettings):
        super().__init__(model, copy.copy(optimizer), train)
        self.public, self.public_state = optimizer, None
        arrays = tree_flatten(model.trainable_parameters())
        self.names, self.shapes = [name for name, _ in arrays], [array.shape for _, array in arrays]
        self.parameters, self.views = mx.array(0.0), list[mx.array]()

    def _mean(self, gradients: Tree, count: mx.array) -> tuple[Tree, dict[str, mx.array]]:
        by_name = dict(tree_flatten(gradients))  # in the order of a sum over ranks
        return super()._mean({JOINED: self._join([(name, by_name[name]) for name in self.names])}, count)

    def take(self, gradients: Tree, norm: mx.array, rate: float) -> None:
        arrays = tree_flatten(self.model.trainable_parameters())
        if len(self.views) != len(arrays) or any(
            a is not view for (_, a), view in zip(arrays, self.views, strict=True)
        ):
            self.parameters = self._join(arrays)
        if self.public.state is not self.public_state:
            self.optimizer.state = self._joined_state(self.public.state)
            self.optimizer.init({JOINED: self.parameters})
        self.optimizer.learning_rate = rate
        self.optimizer_state[0] = self.optimizer.state
        self.parameters = self._new({JOINED: self.parameters}, gradients, norm)[JOINED]
        state = self.optimizer.state
        mx.async_eval(self.parameters, state)  # the device has its work before the views are made
        self.views = self._split(self.parameters)
        mx.async_eval(self.views)
        self.model.update(tree_unflatten(list(zip(self.names, self.views, strict=True))))
        moments = {key: self._split(array) for key, array in state[JOINED].items()}
        of_names = [(f"{name}.{key}", views[i]) for i, name in enumerate(self.names) for key, views in moments.items()]
        others = {name: value for name, value in state.items() if name != JOINED}
        self.public.state = others | tree_unflatten(of_names) if of_names else others
        self.public_state = self.public.state

    def _join(self, arrays: list[tuple[str, mx.array]]) -> mx.array:
        """Arrays in the order of `names` as one, float32 [rows, WIDTH], with zeros at its end."""
        padding = mx.zeros(-sum(array.size for _, array in arrays) % WIDTH)
        return mx.concatenate([*(a.reshape(-1).astype(mx.float32) for _, a in arrays), padding]).reshape(-1, WIDTH)

    def _split(self, joined: mx.array) -> list[mx.array]:
        """Views of a joined array, in the order of `names`."""
        ends = np.cumsum([math.prod(shape) for shape in self.shapes]).tolist()
        return [p.reshape(s) for p, s in zip(mx.split(joined.reshape(-1), ends)[:-1], self.shapes, strict=True)]

    def _joined_state(self, state: Tree) -> dict[str, Any]:
        """An optimizer's state by name as that of the joined array; without what it has not begun yet."""
        flat = dict(tree_flatten(state))
        joined: dict[str, Any] = {name: value for name, value in state.items() if isinstance(value, mx.array)}
        keys = sorted({name.rpartition(".")[2] for name in flat if name.startswith(f"{self.names[0]}.")})
        if keys:
            joined[JOINED] = {key: self._join([(n, flat[f"{n}.{key}"]) for n in self.names]) for key in keys}
        return joined


def compiles(train: TrainSettings) -> bool:
    """Whether functions without collectives are compiled: on a GPU, unless the settings say otherwise."""
    return train.compile if train.compile is not None else mx.default_device() == mx.gpu
