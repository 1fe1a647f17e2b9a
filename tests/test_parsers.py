"""No file and no request brings a traceback: a few hundred odd ones of each kind; benchmarks/fuzz_parsers.py tries more."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.parsers import ATTACK, PARSERS, refuses_or_reads


@pytest.mark.parametrize("name", [name for name in PARSERS if name != "records"])  # these draw pictures: seconds each
def test_no_parser_lets_an_error_through(name: str, tmp_path: Path) -> None:
    parser = PARSERS[name]

    @settings(ATTACK, max_examples=60, derandomize=True)
    @given(st.data())
    def attack(data: st.DataObject) -> None:
        refuses_or_reads(parser, data.draw(parser.inputs), tmp_path / "one")

    attack()
