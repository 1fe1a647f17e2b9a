"""Losses and gradients as TRL computes them: the figures of tests/golden/trl.json, from the inputs that stand there.

    python tests/trl_figures.py pairs|kto|groups        with trl==1.16.0
    python tests/trl_figures.py bco                     with trl==1.9.0: later ones have no BCO

`python` is that of an environment with TRL and PyTorch. TRL's own trainers are asked, without a model: log-probabilities
are made up, under policy and reference (groups: and those that sampled them). Computed in float64. Prints one JSON object.
pairs: chosen completions, then rejected ones; the chosen have one length, as TRL's SFT loss is a mean over a batch's tokens.
groups: three of three completions, one of equal rewards, one with a completion that is masked, whose reward counts.
"""

from __future__ import annotations

import json
import sys
from collections import defaultdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

sys.path.pop(0)  # the other files here are tests

import torch  # noqa: E402

INPUTS = json.loads((Path(__file__).parent / "golden/trl.json").read_text())
SUMS_OF_LOSSES = {"mpo": (["sigmoid", "bco_pair", "sft"], [0.8, 0.2, 1.0]), "wpo": (["sigmoid"], [1.0])}


def padded(rows: list[list[float]]) -> torch.Tensor:
    width = max(map(len, rows))
    return torch.tensor([[*row, *[0.0] * (width - len(row))] for row in rows], dtype=torch.float64)


def trainer(**known: Any) -> SimpleNamespace:
    """What all trainers' loss functions look at, beside what is known."""
    given = {"model": SimpleNamespace(training=True), "aux_loss_enabled": False}
    given |= {"_total_train_tokens": 0, "_tp_size": 1}
    same = {"gather_for_metrics": lambda x: x, "gather": lambda x: x, "reduce": lambda x, reduction: x}
    given["accelerator"] = SimpleNamespace(device="cpu", num_processes=1, **same)
    return SimpleNamespace(**given, _metrics={"train": defaultdict(list)}, **known)


def ones(rows: int, width: int) -> torch.Tensor:
    return torch.ones(rows, width, dtype=torch.int64)


def pairs(name: str) -> dict[str, Any]:
    """By DPOTrainer's own code."""
    from trl import DPOTrainer

    given = INPUTS["pairs"]
    logps = padded(given["policy"]).requires_grad_()
    rows, width = logps.shape
    mask = torch.tensor([[0, *[1] * len(row), *[0] * (width - len(row))] for row in given["policy"]])
    outputs = SimpleNamespace(log_probs=logps, log_sum_sq_probs=padded(given["square_sums"]), entropy=-logps)
    outputs.mean_logits, outputs.is_top1 = logps, torch.ones_like(mask[:, 1:], dtype=torch.bool)
    losses, weights = SUMS_OF_LOSSES.get(name, ([{"sppo": "sppo_hard"}.get(name, name)], [1.0]))
    options = {"loss_types": losses, "loss_weights": weights, "use_weighting": name == "wpo", "label_smoothing": 0.0}
    options |= {"beta": given["beta"], "ld_alpha": None}
    options |= {"precompute_ref_logps": True, "f_divergence_type": "reverse_kl"}
    chosen, rejected = torch.tensor(given["reference"], dtype=torch.float64).chunk(2)
    inputs = {"input_ids": 0 * ones(rows, width + 1), "attention_mask": ones(rows, width + 1), "completion_mask": mask}
    inputs |= {"ref_chosen_logps": chosen, "ref_rejected_logps": rejected}
    loss = DPOTrainer._compute_loss(trainer(**options), lambda **_: outputs, inputs, False)
    loss.backward()
    return {"loss": loss.item(), "gradients": logps.grad[:, 0].tolist()}


def unpaired() -> dict[str, torch.Tensor]:
    known = {name: value for name, value in INPUTS["unpaired"].items() if name != "figures"}
    return {name: torch.tensor(value, dtype=torch.float64) for name, value in known.items()}


def kto() -> dict[str, Any]:
    """By KTOTrainer's own code: each row a prompt of one token and a completion of one."""
    from trl import KTOTrainer

    given = unpaired()
    logps = given["policy"].requires_grad_()
    outputs = SimpleNamespace(log_probs=logps[:, None], entropy=-logps[:, None], mean_logits=logps[:, None])
    desirable, undesirable = INPUTS["unpaired"]["weights"]
    options = {"desirable_weight": desirable, "undesirable_weight": undesirable, "beta": INPUTS["unpaired"]["beta"]}
    options |= {"precompute_ref_logps": True, "calculate_KL": True, "loss_type": "kto"}
    asked = trainer(**options, _compute_kl_logps=lambda model, batch: given["mismatched_policy"])
    inputs = {"input_ids": 0 * ones(6, 2), "attention_mask": ones(6, 2), "completion_mask": torch.tensor([[0, 1]] * 6)}
    inputs |= {"label": given["labels"].bool(), "ref_logps": given["reference"]}
    inputs |= {"ref_KL_logps": given["mismatched_reference"]}
    loss = KTOTrainer._compute_loss(asked, lambda **_: outputs, inputs, False)
    loss.backward()
    figures = {name: values[-1] for name, values in asked._metrics["train"].items()}
    return {"loss": loss.item(), "gradients": logps.grad.tolist(), "baseline": figures["kl"], **figures}


