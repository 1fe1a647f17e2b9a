"""Judges that a gate has to see through: benchmarks/rounds.py names them as rollouts.judge."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any


def by_chance(prompt: Any, completions: Sequence[str], record: dict[str, Any]) -> list[float]:
    """Scores that say nothing of the answers: a hash of prompt and text, in [0, 1)."""
    digests = [hashlib.sha256(f"{prompt} {text}".encode()).digest() for text in completions]
    return [int.from_bytes(digest[:6], "big") / 2**48 for digest in digests]


def by_length(prompt: Any, completions: Sequence[str], record: dict[str, Any]) -> list[float]:
    """The longer, the better."""
    return [float(len(text)) for text in completions]
