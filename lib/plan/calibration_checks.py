"""Calibrations without implausible figures, and a remark for each that was replaced. Pure functions.

A micro-batch's time grows with its pairs: nearly linearly until the machine is saturated, and seldom suddenly. So some
figures were disturbed when they were measured: a point far from the line through its neighbours, a time that differs
by more than a fifth from round to round, a link faster than any wire. `make calibrate` measures such points again.
A plan replaces them by what the other points lead to, and warns.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from lib.plan.calibration import BatchCurve, BatchPoint, HostCalibration, Link

UNSTEADY = 0.2  # of a point's time, its spread: beyond it the time is not used
DIP = 1.3  # pairs/s of smaller and of larger sizes over a point's own
FALLING_TIME = 1.15  # of fewer pairs, over that of more
OFF_THE_LINE = 1.8  # the largest size's time over what the smaller ones lead to ...
CLIFF = 3.0  # ... but more than this is a machine at its end (swapping), and believed
MATTERS = 1.05  # ... and where it would not be the fastest, its time is of no account
FALLING_MEMORY = 0.9  # of a smaller micro-batch's peak
FASTEST_LINK = 5e12  # bytes a second; NVLink has 1.8e12
SHORTEST_LATENCY = 1e-8  # seconds
FASTEST_MATMUL = 1e8  # GFLOP/s
FASTEST_MEMORY = 1e14  # bytes a second


def all_sound(
    calibrations: Sequence[HostCalibration | None],
) -> tuple[list[HostCalibration | None], tuple[str, ...]]:
    """Every rank's calibration without implausible figures; and, once for each file, what was replaced or left out."""
    checked = [sound_calibration(one) if one else (None, ()) for one in calibrations]
    return [one for one, _ in checked], tuple(dict.fromkeys(remark for _, remarks in checked for remark in remarks))


def sound_calibration(calibration: HostCalibration) -> tuple[HostCalibration, tuple[str, ...]]:
    """The calibration without implausible figures, and a line for each that was replaced or left out."""
    host = calibration.machine.host
    remarks: list[str] = []
    curves = []
    for curve in calibration.curves:
        sound, of_curve = sound_curve(curve)
        remarks += of_curve
        if sound is not None:
            curves.append(sound)
    links = []
    for link in calibration.links:
        fault = impossible_link(link)
        remarks += [f"{fault}; the link counts as not measured"] if fault else []
        links += [] if fault else [link]
    rates: dict[str, None] = {}
    for name, bound, unit in (
        ("gflops", FASTEST_MATMUL, "GFLOP/s"),
        ("memory_bytes_per_second", FASTEST_MEMORY, "bytes/s"),
    ):
        value = getattr(calibration, name)
        if value is not None and value > bound:
            remarks.append(f"{name} of {value:.3g} {unit} cannot be; not used")
            rates[name] = None
    changed = {"curves": tuple(curves), "links": tuple(links), **rates}
    remedy = f"make calibrate on {host} measures it again"
    return calibration.model_copy(update=changed), tuple(f"calibration of {host}: {what}; {remedy}" for what in remarks)


def sound_curve(curve: BatchCurve) -> tuple[BatchCurve | None, list[str]]:
    """The curve with plausible times and rising memory (None with fewer than two steady points), and what was changed.

    A time that replaces another gets the difference of the two as its spread.
    """
    name = f"{curve.key}: " if curve.key else ""
    unsteady = unsteady_points(curve.points)
    if len(curve.points) - len(unsteady) < 2:
        spreads = ", ".join(f"{size} pairs by {spread:.0%}" for size, spread in unsteady.items())
        return None, [f"{name}times differ from round to round ({spreads}); the curve is not used"]
    times, reasons = _straightened(curve.points, set(unsteady))
    for size, spread in unsteady.items():
        reasons[size] = f"times of {size} pairs differ by {spread:.0%} from round to round"
    remarks, points, highest = [], [], 0
    for point, seconds in zip(curve.points, times, strict=True):
        size, peak = point.batch_size, point.peak_memory_bytes
        if size in reasons:
            remarks.append(f"{name}{reasons[size]}; planned with {size / seconds:.4g} pairs/s at {size}")
        if peak is not None and peak < FALLING_MEMORY * highest:
            remarks.append(
                f"{name}peak memory of {size} pairs, {peak / 1e9:.3g} GB, is below a smaller micro-batch's; "
                f"planned with {highest / 1e9:.3g} GB"
            )
        highest = max(highest, peak or 0)
        changed = {
            "seconds_median": seconds,
            "seconds_spread": max(point.seconds_spread, abs(seconds - point.seconds_median)),
            "pairs_per_second": size / seconds,
            "peak_memory_bytes": peak and highest,
        }
        points.append(point.model_copy(update=changed))
    return (curve.model_copy(update={"points": tuple(points)}) if remarks else curve), remarks


