"""Merging: one set of weights from the ranks' at a round's end, by stacking, SVD, averaging or an outer optimizer."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx.utils import tree_unflatten

from lib.config.settings import IndependentSettings, ModelSettings, SyncSettings
from lib.distributed import compression
from lib.distributed.compression import Arrays
from lib.distributed.world import World, buckets
from lib.model import adapter_files
from lib.model.adapter_files import rank_of

GROUP_BYTES = 64 * 2**20  # of parameters that are merged at a time


# ---- One adapter from several: pure, in float64 ----------------------------------------------------------------------
#
# An adapter maps names to arrays, float [...]. A LoRA layer has two of them, `X.lora_a` [in, r] and `X.lora_b` [r, out]
# (of E experts [E, r, in] and [E, out, r]), and changes its weight by scale * A B: the ranks' mean change is the
# weighted mean of their products, which the mean of A times the mean of B is not. The mean of all other parameters is
# exact. Weights are the ranks' parts of what was trained, float [ranks], adding up to 1.

Adapter = Mapping[str, np.ndarray]
Factors = tuple[np.ndarray, np.ndarray]  # A [..., in, r], B [..., r, out], float64
SIDES = (".lora_a", ".lora_b")


def example_weights(pairs: Sequence[int]) -> np.ndarray:
    """Each rank's part of all pairs: float64 [ranks]; equal parts where no rank trained."""
    total = sum(pairs)
    return np.array(pairs, np.float64) / total if total else np.full(len(pairs), 1 / len(pairs))


def normalised_weights(pairs: Sequence[int], steps: Sequence[int]) -> np.ndarray:
    """The factor of each rank's change where ranks took unlike numbers of steps: float64 [ranks]. FedNova
    (arXiv:2007.07481, equation 6): a rank's change counts by the step, and the mean step is taken as often as the ranks
    did on average."""
    weights, taken = example_weights(pairs), np.array(steps, np.float64)
    return np.divide(weights * (weights @ taken), taken, out=np.zeros_like(weights), where=taken > 0)


def average(adapters: Sequence[Adapter], weights: np.ndarray) -> dict[str, np.ndarray]:
    """The weighted mean of every parameter by itself: exact for all but LoRA's products."""
    return {
        name: _weighted_sum([adapter[name] for adapter in adapters], weights).astype(array.dtype)
        for name, array in adapters[0].items()
    }


def stack(adapters: Sequence[Adapter], weights: np.ndarray) -> dict[str, np.ndarray]:
    """LoRA layers [sqrt(w_1) A_1, sqrt(w_2) A_2, ...] and the same of B: A B is the exact weighted mean."""
    merged = average(adapters, weights)
    for layer in low_rank_layers(adapters[0]):
        merged |= _named(layer, *_stacked(adapters, weights, layer), like=adapters[0])
    return merged


def svd(
    adapters: Sequence[Adapter], weights: np.ndarray, ranks: Mapping[str, int] | None = None
) -> dict[str, np.ndarray]:
    """LoRA layers whose A B is the best approximation of the weighted mean of A B at a rank, by default the adapters'.
    Best in the Frobenius norm (Eckart and Young, 1936). A has orthogonal columns, together as large as the mean A, and
    turned as near to it as can be (orthogonal Procrustes): an optimizer's moments keep their meaning. ranks: by
    layer."""
    merged = average(adapters, weights)
    for layer in low_rank_layers(adapters[0]):
        mean = _factors(merged, layer)[0][..., : ranks[layer] if ranks else None]
        merged |= _named(layer, *_truncated(*_stacked(adapters, weights, layer), mean), like=adapters[0])
    return merged


def outer(
    start: Adapter, change: Adapter, momentum: Adapter, learning_rate: float, momentum_factor: float
) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    """An outer step along the averaged change, with Nesterov momentum (DiLoCo, arXiv:2311.08105, algorithm 1). start:
    the parameters before the round. Returns the parameters, and the momentum, float32, empty at first."""
    merged, moved = {}, {}
    for name, before in start.items():
        gradient = -change[name].astype(np.float64)
        velocity = gradient + (momentum_factor * momentum[name] if name in momentum else 0.0)
        step = learning_rate * (gradient + momentum_factor * velocity)
        merged[name] = (before.astype(np.float64) - step).astype(before.dtype)
        moved[name] = velocity.astype(np.float32)
    return merged, moved


