"""Which checkpoint ranks can go on from, and how they do."""

from __future__ import annotations

import contextlib
import json
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TypedDict

import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers as optim
from mlx.utils import tree_flatten, tree_unflatten

from lib.distributed import heartbeat
from lib.distributed.compression import Arrays
from lib.distributed.world import Described, World
from lib.errors import AgreedError, UserError
from lib.model import adapter_files, checkpointing
from lib.telemetry.run_records import first_missed, rewind
from lib.training import recent_state
from lib.training.checkpoint import (
    OPTIMIZER,
    REFERENCE,
    MovingReference,
    Progress,
    RankArrays,
    checkpoints_in,
    file_sha256,
    inside_a_round,
    load_part,
    part_of,
    prune,
    prune_parts,
    step_of,
)
from lib.training.find_checkpoint import fault_of, read_progress
from lib.training.local_sgd import LocalSGD
from lib.training.recent_state import Meeting, Recent
from lib.training.run_folder import discard
from lib.training.training_run import TrainingRun

WRITES_APART = 2  # one goes on beside training, and the next may begin elsewhere before it is done
RANK_LOG = re.compile(r"rank-[0-9]{3,6}\.jsonl")


class Offer(TypedDict):
    """A checkpoint, or a state after it, as rank 0 offers it to all."""

    path: str  # empty: of a state that ranks have kept after one (lib/training/recent_state.py)
    step: int
    parts: list[str]  # the hash of every rank's own part; of such a state its meeting's
    whole: bool  # whether the ranks had the same weights
    resume_ids: list[str]  # of the resumes before it
    wall_seconds: float  # that the run had taken at the checkpoint


def resume_run(run: TrainingRun) -> None:
    """Takes a run to the last good checkpoint, or to a state after it, on every rank.

    Raises:
        AgreedError: a checkpoint does not fit the run as it is now.
    """
    world = run.world
    run.optimizer.init(run.model.trainable_parameters())
    chosen = _take_up(run, *recent_state.found_by_all(run))
    for warning in chosen.warnings:
        run.say.warning(warning)
    if run.progress.schedule and not _restores(run):
        run.say.line("hosts or settings are no longer those of the checkpoint: the work is divided anew")
    if run.schedule.at(run.progress.step + 1).gradient_checkpointing and not run.plan.gradient_checkpointing:
        checkpointing.checkpoint_blocks(run.model)
    taken = run.local_sgd.unfinished.report.steps if run.local_sgd and run.local_sgd.unfinished else 0
    own_steps = [int(text) for text in world.gather_text(str(taken), "every rank's steps since all met")]
    go_back(run.folder / "logs", run.progress, world, run.lock is not None, own_steps)
    _prune(run)
    source = f"checkpoints/{chosen.path.name}" if chosen.path is not None else "its beginning"
    source = source if chosen.recent is None else recent_state.FOLDER
    run.say.line(f"resuming {run.folder} after step {run.progress.step} of {run.steps}, from {source}")


