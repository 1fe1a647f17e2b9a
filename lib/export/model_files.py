"""A model's folder: its weights in files of a few gigabytes, and what comes along with them."""

from __future__ import annotations

import copy
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import mlx.core as mx

from lib.errors import UserError
from lib.model.adapter_files import write_arrays

SHARD_BYTES = 5 * 2**30  # of one file of weights
# What comes along of a base model's folder: configuration, tokenizer, chat template, generation settings, code.
COMPANIONS = ("*.json", "*.jinja", "*.model", "*.txt", "*.py", "*.tiktoken")
INDEX = "model.safetensors.index.json"


def write_weights(folder: Path, arrays: dict[str, mx.array]) -> None:
    """Writes model.safetensors, or several files with their index. The arrays are made one at a time, and forgotten."""
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
        (folder / INDEX).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def _taken(arrays: dict[str, mx.array], names: list[str]) -> Iterator[tuple[str, mx.array]]:
    for name in names:
        yield name, arrays.pop(name)


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


def copy_companions(base: Path, folder: Path) -> None:
    """Copies what belongs to a model besides its weights and their index.

    Raises:
        UserError: one of these files is a link out of the model's folder, perhaps to a file of yours: an export is
            given to others.
    """
    for path in sorted({path for pattern in COMPANIONS for path in base.glob(pattern)}):
        if path.name.endswith(".index.json"):
            continue
        if not _is_of_model(path.resolve(), base.resolve()):
            raise UserError(f"{path} is a link to {path.resolve()}, which would be exported; put a copy in its place")
        shutil.copyfile(path, folder / path.name)


def _is_of_model(file: Path, base: Path) -> bool:
    """Whether a file is in a model's folder, or among those of the hub's cache that its snapshots/COMMIT links to."""
    blobs = base.parent.parent / "blobs"
    return file.is_relative_to(base) or (base.parent.name == "snapshots" and file.is_relative_to(blobs))


def stored_names(folder: Path) -> set[str]:
    """The names of a model's arrays in its files; none where it has no files."""
    names: set[str] = set()
    for path in sorted(folder.glob("model*.safetensors")):
        with path.open("rb") as file:
            size = int.from_bytes(file.read(8), "little")
            names |= json.loads(file.read(size)).keys() - {"__metadata__"}
    return names


def without_quantisation(config: dict[str, Any]) -> dict[str, Any]:
    """A config.json of the same model with plain weights."""
    config = copy.deepcopy(config)
    for part in (config, config.get("text_config") or {}):
        part.pop("quantization", None)
        part.pop("quantization_config", None)
    return config
