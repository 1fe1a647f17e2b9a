"""What a person reads of a run on the console: the plan, the progress, the closing tables; all from its records."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import mlx.nn as nn
from mlx.utils import tree_flatten
from rich.live import Live
from rich.text import Text

from lib.config import read_file
from lib.config.settings import CostSettings, EvaluateSettings, MetalSettings, ModelSettings, TrainSettings
from lib.data.batch_shapes import real_tokens
from lib.data.prompts import Prompts
from lib.distributed.world import World
from lib.evaluate.evaluator import ANSWER_TOKENS, SAMPLE_TOKENS
from lib.plan.plan import ClusterPlan, long_warm_up, uneven_labels
from lib.plan.time_and_cost import Pace, Work, hosts_cost, memory_text, outlook
from lib.report import history
from lib.system import metal
from lib.system.hardware import device_name, mlx_device
from lib.system.records import PerformanceTracker, Record
from lib.system.terminal import (
    GAP,
    SHORTEST_BAR,
    Terminal,
    clock,
    duration,
    labelled,
    metrics_text,
    python,
    size_text,
    three_digits,
    with_bar,
)
from lib.training.losses import needs_reference
from lib.training.run_inputs import Inputs

LINE_WIDTH = 80  # of a step's line, in a file
SHOWN_STEPS = 10  # from one such line to the next
# Of a step's line: importance, the smaller the greater; label, key, form.
SHOWN = [(1, "loss", "loss", ".4f"), (3, "acc", "reward_accuracy", ".1%"), (3, "reward", "reward", ".3f")]
SHOWN += [(4, "margin", "reward_margin", ".3f"), (6, "kl", "kl", ".2f")]


class RunConsole(Terminal):
    """Prints the records of rank 0; of other ranks what they alone warn of. A terminal has one line that changes, a
    file one now and then. Warnings become records, those before the log began as well."""

    def __init__(self, rank: int, tried_step_seconds: float | None = None):
        super().__init__(silent=rank != 0)
        self.rank, self.tried_step_seconds = rank, tried_step_seconds
        self.tracker: PerformanceTracker | None = None  # where this rank's warnings are recorded
        self.early: list[str] = []  # warnings before the log began
        self.progress: ProgressLine | None = None
        self.live: Live | None = None

    def record_in(self, tracker: PerformanceTracker, step: int, each_rank: bool) -> None:
        """Records warnings from now on, and those before: of rank 0, or of each rank where ranks are independent."""
        if self.rank == 0 or each_rank:
            self.tracker = tracker
        for text in self.early if self.rank == 0 else ():
            tracker.record("warning", step=step, text=text)

    def warning(self, text: str, step: int = 0) -> None:
        """Says what may be wrong, and records it; `step` is the last one before."""
        if self.tracker is not None:
            self.tracker.record("warning", step=step, text=text)
        else:
            self.early.append(text)
            super().warning(text)

    def own_warning(self, text: str, step: int = 0, why: str = "") -> None:
        """A warning of a step that this rank took, which of independent ranks no other knows. why: for the record and
        rank 0. What other ranks print last may be taken for the reason of their end."""
        self.warning(text + why, step)
        if self.tracker is not None and self.rank != 0:
            Terminal(stderr=True).labelled("warning", f"rank {self.rank} on {self.tracker.host}: {text}")

    @contextmanager
    def doing(self, what: str) -> Iterator[None]:
        """Shows on a terminal what takes its time, as long as it does."""
        if self.live is None or self.progress is None:
            with super().doing(what):
                yield
            return
        self.progress.busy_with = what
        try:
            yield
        finally:
            self.progress.busy_with = ""

    def take(self, record: Record) -> str | None:
        """Prints a record, as a subscriber of the run's."""
        kind, line = record["kind"], self.progress
        if self.rank != 0:
            return None
        if kind == "warning" and record["text"] not in self.early:  # those are printed
            self.labelled("warning", str(record["text"]))
        elif kind == "start":
            self.progress = ProgressLine(record, SHOWN_STEPS)
        elif line is None:
            return None
        elif kind == "step":
            self._show_step(line, record)
        elif kind == "evaluation" and (text := metrics_text(record)):
            self.line(f"held out {line.position}  {text}", "bold")
        elif kind == "plan":
            line.plan = record
            self.line(history.describe(record), "bold")
        elif kind == "merge":
            line.step = record.get("global_step") or line.step
        elif kind == "end":
            self.close()
        return None

    def _show_step(self, line: ProgressLine, record: Record) -> None:
        line.add(record)
        if self.is_live and self.live is None:
            draw = lambda: line.shown(self.console.width, self.bar)  # noqa: E731
            self.live = Live(console=self.console, get_renderable=draw, refresh_per_second=4)
            self.live.start()
        elif not self.is_live and (line.taken == 1 or line.step == line.total or line.step % SHOWN_STEPS == 0):
            room = min(LINE_WIDTH, self.width or LINE_WIDTH)
            self.line(line.shown(room, bar="", lead=f"step     {line.position}"))

    def close(self) -> None:
        """Ends the line that changes, as before an error."""
        if self.live is not None:
            self.live.stop()
            self.live = None


