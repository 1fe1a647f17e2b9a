"""The planner against exhaustive search written in plain loops, and what it must never do."""

import itertools
import json
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks import simulate
from lib.config.load import load
from lib.config.schema import Config
from lib.errors import UserError
from lib.model.partition import model_shape_of
from lib.plan.calibration import MEMORY_HEADROOM, BatchCurve, read_published
from lib.plan.cluster_plan import ClusterPlan
from lib.plan.divide_work import make_plan, plan_cluster, plan_sharded
from lib.plan.run_facts import RankHost
from lib.plan.shares import best_shares, distribute_work, equal_shares, fastest_micro_batches, within_memory
from tests.tiny import ROOT

M4_MAX, M3_ULTRA = (read_published()[name].curves[0] for name in ("m4-max", "m3-ultra"))


def config(global_batch_size: int, **plan: object) -> Config:
    return Config.model_validate(
        {
            "model": {"path": "m"},
            "data": {"train": "d"},
            "train": {"global_batch_size": global_batch_size},
            "plan": plan,
        }
    )


def names(count: int) -> list[str]:
    return [f"host{i}" for i in range(count)]


# ------------------------------------------------------------------------------------------------------------
# Exhaustive search, in plain Python


def plain_tau(curve: BatchCurve) -> list[float]:
    """tau(0), tau(1), ... up to the largest size within memory."""
    points = [(p.batch_size, p.seconds_median, p.peak_memory_bytes) for p in curve.points]
    tau = [0.0]
    for size in range(1, points[-1][0] + 1):
        below = max((p for p in points if p[0] <= size), default=points[0], key=lambda p: p[0])
        above = min((p for p in points if p[0] >= size), key=lambda p: p[0])
        along = (size - below[0]) / (above[0] - below[0]) if above[0] > below[0] and size > below[0] else 0.0
        if curve.memory_limit_bytes:
            peak = below[2] + along * (above[2] - below[2])
            if peak > (1 - MEMORY_HEADROOM) * curve.memory_limit_bytes:
                break
        tau.append(below[1] + along * (above[1] - below[1]))
    return tau


def plain_times(curve: BatchCurve, pairs: int) -> list[float]:
    tau = plain_tau(curve)
    times = [0.0]
    for n in range(1, pairs + 1):
        times.append(min(times[n - b] + tau[b] for b in range(1, min(n, len(tau) - 1) + 1)))
    return times


def exhaustive_seconds(curves: Sequence[BatchCurve], pairs: int, sync_seconds: float) -> float:
    """The best step over every division of the pairs; a host alone needs no sync."""
    tables = [np.array(plain_times(curve, pairs)) for curve in curves]
    grids = np.meshgrid(*[np.arange(pairs + 1)] * (len(curves) - 1), indexing="ij")
    divided = np.stack([grid.ravel() for grid in grids])
    divided = divided[:, divided.sum(axis=0) <= pairs]
    divided = np.vstack([divided, pairs - divided.sum(axis=0)])
    compute = np.max([table[share] for table, share in zip(tables, divided, strict=True)], axis=0)
    return float(np.min(compute + sync_seconds * ((divided > 0).sum(axis=0) > 1)))


def random_curve(rng: np.random.Generator, kind: str) -> BatchCurve:
    sizes = sorted({1, *(int(s) for s in rng.choice([2, 3, 4, 6, 8, 12, 16, 24, 32], rng.integers(1, 7)))})
    speed = 10 ** rng.uniform(0, 2)
    if kind == "launch cost":  # tau = a + b n
        fixed = rng.uniform(0, 8)
        times = {s: (fixed + s) / speed for s in sizes}
    elif kind == "peak":  # the rate rises, then falls
        best = rng.choice(sizes)
        times = {s: s / speed / (1 + min(s, best) / best - rng.uniform(0.0, 0.3) * (s > best)) for s in sizes}
    else:  # noise: more pairs may take less time
        times = {s: float(s / speed * rng.uniform(0.3, 2)) for s in sizes}
    limit = int(rng.uniform(1.3, 30) * 1e9) if rng.random() < 0.5 else None
    peaks = {s: int((0.2 + 0.8 * s) * 1e9) for s in sizes}
    rates = {s: s / seconds for s, seconds in times.items()}
    return BatchCurve.from_rates(rates, peaks if limit else None, limit)


