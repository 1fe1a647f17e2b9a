"""The policy and the reference model, loaded by mlx-lm: their tables, the type that they are computed in, digests."""

from __future__ import annotations

import functools
import hashlib
import json
import shutil
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.cache import KVCache, RotatingKVCache, make_prompt_cache
from mlx_lm.utils import load_model

from lib.config.settings import ModelSettings
from lib.errors import UserError
from lib.model.adapters import EMBEDDINGS, make_trainable
from lib.model.layout import layout_of
from lib.model.patches import complete_module, replace_modules, use_quick_recurrences, with_methods
from lib.model.quantised import device, use_fast_layers
from lib.system import hardware
from lib.system.model_folder import ADAPTER_CONFIG, ADAPTER_WEIGHTS, PEFT_WEIGHTS, resolve, why_unreadable
from lib.system.terminal import size_text

POSITION_TABLE = "wpe"  # its name in mlx-lm's families with learned positions
SIXTEEN_BITS = {mx.float16: "float16", mx.bfloat16: "bfloat16"}
PART_OF_MEMORY = 0.6  # of the free memory, for weights that a CPU computes in float32
SLOWER = "6 to 10 times slower"  # 16 bits than float32 on a CPU (docs/performance.md)


def load(settings: ModelSettings, seed: int, lazy: bool = False) -> nn.Module:
    """The model as stored, or drawn from `seed`, in model.dtype, for evaluation. Raises UserError: it is unreadable."""
    folder, where = resolve(settings.path, settings.revision), f"model.path {settings.path}"
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    packed = config.get("quantization_config") or {}  # PyTorch's, of which mlx-lm reads some, or MLX's
    unnamed = "bitsandbytes" if "load_in_4bit" in packed else "an unnamed method"
    method = packed.get("quant_method") or ("quantization" not in config and packed and unnamed)
    mx.random.seed(seed)
    options: dict[str, Any] = {"lazy": True, "trust_remote_code": settings.trust_remote_code}
    try:
        if settings.random_init:
            with tempfile.TemporaryDirectory() as only_config:  # mlx-lm would read weights beside it
                shutil.copy(folder / "config.json", only_config)
                model, _ = load_model(Path(only_config), strict=False, **options)
        elif method == "bitsandbytes":
            raise ValueError("packed numbers would be taken for weights")
        else:
            model, _ = load_model(folder, **options)
    except FileNotFoundError:
        raise UserError(f"{where}: no model*.safetensors in the folder; model.random_init=true draws weights") from None
    except (Exception, SystemExit) as error:  # config.json may say anything, and every model's code trusts it
        kind = "" if isinstance(error, ValueError | RuntimeError) else f"{type(error).__name__}: "
        reason = f"{kind}{why_unreadable(folder, error)}"
        if method:
            remedy = "take its base, or one that `mlx_lm.convert -q` made"
            reason = f"it is quantised by {method}, for PyTorch ({reason}); {remedy}"
        raise UserError(f"{where}: mlx-lm cannot load it: {reason}") from None
    complete_module(model)
    if settings.attention_window is not None:
        _narrow(model, settings.attention_window, settings.path)
    if settings.dtype is not None:
        model.set_dtype(getattr(mx, settings.dtype))
    use_fast_layers(model)
    use_quick_recurrences(model)
    bounded(model)
    if not lazy:
        mx.eval(model.parameters())
    return model


def _narrow(model: nn.Module, window: int, path: str) -> None:
    """Lets the model attend to `window` tokens only. Raises UserError: a layer cannot, or has a wider window."""
    sizes = []
    for cache in make_prompt_cache(model):
        size = getattr(cache, "max_size", None)
        if type(cache) not in (KVCache, RotatingKVCache) or (size or 0) > window:
            layers = f"a {type(cache).__name__} of {size or 'all'} tokens"
            raise UserError(
                f"model.attention_window={window}: {path} has layers with {layers}; leave it out, or widen it"
            )
        sizes.append(size or window)
    layout_of(model).attention_window = window
    model.make_cache = lambda: [RotatingKVCache(max_size=size) for size in sizes]


class TableSizes(NamedTuple):
    """Rows of a model's tables: None where it has none that can be found; without positions any length will do."""

    tokens: int | None
    positions: int | None


