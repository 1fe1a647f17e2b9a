"""make doctor: a real page of this machine, one of an imitated Mac whose MLX is broken, and each part that can break."""

from __future__ import annotations

import getpass
import json
import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from lib.launch.doctor import Checked
from lib.launch.machine_checks import Check, Result

from lib.launch import doctor, host_facts, machine_checks
from lib.system import hardware, metal
from tests import darwin
from tests.tiny import ROOT

FIELDS = {"check": str, "status": str, "message": str, "remedy": str, "note": str, "needed": bool, "seconds": float}
EVERYWHERE = ["python", "packages", "compute", "memory", "mpi", "ring", "disk", "ssh", "calibration"]
ON_A_MAC = {"wired limit", "display", "power", "folder"}


def page(*words: str, **environment: str) -> subprocess.CompletedProcess[str]:
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(machine_checks.LAUNCHED)}
    command = [sys.executable, "-m", "lib.doctor", *words]
    variables = {**inherited, **environment}
    return subprocess.run(command, cwd=ROOT, env=variables, capture_output=True, text=True, timeout=300)


def checks_of(done: subprocess.CompletedProcess[str]) -> dict[str, dict[str, Any]]:
    tree = json.loads(done.stdout)
    assert tree.keys() == {"host", "os", "processor", "can_train", "checks"} and "\n" not in done.stdout.rstrip()
    for one in tree["checks"]:
        assert {name: type(value) for name, value in one.items()} == FIELDS, one
        assert one["status"] in ("ok", "note", "failed") and one["message"]
        assert one["status"] == "ok" or one["remedy"] or one["note"], "a fault comes with its remedy"
    assert tree["can_train"] == (done.returncode == 0)
    return {one["check"]: one for one in tree["checks"]}


def test_this_machine_can_train_and_says_so_in_json() -> None:
    done = page("--json")
    assert done.returncode == 0, done.stdout + done.stderr
    found = checks_of(done)
    assert [name for name in found if name in EVERYWHERE] == EVERYWHERE
    for name in ("python", "packages", "compute", "mpi", "ring", "disk"):
        assert found[name]["status"] == "ok", found[name]
    assert re.search(r"BLAS on the CPU, .+: [1-9][\d,]* GFLOP/s of float32", found["compute"]["message"])
    assert "MLX may have" in found["memory"]["message"]
    assert getpass.getuser() == "root" or getpass.getuser() not in done.stdout


@pytest.fixture
def broken_mlx(tmp_path: Path) -> Path:
    """A folder that, in PYTHONPATH, makes every import of MLX fail."""
    (tmp_path / "broken/mlx").mkdir(parents=True)
    (tmp_path / "broken/mlx/__init__.py").write_text("raise ImportError('Library not loaded: @rpath/libmlx.dylib')\n")
    return tmp_path / "broken"


@pytest.mark.long
def test_the_page_of_a_mac_without_mlx_has_every_part_and_fits_80_columns(tmp_path: Path, broken_mlx: Path) -> None:
    mac = darwin.Mac(tmp_path)
    mac.says("system_profiler SPDisplaysDataType -json", darwin.LIT)
    mac.says("pmset -g", darwin.SETTINGS.format(mode=darwin.LOW.strip()))
    environment = mac.environment()
    environment["PYTHONPATH"] += f":{broken_mlx}"
    done = page(**environment, TANDEM_COLUMNS="80")
    assert done.returncode == 1 and done.stderr == "", done.stderr
    lines = done.stdout.splitlines()
    assert lines[0] == "Jans-MacBook-Pro: Apple M4 Max, macOS 26.1 arm64".replace("arm64", os.uname().machine)
    names = [line[2:15].strip() for line in lines if re.match(r"  \S[\w ]{12}(ok|note|failed)\b", line)]
    assert set(names) == {*EVERYWHERE, *ON_A_MAC}
    assert re.search(r"compute +failed +ImportError: Library not loaded", done.stdout)
    assert "    make -B setup" in lines, "a remedy is a line to be copied"
    assert re.search(r"display +note +Color LCD", done.stdout) and "    pmset displaysleepnow" in lines
    assert "    sudo pmset -a lowpowermode 0" in lines
    assert lines[-1] == "training cannot run here"
    remedies = [line for line in lines if line.startswith("    ") and not line.startswith("     ")]
    assert all(len(line) <= 80 for line in lines if line not in remedies), [line for line in lines if len(line) > 80]
    assert "\033" not in done.stdout
    in_a_file = page(**environment)
    assert "(mlx#3267)" in in_a_file.stdout and in_a_file.returncode == 1
    as_json = page("--json", **environment)
    assert checks_of(as_json)["compute"]["needed"] and as_json.returncode == 1


