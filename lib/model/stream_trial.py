"""Whether a model takes a stream of tokens as it takes whole rows: by a trial of a few tokens, forward and backward."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterator
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx.utils import tree_flatten
from mlx_lm.models.cache import ArraysCache, CacheList, make_prompt_cache

from lib.errors import UserError, in_one_line
from lib.model.layout import family_of, layout_of, modules_outside_blocks
from lib.model.patches import attend_by_cache, replace_modules, with_methods
from lib.model.token_stream import Stream, StreamInputs, arrays_of, states_of


def branch_mixers(model: nn.Module, are_attention: bool) -> None:
    """Lets the parts of a model that keep something of earlier tokens take a stream by themselves: recurrences and
    convolutions, or those and attention."""
    blocks = {id(block) for block in model.layers}
    parts = [part for part in modules_outside_blocks(model) if blocks.isdisjoint(map(id, part.modules()))]
    parts += [part for block in model.layers for _, part in tree_flatten(block.children(), is_leaf=nn.Module.is_module)]
    mixers = {id(part) for part in parts if _is_mixer(part, are_attention)}

    def call(plain: Any) -> Any:
        def of_stream(self: nn.Module, *args: Any, **options: Any) -> Any:
            stream = next((leaf for _, leaf in tree_flatten((args, options)) if isinstance(leaf, Stream)), None)
            if stream is None:
                return plain(self, *args, **options)
            return stream.mix((args, options), lambda inputs: plain(self, *inputs[0], **inputs[1]))

        return of_stream

    replace_modules(model, lambda part: with_methods(part, __call__=call) if id(part) in mixers else None)


def _is_mixer(part: nn.Module, is_attention: bool) -> bool:
    """Whether it has a cache; one that it hands to mlx-lm's attention only where that is asked."""
    call = type(part).__call__
    if "cache" not in inspect.signature(call).parameters:
        return False
    return is_attention or "scaled_dot_product_attention" not in call.__code__.co_names


def stream_ways(model: nn.Module) -> Iterator[None]:
    """Lets a model's parts take a stream in one way after another, until one is right."""
    attend_by_cache(model)
    caches, layout = make_prompt_cache(model), layout_of(model)
    lists = [cache.caches for cache in caches if isinstance(cache, CacheList)]
    sizes = [len(part.cache) for part in (*caches, *sum(lists, ())) if isinstance(part, ArraysCache)]
    for are_attention, count in ((False, 0), (True, 0), (True, max(map(len, lists), default=0))):
        branch_mixers(model, are_attention)
        layout.past = max(sizes, default=0), count
        yield


def cannot_share_prompts(model: nn.Module) -> str | None:
    """None for a model to which a stream is the same as whole rows, by a trial, noted in its layout; else why not.
    Raises UserError: the family's code has no gradient, wants another device, or lets tokens see later ones."""
    was_training, layout = model.training, layout_of(model)
    layout.ends_early = False
    model.eval()
    try:
        for _ in stream_ways(model):
            try:
                fault = _stream_fault(model)
            except UserError:
                raise
            except Exception as reason:  # a family's own code may raise anything on inputs that it does not expect
                fault = f"its blocks do not take a stream: {in_one_line(reason, 80)}"
            if fault is None:
                break
    finally:
        model.train(was_training)
    layout.stream_fault = fault or ""
    return fault


def _stream_fault(model: nn.Module) -> str | None:
    prompt, first, second = (np.random.default_rng(i).integers(0, 16, n).tolist() for i, n in enumerate((5, 3, 3)))
    mask = np.ones((1, 2, 1))
    whole_rows = np.array([*prompt, *first, *prompt, *second], np.int32)
    rows = arrays_of({"prefix_length": 0, "tokens": whole_rows, "mask": mask})
    tokens, offsets = np.array([*prompt, *first, *second], np.int32), np.array([*range(8), 5, 6, 7], np.int32)
    stream = arrays_of({"prefix_length": 5, "tokens": tokens, "offsets": offsets, "mask": mask})
    layout, scored, tolerance = layout_of(model), mx.array([4, 5, 8]), rounding_tolerance(model)
    stage, part = layout.stage, layout.vocabulary or layout.positions
    if part is not None:  # unlike devices round unlike, but all that have parts of the blocks go on or none does
        tolerance = part.ranks.sum_forward(mx.array(tolerance)).item()

    def states(inputs: StreamInputs, scored: mx.array | None = None) -> mx.array:
        work = lambda: states_of(model, inputs, None, scored)[0]  # noqa: E731
        if stage is None:
            return work().astype(mx.float32)
        table = mx.random.normal((16, stage.hidden_size), key=mx.random.key(0)).astype(stage.dtypes[0])
        return stage.run(work, None if stage.is_first else table[inputs["tokens"]]).astype(mx.float32)

    def error(states: mx.array, wanted: mx.array) -> float:
        found = mx.linalg.norm(states - wanted) / mx.linalg.norm(wanted)
        return float((found if part is None else part.ranks.agree_forward(found)).item())

    whole = _trained_states(model, lambda: states(rows))
    if error(whole[8:13], whole[:5]) > tolerance:
        raise UserError(f"mlx-lm's {family_of(model)} cannot be trained: its tokens see later ones")
    wanted = whole[mx.array([*range(8), 13, 14, 15])]
    if (difference := error(states(stream), wanted)) > tolerance:
        return f"a stream of tokens would change its outputs by {difference:.2g} of their norm"
    if stage is None or stage.is_last:
        with contextlib.suppress(Exception):  # of a family's own code, where its blocks give fewer tokens
            layout.ends_early = error(states(stream, scored), wanted[scored]) <= tolerance
    return None


def _trained_states(model: nn.Module, states: Callable[[], mx.array]) -> mx.array:
    """What `states` gives, with a gradient made of them. Raises UserError: the family's code cannot do one of both."""
    trained = model.trainable_parameters()
    held = [(module, name, value) for module in model.modules() for name, value in module.items()]
    try:
        if tree_flatten(trained) and layout_of(model).stage is None:
            nn.value_and_grad(model, lambda: states().sum())()
            model.update(trained)
        outputs = states()
    except Exception as reason:
        model.update(trained)
        raise UserError(f"mlx-lm's {family_of(model)} cannot be trained here: {in_one_line(reason, 80)}") from None
    # gemma3n clips some weights at every call: once is enough, and a compiled call would leave a trace in them.
    changed = {id(module) for module, name, value in held if module[name] is not value}
    if changed:
        mx.eval(outputs)
        fixed = lambda plain: lambda m, name, v: None if isinstance(v, mx.array) else plain(m, name, v)  # noqa: E731
        replace_modules(model, lambda part: with_methods(part, __setattr__=fixed) if id(part) in changed else None)
    return outputs


def rounding_tolerance(model: nn.Module) -> float:
    """By how much of their norm two orders of the same operations may differ in hidden states."""
    if any(a.dtype not in (mx.float32, mx.uint32) for _, a in tree_flatten(model.parameters())):
        return 0.1  # 26 roundings of bfloat16; 24 blocks of Qwen3.5 make 60 of float32, and 0.045 on an H200
    # A GPU multiplies float32 in TF32, whose mantissa has 10 bits, unless MLX_ENABLE_TF32=0.
    return 1e-4 if mx.default_device() == mx.cpu else 0.01
