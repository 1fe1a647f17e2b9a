"""A loaded model goes in, this rank's part of it comes out: tensor parallelism for unequal ranks.

A block's attention and its MLP each begin with layers that are divided by their outputs (q, k, v; gate, up) and end with
one that is divided by its inputs (o; down), as in Megatron-LM (arXiv:1909.08053, section 3). So one sum at the end, and
one of the gradients at the beginning, make of the parts what the whole would have computed; both carry a number for
every token and hidden unit, however unevenly heads and columns are dealt. Within, what a rank holds whole (LoRA's A in
front of a divided B, B behind a divided A, norms of heads, routers) gets a part of its gradient on each rank, and these
are summed; outside, every rank computes the same.

The model files know nothing of it: the classes of these two modules are derived from, and their weights cut.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten
from mlx_lm.tuner.dora import DoRALinear

from lib.config import UserError
from lib.division import Division, bounds

FAMILIES = ("llama", "ministral3", "qwen2", "qwen3", "qwen3_moe")  # modules of mlx_lm.models


class Ranks(Protocol):
    """What is needed of a `sync.World`."""

    @property
    def rank(self) -> int: ...
    @property
    def size(self) -> int: ...
    def sum_forward(self, x: mx.array) -> mx.array: ...
    def sum_backward(self, x: mx.array) -> mx.array: ...
    def agree_forward(self, x: mx.array) -> mx.array: ...
    def all_sum(self, array: mx.array, what: str) -> mx.array: ...
    def broadcast(self, tree: Any) -> Any: ...
    def broadcast_text(self, text: str) -> str: ...


@dataclass(frozen=True)
class Part:
    """How an array is divided: rank r keeps [bounds[r], bounds[r + 1]) of an axis, which is counted from the end."""

    axis: int
    bounds: tuple[int, ...]

    def of(self, whole: mx.array, rank: int) -> mx.array:
        """A rank's part."""
        return whole[(..., slice(*self.bounds[rank : rank + 2]), *[slice(None)] * (-1 - self.axis))]

    def whole_shape(self, own: Sequence[int]) -> list[int]:
        """The shape of the whole from that of any part."""
        shape = list(own)
        shape[self.axis] = self.bounds[-1]
        return shape


@dataclass(frozen=True)
class Shards:
    """How the arrays of a model are divided, by name.

    Args:
        parts: of the arrays that are divided; the others are whole on every rank.
        partial: arrays that are whole, but of whose gradient every rank makes a part.
    """

    ranks: Ranks
    parts: Mapping[str, Part]
    partial: frozenset[str]

    def gathered(self, tree: Any) -> Iterator[tuple[str, mx.array]]:
        """Every array of a tree (parameters, or an optimizer's state) by name, whole, one at a time.

        All ranks have to run through it to the end: each array is a collective.
        """
        own = dict(tree_flatten(tree))
        for name, (shape, dtype) in self._described(own).items():
            part = self._part(name)
            if part is None:
                yield name, own[name]
            elif name not in own:  # another rank keeps all of it
                yield name, self._join(part, mx.zeros(part_shape(part, shape, self.ranks.rank), dtype))
            else:
                yield name, self._join(part, own[name])

    def scattered(self, whole: Mapping[str, mx.array]) -> Iterator[tuple[str, mx.array]]:
        """This rank's part of every array that rank 0 has whole, one at a time; a collective, as `gathered`."""
        for name, (shape, dtype) in self._described(whole if self.ranks.rank == 0 else {}).items():
            mine = whole[name] if self.ranks.rank == 0 else mx.zeros(shape, dtype)
            array = self.ranks.broadcast({"whole": mine})["whole"]
            part = self._part(name)
            if part is None:
                yield name, array
            elif part.bounds[self.ranks.rank] < part.bounds[self.ranks.rank + 1]:
                yield name, _copied(part.of(array, self.ranks.rank))

    def _part(self, name: str) -> Part | None:
        """Of a parameter, or of an optimizer's array for it, which is called model.PARAMETER.SLOT or PARAMETER.SLOT."""
        return self.parts.get(name) or self.parts.get(name.rpartition(".")[0])

    def _described(self, arrays: Mapping[str, mx.array]) -> dict[str, tuple[list[int], mx.Dtype]]:
        """Names, whole shapes and dtypes as rank 0 knows them: it has some part of everything."""
        mine = []
        for name, array in sorted(arrays.items()):
            part = self._part(name)
            shape = list(array.shape) if part is None else part.whole_shape(array.shape)
            mine.append([name, shape, str(array.dtype).rpartition(".")[2]])
        told = json.loads(self.ranks.broadcast_text(json.dumps(mine)))
        return {name: (shape, getattr(mx, dtype)) for name, shape, dtype in told}

    def _join(self, part: Part, own: mx.array) -> mx.array:
        """The whole, bit for bit: sums of integers, to which all but one rank add nothing."""
        words = mx.view(own, mx.int32) if own.itemsize == 4 else mx.view(own, _WORDS[own.itemsize]).astype(mx.int32)
        first, last = part.bounds[self.ranks.rank], part.bounds[self.ranks.rank + 1]
        around = [[0, 0] for _ in own.shape]
        around[part.axis] = [first, part.bounds[-1] - last]
        total = self.ranks.all_sum(mx.pad(words, around), "the parts of an array")
        return mx.view(total if own.itemsize == 4 else total.astype(_WORDS[own.itemsize]), own.dtype)


