"""How fast a run will be: by a run of three steps, or on a CPU by a few of the model's blocks, which real rows try
before it; and the micro-batches that make it fastest there."""

from __future__ import annotations

import contextlib
import io
import json
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx_lm.models.cache import make_prompt_cache

from lib.config.settings import Config
from lib.data.batch import collate_trained
from lib.data.batch_shapes import BatchShape, batch_shape_of, need_of, real_tokens
from lib.data.dataset import Dataset, Example
from lib.data.order import epoch_order, micro_batches, split
from lib.distributed.world import World
from lib.model.layout import block_list_of, layout_of
from lib.model.quantised import device
from lib.model.stream_trial import cannot_share_prompts
from lib.model.token_stream import StreamInputs, arrays_of, hidden_states, length_multiple
from lib.plan.plan import ClusterPlan
from lib.plan.time_and_cost import Pace, pace_of
from lib.system.records import read_records
from lib.training.losses import figures_of, needs_reference
from lib.training.reference_model import is_in_steps
from lib.training.run_inputs import Inputs
from lib.training.unpaired_losses import UNPAIRED_LOSSES, needs_mismatched

FEW, MORE = 1, 4  # of its blocks
LOOK_SECONDS, LOOKS = 1.0, 6  # that looks at a micro-batch may take; how many there are at most
QUANTILES = 0.5, 0.97  # of the lengths of rows that are tried
CUT = 8  # tokens of a prompt, and of a completion, in a very short micro-batch
LOOKED_ROWS = 1024  # of the run's, for the micro-batches of each size
WORTH = 1.1  # times as fast: then other micro-batches are taken
ANSWER_TOKENS = 8
BASIS = "a few blocks that were tried"


class Seconds(NamedTuple):
    """What a rank takes."""

    step: list[float]  # forward and backward of a micro-batch, for each of `figures`
    forward: float  # of them, for a forward pass alone
    answer: float  # one more token of each of a batch of answers
    trial: float  # in which that was measured


def figures(shape: BatchShape, blocks: int) -> list[float]:
    """What a micro-batch's seconds are in proportion to: blocks, their tokens and attention's scores, the head's."""
    return [blocks, blocks * shape.tokens, blocks * shape.scores, shape.scored]


def pace(
    config: Config, world: World, plan: ClusterPlan, model: nn.Module, inputs: Inputs, tried: float | None, resume: bool
) -> tuple[Pace | None, ClusterPlan]:
    """How fast a run will be: by curves; else on a CPU by a few blocks, which all ranks try now, elsewhere by matrix
    products; and by a step that was tried (its seconds, with its rows' reference). And the plan, in the micro-batches
    that those blocks say are fastest, where timings may decide something and nothing is resumed."""
    blocks, data, own = block_list_of(model), inputs.data, list[object]()
    in_steps = needs_reference(config.train) and is_in_steps(config.model, world)
    expected = pace_of(plan, config.model.method, device(), tried, in_steps)
    if plan.calibrated or plan.divides_model or not isinstance(data, Dataset) or not blocks:
        return expected, plan
    trial = BlockTrial(config, model, blocks, data)
    if device() == "cpu":
        with contextlib.suppress(Exception):  # of a family that counts on all of its blocks: only a figure is lost
            own = [*trial.seconds(max(plan.micro_batch_sizes[world.rank], default=1))]
    every = world.gather_values(own, "every rank's blocks")
    if not all(every):
        return expected, plan
    ranks = [Seconds(*of_rank) for of_rank in every]
    if config.plan.replan and config.plan.micro_batch_sizes is None and not resume:
        plan = trial.fastest(plan, ranks)
        world.require_equal("plan", json.dumps(plan.decisions()))
    return trial.pace(plan, ranks, inputs.valid, tried, in_steps), plan


