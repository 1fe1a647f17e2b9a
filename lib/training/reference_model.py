"""Log-probabilities of every completion in a dataset, by all ranks together; the reference's are kept on disk."""

from __future__ import annotations

import hashlib
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, Protocol

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx.utils import tree_unflatten

from lib.config.settings import Config, DataSettings
from lib.data.batch import collate
from lib.data.dataset import Dataset
from lib.data.order import micro_batches, split
from lib.data.prompts import Prompts
from lib.data.streaming import StreamedDataset
from lib.distributed.compression import Arrays
from lib.distributed.world import World
from lib.errors import UserError
from lib.model import adapter_files, load
from lib.model.layout import layout_of
from lib.model.logps import completion_logps, completion_token_logps
from lib.model.token_stream import StreamInputs, arrays_of, cannot_share_prompts, length_multiple
from lib.system import files, out_of_memory
from lib.training import divided_world, losses
from lib.training.divided_world import Lockstep
from lib.training.inputs import Inputs
from lib.training.step import MicroBatch

MIXUP = 0.6  # how far a reference that follows goes, by default (arXiv:2404.09656, table 1)
BLOCK_BATCHES = 16  # between two sums over ranks: a slow rank is waited for often, so no wait grows long


def dataset_logps(
    model: nn.Module,
    dataset: Dataset,
    world: World,
    shares: Sequence[int],
    settings: Config,
    progress: Callable[[int], None] = lambda done: None,
) -> np.ndarray:
    """log pi(completion | prompt) of every completion, summed over its tokens.

    Args:
        shares: relative amounts of work of the world's workers.
        settings: how lengths are padded, whether prompts may run once for all their completions, and how many examples
            a forward pass has at most.
        progress: called with the number of examples done.

    Returns:
        float32 [N, K] in the dataset's order, the same on every rank.
    """
    model.eval()
    world, batch_size = world.workers, settings.evaluate.batch_size
    multiple, share, _ = layout(model, settings.data, world)
    order = np.argsort(dataset.lengths, kind="stable")
    logps = np.zeros((len(dataset), dataset.completions_per_example), np.float32)
    can_halve = not isinstance(world, Lockstep)
    mx.eval(model.state)

    def logps_of(rows: Sequence[int]) -> np.ndarray:
        batch = collate([dataset[row] for row in rows], multiple, share)
        with world.together("log-probabilities of a batch"):
            return np.array(completion_logps(model, arrays_of(batch.inputs)))

    block_size = batch_size * world.size * BLOCK_BATCHES
    for start in range(0, len(order), block_size):
        block = order[start : start + block_size]
        mine = np.zeros_like(logps[block])
        place = {row: i for i, row in enumerate(block.tolist())}
        for rows in micro_batches(split(block, dataset.lengths, shares)[world.rank], batch_size):
            own = out_of_memory.in_pieces(rows.tolist(), logps_of, can_halve)
            mine[[place[row] for row in rows.tolist()]] = np.concatenate([of_piece for _, of_piece in own])
        logps[block] = np.array(world.all_sum(mx.array(mine), "log-probabilities of a block of rows"))
        progress(min(start + block_size, len(order)))
    return logps


class Layout(NamedTuple):
    """How batches are laid out."""

    length_multiple: int  # that lengths are padded to
    shares_prompts: bool  # whether a prompt runs once for all its completions
    why_not: str | None  # where it was asked to


def layout(model: nn.Module, settings: DataSettings, world: World) -> Layout:
    """How batches for a model are laid out.

    Raises:
        UserError: the model cannot attend to model.attention_window tokens alone.
    """
    why_not, window, is_divided = None, layout_of(model).attention_window, world.divides_model
    if settings.shared_prompts or window is not None:
        with world.workers.together("a look at how the model takes prompts"):
            known = None if is_divided else layout_of(model).stream_fault  # it may be from before it was divided
            why_not = cannot_share_prompts(model) if known is None else known or None
    if is_divided:  # ranks may hold unlike parts of the model
        why_not = next(filter(None, world.gather_text(why_not or "", "how the model takes prompts")), None)
    if why_not and window is not None:
        raise UserError(f"model.attention_window={window} is not for this model: {why_not}; leave it out")
    own = mx.array([length_multiple(settings), int(settings.shared_prompts and why_not is None)])
    multiple, share = world.workers.decide(own).tolist()
    return Layout(multiple, bool(share), why_not)


