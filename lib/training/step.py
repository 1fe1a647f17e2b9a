"""One optimizer step: the reference, forward and backward, sum over ranks, one division, clip, update.

Every quantity travels as a sum beside a count, so that unequal ranks and ragged micro-batches weigh what they hold.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers as optim
import numpy as np
from mlx.utils import tree_map

from lib.config.settings import SyncSettings, TrainSettings
from lib.data.batch import Batch, MicroBatch
from lib.distributed import compression
from lib.distributed.compression import Arrays
from lib.distributed.world import World
from lib.errors import UserError
from lib.model import adapter_files
from lib.model.entropies import completion_token_logps
from lib.model.layout import embedding_of
from lib.model.logps import completion_logps
from lib.model.token_stream import StreamInputs, arrays_of
from lib.system import out_of_memory
from lib.system.out_of_memory import Limit, OutOfMemory
from lib.training.divided_world import Lockstep, is_compiled
from lib.training.losses import SUMS, Figures, Metrics, figures_of, loss_and_sums, means_of
from lib.training.unpaired_losses import UNPAIRED_LOSSES, baseline_of_step, log_ratio_sums
from lib.training.update import TrainedArrays, Tree, update_rule

LOGPS = "logps"  # the array of a checkpoint's file, with the reference's log-probabilities


@dataclass(frozen=True)
class StepRecord:
    """What one step did; means are over all ranks. skipped: a non-finite update was left out."""

    means: Metrics
    figures: dict[str, Any]  # of this rank alone, as its record has them
    skipped: bool
    seconds: float
    tokens: int  # of all ranks, without padding
    compute_seconds: list[float]  # of every rank that took part
    elapsed_seconds: float  # rank 0's, from the step before to this one: the same number on every rank


@dataclass
class RankSums:
    """What one rank brings to the sum; `failure` and `failed_bytes` alone, where its memory ran out."""

    gradients: Tree | None
    sums: mx.array
    failure: str | None = None
    failed_bytes: int = 0


class Step:
    """Takes one optimizer step after the other. A step raises OutOfMemory on all ranks where memory ran out on one of
    them before the sum: weights, optimizer and feedback are as they were, and the same step can be taken again. world:
    the ranks whose gradients are summed; rank: among all ranks, which draw different dropout masks; limit: what MLX may
    hold, looked at after each micro-batch. Raises UserError: no embedding for train.neftune_noise_alpha."""

    def __init__(
        self,
        model: nn.Module,
        optimizer: optim.Optimizer,
        train: TrainSettings,
        world: World,
        sync: SyncSettings | None = None,
        rank: int | None = None,
        limit: Limit | None = None,
    ):
        if train.neftune_noise_alpha is not None and embedding_of(model) is None:
            raise UserError("train.neftune_noise_alpha: the model has no embedding to add noise to; leave it out")
        self.model, self.train, self.world, self.sync = model, train, world, sync or SyncSettings()
        self.rank, self.limit = world.rank if rank is None else rank, limit or Limit()
        self.update = update_rule(model, optimizer, train, isinstance(world, Lockstep))
        self.feedback: Arrays = {}  # what compression left out of this rank's gradients so far, by name
        self.rewards = [0.0, 0.0]  # bco: sum and count of all steps so far
        self.shapes: dict[object, int] = {}  # of the batches so far, with the bytes that a pass sends
        self.last_started = time.perf_counter()
        self.trained = TrainedArrays(model)
        has_dropout = any(isinstance(part, nn.Dropout) and part._p_1 < 1 for part in model.modules())
        self.draws = has_dropout or train.neftune_noise_alpha is not None
        self.is_compiled = is_compiled(train, world)
        self._value_and_grad = nn.value_and_grad(model, self._loss)
        if self.is_compiled:
            state = [model.state, mx.random.state]
            self._value_and_grad = mx.compile(self._value_and_grad, inputs=state, outputs=[mx.random.state])

    def __call__(self, index: int, rate: float, batches: Iterable[MicroBatch]) -> StepRecord:
        """One step. index: its number from 0. rate: the learning rate. `batches` may raise OutOfMemory, too."""
        started, bytes_before = time.perf_counter(), self.world.traffic.bytes_sent
        elapsed = started - self.last_started if self.world.rank == 0 else 0.0
        self.last_started = started
        mx.reset_peak_memory()
        if not self.model.training:
            self.model.train()  # a walk through all modules
        # Masks of dropout that no token's key decides: a resumed run draws the same ones.
        mx.random.seed(int(np.random.SeedSequence([self.train.seed, index, self.rank]).generate_state(1)[0]))
        if self.draws:
            batches = noisy(batches, self.train.neftune_noise_alpha, self.train.seed, index)
        what, part, ratios, baseline, waited_seconds = f"step {index + 1}", None, None, None, 0.0
        if self.train.loss in UNPAIRED_LOSSES:
            part, batches, ratios, waited_seconds = self.log_ratios(what, batches)
            baseline = mx.array(baseline_of_step(self.train, ratios, self.rewards))
        counted: list[Batch] = []
        if part is None or part.failure is None:
            part = self._attempt(what, lambda: self.forward_backward(what, batches, counted, baseline))
        tokens = sum(batch.real_tokens for batch in counted)
        compute_seconds = time.perf_counter() - started - waited_seconds

        (numbers, seconds_of, bytes_of, others), mean, norm, left_out = self.sum(part, compute_seconds, elapsed, tokens)
        sync_seconds = time.perf_counter() - started - compute_seconds
        if failed := {rank: int(held) for rank, held in enumerate(bytes_of) if held}:
            raise OutOfMemory(part.failure or "another rank's", tuple(failed), tuple(failed.values()))
        sums = dict(zip(SUMS, numbers, strict=True))
        # Made of sums that are the same bits on every rank, so all ranks skip or none does.
        skipped = not (math.isfinite(sums["loss"]) and math.isfinite(norm.item()))
        if not skipped and sums["count"]:  # of a streamed batch every row may turn out to be left out
            self.feedback.update(left_out)
            if self.train.loss == "bco" and ratios is not None:
                total, count = ratios.tolist()
                self.rewards[:] = self.rewards[0] + self.train.beta * total, self.rewards[1] + count
            self.update.take(mean, norm, rate)
        own_seconds, seconds = seconds_of[self.world.rank], time.perf_counter() - started
        wait_seconds = min(max(seconds_of) - own_seconds, sync_seconds)
        figures = {
            "tokens": tokens,
            "tokens_per_second": tokens / seconds,
            "padded_tokens": sum(batch.computed_tokens for batch in counted),
            "grad_norm": norm.item(),
            "learning_rate": rate,
            "skipped": skipped,
            "compute_seconds": own_seconds,
            "sync_seconds": sync_seconds - wait_seconds,
            "wait_seconds": wait_seconds,
            "peak_memory_bytes": mx.get_peak_memory(),
            "bytes_sent": self.world.traffic.bytes_sent - bytes_before,
            "traces": len(self.shapes),  # distinct batch shapes so far: each is compiled once
        }
        return StepRecord(means_of(sums, self.train), figures, skipped, seconds, int(others[0]), seconds_of, others[1])

    def forward_backward(
        self, what: str, batches: Iterable[MicroBatch], counted: list[Batch], baseline: mx.array | None
    ) -> tuple[Tree | None, mx.array]:
        """Gradients and SUMS, summed over this rank's micro-batches and evaluated; `counted` gets the batches."""
        gradients: Tree | None = None
        sums = mx.zeros(len(SUMS))
        for batch, reference in self.limit.watching(iter(batches)):
            counted.append(batch)
            with self.world.together(what):
                micro, micro_sums = self.gradients(batch, reference, baseline)
                micro = tree_map(lambda g: g.astype(mx.float32), micro)
                gradients = micro if gradients is None else tree_map(lambda total, g: total + g, gradients, micro)
                del micro  # as large as what is trained
                sums = sums + micro_sums
                mx.async_eval(gradients, sums)  # frees this micro-batch's activations while the next one is prepared
        with self.world.together(what):
            mx.eval(gradients, sums)
        return gradients, sums

    def gradients(self, batch: Batch, reference: np.ndarray | None, baseline: mx.array | None) -> tuple[Tree, mx.array]:
        """A micro-batch's gradients, and SUMS: float32, not evaluated. The metrics are made outside of the compiled
        function: each kernel takes CUDA three seconds on a new machine."""
        traffic, inputs = self.world.traffic, arrays_of(batch.inputs)
        beside = (*arrays_beside(batch, reference), baseline)
        before, arrays = traffic.bytes_sent, self.trained.read()
        (_, figures), gradients = self._value_and_grad(inputs, *beside)
        self.trained.write(arrays)  # a trace leaves its own
        if self.is_compiled:
            mx.async_eval(figures, gradients)  # the device has its work before the metrics are made
            traffic.bytes_sent = before + self.shapes.get(batch.shapes, traffic.bytes_sent - before)
        self.shapes.setdefault(batch.shapes, traffic.bytes_sent - before)
        _, sums = loss_and_sums(self.train, figures, inputs, *beside)
        return gradients, sums

    def _loss(self, inputs: StreamInputs, *beside: mx.array | None) -> tuple[mx.array, Figures]:
        figures = figures_of(self.train, self.model, inputs)
        return loss_and_sums(self.train, figures, inputs, *beside)[0], figures

    def log_ratios(
        self, what: str, batches: Iterable[MicroBatch]
    ) -> tuple[RankSums, list[MicroBatch], mx.array, float]:
        """The micro-batches, the sum and count of a baseline's log ratios, without dropout, and the seconds waited."""
        taken: list[MicroBatch] = []

        def work() -> tuple[None, mx.array]:
            taken.extend(batches)
            sums = log_ratio_sums(self.train.loss, self.model, self.limit.watching(iter(taken)), self.world, what)
            return None, sums

        part, arrived = self._attempt(what, work), time.perf_counter()
        totals = self.world.all_sum(mx.zeros(2) if part.failure else part.sums, "the baseline of a step")
        return part, taken, totals, time.perf_counter() - arrived

    def _attempt(self, what: str, work: Callable[[], tuple[Tree | None, mx.array]]) -> RankSums:
        """The work's gradients and sums; or zeros and a failure where memory ran out, and all is freed. Raises
        OutOfMemory: no other rank waits in the sum, or ranks share one model and cannot synchronise there."""
        before = self.trained.read()
        try:
            return RankSums(*work())
        except (OutOfMemory, RuntimeError, MemoryError) as error:
            if not out_of_memory.is_out_of_memory(error):
                raise
            failure, between_passes = str(error) or "std::bad_alloc", isinstance(error, OutOfMemory)
            all_know = isinstance(error, OutOfMemory) and bool(error.ranks)
        self.trained.write(before)  # a trace's arrays, or the reference's, may be in their place
        out_of_memory.release()
        failed_bytes = max(1, mx.get_peak_memory())
        if self.world.size > 1:
            return RankSums(None, mx.zeros(len(SUMS)), failure, failed_bytes)
        if isinstance(self.world, Lockstep):
            if not between_passes:  # the others are inside of one, where nothing can be sent to them
                raise OutOfMemory(failure)
            if not all_know:
                self.world.give_up(what)
        raise OutOfMemory(failure, (0,), (failed_bytes,))

    def sum(
        self, part: RankSums, compute_seconds: float, elapsed_seconds: float, tokens: int
    ) -> tuple[list[list[float]], Tree, mx.array, Arrays]:
        """Every rank's numbers, summed; mean gradients and their norm; what compression left out of them. The numbers:
        SUMS; every rank's compute seconds; its bytes where memory ran out; all tokens and rank 0's seconds."""
        of_ranks = np.zeros((2, self.world.size))
        of_ranks[:, self.world.rank] = compute_seconds, part.failed_bytes
        beside = mx.array([*of_ranks.flat, tokens, elapsed_seconds], mx.float32)
        # Names are bound anew: a rank has no room for its gradients beside the sum, nor for the sum beside the mean.
        gradients, part.gradients = part.gradients, None
        if gradients is None:  # no row of this step is this rank's, or memory ran out
            gradients = tree_map(lambda p: mx.zeros(p.shape), self.model.trainable_parameters())
        vector = mx.concatenate([part.sums, beside])
        gradients, totals, left_out = compression.sum_gradients(self.world, gradients, vector, self.sync, self.feedback)
        at = SUMS.index("count")  # a slice: with an index CUDA would compile a gathering kernel for it
        gradients, squares = self.update.mean(gradients, totals[at : at + 1].squeeze())
        norm = mx.sqrt(self.world.sum_of_all(squares))
        mx.eval(norm, totals)
        ends = np.cumsum([part.sums.size, self.world.size, self.world.size])
        return [of.tolist() for of in np.split(np.array(totals), ends)], gradients, norm, left_out


