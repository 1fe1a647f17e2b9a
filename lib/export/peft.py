"""PEFT's adapter: adapter_model.safetensors and adapter_config.json, for `PeftModel.from_pretrained(base, folder)`."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_unflatten
from mlx_lm.models.switch_layers import SwitchLinear

from lib.config import read_file
from lib.config.plain_yaml import front_matter
from lib.errors import UserError
from lib.export.fuse import QUANTISED, AdaptedLayer, adapted_layers, plain_layer, plain_weight, write_template
from lib.export.mlx_adapter import require_stored_base
from lib.export.proof import ExportOptions, Reading, model_logps
from lib.export.trained_run import TrainedRun
from lib.model.adapter_files import described, trainable, write_arrays
from lib.model.checkpoint_names import expert_pattern
from lib.model.peft_adapters import HEAD, PREFIX, peft_arrays
from lib.system.model_folder import ADAPTER_CONFIG, PEFT_WEIGHTS

EMBEDDINGS = (nn.Embedding, nn.QuantizedEmbedding)


def check(run: TrainedRun, options: ExportOptions) -> None:
    """Raises UserError for a run that is not an adapter."""
    require_stored_base(run)
    if run.settings.model.method == "full":
        raise UserError(f"{run.folder}: model.method=full trains no adapter; take --to fused")
    if options.type is not None or options.dequantize:
        raise UserError("--to peft keeps the adapter as it was trained, in float32; leave --type and --dequantize out")


def write(run: TrainedRun, folder: Path, options: ExportOptions) -> None:
    """Writes the adapter as `PeftModel.save_pretrained` does."""
    model = run.model()
    layers = list(adapted_layers(model))
    embeddings = frozenset(layer.name for layer in layers if isinstance(layer.base, EMBEDDINGS))
    is_tied = bool(embeddings) and HEAD not in dict(model.named_modules())
    arrays = dict(sorted(peft_arrays(trainable(model), embeddings, is_tied).items()))
    write_arrays(folder / PEFT_WEIGHTS, described(arrays), arrays.items(), kind="pt")
    config = peft_config(run, layers, linear_layers(run.base_model()), is_tied)
    (folder / ADAPTER_CONFIG).write_text(json.dumps(config, indent=2, sort_keys=True) + "\n", encoding="utf-8")
    if (chat := run.chat_form()) is not None:
        write_template(folder, chat)


def read(run: TrainedRun, folder: Path, options: ExportOptions) -> Reading:
    """The rows' log-probabilities by the files and PEFT's formula, W + alpha / r B A, of DoRA with rows of length m."""
    arrays = mx.load(str(folder / PEFT_WEIGHTS))
    config = read_file.read_object(folder / ADAPTER_CONFIG, "the export's")
    model = run.base_model()
    merged = {}
    for name, module in model.named_modules():
        if not isinstance(module, (nn.Linear, SwitchLinear, *EMBEDDINGS, *QUANTISED)):
            continue
        weight = plain_weight(module)
        if expert_pattern(name) is None:
            changed = _merged(weight, name, arrays, config)
        else:
            pairs = zip(weight, _names(name, len(weight)), strict=True)
            parts = [(part, _merged(part, peft, arrays, config)) for part, peft in pairs]
            is_adapted = any(new is not None for _, new in parts)
            changed = mx.stack([old if new is None else new for old, new in parts]) if is_adapted else None
        if changed is not None:
            merged[name] = plain_layer(module, changed)
    model.update_modules(tree_unflatten(list(merged.items())))
    return Reading("PEFT's formula", model_logps(model, run.rows))


def _merged(weight: mx.array, name: str, arrays: Mapping[str, mx.array], config: Mapping[str, Any]) -> mx.array | None:
    """A layer's weight with its adapter as PEFT's files have it; None without one."""
    prefix = f"{PREFIX}{name}."
    a, b = arrays.get(f"{prefix}lora_A.weight"), arrays.get(f"{prefix}lora_B.weight")
    is_embedding = a is None
    if is_embedding:
        a, b = arrays.get(f"{prefix}lora_embedding_A"), arrays.get(f"{prefix}lora_embedding_B")
    if a is None or b is None:
        return None
    values = [
        next(
            (value for pattern, value in config[f"{kind}_pattern"].items() if re.search(rf"(^|\.){pattern}$", name)),
            most,
        )
        for kind, most in (("rank", config["r"]), ("alpha", config["lora_alpha"]))
    ]
    change = values[1] / values[0] * (b @ a)
    changed = weight + (change.T if is_embedding else change)
    if config["use_dora"]:
        magnitude = arrays[f"{prefix}lora_magnitude_vector"]
        changed = magnitude[:, None] * changed / mx.linalg.norm(changed, axis=1, keepdims=True)
    return changed


def peft_config(
    run: TrainedRun, layers: Sequence[AdaptedLayer], others: Iterable[str], is_tied: bool
) -> dict[str, Any]:
    """What `LoraConfig` reads.

    Scales are alpha / r of every layer; those that differ from most are in rank_pattern and alpha_pattern.

    Args:
        others: all layers that peft could adapt, by our names.
        is_tied: whether the embedding's adapter is also one of the head.
    """
    named = {name: layer for layer in layers for name in _peft_layers(layer)}
    if is_tied:
        named[HEAD] = next(layer for layer in layers if isinstance(layer.base, EMBEDDINGS))
    ranks = {name: layer.rank for name, layer in named.items()}
    alphas = {name: _whole(layer.rank * layer.module.scale) for name, layer in named.items()}
    rank, alpha = (Counter(values.values()).most_common(1)[0][0] for values in (ranks, alphas))
    has_experts = any(expert_pattern(layer.name) is not None for layer in layers)
    modules, indices = targets(set(named), {name for other in others for name in _names(other, 1)} | set(named))
    model = run.settings.model
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": original_of(run),
        "revision": model.revision,
        "r": rank,
        "lora_alpha": alpha,
        "rank_pattern": _pattern(ranks, rank),
        "alpha_pattern": _pattern(alphas, alpha),
        "use_rslora": False,
        "use_dora": model.method == "dora",
        "target_modules": modules,
        "layers_to_transform": indices,
        "layers_pattern": None,
        "lora_dropout": 0.0 if has_experts else model.dropout,  # peft has none for experts
        "bias": "none",
        "fan_in_fan_out": False,
        "modules_to_save": None,
        "init_lora_weights": True,
        "inference_mode": True,
    }


def targets(adapted: set[str], layers: set[str]) -> tuple[list[str], list[int] | None]:
    """target_modules and layers_to_transform that mean exactly these layers of the model's.

    Ends of names where they suffice ("q_proj"), of some blocks only where these blocks have them all; else whole names.
    """
    ends = sorted({name.rpartition(".")[2] for name in adapted})
    meant = {name for name in layers if name.rpartition(".")[2] in ends}
    if meant == adapted:
        return ends, None
    blocks = {name: _block(name) for name in meant}
    indices = sorted({index for name in adapted if (index := blocks[name]) is not None})
    if indices and {name for name, index in blocks.items() if index in indices} == adapted:
        return ends, indices
    return sorted(adapted), None


def linear_layers(model: nn.Module) -> list[str]:
    """The names of a model's layers that have a matrix of weights."""
    kinds = (nn.Linear, nn.Embedding, SwitchLinear, *QUANTISED)
    return [name for name, module in model.named_modules() if isinstance(module, kinds)]


