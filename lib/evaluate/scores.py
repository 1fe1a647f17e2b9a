"""What a judge of somebody's gives, as scores. Imports nothing that a judge's own process would wait for."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any


def scores_in(made: Any, count: int) -> list[float] | None:
    """So many finite numbers, or None where it is anything else."""
    if isinstance(made, str | bytes | Mapping):
        return None
    try:
        scores = [float(score) for score in made]
    except (ValueError, TypeError, OverflowError):
        return None
    return scores if len(scores) == count and all(map(math.isfinite, scores)) else None
