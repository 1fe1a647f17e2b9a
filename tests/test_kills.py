"""Runs that are killed with SIGKILL again and again, and resumed: the bits of one that never was, every row once."""

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from lib.system import mpi_and_blas
from tests import tiny
from tests.tiny import ROOT


def steps_in(run: Path) -> int:
    return len(tiny.steps_of(run)) if (run / "logs/rank-000.jsonl").exists() else 0


def play(folder: Path, words: list[str], kills: int, seed: int, prefix: list[str]) -> int:
    """Starts a run, kills it some steps later, resumes it, ...; returns how many lives were cut short."""
    rng, run, killed = random.Random(seed), folder / "runs/killed", 0
    while True:
        is_there = (run / "config.yaml").exists()
        arguments = ["--resume", str(run)] if is_there else [*words, "run.name=killed"]
        if not is_there:
            arguments += ["--config", str(tiny.config_file(folder))]
        before, target = steps_in(run), rng.randint(1, 3)
        life = subprocess.Popen(
            [*prefix, sys.executable, str(ROOT / "train.py"), *arguments],
            cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True,
        )  # fmt: skip
        while life.poll() is None and killed < kills and steps_in(run) < before + target:
            time.sleep(0.002)
        if life.poll() is None and killed < kills:
            time.sleep(rng.uniform(0, 0.05))  # inside of a step, of a checkpoint, or between them
            os.killpg(life.pid, signal.SIGKILL)
            killed += 1
        told = life.communicate(timeout=120)[0]
        if life.returncode == 0:
            return killed
        assert life.returncode in (-signal.SIGKILL, 137), told


@pytest.mark.parametrize(
    ("words", "kills"),
    [
        (["evaluate.every=3", "model.dropout=0.1"], 4),
        pytest.param(["evaluate.every=3"], 20, marks=pytest.mark.long),
        pytest.param(["strategy=independent", "independent.merge=outer"], 6, marks=pytest.mark.long),
    ],
    ids=["four", "twenty", "rounds"],
)
def test_killed_anywhere_and_resumed_is_bit_identical(tmp_path, words: list[str], kills: int) -> None:
    steps = 5 + 3 * kills
    words = [*tiny.settings(tmp_path), f"train.steps={steps}", "checkpoint.every=1", "evaluate.samples=0", *words]
    tiny.train(tmp_path, [*words, "run.name=whole"])
    assert play(tmp_path, words, kills, seed=kills, prefix=[]) == kills
    whole, killed = tmp_path / "runs/whole", tmp_path / "runs/killed"
    assert tiny.difference(whole, killed) == 0.0
    for kind, keys in (("step", ("step", "loss", "rows")), ("evaluation", ("step", "loss"))):
        told = [[[r[key] for key in keys] for r in tiny.records(run, kind)] for run in (whole, killed)]
        assert told[0] == told[1] != []


def test_a_killed_rank_under_mpirun_leaves_word_how_to_go_on(tmp_path) -> None:
    words = [*tiny.settings(tmp_path), "--config", str(tiny.config_file(tmp_path)), "train.steps=5000", "run.name=r"]
    command = [str(mpi_and_blas.mpirun_path()), "-n", "2", sys.executable, str(ROOT / "train.py"), *words]
    life = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    while life.poll() is None and steps_in(tmp_path / "runs/r") < 3:
        time.sleep(0.02)
    ranks = subprocess.run(["pgrep", "-P", str(life.pid)], capture_output=True, text=True).stdout.split()
    os.kill(int(ranks[-1]), signal.SIGKILL)
    said = life.communicate(timeout=60)[1]
    assert life.returncode and f"go on with --resume {tmp_path / 'runs/r'}" in said, said
