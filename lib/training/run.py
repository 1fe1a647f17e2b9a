"""A run's training: its state, what it saves, and going on from there."""

from __future__ import annotations

import contextlib
import json
import math
import sys
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import mlx.nn as nn
import mlx.optimizers as optim
import numpy as np
from mlx.utils import tree_unflatten
from mlx_lm.utils import get_total_parameters

from lib.config.load import dump, remember
from lib.config.settings import Config
from lib.data.dataset import Dataset
from lib.data.order import epoch_order
from lib.distributed import heartbeat
from lib.distributed.compression import Arrays
from lib.distributed.world import World
from lib.errors import AgreedError, UserError
from lib.model import adapter_files, gradient_checkpointing, load
from lib.plan.plan import ClusterPlan
from lib.plan.replan import Schedule
from lib.system.hardware import gflops, provenance
from lib.system.records import Arithmetic, PerformanceTracker
from lib.system.terminal import Terminal
from lib.training import checkpoint, cuda_kernels, divided_world, losses, reference_model
from lib.training.checkpoint import CheckpointWriter, Progress, RankArrays, Snapshot
from lib.training.divided_world import is_compiled
from lib.training.local_sgd import LocalSGD
from lib.training.merging import Merger
from lib.training.optimizers import learning_rate, make_optimizer
from lib.training.reference_model import Layout
from lib.training.run_inputs import Inputs
from lib.training.step import StepReference

