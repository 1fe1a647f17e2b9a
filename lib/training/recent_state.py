"""The state after a run's newest steps: what it wrote outlasts a process that is killed, and no power cut.

A checkpoint is flushed to the disk and agreed on, which takes its time, so it comes seldom. What ends a process alone
leaves its files as they are. So each rank writes after nearly every step what it holds of the run, without a flush and
without a word to the others. A resume goes on from there, where every rank that has to has the same step, and its
machine has not been off since; else from the last checkpoint. ("Gemini: Fast Failure Recovery in Distributed Training
with In-Memory Checkpoints", SOSP 2023, keeps such states in other machines' memory.)
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import re
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import NamedTuple

import mlx.core as mx
import numpy as np
from mlx.utils import tree_flatten, tree_unflatten
from pydantic import TypeAdapter

from lib.config import read_file
from lib.errors import UserError
from lib.model import adapter_files
from lib.system.hardware import boot_id
from lib.training.checkpoint import Progress, RankArrays
from lib.training.find_checkpoint import is_sound, progress_of
from lib.training.finite import bits_are_finite
from lib.training.local_sgd import Unfinished
from lib.training.step import StepResult
from lib.training.training_run import TrainingRun

FOLDER = "recent"
KEPT = 2  # meetings of each rank: ranks that end at different moments have one of them in common
BYTES_PER_SECOND = 8e6  # written on average: a larger state is written after fewer steps, and takes 1 % of the time
MOST_BYTES = 2**28  # checkpoints come about as often as larger states would
FILE = re.compile(r"(step|settled)-(\d{8,})-rank-(\d{3,})\.safetensors")


@dataclass(frozen=True)
class Recent:
    """The state of one rank, as its file has it.

    Args:
        progress: after the last step in which all ranks met; independent ranks have trained `unfinished` since then.
        arrays: not read yet; by what they are and name.
        rank: whose it is, among ranks on `hosts`.
        is_settled: whether all of them had the step in their logs for sure: this rank went on to a later one.
    """

    path: Path
    progress: Progress
    arrays: RankArrays
    rank: int
    hosts: list[str]
    is_settled: bool
    unfinished: Unfinished | None

    @property
    def meeting(self) -> Meeting:
        """At which all ranks knew the same."""
        return meeting_of(self.progress)


class Meeting(NamedTuple):
    """A moment at which all ranks knew the same: after a step, or where independent ones synchronised."""

    place: int  # among all of a run
    digest: str  # of what they knew
    step: int
    resume_ids: list[str]


def meeting_of(progress: Progress) -> Meeting:
    """The last one: of independent ranks by the steps that all had taken; a merge comes after them."""
    rounds = progress.rounds
    place = 2 * sum(rounds.get("local_steps", [])) + ("tail" not in rounds) if rounds else progress.step
    known = json.dumps([progress.step, rounds, progress.resume_ids])
    digest = hashlib.sha256(known.encode()).hexdigest()[:16]
    return Meeting(place, digest, progress.step, progress.resume_ids)


@dataclass
class RecentState:
    """Writes one rank's state after its steps. Ranks that write at the same steps do so without asking each other."""

    run: TrainingRun
    unkept_seconds: float = 0.0
    kept: dict[str, Path] = field(default_factory=dict)  # the newest of each meeting, by its digest, in their order

    def __post_init__(self) -> None:
        world = self.run.world
        largest = max(map(int, world.gather_text(str(_bytes_of(self.run)), "the size of every rank's state")))
        self.every_seconds = largest / BYTES_PER_SECOND
        # A round may be undone, and has a checkpoint of its own.
        self.is_off = largest > MOST_BYTES or bool(self.run.config.rollouts.rounds)

    def keep(self, result: StepResult | None, unfinished: Unfinished | None = None) -> None:
        """Writes the state after a step, if it is time: ranks in step know when by figures that all have.

        A step is left out whose update was, and one before which a rank's records waited for room on its disk, or a
        checkpoint was not whole yet: what resumes makes that again.

        Args:
            result: None where independent ranks have met, and no step was taken since.
        """
        run, progress = self.run, self.run.progress
        if result is not None:
            self.unkept_seconds += result.elapsed_seconds
            if self.unkept_seconds < self.every_seconds or result.unwritten:
                return
        # Of a model in parts not every rank hears of the one that writes: without its state none counts.
        if self.is_off or progress.skipped_in_row or run.writer.is_busy:
            return
        self.unkept_seconds = 0.0
        run.count_wall_seconds()
        arrays = {f"{kind}/{name}": array for kind, held in held_by(run).items() for name, array in held.items()}
        described = dict(sorted(adapter_files.described(arrays).items()))
        bits = adapter_files.raw(arrays)
        if run.tracker.has_unwritten or not bits_are_finite((described[name][1], each) for name, each in bits):
            return
        told = {"boot": boot_id(), "layout": layout_of(run), "hosts": json.dumps(run.hosts), "crc32": _checksum(bits)}
        told["progress"] = json.dumps(asdict(progress))
        told["unfinished"] = json.dumps(unfinished and asdict(unfinished))
        step = run.own_step + (unfinished.report.steps if unfinished is not None else 0)
        path = run.folder / FOLDER / f"step-{step:08d}-rank-{run.world.rank:03d}.safetensors"
        with contextlib.suppress(OSError):  # a full disk: the next checkpoint says so
            adapter_files.write_arrays(path, described, bits, told=told, durable=False)
            self._keep_alone(path, meeting_of(progress).digest)

    def _keep_alone(self, path: Path, digest: str) -> None:
        """Removes the state before this one of its meeting, and those of meetings long ago."""
        if (before := self.kept.pop(digest, path)) != path:
            before.unlink(missing_ok=True)
        self.kept[digest] = path
        if len(self.kept) > KEPT:
            self.kept.pop(next(iter(self.kept)))
        others = [one for one in _files_of(path.parent, self.run.world.rank) if one not in self.kept.values()]
        for older in others[KEPT - len(self.kept) :]:  # what the run went on from stays until there are others
            older.unlink(missing_ok=True)


