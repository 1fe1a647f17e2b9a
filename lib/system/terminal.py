"""What a command prints: to a person's terminal lines of its width, to a file or pipe whole lines of plain text.

In a file nothing is wrapped, padded or drawn over, so that grep finds it. Colours are for a terminal that has them, or
where FORCE_COLOR asks; never with NO_COLOR. They can be read on light and on dark, and nothing is said by colour alone.
"""

from __future__ import annotations

import contextlib
import io
import os
import shlex
import sys
import textwrap
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.live import Live
from rich.text import Text

from lib.errors import shown
from lib.system import records

GAP = 2  # blanks between columns
HANG = 2  # further in go the lines that continue one
NARROW = 24  # columns: in less, nothing is wrapped
LOG_WIDTH = 100  # columns of a table in a file, where it can be so narrow
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
        # The launcher's terminal, where this is one of its ranks: lines go there, but can not be drawn over.
        self.columns = int(os.environ.get("TANDEM_COLUMNS", 0))
        self.is_live = stream.isatty() and not (plain or silent or self.console.is_dumb_terminal)
        self.is_terminal = stream.isatty() and not plain or bool(self.columns)

    @property
    def width(self) -> int | None:
        """Columns of the terminal; None for a file, whose lines are as long as they are."""
        return (self.columns or self.console.width) if self.is_terminal else None

    def line(self, text: str | Text, style: str = "", lead: str | Text = "") -> None:
        """A line, on a terminal wrapped between words; `lead` stands before it, and blanks below that."""
        text = text if isinstance(text, Text) else Text(text, style)
        lead = lead if isinstance(lead, Text) else Text(lead)
        for part in folded(text, lead, self.width):
            self._print(part)

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

    @contextmanager
    def doing(self, what: str) -> Iterator[None]:
        """Shows on a terminal what takes its time, as long as it does."""
        if self.is_live:
            with self.console.status(Text(f"{what} ...", "dim"), spinner="line", spinner_style=""):
                yield
        else:
            yield

    @contextmanager
    def counting(self, what: str, total: int) -> Iterator[Any]:
        """Yields `progress(done)` for a pass over `total` examples."""
        began = said = time.perf_counter()
        done = 0

        def left() -> str:
            seconds = (time.perf_counter() - began) / max(done, 1) * (total - done)
            return f"{clock(seconds)} left" if done else ""

        def plain(count: int) -> None:
            nonlocal said, done
            done = count
            if time.perf_counter() - said > COUNTING_SECONDS:
                said = time.perf_counter()
                self.line(f"{what}: {done:,} of {total:,}, {left()}")

        def shown() -> Text:
            texts = [what, f"{done:,}/{total:,}", left()]
            return with_bar([text for text in texts if text], done / max(total, 1), self.console.width, self.bar)

        def live(count: int) -> None:
            nonlocal done
            done = count

        if self.is_live:
            with Live(console=self.console, get_renderable=shown, refresh_per_second=4, transient=True):
                yield live
        else:
            yield plain
        self.line(f"{what}: {total:,} in {time.perf_counter() - began:.1f} s")

    def facts(self, title: str, rows: Iterable[tuple[str, str]]) -> None:
        """A title, and a name and value a line."""
        rows = list(rows)
        width = max((Text(name).cell_len for name, _ in rows), default=0) + GAP
        if title:
            self.line(title, "bold")
        for name, value in rows:
            self.line(value, lead=_padded(Text(name, "dim"), width, right=False))

    def table(
        self, title: str, columns: Sequence[str], rows: Iterable[Sequence[str | Text]], text_columns: int = 1
    ) -> None:
        """A table: the first columns are text, the others numbers. One too wide for the terminal continues below."""
        if title:
            self.line(title, "bold")
        for line in laid_out(columns, [list(row) for row in rows], text_columns, self.width):
            self._print(line)

    def command(self, words: Sequence[str], lead: str | Text = "") -> None:
        """A command to be copied: on a terminal broken between words, as a shell takes it."""
        lead = lead if isinstance(lead, Text) else Text(lead)
        room = None if self.width is None else self.width - lead.cell_len - HANG - 2
        lines: list[str] = []
        for word in _with_values(words):
            if lines and (room is None or len(lines[-1]) + 1 + len(word) <= room):
                lines[-1] += f" {word}"
            else:
                lines.append(word)
        for number, text in enumerate(lines):
            before = lead if number == 0 else " " * (lead.cell_len + HANG)
            self._print(Text.assemble(before, text + " \\" * (number < len(lines) - 1)))

    def record(self, values: Mapping[str, object]) -> None:
        """A line of JSON for programs; a person at a terminal has read the same before."""
        if not self.is_terminal:
            self._print(Text(records.dumps(values)))

    def _print(self, line: Text) -> None:
        """The one door to the terminal: what others wrote (data, answers, names) is shown, and never obeyed."""
        line.plain = shown(line.plain)
        with contextlib.suppress(OSError):  # a log on a full disk
            self.console.print(line, soft_wrap=True)


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


