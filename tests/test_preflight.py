"""Preflight: each check fails for its own fault on real hosts, the printed command mends it, and nothing starts before."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from lib.launch.preflight_verdicts import Context, Finding, findings_of, link_findings
from lib.launch.run_needs import Needs

from lib.launch import command as launcher
from lib.launch import host_facts, preflight_verdicts, run_needs
from lib.launch.hostfile import Host
from lib.launch.job import Job
from lib.launch.ssh import ssh_remedy
from lib.system import hardware
from tests import tiny
from tests.cluster import Host as Machine
from tests.tiny import ROOT


@pytest.fixture(scope="module")
def project(three_hosts: list[Machine]) -> Iterator[list[str]]:
    """The project copied by --sync to each host's own disk, and the words that run it there."""
    words = ["--directory", f"{three_hosts[0].disk}/tandem", "--python", sys.executable, "--sync", "."]
    done = three_hosts[0].run(
        [sys.executable, ROOT / "launch", "--hosts", "host-a,host-b", *words, "--no-preflight", "--", "pwd"]
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count(f"{three_hosts[0].disk}/tandem") == 2
    yield words[:-2]


@pytest.fixture
def data(three_hosts: list[Machine]) -> list[str]:
    """The words of a run whose model and data are on each host's own disk."""
    for host in three_hosts[:2]:
        outside, there = host.outside / "run", str(host.disk / "run")
        outside.mkdir(exist_ok=True)
        words = [word.replace(str(outside), there) for word in tiny.settings(outside)]
        config = tiny.config_file(outside)
    return ["train.py", "--config", f"{there}/{config.name}", *words]


def check(
    hosts: list[Machine], *words: str, command: list[str], names: str = "host-a,host-b"
) -> tuple[int, dict[str, Any]]:
    words = ("--hosts", names, "--preflight-only", "--json", *words, "--", *command)
    done = hosts[0].run([sys.executable, ROOT / "launch", *words])
    assert done.stdout, done.stderr
    return done.returncode, json.loads(done.stdout)


def failures(report: Mapping[str, Any]) -> dict[tuple[str, str], list[dict[str, str]]]:
    found: dict[tuple[str, str], list[dict[str, str]]] = {}
    for finding in report["findings"]:
        if finding["status"] == "failed":
            found.setdefault((finding["host"], finding["check"]), []).append(finding)
    return found


def test_every_fault_is_found_on_its_host_and_the_printed_command_mends_it(
    three_hosts: list[Machine], project: list[str], data: list[str], tmp_path: Path
) -> None:
    a, b, c = three_hosts
    run = b.outside / "run"
    (b.outside / "tandem/lib/training/losses.py").write_text("broken = True\n")
    (run / "train.jsonl").write_text((run / "train.jsonl").read_text().replace("1", "2", 1))
    second = (a.outside / "run/train.jsonl").stat().st_mtime  # of one size and second, which rsync takes for equal
    os.utime(run / "train.jsonl", (second, second))
    (run / "model/config.json").unlink()
    (run / "model").rmdir()
    listener = b.start(
        [sys.executable, "-c", "import socket, time; s = socket.create_server(('', 32324)); time.sleep(100)"]
    )
    (a.outside / "tandem/train.py").unlink()  # here as well: --directory is not where ./launch is
    command = [*data, f"run.dir={b.disk}/run/runs"]
    try:
        status, report = check(three_hosts, *project, command=command)
        found = failures(report)
        assert status == 1 and not report["passed"]
        files = [("host-b", "files")]
        assert found.keys() == {("host-a", "project"), ("host-b", "project"), ("host-b", "ports"), *files}, found
        assert "lib/training/losses.py" in found["host-b", "project"][0]["message"]
        assert sorted(
            re.findall(r"(model|train.jsonl) (is missing|differs)", " ".join(f["message"] for f in found[files[0]]))
        ) == [
            ("model", "is missing"),
            ("train.jsonl", "differs"),
        ]
        for findings in found.values():
            for finding in findings:
                if finding["check"] != "ports":
                    mended = a.run(["sh", "-c", finding["remedy"]])
                    assert mended.returncode == 0, (finding, mended.stderr)
        again = re.search(r"--starting-port \d+", found["host-b", "ports"][0]["remedy"])
        assert again is not None
        status, report = check(three_hosts, *project, *again[0].split(), command=command)
        assert status == 0 and report["passed"], failures(report)
        assert {f["check"] for f in report["findings"]} >= {
            "ssh",
            "project",
            "packages",
            "files",
            "memory",
            "disk",
            "ports",
        }
        assert {"links", "backend", "calibration", "clock", "load"} <= {f["check"] for f in report["findings"]}
    finally:
        os.killpg(listener.pid, signal.SIGKILL)
        listener.communicate()


def test_other_versions_a_full_disk_no_ssh_and_too_large_a_model(
    three_hosts: list[Machine], project: list[str], data: list[str], tmp_path: Path
) -> None:
    a, b, c = three_hosts
    script = "from importlib import metadata; print(metadata.distribution('mlx')._path)"
    mlx = (
        Path(subprocess.run([sys.executable, "-c", script], capture_output=True, text=True).stdout.strip()) / "METADATA"
    )
    (tmp_path / "METADATA").write_text(re.sub(r"(?m)^Version: .*$", "Version: 0.0.1", mlx.read_text()))
    (tmp_path / "nobody").write_text("")
    key = a.outside.parent / "key.pub"
    mounts = {
        b.name: [
            ["--bind", f"{tmp_path}/METADATA", str(mlx)],
            ["-t", "tmpfs", "-o", "size=1m", "tmpfs", f"{b.disk}/full"],
        ],
        c.name: [["--bind", f"{tmp_path}/nobody", str(key)]],
    }
    named = {host.name: host for host in three_hosts}
    for host in (a, b):
        (host.outside / "full").mkdir(exist_ok=True)
        with (host.outside / "run/model/model.safetensors").open("wb") as file:
            file.truncate(2**40)  # a terabyte that takes no room
    for host, options in mounts.items():
        for option in options:
            assert named[host].run(["mount", *option]).returncode == 0
    try:
        _, report = check(
            three_hosts, *project, command=[*data, f"run.dir={b.disk}/full"], names="host-a,host-b,host-c"
        )
        found = failures(report)
        assert found.keys() >= {
            ("host-b", "packages"),
            ("host-b", "disk"),
            ("host-c", "ssh"),
            ("host-b", "memory"),
            ("host-a", "memory"),
        }
        assert (
            "mlx 0.0.1 (here" in found["host-b", "packages"][0]["message"]
            and "make -B setup" in found["host-b", "packages"][0]["remedy"]
        )
        assert found["host-c", "ssh"][0]["remedy"] == "ssh-copy-id host-c"
        assert f"{b.disk}/full" in found["host-b", "disk"][0]["message"]
        assert "run.dir=ELSEWHERE" in found["host-b", "disk"][0]["note"]
        assert "take fewer slots" in found["host-b", "memory"][0]["note"]
        # These hosts reach no registry: that the command gets so far is all that is seen of it.
        setup = found["host-b", "packages"][0]["remedy"].replace("make -B setup", "make -n -B setup")
        tried = a.run(["sh", "-c", setup])
        assert tried.returncode == 0 and "pip install" in tried.stdout, tried
    finally:
        for host, options in mounts.items():
            for option in options:
                named[host].run(["umount", option[-1]])
    try:  # what the remedies say: another disk, fewer slots; and the versions and the key that were wanted
        fits = int(0.6 * hardware.host_memory_bytes() / 1.3)
        for host in (a, b):
            with (host.outside / "run/model/model.safetensors").open("r+b") as file:
                file.truncate(fits)
        elsewhere = [*data, f"run.dir={b.disk}/run/runs"]
        elsewhere.append("strategy=independent")  # every rank with the whole model
        _, report = check(three_hosts, *project, command=elsewhere, names="host-a,host-b:2")
        assert failures(report).keys() - {("host-a", "disk"), ("host-b", "disk")} == {("host-b", "memory")}
    finally:
        for host in (a, b):
            (host.outside / "run/model/model.safetensors").unlink()
    job = Job((Host("host-a"),), "ring", ("train.py",))
    shown = findings_of(
        [Host("host-a")],
        {"host-a": facts(disk={"folder": "/x", "fault": "Permission denied", "free_bytes": 9})},
        context(job),
    )
    assert [f.message for f in shown if f.status == "failed"] == ["/x: Permission denied"]


@pytest.mark.long
def test_a_slow_link_a_cut_one_and_a_backend_that_does_not_sum(three_hosts: list[Machine]) -> None:
    a, b, c = three_hosts
    b.shape("20mbit")
    c.only_ssh()
    try:
        _, report = check(three_hosts, command=["hostname"], names="host-a,host-b,host-c")
        found = failures(report)
        assert found.keys() == {("host-a", "links"), ("host-b", "links")}
        slow = next(f for f in found["host-a", "links"] if "host-b" in f["message"])
        assert "Mbit/s" in slow["message"] and any(
            "host-c: timed out" in f["message"] for f in found["host-a", "links"]
        )
        accepted = re.search(r"--min-mbit \S+", slow["remedy"])
        assert accepted is not None and "--max-round-trip-ms" not in slow["remedy"], "the limit of 50 ms stays"
        status, _ = check(three_hosts, *accepted[0].split(), command=["hostname"])
        assert status == 0
    finally:
        b.shape(None)
        c.only_ssh(False)
    status, report = check(
        three_hosts, "--backend", "mpi", "--env", "MLX_MPI_LIBNAME=/nowhere/libmpi.so", command=["hostname"]
    )
    assert status == 1 and {name for _, name in failures(report)} == {"backend"}


def test_nothing_is_started_where_a_check_fails_and_the_table_says_why(
    three_hosts: list[Machine], tmp_path: Path
) -> None:
    command = [sys.executable, ROOT / "launch", "--hosts", "host-a,10.77.0.99", "--", "touch", tmp_path / "started"]
    done = three_hosts[0].run(command)
    assert done.returncode == 1 and not (tmp_path / "started").exists() and done.stdout == ""
    assert "1 failed: nothing was started" in done.stderr and "ping -c 3 10.77.0.99" in done.stderr
    assert re.search(r"ssh +FAILED on 10\.77\.0\.99", done.stderr)


# ---- Pure


def facts(**changes: Any) -> dict[str, Any]:
    usual: dict[str, Any] = {name: None for name, _ in preflight_verdicts.FACT_CHECKS.values()}
    return {**usual, **changes}


def context(job: Job, **needs: Any) -> Context:
    return Context({"project": {}, "packages": {}, "files": {}}, Needs(**needs), job, 0)


def test_judgements_of_what_no_host_here_can_have() -> None:
    host = Host("mac-b", 2, (), (None, "rdma_en5"))
    job = Job((Host("mac-a"), host), "jaccl", ("train.py",))

    def one(check: str, where: Context | None = None, **found: Any) -> Finding:
        return next(
            f for f in findings_of([host], {"mac-b": facts(**found)}, where or context(job)) if f.check == check
        )

    assert one("clock", clock={"ahead_seconds": 60.0, "unsure_seconds": 1.0}).status == "told"
    assert one("clock", clock={"ahead_seconds": 2.5, "unsure_seconds": 1.0}).status == "ok"
    assert one("load", load={"average": 4.0, "cpus": 2}).status == "told"
    for strategy, free, status in (
        ("pipelined", 50, "ok"),  # a part of the model
        ("auto", 50, "ok"),
        ("independent", 50, "failed"),
        ("pipelined", 20, "failed"),  # nor do all hosts together hold it
        ("independent", 200, "ok"),
    ):
        wants = replace(context(job, strategy=strategy), model_bytes=30 * 10**9)
        assert one("memory", wants, memory={"free_bytes": free * 10**9}).status == status, (strategy, free)
        on_gpu = {"free_bytes": 10**9, "has_gpu_memory": True}
        assert one("memory", wants, memory=on_gpu).status == "told", "main memory says nothing of a GPU's"
    other = replace(context(job), here={"packages": {"python": "3.12", "mlx": "1"}})
    older = one("packages", other, packages={"python": "3.11", "mlx": "1"})
    assert older.message == "python 3.11 (here 3.12)" and older.remedy.endswith("make -B setup PYTHON=python3.12'")
    assert one("packages", other, packages={"python": "3.12", "mlx": "0"}).remedy.endswith("make -B setup'")
    assert f"{os.getpid()} " in host_facts.processes()
    shown = "  1 /sbin/init\n 22 vi train.py\n 77 /opt/tandem/.venv/bin/python train.py train.beta=0.2\n"
    assert host_facts.training_among(shown) == (77, "train.py train.beta=0.2")
    assert host_facts.training_among(shown.replace("77", "78 vi")) is None
    busy = one("load", load={"average": 0.1, "cpus": 2, "training": [77, "train.py"]})
    assert busy.status == "told" and busy.remedy == "ssh mac-b kill -INT 77"
    assert one("calibration", calibration={"there": False}).status == "told"
    strict = context(job, require_calibration=True)
    stale = one(
        "calibration", strict, calibration={"there": True, "fresh": False, "measured_at": "2020-01-01T00:00:00"}
    )
    assert stale.status == "failed" and stale.remedy.endswith("make calibrate'")
    assert one("rdma", rdma={"devices": ["rdma_en5"]}).status == "ok"
    assert "no rdma_en5" in one("rdma", rdma={"devices": []}).message
    assert one("rdma", rdma={"error": "ibv_devices is missing"}).status == "failed"
    assert "hf download org/model" in one("models", models={"org/model": False}).remedy
    assert "to mac-c: Host key" in one("ssh", ssh_to={"mac-c": "Host key verification failed."}).message
    links = {("a", "b"): {"bytes_per_second": 1e7, "round_trip_seconds": 0.001}, ("a", "c"): {"error": "refused"}}
    assert [f.status for f in link_findings(links, 2e7, 1.0, context(job))] == ["failed", "failed"]
    assert [f.status for f in link_findings(links, 0.9e7, 1.0, context(job))] == ["ok", "failed"]
    late = link_findings(links, 0.9e7, 1e-4, context(job))
    assert [f.status for f in late] == ["failed", "failed"]
    assert "--max-round-trip-ms 2" in late[0].remedy and "--min-mbit" not in late[0].remedy, "what is missed alone"
    for said in (
        "Permission denied (publickey).",
        "Host key verification failed.",
        "Connection refused",
        "Could not resolve hostname",
        "timed out",
    ):
        assert "mac-b" in ssh_remedy("mac-b", said)[0]


def test_a_digest_sees_names_contents_and_the_ends_of_large_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(host_facts, "WHOLE_BYTES", 2**20)
    (tmp_path / "m").mkdir()
    (tmp_path / "m/a").write_bytes(b"1")
    before = host_facts.digest(tmp_path / "m")
    (tmp_path / "m/a").rename(tmp_path / "m/b")
    renamed = host_facts.digest(tmp_path / "m")
    with (tmp_path / "large").open("wb") as file:
        file.truncate(20 * 2**20)
    large = host_facts.digest(tmp_path / "large")
    with (tmp_path / "large").open("r+b") as file:
        file.seek(20 * 2**20 - 1)
        file.write(b"x")
    assert len({before, renamed, large, host_facts.digest(tmp_path / "large")}) == 4
    assert host_facts.digest(tmp_path / "none") is None


def test_a_fact_that_fails_or_takes_too_long_is_told_and_holds_up_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_facts, "LIMIT_SECONDS", 0.5)
    monkeypatch.setattr(host_facts, "project_digests", lambda: __import__("time").sleep(5))
    request = {
        "files": [],
        "models": [],
        "run_dir": None,
        "ports": [],
        "ssh_to": [],
        "calibration_dir": None,
        "rdma": False,
        "addresses": [],
    }
    found = host_facts.facts({**request, "ports": ["no port"]})
    assert found["project"] == {"error": "no answer within 0.5 s"} and "TypeError" in found["ports"]["error"]
    assert found["packages"]["mlx"]


def test_a_wrong_configuration_is_one_line_before_any_host_is_asked(capsys: pytest.CaptureFixture[str]) -> None:
    assert launcher.main(["--hosts", "nowhere-a,nowhere-b", "--", "train.py", "train.betta=1"]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and "train.beta" in error


def test_what_a_run_needs_is_read_off_its_configuration() -> None:
    job = Job((Host("a"),), "ring", ("train.py",))
    needs = run_needs.needs_of(job)
    assert needs.files[:2] == ("configs/quickstart.yaml", "configs/quickstart/train.jsonl")
    assert "configs/quickstart/model" in needs.files
    needs = run_needs.needs_of(replace(job, command=("train.py", "model.path=org/name", "checkpoint.keep=5")))
    assert needs.models == ("org/name",) and needs.checkpoints == 6
    assert run_needs.needs_of(replace(job, command=("hostname",))) == Needs()
