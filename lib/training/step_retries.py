"""A step taken until it is done: once more where it is not finite, with half the batch where memory runs out."""

from __future__ import annotations

import json
from pathlib import Path

import mlx.core as mx

from lib.data.batch import MicroBatches
from lib.distributed import heartbeat
from lib.errors import AgreedError, Stopped
from lib.model import checkpointing
from lib.system import files, network, out_of_memory
from lib.system.out_of_memory import OutOfMemory
from lib.training.divided_world import InStages
from lib.training.optimizers import learning_rate
from lib.training.pipelined_step import PipelinedStep, StagePace
from lib.training.run import TrainingRun
from lib.training.run_facts import memory_limit
from lib.training.step import MicroBatch, Step, StepRecord


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
        """One optimizer step, recorded. index: of the global step that decides the learning rate, from 0.

        Raises AgreedError where memory does not even hold a single pair, Stopped after too many steps in a row that
        were not finite.
        """
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
