"""Checkpoints: saved whole or not at all, found by name, resumed from; and the run folder that holds them.

A checkpoint is written beside its place, flushed, hashed and renamed; reading it checks every hash. One rank of each
disk writes one, so that a run survives the loss of a host. What one rank alone has is a file of its own in ranks/.
"""

from __future__ import annotations

import base64
import contextlib
import fcntl
import hashlib
import json
import math
import os
import re
import shutil
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import IO, Any

import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers as optim
from mlx.utils import tree_flatten, tree_unflatten
from pydantic import TypeAdapter, ValidationError

from lib.config import read_file
from lib.config.settings import ModelSettings
from lib.distributed.compression import Arrays
from lib.distributed.world import Described, World
from lib.errors import AgreedError, UserError
from lib.model import adapter_files
from lib.system import files
from lib.system.records import PerformanceTracker, first_missed, rewind
from lib.training.losses import Metrics

OPTIMIZER = "optimizer.safetensors"
REFERENCE = "reference.safetensors"  # of a reference that follows the policy
REFERENCE_LOGPS = "reference_logps.safetensors"
MOMENTUM = "momentum.safetensors"  # of DiLoCo's outer step
STATE = "state.json"
MANIFEST = read_file.MANIFEST
PAUSE_PART = 0.05  # of the time that writing checkpoints may hold up training
PIECE_BYTES = 2**22  # of a checkpoint that travels to rank 0's disk
# What a run writes before its config.yaml, and what macOS and NFS leave in any folder.
BEFORE_A_RUN = re.compile(r"\.lock|plan\.json|logs|.*\.unfinished|\.disk-.*|\.DS_Store|\._.*|\.nfs.*")
UNFINISHED = ".disk-*", "*.unfinished", "logs/**/*.unfinished", "rounds/*/*.unfinished", "checkpoints/**/.unfinished-*"

RankArrays = dict[str, Arrays]  # of one rank: arrays by name, by kind


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
    best_metrics: Metrics = field(default_factory=dict)  # of the best step's evaluation
    evaluations_since_best: int = 0
    before: Metrics = field(default_factory=dict)  # the evaluation before the first step
    bytes_sent: int = 0  # by rank 0, in steps and merges
    schedule: dict[str, Any] = field(default_factory=dict)  # the plans in force and to come (lib/plan/replan.py)
    rate: list[float] = field(default_factory=list)  # of the learning rate's schedule, as `rate_position` takes it
    rounds: dict[str, Any] = field(default_factory=dict)  # of independent ranks (LocalSGD.state)
    resumes: list[list[int]] = field(default_factory=list)  # of every resume: its step, and every rank's own
    resume_ids: list[str] = field(default_factory=list)  # of each: hosts that are alone may resume from one step
    rewards: list[float] = field(default_factory=lambda: [0.0, 0.0])  # train.loss=bco: sum and count of all so far
    parts: list[str] = field(default_factory=list)  # the hash of every rank's file in ranks/; "" for none

    def rate_position(self, index: int) -> tuple[float, int]:
        """Where in the learning rate's schedule a global step is, from 0, and how many steps the schedule has. A run
        that is resumed with more or fewer steps goes on from the rate that it had: the rest of the schedule is
        stretched over the steps that are left, and one that had ended keeps its last rate."""
        since, position, length, steps = self.rate
        left = (length - 1 - position) / max(1, steps - 1 - since)
        return position + (index - since) * max(0.0, left), int(length)

    def set_steps(self, steps: int) -> bool:
        """Takes in how many steps the run has from here on; whether these are others than before."""
        if not self.rate or self.rate[3] == steps:
            self.rate = self.rate or [0, 0, steps, steps]
            return False
        position, length = self.rate_position(self.step)
        self.rate = [self.step, min(position, length - 1), length, steps]
        return True

    def count(self, pairs: int, tokens: int, seconds: float, bytes_sent: int = 0) -> None:
        """Adds what was trained."""
        self.pairs, self.tokens = self.pairs + pairs, self.tokens + tokens
        self.seconds, self.bytes_sent = self.seconds + seconds, self.bytes_sent + bytes_sent

    def steps_of(self, rank: int) -> int:
        """The last step in a rank's log: independent ranks count their own."""
        local = self.rounds.get("local_steps", [])
        return local[rank] if rank < len(local) else self.step

    def is_best(self, metrics: Metrics, best_by: str, may_be_saved: bool = True) -> bool:
        """Counts an evaluation: whether it is the best so far; of equal exact matches that with the lower loss is."""

        def order(of: Metrics) -> tuple[float, float]:
            value, loss = of[best_by] or 0.0, of.get("loss")
            if best_by in ("loss", "kl"):
                return -value, 0.0
            return value, -loss if loss is not None and math.isfinite(loss) else -math.inf

        value, best = metrics.get(best_by), self.best_metrics.get(best_by)
        if value is None:
            return False
        self.evaluations_since_best += 1
        is_better = best is None or order(metrics) > order(self.best_metrics)
        if may_be_saved and math.isfinite(value) and is_better:
            self.best_step, self.best_metrics, self.evaluations_since_best = self.step, metrics, 0
        return self.evaluations_since_best == 0


