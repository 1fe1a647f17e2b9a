"""Checkpoints that are whole or absent, and the run folder that one process owns at a time.

A checkpoint is written beside its place, flushed to the disk, hashed and renamed; reading it checks every hash.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import os
import re
import shutil
import sys
import threading
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import IO, Any, Protocol

import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers as optim
from mlx.utils import tree_flatten
from typing_extensions import TypedDict  # which pydantic reads on Python 3.11

from lib.config import read_file
from lib.config.load import dump
from lib.config.schema import Config
from lib.data.row_order import Position
from lib.distributed import heartbeat
from lib.distributed.compression import Arrays
from lib.distributed.world import Described, World
from lib.errors import AgreedError, UserError
from lib.model import adapter_files
from lib.system import files
from lib.telemetry.run_records import PerformanceTracker
from lib.training.finite import are_finite
from lib.training.objective import Metrics
from lib.training.run_folder import claim, discard, require_free, sweep
from lib.training.step import StepResult

OPTIMIZER = "optimizer.safetensors"
REFERENCE = "reference.safetensors"  # of a reference that follows the policy
STATE = "state.json"
MANIFEST = read_file.MANIFEST
GATHER_SECONDS = 10.0  # between pieces of other disks' logs, where ranks train in step
COPIED_BYTES = 4 * 2**30  # more is written while training waits: memory may have no room for a copy
COPIED_OF_PARTS_BYTES = 2**28  # the same where ranks hold parts of one model: each copies the whole, which none has

RankArrays = dict[str, Arrays]  # what one rank alone has: arrays by name, by what they are


class RoundsState(TypedDict, total=False):
    """Where independent ranks are, as lib/training/local_sgd.py keeps it. Every list has one element a rank."""

    shares: list[int]
    speeds: list[float]  # pairs/s
    are_one: bool  # whether the ranks have the same weights
    max_micro_batch_sizes: list[int | None]
    local_steps: list[int]  # of ranks that take part no more, too
    round_ends: list[float]  # seconds, of the last rounds
    saved_whole: int  # the step of the last checkpoint that was due at a round's end
    scattered: list[int]  # inside a round: what is pending, as round_assignment.to_state has it
    tail: int
    first_step: int
    last_step: int
    trained: list[list[int]]  # pairs and steps
    rewards: list[list[float]]  # train.loss=bco: as every rank's steps know them, and as all did when the round began
    rewards_before: list[float]
    skipped_in_row: list[int]


@dataclass
class Progress:
    """How far a run is. All that is random follows from train.seed and these numbers, so no generator state is kept."""

    data_digest: str
    step: int = 0
    epoch: int = 0
    cursor: int = 0  # examples of this epoch that were trained
    pairs: int = 0
    tokens: int = 0
    seconds: float = 0.0  # spent in steps
    wall_seconds: float = 0.0  # of all processes so far, from each one's launch on
    skipped_in_row: int = 0
    best_step: int | None = None
    best_loss: float | None = None
    best_metrics: Metrics = field(default_factory=dict)  # of the best step's evaluation
    evaluations_since_best: int = 0
    before: Metrics = field(default_factory=dict)  # the evaluation before the first step
    bytes_sent: int = 0  # by rank 0, in steps and merges
    schedule: dict[str, Any] = field(default_factory=dict)  # the plans in force and to come (lib/plan/replan.py)
    rounds: RoundsState = field(default_factory=lambda: RoundsState())
    resumes: list[list[int]] = field(default_factory=list)  # of every resume, in order: its step, and every rank's own
    resume_ids: list[str] = field(default_factory=list)  # of each: hosts that are alone may resume from one step
    rewards: list[float] = field(default_factory=lambda: [0.0, 0.0])  # train.loss=bco: sum and count of all so far
    parts: list[str] = field(default_factory=list)  # the hash of every rank's own part, where ranks have one

    def count(self, step: int, position: Position, pairs: int, result: StepResult) -> None:
        """Adds one step."""
        self.step, self.epoch, self.cursor = step, position.epoch, position.cursor
        self.pairs += pairs
        self.tokens += result.tokens
        self.seconds += result.seconds
        self.bytes_sent += result.bytes_sent

    def steps_of(self, rank: int) -> int:
        """The last step in a rank's log: independent ranks count their own."""
        local = self.rounds.get("local_steps", [])
        return local[rank] if rank < len(local) else self.step

    def is_best(self, metrics: Metrics, may_be_saved: bool = True) -> bool:
        """Counts an evaluation of this step: whether its loss is the lowest so far, of weights that are saved then."""
        loss = metrics.get("loss")
        if loss is None:
            return False
        self.evaluations_since_best += 1
        if not may_be_saved or not math.isfinite(loss) or (self.best_loss is not None and loss >= self.best_loss):
            return False
        self.best_step, self.best_loss, self.best_metrics = self.step, loss, metrics
        self.evaluations_since_best = 0
        return True

    def has_stalled(self, patience: int | None) -> bool:
        """Whether so many evaluations in a row brought no lower held-out loss."""
        return patience is not None and self.evaluations_since_best >= patience


