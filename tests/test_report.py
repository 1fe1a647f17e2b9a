"""Report: figures follow from the records, pages need nothing else, trackers get what the logs hold, the page is guarded."""

import json
import re
import struct
import sys
from pathlib import Path
from typing import Any

import dash
import pytest
from tensorboardX.proto.event_pb2 import Event

from lib import dashboard
from lib.report import charts, dashboard_page, run_report
from lib.report.history import RunHistory, figures
from lib.system.records import PerformanceTracker, Tail, read_records, rewind
from tests import tiny
from tests.tiny import ROOT
from tests.tiny import write_jsonl as write


def step(number: int, rank: int = 0, host: str = "a", **values: Any) -> dict[str, Any]:
    times = {"step_seconds": 0.5, "compute_seconds": 0.4, "sync_seconds": 0.1, "wait_seconds": 0.0}
    known = {"kind": "step", "rank": rank, "host": host, "step": number, "time": 1000.0 + number, "loss": 1 / number}
    figures = {"pairs": 8, "tokens": 80, "learning_rate": 1e-4, "peak_memory_bytes": 100 + number}
    return {**known, **figures, **times, **values}


def read_all(folder: Path) -> RunHistory:
    run = RunHistory(folder)
    while run.read():
        pass
    return run


# ---- Records ---------------------------------------------------------------------------------------------------------


def test_a_tail_gives_each_line_once_and_only_whole_ones(tmp_path) -> None:
    path, tail = tmp_path / "log", Tail(tmp_path / "log")
    assert tail.read() == (False, b"")
    path.write_bytes(b"one\ntw")
    assert tail.read() == (True, b"one\n") and tail.read() == (False, b"")
    path.write_bytes(b"one\ntwo\n")
    assert tail.read() == (False, b"two\n")
    path.write_bytes(b"new\n")
    assert tail.read() == (True, b"new\n"), "it was cut back"


def test_broken_lines_harm_no_page(tmp_path) -> None:
    log = tmp_path / "logs/rank-000.jsonl"
    write(log, [step(1), {"kind": "evaluation"}, {"kind": 7, "time": 1.0}, step(2)])
    with log.open("a") as file:
        file.write('[1]\n{"kind": "step"\nnull\n' + json.dumps(step(3))[:50])
    run = read_all(tmp_path)
    assert run.curve((0, "a"), "loss")[1].tolist() == [1.0, 0.5] and run.events == []


def test_a_log_is_cut_back_and_what_was_cut_is_kept(tmp_path) -> None:
    log = tmp_path / "rank-000.jsonl"
    write(log, [{"kind": "start"}, *(step(n) for n in range(1, 6)), {"kind": "end", "step": 5}])
    assert rewind(log, 3) == 3 and rewind(log, 3) == 0
    assert [record.get("step") for record in read_records(log)] == [None, 1, 2, 3]
    assert [record.get("step") for record in read_records(tmp_path / "discarded/rank-000.jsonl")] == [4, 5, 5]


