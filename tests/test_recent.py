"""A run goes on from the last step where processes alone ended, from a checkpoint where anything speaks against it."""

from __future__ import annotations

import gc
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from lib.distributed.world import World
from lib.model import adapter_files
from lib.telemetry.run_records import PerformanceTracker
from lib.training import finite, recent_state
from lib.training.checkpoint import CheckpointWriter
from lib.training.recent_state import Meeting, RecentState, in_common, newest, vouched_for
from lib.training.step import Step
from tests import darwin
from tests.test_world import settings, train
from tests.tiny import difference, rows_of_epochs, steps_of

two = pytest.mark.mpi(min_size=2, max_size=2)
Told = pytest.CaptureFixture[str]


class Killed(BaseException):
    """Nothing catches it."""


@pytest.fixture(autouse=True)
def after_every_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """However small the model is, and however fast the machine."""
    monkeypatch.setattr(recent_state, "BYTES_PER_SECOND", 1e15)


def few_checkpoints(world: World, folder: Path) -> list[str]:
    """Settings of a run of twelve steps, which has none."""
    return [*settings(world, folder, train__epochs=4), "checkpoint.every=99"]


def dies(patch: pytest.MonkeyPatch, step: int, before_it_keeps: bool = False) -> None:
    """From now on a rank is killed after a step of its own, with that step's state or without."""
    keep = RecentState.keep

    def keep_and_die(self: RecentState, result: Any, unfinished: Any = None) -> None:
        own = self.run.own_step + (unfinished.report.steps if unfinished else 0)
        if own >= step and before_it_keeps:
            raise Killed
        keep(self, result, unfinished)
        if own >= step:
            raise Killed

    patch.setattr(RecentState, "keep", keep_and_die)


def killed(world: World, folder: Path, words: list[str], step: int, before_it_keeps: bool = False) -> Path:
    """A run that was."""
    with pytest.MonkeyPatch.context() as patch:
        dies(patch, step, before_it_keeps)
        with pytest.raises(Killed):
            train(world, folder, words, "killed")
    gc.collect()  # frames of the error hold the run's lock
    world.gather_text("killed")
    return folder / "runs/killed"


def resumed(world: World, folder: Path, words: list[str], told: Told) -> int:
    """After which step the run went on, to its end."""
    told.readouterr()
    train(world, folder, words, "killed", resume=True)
    world.gather_text("finished")
    line = next((line for line in told.readouterr().out.splitlines() if line.startswith("resuming")), None)
    return int(line.split(" after step ")[1].split()[0]) if line is not None else -1


def assert_same(whole: Path, again: Path, rank: int = 0) -> None:
    assert difference(whole, again) == 0.0
    logged = [[(r["step"], r["loss"], r["rows"]) for r in steps_of(run, rank)] for run in (whole, again)]
    assert logged[0] == logged[1]
    assert rows_of_epochs(whole) == rows_of_epochs(again)
    assert not (again / "recent").exists(), "the run is over"


@pytest.mark.parametrize(
    "words",
    [
        ["model.dropout=0.1", "plan.micro_batch_sizes=[3]"],
        ["model.method=full", "train.reference_sync_steps=3", "train.learning_rate=1e-4"],
        ["train.loss=bco_pair"],
    ],
    ids=lambda words: words[0],
)
def test_a_resume_goes_on_from_the_last_step(words: list[str], tmp_path: Path, capsys: Told) -> None:
    words = [*few_checkpoints(World(), tmp_path), *words]
    whole = train(World(), tmp_path, words, "whole")
    run = killed(World(), tmp_path, words, 5)
    assert len(list((run / "recent").iterdir())) == recent_state.KEPT
    assert resumed(World(), tmp_path, words, capsys) == 5
    assert_same(whole, run)


