"""One model from what independent ranks trained in a round: their changes travel, and every rank merges them."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import NamedTuple

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx.utils import tree_unflatten

from lib.config.schema import Config, ModelSettings
from lib.distributed import compression
from lib.distributed.compression import Arrays, decode, encode
from lib.distributed.world import World
from lib.model import adapter_files
from lib.model.adapter_layers import rank_of
from lib.training import merge_adapters

GROUP_BYTES = 64 * 2**20  # of parameters that are merged at a time


@dataclass
class MergeResult:
    """The fields of a merge's record.

    error: how far the merged change is from the exact weighted mean of the ranks' changes as they arrived, relative to
        it (Frobenius norms); None where a mean of products is not known (DoRA) or nothing was merged.
    compression_error: how far what the others received of this rank's change is from it, relative to it.
    """

    method: str
    pairs: list[int]  # of the round, by rank
    steps: list[int]
    error: float | None = None
    compression_error: float | None = None
    bytes_sent: int = 0
    seconds: float = 0.0
    waited_seconds: float = 0.0


class RoundWork(NamedTuple):
    """What every rank trained of a round."""

    pairs: list[int]
    steps: list[int]


@dataclass
class Errors:
    """Squared norms of what a merge and its compression got wrong, beside those of what is right."""

    missed: float = 0.0
    exact: float = 0.0
    lost: float = 0.0
    whole: float = 0.0


@dataclass
class Merger:
    """Makes the ranks' weights one at a round's end, and keeps what has to last from merge to merge."""

    config: Config
    world: World
    model: nn.Module
    momentum: Arrays = field(default_factory=dict)  # of the outer step, by parameter
    feedback: Arrays = field(default_factory=dict)  # what compression left out so far

    def merge(self, method: str, start: Arrays, work: RoundWork) -> MergeResult:
        """Merges in place. start: the weights with which the round began."""
        result = MergeResult(method, *work)
        if method == "none":
            return result
        before = self.world.traffic.bytes_sent
        now = adapter_files.trainable(self.model)
        compression = self.config.sync.compression
        is_summed = self.config.model.method == "full" and compression in ("none", "bf16")
        merge = self._merge_sums if is_summed else self._merge_gathered
        merged, errors = merge(method, start, now, work)
        self.model.update(tree_unflatten(list(merged.items())))
        mx.eval(self.model.trainable_parameters(), self.momentum, self.feedback)
        if self.config.model.method != "dora":
            result.error = _ratio(errors.missed, errors.exact)
        if compression != "none":
            result.compression_error = _ratio(errors.lost, errors.whole)
        result.bytes_sent = self.world.traffic.bytes_sent - before
        return result

    def _merge_sums(self, method: str, start: Arrays, now: Arrays, work: RoundWork) -> tuple[Arrays, Errors]:
        """Plain parameters, a group at a time: the ranks' weighted changes are added up on their way."""
        kind = self.config.sync.compression
        factor = _factors(method, work)[self.world.rank]
        dtype = mx.float32 if kind == "none" else mx.bfloat16
        new: Arrays = {}
        errors = Errors()
        for names in _groups(now):
            own = {name: now[name].astype(mx.float32) - start[name].astype(mx.float32) for name in names}
            weighted = [float(factor) * own[name] for name in names]
            for array in weighted:
                errors.lost += mx.square(array - decode(encode(array, kind), kind, array.shape)).sum().item()
                errors.whole += mx.square(array).sum().item()
            summed = self.world.sum_arrays(weighted, "the merge of the ranks' changes", dtype)
            change = {name: array.astype(mx.float32) for name, array in zip(names, summed, strict=True)}
            begun = {name: start[name].astype(mx.float32) for name in names}
            if method == "outer":
                merged = self._outer(begun, change)
            else:
                merged = {name: begun[name] + change[name] for name in names}
            for name in names:
                errors.missed += mx.square(merged[name] - begun[name] - change[name]).sum().item()
                errors.exact += mx.square(change[name]).sum().item()
                new[name] = merged[name].astype(now[name].dtype)
        return new, errors

    def _merge_gathered(self, method: str, start: Arrays, now: Arrays, work: RoundWork) -> tuple[Arrays, Errors]:
        """Adapters, and whatever cannot be added up on its way, a group at a time: every rank merges what all sent."""
        sync, weights, factors = self.config.sync, merge_adapters.example_weights(work.pairs), _factors(method, work)
        took_part = [rank for rank, count in enumerate(work.pairs) if count]
        new: Arrays = {}
        errors = Errors()
        for names in _groups(now):
            begun = {name: start[name].astype(mx.float32) for name in names}
            own = {name: now[name].astype(mx.float32) for name in names}
            # Uncompressed, the weights themselves travel; else what has changed, which is smaller and so is its error.
            if sync.compression != "none":
                own = {name: own[name] - begun[name] for name in names}
            feedback = {name: self.feedback[name] for name in names if name in self.feedback}
            arrived, left_out = compression.gather(self.world, own, sync, feedback, "the merge")
            self.feedback |= left_out
            errors.lost += sum(mx.square(own[n] - arrived[self.world.rank][n]).sum().item() for n in names)
            errors.whole += sum(mx.square(own[n]).sum().item() for n in names)
            if sync.compression != "none":
                arrived = [{name: begun[name] + change[name] for name in names} for change in arrived]
            adapters = [{name: np.array(arrived[rank][name]) for name in names} for rank in took_part]
            origin = {name: np.array(begun[name]) for name in names}
            parts = weights[took_part]
            if method == "outer":
                change = {
                    name: sum(factors[rank] * (arrived[rank][name] - begun[name]) for rank in took_part)
                    for name in names
                }
                merged = {name: np.array(array) for name, array in self._outer(begun, change).items()}
            elif method == "average" or len(took_part) == 1:
                merged = merge_adapters.average(adapters, parts)
            else:
                merged = (merge_adapters.stack if method == "stack" else merge_adapters.svd)(adapters, parts)
            further, size = merge_adapters.distance(merged, origin, adapters, parts)
            errors.missed, errors.exact = errors.missed + further, errors.exact + size
            new |= {name: mx.array(array).astype(now[name].dtype) for name, array in merged.items()}
        return new, errors

    def _outer(self, begun: Arrays, change: Arrays) -> Arrays:
        """DiLoCo's step from the mean change of some parameters; their momentum moves on."""
        settings = self.config.independent
        merged, momentum = merge_adapters.outer(
            {name: np.array(array) for name, array in begun.items()},
            {name: np.array(array) for name, array in change.items()},
            {name: np.array(self.momentum[name]) for name in begun if name in self.momentum},
            settings.outer_learning_rate,
            settings.outer_momentum,
        )
        self.momentum |= {name: mx.array(array) for name, array in momentum.items()}
        return {name: mx.array(array) for name, array in merged.items()}


