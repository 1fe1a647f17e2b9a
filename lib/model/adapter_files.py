"""Adapters of layers: their ranks and scales; and trained parameters in mlx-lm's layout: written, read, compared.

A layer goes by its full name, e.g. model.layers.3.self_attn.q_proj. Patterns are PEFT's: a regular expression that
matches the end of a name, from a dot on; the first one that does counts.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx.utils import tree_flatten, tree_unflatten

from lib.config import read_file
from lib.config.settings import ModelSettings
from lib.errors import UserError, in_one_line
from lib.system import files
from lib.system.model_folder import ADAPTER_CONFIG, ADAPTER_WEIGHTS

Described = dict[str, tuple[tuple[int, ...], mx.Dtype]]  # shape and dtype by name
Arrays = Iterable[tuple[str, mx.array | np.ndarray]]  # or the raw bytes
Value = TypeVar("Value")


class AdapterLayer(NamedTuple):
    """The adapter of one layer."""

    rank: int
    scale: float


def layer_of(settings: ModelSettings, layer: str) -> AdapterLayer:
    """The adapter of a layer, by its name."""
    return AdapterLayer(rank_of(settings, layer), scale_of(settings, layer))


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
    return _first_match(settings.rank_pattern, layer, settings.rank)


def scale_of(settings: ModelSettings, layer: str) -> float:
    """model.scale; or alpha / rank (arXiv:2106.09685, 4.1), or alpha / sqrt(rank) (rsLoRA, arXiv:2312.03732, 3)."""
    if settings.alpha is None:
        return settings.scale
    alpha, rank = _first_match(settings.alpha_pattern, layer, settings.alpha), rank_of(settings, layer)
    return float(alpha / (math.sqrt(rank) if settings.use_rslora else rank))


def _first_match(patterns: Mapping[str, Value], layer: str, default: Value) -> Value:
    return next((value for pattern, value in patterns.items() if matches(pattern, layer)), default)


def matches(pattern: str, layer: str) -> bool:
    """Whether a pattern matches the end of a layer's name, from a dot on."""
    return re.fullmatch(rf"(.*\.)?({pattern})", layer) is not None


def adapter_layers_of(settings: ModelSettings, shapes: Described) -> dict[str, AdapterLayer]:
    """The layers with adapters, by name: of a stack of several, its rank."""
    return {layer: AdapterLayer(rank, scale_of(settings, layer)) for layer, rank in ranks_of(shapes).items()}


def ranks_of(shapes: Described) -> dict[str, int]:
    """The ranks of the layers with adapters, by name."""
    return {n.removesuffix(".lora_a"): s[_rank_axis(n, s)] for n, (s, _) in shapes.items() if n.endswith(".lora_a")}


def trainable(model: nn.Module) -> dict[str, mx.array]:
    """The trained parameters by name."""
    return dict(tree_flatten(model.trainable_parameters()))


def described(arrays: Mapping[str, mx.array]) -> Described:
    """Shapes and dtypes by name."""
    return {name: (array.shape, array.dtype) for name, array in arrays.items()}


def digest(arrays: Mapping[str, mx.array]) -> str:
    """A digest of arrays and their names, equal where every bit is equal."""
    sha = hashlib.sha256()
    for name, each in raw(arrays):
        sha.update(name.encode())
        sha.update(each.data)
    return sha.hexdigest()


def raw(arrays: Mapping[str, mx.array]) -> list[tuple[str, np.ndarray]]:
    """Arrays' bytes outside of MLX, uint8 [n] each, by sorted name."""
    views = {name: mx.view(arrays[name].reshape(-1), mx.uint8) for name in sorted(arrays)}
    mx.eval(views)  # at once: hundreds of small ones, one by one, take ten times as long
    return [(name, np.array(view)) for name, view in views.items()]


def save_trained(
    model: nn.Module,
    settings: ModelSettings,
    folder: Path,
    shapes: Described | None = None,
    arrays: Iterable[tuple[str, mx.array]] = (),
) -> None:
    """Writes the trained parameters in mlx-lm's adapter layout: `mlx_lm.load(path, adapter_path=folder)` reads it.
    shapes, arrays: where the model is a part of one, those of the whole, in one order, one array at a time."""
    if shapes is None:
        held = dict(sorted(trainable(model).items()))
        shapes, arrays = described(held), held.items()
    config = adapter_config(settings, shapes, len(model.layers), is_padded=True)
    if "layers" in config:
        rank = config["lora_parameters"]["rank"]
        shapes = {name: (_with_rank(name, shape, rank), dtype) for name, (shape, dtype) in shapes.items()}
        arrays = _padded(arrays, config)
    write_arrays(folder / ADAPTER_WEIGHTS, shapes, arrays)
    files.write_atomically(folder / ADAPTER_CONFIG, json.dumps(config, indent=2) + "\n")


