"""Training that starts from an adapter of PEFT's."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_unflatten

from lib.config import schema
from lib.errors import UserError
from lib.model import peft_files
from lib.model.adapter_files import adapter_layers_of, described, fitted, trainable
from lib.model.adapter_layers import AdapterLayer, first_match

SAME_SCALE = 1e-6  # relatively: what one types of a square root


def load(model: nn.Module, folder: Path, settings: schema.ModelSettings) -> None:
    """Reads a PEFT adapter into a model with adapters of the same ranks and scales in the same layers.

    Raises:
        UserError: it cannot be read, or wants other settings, which are named as one would type them.
    """
    adapter = peft_files.read(folder, "model.adapter")
    if peft_files.HEAD in adapter.layers and peft_files.HEAD not in dict(model.named_modules()):
        adapter = _with_tied_head(adapter, folder)
    shapes = described(trainable(model))
    layers = adapter_layers_of(settings, shapes)
    words = []
    if _method(adapter) != settings.method:
        words.append(f"model.method={_method(adapter)}")
    if layers.keys() != adapter.layers.keys():
        words += _words_for_layers(adapter.layers, model)
    if not all(_same(layer, layers.get(name, layer)) for name, layer in adapter.layers.items()):
        words += _words_for_scales(adapter, settings)
    if words:
        raise UserError(f"model.adapter {folder} was made with other settings; add {' '.join(words)}")
    arrays = fitted(shapes, adapter.arrays, f"model.adapter {folder}")
    model.update(tree_unflatten(list(arrays.items())))


def _with_tied_head(adapter: peft_files.PeftAdapter, folder: Path) -> peft_files.PeftAdapter:
    """The adapter of a model whose head is its embedding: one for both.

    Raises:
        UserError: PEFT trained two.
    """
    head = peft_files.HEAD
    embedding = next((name for name in adapter.layers if name.endswith("embed_tokens")), None)
    arrays, layers = dict(adapter.arrays), dict(adapter.layers)
    own = {part: arrays.pop(f"{head}.{part}", None) for part in ("lora_a", "lora_b", "m")}
    of_head = layers.pop(head)
    is_one = embedding is not None and own["m"] is None and layers[embedding] == of_head
    for part, other in (("lora_a", "lora_b"), ("lora_b", "lora_a")):
        is_one = is_one and mx.array_equal(own[part], arrays[f"{embedding}.{other}"].T).item()
    if not is_one:
        raise UserError(
            f"model.adapter {folder}: the model's head is its embedding, which has one adapter here for both uses; "
            "train with ensure_weight_tying=True, or without lm_head"
        )
    return peft_files.PeftAdapter(adapter.config, arrays, layers)


def _method(adapter: peft_files.PeftAdapter) -> str:
    return "dora" if adapter.config.get("use_dora") else "lora"


def _same(one: AdapterLayer, other: AdapterLayer) -> bool:
    return one.rank == other.rank and math.isclose(one.scale, other.scale, rel_tol=SAME_SCALE)


def _words_for_layers(layers: Iterable[str], model: nn.Module) -> list[str]:
    """The settings that adapt these layers: the same ones of some blocks, or by their full names."""
    names = {id(module): name for name, module in model.named_modules()}
    prefixes = [f"{names[id(block)]}." for block in model.layers]
    keys: dict[int, set[str]] = {}
    outside: set[str] = set()
    for layer in layers:
        index = next((index for index, prefix in enumerate(prefixes) if layer.startswith(prefix)), None)
        if index is None:
            outside.add(layer)
        else:
            keys.setdefault(index, set()).add(layer.removeprefix(prefixes[index]))
    each = list(keys.values())
    if not each or any(own != each[0] for own in each):
        return [f"model.keys={_list(sorted(layers))}", "model.blocks=null"]
    blocks = "null" if len(keys) == len(prefixes) else _list(sorted(keys))
    return [f"model.keys={_list(sorted(each[0] | outside))}", f"model.blocks={blocks}"]


def _words_for_scales(adapter: peft_files.PeftAdapter, settings: schema.ModelSettings) -> list[str]:
    """The settings that give every layer its rank and scale."""
    config = adapter.config
    rank, alpha = config.get("r", 8), config.get("lora_alpha", 8)
    if len(set(adapter.layers.values())) == 1 and settings.alpha is None:
        rank, scale = next(iter(adapter.layers.values()))
        return [f"model.rank={rank}", f"model.scale={scale}"]
    words = [f"model.rank={rank}", f"model.alpha={alpha}"]
    words += ["model.use_rslora=true"] if config.get("use_rslora") else []
    alphas = {name: _alpha(layer, config) for name, layer in adapter.layers.items()}
    ranks = {name: layer.rank for name, layer in adapter.layers.items()}
    for setting, values, most in (("rank_pattern", ranks, rank), ("alpha_pattern", alphas, alpha)):
        if pattern := _pattern(values, most, config.get(setting) or {}):
            words.append(f"'model.{setting}={json.dumps(pattern)}'")
    return words


def _alpha(layer: AdapterLayer, config: Mapping[str, Any]) -> float:
    return layer.scale * (math.sqrt(layer.rank) if config.get("use_rslora") else layer.rank)


def _pattern(values: Mapping[str, float], most: float, theirs: Mapping[str, float]) -> Mapping[str, float]:
    """The pattern that gives layers these values: PEFT's, else (its names of experts are not ours) one of our names."""
    if all(math.isclose(first_match(theirs, name, most), value) for name, value in values.items()):
        return theirs
    ends: dict[str, set[float]] = {}
    for name, value in values.items():
        ends.setdefault(name.rpartition(".")[2], set()).add(value)
    if all(len(own) == 1 for own in ends.values()):
        return {end: own.pop() for end, own in ends.items() if own != {most}}
    return {re.escape(name): value for name, value in values.items() if value != most}


def _list(names: Iterable[object]) -> str:
    return f"[{','.join(map(str, names))}]"
