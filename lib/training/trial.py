"""How fast a run will be, on a CPU by a few of the model's blocks, which are tried before it."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Callable
from dataclasses import dataclass

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx_lm.models.cache import make_prompt_cache

from lib.config.settings import Config
from lib.data.batch import collate
from lib.data.dataset import Dataset
from lib.distributed.world import World
from lib.model.layout import block_list_of
from lib.model.quantised import device
from lib.model.token_stream import arrays_of, length_multiple
from lib.plan.cost import Pace, pace_of
from lib.plan.plan import ClusterPlan
from lib.training.losses import figures_of, needs_reference

FEW, MORE = 1, 5  # of its blocks
LOOK_SECONDS, LOOKS = 0.2, 3  # of a micro-batch that few blocks take; how often all is timed
ANSWER_TOKENS = 4


def pace(
    config: Config, world: World, plan: ClusterPlan, model: nn.Module, data: object, step: float | None
) -> Pace | None:
    """How fast a run will be: by a step that was tried (its seconds, with its rows' reference), else by curves; else on
    a CPU by a few blocks, which all ranks try now, elsewhere by matrix products."""
    blocks = block_list_of(model)
    is_known = step or plan.calibrated or plan.divides_model
    if is_known or device() != "cpu" or not isinstance(data, Dataset) or not blocks:
        return pace_of(plan, config.model.method, device(), step, needs_reference(config.train))
    trial = BlockTrial(config, model, blocks, data)
    most, mine = max(plan.micro_batch_sizes[world.rank], default=1), []
    with contextlib.suppress(Exception):  # of a family that counts on all of its blocks: nothing is lost but a figure
        mine = [*trial.row_seconds(most), trial.answer_seconds(config.evaluate.batch_size)]
    ranks = [json.loads(text) for text in world.gather_text(json.dumps(mine), "every rank's blocks")]
    if not all(ranks):
        return pace_of(plan, config.model.method, device(), None, False)
    step = max(share * both for share, (both, _, _) in zip(plan.shares, ranks, strict=True))
    forward, answer = (max(rank[i] for rank in ranks) for i in (1, 2))
    return Pace(step, forward / world.size, answer, "a few blocks that were tried")


@dataclass(frozen=True)
class BlockTrial:
    """A model of which a few blocks are timed: the others take as long."""

    config: Config
    model: nn.Module
    blocks: list[nn.Module]  # the model's own list
    data: Dataset

    def row_seconds(self, most: int) -> tuple[float, float]:
        """Seconds of a row of mean length, in a micro-batch of at most `most`: forward and backward, and forward."""
        size, most = 1, min(most, len(self.data))
        while self._seconds(self._work(size)[0], FEW, looks=1) < LOOK_SECONDS and 2 * size <= most:
            size *= 2
        both, forward = self._work(size)
        self.model.train()
        with_gradients = self._whole(both)
        self.model.eval()
        return with_gradients / size, self._whole(forward) / size

    def _work(self, size: int) -> tuple[Callable[[], object], Callable[[], object]]:
        """Forward and backward through a micro-batch of rows of mean length, and forward alone."""
        near = np.argsort(abs(self.data.lengths - self.data.lengths.mean()), kind="stable")[:size].tolist()
        settings, train, model = self.config.data, self.config.train, self.model
        batch = collate(self.data.examples(near), length_multiple(settings), settings.shared_prompts)
        inputs = arrays_of(batch.inputs)

        def forward() -> mx.array:
            return sum((figures.sum() for figures in figures_of(train, model, inputs)), mx.array(0.0))

        return nn.value_and_grad(model, forward), forward

    def answer_seconds(self, answers: int) -> float:
        """Seconds of one more token of each of so many answers."""
        self.model.eval()
        tokens = mx.zeros((answers, 1), mx.int32)

        def write() -> mx.array:
            cache = make_prompt_cache(self.model)
            for _ in range(ANSWER_TOKENS):
                logits = self.model(tokens, cache=cache)
                mx.eval(logits)
            return logits

        return self._whole(write) / ANSWER_TOKENS

    def _whole(self, work: Callable[[], object]) -> float:
        """Seconds of work that goes through all blocks."""
        few, more = min(FEW, len(self.blocks)), min(MORE, len(self.blocks))
        seconds = self._seconds(work, few, LOOKS)
        a_block = (self._seconds(work, more, LOOKS) - seconds) / (more - few) if more > few else 0.0
        return seconds + max(a_block, 0.0) * (len(self.blocks) - few)

    def _seconds(self, work: Callable[[], object], count: int, looks: int) -> float:
        """The fastest of some looks at work that goes through so many blocks."""
        every = list(self.blocks)
        self.blocks[:] = every[:count]
        try:
            times = []
            for _ in range(looks):
                began = time.perf_counter()
                mx.eval(work())
                times.append(time.perf_counter() - began)
        finally:
            self.blocks[:] = every
        return min(times)
