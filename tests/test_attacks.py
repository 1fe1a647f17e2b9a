"""Somebody else's files and words meet one clear line, and never a traceback, code or another's terminal."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.attacks import ATTACKS, prepare


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return prepare(tmp_path_factory.mktemp("attacks"))


SLOW = ("64 million values of parquet", "a summary of text", "a summary of lists")  # benchmarks/attack.py has them


@pytest.mark.parametrize("name", [name for name in ATTACKS if name not in SLOW])
def test_it_holds(name: str, folder: Path) -> None:
    assert ATTACKS[name](folder) is None
