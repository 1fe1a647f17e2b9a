"""A gateway holds beside hostile clients: with the faults of old, a good client waited for minutes beside each."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests import attacks_gateway
from tests.attacks_gateway import BESIDE, READERS


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    yield attacks_gateway.prepare(tmp_path_factory.mktemp("attacked"))
    attacks_gateway.end()


# benchmarks/attack.py has all of them, tests/test_listener.py what needs no model.
LIKE_ANOTHER = ("beside: one-byte chunks after 401, 1 connection", "beside: texts of 1 MB", "8,000 empty messages")
LIKE_ANOTHER += ("beside: one key asks for the metrics, 64 connections",)


@pytest.mark.parametrize("name", [name for name in BESIDE if name not in LIKE_ANOTHER])
def test_it_holds(name: str, folder: Path) -> None:
    assert BESIDE[name](folder) is None


def test_a_body_that_a_tokenizer_gives_up_on_is_refused(tmp_path: Path) -> None:
    assert READERS["a tokenizer's pattern that never ends"](tmp_path) is None