@pytest.mark.parametrize("kind", ["launch cost", "peak", "noise"])
@pytest.mark.long("noise", "peak")
def test_near_exhaustive_search_and_never_worse_than_one_host(kind: str) -> None:
    """1,000 instances of 2 to 4 hosts over the three kinds of curve."""
    rng = np.random.default_rng([1, len(kind)])
    largest_batch = {2: 64, 3: 28, 4: 16}
    for instance in range(334):
        world_size = int(rng.integers(2, 5))
        curves = [random_curve(rng, kind) for _ in range(world_size)]
        if rng.random() < 0.3:
            curves[1] = curves[0]
        pairs = int(rng.integers(1, largest_batch[world_size] + 1))
        alone = [plain_times(curve, pairs)[-1] for curve in curves]
        sync_seconds = float(rng.choice([0.0, rng.uniform(0, min(alone))]))
        plan = plan_cluster(names(world_size), pairs, curves=curves, sync_seconds=sync_seconds)

        where = f"{kind} {instance}: {plan.shares}"
        assert plan.predicted_step_seconds is not None and plan.efficiency is not None
        assert sum(plan.shares) == pairs, where
        optimum = exhaustive_seconds(curves, pairs, sync_seconds)
        assert optimum * (1 - 1e-9) <= plan.predicted_step_seconds <= optimum * 1.02, where
        assert plan.predicted_step_seconds <= min(alone) * (1 + 1e-9), where
        assert 0 < plan.efficiency <= 1 + 1e-9, where
        for rank, curve in zip(plan.ranks, curves, strict=True):
            tau = plain_tau(curve)
            assert sum(rank.micro_batch_sizes) == rank.share, where
            assert all(0 < size < len(tau) for size in rank.micro_batch_sizes), f"{where}: over memory"
            expected = sum(tau[size] for size in rank.micro_batch_sizes)
            assert rank.predicted_compute_seconds == pytest.approx(expected, rel=1e-9), where
        if (
            kind != "noise"
            and curves[1] is curves[0]
            and plan.sync_seconds == sync_seconds
            and not any(rank.share == pairs for rank in plan.ranks)
        ):
            assert abs(plan.shares[0] - plan.shares[1]) <= 1, where


# ------------------------------------------------------------------------------------------------------------
# Worked examples


def test_published_machines() -> None:
    """The published curves: 96/32 reaches 0.91, the published 65.5/34.5 only 0.72, and 50/50 0.51."""

    def plan(shares: Sequence[int] | None = None) -> ClusterPlan:
        return plan_cluster(["m4-max", "m3-ultra"], 128, shares=shares, curves=[M4_MAX, M3_ULTRA], sync_seconds=0.01)

    best = plan()
    assert best.shares == [96, 32]
    assert [rank.micro_batch_sizes for rank in best.ranks] == [(32,) * 3, (4,) * 8]
    assert best.efficiency == pytest.approx(0.908, abs=1e-3)
    assert plan((84, 44)).efficiency == pytest.approx(0.7217, abs=1e-3)
    assert plan((64, 64)).efficiency == pytest.approx(0.5056, abs=1e-3)
    speed = plan((84, 44)).predicted_pairs_per_second
    assert speed is not None and speed < 776  # slower than the M4 Max alone


