"""The plan of every step: the first from every host's calibration, others when measured times ask for them.

All ranks see the same times (they travel with the gradients), so all take the same decision at the same
step, without a message. Batches are made some steps ahead: a new plan begins at the first step whose batches nobody has
begun to make.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple, NotRequired, TypedDict, cast

import numpy as np

from lib.config.schema import PlanSettings
from lib.plan import memory_ceilings, share_correction
from lib.plan.calibration import BatchCurve
from lib.plan.cluster_plan import ClusterPlan
from lib.plan.divide_work import plan_cluster, with_micro_batches
from lib.plan.shares import DEFAULT_MICRO_BATCH_SIZE

REMEMBERED_STEPS = 192  # of a plan: speeds are their medians


class PlannedSteps(NamedTuple):
    """A plan, and the first step that it holds for, counted from 1."""

    first_step: int
    plan: ClusterPlan


class _KeptPlan(TypedDict):
    """A plan in a checkpoint; older checkpoints lack the last two fields."""

    first_step: int
    micro_batch_sizes: list[list[int]]
    max_micro_batch_sizes: NotRequired[list[int | None]]
    gradient_checkpointing: NotRequired[bool]


@dataclass(frozen=True)
class _Candidate:
    """A plan, its step's time, what is then known of every rank's micro-batch sizes, and who tries another size."""

    plan: ClusterPlan
    step_seconds: float
    factors: list[share_correction.Factors]
    tries: set[int]


class Schedule:
    """The plan of every step.

    Args:
        first: the plan that the run starts with.
        settings: threshold and patience; a user's shares stand, whatever is measured.
        lead: a plan that is decided after step s begins at step s + lead, which nobody has begun to make.
        steps: of the whole run.
    """

    def __init__(self, first: ClusterPlan, settings: PlanSettings, lead: int, steps: int):
        self.plans = [PlannedSteps(1, first)]
        self.settings, self.lead, self.steps = settings, lead, steps
        self.is_open = settings.replan and settings.shares is None and len(first.workers) > 1
        self.remarks: list[str] = []  # what the times say of shares that stand whatever they say; the caller takes them
        self._is_watched = len(first.workers) > 1
        # Equal ranks of one machine that nobody measured stay equal, and their bits the same, unless they drift far.
        has_basis = any(first.curves) or len({rank.host for rank in first.ranks}) > 1
        self._corrects = self.is_open and has_basis
        self._calibrated_curves = first.curves
        self._factors: list[share_correction.Factors] = [{} for _ in first.ranks]  # of every rank's sizes that have run
        self._tried: set[int] = set()  # ranks that were given another micro-batch size to see how fast it is
        self._paces: dict[int, float] = {}  # pairs/s of ranks, when they last worked
        self._corrections = 0
        self._tokens_a_pair = 0.0  # when speeds were looked at first
        self._observed = 0  # steps of the plan in force
        self._speeds: deque[np.ndarray] = deque(maxlen=REMEMBERED_STEPS)  # tokens/s by rank, of these
        self._costs: deque[float] = deque(maxlen=REMEMBERED_STEPS)  # tokens a pair
        self._excess: deque[float] = deque(maxlen=settings.replan_steps)  # slowest over balanced, less one
        self._jumps: deque[np.ndarray] = deque(maxlen=REMEMBERED_STEPS)  # from step to step, of relative log speeds

    def at(self, step: int) -> ClusterPlan:
        """The plan of a step."""
        return next(plan for first, plan in reversed(self.plans) if first <= step)

    def observe(self, step: int, tokens: Sequence[float], compute_seconds: Sequence[float]) -> ClusterPlan | None:
        """A new plan, if the step's tokens (or what costs as much) and seconds by rank ask for one; else None.

        A host's speed is its tokens a second, so that longer rows are no slowdown. The slowest rank ends the step.

        The first steps correct the shares, whatever the calibration said: after 3, 6, 12, ... steps of a plan, one is
        taken that is shorter at the median speeds by more than their noise. Later, drift is corrected: another plan is
        taken if in `replan_steps` steps in a row the slowest rank took more than `replan_threshold` longer than the
        same work spread evenly over the speeds, and the other plan is that much shorter.
        """
        if not self._is_watched:
            return None
        first, plan = self.plans[-1]
        shares = np.array(plan.shares, dtype=np.float64)
        worked = shares > 0
        # A plan's first step compiles and allocates; a step without some rank's rows says too little.
        counts, seconds = np.array(tokens, dtype=np.float64), np.array(compute_seconds, dtype=np.float64)
        comparable = (
            worked.any() and (counts[worked] > 0).all() and (seconds[worked] > 0).all() and np.isfinite(seconds).all()
        )
        if step <= first or not comparable:
            return None
        self._take_in(plan, counts, seconds, worked)
        other = None
        if self._corrects and share_correction.is_look(self._observed, self._corrections):
            other = self._plan_again(
                plan, step, len(self._speeds), share_correction.LEAST_GAIN, share_correction.STANDARD_ERRORS
            )
            self._corrections += other is not None
        patience, threshold = self.settings.replan_steps, self.settings.replan_threshold
        if other is None and len(self._excess) == patience and min(self._excess) > threshold:
            other = self._plan_again(plan, step, patience, threshold, share_correction.DRIFT_ERRORS)
            self._excess.clear()
        if other is None:
            return None
        if not self.is_open:
            fixed = "plan.shares" if self.settings.shares is not None else "plan.replan=false"
            self.remarks.append(f"{fixed} keeps shares {plan.shares}, where {other.shares} would do: {other.reason}")
            self._is_watched = False  # once is enough
            return None
        self._forget()
        self.plans.append(PlannedSteps(step + self.lead, other))
        return other

    def halve(self, step: int, ranks: Sequence[int], gradient_checkpointing: bool = False) -> ClusterPlan:
        """The plan from step + lead on, once these workers ran out of memory at `step`: half the micro-batch for them.

        What is made already, up to there, each rank cuts by itself (`most_at`). Later plans and resumes keep to it.
        """
        plan = self.plans[-1].plan
        hit = range(len(plan.ranks)) if plan.divides_model else ranks
        if gradient_checkpointing:
            new = replace(plan, gradient_checkpointing=True)
            why = "gradient checkpointing is on"
        else:
            new = memory_ceilings.halved(plan, hit)
            why = f"micro-batches of at most {', '.join(str(new.ranks[rank].max_micro_batch_size) for rank in ranks)}"
        names = ", ".join(f"rank {rank} ({plan.ranks[rank].host})" for rank in hit)
        new = replace(new, reason=f"{names} ran out of memory in step {step}: {why}", warnings=(), predictions=())
        self.plans.append(PlannedSteps(step + self.lead, new))
        self._forget()
        return new

    def move(self, moved: ClusterPlan) -> None:
        """Takes over another cut of a pipeline; what micro-batches there are stays as it is."""
        self.plans = [
            PlannedSteps(
                first,
                replace(
                    plan,
                    stages=moved.stages,
                    predictions=moved.predictions,
                    reason=moved.reason,
                    warnings=moved.warnings,
                    divided_instead=moved.divided_instead,
                    moved_at=moved.moved_at,
                ),
            )
            for first, plan in self.plans
        ]

    def most_at(self, worker: int) -> int | None:
        """The largest micro-batch that memory leaves to a worker, from now on, whatever the plan of a step says."""
        return self.plans[-1].plan.workers[worker].max_micro_batch_size

    def _take_in(self, plan: ClusterPlan, counts: np.ndarray, seconds: np.ndarray, worked: np.ndarray) -> None:
        """One step's speeds. counts: tokens; worked: which ranks had any."""
        shares = np.array(plan.shares, dtype=np.float64)
        speeds = np.divide(counts, seconds, out=np.zeros_like(counts), where=worked)
        if self._speeds:
            moved = np.log(speeds[worked] / self._speeds[-1][worked])
            jump = np.zeros(len(speeds))
            jump[worked] = np.abs(moved - moved.mean())
            self._jumps.append(jump)
        self._observed += 1
        self._speeds.append(speeds)
        self._costs.append(counts.sum() / plan.global_batch_size)
        self._excess.append((shares[worked] / speeds[worked]).max() * speeds.sum() / plan.global_batch_size - 1)

    def _plan_again(
        self, plan: ClusterPlan, step: int, window: int, least_gain: float, errors: float
    ) -> ClusterPlan | None:
        """The best plan at the medians of the last `window` steps, if it is worth a change."""
        speeds, costs = list(self._speeds)[-window:], list(self._costs)[-window:]
        relative = np.median([of_ranks / of_ranks.sum() for of_ranks in speeds], axis=0)
        # One length of rows for the whole run, or the times of sizes that ran at different steps would not compare.
        self._tokens_a_pair = self._tokens_a_pair or float(np.median(costs))
        pairs_per_second = float(np.median([of_ranks.sum() for of_ranks in speeds])) / self._tokens_a_pair
        rates = relative / relative.sum() * pairs_per_second
        factors = self._slowdowns(plan, rates)
        better = self._at_pace(plan, rates) if None in plan.curves else self._corrected_plan(plan, factors)
        other, then = better.plan, better.step_seconds
        overheads = [curve.step_overhead_seconds if curve else 0.0 for curve in other.curves]
        now = max(plan.shares[rank] / rate + overheads[rank] for rank, rate in enumerate(rates) if rate)
        noise = errors * share_correction.standard_error(self._jumps, len(speeds))
        self._factors = better.factors
        if other.micro_batch_sizes == plan.micro_batch_sizes or now <= then * (1 + max(least_gain, noise)):
            return None
        # Short runs end before a change pays, and their steps are so short that mere noise looks like drift.
        if (now - then) * (self.steps - step - self.lead + 1) < self.settings.replan_seconds:
            return None
        self._tried |= better.tries
        self._paces |= {rank: float(rate) for rank, rate in enumerate(rates) if rate}
        reason = (
            f"measured up to step {step}: {now:.4g} s a step in the old shares, {then:.4g} s in the new; "
            f"pairs/s of {_most_changed(plan, rates, factors)}"
        )
        # Speeds alone are what the summary's efficiency compares with; they were not measured again.
        ranks = [
            replace(new, solo_pairs_per_second=old.solo_pairs_per_second)
            for new, old in zip(other.ranks, plan.ranks, strict=True)
        ]
        changed = replace(
            plan,
            ranks=tuple(ranks),
            curves=other.curves if None not in plan.curves else plan.curves,
            reason=reason,
            warnings=other.warnings,
            predictions=(),
        )
        return memory_ceilings.within(changed, [rank.max_micro_batch_size for rank in plan.ranks])

    def _slowdowns(self, plan: ClusterPlan, rates: np.ndarray) -> dict[int, float]:
        """Every working rank's time over its calibrated curve's; seconds a pair where there is none."""
        slowdowns = {}
        for rank, curve in zip(plan.ranks, self._calibrated_curves, strict=True):
            if rank.share and rates[rank.rank]:
                expected = float(curve.seconds(np.array(rank.micro_batch_sizes)).sum()) if curve else 1.0 * rank.share
                slowdowns[rank.rank] = float(rank.share / rates[rank.rank] / expected)
        return slowdowns

    def _corrected_plan(self, plan: ClusterPlan, slowdowns: Mapping[int, float]) -> _Candidate:
        """By the calibrated curves, corrected by what was seen; where a rank surprises, with micro-batches to try."""
        # Whatever slows all of them, longer rows or curves of another model, is nobody's surprise.
        usual = min(slowdowns.values())
        if plan.calibrated:
            usual = min(1.0, usual)
        measured = [curve for curve in self._calibrated_curves if curve is not None]
        factors = [
            share_correction.seen_after(
                curve, self._factors[rank.rank], rank.micro_batch_sizes, slowdowns[rank.rank], usual
            )
            if rank.rank in slowdowns
            else self._factors[rank.rank]
            for rank, curve in zip(plan.ranks, measured, strict=True)
        ]
        curves = [share_correction.corrected(curve, seen, usual) for curve, seen in zip(measured, factors, strict=True)]
        fixed = list(self.settings.micro_batch_sizes) if self.settings.micro_batch_sizes else None
        # A rank that is left out stays in the world and its collectives: leaving it out saves no sync.
        other = plan_cluster(_hosts(plan), plan.global_batch_size, micro_batch_sizes=fixed, curves=curves)
        sizes, tries = list(other.micro_batch_sizes), set[int]()
        for rank in slowdowns if fixed is None else ():
            before = self._factors[rank].values()
            if rank in self._tried or min(before, default=np.inf) < share_correction.SURPRISE * usual:
                continue  # what was no surprise before is a host that has changed
            attempt = share_correction.tried(measured[rank], factors[rank], usual, sizes[rank])
            if attempt:
                sizes[rank] = attempt
                tries.add(rank)
        hopes = [
            share_correction.corrected(curve, seen, usual, is_hopeful=True) if rank in tries else curves[rank]
            for rank, (curve, seen) in enumerate(zip(measured, factors, strict=True))
        ]
        seconds = [
            float(c.seconds(np.array(s)).sum()) + c.step_overhead_seconds for c, s in zip(hopes, sizes, strict=True)
        ]
        if tries:
            other = replace(with_micro_batches(other, sizes, other.reason), warnings=other.warnings)
        working = [second for second, share in zip(seconds, other.shares, strict=True) if share]
        return _Candidate(other, max(working), factors, tries)

    def _at_pace(self, plan: ClusterPlan, rates: np.ndarray) -> _Candidate:
        """Where nothing was calibrated a pair takes what it took, in micro-batches no larger than those that ran."""
        sizes = [max(rank.micro_batch_sizes, default=DEFAULT_MICRO_BATCH_SIZE) for rank in plan.ranks]
        usual = float(np.median(rates[rates > 0]))
        curves = [
            BatchCurve.from_rates({1: pace, max(size, 2): pace})
            for rank, (rate, size) in enumerate(zip(rates, sizes, strict=True))
            for pace in [float(rate) or self._paces.get(rank, usual)]
        ]
        other = plan_cluster(_hosts(plan), plan.global_batch_size, micro_batch_sizes=sizes, curves=curves)
        return _Candidate(other, other.predicted_step_seconds or 0.0, self._factors, set())

    def _forget(self) -> None:
        """The steps of a plan that is no longer in force; how much they vary is remembered."""
        self._observed = 0
        for window in (self._speeds, self._costs, self._excess):
            window.clear()

    # ---- In a checkpoint

    def state(self, step: int) -> dict[str, object]:
        """What a run that is resumed after `step` needs: the plan in force, and any to come."""
        current = max((first for first, _ in self.plans if first <= step + 1), default=self.plans[0].first_step)
        plans = [
            _KeptPlan(
                first_step=first,
                micro_batch_sizes=[list(rank.micro_batch_sizes) for rank in plan.ranks],
                max_micro_batch_sizes=[rank.max_micro_batch_size for rank in plan.ranks],
                gradient_checkpointing=plan.gradient_checkpointing,
            )
            for first, plan in self.plans
            if first >= current
        ]
        return {**self._identity(), "plans": plans}

    def restore(self, state: Mapping[str, object]) -> bool:
        """Takes up a checkpoint's plans, unless hosts or settings are others now; returns whether it did."""
        if {**state, "plans": None} != {**self._identity(), "plans": None}:
            return False
        first = self.plans[0].plan
        self.plans = []
        for kept in cast(list[_KeptPlan], state["plans"]):
            sizes = [tuple(of_rank) for of_rank in kept["micro_batch_sizes"]]
            same = sizes == [rank.micro_batch_sizes for rank in first.ranks]
            plan = first if same else with_micro_batches(first, sizes, "as the checkpoint has it")
            plan = memory_ceilings.within(plan, kept.get("max_micro_batch_sizes") or [None] * len(plan.ranks))
            recomputes = first.gradient_checkpointing or kept.get("gradient_checkpointing", False)
            plan = replace(plan, gradient_checkpointing=recomputes)
            self.plans.append(PlannedSteps(kept["first_step"], plan))
        return True

    def _identity(self) -> dict[str, object]:
        """What a checkpoint's plans depend on."""
        plan = self.plans[0].plan
        return {
            "strategy": plan.strategy,
            "hosts": [rank.host for rank in plan.ranks],
            "global_batch_size": plan.global_batch_size,
            "settings": self.settings.model_dump(mode="json", exclude={"calibration_dir", "require_calibration"}),
        }


def _hosts(plan: ClusterPlan) -> list[str]:
    return [rank.host for rank in plan.ranks]


def _most_changed(plan: ClusterPlan, rates: np.ndarray, slowdowns: Mapping[int, float]) -> str:
    """The speeds of those ranks that differ most from what was expected, in words."""
    usual = float(np.median(list(slowdowns.values())))
    changed = sorted(slowdowns, key=lambda rank: -abs(np.log(slowdowns[rank] / usual)))[:4]
    return ", ".join(f"rank {rank} ({plan.ranks[rank].host}) {rates[rank]:.4g}" for rank in sorted(changed))
