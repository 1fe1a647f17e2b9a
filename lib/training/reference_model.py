"""Log-probabilities of every completion in a dataset, by all ranks together, and the reference's of every step's rows.

A reference that stays is computed in the step that trains a row first, and stored row by row, in the checkpoints too:
training starts at once, and rows that no step takes cost nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import NamedTuple

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from lib.config.settings import Config, DataSettings, ModelSettings
from lib.data.batch import Batch, collate
from lib.data.dataset import Dataset
from lib.data.order import micro_batches, split
from lib.distributed.compression import Arrays
from lib.distributed.world import World
from lib.errors import UserError
from lib.model import adapter_files
from lib.model.layout import layout_of
from lib.model.logps import completion_logps, completion_token_logps
from lib.model.token_stream import StreamInputs, arrays_of, cannot_share_prompts, length_multiple
from lib.system import out_of_memory
from lib.training.divided_world import Lockstep
from lib.training.optimizers import TrainedArrays
from lib.training.step import MicroBatch

MIXUP = 0.6  # how far a reference that follows goes, by default (arXiv:2404.09656, table 1)
LOGPS = "logps"  # the array of a checkpoint's file
BLOCK_BATCHES = 16  # between two sums over ranks: a slow rank is waited for often, so no wait grows long


def dataset_logps(
    model: nn.Module,
    dataset: Dataset,
    world: World,
    shares: Sequence[int],
    settings: Config,
    progress: Callable[[int], None] = lambda done: None,
    rows_wanted: np.ndarray | None = None,
) -> np.ndarray:
    """log pi(completion | prompt) of every completion, summed over its tokens: float32 [N, K], the same on every rank.
    shares: relative amounts of work of the world's workers. progress: called with the number of examples done.
    rows_wanted: int64, distinct; None for all. Rows of batches without a wanted one are 0."""
    model.eval()
    world, batch_size = world.workers, settings.evaluate.batch_size
    multiple, share, _ = layout(model, settings.data, world)
    order = np.argsort(dataset.lengths, kind="stable")
    is_wanted = np.isin(np.arange(len(dataset)), order if rows_wanted is None else rows_wanted)
    logps = np.zeros((2, len(dataset), dataset.completions_per_example), np.float32)  # this rank's, and all ranks'
    mx.eval(model.state)
    done = 0

    def logps_of(rows: Sequence[int]) -> np.ndarray:
        batch = collate([dataset[row] for row in rows], multiple, share)
        with world.together("log-probabilities of a batch"):
            return np.array(completion_logps(model, arrays_of(batch.inputs)))

    for block in micro_batches(order, batch_size * world.size * BLOCK_BATCHES):
        for rows in micro_batches(split(block, dataset.lengths, shares)[world.rank], batch_size):
            if is_wanted[rows].any():  # batches stay as they are: other rows give a value other roundings
                pieces = out_of_memory.in_pieces(rows.tolist(), logps_of, not isinstance(world, Lockstep))
                logps[0, rows] = np.concatenate([of_piece for _, of_piece in pieces])
        logps[1, block] = np.array(world.all_sum(mx.array(logps[0, block]), "log-probabilities of a block of rows"))
        done += len(block)
        progress(done)
    return logps[1]


class Layout(NamedTuple):
    """How batches are laid out."""

    length_multiple: int  # that lengths are padded to
    shares_prompts: bool  # whether a prompt runs once for all its completions
    why_not: str | None  # where data.shared_prompts=true


def layout(model: nn.Module, settings: DataSettings, world: World) -> Layout:
    """How batches for a model are laid out; UserError where it cannot attend to model.attention_window tokens alone."""
    window, is_divided = layout_of(model).attention_window, world.divides_model
    with world.workers.together("a look at how the model takes prompts"):
        fault = None if is_divided else layout_of(model).stream_fault  # it may be from before it was divided
        why_not = cannot_share_prompts(model) if fault is None else fault or None
    if is_divided:  # ranks may hold unlike parts of the model
        why_not = next(filter(None, world.gather_text(why_not or "", "how the model takes prompts")), None)
    if why_not and window is not None:
        raise UserError(f"model.attention_window={window} is not for this model: {why_not}; leave it out")
    own = mx.array([length_multiple(settings), int(settings.shared_prompts and why_not is None)])
    multiple, share = world.workers.decide(own).tolist()
    return Layout(multiple, bool(share), why_not if settings.shared_prompts else None)


def is_in_steps(settings: ModelSettings, world: World) -> bool:
    """Whether each step computes the reference: that takes no second copy of all weights, and holds no rank up."""
    return settings.reference == "initial" and settings.method != "full" and not world.divides_model


@dataclass
class StepReference:
    """Gives micro-batches their reference's log-probabilities, one when it is taken."""

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
