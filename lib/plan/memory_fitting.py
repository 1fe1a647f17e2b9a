"""Which micro-batches fit where nothing was measured: curves with peaks from the memory model. Pure functions.

A curve of this very model on this very host has its own peaks. Every other curve compares hosts only: it was measured
with another model, on another host, or published without naming a model. Its peaks are replaced.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from lib.plan.calibration import (
    MEMORY_HEADROOM,
    BatchCurve,
    BatchPoint,
    CurveChoice,
    CurveKey,
    nearest_curve,
)
from lib.plan.memory import MemoryModel, largest_micro_batch
from lib.plan.run_facts import RankHost
from lib.plan.shares import DEFAULT_MICRO_BATCH_SIZE, TooLarge
from lib.system.hardware import Device

CORRECTION = (0.8, 1.5)  # measured over planned: beyond it something else was measured


@dataclass(frozen=True)
class MemoryEstimates:
    """What micro-batches need on each rank's host, by the memory model and what was measured there."""

    model: MemoryModel
    hosts: Sequence[RankHost]  # whose devices are known

    @classmethod
    def of(cls, model: MemoryModel | None, hosts: Sequence[RankHost]) -> MemoryEstimates | None:
        """None where the model's dimensions, or what a host computes on, are not known."""
        return cls(model, hosts) if model and all(host.device for host in hosts) else None

    def needed_bytes(self, rank: int, pairs: int, key: CurveKey) -> int:
        """A micro-batch of so many pairs, as planned, corrected by what a rank's own curve measured."""
        planned = self.model.bytes(pairs, self._device(rank), key.gradient_checkpointing).total
        return round(self._correction(rank, key) * planned)

    def largest(self, rank: int, key: CurveKey) -> int:
        """Pairs of a rank's micro-batches where nothing was measured; 0 where one does not fit."""
        most = min(DEFAULT_MICRO_BATCH_SIZE, self.model.most_pairs(self._device(rank)))
        return largest_micro_batch(lambda pairs: self.needed_bytes(rank, pairs, key), self.room(rank), most)

    def room(self, rank: int) -> float | None:
        """What may be planned for: the limit less its headroom."""
        size = self.hosts[rank].memory_bytes
        return None if size is None else (1 - MEMORY_HEADROOM) * size

    def default_sizes(self, key: CurveKey) -> list[int]:
        """Micro-batches of ranks of which no curve is known.

        Raises:
            TooLarge: one pair does not fit.
        """
        return [self._checked(rank, key) for rank in range(len(self.hosts))]

    def choice(self, choice: CurveChoice, key: CurveKey) -> CurveChoice:
        """The curves, each with this model's peaks; what was measured with this model stays as it is."""
        if choice.curves is None:
            return choice
        return replace(choice, curves=tuple(self._curve(rank, one, key) for rank, one in enumerate(choice.curves)))

    def _device(self, rank: int) -> Device:
        device = self.hosts[rank].device
        assert device is not None
        return device

    def _curve(self, rank: int, curve: BatchCurve, key: CurveKey) -> BatchCurve:
        of_this_model = curve.key is not None and curve.key.at_length(key.sequence_length) == key
        if of_this_model and curve.source == "measured":
            return curve
        size = self._checked(rank, key)
        if of_this_model:  # another host's, scaled: its sizes that fit
            points = [point for point in curve.points if point.batch_size <= size] or [curve.points[0]]
            sizes, rates = zip(*((point.batch_size, point.pairs_per_second) for point in points), strict=True)
        else:  # how fast beside others, whatever the size of a micro-batch
            sizes, rates = (1,), (curve.best_point.pairs_per_second,)
        above = [(max(size, sizes[-1] + 1), rates[-1])]
        return curve.model_copy(
            update={
                "points": tuple(self._point(rank, b, r, key) for b, r in (*zip(sizes, rates, strict=True), *above)),
                "memory_limit_bytes": self._limit(rank, size, key),
            }
        )

    def _limit(self, rank: int, size: int, key: CurveKey) -> int:
        """A limit under which just so many pairs are planned at a time."""
        enough = self.needed_bytes(rank, size, key) / (1 - MEMORY_HEADROOM) * (1 + 1e-6)
        return round(min(enough, self.hosts[rank].memory_bytes or enough))

    def _point(self, rank: int, pairs: int, rate: float, key: CurveKey) -> BatchPoint:
        return BatchPoint(
            batch_size=pairs,
            seconds_median=pairs / rate,
            pairs_per_second=rate,
            peak_memory_bytes=self.needed_bytes(rank, pairs, key),
        )

    def _checked(self, rank: int, key: CurveKey) -> int:
        size = self.largest(rank, key)
        if size:
            return size
        needed, limit = self.needed_bytes(rank, 1, key), self.hosts[rank].memory_bytes or 0
        tried = "" if key.gradient_checkpointing else "model.gradient_checkpointing=true or "
        raise TooLarge(
            f"host {self.hosts[rank].name}: one pair needs {needed / 1e9:.2f} GB by arithmetic, "
            f"but it has {limit / 1e9:.2f} GB less {MEMORY_HEADROOM:.0%} headroom; "
            f"try {tried}a smaller data.max_length, a quantised model with model.method=lora, or leave the host out",
            needed,
        )

    def _correction(self, rank: int, key: CurveKey) -> float:
        """Measured over planned, of this model on this host, with or without checkpointing."""
        calibration = self.hosts[rank].calibration
        for recomputes in (key.gradient_checkpointing, not key.gradient_checkpointing):
            of = key.model_copy(update={"gradient_checkpointing": recomputes})
            curve = nearest_curve(calibration.curves, of) if calibration else None
            if curve is None or curve.key is None or curve.source != "measured":
                continue
            point = curve.points[-1]
            if point.peak_memory_bytes and curve.key.sequence_length >= self.model.rows.seen:
                planned = self.model.bytes(point.batch_size, self._device(rank), recomputes).total
                return min(max(point.peak_memory_bytes / planned, CORRECTION[0]), CORRECTION[1])
        return 1.0
