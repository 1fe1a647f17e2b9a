"""What all parts of a run's training share."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

import mlx.nn as nn
import mlx.optimizers as optim

from lib.config.schema import Config
from lib.distributed.compression import Arrays
from lib.distributed.world import World
from lib.plan.cluster_plan import ClusterPlan
from lib.plan.replan import Schedule
from lib.telemetry.run_records import PerformanceTracker
from lib.telemetry.trackers import Feed
from lib.training.checkpoint import CheckpointWriter, Progress, RankArrays, TrainingState, save_all
from lib.training.finite import are_finite
from lib.training.inputs import Inputs
from lib.training.local_sgd import LocalSGD
from lib.training.progress_display import RunConsole
from lib.training.reference_model import AskedReference, Layout
from lib.training.replicas import share

PREFETCHED = 2  # batches made ahead of the step


@dataclass
class TrainingRun:
    """One run on this rank.

    Args:
        lock: of the run's folder, on the rank that keeps the files on its disk.
        plan: that the run starts with.
        steps: of the whole run.
        feed: what passes records on to run.sinks.
        asked_reference: gives a step's micro-batches their reference, where it is not known before.
        counted_until: when progress.wall_seconds was last counted, by time.perf_counter(); at first the launch.
    """

    config: Config
    folder: Path
    lock: IO[str] | None
    world: World
    hosts: list[str]
    inputs: Inputs
    plan: ClusterPlan
    steps: int
    model: nn.Module
    optimizer: optim.Optimizer
    layout: Layout
    say: RunConsole
    feed: Feed
    asked_reference: AskedReference | None = None
    counted_until: float = field(default_factory=time.perf_counter)

    def __post_init__(self) -> None:
        config, world, plan, data = self.config, self.world, self.plan, self.inputs.data
        self.progress = Progress(data_digest=data.digest)
        self.schedule = Schedule(plan, config.plan, lead=PREFETCHED + 1, steps=self.steps)
        self.resumed: RankArrays = {}  # what this rank alone had in the checkpoint that it goes on from
        self.feedback: Arrays = {}  # what compression left out of this rank's gradients so far
        self.local_sgd: LocalSGD | None = None  # where ranks are independent; else they take every step together
        if plan.strategy == "independent":
            self.local_sgd = LocalSGD(config, world, plan, self.model, data.lengths, self.steps)
        log = self.folder / "logs" / f"rank-{world.rank:03d}.jsonl"
        self.tracker = PerformanceTracker(log, world.rank, self.hosts[world.rank], self.feed)
        self.writer = CheckpointWriter(self.lock is not None, config.checkpoint.max_lost_seconds)

    def count_wall_seconds(self) -> None:
        """Adds what has passed since they were last counted."""
        now = time.perf_counter()
        self.progress.wall_seconds += now - self.counted_until
        self.counted_until = now

    def close(self) -> None:
        """Lets go of the run's folder."""
        if self.lock is not None:
            self.lock.close()

    @property
    def shares(self) -> list[int]:
        """Every rank's part of what is to be done next, by its speed."""
        return self.local_sgd.ranks.shares if self.local_sgd else self.schedule.at(self.progress.step + 1).shares

    @property
    def own_step(self) -> int:
        """The last step in this rank's log: every record there counts so, or a resume would cut what lives on."""
        return self.progress.steps_of(self.world.rank)

    @property
    def is_new(self) -> bool:
        """Whether the model is as it was before training."""
        return self.progress.step == 0 and (self.local_sgd is None or self.local_sgd.unfinished is None)

    @property
    def is_never_merged(self) -> bool:
        """Whether every rank ends with a model of its own."""
        return self.local_sgd is not None and self.local_sgd.method == "none"

    @property
    def reference(self) -> AskedReference | None:
        """The reference, where it follows the policy."""
        return self.asked_reference if self.asked_reference is not None and self.asked_reference.every else None

    @property
    def is_over(self) -> bool:
        """Whether nothing is left to train: all steps are taken, or the held-out loss falls no more.

        Inside a round ranks are not merged yet: it is ended first, also where a resume takes fewer steps.
        """
        if self.local_sgd is not None and self.local_sgd.round is not None:
            return False
        return self.progress.step >= self.steps or self.progress.has_stalled(self.config.train.patience)

    def is_finite(self) -> bool:
        """Whether every rank's weights and optimizer state are finite; all ranks ask together."""
        return are_finite(self.world, self.model, self.optimizer)

    def save(self, wait: bool = False) -> bool:
        """Writes a checkpoint; where none can be written, says why, and training goes on. Whether there is one now.

        wait: until it is whole; otherwise a small one is written meanwhile, and may still fail.

        Raises:
            AgreedError: the last one cannot be written.
            Stopped: ranks hold unlike weights, or what they exchanged was changed on its way.
        """
        self.count_wall_seconds()
        progress = self.progress
        own: RankArrays | None
        if self.local_sgd is not None:
            own = self.local_sgd.own_arrays(self.optimizer)
        else:  # replicas on unlike machines drift by roundings, so all take rank 0's weights first
            if others := share(self.world, self.model, self.optimizer, self.reference):
                ranks = ", ".join(map(str, others))
                self.say.warning(
                    f"rank {ranks} had other weights than rank 0 by rounding; took rank 0's", self.own_step
                )
            own = {"feedback": self.feedback} if self.config.sync.compression != "none" else None
        plan = self.schedule.at(progress.step + 1).to_dict()
        state = TrainingState(self.config, progress, self.model, self.optimizer, plan, own, self.reference)
        if fault := save_all(self.folder, state, self.world, self.writer, self.tracker, self.is_over, wait):
            self.say.warning(fault, self.own_step)
        return not fault
