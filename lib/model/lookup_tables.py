"""The tables that a model looks its input up in: tokens, and in some models positions.

MLX does not check an index: beyond a table's end it reads other memory, and a gradient writes there.
"""

from __future__ import annotations

from typing import NamedTuple

import mlx.core as mx
import mlx.nn as nn

from lib.model.patches import replace_modules, with_methods

EMBEDDINGS = (nn.Embedding, nn.QuantizedEmbedding)
POSITION_TABLE = "wpe"  # its name in mlx-lm's families with learned positions


class TableSizes(NamedTuple):
    """Rows of a model's tables: None where it has none that can be found; without positions any length will do."""

    tokens: int | None
    positions: int | None


def bounded(model: nn.Module) -> TableSizes:
    """The sizes of a model's tables; nothing reads beyond its table of positions from now on. The first and the last
    row stand for positions beyond them: those of padding, whose outputs are not used."""
    sizes = {id(p): int(p["weight"].shape[0]) for p in model.modules() if isinstance(p, EMBEDDINGS)}
    positions = {id(part) for name, part in model.named_modules() if name.rpartition(".")[2] == POSITION_TABLE}

    def clipped(part: nn.Module) -> nn.Module | None:
        last = sizes.get(id(part), 0) - 1
        wrap = lambda call: lambda self, indices: call(self, mx.clip(indices, 0, last))  # noqa: E731
        return with_methods(part, __call__=wrap) if id(part) in positions else None

    replace_modules(model, clipped)
    tokens = next((size for key, size in sizes.items() if key not in positions), None)
    return TableSizes(tokens, min((sizes[key] for key in positions), default=None))
