"""How much memory a training step needs, and which micro-batches fit: by arithmetic from the model's shapes.

For hosts where nothing was measured. lib/plan/memory_trace.py records a step's arrays; here their sum is divided into
what is kept and what passes, for any rows, model and backend. No MLX here.

An array is not free as soon as nobody refers to it. MLX submits work ahead of the device and holds what that work reads
until it is done: up to eleven tasks, each of ten dispatches on a CPU, or one command buffer of a GPU with so many
operations or elements read (MLX 0.32: MAX_ACTIVE_TASKS, DISPATCHES_PER_TASK, `CommandEncoder::needs_commit`). Peaks are
of arrays in use: what MLX's cache keeps besides is given back before an allocation fails.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from lib.data.batch_shapes import NEED, BatchShape, batch_shape_of, real_tokens
from lib.model.partition import Division, ModelShape, divide, rank_bytes
from lib.plan.memory_trace import Step, Training
from lib.system.hardware import Device

MARGIN = 1.05  # for what is small and not written down: views, sums, indices, the rounding of allocations
UPDATED_BYTES = 2**22  # of trained numbers that are updated at a time, as lib/training/optimizers.py has it
STARTED_EARLY = 1.9  # times those: what the next ones' update has made, before this one's is let go
SLICE_BYTES = 2**20  # of an array whose states take 8 bits, as float32


@dataclass(frozen=True)
class StepBytes:
    """A step's largest moment, in parts; all in bytes."""

    weights: int
    trained: int  # adapters, or what full training adds to the weights, and the optimizer's numbers
    gradients: int
    activations: int  # kept for the backward pass, and at work; or what an update makes on the way, if that is more

    @property
    def total(self) -> int:
        return self.weights + self.trained + self.gradients + self.activations


def step_bytes(
    shape: ModelShape, training: Training, batch: BatchShape, device: Device, weight_bytes: int
) -> StepBytes:
    """What a step of micro-batches of this shape needs at its largest moment.

    Args:
        shape: of the model, or of a rank's part of it.
        batch: the largest micro-batch, as lib/data/batch_shapes.py pads it.
        weight_bytes: of all that is loaded, before anything is trained.
    """
    gradients, largest_array, backward = _gradients_and_peak(shape, training, batch, device)
    adapters = 0.0 if training.method == "full" else gradients
    if training.method == "full":  # float32, whatever was loaded
        adapters = max(0.0, (1 - shape.weight_bytes / 4) * gradients)
    optimizer = training.optimizer
    update = optimizer.update * largest_array + optimizer.slice_update * min(largest_array, SLICE_BYTES)
    if not optimizer.slice_update:
        update += STARTED_EARLY * min(gradients, UPDATED_BYTES)
    largest = max(backward, gradients + update)  # of the two no moment has both
    return StepBytes(
        weights=weight_bytes,
        trained=round(adapters + (optimizer.moments + training.moving_reference) * gradients),
        gradients=round(gradients),
        activations=round(MARGIN * largest - gradients),
    )


@functools.lru_cache(maxsize=4096)  # a plan weighs the same steps in several strategies
def _gradients_and_peak(
    shape: ModelShape, training: Training, batch: BatchShape, device: Device
) -> tuple[float, float, float]:
    """Bytes of the gradients, of the largest one, and the most that the passes hold at a time."""
    tape = Step(shape, training, batch, device).write()
    sizes = [array.size_bytes for array in tape.kept_to_the_end]
    return sum(sizes), max(sizes), tape.peak_bytes()


# ---- Micro-batches that fit


# Tokens of a micro-batch beyond which a device gains nothing. One H200 multiplied matrices of an 8B model at its full
# rate from 12,288 on (bfloat16); a GPU with a tenth of its rate, and a CPU, are busy with far fewer.
MOST_TOKENS: dict[Device, int] = {"cpu": 4096, "metal": 4096, "cuda": 16384}


