"""What a person sees of a run as it goes, on a terminal or in a file."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from rich.live import Live
from rich.text import Text

from lib.distributed.world import World
from lib.system.network import host_name
from lib.system.terminal import GAP, Voice
from lib.telemetry.run_records import PerformanceTracker
from lib.training.step import StepResult

COUNTING_SECONDS = 30.0  # between lines of a long pass, in a file
LINE_WIDTH = 80  # of a step's line, in a file
SHORTEST_BAR, LONGEST_BAR = 5, 30


class RunConsole(Voice):
    """Rank 0's voice; other ranks are silent, but for what they alone know.

    A terminal has one line that changes, a file one now and then.
    """

    def __init__(self, world: World, log_every: int = 10):
        super().__init__(silent=world.rank != 0)
        self.log_every = log_every
        self.tracker: PerformanceTracker | None = None
        self.unrecorded: list[str] = []
        self.progress_line: ProgressLine | None = None  # of the training that goes on
        self.merge_shown = 0  # the step of the last merge that was shown

    def record_in(self, tracker: PerformanceTracker, step: int, each_rank: bool) -> None:
        """Makes warnings records as well, also those before: rank 0's, or each rank's where ranks are independent."""
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

    def own_warning(self, text: str, step: int, why: str = "") -> None:
        """A warning of a step that this rank took, which of independent ranks no other knows: each says its own.

        why: for the record and rank 0. What other ranks print last may be taken for the reason of their end, and this
        would be one.
        """
        self.warning(text + why, step)
        if self.tracker is not None and self.tracker.rank != 0:
            Voice(stderr=True).labelled("warning", f"rank {self.tracker.rank} on {host_name()}: {text}")

    @contextmanager
    def doing(self, what: str) -> Iterator[None]:
        """Shows on a terminal what takes its time, as long as it does."""
        if self.progress_line is not None:
            self.progress_line.busy_with = what
            try:
                yield
            finally:
                self.progress_line.busy_with = ""
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
        line = ProgressLine(done, total, self.log_every)

        def plain(step: int, result: StepResult) -> None:
            line.add(step, result)
            if step == done + 1 or step == total or step % self.log_every == 0:
                room = min(LINE_WIDTH, self.width or LINE_WIDTH)
                self.line(line.shown(room, bar="", place=f"step     {_of(step, total)}"))

        if not self.is_live:
            yield plain
            return
        self.progress_line = line
        try:
            with Live(
                console=self.console,
                get_renderable=lambda: line.shown(self.console.width, self.bar),
                refresh_per_second=4,
            ):
                yield line.add
        finally:
            self.progress_line = None

    @property
    def bar(self) -> str:
        """The signs of a bar, done and to do."""
        return "=-" if self.console.options.ascii_only else "━━"

    def held_out(self, step: int, total: int, values: dict[str, float | None]) -> None:
        """One evaluation."""
        if step == 0:
            self.line("")
        self.line(f"held out {_of(step, total)}  {describe(values)}", "bold")


class ProgressLine:
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
        fields += [(3, _labelled("reward", self._mean("reward"), ".3f"))]
        fields += [(4, _labelled("margin", self._mean("reward_margin"), ".3f"))]
        fields += [(6, _labelled("kl", self._mean("kl"), ".2f"))]
        fields += [(7, f"lr {result.learning_rate:.1e}"), (2, f"{three_digits(speed)} pairs/s")]
        fields += [(8, size_text(max(one.peak_memory_bytes for one in self.results)))]
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


def three_digits(value: float) -> str:
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


def size_text(count: float) -> str:
    """E.g. 512 bytes, 1.67 MB, 12.3 GB."""
    for unit, scale in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= scale:
            return f"{three_digits(count / scale)} {unit}"
    return f"{count:.0f} bytes"
