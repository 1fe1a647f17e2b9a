"""A gateway holds beside hostile clients: with the faults of old, a good client waited for minutes beside each."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests import attacks_gateway


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    yield tmp_path_factory.mktemp("attacked")
    attacks_gateway.end()


@pytest.mark.parametrize("name", attacks_gateway.ATTACKS)
def test_it_holds(name: str, folder: Path) -> None:
    assert attacks_gateway.ATTACKS[name](folder) is None