def test_a_second_death_before_the_next_step_goes_back_no_further(tmp_path: Path, capsys: Told) -> None:
    words = few_checkpoints(World(), tmp_path)
    whole, run = train(World(), tmp_path, words, "whole"), killed(World(), tmp_path, words, 5)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Step, "__call__", lambda *args, **kwargs: (_ for _ in ()).throw(Killed()))
        with pytest.raises(Killed):
            train(World(), tmp_path, words, "killed", resume=True)
    gc.collect()
    assert resumed(World(), tmp_path, words, capsys) == 5
    assert_same(whole, run)


def told_anew(path: Path, key: str, change: Callable[[str], str]) -> None:
    """Changes what a file says of its state; the arrays stay."""
    arrays, told = mx.load(str(path), return_metadata=True)
    mx.eval(arrays)
    assert change(told[key]) != told[key]
    told[key] = change(told[key])
    told.pop("format")
    described = dict(sorted(adapter_files.described(arrays).items()))
    adapter_files.write_arrays(path, described, adapter_files.raw(arrays), told=told)


def held_anew(change: Callable[[dict[str, Any]], object], is_agreed: bool = True) -> Callable[[Path], None]:
    """Changes the arrays; is_agreed: what the file says of their bits then agrees, as anybody can have it."""

    def alter(path: Path) -> None:
        arrays, told = mx.load(str(path), return_metadata=True)
        mx.eval(arrays)
        change(arrays)
        told.pop("format")
        bits = adapter_files.raw(arrays)
        if is_agreed:
            told["crc32"] = recent_state._checksum(bits)
        adapter_files.write_arrays(path, dict(sorted(adapter_files.described(arrays).items())), bits, told=told)

    return alter


def first_of(arrays: dict[str, Any], kind: str) -> str:
    return next(name for name in sorted(arrays) if name.startswith(kind) and arrays[name].ndim == 2)


def replace_first(kind: str, change: Callable[[mx.array], mx.array]) -> Callable[[dict[str, Any]], object]:
    return lambda arrays: arrays.update({first_of(arrays, kind): change(arrays[first_of(arrays, kind)])})


def cut_short(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-100])


AGAINST: dict[str, Callable[[Path], None]] = {
    "the machine was off": lambda path: told_anew(path, "boot", lambda boot: boot[::-1]),
    "other hosts": lambda path: told_anew(path, "hosts", lambda hosts: '["another"]'),
    "another division": lambda path: told_anew(path, "layout", lambda layout: layout.replace("synchronous", "sharded")),
    "other data": lambda path: told_anew(path, "progress", lambda text: text.replace('"data_digest": "', '"data_digest": "a')),
    "no step": lambda path: told_anew(path, "progress", lambda text: text.replace('"step": 5', '"step": -5')),
    "no JSON": lambda path: told_anew(path, "progress", lambda text: text[:-1]),
    "an unknown field": lambda path: told_anew(path, "unfinished", lambda text: '{"digest": 3}'),
    "hosts that are none": lambda path: told_anew(path, "hosts", lambda hosts: "3"),
    "one number is another": held_anew(replace_first("weights", lambda array: array + 1), is_agreed=False),
    "one number is none": held_anew(replace_first("weights", lambda array: array * float("nan"))),
    "a moment of another shape": held_anew(replace_first("optimizer", lambda array: array.T)),
    "a moment is missing": held_anew(lambda arrays: arrays.pop(first_of(arrays, "optimizer"))),
    "no optimizer": held_anew(lambda arrays: [arrays.pop(name) for name in [*arrays] if name.startswith("optimizer")]),
    "an optimizer of a hundred million layers": held_anew(lambda arrays: arrays.update({"optimizer/99999999.m": mx.ones(2)})),
    "arrays of no kind": held_anew(lambda arrays: arrays.update({"else/x": mx.ones(2)})),
    "cut short": cut_short,
    "empty": lambda path: path.write_bytes(b""),
}  # fmt: skip


