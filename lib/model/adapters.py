"""What is trained of a model: adapters, or its blocks."""

from __future__ import annotations

import re
from pathlib import Path

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_unflatten
from mlx_lm.models.switch_layers import QuantizedSwitchLinear, SwitchLinear
from mlx_lm.tuner.utils import linear_to_lora_layers

from lib.config.settings import ModelSettings
from lib.errors import UserError
from lib.model import adapter_files, peft_adapters
from lib.model.adapter_files import AdapterLayer, layer_of, matches, trained_blocks
from lib.model.gradient_checkpointing import checkpoint_blocks, order_backward
from lib.model.lora_layers import use_low_rank_linear
from lib.model.patches import use_lean_swiglu
from lib.model.quantised import use_fast_layers
from lib.system.model_folder import ADAPTER_CONFIG, PEFT_WEIGHTS

EMBEDDINGS = (nn.Embedding, nn.QuantizedEmbedding)
LINEARS = (nn.Linear, nn.QuantizedLinear)
ADAPTABLE = (*LINEARS, SwitchLinear, QuantizedSwitchLinear, *EMBEDDINGS)  # by mlx-lm
# Routers, so that the load of experts stays balanced (PEFT adapts none either); layers of Kimi K3 and Gemma 3n whose
# weight the family's code reads.
NOT_BY_DEFAULT = re.compile(r"(.*\.)?((gate|router)(\..*)?|\w+_(res_proj|coefs))")


def make_trainable(model: nn.Module, settings: ModelSettings, seed: int) -> None:
    """Freezes the model and gives it adapters drawn from `seed`, or unfreezes its blocks for full training. Trained
    parameters are float32 whatever the model's type: an update of 1e-5 of a weight would vanish in bfloat16. Raises
    UserError: no layer matches, or the adapter to start from does not fit."""
    blocks = trained_blocks(settings, len(model.layers))
    experts = (part.weight for part in model.modules() if isinstance(part, SwitchLinear))
    if mx.default_device() == mx.cpu and any(weight.dtype != mx.float32 for weight in experts):
        raise UserError(f"{settings.path}: on a CPU MLX multiplies experts in float32 alone; add model.dtype=float32")
    model.freeze()
    use_lean_swiglu(model)
    use_fast_layers(model)
    if settings.method == "full":
        if any(isinstance(module, nn.QuantizedLinear) for module in model.modules()):
            raise UserError(
                f"model.method=full cannot train {settings.path}: its weights are quantised; use model.method=lora"
            )
        for part in [model] if settings.blocks is None else [model.layers[index] for index in blocks]:
            part.set_dtype(mx.float32)
            part.unfreeze()
    else:
        _add_adapters(model, settings, seed)
    if settings.adapter is not None:
        _load_adapter(model, Path(settings.adapter), settings)
    order_backward(model)
    if settings.gradient_checkpointing:
        checkpoint_blocks(model)


def _add_adapters(model: nn.Module, settings: ModelSettings, seed: int) -> None:
    """Gives layers mlx-lm's adapters, drawn from `seed`."""
    groups: dict[AdapterLayer, set[str]] = {}
    for layer in _chosen_layers(model, settings):
        groups.setdefault(layer_of(settings, layer), set()).add(layer)
    mx.random.seed(seed)
    try:
        for (rank, scale), names in groups.items():
            options: dict[str, object] = {"rank": rank, "scale": scale, "dropout": settings.dropout, "keys": names}
            count = len(model.layers)
            if len(groups) == 1 and not isinstance(settings.blocks, tuple) and not settings.adapt_embeddings:
                count = settings.blocks or count  # in mlx-lm's own order, and so with its random numbers
                options["keys"] = set(settings.keys or (n for block in model.layers for n in default_layers(block)))
            linear_to_lora_layers(model, count, options, use_dora=settings.method == "dora")
        use_low_rank_linear(model)
    except ValueError as error:
        raise UserError(f"model.method={settings.method} does not fit {settings.path}: {error}") from None


def _chosen_layers(model: nn.Module, settings: ModelSettings) -> list[str]:
    """The layers that get adapters, in the blocks' order, others last. Raises UserError: a setting matches none."""
    modules, keys = dict(model.named_modules()), settings.keys
    names, chosen = {id(module): name for name, module in modules.items()}, []
    for index in trained_blocks(settings, len(model.layers)):
        block = model.layers[index]
        adapted = default_layers(block) if keys is None else [n for n, _ in block.named_modules() if n in keys]
        chosen += [f"{names[id(block)]}.{name}" for name in adapted]
    inside = {id(module) for block in model.layers for module in block.modules()}
    tables = [n for n, m in modules.items() if id(m) not in inside and isinstance(m, (*EMBEDDINGS, *LINEARS))]
    if settings.adapt_embeddings and not any(isinstance(modules[name], EMBEDDINGS) for name in tables):
        raise UserError(f"model.adapt_embeddings: {settings.path} has no embedding outside of its blocks")
    more = [name for name in modules if name in (keys or ())] + (sorted(tables) if settings.adapt_embeddings else [])
    chosen += [name for name in dict.fromkeys(more) if name not in chosen]
    if not chosen:
        layers = (each for layer in model.layers for each in layer.named_modules())
        linears = ", ".join(sorted({name for name, module in layers if isinstance(module, LINEARS)}))
        wanted = "no layer takes an adapter" if keys is None else f"model.keys {list(keys)}: no such layer"
        raise UserError(f"{wanted} in {settings.path}; its linear layers are {linears or 'none'}")
    for setting, patterns in (("rank_pattern", settings.rank_pattern), ("alpha_pattern", settings.alpha_pattern)):
        for pattern in patterns:
            if not any(matches(pattern, layer) for layer in chosen):
                raise UserError(f"model.{setting}: {pattern!r} ends the name of no adapted layer; one is {chosen[0]}")
    return chosen


def default_layers(block: nn.Module) -> list[str]:
    """The layers of a block that get adapters where model.keys names none, by their names in it."""
    parts = ((name, part) for name, part in block.named_modules() if not NOT_BY_DEFAULT.fullmatch(name))
    return [name for name, part in parts if hasattr(part, "to_lora") or isinstance(part, ADAPTABLE)]


def _load_adapter(model: nn.Module, folder: Path, settings: ModelSettings) -> None:
    """Reads an adapter of mlx-lm or PEFT. Raises UserError: it is unreadable, or of other settings, which are named."""
    if any((folder / name).is_file() for name in (PEFT_WEIGHTS, peft_adapters.PICKLED)):
        peft_adapters.load(model, folder, settings)
        return
    arrays, stored = adapter_files.stored_arrays(folder, "model.adapter")
    where, common = f"model.adapter {folder}", stored.get("lora_parameters") or {}
    layers = {
        name: AdapterLayer(rank, stored.get("layers", {}).get(name, common).get("scale"))
        for name, rank in adapter_files.ranks_of(adapter_files.described(arrays)).items()
    }
    if not stored or any(layer.scale is None for layer in layers.values()):
        raise UserError(f"{where}: {ADAPTER_CONFIG} gives no scale; give a folder that mlx-lm or a run saved")
    peft_adapters.require_settings(model, settings, layers, stored.get("fine_tune_type", "lora"), where)
    shapes = adapter_files.described(adapter_files.trainable(model))
    model.update(tree_unflatten(adapter_files.fitted(shapes, arrays, where)))
