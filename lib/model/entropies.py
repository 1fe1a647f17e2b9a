"""What losses ask of the whole distribution of each token: entropies (GRPO), WPO's weights, and the likeliest token."""

from __future__ import annotations

from collections.abc import Callable

import mlx.core as mx
import mlx.nn as nn

from lib.model.layout import layout_of, parameters_outside_blocks
from lib.model.logps import (
    Head,
    chunks_of,
    head_of,
    head_states,
    logps_and_logits,
    logps_by_head,
    logps_of,
    of_completions,
    of_rank_positions,
    token_logps,
)
from lib.model.long_attention import after
from lib.model.quantised import dequantised_once
from lib.model.token_stream import StreamInputs, scored_states


def completion_logps_and_weights(model: nn.Module, inputs: StreamInputs) -> tuple[mx.array, mx.array]:
    """`completion_logps`, and WPO's weights (arXiv:2406.11827, eq. 2), without gradient: exp(mean over y's tokens of
    log pi(y_t) - log sum_v pi(v)^2); float32 [b, K] each."""
    hidden, targets = head_states(model, inputs), inputs["targets"]
    logps = squares = mx.zeros(targets.shape)
    if hidden is not None:
        logps = token_logps(model, hidden, targets)
        still = after(mx.stop_gradient(hidden), [logps])  # ranks that hold parts sum both, in this order
        with dequantised_once(model, len(hidden), hidden):
            [squares] = of_rank_positions(model, lambda h, _: [_log_square_sums(model, h)], still, targets)
    aligned = of_completions(logps - squares, inputs)
    weights = mx.exp(aligned / mx.maximum(inputs["mask"].sum(axis=-1), 1))
    return of_completions(logps, inputs), mx.stop_gradient(weights)


def completion_token_logps(
    model: nn.Module, inputs: StreamInputs, temperature: float = 1.0
) -> tuple[mx.array, mx.array]:
    """Log-probability of each completion token, and the entropy where it was chosen: float32 [b, K, C] each, in nats.
    Both are of softmax(logits / temperature), and 0 where masked. The entropy carries no gradient."""
    hidden, targets = head_states(model, inputs), inputs["targets"]
    figures = [mx.zeros(targets.shape)] * 2
    if hidden is not None:
        with dequantised_once(model, len(hidden), hidden):
            figures = _token_logps_and_entropies(model, hidden, targets, temperature)
    logps, entropies = (mx.where(inputs["mask"], mx.take(each, inputs["logp_indices"]), 0.0) for each in figures)
    return logps, entropies


def greedy_logps(model: nn.Module, inputs: StreamInputs) -> tuple[mx.array, mx.array]:
    """`completion_logps`, and whether greedy decoding would write each completion: bool [b, K]. In evaluation mode."""
    hidden, head = scored_states(model, inputs, layout_of(model).attention_window), head_of(model)
    logps, are_likeliest = list[mx.array](), list[mx.array]()
    with dequantised_once(model, len(hidden), hidden):
        for h, t in chunks_of(model, head, hidden, inputs["targets"]):
            logits = head(after(h, logps[-1:]))
            logps.append(logps_of(logits, t))
            are_likeliest.append(mx.argmax(logits, axis=-1) == t)
    likeliest = mx.take(mx.concatenate(are_likeliest), inputs["logp_indices"])
    return of_completions(mx.concatenate(logps), inputs), mx.where(inputs["mask"], likeliest, True).all(axis=-1)


def _token_logps_and_entropies(
    model: nn.Module, hidden: mx.array, targets: mx.array, temperature: float
) -> list[mx.array]:
    """`token_logps` of softmax(logits / temperature), and the entropies in nats: float32 [M] each."""
    plain, is_frozen = head_of(model), model.training and not parameters_outside_blocks(model)

    def head(hidden: mx.array) -> mx.array:
        return plain(hidden) if temperature == 1 else plain(hidden).astype(mx.float32) / temperature

    def of_both(hidden: mx.array, targets: mx.array) -> list[mx.array]:
        if layout_of(model).vocabulary is not None or not is_frozen:
            entropies = _entropies(model, head, mx.stop_gradient(hidden))
            return [logps_by_head(model, head, hidden, targets), mx.stop_gradient(entropies)]
        logps, entropies = list[mx.array](), list[mx.array]()
        for h, t in chunks_of(model, head, hidden, targets):
            of_chunk, logits = logps_and_logits(head, None, h, t, [*logps[-1:], *entropies[-1:]])
            logps.append(of_chunk)
            entropies.append(-_mean_logp(logits)[0])
        return [mx.concatenate(logps), mx.stop_gradient(mx.concatenate(entropies))]

    return of_rank_positions(model, of_both, hidden, targets)


# Of the whole distribution, float32 [M].
def _mean_logp(logits: mx.array) -> tuple[mx.array, mx.array]:
    """The mean log-probability under the probabilities themselves, and the log partition function."""
    wide = logits.astype(mx.float32)
    partition = mx.logsumexp(wide, axis=-1, keepdims=True)
    probabilities = mx.exp(wide - partition)
    mean = mx.where(probabilities > 0, probabilities * (wide - partition), 0.0).sum(axis=-1)
    return mean, partition.squeeze(-1)


def _over_vocabulary(
    model: nn.Module,
    head: Head,
    hidden: mx.array,
    figures_of: Callable[[mx.array], mx.array],
    combine: Callable[..., mx.array],
) -> mx.array:
    """combine(figures_of(logits) of every part of the vocabulary), without ever holding all logits. figures_of: [M, V]
    ➜ [F, M], of one part's logits; combine: F arrays of [parts, M] ➜ [M]."""
    part, outputs = layout_of(model).vocabulary, list[mx.array]()
    rank_head = head if part is None else part.rank_head(head)
    for h, _ in chunks_of(model, head, hidden, hidden):
        figures = figures_of(rank_head(after(h, outputs[-1:])))[:, None]
        if part is not None:  # each rank's in rows of its own: [F, ranks, M]
            figures = part.ranks.sum_forward(mx.where(part.rank_row[None, :, None], figures, 0.0))
        outputs.append(combine(*figures))
    return mx.concatenate(outputs)


def _entropies(model: nn.Module, head: Head, hidden: mx.array) -> mx.array:
    def combine(means: mx.array, partitions: mx.array) -> mx.array:
        weights = mx.softmax(partitions, axis=0)
        return mx.logsumexp(partitions, axis=0) - (weights * (means + partitions)).sum(axis=0)

    return _over_vocabulary(model, head, hidden, lambda logits: mx.stack(_mean_logp(logits)), combine)


def _log_square_sums(model: nn.Module, hidden: mx.array) -> mx.array:
    """log sum_v pi(v)^2 over the vocabulary."""

    def figures_of(logits: mx.array) -> mx.array:
        wide = logits.astype(mx.float32)
        return mx.stack([mx.logsumexp(wide, axis=-1), mx.logsumexp(2 * wide, axis=-1)])

    def combine(partitions: mx.array, squares: mx.array) -> mx.array:
        return mx.logsumexp(squares, axis=0) - 2 * mx.logsumexp(partitions, axis=0)

    return _over_vocabulary(model, head_of(model), hidden, figures_of, combine)
