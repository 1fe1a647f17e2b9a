"""What mlx-lm's layers are called in checkpoints that transformers and peft read: experts one by one, not stacked."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

import mlx.core as mx

# mlx-lm's part of a layer's name, and the same in a checkpoint, {} for the expert. Mixtral has its own words.
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
    for ours, theirs in EXPERT_NAMES:
        head, found, tail = name.partition(ours)
        if found:
            return head + theirs + tail
    return None


def stacked_name(name: str) -> tuple[str, int] | None:
    """The stacked layer that an expert's layer is a part of, and the expert's number; None of another layer."""
    for ours, theirs in EXPERT_NAMES:
        pattern = re.escape(theirs).replace(re.escape("{}"), r"(\d+)")
        match = re.search(rf"(?<![\w]){pattern}(?=\.|$)", name)
        if match:
            return name[: match.start()] + ours + name[match.end() :], int(match[1])
    return None


def unstacked(arrays: Mapping[str, mx.array]) -> Iterator[tuple[str, mx.array]]:
    """A model's arrays by their names in a checkpoint, those of stacked experts one by one."""
    for name, array in arrays.items():
        pattern = expert_pattern(name)
        if pattern is None:
            yield name, array
        else:
            yield from ((pattern.format(expert), array[expert]) for expert in range(len(array)))