def bco() -> dict[str, Any]:
    """By BCOTrainer's, in a second step: its baseline remembers the rewards of the first."""
    from trl.experimental.bco.bco_trainer import BCOTrainer, RunningMoments

    given = unpaired()
    running = RunningMoments(SimpleNamespace(use_distributed=False))
    running.update(given["earlier_rewards"])
    asked = SimpleNamespace(beta=INPUTS["unpaired"]["beta"], running=running, match_underlying_distribution=False)
    logps, labels = given["policy"].requires_grad_(), given["labels"].bool()
    of_labels = [rows[which] for rows in (logps, given["reference"]) for which in (labels, ~labels)]
    losses, chosen, rejected, delta = BCOTrainer.bco_loss(asked, *of_labels, None, None)
    losses.nanmean().backward()
    rewards = {"rewards/chosen": chosen.mean().item(), "rewards/rejected": rejected.mean().item()}
    return {"loss": losses.nanmean().item(), "gradients": logps.grad.tolist(), "baseline": delta.item(), **rewards}


def advantages(scale: str) -> torch.Tensor:
    """As GRPOTrainer._generate_and_score_completions has them, by scale_rewards; "rloo": as RLOOTrainer's."""
    from trl.trainer.utils import nanstd

    rewards = torch.tensor(INPUTS["groups"]["rewards"], dtype=torch.float64)
    grouped = rewards.view(-1, 3)
    if scale == "rloo":
        return (grouped - (grouped.sum(dim=1, keepdim=True) - grouped) / 2).view(-1)
    centered = rewards - grouped.mean(dim=1).repeat_interleave(3)
    if scale == "none":
        return centered
    std = nanstd(grouped, dim=1).repeat_interleave(3) if scale == "group" else nanstd(rewards)
    return centered / (std + 1e-4)


def groups(loss_type: str, scale: str, level: str) -> dict[str, Any]:
    """By GRPOTrainer's own code, or with "rloo" by RLOOTrainer's, to which a masked completion is a constant, of ratio 1."""
    from trl import GRPOTrainer, RLOOTrainer

    given = INPUTS["groups"]
    logps = padded(given["policy"]).requires_grad_()
    masked = [] if scale == "rloo" else given["masked"]
    mask = padded([[float(i not in masked)] * len(row) for i, row in enumerate(given["policy"])])
    options = {"importance_sampling_level": level, "loss_type": loss_type, "beta": given["beta"], "use_vllm": False}
    options |= {"epsilon_low": given["epsilon"], "epsilon_high": given["epsilon_high"], "top_entropy_quantile": 1.0}
    options |= {"max_completion_length": given["max_completion_length"], "off_policy_mask_threshold": None}
    options |= {"vllm_importance_sampling_correction": False, "_entropy_bonus_enabled": False}
    options |= {"args": SimpleNamespace(use_bias_correction_kl=False, delta=None, steps_per_generation=1)}
    options |= {"_get_per_token_logps_and_entropies": lambda *_, **__: (logps, -logps.detach(), None)}
    asked = trainer(**options, current_gradient_accumulation_steps=1)
    rows, sampling = len(given["policy"]), padded(given["sampling"])
    inputs = {"prompt_ids": 0 * ones(rows, 1), "prompt_mask": ones(rows, 1), "completion_ids": 0 * ones(*logps.shape)}
    inputs |= {"completion_mask": mask, "advantages": advantages(scale), "num_items_in_batch": mask.sum()}
    inputs |= {"old_per_token_logps": sampling, "ref_per_token_logps": padded(given["reference"])}
    inputs |= {"old_logps": (sampling * mask).sum(dim=1)}
    loss = (RLOOTrainer if scale == "rloo" else GRPOTrainer)._compute_loss(asked, asked.model, inputs)
    loss.backward()
    of_tokens = [row[: len(own)] for row, own in zip(logps.grad.tolist(), given["policy"], strict=True)]
    metrics = {name: values[-1] for name, values in asked._metrics["train"].items()}
    clipped = metrics["clip_ratio/region_mean"]
    return {"loss": loss.item(), "gradients": of_tokens, "kl": metrics.get("kl"), "clip_fraction": clipped}


if __name__ == "__main__":
    section = sys.argv[1]
    if section == "pairs":
        figures = {name: pairs(name) for name in INPUTS["pairs"]["figures"]}
    elif section == "groups":
        figures = {case: groups(*case.split()) for case in INPUTS["groups"]["figures"]}
    else:
        figures = {section: {"kto": kto, "bco": bco}[section]()}
    print(json.dumps(figures))
