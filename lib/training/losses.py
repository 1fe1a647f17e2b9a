"""Losses: pure functions of summed log-probabilities, in float32, one per paper.

Everything here is a sum or a per-pair array, never a mean: ranks and micro-batches of unequal size add sums
and counts, and divide once at the end. The count is of pairs for preference losses, of rows for unpaired ones, of
tokens for SFT.

Notation: x prompt, y_w chosen, y_l rejected completion, |y| its tokens (the end token included), pi the
policy, pi_ref the frozen reference; all log-probabilities in nats.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import get_args

import mlx.core as mx

from lib.config.settings import REFERENCE_FREE_LOSSES, Loss, PreferenceLoss, TrainSettings, UnpairedLoss

PREFERENCE_LOSSES: tuple[PreferenceLoss, ...] = get_args(PreferenceLoss)
UNPAIRED_LOSSES: tuple[UnpairedLoss, ...] = get_args(UnpairedLoss)


def terms_of(loss: Loss) -> tuple[str, ...]:
    """The losses that a loss is the sum of: often one."""
    return (loss,) if isinstance(loss, str) else loss


def needs_reference(train: TrainSettings) -> bool:
    """Whether the loss compares the policy with a frozen reference."""
    if train.loss == "grpo":
        return train.beta > 0
    return any(
        name in UNPAIRED_LOSSES or (name in PREFERENCE_LOSSES and name not in REFERENCE_FREE_LOSSES)
        for name in terms_of(train.loss)
    )


def needs_mismatched(loss: Loss) -> bool:
    """Whether a loss asks for the log-probability of another prompt's completion, too."""
    return loss == "kto"


@dataclass(frozen=True)
class LogProbs:
    """log pi(y|x) of B pairs under one model, summed over completion tokens.

    chosen, rejected: float32 [B], nats.
    chosen_tokens, rejected_tokens: int [B], the tokens summed over, at least 1.
    """

    chosen: mx.array
    rejected: mx.array
    chosen_tokens: mx.array
    rejected_tokens: mx.array

    @property
    def chosen_per_token(self) -> mx.array:
        """log pi(y_w|x) / |y_w|, float32 [B]."""
        return self.chosen / self.chosen_tokens

    @property
    def rejected_per_token(self) -> mx.array:
        """log pi(y_l|x) / |y_l|, float32 [B]."""
        return self.rejected / self.rejected_tokens


def log_sigmoid(x: mx.array) -> mx.array:
    """log sigma(x) = -log(1 + exp(-x)), finite in value and gradient for every finite x.

    Two branches and not one logaddexp: the gradient of MLX's is good to 1e-8 absolute, and so has no digits
    left for the pairs that the policy already separates well.
    """
    positive, negative = mx.where(x > 0, x, 0), mx.where(x > 0, 0, x)
    return mx.where(x > 0, -mx.log1p(mx.exp(-positive)), negative - mx.log1p(mx.exp(negative)))


def log_odds(logp: mx.array) -> mx.array:
    """log(p / (1 - p)) from log p <= 0.

    1 - p = -expm1(log p) keeps its digits near p = 1. float32 log-probabilities carry no information closer
    to 0 than one rounding step, so they are held there: p = 1 has odds of 2^23, and no gradient.
    """
    logp = mx.minimum(logp, -mx.finfo(mx.float32).eps)
    return logp - mx.log(-mx.expm1(logp))


def log_ratios(policy: LogProbs, reference: LogProbs) -> tuple[mx.array, mx.array]:
    """log[pi(y)/pi_ref(y)] of chosen and of rejected completions, float32 [B] each."""
    return policy.chosen - reference.chosen, policy.rejected - reference.rejected


def log_ratio_difference(policy: LogProbs, reference: LogProbs) -> mx.array:
    """h = log[pi(y_w)/pi_ref(y_w)] - log[pi(y_l)/pi_ref(y_l)], float32 [B].

    Each ratio is taken first: its terms are close to each other, so their difference is nearly exact.
    """
    return (policy.chosen - reference.chosen) - (policy.rejected - reference.rejected)


# ------------------------------------------------------------------------------------------------------------
# With a reference: each returns losses [B], float32.


