"""KTO and BCO: losses of completions labelled desirable or not, against a baseline of the whole step; in float32.

Notation as in lib/training/losses.py: r = log[pi(y|x)/pi_ref(y|x)] in nats.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import get_args

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from lib.config.settings import Loss, TrainSettings, UnpairedLoss
from lib.data.batch import MicroBatch
from lib.distributed.world import World
from lib.model.logps import completion_logps
from lib.model.token_stream import arrays_of

UNPAIRED_LOSSES: tuple[UnpairedLoss, ...] = get_args(UnpairedLoss)


def needs_mismatched(loss: Loss) -> bool:
    """Whether a loss needs the log-probability of another prompt's completion, too."""
    return loss == "kto"


@mx.custom_function
def log_sigmoid(x: mx.array) -> mx.array:
    """log sigma(x). The gradient of MLX's logaddexp is good to 1e-8 only."""
    return mx.minimum(x, 0) - mx.log1p(mx.exp(-mx.abs(x)))


@log_sigmoid.vjp
def _log_sigmoid_vjp(x: mx.array, cotangent: mx.array, _: mx.array) -> mx.array:
    e = mx.exp(-mx.abs(x))
    part = cotangent / (1 + e) * e
    return mx.where(x > 0, part, cotangent - part)


def unpaired_losses(
    ratios: mx.array, desirable: mx.array, baseline: mx.array, train: TrainSettings
) -> tuple[mx.array, mx.array]:
    """(losses, rewards beta r), float32 [B], of r, float32 [B], and labels, bool [B]. baseline: kto's z_0 in nats,
    bco's delta in rewards: no gradient."""
    assert ratios.dtype == mx.float32, ratios.dtype
    beta, baseline, signs = train.beta, mx.stop_gradient(baseline), mx.where(desirable, 1.0, -1.0)
    # KTO, Ethayarajh et al. 2024, arXiv:2402.01306, eqs. 7 and 8, without lambda: 1 - sigma(beta (r - z_0)) for a
    # desirable completion, 1 - sigma(beta (z_0 - r)) for another. exp(log sigma(-x)) keeps a small gradient's digits.
    if train.loss == "kto":
        losses = mx.exp(log_sigmoid(-signs * beta * (ratios - baseline)))
    # BCO, Jung et al. 2024, arXiv:2404.04656, section 4, a binary classifier of rewards: -log sigma(beta r - delta), or
    # -log sigma(-(beta r - delta)), without the paper's density ratio (UDM); delta is the mean of all rewards so far.
    else:
        losses = -log_sigmoid(signs * (beta * ratios - baseline))
    weights = mx.where(desirable, train.desirable_weight, train.undesirable_weight)
    return weights * losses, mx.stop_gradient(beta * ratios)


def unpaired_metrics(
    ratios: mx.array, labels: mx.array, rewards: mx.array, baseline: mx.array, train: TrainSettings, counted: mx.array
) -> dict[str, mx.array]:
    """Sums over rows (float32 scalars). counted: float32 [B], 1 for a row, 0 for padding. reward_chosen and
    reward_rejected are over desirable and over undesirable rows. reward_accuracy counts rows on their side of the
    baseline, a tie as 1/2. kl is z_0 for kto; for bco the mean of -r, as `preference_metrics` has it."""
    desirable, is_kto, signs = counted * labels, train.loss == "kto", mx.where(labels, 1.0, -1.0)
    right = 0.5 * (mx.sign(signs * (rewards - (train.beta * baseline if is_kto else baseline))) + 1)
    drift = mx.broadcast_to(baseline, counted.shape) if is_kto else -mx.stop_gradient(ratios)
    return {
        "desirable": desirable.sum(),
        "reward_chosen": (desirable * rewards).sum(),
        "reward_rejected": ((counted - desirable) * rewards).sum(),
        "reward_accuracy": (counted * right).sum(),
        "kl": (counted * drift).sum(),
    }


def unpaired_means(sums: dict[str, float]) -> dict[str, float | None]:
    """What of a step's means has a mean of its own for each label."""
    counts = {"reward_chosen": sums["desirable"], "reward_rejected": sums["pairs"] - sums["desirable"]}
    chosen, rejected = (sums[name] / count if count else None for name, count in counts.items())
    margin = None if chosen is None or rejected is None else chosen - rejected
    means = {"reward_chosen": chosen, "reward_rejected": rejected, "reward_margin": margin}
    return means | {"desirable": counts["reward_chosen"], "undesirable": counts["reward_rejected"]}


def log_ratio_sums(loss: Loss, model: nn.Module, batches: Iterable[MicroBatch], world: World, what: str) -> mx.array:
    """The sum and count of the log ratios that a step's baseline is made of, without dropout: float32 [2]."""
    column, sums = int(needs_mismatched(loss)), mx.zeros(2)
    model.eval()
    for batch, reference in batches:
        scored = batch.mismatched if column else batch
        assert scored is not None and reference is not None
        with world.together(what):
            policy = completion_logps(model, arrays_of(scored.inputs))[: len(batch.rows), 0]
            ratios = policy - mx.array(reference[:, column])
            sums = sums + mx.stack([ratios.sum(), mx.array(float(len(batch.rows)))])
            mx.eval(sums)  # one micro-batch's activations at a time
    model.train()
    return sums


def baseline_of_step(train: TrainSettings, sums: mx.array, rewards: list[float]) -> float:
    """KTO's z_0 (arXiv:2402.01306, section 4.1), the mean r of mismatched completions, in nats, never below 0; or BCO's
    delta, the mean of all rewards so far. sums: of log ratios and their count; rewards: the same of rewards, before."""
    total, count = sums.tolist()
    if not needs_mismatched(train.loss):
        total, count = rewards[0] + train.beta * total, rewards[1] + count
    mean = total / count if count else 0.0
    return 0.0 if mean < 0 and needs_mismatched(train.loss) else mean  # NaN stays NaN, so the step is skipped


def baseline_of_rows(train: TrainSettings, policy: np.ndarray, reference: np.ndarray) -> mx.array:
    """The baseline of rows that are evaluated together, a float32 scalar, of log-probabilities float32 [n, K]."""
    ratios = mx.array(policy) - mx.array(reference)
    compared = ratios[:, int(needs_mismatched(train.loss))]
    sums = mx.stack([compared.sum(), mx.array(float(len(ratios)))])
    return mx.array(baseline_of_step(train, sums, [0.0, 0.0]))
