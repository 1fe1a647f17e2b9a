"""The parts of `make test`: the first is seen as it runs, the others run one after another beside it and are shown after it.

    python -m tests.parts NAME COMMAND... -- NAME COMMAND... -- ...

Ranks wait for each other, and the tests of one process for the processes that they start: together they leave no core
idle. All parts run, whatever fails in one of them; the last lines say what failed in which.
"""

from __future__ import annotations

import contextlib
import os
import shlex
import signal
import subprocess
import sys
import tempfile
import threading
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path


@dataclass
class Part:
    """A command, and what became of it; `failed` names its failed tests, a line each (tests/conftest.py)."""

    name: str
    command: list[str]
    folder: Path
    status: int | None = None
    is_over: threading.Event = field(default_factory=threading.Event)

    @property
    def output(self) -> Path:
        return self.folder / f"{self.name} output"

    @property
    def failed(self) -> Path:
        return self.folder / f"{self.name} failed"

    def start(self, beside: bool) -> subprocess.Popen[bytes]:
        """beside: it writes to `output`, reads nothing, and is not interrupted by the terminal's Ctrl-C."""
        environment = {**os.environ, "FAILED_TESTS": str(self.failed)}
        if not beside:
            print(shlex.join(self.command), flush=True)
            return subprocess.Popen(self.command, env=environment)
        with self.output.open("wb") as output:
            return subprocess.Popen(
                self.command,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
            )


class Beside(threading.Thread):
    """Runs parts one after another, until they are done or `stop` is called."""

    def __init__(self, parts: list[Part]):
        super().__init__()
        self.parts, self.stopped, self.lock = parts, False, threading.Lock()
        self.process: subprocess.Popen[bytes] | None = None

    def run(self) -> None:
        for part in self.parts:
            with self.lock:
                if self.stopped:
                    return
                self.process = part.start(beside=True)
            part.status = self.process.wait()
            part.is_over.set()

    def stop(self) -> None:
        with self.lock:
            self.stopped = True
            if self.process is not None:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(self.process.pid, signal.SIGTERM)
        self.join()


def run_all(parts: list[Part]) -> int:
    """The exit status: 0 where all passed, 1 where one did not, 130 after Ctrl-C."""
    first, *others = parts
    beside = Beside(others)
    process = first.start(beside=False)
    beside.start()
    try:
        first.status = process.wait()
        for part in others:
            part.is_over.wait()
            print(shlex.join(part.command), flush=True)
            sys.stdout.buffer.write(part.output.read_bytes())
    except KeyboardInterrupt:
        beside.stop()
        process.wait()
        return 130
    bad = [part for part in parts if part.status]
    for part in bad:
        names = part.failed.read_text().split("\n") if part.failed.exists() else []
        print(f"failed in {part.name}, status {part.status}:", *sorted({*names} - {""}), sep="\n    ", file=sys.stderr)
    if not bad:
        print(f"passed: {', '.join(part.name for part in parts)}")
    return int(bool(bad))


def main(words: list[str]) -> int:
    with tempfile.TemporaryDirectory() as folder:
        groups = [list(group) for is_end, group in groupby(words, lambda word: word == "--") if not is_end]
        return run_all([Part(name, command, Path(folder)) for name, *command in groups])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
