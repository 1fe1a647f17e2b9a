"""train.py end to end, as a user runs it: equal on any ranks, resumed as if never stopped, clear about mistakes."""

import errno
import fcntl
import importlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Container
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx.utils import tree_map
from mlx_lm.models import base

from lib.config import load
from lib.distributed import compression as exchange
from lib.distributed.world import World
from lib.errors import UserError
from lib.evaluate import command as evaluate
from lib.model.layout import block_list_of
from lib.model.quantised import device
from lib.report.history import RunHistory, figures
from lib.system import mpi_and_blas
from lib.system.records import PerformanceTracker, read_records
from lib.training import checkpoint, run_inputs, run_plan, trial
from lib.training import reference_model as scoring
from tests import float64, rounding, tiny
from tests.tiny import ROOT, difference


def test_mpirun_with_unequal_shares_ends_with_the_same_weights(tmp_path) -> None:
    """As a user launches it; tests/test_world.py has the other worlds, methods and losses."""
    one, words = tiny.run(tmp_path, "one", train__steps=8), tiny.settings(tmp_path, train__steps=8, run__name="two")
    result = tiny.train(tmp_path, [*words, "plan.shares=[6,2]", "plan.micro_batch_sizes=[4,1]"], ranks=2)
    assert difference(one, one.with_name("two")) <= rounding.limit_of(one)
    summary = tiny.summary(one.with_name("two"))
    assert summary == json.loads(result.stdout.splitlines()[-1])
    assert summary["world_size"] == 2 and summary["steps"] == 8


def test_the_wall_seconds_and_the_cost_of_a_run_are_of_all_its_processes(tmp_path) -> None:
    run = tiny.run(tmp_path, cost__rent_per_hour=3600, train__steps=2)
    state = json.loads((run / "checkpoints/step-00000002/state.json").read_text())
    first = tiny.summary(run)
    assert 0 < state["seconds"] < state["wall_seconds"] <= first["wall_seconds"]
    began = time.monotonic()
    tiny.train(tmp_path, ["--resume", str(run), "train.steps=3"])
    process_seconds = time.monotonic() - began
    both = tiny.summary(run)
    assert state["wall_seconds"] + both["seconds"] - first["seconds"] < both["wall_seconds"]
    assert both["wall_seconds"] < state["wall_seconds"] + process_seconds
    assert both["cost"]["cost"] == pytest.approx(both["wall_seconds"])
    history = RunHistory(run)
    while history.read():
        pass
    page = figures(history, time.time()).summary  # the page's figures are these
    for name in ("seconds", "wall_seconds", "cost"):
        assert page[name] == both[name]


def test_ctrl_c_is_one_line_and_resumes(tmp_path) -> None:
    words = tiny.settings(tmp_path, train__steps=400, checkpoint__every=5, run__name="run")
    process = subprocess.Popen(
        [sys.executable, str(ROOT / "train.py"), *words, f"--config={tiny.config_file(tmp_path)}"],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        # A shell starts its background jobs, and so the tests in one, with SIGINT ignored, which a child inherits.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    log = tmp_path / "runs" / "run" / "logs" / "rank-000.jsonl"
    while process.poll() is None and (not log.exists() or log.read_bytes().count(b"\n") < 12):
        time.sleep(0.01)
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=120)
    assert process.returncode == 1
    assert re.fullmatch(r"stopped: interrupted; go on with --resume \S*runs/run\n", errors), errors
    tiny.train(tmp_path, ["--resume", str(tmp_path / "runs/run"), "train.steps=20"])


def test_a_compiled_step_equals_a_plain_one_and_resumes_to_the_same_bits(tmp_path) -> None:
    plain, compiled, resumed = (
        tiny.run(tmp_path, name, train__steps=6, checkpoint__every=3, train__compile=name != "plain")
        for name in ("plain", "compiled", "resumed")
    )
    tiny.undo(resumed, 3)
    (resumed / "adapters.safetensors").unlink()
    tiny.train(tmp_path, ["--resume", str(resumed)])
    assert difference(plain, compiled) <= rounding.limit_of(plain)
    assert difference(compiled, resumed) == 0.0


