"""The Makefile where ssh starts it on a Mac: Apple's old Python first in the PATH, Homebrew's and python.org's not in it."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.tiny import ROOT

# After GNU Make 3.81, the last one under a licence that Apple ships: $(file), !=, ::=, .ONESHELL, $(guile), undefine, &:
NEWER = r"\$\(file |^\w+ *!=|::?:=|\.ONESHELL|\$\(guile |^undefine |&:|^private |\$\(let |\$\(intcmp "
SSHD_PATH = "/usr/bin:/bin:/usr/sbin:/sbin"


def stub(path: Path, body: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{body}\n")
    path.chmod(0o755)


def python_of(path: Path, version: str) -> None:
    """An interpreter that says whether it is new enough, and which it is when it shall make the environment."""
    is_old = tuple(map(int, version.split("."))) < (3, 11)
    stub(path, f'case "$*" in *version_info*) exit {int(is_old)};; *venv*) echo "made by {path}"; exit 1;; esac')


@pytest.fixture
def mac(tmp_path: Path) -> Path:
    """A Mac's /usr/bin with Python 3.9, and the folder before which its other folders are looked for."""
    usr_bin = tmp_path / "usr-bin"
    for program in ("sh", "bash", "uname", "cat", "rm", "mkdir", "touch", "env"):
        usr_bin.mkdir(exist_ok=True)
        (usr_bin / program).symlink_to(str(shutil.which(program)))
    python_of(usr_bin / "python3", "3.9.6")
    for name in ("Makefile", "pyproject.toml", "constraints.txt"):
        shutil.copy(ROOT / name, tmp_path)
    return tmp_path


