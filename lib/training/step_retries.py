"""A step that is taken until it is done: once more where it is not finite, smaller where memory runs out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import mlx.core as mx

from lib.data.micro_batches import MicroBatches
from lib.distributed import heartbeat
from lib.distributed.pipelined_world import InStages
from lib.errors import AgreedError, Stopped
from lib.model import backward_order
from lib.plan.first_plan import memory_limit
from lib.plan.memory_ceilings import HostCeilings
from lib.system import network, out_of_memory
from lib.system.out_of_memory import OutOfMemory
from lib.training import step as train_step
from lib.training.pipelined_step import pipelined
from lib.training.step import MicroBatch, StepResult
from lib.training.training_run import TrainingRun


@dataclass
class Learner:
    """Takes and records the steps of a run."""

    run: TrainingRun
    make: MicroBatches

    def __post_init__(self) -> None:
        run = self.run
        self.limit = memory_limit(run.config, run.hosts, run.world)  # what MLX may hold
        self.memory = HostCeilings.of(run.config, run.hosts, run.world.rank, run.plan)  # what this host remembers
        mx.eval(run.model.state)
        plan = run.schedule.at(run.progress.step + 1)
        self.worker = 0 if plan.divides_model else run.world.rank
        self.recomputes = bool(run.config.model.gradient_checkpointing or plan.checkpoints_blocks(run.world.rank))
        # Pairs in a micro-batch of this rank, as memory leaves it.
        self.max_micro_batch_size = run.schedule.most_at(self.worker)
        self.take_step = self._make_step()

    def _make_step(self) -> train_step.TrainStep:
        """The step; anew where gradient checkpointing is turned on."""
        run, settings = self.run, self.run.config
        world = run.world.workers if run.local_sgd is None else run.world.alone()
        rank = None if run.local_sgd is None else run.world.rank
        has_dropout = settings.model.dropout > 0
        step = train_step.make_step(
            run.model, run.optimizer, settings.train, world, has_dropout, settings.sync, run.feedback, rank
        )
        step.rewards = run.progress.rewards
        if isinstance(world, InStages):
            stages = run.plan.stages
            in_flight = [stage.in_flight for stage in stages]
            return pipelined(step, in_flight, stages[run.world.rank].recomputes, self.limit)
        return step

    def learn(self, step: int, index: int, epoch: int, rows: list[int], batches: list[MicroBatch]) -> StepResult:
        """One optimizer step, recorded. index: of the global step that decides the learning rate, from 0.

        Raises:
            AgreedError: memory does not even hold a single pair.
            Stopped: too many steps in a row were not finite.
        """
        result = self._take(step, index, batches)
        if result.skipped:
            self.run.say.own_warning(f"step {step}: loss or gradient is not finite; computed once more", step)
            result = self._take(step, index, batches)
        self.run.tracker.log_batch(
            step, len(rows), result.seconds, **result.means, **result.measurements(), epoch=epoch, rows=rows
        )
        self.make.pace.observe(len(rows), result.compute_seconds[result.rank], result.traces)
        self.run.progress.skipped_in_row = in_row = self.run.progress.skipped_in_row + 1 if result.skipped else 0
        if result.skipped:
            self.run.say.own_warning(f"step {step}: not finite again; update {in_row} in a row left out", step)
        if result.skipped and in_row >= self.run.config.train.max_skipped_steps:
            train = self.run.config.train
            diverged = f"{in_row} updates in a row were not finite, the last at step {step}"
            heartbeat.tell(diverged=diverged)
            raise Stopped(
                f"{diverged} (train.max_skipped_steps="
                f"{train.max_skipped_steps}); lower train.learning_rate ({train.learning_rate:g}) "
                f"or look at the rows in {self.run.tracker.log_path}"
            )
        return result

    def _take(self, step: int, index: int, batches: list[MicroBatch]) -> StepResult:
        steps = self.run.schedule.steps
        while True:
            fitting = self.make.within(batches, self.max_micro_batch_size)  # those made ahead may be larger
            size = max((len(batch.rows) for batch, _ in fitting), default=0)
            heartbeat.tell(micro_batch_size=size, gradient_checkpointing=self.recomputes, machine=network.host_name())
            self.take_step.has_unwritten = self.run.tracker.has_unwritten or self.run.writer.is_busy
            self.take_step.evaluate_held()
            try:
                return out_of_memory.attempt(
                    lambda fitting=fitting: self.take_step(  # type: ignore[misc]
                        index, steps, (self.run.asked_reference or iter)(fitting), self.limit.watching
                    )
                )
            except OutOfMemory as error:
                if not error.ranks:
                    self._remember(step, size // 2, str(error))
                    raise
                failure = error
            self._go_smaller(step, failure)

    def _go_smaller(self, step: int, failure: OutOfMemory) -> None:
        """Half the micro-batch for the ranks that ran out of memory; gradient checkpointing where that is one pair."""
        hit = (self.worker,) if self.run.local_sgd is not None else failure.ranks
        _, before = self.run.schedule.plans[-1]
        at_one = [rank for rank in hit if max(before.workers[rank].micro_batch_sizes, default=1) == 1]
        may_recompute = self.run.config.model.may_turn_on_checkpointing and hasattr(self.run.model, "layers")
        if at_one and (self.recomputes or not may_recompute):
            if self.worker in hit:
                self._remember(step, 0, str(failure))
            raise AgreedError(self._end(at_one, failure))
        plan = self.run.schedule.halve(step, hit, gradient_checkpointing=bool(at_one))
        if self.worker in hit:
            self._remember(
                step, 0 if self.worker in at_one else self.run.schedule.most_at(self.worker) or 1, str(failure)
            )
        if at_one:
            self.recomputes = True
            backward_order.checkpoint_blocks(self.run.model)
            self.take_step = self._make_step()
        self.max_micro_batch_size = self.run.schedule.most_at(self.worker)
        needed = ", ".join(f"{size_bytes / 1e9:.4g} GB" for size_bytes in failure.needed_bytes)
        why = f" (held {needed}: {failure})"
        self.run.say.own_warning(f"{plan.reason}; the step is taken again", step, why)
        first = step + self.run.schedule.lead  # until then every rank cuts what is made already
        self.run.tracker.record("plan", step=step, first_step=first, shares_before=before.shares, **plan.to_dict())

    def _remember(self, step: int, most: int, why: str) -> None:
        """Leaves micro-batches of at most so many to this host's next run; and the log why."""
        text = f"step {step}: memory ran out, which leaves micro-batches of {most}: {why}"
        if fault := self.memory.remember(most, self.recomputes, text):
            text = f"{text}; {fault}"
        if self.run.say.tracker is None:  # not the one whose warnings are kept
            self.run.tracker.record("warning", step=step, text=text)

    def _end(self, ranks: Sequence[int], failure: OutOfMemory) -> str:
        hosts = ", ".join(f"rank {rank} ({self.run.schedule.plans[-1][1].ranks[rank].host})" for rank in ranks)
        held = ", ".join(f"{size_bytes / 1e9:.4g} GB" for size_bytes in failure.needed_bytes)
        model, remedies = self.run.config.model, ["a smaller data.max_length"]
        if not self.recomputes and not model.dropout:
            remedies.insert(0, "model.gradient_checkpointing=true")
        elif not self.recomputes:
            remedies.insert(0, "model.dropout=0 with model.gradient_checkpointing=true")
        if model.method == "full":
            remedies.append("model.method=lora")
        remedies += ["a quantised or smaller model", "strategy=sharded over several hosts"]
        return (
            f"{hosts} ran out of memory with a single pair{' and gradient checkpointing' * self.recomputes}: "
            f"held {held} ({failure}); try {', '.join(remedies)}"
        )
