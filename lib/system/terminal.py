"""What a command prints: lines of a terminal's width, or whole lines of plain text in a file or pipe.

Colours are for a terminal that has them, or where FORCE_COLOR asks; never with NO_COLOR.
"""

from __future__ import annotations

import contextlib
import io
import os
import shlex
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path

from rich.console import Console, RenderableType
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

from lib.errors import shown
from lib.system import records

GAP = 2  # blanks between columns
NARROW = 24  # columns: in less, nothing is wrapped
FILE_WIDTH = 10_000  # columns of a file, so that nothing is wrapped there
COUNTING_SECONDS = 30.0  # between lines of a long pass, in a file
SHORTEST_BAR, LONGEST_BAR = 5, 30
LABELS = {"error": "bold red", "warning": "bold magenta", "stopped": "bold"}


class Terminal:
    """Prints to standard output or standard error; silent: not at all, as on ranks other than 0."""

    def __init__(self, stderr: bool = False, silent: bool = False):
        stream = sys.stderr if stderr else sys.stdout
        if isinstance(stream, io.TextIOWrapper) and stream.errors != "replace":
            stream.reconfigure(errors="replace")  # where it is not UTF-8, a bar is not worth an end
        # mpirun gives its ranks a terminal even where its own output goes to a file: plain lines serve both.
        plain = "OMPI_COMM_WORLD_SIZE" in os.environ
        colours = False if plain else None
        self.console = Console(stderr=stderr, quiet=silent, force_terminal=colours, highlight=False, emoji=False)
        # The launcher's terminal, where this is one of its ranks: lines go there, but cannot be drawn over.
        self.columns = int(os.environ.get("TANDEM_COLUMNS", 0))
        self.is_live = stream.isatty() and not (plain or silent or self.console.is_dumb_terminal)
        self.is_terminal = stream.isatty() and not plain or bool(self.columns)

    @property
    def width(self) -> int | None:
        """Columns of the terminal; None for a file, whose lines are as long as they are."""
        return (self.columns or self.console.width) if self.is_terminal else None

    def line(self, text: str | Text, style: str = "", lead: str | Text = "") -> None:
        """A line, on a terminal wrapped between words; `lead` stands before it, and blanks below that."""
        if not lead:
            return self._draw(_safe(text, style))
        grid = Table.grid()
        grid.add_column(no_wrap=True)
        grid.add_column(overflow="fold")
        grid.add_row(_safe(lead), _safe(text, style))
        return self._draw(grid)

    def labelled(self, label: str, text: str) -> None:
        """`warning: ...`"""
        self.line(text, lead=Text(f"{label}: ", LABELS[label]))

    def warning(self, text: str, step: int = 0) -> None:
        """Says what may be wrong; `step` is the last one before."""
        self.labelled("warning", text)

    def own_warning(self, text: str, step: int = 0, why: str = "") -> None:
        """A warning of a step that this rank took, which of independent ranks no other knows. why: for the record."""
        self.labelled("warning", text + why)

    @property
    def bar(self) -> str:
        """The signs of a bar, done and to do."""
        return "=-" if self.console.options.ascii_only else "━━"

    def doing(self, what: str) -> contextlib.AbstractContextManager[object]:
        """Shows on a terminal what takes its time, as long as it does."""
        if not self.is_live:
            return contextlib.nullcontext()
        return self.console.status(Text(f"{what} ...", "dim"), spinner="line", spinner_style="")

    @contextlib.contextmanager
    def counting(self, what: str, total: int) -> Iterator[Callable[[int], None]]:
        """Yields `progress(done)` for a pass over `total` examples."""
        began = printed = time.perf_counter()
        columns = ("{task.description}", BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
        with Progress(*columns, console=self.console, transient=True, disable=not self.is_live) as bar:
            task = bar.add_task(what, total=total)

            def progress(done: int) -> None:
                nonlocal printed
                bar.update(task, completed=done)
                if not self.is_live and time.perf_counter() - printed > COUNTING_SECONDS:
                    printed = time.perf_counter()
                    left = (printed - began) / max(done, 1) * (total - done)
                    self.line(f"{what}: {done:,} of {total:,}, {clock(left)} left")

            yield progress
        self.line(f"{what}: {total:,} in {time.perf_counter() - began:.1f} s")

    def facts(self, title: str, rows: Iterable[tuple[str, str]]) -> None:
        """A title, and a name and value a line."""
        grid = Table.grid(padding=(0, GAP, 0, 0))
        grid.add_column(style="dim", no_wrap=True)
        grid.add_column(overflow="fold")
        for name, value in rows:
            grid.add_row(_safe(name), _safe(value))
        if title:
            self.line(title, "bold")
        self._draw(grid)

    def table(
        self, title: str, columns: Sequence[str], rows: Iterable[Sequence[str | Text]], text_columns: int = 1
    ) -> None:
        """A table: the first columns are text, the others numbers."""
        table = Table(box=None, pad_edge=False, padding=(0, GAP, 0, 0), header_style="dim")
        for i, column in enumerate(columns):
            table.add_column(_safe(column), justify="left" if i < text_columns else "right", overflow="fold")
        for row in rows:
            table.add_row(*map(_safe, row))
        if title:
            self.line(title, "bold")
        self._draw(table)

    def command(self, words: Sequence[str], lead: str = "") -> None:
        """A command to be copied, in one piece."""
        self.console.print(Text(shown(lead + shlex.join(words))), soft_wrap=True)

    def record(self, values: Mapping[str, object]) -> None:
        """A line of JSON for programs; a person at a terminal has read the same before."""
        if not self.is_terminal:
            self._draw(Text(records.dumps(values), overflow="ignore", no_wrap=True))

    def _draw(self, content: RenderableType) -> None:
        options = self.console.options.update(width=self.width or FILE_WIDTH)
        for pieces in self.console.render_lines(content, options, pad=False):
            line = Text.assemble(*((piece.text, piece.style or "") for piece in pieces))
            line.rstrip()
            with contextlib.suppress(OSError):  # a log on a full disk
                self.console.print(line, soft_wrap=True)


def _safe(text: str | Text, style: str = "") -> Text:
    """Text in which what others wrote (data, answers, names) is shown, and never obeyed."""
    text = text.copy() if isinstance(text, Text) else Text(text, style)
    text.plain = shown(text.plain)
    return text


def error(text: str, label: str = "error") -> None:
    """Prints on standard error why a command ends, and what to do."""
    Terminal(stderr=True).labelled(label, text)


def python() -> str:
    """This interpreter, as one would type it here."""
    path = Path(sys.executable)
    return str(path.relative_to(Path.cwd())) if path.is_relative_to(Path.cwd()) else str(path)


def way_on(run: Path | None) -> str:
    """What one types after a run that ended early: --resume, where the run's folder is there to go on with."""
    if run is None or not (run / "config.yaml").is_file():
        return "give the same command again"
    return f"go on with --resume {run}"


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


def metrics_text(values: Mapping[str, float | None]) -> str:
    """`loss 0.6120  acc 64.1 %  margin 0.213  kl 1.22  exact 52.7 %`, without what is None."""
    forms = {"loss": ("loss", ".4f"), "reward_accuracy": ("acc", ".1%"), "reward_margin": ("margin", ".3f")}
    forms |= {"kl": ("kl", ".2f"), "exact_match": ("exact", ".1%")}
    return "  ".join(filter(None, (labelled(name, values.get(key), form) for key, (name, form) in forms.items())))


def labelled(name: str, value: float | None, form: str) -> str:
    """E.g. `acc 64.1 %`; empty where there is no value."""
    return "" if value is None else f"{name} {value:{form}}".replace("%", " %")


def three_digits(value: float) -> str:
    """Three digits that count."""
    return f"{value:,.0f}" if value >= 99.95 else f"{value:.1f}" if value >= 9.995 else f"{value:.2f}"


def clock(seconds: float) -> str:
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


def duration(seconds: float) -> str:
    """E.g. "41 s", "12 min", "3.4 h"."""
    if seconds < 120:
        return f"{seconds:.3g} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"
