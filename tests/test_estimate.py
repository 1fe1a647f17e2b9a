"""Hosts without a calibration beside hosts that have one: what is estimated, from what, and what stays."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from lib.config import load as settings
from lib.plan.calibration import BatchCurve, CurveKey, HostCalibration, read_calibration, read_published
from lib.plan.cluster_plan import ClusterPlan
from lib.plan.run_facts import RankHost, RunFacts
from lib.plan.run_plan import plan_run
from lib.plan.uncalibrated_hosts import relative_speeds, with_estimates
from lib.system import hardware
from lib.system.hardware import Machine
from tests import tiny

KEY = CurveKey(model="m", method="lora", dtype="float32", sequence_length=128)
OTHER = KEY.model_copy(update={"model": "other"})


def calibrated(host: str, rates: dict[int, float], key: CurveKey = KEY, chip: str = "chip") -> HostCalibration:
    curve = BatchCurve.from_rates(rates, {size: size * 10**9 for size in rates}, 10**11).model_copy(update={"key": key})
    return HostCalibration(machine=Machine(host=host, device_name=chip, device="metal"), curves=(curve,))


def planned(calibrations: Sequence[HostCalibration | None], *words: str, **known: list[Any]) -> ClusterPlan:
    config = settings.load(None, ["model.path=m", "data.train=d", "train.global_batch_size=32", *words])
    hosts = [
        RankHost(f"h{i}", calibration, **{name: values[i] for name, values in known.items()})
        for i, calibration in enumerate(calibrations)
    ]
    return plan_run(config, hosts, RunFacts(KEY, longest=128, backend="mpi"))


def test_a_host_without_a_calibration_takes_nothing_from_one_that_has_one() -> None:
    fast = calibrated("h0", {1: 10.0, 8: 30.0, 16: 40.0})
    plan = planned([fast, None], gflops=[3000.0, 1000.0], memory_bytes=[10**11, 10**11])
    assert plan.shares[0] > 20 and not plan.calibrated
    assert max(plan.ranks[0].micro_batch_sizes) > 8, "its own curve"
    small = planned([fast, None], gflops=[3000.0, 1000.0], memory_bytes=[10**11, 4 * 10**9])
    assert max(small.ranks[1].micro_batch_sizes) <= 3, "the other's memory of a pair, within its own"
    (said,) = [warning for warning in plan.warnings if "h1" in warning]
    assert "host h1: estimated from its matrix-product rate, 1,000 GFLOP/s against 3,000 of h0" in said
    assert "make calibrate" in said and plan.curves[0].source == "measured" != plan.curves[1].source


def test_another_measurement_of_both_hosts_tells_more_than_products_of_matrices() -> None:
    fast = calibrated("h0", {1: 10.0, 8: 30.0})
    fast = fast.model_copy(update={"curves": (*fast.curves, *calibrated("h0", {1: 4.0, 8: 8.0}, OTHER).curves)})
    plan = planned([fast, calibrated("h1", {1: 4.0, 8: 8.0}, OTHER)], gflops=[3000.0, 1000.0])
    assert plan.shares == [16, 16] and any("another measurement (other" in warning for warning in plan.warnings)


def test_published_figures_of_both_chips_where_no_rate_is_known() -> None:
    fast = calibrated("h0", {1: 10.0, 8: 30.0}, chip="Apple M4 Max")
    known = [RankHost("h0", fast), RankHost("h1", None, "Apple M3 Ultra")]
    completed, (said,) = with_estimates(known, KEY, list(read_published().values()))
    assert "published for Apple M3 Ultra and Apple M4 Max" in said and completed[1] is not None
    ratio = completed[1].curves[0].best_point.pairs_per_second / 30
    assert ratio == pytest.approx(278 / 776, rel=1e-2)


def test_the_most_similar_host_lends_its_curve() -> None:
    known = [
        RankHost("a", calibrated("a", {1: 1.0, 8: 2.0}), gflops=100.0),
        RankHost("b", calibrated("b", {1: 10.0, 8: 80.0}), gflops=1000.0),
        RankHost("c", None, gflops=900.0),
    ]
    completed, _ = with_estimates(known, KEY)
    assert completed[2] is not None and completed[2].curves[0].best_point.pairs_per_second == pytest.approx(72)


def test_hosts_that_nobody_measured_share_by_their_rates() -> None:
    plan = planned([None, None], gflops=[300.0, 100.0])
    assert plan.shares == [24, 8] and "in proportion to the hosts' matrix-product rates" in plan.reason
    assert planned([None, None], gflops=[110.0, 100.0]).shares == [16, 16], "as near as two measurements of one host"
    assert planned([None, None], "plan.shares=[20,12]", gflops=[300.0, 100.0]).shares == [20, 12]
    one_host = [RankHost("box", None, gflops=rate) for rate in (100.0, 180.0)]
    assert relative_speeds(one_host) is None, "ranks of one host are equal"


def test_a_noisy_curve_is_not_used_and_the_host_is_estimated() -> None:
    noisy = calibrated("h1", {1: 30.0, 8: 90.0})
    points = [p.model_copy(update={"seconds_spread": 0.4 * p.seconds_median}) for p in noisy.curves[0].points]
    noisy = noisy.model_copy(update={"curves": (noisy.curves[0].model_copy(update={"points": tuple(points)}),)})
    plan = planned([calibrated("h0", {1: 10.0, 8: 30.0}), noisy], gflops=[100.0, 100.0])
    assert plan.shares == [16, 16]
    said = " ".join(plan.warnings)
    assert "the curve is not used" in said and "host h1: estimated" in said


def test_a_falsified_point_does_not_steer_the_shares() -> None:
    rates = {1: 60.0, 4: 100.0, 8: 111.0, 16: 113.0, 32: 115.0}
    plans = [planned([calibrated("h0", given), calibrated("h1", rates)]) for given in (rates, rates | {16: 57.0})]
    assert plans[0].shares == plans[1].shares == [16, 16]
    assert any("57 pairs/s at 16" in warning for warning in plans[1].warnings)


def test_the_rate_of_products_is_measured_in_well_under_a_second() -> None:
    rates = [hardware.quick_gflops(0.1) for _ in range(3)]
    assert min(rates) > 0.1 and np.median(rates) > 0


@pytest.mark.parametrize("loads_seconds", [0.0, 0.2, 3.0])
def test_the_rate_is_the_devices_however_long_its_libraries_take_to_load(
    loads_seconds: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on CUDA, whose first product loads them: a product takes 50 us to begin, and runs at 400 TFLOP/s."""
    now, begun = [100.0], []

    def multiply(a: Any, b: Any) -> None:
        now[0] += 5e-5 + 2 * a.shape[0] ** 3 * hardware.CHAIN / 400e12 + (0.0 if begun else loads_seconds)
        begun.append(a.shape[0])

    monkeypatch.setattr(hardware, "_multiply", multiply)
    monkeypatch.setattr(hardware, "time", SimpleNamespace(perf_counter=lambda: now[0]))
    assert hardware.quick_gflops() == pytest.approx(400e3, rel=0.02)
    assert begun[-1] == max(hardware.WIDTHS) and now[0] < 101 + loads_seconds


