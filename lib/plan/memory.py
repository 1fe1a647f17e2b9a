"""How much memory a training step needs, and which micro-batches fit: a formula from the model's shapes.

    step = weights + trained parameters + gradients + optimizer + activations

What a block keeps for the backward pass, in numbers a token (D hidden size; Q, K, F widths of queries, keys and the
MLP; r rank of the adapters): 2 D inputs of norms, 2 D + Q + F inputs of linear layers, Q + 2 K of attention, 2 F of
SwiGLU, 7 r of LoRA; heads x positions of probabilities without a fused kernel; D alone with gradient checkpointing.
Against 54 measured peaks of an H200 the formula lies between 0.8 and 1.35 (tests/test_memory.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

import numpy as np

from lib.data.batch_shapes import NEED, BatchShape, batch_shape_of, real_tokens
from lib.model.partition import PIECE, Division, ModelShape, divide, rank_bytes
from lib.system.hardware import Device

MARGIN = 1.1  # for work that MLX submits ahead, views, the rounding of allocations
LOGITS_BYTES = 2**29  # most bytes of float32 logits at a time, as lib/model/logps.py has it
LONG = 2048  # positions; longer rows attend in blocks, which keep no probabilities
KEPT_OF_RECURRENCE = 3  # numbers for each that its projections make, as measured on a CPU
SCANS = 28  # arrays of a piece of Mamba's at work, as measured on a CPU, where MLX submits them all ahead
MOST_ROWS = 512  # the largest ones, whose sizes are known
SLICE_BYTES = 2**20  # of an array whose optimizer states take 8 bits, as float32
UPDATED_BYTES = 2**23  # of trained numbers whose updates are under way at a time
# Tokens of a micro-batch beyond which a device gains nothing, as measured: an H200's matrix products from 12,288 on; on
# two cores 2,400 took twice as long a pair as 600, since their activations leave the caches.
MOST_TOKENS: dict[Device, int] = {"cpu": 1024, "metal": 4096, "cuda": 16384}


class OptimizerMemory(NamedTuple):
    """Float32 numbers for each trained one; measured on a CPU."""

    moments: float = 2  # kept between steps
    update: float = 5.2  # while an array is updated
    slice_update: float = 0  # the same, where no more than a slice is updated at a time (lib/training/update.py)


ADAM = OptimizerMemory()  # and all that have no line here
OPTIMIZERS = {
    "adafactor": OptimizerMemory(0.02, 6.0),
    "adagrad": OptimizerMemory(1, 4.6),
    "adadelta": OptimizerMemory(2, 7.2),
    "adamw_8bit": OptimizerMemory(0.51, 2.2, 36),
    "lion": OptimizerMemory(1, 5.6),
    "muon": OptimizerMemory(1, 13.0),
    "rmsprop": OptimizerMemory(1, 4.3),
    "sgd": OptimizerMemory(1, 1.3),
}


@dataclass(frozen=True)
class Training:
    """What of the settings decides how much memory a step needs."""

    method: Literal["lora", "dora", "full"] = "lora"
    rank: int = 8
    blocks: int | None = None  # trained, the last ones; None: all
    adapts_embeddings: bool = False
    checkpointing: bool = False
    optimizer: OptimizerMemory = ADAM
    moving_reference: bool = False
    shared_prompts: bool = True


class StepBytes(NamedTuple):
    """A step's largest moment, in parts; all in bytes."""

    weights: int
    trained: int  # adapters, or what full training adds to the weights, and the optimizer's numbers
    gradients: int
    activations: int  # kept for the backward pass, and at work; or an update's scratch, if that is more

    @property
    def total(self) -> int:
        return sum(self)


class BlockBytes(NamedTuple):
    """What one block holds of a micro-batch."""

    saved: float  # for the backward pass
    input: float  # alone, with gradient checkpointing
    at_work: float  # beyond what is kept, while the block runs backward