class Counting(Protocol):
    """`RunConsole.counting`, for a pass that has to be made."""

    def __call__(self, what: str, total: int) -> AbstractContextManager[Callable[[int], None]]: ...


class References(NamedTuple):
    """What a run compares the policy with."""

    data: np.ndarray | None  # float32 [n, K], of the training rows; None where the loss has none, or it comes later
    valid: np.ndarray | None  # of the held-out rows


def of_run(
    settings: Config, policy: nn.Module, inputs: Inputs, world: World, shares: Sequence[int], counting: Counting
) -> References:
    """The reference of a run's rows, asked once and kept on disk; `asked` is what asks it in each step.

    policy: before training, which is the reference where no other is named.
    """
    is_late = settings.reference_sync_steps is not None or settings.train.loss == "grpo"
    data, valid = (
        None
        if dataset is None or isinstance(dataset, StreamedDataset | Prompts)
        else reference_logps(settings, policy, dataset, world, shares, counting)
        for dataset in (None if is_late else inputs.data, inputs.valid)
    )
    return References(data, valid)


def reference_logps(
    settings: Config, policy: nn.Module, dataset: Dataset, world: World, shares: Sequence[int], counting: Counting
) -> np.ndarray | None:
    """The reference's log-probabilities of a data set, asked once and kept on disk; None for a loss that has none.

    Returns:
        float32 [N, K], the same on every rank.
    """
    if not losses.needs_reference(settings.train):
        return None
    key = cache_key(load.reference_fingerprint(settings.model, settings.train.seed), dataset)
    folder = Path(settings.run.dir) / ".reference"
    logps = cached_logps(folder, key, dataset, world)
    is_new = logps is None
    if logps is None:
        named = settings.model.reference != "initial"
        model = divided_world.load_reference(settings, world) if named else policy
        with counting(f"reference log-probabilities of {Path(dataset.path).name}", len(dataset)) as progress:
            logps = dataset_logps(model, dataset, world, shares, settings, progress)
    with world.agreeing("keeping the reference's log-probabilities"):
        if is_new or not (folder / f"{key}.npy").exists():  # on every disk: the first host may be the one that is lost
            keep_logps(folder, key, logps)
    return logps


@dataclass
class AskedReference:
    """Gives micro-batches their reference, one when it is taken: it moves, or a whole pass would be too long.

    Args:
        model: the reference; the policy where that is it, before training.
        arrays: what the policy trains, as the reference has it; {} where the reference is another model.
        every: steps after which the reference follows the policy; None for never.
        alpha: how far it goes then.
        temperature: of the groups' completions.
    """

    policy: nn.Module
    model: nn.Module
    world: World
    arrays: Arrays
    every: int | None = None
    alpha: float = 1.0
    temperature: float = 1.0

    def __call__(self, batches: Iterable[MicroBatch]) -> Iterator[MicroBatch]:
        for batch, _ in batches:
            with self.in_place() as model, self.world.workers.together("reference log-probabilities of a batch"):
                parts = [batch] if batch.mismatched is None else [batch, batch.mismatched]
                logps = [np.array(self._logps(model, arrays_of(part.inputs))) for part in parts]
            # Each part may be padded to a shape of its own.
            yield batch, np.concatenate([one[: len(batch.rows)] for one in logps], axis=1)

    @contextmanager
    def in_place(self) -> Iterator[nn.Module]:
        """The reference as a model, in the place of the policy where one model is both."""
        now = {name: array for name, array in adapter_files.trainable(self.policy).items() if name in self.arrays}
        self.model.update(tree_unflatten(list(self.arrays.items())))
        self.model.eval()
        try:
            yield self.model
        finally:
            self.model.update(tree_unflatten(list(now.items())))
            self.policy.train()

    def _logps(self, model: nn.Module, inputs: StreamInputs) -> mx.array:
        """Of whole completions, float32 [b, K]; of groups those of each token, [b, K, C]."""
        if "rewards" not in inputs:
            return completion_logps(model, inputs)
        return completion_token_logps(model, inputs, self.temperature)[0]

    def follow(self, step: int) -> None:
        """Moves the reference after a step, where it is its turn.

        TR-DPO, Gorbatovski et al. 2024, arXiv:2404.09656, section 3: every tau steps the reference becomes alpha times
        the policy plus (1 - alpha) times itself, or the policy (alpha = 1). Adapters take the policy's: a mean of their
        factors is no mean of the weights.
        """
        if self.every is None or step % self.every:
            return
        now = adapter_files.trainable(self.policy)
        if self.alpha < 1:
            now = {name: self.alpha * array + (1 - self.alpha) * self.arrays[name] for name, array in now.items()}
        self.arrays = now
        mx.eval(self.arrays)


