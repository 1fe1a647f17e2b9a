"""How fast each host runs the run's model: by a curve of this model, else by matrix products and memory.

A forward pass is 2 operations a weight and token, of the head 2 a weight and scored token; the backward pass as many
again, and as many once more for the gradients of weights in full training. What is no matrix product reads and writes
memory. A measured curve scales the whole; how it falls into blocks and head is the formula's.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from lib.plan.calibration import BatchCurve
from lib.plan.facts import PlanFacts
from lib.plan.memory import MemoryModel, block_weights
from lib.plan.shares import DEFAULT_MICRO_BATCH_SIZE
from lib.system.hardware import Device

BACKWARD = {"lora": 1.0, "dora": 1.0, "full": 2.0}  # times the forward pass's operations
# Tokens at which a device does half of its matrix-product rate. One H200 did 156 to 375 of 620 TFLOP/s at 512 tokens of
# an 8B model's shapes; smaller devices are busy with fewer.
HALF_RATE_TOKENS: dict[Device, int] = {"cpu": 32, "metal": 64, "cuda": 768}
# Of a block's forward pass, however few its tokens: kernels start one after another. An H200 took 98 to 152 ms for
# the step of SmolLM2's 30 blocks with LoRA, whose products last 10.
LEAST_BLOCK_SECONDS: dict[Device, float] = {"cpu": 0.0, "metal": 0.0, "cuda": 0.002}
PASSES_OF_ALL = 45
"""How often a block reads or writes a number for every token and hidden unit, which no division makes fewer.

Forward and backward: 10 for two norms, 12 for residual sums, 5 for what adapters read, 18 for their gradients.
"""
PASSES_OF_COLUMNS = 12  # the same of the MLP's columns
PASSES_OF_LOGITS: dict[Device, int] = {"cpu": 6, "metal": 2, "cuda": 2}  # of the vocabulary, for every scored token
EQUAL_GFLOPS = 1e3  # where no host's rate is known


@dataclass(frozen=True)
class HostSpeeds:
    """Seconds of the run's model on each host."""

    facts: PlanFacts
    memory: MemoryModel
    curves: tuple[BatchCurve, ...]  # of this model, one a rank; or none
    rates: tuple[float, ...]  # of matrix products, GFLOP/s; or none

    @classmethod
    def of(cls, facts: PlanFacts) -> HostSpeeds:
        assert facts.memory is not None
        curves = tuple(curve for curve in facts.measured_curves(facts.key) if curve is not None)
        rates = tuple(rate for rate in facts.rates() if rate)
        ranks = len(facts.hosts)
        return cls(facts, facts.memory, curves * (len(curves) == ranks), rates * (len(rates) == ranks))

    @property
    def source(self) -> str:
        """Where they come from, as the plan says it."""
        by_rates = "by the hosts' matrix-product rates" if self.rates else ""
        return "by the hosts' curves" if self.curves else by_rates or "as if all were equal: none is measured"

    @property
    def are_measured(self) -> bool:
        return bool(self.curves or self.rates)

    def parts(self, rank: int, pairs: float) -> tuple[float, float]:
        """Forward seconds of one (mean) block and of the head, for a micro-batch of so many pairs."""
        block, head = self._by_formula(rank, pairs)
        if not self.curves:
            return block, head
        scale = float(self.curves[rank].seconds(np.array([pairs]))[0]) / self._whole(
            block, head, self.facts.key.gradient_checkpointing
        )
        return block * scale, head * scale

    def whole_curves(self, turned_on: bool) -> list[BatchCurve]:
        """Times of the whole model on each host. turned_on: gradient checkpointing. Empty where nothing is known."""
        checkpointing = turned_on or self.facts.key.gradient_checkpointing
        ranks = range(len(self.facts.hosts) if self.are_measured else 0)
        if self.curves:
            once = [self.parts(rank, 1) for rank in ranks]
            ratios = [self._whole(*parts, turned_on) / self._whole(*parts, False) for parts in once]
            return [curve.slowed(ratio) for curve, ratio in zip(self.curves, ratios, strict=True)]
        curves = []
        for rank in ranks:
            sizes = {*range(1, DEFAULT_MICRO_BATCH_SIZE + 1), self.facts.batch_size}
            least, rates = LEAST_BLOCK_SECONDS[self.facts.hosts[rank].device], dict[int, float]()
            for size in sizes:
                block, head = self._by_formula(rank, size)
                rates[size] = size / self._whole(max(block, least), head, checkpointing)
            curves.append(BatchCurve.from_rates(rates))
        return curves

    def _whole(self, block: float, head: float, checkpointing: bool) -> float:
        """Seconds forward and backward, from those of one block's and the head's forward pass."""
        blocks = block * self.memory.shape.blocks
        return (blocks + head) * (1 + BACKWARD[self.facts.settings.model.method]) + checkpointing * blocks

    def _by_formula(self, rank: int, pairs: float) -> tuple[float, float]:
        shape, device = self.memory.shape, self.facts.hosts[rank].device
        whole = int(np.ceil(pairs))
        tokens, scored = (count / whole * pairs for count in self.facts.tokens(whole))
        sparse = shape.expert_blocks / shape.blocks
        weights = (1 - sparse) * block_weights(shape, False) + sparse * block_weights(shape, True, active=True)
        rate = (self.rates[rank] if self.rates else EQUAL_GFLOPS) * 1e9 / (1 + HALF_RATE_TOKENS[device] / tokens)
        bandwidth = self.facts.memory_speed(rank) * (1 + BACKWARD[self.facts.settings.model.method])
        columns = max(shape.mlp_columns, shape.experts_per_token * shape.expert_columns)
        numbers = PASSES_OF_ALL * shape.hidden_size + PASSES_OF_COLUMNS * columns
        return (
            tokens * (2 * weights / rate + numbers * self.facts.item_bytes / bandwidth),
            scored * shape.vocabulary * (2 * shape.hidden_size / rate + 4 * PASSES_OF_LOGITS[device] / bandwidth),
        )