def test_what_it_does_not_know_is_one_line() -> None:
    done = page("--jsno")
    assert done.returncode == 2 and done.stderr.count("\n") == 1 and "--jsno" in done.stderr


# ---- Broken pieces, one by one


def test_an_mpi_library_that_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLX_MPI_LIBNAME", "/nowhere/libmpi.so.40")
    found = machine_checks.check_mpi(60)
    assert found.status == "failed" and found.remedy == "make -B setup"
    assert "unset MLX_MPI_LIBNAME, which is /nowhere/libmpi.so.40" in found.note
    assert found.message.startswith("RuntimeError: ") and "MPI" in found.message, "mpirun's own remarks come after it"
    checks = {check.name: check for check in machine_checks.all_checks()}
    assert not checks["mpi"].needed and not checks["ssh"].needed and checks["compute"].needed and checks["disk"].needed


def test_a_ring_that_cannot_be(broken_mlx: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert machine_checks.check_ring(0.05)[:2] == ("failed", "no answer within 0.05 s")
    monkeypatch.setenv("PYTHONPATH", str(broken_mlx))
    found = machine_checks.check_ring(60)
    assert found.status == "failed" and found.message.startswith("ImportError: Library not loaded")
    assert found.remedy == "make -B setup" and "firewall" in found.note


def test_ssh_that_is_missing_or_refuses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    found = machine_checks.check_ssh(10)
    assert found.status == "note" and "openssh-client" in found.remedy
    ssh = tmp_path / "ssh"
    for said, remedy in (
        ("root@localhost: Permission denied (publickey,password).", "ssh-copy-id localhost"),
        ("ssh: connect to host localhost port 22: Connection refused", "sudo systemctl start ssh"),
    ):
        ssh.write_text(f"#!/bin/sh\necho '{said}' >&2\nexit 255\n")
        ssh.chmod(0o755)
        assert machine_checks.check_ssh(10).remedy == remedy
    ssh.write_text("#!/bin/sh\necho 'zsh:cd:1: operation not permitted: /Users/jan/Documents/tandem' >&2\nexit 1\n")
    assert "Full" in machine_checks.check_ssh(10).note or "full disk access" in machine_checks.check_ssh(10).note
    ssh.write_text('#!/bin/sh\nfor last; do :; done\nexec /bin/sh -c "$last"\n')  # as a host that lets us in
    assert machine_checks.check_ssh(30).status == "ok"


def test_a_disk_packages_and_python(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    full = {"folder": str(tmp_path), "fault": "Read-only file system", "free_bytes": 0}
    monkeypatch.setattr(host_facts, "disk", lambda folder: full)
    assert machine_checks.check_disk(5)[:2] == ("failed", f"{tmp_path}: Read-only file system")
    monkeypatch.setattr(host_facts, "disk", lambda folder: {**full, "fault": None, "free_bytes": 10**9})
    assert machine_checks.check_disk(5).status == "note"
    monkeypatch.setattr(host_facts, "PACKAGES", ("mlx", "no-such-package"))
    missing = machine_checks.check_packages(5)
    assert missing.status == "failed" and "no-such-package is missing" in missing.message
    monkeypatch.setattr(host_facts, "PACKAGES", ("mlx",))
    assert machine_checks.pinned((ROOT / "constraints.txt").read_text()).keys() >= set(host_facts.PACKAGES)
    monkeypatch.setattr(machine_checks, "pinned", lambda text: {"mlx": "0.0.1"})
    assert machine_checks.check_packages(5).status == "note"
    monkeypatch.setattr(hardware, "is_translated", lambda: True)
    assert "Rosetta" in machine_checks.check_python(5).message
    monkeypatch.setattr(hardware, "free_memory_bytes", lambda: 10**9)
    assert machine_checks.check_memory({}, 5).status == "note"


# ---- On a Mac


def test_what_only_a_mac_has(mac: darwin.Mac, monkeypatch: pytest.MonkeyPatch) -> None:
    assert machine_checks.check_display(5) == Result("ok", "none is lit")
    mac.says("system_profiler SPDisplaysDataType -json", darwin.LIT)
    lit = machine_checks.check_display(5)
    assert lit is not None and lit.status == "note" and lit.message.startswith("Color LCD") and "3267" in lit.message
    assert metal.lit("") == metal.lit("[]") == metal.lit('{"SPDisplaysDataType": 1}') == []
    assert machine_checks.check_wired_limit(5) == Result("ok", "the system's own")
    mac.says("sysctl -n iogpu.wired_limit_mb", "126000\n")
    wired = machine_checks.check_wired_limit(5)
    assert wired is not None and wired.status == "note" and wired.remedy == "sudo sysctl iogpu.wired_limit_mb=122880"
    mac.says("pmset -g batt", darwin.ON_BATTERY)
    power = machine_checks.check_power(5)
    assert power is not None and power.status == "note" and power.note == "plug it in"
    assert (
        "109" not in machine_checks.check_memory({}, 5).message
        and "8.8 GB free" in machine_checks.check_memory({}, 5).message
    )
    folder = machine_checks.check_folder(5)
    assert folder is not None and folder.status == "ok"
    monkeypatch.setattr(machine_checks, "ROOT", Path("/Users/jan/Documents/tandem"))
    folder = machine_checks.check_folder(5)
    assert folder is not None and folder.status == "note" and folder.remedy == "mv /Users/jan/Documents/tandem ~/tandem"


def test_what_only_a_mac_has_is_not_asked_elsewhere() -> None:
    assert (
        machine_checks.check_display(5) is machine_checks.check_wired_limit(5) is machine_checks.check_folder(5) is None
    )


# ---- Limits, and what the page leaves out


def test_no_check_outlasts_its_limit_or_ends_the_page() -> None:
    began = time.monotonic()
    late = doctor.attempt(Check("slow", True, 0.1, lambda limit: time.sleep(30)))  # type: ignore[func-returns-value]
    assert late is not None and late.status == "failed" and late.message == "no answer within 0.1 s"
    assert time.monotonic() - began < 10
    hung = machine_checks.run([str(shutil.which("sleep")), "30"], 0.2)
    assert hung.status is None

    def fails(limit: float) -> Result:
        raise ValueError("what nobody thought of")

    one = doctor.attempt(Check("odd", False, 5, fails))
    assert one is not None and one.status == "failed" and "what nobody thought of" in one.message
    assert doctor.can_train([one]) and late is not None and not doctor.can_train([one, late])
    assert doctor.attempt(Check("none", True, 5, lambda limit: None)) is None


def test_the_page_names_nobody() -> None:
    text = "/Users/jan/tandem: jan@localhost: Permission denied; /Users/jan/x; /home/eva/y; january"
    assert doctor.shortened(text, "/Users/jan", "jan") == "~/tandem: localhost: Permission denied; ~/x; ~/y; january"
    assert doctor.shortened("/opt/tandem", "/", "jan") == "/opt/tandem"
    found = doctor.attempt(
        Check("x", False, 5, lambda limit: Result("note", f"{Path.home()}/runs", f"ls {Path.home()}"))
    )
    assert isinstance(found, Checked) and (found.message, found.remedy) == ("~/runs", "ls ~")