def keeps_disk(folder: Path, world: World) -> bool:
    """Whether this rank is the first of those that share its disk: it keeps the run's files there.

    Raises:
        AgreedError: the folder cannot be written.
    """
    token = world.broadcast_text(os.urandom(8).hex())
    mine = folder / f".disk-{token}-{world.rank:04d}"
    with world.agreeing(f"opening {folder}"):
        folder.mkdir(parents=True, exist_ok=True)
        mine.touch()
    first = min(folder.glob(f".disk-{token}-*"), default=mine)  # none: who owns the folder has swept it
    world.gather_text("seen", "every rank's look at its disk")
    mine.unlink(missing_ok=True)
    return first == mine


def open_run(
    folder: Path, config: Config, plan: Mapping[str, object], resumed_steps: int | None, world: World
) -> IO[str] | None:
    """Makes one process on every disk the run's only owner there, for as long as its file stays open; writes its plan.

    Args:
        resumed_steps: how many a run makes in all that is resumed; None of a new one.

    Returns:
        The file, to that process: it keeps the run's files on its disk.

    Raises:
        AgreedError: another process owns the folder, it holds a run that is not resumed or has made more steps, or
            files of another kind.
    """
    keeper = keeps_disk(folder, world)
    with world.agreeing(f"opening {folder}"):
        if not keeper:
            return None
        if resumed_steps is None:
            require_free(folder)
        with contextlib.ExitStack() as on_failure:
            lock = on_failure.enter_context(claim(folder))
            if (folder / "config.yaml").exists() and resumed_steps is None:
                raise UserError(
                    f"run folder {folder} already holds a run; go on with it by --resume {folder}, "
                    "or give another run.name"
                )
            if resumed_steps is not None:
                _require_no_more_made(folder / "checkpoints", config, resumed_steps)
            sweep(folder)
            files.write_changed(folder / "plan.json", json.dumps(plan, indent=2) + "\n")
            files.write_changed(folder / "config.yaml", dump(config))  # last: where it is, there is a run to resume
            on_failure.pop_all()
            return lock


def _require_no_more_made(folder: Path, config: Config, steps: int) -> None:
    made = max((step_of(path) for path in checkpoints_in(folder) if (path / MANIFEST).is_file()), default=0)
    if made > steps:
        given = f"train.steps={steps}" if config.train.steps else f"a run of {steps} steps"
        raise UserError(f"{given} is below the {made} steps made; give more, or start a new run")


