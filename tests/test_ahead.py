"""A process that read ahead makes the very run that one makes that did not, and never of a file that changed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from lib.config import load
from lib.training import preload
from tests import tiny
from tests.tiny import ROOT


def spare(folder: Path, words: list[str], between: str = "", changed: Path | None = None) -> Path:
    """A run by lib.launch.standby; `changed` gets the text `between` when all is read and before the command comes."""
    process = subprocess.Popen(
        [sys.executable, "-m", "lib.launch.standby"], cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0
    )
    assert process.stdin is not None and process.stdout is not None
    command = ["train.py", "--config", str(tiny.config_file(folder)), *words]
    process.stdin.write(json.dumps({"command": command}).encode() + b"\n")
    assert process.stdout.readline() == b"ready\n"
    if changed is not None:
        changed.write_text(between)
    process.stdin.write(json.dumps({"command": command, "environment": {}}).encode() + b"\n")
    process.communicate(timeout=120)
    assert process.returncode == 0
    return folder / "runs"


def test_a_run_that_was_read_ahead_is_the_same_bit_for_bit_and_notices_a_changed_file(tmp_path: Path) -> None:
    words = [*tiny.settings(tmp_path, rows=21), "train.steps=6", "plan.replan=false"]
    tiny.train(tmp_path, [*words, "run.name=read"])
    spare(tmp_path, [*words, "run.name=ahead"])
    weights = [(tmp_path / "runs" / name / "adapters.safetensors").read_bytes() for name in ("read", "ahead")]
    assert weights[0] == weights[1]

    data = tmp_path / "train.jsonl"
    before = data.read_text()
    other = "".join(reversed(before.splitlines(keepends=True)))  # as many bytes
    spare(tmp_path, [*words, "run.name=changed"], other, data)
    tiny.train(tmp_path, [*words, "run.name=other"])
    changed, again = ((tmp_path / "runs" / name / "adapters.safetensors").read_bytes() for name in ("changed", "other"))
    assert changed == again != weights[0], "trained on what the file held before"


def test_what_was_read_ahead_is_used_and_forgotten_when_anything_of_it_changes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = tiny.settings(tmp_path, rows=21)
    path = tiny.config_file(tmp_path)
    settings, command = load.load(path, words), ["--config", str(path), *words]
    monkeypatch.setattr(preload, "_ahead", None)
    preload.read(command)
    first = preload.inputs(settings, print)
    assert preload.inputs(load.load(path, [*words, "plan.shares=[8]"]), print) is first, "read twice"
    model = preload.policy(settings, lazy=False)
    assert model is not preload.policy(settings, lazy=False), "two runs would train one model"
    assert preload.inputs(load.load(path, [*words, "data.max_length=32"]), print) is not first

    preload.read(command)
    first, file = preload.inputs(settings, print), tmp_path / "model/config.json"
    seen = file.stat()
    file.write_text(file.read_text())
    os.utime(file, ns=(seen.st_atime_ns, seen.st_mtime_ns))  # as if nobody had touched it
    assert preload.inputs(settings, print) is not first


@pytest.mark.parametrize(("weights", "free", "fits"), [(10**9, 10**10, True), (10**9, 10**10 - 1, False), (0, 0, True)])
def test_a_second_copy_of_the_weights_needs_ten_times_their_room(weights: int, free: int, fits: bool) -> None:
    assert preload.is_small(weights, free) is fits
