"""How a loaded model is held and run: its stage, its parts, its window; where it has its blocks and its embedding."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten

Ranks = Any  # the World whose ranks divide a model
Neighbours = Any  # the Links that send a stage's activations where no step carries them: in evaluation


class VocabularyPart:
    """Of a model whose embedding and head are divided: this rank's tokens, [first, last) of `size`."""

    def __init__(self, ranks: Ranks, rows: tuple[int, ...]):
        self.ranks, self.first, self.last, self.size = ranks, rows[ranks.rank], rows[ranks.rank + 1], rows[-1]
        self.keeps_logits = False

    @property
    def rank_row(self) -> mx.array:
        """Which of the ranks this is: bool [ranks]."""
        return mx.arange(self.ranks.size) == self.ranks.rank

    def rank_head(self, head: Callable[[mx.array], mx.array]) -> Callable[[mx.array], mx.array]:
        """A head that gives this rank's logits, instead of those of all."""

        def rank_logits(hidden: mx.array) -> mx.array:
            self.keeps_logits = True
            try:
                return head(hidden)
            finally:
                self.keeps_logits = False

        return rank_logits

    def embed(self, rows_of: Callable[[mx.array], mx.array], tokens: mx.array) -> mx.array:
        is_of_rank = (tokens >= self.first) & (tokens < self.last)
        rows = rows_of(mx.where(is_of_rank, tokens - self.first, 0))
        return self.ranks.sum_forward(mx.where(is_of_rank[..., None], rows, 0))

    def logits(self, part: mx.array) -> mx.array:
        if self.keeps_logits:
            return part
        around = [(0, 0)] * (part.ndim - 1) + [(self.first, self.size - self.last)]
        return self.ranks.sum_forward(mx.pad(part, around))

    def figures(self, logits: mx.array, targets: mx.array) -> mx.array:
        """The logarithm of this rank's part of the partition function, and the target's logit or 0: float32 [2, M]."""
        wide, local = logits.astype(mx.float32), targets - self.first
        at = mx.take_along_axis(wide, mx.clip(local, 0, wide.shape[-1] - 1)[:, None], axis=-1).squeeze(-1)
        return mx.stack([mx.logsumexp(wide, axis=-1), mx.where((local >= 0) & (local < wide.shape[-1]), at, 0.0)])

    def combined(self, figures: mx.array) -> tuple[mx.array, mx.array]:
        """Log-probabilities and log partition functions of all ranks' `figures`: float32 [M] each."""
        partitions = mx.where(self.rank_row[:, None], figures[:1], 0.0)
        of_ranks = self.ranks.sum_forward(mx.concatenate([partitions, figures[1:]]))
        partition = mx.logsumexp(of_ranks[:-1], axis=0)
        return of_ranks[-1] - partition, partition


class PositionsPart(NamedTuple):
    """Of a model whose head every rank holds whole: each applies it to some of the positions, as many as its weight."""

    ranks: Ranks
    weights: Sequence[float]

    def bounds(self, positions: int) -> tuple[int, int] | None:
        """This rank's first position, and the next rank's; None where some rank would have none."""
        ends = [round(positions * end / sum(self.weights)) for end in itertools.accumulate(self.weights, initial=0.0)]
        is_thin = any(begin == end for begin, end in itertools.pairwise(ends))
        return None if is_thin else (ends[self.ranks.rank], ends[self.ranks.rank + 1])

    def gathered(
        self, figures_of: Callable[[mx.array, mx.array], list[mx.array]], hidden: mx.array, targets: mx.array
    ) -> list[mx.array]:
        """figures_of(hidden, targets), float32 [M] each, of which every rank makes some positions'."""
        if (bounds := self.bounds(len(targets))) is None:
            return figures_of(hidden, targets)
        begin, end = bounds
        around = [(0, 0), (begin, len(targets) - end)]

        @mx.custom_function
        def of_all(figures: mx.array) -> mx.array:
            return self.ranks.sum_forward(mx.pad(figures, around))

        # A loss like SFT's has gradients that no log-probability decides: they wait, so that ranks sum in one order.
        @of_all.vjp
        def of_all_vjp(_: Any, cotangent: mx.array, summed: mx.array) -> mx.array:
            return mx.depends([cotangent[:, begin:end]], [summed])[0]

        figures = mx.stack(figures_of(self.ranks.sum_backward(hidden)[begin:end], targets[begin:end]))
        return [row.squeeze(0) for row in mx.split(of_all(figures), len(figures))]


