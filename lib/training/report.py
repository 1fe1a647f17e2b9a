"""What a person sees of a run: the plan, progress, samples, the final table and the curves."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import mlx.nn as nn
from mlx.utils import tree_flatten

from lib.config.schema import Config
from lib.distributed.world import World
from lib.plan import advice
from lib.plan.cluster_plan import ClusterPlan
from lib.plan.replan import Schedule
from lib.system import metal, out_of_memory
from lib.system.provenance import device_name, provenance
from lib.system.terminal import python
from lib.telemetry.cost import hosts_cost
from lib.telemetry.run_records import PerformanceTracker
from lib.training import checkpoint
from lib.training.console import RunConsole, size_text, three_digits
from lib.training.preload import Inputs
from lib.training.round_merge import MergeResult
from lib.training.training_run import TrainingRun


def show_new_plan(
    say: RunConsole, tracker: PerformanceTracker, step: int, first: int, before: ClusterPlan, plan: ClusterPlan
) -> None:
    """A plan that was decided after `step` and is in force from step `first` on; recorded and printed."""
    tracker.record("plan", step=step, first_step=first, shares_before=before.shares, **plan.to_dict())
    shares = " + ".join(map(str, plan.shares))
    say.line(f"step {step}: from step {first} on shares {shares}: {plan.reason}", "bold")


def show_schedule(
    say: RunConsole, tracker: PerformanceTracker, step: int, schedule: Schedule, new: ClusterPlan | None
) -> None:
    """A plan that was made after `step`, if there is one, and what the schedule has to say; recorded and printed."""
    if new is not None:
        show_new_plan(say, tracker, step, step + schedule.lead, schedule.at(step), new)
    while schedule.remarks:
        say.warning(schedule.remarks.pop(0), step)


def show_merge(say: RunConsole, step: int, steps: int, merged: MergeResult, remark: str) -> None:
    """One line of a merge, where merges are frequent of one in `run.log_every` steps; and what changes from here."""
    if remark:
        say.line(f"step {step}: {remark}")
    if step < steps and step // say.log_every == say.merge_shown // say.log_every:
        return
    say.merge_shown = step
    shown = [f"{' + '.join(map(str, merged.pairs))} pairs", f"{size_text(merged.bytes_sent)} sent"]
    if merged.error is not None:
        shown.append(f"error {merged.error:.1e}")
    say.line(f"step {step}: merged by {merged.method}: {', '.join(shown)}")


def show_run(say: RunConsole, config: Config, plan: ClusterPlan, inputs: Inputs, steps: int) -> None:
    """Derived, printed, then run: what the data and the settings come to."""
    data, valid, batch = inputs.data, inputs.valid, config.train.global_batch_size
    lengths = data.lengths
    about = "about " * data.is_estimated
    method = (
        config.model.method if config.model.method == "full" else f"{config.model.method} of rank {config.model.rank}"
    )
    rows = [
        ("model", f"{config.model.path}, {method}"),
        (
            "loss",
            config.train.loss if config.train.loss == "sft" else f"{config.train.loss}, beta {config.train.beta:g}",
        ),
        (
            "data",
            f"{data.path}: {len(data):,} rows, {about}{int(lengths.sum()):,} tokens, longest {about}{int(lengths.max())}"
            + ", read as they are needed" * data.is_estimated,
        ),
    ]
    if valid is not None:
        rows.append(("held out", f"{valid.path}: {len(valid):,} rows"))
    shares = " + ".join(map(str, plan.shares)) + " = " if len(plan.workers) > 1 else ""
    rows += [
        ("steps", f"{steps:,} of {shares}{batch:,} rows, {_epochs(steps / -(-len(data) // batch))}"),
        ("plan", plan.reason),
    ]
    if plan.merging:
        rows += [("merging", plan.merging), ("instead", plan.synchronous_instead)]
    if plan.calibrated and plan.predicted_step_seconds:
        rows.append(("predicted", _predicted(plan, steps)))
    say.facts(f"run {config.run.name}", [*rows, ("folder", str(Path(config.run.dir) / str(config.run.name)))])
    if len(plan.ranks) > 1:
        say.line("")
        say.table("", *_without_unknown(plan.rows()), text_columns=2)
    if plan.predictions:
        _show_predictions(say, config, plan, steps)
    for warning in plan.warnings:
        say.warning(warning)
    for dataset in (data, valid):
        if dataset is not None and dataset.truncated_count:
            say.warning(
                f"{dataset.path}: {'about ' * dataset.is_estimated}{dataset.truncated_count} of {len(dataset)} rows cut to data.max_length={config.data.max_length} tokens"
            )
        if dataset is not None and dataset.skipped:
            say.warning(
                f"{dataset.path}: {dataset.skipped_count} unusable rows left out (data.skip_invalid): {'; '.join(dataset.skipped[:5])}"
                + (" ..." if dataset.skipped_count > 5 else "")
            )


def _epochs(count: float) -> str:
    return f"{count:.3g} epoch{'s' * (count != 1)}"


def _predicted(plan: ClusterPlan, steps: int) -> str:
    """What the hosts' curves say of the plan."""
    chosen = next((way for way in plan.predictions if way.chosen), None)  # merges included
    seconds = (chosen and chosen.step_seconds) or plan.predicted_step_seconds or 0.0
    speed, part = plan.global_batch_size / seconds if seconds else 0.0, chosen.efficiency if chosen else plan.efficiency
    efficiency = f", {100 * part:.0f} % of what the hosts do alone, added up" if part else ""
    each = f"{seconds:.3g} s a step, {three_digits(speed)} pairs/s{efficiency if len(plan.ranks) > 1 else ''}"
    return f"{each}; {_duration(steps * seconds)} of training"


