"""Losses and gradients of KTO and BCO as TRL computes them: the numbers that tests/test_unpaired.py compares with.

    python tests/trl_unpaired.py kto        with trl==1.16.0
    python tests/trl_unpaired.py bco        with trl==1.9.0: later ones have no BCO

`python` is that of an environment with TRL and PyTorch. TRL's own trainers are asked, without a model: six completions' log-probabilities under policy and reference are made
up, and those of six mismatched ones. Computed in float64. Prints one JSON object.
"""

from __future__ import annotations

import json
import sys
from collections import defaultdict
from types import SimpleNamespace
from typing import Any

sys.path.pop(0)  # the other files here are tests

import torch  # noqa: E402

BETA, WEIGHTS = 0.3, (1.25, 0.75)
POLICY = [-3.0, -1.5, -7.25, -4.0, -0.5, -6.0]
REFERENCE = [-4.5, -1.0, -6.0, -6.5, -2.0, -5.75]
LABELS = [True, False, False, True, True, False]
MISMATCHED_POLICY = [-9.0, -6.0, -8.5, -7.0, -5.0, -9.5]
MISMATCHED_REFERENCE = [-9.5, -8.0, -8.0, -7.5, -6.5, -9.25]
EARLIER_REWARDS = [0.5, -0.25, 0.125]  # of bco's steps before


def kto() -> dict[str, Any]:
    """Loss and its derivative by each row's log-probability, by KTOTrainer's own code."""
    from trl import KTOTrainer

    logps = torch.tensor(POLICY, dtype=torch.float64, requires_grad=True)
    of_tokens = logps[:, None]  # each row a prompt of one token and a completion of one
    outputs = SimpleNamespace(log_probs=of_tokens, entropy=-of_tokens, mean_logits=of_tokens)
    trainer = SimpleNamespace(
        model=SimpleNamespace(training=True),
        accelerator=SimpleNamespace(device="cpu", gather_for_metrics=lambda x: x),
        _compute_kl_logps=lambda model, batch: torch.tensor(MISMATCHED_POLICY, dtype=torch.float64),
        aux_loss_enabled=False,
        precompute_ref_logps=True,
        calculate_KL=True,
        loss_type="kto",
        beta=BETA,
        desirable_weight=WEIGHTS[0],
        undesirable_weight=WEIGHTS[1],
        _metrics={"train": defaultdict(list)},
        _total_train_tokens=0,
        _tp_size=1,
    )
    inputs = {
        "input_ids": torch.zeros(len(POLICY), 2, dtype=torch.int64),
        "attention_mask": torch.ones(len(POLICY), 2, dtype=torch.int64),
        "completion_mask": torch.tensor([[0, 1]] * len(POLICY)),
        "label": torch.tensor(LABELS),
        "ref_logps": torch.tensor(REFERENCE, dtype=torch.float64),
        "ref_KL_logps": torch.tensor(MISMATCHED_REFERENCE, dtype=torch.float64),
    }
    loss = KTOTrainer._compute_loss(trainer, lambda **_: outputs, inputs, False)
    loss.backward()
    figures = {name: values[-1] for name, values in trainer._metrics["train"].items()}
    return {
        "loss": loss.item(),
        "gradients": logps.grad.tolist(),
        "kl": figures["kl"],
        "reward_chosen": figures["rewards/chosen"],
        "reward_rejected": figures["rewards/rejected"],
        "reward_margin": figures["rewards/margins"],
    }


def bco() -> dict[str, Any]:
    """The same by BCOTrainer's, in a second step: delta remembers the rewards of the first."""
    from trl.experimental.bco.bco_trainer import BCOTrainer, RunningMoments

    running = RunningMoments(SimpleNamespace(use_distributed=False))
    running.update(torch.tensor(EARLIER_REWARDS, dtype=torch.float64))
    trainer = SimpleNamespace(beta=BETA, running=running, match_underlying_distribution=False)
    logps = torch.tensor(POLICY, dtype=torch.float64, requires_grad=True)
    reference, labels = torch.tensor(REFERENCE, dtype=torch.float64), torch.tensor(LABELS)
    of_labels = [logps[labels], logps[~labels], reference[labels], reference[~labels]]
    losses, chosen, rejected, delta = BCOTrainer.bco_loss(trainer, *of_labels, None, None)
    loss = losses.nanmean()
    loss.backward()
    return {
        "loss": loss.item(),
        "gradients": logps.grad.tolist(),
        "delta": delta.item(),
        "reward_chosen": chosen.mean().item(),
        "reward_rejected": rejected.mean().item(),
    }


if __name__ == "__main__":
    print(json.dumps({"kto": kto, "bco": bco}[sys.argv[1]](), indent=1))
