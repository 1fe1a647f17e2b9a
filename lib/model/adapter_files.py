"""Trained parameters in mlx-lm's adapter layout: written, read, compared."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx.utils import tree_flatten, tree_unflatten

from lib.config import read_file
from lib.config.settings import ModelSettings
from lib.errors import UserError
from lib.model.adapter_layers import AdapterLayer, is_uniform, scale_of
from lib.system import files
from lib.system.model_folder import ADAPTER_CONFIG, ADAPTER_WEIGHTS

Described = Mapping[str, tuple[tuple[int, ...], mx.Dtype]]  # shape and dtype by name
Arrays = Iterable[tuple[str, mx.array | np.ndarray]]  # or the raw bytes


def trainable(model: nn.Module) -> dict[str, mx.array]:
    """The trained parameters by name."""
    return dict(tree_flatten(model.trainable_parameters()))


def described(arrays: Mapping[str, mx.array]) -> dict[str, tuple[tuple[int, ...], mx.Dtype]]:
    """Shapes and dtypes by name."""
    return {name: (array.shape, array.dtype) for name, array in arrays.items()}


def digest(arrays: dict[str, mx.array]) -> str:
    """A digest of arrays and their names, equal where every bit is equal."""
    sha = hashlib.sha256()
    for name, each in raw(arrays):
        sha.update(name.encode())
        sha.update(each.data)
    return sha.hexdigest()


def save_trained(
    model: nn.Module,
    settings: ModelSettings,
    folder: Path,
    shapes: Described | None = None,
    arrays: Iterable[tuple[str, mx.array]] = (),
) -> None:
    """Writes the trained parameters in mlx-lm's adapter layout: `mlx_lm.load(path, adapter_path=folder)` reads it.

    Args:
        shapes, arrays: where the model is a part of one, names, shapes and dtypes of the whole, and in that order
            the arrays; one at a time is in memory.
    """
    if shapes is None:
        own = dict(sorted(trainable(model).items()))
        shapes, arrays = described(own), own.items()
    config = adapter_config(settings, shapes, len(model.layers), is_padded=True)
    if "layers" in config:
        shapes, arrays = _padded(shapes, arrays, config)
    write_arrays(folder / ADAPTER_WEIGHTS, shapes, arrays)
    files.write_atomically(folder / ADAPTER_CONFIG, json.dumps(config, indent=2) + "\n")


def _padded(
    shapes: Described, arrays: Iterable[tuple[str, mx.array]], config: Mapping[str, Any]
) -> tuple[Described, Iterator[tuple[str, mx.array]]]:
    """The same adapters with one rank and one scale, which is all that mlx-lm knows: zeros behind A and B, B scaled."""
    rank, scale, layers = config["lora_parameters"]["rank"], config["lora_parameters"]["scale"], config["layers"]

    def wide(name: str, shape: tuple[int, ...]) -> tuple[int, ...]:
        if ".lora_" not in name:
            return shape
        axis = rank_axis(name, len(shape)) % len(shape)
        return (*shape[:axis], rank, *shape[axis + 1 :])

    def widened() -> Iterator[tuple[str, mx.array]]:
        for name, array in arrays:
            layer = layers.get(name.rpartition(".")[0])
            if layer is not None and name.endswith(".lora_b") and layer["scale"] != scale:
                array = array * (layer["scale"] / scale)
            room = [(0, new - old) for new, old in zip(wide(name, array.shape), array.shape, strict=True)]
            yield name, mx.pad(array, room)

    return {name: (wide(name, shape), dtype) for name, (shape, dtype) in shapes.items()}, widened()


def _unpadded(arrays: Mapping[str, mx.array], config: Mapping[str, Any]) -> dict[str, mx.array]:
    """What `_padded` was made of.

    Raises:
        KeyError, TypeError, ValueError, AttributeError, IndexError: no such configuration is ever written.
    """
    scale, layers = _scale_in(config["lora_parameters"]), config["layers"]
    own: dict[str, mx.array] = {}
    for name, array in arrays.items():
        layer = layers.get(name.rpartition(".")[0])
        if layer is not None and ".lora_" in name:
            axis, rank = rank_axis(name, array.ndim), layer["rank"]
            if type(rank) is not int or not 1 <= rank <= array.shape[axis]:  # MLX would read what is behind the array
                raise ValueError(f"rank {rank!r} of {name}, which has {array.shape[axis]}")
            array = mx.take(array, mx.arange(rank), axis=axis)
            if name.endswith(".lora_b") and (layer_scale := _scale_in(layer)) != scale:
                array = array * (scale / layer_scale)
        own[name] = array
    return own


def _scale_in(settings: Mapping[str, Any]) -> float:
    """Raises ValueError where the scale is 0 or not finite."""
    try:
        scale = float(settings["scale"])
    except OverflowError as error:  # a whole number of more than 308 digits
        raise ValueError(f"scale: {error}") from None
    if not math.isfinite(scale) or scale == 0:
        raise ValueError(f"scale {scale}")
    return scale


def write_arrays(
    path: Path,
    described: Described,
    arrays: Arrays,
    kind: str = "mlx",
    metadata: Mapping[str, str] | None = None,
    durable: bool = True,
) -> None:
    """A safetensors file, whole or absent, written array by array: the whole is never in memory.

    Args:
        kind: `mlx`, or `pt` where others expect PyTorch's.
        metadata: what else the file says.
        durable: it is on the disk then, and outlasts a power cut.

    Raises:
        OSError: the disk is full or not writable.
    """
    header: dict[str, object] = {"__metadata__": {"format": kind, **(metadata or {})}}
    end = 0
    for name, (shape, dtype) in described.items():
        begin, end = end, end + math.prod(shape) * dtype.size
        header[name] = {"dtype": SAFETENSORS[dtype], "shape": list(shape), "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with files.replacing(path, durable) as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for name, array in arrays:
            file.write((array if isinstance(array, np.ndarray) else raw({name: array})[0][1]).data)


def raw(arrays: Mapping[str, mx.array]) -> list[tuple[str, np.ndarray]]:
    """Arrays' bytes outside of MLX, uint8 [n] each, by sorted name."""
    views = {name: mx.view(arrays[name].reshape(-1), mx.uint8) for name in sorted(arrays)}
    mx.eval(views)  # at once: asked one by one, hundreds of small ones take ten times as long
    return [(name, np.array(view)) for name, view in views.items()]


