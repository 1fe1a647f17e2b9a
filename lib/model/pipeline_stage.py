"""A loaded model goes in, this rank's consecutive blocks come out: a stage of a pipeline.

The model's own code still runs, over its whole list of blocks. Those of other ranks have neither weights nor work: they
pass on their input, the one before this rank's first block the output of the rank before, and the one after its last
block sends it to the next rank. The modules before the blocks (the embedding) are on the first rank, those after them
(norm and head) on the last, a tied embedding on both.
"""

from __future__ import annotations

import bisect
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten, tree_map

from lib.errors import UserError
from lib.model.layout import Neighbours, Stage, family_of, layout_of
from lib.model.partition import bounds
from lib.model.patches import derived, replace_modules, with_methods
from lib.model.token_stream import Stream


def cut(model: nn.Module, blocks: Sequence[int], rank: int, neighbours: Neighbours) -> Stage:
    """Leaves a rank its blocks (blocks: of each rank) of a model that may be loaded lazily; the model's layout has the
    stage afterwards. Raises UserError: it cannot be cut between its blocks."""
    outline, ends, size = outline_of(model), bounds(blocks), len(blocks)
    if ends[-1] != len(model.layers):
        raise UserError(f"strategy=pipelined: {list(blocks)} are not the model's {len(model.layers)} blocks")
    holders = _holders(model, outline, ends)
    first_trained = min((holders[name][0] for name, _ in tree_flatten(model.trainable_parameters())), default=size)
    first, last = ends[rank], ends[rank + 1]
    dtypes = outline.dtypes[first], outline.dtypes[min(last, ends[-1] - 1)]
    hidden_size = outline.outputs[-1].shape[-1]
    stage = Stage(rank, size, hidden_size, dtypes, holders, first_trained, neighbours)
    absent: dict[int, nn.Module] = {}
    for i, block in enumerate(model.layers):
        if not first <= i < last:
            entry = stage.enter if i == first - 1 else stage.leave if i == last else None
            absent[id(block)] = _absent_block(block, entry, outline.counts[i])
    for name, unit in _units(model):
        if not ((rank == 0 and name in outline.before) or (rank == size - 1 and name in outline.after)):
            absent[id(unit)] = _absent_unit(unit, hidden_size, outline.dtypes[0])
    replace_modules(model, lambda part: absent.get(id(part)))
    layout_of(model).stage = stage
    for _, array in tree_flatten(model.parameters()):
        mx.eval(array)
    mx.clear_cache()
    return stage


class Outline(NamedTuple):
    """How a model runs: its blocks one after the other, with other modules before and after."""

    dtypes: list[mx.Dtype]  # of each block's input
    outputs: list[mx.array]  # of each block
    counts: list[int]  # of the values in the tuple that each block returns; 0: it returns an array
    before: set[str]  # the names of the other modules with parameters, by their use
    after: set[str]


def _unknown(output: Any) -> Any:
    """An array that marks all that is made of it: no weight is read where one looks."""
    is_floating = isinstance(output, mx.array) and mx.issubdtype(output.dtype, mx.floating)
    return mx.full(output.shape, mx.nan, output.dtype) if is_floating else output


def outline_of(model: nn.Module) -> Outline:
    """How a model runs, by a lazy run of its code. Raises UserError: its blocks are no chain."""
    cannot = f"strategy=pipelined cannot cut a model of family {family_of(model)}"
    outline, units, count = Outline([], [], [], set(), set()), dict(_units(model)), len(model.layers)

    def block_call(plain: Any) -> Any:
        def call(block: nn.Module, *args: Any, **options: Any) -> Any:
            x, *others = [each for _, each in tree_flatten((args, options)) if isinstance(each, mx.array)] or [None]
            is_chained = x is not None and (not outline.outputs or x is outline.outputs[-1])
            if not is_chained or any(mx.isnan(other).any().item() for other in others):
                raise TypeError("blocks take something else than the output of the one before")
            whole = tree_map(_unknown, plain(block, *args, **options))  # of several arrays the first goes on
            output = whole[0] if isinstance(whole, tuple) else whole
            are_plain = all(isinstance(each, mx.array | int | None) for _, each in tree_flatten([whole]))
            if not isinstance(output, mx.array) or output.shape != x.shape or not are_plain:
                raise TypeError("a block makes something else than its input's next state")
            outline.dtypes.append(x.dtype)
            outline.outputs.append(output)
            outline.counts.append(len(whole) if isinstance(whole, tuple) else 0)
            return whole

        return call

    def unit_call(name: str) -> Callable[[Any], Any]:
        def make(plain: Any) -> Any:
            def call(module: nn.Module, *args: Any, **options: Any) -> Any:
                (outline.after if len(outline.dtypes) == count else outline.before).add(name)
                return _unknown(plain(module, *args, **options))

            return call

        return make

    noted = [(block, with_methods(block, __call__=block_call)) for block in model.layers]
    noted += [
        (unit, with_methods(unit, __call__=unit_call(name), as_linear=unit_call(name))) for name, unit in units.items()
    ]
    there, back = {id(old): new for old, new in noted}, {id(new): old for old, new in noted}
    try:
        replace_modules(model, lambda part: there.get(id(part)))
        model(mx.zeros((1, 2), mx.int32))
    except (TypeError, ValueError, AttributeError, KeyError, IndexError) as reason:
        raise UserError(f"{cannot}: {str(reason).splitlines()[0][:80]}") from None
    finally:
        replace_modules(model, lambda part: back.get(id(part)))
    if unknown := sorted(units.keys() - outline.before - outline.after):
        raise UserError(f"{cannot}: {', '.join(unknown)} is used neither before nor after the blocks")
    if len(outline.dtypes) != count:
        raise UserError(f"{cannot}: it skips blocks")
    return outline


