"""One adapter from the adapters of independent ranks: pure functions, computed in float64.

An adapter maps names to arrays, float [...], as lib/model/adapter_files.py names the trained parameters. A LoRA layer
has two of them, `X.lora_a` [in, r] and `X.lora_b` [r, out] (of a layer of E experts [E, r, in] and [E, out, r]), and
changes its weight by scale * A B: what the ranks did is the weighted mean of their products, which the mean of A times
the mean of B is not. All other parameters are changed as they stand, and their mean is exact.

Weights are the ranks' parts of what was trained, float [ranks], adding up to 1.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

Adapter = Mapping[str, np.ndarray]


A, B = ".lora_a", ".lora_b"


def example_weights(pairs: Sequence[int]) -> np.ndarray:
    """Each rank's part of all pairs: float64 [ranks]; equal parts where nobody trained."""
    total = sum(pairs)
    return np.array(pairs, np.float64) / total if total else np.full(len(pairs), 1 / len(pairs))


def normalised_weights(pairs: Sequence[int], steps: Sequence[int]) -> np.ndarray:
    """The factor of each rank's change where ranks took unlike numbers of steps: float64 [ranks].

    FedNova (arXiv:2007.07481, equation 6): a rank's change counts by the step, and the mean step is taken as often as
    the ranks did on average. Else a rank that took many small steps would pull the mean towards its own optimum.
    """
    weights, taken = example_weights(pairs), np.array(steps, np.float64)
    factors: np.ndarray = np.divide(weights * (weights @ taken), taken, out=np.zeros_like(weights), where=taken > 0)
    return factors


def average(adapters: Sequence[Adapter], weights: np.ndarray) -> dict[str, np.ndarray]:
    """The weighted mean of every parameter by itself: exact for all but LoRA's products."""
    return {name: _mean([adapter[name] for adapter in adapters], weights) for name in adapters[0]}


def stack(adapters: Sequence[Adapter], weights: np.ndarray) -> dict[str, np.ndarray]:
    """LoRA layers whose A B is the weighted mean of the A B, exactly; their rank is the sum of the ranks.

    They lie side by side: [sqrt(w_1) A_1, sqrt(w_2) A_2, ...], and the same of B.
    """
    merged = average(adapters, weights)
    for layer in low_rank_layers(adapters[0]):
        merged |= _named(layer, *_stacked(adapters, weights, layer), like=adapters[0])
    return merged


def svd(
    adapters: Sequence[Adapter], weights: np.ndarray, ranks: Mapping[str, int] | None = None
) -> dict[str, np.ndarray]:
    """LoRA layers whose A B is the best approximation of the weighted mean of A B at a rank, by default the adapters'.

    ranks: by layer.

    Best in the Frobenius norm (Eckart and Young, 1936). Of the many A and B with this product, those are taken that
    training goes on with: A has orthogonal columns, together as large as the mean A, and turned as near to it as they
    can be (orthogonal Procrustes), so that an optimizer's moments keep their meaning.
    """
    merged = average(adapters, weights)
    for layer in low_rank_layers(adapters[0]):
        left, right = _stacked(adapters, weights, layer)
        mean = _factors(merged, layer)[0][..., : ranks[layer] if ranks else None]
        merged |= _named(layer, *_truncated(left, right, mean), like=adapters[0])
    return merged


def outer(
    start: Adapter, change: Adapter, momentum: Adapter, learning_rate: float, momentum_factor: float
) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    """An outer step along the averaged change, with Nesterov momentum (DiLoCo, arXiv:2311.08105, algorithm 1).

    Args:
        start: the parameters before the round; `change`: what the ranks, averaged, did to them; `momentum`: as returned
            by the round before, empty at first.

    Returns:
        The parameters, and the momentum, float32.
    """
    merged, moved = {}, {}
    for name, before in start.items():
        gradient = -change[name].astype(np.float64)
        velocity = gradient + (momentum_factor * momentum[name] if name in momentum else 0.0)
        step = learning_rate * (gradient + momentum_factor * velocity)
        merged[name] = (before.astype(np.float64) - step).astype(before.dtype)
        moved[name] = velocity.astype(np.float32)
    return merged, moved


def distance(merged: Adapter, start: Adapter, adapters: Sequence[Adapter], weights: np.ndarray) -> tuple[float, float]:
    """How far a merge is from the exact weighted mean of the ranks' changes to the weights.

    Returns:
        The squared Frobenius norms of (merged change - exact mean change) and of the exact mean change, for the sum
        over parameters; LoRA's layers as products, without the scale that both have in common. The merge error is the
        root of the first over the second.
    """
    missed = exact = 0.0
    layers = low_rank_layers(start)
    for layer in layers:
        begun, after = _factors(start, layer), _factors(merged, layer)
        each = [_factors(adapter, layer) for adapter in adapters]
        further, size = (_near if after[0].shape == begun[0].shape else _far)(after, begun, each, weights)
        missed, exact = missed + further, exact + size
    factors = {f"{layer}{side}" for layer in layers for side in (A, B)}
    for name in sorted(start.keys() - factors):
        average_now = sum(w * adapter[name].astype(np.float64) for w, adapter in zip(weights, adapters, strict=True))
        exact += float(np.square(average_now - start[name]).sum())
        missed += float(np.square(average_now - merged[name]).sum())
    return missed, exact


