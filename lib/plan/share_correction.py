"""Curves corrected by measured steps, and how sure the correction is: pure functions.

A step shows how long a rank's micro-batches took together. That is then known for their sizes, and a guess for others.
If the host has become slower, all sizes take longer; if one point of its curve was wrong, the others are right. Which
it was shows as soon as another size has run: so a rank with a surprising time tries another size once.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from statistics import median_low

import numpy as np

from lib.plan.calibration import BatchCurve
from lib.plan.shares import fastest_micro_batches

FIRST_LOOK = 3  # steps of a plan, before its shares are corrected for the first time
LEAST_GAIN = 0.02  # of a step's time, that a correction has to save
STANDARD_ERRORS = 3.0  # of a host's measured speed: a smaller gain may be noise
DRIFT_ERRORS = 4.0  # the same for drift, which is looked for after every step: chance has many goes at it
USUAL_NOISE = 0.05  # of a step's time, where too few steps were seen to know better
WEIGHT_OF_USUAL = 4  # steps
UNCERTAIN = 0.2  # of a point's time, its spread: beyond it the point, not the host, is what surprises
MAIN_PART = 0.2  # of a step's time: micro-batches of a size that took less say nothing
PLAUSIBLE = 3.0  # of a point's time over the curve's, or the reverse
SURPRISE = 1.25  # of a rank's time over what its curve says, from which on another micro-batch size is tried
WORTH_TRYING = 0.9  # of the time that the rank takes now


Factors = Mapping[int, float]  # {micro-batch size that has run: its time over the calibration's}


def is_look(steps: int, corrections: int) -> bool:
    """Whether shares are checked after so many steps of a plan: 3, 6, 12, ...; each correction doubles the first."""
    looks, rest = divmod(steps, FIRST_LOOK)
    return rest == 0 and looks >= 2**corrections and looks & (looks - 1) == 0


def standard_error(jumps: Sequence[np.ndarray], steps: int) -> float:
    """Of the median over so many steps of a rank's log speed relative to the others': the noisiest rank's.

    jumps: float64 [ranks], how far each rank's log speed moved from one step to the next. A lasting change is one jump
    among many, and no noise.
    """
    seen = np.median(np.array(jumps), axis=0).max() / 0.954 if len(jumps) else 0.0  # normally distributed
    variance = (len(jumps) * seen**2 + WEIGHT_OF_USUAL * USUAL_NOISE**2) / (len(jumps) + WEIGHT_OF_USUAL)
    return 1.25 * math.sqrt(variance / steps)


def seen_after(curve: BatchCurve, seen: Factors, sizes: Sequence[int], factor: float, usual: float) -> dict[int, float]:
    """A rank's factors after a step of micro-batches of `sizes` took `factor` times the curve's time.

    What the sizes that have run before do not explain is due to the new ones, and among these to uncertain points of
    the curve. If all have run before and now took another time, the host has changed.
    """
    expected = {size: _seconds(curve, [size]) * list(sizes).count(size) for size in set(sizes)}
    total = sum(expected.values())
    # What is left over after whole micro-batches tells nothing of its own size.
    main = [size for size in expected if expected[size] >= MAIN_PART * total] or [
        max(expected, key=expected.__getitem__)
    ]
    new = [size for size in main if size not in seen]
    if not new:
        before = sum(seen[size] * expected[size] for size in main) / sum(expected[size] for size in main)
        return {size: known * factor / before for size, known in seen.items()}

    def left_to(some: Sequence[int]) -> float:
        """The factor of some sizes, if the others took what was known of them."""
        others = sum(seen.get(size, usual) * expected[size] for size in expected if size not in some)
        return (factor * total - others) / sum(expected[size] for size in some)

    doubtful = [size for size in new if _nearest(curve, size) in _uncertain(curve)]
    if doubtful and 1 / PLAUSIBLE < left_to(doubtful) / usual < PLAUSIBLE:
        return {**seen, **dict.fromkeys(doubtful, left_to(doubtful))}
    known = [size for size in main if size in seen]
    of_new = left_to([size for size in expected if size not in known])
    return {**seen, **dict.fromkeys(new, float(np.clip(of_new, factor / 2, 2 * factor)))}


def corrected(curve: BatchCurve, seen: Factors, usual: float, is_hopeful: bool = False) -> BatchCurve:
    """The curve with the measured times of the sizes that have run, and the others by the host's own factor.

    usual: the factor of a host of which nothing certain was seen; is_hopeful: the other sizes are taken to have it.
    """
    elsewhere = usual if is_hopeful else _factor_of_host(curve, seen, usual)
    return _times(curve, seen, elsewhere)


def tried(curve: BatchCurve, seen: Factors, usual: float, planned: Sequence[int]) -> tuple[int, ...] | None:
    """Other micro-batches for the same pairs, which may well be faster than the planned ones; None if there are none.

    Only for a rank whose every size that has run surprised.
    """
    if not planned or not seen or min(seen.values()) < SURPRISE * usual:
        return None
    hopeful = corrected(curve, seen, usual, is_hopeful=True)
    sizes = fastest_micro_batches(hopeful, sum(planned))
    is_new = not set(sizes) <= seen.keys()
    return sizes if is_new and _seconds(hopeful, sizes) < WORTH_TRYING * _seconds(hopeful, planned) else None


def _factor_of_host(curve: BatchCurve, seen: Factors, usual: float) -> float:
    """Of sizes that have not run: as of those that have, or, where these alone were wrong in the curve, `usual`."""
    uncertain = _uncertain(curve)
    certain = [factor for size, factor in seen.items() if _nearest(curve, size) not in uncertain]
    if not certain:
        return usual
    of_host = median_low(certain)
    surprises = not 1 / SURPRISE < of_host / usual < SURPRISE
    # One wrong point makes a curve rough, and its true time makes it smooth; a slower host does not change the shape.
    is_point = surprises and _roughness(_times(curve, seen, usual)) < _roughness(_times(curve, seen, of_host))
    return usual if is_point else of_host


def _times(curve: BatchCurve, seen: Factors, elsewhere: float) -> BatchCurve:
    """The curve with each size's factor."""
    points = []
    for point in curve.points:
        # A size between two points has its time from both, the nearer one above all.
        near = [factor for size, factor in seen.items() if _nearest(curve, size) == point.batch_size]
        factor = seen.get(point.batch_size) or (median_low(near) if near else elsewhere)
        changed = {
            "seconds_median": point.seconds_median * factor,
            "seconds_spread": point.seconds_spread * factor,
            "pairs_per_second": point.pairs_per_second / factor,
        }
        points.append(point.model_copy(update=changed))
    overhead = curve.step_overhead_seconds * elsewhere
    return curve.model_copy(update={"points": tuple(points), "step_overhead_seconds": overhead})


def _uncertain(curve: BatchCurve) -> set[int]:
    """Sizes whose times differed much, or that were put in place of something else (lib/plan/calibration_checks.py)."""
    return {point.batch_size for point in curve.points if point.seconds_spread > UNCERTAIN * point.seconds_median}


def _nearest(curve: BatchCurve, size: int) -> int:
    """The measured size that is nearest, by ratio."""
    return min((point.batch_size for point in curve.points), key=lambda known: abs(math.log(known / size)))


def _roughness(curve: BatchCurve) -> float:
    """How much the slope of log pairs/s over log batch size changes from point to point."""
    sizes = np.log([point.batch_size for point in curve.points])
    slopes = np.diff(np.log([point.pairs_per_second for point in curve.points])) / np.diff(sizes)
    return float(np.abs(np.diff(slopes)).sum())


def _seconds(curve: BatchCurve, sizes: Sequence[int]) -> float:
    return float(curve.seconds(np.array(sizes)).sum())
