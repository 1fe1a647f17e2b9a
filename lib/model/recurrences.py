"""Recurrences that mlx-lm trains token by token, or keeps whole, in a few operations on pieces of a sequence.

For the backward pass a piece keeps its inputs and the state before it: neither memory nor the number of buffers grows
with more than the length.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models import ssm

from lib.model.partition import PIECE

Recurrence = Callable[..., tuple[mx.array, mx.array]]


def recomputed(function: Recurrence) -> Recurrence:
    """The same function of arrays, of which nothing is kept but these; made again once its gradient is there."""
    block = mx.custom_function(function)

    @block.vjp
    def block_vjp(primals: Sequence[mx.array], cotangents: Sequence[mx.array], _: Any) -> list[mx.array]:
        return mx.vjp(function, mx.depends(list(primals), list(cotangents)), list(cotangents))[1]

    return block


def in_pieces(
    run: Recurrence, sequences: Sequence[mx.array], state: mx.array, others: Sequence[mx.array]
) -> tuple[mx.array, mx.array]:
    """run(*parts, state, *others) gives y, [B, t, ...], and the next state; of the sequences, [B, T, ...], piece by
    piece: y, [B, T, ...], and the last state."""
    cuts, outputs, run = list(range(PIECE, sequences[0].shape[1], PIECE)), list[mx.array](), recomputed(run)
    for parts in zip(*(mx.split(x, cuts, axis=1) for x in sequences), strict=True):
        parts = mx.depends(list(parts), [mx.stop_gradient(state)])  # MLX would begin with all pieces
        y, state = run(*parts, state, *others)
        outputs.append(y)
    return mx.concatenate(outputs, axis=1), state


@mx.custom_function
def linear_scan(decay: mx.array, x: mx.array) -> mx.array:
    """h_t = decay_t h_{t-1} + x_t along axis 1, by log2(T) operations on all tokens (Hillis and Steele, 1986)."""
    reach = 1
    while reach < x.shape[1]:
        x = mx.concatenate([x[:, :reach], x[:, reach:] + decay[:, reach:] * x[:, :-reach]], axis=1)
        (decay,) = mx.depends([decay], [x])  # MLX would make and hold all decays first
        decay = mx.concatenate([decay[:, :reach], decay[:, reach:] * decay[:, :-reach]], axis=1)
        reach *= 2
    return x


@linear_scan.vjp
def _linear_scan_vjp(primals: Sequence[mx.array], dh: mx.array, h: mx.array) -> tuple[mx.array, mx.array]:
    nothing = mx.zeros_like(h[:, :1])
    later = mx.concatenate([primals[0][:, 1:], nothing], axis=1)
    dx = linear_scan(later[:, ::-1], dh[:, ::-1])[:, ::-1]
    return dx * mx.concatenate([nothing, h[:, :-1]], axis=1), dx


def scan_from(decay: mx.array, x: mx.array, state: mx.array | None) -> mx.array:
    """`linear_scan` after a state, [B, ...]."""
    if state is not None:
        x = mx.concatenate([x[:, :1] + decay[:, :1] * state[:, None], x[:, 1:]], axis=1)
    return linear_scan(decay, x)


def gated_linear_unit(x: mx.array, a: mx.array, h0: mx.array | None) -> tuple[mx.array, mx.array]:
    """Griffin's recurrence (arXiv:2402.19427, equation 4), as recurrent_gemma's rnn_scan: h_t = a_t h_{t-1} + x_t."""
    h = scan_from(a, x, h0)
    return h, h[:, -1]


def selective_step(self: Any, x: mx.array, A: mx.array, state: mx.array | None = None) -> tuple[mx.array, mx.array]:
    """Mamba's recurrence (arXiv:2312.00752, equation 2) for the mixers of mamba and jamba: x, [B, T, D], and the state
    before it, [B, D, N] ➜ y, [B, T, D], and the last state."""
    sizes = [self.time_step_rank, self.time_step_rank + self.ssm_state_size]
    delta, B, C = mx.split(self.x_proj(x), sizes, axis=-1)
    if "dt_layernorm" in self:
        delta, B, C = self.dt_layernorm(delta), self.b_layernorm(B), self.c_layernorm(C)
    elif self.use_bcdt_rms:
        delta, B, C = (mx.fast.rms_norm(each, None, self.args.mixer_rms_eps) for each in (delta, B, C))
    delta = nn.softplus(self.dt_proj(delta))
    if state is None:
        state = mx.zeros((len(x), *A.shape))
    y, state = in_pieces(_selective_piece, [x, delta, B, C], state, [A])
    return y.astype(x.dtype) + self.D * x, state


def _selective_piece(
    x: mx.array, delta: mx.array, B: mx.array, C: mx.array, state: mx.array, A: mx.array
) -> tuple[mx.array, mx.array]:
    wide = delta.astype(mx.float32)
    states = scan_from(mx.exp(wide[..., None] * A), (wide * x)[..., None] * B[:, :, None], state)
    last = mx.take(states, mx.array(states.shape[1] - 1), axis=1)  # a slice would hold all of them
    return (states @ C.astype(mx.float32)[..., None]).squeeze(-1), last


def state_space_pieces(x: mx.array, A_log: mx.array, B: mx.array, C: mx.array, *others: Any, **options: Any) -> Any:
    """mlx-lm's `ssm_update` (Mamba 2, arXiv:2405.21060), whose chunks of the same size are not kept."""
    options |= dict(zip(("D", "dt", "dt_bias", "state", "time_step_limit", "mask", "lengths"), others, strict=False))
    is_masked = options.get("mask") is not None or options.get("lengths") is not None
    if x.shape[1] == 1 or is_masked:
        return ssm.ssm_update(x, A_log, B, C, **options)
    limits = {"time_step_limit": options["time_step_limit"]} if "time_step_limit" in options else {}

    def run(x: mx.array, B: mx.array, C: mx.array, dt: mx.array, state: mx.array, *others: mx.array) -> Any:
        A_log, D, dt_bias = others
        return ssm.ssm_attn(x, A_log, B, C, D, dt, dt_bias, state, **limits)

    if (state := options.get("state")) is None:
        state = mx.zeros((len(x), *x.shape[2:], B.shape[-1]))
    return in_pieces(run, [x, B, C, options["dt"]], state, [A_log, options["D"], options["dt_bias"]])
