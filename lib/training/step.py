"""One optimizer step: forward and backward, sum over ranks, one division, clip, update.

Every quantity travels as a sum beside a count, so that unequal ranks and ragged micro-batches weigh what they hold.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers as optim
import numpy as np
from mlx.utils import tree_flatten, tree_map

from lib.config.settings import SyncSettings, TrainSettings
from lib.data.batch import Batch
from lib.data.batch_shapes import TraceCost
from lib.distributed import compression
from lib.distributed.world import World
from lib.errors import UserError
from lib.model.layout import embedding_of
from lib.model.logps import completion_logps
from lib.model.quantised import device
from lib.model.token_stream import StreamInputs, arrays_of
from lib.system import out_of_memory
from lib.system.hardware import Device
from lib.system.out_of_memory import Limit, OutOfMemory
from lib.training import losses
from lib.training.divided_world import InStages, Lockstep
from lib.training.losses import SUMS, Figures, Metrics, figures_of, loss_and_sums, means_of
from lib.training.optimizers import TrainedArrays, Tree, compiles, update_rule

MicroBatch = tuple[Batch, np.ndarray | None]  # with its reference's log-probabilities: [b, K]; of groups [b, K, C]


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
        self.feedback: compression.Arrays = {}  # what compression left out of this rank's gradients so far, by name
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
        if self.train.loss in losses.UNPAIRED_LOSSES:
            part, batches, ratios, waited_seconds = self.log_ratios(what, batches)
            baseline = mx.array(losses.baseline_of_step(self.train, ratios, self.rewards))
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
        column = int(losses.needs_mismatched(self.train.loss))

        def work() -> tuple[None, mx.array]:
            taken.extend(batches)
            sums = mx.zeros(2)
            self.model.eval()
            for batch, reference in self.limit.watching(iter(taken)):
                scored = batch.mismatched if column else batch
                assert scored is not None and reference is not None
                with self.world.together(what):
                    policy = completion_logps(self.model, arrays_of(scored.inputs))[: len(batch.rows), 0]
                    ratios = policy - mx.array(reference[:, column])
                    sums = sums + mx.stack([ratios.sum(), mx.array(float(len(batch.rows)))])
                    mx.eval(sums)  # one micro-batch's activations at a time
            self.model.train()
            return None, sums

        part, arrived = self._attempt(what, work), time.perf_counter()
        sums = part.sums if part.failure is None else mx.zeros(2)
        totals = self.world.all_sum(sums, "the baseline of a step")
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
    ) -> tuple[list[list[float]], Tree, mx.array, compression.Arrays]:
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


# Orders of magnitude, by device: FLOP/s in matrix products, seconds to launch a block's kernels, both ways.
FLOPS: dict[Device, float] = {"cpu": 1e11, "metal": 1e13, "cuda": 1.5e14}
LAUNCH_SECONDS: dict[Device, float] = {"cpu": 0.0, "metal": 1e-3, "cuda": 2.2e-3}
TRACE_SECONDS = 0.025


def trace_cost(model: nn.Module) -> TraceCost:
    """What a further shape of micro-batches costs this model on this device, in tokens of forward and backward."""
    arrays = [array for _, array in tree_flatten(model.parameters())]
    parameters = sum(array.size * (8 if array.dtype == mx.uint32 else 1) for array in arrays)
    blocks, tokens_per_second = len(getattr(model, "layers", ())) or 1, FLOPS[device()] / (6 * parameters)
    return TraceCost(
        tokens=TRACE_SECONDS * blocks * tokens_per_second,
        least_tokens=LAUNCH_SECONDS[device()] * blocks * tokens_per_second,
    )


def is_compiled(train: TrainSettings, world: World) -> bool:
    """Whether the step is traced once for every shape of its batches. Never where ranks have unequal parts of every
    block: their graphs differ, and so might the order of collectives; nor, by default, where a sum leaves the device,
    as over a Mac's ring, where it was not tried."""
    if isinstance(world, Lockstep) and not isinstance(world, InStages):  # within a stage there are no sums
        division = world.ranks.division
        if division is None or not division.is_even or not (train.compile or world.backend == "nccl"):
            return False
    return compiles(train)
