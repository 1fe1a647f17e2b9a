"""SwiGLU that keeps less for the backward pass."""

from __future__ import annotations

import sys
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models import activations

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


def use_own_swiglu(model: nn.Module) -> None:
    """Lets the model's family use `lean_swiglu`, or `quick_swiglu` on a CPU: the same values."""
    ours = quick_swiglu if mx.default_device() == mx.cpu else lean_swiglu
    for module in {sys.modules[type(part).__module__] for part in model.modules()}:
        if getattr(module, "swiglu", None) is _swiglu:
            module.swiglu = ours  # type: ignore[attr-defined]