def held_by(run: TrainingRun) -> RankArrays:
    """All that a rank holds and training changes: arrays by name, by what they are."""
    moving = run.reference.arrays if run.reference is not None else {}
    state = dict(tree_flatten(run.optimizer.state))
    held = {"weights": adapter_files.trainable(run.model), "optimizer": state, "reference": moving}
    if (local_sgd := run.local_sgd) is None:
        return {**held, "feedback": run.feedback}
    merger = local_sgd.merger
    return {**held, "start": local_sgd.start, "momentum": merger.momentum, "feedback": merger.feedback}


def misfit_of_own(run: TrainingRun, own: RankArrays) -> str | None:
    """What is not as the run would hold it, of arrays that a rank alone had; None where all fit."""
    weights, state = (
        adapter_files.described(adapter_files.trainable(run.model)),
        dict(tree_flatten(run.optimizer.state)),
    )
    for kind, arrays in own.items():
        found = adapter_files.described(arrays)
        if kind in ("momentum", "feedback"):  # of as many of the weights as there are, in float32
            wanted = {name: (weights[name][0], mx.float32) for name in found.keys() & weights.keys()}
        else:
            wanted = {"weights": weights, "start": weights, "optimizer": adapter_files.described(state)}.get(kind, {})
        if (fault := adapter_files.misfit(wanted, found)) is not None:
            return f"{kind}/{fault}"
    return None


def _bytes_of(run: TrainingRun) -> int:
    """Of a rank's state, once it has trained: two moments of Adam's, and where independent ranks met last."""
    held = held_by(run)
    weights = sum(array.nbytes for array in held["weights"].values())
    known = sum(array.nbytes for kind in held.values() for array in kind.values())
    is_new = len(held["optimizer"]) < len(held["weights"])
    return known + 2 * weights * is_new + (weights if "start" in held and not held["start"] else 0)


def layout_of(run: TrainingRun) -> str:
    """What has to be the same for a rank's file to be of use to it: how the model is divided."""
    plan = run.schedule.at(run.progress.step + 1)
    division = asdict(plan.division) if plan.division else None
    return json.dumps([plan.strategy, plan.blocks, division])


