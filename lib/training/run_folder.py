"""A run's folder on the disk: whose its files are, what a killed process left there, and checkpoints that go."""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import shutil
from pathlib import Path
from typing import IO

from lib.errors import UserError
from lib.system import files

# What a run writes before its config.yaml, a place for its logs, and what macOS and NFS leave in any folder.
BEFORE_A_RUN = re.compile(r"\.lock|plan\.json|logs|.*\.unfinished|\.disk-.*|\.DS_Store|\._.*|\.nfs.*")

UNFINISHED = ("*.unfinished", "logs/**/*.unfinished", "rounds/*/*.unfinished", "checkpoints/**/.unfinished-*")


def claim(folder: Path) -> IO[str]:
    """Makes this process the folder's only owner, for as long as the file stays open.

    Raises:
        UserError: another process owns it, or something in it is not the run's own.
    """
    folder.mkdir(parents=True, exist_ok=True)
    lock = (folder / ".lock").open("a+", encoding="utf-8")
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        with lock:
            lock.seek(0)
            owner = lock.read().strip() or "?"
        raise UserError(
            f"run folder {folder} is in use by process {owner}; wait for it, or give another run.name"
        ) from None
    lock.truncate(0)
    lock.write(f"{os.getpid()}\n")
    lock.flush()
    return lock


def own_folder(folder: Path, rank: int) -> Path:
    """Where a run keeps one rank's own adapter, if ranks have one.

    Raises:
        UserError: there is a link in its place.
    """
    own = folder / "ranks" / f"rank-{rank:03d}"
    for path in (own.parent, own):
        files.make_own(path)
    return own


def require_free(folder: Path) -> None:
    """Makes sure that a new run writes over no files of another kind.

    Raises:
        UserError: there is something else than a run, or than what one leaves that is killed before its config.yaml.
    """
    names = {path.name for path in folder.iterdir()}
    strangers = sorted(name for name in names if not BEFORE_A_RUN.fullmatch(name) and not _is_unfinished(folder / name))
    if strangers and "config.yaml" not in names:
        raise UserError(f"run folder {folder} exists and is not a run: it holds {strangers[0]}; give another run.name")


def _is_unfinished(folder: Path) -> bool:
    """Whether it is a run's folder of checkpoints or rounds, with nothing whole in it."""
    files = (path for path in folder.rglob("*") if not path.is_dir())
    return folder.name in ("checkpoints", "rounds") and all(".unfinished" in str(path) for path in files)


def discard(path: Path) -> None:
    """Removes a checkpoint, if there is one: from its first file on it has no checkpoint's name any more."""
    unfinished = path.with_name(f".unfinished-{path.name}")
    shutil.rmtree(unfinished, ignore_errors=True)
    with contextlib.suppress(OSError):
        path.rename(unfinished)
        shutil.rmtree(unfinished, ignore_errors=True)


def sweep(folder: Path) -> None:
    """Removes what a process that was killed left unfinished of a run: its owner alone writes there."""
    for path in [
        found
        for pattern in (*UNFINISHED, ".disk-*")  # which every rank of this start has seen by now
        for found in folder.glob(pattern)
    ]:
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)
