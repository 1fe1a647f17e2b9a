"""What kto and bco compare every completion with: one number a step, made before the backward pass.

kto's z_0 comes of log-probabilities of mismatched completions, bco's delta of the rows' own rewards. Either takes a
pass without gradients over all micro-batches of a step, and is a sum and a count over all ranks: which rank had which
row changes nothing. Dropout is off in it.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import AbstractContextManager
from typing import Protocol

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from lib.config.schema import TrainSettings
from lib.data.collate import Batch
from lib.model.logps import completion_logps
from lib.model.token_stream import arrays_of
from lib.training import losses


class Together(Protocol):
    """`World.together`."""

    def __call__(self, what: str) -> AbstractContextManager[None]: ...


def log_ratio_sums(
    model: nn.Module,
    batches: Iterable[tuple[Batch, np.ndarray | None]],
    train: TrainSettings,
    together: Together,
    what: str,
) -> mx.array:
    """Sum and count of the log ratios that a step's baseline is made of, over some micro-batches: float32 [2].

    batches: with the reference's log-probabilities, float32 [b, K].
    """
    column = int(losses.needs_mismatched(train.loss))
    sums = mx.zeros(2)
    model.eval()
    for batch, reference in batches:
        scored = batch.mismatched if column else batch
        assert scored is not None and reference is not None
        with together(what):
            policy = completion_logps(model, arrays_of(scored.inputs))[: len(batch.rows), 0]
            ratios = policy - mx.array(reference[:, column])
            sums = sums + mx.stack([ratios.sum(), mx.array(float(len(batch.rows)))])
            mx.eval(sums)  # one micro-batch's activations at a time
    model.train()
    return sums


def of_step(train: TrainSettings, sums: mx.array, rewards: list[float]) -> float:
    """A step's baseline: z_0 in nats, or delta in rewards.

    sums: as `log_ratio_sums`, over all ranks. rewards: sum and count of the steps before; not changed.
    """
    total, count = sums.tolist()
    if losses.needs_mismatched(train.loss):
        return losses.kl_baseline(total, count)
    total, count = rewards[0] + train.beta * total, rewards[1] + count
    return total / count if count else 0.0


def count_rewards(train: TrainSettings, sums: mx.array, rewards: list[float]) -> None:
    """Adds a step's rewards to those before, where the loss wants to know them."""
    if train.loss == "bco":
        total, count = sums.tolist()
        rewards[0] += train.beta * total
        rewards[1] += count


def of_rows(train: TrainSettings, policy: np.ndarray, reference: np.ndarray) -> mx.array:
    """The baseline of rows that are evaluated, all of them together: a float32 scalar.

    policy, reference: float32 [n, K], log-probabilities. bco's delta is the mean of these rows' own rewards: it depends
    on the model and the data alone.
    """
    ratios = mx.array(policy) - mx.array(reference)
    column = int(losses.needs_mismatched(train.loss))
    sums = mx.stack([ratios[:, column].sum(), mx.array(float(len(ratios)))])
    return mx.array(of_step(train, sums, [0.0, 0.0]))
