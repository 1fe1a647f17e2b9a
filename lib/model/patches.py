"""The only file that changes other projects' insides.

- `scaled_dot_product_attention` of the model's file in mlx_lm.models: a cache that attends by itself (a stream of
  tokens, rows that share prompts) gets queries, keys and values. Until mlx-lm takes an attention object.
- `swiglu` of that file: MLX keeps four arrays as wide as the MLP for the backward pass, ours two; on a CPU it makes one
  exponential instead of three. Until MLX has a fused SwiGLU with a backward kernel.
- `gated_delta_update` of that file: mlx-lm trains token by token (mlx-lm#1206), we by MLX's kernel or by chunks;
  `ssm_update`, `rnn_scan`, `recurrent_gla`, Mamba's and RWKV-7's steps as well. Until mlx-lm trains so.

Read with mlx-lm 0.32.2; tests/test_forward.py and tests/test_families.py hold them to the originals. All else is
modules of a model's own tree, replaced by others of derived classes (`replace_modules`).
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Mapping
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models import (
    activations,
    bailing_hybrid,
    bailing_moe_linear,
    base,
    gated_delta,
    jamba,
    mamba,
    recurrent_gemma,
    rwkv7,
    ssm,
)

from lib.model import exponentials, recurrences
from lib.model.recurrences import gated_delta_rule, rwkv7_rule

# Names in the model's file.
PATCHED = ("scaled_dot_product_attention", "swiglu", "gated_delta_update", "ssm_update", "rnn_scan", "recurrent_gla")


def derived(module: nn.Module, kind: type[nn.Module]) -> nn.Module:
    """The same module, with its parameters and settings, as one of another class."""
    new: Any = dict.__new__(kind)
    vars(new).update(vars(module))
    dict.update(new, module)
    return new


def with_methods(
    module: nn.Module, attributes: Mapping[str, Any] | None = None, **make: Callable[[Any], Any]
) -> nn.Module:
    """The same module of a derived class: each method that it has becomes make(that method)."""
    plain = type(module)
    methods = {name: wrap(getattr(plain, name)) for name, wrap in make.items() if hasattr(plain, name)}
    content = {"__module__": plain.__module__, **(attributes or {}), **methods}
    return derived(module, type(plain.__name__, (plain,), content))


def complete_module(model: nn.Module) -> None:
    """Makes a model a module whose class forgot to, as recurrent_gemma's does: it could not be frozen."""
    if not hasattr(model, "_no_grad"):
        nn.Module.__init__(model)
        model.eval()


def replace_modules(model: nn.Module, replacement: Callable[[nn.Module], nn.Module | None]) -> None:
    """Puts other modules into a model's tree: replacement(module), unless that is None."""
    new: dict[int, nn.Module] = {}

    def of(part: Any) -> Any:
        if isinstance(part, nn.Module):
            if id(part) not in new:
                other = replacement(part)
                new[id(part)] = part if other is None else other  # an empty module is false
            return new[id(part)]
        if isinstance(part, list):
            part[:] = [of(each) for each in part]
        elif isinstance(part, dict):
            part.update({name: of(each) for name, each in part.items()})
        return part

    for module in model.modules():  # a list, made before
        for name, part in list(module.items()):
            if isinstance(part, nn.Module | list | dict) and not name.startswith("_"):
                dict.__setitem__(module, name, of(part))


def _replace_function(model: nn.Module, name: str, plain: Any, ours: Any) -> None:
    """In the Python modules in which the classes of a model were written."""
    files = {sys.modules[kind.__module__] for part in model.modules() for kind in type(part).__mro__[:-1]}
    for file in files - {base, activations, gated_delta}:
        if vars(file).get(name) is plain:
            vars(file)[name] = ours


def attend_by_cache(model: nn.Module) -> None:
    """Lets the attention of the model's family leave it to caches that attend by themselves; others are as before."""
    _replace_function(model, "scaled_dot_product_attention", base.scaled_dot_product_attention, _attention_or_cache)


