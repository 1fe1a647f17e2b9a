"""Plans on real ranks: independent ranks agree on their merges, plans made again resume bit for bit, hosts plan as one."""

import json
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from lib.config import load
from lib.model import partition
from lib.plan import strategy
from lib.plan.calibration import (
    BatchCurve,
    BatchPoint,
    HostCalibration,
    Link,
    calibration_path,
    curve_key,
    read_calibration,
    write_calibration,
)
from lib.plan.memory import whole_weight_bytes
from lib.plan.plan import ClusterPlan
from lib.plan.replan import Schedule
from lib.system import hardware, model_folder
from lib.system.hardware import Machine
from lib.system.network import host_name
from lib.training.run_plan import plan_run
from tests import rounding, tiny
from tests.planning import calibrated
from tests.ranks import settings, train, two
from tests.test_shard import HEADS
from tests.tiny import merges_of, rows_of_epochs

GB = 10**9
mpi = pytest.mark.mpi(min_size=2)


@mpi
@pytest.mark.parametrize(
    ("rows", "words", "steps"),
    [
        (21, ["train.steps=5"], 5),
        (3, ["train.epochs=10"], 10),  # fewer than a batch, and than a round
        pytest.param(45, ["train.epochs=6", "data.streaming=true"], 36, marks=two),
        pytest.param(45, ["train.epochs=3", "model.method=full", "sync.compression=int8"], 18, marks=two),
        pytest.param(21, ["train.epochs=3", "evaluate.every=2", "checkpoint.every=1"], 9, marks=two),
    ],
    ids=["short", "few rows", "epochs", "full", "checkpoints"],
)
@pytest.mark.long("checkpoints", "epochs", "full")
@pytest.mark.long(ranks=3)
def test_auto_is_independent_on_ranks_of_one_host(world, folder, rows: int, words: list[str], steps: int) -> None:
    words = [*settings(world, folder, rows=rows), *words, f"data.cache_dir={folder}/cache"]
    run = train(world, folder, words, "run")
    plan = json.loads((run / "plan.json").read_text())
    assert plan["strategy"] == "independent" and "one machine's result" in plan["reason"]
    summary = tiny.summary(run)
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


@two
def test_auto_trains_in_parts_where_a_limit_is_written_down(world, folder, capsys) -> None:
    """Real ranks: the calibration of this host says that less than the model may be used."""
    words = settings(world, folder, "train.schedule=constant", "train.steps=3", shape=HEADS)
    whole = train(world, folder, [*words, "strategy=synchronous"], "whole")
    shape = partition.model_shape_of(json.loads((folder / "model/config.json").read_text()), "float32")
    limit = 4 * whole_weight_bytes(shape)  # less than weights, adapters, optimizer and one pair
    points = tuple(BatchPoint(batch_size=size, seconds_median=size / 9) for size in (1, 8))
    link = Link(backend="mpi", latency_seconds=1e-3, bandwidth_bytes_per_second=1e8)
    name = f"{host_name()}-{world.rank}"
    machine = Machine(host=name, device_name="chip", device="cpu")
    curve = BatchCurve(points=points, memory_limit_bytes=limit)
    stored = HostCalibration(machine=machine, curves=(curve,), links=(link,))
    write_calibration(folder / "calibration" / f"{name}.json", stored)
    world.gather_text("written")
    capsys.readouterr()
    # Micro-batches are given: of a model this small a pair's activations take more than all weights, and no part of it fits.
    run = train(world, folder, [*words, "plan.micro_batch_sizes=[8,8]"], "run")
    if world.rank == 0:
        shown = capsys.readouterr().out
        assert "sharded, because host" in shown and "➜ sharded, " in shown and "synchronous: too large" in shown
    plans = [json.loads((one / "plan.json").read_text()) for one in (whole, run)]
    assert [plan["strategy"] for plan in plans] == ["synchronous", "sharded"]
    assert [sum(part["kv_heads"] for part in plan["parts"]) for plan in plans] == [0, 4]
    assert tiny.summary(run)["strategy"] == "sharded"
    assert tiny.difference(whole, run) <= rounding.trained_alone(world, words).limit


