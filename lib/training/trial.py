"""A run of three steps that shows how long a step takes, before the run that is wanted."""

from __future__ import annotations

import contextlib
import io
import shutil
import statistics
import tempfile
from collections.abc import Callable
from pathlib import Path

from lib.config.settings import Config
from lib.distributed.world import World
from lib.system.records import read_records

CHANGES = {
    "run": {"name": "trial", "pages": False, "sinks": ()},
    "train": {"steps": 3},
    "data": {"valid": None, "holdout": 0.0},
    "evaluate": {"every": None, "answers": None, "samples": 0},
    "checkpoint": {"every": None},
    "plan": {"replan": False},
}


def step_seconds(config: Config, world: World, train: Callable[[Config, World, bool, bool], None]) -> float:
    """The slowest rank's mean of the second and third step, in a folder that is deleted."""
    folder = Path(world.broadcast_text(tempfile.mkdtemp(prefix="tandem-trial-") if world.rank == 0 else ""))
    changes = {name: getattr(config, name).model_copy(update=values) for name, values in CHANGES.items()}
    changes["run"] = changes["run"].model_copy(update={"dir": str(folder)})
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            train(config.model_copy(update=changes), world, False, False)
        records = read_records(folder / "trial" / "logs" / f"rank-{world.rank:03d}.jsonl")
        steps = [float(str(record.get("step_seconds"))) for record in records if record["kind"] == "step"]
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return max(float(text) for text in world.gather_text(repr(statistics.fmean(steps[1:] or steps)), "a trial's steps"))
