"""How a model's blocks run in training: the order of the backward pass, gradient checkpointing.

MLX evaluates a graph in an order that follows its outputs. Of hundreds of gradients it may go down through all blocks
first, and hold the inputs of every block's own gradients until then.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten, tree_map, tree_unflatten

from lib.model.layout import parameters_outside_blocks
from lib.model.long_attention import after
from lib.model.patches import replace_modules, with_methods
from lib.model.quantised import dequantised_once
from lib.model.token_stream import Stream, Window

PLAIN = (mx.array, str, int, float, type(None), Stream, Window)  # arguments in which a block leaves no outputs


def order_backward(model: nn.Module) -> None:
    """Lets every block pass its input's gradient on when its own parameters' gradients are computed."""
    blocks = {id(block) for block in model.layers if not hasattr(block, "is_recomputed")}

    def ordered(part: nn.Module) -> nn.Module | None:
        return with_methods(part, {"is_recomputed": False}, __call__=_ordered_call) if id(part) in blocks else None

    replace_modules(model, ordered)


def checkpoint_blocks(model: nn.Module) -> None:
    """Lets every block keep its input alone, and be recomputed when its output's gradient is there (arXiv:1604.06174,
    section 4.1). mx.checkpoint does not say when: MLX may recompute all before the first is needed."""
    order_backward(model)
    for block in model.layers:
        if hasattr(block, "is_recomputed"):
            block.is_recomputed = True


def _ordered_call(plain: Any) -> Any:
    def call(block: Any, *args: Any, **options: Any) -> Any:
        trained = block.trainable_parameters() if block.training else {}
        parameters, is_recomputed = dict(tree_flatten(trained)), block.training and block.is_recomputed
        # AFM7's last blocks read keys from a cache that another filled, Kimi K3's add to a list of residuals.
        is_recomputed = is_recomputed and all(isinstance(each, PLAIN) for _, each in tree_flatten((args, options)))
        if not (parameters or is_recomputed):
            return plain(block, *args, **options)
        inputs = [leaf for _, leaf in tree_flatten((args, options)) if _has_gradient(leaf)]

        def output_of(*arrays: mx.array) -> Any:  # of the trained parameters, then the inputs
            rest = iter(arrays)
            block.update(tree_unflatten([(name, next(rest)) for name in parameters]))
            new_args, new_options = tree_map(lambda leaf: next(rest) if _has_gradient(leaf) else leaf, (args, options))
            try:
                return plain(block, *new_args, **new_options)
            finally:
                block.update(trained)

        wrapped = _recomputed if is_recomputed else _ordered
        return wrapped(output_of, [*parameters.values(), *inputs], len(parameters))

    return call


def _ordered(output_of: Callable[..., Any], arrays: Sequence[mx.array], trained: int) -> Any:
    @mx.custom_function
    def entry(*arrays: mx.array) -> list[mx.array]:
        return list(arrays)

    @entry.vjp
    def entry_vjp(_: Any, cotangents: Sequence[mx.array], __: Any) -> list[mx.array]:
        return _parameters_first(cotangents, trained)

    return output_of(*entry(*arrays))


def _recomputed(output_of: Callable[..., Any], arrays: Sequence[mx.array], trained: int) -> Any:
    """output_of(*arrays), of which nothing is kept but the arrays."""
    form: list[Any] = []  # of the output, without its arrays: a traced one would live as long as the graph

    def outputs_of(*arrays: mx.array) -> list[mx.array]:
        output = output_of(*arrays)
        form[:] = [tree_map(lambda leaf: ... if isinstance(leaf, mx.array) else leaf, output)]
        return [leaf for _, leaf in tree_flatten([output]) if isinstance(leaf, mx.array)]

    block = mx.custom_function(outputs_of)

    @block.vjp
    def block_vjp(primals: Any, cotangents: Sequence[mx.array], _: Any) -> list[mx.array]:
        inputs = [primals] if isinstance(primals, mx.array) else list(primals)  # MLX hands a single one so
        gradients = mx.vjp(outputs_of, mx.depends(inputs, list(cotangents)), list(cotangents))[1]
        return _parameters_first(gradients, trained)

    outputs: Iterator[mx.array] = iter(block(*arrays))
    return tree_map(lambda leaf: next(outputs) if leaf is ... else leaf, form[0])


def _parameters_first(gradients: Sequence[mx.array], trained: int) -> list[mx.array]:
    """The same gradients; those after the first `trained` wait for these."""
    first, passed_on = list(gradients[:trained]), gradients[trained:]
    return [*first, *(mx.depends([gradient], first)[0] for gradient in passed_on)] if first else list(gradients)


def _has_gradient(leaf: Any) -> bool:
    return isinstance(leaf, mx.array) and mx.issubdtype(leaf.dtype, mx.floating)


def checkpointed_chunks(
    model: nn.Module,
    head: Callable[[mx.array], mx.array],
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