def arrays_beside(batch: Batch, reference: np.ndarray | None) -> tuple[mx.array | None, mx.array | None]:
    """What a loss takes beside the log-probabilities, one row for each of the batch: the reference's, and labels."""
    logps = None if reference is None else mx.array(batch.padded(reference))
    return logps, None if batch.labels is None else mx.array(batch.padded(batch.labels))


def noisy(batches: Iterable[MicroBatch], alpha: float | None, seed: int, step: int) -> Iterator[MicroBatch]:
    """Micro-batches with every token's key, for dropout, and the scale of NEFTune's noise, but for the model's sqrt(D).
    Jain et al. 2023, arXiv:2310.05914, algorithm 1: each number of a token's embedding gets alpha / sqrt(L D) times a
    number drawn evenly from [-1, 1], L being the row's longest sequence. The seed, the step, the row and the token's
    index decide it, so not how rows are laid out."""
    for batch, reference in batches:
        rows, numbers = batch.places.T
        seeds = [np.random.SeedSequence([seed, step, int(row)]).generate_state(1)[0] for row in batch.rows]
        keys = np.stack([np.array(seeds, np.uint32)[rows], numbers.astype(np.uint32)], axis=1)
        scales = None
        if alpha is not None:
            scales = np.where(rows >= 0, alpha / np.sqrt(batch.longest[rows]), 0).astype(np.float32)
        yield replace(batch, noise_keys=keys, noise_scales=scales), reference


