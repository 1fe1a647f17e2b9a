"""The model: loaded by mlx-lm, made trainable, asked for log-probabilities, saved in mlx-lm's layout.

A loaded model goes in and a changed model comes out; no model file ever hears of adapters, positions or ranks.
"""

from __future__ import annotations

import functools
import hashlib
import json
import math
import shutil
import sys
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx.utils import tree_flatten, tree_unflatten
from mlx_lm.models import activations
from mlx_lm.models.cache import KVCache, RotatingKVCache, make_prompt_cache
from mlx_lm.tuner.lora import LoRALinear
from mlx_lm.tuner.trainer import grad_checkpoint
from mlx_lm.tuner.utils import linear_to_lora_layers
from mlx_lm.utils import load_model, load_tokenizer

from lib import config
from lib.config import UserError
from lib.hub import resolve

WEIGHTS = "adapters.safetensors"
ADAPTER_CONFIG = "adapter_config.json"

Described = Mapping[str, tuple[tuple[int, ...], mx.Dtype]]  # name ➜ (shape, dtype)
Arrays = Iterable[tuple[str, mx.array | np.ndarray]]  # or the raw bytes


def load(settings: config.Model, seed: int, lazy: bool = False) -> nn.Module:
    """The model as stored, or drawn from `seed` with model.random_init, in model.dtype, in evaluation mode.

    Raises:
        UserError: files missing, or not a model that mlx-lm knows.
    """
    folder = resolve(settings.path, settings.revision)
    mx.random.seed(seed)
    try:
        if settings.random_init:
            with tempfile.TemporaryDirectory() as only_config:  # mlx-lm would read weights that lie beside it
                shutil.copy(folder / "config.json", only_config)
                model, _ = load_model(
                    Path(only_config), lazy=True, strict=False, trust_remote_code=settings.trust_remote_code
                )
        else:
            model, _ = load_model(folder, lazy=True, trust_remote_code=settings.trust_remote_code)
    except FileNotFoundError:
        raise UserError(
            f"model.path {settings.path}: no model*.safetensors in the folder (model.random_init=true draws new weights)"
        ) from None
    except (ValueError, KeyError, TypeError, RuntimeError) as error:
        raise UserError(f"model.path {settings.path}: mlx-lm cannot load it: {str(error).splitlines()[0]}") from None
    if settings.attention_window is not None:
        _narrow(model, settings.attention_window, settings.path)
    if settings.dtype is not None:
        model.set_dtype(getattr(mx, settings.dtype))
    if not lazy:
        mx.eval(model.parameters())
    return model


def _narrow(model: nn.Module, window: int, path: str) -> None:
    """Lets the model attend to `window` tokens only: lib/forward.py asks for it, and generation for such caches.

    Raises:
        UserError: it has layers that are no attention, or attend to a window of their own that is wider.
    """
    caches = make_prompt_cache(model)
    for cache in caches:
        if type(cache) not in (KVCache, RotatingKVCache):
            raise UserError(
                f"model.attention_window={window}: {path} has layers that keep a {type(cache).__name__}, not keys and values; leave it out"
            )
        if isinstance(cache, RotatingKVCache) and cache.max_size > window:
            raise UserError(
                f"model.attention_window={window}: {path} has layers with a window of {cache.max_size} tokens of their own; give no less than that"
            )
    sizes = [min(window, cache.max_size) if isinstance(cache, RotatingKVCache) else window for cache in caches]
    model.attention_window = window
    model.make_cache = lambda: [RotatingKVCache(max_size=size) for size in sizes]


def load_tokenizer_of(settings: config.Model) -> Any:
    """mlx-lm's tokenizer of the model's folder, or None where there is none.

    Raises:
        UserError: there are tokenizer files, but they cannot be loaded.
    """
    folder = resolve(settings.path, settings.revision)
    if not any(
        (folder / name).exists()
        for name in ("tokenizer.json", "tokenizer.model", "tokenizer_config.json", "vocab.json", "tiktoken.model")
    ):
        return None
    end = json.loads((folder / "config.json").read_text()).get("eos_token_id")
    try:
        return load_tokenizer(folder, {"trust_remote_code": settings.trust_remote_code}, eos_token_ids=end)
    except Exception as error:  # transformers raises whatever its parser met
        raise UserError(
            f"model.path {settings.path}: its tokenizer cannot be loaded: {str(error).splitlines()[0]}"
        ) from None


def vocabulary(settings: config.Model) -> dict[str, Any]:
    """The ids that the model knows: its vocab_size and its eos_token_id (the first, where it has several)."""
    stored = stored_config(settings)
    text = {**stored, **stored.get("text_config", {})}  # models that also see pictures keep these one level down
    end = text.get("eos_token_id")
    return {"vocab_size": text.get("vocab_size"), "eos_token_id": end[0] if isinstance(end, list) else end}


