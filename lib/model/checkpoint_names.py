"""Names of mlx-lm's stacked experts in checkpoints that transformers and peft read: one by one."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

import mlx.core as mx

# The part of a layer's name in mlx-lm and in a checkpoint, {} for the expert. Mixtral has its own words.
EXPERT_NAMES = (
    ("block_sparse_moe.switch_mlp.gate_proj", "block_sparse_moe.experts.{}.w1"),
    ("block_sparse_moe.switch_mlp.down_proj", "block_sparse_moe.experts.{}.w2"),
    ("block_sparse_moe.switch_mlp.up_proj", "block_sparse_moe.experts.{}.w3"),
    ("mlp.switch_mlp.gate_proj", "mlp.experts.{}.gate_proj"),
    ("mlp.switch_mlp.down_proj", "mlp.experts.{}.down_proj"),
    ("mlp.switch_mlp.up_proj", "mlp.experts.{}.up_proj"),
)


def expert_pattern(name: str) -> str | None:
    """The name of each expert of a stacked layer, {} for its number; None of another layer."""
    return next((name.replace(ours, theirs) for ours, theirs in EXPERT_NAMES if ours in name), None)


def stacked_name(name: str) -> tuple[str, int] | None:
    """The stacked layer that an expert's layer is a part of, and the expert's number; None of another layer."""
    for ours, theirs in EXPERT_NAMES:
        pattern = re.escape(theirs).replace(r"\{\}", r"(\d+)")
        if match := re.search(rf"\b{pattern}(?=\.|$)", name):
            return name[: match.start()] + ours + name[match.end() :], int(match[1])
    return None


def unstacked(arrays: Mapping[str, mx.array]) -> Iterator[tuple[str, mx.array]]:
    """A model's arrays by their names in a checkpoint, those of stacked experts one by one."""
    for name, array in arrays.items():
        if (pattern := expert_pattern(name)) is None:
            yield name, array
        else:
            yield from ((pattern.format(expert), array[expert]) for expert in range(len(array)))