def distance(merged: Adapter, start: Adapter, adapters: Sequence[Adapter], weights: np.ndarray) -> tuple[float, float]:
    """Squared norms of (merged change - exact weighted mean change), and of the latter, summed over parameters. Of
    LoRA's layers as products, without their scale: |L R|^2 = trace(L'L RR'), of the small factors side by side."""
    layers = low_rank_layers(start)

    def from_mean(adapter: Adapter) -> float:
        total = 0.0
        for layer in layers:
            (left, right), (a, b) = _stacked(adapters, weights, layer), _factors(adapter, layer)
            left, right = np.concatenate([left, a], axis=-1), np.concatenate([right, -b], axis=-2)
            total += float(((left.swapaxes(-1, -2) @ left) * (right @ right.swapaxes(-1, -2))).sum())
        for name in sorted(start.keys() - {f"{layer}{side}" for layer in layers for side in SIDES}):
            mean = _weighted_sum([each[name] for each in adapters], weights)
            total += float(np.square(mean - adapter[name]).sum())
        return max(0.0, total)

    return from_mean(merged), from_mean(start)


def low_rank_layers(adapter: Adapter) -> list[str]:
    """The layers that have both of LoRA's factors."""
    return sorted(name.removesuffix(SIDES[0]) for name in adapter if name.endswith(SIDES[0]))


def _factors(adapter: Adapter, layer: str) -> Factors:
    a, b = (adapter[f"{layer}{side}"].astype(np.float64) for side in SIDES)
    return (a.swapaxes(-1, -2), b.swapaxes(-1, -2)) if a.ndim == 3 else (a, b)


def _named(layer: str, *factors: np.ndarray, like: Adapter) -> dict[str, np.ndarray]:
    """The factors under their names, in the adapter's layout and type."""
    stored = [factor.swapaxes(-1, -2) if factor.ndim == 3 else factor for factor in factors]
    names = [f"{layer}{side}" for side in SIDES]
    return {name: factor.astype(like[name].dtype) for name, factor in zip(names, stored, strict=True)}


def _weighted_sum(arrays: Sequence[np.ndarray], weights: np.ndarray) -> np.ndarray:
    return np.asarray(sum(weight * array.astype(np.float64) for weight, array in zip(weights, arrays, strict=True)))


def _stacked(adapters: Sequence[Adapter], weights: np.ndarray, layer: str) -> Factors:
    """[..., in, R] and [..., R, out], whose product is the weighted mean of the products."""
    pairs = [(np.sqrt(weight), _factors(adapter, layer)) for weight, adapter in zip(weights, adapters, strict=True)]
    left = np.concatenate([root * a for root, (a, _) in pairs], axis=-1)
    return left, np.concatenate([root * b for root, (_, b) in pairs], axis=-2)


def _truncated(left: np.ndarray, right: np.ndarray, mean: np.ndarray) -> Factors:
    """The product [..., in, R] [..., R, out] at the rank of `mean` [..., in, r], with a left factor like it."""
    rank = mean.shape[-1]
    q_left, r_left = np.linalg.qr(left)
    q_right, r_right = np.linalg.qr(right.swapaxes(-1, -2))
    u, sigma, vt = np.linalg.svd(r_left @ r_right.swapaxes(-1, -2), full_matrices=False)
    u, sigma, vt = q_left @ u[..., :rank], sigma[..., :rank], vt[..., :rank, :] @ q_right.swapaxes(-1, -2)
    p, _, qt = np.linalg.svd(u.swapaxes(-1, -2) @ mean, full_matrices=False)
    turn = p @ qt
    size = np.linalg.norm(mean, axis=(-2, -1), keepdims=True) / np.sqrt(rank)
    size = np.where(size > 0, size, 1.0)
    return size * (u @ turn), turn.swapaxes(-1, -2) @ (sigma[..., :, None] * vt) / size


# ---- Merging: the ranks' changes travel, and every rank merges them --------------------------------------------------