def activation_bytes_of_block(
    shape: ModelShape, training: Training, batch: BatchShape, device: Device, is_sparse: bool
) -> BlockBytes:
    item = 4 if training.method == "full" else shape.other_bytes
    hidden, queries, keys = shape.hidden_size, shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    times = max(1, shape.experts_per_token) if is_sparse else 1
    columns = times * shape.expert_columns if is_sparse else shape.mlp_columns
    attend = (shape.blocks if shape.attention_blocks is None else shape.attention_blocks) / shape.blocks
    recurrent = shape.recurrent_blocks / shape.blocks * shape.recurrent_columns
    numbers: float = 4 * hidden + attend * (2 * queries + 2 * keys) + (4 if device == "cpu" else 3) * columns
    numbers += KEPT_OF_RECURRENCE * recurrent
    if is_sparse:
        numbers += 2 * times * hidden
    if training.method == "lora":
        numbers += 7 * training.rank
    elif training.method == "dora":  # the outputs as well, and the inputs in float32
        numbers += queries + 2 * keys + 2 * hidden + 2 * columns
        if device != "cpu":
            numbers += (2 * hidden + queries + columns) * (4 - item) / item
    saved = batch.tokens * numbers * item
    if device == "cpu" and item < 4:
        saved += batch.tokens * 2 * hidden * 4
    sequences, positions = batch.rows * batch.completions, batch.prefix + batch.length
    if batch.prefix:  # every completion has a copy of its prompt's keys and values
        saved += attend * 2 * keys * sequences * positions * item
    is_fused = device == "cuda" and item == 2 and shape.head_dim <= 128
    if not is_fused and positions <= LONG:
        saved += attend * batch.scores * shape.heads * item
    at_work: float = batch.tokens * (3 * columns + 4 * hidden) * item + (not is_fused) * 2 * min(
        batch.scores * shape.heads * item, 2**28
    )
    scanned = batch.rows * max(min(batch.prefix, PIECE), batch.completions * min(batch.length, PIECE))
    at_work += SCANS * scanned * shape.scanned_numbers * 4
    weights = block_weights(shape, is_sparse)
    if shape.weight_bytes < shape.other_bytes:  # dequantised for one product at a time
        at_work += hidden * max(columns, queries) * (shape.experts if is_sparse else 1) * item * 2
    if training.method == "dora":  # the adapted weights are made for their norm, in float32
        at_work += 3 * 4 * min(weights, 2 * hidden * max(columns, queries))
    return BlockBytes(saved, batch.tokens * hidden * item, at_work)


def step_bytes(
    shape: ModelShape, training: Training, batch: BatchShape, device: Device, weight_bytes: int
) -> StepBytes:
    """What a step of micro-batches of this shape needs at its largest moment, for a model or a rank's part of it.
    weight_bytes: of all that is loaded, before anything is trained."""
    gradients, largest = (4 * count for count in trained_parameters(shape, training))
    # Full training computes in float32, whatever was loaded.
    adapters = max(0.0, (1 - shape.weight_bytes / 4) * gradients) if training.method == "full" else gradients
    optimizer = training.optimizer
    update = optimizer.update * largest + optimizer.slice_update * min(largest, SLICE_BYTES)
    update += min(gradients, UPDATED_BYTES)
    # Activations of the blocks that gradients pass through, at the largest moment.
    saved, at_work = 0.0, 0.0
    for is_sparse, count in zip((False, True), trained_blocks(shape, training), strict=True):
        if count:
            block = activation_bytes_of_block(shape, training, batch, device, is_sparse)
            saved += count * (block.input if training.checkpointing else block.saved)
            at_work = max(at_work, block.at_work + (block.saved if training.checkpointing else 0.0))
    passes = saved + at_work + head_bytes(shape, training, batch, device)
    if training.method == "full" and training.blocks is None:  # gradients are made as activations are freed
        passes = max(passes, gradients + 0.5 * passes)
    else:
        passes += gradients
    return StepBytes(
        weights=weight_bytes,
        trained=round(adapters + (optimizer.moments + training.moving_reference) * gradients),
        gradients=round(gradients),
        activations=round(MARGIN * max(passes, gradients + update) - gradients),
    )


def trained_blocks(shape: ModelShape, training: Training) -> tuple[int, int]:
    """How many dense blocks are trained, and how many with experts."""
    trained = min(training.blocks or shape.blocks, shape.blocks)
    sparse = min(shape.expert_blocks, trained)
    return trained - sparse, sparse


