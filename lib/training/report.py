"""What a person reads of a run beside its progress: the plan, new plans, merges, warnings, the closing tables."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import mlx.nn as nn
from mlx.utils import tree_flatten

from lib.config.schema import Config
from lib.config.without_effect import without_effect
from lib.data.dataset import Dataset
from lib.data.prompts import Prompts
from lib.data.streaming import StreamedDataset
from lib.distributed.world import World
from lib.model import quantised
from lib.plan import plan_warnings
from lib.plan.cluster_plan import ClusterPlan
from lib.plan.replan import Schedule
from lib.system import metal, out_of_memory
from lib.system.hardware import device_name, provenance
from lib.telemetry.cost import hosts_cost
from lib.telemetry.run_records import PerformanceTracker
from lib.training.inputs import Inputs
from lib.training.progress_display import RunConsole, size_text, three_digits
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
    model, train, about = config.model, config.train, "about " * data.is_estimated
    ranks = sorted({model.rank, *model.rank_pattern.values()})
    method = model.method if model.method == "full" else f"{model.method} of rank {' and '.join(map(str, ranks))}"
    tokens = f"{about}{int(data.lengths.sum()):,} tokens, longest {about}{int(data.lengths.max())}"
    rows = [
        ("model", f"{model.path}, {method}"),
        ("loss", train.loss_name if train.loss == "sft" else f"{train.loss_name}, beta {train.beta:g}"),
        ("data", f"{data.path}: {len(data):,} rows, {tokens}" + ", read as they are needed" * data.is_estimated),
        ("format", data.columns),
    ]
    if data.labels is not None:
        rows.append(("labels", data.unit.removeprefix("rows ").strip("()")))
    if valid is not None:
        other = f" from {valid.columns}" if valid.columns != data.columns else ""
        rows.append(("held out", f"{valid.path}: {len(valid):,} rows{other}"))
    shares = " + ".join(map(str, plan.shares)) + " = " if len(plan.workers) > 1 else ""
    rows += [
        ("steps", f"{steps:,} of {shares}{batch:,} rows, {_epochs(steps / -(-len(data) // batch))}"),
        ("plan", plan.reason),
    ]
    if plan.merging:
        rows += [("merging", plan.merging), ("instead", plan.synchronous_instead)]
    if plan.divided_instead:
        rows.append(("instead", plan.divided_instead))
    if (plan.calibrated or plan.stages) and plan.predicted_step_seconds:
        rows.append(("predicted", _predicted(plan, steps)))
    say.facts(f"run {config.run.name}", [*rows, ("folder", str(Path(config.run.dir) / str(config.run.name)))])
    if inputs.first_row is not None:
        say.line(inputs.first_row, lead="row 1: ")
    if len(plan.ranks) > 1:
        say.line("")
        say.table("", *_without_unknown(plan.rows()), text_columns=2)
    if plan.predictions:
        _show_predictions(say, config, plan, steps)
    for warning in (*plan.warnings, *without_effect(config, plan.strategy, len(plan.ranks))):
        say.warning(warning)
    if (warm_up := plan_warnings.long_warm_up(steps, train)) is not None:
        say.warning(warm_up)
    if data.labels is not None and (uneven := plan_warnings.uneven_labels(len(data), int(data.labels.sum()), train)):
        say.warning(uneven)
    for dataset in (data, valid):
        if dataset is not None:
            _warn_of_rows(say, dataset, config.data.max_length)


def _warn_of_rows(say: RunConsole, dataset: Dataset | StreamedDataset | Prompts, max_length: int) -> None:
    """What is not in the data that a person may believe to be there."""
    if dataset.truncated_count:
        count = f"{'about ' * dataset.is_estimated}{dataset.truncated_count} of {len(dataset)}"
        say.warning(f"{dataset.path}: {count} rows cut to data.max_length={max_length} tokens")
    if dataset.skipped:
        first = "; ".join(dataset.skipped[:5]) + " ..." * (dataset.skipped_count > 5)
        say.warning(f"{dataset.path}: {dataset.skipped_count} unusable rows left out (data.skip_invalid): {first}")


def _epochs(count: float) -> str:
    return f"{count:.3g} epoch{'s' * (count != 1)}"


def _predicted(plan: ClusterPlan, steps: int) -> str:
    """What the hosts' curves say of the plan."""
    chosen = next((way for way in plan.predictions if way.chosen), None)  # merges included
    seconds = (chosen and chosen.step_seconds) or plan.predicted_step_seconds or 0.0
    speed, part = plan.global_batch_size / seconds if seconds else 0.0, chosen.efficiency if chosen else plan.efficiency
    efficiency = f", {100 * part:.0f} % of what the hosts do alone, added up" if part else ""
    each = f"{seconds:.3g} s a step, {three_digits(speed)} pairs/s{efficiency if len(plan.ranks) > 1 else ''}"
    return f"{each}; {duration(steps * seconds)} of training"


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
        row.append("-" if seconds is None else duration(seconds))
        cost = hosts_cost(way.hosts, seconds, config.cost) if seconds is not None else None
        rows.append([*row, f"{cost['energy_kwh']:.3g} kWh", f"{cost['cost']:.2f}"] if cost else row)
    width = min(map(len, rows)) if plan.calibrated or plan.divides_model else 2
    say.line("")
    say.table(
        "strategies, as predicted; η: of what the hosts do alone, added up",
        columns[:width],
        [row[:width] for row in rows],
    )


def duration(seconds: float) -> str:
    """E.g. "41 s", "12 min", "3.4 h"."""
    if seconds < 120:
        return f"{seconds:.3g} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"


def warn_of_displays(say: RunConsole, config: Config, world: World, hosts: Sequence[str], dry_run: bool) -> None:
    """Looks after the displays of Macs, as metal.display says, and warns of those that stay lit. All ranks call it."""
    is_first_here = list(hosts).index(hosts[world.rank]) == world.rank
    mine = metal.attend_displays(config.metal.display, is_first_here, only_look=dry_run)
    displays = world.gather_long_text(json.dumps(mine), "the hosts' displays")
    if (advice_text := metal.advice(hosts, [json.loads(text) for text in displays])) is not None:
        say.warning(advice_text)


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
        quantised_products=quantised.choices(run.model),
        resumed_from_step=progress.step if resumed else None,
    )
    run.say.record_in(tracker, progress.step, each_rank=run.local_sgd is not None)


def show_model(say: RunConsole, config: Config, model: nn.Module) -> None:
    """How much of the model is trained."""
    total = sum(a.size for _, a in tree_flatten(model.parameters()))
    trained = sum(a.size for _, a in tree_flatten(model.trainable_parameters()))
    say.line(f"training {trained:,} of {total:,} parameters ({100 * trained / total:.2f} %) on {device_name()}")
    if (how := quantised.described(model)) is not None:
        say.line(how)


def warn_of_the_end(say: RunConsole, step: int, kl: float | None) -> None:
    """What is likely to be wrong with where training ended, while it can still be recorded."""
    if strayed := plan_warnings.strayed(kl):
        say.warning(strayed, step)
