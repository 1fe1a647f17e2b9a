"""Metrics of a data set, and of each of its pairs."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np

from lib.config.settings import TrainSettings
from lib.data.dataset import Dataset
from lib.data.prompts import Prompts, Question
from lib.system import files
from lib.training import losses
from lib.training.losses import SUMS, Metrics, baseline_of_rows, means_of, objective


def digest_of(valid: Dataset | Prompts | None, questions: list[Question]) -> str:
    """Of all that a run is judged by."""
    return hashlib.sha256(repr([valid and valid.digest, questions]).encode()).hexdigest()


def metrics_of(dataset: Dataset, policy: np.ndarray, reference: np.ndarray | None, train: TrainSettings) -> Metrics:
    """The loss and metrics of a dataset, each pair counted once, whatever the batches were. policy, reference:
    log-probabilities of every completion, float32 [N, K]."""
    _, sums = _objective(policy, reference, dataset.scored_tokens, dataset.labels, train)
    return means_of({name: sums[name].item() if name in sums else 0.0 for name in SUMS}, train)


def write_per_pair(
    path: Path, dataset: Dataset, policy: np.ndarray, reference: np.ndarray, train: TrainSettings
) -> None:
    """One JSON line a pair, in the file's order: both models' log-probabilities, the rewards and the loss. Of unpaired
    feedback one line a row: its label first."""
    columns = columns_by_row(policy, reference, dataset.scored_tokens, train)
    columns["loss"] = np.array(_objective(policy, reference, dataset.scored_tokens, dataset.labels, train)[0])
    with files.replacing(path) as file:
        for row in range(len(dataset)):
            label = {} if dataset.labels is None else {"label": bool(dataset.labels[row])}
            values = label | {name: float(column[row]) for name, column in columns.items()}
            file.write(json.dumps(values).encode() + b"\n")


def columns_by_row(
    policy: np.ndarray, reference: np.ndarray, tokens: np.ndarray, train: TrainSettings
) -> dict[str, np.ndarray]:
    """Log-probabilities, rewards and, of pairs, the loss, each float32 [N]. policy, reference, tokens: [N, K]."""
    if train.record_kind == "unpaired":  # a row's loss compares it with all others
        rewards = train.beta * (policy[:, 0] - reference[:, 0])
        return {"policy_logp": policy[:, 0], "reference_logp": reference[:, 0], "reward": rewards}
    counts = mx.array(tokens)
    of_policy, of_reference = (
        losses.LogProbs(mx.array(logps[:, 0]), mx.array(logps[:, 1]), counts[:, 0], counts[:, 1])
        for logps in (policy, reference)
    )
    chosen, rejected = losses.implicit_rewards(train.loss_terms, of_policy, of_reference, train.beta)
    return {
        "policy_chosen_logp": policy[:, 0],
        "policy_rejected_logp": policy[:, 1],
        "reference_chosen_logp": reference[:, 0],
        "reference_rejected_logp": reference[:, 1],
        "reward_chosen": np.array(chosen),
        "reward_rejected": np.array(rejected),
        "loss": np.array(_objective(policy, reference, tokens, None, train)[0]),
    }


def _objective(
    policy: np.ndarray, reference: np.ndarray | None, tokens: np.ndarray, labels: Any, train: TrainSettings
) -> tuple[mx.array, dict[str, mx.array]]:
    """`objective` of all rows together. labels: of unpaired feedback."""
    arrays = mx.array(policy), mx.array(tokens), None if reference is None else mx.array(reference)
    if labels is None:
        return objective(train, *arrays)
    assert reference is not None
    return objective(train, *arrays, mx.array(labels), baseline_of_rows(train, policy, reference))
