"""What is trained of a model: adapters, or its blocks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten
from mlx_lm.models.switch_layers import QuantizedSwitchLinear, SwitchLinear
from mlx_lm.tuner.utils import linear_to_lora_layers

from lib.config import read_file
from lib.config.settings import ModelSettings
from lib.errors import UserError
from lib.model import peft_adapters
from lib.model.adapter_files import adapter_config, adapter_layers_of, described, load_trained, trainable
from lib.model.adapter_layers import AdapterLayer, groups, is_uniform, matches, trained_blocks
from lib.model.checkpointing import checkpoint_blocks, order_backward
from lib.model.lora import use_low_rank_linear
from lib.model.patches import use_lean_swiglu
from lib.model.quantised import use_own_layers
from lib.system.model_folder import ADAPTER_CONFIG

EMBEDDINGS = (nn.Embedding, nn.QuantizedEmbedding)
LINEARS = (nn.Linear, nn.QuantizedLinear)
ADAPTABLE = (*LINEARS, SwitchLinear, QuantizedSwitchLinear, *EMBEDDINGS)  # by mlx-lm


def make_trainable(model: nn.Module, settings: ModelSettings, seed: int) -> None:
    """Freezes the model and gives it adapters drawn from `seed`, or unfreezes its blocks for full training.

    What is trained is float32 whatever the model's type: an update of 1e-5 of a weight would vanish in bfloat16.

    Raises:
        UserError: no layer matches, or the adapter to start from does not fit.
    """
    blocks = trained_blocks(settings, len(model.layers))
    model.freeze()
    use_lean_swiglu(model)
    use_own_layers(model)
    if settings.method == "full":
        if any(isinstance(module, nn.QuantizedLinear) for module in model.modules()):
            raise UserError(
                f"model.method=full cannot train {settings.path}: its weights are quantised; use model.method=lora"
            )
        for part in [model] if settings.blocks is None else [model.layers[index] for index in blocks]:
            part.set_dtype(mx.float32)
            part.unfreeze()
    else:
        layers = chosen_layers(model, settings)
        mx.random.seed(seed)
        try:
            _add_adapters(model, settings, layers)
            use_low_rank_linear(model)
        except ValueError as error:
            raise UserError(f"model.method={settings.method} does not fit {settings.path}: {error}") from None
    if not tree_flatten(model.trainable_parameters()):
        keys = sorted(
            {
                name
                for layer in model.layers
                for name, module in layer.named_modules()
                if isinstance(module, nn.Linear | nn.QuantizedLinear)
            }
        )
        raise UserError(
            f"model.keys {list(settings.keys or [])}: no such layer in {settings.path}; "
            f"its linear layers are {', '.join(keys)}"
        )
    if settings.adapter is not None:
        load_adapter(model, settings)
    order_backward(model)
    if settings.gradient_checkpointing:
        checkpoint_blocks(model)


def chosen_layers(model: nn.Module, settings: ModelSettings) -> list[str]:
    """The layers that get adapters, in the order of the model's blocks, what is outside of them last.

    Raises:
        UserError: no such blocks; there is no embedding; a pattern that matches no layer.
    """
    modules = dict(model.named_modules())
    names = {id(module): name for name, module in modules.items()}
    chosen = []
    for index in trained_blocks(settings, len(model.layers)):
        block = model.layers[index]
        for name, module in block.named_modules():
            is_adaptable = hasattr(module, "to_lora") or isinstance(module, ADAPTABLE)
            if (settings.keys is None and is_adaptable) or name in (settings.keys or ()):
                chosen.append(f"{names[id(block)]}.{name}")
    chosen += [name for name in modules if name in (settings.keys or ()) and name not in chosen]  # a full name
    if settings.adapt_embeddings:
        chosen += [name for name in _outside_blocks(model, settings.path) if name not in chosen]
    for setting, patterns in (("rank_pattern", settings.rank_pattern), ("alpha_pattern", settings.alpha_pattern)):
        for pattern in patterns:
            if not any(matches(pattern, layer) for layer in chosen):
                example = f"; one is {chosen[0]}" if chosen else ""
                raise UserError(f"model.{setting}: {pattern!r} ends the name of no adapted layer{example}")
    return chosen


def _outside_blocks(model: nn.Module, path: str) -> list[str]:
    """The embedding, and the head where it is not the embedding's."""
    inside = {id(module) for block in model.layers for module in block.modules()}
    found = {
        name: module
        for name, module in model.named_modules()
        if id(module) not in inside and isinstance(module, (*EMBEDDINGS, *LINEARS))
    }
    if not any(isinstance(module, EMBEDDINGS) for module in found.values()):
        raise UserError(f"model.adapt_embeddings: {path} has no embedding outside of its blocks")
    return sorted(found)


