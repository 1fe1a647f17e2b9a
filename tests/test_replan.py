"""Plans made again from measured times, alike on all ranks, kept through a resume. Times are invented."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lib.config import load as settings
from lib.config.schema import Config, CostSettings
from lib.errors import UserError
from lib.plan.calibration import BatchCurve, CurveKey, HostCalibration, Link
from lib.plan.calibration_checks import sound_curve
from lib.plan.cluster_plan import ClusterPlan
from lib.plan.cost import calculate_training_cost, hosts_cost
from lib.plan.divide_work import make_plan, plan_cluster
from lib.plan.replan import Schedule
from lib.plan.run_facts import RankHost, RunFacts
from lib.plan.run_plan import plan_run
from lib.plan.share_correction import FIRST_LOOK
from lib.plan.shares import solo_pairs_per_second
from lib.system.hardware import Machine
from tests import rounding, tiny

KEY = CurveKey(model="m", method="lora", dtype="float32", sequence_length=128)
LEAD = 3
# A pair's tokens; rows differ by step, alike for all ranks.
TOKENS = 200.0

Seconds = Callable[[int, int, Sequence[int]], float]  # (step, rank, its micro-batches) -> measured seconds


def configured(batch: int, *words: str) -> Config:
    return settings.load(None, ["model.path=m", "data.train=d", f"train.global_batch_size={batch}", *words])


def played(
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


def uncalibrated(batch: int, ranks: int, *words: str) -> Schedule:
    config = configured(batch, *words)
    return Schedule(make_plan(config, [f"host{i}" for i in range(ranks)]), config.plan, LEAD, steps=100_000)


@pytest.mark.parametrize("speeds", [(4.0, 1.0), (10.0, 3.0, 1.0), (1.0, 1.9)])
def test_an_equal_split_on_unequal_hosts_mends_itself(speeds: tuple[float, ...]) -> None:
    schedule = uncalibrated(128, len(speeds))
    decided, times = played(schedule, 30, constant(*speeds))
    assert len(decided) == 1 and decided[0][0] <= 6
    ideal = 128 / sum(speeds)
    assert times[0] > 1.3 * ideal and times[-1] <= ideal / 0.95
    assert max(schedule.at(30).ranks[0].micro_batch_sizes) <= max(schedule.at(1).ranks[0].micro_batch_sizes), (
        "larger than proven"
    )


def test_a_throttled_rank_gets_a_new_plan_within_ten_steps() -> None:
    """Rank 1 takes twice as long from step 20 on; the new plan is within 5 % of the new optimum."""
    curves = [BatchCurve.from_rates({1: 20.0, 4: 60.0, 8: 80.0}), BatchCurve.from_rates({1: 8.0, 2: 15.0, 4: 20.0})]
    config = configured(64)
    schedule = Schedule(make_plan(config, ["a", "b"], curves), config.plan, LEAD, steps=100_000)
    before = schedule.at(1).shares

    def seconds(step: int, rank: int, sizes: Sequence[int]) -> float:
        noise = 1 + 0.01 * np.sin(17 * step + rank)
        return float(curves[rank].seconds(np.array(sizes)).sum() * noise * (2 if rank == 1 and step >= 20 else 1))

    decided, times = played(schedule, 40, seconds)
    ((step, plan),) = decided
    assert step >= 20 and step + LEAD <= 30
    assert schedule.at(step + LEAD - 1).shares == before and schedule.at(step + LEAD) is plan
    slow = BatchCurve.from_rates({1: 4.0, 2: 7.5, 4: 10.0})
    optimum = plan_cluster(["a", "b"], 64, curves=[curves[0], slow]).predicted_step_seconds
    assert optimum is not None and np.mean(times[step + LEAD :]) <= optimum / 0.95
    assert plan.solo_sum_pairs_per_second == schedule.at(1).solo_sum_pairs_per_second
    assert "rank 1 (b)" in plan.reason and plan.global_batch_size == 64 == sum(plan.shares)


SIZES = (1, 2, 4, 8, 16)
SHAPES: dict[str, Callable[[int], float]] = {
    "a fixed part": lambda b: 0.02 + 0.01 * b,
    "in proportion": lambda b: 0.01 * b,
    "flat, then in proportion": lambda b: max(0.1, 0.02 * b) + 0.002 * b,
    "slowly rising": lambda b: 0.01 * b**0.8,
}


def efficiencies(
    true: Sequence[BatchCurve],
    known: Sequence[BatchCurve],
    noise: float,
    seed: int,
    batch: int = 128,
    steps: int = 120,
    replan: str = "plan.replan=true",
) -> tuple[np.ndarray, Schedule]:
    """Of every step, over the sum of what the hosts do alone at the same noise; and the run's schedule."""
    config = configured(batch, "plan.replan_seconds=0", replan)
    plan = replace(make_plan(config, ["a", "b"], list(known)), calibrated=True)
    schedule = Schedule(plan, config.plan, LEAD, steps)
    weather = np.exp(np.random.default_rng(seed).normal(0, noise, (steps + 1, 2)))

    def seconds(step: int, rank: int, sizes: Sequence[int]) -> float:
        return float(true[rank].seconds(np.array(sizes)).sum() * weather[step, rank])

    _, times = played(schedule, steps, seconds, seed, lengths=(0.8, 1.2))
    return batch / np.array(times) / sum(map(solo_pairs_per_second, true)), schedule


