"""A gateway holds beside hostile clients: with the faults of old, a good client waited for minutes beside each."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests import attacks_gateway


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    yield attacks_gateway.prepare(tmp_path_factory.mktemp("attacked"))
    attacks_gateway.end()


@pytest.mark.parametrize(
    "name", attacks_gateway.BESIDE
)  # tests/test_listener.py has the rest; benchmarks/attack.py all
def test_it_holds(name: str, folder: Path) -> None:
    assert attacks_gateway.ATTACKS[f"gateway: {name}"](folder) is None