# ---- Figures as text, and lay-out: pure


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
    forms = {
        "loss": ("loss", ".4f"),
        "reward_accuracy": ("acc", ".1%"),
        "reward_margin": ("margin", ".3f"),
        "kl": ("kl", ".2f"),
        "exact_match": ("exact", ".1%"),
    }
    shown = (labelled(name, values.get(key), form) for key, (name, form) in forms.items())
    return "  ".join(text for text in shown if text)


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


def _with_values(words: Sequence[str]) -> list[str]:
    """A command's words as a shell takes them, an option in one piece with its value."""
    pieces: list[str] = []
    for before, word in zip(["", *words], words, strict=False):
        if before.startswith("--") and not word.startswith("-"):
            pieces[-1] += f" {shlex.quote(word)}"
        else:
            pieces.append(shlex.quote(word))
    return pieces


def folded(text: Text, lead: Text, width: int | None) -> list[Text]:
    """A line's parts, each with what stands before it; a word is broken only where it is wider than the line."""
    lines = []
    for piece in text.split("\n"):
        blanks = Text(piece.plain[: len(piece.plain) - len(piece.plain.lstrip(" "))])
        hang = Text(" " * ((lead.cell_len or HANG) + blanks.cell_len))
        if width is None or width - hang.cell_len < NARROW or lead.cell_len + piece.cell_len <= width:
            lines.append(Text.assemble(lead, piece))
        else:
            first, *rest = piece[len(blanks) :].wrap(_RULER, width - hang.cell_len)
            lines += [Text.assemble(lead, blanks, first), *(Text.assemble(hang, part) for part in rest)]
        lead = Text(" " * lead.cell_len)
    for part in lines:
        part.rstrip()
    return lines


def laid_out(
    columns: Sequence[str], rows: Sequence[Sequence[str | Text]], text_columns: int, width: int | None
) -> list[Text]:
    """A table's lines. Too wide, headings are folded; then the rest continues below, after the first columns."""
    cells = [[cell if isinstance(cell, Text) else Text(cell) for cell in row] for row in rows]
    of_cells = [max((row[i].cell_len for row in cells), default=0) for i in range(len(columns))]
    widths = [max(of_column, len(column)) for of_column, column in zip(of_cells, columns, strict=True)]
    headings = [[column] for column in columns]
    if sum(widths) + GAP * (len(widths) - 1) > (width or LOG_WIDTH):
        for i, column in enumerate(columns):
            longest = max((len(word) for word in column.split()), default=0)
            headings[i] = textwrap.wrap(column, max(longest, of_cells[i], 6)) or [""]
            widths[i] = max(of_cells[i], *map(len, headings[i]))
    blocks: list[list[int]] = []
    for i in range(len(columns)):
        if blocks and (width is None or sum(widths[j] + GAP for j in blocks[-1]) + widths[i] <= width):
            blocks[-1].append(i)
        else:
            blocks.append([*(range(text_columns) if i >= text_columns else ()), i])
    lines = []
    for block in blocks:
        height = max(len(headings[i]) for i in block)
        heading = [[Text(""), *[Text(part, "dim") for part in headings[i]]] for i in block]
        for k in range(height):
            row = [parts[k - height] if k - height >= 1 - len(parts) else parts[0] for parts in heading]
            lines.append(_joined(row, block, widths, text_columns))
        lines += [_joined([row[i] for i in block], block, widths, text_columns) for row in cells]
    return lines


def _joined(row: Sequence[Text], block: Sequence[int], widths: Sequence[int], text_columns: int) -> Text:
    line = Text(" " * GAP).join(
        _padded(cell, widths[i], right=i >= text_columns) for cell, i in zip(row, block, strict=True)
    )
    line.rstrip()
    return line


def _padded(text: Text, width: int, right: bool) -> Text:
    blanks = " " * max(0, width - text.cell_len)
    return Text.assemble(blanks, text) if right else Text.assemble(text, blanks)


_RULER = Console(width=80, file=io.StringIO())  # Text.wrap asks for one, and prints nothing
