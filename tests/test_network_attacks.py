"""Whoever connects to a run's listeners, or sits between two of them, changes nothing and delays nobody."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.attacks_network import ATTACKS, WORDS

FEW = ("nothing", "a greeting and zeros")  # of what a stranger says; benchmarks/attack.py has all of it
NAMES = [name for name in ATTACKS if not name.endswith(tuple(f" says {word}" for word in WORDS if word not in FEW))]


@pytest.mark.parametrize("name", NAMES)
def test_it_holds(name: str, tmp_path: Path) -> None:
    assert ATTACKS[name](tmp_path) is None
