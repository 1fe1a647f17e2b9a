"""Greedy answers by all ranks, and how many of them are right."""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from lib.data.order import divide_rows
from lib.data.prompts import Question
from lib.data.tokenizer import Tokenizer
from lib.distributed.world import World
from lib.evaluate.judges import extract
from lib.evaluate.sampler import GreedySampling, Prompt, Sampler
from lib.system.terminal import Terminal


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
