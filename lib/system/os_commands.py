"""The output of the operating system's commands. All go through this module, so that a test can replace the system."""

from __future__ import annotations

import platform
import shutil
import subprocess
from collections.abc import Sequence

LIMIT_SECONDS = 10.0


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


def sysctl(name: str) -> str:
    """A value of macOS's kernel; nothing where it has none of that name."""
    return output(["sysctl", "-n", name]).strip()