def hosts_of(shape: str, skew: float) -> list[BatchCurve]:
    return [BatchCurve.from_rates({b: b / SHAPES[shape](b) / slower for b in SIZES}) for slower in (1.0, skew)]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("skew", [1.0, 3.0, 8.0])
@pytest.mark.long("3.0-*", "1.0-*")
def test_one_point_that_is_wrong_by_half_is_corrected_within_twenty_steps(shape: str, skew: float) -> None:
    """Whichever point of whichever host, given too fast or too slow."""
    true = hosts_of(shape, skew)
    for rank in (0, 1):
        for size in SIZES:
            for factor in (0.5, 2.0):
                rates = {p.batch_size: p.pairs_per_second for p in true[rank].points}
                wrong, _ = sound_curve(BatchCurve.from_rates(rates | {size: rates[size] * factor}))
                assert wrong is not None
                known = [wrong if r == rank else curve for r, curve in enumerate(true)]
                reached, schedule = efficiencies(true, known, noise=0.0, seed=0, steps=40)
                assert reached[20:].mean() >= 0.95, (rank, size, factor, schedule.at(40).shares)


@pytest.mark.parametrize("seed", range(6))
def test_a_curve_that_is_wrong_everywhere_is_corrected_under_noise(seed: int) -> None:
    """Rank 1's host has a neighbour since it was calibrated: half its speed, and steps differ by 10 %."""
    known = hosts_of("a fixed part", 1.0)
    true = hosts_of("a fixed part", 2.0)
    quiet, _ = efficiencies(true, true, noise=0.1, seed=seed)
    reached, schedule = efficiencies(true, known, noise=0.1, seed=seed)
    assert reached[20:].mean() >= 0.97 * quiet[20:].mean() and len(schedule.plans) <= 6
    assert np.median(reached[:4]) < 0.8


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.long("1", "2", "3", "4")
def test_shares_do_not_follow_noise(seed: int) -> None:
    """The curves are right: to look for errors in them costs next to nothing, however much the steps differ."""
    true = hosts_of("a fixed part", 2.0)
    for noise, plans, cost in ((0.05, 2, 0.005), (0.2, 6, 0.02)):
        reached, schedule = efficiencies(true, true, noise, seed, steps=400)
        fixed, _ = efficiencies(true, true, noise, seed, steps=400, replan="plan.replan=false")
        assert len(schedule.plans) <= plans and reached.mean() >= (1 - cost) * fixed.mean()


def test_equal_ranks_of_one_host_that_nobody_measured_wait_for_drift() -> None:
    """A difference that is within `replan_threshold` is worth a correction between hosts, and none between ranks of one machine."""
    config = configured(128, "plan.replan_seconds=0")
    decided = {}
    for hosts in (("box", "box"), ("a", "b")):
        schedule = Schedule(make_plan(config, list(hosts)), config.plan, LEAD, steps=1000)
        decided[hosts] = played(schedule, 60, constant(1.09, 1.0))[0]
    assert not decided["box", "box"] and len(decided["a", "b"]) == 1


def test_it_comes_back_when_the_heat_is_gone() -> None:
    schedule = uncalibrated(64, 2)
    decided, _ = played(
        schedule,
        60,
        lambda step, rank, sizes: sum(sizes) / (10 if rank == 0 or step < 15 or step > 35 else 5),
    )
    assert len(decided) == 2 and decided[0][1].shares[0] in (42, 43) and decided[1][1].shares == [32, 32]


def test_noise_and_longer_rows_change_nothing() -> None:
    rng = np.random.default_rng(0)
    noise = rng.normal(1, 0.03, (400, 2))
    decided, _ = played(uncalibrated(32, 2), 399, lambda step, rank, sizes: sum(sizes) * noise[step, rank])
    assert not decided


