"""Shares, cuts and strategies: against exhaustive search, against the costs of earlier plans, and by hand."""

import contextlib
import itertools
import json
from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lib.errors import UserError
from lib.model.partition import model_shape_of
from lib.plan import machine_choice as machines
from lib.plan import plan as plan_module
from lib.plan.calibration import BatchCurve, read_published
from lib.plan.facts import RankHost
from lib.plan.pipeline import Cut, Hop, Keeps, best_cut, cut_at, depths, operations, step_seconds
from lib.plan.plan import ClusterPlan, plan_cluster
from lib.plan.shares import distribute_work
from lib.plan.strategy import LEAST_MERGES, MERGE_COST, longest_round, steps_per_round
from lib.plan.time_and_cost import Pace, Work, memory_text, outlook, pace_of
from lib.report import console
from tests.planning import (
    KEY,
    LINK,
    LLAMA_8B,
    M3_ULTRA,
    M4_MAX,
    MEMORY,
    SHAPE,
    calibrated,
    cut_costs,
    planned,
    sections,
)

RATES = {1: 10.0, 8: 20.0}
GB = 10**9


def names(count: int) -> list[str]:
    return [f"host{i}" for i in range(count)]


# ---- Shares


def exhaustive_seconds(curves: Sequence[BatchCurve], pairs: int, sync_seconds: float) -> float:
    """The best step over every division of the pairs, in plain Python; a host alone needs no sync."""
    by_host = []
    for curve in curves:
        tau = [0.0, *(float(curve.seconds(np.array([size]))[0]) for size in range(1, curve.max_batch_size + 1))]
        times = [0.0]
        for n in range(1, pairs + 1):
            times.append(min(times[n - b] + tau[b] for b in range(1, min(n, len(tau) - 1) + 1)))
        by_host.append([time + curve.step_overhead_seconds for time in times])
    best = np.inf
    for shares in itertools.product(range(pairs + 1), repeat=len(curves) - 1):
        if sum(shares) <= pairs:
            divided = (*shares, pairs - sum(shares))
            is_alone = sum(share > 0 for share in divided) == 1
            seconds = [times[share] for times, share in zip(by_host, divided, strict=True) if share or not is_alone]
            best = min(best, max(seconds) + sync_seconds * (not is_alone))
    return float(best)


def test_shares_are_near_exhaustive_search() -> None:
    rng = np.random.default_rng(1)
    for _ in range(60):
        curves = []
        for _ in range(int(rng.integers(2, 4))):
            sizes = sorted({1, *(int(s) for s in rng.choice([2, 3, 4, 6, 8, 12], rng.integers(1, 4)))})
            speed, fixed = 10 ** rng.uniform(0, 2), rng.uniform(0, 8)
            limit = int(rng.uniform(1.3, 30) * GB) if rng.random() < 0.5 else None
            peaks = {size: int((0.2 + 0.8 * size) * GB) for size in sizes}
            curve = BatchCurve.from_rates({s: s * speed / (fixed + s) for s in sizes}, peaks, limit)
            curves.append(curve.model_copy(update={"step_overhead_seconds": float(rng.uniform(0, 0.1))}))
        pairs, sync = int(rng.integers(1, 25)), float(rng.uniform(0, 0.1))
        plan = plan_cluster(names(len(curves)), pairs, curves=curves, sync_seconds=sync)
        optimum = exhaustive_seconds(curves, pairs, sync)
        assert plan.predicted_step_seconds is not None
        assert optimum * (1 - 1e-9) <= plan.predicted_step_seconds <= optimum * 1.02, plan.shares


