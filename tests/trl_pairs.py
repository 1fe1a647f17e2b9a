"""Losses and gradients of pairs as TRL computes them: the numbers that tests/test_losses.py compares with.

    python tests/trl_pairs.py        with trl==1.16.0

`python` is that of an environment with TRL and PyTorch. DPOTrainer's own code is asked, without a model: the log-probabilities
of the tokens of three pairs under policy and reference are made up. Computed in float64. Prints one JSON object.
Chosen completions have one length: TRL's SFT loss is a mean over the tokens of a batch, ours of each pair.
"""

from __future__ import annotations

import json
import sys
from collections import defaultdict
from types import SimpleNamespace
from typing import Any

sys.path.pop(0)  # the other files here are tests

import torch  # noqa: E402

BETA = 0.3
# Of each pair's chosen completion, then of each pair's rejected one.
POLICY = [
    [-1.0, -0.5, -1.5],
    [-0.25, -2.0, -0.75],
    [-3.0, -0.5, -0.25],
    [-2.0, -0.5],
    [-1.0, -1.5, -0.5, -2.5],
    [-0.75],
]
REFERENCE = [-4.5, -2.5, -3.0, -1.75, -6.5, -1.0]  # log-probabilities of whole completions
SQUARE_SUMS = [
    [-0.5, -0.25, -1.0],
    [-0.75, -1.0, -0.5],
    [-1.5, -0.5, -0.25],
    [-1.0, -0.75],
    [-0.5, -1.25, -0.25, -1.0],
    [-0.5],
]
CASES: dict[str, tuple[list[str], list[float], bool]] = {
    "sigmoid": (["sigmoid"], [1.0], False),
    "sigmoid_norm": (["sigmoid_norm"], [1.0], False),
    "hinge": (["hinge"], [1.0], False),
    "sppo": (["sppo_hard"], [1.0], False),
    "apo_zero": (["apo_zero"], [1.0], False),
    "apo_down": (["apo_down"], [1.0], False),
    "bco_pair": (["bco_pair"], [1.0], False),
    "mpo": (["sigmoid", "bco_pair", "sft"], [0.8, 0.2, 1.0], False),
    "wpo": (["sigmoid"], [1.0], True),
}


def figures(losses: list[str], weights: list[float], use_weighting: bool) -> dict[str, Any]:
    """The loss, and its derivative by the log-probability of each completion."""
    from trl import DPOTrainer

    width = max(map(len, POLICY))

    def padded(rows: list[list[float]]) -> torch.Tensor:
        return torch.tensor([[*row, *[0.0] * (width - len(row))] for row in rows], dtype=torch.float64)

    logps = padded(POLICY).requires_grad_()
    mask = torch.tensor([[0, *[1] * len(row), *[0] * (width - len(row))] for row in POLICY])  # a prompt of one token
    outputs = SimpleNamespace(
        log_probs=logps,
        log_sum_sq_probs=padded(SQUARE_SUMS),
        entropy=-logps,
        mean_logits=logps,
        is_top1=torch.ones_like(mask[:, 1:], dtype=torch.bool),
    )
    trainer = SimpleNamespace(
        model=SimpleNamespace(training=True),
        accelerator=SimpleNamespace(device="cpu", gather_for_metrics=lambda x: x, gather=lambda x: x),
        aux_loss_enabled=False,
        ld_alpha=None,
        precompute_ref_logps=True,
        f_divergence_type="reverse_kl",
        loss_types=losses,
        loss_weights=weights,
        beta=BETA,
        label_smoothing=0.0,
        use_weighting=use_weighting,
        _metrics={"train": defaultdict(list)},
        _total_train_tokens=0,
        _tp_size=1,
    )
    chosen, rejected = torch.tensor(REFERENCE, dtype=torch.float64).chunk(2)
    inputs = {
        "input_ids": torch.zeros(len(POLICY), width + 1, dtype=torch.int64),
        "attention_mask": torch.ones(len(POLICY), width + 1, dtype=torch.int64),
        "completion_mask": mask,
        "ref_chosen_logps": chosen,
        "ref_rejected_logps": rejected,
    }
    loss = DPOTrainer._compute_loss(trainer, lambda **_: outputs, inputs, False)
    loss.backward()
    return {"loss": loss.item(), "gradients": logps.grad[:, 0].tolist()}


if __name__ == "__main__":
    print(json.dumps({name: figures(*case) for name, case in CASES.items()}, indent=1))
