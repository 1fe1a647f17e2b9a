"""GRPO's loss and gradients as TRL computes them: the numbers that tests/test_groups.py compares with.

    python tests/trl_groups.py > tests/trl_groups.json        with trl==1.16.0

`python` is that of an environment with TRL and PyTorch. TRL's own GRPOTrainer and RLOOTrainer are asked, without a model: the log-probabilities of nine
completions, three groups of three, are made up, under the policy, the one that sampled them and a reference. One group has equal rewards, one has a
completion that is masked, as mask_truncated_completions does: its reward counts. Computed in float64. Prints one JSON object: for each loss_type, way to
scale rewards and level of importance sampling the loss, its derivative by each token's log-probability, and TRL's figures.
"""

from __future__ import annotations

import json
import sys
from collections import defaultdict
from types import SimpleNamespace
from typing import Any

sys.path.pop(0)  # the other files here are tests

import torch  # noqa: E402
from trl import GRPOTrainer, RLOOTrainer  # noqa: E402
from trl.trainer.utils import nanstd  # noqa: E402

POLICY = [[-0.5, -1.25, -2.0], [-0.75], [-3.0, -0.125], [-1.0, -1.5, -0.25, -2.5], [-0.375, -4.0], [-2.25, -0.5, -1.75]]
SAMPLING = [[-0.625, -1.0, -2.5], [-1.25], [-2.5, -0.25], [-1.0, -1.25, -0.5, -2.0], [-0.25, -3.5], [-2.75, -0.5, -1.5]]
REFERENCE = [[-0.75, -1.5, -1.75], [-1.0], [-2.0, -0.5], [-1.25, -1.0, -0.5, -3.0], [-0.5, -3.0], [-2.0, -1.0, -1.25]]
POLICY += [[-0.25, -1.0, -0.75, -0.5, -3.25], [-2.0], [-0.5, -0.625]]
SAMPLING += [[-0.5, -0.875, -0.75, -1.0, -2.75], [-1.5], [-0.25, -0.75]]
REFERENCE += [[-0.5, -1.0, -1.25, -0.75, -2.5], [-1.0], [-0.75, -1.0]]
REWARDS = [1.0, 0.25, -0.5, 0.3, 0.3, 0.3, 0.0, 2.0, 0.5]
MASKED = [7]
BETA, EPSILON, EPSILON_HIGH, LONGEST = 0.3, 0.2, 0.28, 8


def padded(rows: list[list[float]]) -> torch.Tensor:
    width = max(map(len, rows))
    return torch.tensor([[*row, *[0.0] * (width - len(row))] for row in rows], dtype=torch.float64)


def advantages(scale: str) -> torch.Tensor:
    """As GRPOTrainer._generate_and_score_completions has them, by scale_rewards; "rloo": as RLOOTrainer's."""
    rewards = torch.tensor(REWARDS, dtype=torch.float64)
    grouped = rewards.view(-1, 3)
    if scale == "rloo":
        return (grouped - (grouped.sum(dim=1, keepdim=True) - grouped) / 2).view(-1)
    centered = rewards - grouped.mean(dim=1).repeat_interleave(3)
    if scale == "none":
        return centered
    std = nanstd(grouped, dim=1).repeat_interleave(3) if scale == "group" else nanstd(rewards)
    return centered / (std + 1e-4)


def figures(loss_type: str, scale: str, level: str) -> dict[str, Any]:
    """By GRPOTrainer's own code, or with "rloo" by RLOOTrainer's."""
    logps = padded(POLICY).requires_grad_()
    masked = [] if scale == "rloo" else MASKED  # RLOO counts a masked completion as one of ratio 1: a constant
    mask = padded([[float(i not in masked)] * len(row) for i, row in enumerate(POLICY)])
    trainer = SimpleNamespace(
        model=SimpleNamespace(training=True),
        accelerator=SimpleNamespace(num_processes=1, reduce=lambda x, reduction: x, gather=lambda x: x),
        args=SimpleNamespace(use_bias_correction_kl=False, delta=None, steps_per_generation=1),
        _get_per_token_logps_and_entropies=lambda *_, **__: (logps, -logps.detach(), None),
        _metrics={"train": defaultdict(list)},
        current_gradient_accumulation_steps=1,
        importance_sampling_level=level,
        loss_type=loss_type,
        beta=BETA,
        epsilon_low=EPSILON,
        epsilon_high=EPSILON_HIGH,
        max_completion_length=LONGEST,
        aux_loss_enabled=False,
        top_entropy_quantile=1.0,
        off_policy_mask_threshold=None,
        use_vllm=False,
        vllm_importance_sampling_correction=False,
        _entropy_bonus_enabled=False,
    )
    inputs = {
        "prompt_ids": torch.zeros(len(POLICY), 1, dtype=torch.int64),
        "prompt_mask": torch.ones(len(POLICY), 1, dtype=torch.int64),
        "completion_ids": torch.zeros(*logps.shape, dtype=torch.int64),
        "completion_mask": mask,
        "advantages": advantages(scale),
        "old_per_token_logps": padded(SAMPLING),
        "ref_per_token_logps": padded(REFERENCE),
        "old_logps": (padded(SAMPLING) * mask).sum(dim=1),
        "num_items_in_batch": mask.sum(),
    }
    loss = (RLOOTrainer if scale == "rloo" else GRPOTrainer)._compute_loss(trainer, trainer.model, inputs)
    loss.backward()
    of_tokens = [row[: len(own)] for row, own in zip(logps.grad.tolist(), POLICY, strict=True)]
    metrics = {name: values[-1] for name, values in trainer._metrics["train"].items()}
    return {
        "loss": loss.item(),
        "gradients": of_tokens,
        "kl": metrics.get("kl"),
        "clip_fraction": metrics["clip_ratio/region_mean"],
    }


if __name__ == "__main__":
    levels = {"token": ("group", "batch", "none"), "sequence": ("group",)}
    loss_types = ("grpo", "dr_grpo", "bnpo", "dapo")
    cases = [(one, scale, level) for one in loss_types for level, scales in levels.items() for scale in scales]
    cases.append(("grpo", "rloo", "completion"))
    given = {
        "policy": POLICY,
        "sampling": SAMPLING,
        "reference": REFERENCE,
        "rewards": REWARDS,
        "masked": MASKED,
        "beta": BETA,
        "epsilon": EPSILON,
        "epsilon_high": EPSILON_HIGH,
        "max_completion_length": LONGEST,
    }
    print(json.dumps({**given, "figures": {" ".join(case): figures(*case) for case in cases}}))