class CheckpointWriter:
    """Writes this rank's checkpoints, one after the other: none is dropped, and a failure is reported at once."""

    def __init__(self, keeps_disk: bool = True, max_lost_seconds: float | None = None):
        self.keeps_disk, self.max_lost_seconds = keeps_disk, max_lost_seconds
        self.unsaved_seconds = self.ungathered_seconds = 0.0
        self._thread: threading.Thread | None = None
        self._written: list[tuple[int, Path]] = []
        self._faults: list[tuple[int, str]] = []

    @property
    def is_busy(self) -> bool:
        """Whether a checkpoint is not whole yet."""
        return self._thread is not None and self._thread.is_alive()

    def is_due(self, elapsed_seconds: float) -> bool:
        """Counts a step, and tells whether it and one more would exceed what a fault may undo."""
        self.unsaved_seconds += elapsed_seconds
        self.ungathered_seconds += elapsed_seconds
        return self.max_lost_seconds is not None and self.unsaved_seconds + 2 * elapsed_seconds > self.max_lost_seconds

    def write(self, step: int, path: Path, work: Callable[[], None]) -> None:
        """Does the work now. step: as the log counts.

        Raises:
            OSError: what it raises.
        """
        self._finish()
        work()
        self._written.append((step, path))

    def write_beside(self, step: int, path: Path, work: Callable[[], None]) -> None:
        """Does the work beside training, once the checkpoint before is done."""
        self._finish()

        def run() -> None:
            try:
                work()
                self._written.append((step, path))
            except Exception as error:  # in this thread nobody else would tell it
                why = f"{error.filename}: {error.strerror}" if isinstance(error, OSError) else f"{path}: {error!r}"
                fault = f"{why}; training goes on, earlier checkpoints are whole"
                print(f"warning: {fault}", file=sys.stderr, flush=True)
                self._faults.append((step, fault))

        self._thread = threading.Thread(target=run, name="checkpoint")
        self._thread.start()

    def record(self, tracker: PerformanceTracker) -> None:
        """Records the checkpoints that became whole since the last call (rank 0: of all disks), and the failures."""
        while self._faults:
            step, text = self._faults.pop(0)
            tracker.record("warning", step=step, text=text)
        while self._written:
            step, path = self._written.pop(0)
            if tracker.rank == 0:
                tracker.record("checkpoint", step=step, path=str(path))

    def _finish(self) -> None:
        if self._thread is not None:
            self._thread.join()


class MovingReference(Protocol):
    """What a reference that follows the policy has of its own: the trained arrays, by name."""

    arrays: Arrays


@dataclass(frozen=True)
class TrainingState:
    """What a checkpoint holds of a run.

    plan: of the step after it, as ClusterPlan.to_dict has it. own: what this rank alone has; None of replicas.
    """

    config: Config
    progress: Progress
    model: nn.Module
    optimizer: optim.Optimizer
    plan: Mapping[str, object]
    own: RankArrays | None = None
    reference: MovingReference | None = None


def save(folder: Path, state: TrainingState, world: World, writer: CheckpointWriter, wait: bool) -> None:
    """Writes `folder/step-XXXXXXXX`, all of it or nothing, and removes old ones.

    All ranks call it, one on every disk writes.

    Args:
        wait: else training goes on meanwhile; not where `has_to_wait`.

    Raises:
        OSError: the disk is full or not writable; earlier checkpoints are untouched. Meanwhile, it is a warning.
    """
    config, progress, model = state.config, state.progress, state.model
    moving = [state.reference.arrays] if state.reference is not None else []
    trees = [model.trainable_parameters(), state.optimizer.state, *moving]
    with world.gathering(*trees) as wholes:
        if not writer.keeps_disk:
            return
        final = folder / f"step-{progress.step:08d}"
        names = (adapter_files.ADAPTER_WEIGHTS, OPTIMIZER, REFERENCE)
        arrays: dict[str, tuple[Described, adapter_files.Arrays]] = dict(zip(names, wholes, strict=False))
        texts = {
            adapter_files.ADAPTER_CONFIG: json.dumps(
                adapter_files.adapter_config(config.model, wholes[0][0], len(model.layers)), indent=2
            )
            + "\n",
            "plan.json": json.dumps(state.plan, indent=2) + "\n",
            STATE: json.dumps(asdict(progress), indent=2) + "\n",
        }
        if not wait:  # out of MLX, whose arrays are this thread's
            for file, (described, each) in list(arrays.items()):
                arrays[file] = described, adapter_files.raw(dict(each))
        step, keep, best_step = progress.step, config.checkpoint.keep, progress.best_step

        def work() -> None:
            _write_whole(final, arrays, {**texts, "config.yaml": dump(config)})
            prune(folder, keep, best_step)
            heartbeat.tell(checkpoint=step)

        (writer.write if wait else writer.write_beside)(progress.steps_of(world.rank), final, work)