# ---- The run's folder: its owner, and what a killed process left there -----------------------------------------------


def open_run(
    folder: Path, settings_text: str, plan: Mapping[str, object], resumed_steps: int | None, world: World
) -> IO[str] | None:
    """The run folder's lock, of its only owner on this disk, who writes its plan; None on other ranks; AgreedError. The
    owner is the first of the ranks that see each other's files in the folder."""
    token = world.broadcast_text(os.urandom(8).hex())
    mark = folder / f".disk-{token}-{world.rank:04d}"
    with world.agreeing(f"opening {folder}"):
        folder.mkdir(parents=True, exist_ok=True)
        mark.touch()
    first = min(folder.glob(f".disk-{token}-*"), default=mark)  # none: the folder's owner has swept it
    world.gather_text("seen", "every rank's look at its disk")
    mark.unlink(missing_ok=True)
    with world.agreeing(f"opening {folder}"):
        if first != mark:
            return None
        lock = (folder / ".lock").open("a+", encoding="utf-8")
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            lock.seek(0)
            owner = f"run folder {folder} is in use by process {lock.read().strip() or '?'}"
            raise UserError(f"{owner}; wait for it, or give another run.name") from None
        lock.truncate(0)
        lock.write(f"{os.getpid()}\n")
        lock.flush()
        if resumed_steps is None:
            require_free(folder)
        elif (made := next(map(step_of, checkpoints_in(folder / "checkpoints")), 0)) > resumed_steps:
            more = "give a larger train.steps (train.epochs, rollouts.rounds), or start a new run"
            raise UserError(f"a run of {resumed_steps} steps is below the {made} steps made; {more}")
        sweep(folder)
        files.write_atomically(folder / "plan.json", json.dumps(plan, indent=2) + "\n")
        files.write_atomically(folder / "config.yaml", settings_text)  # last: where it is, there is a run to resume
        return lock


def require_free(folder: Path) -> None:
    """Makes sure that a new run writes over no run and no files of another kind; else UserError."""
    if not folder.is_dir():
        return
    if (folder / "config.yaml").exists():
        remedy = f"go on with it by --resume {folder}, or give another run.name"
        raise UserError(f"run folder {folder} already holds a run; {remedy}")
    if strangers := sorted(path.name for path in folder.iterdir() if not BEFORE_A_RUN.fullmatch(path.name)):
        raise UserError(f"run folder {folder} exists and is not a run: it holds {strangers[0]}; give another run.name")


def sweep(folder: Path) -> None:
    """Removes what a process that was killed left unfinished of a run."""
    for path in (path for pattern in UNFINISHED for path in folder.glob(pattern)):
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)


# ---- Saving ----------------------------------------------------------------------------------------------------------


