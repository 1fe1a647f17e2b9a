"""What hosts without a calibration can do, from what was measured of the others: pure functions.

A host that has the curve of a run keeps it whatever the others lack. Of a host that has none the curve is a calibrated
host's, as many times slower as another measurement of both says, else the products of matrices that each rank measured as
the run started, else the figures published for both chips. The first steps of the run correct what is wrong with it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from lib.plan.curve_validation import all_sound
from lib.plan.curves import BatchCurve, CurveKey, HostCalibration, nearest_curve, nearest_key
from lib.system.hardware import Machine

SAME_SPEED = 1.15  # of two matmul rates, below which they say nothing of who is faster
REMEDY = "make calibrate there"


@dataclass(frozen=True)
class Known:
    """What is known of one rank's host."""

    host: str
    calibration: HostCalibration | None
    device_name: str | None = None
    gflops: float | None = None  # measured as the run started
    memory_bytes: int | None = None  # that the rank may use


def with_estimates(
    known: Sequence[Known], key: CurveKey, published: Sequence[HostCalibration] = ()
) -> tuple[list[HostCalibration | None], tuple[str, ...]]:
    """Every rank's calibration, with an estimated curve where it has none that others have; and what was estimated.

    Where no host has a curve for `key`, of the key that is most like it. Nothing is estimated where no host has any.
    """
    keys = {curve.key for one in known if one.calibration for curve in one.calibration.curves if curve.key}
    if not any(one.calibration and nearest_curve(one.calibration.curves, key) for one in known):
        other = nearest_key(keys, key)
        if other is None:
            return [one.calibration for one in known], ()
        key = other
    curves = [nearest_curve(one.calibration.curves, key) if one.calibration else None for one in known]
    references = [(one, curve) for one, curve in zip(known, curves, strict=True) if curve]
    completed: list[HostCalibration | None] = []
    remarks = []
    for one, curve in zip(known, curves, strict=True):
        found = None if curve else _estimate(one, references, key, published)
        if found is None:
            completed.append(one.calibration)
            continue
        estimate, how = found
        remarks.append(f"host {one.host}: {how}; calibrate it for better: {REMEDY}")
        before = one.calibration or HostCalibration(
            machine=Machine(host=one.host, device_name=one.device_name or "unknown", device="cpu"), curves=()
        )
        completed.append(before.model_copy(update={"curves": (*before.curves, estimate)}))
    return completed, tuple(dict.fromkeys(remarks))


def needs_rates(hosts: Sequence[str], calibrations: Sequence[HostCalibration | None], key: CurveKey) -> bool:
    """Whether there are unlike hosts, and one of them has no curve to be used for `key`."""
    sound, _ = all_sound(calibrations)
    return len(set(hosts)) > 1 and any(one is None or nearest_curve(one.curves, key) is None for one in sound)


def relative_speeds(known: Sequence[Known]) -> list[float] | None:
    """How fast the ranks are beside each other by their matmul rates, where nothing else is known of them.

    Ranks of one host count as equal, and so do hosts that differ by less than two measurements of one. None where all are
    equal, or a rate is not known.
    """
    rates: dict[str, list[float]] = {}
    for one in known:
        if not one.gflops:
            return None
        rates.setdefault(one.host, []).append(one.gflops)
    by_host = {host: math.exp(sum(map(math.log, of_host)) / len(of_host)) for host, of_host in rates.items()}
    if max(by_host.values()) <= SAME_SPEED * min(by_host.values()):
        return None
    return [by_host[one.host] for one in known]


def _estimate(
    one: Known, references: Sequence[tuple[Known, BatchCurve]], key: CurveKey, published: Sequence[HostCalibration]
) -> tuple[BatchCurve, str] | None:
    """A curve for a host without one, and what it rests on."""
    for ratio_of in (_by_other_curve, _by_matmul, lambda a, b: _by_chip(a, b, published)):
        ratios = [
            (ratio, how, curve)
            for other, curve in references
            if (found := ratio_of(one, other))
            for ratio, how in [found]
        ]
        if ratios:  # the host that is most like it
            speed, how, curve = min(ratios, key=lambda entry: abs(math.log(entry[0])))
            return _scaled(curve, speed, one.memory_bytes, how), how
    return None


def _by_other_curve(one: Known, other: Known) -> tuple[float, str] | None:
    """Speed relative to the other host, by a curve of something else that both have."""
    mine, theirs = ({c.key: c for c in k.calibration.curves if c.key} if k.calibration else {} for k in (one, other))
    common = min(mine.keys() & theirs.keys(), key=str, default=None)
    if common is None:
        return None
    rates = [curves[common].best_point.pairs_per_second for curves in (mine, theirs)]
    return rates[0] / rates[1], (
        f"estimated from another measurement ({common}), {rates[0]:.4g} pairs/s against {rates[1]:.4g} of {other.host}"
    )


def _by_matmul(one: Known, other: Known) -> tuple[float, str] | None:
    mine, theirs = one.gflops, other.gflops
    if not mine or not theirs:
        mine, theirs = ((k.calibration.gflops if k.calibration else None) or k.gflops for k in (one, other))
    if not mine or not theirs:
        return None
    return mine / theirs, (
        f"estimated from its matrix-product rate, {mine:,.0f} GFLOP/s against {theirs:,.0f} of {other.host}"
    )


def _by_chip(one: Known, other: Known, published: Sequence[HostCalibration]) -> tuple[float, str] | None:
    figures = {entry.machine.device_name: entry for entry in published if entry.curves}
    chips = [k.calibration.machine.device_name if k.calibration else k.device_name for k in (one, other)]
    found = [figures[chip] for chip in chips if chip in figures]
    if len(found) < 2 or found[0].source != found[1].source:
        return None
    rates = [entry.curves[0].best_point.pairs_per_second for entry in found]
    return rates[0] / rates[
        1
    ], f"estimated from figures published for {chips[0]} and {chips[1]}, {rates[0]:.4g} to {rates[1]:.4g}"


def _scaled(curve: BatchCurve, speed: float, memory_bytes: int | None, how: str) -> BatchCurve:
    """The curve of a host that is `speed` times as fast and has other memory."""
    points = [
        point.model_copy(
            update={
                "seconds_median": point.seconds_median / speed,
                "seconds_spread": point.seconds_spread / speed,
                "pairs_per_second": point.pairs_per_second * speed,
            }
        )
        for point in curve.points
    ]
    changed = {
        "points": tuple(points),
        "step_overhead_seconds": curve.step_overhead_seconds / speed,
        "memory_limit_bytes": memory_bytes or curve.memory_limit_bytes,
        "source": how,
        "reference_pairs_per_second": None,
        "generation_tokens_per_second": None,
    }
    return curve.model_copy(update=changed)
