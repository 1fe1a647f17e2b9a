"""What goes wrong on real hosts while they train: noticed in time, told apart, and trained on from the last checkpoint."""

from __future__ import annotations

import json
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from lib.distributed import heartbeat
from lib.distributed.world import World
from lib.system.records import first_missed, read_records, rewind
from lib.training import checkpoint
from tests import rounding, tiny
from tests.cluster import Host
from tests.test_launch import nothing_left, python, wait_for, words
from tests.tiny import ROOT

LIMIT = 2.0  # --silent-seconds


def train_words(folder: Path, run_dir: Path, steps: int, **more: Any) -> list[str]:
    settings = tiny.settings(
        folder, rows=45, train__steps=steps, checkpoint__every=5, run__name="run", run__dir=run_dir, **more
    )
    words = ["strategy=synchronous", "plan.replan=false"]
    return ["train.py", "--config", str(tiny.config_file(folder)), *settings, *words]


class Watched:
    """A launch whose notes are read as they come, with their times."""

    def __init__(self, host: Host, command: list[str]):
        self.process = host.start(command, stdout=subprocess.DEVNULL)
        self.notes: list[tuple[float, str]] = []

    def until(self, pattern: str, seconds: float = 120) -> tuple[float, str]:
        """When a line came that matches, and the line."""
        assert self.process.stderr is not None
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            line = self.process.stderr.readline()
            self.notes.append((time.monotonic(), line))
            if re.search(pattern, line):
                return self.notes[-1]
            if not line:
                break
        raise AssertionError(f"no {pattern} in {[note for _, note in self.notes]}")

    def end(self, seconds: float = 120) -> int:
        _, rest = self.process.communicate(timeout=seconds)
        self.notes.append((time.monotonic(), rest))
        return int(self.process.returncode)


def steps(host: Host, rank: int) -> list[dict[str, Any]]:
    log = host.outside / "runs/run/logs" / f"rank-{rank:03d}.jsonl"
    return [record for record in read_records(log) if record["kind"] == "step"] if log.exists() else []


def rank_of(host: Host) -> int:
    """The process of this host's training."""
    found = [
        pid
        for pid, line in host.processes().items()
        if "train.py" in line and "launch" not in line and "lib.agent" not in line and "mpirun" not in line
    ]
    return found[0]


def trained(hosts: list[Host]) -> dict[int, list[int]]:
    """Every row that was trained, by epoch, from the logs of all disks."""
    epochs: dict[int, list[int]] = {}
    for host in hosts:
        for log in sorted((host.outside / "runs/run/logs").glob("rank-*.jsonl")):
            for record in read_records(log):
                if record["kind"] == "step":
                    epochs.setdefault(record["epoch"], []).extend(record["rows"])
    return {epoch: sorted(rows) for epoch, rows in epochs.items()}


FAULTS: dict[str, Callable[[Host], None]] = {
    "died": lambda host: host.signal(rank_of(host), signal.SIGKILL),
    "stopped": lambda host: host.signal(rank_of(host), signal.SIGSTOP),
    "silent": lambda host: host.unplug(),
}


@pytest.mark.parametrize(("kind", "backend"), [("died", "ring"), ("stopped", "mpi")], ids=["died", "stopped"])
@pytest.mark.long("stopped")
def test_a_lost_rank_is_noticed_named_and_trained_on(
    fresh_hosts: list[Host], tmp_path: Path, kind: str, backend: str
) -> None:
    a, b, _ = fresh_hosts
    options = ["--max-restarts", "1", "--silent-seconds", str(LIMIT)]
    command = [*words([a, b], *options, backend=backend), *train_words(tmp_path, a.disk / "runs", steps=40)]
    launch = Watched(a, command)
    wait_for(lambda: len(steps(a, 0)) >= 7)
    began = time.monotonic()
    FAULTS[kind](b)
    noticed, line = launch.until(rf"launch: {kind}: ")
    assert "host-b" in line
    again, line = launch.until("launch: start 2")
    assert "on 2 of 2 hosts" in line
    told = noticed - began - (0 if kind == "died" else LIMIT)
    print(f"{kind} {backend}: noticed {told:.1f} s after the limit, started again {again - noticed:.1f} s later")
    assert launch.end() == 0, launch.notes[-1]
    wait_for(lambda: nothing_left(fresh_hosts), 10)
    assert [step["step"] for step in steps(a, 0)] == list(range(1, 41)), "a step is missing or there twice"
    if kind == "died":
        alone = tmp_path / "alone"
        tiny.train(tmp_path, train_words(tmp_path, alone, steps=40)[3:])
        assert tiny.difference(alone / "run", a.outside / "runs/run") <= rounding.limit_of(alone / "run")