class CheckpointWriter:
    """Decides when a checkpoint is due, by steps or by seconds of training, and writes this disk's."""

    def __init__(self, is_keeper: bool = True, every: int | None = None, seconds: float = 30.0):
        self.is_keeper, self.every, self.seconds = is_keeper, every, seconds
        self.unsaved_seconds = 0.0
        self._pool = ThreadPoolExecutor(1, "checkpoint")
        self._written: list[tuple[int, Path, Future[Any]]] = []  # since the last record, by step

    def is_due(self, step: int, elapsed_seconds: float) -> bool:
        """Counts a step, and says whether a checkpoint follows it. elapsed_seconds: the same number on all ranks."""
        self.unsaved_seconds += elapsed_seconds
        if self.every is not None:
            return step % self.every == 0
        return self.unsaved_seconds + elapsed_seconds > self.seconds

    def write(self, step: int, path: Path, work: Callable[[], None], beside: bool) -> None:
        """Does the work once the one before is done; beside: in a thread, where an error becomes a warning."""
        self.wait()
        future = self._pool.submit(work if beside else time.time)
        if not beside:
            work()
        self._written.append((step, path, future))

    def record(self, tracker: PerformanceTracker) -> None:
        """Records the checkpoints that became whole since the last call (rank 0: of all disks), and the failures."""
        while self._written and self._written[0][2].done():
            step, path, future = self._written.pop(0)
            if error := future.exception():
                why = f"{error.filename}: {error.strerror}" if isinstance(error, OSError) else f"{path}: {error!r}"
                fault = f"{why}; training goes on, earlier checkpoints are whole"
                if tracker.rank:  # rank 0's records are printed
                    print(f"warning: {fault}", file=sys.stderr, flush=True)
                tracker.record("warning", step=step, text=fault)
            elif tracker.rank == 0:
                tracker.record("checkpoint", step=step, path=str(path))

    def wait(self) -> None:
        """Until the last checkpoint is whole."""
        wait([future for _, _, future in self._written])


@dataclass(frozen=True)
class Snapshot:
    """What a checkpoint holds: texts and arrays by file name, and what this rank alone has (None of replicas)."""

    progress: Progress
    model: nn.Module
    optimizer: optim.Optimizer
    settings: ModelSettings
    texts: dict[str, str]
    common: dict[str, Arrays]
    own: RankArrays | None


def save(folder: Path, snapshot: Snapshot, world: World, writer: CheckpointWriter, keep: int, is_last: bool) -> str:
    """One checkpoint of all ranks, on every disk; returns why there is none now, the same on all ranks. Training waits
    for the last one, for ranks' own files and for large ones; others are written meanwhile. Raises AgreedError: the
    last one cannot be written; no run ends for want of another."""
    began, progress, own, model = time.perf_counter(), snapshot.progress, snapshot.own, snapshot.model
    what = f"the checkpoint of step {progress.step} (earlier ones are whole: --resume {folder})"
    folder, writer.unsaved_seconds = folder / "checkpoints", 0.0
    # What is large is not copied: memory may have no room for it.
    waits = is_last or own is not None or world.divides_model or snapshot.settings.method == "full"
    if not are_finite(world, model, snapshot.optimizer):
        return f"training goes on without {what}: the weights or the optimizer's state are not finite"
    trees = {adapter_files.ADAPTER_WEIGHTS: model.trainable_parameters(), OPTIMIZER: snapshot.optimizer.state}
    trees |= snapshot.common
    final, best_step = folder / f"step-{progress.step:08d}", progress.best_step
    arrays: dict[str, tuple[Described, adapter_files.Arrays]]
    try:
        if own is not None:
            with world.agreeing(what):
                part = save_part(part_of(folder, progress.step, world.rank), own)
            progress.parts = world.gather_text(part, "every rank's part")
        # Beside training each rank reports by itself.
        with world.agreeing(what) if waits else contextlib.nullcontext(), world.gathering(*trees.values()) as wholes:
            if writer.is_keeper:
                arrays = dict(zip(trees, wholes, strict=True))
                adapter_config = adapter_files.adapter_config(snapshot.settings, wholes[0][0], len(model.layers))
                objects = {adapter_files.ADAPTER_CONFIG: adapter_config, STATE: asdict(progress)}
                texts = {name: json.dumps(each, indent=2) + "\n" for name, each in objects.items()} | snapshot.texts
                if not waits:  # out of MLX, whose arrays are this thread's
                    arrays = {name: (which, adapter_files.raw(dict(each))) for name, (which, each) in arrays.items()}

                def work() -> None:
                    write_whole(final, arrays, texts)
                    prune(folder, keep, best_step)

                writer.write(progress.steps_of(world.rank), final, work, beside=not waits)
    except AgreedError as error:
        if is_last:
            raise
        return f"training goes on without {error}"
    writer.seconds = max(writer.seconds, world.broadcast_value(time.perf_counter() - began) / PAUSE_PART)
    return ""


