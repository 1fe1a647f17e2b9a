"""Log-probabilities of completions, without ever holding all logits."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_unflatten

from lib.model.layout import VocabularyPart, backbone_of, layout_of, parameters_outside_blocks
from lib.model.long_attention import after
from lib.model.quantised import dequantised_once
from lib.model.token_stream import Replaced, StreamInputs, scored_states

Head = Callable[[mx.array], mx.array]
LOGITS_BYTES = 2**29  # of float32 logits at a time


def completion_logps(model: nn.Module, inputs: StreamInputs) -> mx.array:
    """Log-probability of each completion, summed over its tokens: float32 [b, K], in nats. Of a model that ranks hold
    in stages all call this, and the last one gets the result; the others get zeros."""
    return _of_completions(_of_scored(model, inputs, lambda h, t: [token_logps(model, h, t)])[0], inputs)


def completion_logps_and_weights(model: nn.Module, inputs: StreamInputs) -> tuple[mx.array, mx.array]:
    """`completion_logps`, and WPO's weights (arXiv:2406.11827, eq. 2), without gradient: exp(mean over y's tokens of
    log pi(y_t) - log sum_v pi(v)^2); float32 [b, K] each."""

    def figures_of(hidden: mx.array, targets: mx.array) -> list[mx.array]:
        logps = token_logps(model, hidden, targets)
        still = after(mx.stop_gradient(hidden), [logps])  # ranks that hold parts sum both, in this order
        with dequantised_once(model, len(hidden), hidden):
            return [logps, *_of_rank_positions(model, lambda h, _: [_log_square_sums(model, h)], still, targets)]

    logps, squares = _of_scored(model, inputs, figures_of, count=2)
    aligned = _of_completions(logps - squares, inputs)
    weights = mx.exp(aligned / mx.maximum(inputs["mask"].sum(axis=-1), 1))
    return _of_completions(logps, inputs), mx.stop_gradient(weights)


def completion_token_logps(
    model: nn.Module, inputs: StreamInputs, temperature: float = 1.0
) -> tuple[mx.array, mx.array]:
    """Log-probability of each completion token, and the entropy where it was chosen: float32 [b, K, C] each, in nats.
    Both are of softmax(logits / temperature), and 0 where masked. The entropy carries no gradient."""

    def figures_of(hidden: mx.array, targets: mx.array) -> list[mx.array]:
        with dequantised_once(model, len(hidden), hidden):
            return _token_logps_and_entropies(model, hidden, targets, temperature)

    figures = _of_scored(model, inputs, figures_of, count=2)
    logps, entropies = (mx.where(inputs["mask"], mx.take(each, inputs["logp_indices"]), 0.0) for each in figures)
    return logps, entropies


def greedy_logps(model: nn.Module, inputs: StreamInputs) -> tuple[mx.array, mx.array]:
    """`completion_logps`, and whether greedy decoding would write each completion: bool [b, K]. In evaluation mode."""
    hidden, head = scored_states(model, inputs, layout_of(model).attention_window), head_of(model)
    logps, are_likeliest = list[mx.array](), list[mx.array]()
    with dequantised_once(model, len(hidden), hidden):
        for h, t in _chunks(model, head, hidden, inputs["targets"]):
            logits = head(after(h, logps[-1:]))
            logps.append(_logps(logits, t))
            are_likeliest.append(mx.argmax(logits, axis=-1) == t)
    likeliest = mx.take(mx.concatenate(are_likeliest), inputs["logp_indices"])
    return _of_completions(mx.concatenate(logps), inputs), mx.where(inputs["mask"], likeliest, True).all(axis=-1)


def _of_scored(
    model: nn.Module, inputs: StreamInputs, figures_of: Callable[[mx.array, mx.array], list[mx.array]], count: int = 1
) -> list[mx.array]:
    """figures_of(what the head sees, targets), float32 [M] each of so many; zeros on a rank whose stage has no head."""
    states, stage = scored_states(model, inputs, layout_of(model).attention_window), layout_of(model).stage
    if stage is None or stage.is_last:
        return figures_of(states, inputs["targets"])
    return [mx.zeros(inputs["targets"].shape)] * count


def _of_completions(figures: mx.array, inputs: StreamInputs) -> mx.array:
    """Figures of the scored tokens, float32 [M], summed over each completion: float32 [b, K]."""
    return mx.where(inputs["mask"], mx.take(figures, inputs["logp_indices"]), 0.0).sum(axis=-1)


def head_of(model: nn.Module) -> Head:
    """The model from its backbone's output on: [M, D] ➜ [M, V]."""
    place = backbone_of(model)
    if place is None:
        return lambda hidden: hidden

    def head(hidden: mx.array) -> mx.array:
        with Replaced(*place, lambda *args, **kwargs: hidden[None]):
            return model(mx.zeros((1, len(hidden)), mx.int32)).squeeze(0)

    return head


