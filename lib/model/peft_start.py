"""Training that starts from an adapter of PEFT's."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_unflatten

from lib.config import schema
from lib.errors import UserError
from lib.model import peft_files
from lib.model.adapter_files import fitted, trainable

SAME_SCALE = 1e-6  # relatively: what one types of a square root


def load(model: nn.Module, folder: Path, settings: schema.ModelSettings) -> None:
    """Reads a PEFT adapter into a model with adapters in the same layers.

    Layers may have ranks of their own. Where a layer's scale is not model.scale, its B takes the difference.

    Raises:
        UserError: it cannot be read, or wants other settings, which are named as one would type them.
    """
    adapter = peft_files.read(folder, "model.adapter")
    wanted = _settings_for(adapter, model)
    given = {
        "method": settings.method,
        "rank": settings.rank,
        "scale": settings.scale,
        "keys": sorted(settings.keys) if settings.keys is not None else None,
        "blocks": settings.blocks,
    }
    layers = {name.rpartition(".")[0] for name in trainable(model)}
    fits = layers == adapter.scales.keys()
    different = [
        f"model.{name}={_word(value)}"
        for name, value in wanted.items()
        if not (fits and name in ("keys", "blocks")) and not _same(value, given[name])
    ]
    if different:
        raise UserError(f"model.adapter {folder} was made with other settings; add {' '.join(different)}")
    for layer, scale in adapter.scales.items():
        if not math.isclose(scale, settings.scale, rel_tol=SAME_SCALE):
            name = f"{layer}.lora_b"
            adapter.arrays[name] = adapter.arrays[name].astype(mx.float32) * (scale / settings.scale)
    described = {name: (array.shape, array.dtype) for name, array in trainable(model).items()}
    arrays = fitted(described, adapter.arrays, f"model.adapter {folder}")
    model.update(tree_unflatten(list(arrays.items())))


def _settings_for(adapter: peft_files.PeftAdapter, model: nn.Module) -> dict[str, object]:
    """The settings that give a model such adapters.

    Raises:
        UserError: none do: some layers of a block are adapted and the same ones of a later block are not.
    """
    ranks = Counter(array.shape[1] for name, array in adapter.arrays.items() if name.endswith(".lora_a"))
    scales = Counter(adapter.scales.values())
    names = {id(module): name for name, module in model.named_modules()}
    prefixes = [f"{names[id(block)]}." for block in model.layers]
    keys: dict[int, set[str]] = {index: set() for index in range(len(prefixes))}
    others: set[str] = set()
    for layer in adapter.scales:
        index = next((index for index, prefix in enumerate(prefixes) if layer.startswith(prefix)), None)
        (others if index is None else keys[index]).add(layer.removeprefix("" if index is None else prefixes[index]))
    adapted = [index for index, own in keys.items() if own]
    blocks = len(prefixes) - min(adapted, default=0)
    return {
        "method": adapter.method,
        "rank": ranks.most_common(1)[0][0] if ranks else None,
        "scale": scales.most_common(1)[0][0] if scales else None,
        "keys": sorted(set().union(others, *keys.values())),
        "blocks": blocks if 0 < blocks < len(prefixes) else None,
    }


def _same(one: object, other: object) -> bool:
    if isinstance(one, float) and isinstance(other, float):
        return math.isclose(one, other, rel_tol=SAME_SCALE)
    return one == other


def _word(value: object) -> str:
    """A value as one types it."""
    if isinstance(value, Iterable) and not isinstance(value, str):
        return f"[{','.join(map(str, value))}]"
    return "null" if value is None else str(value)
