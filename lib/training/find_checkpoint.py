"""Which checkpoint of a run is meant by `best`, `last` or a step's number, and whether it is whole."""

from __future__ import annotations

import json
from pathlib import Path

from lib.errors import UserError
from lib.model import adapter_files
from lib.training.checkpoint import MANIFEST, OPTIMIZER, STATE, checkpoints_in, file_sha256, step_of


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
    if which not in ("best", "last") and not (which.isascii() and which.isdigit()):
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
        best_step = json.loads((newest / STATE).read_text()).get("best_step")
        if best_step is None:
            raise UserError(f"--checkpoint best: {run} has no held-out loss; give last, or a step's number ({steps})")
        step = int(best_step)
    if step not in saved:
        raise UserError(f"--checkpoint {which}: {run} has no checkpoint of step {step}; it has {steps}")
    if fault := fault_of(saved[step]):
        raise UserError(f"--checkpoint {which}: {saved[step]} is damaged ({fault}); the others are of steps {steps}")
    return saved[step]


def fault_of(path: Path) -> str | None:
    """What is wrong with a checkpoint's files, by the hashes in its manifest; None where all are whole."""
    try:
        hashes = json.loads((path / MANIFEST).read_text())
        for name, expected in hashes.items():
            if file_sha256(path / name) != expected:
                return f"{name} does not match its hash"
    except (OSError, ValueError, AttributeError) as error:
        return str(error)
    return (
        None
        if {STATE, OPTIMIZER, adapter_files.ADAPTER_WEIGHTS} <= hashes.keys()
        else "files are missing from its manifest"
    )