def sigmoid_loss(policy: LogProbs, reference: LogProbs, beta: float, label_smoothing: float) -> mx.array:
    """DPO, Rafailov et al. 2023, arXiv:2305.18290, eq. 7: -log sigma(beta h).

    With label_smoothing epsilon, conservative DPO (Mitchell 2023, "A note on DPO with noisy preferences"):
    -(1 - epsilon) log sigma(beta h) - epsilon log sigma(-beta h).
    """
    logits = beta * log_ratio_difference(policy, reference)
    if not label_smoothing:
        return -log_sigmoid(logits)
    return -(1 - label_smoothing) * log_sigmoid(logits) - label_smoothing * log_sigmoid(-logits)


def robust_loss(policy: LogProbs, reference: LogProbs, beta: float, label_smoothing: float) -> mx.array:
    """Robust DPO (rDPO), Chowdhury et al. 2024, arXiv:2403.00409, section 3.

    Unbiased when a share epsilon = label_smoothing < 1/2 of the labels is flipped:
    [-(1 - epsilon) log sigma(beta h) + epsilon log sigma(-beta h)] / (1 - 2 epsilon).
    """
    assert label_smoothing < 0.5, label_smoothing
    logits = beta * log_ratio_difference(policy, reference)
    biased = -(1 - label_smoothing) * log_sigmoid(logits) + label_smoothing * log_sigmoid(-logits)
    return biased / (1 - 2 * label_smoothing)


def ipo_loss(policy: LogProbs, reference: LogProbs, beta: float) -> mx.array:
    """IPO, Azar et al. 2023, arXiv:2310.12036, eq. 17 with tau = beta: (h - 1 / (2 beta))^2, on sums."""
    return mx.square(log_ratio_difference(policy, reference) - 1 / (2 * beta))


def hinge_loss(policy: LogProbs, reference: LogProbs, beta: float) -> mx.array:
    """SLiC's hinge (Zhao et al. 2023, arXiv:2305.10425) on DPO's margin: max(0, 1 - beta h).

    The combination is that of RSO, Liu et al. 2023, arXiv:2309.06657.
    """
    return mx.maximum(1 - beta * log_ratio_difference(policy, reference), 0)


def dpop_loss(policy: LogProbs, reference: LogProbs, beta: float, dpop_lambda: float) -> mx.array:
    """DPO-Positive (Smaug), Pal et al. 2024, arXiv:2402.13228, eq. 3: DPO that keeps y_w likely.

    -log sigma(beta (h - lambda max(0, log pi_ref(y_w) - log pi(y_w)))).
    """
    penalty = mx.maximum(reference.chosen - policy.chosen, 0)
    return -log_sigmoid(beta * (log_ratio_difference(policy, reference) - dpop_lambda * penalty))


def sigmoid_norm_loss(policy: LogProbs, reference: LogProbs, beta: float) -> mx.array:
    """Length-normalised DPO, Lambert et al. 2024 (Tulu 3), arXiv:2411.15124, section 4.3.

    -log sigma(beta log[pi(y_w)/pi_ref(y_w)] / |y_w| - beta log[pi(y_l)/pi_ref(y_l)] / |y_l|).
    """
    chosen, rejected = log_ratios(policy, reference)
    return -log_sigmoid(beta * (chosen / policy.chosen_tokens - rejected / policy.rejected_tokens))


def sppo_loss(policy: LogProbs, reference: LogProbs, beta: float) -> mx.array:
    """SPPO, Wu et al. 2024, arXiv:2405.00675, eq. 4.7 with eta = 1 / beta, where y_w always wins.

    (r_w - 1 / (2 beta))^2 + (r_l + 1 / (2 beta))^2 of the log ratios r, on sums.
    """
    chosen, rejected = log_ratios(policy, reference)
    return mx.square(chosen - 1 / (2 * beta)) + mx.square(rejected + 1 / (2 * beta))


def apo_zero_loss(policy: LogProbs, reference: LogProbs, beta: float) -> mx.array:
    """APO-zero, D'Oosterlinck et al. 2024, arXiv:2408.06266, eq. 7: y_w likelier, y_l less likely.

    1 - sigma(beta r_w) + sigma(beta r_l) of the log ratios r; for y_w that are better than the model's own answers.
    """
    chosen, rejected = log_ratios(policy, reference)
    return mx.exp(log_sigmoid(-beta * chosen)) + mx.exp(log_sigmoid(beta * rejected))


