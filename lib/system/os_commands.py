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
    try:
        process = subprocess.Popen(
            command,
            cwd=directory,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            start_new_session=True,
        )
    except OSError as error:
        return Completed(127, "", f"{command[0]}: {error.strerror}")
    with process:
        try:
            output, errors = process.communicate(timeout=limit_seconds)
            return Completed(process.returncode, output, errors)
        except subprocess.TimeoutExpired:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL)
            output, errors = process.communicate()
            return Completed(None, output, errors)


def sysctl(name: str) -> str:
    """A value of macOS's kernel; nothing where it has none of that name."""
    return output(["sysctl", "-n", name]).strip()