def test_a_uniformly_wrong_calibration_changes_nothing() -> None:
    """Published figures compare hosts; that all take ten times as long is no drift."""
    curves = [BatchCurve.from_rates({1: 10.0, 8: 40.0}), BatchCurve.from_rates({1: 10.0, 8: 20.0})]
    config = configured(48)
    schedule = Schedule(make_plan(config, ["a", "b"], curves), config.plan, LEAD, steps=100_000)
    decided, _ = played(schedule, 30, lambda step, rank, sizes: 10 * float(curves[rank].seconds(np.array(sizes)).sum()))
    assert not decided


@pytest.mark.parametrize("words", [("plan.replan=false",), ("plan.shares=[16,16]",)])
def test_what_the_user_fixed_stands(words: tuple[str, ...]) -> None:
    assert not played(uncalibrated(32, 2, *words), 20, constant(9.0, 1.0))[0]


def test_given_micro_batch_sizes_stay() -> None:
    schedule = uncalibrated(32, 2, "plan.micro_batch_sizes=[4,2]")
    ((_, plan),) = played(schedule, 20, constant(3.0, 1.0))[0]
    assert plan.shares == [24, 8]
    assert [set(rank.micro_batch_sizes) for rank in plan.ranks] == [{4}, {2}]


def test_steps_that_say_too_little_are_passed_over() -> None:
    """A plan's first step compiles; a ragged batch may leave a rank without rows; a time may be no number."""
    schedule = uncalibrated(32, 2)
    assert schedule.observe(1, [16.0, 16.0], [50.0, 1.0]) is None
    for step in range(2, 30):
        assert schedule.observe(step, [5.0, 0.0], [1.0, 0.0]) is None
        assert schedule.observe(step, [16.0, 16.0], [1.0, float("nan")]) is None


def test_all_ranks_decide_alike() -> None:
    """Same numbers in, same plans out: no rank needs to ask another."""
    speeds = constant(7.0, 2.0, 1.0)
    a, b = uncalibrated(48, 3), uncalibrated(48, 3)
    assert played(a, 25, speeds) == played(b, 25, speeds)
    assert a.plans == b.plans and len(a.plans) == 2


def test_a_rank_too_slow_for_one_pair_is_left_out() -> None:
    schedule = uncalibrated(8, 2)
    decided, times = played(schedule, 40, constant(100.0, 1.0))
    assert decided[-1][1].shares == [8, 0] and "no work" in decided[-1][1].warnings[0]
    assert times[-1] == pytest.approx(0.08)


@pytest.mark.parametrize(("asked", "is_changed"), [(76.0, True), (77.0, False)])
def test_a_change_that_does_not_pay_in_the_steps_that_are_left_is_not_made(asked: float, is_changed: bool) -> None:
    """64 + 64 pairs at 4 and 1 a second take 64 s; 103 + 25 would take 25.75 s, in the run's last two steps."""
    config = configured(128, f"plan.replan_seconds={asked}")
    decides = FIRST_LOOK + 1
    schedule = Schedule(make_plan(config, ["a", "b"]), config.plan, LEAD, steps=decides + LEAD + 1)
    found = [schedule.observe(step, [64.0, 64.0], [16.0, 64.0]) for step in range(1, decides + 1)]
    assert found[:-1] == [None] * (decides - 1) and (found[-1] is not None) == is_changed


@pytest.mark.parametrize("fixed", ["plan.shares=[16,16]", "plan.replan=false"])
def test_what_was_fixed_is_kept_and_remarked_upon_once(fixed: str) -> None:
    schedule = uncalibrated(32, 2, fixed)
    played(schedule, 60, constant(9.0, 1.0))
    (said,) = schedule.remarks
    what = fixed.replace("=[16,16]", "")
    assert said.startswith(f"{what} keeps shares [16, 16], where [29, 3] would do: measured up to step")


def test_a_new_plan_names_the_ranks_that_changed_most() -> None:
    schedule = uncalibrated(120, 6)
    decided, _ = played(schedule, 20, constant(1.0, 1.02, 0.98, 1.01, 8.0, 0.2))
    reason = decided[0][1].reason
    assert "rank 4 (host4)" in reason and "rank 5 (host5)" in reason and reason.count("(host") == 4


# ---- In a checkpoint ---------------------------------------------------------------------------------------