@dataclass
class StepReference:
    """Gives micro-batches their reference's log-probabilities, when one is taken. Those of a reference that stays are
    stored row by row, in the checkpoints too: training starts at once, and rows that no step takes cost nothing."""

    policy: nn.Module
    model: nn.Module  # the reference; the policy where that is it, before training
    world: World
    arrays: Arrays  # what the policy trains, as the reference has it; {} where the reference is another model
    every: int | None = None  # steps after which it follows the policy, None for never; alpha: how far it goes then
    alpha: float = 1.0
    temperature: float = 1.0
    logps: np.ndarray | None = None  # float32 [n, K], of each row; 0 before they are computed. None: not stored
    is_compiled: bool = False  # whether its pass is traced, once for every shape

    def __post_init__(self) -> None:
        self._trained, self._traced = TrainedArrays(self.policy), set[object]()
        self._pass = mx.compile(self._logps, inputs=[self.model.state]) if self.is_compiled else self._logps

    def __call__(self, batches: Iterable[MicroBatch]) -> Iterator[MicroBatch]:
        for batch, _ in batches:
            if self.logps is None:
                yield batch, self._compute(batch)
                continue
            is_stored = self.logps[batch.rows].any(axis=1, keepdims=True)
            if not is_stored.all():
                self.logps[batch.rows] = np.where(is_stored, self.logps[batch.rows], self._compute(batch))
            yield batch, self.logps[batch.rows]

    def _compute(self, batch: Batch) -> np.ndarray:
        """float32 [examples, K]; of groups [examples, K, C]."""
        parts = [batch] if batch.mismatched is None else [batch, batch.mismatched]
        shapes = {part.shapes for part in parts} if self.is_compiled else {None}
        what = "reference log-probabilities of a batch"
        with self._in_place(walks=not shapes <= self._traced), self.world.workers.together(what):
            logps = [np.array(self._pass(arrays_of(part.inputs))) for part in parts]
        self._traced |= shapes - {None}
        # Each part may be padded to a shape of its own.
        return np.concatenate([of_part[: len(batch.rows)] for of_part in logps], axis=1)

    @contextmanager
    def _in_place(self, walks: bool) -> Iterator[None]:
        """The policy's arrays are the reference's. walks: through all modules; a traced graph needs none of it."""
        now = self._trained.read()
        if self.arrays:
            self._trained.write([self.arrays[name] for name in self._trained.names])
        if walks:
            self.model.eval()
        try:
            yield
        finally:
            self._trained.write(now)
            if walks:
                self.policy.train()

    def _logps(self, inputs: StreamInputs) -> mx.array:
        """Of whole completions, float32 [b, K]; of groups those of each token, [b, K, C]."""
        if "rewards" not in inputs:
            return completion_logps(self.model, inputs)
        return completion_token_logps(self.model, inputs, self.temperature)[0]

    def of_all_ranks(self) -> Arrays:
        """What every rank has stored, for a checkpoint: float32 [ranks, n, K]."""
        assert self.logps is not None
        every = np.zeros((self.world.size, *self.logps.shape), np.float32)
        every[self.world.rank] = self.logps
        return {LOGPS: self.world.all_sum(mx.array(every), "the reference's log-probabilities")}

    def remember(self, stored: Arrays) -> None:
        """Takes up what a checkpoint of as many ranks has; of another world all is computed again."""
        of_ranks = stored.get(LOGPS)
        if self.logps is not None and of_ranks is not None and of_ranks.shape == (self.world.size, *self.logps.shape):
            self.logps = np.array(of_ranks[self.world.rank])

    def follow(self, step: int) -> None:
        """Moves the reference after a step, where it is its turn. TR-DPO, Gorbatovski et al. 2024, arXiv:2404.09656,
        section 3: every tau steps the reference becomes alpha times the policy plus (1 - alpha) times itself, or the
        policy (alpha = 1). Adapters take the policy's: a mean of their factors is no mean of the weights."""
        if self.every is None or step % self.every:
            return
        now = adapter_files.trainable(self.policy)
        if self.alpha < 1:
            now = {name: self.alpha * array + (1 - self.alpha) * self.arrays[name] for name, array in now.items()}
        self.arrays = now
        mx.eval(self.arrays)
