"""Ranks that hold parts of one model: together they are one worker.

A sharded model has a part of every block on each rank (lib/model/tensor_parallel.py); a pipelined one has consecutive
blocks (lib/model/pipeline_stage.py). `divided` leaves each rank its part, and gives the world of ranks that share it.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten, tree_unflatten

from lib.config.settings import ModelSettings, TrainSettings
from lib.data import tokenizer
from lib.distributed import heartbeat
from lib.distributed.links import Links, links_of
from lib.distributed.world import Described, World
from lib.model import load, pipeline_stage, tensor_parallel
from lib.model.layout import Stage
from lib.model.partition import Division, Holders, Part, apportion, divide, model_shape_of
from lib.system import metal
from lib.system.out_of_memory import OutOfMemory
from lib.training.update import compiles

Blocks = tuple[int, ...]  # consecutive blocks of each rank
SHARED = "what the first and the last rank hold"


def _unflattened(arrays: Mapping[str, mx.array]) -> Any:
    return tree_unflatten(arrays) or {}  # of a rank that trains nothing; else a list


@dataclass(frozen=True)
class ShardedWorld(World):
    """Ranks that hold parts of every block: every batch goes through all of them. parts: how parameters are divided, by
    name; the others are whole on every rank. partial: parameters that every rank holds whole, but of whose gradient it
    makes a part."""

    division: Division | None = None
    parts: Mapping[str, Part] = field(default_factory=dict)
    partial: frozenset[str] = frozenset()

    @property
    def workers(self) -> World:
        return Lockstep(timeout_seconds=self.timeout_seconds, backend=self.backend, traffic=self.traffic, ranks=self)

    def whole(self, arrays: Mapping[str, mx.array]) -> Described:
        return self.described_by(0, super().whole(arrays))  # rank 0 has some part of everything

    def part(self, name: str) -> Part | None:
        return self.parts.get(name) or self.parts.get(name.rpartition(".")[0])


def sharded(
    world: World, division: Division, parts: Mapping[str, Part] | None = None, partial: Iterable[str] = ()
) -> ShardedWorld:
    """The world, once its ranks hold parts of a model."""
    divided = {"division": division, "parts": parts or {}, "partial": frozenset(partial)}
    return ShardedWorld(**(vars(world) | divided))


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
        parts = tree_unflatten([(name, g) for name, g in flat.items() if name in self.ranks.partial])
        total, sums = self.ranks.sum_gradients(parts, sums if self.ranks.rank == 0 else mx.zeros_like(sums))
        return tree_unflatten(flat | dict(tree_flatten(total))), sums

    def sum_of_all(self, values: Mapping[str, mx.array]) -> mx.array:
        parts = self.ranks.parts.keys() - self.ranks.partial
        once = {name: value for name, value in values.items() if name in parts or self.ranks.rank == 0}
        return self.ranks.all_sum(super().sum_of_all(once), "the gradient's norm")

    @contextlib.contextmanager
    def together(self, what: str, passes: int = 1) -> Iterator[None]:
        """Ranks synchronise on the CPU: no GPU waits inside a pass. Raises OutOfMemory: a rank gave up instead."""
        if self.ranks.all_sum(mx.array(0.0), what).item():
            raise OutOfMemory("another rank's", (0,))
        with self.ranks.deadline(what, passes):
            yield

    def give_up(self, what: str) -> None:
        """Tells the others, who are about to pass through the model, that this rank's memory does not allow it."""
        self.ranks.all_sum(mx.array(1.0), what)


@dataclass(frozen=True)
class PipelinedWorld(World):
    """Ranks that hold consecutive blocks of one model: batches go through one by one. holders: of every parameter of
    the whole model, the ranks that hold it."""

    links: Links = field(default_factory=lambda: Links(World()))
    blocks: tuple[int, ...] = ()
    holders: Mapping[str, tuple[int, ...]] = field(default_factory=dict)

    @property
    def workers(self) -> World:
        return InStages(timeout_seconds=self.timeout_seconds, backend=self.backend, traffic=self.traffic, ranks=self)

    @property
    def last(self) -> int:
        """The rank that knows what comes out of the model."""
        return self.size - 1

    def all_sum(self, array: mx.array, what: str) -> mx.array:
        self.links.finish(what)
        return super().all_sum(array, what)

    def gather_arrays(self, arrays: list[mx.array], what: str) -> list[list[mx.array]]:
        self.links.finish(what)
        return super().gather_arrays(arrays, what)

    def from_last(self, array: mx.array, what: str) -> mx.array:
        """The last rank's array, on every rank, bit for bit where numbers are finite."""
        return self.all_sum(array if self.rank == self.last else mx.zeros_like(array), what)

    def part(self, name: str) -> Holders | None:
        """Of what belongs to one rank, or to the first and the last."""
        ranks = self.holders.get(name) or self.holders.get(name.rpartition(".")[0])
        return None if ranks is None or len(ranks) == self.size > 2 else Holders(ranks)

    def whole(self, arrays: Mapping[str, mx.array]) -> Described:
        return self.described_by(self.last, super().whole(arrays))

    def align(self, tree: Any) -> Any:
        """The tree with rank 0's arrays on the last rank, where both hold the same."""
        flat = dict(tree_flatten(tree))
        for name in sorted(flat):
            part = self.part(name)
            if part is None or len(part.ranks) == 1:
                continue
            if self.rank == 0:
                self.links.send(flat[name], self.last, SHARED)
            else:
                flat[name] = self.links.receive(flat[name].shape, flat[name].dtype, 0, SHARED)
        return _unflattened(flat)

    def _within(self, name: str, own: Mapping[str, mx.array], shape: tuple[int, ...], dtype: mx.Dtype) -> mx.array:
        part = self.part(name)
        assert part is not None
        return own[name] if part.ranks[0] == self.rank else mx.zeros(shape, dtype)