def has_to_wait(world: World, model: nn.Module, optimizer: optim.Optimizer) -> bool:
    """Whether training waits for a checkpoint, since a copy of it would be large. All ranks ask, and decide alike."""
    held = {**adapter_files.trainable(model), **dict(tree_flatten(optimizer.state))}
    held_bytes = sum(array.nbytes for array in held.values())
    if not world.divides_model:
        return held_bytes > COPIED_BYTES
    return sum(map(int, world.gather_text(str(held_bytes), "the size of every rank's part"))) > COPIED_OF_PARTS_BYTES


def _write_whole(
    final: Path, arrays: Mapping[str, tuple[Described, adapter_files.Arrays]], texts: Mapping[str, str]
) -> None:
    folder, unfinished = final.parent, final.parent / f".unfinished-{step_of(final):08d}"
    before = final.with_name(f".unfinished-{final.name}")  # one of this step, of a run that a resume went back behind
    try:
        shutil.rmtree(unfinished, ignore_errors=True)
        unfinished.mkdir(parents=True)
        for name, (described, each) in arrays.items():
            adapter_files.write_arrays(unfinished / name, described, each, durable=False)  # all are flushed below
        for name, text in texts.items():
            (unfinished / name).write_text(text, encoding="utf-8")
        hashes = {file.name: file_sha256(file) for file in sorted(unfinished.iterdir())}
        (unfinished / MANIFEST).write_text(json.dumps(hashes, indent=2) + "\n", encoding="utf-8")
        for file in unfinished.iterdir():
            files.flush_path(file)
        files.flush_path(unfinished)
        shutil.rmtree(before, ignore_errors=True)
        with contextlib.suppress(FileNotFoundError):
            final.rename(before)
        unfinished.rename(final)
        files.flush_path(folder)
        shutil.rmtree(before, ignore_errors=True)  # not earlier: it takes a while, and a whole one is to be there
    except OSError as error:
        if not final.exists():
            with contextlib.suppress(OSError):
                before.rename(final)
        shutil.rmtree(unfinished, ignore_errors=True)
        free = shutil.disk_usage(next(path for path in (folder, *folder.parents) if path.exists())).free
        reason = f"cannot be written, {free:,} bytes are free there ({error.strerror})"
        raise OSError(None, reason, str(final)) from None


def save_all(
    folder: Path,
    state: TrainingState,
    world: World,
    writer: CheckpointWriter,
    tracker: PerformanceTracker,
    is_last: bool,
    wait: bool = False,
) -> str:
    """One checkpoint of all ranks, on every disk, and each rank's own part beside it where ranks have one. Old ones go.

    A host that is lost takes its disk along, and the others go on from theirs. folder: the run's. All wait for the last
    one and for parts of ranks. What the log lacks on a full disk, or is not finite, gets into none and pushes none out.

    Returns:
        Why there is none now, the same on every rank; earlier ones are untouched, and no run ends for want of one.

    Raises:
        AgreedError: the last one cannot be written.
    """
    step, own = state.progress.step, state.own
    what = f"the checkpoint of step {step} (earlier ones are whole: --resume {folder})"
    folder, writer.unsaved_seconds = folder / "checkpoints", 0.0
    wait = wait or is_last or own is not None or has_to_wait(world, state.model, state.optimizer)
    if not are_finite(world, state.model, state.optimizer):
        return f"training goes on without {what}: the weights or the optimizer's state are not finite"
    try:
        with world.agreeing(what):
            tracker.flush()
            part = save_part(folder, step, world.rank, own) if own is not None else ""
        if own is not None:
            state.progress.parts = world.gather_text(part)
        with world.agreeing(what) if wait else contextlib.nullcontext():  # beside training each tells by itself
            save(folder, state, world, writer, wait)
    except AgreedError as error:
        if is_last:
            raise
        heartbeat.tell(refused=False)  # the run does not end with it
        return f"training goes on without {error}"
    if own is not None or writer.ungathered_seconds >= GATHER_SECONDS:
        tracker.gather(world)
        writer.ungathered_seconds = 0.0
    if own is not None:
        kept = json.dumps([step_of(path) for path in checkpoints_in(folder)]) if world.rank == 0 else ""
        prune_parts(folder, json.loads(world.broadcast_text(kept)), world.rank, world.size)
    return ""


