"""The end of a run: the weights that stay, and summary.json, its final figures (docs/runs.md)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from lib.errors import Stopped
from lib.model import adapter_files
from lib.plan.plan import ClusterPlan
from lib.plan.time_and_cost import hosts_cost
from lib.system import files, records
from lib.training import checkpoint
from lib.training.losses import Metrics
from lib.training.run import TrainingRun
from lib.training.run_inputs import generate_options

STRAYED_NATS = 100.0  # of KL to the reference, a completion
FIGURES = ("loss", "reward_accuracy", "reward_margin", "kl")  # held out; None where there is no held-out data


def early_end(run: TrainingRun) -> str | None:
    """Why training ended before the run's last step, if it did."""
    if (progress := run.progress).step >= run.steps:
        return None
    count, best = progress.evaluations_since_best, progress.best_metrics.get(run.best_by)
    shown = "" if best is None else f" (best {run.best_by} {best:.4f} at step {progress.best_step})"
    return f"no improvement for {count} evaluations{shown}; train.patience={run.config.train.patience}"


def take_best(run: TrainingRun, latest: Metrics) -> tuple[int, Metrics]:
    """Goes back to the weights of the best evaluation, where these are not the last ones. The step of the weights that
    the model has then, and their held-out metrics. latest: of the last ones."""
    progress, step, best = run.progress, run.progress.best_step, run.progress.best_metrics.get(run.best_by)
    if run.is_never_merged or step is None or best is None or step == progress.step:
        return progress.step, latest
    path = run.folder / "checkpoints" / f"step-{step:08d}"
    if fault := run.world.broadcast_text(checkpoint.fault_of(path) or "" if run.world.rank == 0 else ""):
        run.say.warning(f"{path}, of the best {run.best_by}, is damaged ({fault}); the last are taken", run.own_step)
        return progress.step, latest
    checkpoint.restore_weights(path, run.model, run.world)
    run.say.line(f"the weights of step {step} are taken, of the best {run.best_by} ({best:.4f})")
    return step, progress.best_metrics


def strayed(kl: float | None) -> str | None:
    """A policy that ends very far from its reference."""
    if kl is None or abs(kl) < STRAYED_NATS:
        return None
    remedy = "a lower train.learning_rate, a larger train.beta, or fewer steps"
    return f"KL to the reference is {kl:.3g} nats a completion: the model has left what it was; {remedy}"


def worsened(best_by: str, before: Metrics, after: Metrics) -> str | None:
    """What to say where the weights that are kept are worse than those before training, by the figure that decides."""
    was, now = before.get(best_by), after.get(best_by)
    if was is None or now is None or (now <= was if best_by == "loss" else now >= was):
        return None
    figures = f"held-out {best_by} was {was:.4f} before it and is {now:.4f} now"
    return f"training made the model worse: {figures}; try a lower train.learning_rate or fewer train.steps"


def finish(run: TrainingRun, latest: Metrics, final_step: int) -> None:
    """Saves the result and its figures, and closes the log. latest: held out, of the weights of `final_step`."""
    world, tracker = run.world, run.tracker
    for text in filter(None, (strayed(latest.get("kl")), worsened(run.best_by, run.progress.before, latest))):
        run.say.warning(text, run.own_step)
    reason = early_end(run)
    every = world.gather_values(tracker.totals() | (latest if run.is_never_merged else {}))
    if not checkpoint.are_finite(world, run.model, run.optimizer):
        raise Stopped(
            f"the weights after step {run.progress.step} are not finite, and no adapter is made of them (the "
            f"checkpoints in {run.folder} have finite ones); start a new run with a smaller train.learning_rate"
        )
    run.writer.wait()
    with world.agreeing("finishing"), world.gathering(run.model.trainable_parameters()) as [weights]:
        if run.is_never_merged:
            folder = run.folder / "ranks" / f"rank-{world.rank:03d}"
            adapter_files.save_trained(run.model, run.config.model, folder)
        if world.rank == 0:
            adapter_files.save_trained(run.model, run.config.model, run.folder, *weights)
            run.count_wall_seconds()
            result = summary_of(run, latest, final_step, reason, every)
            files.write_atomically(run.folder / "summary.json", records.dumps(result, indent=2) + "\n")
    run.writer.record(tracker)
    tracker.record("end", step=run.own_step, final_step=final_step, reason=reason, **latest)
    tracker.gather(world, everything=True)
    tracker.close()


def summary_of(
    run: TrainingRun, metrics: Metrics, final_step: int, early_end: str | None, ranks: Sequence[dict[str, Any]]
) -> dict[str, Any]:
    """The summary of a run that ends. metrics: held out, of the weights of `final_step`, which the folder holds. ranks:
    every rank's totals; with metrics, if never merged."""
    config, plan, progress = run.config, run.plan, run.progress
    seconds = progress.seconds or float("inf")
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
        "pairs_per_second": progress.pairs / seconds,
        "tokens_per_second": progress.tokens / seconds,
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