def stored_config(settings: config.Model) -> dict[str, Any]:
    """The model's config.json."""
    stored: dict[str, Any] = json.loads((resolve(settings.path, settings.revision) / "config.json").read_text())
    return stored


def load_reference(settings: config.Model, seed: int, lazy: bool = False) -> nn.Module:
    """The frozen model that the policy is compared with: another one, or the policy as training starts.

    Raises:
        UserError: it cannot be loaded.
    """
    if settings.reference != "initial":
        return load(reference_settings(settings), seed, lazy)
    model = load(settings, seed, lazy)
    if settings.adapter is not None or settings.method == "full":  # whose weights training keeps in another type
        make_trainable(model, settings, seed)
    return model


def reference_fingerprint(settings: config.Model, seed: int) -> str:
    """`fingerprint` of what `load_reference` loads."""
    return fingerprint(reference_settings(settings), seed)


def reference_settings(settings: config.Model) -> config.Model:
    """The settings of the reference model, as those of a policy."""
    if settings.reference == "initial":
        return settings
    return settings.model_copy(update={"path": settings.reference, "adapter": None, "random_init": False})


@functools.cache  # hashing many gigabytes takes a while
def fingerprint(settings: config.Model, seed: int) -> str:
    """A digest of everything that the model's outputs depend on before training: files, seed, dtype and adapter."""
    folder = resolve(settings.path, settings.revision)
    window = "" if settings.attention_window is None else f" window {settings.attention_window}"
    widened = " full" * (settings.method == "full")
    digest = hashlib.sha256(f"{settings.dtype}{widened} {seed if settings.random_init else ''}{window}".encode())
    files = [folder / "config.json"] + ([] if settings.random_init else sorted(folder.glob("model*.safetensors")))
    if settings.adapter:
        files += [Path(settings.adapter) / ADAPTER_CONFIG, Path(settings.adapter) / WEIGHTS]
    for file in files:
        with file.open("rb") as stream:
            digest.update(hashlib.file_digest(stream, "sha256").digest())
    return digest.hexdigest()


def make_trainable(model: nn.Module, settings: config.Model, seed: int) -> None:
    """Freezes the model and gives it adapters drawn from `seed`, or unfreezes its blocks for full training.

    What is trained is float32 whatever the model's type: an update of 1e-5 of a weight would vanish in bfloat16.

    Raises:
        UserError: no layer matches, or the adapter to start from does not fit.
    """
    blocks = settings.blocks or len(model.layers)
    if blocks > len(model.layers):
        raise UserError(f"model.blocks={blocks}, but {settings.path} has {len(model.layers)} blocks")
    model.freeze()
    _take_own_swiglu(model)
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
        options: dict[str, Any] = {"rank": settings.rank, "scale": settings.scale, "dropout": settings.dropout}
        if settings.keys is not None:
            options["keys"] = set(settings.keys)
        try:
            linear_to_lora_layers(model, blocks, options, use_dora=settings.method == "dora")
            _take_low_rank_linear(model)
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
            f"model.keys {list(settings.keys or [])}: no such layer in {settings.path}; its linear layers are {', '.join(keys)}"
        )
    if settings.adapter is not None:
        _load_adapter(model, settings)
    if settings.gradient_checkpointing:
        checkpoint_blocks(model)


class LowRankLinear(LoRALinear):
    """LoRA at nearly the price of the linear layer, in mlx-lm's parameters: `lora_a` [in, r] and `lora_b` [r, out].

    y = W x + scale B A x (LoRA, arXiv:2106.09685, equation 3), computed in the type of x from float32 A and B.
    """

    siblings: Siblings

    def __call__(self, x: mx.array) -> mx.array:
        return self.siblings.output_of(self, x)


class Siblings:
    """Low-rank layers that a block hands the same input, one after another: the first that is called computes all."""

    def __init__(self, layers: Sequence[LowRankLinear]):
        self.layers = list(layers)
        self.input: mx.array | None = None
        self.outputs: dict[int, mx.array] = {}  # by the layer's identity, until it asks

    def output_of(self, layer: LowRankLinear, x: mx.array) -> mx.array:
        """[..., in] ➜ [..., out]."""
        if x is not self.input or id(layer) not in self.outputs:
            self.input, self.outputs = x, dict(zip(map(id, self.layers), adapted(self.layers, x), strict=True))
        y = self.outputs.pop(id(layer))
        if not self.outputs:
            self.input = None
        return y


