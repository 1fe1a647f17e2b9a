"""Which way to work together: what `auto` takes where a model fits, and where it does not; what the plan's table says."""

import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from lib.config.load import load
from lib.config.schema import Config
from lib.distributed.world import World
from lib.errors import UserError
from lib.evaluate import command
from lib.model import partition
from lib.plan.calibration import BatchCurve, BatchPoint, HostCalibration, Link, write_calibration
from lib.plan.cluster_plan import ClusterPlan, Prediction, whole_bytes
from lib.plan.memory import Rows
from lib.plan.predictions import sharded_tokens
from lib.plan.run_facts import RankHost, RunFacts
from lib.plan.run_plan import plan_run
from lib.system.hardware import Machine
from lib.system.network import host_name
from tests import rounding, tiny
from tests.test_plan import LLAMA_8B
from tests.test_replan import KEY, calibrated
from tests.test_shard import train, words_of

SHAPE = partition.model_shape_of(LLAMA_8B)  # 16.06 GB of weights
RATES = {1: 10.0, 8: 20.0}


def configured(*words: str) -> Config:
    return load(None, ["model.path=-", "data.train=-", "train.global_batch_size=32", *words])


def host(name: str, limit_gb: float | None, first_pair_gb: float | None = 20, gflops: float = 1e3) -> HostCalibration:
    """A calibrated host whose peak rises by 1 GB a pair; None: not measured, or no limit."""
    peaks = None if first_pair_gb is None else {size: int((first_pair_gb + size - 1) * 1e9) for size in RATES}
    one = calibrated(name, RATES, peaks=peaks, limit=limit_gb and int(limit_gb * 1e9))
    return one.model_copy(update={"gflops": gflops})


def planned(hosts: list[HostCalibration | None], *words: str, **options: Any) -> ClusterPlan:
    per_rank = {
        field: options.pop(plural)
        for plural, field in {
            "memory_bytes": "memory_bytes",
            "devices": "device",
            "device_names": "device_name",
        }.items()
        if plural in options
    }
    ranks = [
        RankHost(chr(ord("a") + rank), one, **{field: values[rank] for field, values in per_rank.items()})
        for rank, one in enumerate(hosts)
    ]
    facts = RunFacts(KEY, **{"longest": KEY.sequence_length, "backend": "mpi", "shape": SHAPE, **options})
    return plan_run(configured(*words), ranks, facts)


def ways(plan: ClusterPlan) -> dict[str, Prediction]:
    """The plan's predictions by the first word of their names; of several the first."""
    return {way.strategy.partition(",")[0]: way for way in reversed(plan.predictions)}


def test_auto_divides_a_model_that_one_host_cannot_hold() -> None:
    fits = planned([host("a", 128), host("b", 32)])
    assert fits.strategy == "independent" and fits.division is None and sum(fits.shares) == 32
    assert "independent, as every host can hold the model" in fits.reason
    small = planned([host("a", 128), host("b", 18)])
    assert small.strategy == "sharded" and small.division is not None and small.shares == [32]
    assert "host b: one pair needs 20.00 GB, but it has 18.00 GB less 10% headroom" in small.reason
    assert [part.memory_bytes for part in small.parts] == [128 * 10**9, 18 * 10**9]
    chosen, whole = small.predictions
    assert chosen.chosen and chosen.strategy == "sharded, 50% + 50%" and not whole.chosen
    assert whole.step_seconds is None and whole.memory_bytes == 20 * 10**9
    assert chosen.memory_bytes is not None and 8e9 < chosen.memory_bytes < 20e9
    assert json.dumps(small.to_dict())


def test_what_is_not_measured_is_judged_by_its_weights() -> None:
    """No calibration, or none of memory: the weights alone, against what the machine has."""
    for hosts in ([None, None], [host("a", 96, None), None], [host("a", None, None), host("b", None, None)]):
        assert planned(hosts, memory_bytes=[64 * 10**9, 24 * 10**9]).strategy == "independent"
        small = planned(hosts, memory_bytes=[64 * 10**9, 17 * 10**9])
        assert small.strategy == "sharded" and "host b: the model needs 16.06 GB for weights" in small.reason
        full = planned(hosts, "model.method=full", memory_bytes=[96 * 10**9, 96 * 10**9])
        assert full.strategy == "sharded" and "128.48 GB for weights, gradients and optimizer" in full.reason
        few = planned(hosts, "model.method=full", "model.blocks=2", memory_bytes=[96 * 10**9, 96 * 10**9])
        assert few.strategy == "independent", "two of 32 blocks are trained"
    assert planned([None, None]).strategy == "independent", "nobody knows of any limit"
    # A calibration may know of less than the machine has, as where a user leaves room for other work.
    less = planned([host("a", 64, None), host("b", 17, None)], memory_bytes=[64 * 10**9, 64 * 10**9])
    assert less.strategy == "sharded" and less.parts[1].memory_bytes == 17 * 10**9