def test_a_resumed_run_goes_on_with_the_plans_in_force_and_to_come() -> None:
    config = configured(32)
    schedule = uncalibrated(32, 2)
    decided, _ = played(schedule, 7, constant(3.0, 1.0))
    changed = decided[0][0]
    for saved_after in (changed - 1, changed, changed + LEAD, 100):
        state = json.loads(json.dumps(schedule.state(saved_after)))
        resumed = Schedule(make_plan(config, ["host0", "host1"]), config.plan, LEAD, steps=100_000)
        assert resumed.restore(state)
        for step in range(saved_after + 1, saved_after + 8):
            sizes = [[rank.micro_batch_sizes for rank in one.at(step).ranks] for one in (schedule, resumed)]
            assert sizes[0] == sizes[1], (saved_after, step)


@pytest.mark.parametrize("change", ["hosts", "shares", "batch", "threshold"])
def test_another_world_or_other_settings_are_planned_anew(change: str) -> None:
    state = uncalibrated(32, 2).state(5)
    config = configured(
        48 if change == "batch" else 32,
        *{"shares": ["plan.shares=[30,2]"], "threshold": ["plan.replan_threshold=0.5"]}.get(change, []),
    )
    hosts = ["host0", "other"] if change == "hosts" else ["host0", "host1"]
    schedule = Schedule(make_plan(config, hosts), config.plan, LEAD, steps=100_000)
    before = schedule.plans[:]
    assert not schedule.restore(state) and schedule.plans == before


# ---- The first plan, from calibrations ---------------------------------------------------------------------


def calibrated(
    host: str, rates: dict[int, float], key: CurveKey = KEY, device: Any = "metal", **curve: Any
) -> HostCalibration:
    measured = BatchCurve.from_rates(rates, curve.pop("peaks", None), curve.pop("limit", None))
    measured = measured.model_copy(update={"key": key, "gradient_bytes": 10**6, **curve})
    link = Link(backend="mpi", latency_seconds=0.001, bandwidth_bytes_per_second=1e8)
    return HostCalibration(
        machine=Machine(host=host, device_name="chip", device=device), curves=(measured,), links=(link,)
    )


def planned(
    config: Config, hosts: list[str], calibrations: Sequence[HostCalibration | None], longest: int = 128
) -> ClusterPlan:
    ranks = [RankHost(host, calibration) for host, calibration in zip(hosts, calibrations, strict=True)]
    return plan_run(config, ranks, RunFacts(KEY, longest=longest, backend="mpi"))


def test_measured_hosts_are_planned_with_their_link_and_compared() -> None:
    plan = planned(
        configured(32, "strategy=synchronous", "train.steps=100"),
        ["a", "b"],
        [calibrated("a", {1: 10.0, 8: 30.0}), calibrated("b", {1: 5.0, 8: 10.0})],
    )
    assert plan.calibrated and plan.shares == [24, 8]
    assert plan.sync_seconds == pytest.approx(0.001 + 0.01)
    names = [way.strategy for way in plan.predictions]
    assert names == ["synchronous, 24 + 8", "independent, 24 + 8", "synchronous, equal shares", "a alone", "b alone"]
    assert [way.chosen for way in plan.predictions] == [True, False, False, False, False]
    together, apart, equal, alone, _ = plan.predictions
    assert apart.efficiency >= together.efficiency > alone.efficiency > equal.efficiency
    assert together.bytes_per_step == 10**6 and alone.bytes_per_step == 0
    assert json.dumps(plan.to_dict()) and len(plan.to_dict()["curves"]) == len(plan.ranks)


def test_what_travels_is_told_for_every_compression_and_number_of_ranks() -> None:
    def of(ranks: int, *words: str, **curve: Any) -> ClusterPlan:
        hosts = [calibrated(name, {1: 10.0, 8: 30.0}, **curve) for name in "abc"[:ranks]]
        return planned(configured(32, "strategy=synchronous", *words), list("abc"[:ranks]), hosts)

    sizes = {"none": 1e6, "bf16": 5e5, "int8": 0.25e6 * (1 + 4 / 256), "topk": 2e4}  # of 10**6 bytes in float32
    for kind, size in sizes.items():
        two, three = of(2, f"sync.compression={kind}"), of(3, f"sync.compression={kind}")
        assert two.sync_seconds == pytest.approx(0.001 + size / 1e8) and two.strategy == "synchronous"
        assert two.predictions[0].step_seconds == pytest.approx(two.predicted_step_seconds)
        # A ring's two passes over a part of it each, or everybody's whole to everybody else.
        passes = [1.0, 4 / 3] if kind in ("none", "bf16") else [1, 2]
        assert [plan.predictions[0].bytes_per_step for plan in (two, three)] == pytest.approx(
            [p * size for p in passes]
        )
    unknown = of(2, gradient_bytes=None)
    assert [way.bytes_per_step for way in unknown.predictions] == [None, None, None, 0, 0]