def to_ranks(model: nn.Module, settings: ModelSettings) -> bool:
    """Brings stacked adapters back to the ranks that training goes on with, as well as can be; whether they were."""
    own = adapter_files.trainable(model)
    layers = adapter_files.adapter_layers_of(settings, adapter_files.described(own))
    ranks = {layer: rank_of(settings, layer) for layer in layers}
    if all(layers[layer].rank == rank for layer, rank in ranks.items()):
        return False
    smaller = merge_adapters.svd([{name: np.array(array) for name, array in own.items()}], np.ones(1), ranks)
    model.update(tree_unflatten([(name, mx.array(array)) for name, array in smaller.items()]))
    return True


def _factors(method: str, work: RoundWork) -> np.ndarray:
    """Of every rank's change in the mean: float64 [ranks]."""
    if method == "outer":
        return merge_adapters.normalised_weights(work.pairs, work.steps)
    return merge_adapters.example_weights(work.pairs)


def _groups(arrays: Arrays) -> list[list[str]]:
    """Names in order, LoRA's two factors of a layer together, as many as GROUP_BYTES hold."""
    groups: list[list[str]] = []
    layer, room = None, 0
    for name in sorted(arrays):
        this = name.rpartition(".")[0] if ".lora_" in name else None
        room -= arrays[name].nbytes
        if not groups or (room < 0 and (this is None or this != layer)):
            groups.append([])
            room = GROUP_BYTES - arrays[name].nbytes
        groups[-1].append(name)
        layer = this
    return groups


def _ratio(missed: float, whole: float) -> float:
    return math.sqrt(missed / whole) if whole else 0.0
