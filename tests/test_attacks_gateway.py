"""A gateway holds beside hostile clients: with the faults of old, a good client waited for minutes beside each."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.attacks_gateway import ATTACKS, gateway, prepare


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    folder = prepare(tmp_path_factory.mktemp("attacked"))
    yield folder
    for tls in (False, True):
        gateway(folder, tls).process.kill()


@pytest.mark.parametrize("name", ATTACKS)
def test_it_holds(name: str, folder: Path) -> None:
    assert ATTACKS[name](folder) is None
