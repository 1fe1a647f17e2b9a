"""What a run looks at as it goes: held-out metrics and greedy answers."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from lib.distributed.world import World
from lib.evaluate import answers
from lib.evaluate.held_out_metrics import metrics_of
from lib.training.objective import Metrics
from lib.training.reference_model import dataset_logps
from lib.training.run import TrainingRun

SAMPLE_TOKENS = 32  # of an answer that is only shown: a line of it is


@dataclass
class Evaluator:
    """Evaluates a run, records the result and prints it.

    Args:
        reference: float32 [n, K], of the held-out rows; None for a loss without one.
    """

    run: TrainingRun
    reference: np.ndarray | None
    texts: dict[int, list[str]] = field(default_factory=dict)  # answers to the questions, by step

    def __call__(self, world: World, shares: Sequence[int]) -> Metrics:
        """Metrics of the held-out pairs, and of greedy answers, by the ranks of a world."""
        run, valid, questions = self.run, self.run.inputs.valid, self.run.inputs.questions
        values: Metrics = {}
        texts: list[str] = []
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
        """Prints and records what training changed: in the answers to questions, else in the samples.

        step: whose weights the model has.
        """
        run, questions = self.run, self.run.inputs.questions
        if questions and not self.texts:
            return  # a resumed run that had nothing left to do
        if questions:
            before = next(iter(self.texts.values()))
            # Of a run that was resumed, this process may not have evaluated that step.
            after = self.texts[step] if step in self.texts else self._answers(run.world, None).texts
            settings = run.config.evaluate
            changes = (before, after), settings.answer_pattern, settings.samples
            answers.show_changes(run.say, run.tracker, questions, *changes)
        else:
            self._show_samples("after")

    def _answers(self, world: World, shares: Sequence[int] | None) -> answers.GreedyAnswers:
        """Greedy answers to all questions, by the ranks of a world."""
        run, tokenizer = self.run, self.run.inputs.tokenizer
        assert tokenizer is not None  # where there are questions
        prompts = [question.prompt_ids for question in run.inputs.questions]
        limit = run.config.evaluate.max_tokens
        made = answers.greedy(run.model, tokenizer, prompts, limit, world, shares)
        if warning := made.warning(f"evaluate.max_tokens={limit}"):
            run.say.line(warning)
        return made

    def _show_samples(self, when: str) -> None:
        """Greedy continuations of the first few prompts, which are the same before and after."""
        settings = self.run.config.evaluate
        dataset = self.run.inputs.valid or self.run.inputs.data
        examples = dataset.examples(range(min(settings.samples, len(dataset))))
        if not examples or any(len(example.prompt_ids) == 0 for example in examples):
            return
        if (tokenizer := self.run.inputs.tokenizer) is None:
            return
        prompts = [example.prompt_ids.tolist() for example in examples]
        limit = min(settings.max_tokens, SAMPLE_TOKENS)
        texts = answers.greedy(self.run.model, tokenizer, prompts, limit, self.run.world).texts
        answers.show_samples(self.run.say, self.run.tracker, list(map(tokenizer.decode, prompts)), texts, when)