def _take_up(run: TrainingRun, states: Mapping[str, Recent], meetings: Sequence[Meeting]) -> Choice:
    """Takes a run to one of these states, or to a checkpoint.

    Raises:
        AgreedError: a checkpoint does not fit the run as it is now.
    """
    folder, world, local_sgd = run.folder / "checkpoints", run.world, run.local_sgd
    disk_of = run.hosts[world.rank] if run.lock is not None else None
    chosen = choose(folder, world, disk_of, meetings, is_inside=local_sgd is not None)
    kept = states.get(chosen.recent) if chosen.recent is not None else None
    if chosen.recent is not None and local_sgd is not None:
        others = world.gather_text("" if _would_go_on(local_sgd, kept) else "other", "whether all take the same rows")
        if any(others):  # the work is divided in another way than before
            chosen, kept = choose(folder, world, disk_of), None
    if chosen.recent is not None:
        own = recent_state.restore(run, kept)
        run.writer.unsaved_seconds = max(0.0, run.progress.wall_seconds - chosen.saved_wall_seconds)
    else:
        run.progress = restore_all(chosen.path, run.model, run.optimizer, run.progress, world)
        if run.reference is not None and chosen.path is not None:
            restore_reference(chosen.path, run.reference, world)
        own = _own_part(run) if chosen.with_parts else {}
    if run.progress.cursor >= len(run.inputs.data) and not run.config.rollouts.rounds:
        raise AgreedError(
            f"{chosen.path or run.folder}: row {run.progress.cursor} of {len(run.inputs.data)} comes next"
        )
    if "weights" in own:
        run.model.update(tree_unflatten(list(own["weights"].items())))
    if "optimizer" in own:
        run.optimizer.state = tree_unflatten(list(own["optimizer"].items()))
    run.feedback, run.resumed = own.get("feedback", {}), own
    if local_sgd is not None and not run.config.rollouts.rounds:
        local_sgd.resume(run.progress, own, kept.unfinished if kept is not None else None)
    elif local_sgd is None and run.progress.rounds:
        raise AgreedError(f"{run.folder} is a run of independent ranks; go on with strategy=independent")
    recent_state.forget(run, kept)
    return chosen


def _own_part(run: TrainingRun) -> RankArrays:
    """What this rank alone had at the checkpoint that it was taken to.

    Raises:
        AgreedError: one of the ranks cannot read its part, or it does not fit the run.
    """
    folder, step, rank = run.folder / "checkpoints", run.progress.step, run.world.rank
    own: RankArrays = {}
    with run.world.agreeing("resuming"):
        try:
            own = load_part(folder, step, rank)
        except (RuntimeError, ValueError) as error:
            raise UserError(f"{part_of(folder, step, rank)} cannot be read: {str(error).splitlines()[0]}") from None
        if (fault := recent_state.misfit_of_own(run, own)) is not None:
            raise UserError(f"{part_of(folder, step, rank)} does not fit the run: {fault}")
    return own


def _would_go_on(local_sgd: LocalSGD, kept: Recent | None) -> bool:
    """Whether this rank can go on behind what it trained since all met."""
    with contextlib.suppress(KeyError, TypeError, ValueError, IndexError, ArithmeticError):  # somebody changed it
        if kept is not None and kept.unfinished is not None:
            return local_sgd.would_go_on(kept.progress, kept.unfinished)
    return False


def _prune(run: TrainingRun) -> None:
    """Removes old checkpoints that a crash kept the last one from removing: where it was the run's, none follows it."""
    folder, world = run.folder / "checkpoints", run.world
    if run.lock is not None:
        prune(folder, run.config.checkpoint.keep, run.progress.best_step)
    kept = json.dumps([step_of(path) for path in checkpoints_in(folder)]) if world.rank == 0 else ""
    prune_parts(folder, json.loads(world.broadcast_text(kept)), world.rank, world.size)


def _restores(run: TrainingRun) -> bool:
    """Whether the plans of the checkpoint are in force again."""
    try:
        restores = run.schedule.restore(run.progress.schedule)
        if restores and not any(first <= run.progress.step + 1 for first, _ in run.schedule.plans):
            raise ValueError(f"none of step {run.progress.step + 1}")
        return restores
    except (KeyError, TypeError, ValueError, IndexError, AttributeError) as error:
        raise AgreedError(f"{run.folder}: the plans in its checkpoint are not what a run writes: {error!r}") from None


@dataclass(frozen=True)
class Choice:
    """What ranks go on from.

    path: of a checkpoint; None where there is none, or a newer state. with_parts: with every rank's own part of it.
    recent: the digest of the newer state's meeting (lib/training/recent_state.py). saved_wall_seconds: how long the run
    had taken when the checkpoint before it came.
    """

    path: Path | None
    with_parts: bool
    warnings: list[str]
    recent: str | None = None
    saved_wall_seconds: float = 0.0


