"""The seeded order: every row exactly once an epoch, whatever the shares, and from (epoch, cursor) alone."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from lib.data.order import Position, advance, assign_micro_batches, epoch_order, global_batch, micro_batches, split

lengths_lists = st.lists(st.integers(1, 2000), min_size=1, max_size=200).map(np.array)
shares_lists = st.lists(st.integers(0, 9), min_size=1, max_size=6).filter(sum)


@given(lengths_lists, st.integers(0, 2**32), st.integers(0, 9), st.integers(1, 32), st.integers(1, 8))
def test_an_epoch_takes_every_row_once_and_sorts_each_batch(lengths, seed, epoch, batch_size, window):
    order = epoch_order(lengths, seed, epoch, batch_size, window)
    assert order.dtype == np.int64
    assert sorted(order) == list(range(len(lengths)))
    for start in range(0, len(order), batch_size):
        assert np.all(np.diff(lengths[order[start : start + batch_size]]) >= 0)
    assert np.array_equal(order, epoch_order(lengths, seed, epoch, batch_size, window))


def test_order_is_the_same_on_every_platform_and_numpy():
    order = epoch_order(np.array([5, 3, 8, 1, 9, 2, 7, 4, 6, 0]), seed=7, epoch=2, global_batch_size=3, window=2)
    assert order.tolist() == [0, 8, 4, 9, 6, 2, 3, 5, 1, 7]


def test_batches_hold_rows_of_similar_length_and_come_in_no_order_of_length():
    lengths = np.random.default_rng(0).integers(1, 1000, 16 * 256)
    order = epoch_order(lengths, seed=0, epoch=0, global_batch_size=16, window=32)
    batches = lengths[order].reshape(-1, 16)
    spread = (batches.max(axis=1) - batches.min(axis=1)).mean()
    assert spread < 60, spread  # 1000 / 32 windows' batches, twice; 880 without the window
    means = batches.mean(axis=1)
    assert abs(np.corrcoef(means, np.arange(len(means)))[0, 1]) < 0.2
    shuffled_only = lengths[epoch_order(lengths, 0, 0, 16, 1)].reshape(-1, 16)
    assert (shuffled_only.max(axis=1) - shuffled_only.min(axis=1)).mean() > 700


@given(st.integers(1, 300), shares_lists)
def test_split_gives_every_row_to_one_rank_in_proportion(count, shares):
    lengths = np.random.default_rng(count).integers(1, 500, 1000)
    rows = np.random.default_rng(count + 1).permutation(1000)[:count]
    parts = split(rows, lengths, shares)
    assert len(parts) == len(shares)
    assert sorted(np.concatenate(parts)) == sorted(rows)
    total = sum(shares)
    for part, share in zip(parts, shares, strict=True):
        assert abs(len(part) - count * share / total) < 1  # largest remainder stays within one of the quota
        assert np.all(np.diff(lengths[part]) >= 0)
        assert share or not len(part)
    assert [len(part) for part in split(np.arange(total), lengths, shares)] == shares


def test_split_follows_the_largest_remainders():
    lengths = np.ones(10, int)
    assert [len(part) for part in split(np.arange(3), lengths, [6, 2])] == [2, 1]  # 2.25, 0.75
    assert [len(part) for part in split(np.arange(1), lengths, [5, 2, 1])] == [1, 0, 0]
    assert [len(part) for part in split(np.arange(5), lengths, [5, 2, 1])] == [3, 1, 1]  # 3.125, 1.25, 0.625


def test_split_gives_every_rank_short_and_long_rows():
    lengths = np.arange(64) * 10
    means = [lengths[part].mean() for part in split(np.arange(64), lengths, [40, 16, 8])]
    assert max(means) - min(means) < 10, means


@given(st.integers(0, 50), st.integers(1, 20))
def test_micro_batches_keep_rows_and_order(count, size):
    rows = np.arange(count) * 3
    batches = micro_batches(rows, size)
    assert np.concatenate([*batches, np.array([], int)]).tolist() == rows.tolist()
    assert all(len(batch) == size for batch in batches[:-1]) and all(0 < len(batch) <= size for batch in batches)


sizes_of_a_rank = st.lists(st.integers(1, 9), max_size=5)
sizes_lists = st.lists(sizes_of_a_rank, min_size=1, max_size=5).filter(lambda sizes: sum(map(sum, sizes)))


def padded(lengths):
    return lambda batch: float(len(batch) * lengths[batch].max())


def ragged(lengths):
    return lambda batch: float(lengths[batch].sum())


costs_of_layouts = st.sampled_from([padded, ragged])


@given(sizes_lists, costs_of_layouts, st.data())
def test_assign_follows_the_plans_sizes_and_ends_with_the_rows(sizes, layout, data):
    count = data.draw(st.integers(1, sum(map(sum, sizes))))
    lengths = np.random.default_rng(count).integers(1, 500, 1000)
    rows = np.random.default_rng(count + 1).permutation(1000)[:count]
    parts, costs = assign_micro_batches(rows, lengths, sizes, layout(lengths))
    assert costs == [sum(map(layout(lengths), part)) for part in parts]
    assert sorted(np.concatenate([batch for part in parts for batch in part])) == sorted(rows)
    shares = [sum(of_rank) for of_rank in sizes]
    split_alike = [len(part) for part in split(rows, lengths, shares)]
    assert [sum(map(len, part)) for part in parts] == split_alike
    for part, of_rank in zip(parts, sizes, strict=True):
        if sum(map(len, part)) == sum(of_rank):
            assert sorted(map(len, part)) == sorted(of_rank)
        assert len(part) <= len(of_rank) and all(0 < len(batch) <= max(of_rank) for batch in part)


@given(st.integers(0, 10_000), st.sampled_from([[16, 16], [24, 8], [48, 16], [40, 16, 8], [16] * 4]))
def test_assign_balances_tokens_and_pads_less_than_rows_dealt_one_by_one(seed, shares):
    """Ragged lengths in no order, the worst case: by the slowest rank's tokens for its share."""
    lengths = np.clip(np.random.default_rng(seed).lognormal(5.5, 0.7, sum(shares)), 16, 2048).astype(int)
    sizes = [[8] * (share // 8) for share in shares]
    rows = np.arange(len(lengths))
    interleaved = [micro_batches(part, 8) for part in split(rows, lengths, shares)]
    for layout in (padded, ragged):
        cost = layout(lengths)
        slowest = (np.array(assign_micro_batches(rows, lengths, sizes, cost)[1]) / shares).max()
        assert slowest <= max(sum(map(cost, part)) / n for part, n in zip(interleaved, shares, strict=True))
    assert slowest <= 1.01 * lengths.mean()


worlds_lists, stops_lists = st.lists(shares_lists, min_size=1, max_size=4), st.lists(st.integers(0, 40), max_size=3)


@given(st.integers(1, 120), worlds_lists, stops_lists, st.integers(1, 16))
def test_every_example_once_an_epoch_through_resumes_on_other_worlds(count, worlds, stops, batch_size):
    """Training stops after some steps and goes on elsewhere with other shares, from the position alone."""
    lengths = np.random.default_rng(count).integers(1, 500, count)
    trained: dict[int, list[int]] = {}
    position, step, world = Position(), 0, 0
    while position.epoch < 2:
        if step in stops:
            world = (world + 1) % len(worlds)
            position = Position(position.epoch, position.cursor)
        order = epoch_order(lengths, 3, position.epoch, batch_size, 4)
        rows = global_batch(order, position, batch_size)
        for part in split(rows, lengths, worlds[world]):
            for batch in micro_batches(part, 3):
                trained.setdefault(position.epoch, []).extend(batch.tolist())
        position = advance(position, len(rows), count)
        assert position.cursor % batch_size == 0
        step += 1
    assert position == Position(2, 0)
    assert all(sorted(rows) == list(range(count)) for rows in trained.values())
    assert step == 2 * -(-count // batch_size)