def _without_unknown(rows: Sequence[dict[str, str]]) -> tuple[list[str], list[list[str]]]:
    """The columns and cells of a plan's table, without columns of which nothing is known."""
    columns = [name for name in rows[0] if any(row[name] not in ("not measured", "unknown") for row in rows)]
    return columns, [[row[name] for name in columns] for row in rows]


def _show_predictions(say: RunConsole, config: Config, plan: ClusterPlan, steps: int) -> None:
    """What each way to run would give; its time and cost only where they were measured with this model."""
    columns = ["", "η", "step", "pairs/s", "memory", "sent a step", "in all", "energy", "cost"]
    rows = []
    for way in plan.predictions:
        row = [f"{'➜' if way.chosen else ' '} {way.strategy}"]
        row.append("-" if way.efficiency is None else f"{100 * way.efficiency:.0f} %")
        seconds = None if way.step_seconds is None else steps * way.step_seconds
        if way.step_seconds is None:
            row += ["-", "-"]
        else:
            row += [f"{way.step_seconds:.3g} s", three_digits(plan.global_batch_size / way.step_seconds)]
        row.append("-" if way.memory_bytes is None else size_text(way.memory_bytes))
        row += ["-" if way.bytes_per_step is None else size_text(way.bytes_per_step)]
        row.append("-" if seconds is None else _duration(seconds))
        cost = hosts_cost(way.hosts, seconds, config.cost) if seconds is not None else None
        rows.append([*row, f"{cost['energy_kwh']:.3g} kWh", f"{cost['cost']:.2f}"] if cost else row)
    width = min(map(len, rows)) if plan.calibrated or plan.division else 2
    say.line("")
    say.table(
        "ways to run it, as predicted; η: of what the hosts do alone, added up",
        columns[:width],
        [row[:width] for row in rows],
    )


def _duration(seconds: float) -> str:
    """E.g. "41 s", "12 min", "3.4 h"."""
    if seconds < 120:
        return f"{seconds:.3g} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"