def write_whole(
    final: Path, arrays: Mapping[str, tuple[Described, adapter_files.Arrays]], texts: Mapping[str, str]
) -> None:
    """Writes one checkpoint, whole or not at all; OSError where there is no room."""
    unfinished = final.parent / f".unfinished-{step_of(final):08d}"
    try:
        shutil.rmtree(unfinished, ignore_errors=True)
        unfinished.mkdir(parents=True)
        for name, (described, each) in arrays.items():
            adapter_files.write_arrays(unfinished / name, described, each, durable=False)  # all are flushed below
        for name, text in texts.items():
            (unfinished / name).write_text(text, encoding="utf-8")
        hashes = {file.name: file_sha256(file) for file in sorted(unfinished.iterdir())}
        (unfinished / MANIFEST).write_text(json.dumps(hashes, indent=2) + "\n", encoding="utf-8")
        for file in (*unfinished.iterdir(), unfinished):
            files.flush_path(file)
        _put_in_place(unfinished, final)
    except OSError as error:
        shutil.rmtree(unfinished, ignore_errors=True)
        raise OSError(error.errno, error.strerror, str(final)) from None


def _put_in_place(unfinished: Path, final: Path) -> None:
    """Renames a whole checkpoint; one of the same step, of a history that a resume left, goes."""
    discard(final)
    unfinished.rename(final)
    files.flush_path(final.parent)


def discard(path: Path) -> None:
    """Removes a checkpoint, if there is one: it loses its name first, so that no half of one is found."""
    removed = path.with_name(f".unfinished-{path.name}")
    shutil.rmtree(removed, ignore_errors=True)
    with contextlib.suppress(OSError):
        shutil.rmtree(path.rename(removed), ignore_errors=True)


def prune(folder: Path, keep: int, best_step: int | None) -> None:
    """Keeps the newest `keep`, the best, the newest with the same weights on all ranks, and their files in ranks/."""
    saved = checkpoints_in(folder)
    newest_whole = next((path for path in saved if not inside_a_round(path)), None)
    if best_step is None or best_step in map(step_of, saved):  # else it found no room: the best before it is among them
        for path in saved[keep:]:
            if step_of(path) != best_step and path != newest_whole:
                discard(path)
    for path in (folder / "ranks").glob("step-*-rank-[0-9][0-9][0-9].safetensors"):  # a copy has more in its name
        if not (folder / path.name.partition("-rank-")[0]).exists():
            path.unlink(missing_ok=True)


def save_part(path: Path, trees: RankArrays) -> str:
    """Writes one rank's arrays of a checkpoint, whole or not at all; returns their hash, "" for none."""
    arrays = {f"{kind}/{name}": array for kind, tree in trees.items() for name, array in tree.items()}
    if not arrays:
        return ""
    described = dict(sorted(adapter_files.described(arrays).items()))
    adapter_files.write_arrays(path, described, adapter_files.raw(arrays), durable=True)
    return file_sha256(path)


def load_part(path: Path) -> RankArrays:
    """What `save_part` wrote; UserError where it cannot be read."""
    trees = RankArrays()
    for name, array in read_arrays(path).items() if path.is_file() else ():
        kind, _, rest = name.partition("/")
        trees.setdefault(kind, {})[rest] = array
    mx.eval(trees)  # now: the file's place may be written anew
    return trees


def part_of(folder: Path, step: int, rank: int) -> Path:
    """The file of what one rank alone has in a checkpoint."""
    return folder / "ranks" / f"step-{step:08d}-rank-{rank:03d}.safetensors"


def are_finite(world: World, model: nn.Module, optimizer: optim.Optimizer) -> bool:
    """Whether no rank has NaN or infinities in its trained weights or its optimizer's state; all ranks ask together."""
    held = [*adapter_files.trainable(model).values(), *flat_state(optimizer).values()]
    checks = [(array - array).sum() for array in held if mx.issubdtype(array.dtype, mx.floating)]  # 0, or NaN
    mx.eval(checks)
    return all(world.gather_values(not any(check.item() for check in checks), "finite weights"))