def test_published_machines() -> None:
    """776 : 278 examples/s: 96 + 32 of 128 beat the published split of 65.5 / 34.5, and one host alone."""
    hosts = ["m4-max", "m3-ultra"]
    plan = plan_cluster(hosts, 128, curves=[M4_MAX, M3_ULTRA])
    assert plan.shares == [96, 32] and plan.micro_batch_sizes[0] == (32, 32, 32)
    assert plan.efficiency is not None and 0.85 < plan.efficiency < 1
    split = plan_cluster(hosts, 128, curves=[M4_MAX, M3_ULTRA], shares=[84, 44])
    assert split.predicted_step_seconds is not None and plan.predicted_step_seconds is not None
    assert split.predicted_step_seconds > 1.1 * plan.predicted_step_seconds
    alone = plan_cluster(hosts, 8, curves=[M4_MAX, M3_ULTRA], sync_seconds=1.0)
    assert alone.shares == [8, 0] and alone.sync_seconds == 0 and "leave out m3-ultra" in alone.reason


def test_a_thousand_hosts() -> None:
    rng = np.random.default_rng(2)
    kinds = [BatchCurve.from_rates({1: rate, 8: 2 * rate}) for rate in rng.uniform(5, 50, 7)]
    curves = [kinds[int(kind)] for kind in rng.integers(0, 7, 1000)]
    plan = plan_cluster(names(1000), 64_000, curves=curves)
    assert sum(plan.shares) == 64_000 and plan.efficiency is not None and plan.efficiency > 0.95


def test_memory_limits_the_micro_batch_not_the_share() -> None:
    small = BatchCurve.from_rates({1: 10, 8: 20}, {1: GB, 8: 8 * GB}, 4 * GB)
    large = BatchCurve.from_rates({1: 10, 8: 20})
    plan = plan_cluster(names(2), 32, curves=[small, large])
    assert small.max_batch_size == 3 and max(plan.micro_batch_sizes[0]) == 3 and plan.shares[0] > 8
    fixed = plan_cluster(names(2), 32, curves=[small, large], micro_batch_sizes=[8, 8])
    assert set(fixed.micro_batch_sizes[0]) <= {8, fixed.shares[0] % 8}


def test_shares_without_curves() -> None:
    equal = plan_cluster(names(3), 10)
    assert equal.shares == [4, 3, 3] and equal.reason.startswith("equal shares")
    by_speed = plan_cluster(names(2), 16, speeds=[3.0, 1.0])
    assert by_speed.shares == [12, 4] and "matrix-product rates" in by_speed.reason
    given = plan_cluster(names(2), 16, shares=[10, 6], micro_batch_sizes=[4, 4])
    assert given.shares == [10, 6] and given.micro_batch_sizes == [(4, 4, 2), (4, 2)]
    assert given.halved([0]).micro_batch_sizes[0] == (2,) * 5 and given.halved([0]).shares == [10, 6]


LARGE = [BatchCurve.from_rates(RATES, {1: 9 * GB, 8: 10 * GB}, 9 * GB)] * 2


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"shares": [8]}, "plan.shares [8] has 1 numbers, but there are 2 ranks"),
        ({"micro_batch_sizes": [8]}, "plan.micro_batch_sizes [8] has 1 numbers"),
        ({"curves": LARGE}, "host host0: one pair needs 9.00 GB, but it has 9.00 GB less 10% headroom"),
    ],
)
def test_wrong_input_is_one_clear_line(options: dict[str, Any], text: str) -> None:
    with pytest.raises(UserError) as error:
        plan_cluster(names(2), 16, **options)
    assert text in str(error.value) and "\n" not in str(error.value)


def test_distribute_work() -> None:
    assert distribute_work(128, [0.655, 0.345]) == [84, 44] and distribute_work(10, [1, 1, 1]) == [4, 3, 3]
    assert distribute_work(7, [1] * 3) == [3, 2, 2]


# ---- Cuts


@given(st.integers(1, 6), st.integers(1, 12))
def test_a_stage_does_every_pass_once_and_keeps_no_more_than_it_may(in_flight: int, micro_batches: int) -> None:
    order = operations(in_flight, micro_batches)
    for is_forward in (True, False):
        assert [o.micro_batch for o in order if o.is_forward == is_forward] == list(range(micro_batches))
    kept = np.cumsum([1 if o.is_forward else -1 for o in order])
    assert kept.min() >= 0 and kept.max() <= in_flight


