"""The training loop: all ranks step by step together, or each by itself until they merge."""

from __future__ import annotations

import contextlib
import json
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from lib.data.batch import MicroBatches, lengths_and_cost
from lib.data.dataset import Dataset
from lib.data.order import Position, advance, assign_micro_batches, epoch_order, global_batch, micro_batches, prefetch
from lib.data.prompts import Prompts
from lib.data.streaming import StreamedDataset
from lib.distributed.world import World
from lib.errors import Stopped, UserError
from lib.model import adapter_files
from lib.plan.plan_warnings import strayed
from lib.system import files, records
from lib.training.checkpoint import agreed_fault, restore_weights
from lib.training.objective import Metrics
from lib.training.run import PREFETCHED, TrainingRun
from lib.training.step import MicroBatch, StepRecord, is_compiled, trace_cost
from lib.training.step_retries import Learner
from lib.training.summary import summarise


class Evaluate(Protocol):
    """Held-out metrics, by some ranks in some shares; recorded and printed."""

    def __call__(self, world: World, shares: list[int]) -> Metrics: ...


@dataclass(frozen=True)
class StepBatch:
    """One step of all ranks, as this rank takes it."""

    step: int  # from 1
    epoch: int
    position: Position  # after it
    pairs: int  # of all ranks
    costs: list[float]  # of every rank's part, in tokens
    rows: list[int]  # of this rank
    micro_batches: list[MicroBatch]


@dataclass(frozen=True)
class Batches:
    """The training rows as this rank's micro-batches.

    Args:
        lengths: int [n], of the rows, as all ranks count them; cost: of a micro-batch, given its rows, in tokens.
    """

    data: Dataset | StreamedDataset | Prompts
    make: MicroBatches
    lengths: np.ndarray
    cost: Callable[[np.ndarray], float]

    @classmethod
    def prepare(cls, run: TrainingRun, reference: np.ndarray | None) -> Batches:
        """Those of a run. reference: float32 [n, K], log-probabilities of the rows."""
        config, world, data, layout = run.config, run.world, run.inputs.data, run.layout
        # Unlike devices pad unlike, but all ranks assign the same rows.
        multiple = int(world.broadcast_text(str(layout.length_multiple)))
        lengths, cost = lengths_and_cost(data, multiple, layout.shares_prompts)
        compiled = is_compiled(config.train, world.workers)
        padding = layout.length_multiple, layout.shares_prompts
        make = MicroBatches(data, reference, config, *padding, compiled, trace_cost(run.model))
        return cls(data, make, lengths, cost)

    def upcoming(self, run: TrainingRun) -> Iterator[StepBatch]:
        """Every step that is left."""
        settings, data, rank = run.config, self.data, run.world.workers.rank
        batch_size = settings.train.global_batch_size
        position, epoch = Position(run.progress.epoch, run.progress.cursor), -1
        for step in range(run.progress.step + 1, run.steps + 1):
            if position.epoch != epoch:
                epoch = position.epoch
                order = epoch_order(data.lengths, settings.train.seed, epoch, batch_size, segments=data.segments)
            rows = global_batch(order, position, batch_size)
            sizes = run.schedule.at(step).micro_batch_sizes
            parts, costs = assign_micro_batches(rows, self.lengths, sizes, self.cost)
            position = advance(position, len(rows), len(data))
            made = self.make.of(parts[rank], max(sizes[rank], default=1))
            rank_rows = [int(row) for batch, _ in made for row in batch.rows]
            yield StepBatch(step, epoch, position, len(rows), costs, rank_rows, made)

    def of(self, rows: np.ndarray, micro_batch_size: int) -> tuple[list[int], list[MicroBatch]]:
        """Some rows, ascending in length, and their micro-batches."""
        rows = rows[np.argsort(self.lengths[rows], kind="stable")]
        return rows.tolist(), self.make.of(micro_batches(rows, micro_batch_size), micro_batch_size)


