"""Pictures of runs whose figures no axis was made for: drawn without a word from Matplotlib or NumPy."""

from __future__ import annotations

import warnings
from pathlib import Path

import pytest

from lib.plan.calibration import BatchCurve, BatchPoint
from lib.report import pictures, run_report
from lib.system.records import PerformanceTracker

ODD = {
    "zero": [0.0, 0.0, 0.0],
    "negative": [-1.0, -2.0, -3.0],
    "one step": [1.0],
    "not a number": [float("nan")] * 3,
    "infinite": [float("inf"), 1.0, float("-inf")],
    "beyond float32": [1e308, -1e308, 1.0],
    "hardly anything": [1e-320, 1e-320],
    "absent": [None, None],
}


@pytest.mark.parametrize("name", ODD)
@pytest.mark.long("zero", "negative", "hardly anything", "one step", "infinite")
def test_odd_figures_are_drawn_without_a_warning(tmp_path: Path, name: str) -> None:
    tracker = PerformanceTracker(tmp_path / "logs" / "rank-000.jsonl", 0, "a")
    tracker.record("start")
    for step, value in enumerate(ODD[name], 1):
        figures = dict.fromkeys(("loss", "kl", "reward_margin", "reward_accuracy", "grad_norm", "learning_rate"), value)
        tracker.record("step", step=step, pairs=4, tokens=9, step_seconds=1.0, **figures)
        tracker.record("evaluation", step=step, **figures)
    tracker.close()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        run_report.write(tmp_path)
    has_something = name not in ("not a number", "absent")
    assert ("<svg" in (tmp_path / "report.html").read_text()) == has_something
    assert (tmp_path / "curves.png").exists() == has_something


def curve(peaks: list[int | None], limit_bytes: int | None = None) -> BatchCurve:
    points = [
        BatchPoint(batch_size=2**i, seconds_median=1.0 + i, pairs_per_second=1.0, peak_memory_bytes=peak)
        for i, peak in enumerate(peaks)
    ]
    return BatchCurve(points=tuple(points), memory_limit_bytes=limit_bytes)


@pytest.mark.parametrize(
    ("curves", "has_memory"),
    [
        ([], False),
        ([curve([None, None])], False),
        ([curve([None, None], 10**9)], False),
        ([curve([10**8, 10**9], 2 * 10**9)], True),
        ([curve([None, None]), curve([10**8, 10**9])], True),
    ],
)
def test_batch_curves_have_a_panel_of_memory_where_it_was_measured(curves: list[BatchCurve], has_memory: bool) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        text = pictures.svg_of(pictures.batch_curves_figure([(f"host{i}", one) for i, one in enumerate(curves)]))
    assert ("peak memory, GB" in text) == has_memory and "pairs/s" in text
