"""Judges for controls, and a slow one, which benchmarks/rounds.py and uneven_rounds.py name as rollouts.judge."""

from __future__ import annotations

import os
import random
import time
from collections.abc import Sequence
from typing import Any


def shuffled(prompt: Any, completions: Sequence[str], record: dict[str, Any]) -> list[float]:
    """The scores of right and wrong answers, permuted among a prompt's answers: they say nothing of an answer."""
    scores = [float(text.endswith(f"= {record['answer']}")) for text in completions]
    return random.Random(f"{prompt} {completions}").sample(scores, len(scores))


def by_length(prompt: Any, completions: Sequence[str], record: dict[str, Any]) -> list[float]:
    """The longer, the better."""
    return [float(len(text)) for text in completions]


def slowly(prompt: Any, completions: Sequence[str], record: dict[str, Any]) -> list[float]:
    """1 where an answer ends with the record's; $JUDGE_SECONDS for each, as a model far away would take."""
    time.sleep(float(os.environ["JUDGE_SECONDS"]) * len(completions))
    return [float(text.endswith(str(record["answer"]))) for text in completions]