def share_weights(
    world: World, model: nn.Module, optimizer: optim.Optimizer, moving: Arrays
) -> tuple[list[int], Arrays]:
    """Gives every rank rank 0's replicated arrays, which drift by roundings; returns who differed, and `moving`.
    Nothing travels where no bit differs."""
    if world.size == 1:
        return [], moving
    held = [{**adapter_files.trainable(model), **flat_state(optimizer)}, moving]
    digest = ",".join(adapter_files.digest(world.replicated(arrays)) for arrays in held)
    digests = world.gather_text(digest, "every rank's weights")
    others = [rank for rank, theirs in enumerate(digests) if theirs != digests[0]]
    if others:
        moving = dict(tree_flatten(world.align(tree_unflatten(moving)))) if moving else moving
        model.update(world.align(model.trainable_parameters()))
        optimizer.state = world.align(optimizer.state)
    return others, moving


def flat_state(optimizer: optim.Optimizer) -> Arrays:
    """An optimizer's state by name."""
    return dict(tree_flatten(optimizer.state))


# ---- Finding ---------------------------------------------------------------------------------------------------------


def checkpoints_in(folder: Path) -> list[Path]:
    """Newest first."""
    named = (path for path in folder.glob("step-*") if re.fullmatch(r"step-[0-9]+", path.name))
    return sorted(named, key=step_of, reverse=True)


def step_of(path: Path) -> int:
    return int(path.name.removeprefix("step-"))


def file_sha256(file: Path) -> str:
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def inside_a_round(path: Path) -> bool:
    """Whether the ranks had different weights then; a damaged checkpoint counts as such."""
    try:
        return not read_progress(path).rounds.get("are_one", True)
    except (OSError, UserError):
        return True


def find(run: Path, which: str) -> Path:
    """A run's checkpoint, checked: `best` (by checkpoint.best_by), `last` or a step's number; else UserError."""
    saved = {str(step_of(path)): path for path in checkpoints_in(run / "checkpoints")}
    steps, step = f"{run} has checkpoints of steps {', '.join(reversed(saved)) or 'none'}", which
    if which in ("best", "last"):
        newest = next((path for path in saved.values() if fault_of(path) is None), None)
        if newest is None:
            raise UserError(f"--checkpoint {which}: none is whole; {steps}")
        # Every better model is saved at once: the newest checkpoint knows the best of all evaluations so far.
        step = str(step_of(newest) if which == "last" else read_progress(newest).best_step)
        if step == "None":
            raise UserError(f"--checkpoint best: {run} has no evaluation; {steps}: give last, or one of these")
    if step not in saved:
        raise UserError(f"--checkpoint {which}: give best, last, or a step's number; {steps}")
    if fault := fault_of(saved[step]):
        raise UserError(f"--checkpoint {which}: {saved[step]} is damaged ({fault}); {steps}")
    return saved[step]


def read_progress(path: Path) -> Progress:
    """How far a checkpoint is, by its state.json; UserError where that is not what a run writes."""
    try:
        progress = TypeAdapter(Progress).validate_json(read_file.read_text(path / STATE, "checkpoint"))
    except ValidationError as error:
        fault = error.errors()[0]
        raise UserError(f"{STATE}: {'.'.join(map(str, fault['loc']))}: {fault['msg']}") from None
    if progress.step != step_of(path):
        raise UserError(f"{STATE} is of step {progress.step}")
    return progress


def fault_of(path: Path) -> str | None:
    """What is wrong with a checkpoint's files, by its manifest's hashes and its state; None where all are whole."""
    try:
        hashes = read_file.read_object(path / MANIFEST, "manifest")
        for name, expected in hashes.items():
            if file_sha256(path / name) != expected:
                return f"{name} does not match its hash"
        read_progress(path)
    except (UserError, OSError) as error:
        return str(error)
    complete = {STATE, OPTIMIZER, adapter_files.ADAPTER_WEIGHTS} <= hashes.keys()
    return None if complete else "files are missing from its manifest"


