"""What hosts without a calibration can do, from what was measured of the others: pure functions.

A host that has the run's curve keeps it. A host without one gets the curve of a calibrated host, scaled by the ratio of
their speeds: by another measurement of both, else by the matrix products that each rank measured as the run started,
else by the figures published for both chips. The first steps of the run correct the estimate.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from lib.plan.calibration import BatchCurve, CurveKey, HostCalibration, nearest_curve, nearest_key
from lib.plan.calibration_checks import all_sound
from lib.plan.run_facts import RankHost
from lib.system.hardware import Machine

SAME_SPEED = 1.15  # of two matmul rates, below which they say nothing of who is faster
REMEDY = "make calibrate there"


def with_estimates(
    hosts: Sequence[RankHost], key: CurveKey, published: Sequence[HostCalibration] = ()
) -> tuple[list[HostCalibration | None], tuple[str, ...]]:
    """Every rank's calibration, with an estimated curve where it has none that others have; and what was estimated.

    Where no host has a curve for `key`, of the key that is most like it. Nothing is estimated where no host has any.
    """
    keys = {curve.key for host in hosts if host.calibration for curve in host.calibration.curves if curve.key}
    if not any(host.calibration and nearest_curve(host.calibration.curves, key) for host in hosts):
        other = nearest_key(keys, key)
        if other is None:
            return [host.calibration for host in hosts], ()
        key = other
    curves = [nearest_curve(host.calibration.curves, key) if host.calibration else None for host in hosts]
    references = [(host, curve) for host, curve in zip(hosts, curves, strict=True) if curve]
    completed: list[HostCalibration | None] = []
    remarks = []
    for host, curve in zip(hosts, curves, strict=True):
        estimate = None if curve else _estimate(host, references, published)
        if estimate is None:
            completed.append(host.calibration)
            continue
        remarks.append(f"host {host.name}: {estimate.source}; calibrate it for better: {REMEDY}")
        before = host.calibration or HostCalibration(
            machine=Machine(host=host.name, device_name=host.device_name or "unknown", device="cpu"), curves=()
        )
        completed.append(before.model_copy(update={"curves": (*before.curves, estimate)}))
    return completed, tuple(dict.fromkeys(remarks))


def needs_rates(hosts: Sequence[str], calibrations: Sequence[HostCalibration | None], key: CurveKey) -> bool:
    """Whether there are unlike hosts, and one of them has no curve to be used for `key`."""
    sound, _ = all_sound(calibrations)
    return len(set(hosts)) > 1 and any(one is None or nearest_curve(one.curves, key) is None for one in sound)


def relative_speeds(hosts: Sequence[RankHost]) -> list[float] | None:
    """The ranks' relative speeds by their matmul rates, where nothing else is known of them.

    Ranks of one host count as equal, and so do hosts that differ by less than two measurements of one host do. None
    where all are equal, or a rate is not known.
    """
    rates: dict[str, list[float]] = {}
    for host in hosts:
        if not host.gflops:
            return None
        rates.setdefault(host.name, []).append(host.gflops)
    by_host = {name: math.exp(sum(map(math.log, of_host)) / len(of_host)) for name, of_host in rates.items()}
    if max(by_host.values()) <= SAME_SPEED * min(by_host.values()):
        return None
    return [by_host[host.name] for host in hosts]


class _Ratio(NamedTuple):
    """A host's speed over another's, and what says so."""

    speed: float
    source: str


def _estimate(
    host: RankHost, references: Sequence[tuple[RankHost, BatchCurve]], published: Sequence[HostCalibration]
) -> BatchCurve | None:
    """A curve for a host without one: that of the reference host with the nearest speed, scaled."""
    for ratio_of in (_by_other_curve, _by_matmul, lambda a, b: _by_chip(a, b, published)):
        ratios = [(ratio, curve) for other, curve in references if (ratio := ratio_of(host, other))]
        if ratios:
            ratio, curve = min(ratios, key=lambda entry: abs(math.log(entry[0].speed)))
            return _scaled(curve, ratio, host.memory_bytes)
    return None


def _by_other_curve(host: RankHost, other: RankHost) -> _Ratio | None:
    """By a curve of another model or method that both hosts have."""
    own, theirs = (
        {curve.key: curve for curve in one.calibration.curves if curve.key} if one.calibration else {}
        for one in (host, other)
    )
    common = min(own.keys() & theirs.keys(), key=str, default=None)
    if common is None:
        return None
    rate, other_rate = (curves[common].best_point.pairs_per_second for curves in (own, theirs))
    source = (
        f"estimated from another measurement ({common}), {rate:.4g} pairs/s against {other_rate:.4g} of {other.name}"
    )
    return _Ratio(rate / other_rate, source)


def _by_matmul(host: RankHost, other: RankHost) -> _Ratio | None:
    """By matrix products: as measured when the run started, else as calibrated."""
    rate, other_rate = host.gflops, other.gflops
    if not rate or not other_rate:
        rate, other_rate = (
            (one.calibration.gflops if one.calibration else None) or one.gflops for one in (host, other)
        )
    if not rate or not other_rate:
        return None
    source = f"estimated from its matrix-product rate, {rate:,.0f} GFLOP/s against {other_rate:,.0f} of {other.name}"
    return _Ratio(rate / other_rate, source)


def _by_chip(host: RankHost, other: RankHost, published: Sequence[HostCalibration]) -> _Ratio | None:
    """By the figures that one source published for both chips."""
    figures = {entry.machine.device_name: entry for entry in published if entry.curves}
    chip, other_chip = (
        one.calibration.machine.device_name if one.calibration else one.device_name for one in (host, other)
    )
    if chip not in figures or other_chip not in figures or figures[chip].source != figures[other_chip].source:
        return None
    rate, other_rate = (figures[name].curves[0].best_point.pairs_per_second for name in (chip, other_chip))
    source = f"estimated from figures published for {chip} and {other_chip}, {rate:.4g} to {other_rate:.4g}"
    return _Ratio(rate / other_rate, source)


def _scaled(curve: BatchCurve, ratio: _Ratio, memory_bytes: int | None) -> BatchCurve:
    """The curve of a host that is so many times as fast and has other memory."""
    speed = ratio.speed
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
        "source": ratio.source,
        "reference_pairs_per_second": None,
        "generation_tokens_per_second": None,
    }
    return curve.model_copy(update=changed)
