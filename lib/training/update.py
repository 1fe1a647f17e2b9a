"""From the gradients' sums to new parameters: clipping, and the update rule.

What MLX lacks: a rate of its own for LoRA's B, and the update of hundreds of arrays as one.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping, Sequence
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers as optim
import numpy as np
from mlx.utils import tree_flatten, tree_map, tree_merge, tree_unflatten

from lib.config.settings import TrainSettings
from lib.distributed.world import buckets

Tree = Mapping[str, Any]  # MLX's tree of arrays: by name, nested
UPDATED_BYTES = 2**22  # of trained numbers whose updates are evaluated at a time


def apply_gradients(
    optimizer: optim.Optimizer, gradients: Mapping[str, Any], parameters: Mapping[str, Any], b_ratio: float | None
) -> Any:
    """One update: the new parameters. Norms, biases and DoRA's magnitudes, which are vectors, do not decay. b_ratio:
    LoRA+, Hayou et al. 2024, arXiv:2402.12354, section 5: the learning rate of LoRA's B over that of all else."""
    decay, shapes = getattr(optimizer, "weight_decay", 0.0), dict(tree_flatten(parameters))
    groups: dict[tuple[float, float], list[tuple[str, mx.array]]] = {}
    for name, gradient in tree_flatten(gradients):
        ratio = b_ratio if b_ratio is not None and name.endswith(".lora_b") else 1.0
        groups.setdefault((ratio, decay if shapes[name].ndim > 1 else 0.0), []).append((name, gradient))
    if not groups or list(groups) == [(1.0, decay)]:  # a stage that trains nothing counts its steps as the others do
        return optimizer.apply_gradients(gradients, parameters)
    optimizer.init(gradients)  # of all groups, where it was not
    step, rate = optimizer.state["step"], optimizer.learning_rate
    new: Any = {}
    for (ratio, decay_of_group), group in groups.items():
        optimizer.state["step"], optimizer.learning_rate = step, rate if ratio == 1 else ratio * rate  # the same step
        if decay:
            optimizer.weight_decay = decay_of_group
        of_group = optimizer.apply_gradients(tree_unflatten(group), parameters)
        new = tree_merge(new, of_group) if new else of_group
    optimizer.learning_rate = rate
    if decay:
        optimizer.weight_decay = decay
    return new


class UpdateRule(optim.Optimizer):
    """The update array by array; compiled on a GPU. To others it is the optimizer, whose state it has."""

    def __init__(self, model: nn.Module, optimizer: optim.Optimizer, train: TrainSettings):
        self.model, self.optimizer, self.train = model, optimizer, train
        mx.eval(optimizer.state)  # a lazy array belongs to its thread
        self.optimizer_state: list[Any] = [optimizer.state]  # which a compiled update reads and writes
        self.mean, self._new = self._mean, self._new_parameters
        if compiles(train):
            self.mean = mx.compile(self._mean)
            self._new = mx.compile(self._new_parameters, inputs=self.optimizer_state, outputs=self.optimizer_state)

    @property
    def state(self) -> dict[str, Any]:
        """The optimizer's, by the arrays' names."""
        return self.optimizer.state

    @state.setter
    def state(self, state: dict[str, Any]) -> None:
        mx.eval(state)
        self.optimizer.state = state

    def init(self, parameters: dict[str, Any]) -> None:
        """Begins what the state does not have yet."""
        self.optimizer.init(parameters)
        mx.eval(self.state)

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
        # Some arrays after the other: MLX would hold what all of them make on the way.
        flat, of_states = tree_flatten(self.model.trainable_parameters()), dict[str, list[mx.array]]()
        for name, array in tree_flatten(self.optimizer.state):
            of_states.setdefault(name.rpartition(".")[0], []).append(array)
        for bucket in buckets([array.nbytes for _, array in flat], UPDATED_BYTES):
            mx.async_eval([(flat[i][1], of_states.pop(flat[i][0], [])) for i in bucket])
        mx.async_eval(of_states)


class TrainedArrays:
    """Each trained array's module (or list) and its key there, in tree_flatten's order: no walk through all modules."""

    def __init__(self, model: nn.Module):
        arrays = tree_flatten(model.trainable_parameters())
        self.names, self.shapes = [name for name, _ in arrays], [array.shape for _, array in arrays]
        self.places: list[tuple[Any, Any]] = []
        for *path, key in (name.split(".") for name in self.names):
            holder: Any = model
            for part in path:
                holder = holder[int(part)] if isinstance(holder, list) else holder[part]
            self.places.append((holder, int(key) if isinstance(holder, list) else key))

    def read(self) -> list[mx.array]:
        """The arrays as they are now."""
        return [holder[key] for holder, key in self.places]

    def write(self, arrays: Sequence[mx.array]) -> None:
        """Puts other arrays there, in the same order."""
        for (holder, key), array in zip(self.places, arrays, strict=True):
            holder[key] = array