def test_what_is_told_is_not_chosen() -> None:
    hosts: list[HostCalibration | None] = [host("a", 128), host("b", 18)]
    with pytest.raises(UserError, match="host b: one pair needs 20.00 GB"):
        planned(hosts, "strategy=synchronous")
    with pytest.raises(UserError, match="host b: one pair needs 20.00 GB"):
        planned(hosts, "plan.shares=[20,12]")  # of a synchronous step
    with pytest.raises(UserError, match="host b: one pair needs 20.00 GB"):
        planned(hosts, shape=None)  # a family that cannot be divided
    with pytest.raises(UserError, match=r"host b: one pair needs 20.00 GB.*nor can it be divided: .*adafactor"):
        planned(hosts, "train.optimizer=adafactor")
    with pytest.raises(UserError, match=r"nor can it be divided: strategy=sharded: 2 ranks need .* together"):
        planned([host("a", 10), host("b", 8)])
    told = planned(hosts, "strategy=sharded", "plan.shares=[3,1]")
    assert told.strategy == "sharded" and told.reason.startswith("sharded, as strategy has it")
    assert ways(told)["sharded"].strategy == "sharded, 75% + 25%"
    enough = planned([host("a", 128), host("b", 64)], "strategy=sharded", "plan.micro_batch_sizes=[4]")
    assert enough.predictions[0].chosen and [way.chosen for way in enough.predictions].count(True) == 1
    assert ways(enough)["synchronous"].step_seconds is not None
    independent = planned([host("a", 128), host("b", 64)], "strategy=independent")
    assert independent.reason.startswith("independent, as strategy has it")
    assert "its sync takes 1.4% of a step" in independent.synchronous_instead


def test_gradient_checkpointing_comes_before_dividing() -> None:
    """Where one pair fits with it, nobody has to wait for four sums a block."""

    def both(name: str, limit_gb: float) -> HostCalibration:
        plain, less = host(name, limit_gb), host(name, limit_gb, 12)
        key = KEY.model_copy(update={"gradient_checkpointing": True})
        return plain.model_copy(update={"curves": (*plain.curves, less.curves[0].model_copy(update={"key": key}))})

    plan = planned([both("a", 64), both("b", 18)])
    assert plan.strategy == "independent" and plan.gradient_checkpointing
    assert planned([both("a", 64), both("b", 12)]).strategy == "sharded"


def test_a_divided_step_is_predicted_from_curves_and_link() -> None:
    """By hand: each rank's part of the blocks and the head's positions, and four sums of 8 pairs' tokens a block."""
    plan = planned([host("a", 128, gflops=3e3), host("b", 64, gflops=1e3)])
    way = ways(plan)["sharded"]
    parts = [0.75, 0.25]
    blocks, head = SHAPE.divided_parameters, 128256 * 4096
    computes = [4 * 0.4 * part for part in parts]  # 32 pairs by 8, 0.4 s each
    message = 8 * 2 * KEY.sequence_length * 4096 * 2
    count = 4 * 32 + 1  # one of what the head gives back
    sums = count * 4 * (0.001 + message / 1e8)
    assert way.strategy == "sharded, 75% + 25%" and way.step_seconds == pytest.approx(max(computes) + sums, rel=0.01)
    assert way.bytes_per_step == pytest.approx(count * 4 * message)
    whole = 16.06e9
    # Of a block's activations, what no rank has a part of.
    kept = 4 * 4096 / (4 * 4096 + 2 * (32 + 8) * 128 + 3 * 14336)
    fraction = (0.75 * blocks + head) / (blocks + head)
    activations = (27e9 - whole) * (fraction + (1 - fraction) * kept)
    assert way.memory_bytes == pytest.approx(0.75 * 2 * blocks + 4 * head + activations, rel=0.01)
    # What no division makes less is bound by memory: 45 passes over a block's hidden units.
    machines = [host("a", 128, gflops=3e3), host("b", 64, gflops=1e3)]
    slow = [one.model_copy(update={"memory_bytes_per_second": 1e12}) for one in machines]
    of_all = 45 * 32 * 4 * message / 1e12
    assert ways(planned(slow))["sharded"].step_seconds == pytest.approx(max(computes) + 0.25 * of_all + sums, rel=0.01)
    nccl = [
        one.model_copy(update={"links": tuple(link.model_copy(update={"backend": "nccl"}) for link in one.links)})
        for one in machines
    ]
    in_order = max(computes) + count * 4 * message / 1e8  # a GPU waits for no host within a pass
    assert ways(planned(nccl, backend="nccl"))["sharded"].step_seconds == pytest.approx(in_order, rel=0.001)
    assert not any("not compiled" in warning for warning in planned(nccl, "strategy=sharded", backend="mpi").warnings)
    for words, backend in ((("strategy=sharded",), "nccl"), (("strategy=sharded", "train.compile=true"), "mpi")):
        (warning,) = (one for one in planned(nccl, *words, backend=backend).warnings if "not compiled" in one)
        assert "[6, 2] KV heads" in warning
    trained = ways(planned(machines, "model.method=full"))["sharded"]  # a head that is trained is computed by all
    whole_head = 4 * 0.4 * (0.75 * blocks + head) / (blocks + head) + 4 * 32 * 4 * (0.001 + message / 1e8)
    assert trained.step_seconds == pytest.approx(whole_head, rel=0.01)
    told = planned([host("a", 128, gflops=3e3), host("b", 64, gflops=1e3)], "strategy=sharded")
    held = sum(part.divided_bytes for part in told.parts) + told.parts[0].whole_bytes
    fractions = [(part.share * blocks + head) / (blocks + head) for part in told.parts]
    peaks = [
        part.needed_bytes + (27e9 - held) * (fraction + (1 - fraction) * kept)
        for part, fraction in zip(told.parts, fractions, strict=True)
    ]
    assert ways(told)["sharded"].memory_bytes == way.memory_bytes == pytest.approx(max(peaks), rel=1e-6)
    divided = ways(planned([host("a", 128), host("b", 64)], "strategy=sharded", "model.shard_vocabulary=true"))
    assert divided["sharded"].bytes_per_step == pytest.approx((4 * 32 + 2) * 4 * message)
    unknown = [one.model_copy(update={"links": ()}) for one in (host("a", 128), host("b", 64))]
    assert ways(planned(list(unknown)))["sharded"].step_seconds is None, "a link that nobody measured"