def test_full_training_of_a_bfloat16_model_keeps_float32_weights_and_resumes_to_the_same_bits(tmp_path) -> None:
    words = ["model.method=full", "model.dtype=bfloat16", "train.schedule=constant", "checkpoint.final=last"]
    whole, halves = (tiny.run(tmp_path, f"{steps}", words, train__steps=steps) for steps in (4, 2))
    tiny.train(tmp_path, ["--resume", str(halves), "train.steps=4"])
    assert {array.dtype for array in tiny.weights(whole).values()} == {np.dtype(np.float32)}
    assert difference(whole, halves) == 0.0
    # The reference is asked in the type that is trained: one of bfloat16 products would be off by a thousandth.
    assert abs(tiny.steps_of(whole)[0]["reward_margin"]) <= 1e-6


@pytest.mark.parametrize("damage", ["torn", "tampered", "missing"])
def test_a_damaged_checkpoint_is_passed_over(tmp_path, damage: str) -> None:
    run = tiny.run(tmp_path, train__steps=9, checkpoint__every=3)
    before, newest = tiny.bits(run), run / "checkpoints/step-00000009/adapters.safetensors"
    content = newest.read_bytes()
    if damage == "torn":
        newest.write_bytes(content[: len(content) // 2])
    elif damage == "tampered":
        newest.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    else:
        newest.unlink()
    result = tiny.train(tmp_path, ["--resume", str(run)])
    assert "warning: checkpoint" in result.stdout and "step-00000009" in result.stdout
    assert "after step 6" in result.stdout and tiny.bits(run) == before


def test_checkpoints_kept_are_the_newest_and_the_best(tmp_path) -> None:
    words = ["train.steps=12", "checkpoint.every=2", "checkpoint.keep=2", "evaluate.every=3", "train.learning_rate=0.5"]
    run = tmp_path / "runs" / "run"
    left = [run / "logs/rank-001.jsonl.7.unfinished", run / "plan.json.7.unfinished"]
    for path in left:
        path.mkdir(parents=True)  # a process was killed while it wrote
    tiny.run(tmp_path, words=words)
    assert not any(path.exists() for path in left)
    best = min(tiny.records(run, "evaluation")[1:], key=lambda r: r["loss"])["step"]
    kept = {f"step-{step:08d}" for step in (10, 12, best)}
    assert {path.name for path in (run / "checkpoints").iterdir()} == kept
    told = tiny.records(run, "checkpoint")
    assert [r["step"] for r in told] == sorted({*range(2, 13, 2), best} | {r["step"] for r in told})
    assert all(r["path"].endswith(f"step-{r['step']:08d}") for r in told) and told[-1]["step"] == 12
    (run / "summary.json").unlink()  # killed when the last checkpoint was there, and an old one was, too
    shutil.copytree(run / "checkpoints/step-00000010", run / "checkpoints/step-00000008")
    part = checkpoint.part_of(run / "checkpoints", 8, 0)
    part.parent.mkdir()
    part.touch()
    tiny.train(tmp_path, ["--resume", str(run)])
    assert {path.name for path in (run / "checkpoints").glob("step-*")} == kept and not part.exists()


def test_a_quantised_base_trains_its_adapters(tmp_path) -> None:
    words = [f"model.path={tiny.stored_model(tmp_path, quantised=True)}", "model.random_init=false"]
    steps = tiny.steps_of(tiny.run(tmp_path, "q", words, train__steps=12, train__learning_rate=1e-2))
    assert steps[-1]["loss"] < steps[0]["loss"]
    full = tiny.train(tmp_path, [*tiny.settings(tmp_path), *words, "model.method=full"], check=False)
    assert full.returncode == 2 and "quantised; use model.method=lora" in full.stderr


def test_a_reference_that_the_steps_ask_for_is_that_of_a_pass(tmp_path, monkeypatch) -> None:
    """And each row is asked for once: what two epochs learn is the same."""
    changes = {"train.epochs": 2, "train.steps": "null", "train.learning_rate": 1e-2}
    asked = tiny.steps_of(tiny.run(tmp_path, "asked", **changes))
    monkeypatch.setattr(scoring, "is_in_steps", lambda *_: False)
    before = tiny.steps_of(tiny.run(tmp_path, "before", **changes))
    assert [step["loss"] for step in asked] == pytest.approx([step["loss"] for step in before], rel=1e-5)
    assert asked[-1]["loss"] < asked[0]["loss"]


@pytest.mark.parametrize("family", ["qwen2", "gpt_bigcode"])
def test_a_reference_of_another_family_is_the_same_where_each_step_asks_it(tmp_path, monkeypatch, family: str) -> None:
    module = importlib.import_module(f"mlx_lm.models.{family}")
    sizes = {"n_embd": 64, "n_layer": 1, "n_inner": 64, "n_head": 4, "n_positions": 256, "layer_norm_epsilon": 1e-5}
    own = sizes if family == "gpt_bigcode" else {}
    words = [f"model.reference={tiny.stored_model(tmp_path, model_type=family, **own)}", "train.steps=1"]
    margins = []
    for name in ("known", "asked"):
        if hasattr(module, "scaled_dot_product_attention"):  # as in a process that has seen no such model
            monkeypatch.setattr(module, "scaled_dot_product_attention", base.scaled_dot_product_attention)
        streamed = [f"data.streaming={str(name == 'asked').lower()}", f"run.name={name}"]
        done = tiny.train(tmp_path, [*tiny.settings(tmp_path), *words, *streamed], check=family == "qwen2")
        if done.returncode:
            assert name == "asked" and done.returncode == 2 and "set data.shared_prompts=false" in done.stderr
            name = "whole"
            tiny.run(tmp_path, name, [*words, *streamed, "data.shared_prompts=false"])
        margins.append(tiny.steps_of(tmp_path / "runs" / name)[0]["reward_margin"])
    assert margins[1] == pytest.approx(margins[0], abs=1e-5) and abs(margins[0]) > 1e-3


def test_a_dry_run_writes_nothing(tmp_path) -> None:
    """tests/test_world.py has the ranks' own."""
    shown = tiny.train(tmp_path, [*tiny.settings(tmp_path), "--dry-run", "--measure"]).stdout
    assert "dry run" in shown and re.search(r"expected: about .* in all \(.*by a step that was tried", shown)
    assert not (tmp_path / "runs").exists()


@pytest.mark.skipif(device() != "cpu", reason="a GPU's time comes from the formula")
def test_blocks_are_tried_with_the_model_as_it_was(tmp_path, monkeypatch) -> None:
    """Also where a family's code fails with a few of its blocks. Where they say that attention costs all, micro-batches
    are of one row, and without plan.replan as they were."""
    config = load.load(None, tiny.settings(tmp_path))
    read = run_inputs.read_inputs(config, str)
    model = run_inputs.load_policy(config.model, 0, False, False)
    blocks = block_list_of(model)
    assert blocks is not None
    before = list(blocks)
    tried = trial.BlockTrial(config, model, blocks, read.data)
    found = tried.seconds(4)
    assert sum(found.step) > 0 and 0 < found.forward <= 1 and found.answer > 0
    with pytest.raises(ZeroDivisionError):
        tried._timed(lambda: 1 / 0, 1)
    assert list(map(id, blocks)) == list(map(id, before))
    slow = trial.Seconds([0.0, 1e-9, 1e-3, 0.0], 0.5, 0.01, 0.0)
    monkeypatch.setattr(trial.BlockTrial, "seconds", lambda *_: slow)
    plan = run_plan.plan_run(config, World(), ["here"], read.data)
    for replan, size in ((True, 1), (False, 8)):
        settings = config.model_copy(update={"plan": config.plan.model_copy(update={"replan": replan})})
        pace, changed = trial.pace(settings, World(), plan, model, read, None, False)
        assert changed.micro_batch_sizes == [(size,) * (8 // size)] and changed.shares == plan.shares
        assert pace is not None and pace.step > 8e-3 and pace.row == pytest.approx(pace.step / 14)  # 21 rows in 3 steps


def test_a_run_continues_from_an_earlier_adapter(tmp_path) -> None:
    first = tiny.run(tmp_path, "first", train__steps=4, train__loss="sft")
    second = tiny.run(tmp_path, "second", train__steps=4, model__adapter=first)
    # The reference is the policy as it starts, adapter included: nothing is preferred yet.
    assert tiny.steps_of(second)[0]["loss"] == pytest.approx(np.log(2), rel=1e-5)
    wrong = tiny.train(tmp_path, tiny.settings(tmp_path, model__adapter=first, model__rank=4), check=False)
    assert wrong.returncode == 2 and "model.rank=8" in wrong.stderr


def test_a_run_whose_default_layers_were_others_goes_on_with_the_keys_that_are_named(tmp_path) -> None:
    """An earlier version adapted the routers of experts, too; resuming said only that the weights do not fit."""
    config = tiny.run(tmp_path, train__steps=2, model__keys="[self_attn.q_proj]") / "config.yaml"
    config.write_text(config.read_text().replace("keys:\n  - self_attn.q_proj\n", "keys: null\n"))
    words = ["--resume", str(config.parent), "train.steps=3"]
    refused = tiny.train(tmp_path, words, check=False)
    assert refused.returncode == 2 and "add 'model.keys=[self_attn.q_proj]'" in refused.stderr
    tiny.train(tmp_path, [*words, "model.keys=[self_attn.q_proj]"])
    assert tiny.steps_of(config.parent)[-1]["step"] == 3


@pytest.mark.parametrize(
    ("hosts", "rank", "threads", "words"),
    [
        (["a"] * 3, 0, 1, "a: 3 ranks of 1 threads compute on 2 cores and slow each other; start fewer"),
        (["a", "b", "b"], 1, 2, "b: 2 ranks of 2 threads compute .* OPENBLAS_NUM_THREADS=1"),
        (["a", "b", "b"], 2, 2, None),  # the first says it
        (["a", "a"], 0, 1, None),
        (["a"], 0, 2, None),
    ],
)
def test_more_threads_than_cores_are_warned_of(
    monkeypatch, hosts: list[str], rank: int, threads: int, words: str | None
) -> None:
    monkeypatch.setattr("os.cpu_count", lambda: 2)
    monkeypatch.setattr(run_plan.hardware, "mlx_device", lambda: ("cpu", "a"))
    said = run_plan._crowded(hosts, rank, threads)
    assert (words is None and not said) or re.fullmatch(str(words), said)


def poison(monkeypatch: pytest.MonkeyPatch, calls: Container[int]) -> None:
    """Makes the gradients of these calls NaN."""
    sums, numbers = exchange.sum_gradients, iter(range(99))

    def poisoned(world: Any, gradients: Any, *rest: Any) -> Any:
        factor = float("nan") if next(numbers) in calls else 1.0
        return sums(world, tree_map(lambda g: g * factor, gradients), *rest)

    monkeypatch.setattr(exchange, "sum_gradients", poisoned)


def test_a_gradient_that_is_nan_once_is_computed_again(tmp_path, monkeypatch) -> None:
    plain = tiny.run(tmp_path, "plain", train__steps=6, model__dropout=0.1)
    poison(monkeypatch, [3])
    words = tiny.settings(tmp_path, train__steps=6, model__dropout=0.1, run__name="poisoned")
    said, poisoned = "step 4: loss or gradient is not finite; computed once more", plain.with_name("poisoned")
    assert said in tiny.train(tmp_path, words).stdout
    assert [(r["step"], r["text"]) for r in tiny.records(poisoned, "warning")] == [(4, said)]
    assert difference(plain, poisoned) == 0.0


@pytest.mark.parametrize("strategy", ["auto", "independent"])
def test_a_nan_that_stays_gets_into_no_checkpoint(tmp_path, monkeypatch, strategy: str) -> None:
    """Once the cause is gone, the run goes on as if nothing had been: the updates that were left out are made.

    The first evaluation comes after such an update, and its loss is the lowest so far.
    """
    words = tiny.settings(tmp_path, train__steps=8, checkpoint__every=1, evaluate__samples=0, evaluate__every=4)
    words.append(f"strategy={strategy}")
    tiny.train(tmp_path, [*words, "run.name=plain"])
    with monkeypatch.context() as patch:
        poison(patch, range(3, 99))
        stopped = tiny.train(tmp_path, [*words, "run.name=run", "train.max_skipped_steps=3"], check=False)
    run = tmp_path / "runs/run"
    assert stopped.returncode == 1 and "3 updates in a row were not finite, the last at step 6" in stopped.stderr
    assert "lower train.learning_rate (0.001)" in " ".join(stopped.stderr.split()) and "--resume" in stopped.stderr
    assert sorted(path.name for path in (run / "checkpoints").glob("step-*"))[-1] == "step-00000003"
    tiny.train(tmp_path, ["--resume", str(run)])
    assert tiny.difference(tmp_path / "runs/plain", run) == 0.0


def test_checkpoints_come_by_time_or_by_steps() -> None:
    writer = checkpoint.CheckpointWriter(seconds=10.0)
    assert [writer.is_due(step, 1.0) for step in range(1, 11)] == [False] * 9 + [True], "one more step would exceed it"
    writer = checkpoint.CheckpointWriter(every=3)
    assert [writer.is_due(step, 1e9) for step in (1, 2, 3, 4)] == [False, False, True, False]


def test_a_finished_run_is_left_as_it_is(tmp_path) -> None:
    run = tiny.run(tmp_path, train__steps=3)
    before = {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}
    assert re.search("(?s)all of its 3 steps.*reward accuracy", tiny.train(tmp_path, ["--resume", str(run)]).stdout)
    assert {path: path.read_bytes() for path in run.rglob("*") if path.is_file()} == before
    assert "these steps learn nothing" in tiny.train(tmp_path, ["--resume", str(run), "train.steps=5"]).stdout


@pytest.mark.parametrize(("steps", "to"), [(3, 14), (9, 14), (12, 8), (12, 4)])
def test_other_steps_are_no_jump_of_the_learning_rate(tmp_path, steps: int, to: int) -> None:
    words = ["checkpoint.every=1", "checkpoint.keep=99", "train.final_learning_rate=1e-4"]
    run = tiny.run(tmp_path, words=words, train__steps=steps)
    planned = [record["learning_rate"] for record in tiny.steps_of(run)]
    tiny.undo(run, 3)
    assert "goes on without a jump" in tiny.train(tmp_path, ["--resume", str(run), f"train.steps={to}"]).stdout
    rates = [record["learning_rate"] for record in tiny.steps_of(run)]
    assert rates[3] == pytest.approx((*planned, 1e-4)[3]) and rates == sorted(rates, reverse=True) and len(rates) == to
    assert rates[-1] == pytest.approx(1e-4) or to == 4


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT])
def test_records_wait_for_room_on_the_disk_or_in_a_quota(tmp_path, number: int) -> None:
    class Full:
        def write(self, _: bytes) -> int:
            raise OSError(number, os.strerror(number))

    tracker = PerformanceTracker(tmp_path / "log.jsonl")
    tracker._file, file = Full(), tracker._file  # type: ignore[assignment]
    tracker.record("warning", step=1, text="kept")
    assert tracker._unwritten
    tracker._file = file
    tracker.record("warning", step=2, text="written")
    assert [record["step"] for record in read_records(tmp_path / "log.jsonl")] == [1, 2]


def test_evaluate_command_agrees_with_the_run(tmp_path, capsys) -> None:
    run, out = tiny.run(tmp_path, train__steps=5), tmp_path / "pairs.jsonl"
    assert evaluate.main(["--run", str(run), "--per-pair", str(out)]) == 0
    summary, lines = tiny.summary(run), tiny.read_jsonl(out)
    printed = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert len(lines) == 7
    logps = [abs(line[f"policy_{side}_logp"]) for line in lines for side in ("chosen", "rejected")]
    limit = rounding.roundoff(48) * max(logps)  # all are made of log-probabilities
    for key in ("loss", "reward_accuracy", "reward_margin", "kl"):
        assert printed[key] == pytest.approx(summary[key], rel=0, abs=limit)
    for line in lines:
        margin = 0.1 * (line["policy_chosen_logp"] - line["reference_chosen_logp"])
        assert line["reward_chosen"] == pytest.approx(margin, rel=0, abs=limit)
    assert np.mean([line["loss"] for line in lines]) == pytest.approx(summary["loss"], rel=0, abs=limit)


def test_data_takes_the_place_of_what_a_run_held_out(tmp_path) -> None:
    (tmp_path / "adapters.safetensors").touch()
    (tmp_path / "config.yaml").write_text("model: {path: m}\ndata: {train: t, holdout: 0.1}\n")
    settings = evaluate._read_config(evaluate._parse(["--run", str(tmp_path), "--data", "d"]))
    assert (settings.data.valid, settings.data.holdout) == ("d", 0)


def test_per_pair_figures_equal_float64(tmp_path) -> None:
    policy = tiny.stored_model(tmp_path / "policy")
    reference = tiny.stored_model(tmp_path / "reference", seed=12, tie_word_embeddings=True)
    records = tiny.pairs(9, seed=3)
    data, out = tiny.write_jsonl(tmp_path / "data.jsonl", records), tmp_path / "out.jsonl"
    words = ["--model", str(policy), "--reference", str(reference), "--data", str(data), "--per-pair", str(out)]
    assert evaluate.main([*words, "evaluate.batch_size=4", "train.beta=0.3"]) == 0
    lines, expected = tiny.read_jsonl(out), []
    for record in records:
        row = {}
        for name, path in (("policy", policy), ("reference", reference)):
            stored = mx.load(str(path / "model.safetensors")).items()
            weights, prompt = {key: np.array(array, np.float64) for key, array in stored}, record["prompt_ids"]
            for side in ("chosen", "rejected"):
                logp = float64.completion_logp(weights, prompt, record[f"{side}_ids"], 4, 2)
                row[f"{name}_{side}_logp"] = logp
        row["reward_chosen"] = 0.3 * (row["policy_chosen_logp"] - row["reference_chosen_logp"])
        row["reward_rejected"] = 0.3 * (row["policy_rejected_logp"] - row["reference_rejected_logp"])
        row["loss"] = float(np.log1p(np.exp(-(row["reward_chosen"] - row["reward_rejected"]))))
        expected.append(row)
    # The largest is a log-probability: what the others are made of.
    largest = max(abs(value) for row in expected for value in row.values())
    limit = rounding.roundoff(tiny.WIDTH) * largest
    for line, row in zip(lines, expected, strict=True):
        assert line == pytest.approx(row, rel=0, abs=limit)


def test_a_run_folder_has_one_owner_and_is_never_overwritten(tmp_path) -> None:
    run = tiny.run(tmp_path, train__steps=2)
    before = tiny.bits(run)
    again = tiny.train(tmp_path, tiny.settings(tmp_path, run__name="run"), check=False)
    assert_one_clear_line(again, "already holds a run", "--resume")
    with (run / ".lock").open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert_one_clear_line(tiny.train(tmp_path, ["--resume", str(run), "train.steps=4"], check=False), "in use")
    assert tiny.bits(run) == before


def test_a_new_run_takes_what_a_killed_one_left_and_no_other_folder(tmp_path) -> None:
    for name in (".lock", "plan.json", "config.yaml.7.unfinished", ".disk-0a-0001"):
        (tmp_path / name).touch()
    checkpoint.require_free(tmp_path)
    checkpoint.sweep(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == [".lock", "plan.json"], "they would add up"
    (tmp_path / "README.md").touch()
    with pytest.raises(UserError, match=r"is not a run: it holds README.md; give another run.name"):
        checkpoint.require_free(tmp_path)


def test_a_checkpoint_takes_the_place_of_another_one_of_its_step(tmp_path) -> None:
    final = tmp_path / "step-00000005"
    for text in ("old", "new"):
        checkpoint.write_whole(final, {}, {"text": text})
        assert (final / "text").read_text() == text and [path.name for path in tmp_path.iterdir()] == [final.name]


def test_changed_data_is_not_resumed(tmp_path) -> None:
    run = tiny.run(tmp_path, train__steps=2)
    tiny.write_jsonl(tmp_path / "train.jsonl", tiny.pairs(21, seed=5))
    result = tiny.train(tmp_path, ["--resume", str(run), "train.steps=4"], check=False)
    assert_one_clear_line(result, "no longer what this run was trained on")


def test_a_fault_of_ours_on_one_rank_ends_all(tmp_path) -> None:
    """An ordinary end would wait in MPI for the other rank, which waits for this one until sync.timeout_seconds."""
    script = tmp_path / "rank.py"
    script.write_text(
        "import os, runpy, sys\n"
        f"sys.path[0] = {str(ROOT)!r}\n"
        "from lib.system import mpi_and_blas\n"
        "mpi_and_blas.prepare()\n"
        "from lib.training import loop\n"
        "if os.environ['OMPI_COMM_WORLD_RANK'] == '1':\n"
        "    loop.learning_rate = lambda *_: 1 / 0\n"
        f"runpy.run_path({str(ROOT / 'train.py')!r}, run_name='__main__')\n"
    )
    words = [*tiny.settings(tmp_path), "--config", str(tiny.config_file(tmp_path))]
    command = [str(mpi_and_blas.mpirun_path()), "-n", "2", sys.executable, str(script), *words]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert result.returncode == 1
    assert "ZeroDivisionError" in result.stderr


def test_a_disk_that_fills_up_loses_no_checkpoint(tmp_path) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=600k", "tmpfs", str(disk)], capture_output=True).returncode:
        pytest.skip("mounting a small disk needs root")
    try:
        often = {"checkpoint.every": 1, "checkpoint.keep": 99, "train.steps": 50}
        result = tiny.train(tmp_path, tiny.settings(tmp_path, **often, run__dir=disk, run__name="run"), check=False)
        assert_one_clear_line(result, "checkpoint of step 50", "earlier ones are whole")  # no other is worth a run
        warnings = [line for line in (result.stdout + result.stderr).splitlines() if "training goes on" in line]
        assert warnings and len(set(warnings)) == len(warnings), "each is said once"
        assert "No space left" in result.stderr
        newest = checkpoint.find(disk / "run", "last")
        assert newest == checkpoint.checkpoints_in(disk / "run" / "checkpoints")[0], "none is damaged"
        saved, logged = int(newest.name.removeprefix("step-")), [step["step"] for step in tiny.steps_of(disk / "run")]
        assert logged[:saved] == list(range(1, saved + 1)), "a checkpoint holds what no log tells"
        for step in (1, 2, 3):
            shutil.rmtree(disk / "run" / "checkpoints" / f"step-{step:08d}")
        tiny.train(tmp_path, ["--resume", str(disk / "run"), "train.steps=9", "checkpoint.keep=1"])
    finally:
        subprocess.run(["umount", str(disk)], check=True)


def assert_one_clear_line(result: subprocess.CompletedProcess[str], *expected: str) -> None:
    assert result.returncode == 2, (result.returncode, result.stdout[-500:], result.stderr[-2000:])
    lines = [line for line in result.stderr.strip().splitlines() if not line.startswith("warning: ")]
    assert len(lines) == 1 and lines[0].startswith("error: "), result.stderr
    for part in expected:
        assert part in lines[0], (part, lines[0])