SAFETENSORS = {
    mx.float32: "F32",
    mx.float16: "F16",
    mx.bfloat16: "BF16",
    mx.uint8: "U8",
    mx.uint32: "U32",
    mx.uint64: "U64",
    mx.int32: "I32",
    mx.int64: "I64",
}


def load_trained(model: nn.Module, folder: Path, where: str) -> None:
    """Reads trained parameters into a model that `make_trainable` prepared in the same way.

    Adapters may have another rank: a stack of several.

    Raises:
        UserError: names or shapes differ; names the first of them.
    """
    wanted = described(trainable(model))
    model.update(tree_unflatten(list(read_trained(wanted, folder, where).items())))


def read_trained(wanted: Described, folder: Path, where: str) -> dict[str, mx.array]:
    """Trained parameters from a folder, by name, not evaluated yet.

    Raises:
        UserError: they are not those of the wanted names and shapes; names the first of them.
    """
    read_file.require_regular(folder / ADAPTER_WEIGHTS, where)
    try:
        loaded = mx.load(str(folder / ADAPTER_WEIGHTS))
    except (RuntimeError, OSError, ValueError) as error:
        raise UserError(f"{where} {folder}: {ADAPTER_WEIGHTS} cannot be read: {str(error).splitlines()[0]}") from None
    path = folder / ADAPTER_CONFIG
    config = read_file.read_object(path, where) if path.exists() else {}
    if config.get("padded"):
        try:
            loaded = _unpadded(loaded, config)
        except (KeyError, TypeError, ValueError, AttributeError, IndexError) as error:
            raise UserError(f"{where} {path} does not say how its layers were padded ({error!r})") from None
    return fitted(wanted, loaded, f"{where} {folder}")


