"""Recurrences that mlx-lm trains token by token, or keeps whole, in a few operations on pieces of a sequence.

For the backward pass a piece keeps its inputs and the state before it: neither memory nor the number of buffers grows
with more than the length.
"""

from __future__ import annotations

import functools
import io
from collections.abc import Callable, Sequence
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models import ssm
from mlx_lm.models.gated_delta import gated_delta_ops

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


CHUNK, VECTOR_CHUNK = 64, 16  # tokens; powers of two. Decays of each number take [chunk, chunk, Dk] numbers a chunk.


def gated_delta_rule(
    q: mx.array, k: mx.array, v: mx.array, log_decay: mx.array, beta: mx.array, state: mx.array
) -> tuple[mx.array, mx.array]:
    """S_t = a_t S_{t-1} + b_t k_t (v_t - k_t^T a_t S_{t-1})^T and y_t = S_t^T q_t (arXiv:2412.06464, equation 10). q,
    k: [B, T, Hk, Dk]; v: [B, T, Hv, Dv]; log_decay: float32 [B, T, Hv], or [B, T, Hv, Dk] (arXiv:2510.26692); beta: [B,
    T, Hv]; state: float32 [B, Hv, Dv, Dk]. Gives y, [B, T, Hv, Dv], and the last state."""
    if log_decay.ndim == 3 and has_kernel((*k.shape[2:], *v.shape[2:]), q.dtype):
        y, state = mx.fast.gated_delta_update(q, k, v, mx.exp(log_decay), beta, state)
        return y, state
    y, state = recomputed(_chunks)(q, k, v, log_decay, beta, state)
    return y.astype(q.dtype), state


@functools.cache
def has_kernel(sizes: tuple[int, int, int, int], dtype: mx.Dtype) -> bool:
    """Whether MLX computes the rule and its gradient in kernels here, and they agree with mlx-lm's loop. sizes: Hk, Dk,
    Hv, Dv."""
    tokens, (key_heads, key_size, heads, size) = CHUNK + 1, sizes
    shapes = [(key_heads, key_size)] * 2 + [(heads, size), (heads,), (heads,), (heads, size, key_size)]
    draws = [mx.random.normal((1, tokens, *shape), key=mx.random.key(i)) for i, shape in enumerate(shapes)]
    q, k, v, beta = (x.astype(dtype) for x in (draws[0] / key_size, draws[1] / key_size**0.5, draws[2], draws[4]))
    inputs = [q, k, v, mx.sigmoid(draws[3] + 2), mx.sigmoid(beta), draws[5][:, 0]]
    gradients = [mx.vjp(rule, inputs, [v, inputs[-1]]) for rule in (mx.fast.gated_delta_update, gated_delta_ops)]
    ours, loops = ([x.astype(mx.float32) for part in each for x in part] for each in gradients)
    mx.export_to_dot(graph := io.StringIO(), *ours)
    if graph.getvalue().count("label") > 4 * tokens:
        return False
    limit = 2e-3 if dtype == mx.float32 else 0.03  # of the norm
    try:
        return all(
            (mx.linalg.norm(a - b) <= limit * mx.linalg.norm(b)).item() for a, b in zip(ours, loops, strict=True)
        )
    except RuntimeError:  # MLX has no kernel of these sizes
        return False


