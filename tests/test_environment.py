"""Programs started by an interpreter that lacks what they need: they go on in .venv, or say in one line what to do."""

import ast
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.tiny import ROOT, script

ECHO = 'printf "%s\\n" entered "$@"'


def is_run(path: Path) -> bool:
    return '__name__ == "__main__"' in path.read_text()


def programs() -> list[list[str]]:
    """The words after `python` of everything that people and launchers start."""
    scripts = [path for path in sorted((ROOT / "benchmarks").glob("*.py")) if is_run(path)]
    modules = [path for path in sorted((ROOT / "lib").rglob("*.py")) if is_run(path)]
    return [
        ["train.py"],
        ["launch"],
        *([f"benchmarks/{path.name}"] for path in scripts),
        *(["-m", ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__main__")] for path in modules),
    ]


@pytest.fixture(scope="module")
def bare(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Python that is new enough and has no packages."""
    folder = tmp_path_factory.mktemp("bare")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder], check=True)
    return folder / "bin" / "python"


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The project in another folder, where no `make setup` was."""
    folder = tmp_path_factory.mktemp("checkout")
    for name in ("lib", "benchmarks", "configs", "calibration"):
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("train.py", "launch"):
        shutil.copy2(ROOT / name, folder / name)
    return folder


@pytest.fixture
def venv(checkout: Path) -> Any:
    """Makes the checkout's .venv/bin/python of a script, or a link to this environment; gone after the test."""
    folder = checkout / ".venv"

    def make(does: str | None = None) -> Path:
        if does is None:
            folder.symlink_to(sys.prefix)
        else:
            (folder / "bin").mkdir(parents=True)
            script(folder / "bin/python", does)
        return folder / "bin" / "python"

    yield make
    if folder.is_symlink():
        folder.unlink()
    shutil.rmtree(folder, ignore_errors=True)


def run(*words: Any, cwd: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("OMPI_COMM", "PMIX"))}
    command = [str(word) for word in words]
    return subprocess.run(command, cwd=cwd, env=kept | variables, capture_output=True, text=True, timeout=100)


def one_line(done: subprocess.CompletedProcess[str], *said: str) -> None:
    assert done.returncode == 2 and done.stderr.count("\n") == 1 and done.stderr.startswith("error: "), done
    assert all(part in done.stderr for part in said), done.stderr
    assert not done.stdout


@pytest.mark.parametrize("words", programs(), ids=lambda words: words[-1])
def test_a_program_goes_on_in_the_environment_with_the_same_words(
    words: list[str], bare: Path, checkout: Path, venv: Any
) -> None:
    one_line(run(bare, *words, cwd=checkout), str(bare), "lacks mlx, ", "make setup")
    venv(ECHO)
    done = run(bare, "-X", "utf8", *words, "--a b", "c='[1,2]'", "", cwd=checkout)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.splitlines() == ["entered", "-X", "utf8", *words, "--a b", "c='[1,2]'", ""]


def test_the_real_environment_is_entered_once(bare: Path, checkout: Path, venv: Any) -> None:
    venv()
    for words in (["train.py"], ["-m", "lib.server"]):
        done = run(bare, *words, "--help", cwd=checkout)
        assert done.returncode == 0 and done.stdout.startswith("usage: "), done


def test_an_environment_that_is_broken_is_one_line(bare: Path, checkout: Path, venv: Any) -> None:
    again = "make clean, then make setup"
    python = venv(f'exec {bare} "$@"')  # not the interpreter that it says it is: no second try
    one_line(run(bare, "train.py", cwd=checkout), "lacks mlx", again)
    python.write_text("\x00\x01")
    one_line(run(bare, "train.py", cwd=checkout), f"{python} does not start (Exec format error)", again)
    python.unlink()
    python.symlink_to("/nowhere/python3")
    one_line(run(bare, "train.py", cwd=checkout), "lacks mlx", again)


def test_who_only_imports_us_is_not_replaced(bare: Path, checkout: Path, venv: Any) -> None:
    python = venv(ECHO)
    one_line(run(bare, "-c", "import lib.config", cwd=checkout), "lacks mlx", f"use {python}")
    done = run(bare, "-c", "import lib.errors; print('stays')", cwd=checkout, TANDEM_ANY_PYTHON="1")
    assert done.stdout == "stays\n" and done.returncode == 0


def test_entry_points_can_be_read_by_an_old_python() -> None:
    for words in programs():
        if words[0] != "-m":  # of a module, lib/__init__.py comes first
            ast.parse((ROOT / words[0]).read_text(), feature_version=(3, 9))
    for name in ("__init__", "environment"):
        ast.parse((ROOT / f"lib/{name}.py").read_text(), feature_version=(3, 8))
