"""The plan of every step: the first from every host's calibration, others when measured times ask for them.

All ranks see the same times (they travel with the gradients), so all take the same decision at the same step, without
a message. Batches are prefetched some steps ahead: a new plan begins at the first step whose batches are not begun.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from lib.config.settings import PlanSettings
from lib.plan.calibration import BatchCurve
from lib.plan.plan import ClusterPlan, plan_cluster
from lib.plan.shares import DEFAULT_MICRO_BATCH_SIZE

REMEMBERED_STEPS = 192  # by which noise is known
LOOK_STEPS = 3  # between two looks at the measured speeds
WINDOW_STEPS = 9  # of a plan, the last ones: speeds are their medians
LEAST_SECONDS = 2.0  # that a new plan has to save in the rest of the run
LEAST_GAIN = 0.02  # of a step's time, that a new plan has to save
DRIFT = 0.05  # the same of equal ranks on one machine
STANDARD_ERRORS = 4.0  # of a host's measured speed: a smaller gain may be noise
USUAL_NOISE = 0.05  # of a step's time, where too few steps were seen to know better
WEIGHT_OF_USUAL = 4  # steps


class Schedule:
    """The plan of every step. settings: a user's shares stand, whatever is measured. lead: a plan that is decided after
    step s begins at s + lead, whose batches are not begun. steps: of the whole run."""

    def __init__(self, first: ClusterPlan, settings: PlanSettings, lead: int, steps: int):
        self.plans = [(1, first)]  # each with the first step that it holds for, counted from 1
        self.settings, self.lead, self.steps = settings, lead, steps
        self.is_open = settings.replan and settings.shares is None and len(first.workers) > 1
        # Equal ranks of one machine without a curve stay equal, and their bits the same, unless they drift far.
        self.are_equal = not any(first.curves) and len({rank.host for rank in first.ranks}) == 1
        self._speeds = _Speeds()

    def at(self, step: int) -> ClusterPlan:
        """The plan of a step."""
        return next(plan for first, plan in reversed(self.plans) if first <= step)

    def observe(self, step: int, tokens: Sequence[float], compute_seconds: Sequence[float]) -> ClusterPlan | None:
        """A new plan, if the step's tokens (or what costs as much) and seconds by rank ask for one; else None. Every
        few steps the plan that is best at the median speeds is taken, if it saves more than noise explains. So the
        first steps correct the shares, whatever the calibration said, and later ones follow what changed."""
        (first, plan), speeds = self.plans[-1], self._speeds
        # A plan's first step compiles and allocates.
        if not self.is_open or step <= first or not speeds.add(plan, tokens, compute_seconds):
            return None
        if speeds.observed % LOOK_STEPS or (self.are_equal and speeds.observed < WINDOW_STEPS):
            return None
        new = self._plan_again(plan, step)
        return self._begin(step, new) if new is not None else None

    def halve(self, step: int, ranks: Sequence[int], gradient_checkpointing: bool = False) -> ClusterPlan:
        """The plan from step + lead on, once these workers ran out of memory at `step`: half the micro-batch for them.
        Batches up to there are cut by each rank (`most_at`). Later plans and resumes keep to it."""
        plan = self.plans[-1][1]
        hit = range(len(plan.ranks)) if plan.divides_model else ranks
        if gradient_checkpointing:
            new, why = replace(plan, gradient_checkpointing=True), "gradient checkpointing is on"
        else:
            new = plan.halved(hit)
            why = f"micro-batches of at most {', '.join(str(new.ranks[rank].max_micro_batch_size) for rank in ranks)}"
        names = ", ".join(f"rank {rank} ({plan.ranks[rank].host})" for rank in hit)
        reason = f"{names} ran out of memory in step {step}: {why}"
        return self._begin(step, replace(new, reason=reason, warnings=(), predictions=()))

    def _begin(self, step: int, new: ClusterPlan) -> ClusterPlan:
        self._speeds.forget_plan()
        self.plans.append((step + self.lead, new))
        return new

    def most_at(self, worker: int) -> int | None:
        """The largest micro-batch that memory leaves to a worker, from now on, whatever the plan of a step says."""
        return self.plans[-1][1].workers[worker].max_micro_batch_size

    def _plan_again(self, plan: ClusterPlan, step: int) -> ClusterPlan | None:
        """The best plan at the median speeds, if it is worth a change."""
        rates = self._speeds.pairs_per_second()
        has_curves, sizes = None not in plan.curves, self.settings.micro_batch_sizes
        if has_curves:
            each = zip(plan.ranks, plan.curves, rates, [r.predicted_compute_seconds for r in plan.ranks], strict=True)
            curves = [c.slowed(rank.share / rate / t if t else 1.0) for rank, c, rate, t in each if c]
        else:  # a pair takes what it took, in micro-batches no larger than those that ran
            sizes = tuple(max(rank.micro_batch_sizes, default=DEFAULT_MICRO_BATCH_SIZE) for rank in plan.ranks)
            curves = [BatchCurve.from_rates({1: r, max(size, 2): r}) for r, size in zip(rates, sizes, strict=True)]
        # A rank that is left out stays in the world and its collectives: leaving it out saves no sync.
        hosts = [rank.host for rank in plan.ranks]
        new = plan_cluster(hosts, plan.global_batch_size, micro_batch_sizes=sizes, curves=curves)
        then = new.predicted_step_seconds or 0.0
        overheads = [curve.step_overhead_seconds for curve in curves]
        now = max(share / rate + o for share, rate, o in zip(plan.shares, rates, overheads, strict=True) if share)
        least = max(DRIFT if self.are_equal else LEAST_GAIN, STANDARD_ERRORS * self._speeds.standard_error())
        if new.micro_batch_sizes == plan.micro_batch_sizes or now <= then * (1 + least):
            return None
        # Short runs end before a change pays, and their steps are so short that mere noise looks like drift.
        if (now - then) * (self.steps - step - self.lead + 1) < LEAST_SECONDS:
            return None
        # Speeds alone are what the summary's efficiency compares with; they were not measured again.
        ranks = [
            replace(a, solo_pairs_per_second=b.solo_pairs_per_second, curve=a.curve if has_curves else b.curve)
            for a, b in zip(new.ranks, plan.ranks, strict=True)
        ]
        changed = replace(plan, ranks=tuple(ranks), warnings=(), predictions=())
        changed = changed.within([rank.max_micro_batch_size for rank in plan.ranks])
        after = changed.predicted_step_seconds if has_curves else then + plan.sync_seconds
        shown = ", ".join(f"rank {r.rank} ({r.host}) {rates[r.rank]:.4g}" for r in plan.ranks[:8] if r.share)
        times = f"{now + plan.sync_seconds:.4g} s a step in the old shares, {after:.4g} s in the new"
        return replace(changed, reason=f"measured up to step {step}: {times}; pairs/s of {shown}")

    # ---- In a checkpoint

    def state(self, step: int) -> dict[str, object]:
        """What a run that is resumed after `step` needs: the plan in force, and any to come."""
        current = max((first for first, _ in self.plans if first <= step + 1), default=self.plans[0][0])
        plans = [
            {
                "first_step": first,
                "micro_batch_sizes": [list(rank.micro_batch_sizes) for rank in plan.ranks],
                "max_micro_batch_sizes": [rank.max_micro_batch_size for rank in plan.ranks],
                "gradient_checkpointing": plan.gradient_checkpointing,
            }
            for first, plan in self.plans
            if first >= current
        ]
        return {**self._identity(), "plans": plans}

    def restore(self, state: Mapping[str, Any]) -> bool:
        """Takes up a checkpoint's plans, unless hosts or settings are others now; returns whether it did."""
        if {**state, "plans": None} != {**self._identity(), "plans": None}:
            return False
        first, self.plans = self.plans[0][1], []
        for stored in state["plans"]:
            each = zip(first.ranks, map(tuple, stored["micro_batch_sizes"]), strict=True)
            ranks = tuple(replace(rank, share=sum(sizes), micro_batch_sizes=sizes) for rank, sizes in each)
            plan = first
            if ranks != first.ranks:
                reason = "as the checkpoint has it"
                plan = replace(first, ranks=ranks, reason=reason, warnings=(), predictions=())
            plan = plan.within(stored["max_micro_batch_sizes"])
            checkpointing = first.gradient_checkpointing or stored["gradient_checkpointing"]
            self.plans.append((stored["first_step"], replace(plan, gradient_checkpointing=checkpointing)))
        return True

    def _identity(self) -> dict[str, object]:
        """What a checkpoint's plans depend on."""
        plan = self.plans[0][1]
        settings = self.settings.model_dump(mode="json", exclude={"calibration_dir", "require_calibration"})
        identity = {"strategy": plan.strategy, "hosts": [rank.host for rank in plan.ranks], "settings": settings}
        return {**identity, "global_batch_size": plan.global_batch_size}


