"""Frozen quantised layers, multiplied by as they are stored, or dequantised for one product: whichever is faster here.

MLX multiplies by packed weights directly (`mx.quantized_matmul`). That reads little, which is best for a token or two.
With many tokens it is several times faster to dequantise a layer's weights, multiply by them and let them go
(docs/performance.md has figures). From how many tokens on, `make calibrate` measures on each host for each shape.

Both ways compute x W^T with the same W, and their gradients dy W. The backward pass dequantises again, so that no more
than one layer's weights are ever held.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.switch_layers import QuantizedSwitchLinear

from lib.model.layout import modules_outside_blocks
from lib.model.patches import derived, replace_modules
from lib.model.quantised_products import Product, dequantise_from
from lib.system.hardware import Device

# ---- Layers


class QuantisedLinear(nn.QuantizedLinear):
    """MLX's, with the same parameters."""

    held: _Held | None = None

    def __call__(self, x: mx.array) -> mx.array:
        y = multiply(self, x)
        return y + self["bias"] if "bias" in self else y


class QuantisedEmbedding(nn.QuantizedEmbedding):
    """MLX's, with the same parameters; as a head it multiplies as linear layers do."""

    held: _Held | None = None

    def as_linear(self, x: mx.array) -> mx.array:
        return multiply(self, x)


class QuantisedExperts(QuantizedSwitchLinear):
    """mlx-lm's, with the same parameters. All experts' weights are dequantised, if any are."""

    def __call__(self, x: mx.array, indices: mx.array, sorted_indices: bool = False) -> mx.array:
        y = _multiply_experts(self, x, indices, sorted_indices)
        return y + mx.expand_dims(self["bias"][indices], -2) if "bias" in self else y


Quantised = QuantisedLinear | QuantisedEmbedding
OURS: dict[type[nn.Module], type[nn.Module]] = {
    nn.QuantizedLinear: QuantisedLinear,
    nn.QuantizedEmbedding: QuantisedEmbedding,
    QuantizedSwitchLinear: QuantisedExperts,
}


def use_own_layers(model: nn.Module) -> None:
    """Lets the model's quantised layers multiply the faster way: the same parameters by the same names."""
    replace_modules(model, own_layer)


def own_layer(layer: nn.Module) -> nn.Module | None:
    """A quantised layer of MLX's as one of ours; None of another module."""
    return derived(layer, OURS[type(layer)]) if type(layer) in OURS else None


def product_of(layer: nn.Module, dtype: mx.Dtype) -> Product:
    """The kind of product that a quantised layer makes with inputs of this type."""
    return _product(layer["weight"].shape, layer.bits, layer.group_size, layer.mode, dtype)


