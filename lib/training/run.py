"""What the parts of a run's training share: its state, its checkpoints, and going on from one."""

from __future__ import annotations

import json
import time
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import mlx.nn as nn
import mlx.optimizers as optim
from mlx.utils import tree_unflatten
from mlx_lm.utils import get_total_parameters

from lib.config.load import dump, remember
from lib.config.settings import Config
from lib.distributed import heartbeat
from lib.distributed.compression import Arrays
from lib.distributed.world import World
from lib.errors import AgreedError, UserError
from lib.model import adapter_files, checkpointing, load
from lib.plan.plan import ClusterPlan
from lib.plan.replan import Schedule
from lib.system.hardware import gflops, provenance
from lib.system.records import Arithmetic, PerformanceTracker
from lib.system.terminal import Terminal
from lib.training import checkpoint, divided_world, reference_model
from lib.training.checkpoint import CheckpointWriter, Progress, RankArrays, Snapshot
from lib.training.inputs import Inputs
from lib.training.local_sgd import LocalSGD
from lib.training.optimizers import learning_rate, make_optimizer
from lib.training.reference_model import AskedReference, Layout

PREFETCHED = 2  # batches made ahead of the step


@dataclass
class TrainingRun:
    """One run on this rank. plan: that it starts with; layout: how the model takes batches."""

    config: Config
    world: World
    hosts: list[str]
    inputs: Inputs
    plan: ClusterPlan
    model: nn.Module
    optimizer: optim.Optimizer
    layout: Layout
    say: Terminal

    def __post_init__(self) -> None:
        config, world, plan, data = self.config, self.world, self.plan, self.inputs.data
        self.folder = Path(config.run.dir) / str(config.run.name)
        self.lock: IO[str] | None = None  # of the folder, on the rank that keeps the files on its disk
        self.steps = config.steps_over(len(data))  # of the whole run
        self.asked_reference: AskedReference | None = None  # computes a step's reference where it is not known before
        self.counted_until = time.perf_counter()  # when progress.wall_seconds was last counted; at first the launch
        self.progress = Progress(data_digest=data.digest)
        self.progress.set_steps(self.steps)
        self.schedule = Schedule(plan, config.plan, lead=PREFETCHED + 1, steps=self.steps)
        self.resumed: RankArrays = {}  # what this rank alone had in the checkpoint that it goes on from
        self.feedback: Arrays = {}  # what compression left out of this rank's gradients so far
        self.local_sgd: LocalSGD | None = None  # where ranks are independent; else they take every step together
        if plan.strategy == "independent":
            self.local_sgd = LocalSGD(config, world, plan, self.model, data.lengths, self.steps)
        host = self.hosts[world.rank]
        self.tracker = PerformanceTracker(self.folder / "logs" / f"rank-{world.rank:03d}.jsonl", world.rank, host)
        rates = plan.basis.matmul_gflops.get(host, ())[self.hosts[: world.rank].count(host) :]
        flops = (6 if config.model.method == "full" else 4) * get_total_parameters(self.model)
        self.tracker.arithmetic = Arithmetic(flops, 1e9 * (rates[0] if rates else gflops()))
        self.writer = CheckpointWriter(False, config.checkpoint.every)
        self.best_by = config.checkpoint.best_by or ("exact_match" if self.inputs.questions else "loss")

    def claim(self, resume: bool) -> None:
        """Makes one process on every disk the only owner of the run's folder."""
        remember(self.config)
        steps, plan = self.steps if resume else None, self.plan.to_dict()
        self.lock = checkpoint.open_run(self.folder, dump(self.config), plan, steps, self.world)
        self.writer.is_keeper = self.lock is not None
        heartbeat.report(run=str(self.folder.absolute()))

    def record_start(self, resumed: bool) -> None:
        """Begins this rank's log, with all that decides the run."""
        self.tracker.record(
            "start",
            **provenance(),
            steps=self.steps,
            rows=len(self.inputs.data),
            config=self.config.model_dump(mode="json"),
            plan=self.plan.to_dict(),
            resumes=self.progress.resumes,
            resume_ids=self.progress.resume_ids,
            resumed_from_step=self.progress.step if resumed else None,
        )

    def count_wall_seconds(self) -> None:
        """Adds what has passed since they were last counted."""
        now = time.perf_counter()
        self.progress.wall_seconds += now - self.counted_until
        self.counted_until = now

    def close(self) -> None:
        """Frees the run's folder, once its last checkpoint is whole."""
        self.writer.wait()
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
        return self.progress.step == 0 and (self.local_sgd is None or self.local_sgd.round is None)

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
        """Whether all steps are taken, or evaluations improve no more; never inside a round."""
        if self.local_sgd is not None and self.local_sgd.round is not None:
            return False
        return self.progress.step >= self.steps or self.progress.has_stalled(self.config.train.patience)

    def is_finite(self) -> bool:
        """Whether every rank's weights and optimizer state are finite; all ranks ask together."""
        return checkpoint.are_finite(self.world, self.model, self.optimizer)

    # ---- Checkpoints

    def save(self) -> bool:
        """Writes a checkpoint, or begins to; where none can be written, says why, and returns False."""
        self.count_wall_seconds()
        progress, asked, common, own = self.progress, self.asked_reference, dict[str, Arrays](), None
        if self.local_sgd is not None:
            own = self.local_sgd.rank_arrays(self.optimizer)
            if momentum := self.local_sgd.merger.momentum:
                common[checkpoint.MOMENTUM] = momentum
        else:
            self._share_weights()
            own = {"feedback": self.feedback} if self.config.sync.compression != "none" else None
        if self.reference is not None:
            common[checkpoint.REFERENCE] = self.reference.arrays
        elif asked is not None and asked.logps is not None:
            common[checkpoint.REFERENCE_LOGPS] = asked.of_all_ranks()
        plan = json.dumps(self.schedule.at(progress.step + 1).to_dict(), indent=2) + "\n"
        texts = {"plan.json": plan, "config.yaml": dump(self.config)}
        state = Snapshot(progress, self.model, self.optimizer, self.config.model, texts, common, own)
        with self.world.agreeing("writing the log"):
            self.tracker.flush()
        fault = checkpoint.save(self.folder, state, self.world, self.writer, self.config.checkpoint.keep, self.is_over)
        if fault:
            self.say.warning(fault, self.own_step)
        self.tracker.gather(self.world)
        return not fault

    def _share_weights(self) -> None:
        """Replicas on unlike machines drift by roundings, so all take rank 0's weights before a checkpoint."""
        moving = self.reference.arrays if self.reference is not None else {}
        others, shared = checkpoint.share_weights(self.world, self.model, self.optimizer, moving)
        if self.reference is not None:
            self.reference.arrays = shared
        if others:
            ranks = ", ".join(map(str, others))
            self.say.warning(f"rank {ranks} had other weights than rank 0 by rounding; took rank 0's", self.own_step)

    def resume(self) -> None:
        """Takes the run to the last good checkpoint, on every rank; AgreedError where that does not fit the run."""
        world, folder, is_keeper = self.world, self.folder / "checkpoints", self.lock is not None
        path, warnings = checkpoint.choose(folder, world, is_keeper)
        for warning in warnings:
            self.say.warning(warning)
        progress = self.progress = checkpoint.restore_all(path, self.model, self.optimizer, self.progress, world)
        if path is not None and self.reference is not None:
            wanted = world.whole(self.reference.arrays)
            self.reference.arrays = checkpoint.common_at(path, checkpoint.REFERENCE, world, wanted)
        elif self.asked_reference is not None:
            self.asked_reference.remember(checkpoint.common_at(path, checkpoint.REFERENCE_LOGPS, world))
        if self.local_sgd is None and progress.rounds:
            raise AgreedError(f"{self.folder} is a run of independent ranks; go on with strategy=independent")
        try:  # all ranks read the same
            self._restore_rank(path)
            restores = not progress.schedule or self.schedule.restore(progress.schedule)
        except UserError:
            raise
        except (LookupError, TypeError, ValueError, ArithmeticError, AttributeError) as error:
            remedy = f"go on with that version, or start a new run with model.adapter={path}"
            raise AgreedError(f"{path} was written by another version ({error!r}); {remedy}") from None
        if progress.set_steps(self.steps):
            self._say_rate()
        if not restores:
            self.say.line("hosts or settings are no longer those of the checkpoint: the work is divided anew")
        if self.schedule.at(progress.step + 1).gradient_checkpointing and not self.plan.gradient_checkpointing:
            checkpointing.checkpoint_blocks(self.model)
        checkpoint.go_back(self.folder / "logs", progress, world, is_keeper)
        if is_keeper:
            checkpoint.prune(folder, self.config.checkpoint.keep, progress.best_step)
        source = f"checkpoints/{path.name}" if path is not None else "its beginning"
        self.say.line(f"resuming {self.folder} after step {progress.step} of {self.steps}, from {source}")

    def _say_rate(self) -> None:
        """Says what the learning rate does where a run is resumed with other steps."""
        step, steps, progress = self.progress.step, self.steps, self.progress
        now, last = (learning_rate(self.config.train, *progress.rate_position(i)) for i in (step, steps - 1))
        if now or last:
            rates = f"{now:.3g} at step {step + 1}, {last:.3g} at {steps}"
            self.say.line(f"the learning rate goes on without a jump: {rates}")
            return
        self.say.warning(
            f"the learning rate's schedule ended at step {step}, and its last rate is 0: steps {step + 1} to {steps} "
            f"learn nothing; for another rate start a new run with model.adapter={self.folder}"
        )

    def _restore_rank(self, path: Path | None) -> None:
        """What this rank alone had at the checkpoint, and where independent ranks are."""
        own = self.resumed = checkpoint.own_part_at(path, self.world) if path is not None else {}
        if "weights" in own:
            self.model.update(tree_unflatten(list(own["weights"].items())))
        if "optimizer" in own:
            self.optimizer.state = tree_unflatten(list(own["optimizer"].items()))
        self.feedback = own.get("feedback", {})
        if self.local_sgd is not None and not self.config.rollouts.rounds:
            self.local_sgd.resume(self.progress, own)


def open_run(
    config: Config, world: World, hosts: list[str], inputs: Inputs, plan: ClusterPlan, model: nn.Module, say: Terminal
) -> TrainingRun:
    """A run of a loaded model, which is divided where the plan says so; AgreedError where ranks have unlike models."""
    with world.agreeing("making the optimizer"):
        optimizer = make_optimizer(config.train)
    world = divided_world.divided(model, plan.division or plan.blocks or None, world, keeps_wired=True)
    layout = reference_model.layout(model, config.data, world)
    if layout.why_not:
        say.line(f"prompts run once for each completion: {layout.why_not}")
    world.require_equal("model files", load.fingerprint(config.model, config.train.seed))
    world.require_equal("initial weights", adapter_files.digest(world.replicated(adapter_files.trainable(model))))
    return TrainingRun(config, world, hosts, inputs, plan, model, optimizer, layout, say)