def original_of(run: TrainedRun) -> str:
    """The model that peft would load: of a quantised one that which its card names as its base, where it has a card."""
    card = run.base / "README.md"
    if run.is_quantised and card.is_file():
        known = front_matter(card.read_text("utf-8", errors="replace"))
        named = known.get("base_model") if isinstance(known, dict) else None
        named = named[0] if isinstance(named, list) and named else named
        if isinstance(named, str):
            return named
    return run.settings.model.path


def _peft_layers(layer: AdaptedLayer) -> list[str]:
    return _names(layer.name, layer.module.lora_a.shape[0])


def _names(name: str, experts: int) -> list[str]:
    """What peft calls a layer: of stacked experts each by itself."""
    pattern = expert_pattern(name)
    return [name] if pattern is None else [pattern.format(expert) for expert in range(experts)]


def _block(name: str) -> int | None:
    """The block that peft takes a layer for a part of: the first number in its name."""
    match = re.match(r".*?\.[^.]*\.(\d+)\.", name)
    return int(match[1]) if match else None


def _whole(number: float) -> int | float:
    return int(number) if number == int(number) else number


def _pattern(values: Mapping[str, int | float], most: int | float) -> dict[str, int | float]:
    """What differs from most layers, by whole names, in which a dot is a dot."""
    return {re.escape(name): value for name, value in values.items() if value != most}
