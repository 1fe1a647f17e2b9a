"""Local SGD without a network: assignment, learning rates, merges; and train.py on one and two ranks."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lib.config.settings import TrainSettings
from lib.data import order as row_order
from lib.training import local_sgd, merging
from lib.training.optimizers import learning_rate
from tests import rounding, tiny
from tests.rounding import roundoff
from tests.tiny import steps_of

SCALE = 2.0


@settings(max_examples=80)
@given(st.data())
def test_every_pair_is_trained_once_an_epoch_whatever_ranks_do(data: st.DataObject) -> None:
    """Random data sets, batches, rounds, shares and speeds; ranks synchronise anywhere."""
    size, batch = data.draw(st.integers(1, 70)), data.draw(st.integers(1, 12))
    in_epoch = -(-size // batch)
    steps, pairs = data.draw(st.integers(1, 3 * in_epoch)), data.draw(st.integers(1, 2 * size))
    ranks, rng = data.draw(st.integers(1, 4)), np.random.default_rng(data.draw(st.integers(0, 2**32)))
    lengths, step, seen, owed = rng.integers(2, 99, size), 0, [], np.zeros(ranks)
    while step < steps:
        this = local_sgd.open_round((step, steps), pairs, lengths, 5, batch)
        assert this.first_step == step and this.last_step > step
        held, trained, batches = len(this.rows), 0, len(this.edges) - 1
        assert held >= pairs or this.last_step == steps
        assert held - (this.edges[-1] - this.edges[-2]) < pairs, "a round is the fewest batches that hold its pairs"
        while trained < batches:
            last = int(rng.integers(trained + 1, batches + 1))
            if rng.random() < 0.5:
                shares = rng.multinomial(batch, np.ones(ranks) / ranks).tolist()
                queues = local_sgd.assign(this, (trained, last), shares)
            else:
                queues = local_sgd.assign(this, (trained, last), rng.uniform(0.1, 9, ranks).tolist(), owed)
            assigned = np.concatenate([chunk for queue in queues for chunk in queue])
            assert sorted(assigned.tolist()) == list(range(this.edges[trained], this.edges[last])), "each one once"
            for queue in queues:
                for chunk in queue:
                    assert len({this.batch_of(index) for index in chunk}) == 1, "one global batch, one learning rate"
                    seen += [(int(this.epochs[place]), int(this.rows[place])) for place in chunk]
            trained = last
        step = this.last_step
    assert len(seen) == len(set(seen)), "a pair was trained twice in an epoch"
    whole, rest = divmod(steps, in_epoch)
    for epoch in range(whole):
        assert sorted(row for e, row in seen if e == epoch) == list(range(size))
    assert len([row for e, row in seen if e == whole]) == min(rest * batch, size)


@settings(max_examples=60)
@given(st.lists(st.floats(0.1, 10), min_size=1, max_size=5), st.integers(1, 40), st.integers(1, 50))
def test_by_speed_roundings_do_not_add_up(speeds: list[float], batch: int, batches: int) -> None:
    this = local_sgd.open_round((0, batches), 10**6, np.ones(batch * batches, int), 0, batch)
    queues = local_sgd.assign(this, (0, batches), speeds, np.zeros(len(speeds)))
    for queue, speed in zip(queues, speeds, strict=True):
        assert abs(sum(map(len, queue)) - batch * batches * speed / sum(speeds)) <= len(speeds)


def test_planned_shares_are_those_of_a_synchronous_step() -> None:
    this = local_sgd.open_round((3, 9), 40, np.arange(21), 0, 8)
    queues = local_sgd.assign(this, (0, len(this.edges) - 1), [6, 2])
    batches = np.diff(this.edges).tolist()
    assert batches == [8, 8, 5, 8, 8, 5][: len(batches)] and [*map(len, queues[0])][:3] == [6, 6, 4]
    assert [*map(len, queues[1])][:3] == [2, 2, 1]
    assert [this.batch_of(chunk[0]) for chunk in queues[0]] == list(range(len(batches)))


@pytest.mark.parametrize(("rows", "batch", "epochs", "pairs"), [(33, 32, 24, 66), (9, 8, 5, 10**6), (50, 16, 3, 1)])
@pytest.mark.parametrize("shares", [[24, 8], [3, 2, 1], [1]], ids=str)
@pytest.mark.parametrize("by_speed", [True, False])
def test_every_row_has_the_learning_rate_of_its_synchronous_step(
    rows: int, batch: int, epochs: int, pairs: int, shares: list[int], by_speed: bool
) -> None:
    """Also where epochs end in a short batch."""
    in_epoch = -(-rows // batch)
    steps, train = epochs * in_epoch, TrainSettings(learning_rate=1e-4, warmup_steps=4, global_batch_size=batch)
    synchronous = {}
    for step in range(steps):
        position = row_order.Position(step // in_epoch, step % in_epoch * batch)
        order = row_order.epoch_order(np.arange(rows), 0, position.epoch, batch, 4)
        for row in row_order.global_batch(order, position, batch).tolist():
            synchronous[position.epoch, row] = learning_rate(train, step, steps)
    step, seen, speeds = 0, {}, [share * 1.07**rank for rank, share in enumerate(shares)]
    while step < steps:
        this = local_sgd.open_round((step, steps), pairs, np.arange(rows), 0, batch)
        batches = (0, len(this.edges) - 1)
        if by_speed:
            queues = local_sgd.assign(this, batches, speeds, np.zeros(len(speeds)))
        else:
            queues = local_sgd.assign(this, batches, shares)
        for chunk in (chunk for queue in queues for chunk in queue):
            rate = learning_rate(train, this.first_step + this.batch_of(chunk[0]), steps)
            seen |= {(int(this.epochs[index]), int(this.rows[index])): rate for index in chunk}
        step = this.last_step
    assert seen == synchronous


# ---- train.py --------------------------------------------------------------------------------------------------------


def test_one_rank_apart_is_one_rank(tmp_path) -> None:
    """Alone there is nothing to wait for and nothing to merge: the same bits, but for the order within a batch."""
    words = ["train.steps=8", "independent.pairs_per_round=20"]
    plain = tiny.run(tmp_path, "plain", words)
    apart = tiny.run(tmp_path, "apart", [*words, "strategy=independent"])
    rounding.assert_equal_runs(plain, [apart], ["loss"])
    for one, other in zip(steps_of(plain), steps_of(apart), strict=True):
        assert sorted(one["rows"]) == sorted(other["rows"]) and one["learning_rate"] == other["learning_rate"]


def test_two_ranks_take_the_learning_rates_of_a_synchronous_run(tmp_path) -> None:
    common = [*tiny.settings(tmp_path, rows=21), "train.epochs=3", "train.warmup_steps=2"]
    tiny.train(tmp_path, [*common, "run.name=plain"])
    tiny.train(tmp_path, [*common, "strategy=independent", "run.name=apart"], ranks=2)
    rates = [
        {(r["epoch"], row): r["learning_rate"] for rank in ranks for r in steps_of(run, rank) for row in r["rows"]}
        for run, ranks in ((tmp_path / "runs/plain", [0]), (tmp_path / "runs/apart", [0, 1]))
    ]
    assert rates[0] == rates[1] and len(rates[0]) == 63


# ---- Merging adapters ------------------------------------------------------------------------------------------------


def adapter(rng: np.random.Generator, shapes: list[tuple[int, ...]], rank: int) -> dict[str, np.ndarray]:
    """Random factors of layers [in, out] and [experts, in, out], and one parameter that is no factor."""
    made: dict[str, Any] = {"norm.weight": rng.normal(size=5)}
    for i, (*experts, rows, columns) in enumerate(shapes):
        sizes = {"a": (rank, rows), "b": (columns, rank)} if experts else {"a": (rows, rank), "b": (rank, columns)}
        made |= {f"layers.{i}.lora_{side}": rng.normal(size=(*experts, *size)) for side, size in sizes.items()}
    return {name: array.astype(np.float32) for name, array in made.items()}


def dense(adapter: merging.Adapter, layer: str) -> np.ndarray:
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
    experts, sizes = st.sampled_from([(), (3,)]), st.integers(rank, 12)
    shapes = [(*draw(experts), draw(sizes), draw(sizes)) for _ in range(draw(st.integers(1, 2)))]
    pairs = draw(st.lists(st.integers(0, 1000), min_size=1, max_size=4))
    return [adapter(rng, shapes, rank) for _ in pairs], merging.example_weights(pairs)


@settings(max_examples=60)
@given(worlds())
def test_stack_is_the_weighted_mean_of_the_updates(world) -> None:
    adapters, weights = world
    merged = merging.stack(adapters, weights)
    for layer in merging.low_rank_layers(merged):
        exact = mean_of(adapters, weights, layer)
        # A factor's weight, and its product with it, are float32: two roundings of every term.
        terms = sum_of_sizes(adapters, weights, layer)
        assert (np.abs(dense(merged, layer) - exact) <= roundoff(3) * terms).all()
        a = merged[f"{layer}.lora_a"]
        of_a, of_b = (-2, -1) if a.ndim == 3 else (-1, -2)
        assert a.shape[of_a] == sum(one[f"{layer}.lora_b"].shape[of_b] for one in adapters)
        # The outputs, as a user sees them: x W + scale (x A) B.
        x = np.random.default_rng(0).normal(size=(3, exact.shape[-2]))
        assert (np.abs(x @ dense(merged, layer) - x @ exact) <= roundoff(3) * (np.abs(x) @ terms)).all()
    missed, exact_change = merging.distance(merged, adapters[0], adapters, weights)
    assert missed <= 1e-12 * max(exact_change, sum(float(np.square(a).sum()) for a in adapters[0].values()))


@settings(max_examples=60)
@given(worlds())
def test_svd_is_as_near_as_numpys_at_the_same_rank(world) -> None:
    adapters, weights = world
    merged = merging.svd(adapters, weights)
    for layer in merging.low_rank_layers(merged):
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
        merged = merging.svd(adapters, merging.example_weights([5] * len(adapters)))
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
    merged = merging.svd(ranks, np.array([0.5, 0.5]))
    a, b = (np.linalg.norm(merged[name] - start[name]) for name in ("layers.0.lora_a", "layers.0.lora_b"))
    assert a < 0.1 and b < 0.1 * np.linalg.norm(start["layers.0.lora_b"])


@settings(max_examples=60)
@given(worlds())
def test_distance_is_what_dense_matrices_say(world) -> None:
    adapters, weights = world
    start = {name: np.float32(0.5) * array for name, array in adapters[0].items()}
    merged = merging.average(adapters, weights)
    missed, exact = merging.distance(merged, start, adapters, weights)
    layers = merging.low_rank_layers(start)
    dense_exact = sum(np.square(mean_of(adapters, weights, la) - dense(start, la)).sum() for la in layers)
    dense_missed = sum(np.square(mean_of(adapters, weights, la) - dense(merged, la)).sum() for la in layers)
    plain = sum(w * one["norm.weight"].astype(np.float64) for w, one in zip(weights, adapters, strict=True))
    of_norm = np.square(plain - start["norm.weight"]).sum()
    assert exact == pytest.approx(dense_exact / SCALE**2 + of_norm, rel=1e-9, abs=1e-9)
    assert missed == pytest.approx(dense_missed / SCALE**2, rel=1e-6, abs=1e-9 * exact)
    np.testing.assert_allclose(merged["norm.weight"], plain, rtol=1e-6, atol=1e-6)


def test_outer_follows_nesterov() -> None:
    """Against the update written out, three rounds of it; without momentum and at rate 1 it is the plain mean."""
    rng = np.random.default_rng(6)
    start = {"w": rng.normal(size=(3, 4)).astype(np.float32)}
    changes = [{"w": rng.normal(size=(3, 4)).astype(np.float32)} for _ in range(3)]
    weights, momentum = start, {}
    expected, buffer = start["w"].astype(np.float64), 0.0
    for change in changes:
        weights, momentum = merging.outer(weights, change, momentum, 0.7, 0.9)
        gradient = -change["w"].astype(np.float64)
        buffer = 0.9 * buffer + gradient
        expected = expected - 0.7 * (gradient + 0.9 * buffer)
    np.testing.assert_allclose(weights["w"], expected, rtol=1e-5, atol=1e-6)
    plain, _ = merging.outer(start, changes[0], {}, 1.0, 0.0)
    np.testing.assert_allclose(plain["w"], start["w"] + changes[0]["w"], rtol=1e-6)


def test_fednova_counts_a_change_by_the_step() -> None:
    # Equal steps: the parts of the examples. Unequal: a rank's steps weigh by its examples, whatever their number.
    np.testing.assert_allclose(merging.normalised_weights([30, 10], [5, 5]), [0.75, 0.25])
    factors = merging.normalised_weights([10, 10], [8, 2])
    np.testing.assert_allclose(factors, [0.5 * 5 / 8, 0.5 * 5 / 2])
    # Every step moved by the same vector: the mean moves by the mean number of them.
    assert factors @ np.array([8.0, 2.0]) == pytest.approx(5.0)
    np.testing.assert_allclose(merging.normalised_weights([7, 0], [3, 0]), [1.0, 0.0])
    assert merging.normalised_weights([0, 0], [0, 0]).tolist() == [0, 0]
