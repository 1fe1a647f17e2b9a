"""Trained arrays joined: an adapter has hundreds of them, which cost a GPU more to launch than to compute."""

from __future__ import annotations

import copy
import functools
import math
from collections.abc import Callable, Mapping, Sequence
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


class JoinedArrays:
    """What is trained of a model as one array of each kind; the optimizer's state, likewise.

    Between steps the model and `optimizer.state` hold views of these, under their usual names.

    Args:
        kind_of: a parameter's kind, by its name; arrays of a kind are joined in the order of their names.
    """

    def __init__(self, model: nn.Module, optimizer: optim.Optimizer, kind_of: Callable[[str], str]):
        arrays = tree_flatten(model.trainable_parameters())
        self.names = [name for name, _ in arrays]
        self.shapes = [array.shape for _, array in arrays]
        kinds = [kind_of(name) for name in self.names]
        by_name = sorted(range(len(kinds)), key=lambda i: self.names[i])  # two ranks may have the same in another order
        self.members = {kind: [i for i in by_name if kinds[i] == kind] for kind in sorted(set(kinds))}
        self.places = places_of(model)
        self.whole: dict[str, mx.array] | None = None
        self.parts: list[mx.array] = []
        self.seen_state: Mapping[str, Any] | None = optimizer.state
        """The optimizer's state by name: the last that somebody was shown, or has given. None: nobody asked."""
        self.has_new_state = True
        """Whether somebody has given that."""
        self.kept_state: dict[str, Any] | None = None
        """Of an update that has begun and not ended: the joined state before it."""
        self.optimizer = copy.copy(optimizer)
        """The one that updates the joined arrays."""
        self.optimizer.__class__ = _plain(type(optimizer))
        vars(self.optimizer).pop("joined", None)  # of an earlier step, with all that it holds
        optimizer.__class__ = _seen_by_name(_plain(type(optimizer)))
        optimizer.joined, optimizer._state = self, {}

    def join(self, tree: Mapping[str, Any]) -> dict[str, mx.array]:
        """A tree of trained arrays, or of gradients, as one array of each kind: [rows, WIDTH], zeros at its end."""
        return self.of_kinds([array for _, array in tree_flatten(tree)])

    def of_kinds(self, arrays: Sequence[mx.array]) -> dict[str, mx.array]:
        """`join`, of arrays in the order of `names`."""
        return {kind: _joined([arrays[i] for i in members]) for kind, members in self.members.items()}

    def are_in_place(self) -> bool:
        """Whether the model has the views that it was given, and nobody has changed one."""
        return bool(self.parts) and all(
            module[key] is part for (module, key), part in zip(self.places, self.parts, strict=True)
        )

    def put_in_place(self) -> None:
        """Gives the model its views again."""
        for (module, key), part in zip(self.places, self.parts, strict=True):
            module[key] = part

    def parameters(self, learning_rate: float) -> dict[str, mx.array]:
        """The joined arrays, for an update; joined again where somebody else has replaced an array or the state."""
        whole = self.whole if self.are_in_place() else None
        if whole is None:
            whole = self.of_kinds([module[key] for module, key in self.places])
        if self.kept_state is not None and self.seen_state is None:  # an update failed
            self.optimizer.state = self.kept_state
            self.optimizer.init(whole)
        elif self.has_new_state or self.kept_state is not None:
            self.optimizer.state = self._joined_state(self.seen_state or {})
            self.optimizer.init(whole)
        self.has_new_state = False
        state = self.optimizer.state
        self.kept_state = state | {kind: dict(state[kind]) for kind in self.members}
        self.optimizer.learning_rate = learning_rate
        return whole

    def take(self, parameters: Mapping[str, Any]) -> None:
        """Gives the model its views of the updated arrays; the evaluation has begun."""
        whole = dict(parameters)
        mx.async_eval(whole, self.optimizer.state)  # the device has its work before the views are made
        parts = self._parts(whole)
        mx.async_eval(parts)
        self.whole, self.parts, self.seen_state, self.kept_state = whole, parts, None, None
        self.put_in_place()

    def state_by_name(self) -> Mapping[str, Any]:
        """The optimizer's state as everybody else knows it, evaluated: views of the joined one, made when asked for."""
        if self.seen_state is None:
            state = self.optimizer.state if self.kept_state is None else self.kept_state
            keys = next(iter(state[kind] for kind in self.members))
            moments = {key: self._parts({kind: state[kind][key] for kind in self.members}) for key in keys}
            of_names = [(name, {key: views[i] for key, views in moments.items()}) for i, name in enumerate(self.names)]
            others = {name: value for name, value in state.items() if name not in self.members}
            self.seen_state = others | dict(tree_unflatten(of_names))
            mx.eval(self.seen_state)  # whoever asks next may be another thread
        return self.seen_state

    def replace_state(self, state: Mapping[str, Any]) -> None:
        """Goes on with a state by name that somebody gives."""
        self.seen_state, self.has_new_state, self.kept_state = state, True, None

    def _parts(self, whole: Mapping[str, mx.array]) -> list[mx.array]:
        """The views of joined arrays, in the order of `names`."""
        parts: dict[int, mx.array] = {}
        for kind, members in self.members.items():
            ends = np.cumsum([math.prod(self.shapes[i]) for i in members]).tolist()
            pieces = mx.split(whole[kind].reshape(-1), ends)[:-1]
            parts |= {i: piece.reshape(self.shapes[i]) for i, piece in zip(members, pieces, strict=True)}
        return [parts[i] for i in range(len(self.names))]

    def _joined_state(self, state: Mapping[str, Any]) -> dict[str, Any]:
        """An optimizer's state as that of the joined arrays; without what it has not begun yet."""
        flat = dict(tree_flatten(state))
        joined: dict[str, Any] = {name: value for name, value in state.items() if isinstance(value, mx.array)}
        keys = sorted({name.rpartition(".")[2] for name in flat if name.startswith(f"{self.names[0]}.")})
        moments = {key: self.of_kinds([flat[f"{name}.{key}"] for name in self.names]) for key in keys}
        for kind in self.members if keys else ():
            joined[kind] = {key: moments[key][kind] for key in keys}
        return joined


