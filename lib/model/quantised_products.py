"""Whether a product with quantised weights is made with them as they are packed, or dequantised: a decision by tokens.

`make calibrate` measures on each host, for each shape, from how many tokens on it is faster to dequantise the weights
first; where nothing was measured a rule by tokens stands in. lib/model/quantised.py makes the products.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from dataclasses import dataclass

from pydantic import NonNegativeInt, PositiveInt

from lib.system.hardware import Device

# Tokens from which on weights are dequantised where nothing was measured; of experts, tokens for each. On a CPU MLX
# multiplies by packed weights at 1 to 3 GFLOP/s, and to dequantise one costs no more than some ten such products. On
# CUDA the packed kernels for 8 tokens and more are compiled when they are first used, for minutes in all. On Metal
# none was measured: packed products are near plain ones, so that it takes many tokens to pay for the bytes moved.
DEFAULT_TOKENS: dict[Device, int] = {"cpu": 16, "cuda": 8, "metal": 512}


@dataclass(frozen=True)
class Product:
    """What decides how fast a product with quantised weights is, besides the tokens."""

    inputs: PositiveInt
    outputs: PositiveInt
    experts: NonNegativeInt  # 0: not a layer of experts
    bits: PositiveInt
    group_size: PositiveInt
    mode: str  # of the quantisation, by MLX's names: affine, mxfp4, nvfp4, mxfp8
    dtype: str  # of what the weights are multiplied with, e.g. "bfloat16"

    @property
    def kind(self) -> tuple[int, int, int, str, str]:
        """All but the dimensions of the weights."""
        return self.experts, self.bits, self.group_size, self.mode, self.dtype

    @property
    def size(self) -> int:
        """Numbers in one weight."""
        return self.inputs * self.outputs


@dataclass(frozen=True)
class DequantiseFrom:
    """Tokens from which on weights are dequantised, in either pass; None: never.

    Of a layer of experts: tokens times the experts that each goes to.
    """

    forward: PositiveInt | None
    backward: PositiveInt | None

    def reached_by(self, tokens: int) -> tuple[bool, bool]:
        """Whether so many tokens are enough, in the forward and in the backward pass."""
        forward, backward = ((limit is not None and tokens >= limit) for limit in (self.forward, self.backward))
        return forward, backward


ALWAYS, NEVER = DequantiseFrom(1, 1), DequantiseFrom(None, None)
_measured: dict[Product, DequantiseFrom] = {}


def go_by(measured: Mapping[Product, DequantiseFrom]) -> None:
    """Sets what was measured on this host. All of this process's products go by it from then on."""
    _measured.clear()
    _measured.update(measured)
    dequantise_from.cache_clear()


@functools.cache  # every layer asks for every token that is generated
def dequantise_from(product: Product, device: Device) -> tuple[DequantiseFrom, bool]:
    """When to dequantise; and whether that was measured here, with weights of this kind and the nearest size."""
    alike = [each for each in _measured if each.kind == product.kind]
    if not alike:
        tokens = DEFAULT_TOKENS[device] * max(1, product.experts)
        return DequantiseFrom(tokens, tokens), False
    nearest = min(alike, key=lambda each: (abs(math.log(each.size / product.size)), each != product, each.inputs))
    return _measured[nearest], True


def faster_from(packed: Mapping[int, float], dequantised: Mapping[int, float]) -> int | None:
    """The least of the measured numbers of tokens from which on dequantising was faster; None: of none.

    packed, dequantised: seconds by tokens.
    """
    least = None
    for tokens in sorted(packed, reverse=True):
        if dequantised[tokens] >= packed[tokens]:
            break
        least = tokens
    return least
