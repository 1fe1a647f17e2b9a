"""The final figures of a run, as summary.json holds them (docs/runs.md)."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from lib.plan.cost import hosts_cost
from lib.plan.plan import ClusterPlan
from lib.training.objective import Metrics
from lib.training.run import TrainingRun

FIGURES = ("loss", "reward_accuracy", "reward_margin", "kl")  # held out; None where there is no held-out data
RunSummary = dict[str, Any]


def summarise(run: TrainingRun, step: int, metrics: Metrics, early_end: str | None, each: Sequence[str]) -> RunSummary:
    """The final figures of a run.

    Args:
        step: whose weights the run's folder holds; metrics: held out, of these weights.
        each: every rank's totals as JSON; its own metrics as well, where ranks were never merged (then rank 0's count).
    """
    config, plan, progress = run.config, run.plan, run.progress
    ranks = [json.loads(totals) for totals in each]
    predicted = plan.predicted_step_seconds if plan.calibrated and not plan.divides_model else None
    for i, rank in enumerate(ranks):
        rank["planned_pairs_per_second"] = plan.shares[i] / predicted if predicted else None
    return {
        "name": str(config.run.name),
        "model": config.model.path,
        "strategy": plan.strategy,
        "world_size": len(plan.ranks),
        "steps": progress.step,
        "early_end": early_end,
        "checkpoint": {
            "which": "best" if step == progress.best_step else "last",
            "step": step,
            "held_out_loss": metrics.get("loss"),
        },
        "pairs": progress.pairs,
        "tokens": progress.tokens,
        "seconds": progress.seconds,  # of steps
        "wall_seconds": progress.wall_seconds,  # of all processes that made its steps, from each one's launch on
        "pairs_per_second": progress.pairs / progress.seconds if progress.seconds else 0.0,
        "tokens_per_second": progress.tokens / progress.seconds if progress.seconds else 0.0,
        **_speeds(plan, ranks),
        "cost": hosts_cost([rank.host for rank in plan.ranks], progress.wall_seconds, config.cost),
        **{name: metrics.get(name) for name in FIGURES},
        **{f"{name}_before": progress.before.get(name) for name in (*FIGURES, "exact_match")},
        "exact_match_after": metrics.get("exact_match"),
        "bytes_sent": progress.bytes_sent,
        "peak_memory_bytes": max(rank["peak_memory_bytes"] for rank in ranks),
        "ranks": ranks,
    }


def _speeds(plan: ClusterPlan, ranks: Sequence[dict[str, Any]]) -> dict[str, float | None]:
    """Computed tokens and operations a second of all ranks since the start or resume; and eta.

    efficiency: speed over the sum of what these hosts do alone; None on one rank or without calibration.
    """
    seconds = max(rank["seconds"] for rank in ranks) or float("inf")
    flops = sum(rank["flops_per_token"] * rank["tokens"] for rank in ranks)
    computed = sum(rank["flops_per_token"] * rank["padded_tokens"] for rank in ranks)  # with padding
    rates = [rank["matrix_flops_per_second"] for rank in ranks]
    efficiency, alone = None, plan.solo_sum_pairs_per_second
    if len(plan.ranks) > 1 and plan.calibrated and alone and seconds < float("inf"):
        pairs = ranks[0]["pairs"] if plan.divides_model else sum(rank["pairs"] for rank in ranks)  # divided: all do all
        efficiency = pairs / seconds / alone
    return {
        "computed_tokens_per_second": sum(rank["padded_tokens"] for rank in ranks) / seconds,
        "tflops": flops / seconds / 1e12,
        "computed_tflops": computed / seconds / 1e12,
        "matrix_rate_share": computed / seconds / sum(rates) if all(rates) else None,
        "efficiency": efficiency,
    }
