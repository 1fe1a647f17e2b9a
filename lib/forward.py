"""A batch through the model, each token once: shared prompts, the head where it is needed, no large logits.

The blocks see the stream of lib/data.py as N sequences of one token: every layer but attention treats tokens
alone, and the rotary embedding takes an offset for each. Attention is told by the object that it is given as
its cache: there the stream is laid out as rectangles, all of them causal, so that no mask is needed. No model
file knows of it.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx.utils import tree_flatten, tree_unflatten
from mlx_lm.models import base

from lib.config import Data

Head = Callable[[mx.array], mx.array]

# Most bytes of float32 logits at a time.
LOGITS_BYTES = 2**29


def length_multiple(settings: Data) -> int:
    """What lengths are padded to: as set, else 64 on a GPU, where 1,023 positions took twice as long as 1,024."""
    return settings.length_multiple or (64 if mx.default_device() == mx.gpu else 16)


def arrays_of(inputs: dict[str, Any]) -> dict[str, Any]:
    """A batch's `inputs` on the device."""
    return {name: mx.array(value) if isinstance(value, np.ndarray) else value for name, value in inputs.items()}


def completion_logps(model: nn.Module, inputs: dict[str, Any]) -> mx.array:
    """Log-probability of each completion, summed over its tokens: float32 [b, K], in nats.

    Args:
        inputs: `arrays_of` lib/data.py's Batch.inputs. In evaluation mode the result has no gradients.
    """
    hidden = mx.take(hidden_states(model, inputs, getattr(model, "attention_window", None)), inputs["scored"], axis=0)
    logps = token_logps(model, hidden, inputs["targets"])
    return mx.where(inputs["mask"], mx.take(logps, inputs["places"]), 0.0).sum(axis=-1)


# ---- The blocks --------------------------------------------------------------------------------------------


def hidden_states(model: nn.Module, inputs: dict[str, Any], window: int | None = None) -> mx.array:
    """What the head would see of every token of the stream: [N, D] (logits, of a model without a backbone).

    window: tokens that each attends to, itself included; for models that take a stream.
    """
    tokens, (rows, completions, _) = inputs["tokens"], inputs["mask"].shape
    if inputs["prefix_length"] == 0 and "slots" not in inputs and window is None:
        hidden = _run_backbone(model, tokens.reshape(rows * completions, -1))
    else:
        stream = Stream(
            inputs["offsets"],
            rows,
            completions,
            inputs["prefix_length"],
            inputs.get("slots"),
            inputs.get("sources"),
            window,
        )
        hidden = _run_backbone(model, tokens[:, None], cache=[stream] * len(model.layers))
    return hidden.reshape(len(tokens), -1)


