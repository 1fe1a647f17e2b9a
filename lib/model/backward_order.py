"""The order of the backward pass, block by block; gradient checkpointing.

MLX evaluates a step's graph in an order of its own, which follows the outputs. Where those are hundreds of gradients,
or one array that is joined of them all, it may go down through all blocks first, and hold what every block's own
gradients are computed from until then.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten, tree_map, tree_unflatten

from lib.model.token_stream import end_at_scored_tokens


def order_backward(model: nn.Module) -> None:
    """Lets every block pass its input's gradient on when its own parameters' gradients are computed.

    It wraps the call of the blocks' class, for training alone. Outputs and gradients stay what they are.
    """
    end_at_scored_tokens(model)  # within: a recomputed block does all of it again
    for kind in {type(block) for block in _own_blocks(model)}:
        if not getattr(kind.__call__, "is_ordered", False):
            kind.__call__ = _ordered(kind.__call__)


def checkpoint_blocks(model: nn.Module) -> None:
    """Lets every block keep its input alone, and be recomputed when its output's gradient is there.

    Chen et al. 2016, arXiv:1604.06174, section 4.1, with blocks for segments. mx.checkpoint does not say when a block
    is recomputed: MLX may recompute all of them before the first is needed, and hold them all.
    """
    order_backward(model)
    for block in _own_blocks(model):
        block.is_checkpointed = True


def _own_blocks(model: nn.Module) -> list[nn.Module]:
    """Without those that other ranks hold (lib/model/pipeline_stage.py).

    What is in their place hands on, in its call, what the stage is given and what it gives: no part of a function to
    wrap, which would cut the gradients off there.
    """
    return [block for block in model.layers if tree_flatten(block.parameters())]


def _ordered(plain: Callable[..., Any]) -> Callable[..., Any]:
    """A block's call whose backward pass neither begins early nor leaves anything for later."""

    @functools.wraps(plain)
    def call(block: nn.Module, *args: Any, **kwargs: Any) -> Any:
        trained = block.trainable_parameters() if block.training else {}
        parameters = dict(tree_flatten(trained))
        is_checkpointed = block.training and getattr(block, "is_checkpointed", False)
        if not (parameters or is_checkpointed):
            return plain(block, *args, **kwargs)
        given: list[mx.array] = []
        tree_map(lambda leaf: given.append(leaf) if _has_gradient(leaf) else None, (args, kwargs))

        def output_of(*arrays: mx.array) -> Any:
            """arrays: the trained parameters, then what the block is given."""
            rest = iter(arrays)
            block.update(tree_unflatten([(name, next(rest)) for name in parameters]))
            own_args, own_kwargs = tree_map(lambda leaf: next(rest) if _has_gradient(leaf) else leaf, (args, kwargs))
            try:
                return plain(block, *own_args, **own_kwargs)
            finally:
                block.update(trained)

        wrapped = _recomputed if is_checkpointed else _kept
        return wrapped(output_of, [*parameters.values(), *given], len(parameters))

    call.is_ordered = True  # type: ignore[attr-defined]
    return call


def _kept(output_of: Callable[..., Any], arrays: Sequence[mx.array], trained: int) -> Any:
    """output_of(*arrays), the first of which are `trained`."""

    @mx.custom_function
    def entry(*arrays: mx.array) -> list[mx.array]:
        return list(arrays)

    @entry.vjp
    def entry_vjp(_: Any, cotangents: Sequence[mx.array], __: Any) -> list[mx.array]:
        return _parameters_first(cotangents, trained)

    return output_of(*entry(*arrays))


def _recomputed(output_of: Callable[..., Any], arrays: Sequence[mx.array], trained: int) -> Any:
    """The same, of which nothing is kept but the arrays."""
    form: list[Any] = []  # of the output, without its arrays: a traced one would live as long as the graph

    def outputs_of(*arrays: mx.array) -> list[mx.array]:
        output = output_of(*arrays)
        form[:] = [tree_map(lambda _: None, output)]
        return [array for _, array in tree_flatten([output])]

    block = mx.custom_function(outputs_of)

    @block.vjp
    def block_vjp(primals: Any, cotangents: Sequence[mx.array], _: Any) -> list[mx.array]:
        inputs = [primals] if isinstance(primals, mx.array) else list(primals)  # MLX hands a single one so
        gradients = mx.vjp(outputs_of, mx.depends(inputs, list(cotangents)), list(cotangents))[1]
        return _parameters_first(gradients, trained)

    outputs: Iterator[mx.array] = iter(block(*arrays))
    return tree_map(lambda _: next(outputs), form[0])


def _parameters_first(gradients: Sequence[mx.array], trained: int) -> list[mx.array]:
    """The same gradients; those after the first `trained` wait for these."""
    own, passed_on = list(gradients[:trained]), gradients[trained:]
    return [*own, *(mx.depends([gradient], own)[0] for gradient in passed_on)] if own else list(gradients)


def _has_gradient(leaf: Any) -> bool:
    return isinstance(leaf, mx.array) and mx.issubdtype(leaf.dtype, mx.floating)