@pytest.mark.parametrize("shares_prompts", [True, False])
def test_tokens_of_a_divided_pass_are_those_of_its_batch(shares_prompts: bool) -> None:
    rows = Rows(prompt=512, seen=1024, tokens=1536, scored=1024)
    model: Any = SimpleNamespace(training=SimpleNamespace(shared_prompts=shares_prompts))
    facts = RunFacts(KEY, longest=1024, backend="mpi", typical_rows=rows, memory_model=model)
    assert sharded_tokens(facts, 4) == 4 * (1536 if shares_prompts else 2048)
    unknown = RunFacts(KEY, longest=1024, backend="mpi")
    assert sharded_tokens(unknown, 4) == 4 * 2 * KEY.sequence_length


@pytest.mark.long
def test_the_table_of_two_macs() -> None:
    """benchmarks/decide.py: what fits trains on independent replicas, what does not is cut into stages."""
    done = subprocess.run(
        [sys.executable, "benchmarks/decide.py"], cwd=tiny.ROOT, capture_output=True, text=True, check=True
    )
    taken: dict[str, list[str]] = {}
    for row in json.loads(done.stdout.splitlines()[-1])["rows"]:
        taken.setdefault(row["model"], []).append(row["taken"])
    assert taken["1B bf16, full"] == taken["8B bf16"] == taken["70B 4-bit"] == ["independent"] * 3
    assert taken["70B bf16"] == taken["405B 4-bit"] == ["pipelined"] * 3
    assert taken["405B bf16"] == ["nothing: too large"] * 3


@pytest.mark.mpi(min_size=2, max_size=2)
def test_auto_trains_in_parts_where_a_limit_is_written_down(
    world: World,
    folder: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Real ranks: the calibration of this host says that less than the model may be used."""
    words = words_of(world, folder, "train.schedule=constant", "train.steps=3")
    whole = train(world, folder, [*words, "strategy=synchronous"], "whole")
    shape = partition.model_shape_of(json.loads((folder / "model/config.json").read_text()), "float32")
    limit = int(whole_bytes(configured(), shape) * 0.95)  # less than the model and its headroom
    points = tuple(BatchPoint(batch_size=size, seconds_median=size / 9, pairs_per_second=9) for size in (1, 8))
    link = Link(backend="mpi", latency_seconds=1e-3, bandwidth_bytes_per_second=1e8)
    name = f"{host_name()}-{world.rank}"
    machine = Machine(host=name, device_name="chip", device="cpu")
    curve = BatchCurve(points=points, memory_limit_bytes=limit)
    write_calibration(
        folder / "calibration" / f"{name}.json", HostCalibration(machine=machine, curves=(curve,), links=(link,))
    )
    world.gather_text("written")
    capsys.readouterr()
    # Micro-batches are given: of a model this small a pair's activations take more than all weights, and no part of it fits.
    run = train(world, folder, [*words, "plan.micro_batch_sizes=[8,8]"], "run")
    if world.rank == 0:
        told = capsys.readouterr().out
        assert "sharded, because host" in told and "➜ sharded, " in told and "synchronous: too large" in told
    plans = [json.loads((one / "plan.json").read_text()) for one in (whole, run)]
    assert [plan["strategy"] for plan in plans] == ["synchronous", "sharded"]
    assert [sum(part["kv_heads"] for part in plan["parts"]) for plan in plans] == [0, 4]
    assert json.loads((run / "summary.json").read_text())["strategy"] == "sharded"
    assert tiny.difference(whole, run) <= rounding.trained_alone(world, words).limit
    again = command._read_config(command._parse(["--run", str(run)]))
    assert again.strategy == "sharded", "to be evaluated in parts as well"
    world.gather_text("checked")