PREFETCHED = 2  # batches made ahead of the step
Counting = Callable[[str, int], AbstractContextManager[Callable[[int], None]]]  # shows a pass: its name and its rows


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
    compiling: contextlib.ExitStack  # a new GPU's kernels, until the first step

    def __post_init__(self) -> None:
        config, world, plan, data = self.config, self.world, self.plan, self.inputs.data
        self.folder = Path(config.run.dir) / str(config.run.name)
        self.lock: IO[str] | None = None  # of the folder, on the rank that writes the files on its disk
        self.steps = config.steps_over(len(data))  # of the whole run
        self.step_reference: StepReference | None = None  # computes a step's reference
        self.counted_until = time.perf_counter()  # when progress.wall_seconds was last counted; at first the launch
        self.progress = Progress(data_digest=data.digest)
        self.progress.set_steps(self.steps)
        self.schedule = Schedule(plan, config.plan, lead=PREFETCHED + 1, steps=self.steps)
        self.resumed: RankArrays = {}  # what this rank alone had in the checkpoint that it goes on from
        self.feedback: Arrays = {}  # what compression left out of this rank's gradients so far
        self.local_sgd = self.rounds_of(data.lengths) if plan.strategy == "independent" else None
        rank, host = world.rank, self.hosts[world.rank]
        self.tracker = PerformanceTracker(self.folder / "logs" / f"rank-{rank:03d}.jsonl", rank, host)
        rates = plan.basis.matmul_gflops.get(host, ())[self.hosts[:rank].count(host) :]
        flops = (6 if config.model.method == "full" else 4) * get_total_parameters(self.model)
        self.tracker.arithmetic = Arithmetic(flops, 1e9 * (rates[0] if rates else gflops()))
        self.writer = CheckpointWriter(False, config.checkpoint.every)
        self.best_by = config.checkpoint.best_by or ("exact_match" if self.inputs.questions else "loss")

    def rounds_of(self, lengths: np.ndarray, first_step: int = 0) -> LocalSGD:
        """The rounds of independent ranks over some rows. lengths: int [n]. first_step: that the rows begin with."""
        config, span = self.config, (first_step, self.steps)
        whole = config.steps_over(len(lengths)), config.rollouts.rounds or 1
        merger = Merger(self.world, self.model, config.model, config.independent, config.sync)
        return LocalSGD(merger, self.plan, config.plan, config.train, lengths, span, whole)

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

    def record_plan(self, step: int, plan: ClusterPlan, before: ClusterPlan) -> None:
        """Another plan, decided after a step, for those whose batches are not begun."""
        first = step + self.schedule.lead
        self.tracker.record("plan", step=step, first_step=first, shares_before=before.shares, **plan.to_dict())

    def count_wall_seconds(self) -> None:
        """Adds what has passed since they were last counted."""
        now = time.perf_counter()
        self.progress.wall_seconds += now - self.counted_until
        self.counted_until = now

    def close(self) -> None:
        """Frees the run's folder, once its last checkpoint is whole."""
        self.compiling.__exit__(*sys.exc_info())  # after an error nothing waits for it
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
        return self.progress.step == 0 and not self.is_inside_a_round

    @property
    def is_inside_a_round(self) -> bool:
        """Whether independent ranks have weights of their own, until they merge."""
        return self.local_sgd is not None and self.local_sgd.round is not None

    @property
    def is_never_merged(self) -> bool:
        """Whether every rank ends with a model of its own."""
        return self.local_sgd is not None and self.local_sgd.method == "none"

    @property
    def moving_reference(self) -> StepReference | None:
        """The reference, where it follows the policy."""
        return self.step_reference if self.step_reference and self.step_reference.every else None

    @property
    def is_over(self) -> bool:
        """Whether all steps are taken, or evaluations improve no more; never inside a round."""
        is_done = self.progress.step >= self.steps
        patience = self.config.train.patience or math.inf
        return not self.is_inside_a_round and (is_done or self.progress.evaluations_since_best >= patience)

    # ---- The reference: the policy before training, or another model

    def compute_references(self, counting: Counting) -> tuple[np.ndarray | None, np.ndarray | None]:
        """The reference's log-probabilities of the run's rows, as far as steps do not compute them. Raises UserError:
        another reference cannot take batches that are laid out as the policy's."""
        config, data, valid, world = self.config, self.inputs.data, self.inputs.valid, self.world
        settings, train, every = config.model, config.train, config.reference_sync_steps
        if not losses.needs_reference(train):
            return None, None
        is_policy, is_group = settings.reference == "initial", train.loss == "grpo"
        in_steps = every is not None or data.is_estimated or is_group or reference_model.is_in_steps(settings, world)
        model = self.model if is_policy else divided_world.load_reference(settings, train.seed, world)
        if in_steps and not is_policy and self.layout.shares_prompts:
            why_not = reference_model.layout(model, config.data, world).why_not
            if why_not:
                raise UserError(f"model.reference={settings.reference}: {why_not}; set data.shared_prompts=false")

        def logps(dataset: Dataset | None, rows: np.ndarray | None = None) -> np.ndarray | None:
            if dataset is None:
                return None
            with counting(f"reference log-probabilities of {Path(dataset.path).name}", len(dataset)) as progress:
                shares = self.plan.shares
                return reference_model.dataset_logps(model, dataset, world, shares, config, progress, rows)

        of_valid, of_data = logps(valid), None
        if isinstance(data, Dataset) and not in_steps:
            order = epoch_order(data.lengths, train.seed, 0, train.global_batch_size)
            of_data = logps(data, order[: self.steps * train.global_batch_size])
        if in_steps:
            start = adapter_files.trainable(self.model) if is_policy else {}
            is_kept = every is None and isinstance(data, Dataset) and not is_group
            stored = np.zeros((len(data), data.completions_per_example), np.float32) if is_kept else None
            compiled = is_kept and is_compiled(train, world.workers)
            alpha = train.reference_mixup_alpha or (reference_model.MIXUP if settings.method == "full" else 1.0)
            facts = start, every, alpha, train.temperature, stored, compiled
            self.step_reference = StepReference(self.model, model, world, *facts)
        return of_data, of_valid

    # ---- Checkpoints

    def save(self) -> bool:
        """Writes a checkpoint, or begins to; where none can be written, says why, and returns False."""
        self.count_wall_seconds()
        progress, moving, own = self.progress, self.moving_reference, None
        common: dict[str, Arrays] = {}
        if self.local_sgd is not None:
            own = self.local_sgd.rank_arrays(self.optimizer)
            if momentum := self.local_sgd.merger.momentum:
                common[checkpoint.MOMENTUM] = momentum
        else:  # replicas on unlike machines drift by roundings, so all take rank 0's weights
            arrays = moving.arrays if moving else {}
            others, arrays = checkpoint.share_weights(self.world, self.model, self.optimizer, arrays)
            if moving:
                moving.arrays = arrays
            if others:
                text = f"rank {', '.join(map(str, others))} had other weights than rank 0 by rounding; took rank 0's"
                self.say.warning(text, self.own_step)
            own = {"feedback": self.feedback} if self.config.sync.compression != "none" else None
        if moving:
            common[checkpoint.REFERENCE] = moving.arrays
        elif self.step_reference and self.step_reference.logps is not None:
            common[checkpoint.REFERENCE_LOGPS] = self.step_reference.of_all_ranks()
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

    def resume(self) -> None:
        """Takes the run to the last good checkpoint, on every rank; AgreedError where that does not fit the run."""
        world, folder, is_keeper = self.world, self.folder / "checkpoints", self.lock is not None
        path, warnings = checkpoint.choose(folder, world, is_keeper)
        for warning in warnings:
            self.say.warning(warning)
        progress = self.progress = checkpoint.restore_all(path, self.model, self.optimizer, self.progress, world)
        if path is not None and self.moving_reference:
            wanted = world.whole(self.moving_reference.arrays)
            self.moving_reference.arrays = checkpoint.common_at(path, checkpoint.REFERENCE, world, wanted)
        elif self.step_reference:
            self.step_reference.remember(checkpoint.common_at(path, checkpoint.REFERENCE_LOGPS, world))
        if self.local_sgd is None and progress.rounds:
            raise AgreedError(f"{self.folder} is a run of independent ranks; go on with strategy=independent")
        try:  # all ranks read the same
            own = self.resumed = checkpoint.own_part_at(path, world) if path is not None else {}
            self.model.update(tree_unflatten(own.get("weights", {})) or {})
            if "optimizer" in own:
                self.optimizer.state = tree_unflatten(own["optimizer"])
            self.feedback = own.get("feedback", {})
            if self.local_sgd is not None and not self.config.rollouts.rounds:
                self.local_sgd.resume(progress, own)
            restores = not progress.schedule or self.schedule.restore(progress.schedule)
        except UserError:
            raise
        except (LookupError, TypeError, ValueError, ArithmeticError, AttributeError) as error:
            remedy = f"go on with that version, or start a new run with model.adapter={path}"
            raise AgreedError(f"{path} was written by another version ({error!r}); {remedy}") from None
        step, last = progress.step, self.steps - 1
        if progress.set_steps(self.steps) and step <= last:
            now, then = (learning_rate(self.config.train, *progress.rate_position(index)) for index in (step, last))
            rates = f"{now:.3g} at step {step + 1}, {then:.3g} at {self.steps}"
            self.say.line(f"the learning rate goes on without a jump: {rates}")
            if not (now or then):
                remedy = f"for another rate start a new run with model.adapter={self.folder}"
                self.say.warning(f"the schedule has ended: these steps learn nothing; {remedy}")
        if not restores:
            self.say.line("hosts or settings are no longer those of the checkpoint: the work is divided anew")
        if self.schedule.at(step + 1).gradient_checkpointing and not self.plan.gradient_checkpointing:
            gradient_checkpointing.checkpoint_blocks(self.model)
        checkpoint.go_back(self.folder / "logs", progress, world, is_keeper)
        if is_keeper:
            checkpoint.prune(folder, self.config.checkpoint.keep, progress.best_step)
        source = f"checkpoints/{path.name}" if path is not None else "its beginning"
        self.say.line(f"resuming {self.folder} after step {step} of {self.steps}, from {source}")


def open_run(
    config: Config, world: World, hosts: list[str], inputs: Inputs, plan: ClusterPlan, model: nn.Module, say: Terminal
) -> TrainingRun:
    """A run of a loaded model, which is divided where the plan says so; AgreedError where ranks have unlike models."""
    with contextlib.ExitStack() as compiling:
        sections = config.model, config.train, config.data
        compiling.enter_context(cuda_kernels.compiled(*sections, inputs.data, world, hosts, say.line))
        with world.agreeing("making the optimizer"):
            optimizer = make_optimizer(config.train)
        world = divided_world.divided(model, plan.division or plan.blocks or None, world, keeps_wired=True)
        layout = reference_model.layout(model, config.data, world)
        if layout.why_not:
            say.line(f"prompts run once for each completion: {layout.why_not}")
        if world.size > 1:  # to hash a large model takes as long as to read it
            weights = world.replicated(adapter_files.trainable(model))
            world.require_equal("model files", load.fingerprint(config.model, config.train.seed))
            world.require_equal("initial weights", adapter_files.digest(weights))
        return TrainingRun(config, world, hosts, inputs, plan, model, optimizer, layout, say, compiling.pop_all())
