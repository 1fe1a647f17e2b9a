"""Ranks that train apart, on real ranks: exact where it can be, every pair once, no rank left waiting."""

import itertools
import json
import shutil
import time
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx.utils import tree_map
from mlx_lm.utils import load_adapters, load_model

from lib.distributed.world import World
from lib.errors import AgreedError, Stopped
from lib.training import checkpoint, local_sgd, step
from tests import rounding, tiny
from tests.ranks import settings, train, two
from tests.tiny import difference, merges_of, records, rows_of_epochs, steps_of, weights

pytestmark = pytest.mark.mpi(min_size=2)

SHARES = {2: "plan.shares=[5,3]", 3: "plan.shares=[4,3,1]"}


def cut_after(step: int, run: Path, copy: Path, world: World) -> None:
    """Copies a run without the checkpoints of later steps."""
    if world.rank == 0:
        shutil.copytree(run, copy)
        tiny.undo(copy, step)
    world.gather_text("cut")


def products(adapter: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """What each layer adds to its weight, float64 [in, out]."""
    wide = {name: array.astype(np.float64) for name, array in adapter.items()}
    layers = [name.removesuffix(".lora_a") for name in adapter if name.endswith(".lora_a")]
    return {layer: wide[f"{layer}.lora_a"] @ wide[f"{layer}.lora_b"] for layer in layers}


@pytest.fixture
def shares(world: World) -> str:
    return SHARES.get(world.size, f"plan.shares={[8 - world.size + 1] + [1] * (world.size - 1)}")


@pytest.mark.long(ranks=3)
def test_rounds_of_one_batch_are_synchronous_steps(world, folder, shares: str) -> None:
    """With plain SGD the weighted mean of one step each is the step of the weighted gradient."""
    words = [*settings(world, folder), "model.method=full", "train.optimizer=sgd", "train.max_grad_norm=null"]
    words += ["train.learning_rate=0.5", "train.steps=4", shares]
    together = train(world, folder, words, "together")
    apart = train(world, folder, [*words, "strategy=independent", "independent.pairs_per_round=1"], "apart")
    alone = rounding.trained_alone(world, [word for word in words if word != shares])
    assert difference(together, apart) <= alone.limit
    assert rows_of_epochs(apart) == rows_of_epochs(together)
    for record in merges_of(apart):
        assert sum(record["pairs"]) in (8, 5) and record["error"] < 1e-3  # float32 sums


@pytest.mark.long(ranks=3)
def test_each_merge_of_one_round_is_what_it_says(world, folder, shares: str) -> None:
    """With told shares the ranks' own adapters are the same bits every time: `none` shows what the others merged."""
    words = [*settings(world, folder, rows=40), "strategy=independent", shares, "model.rank=3"]
    words.append("independent.pairs_per_round=40")
    runs = {m: train(world, folder, [*words, f"independent.merge={m}"], m) for m in ("none", "stack", "svd", "average")}
    plain = ["independent.merge=outer", "independent.outer_learning_rate=1", "independent.outer_momentum=0"]
    runs["mean"] = train(world, folder, [*words, *plain], "mean")
    own = [weights(runs["none"] / "ranks" / f"rank-{rank:03d}") for rank in range(world.size)]
    record = merges_of(runs["stack"])[0]
    parts = np.array(record["pairs"]) / sum(record["pairs"])
    assert sum(record["pairs"]) == 40 and record["bytes_sent"] > 0 == merges_of(runs["none"])[0]["bytes_sent"]
    changes = [*zip(parts, map(products, own), strict=True)]
    exact = {layer: sum(part * change[layer] for part, change in changes) for layer in products(own[0])}
    merged = {name: products(weights(run)) for name, run in runs.items()}
    for layer, mean in exact.items():
        size = np.linalg.norm(mean)
        assert np.linalg.norm(merged["stack"][layer] - mean) <= 1e-6 * size
        u, sigma, vt = np.linalg.svd(mean)
        best = u[:, :3] @ np.diag(sigma[:3]) @ vt[:3]
        assert np.linalg.norm(merged["svd"][layer] - best) <= 1e-5 * size
    for name, array in weights(runs["average"]).items():
        mean = sum(part * one[name].astype(np.float64) for part, one in zip(parts, own, strict=True))
        np.testing.assert_allclose(array, mean, rtol=1e-5, atol=1e-7)
        np.testing.assert_allclose(weights(runs["mean"])[name], array, rtol=1e-4, atol=1e-6)
    errors = {name: merges_of(run)[0]["error"] for name, run in runs.items()}
    assert errors["none"] is None and errors["stack"] < 1e-6 and 0 < errors["svd"] < errors["average"]
    found = tiny.summary(runs["none"])
    assert len(found["ranks"]) == world.size and found["loss"] == found["ranks"][0]["loss"]
    assert len({each["loss"] for each in found["ranks"]}) == world.size


@pytest.mark.parametrize(
    ("method", "compression", "merge"),
    [
        pytest.param("lora", "none", "outer", marks=two),
        ("lora", "int8", "svd"),
        pytest.param("lora", "topk", "average", marks=two),
        ("full", "none", "average"),
        pytest.param("full", "bf16", "outer", marks=two),
        ("full", "int8", "outer"),
    ],
)
@pytest.mark.long("lora-*", ranks=3)
@pytest.mark.long("lora-none-outer", "full-bf16-outer", "full-none-average", ranks=2)
def test_ranks_leave_a_round_with_the_same_weights(
    world, folder, shares: str, method: str, compression: str, merge: str
) -> None:
    words = [*settings(world, folder), "strategy=independent", shares, f"independent.merge={merge}"]
    words += [f"model.method={method}", f"sync.compression={compression}", "sync.topk_fraction=0.2"]
    run = train(world, folder, [*words, "independent.pairs_per_round=16", "train.steps=4"], "run")
    held_out = records(run, "evaluation", world.rank)
    told = [held_out[-1]["loss"], [r["error"] for r in merges_of(run, world.rank)]]
    assert world.gather_values(told) == [told] * world.size
    record = merges_of(run)[0]
    size = sum(array.nbytes for array in weights(run).values())
    fractions = {"none": (1, 1), "bf16": (0.5, 0.5), "int8": (0.25, 0.36), "topk": (0.4, 0.5)}
    low, high = (size * (world.size - 1) * fraction for fraction in fractions[compression])
    assert low * 0.99 <= record["bytes_sent"] <= high * 1.01 + 64


@two
@pytest.mark.long
def test_a_slow_rank_takes_less_and_every_pair_is_trained_once_after_a_full_disk_and_a_stop_too(
    world, folder, monkeypatch
) -> None:
    take_step = step.Step.__call__

    def slow_step(self: Any, *args: Any) -> Any:
        began = time.monotonic()
        result = take_step(self, *args)
        # By its own measure, so that a machine that is busy makes no rank faster than another.
        time.sleep(0.02 + 3 * world.rank * (time.monotonic() - began + 0.02))
        return result

    monkeypatch.setattr(step.Step, "__call__", slow_step)
    words = [*settings(world, folder, rows=300), "strategy=independent", "independent.pairs_per_round=150"]
    words += ["train.epochs=2", "checkpoint.every=10"]
    original = local_sgd.LocalSGD._work

    def stopping(self: Any, stream: Any, queue: Any, local_step: Any, *others: Any) -> Any:
        def step_or_stop(step: int, *rest: Any) -> Any:
            if step == 45 and world.rank == 0:  # when the ranks' own counts of steps are far apart
                raise Stopped("for the test")
            return local_step(step, *rest)

        return original(self, stream, queue, step_or_stop, *others)

    write, writes = checkpoint.save, itertools.count(1)

    def write_or_fail(*args: Any) -> str:
        return "no space left, for the test" if next(writes) == 2 else write(*args)

    monkeypatch.setattr(local_sgd.LocalSGD, "_work", stopping)
    monkeypatch.setattr(checkpoint, "save", write_or_fail)
    with pytest.raises(Stopped):
        train(world, folder, words, "run")
    world.gather_text("stopped")
    monkeypatch.setattr(local_sgd.LocalSGD, "_work", original)
    run = train(world, folder, words, "run", resume=True)
    assert rows_of_epochs(run) == {0: list(range(300)), 1: list(range(300))}
    pairs = np.sum([record["pairs"] for record in merges_of(run)], axis=0)
    assert pairs[0] > 1.5 * pairs[-1] > 0, pairs
    for rank in range(world.size):
        assert len(steps_of(run, rank)) == sum(record["steps"][rank] for record in merges_of(run))


@pytest.mark.long(ranks=3)
def test_a_run_goes_on_alone_from_a_rounds_end_and_back_on_all_ranks(
    world, folder, shares: str, capsys, monkeypatch
) -> None:
    """The outer momentum is common to all ranks, so it goes on in a world of another size."""
    words = [*settings(world, folder, rows=24), "strategy=independent", "independent.pairs_per_round=16"]
    words += ["train.epochs=2", "checkpoint.every=1", "checkpoint.keep=4", "independent.merge=outer"]
    run = train(world, folder, [*words, shares], "run")
    if world.rank == 0:
        shutil.rmtree(max((run / "checkpoints").glob("step-*")))  # the newest left is inside a round
        assert max(path.name for path in (run / "checkpoints").glob("step-*")) == "step-00000005"
        capsys.readouterr()
        momenta, resumed = [], local_sgd.LocalSGD.resume

        def resume(self: Any, progress: Any, own: Any) -> None:
            momenta.append({name: np.array(array) for name, array in own["momentum"].items()})
            resumed(self, progress, own)

        monkeypatch.setattr(local_sgd.LocalSGD, "resume", resume)
        train(World(), folder, words, "run", resume=True)
        stored = checkpoint.common_at(run / "checkpoints/step-00000004", checkpoint.MOMENTUM, World())
        assert momenta[0] and all((momenta[0][name] == np.array(array)).all() for name, array in stored.items())
        told = capsys.readouterr().out
        assert "inside a round" in told and f"{world.size} ranks instead of 1" in told and "after step 4 of 6" in told
        assert tiny.summary(run)["world_size"] == 1
    world.gather_text("moved")
    train(world, folder, [*words, shares, "train.epochs=3"], "run", resume=True)
    assert rows_of_epochs(run) == {epoch: list(range(24)) for epoch in range(3)}


@two
def test_a_run_that_goes_on_inside_a_round_has_the_bits_of_one_that_never_stopped(world, folder) -> None:
    """Momentum, what compression left out, every rank's own weights and optimizer: all of it is in the checkpoints."""
    words = [*settings(world, folder, rows=45), "strategy=independent", "independent.merge=outer", "plan.shares=[5,3]"]
    words += ["sync.compression=int8", "independent.pairs_per_round=32", "train.steps=10", "model.dropout=0.1"]
    words += ["checkpoint.every=3", "checkpoint.keep=99", "evaluate.every=4"]
    whole, cut = train(world, folder, words, "whole"), folder / "runs/cut"
    cut_after(6, whole, cut, world)
    train(world, folder, words, "cut", resume=True)
    state = json.loads((cut / "checkpoints/step-00000006/state.json").read_text())["rounds"]
    assert not state["are_one"], "the test wants a stop inside a round, the second is steps 5 to 9"
    assert difference(whole, cut) == 0.0
    for rank in range(2):
        steps = [[(r["step"], r["loss"], r["rows"]) for r in steps_of(one, rank)] for one in (whole, cut)]
        assert steps[0] == steps[1]
    assert [r["step"] for r in merges_of(whole)] == [r["step"] for r in merges_of(cut)]
    evaluated = [{r["step"] for r in records(run, "evaluation")} for run in (whole, cut)]
    assert evaluated[0] == evaluated[1] and len(evaluated[0]) > 2, "they count from the last merge"


@two
@pytest.mark.long
def test_a_run_that_is_to_end_inside_a_round_merges_what_its_ranks_have(world, folder) -> None:
    words = [*settings(world, folder, rows=45), "strategy=independent", "independent.merge=outer", "plan.shares=[5,3]"]
    words += ["independent.pairs_per_round=64", "train.schedule=constant", "checkpoint.every=5", "checkpoint.keep=99"]
    longer, ended = train(world, folder, [*words, "train.steps=24"], "longer"), folder / "runs/ended"
    shorter = train(world, folder, [*words, "train.steps=10"], "shorter")
    cut_after(10, longer, ended, world)
    state = json.loads((longer / "checkpoints/step-00000010/state.json").read_text())["rounds"]
    assert not state["are_one"], "the test wants a stop inside a round, which are nine steps each"
    train(world, folder, [*words, "train.steps=10"], "ended", resume=True)
    for run in (ended, shorter):
        assert [record["step"] for record in merges_of(run)] == [9, 10]
    assert difference(shorter, ended) == 0.0 and rows_of_epochs(ended) == rows_of_epochs(shorter)


@pytest.mark.long(ranks=3)
def test_a_stacked_run_goes_on_at_its_rank(world, folder, shares: str, capsys) -> None:
    words = [*settings(world, folder), "strategy=independent", "independent.merge=stack"]
    run = train(world, folder, [*words, shares, "train.epochs=1"], "run")
    stacked, configured = weights(run), json.loads((run / "adapter_config.json").read_text())
    name = next(name for name in stacked if name.endswith("lora_a"))
    assert configured["lora_parameters"]["rank"] == 8 * world.size == stacked[name].shape[1]
    capsys.readouterr()
    train(world, folder, [*words, shares, "train.epochs=1"], "run", resume=True)  # finished: nothing changes
    assert world.rank or "has made all of its 3 steps" in capsys.readouterr().out
    assert all(np.array_equal(stacked[name], array) for name, array in weights(run).items())
    world.gather_text("compared")
    if world.rank == 0:
        train(World(), folder, [*words, "train.epochs=2"], "run", resume=True)
        assert weights(run)[name].shape[1] == 8 and rows_of_epochs(run)[1] == list(range(21))


@pytest.mark.long(ranks=3)
def test_a_merged_adapter_loads_in_mlx_lm(world, folder, shares: str) -> None:
    stored = folder / "stored"
    if world.rank == 0:
        assert tiny.stored_model(folder) == stored
    world.gather_text("written")
    words = [*settings(world, folder), "strategy=independent", shares, "train.steps=3", "independent.merge=stack"]
    run = train(world, folder, [*words, "model.random_init=false", f"model.path={stored}"], "run")
    model, _ = load_model(stored)
    before = np.array(model(mx.array([[3, 4, 5]])))
    assert not np.array_equal(before, np.array(load_adapters(model, str(run))(mx.array([[3, 4, 5]]))))


@pytest.mark.long(ranks=3)
def test_compressed_gradients_of_synchronous_ranks(world, folder, shares: str) -> None:
    words = [*settings(world, folder), "train.steps=2", "data.valid=null", shares]
    sent = {}
    for kind in ("none", "bf16", "int8", "topk"):
        run = train(world, folder, [*words, f"sync.compression={kind}"], kind)
        sent[kind] = [r["bytes_sent"] for r in steps_of(run)]
        losses = [r["loss"] for r in steps_of(run)]
        assert world.gather_values(losses) == [losses] * world.size
        if kind != "topk":
            plain = weights(folder / "runs" / "none")
            moved = {name: np.linalg.norm(array) for name, array in plain.items()}
            for name, array in weights(run).items():
                assert np.linalg.norm(array - plain[name]) <= 0.2 * moved[name], (kind, name)
    assert all(len(set(each)) == 1 for each in sent.values())
    assert sent["bf16"][0] < 0.52 * sent["none"][0] and sent["topk"][0] < 0.1 * sent["none"][0]
    assert sent["int8"][0] < 0.4 * sent["none"][0] * (world.size / 2)


@pytest.mark.long(ranks=3)
def test_what_one_rank_meets_ends_all(world, folder, monkeypatch) -> None:
    """A fault on the last rank, in the middle of a round: all leave at their next meeting, and say whose it is."""
    common = [*settings(world, folder, rows=100), "strategy=independent"]
    original = local_sgd.LocalSGD._work
    by_speed, as_planned = common, [*common, "plan.replan=false"]
    faults = [(Stopped("not finite"), by_speed), (OSError(28, "No space left on device", "log"), as_planned)]
    for number, (fault, words) in enumerate(faults):

        def work(self: Any, stream: Any, queue: Any, local_step: Any, rewards: Any, fault: Exception = fault) -> Any:
            def broken(step: int, *rest: Any) -> Any:
                if step == 5 and world.rank == world.size - 1:
                    raise fault
                return local_step(step, *rest)

            return original(self, stream, queue, broken, rewards)

        monkeypatch.setattr(local_sgd.LocalSGD, "_work", work)
        with pytest.raises((Stopped, AgreedError), match=f"rank {world.size - 1}: .*(not finite|No space left)"):
            train(world, folder, words, f"run{number}")
        world.gather_text("left")


@two
def test_weights_that_drifted_apart_are_replaced_and_that_is_recorded(world, folder, monkeypatch) -> None:
    share = checkpoint.share_weights

    def drifted(ranks: World, model: Any, *others: Any) -> Any:
        if ranks.rank == 1:
            model.update(tree_map(lambda array: array * (1 + 2**-20), model.trainable_parameters()))
        return share(ranks, model, *others)

    monkeypatch.setattr(checkpoint, "share_weights", drifted)
    run = train(world, folder, [*settings(world, folder), "checkpoint.every=2", "strategy=synchronous"], "run")
    assert any("rank 1 had other weights than rank 0" in r["text"] for r in records(run, "warning"))