def apo_down_loss(policy: LogProbs, reference: LogProbs, beta: float) -> mx.array:
    """APO-down, D'Oosterlinck et al. 2024, arXiv:2408.06266, eq. 8: both less likely, y_l more so.

    sigma(beta r_w) + 1 - sigma(beta (r_w - r_l)) of the log ratios r; for y_w that are worse than the model's own.
    """
    chosen, _ = log_ratios(policy, reference)
    return mx.exp(log_sigmoid(beta * chosen)) + mx.exp(log_sigmoid(-beta * log_ratio_difference(policy, reference)))


def bco_pair_loss(policy: LogProbs, reference: LogProbs, beta: float) -> mx.array:
    """BCO, Jung et al. 2024, arXiv:2404.04656, section 4, of both completions of a pair, with a baseline of 0.

    -log sigma(beta r_w) - log sigma(-beta r_l) of the log ratios r: MPO's quality loss (arXiv:2411.10442, section 3.2).
    """
    chosen, rejected = log_ratios(policy, reference)
    return -log_sigmoid(beta * chosen) - log_sigmoid(-beta * rejected)


# ------------------------------------------------------------------------------------------------------------
# Without a reference.


def sft_term(policy: LogProbs) -> mx.array:
    """The generation loss of a sum, Wang et al. 2024 (MPO), arXiv:2411.10442, section 3.2: -log pi(y_w)/|y_w|."""
    return -policy.chosen_per_token


def simpo_loss(policy: LogProbs, beta: float, simpo_gamma: float) -> mx.array:
    """SimPO, Meng et al. 2024, arXiv:2405.14734, eq. 6: length-normalised, with a target margin gamma.

    -log sigma(beta log pi(y_w)/|y_w| - beta log pi(y_l)/|y_l| - gamma).
    """
    return -log_sigmoid(beta * (policy.chosen_per_token - policy.rejected_per_token) - simpo_gamma)


def orpo_loss(policy: LogProbs, beta: float) -> mx.array:
    """ORPO, Hong et al. 2024, arXiv:2403.07691, eqs. 6 and 7: SFT plus beta (their lambda) times log odds.

    -log p_w - beta log sigma(log odds(p_w) - log odds(p_l)), with log p = log pi(y)/|y| (their eq. 3).
    """
    ratio = log_odds(policy.chosen_per_token) - log_odds(policy.rejected_per_token)
    return -policy.chosen_per_token - beta * log_sigmoid(ratio)


def cpo_loss(policy: LogProbs, beta: float, cpo_alpha: float) -> mx.array:
    """CPO, Xu et al. 2024, arXiv:2401.08417, section 3: DPO with a uniform reference, plus the chosen's NLL.

    -log sigma(beta (log pi(y_w) - log pi(y_l))) - alpha log pi(y_w)/|y_w|.
    The paper writes the NLL without alpha and |y_w|; the authors' trainer has both.
    """
    preference = -log_sigmoid(beta * (policy.chosen - policy.rejected))
    return preference - cpo_alpha * policy.chosen_per_token


# ------------------------------------------------------------------------------------------------------------
# What the step calls.


@dataclass(frozen=True)
class LossOptions:
    """The numbers in the formulas, as train.* names them."""

    beta: float
    label_smoothing: float
    rpo_alpha: float
    dpop_lambda: float
    simpo_gamma: float
    cpo_alpha: float


def preference_losses(
    terms: Sequence[tuple[str, float]], policy: LogProbs, reference: LogProbs | None, options: LossOptions
) -> tuple[mx.array, mx.array, mx.array]:
    """(losses, chosen_rewards, rejected_rewards), each float32 [B]; the rewards carry no gradient.

    terms: names of losses (LossTerm) with their weights, to be added up; the rewards are as `implicit_rewards` says.

    rpo_alpha adds the SFT term of Pang et al. 2024, arXiv:2404.19733, eq. 1, to any loss:
    -alpha log pi(y_w)/|y_w| (the paper weighs the other term instead). A loss ignores the options that its
    formula lacks; `reference` may be None for losses that need none. Combinations that make no sense are
    refused by the configuration.
    """
    assert options.beta > 0, options.beta
    assert policy.chosen.dtype == policy.rejected.dtype == mx.float32, (policy.chosen.dtype, policy.rejected.dtype)
    total: mx.array | None = None
    for name, weight in terms:
        losses = _losses(name, policy, reference, options)
        losses = losses if weight == 1 else weight * losses
        total = losses if total is None else total + losses
    assert total is not None
    if options.rpo_alpha:
        total = total - options.rpo_alpha * policy.chosen_per_token
    chosen_rewards, rejected_rewards = implicit_rewards([name for name, _ in terms], policy, reference, options.beta)
    return total, mx.stop_gradient(chosen_rewards), mx.stop_gradient(rejected_rewards)