@dataclass
class Stage:
    """This rank's blocks of a model that ranks hold in stages."""

    rank: int
    size: int
    hidden_size: int
    dtypes: tuple[mx.Dtype, mx.Dtype]  # of the first block's input, and of the array that goes to the next rank
    holders: dict[str, tuple[int, ...]]  # of every parameter of the whole model, by name: the ranks that hold it
    first_trained: int  # the first rank that trains something: none before it needs gradients
    neighbours: Neighbours
    _input: mx.array | None = field(default=None, init=False)
    _runs: bool = field(default=False, init=False)
    _output: mx.array | None = field(default=None, init=False)

    @property
    def is_first(self) -> bool:
        return self.rank == 0

    @property
    def is_last(self) -> bool:
        return self.rank == self.size - 1

    @property
    def is_trained(self) -> bool:
        """Whether gradients pass through it."""
        return self.rank >= self.first_trained

    @property
    def passes_gradients(self) -> bool:
        """Whether the rank before wants the gradient of what it sent."""
        return self.rank > self.first_trained

    def run(self, work: Callable[[], mx.array], hidden: mx.array | None) -> mx.array:
        """What this rank's blocks make of `hidden`, [N, D], by work that calls the model; the last rank's result."""
        self._input, self._runs = hidden, True
        try:
            result = work()
        finally:
            self._input, self._runs = None, False
        output, self._output = self._output, None
        return result if output is None else output

    def enter(self, like: mx.array) -> mx.array:
        """The input of this rank's first block. like: of its shape."""
        if self._runs:
            assert self._input is not None
            return self._input.reshape(like.shape)
        shape = (like.size // self.hidden_size, self.hidden_size)
        return self.neighbours.receive(shape, self.dtypes[0], self.rank - 1, "the activations").reshape(like.shape)

    def leave(self, output: mx.array) -> mx.array:
        """Hands on the output of this rank's last block."""
        output = output.reshape(-1, self.hidden_size)
        if self._runs:
            self._output = output
        else:
            mx.eval(output)
            self.neighbours.send(output, self.rank + 1, "the activations")
        return output


@dataclass
class ModelLayout:
    """How a model is held and run."""

    attention_window: int | None = None  # tokens that each attends to, itself included; None for all
    stage: Stage | None = None  # this rank's blocks, where ranks hold the model in stages
    vocabulary: VocabularyPart | None = None  # this rank's rows of embedding and head, where these are divided
    positions: PositionsPart | None = None  # of the head, where ranks hold the blocks in parts
    stream_fault: str | None = None  # why a stream is not the same as whole rows; "" if it is; None while not known
    token_keys: mx.array | None = None  # uint32 [N, 2], of the tokens of the batch that runs, while it trains
    past: tuple[int, int] = 0, 0  # states of a recurrence; caches of an attention that takes several
    pads_prompts: bool | None = None  # whether prompts of several lengths are answered together; None while not known
    ends_early: bool = False  # whether the last block may compute the scored tokens alone after its attention


def layout_of(model: nn.Module) -> ModelLayout:
    """The model's layout, filled in by the code that loads and divides it."""
    if not hasattr(model, "tandem_layout"):
        model.tandem_layout = ModelLayout()
    return model.tandem_layout


def family_of(model: nn.Module) -> str:
    """The name of its file in mlx_lm.models."""
    return type(model).__module__.rpartition(".")[2]


def backbone_of(model: nn.Module) -> tuple[nn.Module, str] | None:
    """The module that holds the backbone (the part that owns the blocks), and its name there; None without one."""
    blocks = block_list_of(model)
    for holder in modules_outside_blocks(model):
        for name, part in holder.children().items():
            if isinstance(part, nn.Module) and callable(part) and any(each is blocks for each in part.values()):
                return (holder, name) if blocks is not None and part is not model else None
    return None


def block_list_of(model: nn.Module) -> list[nn.Module] | None:
    """The list in which a module of the model has its blocks; None without one."""
    blocks = [*map(id, model.layers)]  # which may be a new list at every look
    values = (value for module in model.modules() for value in module.values() if isinstance(value, list))
    return next((value for value in values if [*map(id, value)] == blocks), None)


def modules_outside_blocks(model: nn.Module) -> list[nn.Module]:
    """The model itself and its parts that are neither a block nor within one; each before its own parts."""
    seen, modules = set(map(id, model.layers)), [model]
    for module in modules:  # which grows
        parts = tree_flatten(module.children(), is_leaf=nn.Module.is_module)
        modules += [part for _, part in parts if id(part) not in seen]
        seen |= {id(part) for _, part in parts}
    return modules


def parameters_outside_blocks(model: nn.Module) -> dict[str, mx.array]:
    """Trained parameters that belong to no block, by name."""
    blocks = {id(a) for layer in model.layers for _, a in tree_flatten(layer.trainable_parameters())}
    return {name: a for name, a in tree_flatten(model.trainable_parameters()) if id(a) not in blocks}


def embedding_of(model: nn.Module) -> tuple[nn.Module, str] | None:
    """The module that has the embedding of tokens among its parts, and its name there; None without one."""
    place = backbone_of(model)
    holder = model if place is None else place[0][place[1]]
    return next(((holder, name) for name, part in holder.children().items() if hasattr(part, "as_linear")), None)