def compiles(train: TrainSettings) -> bool:
    """Whether functions without collectives are compiled: on a GPU, unless the settings say otherwise."""
    return train.compile if train.compile is not None else mx.default_device() == mx.gpu


# MLX's optimizers that treat each number by itself.
ELEMENTWISE = optim.SGD, optim.RMSprop, optim.Adagrad, optim.AdaDelta, optim.Adam, optim.AdamW, optim.Adamax, optim.Lion
LARGEST_BYTES = 2**28  # of joined arrays: an update makes every number anew before it frees the old ones
WIDTH = 1024  # of the joined array's rows: sums of its squares are of a row first
JOINED = "joined"


def update_rule(model: nn.Module, optimizer: optim.Optimizer, train: TrainSettings, is_divided: bool) -> UpdateRule:
    """The rule for what is trained of a model; the same again. is_divided: whether ranks hold parts of one model."""
    if isinstance(optimizer, UpdateRule):
        return optimizer
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


class JoinedUpdateRule(UpdateRule):
    """The update of all arrays as one: 1B and 8B are 8 to 14 % slower on an H200 without it. Between steps the model
    holds views; other arrays that are put there (a resume, a merge) are joined anew. The state by name is made when
    somebody reads it: hundreds of views take milliseconds, in which a GPU has no work."""

    def __init__(self, model: nn.Module, optimizer: optim.Optimizer, train: TrainSettings):
        super().__init__(model, copy.copy(optimizer), train)
        self.trained, self.parameters, self.views = TrainedArrays(model), mx.array(0.0), list[mx.array]()
        self.by_name: dict[str, Any] | None = optimizer.state  # None: not made since the last update
        self.is_joined = False  # whether the optimizer has that state

    @property
    def state(self) -> dict[str, Any]:
        """The optimizer's, by the arrays' names; evaluated."""
        if self.by_name is None:
            state = dict(self.optimizer.state)
            moments = {key: self._split(array) for key, array in state.pop(JOINED).items()}
            names = enumerate(self.trained.names)
            by_name = [(f"{name}.{key}", views[i]) for i, name in names for key, views in moments.items()]
            self.by_name = state | (tree_unflatten(by_name) if by_name else {})
            mx.eval(self.by_name)
        return self.by_name

    @state.setter
    def state(self, state: dict[str, Any]) -> None:
        mx.eval(state)
        self.by_name, self.is_joined = state, False

    def init(self, parameters: dict[str, Any]) -> None:
        """Begins what the state does not have yet."""
        begun = copy.copy(self.optimizer)
        begun.state = self.state
        begun.init(parameters)
        self.state = begun.state

    def _mean(self, gradients: Tree, count: mx.array) -> tuple[Tree, dict[str, mx.array]]:
        by_name = dict(tree_flatten(gradients))  # in the order of a sum over ranks
        return super()._mean({JOINED: _joined([by_name[name] for name in self.trained.names])}, count)

    def take(self, gradients: Tree, norm: mx.array, rate: float) -> None:
        arrays, names = self.trained.read(), self.trained.names
        if [*map(id, arrays)] != [*map(id, self.views)]:
            self.parameters = _joined(arrays)
        if not self.is_joined:
            flat = dict(tree_flatten(self.state))
            joined: dict[str, Any] = {name: array for name, array in flat.items() if "." not in name}
            if keys := sorted({name.rpartition(".")[2] for name in flat if name.startswith(f"{names[0]}.")}):
                joined[JOINED] = {key: _joined([flat[f"{name}.{key}"] for name in names]) for key in keys}
            self.optimizer.state, self.is_joined = joined, True
            self.optimizer.init({JOINED: self.parameters})
        self.optimizer.learning_rate = rate
        self.optimizer_state[0] = self.optimizer.state
        self.parameters, self.by_name = self._new({JOINED: self.parameters}, gradients, norm)[JOINED], None
        mx.async_eval(self.parameters, self.optimizer.state)  # the device has its work before the views are made
        self.views = self._split(self.parameters)
        self.trained.write(self.views)
        mx.async_eval(self.views)

    def _split(self, joined: mx.array) -> list[mx.array]:
        """Views of a joined array, in the order of the trained arrays."""
        shapes = self.trained.shapes
        ends = np.cumsum([math.prod(shape) for shape in shapes]).tolist()
        return [p.reshape(shape) for p, shape in zip(mx.split(joined.reshape(-1), ends)[:-1], shapes, strict=True)]


def _joined(arrays: Sequence[mx.array]) -> mx.array:
    """Arrays as one, float32 [rows, WIDTH], with zeros at its end."""
    padding = mx.zeros(-sum(array.size for array in arrays) % WIDTH)
    return mx.concatenate([*(array.reshape(-1).astype(mx.float32) for array in arrays), padding]).reshape(-1, WIDTH)
