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
from lib.launch.checks import Finding, Needs, Request
from lib.launch.hostfile import Host
from lib.launch.job import Job
from lib.launch.preflight import Link
from lib.system.os_commands import Completed
from tests.tiny import ROOT

AWAY = Request(host="mac-b", project=checks.project_digests(), packages=checks.packages())
TYPED = ["--hosts", "mac-a,mac-b", "--", "train.py"]
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
    assert checks.check_packages(replace(AWAY, packages={**AWAY.packages, "python": "3.9"})).status == "ok"


def test_a_missing_or_other_file_is_copied(tmp_path: Path) -> None:
    data = tmp_path / "train.jsonl"
    data.write_text("1\n")
    digest = checks.digest(data)
    wanted, unknown = (replace(AWAY, needs=Needs(files={str(data): known})) for known in (digest, None))
    assert checks.check_files(wanted) == Finding("ok")
    elsewhere = data.rename(tmp_path / "other.jsonl")
    assert checks.check_files(replace(wanted, paths={str(data): str(elsewhere)})) == Finding("ok")
    fails(checks.check_files(wanted), "is missing", "rsync")
    data.write_text("2\n")
    fails(checks.check_files(wanted), "differs", f"mac-b:{data}")
    fails(checks.check_files(unknown), "is not on this machine", "ls -l")


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
    large = replace(AWAY, needs=Needs(weight_bytes=10**15, disk_bytes=1e15, run_dir=str(ROOT / "runs")))
    assert checks.check_memory(large).status == "note"  # it may be divided
    fails(checks.check_disk(large), "checkpoints want", "du -sh")


def test_a_training_of_somebody_is_shown_and_nothing_ends_it(monkeypatch: pytest.MonkeyPatch) -> None:
    listing = "  12 root sshd\n 345 ada /usr/bin/python3 train.py --config x.yaml\n"
    monkeypatch.setattr(checks.os_commands, "output", lambda *_: listing)
    finding = checks.check_load(AWAY)
    assert finding.status == "note" and "process 345 of ada" in finding.message
    assert "kill" not in finding.remedy + finding.note


@pytest.mark.parametrize(
    ("error", "check", "remedy"),
    [
        ("ada@mac-b: Permission denied (publickey).", "ssh", "ssh-copy-id mac-b"),
        ("Host key verification failed.", "ssh", "ssh mac-b true"),
        ("connect to host mac-b port 22: Connection refused", "ssh", "nc -z mac-b 22"),
        ("Could not resolve hostname mac-b", "ssh", "mac-b"),
        ("no answer within 25 s", "ssh", "ping -c 3 mac-b"),
        ("bash: line 1: cd: /x: No such file or directory", "project", "rsync"),
        ("ModuleNotFoundError: No module named 'mlx'", "packages", "make setup"),
        ("cd: /Users/a/Documents/t: Operation not permitted", "project", "ls -ld"),
    ],
)
def test_why_a_host_gave_no_answer(error: str, check: str, remedy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preflight.os_commands, "run", lambda *_, **__: Completed(255, "", f"Warning\n{error}\n"))
    (finding,) = preflight.ask_host(JOB, Host("mac-b"), AWAY)
    fails(finding, error, remedy)
    assert finding.check == check and finding.host == "mac-b"


def test_slow_links_are_noted() -> None:
    job = replace(JOB, hosts=(Host("mac-a"), Host("mac-b", addresses=("10.0.0.2",))))
    slow, good = preflight.link_findings(job, [Link(0, 1, 1e6, 0.2), Link(1, 0, 1e9, 0.001)])
    assert slow.status == "note" and slow.message == "to mac-b at 10.0.0.2, ring: 8 Mbit/s, 200.00 ms"
    assert good == Finding("ok", "to mac-a, ring: 8,000 Mbit/s, 1.00 ms", "", "", "links", "mac-b")


def test_rdma_that_fails_is_a_note(monkeypatch: pytest.MonkeyPatch) -> None:
    trial = [Finding("failed", "jaccl", "remedy", "", "backend", "mac-a")]
    monkeypatch.setattr(preflight, "try_backend", lambda job, limits: trial)
    monkeypatch.setattr(preflight, "ask_host", lambda job, host, _: [])
    for backend, status in (("jaccl", "note"), ("ring", "failed")):
        (finding,) = preflight.examine(replace(JOB, backend=backend), Needs(), TYPED)
        assert finding.status == status


def test_a_check_that_fails_is_a_finding() -> None:
    def breaks(_: Request) -> Finding:
        raise RuntimeError("out of order")

    broken, fine = checks.examine(AWAY, {"one": breaks, "two": lambda _: Finding("ok")})
    assert (broken.check, broken.status) == ("one", "failed") and "out of order" in broken.message
    assert (fine.check, fine.host) == ("two", "mac-b")


@pytest.mark.long
def test_the_doctor_tries_this_machine() -> None:
    words = [sys.executable, "-m", "lib.launch.preflight", "--json"]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, timeout=300)
    page = json.loads(done.stdout)
    status = {one["check"]: one["status"] for one in page["checks"]}
    assert done.returncode == 0 and page["can_train"], page
    assert {status["compute"], status["ring"], status["mpi"]} <= {"ok", "note"}, page
    assert {"packages", "compute", "memory", "disk"} == {one["check"] for one in page["checks"] if one["needed"]}
