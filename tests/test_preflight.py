"""Preflight and doctor: each fault is a finding with a command that fixes it."""

import json
import re
import shlex
import socket
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from lib.errors import UserError
from lib.launch import preflight, verdict
from lib.launch.hostfile import Host
from lib.launch.preflight import Finding, Request
from lib.launch.rank_commands import Job
from lib.system import network
from lib.system.os_commands import Completed
from tests.tiny import ROOT

AWAY = Request(host=Host("mac-b"), project=preflight.project_digests(), packages=preflight.packages())
JOB = Job((Host("mac-a"), Host("mac-b", addresses=("10.0.0.2",))), "ring", ("train.py",), python=sys.executable)


def fails(finding: Finding, message: str, remedy: str) -> None:
    assert finding.status == "failed" and message in finding.message and remedy in finding.remedy, finding
    shlex.split(finding.remedy)  # a shell takes it


def test_sources_and_versions_have_to_be_those_of_this_machine() -> None:
    assert preflight.check_project(AWAY).status == preflight.check_packages(AWAY).status == "ok"
    other = replace(AWAY, project={**AWAY.project, "train.py": "0"}, packages={**AWAY.packages, "mlx": "0.1"})
    fails(preflight.check_project(other), "train.py not as on this machine", "./launch --sync . ")
    fails(preflight.check_packages(other), "(here 0.1)", "ssh mac-b 'cd ")
    assert preflight.check_packages(replace(AWAY, packages={**AWAY.packages, "python": "3.9"})).status == "ok"


def test_a_missing_or_other_file_is_copied(tmp_path) -> None:
    data, elsewhere = tmp_path / "train.jsonl", tmp_path / "other.jsonl"
    data.write_text("1\n")

    def found(there: Path, digest: str | None) -> Finding:
        return preflight.check_files(replace(AWAY, files={str(data): (str(there), digest)}))

    digest = preflight.digest(data)
    assert found(data, digest) == Finding("ok")
    data.rename(elsewhere)
    assert found(elsewhere, digest) == Finding("ok")
    fails(found(data, digest), "is missing", f"./launch --sync {data}")
    data.write_text("2\n")
    fails(found(data, digest), "differs", f"--sync {data}")
    fails(found(data, None), "is not on this machine", "ls -l")
    before = preflight.digest(tmp_path)
    (tmp_path / ".DS_Store").write_text("litter")
    assert preflight.digest(tmp_path) == before
    data.write_text("3\n")
    assert preflight.digest(tmp_path) != before, "a folder's digest is of its content"


def test_a_taken_port_is_answered_by_another_one() -> None:
    assert preflight.check_ports(AWAY) == Finding("ok")
    with socket.create_server(("127.0.0.1", 0)) as listener:
        request = replace(AWAY, ports=[listener.getsockname()[1]], other_port="./launch --starting-port 33323")
        fails(preflight.check_ports(request), "is taken", "--starting-port 33323")


def test_memory_and_disk_that_do_not_suffice() -> None:
    large = replace(AWAY, weight_bytes=10**15, disk_bytes=1e15, run_dir=str(ROOT / "runs"))
    assert preflight.check_memory(large).status == "note"  # it may be divided
    fails(preflight.check_disk(large), "checkpoints want", "du -sh")


@pytest.mark.parametrize(
    ("error", "check", "remedy"),
    [
        ("ada@mac-b: Permission denied (publickey).", "ssh", "ssh-copy-id mac-b"),
        ("Host key verification failed.", "ssh", "ssh mac-b true"),
        ("connect to host mac-b port 22: Connection refused", "ssh", "nc -z mac-b 22"),
        ("no answer within 25 s", "ssh", "ping -c 3 mac-b"),
        ("bash: line 1: cd: /x: No such file or directory", "project", "--sync . "),
        ("ModuleNotFoundError: No module named 'mlx'", "packages", "make setup"),
        ("cd: /Users/a/Documents/t: Operation not permitted", "project", "ls -ld"),
    ],
)
def test_why_a_host_gave_no_answer(error: str, check: str, remedy: str, monkeypatch) -> None:
    monkeypatch.setattr(preflight.os_commands, "run", lambda *_, **__: Completed(255, "", f"Warning\n{error}\n"))
    (finding,) = preflight.ask_host(JOB, Host("mac-b"), AWAY)
    fails(finding, error, remedy)
    assert finding.check == check and finding.host == "mac-b"


