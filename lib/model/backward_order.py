"""The order of the backward pass: each block's gradients are made before those of the block below it; checkpointing.

MLX evaluates a step's graph in an order of its own, which follows the outputs. Where those are hundreds of gradients,
or one array that is joined of them all, it may go down through all blocks first, and hold what every block's own
gradients are made of until then.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten, tree_map, tree_unflatten


def order_backward(model: nn.Module) -> None:
    """Lets every block of a model hand its input's gradient on when its own parameters' gradients are made."""
    for block in model.layers:
        block.is_ordered = True
        kind = type(block)
        if not getattr(kind.__call__, "only_where_asked", False):
            kind.__call__ = _only_where_asked(kind.__call__)


def checkpoint_blocks(model: nn.Module) -> None:
    """Lets every block keep what goes in, and make its inside again when its backward pass begins.

    Chen et al. 2016, arXiv:1604.06174, section 4.1, with blocks for segments. mx.checkpoint does not say when a block
    is made again, and MLX may make all of them before the first is needed, and hold them all.
    """
    order_backward(model)
    for block in model.layers:
        block.is_checkpointed = True


def _only_where_asked(plain: Callable[..., Any]) -> Callable[..., Any]:
    """A class's call that is another for blocks with a mark, while they train; in other models it is as before."""

    def call(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if not (self.training and getattr(self, "is_ordered", False)):
            return plain(self, *args, **kwargs)
        return _in_order(self, plain, args, kwargs)

    call.only_where_asked = True  # type: ignore[attr-defined]
    return call


def _in_order(block: nn.Module, plain: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """plain(block, *args, **kwargs), with a backward pass of which nothing is begun early or put off."""
    trained = block.trainable_parameters()
    names, parameters = [name for name, _ in tree_flatten(trained)], [array for _, array in tree_flatten(trained)]
    given: list[mx.array] = []
    tree_map(lambda leaf: given.append(leaf) if _has_gradient(leaf) else None, (args, kwargs))

    def output_of(*arrays: mx.array) -> Any:
        block.update(tree_unflatten(list(zip(names, arrays, strict=False))))
        rest = iter(arrays[len(names) :])
        own_args, own_kwargs = tree_map(lambda leaf: next(rest) if _has_gradient(leaf) else leaf, (args, kwargs))
        try:
            return plain(block, *own_args, **own_kwargs)
        finally:
            block.update(trained)

    def own_first(slopes: Sequence[mx.array]) -> list[mx.array]:
        own, passed_on = list(slopes[: len(names)]), slopes[len(names) :]
        return [*own, *(mx.depends([slope], own)[0] for slope in passed_on)] if own else list(slopes)

    if getattr(block, "is_checkpointed", False):
        form: list[Any] = []  # of the output, without its arrays, which nobody is to hold

        def inside(*arrays: mx.array) -> list[mx.array]:
            output = output_of(*arrays)
            form[:] = [tree_map(lambda _: None, output)]
            return [array for _, array in tree_flatten([output])]

        made = mx.custom_function(inside)

        @made.vjp
        def made_again(primals: Any, cotangents: Sequence[mx.array], _: Any) -> list[mx.array]:
            inputs = [primals] if isinstance(primals, mx.array) else list(primals)  # MLX hands a single one so
            slopes = mx.vjp(inside, mx.depends(inputs, list(cotangents)), list(cotangents))[1]
            return own_first(slopes)

        outputs: Iterator[mx.array] = iter(made(*parameters, *given))
        return tree_map(lambda _: next(outputs), form[0])

    if not names:
        return plain(block, *args, **kwargs)

    @mx.custom_function
    def entered(*arrays: mx.array) -> list[mx.array]:
        return list(arrays)

    @entered.vjp
    def left(_: Any, cotangents: Sequence[mx.array], __: Any) -> list[mx.array]:
        return own_first(cotangents)

    return output_of(*entered(*parameters, *given))


def _has_gradient(leaf: Any) -> bool:
    return isinstance(leaf, mx.array) and mx.issubdtype(leaf.dtype, mx.floating)