def unsteady_points(points: Sequence[BatchPoint]) -> dict[int, float]:
    """{batch size: spread over median} of points whose time differs too much from round to round."""
    spreads = {point.batch_size: point.seconds_spread / point.seconds_median for point in points}
    return {size: spread for size, spread in spreads.items() if spread > UNSTEADY}


def off_the_curve(points: Sequence[BatchPoint]) -> dict[int, str]:
    """{batch size: why} of points whose times break the curve's shape, the worst first."""
    return _straightened(points, set())[1]


def impossible_link(link: Link) -> str | None:
    """Why a link's figures cannot be; None if they can."""
    name = f"{link.backend} {link.operation}"
    if link.bandwidth_bytes_per_second > FASTEST_LINK:
        return f"{name} of {link.bandwidth_bytes_per_second / 1e9:.3g} GB/s cannot be"
    if link.latency_seconds < SHORTEST_LATENCY:
        return f"{name} with a latency of {link.latency_seconds:.3g} s cannot be"
    return None


def _straightened(points: Sequence[BatchPoint], unknown: set[int]) -> tuple[list[float], dict[int, str]]:
    """Times to plan with, and why some of them are not the measured ones.

    The point that is furthest off is taken out first: beside a wrong point its neighbours may look wrong as well.

    unknown: batch sizes whose times are not to be used. At least two others remain.
    """
    sizes = np.array([point.batch_size for point in points], dtype=np.float64)
    times = np.array([point.seconds_median for point in points])
    good = [index for index, point in enumerate(points) if point.batch_size not in unknown]
    reasons: dict[int, str] = {}
    while len(good) > 2 and (suspects := _suspects(sizes, times, good)):
        worst = max(suspects)
        reasons[points[worst.point].batch_size] = worst.reason
        good.remove(worst.point)
    known = np.array(good)
    believed = [
        float(times[i]) if i in good else _on_the_line(sizes[known], times[known], size) for i, size in enumerate(sizes)
    ]
    return believed, reasons


class _Suspect(NamedTuple):
    """A point that breaks the curve's shape; the greatest one is the worst."""

    excess: float  # over what the other points allow
    point: int  # its index
    reason: str


def _suspects(sizes: np.ndarray, times: np.ndarray, good: list[int]) -> list[_Suspect]:
    """The points that break the curve's shape."""
    rates = sizes / times
    suspects = []
    for place, index in enumerate(good):
        before, after = good[:place], good[place + 1 :]
        size, shown = round(sizes[index]), f"{rates[index]:.4g} pairs/s at {sizes[index]:.0f} pairs"
        # pairs/s rise, and may fall beyond the knee; they do not fall and rise again.
        if before and after:
            lower = min(rates[before].max(), rates[after].max()) / rates[index]
            if lower > DIP:
                left, right = before[-1], after[0]
                near = f"{rates[left]:.4g} at {sizes[left]:.0f} and {rates[right]:.4g} at {sizes[right]:.0f}"
                suspects.append(_Suspect(lower, index, f"{shown} lie below {near}"))
        # More pairs take no less time. Who contradicts most of the others is wrong.
        earlier = [times[i] / times[index] for i in before if times[i] > FALLING_TIME * times[index]]
        later = [times[index] / times[i] for i in after if times[index] > FALLING_TIME * times[i]]
        if earlier or later:
            why = f"{size} pairs in {times[index]:.4g} s, while {'fewer take longer' if earlier else 'more take less'}"
            suspects.append(_Suspect(len(earlier) + len(later) + max(earlier + later) / 100, index, why))
    last, others = good[-1], np.array(good[:-1])
    expected = _on_the_line(sizes[others], times[others], sizes[last])
    ratio = times[last] / expected
    if OFF_THE_LINE < ratio <= CLIFF and sizes[last] / expected > MATTERS * rates[others].max():
        lead_to = f"the smaller sizes lead to {sizes[last] / expected:.4g}"
        why = f"{rates[last]:.4g} pairs/s at {sizes[last]:.0f} pairs, where {lead_to}"
        suspects.append(_Suspect(float(ratio), last, why))
    return suspects


def _on_the_line(sizes: np.ndarray, times: np.ndarray, size: float) -> float:
    """The time of `size` on the line through the two nearest other points.

    Outside of them, where the line may say nothing: no smaller batch takes longer, no larger one less, nor is either in
    other proportion to its pairs than the nearest.
    """
    right = int(np.clip(np.searchsorted(sizes, size), 1, len(sizes) - 1))
    (low, high), (first, last) = sizes[right - 1 : right + 1], times[right - 1 : right + 1]
    line = float(first + (last - first) * (size - low) / (high - low))
    if sizes[0] <= size <= sizes[-1]:
        return line
    nearest, seconds = (sizes[0], times[0]) if size < sizes[0] else (sizes[-1], times[-1])
    return float(np.clip(line, *sorted((seconds, seconds * size / nearest))))
