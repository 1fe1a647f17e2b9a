"""Plans made again from measured times, identical on all ranks, kept through a resume. Times are invented."""

import json
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import pytest

from lib.config.settings import CostSettings
from lib.plan import replan
from lib.plan.calibration import BatchCurve
from lib.plan.plan import ClusterPlan, plan_cluster
from lib.plan.replan import Schedule
from lib.plan.time_and_cost import calculate_training_cost, hosts_cost
from tests.planning import calibrated, planned, sections

LEAD = 3
TOKENS = 200.0  # of a pair

Seconds = Callable[[int, int, Sequence[int]], float]  # (step, rank, its micro-batches) -> measured seconds


def simulated(
    schedule: Schedule, steps: int, seconds: Seconds, seed: int = 0, lengths: tuple[float, float] = (0.3, 3.0)
) -> tuple[list[tuple[int, ClusterPlan]], list[float]]:
    """Runs invented steps of changing lengths; returns (deciding step, new plan) and each step's time."""
    rng = np.random.default_rng(seed)
    decided, times = [], []
    for step in range(1, steps + 1):
        plan = schedule.at(step)
        long = rng.uniform(*lengths)
        tokens = [rank.share * TOKENS * long for rank in plan.ranks]
        compute = [long * seconds(step, rank.rank, rank.micro_batch_sizes) for rank in plan.ranks]
        times.append(max(compute) / long)
        new = schedule.observe(step, tokens, compute)
        if new is not None:
            decided.append((step, new))
    return decided, times


def constant(*pairs_per_second: float) -> Seconds:
    return lambda step, rank, sizes: sum(sizes) / pairs_per_second[rank]


def schedule_of(
    hosts: Sequence[str], *words: str, curves: Sequence[BatchCurve] | None = None, batch: int = 128
) -> Schedule:
    settings = sections(*words, f"train.global_batch_size={batch}").plan
    given = {"shares": settings.shares, "micro_batch_sizes": settings.micro_batch_sizes}
    first = plan_cluster(hosts, batch, curves=curves, **given)
    return Schedule(first, settings, LEAD, steps=100_000)


@pytest.mark.parametrize("speeds", [(4.0, 1.0), (10.0, 3.0, 1.0), (1.0, 1.9)])
def test_equal_shares_of_unequal_hosts_are_corrected(speeds: tuple[float, ...]) -> None:
    decided, times = simulated(schedule_of([f"host{i}" for i in range(len(speeds))]), 30, constant(*speeds))
    assert len(decided) == 1 and decided[0][0] <= 6
    assert times[-1] <= 1.05 * 128 / sum(speeds)


def test_a_throttled_rank_gets_a_new_plan_within_ten_steps_and_its_shares_back() -> None:
    curve = BatchCurve.from_rates({1: 10.0, 8: 20.0})
    schedule = schedule_of(["a", "b"], curves=[curve, curve])

    def hot(step: int, rank: int, sizes: Sequence[int]) -> float:
        slow = 2.0 if rank == 1 and 20 <= step < 60 else 1.0
        return slow * float(curve.seconds(np.array(sizes)).sum())

    decided, times = simulated(schedule, 120, hot)
    assert decided and 20 <= decided[0][0] <= 30 and decided[0][1].shares[0] > 80
    assert times[55] < 1.1 * 128 / 30 and abs(schedule.at(121).shares[0] - 64) <= 8
    assert all(plan.global_batch_size == sum(plan.shares) for _, plan in decided)


@pytest.mark.parametrize("seed", range(4))
def test_shares_do_not_follow_noise(seed: int) -> None:
    curve, noise = BatchCurve.from_rates({1: 10.0, 8: 20.0}), np.random.default_rng(seed)
    schedule = schedule_of(["a", "b"], curves=[curve, curve])

    def noisy(step: int, rank: int, sizes: Sequence[int]) -> float:
        return float(curve.seconds(np.array(sizes)).sum() * np.exp(noise.normal(0, 0.05)))

    assert len(simulated(schedule, 300, noisy)[0]) <= 2


@pytest.mark.parametrize("wrong", [0.25, 4.0])
def test_a_wrong_curve_is_corrected(wrong: float) -> None:
    right = BatchCurve.from_rates({1: 10.0, 8: 20.0})
    schedule = schedule_of(["a", "b"], curves=[right, right.slowed(wrong)])
    _, times = simulated(schedule, 40, lambda s, r, sizes: float(right.seconds(np.array(sizes)).sum()))
    assert times[-1] <= 1.1 * 128 / 40


