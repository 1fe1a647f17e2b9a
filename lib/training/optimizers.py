"""The optimizer and its learning rate; what MLX lacks: states of 8 bits, and a rate of its own for LoRA's B."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import mlx.core as mx
import mlx.optimizers as optim
import numpy as np
from mlx.utils import tree_flatten, tree_merge, tree_unflatten

from lib.config.settings import TrainSettings
from lib.distributed.world import buckets
from lib.errors import UserError

BLOCK = 256  # numbers that share a largest one
LEAST_QUANTISED = 4096  # numbers: smaller arrays keep states of 32 bits
SLICE = 1024 * BLOCK  # numbers whose states are wide at a time
UPDATED_BYTES = 2**22  # of trained numbers whose updates are evaluated at a time
DECADES = 7  # between the smallest code and the largest


def learning_rate(train: TrainSettings, step: float, steps: int) -> float:
    """The rate of the step-th of `steps` updates, the first being 0: a linear rise, then the schedule's fall.

    The last update has train.final_learning_rate.

    For another batch than the one that it was chosen for it grows linearly (arXiv:1706.02677, section 2.1) or with the
    square root (arXiv:1404.5997, section 5), if asked to.
    """
    ratio = train.global_batch_size / (train.learning_rate_batch_size or train.global_batch_size)
    scale = ratio ** {"none": 0.0, "linear": 1.0, "sqrt": 0.5}[train.learning_rate_scaling]
    peak, final = scale * train.learning_rate, scale * train.final_learning_rate
    if step < train.warmup_steps:
        return peak * (step + 1) / (train.warmup_steps + 1)
    progress = min(1.0, (step - train.warmup_steps) / max(1, steps - 1 - train.warmup_steps))
    fall = {"constant": 0.0, "linear": progress, "cosine": (1 - math.cos(math.pi * progress)) / 2}[train.schedule]
    return peak + (final - peak) * fall


class LazyState:
    """An optimizer whose state is made when it is read: a step that updates arrays joined needs none by name."""

    make_state: Callable[[], Any] | None = None
    _state: Any

    @property
    def state(self) -> Any:
        if self.make_state is not None:
            make, self.make_state = self.make_state, None
            self._state = make()
        return self._state

    @state.setter
    def state(self, state: Any) -> None:
        self.make_state, self._initialized, self._state = None, False, state


def make_optimizer(train: TrainSettings) -> optim.Optimizer:
    """MLX's optimizer of that name, or ours. Raises UserError: it does not know an option."""
    kinds = {name.lower(): kind for name, kind in vars(optim).items() if inspect.isclass(kind)}
    plain = (kinds | {"adamw_8bit": AdamW8bit})[train.optimizer]
    kind: Callable[..., optim.Optimizer] = type(plain.__name__, (LazyState, plain), {})
    known = list(inspect.signature(plain).parameters)
    # MLX leaves Adam's bias correction out unless asked, and Adafactor would overrule the learning rate.
    defaults = {"bias_correction": True, "relative_step": False}
    options: dict[str, object] = {name: value for name, value in defaults.items() if name in known}
    if "weight_decay" in known or train.weight_decay:  # MLX's own default is not always 0
        options["weight_decay"] = train.weight_decay
    options |= train.optimizer_options
    known = [name for name in known if name != "learning_rate"]  # train.learning_rate
    unknown = sorted(options.keys() - set(known))
    if unknown:
        raise UserError(f"train.optimizer={train.optimizer} has no {', '.join(unknown)}; it has {', '.join(known)}")
    try:  # some options are looked at in the first update alone
        trial, weights = kind(learning_rate=train.learning_rate, **options), {"weight": mx.ones((2, 2))}
        mx.eval(trial.apply_gradients(weights, weights))
    except (TypeError, ValueError, IndexError, OverflowError, RuntimeError) as error:
        fault = str(error).partition("\n")[0]
        raise UserError(
            f"train.optimizer_options={train.optimizer_options} is not for {train.optimizer}: {fault}"
        ) from None
    return kind(learning_rate=train.learning_rate, **options)


def dynamic_codes(signed: bool) -> np.ndarray:
    """The 256 numbers that a state of 8 bits can be, of its block's largest: float32, ascending.

    Dynamic tree quantisation, Dettmers et al. 2021, arXiv:2110.02861, section 2.2: every decade below 1 has half the
    numbers of the one above it, evenly spaced.
    """
    positive = [np.zeros(0)]
    for decade in range(DECADES):
        edges = np.linspace(0.1, 1, 2 ** (decade + (0 if signed else 1)) + 1)
        positive.append(10.0 ** (decade + 1 - DECADES) * (edges[1:] + edges[:-1]) / 2)
    numbers = np.concatenate(positive)
    both = [-numbers, numbers] if signed else [numbers]
    return np.sort(np.concatenate([*both, [0.0, 1.0]])).astype(np.float32)