@pytest.mark.parametrize("kind", ["died", "silent"])
@pytest.mark.long
def test_independent_ranks_of_auto_go_on_after_a_fault(fresh_hosts: list[Host], tmp_path: Path, kind: str) -> None:
    """Started again on both hosts, or without the lost one from the last merge: no strategy is named anywhere."""
    a, b, _ = fresh_hosts
    train = [word for word in train_words(tmp_path, a.disk / "runs", steps=120) if not word.startswith("strategy=")]
    silent_seconds = LIMIT if kind == "silent" else 30.0  # a busy machine's host is not to be taken for a silent one
    command = [*words([a, b], "--max-restarts", "1", "--silent-seconds", str(silent_seconds)), *train]
    launch = Watched(a, command)
    try:
        wait_for(lambda: len(steps(a, 0)) >= 20, 60)  # a round is 17 steps
        FAULTS[kind](b)
        launch.until(rf"launch: {kind}: ")
        _, line = launch.until("launch: start 2")
        assert ("1 of 2 hosts (without host-b)" if kind == "silent" else "on 2 of 2 hosts") in line
        assert launch.end() == 0, launch.notes[-1]
    finally:
        b.plug_in()
    wait_for(lambda: nothing_left(fresh_hosts), 10)
    run = a.outside / "runs/run"
    summary = json.loads((run / "summary.json").read_text())
    assert summary["strategy"] == "independent" and summary["steps"] == 120
    assert summary["world_size"] == (1 if kind == "silent" else 2)
    starts = [r for r in read_records(run / "logs/rank-000.jsonl") if r["kind"] == "start"]
    assert starts[-1]["resumed_from_step"] >= 17, "what was trained before the last merge is kept"
    if kind == "died":  # the logs of both disks tell the history that lives on
        assert trained([a, b]) == {epoch: list(range(45)) for epoch in range(20)}


