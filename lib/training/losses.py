"""What is minimised: losses of log-probabilities, in float32, one per paper, and the metrics of their rows.

Everything here is a sum beside a count, or an array of pairs, never a mean: ranks and micro-batches of unequal size add
sums and counts, and divide once at the end. The count is of pairs for preference losses, of rows for unpaired ones, of
tokens for SFT; every normalisation of GRPO's is over the whole step, too.

Notation: x prompt, y_w chosen, y_l rejected completion, |y| its tokens (the end token included), pi the policy, pi_ref
the frozen reference, r = log[pi(y|x)/pi_ref(y|x)], h = r_w - r_l; all log-probabilities in nats. beta and the other
numbers of the formulas are settings, train.NAME. lib/training/unpaired_losses.py has KTO and BCO, group_losses.py GRPO.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import get_args

import mlx.core as mx
import mlx.nn as nn

from lib.config.settings import REFERENCE_FREE_LOSSES, PreferenceLoss, TrainSettings
from lib.model.entropies import completion_logps_and_weights, completion_token_logps
from lib.model.logps import completion_logps
from lib.model.token_stream import StreamInputs
from lib.training.group_losses import Groups, group_loss
from lib.training.unpaired_losses import UNPAIRED_LOSSES, log_sigmoid, unpaired_losses, unpaired_means, unpaired_metrics

PREFERENCE_LOSSES: tuple[PreferenceLoss, ...] = get_args(PreferenceLoss)
# What a step adds up over micro-batches and ranks. `count` divides the loss and the gradients (pairs or rows for
# preference losses, tokens for SFT); `pairs` divides the metrics, and `desirable` rewards of desirable rows.
REWARDS = ("reward_chosen", "reward_rejected", "reward_margin", "reward_accuracy", "kl")
OF_TOKENS = ("kl", "entropy", "clip_fraction")  # of grpo: what `completion_tokens` divides
COUNTS = ("loss", "count", "pairs", "desirable", "completions", "completion_tokens", "completion_lengths")
SUMS = (*COUNTS, *REWARDS, "reward", "reward_std", "entropy", "clip_fraction")

Metrics = dict[str, float | None]  # by name; None for what a loss does not have
Figures = tuple[mx.array, ...]  # log-probabilities; and weights, or entropies, where a loss is made of them, too


def needs_reference(train: TrainSettings) -> bool:
    """Whether the loss compares the policy with a frozen reference."""
    if train.loss == "grpo":
        return train.beta > 0
    return any(
        name in UNPAIRED_LOSSES or (name in PREFERENCE_LOSSES and name not in REFERENCE_FREE_LOSSES)
        for name, _ in train.loss_terms
    )


@dataclass(frozen=True)
class LogProbs:
    """log pi(y|x) of B pairs under one model, summed over completion tokens."""

    chosen: mx.array  # float32 [B], nats
    rejected: mx.array
    chosen_tokens: mx.array  # int [B], the tokens summed over, at least 1
    rejected_tokens: mx.array

    @property
    def per_token(self) -> tuple[mx.array, mx.array]:
        """log pi(y_w|x) / |y_w| and log pi(y_l|x) / |y_l|, float32 [B]."""
        return self.chosen / self.chosen_tokens, self.rejected / self.rejected_tokens


def log_odds(logp: mx.array) -> mx.array:
    """log(p / (1 - p)) from log p <= 0, held one rounding step below 0: p = 1 has odds of 2^23, and no gradient."""
    logp = mx.minimum(logp, -mx.finfo(mx.float32).eps)
    return logp - mx.log(-mx.expm1(logp))


def log_ratios(policy: LogProbs, reference: LogProbs | None) -> tuple[mx.array, mx.array]:
    """r_w and r_l, float32 [B] each. Their difference is nearly exact: the terms of each are close to each other."""
    assert reference is not None, "the loss needs reference log-probabilities"
    return policy.chosen - reference.chosen, policy.rejected - reference.rejected


# ---- Pairs: losses [B], float32 --------------------------------------------------------------------------------------


def reference_loss(name: str, policy: LogProbs, reference: LogProbs | None, train: TrainSettings) -> mx.array:
    """A loss that compares the policy with a reference; epsilon is label_smoothing."""
    (r_w, r_l), beta, epsilon = log_ratios(policy, reference), train.beta, train.label_smoothing
    logits = beta * (r_w - r_l)
    match name:
        # DPO, Rafailov et al. 2023, arXiv:2305.18290, eq. 7: -log sigma(beta h). With epsilon, conservative DPO
        # (Mitchell 2023, "A note on DPO with noisy preferences").
        case "sigmoid":
            if not epsilon:
                return -log_sigmoid(logits)
            return -(1 - epsilon) * log_sigmoid(logits) - epsilon * log_sigmoid(-logits)
        # Robust DPO (rDPO), Chowdhury et al. 2024, arXiv:2403.00409, section 3: unbiased where epsilon < 1/2 of the
        # labels is flipped.
        case "robust":
            return (-(1 - epsilon) * log_sigmoid(logits) + epsilon * log_sigmoid(-logits)) / (1 - 2 * epsilon)
        case "ipo":  # Azar et al. 2023, arXiv:2310.12036, eq. 17 with tau = beta, on sums
            return mx.square(r_w - r_l - 1 / (2 * beta))
        case "hinge":  # SLiC's (Zhao et al. 2023, arXiv:2305.10425) on DPO's margin, as RSO has it (arXiv:2309.06657)
            return mx.maximum(1 - logits, 0)
        case "dpop":  # DPO-Positive (Smaug), Pal et al. 2024, arXiv:2402.13228, eq. 3: DPO that keeps y_w likely
            return -log_sigmoid(beta * (r_w - r_l - train.dpop_lambda * mx.maximum(-r_w, 0)))
        case "sigmoid_norm":  # length-normalised DPO, Lambert et al. 2024 (Tulu 3), arXiv:2411.15124, section 4.3
            return -log_sigmoid(beta * (r_w / policy.chosen_tokens - r_l / policy.rejected_tokens))
        case "sppo":  # Wu et al. 2024, arXiv:2405.00675, eq. 4.7 with eta = 1 / beta, where y_w always wins, on sums
            return mx.square(r_w - 1 / (2 * beta)) + mx.square(r_l + 1 / (2 * beta))
        # APO-zero, D'Oosterlinck et al. 2024, arXiv:2408.06266, eq. 7: 1 - sigma(beta r_w) + sigma(beta r_l); for y_w
        # that are better than the model's own answers.
        case "apo_zero":
            return mx.exp(log_sigmoid(-beta * r_w)) + mx.exp(log_sigmoid(beta * r_l))
        # APO-down, eq. 8: sigma(beta r_w) + 1 - sigma(beta h); for y_w that are worse than the model's own.
        case "apo_down":
            return mx.exp(log_sigmoid(beta * r_w)) + mx.exp(log_sigmoid(-beta * (r_w - r_l)))
        # BCO, Jung et al. 2024, arXiv:2404.04656, section 4, of both completions of a pair, with a baseline of 0: MPO's
        # quality loss (arXiv:2411.10442, section 3.2).
        case "bco_pair":
            return -log_sigmoid(beta * r_w) - log_sigmoid(-beta * r_l)
    raise AssertionError(name)


def pair_loss(name: str, policy: LogProbs, reference: LogProbs | None, train: TrainSettings) -> mx.array:
    """A loss of pairs by its name."""
    beta, (per_token, rejected_per_token) = train.beta, policy.per_token
    match name:
        case "sft":  # the generation loss of a sum, Wang et al. 2024 (MPO), arXiv:2411.10442, section 3.2
            return -per_token
        case "simpo":  # Meng et al. 2024, arXiv:2405.14734, eq. 6: length-normalised, with a target margin gamma
            return -log_sigmoid(beta * (per_token - rejected_per_token) - train.simpo_gamma)
        # ORPO, Hong et al. 2024, arXiv:2403.07691, eqs. 6 and 7: SFT plus beta (their lambda) times log odds, of
        # log p = log pi(y)/|y| (their eq. 3).
        case "orpo":
            ratio = log_odds(per_token) - log_odds(rejected_per_token)
            return -per_token - beta * log_sigmoid(ratio)
        # CPO, Xu et al. 2024, arXiv:2401.08417, section 3: DPO with a uniform reference, plus the NLL of y_w. The paper
        # writes that without alpha and |y_w|; the authors' trainer has both.
        case "cpo":
            return -log_sigmoid(beta * (policy.chosen - policy.rejected)) - train.cpo_alpha * per_token
    return reference_loss(name, policy, reference, train)


def preference_losses(
    terms: Sequence[tuple[str, float]], policy: LogProbs, reference: LogProbs | None, train: TrainSettings
) -> tuple[mx.array, mx.array, mx.array]:
    """(losses, chosen_rewards, rejected_rewards), each float32 [B]; the rewards carry no gradient. terms: names of
    losses with their weights, to be added up. rpo_alpha adds the SFT term of Pang et al. 2024, arXiv:2404.19733, eq. 1,
    to any loss: -alpha log pi(y_w)/|y_w| (the paper weighs the other term instead)."""
    assert policy.chosen.dtype == policy.rejected.dtype == mx.float32, (policy.chosen.dtype, policy.rejected.dtype)
    first, *others = (weight * pair_loss(name, policy, reference, train) for name, weight in terms)
    total = sum(others, first)
    if train.rpo_alpha:
        total = total - train.rpo_alpha * policy.per_token[0]
    chosen_rewards, rejected_rewards = implicit_rewards(terms, policy, reference, train.beta)
    return total, mx.stop_gradient(chosen_rewards), mx.stop_gradient(rejected_rewards)


def implicit_rewards(
    terms: Sequence[tuple[str, float]], policy: LogProbs, reference: LogProbs | None, beta: float
) -> tuple[mx.array, mx.array]:
    """(chosen, rejected) rewards, float32 [B]: the quantity whose difference the first preference loss pushes up. With
    a reference beta r (arXiv:2305.18290, eq. 5), for sigmoid_norm divided by |y|."""
    name = next(name for name, _ in terms if name in PREFERENCE_LOSSES)
    chosen, rejected = (policy.chosen, policy.rejected) if name == "cpo" else policy.per_token
    if name == "orpo":
        return log_odds(chosen), log_odds(rejected)
    if name not in ("simpo", "cpo"):
        chosen, rejected = log_ratios(policy, reference)
    if name == "sigmoid_norm":
        chosen, rejected = chosen / policy.chosen_tokens, rejected / policy.rejected_tokens
    return beta * chosen, beta * rejected


def preference_metrics(
    chosen_rewards: mx.array,
    rejected_rewards: mx.array,
    policy: LogProbs,
    reference: LogProbs | None,
    counted: mx.array,
) -> dict[str, mx.array]:
    """Sums over pairs (float32 scalars). counted: float32 [B], 1 for a pair, 0 for padding. reward_accuracy counts a
    tie as 1/2, so that a policy equal to its reference scores chance. kl is the mean over both completions of log
    pi_ref(y) - log pi(y) in nats a sequence: an estimate of KL(pi_ref || pi) where the completions are the reference's
    own samples, and a signed drift otherwise."""
    margins = chosen_rewards - rejected_rewards
    sums = {
        "reward_chosen": (counted * chosen_rewards).sum(),
        "reward_rejected": (counted * rejected_rewards).sum(),
        "reward_margin": (counted * margins).sum(),
        "reward_accuracy": (counted * 0.5 * (mx.sign(margins) + 1)).sum(),
    }
    if reference is not None:
        drift = (reference.chosen - policy.chosen) + (reference.rejected - policy.rejected)
        sums["kl"] = 0.5 * mx.stop_gradient(counted * drift).sum()
    return sums


# ---- What a step computes: figures, sums, means ----------------------------------------------------------------------


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
        sampling_logps = inputs.get("sampling_logps", mx.stop_gradient(logps))
        rewards, deviation = inputs["rewards"], inputs.get("reward_deviations")
        groups = Groups(logps, sampling_logps, reference, others[0], inputs["mask"], rewards, deviation)
        _, sums = group_loss(train, groups)
        lengths = inputs.get("completion_lengths", groups.tokens)  # masked tokens are a completion's, too
        sums["completion_lengths"] = (lengths * groups.counted).sum()
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
        losses, count = -policy_logps[:, 0], tokens[:, 0].sum().astype(mx.float32)
        return losses, {"loss": -policy_logps[:, 0].sum(), "count": count, "pairs": pairs}
    if train.loss in UNPAIRED_LOSSES:
        assert reference_logps is not None and labels is not None and baseline is not None
        ratios = mx.where(counted > 0, policy_logps[:, 0] - reference_logps[:, 0], 0.0)
        per_row, rewards = unpaired_losses(ratios, labels, baseline, train)
        metrics = unpaired_metrics(ratios, labels, rewards, baseline, train, counted)
        return per_row, {"loss": (counted * per_row).sum(), "count": pairs, "pairs": pairs, **metrics}

    tokens = mx.where(counted[:, None], tokens, 1)

    def log_probs(logps: mx.array) -> LogProbs:
        logps = mx.where(counted[:, None], logps, -1.0)  # some number that no loss makes an infinity of
        return LogProbs(logps[:, 0], logps[:, 1], tokens[:, 0], tokens[:, 1])

    policy = log_probs(policy_logps)
    reference = None if reference_logps is None else log_probs(reference_logps)
    per_pair, chosen, rejected = preference_losses(train.loss_terms, policy, reference, train)
    if weights is not None:
        per_pair = per_pair * weights[:, 0] * weights[:, 1]
    metrics = preference_metrics(chosen, rejected, policy, reference, counted)
    return per_pair, {"loss": (counted * per_pair).sum(), "count": pairs, "pairs": pairs, **metrics}


def means_of(sums: dict[str, float], train: TrainSettings) -> Metrics:
    """The loss and the metrics from their sums; None for what the loss does not have, and for all of no rows."""

    def mean(name: str, count: str) -> float | None:
        return sums[name] / sums[count] if sums[count] else None

    has_reference = needs_reference(train)
    means: Metrics = {"loss": mean("loss", "count"), **dict.fromkeys(REWARDS)}
    if train.loss == "grpo":  # a step may have completions, and learn none of their tokens
        means |= {name: mean(name, "completion_tokens") for name in OF_TOKENS}
        means |= {"reward": mean("reward", "completions"), "reward_std": mean("reward_std", "pairs")}
        means["completion_length"] = mean("completion_lengths", "completions")
        return means | ({} if has_reference else {"kl": None})
    if train.loss != "sft":
        means |= {name: mean(name, "pairs") for name in REWARDS if name != "kl" or has_reference}
    if train.loss in UNPAIRED_LOSSES:
        means |= unpaired_means(sums)
    return means
