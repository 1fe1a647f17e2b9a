"""What `auto` takes, how often independent ranks merge, and that ranks agree on it; on real ranks and as a user resumes old runs."""

from __future__ import annotations

import hashlib
import json
import math
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from lib.plan.divide_work import make_plan

import train as script
from lib.config import load, train_arguments
from lib.config.schema import Config
from lib.distributed.world import World
from lib.errors import UserError
from lib.plan import strategy
from lib.system.records import PerformanceTracker, read_records
from lib.training import local_sgd
from tests import rounding, tiny
from tests.test_apart import merges_of
from tests.test_world import settings, train
from tests.tiny import difference, rows_of_epochs


def configured(*words: str) -> Config:
    return load.load(None, ["model.path=m", "data.train=d", "train.global_batch_size=32", *words])


# ---- Arithmetic --------------------------------------------------------------------------------------------------------


@given(st.integers(1, 10**7))
def test_a_run_has_at_least_eight_merges_or_one_a_step(steps: int) -> None:
    longest = strategy.longest_round(steps)
    assert longest >= 1 and math.ceil(steps / longest) >= min(strategy.LEAST_MERGES, steps)
    if steps > strategy.LEAST_MERGES:
        assert math.ceil(steps / (longest + 1)) < strategy.LEAST_MERGES, "a longer round would do"


@given(st.integers(1, 10**6), st.floats(1e-6, 1e4), st.floats(1e-3, 1e3))
def test_merges_cost_one_percent_at_most_and_come_as_often_as_that_allows(
    steps: int, merge_seconds: float, step_seconds: float
) -> None:
    size = strategy.steps_per_round(steps, merge_seconds, step_seconds)

    def cost(size: int) -> float:
        return merge_seconds / (merge_seconds + size * step_seconds)

    assert 1 <= size <= strategy.longest_round(steps)
    if size < strategy.longest_round(steps):
        assert cost(size) <= strategy.MERGE_COST * (1 + 1e-6)
    if size > 1:
        assert cost(size - 1) > strategy.MERGE_COST * (1 - 1e-6), "more merges would have been as cheap"


def test_the_plan_of_merges_follows_the_settings_and_what_is_known() -> None:
    def planned(*words: str, merge: float | None = None, step: float | None = None) -> tuple[int, int, str]:
        found = strategy.plan_merging(configured(*words), 800, 100, merge, step)
        return found.steps_per_round, found.merges, found.reason

    assert planned(merge=0.02, step=1.0)[:2] == (2, 400)
    assert planned(merge=1e-4, step=1.0)[:2] == (1, 800)
    assert planned(merge=100.0, step=1.0)[:2] == (strategy.longest_round(800), 8)
    assert "at least 8 merges" in planned(merge=100.0, step=1.0)[2] and "47.0" not in planned(merge=0.02, step=1.0)[2]
    size, _, reason = planned()
    assert size == strategy.FIRST_STEPS and "until the first merges are timed" in reason
    for words in (["plan.replan=false"], ["plan.shares=[16,16]"]):
        assert planned(*words)[:2] == (strategy.longest_round(800), 8)
        assert words[0].partition("[")[0].rstrip("=") in planned(*words)[2]
        assert planned(*words, merge=0.02, step=1.0)[:2] == (2, 400), "a calibration is a recorded figure"
    assert planned("independent.pairs_per_round=100", merge=0.02, step=1.0)[:2] == (4, 200), "whole batches"
    assert planned("independent.merge=none") == (100, 0, "never, as independent.merge=none has it")
    assert strategy.default_merge(configured()) == "average"
    assert strategy.default_merge(configured("independent.pairs_per_round=100")) == "svd"
    assert strategy.default_merge(configured("independent.pairs_per_round=100", "model.method=full")) == "average"