@pytest.mark.parametrize("against", AGAINST)
@pytest.mark.long(
    "a moment*", "an*", "no *", "one number*", "hosts that are none", "other hosts", "arrays of no kind", "the machine*"
)
def test_a_state_that_does_not_fit_is_passed_over(against: str, tmp_path: Path, capsys: Told) -> None:
    words = few_checkpoints(World(), tmp_path)
    whole, run = train(World(), tmp_path, words, "whole"), killed(World(), tmp_path, words, 5)
    older, newer = sorted((run / "recent").iterdir())
    older.unlink()
    AGAINST[against](newer)
    assert resumed(World(), tmp_path, words, capsys) == 0
    assert_same(whole, run)


def test_a_state_of_a_history_that_was_left_is_passed_over() -> None:
    state = Meeting(7, "b", 7, ["first", "second"])
    assert newest([state], Meeting(5, "a", 5, ["first"]), False) == state
    assert newest([state], Meeting(5, "a", 5, ["other"]), False) is None
    assert newest([state], Meeting(7, "b", 7, ["first"]), False) is None, "the checkpoint has it"
    assert newest([state], Meeting(7, "b", 7, ["first"]), True) == state, "a rank has trained on since"
    assert newest([state], None, False) == state
    assert newest([state], Meeting(8, "c", 8, ["first"]), True) is None


def test_ranks_have_in_common_what_each_of_them_has() -> None:
    five, six, seven = (Meeting(step, str(step), step, []) for step in (5, 6, 7))
    assert in_common([[six, five], [seven, six]]) == [six]
    assert in_common([[six, five], [seven]]) == []


def test_a_state_counts_where_every_host_that_took_part_and_is_here_has_one_from_then_or_later() -> None:
    state, later = Meeting(49, "a", 49, ["x"]), Meeting(50, "b", 50, ["x"])
    assert vouched_for(state, ["a", "b"], [("a", [state]), ("b", [later])])
    assert vouched_for(state, ["a"], [("a", [state]), ("b", [])]), "it had no part in it"
    assert vouched_for(state, ["a", "b"], [("a", [state])]), "nobody knows"
    assert not vouched_for(state, ["a", "b"], [("a", [state]), ("b", [])]), "it was off"
    assert not vouched_for(later, ["a", "b"], [("a", [later]), ("b", [state])])
    alone = Meeting(60, "c", 60, ["x", "y"])  # went on without the other, maybe from before
    assert not vouched_for(state, ["a", "b"], [("a", [state]), ("b", [alone])])


def test_fewer_steps_than_a_state_has_are_those_that_are_made(tmp_path: Path, capsys: Told) -> None:
    words = [*settings(World(), tmp_path), "checkpoint.every=99", "train.schedule=constant"]
    shorter = train(World(), tmp_path, [*words, "train.steps=4"], "shorter")
    run = killed(World(), tmp_path, [*words, "train.steps=12"], 3)
    shutil.copytree(run, tmp_path / "runs/copy")
    assert resumed(World(), tmp_path, [*words, "train.steps=4"], capsys) == 3
    assert_same(shorter, run)
    shutil.rmtree(run)
    (tmp_path / "runs/copy").rename(run)
    for path in (run / "recent").iterdir():
        told_anew(path, "progress", lambda text: re.sub(r'"step": \d+', '"step": 5', text))
    assert resumed(World(), tmp_path, [*words, "train.steps=4"], capsys) == 0, "that is beyond the run's end"


def test_what_else_lies_among_the_states_ends_nothing(tmp_path: Path, capsys: Told) -> None:
    words = few_checkpoints(World(), tmp_path)
    run = killed(World(), tmp_path, words, 5)
    (run / "recent/@eaDir").mkdir()
    made = "step-00000009-rank-000.safetensors"
    (run / "recent" / made).mkdir()
    (run / "recent/note.txt").write_text("mine")
    assert resumed(World(), tmp_path, words, capsys) == 5
    assert sorted(path.name for path in (run / "recent").iterdir()) == ["@eaDir", "note.txt", made], "not the run's"