def _losses(name: str, policy: LogProbs, reference: LogProbs | None, options: LossOptions) -> mx.array:
    beta = options.beta
    match name:
        case "simpo":
            return simpo_loss(policy, beta, options.simpo_gamma)
        case "orpo":
            return orpo_loss(policy, beta)
        case "cpo":
            return cpo_loss(policy, beta, options.cpo_alpha)
        case "sft":
            return sft_term(policy)
    assert reference is not None, f"{name} needs reference log-probabilities"
    match name:
        case "sigmoid":
            return sigmoid_loss(policy, reference, beta, options.label_smoothing)
        case "robust":
            return robust_loss(policy, reference, beta, options.label_smoothing)
        case "dpop":
            return dpop_loss(policy, reference, beta, options.dpop_lambda)
        case _:
            return WITHOUT_OPTIONS[name](policy, reference, beta)


WITHOUT_OPTIONS = {
    "sigmoid_norm": sigmoid_norm_loss,
    "ipo": ipo_loss,
    "hinge": hinge_loss,
    "sppo": sppo_loss,
    "apo_zero": apo_zero_loss,
    "apo_down": apo_down_loss,
    "bco_pair": bco_pair_loss,
}


def implicit_rewards(
    terms: Sequence[str], policy: LogProbs, reference: LogProbs | None, beta: float
) -> tuple[mx.array, mx.array]:
    """(chosen, rejected) rewards, float32 [B]: the quantity whose difference the loss pushes up.

    Of a sum they are those of its first preference loss. With a reference beta log[pi(y)/pi_ref(y)]
    (arXiv:2305.18290, eq. 5, without the partition function), for sigmoid_norm divided by |y|;
    SimPO beta log pi(y)/|y|; ORPO log odds(pi(y)^(1/|y|)); CPO beta log pi(y).
    """
    name = next(name for name in terms if name in PREFERENCE_LOSSES)
    match name:
        case "simpo":
            return beta * policy.chosen_per_token, beta * policy.rejected_per_token
        case "orpo":
            return log_odds(policy.chosen_per_token), log_odds(policy.rejected_per_token)
        case "cpo":
            return beta * policy.chosen, beta * policy.rejected
    assert reference is not None, f"{name} needs reference log-probabilities"
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
    """Sums over pairs (float32 scalars): divide by the number of pairs, after adding those of every rank.

    counted: float32 [B], 1 for a pair, 0 for padding.

    reward_accuracy counts a pair whose chosen reward is higher as 1 and a tie as 1/2, so that a policy equal
    to its reference scores chance and not 0. kl, present when there is a reference, is the mean over both
    completions of log pi_ref(y) - log pi(y) in nats a sequence: an estimate of KL(pi_ref || pi) as far as the
    completions are the reference's own samples, and a signed drift otherwise.
    """
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


# ------------------------------------------------------------------------------------------------------------
# Unpaired: completions labelled desirable or not.


@dataclass(frozen=True)
class Labelled:
    """B completions with a label each.

    log_ratios: float32 [B], log pi(y|x) - log pi_ref(y|x), summed over completion tokens, nats.
    desirable: bool [B].
    """

    log_ratios: mx.array
    desirable: mx.array

    @property
    def signs(self) -> mx.array:
        """1 for a desirable completion, -1 for another, float32 [B]."""
        return mx.where(self.desirable, 1.0, -1.0)


@dataclass(frozen=True)
class UnpairedOptions:
    """The numbers in the formulas, as train.* names them."""

    beta: float
    desirable_weight: float
    undesirable_weight: float


