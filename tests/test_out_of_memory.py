"""Running out of memory: the step is taken again in smaller micro-batches, and the host remembers."""

import gc
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from lib.config.settings import PlanSettings
from lib.distributed.world import World
from lib.model import gradient_checkpointing
from lib.plan.plan import ClusterPlan, plan_cluster
from lib.plan.replan import Schedule
from lib.system import out_of_memory
from lib.system.out_of_memory import MicroBatchLimit, OutOfMemory
from lib.training.optimizers import make_optimizer
from lib.training.step import Step
from tests import tiny
from tests.ranks import settings, train
from tests.test_step import build
from tests.tiny import records

RUN: dict[str, Any] = {"rows": 40, "train__steps": 5, "train__global_batch_size": 16, "checkpoint__every": 2}


def weights(run: Path) -> np.ndarray:
    return np.concatenate([array.ravel() for _, array in sorted(tiny.weights(run).items())])


# ---- What is told


@pytest.mark.parametrize(
    "text",
    [
        "[malloc] Unable to allocate 4294967296 bytes.",
        "[metal::malloc] Attempting to allocate 99 bytes which is greater than the maximum allowed buffer size of 9 bytes.",
        "[METAL] Command buffer execution failed: Insufficient Memory (00000008:kIOGPUCommandBufferCallbackErrorOutOfMemory).",
        "cudaMallocAsync(&data, size, stream) failed: out of memory",
        "cudaPeekAtLastError() failed: out of memory",
    ],
)
def test_what_mlx_says_is_recognised(text: str) -> None:
    for error in (RuntimeError(text), MemoryError()):
        assert out_of_memory.is_out_of_memory(error)
    for error in (RuntimeError("[matmul] shapes do not match"), ValueError(text)):
        assert not out_of_memory.is_out_of_memory(error)


# ---- Work that is tried again


def test_what_failed_leaves_no_array_behind() -> None:
    mx.eval(mx.ones(1))
    gc.collect()
    mx.clear_cache()
    before = mx.get_active_memory()

    def fail() -> None:
        kept = mx.ones((1000, 1000)) + 1
        mx.eval(kept)
        raise RuntimeError("[malloc] Unable to allocate 1 bytes.")

    with pytest.raises(OutOfMemory, match="Unable to allocate") as caught:
        out_of_memory.attempt(fail)
    assert mx.get_active_memory() - before < 1e5, "the failed work's arrays are still there"
    assert mx.get_cache_memory() == 0
    assert caught.value.__context__ is None
    with pytest.raises(RuntimeError, match="shapes"):
        out_of_memory.attempt(lambda: (_ for _ in ()).throw(RuntimeError("shapes")))


def test_a_batch_is_cut_until_it_fits_and_says_so_where_one_row_does_not() -> None:
    tried: list[int] = []

    def work(rows: list[int]) -> list[int]:
        tried.append(len(rows))
        if len(rows) > 3:
            raise MemoryError
        return [row * row for row in rows]

    done = out_of_memory.in_pieces(list(range(10)), work)
    assert [square for _, squares in done for square in squares] == [row * row for row in range(10)]
    assert [start for start, _ in done] == [0, 3, 6, 9] and tried == [10, 5, 3, 3, 3, 1]
    with pytest.raises(OutOfMemory, match="batch of 4"):
        out_of_memory.in_pieces(list(range(4)), work, can_halve=False)
    with pytest.raises(OutOfMemory, match="batch of 1"):
        out_of_memory.in_pieces([1, 2], lambda rows: work([*rows, 1, 1, 1]))


# ---- Plans


def cluster(*sizes: int, share: int = 20) -> ClusterPlan:
    hosts = [f"h{i}" for i in range(len(sizes))]
    return plan_cluster(hosts, share * len(sizes), micro_batch_sizes=sizes)


def test_a_schedule_keeps_to_it_from_the_first_step_that_is_not_made_and_after_a_resume() -> None:
    plan, settings = cluster(8, 8), PlanSettings()
    schedule = Schedule(plan, settings, lead=3, steps=20)
    schedule.halve(5, [0])
    schedule.halve(5, [0])
    assert [schedule.at(step).micro_batch_sizes[0][0] for step in (5, 7, 8, 20)] == [8, 8, 2, 2]
    assert schedule.most_at(0) == 2 and schedule.most_at(1) is None
    resumed = Schedule(plan, settings, lead=3, steps=20)
    assert resumed.restore(json.loads(json.dumps(schedule.state(6))))
    for step in (7, 8):
        assert resumed.at(step).micro_batch_sizes == schedule.at(step).micro_batch_sizes
    assert resumed.most_at(0) == 2, "the resumed run would go back to the size that failed"
    schedule.halve(9, [0], gradient_checkpointing=True)
    assert resumed.restore(schedule.state(12)) and resumed.at(13).gradient_checkpointing


# ---- Runs


@pytest.fixture(autouse=True)
def nothing_of_other_tests() -> None:
    """What earlier tests of this process left in MLX's memory goes: limits here are parts of what a step takes."""
    gc.collect()
    mx.clear_cache()


