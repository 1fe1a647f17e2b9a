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
from lib.training.step import StepResult
from lib.training.training_run import TrainingRun

FOLDER = "recent"
KEPT = 2  # steps of each rank: ranks that end at different moments have one of them in common
BYTES_PER_SECOND = 8e6  # written on average: a larger state is written after fewer steps, and takes 1 % of the time
MOST_BYTES = 2**28  # checkpoints come about as often as larger states would
FILE = re.compile(r"(step|settled)-(\d{8,})-rank-(\d{3,})\.safetensors")


@dataclass(frozen=True)
class Recent:
    """The state of one rank after a step, as its file has it.

    Args:
        arrays: not read yet; by what they are and name.
        rank: whose it is, among ranks on `hosts`.
        is_settled: whether all of them had the step in their logs for sure: this rank went on to a later one.
    """

    progress: Progress
    arrays: RankArrays
    rank: int
    hosts: list[str]
    is_settled: bool


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

    def keep(self, result: StepResult) -> None:
        """Writes the state after a step, if it is time: all ranks know when, by the step's figures.

        A step is left out whose update was, and one before which a rank's records waited for room on its disk.
        """
        run, progress = self.run, self.run.progress
        self.unkept_seconds += result.elapsed_seconds
        if self.is_off or self.unkept_seconds < self.every_seconds or progress.skipped_in_row or result.unwritten:
            return
        self.unkept_seconds = 0.0
        run.count_wall_seconds()
        arrays = {f"{kind}/{name}": array for kind, held in held_by(run).items() for name, array in held.items()}
        described = dict(sorted(adapter_files.described(arrays).items()))
        bits = adapter_files.raw(arrays)
        if run.tracker.has_unwritten or not bits_are_finite((described[name][1], each) for name, each in bits):
            return
        told = {"boot": boot_id(), "layout": layout_of(run), "hosts": json.dumps(run.hosts)}
        told["progress"] = json.dumps(asdict(progress))
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
    """What has to be the same for a rank's file to be of use to it: how the model is divided."""
    plan = run.schedule.at(run.progress.step + 1)
    division = asdict(plan.division) if plan.division else None
    return json.dumps([plan.strategy, plan.blocks, division])


def found_by_all(run: TrainingRun) -> tuple[dict[int, Recent], dict[int, list[str]]]:
    """This rank's states by step; and of those from which all ranks can go on, the resumes before each.

    All ranks call it. Who has the state of a step has the step in its log. So all go on from a step of which each has a
    state, if they are all that there were. Of replicas any one's will do, if it is settled: a rank that is gone may
    have been ended before it wrote the step down.
    """
    world, found = run.world, _whole_ones(run)
    own = {one.progress.step: one for one in found if one.rank == world.rank and one.hosts == run.hosts}
    known = [[step, one.progress.resume_ids] for step, one in own.items()]
    texts = world.gather_long_text(json.dumps(known), "every rank's recent states")
    common = in_common([dict(json.loads(text)) for text in texts])
    if world.divides_model or run.config.sync.compression != "none":
        return own, common
    settled = {one.progress.step: one for one in found if one.is_settled} if world.rank == 0 else {}
    told = world.broadcast_text(json.dumps([[step, one.progress.resume_ids] for step, one in settled.items()]))
    return settled | own, dict(json.loads(told)) | common


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


def forget(run: TrainingRun, kept: Recent | None = None) -> None:
    """Removes all states on this disk but those of one step: of steps that are undone, or of a run that is over.

    kept: what this rank goes on from, where it has that.
    """
    folder, rank = run.folder / FOLDER, run.world.rank
    if kept is not None:
        name, step = f"rank-{rank:03d}.safetensors", kept.progress.step
        for path in _files_of(folder, kept.rank):
            if int(path.name.split("-")[1]) == step:
                path.replace(folder / f"settled-{step:08d}-{name}")
    if run.lock is None:
        return
    mine = [f"rank-{other:03d}.safetensors" for other, host in enumerate(run.hosts) if host == run.hosts[rank]]
    kept_names = [f"{kind}-{kept.progress.step:08d}-{name}" for kind in ("step", "settled") for name in mine if kept]
    for path in folder.glob("*"):
        if path.name not in kept_names:
            path.unlink(missing_ok=True)
    if kept is None:
        with contextlib.suppress(OSError):
            folder.rmdir()


def _files_of(folder: Path, rank: int | None) -> list[Path]:
    """The states of a rank, or of all, newest first."""
    found = [(int(named[2]), path) for path in folder.glob("*") if (named := FILE.fullmatch(path.name))]
    ending = "" if rank is None else f"-rank-{rank:03d}.safetensors"
    return [path for _, path in sorted(found, reverse=True) if path.name.endswith(ending)]


def _whole_ones(run: TrainingRun) -> list[Recent]:
    """The states on this disk that fit the run as it is now. A file that anybody changed or damaged is passed over."""
    wanted = {kind: adapter_files.described(held) for kind, held in held_by(run).items()}
    found: list[Recent] = []
    for path in _files_of(run.folder / FOLDER, run.world.rank if run.world.divides_model else None):
        with contextlib.suppress(RuntimeError, ValueError, KeyError, TypeError, OSError, UserError):
            kind, step, _, rank = path.name.removesuffix(".safetensors").split("-")
            arrays, told = mx.load(str(path), return_metadata=True)
            progress = progress_of(told["progress"], int(step))
            trees: RankArrays = {kind: {} for kind in wanted}
            for name, array in arrays.items():
                of, _, rest = name.partition("/")
                trees[of][rest] = array
            fits = all(adapter_files.described(trees[kind]) == wanted[kind] for kind in ("weights", "reference"))
            is_of_this_run = progress.data_digest == run.progress.data_digest and told["boot"] == boot_id() != ""
            if fits and is_of_this_run and told["layout"] == layout_of(run):
                later = [one for one in found if one.rank == int(rank)]
                is_settled = kind == "settled" or any(one.progress.resume_ids == progress.resume_ids for one in later)
                found.append(Recent(progress, trees, int(rank), json.loads(told["hosts"]), is_settled))
    return found
