"""GRPO and its variants: pure functions of groups of completions, in float32.

Everything here is a sum beside a count, as in lib/training/losses.py: micro-batches and ranks add them up and divide
once. So every normalisation is over the whole step, whatever the batches were.

Notation: r_i the reward of completion i of a prompt, A_i its advantage, |o_i| its tokens, rho its tokens' ratios
pi / pi_sampling; K completions a group, log-probabilities in nats.
"""

from __future__ import annotations

from dataclasses import dataclass

import mlx.core as mx

from lib.config.train_settings import TrainSettings

STD_FLOOR = 1e-4  # is added to a group's deviation, so that rewards that are almost equal give small advantages


@dataclass(frozen=True)
class Groups:
    """b prompts with K completions each.

    logps, sampling_logps: float32 [b, K, C], of the tokens under the policy, and under the one that sampled them.
    reference_logps: the same of the reference; None without one.
    entropies: float32 [b, K, C], of the policy, where each token was chosen.
    mask: bool [b, K, C], tokens; a completion without any is left out.
    rewards: float32 [b, K].
    """

    logps: mx.array
    sampling_logps: mx.array
    reference_logps: mx.array | None
    entropies: mx.array
    mask: mx.array
    rewards: mx.array

    @property
    def tokens(self) -> mx.array:
        """|o_i|, float32 [b, K]."""
        return self.mask.sum(axis=-1).astype(mx.float32)

    @property
    def counted(self) -> mx.array:
        """float32 [b, K]: 1 for a completion, 0 for one that is left out."""
        return (self.tokens > 0).astype(mx.float32)


def deviations(rewards: mx.array, counted: mx.array) -> tuple[mx.array, mx.array, mx.array]:
    """Rewards less the mean of their group, [b, K]; the group's deviation and its completions, [b, 1]; float32.

    The deviation is that of a sample, with n - 1; of a group of one it is 0.
    """
    count = counted.sum(axis=1, keepdims=True)
    mean = (counted * rewards).sum(axis=1, keepdims=True) / mx.maximum(count, 1)
    centered = counted * (rewards - mean)
    variance = mx.square(centered).sum(axis=1, keepdims=True) / mx.maximum(count - 1, 1)
    return centered, mx.sqrt(variance), count


def advantages(rewards: mx.array, counted: mx.array, kind: str) -> mx.array:
    """A_i, float32 [b, K]; 0 for what is left out, and in a group whose rewards are all alike.

    standardized: (r_i - mean) / (std + 1e-4), GRPO, Shao et al. 2024, arXiv:2402.03300, section 4.1.2.
    centered: r_i - mean, Dr. GRPO, Liu et al. 2025, arXiv:2503.20783, section 3.2.
    leave_one_out: r_i less the mean of the others, RLOO, Ahmadian et al. 2024, arXiv:2402.14740, section 2.2.
    """
    centered, std, count = deviations(rewards, counted)
    match kind:
        case "standardized":
            return centered / (std + STD_FLOOR)
        case "centered":
            return centered
        case _:
            return centered * count / mx.maximum(count - 1, 1)


def divergence(logps: mx.array, reference_logps: mx.array) -> mx.array:
    """KL(pi || pi_ref) at each token, estimated from it: exp(d) - d - 1 with d = log pi_ref - log pi.

    GRPO, arXiv:2402.03300, eq. 4 (the estimator k3 of Schulman 2020, "Approximating KL divergence").
    """
    difference = reference_logps - logps
    return mx.expm1(difference) - difference


def group_loss(train: TrainSettings, groups: Groups) -> tuple[mx.array, dict[str, mx.array]]:
    """(losses, sums): float32 [b, K], each completion's, summed over its tokens; and sums by the names in `SUMS`.

    A token's loss is -min(rho A, clip(rho, 1 - epsilon, 1 + epsilon_high) A) + beta KL, GRPO, arXiv:2402.03300, eq. 3;
    with two epsilons, DAPO, Yu et al. 2025, arXiv:2503.14476, eq. 8. Divided is, by train.loss_type:

    grpo: each completion's sum by its tokens, the total by the completions (arXiv:2402.03300, eq. 3).
    dr_grpo: the total by completions times max_completion_length (arXiv:2503.20783, section 3.2).
    bnpo, dapo: the total by the tokens of all (arXiv:2503.14476, eq. 8).
    """
    mask, tokens, counted = groups.mask, groups.tokens, groups.counted
    upper = train.epsilon if train.epsilon_high is None else train.epsilon_high
    scale = advantages(groups.rewards, counted, train.advantages)[..., None]
    ratio = mx.exp(mx.where(mask, groups.logps - groups.sampling_logps, 0.0))
    clipped = mx.clip(ratio, 1 - train.epsilon, 1 + upper)
    per_token = -mx.minimum(ratio * scale, clipped * scale)
    kl = mx.zeros_like(per_token)
    if groups.reference_logps is not None:
        kl = mx.where(mask, divergence(groups.logps, groups.reference_logps), 0.0)
        per_token = per_token + train.beta * kl
    losses = mx.where(mask, per_token, 0.0).sum(axis=-1)
    completions = counted.sum()
    match train.loss_type:
        case "dr_grpo":
            total, count = losses.sum(), completions * (train.max_completion_length or 1)
        case "bnpo" | "dapo":
            total, count = losses.sum(), tokens.sum()
        case _:
            total, count = (losses / mx.maximum(tokens, 1)).sum(), completions
    is_clipped = ((ratio < 1 - train.epsilon) & (scale < 0)) | ((ratio > 1 + upper) & (scale > 0))
    has_any = counted.max(axis=1)
    _, std, _ = deviations(groups.rewards, counted)
    sums = {
        "loss": total,
        "count": count,
        "pairs": has_any.sum(),
        "completions": completions,
        "completion_tokens": tokens.sum(),
        "reward": (counted * groups.rewards).sum(),
        "reward_std": std.sum(),
        "kl": kl.sum(),
        "entropy": groups.entropies.sum(),
        "clip_fraction": (is_clipped & mask).sum().astype(mx.float32),
    }
    return losses, {name: mx.stop_gradient(x) if name != "loss" else x for name, x in sums.items()}
