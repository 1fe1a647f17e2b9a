"""A run's training: its state, its steps, evaluations and checkpoints, and going on from one."""

from __future__ import annotations

import contextlib
import json
import math
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import IO, Any, NamedTuple

import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers as optim
import numpy as np
from mlx.utils import tree_unflatten
from mlx_lm.utils import get_total_parameters

from lib.config.load import dump, remember
from lib.config.settings import Config
from lib.data.batch import MicroBatches, lengths_and_cost
from lib.data.order import Position, advance, assign_micro_batches, epoch_order, global_batch, micro_batches, prefetch
from lib.distributed import heartbeat
from lib.distributed.compression import Arrays
from lib.distributed.world import World
from lib.errors import AgreedError, Stopped, UserError
from lib.model import adapter_files, checkpointing, load
from lib.plan.cost import hosts_cost
from lib.plan.plan import ClusterPlan
from lib.plan.plan_warnings import strayed
from lib.plan.replan import Schedule
from lib.system import files, network, out_of_memory, records
from lib.system.hardware import gflops, provenance
from lib.system.out_of_memory import OutOfMemory
from lib.system.records import Arithmetic, PerformanceTracker
from lib.system.terminal import Terminal
from lib.training import checkpoint, divided_world, kernels, reference_model
from lib.training.checkpoint import CheckpointWriter, Progress, RankArrays, Snapshot
from lib.training.divided_world import InStages
from lib.training.inputs import Inputs, generate_options
from lib.training.local_sgd import LocalSGD
from lib.training.losses import Metrics
from lib.training.optimizers import learning_rate, make_optimizer
from lib.training.pipelined_step import PipelinedStep, StagePace
from lib.training.reference_model import AskedReference, Layout
from lib.training.run_facts import memory_limit
from lib.training.step import MicroBatch, Step, StepRecord, is_compiled, trace_cost

Evaluate = Callable[[World, list[int]], Metrics]  # held-out metrics, by some ranks in some shares; recorded and printed
FIGURES = ("loss", "reward_accuracy", "reward_margin", "kl")  # held out; None where there is no held-out data
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
    compiling: contextlib.ExitStack  # a new GPU's kernels, until the first step

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
        rank, host = world.rank, self.hosts[world.rank]
        self.tracker = PerformanceTracker(self.folder / "logs" / f"rank-{rank:03d}.jsonl", rank, host)
        rates = plan.basis.matmul_gflops.get(host, ())[self.hosts[:rank].count(host) :]
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
        patience = self.config.train.patience
        return self.progress.step >= self.steps or self.progress.evaluations_since_best >= (patience or math.inf)

    def save(self) -> bool:
        """Writes a checkpoint, or begins to; where none can be written, says why, and returns False."""
        self.count_wall_seconds()
        progress, reference, asked, own = self.progress, self.reference, self.asked_reference, None
        common: dict[str, Arrays] = {}
        if self.local_sgd is not None:
            own = self.local_sgd.rank_arrays(self.optimizer)
            if momentum := self.local_sgd.merger.momentum:
                common[checkpoint.MOMENTUM] = momentum
        else:  # replicas on unlike machines drift by roundings, so all take rank 0's weights
            moving = reference.arrays if reference else {}
            others, moving = checkpoint.share_weights(self.world, self.model, self.optimizer, moving)
            if reference:
                reference.arrays = moving
            if others:
                text = f"rank {', '.join(map(str, others))} had other weights than rank 0 by rounding; took rank 0's"
                self.say.warning(text, self.own_step)
            own = {"feedback": self.feedback} if self.config.sync.compression != "none" else None
        if reference:
            common[checkpoint.REFERENCE] = reference.arrays
        elif asked and asked.logps is not None:
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
        step, progress, train = self.progress.step, self.progress, self.config.train
        if step == self.steps:
            return
        now, last = (learning_rate(train, *progress.rate_position(i)) for i in (step, self.steps - 1))
        if not (now or last):
            remedy = f"for another rate start a new run with model.adapter={self.folder}"
            self.say.warning(f"the schedule has ended: steps {step + 1} to {self.steps} learn nothing; {remedy}")
            return
        rates = f"{now:.3g} at step {step + 1}, {last:.3g} at {self.steps}"
        self.say.line(f"the learning rate goes on without a jump: {rates}")