def test_the_schedule_by_hand() -> None:
    hops = (Hop(),)
    assert step_seconds([1, 1], [1, 1], hops, (2, 1), 4) == 10  # 4 x 2, and the bubble of 2
    assert step_seconds([1, 2], [1, 2], hops, (2, 1), 4) == 18
    assert step_seconds([1], [2], (), (1,), 3) == 9
    slow = (Hop(1.0, 0.5),)
    assert step_seconds([1, 1], [1, 1], slow, depths(2, 2), 8) < step_seconds([1, 1], [1, 1], slow, depths(2), 8)


def test_the_best_cut_is_near_all_cuts() -> None:
    rng = np.random.default_rng(3)
    for _ in range(20):
        stages, blocks = int(rng.integers(2, 4)), int(rng.integers(4, 10))
        forward = 10 ** rng.uniform(0, 1, stages)
        hop = Hop(float(rng.uniform(0, 0.5)), float(rng.uniform(0, 0.5)))
        room = rng.uniform(blocks / 2, 2 * blocks, stages)
        costs = cut_costs(forward, blocks, float(rng.uniform(0, 5)), room, hop, (1.0, 8))
        cuts = [c for c in itertools.product(range(1, blocks), repeat=stages) if sum(c) == blocks]
        fitting = [one.step_seconds for one in (cut_at(costs, cut) for cut in cuts) if one.fits]
        best = best_cut(costs)
        if best is None:
            assert not fitting
        else:
            assert best.fits and best.step_seconds <= 1.02 * min(fitting)


def test_a_stage_keeps_as_much_as_memory_allows() -> None:
    def cut(room: float) -> Cut:
        return cut_at(cut_costs(np.ones(2), 8, 0.0, np.array([room, 99.0]), Hop(), (1.0, 4)), [4, 4])

    assert cut(5.8).keeps[0] == Keeps.ACTIVATIONS and cut(5.5).keeps[0] == Keeps.BLOCK_INPUTS
    assert not cut(4.0).fits


# ---- Strategies


def host(name: str, limit_gb: float | None, first_pair_gb: float = 20, **more: Any) -> Any:
    """A calibrated host whose peak rises by 1 GB a pair."""
    peaks = {size: int((first_pair_gb + size - 1) * GB) for size in RATES}
    return calibrated(name, RATES, peaks=peaks, limit=limit_gb and int(limit_gb * GB), **more)


def test_auto_divides_a_model_that_one_host_cannot_hold() -> None:
    fits = planned([host("a", 128), host("b", 32)], shape=SHAPE)
    assert fits.strategy == "independent" and sum(fits.shares) == 32 and fits.calibrated
    assert "independent, as every host can hold the model" in fits.reason
    small = planned([host("a", 128), host("b", 18)], shape=SHAPE)
    assert small.strategy == "sharded" and small.division is not None and small.shares == [32]
    assert "host b: one pair needs 20.00 GB, but it has 18.00 GB less 10% headroom" in small.reason
    assert any(way.strategy.startswith("independent, synchronous: too large") for way in small.predictions)
    for hosts, words, remedy in (
        (["a", "b"], ["strategy=synchronous"], "try strategy=auto without plan.shares, which divides the model"),
        (["b"], ["model.method=full"], "a smaller data.max_length, model.method=lora, more machines"),
        (["b"], [], "try a smaller data.max_length, a quantised model, more machines"),
    ):
        with pytest.raises(UserError, match=f"host b: one pair needs 20.00 GB, .* headroom; .*{remedy}$"):
            planned([host(name, {"a": 128, "b": 18}[name]) for name in hosts], *words, shape=SHAPE)


