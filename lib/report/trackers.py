"""Other places for a run's metrics (`run.sinks`): TensorBoard, trackio, wandb. Each package is imported on demand."""

from __future__ import annotations

import hashlib
import importlib
import math
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from lib.errors import UserError
from lib.system.records import Record

Sink = tuple[Callable[[int, dict[str, float]], Any], Callable[[], Any]]  # takes (step, figures by name); closes it

PACKAGES = {"tensorboard": "tensorboardX", "trackio": "trackio", "wandb": "wandb"}
PREFIXES = {"step": "train", "evaluation": "held_out"}  # of the figures' names, by the kind of their record


class Trackers:
    """Sends rank 0's records to the sinks. One that fails is reported once and left out; the run goes on."""

    def __init__(self, names: Sequence[str], folder: Path):
        self.names, self.folder = tuple(dict.fromkeys(names)), folder
        self._open: dict[str, Sink] = {}
        for name in self.names:
            try:
                importlib.import_module(PACKAGES[name])
            except ImportError as error:
                needs = f"{name} needs the package {PACKAGES[name]} ({error})"
                raise UserError(f"run.sinks: {needs}; run pip install {PACKAGES[name]}") from error

    def take(self, entry: Record) -> str | None:
        """A run's record: `start` opens the sinks, `end` closes them; a `step`'s or `evaluation`'s figures go to each.
        Returns: Why a sink gets no more."""
        faults, kind = [], entry["kind"]
        for name in self.names if kind == "start" else [*self._open]:
            try:
                if kind == "start":
                    self._open[name] = open_sink(name, self.folder, entry["config"], entry["resumed_from_step"])
                elif kind == "end":
                    self._open.pop(name)[1]()
                elif kind in PREFIXES:
                    self._open[name][0](entry["step"], figures(PREFIXES[kind], entry))
            except Exception as error:  # of a foreign package
                self._open.pop(name, None)
                why = " ".join(f"{type(error).__name__}: {error}".split())
                faults.append(f"run.sinks: {name} gets no more of this run, whose own logs are whole ({why})")
        return "; ".join(faults) or None


def figures(prefix: str, entry: Mapping[str, object]) -> dict[str, float]:
    """The finite numbers of a record, named e.g. `train/loss`."""
    return {
        f"{prefix}/{key}": float(value)
        for key, value in entry.items()
        if isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
        if key not in ("time", "rank", "step")
    }


def open_sink(name: str, folder: Path, config: object, resumed_step: int | None) -> Sink:
    """Event files in the run's `tensorboard/`, from which steps that a crash undid are purged; or a run of the project
    `tandem`, in which they stay, of trackio, by default on this machine, or of wandb, by its own login
    (WANDB_MODE=offline keeps it in the run's `wandb/`)."""
    package: Any = importlib.import_module(PACKAGES[name])
    if name == "tensorboard":
        purge = None if resumed_step is None else resumed_step + 1
        suffix = f".{time.time_ns()}"  # two starts in one second have a file each
        words = {"purge_step": purge, "flush_secs": 5, "filename_suffix": suffix}
        writer = package.SummaryWriter(str(folder / "tensorboard"), **words)
        return lambda step, values: [writer.add_scalar(*value, step) for value in values.items()], writer.close
    if name == "trackio":
        resume = "never" if resumed_step is None else "allow"
        run = package.init("tandem", folder.name, config=config, resume=resume)
    else:
        key = hashlib.sha256(str(folder.resolve()).encode()).hexdigest()[:16]  # the same when resumed
        words = {"resume": None if resumed_step is None else "allow", "settings": package.Settings(login_timeout=60)}
        run = package.init(project="tandem", name=folder.name, id=key, dir=folder, config=config, **words)
    return lambda step, values: run.log(values, step=step), run.finish
