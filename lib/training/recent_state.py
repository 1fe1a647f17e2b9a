"""The state after a run's newest steps: what it wrote outlasts a process that is killed, and no power cut.

A checkpoint is flushed to the disk and agreed on, which takes its time, so it comes seldom. What ends a process alone
leaves its files as they are. So each rank writes after nearly every step what it holds of the run, without a flush and
without a word to the others. A resume goes on from there, where every rank that has to has the same step, and its
machine has not been off since; else from the last checkpoint. ("Gemini: Fast Failure Recovery in Distributed Training
with In-Memory Checkpoints", SOSP 2023, keeps such states in other machines' memory.)
"""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import mlx.core as mx
from mlx.utils import tree_flatten, tree_unflatten

from lib.errors import UserError
from lib.model import adapter_files
from lib.system.hardware import boot_id
from lib.training.checkpoint import Progress, RankArrays
from lib.training.find_checkpoint import progress_of
from lib.training.finite import bits_are_finite
from lib.training.training_run import TrainingRun

FOLDER = "recent"
KEPT = 2  # steps of each rank: ranks that end at different moments have one of them in common
BYTES_PER_SECOND = 8e6  # written on average: a larger state is written after fewer steps, and takes 1 % of the time
MOST_BYTES = 2**28  # checkpoints come about as often as larger states would
FILE = re.compile(r"step-(\d{8,})-rank-(\d{3,})\.safetensors")


@dataclass(frozen=True)
class Recent:
    """The state of one rank after a step, as its file has it.

    arrays: not read yet; by what they are and name.
    """

    progress: Progress
    arrays: RankArrays


@dataclass
class RecentState:
    """Writes one rank's state after its steps. Ranks that write at the same steps do so without asking each other."""

    run: TrainingRun
    unkept_seconds: float = 0.0

    def __post_init__(self) -> None:
        world = self.run.world
        own = str(sum(array.nbytes for kind in held_by(self.run).values() for array in kind.values()))
        largest = max(map(int, world.gather_text(own, "the size of every rank's state")))
        self.every_seconds = largest / BYTES_PER_SECOND
        # A round may be undone, and has a checkpoint of its own.
        self.is_off = largest > MOST_BYTES or bool(self.run.config.rollouts.rounds)

    def keep(self, elapsed_seconds: float) -> None:
        """Writes the state after a step, if it is time. elapsed_seconds: since the step before, as all ranks know it.

        A state whose records wait for room on the disk is left out, and one that is about to be computed again.
        """
        run, progress = self.run, self.run.progress
        self.unkept_seconds += elapsed_seconds
        is_due = self.unkept_seconds >= self.every_seconds and not self.is_off
        if not is_due or progress.skipped_in_row or run.tracker.has_unwritten:
            return
        self.unkept_seconds = 0.0
        run.count_wall_seconds()
        arrays = {f"{kind}/{name}": array for kind, held in held_by(run).items() for name, array in held.items()}
        described = dict(sorted(adapter_files.described(arrays).items()))
        bits = adapter_files.raw(arrays)
        if not bits_are_finite((described[name][1], each) for name, each in bits):
            return
        told = {"boot": boot_id(), "layout": layout_of(run), "progress": json.dumps(asdict(progress))}
        path = run.folder / FOLDER / f"step-{progress.step:08d}-rank-{run.world.rank:03d}.safetensors"
        with contextlib.suppress(OSError):  # a full disk: the next checkpoint says so
            adapter_files.write_arrays(path, described, bits, told=told, durable=False)
            for older in _files_of(path.parent, run.world.rank)[KEPT:]:
                older.unlink()


def held_by(run: TrainingRun) -> RankArrays:
    """All that a rank holds and training changes: arrays by name, by what they are."""
    moving = run.reference.arrays if run.reference is not None else {}
    state = dict(tree_flatten(run.optimizer.state))
    held = {"weights": adapter_files.trainable(run.model), "optimizer": state, "reference": moving}
    return {**held, "feedback": run.feedback}


def layout_of(run: TrainingRun) -> str:
    """What has to be the same for a rank's file to be of use to it: how many ranks there are, and what each holds."""
    plan = run.schedule.at(run.progress.step + 1)
    division = asdict(plan.division) if plan.division else None
    return json.dumps([plan.strategy, run.world.size, plan.blocks, division])