@dataclass(frozen=True)
class Rows:
    """The largest rows of a data set, in tokens; each figure is that of the row that has most."""

    prompt: int  # of the row with most tokens in all
    seen: int  # positions of the longest sequence
    tokens: int  # of a row in all, its prompt once
    scored: int  # of a row, over its completions
    completions: int = 2
    length_multiple: int = 64

    @classmethod
    def of(cls, prompts: np.ndarray, seen: np.ndarray, scored: np.ndarray, length_multiple: int) -> Rows:
        """prompts: int [n]; seen, scored: int [n, K]."""
        tokens = real_tokens(prompts, seen)
        return cls(
            int(prompts[tokens.argmax()]),
            int(seen.max()),
            int(tokens.max()),
            int(scored.sum(axis=1).max()),
            seen.shape[1],
            length_multiple,
        )

    @classmethod
    def mean(cls, prompts: np.ndarray, seen: np.ndarray, scored: np.ndarray, length_multiple: int) -> Rows:
        """A row of mean sizes, for times and traffic: one that has them all, as no row may. Arguments as `of`."""
        return cls(
            round(float(prompts.mean())),
            round(float(seen.max(axis=1).mean())),
            round(float(real_tokens(prompts, seen).mean())),
            round(float(scored.sum(axis=1).mean())),
            seen.shape[1],
            length_multiple,
        )

    def batch(self, pairs: int, shared_prompts: bool) -> BatchShape:
        """A micro-batch of such rows, as lib/data/batch_shapes.py pads it."""
        prompt = min(self.prompt, self.seen)
        widest = min(self.scored, self.seen)
        need = (pairs, prompt, prompt, self.seen, pairs * self.tokens, pairs * self.scored, widest)
        return batch_shape_of(np.array([need], NEED), self.completions, self.length_multiple, shared_prompts)


@dataclass(frozen=True)
class MemoryModel:
    """The model, the method and the rows of a run: they give the memory of any micro-batch on any device."""

    shape: ModelShape
    training: Training
    rows: Rows

    def bytes(self, pairs: int, device: Device, checkpointing: bool | None = None) -> StepBytes:
        """A step of micro-batches of so many pairs, of a host that keeps the whole model."""
        return self.of_part(
            self.shape, sum(rank_bytes(self.shape, divide(self.shape, [1.0]), 0)), pairs, device, checkpointing
        )

    def of_part(
        self, part: ModelShape, weight_bytes: int, pairs: int, device: Device, checkpointing: bool | None = None
    ) -> StepBytes:
        """The same for a rank's part of the model."""
        training = self.training if checkpointing is None else replace(self.training, checkpointing=checkpointing)
        return step_bytes(part, training, self.rows.batch(pairs, training.shared_prompts), device, weight_bytes)

    def most_pairs(self, device: Device) -> int:
        """Pairs of a micro-batch beyond which nothing is gained."""
        return max(1, MOST_TOKENS[device] // self.rows.tokens)


def largest_micro_batch(needed: Callable[[int], float], limit_bytes: float | None, most: int) -> int:
    """The most pairs, up to `most`, that need no more than the limit: 0 where one does not fit."""
    if limit_bytes is None or needed(most) <= limit_bytes:
        return most
    fits, too_many = 0, most
    while too_many - fits > 1:
        middle = (fits + too_many) // 2
        fits, too_many = (middle, too_many) if needed(middle) <= limit_bytes else (fits, middle)
    return fits


def metal_limit_bytes(memory_bytes: int) -> int:
    """What macOS lets the GPU keep, without Metal to ask: about three quarters of a large machine's memory."""
    return memory_bytes * 3 // 4 if memory_bytes > 36 * 2**30 else memory_bytes * 2 // 3


def rank_shape(shape: ModelShape, division: Division, rank: int) -> ModelShape:
    """A rank's part of a divided model, as a model of its own."""
    heads = division.kv_heads[rank]
    return replace(
        shape,
        kv_heads=heads,
        heads=heads * (shape.heads // shape.kv_heads),
        mlp_columns=division.mlp_columns[rank] if division.mlp_columns else 0,
        expert_columns=division.expert_columns[rank] if division.expert_columns else 0,
        vocabulary=division.vocabulary[rank] if division.vocabulary else shape.vocabulary,
    )
