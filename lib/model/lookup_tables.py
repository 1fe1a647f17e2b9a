"""The tables that a model looks its input up in: tokens, and in some models positions.

MLX does not check an index: beyond a table's end it reads other memory, and a gradient writes there.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeAlias

import mlx.core as mx
import mlx.nn as nn

from lib.model.token_stream import Replaced

Embedding: TypeAlias = nn.Embedding | nn.QuantizedEmbedding
TOKEN, PROBE = 0, 3  # a sequence of one token, thrice


class TableSizes(NamedTuple):
    """Rows of a model's tables."""

    tokens: int | None
    """None for a model without an embedding that can be found."""
    positions: int | None
    """None for a model without learned positions, which takes a sequence of any length."""


def bounded(model: nn.Module) -> TableSizes:
    """The sizes of a model's tables; nothing reads beyond its table of positions from now on.

    What looks a position up is found by what it is asked for, not by its name: for a sequence that repeats one token,
    the embedding of tokens is asked for that token again and again, a table of positions for one row after the other.
    """
    places = [
        (holder, name)
        for holder in model.modules()
        for name, part in holder.children().items()
        if isinstance(part, Embedding)
    ]
    if len(places) < 2:
        return TableSizes(_rows(places[0][0][places[0][1]]) if places else None, None)
    of_tokens, of_positions = list[int](), list[int]()
    for table, indices in _asked(model, places):
        if indices[1:] == list(range(indices[0] + 1, indices[0] + PROBE)):
            of_positions.append(_rows(table) - indices[0])  # some tables begin with rows for padding
            _bound(table)
        elif indices == [TOKEN] * PROBE:
            of_tokens.append(_rows(table))
    return TableSizes(next(iter(of_tokens), None), min(of_positions, default=None))


def _asked(model: nn.Module, places: Sequence[tuple[nn.Module, str]]) -> list[tuple[Embedding, list[int]]]:
    """Which rows of its embeddings a model asks for, of a short sequence; nothing but these numbers is computed."""
    asked: list[tuple[Embedding, mx.array]] = []

    def listener(table: Embedding) -> Callable[[mx.array], mx.array]:
        def listen(indices: mx.array) -> mx.array:
            asked.append((table, indices))
            return table(indices)

        return listen

    with contextlib.ExitStack() as stack:
        for holder, name in places:
            stack.enter_context(Replaced(holder, name, listener(holder[name])))
        # A family's own code may raise anything; what it asked for until then is known.
        with contextlib.suppress(Exception):
            model(mx.full((1, PROBE), TOKEN))
    return [(table, indices.reshape(-1).tolist()) for table, indices in asked if indices.size == PROBE]


def _rows(table: nn.Module) -> int:
    """The rows of an embedding, packed or not."""
    return int(table["weight"].shape[0])


def _bound(table: Embedding) -> None:
    """Lets the table's first and last row stand for what lies beyond them: positions of padding, which nobody reads."""
    plain, last = type(table), _rows(table) - 1

    def inside(self: nn.Module, positions: mx.array) -> mx.array:
        return plain.__call__(self, mx.clip(positions, 0, last))

    table.__class__ = type(plain.__name__, (plain,), {"__call__": inside, "__module__": plain.__module__})