def test_memory_beyond_what_was_measured_grows_as_between() -> None:
    one = calibrated("a", {1: 10.0, 8: 30.0}, peaks={1: 10**9, 8: 8 * 10**9})
    for size, expected in ((4, 4e9), (8, 8e9), (16, 16e9)):
        (alone,) = planned(configured(32, f"plan.micro_batch_sizes=[{size}]"), ["a"], [one]).predictions
        assert alone.memory_bytes == expected


def test_independent_ranks_merge_as_often_as_the_link_allows() -> None:
    """A step takes 0.8 s. A merge of 1 MB takes 15 ms at 100 MB/s, and a second at 1 MB/s."""
    curves = [calibrated("a", {1: 10.0, 8: 30.0}), calibrated("b", {1: 5.0, 8: 10.0})]
    slow_link = Link(backend="mpi", latency_seconds=0.001, bandwidth_bytes_per_second=1e6)
    slow = [one.model_copy(update={"links": (slow_link,)}) for one in curves]
    fast = planned(configured(32, "train.steps=1000"), ["a", "b"], curves)
    assert fast.strategy == "independent" and (fast.steps_per_round, fast.merges) == (2, 500)
    assert "every 2 steps (500 merges): a merge is predicted to take 0.013 s, 0.81% of the time" in fast.merging
    apart = planned(configured(32, "train.steps=1000"), ["a", "b"], slow)
    merge = 0.001 + 1 + 2 * (0.001 + 0.004096)  # and the two short sums before it
    assert apart.steps_per_round == 126 and 99 * merge / 0.8 <= 126 < 99 * merge / 0.8 + 1
    assert apart.merges == 8 and "0.99%" in apart.merging
    by_name = {way.strategy.partition(",")[0]: way for way in reversed(apart.predictions)}
    assert apart.predictions[0].chosen and apart.predictions[0].strategy == "independent, 24 + 8"
    assert by_name["independent"].step_seconds == pytest.approx(0.8 + merge / 126)  # 24 pairs at 30/s, 8 at 10/s
    assert by_name["independent"].bytes_per_step == pytest.approx(10**6 / 126)
    assert by_name["synchronous"].step_seconds == pytest.approx(0.8 + 1.001)
    assert apart.synchronous_instead.endswith(
        "17.8 pairs/s, where independent ranks have 39.6; its sync takes 55.6% of a step"
    )
    short = planned(configured(32, "train.steps=63"), ["a", "b"], slow)
    assert (short.steps_per_round, short.merges) == (8, 8) and "at least 8 merges a run" in short.merging
    smaller = planned(configured(32, "train.steps=63", "sync.compression=topk"), ["a", "b"], slow)
    assert smaller.steps_per_round == 4
    given = planned(configured(32, "train.steps=63", "independent.pairs_per_round=320"), ["a", "b"], slow)
    assert (given.steps_per_round, given.merges) == (10, 7) and "as independent.pairs_per_round has it" in given.merging


def test_auto_is_independent_whatever_is_measured() -> None:
    curves = [calibrated("a", {1: 10.0, 8: 30.0}), calibrated("b", {1: 5.0, 8: 10.0})]
    no_link = [one.model_copy(update={"links": ()}) for one in curves]
    other = CurveKey(model="other", method="lora", dtype="float32", sequence_length=128)
    of_another = [calibrated(name, {1: 10.0, 8: 30.0}, other) for name in "ab"]
    for hosts, calibrations, said in (
        (["a", "b"], no_link, "its syncs left out: the link is not calibrated"),
        (["a", "b"], [None, None], "at what speed is unknown: no calibration of a, b (make calibrate)"),
        (["a", "b"], [curves[0], None], "at what speed is unknown: no calibration of"),
        (["a", "b"], of_another, "at what speed is unknown: no calibration of this model"),
        (["a", "a"], [None, None], "at what speed is unknown: no calibration of a (make calibrate)"),
        (["a", "a"], [curves[0], curves[0]], "its sync takes"),
    ):
        plan = planned(configured(32, "train.steps=80"), hosts, calibrations)
        assert plan.strategy == "independent", hosts
        assert "strategy=synchronous would give one machine's result" in plan.synchronous_instead
        assert said in plan.synchronous_instead, plan.synchronous_instead
        if "its sync takes" not in said:  # timed in the first rounds, unless timings are to be kept out
            assert plan.steps_per_round == 2 and "until the first merges are timed" in plan.merging
            fixed = planned(configured(32, "train.steps=80", "plan.replan=false"), hosts, calibrations)
            assert (fixed.steps_per_round, fixed.merges) == (11, 8) and "plan.replan=false" in fixed.merging
    for words, said in (
        (["strategy=synchronous"], "as strategy has it"),
        (["plan.shares=[20,12]"], "plan.shares"),
        (["checkpoint.max_lost_seconds=60"], "checkpoint.max_lost_seconds"),
    ):
        plan = planned(configured(32, *words), ["a", "b"], curves)
        assert plan.strategy == "synchronous" and said in plan.reason and not plan.synchronous_instead
    shares = planned(configured(32, "strategy=independent", "plan.shares=[20,12]"), ["a", "b"], [None, None])
    assert shares.strategy == "independent" and shares.shares == [20, 12] and "plan.shares" in shares.merging
    alone = planned(configured(32), ["a"], [None])
    assert alone.strategy == "synchronous" and not alone.merging and not alone.synchronous_instead


