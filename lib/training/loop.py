"""The training loop: steps, each taken until it is done; all ranks together, or each by itself until they merge."""

from __future__ import annotations

import contextlib
import json
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np

from lib.data.batch import MicroBatches, lengths_and_cost
from lib.data.dataset import Dataset
from lib.data.order import Position, advance, assign_micro_batches, epoch_order, global_batch, micro_batches, prefetch
from lib.data.prompts import Prompts
from lib.data.streaming import StreamedDataset
from lib.distributed import heartbeat
from lib.distributed.world import World
from lib.errors import AgreedError, Stopped, UserError
from lib.model import adapter_files, checkpointing
from lib.plan.cost import hosts_cost
from lib.plan.plan import ClusterPlan
from lib.plan.plan_warnings import strayed
from lib.system import files, network, out_of_memory, records
from lib.system.out_of_memory import OutOfMemory
from lib.training.checkpoint import fault_of, restore_weights
from lib.training.divided_world import InStages
from lib.training.objective import Metrics
from lib.training.optimizers import learning_rate
from lib.training.pipelined_step import PipelinedStep, StagePace
from lib.training.run import PREFETCHED, TrainingRun
from lib.training.run_facts import memory_limit
from lib.training.step import MicroBatch, Step, StepRecord, is_compiled, trace_cost

Evaluate = Callable[[World, list[int]], Metrics]  # held-out metrics, by some ranks in some shares; recorded and printed
FIGURES = ("loss", "reward_accuracy", "reward_margin", "kl")  # held out; None where there is no held-out data


# ---- One step, until it is done: once more where it is not finite, with half the batch where memory runs out ---------


