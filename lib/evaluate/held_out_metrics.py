"""Metrics of a data set, and of each of its pairs."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from lib.config.schema import Config
from lib.data.answer_questions import Question
from lib.data.dataset import Dataset
from lib.distributed.world import World
from lib.training import losses, reference_model
from lib.training.step import SUMS, Metrics, means_of, objective


def policy_logps(
    model: nn.Module, dataset: Dataset, settings: Config, world: World, shares: Sequence[int]
) -> np.ndarray:
    """log pi of every completion, float32 [N, K], as `dataset_logps` gives them at the evaluation batch size."""
    return reference_model.dataset_logps(model, dataset, world, shares, settings)


def digest_of(valid: Dataset | None, questions: list[Question]) -> str:
    """Of all that a run is judged by."""
    return hashlib.sha256(repr([valid and valid.digest, questions]).encode()).hexdigest()


def metrics_of(dataset: Dataset, policy: np.ndarray, reference: np.ndarray | None, settings: Config) -> Metrics:
    """The loss and metrics of a dataset, each pair counted once, whatever the batches were."""
    _, sums = objective(settings.train, *_arrays(dataset, policy, reference))
    return means_of({name: sums[name].item() if name in sums else 0.0 for name in SUMS}, settings.train)


def write_per_pair(path: Path, dataset: Dataset, policy: np.ndarray, reference: np.ndarray, settings: Config) -> None:
    """One JSON line a pair, in the file's order: both models' log-probabilities, the rewards and the loss."""
    arrays = _arrays(dataset, policy, reference)
    per_pair, _ = objective(settings.train, *arrays)
    pairs = [
        losses.LogProbs(logps[:, 0], logps[:, 1], arrays[1][:, 0], arrays[1][:, 1])
        for logps in (arrays[0], mx.array(reference))
    ]
    assert settings.train.loss != "sft"
    reward_chosen, reward_rejected = losses.implicit_rewards(
        settings.train.loss, pairs[0], pairs[1], settings.train.beta
    )
    columns = {
        "policy_chosen_logp": policy[:, 0],
        "policy_rejected_logp": policy[:, 1],
        "reference_chosen_logp": reference[:, 0],
        "reference_rejected_logp": reference[:, 1],
        "reward_chosen": np.array(reward_chosen),
        "reward_rejected": np.array(reward_rejected),
        "loss": np.array(per_pair),
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", encoding="utf-8") as file:
        for row in range(len(dataset)):
            file.write(json.dumps({name: float(column[row]) for name, column in columns.items()}) + "\n")


def _arrays(
    dataset: Dataset, policy: np.ndarray, reference: np.ndarray | None
) -> tuple[mx.array, mx.array, mx.array | None]:
    return mx.array(policy), mx.array(dataset.scored_tokens), None if reference is None else mx.array(reference)
