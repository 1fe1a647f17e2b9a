"""Merging against what it has to be: dense means, numpy's SVD, torch's Nesterov written out, FedNova's formula."""

from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lib.training import merge_adapters
from tests.rounding import roundoff

SCALE = 2.0


def adapter(rng: np.random.Generator, shapes: list[tuple[int, ...]], rank: int) -> dict[str, np.ndarray]:
    """Random factors of layers [in, out] and [experts, in, out], and one parameter that is no factor."""
    made: dict[str, Any] = {"norm.weight": rng.normal(size=5)}
    for i, (*experts, rows, columns) in enumerate(shapes):
        if experts:
            made[f"layers.{i}.lora_a"] = rng.normal(size=(*experts, rank, rows))
            made[f"layers.{i}.lora_b"] = rng.normal(size=(*experts, columns, rank))
        else:
            made[f"layers.{i}.lora_a"], made[f"layers.{i}.lora_b"] = (
                rng.normal(size=(rows, rank)),
                rng.normal(size=(rank, columns)),
            )
    return {name: array.astype(np.float32) for name, array in made.items()}


def dense(adapter: merge_adapters.Adapter, layer: str) -> np.ndarray:
    """What a layer adds to its weight, float64 [..., in, out], by mlx-lm's own formula."""
    a, b = (adapter[f"{layer}.lora_{side}"].astype(np.float64) for side in "ab")
    return SCALE * (a.swapaxes(-1, -2) @ b.swapaxes(-1, -2) if a.ndim == 3 else a @ b)


def mean_of(adapters: list[dict[str, np.ndarray]], weights: np.ndarray, layer: str) -> np.ndarray:
    return np.sum([w * dense(one, layer) for w, one in zip(weights, adapters, strict=True)], axis=0)


def sum_of_sizes(adapters: list[dict[str, np.ndarray]], weights: np.ndarray, layer: str) -> np.ndarray:
    """As mean_of, of the sizes of all terms: what roundings are relative to."""
    sizes = [{name: np.abs(array) for name, array in one.items()} for one in adapters]
    return mean_of(sizes, weights, layer)


@st.composite
def worlds(draw: st.DrawFn) -> tuple[list[dict[str, np.ndarray]], np.ndarray]:
    """Adapters of one to four ranks and their weights; a rank may have trained nothing."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    rank = draw(st.integers(1, 4))
    shapes = [
        (*draw(st.sampled_from([(), (3,)])), draw(st.integers(rank, 12)), draw(st.integers(rank, 12)))
        for _ in range(draw(st.integers(1, 2)))
    ]
    pairs = draw(st.lists(st.integers(0, 1000), min_size=1, max_size=4))
    return [adapter(rng, shapes, rank) for _ in pairs], merge_adapters.example_weights(pairs)


@settings(max_examples=60)
@given(worlds())
def test_stack_is_the_weighted_mean_of_the_updates(world: Any) -> None:
    adapters, weights = world
    merged = merge_adapters.stack(adapters, weights)
    for layer in merge_adapters.low_rank_layers(merged):
        exact = mean_of(adapters, weights, layer)
        # A factor's weight, and its product with it, are float32: two roundings of every term.
        terms = sum_of_sizes(adapters, weights, layer)
        assert (np.abs(dense(merged, layer) - exact) <= roundoff(3) * terms).all()
        a = merged[f"{layer}.lora_a"]
        assert a.shape[-2 if a.ndim == 3 else -1] == sum(
            one[f"{layer}.lora_b"].shape[-1 if a.ndim == 3 else -2] for one in adapters
        )
        # The outputs, as a user sees them: x W + scale (x A) B.
        x = np.random.default_rng(0).normal(size=(3, exact.shape[-2]))
        assert (np.abs(x @ dense(merged, layer) - x @ exact) <= roundoff(3) * (np.abs(x) @ terms)).all()
    missed, exact_change = merge_adapters.distance(merged, adapters[0], adapters, weights)
    assert missed <= 1e-12 * max(exact_change, sum(float(np.square(a).sum()) for a in adapters[0].values()))


@settings(max_examples=60)
@given(worlds())
def test_svd_is_as_near_as_numpys_at_the_same_rank(world: Any) -> None:
    adapters, weights = world
    merged = merge_adapters.svd(adapters, weights)
    for layer in merge_adapters.low_rank_layers(merged):
        a, b = merged[f"{layer}.lora_a"], merged[f"{layer}.lora_b"]
        assert a.shape == adapters[0][f"{layer}.lora_a"].shape and b.shape == adapters[0][f"{layer}.lora_b"].shape
        exact = mean_of(adapters, weights, layer)
        rank = a.shape[-2] if a.ndim == 3 else a.shape[-1]
        u, sigma, vt = np.linalg.svd(exact, full_matrices=False)
        best = (u[..., :rank] * sigma[..., None, :rank]) @ vt[..., :rank, :]
        size = np.linalg.norm(exact)
        assert np.linalg.norm(dense(merged, layer) - exact) <= np.linalg.norm(best - exact) + 1e-6 * size


def test_svd_of_one_adapter_or_of_equal_ones_is_the_same_product_in_orthogonal_columns() -> None:
    one = adapter(np.random.default_rng(1), [(12, 9)], 3)
    for adapters in ([one], [one, one]):
        merged = merge_adapters.svd(adapters, merge_adapters.example_weights([5] * len(adapters)))
        np.testing.assert_allclose(dense(merged, "layers.0"), dense(one, "layers.0"), rtol=1e-4, atol=1e-5)
        a = merged["layers.0.lora_a"].astype(np.float64)
        gram = a.T @ a
        np.testing.assert_allclose(gram, gram[0, 0] * np.eye(3), atol=1e-5)
        assert np.linalg.norm(a) == pytest.approx(np.linalg.norm(one["layers.0.lora_a"]))


def test_svd_turns_its_factors_to_where_the_ranks_were() -> None:
    """Columns that are orthogonal and alike already stay where they are: an optimizer's moments still fit."""
    rng = np.random.default_rng(2)
    start = adapter(rng, [(64, 64)], 4)
    start["layers.0.lora_a"] = np.linalg.qr(rng.normal(size=(64, 4)))[0].astype(np.float32)
    ranks = []
    for _ in range(2):
        moved = {name: a + 0.001 * rng.normal(size=a.shape).astype(np.float32) for name, a in start.items()}
        ranks.append(moved)
    merged = merge_adapters.svd(ranks, np.array([0.5, 0.5]))
    assert np.linalg.norm(merged["layers.0.lora_a"] - start["layers.0.lora_a"]) < 0.1
    assert np.linalg.norm(merged["layers.0.lora_b"] - start["layers.0.lora_b"]) < 0.1 * np.linalg.norm(
        start["layers.0.lora_b"]
    )