def low_rank_layers(adapter: Adapter) -> list[str]:
    """The layers that have both of LoRA's factors."""
    return sorted(name.removesuffix(A) for name in adapter if name.endswith(A))


def _factors(adapter: Adapter, layer: str) -> tuple[np.ndarray, np.ndarray]:
    """A, float64 [..., in, r], and B, [..., r, out]."""
    a, b = (adapter[f"{layer}{side}"].astype(np.float64) for side in (A, B))
    return (a.swapaxes(-1, -2), b.swapaxes(-1, -2)) if a.ndim == 3 else (a, b)


def _named(layer: str, a: np.ndarray, b: np.ndarray, like: Adapter) -> dict[str, np.ndarray]:
    """The factors under their names, in the adapter's layout and type."""
    if a.ndim == 3:
        a, b = a.swapaxes(-1, -2), b.swapaxes(-1, -2)
    return {f"{layer}{side}": factor.astype(like[f"{layer}{side}"].dtype) for side, factor in ((A, a), (B, b))}


def _mean(arrays: Sequence[np.ndarray], weights: np.ndarray) -> np.ndarray:
    total = sum(weight * array.astype(np.float64) for weight, array in zip(weights, arrays, strict=True))
    mean: np.ndarray = np.asarray(total).astype(arrays[0].dtype)
    return mean


def _stacked(adapters: Sequence[Adapter], weights: np.ndarray, layer: str) -> tuple[np.ndarray, np.ndarray]:
    """[..., in, R] and [..., R, out], whose product is the weighted mean of the products."""
    factors = [_factors(adapter, layer) for adapter in adapters]
    roots = np.sqrt(weights)
    return (
        np.concatenate([root * a for root, (a, _) in zip(roots, factors, strict=True)], axis=-1),
        np.concatenate([root * b for root, (_, b) in zip(roots, factors, strict=True)], axis=-2),
    )


def _truncated(left: np.ndarray, right: np.ndarray, mean: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
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


Factors = tuple[np.ndarray, np.ndarray]  # A, B


def _near(after: Factors, begun: Factors, each: Sequence[Factors], weights: np.ndarray) -> tuple[float, float]:
    """`distance` of one layer, from what has changed of A and B: with A_i = A + a_i and B_i = B + b_i

    the mean change is sum of w_i (A b_i + a_i B + a_i b_i). Products of the small factors alone say how large that is:
    merges are frequent, and a QR of every layer's factors took longer than all else in them.
    """
    moved = [*each, after]
    left = np.concatenate([begun[0], *(a - begun[0] for a, _ in moved)], axis=-1)
    right = np.concatenate([begun[1], *(b - begun[1] for _, b in moved)], axis=-2)
    lefts, rights = left.swapaxes(-1, -2) @ left, right @ right.swapaxes(-1, -2)
    mean, merged = (np.zeros((len(moved) + 1, len(moved) + 1)) for _ in range(2))
    for i, weight in enumerate(weights, 1):
        mean[0, i] = mean[i, 0] = mean[i, i] = weight
    merged[0, -1] = merged[-1, 0] = merged[-1, -1] = 1.0

    def squared_norm(coefficients: np.ndarray) -> float:
        """|sum of c_jk L_j R_k|^2 = trace(C' L'L C RR')."""
        spread = np.kron(coefficients, np.eye(begun[0].shape[-1]))
        return max(0.0, float(((spread.T @ lefts @ spread) * rights).sum()))

    return squared_norm(mean - merged), squared_norm(mean)


def _far(after: Factors, begun: Factors, each: Sequence[Factors], weights: np.ndarray) -> tuple[float, float]:
    """`distance` of one layer whose merged factors have another rank."""
    mean = [(float(weight), *factors) for weight, factors in zip(weights, each, strict=True)]
    return _squared_norm([*mean, (-1.0, *after)]), _squared_norm([*mean, (-1.0, *begun)])


def _squared_norm(terms: Sequence[tuple[float, np.ndarray, np.ndarray]]) -> float:
    """|sum of c A B|^2 in the Frobenius norm, without making a matrix as large as the weight."""
    left = np.concatenate([factor * a for factor, a, _ in terms], axis=-1)
    right = np.concatenate([b for _, _, b in terms], axis=-2)
    r_left, r_right = np.linalg.qr(left)[1], np.linalg.qr(right.swapaxes(-1, -2))[1]
    return float(np.square(r_left @ r_right.swapaxes(-1, -2)).sum())
