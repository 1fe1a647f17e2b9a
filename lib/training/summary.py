"""The final figures of a run, as summary.json holds them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, TypedDict

from lib.config.settings import CostSettings
from lib.plan.cost import RunCost, hosts_cost
from lib.plan.plan import ClusterPlan
from lib.training.checkpoint import Progress
from lib.training.objective import Metrics


class RankTotals(TypedDict):
    """What one rank did since the run was started or resumed."""

    rank: int
    host: str
    pairs: int
    seconds: float
    compute_seconds: float
    sync_seconds: float
    wait_seconds: float
    peak_memory_bytes: int
    planned_pairs_per_second: float | None


@dataclass(frozen=True)
class Ending:
    """With what a run ends.

    Args:
        step: whose weights the run's folder holds.
        metrics: held-out metrics of these weights.
        reason: why training ended before the run's last step, if it did.
    """

    step: int
    metrics: Metrics
    reason: str | None


class FinalCheckpoint(TypedDict):
    """Which weights the run's folder holds."""

    which: Literal["best", "last"]  # of the lowest held-out loss, or of the last step where this is another
    step: int
    held_out_loss: float | None


class RunSummary(TypedDict):
    """What summary.json holds; held-out figures are None where there is no held-out data."""

    name: str
    model: str
    strategy: str
    world_size: int
    steps: int
    early_end: str | None  # why the run ended before its last step, if it did
    checkpoint: FinalCheckpoint  # held-out figures are of these weights
    pairs: int
    tokens: int
    seconds: float  # of steps
    wall_seconds: float  # of all processes that made its steps, from each one's launch on
    pairs_per_second: float
    tokens_per_second: float
    efficiency: float | None
    cost: RunCost | None
    loss: float | None
    reward_accuracy: float | None
    reward_margin: float | None
    kl: float | None
    loss_before: float | None
    reward_accuracy_before: float | None
    reward_margin_before: float | None
    kl_before: float | None
    exact_match_before: float | None
    exact_match_after: float | None
    bytes_sent: int
    peak_memory_bytes: int
    ranks: list[RankTotals]


def summarise(
    run: tuple[str, str, CostSettings],
    plan: ClusterPlan,
    progress: Progress,
    ending: Ending,
    each: Sequence[str],
) -> RunSummary:
    """The final figures, as summary.json holds them; held-out ones where there is held-out data.

    Args:
        run: its name, its model and the prices of its hosts.
        each: every rank's totals as JSON; its own metrics as well, where ranks were never merged (then rank 0's count).
    """
    before, after = progress.before, ending.metrics
    speed = progress.pairs / progress.seconds if progress.seconds else 0.0
    ranks = _beside_plan(plan, [json.loads(totals) for totals in each])
    return {
        "name": run[0],
        "model": run[1],
        "strategy": plan.strategy,
        "world_size": len(plan.ranks),
        "steps": progress.step,
        "early_end": ending.reason,
        "checkpoint": {
            "which": "best" if ending.step == progress.best_step else "last",
            "step": ending.step,
            "held_out_loss": after.get("loss"),
        },
        "pairs": progress.pairs,
        "tokens": progress.tokens,
        "seconds": progress.seconds,
        "wall_seconds": progress.wall_seconds,
        "pairs_per_second": speed,
        "tokens_per_second": progress.tokens / progress.seconds if progress.seconds else 0.0,
        "efficiency": _efficiency(plan, ranks),
        "cost": hosts_cost([rank.host for rank in plan.ranks], progress.wall_seconds, run[2]),
        "loss": after.get("loss"),
        "reward_accuracy": after.get("reward_accuracy"),
        "reward_margin": after.get("reward_margin"),
        "kl": after.get("kl"),
        "loss_before": before.get("loss"),
        "reward_accuracy_before": before.get("reward_accuracy"),
        "reward_margin_before": before.get("reward_margin"),
        "kl_before": before.get("kl"),
        "exact_match_before": before.get("exact_match"),
        "exact_match_after": after.get("exact_match"),
        "bytes_sent": progress.bytes_sent,
        "peak_memory_bytes": max(rank["peak_memory_bytes"] for rank in ranks),
        "ranks": ranks,
    }


def _efficiency(plan: ClusterPlan, ranks: Sequence[RankTotals]) -> float | None:
    """Speed over what these hosts do alone, added up; since a resume, before which there may have been others."""
    seconds = max(rank["seconds"] for rank in ranks)
    if not seconds or len(plan.ranks) < 2 or not plan.calibrated or not plan.solo_sum_pairs_per_second:
        return None
    pairs = (
        ranks[0]["pairs"] if plan.divides_model else sum(rank["pairs"] for rank in ranks)
    )  # divided: all do every pair
    return float(pairs / seconds / plan.solo_sum_pairs_per_second)


def _beside_plan(plan: ClusterPlan, ranks: Sequence[RankTotals]) -> list[RankTotals]:
    """What every rank did, with the speed that was planned for it."""
    seconds = plan.predicted_step_seconds if plan.calibrated and not plan.divides_model else None
    planned = [share / seconds if seconds else None for share in plan.shares] if seconds else [None] * len(ranks)
    return [{**rank, "planned_pairs_per_second": speed} for rank, speed in zip(ranks, planned, strict=True)]