def test_the_next_round_is_as_long_as_the_last_ones_ask_for() -> None:
    def length(*words: str, ends: list[float], speeds: tuple[float, float] = (24.0, 8.0)) -> tuple[int, str]:
        settings = configured("strategy=independent", *words)
        one = local_sgd.LocalSGD(settings, World(0, 2), make_plan(settings, ["a", "a"]), None, np.ones(9, int), 8000)  # type: ignore[arg-type]
        one.ranks.speeds, one.round_ends = list(speeds), ends
        one._choose_length()
        return one.steps_per_round, one.take_remark()

    first = strategy.longest_round(8000)
    assert length(ends=[]) == (first, "")
    assert length(ends=[0.05])[0] == 5
    assert length(ends=[9.0, 0.05])[0] == 5, "the first merge is slow, and says too much"
    assert length(ends=[0.05, 0.05, 3.0, 0.05])[0] == 5, "one that somebody interrupted"
    assert length(ends=[0.001, 0.001]) == (
        1,
        "merges from here on after every step: one takes 0.001 s, 0.1% of the time",
    )
    assert length(ends=[1e4, 1e4])[0] == first
    assert length(ends=[0.05, 0.05], speeds=(24.0, 0.0)) == (first, ""), "no speed is known yet"
    for words in (["plan.replan=false"], ["plan.shares=[24,8]"], ["independent.pairs_per_round=64"]):
        assert length(*words, ends=[0.05, 0.05]) == (first, ""), "timings are kept out"


def test_what_ranks_wait_and_merge_is_time_of_the_run(tmp_path: Path) -> None:
    """summary.json's efficiency is pairs over these seconds."""
    tracker = PerformanceTracker(tmp_path / "rank-000.jsonl")
    tracker.log_batch(1, 8, 1.0, 0.5, None, compute_seconds=1.0)
    tracker.log_merge(1, {"method": "average", "bytes_sent": 7, "seconds": 0.25, "waited_seconds": 0.75})
    tracker.close()
    totals = tracker.totals()
    assert (totals["pairs"], totals["seconds"], totals["sync_seconds"], totals["wait_seconds"]) == (8, 2.0, 0.25, 0.75)
    assert [r["kind"] for r in read_records(tracker.log_path)] == ["step", "network", "merge"]


# ---- Runs --------------------------------------------------------------------------------------------------------------

mpi = pytest.mark.mpi(min_size=2)
two = pytest.mark.mpi(min_size=2, max_size=2)  # what a third rank changes is seen without it