def test_every_strategy_is_predicted_and_the_reason_given() -> None:
    fast = calibrated("fast", {1: 20.0, 8: 60.0}, links=[LINK])
    slow = calibrated("slow", {1: 10.0, 8: 20.0}, links=[LINK])
    plan = planned([fast, slow], shape=SHAPE, memory=MEMORY)
    kinds = [way.strategy.partition(",")[0] for way in plan.predictions]
    assert kinds == ["independent", "synchronous", "sharded", "pipelined", "synchronous", "fast alone", "slow alone"]
    chosen = plan.predictions[0]
    assert chosen.chosen and chosen.efficiency is not None and 0.9 < chosen.efficiency <= 1
    assert plan.shares == [24, 8] and plan.steps_per_round and plan.rounds and "of the time" in plan.rounds.reason
    synchronous = planned([fast, slow], "strategy=synchronous")
    assert synchronous.strategy == "synchronous" and "as strategy has it" in synchronous.reason
    assert "since plan.shares divides" in planned([fast, slow], "plan.shares=[16,16]").reason
    assert json.loads(json.dumps(plan.to_dict()))["shares"] == [24, 8]
    assert set(plan.rows()[0]) >= {"rank", "host", "share", "micro-batches", "planned GB"}


def test_hosts_without_a_curve() -> None:
    """By matrix products as measured, else equal shares."""
    known = calibrated("a", {1: 10.0, 4: 30.0})
    estimated = planned([RankHost("a", known, gflops=90.0), RankHost("b", gflops=30.0)], "train.global_batch_size=16")
    assert estimated.shares == [12, 4] and not estimated.calibrated
    assert "matrix-product rates" in estimated.reason
    rates = [RankHost("a", gflops=90.0), RankHost("b", gflops=30.0)]
    assert planned(rates, "train.global_batch_size=16").shares == [12, 4]
    assert planned([None, None]).shares == [16, 16]
    refusing = sections("plan.require_calibration=true")
    with pytest.raises(UserError, match="plan.require_calibration: no calibration of b"):
        plan_module.advised(refusing.plan, refusing.train, "auto", planned([known, None]))


def test_what_a_run_will_take() -> None:
    """Curves: 32 pairs in 1.6 s; matrix products: an H200's 8B at 512 + 512 tokens, which made 10.9 pairs/s."""
    known = planned([calibrated("a", {1: 10.0, 8: 20.0})])
    work = Work(steps=100, reference_rows=1000, held_out=160, evaluation_passes=2, answer_tokens=1500)
    pace = pace_of(known, "lora", "cpu", None, True)
    assert pace is not None and pace.basis == "curves"
    found = outlook(pace, work, "cpu")
    assert found["training"] == pytest.approx(160)
    assert found["reference"] == pytest.approx((1000 + 160) * 1.6 / 32 / 2)
    assert found["evaluation"] == pytest.approx(2 * 160 * 1.6 / 32 / 2 + 3 * 2.0)
    assert sum(found.values()) == pytest.approx(found["start"] + 160 + found["reference"] + found["evaluation"])
    assert pace_of(planned([None]), "lora", "cpu", None, True) is None
    pace = pace_of(known, "lora", "cpu", 2.0, True)
    assert pace is not None
    tried = outlook(pace, work, "cpu")
    assert tried["training"] == pytest.approx(200 * 2 / 3) and tried["reference"] == pytest.approx(1160 * 2 / 32 / 3)
    published = read_published()
    host = RankHost("a", None, "NVIDIA H200", "cuda", published["h200"].gflops, 140 * GB)
    plan = planned([host], memory=MEMORY, published=list(published.values()))
    assert plan.basis.step_seconds == pytest.approx(32 / 10.9, rel=0.25) and memory_text(plan).endswith("of 140 GB")
    small = replace(MEMORY, shape=replace(SHAPE, hidden_size=64, mlp_columns=64, vocabulary=100))
    least = planned([host], memory=small, published=list(published.values())).basis.step_seconds
    assert least == pytest.approx(4 * 0.004 * SHAPE.blocks, rel=1e-3), "of micro-batches of 8 rows"
    hosts = hosts_of([14, 14], [1e4, 1e4], "metal")
    assert memory_text(planned(hosts, shape=SHAPE, memory=MEMORY)).endswith("of 14 GB")