@functools.wraps(base.scaled_dot_product_attention)
def _attention_or_cache(
    queries: mx.array, keys: mx.array, values: mx.array, cache: Any, *args: Any, **options: Any
) -> Any:
    if not hasattr(cache, "attend"):
        return base.scaled_dot_product_attention(queries, keys, values, cache, *args, **options)
    options |= dict(zip(("scale", "mask"), args, strict=False))  # gpt_oss hands scale on by position
    return cache.attend(queries, keys, values, **options)


def use_quick_recurrences(model: nn.Module) -> None:
    """Lets the model's family use lib/model/recurrences.py where mlx-lm would loop over several tokens."""
    _replace_function(model, "gated_delta_update", gated_delta.gated_delta_update, _gated_delta_or_loop)
    _replace_function(model, "ssm_update", ssm.ssm_update, recurrences.state_space_pieces)
    _replace_function(model, "rnn_scan", recurrent_gemma.rnn_scan, recurrences.gated_linear_unit)
    _replace_function(model, "recurrent_gla", bailing_moe_linear.recurrent_gla, bailing_hybrid.recurrent_gla)
    steps = lambda plain: lambda *args: plain(*args) if args[1].shape[1] == 1 else rwkv7_rule(*args[1:])  # noqa: E731

    def quick(part: nn.Module) -> nn.Module | None:
        if type(part) is rwkv7.Rwkv7TimeMixing:
            return with_methods(part, _wkv7=steps)
        if type(part) not in (mamba.MambaBlock, jamba.JambaMambaMixer):
            return None
        process = jamba.JambaMambaMixer._process_sequence  # the same, with a step of many tokens
        return with_methods(part, {"_process_sequence": process, "ssm_step": recurrences.selective_step})

    replace_modules(model, quick)


@functools.wraps(gated_delta.gated_delta_update)
def _gated_delta_or_loop(
    q: mx.array, k: mx.array, v: mx.array, a: mx.array, b: mx.array, *others: Any, **options: Any
) -> tuple[mx.array, mx.array]:
    options |= dict(zip(("A_log", "dt_bias", "state", "mask"), others, strict=False))
    has_kernel = options.get("use_kernel", True) and mx.metal.is_available()
    if has_kernel or q.shape[1] == 1 or options.get("mask") is not None:
        return gated_delta.gated_delta_update(q, k, v, a, b, **options)  # type: ignore[no-any-return]
    rate, bound = mx.exp(options["A_log"].astype(mx.float32)), options.get("lower_bound")
    shifted = a.astype(mx.float32) + options["dt_bias"]
    log_decay = -rate * nn.softplus(shifted) if bound is None else bound * mx.sigmoid(rate * shifted)
    beta = mx.sigmoid(b) * (2 if options.get("allow_neg_eigval") else 1)
    if (state := options.get("state")) is None:
        state = mx.zeros((len(q), *v.shape[2:], k.shape[-1]), mx.float32)
    return gated_delta_rule(q, k, v, log_decay, beta, state)


def use_lean_swiglu(model: nn.Module) -> None:
    """Lets the model's family use `lean_swiglu`, or `quick_swiglu` on a CPU: the same values."""
    _replace_function(
        model, "swiglu", activations.swiglu, quick_swiglu if mx.default_device() == mx.cpu else lean_swiglu
    )


@mx.custom_function
def lean_swiglu(gate: mx.array, x: mx.array) -> mx.array:
    """silu(gate) * x (SwiGLU, arXiv:2002.05202), which keeps nothing for the backward pass but its two inputs. The
    derivative's halves have no expression in common with each other or the forward pass: `mx.compile` would keep it."""
    return activations.swiglu(gate, x)


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
    sigmoid = exponentials.sigmoid(gate)
    return gate * sigmoid * x, sigmoid


@_swiglu_and_sigmoid.vjp
def _swiglu_and_sigmoid_vjp(primals: Any, cotangents: Any, outputs: Any) -> tuple[mx.array, mx.array]:
    (gate, x), dy, sigmoid = primals, cotangents[0], outputs[1]
    silu = gate * sigmoid
    return dy * x * (sigmoid + silu * (1 - sigmoid)), dy * silu


def quick_swiglu(gate: mx.array, x: mx.array) -> mx.array:
    """SwiGLU for a CPU, which is slow at exponentials: one for each unit, kept for the backward pass."""
    return _swiglu_and_sigmoid(gate, x)[0]