@dataclass
class TrainingLoop:
    """The steps of a run. Once in a while the model is evaluated, and a checkpoint is written."""

    run: TrainingRun
    learner: Learner
    batches: Batches
    evaluate_on: Evaluate
    latest: Metrics = field(default_factory=dict)  # held-out metrics of the model as it is
    final_step: int = 0  # whose weights the run's folder holds at the end
    ended: str | None = None  # why there are no further rounds

    @classmethod
    def over(cls, run: TrainingRun, reference: np.ndarray | None, evaluate_on: Evaluate) -> TrainingLoop:
        """Over a run's training data. reference: float32 [n, K], log-probabilities of the rows."""
        batches = Batches.prepare(run, reference)
        return cls(run, Learner(run, batches.make), batches, evaluate_on, final_step=run.steps)

    def evaluate(self) -> Metrics:
        """Held-out metrics and greedy answers, over all ranks; each rank's own where ranks are never merged."""
        run = self.run
        if run.local_sgd is not None:
            return self.evaluate_on(*run.local_sgd.evaluating_ranks())
        return self.evaluate_on(run.world, run.shares)

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
            return self.ended
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
        if fault := agreed_fault(path, run.world):
            text = f"{path}, of the best {run.best_by}, is damaged ({fault}); the last weights are taken"
            run.say.warning(text, run.own_step)
            return
        restore_weights(path, run.model, run.world)
        self.final_step, self.latest = step, progress.best_metrics
        run.say.line(f"the weights of step {step} are taken, of the best {run.best_by} ({best:.4f})")

    def _train_synchronously(self) -> None:
        run, progress, schedule = self.run, self.run.progress, self.run.schedule
        every = run.config.evaluate.every
        with contextlib.closing(prefetch(self.batches.upcoming(run), PREFETCHED)) as upcoming:
            for batch in upcoming:
                step = batch.step
                result = self.learner.learn(step, step - 1, batch.epoch, batch.rows, batch.micro_batches)
                if run.reference is not None:
                    run.reference.follow(step)
                progress.count(step, batch.position, batch.pairs, result)
                before, plan = schedule.at(step), schedule.observe(step, batch.costs, result.compute_seconds)
                progress.schedule = schedule.state(step)
                if plan is not None:
                    fields = {"first_step": step + schedule.lead, "shares_before": before.shares, **plan.to_dict()}
                    run.tracker.record("plan", step=step, **fields)
                is_last, checkpoint_due = step == run.steps, run.writer.is_due(step, result.elapsed_seconds)
                self._evaluate_and_save(is_last or bool(every and step % every == 0), is_last or checkpoint_due)
                if run.is_over:
                    break

    def _train_independently(self) -> None:
        run, progress, every = self.run, self.run.progress, self.run.config.evaluate.every or self.run.steps
        local_sgd = run.local_sgd
        assert local_sgd is not None

        def local_step(step: int, index: int, epoch: int, rows: np.ndarray, micro_batch_size: int) -> StepRecord:
            result = self.learner.learn(step, index, epoch, *self.batches.of(rows, micro_batch_size))
            local_sgd.ranks.limit(run.world.rank, self.learner.max_micro_batch_size)
            return result

        # Of the last merge, from which the next evaluation counts: a resume may be inside a round.
        evaluated = progress.step if local_sgd.round is None else local_sgd.round.stream.first_step
        for merged, checkpoint_due in local_sgd.train(progress, local_step, run.writer):
            if merged is None:  # inside a round
                self._evaluate_and_save(False, checkpoint_due)
                continue
            run.tracker.log_merge(run.own_step, merged)
            if local_sgd.remark:
                run.say.line(f"step {progress.step}: {local_sgd.remark}")
                local_sgd.remark = ""
            evaluation_due = progress.step == run.steps or progress.step // every > evaluated // every
            self._evaluate_and_save(evaluation_due, checkpoint_due)
            evaluated = progress.step
            if run.is_over:
                break

    def _evaluate_and_save(self, evaluation_due: bool, checkpoint_due: bool) -> None:
        """Held-out metrics, and a checkpoint where one is due or the model is the best so far."""
        run, progress = self.run, self.run.progress
        best_so_far, is_best = (progress.best_step, progress.best_loss, progress.best_metrics), False
        run.writer.record(run.tracker)
        # If no finite update follows one that was left out, a resume takes that again: until then nothing is saved.
        in_row = run.local_sgd.ranks.skipped_in_row if run.local_sgd is not None else [progress.skipped_in_row]
        checkpoint_due = checkpoint_due and (run.is_over or not any(in_row))
        if evaluation_due:
            self.latest = self.evaluate()
            # Rank 0's: ranks that are never merged have metrics of their own.
            metrics: Metrics = json.loads(run.world.broadcast_text(json.dumps(self.latest)))
            may_be_saved = run.is_finite() and not any(in_row)  # what is not saved is never the best
            is_best = progress.is_best(metrics, run.best_by, may_be_saved)
            checkpoint_due = is_best or run.is_over or checkpoint_due
        if checkpoint_due and not run.save() and is_best:
            progress.best_step, progress.best_loss, progress.best_metrics = best_so_far

    def finish(self) -> None:
        """Saves the result and its figures, and closes the log."""
        run, world, tracker = self.run, self.run.world, self.run.tracker
        if (text := strayed(self.latest.get("kl"))) is not None:
            run.say.warning(text, run.own_step)
        reason = self.early_end()
        totals = tracker.totals() | (self.latest if run.is_never_merged else {})
        each = world.gather_long_text(json.dumps(totals), "every rank's figures")
        if not run.is_finite():
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
                result = summarise(run, self.final_step, self.latest, reason, each)
                files.write_atomically(run.folder / "summary.json", records.dumps(result, indent=2) + "\n")
        run.writer.record(tracker)
        tracker.record("end", step=run.own_step, final_step=self.final_step, reason=reason, **self.latest)
        tracker.gather(world, everything=True)
        tracker.close()
