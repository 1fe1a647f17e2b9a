"""The whole model with its adapter merged in: for mlx-lm, and where it is not quantised for transformers and others."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten, tree_unflatten

from lib.errors import UserError
from lib.export import mlx_reader
from lib.export.form import ExportOptions, Reading
from lib.export.fused_weights import fused_model, requantised_model
from lib.export.model_files import copy_companions, stored_names, without_quantisation, write_weights
from lib.export.trained_run import TrainedRun
from lib.model.checkpoint_names import stacked_name, unstacked

READER = "mlx_lm.load"
TYPES = {"f32": mx.float32, "bf16": mx.bfloat16, "f16": mx.float16}


def check(run: TrainedRun, options: ExportOptions, prove: bool) -> None:
    """Raises UserError for a type that plain weights cannot have."""
    if options.type is not None and options.type not in TYPES:
        raise UserError(f"--type {options.type} is for --to gguf; --to fused has {', '.join(TYPES)}")
    if options.dequantize and not run.is_quantised:
        raise UserError(f"--dequantize: {run.base} is not quantised; leave it out")
    if options.type is not None and run.is_quantised and not options.dequantize:
        raise UserError(f"--type {options.type}: {run.base} stays quantised; --dequantize stores plain weights")


def write(run: TrainedRun, folder: Path, options: ExportOptions) -> None:
    """Writes the model as its base is stored: the same names and types of weights, unless others are asked for."""
    arrays = dict(tree_flatten(_stored(run, options).parameters()))
    if any(stacked_name(name) for name in stored_names(run.base)):
        arrays = dict(unstacked(arrays))
    write_weights(folder, arrays)
    copy_companions(run.base, folder)
    if options.dequantize or options.type is not None:
        (folder / "config.json").write_text(json.dumps(_config(run, options), indent=2) + "\n", encoding="utf-8")


def stored_model(run: TrainedRun, options: ExportOptions) -> nn.Module | None:
    """As it is written, then float32; None where all of it is float32 anyway."""
    model = _stored(run, options)
    if all(array.dtype == mx.float32 for _, array in tree_flatten(model.parameters())):
        return None
    model.set_dtype(mx.float32)
    return model


def read_logps(run: TrainedRun, folder: Path, options: ExportOptions) -> Reading:
    return Reading(mlx_reader.logps(folder, run.rows, run.settings.model.trust_remote_code))


def _stored(run: TrainedRun, options: ExportOptions) -> nn.Module:
    """The model in the types that it is stored in, not evaluated yet."""
    keeps_quantised = run.is_quantised and not options.dequantize
    model = requantised_model(run) if keeps_quantised else fused_model(run)
    of_base = {name: array.dtype for name, array in tree_flatten(run.stored_base().parameters())}
    wanted = TYPES.get(options.type or "")
    cast = {
        name: array.astype(wanted or _type_of(name, of_base))
        for name, array in tree_flatten(model.parameters())
        if mx.issubdtype(array.dtype, mx.floating)
    }
    model.update(tree_unflatten(list(cast.items())))
    return model


def _type_of(name: str, of_base: dict[str, mx.Dtype]) -> mx.Dtype:
    """A weight's type in the base model; of one that was quantised the type of its scales."""
    dtype = of_base[name]
    if not mx.issubdtype(dtype, mx.floating):
        dtype = of_base[f"{name.removesuffix('.weight')}.scales"]
    return dtype if mx.issubdtype(dtype, mx.floating) else mx.bfloat16  # scales of 8 bits say nothing


def _config(run: TrainedRun, options: ExportOptions) -> dict[str, Any]:
    """The base model's config.json, changed where the weights are."""
    config = without_quantisation(run.base_config) if options.dequantize else run.base_config
    name = {"f32": "float32", "bf16": "bfloat16", "f16": "float16"}.get(options.type or "")
    for key in {"torch_dtype", "dtype"} & config.keys() if name else ():
        config[key] = name
    return config