class FewRows(list[int]):
    """As much of a data set as the expected time looks at."""

    trained = np.full(8, 4), np.full((8, 2), 8), np.full((8, 2), 4)


@pytest.mark.parametrize(("reference", "passes"), [("initial", 1), ("other", 2)])
def test_the_expected_time_counts_every_pass_over_the_held_out_rows(reference: str, passes: int) -> None:
    """Two evaluations: another model's reference saves no pass of the policy."""
    config = sections(f"model.reference={reference}", "evaluate.samples=0")
    inputs: Any = SimpleNamespace(data=FewRows(range(8)), valid=FewRows(range(10)), questions=[], tokenizer=None)
    pace = Pace(step=1.0, row=1.0, held_out_row=1.0, answer_token=0.0, basis="curves")
    text = console.expected(config.model, config.train, config.evaluate, inputs, planned([None]), pace, 3)
    assert f"reference 18 s, evaluation {10 * passes} s" in text


def test_ranks_of_one_machine_share_its_speed_and_memory() -> None:
    both = host("box", 50)
    plan = planned([both, both])
    assert plan.ranks[0].solo_pairs_per_second == pytest.approx(8.077, rel=1e-3), "half of the speed, in 5 pairs"
    assert "2 ranks share box" in plan.warnings[0]
    assert plan.ranks[0].memory_bytes == 25 * GB


def test_gradient_checkpointing_comes_before_dividing() -> None:
    plain, again = host("b", 18).curves[0], host("b", 18, first_pair_gb=5).curves[0]
    key = KEY.model_copy(update={"gradient_checkpointing": True})
    both = host("b", 18).model_copy(update={"curves": (plain, again.model_copy(update={"key": key}))})
    first = host("a", 128)
    first = first.model_copy(update={"curves": (*first.curves, first.curves[0].model_copy(update={"key": key}))})
    plan = planned([first, both], shape=SHAPE)
    assert plan.gradient_checkpointing and plan.strategy == "independent"
    assert any("gradient checkpointing is turned on: host b" in warning for warning in plan.warnings)