@mpi
@pytest.mark.parametrize(
    ("rows", "words", "steps"),
    [
        pytest.param(45, ["train.epochs=6"], 36, marks=two),  # on three: the next test, and fewer rows
        (21, ["train.steps=5"], 5),
        (3, ["train.epochs=10"], 10),  # fewer than a batch, and than a round
        pytest.param(45, ["train.epochs=4", "data.streaming=true"], 24, marks=two),  # on three: tests/test_streaming.py
        pytest.param(45, ["train.epochs=3", "model.method=full", "sync.compression=int8"], 18, marks=two),
        pytest.param(
            21,
            ["train.epochs=3", "plan.micro_batch_sizes=SIZES", "evaluate.every=2", "checkpoint.every=1"],
            9,
            marks=two,
        ),
    ],
    ids=["epochs", "short", "few rows", "streaming", "full", "checkpoints"],
)
@pytest.mark.long("streaming", "checkpoints", "epochs")
@pytest.mark.long(ranks=3)
def test_auto_is_independent_on_ranks_of_one_host(
    world: World,
    folder: Path,
    rows: int,
    words: list[str],
    steps: int,
) -> None:
    words = [word.replace("SIZES", str([3] * world.size)) for word in words]
    words = [*settings(world, folder, rows=rows), *words, f"data.cache_dir={folder}/cache"]
    run = train(world, folder, words, "run")
    world.gather_text("finished")
    plan = json.loads((run / "plan.json").read_text())
    assert plan["strategy"] == "independent" and "one machine's result" in plan["synchronous_instead"]
    summary = json.loads((run / "summary.json").read_text())
    assert summary["strategy"] == "independent" and summary["steps"] == steps
    each = [merges_of(run, rank) for rank in range(world.size)]
    assert len(each[0]) >= min(strategy.LEAST_MERGES, steps)
    boundaries = [[(merge["pairs"], merge["steps"]) for merge in of_rank] for of_rank in each]
    assert boundaries == [boundaries[0]] * world.size, "ranks disagree on where rounds end"
    assert {merge["method"] for merge in each[0]} == {"average"}
    in_epoch = -(-rows // 8)
    epochs = rows_of_epochs(run)
    assert all(epochs[epoch] == list(range(rows)) for epoch in range(steps // in_epoch)), "a pair lost or repeated"
    newest = max((run / "checkpoints").glob("step-*"))
    assert json.loads((newest / "state.json").read_text())["rounds"]["are_one"], "the last one is from a merge"
    world.gather_text("checked")


@mpi
@pytest.mark.long
def test_ranks_that_measured_unlike_ends_agree_on_the_next_round(
    world: World,
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """One saw nothing of a merge, the others a second: by the mean of all, rounds are as long as they may be."""
    work = local_sgd.LocalSGD._work

    def measured_unlike(self: local_sgd.LocalSGD, *rest: Any) -> Any:
        if self.own_round_end is not None:
            self.own_round_end = 1e-9 if world.rank == 0 else 1.0
        return work(self, *rest)

    monkeypatch.setattr(local_sgd.LocalSGD, "_work", measured_unlike)
    run = train(world, folder, [*settings(world, folder, rows=45), "train.epochs=6"], "run")
    world.gather_text("finished")
    sizes = [sum(merge["pairs"]) for merge in merges_of(run, world.rank)]
    assert sizes[:2] == [16, 16] and 35 <= sizes[2] <= 40, "two steps, and then five"
    assert world.gather_text(json.dumps(sizes)) == [json.dumps(sizes)] * world.size
    world.gather_text("checked")


@two
@pytest.mark.long
def test_without_timings_the_same_independent_run_twice_gives_the_same_bits(world: World, folder: Path) -> None:
    words = [*settings(world, folder), "train.epochs=4", "model.dropout=0.2", "plan.replan=false"]
    runs = [train(world, folder, words, name) for name in ("a", "b")]
    world.gather_text("finished")
    assert difference(*runs) == 0.0 and len(merges_of(runs[0])) == 12, "12 steps: a round of two would be six merges"
    world.gather_text("checked")


@mpi
@pytest.mark.long(ranks=3)
def test_a_run_that_auto_made_independent_moves_to_one_rank_and_back(world: World, folder: Path) -> None:
    words = [*settings(world, folder, rows=24), "train.schedule=constant", "checkpoint.every=2"]
    run = train(world, folder, [*words, "train.steps=6"], "run")
    world.gather_text("moved")
    words.append("strategy=independent")  # as --resume reads it in plan.json
    if world.rank == 0:
        train(World(), folder, [*words, "train.steps=9"], "run", resume=True)
    world.gather_text("moved back")
    train(world, folder, [*words, "train.steps=12"], "run", resume=True)
    world.gather_text("finished")
    assert json.loads((run / "summary.json").read_text())["world_size"] == world.size
    assert rows_of_epochs(run) == {epoch: list(range(24)) for epoch in range(4)}
    world.gather_text("checked")


def as_an_old_version_left_it(run: Path) -> None:
    """A run of `auto` that was synchronous, as it was before this version: files without what is new."""
    settings = yaml.safe_load((run / "config.yaml").read_text())
    (run / "config.yaml").write_text(yaml.safe_dump({**settings, "strategy": "auto"}))
    new = {"steps_per_round", "merges", "merging", "synchronous_instead"}
    for path in (run / "plan.json", *(run / "checkpoints").glob("*/plan.json")):
        plan: dict[str, Any] = {key: value for key, value in json.loads(path.read_text()).items() if key not in new}
        assert plan["strategy"] == "synchronous"
        path.write_text(json.dumps(plan))
    for path in (run / "checkpoints").glob("step-*"):  # their hashes are no longer true
        hashes = json.loads((path / "manifest.json").read_text())
        del hashes["plan.json"], hashes["config.yaml"]
        (path / "manifest.json").write_text(json.dumps(hashes))


def resume(run: Path, world: World, *words: str) -> None:
    """As `train.py --resume` does it, in this process: with a world of one each rank by itself."""
    options = train_arguments.parse(["--resume", str(run), *words], None)
    script.train(train_arguments.read_config(options), world, resume=True, dry_run=False)


@two
@pytest.mark.parametrize(("before", "after"), [("one", "all"), ("all", "one"), ("all", "all")])
@pytest.mark.long("all-all", "one-all")
def test_a_synchronous_run_of_an_older_auto_goes_on_as_it_was(
    world: World, folder: Path, capsys: pytest.CaptureFixture[str], before: str, after: str
) -> None:
    """In its own world, in a smaller and in a larger one; the settings still say auto."""
    words = [*settings(world, folder), "train.schedule=constant"]
    straight = rounding.trained_alone(world, [*words, "train.steps=8"], "straight")
    ranks, old = {"one": World(), "all": world}, folder / "runs" / "old"
    if before == "all" or world.rank == 0:
        train(ranks[before], folder, [*words, "train.steps=4", "strategy=synchronous"], "old")
    world.gather_text("trained")
    if world.rank == 0:
        as_an_old_version_left_it(old)
    world.gather_text("an older version's")
    if after == "all" or world.rank == 0:
        capsys.readouterr()
        resume(old, ranks[after], "train.steps=8")
        assert "after step 4 of 8" in capsys.readouterr().out or world.rank > 0
    world.gather_text("resumed")
    summary = json.loads((old / "summary.json").read_text())
    assert summary["strategy"] == "synchronous" and summary["world_size"] == ranks[after].size
    assert not merges_of(old) and difference(straight.run, old) <= straight.limit
    assert list(rows_of_epochs(old).values())[:2] == [list(range(21))] * 2, "an example was lost or repeated"
    assert json.loads((old / "plan.json").read_text())["strategy"] == "synchronous", "and so the next time"
    world.gather_text("checked")


def test_a_run_in_rounds_of_an_epoch_goes_on_inside_its_round(tmp_path: Path) -> None:
    """What an older version took where the settings did not say."""
    words = [*tiny.settings(tmp_path, rows=24), "strategy=independent", "train.epochs=4", "checkpoint.every=1"]
    tiny.train(tmp_path, [*words, "checkpoint.keep=99", "independent.pairs_per_round=24", "run.name=run"])
    run = tmp_path / "runs" / "run"
    for path in (run / "checkpoints").glob("step-*"):
        if int(path.name.removeprefix("step-")) > 7:
            shutil.rmtree(path)
    newest = run / "checkpoints" / "step-00000007"
    state = json.loads((newest / "state.json").read_text())
    assert state["rounds"].pop("last_step") == 9 and not state["rounds"]["are_one"]
    del state["rounds"]["round_ends"]
    (newest / "state.json").write_text(json.dumps(state))
    for path in (run / "config.yaml", newest / "config.yaml"):
        settings = yaml.safe_load(path.read_text())
        settings["independent"]["pairs_per_round"] = None
        path.write_text(yaml.safe_dump(settings))
    hashes = json.loads((newest / "manifest.json").read_text())
    digest = hashlib.sha256((newest / "state.json").read_bytes()).hexdigest()
    del hashes["state.json"], hashes["config.yaml"]
    (newest / "manifest.json").write_text(json.dumps({**hashes, "state.json": digest}))
    resumed = tiny.train(tmp_path, ["--resume", str(run)])
    assert "after step 7 of 12" in resumed.stdout
    assert rows_of_epochs(run) == {epoch: list(range(24)) for epoch in range(4)}
    ends = np.cumsum([sum(merge["pairs"]) for merge in merges_of(run)])
    assert ends.tolist()[:3] == [24, 48, 72], "the round that was begun ends where it would have"
    assert ends[-1] == 96 and len(ends) > 4, "and then as often as now"


@two
def test_a_resumed_independent_run_refuses_what_only_synchronous_ranks_have(world: World, folder: Path) -> None:
    run = train(world, folder, [*settings(world, folder), "train.steps=2"], "run")
    world.gather_text("finished")
    with pytest.raises(UserError, match="checkpoint.max_lost_seconds is not for strategy=independent"):
        resume(run, world, "train.steps=4", "checkpoint.max_lost_seconds=9")
    world.gather_text("refused")
