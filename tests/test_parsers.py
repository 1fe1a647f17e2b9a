"""No file and no request brings a traceback: a few dozen odd ones of each kind; benchmarks/fuzz_parsers.py tries more."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests import seeds
from tests.model_parsers import MODEL_PARSERS
from tests.mutations import Raw, json_lines, json_text
from tests.parsers import PARSERS, fuzz, refuses_or_reads

ALL = PARSERS | MODEL_PARSERS
DEEP, LONG = Raw("[" * 100_000), Raw("9" * 5000)  # Python reads neither: lists without end, numbers of 5,000 digits
CURVE = seeds.CALIBRATION["curves"][0]
POINT = CURVE["points"][0]
HUGE_POINT = POINT | {"batch_size": 2**45}


@pytest.mark.parametrize("name", [name for name in ALL if name != "pages"])  # these draw pictures: seconds each
def test_no_parser_lets_an_error_through(name: str, tmp_path: Path) -> None:
    fuzz(ALL[name], 30, lambda content: refuses_or_reads(ALL[name], content, tmp_path / "one"))


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("calibrations", json_text(seeds.CALIBRATION | {"gflops": LONG})),
        ("calibrations", json_text(seeds.CALIBRATION | {"links": DEEP})),
        ("calibrations", json_text({**seeds.CALIBRATION, "curves": [{**CURVE, "points": [{"batch_size": 10**400}]}]})),
        ("calibrations", json_text({**seeds.CALIBRATION, "curves": [{**CURVE, "points": [POINT, HUGE_POINT]}]})),
        ("records", json_text(seeds.SUMMARY | {"pairs_per_second": LONG})),
        ("records", json_lines([{"kind": "round", **seeds.WHO}, {"kind": "round", **seeds.WHO, "answers": {}}])),
        ("records", json_text(seeds.SUMMARY | {"pairs_per_second": 10**400})),
        ("records", json_text(seeds.SUMMARY | {"cost": {"cost": -(10**400), "energy_kwh": 1.0}})),
        ("records", json_lines([{"kind": "round", "time": 1.0, "rank": 0, "step": 1, **seeds.ROUND}])),
        ("labels", json_text({"id": DEEP})),
        ("journals", json_lines([{"chunk": -1, "lines": ["a"]}])),
        ("journals", json_lines([[1]])),
        ("journals", json_lines([{"chunk": 0, "lines": 3}])),
        ("journals", json_lines([{"chunk": n, "lines": ["a", "\ud800"]} for n in range(3)])),
        ("rounds", json_lines([seeds.SAMPLE | {"tokens": ["a"]}])),
        ("rounds", json_lines([seeds.SAMPLE | {"k": DEEP}])),
    ],
)
def test_what_was_found_stays_mended(name: str, content: bytes, tmp_path: Path) -> None:
    refuses_or_reads(ALL[name], content, tmp_path / "one")
