"""What a run looks at as it goes: held-out metrics and greedy answers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from lib.distributed.world import World
from lib.evaluate import answers
from lib.evaluate.held_out_metrics import metrics_of, policy_logps
from lib.training.objective import Metrics
from lib.training.training_run import TrainingRun


@dataclass
class Evaluator:
    """Evaluates a run, records the result and prints it.

    Args:
        reference: float32 [n, K], of the held-out rows; None for a loss without one.
    """

    run: TrainingRun
    reference: np.ndarray | None
    texts: list[list[str]] = field(default_factory=list)  # answers to the questions, one list an evaluation

    def __call__(self, world: World, shares: Sequence[int]) -> Metrics:
        """Metrics of the held-out pairs, and of greedy answers, by the ranks of a world."""
        run, valid, questions = self.run, self.run.inputs.valid, self.run.inputs.questions
        values: Metrics = {}
        texts: list[str] = []
        with run.say.doing("evaluating"):
            if valid is not None:
                policy = policy_logps(run.model, valid, run.config, world, shares)
                values |= metrics_of(valid, policy, self.reference, run.config)
            if questions:
                prompts = [question.prompt_ids for question in questions]
                tokenizer, most = run.inputs.tokenizer, run.config.evaluate.max_tokens
                assert tokenizer is not None  # where there are questions
                texts = answers.greedy(run.model, tokenizer, prompts, most, world)
                values["exact_match"] = answers.exact_match(questions, texts, run.config)
        self.texts.append(texts)
        if values:
            run.tracker.record("evaluation", step=run.progress.steps_of(run.world.rank), **values)
            run.say.held_out(run.progress.step, run.steps, values)
        return values

    def show_before(self) -> None:
        """Prints and records samples of the model before training, where no questions are asked."""
        if not self.run.inputs.questions:
            self._show_samples("before")

    def show_after(self) -> None:
        """Prints and records what training changed: in the answers to questions, else in the samples."""
        if self.run.inputs.questions:
            run = self.run
            answers.show_changes(
                run.say, run.tracker, self.run.inputs.questions, self.texts[0], self.texts[-1], run.config
            )
        else:
            self._show_samples("after")

    def _show_samples(self, when: str) -> None:
        """Greedy continuations of the first few prompts, which are the same before and after."""
        settings, tokenizer = self.run.config.evaluate, self.run.inputs.tokenizer
        dataset = self.run.inputs.valid or self.run.inputs.data
        examples = dataset.examples(range(min(settings.samples, len(dataset))))
        if tokenizer is None or not examples or any(len(example.prompt_ids) == 0 for example in examples):
            return
        prompts = [example.prompt_ids.tolist() for example in examples]
        texts = answers.greedy(self.run.model, tokenizer, prompts, settings.max_tokens, self.run.world)
        answers.show_samples(self.run.say, self.run.tracker, list(map(tokenizer.decode, prompts)), texts, when)