def found_by_all(run: TrainingRun) -> tuple[dict[int, Recent], dict[int, list[str]]]:
    """This rank's states by step; and of those from which all ranks can go on, the resumes before each.

    All ranks call it. Of replicas rank 0's will do: the others take its.
    """
    needs_all = run.world.divides_model or run.config.sync.compression != "none"
    recents = _whole_ones(run) if needs_all or run.world.rank == 0 else []
    mine = {recent.progress.step: recent for recent in recents}
    known = json.dumps([[step, recent.progress.resume_ids] for step, recent in mine.items()])
    texts = run.world.gather_long_text(known, "every rank's recent states")
    every = [dict(json.loads(text)) for text in texts]
    return mine, in_common(every if needs_all else every[:1])


def in_common(every: Sequence[Mapping[int, list[str]]]) -> dict[int, list[str]]:
    """What is the same on all ranks. every: of each rank, the resumes before each of its states, by step."""
    first, *others = every
    return {step: ids for step, ids in first.items() if all(theirs.get(step) == ids for theirs in others)}


def newest(states: Mapping[int, Sequence[str]], step: int, resume_ids: Sequence[str]) -> int | None:
    """The last of these states' steps that goes on from a checkpoint: after it, and of its history.

    states: the resumes before each. step, resume_ids: of the checkpoint; -1 and none without one.
    """
    after = (one for one, ids in states.items() if one > step and list(ids[: len(resume_ids)]) == list(resume_ids))
    return max(after, default=None)


def restore(run: TrainingRun, mine: Recent | None) -> RankArrays:
    """Takes a run to a state that `found_by_all` found, on every rank; returns what this rank alone had there.

    mine: None on a rank that takes rank 0's.
    """
    world, model = run.world, run.model
    run.optimizer.init(model.trainable_parameters())
    told = world.broadcast_text(json.dumps(asdict(mine.progress)) if mine is not None else "")
    run.progress = Progress(**json.loads(told))
    held = mine.arrays if mine is not None else {}
    whole = {kind: dict(held.get(kind, {})) for kind in ("weights", "optimizer", "reference")}
    if not world.divides_model:
        whole = {kind: dict(world.scattered(arrays)) for kind, arrays in whole.items()}
    model.update(tree_unflatten(list(whole["weights"].items())) or {})
    run.optimizer.state = tree_unflatten(list(whole["optimizer"].items()))
    if run.reference is not None:
        run.reference.arrays = whole["reference"]
    feedback = held.get("feedback", {})
    mx.eval(model.trainable_parameters(), run.optimizer.state, whole["reference"], feedback)
    return {"feedback": feedback} if feedback else {}


def forget(run: TrainingRun, kept_step: int | None = None) -> None:
    """Removes this rank's states but one: they are of steps that are undone, or of a run that is over.

    The rank that keeps a disk removes those of ranks that are no more, too.
    """
    for path in (run.folder / FOLDER).glob("*"):
        named = FILE.fullmatch(path.name)
        step, owner = (int(named[1]), int(named[2])) if named else (None, None)
        is_mine = owner == run.world.rank or (run.lock is not None and (owner is None or owner >= run.world.size))
        if is_mine and (step is None or step != kept_step):
            path.unlink(missing_ok=True)
    if kept_step is None:
        with contextlib.suppress(OSError):
            (run.folder / FOLDER).rmdir()


def _files_of(folder: Path, rank: int) -> list[Path]:
    """A rank's states, newest first."""
    found = [(int(named[1]), path) for path in folder.glob("step-*") if (named := FILE.fullmatch(path.name))]
    return [path for _, path in sorted(found, reverse=True) if path.name.endswith(f"-rank-{rank:03d}.safetensors")]


def _whole_ones(run: TrainingRun) -> list[Recent]:
    """This rank's states that fit the run as it is now. A file that anybody changed or damaged is passed over."""
    wanted = {kind: adapter_files.described(held) for kind, held in held_by(run).items()}
    found = []
    for path in _files_of(run.folder / FOLDER, run.world.rank):
        with contextlib.suppress(RuntimeError, ValueError, KeyError, TypeError, OSError, UserError):
            arrays, told = mx.load(str(path), return_metadata=True)
            progress = progress_of(told["progress"], int(path.name.split("-")[1]))
            trees: RankArrays = {kind: {} for kind in wanted}
            for name, array in arrays.items():
                kind, _, rest = name.partition("/")
                trees[kind][rest] = array
            fits = all(adapter_files.described(trees[kind]) == wanted[kind] for kind in ("weights", "reference"))
            is_of_this_run = progress.data_digest == run.progress.data_digest and told["boot"] == boot_id() != ""
            if fits and is_of_this_run and told["layout"] == layout_of(run):
                found.append(Recent(progress, trees))
    return found
