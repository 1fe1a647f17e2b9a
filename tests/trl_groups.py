"""GRPO's loss and gradients as TRL computes them: the numbers that tests/test_groups.py compares with.

    python tests/trl_groups.py > tests/trl_groups.json        with trl==1.16.0

`python` is that of an environment with TRL and PyTorch. TRL's own GRPOTrainer is asked, without a model: the log-probabilities of six completions,
two groups of three, are made up, under the policy, the one that sampled them and a reference. Computed in float64. Prints one JSON object: for each
loss_type and way to scale rewards the loss, its derivative by each token's log-probability, and TRL's figures.
"""

from __future__ import annotations

import json
import sys
from collections import defaultdict
from types import SimpleNamespace
from typing import Any

sys.path.pop(0)  # the other files here are tests

import torch  # noqa: E402
from trl import GRPOTrainer  # noqa: E402
from trl.trainer.utils import nanstd  # noqa: E402

POLICY = [[-0.5, -1.25, -2.0], [-0.75], [-3.0, -0.125], [-1.0, -1.5, -0.25, -2.5], [-0.375, -4.0], [-2.25, -0.5, -1.75]]
SAMPLING = [[-0.625, -1.0, -2.5], [-1.25], [-2.5, -0.25], [-1.0, -1.25, -0.5, -2.0], [-0.25, -3.5], [-2.75, -0.5, -1.5]]
REFERENCE = [[-0.75, -1.5, -1.75], [-1.0], [-2.0, -0.5], [-1.25, -1.0, -0.5, -3.0], [-0.5, -3.0], [-2.0, -1.0, -1.25]]
REWARDS = [1.0, 0.25, -0.5, 0.0, 2.0, 0.5]
BETA, EPSILON, EPSILON_HIGH, LONGEST = 0.3, 0.2, 0.28, 8


def padded(rows: list[list[float]]) -> torch.Tensor:
    width = max(map(len, rows))
    return torch.tensor([[*row, *[0.0] * (width - len(row))] for row in rows], dtype=torch.float64)


def advantages(scale: str) -> torch.Tensor:
    """As GRPOTrainer._generate_and_score_completions has them, with scale_rewards="group" or "none"."""
    rewards = torch.tensor(REWARDS, dtype=torch.float64)
    grouped = rewards.view(-1, 3)
    centered = rewards - grouped.mean(dim=1).repeat_interleave(3)
    return centered / (nanstd(grouped, dim=1).repeat_interleave(3) + 1e-4) if scale == "group" else centered


def figures(loss_type: str, scale: str) -> dict[str, Any]:
    """By GRPOTrainer's own code."""
    logps = padded(POLICY).requires_grad_()
    mask = padded([[1.0] * len(row) for row in POLICY])
    trainer = SimpleNamespace(
        model=SimpleNamespace(training=True),
        accelerator=SimpleNamespace(num_processes=1, reduce=lambda x, reduction: x, gather=lambda x: x),
        args=SimpleNamespace(use_bias_correction_kl=False, delta=None, steps_per_generation=1),
        _get_per_token_logps_and_entropies=lambda *_, **__: (logps, -logps.detach(), None),
        _metrics={"train": defaultdict(list)},
        current_gradient_accumulation_steps=1,
        importance_sampling_level="token",
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
        "num_items_in_batch": mask.sum(),
    }
    loss = GRPOTrainer._compute_loss(trainer, trainer.model, inputs)
    loss.backward()
    of_tokens = [row[: len(own)] for row, own in zip(logps.grad.tolist(), POLICY, strict=True)]
    metrics = {name: values[-1] for name, values in trainer._metrics["train"].items()}
    return {
        "loss": loss.item(),
        "gradients": of_tokens,
        "kl": metrics["kl"],
        "clip_fraction": metrics["clip_ratio/region_mean"],
    }


if __name__ == "__main__":
    cases = [(loss_type, scale) for loss_type in ("grpo", "dr_grpo", "bnpo", "dapo") for scale in ("group", "none")]
    given = {
        "policy": POLICY,
        "sampling": SAMPLING,
        "reference": REFERENCE,
        "rewards": REWARDS,
        "beta": BETA,
        "epsilon": EPSILON,
        "epsilon_high": EPSILON_HIGH,
        "max_completion_length": LONGEST,
    }
    print(json.dumps({**given, "figures": {f"{one} {scale}": figures(one, scale) for one, scale in cases}}))
