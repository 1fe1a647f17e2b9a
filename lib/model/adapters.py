"""What is trained of a model: adapters, or its blocks; gradient checkpointing of blocks."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten
from mlx_lm.tuner.trainer import grad_checkpoint
from mlx_lm.tuner.utils import linear_to_lora_layers

from lib.config import schema
from lib.errors import UserError
from lib.model import peft_files, peft_start
from lib.model.adapter_files import adapter_config, load_trained
from lib.model.lora import use_low_rank_linear
from lib.model.swiglu import use_own_swiglu
from lib.system.model_folder import ADAPTER_CONFIG


def make_trainable(model: nn.Module, settings: schema.ModelSettings, seed: int) -> None:
    """Freezes the model and gives it adapters drawn from `seed`, or unfreezes its blocks for full training.

    What is trained is float32 whatever the model's type: an update of 1e-5 of a weight would vanish in bfloat16.

    Raises:
        UserError: no layer matches, or the adapter to start from does not fit.
    """
    blocks = settings.blocks or len(model.layers)
    if blocks > len(model.layers):
        raise UserError(f"model.blocks={blocks}, but {settings.path} has {len(model.layers)} blocks")
    model.freeze()
    use_own_swiglu(model)
    if settings.method == "full":
        if any(isinstance(module, nn.QuantizedLinear) for module in model.modules()):
            raise UserError(
                f"model.method=full cannot train {settings.path}: its weights are quantised; use model.method=lora"
            )
        for part in [model] if settings.blocks is None else model.layers[-blocks:]:
            part.set_dtype(mx.float32)
            part.unfreeze()
    else:
        mx.random.seed(seed)
        options: dict[str, object] = {"rank": settings.rank, "scale": settings.scale, "dropout": settings.dropout}
        if settings.keys is not None:
            options["keys"] = set(settings.keys)
        try:
            linear_to_lora_layers(model, blocks, options, use_dora=settings.method == "dora")
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
    if settings.gradient_checkpointing:
        checkpoint_blocks(model)


def load_adapter(model: nn.Module, settings: schema.ModelSettings) -> None:
    """Reads model.adapter, of mlx-lm's layout or PEFT's, into a model with such adapters.

    Raises:
        UserError: it cannot be read, or was made with other settings.
    """
    folder = Path(settings.adapter or "")
    if peft_files.is_peft(folder):
        peft_start.load(model, folder, settings)
        return
    try:
        stored = json.loads((folder / ADAPTER_CONFIG).read_text())
    except (OSError, json.JSONDecodeError) as error:
        raise UserError(
            f"model.adapter {folder}: {ADAPTER_CONFIG} cannot be read ({error}); "
            "give a folder that mlx-lm or a run saved"
        ) from None
    ours = adapter_config(model, settings)
    theirs = {
        "method": stored.get("fine_tune_type", "lora"),
        **{k: stored.get("lora_parameters", {}).get(k) for k in ("rank", "scale")},
    }
    wanted = {"method": ours["fine_tune_type"], "rank": settings.rank, "scale": settings.scale}
    different = [
        f"model.{k}={theirs[k]}"
        for k in theirs
        if theirs[k] != wanted[k] and (k == "method" or settings.method != "full")
    ]
    if different:
        raise UserError(f"model.adapter {folder} was made with other settings; add {' '.join(different)}")
    load_trained(model, folder, "model.adapter")


def checkpoint_blocks(model: nn.Module) -> None:
    """Lets every block recompute its inside in the backward pass."""
    for layer in model.layers:
        _checkpoint_while_training(layer)


def _checkpoint_while_training(layer: nn.Module) -> None:
    """mlx-lm's gradient checkpointing, which changes the layer's class, for this layer alone and while it trains.

    Other models of the class, in this process, go on as they were; generation passes a cache through.
    """
    layer.is_checkpointed = True
    plain = type(layer).__call__
    if getattr(plain, "only_where_asked", False):
        return
    grad_checkpoint(layer)
    checkpointed = type(layer).__call__

    def call(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return (checkpointed if self.training and getattr(self, "is_checkpointed", False) else plain)(
            self, *args, **kwargs
        )

    call.only_where_asked = True  # type: ignore[attr-defined]
    type(layer).__call__ = call