class _Speeds:
    """Measured speeds of the plan in force, in tokens a second (long rows are no slowdown), and how much they vary."""

    def __init__(self) -> None:
        self._jumps: deque[np.ndarray] = deque(maxlen=REMEMBERED_STEPS)  # from step to step, of relative log speeds
        self._paces: dict[int, float] = {}  # pairs/s of ranks, when they last worked
        self.forget_plan()

    def forget_plan(self) -> None:
        """Steps of a plan that is no longer in force; how much they vary is remembered."""
        self.observed = 0  # steps of the plan in force
        self.of_ranks: deque[np.ndarray] = deque(maxlen=WINDOW_STEPS)  # tokens/s
        self._tokens_a_pair: deque[float] = deque(maxlen=REMEMBERED_STEPS)

    def add(self, plan: ClusterPlan, tokens: Sequence[float], compute_seconds: Sequence[float]) -> bool:
        """Takes in a step; False where it cannot be compared: a rank with a share had no rows, or no time."""
        shares, counts = np.array(plan.shares, dtype=np.float64), np.array(tokens, dtype=np.float64)
        seconds, worked = np.array(compute_seconds, dtype=np.float64), shares > 0
        if not ((counts[worked] > 0).all() and (seconds[worked] > 0).all() and np.isfinite(seconds).all()):
            return False
        speeds = np.divide(counts, seconds, out=np.zeros_like(counts), where=worked)
        if self.of_ranks:
            moved = np.log(speeds[worked] / self.of_ranks[-1][worked])
            self._jumps.append(np.zeros(len(speeds)))
            self._jumps[-1][worked] = np.abs(moved - moved.mean())
        self.observed += 1
        self.of_ranks.append(speeds)
        self._tokens_a_pair.append(counts.sum() / plan.global_batch_size)
        return True

    def pairs_per_second(self) -> list[float]:
        """Medians of the last steps; of ranks without work, what they had when they last worked, else the median."""
        relative = np.median([speeds / speeds.sum() for speeds in self.of_ranks], axis=0)
        whole = np.median([speeds.sum() for speeds in self.of_ranks]) / np.median(self._tokens_a_pair)
        rates = relative / relative.sum() * whole
        self._paces |= {rank: float(rate) for rank, rate in enumerate(rates) if rate}
        usual = float(np.median(rates[rates > 0]))
        return [float(rate) or self._paces.get(rank, usual) for rank, rate in enumerate(rates)]

    def standard_error(self) -> float:
        """Of the median of a rank's log speed relative to the others': the noisiest rank's. A lasting change is one
        jump among many, and no noise."""
        count = len(self._jumps)
        seen = np.median(np.array(self._jumps), axis=0).max() / 0.954 if count else 0.0  # normally distributed
        variance = (count * seen**2 + WEIGHT_OF_USUAL * USUAL_NOISE**2) / (count + WEIGHT_OF_USUAL)
        return float(1.25 * math.sqrt(variance / len(self.of_ranks)))