def _add_adapters(model: nn.Module, settings: ModelSettings, layers: Sequence[str]) -> None:
    """Gives layers mlx-lm's adapters, drawn from MLX's random state."""
    grouped = groups(settings, layers)
    for (rank, scale), names in grouped.items():
        options: dict[str, object] = {"rank": rank, "scale": scale, "dropout": settings.dropout, "keys": set(names)}
        count = len(model.layers)
        if is_uniform(settings, len(grouped)):  # in mlx-lm's order, and so with its random numbers
            count = len(trained_blocks(settings, count))
            options["keys"] = None if settings.keys is None else set(settings.keys)
        linear_to_lora_layers(model, count, options, use_dora=settings.method == "dora")


def load_adapter(model: nn.Module, settings: ModelSettings) -> None:
    """Reads model.adapter, of mlx-lm's layout or PEFT's, into a model with such adapters.

    Raises:
        UserError: it cannot be read, or was made with other settings.
    """
    folder = Path(settings.adapter or "")
    if peft_adapters.is_peft(folder):
        peft_adapters.load(model, folder, settings)
        return
    try:
        stored = read_file.read_object(folder / ADAPTER_CONFIG, "model.adapter")
    except (OSError, UserError) as error:
        raise UserError(
            f"model.adapter {folder}: {ADAPTER_CONFIG} cannot be read ({error}); "
            "give a folder that mlx-lm or a run saved"
        ) from None
    shapes = described(trainable(model))
    ours = adapter_config(settings, shapes, len(model.layers))
    if "layers" in stored or "layers" in ours:
        _require_same_layers(stored, adapter_layers_of(settings, shapes), folder)
    else:
        _require_same_adapters(stored, ours, folder)
    load_trained(model, folder, "model.adapter")


def _require_same_adapters(stored: Mapping[str, Any], ours: Mapping[str, Any], folder: Path) -> None:
    """Raises UserError where adapters of one rank and scale have others than the settings say."""
    theirs, wanted = (
        {
            "method": one.get("fine_tune_type", "lora"),
            **{k: one.get("lora_parameters", {}).get(k) for k in ("rank", "scale")},
        }
        for one in (stored, ours)
    )
    different = [
        f"model.{k}={theirs[k]}"
        for k in theirs
        if theirs[k] != wanted[k] and (k == "method" or wanted["method"] != "full")
    ]
    if different:
        raise UserError(f"model.adapter {folder} was made with other settings; add {' '.join(different)}")


def _require_same_layers(stored: Mapping[str, Any], ours: Mapping[str, AdapterLayer], folder: Path) -> None:
    """Raises UserError where a layer's rank or scale is another than the settings say."""
    one_for_all = stored.get("lora_parameters", {})
    for name, layer in ours.items():
        theirs = stored.get("layers", {name: one_for_all}).get(name, {})
        if (theirs.get("rank"), theirs.get("scale")) != layer:
            raise UserError(
                f"model.adapter {folder} was made with other settings: {name} has rank {theirs.get('rank')} and scale "
                f"{theirs.get('scale')}, and {layer.rank} and {layer.scale:g} here; give model.rank, scale, alpha and "
                "their patterns as it was made with"
            )
