"""Trained parameters in mlx-lm's adapter layout: written, read, compared."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterable, Mapping
from pathlib import Path

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx.utils import tree_flatten, tree_unflatten

from lib.config import schema
from lib.errors import UserError
from lib.system.model_folder import ADAPTER_CONFIG, ADAPTER_WEIGHTS

Described = Mapping[str, tuple[tuple[int, ...], mx.Dtype]]  # shape and dtype by name
Arrays = Iterable[tuple[str, mx.array | np.ndarray]]  # or the raw bytes


def trainable(model: nn.Module) -> dict[str, mx.array]:
    """The trained parameters by name."""
    return dict(tree_flatten(model.trainable_parameters()))


def digest(arrays: dict[str, mx.array]) -> str:
    """A digest of arrays and their names, equal where every bit is equal."""
    sha = hashlib.sha256()
    for name, each in raw(arrays):
        sha.update(name.encode())
        sha.update(each.data)
    return sha.hexdigest()


def save_trained(
    model: nn.Module,
    settings: schema.ModelSettings,
    folder: Path,
    described: Described | None = None,
    arrays: Arrays = (),
) -> None:
    """Writes the trained parameters in mlx-lm's adapter layout: `mlx_lm.load(path, adapter_path=folder)` reads it.

    Args:
        described, arrays: where the model is a part of one, names, shapes and dtypes of the whole, and in that order
            the arrays; one at a time is in memory.
    """
    if described is None:
        own = sorted(trainable(model).items())
        described, arrays = {name: (array.shape, array.dtype) for name, array in own}, own
    write_arrays(folder / ADAPTER_WEIGHTS, described, arrays)
    (folder / ADAPTER_CONFIG).write_text(json.dumps(adapter_config(model, settings), indent=2) + "\n")


def write_arrays(path: Path, described: Described, arrays: Arrays, kind: str = "mlx") -> None:
    """A safetensors file, written array by array: the whole is never in memory.

    kind: `mlx`, or `pt` where others expect PyTorch's.

    Raises:
        OSError: the disk is full or not writable.
    """
    header: dict[str, object] = {"__metadata__": {"format": kind}}
    end = 0
    for name, (shape, dtype) in described.items():
        begin, end = end, end + math.prod(shape) * dtype.size
        header[name] = {"dtype": SAFETENSORS[dtype], "shape": list(shape), "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
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
    wanted = {name: (array.shape, array.dtype) for name, array in trainable(model).items()}
    model.update(tree_unflatten(list(read_trained(wanted, folder, where).items())))


def read_trained(wanted: Described, folder: Path, where: str) -> dict[str, mx.array]:
    """Trained parameters from a folder, by name, not evaluated yet.

    Raises:
        UserError: they are not those of the wanted names and shapes; names the first of them.
    """
    try:
        loaded = mx.load(str(folder / ADAPTER_WEIGHTS))
    except (RuntimeError, OSError) as error:
        raise UserError(f"{where} {folder}: {ADAPTER_WEIGHTS} cannot be read: {str(error).splitlines()[0]}") from None
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


def adapter_rank(model: nn.Module) -> int | None:
    """The rank of the model's LoRA layers, or None where it has none."""
    ranks = (array.shape[rank_axis(name, array.ndim)] for name, array in trainable(model).items() if ".lora_" in name)
    return next(ranks, None)


def rank_axis(name: str, dimensions: int) -> int:
    """lora_a is [in, r] and lora_b [r, out]; of a layer of experts [E, r, in] and [E, out, r]."""
    return -1 if name.endswith(".lora_a") == (dimensions == 2) else -2


def shape_without_rank(name: str, shape: tuple[int, ...]) -> tuple[int, ...]:
    """The shape, without the rank of LoRA's factors."""
    if ".lora_" not in name:
        return shape
    axis = rank_axis(name, len(shape)) % len(shape)
    return shape[:axis] + shape[axis + 1 :]


def adapter_config(model: nn.Module, settings: schema.ModelSettings) -> dict[str, object]:
    """adapter_config.json, as mlx-lm reads it."""
    rank = adapter_rank(model) or settings.rank
    parameters: dict[str, object] = {"rank": rank, "scale": settings.scale, "dropout": settings.dropout}
    if settings.keys is not None:
        parameters["keys"] = list(settings.keys)
    return {
        "fine_tune_type": settings.method,
        "model": settings.path,
        "num_layers": settings.blocks or len(model.layers),
        "lora_parameters": parameters,
    }