@dataclass
class Merger:
    """Gives the ranks one set of weights at a round's end. momentum: float32; feedback: what compression left out."""

    world: World
    model: nn.Module
    model_settings: ModelSettings
    settings: IndependentSettings
    sync: SyncSettings
    momentum: Arrays = field(default_factory=dict)
    feedback: Arrays = field(default_factory=dict)

    def merge(self, method: str, start: Arrays, pairs: list[int], steps: list[int]) -> dict[str, Any]:
        """Merges in place, a group of parameters at a time; returns the fields of the merge's record. `error`: how far
        the merged change is from the exact mean of the ranks' changes, relative to it; None where that is not known
        (DoRA)."""
        record: dict[str, Any] = {"method": method, "pairs": pairs, "steps": steps, "error": None, "bytes_sent": 0}
        if method == "none":
            return record
        world, is_compressed = self.world, self.sync.compression != "none"
        bytes_before, now = world.traffic.bytes_sent, adapter_files.trainable(self.model)
        factors = normalised_weights(pairs, steps) if method == "outer" else example_weights(pairs)
        took_part = [rank for rank, count in enumerate(pairs) if count]
        parts, errors = example_weights(pairs)[took_part], np.zeros(2)
        new, merged = Arrays(), dict[str, np.ndarray]()
        for names in _groups(now):
            begun, own = ({name: arrays[name].astype(mx.float32) for name in names} for arrays in (start, now))
            if is_compressed:  # what has changed travels: it is smaller, and so is its error
                own = {name: own[name] - begun[name] for name in own}
            arrived, left_out = compression.gather(world, own, self.sync, self.feedback, "the merge")
            self.feedback |= left_out
            if is_compressed:
                arrived = [{name: begun[name] + change[name] for name in own} for change in arrived]
            adapters = [_numpy(arrived[rank]) for rank in took_part]
            if method == "outer":
                changes = {n: sum(factors[rank] * (arrived[rank][n] - begun[n]) for rank in took_part) for n in own}
                velocity = _numpy({name: self.momentum[name] for name in begun if name in self.momentum})
                rate, factor = self.settings.outer_learning_rate, self.settings.outer_momentum
                merged, momentum = outer(_numpy(begun), _numpy(changes), velocity, rate, factor)
                self.momentum |= {name: mx.array(array) for name, array in momentum.items()}
            elif method == "average" or len(took_part) == 1:
                merged = average(adapters, parts)
            else:
                merged = (stack if method == "stack" else svd)(adapters, parts)
            errors += distance(merged, _numpy(begun), adapters, parts)
            new |= {name: mx.array(array).astype(now[name].dtype) for name, array in merged.items()}
        self.model.update(tree_unflatten(new))
        mx.eval(self.model.trainable_parameters(), self.momentum, self.feedback)
        missed, exact = errors.tolist()
        if self.model_settings.method != "dora":
            record["error"] = math.sqrt(missed / exact) if exact else 0.0
        return record | {"bytes_sent": world.traffic.bytes_sent - bytes_before}


def _numpy(arrays: Arrays) -> dict[str, np.ndarray]:
    return {name: np.array(array) for name, array in arrays.items()}


def to_ranks(model: nn.Module, settings: ModelSettings) -> None:
    """Brings stacked adapters back to the ranks that training goes on with, as well as can be."""
    own = adapter_files.trainable(model)
    layers = adapter_files.adapter_layers_of(settings, adapter_files.described(own))
    ranks = {layer: rank_of(settings, layer) for layer in layers}
    if any(layers[layer].rank != rank for layer, rank in ranks.items()):
        smaller = svd([_numpy(own)], np.ones(1), ranks)
        model.update(tree_unflatten([(name, mx.array(array)) for name, array in smaller.items()]))
        mx.eval(model.trainable_parameters())


def _groups(arrays: Arrays) -> list[list[str]]:
    """Names in order, LoRA's two factors of a layer together, as many as GROUP_BYTES hold."""
    layers = [list(names) for _, names in groupby(sorted(arrays), lambda name: name.rpartition(".lora_")[0] or name)]
    sizes = [sum(arrays[name].nbytes for name in names) for names in layers]
    return [[name for i in bucket for name in layers[i]] for bucket in buckets(sizes, GROUP_BYTES)]
