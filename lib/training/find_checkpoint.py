"""Which checkpoint of a run is meant by `best`, `last` or a step's number, and whether it is whole."""

from __future__ import annotations

import functools
import json
import os
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from lib.config.read_file import read_text
from lib.errors import UserError
from lib.model import adapter_files
from lib.training.checkpoint import (
    MANIFEST,
    OPTIMIZER,
    REFERENCE,
    STATE,
    Progress,
    checkpoints_in,
    file_sha256,
    step_of,
)

STATE_BYTES = 2**26


def find(run: Path, which: str) -> Path:
    """The folder of a run's checkpoint, in mlx-lm's adapter layout, every file checked against its hash.

    Args:
        run: the run's folder.
        which: `best` (the lowest held-out loss), `last` (the newest that is whole), or a step's number.

    Raises:
        UserError: there is no such checkpoint, or it is damaged.
    """
    saved = {step_of(path): path for path in checkpoints_in(run / "checkpoints")}
    steps = ", ".join(map(str, sorted(saved))) or "none"
    if which not in ("best", "last") and not (which.isascii() and which.isdigit() and len(which) < 18):
        raise UserError(f"--checkpoint {which}: give best, last, or a step's number ({run} has {steps})")
    if which.isdigit():
        step = int(which)
    else:
        newest = next((path for path in saved.values() if fault_of(path) is None), None)
        if newest is None:
            raise UserError(f"--checkpoint {which}: {run} has no whole checkpoint (checkpoints there: {steps})")
        if which == "last":
            return newest
        # Every better model is saved at once: the newest checkpoint knows the best of all evaluations so far.
        best_step = read_progress(newest).best_step
        if best_step is None:
            raise UserError(f"--checkpoint best: {run} has no held-out loss; give last, or a step's number ({steps})")
        step = int(best_step)
    if step not in saved:
        raise UserError(f"--checkpoint {which}: {run} has no checkpoint of step {step}; it has {steps}")
    if fault := fault_of(saved[step]):
        raise UserError(f"--checkpoint {which}: {saved[step]} is damaged ({fault}); the others are of steps {steps}")
    return saved[step]


def read_progress(path: Path) -> Progress:
    """How far a checkpoint is, by its state.json, which anybody may have changed: the manifest proves no author.

    Raises:
        UserError: as `progress_of`, or it is of another step.
    """
    progress = progress_of(read_text(path / STATE, "checkpoint", STATE_BYTES))
    if progress.step != step_of(path):
        raise UserError(f"{STATE} is of step {progress.step}")
    return progress


def progress_of(text: str) -> Progress:
    """What a state.json says.

    Raises:
        UserError: a field is missing, unknown or of another type, or a number is negative or not finite.
    """
    try:
        progress = _of_progress().validate_json(text)
    except ValidationError as error:
        fault = error.errors()[0]
        where = ".".join(map(str, fault["loc"]))
        raise UserError(f"{STATE}: {where + ': ' if where else ''}{fault['msg']}") from None
    counts = asdict(replace(progress, before={}, best_metrics={}, best_loss=None, schedule={}))
    if not is_sound(counts):
        raise UserError(f"{STATE} has a count that is negative or not finite")
    if (why := _inconsistency(progress)) is not None:
        raise UserError(f"{STATE}: {why}")
    return progress


def _inconsistency(progress: Progress) -> str | None:
    """What cannot be of one run, though each field by itself could."""
    rounds, shares = progress.rounds, progress.rounds.get("shares", [])
    ranks = len(shares)
    if len(progress.rewards) != 2:
        return "rewards: not a sum and a count"
    if progress.best_step is None and progress.best_loss is not None:  # rounds may have the one without the other
        return "best_loss: of no step"
    if rounds and not sum(shares):
        return "rounds: no rank has a share"
    if not all(progress.resumes) or len(progress.resume_ids) > len(progress.resumes):
        return "resumes: one has no step, or there are more ids than resumes"
    of_ranks: list[Sequence[float | None]] = [
        rounds.get("speeds", [0.0] * ranks),
        rounds.get("max_micro_batch_sizes") or [None] * ranks,
    ]
    if any(len(values) != ranks for values in of_ranks):
        return f"rounds: its lists are not all of {ranks} ranks"
    if 0 in (rounds.get("max_micro_batch_sizes") or []):
        return "rounds: a micro-batch of no pairs"
    return None


@functools.cache
def _of_progress() -> TypeAdapter[Progress]:
    return TypeAdapter(Progress)


def is_sound(value: Any) -> bool:
    """Whether no number in it is negative or not finite; rewards may be negative."""
    if isinstance(value, dict):
        return all(is_sound(item) for name, item in value.items() if not str(name).startswith("rewards"))
    if isinstance(value, list | tuple):
        return all(map(is_sound, value))
    return not isinstance(value, int | float) or 0 <= value < 2**63


def fault_of(path: Path) -> str | None:
    """What is wrong with a checkpoint's files, by its manifest's hashes and its state; None where all are whole."""
    try:
        hashes = json.loads(read_text(path / MANIFEST, "manifest", STATE_BYTES))
        for name, expected in hashes.items():
            if Path(name).name != name or not (path / name).is_file():
                return f"{name} is no file of it"
            if file_sha256(path / name) != expected:
                return f"{name} does not match its hash"
    except (UserError, OSError, ValueError, AttributeError, TypeError, RecursionError) as error:
        return str(error)
    may_be = [name for name in (adapter_files.ADAPTER_CONFIG, REFERENCE) if os.path.lexists(path / name)]
    if not {STATE, OPTIMIZER, adapter_files.ADAPTER_WEIGHTS, *may_be} <= hashes.keys():
        return "files are missing from its manifest"
    try:
        read_progress(path)
    except (UserError, OSError) as error:
        return str(error)
    return None