def found_by_all(run: TrainingRun) -> tuple[dict[str, Recent], list[Meeting]]:
    """This rank's states by their meetings' digests; and the meetings from which all ranks can go on, newest first.

    All ranks call it. Who has the state of a step has the step in its log. So all go on from a step of which each has a
    state, if they are all that there were. Of replicas rank 0's will do, if it is settled: a rank that is gone may have
    been ended before it wrote the step down. A host that is here has to vouch for its log: it has some state that came
    later, so it was not off since then.
    """
    world, found = run.world, _whole_ones(run)
    own: dict[str, Recent] = {}
    for one in found:
        if one.rank == world.rank and one.hosts == run.hosts:
            own.setdefault(one.meeting.digest, one)
    told = json.dumps([[one.meeting for one in own.values()], [one.meeting for one in found]])
    every = [json.loads(text) for text in world.gather_long_text(told, "recent states")]
    common = in_common([[Meeting(*one) for one in theirs] for theirs, _ in every])
    if run.local_sgd is None and not world.divides_model and run.config.sync.compression == "none":
        disks = [(host, [Meeting(*one) for one in disk]) for host, (_, disk) in zip(run.hosts, every, strict=True)]
        settled = [one for one in found if one.is_settled and vouched_for(one.meeting, one.hosts, disks)]
        told = world.broadcast_text(json.dumps([one.meeting for one in settled]))
        if world.rank == 0:
            own = {one.meeting.digest: one for one in reversed(settled)} | own
        common += [Meeting(*one) for one in json.loads(told)]
    return own, sorted(common, reverse=True)


def vouched_for(meeting: Meeting, hosts: Sequence[str], disks: Sequence[tuple[str, Sequence[Meeting]]]) -> bool:
    """Whether each host that took part, and is here, has a state of that history from then or later.

    disks: of each rank its host, and the meetings whose states are on its disk.
    """
    return all(
        host not in hosts or any(one.resume_ids == meeting.resume_ids and one.place >= meeting.place for one in on_disk)
        for host, on_disk in disks
    )


def in_common(every: Sequence[Sequence[Meeting]]) -> list[Meeting]:
    """The meetings that all ranks have. every: those of each rank."""
    first, *others = every
    return [one for one in first if all(one in theirs for theirs in others)]


def newest(meetings: Sequence[Meeting], before: Meeting | None, is_inside: bool) -> Meeting | None:
    """The first of them that goes on from a checkpoint: after it, and of its history.

    Args:
        before: the checkpoint's; None without one.
        is_inside: whether ranks have trained on since they met: then it is the checkpoint's own, too.
    """
    place, ids = (before.place, before.resume_ids) if before is not None else (-1, [])
    return next((one for one in meetings if one.place + is_inside > place and one.resume_ids[: len(ids)] == ids), None)


def restore(run: TrainingRun, mine: Recent | None) -> RankArrays:
    """Takes a run to a state that `found_by_all` found, on every rank; returns what this rank alone had there.

    mine: None on a rank that takes rank 0's.
    """
    world, model = run.world, run.model
    told = world.broadcast_text(json.dumps(asdict(mine.progress)) if mine is not None else "")
    run.progress = Progress(**json.loads(told))
    held = mine.arrays if mine is not None else {}
    whole = {kind: dict(held.get(kind, {})) for kind in ("weights", "optimizer", "reference")}
    if not world.divides_model and run.local_sgd is None:
        whole = {kind: dict(world.scattered(arrays)) for kind, arrays in whole.items()}
    model.update(tree_unflatten(list(whole["weights"].items())) or {})
    run.optimizer.state = tree_unflatten(list(whole["optimizer"].items()))
    if run.reference is not None:
        run.reference.arrays = whole["reference"]
    own = {kind: arrays for kind, arrays in held.items() if kind in ("start", "momentum", "feedback") and arrays}
    mx.eval(model.trainable_parameters(), run.optimizer.state, whole["reference"], own)
    return own


