"""GRPO and its variants: losses of groups of completions of a prompt, in float32, as sums beside counts.

Notation: r_i the reward of completion i of K, A_i its advantage, |o_i| its tokens, rho its tokens' ratios pi /
pi_sampling. beta and the other numbers of the formulas are settings, train.NAME.
"""

from __future__ import annotations

from dataclasses import dataclass

import mlx.core as mx

from lib.config.settings import TrainSettings

STD_FLOOR = 1e-4  # is added to a group's deviation, so that rewards that are almost equal give small advantages
# Nats. exp(89) is infinite in float32, and infinity times an advantage of 0 no number. verl has this limit, too.
MOST_LOG_RATIO = 20.0


@dataclass(frozen=True)
class Groups:
    """b prompts with K completions each."""

    logps: mx.array  # float32 [b, K, C], of the tokens under the policy
    sampling_logps: mx.array  # under the policy that sampled them
    reference_logps: mx.array | None  # under the reference
    entropies: mx.array  # float32 [b, K, C], of the policy, where each token was chosen
    mask: mx.array  # bool [b, K, C], the tokens that are learnt; a masked completion has none, and its reward counts
    rewards: mx.array  # float32 [b, K]; NaN for a completion that is left out
    deviation: mx.array | None = None  # float32 [b], of all rewards of the round or file, for `batch_standardized`

    @property
    def tokens(self) -> mx.array:
        """|o_i|, float32 [b, K]."""
        return self.mask.sum(axis=-1).astype(mx.float32)

    @property
    def counted(self) -> mx.array:
        """float32 [b, K]: 1 for a completion, 0 for one that is left out."""
        return mx.logical_not(mx.isnan(self.rewards)).astype(mx.float32)


def deviations(rewards: mx.array, counted: mx.array) -> tuple[mx.array, mx.array, mx.array]:
    """Rewards less the mean of their group, [b, K]; the group's sample deviation (n - 1) and completions, [b, 1].
    Rewards are compared with the largest of their group first, so that those of equal rewards are exactly 0."""
    count = counted.sum(axis=1, keepdims=True)
    largest = mx.where(counted > 0, rewards, -mx.inf).max(axis=1, keepdims=True)
    below = mx.where(counted > 0, rewards - largest, 0.0)
    centered = counted * (below - below.sum(axis=1, keepdims=True) / mx.maximum(count, 1))
    variance = mx.square(centered).sum(axis=1, keepdims=True) / mx.maximum(count - 1, 1)
    return centered, mx.sqrt(variance), count


def advantages(rewards: mx.array, counted: mx.array, kind: str, deviation: mx.array | None = None) -> mx.array:
    """A_i, float32 [b, K]; 0 for what is left out, and in a group of equal rewards. deviation: float32 [b]."""
    centered, std, count = deviations(rewards, counted)
    match kind:
        case "standardized":  # GRPO, Shao et al. 2024, arXiv:2402.03300, section 4.1.2
            return centered / (std + STD_FLOOR)
        case "batch_standardized":  # Hu et al. 2025, arXiv:2501.03262, section 3
            assert deviation is not None
            return centered / (deviation[:, None] + STD_FLOOR)
        case "centered":  # Dr. GRPO, Liu et al. 2025, arXiv:2503.20783, section 3.2
            return centered
        case _:  # leave_one_out: less the mean of the others, RLOO, Ahmadian et al. 2024, arXiv:2402.14740, section 2.2
            return centered * count / mx.maximum(count - 1, 1)


def group_loss(train: TrainSettings, groups: Groups) -> tuple[mx.array, dict[str, mx.array]]:
    """(losses, sums): float32 [b, K], each completion's, summed over its tokens; and sums by the names in `SUMS`. A
    token's loss is -min(rho A, clip(rho, 1 - epsilon, 1 + epsilon_high) A) + beta KL, GRPO, arXiv:2402.03300, eq. 3;
    with two epsilons, DAPO, Yu et al. 2025, arXiv:2503.14476, eq. 8. rho is at most exp(MOST_LOG_RATIO); that changes
    what has a negative advantage alone, which has no gradient there."""
    mask, tokens, counted = groups.mask, groups.tokens, groups.counted
    upper = train.epsilon if train.epsilon_high is None else train.epsilon_high
    scale = advantages(groups.rewards, counted, train.advantages, groups.deviation)[..., None]
    # log rho: [b, K, C] of each token (GRPO), else one of a completion, [b, K, 1]: of its tokens' product (RLOO), or
    # their geometric mean (GSPO, Zheng et al. 2025, arXiv:2507.18071, eq. 7).
    log_ratio = mx.where(mask, groups.logps - groups.sampling_logps, 0.0)
    if train.ratio != "token":
        log_ratio = log_ratio.sum(axis=-1, keepdims=True)
    if train.ratio == "geometric_mean":
        log_ratio = log_ratio / mx.maximum(tokens[..., None], 1)
    ratio = mx.exp(mx.minimum(log_ratio, MOST_LOG_RATIO))
    clipped = mx.clip(ratio, 1 - train.epsilon, 1 + upper)
    per_token = -mx.minimum(ratio * scale, clipped * scale)
    kl = mx.zeros_like(groups.logps)
    if groups.reference_logps is not None:
        difference = groups.reference_logps - groups.logps  # KL(pi || pi_ref) by token: arXiv:2402.03300, eq. 4
        kl = mx.where(mask, mx.expm1(difference) - difference, 0.0)
        per_token = per_token + train.beta * kl
    losses = mx.where(mask, per_token, 0.0).sum(axis=-1)
    completions = counted.sum()
    match train.loss_type:
        case "dr_grpo":  # arXiv:2503.20783, section 3.2
            total, count = losses.sum(), completions * (train.max_completion_length or 1)
        case "bnpo" | "dapo":  # arXiv:2503.14476, eq. 8
            total, count = losses.sum(), tokens.sum()
        case _:  # grpo, arXiv:2402.03300, eq. 3
            total, count = (losses / mx.maximum(tokens, 1)).sum(), completions
    is_clipped = ((ratio < 1 - train.epsilon) & (scale < 0)) | ((ratio > 1 + upper) & (scale > 0))
    is_clipped = is_clipped | ((log_ratio > MOST_LOG_RATIO) & (scale < 0))
    sums = {
        "count": count,
        "pairs": counted.max(axis=1).sum(),
        "completions": completions,
        "completion_tokens": tokens.sum(),
        "reward": mx.where(counted > 0, groups.rewards, 0.0).sum(),
        "reward_std": deviations(groups.rewards, counted)[1].sum(),
        "kl": kl.sum(),
        "entropy": groups.entropies.sum(),
        "clip_fraction": (is_clipped & mask).sum().astype(mx.float32),
    }
    return losses, {"loss": total, **{name: mx.stop_gradient(x) for name, x in sums.items()}}