def choose(
    folder: Path,
    world: World,
    disk_of: str | None = None,
    recent: Sequence[Meeting] = (),
    is_inside: bool = False,
) -> Choice:
    """The newest checkpoint, or state after it, that these ranks can go on from.

    Rank 0 has the checkpoints; each rank looks for its own part. Without all parts only a checkpoint at which the ranks
    had the same weights will do.

    Args:
        disk_of: the host whose disk this rank keeps; None of a rank that keeps none.
        recent: the meetings of which ranks have states, as all know them.
        is_inside: whether ranks trained on since then.

    Raises:
        AgreedError: another host's disk has a newer one.
    """
    candidates = checkpoints_in(folder) if world.rank == 0 else []
    warnings: list[str] = []
    while True:
        own_offer, meeting, damaged = _newest_whole(candidates)
        if world.rank == 0 and (newer := recent_state.newest(recent, meeting, is_inside)) is not None:
            seconds = own_offer["wall_seconds"] if own_offer else 0.0
            parts, ids = [newer.digest], newer.resume_ids
            own_offer = Offer(path="", step=newer.step, parts=parts, whole=True, resume_ids=ids, wall_seconds=seconds)
        taken = "a newer state" if own_offer and not own_offer["path"] else "the one before it"
        warnings += [f"checkpoint {path} is damaged ({fault}); {taken} is taken" for path, fault in damaged]
        offer: Offer | None = json.loads(world.broadcast_text(json.dumps(own_offer)))
        with world.agreeing("looking for newer checkpoints on other disks"):
            if disk_of is not None and world.rank > 0:
                _require_none_newer(folder, offer, disk_of)
        if offer is None:
            return Choice(None, False, warnings)
        if not offer["path"]:
            return Choice(None, False, warnings, offer["parts"][0], offer["wall_seconds"])
        parts = offer["parts"]
        if not any(parts) and offer["whole"]:
            return Choice(Path(offer["path"]), False, warnings)
        fits = len(parts) == world.size and _has_part(folder, offer["step"], world.rank, parts[world.rank])
        missing = [str(rank) for rank, answer in enumerate(world.gather_text("" if fits else "missing")) if answer]
        if not missing:
            return Choice(Path(offer["path"]), True, warnings)
        why = (
            f"rank {', '.join(missing)}" if len(parts) == world.size else f"{len(parts)} ranks instead of {world.size}"
        )
        if offer["whole"]:
            warnings.append(f"{offer['path']}: no part of {why}; all ranks go on from rank 0's optimizer")
            return Choice(Path(offer["path"]), False, warnings)
        warnings.append(f"{offer['path']} is inside a round, and has no part of {why}; one at a round's end is taken")


def _newest_whole(candidates: list[Path]) -> tuple[Offer | None, Meeting | None, list[tuple[Path, str]]]:
    """The first checkpoint that is whole, its meeting, and those before it with what is wrong.

    All these go from the candidates.
    """
    damaged: list[tuple[Path, str]] = []
    while candidates:
        path = candidates.pop(0)
        if (fault := fault_of(path)) is None:
            saved, whole = read_progress(path), not inside_a_round(path)
            meeting, ids = recent_state.meeting_of(saved), _ids_of(saved)
            offer = Offer(
                path=str(path),
                step=saved.step,
                parts=saved.parts,
                whole=whole,
                resume_ids=ids,
                wall_seconds=saved.wall_seconds,
            )
            return offer, meeting._replace(resume_ids=ids), damaged
        damaged.append((path, fault))
    return None, None, damaged


def _has_part(folder: Path, step: int, rank: int, expected: str) -> bool:
    part = part_of(folder, step, rank)
    try:
        return not expected or (part.is_file() and file_sha256(part) == expected)  # a pipe would never end
    except OSError:
        return False