def test_longer_rows_and_uniform_slowness_change_nothing() -> None:
    curve = BatchCurve.from_rates({1: 10.0, 8: 20.0})
    schedule = schedule_of(["a", "b"], curves=[curve, curve])
    decided, _ = simulated(schedule, 100, lambda s, r, sizes: 5 * float(curve.seconds(np.array(sizes)).sum()))
    assert not decided


@pytest.mark.parametrize("words", [("plan.replan=false",), ("plan.shares=[64,64]",)])
def test_what_was_fixed_stands(words: tuple[str, ...]) -> None:
    decided, _ = simulated(schedule_of(["a", "b"], *words), 60, constant(3.0, 1.0))
    assert not decided


def test_given_micro_batch_sizes_stay() -> None:
    decided, _ = simulated(schedule_of(["a", "b"], "plan.micro_batch_sizes=[4,2]"), 20, constant(3.0, 1.0))
    assert [max(sizes) for sizes in decided[0][1].micro_batch_sizes] == [4, 2]


def test_steps_that_cannot_be_compared_are_passed_over() -> None:
    schedule = schedule_of(["a", "b"])
    for step in range(2, 40):
        assert schedule.observe(step, [100.0, 0.0], [1.0, 0.0]) is None
        assert schedule.observe(step, [100.0, 100.0], [1.0, float("nan")]) is None


def test_a_change_that_does_not_pay_in_the_steps_that_are_left_is_not_made(monkeypatch) -> None:
    monkeypatch.setattr(replan, "LEAST_SECONDS", 1e7)
    assert not simulated(schedule_of(["a", "b"]), 40, constant(3.0, 1.0))[0]


def test_memory_halves_micro_batches_and_later_plans_keep_to_it() -> None:
    schedule = schedule_of(["a", "b"])
    plan = schedule.halve(5, [1])
    assert "rank 1 (b) ran out of memory in step 5: micro-batches of at most 4" in plan.reason
    assert schedule.most_at(1) == 4 and schedule.at(8).shares == [64, 64] and schedule.at(7).ranks[1].share == 64
    decided, _ = simulated(schedule, 60, constant(3.0, 1.0))
    assert decided and all(max(plan.micro_batch_sizes[1]) <= 4 for _, plan in decided)
    assert schedule.halve(70, [1], gradient_checkpointing=True).gradient_checkpointing


def test_a_resumed_run_goes_on_with_the_plans_in_force_and_to_come() -> None:
    schedule = schedule_of(["a", "b"])
    decided, _ = simulated(schedule, 10, constant(3.0, 1.0))
    schedule.halve(10, [0])
    state = json.loads(json.dumps(schedule.state(decided[0][0])))
    again = schedule_of(["a", "b"])
    assert again.restore(state)
    for step in range(decided[0][0] + 1, 20):
        assert again.at(step).micro_batch_sizes == schedule.at(step).micro_batch_sizes, step
    assert not schedule_of(["a", "c"]).restore(state)


def test_all_ranks_decide_the_same() -> None:
    schedules = [schedule_of(["a", "b", "c"]) for _ in range(2)]
    first, second = (simulated(one, 60, constant(5.0, 2.0, 1.0))[0] for one in schedules)
    assert [(s, p.decisions()) for s, p in first] == [(s, p.decisions()) for s, p in second]


def test_speeds_alone_are_those_of_the_calibration() -> None:
    plan = planned([calibrated("a", {1: 10.0, 8: 20.0}), calibrated("b", {1: 10.0, 8: 20.0})], "strategy=synchronous")
    schedule = Schedule(replace(plan, global_batch_size=32), sections().plan, LEAD, 1000)
    decided, _ = simulated(schedule, 20, constant(40.0, 10.0))
    new = decided[0][1]
    assert [rank.solo_pairs_per_second for rank in new.ranks] == [20.0, 20.0]
    assert f"{new.predicted_step_seconds:.4g} s in the new" in new.reason, "what is said is what plan.json has"


def test_electricity_and_rent_of_each_host_and_of_all() -> None:
    assert calculate_training_cost(10_000, 3.86, 2.0)["estimated_cost_usd"] == pytest.approx(1.43926, rel=1e-4)
    prices = CostSettings(watts={"a": 100, "b": 250}, price_per_kwh=0.3, rent_per_hour=1.5)
    cost = hosts_cost(["a", "b", "a"], 7200, prices)  # two ranks on a: it pays once
    assert cost is not None and [host["host"] for host in cost["hosts"]] == ["a", "b"]
    assert cost["energy_kwh"] == pytest.approx(0.7) and cost["cost"] == pytest.approx(6.21)
