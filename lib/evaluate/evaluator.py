"""What a run looks at as it goes: held-out metrics and greedy answers."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from lib.distributed.world import World
from lib.evaluate import answers
from lib.evaluate.held_out_metrics import metrics_of
from lib.evaluate.judges import extract
from lib.training.losses import Metrics
from lib.training.reference_model import dataset_logps
from lib.training.run import TrainingRun

SAMPLE_TOKENS = 32  # of an answer that is only shown: a line of it is


@dataclass
class Evaluator:
    """Evaluates a run, records the result and prints it. reference: float32 [n, K], of the held-out rows; None for a
    loss without one."""

    run: TrainingRun
    reference: np.ndarray | None
    texts: dict[int, list[str]] = field(default_factory=dict)  # answers to the questions, by step

    def __call__(self, world: World, shares: Sequence[int]) -> Metrics:
        """Metrics of the held-out pairs, and of greedy answers, by the ranks of a world."""
        run, valid, questions = self.run, self.run.inputs.valid, self.run.inputs.questions
        values: Metrics = {}
        cut: dict[str, int] = {}
        began = time.perf_counter()
        with run.say.doing("evaluating"):
            if valid is not None:
                is_reference = run.progress.step == 0 and run.config.model.reference == "initial"
                policy = self.reference if is_reference else None
                if policy is None:
                    policy = dataset_logps(run.model, valid, world, shares, run.config)
                values |= metrics_of(valid, policy, self.reference, run.config.train)
            if questions:
                texts, cut["answers_cut"] = self._answers(world, shares)
                values["exact_match"] = answers.exact_match(questions, texts, run.config.evaluate.answer_pattern)
                self.texts[run.progress.step] = texts
        if values:
            seconds = time.perf_counter() - began
            run.tracker.record("evaluation", step=run.own_step, evaluation_seconds=seconds, **cut, **values)
        return values

    def show_before(self) -> None:
        """Prints and records samples of the model before training, where no questions are asked."""
        if not self.run.inputs.questions:
            self._show_samples("before")

    def show_after(self, step: int) -> None:
        """Prints and records what training changed: in the answers to questions, else in the samples. step: whose
        weights the model has."""
        run, questions, settings = self.run, self.run.inputs.questions, self.run.config.evaluate
        if not questions:
            self._show_samples("after")
        elif self.texts:  # else a resumed run had nothing left to do
            before = next(iter(self.texts.values()))
            # Of a run that was resumed, this process may not have evaluated that step.
            after = self.texts[step] if step in self.texts else self._answers(run.world, None).texts
            changed = answers.changes(questions, before, after, settings.answer_pattern)
            fixed = sum(extract(settings.answer_pattern, each["after"]) == each["right"] for each in changed)
            counts = f"{fixed} are right now that were wrong, {len(changed) - fixed} wrong that were right"
            if changed:
                title = f"of {len(questions)} answers {counts}"
                answers.show_samples(run.say, run.tracker, title, changed[: settings.samples])

    def _answers(self, world: World, shares: Sequence[int] | None) -> answers.GreedyAnswers:
        """Greedy answers to all questions, by the ranks of a world."""
        run, tokenizer = self.run, self.run.inputs.tokenizer
        assert tokenizer is not None  # where there are questions
        prompts = [question.prompt_ids for question in run.inputs.questions]
        return answers.greedy(run.model, tokenizer, prompts, run.config.evaluate.max_tokens, world, shares, run.say)

    def _show_samples(self, when: str) -> None:
        """Greedy continuations of the first distinct prompts, which are the same before and after."""
        run, settings, tokenizer = self.run, self.run.config.evaluate, self.run.inputs.tokenizer
        dataset = run.inputs.valid or run.inputs.data
        rows = dataset.examples(range(min(8 * settings.samples, len(dataset))))  # several may have one prompt
        distinct = dict.fromkeys(tuple(row.prompt_ids.tolist()) for row in rows)
        prompts = [list(prompt) for prompt in distinct][: settings.samples]
        if tokenizer is None or not prompts or not all(prompts):
            return
        texts = answers.greedy(run.model, tokenizer, prompts, min(settings.max_tokens, SAMPLE_TOKENS), run.world).texts
        samples = [{"prompt": tokenizer.decode(p), when: text} for p, text in zip(prompts, texts, strict=True)]
        answers.show_samples(run.say, run.tracker, f"greedy answers {when} training", samples)