def adapted(layers: Sequence[LowRankLinear], x: mx.array) -> list[mx.array]:
    """What low-rank layers give for one input.

    The gradient is written out: the low-rank terms are added where the large products are made, the layers' A are one
    matrix, x A is kept rather than made again, and no gradient of the frozen W is ever asked for.
    """
    linears = [layer.linear for layer in layers]
    ends = np.cumsum([layer.lora_a.shape[1] for layer in layers]).tolist()[:-1]

    @mx.custom_function
    def products(x: mx.array, a: mx.array, *bs: mx.array) -> tuple[mx.array, ...]:
        low = x @ a
        lows = mx.split(low, ends, axis=1)
        return *(mx.addmm(linear(x), own, b) for linear, own, b in zip(linears, lows, bs, strict=True)), low

    @products.vjp
    def products_vjp(primals: Any, cotangents: Any, outputs: Any) -> tuple[mx.array, ...]:
        (x, a, *bs), dys, low = primals, cotangents[:-1], outputs[-1]
        d_low = mx.concatenate([dy @ b.T for dy, b in zip(dys, bs, strict=True)], axis=1)
        dx = _input_gradient(linears, x, dys)
        d_bs = [own.T @ dy for own, dy in zip(mx.split(low, ends, axis=1), dys, strict=True)]
        return mx.addmm(dx, d_low, a.T), x.T @ d_low, *d_bs

    a = mx.concatenate([layer.lora_a for layer in layers], axis=1).astype(x.dtype)
    outputs = products(
        x.reshape(-1, x.shape[-1]), a, *((layer.scale * layer.lora_b).astype(x.dtype) for layer in layers)
    )
    return [y.reshape(*x.shape[:-1], -1) for y in outputs[:-1]]


def _input_gradient(linears: Sequence[nn.Module], x: mx.array, dys: Sequence[mx.array]) -> mx.array:
    """The sum of the gradients that frozen linear layers pass on to their common input."""
    total = None
    for linear, dy in zip(linears, dys, strict=True):
        if total is not None and type(linear) is nn.Linear:
            total = mx.addmm(total, dy, linear.weight)
        else:
            _, (dx,) = mx.vjp(linear, [x], [dy])
            total = dx if total is None else total + dx
    return total


# What mlx-lm's blocks call their layers that read the same input.
SIBLINGS = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))


def _take_low_rank_linear(model: nn.Module) -> None:
    """Puts LowRankLinear in the place of mlx-lm's LoRALinear, except where dropout stands between x and A."""
    for module in model.modules():
        if type(module) is LoRALinear and module.dropout._p_1 == 1:
            module.__class__ = LowRankLinear  # the same parameters by the same names, another way to multiply them
            module.siblings = Siblings([module])
    for parent in model.modules():
        for names in SIBLINGS:
            layers = [parent[name] for name in names if isinstance(parent.get(name), LowRankLinear)]
            for layer in layers:
                layer.siblings = layers[0].siblings
            if layers:
                layers[0].siblings.layers = layers


_swiglu = activations.swiglu


@mx.custom_function
def lean_swiglu(gate: mx.array, x: mx.array) -> mx.array:
    """silu(gate) * x (SwiGLU, arXiv:2002.05202), which keeps nothing for the backward pass but its two inputs.

    The derivative, in float32, is written so that its halves have no expression in common with each other or with
    the forward pass: `mx.compile` would make such a one once, and keep it as an array as large as the MLP is wide.
    """
    return _swiglu(gate, x)


@lean_swiglu.vjp
def _lean_swiglu_vjp(primals: Any, cotangent: mx.array, _: Any) -> tuple[mx.array, mx.array]:
    gate, x = primals
    half = (0.5 * gate).astype(mx.float32)
    t = mx.tanh(half)  # sigmoid(gate) = (1 + t) / 2
    d_gate = (cotangent * x).astype(mx.float32) * (0.5 * (1 + t) * (1 + half * (1 - t)))
    wide = gate.astype(mx.float32)
    d_x = cotangent.astype(mx.float32) * (wide / (1 + mx.exp(-wide)))
    return d_gate.astype(gate.dtype), d_x.astype(x.dtype)


@mx.custom_function
def _swiglu_and_sigmoid(gate: mx.array, x: mx.array) -> tuple[mx.array, mx.array]:
    sigmoid = mx.sigmoid(gate)
    return gate * sigmoid * x, sigmoid


@_swiglu_and_sigmoid.vjp
def _swiglu_and_sigmoid_vjp(primals: Any, cotangents: Any, outputs: Any) -> tuple[mx.array, mx.array]:
    (gate, x), dy, sigmoid = primals, cotangents[0], outputs[1]
    silu = gate * sigmoid
    return dy * x * (sigmoid + silu * (1 - sigmoid)), dy * silu