def head_bytes(shape: ModelShape, training: Training, batch: BatchShape, device: Device) -> float:
    """Logits of one chunk with their gradient, and the hidden states of the scored tokens."""
    item = 4 if training.method == "full" else shape.other_bytes
    logits = min(batch.scored * shape.vocabulary * 4, LOGITS_BYTES) / 4
    width = 12 if device == "cpu" else 2 * item + 4 * (training.method == "full" or training.adapts_embeddings)
    table = shape.vocabulary * shape.hidden_size * item if shape.weight_bytes < shape.other_bytes else 0
    return logits * width + 2 * batch.scored * shape.hidden_size * item + table


def block_weights(shape: ModelShape, is_sparse: bool, active: bool = False) -> float:
    """Weights of one block's linear layers. active: of experts, only those that a token goes through."""
    attention = shape.hidden_size * shape.head_dim * 2 * (shape.heads + shape.kv_heads)
    if not is_sparse:
        return attention + 3 * shape.hidden_size * shape.mlp_columns
    experts = max(1, shape.experts_per_token) if active else shape.experts
    return attention + shape.hidden_size * (3 * shape.expert_columns * experts + shape.experts)


def trained_parameters(shape: ModelShape, training: Training) -> tuple[float, float]:
    """How many parameters are trained, and how many of them the largest array has."""
    hidden, rank, (dense, sparse) = shape.hidden_size, training.rank, trained_blocks(shape, training)
    if training.method == "full":
        table = shape.vocabulary * hidden
        blocks = dense * block_weights(shape, False) + sparse * block_weights(shape, True)
        ends = 0 if training.blocks is not None else table * (1 if shape.is_tied else 2)
        wide = hidden * max(shape.mlp_columns, shape.experts * shape.expert_columns)
        return blocks + ends, max(wide, table if ends else 0)
    queries, keys = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    attention = 3 * hidden + 3 * queries + 2 * keys
    of_dense = attention + 3 * (hidden + shape.mlp_columns)
    of_sparse = attention + 3 * (hidden + max(1, shape.experts_per_token) * shape.expert_columns)
    count = rank * (dense * of_dense + sparse * of_sparse)
    if training.method == "dora":
        count += (dense + sparse) * (queries + 2 * keys + 2 * hidden + 2 * shape.mlp_columns)
    ends = 2 * rank * (shape.vocabulary + hidden) * training.adapts_embeddings
    return count + ends, rank * max(hidden, shape.mlp_columns, shape.vocabulary * training.adapts_embeddings)


# ---- Micro-batches that fit