def _units(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """The modules outside of the blocks that have parameters, by name; of modules within each other the outermost."""
    blocks = {id(block) for block in model.layers}

    def within(module: nn.Module, prefix: str) -> Iterator[tuple[str, nn.Module]]:
        for name, child in tree_flatten(module.children(), is_leaf=nn.Module.is_module):
            if any(id(part) in blocks for part in child.modules()):
                if id(child) not in blocks:
                    yield from within(child, f"{prefix}{name}.")
            elif tree_flatten(child.parameters()):
                yield f"{prefix}{name}", child

    return within(model, "")


def _holders(model: nn.Module, outline: Outline, ends: Sequence[int]) -> dict[str, tuple[int, ...]]:
    """The ranks that hold every parameter. Raises UserError where one is trained that belongs to no module."""
    size, names = len(ends) - 1, {id(module): name for name, module in model.named_modules()}
    ranks: dict[str, tuple[int, ...]] = {}
    for i, block in enumerate(model.layers):
        ranks[f"{names[id(block)]}."] = (bisect.bisect(ends, i) - 1,)
    for name, _ in _units(model):
        ranks[f"{name}."] = tuple(sorted({*[0] * (name in outline.before), *[size - 1] * (name in outline.after)}))
    trained, holders = dict(tree_flatten(model.trainable_parameters())), dict[str, tuple[int, ...]]()
    for name, _ in tree_flatten(model.parameters()):
        held = next((held for prefix, held in ranks.items() if name.startswith(prefix)), None)
        if held is None and size > 2 and name in trained:
            raise UserError(f"strategy=pipelined cannot train {name}, which belongs to no block; leave it out")
        holders[name] = held or tuple(range(size))
    return holders


def _absent_block(block: nn.Module, entry: Callable[[mx.array], mx.array] | None, count: int) -> nn.Module:
    """Stands for another rank's block: passes on its input, or `entry` of that. count: of values, as in Outline."""

    def call(self: nn.Module, *args: Any, **options: Any) -> Any:
        x = next(each for _, each in tree_flatten((args, options)) if isinstance(each, mx.array))
        cache = next((arg for arg in (*args, *options.values()) if hasattr(arg, "update_and_fetch")), None)
        if cache is not None and not isinstance(cache, Stream):  # any block's cache may be asked for the position
            nothing = mx.zeros((x.shape[0], 1, x.shape[1], 1), x.dtype)
            cache.update_and_fetch(nothing, nothing)
        output = x if entry is None else entry(x).reshape(x.shape)
        return (output, *[None] * (count - 1)) if count else output

    return _empty(with_methods(block, __call__=lambda _: call))


def _absent_unit(unit: nn.Module, hidden_size: int, dtype: mx.Dtype) -> nn.Module:
    """Stands for an embedding, a norm or a head: an output of the right shape, which is not used."""

    def nothing(self: nn.Module, x: mx.array, *args: Any, **options: Any) -> mx.array:
        return x if mx.issubdtype(x.dtype, mx.floating) else mx.zeros((*x.shape, hidden_size), dtype)

    return _empty(with_methods(unit, __call__=lambda _: nothing, as_linear=lambda _: nothing))


def _empty(module: nn.Module) -> nn.Module:
    """The module without arrays, its modules copied without theirs; settings stay."""

    def emptied(leaf: Any) -> Any:
        return _empty(derived(leaf, type(leaf))) if isinstance(leaf, nn.Module) else leaf

    for name, value in list(module.items()):
        if any(isinstance(leaf, mx.array) for _, leaf in tree_flatten([value], is_leaf=nn.Module.is_module)):
            dict.__delitem__(module, name)
        else:
            dict.__setitem__(module, name, tree_map(emptied, value, is_leaf=nn.Module.is_module))
    return module