def warn_of_displays(say: RunConsole, config: Config, world: World, hosts: Sequence[str], dry_run: bool) -> None:
    """Looks after the displays of hosts that are Macs, as metal.display says, and tells of those that stay lit. All ranks call it."""
    is_first_here = list(hosts).index(hosts[world.rank]) == world.rank
    mine = metal.attend_displays(config.metal, is_first_here, only_look=dry_run)
    displays = world.gather_long_text(json.dumps(mine), "the hosts' displays")
    if (told := metal.advice(hosts, [json.loads(text) for text in displays])) is not None:
        say.warning(told)


def record_start(run: TrainingRun, resumed: bool) -> None:
    """Begins this rank's log, with all that decides the run; from now on warnings are records as well."""
    progress, tracker = run.progress, run.tracker
    tracker.record(
        "start",
        **provenance(),
        steps=run.steps,
        config=run.config.model_dump(mode="json"),
        plan=run.plan.to_dict(),
        resumes=progress.resumes,
        resume_ids=progress.resume_ids,
        kernel_kills=out_of_memory.kernel_kills(),
        resumed_from_step=progress.step if resumed else None,
    )
    run.say.record_in(tracker, progress.step, each_rank=run.local_sgd is not None)


def show_model(say: RunConsole, config: Config, model: nn.Module) -> None:
    """How much of the model is trained."""
    total = sum(a.size for _, a in tree_flatten(model.parameters()))
    trained = sum(a.size for _, a in tree_flatten(model.trainable_parameters()))
    say.line(f"training {trained:,} of {total:,} parameters ({100 * trained / total:.2f} %) on {device_name()}")


def summarise(
    config: Config,
    plan: ClusterPlan,
    progress: checkpoint.Progress,
    after: dict[str, float | None],
    each: Sequence[str],
    wall_seconds: float,
) -> dict[str, Any]:
    """The final figures, as summary.json holds them; held-out ones where there is held-out data.

    each: every rank's totals as JSON; its own metrics as well, where ranks were never merged (the run's are rank 0's).
    """
    keys = ("loss", "reward_accuracy", "reward_margin", "kl")
    speed = progress.pairs / progress.seconds if progress.seconds else 0.0
    ranks = _beside_plan(plan, [json.loads(totals) for totals in each])
    return {
        "name": config.run.name,
        "model": config.model.path,
        "strategy": plan.strategy,
        "world_size": len(plan.ranks),
        "steps": progress.step,
        "pairs": progress.pairs,
        "tokens": progress.tokens,
        "seconds": progress.seconds,
        "wall_seconds": wall_seconds,
        "pairs_per_second": speed,
        "tokens_per_second": progress.tokens / progress.seconds if progress.seconds else 0.0,
        "efficiency": _efficiency(plan, ranks),
        "cost": hosts_cost([rank.host for rank in plan.ranks], wall_seconds, config.cost),
        **{key: after.get(key) for key in keys},
        **{f"{key}_before": progress.before.get(key) for key in keys},
        "exact_match_before": progress.before.get("exact_match"),
        "exact_match_after": after.get("exact_match"),
        "bytes_sent": progress.bytes_sent,
        "peak_memory_bytes": max(rank["peak_memory_bytes"] for rank in ranks),
        "ranks": ranks,
    }


def _efficiency(plan: ClusterPlan, ranks: Sequence[dict[str, Any]]) -> float | None:
    """Speed since the run was started or resumed (before, it may have had other hosts) over what these hosts do alone, added up."""
    seconds = max(rank["seconds"] for rank in ranks)
    if not seconds or not plan.calibrated or not plan.solo_sum_pairs_per_second:
        return None
    pairs = ranks[0]["pairs"] if plan.division else sum(rank["pairs"] for rank in ranks)  # divided: all do every pair
    return float(pairs / seconds / plan.solo_sum_pairs_per_second)