def is_finished(folder: Path, steps: int, patience: int | None, world: World) -> bool:
    """Whether a run made all steps, or ended early, and rank 0's disk has its results; all ranks ask together."""
    newest, summary, is_over = next(iter(checkpoints_in(folder / "checkpoints")), None), folder / "summary.json", False
    if newest is not None and fault_of(newest) is None and summary.is_file():
        is_over = step_of(newest) == steps or read_progress(newest).evaluations_since_best >= (patience or math.inf)
        is_over = is_over and read_file.read_object(summary, "summary").get("steps") == step_of(newest)
    return bool(world.broadcast_text("finished" if is_over else ""))


# ---- Resuming --------------------------------------------------------------------------------------------------------


def choose(folder: Path, world: World, is_keeper: bool) -> tuple[Path | None, list[str]]:
    """The newest checkpoint that these ranks can go on from, on rank 0's disk, None for none; and warnings. Without
    every rank's file in ranks/ only a checkpoint at which the ranks had the same weights will do. Where another disk
    has a newer one, as of a host that went on while rank 0's was away, it is copied first."""
    _fetch_newest(folder, world, is_keeper)
    warnings, offers = [], []
    for path in checkpoints_in(folder) if world.rank == 0 else ():
        if (fault := fault_of(path)) is not None:
            warnings.append(f"checkpoint {path} is damaged ({fault}); an earlier one is taken")
        else:
            offers.append([str(path), read_progress(path).parts, inside_a_round(path)])
        if offers and not offers[-1][2]:
            break
    for name, parts, is_inside in world.broadcast_value(offers):
        path = Path(name)
        if not (any(parts) or is_inside) or not (missing := _ranks_without_part(path, parts, world)):
            return path, warnings
        is_same_size = len(parts) == world.size
        why = f"no part of rank {', '.join(missing)}" if is_same_size else f"{len(parts)} ranks instead of {world.size}"
        if not is_inside:
            lost = "all ranks go on from rank 0's optimizer state, without what compression had left out"
            return path, [*warnings, f"{path}: {why}; {lost}"]
        warnings.append(f"{path} is inside a round: {why}; one at a round's end is taken")
    return None, warnings


def _ranks_without_part(path: Path, parts: Sequence[str], world: World) -> list[str]:
    """The ranks whose own part of a checkpoint is not on their disk. parts: the hash of every rank's."""
    has_part = len(parts) == world.size
    if has_part and (expected := parts[world.rank]):
        part = part_of(path.parent, step_of(path), world.rank)
        has_part = part.is_file() and file_sha256(part) == expected
    answers = world.gather_values(has_part, "every rank's part of the checkpoint")
    return [str(rank) for rank, answer in enumerate(answers) if not answer]


def _fetch_newest(folder: Path, world: World, is_keeper: bool) -> None:
    """Copies the newest checkpoint (most resumes, then most steps) of the run's history to rank 0's disk."""
    saved = checkpoints_in(folder) if is_keeper and world.size > 1 else []
    newest = next((path for path in saved if not inside_a_round(path) and fault_of(path) is None), None)
    own = [0, []] if newest is None else [step_of(newest), read_progress(newest).resume_ids]
    every = world.gather_values(own, "every disk's newest checkpoint")
    ids = every[0][1]
    _, step, source = max((len(of), step, -i) for i, (step, of) in enumerate(every) if of[: len(ids)] == ids)
    if not source or not step:
        return
    final, unfinished = folder / f"step-{step:08d}", folder / f".unfinished-{step:08d}"
    what, pieces = f"copying {final} from rank {-source}", _pieces_of(final) if world.rank == -source else iter(())
    with world.agreeing(what):
        if world.rank == 0:
            shutil.rmtree(unfinished, ignore_errors=True)
            unfinished.mkdir(parents=True)
    while piece := world.gather_values(next(pieces, None), what)[-source]:
        if world.rank == 0:
            with (unfinished / Path(piece[0]).name).open("ab") as copy:
                copy.write(base64.b64decode(piece[1]))
    with world.agreeing(what):
        if world.rank == 0:
            _put_in_place(unfinished, final)


def _pieces_of(path: Path) -> Iterator[tuple[str, str]]:
    """Every file of a folder: its name, and some of its bytes in base64."""
    for file in sorted(path.iterdir()):
        with file.open("rb") as stream:
            while piece := stream.read(PIECE_BYTES):
                yield file.name, base64.b64encode(piece).decode()


