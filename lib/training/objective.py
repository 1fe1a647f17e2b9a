"""What is minimised: the loss and the metrics of some examples, as sums that micro-batches and ranks add up."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from lib.config.settings import TrainSettings
from lib.data.batch import Batch
from lib.model.logps import completion_logps, completion_logps_and_weights, completion_token_logps
from lib.model.token_stream import StreamInputs
from lib.training import losses
from lib.training.group_losses import Groups, group_loss

# What a step adds up over micro-batches and ranks. `count` divides the loss and the gradients (pairs or rows for
# preference losses, tokens for SFT); `pairs` divides the metrics, and `desirable` rewards of desirable rows.
REWARDS = ("reward_chosen", "reward_rejected", "reward_margin", "reward_accuracy", "kl")
OF_TOKENS = ("kl", "entropy", "clip_fraction")  # of grpo: what `completion_tokens` divides
COUNTS = ("loss", "count", "pairs", "desirable", "completions", "completion_tokens", "completion_lengths")
SUMS = (*COUNTS, *REWARDS, "reward", "reward_std", "entropy", "clip_fraction")

Metrics = dict[str, float | None]  # by name; None for what a loss does not have
Figures = tuple[mx.array, ...]  # log-probabilities; and weights, or entropies, where a loss is made of them, too


def figures_of(train: TrainSettings, model: nn.Module, inputs: StreamInputs) -> Figures:
    """What a loss is made of, of the completions of some examples."""
    if train.loss == "grpo":
        return completion_token_logps(model, inputs, train.temperature)
    if train.use_weighting:
        return completion_logps_and_weights(model, inputs)
    return (completion_logps(model, inputs),)


def loss_and_sums(
    train: TrainSettings,
    figures: Figures,
    inputs: StreamInputs,
    reference: mx.array | None,
    labels: mx.array | None,
    baseline: mx.array | None,
) -> tuple[mx.array, mx.array]:
    """The loss, summed over some examples, and SUMS: float32. The arguments are those of `objective`."""
    logps, *others = figures
    if train.loss == "grpo":
        _, sums = group_objective(train, inputs, logps, others[0], reference)
    else:
        counts = inputs["mask"].sum(axis=-1)
        _, sums = objective(train, logps, counts, reference, labels, baseline, *others)
    return sums["loss"], mx.stack([sums.get(name, mx.array(0.0)) for name in SUMS])


def objective(
    train: TrainSettings,
    policy_logps: mx.array,
    tokens: mx.array,
    reference_logps: mx.array | None,
    labels: mx.array | None = None,
    baseline: mx.array | None = None,
    weights: mx.array | None = None,
) -> tuple[mx.array, dict[str, mx.array]]:
    """The losses of some examples, float32 [B] (SFT: summed over tokens), and sums by the names in `SUMS`.

    Args:
        policy_logps, reference_logps: float32 [B, K], of chosen and rejected, or of one completion.
        tokens: [B, K], scored tokens; rows without any are padding, and count nowhere.
        labels: bool [B], whether a completion is desirable; baseline: what such completions are compared with.
        weights: float32 [B, K], of the completions of pairs; a pair's loss is multiplied by both (train.use_weighting).
    """
    counted = (tokens.sum(axis=1) > 0).astype(mx.float32)
    pairs = counted.sum()
    if train.loss == "sft":
        total, count = losses.sft_loss(policy_logps[:, 0], tokens[:, 0])
        return -policy_logps[:, 0], {"loss": total, "count": count, "pairs": pairs}
    if train.loss in losses.UNPAIRED_LOSSES:
        assert reference_logps is not None and labels is not None and baseline is not None
        ratios = mx.where(counted > 0, policy_logps[:, 0] - reference_logps[:, 0], 0.0)
        rows = losses.Labelled(ratios, labels)
        per_row, rewards = losses.unpaired_losses(rows, baseline, train)
        metrics = losses.unpaired_metrics(rows, rewards, baseline, train, counted)
        return per_row, {"loss": (counted * per_row).sum(), "count": pairs, "pairs": pairs, **metrics}

    tokens = mx.where(counted[:, None], tokens, 1)

    def log_probs(logps: mx.array) -> losses.LogProbs:
        logps = mx.where(counted[:, None], logps, -1.0)  # some number that no loss makes an infinity of
        return losses.LogProbs(logps[:, 0], logps[:, 1], tokens[:, 0], tokens[:, 1])

    policy = log_probs(policy_logps)
    reference = None if reference_logps is None else log_probs(reference_logps)
    per_pair, chosen, rejected = losses.preference_losses(train.loss_terms, policy, reference, train)
    if weights is not None:
        per_pair = per_pair * weights[:, 0] * weights[:, 1]
    metrics = losses.preference_metrics(chosen, rejected, policy, reference, counted)
    return per_pair, {"loss": (counted * per_pair).sum(), "count": pairs, "pairs": pairs, **metrics}


def group_objective(
    train: TrainSettings,
    inputs: StreamInputs,
    logps: mx.array,
    entropies: mx.array,
    reference_logps: mx.array | None,
) -> tuple[mx.array, dict[str, mx.array]]:
    """`objective` of groups: losses, float32 [b, K], of log-probabilities and entropies, float32 [b, K, C]."""
    sampling_logps = inputs.get("sampling_logps", mx.stop_gradient(logps))
    rewards, deviation = inputs["rewards"], inputs.get("reward_deviations")
    groups = Groups(logps, sampling_logps, reference_logps, entropies, inputs["mask"], rewards, deviation)
    per_completion, sums = group_loss(train, groups)
    lengths = inputs.get("completion_lengths", groups.tokens)  # masked tokens are a completion's, too
    return per_completion, sums | {"completion_lengths": (lengths * groups.counted).sum()}


def means_of(sums: dict[str, float], train: TrainSettings) -> Metrics:
    """The loss and the metrics from their sums; None for what the loss does not have, and for all of no rows."""

    def mean(name: str, count: str) -> float | None:
        return sums[name] / sums[count] if sums[count] else None

    has_reference = losses.needs_reference(train)
    means: Metrics = {"loss": mean("loss", "count"), **dict.fromkeys(REWARDS)}
    if train.loss == "grpo":  # a step may have completions, and learn none of their tokens
        means |= {name: mean(name, "completion_tokens") for name in OF_TOKENS}
        means |= {"reward": mean("reward", "completions"), "reward_std": mean("reward_std", "pairs")}
        means["completion_length"] = mean("completion_lengths", "completions")
        return means | ({} if has_reference else {"kl": None})
    if train.loss != "sft":
        means |= {name: mean(name, "pairs") for name in REWARDS if name != "kl" or has_reference}
    if train.loss in losses.UNPAIRED_LOSSES:
        counts = {"reward_chosen": sums["desirable"], "reward_rejected": sums["pairs"] - sums["desirable"]}
        means |= {name: sums[name] / count if count else None for name, count in counts.items()}
        chosen, rejected = means["reward_chosen"], means["reward_rejected"]
        means["reward_margin"] = None if chosen is None or rejected is None else chosen - rejected
        means |= {"desirable": counts["reward_chosen"], "undesirable": counts["reward_rejected"]}
    return means


# ---- What kto and bco compare every completion with: one number a step, made before the backward pass


def baseline_of_step(train: TrainSettings, sums: mx.array, rewards: list[float]) -> float:
    """kto's z_0 in nats, or bco's delta in rewards. sums: of log ratios and their count; rewards: before."""
    total, count = sums.tolist()
    if losses.needs_mismatched(train.loss):
        return losses.kl_baseline(total, count)
    total, count = rewards[0] + train.beta * total, rewards[1] + count
    return total / count if count else 0.0


def baseline_of_rows(train: TrainSettings, policy: np.ndarray, reference: np.ndarray) -> mx.array:
    """The baseline of rows that are evaluated together, a float32 scalar, of log-probabilities float32 [n, K]."""
    ratios = mx.array(policy) - mx.array(reference)
    column = int(losses.needs_mismatched(train.loss))
    sums = mx.stack([ratios[:, column].sum(), mx.array(float(len(ratios)))])
    return mx.array(baseline_of_step(train, sums, [0.0, 0.0]))


# ---- Noise


def noisy(
    batches: Iterable[tuple[Batch, np.ndarray | None]], alpha: float, seed: int, step: int
) -> Iterator[tuple[Batch, np.ndarray | None]]:
    """Micro-batches with NEFTune's noise on the embeddings: keys and scales of every token; sqrt(D) is the model's.

    Jain et al. 2023, arXiv:2310.05914, algorithm 1: each number of a token's embedding gets alpha / sqrt(L D) times a
    number drawn evenly from [-1, 1], L being the row's longest sequence. The seed, the step, the row and the token's
    index decide it, so not how rows are laid out.
    """
    for batch, reference in batches:
        rows, numbers = batch.places.T
        seeds = [np.random.SeedSequence([seed, step, int(row)]).generate_state(1)[0] for row in batch.rows]
        keys = np.stack([np.array(seeds, np.uint32)[rows], numbers.astype(np.uint32)], axis=1)
        scales = np.where(rows >= 0, alpha / np.sqrt(batch.longest[rows]), 0).astype(np.float32)
        yield replace(batch, noise_keys=keys, noise_scales=scales), reference
