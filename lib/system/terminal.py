"""What a command prints: to a person's terminal lines of its width, to a file or pipe whole lines of plain text.

In a file nothing is wrapped, padded or drawn over, so that grep finds it. Colours are for a terminal that has them, or
where FORCE_COLOR asks; never with NO_COLOR. They can be read on light and on dark, and nothing is said by colour alone.
"""

from __future__ import annotations

import atexit
import functools
import io
import os
import shlex
import sys
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TextIO

from rich.console import Console
from rich.text import Text

from lib.errors import shown
from lib.system import records

GAP = 2  # blanks between columns
HANG = 2  # further in go the lines that continue one
NARROW = 24  # columns: in less, nothing is wrapped
LOG_WIDTH = 100  # columns of a table in a file, where it can be so narrow
LABELS = {"error": "bold red", "warning": "bold magenta", "stopped": "bold"}


class Voice:
    """Prints to standard output or standard error."""

    def __init__(self, stderr: bool = False, silent: bool = False):
        stream = sys.stderr if stderr else sys.stdout
        if isinstance(stream, io.TextIOWrapper) and stream.errors != "replace":
            try:
                stream.reconfigure(errors="replace")  # where it is not UTF-8, a bar is not worth an end
            except OSError as error:  # it writes first what is left
                _warn_of_lost_lines(stderr, error.strerror or str(error))
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
        try:
            self.console.print(line, soft_wrap=True)
        except OSError as error:  # a log on a full disk; a pipe that nobody reads ends the command, by rich
            self.console._buffer.clear()  # rich would print it again before the next line
            _warn_of_lost_lines(self.console.stderr, error.strerror or str(error))


@functools.cache
def _warn_of_lost_lines(stderr: bool, why: str) -> None:
    """Says once on standard error that standard output cannot be written, and lets the process end as it would."""
    atexit.register(_leave_unwritten, sys.stderr if stderr else sys.stdout)
    if not stderr:
        error(f"standard output cannot be written: {why}; lines are missing there, the command goes on", "warning")


def _leave_unwritten(stream: TextIO) -> None:
    """At the end: Python would fail to write what is left, and make the exit status 120 of it."""
    try:
        stream.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def error(text: str, label: str = "error") -> None:
    """Prints on standard error why a command ends, and what to do."""
    Voice(stderr=True).labelled(label, text)


def python() -> str:
    """This interpreter, as one would type it here."""
    path = Path(sys.executable)
    return str(path.relative_to(Path.cwd())) if path.is_relative_to(Path.cwd()) else str(path)


def way_on(run: Path | None) -> str:
    """What one types after a run that ended early: --resume, where the run's folder is there to go on with."""
    if run is None or not (run / "config.yaml").is_file():
        return "give the same command again"
    return f"go on with --resume {run}"


# ---- Lay-out: pure


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
