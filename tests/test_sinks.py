"""Sinks: TensorBoard's file holds the logs' figures, a missing package is told before anything is written, a failing one is left out."""

import struct
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from tensorboardX.proto.event_pb2 import Event

from lib.report import trackers
from lib.system.records import read_records
from tests import tiny


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


def test_tensorboard_has_the_figures_of_the_logs_and_may_be_asked_for_on_resume(tmp_path: Path) -> None:
    run = tmp_path / "runs" / "run"
    words = [*tiny.settings(tmp_path), "run.name=run", "evaluate.samples=0", "evaluate.every=2", "train.steps=4"]
    tiny.train(tmp_path, [*words, "run.sinks=[tensorboard]"])
    assert {tag for _, tag in logged(run)} >= {"train/loss", "train/learning_rate", "held_out/loss"}
    assert scalars(events(run)).items() >= {key: pytest.approx(value) for key, value in logged(run).items()}.items()

    before = events(run)
    tiny.train(tmp_path, ["--resume", str(run), "train.steps=6", "run.sinks=[]"])
    assert events(run) == before
    tiny.train(tmp_path, ["--resume", str(run), "train.steps=8", "run.sinks=[tensorboard]"])
    shown = scalars(events(run))
    assert {step for step, tag in shown if tag == "train/loss"} == {1, 2, 3, 4, 7, 8}
    assert all(shown[key] == pytest.approx(value) for key, value in logged(run).items() if key[0] not in (5, 6))


def test_steps_that_a_crash_undid_are_forgotten(tmp_path: Path) -> None:
    start: dict[str, Any] = {"kind": "start", "config": {}, "resumed_from_step": None}
    for resumed, losses in ((None, {1: 0.5, 2: 0.4, 3: 0.9, 4: 0.9}), (2, {3: 0.3})):
        feed = trackers.Feed(["tensorboard"], tmp_path)
        feed.take(start | {"resumed_from_step": resumed})
        for step, loss in losses.items():
            feed.take({"kind": "step", "step": step, "time": 1.0, "loss": loss, "kl": None, "grad_norm": float("nan")})
        feed.close()
    shown = scalars(events(tmp_path))
    assert shown == {(step, "train/loss"): pytest.approx(loss) for step, loss in ((1, 0.5), (2, 0.4), (3, 0.3))}


def test_a_missing_package_is_one_line_before_anything_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)  # as if it were not installed
    result = tiny.train(tmp_path, [*tiny.settings(tmp_path), "run.sinks=[tensorboard,wandb]"], check=False)
    assert result.returncode == 2 and result.stderr.count("\n") == 1
    assert result.stderr.startswith("error: run.sinks: wandb needs the package wandb")
    assert "pip install wandb" in result.stderr
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize("breaks", ["opening", "writing", "closing"])
def test_a_failing_sink_is_told_once_and_ends_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, breaks: str
) -> None:
    @contextmanager
    def failing(folder: Path, config: dict[str, Any], resumed: bool) -> Iterator[trackers.Write]:
        def write(step: int, values: dict[str, float]) -> None:
            if breaks == "writing" and step >= 2:
                raise ConnectionError("no route\nto host")

        if breaks == "opening":
            raise ConnectionError("no route\nto host")
        yield write
        if breaks == "closing":
            raise ConnectionError("no route\nto host")

    monkeypatch.setitem(trackers.SINKS, "trackio", failing)
    monkeypatch.setitem(trackers.PACKAGES, "trackio", "json")
    run = tmp_path / "runs" / "run"
    words = [*tiny.settings(tmp_path), "run.name=run", "evaluate.samples=0", "train.steps=4"]
    result = tiny.train(tmp_path, [*words, "run.sinks=[trackio,tensorboard]"])
    assert result.stderr.count("warning: run.sinks: trackio") == 1 and "no route to host" in result.stderr
    assert [record["step"] for record in tiny.steps_of(run)] == [1, 2, 3, 4]
    (warning,) = [r for r in read_records(run / "logs/rank-000.jsonl") if r["kind"] == "warning"]
    assert warning["step"] == {"opening": 0, "writing": 2, "closing": 4}[breaks] and "trackio" in warning["text"]
    assert (4, "train/loss") in scalars(events(run)), "the other sink has all"
