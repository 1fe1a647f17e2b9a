"""What ranks print, as whole lines on our terminal, each with its rank and host before it."""

from __future__ import annotations

import io
import os
import queue
import sys
import threading
from typing import Any

from rich.text import Text

from lib.system.terminal import Voice, folded

COLOURS = (36, 35, 32)  # that can be read on light and on dark, and are not an error's


# ---- One start of all ranks


class Console:
    """Writes whole lines, each with its rank and host before it, from a thread: a terminal that stands still stops nobody."""

    def __init__(self, stopped: Any):
        self.lines: queue.SimpleQueue[tuple[Any, str] | None] = queue.SimpleQueue()
        self.colour = Voice().is_live and not os.environ.get("NO_COLOR")
        self.width = Voice(stderr=True).width
        for output in (sys.stdout, sys.stderr):  # a letter that this terminal does not have ends no training
            if isinstance(output, io.TextIOWrapper):
                output.reconfigure(errors="replace")
        self.thread = threading.Thread(target=self._write, args=(stopped,), daemon=True)
        self.thread.start()

    def output(self, rank: int | None, host: str, stream: str, text: str) -> None:
        tag = f"[{'mpirun' if rank is None else rank} {host}]"
        if self.colour:
            tag = f"\033[{COLOURS[(rank or 0) % len(COLOURS)]}m{tag}\033[0m"
        self.lines.put((sys.stderr if stream == "stderr" else sys.stdout, f"{tag} {text}\n"))

    def note(self, text: str) -> None:
        wrapped = folded(Text(text), Text("launch: "), self.width)
        self.lines.put((sys.stderr, "".join(f"{line.plain}\n" for line in wrapped)))

    def close(self) -> None:
        self.lines.put(None)
        self.thread.join(2)

    def _write(self, stopped: Any) -> None:
        while (line := self.lines.get()) is not None:
            try:
                line[0].write(line[1])
                line[0].flush()
            except (OSError, ValueError):  # `| head` has seen enough
                stopped()
                return


class Quiet(Console):
    """Keeps the lines instead: for a check, whose output is nobody's business until it fails."""

    def __init__(self, lines: list[str]):
        self.kept = lines

    def output(self, rank: int | None, host: str, stream: str, text: str) -> None:
        self.kept.append(text)

    def note(self, text: str) -> None:
        pass
