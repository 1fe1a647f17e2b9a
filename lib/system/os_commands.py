"""The output of the operating system's commands. All go through this module, so that a test can replace the system."""

from __future__ import annotations

import contextlib
import os
import platform
import shutil
import signal
import subprocess
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any, NamedTuple

LIMIT_SECONDS = 10.0
PIECE_BYTES = 2**16
ERROR_BYTES = 2**12
LEFT_SECONDS = 1.0  # from the end of a command that was killed to that of its output


class Completed(NamedTuple):
    """How a command ended; `status` is None where it was killed at its limit."""

    status: int | None
    output: str
    errors: str


def is_mac() -> bool:
    """Whether this is macOS."""
    return platform.system() == "Darwin"


def output(command: Sequence[str], limit_seconds: float = LIMIT_SECONDS) -> str:
    """What a command prints on its standard output; nothing if it is missing, fails, or takes longer."""
    if shutil.which(command[0]) is None:
        return ""  # without a fork, which some MPI networks do not bear well
    try:
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, text=True, errors="replace", timeout=limit_seconds
        )
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout if done.returncode == 0 else ""  # scutil and nvidia-smi print why they failed there


def run(
    command: Sequence[str],
    limit_seconds: float,
    directory: Path | None = None,
    environment: Mapping[str, str] | None = None,
) -> Completed:
    """Runs a command for at most so long; then it is killed with all that it started, and its output so far is kept."""
    pipes = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    try:
        with _session(command, **pipes, cwd=directory, env=environment, text=True, errors="replace") as process:
            try:
                output, errors = process.communicate(timeout=limit_seconds)
                return Completed(process.returncode, output, errors)
            except subprocess.TimeoutExpired:
                _kill(process)
                return Completed(None, *_rest_of(process))
    except OSError as error:
        return Completed(127, "", f"{command[0]}: {error.strerror}")


def filtered(command: Sequence[str], text: str, limit_seconds: float, most_bytes: int) -> Completed:
    """Gives a command its standard input, and takes at most so much of its output; of its errors the end is kept.

    At either limit it is killed with all that it started, and its status is None.

    Raises:
        OSError: it cannot be started.
    """
    output, errors, deadline = bytearray(), bytearray(), time.monotonic() + limit_seconds
    killed = threading.Event()

    def kill() -> None:
        killed.set()
        _kill(process)

    def give() -> None:
        assert process.stdin is not None
        with contextlib.suppress(OSError), process.stdin as stream:  # it may end before it has read everything
            stream.write(text.encode())

    def take(stream: IO[bytes], into: bytearray, kept: int | None) -> None:
        while piece := os.read(stream.fileno(), PIECE_BYTES):
            into += piece
            if kept is not None:
                del into[:-kept]
            elif len(into) > most_bytes:
                kill()

    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with _session(command, **pipes) as process:
        assert process.stdout is not None and process.stderr is not None
        reads = (process.stdout, output, None), (process.stderr, errors, ERROR_BYTES)
        threads = [threading.Thread(target=give, daemon=True)]
        threads += [threading.Thread(target=take, args=arguments, daemon=True) for arguments in reads]
        for thread in threads:
            thread.start()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(max(0.0, deadline - time.monotonic()))
        for thread in threads:  # what it started may have its pipes still
            thread.join(max(0.0, deadline - time.monotonic()))
        if process.poll() is None or any(thread.is_alive() for thread in threads):
            kill()
        status = process.wait()
        for thread in threads:
            thread.join(LEFT_SECONDS)
    texts = [bytes(kept).decode(errors="replace") for kept in (output[: most_bytes + 1], errors)]
    return Completed(None if killed.is_set() else status, *texts)


@contextlib.contextmanager
def _session(command: Sequence[str], **options: Any) -> Iterator[subprocess.Popen[Any]]:
    """A command that leads a session of its own. Whatever interrupts the block kills it, with all that it started:
    Ctrl-C reaches us alone."""
    process = None
    try:
        with _interrupted_afterwards():
            process = subprocess.Popen(command, start_new_session=True, **options)
        yield process
    except BaseException:
        if process is not None:
            _kill(process)
            process.wait()
        raise


@contextlib.contextmanager
def _interrupted_afterwards() -> Iterator[None]:
    """Ctrl-C and SIGTERM take effect after the block: in the middle of a start they would lose the process."""
    came: list[int] = []
    with contextlib.ExitStack() as stack:
        if threading.current_thread() is threading.main_thread():  # Python interrupts no other
            for number in (signal.SIGINT, signal.SIGTERM):
                if callable(signal.getsignal(number)):
                    stack.callback(signal.signal, number, signal.signal(number, lambda got, _: came.append(got)))
        yield
    for each in came:
        signal.raise_signal(each)


def _kill(process: subprocess.Popen[Any]) -> None:
    """Kills a command with all that it started, whose session it leads."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)


def _rest_of(process: subprocess.Popen[str]) -> tuple[str, str]:
    """What a killed command has written; what left its session may hold the pipes for as long as it likes."""
    try:
        return process.communicate(timeout=LEFT_SECONDS)
    except subprocess.TimeoutExpired as error:
        output, errors = ((piece or b"").decode(errors="replace") for piece in (error.output, error.stderr))
        return output, errors


def sysctl(name: str) -> str:
    """A value of macOS's kernel; nothing where it has none of that name."""
    return output(["sysctl", "-n", name]).strip()