def test_svd_of_adapters_whose_left_factors_cancel() -> None:
    """A B and (-A)(-B) are one update, and the mean of their left factors is nothing to be like."""
    one = adapter(np.random.default_rng(0), [(6, 5)], 2)
    other = {name: -array if "lora" in name else array for name, array in one.items()}
    merged = merge_adapters.svd([one, other], np.array([0.5, 0.5]))
    np.testing.assert_allclose(dense(merged, "layers.0"), dense(one, "layers.0"), rtol=1e-5, atol=1e-6)


def test_untrained_adapters_merge_to_nothing() -> None:
    """LoRA starts with B = 0: no product, no division by it."""
    one = adapter(np.random.default_rng(3), [(8, 6)], 2)
    one["layers.0.lora_b"][:] = 0
    for how in (merge_adapters.svd, merge_adapters.stack, merge_adapters.average):
        merged = how([one, one], np.array([0.5, 0.5]))
        assert not dense(merged, "layers.0").any() and all(np.isfinite(a).all() for a in merged.values())
        assert np.linalg.norm(merged["layers.0.lora_a"]) > 0, "a zero A beside a zero B would never learn"
        assert merge_adapters.distance(merged, one, [one, one], np.array([0.5, 0.5]))[0] < 1e-12


@settings(max_examples=60)
@given(worlds())
def test_distance_is_what_dense_matrices_say(world: Any) -> None:
    adapters, weights = world
    start = {name: np.float32(0.5) * array for name, array in adapters[0].items()}
    merged = merge_adapters.average(adapters, weights)
    missed, exact = merge_adapters.distance(merged, start, adapters, weights)
    layers = merge_adapters.low_rank_layers(start)
    dense_exact = sum(np.square(mean_of(adapters, weights, la) - dense(start, la)).sum() for la in layers)
    dense_missed = sum(np.square(mean_of(adapters, weights, la) - dense(merged, la)).sum() for la in layers)
    plain = sum(w * one["norm.weight"].astype(np.float64) for w, one in zip(weights, adapters, strict=True))
    assert exact == pytest.approx(
        dense_exact / SCALE**2 + np.square(plain - start["norm.weight"]).sum(), rel=1e-9, abs=1e-9
    )
    assert missed == pytest.approx(dense_missed / SCALE**2, rel=1e-6, abs=1e-9 * exact)
    np.testing.assert_allclose(merged["norm.weight"], plain, rtol=1e-6, atol=1e-6)


def test_averaged_factors_are_not_the_averaged_product() -> None:
    adapters = [adapter(np.random.default_rng(seed), [(8, 8)], 2) for seed in (4, 5)]
    weights = merge_adapters.example_weights([3, 1])
    missed, exact = merge_adapters.distance(merge_adapters.average(adapters, weights), adapters[0], adapters, weights)
    best, _ = merge_adapters.distance(merge_adapters.svd(adapters, weights), adapters[0], adapters, weights)
    assert 0 < best < missed and missed > 0.01 * exact


