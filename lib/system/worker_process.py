"""A process that answers questions, each within a limit of time: for what cannot be interrupted where it is called.

A question is a line of JSON, and so is its answer; lib/system/worker_loop.py is the other side. The process starts with
the first question. It is ended, with all that it started, when it takes too long, and ends with this process.
"""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import signal
import subprocess
import tempfile
import threading
import time
import weakref
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any

from lib.system.worker_loop import OUT_OF_MEMORY, START_SECONDS

PIECE_BYTES = 2**20
ERROR_BYTES = 2**12  # of what it says last
END_SECONDS = 5.0  # from its last output to its end
LOOK_SECONDS = 3600.0  # between two looks at the clock; Linux waits for 24 days at a time and no longer


class NotStarted(Exception):
    """The process cannot be started; the message says why."""


class Ended(Exception):
    """The process ended before it answered; the message says how."""

    def __init__(self, status: int, said: str = ""):
        how = f"its process ended with status {status}" if status >= 0 else f"its process was ended by {_name(-status)}"
        super().__init__(how + (f": {said}" if said else ""))
        self.lacked_memory = status == OUT_OF_MEMORY


class WorkerProcess:
    """The process of a command, for any number of threads.

    Args:
        folder: that it works in; by default this process's.
        environment: its environment variables; by default this process's.
        shows_errors: whether what it writes to its standard error output is for people to see. Else its last line is
            part of the message where it ends by itself.
    """

    def __init__(
        self,
        command: Sequence[str],
        folder: Path | None = None,
        environment: Mapping[str, str] | None = None,
        shows_errors: bool = False,
    ):
        self.command, self.folder = list(command), folder
        self.environment = None if environment is None else dict(environment)
        self.shows_errors = shows_errors
        self._errors: IO[bytes] | None = None
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._kill: weakref.finalize[Any, WorkerProcess] | None = None
        self._owner = os.getpid()

    def start(self) -> None:
        """Starts the process, which the first question would do otherwise.

        Raises:
            NotStarted: it does not get ready.
        """
        with self._lock:
            self._running()

    def ask(self, question: bytes, seconds: float) -> Any:
        """What it answers to a line of JSON. Where it fails the next question gets a process of its own.

        Raises:
            NotStarted: it does not get ready.
            TimeoutError: nothing came in time.
            Ended: it ended before.
        """
        with self._lock:
            process = self._running()
            try:
                return self._exchange(process, memoryview(question + b"\n"), seconds)
            except BaseException:
                self._end()
                raise

    def _end(self) -> None:
        if self._kill is not None:
            self._kill()
        self._process = self._kill = None

    def _running(self) -> subprocess.Popen[bytes]:
        """The process, or another one where there is none, or it has ended since the last question."""
        if self._owner != os.getpid():  # a fork: its parent goes on with the other one
            self._process, self._kill, self._owner = None, None, os.getpid()
        if self._process is not None and self._process.poll() is not None:
            self._end()
        if self._process is None:
            try:
                self._process = self._started()
                answer = self._exchange(self._process, memoryview(b""), START_SECONDS)
                if "fault" in answer:
                    raise NotStarted(answer["fault"])
            except TimeoutError:
                self._end()
                raise NotStarted(f"it is not ready after {START_SECONDS:g} s") from None
            except (OSError, Ended) as error:
                self._end()
                raise NotStarted(str(error)) from None
            except BaseException:
                self._end()
                raise
        return self._process

    def _started(self) -> subprocess.Popen[bytes]:
        if not self.shows_errors:
            self._errors = tempfile.TemporaryFile("w+b", 0)  # noqa: SIM115
        process = subprocess.Popen(
            self.command,
            bufsize=0,
            cwd=self.folder,
            env=self.environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            start_new_session=True,  # a terminal's Ctrl-C is for us; and what it starts itself ends with it
        )
        assert process.stdin is not None
        os.set_blocking(process.stdin.fileno(), False)
        self._kill = weakref.finalize(self, _end_all, process, self._owner)  # at this process's end, too
        return process

    def _exchange(self, process: subprocess.Popen[bytes], left: memoryview, seconds: float) -> Any:
        """Gives it a line, and takes one, of which there is never more than one on its way.

        Raises:
            TimeoutError: it is not there in time.
            Ended: the process ended before.
            NotStarted: it is no JSON.
        """
        assert process.stdin is not None and process.stdout is not None
        if self._errors is not None:
            self._errors.seek(0)  # the process has the same place in it
            self._errors.truncate()
        deadline, came = time.monotonic() + seconds, list[bytes]()
        with selectors.DefaultSelector() as selector:
            selector.register(process.stdout, selectors.EVENT_READ)
            if left:
                selector.register(process.stdin, selectors.EVENT_WRITE)
            while not came or not came[-1].endswith(b"\n"):
                left_seconds = deadline - time.monotonic()
                ready = [key.fileobj for key, _ in selector.select(min(max(0.0, left_seconds), LOOK_SECONDS))]
                if not ready and left_seconds <= LOOK_SECONDS:
                    raise TimeoutError
                if process.stdin in ready:
                    left = _given(process.stdin.fileno(), left)
                    if not left:
                        selector.unregister(process.stdin)
                if process.stdout in ready:
                    came.append(os.read(process.stdout.fileno(), PIECE_BYTES))
                    if not came[-1]:
                        raise self._ended(process)
        line = b"".join(came)
        try:
            return json.loads(line)
        except ValueError:
            said = line[:100].decode(errors="replace").partition("\n")[0]
            raise NotStarted(f"it says {said!r}, which is no answer") from None

    def _ended(self, process: subprocess.Popen[bytes]) -> Ended:
        """How a process ended that writes no more."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(END_SECONDS)
        if process.poll() is None:
            process.kill()
            process.wait()
        said = list[str]()
        if self._errors is not None:
            size = self._errors.seek(0, os.SEEK_END)
            self._errors.seek(max(0, size - ERROR_BYTES))
            said = self._errors.read(ERROR_BYTES).decode(errors="replace").split("\n")
        return Ended(process.returncode, next((line.strip() for line in reversed(said) if line.strip()), ""))


def _given(descriptor: int, left: memoryview) -> memoryview:
    """What is left of a text after a pipe took as much as it has room for."""
    try:
        return left[os.write(descriptor, left[:PIECE_BYTES]) :]
    except BlockingIOError:
        return left
    except BrokenPipeError:  # it has ended, which reading shows
        return left[:0]


def _end_all(process: subprocess.Popen[bytes], owner: int) -> None:
    """Ends a process and what it started; nothing in a fork of the process that started it."""
    if owner != os.getpid():
        return
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            pipe.close()
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(END_SECONDS)


def _name(number: int) -> str:
    try:
        name = signal.Signals(number).name
    except ValueError:
        name = f"signal {number}"
    return f"{name}, perhaps by the system, for want of memory" if number == signal.SIGKILL else name
