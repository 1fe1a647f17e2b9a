"""The loop of a run: batches, steps, evaluations and checkpoints."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator
from functools import partial
from typing import NamedTuple

import mlx.core as mx
import numpy as np

from lib.data.batch import MicroBatch, MicroBatches
from lib.data.batch_shapes import RunShapes, TraceCost, lengths_and_cost
from lib.data.order import Position, advance, assign_micro_batches, epoch_order, global_batch, micro_batches, prefetch
from lib.distributed import heartbeat
from lib.distributed.world import World
from lib.errors import AgreedError, Stopped, UserError
from lib.model import gradient_checkpointing
from lib.system import network, out_of_memory
from lib.system.out_of_memory import MicroBatchLimit, OutOfMemory
from lib.training import checkpoint
from lib.training.cuda_kernels import trace_cost
from lib.training.divided_world import InStages, is_compiled
from lib.training.losses import Metrics
from lib.training.optimizers import learning_rate
from lib.training.pipelined_step import PipelinedStep, StagePace
from lib.training.run import PREFETCHED, TrainingRun
from lib.training.run_end import early_end, take_best
from lib.training.run_plan import memory_limit
from lib.training.step import Step, StepRecord

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
        multiple = world.broadcast_value(layout.length_multiple)
        self.lengths, self.cost = lengths_and_cost(self.data, multiple, layout.shares_prompts)
        padding, shapes, cost = (layout.length_multiple, layout.shares_prompts), None, trace_cost(run.model)
        # Ranks that share a model may have unlike devices and parts, but send each other batches of one shape.
        own = mx.array([is_compiled(config.train, world.workers), cost.tokens, cost.least_tokens])
        has_shapes, *tokens = world.workers.decide(own).tolist()
        if has_shapes:
            shapes = RunShapes(self.data, config.train, config.data.max_length, *padding, TraceCost(*tokens))
        self.make = MicroBatches(self.data, reference, *padding, shapes)

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


# ---- One step, until it is done: once more where it is not finite, with half the batch where memory runs out ---------


class Learner:
    """Takes and records the steps of a run."""

    def __init__(self, run: TrainingRun, make: MicroBatches):
        self.run, self.make = run, make
        self.memory = MicroBatchLimit(run.folder / f"micro-batch-{run.hosts[run.world.rank]}-{run.world.rank}.json")
        mx.eval(run.model.state)
        plan = run.schedule.at(run.progress.step + 1)
        self.worker = 0 if plan.divides_model else run.world.rank
        self.recomputes = bool(run.config.model.gradient_checkpointing or plan.checkpoints_blocks(run.world.rank))
        # Pairs in a micro-batch, as memory leaves it. Ranks that divide a model take the same, and recompute together.
        known = self.memory.size, self.memory.recomputes
        limits, recomputed = zip(*(run.world.gather_values(known) if plan.divides_model else [known]), strict=True)
        self.max_micro_batch_size = min(filter(None, [run.schedule.most_at(self.worker), *limits]), default=None)
        self._make_step(any(recomputed) and run.config.model.may_turn_on_checkpointing and not self.recomputes)

    def _make_step(self, turns_on_checkpointing: bool) -> None:
        run, train, sync = self.run, self.run.config.train, self.run.config.sync
        if turns_on_checkpointing:
            self.recomputes = True
            gradient_checkpointing.checkpoint_blocks(run.model)
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
        self.step.rewards, self.step.feedback = run.progress.rewards, run.feedback

    def learn(self, step: int, index: int, epoch: int, batches: list[MicroBatch]) -> StepRecord:
        """One optimizer step, recorded. index: of the global step that decides the learning rate, from 0."""
        run, train, progress = self.run, self.run.config.train, self.run.progress
        rows = [int(row) for batch, _ in batches for row in batch.rows]
        rate = learning_rate(train, *progress.rate_position(index))
        result = self._take(step, index, rate, batches)
        if result.skipped:
            run.say.own_warning(f"step {step}: loss or gradient is not finite; computed once more", step)
            result = self._take(step, index, rate, batches)
        run.tracker.log_batch(step, len(rows), result.seconds, **result.means, **result.figures, epoch=epoch, rows=rows)
        progress.skipped_in_row = in_row = progress.skipped_in_row + 1 if result.skipped else 0
        if in_row:
            run.say.own_warning(f"step {step}: not finite again; update {in_row} in a row left out", step)
        if in_row and in_row >= train.max_skipped_steps:
            last = f"the last at step {step} (train.max_skipped_steps={train.max_skipped_steps})"
            raise Stopped(
                f"{in_row} updates in a row were not finite, {last}; lower train.learning_rate "
                f"({train.learning_rate:g}) or look at the rows in {run.tracker.log_path}"
            )
        return result

    def _take(self, step: int, index: int, rate: float, batches: list[MicroBatch]) -> StepRecord:
        """The step, with smaller micro-batches each time that memory runs out."""
        while True:
            fitting = self.make.within(batches, self.max_micro_batch_size)  # those made in advance may be larger
            size = max((len(batch.rows) for batch, _ in fitting), default=0)
            heartbeat.report(micro_batch_size=size, gradient_checkpointing=self.recomputes, machine=network.host_name())
            self.memory.begin(size)
            mx.async_eval(self.step.trained.read())  # a lazy array belongs to its thread
            try:
                reference = self.run.step_reference
                with_reference = fitting if reference is None else reference(fitting)
                result = out_of_memory.attempt(partial(self.step, index, rate, with_reference))
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
        recomputes = all(run.world.gather_values(self.recomputes)) if before.divides_model else self.recomputes
        if at_one and (recomputes or not (model.may_turn_on_checkpointing and hasattr(run.model, "layers"))):
            hosts = ", ".join(f"rank {rank} ({before.ranks[rank].host})" for rank in at_one)
            what = f"a single pair{' and gradient checkpointing' * recomputes}"
            remedy = f"a smaller data.max_length, {'strategy=pipelined' if run.world.size > 1 else 'a quantised model'}"
            if not recomputes:
                remedy = "model.gradient_checkpointing=true with model.dropout=0"
            raise AgreedError(f"{hosts} ran out of memory with {what}: {held} ({failure}); try {remedy}")
        plan = schedule.halve(step, hit, gradient_checkpointing=bool(at_one))
        if at_one:
            self._make_step(True)
        self.max_micro_batch_size = schedule.most_at(self.worker)
        if self.worker in hit:
            self.memory.record(self.max_micro_batch_size or 1, self.recomputes)
        run.say.own_warning(f"{plan.reason}; the step is taken again", step, f" ({held}: {failure})")
        run.record_plan(step, plan, before)  # until then every rank cuts what is made already


# ---- The loop --------------------------------------------------------------------------------------------------------


class TrainingLoop:
    """The steps of a run. Once in a while the model is evaluated, and a checkpoint is written."""

    def __init__(
        self, run: TrainingRun, reference: np.ndarray | None, evaluate_on: Callable[[World, list[int]], Metrics]
    ):
        """reference: float32 [n, K], of the training rows. evaluate_on: held-out metrics, by ranks in these shares."""
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
        self.latest = self.evaluate() if run.is_over else run.progress.before
        if not run.is_over:
            (self._train_synchronously if run.local_sgd is None else self._train_independently)()
        if why := early_end(run):
            run.say.line(f"training ends after step {run.progress.step} of {run.steps}: {why}")
        self.final_step = run.progress.step
        if run.config.checkpoint.final == "best" and run.config.evaluate.every is not None:
            self.final_step, self.latest = take_best(run, self.latest)

    def _train_synchronously(self) -> None:
        run, progress, schedule = self.run, self.run.progress, self.run.schedule
        every = run.config.evaluate.every
        with contextlib.closing(prefetch(self.batches.upcoming(run), PREFETCHED)) as upcoming:
            for batch in upcoming:
                step = batch.step
                result = self.learner.learn(step, step - 1, batch.epoch, batch.micro_batches)
                if run.moving_reference:
                    run.moving_reference.follow(step)
                progress.step, progress.epoch, progress.cursor = step, batch.position.epoch, batch.position.cursor
                progress.count(batch.pairs, result.tokens, result.seconds, result.figures["bytes_sent"])
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
        skips = any(run.local_sgd.ranks.skipped_in_row if run.local_sgd is not None else [progress.skipped_in_row])
        checkpoint_due = checkpoint_due and (run.is_over or not skips)
        if evaluation_due:
            self.latest = self.evaluate()
            # Rank 0's: ranks that are never merged have metrics of their own.
            metrics: Metrics = run.world.broadcast_value(self.latest)
            is_finite = checkpoint.are_finite(run.world, run.model, run.optimizer)
            is_best = progress.is_best(metrics, run.best_by, is_finite and not skips)  # only what may be saved
            checkpoint_due = is_best or run.is_over or checkpoint_due
        if checkpoint_due and not run.save() and is_best:
            progress.best_step, progress.best_metrics = best_so_far