def open_run(
    config: Config, world: World, hosts: list[str], inputs: Inputs, plan: ClusterPlan, model: nn.Module, say: Terminal
) -> TrainingRun:
    """A run of a loaded model, which is divided where the plan says so; AgreedError where ranks have unlike models."""
    with contextlib.ExitStack() as compiling:
        compiling.enter_context(kernels.compiled(config, inputs.data, world, hosts, say.line))
        with world.agreeing("making the optimizer"):
            optimizer = make_optimizer(config.train)
        world = divided_world.divided(model, plan.division or plan.blocks or None, world, keeps_wired=True)
        layout = reference_model.layout(model, config.data, world)
        if layout.why_not:
            say.line(f"prompts run once for each completion: {layout.why_not}")
        world.require_equal("model files", load.fingerprint(config.model, config.train.seed))
        world.require_equal("initial weights", adapter_files.digest(world.replicated(adapter_files.trainable(model))))
        return TrainingRun(config, world, hosts, inputs, plan, model, optimizer, layout, say, compiling.pop_all())


# ---- One step, until it is done: once more where it is not finite, with half the batch where memory runs out ---------


class MicroBatchLimit:
    """The largest micro-batch that this host's memory holds, as a file of the run's folder. The kernel's out-of-memory
    killer and Metal end a process without an exception. So a size is written down before it is first tried, and a start
    that finds it unfinished halves it; on Linux only where the kernel has killed since."""

    def __init__(self, path: Path):
        self.path, self.stored = path, dict[str, Any]()
        with contextlib.suppress(OSError, ValueError):
            self.stored = json.loads(path.read_text(encoding="utf-8"))
        self.size: int | None = self.stored.get("limit")  # pairs in a micro-batch at most; None without a limit
        self.recomputes = bool(self.stored.get("recomputes"))  # even one pair takes gradient checkpointing
        self.fits, tried = self.stored.get("fits", 0), self.stored.get("tried", 0)
        if tried > self.fits and self.stored.get("kills") != out_of_memory.kernel_kills():
            self.record(max(1, tried // 2), self.recomputes or tried == 1)

    def begin(self, size: int) -> None:
        """Notes that micro-batches of this size are tried, if they never were."""
        if size > self.fits:
            self._write(tried=size, kills=out_of_memory.kernel_kills())

    def end(self, size: int) -> None:
        """Notes that they fit."""
        if size > self.fits:
            self.fits = size
            self._write()

    def record(self, limit: int, recomputes: bool) -> None:
        """Notes that no more than these micro-batches fit."""
        self.size, self.recomputes, self.fits = limit, recomputes, min(limit, self.fits)
        self._write(tried=0, limit=limit, recomputes=recomputes)

    def _write(self, **fields: object) -> None:
        self.stored |= {**fields, "fits": self.fits}
        if self.path.parent.is_dir():
            files.write_atomically(self.path, json.dumps(self.stored) + "\n")


class Learner:
    """Takes and records the steps of a run."""

    def __init__(self, run: TrainingRun, make: MicroBatches):
        self.run, self.make = run, make
        self.memory = MicroBatchLimit(run.folder / f"micro-batch-{run.hosts[run.world.rank]}-{run.world.rank}.json")
        mx.eval(run.model.state)
        plan = run.schedule.at(run.progress.step + 1)
        self.worker = 0 if plan.divides_model else run.world.rank
        self.recomputes = bool(run.config.model.gradient_checkpointing or plan.checkpoints_blocks(run.world.rank))
        # Pairs in a micro-batch of this rank, as memory leaves it; of a divided model every rank takes the same ones.
        limit = str(self.memory.size or "")
        limits = map(int, filter(None, run.world.gather_text(limit) if plan.divides_model else [limit]))
        self.max_micro_batch_size = min(filter(None, [run.schedule.most_at(self.worker), *limits]), default=None)
        turns_on = self.memory.recomputes and run.config.model.may_turn_on_checkpointing and not self.recomputes
        self._make_step(turns_on)

    def _make_step(self, turns_on_checkpointing: bool) -> None:
        run, train, sync = self.run, self.run.config.train, self.run.config.sync
        if turns_on_checkpointing:
            self.recomputes = True
            checkpointing.checkpoint_blocks(run.model)
        limit = memory_limit(run.config.plan, run.hosts, run.world)
        world = run.world.workers if run.local_sgd is None else run.world.alone()
        self.step: Step
        if isinstance(world, InStages):
            stages = run.plan.stages
            pace = StagePace([stage.in_flight for stage in stages], stages[run.world.rank].recomputes, limit)
            self.step = PipelinedStep(run.model, run.optimizer, train, world, sync, pace)
        else:
            rank = None if run.local_sgd is None else run.world.rank
            self.step = Step(run.model, run.optimizer, train, world, sync, rank, limit)
        run.optimizer = self.step.update
        progress = run.progress  # not the run: a step is freed late, and would keep the run's folder locked
        self.step.rewards, self.step.feedback = progress.rewards, run.feedback
        self.step.rate_of = lambda index, _: learning_rate(train, *progress.rate_position(index))

    def learn(self, step: int, index: int, epoch: int, batches: list[MicroBatch]) -> StepRecord:
        """One optimizer step, recorded. index: of the global step that decides the learning rate, from 0."""
        run, train, rows = self.run, self.run.config.train, [int(row) for batch, _ in batches for row in batch.rows]
        result = self._take(step, index, batches)
        if result.skipped:
            run.say.own_warning(f"step {step}: loss or gradient is not finite; computed once more", step)
            result = self._take(step, index, batches)
        run.tracker.log_batch(step, len(rows), result.seconds, **result.means, **result.figures, epoch=epoch, rows=rows)
        run.progress.skipped_in_row = in_row = run.progress.skipped_in_row + 1 if result.skipped else 0
        if in_row:
            run.say.own_warning(f"step {step}: not finite again; update {in_row} in a row left out", step)
        if in_row and in_row >= train.max_skipped_steps:
            last = f"the last at step {step} (train.max_skipped_steps={train.max_skipped_steps})"
            raise Stopped(
                f"{in_row} updates in a row were not finite, {last}; lower train.learning_rate "
                f"({train.learning_rate:g}) or look at the rows in {run.tracker.log_path}"
            )
        return result

    def _take(self, step: int, index: int, batches: list[MicroBatch]) -> StepRecord:
        """The step, with smaller micro-batches each time that memory runs out."""
        run = self.run
        while True:
            fitting = self.make.within(batches, self.max_micro_batch_size)  # those made in advance may be larger
            size = max((len(batch.rows) for batch, _ in fitting), default=0)
            heartbeat.report(micro_batch_size=size, gradient_checkpointing=self.recomputes, machine=network.host_name())
            self.memory.begin(size)
            mx.async_eval(self.step.trained.read())  # a lazy array belongs to its thread
            try:
                asked = (run.asked_reference or iter)(fitting)
                result = out_of_memory.attempt(partial(self.step, index, run.schedule.steps, asked))
            except OutOfMemory as error:
                if not error.ranks:
                    self.memory.record(max(1, size // 2), self.recomputes)
                    raise
                failure = error
            else:
                self.memory.end(size)
                return result
            self._halve(step, failure)

    def _halve(self, step: int, failure: OutOfMemory) -> None:
        """Half the micro-batch for the ranks that ran out of memory; gradient checkpointing where that is one pair."""
        run, schedule, model = self.run, self.run.schedule, self.run.config.model
        hit = (self.worker,) if run.local_sgd is not None else failure.ranks
        _, before = schedule.plans[-1]
        at_one = [rank for rank in hit if max(before.workers[rank].micro_batch_sizes, default=1) == 1]
        held = f"held {', '.join(f'{size / 1e9:.4g} GB' for size in failure.needed_bytes)}"
        if at_one and (self.recomputes or not (model.may_turn_on_checkpointing and hasattr(run.model, "layers"))):
            hosts = ", ".join(f"rank {rank} ({before.ranks[rank].host})" for rank in at_one)
            what = f"a single pair{' and gradient checkpointing' * self.recomputes}"
            remedies = "model.method=lora, model.gradient_checkpointing=true (with model.dropout=0), a smaller "
            remedies += "data.max_length, a quantised or smaller model, strategy=sharded over several hosts"
            raise AgreedError(f"{hosts} ran out of memory with {what}: {held} ({failure}); try {remedies}")
        plan = schedule.halve(step, hit, gradient_checkpointing=bool(at_one))
        if at_one:
            self._make_step(True)
        self.max_micro_batch_size = schedule.most_at(self.worker)
        if self.worker in hit:
            self.memory.record(self.max_micro_batch_size or 1, self.recomputes)
        run.say.own_warning(f"{plan.reason}; the step is taken again", step, f" ({held}: {failure})")
        run.record_plan(step, plan, before)  # until then every rank cuts what is made already


# ---- The batches of a run --------------------------------------------------------------------------------------------


class StepBatch(NamedTuple):
    """One step of all ranks, as this rank takes it."""

    step: int  # from 1
    epoch: int
    position: Position  # after it
    pairs: int  # of all ranks
    costs: list[float]  # of every rank's part, in tokens
    micro_batches: list[MicroBatch]  # of this rank


class Batches:
    """The training rows of a run as this rank's micro-batches. reference: float32 [n, K], their log-probabilities."""

    def __init__(self, run: TrainingRun, reference: np.ndarray | None):
        config, world, layout = run.config, run.world, run.layout
        self.data = run.inputs.data
        # Unlike devices pad unlike, but all ranks assign the same rows.
        multiple = int(world.broadcast_text(str(layout.length_multiple)))
        self.lengths, self.cost = lengths_and_cost(self.data, multiple, layout.shares_prompts)
        compiled, cost = is_compiled(config.train, world.workers), trace_cost(run.model)
        padding = layout.length_multiple, layout.shares_prompts
        self.make = MicroBatches(self.data, reference, config, *padding, compiled, cost)

    def upcoming(self, run: TrainingRun) -> Iterator[StepBatch]:
        """Every step that is left."""
        settings, data, rank = run.config.train, self.data, run.world.workers.rank
        batch_size, position, epoch = settings.global_batch_size, Position(run.progress.epoch, run.progress.cursor), -1
        for step in range(run.progress.step + 1, run.steps + 1):
            if position.epoch != epoch:
                epoch = position.epoch
                order = epoch_order(data.lengths, settings.seed, epoch, batch_size, segments=data.segments)
            rows = global_batch(order, position, batch_size)
            sizes = run.schedule.at(step).micro_batch_sizes
            parts, costs = assign_micro_batches(rows, self.lengths, sizes, self.cost)
            position = advance(position, len(rows), len(data))
            made = self.make.of(parts[rank], max(sizes[rank], default=1))
            yield StepBatch(step, epoch, position, len(rows), costs, made)

    def of(self, rows: np.ndarray, micro_batch_size: int) -> list[MicroBatch]:
        """Micro-batches of some rows, ascending in length."""
        rows = rows[np.argsort(self.lengths[rows], kind="stable")]
        return self.make.of(micro_batches(rows, micro_batch_size), micro_batch_size)


# ---- The loop --------------------------------------------------------------------------------------------------------


class TrainingLoop:
    """The steps of a run. Once in a while the model is evaluated, and a checkpoint is written."""

    def __init__(self, run: TrainingRun, reference: np.ndarray | None, evaluate_on: Evaluate):
        """reference: float32 [n, K], log-probabilities of the training rows."""
        self.run, self.batches, self.evaluate_on = run, Batches(run, reference), evaluate_on
        self.learner = Learner(run, self.batches.make)
        self.latest: Metrics = {}  # held-out metrics of the model as it is
        self.final_step = run.steps  # whose weights the run's folder holds at the end

    def evaluate(self) -> Metrics:
        """Held-out metrics and greedy answers, over all ranks; each rank's own where ranks are never merged."""
        run = self.run
        return self.evaluate_on(*((run.world.alone(), [1]) if run.is_never_merged else (run.world, run.shares)))

    def evaluate_before(self) -> None:
        """The metrics before the first step; UserError where the loss is not finite, so weights are not."""
        run = self.run
        run.progress.before = self.evaluate()
        loss = run.progress.before.get("loss")
        with run.world.agreeing("the first evaluation"):
            if loss is not None and not math.isfinite(loss):
                raise UserError(
                    f"model.path {run.config.model.path}: the held-out loss before the first step is {loss}: its "
                    "weights, or model.reference's, are not finite; check the files, or try model.dtype=float32"
                )

    def train(self) -> None:
        """Trains until the run's last step, or until evaluations improve no more; leaves the final weights."""
        run = self.run
        run.compiling.close()
        if run.is_over:
            self.latest = self.evaluate()
        else:
            self.latest = run.progress.before
            (self._train_synchronously if run.local_sgd is None else self._train_independently)()
        if why := self.early_end():
            run.say.line(f"training ends after step {run.progress.step} of {run.steps}: {why}")
        self.final_step = run.progress.step
        if run.config.checkpoint.final == "best" and run.config.evaluate.every is not None:
            self._take_best()

    def early_end(self) -> str | None:
        """Why training ended before the run's last step, if it did."""
        run, progress = self.run, self.run.progress
        if progress.step >= run.steps:
            return None
        count, best = progress.evaluations_since_best, progress.best_metrics.get(run.best_by)
        shown = "" if best is None else f" (best {run.best_by} {best:.4f} at step {progress.best_step})"
        return f"no improvement for {count} evaluations{shown}; train.patience={run.config.train.patience}"

    def _take_best(self) -> None:
        """Goes back to the weights of the best evaluation, where these are not the last ones."""
        run, progress = self.run, self.run.progress
        step, best = progress.best_step, progress.best_metrics.get(run.best_by)
        if run.is_never_merged or step is None or best is None or step == progress.step:
            return
        path = run.folder / "checkpoints" / f"step-{step:08d}"
        if fault := run.world.broadcast_text(checkpoint.fault_of(path) or "" if run.world.rank == 0 else ""):
            text = f"{path}, of the best {run.best_by}, is damaged ({fault}); the last weights are taken"
            run.say.warning(text, run.own_step)
            return
        checkpoint.restore_weights(path, run.model, run.world)
        self.final_step, self.latest = step, progress.best_metrics
        run.say.line(f"the weights of step {step} are taken, of the best {run.best_by} ({best:.4f})")

    def _train_synchronously(self) -> None:
        run, progress, schedule = self.run, self.run.progress, self.run.schedule
        every = run.config.evaluate.every
        with contextlib.closing(prefetch(self.batches.upcoming(run), PREFETCHED)) as upcoming:
            for batch in upcoming:
                step = batch.step
                result = self.learner.learn(step, step - 1, batch.epoch, batch.micro_batches)
                if run.reference is not None:
                    run.reference.follow(step)
                progress.step, progress.epoch, progress.cursor = step, batch.position.epoch, batch.position.cursor
                progress.pairs += batch.pairs
                progress.tokens += result.tokens
                progress.seconds += result.seconds
                progress.bytes_sent += result.bytes_sent
                before, plan = schedule.at(step), schedule.observe(step, batch.costs, result.compute_seconds)
                progress.schedule = schedule.state(step)
                if plan is not None:
                    run.record_plan(step, plan, before)
                is_last, checkpoint_due = step == run.steps, run.writer.is_due(step, result.elapsed_seconds)
                self._evaluate_and_save(is_last or bool(every and step % every == 0), is_last or checkpoint_due)
                if run.is_over:
                    break

    def _train_independently(self) -> None:
        run, progress, every = self.run, self.run.progress, self.run.config.evaluate.every or self.run.steps
        local_sgd = run.local_sgd
        assert local_sgd is not None

        def local_step(step: int, index: int, epoch: int, rows: np.ndarray, micro_batch_size: int) -> StepRecord:
            result = self.learner.learn(step, index, epoch, self.batches.of(rows, micro_batch_size))
            local_sgd.ranks.limit(run.world.rank, self.learner.max_micro_batch_size)
            return result

        # Of the last merge, from which the next evaluation counts: a resume may be inside a round.
        evaluated = progress.step if local_sgd.round is None else local_sgd.round.first_step
        for merged, checkpoint_due in local_sgd.train(progress, local_step, run.writer):
            evaluation_due = False
            if merged is not None:  # else inside a round
                run.tracker.log_merge(run.own_step, merged)
                if local_sgd.remark:
                    run.say.line(f"step {progress.step}: {local_sgd.remark}")
                    local_sgd.remark = ""
                evaluation_due = progress.step == run.steps or progress.step // every > evaluated // every
                evaluated = progress.step
            self._evaluate_and_save(evaluation_due, checkpoint_due)
            if run.is_over:
                break

    def _evaluate_and_save(self, evaluation_due: bool, checkpoint_due: bool) -> None:
        """Held-out metrics, and a checkpoint where one is due or the model is the best so far."""
        run, progress = self.run, self.run.progress
        best_so_far, is_best = (progress.best_step, progress.best_metrics), False
        run.writer.record(run.tracker)
        # If no finite update follows one that was left out, a resume takes that again: until then nothing is saved.
        in_row = run.local_sgd.ranks.skipped_in_row if run.local_sgd is not None else [progress.skipped_in_row]
        checkpoint_due = checkpoint_due and (run.is_over or not any(in_row))
        if evaluation_due:
            self.latest = self.evaluate()
            # Rank 0's: ranks that are never merged have metrics of their own.
            metrics: Metrics = run.world.broadcast_value(self.latest)
            is_finite = checkpoint.are_finite(run.world, run.model, run.optimizer)
            may_be_saved = is_finite and not any(in_row)  # what is not saved is never the best
            is_best = progress.is_best(metrics, run.best_by, may_be_saved)
            checkpoint_due = is_best or run.is_over or checkpoint_due
        if checkpoint_due and not run.save() and is_best:
            progress.best_step, progress.best_metrics = best_so_far

    def finish(self) -> None:
        """Saves the result and its figures, and closes the log."""
        run, world, tracker = self.run, self.run.world, self.run.tracker
        if (text := strayed(self.latest.get("kl"))) is not None:
            run.say.warning(text, run.own_step)
        reason = self.early_end()
        totals = tracker.totals() | (self.latest if run.is_never_merged else {})
        every = world.gather_values(totals, "every rank's figures")
        if not checkpoint.are_finite(world, run.model, run.optimizer):
            raise Stopped(
                f"the weights after step {run.progress.step} are not finite, and no adapter is made of them (the "
                f"checkpoints in {run.folder} have finite ones); start a new run with a smaller train.learning_rate"
            )
        run.writer.wait()
        with world.agreeing("finishing"), world.gathering(run.model.trainable_parameters()) as [weights]:
            if run.is_never_merged:
                folder = run.folder / "ranks" / f"rank-{world.rank:03d}"
                adapter_files.save_trained(run.model, run.config.model, folder)
            if world.rank == 0:
                adapter_files.save_trained(run.model, run.config.model, run.folder, *weights)
                run.count_wall_seconds()
                result = self._summary(reason, every)
                files.write_atomically(run.folder / "summary.json", records.dumps(result, indent=2) + "\n")
        run.writer.record(tracker)
        tracker.record("end", step=run.own_step, final_step=self.final_step, reason=reason, **self.latest)
        tracker.gather(world, everything=True)
        tracker.close()

    def _summary(self, early_end: str | None, ranks: list[dict[str, Any]]) -> dict[str, Any]:
        """summary.json (docs/runs.md). ranks: every rank's totals; with metrics, if never merged."""
        metrics, config, plan, progress = self.latest, self.run.config, self.run.plan, self.run.progress
        predicted = plan.predicted_step_seconds if plan.calibrated and not plan.divides_model else None
        for i, rank in enumerate(ranks):
            rank["planned_pairs_per_second"] = plan.shares[i] / predicted if predicted else None
        return {
            "name": str(config.run.name),
            "model": config.model.path,
            "strategy": plan.strategy,
            "world_size": len(plan.ranks),
            "steps": progress.step,
            "early_end": early_end,
            "checkpoint": {
                "which": "best" if self.final_step == progress.best_step else "last",
                "step": self.final_step,
                "held_out_loss": metrics.get("loss"),
            },
            "pairs": progress.pairs,
            "tokens": progress.tokens,
            "seconds": progress.seconds,  # of steps
            "wall_seconds": progress.wall_seconds,  # of all processes that made its steps, from each one's launch on
            "pairs_per_second": progress.pairs / progress.seconds if progress.seconds else 0.0,
            "tokens_per_second": progress.tokens / progress.seconds if progress.seconds else 0.0,
            **_speeds(plan, ranks),
            "cost": hosts_cost([rank.host for rank in plan.ranks], progress.wall_seconds, config.cost),
            **{name: metrics.get(name) for name in FIGURES},
            **{f"{name}_before": progress.before.get(name) for name in (*FIGURES, "exact_match")},
            "exact_match_after": metrics.get("exact_match"),
            "bytes_sent": progress.bytes_sent,
            "peak_memory_bytes": max(rank["peak_memory_bytes"] for rank in ranks),
            "generate_options": generate_options(self.run.inputs.tokenizer, config.model, config.data),
            "ranks": ranks,
        }


def _speeds(plan: ClusterPlan, ranks: Sequence[dict[str, Any]]) -> dict[str, float | None]:
    """Computed tokens and operations a second of all ranks since the start or resume; and eta where calibrated."""
    seconds = max(rank["seconds"] for rank in ranks) or float("inf")
    flops = sum(rank["flops_per_token"] * rank["tokens"] for rank in ranks)
    computed = sum(rank["flops_per_token"] * rank["padded_tokens"] for rank in ranks)  # with padding
    rates = [rank["matrix_flops_per_second"] for rank in ranks]
    efficiency, alone = None, plan.solo_sum_pairs_per_second
    if len(plan.ranks) > 1 and plan.calibrated and alone and seconds < float("inf"):
        pairs = ranks[0]["pairs"] if plan.divides_model else sum(rank["pairs"] for rank in ranks)  # divided: all do all
        efficiency = pairs / seconds / alone
    return {
        "computed_tokens_per_second": sum(rank["padded_tokens"] for rank in ranks) / seconds,
        "tflops": flops / seconds / 1e12,
        "computed_tflops": computed / seconds / 1e12,
        "matrix_rate_share": computed / seconds / sum(rates) if all(rates) else None,
        "efficiency": efficiency,
    }
