"""What a run is measured by as it goes: held-out metrics, greedy answers that can be checked, samples for people."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from lib.config.settings import TrainSettings
from lib.data.dataset import Dataset
from lib.data.order import divide_rows
from lib.data.prompts import Prompts, Question
from lib.data.tokenizer import Tokenizer
from lib.distributed.world import World
from lib.evaluate.judges import extract
from lib.evaluate.sampler import GreedySampling, Prompt, Sampler
from lib.system import files
from lib.system.terminal import Terminal
from lib.training import losses
from lib.training.losses import SUMS, Metrics, means_of, objective
from lib.training.reference_model import dataset_logps
from lib.training.run import TrainingRun
from lib.training.unpaired_losses import baseline_of_rows


def greedy(
    model: nn.Module,
    tokenizer: Tokenizer,
    prompts: Sequence[list[int]],
    max_tokens: int,
    world: World,
    shares: Sequence[int] | None = None,
    say: Terminal | None = None,
) -> tuple[list[str], int]:
    """The greedy continuation of every prompt, on every rank, and how many have no end within max_tokens, which `say`
    prints. Ranks take prompts by their shares, or equally many."""
    workers = world.workers
    counts = divide_rows(len(prompts), shares if shares and workers.size > 1 else [1] * workers.size)
    first = int(sum(counts[: workers.rank]))
    rows = range(first, first + int(counts[workers.rank]))
    sampler = Sampler(model, tokenizer, GreedySampling(max_tokens), world)
    with workers.together("greedy answers", passes=len(rows)):
        samples = sampler.sample([Prompt(row, prompts[row]) for row in rows])
    own = [[sample.text, sample.finish == "length"] for sample in samples]
    gathered = [answer for of_rank in workers.gather_values(own, "greedy answers") for answer in of_rank]
    cut = sum(is_cut for _, is_cut in gathered)
    if cut and say is not None:
        say.line(f"{cut:,} of {len(prompts):,} greedy answers have no end within evaluate.max_tokens={max_tokens}")
    return [text for text, _ in gathered], cut


def exact_match(questions: list[Question], texts: list[str], pattern: str) -> float:
    """The share of questions whose continuation gives the right answer; the pattern's last match is what it gives."""
    return sum(extract(pattern, text) == q.answer for q, text in zip(questions, texts, strict=True)) / len(questions)


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


ANSWER_TOKENS, SAMPLE_TOKENS = 64, 24  # of an answer that is shown; without a right one: each takes a GPU a step's time
SAMPLE_WIDTH = 160  # columns of a sample's line, in a file


@dataclass
class Evaluator:
    """Evaluates a run, records the result and prints it. reference: float32 [n, K], of the held-out rows; None for a
    loss without one."""

    run: TrainingRun
    reference: np.ndarray | None

    def __post_init__(self) -> None:
        """The prompts of samples, token ids: of questions, else of the first rows that are held out or trained."""
        inputs, most = self.run.inputs, self.run.config.evaluate.samples
        dataset = inputs.valid or inputs.data
        ids = [question.prompt_ids for question in inputs.questions]
        if not ids and isinstance(dataset, Prompts):  # which each round replaces by its answers
            ids = (inputs.held_out or dataset).ids
        elif not ids:
            rows = dataset.examples(range(min(8 * most, len(dataset))))  # several may have one prompt
            ids = [row.prompt_ids.tolist() for row in rows]
        self.shown = [list(prompt) for prompt in dict.fromkeys(map(tuple, ids))][:most]

    def __call__(self, world: World, shares: Sequence[int]) -> Metrics:
        """Metrics of the held-out pairs, and of greedy answers, by the ranks of a world."""
        run, valid, questions, settings = self.run, self.run.inputs.valid, self.run.inputs.questions, self.run.config
        values, cut, began = Metrics(), dict[str, int](), time.perf_counter()
        with run.say.doing("evaluating"):
            if valid is not None:
                policy = self.reference  # which the policy is, before the first step
                if policy is None or run.progress.step or settings.model.reference != "initial":
                    policy = dataset_logps(run.model, valid, world, shares, settings)
                values |= metrics_of(valid, policy, self.reference, settings.train)
            if questions and run.inputs.tokenizer is not None:
                prompts, most = [question.prompt_ids for question in questions], settings.evaluate.max_tokens
                texts, cut["answers_cut"] = greedy(
                    run.model, run.inputs.tokenizer, prompts, most, world, shares, run.say
                )
                values["exact_match"] = exact_match(questions, texts, settings.evaluate.answer_pattern)
        if values:
            seconds = time.perf_counter() - began
            run.tracker.record("evaluation", step=run.own_step, evaluation_seconds=seconds, **cut, **values)
        return values

    def show(self, when: str) -> None:
        """Prints and records greedy continuations of the first distinct prompts. when: before or after training."""
        run, settings, tokenizer, prompts = self.run, self.run.config.evaluate, self.run.inputs.tokenizer, self.shown
        if tokenizer is None or not prompts or not all(prompts):
            return
        most = min(settings.max_tokens, ANSWER_TOKENS if run.inputs.questions else SAMPLE_TOKENS)
        texts, _ = greedy(run.model, tokenizer, prompts, most, run.world)
        samples = [{"prompt": tokenizer.decode(p), when: text} for p, text in zip(prompts, texts, strict=True)]
        run.say.line(f"greedy answers {when} training", "bold")
        half = ((run.say.width or SAMPLE_WIDTH) - 15) // 2
        for name, text in (pair for sample in samples for pair in sample.items()):
            line = " ".join(text.split())
            run.say.line(f"  {name:8}{line if len(line) <= 2 * half + 5 else f'{line[:half]} ... {line[-half:]}'}")
        run.tracker.record("samples", samples=samples)