def read_arrays(path: Path) -> Arrays:
    """The arrays of a safetensors file, not evaluated yet; UserError where it cannot be read."""
    try:
        return dict(mx.load(str(path)))
    except (RuntimeError, ValueError) as error:
        raise UserError(f"{path} cannot be read: {str(error).splitlines()[0]}") from None


def restore_all(
    path: Path | None, model: nn.Module, optimizer: optim.Optimizer, start: Progress, world: World
) -> Progress:
    """Takes every rank to rank 0's checkpoint, or to `start` where there is none; AgreedError where it does not fit."""
    optimizer.init(model.trainable_parameters())
    progress = start
    with world.agreeing("resuming"):
        if path is not None and world.rank == 0:
            progress = read_progress(path)
            if progress.data_digest != start.data_digest:
                remedy = f"put the file back, or start a new run with model.adapter={path}"
                raise UserError(f"{path}: data.train is no longer what this run was trained on; {remedy}")
    progress = Progress(**world.broadcast_value(asdict(progress)))
    if path is not None and progress.step:
        restore_learned(path, model, optimizer, world)
    return progress


def restore_weights(path: Path, model: nn.Module, world: World) -> None:
    """Gives every rank its part of the weights of a checkpoint of rank 0's; AgreedError where they do not fit."""
    wanted = world.whole(adapter_files.trainable(model))
    model.update(tree_unflatten(common_at(path, adapter_files.ADAPTER_WEIGHTS, world, wanted)) or {})


def restore_learned(path: Path, model: nn.Module, optimizer: optim.Optimizer, world: World) -> None:
    """`restore_weights`, and the optimizer's state."""
    restore_weights(path, model, world)
    if step_of(path):  # before the first step there need not be any
        state = common_at(path, OPTIMIZER, world, world.whole(flat_state(optimizer)))
        optimizer.state = tree_unflatten(state)


def common_at(path: Path | None, name: str, world: World, wanted: Described | None = None) -> Arrays:
    """This rank's part of a file of a checkpoint of rank 0's; without `wanted` empty where it has none."""
    arrays: Arrays = {}
    with world.agreeing("reading a checkpoint"):
        if world.rank == 0 and path is not None and (wanted is not None or (path / name).is_file()):
            arrays = read_arrays(path / name)
            if wanted is not None:
                arrays = adapter_files.fitted(wanted, arrays, f"{path}: {name}")
    parts = dict(world.scattered(arrays))
    mx.eval(parts)
    return parts


def own_part_at(path: Path, world: World) -> RankArrays:
    """What this rank alone had at a checkpoint, unless a rank has lost its part; and the merges' momentum."""
    own: RankArrays = {}
    offered = read_progress(path).parts if world.rank == 0 else []
    if not _ranks_without_part(path, world.broadcast_value(offered), world):
        with world.agreeing("reading every rank's part of a checkpoint"):
            own = load_part(part_of(path.parent, step_of(path), world.rank))
    return own | {"momentum": common_at(path, MOMENTUM, world)}


def go_back(logs: Path, progress: Progress, world: World, is_keeper: bool) -> None:
    """Notes the resume, and cuts every log on this disk back to the history that lives on; later checkpoints go."""
    progress.resumes.append([progress.step, *progress.rounds.get("local_steps", [])])
    progress.resume_ids.append(world.broadcast_text(os.urandom(8).hex()))
    history = progress.resumes, progress.resume_ids
    with world.agreeing("going back in the logs"):
        own_logs = sorted(path for path in logs.glob("rank-*.jsonl") if path.stem[5:].isdigit()) if is_keeper else []
        lived = max((first_missed(log, *history) for log in own_logs), default=progress.step)
        is_known = bool(progress.step or progress.before)  # rounds have a checkpoint before the first step
        for log in own_logs:
            rewind(log, first_missed(log, *history, 1 + int(log.stem[5:])) if is_known else -1)
        for path in checkpoints_in(logs.parent / "checkpoints") if own_logs and is_known else ():
            if step_of(path) > lived:  # of steps that are undone: they would be taken for the newest
                discard(path)
