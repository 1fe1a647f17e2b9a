"""Greedy answers to questions, and what training changed in them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from lib.data.order import divide_rows
from lib.data.prompts import Question
from lib.data.tokenizer import Tokenizer
from lib.distributed.world import World
from lib.evaluate.judges import extract
from lib.evaluate.sample import GreedySampling, Prompt, Sampler
from lib.system.records import PerformanceTracker
from lib.system.terminal import Terminal

SAMPLE_WIDTH = 160  # columns of a sample's line, in a file


class GreedyAnswers(NamedTuple):
    """Greedy continuations of some prompts. cut: those without an end within max_tokens."""

    texts: list[str]
    cut: int

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
    workers = world.workers
    rows = part_of(len(prompts), shares if shares and workers.size > 1 else [1] * workers.size, workers.rank)
    tokens = np.zeros((len(prompts), max_tokens + 2), np.int32)  # whether it was cut, a length, then that many tokens
    sampler = Sampler(model, tokenizer, GreedySampling(max_tokens), world)
    with workers.together("greedy answers", passes=len(rows)):
        samples = sampler.sample([Prompt(row, prompts[row]) for row in rows])
    for sample in samples:
        ids = [token for token in sample.tokens if token not in tokenizer.eos_token_ids]
        tokens[sample.prompt_id, : 2 + len(ids)] = [sample.finish == "length", len(ids), *ids]
    gathered = np.array(workers.all_sum(mx.array(tokens), "greedy answers"))
    texts = [tokenizer.decode(row[2 : 2 + row[1]].tolist()) for row in gathered]
    return GreedyAnswers(texts, int(gathered[:, 0].sum()))


def part_of(count: int, shares: Sequence[int], rank: int) -> list[int]:
    """The indices below `count` that a rank takes: a part by its share, spread evenly over all of them."""
    counts = divide_rows(count, shares)
    quantiles = np.concatenate([(np.arange(n) + 0.5) / max(n, 1) for n in counts])
    owners = np.repeat(np.arange(len(shares)), counts)[np.argsort(quantiles, kind="stable")]
    indices: list[int] = np.flatnonzero(owners == rank).tolist()
    return indices


def exact_match(questions: list[Question], texts: list[str], pattern: str) -> float:
    """The share of questions whose continuation gives the right answer; the pattern's last match is what it gives."""
    return sum(map(is_right, questions, texts, [pattern] * len(texts))) / len(questions)


def is_right(question: Question, text: str, pattern: str) -> bool:
    return extract(pattern, text) == question.answer


def show_samples(
    say: Terminal, tracker: PerformanceTracker, prompts: Sequence[str], texts: Sequence[str], when: str
) -> None:
    """Prints and records the greedy continuations of a few prompts, before or after training."""
    say.line(f"greedy answers {when} training", "bold")
    for prompt, text in zip(prompts, texts, strict=True):
        say.line(f"  prompt  {_one_line(prompt, say, 10)}")
        say.line(f"  answer  {_one_line(text, say, 10)}")
    tracker.record("samples", samples=[{"prompt": p, when: text} for p, text in zip(prompts, texts, strict=True)])


def show_changes(
    say: Terminal,
    tracker: PerformanceTracker,
    questions: list[Question],
    texts: tuple[list[str], list[str]],
    pattern: str,
    most: int,
) -> None:
    """Prints and records a few questions to which the answer turned right or wrong. texts: before, and after."""
    each = zip(questions, *texts, strict=True)
    changed = [(q, old, new) for q, old, new in each if is_right(q, old, pattern) != is_right(q, new, pattern)]
    if not changed:
        return
    fixed = sum(is_right(question, after, pattern) for question, _, after in changed)
    counts = f"{fixed} are right now that were wrong, {len(changed) - fixed} wrong that were right"
    say.line("")
    say.line(f"of {len(questions)} answers {counts}", "bold")
    for question, *both in changed[:most]:
        answer = f"  (right: {question.answer})"
        say.line(f"  {_one_line(question.prompt, say, 12 + len(answer))}{answer}")
        for when, text in zip(("before", "after "), both, strict=True):
            say.line(f"    {when} {'✓' if is_right(question, text, pattern) else '✗'} {_one_line(text, say, 13)}")
    tracker.record("samples", samples=[{"prompt": q.prompt, "before": b, "after": a} for q, b, a in changed[:most]])


def _one_line(text: str, say: Terminal, taken: int) -> str:
    """Beginning and end of a text that is too long for a line. taken: columns of what else is in the line."""
    text, limit = " ".join(text.split()), (say.width or SAMPLE_WIDTH) - taken
    return text if len(text) <= limit else f"{text[: limit // 2 - 3]} ... {text[len(text) + 2 - limit + limit // 2 :]}"
