"""LoRA layers that cost little more than the linear layers that they adapt."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx_lm.tuner.dora import DoRALinear
from mlx_lm.tuner.lora import LoRALinear

from lib.model.layout import ModelLayout, layout_of
from lib.model.patches import derived, replace_modules
from lib.model.quantised import FastLinear, dequantised, matrix_for_gradient, multiply

# mlx-lm's names of layers that read the same input.
SIBLINGS = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))


class LowRankLinear(LoRALinear):
    """LoRA that costs little more than the linear layer, with mlx-lm's parameters: `lora_a` [in, r], `lora_b` [r, out].
    y = W x + scale B A x (LoRA, arXiv:2106.09685, equation 3), computed in the type of x from float32 A and B."""

    siblings: Siblings
    index = 0  # among them

    def __call__(self, x: mx.array) -> mx.array:
        return self.siblings.output_of(self, x)


class Siblings:
    """Low-rank layers that a block hands the same input, one after another: the first that is called computes all."""

    def __init__(self, layers: Sequence[LowRankLinear]):
        self.layers = list(layers)
        self.input: mx.array | None = None
        self.outputs: dict[int, mx.array] = {}  # by the layer's index, until it is called

    def output_of(self, layer: LowRankLinear, x: mx.array) -> mx.array:
        """[..., in] ➜ [..., out]."""
        self.layers[layer.index] = layer  # a copy of it may have taken its place in the model
        if x is not self.input or layer.index not in self.outputs:
            self.input, self.outputs = x, dict(enumerate(low_rank_outputs(self.layers, x)))
        y = self.outputs.pop(layer.index)
        if not self.outputs:
            self.input = None
        return y


def low_rank_outputs(layers: Sequence[LowRankLinear], x: mx.array) -> list[mx.array]:
    """The outputs of low-rank layers for one input: [..., in] ➜ [..., out] each. The gradient is written out, the
    layers' A are one matrix, and (x A)^T, [r of all layers, tokens], is kept, whose rows are views."""
    linears = [layer.linear for layer in layers]
    ends = np.cumsum([layer.lora_a.shape[1] for layer in layers]).tolist()[:-1]

    @mx.custom_function
    def products(x: mx.array, a: mx.array, *bs: mx.array) -> tuple[mx.array, ...]:
        low = a @ x.T
        ys: list[mx.array] = []
        for linear, rows, b in zip(linears, mx.split(low, ends), bs, strict=True):
            # One after another: of quantised layers no two weights are dequantised at a time.
            inputs = mx.depends([x], ys[-1:])[0] if ys and isinstance(linear, FastLinear) else x
            ys.append(mx.addmm(linear(inputs), rows.T, b))
        return *ys, low

    @products.vjp
    def products_vjp(primals: Any, cotangents: Any, outputs: Any) -> tuple[mx.array, ...]:
        (x, a, *bs), dys, low = primals, cotangents[:-1], outputs[-1]
        d_low = mx.concatenate([b @ dy.T for dy, b in zip(dys, bs, strict=True)])
        dx = _input_gradient(linears, x, dys)
        d_bs = [rows @ dy for rows, dy in zip(mx.split(low, ends), dys, strict=True)]
        return mx.addmm(dx, d_low.T, a), d_low @ x, *d_bs

    a = mx.concatenate([layer.lora_a.T for layer in layers]).astype(x.dtype)
    bs = [(layer.scale * layer.lora_b).astype(x.dtype) for layer in layers]
    outputs = products(x.reshape(-1, x.shape[-1]), a, *bs)
    return [y.reshape(*x.shape[:-1], -1) for y in outputs[:-1]]


def _input_gradient(linears: Sequence[nn.Module], x: mx.array, dys: Sequence[mx.array]) -> mx.array:
    total = None
    for linear, dy in zip(linears, dys, strict=True):
        weight = matrix_for_gradient(linear, dy, after=dy if total is None else total)
        if weight is not None:
            total = dy @ weight if total is None else mx.addmm(total, dy, weight)
        else:
            _, (dx,) = mx.vjp(linear, [x], [dy])
            total = dx if total is None else total + dx
    return total


