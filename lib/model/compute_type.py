"""The type that 16-bit weights are computed in: float32 on a CPU, whose MLX has no fast products of 16 bits."""

from __future__ import annotations

from typing import NamedTuple

import mlx.core as mx

from lib.config.settings import ModelSettings
from lib.model.load import reference_settings
from lib.model.quantised import device
from lib.system import hardware
from lib.system.model_folder import resolve
from lib.system.terminal import size_text

SIXTEEN_BITS = {mx.float16: "float16", mx.bfloat16: "bfloat16"}
PART_OF_MEMORY = 0.6  # of the free memory, for the weights
SLOWER = "6 to 10 times"  # 16 bits than float32 (docs/performance.md)


class ComputeType(NamedTuple):
    """Whether weights stored in 16 bits are computed in float32 here, and what to say of it; "" where none are."""

    is_float32: bool = False
    note: str = ""


def compute_type(settings: ModelSettings) -> ComputeType:
    """For a model whose model.dtype is not set, and its reference. Raises UserError: there is no such model."""
    if device() != "cpu" or settings.dtype is not None or settings.random_init:
        return ComputeType()
    folders = {resolve(each.path, each.revision) for each in (settings, reference_settings(settings))}
    files = [path for folder in folders for path in folder.glob("model*.safetensors")]
    try:
        arrays = [array for path in files for array in mx.load(str(path)).values()]  # whose values are not read
    except (RuntimeError, ValueError):  # loading the model says what is wrong with the file
        return ComputeType()
    stored = next((SIXTEEN_BITS[array.dtype] for array in arrays if array.dtype in SIXTEEN_BITS), None)
    if stored is None:
        return ComputeType()
    needed = sum(array.nbytes * (2 if array.dtype in SIXTEEN_BITS else 1) for array in arrays)
    free = hardware.free_memory_bytes()
    if free is None or needed <= PART_OF_MEMORY * free:
        note = f"weights stored in {stored} are computed in float32 (model.dtype={stored}: as stored, {SLOWER} slower)"
        return ComputeType(True, note)
    note = f"weights are computed in {stored}, {SLOWER} slower than float32 on a CPU: float32 takes {size_text(needed)}"
    return ComputeType(False, f"{note}, {size_text(free)} are free (model.dtype=float32 takes it all the same)")
