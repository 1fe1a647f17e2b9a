"""The tables that a model looks its input up in: tokens, and in some models positions.

MLX does not check an index: beyond a table's end it reads other memory, and a gradient writes there.
"""

from __future__ import annotations

from typing import NamedTuple

import mlx.core as mx
import mlx.nn as nn

from lib.model.patches import replace_modules, with_methods

EMBEDDINGS = (nn.Embedding, nn.QuantizedEmbedding)
POSITION_TABLE = "wpe"  # what mlx-lm's families with learned positions call it


class TableSizes(NamedTuple):
    """Rows of a model's tables: None where it has none that can be found; without positions any length will do."""

    tokens: int | None
    positions: int | None


def bounded(model: nn.Module) -> TableSizes:
    """The sizes of a model's tables; nothing reads beyond its table of positions from now on.

    The first and the last row stand for what lies beyond them: positions of padding, whose outputs are not used.
    """
    tables = [part for name, part in model.named_modules() if name.rpartition(".")[2] == POSITION_TABLE]
    sizes = {id(table): _rows(table) for table in tables}
    others = [part for part in model.modules() if isinstance(part, EMBEDDINGS) and id(part) not in sizes]
    tokens = _rows(others[0]) if others else None

    def clipped(part: nn.Module) -> nn.Module | None:
        last = sizes.get(id(part), 0) - 1
        wrap = lambda call: lambda self, positions: call(self, mx.clip(positions, 0, last))  # noqa: E731
        return with_methods(part, __call__=wrap) if id(part) in sizes else None

    replace_modules(model, clipped)
    return TableSizes(tokens, min(sizes.values(), default=None))


def _rows(table: nn.Module) -> int:
    """The rows of an embedding, packed or not."""
    return int(table["weight"].shape[0])
