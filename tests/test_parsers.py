"""No file and no request brings a traceback: a few hundred odd ones of each kind; benchmarks/fuzz_parsers.py tries more."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.model_parsers import MODEL_PARSERS
from tests.parsers import PARSERS, fuzz, refuses_or_reads

ALL = PARSERS | MODEL_PARSERS


@pytest.mark.parametrize("name", [name for name in ALL if name != "records"])  # these draw pictures: seconds each
def test_no_parser_lets_an_error_through(name: str, tmp_path: Path) -> None:
    fuzz(ALL[name], 60, lambda content: refuses_or_reads(ALL[name], content, tmp_path / "one"))