def token_logps(model: nn.Module, hidden: mx.array, targets: mx.array) -> mx.array:
    """log softmax(head(hidden))[target], float32 [M], without ever holding all logits. hidden: [M, D]; targets: int32
    [M]. A frozen head's gradient is made in the forward pass (Liger Kernel, arXiv:2410.10989, section 3.2); a trained
    one makes its logits again."""
    with dequantised_once(model, len(hidden), hidden):
        head = head_of(model)
        return _of_rank_positions(model, lambda h, t: [_token_logps(model, head, h, t)], hidden, targets)[0]


def _token_logps(model: nn.Module, head: Head, hidden: mx.array, targets: mx.array) -> mx.array:
    """`token_logps` of these positions; of a divided vocabulary from the log partition functions of its parts."""
    part, figures_of = layout_of(model).vocabulary, _logps
    if part is not None:
        hidden, figures_of = part.ranks.sum_backward(hidden), functools.partial(_part_figures, part)
        head = part.rank_head(head)
    chunks, figures = _chunks(model, head, hidden, targets), list[mx.array]()
    if model.training and not parameters_outside_blocks(model):
        for h, t in chunks:
            figures.append(_logps_and_logits(head, part, h, t, figures[-1:])[0])
        return mx.concatenate(figures)
    if model.training and len(chunks) > 1:
        figures = [_checkpointed(model, head, chunks, figures_of)]
    else:
        for h, t in chunks:
            figures.append(figures_of(head(after(h, figures[-1:])), t))
    joined = mx.concatenate(figures, axis=-1)
    return joined if part is None else _combined(part, joined)[0]


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
            return [_token_logps(model, head, hidden, targets), mx.stop_gradient(entropies)]
        logps, entropies = list[mx.array](), list[mx.array]()
        for h, t in _chunks(model, head, hidden, targets):
            of_chunk, logits = _logps_and_logits(head, None, h, t, [*logps[-1:], *entropies[-1:]])
            logps.append(of_chunk)
            entropies.append(-_mean_logp(logits)[0])
        return [mx.concatenate(logps), mx.stop_gradient(mx.concatenate(entropies))]

    return _of_rank_positions(model, of_both, hidden, targets)


def _of_rank_positions(
    model: nn.Module, figures_of: Callable[[mx.array, mx.array], list[mx.array]], hidden: mx.array, targets: mx.array
) -> list[mx.array]:
    """figures_of(hidden, targets), float32 [M] each; ranks with a whole frozen head make some positions' each."""
    part = layout_of(model).positions
    bounds = part and part.bounds(len(targets))
    if not part or not bounds or (model.training and parameters_outside_blocks(model)):
        return figures_of(hidden, targets)
    begin, end = bounds
    ranks, around = part.ranks, [(0, 0), (begin, len(targets) - end)]

    @mx.custom_function
    def of_all(figures: mx.array) -> mx.array:
        return ranks.sum_forward(mx.pad(figures, around))

    # A loss like SFT's has gradients that no log-probability decides: they wait, so that all ranks sum in one order.
    @of_all.vjp
    def of_all_vjp(_: Any, cotangent: mx.array, summed: mx.array) -> mx.array:
        return mx.depends([cotangent[:, begin:end]], [summed])[0]

    figures = mx.stack(figures_of(ranks.sum_backward(hidden)[begin:end], targets[begin:end]))
    return [row.squeeze(0) for row in mx.split(of_all(figures), len(figures))]