@pytest.mark.parametrize(("count", "width"), [(7, 1), (2048, 1), (5001, 4)])
def test_a_long_curve_is_means_of_buckets(tmp_path, count: int, width: int) -> None:
    write(tmp_path / "logs/rank-000.jsonl", [step(n, loss=float(n)) for n in range(1, count + 1)])
    steps, values = read_all(tmp_path).curve((0, "a"), "loss")
    assert len(steps) == -(-count // width) and steps[-1] == count and values[0] == pytest.approx((1 + width) / 2)


def test_steps_that_a_lost_host_still_has_but_the_others_undid_are_not_shown(tmp_path) -> None:
    start = {"kind": "start", "rank": 0, "host": "a", "time": 1020.5, "resumed_from_step": 10, "resumes": [[10]]}
    again = [step(n, time=1020.0 + n) for n in range(11, 16)]
    write(tmp_path / "logs/rank-000.jsonl", [*(step(n) for n in range(1, 11)), start, *again])
    write(tmp_path / "logs/b/rank-001.jsonl", [step(n, rank=1, host="b") for n in range(1, 21)])
    run = read_all(tmp_path)
    assert run.curve((1, "b"), "loss")[0].tolist() == list(range(1, 11))
    assert run.curve((0, "a"), "loss")[0].tolist() == list(range(1, 16))


# ---- Figures ---------------------------------------------------------------------------------------------------------


def plan_of(strategy: str, **more: Any) -> dict[str, Any]:
    ranks = [{"host": "a", "micro_batch_sizes": [3, 3]}, {"host": "b"}]
    known = {"strategy": strategy, "shares": [6, 2], "global_batch_size": 8, "ranks": ranks, "calibrated": True}
    return {**known, "predicted_step_seconds": 0.4, "solo_sum_pairs_per_second": 25.0, **more}


def test_the_figures_follow_from_the_records(tmp_path) -> None:
    config = {"model": {"path": "m"}, "data": {"train": "t"}, "cost": {"watts": 100, "price_per_kwh": 0.5}}
    start = {"kind": "start", "time": 1000.0, "steps": 100, "plan": plan_of("synchronous")}
    for rank, (host, share) in enumerate((("a", 6), ("b", 2))):
        steps = [step(n, rank, host, pairs=share) for n in range(1, 41)]
        first = {**start, "config": config, "rank": rank, "host": host}
        write(tmp_path / f"logs/rank-{rank:03d}.jsonl", [first, *steps])
    now = figures(read_all(tmp_path), 1041.0)
    assert (now.state, now.summary["steps"], now.steps) == ("running", 40, 100)
    assert now.summary["pairs_per_second"] == pytest.approx(16.0)
    assert now.summary["efficiency"] == pytest.approx(16 / 25)
    assert now.summary["tokens_per_second"] == pytest.approx(2 * 160) and now.left_seconds == pytest.approx(61.5)
    assert now.summary["cost"]["energy_kwh"] == pytest.approx(2 * 0.1 * 41 / 3600)
    first, second = now.summary["ranks"]
    assert first["planned_pairs_per_second"] == pytest.approx(15.0) and second["host"] == "b"
    assert figures(read_all(tmp_path), 5000.0).state == "silent"
    (tmp_path / "logs/rank-001.jsonl").unlink()
    assert figures(read_all(tmp_path), 1041.0).missing == [(1, "b")]


def test_efficiency_counts_merges_and_waits_at_the_ends_of_rounds(tmp_path) -> None:
    start = {"kind": "start", "time": 1000.0, "steps": 100, "rows": 12, "plan": plan_of("independent")}
    for rank, (host, share) in enumerate((("a", 6), ("b", 2))):
        merge = {"kind": "merge", "time": 1050.0, "step": 40, "rank": rank, "host": host, "seconds": 4.0,
                 "waited_seconds": 6.0, "pairs": [240, 80]}  # fmt: skip
        steps = [step(n, rank, host, pairs=share) for n in range(1, 41)]
        write(tmp_path / f"logs/rank-{rank:03d}.jsonl", [{**start, "rank": rank, "host": host}, *steps, merge])
    now = figures(read_all(tmp_path), 1051.0)
    assert now.summary["efficiency"] == pytest.approx(320 / 30 / 25), "0.43, where the last steps alone say 0.64"
    assert now.summary["steps"] == 53, "12 rows are two steps, of 8 and of 4 rows: 26 epochs and 8 rows"


def test_one_machine_shows_no_efficiency(tmp_path) -> None:
    plan = {"strategy": "synchronous", "calibrated": True, "ranks": [{"host": "a"}], "solo_sum_pairs_per_second": 16.0}
    start = {"kind": "start", "time": 1000.0, "rank": 0, "host": "a", "plan": plan}
    write(tmp_path / "logs/rank-000.jsonl", [start, *(step(n) for n in range(1, 9))])
    now = figures(read_all(tmp_path), 1009.0)
    assert now.summary["efficiency"] is None
    assert "efficiency" not in dict(dashboard_page.card_texts(read_all(tmp_path), now))


def test_the_time_between_a_stop_and_a_resume_is_none_of_the_runs(tmp_path) -> None:
    start = {"kind": "start", "rank": 0, "host": "a"}
    records = [{**start, "time": 1000.0}, *(step(n) for n in range(1, 5))]
    records += [{**start, "time": 86_400.0}, *(step(n, time=86_396.0 + n) for n in range(5, 9))]
    write(tmp_path / "logs/rank-000.jsonl", records)
    now = figures(read_all(tmp_path), 86_405.0)
    assert now.summary["wall_seconds"] == pytest.approx(4.0 + 5.0) and now.restarts == 1
    assert figures(RunHistory(tmp_path / "none"), 5.0).state == "waiting"


def test_exact_match_stands_beside_the_held_out_loss(tmp_path) -> None:
    common = {"kind": "evaluation", "rank": 0, "host": "a"}
    before = {"time": 1000.0, "step": 0, "loss": 0.69, "exact_match": 0.97}
    after = {"time": 1120.0, "step": 120, "loss": 0.5, "exact_match": 0.82}
    write(tmp_path / "logs/rank-000.jsonl", [common | before, common | after])
    panels = charts.learning([read_all(tmp_path)])
    assert [panel.title for panel in panels] == ["Loss", "Exact match"]
    assert panels[1].figure["data"][0]["y"] == [0.97, 0.82]
    run_report.write(tmp_path)
    assert "<td>exact match</td><td>97.0 %</td><td>82.0 %</td>" in (tmp_path / "report.html").read_text()


# ---- The page --------------------------------------------------------------------------------------------------------


def test_the_page_shows_a_run_and_answers_those_alone_who_have_its_token(tmp_path) -> None:
    run = tiny.run(tmp_path, train__steps=4, evaluate__every=2)
    watcher = dashboard_page.Watcher(tmp_path / "runs")
    app = dashboard_page.make_app(watcher, "secret")
    visitor = app.server.test_client()
    assert visitor.get("/").status_code == 401 and visitor.get("/_dash-layout?token=x").status_code == 401
    let_in = visitor.get("/?token=secret")
    assert let_in.status_code == 302 and let_in.headers["Location"] == "/", "no token stays in the address"
    shown = visitor.get("/")
    assert shown.status_code == 200 and "default-src 'self'" in shown.headers["Content-Security-Policy"]
    assert not re.search(rb"https?://(?!127|localhost)", shown.data)
    update = dashboard_page.update(watcher, [], None)
    text, drawn = str(update["now"]), str(update["charts"])
    assert "4 / 4" in text and "tokens/s" in text and "finished" in str(update["state"])
    assert "Reward accuracy" in drawn and "held out" in drawn and "What happened when" in drawn
    runs = [read_all(run)] * 2
    table = str(dashboard_page.headline(runs, [figures(run, 1e10) for run in runs]))
    assert "Runs compared" in table and table.count("synchronous") == 3
    assert dashboard_page.update(watcher, [], update["seen"])["charts"] is dash.no_update, "nothing new was read"


def test_the_empty_state_is_one_sentence(tmp_path) -> None:
    watcher = dashboard_page.Watcher(tmp_path)
    update = dashboard_page.update(watcher, [], None)
    assert update["charts"] == "" and "has logs yet" in str(update["now"])


# ---- What a run leaves -----------------------------------------------------------------------------------------------


def test_a_run_leaves_one_page_that_needs_no_other_and_a_model_card(tmp_path) -> None:
    from huggingface_hub import ModelCard

    run = tiny.run(tmp_path, run__pages="true", train__steps=6, evaluate__every=3, cost__watts=100)
    text = (run / "report.html").read_text()
    assert not re.search(r"""(src|href)\s*=\s*["'](?!#|data:)|url\((?!#)|@import""", text), "nothing is fetched"
    assert text.count("<img") == 7 and "img { max-width: 100%" in text, "pictures are wider than their columns"
    evaluations = tiny.records(run, "evaluation")
    best = min(evaluations[1:], key=lambda record: record["loss"])  # whose weights the folder holds
    for evaluation in (evaluations[0], best):
        assert f"<td>{evaluation['loss']:.4f}</td>" in text
    card = ModelCard.load(run / "README.md")
    assert card.data.library_name == "mlx" and card.data.base_model is None, "a local path is no name on the hub"
    assert f"| loss | {evaluations[0]['loss']:.4f} | {best['loss']:.4f} |" in card.text
    (run / "report.html").unlink()
    assert dashboard.main(["--export", str(run)]) == 0 and (run / "report.html").exists()


def test_what_a_model_says_is_text_on_the_page(tmp_path) -> None:
    tracker = PerformanceTracker(tmp_path / "logs" / "rank-000.jsonl", 0, "a")
    tracker.record("start")
    tracker.record("samples", samples=[{"prompt": "<script>alert(1)</script>", "before": "</pre><img src=x>"}])
    tracker.close()
    run_report.write(tmp_path)
    text = (tmp_path / "report.html").read_text()
    assert "<script>" not in text and "<img src=x" not in text and "&lt;script&gt;" in text


# ---- Trackers --------------------------------------------------------------------------------------------------------


def events(run: Path) -> list[Event]:
    """All events of a run, file by file by name, as TensorBoard reads them (a record: length, its CRC, bytes, their CRC)."""
    found = []
    for path in sorted((run / "tensorboard").iterdir()):
        content, at = path.read_bytes(), 0
        while at < len(content):
            (length,) = struct.unpack_from("<Q", content, at)
            found.append(Event.FromString(content[at + 12 : at + 12 + length]))
            at += 16 + length
    return found


def scalars(found: list[Event]) -> dict[tuple[int, str], float]:
    """What TensorBoard shows: a session that starts at a step replaces what earlier ones wrote from there on."""
    shown: dict[tuple[int, str], float] = {}
    for event in found:
        if event.HasField("session_log"):
            shown = {key: value for key, value in shown.items() if key[0] < event.step}
        shown |= {(event.step, value.tag): value.simple_value for value in event.summary.value}
    return shown


def logged(run: Path) -> dict[tuple[int, str], float]:
    prefixes = {"step": "train", "evaluation": "held_out"}
    return {
        (record["step"], f"{prefixes[record['kind']]}/{key}"): record[key]
        for record in read_records(run / "logs" / "rank-000.jsonl")
        if record["kind"] in prefixes
        for key in ("loss", "reward_accuracy", "reward_margin", "kl", "learning_rate")
        if record.get(key) is not None
    }


def test_samples_are_of_distinct_prompts(tmp_path) -> None:
    lines = (ROOT / "configs/quickstart/train.jsonl").read_text().splitlines()
    tiny.write_jsonl(tmp_path / "pairs.jsonl", [lines[0], lines[0], lines[1], lines[2]])
    words = [f"data.train={tmp_path / 'pairs.jsonl'}", "data.valid=null", "evaluate.answers=null", "train.steps=1"]
    words += [f"run.dir={tmp_path}", "run.name=run", "run.pages=false", "evaluate.samples=3", "evaluate.max_tokens=2"]
    tiny.train(tmp_path, ["--config", str(ROOT / "configs/quickstart.yaml"), *words])
    shown = [record["samples"] for record in read_records(tmp_path / "run/logs/rank-000.jsonl") if "samples" in record]
    asked = [json.loads(line)["prompt"] for line in lines[:3]]
    assert len(shown) == 2, "before and after training"
    for samples in shown:
        assert all(prompt in sample["prompt"] for prompt, sample in zip(asked, samples, strict=True))


def test_tensorboard_has_the_figures_of_the_logs_and_may_be_asked_for_on_resume(tmp_path) -> None:
    words = ["evaluate.samples=0", "evaluate.every=2", "train.steps=4", "run.sinks=[tensorboard]"]
    run = tiny.run(tmp_path, words=words)
    assert {tag for _, tag in logged(run)} >= {"train/loss", "train/learning_rate", "held_out/loss"}
    assert scalars(events(run)).items() >= {key: pytest.approx(value) for key, value in logged(run).items()}.items()
    before = events(run)
    tiny.train(tmp_path, ["--resume", str(run), "train.steps=6", "run.sinks=[]"])
    assert events(run) == before
    tiny.train(tmp_path, ["--resume", str(run), "train.steps=8", "run.sinks=[tensorboard]"])
    shown = scalars(events(run))
    assert {step for step, tag in shown if tag == "train/loss"} == {1, 2, 3, 4, 7, 8}
    assert all(shown[key] == pytest.approx(value) for key, value in logged(run).items() if key[0] not in (5, 6))


def test_a_missing_package_is_one_line_before_anything_is_written(tmp_path, monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)  # as if it were not installed
    result = tiny.train(tmp_path, [*tiny.settings(tmp_path), "run.sinks=[tensorboard,wandb]"], check=False)
    assert result.returncode == 2 and result.stderr.count("\n") == 1
    assert result.stderr.startswith("error: run.sinks: wandb needs the package wandb")
    assert "pip install wandb" in result.stderr
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize("breaks", ["opening", "writing", "closing"])
def test_a_failing_sink_is_told_once_and_ends_nothing(tmp_path, monkeypatch, breaks: str) -> None:
    def fault(*_: Any) -> None:
        raise ConnectionError("no route\nto host")

    class Package:
        @staticmethod
        def init(*_: Any, **__: Any) -> Any:
            return fault() if breaks == "opening" else Package

        @staticmethod
        def log(values: Any, step: int) -> None:
            if breaks == "writing" and step >= 2:
                fault()

        finish = staticmethod(fault if breaks == "closing" else lambda: None)

    monkeypatch.setitem(sys.modules, "trackio", Package)
    run = tmp_path / "runs" / "run"
    words = [*tiny.settings(tmp_path), "run.name=run", "evaluate.samples=0", "train.steps=4"]
    result = tiny.train(tmp_path, [*words, "run.sinks=[trackio,tensorboard]"])
    assert result.stdout.count("warning: run.sinks: trackio") == 1 and "no route to host" in result.stdout
    assert [record["step"] for record in tiny.steps_of(run)] == [1, 2, 3, 4]
    (warning,) = tiny.records(run, "warning")
    assert warning["step"] == {"opening": 0, "writing": 2, "closing": 4}[breaks] and "trackio" in warning["text"]
    assert (4, "train/loss") in scalars(events(run)), "the other sink has all"
