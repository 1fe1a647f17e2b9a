"""Log-probabilities of completions, without ever holding all logits."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from lib.model import exponentials
from lib.model.gradient_checkpointing import checkpointed_chunks
from lib.model.layout import VocabularyPart, backbone_of, layout_of, parameters_outside_blocks
from lib.model.long_attention import after
from lib.model.quantised import dequantised_once
from lib.model.token_stream import Replaced, StreamInputs, scored_states

Head = Callable[[mx.array], mx.array]
LOGITS_BYTES = 2**29  # of float32 logits at a time


def completion_logps(model: nn.Module, inputs: StreamInputs) -> mx.array:
    """Log-probability of each completion, summed over its tokens: float32 [b, K], in nats. Of a model that ranks hold
    in stages all call this, and the last one gets the result; the others get zeros."""
    hidden, targets = head_states(model, inputs), inputs["targets"]
    logps = mx.zeros(targets.shape) if hidden is None else token_logps(model, hidden, targets)
    return of_completions(logps, inputs)


def head_states(model: nn.Module, inputs: StreamInputs) -> mx.array | None:
    """What the head sees of the scored tokens, [M, D]; None on a rank whose stage has no head."""
    states, stage = scored_states(model, inputs, layout_of(model).attention_window), layout_of(model).stage
    return states if stage is None or stage.is_last else None


def of_completions(figures: mx.array, inputs: StreamInputs) -> mx.array:
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
        return of_rank_positions(model, lambda h, t: [logps_by_head(model, head, h, t)], hidden, targets)[0]


def logps_by_head(model: nn.Module, head: Head, hidden: mx.array, targets: mx.array) -> mx.array:
    """`token_logps` of these positions; of a divided vocabulary from the log partition functions of its parts."""
    part, figures_of = layout_of(model).vocabulary, logps_of
    if part is not None:
        hidden, figures_of = part.ranks.sum_backward(hidden), part.figures
        head = part.rank_head(head)
    chunks, figures = chunks_of(model, head, hidden, targets), list[mx.array]()
    if model.training and not parameters_outside_blocks(model):
        for h, t in chunks:
            figures.append(logps_and_logits(head, part, h, t, figures[-1:])[0])
        return mx.concatenate(figures)
    if model.training and len(chunks) > 1:
        figures = [checkpointed_chunks(model, head, chunks, figures_of)]
    else:
        if part is None and not model.training:
            figures_of = lambda logits, targets: _logps_and_slope(logits, targets)[0]  # noqa: E731
        for h, t in chunks:
            figures.append(figures_of(head(after(h, figures[-1:])), t))
    joined = mx.concatenate(figures, axis=-1)
    return joined if part is None else part.combined(joined)[0]


def of_rank_positions(
    model: nn.Module, figures_of: Callable[[mx.array, mx.array], list[mx.array]], hidden: mx.array, targets: mx.array
) -> list[mx.array]:
    """figures_of(hidden, targets), float32 [M] each; ranks with a whole frozen head make some positions' each."""
    part = layout_of(model).positions
    if part is None or (model.training and parameters_outside_blocks(model)):
        return figures_of(hidden, targets)
    return part.gathered(figures_of, hidden, targets)


def chunks_of(model: nn.Module, head: Head, hidden: mx.array, targets: mx.array) -> list[tuple[mx.array, mx.array]]:
    """Pieces whose logits are small enough."""
    part = layout_of(model).vocabulary
    vocabulary = head(hidden[:1]).shape[-1] if part is None else part.size
    pieces = -(-len(targets) * vocabulary * 4 // LOGITS_BYTES)
    size = -(-len(targets) // pieces)
    # Split, not sliced: their gradients are joined then, and not each padded to all of it and added.
    starts = list(range(size, len(targets), size))
    return list(zip(mx.split(hidden, starts), mx.split(targets, starts), strict=True))


# Of one chunk: log-probabilities, float32 [M], and their derivative by the logits, [M, V].
def logps_of(logits: mx.array, targets: mx.array) -> mx.array:
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
        logps = logps_of(logits, targets)
        at_target = mx.take_along_axis(logits, targets[:, None], axis=-1).squeeze(-1).astype(mx.float32)
        return logps, _slope_of_logits(logits, targets, at_target - logps)
    wide = logits.astype(mx.float32)  # exponentials are what a CPU is slow at: each is made once
    powers, largest = exponentials.from_largest(wide)
    total = powers.sum(axis=-1, keepdims=True)
    logps = mx.take_along_axis(wide, targets[:, None], axis=-1) - largest - mx.log(total)
    return logps.squeeze(-1), _slope(powers / total, targets).astype(logits.dtype)


def logps_and_logits(
    head: Head, part: VocabularyPart | None, hidden: mx.array, targets: mx.array, earlier: Sequence[mx.array]
) -> tuple[mx.array, mx.array]:
    """Log-probabilities whose gradient is made with them, float32 [M]; and the logits, [M, V], without any."""
    still = after(mx.stop_gradient(hidden), earlier)
    logits = head(still)
    if part is None:
        logps, by_logits = _logps_and_slope(logits, targets)
    else:
        logps, partition = part.combined(part.figures(logits, targets))
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