class DoRA(DoRALinear):
    """mlx-lm's, with the same parameters; no weight made for it is kept. y = m (W + scale (A B)^T) x / |W + scale (A
    B)^T| (arXiv:2402.09353, equation 5), where the norm, of each row, is a constant in the gradient (4.3)."""

    def __call__(self, x: mx.array) -> mx.array:
        linear = self.linear
        low = (self.dropout(x) @ self.lora_a) @ self.lora_b
        y = multiply(linear, x) if isinstance(linear, FastLinear) else x @ linear.weight.T
        y = y + (self.scale * low).astype(x.dtype)
        y = (self.m / mx.sqrt(self.squares(x))).astype(x.dtype) * y
        return y + linear.bias if "bias" in linear else y

    def squares(self, after: mx.array) -> mx.array:
        """|W + scale (A B)^T|^2 of each row: [out], float32. Made once `after` is there: MLX would make many early."""
        linear = self.linear
        is_quantised = isinstance(linear, FastLinear)
        weight = dequantised(linear, after) if is_quantised else mx.depends([linear.weight], [after])[0]
        adapted = weight + (self.scale * self.lora_b.T) @ self.lora_a.T
        return mx.stop_gradient(mx.square(adapted.astype(mx.float32)).sum(axis=1))


class TokenDropout(nn.Dropout):
    """Dropout whose mask follows from the step, the row and the token, by the keys in the model's layout, and from the
    layer: so not from how rows are laid out, nor over which ranks; of experts, from their order in a micro-batch, too.
    Where there are no keys, the mask is MLX's next one."""

    def __init__(self, p: float, layer: str, layout: ModelLayout):
        super().__init__(p)
        self._salt, self._layout = zlib.crc32(layer.encode()), layout
        self._size, self._part = 0, slice(None)  # of the inputs, where a rank sees a part of them

    def __call__(self, x: mx.array) -> mx.array:
        if self._p_1 == 1 or not self.training:
            return x
        keys, size, width = self._layout.token_keys, self._size or x.shape[-1], x.shape[-1]
        rows, rest = divmod(x.size // width, 1 if keys is None else len(keys))  # of a token, among experts
        if keys is None or rest or not rows:
            mask = mx.random.bernoulli(self._p_1, (x.size // width, size))
        else:
            salted = keys ^ mx.array([self._salt, 0], mx.uint32)
            mask = mx.vmap(lambda key: mx.random.bernoulli(self._p_1, (rows * size,), key=key))(salted)
        mask = mask.reshape(-1, size)[:, self._part]
        return (1 / self._p_1) * mask.reshape(x.shape) * x


def use_low_rank_linear(model: nn.Module) -> None:
    """Replaces mlx-lm's LoRALinear without dropout, its DoRALinear and its dropout by ours, of the same parameters."""
    layers, layout = {id(module): name for name, module in model.named_modules()}, layout_of(model)

    def of_tokens(module: nn.Module) -> nn.Module | None:
        is_used = type(module) is nn.Dropout and module._p_1 < 1
        return TokenDropout(1 - module._p_1, layers[id(module)], layout) if is_used else None

    def ours(module: nn.Module) -> nn.Module | None:
        if type(module) is DoRALinear:
            linear, rank = module.linear, module.lora_a.shape[1]
            width: int = linear.weight.shape[-1]
            if isinstance(linear, nn.QuantizedLinear):  # numbers of any bits, packed in words of 32
                width = width * 32 // linear.bits
            if module.lora_a.shape[0] != width:  # mlx-lm's arithmetic is that of 2, 4 and 8 bits
                module.lora_a = mx.random.uniform(-(width**-0.5), width**-0.5, (width, rank))
            return derived(module, DoRA)
        if type(module) is LoRALinear and module.dropout._p_1 == 1:
            layer = derived(module, LowRankLinear)
            layer.siblings = Siblings([layer])
            return layer
        return None

    replace_modules(model, of_tokens)
    replace_modules(model, ours)
    for parent in model.modules():
        for names in SIBLINGS:
            siblings = Siblings([parent[name] for name in names if isinstance(parent.get(name), LowRankLinear)])
            for index, layer in enumerate(siblings.layers):
                layer.siblings, layer.index = siblings, index
