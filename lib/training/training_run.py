"""What all parts of a run's training share."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import mlx.nn as nn
import mlx.optimizers as optim

from lib.config.schema import Config
from lib.distributed.gradients import Arrays
from lib.distributed.world import World
from lib.plan.replan import Schedule
from lib.telemetry.run_records import PerformanceTracker
from lib.training.checkpoint import CheckpointWriter, Progress, RankArrays, TrainingState, save_all, share
from lib.training.console import RunConsole
from lib.training.local_sgd import LocalSGD


@dataclass
class TrainingRun:
    """One run on this rank.

    Args:
        steps: of the whole run.
        local_sgd: where ranks are independent; None where they take every step together.
        feedback: what compression left out of this rank's gradients so far, by name.
    """

    config: Config
    folder: Path
    world: World
    model: nn.Module
    optimizer: optim.Optimizer
    schedule: Schedule
    steps: int
    local_sgd: LocalSGD | None
    progress: Progress
    say: RunConsole
    tracker: PerformanceTracker
    feedback: Arrays = field(default_factory=dict)

    @property
    def is_never_merged(self) -> bool:
        """Whether every rank ends with a model of its own."""
        return self.local_sgd is not None and self.local_sgd.method == "none"

    def save(self, writer: CheckpointWriter) -> None:
        """Writes a checkpoint; where none can be written, says why, and training goes on.

        Raises:
            AgreedError: the last one cannot be written.
        """
        progress = self.progress
        own: RankArrays | None
        if self.local_sgd is not None:
            own = self.local_sgd.own_arrays(self.optimizer)
        else:  # replicas on unlike machines drift by roundings, so all take rank 0's weights first
            share(self.world, self.model, self.optimizer)
            own = {"feedback": self.feedback} if self.config.sync.compression != "none" else None
        plan = self.schedule.at(progress.step + 1).to_dict()
        state = TrainingState(self.config, progress, self.model, self.optimizer, plan, own)
        is_last = progress.step == self.steps
        if fault := save_all(self.folder, state, self.world, writer, self.tracker, is_last):
            self.say.warning(fault, progress.step)
