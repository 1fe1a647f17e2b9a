"""Other places for a run's metrics (`run.sinks`): TensorBoard, trackio, wandb. Each package is imported on demand."""

from __future__ import annotations

import hashlib
import importlib
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

from lib.errors import UserError
from lib.system.records import Record

Write = Callable[[int, dict[str, float]], Any]  # (step, figures by name)

PACKAGES = {"tensorboard": "tensorboardX", "trackio": "trackio", "wandb": "wandb"}
PREFIXES = {"step": "train", "evaluation": "held_out"}  # of the figures' names, by the kind of their record


class Trackers:
    """Sends rank 0's records to the sinks. One that fails is reported once and left out; the run goes on."""

    def __init__(self, names: Sequence[str], folder: Path):
        self.names, self.folder = tuple(dict.fromkeys(names)), folder
        self._open: dict[str, tuple[AbstractContextManager[Write], Write]] = {}
        for name in self.names:
            try:
                importlib.import_module(PACKAGES[name])
            except ImportError as error:
                needs = f"{name} needs the package {PACKAGES[name]} ({error})"
                raise UserError(f"run.sinks: {needs}; run pip install {PACKAGES[name]}") from error

    def take(self, entry: Record) -> str | None:
        """A run's record: `start` opens the sinks, `end` closes them; a `step`'s or `evaluation`'s figures go to each.

        Returns:
            Why a sink gets no more.
        """
        faults = []
        for name in self.names if entry["kind"] == "start" else [*self._open]:
            try:
                self._send(name, entry)
            except Exception as error:  # of a foreign package
                self._open.pop(name, None)
                why = " ".join(f"{type(error).__name__}: {error}".split())
                faults.append(f"run.sinks: {name} gets no more of this run, whose own logs are whole ({why})")
        return "; ".join(faults) or None

    def _send(self, name: str, entry: Record) -> None:
        if entry["kind"] == "start":
            sink = SINKS[name](self.folder, entry["config"], entry["resumed_from_step"])
            self._open[name] = sink, sink.__enter__()
        elif entry["kind"] == "end":
            self._open.pop(name)[0].__exit__(None, None, None)
        elif entry["kind"] in PREFIXES:
            self._open[name][1](entry["step"], figures(PREFIXES[entry["kind"]], entry))


def figures(prefix: str, entry: Mapping[str, object]) -> dict[str, float]:
    """The finite numbers of a record, named e.g. `train/loss`."""
    return {
        f"{prefix}/{key}": float(value)
        for key, value in entry.items()
        if isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
        if key not in ("time", "rank", "step")
    }


@contextmanager
def _tensorboard(folder: Path, config: object, resumed_step: int | None) -> Iterator[Write]:
    """Event files in the run's `tensorboard/`; steps that a crash undid are purged."""
    from tensorboardX import SummaryWriter

    purge = None if resumed_step is None else resumed_step + 1
    suffix = f".{time.time_ns()}"  # two starts in one second have a file each
    with SummaryWriter(str(folder / "tensorboard"), purge_step=purge, flush_secs=5, filename_suffix=suffix) as writer:
        yield lambda step, values: [writer.add_scalar(name, value, step) for name, value in values.items()]


@contextmanager
def _trackio(folder: Path, config: object, resumed_step: int | None) -> Iterator[Write]:
    """A run of the project `tandem`, by default on this machine. Steps that a crash undid stay in it."""
    import trackio

    run = trackio.init("tandem", folder.name, config=config, resume="never" if resumed_step is None else "allow")
    yield lambda step, values: run.log(values, step=step)
    run.finish()


@contextmanager
def _wandb(folder: Path, config: object, resumed_step: int | None) -> Iterator[Write]:
    """A run of the project `tandem`, by wandb's own login; WANDB_MODE=offline keeps it in the run's `wandb/`."""
    import wandb

    key = hashlib.sha256(str(folder.resolve()).encode()).hexdigest()[:16]  # the same when resumed
    resume, settings = None if resumed_step is None else "allow", wandb.Settings(login_timeout=60)
    run = wandb.init(
        project="tandem", name=folder.name, id=key, dir=folder, config=config, resume=resume, settings=settings
    )
    yield lambda step, values: run.log(values, step=step)
    run.finish()


SINKS: dict[str, Callable[[Path, object, int | None], AbstractContextManager[Write]]] = {
    "tensorboard": _tensorboard,
    "trackio": _trackio,
    "wandb": _wandb,
}