@functools.cache
def _product(packed_shape: tuple[int, ...], bits: int, group_size: int, mode: str, dtype: mx.Dtype) -> Product:
    *experts, outputs, inputs = packed_shape
    name = str(dtype).removeprefix("mlx.core.")
    return Product(inputs * 32 // bits, outputs, experts[0] if experts else 0, bits, group_size, mode, name)


def layer_of(product: Product) -> QuantisedLinear | QuantisedExperts:
    """A layer that makes such products, with weights drawn at random."""
    inputs, outputs, group_size, bits = product.inputs, product.outputs, product.group_size, product.bits
    layer: QuantisedLinear | QuantisedExperts
    if product.experts:
        layer = QuantisedExperts(inputs, outputs, product.experts, False, group_size, bits, product.mode)
    else:
        layer = QuantisedLinear(inputs, outputs, False, group_size, bits, product.mode)
    layer.set_dtype(getattr(mx, product.dtype))
    mx.eval(layer.parameters())
    return layer


def products_of(model: nn.Module) -> list[Product]:
    """The kinds of products that the model's quantised layers make, each once, in the model's order."""
    # A stage of a pipeline has layers of other stages, without their weights.
    kinds = Quantised | QuantisedExperts
    layers = [module for module in model.modules() if isinstance(module, kinds) and "weight" in module]
    return list(dict.fromkeys(product_of(layer, _dtype_of(layer)) for layer in layers))


def _dtype_of(layer: nn.Module) -> mx.Dtype:
    """The type of what comes in, as far as the weights tell."""
    scales: mx.array = layer["scales"]
    return scales.dtype if mx.issubdtype(scales.dtype, mx.floating) else mx.bfloat16


def device() -> Device:
    """What MLX computes on."""
    if mx.default_device() == mx.cpu:
        return "cpu"
    return "metal" if mx.metal.is_available() else "cuda"


# ---- Products


def packed(layer: nn.Module, x: mx.array, transpose: bool = True) -> mx.array:
    """x W^T (x W without `transpose`) by MLX's product with packed weights."""
    return mx.quantized_matmul(
        x,
        layer["weight"],
        scales=layer["scales"],
        biases=layer.get("biases"),
        transpose=transpose,
        group_size=layer.group_size,
        bits=layer.bits,
        mode=layer.mode,
    )


def dequantised(layer: nn.Module, after: mx.array) -> mx.array:
    """W as `after` is multiplied by it, in its type: [out, in], or [expert, out, in].

    Made once `after` is there, and for it alone. A compiled graph would else make equal weights once, for the forward
    and the backward pass, and keep those of all layers in between.
    """
    (weight,) = mx.depends([layer["weight"]], [after])
    scales, biases, dtype = layer["scales"], layer.get("biases"), after.dtype
    if layer.mode == "affine":
        dtype = mx.result_type(after.dtype, scales.dtype)
        scales, biases = scales.astype(dtype), biases.astype(dtype)
    return mx.dequantize(weight, scales, biases, layer.group_size, layer.bits, layer.mode, dtype=dtype)


def dequantises(layer: nn.Module, tokens: int, dtype: mx.Dtype) -> tuple[bool, bool]:
    """Whether so many rows of this type are multiplied by dequantised weights, and their gradient as well.

    tokens: of experts, times the experts that each goes to.
    """
    return dequantise_from(product_of(layer, dtype), device())[0].reached_by(tokens)


def multiply(layer: Quantised, x: mx.array) -> mx.array:
    """x W^T: [..., in] ➜ [..., out]."""
    if layer.held is not None:
        return x @ layer.held.weight.T
    forward, backward = dequantises(layer, x.size // x.shape[-1], x.dtype)
    if not (forward or backward):
        return packed(layer, x)

    @mx.custom_function
    def product(x: mx.array) -> mx.array:
        return x @ dequantised(layer, x).T if forward else packed(layer, x)

    @product.vjp
    def product_vjp(x: mx.array, dy: mx.array, _: Any) -> mx.array:
        dx = dy @ dequantised(layer, dy) if backward else packed(layer, dy, transpose=False)
        return dx.astype(x.dtype)

    return product(x)


def _multiply_experts(layer: QuantisedExperts, x: mx.array, indices: mx.array, is_sorted: bool) -> mx.array:
    """x of each token by the W^T of each of its experts; shapes as mx.gather_qmm has them."""
    forward, backward = dequantises(layer, indices.size, x.dtype)

    def by_packed(x: mx.array) -> mx.array:
        return mx.gather_qmm(
            x,
            layer["weight"],
            layer["scales"],
            layer.get("biases"),
            rhs_indices=indices,
            transpose=True,
            group_size=layer.group_size,
            bits=layer.bits,
            mode=layer.mode,
            global_scale=layer.global_scale,
            sorted_indices=is_sorted,
        )

    def by_dequantised(x: mx.array, after: mx.array) -> mx.array:
        weight = dequantised(layer, after).swapaxes(-1, -2)
        return mx.gather_mm(x, weight, rhs_indices=indices, sorted_indices=is_sorted)

    # nvfp4 may have a scale for each expert besides; MLX dequantises with one for all.
    if not (forward or backward) or layer.global_scale is not None:
        return by_packed(x)

    @mx.custom_function
    def product(x: mx.array) -> mx.array:
        return by_dequantised(x, x) if forward else by_packed(x)

    @product.vjp
    def product_vjp(x: mx.array, dy: mx.array, _: Any) -> mx.array:
        gradient = (lambda x: by_dequantised(x, dy)) if backward else by_packed
        return mx.vjp(gradient, [x], [dy])[1][0]

    return product(x)


# ---- One weight for several products


@dataclass(frozen=True)
class _Held:
    """A dequantised weight; an array as a module's attribute would be one of its parameters."""

    weight: mx.array


@contextlib.contextmanager
def dequantised_once(model: nn.Module, tokens: int, after: mx.array) -> Iterator[None]:
    """Within it, layers outside of the model's blocks dequantise their weights once, and not for each product.

    For a head that makes the logits of so many tokens in pieces. Where it would not dequantise, nothing changes.
    """
    layers = [
        module
        for module in modules_outside_blocks(model)
        if isinstance(module, Quantised)
        and "weight" in module  # else another stage of a pipeline has it
        and all(dequantises(module, tokens, after.dtype))
    ]
    try:
        for layer in layers:
            layer.held = _Held(mx.stop_gradient(dequantised(layer, mx.stop_gradient(after))))
        yield
    finally:
        for layer in layers:
            layer.held = None


def matrix_for_gradient(linear: nn.Module, dy: mx.array, after: mx.array) -> mx.array | None:
    """W, where dy W [..., in] is the gradient that a frozen linear layer passes on; None where that is made packed.

    after: what a dequantised W waits for.
    """
    if type(linear) is nn.Linear:
        weight: mx.array = linear.weight
        return weight
    is_dequantised = isinstance(linear, QuantisedLinear) and dequantises(linear, dy.size // dy.shape[-1], dy.dtype)[1]
    return dequantised(linear, after) if is_dequantised else None
