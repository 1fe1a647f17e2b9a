"""Which blocks are trained, and the rank and scale of each layer's adapter: the one place that reads these settings.

A layer goes by its full name, e.g. model.layers.3.self_attn.q_proj. Patterns are PEFT's: a regular expression that
matches the end of a name, from a dot on; the first one that does counts.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import NamedTuple, TypeVar

from lib.config.settings import ModelSettings
from lib.errors import UserError

Value = TypeVar("Value")


class AdapterLayer(NamedTuple):
    """The adapter of one layer."""

    rank: int
    scale: float


def trained_blocks(settings: ModelSettings, count: int) -> list[int]:
    """The indices of the blocks that are trained, of a model with `count`. Raises UserError where it has no such."""
    chosen = _block_indices(settings, count)
    if chosen[0] < 0 or chosen[-1] >= count:
        raise UserError(f"model.blocks={settings.blocks}, but {settings.path} has {count} blocks, 0 to {count - 1}")
    return chosen


def depth(settings: ModelSettings, count: int) -> int:
    """The blocks that gradients pass through: from the first that is trained to the last of the model."""
    return count if settings.adapt_embeddings else min(count, max(1, count - _block_indices(settings, count)[0]))


def _block_indices(settings: ModelSettings, count: int) -> list[int]:
    if not isinstance(settings.blocks, tuple):
        return list(range(count - (settings.blocks or count), count))
    ranges = (str(part).partition("-") for part in settings.blocks)
    return sorted({index for first, _, last in ranges for index in range(int(first), int(last or first) + 1)})


def rank_of(settings: ModelSettings, layer: str) -> int:
    """The rank of a layer's adapter."""
    return first_match(settings.rank_pattern, layer, settings.rank)


def most_rank(settings: ModelSettings) -> int:
    """The largest rank that any layer has."""
    return max(settings.rank, *settings.rank_pattern.values(), 0)


def scale_of(settings: ModelSettings, layer: str) -> float:
    """The factor on a layer's adapter: model.scale, or that of its own rank and alpha."""
    if settings.alpha is None:
        return settings.scale
    alpha = first_match(settings.alpha_pattern, layer, settings.alpha)
    return scale(alpha, rank_of(settings, layer), settings.use_rslora)


def scale(alpha: float, rank: int, use_rslora: bool) -> float:
    """alpha / rank (LoRA, arXiv:2106.09685, 4.1), or alpha / sqrt(rank) (rsLoRA, arXiv:2312.03732, section 3)."""
    return float(alpha / (math.sqrt(rank) if use_rslora else rank))


def first_match(patterns: Mapping[str, Value], layer: str, default: Value) -> Value:
    """The value of the first pattern that matches a layer's name."""
    return next((value for pattern, value in patterns.items() if matches(pattern, layer)), default)


def matches(pattern: str, layer: str) -> bool:
    """Whether a pattern matches the end of a layer's name, from a dot on."""
    return re.fullmatch(rf"(.*\.)?({pattern})", layer) is not None