def forget(run: TrainingRun, kept: Recent | None = None) -> None:
    """Removes the states of this run's ranks but one of each: of steps that are undone, or of a run that is over.

    All ranks call it: whoever keeps a disk removes what is there, once each rank has named what it goes on from.

    kept: what this rank goes on from, where it has that.
    """
    folder, name = run.folder / FOLDER, ""
    if kept is not None:
        name = f"settled-{kept.path.name.split('-')[1]}-rank-{run.world.rank:03d}.safetensors"
        with contextlib.suppress(OSError):
            kept.path.replace(folder / name)
    names = run.world.gather_text(name, "the states that ranks go on from")
    for path in folder.glob("*") if run.lock is not None else ():
        if FILE.match(path.name) and path.name not in names:  # also one that was not whole yet
            with contextlib.suppress(OSError):
                path.unlink()
    if not any(names):
        with contextlib.suppress(OSError):
            folder.rmdir()


def _checksum(bits: Sequence[tuple[str, np.ndarray]]) -> str:
    """Of arrays' bytes, in their order: nobody waited for a flush, and somebody may have changed the file."""
    checksum = 0
    for _, each in bits:
        checksum = zlib.crc32(each.data, checksum)
    return f"{checksum:08x}"


def _files_of(folder: Path, rank: int | None) -> list[Path]:
    """The states of a rank, or of all, newest first."""
    found = [(int(named[2]), path) for path in folder.glob("*") if (named := FILE.fullmatch(path.name))]
    ending = "" if rank is None else f"-rank-{rank:03d}.safetensors"
    return [path for _, path in sorted(found, reverse=True) if path.name.endswith(ending)]


def _whole_ones(run: TrainingRun) -> list[Recent]:
    """The states on this disk that fit the run as it is now. A file that anybody changed or damaged is passed over."""
    found: list[Recent] = []
    for path in _files_of(run.folder / FOLDER, run.world.rank if run.world.divides_model else None):
        with contextlib.suppress(RuntimeError, ValueError, KeyError, TypeError, OSError, UserError):
            kind, _, _, rank = path.name.removesuffix(".safetensors").split("-")
            read_file.require_regular(path, "state")
            arrays, told = mx.load(str(path), return_metadata=True)
            progress, unfinished = progress_of(told["progress"]), _unfinished_of(told["unfinished"])
            hosts = _HOSTS.validate_json(told["hosts"])
            trees: RankArrays = {}
            for name, array in arrays.items():
                of, _, rest = name.partition("/")
                trees.setdefault(of, {})[rest] = array
            fits = _fits(run, trees, progress, unfinished) and told["layout"] == layout_of(run)
            is_of_this_run = progress.data_digest == run.progress.data_digest and told["boot"] == boot_id() != ""
            if fits and is_of_this_run and _are_as_written(arrays, told["crc32"]):
                later = [one for one in found if one.rank == int(rank)]
                is_settled = kind == "settled" or any(one.progress.resume_ids == progress.resume_ids for one in later)
                found.append(Recent(path, progress, trees, int(rank), hosts, is_settled, unfinished))
    return found


_HOSTS = TypeAdapter(list[str])
_UNFINISHED = TypeAdapter(Unfinished | None)


def _unfinished_of(text: str) -> Unfinished | None:
    """Raises ValueError where it is none that a rank goes on from."""
    unfinished = _UNFINISHED.validate_json(text)
    if unfinished is not None:
        report = unfinished.report
        if report.stopped or report.failed or not is_sound(asdict(unfinished)):
            raise ValueError("a rank that had ended, or counts below 0")
    return unfinished


def _fits(run: TrainingRun, trees: RankArrays, progress: Progress, unfinished: Unfinished | None) -> bool:
    """Whether these are the arrays that the run holds after such a step."""
    is_apart = run.local_sgd is not None
    moving = run.reference.arrays if run.reference is not None else {}
    reference = adapter_files.described(trees.get("reference", {}))
    kinds = ("weights", "optimizer", *(["start"] if is_apart else []))
    own = {kind: trees.get(kind, {}) for kind in dict.fromkeys([*kinds, *trees]) if kind != "reference"}
    return (
        misfit_of_own(run, own) is None
        and adapter_files.misfit(adapter_files.described(moving), reference) is None
        and (unfinished is not None or not is_apart)
        and progress.step + is_apart <= run.steps
    )


def _are_as_written(arrays: Mapping[str, mx.array], checksum: str) -> bool:
    """Whether the arrays have the bits that were written, and all numbers are finite."""
    bits = adapter_files.raw(arrays)
    return _checksum(bits) == checksum and bits_are_finite((arrays[name].dtype, each) for name, each in bits)