def _require_none_newer(folder: Path, offer: Offer | None, host: str) -> None:
    """Makes sure that the run did not go on without rank 0's disk: to go back to its offer would remove what this has.

    A checkpoint that lacks one of the offer's resumes is of a history that the others left. Disks that trained together
    are a write or two apart where all ended at once. The launcher is told: it starts all again, with this host first.

    Raises:
        UserError: it did.
    """
    step, ids = (offer["step"], offer["resume_ids"]) if offer is not None else (-1, [])
    newer: list[Path] = []
    for path in checkpoints_in(folder):
        try:
            progress = read_progress(path)
        except (UserError, OSError):  # damaged
            continue
        own_ids, later = _ids_of(progress), progress.resumes[len(ids) :]
        # What was trained after later resumes is newer at any step: they may have gone back behind the offer's.
        is_newer = step_of(path) > (min(step, later[0][0]) if later else step)
        if own_ids[: len(ids)] != ids or not is_newer or inside_a_round(path) or fault_of(path) is not None:
            continue
        newer.append(path)
        if offer is not None and not later and len(newer) <= WRITES_APART:
            continue
        newest = path if later else newer[0]
        if offer is None or later:  # else it may be of an earlier run of this name
            heartbeat.tell(newer={"step": step_of(newest), "resume_ids": own_ids})
        after = " after a later resume" if step_of(newest) <= step else ""
        first = f"the first host's newest is of step {step}" if offer is not None else "the first host has none"
        raise UserError(
            f"{host} has a newer checkpoint of this run, of step {step_of(newest)}{after}; {first}: name {host} "
            f"first in the host file, or, if that is to be undone, move the newer ones out of {folder} there"
        )


def _ids_of(progress: Progress) -> list[str]:
    """One a resume: in a run of an earlier version they have none."""
    return progress.resume_ids + [""] * (len(progress.resumes) - len(progress.resume_ids))


def restore(
    path: Path, wanted: Described, wanted_state: Described, data_digest: str
) -> tuple[Progress, Arrays, Arrays]:
    """A checkpoint: how far it was, its weights and its optimizer's state, both not read yet.

    Raises:
        UserError: weights or state do not fit, or the training data is no longer the same.
    """
    progress = read_progress(path)
    if progress.data_digest != data_digest:
        raise UserError(
            f"{path}: data.train is no longer what this run was trained on; put the file back, "
            f"or start a new run with model.adapter={path}"
        )
    return progress, adapter_files.read_trained(wanted, path, "checkpoint"), _state_in(path, wanted_state)


def _state_in(path: Path, wanted: Described) -> Arrays:
    """The optimizer's state of a checkpoint; before the first step there need not be one.

    Raises:
        UserError: it is damaged, or not of the arrays that the optimizer holds.
    """
    state = _arrays_of(path, OPTIMIZER)
    if step_of(path) and (fault := adapter_files.misfit(wanted, adapter_files.described(state))) is not None:
        raise UserError(f"{path}: {OPTIMIZER} does not fit the model and train.optimizer: {fault}")
    return state


def _arrays_of(path: Path, name: str) -> Arrays:
    try:
        return dict(mx.load(str(path / name)))
    except (RuntimeError, ValueError) as error:
        raise UserError(f"{path}: {name} cannot be read: {str(error).splitlines()[0]}") from None


def _flat(optimizer: optim.Optimizer) -> Arrays:
    """Its state by name."""
    return dict(tree_flatten(optimizer.state))


def restore_all(
    path: Path | None, model: nn.Module, optimizer: optim.Optimizer, start: Progress, world: World
) -> Progress:
    """Takes every rank to rank 0's checkpoint; to `start`, as training would begin, where there is none.

    Raises:
        AgreedError: as `restore`.
    """
    optimizer.init(model.trainable_parameters())
    progress = start
    weights: Arrays = {}
    state: Arrays = {}
    wanted, wanted_state = (world.whole(arrays) for arrays in (adapter_files.trainable(model), _flat(optimizer)))
    with world.agreeing("resuming"):
        if path is not None and world.rank == 0:
            progress, weights, state = restore(path, wanted, wanted_state, start.data_digest)
    progress = Progress(**json.loads(world.broadcast_text(json.dumps(asdict(progress)))))
    if progress.step:
        model.update(tree_unflatten(list(world.scattered(weights))) or {})
        optimizer.state = tree_unflatten(list(world.scattered(state)))
        mx.eval(model.trainable_parameters(), optimizer.state)
    return progress