_WORDS = {1: mx.uint8, 2: mx.uint16}


def part_shape(part: Part, whole: Sequence[int], rank: int) -> list[int]:
    """The shape of a rank's part."""
    shape = list(whole)
    shape[part.axis] = part.bounds[rank + 1] - part.bounds[rank]
    return shape


def shard(model: nn.Module, division: Division, ranks: Ranks) -> Shards:
    """Takes all but this rank's part out of a model that may have adapters, and lets ranks compute together.

    A lazily loaded model is read array by array, and of each no more is kept than this rank's part.

    Raises:
        UserError: a family that is not known, or a cut through a quantisation group.
    """
    family = type(model).__module__.rpartition(".")[2]
    if family not in FAMILIES:
        raise UserError(f"strategy=sharded cannot divide a model of family {family}; it knows {', '.join(FAMILIES)}")
    names = {id(module): name for name, module in model.named_modules()}
    parts: dict[str, Part] = {}
    partial: set[str] = set()
    for layer in model.layers:
        for module, found in (
            (layer.self_attn, _attention_parts(layer.self_attn, division)),
            (layer.mlp, _mlp_parts(layer.mlp, division)),
        ):
            prefix = names[id(module)]
            parts |= {f"{prefix}.{name}": part for name, part in found.items()}
            partial |= {f"{prefix}.{name}" for name, _ in tree_flatten(module.parameters()) if name not in found}
            for name, part in found.items():
                _keep(module, name, part, ranks.rank)
        _join_attention(layer.self_attn, division, ranks)
        _join_mlp(layer.mlp, division, ranks)
    for name, array in tree_flatten(model.parameters()):
        mx.eval(array)
    mx.clear_cache()
    return Shards(ranks, parts, frozenset(partial))


# ---- Which part of what ------------------------------------------------------------------------------------------------