def _chunks(*inputs: mx.array) -> tuple[mx.array, mx.array]:
    """As `gated_delta_rule`; with a seventh argument the state is read by that instead of k, and decays are bounded:
    their quotient is made of each alone. Within a chunk the rule is a triangular system of equations for what each
    token adds to the state (arXiv:2412.06464, section 3.3); the chunks' states follow one another."""
    q, k, v, log_decay, beta, state, *reads = inputs
    (rows, tokens, groups, _), (heads, size) = k.shape, v.shape[2:]
    is_vector, per_group = log_decay.ndim == 4, heads // groups
    length = 2 * CHUNK if reads else VECTOR_CHUNK if is_vector else CHUNK
    count = -(-tokens // length)

    def chunked(x: mx.array, of_group: int) -> mx.array:
        """[B, T, H, D] ➜ float32 [chunks, B, Hk, H / Hk, chunk, D]; zeros after the last token."""
        x = mx.pad(x.astype(mx.float32), [(0, 0), (0, count * length - tokens), (0, 0), (0, 0)])
        return x.reshape(rows, count, length, groups, of_group, -1).transpose(1, 0, 3, 4, 2, 5)

    q, k, v, beta = chunked(q, 1), chunked(k, 1), chunked(v, per_group), chunked(beta[..., None], per_group)
    decay = mx.cumsum(chunked(log_decay if is_vector else log_decay[..., None], per_group), axis=-2)
    lower, since = mx.tri(length, dtype=mx.float32) > 0, mx.exp(decay)
    read = chunked(reads[0], per_group) if reads else k
    if reads:
        products = lambda x: mx.tril((since * x) @ (k * mx.exp(-decay)).swapaxes(-1, -2))  # noqa: E731
    elif is_vector:
        gaps = decay[..., :, None, :] - decay[..., None, :, :]
        ratios = mx.exp(mx.where(lower[..., None], gaps, -mx.inf))  # [..., chunk, chunk, Dk]
        products = lambda x: (x[..., :, None, :] * k[..., None, :, :] * ratios).sum(axis=-1)  # noqa: E731
    else:
        ratios = mx.exp(mx.where(lower, decay - decay.swapaxes(-1, -2), -mx.inf))
        products = lambda x: (x @ k.swapaxes(-1, -2)) * ratios  # noqa: E731
    solution = unit_lower_inverse(beta * products(read)) * beta.swapaxes(-1, -2)
    until = mx.exp(decay[..., -1:, :] - decay)
    parts = [solution @ v, solution @ (since * read), (until * k).swapaxes(-1, -2), since[..., -1:, :].swapaxes(-1, -2)]
    state = state.reshape(1, rows, groups, per_group, size, -1).swapaxes(-1, -2)
    states, added = [], []
    # Split, not indexed: their gradients are joined then, and not each padded to all of it and added.
    for new, slope, keys, rest in zip(*(mx.split(part, count) for part in parts), strict=True):
        states.append(state)
        added.append(mx.addmm(new, slope, state, alpha=-1))
        state = mx.addmm(rest * state, keys, added[-1])
    y = (since * q) @ mx.concatenate(states) + products(q) @ mx.concatenate(added)
    y = y.transpose(1, 0, 4, 2, 3, 5).reshape(rows, count * length, heads, size)[:, :tokens]
    return y, state.swapaxes(-1, -2).reshape(rows, heads, size, -1)


def rwkv7_rule(
    r: mx.array, w: mx.array, k: mx.array, v: mx.array, a: mx.array, b: mx.array, state: mx.array | None
) -> tuple[mx.array, mx.array]:
    """S_t = S_{t-1} (diag(w_t) + a_t b_t^T) + v_t k_t^T and y_t = S_t r_t (RWKV-7, arXiv:2503.14456): two steps of the
    rule above, one that reads the decayed state by a and adds along b, one that adds v k^T. All [B, T, H, D], of state
    [B, H, D, D]; w is at least 0.545. Gives y and the last state."""

    def steps(first: mx.array, second: mx.array) -> mx.array:
        return mx.stack([first, second], axis=2).flatten(1, 2)

    wide, nothing, beta = w.astype(mx.float32), mx.zeros(r.shape), mx.ones((len(r), 2 * r.shape[1], r.shape[2]))
    inputs = steps(nothing, r), steps(b, k), steps(nothing, v), steps(mx.log(wide), nothing), beta
    before = mx.zeros((len(r), *r.shape[2:], r.shape[3])) if state is None else state.astype(mx.float32)
    y, last = recomputed(_chunks)(*inputs, before, steps(-a / wide, nothing))
    return y[:, 1::2].astype(r.dtype), last


@mx.custom_function
def unit_lower_inverse(lower: mx.array) -> mx.array:
    """(I + L)^-1 of the part L of [..., n, n] below its diagonal; n is a power of two. Of blocks twice as large in each
    round: [[P, 0], [R, Q]]^-1 = [[P^-1, 0], [-Q^-1 R P^-1, Q^-1]]."""
    n = lower.shape[-1]
    inverse = mx.ones((*lower.shape[:-2], n, 1, 1))  # of the blocks on the diagonal
    size = 1
    while size < n:
        blocks = lower.reshape(*lower.shape[:-2], n // size // 2, 2, size, n // size // 2, 2, size)
        below = mx.moveaxis(mx.diagonal(blocks[..., :, 1, :, :, 0, :], axis1=-4, axis2=-2), -1, -3)
        first, last = inverse[..., 0::2, :, :], inverse[..., 1::2, :, :]
        corner = -(last @ below @ first) if size > 1 else -below
        rows = [mx.concatenate([first, mx.zeros_like(first)], -1), mx.concatenate([corner, last], -1)]
        inverse, size = mx.concatenate(rows, -2), 2 * size
    return inverse[..., 0, :, :]


@unit_lower_inverse.vjp
def _unit_lower_inverse_vjp(_: mx.array, cotangent: mx.array, inverse: mx.array) -> mx.array:
    turned = inverse.swapaxes(-1, -2)
    return -mx.tril(turned @ cotangent @ turned, -1)
