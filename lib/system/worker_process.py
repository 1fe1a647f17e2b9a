"""A process that answers questions, each within a limit of time: for what cannot be interrupted where it is called.

A question is a line of JSON, and so is its answer. The process says that it is ready by a first line. It starts with
the first question, is ended when it takes too long, and ends with this process.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import selectors
import subprocess
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

START_SECONDS = 120.0  # until it is ready, on a busy machine
PIECE_BYTES = 2**20


class WorkerProcess:
    """The process of a command, for any number of threads.

    Args:
        folder: that it works in; by default this process's.
    """

    def __init__(self, command: Sequence[str], folder: Path | None = None):
        self.command, self.folder = list(command), folder
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._owner = os.getpid()
        atexit.register(self.end)

    def ask(self, question: bytes, seconds: float) -> Any:
        """What it answers to a line of JSON. Where it fails the next question gets a process of its own.

        Raises:
            TimeoutError: nothing came in time.
            EOFError: it ended.
        """
        with self._lock:
            if self._owner != os.getpid():  # a fork: its parent goes on with the other one
                self._process, self._owner = None, os.getpid()
            try:
                process = self._process = self._process or self._start()
                assert process.stdin is not None
                with contextlib.suppress(BrokenPipeError):  # it has ended, which reading shows
                    process.stdin.write(question + b"\n")
                    process.stdin.flush()
                return json.loads(_line(process, seconds))
            except BaseException:
                self.end()
                raise

    def end(self) -> None:
        """Ends the process; with the next question another one starts."""
        process, self._process = self._process, None
        if process is not None and self._owner == os.getpid():
            process.kill()
            with contextlib.suppress(OSError):
                process.communicate()

    def _start(self) -> subprocess.Popen[bytes]:
        process = subprocess.Popen(
            self.command, cwd=self.folder, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
        )
        self._process = process
        _line(process, START_SECONDS)
        return process


def _line(process: subprocess.Popen[bytes], seconds: float) -> bytes:
    """The next line of a process, of which there is never more than one on its way.

    Raises:
        TimeoutError: it is not there in time.
        EOFError: the process ended before its end.
    """
    assert process.stdout is not None
    deadline = time.monotonic() + seconds
    pieces: list[bytes] = []
    with selectors.DefaultSelector() as selector:
        selector.register(process.stdout, selectors.EVENT_READ)
        while not pieces or not pieces[-1].endswith(b"\n"):
            if not selector.select(max(0.0, deadline - time.monotonic())):
                raise TimeoutError
            pieces.append(os.read(process.stdout.fileno(), PIECE_BYTES))
            if not pieces[-1]:
                raise EOFError
    return b"".join(pieces)