@pytest.fixture(scope="module")
def free(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, list[str]]]:
    """The folder and words of a run in micro-batches of 16, which met nothing."""
    gc.collect()  # a module's fixture comes before those of a test
    folder = tmp_path_factory.mktemp("free")
    words = [*tiny.settings(folder, **RUN), "plan.micro_batch_sizes=[16]"]
    (folder / "held").write_text(str(mx.get_active_memory()))
    tiny.train(folder, [*words, "run.name=free"])
    yield folder, words


def limit_bytes(folder: Path, part: float) -> int:
    """A limit that leaves a run a part of what `free` took, beside what other tests of this process hold now."""
    gc.collect()
    steps = records(folder / "runs/free", "step")
    own = max(step["peak_memory_bytes"] for step in steps) - int((folder / "held").read_text())
    return mx.get_active_memory() + int(part * own)


def test_a_step_that_takes_too_much_is_taken_again_with_the_same_result(free: tuple[Path, list[str]], tmp_path) -> None:
    folder, words = free
    words = [*words, f"plan.calibration_dir={tmp_path}", f"run.dir={tmp_path}/runs"]
    limit = limit_bytes(folder, 0.4)
    limited = [*words, f"plan.memory_limit_gb={limit / 1e9:.9f}"]
    tiny.train(tmp_path, [*limited, "run.name=limited"])
    run = tmp_path / "runs/limited"
    np.testing.assert_allclose(weights(run), weights(folder / "runs/free"), atol=1e-5)
    assert any("ran out of memory in step 1" in warning["text"] for warning in records(run, "warning"))
    plans = records(run, "plan")
    sizes = [plan["ranks"][0]["micro_batch_sizes"][0] for plan in plans]
    assert sizes == [8, 4][: len(plans)] and plans[0]["first_step"] == 4
    steps = records(run, "step")
    assert [step["pairs"] for step in steps] == [16, 16, 8, 16, 16]
    assert max(step["peak_memory_bytes"] for step in steps) <= limit
    assert sorted(steps[0]["rows"]) == sorted(records(folder / "runs/free", "step")[0]["rows"])
    state = json.loads((run / "checkpoints/step-00000004/state.json").read_text())["schedule"]["plans"]
    assert state[-1]["max_micro_batch_sizes"] == sizes[-1:]
    # A resumed run starts with it.
    again = [f"plan.calibration_dir={tmp_path}/none"]
    (run / "checkpoints/step-00000005").rename(tmp_path / "undone")
    tiny.train(tmp_path, ["--resume", str(run), *again])
    assert len(records(run, "plan")) == len(plans) and not (tmp_path / "none").exists(), "it tried the size that failed"
    np.testing.assert_allclose(weights(run), weights(folder / "runs/free"), atol=1e-5)


def test_the_same_in_threads_that_are_given_up_as_on_cuda(free: tuple[Path, list[str]], tmp_path, monkeypatch) -> None:
    folder, words = free
    # Roundings follow the micro-batches: both runs have to halve alike. So the limit is far from what either size takes.
    words = [*words, f"run.dir={tmp_path}/runs", "train.compile=true", "evaluate.every=2", "model.dropout=0.1"]
    taken = []
    for size in (4, 8):
        gc.collect()
        held = mx.get_active_memory()
        tiny.train(tmp_path, [*words, f"plan.micro_batch_sizes=[{size}]", f"run.name=pairs-{size}"])
        taken.append(records(tmp_path / f"runs/pairs-{size}", "step")[0]["peak_memory_bytes"] - held)
    assert taken[1] > 1.3 * taken[0]

    def named(name: str) -> list[str]:  # what the run before left counts for neither
        gc.collect()
        limit = f"plan.memory_limit_gb={(mx.get_active_memory() + sum(taken) / 2) / 1e9:.9f}"
        return [*words, limit, f"run.name={name}", f"plan.calibration_dir={tmp_path}/{name}"]

    tiny.train(tmp_path, named("plain"))
    started: list[str] = []
    in_thread = out_of_memory._in_thread
    monkeypatch.setattr(out_of_memory, "_is_cuda", lambda: True)
    monkeypatch.setattr(out_of_memory, "_in_thread", lambda work: (started.append(""), in_thread(work))[1])
    tiny.train(tmp_path, named("threads"))
    out_of_memory._workers.clear()
    plain, threads = tmp_path / "runs/plain", tmp_path / "runs/threads"
    assert len(started) > 5 and records(threads, "plan")
    made = [[plan["ranks"][0]["micro_batch_sizes"] for plan in records(run, "plan")] for run in (threads, plain)]
    assert made[0] == made[1]
    np.testing.assert_allclose(weights(threads), weights(plain), atol=1e-5)
    mx.eval(mx.random.normal((1,)))  # the state that the thread left is everybody's


