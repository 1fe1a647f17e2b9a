"""How fast each host runs the run's model: by a curve of this model, else by matrix products and operations.

A block's forward pass is 2 operations a weight and token, the head's 2 a weight and scored token; the backward pass as
many again, and as many once more for the gradients of weights in full training.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from lib.model.partition import ModelShape
from lib.plan.calibration import BatchCurve
from lib.plan.facts import PlanFacts
from lib.plan.memory import block_weights
from lib.plan.shares import DEFAULT_MICRO_BATCH_SIZE
from lib.system.hardware import Device

BACKWARD = {"lora": 1.0, "dora": 1.0, "full": 2.0}  # times the forward pass's operations
# Tokens at which a device does half of its matrix-product rate. One H200 did 156 to 375 of 620 TFLOP/s at 512 tokens of
# an 8B model's shapes; smaller devices are busy with fewer.
HALF_RATE_TOKENS: dict[Device, int] = {"cpu": 32, "metal": 64, "cuda": 768}


@dataclass(frozen=True)
class HostSpeeds:
    """Seconds and operations of the run's model on each host."""

    facts: PlanFacts
    shape: ModelShape
    curves: Sequence[BatchCurve]  # of this model, one a rank; empty: by matrix products
    rates: Sequence[float]  # of matrix products, GFLOP/s; empty: not known, all hosts count as equal

    @classmethod
    def of(cls, facts: PlanFacts) -> HostSpeeds:
        assert facts.memory is not None
        curves = [curve for curve in facts.curves(facts.key) if curve is not None]
        rates = [rate for rate in facts.rates() if rate]
        ranks = len(facts.hosts)
        return cls(
            facts, facts.memory.shape, curves if len(curves) == ranks else (), rates if len(rates) == ranks else ()
        )

    @property
    def source(self) -> str:
        """Where they come from, as the plan says it."""
        by_rates = "by the hosts' matrix-product rates" if self.rates else ""
        return (
            "by the hosts' curves"
            if self.curves
            else by_rates or "with equal speeds: none is measured (make calibrate)"
        )

    @property
    def are_known(self) -> bool:
        return bool(self.curves or self.rates)

    def tokens(self, pairs: float) -> tuple[float, float]:
        """Through the blocks, and through the head; of a mean micro-batch."""
        whole = int(np.ceil(pairs))
        tokens, scored = self.facts.tokens(whole)
        return tokens / whole * pairs, scored / whole * pairs

    def block_operations(self, pairs: float) -> np.ndarray:
        """Of each block's forward pass: float64 [L]."""
        sparse = np.arange(self.shape.blocks) >= self.shape.blocks - self.shape.expert_blocks
        dense, experts = (block_weights(self.shape, is_sparse, active=True) for is_sparse in (False, True))
        operations: np.ndarray = 2 * self.tokens(pairs)[0] * np.where(sparse, experts, dense)
        return operations

    def head_operations(self, pairs: float) -> float:
        """Of the head's forward pass."""
        return 2 * self.shape.vocabulary * self.shape.hidden_size * self.tokens(pairs)[1]

    def operations(self, pairs: float, checkpointing: bool) -> float:
        """Forward and backward through the whole model."""
        blocks = float(self.block_operations(pairs).sum())
        passes = 1 + BACKWARD[self.facts.settings.model.method]
        return (blocks + self.head_operations(pairs)) * passes + checkpointing * blocks

    def per_second(self, rank: int, pairs: float) -> float:
        """Operations a second of a host in micro-batches of so many pairs."""
        if self.curves:
            operations = self.operations(pairs, self.facts.key.gradient_checkpointing)
            return operations / float(self.curves[rank].seconds(np.array([pairs]))[0])
        if self.rates:
            half = HALF_RATE_TOKENS[self.facts.hosts[rank].device or "metal"]
            return self.rates[rank] * 1e9 / (1 + half / self.tokens(pairs)[0])
        return 1e12

    def factors(self, rank: int, pairs: float) -> tuple[float, float]:
        """Seconds over those by operations: of a block, and of the head.

        A head, a loss and all that is started for them take longer than their operations say, most so in a small model.
        On CUDA the measured share is not used: with few blocks the host's launches are what was timed there, which
        overlap with the GPU's work in a whole step.
        """
        share = self.curves[rank].outside_blocks if self.curves else None
        if share is None or self.facts.hosts[rank].device == "cuda":
            return 1.0, 1.0
        whole = self.operations(pairs, self.facts.key.gradient_checkpointing)
        head = self.head_operations(pairs) * (1 + BACKWARD[self.facts.settings.model.method])
        return (1 - share) * whole / (whole - head), share * whole / head

    def whole_curves(self, turned_on: bool) -> list[BatchCurve]:
        """Times of the whole model on each host. turned_on: gradient checkpointing. Empty where nothing is known."""
        if self.curves:
            return [curve.slowed(self.operations(1, turned_on) / self.operations(1, False)) for curve in self.curves]
        checkpointing = turned_on or self.facts.key.gradient_checkpointing
        sizes = range(1, DEFAULT_MICRO_BATCH_SIZE + 1)
        return [
            BatchCurve.from_rates(
                {size: size * self.per_second(rank, size) / self.operations(size, checkpointing) for size in sizes}
            )
            for rank in range(len(self.facts.hosts) if self.are_known else 0)
        ]