def quick_swiglu(gate: mx.array, x: mx.array) -> mx.array:
    """SwiGLU for a CPU, which is slow at exponentials: one for each unit, kept for the backward pass."""
    return _swiglu_and_sigmoid(gate, x)[0]


def _take_own_swiglu(model: nn.Module) -> None:
    """Lets the model's family use `lean_swiglu`, or `quick_swiglu` on a CPU: the same values."""
    ours = quick_swiglu if mx.default_device() == mx.cpu else lean_swiglu
    for module in {sys.modules[type(part).__module__] for part in model.modules()}:
        if getattr(module, "swiglu", None) is _swiglu:
            module.swiglu = ours  # type: ignore[attr-defined]


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
    model: nn.Module, settings: config.Model, folder: Path, described: Described | None = None, arrays: Arrays = ()
) -> None:
    """Writes the trained parameters in mlx-lm's adapter layout: `mlx_lm.load(path, adapter_path=folder)` reads it.

    Args:
        described, arrays: where the model is a part of one, names, shapes and dtypes of the whole, and in that order
            the arrays; one at a time lies in memory.
    """
    if described is None:
        own = sorted(trainable(model).items())
        described, arrays = {name: (array.shape, array.dtype) for name, array in own}, own
    write_arrays(folder / WEIGHTS, described, arrays)
    (folder / ADAPTER_CONFIG).write_text(json.dumps(adapter_config(model, settings), indent=2) + "\n")


def write_arrays(path: Path, described: Described, arrays: Arrays) -> None:
    """A safetensors file, written array by array: the whole need never lie in memory.

    Raises:
        OSError: the disk is full or not writable.
    """
    header: dict[str, Any] = {"__metadata__": {"format": "mlx"}}
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
    """Reads trained parameters into a model that `make_trainable` prepared alike; adapters may have another rank (a stack).

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
        loaded = mx.load(str(folder / WEIGHTS))
    except (RuntimeError, OSError) as error:
        raise UserError(f"{where} {folder}: {WEIGHTS} cannot be read: {str(error).splitlines()[0]}") from None
    for name in sorted(wanted.keys() | loaded.keys()):
        if name not in loaded or name not in wanted:
            raise UserError(
                f"{where} {folder} does not fit the model: {name} is only in the {'model' if name in wanted else 'adapter'}"
            )
        if _but_rank(name, loaded[name].shape) != _but_rank(name, wanted[name][0]):
            raise UserError(
                f"{where} {folder} does not fit the model: {name} has shape {loaded[name].shape}, the model wants {wanted[name][0]}"
            )
    return {name: array.astype(wanted[name][1]) for name, array in loaded.items()}


def adapter_rank(model: nn.Module) -> int | None:
    """The rank of the model's LoRA layers, or None where it has none."""
    ranks = (array.shape[_rank_axis(name, array.ndim)] for name, array in trainable(model).items() if ".lora_" in name)
    return next(ranks, None)


def set_adapter_rank(model: nn.Module, rank: int) -> None:
    """Gives LoRA's factors another rank; they are zero until they are loaded."""
    changed = []
    for name, array in trainable(model).items():
        if ".lora_" in name:
            shape = list(array.shape)
            shape[_rank_axis(name, array.ndim)] = rank
            changed.append((name, mx.zeros(shape, array.dtype)))
    model.update(tree_unflatten(changed))


def _rank_axis(name: str, dimensions: int) -> int:
    """lora_a is [in, r] and lora_b [r, out]; of a layer of experts [E, r, in] and [E, out, r]."""
    return -1 if name.endswith(".lora_a") == (dimensions == 2) else -2


def _but_rank(name: str, shape: tuple[int, ...]) -> tuple[int, ...]:
    """The shape, without the rank of LoRA's factors."""
    if ".lora_" not in name:
        return shape
    axis = _rank_axis(name, len(shape)) % len(shape)
    return shape[:axis] + shape[axis + 1 :]


def adapter_config(model: nn.Module, settings: config.Model) -> dict[str, Any]:
    rank = adapter_rank(model) or settings.rank
    parameters: dict[str, Any] = {"rank": rank, "scale": settings.scale, "dropout": settings.dropout}
    if settings.keys is not None:
        parameters["keys"] = list(settings.keys)
    return {
        "fine_tune_type": settings.method,
        "model": settings.path,
        "num_layers": settings.blocks or len(model.layers),
        "lora_parameters": parameters,
    }


def _load_adapter(model: nn.Module, settings: config.Model) -> None:
    folder = Path(settings.adapter or "")
    try:
        stored = json.loads((folder / ADAPTER_CONFIG).read_text())
    except (OSError, json.JSONDecodeError) as error:
        raise UserError(
            f"model.adapter {folder}: {ADAPTER_CONFIG} cannot be read ({error}); give a folder that mlx-lm or a run saved"
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
