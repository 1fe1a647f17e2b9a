"""What ranks print, as whole lines on our terminal, each with its rank and host before it."""

from __future__ import annotations

import os
import queue
import re
import sys
import threading
from collections.abc import Callable
from typing import TextIO

from rich.text import Text

from lib.errors import shown
from lib.system.terminal import Terminal, folded

COLOUR = re.compile(r"(\033\[[0-9;]*m)")
COLOURS = (36, 35, 32)  # that can be read on light and on dark, and are not an error's


class Console:
    """Writes whole lines, each after its rank and host, from a thread: a terminal that is stopped stops no rank."""

    def __init__(self, on_broken_pipe: Callable[[], None]):
        self.lines: queue.SimpleQueue[tuple[TextIO, str] | None] = queue.SimpleQueue()
        # Each lets its stream replace a character that this terminal lacks: that ends no training.
        self.colour = Terminal().is_live and not os.environ.get("NO_COLOR")
        self.width = Terminal(stderr=True).width
        self.thread = threading.Thread(target=self._write, args=(on_broken_pipe,), daemon=True)
        self.thread.start()

    def output(self, rank: int | None, host: str, stream: str, text: str) -> None:
        """Writes a line of a rank (None: of mpirun), to the stream that it wrote to."""
        tag = f"[{'mpirun' if rank is None else rank} {host}]"
        if self.colour:
            tag = f"\033[{COLOURS[(rank or 0) % len(COLOURS)]}m{tag}\033[0m"
        parts = COLOUR.split(text)  # what a library prints may be somebody else's text
        text = "".join(part if index % 2 else shown(part) for index, part in enumerate(parts))
        self.lines.put((sys.stderr if stream == "stderr" else sys.stdout, f"{tag} {text}\n"))

    def note(self, text: str) -> None:
        """Writes a line of the launcher's own to standard error; what it tells of may be somebody else's text."""
        wrapped = folded(Text(shown(text)), Text("launch: "), self.width)
        self.lines.put((sys.stderr, "".join(f"{line.plain}\n" for line in wrapped)))

    def close(self) -> None:
        """Waits a moment until all is written."""
        self.lines.put(None)
        self.thread.join(2)

    def _write(self, on_broken_pipe: Callable[[], None]) -> None:
        while (line := self.lines.get()) is not None:
            try:
                line[0].write(line[1])
                line[0].flush()
            except (OSError, ValueError):  # e.g. `| head` has ended
                on_broken_pipe()
                return


class Quiet(Console):
    """Keeps the ranks' lines instead: for a check, whose output matters only if it fails."""

    def __init__(self, lines: list[str]):
        self.kept = lines

    def output(self, rank: int | None, host: str, stream: str, text: str) -> None:
        self.kept.append(text)

    def note(self, text: str) -> None:
        pass
