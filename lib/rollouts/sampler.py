"""A stand-in until branch grpo's sampler is merged."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import numpy as np
from mlx_lm import batch_generate


@dataclass(frozen=True)
class Prompt:
    id: int
    tokens: list[int]


@dataclass(frozen=True)
class Sample:
    prompt_id: int
    k: int
    prompt_tokens: list[int]
    tokens: list[int]
    logps: list[float]
    finish: str
    text: str


class Sampler:
    def __init__(self, model: Any, tokenizer: Any, settings: Any):
        self.model, self.tokenizer, self.settings = model, tokenizer, settings

    def sample(self, prompts: Sequence[Prompt], seed: Sequence[int]) -> Iterator[Sample]:
        self.model.eval()
        mx.random.seed(int(np.random.SeedSequence([*seed, prompts[0].id]).generate_state(1)[0]))
        rows = [p for p in prompts for _ in range(self.settings.samples)]
        response = batch_generate(
            self.model,
            self.tokenizer,
            [p.tokens for p in rows],
            max_tokens=self.settings.max_tokens,
            return_token_ids=True,
            sampler=lambda logps: mx.random.categorical(logps / self.settings.temperature),
        )
        for i, (p, made) in enumerate(zip(rows, response.token_ids, strict=True)):
            ends = [j for j, t in enumerate(made) if t in self.tokenizer.eos_token_ids]
            tokens = made[: ends[0] + 1] if ends else made
            text = self.tokenizer.decode(tokens[: len(tokens) - bool(ends)])
            finish = "stop" if ends or len(made) < self.settings.max_tokens else "length"
            yield Sample(p.id, i % self.settings.samples, p.tokens, list(tokens), [-0.5] * len(tokens), finish, text)
