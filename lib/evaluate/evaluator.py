"""What a run looks at as it goes: held-out metrics, greedy answers that can be checked, and samples for people."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from lib.data.order import divide_rows
from lib.data.prompts import Question
from lib.data.tokenizer import Tokenizer
from lib.distributed.world import World
from lib.evaluate.held_out_metrics import metrics_of
from lib.evaluate.judges import extract
from lib.evaluate.sample import GreedySampling, Prompt, Sampler
from lib.system.terminal import Terminal
from lib.training.losses import Metrics
from lib.training.reference_model import dataset_logps
from lib.training.run import TrainingRun

SAMPLE_TOKENS = 64  # of an answer that is only shown
SAMPLE_WIDTH = 160  # columns of a sample's line, in a file


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
    ends = np.cumsum(divide_rows(len(prompts), shares if shares and workers.size > 1 else [1] * workers.size)).tolist()
    rows = range(ends[workers.rank - 1] if workers.rank else 0, ends[workers.rank])
    tokens = np.zeros((len(prompts), max_tokens + 2), np.int32)  # whether it was cut, a length, then that many tokens
    sampler = Sampler(model, tokenizer, GreedySampling(max_tokens), world)
    with workers.together("greedy answers", passes=len(rows)):
        samples = sampler.sample([Prompt(row, prompts[row]) for row in rows])
    for sample in samples:
        ids = [token for token in sample.tokens if token not in tokenizer.eos_token_ids]
        tokens[sample.prompt_id, : 2 + len(ids)] = [sample.finish == "length", len(ids), *ids]
    gathered = np.array(workers.all_sum(mx.array(tokens), "greedy answers"))
    cut = int(gathered[:, 0].sum())
    if cut and say is not None:
        say.line(f"{cut:,} of {len(prompts):,} greedy answers have no end within evaluate.max_tokens={max_tokens}")
    return [tokenizer.decode(row[2 : 2 + row[1]].tolist()) for row in gathered], cut


def exact_match(questions: list[Question], texts: list[str], pattern: str) -> float:
    """The share of questions whose continuation gives the right answer; the pattern's last match is what it gives."""
    return sum(extract(pattern, text) == q.answer for q, text in zip(questions, texts, strict=True)) / len(questions)


@dataclass
class Evaluator:
    """Evaluates a run, records the result and prints it. reference: float32 [n, K], of the held-out rows; None for a
    loss without one."""

    run: TrainingRun
    reference: np.ndarray | None

    def __call__(self, world: World, shares: Sequence[int]) -> Metrics:
        """Metrics of the held-out pairs, and of greedy answers, by the ranks of a world."""
        run, valid, questions, settings = self.run, self.run.inputs.valid, self.run.inputs.questions, self.run.config
        values, cut, began = Metrics(), dict[str, int](), time.perf_counter()
        with run.say.doing("evaluating"):
            if valid is not None:
                is_reference = run.progress.step == 0 and settings.model.reference == "initial"
                policy = self.reference if is_reference else None
                if policy is None:
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
        run, settings, tokenizer = self.run, self.run.config.evaluate, self.run.inputs.tokenizer
        prompts = [question.prompt_ids for question in run.inputs.questions]
        if not prompts:
            dataset = run.inputs.valid or run.inputs.data
            rows = dataset.examples(range(min(8 * settings.samples, len(dataset))))  # several may have one prompt
            prompts = [row.prompt_ids.tolist() for row in rows]
        prompts = [list(prompt) for prompt in dict.fromkeys(map(tuple, prompts))][: settings.samples]
        if tokenizer is None or not prompts or not all(prompts):
            return
        texts, _ = greedy(run.model, tokenizer, prompts, min(settings.max_tokens, SAMPLE_TOKENS), run.world)
        samples = [{"prompt": tokenizer.decode(p), when: text} for p, text in zip(prompts, texts, strict=True)]
        run.say.line(f"greedy answers {when} training", "bold")
        half = ((run.say.width or SAMPLE_WIDTH) - 15) // 2
        for name, text in (pair for sample in samples for pair in sample.items()):
            line = " ".join(text.split())
            run.say.line(f"  {name:8}{line if len(line) <= 2 * half + 5 else f'{line[:half]} ... {line[-half:]}'}")
        run.tracker.record("samples", samples=samples)