@dataclass(frozen=True)
class BlockTrial:
    """A model of which a few blocks are timed: the others take as long."""

    config: Config
    model: nn.Module
    blocks: list[nn.Module]  # the model's own list
    data: Dataset

    # ---- What is timed

    def seconds(self, most: int) -> Seconds:
        """What this rank takes, by micro-batches of at most `most` rows: a very short one, usual and long ones."""
        cannot_share_prompts(self.model)  # notes it
        began, ascending = time.perf_counter(), np.argsort(self.lengths, kind="stable")
        middle, blocks, forward = len(ascending) // 2, min(MORE, len(self.blocks)), 1.0
        features, times = list[list[float]](), list[float]()
        for quantile in (None, *QUANTILES):
            at, size = int((quantile or 0.5) * (len(ascending) - 1)), 1
            if quantile is not None:  # as many rows as the first look allows, a token at a time
                a_row = times[0] / features[0][1] * self.lengths[ascending[at]]
                size = max(1, min(most, len(ascending), int(LOOK_SECONDS / a_row)))
            start = min(at, len(ascending) - size)
            shape, inputs = self._batch(ascending[start : start + size].tolist(), quantile is None)
            self.model.train()
            times.append(self._timed(nn.value_and_grad(self.model, partial(self._states, inputs)), blocks) / blocks)
            features.append(figures(shape, 1)[:-1])
            if quantile == QUANTILES[0]:
                self.model.eval()
                forward = min(1.0, self._timed(partial(self._states, inputs), blocks) / blocks / times[-1])
        a_block = non_negative_fit(np.array(features), np.array(times))
        shape, inputs = self._batch([int(ascending[middle])], False)
        self.model.train()
        loss = lambda: sum(each.sum() for each in figures_of(self.config.train, self.model, inputs))  # noqa: E731
        head = self._timed(nn.value_and_grad(self.model, loss), FEW)
        head -= FEW * float(np.dot(a_block, figures(shape, 1)[:-1]))
        answer = self.answer_seconds()
        return Seconds([*a_block, max(head, 0.0) / shape.scored], forward, answer, time.perf_counter() - began)

    def _states(self, inputs: StreamInputs) -> mx.array:
        return hidden_states(self.model, inputs).astype(mx.float32).sum()

    def _batch(self, rows: list[int], is_cut: bool) -> tuple[BatchShape, StreamInputs]:
        """A micro-batch's shape and inputs. is_cut: of the rows' first few tokens."""
        examples, layout = self.data.examples(rows), (length_multiple(self.config.data), self.shares_prompts)
        if is_cut:
            examples = [Example.of(e.row, [part[:CUT] for part in e.stored], e.label) for e in examples]
        batch = collate_trained(examples, *layout, self.data.has_mismatched)
        pieces = np.array([[*map(len, e.stored)] for e in examples])[:, : 1 + batch.mask.shape[1]]
        prompts, completions = pieces[:, 0], pieces[:, 1:]
        return self.shape_of(prompts, prompts[:, None] + completions - 1, completions), arrays_of(batch.inputs)

    def answer_seconds(self) -> float:
        """Seconds of one more token of each answer of a batch."""
        self.model.eval()
        evaluate = self.config.evaluate
        tokens = mx.zeros((evaluate.batch_size if evaluate.answers else max(evaluate.samples, 1), 1), mx.int32)

        def write() -> mx.array:
            cache = make_prompt_cache(self.model)
            for _ in range(ANSWER_TOKENS):
                logits = self.model(tokens, cache=cache)
                mx.eval(logits)
            return logits

        few, more = min(FEW, len(self.blocks)), min(MORE, len(self.blocks))
        seconds = self._timed(write, few)
        a_block = max(self._timed(write, more) - seconds, 0.0) / max(more - few, 1)
        return (seconds + a_block * (len(self.blocks) - few)) / ANSWER_TOKENS

    def _timed(self, work: Callable[[], object], count: int) -> float:
        """Seconds of work that goes through so many blocks: the fastest of some looks."""
        every = list(self.blocks)
        self.blocks[:] = every[:count]
        try:
            times = list[float]()
            while len(times) < LOOKS and sum(times) < LOOK_SECONDS:
                began = time.perf_counter()
                mx.eval(work())
                times.append(time.perf_counter() - began)
        finally:
            self.blocks[:] = every
        return min(times)

    # ---- What follows for the run

    @property
    def lengths(self) -> np.ndarray:
        """int64 [n]: what rows are sorted by."""
        return real_tokens(*self.data.trained[:2]) if self.config.data.shared_prompts else self.data.lengths

    @property
    def shares_prompts(self) -> bool:
        return self.config.data.shared_prompts and not layout_of(self.model).stream_fault

    def shape_of(self, prompts: np.ndarray, seen: np.ndarray, scored: np.ndarray) -> BatchShape:
        """Of a micro-batch; arguments as need_of's."""
        need = need_of(prompts, seen, scored)[None]
        return batch_shape_of(need, seen.shape[1], length_multiple(self.config.data), self.shares_prompts)

    def step_seconds(self, data: Dataset, parts: Sequence[np.ndarray], size: int, rank: Seconds) -> np.ndarray:
        """Forward and backward seconds of each step, float64 [parts]: its rows, ascending, `size` at a time."""
        sizes, blocks = data.trained, len(self.blocks)

        def seconds(rows: np.ndarray) -> float:
            return float(np.dot(figures(self.shape_of(*(of_all[rows] for of_all in sizes)), blocks), rank.step))

        return np.array([sum(map(seconds, micro_batches(part, size))) for part in parts])

    def fastest(self, plan: ClusterPlan, ranks: Sequence[Seconds]) -> ClusterPlan:
        """The plan in the micro-batches that take its rows least time, where they are worth a change."""
        steps, before = self.steps(plan), [max(rank.micro_batch_sizes, default=1) for rank in plan.ranks]
        sizes = list(before)
        for rank, most in enumerate(before):
            tried = sorted({most, *(2**i for i in range(most.bit_length()))})
            each = [self.step_seconds(self.data, [of[rank] for of in steps], s, ranks[rank]).sum() for s in tried]
            if each[-1] > WORTH * min(each):
                sizes[rank] = tried[int(np.argmin(each))]
        if sizes == before:
            return plan
        shown = ", ".join(map(str, dict.fromkeys(sizes)))
        return plan.in_smaller(sizes, f"{plan.reason}; in micro-batches of {shown}, the fastest by {BASIS}")

    def steps(self, plan: ClusterPlan) -> list[list[np.ndarray]]:
        """Some of the run's steps, evenly taken: rows of each rank, ascending."""
        batches = self.batches[: self.config.steps_over(len(self.data))]
        looked = batches[:: -(-len(batches) * self.config.train.global_batch_size // LOOKED_ROWS)]
        return [split(rows, self.lengths, plan.shares) for rows in looked]

    @property
    def batches(self) -> list[np.ndarray]:
        """Rows of the steps of the first epoch."""
        train, data = self.config.train, self.data
        order = epoch_order(data.lengths, train.seed, 0, train.global_batch_size, segments=data.segments)
        return micro_batches(order, train.global_batch_size)

    def pace(
        self, plan: ClusterPlan, ranks: Sequence[Seconds], valid: Dataset | None, tried: float | None, in_steps: bool
    ) -> Pace:
        """A step takes as long as its slowest rank, or as the mean of a trial's second and third (`tried`). in_steps:
        whether steps compute the reference of rows that are new to it."""
        train, evaluate, epoch = self.config.train, self.config.evaluate, self.batches
        sizes = [max(rank.micro_batch_sizes, default=1) for rank in plan.ranks]
        forward, passes = max(rank.forward for rank in ranks), 1 + needs_mismatched(train.loss)

        def seconds(steps: Sequence[Sequence[np.ndarray]]) -> np.ndarray:
            each = zip(zip(*steps, strict=True), sizes, ranks, strict=True)
            return np.max([self.step_seconds(self.data, *of_rank) for of_rank in each], axis=0)

        steps = self.steps(plan)
        once, extra = seconds(steps), 1 + forward * (train.loss in UNPAIRED_LOSSES)  # a baseline's forward pass
        row, held_out = forward * passes * float(once.sum()) / sum(len(r) for parts in steps for r in parts), 0.0
        scale, basis = 1.0, BASIS
        if valid is not None:
            parts = micro_batches(np.argsort(valid.lengths, kind="stable"), evaluate.batch_size)
            parts = parts[:: -(-len(valid) // LOOKED_ROWS)]
            each = [self.step_seconds(valid, parts, evaluate.batch_size, rank).sum() for rank in ranks]
            held_out = forward * passes * float(np.mean(each)) / len(each) / sum(map(len, parts))
        if tried is not None:
            again = [split(epoch[i % len(epoch)], self.lengths, plan.shares) for i in (1, 2)]
            are_new = np.array([1, 2]) < len(epoch)
            scale = tried / max(float((seconds(again) * (extra + are_new * in_steps * forward * passes)).mean()), 1e-9)
            basis = "a step that was tried"
        answer, trial = (max(seconds) for seconds in list(zip(*ranks, strict=True))[2:])
        return Pace(scale * extra * float(once.mean()), scale * row, scale * held_out, answer, basis, trial)


def non_negative_fit(features: np.ndarray, seconds: np.ndarray) -> list[float]:
    """Non-negative least squares, errors in proportion: float64 [f]. features: [n, f]; seconds: [n]."""
    scaled, fit = features / seconds[:, None], np.zeros(features.shape[1])
    unit = np.maximum(np.abs(scaled).max(axis=0), 1e-300)
    left = list(range(len(fit)))
    while left:
        fit[left] = np.linalg.lstsq((scaled / unit)[:, left], np.ones(len(seconds)), rcond=None)[0]
        if fit.min() >= 0:
            break
        lowest = left[int(np.argmin(fit[left]))]
        left.remove(lowest)
        fit[lowest] = 0.0
    return list(fit / unit)


def step_seconds(world: World, train: Callable[[str], None]) -> float:
    """Seconds of a step in a run of three: the slowest rank's mean without the first. train: trains a trial
    (lib/config/load.py) in a folder, which is deleted."""
    folder = world.broadcast_text(tempfile.mkdtemp(prefix="tandem-trial-") if world.rank == 0 else "")
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            train(folder)
        records = read_records(Path(folder, "trial", "logs", f"rank-{world.rank:03d}.jsonl"))
        steps: list[Any] = [record["step_seconds"] for record in records if record["kind"] == "step"]
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return float(max(world.gather_values(statistics.fmean(steps[1:] or steps), "a trial's steps")))
