"""The optimizers: MLX's by name, AdamW whose moments take 8 bits a number between steps, and the learning rate."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Sequence
from typing import Any

import mlx.core as mx
import mlx.optimizers as optim
import numpy as np

from lib.config.settings import TrainSettings
from lib.errors import UserError

BLOCK = 256  # numbers that share a largest one
LEAST_QUANTISED = 4096  # numbers: smaller arrays keep states of 32 bits
SLICE = 1024 * BLOCK  # numbers whose states are wide at a time
DECADES = 7  # between the smallest code and the largest


class Codes:
    """Float32 arrays as 8 bits a number, with one float32 for every BLOCK of them: dynamic tree quantisation, Dettmers
    et al. 2021, arXiv:2110.02861, section 2.2: every decade has twice the numbers of the one below it."""

    def __init__(self, signed: bool):
        positive = [np.zeros(0)]
        for decade in range(DECADES):
            edges = np.linspace(0.1, 1, 2 ** (decade + (0 if signed else 1)) + 1)
            positive.append(10.0 ** (decade + 1 - DECADES) * (edges[1:] + edges[:-1]) / 2)
        numbers = np.concatenate(positive)
        both = [-numbers, numbers] if signed else [numbers]
        codes = np.sort(np.concatenate([*both, [0.0, 1.0]])).astype(np.float32)  # of the block's largest number
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
    """AdamW whose two moments take 8 bits a number between steps (arXiv:2110.02861); a step computes in float32. Of
    SLICE numbers at a time: their update takes 30 times their bytes on the way, and frees it before the next ones."""

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
        flat, most, new, states = (gradient.reshape(-1), parameter.reshape(-1)), SLICE // BLOCK, [], []
        for start in range(0, len(state["m"]), most):
            of_blocks = {name: array[start : start + most] for name, array in state.items()}
            numbers = slice(start * BLOCK, (start + most) * BLOCK)
            new.append(self._apply_slice(flat[0][numbers], flat[1][numbers], of_blocks))
            states.append(of_blocks)
        state.update({name: mx.concatenate([blocks[name] for blocks in states]) for name in state})
        return mx.concatenate(new).reshape(parameter.shape)

    def _apply_slice(self, gradient: mx.array, parameter: mx.array, state: dict[str, mx.array]) -> mx.array:
        """New numbers, float32 [n], of whole blocks; `state` gets their codes."""
        if self.earlier:
            gradient, *arrays = mx.depends([gradient, *state.values()], self.earlier)
            state.update(zip(state, arrays, strict=True))
        shape = parameter.shape
        wide = {k: codes.decode(state[k], state[f"{k}_largest"], shape) for k, codes in self.moments.items()}
        new = super().apply_single(gradient, parameter, wide)
        for name, codes in self.moments.items():
            state[name], state[f"{name}_largest"] = codes.encode(wide[name])
        self.earlier = [new, *state.values()]
        return new


def learning_rate(train: TrainSettings, step: float, steps: int) -> float:
    """The rate of the step-th of `steps` updates, from 0: a linear rise, then the schedule's fall to the last update.
    For another batch than the one that it was chosen for it grows linearly (arXiv:1706.02677, section 2.1) or with the
    square root (arXiv:1404.5997, section 5), by train.learning_rate_scaling."""
    ratio = train.global_batch_size / (train.learning_rate_batch_size or train.global_batch_size)
    scale = ratio ** {"none": 0.0, "linear": 1.0, "sqrt": 0.5}[train.learning_rate_scaling]
    peak, final = scale * train.learning_rate, scale * train.final_learning_rate
    if step < train.warmup_steps:
        return peak * (step + 1) / (train.warmup_steps + 1)
    progress = min(1.0, (step - train.warmup_steps) / max(1, steps - 1 - train.warmup_steps))
    fall = {"constant": 0.0, "linear": progress, "cosine": (1 - math.cos(math.pi * progress)) / 2}[train.schedule]
    return peak + (final - peak) * fall


def make_optimizer(train: TrainSettings) -> optim.Optimizer:
    """MLX's optimizer of that name, or ours. Raises UserError: it does not know an option."""
    kinds = {name.lower(): kind for name, kind in vars(optim).items() if inspect.isclass(kind)}
    kind: Callable[..., optim.Optimizer] = (kinds | {"adamw_8bit": AdamW8bit})[train.optimizer]
    names = [name for name in inspect.signature(kind).parameters if name != "learning_rate"]  # train.learning_rate
    # MLX leaves Adam's bias correction out unless asked, and Adafactor would overrule the learning rate.
    defaults = {"bias_correction": True, "relative_step": False}
    options: dict[str, object] = {name: value for name, value in defaults.items() if name in names}
    if "weight_decay" in names or train.weight_decay:  # MLX's own default is not always 0
        options["weight_decay"] = train.weight_decay
    options |= train.optimizer_options
    if unknown := sorted(options.keys() - set(names)):
        raise UserError(f"train.optimizer={train.optimizer} has no {', '.join(unknown)}; it has {', '.join(names)}")
    try:  # some options are looked at in the first update alone
        trial, weights = kind(learning_rate=train.learning_rate, **options), {"weight": mx.ones((2, 2))}
        mx.eval(trial.apply_gradients(weights, weights))
    except (TypeError, ValueError, IndexError, OverflowError, RuntimeError) as error:
        fault = f"is not for {train.optimizer}: {str(error).partition(chr(10))[0]}"
        raise UserError(f"train.optimizer_options={train.optimizer_options} {fault}") from None
    return kind(learning_rate=train.learning_rate, **options)