def _beside_plan(plan: ClusterPlan, ranks: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """What every rank did, with the speed that was planned for it."""
    seconds = plan.predicted_step_seconds if plan.calibrated and not plan.division else None
    planned = [share / seconds if seconds else None for share in plan.shares] if seconds else [None] * len(ranks)
    return [{**rank, "planned_pairs_per_second": speed} for rank, speed in zip(ranks, planned, strict=True)]


def warn_of_the_end(say: RunConsole, step: int, kl: float | None) -> None:
    """What is likely to be wrong with where training ended, while it can still be recorded."""
    if strayed := advice.strayed(kl):
        say.warning(strayed, step)


def show_end(say: RunConsole, folder: Path, summary: dict[str, Any]) -> None:
    """The closing tables, where the files are, which it leaves there, what to type next, and in a file the summary as JSON."""
    rows = []
    for key, label, form in (
        ("loss", "loss", ".4f"),
        ("reward_accuracy", "reward accuracy", ".1%"),
        ("reward_margin", "reward margin", ".3f"),
        ("kl", "KL to the reference", ".2f"),
        ("exact_match", "exact match", ".1%"),
    ):
        before, after = summary.get(f"{key}_before"), summary.get("exact_match_after" if key == "exact_match" else key)
        if after is not None:
            rows.append((label, *("-" if x is None else f"{x:{form}}".replace("%", " %") for x in (before, after))))
    if rows:
        say.line("")
        say.table("", ["held out", "before", "after"], rows)
    if len(summary["ranks"]) > 1:
        say.line("")
        _show_ranks(say, summary["ranks"])
    say.line("")
    say.facts(
        f"{summary['steps']:,} steps, {summary['pairs']:,} pairs",
        [
            (
                "training",
                f"{_duration(summary['seconds'])} of steps, {_duration(summary['wall_seconds'])} in all",
            ),
            (
                "speed",
                f"{three_digits(summary['pairs_per_second'])} pairs/s, {summary['tokens_per_second']:,.0f} tokens/s",
            ),
            *(
                [("efficiency", f"{100 * summary['efficiency']:.1f} % of what the hosts do alone, added up")]
                if summary["efficiency"] is not None
                else []
            ),
            ("memory", f"{size_text(summary['peak_memory_bytes'])} at most"),
            *(("cost", text) for text in _costs(summary["cost"])),
            ("results", f"{folder}/: adapter, report.html, curves.png, summary.json"),
        ],
    )
    words = [python(), "-m"]
    say.line("")
    say.command(
        [*words, "mlx_lm", "generate", "--model", summary["model"], "--adapter-path", str(folder), "--prompt", "..."],
        lead="try it    ",
    )
    say.command([*words, "lib.server", "--run", str(folder)], lead="serve it  ")
    say.command([*words, "lib.dashboard", str(folder)], lead="see it    ")
    say.record(summary)


def _show_ranks(say: RunConsole, ranks: Sequence[dict[str, Any]]) -> None:
    """What each rank did since the run was started or resumed."""
    rows = []
    for rank in ranks:
        seconds = rank["seconds"] or float("nan")
        parts = [f"{100 * rank[f'{part}_seconds'] / seconds:.0f} %" for part in ("compute", "sync", "wait")]
        planned = rank["planned_pairs_per_second"]
        speeds = [three_digits(rank["pairs"] / seconds), *([three_digits(planned)] if planned else [])]
        rows.append(
            [
                str(rank["rank"]),
                rank["host"],
                f"{rank['pairs']:,}",
                *speeds,
                *parts,
                size_text(rank["peak_memory_bytes"]),
            ]
        )
    planned_too = ["planned"] if ranks[0]["planned_pairs_per_second"] else []
    say.table(
        "",
        ["rank", "host", "pairs", "pairs/s", *planned_too, "compute", "sync", "wait", "memory"],
        rows,
        text_columns=2,
    )


def _costs(cost: dict[str, Any] | None) -> list[str]:
    """A line a host, and one for all."""
    if cost is None:
        return []
    hosts = [*cost["hosts"], {"host": "all hosts", **cost}] if len(cost["hosts"]) > 1 else cost["hosts"]
    return [
        f"{host['host']}: {host['energy_kwh']:.3g} kWh for {host['electricity']:.2f}, rent {host['rent']:.2f}, together {host['cost']:.2f}"
        for host in hosts
    ]
