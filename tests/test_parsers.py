"""No file and no request brings a traceback: a few hundred odd ones of each kind; benchmarks/fuzz_parsers.py tries more."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from tests.parsers import PARSERS, refuses_or_reads


@pytest.mark.parametrize("name", [name for name in PARSERS if name != "records"])  # these draw pictures: seconds each
def test_no_parser_lets_an_error_through(name: str, tmp_path: Path) -> None:
    parser = PARSERS[name]

    @settings(
        max_examples=60,
        derandomize=True,
        deadline=None,
        database=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(st.data())
    def attack(data: st.DataObject) -> None:
        refuses_or_reads(parser, data.draw(parser.inputs), tmp_path / "one")

    attack()
