"""Tokens drawn from logits by numbers that were drawn before: who draws, and in which batch, changes nothing."""

from __future__ import annotations

import math
from collections.abc import Sequence

import mlx.core as mx
import numpy as np

# The logarithm of a threshold, of some 20 nats at most, is halved so often: tokens whose probabilities differ by less
# than a part of 2e-5 are kept together.
HALVINGS = 20


def uniforms(seed: Sequence[int], prompt_id: int, k: int, count: int) -> np.ndarray:
    """One number in [0, 1) for each position of the k-th sample of a prompt: float32 [count], multiples of 2^-23.

    They follow from these arguments alone (Philox, Salmon et al. 2011), and a longer row begins with the shorter one.
    """
    generator = np.random.Philox(np.random.SeedSequence([*seed, prompt_id, k]))
    numbers: np.ndarray = (generator.random_raw(count) >> np.uint64(41)).astype(np.float32) * np.float32(2.0**-23)
    return numbers


def draw(logits: mx.array, numbers: mx.array, temperature: float, top_p: float) -> tuple[mx.array, mx.array]:
    """The tokens drawn, int32 [B], and their log-probabilities, float32 [B].

    The log-probabilities are those of softmax(logits / temperature), before top_p leaves tokens out: the ratio in
    GRPO's loss compares them with a pass that has no top_p. A temperature of 0 takes the likeliest token; its
    log-probability is that at temperature 1.

    Args:
        logits: [B, V].
        numbers: float32 [B], in [0, 1): the token is the first whose cumulative probability exceeds its row's.
        top_p: the fewest tokens whose probabilities sum up to so much are drawn from (nucleus sampling,
            arXiv:1904.09751, section 3.1).
    """
    logits = logits.astype(mx.float32)
    if temperature:
        logits = logits / temperature
    partition = mx.logsumexp(logits, axis=-1, keepdims=True)
    if temperature:
        chosen = _first_beyond(nucleus(mx.exp(logits - partition), top_p), numbers)
    else:
        chosen = mx.argmax(logits, axis=-1)
    chosen = chosen.astype(mx.int32)
    return chosen, (mx.take_along_axis(logits, chosen[:, None], axis=-1) - partition).squeeze(-1)


def nucleus(probabilities: mx.array, top_p: float) -> mx.array:
    """The probabilities of the fewest tokens that sum up to top_p, 0 for all others: float32 [B, V], not scaled.

    Without sorting: the logarithm of the least probability that is kept is found by halving an interval. What is below
    (1 - top_p) / V has at most 1 - top_p together, so it need not be kept.
    """
    if top_p >= 1:
        return probabilities
    count, vocabulary = probabilities.shape
    low, high = mx.full((count, 1), math.log((1 - top_p) / vocabulary)), mx.zeros((count, 1))
    for _ in range(HALVINGS):
        middle = (low + high) / 2
        kept = mx.where(probabilities >= mx.exp(middle), probabilities, 0.0)
        is_enough = kept.sum(axis=-1, keepdims=True) >= top_p
        low, high = mx.where(is_enough, middle, low), mx.where(is_enough, high, middle)
    return mx.where(probabilities >= mx.exp(low), probabilities, 0.0)


def _first_beyond(weights: mx.array, numbers: mx.array) -> mx.array:
    """The first index whose cumulative weight exceeds that part of the total: [B]. Its own weight is not 0."""
    cumulative = mx.cumsum(weights, axis=-1)
    is_beyond = (cumulative > numbers[:, None] * cumulative[:, -1:]) & (weights > 0)
    return mx.argmax(is_beyond, axis=-1)
