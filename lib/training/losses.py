"""Losses: pure functions of summed log-probabilities, in float32, one per paper.

Everything here is a sum or a per-pair array, never a mean: ranks and micro-batches of unequal size add sums
and counts, and divide once at the end. The count is of pairs for preference losses, of rows for unpaired ones, of
tokens for SFT.

Notation: x prompt, y_w chosen, y_l rejected completion, |y| its tokens (the end token included), pi the policy, pi_ref
the frozen reference, r = log[pi(y|x)/pi_ref(y|x)], h = r_w - r_l; all log-probabilities in nats. beta and the other
numbers of the formulas are settings, train.NAME.
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
    """Whether a loss needs the log-probability of another prompt's completion, too."""
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
    def per_token(self) -> tuple[mx.array, mx.array]:
        """log pi(y_w|x) / |y_w| and log pi(y_l|x) / |y_l|, float32 [B]."""
        return self.chosen / self.chosen_tokens, self.rejected / self.rejected_tokens


def log_sigmoid(x: mx.array) -> mx.array:
    """log sigma(x), of two branches: the gradient of MLX's logaddexp is good to 1e-8 only."""
    positive, negative = mx.where(x > 0, x, 0), mx.where(x > 0, 0, x)
    return mx.where(x > 0, -mx.log1p(mx.exp(-positive)), negative - mx.log1p(mx.exp(negative)))


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
    """(losses, chosen_rewards, rejected_rewards), each float32 [B]; the rewards carry no gradient.

    terms: names of losses with their weights, to be added up. rpo_alpha adds the SFT term of Pang et al. 2024,
    arXiv:2404.19733, eq. 1, to any loss: -alpha log pi(y_w)/|y_w| (the paper weighs the other term instead).
    """
    assert policy.chosen.dtype == policy.rejected.dtype == mx.float32, (policy.chosen.dtype, policy.rejected.dtype)
    total: mx.array | None = None
    for name, weight in terms:
        losses = pair_loss(name, policy, reference, train)
        losses = losses if weight == 1 else weight * losses
        total = losses if total is None else total + losses
    assert total is not None
    if train.rpo_alpha:
        total = total - train.rpo_alpha * policy.per_token[0]
    chosen_rewards, rejected_rewards = implicit_rewards([name for name, _ in terms], policy, reference, train.beta)
    return total, mx.stop_gradient(chosen_rewards), mx.stop_gradient(rejected_rewards)


def implicit_rewards(
    terms: Sequence[str], policy: LogProbs, reference: LogProbs | None, beta: float
) -> tuple[mx.array, mx.array]:
    """(chosen, rejected) rewards, float32 [B]: the quantity whose difference the first preference loss pushes up.

    With a reference beta r (arXiv:2305.18290, eq. 5), for sigmoid_norm divided by |y|.
    """
    name = next(name for name in terms if name in PREFERENCE_LOSSES)
    chosen, rejected = policy.per_token
    if name == "cpo":
        chosen, rejected = policy.chosen, policy.rejected
    elif name not in ("simpo", "orpo"):
        chosen, rejected = log_ratios(policy, reference)
        if name == "sigmoid_norm":
            chosen, rejected = chosen / policy.chosen_tokens, rejected / policy.rejected_tokens
    return (log_odds(chosen), log_odds(rejected)) if name == "orpo" else (beta * chosen, beta * rejected)


