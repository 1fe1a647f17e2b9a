"""A step that is taken until it is done: once more where it is not finite, in smaller micro-batches where memory runs out."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers as optim

from lib.config.schema import Config
from lib.data.micro_batches import MicroBatches
from lib.distributed import heartbeat
from lib.errors import AgreedError, Stopped
from lib.model import adapters as models
from lib.plan.first_plan import may_checkpoint
from lib.plan.memory_ceilings import HostCeilings
from lib.plan.replan import Schedule
from lib.system import network, out_of_memory
from lib.system.out_of_memory import Limit, OutOfMemory
from lib.telemetry.run_records import PerformanceTracker
from lib.training.checkpoint import Progress
from lib.training.console import Report
from lib.training.step import StepResult

Made = list[Any]  # micro-batches: (Batch, reference log-probs or None)


@dataclass
class Learner:
    """Takes and records the steps of a run.

    Args:
        schedule: whose ranks take every step together, unless they train apart.
        build: makes make_step's step; once more where gradient checkpointing is turned on.
        asked: gives micro-batches their reference.
        memory: what this host remembers; `limit`: what MLX may hold.
    """

    config: Config
    model: nn.Module
    optimizer: optim.Optimizer
    schedule: Schedule
    say: Report
    tracker: PerformanceTracker
    progress: Progress
    build: Callable[[], Callable[..., StepResult]]
    make: MicroBatches
    asked: Callable[[Made], Iterable[Any]]
    memory: HostCeilings
    limit: Limit

    def __post_init__(self) -> None:
        mx.eval(self.model.state)
        plan = self.schedule.at(self.progress.step + 1)
        self.worker = 0 if plan.division else self.tracker.rank
        self.apart = plan.strategy == "independent"
        self.recomputes = bool(self.config.model.gradient_checkpointing or plan.gradient_checkpointing)
        self.most = self.schedule.most_at(self.worker)  # pairs in a micro-batch of this rank, as memory leaves it
        self.take_step = self.build()

    def learn(self, step: int, index: int, epoch: int, rows: list[int], made: Made) -> StepResult:
        """One optimizer step, recorded. index: of the global step that decides the learning rate, from 0.

        Raises:
            AgreedError: memory does not even hold a single pair.
            Stopped: too many steps in a row were not finite.
        """
        result = self._take(step, index, made)
        if result.skipped:
            self.say.warning(f"step {step}: loss or gradient is not finite; computed once more", step)
            result = self._take(step, index, made)
        self.tracker.log_batch(
            step, len(rows), result.seconds, **result.means, **result.measurements(), epoch=epoch, rows=rows
        )
        self.make.pace.observe(len(rows), result.compute_seconds[result.rank], result.traces)
        self.progress.skipped_in_row = in_row = self.progress.skipped_in_row + 1 if result.skipped else 0
        if result.skipped:
            self.say.warning(f"step {step}: not finite again; update {in_row} in a row left out", step)
        if result.skipped and in_row >= self.config.train.max_skipped_steps:
            train = self.config.train
            raise Stopped(
                f"{in_row} updates in a row were not finite, the last at step {step} (train.max_skipped_steps="
                f"{train.max_skipped_steps}); lower train.learning_rate ({train.learning_rate:g}) or look at the rows in {self.tracker.log_path}"
            )
        return result

    def _take(self, step: int, index: int, made: Made) -> StepResult:
        while True:
            fitting = self.make.within(made, self.most)  # those made ahead may be larger
            size = max((len(batch.rows) for batch, _ in fitting), default=0)
            known = {"micro_batch_size": size, "gradient_checkpointing": self.recomputes}
            heartbeat.tell(**known, machine=network.host_name())
            mx.async_eval(self.model.trainable_parameters(), self.optimizer.state)  # a lazy array belongs to its thread
            try:
                return out_of_memory.attempt(
                    lambda fitting=fitting: self.take_step(  # type: ignore[misc]
                        index, self.schedule.steps, self.limit.watching(iter(self.asked(fitting)))
                    )
                )
            except OutOfMemory as error:
                if not error.ranks:
                    self._remember(step, size // 2, str(error))
                    raise
                failure = error
            self._go_smaller(step, size, failure)

    def _go_smaller(self, step: int, size: int, failure: OutOfMemory) -> None:
        """Half the micro-batch for the ranks that ran out of memory, and the gradients' checkpointing where that is one pair."""
        hit = (self.worker,) if self.apart else failure.ranks
        _, before = self.schedule.plans[-1]
        at_one = [rank for rank in hit if max(before.workers[rank].micro_batch_sizes, default=1) == 1]
        if at_one and (self.recomputes or not may_checkpoint(self.config) or not hasattr(self.model, "layers")):
            if self.worker in hit:
                self._remember(step, 0, str(failure))
            raise AgreedError(self._end(at_one, failure))
        plan = self.schedule.halve(step, hit, gradient_checkpointing=bool(at_one))
        if self.worker in hit:
            self._remember(step, 0 if self.worker in at_one else self.schedule.most_at(self.worker) or 1, str(failure))
        if at_one:
            self.recomputes = True
            models.checkpoint_blocks(self.model)
            self.take_step = self.build()
        self.most = self.schedule.most_at(self.worker)
        needed = ", ".join(f"{size_bytes / 1e9:.4g} GB" for size_bytes in failure.needed_bytes)
        self.say.warning(f"{plan.reason}; the step is taken again (held {needed}: {failure})", step)
        first = step + self.schedule.lead  # until then every rank cuts what is made already
        self.tracker.record("plan", step=step, first_step=first, shares_before=before.shares, **plan.to_dict())

    def _remember(self, step: int, most: int, why: str) -> None:
        """Leaves micro-batches of at most so many to this host's next run; and the log why."""
        text = f"step {step}: memory ran out, which leaves micro-batches of {most}: {why}"
        if fault := self.memory.remember(most, self.recomputes, text):
            text = f"{text}; {fault}"
        if self.say.tracker is None:  # not the one whose warnings are kept
            self.tracker.record("warning", step=step, text=text)

    def _end(self, ranks: Sequence[int], failure: OutOfMemory) -> str:
        hosts = ", ".join(f"rank {rank} ({self.schedule.plans[-1][1].ranks[rank].host})" for rank in ranks)
        held = ", ".join(f"{size_bytes / 1e9:.4g} GB" for size_bytes in failure.needed_bytes)
        model, remedies = self.config.model, ["a smaller data.max_length"]
        if not self.recomputes and not model.dropout:
            remedies.insert(0, "model.gradient_checkpointing=true")
        elif not self.recomputes:
            remedies.insert(0, "model.dropout=0 with model.gradient_checkpointing=true")
        if model.method == "full":
            remedies.append("model.method=lora")
        remedies += ["a quantised or smaller model", "strategy=sharded over several hosts"]
        return (
            f"{hosts} ran out of memory with a single pair{' and gradient checkpointing' * self.recomputes}: held {held} "
            f"({failure}); try {', '.join(remedies)}"
        )