def test_simulation_of_the_published_machines(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The benchmark's last line, for the planner's shares and for given ones; and its picture."""
    words = ["--hosts", "published:m4-max,published:m3-ultra", "--global-batch", "128", "--sync-seconds", "0.01"]
    words += ["--output", str(tmp_path / "s.png")]
    command = [sys.executable, str(ROOT / "benchmarks/simulate.py"), *words]

    def result(*more: str) -> dict[str, Any]:
        simulate.main([*words, *more])
        last: dict[str, Any] = json.loads(capsys.readouterr().out.splitlines()[-1])
        return last

    done = subprocess.run(command, capture_output=True, text=True, check=True)
    planned, given = json.loads(done.stdout.splitlines()[-1]), result("--shares", "84,44")
    assert planned["shares"] == [96, 32] and planned["efficiency"] >= 0.9
    assert given["shares"] == [84, 44] and given["efficiency"] == pytest.approx(0.72, abs=0.005)
    assert result() == planned
    assert (tmp_path / "s.png").read_bytes().startswith(b"\x89PNG")
    wrong = subprocess.run([*command, "--shares", "84,4"], capture_output=True, text=True, check=False)
    assert wrong.returncode == 2 and wrong.stderr.startswith("error: ") and wrong.stderr.count("\n") == 1


def test_slow_link_leaves_a_host_out() -> None:
    plan = plan_cluster(["m4-max", "m3-ultra"], 128, curves=[M4_MAX, M3_ULTRA], sync_seconds=0.1)
    assert plan.shares == [128, 0] and plan.left_out == ["m3-ultra"] and plan.sync_seconds == 0
    assert plan.reason.startswith("leave out m3-ultra (rank 1): m4-max alone takes ") and "no work" in plan.warnings[0]
    assert plan.predicted_step_seconds == pytest.approx(128 / 776, rel=1e-6)


def test_hosts_that_help_nobody_are_left_out_and_many_are_not_all_named() -> None:
    """Eight pairs take as long as one: with whoever joins, a step is no shorter."""
    flat = BatchCurve.from_rates({1: 1.0, 8: 8.0})
    plan = plan_cluster(names(12), 8, curves=[flat] * 12)
    assert plan.shares == [8] + [0] * 11 and plan.predicted_step_seconds == 1.0
    assert plan.reason.startswith("leave out host1 (rank 1), host2") and "host8 (rank 8) and 3 more:" in plan.reason


@pytest.mark.parametrize("world_size", [2, 3, 8, 100])
@pytest.mark.parametrize("pairs", [1600, 1601])
def test_equal_hosts_get_equal_shares(world_size: int, pairs: int) -> None:
    shares = plan_cluster(names(world_size), pairs, curves=[M3_ULTRA] * world_size).shares
    assert max(shares) - min(shares) <= 1
    if pairs % world_size == 0:
        assert len(set(shares)) == 1


def test_equal_hosts_share_what_none_does_slower() -> None:
    """Any micro-batch up to 8 pairs takes the same time here, so only the tie-break decides."""
    flat = BatchCurve.from_rates({8: 8.0, 16: 15.0})
    assert plan_cluster(names(3), 12, curves=[flat] * 3).shares == [4, 4, 4]


def test_few_fast_hosts_among_many_lumpy_ones() -> None:
    """The two fast ones do all before any of the thousand ends a batch, far beyond a share by speed."""
    fast, lumpy = BatchCurve.from_rates({1: 1000.0, 2: 1000.0}), BatchCurve.from_rates({100: 10.0, 101: 10.0})
    shares = plan_cluster(names(1002), 5000, curves=[fast, fast] + [lumpy] * 1000).shares
    assert shares[:2] == [2500, 2500]


def test_the_same_input_gives_the_same_plan() -> None:
    rng = np.random.default_rng(3)
    curves = [random_curve(rng, "peak") for _ in range(6)]
    first, second = (plan_cluster(names(6), 200, curves=curves, sync_seconds=0.01) for _ in range(2))
    assert first == second


def test_a_thousand_noisy_hosts() -> None:
    rng = np.random.default_rng(0)
    curves = [random_curve(rng, "noise") for _ in range(1000)]
    started = time.process_time()
    plan = plan_cluster(names(1000), 16_384, curves=curves)
    assert time.process_time() - started < 2
    assert plan.efficiency is not None and plan.efficiency > 0.9


@pytest.mark.parametrize("kinds", [3, 1000])
def test_a_thousand_hosts_in_two_seconds(kinds: int) -> None:
    rng = np.random.default_rng(0)
    sizes = [1, 2, 4, 8, 16, 32, 64]
    different = [
        BatchCurve.from_rates({s: float(rate * s / (s + knee)) for s in sizes})
        for rate, knee in zip(rng.uniform(20, 200, kinds), rng.uniform(1, 10, kinds), strict=True)
    ]
    curves = [different[i % kinds] for i in range(1000)]
    started = time.process_time()
    plan = plan_cluster(names(1000), 16_384, curves=curves, sync_seconds=0.02)
    assert time.process_time() - started < 2
    assert sum(plan.shares) == 16_384
    equal = plan_cluster(names(1000), 16_384, shares=equal_shares(16_384, 1000), curves=curves, sync_seconds=0.02)
    assert plan.predicted_step_seconds is not None and equal.predicted_step_seconds is not None
    assert plan.predicted_step_seconds < 0.6 * equal.predicted_step_seconds


def test_one_curve_that_dips() -> None:
    """7 pairs take longer than 8: no time limit admits a range of shares, only 0..6 and 8."""
    dips = BatchCurve.from_rates({1: 1.0, 6: 6.0, 7: 0.7, 8: 8.0})
    plan = plan_cluster(["a", "b"], 14, curves=[dips, dips])
    optimum = exhaustive_seconds([dips, dips], 14, 0.0)
    assert plan.predicted_step_seconds == pytest.approx(optimum, rel=0.01)


def test_memory_limits_the_micro_batch_not_the_share() -> None:
    rates = {1: 1.0, 2: 1.8, 4: 3.0, 8: 4.0}
    peaks = {1: 2 * 10**9, 2: 3 * 10**9, 4: 5 * 10**9, 8: 9 * 10**9}
    curve = BatchCurve.from_rates(rates, peaks, 6 * 10**9)  # less 10 % headroom: 5.4 GB, 4 pairs
    assert curve.max_batch_size == 4
    assert fastest_micro_batches(curve, 10) == (4, 4, 2)


def test_a_fixed_micro_batch_size_is_kept() -> None:
    plan = plan_cluster(["m4-max", "m3-ultra"], 128, micro_batch_sizes=[16, 8], curves=[M4_MAX, M3_ULTRA])
    assert all(set(rank.micro_batch_sizes[:-1]) == {size} for rank, size in zip(plan.ranks, (16, 8), strict=True))
    exhaustive = min(
        max(
            sum(c.seconds(np.array([size] * (n // size) + [n % size] * (n % size > 0))).sum() for _ in [0])
            for c, size, n in ((M4_MAX, 16, share), (M3_ULTRA, 8, 128 - share))
        )
        for share in range(129)
    )
    assert plan.predicted_step_seconds == pytest.approx(exhaustive, rel=0.011)
    too_large = plan_cluster(["m4-max"], 128, micro_batch_sizes=[128], curves=[M4_MAX])
    assert "at most 64 are known to fit" in too_large.warnings[0]


def test_every_division_of_a_small_batch_is_considered() -> None:
    """best_shares alone, against itertools, where every share is a corner case."""
    curves = [BatchCurve.from_rates({1: r, 2: 1.5 * r}) for r in (1.0, 1.7, 4.0)]
    tables = [plain_times(curve, 5) for curve in curves]
    for pairs in range(1, 6):
        shares, _ = best_shares(names(3), curves, pairs)
        best = min(
            max(t[n] for t, n in zip(tables, ns, strict=True))
            for ns in itertools.product(range(pairs + 1), repeat=3)
            if sum(ns) == pairs
        )
        assert max(t[n] for t, n in zip(tables, shares, strict=True)) <= best * 1.01


# ------------------------------------------------------------------------------------------------------------
# As told, or equally


def test_equal_by_default_and_said_aloud() -> None:
    plan = make_plan(config(18), names(4))
    assert plan.shares == [5, 5, 4, 4] and "equal shares: no calibration" in plan.reason
    assert plan.predicted_step_seconds is None and plan.efficiency is None
    assert [rank.micro_batch_sizes for rank in make_plan(config(20), ["a"]).ranks] == [(8, 8, 4)]


def test_shares_and_micro_batches_as_told() -> None:
    plan = make_plan(config(16, shares=[11, 5], micro_batch_sizes=[4, 2]), names(2))
    assert plan.shares == [11, 5]
    assert [rank.micro_batch_sizes for rank in plan.ranks] == [(4, 4, 3), (2, 2, 1)]
    assert [row["micro-batches"] for row in plan.rows()] == ["2 x 4, 3", "2 x 2, 1"]
    assert plan.to_dict()["shares"] == [11, 5]


def test_a_rank_without_work_is_said() -> None:
    assert "no work" in make_plan(config(2), names(3)).warnings[0]
    assert "host1" in make_plan(config(4, shares=[4, 0]), names(2)).warnings[0]


def test_one_host_without_a_curve_makes_all_equal() -> None:
    plan = make_plan(config(16), ["m4-max", "new"], [M4_MAX, None])
    assert plan.shares == [8, 8] and "no calibration of new" in plan.reason and "make calibrate" in plan.reason


@pytest.mark.parametrize(
    ("call", "parts"),
    [
        (lambda: make_plan(config(8, shares=[6, 2]), names(3)), ["[6, 2]", "2 numbers", "3 ranks"]),
        (lambda: plan_cluster(names(2), 8, shares=[6, 3]), ["sum to 9", "is 8", "make them equal"]),
        (lambda: plan_cluster(names(2), 8, shares=[9, -1]), ["-1 pairs", "least is 0"]),
        (lambda: make_plan(config(8, micro_batch_sizes=[4]), names(2)), ["1 numbers", "2 ranks"]),
        (lambda: plan_cluster(names(1), 8, micro_batch_sizes=[0]), ["0 pairs", "least is 1"]),
        (
            lambda: plan_cluster(
                ["mini"],
                8,
                curves=[BatchCurve.from_rates({1: 1, 2: 2}, {1: 12 * 10**9, 2: 20 * 10**9}, 8 * 10**9)],
            ),
            ["host mini", "one pair needs 12.00 GB", "8.00 GB", "gradient_checkpointing"],
        ),
        (
            lambda: plan_cluster(
                ["mini"], 8, curves=[BatchCurve.from_rates({2: 1, 4: 2}, {2: 12 * 10**9, 4: 20 * 10**9}, 8 * 10**9)]
            ),
            ["host mini: 2 pairs need 12.00 GB"],
        ),
    ],
)
def test_wrong_input_is_one_clear_line(call: object, parts: list[str]) -> None:
    assert callable(call)
    with pytest.raises(UserError) as raised:
        call()
    message = str(raised.value)
    assert "\n" not in message
    for part in parts:
        assert part in message, message


def test_distribute_work() -> None:
    assert distribute_work(10_000, [0.655, 0.345]) == [6550, 3450]  # the published split
    assert distribute_work(128, [776, 278]) == [94, 34]
    rng = np.random.default_rng(0)
    for _ in range(200):
        ratios = rng.uniform(0, 1, rng.integers(1, 9))
        total = int(rng.integers(0, 1000))
        shares = distribute_work(total, list(ratios))
        assert sum(shares) == total
        assert np.all(np.abs(np.array(shares) - total * ratios / ratios.sum()) < 1)


def test_what_a_step_costs_once_is_weighed_against_pairs() -> None:
    """The update takes each rank its own time, whatever its share: by every division of the pairs."""
    rng = np.random.default_rng(5)
    for _ in range(60):
        curves = [
            random_curve(rng, "launch cost").model_copy(update={"step_overhead_seconds": float(rng.uniform(0, 2))})
            for _ in range(2)
        ]
        pairs = int(rng.integers(1, 40))
        tables = [np.array(plain_times(curve, pairs)) + curve.step_overhead_seconds for curve in curves]
        shared = min(max(tables[0][n], tables[1][pairs - n]) for n in range(1, pairs)) if pairs > 1 else np.inf
        optimum = min(shared, tables[0][pairs], tables[1][pairs])
        plan = plan_cluster(names(2), pairs, curves=curves)
        assert plan.predicted_step_seconds is not None
        assert optimum * (1 - 1e-9) <= plan.predicted_step_seconds <= optimum * 1.02, plan.shares


# ---- A model divided ---------------------------------------------------------------------------------------------------

LLAMA_8B = {
    "model_type": "llama",
    "hidden_size": 4096,
    "num_hidden_layers": 32,
    "intermediate_size": 14336,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
}


def sharded(
    memory_gb: list[float | None], gflops: list[float | None], *words: str, chips: Sequence[str] = ()
) -> ClusterPlan:
    settings = load(None, ["model.path=-", "data.train=-", "strategy=sharded", *words])
    hosts = [
        RankHost(
            f"host{rank}",
            gflops=rate,
            memory_bytes=None if size is None else int(size * 1e9),
            device_name=chips[rank] if chips else None,
            device="cuda" if chips else "cpu",
        )
        for rank, (size, rate) in enumerate(zip(memory_gb, gflops, strict=True))
    ]
    return plan_sharded(settings, hosts, model_shape_of(LLAMA_8B))


def test_a_model_is_divided_by_speed_as_far_as_memory_allows() -> None:
    told = sharded([8, 8], [1e3, 1e3], "plan.shares=[2,6]")
    assert [part.kv_heads for part in told.parts] == [2, 6] and "plan.shares" in told.reason
    assert "host1: its part needs 12.57 GB" in told.warnings[0]  # told, not overruled
    by_speed = sharded([128, 128], [1e3, 3e3])
    assert [part.kv_heads for part in by_speed.parts] == [2, 6] and "matmul rates" in by_speed.reason
    # The slower host takes what the faster has no room for.
    limited = sharded([128, 10], [1e3, 3e3])
    assert limited.parts[1].needed_bytes <= 0.9 * 10e9 < by_speed.parts[1].needed_bytes
    assert "as far as memory allows" in limited.reason
    assert sum(part.divided_bytes for part in limited.parts) == sum(part.divided_bytes for part in by_speed.parts)
    by_memory = sharded([96, 32], [1e3, None])
    assert [part.kv_heads for part in by_memory.parts] == [6, 2] and "by memory" in by_memory.reason
    assert [part.kv_heads for part in sharded([None, 32], [None, 1.0]).parts] == [4, 4]
    for plan in (told, limited):
        assert plan.shares == [16] and plan.micro_batch_sizes == [(8, 8)]  # every rank runs every batch
        assert json.loads(json.dumps(plan.to_dict()))["division"]["kv_heads"] == [p.kv_heads for p in plan.parts]
        assert len({frozenset(row) for row in plan.rows()}) == 1


def test_parts_are_equal_where_rates_differ_by_noise() -> None:
    """Equal parts can be compiled, which on GPUs is worth more than a few percent of a clock."""

    def columns(*args: Any, **options: Any) -> list[int]:
        plan = sharded([128, 128], *args, **options)
        assert plan.division is not None
        return list(plan.division.mlp_columns)

    assert columns([1e3, 1.04e3]) == [7168, 7168]
    assert columns([1e3, 1.2e3])[0] < 7168 < columns([1e3, 1.2e3])[1]
    assert columns([1e3, 1.2e3], chips=["NVIDIA H200"] * 2) == [7168, 7168]
    assert columns([1e3, 1.2e3], chips=["NVIDIA H200", "NVIDIA H100"])[0] < 7168
    assert columns([1e3, 1.5e3], chips=["NVIDIA H200"] * 2)[0] < 7168  # throttled, or another works there


def test_a_model_larger_than_all_hosts_is_refused() -> None:
    with pytest.raises(UserError, match=r"2 ranks need 18.16 GB together for weights, but have 16.00 GB"):
        sharded([8, 8], [1.0, 1.0])
    with pytest.raises(UserError, match="weights, gradients and optimizer"):
        sharded([40, 40], [1.0, 1.0], "model.method=full")
    with pytest.raises(UserError, match="has 3 numbers, but there are 2 ranks"):
        sharded([40, 40], [1.0, 1.0], "plan.shares=[1,1,2]")


@given(st.lists(st.tuples(st.floats(0.1, 10), st.floats(0, 2)), min_size=1, max_size=8))
def test_nobody_gets_more_than_fits(hosts: list[tuple[float, float]]) -> None:
    weights, room = [weight for weight, _ in hosts], [space for _, space in hosts]
    limited = within_memory(weights, room)
    if sum(room) < 1:
        assert limited is None
        return
    assert limited is not None
    shares = np.array(limited) / sum(limited)
    assert (shares <= np.array(room) * (1 + 1e-9) + 1e-12).all()
    free = shares < np.array(room) * (1 - 1e-6)  # those with room to spare keep their proportions, and have the most
    ratio = shares / np.array(weights)
    if free.any():
        assert ratio[free] == pytest.approx(ratio.max(), rel=1e-6)
