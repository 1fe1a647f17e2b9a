"""Trainings on the ranks of `mpirun -n N pytest`, each of which runs these lines."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import train as script
from lib.config import load
from lib.distributed.world import World
from tests import tiny


def train(world: World, folder: Path, words: list[str], name: str, resume: bool = False) -> Path:
    """A run in this process, finished on all ranks; with a world of one each rank trains by itself."""
    script.train(load.load(None, [*words, f"run.name={name}"]), world, resume=resume, dry_run=False)
    world.gather_text("finished")
    return folder / "runs" / name


def settings(world: World, folder: Path, *words: str, shape: dict[str, Any] | None = None, **changes: Any) -> list[str]:
    """The same words on every rank; rank 0 writes the files, before anyone reads them. shape: of the model."""
    mine: list[str] = []
    if world.rank == 0:
        mine = tiny.settings(folder, **changes)
        tiny.model_folder(folder / "model", **(shape or {}))
    return [*world.broadcast_value(mine), *words]