class ProgressLine:
    """The state of training in a line; figures are means of the last few steps. start: the record of the run's start,
    with its plan, steps and loss. window: steps of the means."""

    def __init__(self, start: Record, window: int):
        self.total: int = start.get("steps") or 0
        self.plan: Record = start.get("plan") or Record()
        batch = self.plan.get("global_batch_size") or 1
        config = start.get("config") or {}
        rows = (start.get("rows") or batch) if not (config.get("rollouts") or {}).get("rounds") else batch
        self.mean_batch = rows / -(-rows // batch)  # every epoch ends with a short one
        self.unit = history.unit_of((config.get("train") or {}).get("loss"))
        self.done = self.step = start.get("resumed_from_step") or 0
        self.began = self.added = time.perf_counter()
        self.results: deque[Record] = deque(maxlen=window)
        self.pairs, self.taken, self.busy_with = 0.0, 0, ""

    @property
    def position(self) -> str:
        """` 7/63`, as wide as the last will be."""
        return f"{self.step:{len(f'{self.total:,}')},}/{self.total:,}"

    @property
    def factor(self) -> float:
        """Pairs of all ranks for one of rank 0's."""
        shares = self.plan.get("shares") or []
        return sum(shares) / shares[0] if len(shares) > 1 and shares[0] else 1.0

    def add(self, record: Record) -> None:
        """Takes in a step of rank 0's. Independent ranks count their own: their pairs say how far the run is."""
        self.results.append(record)
        self.taken += 1
        self.added = time.perf_counter()
        if self.taken == 1:  # what came before it is no measure of the steps that are left
            self.began = self.added - record["step_seconds"]
        self.pairs += record["pairs"] * self.factor
        self.step = record["step"]
        if self.plan.get("strategy") == "independent":
            steps = self.done + math.floor(self.pairs / self.mean_batch)
            self.step = min(self.total, max(self.done + 1, steps))

    def fields(self) -> list[tuple[int, str]]:
        """Importance, the smaller the greater, and text."""
        if not self.results or self.busy_with:
            return [(1, f"{self.busy_with} ...")] if self.busy_with else []
        tokens = [record["tokens_per_second"] * record["step_seconds"] for record in self.results]
        pairs, seconds = (sum(record[name] for record in self.results) for name in ("pairs", "step_seconds"))
        scale = self.factor / (seconds or math.inf)
        return [
            *((weight, labelled(label, self._mean(name), form)) for weight, label, name, form in SHOWN),
            (7, f"lr {self.results[-1]['learning_rate']:.1e}"),
            (2, f"{three_digits(scale * pairs)} {self.unit}/s"),
            (7, f"{scale * sum(tokens):,.0f} tokens/s"),
            (8, size_text(max(record["peak_memory_bytes"] for record in self.results))),
        ]

    def _mean(self, name: str) -> float | None:
        """Each pair counted once; steps that were left out count nowhere."""
        each = ((record.get(name), record["pairs"]) for record in self.results)
        finite = [(value, pairs) for value, pairs in each if value is not None and math.isfinite(value)]
        pairs = sum(count for _, count in finite)
        return sum(value * count for value, count in finite) / pairs if pairs else None

    def shown(self, width: int, bar: str, lead: str = "") -> Text:
        """As many figures as fit in a line, the more important first. bar: its two signs, done and to do, or none.
        lead: how the step is written."""
        step, elapsed = self.step, self.added - self.began
        fields = [(0, lead or f"step {step:,}/{self.total:,}"), *self.fields()]
        if step > self.done:
            waited = time.perf_counter() - self.added
            left = max(0.0, elapsed / (step - self.done) * (self.total - step) - waited)
            fields.append((2, f"{clock(left)} left" if step < self.total else f"in {clock(elapsed)}"))
        fitting: list[tuple[int, str]] = []
        for field in sorted(field for field in (*fields, (5, " " * SHORTEST_BAR * bool(bar))) if field[1]):
            if sum(len(text) + GAP for _, text in fitting) + len(field[1]) <= width:
                fitting.append(field)
        return with_bar([field[1] for field in fields if field in fitting], step / max(self.total, 1), width, bar)


def show_run(
    say: RunConsole,
    folder: Path,
    model: ModelSettings,
    train: TrainSettings,
    plan: ClusterPlan,
    inputs: Inputs,
    steps: int,
) -> None:
    """The facts of a run, and its first row as the model sees it. folder: of the run."""
    data, valid, batch = inputs.data, inputs.valid, train.global_batch_size
    about, epochs = "about " * data.is_estimated, steps / -(-len(data) // batch)
    ranks = " and ".join(map(str, sorted({model.rank, *model.rank_pattern.values()})))
    shares = " + ".join(map(str, plan.shares)) + " = " if len(plan.workers) > 1 else ""
    tokens = f"{about}{int(data.lengths.sum()):,} tokens, longest {about}{int(data.lengths.max())}"
    rows = [
        ("model", f"{model.path}, {model.method}" + f" of rank {ranks}" * (model.method != "full")),
        ("loss", train.loss_name + f", beta {train.beta:g}" * (train.loss != "sft")),
        ("data", f"{data.path}: {len(data):,} rows, {tokens}" + ", read as they are needed" * data.is_estimated),
        ("format", data.columns),
        ("labels", "" if data.labels is None else data.unit.removeprefix("rows ").strip("()")),
        ("held out", f"{valid.path}: {len(valid):,} rows" if valid else ""),
        ("steps", f"{steps:,} of {shares}{batch:,} rows, {epochs:.3g} epoch{'s' * (epochs != 1)}"),
        ("plan", plan.reason),
        ("merging", plan.rounds.reason if plan.rounds else ""),
        ("folder", str(folder)),
    ]
    say.facts(f"run {folder.name}", [row for row in rows if row[1]])
    if inputs.first_row is not None:
        say.line(inputs.first_row, lead="row 1: ")


def show_plan(
    say: RunConsole,
    train: TrainSettings,
    prices: CostSettings,
    plan: ClusterPlan,
    inputs: Inputs,
    max_length: int,
    steps: int,
) -> None:
    """Every rank's part, every strategy's prediction, and what is likely to be a mistake."""
    if len(plan.ranks) > 1:
        rows = plan.rows()
        columns = [name for name in rows[0] if any(row[name] != "-" for row in rows)]
        say.line("")
        say.table("", columns, [[row[name] for name in columns] for row in rows], text_columns=2)
    if plan.predictions:
        _show_predictions(say, prices, plan, steps)
    labels = inputs.data.labels
    uneven = None if labels is None else uneven_labels(len(labels), int(labels.sum()), train)
    likely_mistakes = filter(None, [uneven, long_warm_up(steps, train)])
    for text in (*plan.warnings, *likely_mistakes, *_rows_left_out(inputs, max_length)):
        say.warning(text)


def _rows_left_out(inputs: Inputs, max_length: int) -> Iterator[str]:
    every: list[Any] = [inputs.data, inputs.valid]
    for rows in filter(None, every):
        if rows.truncated_count:
            count = f"{'about ' * rows.is_estimated}{rows.truncated_count} of {len(rows)}"
            yield f"{rows.path}: {count} rows cut to data.max_length={max_length} tokens"
        if rows.skipped:
            first = "; ".join(rows.skipped[:5]) + " ..." * (rows.skipped_count > 5)
            yield f"{rows.path}: {rows.skipped_count} unusable rows left out (data.skip_invalid): {first}"


def expected(
    model: ModelSettings,
    train: TrainSettings,
    evaluate: EvaluateSettings,
    inputs: Inputs,
    plan: ClusterPlan,
    pace: Pace | None,
    steps: int,
) -> str:
    """The run's whole wall time by its parts, and the fullest rank's memory; of a run of rounds the memory alone."""
    data, memory, text = inputs.data, memory_text(plan), ""
    if pace is not None and steps and not isinstance(data, Prompts):  # rounds take an unknown time
        evaluations, (prompts, seen, _) = 1 + -(-steps // (evaluate.every or steps)), data.trained
        answers = min(len(inputs.questions), evaluate.answers_limit)
        passes = evaluations * -(-answers // evaluate.batch_size)
        tokens = passes * min(evaluate.max_tokens, float((seen - prompts[:, None]).mean()))
        samples = 2 * evaluate.samples * (inputs.tokenizer is not None)  # before and after training
        if samples:
            tokens += 2 * (ANSWER_TOKENS if answers else SAMPLE_TOKENS)
        has_reference = needs_reference(train)
        work = Work(
            steps=steps,
            reference_rows=has_reference * min(len(data), steps * train.global_batch_size),
            held_out=len(inputs.valid or ()),
            # With the policy as its own reference the first evaluation has the reference's log-probabilities.
            evaluation_passes=evaluations - (has_reference and model.reference == "initial"),
            answer_tokens=round(tokens),
            answered_rows=(evaluations * answers + samples) * float(prompts.sum() / real_tokens(prompts, seen).sum()),
        )
        parts = outlook(pace, work, mlx_device()[0])
        shown = ", ".join(f"{name} {duration(round(seconds, 1))}" for name, seconds in parts.items() if seconds)
        text = f"about {duration(sum(parts.values()))} in all ({shown}), by {pace.basis}"
    return "; ".join(filter(None, (text, memory and f"{memory} of memory")))


def _show_predictions(say: Terminal, prices: CostSettings, plan: ClusterPlan, steps: int) -> None:
    """What each strategy would give; its time and cost only where they were measured with this model."""
    columns, rows = ["", "η", "step", "pairs/s", "memory", "in all", "energy", "cost"], []
    for candidate in plan.predictions:
        seconds, share, size = candidate.step_seconds, candidate.efficiency, candidate.memory_bytes
        row = [f"{'➜' if candidate.chosen else ' '} {candidate.strategy}"]
        row.append("-" if share is None else f"{100 * share:.0f} %")
        row += ["-", "-"] if seconds is None else [f"{seconds:.3g} s", three_digits(plan.global_batch_size / seconds)]
        row.append("-" if size is None else size_text(size))
        row.append("-" if seconds is None else duration(steps * seconds))
        cost = None if seconds is None else hosts_cost(candidate.hosts, steps * seconds, prices)
        rows.append([*row, *([f"{cost['energy_kwh']:.3g} kWh", f"{cost['cost']:.2f}"] if cost else [])])
    width = min(map(len, rows)) if plan.calibrated or plan.divides_model else 2
    say.line("")
    title = "strategies, as predicted; η: of what the hosts do alone, added up"
    say.table(title, columns[:width], [row[:width] for row in rows])


def attend_displays(say: Terminal, settings: MetalSettings, world: World, hosts: Sequence[str], dry_run: bool) -> None:
    """Looks after the displays of Macs, as metal.display says, and warns of those that stay lit. All ranks call it."""
    is_first_here = list(hosts).index(hosts[world.rank]) == world.rank
    displays = metal.attend_displays(settings.display, is_first_here, only_look=dry_run)
    if (advice := metal.advice(hosts, world.gather_values(displays, "the hosts' displays"))) is not None:
        say.warning(advice)


def show_model(say: Terminal, model: nn.Module, planned: ClusterPlan, chosen: ClusterPlan, expected: str) -> None:
    """The plan, if a trial changed it; how much of the model is trained, and what the run will take."""
    if chosen is not planned:
        say.line(f"plan: {chosen.reason}")
    total = sum(array.size for _, array in tree_flatten(model.parameters()))
    trained = sum(array.size for _, array in tree_flatten(model.trainable_parameters()))
    say.line(f"training {trained:,} of {total:,} parameters ({100 * trained / total:.2f} %) on {device_name()}")
    if expected:
        say.line(f"expected: {expected}")


def show_end(say: RunConsole, folder: Path, loss: object) -> None:
    """On rank 0 the closing tables, where the files are, what to type next, and in a file the summary as JSON. folder:
    of a run that has ended with this loss."""
    if say.rank:
        return
    summary = read_file.read_object(folder / "summary.json", "summary")
    before = {name.removesuffix("_before"): value for name, value in summary.items() if name.endswith("_before")}
    if rows := history.held_out(before, {**summary, "exact_match": summary["exact_match_after"]}):
        say.line("")
        say.table("", ["held out", "before", "after"], rows)
    if len(summary["ranks"]) > 1:
        say.line("")
        say.table("", *history.ranks(summary["ranks"]), text_columns=2)
    pages = [name for name in ("report.html", "curves.png", "summary.json") if (folder / name).exists()]
    results = ("results", f"{folder}/: {', '.join(['adapter', *pages])}")
    unit, words = history.unit_of(loss), [python(), "-m"]
    say.line("")
    say.facts(f"{summary['steps']:,} steps, {summary['pairs']:,} {unit}", [*history.facts(summary, unit), results])
    say.line("")
    if (options := summary.get("generate_options", [])) is not None:  # else mlx-lm would render otherwise, or fail
        generate = ["mlx_lm", "generate", "--model", summary["model"], "--adapter-path", str(folder)]
        say.command([*words, *generate, "--prompt", "...", *options], lead="try it    ")
    say.command([*words, "lib.server", "--run", str(folder)], lead="serve it  ")
    say.command([*words, "lib.dashboard", str(folder)], lead="see it    ")
    say.record(summary)