def is_worth_it(model: nn.Module, optimizer: optim.Optimizer) -> bool:
    """Whether what is trained can be updated joined: float32, small, by an optimizer that looks at no shapes."""
    arrays = [array for _, array in tree_flatten(model.trainable_parameters())]
    is_elementwise = type(optimizer) in ELEMENTWISE or hasattr(optimizer, "joined")
    return (
        is_elementwise
        and len(arrays) > 1
        and all(array.dtype == mx.float32 for array in arrays)
        and sum(array.nbytes for array in arrays) <= LARGEST_BYTES
    )


def _joined(arrays: Sequence[mx.array]) -> mx.array:
    padding = mx.zeros(-sum(array.size for array in arrays) % WIDTH)
    return mx.concatenate([*(array.reshape(-1).astype(mx.float32) for array in arrays), padding]).reshape(-1, WIDTH)


def places_of(model: nn.Module) -> list[tuple[Any, Any]]:
    """Where a model has what is trained: each array's module (or list) and its key there, in tree_flatten's order."""
    return [_place(model, name) for name, _ in tree_flatten(model.trainable_parameters())]


def _place(model: nn.Module, name: str) -> tuple[Any, Any]:
    """The module that has an array, and its name there."""
    holder: Any = model
    *path, key = name.split(".")
    for step in path:
        holder = holder[int(step)] if isinstance(holder, list) else holder[step]
    return holder, int(key) if isinstance(holder, list) else key


@functools.cache
def _seen_by_name(kind: Any) -> Any:
    """An optimizer of a kind, whose state is that of joined arrays, under the names of those that they were made of.

    Hundreds of views, made and evaluated, take milliseconds in which a GPU has no work; few steps are followed by
    somebody who looks.
    """

    class SeenByName(kind):  # type: ignore[misc]
        joined: JoinedArrays

        @property
        def state(self) -> Mapping[str, Any]:
            return self.joined.state_by_name()

        @state.setter
        def state(self, state: Mapping[str, Any]) -> None:
            self.joined.replace_state(state)

    return SeenByName


def _plain(kind: Any) -> Any:
    """MLX's own kind of an optimizer that may be seen by name already."""
    return next(base for base in kind.__mro__ if base in ELEMENTWISE)