def bounded(model: nn.Module) -> TableSizes:
    """The sizes of a model's tables. MLX checks no index: positions beyond the table, of padding, read its last row."""
    sizes = {id(p): int(p["weight"].shape[0]) for p in model.modules() if isinstance(p, EMBEDDINGS)}
    positions = {id(part) for name, part in model.named_modules() if name.rpartition(".")[2] == POSITION_TABLE}

    def clipped(part: nn.Module) -> nn.Module | None:
        last = sizes.get(id(part), 0) - 1
        wrap = lambda call: lambda self, indices: call(self, mx.clip(indices, 0, last))  # noqa: E731
        return with_methods(part, __call__=wrap) if id(part) in positions else None

    replace_modules(model, clipped)
    tokens = next((size for key, size in sizes.items() if key not in positions), None)
    return TableSizes(tokens, min((sizes[key] for key in positions), default=None))


@functools.lru_cache(8)
def table_sizes(settings: ModelSettings) -> TableSizes:
    """The sizes of a model's tables; its weights are not read. Raises UserError as `load`."""
    return bounded(load(settings, 0, lazy=True))


def load_reference(settings: ModelSettings, seed: int, lazy: bool = False) -> nn.Module:
    """The frozen model that the policy is compared with: another one, or the policy as training starts."""
    model = load(reference_settings(settings), seed, lazy)
    # Full training keeps the weights in another type.
    if settings.reference == "initial" and (settings.adapter is not None or settings.method == "full"):
        make_trainable(model, settings, seed)
    return model


def reference_settings(settings: ModelSettings) -> ModelSettings:
    """The settings of the reference model, as those of a policy."""
    if settings.reference == "initial":
        return settings
    changes = {"path": settings.reference, "adapter": None, "random_init": False}
    if settings.reference != settings.path:  # another repository has none of its commits
        changes["revision"] = None
    return settings.model_copy(update=changes)


@functools.cache  # hashing many gigabytes takes a while
def fingerprint(settings: ModelSettings, seed: int) -> str:
    """A digest of everything that the model's outputs depend on before training: files, seed, dtype and adapter."""
    folder = resolve(settings.path, settings.revision)
    window = "" if settings.attention_window is None else f" window {settings.attention_window}"
    widened = " full" * (settings.method == "full")
    digest = hashlib.sha256(f"{settings.dtype}{widened} {seed if settings.random_init else ''}{window}".encode())
    files = [folder / "config.json"] + ([] if settings.random_init else sorted(folder.glob("model*.safetensors")))
    if settings.adapter:
        adapter = Path(settings.adapter)
        is_peft = (adapter / PEFT_WEIGHTS).is_file()
        files += [adapter / ADAPTER_CONFIG, adapter / (PEFT_WEIGHTS if is_peft else ADAPTER_WEIGHTS)]
    for file in files:
        with file.open("rb") as stream:
            digest.update(hashlib.file_digest(stream, "sha256").digest())
    return digest.hexdigest()


class ComputeType(NamedTuple):
    """Whether weights stored in 16 bits are computed in float32 here, and what to say of it; "" where none are."""

    is_float32: bool = False
    note: str = ""


def compute_type(settings: ModelSettings) -> ComputeType:
    """The type that a model's and its reference's weights are computed in. Raises UserError: there is no such model."""
    if device() != "cpu" or settings.dtype is not None or settings.random_init:
        return ComputeType()
    folders = {resolve(each.path, each.revision) for each in (settings, reference_settings(settings))}
    try:
        files = [mx.load(str(path)) for folder in folders for path in folder.glob("model*.safetensors")]
    except (RuntimeError, ValueError):  # loading the model says what is wrong with the file
        return ComputeType()
    arrays = [array for file in files for array in file.values()]  # whose values are not read
    stored = next((SIXTEEN_BITS[array.dtype] for array in arrays if array.dtype in SIXTEEN_BITS), None)
    if stored is None:
        return ComputeType()
    needed = sum(array.nbytes * (2 if array.dtype in SIXTEEN_BITS else 1) for array in arrays)
    free, size = hardware.free_memory_bytes(), size_text(needed)
    if free is None or needed <= PART_OF_MEMORY * free:
        return ComputeType(True, f"weights stored in {stored} are computed in float32 (model.dtype={stored}: {SLOWER})")
    why = f"float32, which takes {size}, would be faster, but {size_text(free)} are free"
    return ComputeType(False, f"weights are computed in {stored}, {SLOWER}: {why} (model.dtype=float32 takes it)")