def write_arrays(path: Path, described: Described, arrays: Arrays, kind: str = "mlx", durable: bool = True) -> None:
    """A safetensors file, whole or absent, written array by array: the whole is never in memory. kind: `mlx`, or `pt`
    where others expect PyTorch's. durable: it is on the disk then, and outlasts a power cut."""
    header: dict[str, object] = {"__metadata__": {"format": kind}}
    end = 0
    for name, (shape, dtype) in described.items():
        begin, end = end, end + math.prod(shape) * dtype.size
        of_file = str(dtype).rpartition(".")[2].replace("float", "f").replace("uint", "u").replace("int", "i").upper()
        header[name] = {"dtype": of_file, "shape": list(shape), "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with files.replacing(path, durable) as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for name, array in arrays:
            file.write((array if isinstance(array, np.ndarray) else raw({name: array})[0][1]).data)


def adapter_config(
    settings: ModelSettings, shapes: Described, block_count: int, is_padded: bool = False
) -> dict[str, Any]:
    """adapter_config.json, as mlx-lm reads it. Where layers have ranks and scales of their own, `layers` has those, and
    `padded` says whether the file's arrays all have lora_parameters' instead. shapes: of the whole model's."""
    layers = adapter_layers_of(settings, shapes)
    kinds = set(layers.values())
    rank = max((layer.rank for layer in kinds), default=settings.rank)
    scale = next(iter(kinds)).scale if len(kinds) == 1 else scale_of(settings, "")
    parameters: dict[str, object] = {"rank": rank, "scale": scale, "dropout": settings.dropout}
    config: dict[str, Any] = {
        "fine_tune_type": settings.method,
        "model": settings.path,
        "num_layers": settings.blocks if isinstance(settings.blocks, int) else block_count,
        "lora_parameters": parameters,
    }
    if len(kinds) > 1 or isinstance(settings.blocks, tuple) or settings.adapt_embeddings:
        parameters["keys"] = sorted(layers)
        config |= {"num_layers": block_count, "padded": is_padded}
        config["layers"] = {name: layer._asdict() for name, layer in sorted(layers.items())}
    elif layers:
        names = {re.sub(r"^.*?\.\d+\.", "", layer) for layer in layers}  # within a block
        parameters["keys"] = list(settings.keys or sorted(names))
    return config


def load_trained(model: nn.Module, folder: Path, where: str) -> None:
    """Reads trained parameters into a model that `make_trainable` prepared in the same way; the rank may be another."""
    arrays, _ = stored_arrays(folder, where)
    model.update(tree_unflatten(fitted(described(trainable(model)), arrays, f"{where} {folder}")))


def stored_arrays(folder: Path, where: str) -> tuple[dict[str, mx.array], dict[str, Any]]:
    """A folder's trained parameters, each of its own rank, and its adapter_config.json. Raises UserError."""
    read_file.require_regular(folder / ADAPTER_WEIGHTS, where)
    path = folder / ADAPTER_CONFIG
    config = read_file.read_object(path, where) if path.exists() else {}
    try:
        arrays = dict(mx.load(str(folder / ADAPTER_WEIGHTS)))
    except (RuntimeError, OSError, ValueError) as error:
        raise UserError(
            f"{where} {folder}: {ADAPTER_WEIGHTS} cannot be read: {in_one_line(error)}; name the folder "
            "itself that holds it, or PEFT's adapter_model.safetensors"
        ) from None
    return dict(_padded(arrays.items(), config, is_undone=True)) if config.get("padded") else arrays, config


def fitted(wanted: Described, loaded: Mapping[str, mx.array], where: str) -> dict[str, mx.array]:
    """Trained parameters in the wanted types; LoRA's rank may differ. Raises UserError: names the first misfit."""
    shapes: Described = {}
    for name, array in loaded.items():
        shape, dtype = wanted.get(name, (array.shape, array.dtype))
        is_same = _with_rank(name, array.shape, 0) == _with_rank(name, shape, 0)
        shapes[name] = (shape if is_same else array.shape, dtype)
    if fault := misfit(wanted, shapes):
        theirs, ours = ({n.rpartition(".")[0] for n in names if ".lora_" in n} for names in (loaded, wanted))
        if theirs != ours:  # as where an earlier version adapted others by default
            keys = sorted({re.sub(r"^.*?\.\d+\.", "", layer) for layer in theirs})
            fault += f"; other layers were adapted: add 'model.keys=[{', '.join(keys)}]'"
        raise UserError(f"{where} does not fit the model: {fault}")
    return {name: array.astype(wanted[name][1]) for name, array in loaded.items()}


def misfit(wanted: Described, stored: Described) -> str | None:
    """The first array that is missing, too many, or of another shape or dtype, and how; None where all fit."""
    for name in sorted(wanted.keys() | stored.keys()):
        if wanted.get(name) != stored.get(name):
            here, there = (
                f"{each[1]} {each[0]}" if each else "absent" for each in (stored.get(name), wanted.get(name))
            )
            return f"{name} is {here}, not {there}"
    return None


# lora_a is [in, r] and lora_b [r, out]; of a layer of experts [E, r, in] and [E, out, r].
def _rank_axis(name: str, shape: tuple[int, ...]) -> int:
    return len(shape) - (1 if name.endswith(".lora_a") == (len(shape) == 2) else 2)


def _with_rank(name: str, shape: tuple[int, ...], rank: int) -> tuple[int, ...]:
    """The shape with another rank, where it has one."""
    if ".lora_" not in name or len(shape) < 2:
        return shape
    axis = _rank_axis(name, shape)
    return (*shape[:axis], rank, *shape[axis + 1 :])


def _padded(
    arrays: Iterable[tuple[str, mx.array]], config: Mapping[str, Any], is_undone: bool = False
) -> Iterator[tuple[str, mx.array]]:
    """The adapters with one rank and scale, as mlx-lm knows them: zeros behind A and B, B scaled; or the way back."""
    common, layers = config["lora_parameters"], config["layers"]
    for name, array in arrays:
        layer = layers.get(name.rpartition(".")[0])
        if layer is not None and ".lora_" in name:
            new, old = (layer, common) if is_undone else (common, layer)
            wide = _with_rank(name, array.shape, new["rank"])
            if is_undone:
                array = mx.split(array, [new["rank"]], axis=_rank_axis(name, array.shape))[0]
            if name.endswith(".lora_b") and new["scale"] != old["scale"]:
                array = array * (old["scale"] / new["scale"])
            array = mx.pad(array, [(0, after - before) for after, before in zip(wide, array.shape, strict=True)])
        yield name, array