def test_a_mistake_is_not_taken_for_a_model_that_is_too_large() -> None:
    """Gradient checkpointing helps against memory alone: another complaint arrives as it was."""
    words = ["plan.shares=[20,6,6]", "plan.require_calibration=true"]
    with pytest.raises(UserError, match=r"plan.shares \[20, 6, 6\] has 3 numbers, but there are 2 ranks"):
        planned(configured(32, *words), ["a", "b"], [calibrated(name, {1: 10.0, 8: 30.0}) for name in "ab"])


def test_one_host_uses_its_curve_and_needs_no_link() -> None:
    plan = planned(configured(32), ["a"], [calibrated("a", {1: 10.0, 8: 30.0, 16: 20.0})])
    assert plan.ranks[0].micro_batch_sizes == (8,) * 4 and plan.sync_seconds == 0
    assert [way.strategy for way in plan.predictions] == ["a alone"]


def test_ranks_that_share_a_machine_share_its_speed_and_memory() -> None:
    whole = calibrated("box", {1: 10.0, 8: 30.0}, peaks={1: 10**9, 8: 8 * 10**9}, limit=10**10)
    plan = planned(configured(32), ["box", "box"], [whole, whole])
    assert plan.shares == [16, 16]
    assert plan.curves[0] is not None and plan.curves[0].max_batch_size == 4  # of 5 GB, less the headroom
    assert plan.curves[0].seconds(np.array([8]))[0] == pytest.approx(2 * 8 / 30)
    assert any("2 ranks share box" in warning and "box-0.json" in warning for warning in plan.warnings)
    own = [calibrated("box-0", {1: 10.0, 8: 30.0}), calibrated("box-1", {1: 5.0, 8: 10.0})]
    plan = planned(configured(32), ["box", "box"], own)
    assert plan.shares == [24, 8] and not plan.warnings
    gpus = calibrated("box", {1: 10.0, 8: 30.0}, device="cuda")
    assert planned(configured(32), ["box", "box"], [gpus, gpus]).solo_sum_pairs_per_second == pytest.approx(60)


def test_memory_is_that_of_the_longest_rows() -> None:
    host = calibrated("a", {1: 10.0, 8: 30.0}, peaks={1: 10**9, 8: 8 * 10**9}, limit=10**10)
    sizes = [planned(configured(32), ["a"], [host], longest).ranks[0].micro_batch_sizes for longest in (128, 256)]
    assert max(sizes[0]) == 8 and max(sizes[1]) <= 4


def test_gradient_checkpointing_where_a_pair_does_not_fit_without() -> None:
    large = calibrated("a", {1: 10.0, 2: 11.0}, peaks={1: 12 * 10**9, 2: 20 * 10**9}, limit=8 * 10**9)
    with pytest.raises(
        UserError, match=r"one pair needs 12.00 GB, but it has 8.00 GB.*try model.gradient_checkpointing"
    ):
        planned(configured(8), ["a"], [large])
    key = KEY.model_copy(update={"gradient_checkpointing": True})
    small = calibrated("a", {1: 7.0, 2: 8.0}, key=key, peaks={1: 3 * 10**9, 2: 5 * 10**9}, limit=8 * 10**9)
    both = large.model_copy(update={"curves": (*large.curves, *small.curves)})
    plan = planned(configured(8), ["a"], [both])
    assert plan.gradient_checkpointing and plan.calibrated and "12.00 GB" in plan.warnings[0]
    with pytest.raises(UserError, match="12.00 GB"):
        planned(configured(8, "model.gradient_checkpointing=false"), ["a"], [both])
    with pytest.raises(UserError, match="12.00 GB"):
        planned(configured(8, "model.dropout=0.1"), ["a"], [both])