class Stream:
    """Stands where a block expects its cache, and lays the stream out for attention.

    Args:
        offset: int32 [N], the name by which blocks ask for the positions.
        prefix: P; slots, sources: of a ragged stream (see Batch).
        window: tokens that each attends to, itself included.
    """

    def __init__(
        self,
        offset: mx.array,
        rows: int,
        completions: int,
        prefix: int,
        slots: mx.array | None,
        sources: mx.array | None,
        window: int | None = None,
    ):
        self.offset, self.rows, self.completions, self.prefix = offset, rows, completions, prefix
        self.slots, self.sources, self.window = slots, sources, window
        self.behind = offset.size - rows * prefix
        self.length = self.behind // (rows * completions) if slots is None else slots.shape[-1]
        if slots is not None and sources is not None:
            # A token that several sequences share takes its output from the first of them.
            flat = slots.reshape(-1)
            first = mx.take(sources[:, 0], mx.maximum(flat, 0)) == mx.arange(flat.size)
            self.slots, self.owned = flat, mx.where(first, flat, -1)

    def make_mask(self, N: int, return_array: bool = False, window_size: int | None = None) -> Window | None:  # noqa: N803
        return None if window_size is None else Window(window_size)

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        return keys, values

    def attend(
        self,
        queries: mx.array,
        keys: mx.array,
        values: mx.array,
        scale: float,
        mask: Window | None,
        **options: Any,
    ) -> mx.array:
        """[N, heads, 1, head_dim] each: every token attends to its own sequence up to itself."""
        if not (mask is None or isinstance(mask, Window)):
            raise TypeError("this model makes its own attention mask")

        windows = [window for window in (self.window, mask.size if mask else None) if window is not None]

        def attention(q: mx.array, k: mx.array, v: mx.array) -> mx.array:  # [sequences, heads, length, head_dim]
            out = local_attention(q, k, v, min(windows, default=None), scale=scale, **options)
            return out.swapaxes(1, 2).flatten(0, 1)

        cut, outputs, prefixes = self.rows * self.prefix, [], []
        whole = [x.squeeze(2) for x in (queries, keys, values)]
        if self.prefix:
            prefixes = [x[:cut].reshape(self.rows, self.prefix, *x.shape[1:]).swapaxes(1, 2) for x in whole]
            outputs.append(attention(*prefixes))
        tails = [self._spread(x[cut:]).reshape(-1, self.length, *x.shape[1:]).swapaxes(1, 2) for x in whole]
        if self.prefix:
            for i in (1, 2):
                tails[i] = mx.concatenate([mx.repeat(prefixes[i], self.completions, axis=0), tails[i]], axis=2)
        outputs.append(self._gather(attention(*tails)))
        return mx.concatenate(outputs)[:, :, None]

    def _spread(self, x: mx.array) -> mx.array:
        """[N - b * P, ...] ➜ [b * K * T, ...]; what stands at a sequence's padding is looked at by nobody."""
        return x if self.slots is None or self.sources is None else _move(x, self.slots, self.sources)

    def _gather(self, x: mx.array) -> mx.array:
        """The way back."""
        return x if self.sources is None else _move(x, self.sources[:, 0], self.owned[:, None])


class Window:
    """Stands where a block expects its mask: attention to the last `size` positions only."""

    def __init__(self, size: int):
        self.size = size


def local_attention(
    queries: mx.array, keys: mx.array, values: mx.array, window: int | None, **options: Any
) -> mx.array:
    """Attention of the last positions of a sequence to the `window` positions up to their own, or to all of those.

    queries: [sequences, heads, T, head_dim]; keys, values: [sequences, heads, S, head_dim], T <= S. Queries in blocks as
    long as the window meet the keys of their own block and of the one before: time and memory grow with T * window
    (sliding windows as in Longformer, arXiv:2004.05150, section 3.1).
    """
    sdpa = mx.fast.scaled_dot_product_attention
    sequences, length = queries.shape[0], keys.shape[2]
    if window is None or length <= window:
        return sdpa(queries, keys, values, mask="causal", **options)
    behind = length - queries.shape[2]
    start = max(behind, window)  # from here on every window is full
    early = start - behind
    rest = length - start
    padding = [(0, 0), (0, 0), (0, -rest % window), (0, 0)]

    def blocks(x: mx.array) -> mx.array:  # [sequences, heads, length, ...] ➜ [sequences, blocks, heads, window, ...]
        return mx.unflatten(mx.pad(x, padding), 2, (-1, window)).swapaxes(1, 2)

    def with_one_before(x: mx.array) -> mx.array:
        x = blocks(x[:, :, start - window :])
        return mx.concatenate([x[:, :-1], x[:, 1:]], axis=3).flatten(0, 1)

    mask = base.create_causal_mask(window, offset=window, window_size=window)
    out = sdpa(
        blocks(queries[:, :, early:]).flatten(0, 1),
        with_one_before(keys),
        with_one_before(values),
        mask=mask,
        **options,
    )
    out = mx.unflatten(out, 0, (sequences, -1)).swapaxes(1, 2).flatten(2, 3)[:, :, :rest]
    if early == 0:
        return out
    first = sdpa(queries[:, :, :early], keys[:, :, :start], values[:, :, :start], mask="causal", **options)
    return mx.concatenate([first, out], axis=2)