def asked(
    settings: Config, policy: nn.Module, data: Dataset | StreamedDataset | Prompts, world: World, batches: Layout
) -> AskedReference | None:
    """The reference that is asked in each step; None where it is known before, or the loss has none.

    policy: before training. batches: how those of its steps are laid out.

    Raises:
        UserError: another reference cannot take batches that are laid out so.
    """
    named, train = settings.model.reference != "initial", settings.train
    is_late = settings.reference_sync_steps or data.is_estimated or train.loss == "grpo"
    if not losses.needs_reference(train) or not is_late:
        return None
    reference = divided_world.load_reference(settings, world) if named else policy
    if named and batches.shares_prompts and (why_not := layout(reference, settings.data, world).why_not):
        raise UserError(f"model.reference={settings.model.reference}: {why_not}; set data.shared_prompts=false")
    reference.eval()
    mx.eval(reference.state)
    start = {} if named else adapter_files.trainable(policy)
    alpha = train.reference_mixup_alpha or (MIXUP if settings.model.method == "full" else 1.0)
    return AskedReference(policy, reference, world, start, settings.reference_sync_steps, alpha, train.temperature)


def cache_key(model_fingerprint: str, dataset: Dataset) -> str:
    """Names a reference pass: the model's files, and the tokens it saw (tokenizer, template, data, truncation)."""
    return hashlib.sha256(f"{model_fingerprint} {dataset.digest}".encode()).hexdigest()[:32]


def cached_logps(folder: Path, key: str, dataset: Dataset, world: World) -> np.ndarray | None:
    """An earlier pass's result as rank 0 has it on disk, on every rank; None where there is none, or it is damaged."""
    shape = len(dataset), dataset.completions_per_example
    kept: np.ndarray | None = None
    if world.rank == 0:
        try:
            with (folder / f"{key}.npy").open("rb") as file:
                stored = np.load(file, allow_pickle=False)
                is_whole = file.read() == _checksum(stored)
            fits = stored.shape == shape and stored.dtype == np.float32 and np.isfinite(stored).all()
            kept = stored if is_whole and fits else None
        except (OSError, ValueError, EOFError):
            kept = None
    hit = world.broadcast({"hit": mx.array(int(kept is not None))})["hit"].item()
    if not hit:
        return None
    values = np.zeros(shape, np.float32) if kept is None else kept
    return np.array(world.broadcast({"logps": mx.array(values)})["logps"])


def keep_logps(folder: Path, key: str, logps: np.ndarray) -> None:
    """Puts a pass's result on the disk, whole or not at all.

    Raises:
        OSError: the disk is full or not writable.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder) as own:  # ranks of one disk, and runs that start together, do this
        unfinished = Path(own, "logps.npy")
        with unfinished.open("wb") as file:
            np.save(file, logps)
            file.write(_checksum(logps))
            file.flush()
            files.flush(file.fileno())
        unfinished.replace(folder / f"{key}.npy")


def _checksum(logps: np.ndarray) -> bytes:
    """Stands behind the array in its file, where np.load does not look."""
    return hashlib.sha256(logps.tobytes()).digest()