def setup(mac: Path, *words: str) -> str:
    environment = {"PATH": str(mac / "usr-bin"), "HOME": str(mac)}
    command = [str(shutil.which("make")), f"SYSTEM={mac}/system", "setup", *words]
    done = subprocess.run(command, cwd=mac, env=environment, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2, "no stub makes an environment"
    return done.stdout + done.stderr


@pytest.mark.parametrize(
    "place",
    [
        "opt/homebrew/bin/python3.12",
        "opt/homebrew/bin/python3",
        "usr/local/bin/python3.11",
        "Library/Frameworks/Python.framework/Versions/3.13/bin/python3.13",
    ],
)
def test_a_python_outside_of_sshs_path_is_found(mac: Path, place: str) -> None:
    python_of(mac / "root/usr/local/bin/python3", "3.8.1")  # an old one among them stops nobody
    python_of(mac / "system" / place, "3.12.4")
    assert f"made by {mac}/system/{place}" in setup(mac)


def test_one_of_the_path_comes_first_and_one_that_is_named_alone(mac: Path) -> None:
    python_of(mac / "root/opt/homebrew/bin/python3.13", "3.13.1")
    python_of(mac / "usr-bin/python3.11", "3.11.2")
    assert f"made by {mac}/usr-bin/python3.11" in setup(mac)
    python_of(mac / "own/python", "3.11.9")
    assert f"made by {mac}/own/python" in setup(mac, f"PYTHON={mac}/own/python")


def test_without_a_new_python_the_remedy_is_one_line(mac: Path) -> None:
    said = setup(mac)
    assert "error: Python 3.11 or newer is needed" in said and "brew install python@3.13" in said
    assert "make setup PYTHON=/path/to/python" in said and "Traceback" not in said


def test_apples_make_and_shell_know_every_construct() -> None:
    text = (ROOT / "Makefile").read_text()
    assert not re.search(NEWER, text, re.MULTILINE), re.search(NEWER, text, re.MULTILINE)
    assert not re.search(r"^SHELL", text, re.MULTILINE), "recipes are sh's; Apple's is bash 3.2"
    environment = {name: value for name, value in os.environ.items() if not name.startswith("MAKE")}
    dry = subprocess.run(
        ["make", "-n", "-B", "setup", f"PYTHON={sys.executable}"],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
    )
    for shell in ("sh", "bash --posix"):
        checked = subprocess.run([*shell.split(), "-n"], input=dry.stdout, capture_output=True, text=True)
        assert dry.returncode == checked.returncode == 0, checked.stderr


# ---- make test


def parts(*words: str) -> list[str]:
    return [sys.executable, "-m", "tests.parts", *words]


def test_all_parts_of_the_tests_run_and_the_end_says_what_failed_in_which(tmp_path: Path) -> None:
    fails = ["two ranks", "sh", "-c", 'echo second; echo "tests/test_x.py::test_y" > "$FAILED_TESTS"; exit 3']
    others = [*fails, "--", "three ranks", "sh", "-c", "echo third"]
    done = subprocess.run(
        parts("one process", "sh", "-c", "echo first", "--", *others), cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 1
    assert done.stderr == "failed in two ranks, status 3:\n    tests/test_x.py::test_y\n"
    assert [line for line in done.stdout.splitlines() if not line.startswith("sh ")] == ["first", "second", "third"]
    done = subprocess.run(parts("a", "true", "--", "b", "true"), cwd=ROOT, capture_output=True, text=True)
    assert (done.returncode, done.stdout.splitlines()[-1]) == (0, "passed: a, b")


def test_a_part_that_cannot_be_started_has_failed_and_the_next_one_runs(tmp_path: Path) -> None:
    command = parts("one process", "true", "--", "two ranks", "/no/mpirun", "--", "three ranks", "echo", "third")
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 1 and "third" in done.stdout.splitlines()
    assert "error: /no/mpirun cannot be started: No such file" in done.stderr and "status 127" in done.stderr
    done = subprocess.run(parts("a", "/no/python", "--", "b", "true"), cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 1 and "failed in a, status 127:" in done.stderr


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_what_ends_the_tests_ends_their_parts(tmp_path: Path, number: signal.Signals) -> None:
    """Also where it comes twice, and the second time while they end."""
    last = "echo ended" if number is not signal.SIGINT else ":"
    told = f"trap 'while [ ! -e {tmp_path}/again ]; do sleep 0.01; done; {last}; exit 1' INT"
    first = f"{told}; while [ ! -e {tmp_path}/pid ]; do sleep 0.01; done; echo on; while :; do sleep 0.01; done"
    second = ["two ranks", "sh", "-c", f"echo $$ > {tmp_path}/pid.new; mv {tmp_path}/pid.new {tmp_path}/pid; sleep 100"]
    command = parts("one process", "sh", "-c", first, "--", *second, "--", "three", "touch", str(tmp_path / "third"))
    process = subprocess.Popen(
        command,
        cwd=ROOT,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
        preexec_fn=lambda: signal.signal(signal.SIGHUP, signal.SIG_DFL),  # which nohup's children do not hear
    )
    assert process.stdout is not None and process.stdout.readline() and process.stdout.readline() == "on\n"
    second_process = int((tmp_path / "pid").read_text())
    send = os.killpg if number is signal.SIGINT else os.kill  # as a terminal does it, and as make does it
    send(process.pid, number)
    with pytest.raises(ProcessLookupError):
        while process.poll() is None:
            os.kill(second_process, 0)
            time.sleep(0.01)
    send(process.pid, number)
    (tmp_path / "again").touch()
    assert process.wait(60) == 128 + number and not (tmp_path / "third").exists()
    assert process.stdout.read() == ("" if number is signal.SIGINT else "ended\n")


@pytest.mark.parametrize("unbuffered", ["", "1"])  # as a shell starts Python, and as many containers do
def test_parts_end_where_nobody_reads_what_they_write(unbuffered: str, tmp_path: Path) -> None:
    second = f"echo $$ > {tmp_path}/pid.new; mv {tmp_path}/pid.new {tmp_path}/pid; sleep 100"
    first = f"while [ ! -e {tmp_path}/pid ]; do sleep 0.01; done; read line"
    command = parts("a", "sh", "-c", first, "--", "b", "true", "--", "c", "sh", "-c", second)
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
    variables = os.environ | {"PYTHONUNBUFFERED": unbuffered}
    with subprocess.Popen(command, cwd=ROOT, env=variables, **pipes) as process:
        assert process.stdout is not None and process.stdin is not None and process.stdout.readline()
        process.stdout.close()
        process.stdin.write(b"\n")
        process.stdin.close()
        assert process.wait(60) == 1
    with pytest.raises(ProcessLookupError):
        os.kill(int((tmp_path / "pid").read_text()), 0)