def test_what_a_power_cut_may_undo_counts_from_the_last_checkpoint(tmp_path: Path) -> None:
    words = [*settings(World(), tmp_path, train__epochs=40), "checkpoint.max_lost_seconds=1000", "checkpoint.every=999"]
    killed(World(), tmp_path, words, 5)
    seen: list[float] = []
    due = CheckpointWriter.is_due

    def is_due(self: CheckpointWriter, elapsed_seconds: float) -> bool:
        seen.append(self.unsaved_seconds)
        return due(self, elapsed_seconds)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(CheckpointWriter, "is_due", is_due)
        dies(patch, 7)
        with pytest.raises(Killed):
            train(World(), tmp_path, words, "killed", resume=True)
    gc.collect()
    assert seen[0] > 0.05, "of the process before"


@pytest.mark.parametrize(
    ("owner", "name", "value"),
    [
        (CheckpointWriter, "is_busy", property(lambda self: True)),
        (PerformanceTracker, "has_unwritten", property(lambda self: True)),
        (recent_state, "bits_are_finite", lambda arrays: False),
        (recent_state, "MOST_BYTES", 10),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_state_that_a_resume_would_not_go_on_from_as_it_is_is_not_kept(
    owner: object, name: str, value: object, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(owner, name, value)
    run = killed(World(), tmp_path, few_checkpoints(World(), tmp_path), 5)
    assert not (run / "recent").exists()


@pytest.mark.parametrize(("owner", "name"), [(PerformanceTracker, "has_unwritten"), (CheckpointWriter, "is_busy")])
def test_a_state_is_not_kept_whose_own_rank_waits_for_its_disk(
    owner: type, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a model in parts the step may have told the others nothing of it."""
    keeps = False
    keep = RecentState.keep

    def keep_full(self: RecentState, *args: Any) -> None:
        nonlocal keeps
        keeps = True
        keep(self, *args)
        keeps = False

    monkeypatch.setattr(RecentState, "keep", keep_full)
    monkeypatch.setattr(owner, name, property(lambda self: keeps))
    run = killed(World(), tmp_path, few_checkpoints(World(), tmp_path), 5)
    assert not (run / "recent").exists()


def test_a_state_is_not_kept_after_a_step_whose_update_was_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    take = Step.__call__

    def broken(self: Step, index: int, *args: Any) -> Any:
        if index != 4:
            return take(self, index, *args)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("lib.training.step.math.isfinite", lambda number: False)
            return take(self, index, *args)

    monkeypatch.setattr(Step, "__call__", broken)
    run = killed(World(), tmp_path, few_checkpoints(World(), tmp_path), 5)
    assert [path.name for path in sorted((run / "recent").iterdir())] == [
        f"step-{step:08d}-rank-000.safetensors" for step in (3, 4)
    ]


def test_a_full_disk_costs_the_state_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Told) -> None:
    def full(*args: Any, **kwargs: Any) -> None:
        raise OSError(28, "No space left on device")

    words = few_checkpoints(World(), tmp_path)
    whole = train(World(), tmp_path, words, "whole")
    monkeypatch.setattr(recent_state.adapter_files, "write_arrays", full)
    run = killed(World(), tmp_path, words, 5)
    monkeypatch.undo()
    assert resumed(World(), tmp_path, words, capsys) == 0
    assert_same(whole, run)


@pytest.mark.parametrize("dtype", [mx.float32, mx.float16, mx.bfloat16])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf"), 3e38, -0.0])
def test_bits_are_finite_where_their_numbers_are(dtype: mx.Dtype, value: float) -> None:
    array = mx.array([1.0, value, -2.0]).astype(dtype)
    expected = bool(mx.isfinite(array).all().item())
    ((_, bits),) = adapter_files.raw({"x": array})
    assert finite.bits_are_finite([(dtype, bits), (mx.uint32, np.full(4, 255, np.uint8))]) == expected


def test_a_mac_tells_one_start_of_its_system_from_the_next(mac: darwin.Mac) -> None:
    hardware = recent_state.boot_id.__wrapped__
    assert hardware() == darwin.BOOT
    mac.says("sysctl -n kern.bootsessionuuid", None)
    assert hardware() == "", "no state is taken then"


# ---- On real ranks


@two
@pytest.mark.parametrize("words", [[], ["sync.compression=int8"]], ids=["plain", "int8"])
@pytest.mark.long("int8")
def test_ranks_that_die_a_step_apart_go_on_from_the_step_that_all_have(
    world: World, folder: Path, words: list[str], capsys: Told
) -> None:
    words = [*few_checkpoints(world, folder), "plan.shares=[5,3]", *words]
    whole = train(world, folder, words, "whole")
    world.gather_text("finished")
    run = killed(world, folder, words, 6, before_it_keeps=world.rank == 1)
    assert len(list((run / "recent").glob("step-*6-rank-*"))) == 1
    after = resumed(world, folder, words, capsys)
    assert world.rank != 0 or after == 5
    assert_same(whole, run, world.rank)
    world.gather_text("checked")


@two
@pytest.mark.parametrize("strategy", ["sharded", "pipelined"])
def test_a_divided_model_goes_on_from_the_last_step(world: World, folder: Path, strategy: str, capsys: Told) -> None:
    words = [*few_checkpoints(world, folder), f"strategy={strategy}"]
    whole = train(world, folder, words, "whole")
    world.gather_text("finished")
    run = killed(world, folder, words, 6)
    after = resumed(world, folder, words, capsys)
    assert world.rank != 0 or after == 6
    assert_same(whole, run, world.rank)
    world.gather_text("checked")


@two
def test_one_of_two_replicas_goes_on_alone_from_a_step_that_both_had(world: World, folder: Path, capsys: Told) -> None:
    words = [*few_checkpoints(world, folder), "plan.shares=[5,3]"]
    run = killed(world, folder, words, 6, before_it_keeps=world.rank == 1)
    if world.rank == 0:
        # It has step 6; but who is gone may not have written that one to its log.
        assert resumed(World(), folder, words[:-1], capsys) == 5
        assert rows_of_epochs(run) == {epoch: list(range(21)) for epoch in range(4)}
    world.gather_text("checked")


@two
@pytest.mark.parametrize("merge", ["stack", "outer"])
@pytest.mark.long("stack")
def test_independent_ranks_go_on_from_their_own_last_steps(
    world: World, folder: Path, merge: str, capsys: Told
) -> None:
    words = [*settings(world, folder, rows=45), "strategy=independent", f"independent.merge={merge}"]
    words += [
        "plan.shares=[5,3]",
        "independent.pairs_per_round=64",
        "train.steps=24",
        "checkpoint.every=99",
        "model.dropout=0.1",
    ]
    whole = train(world, folder, words, "whole")
    world.gather_text("finished")
    run = killed(world, folder, words, [8, 6][world.rank])
    train(world, folder, words, "killed", resume=True)
    world.gather_text("finished")
    assert_same(whole, run, world.rank)
    resumes = capsys.readouterr().out
    assert world.rank != 0 or "resuming" in resumes
    discarded = list((run / "logs/discarded").glob("*")) if (run / "logs/discarded").exists() else []
    assert not discarded, "no step was taken twice"
    world.gather_text("checked")


@two
@pytest.mark.parametrize(("after", "merge"), [(0, "outer"), (9, "stack")])
@pytest.mark.long
def test_where_one_independent_rank_would_take_other_rows_all_go_back_to_the_checkpoint(
    world: World, folder: Path, after: int, merge: str, capsys: Told
) -> None:
    """It is of a round's end, or none is left; what each rank had trained in the next round is forgotten."""
    words = [*settings(world, folder, rows=45), "strategy=independent", "plan.shares=[5,3]"]
    words += ["independent.pairs_per_round=64", "train.steps=24", "checkpoint.every=3", "checkpoint.keep=99"]
    words.append(f"independent.merge={merge}")
    whole = train(world, folder, words, "whole")
    world.gather_text("finished")
    run = killed(world, folder, words, 14)
    if world.rank == 0:
        for path in (run / "checkpoints").glob("step-*"):
            if int(path.name.removeprefix("step-")) > after:
                shutil.rmtree(path)
    else:
        for path in (run / "recent").glob("*-rank-001.safetensors"):
            told_anew(path, "unfinished", lambda text: text.replace('"digest": "', '"digest": "a'))
    world.gather_text("changed")
    went_on = resumed(world, folder, words, capsys)
    assert world.rank != 0 or went_on == after
    assert_same(whole, run, world.rank)
    world.gather_text("checked")


@two
@pytest.mark.long
def test_without_held_out_rows_the_log_keeps_the_steps_that_live_on(world: World, folder: Path) -> None:
    words = [*settings(world, folder, rows=45), "strategy=independent", "plan.shares=[5,3]", "data.valid=null"]
    words += ["independent.pairs_per_round=64", "train.steps=24", "checkpoint.every=99"]
    whole = train(world, folder, words, "whole")
    world.gather_text("finished")
    run = killed(world, folder, words, 1)  # before the ranks met
    train(world, folder, words, "killed", resume=True)
    world.gather_text("finished")
    assert_same(whole, run, world.rank)
    world.gather_text("checked")


@two
@pytest.mark.long
def test_checkpoints_may_come_more_often_than_the_ranks_meant_to_meet(world: World, folder: Path) -> None:
    words = [*settings(world, folder, rows=45), "strategy=independent", "plan.shares=[5,3]"]
    words += ["independent.pairs_per_round=160", "train.steps=24"]
    whole = train(world, folder, [*words, "checkpoint.every=99"], "whole")
    world.gather_text("finished")
    run = killed(world, folder, [*words, "checkpoint.every=99"], 9)
    train(world, folder, [*words, "checkpoint.every=3"], "killed", resume=True)
    world.gather_text("finished")
    assert rows_of_epochs(run) == rows_of_epochs(whole)
    world.gather_text("checked")


@two
@pytest.mark.long
def test_checkpoints_at_rounds_ends_come_where_they_would_have(world: World, folder: Path) -> None:
    """However often a run is killed between two of them."""
    words = [*settings(world, folder, rows=45), "strategy=independent", "plan.shares=[5,3]"]
    words += ["independent.pairs_per_round=24", "train.steps=24", "checkpoint.every=7", "checkpoint.keep=99"]
    whole = train(world, folder, words, "whole")
    world.gather_text("finished")
    run = killed(world, folder, words, 4)
    for step in (8, 11, 14, 17):
        with pytest.MonkeyPatch.context() as patch:
            dies(patch, step)
            with pytest.raises(Killed):
                train(world, folder, words, "killed", resume=True)
        gc.collect()
        world.gather_text("killed again")
    train(world, folder, words, "killed", resume=True)
    world.gather_text("finished")
    saved = [sorted(path.name for path in (one / "checkpoints").glob("step-*")) for one in (whole, run)]
    assert saved[0] == saved[1]
    assert_same(whole, run, world.rank)
    world.gather_text("checked")


@two
@pytest.mark.long
def test_where_one_independent_rank_lost_its_state_all_go_back_to_the_checkpoint(
    world: World, folder: Path, capsys: Told
) -> None:
    words = [*settings(world, folder, rows=45), "strategy=independent", "plan.shares=[5,3]"]
    words += ["independent.pairs_per_round=64", "train.steps=24", "checkpoint.every=99"]
    whole = train(world, folder, words, "whole")
    world.gather_text("finished")
    run = killed(world, folder, words, [8, 6][world.rank])
    if world.rank == 1:
        for path in (run / "recent").glob("*-rank-001.safetensors"):
            path.unlink()
    world.gather_text("lost")
    after = resumed(world, folder, words, capsys)
    assert world.rank != 0 or after == 0
    assert_same(whole, run, world.rank)
    world.gather_text("checked")