def _move(x: mx.array, index: mx.array, inverse: mx.array) -> mx.array:
    """x[index] along the first axis (x[0] where the index is -1), whose gradient gathers as well, in a fixed order.

    MLX would scatter the gradient with atomic additions: slower, and another sum every time.
    inverse: [len(x), uses], where x's rows went; -1 for nowhere.
    """

    @mx.custom_function
    def move(x: mx.array) -> mx.array:
        return mx.take(x, mx.maximum(index, 0), axis=0)

    @move.vjp
    def move_vjp(_: Any, cotangent: mx.array, __: Any) -> mx.array:
        shape = (-1,) + (1,) * (cotangent.ndim - 1)
        total = None
        for i in range(inverse.shape[1]):
            source = inverse[:, i]
            part = mx.where((source >= 0).reshape(shape), mx.take(cotangent, mx.maximum(source, 0), axis=0), 0)
            total = part if total is None else total + part
        return total

    return move(x)


def _attention_of(original: Callable[..., mx.array]) -> Callable[..., mx.array]:
    def scaled_dot_product_attention(
        queries: mx.array, keys: mx.array, values: mx.array, cache: Any, **options: Any
    ) -> mx.array:
        if isinstance(cache, Stream):
            return cache.attend(queries, keys, values, **options)
        return original(queries, keys, values, cache=cache, **options)

    return scaled_dot_product_attention


def _hear_streams(model: nn.Module) -> None:
    """Lets the attention of the model's family know a stream by its type; for every other cache nothing changes."""
    for module in {sys.modules[type(part).__module__] for part in model.modules()}:
        if getattr(module, "scaled_dot_product_attention", None) is base.scaled_dot_product_attention:
            module.scaled_dot_product_attention = _attention_of(base.scaled_dot_product_attention)  # type: ignore[attr-defined]


def cannot_share_prompts(model: nn.Module) -> str | None:
    """None for a model to which a stream is the same as whole rows; else why not, in words.

    It is tried, on random tokens: recurrent layers, or an attention of the family's own, show there.
    """
    _hear_streams(model)
    prompt, long, short = (np.random.default_rng(i).integers(0, 16, n).tolist() for i, n in enumerate((5, 3, 1)))
    mask = mx.ones((1, 2, 1))
    rows = {"prefix_length": 0, "tokens": mx.array([*prompt, *long, *prompt, *short, 0, 0]), "mask": mask}
    stream = {
        "prefix_length": 2,
        "tokens": mx.array([*prompt, *long, *short]),
        "offsets": mx.array([0, 1, 2, 3, 4, 5, 6, 7, 5]),
        "slots": mx.array([[[0, 1, 2, 3, 4, 5], [0, 1, 2, 6, -1, -1]]]),
        "sources": mx.array([[0, 6], [1, 7], [2, 8], [3, -1], [4, -1], [5, -1], [9, -1]]),
        "mask": mask,
    }
    was_training = model.training
    model.eval()
    try:
        wanted = hidden_states(model, rows)[mx.array([*range(8), 13])].astype(mx.float32)
        error = (
            mx.linalg.norm(hidden_states(model, stream).astype(mx.float32) - wanted) / mx.linalg.norm(wanted)
        ).item()
    except Exception as reason:  # a family's own code, handed what it does not expect, may raise anything
        return (
            f"its blocks do not take a stream of tokens ({type(reason).__name__}: {str(reason).splitlines()[0][:80]})"
        )
    finally:
        model.train(was_training)
    is_exact = all(a.dtype in (mx.float32, mx.uint32) for _, a in tree_flatten(model.parameters()))
    return (
        None
        if error <= (1e-4 if is_exact else 0.03)
        else f"a stream of tokens would change its outputs by {error:.2g} of their norm"
    )


# ---- The head and the loss ---------------------------------------------------------------------------------


