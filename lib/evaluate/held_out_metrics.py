"""Metrics of a data set, and of each of its pairs."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from lib.config.settings import Config
from lib.data.dataset import Dataset
from lib.data.prompts import Prompts, Question
from lib.distributed.world import World
from lib.system import files
from lib.training import losses, reference_model
from lib.training.objective import SUMS, Metrics, baseline_of_rows, means_of, objective


def policy_logps(
    model: nn.Module, dataset: Dataset, settings: Config, world: World, shares: Sequence[int]
) -> np.ndarray:
    """log pi of every completion, float32 [N, K], as `dataset_logps` gives them at the evaluation batch size."""
    return reference_model.dataset_logps(model, dataset, world, shares, settings)


def digest_of(valid: Dataset | Prompts | None, questions: list[Question]) -> str:
    """Of all that a run is judged by."""
    return hashlib.sha256(repr([valid and valid.digest, questions]).encode()).hexdigest()


def metrics_of(dataset: Dataset, policy: np.ndarray, reference: np.ndarray | None, settings: Config) -> Metrics:
    """The loss and metrics of a dataset, each pair counted once, whatever the batches were."""
    _, sums = _objective(dataset, policy, reference, settings)
    return means_of({name: sums[name].item() if name in sums else 0.0 for name in SUMS}, settings.train)


def write_per_pair(path: Path, dataset: Dataset, policy: np.ndarray, reference: np.ndarray, settings: Config) -> None:
    """One JSON line a pair, in the file's order: both models' log-probabilities, the rewards and the loss.

    Of unpaired feedback one line a row: its label first.
    """
    per_row, _ = _objective(dataset, policy, reference, settings)
    columns = (_columns_of_pairs if dataset.labels is None else _columns_of_rows)(dataset, policy, reference, settings)
    columns["loss"] = np.array(per_row)
    with files.replacing(path) as file:
        for row in range(len(dataset)):
            label = {} if dataset.labels is None else {"label": bool(dataset.labels[row])}
            values = label | {name: float(column[row]) for name, column in columns.items()}
            file.write(json.dumps(values).encode() + b"\n")


def _columns_of_pairs(
    dataset: Dataset, policy: np.ndarray, reference: np.ndarray, settings: Config
) -> dict[str, np.ndarray]:
    tokens = mx.array(dataset.scored_tokens)
    of_policy, of_reference = (
        losses.LogProbs(mx.array(logps[:, 0]), mx.array(logps[:, 1]), tokens[:, 0], tokens[:, 1])
        for logps in (policy, reference)
    )
    chosen, rejected = losses.implicit_rewards(
        losses.terms_of(settings.train.loss), of_policy, of_reference, settings.train.beta
    )
    return {
        "policy_chosen_logp": policy[:, 0],
        "policy_rejected_logp": policy[:, 1],
        "reference_chosen_logp": reference[:, 0],
        "reference_rejected_logp": reference[:, 1],
        "reward_chosen": np.array(chosen),
        "reward_rejected": np.array(rejected),
    }


def _columns_of_rows(
    dataset: Dataset, policy: np.ndarray, reference: np.ndarray, settings: Config
) -> dict[str, np.ndarray]:
    return {
        "policy_logp": policy[:, 0],
        "reference_logp": reference[:, 0],
        "reward": settings.train.beta * (policy[:, 0] - reference[:, 0]),
    }


def _objective(
    dataset: Dataset, policy: np.ndarray, reference: np.ndarray | None, settings: Config
) -> tuple[mx.array, dict[str, mx.array]]:
    """`objective` of all rows together."""
    arrays = mx.array(policy), mx.array(dataset.scored_tokens), None if reference is None else mx.array(reference)
    if dataset.labels is None:
        return objective(settings.train, *arrays)
    assert reference is not None
    compared_with = baseline_of_rows(settings.train, policy, reference)
    return objective(settings.train, *arrays, mx.array(dataset.labels), compared_with)
