"""The output of the operating system's commands. All go through this module, so that a test can replace the system."""

from __future__ import annotations

import contextlib
import os
import platform
import shutil
import signal
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

LIMIT_SECONDS = 10.0


class Completed(NamedTuple):
    """How a command ended; `status` is None where it was killed at its limit."""

    status: int | None
    output: str
    errors: str


def is_mac() -> bool:
    """Whether this is macOS."""
    return platform.system() == "Darwin"


def own_cores() -> int:
    """The cores that this process may use: by its affinity, which mpirun, taskset or a container may have narrowed."""
    affinity = getattr(os, "sched_getaffinity", None)  # Linux has it, macOS does not
    return len(affinity(0)) if affinity else os.cpu_count() or 1


def run(
    command: Sequence[str],
    limit_seconds: float,
    directory: Path | None = None,
    environment: Mapping[str, str] | None = None,
    text: str | None = None,
) -> Completed:
    """Runs a command for at most so long, with `text` as its input; then it is killed with all that it started."""
    pipe = subprocess.PIPE
    options: dict[str, object] = {"stdin": subprocess.DEVNULL if text is None else pipe, "stdout": pipe, "stderr": pipe}
    options |= {"cwd": directory, "env": environment, "text": True, "errors": "replace", "start_new_session": True}
    try:
        process = subprocess.Popen(command, **options)  # type: ignore[call-overload]
    except OSError as error:
        return Completed(127, "", f"{command[0]}: {error.strerror}")
    with process:
        try:
            output, errors = process.communicate(text, timeout=limit_seconds)
            return Completed(process.returncode, output, errors)
        except BaseException as error:  # Ctrl-C reaches us alone, since the command has a session of its own
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL)
            if not isinstance(error, subprocess.TimeoutExpired):
                raise
            output, errors = process.communicate()
            return Completed(None, output, errors)


def output(command: Sequence[str], limit_seconds: float = LIMIT_SECONDS) -> str:
    """What a command prints on its standard output; nothing if it is missing, fails, or takes longer."""
    if shutil.which(command[0]) is None:
        return ""  # without a fork, which some MPI networks do not bear well
    done = run(command, limit_seconds)
    return done.output if done.status == 0 else ""  # scutil and nvidia-smi print why they failed there


def sysctl(name: str) -> str:
    """A value of macOS's kernel; nothing where it has none of that name."""
    return output(["sysctl", "-n", name]).strip()
