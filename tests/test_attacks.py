"""Somebody else's files and words meet one clear line, and never a traceback, code or another's terminal."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests import attacks, attacks_data, attacks_models, attacks_rounds, attacks_runs, attacks_shared
from tests.attacks import prepare

# benchmarks/attack.py has all of them, each with a limit on its seconds and bytes.
SLOW = ("64 million values of parquet", "a summary of text", "a summary of lists")
OTHERS = attacks_data.ATTACKS | attacks_models.ATTACKS | attacks_runs.ATTACKS | attacks_shared.ATTACKS
SLOW_KINDS = ("record: ", "environment: ", "pattern: ", "template: loops", "template: 10", "parquet: 20", "data: 2")
SLOW_KINDS += ("template: it waits", "tokenizer: a pattern that is slow")
HUNGRY = ("never end", "/dev/zero", "GB")  # of all memory, should they not hold
QUICK = [name for name in OTHERS if not name.startswith(SLOW_KINDS) and not any(word in name for word in HUNGRY)]
ALWAYS = ("checkpoint: a moment", "checkpoint: layers of rank", "checkpoint: a row", "run: a note", "setting: figures")
ALWAYS += ("cache: ", "calibration: ", "adapter: a run's", "code: ", "ring: ")
ALWAYS += (
    "run: tensorboard",
    "journal: it is",
    "export: a model's",
    "export: markup",
    "terminal: ",
    "host: a file that sets",
)
ALWAYS += ("parquet: pages", "parquet: headers", "checkpoint: a rank's part", "checkpoint: a reference")
ALWAYS += ("run: the folder of", "run: folders", "run: copies")
TRIED = [name for name in attacks.ATTACKS if name not in SLOW]
TRIED += [name for number, name in enumerate(QUICK) if number % 5 == 0 or name.startswith(ALWAYS)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return prepare(tmp_path_factory.mktemp("attacks"))


@pytest.fixture(scope="module")
def rounds(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return attacks_rounds.prepare(tmp_path_factory.mktemp("rounds"))


@pytest.mark.parametrize("name", ["samples: tokens of 10^30", "scores: of text", "verdict: 100,000 lists"])
def test_rounds_hold(name: str, rounds: Path) -> None:
    assert attacks_rounds.ATTACKS[name](rounds) is None


@pytest.mark.parametrize("name", TRIED)
def test_it_holds(name: str, folder: Path) -> None:
    assert (attacks.ATTACKS | OTHERS)[name](folder) is None
