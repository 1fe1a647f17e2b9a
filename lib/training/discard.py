"""Checkpoints that go, and what a killed process left: never half of one under a checkpoint's name."""

from __future__ import annotations

import contextlib
import shutil
from pathlib import Path


def discard(path: Path) -> None:
    """Removes a checkpoint, if there is one: from its first file on it has no checkpoint's name any more."""
    unfinished = path.with_name(f".unfinished-{path.name}")
    shutil.rmtree(unfinished, ignore_errors=True)
    with contextlib.suppress(OSError):
        path.rename(unfinished)
        shutil.rmtree(unfinished, ignore_errors=True)


def sweep(folder: Path) -> None:
    """Removes what a process that was killed left unfinished of a run: its owner alone writes there."""
    for path in [*folder.glob("*.unfinished"), *folder.glob("checkpoints/**/.unfinished-*")]:
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)