@pytest.mark.mpi(min_size=2, max_size=2)
def test_ranks_of_two_hosts_plan_alike_where_one_was_never_calibrated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two real ranks that go by two names; the second one's products are said to be a third as fast."""
    from lib.distributed import world as sync
    from lib.plan import first_plan
    from lib.plan.calibration import curve_key, write_calibration
    from lib.system import model_folder as models
    from lib.system import mpi_and_blas

    world = sync.start(mpi_and_blas.launch_environment(), timeout_seconds=120)
    folder = Path(world.broadcast_text(str(tmp_path)))
    mine = tiny.settings(folder, rows=21) if world.rank == 0 else []
    words = [*json.loads(world.broadcast_text(json.dumps(mine))), "train.global_batch_size=16"]
    config = settings.load(None, words)
    lengths = np.full(21, 16)
    key = curve_key(config, models.resolve(config.model.path, None), 16)
    if world.rank == 0:
        write_calibration(folder / "calibration" / "fast.json", calibrated("fast", {1: 10.0, 4: 30.0}, key))
    monkeypatch.setattr(hardware, "quick_gflops", lambda: [90.0, 30.0][world.rank])
    plan = first_plan.first_plan(config, world, ["fast", "new"], lengths)
    texts = world.gather_long_text(json.dumps(plan.to_dict()))
    assert texts[0] == texts[1] and plan.shares == [12, 4]
    assert any("host new: estimated" in warning for warning in plan.warnings)
    assert read_calibration(folder / "calibration" / "fast.json").machine.host == "fast"

    # A restart divides the work by what was measured then, not by what it would measure now, while others start.
    monkeypatch.setattr(hardware, "quick_gflops", lambda: [50.0, 100.0][world.rank])
    run = folder / "run"
    with world.agreeing("writing the plan"):
        if world.rank == 0:
            run.mkdir()
            (run / "plan.json").write_text(json.dumps(plan.to_dict()))
    again = first_plan.first_plan(config, world, ["fast", "new"], lengths, resumed=run)
    assert again.shares == plan.shares and again.matmul_gflops == {"fast": [90.0], "new": [30.0]}
    other = first_plan.first_plan(config, world, ["fast", "third"], lengths, resumed=run)
    assert other.matmul_gflops == {"fast": [50.0], "third": [100.0]}
    for rates in (
        [1.0],
        {"fast": 90.0, "new": 30.0},
        {"fast": [-1.0], "new": [10**400]},
        {"fast": ["nan"], "new": []},
        {"fast": [1e308], "new": [5e-324]},
    ):
        with world.agreeing("spoiling the plan"):
            if world.rank == 0:
                (run / "plan.json").write_text(json.dumps({"matmul_gflops": rates}))
        now = first_plan.first_plan(config, world, ["fast", "new"], lengths, resumed=run)
        assert now.matmul_gflops == {"fast": [50.0], "new": [100.0]}, rates
    assert world.gather_text("done") == ["done"] * 2