def preference_metrics(
    chosen_rewards: mx.array,
    rejected_rewards: mx.array,
    policy: LogProbs,
    reference: LogProbs | None,
    counted: mx.array,
) -> dict[str, mx.array]:
    """Sums over pairs (float32 scalars). counted: float32 [B], 1 for a pair, 0 for padding.

    reward_accuracy counts a tie as 1/2, so that a policy equal to its reference scores chance. kl is the mean over both
    completions of log pi_ref(y) - log pi(y) in nats a sequence: an estimate of KL(pi_ref || pi) where the completions
    are the reference's own samples, and a signed drift otherwise.
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


# ---- Unpaired: completions labelled desirable or not; SFT ------------------------------------------------------------


@dataclass(frozen=True)
class Labelled:
    """B completions with a label each. log_ratios: r, float32 [B]; desirable: bool [B]."""

    log_ratios: mx.array
    desirable: mx.array

    @property
    def signs(self) -> mx.array:
        """1 for a desirable completion, -1 for another, float32 [B]."""
        return mx.where(self.desirable, 1.0, -1.0)


def kto_loss(rows: Labelled, kl: mx.array, beta: float) -> mx.array:
    """KTO, Ethayarajh et al. 2024, arXiv:2402.01306, eqs. 7 and 8, without lambda: losses, float32 [B].

    1 - sigma(beta (r - z_0)) for a desirable completion, 1 - sigma(beta (z_0 - r)) for another. kl: z_0, without a
    gradient. 1 - sigma(x) is exp(log sigma(-x)), which keeps a small gradient's digits.
    """
    return mx.exp(log_sigmoid(-rows.signs * beta * (rows.log_ratios - mx.stop_gradient(kl))))


def bco_loss(rows: Labelled, shift: mx.array, beta: float) -> mx.array:
    """BCO, Jung et al. 2024, arXiv:2404.04656, section 4: a binary classifier of rewards; losses, float32 [B].

    -log sigma(beta r - delta) for a desirable completion, -log sigma(-(beta r - delta)) for another, without the
    paper's density ratio (UDM). shift: delta, the mean of all rewards so far; it gets no gradient.
    """
    return -log_sigmoid(rows.signs * (beta * rows.log_ratios - mx.stop_gradient(shift)))


def kl_baseline(log_ratios_sum: float, count: float) -> float:
    """KTO's z_0 (arXiv:2402.01306, section 4.1), in nats, never below 0: the mean r of mismatched completions."""
    mean = log_ratios_sum / count if count else 0.0
    return 0.0 if mean < 0 else mean  # NaN stays NaN, so the step is skipped


def unpaired_losses(rows: Labelled, baseline: mx.array, train: TrainSettings) -> tuple[mx.array, mx.array]:
    """(losses, rewards beta r), float32 [B]. baseline: kto's z_0 in nats, bco's delta in rewards."""
    assert rows.log_ratios.dtype == mx.float32, rows.log_ratios.dtype
    loss = kto_loss if train.loss == "kto" else bco_loss
    weights = mx.where(rows.desirable, train.desirable_weight, train.undesirable_weight)
    return weights * loss(rows, baseline, train.beta), mx.stop_gradient(train.beta * rows.log_ratios)


def unpaired_metrics(
    rows: Labelled, rewards: mx.array, baseline: mx.array, train: TrainSettings, counted: mx.array
) -> dict[str, mx.array]:
    """Sums over rows (float32 scalars). counted: float32 [B], 1 for a row, 0 for padding.

    reward_chosen and reward_rejected are over desirable and over undesirable rows. reward_accuracy counts rows on their
    side of the baseline, a tie as 1/2. kl is z_0 for kto; for bco the mean of -r, as `preference_metrics` has it.
    """
    desirable, is_kto = counted * rows.desirable, train.loss == "kto"
    right = 0.5 * (mx.sign(rows.signs * (rewards - (train.beta * baseline if is_kto else baseline))) + 1)
    drift = mx.broadcast_to(baseline, counted.shape) if is_kto else -mx.stop_gradient(rows.log_ratios)
    return {
        "desirable": desirable.sum(),
        "reward_chosen": (desirable * rewards).sum(),
        "reward_rejected": ((counted - desirable) * rewards).sum(),
        "reward_accuracy": (counted * right).sum(),
        "kl": (counted * drift).sum(),
    }


def sft_loss(token_logps_sum: mx.array, tokens: mx.array) -> tuple[mx.array, mx.array]:
    """(negative log-likelihood in nats, number of tokens), float32 scalars, of log pi(y|x) [B] summed over y."""
    return -token_logps_sum.sum(), tokens.sum().astype(mx.float32)
