"""Log-probabilities of every completion in a dataset, by all ranks together; how batches for a model are laid out."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from lib.config.settings import Config, DataSettings, ModelSettings
from lib.data.batch import collate
from lib.data.dataset import Dataset
from lib.data.order import micro_batches, split
from lib.distributed.world import World
from lib.errors import UserError
from lib.model.layout import layout_of
from lib.model.logps import completion_logps
from lib.model.stream_trial import cannot_share_prompts
from lib.model.token_stream import arrays_of, length_multiple
from lib.system import out_of_memory
from lib.training.divided_world import Lockstep

MIXUP = 0.6  # how far a reference that follows goes, by default (arXiv:2404.09656, table 1)
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
    multiple, share, _ = layout(model, settings.data, world)  # all ranks know the same of it
    world, batch_size = world.workers, settings.evaluate.batch_size
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
    why_not: str  # "" if it does; where data.shared_prompts=true


def layout(model: nn.Module, settings: DataSettings, world: World) -> Layout:
    """How batches for a model are laid out; UserError where it cannot attend to model.attention_window tokens alone."""
    of_model = layout_of(model)
    window, why_not = of_model.attention_window, of_model.stream_fault
    if why_not is None:
        with world.workers.together("a look at how the model takes prompts"):
            why_not = cannot_share_prompts(model) or ""
        if world.divides_model:  # ranks may hold unlike parts of the model; any reason is larger than none
            why_not = max(world.gather_text(why_not, "how the model takes prompts"))
        of_model.stream_fault = why_not
    if why_not and window is not None:
        raise UserError(f"model.attention_window={window} is not for this model: {why_not}; leave it out")
    own = mx.array([length_multiple(settings), int(settings.shared_prompts and not why_not)])
    multiple, share = world.workers.decide(own).tolist()
    return Layout(multiple, bool(share), why_not if settings.shared_prompts else "")


def is_in_steps(settings: ModelSettings, world: World) -> bool:
    """Whether each step computes the reference: that takes no second copy of all weights, and holds no rank up."""
    return settings.reference == "initial" and settings.method != "full" and not world.divides_model