def restore_weights(path: Path, model: nn.Module, world: World) -> None:
    """Gives every rank its part of the weights of a checkpoint, which rank 0 has on its disk.

    Raises:
        AgreedError: they do not fit the model.
    """
    weights: Arrays = {}
    wanted = world.whole(adapter_files.trainable(model))
    with world.agreeing("going back to a checkpoint"):
        if world.rank == 0:
            weights = adapter_files.read_trained(wanted, path, "checkpoint")
    model.update(tree_unflatten(list(world.scattered(weights))) or {})
    mx.eval(model.trainable_parameters())


def restore_learned(path: Path, model: nn.Module, optimizer: optim.Optimizer, world: World) -> None:
    """Gives every rank its part of the weights and the optimizer's state of a checkpoint of rank 0's.

    Raises:
        AgreedError: it is damaged, or does not fit the model.
    """
    restore_weights(path, model, world)
    state: Arrays = {}
    wanted = world.whole(_flat(optimizer))
    with world.agreeing("going back to a checkpoint"):
        if world.rank == 0:
            state = _state_in(path, wanted)
    optimizer.state = tree_unflatten(list(world.scattered(state)))
    mx.eval(optimizer.state)


def own_part_at(path: Path, world: World) -> RankArrays:
    """What this rank alone had at a checkpoint of rank 0's; nothing on any rank, where one has lost its part.

    Raises:
        AgreedError: the checkpoint is damaged.
    """
    with world.agreeing("going back to a checkpoint"):
        offered = read_progress(path).parts if world.rank == 0 else []
    parts: list[str] = json.loads(world.broadcast_text(json.dumps(offered)))
    step = step_of(path)
    fits = len(parts) == world.size and _has_part(path.parent, step, world.rank, parts[world.rank])
    is_lost = any(world.gather_text("" if fits else "missing", "who has a part of the checkpoint"))
    return {} if is_lost else load_part(path.parent, step, world.rank)


def restore_reference(path: Path, reference: MovingReference, world: World) -> None:
    """Gives every rank its part of a checkpoint's reference, which rank 0 has on its disk.

    Raises:
        AgreedError: it does not fit the model.
    """
    arrays: Arrays = {}
    wanted = world.whole(reference.arrays)
    with world.agreeing("resuming"):
        if world.rank == 0:
            arrays = _arrays_of(path, REFERENCE)
            if {name: (array.shape, array.dtype) for name, array in arrays.items()} != dict(wanted):
                raise UserError(f"{path}: {REFERENCE} does not fit the model")
    reference.arrays = dict(world.scattered(arrays))
    mx.eval(reference.arrays)


def go_back(logs: Path, progress: Progress, world: World, keeps_disk: bool, taken: Sequence[int] | None = None) -> None:
    """Notes the resume, and cuts every log on this disk back to the history that lives on; later checkpoints go.

    taken: steps of every rank that live on beyond those in `progress`, where ranks are independent.
    """
    progress.resume_ids = _ids_of(progress)
    own_steps = list(progress.rounds.get("local_steps", []))
    own_steps[: len(taken or ())] = [one + more for one, more in zip(own_steps, taken or (), strict=False)]
    progress.resumes.append([progress.step, *own_steps])
    progress.resume_ids.append(world.broadcast_text(os.urandom(8).hex()))
    history = progress.resumes, progress.resume_ids
    with world.agreeing("going back in the logs"):
        own_logs = [log for log in sorted(logs.glob("rank-*")) if RANK_LOG.fullmatch(log.name)] if keeps_disk else []
        lived = max((first_missed(log, *history) for log in own_logs), default=progress.step)
        # Rounds have a checkpoint before the first step.
        is_known = bool(progress.step or progress.before or any(taken or ()))
        for log in own_logs:
            index = 1 + int(log.stem.removeprefix("rank-"))
            rewind(log, first_missed(log, *history, index) if is_known else -1)
        for path in checkpoints_in(logs.parent / "checkpoints") if own_logs and is_known else ():
            if step_of(path) > lived:  # of steps that are undone: they would be taken for the newest
                discard(path)
