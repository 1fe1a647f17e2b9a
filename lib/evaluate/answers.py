"""Greedy answers to questions, and what training changed in them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx_lm import batch_generate

from lib.config.settings import Config
from lib.data.order import divide_rows
from lib.data.prompts import Question
from lib.data.tokenizer import Tokenizer
from lib.distributed.world import World
from lib.evaluate.judges import extract
from lib.system import out_of_memory
from lib.system.records import PerformanceTracker
from lib.system.terminal import Terminal
from lib.training.divided_world import Lockstep

SAMPLE_WIDTH = 160  # columns of a sample's line, in a file
MARKS = {True: "✓", False: "✗"}


class GreedyAnswers(NamedTuple):
    """Greedy continuations of some prompts."""

    texts: list[str]
    cut: int
    """Continuations without an end within max_tokens."""

    def warning(self, setting: str) -> str:
        """How many answers were cut; empty where all ended. setting: that limits them, with its value."""
        return f"{self.cut:,} of {len(self.texts):,} greedy answers have no end within {setting}" if self.cut else ""


def greedy(
    model: nn.Module,
    tokenizer: Tokenizer,
    prompts: Sequence[list[int]],
    max_tokens: int,
    world: World,
    shares: Sequence[int] | None = None,
) -> GreedyAnswers:
    """The greedy continuation of every prompt, on every rank; ranks take prompts by their shares, or equally many."""
    model.eval()
    world = world.workers
    mine = part_of(len(prompts), shares if shares and world.size > 1 else [1] * world.size, world.rank)
    tokens = np.zeros((len(prompts), max_tokens + 1), np.int32)  # a length, then that many tokens

    def answers(indices: Sequence[int]) -> list[list[int]]:
        with world.together("greedy answers", passes=len(indices)):
            response = batch_generate(
                model,
                tokenizer,
                [prompts[i] for i in indices],
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
    texts = [tokenizer.decode(row[1 : 1 + row[0]].tolist()) for row in gathered]
    return GreedyAnswers(texts, int((gathered[:, 0] == max_tokens).sum()))


def part_of(count: int, shares: Sequence[int], rank: int) -> list[int]:
    """The indices below `count` that a rank takes: a part by its share, spread evenly over all of them."""
    counts = divide_rows(count, shares)
    quantiles = np.concatenate([(np.arange(n) + 0.5) / max(n, 1) for n in counts])
    owners = np.repeat(np.arange(len(shares)), counts)[np.argsort(quantiles, kind="stable")]
    indices: list[int] = np.flatnonzero(owners == rank).tolist()
    return indices


def exact_match(questions: list[Question], texts: list[str], settings: Config) -> float:
    """The share of questions whose continuation gives the right answer; the pattern's last match is what it gives."""
    right = [_is_right(question, text, settings) for question, text in zip(questions, texts, strict=True)]
    return sum(right) / len(questions)


def _is_right(question: Question, text: str, settings: Config) -> bool:
    return extract(settings.evaluate.answer_pattern, text) == question.answer


def show_samples(
    say: Terminal, tracker: PerformanceTracker, prompts: Sequence[str], texts: Sequence[str], when: str
) -> None:
    """Prints and records the greedy continuations of a few prompts, before or after training."""
    say.line(f"greedy answers {when} training", "bold")
    room = (say.width or SAMPLE_WIDTH) - 10
    for prompt, text in zip(prompts, texts, strict=True):
        say.line(f"  prompt  {_one_line(prompt, room)}")
        say.line(f"  answer  {_one_line(text, room)}")
    shown = [{"prompt": prompt, when: text} for prompt, text in zip(prompts, texts, strict=True)]
    tracker.record("samples", samples=shown)


def show_changes(
    say: Terminal,
    tracker: PerformanceTracker,
    questions: list[Question],
    before: list[str],
    after: list[str],
    settings: Config,
) -> None:
    """Prints and records a few questions to which the answer turned right or wrong, in their proportion."""
    changed = [
        (question, was, now, was_right, is_right)
        for question, was, now in zip(questions, before, after, strict=True)
        for was_right, is_right in [(_is_right(question, was, settings), _is_right(question, now, settings))]
        if was_right != is_right
    ]
    if not changed:
        return
    fixed = sum(is_right for *_, is_right in changed)
    say.line("")
    say.line(
        f"of {len(questions)} answers {fixed} are right now that were wrong, "
        f"{len(changed) - fixed} wrong that were right",
        "bold",
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
