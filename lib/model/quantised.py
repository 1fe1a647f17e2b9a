"""Frozen quantised layers, multiplied by as they are stored, or dequantised for one product: whichever is faster here.

For a token or two MLX's product with packed weights is best; for many it is several times faster to dequantise a
layer's weights, multiply by them and let them go (docs/performance.md). The backward pass dequantises again, so that no
more than one layer's weights are ever held.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.switch_layers import QuantizedSwitchLinear

from lib.model.layout import modules_outside_blocks
from lib.model.patches import derived, replace_modules
from lib.system.hardware import Device

# Tokens from which on weights are dequantised; of experts, tokens for each. On a CPU MLX multiplies by packed weights
# at 1 to 3 GFLOP/s. On CUDA the packed kernels for 8 tokens and more are compiled when they are first used, for minutes
# in all. On Metal nothing was measured.
DEQUANTISE_FROM: dict[Device, int] = {"cpu": 16, "cuda": 8, "metal": 512}


def device() -> Device:
    """What MLX computes on."""
    if mx.default_device() == mx.cpu:
        return "cpu"
    return "metal" if mx.metal.is_available() else "cuda"


class FastLinear(nn.QuantizedLinear):
    """A quantised linear layer."""

    held: Callable[[], mx.array] | None = None  # its weight while it is kept dequantised; an array would be a parameter

    def __call__(self, x: mx.array) -> mx.array:
        y = multiply(self, x)
        return y + self["bias"] if "bias" in self else y


class FastEmbedding(nn.QuantizedEmbedding):
    """A quantised embedding; as a head it multiplies as linear layers do."""

    held: Callable[[], mx.array] | None = None

    def as_linear(self, x: mx.array) -> mx.array:
        return multiply(self, x)


class FastExperts(QuantizedSwitchLinear):
    """A quantised layer of experts: all experts' weights are dequantised, or none. Shapes as mx.gather_qmm has them."""

    def __call__(self, x: mx.array, indices: mx.array, sorted_indices: bool = False) -> mx.array:
        y = self.multiply(x, indices, sorted_indices)
        return y + mx.expand_dims(self["bias"][indices], -2) if "bias" in self else y

    def multiply(self, x: mx.array, indices: mx.array, is_sorted: bool) -> mx.array:
        options: dict[str, Any] = {"rhs_indices": indices, "sorted_indices": is_sorted}
        # nvfp4 may have a scale for each expert besides; MLX dequantises with one for all.
        if not dequantises(self, indices.size) or self.global_scale is not None:
            options |= {**_stored(self), "transpose": True, "global_scale": self.global_scale}
            return mx.gather_qmm(x, self["weight"], **options)

        def by_dequantised(x: mx.array, after: mx.array) -> mx.array:
            return mx.gather_mm(x, dequantised(self, after).swapaxes(-1, -2), **options)

        @mx.custom_function
        def product(x: mx.array) -> mx.array:
            return by_dequantised(x, x)

        @product.vjp
        def product_vjp(x: mx.array, dy: mx.array, _: Any) -> mx.array:
            return mx.vjp(lambda x: by_dequantised(x, dy), [x], [dy])[1][0]

        return product(x)


FAST: dict[type[nn.Module], type[nn.Module]] = {
    nn.QuantizedLinear: FastLinear,
    nn.QuantizedEmbedding: FastEmbedding,
    QuantizedSwitchLinear: FastExperts,
}


def use_fast_layers(model: nn.Module) -> None:
    """Lets the model's quantised layers multiply the faster way: the same parameters by the same names."""
    replace_modules(model, fast_layer)


def fast_layer(layer: nn.Module) -> nn.Module | None:
    """A quantised layer of MLX's as one of ours; None of another module."""
    return derived(layer, FAST[type(layer)]) if type(layer) in FAST else None


def _stored(layer: nn.Module) -> dict[str, Any]:
    scales = {"scales": layer["scales"], "biases": layer.get("biases")}
    return {**scales, "group_size": layer.group_size, "bits": layer.bits, "mode": layer.mode}


def dequantised(layer: nn.Module, after: mx.array) -> mx.array:
    """W in the type of the product with `after`: [out, in], or [expert, out, in]; made once `after` is there: a
    compiled graph would else make it once for both passes, and keep those of all layers in between."""
    (weight,) = mx.depends([layer["weight"]], [after])
    scales, biases, dtype = layer["scales"], layer.get("biases"), after.dtype
    if layer.mode == "affine":
        dtype = mx.result_type(after.dtype, scales.dtype)
        scales, biases = scales.astype(dtype), biases.astype(dtype)
    return mx.dequantize(weight, scales, biases, layer.group_size, layer.bits, layer.mode, dtype=dtype)


def dequantises(layer: nn.Module, tokens: int) -> bool:
    """Whether so many rows are multiplied by dequantised weights. Of experts: times the experts that each goes to."""
    experts = layer["weight"].shape[0] if isinstance(layer, QuantizedSwitchLinear) else 1
    return tokens >= DEQUANTISE_FROM[device()] * experts


def multiply(layer: nn.Module, x: mx.array) -> mx.array:
    """x W^T of a FastLinear or FastEmbedding: [..., in] ➜ [..., out]."""
    if layer.held is not None:
        return x @ layer.held().T
    if not dequantises(layer, x.size // x.shape[-1]):
        return mx.quantized_matmul(x, layer["weight"], **_stored(layer), transpose=True)

    @mx.custom_function
    def product(x: mx.array) -> mx.array:
        return x @ dequantised(layer, x).T

    @product.vjp
    def product_vjp(x: mx.array, dy: mx.array, _: Any) -> mx.array:
        return (dy @ dequantised(layer, dy)).astype(x.dtype)

    return product(x)


@contextlib.contextmanager
def dequantised_once(model: nn.Module, tokens: int, after: mx.array) -> Iterator[None]:
    """Within it, layers outside of the model's blocks dequantise once for all products with so many tokens."""
    outside = (part for part in modules_outside_blocks(model) if isinstance(part, FastLinear | FastEmbedding))
    layers = [part for part in outside if "weight" in part and dequantises(part, tokens)]  # or another stage has it
    try:
        for layer in layers:
            weight = mx.stop_gradient(dequantised(layer, mx.stop_gradient(after)))
            layer.held = lambda weight=weight: weight
        yield
    finally:
        for layer in layers:
            layer.held = None


def matrix_for_gradient(linear: nn.Module, dy: mx.array, after: mx.array) -> mx.array | None:
    """W of a frozen linear layer, which passes on dy W, made after another array; None where that is made packed."""
    if type(linear) is nn.Linear:
        return linear.weight
    is_dequantised = isinstance(linear, FastLinear) and dequantises(linear, dy.size // dy.shape[-1])
    return dequantised(linear, after) if is_dequantised else None
