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

Write = Callable[[int, dict[str, float]], None]  # (step, figures by name)

PACKAGES = {"tensorboard": "tensorboardX", "trackio": "trackio", "wandb": "wandb"}
PREFIXES = {"step": "train", "evaluation": "held_out"}  # of the figures' names, by the kind of their record


class Trackers:
    """Sends rank 0's records to the sinks. One that fails is reported once and left out; the run goes on.

    Raises:
        UserError: a sink's package cannot be imported.
    """

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
        faults: list[str | None] = []
        if entry["kind"] == "start":
            faults = [self._attempt(name, self._start, name, entry) for name in self.names]
        elif (prefix := PREFIXES.get(entry["kind"])) is not None:
            values = figures(prefix, entry)
            faults = [self._attempt(name, write, entry["step"], values) for name, (_, write) in [*self._open.items()]]
        elif entry["kind"] == "end":
            faults = [self._attempt(name, sink.__exit__, *[None] * 3) for name, (sink, _) in [*self._open.items()]]
            self._open.clear()
        return "; ".join(fault for fault in faults if fault) or None

    def _start(self, name: str, entry: Record) -> None:
        sink = SINKS[name](self.folder, entry["config"], entry["resumed_from_step"])
        self._open[name] = sink, sink.__enter__()

    def _attempt(self, name: str, do: Callable[..., Any], *arguments: Any) -> str | None:
        try:
            do(*arguments)
        except Exception as error:  # of a foreign package
            self._open.pop(name, None)
            why = " ".join(f"{type(error).__name__}: {error}".split())
            return f"run.sinks: {name} gets no more of this run, whose own logs are whole ({why})"
        return None


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

        def write(step: int, values: dict[str, float]) -> None:
            for name, value in values.items():
                writer.add_scalar(name, value, step)

        yield write


@contextmanager
def _trackio(folder: Path, config: object, resumed_step: int | None) -> Iterator[Write]:
    """A run of the project `tandem`, on this machine unless trackio's own variables name another.

    Steps that a crash undid stay in it.
    """
    import trackio

    run = trackio.init("tandem", folder.name, config=config, resume="never" if resumed_step is None else "allow")
    yield lambda step, values: run.log(values, step=step)
    run.finish()


@contextmanager
def _wandb(folder: Path, config: object, resumed_step: int | None) -> Iterator[Write]:
    """A run of the project `tandem`, by wandb's own login; WANDB_MODE=offline keeps it in the run's `wandb/`."""
    import wandb

    run = wandb.init(
        project="tandem",
        name=folder.name,
        id=hashlib.sha256(str(folder.resolve()).encode()).hexdigest()[:16],  # the same when resumed
        dir=folder,
        config=config,
        resume=None if resumed_step is None else "allow",
        settings=wandb.Settings(login_timeout=60),
    )
    yield lambda step, values: run.log(values, step=step)
    run.finish()


SINKS: dict[str, Callable[[Path, object, int | None], AbstractContextManager[Write]]] = {
    "tensorboard": _tensorboard,
    "trackio": _trackio,
    "wandb": _wandb,
}