def token_logps(model: nn.Module, hidden: mx.array, targets: mx.array) -> mx.array:
    """log softmax(head(hidden))[target] in float32, without ever holding all logits: float32 [M].

    Args:
        hidden: [M, D].
        targets: int32 [M].

    A frozen head's gradient is made in the forward pass, where the logits are, as in Liger Kernel
    (arXiv:2410.10989, section 3.2): d logp / d hidden does not depend on what comes after. A head that is
    trained makes its logits a second time.
    """
    head, part = _head(model), getattr(model, "vocabulary_part", None)
    if part is not None:
        return _logps_of_parts(model, part, head, part.ranks.sum_backward(hidden), targets)
    chunks = _chunks(hidden, targets, head(hidden[:1]).shape[-1])
    if model.training and len(chunks) > 1 and not _is_frozen(model):
        return _checkpointed(model, head, chunks, _logps)
    outputs: list[mx.array] = []
    for h, t in chunks:
        if model.training and not _is_frozen(model):
            outputs.append(_logps(head(h), t))
        elif model.training:
            outputs.append(_logps_and_slope(head, h, t, outputs[-1:]))
        else:
            outputs.append(_logps(head(_after(h, outputs[-1:])), t))
    return mx.concatenate(outputs)


def _after(x: mx.array, earlier: Sequence[mx.array]) -> mx.array:
    """The same array, made when others are done: MLX would make the logits of many chunks at once, and hold them all."""
    return mx.depends([x], [mx.stop_gradient(each) for each in earlier])[0] if earlier else x


