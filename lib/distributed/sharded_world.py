"""Ranks that hold parts of one model: together they are one worker."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, fields
from typing import Any

import mlx.core as mx
from mlx.utils import tree_flatten, tree_unflatten

from lib.distributed.world import Described, World
from lib.model.partition import Division, Part
from lib.system.out_of_memory import OutOfMemory


@dataclass(frozen=True)
class ShardedWorld(World):
    """Ranks that hold parts of one model (lib/model/tensor_parallel.py): every batch goes through all of them.

    Args:
        division: that the model was divided by.
        parts: how parameters are divided, by name; the others are whole on every rank.
        partial: parameters that every rank holds whole, but of whose gradient it makes a part.
    """

    division: Division | None = None
    parts: Mapping[str, Part] = field(default_factory=dict)
    partial: frozenset[str] = frozenset()

    @property
    def workers(self) -> World:
        """All ranks as one."""
        return Lockstep(timeout_seconds=self.timeout_seconds, backend=self.backend, traffic=self.traffic, ranks=self)

    def whole(self, arrays: Mapping[str, mx.array]) -> Described:
        return self._described_by_rank_0(arrays)

    def part(self, name: str) -> Part | None:
        return self.parts.get(name) or self.parts.get(name.rpartition(".")[0])


def sharded(
    world: World, division: Division, parts: Mapping[str, Part] | None = None, partial: Iterable[str] = ()
) -> ShardedWorld:
    """The world, once its ranks hold parts of a model."""
    same = {of_world.name: getattr(world, of_world.name) for of_world in fields(World)}
    return ShardedWorld(**same, division=division, parts=parts or {}, partial=frozenset(partial))


@dataclass(frozen=True)
class Lockstep(World):
    """Ranks that do the same work at the same time, seen as one. What they may see differently, rank 0 says for all."""

    ranks: ShardedWorld = field(default_factory=ShardedWorld)

    def all_sum(self, array: mx.array, what: str) -> mx.array:
        return self.ranks.all_sum(array if self.ranks.rank == 0 else mx.zeros_like(array), what)

    def decide(self, x: mx.array) -> mx.array:
        return self.ranks.agree_forward(x)

    def sum_gradients(self, gradients: Any, sums: mx.array) -> tuple[Any, mx.array]:
        flat = dict(tree_flatten(gradients))
        parts = tree_unflatten([(name, g) for name, g in flat.items() if self.kind_of(name) == "partial"])
        total, sums = self.ranks.sum_gradients(parts, sums if self.ranks.rank == 0 else mx.zeros_like(sums))
        return tree_unflatten(list((flat | dict(tree_flatten(total))).items())), sums

    def kind_of(self, name: str) -> str:
        for kind, names in (("partial", self.ranks.partial), ("part", self.ranks.parts)):
            if name == kind or name in names:
                return kind
        return "whole"

    def sum_of_all(self, values: Mapping[str, mx.array]) -> mx.array:
        once = {name: value for name, value in values.items() if self.kind_of(name) == "part" or self.ranks.rank == 0}
        return self.ranks.all_sum(super().sum_of_all(once), "the gradient's norm")

    def together(self, what: str, passes: int = 1) -> contextlib.AbstractContextManager[None]:
        return self._synchronised(what, passes)

    @contextlib.contextmanager
    def _synchronised(self, what: str, passes: int) -> Iterator[None]:
        """Ranks synchronise on the CPU first: then a GPU waits inside a pass only for what the parts' times differ by.

        Raises:
            OutOfMemory: a rank gave up instead.
        """
        if self.ranks.all_sum(mx.array(0.0), what).item():
            raise OutOfMemory("another rank's", (0,))
        with self.ranks.deadline(what, passes):
            yield

    def give_up(self, what: str) -> None:
        """Tells the others, who are about to pass through the model, that this rank's memory does not allow it."""
        self.ranks.all_sum(mx.array(1.0), what)
