"""Preflight and doctor: each fault is a finding with a command that fixes it."""

from __future__ import annotations

import json
import shlex
import socket
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from lib.launch import checks, preflight
from lib.launch.checks import Finding, Request
from lib.launch.hostfile import Host
from lib.launch.job import Job
from lib.launch.preflight import Limits
from tests.tiny import ROOT

AWAY = Request(host="mac-b", project=checks.project_digests(), packages=checks.packages())
LIMITS = Limits(100e6 / 8, 0.05, ["--hosts", "mac-a,mac-b", "--", "train.py"])
JOB = Job((Host("mac-a"), Host("mac-b")), "ring", ("train.py",), python=sys.executable)


def fails(finding: Finding | None, message: str, remedy: str) -> None:
    assert finding is not None and finding.status == "failed", finding
    assert message in finding.message and remedy in finding.remedy, finding
    shlex.split(finding.remedy)  # a shell takes it


def test_a_host_like_this_machine_has_no_fault() -> None:
    assert checks.check_project(AWAY).status == checks.check_packages(AWAY).status == "ok"
    assert checks.check_ports(AWAY) == Finding("ok")


def test_other_sources_and_versions_are_named() -> None:
    other = replace(AWAY, project={**AWAY.project, "train.py": "0"}, packages={**AWAY.packages, "mlx": "0.1"})
    fails(checks.check_project(other), "train.py not as on this machine", "rsync -a --checksum")
    fails(checks.check_packages(other), "(here 0.1)", "ssh mac-b 'cd ")
    old_python = replace(AWAY, packages={**AWAY.packages, "python": "3.9"})
    fails(checks.check_packages(old_python), "python", "make -B setup PYTHON=python3.9")


def test_a_missing_or_other_file_is_copied(tmp_path: Path) -> None:
    data = tmp_path / "train.jsonl"
    data.write_text("1\n")
    digest = checks.digest(data)
    assert checks.check_files(replace(AWAY, files={str(data): digest})) == Finding("ok")
    data.write_text("2\n")
    fails(checks.check_files(replace(AWAY, files={str(data): digest})), "differs", f"mac-b:{data}")
    data.unlink()
    fails(checks.check_files(replace(AWAY, files={str(data): digest})), "is missing", "rsync")
    fails(checks.check_files(replace(AWAY, files={str(data): None})), "is not on this machine", "ls -l")


def test_a_folders_digest_is_of_its_content(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "one").write_text("1")
    before = checks.digest(tmp_path / "a")
    (tmp_path / "a" / ".DS_Store").write_text("litter")
    assert checks.digest(tmp_path / "a") == before
    (tmp_path / "a" / "one").write_text("2")
    assert checks.digest(tmp_path / "a") != before


def test_a_taken_port_is_answered_by_another_one() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        request = replace(AWAY, ports=[listener.getsockname()[1]], other_port="./launch --starting-port 33323")
        fails(checks.check_ports(request), "is taken", "--starting-port 33323")


def test_memory_and_disk_that_do_not_suffice() -> None:
    large = replace(AWAY, model_bytes=10**15, run_dir=str(ROOT / "runs"))
    fails(checks.check_memory(replace(large, is_divisible=False)), "wanted for the weights", "ssh mac-b")
    assert checks.check_memory(large).status == "note"  # it may be divided
    fails(checks.check_disk(large), "checkpoints want", "du -sh")


def test_a_training_of_somebody_is_shown_and_nothing_ends_it(monkeypatch: pytest.MonkeyPatch) -> None:
    listing = "  12 root sshd\n 345 ada /usr/bin/python3 train.py --config x.yaml\n"
    monkeypatch.setattr(checks.os_commands, "output", lambda *_: listing)
    finding = checks.check_load(AWAY)
    assert finding.status == "note" and "process 345 of ada" in finding.message
    assert "kill" not in finding.remedy + finding.note


@pytest.mark.parametrize(
    ("error", "status", "check", "remedy"),
    [
        ("ada@mac-b: Permission denied (publickey).", 255, "ssh", "ssh-copy-id mac-b"),
        ("Host key verification failed.", 255, "ssh", "ssh mac-b true"),
        ("connect to host mac-b port 22: Connection refused", 255, "ssh", "nc -z mac-b 22"),
        ("Could not resolve hostname mac-b", 255, "ssh", "mac-b"),
        ("bash: line 1: cd: /x: No such file or directory", 1, "project", "rsync"),
        ("ModuleNotFoundError: No module named 'mlx'", 1, "packages", "make setup"),
        ("cd: /Users/a/Documents/t: Operation not permitted", 1, "project", "ls -ld"),
    ],
)
def test_why_a_host_gave_no_answer(error: str, status: int, check: str, remedy: str) -> None:
    finding = preflight.why_no_answer(JOB, Host("mac-b"), error, status, str(ROOT))
    fails(finding, "", remedy)
    assert finding.check == check and finding.host == "mac-b"


def test_slow_and_dead_links_fail_and_can_be_accepted() -> None:
    links = {
        ("mac-a", "mac-b"): {"bytes_per_second": 1e6, "round_trip_seconds": 0.2},
        ("mac-b", "mac-c"): {"bytes_per_second": 1e9, "round_trip_seconds": 0.001},
        ("mac-c", "mac-a"): {"error": "timed out", "address": "10.0.0.1"},
    }
    slow, good, dead = preflight.link_findings(links, LIMITS)
    fails(slow, "8 Mbit/s, 200.00 ms", "--min-mbit 4.0 --max-round-trip-ms 400 -- train.py")
    assert good.status == "ok"
    fails(dead, "timed out", "ping -c 3 10.0.0.1")


def test_a_ring_of_cables_is_measured_between_neighbours_only() -> None:
    hosts = tuple(Host(name, addresses=(f"10.0.{index}.1",)) for index, name in enumerate("abc"))
    ring = replace(JOB, hosts=hosts)
    assert [(one.name, other.name) for one, other in preflight.links_to_measure(ring, hosts)] == [
        *map(tuple, ("ab", "bc", "ca"))
    ]
    assert len(preflight.links_to_measure(replace(ring, backend="mpi"), hosts)) == 3


def test_a_check_that_fails_or_hangs_is_a_finding() -> None:
    def breaks(_: Request) -> Finding:
        raise RuntimeError("out of order")

    def hangs(_: Request) -> Finding:
        import time

        time.sleep(60)
        return Finding("ok")

    broken, late = checks.examine(AWAY, {"one": breaks, "two": hangs}, 0.5)
    assert (broken.check, broken.status) == ("one", "failed") and "out of order" in broken.message
    fails(late, "no answer within 0.5 s", "uptime")


@pytest.mark.long
def test_the_doctor_tries_this_machine() -> None:
    words = [sys.executable, "-m", "lib.launch.preflight", "--json"]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, timeout=300)
    page = json.loads(done.stdout)
    status = {one["check"]: one["status"] for one in page["checks"]}
    assert done.returncode == 0 and page["can_train"], page
    assert {status["compute"], status["ring"], status["mpi"]} <= {"ok", "note"}, page
    assert {"packages", "compute", "memory", "disk"} == {one["check"] for one in page["checks"] if one["needed"]}


def test_the_doctor_names_no_user(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("USER", "ada")
    monkeypatch.setenv("LOGNAME", "ada")
    assert preflight.without_user("ada@mac /Users/ada/x /home/ada/y") == "mac ~/x ~/y"