@given(st.integers(1, 5000))
def test_a_run_has_at_least_eight_merges_or_one_a_step(steps: int) -> None:
    assert -(-steps // longest_round(steps)) >= min(LEAST_MERGES, steps)


@pytest.mark.parametrize(
    ("words", "size", "merges"),
    [([], 2, 20), (["plan.replan=false"], 4, 10), (["independent.pairs_per_round=96"], 3, 20)],
)
def test_rounds_of_rollouts_end_with_a_merge(words: list[str], size: int, merges: int) -> None:
    """Ten of four steps: a merge every three steps comes after three, and after one."""
    plan = planned([None, None], *words, "rollouts.rounds=10", "rollouts.steps=4", steps=40)
    assert plan.rounds is not None and (plan.rounds.steps_per_round, plan.rounds.merges) == (size, merges)


@given(st.integers(8, 5000), st.floats(1e-4, 10), st.floats(1e-3, 10))
def test_merges_cost_one_percent_and_come_as_often_as_that_allows(steps: int, merge: float, step: float) -> None:
    size = steps_per_round(steps, merge, step)
    part = merge / (merge + size * step)
    assert part <= MERGE_COST * (1 + 1e-6) or size == longest_round(steps)
    assert size == 1 or merge / (merge + (size - 1) * step) > MERGE_COST * (1 - 1e-6)


# ---- Sharded and pipelined


def hosts_of(memory_gb: Sequence[Any], gflops: Sequence[Any], device: Any, chip: str | None = None) -> list[RankHost]:
    return [
        RankHost(f"host{i}", None, chip, device, rate, size and int(size * GB))
        for i, (size, rate) in enumerate(zip(memory_gb, gflops, strict=True))
    ]


def sharded(memory_gb: list[float | None], gflops: list[float | None], *words: str, chip: str = "") -> ClusterPlan:
    hosts = hosts_of(memory_gb, gflops, "cuda" if chip else "cpu", chip or None)
    return planned(hosts, "strategy=sharded", *words, shape=SHAPE)


def test_a_model_is_divided_by_speed_as_far_as_memory_allows() -> None:
    given = sharded([8, 8], [1e3, 1e3], "plan.shares=[2,6]")
    assert [part.kv_heads for part in given.parts] == [2, 6] and "plan.shares" in given.reason
    assert any("host1: its part needs 12.57 GB" in warning for warning in given.warnings)
    by_speed = sharded([128, 128], [1e3, 3e3])
    assert [part.kv_heads for part in by_speed.parts] == [2, 6] and "matmul rates" in by_speed.reason
    limited = sharded([128, 10], [1e3, 3e3])
    assert limited.parts[1].held_bytes <= 0.9 * 10 * GB < by_speed.parts[1].held_bytes
    assert "as far as memory allows" in limited.reason
    by_memory = sharded([96, 32], [None, None])
    assert [part.kv_heads for part in by_memory.parts] == [6, 2] and "by memory" in by_memory.reason
    assert [part.kv_heads for part in sharded([128, 128], [1e3, 1.2e3], chip="NVIDIA H200").parts] == [4, 4]
    with pytest.raises(UserError, match=r"2 ranks need 18.16 GB together for weights and .* pair, but have 16.00 GB"):
        sharded([8, 8], [1.0, 1.0])


@settings(deadline=None)
@given(st.lists(st.tuples(st.floats(4, 16), st.floats(1e3, 1e4)), min_size=2, max_size=4))
def test_no_rank_gets_more_than_fits(hosts: list[tuple[float, float]]) -> None:
    with contextlib.suppress(UserError):  # where they do not hold it together
        plan = sharded([memory for memory, _ in hosts], [gflops for _, gflops in hosts])
        assert all(part.needed_bytes <= 0.9 * memory * GB for part, (memory, _) in zip(plan.parts, hosts, strict=True))


def pipelined(memory_gb: list[float], gflops: list[float], *words: str, **more: Any) -> ClusterPlan:
    return planned(hosts_of(memory_gb, gflops, "metal"), "strategy=pipelined", *words, **{"memory": MEMORY, **more})


def test_a_pipelined_plan() -> None:
    plan = pipelined([128, 128], [3e3, 1e3])
    assert plan.strategy == "pipelined" and sum(plan.blocks) == 32 and plan.blocks[0] > 2 * plan.blocks[1]
    assert plan.predicted_step_seconds and "matrix-product rates" in plan.reason
    equal = pipelined([128, 128], [1e3, 1e3])
    assert equal.blocks[0] > equal.blocks[1], "the head is work, too"
    assert sum(stage.held_bytes for stage in equal.stages) == pytest.approx(16.06e9, rel=0.05)
    small = pipelined([128, 8], [1e3, 3e3])
    assert (small.ranks[1].planned_bytes or 0) <= 0.9 * 8 * GB and small.blocks[1] < 12
    given = pipelined([128, 128], [1e3, 1e3], "plan.shares=[20,12]")
    assert given.blocks == (20, 12) and "as plan.shares has them" in given.reason
    for words, text in ((["plan.shares=[20,13]"], "sum to 33"), (["plan.shares=[32]"], "has 1 numbers")):
        with pytest.raises(UserError, match=text):
            pipelined([128, 128], [1e3, 1e3], *words)
    with pytest.raises(UserError, match=r"of 32 blocks the hosts hold \d+ .* add \d+\.\d+ GB of memory"):
        pipelined([9, 9], [1e3, 1e3])


def test_a_head_is_work_of_the_last_stage_by_curves_and_by_rates() -> None:
    """1B at 512 + 512 tokens on two H200s: 9 + 7 blocks made 1.78 times one's speed, 11 + 5 made 1.51."""
    sizes = {"hidden_size": 2048, "num_hidden_layers": 16, "num_attention_heads": 32, "intermediate_size": 8192}
    memory = replace(MEMORY, shape=model_shape_of({**LLAMA_8B, **sizes, "head_dim": 64, "tie_word_embeddings": True}))
    published = read_published()
    for curve in (None, calibrated("a", {1: 59.0, 8: 62.0})):
        hosts = [RankHost(name, curve, "NVIDIA H200", "cuda", published["h200"].gflops, 140 * GB) for name in "ab"]
        plan = planned(hosts, "strategy=pipelined", memory=memory, published=list(published.values()))
        assert plan.blocks in ((9, 7), (10, 6))


def test_auto_takes_the_faster_way_and_shows_both() -> None:
    plan = planned(hosts_of([14, 14], [1e4, 1e4], "metal"), shape=SHAPE, memory=MEMORY)
    assert plan.strategy == "pipelined" and "because host host0" in plan.reason
    assert [way.strategy.partition(",")[0] for way in plan.predictions[:2]] == ["pipelined", "sharded"]
    experts = {"model_type": "qwen3_moe", "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 1024}
    memory = replace(MEMORY, shape=model_shape_of({**LLAMA_8B, **experts}))
    assert sum(pipelined([14, 14], [1e4, 1e4], memory=memory).blocks) == 32


# ---- Warnings


def test_warnings_of_likely_mistakes() -> None:
    hosts = [calibrated("fast", {1: 20.0, 8: 60.0}), calibrated("slow", {1: 10.0, 8: 20.0})]

    def warned(*words: str, some: Any = hosts, **more: Any) -> str:
        settings = sections(*words)
        plan = planned(some, *words, **more)
        advised = plan_module.advised(settings.plan, settings.train, settings.strategy, plan)
        return " | ".join(advised.warnings)

    assert not warned()
    assert "equal shares of unequal hosts" in warned("plan.shares=[16,16]")
    assert "no calibration of a, b" in warned(some=[None, None])
    assert "learning_rate_scaling=sqrt" in warned("train.learning_rate_batch_size=8")
    assert "beyond what adamw can train with" in warned("train.learning_rate=0.1")
    needless = {"some": hosts_of([200, 200], [1e3, 1e3], "metal"), "shape": SHAPE, "memory": MEMORY}
    for strategy in ("sharded", "pipelined"):
        assert "replicas do not: strategy=auto" in warned(f"strategy={strategy}", **needless)
    assert "no host of this run is called m4" in warned("plan.memory_limit_gb={m4: 3}")


# ---- python -m lib.plan


def test_which_machine_for_which_model(tmp_path, capsys) -> None:
    """The seeds' four rows, by the planner's limits: three quarters of a Mac's memory, a tenth of it free."""
    hosts = ["--hosts", "m4-max,m3-ultra"]

    def machine(*words: str) -> str:
        assert machines.main([*words, *hosts]) == 0
        lines = capsys.readouterr().out.splitlines()
        assert len(lines) == 5 and "take: " in lines[-2]
        return str(json.loads(lines[-1])["machine"])

    wanted = {"8B": "m4-max", "30B": "m4-max", "70B-4bit": "m4-max", "70B": "m3-ultra", "120B": "m3-ultra"}
    wanted |= {"200B": "distributed", "1000B": "None", "70B-full": "None"}  # the last for what training holds
    assert {size: machine("--model", size) for size in wanted} == wanted
    (tmp_path / "config.json").write_text(json.dumps(LLAMA_8B))
    assert machine("--model", str(tmp_path)) == "m4-max"
    assert (
        machines.main(["--model", "200B", "--hosts", "m1"]) == 0 and "(14B-4bit) takes less" in capsys.readouterr().out
    )
    (tmp_path / "config.json").write_text("[]")
    wrong = [["nothing", "m1", "neither a folder"], [str(tmp_path), "m1", "JSON object"], ["8B", "x", "known are"]]
    for model, host, text in wrong:
        assert machines.main(["--model", model, "--hosts", host]) == 2 and text in capsys.readouterr().err


def test_a_warm_up_beyond_the_run_is_warned_of() -> None:
    train = sections("train.warmup_steps=5").train
    assert "never reaches" in (plan_module.long_warm_up(5, train) or "") and not plan_module.long_warm_up(6, train)
