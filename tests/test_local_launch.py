"""Launching where things are a little odd: on this machine alone, with a stand-in for ssh where another host is wanted."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import pty
import re
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from lib.launch.attempt import Attempt, Outcome
from lib.launch.rank_console import Quiet
from lib.launch.rank_faults import Fault
from lib.launch.run_needs import Needs

from lib.launch import agent_link, host_facts, preflight, remote_process, supervisor
from lib.launch import ssh as ssh_module
from lib.launch.hostfile import Host
from lib.launch.job import Job
from tests import tiny
from tests.test_launch import python, wait_for, words

FAR = Host("192.0.2.7", addresses=("192.0.2.7",))  # nobody's (RFC 5737)
AWAY = '[ -e "$0.back" ] || exit 255; for last; do :; done; exec sh -c "$last"'
CHATTY = 'echo "Welcome to {lab}, 3 users"; for last; do :; done; exec sh -c "$last"'
STUCK = (
    'sleep 100 & child=$!; sleep 0.3; echo $child >> "$0.pids"; sleep 100'  # as behind a jump host that does not answer
)


NAMELESS = 'for i in $(seq 50); do [ -e "$0.go" ] && exit 0; sleep 0.1; done; touch "$0.blocked"'


def stand_in(folder: Path, script: str, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An ssh that reaches this machine, whatever it is asked for."""
    ssh = folder / "ssh"
    ssh.write_text(f"#!/bin/sh\n{script}\n")
    ssh.chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
    return ssh


def is_running(pid: str) -> bool:
    stat = Path(f"/proc/{pid}/stat")
    return stat.exists() and stat.read_text().rpartition(") ")[2][0] != "Z"


def launch(*command: str, **options: Any) -> subprocess.Popen[str]:
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    return subprocess.Popen(command, text=True, **pipes, **options)


def test_a_rank_that_leaves_a_child_with_its_output_is_seen_to_end() -> None:
    child = "subprocess.Popen(['sleep', '100']); time.sleep(0.2); sys.exit(7)"
    done = subprocess.run([*words("localhost"), *python(child)], capture_output=True, text=True, timeout=120)
    assert done.returncode == 7 and "ended with status 7" in done.stderr


def test_a_launch_outlives_its_terminal_under_nohup_and_letters_that_the_terminal_lacks() -> None:
    code = "os.write(1, 'η\\n'.encode()); print(sys.stdin.readline())"
    process = launch(
        *words("localhost"),
        *python(code),
        env={**os.environ, "PYTHONIOENCODING": "ascii"},
        preexec_fn=lambda: signal.signal(signal.SIGHUP, signal.SIG_IGN),
    )
    assert process.stdout is not None and process.stdout.readline() == "[0 localhost] ?\n"
    process.send_signal(signal.SIGHUP)
    output, errors = process.communicate("still here\n", timeout=120)
    assert process.returncode == 0 and "still here" in output and not errors


