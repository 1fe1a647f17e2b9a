"""The final figures of a run, as summary.json holds them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Literal, TypedDict, cast

from lib.plan.cost import RunCost, hosts_cost
from lib.plan.plan import ClusterPlan
from lib.training.objective import Metrics
from lib.training.run import TrainingRun

FIGURES = ("loss", "reward_accuracy", "reward_margin", "kl")  # held out; None where there is no held-out data


class RankTotals(TypedDict):
    """What one rank did since the run was started or resumed."""

    rank: int
    host: str
    pairs: int
    seconds: float
    compute_seconds: float
    sync_seconds: float
    wait_seconds: float
    tokens: int
    padded_tokens: int  # computed: with padding
    flops_per_token: float
    matrix_flops_per_second: float | None
    peak_memory_bytes: int
    planned_pairs_per_second: float | None


class FinalCheckpoint(TypedDict):
    """Which weights the run's folder holds."""

    which: Literal["best", "last"]  # best: as checkpoint.best_by has it
    step: int
    held_out_loss: float | None


class RunSummary(TypedDict):
    """What summary.json holds."""

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
    computed_tokens_per_second: float  # with padding; these four since the run was started or resumed
    tflops: float  # of real tokens
    computed_tflops: float
    matrix_rate_share: float | None  # of the ranks' measured matrix rates, added up
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


def summarise(run: TrainingRun, step: int, metrics: Metrics, early_end: str | None, each: Sequence[str]) -> RunSummary:
    """The final figures of a run.

    Args:
        step: whose weights the run's folder holds; metrics: held out, of these weights.
        each: every rank's totals as JSON; its own metrics as well, where ranks were never merged (then rank 0's count).
    """
    config, plan, progress = run.config, run.plan, run.progress
    ranks = _beside_plan(plan, [json.loads(totals) for totals in each])
    summary = {
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
        "seconds": progress.seconds,
        "wall_seconds": progress.wall_seconds,
        "pairs_per_second": progress.pairs / progress.seconds if progress.seconds else 0.0,
        "tokens_per_second": progress.tokens / progress.seconds if progress.seconds else 0.0,
        **_arithmetic(ranks),
        "efficiency": _efficiency(plan, ranks),
        "cost": hosts_cost([rank.host for rank in plan.ranks], progress.wall_seconds, config.cost),
        **{name: metrics.get(name) for name in FIGURES},
        **{f"{name}_before": progress.before.get(name) for name in (*FIGURES, "exact_match")},
        "exact_match_after": metrics.get("exact_match"),
        "bytes_sent": progress.bytes_sent,
        "peak_memory_bytes": max(rank["peak_memory_bytes"] for rank in ranks),
        "ranks": ranks,
    }
    return cast(RunSummary, summary)


def _arithmetic(ranks: Sequence[RankTotals]) -> dict[str, float | None]:
    """Computed tokens and operations a second of all ranks together."""
    seconds = max(rank["seconds"] for rank in ranks) or float("inf")
    flops = sum(rank["flops_per_token"] * rank["tokens"] for rank in ranks)
    computed = sum(rank["flops_per_token"] * rank["padded_tokens"] for rank in ranks)
    rates = [rank["matrix_flops_per_second"] for rank in ranks]
    return {
        "computed_tokens_per_second": sum(rank["padded_tokens"] for rank in ranks) / seconds,
        "tflops": flops / seconds / 1e12,
        "computed_tflops": computed / seconds / 1e12,
        "matrix_rate_share": computed / seconds / sum(rate or 0.0 for rate in rates) if all(rates) else None,
    }


def _efficiency(plan: ClusterPlan, ranks: Sequence[RankTotals]) -> float | None:
    """Speed over what these hosts do alone, added up; since a resume, before which there may have been others."""
    seconds = max(rank["seconds"] for rank in ranks)
    if not seconds or len(plan.ranks) < 2 or not plan.calibrated or not plan.solo_sum_pairs_per_second:
        return None
    pairs = ranks[0]["pairs"] if plan.divides_model else sum(rank["pairs"] for rank in ranks)  # divided: all do all
    return float(pairs / seconds / plan.solo_sum_pairs_per_second)


def _beside_plan(plan: ClusterPlan, ranks: Sequence[RankTotals]) -> list[RankTotals]:
    """What every rank did, with the speed that was planned for it."""
    seconds = plan.predicted_step_seconds if plan.calibrated and not plan.divides_model else None
    planned = [share / seconds if seconds else None for share in plan.shares] if seconds else [None] * len(ranks)
    return [{**rank, "planned_pairs_per_second": speed} for rank, speed in zip(ranks, planned, strict=True)]
