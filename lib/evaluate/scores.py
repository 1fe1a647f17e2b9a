"""What a judge of somebody's gives, as scores. Imports nothing that a judge's own process would wait for."""

from __future__ import annotations

import math
from collections.abc import Mapping, Set
from typing import Any


def scores_in(made: Any, count: int) -> list[float] | None:
    """So many finite numbers in their order, or None where it is anything else."""
    known = [score for score in scores_or_none_in(made, count) or () if score is not None]
    return known if len(known) == count else None


def scores_or_none_in(made: Any, count: int) -> list[float | None] | None:
    """The same, where some may be missing, None or no finite number: a judge may know nothing of an answer."""
    if isinstance(made, str | bytes | Mapping | Set):  # a set has no order
        return None
    try:
        scores = [None if one is None or not math.isfinite(score := float(one)) else score for one in made]
    except (ValueError, TypeError, OverflowError):
        return None
    return scores if len(scores) == count else None