def _attention_parts(attention: nn.Module, division: Division) -> dict[str, Part]:
    heads, kv_heads = attention.n_heads, attention.n_kv_heads
    head_dim = _output_size(attention.k_proj) // kv_heads
    queries = bounds(division.kv_heads, heads // kv_heads * head_dim)
    keys = bounds(division.kv_heads, head_dim)
    return {
        **_by_outputs(attention.q_proj, "q_proj", queries),
        **_by_outputs(attention.k_proj, "k_proj", keys),
        **_by_outputs(attention.v_proj, "v_proj", keys),
        **_by_inputs(attention.o_proj, "o_proj", queries),
    }


def _mlp_parts(mlp: nn.Module, division: Division) -> dict[str, Part]:
    prefix, inner, counts = "", mlp, division.mlp_columns
    if "switch_mlp" in mlp:
        prefix, inner, counts = "switch_mlp.", mlp.switch_mlp, division.expert_columns
    columns = bounds(counts)
    return {
        **_by_outputs(inner.gate_proj, f"{prefix}gate_proj", columns),
        **_by_outputs(inner.up_proj, f"{prefix}up_proj", columns),
        **_by_inputs(inner.down_proj, f"{prefix}down_proj", columns),
    }


def _output_size(linear: nn.Module) -> int:
    return (linear.linear if "linear" in linear else linear).weight.shape[-2]


def _by_outputs(linear: nn.Module, prefix: str, ends: tuple[int, ...]) -> dict[str, Part]:
    """A linear layer, plain or with adapters, of whose outputs every rank makes some; A stays whole."""
    parts = {}
    for name, array in tree_flatten(linear.parameters()):
        leaf = name.rpartition(".")[2]
        of_experts = array.ndim == 3  # whose B is [expert, out, rank]
        if leaf in ("weight", "scales", "biases") or (leaf == "lora_b" and of_experts):
            parts[f"{prefix}.{name}"] = Part(-2, ends)
        elif leaf in ("bias", "lora_b", "m"):
            parts[f"{prefix}.{name}"] = Part(-1, ends)
    return parts


def _by_inputs(linear: nn.Module, prefix: str, ends: tuple[int, ...]) -> dict[str, Part]:
    """A linear layer that takes some of its inputs on every rank; B stays whole, and the bias is added by rank 0."""
    parts = {}
    for name, array in tree_flatten(linear.parameters()):
        leaf = name.rpartition(".")[2]
        if leaf in ("weight", "scales", "biases"):
            width = array.shape[-1]  # in quantised layers less than the inputs
            if any(end * width % ends[-1] for end in ends):
                raise UserError(f"strategy=sharded: {list(ends)} would cut through a quantisation group of {prefix}")
            parts[f"{prefix}.{name}"] = Part(-1, tuple(end * width // ends[-1] for end in ends))
        elif leaf == "bias":
            parts[f"{prefix}.{name}"] = Part(-1, (0, *[array.shape[-1]] * (len(ends) - 1)))
        elif leaf == "lora_a":  # of experts: [expert, rank, in]
            parts[f"{prefix}.{name}"] = Part(-1 if array.ndim == 3 else -2, ends)
    return parts


def _keep(module: nn.Module, name: str, part: Part, rank: int) -> None:
    """Puts the rank's part of a parameter in its place, or takes the parameter away where the part is empty."""
    *path, leaf = name.split(".")
    for step in path:
        module = module[step]
    if part.bounds[rank] == part.bounds[rank + 1]:
        del module[leaf]
    else:
        module[leaf] = _copied(part.of(module[leaf], rank))


def _copied(array: mx.array) -> mx.array:
    """An array's own memory, so that the whole it was cut from can be let go."""
    array = mx.contiguous(array)
    mx.eval(array)
    return array


# ---- What the parts do together ----------------------------------------------------------------------------------------


def _join_attention(attention: nn.Module, division: Division, ranks: Ranks) -> None:
    own, all_heads = division.kv_heads[ranks.rank], attention.n_kv_heads
    inputs = bounds(division.kv_heads, _output_size(attention.q_proj) // own)
    attention.n_heads, attention.n_kv_heads = attention.n_heads // all_heads * own, own
    _join_inputs(attention.o_proj, inputs, ranks)
    _sum_around(attention, ranks)


def _join_mlp(mlp: nn.Module, division: Division, ranks: Ranks) -> None:
    if "switch_mlp" in mlp:
        _join_inputs(mlp.switch_mlp.down_proj, bounds(division.expert_columns), ranks)
        # Ranks on unlike machines see a token's scores differ by roundings: all send it to the same experts.
        _derive(mlp.gate, lambda plain: lambda self, x: ranks.agree_forward(plain(self, x)))
    else:
        _join_inputs(mlp.down_proj, bounds(division.mlp_columns), ranks)
    _sum_around(mlp, ranks)


def _sum_around(module: nn.Module, ranks: Ranks) -> None:
    def summed(plain: Any) -> Any:
        def call(self: nn.Module, x: mx.array, *args: Any, **options: Any) -> mx.array:
            return ranks.sum_forward(plain(self, ranks.sum_backward(x), *args, **options))

        return call

    _derive(module, summed)


def _join_inputs(linear: nn.Module, ends: tuple[int, ...], ranks: Ranks) -> None:
    """What an adapter needs where a rank sees some of the inputs only."""
    dropout = getattr(linear, "dropout", None)
    if isinstance(dropout, nn.Dropout) and dropout._p_1 < 1:
        linear.dropout = _DropoutOfPart(1 - dropout._p_1, ends, ranks.rank)
    if isinstance(linear, DoRALinear):
        _derive(linear, lambda _: lambda self, x: _dora(self, x, ranks))


class _DropoutOfPart(nn.Dropout):
    """The mask of all inputs, of which the rank's part is taken: ranks together drop what one machine would."""

    def __init__(self, p: float, ends: tuple[int, ...], rank: int):
        super().__init__(p)
        self._ends, self._rank = ends, rank

    def __call__(self, x: mx.array) -> mx.array:
        if self._p_1 == 1 or not self.training:
            return x
        mask = mx.random.bernoulli(self._p_1, (*x.shape[:-1], self._ends[-1]))
        return (1 / self._p_1) * mask[..., self._ends[self._rank] : self._ends[self._rank + 1]] * x


def _dora(layer: DoRALinear, x: mx.array, ranks: Ranks) -> mx.array:
    """DoRA (arXiv:2402.09353, equations 5 and 11) on some of the inputs: m / |W + scale (A B)^T| wants whole rows.

    Their squares are summed over the ranks. The norm is a constant in the gradient (section 4.3), and the sum waits for x,
    so that no collective can overtake another.
    """
    weight = layer._dequantized_weight()
    y = x @ weight.T
    low = (layer.dropout(x) @ layer.lora_a) @ layer.lora_b
    y = y + (layer.scale * low).astype(x.dtype)
    adapted = weight + (layer.scale * layer.lora_b.T) @ layer.lora_a.T
    squares = mx.stop_gradient(mx.square(adapted.astype(mx.float32)).sum(axis=1))
    (squares,) = mx.depends([squares], [mx.stop_gradient(x)])
    y = (layer.m / mx.sqrt(mx.stop_gradient(ranks.sum_forward(squares)))).astype(x.dtype) * y
    return y + layer.linear.bias if "bias" in layer.linear else y


def _derive(module: nn.Module, make: Any) -> None:
    """Gives a module a class of its own whose call is `make(the call that it had)`."""
    plain = type(module)
    module.__class__ = type(
        plain.__name__, (plain,), {"__call__": make(plain.__call__), "__module__": plain.__module__}
    )