class MicroBatchLimit:
    """The largest micro-batch that this host's memory holds, as a file of the run's folder.

    The kernel's out-of-memory killer and Metal end a process without an exception. So a size is written down before it
    is first tried, and a start that finds it unfinished halves it; on Linux only where the kernel has killed since.
    """

    def __init__(self, path: Path):
        self.path = path
        try:
            self.stored = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            self.stored = {}
        self.fits: int = self.stored.get("fits", 0)
        tried = self.stored.get("tried", 0)
        if tried > self.fits and self.stored.get("kills") != out_of_memory.kernel_kills():
            self.record(max(1, tried // 2), self.recomputes or tried == 1)

    @property
    def size(self) -> int | None:
        """Pairs in a micro-batch at most; None without a limit."""
        return self.stored.get("limit")

    @property
    def recomputes(self) -> bool:
        """Whether even one pair takes gradient checkpointing."""
        return bool(self.stored.get("recomputes"))

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
        self.fits = min(limit, self.fits)
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
        # Pairs in a micro-batch of this rank, as memory leaves it.
        sizes = [run.schedule.most_at(self.worker), self.memory.size]
        if plan.divides_model:  # every rank takes the same micro-batches
            sizes += [int(text) for text in run.world.gather_text(str(self.memory.size or "")) if text]
        self.max_micro_batch_size = min((size for size in sizes if size is not None), default=None)
        if self.memory.recomputes and run.config.model.may_turn_on_checkpointing and not self.recomputes:
            self._recompute()
        else:
            self.take_step = self._make_step()

    def _recompute(self) -> None:
        """Turns gradient checkpointing on."""
        self.recomputes = True
        checkpointing.checkpoint_blocks(self.run.model)
        self.take_step = self._make_step()

    def _make_step(self) -> Step:
        run, train, sync = self.run, self.run.config.train, self.run.config.sync
        limit = memory_limit(run.config.plan, run.hosts, run.world)
        world = run.world.workers if run.local_sgd is None else run.world.alone()
        step: Step
        if isinstance(world, InStages):
            stages = run.plan.stages
            pace = StagePace([stage.in_flight for stage in stages], stages[run.world.rank].recomputes, limit)
            step = PipelinedStep(run.model, run.optimizer, train, world, sync, pace)
        else:
            rank = None if run.local_sgd is None else run.world.rank
            step = Step(run.model, run.optimizer, train, world, sync, rank, limit)
        progress = run.progress  # not the run: a step is freed late, and would keep the run's folder locked
        step.rewards, step.feedback = progress.rewards, run.feedback
        step.rate_of = lambda index, _: learning_rate(train, *progress.rate_position(index))
        return step

    def learn(self, step: int, index: int, epoch: int, rows: list[int], batches: list[MicroBatch]) -> StepRecord:
        """One optimizer step, recorded. index: of the global step that decides the learning rate, from 0."""
        run, train = self.run, self.run.config.train
        result = self._take(step, index, batches)
        if result.skipped:
            run.say.own_warning(f"step {step}: loss or gradient is not finite; computed once more", step)
            result = self._take(step, index, batches)
        run.tracker.log_batch(
            step, len(rows), result.seconds, **result.means, **result.measurements(), epoch=epoch, rows=rows
        )
        run.progress.skipped_in_row = in_row = run.progress.skipped_in_row + 1 if result.skipped else 0
        if in_row:
            run.say.own_warning(f"step {step}: not finite again; update {in_row} in a row left out", step)
        if in_row and in_row >= train.max_skipped_steps:
            diverged = f"{in_row} updates in a row were not finite, the last at step {step}"
            heartbeat.report(diverged=diverged)
            raise Stopped(
                f"{diverged} (train.max_skipped_steps={train.max_skipped_steps}); lower train.learning_rate "
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
            mx.async_eval(run.model.trainable_parameters(), run.optimizer.state)  # a lazy array belongs to its thread

            def attempt(fitting: list[MicroBatch] = fitting) -> StepRecord:
                return self.take_step(index, run.schedule.steps, (run.asked_reference or iter)(fitting))

            try:
                result = out_of_memory.attempt(attempt)
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
            remedies = "a smaller data.max_length, a quantised or smaller model, strategy=sharded over several hosts"
            if not self.recomputes:
                dropout = "model.dropout=0 with " if model.dropout else ""
                remedies = f"{dropout}model.gradient_checkpointing=true, {remedies}"
            remedies = f"model.method=lora, {remedies}" if model.method == "full" else remedies
            what = f"a single pair{' and gradient checkpointing' * self.recomputes}"
            raise AgreedError(f"{hosts} ran out of memory with {what}: {held} ({failure}); try {remedies}")
        plan = schedule.halve(step, hit, gradient_checkpointing=bool(at_one))
        if at_one:
            self._recompute()
        self.max_micro_batch_size = schedule.most_at(self.worker)
        if self.worker in hit:
            self.memory.record(self.max_micro_batch_size or 1, self.recomputes)
        run.say.own_warning(f"{plan.reason}; the step is taken again", step, f" ({held}: {failure})")
        first = step + schedule.lead  # until then every rank cuts what is made already
        run.tracker.record("plan", step=step, first_step=first, shares_before=before.shares, **plan.to_dict())


# ---- The batches of a run --------------------------------------------------------------------------------------------


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
    """The training rows as this rank's micro-batches. lengths: int [n]; cost: of rows, in tokens."""

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


# ---- The loop --------------------------------------------------------------------------------------------------------


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
        if fault := run.world.broadcast_text(fault_of(path) or "" if run.world.rank == 0 else ""):
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
                progress.step, progress.epoch, progress.cursor = step, batch.position.epoch, batch.position.cursor
                progress.pairs += batch.pairs
                progress.tokens += result.tokens
                progress.seconds += result.seconds
                progress.bytes_sent += result.bytes_sent
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
        best_so_far, is_best = (progress.best_step, progress.best_metrics), False
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
            progress.best_step, progress.best_metrics = best_so_far

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
                result = self._summary(reason, each)
                files.write_atomically(run.folder / "summary.json", records.dumps(result, indent=2) + "\n")
        run.writer.record(tracker)
        tracker.record("end", step=run.own_step, final_step=self.final_step, reason=reason, **self.latest)
        tracker.gather(world, everything=True)
        tracker.close()

    def _summary(self, early_end: str | None, each: Sequence[str]) -> dict[str, Any]:
        """summary.json (docs/runs.md). each: every rank's totals as JSON; with metrics, if never merged."""
        metrics = self.latest
        config, plan, progress = self.run.config, self.run.plan, self.run.progress
        ranks = [json.loads(totals) for totals in each]
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
