"""How a backend draws tokens: as mlx-lm does, and without a new kernel for every number that a client thinks of.

mlx-lm compiles its samplers with a request's temperature, top_p and min_p as constants. Each new value costs all that
are generated half a second or more, and the kernel stays in memory and on the disk. As arrays they are inputs.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import mlx.core as mx
from mlx_lm import sample_utils

Sampler = Callable[[mx.array], mx.array]


def make_sampler(temp: float = 0.0, top_p: float = 0.0, min_p: float = 0.0, top_k: int = 0, **_: object) -> Sampler:
    """mlx-lm's `make_sampler`, without xtc, which the gateway takes from no client.

    Returns:
        Of log-probabilities [B, V] the tokens drawn, int [B].
    """
    if temp == 0:
        return sample_utils.greedy_sampler
    temperature, least, log_min_p = mx.array(temp), mx.array(top_p), mx.array(math.log(min_p) if min_p else 0.0)

    def sampler(logprobs: mx.array) -> mx.array:
        if 0 < top_p < 1:
            logprobs = sample_utils.apply_top_p(logprobs, least)
        if min_p:
            is_unlikely = logprobs < mx.max(logprobs, axis=-1, keepdims=True) + log_min_p
            logprobs = mx.where(is_unlikely, -mx.inf, logprobs)
        if top_k > 0:
            others = mx.argpartition(-logprobs, kth=top_k - 1, axis=-1)[..., top_k:]
            logprobs = mx.put_along_axis(logprobs, others, mx.array(-mx.inf, logprobs.dtype), axis=-1)
        return sample_utils.categorical_sampling(logprobs, temperature)

    return sampler
