"""Judges for controls, which benchmarks/rounds.py names as rollouts.judge."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any


def shuffled(prompt: Any, completions: Sequence[str], record: dict[str, Any]) -> list[float]:
    """The scores of right and wrong answers, permuted among a prompt's answers: they say nothing of an answer."""
    scores = [float(text.endswith(f"= {record['answer']}")) for text in completions]
    return random.Random(f"{prompt} {completions}").sample(scores, len(scores))


def by_length(prompt: Any, completions: Sequence[str], record: dict[str, Any]) -> list[float]:
    """The longer, the better."""
    return [float(len(text)) for text in completions]