def prune(folder: Path, keep: int, best_step: int | None) -> None:
    """Removes torn checkpoints, and all but the newest `keep`, the best, and the newest at which the ranks were one."""
    newest_whole = next((path for path in checkpoints_in(folder) if not inside_a_round(path)), None)
    for path in checkpoints_in(folder)[keep:]:
        if step_of(path) != best_step and path != newest_whole:
            discard(path)


# ---- Every rank's own part: what differs between independent ranks, or ranks that compress what they send -----------


def save_part(folder: Path, step: int, rank: int, trees: RankArrays) -> str:
    """Writes one rank's arrays of a checkpoint, whole or not at all, on its own disk; returns their hash, "" for none.

    trees: arrays by name, by what they are.

    Raises:
        OSError: the disk is full or not writable.
    """
    arrays = {f"{kind}/{name}": array for kind, tree in trees.items() for name, array in tree.items()}
    if not arrays:
        return ""
    path = part_of(folder, step, rank)
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_name(f".unfinished-{path.name}")
    try:
        mx.save_safetensors(str(unfinished), arrays)
        files.flush_path(unfinished)
        unfinished.replace(path)
        files.flush_path(path.parent)
    except RuntimeError as error:  # what MLX raises when a write fails
        unfinished.unlink(missing_ok=True)
        raise OSError(None, f"cannot be written ({str(error).splitlines()[0]})", str(path)) from None
    return file_sha256(path)


def load_part(folder: Path, step: int, rank: int) -> RankArrays:
    """What `save_part` wrote."""
    trees, path = RankArrays(), part_of(folder, step, rank)
    for name, array in mx.load(str(path)).items() if path.is_file() else ():
        kind, _, rest = name.partition("/")
        trees.setdefault(kind, {})[rest] = array
    mx.eval(trees)  # now: the file's place may be written anew
    return trees


def prune_parts(folder: Path, kept: list[int], rank: int, size: int) -> None:
    """Removes a rank's parts of checkpoints that are gone; rank 0 removes those of ranks that are no more, too."""
    for path in (folder / "ranks").glob("step-*-rank-*.safetensors"):
        named = re.fullmatch(r"step-([0-9]+)-rank-([0-9]+)", path.stem)  # a copy's name has more behind it
        if named and int(named[1]) not in kept and (int(named[2]) == rank or (rank == 0 and int(named[2]) >= size)):
            path.unlink(missing_ok=True)
    for path in (folder / "ranks").glob(f".unfinished-*-rank-{rank:03d}.safetensors"):
        path.unlink(missing_ok=True)


def part_of(folder: Path, step: int, rank: int) -> Path:
    return folder / "ranks" / f"step-{step:08d}-rank-{rank:03d}.safetensors"


# ---- Checkpoints on the disk ----------------------------------------------------------------------------------------


def inside_a_round(path: Path) -> bool:
    """Whether the ranks had different weights then; of a damaged checkpoint nothing is known."""
    try:
        rounds = read_file.read_object(path / STATE, "checkpoint").get("rounds")
    except (OSError, UserError):
        return True
    return not (isinstance(rounds, dict) and rounds.get("are_one", True))


def checkpoints_in(folder: Path) -> list[Path]:
    """Newest first."""
    return sorted(
        (path for path in folder.glob("step-*") if re.fullmatch(r"step-[0-9]+", path.name)), key=step_of, reverse=True
    )


def step_of(path: Path) -> int:
    return int(path.name.removeprefix("step-"))


def file_sha256(file: Path) -> str:
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()