def test_weights_that_stood_in_for_others_are_back_where_a_step_failed(tmp_path) -> None:
    model, settings = build(tmp_path)
    step = Step(model, make_optimizer(settings.train), settings.train, World())
    before = step.trained.read()

    def batches() -> Iterator[Any]:
        step.trained.write([mx.zeros_like(array) for array in before])
        raise MemoryError
        yield

    with pytest.raises(OutOfMemory) as caught:
        step(0, 1e-4, batches())
    assert caught.value.ranks == (0,)
    assert all(now is array for now, array in zip(step.trained.read(), before, strict=True))


def test_a_size_that_was_never_finished_is_halved_at_the_next_start(tmp_path, monkeypatch) -> None:
    """The kernel's out-of-memory killer raises nothing: what was tried stands in the run's folder."""
    kills = [0]
    monkeypatch.setattr(out_of_memory, "kernel_kills", lambda: {"boot": kills[0]})
    path = tmp_path / "micro-batch.json"
    memory = MicroBatchLimit(path)
    memory.begin(8)
    assert MicroBatchLimit(path).size is None, "something else ended it"
    kills[0] += 1
    assert MicroBatchLimit(path).size == 4
    memory = MicroBatchLimit(path)
    memory.begin(4)
    memory.end(4)
    kills[0] += 1
    assert MicroBatchLimit(path).size == 4, "that size fitted"
    for size, recomputes in ((2, False), (1, False), (1, True)):
        memory.record(size, recomputes)
        memory.begin(size)
    assert MicroBatchLimit(path).recomputes


def test_down_to_one_pair_then_checkpointing_then_a_clear_end(
    free: tuple[Path, list[str]], tmp_path, monkeypatch
) -> None:
    _, words = free
    recomputed, checkpoint_blocks = list[Any](), gradient_checkpointing.checkpoint_blocks

    def checkpoint(model: Any) -> None:
        checkpoint_blocks(model)
        recomputed.extend(model.layers)

    monkeypatch.setattr(gradient_checkpointing, "checkpoint_blocks", checkpoint)
    monkeypatch.setattr(mx, "get_peak_memory", lambda: 3 * 10**9)  # planned to fit, and whatever is tried does not
    words = [*words, f"plan.calibration_dir={tmp_path}", f"run.dir={tmp_path}/runs", "plan.memory_limit_gb=1"]
    done = tiny.train(tmp_path, [*words, "run.name=none"], check=False)
    assert done.returncode == 2 and "Traceback" not in done.stderr, done.stderr
    last = done.stderr.strip().splitlines()[-1] if "try" in done.stderr.strip().splitlines()[-1] else done.stderr
    assert "ran out of memory with a single pair and gradient checkpointing" in last
    assert "plan.memory_limit_gb is 1 GB" in last
    plans = records(tmp_path / "runs/none", "plan")
    made = [(plan["ranks"][0]["micro_batch_sizes"][0], plan["gradient_checkpointing"]) for plan in plans]
    assert made == [*((size, False) for size in (8, 4, 2, 1)), (1, True)]
    assert len(recomputed) == 2 and all(layer.is_recomputed for layer in recomputed)
    own = ["run.name=dropout", "model.dropout=0.1", f"plan.calibration_dir={tmp_path}/d"]
    dropout = tiny.train(tmp_path, [*words, *own], check=False)
    assert dropout.returncode == 2 and "with a single pair:" in dropout.stderr and "model.dropout=0" in dropout.stderr
    assert not any(plan["gradient_checkpointing"] for plan in records(tmp_path / "runs/dropout", "plan"))


@pytest.mark.mpi(min_size=2, max_size=2)
@pytest.mark.parametrize(
    ("strategy", "sizes"), [("synchronous", "[2,8]"), ("independent", "[2,8]"), ("sharded", "[16,16]")]
)
@pytest.mark.long("independent-*")
def test_ranks_agree_on_what_one_of_them_met(world, folder, strategy: str, sizes: str) -> None:
    changes: dict[str, Any] = {**RUN, "train__steps": 4}
    words = [*settings(world, folder, **changes), f"strategy={strategy}", f"plan.micro_batch_sizes={sizes}"]
    words += ["plan.shares=[4,12]"]  # sharded: the larger part of the model
    gc.collect()
    free = train(world, folder, words, "free")
    peaks = [records(free, "step", rank)[-1]["peak_memory_bytes"] for rank in (0, 1)]
    # What earlier tests left in a process is in both figures; between them rank 1 exceeds it, with half it does not.
    limited = [f"plan.memory_limit_gb={sum(peaks) / 2e9:.7f}", f"plan.calibration_dir={folder}/remembers"]
    gc.collect()
    run = train(world, folder, [*words, *limited], "limited")
    np.testing.assert_allclose(weights(run), weights(free), atol=1e-5)
    plan = records(run, "plan", 1 if strategy == "independent" else 0)[-1]
    made = [max(rank["micro_batch_sizes"]) for rank in plan["ranks"]]
    assert made[1] < int(sizes[1:-1].split(",")[1]) and (made[0] == made[1] if strategy == "sharded" else made[0] == 2)
    if strategy == "independent":
        state = json.loads((run / "checkpoints/step-00000004/state.json").read_text())["rounds"]
        assert state["max_micro_batch_sizes"] == [None, made[1]]
