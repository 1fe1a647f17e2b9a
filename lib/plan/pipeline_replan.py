"""Cuts that move when a machine slows for good: a pure function from what stages took to other blocks for each rank."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from lib.config.schema import PlanSettings
from lib.plan.cluster_plan import ClusterPlan
from lib.plan.pipeline_cuts import CutCosts, best_cut, cut_at
from lib.plan.pipeline_plan import with_cut


@dataclass(frozen=True)
class MovedCut:
    """Another cut for the hosts as they are now, and a step's time in both."""

    blocks: tuple[int, ...]
    step_seconds: float
    step_seconds_now: float
    slowdowns: tuple[float, ...]  # of each host: what it took over what was planned

    @property
    def gain(self) -> float:
        """The part of a step's time that the move saves, as predicted."""
        return 1 - self.step_seconds / self.step_seconds_now

    def reason(self, plan: ClusterPlan) -> str:
        """For the log. plan: the one that is left."""
        return (
            f"blocks {list(self.blocks)} would take {self.step_seconds:.4g} s a step, where {list(plan.blocks)} take "
            f"{self.step_seconds_now:.4g} s ({self.gain:.0%} less)"
        )


def moved_cut(
    plan: ClusterPlan,
    compute_seconds: Sequence[Sequence[float]],
    settings: PlanSettings,
    steps_left: int,
    move_seconds: float = 0.0,
) -> MovedCut | None:
    """The cut for hosts as fast as they were seen, if it pays: else None.

    In each of the last `replan_steps` steps the other cut has to be shorter by more than `replan_threshold`, and the
    rest of the run by more than `replan_seconds` and what the move takes.

    Args:
        plan: pipelined, with its costs.
        compute_seconds: of the last steps, one number a rank: without waiting, as the step records have them.
        steps_left: of the run.
        move_seconds: that blocks take to be loaded.
    """
    recent = [seconds for seconds in compute_seconds[-settings.replan_steps :] if min(seconds) > 0]
    if len(recent) < settings.replan_steps or plan.cut_costs is None:
        return None
    planned = cut_at(plan.cut_costs, plan.blocks)
    whole = np.array(planned.forward_seconds) + np.array(planned.backward_seconds)
    slowdowns = np.array(recent) / (plan.cut_costs.micro_batches * whole)
    usual = np.median(slowdowns, axis=0)
    costs = slower(plan.cut_costs, usual)
    best = best_cut(costs)
    if best is None:
        return None
    for factors in slowdowns:
        seen = slower(plan.cut_costs, factors)
        now, then = cut_at(seen, plan.blocks).step_seconds, cut_at(seen, best.blocks).step_seconds
        if now <= then * (1 + settings.replan_threshold):
            return None
    now = cut_at(costs, plan.blocks).step_seconds
    if (now - best.step_seconds) * steps_left < settings.replan_seconds + move_seconds:
        return None
    return MovedCut(best.blocks, best.step_seconds, now, tuple(map(float, usual)))


def moved_plan(plan: ClusterPlan, moved: MovedCut, step: int) -> ClusterPlan:
    """The plan with the cut moved after a step. What its stages take is what was measured, not what was planned."""
    assert plan.cut_costs is not None
    changed = with_cut(plan, moved.blocks, slower(plan.cut_costs, np.array(moved.slowdowns)))
    return replace(changed, reason=f"measured up to step {step}: {moved.reason(plan)}", moved_at=step)


def slower(costs: CutCosts, factors: np.ndarray) -> CutCosts:
    """The costs of hosts that take so many times as long. factors: [p]."""
    return replace(
        costs,
        forward_seconds=costs.forward_seconds * factors[:, None],
        backward_seconds=costs.backward_seconds * factors[:, None],
        end_forward_seconds=costs.end_forward_seconds * factors,
        end_backward_seconds=costs.end_backward_seconds * factors,
    )