def _chunks(model: nn.Module, head: Head, hidden: mx.array, targets: mx.array) -> list[tuple[mx.array, mx.array]]:
    """Pieces whose logits are small enough."""
    part = layout_of(model).vocabulary
    vocabulary = head(hidden[:1]).shape[-1] if part is None else part.size
    pieces = -(-len(targets) * vocabulary * 4 // LOGITS_BYTES)
    size = -(-len(targets) // pieces)
    # Split, not sliced: their gradients are joined then, and not each padded to all of it and added.
    starts = list(range(size, len(targets), size))
    return list(zip(mx.split(hidden, starts), mx.split(targets, starts), strict=True))


# Of one chunk: log-probabilities, float32 [M], and their derivative by the logits, [M, V].
def _logps(logits: mx.array, targets: mx.array) -> mx.array:
    if mx.default_device() == mx.cpu:  # elsewhere one kernel, which accumulates in float32 without such a copy
        logits = logits.astype(mx.float32)
    return -mx.fast.cross_entropy(logits, targets)


@mx.compile
def _slope(probabilities: mx.array, targets: mx.array) -> mx.array:
    """d logp / d logits: one at the target, unless it is another rank's token, minus the probabilities."""
    return (mx.arange(probabilities.shape[-1])[None] == targets[:, None]) - probabilities


@mx.compile
def _slope_of_logits(logits: mx.array, targets: mx.array, partition: mx.array) -> mx.array:
    return _slope(mx.exp(logits.astype(mx.float32) - partition[:, None]), targets).astype(logits.dtype)


def _logps_and_slope(logits: mx.array, targets: mx.array) -> tuple[mx.array, mx.array]:
    if mx.default_device() != mx.cpu:
        logps = _logps(logits, targets)
        at_target = mx.take_along_axis(logits, targets[:, None], axis=-1).squeeze(-1).astype(mx.float32)
        return logps, _slope_of_logits(logits, targets, at_target - logps)
    # Exponentials are what a CPU is slow at: each is made once. The partition function from the likeliest token,
    # whose probability is at least 1 / V.
    wide = logits.astype(mx.float32)
    probabilities = mx.softmax(wide, axis=-1)
    partition = wide.max(axis=-1) - mx.log(probabilities.max(axis=-1))
    logps = mx.take_along_axis(wide, targets[:, None], axis=-1).squeeze(-1) - partition
    return logps, _slope(probabilities, targets).astype(logits.dtype)


def _logps_and_logits(
    head: Head, part: VocabularyPart | None, hidden: mx.array, targets: mx.array, earlier: Sequence[mx.array]
) -> tuple[mx.array, mx.array]:
    """Log-probabilities whose gradient is made with them, float32 [M]; and the logits, [M, V], without any."""
    still = after(mx.stop_gradient(hidden), earlier)
    logits = head(still)
    if part is None:
        logps, by_logits = _logps_and_slope(logits, targets)
    else:
        logps, partition = _combined(part, _part_figures(part, logits, targets))
        by_logits = _slope_of_logits(logits, targets - part.first, partition)
    _, (slope,) = mx.vjp(head, [still], [by_logits])
    # The logits are needed by both; in this order they can be freed before the next chunk's are made.
    (logps,) = mx.depends([logps], [slope])

    @mx.custom_function
    def with_gradient(hidden: mx.array) -> mx.array:
        return mx.stop_gradient(logps)

    @with_gradient.vjp
    def with_gradient_vjp(_: Any, cotangent: mx.array, __: Any) -> mx.array:
        return (cotangent[:, None] * slope).astype(slope.dtype)

    return with_gradient(hidden), logits


def _checkpointed(
    model: nn.Module,
    head: Head,
    chunks: Sequence[tuple[mx.array, mx.array]],
    of: Callable[[mx.array, mx.array], mx.array],
) -> mx.array:
    """`of(logits, targets)` of all chunks, concatenated; the backward pass makes the logits again, chunk by chunk."""
    before = parameters_outside_blocks(model)
    names, targets = list(before), [t for _, t in chunks]

    def recomputed(parameters: Sequence[mx.array], hidden: mx.array, targets: mx.array) -> mx.array:
        model.update(tree_unflatten(dict(zip(names, parameters, strict=True))))
        try:
            return of(head(hidden), targets)
        finally:
            model.update(tree_unflatten(before))

    @mx.custom_function
    def of_all(*arrays: mx.array) -> list[mx.array]:
        parameters, hidden = arrays[: len(names)], arrays[len(names) :]
        outputs: list[mx.array] = []
        for h, t in zip(hidden, targets, strict=True):
            outputs.append(recomputed(parameters, after(h, outputs[-1:]), t))
        return outputs

    @of_all.vjp
    def of_all_vjp(primals: Any, cotangents: Any, _: Any) -> list[mx.array]:
        parameters, hidden = list(primals[: len(names)]), primals[len(names) :]
        totals: list[mx.array] = []
        by_hidden: list[mx.array] = []
        with dequantised_once(model, sum(map(len, targets)), hidden[0]):
            for h, t, cotangent in zip(hidden, targets, cotangents, strict=True):
                inputs = [*parameters, after(h, [*by_hidden[-1:], *totals])]
                _, slopes = mx.vjp(lambda *a, t=t: recomputed(a[:-1], a[-1], t), inputs, [cotangent])
                totals = [a + b for a, b in zip(totals, slopes[:-1], strict=True)] if totals else slopes[:-1]
                by_hidden.append(slopes[-1])
        return [*totals, *by_hidden]

    return mx.concatenate(of_all(*before.values(), *(h for h, _ in chunks)), axis=-1)


def _part_figures(part: VocabularyPart, logits: mx.array, targets: mx.array) -> mx.array:
    """The logarithm of this rank's part of the partition function, and the target's logit or 0: float32 [2, M]."""
    wide, local = logits.astype(mx.float32), targets - part.first
    at = mx.take_along_axis(wide, mx.clip(local, 0, wide.shape[-1] - 1)[:, None], axis=-1).squeeze(-1)
    return mx.stack([mx.logsumexp(wide, axis=-1), mx.where((local >= 0) & (local < wide.shape[-1]), at, 0.0)])


def _combined(part: VocabularyPart, figures: mx.array) -> tuple[mx.array, mx.array]:
    """Log-probabilities and log partition functions of all ranks' `_part_figures`: float32 [M] each."""
    partitions = mx.where(part.rank_row[:, None], figures[:1], 0.0)
    of_ranks = part.ranks.sum_forward(mx.concatenate([partitions, figures[1:]]))
    partition = mx.logsumexp(of_ranks[:-1], axis=0)
    return of_ranks[-1] - partition, partition


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
    for h, _ in _chunks(model, head, hidden, hidden):
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
