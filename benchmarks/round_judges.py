"""Judges that a gate has to see through, and a slow one: benchmarks/rounds.py and uneven_rounds.py name them."""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Sequence
from typing import Any


def by_chance(prompt: Any, completions: Sequence[str], record: dict[str, Any]) -> list[float]:
    """Scores that say nothing of the answers: a hash of prompt and text, in [0, 1)."""
    digests = [hashlib.sha256(f"{prompt} {text}".encode()).digest() for text in completions]
    return [int.from_bytes(digest[:6], "big") / 2**48 for digest in digests]


def by_length(prompt: Any, completions: Sequence[str], record: dict[str, Any]) -> list[float]:
    """The longer, the better."""
    return [float(len(text)) for text in completions]


def slowly(prompt: Any, completions: Sequence[str], record: dict[str, Any]) -> list[float]:
    """1 where an answer ends with the record's; $JUDGE_SECONDS for each, as a model far away would take."""
    time.sleep(float(os.environ["JUDGE_SECONDS"]) * len(completions))
    return [float(text.endswith(f"= {record['answer']}")) for text in completions]
