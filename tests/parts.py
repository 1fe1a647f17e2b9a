"""The parts of `make test`: the first is seen as it runs, the others run one after another beside it and are shown after it.

    python -m tests.parts NAME COMMAND... -- NAME COMMAND... -- ...

Ranks wait for each other, and the tests of one process for the processes that they start: together they leave no core
idle. All parts run, whatever fails in one of them; the last lines say what failed in which. Whatever ends this process
ends the parts first: Ctrl-C, `kill`, a terminal that is closed.
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
from types import FrameType

END_SECONDS = 30.0  # that a part has to take down what it set up, before it is killed
NO_COMMAND = 127  # the status of a command that cannot be started, as a shell tells it


@dataclass
class Part:
    """A command, and what became of it; `failed` names its failed tests, a line each (tests/conftest.py)."""

    name: str
    command: list[str]
    folder: Path
    status: int | None = None
    process: subprocess.Popen[bytes] | None = None
    is_over: threading.Event = field(default_factory=threading.Event)

    @property
    def output(self) -> Path:
        return self.folder / f"{self.name} output"

    @property
    def failed(self) -> Path:
        return self.folder / f"{self.name} failed"

    def start(self, beside: bool) -> None:
        """beside: it writes to `output`, reads nothing, and is not interrupted by the terminal's Ctrl-C."""
        environment = {**os.environ, "FAILED_TESTS": str(self.failed)}
        try:
            if not beside:
                print(shlex.join(self.command), flush=True)
                self.process = subprocess.Popen(self.command, env=environment)
                return
            with self.output.open("wb") as output:
                self.process = subprocess.Popen(
                    self.command,
                    env=environment,
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=output,
                    start_new_session=True,
                )
        except OSError as error:
            print(f"error: {self.command[0]} cannot be started: {error.strerror}", file=sys.stderr, flush=True)

    def wait(self) -> None:
        try:
            self.status = NO_COMMAND if self.process is None else self.process.wait()
        finally:
            self.is_over.set()

    def end(self, number: signal.Signals | None, group: bool) -> None:
        """Sends a signal, where it has not had it already, and SIGKILL where the part is still there after END_SECONDS.

        Args:
            group: to the part's whole session, not to its first process alone.
        """
        if self.process is None:
            return
        for one in (number, signal.SIGKILL):
            with contextlib.suppress(ProcessLookupError, PermissionError):  # macOS: of a group that has ended
                if one is not None and group:
                    os.killpg(self.process.pid, one)
                elif one is not None:
                    self.process.send_signal(one)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(END_SECONDS)
                return


class Beside(threading.Thread):
    """Runs parts one after another, until they are done or `stop` is called."""

    def __init__(self, parts: list[Part]):
        super().__init__(daemon=True)
        self.parts, self.stopped, self.lock = parts, False, threading.Lock()

    def run(self) -> None:
        for part in self.parts:
            with self.lock:
                if self.stopped:
                    return
                part.start(beside=True)
            part.wait()

    def stop(self) -> None:
        with self.lock:
            self.stopped = True
        for part in self.parts:
            if not part.is_over.is_set():
                part.end(signal.SIGTERM, group=True)


class EndedBySignal(BaseException):
    """A signal came that ends this process, and its parts before it; its number."""


def run_all(parts: list[Part]) -> int:
    """The exit status: 0 where all passed, 1 where one did not, 128 and its number after a signal.

    Whatever else ends this, e.g. that nobody reads what it writes, ends the parts as well.
    """
    first, *others = parts
    beside = Beside(others)
    try:
        first.start(beside=False)
        beside.start()
        first.wait()
        for part in others:
            part.is_over.wait()
            print(shlex.join(part.command), flush=True)
            if part.output.exists():
                sys.stdout.buffer.write(part.output.read_bytes())
    except BaseException as end:
        number = end.args[0] if isinstance(end, EndedBySignal) else None
        beside.stop()
        # At SIGINT pytest takes down what its tests set up; the terminal's Ctrl-C has come to the first part as well.
        first.end(None if number == signal.SIGINT else signal.SIGINT, group=False)
        if number is None:
            raise
        return 128 + int(number)
    bad = [part for part in parts if part.status]
    for part in bad:
        names = part.failed.read_text().split("\n") if part.failed.exists() else []
        print(f"failed in {part.name}, status {part.status}:", *sorted({*names} - {""}), sep="\n    ", file=sys.stderr)
    if not bad:
        print(f"passed: {', '.join(part.name for part in parts)}", flush=True)
    return int(bool(bad))


def main(words: list[str]) -> int:
    heard: list[int] = []

    def end(number: int, frame: FrameType | None) -> None:
        """Once: a terminal that is closed says so twice, and who is in a hurry presses Ctrl-C again."""
        heard.append(number)
        if len(heard) == 1:
            raise EndedBySignal(number)

    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is not signal.SIG_IGN:  # nohup
            signal.signal(number, end)
    with tempfile.TemporaryDirectory() as folder:
        groups = [list(group) for is_end, group in groupby(words, lambda word: word == "--") if not is_end]
        try:
            return run_all([Part(name, command, Path(folder)) for name, *command in groups])
        except BrokenPipeError:  # nobody reads; what is still to be written goes nowhere, or Python would end with 120
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            return 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