@pytest.mark.long
def test_training_goes_on_from_a_survivors_own_disk_and_takes_the_host_back(
    fresh_hosts: list[Host], tmp_path: Path
) -> None:
    a, b, c = fresh_hosts
    # Started from a third machine, so that the first host can be lost.
    options = ["--max-restarts", "2", "--silent-seconds", str(LIMIT)]
    launch = Watched(
        c, [*words([a, b], *options), *train_words(tmp_path, a.disk / "runs", steps=2000, evaluate__samples=1)]
    )
    try:
        wait_for(lambda: len(steps(b, 1)) >= 7)
        references = {
            host.name: {path.name for path in (host.outside / "runs/.reference").iterdir()} for host in (a, b)
        }
        assert references["host-a"] == references["host-b"] != set(), "a survivor would have to ask the reference anew"
        a.unplug()
        launch.until("launch: silent: host-a")
        launch.until(r"start 2.* on 1 of 2 hosts \(without host-a\), going on with ")
        wait_for(lambda: len(steps(b, 0)) >= 10)
        assert a.run(["hostname", "cafe-17"]).returncode == 0, "as another network would call it"
        a.plug_in()
        launch.until("a host is back: all go on together from the checkpoint")
        launch.until("on 2 of 2 hosts")
        back = len(steps(b, 0))
        wait_for(lambda: len(steps(a, 1)) > 3 and len(steps(b, 0)) > back)
        assert steps(a, 1)[-1]["host"] == "host-a", "its name in this launch"
        ranks = [line for line in a.processes().values() if re.search(r"train\.py|lib\.launch\.standby", line)]
        assert ranks and all("lib.launch.standby" in line for line in ranks), (
            "a rank was ready there before the others ended"
        )
        launch_pid = next(pid for pid, line in c.processes().items() if f"{ROOT}/launch" in line)
        c.signal(launch_pid, signal.SIGINT)
        assert launch.end() == 130
    finally:
        a.plug_in()
        a.run(["hostname", a.name])
    wait_for(lambda: nothing_left(fresh_hosts))
    last = max(int(path.name[5:]) for path in (b.outside / "runs/run/checkpoints").glob("step-*"))
    rows: dict[int, list[int]] = {}
    for host in (a, b):
        for log in sorted((host.outside / "runs/run/logs").glob("rank-*.jsonl")):
            for record in read_records(log):
                if record["kind"] == "step" and record["step"] <= last:
                    rows.setdefault(record["step"], []).extend(record["rows"])
    assert sorted(rows) == list(range(1, last + 1))
    epochs = [row for step in sorted(rows) for row in rows[step]]
    for epoch in range(len(epochs) // 45):
        assert sorted(epochs[45 * epoch : 45 * epoch + 45]) == list(range(45)), "an example was lost or repeated"


@pytest.mark.long
def test_a_host_that_is_back_and_cannot_take_part_ends_nothing(fresh_hosts: list[Host], tmp_path: Path) -> None:
    """It lost its disk, or was never there since the run began: --resume finds no run on it."""
    a, b, _ = fresh_hosts
    options = ["--max-restarts", "1", "--silent-seconds", str(LIMIT)]
    train = train_words(tmp_path, a.disk / "runs", steps=4000, evaluate__samples=0)
    launch = Watched(a, [*words([a, b], *options), *train])
    try:
        wait_for(lambda: len(steps(a, 0)) >= 7)
        b.unplug()
        launch.until(r"start 2.* on 1 of 2 hosts \(without host-b\)")
        wait_for(lambda: not b.processes())  # its agent has ended them: the launcher is silent
        shutil.rmtree(b.outside / "runs")
        b.plug_in()
        launch.until("a host is back")
        launch.until(r"start 3.* on 2 of 2 hosts")
        launch.until("host-b was taken back and cannot take part, as it says above; .* again in 300 s")
        launch.until(r"start 4.* on 1 of 2 hosts \(without host-b\)")  # of which one was to be counted
        before = len(steps(a, 0))
        wait_for(lambda: len(steps(a, 0)) > before + 20)
    finally:
        b.plug_in()
        for pid in [pid for pid, line in a.processes().items() if f"{ROOT}/launch" in line]:
            a.signal(pid, signal.SIGINT)
    assert launch.end() == 130
    assert "a host is back" not in launch.notes[-1][1], "not before the pause is over"
    wait_for(lambda: nothing_left(fresh_hosts))


@pytest.mark.long
def test_a_host_that_is_back_joins_once_the_agent_that_was_cut_off_has_ended(
    fresh_hosts: list[Host], tmp_path: Path
) -> None:
    """Its rank owns the run's folder on that disk: a start in which the host takes part would be refused."""
    a, b, _ = fresh_hosts
    options = ["--max-restarts", "1", "--silent-seconds", str(LIMIT)]
    train = train_words(tmp_path, a.disk / "runs", steps=4000, evaluate__samples=0)
    launch = Watched(a, [*words([a, b], *options), *train])
    stopped: int | None = None
    try:
        wait_for(lambda: len(steps(a, 0)) >= 7)
        stopped = next(pid for pid, line in b.processes().items() if line.endswith("-m lib.agent"))
        b.unplug()
        for pid in (stopped, rank_of(b)):  # neither sees that the others are gone, as on a link that loses packets
            b.signal(pid, signal.SIGSTOP)
        launch.until(r"start 2.* on 1 of 2 hosts \(without host-b\)")
        there = {*b.processes()}
        b.plug_in()
        wait_for(lambda: any("lib.agent" in line for pid, line in b.processes().items() if pid not in there))
        patient = time.monotonic() + 4
        while time.monotonic() < patient:
            news = [line for pid, line in b.processes().items() if pid not in there]
            assert not any("lib.launch.standby" in line for line in news), "it gets ready to take part"
            time.sleep(0.1)
        b.signal(stopped, signal.SIGCONT)
        stopped = None
        launch.until("a host is back")
        launch.until(r"start 3.* on 2 of 2 hosts")
        before = len(steps(b, 1))
        wait_for(lambda: len(steps(b, 1)) > before)
    finally:
        if stopped is not None:
            b.signal(stopped, signal.SIGCONT)
        b.plug_in()
        for pid in [pid for pid, line in a.processes().items() if f"{ROOT}/launch" in line]:
            a.signal(pid, signal.SIGINT)
    assert launch.end() == 130
    wait_for(lambda: nothing_left(fresh_hosts))


@pytest.mark.long
def test_a_run_goes_on_from_the_disk_that_alone_went_on_with_it(fresh_hosts: list[Host], tmp_path: Path) -> None:
    """The first host was away while the other one trained; then the command is given again, in the old order."""
    a, b, _ = fresh_hosts
    run, (script, *settings) = a.disk / "runs/run", train_words(tmp_path, a.disk / "runs", steps=5, evaluate__samples=0)
    alone = a.run([sys.executable, ROOT / script, *settings], cwd=ROOT)
    assert alone.returncode == 0, alone.stderr
    shutil.copytree(a.outside / "runs", b.outside / "runs")
    alone = b.run([sys.executable, ROOT / script, "--resume", run, "train.steps=15"], cwd=ROOT)
    assert alone.returncode == 0, alone.stderr
    done = a.run([*words([a, b]), script, "--resume", str(run), "train.steps=20"])
    assert done.returncode == 0, done.stderr
    assert "launch: behind: the first host lacks the run's newest checkpoint, which host-b has" in done.stderr
    assert re.search(r"start 2, .* on 2 of 2 hosts, host-b first, going on with ", done.stderr)
    assert [record["step"] for record in steps(b, 0)] == [*range(1, 21)], "nothing was undone"
    assert [record["step"] for record in steps(a, 1)] == [*range(16, 21)]


def test_a_network_that_lets_only_ssh_through_is_told_from_a_dead_rank(fresh_hosts: list[Host], tmp_path: Path) -> None:
    a, b, _ = fresh_hosts
    options = ["--max-restarts", "3", "--silent-seconds", str(LIMIT)]  # far less than --wedged-seconds
    launch = Watched(a, [*words([a, b], *options), *train_words(tmp_path, a.disk / "runs", steps=400)])
    try:
        wait_for(lambda: len(steps(a, 0)) >= 7)
        b.only_ssh()
        began = time.monotonic()
        noticed, line = launch.until("launch: (wedged|late): ")
        print(f"wedged: noticed after {noticed - began:.1f} s: {line}")
        assert "wedged: all ranks have waited" in line and "do not reach each other" in line
        launch.until(r"start 2, .* on 1 of 2 hosts \(without host-b\)")
        before = len(steps(a, 0))
        wait_for(lambda: len(steps(a, 0)) > before)
        rank = int((a.outside / "runs/run/.lock").read_text())  # a standby that became it
        a.signal(rank, signal.SIGKILL)  # host-b still answers the launcher: it is not to be waited for
        launch.until(r"start 3, .* on 1 of 2 hosts \(without host-b\)")
    finally:
        b.only_ssh(False)
        launch.process.send_signal(signal.SIGINT)
    pids = [pid for pid, line in a.processes().items() if f"{ROOT}/launch" in line]
    for pid in pids:
        a.signal(pid, signal.SIGINT)
    launch.end()
    wait_for(lambda: nothing_left(fresh_hosts))


def test_a_network_that_is_cut_before_the_start_is_no_endless_wait(fresh_hosts: list[Host], tmp_path: Path) -> None:
    a, b, _ = fresh_hosts
    b.only_ssh()
    try:
        command = [*words([a, b], "--silent-seconds", str(LIMIT)), *train_words(tmp_path, a.disk / "runs", steps=4)]
        launch = Watched(a, command)  # --wedged-seconds is ten minutes
        _, line = launch.until("launch: (wedged|late): ")
        assert "do not reach each other" in line
        assert launch.end() == 1
    finally:
        b.only_ssh(False)
    wait_for(lambda: nothing_left(fresh_hosts))


@pytest.mark.long
def test_a_wrong_input_or_too_many_faults_are_not_tried_again(three_hosts: list[Host], tmp_path: Path) -> None:
    done = three_hosts[0].run([*words(three_hosts[:2], "--max-restarts", "3"), *python("sys.exit(2)")])
    assert done.returncode == 2 and "start 2" not in done.stderr
    done = three_hosts[0].run([*words(three_hosts[:1], "--max-restarts", "1"), *python("sys.exit(5)")])
    assert done.returncode == 5 and done.stderr.count("start 2") == 1 and "start 3" not in done.stderr
    # What a later start cannot do, e.g. write to a full disk, may pass.
    code = f"import os, pathlib; f = pathlib.Path({str(tmp_path / 'starts')!r}); "
    code += "n = len(f.read_text()) if f.exists() else 0; f.write_text('x' * (n + 1)); os._exit((1, 2, 0)[n])"
    done = three_hosts[0].run([*words(three_hosts[:1], "--max-restarts", "3"), *python(code)])
    assert done.returncode == 0 and "start 3" in done.stderr, done.stderr


def test_a_log_that_missed_some_resumes_goes_back_behind_them(tmp_path: Path) -> None:
    log = tiny.write_jsonl(
        tmp_path / "rank-000.jsonl",
        [{"kind": "start", "resumes": []}, *({"kind": "step", "step": step} for step in range(1, 54))],
    )
    assert first_missed(log, [[50]], ["a"]) == 50
    assert first_missed(log, [[50], [70]], ["a", "b"]) == 50, "steps 51 to 53 were undone while this host was away"
    assert rewind(log, first_missed(log, [[50], [70]], ["a", "b"])) == 3
    with log.open("a") as file:
        file.write('{"kind": "start", "resumes": [[50], [70, 71]], "resume_ids": ["a", "b"]}\n')
    assert first_missed(log, [[50], [70], [90]], ["a", "b", "c"]) == 90
    assert first_missed(log, [[50], [70], [90]], ["a", "x", "c"]) == 70, "what it did alone from step 70 on is undone"
    assert first_missed(log, [[50], [60]], ["a", "x"], place=1) == 60
    assert first_missed(log, [[50], [90]], ["a", "x"], place=1) == 71, "its own count"


def test_hosts_that_were_alone_in_turn_leave_one_history(tmp_path: Path) -> None:
    """Two disks: one went on alone to step 9, then the other one from step 4 where it had stopped; then both."""
    words = [*tiny.settings(tmp_path), "train.steps=4", "checkpoint.every=1", "train.schedule=constant"]
    tiny.train(tmp_path, [*words, "run.name=run"])
    here, there = tmp_path / "runs/run", tmp_path / "there/run"
    shutil.copytree(here, there)
    tiny.train(tmp_path, ["--resume", str(there), "train.steps=9"])
    tiny.train(tmp_path, ["--resume", str(here), "train.steps=6"])
    for path in sorted((here / "checkpoints").iterdir()):  # what the first host's disk holds when the other leads
        shutil.copytree(path, there / "checkpoints" / path.name, dirs_exist_ok=True)
    state = json.loads((here / "checkpoints/step-00000006/state.json").read_text())
    progress = checkpoint.Progress(**state)
    checkpoint.go_back(there / "logs", progress, World(), is_keeper=True)
    assert max(step["step"] for step in tiny.steps_of(there)) == 4, "steps that the other host trained otherwise"
    assert all(int(path.name[5:]) <= 4 for path in (there / "checkpoints").glob("step-*")), "of an undone history"


def test_a_restart_names_a_run_by_a_path_that_all_hosts_have(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On one host `runs` leads to a larger disk, which the others lack."""
    (tmp_path / "larger").mkdir()
    (tmp_path / "runs").symlink_to(tmp_path / "larger")
    told: list[str] = []
    monkeypatch.setattr(heartbeat, "tell", lambda **facts: told.extend(facts[key] for key in facts if key == "run"))
    tiny.train(tmp_path, [*tiny.settings(tmp_path), "train.steps=2", "run.name=run"])
    tiny.train(tmp_path, ["--resume", told[0], "train.steps=3"])  # as a restart does; the next one names it as well
    assert told == [str(tmp_path / "runs/run")] * 2