def test_slow_links_are_noted() -> None:
    job = replace(JOB, hosts=(replace(JOB.hosts[0], addresses=("10.0.0.1",)), JOB.hosts[1]))
    slow, good = preflight.link_finding(job, [0, 1], 0.2, 1.5), preflight.link_finding(job, [0, 1], 0.001, 0.02)
    assert slow.status == "note" and "0.7 MB/s, 200.00 ms" in slow.message
    assert good.message == "to mac-b: ring over 10.0.0.1 and 10.0.0.2: 52.4 MB/s, 1.00 ms" and good.host == "mac-a"


def test_rdma_that_fails_is_a_note(monkeypatch) -> None:
    monkeypatch.setattr(preflight, "try_backend", lambda job: [Finding("failed", job.backend, "remedy")])
    monkeypatch.setattr(preflight, "ask_host", lambda *_: [])
    ring, note = Finding("failed", "ring", "remedy"), Finding("note", "jaccl", "", "ring is taken")
    assert preflight.examine(replace(JOB, backend="jaccl"), AWAY) == [note, ring]
    assert preflight.examine(JOB, AWAY) == [ring]


def test_a_check_that_fails_is_a_finding(monkeypatch) -> None:
    monkeypatch.setitem(preflight.CHECKS, "disk", lambda _: 1 / 0)
    broken, fine = preflight.findings_of(AWAY, ["disk", "packages"])
    assert (broken.check, broken.status) == ("disk", "failed") and "ZeroDivisionError" in broken.message
    assert (fine.check, fine.host, fine.status) == ("packages", "mac-b", "ok")


@pytest.mark.long
def test_the_doctor_tries_this_machine() -> None:
    words = [sys.executable, "-m", "lib.launch.preflight"]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0 and done.stdout.rstrip().endswith("training can run here"), done
    for check in ("packages", "compute", "memory", "disk", "mpi", "ring"):
        assert re.search(rf"^  {check} +(ok|note) ", done.stdout, re.MULTILINE), done.stdout


def test_a_verdict_says_what_works_and_names_nothing(tmp_path, monkeypatch, capsys) -> None:
    def fails(_: verdict.Trials) -> str:
        places = f"{ROOT}/lib/x.py, ~/data, 10.0.0.2:32323, fe80::1:2:3:4, /Users/ada"
        raise UserError(f"[1 mac-b] ada@mac-b: {places} ended")

    def left_out(_: verdict.Trials) -> str:
        raise verdict.LeftOut("not a Mac")

    parts = [("fine", lambda _: "7 pairs/s"), ("broken", fails), ("missing", left_out), ("link", verdict.link)]
    monkeypatch.setattr(verdict, "parts", lambda: parts)
    monkeypatch.setattr(verdict, "own_names", lambda _: ["mac-b", "ada"])
    assert verdict.main(["--folder", str(tmp_path)]) == 1
    (page,) = tmp_path.glob("verdict-*.txt")
    text, found = " ".join(page.read_text().split()), json.loads(capsys.readouterr().out.splitlines()[-1])
    assert [row["status"] for row in found["rows"]] == ["works", "fails", "not tried", "works"], text
    assert "[1 NAME] ADDRESS PATH, PATH, ADDRESS, ADDRESS, PATH ended" in text
    assert not re.search(rf"\b(mac-b|ada|{network.own_name()})\b|{ROOT}|{tmp_path}", text), text
    assert re.search(r"link ring, [\d.]+ MB/s, [\d.]+ ms", text) and "2 work, 1 fail, 1 not tried" in text


@pytest.mark.parametrize(("last", "says"), [(26, "the others did not go on"), (10**6, "no cable was pulled")])
def test_a_verdict_knows_a_cable_that_nothing_follows(tmp_path, monkeypatch, last: int, says: str) -> None:
    (tmp_path / "cable/logs").mkdir(parents=True)
    script = tmp_path / "launch.py"
    script.write_text(
        f"import time\nfor step in range({last}):\n    with open('{tmp_path}/cable/logs/rank-000.jsonl', 'a') as log:\n"
        '        log.write(\'{"kind": "step", "step": %d}\\n\' % step)\n    time.sleep(0.01)\ntime.sleep(60)\n'
    )
    monkeypatch.setattr(verdict.Trials, "launch_words", lambda _: [str(script)])
    monkeypatch.setattr(verdict, "CABLE_SECONDS", 3.0)
    with pytest.raises((UserError, verdict.LeftOut), match=says):
        verdict.cable(verdict.Trials(tmp_path, None, tmp_path / "hostfile"))


@pytest.mark.long
def test_a_verdict_compares_ranks_and_memory(tmp_path) -> None:
    trials = verdict.Trials(tmp_path)
    assert "2 ranks, each with a part of every layer, train the model that one" in verdict.ring(trials, "sharded")
    assert ", planned " in verdict.curve_of(trials, (64, 2, 64))
    with pytest.raises(UserError, match="more than a plan"):
        verdict.of_formula(2, 1)