def _chunks(hidden: mx.array, targets: mx.array, vocabulary: int) -> list[tuple[mx.array, mx.array]]:
    """Pieces whose logits are small enough."""
    pieces = -(-len(targets) * vocabulary * 4 // LOGITS_BYTES)
    size = -(-len(targets) // pieces)
    return [(hidden[i : i + size], targets[i : i + size]) for i in range(0, len(targets), size)]


def _logps(logits: mx.array, targets: mx.array) -> mx.array:
    """Log-probabilities of the targets, float32 [M]."""
    if mx.default_device() == mx.cpu:  # elsewhere one kernel, which accumulates in float32 without such a copy
        logits = logits.astype(mx.float32)
    return -mx.fast.cross_entropy(logits, targets)


@mx.compile
def _slope(probabilities: mx.array, targets: mx.array) -> mx.array:
    """d logp / d logits: one at the target, minus the probabilities."""
    return (mx.arange(probabilities.shape[-1])[None] == targets[:, None]) - probabilities


@mx.compile
def _slope_of_logits(logits: mx.array, targets: mx.array, logps: mx.array) -> mx.array:
    partition = mx.take_along_axis(logits, targets[:, None], axis=-1).astype(mx.float32) - logps[:, None]
    return _slope(mx.exp(logits.astype(mx.float32) - partition), targets).astype(logits.dtype)


def _logps_and_slope_of_logits(logits: mx.array, targets: mx.array) -> tuple[mx.array, mx.array]:
    """Log-probabilities of the targets, float32 [M], and their derivative by the logits, [M, V]."""
    if mx.default_device() != mx.cpu:
        logps = _logps(logits, targets)
        return logps, _slope_of_logits(logits, targets, logps)
    # Exponentials are what a CPU is slow at: each is made once. The partition function from the likeliest token,
    # whose probability is at least 1 / V.
    wide = logits.astype(mx.float32)
    probabilities = mx.softmax(wide, axis=-1)
    partition = wide.max(axis=-1) - mx.log(probabilities.max(axis=-1))
    logps = mx.take_along_axis(wide, targets[:, None], axis=-1).squeeze(-1) - partition
    return logps, _slope(probabilities, targets).astype(logits.dtype)


def _logps_and_slope(head: Head, hidden: mx.array, targets: mx.array, earlier: Sequence[mx.array]) -> mx.array:
    still = _after(mx.stop_gradient(hidden), earlier)
    logps, by_logits = _logps_and_slope_of_logits(head(still), targets)
    _, (slope,) = mx.vjp(head, [still], [by_logits])
    return _known(hidden, logps, slope)


def _known(hidden: mx.array, logps: mx.array, slope: mx.array) -> mx.array:
    """Log-probabilities whose gradient is known already: float32 [M], of hidden and slope [M, D]."""
    # The logits are needed by both; in this order they can be let go before the next chunk's are made.
    (logps,) = mx.depends([logps], [slope])

    @mx.custom_function
    def known(hidden: mx.array) -> mx.array:
        return mx.stop_gradient(logps)

    @known.vjp
    def known_vjp(_: Any, cotangent: mx.array, __: Any) -> mx.array:
        return (cotangent[:, None] * slope).astype(slope.dtype)

    return known(hidden)


def _checkpointed(
    model: nn.Module,
    head: Head,
    chunks: Sequence[tuple[mx.array, mx.array]],
    of: Callable[[mx.array, mx.array], mx.array],
) -> mx.array:
    """`of(logits, targets)` of all chunks, side by side, with logits that the backward pass makes again, chunk by chunk."""
    before = _outside_blocks(model)
    names, targets = list(before), [t for _, t in chunks]

    def made_again(parameters: Sequence[mx.array], hidden: mx.array, targets: mx.array) -> mx.array:
        model.update(tree_unflatten(list(zip(names, parameters, strict=True))))
        try:
            return of(head(hidden), targets)
        finally:
            model.update(tree_unflatten(list(before.items())))

    @mx.custom_function
    def of_all(*arrays: mx.array) -> list[mx.array]:
        parameters, hidden = arrays[: len(names)], arrays[len(names) :]
        outputs: list[mx.array] = []
        for h, t in zip(hidden, targets, strict=True):
            outputs.append(made_again(parameters, _after(h, outputs[-1:]), t))
        return outputs

    @of_all.vjp
    def of_all_vjp(primals: Any, cotangents: Any, _: Any) -> list[mx.array]:
        parameters, hidden = list(primals[: len(names)]), primals[len(names) :]
        totals: list[mx.array] = []
        by_hidden: list[mx.array] = []
        for h, t, cotangent in zip(hidden, targets, cotangents, strict=True):
            inputs = [*parameters, _after(h, [*by_hidden[-1:], *totals])]
            _, slopes = mx.vjp(lambda *a, t=t: made_again(a[:-1], a[-1], t), inputs, [cotangent])
            totals = [a + b for a, b in zip(totals, slopes[:-1], strict=True)] if totals else slopes[:-1]
            by_hidden.append(slopes[-1])
        return [*totals, *by_hidden]

    return mx.concatenate(of_all(*before.values(), *(h for h, _ in chunks)), axis=-1)


class VocabularyPart(Protocol):
    """Of a model whose embedding and head are divided: this rank's tokens begin at `first`, of `size` in all."""

    ranks: Any  # a sync.World
    first: int
    size: int

    def own_logits(self) -> AbstractContextManager[None]:
        """Within it the head gives this rank's logits only."""


def _logps_of_parts(
    model: nn.Module, part: VocabularyPart, head: Head, hidden: mx.array, targets: mx.array
) -> mx.array:
    """`token_logps` where every rank makes the logits of its own tokens, which never leave it.

    What the ranks exchange of a position is one number each, the logarithm of its part of the partition function, and the
    target's logit. Chunks follow one another, so that their sums are made in the same order everywhere.
    """

    def own_head(hidden: mx.array) -> mx.array:
        with part.own_logits():
            return head(hidden)

    def known_here(logits: mx.array, targets: mx.array) -> mx.array:  # float32 [2, M]
        wide, local = logits.astype(mx.float32), targets - part.first
        at = mx.take_along_axis(wide, mx.clip(local, 0, wide.shape[-1] - 1)[:, None], axis=-1).squeeze(-1)
        return mx.stack([mx.logsumexp(wide, axis=-1), mx.where((local >= 0) & (local < wide.shape[-1]), at, 0.0)])

    def together(own: mx.array) -> tuple[mx.array, mx.array]:  # log-probabilities, log partition function: [M] each
        slot = (mx.arange(part.ranks.size) == part.ranks.rank)[:, None]
        told = part.ranks.sum_forward(mx.concatenate([mx.where(slot, own[:1], 0.0), own[1:]]))
        partition = mx.logsumexp(told[:-1], axis=0)
        return told[-1] - partition, partition

    chunks = _chunks(hidden, targets, part.size)
    if not (model.training and _is_frozen(model)):
        if model.training and len(chunks) > 1:
            return together(_checkpointed(model, own_head, chunks, known_here))[0]
        own: list[mx.array] = []
        for h, t in chunks:
            own.append(known_here(own_head(_after(h, own[-1:])), t))
        return together(mx.concatenate(own, axis=1))[0]
    outputs: list[mx.array] = []
    for h, t in chunks:
        still, t = _after(mx.stop_gradient(h), outputs[-1:]), _after(t, outputs[-1:])
        logits = own_head(still)
        logps, partition = together(known_here(logits, t))
        _, (slope,) = mx.vjp(own_head, [still], [_slope_of_part(logits, t - part.first, partition)])
        outputs.append(_known(h, logps, slope))
    return mx.concatenate(outputs)


@mx.compile
def _slope_of_part(logits: mx.array, targets: mx.array, partition: mx.array) -> mx.array:
    """d logp / d logits; of targets that are another rank's, none is met."""
    is_target = mx.arange(logits.shape[-1])[None] == targets[:, None]
    return (is_target - mx.exp(logits.astype(mx.float32) - partition[:, None])).astype(logits.dtype)


def _outside_blocks(model: nn.Module) -> dict[str, mx.array]:
    """Trained parameters that belong to no block, by name."""
    blocks = {id(a) for layer in model.layers for _, a in tree_flatten(layer.trainable_parameters())}
    return {name: a for name, a in tree_flatten(model.trainable_parameters()) if id(a) not in blocks}


def _is_frozen(model: nn.Module) -> bool:
    return not _outside_blocks(model)


def _head(model: nn.Module) -> Head:
    """The model from its backbone's output on: [M, D] ➜ [M, V]."""
    place = _backbone(model)
    if place is None:
        return lambda hidden: hidden

    def head(hidden: mx.array) -> mx.array:
        with _Replaced(*place, lambda *args, **kwargs: hidden[None]):
            return model(mx.zeros((1, len(hidden)), mx.int32)).squeeze(0)

    return head


def _run_backbone(model: nn.Module, tokens: mx.array, **options: Any) -> mx.array:
    """The backbone's output, called as the model calls it; of a model without one, the model's."""
    place = _backbone(model)
    if place is None:
        return model(tokens, **options)
    outputs = []

    def listen(*args: Any, **kwargs: Any) -> mx.array:
        outputs.append(backbone(*args, **kwargs))
        return outputs[0][:1, :1]  # something for the head, whose result nobody evaluates

    backbone = place[0][place[1]]
    with _Replaced(*place, listen):
        model(tokens, **options)
    return outputs[0]


class _Replaced:
    """Within a `with`, a function in the place of a module's part, which still answers for its attributes."""

    def __init__(self, holder: nn.Module, name: str, function: Callable[..., mx.array]):
        self.holder, self.name, self.part, self.function = holder, name, holder[name], function

    def __enter__(self) -> None:
        dict.__setitem__(self.holder, self.name, self)  # not by attribute: parameters keep their names

    def __exit__(self, *_: object) -> None:
        dict.__setitem__(self.holder, self.name, self.part)

    def __call__(self, *args: Any, **kwargs: Any) -> mx.array:
        return self.function(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.part, name)


def _backbone(model: nn.Module) -> tuple[nn.Module, str] | None:
    """The module that holds the backbone (the part that owns the blocks), and its name there; None without one."""
    for holder in model.modules():
        for name, part in holder.children().items():
            owns = isinstance(part, nn.Module) and part is not model and part.get("layers")
            if owns and [*map(id, owns)] == [*map(id, model.layers)]:  # which may be a new list at every look
                return holder, name
    return None
