"""The examples of every --help, as printed: they fit the quickstart, name options that exist, and pass a shell unharmed."""

import os
import re
import shlex
import subprocess

import pytest

from lib.system import mpi_and_blas
from tests import test_docs, tiny
from tests.test_docs import help_of
from tests.tiny import ROOT

PROGRAMS = ("python ", "./launch ", "make ", "mpirun ")
HELPED = [("train.py",), ("launch",), *(("-m", f"lib.{name}") for name in ("evaluate", "dashboard", "server", "data"))]
PLACEHOLDERS = re.compile(r"\[[^]]*( |\.\.\.)[^]]*\]|\S+\|\S+")  # [key=value ...] and a|b are for the reader


def examples(text: str) -> list[str]:
    """The commands of a text, one a line, without what is said beside them."""
    lines = (re.split(r"\s{3,}", line.strip())[0] for line in text.splitlines())
    return [PLACEHOLDERS.sub("", line) for line in lines if line.startswith(PROGRAMS) and "usage" not in line]


@pytest.mark.parametrize("script", HELPED, ids=lambda script: script[-1])
def test_an_example_of_a_help_is_understood(script: tuple[str, ...], tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(ROOT)
    found = examples(help_of(*script))
    assert found, "a help without an example"
    for line in found:
        words = shlex.split(line)
        test_docs.check(words[: words.index(">")] if ">" in words else words, "of a help", tmp_path)


@pytest.mark.long
def test_mlxs_own_launcher_finds_the_program(tmp_path) -> None:
    """It starts what stands in the PATH, where `make setup` has a link; and says 0, whatever becomes of the ranks."""
    assert '(BIN / "train.py").symlink_to("../../train.py")' in (ROOT / "lib/system/installation.py").read_text()
    (tmp_path / "train.py").symlink_to(ROOT / "train.py")
    scripts = mpi_and_blas.mpirun_path().parent
    path = f"{tmp_path}:{scripts}:{os.environ['PATH']}"
    words = ["--config", str(tiny.config_file(tmp_path)), *tiny.settings(tmp_path), "plan.shares=[6,2]", "--dry-run"]
    done = subprocess.run(
        [str(scripts / "mlx.launch"), "-n", "2", "train.py", *words],
        cwd=ROOT,
        env={**os.environ, "PATH": path},
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert "6 + 2 = 8 rows" in done.stdout and "dry run: nothing is trained" in done.stdout, done.stdout + done.stderr
