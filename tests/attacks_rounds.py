"""Runs of rounds that somebody else began: their answers, scores and verdicts, each line an attack, as in tests/attacks.py."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from lib.errors import shown
from tests import tiny
from tests.attacks import Attack, run_of
from tests.attacks_models import Content, put

STOPPED = 3  # the step in the second round, of two steps each, at which the run was given away


def prepare(folder: Path) -> Path:
    """A run that was stopped in the middle of its second round: what is left of it is learnt from the round's files."""
    words = tiny.rounds(folder)
    tiny.train(
        folder, [*words, "run.name=rounds", "checkpoint.keep=10", "rollouts.rounds=2", "rollouts.tolerance=null"]
    )
    run = folder / "runs" / "rounds"
    for path in (run / "checkpoints").glob("step-*"):
        if int(path.name.removeprefix("step-")) > STOPPED:
            shutil.rmtree(path)
    (run / "rounds/0002/round.json").unlink()
    return folder


def resumed(change: Callable[[Path], None]) -> Attack:
    """The run, changed in its folder of rounds, and resumed: it goes well, or one line says what is wrong."""

    def attack(folder: Path) -> str | None:
        run = folder / "copies" / "rounds"
        shutil.rmtree(run.parent, ignore_errors=True)
        shutil.copytree(folder / "runs" / "rounds", run)
        change(run / "rounds")
        status, _, errors = run_of("train.py", ["--resume", str(run)])
        lines = [line for line in errors.splitlines() if line and not line.startswith("warning: ")]
        is_clear = status == 0 or (status == 2 and len(lines) == 1 and lines[0] == shown(lines[0]))
        return None if is_clear else f"status {status}: {errors[-300:]}"

    return attack


def of_lines(name: str, **fields: Any) -> Attack:
    """Other values in every line of a file of the round that is trained."""

    def change(rounds: Path) -> None:
        path = rounds / "0002" / name
        lines = [json.loads(line) | fields for line in path.read_text().splitlines()]
        path.write_text("".join(json.dumps(line) + "\n" for line in lines))

    return resumed(change)


def of_file(name: str, content: Content) -> Attack:
    return resumed(lambda rounds: put(rounds / name, content))


def of_verdict(**fields: Any) -> Attack:
    def change(rounds: Path) -> None:
        path = rounds / "0001/round.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | fields))

    return resumed(change)


def without(name: str, count: int) -> Attack:
    """A file of the round, without its first lines."""

    def change(rounds: Path) -> None:
        path = rounds / "0002" / name
        path.write_text("".join(path.read_text().splitlines(keepends=True)[count:]))

    return resumed(change)


DEEP = "[" * 100_000 + "]" * 100_000
ATTACKS: dict[str, Attack] = {
    "samples: tokens of text": of_lines("samples.jsonl", tokens="abc"),
    "samples: tokens of 10^30": of_lines("samples.jsonl", tokens=[10**30, 1], logps=[-1.0, -1.0]),
    "samples: tokens beyond the vocabulary": of_lines("samples.jsonl", tokens=[2**30, 1], logps=[-1.0, -1.0]),
    "samples: tokens below zero": of_lines("samples.jsonl", tokens=[-5, 1], logps=[-1.0, -1.0]),
    "samples: no tokens": of_lines("samples.jsonl", tokens=[], logps=[]),
    "samples: a million tokens": of_lines("samples.jsonl", tokens=[5] * 10**6, logps=[-1.0] * 10**6),
    "samples: log-probabilities of text": of_lines("samples.jsonl", logps="x"),
    "samples: too few log-probabilities": of_lines("samples.jsonl", logps=[-1.0]),
    "samples: a policy that is a list": of_lines("samples.jsonl", policy=["x"]),
    "samples: a prompt that is none": of_lines("samples.jsonl", prompt_id=10**9),
    "samples: a prompt of text": of_lines("samples.jsonl", prompt_id="x"),
    "samples: a number of text": of_lines("samples.jsonl", k="x"),
    "samples: what a terminal obeys": of_lines("samples.jsonl", text="\x1b[31m", place="\x1b]0;x\x07", finish="\x1b"),
    "samples: one is missing": without("samples.jsonl", 1),
    "samples: none": without("samples.jsonl", 10**6),
    "samples: no JSON": of_file("0002/samples.jsonl", "{"),
    "samples: lists": of_file("0002/samples.jsonl", "[]\n[]\n"),
    "samples: 100,000 lists": of_file("0002/samples.jsonl", DEEP),
    "samples: no text": of_file("0002/samples.jsonl", bytes(range(256))),
    "scores: of text": of_lines("scores.jsonl", score="x"),
    "scores: not finite": of_lines("scores.jsonl", score=float("inf")),
    "scores: no numbers": of_lines("scores.jsonl", score=float("nan")),
    "scores: of lists": of_lines("scores.jsonl", score=[1]),
    "scores: one is missing": without("scores.jsonl", 1),
    "scores: no text": of_file("0002/scores.jsonl", bytes(range(256))),
    "journal: another's": of_file("0002/scores.jsonl.partial", '{"key": "x", "chunks": 3}\n'),
    "journal: 100,000 lists": of_file("0002/scores.jsonl.partial", DEEP + "\n"),
    "verdict: figures of text": of_verdict(samples="x"),
    "verdict: held-out figures of text": of_verdict(held_out={"exact_match": "x"}),
    "verdict: a number of text": of_verdict(round="x"),
    "verdict: not JSON": of_file("0001/round.json", "{"),
    "verdict: 100,000 lists": of_file("0001/round.json", DEEP),
    "verdict: no text": of_file("0001/round.json", bytes(range(256))),
}
