"""Cuts that move when a machine slows for good: a pure function from what stages took to other blocks for each rank."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from lib.config.schema import PlanSettings
from lib.plan.cluster_plan import ClusterPlan
from lib.plan.pipeline_cuts import CutCosts, best_cut, cut_at


@dataclass(frozen=True)
class MovedCut:
    """Another cut for the hosts as they are now, and a step's time in both."""

    blocks: tuple[int, ...]
    step_seconds: float
    step_seconds_now: float

    def reason(self, plan: ClusterPlan) -> str:
        """For the log."""
        return (
            f"blocks {list(self.blocks)} would take {self.step_seconds:.4g} s a step, where {list(plan.blocks)} take "
            f"{self.step_seconds_now:.4g} s; plan.shares={list(self.blocks)} as the run is resumed"
        )


def moved_cut(
    plan: ClusterPlan, compute_seconds: Sequence[Sequence[float]], settings: PlanSettings, steps_left: int
) -> MovedCut | None:
    """The cut for hosts as fast as they were seen, if it pays: else None.

    In each of the last `replan_steps` steps the other cut has to be shorter by more than `replan_threshold`, and the
    rest of the run by more than `replan_seconds`. Blocks move when a run is resumed: weights and optimizer move too.

    Args:
        plan: pipelined, with its costs.
        compute_seconds: of the last steps, one number a rank: without waiting, as the step records have them.
        steps_left: of the run.
    """
    recent = [seconds for seconds in compute_seconds[-settings.replan_steps :] if min(seconds) > 0]
    is_open = settings.replan and settings.shares is None and plan.cut_costs is not None
    if not is_open or len(recent) < settings.replan_steps:
        return None
    assert plan.cut_costs is not None
    planned = cut_at(plan.cut_costs, plan.blocks)
    whole = np.array(planned.forward_seconds) + np.array(planned.backward_seconds)
    slowdowns = np.array(recent) / (plan.cut_costs.micro_batches * whole)
    usual = slower(plan.cut_costs, np.median(slowdowns, axis=0))
    best = best_cut(usual)
    if best is None:
        return None
    for factors in slowdowns:
        costs = slower(plan.cut_costs, factors)
        now, then = cut_at(costs, plan.blocks).step_seconds, cut_at(costs, best.blocks).step_seconds
        if now <= then * (1 + settings.replan_threshold):
            return None
    now = cut_at(usual, plan.blocks).step_seconds
    if (now - best.step_seconds) * steps_left < settings.replan_seconds:
        return None
    return MovedCut(best.blocks, best.step_seconds, now)


def slower(costs: CutCosts, factors: np.ndarray) -> CutCosts:
    """The costs of hosts that take so many times as long. factors: [p]."""
    return replace(
        costs,
        forward_seconds=costs.forward_seconds * factors[:, None],
        backward_seconds=costs.backward_seconds * factors[:, None],
        end_forward_seconds=costs.end_forward_seconds * factors,
        end_backward_seconds=costs.end_backward_seconds * factors,
    )
