"""Checkpoints that are whole or absent, and the run folder that one process owns at a time.

A checkpoint is written beside its place, flushed to the disk, hashed and renamed; reading it checks every hash.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import math
import os
import re
import shutil
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import IO, Any

import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers as optim
from mlx.utils import tree_flatten, tree_unflatten

from lib import model as models
from lib.config import Config, UserError, dump
from lib.order import Position
from lib.sync import World

OPTIMIZER = "optimizer.safetensors"
STATE = "state.json"
MANIFEST = "manifest.json"


@dataclass
class Progress:
    """How far a run is. All that is random follows from train.seed and these numbers, so no generator state is kept."""

    data_digest: str
    step: int = 0
    epoch: int = 0
    cursor: int = 0  # examples of this epoch that were trained
    pairs: int = 0
    tokens: int = 0
    seconds: float = 0.0  # spent in steps
    skipped_in_row: int = 0
    best_step: int | None = None
    best_loss: float | None = None
    before: dict[str, float | None] = field(default_factory=dict)  # the evaluation before the first step
    schedule: dict[str, Any] = field(
        default_factory=dict
    )  # the plans in force and to come, as lib/schedule.py keeps them

    def count(self, step: int, position: Position, pairs: int, tokens: int, seconds: float, skipped: bool) -> None:
        """Adds one step."""
        self.step, self.epoch, self.cursor = step, position.epoch, position.cursor
        self.pairs += pairs
        self.tokens += tokens
        self.seconds += seconds
        self.skipped_in_row = self.skipped_in_row + 1 if skipped else 0

    def is_best(self, step: int, loss: float | None) -> bool:
        """Whether the held-out loss is the lowest so far; then it is the one to beat."""
        if loss is None or not math.isfinite(loss) or (self.best_loss is not None and loss >= self.best_loss):
            return False
        self.best_step, self.best_loss = step, loss
        return True


def open_run(folder: Path, config: Config, plan: dict[str, Any], resume: bool) -> IO[str]:
    """Makes this process the run's only owner for as long as the returned file stays open, and writes what it will do.

    Raises:
        UserError: another process owns the folder, or it holds a run and is not resumed.
    """
    lock = _claim(folder)
    if (folder / "config.yaml").exists() and not resume:
        raise UserError(
            f"run folder {folder} already holds a run; go on with it by --resume {folder}, or give another run.name"
        )
    _write(folder / "plan.json", json.dumps(plan, indent=2) + "\n")
    _write(folder / "config.yaml", dump(config))  # last: where it is, there is a run to resume
    return lock


def _write(path: Path, text: str) -> None:
    """Writes a small file whole or not at all."""
    unfinished = path.with_name(f".{path.name}")
    unfinished.write_text(text)
    _fsync(unfinished)
    unfinished.replace(path)


def _claim(folder: Path) -> IO[str]:
    folder.mkdir(parents=True, exist_ok=True)
    lock = (folder / ".lock").open("a+")
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        lock.seek(0)
        raise UserError(
            f"run folder {folder} is in use by process {lock.read().strip() or '?'}; wait for it, or give another run.name"
        ) from None
    lock.truncate(0)
    lock.write(f"{os.getpid()}\n")
    lock.flush()
    return lock


def save(
    folder: Path, progress: Progress, model: nn.Module, optimizer: optim.Optimizer, config: Config, plan: dict[str, Any]
) -> Path:
    """Writes `folder/step-XXXXXXXX`, all of it or nothing.

    Raises:
        OSError: the disk is full or not writable; earlier checkpoints are untouched.
    """
    final = folder / f"step-{progress.step:08d}"
    unfinished = folder / f".unfinished-{progress.step:08d}"
    shutil.rmtree(unfinished, ignore_errors=True)
    unfinished.mkdir(parents=True)
    try:
        models.save_trained(model, config.model, unfinished)
        mx.save_safetensors(str(unfinished / OPTIMIZER), dict(tree_flatten(optimizer.state)))
        (unfinished / "config.yaml").write_text(dump(config))
        (unfinished / "plan.json").write_text(json.dumps(plan, indent=2) + "\n")
        (unfinished / STATE).write_text(json.dumps(asdict(progress), indent=2) + "\n")
        hashes = {file.name: _sha256(file) for file in sorted(unfinished.iterdir())}
        (unfinished / MANIFEST).write_text(json.dumps(hashes, indent=2) + "\n")
        for file in unfinished.iterdir():
            _fsync(file)
        _fsync(unfinished)
        shutil.rmtree(final, ignore_errors=True)  # left from a run that a resume went back behind
        unfinished.rename(final)
        _fsync(folder)
    except RuntimeError as error:  # what MLX raises when a write fails
        shutil.rmtree(unfinished, ignore_errors=True)
        free = shutil.disk_usage(folder).free
        raise OSError(
            None, f"cannot be written, {free:,} bytes are free there ({str(error).splitlines()[0]})", str(final)
        ) from None
    except OSError:
        shutil.rmtree(unfinished, ignore_errors=True)
        raise
    return final


def prune(folder: Path, keep: int, best_step: int | None) -> None:
    """Removes all but the newest `keep` checkpoints and the best one."""
    for path in _checkpoints(folder)[keep:]:
        if _step(path) != best_step:
            shutil.rmtree(path, ignore_errors=True)


def newest(folder: Path) -> tuple[Path | None, list[str]]:
    """The newest whole checkpoint, if any, and a warning for each newer one that is torn or tampered with."""
    warnings: list[str] = []
    for path in _checkpoints(folder):
        fault = _fault(path)
        if fault is None:
            return path, warnings
        warnings.append(f"checkpoint {path} is damaged ({fault}); the one before it is taken")
    return None, warnings


def restore(path: Path, model: nn.Module, optimizer: optim.Optimizer, data_digest: str) -> Progress:
    """Puts a checkpoint's weights and optimizer state back, bit for bit, and returns how far it was.

    Raises:
        UserError: the weights do not fit, or the training data is no longer the same.
    """
    progress = Progress(**json.loads((path / STATE).read_text()))
    if progress.data_digest != data_digest:
        raise UserError(
            f"{path}: data.train is no longer what this run was trained on; put the file back, or start a new run with model.adapter={path}"
        )
    models.load_trained(model, path, "checkpoint")
    optimizer.state = tree_unflatten(list(mx.load(str(path / OPTIMIZER)).items()))
    mx.eval(model.trainable_parameters(), optimizer.state)
    return progress


def resume(
    newest: Path | None, model: nn.Module, optimizer: optim.Optimizer, start: Progress, world: World
) -> Progress:
    """Takes every rank to rank 0's newest checkpoint; to `start`, as training would begin, where there is none.

    Raises:
        AgreedError: as `restore`.
    """
    optimizer.init(model.trainable_parameters())
    with world.agreeing("resuming"):
        progress = start if newest is None else restore(newest, model, optimizer, start.data_digest)
    share(world, model, optimizer)
    return Progress(**json.loads(world.broadcast_text(json.dumps(asdict(progress)))))


def share(world: World, model: nn.Module, optimizer: optim.Optimizer) -> None:
    """Gives every rank rank 0's trained weights and optimizer state."""
    if world.size == 1:
        return
    model.update(world.broadcast(model.trainable_parameters()))
    optimizer.state = world.broadcast(optimizer.state)


def _checkpoints(folder: Path) -> list[Path]:
    """Newest first."""
    return sorted(
        (path for path in folder.glob("step-*") if re.fullmatch(r"step-\d+", path.name)), key=_step, reverse=True
    )


def _step(path: Path) -> int:
    return int(path.name.removeprefix("step-"))


def _fault(path: Path) -> str | None:
    try:
        hashes = json.loads((path / MANIFEST).read_text())
        for name, expected in hashes.items():
            if _sha256(path / name) != expected:
                return f"{name} does not match its hash"
    except (OSError, ValueError, AttributeError) as error:
        return str(error)
    return None if {STATE, OPTIMIZER, models.WEIGHTS} <= hashes.keys() else "files are missing from its manifest"


def _sha256(file: Path) -> str:
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def _fsync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
