"""The whole model with its adapter merged in: for mlx-lm, and where it is not quantised for transformers and others."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten, tree_unflatten

from lib.errors import UserError
from lib.export import mlx_reader
from lib.export.form import ExportOptions, Logps
from lib.export.fused_weights import fused_model, requantised_model
from lib.export.trained_run import TrainedRun
from lib.model.adapter_files import write_arrays

READER = "mlx_lm.load"
TYPES = {"f32": mx.float32, "bf16": mx.bfloat16, "f16": mx.float16}
SHARD_BYTES = 5 * 2**30  # of one file of weights
# What comes along of the base model's folder: configuration, tokenizer, chat template, generation settings, code.
KEPT = ("*.json", "*.jinja", "*.model", "*.txt", "*.py", "*.tiktoken")


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
    sizes = {name: array.nbytes for name, array in arrays.items()}
    shards = shards_of(sizes, SHARD_BYTES)
    index: dict[str, str] = {}
    for number, names in enumerate(shards, 1):
        file = "model.safetensors" if len(shards) == 1 else f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        described = {name: (arrays[name].shape, arrays[name].dtype) for name in names}
        write_arrays(folder / file, described, _taken(arrays, names))
        index |= dict.fromkeys(names, file)
    if len(shards) > 1:
        content = {"metadata": {"total_size": sum(sizes.values())}, "weight_map": index}
        (folder / "model.safetensors.index.json").write_text(json.dumps(content, indent=2) + "\n")
    copy_companions(run, folder)
    if options.dequantize or options.type is not None:
        (folder / "config.json").write_text(json.dumps(_config(run, options), indent=2) + "\n")


def stored_model(run: TrainedRun, options: ExportOptions) -> nn.Module | None:
    """As it is written, then float32."""
    model = _stored(run, options)
    model.set_dtype(mx.float32)
    return model


def read_logps(run: TrainedRun, folder: Path, options: ExportOptions) -> Logps:
    return mlx_reader.logps(folder, run.rows, run.settings.model.trust_remote_code)


def copy_companions(run: TrainedRun, folder: Path) -> None:
    """Copies what belongs to a model besides its weights; never the index of the base's."""
    for path in sorted({path for pattern in KEPT for path in run.base.glob(pattern)}):
        if not path.name.endswith(".safetensors.index.json"):
            shutil.copyfile(path, folder / path.name)


def shards_of(sizes: dict[str, int], most: int) -> list[list[str]]:
    """Names in groups of at most `most` bytes each, in their order; a larger one is alone."""
    shards: list[list[str]] = []
    room = 0
    for name, size in sizes.items():
        if not shards or size > room:
            shards.append([])
            room = most
        shards[-1].append(name)
        room -= size
    return shards


def _taken(arrays: dict[str, mx.array], names: list[str]) -> Iterator[tuple[str, mx.array]]:
    """Each array once: it is made when its turn comes, and then forgotten."""
    for name in names:
        yield name, arrays.pop(name)


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
    config = run.base_config
    if options.dequantize:
        for part in (config, config.get("text_config", {})):
            part.pop("quantization", None)
            part.pop("quantization_config", None)
    name = {"f32": "float32", "bf16": "bfloat16", "f16": "float16"}.get(options.type or "")
    for key in {"torch_dtype", "dtype"} & config.keys() if name else ():
        config[key] = name
    return config