class Codes:
    """Float32 arrays as 8 bits a number, with one float32 for every BLOCK of them."""

    def __init__(self, signed: bool):
        codes = dynamic_codes(signed)
        self.numbers, self.middles = mx.array(codes), mx.array((codes[1:] + codes[:-1]) / 2)
        self.zero = int(np.flatnonzero(codes == 0)[0])

    def zeros(self, size: int) -> tuple[mx.array, mx.array]:
        """Codes, uint8 [blocks, BLOCK], and each block's largest magnitude, float32 [blocks]."""
        blocks = -(-size // BLOCK)
        return mx.full((blocks, BLOCK), self.zero, mx.uint8), mx.zeros(blocks)

    def encode(self, array: mx.array) -> tuple[mx.array, mx.array]:
        """The nearest codes, as `zeros` has them."""
        flat = mx.pad(array.reshape(-1).astype(mx.float32), (0, -array.size % BLOCK)).reshape(-1, BLOCK)
        largest = mx.abs(flat).max(axis=1)
        relative = flat / mx.where(largest > 0, largest, 1)[:, None]
        index = mx.zeros(flat.shape, mx.int32)
        for step in (128, 64, 32, 16, 8, 4, 2, 1):  # a binary search
            index = mx.where(relative > self.middles[index + (step - 1)], index + step, index)
        if self.zero == 0:  # a second moment that became zero would make the next update as large as its root is small
            index = mx.where(flat > 0, mx.maximum(index, 1), index)
        return index.astype(mx.uint8), largest

    def decode(self, codes: mx.array, largest: mx.array, shape: tuple[int, ...]) -> mx.array:
        """float32 of that shape."""
        flat = (self.numbers[codes] * largest[:, None]).reshape(-1)
        return flat[: int(np.prod(shape))].reshape(shape)


class AdamW8bit(optim.AdamW):
    """AdamW whose two moments take 8 bits a number between steps (arXiv:2110.02861); a step computes in float32.

    Of SLICE numbers at a time: their update takes 30 times their bytes on the way, and frees it before the next ones.
    """

    moments = {"m": Codes(signed=True), "v": Codes(signed=False)}
    earlier: Sequence[mx.array] = ()  # what the slice before made, which the next one waits for

    def apply_gradients(self, gradients: Any, parameters: Any) -> Any:
        self.earlier = ()
        return super().apply_gradients(gradients, parameters)

    def init_single(self, parameter: mx.array, state: dict[str, Any]) -> None:
        if parameter.size < LEAST_QUANTISED:
            super().init_single(parameter, state)
            return
        for name, codes in self.moments.items():
            state[name], state[f"{name}_largest"] = codes.zeros(parameter.size)

    def apply_single(self, gradient: mx.array, parameter: mx.array, state: dict[str, Any]) -> mx.array:
        if "m_largest" not in state:
            return super().apply_single(gradient, parameter, state)
        blocks, most = len(state["m"]), SLICE // BLOCK
        flat = gradient.reshape(-1), parameter.reshape(-1)
        new: list[mx.array] = []
        states: list[dict[str, mx.array]] = []
        for start in range(0, blocks, most):
            of_blocks = {name: array[start : start + most] for name, array in state.items()}
            numbers = slice(start * BLOCK, (start + most) * BLOCK)
            new.append(self._apply_slice(flat[0][numbers], flat[1][numbers], of_blocks))
            states.append(of_blocks)
        state.update({name: mx.concatenate([one[name] for one in states]) for name in state})
        return mx.concatenate(new).reshape(parameter.shape)

    def _apply_slice(self, gradient: mx.array, parameter: mx.array, state: dict[str, mx.array]) -> mx.array:
        """New numbers, float32 [n], of whole blocks; `state` gets their codes."""
        if self.earlier:
            gradient, *arrays = mx.depends([gradient, *state.values()], self.earlier)
            state.update(zip(state, arrays, strict=True))
        wide = {
            name: codes.decode(state[name], state[f"{name}_largest"], parameter.shape)
            for name, codes in self.moments.items()
        }
        new = super().apply_single(gradient, parameter, wide)
        for name, codes in self.moments.items():
            state[name], state[f"{name}_largest"] = codes.encode(wide[name])
        self.earlier = [new, *state.values()]
        return new


def evaluate_in_turn(parameters: Any, state: Any) -> None:
    """Starts an update's evaluation, some arrays after the other: MLX would hold what all of them make on the way."""
    flat = tree_flatten(parameters)
    of_states: dict[str, list[mx.array]] = {}
    for name, array in tree_flatten(state):
        of_states.setdefault(name.rpartition(".")[0], []).append(array)
    for bucket in buckets([array.nbytes for _, array in flat], UPDATED_BYTES):
        names = [flat[i][0] for i in bucket]
        mx.async_eval([flat[i][1] for i in bucket], [of_states.pop(name, []) for name in names])
    mx.async_eval(of_states)


def apply_gradients(
    optimizer: optim.Optimizer, gradients: Mapping[str, Any], parameters: Mapping[str, Any], b_ratio: float | None
) -> Any:
    """One update: the new parameters. Norms, biases and DoRA's magnitudes, which are vectors, do not decay.

    b_ratio: LoRA+, Hayou et al. 2024, arXiv:2402.12354, section 5: the learning rate of LoRA's B over that of all else.
    """
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
        new = (
            tree_merge(new, optimizer.apply_gradients(tree_unflatten(group), parameters))
            if new
            else (optimizer.apply_gradients(tree_unflatten(group), parameters))
        )
    optimizer.learning_rate = rate
    if decay:
        optimizer.weight_decay = decay
    return new