def pipelined(
    world: World, blocks: Sequence[int], stage: Stage | None = None, links: Links | None = None
) -> PipelinedWorld:
    """The world, once its ranks hold their blocks of a model."""
    links, holders = links or links_of(world), stage.holders if stage else {}
    return PipelinedWorld(**(vars(world) | {"links": links, "blocks": tuple(blocks), "holders": holders}))


@dataclass(frozen=True)
class InStages(Lockstep):
    """Ranks through which the same work goes one after the other, seen as one. What comes of it the last rank says."""

    ranks: PipelinedWorld = field(default_factory=PipelinedWorld)  # type: ignore[assignment]

    def all_sum(self, array: mx.array, what: str) -> mx.array:
        return self.ranks.from_last(array, what)

    def decide(self, x: mx.array) -> mx.array:
        return self.ranks.from_last(x, "the last rank's decision")

    def sum_gradients(self, gradients: Any, sums: mx.array) -> tuple[Any, mx.array]:
        flat, what = dict(tree_flatten(gradients)), "the gradients that two ranks make a part of"
        for name in sorted(flat):
            if (part := self.ranks.part(name)) is not None and len(part.ranks) == 2:
                other = next(rank for rank in part.ranks if rank != self.ranks.rank)
                theirs = self.ranks.links.exchange(flat[name], other, what)
                flat[name] = flat[name] + theirs  # the same bits on both: addition commutes
        return _unflattened(flat), self.ranks.from_last(sums, "the sums of a step")

    def sum_of_all(self, values: Mapping[str, mx.array]) -> mx.array:
        parts = {name: self.ranks.part(name) for name in values}  # None: every rank holds it
        firsts = {name: 0 if part is None else part.ranks[0] for name, part in parts.items()}
        own = [value for name, value in values.items() if firsts[name] == self.ranks.rank]
        return self.ranks.all_sum(sum(own, mx.array(0.0)), "the gradient's norm")

    @contextlib.contextmanager
    def together(self, what: str, passes: int = 1) -> Iterator[None]:
        """Ranks do not synchronise here: a batch goes on where the one before it has left."""
        with heartbeat.passing(what, passes):
            yield

    def agree_to_go_on(self, what: str) -> None:
        """Returns when all ranks are here. Raises OutOfMemory: one gave up instead."""
        began = time.perf_counter()
        gave_up = self.ranks.all_sum(mx.array(0.0), what).item()
        self.ranks.links.waited_seconds += time.perf_counter() - began
        if gave_up:
            raise OutOfMemory("another rank's", (0,))


def divided(model: nn.Module, division: Division | Blocks | None, world: World, keeps_wired: bool = False) -> World:
    """Leaves every rank its part of a model, which may be loaded lazily; the world of ranks that share it; AgreedError.
    division: of every block, or how many blocks each rank keeps. keeps_wired: on a Mac, if it is large."""
    if isinstance(division, tuple):
        links = world.links if isinstance(world, PipelinedWorld) else links_of(world)
        with world.agreeing("cutting the model"):
            stage = pipeline_stage.cut(model, division, world.rank, links)
            mx.eval(model.parameters())
        world = pipelined(world, division, stage, links)
    elif division is not None:
        with world.agreeing("dividing the model"):
            parts, partial = tensor_parallel.shard(model, division, world)
        world = sharded(world, division, parts, partial)
    if keeps_wired:
        metal.keep_wired(sum(array.nbytes for _, array in tree_flatten(model.parameters())))
    return world


def load_reference(settings: ModelSettings, seed: int, world: World) -> nn.Module:
    """The reference model; in parts, where the policy is; AgreedError where it cannot be, or ranks have unlike ones."""
    if world.size > 1:
        world.require_equal("reference model", load.fingerprint(load.reference_settings(settings), seed))
    weights = world.division.weights if isinstance(world, ShardedWorld) and world.division else None
    division: Division | Blocks | None = None
    with world.agreeing("loading the reference"):
        model = load.load_reference(settings, seed, lazy=weights is not None or isinstance(world, PipelinedWorld))
        if isinstance(world, PipelinedWorld):
            count = len(model.layers)
            division = world.blocks if count == sum(world.blocks) else apportion(count, world.blocks, what="blocks")
        elif weights is not None:
            stored = tokenizer.stored_config(load.reference_settings(settings))
            shape = model_shape_of(stored, settings.dtype)
            division = divide(shape, weights, settings.shard_vocabulary) if shape else None
    divided(model, division, world)
    return model


def is_compiled(train: TrainSettings, world: World) -> bool:
    """Whether the step is traced once for every shape of its batches. Never where ranks have unequal parts of every
    block: their graphs differ, and so might the order of collectives; nor, by default, where a sum leaves the device,
    as over a Mac's ring, where it was not tried."""
    if isinstance(world, Lockstep) and not isinstance(world, InStages):  # within a stage there are no sums
        division = world.ranks.division
        if division is None or not division.is_even or not (train.compile or world.backend == "nccl"):
            return False
    return compiles(train)