def kto_loss(rows: Labelled, kl: mx.array, options: UnpairedOptions) -> mx.array:
    """KTO, Ethayarajh et al. 2024, arXiv:2402.01306, eqs. 7 and 8: losses, float32 [B].

    With r the log ratio: lambda_D (1 - sigma(beta (r - z_0))) for a desirable completion, lambda_U
    (1 - sigma(beta (z_0 - r))) for another. kl: z_0, as `kl_baseline` gives it; it gets no gradient.

    1 - sigma(x) is exp(log sigma(-x)), which keeps the digits of a gradient near 0.
    """
    margins = rows.signs * options.beta * (rows.log_ratios - mx.stop_gradient(kl))
    return _weights(rows, options) * mx.exp(log_sigmoid(-margins))


def bco_loss(rows: Labelled, shift: mx.array, options: UnpairedOptions) -> mx.array:
    """BCO, Jung et al. 2024, arXiv:2404.04656, section 4: a binary classifier of rewards; losses, float32 [B].

    -log sigma(beta r - delta) for a desirable completion, -log sigma(-(beta r - delta)) for another, without the
    paper's density ratio (UDM). shift: delta, the mean of all rewards so far; it gets no gradient.
    """
    margins = rows.signs * (options.beta * rows.log_ratios - mx.stop_gradient(shift))
    return -_weights(rows, options) * log_sigmoid(margins)


def _weights(rows: Labelled, options: UnpairedOptions) -> mx.array:
    return mx.where(rows.desirable, options.desirable_weight, options.undesirable_weight)


def kl_baseline(log_ratios_sum: float, count: float) -> float:
    """KTO's z_0 (arXiv:2402.01306, section 4.1): an estimate of KL(pi || pi_ref) in nats, never below 0.

    log_ratios_sum: log pi(y'|x) - log pi_ref(y'|x) of `count` mismatched completions y', each another prompt's.
    """
    mean = log_ratios_sum / count if count else 0.0
    return 0.0 if mean < 0 else mean  # NaN stays NaN, so the step is skipped


def unpaired_losses(
    name: UnpairedLoss, rows: Labelled, baseline: mx.array, options: UnpairedOptions
) -> tuple[mx.array, mx.array]:
    """(losses, rewards), each float32 [B]; the rewards, beta r, carry no gradient.

    baseline: what a completion is compared with, the same for all: kto's z_0 in nats, bco's delta in rewards.
    """
    assert options.beta > 0, options.beta
    assert rows.log_ratios.dtype == mx.float32, rows.log_ratios.dtype
    loss = kto_loss if name == "kto" else bco_loss
    return loss(rows, baseline, options), mx.stop_gradient(options.beta * rows.log_ratios)


def unpaired_metrics(
    name: UnpairedLoss, rows: Labelled, rewards: mx.array, baseline: mx.array, beta: float, counted: mx.array
) -> dict[str, mx.array]:
    """Sums over rows (float32 scalars), to be added over ranks.

    counted: float32 [B], 1 for a row, 0 for padding.

    reward_chosen and reward_rejected are over desirable and over undesirable rows. reward_accuracy counts rows on their
    side of the baseline, a tie as 1/2. kl is z_0 for kto; for bco the mean of log pi_ref(y) - log pi(y), as
    `preference_metrics` has it.
    """
    desirable = counted * rows.desirable
    threshold = beta * baseline if name == "kto" else baseline
    right = 0.5 * (mx.sign(rows.signs * (rewards - threshold)) + 1)
    drift = mx.broadcast_to(baseline, counted.shape) if name == "kto" else -mx.stop_gradient(rows.log_ratios)
    return {
        "desirable": desirable.sum(),
        "reward_chosen": (desirable * rewards).sum(),
        "reward_rejected": ((counted - desirable) * rewards).sum(),
        "reward_accuracy": (counted * right).sum(),
        "kl": (counted * drift).sum(),
    }


def sft_loss(token_logps_sum: mx.array, tokens: mx.array) -> tuple[mx.array, mx.array]:
    """Negative log-likelihood: (sum over tokens in nats, number of tokens), float32 scalars.

    token_logps_sum: float32 [B], log pi(y|x) summed over y; tokens: int [B].
    A float32 count is exact to 16.7 million.
    """
    return -token_logps_sum.sum(), tokens.sum().astype(mx.float32)
