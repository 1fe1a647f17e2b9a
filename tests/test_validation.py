"""Figures of a calibration that cannot be: which are replaced, which are left out, and what is said."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from lib.plan.calibration import (
    BatchCurve,
    BatchPoint,
    HostCalibration,
    Link,
    read_calibration,
    read_published,
    write_calibration,
)
from lib.plan.calibration_checks import impossible_link, off_the_curve, sound_calibration, sound_curve
from lib.system.hardware import Machine

SIZES = (1, 2, 4, 8, 16)
SHAPES = {
    "a fixed part": lambda b: 0.02 + 0.01 * b,
    "in proportion": lambda b: 0.01 * b,
    "flat, then in proportion": lambda b: max(0.1, 0.02 * b) + 0.002 * b,
    "slowly rising": lambda b: 0.01 * b**0.8,
}


def rates(seconds: dict[int, float]) -> dict[int, float]:
    return {size: size / taken for size, taken in seconds.items()}


def calibration(curve: BatchCurve, *links: Link, **rates: float) -> HostCalibration:
    machine = Machine(host="mac-a", device_name="chip", device="metal")
    return HostCalibration(machine=machine, curves=(curve,), links=links, **rates)


@pytest.mark.parametrize("shape", SHAPES)
def test_curves_of_usual_shapes_are_left_as_they_are(shape: str) -> None:
    curve = BatchCurve.from_rates(rates({size: SHAPES[shape](size) for size in SIZES}))
    assert sound_curve(curve) == (curve, [])


@pytest.mark.parametrize("published", read_published().values(), ids=lambda one: one.machine.host)
def test_published_curves_are_left_as_they_are(published: HostCalibration) -> None:
    assert sound_calibration(published) == (published, ())


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("size", SIZES[:-1])
def test_a_point_that_is_given_too_slow_costs_no_speed(shape: str, size: int) -> None:
    """Nobody runs a size that is said to be slow: only the curve's shape can tell."""
    true = {s: SHAPES[shape](s) for s in SIZES}
    sound, _ = sound_curve(BatchCurve.from_rates(rates(true | {size: 2 * true[size]})))
    assert sound is not None
    best = sound.best_point.batch_size
    assert best / true[best] >= 0.95 * max(rates(true).values())


def test_a_dip_between_two_sizes_is_named_with_its_numbers_and_the_remedy() -> None:
    seen = BatchCurve.from_rates({1: 60.0, 4: 100.0, 8: 111.0, 16: 61.0, 32: 115.0})
    sound, remarks = sound_calibration(calibration(seen))
    (remark,) = remarks
    for part in ("calibration of mac-a", "61 pairs/s at 16", "111 at 8", "115 at 32", "make calibrate on mac-a"):
        assert part in remark
    point = sound.curves[0].points[3]
    assert 111 < point.pairs_per_second < 115 and point.seconds_spread > 0.2 * point.seconds_median, "uncertain"


def test_the_largest_size_is_measured_against_what_the_smaller_ones_lead_to() -> None:
    rising = {1: 20.0, 2: 38.0, 4: 70.0, 8: 125.0}
    dipped = [point.pairs_per_second for point in sound_curve(BatchCurve.from_rates(rising | {16: 100.0}))[0].points]
    assert dipped[-1] > 125, "half of what it ought to be"
    for believed in (110.0, 30.0):
        curve = BatchCurve.from_rates({4: 110.0, 8: 112.0, 16: believed})
        assert sound_curve(curve)[0] == curve, "a knee, or a machine that swaps"


def test_more_pairs_take_no_less_time() -> None:
    found = off_the_curve(BatchCurve.from_rates(rates({1: 0.1, 2: 0.12, 4: 0.04, 8: 0.2})).points)
    assert list(found) == [4] and "while fewer take longer" in found[4]


def test_unsteady_times_are_not_planned_with() -> None:
    points = [
        BatchPoint(batch_size=size, seconds_median=0.01 * size, seconds_spread=spread * 0.01 * size, pairs_per_second=1)
        for size, spread in ((1, 0.05), (2, 0.5), (4, 0.1))
    ]
    sound, remarks = sound_curve(BatchCurve(points=tuple(points)))
    assert "times of 2 pairs differ by 50%" in remarks[0]
    assert sound.points[1].seconds_median == pytest.approx(0.02)
    unsteady = points[0].model_copy(update={"seconds_spread": 0.009})
    curve = BatchCurve(points=(unsteady, points[1], points[2]))
    sound, remarks = sound_curve(curve)
    assert sound is None and "1 pairs by 90%, 2 pairs by 50%" in remarks[0] and "not used" in remarks[0]
    assert sound_calibration(calibration(curve))[0].curves == ()


def test_memory_does_not_fall() -> None:
    peaks = {1: 10**9, 2: 5 * 10**9, 4: 2 * 10**9}
    sound, remarks = sound_curve(BatchCurve.from_rates({1: 1.0, 2: 2.0, 4: 3.0}, peaks, 10**10))
    assert [point.peak_memory_bytes for point in sound.points] == [10**9, 5 * 10**9, 5 * 10**9]
    assert "peak memory of 4 pairs, 2 GB" in remarks[0]


def test_a_link_faster_than_any_wire_counts_as_not_measured(tmp_path: Path) -> None:
    curve = BatchCurve.from_rates({1: 1.0, 2: 2.0})
    wire = Link(backend="mpi", latency_seconds=1e-4, bandwidth_bytes_per_second=5e9)
    stored = Link(backend="mpi", operation="ping_pong", latency_seconds=1e-4, bandwidth_bytes_per_second=4e15)
    path = tmp_path / "mac-a.json"
    write_calibration(path, calibration(curve, wire, stored, gflops=1e12))
    assert json.loads(path.read_text())["links"][1]["bandwidth_bytes_per_second"] == 4e15
    sound, remarks = sound_calibration(read_calibration(path))
    assert sound.links == (wire,) and sound.gflops is None
    assert "mpi ping_pong of 4e+06 GB/s cannot be" in remarks[0] and "gflops of 1e+12" in remarks[1]
    assert impossible_link(wire.model_copy(update={"latency_seconds": 1e-12}))
