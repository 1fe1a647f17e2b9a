"""What a run looks at as it goes: held-out metrics, greedy answers that can be checked, and samples for people."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from lib.data.prompts import Prompts
from lib.distributed.world import World
from lib.evaluate.exact_match import exact_match, greedy
from lib.evaluate.held_out_metrics import metrics_of
from lib.training.losses import Metrics
from lib.training.reference_model import dataset_logps
from lib.training.run import TrainingRun

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
