"""benchmarks/test_matrix.py: which rows there are, what it counts, and where it goes on."""

from __future__ import annotations

import argparse
import re
from pathlib import Path

import pytest

from benchmarks import test_matrix as matrix
from benchmarks.test_matrix import Result
from tests.tiny import ROOT


def test_every_row_of_the_issue_is_there(tmp_path: Path) -> None:
    names = {setting.name for setting in matrix.settings_here(tmp_path)}
    kernels = {
        f"kernels: {core}, {threads}"
        for core in ("Nehalem", "Sandybridge", "Haswell", "Zen", "SkylakeX")
        for threads in ("1 thread", "2 threads")
    }
    others = {"busy: three processes beside", "user: an ordinary one", "path: a space and an umlaut", "locale: C"}
    assert kernels | others | {"locale: tr_TR.UTF-8", "umask: 077", "time zone: Pacific/Chatham"} <= names
    assert any(name.startswith("python: ") for name in names)


def test_a_row_counts_what_pytest_says_of_every_part() -> None:
    result = Result("row")
    parts = {
        "'/a b/.venv/bin/python' -m pytest -n 3": "\033[32m===== 7 passed, 2 skipped in 3.21s =====\033[0m",
        "/a/.venv/bin/mpirun -n 2 /a/python -m pytest -x": "FAILED tests/test_x.py::test_y - assert 1\n"
        "1 failed, 4 passed, 3 deselected in 61.5s (0:01:01)",
        "/a/.venv/bin/mpirun -n 3 /a/python -m pytest -x": "mpirun: no slots",
    }
    matrix.count(result, 1, "".join(f"{command}\n{said}\n" for command, said in parts.items()))
    assert (result.passed, result.failed, result.skipped) == (11, 2, 2)
    assert result.failures == ["tests/test_x.py::test_y - assert 1", "status 1: mpirun: no slots"]
    matrix.count(result, 1, "make: not found\n")
    assert result.failed == 3 and result.failures[-1] == "status 1: make: not found"
    none = "/a/mpirun -n 3 /a/python -m pytest -x\n20 deselected in 3.21s\nfailed in three ranks, status 5:\n    \n"
    green = Result("row")
    matrix.count(green, 1, f"/a/python -m pytest -n 3\n7 passed in 3.21s\n{none}")
    assert (green.passed, green.failed) == (7, 0), "the chosen files have nothing for three ranks"
    matrix.count(green, 137, "/a/python -m pytest -n 3\n7 passed in 3.21s\n")  # ended after its last line
    assert green.failed == 1 and green.failures


def test_what_a_red_row_printed_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(matrix, "ROOT", tmp_path)
    monkeypatch.setattr(matrix, "RECORD", tmp_path / "build/record.jsonl")
    assert matrix.kept_output(Result("kernels: Zen, 1 thread"), "assert 1\n") == "build/record-kernels-Zen-1-thread.txt"
    assert (tmp_path / "build/record-kernels-Zen-1-thread.txt").read_text() == "assert 1\n"


def test_it_goes_on_where_it_was_stopped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(matrix, "RECORD", tmp_path / "build/record.jsonl")
    assert matrix.recorded() == []
    red, green = Result("umask", "all", "c1", failed=1), Result("umask", "all", "c1", "2026-11-22", passed=9)
    absent = Result("Turkish", "all", "c1", not_run="no locale")
    for result in (red, green, absent):
        matrix.keep(result)
    with matrix.RECORD.open("a") as file:
        file.write('{"name": "cut o')
    kept = matrix.recorded()
    assert kept == [red, green, absent]
    assert matrix.passed_before(kept, "umask", "all", "c1") == green
    assert matrix.passed_before(kept[:1], "umask", "all", "c1") is None, "what failed is run again"
    assert matrix.passed_before([green, red], "umask", "all", "c1") is None
    assert matrix.passed_before(kept, "umask", "near", "c1") is matrix.passed_before(kept, "umask", "all", "c2") is None
    assert matrix.passed_before(kept, "Turkish", "all", "c1") is None
    assert matrix.markdown(kept)[2:] == [
        "| umask | all | 9 | 0 | 0 | 0 | c1 | 2026-11-22 |",
        "| Turkish | all | not run: no locale |  |  |  | c1 |  |",
    ]


def test_it_has_as_many_workers_as_make_test() -> None:
    options = argparse.Namespace(files=[], tests="all", seed=0, quick=False)
    command = " ".join(matrix.command_of(options, "python"))
    (workers,) = re.findall(r"pytest (-n 4.*?) -p", command)
    assert f"pytest {workers}\n" in (ROOT / "Makefile").read_text()
    assert command.count(" -- ") == 2, "the ranks' parts beside it"


@pytest.mark.parametrize(
    ("words", "told"),
    [(["--rows", "nothing"], "no row has nothing"), (["tests/none.py"], "tests/none.py is not there")],
)
def test_a_wrong_word_is_status_2(words: list[str], told: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        matrix.main(words)
    assert told in capsys.readouterr().err