def test_a_host_without_calibration_among_hosts_that_have_one() -> None:
    hosts, known = ["a", "new"], calibrated("a", {1: 10.0, 8: 30.0})
    plan = planned(configured(32), hosts, [known, None])
    assert plan.shares == [16, 16] and "no calibration of new" in plan.reason and not plan.calibrated
    with pytest.raises(UserError, match="require_calibration: no calibration of new"):
        planned(configured(32, "plan.require_calibration=true"), hosts, [known, None])


def test_another_models_curves_compare_hosts_but_promise_no_seconds() -> None:
    other = KEY.model_copy(update={"model": "other"})
    plan = planned(
        configured(32),
        ["a", "b"],
        [calibrated("a", {1: 10.0, 8: 30.0}, other), calibrated("b", {1: 5.0, 8: 10.0}, other)],
    )
    assert plan.shares == [24, 8] and not plan.calibrated and "another measurement" in plan.warnings[0]


# ---- Costs -------------------------------------------------------------------------------------------------


def test_costs_by_the_hour() -> None:
    assert calculate_training_cost(10_000, 3.86, 2.0) == {
        "total_examples": 10_000,
        "throughput_ex_per_sec": 3.86,
        "estimated_time_hours": pytest.approx(0.71963, rel=1e-4),
        "estimated_cost_usd": pytest.approx(1.43926, rel=1e-4),
    }


def test_electricity_and_rent_of_each_host_and_of_all() -> None:
    prices = CostSettings(watts={"a": 100, "b": 250}, price_per_kwh=0.3, rent_per_hour=1.5)
    cost = hosts_cost(["a", "b", "a"], 7200, prices)  # two ranks on a: it pays once
    assert cost is not None and [host["host"] for host in cost["hosts"]] == ["a", "b"]
    assert cost["energy_kwh"] == pytest.approx(0.7) and cost["electricity"] == pytest.approx(0.21)
    assert cost["rent"] == pytest.approx(6.0) and cost["cost"] == pytest.approx(6.21)
    assert hosts_cost(["a"], 7200, CostSettings(price_per_kwh=0.3)) is None
    plan = planned(configured(8, "cost.watts={typo: 3}"), ["a"], [calibrated("a", {1: 1.0, 2: 2.0})])
    assert any("no host of this run is called typo" in warning for warning in plan.warnings)
    plan = planned(configured(8, "plan.memory_limit_gb={typo: 3, a: 3}"), ["a"], [calibrated("a", {1: 1.0, 2: 2.0})])
    assert "plan.memory_limit_gb: no host of this run is called typo; its hosts: a" in plan.warnings


def test_a_plan_says_which_global_batch_would_keep_the_hosts_busy() -> None:
    hosts = [calibrated("a", {1: 10.0, 8: 30.0}), calibrated("b", {1: 5.0, 8: 10.0})]
    small, large = planned(configured(8), ["a", "b"], hosts), planned(configured(64), ["a", "b"], hosts)
    assert (small.efficiency or 0) < 0.95 <= (large.efficiency or 0)
    assert "a global batch of 32 would reach 95%" in small.reason and "would reach" not in large.reason
    assert (planned(configured(32), ["a", "b"], hosts).efficiency or 0) >= 0.95


# ---- The benchmark -----------------------------------------------------------------------------------------


def test_the_benchmark_of_balance_says_what_it_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    from benchmarks import balance

    monkeypatch.setattr(balance.os, "sched_getaffinity", lambda pid: {0}, raising=False)
    with pytest.raises(UserError, match=r"^this benchmark gives each of two ranks a core of its own: .* two cores$"):
        balance.main([])


# ---- On real ranks -----------------------------------------------------------------------------------------