def fitted(wanted: Described, loaded: Mapping[str, mx.array], where: str) -> dict[str, mx.array]:
    """Trained parameters in the wanted types; LoRA's factors may have another rank.

    Raises:
        UserError: they are not those of the wanted names and shapes; names the first of them.
    """
    for name in sorted(wanted.keys() | loaded.keys()):
        if name not in loaded or name not in wanted:
            raise UserError(
                f"{where} does not fit the model: {name} is only in the {'model' if name in wanted else 'adapter'}"
            )
        if shape_without_rank(name, loaded[name].shape) != shape_without_rank(name, wanted[name][0]):
            raise UserError(
                f"{where} does not fit the model: {name} has shape {loaded[name].shape}, "
                f"the model wants {wanted[name][0]}"
            )
    return {name: array.astype(wanted[name][1]) for name, array in loaded.items()}


def misfit(wanted: Described, found: Described) -> str | None:
    """The first array that is missing, too many, or of another shape or dtype, and how; None where all fit."""
    for name in sorted(wanted.keys() | found.keys()):
        if wanted.get(name) != found.get(name):
            here, there = (
                "absent" if one is None else f"{one[1]} {one[0]}" for one in (found.get(name), wanted.get(name))
            )
            return f"{name} is {here}, not {there}"
    return None


def adapter_layers_of(settings: ModelSettings, shapes: Described) -> dict[str, AdapterLayer]:
    """The layers with adapters, by name: of a stack of several, its rank."""
    ranks = {
        name.removesuffix(".lora_a"): shape[rank_axis(name, len(shape))]
        for name, (shape, _) in shapes.items()
        if name.endswith(".lora_a")
    }
    return {layer: AdapterLayer(rank, scale_of(settings, layer)) for layer, rank in ranks.items()}


def rank_axis(name: str, dimensions: int) -> int:
    """lora_a is [in, r] and lora_b [r, out]; of a layer of experts [E, r, in] and [E, out, r]."""
    return -1 if name.endswith(".lora_a") == (dimensions == 2) else -2


def shape_without_rank(name: str, shape: tuple[int, ...]) -> tuple[int, ...]:
    """The shape, without the rank of LoRA's factors."""
    if ".lora_" not in name:
        return shape
    axis = rank_axis(name, len(shape)) % len(shape)
    return shape[:axis] + shape[axis + 1 :]


def adapter_config(
    settings: ModelSettings, shapes: Described, block_count: int, is_padded: bool = False
) -> dict[str, Any]:
    """adapter_config.json, as mlx-lm reads it.

    Where layers are chosen one by one, or have ranks and scales of their own, `layers` has those, which mlx-lm does not
    read, and `padded` says whether the file's arrays all have lora_parameters' instead.

    Args:
        shapes: of what is trained of the whole model.
    """
    layers = adapter_layers_of(settings, shapes)
    kinds = set(layers.values())
    rank, scale = max((layer.rank for layer in kinds), default=settings.rank), scale_of(settings, "")
    if len(kinds) == 1:
        scale = next(iter(kinds)).scale
    parameters: dict[str, object] = {"rank": rank, "scale": scale, "dropout": settings.dropout}
    config: dict[str, Any] = {
        "fine_tune_type": settings.method,
        "model": settings.path,
        "num_layers": block_count,
        "lora_parameters": parameters,
    }
    if not is_uniform(settings, len(kinds)):
        parameters["keys"] = sorted(layers)
        own = {name: layer._asdict() for name, layer in sorted(layers.items())}
        return config | {"layers": own, "padded": is_padded}
    if settings.keys is not None:
        parameters["keys"] = list(settings.keys)
    if isinstance(settings.blocks, int):
        config["num_layers"] = settings.blocks
    return config
