"""summary.json: the final figures of a run (docs/runs.md)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from lib.plan.cost import hosts_cost
from lib.plan.plan import ClusterPlan
from lib.training.inputs import generate_options
from lib.training.losses import Metrics
from lib.training.run import TrainingRun

FIGURES = ("loss", "reward_accuracy", "reward_margin", "kl")  # held out; None where there is no held-out data


def summary_of(
    run: TrainingRun, metrics: Metrics, final_step: int, early_end: str | None, ranks: Sequence[dict[str, Any]]
) -> dict[str, Any]:
    """The summary of a run that ends. metrics: held out, of the weights of `final_step`, which the folder holds. ranks:
    every rank's totals; with metrics, if never merged."""
    config, plan, progress = run.config, run.plan, run.progress
    predicted = plan.predicted_step_seconds if plan.calibrated and not plan.divides_model else None
    planned = [rank.share / predicted if predicted else None for rank in plan.ranks]
    return {
        "name": str(config.run.name),
        "model": config.model.path,
        "strategy": plan.strategy,
        "world_size": len(plan.ranks),
        "steps": progress.step,
        "early_end": early_end,
        "checkpoint": {
            "which": "best" if final_step == progress.best_step else "last",
            "step": final_step,
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
        "generate_options": generate_options(run.inputs.tokenizer, config.model, config.data),
        "ranks": [rank | {"planned_pairs_per_second": p} for rank, p in zip(ranks, planned, strict=True)],
    }


def _speeds(plan: ClusterPlan, ranks: Sequence[dict[str, Any]]) -> dict[str, float | None]:
    """Computed tokens and operations a second of all ranks since the start or resume; and eta where calibrated."""
    seconds = max(rank["seconds"] for rank in ranks) or float("inf")

    def total(name: str) -> float:
        return sum(rank["flops_per_token"] * rank[name] for rank in ranks) / seconds

    rates = [rank["matrix_flops_per_second"] for rank in ranks]
    efficiency, alone = None, plan.solo_sum_pairs_per_second
    if len(plan.ranks) > 1 and plan.calibrated and alone and seconds < float("inf"):
        pairs = ranks[0]["pairs"] if plan.divides_model else sum(rank["pairs"] for rank in ranks)  # divided: all do all
        efficiency = pairs / seconds / alone
    return {
        "computed_tokens_per_second": sum(rank["padded_tokens"] for rank in ranks) / seconds,
        "tflops": total("tokens") / 1e12,
        "computed_tflops": total("padded_tokens") / 1e12,
        "matrix_rate_share": total("padded_tokens") / sum(rates) if all(rates) else None,
        "efficiency": efficiency,
    }