@two
@pytest.mark.long
def test_a_run_that_is_planned_again_loses_no_example_and_resumes_bit_for_bit(world, folder, monkeypatch) -> None:
    """Rank 0 is said to be three times as fast: the shares follow, and the weights are those of one rank."""
    often = ["train.steps=16", "checkpoint.every=1", "checkpoint.keep=20"]
    words = settings(world, folder, *often, "strategy=synchronous")
    observe = Schedule.observe

    def invented(self: Schedule, step: int, tokens: Sequence[float], measured: Sequence[float]) -> ClusterPlan | None:
        assert len(measured) == len(tokens)
        return observe(self, step, tokens, [n / (3.0 if rank == 0 else 1.0) for rank, n in enumerate(tokens)])

    monkeypatch.setattr(Schedule, "observe", invented)

    alone, run = rounding.trained_alone(world, words), train(world, folder, words, "planned-again")
    plans = tiny.records(run, "plan", rank=1)
    assert [record["shares_before"] for record in plans] == [[4, 4]]
    first, shares = plans[0]["first_step"], plans[0]["shares"]
    assert plans[0]["step"] + 3 == first <= 12 and sum(shares) == 8 and shares[0] >= 8 - 2 * (world.size - 1)
    for record in tiny.steps_of(run, 0):
        if (record["step"] % 3) != 0:  # every third batch is the epoch's ragged end
            assert record["pairs"] == (plans[0]["shares_before"] if record["step"] < first else shares)[0]
    assert all(rows == list(range(21)) for rows in list(tiny.rows_of_epochs(run).values())[:5])
    assert tiny.difference(alone.run, run) <= alone.limit
    before = tiny.bits(run)
    for step in (first - 1, plans[0]["step"]):  # the change is near, or has only just been decided
        world.gather_text("before the checkpoints after a step are taken away")
        if world.rank == 0:
            tiny.undo(run, step)
        world.gather_text("taken away")
        train(world, folder, words, "planned-again", resume=True)
        assert tiny.bits(run) == before, step
        world.gather_text("compared")


@two
def test_two_hosts_plan_the_same_where_one_was_never_calibrated(world, folder, monkeypatch) -> None:
    """Two real ranks that go by two names; the second one's products are said to be a third as fast."""
    words = settings(world, folder, "train.global_batch_size=16")
    config = load.load(None, [*words, f"plan.calibration_dir={folder / 'calibration'}"])
    lengths, sixteen = np.full(21, 16), np.full((21, 2), 16)
    data = SimpleNamespace(lengths=lengths, trained=(lengths // 2, sixteen, sixteen // 2))
    key = curve_key(config.model, config.record_kind, model_folder.resolve(config.model.path, None), 16)
    path = calibration_path(folder / "calibration", ["fast"], 0)
    if world.rank == 0:
        write_calibration(path, calibrated("fast", {1: 10.0, 4: 30.0}, key))
    monkeypatch.setattr(hardware, "quick_gflops", lambda: [90.0, 30.0][world.rank])

    def planned(hosts: list[str], resumed: Path | None = None) -> ClusterPlan:
        return plan_run(config, world, hosts, data, resumed)

    first = planned(["fast", "new"])
    world.require_equal("plan", json.dumps(first.to_dict()))
    assert first.shares == [12, 4]
    assert any("no calibration of new" in warning for warning in first.warnings)
    assert read_calibration(path).machine.host == "fast"
    # A restart divides the work by what was measured then.
    monkeypatch.setattr(hardware, "quick_gflops", lambda: [50.0, 100.0][world.rank])
    run = folder / "run"
    if world.rank == 0:
        run.mkdir()
        (run / "plan.json").write_text(json.dumps(first.to_dict()))
    world.gather_text("written")
    again = planned(["fast", "new"], run)
    assert again.shares == first.shares and again.basis.matmul_gflops == {"fast": [90.0], "new": [30.0]}
    assert planned(["fast", "third"], run).basis.matmul_gflops == {"fast": [50.0], "third": [100.0]}
