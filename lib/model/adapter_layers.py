"""Which blocks are trained, and the rank and scale of each layer's adapter: the one place that reads these settings.

A layer is known by its full name, e.g. model.layers.3.self_attn.q_proj. Patterns are PEFT's: a regular expression that
matches the end of a name, from a dot on; the first one that does counts.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from typing import NamedTuple, TypeVar

from lib.config.settings import ModelSettings
from lib.errors import UserError

Value = TypeVar("Value")


class AdapterLayer(NamedTuple):
    """The adapter of one layer."""

    rank: int
    scale: float


def trained_blocks(settings: ModelSettings, count: int) -> list[int]:
    """The indices of the blocks that are trained, of a model with `count`.

    Raises:
        UserError: it has no such blocks.
    """
    chosen = _named_blocks(settings, count)
    if isinstance(settings.blocks, int) and chosen[0] < 0:
        raise UserError(f"model.blocks={settings.blocks}, but {settings.path} has {count} blocks")
    if chosen[-1] >= count:
        shown = ",".join(map(str, settings.blocks)) if isinstance(settings.blocks, tuple) else ""
        raise UserError(f"model.blocks=[{shown}], but {settings.path} has blocks 0 to {count - 1}")
    return chosen


def depth(settings: ModelSettings, count: int) -> int:
    """The blocks that gradients pass through: from the first that is trained to the last of the model."""
    return count if settings.adapt_embeddings else min(count, max(1, count - _named_blocks(settings, count)[0]))


def trained_part(settings: ModelSettings, count: int) -> float:
    """How much of all blocks is trained."""
    return min(1.0, len(_named_blocks(settings, count)) / count)


def _named_blocks(settings: ModelSettings, count: int) -> list[int]:
    """The blocks that the settings name, ascending; the model may have no such blocks."""
    blocks = settings.blocks
    if not isinstance(blocks, tuple):
        return list(range(count - (blocks or count), count))
    chosen: set[int] = set()
    for part in blocks:
        first, _, last = str(part).partition("-")
        chosen |= set(range(int(first), int(last or first) + 1))
    return sorted(chosen)


def rank_of(settings: ModelSettings, layer: str) -> int:
    """The rank of a layer's adapter."""
    return first_match(settings.rank_pattern, layer, settings.rank)


def most_rank(settings: ModelSettings) -> int:
    """The largest rank that any layer has."""
    return max(settings.rank, *settings.rank_pattern.values()) if settings.rank_pattern else settings.rank


def scale_of(settings: ModelSettings, layer: str) -> float:
    """The factor on a layer's adapter.

    model.scale; or alpha / rank (LoRA, arXiv:2106.09685, section 4.1), or alpha / sqrt(rank) (rsLoRA, arXiv:2312.03732,
    section 3), of the layer's own rank and alpha.
    """
    if settings.alpha is None:
        return settings.scale
    rank, alpha = rank_of(settings, layer), first_match(settings.alpha_pattern, layer, settings.alpha)
    return alpha / (math.sqrt(rank) if settings.use_rslora else rank)


def is_uniform(settings: ModelSettings, kinds: int) -> bool:
    """Whether mlx-lm's adapter_config.json can say which layers have adapters by its number of last blocks.

    kinds: how many ranks and scales there are.
    """
    return kinds <= 1 and not isinstance(settings.blocks, tuple) and not settings.adapt_embeddings


def groups(settings: ModelSettings, layers: Iterable[str]) -> dict[AdapterLayer, list[str]]:
    """Layers by their rank and scale."""
    grouped: dict[AdapterLayer, list[str]] = {}
    for layer in layers:
        grouped.setdefault(AdapterLayer(rank_of(settings, layer), scale_of(settings, layer)), []).append(layer)
    return grouped


def first_match(patterns: Mapping[str, Value], layer: str, default: Value) -> Value:
    """The value of the first pattern that matches a layer's name."""
    return next((value for pattern, value in patterns.items() if matches(pattern, layer)), default)


def matches(pattern: str, layer: str) -> bool:
    """Whether a pattern matches the end of a layer's name, from a dot on. Patterns may come with an adapter."""
    return re.fullmatch(rf"(.*\.)?({pattern})", layer) is not None