def test_outer_follows_nesterov() -> None:
    """Against the update written out, three rounds of it; without momentum and at rate 1 it is the plain mean."""
    rng = np.random.default_rng(6)
    start = {"w": rng.normal(size=(3, 4)).astype(np.float32)}
    changes = [{"w": rng.normal(size=(3, 4)).astype(np.float32)} for _ in range(3)]
    weights, momentum = start, {}
    expected, buffer = start["w"].astype(np.float64), 0.0
    for change in changes:
        weights, momentum = merge_adapters.outer(weights, change, momentum, 0.7, 0.9)
        gradient = -change["w"].astype(np.float64)
        buffer = 0.9 * buffer + gradient
        expected = expected - 0.7 * (gradient + 0.9 * buffer)
    np.testing.assert_allclose(weights["w"], expected, rtol=1e-5, atol=1e-6)
    plain, _ = merge_adapters.outer(start, changes[0], {}, 1.0, 0.0)
    np.testing.assert_allclose(plain["w"], start["w"] + changes[0]["w"], rtol=1e-6)


def test_fednova_counts_a_change_by_the_step() -> None:
    # Equal steps: the parts of the examples. Unequal: a rank's steps weigh by its examples, whatever their number.
    np.testing.assert_allclose(merge_adapters.normalised_weights([30, 10], [5, 5]), [0.75, 0.25])
    factors = merge_adapters.normalised_weights([10, 10], [8, 2])
    np.testing.assert_allclose(factors, [0.5 * 5 / 8, 0.5 * 5 / 2])
    # Every step moved by the same vector: the mean moves by the mean number of them.
    assert factors @ np.array([8.0, 2.0]) == pytest.approx(5.0)
    np.testing.assert_allclose(merge_adapters.normalised_weights([7, 0], [3, 0]), [1.0, 0.0])
    assert merge_adapters.normalised_weights([0, 0], [0, 0]).tolist() == [0, 0]


@settings(max_examples=40)
@given(worlds(), st.integers(1, 9))
def test_merges_do_not_depend_on_the_order_of_ranks_or_on_splitting_a_weight(world: Any, cut: int) -> None:
    """A rank counted as two of the same adapter changes nothing: a weight is a number of examples, no vote."""
    adapters, weights = world
    split = ([adapters[0], *adapters], np.array([weights[0] * cut / 10, weights[0] * (10 - cut) / 10, *weights[1:]]))
    turned = (adapters[::-1], weights[::-1])
    for how in (merge_adapters.stack, merge_adapters.svd, merge_adapters.average):
        expected = how(adapters, weights)
        for others in (split, turned):
            merged = how(*others)
            for layer in merge_adapters.low_rank_layers(merged):
                wanted, size = dense(expected, layer), np.linalg.norm(mean_of(adapters, weights, layer))
                if how is merge_adapters.svd:  # of equally good approximations any may be taken
                    exact = mean_of(adapters, weights, layer)
                    gap = np.linalg.norm(dense(merged, layer) - exact) - np.linalg.norm(wanted - exact)
                    assert abs(gap) <= 1e-5 * size
                else:
                    assert np.linalg.norm(dense(merged, layer) - wanted) <= 1e-5 * max(size, np.linalg.norm(wanted))


def test_a_stacked_layer_runs_in_mlx_lm() -> None:
    """x W + scale (x A) B of mlx-lm's own layer, with the larger rank in place."""
    import mlx.nn as nn
    from mlx_lm.tuner.lora import LoRALinear

    adapters = [adapter(np.random.default_rng(seed), [(16, 8)], 2) for seed in (7, 8)]
    weights = merge_adapters.example_weights([3, 1])
    x, base = mx.random.normal((5, 16), key=mx.random.key(0)), nn.Linear(16, 8)
    outputs = []
    for one in [merge_adapters.stack(adapters, weights), *adapters]:
        layer = LoRALinear.from_base(base, r=one["layers.0.lora_a"].shape[1], scale=SCALE)
        layer.lora_a, layer.lora_b = mx.array(one["layers.0.lora_a"]), mx.array(one["layers.0.lora_b"])
        outputs.append(np.array(layer(x), np.float64))
    expected = 0.75 * outputs[1] + 0.25 * outputs[2]
    # x W of 16 terms and a bias, and a product of 2 after one of 16.
    sizes = [np.abs(np.array(a, np.float64)) for a in (x, base.weight, base.bias)]
    terms = sizes[0] @ sizes[1].T + sizes[2] + sizes[0] @ sum_of_sizes(adapters, weights, "layers.0")
    assert (np.abs(outputs[0] - expected) <= 2 * roundoff(16 + 2 + 2) * terms).all()