@pytest.mark.mpi(min_size=2, max_size=2)
@pytest.mark.long
def test_a_run_that_is_planned_again_loses_no_example_and_resumes_bit_for_bit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rank 0 is said to be three times as fast: the shares follow, and the weights are those of one rank."""
    import train as script
    from lib.distributed import world as sync
    from lib.system import mpi_and_blas
    from lib.system.records import read_records

    world = sync.start(mpi_and_blas.launch_environment(), timeout_seconds=120)
    folder = Path(world.broadcast_text(str(tmp_path)))
    mine = tiny.settings(folder, rows=21) if world.rank == 0 else []
    words = [
        *json.loads(world.broadcast_text(json.dumps(mine))),
        "train.steps=16",
        "checkpoint.every=1",
        "checkpoint.keep=20",
        "plan.replan_seconds=0",
        "strategy=synchronous",
    ]
    observe = Schedule.observe

    def invented(self: Schedule, step: int, tokens: Sequence[float], measured: Sequence[float]) -> ClusterPlan | None:
        assert len(measured) == len(tokens)
        return observe(self, step, tokens, [n / (3.0 if rank == 0 else 1.0) for rank, n in enumerate(tokens)])

    monkeypatch.setattr(Schedule, "observe", invented)

    def train(name: str, ranks: sync.World = world, resume: bool = False) -> Path:
        script.train(settings.load(None, [*words, f"run.name={name}"]), ranks, resume=resume, dry_run=False)
        world.gather_text("trained")
        return folder / "runs" / name

    alone, run = rounding.trained_alone(world, words), train("planned-again")
    plans = [record for record in read_records(run / "logs" / "rank-001.jsonl") if record["kind"] == "plan"]
    assert [record["shares_before"] for record in plans] == [make_plan(configured(8), ["h"] * world.size).shares]
    first, shares = plans[0]["first_step"], plans[0]["shares"]
    assert plans[0]["step"] + 3 == first <= 12 and sum(shares) == 8 and shares[0] >= 8 - 2 * (world.size - 1)
    for record in tiny.steps_of(run, 0):
        if (record["step"] % 3) != 0:  # every third batch is the epoch's ragged end
            assert record["pairs"] == (plans[0]["shares_before"] if record["step"] < first else shares)[0]
    assert all(rows == list(range(21)) for rows in list(tiny.rows_of_epochs(run).values())[:5])
    assert tiny.difference(alone.run, run) <= alone.limit
    before = {name: array.tobytes() for name, array in tiny.weights(run).items()}
    for step in (first - 1, plans[0]["step"]):  # the change is near, or has only just been decided
        world.gather_text("before the checkpoints after a step are taken away")
        if world.rank == 0:
            for path in (run / "checkpoints").iterdir():
                if int(path.name.removeprefix("step-")) > step:
                    shutil.rmtree(path)
        world.gather_text("taken away")
        train("planned-again", resume=True)
        assert {name: array.tobytes() for name, array in tiny.weights(run).items()} == before, step
        world.gather_text("compared")


@pytest.mark.mpi(min_size=2, max_size=2)
@pytest.mark.long
def test_real_ranks_correct_a_calibration_that_is_wrong(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two equal ranks, one of which is said to be twice as fast at one size: their own times say otherwise."""
    observe = Schedule.observe

    def equally_fast(self: Schedule, step: int, tokens: Sequence[float], measured: Sequence[float]) -> Any:
        return observe(self, step, tokens, [1e-5 * n for n in tokens])  # on a busy machine their clocks say anything

    monkeypatch.setattr(Schedule, "observe", equally_fast)
    import train as script
    from lib.distributed import world as sync
    from lib.plan.calibration import curve_key, write_calibration
    from lib.system import model_folder as models
    from lib.system import mpi_and_blas, network
    from lib.system.records import read_records

    world = sync.start(mpi_and_blas.launch_environment(), timeout_seconds=120)
    folder = Path(world.broadcast_text(str(tmp_path)))
    mine = tiny.settings(folder, rows=64) if world.rank == 0 else []
    words = [*json.loads(world.broadcast_text(json.dumps(mine))), "train.global_batch_size=32", "train.steps=60"]
    config = settings.load(None, [*words, "run.name=corrected", "plan.replan_seconds=0", "strategy=synchronous"])
    key = curve_key(config, models.resolve(config.model.path, None), 16)
    rates = {2: 100.0, 4: 110.0, 8: 220.0 if world.rank == 0 else 112.0}
    own = f"{network.host_name()}-{world.rank}"
    write_calibration(folder / "calibration" / f"{own}.json", calibrated(own, rates, key, device="cpu"))
    world.gather_text("written")
    script.train(config, world, resume=False, dry_run=False)
    records = list(read_records(folder / "runs" / "corrected" / "logs" / f"rank-{world.rank:03d}.jsonl"))
    first = next(record for record in records if record["kind"] == "start")["plan"]
    plans = [record for record in records if record["kind"] == "plan"]
    assert first["shares"][0] >= 20, first["shares"]
    assert plans and plans[-1]["shares"][0] <= 19, [plan["shares"] for plan in plans]  # when: test_replan's simulations
    assert world.gather_text("read") == ["read"] * 2