def test_a_machine_with_two_names_in_the_host_file_is_told_so_and_not_tried_again() -> None:
    command = [*words("localhost,127.0.0.1", "--max-restarts", "3"), *python("time.sleep(100)")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 2 and "names this machine twice" in done.stderr and "start 2" not in done.stderr


def test_what_a_login_shell_prints_is_passed_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stand_in(tmp_path, CHATTY, monkeypatch)

    job = Job((FAR,), "ring", ("true",))

    async def reach() -> bool:
        link = await agent_link.connect(job, FAR)
        await link.close()
        return link.closed

    assert asyncio.run(reach())

    async def ask() -> dict[str, Any]:
        process, facts = await preflight.ask_facts(job, FAR, {**asdict(Needs()), "ports": [], "ssh_to": [], "rdma": 0})
        assert process is not None and isinstance(facts, dict), facts
        remote_process.kill(process)
        await process.wait()
        return facts

    assert asyncio.run(ask())["packages"] == host_facts.packages()


def test_an_ssh_that_hangs_is_given_up_with_what_it_started(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ssh = stand_in(tmp_path, STUCK, monkeypatch)
    monkeypatch.setattr(ssh_module, "CONNECT_SECONDS", -1.0)
    with pytest.raises(ConnectionError, match="no answer"):
        asyncio.run(asyncio.wait_for(agent_link.connect(Job((FAR,), "ring", ("true",)), FAR), 10))
    process = launch(sys.executable, "launch", "--hosts", FAR.name, "--preflight-only", "--", "true")
    pids = ssh.with_name("ssh.pids")
    wait_for(lambda: len(pids.read_text().split()) == 2)
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=120)
    # 1: the interrupt came as the check ended by itself, and failed.
    assert process.returncode in (1, 130) and "Traceback" not in errors
    wait_for(lambda: not any(map(is_running, pids.read_text().split())))


@pytest.mark.skipif(shutil.which("ssh") is None, reason="this system has no ssh")
def test_no_connection_of_the_users_is_shared_and_no_forward_made_again(tmp_path: Path) -> None:
    """A master that died would hang every new session; a forward's port is taken by the user's own session."""
    config = tmp_path / "config"
    config.write_text("Host *\n ControlMaster auto\n ControlPath /tmp/master-%h\n LocalForward 8989 localhost:22\n")
    program, *words = ssh_module.remote_command(Job((FAR,), "ring", ("true",)), FAR, "lib.agent")
    shown = subprocess.run([program, "-G", "-F", str(config), *words], capture_output=True, text=True, check=True)
    settings = dict(line.partition(" ")[::2] for line in shown.stdout.splitlines())
    assert settings["controlmaster"] == "false" and "localforward" not in settings
    assert settings.get("controlpath", "none") == "none"


def test_a_name_that_takes_long_to_look_up_holds_up_nobody(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ssh = stand_in(tmp_path, NAMELESS, monkeypatch)  # `ssh -G NAME` that waits for a name server

    async def reach() -> None:
        host = Host("no-such-host.invalid")
        reaching = asyncio.ensure_future(agent_link.connect(Job((host,), "ring", ("true",)), host))
        await asyncio.sleep(0.1)
        ssh.with_name("ssh.go").touch()
        with pytest.raises(ConnectionError):
            await reaching

    asyncio.run(reach())
    assert not ssh.with_name("ssh.blocked").exists()


def test_a_launch_waits_for_its_network_while_there_is_a_run_to_go_on_with(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ssh = stand_in(tmp_path, AWAY, monkeypatch)

    async def answering(patience_seconds: float) -> tuple[Host, ...]:
        links: dict[str, agent_link.Link] = {}
        job, none = Job((FAR,), "ring", ("true",)), asyncio.Queue[int]()
        asking = asyncio.ensure_future(supervisor.answering_hosts(job, links, (FAR,), False, patience_seconds, none))
        await asyncio.sleep(0.5)
        ssh.with_name("ssh.back").touch()
        found = await asking
        await asyncio.gather(*(link.close() for link in links.values()))
        ssh.with_name("ssh.back").unlink()
        return found

    assert asyncio.run(answering(0.0)) == ()
    assert asyncio.run(answering(30.0)) == (FAR,)


def test_a_slow_login_is_waited_for_and_holds_up_nobody(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = stand_in(tmp_path, 'sleep 1.5; for last; do :; done; exec sh -c "$last"', monkeypatch)
    monkeypatch.setattr(supervisor, "work_limit", lambda seconds, load: 0.2)
    here = Host("localhost")

    async def answering(hosts: tuple[Host, ...]) -> list[str]:
        links: dict[str, agent_link.Link] = {}
        job, none = Job(hosts, "ring", ("true",)), asyncio.Queue[int]()
        found = await supervisor.answering_hosts(job, links, hosts, False, 0.0, none)
        await asyncio.gather(*(link.close() for link in links.values()))
        return [host.name for host in found]

    assert asyncio.run(answering((FAR,))) == [FAR.name], "no other one is there"
    script.write_text("#!/bin/sh\nsleep 100\n")
    began = time.monotonic()
    assert asyncio.run(answering((FAR, here))) == [here.name] and time.monotonic() - began < ssh_module.CONNECT_SECONDS


def test_one_look_out_that_fails_ends_no_other_and_is_told_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[str] = []
    looked: list[str] = []

    async def look(attempt: Any, host: Host, everyone: tuple[Host, ...]) -> None:
        while True:
            await asyncio.sleep(0.02)
            looked.append(host.name)
            if host.name == "odd":
                raise ValueError("unexpected")

    async def play() -> None:
        asyncio.get_running_loop().set_exception_handler(lambda _, context: told.append(str(context)))
        attempt = Attempt(Job((FAR,), "ring", ("true",)), Quiet([]))
        attempt.console.note = told.append  # type: ignore[method-assign]
        looking = supervisor.looking_out(attempt, (Host("odd"), FAR), (FAR,), supervisor.Unfit())
        await asyncio.sleep(0.2)
        looking.cancel()
        del looking
        await asyncio.sleep(0.1)
        gc.collect()

    monkeypatch.setattr(supervisor, "_look_out", look)
    asyncio.run(play())
    assert looked.count(FAR.name) > 2 and looked.count("odd") == 1
    assert told == ["odd is not looked for any more: ValueError('unexpected')"], told


def test_a_start_that_ends_because_a_host_is_back_lets_no_later_one_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    """It has made a checkpoint; the starts of all hosts between them met a fault before their first."""
    lost, back = Outcome(1, Fault("lost", "host-b is off", ("b",)), "run"), Outcome(0, run="run", rejoined=True)
    outcomes = [lost, back, lost, back, lost, lost, Outcome(0)]
    paused: list[int] = []

    async def outcome_of(*_: object) -> Outcome:
        return outcomes.pop(0)

    async def hosts_of(job: Job, *_: object) -> tuple[Host, ...]:
        return job.hosts

    async def placed(before: Job, *_: object) -> tuple[Host, ...]:
        return before.hosts

    def pause_seconds(fruitless: int) -> float:
        paused.append(fruitless)
        return 0.0

    monkeypatch.setattr(supervisor, "_outcome", outcome_of)
    monkeypatch.setattr(supervisor, "_next_hosts", hosts_of)
    monkeypatch.setattr(supervisor, "_placed", placed)
    monkeypatch.setattr(supervisor, "pause_seconds", pause_seconds)
    monkeypatch.setattr(supervisor, "_hand_on_input", lambda *_: None)
    job = Job((Host("a"), Host("b")), "ring", ("train.py",))
    assert asyncio.run(supervisor.supervise(job, Quiet([]), 9, "survivors")) == 0
    assert paused == [1, 1, 1, 2]


BACKGROUND = """
import os, signal, subprocess, sys, time
signal.signal(signal.SIGTTOU, signal.SIG_IGN)
launch = subprocess.Popen(sys.argv[1:], stdout=subprocess.PIPE, preexec_fn=lambda: os.setpgid(0, 0))
os.tcsetpgrp(0, launch.pid)
launch.stdout.readline()
os.kill(launch.pid, signal.SIGTSTP)
os.waitpid(launch.pid, os.WUNTRACED)
os.tcsetpgrp(0, os.getpgrp())
os.kill(launch.pid, signal.SIGCONT)
sys.exit(launch.wait(15))
"""


def test_a_launch_goes_on_after_ctrl_z_and_bg() -> None:
    code = python("print('ready', flush=True); time.sleep(1)")
    child, terminal = pty.fork()
    if child == 0:
        os.execv(sys.executable, [sys.executable, "-c", BACKGROUND, *words("localhost"), *code])
    with contextlib.suppress(OSError):  # its end
        while os.read(terminal, 2**16):
            pass
    os.close(terminal)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


HANG = """
import signal, time

def hang(number, frame):
    import mlx.core as mx
    from lib.distributed import heartbeat
    plain = mx.async_eval
    mx.async_eval = lambda *arrays: time.sleep(100) if heartbeat._facts["passing"] else plain(*arrays)

signal.signal(signal.SIGUSR1, hang)
"""


@pytest.mark.long
def test_a_rank_that_hangs_while_nobody_waits_for_it_is_started_again(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(HANG)
    run = tmp_path / "runs/run"
    settings = tiny.settings(tmp_path, train__steps=2000, checkpoint__every=10, run__name="run", run__dir=run.parent)
    command = ["train.py", "--config", str(tiny.config_file(tmp_path)), *settings, "evaluate.samples=0"]
    limits = ["--max-restarts", "1", "--wedged-seconds", "1", "--env", f"PYTHONPATH={tmp_path}"]
    with launch(*words("localhost", *limits), *command) as process:
        wait_for(lambda: (run / "checkpoints").exists() and any((run / "checkpoints").glob("step-*")))
        os.kill(int((run / ".lock").read_text()), signal.SIGUSR1)
        assert process.stderr is not None
        notes = (line for line in iter(process.stderr.readline, "") if line.startswith("launch: "))
        first, second = next(notes), next(notes)
        wait_for(lambda: re.search(r'"resumed_from_step": \d', (run / "logs/rank-000.jsonl").read_text()))
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=120)
    assert "hung: rank 0 on localhost has been computing for" in first and "start 2, " in second


FAILS = """
import os, sys
sys.path.insert(0, {root!r})
import train
from lib.system import mpi_and_blas
mpi_and_blas.prepare()
import mlx.core as mx
from lib.training import objective

plain, calls = objective.completion_logps, []

def failing(*arguments):
    calls.append("")
    broken = mx.linalg.inv(mx.zeros((2, 2)), stream=mx.cpu)[0, 0] if len(calls) > 3 else 0.0
    return plain(*arguments) + broken

if "1" in (os.environ.get("MLX_RANK"), os.environ.get("OMPI_COMM_WORLD_RANK")):
    objective.completion_logps = failing
sys.exit(mpi_and_blas.status_of(train.main))
"""


@pytest.mark.parametrize("backend", ["ring", "mpi"], ids=["ring", "mpirun"])
@pytest.mark.long("mpirun")
def test_an_error_of_mlx_inside_a_divided_pass_ends_all_ranks_with_one_message(tmp_path: Path, backend: str) -> None:
    """One rank's part fails where it is evaluated; the other is inside the same pass, and waits for it there."""
    script = tmp_path / "rank.py"
    script.write_text(FAILS.format(root=str(tiny.ROOT)))
    settings = tiny.settings(tmp_path, train__steps=9, strategy="sharded", evaluate__samples=0)
    command = [*words("localhost:2", "--backend", backend), str(script), "--config", str(tiny.config_file(tmp_path))]
    done = subprocess.run([*command, *settings], capture_output=True, text=True, timeout=120)
    assert done.returncode == 1 and "Traceback" not in done.stderr, done.stderr
    own = [line for line in done.stderr.splitlines() if "error: " in line]
    assert re.search(r"error: rank 1 on .*: MLX failed: \[Inverse::eval_cpu\] .*; go on with --resume", own[0])
    assert len(own) == 1 or "rank 0" in own[1] and "lost the connection to another rank" in own[1]
    last = done.stderr.splitlines()[-1]
    assert re.match(r"launch: died: .*rank 1 on localhost: MLX failed: \[Inverse::eval_cpu\]", last), last
    assert "rank 0" not in last and done.stderr.count("launch: ") == 1


@pytest.mark.long
def test_a_run_whose_updates_are_never_finite_is_started_once_more_and_then_no_more(tmp_path: Path) -> None:
    changes = {"train__steps": 99, "train__learning_rate": "1e30", "train__max_grad_norm": "null"}
    settings = tiny.settings(tmp_path, run__name="run", train__max_skipped_steps=2, evaluate__samples=0, **changes)
    command = [*words("localhost", "--max-restarts", "9"), "train.py", "--config", str(tiny.config_file(tmp_path))]
    done = subprocess.run([*command, *settings], capture_output=True, text=True, timeout=120)
    assert done.returncode == 1 and "Traceback" not in done.stderr, done.stderr
    notes = [line for line in done.stderr.splitlines() if line.startswith("launch: ")]
    assert re.match(
        r"launch: diverged: rank 0 on .*: 2 updates in a row were not finite, the last at step \d", notes[0]
    )
    assert "start 2" in notes[1] and notes[2] == notes[0], notes
    assert notes[3].startswith("launch: not started again: the updates are not finite, as before; lower train.learn")
    assert len(notes) == 4