@dataclass(frozen=True)
class Rows:
    """The largest rows of a data set, in tokens; each figure is that of the rows that have most."""

    prompt: int  # of the row with most tokens in all
    seen: int  # positions of the longest sequence
    tokens: int  # of a row in all, its prompt once
    scored: int  # of a row, over its completions
    completions: int = 2
    length_multiple: int = 64
    sums: Sequence[Sequence[int]] = ()  # tokens and scored tokens of the one, two, three, ... rows that have most
    shortest_prompt: int | None = None  # None: as long as `prompt`

    @classmethod
    def of(cls, prompts: np.ndarray, seen: np.ndarray, scored: np.ndarray, length_multiple: int) -> Rows:
        """prompts: int [n]; seen, scored: int [n, K]."""
        tokens, scored = real_tokens(prompts, seen), scored.sum(axis=1)
        largest = int(prompts[tokens.argmax()]), int(seen.max()), int(tokens.max()), int(scored.max())
        sums = [np.cumsum(np.sort(each)[::-1][:MOST_ROWS]).tolist() for each in (tokens, scored)]
        return cls(*largest, seen.shape[1], length_multiple, sums, int(prompts.min()))

    @classmethod
    def mean(cls, prompts: np.ndarray, seen: np.ndarray, scored: np.ndarray, length_multiple: int) -> Rows:
        """A row of mean sizes, for times and traffic. Arguments as `of`."""
        means = prompts, seen.max(axis=1), real_tokens(prompts, seen), scored.sum(axis=1)
        prompt, longest, tokens, scores = (round(float(of_rows.mean())) for of_rows in means)
        return cls(prompt, longest, tokens, scores, seen.shape[1], length_multiple)

    def batch(self, pairs: int, shared_prompts: bool) -> BatchShape:
        prompt, widest = min(self.prompt, self.seen), min(self.scored, self.seen)
        in_all: list[int] = [pairs * self.tokens, pairs * self.scored]
        if self.sums:
            count = min(pairs, len(self.sums[0]))
            in_all = [-(-of_rows[count - 1] * pairs // count) for of_rows in self.sums]
        shortest = prompt if self.shortest_prompt is None or pairs == 1 else min(prompt, self.shortest_prompt)
        need = (pairs, shortest, prompt, self.seen, *in_all, widest)
        return batch_shape_of(np.array([need], NEED), self.completions, self.length_multiple, shared_prompts)


@dataclass(frozen=True)
class MemoryModel:
    """The model, the method and the rows of a run: they give the memory of any micro-batch on any device."""

    shape: ModelShape
    training: Training
    rows: Rows  # the largest
    typical: Rows | None = None  # of mean sizes; None: as long as the calibration's key says

    def bytes(self, pairs: int, device: Device, checkpointing: bool | None = None) -> StepBytes:
        """A step of micro-batches of so many pairs, of a host that keeps the whole model."""
        return self.of_part(self.shape, whole_weight_bytes(self.shape), pairs, device, checkpointing)

    def of_part(
        self, part: ModelShape, weight_bytes: int, pairs: int, device: Device, checkpointing: bool | None = None
    ) -> StepBytes:
        """The same for a rank's part of the model."""
        training = self.training if checkpointing is None else replace(self.training, checkpointing=checkpointing)
        return step_bytes(part, training, self.rows.batch(pairs, training.shared_prompts), device, weight_bytes)

    def held_bytes(self, ranks: int) -> tuple[float, np.ndarray]:
        """Weights, adapters, gradients, optimizer: of a block, and [p] of what a stage's rank has beside blocks."""
        shape, training = self.shape, self.training
        sparse = shape.expert_blocks / shape.blocks
        weights = (1 - sparse) * block_weights(shape, False) + sparse * block_weights(shape, True)
        # Of a trained parameter: its float32 copy or adapter, the gradient, the optimizer's numbers.
        per_trained = max(0.0, 4 - shape.weight_bytes if training.method == "full" else 4)
        per_trained += 4 * (1 + training.optimizer.moments + training.moving_reference)
        adapted = trained_parameters(shape, replace(training, blocks=shape.blocks, adapts_embeddings=False))[0]
        held = weights * shape.weight_bytes + 2 * shape.hidden_size * shape.other_bytes
        trains_tables = training.method == "full" and training.blocks is None
        ends = np.zeros(ranks)
        for rank in (0, -1):  # the embedding, and the head
            ends[rank] += shape.vocabulary * shape.hidden_size * (shape.weight_bytes + per_trained * trains_tables)
        return float(held + per_trained * adapted / shape.blocks), ends

    def block_bytes(self, device: Device, pairs: int) -> BlockBytes:
        """Of the mean block and a micro-batch."""
        shape, batch = self.shape, self.rows.batch(pairs, self.training.shared_prompts)
        counts = {False: shape.blocks - shape.expert_blocks, True: shape.expert_blocks}
        kinds = [kind for kind, count in counts.items() if count]
        blocks = [activation_bytes_of_block(shape, self.training, batch, device, kind) for kind in kinds]
        saved = sum(block.saved * counts[kind] for kind, block in zip(kinds, blocks, strict=True)) / shape.blocks
        return BlockBytes(saved, blocks[0].input, max(block.at_work for block in blocks))

    def most_pairs(self, device: Device) -> int:
        """Pairs of a micro-batch beyond which nothing is gained."""
        return max(1, MOST_TOKENS[device] // (self.typical or self.rows).tokens)


def whole_weight_bytes(shape: ModelShape) -> int:
    """Bytes of all weights, as loaded."""
    return sum(rank_bytes(shape, divide(shape, [1.0]), 0))


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
