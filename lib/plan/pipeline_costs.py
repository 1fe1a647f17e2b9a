"""What a model's blocks cost on each host, for micro-batches of one size: times, memory and messages. Pure functions.

Times: a block's forward pass is 2 operations a weight and token, the head's 2 a weight and scored token; the backward
pass as many again, and as many once more for the gradients of weights in full training. A host's operations a second
come from a curve of this very model, where all hosts have one (measured or estimated), else from matrix products.
Memory: of 3 and of 6 blocks, by the memory model (lib/plan/memory.py); what lies between them belongs to three blocks.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Literal

import numpy as np

from lib.data.batch_shapes import BatchShape
from lib.model.partition import ModelShape
from lib.plan.calibration import MEMORY_HEADROOM, BatchCurve, Link
from lib.plan.memory import step_bytes
from lib.plan.memory_trace import Training
from lib.plan.pipeline_cuts import CutCosts
from lib.plan.pipeline_schedule import Hop, depths
from lib.plan.run_facts import RankHost, RunFacts
from lib.system.hardware import Device

FEW, MORE = 3, 6  # blocks that the memory model is asked for; DoRA and full training treat the first two apart
BACKWARD = {"lora": 1.0, "dora": 1.0, "full": 2.0}  # times the forward pass's operations
# Tokens at which a device does half of its matrix-product rate. One H200 did 156 to 375 of 620 TFLOP/s at 512 tokens of
# an 8B model's shapes; smaller devices are busy with fewer.
HALF_RATE_TOKENS: dict[Device, int] = {"cpu": 32, "metal": 64, "cuda": 768}
ASSUMED_LINK = Link(backend="ring", latency_seconds=5e-4, bandwidth_bytes_per_second=1.1e8)  # where none is measured

Speed = Literal["curves", "products", "unknown"]


@dataclass(frozen=True)
class PipelineCosts:
    """A run's model and hosts, as far as cuts depend on them; `at` gives the costs of a micro-batch size."""

    shape: ModelShape
    method: Literal["lora", "dora", "full"]
    hosts: Sequence[RankHost]
    rates: Sequence[Callable[[int], float] | None]  # operations a second of each host, by pairs of a micro-batch
    speed: Speed  # where the rates come from
    run: RunFacts
    link_of: Callable[[int], Link | None]  # between a rank and the next; None: not measured
    may_checkpoint: bool = True  # whether a stage may keep its blocks' inputs alone
    must_checkpoint: bool = False
    activation_factor: float = 1.0  # of sync.compression: bytes sent over those of the model's type
    whole_update_seconds: Sequence[float] = ()  # of each host, for all blocks: once a step, clipping and the update
    outside_blocks: Sequence[
        float | None
    ] = ()  # of each host: the share of a micro-batch's time, where it was measured

    def tokens(self, pairs: float) -> float:
        """That go through the blocks, with padding."""
        batch = self._typical(math.ceil(pairs))
        return batch.tokens / math.ceil(pairs) * pairs if batch else pairs * tokens_of_key(self.run)

    def scored(self, pairs: float) -> float:
        """That go through the head."""
        batch = self._typical(math.ceil(pairs))
        return batch.scored / math.ceil(pairs) * pairs if batch else pairs * tokens_of_key(self.run)

    @property
    def number_bytes(self) -> int:
        """Of one number between two blocks: full training computes in float32."""
        return 4 if self.method == "full" else self.shape.other_bytes

    def message_bytes(self, pairs: float) -> float:
        """Activations of a micro-batch at a cut; their gradients have as many."""
        return self.tokens(pairs) * self.shape.hidden_size * self.number_bytes * self.activation_factor

    def whole_operations(self, pairs: float, checkpointing: bool) -> float:
        """Forward and backward through the whole model."""
        blocks = sum(self.block_operations(pairs))
        return (blocks + self.head_operations(pairs)) * (1 + BACKWARD[self.method]) + checkpointing * blocks

    def block_operations(self, pairs: float) -> list[float]:
        """Of each block's forward pass."""
        weights = [block_weights(self.shape, is_sparse, active=True) for is_sparse in sparse_blocks(self.shape)]
        return [2 * weight * self.tokens(pairs) for weight in weights]

    def head_operations(self, pairs: float) -> float:
        """Of the head's forward pass."""
        return 2 * self.shape.vocabulary * self.shape.hidden_size * self.scored(pairs)

    def whole_curve(self, rank: int, sizes: Sequence[int], checkpointing: bool) -> BatchCurve | None:
        """What the whole model would take on a host, had it the memory: to compare other strategies with."""
        rate = self.rates[rank]
        if rate is None or self.speed == "unknown":
            return None
        return BatchCurve.from_rates(
            {size: size * rate(size) / self.whole_operations(size, checkpointing) for size in sizes}
        )

    def at(self, pairs: int, batch_size: int, more_in_flight: int = 0) -> CutCosts:
        """For a global batch in micro-batches of so many pairs at most.

        more_in_flight: micro-batches of every stage but the last, beyond the usual 1F1B's.
        """
        hosts, micro_batches = len(self.hosts), -(-batch_size // pairs)
        mean = batch_size / micro_batches
        rates = np.array([rate(pairs) if rate else 1.0 for rate in self.rates])
        block_factors, head_factors = np.array([self._of_measured(rank, mean) for rank in range(hosts)]).T
        blocks, head = np.array(self.block_operations(mean)), np.zeros(hosts)
        head[-1] = self.head_operations(mean) * head_factors[-1]
        backward = BACKWARD[self.method]
        forward_seconds = _running_sum(blocks * (block_factors / rates)[:, None])
        memory = [self._memory(host.device, pairs) for host in self.hosts]
        embedding, norm_and_head = self._end_weights()
        end_bytes = np.array([of_host.transient_bytes for of_host in memory])
        end_bytes[0] += embedding + memory[0].table_bytes
        end_bytes[-1] += norm_and_head + memory[-1].table_bytes + memory[-1].logits_bytes
        return CutCosts(
            forward_seconds=forward_seconds,
            backward_seconds=forward_seconds * backward,
            held_bytes=_running_sum(np.array([self._held(of_host) for of_host in memory])),
            kept_bytes=_running_sum(np.array([self._by_block(of_host.kept_bytes) for of_host in memory])),
            inputs_bytes=_running_sum(np.array([self._by_block(of_host.inputs_bytes) for of_host in memory])),
            end_forward_seconds=head / rates,
            end_backward_seconds=head * backward / rates,
            end_bytes=end_bytes,
            block_bytes=np.array([of_host.block_bytes for of_host in memory]),
            may_checkpoint=self.may_checkpoint,
            must_checkpoint=self.must_checkpoint,
            input_bytes=self._largest_tokens(pairs) * self.shape.hidden_size * self.number_bytes,
            room_bytes=np.array(
                [(1 - MEMORY_HEADROOM) * host.memory_bytes if host.memory_bytes else np.inf for host in self.hosts]
            ),
            hops=tuple(self._hop(rank, self.message_bytes(mean)) for rank in range(hosts - 1)),
            in_flight=depths(hosts, more_in_flight),
            micro_batches=micro_batches,
        )

    def update_seconds(self, blocks: Sequence[int]) -> float:
        """What follows the passes of a step, on the host that takes longest."""
        wholes = self.whole_update_seconds or (0.0,) * len(blocks)
        return max(whole * count / self.shape.blocks for whole, count in zip(wholes, blocks, strict=True))

    def weight_bytes(self, first_block: int, blocks: int) -> float:
        """Of a stage, as loaded."""
        by_block = [block_bytes(self.shape, is_sparse) for is_sparse in sparse_blocks(self.shape)]
        embedding, norm_and_head = self._end_weights()
        is_last = first_block + blocks == self.shape.blocks
        return (
            sum(by_block[first_block : first_block + blocks]) + embedding * (not first_block) + norm_and_head * is_last
        )

    def trained_bytes(self, rank: int, first_block: int, blocks: int, pairs: int) -> float:
        """Adapters, gradients and optimizer of a stage; of full training those of the embedding and the head, too."""
        memory = self._memory(self.hosts[rank].device, pairs)
        ends = (rank == 0) + (rank == len(self.hosts) - 1)
        return float(self._trained(memory)[first_block : first_block + blocks].sum()) + ends * memory.table_bytes

    @property
    def assumed_links(self) -> list[int]:
        """Ranks whose link to the next one, on another host, nobody measured."""
        names = [host.name for host in self.hosts]
        return [rank for rank, pair in enumerate(pairwise(names)) if pair[0] != pair[1] and self.link_of(rank) is None]

    # ---- Of a host

    def _of_measured(self, rank: int, pairs: float) -> tuple[float, float]:
        """Seconds over those by operations: of a block, and of what the last stage has beside blocks.

        A head, a loss and all that is started for them take longer than their operations say, most so in a small model.
        """
        share = self.outside_blocks[rank] if self.outside_blocks else None
        if share is None:
            return 1.0, 1.0
        checkpointing = self.run.key.gradient_checkpointing  # as the curves were measured
        whole = self.whole_operations(pairs, checkpointing)
        head = self.head_operations(pairs) * (1 + BACKWARD[self.method])
        return (1 - share) * whole / (whole - head), share * whole / head

    def _hop(self, rank: int, size_bytes: float) -> Hop:
        if self.hosts[rank].name == self.hosts[rank + 1].name and self.link_of(rank) is None:
            return Hop()
        link = self.link_of(rank) or ASSUMED_LINK
        return Hop(max(0.0, link.seconds(size_bytes) - link.latency_seconds), link.latency_seconds)

    def _typical(self, pairs: int) -> BatchShape | None:
        rows, model = self.run.typical_rows, self.run.memory_model
        return rows.batch(pairs, model.training.shared_prompts) if rows and model else None

    def _largest_tokens(self, pairs: int) -> float:
        model = self.run.memory_model
        return model.rows.batch(pairs, model.training.shared_prompts).tokens if model else self.tokens(pairs)

    def _end_weights(self) -> tuple[float, float]:
        """Bytes of the embedding, and of norm and head; a tied embedding is held by both ends."""
        table = self.shape.vocabulary * self.shape.hidden_size * self.shape.weight_bytes
        return table, table + self.shape.hidden_size * self.shape.other_bytes

    def _held(self, memory: _HostMemory) -> np.ndarray:
        weights = [block_bytes(self.shape, is_sparse) for is_sparse in sparse_blocks(self.shape)]
        return np.array(weights) + self._trained(memory)

    def _trained(self, memory: _HostMemory) -> np.ndarray:
        """What is trained of each block, where the last ones alone may be."""
        model, blocks = self.run.memory_model, self.shape.blocks
        trained = min(model.training.blocks or blocks, blocks) if model else blocks
        return self._by_block(memory.trained_bytes) * (np.arange(blocks) >= blocks - trained)

    def _by_block(self, of_kinds: tuple[float, float]) -> np.ndarray:
        """One number a block, of (dense, sparse)."""
        return np.array([of_kinds[is_sparse] for is_sparse in sparse_blocks(self.shape)])

    def _memory(self, device: Device | None, pairs: int) -> _HostMemory:
        model = self.run.memory_model
        if model is None or device is None:  # weights count, and what full training adds to them
            trained = [
                16.0 * block_weights(self.shape, is_sparse) * (self.method == "full") for is_sparse in (False, True)
            ]
            table = 16.0 * self.shape.vocabulary * self.shape.hidden_size * (self.method == "full")
            return _HostMemory((trained[0], trained[1]), (0.0, 0.0), (0.0, 0.0), 0.0, 0.0, table, 0.0)
        training = replace(model.training, checkpointing=False, blocks=None, ends_early=False)  # of any block
        batch = model.rows.batch(pairs, training.shared_prompts)
        memory = _host_memory(self.shape, training, batch, device)
        return memory if model.training.blocks is None else replace(memory, table_bytes=0.0)


@dataclass(frozen=True)
class _HostMemory:
    """What training takes beside weights, in bytes; pairs are of (dense, sparse) blocks."""

    trained_bytes: tuple[float, float]  # of one block: adapters, gradients, optimizer
    kept_bytes: tuple[float, float]  # of one block and micro-batch, for the backward pass
    inputs_bytes: tuple[float, float]  # the same with gradient checkpointing
    transient_bytes: float  # of a micro-batch at work, whatever the number of blocks
    block_bytes: float  # beyond that with gradient checkpointing: one block's activations
    table_bytes: float  # what full training adds to the embedding, and as much to the head
    logits_bytes: float


def _host_memory(shape: ModelShape, training: Training, batch: BatchShape, device: Device) -> _HostMemory:
    """From steps of a few blocks, without a vocabulary and with it."""

    def step(blocks: int, is_sparse: bool, checkpointing: bool = False, vocabulary: int = 0) -> tuple[float, float]:
        some = replace(shape, blocks=blocks, expert_blocks=blocks * is_sparse, vocabulary=vocabulary)
        needed = step_bytes(some, replace(training, checkpointing=checkpointing), batch, device, 0)
        return needed.trained + needed.gradients, needed.activations

    trained, kept, inputs, transient, block = [0.0, 0.0], [0.0, 0.0], [0.0, 0.0], 0.0, 0.0
    kinds = set(sparse_blocks(shape))
    for is_sparse in kinds:
        (few_trained, few), (more_trained, more) = step(FEW, is_sparse), step(MORE, is_sparse)
        trained[is_sparse] = (more_trained - few_trained) / (MORE - FEW)
        kept[is_sparse] = max(0.0, (more - few) / (MORE - FEW))
        transient = max(transient, few - FEW * kept[is_sparse])
        few, more = (step(blocks, is_sparse, checkpointing=True)[1] for blocks in (FEW, MORE))
        inputs[is_sparse] = max(0.0, (more - few) / (MORE - FEW))
        block = max(block, few - FEW * inputs[is_sparse] - transient)
    is_sparse = max(kinds)
    without_trained, without = step(FEW, is_sparse)
    with_trained, with_head = step(FEW, is_sparse, vocabulary=shape.vocabulary)
    # The memory model trains one table where embedding and head are tied, else two; each end of a pipeline has one.
    table = (with_trained - without_trained) / (1 if shape.is_tied else 2)
    logits = max(0.0, with_head - without)
    pairs = (trained[0], trained[1]), (kept[0], kept[1]), (inputs[0], inputs[1])
    return _HostMemory(*pairs, transient, block, table, logits)


def rates_of(
    costs_of: Callable[[int], float],
    curves: Sequence[BatchCurve | None],
    gflops: Sequence[float | None],
    devices: Sequence[Device | None],
    tokens: Callable[[float], float],
) -> tuple[list[Callable[[int], float] | None], Speed]:
    """Operations a second of each host, by pairs of a micro-batch, and where they come from.

    Args:
        costs_of: operations of a whole micro-batch of so many pairs, as the curves were measured.
        curves: of this model, one a host, where there is one.
        gflops: of matrix products, where they are known.
        tokens: of so many pairs, through the blocks.
    """

    def by_curve(curve: BatchCurve) -> Callable[[int], float]:
        return lambda pairs: costs_of(pairs) / float(curve.seconds(np.array([pairs]))[0])

    def by_products(rate: float, half: int) -> Callable[[int], float]:
        return lambda pairs: rate * 1e9 / (1 + half / tokens(pairs))

    known = [curve for curve in curves if curve is not None]
    if len(known) == len(curves):
        return [by_curve(curve) for curve in known], "curves"
    measured = [rate for rate in gflops if rate]
    if len(measured) == len(gflops):
        halves = [HALF_RATE_TOKENS[device or "metal"] for device in devices]
        return [by_products(rate, half) for rate, half in zip(measured, halves, strict=True)], "products"
    return [None] * len(curves), "unknown"


def sparse_blocks(shape: ModelShape) -> list[bool]:
    """Which blocks have experts: the last ones."""
    return [index >= shape.blocks - shape.expert_blocks for index in range(shape.blocks)]


def block_weights(shape: ModelShape, is_sparse: bool, active: bool = False) -> float:
    """Weights of one block's linear layers. active: of experts, only those that a token goes through."""
    attention = shape.kv_heads * shape.head_parameters / shape.blocks
    if not is_sparse:
        return attention + 3 * shape.hidden_size * shape.mlp_columns
    experts = max(1, shape.experts_per_token) if active else shape.experts
    return attention + shape.hidden_size * (3 * shape.expert_columns * experts + shape.experts)


def block_bytes(shape: ModelShape, is_sparse: bool) -> float:
    """One block's weights and norms, as loaded."""
    return block_weights(shape, is_sparse) * shape.weight_bytes + 2 * shape.hidden_size * shape.other_bytes


def tokens_of_key(run: RunFacts) -> float:
    """Of a pair or an example, whole rows, where no more is known than the length of a typical one."""
    return run.key.sequence_length * (2 if run.key.records == "preference" else 1)


def _running_sum(by_block: np.ndarray) -> np.ndarray:
    """Of the first n blocks: [p, L] as [p, L + 1]."""
    return np.concatenate([np.zeros((len(by_block), 1)), by_block.cumsum(axis=1)], axis=1)
