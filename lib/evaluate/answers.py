"""Greedy answers to questions, and what training changed in them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mlx.core as mx  # noqa: E402
import mlx.nn as nn  # noqa: E402
import numpy as np  # noqa: E402
from mlx_lm import batch_generate  # noqa: E402

from lib.config.schema import Config  # noqa: E402
from lib.data.dataset import Dataset  # noqa: E402
from lib.data.questions import Question
from lib.data.streaming import StreamedDataset  # noqa: E402
from lib.distributed.world import Lockstep, World  # noqa: E402
from lib.evaluate.batch_inference import extract  # noqa: E402
from lib.system import out_of_memory  # noqa: E402
from lib.telemetry.run_records import PerformanceTracker  # noqa: E402
from lib.training.console import Report  # noqa: E402

SAMPLE_WIDTH = 160  # columns of a sample's line, in a file
MARKS = {True: "✓", False: "✗"}


def greedy(model: nn.Module, tokenizer: Any, prompts: Sequence[list[int]], max_tokens: int, world: World) -> list[str]:
    """The greedy continuation of every prompt, on every rank; the ranks share the work."""
    model.eval()
    world = world.workers
    mine = list(range(world.rank, len(prompts), world.size))
    tokens = np.zeros((len(prompts), max_tokens + 1), np.int32)  # a length, then that many tokens

    def answers(places: Sequence[int]) -> list[list[int]]:
        with world.together("greedy answers", passes=len(places)):
            response = batch_generate(
                model,
                tokenizer,
                [prompts[i] for i in places],
                max_tokens=max_tokens,
                return_token_ids=True,
                sampler=lambda logps: world.decide(mx.argmax(logps, axis=-1)),
            )
        return response.token_ids or []

    mx.eval(model.state)
    for start, generated in out_of_memory.in_pieces(mine, answers, can_halve=not isinstance(world, Lockstep)):
        for i, made in zip(mine[start:], generated, strict=False):
            ids = [token for token in made if token not in tokenizer.eos_token_ids][:max_tokens]
            tokens[i, 0], tokens[i, 1 : 1 + len(ids)] = len(ids), ids
    gathered = np.array(world.all_sum(mx.array(tokens), "greedy answers"))
    return [tokenizer.decode(row[1 : 1 + row[0]].tolist()) for row in gathered]


def exact_match(questions: list[Question], texts: list[str], settings: Config) -> float:
    """The share of questions whose continuation gives the right answer; the pattern's last match is what it gives."""
    return sum(_is_right(question, text, settings) for question, text in zip(questions, texts, strict=True)) / len(
        questions
    )


def _is_right(question: Question, text: str, settings: Config) -> bool:
    return extract(settings.evaluate.answer_pattern, text) == question.answer


def show_samples(
    say: Report,
    tracker: PerformanceTracker,
    model: nn.Module,
    tokenizer: Any,
    dataset: Dataset | StreamedDataset,
    settings: Config,
    world: World,
    when: str,
) -> None:
    """Prints and records the greedy continuations of the first few prompts, which are the same before and after."""
    examples = dataset.examples(range(min(settings.evaluate.samples, len(dataset))))
    if tokenizer is None or not examples or any(len(example.prompt_ids) == 0 for example in examples):
        return
    texts = greedy(
        model, tokenizer, [example.prompt_ids.tolist() for example in examples], settings.evaluate.max_tokens, world
    )
    say.line(f"greedy answers {when} training", "bold")
    room = (say.width or SAMPLE_WIDTH) - 10
    prompts = [tokenizer.decode(example.prompt_ids.tolist()) for example in examples]
    for prompt, text in zip(prompts, texts, strict=True):
        say.line(f"  prompt  {_one_line(prompt, room)}")
        say.line(f"  answer  {_one_line(text, room)}")
    shown = [{"prompt": prompt, when: text} for prompt, text in zip(prompts, texts, strict=True)]
    tracker.record("samples", samples=shown)


def show_changes(
    say: Report,
    tracker: PerformanceTracker,
    questions: list[Question],
    before: list[str],
    after: list[str],
    settings: Config,
) -> None:
    """Prints and records a few questions whose answer training changed, right for wrong and wrong for right in their proportion."""
    judged = [
        (q, b, a, _is_right(q, b, settings), _is_right(q, a, settings))
        for q, b, a in zip(questions, before, after, strict=True)
    ]
    changed = [row for row in judged if row[3] != row[4]]
    if not changed:
        return
    mended = sum(row[4] for row in changed)
    say.line("")
    back = len(changed) - mended
    say.line(
        f"of {len(questions)} answers {mended} are right now that were wrong, {back} wrong that were right", "bold"
    )
    shown = changed[: settings.evaluate.samples]
    room = (say.width or SAMPLE_WIDTH) - 12
    for question, was, now, was_right, is_right in shown:
        answer = f"  (right: {question.answer})"
        say.line(f"  {_one_line(question.prompt, room - len(answer))}{answer}")
        say.line(f"    before {MARKS[was_right]} {_one_line(was, room - 1)}")
        say.line(f"    after  {MARKS[is_right]} {_one_line(now, room - 1)}")
    tracker.record(
        "samples", samples=[{"prompt": q.prompt, "before": was, "after": now} for q, was, now, _, _ in shown]
    )


def _one_line(text: str, limit: int) -> str:
    """Beginning and end of a long text."""
    text = " ".join(text.split())
    return text if len(text) <= limit else f"{text[: limit // 2 - 3]} ... {text[len(text) + 2 - limit + limit // 2 :]}"
