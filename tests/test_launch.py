"""Launching on real hosts: namespaces with an sshd each, over the ring and over mpirun."""

from __future__ import annotations

import json
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from lib.launch.rank_faults import (
    Fault,
    HostState,
    RankState,
    common_wait_seconds,
    cut_between,
    diagnose,
    exit_status,
    stragglers,
)
from lib.launch.rank_processes import processes_of

from lib.config import load
from lib.launch import command as command_module
from lib.launch import supervisor
from lib.launch.hostfile import Host
from lib.launch.job import Job, resume_command
from lib.system.records import read_records
from tests import rounding, tiny
from tests.cluster import Host as Machine
from tests.tiny import ROOT

LAUNCH = ["--no-preflight", "--"]
BACKENDS = (pytest.param("ring", id="ring"), pytest.param("mpi", id="mpirun"))  # pytest-mpi skips what is called mpi
RANK = "rank = int(os.environ.get('MLX_RANK') or os.environ.get('OMPI_COMM_WORLD_RANK') or 0)"


def words(hosts: list[Machine] | str, *options: str, backend: str = "ring") -> list[str]:
    names = hosts if isinstance(hosts, str) else ",".join(host.name for host in hosts)
    return [sys.executable, str(ROOT / "launch"), "--hosts", names, "--backend", backend, *options, *LAUNCH]


def python(code: str) -> list[str]:
    return [sys.executable, "-c", f"import os, sys, time, socket, signal, subprocess\n{RANK}\n{code}"]


def tagged(output: str) -> dict[str, list[str]]:
    """The lines of every tag."""
    lines: dict[str, list[str]] = {}
    for line in output.splitlines():
        tag, _, text = line.partition("] ")
        lines.setdefault(tag.removeprefix("["), []).append(text)
    return lines


def wait_for(condition: Callable[[], Any], seconds: float = 120) -> Any:
    deadline = time.monotonic() + seconds
    while not (found := condition()):
        assert time.monotonic() < deadline, "it did not come"
        time.sleep(0.05)
    return found


def nothing_left(hosts: list[Machine]) -> bool:
    return not any(host.processes() for host in hosts)


# ---- What arrives, and what comes back


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.long("mpirun")
def test_words_arrive_unchanged_on_every_rank_and_run_nothing(
    three_hosts: list[Machine], tmp_path: Path, backend: str
) -> None:
    """So do variables, folklore with a word about it; and mpirun's files go with the launch."""
    hostile = [
        "a b",
        "x=y z",
        f"$(touch {tmp_path}/owned)",
        f"; touch {tmp_path}/owned",
        "'\"",
        "*",
        "é\n2",
        "",
        "--",
        "-n",
    ]
    code = python(
        "import json; from pathlib import Path; own = [os.environ[name] for name in ('A', 'MLX_LOCAL_RANK', 'MLX_METAL_FAST_SYNCH')]\n"
        "files = [str(path) for path in Path(os.environ['TANDEM_AGENT']).glob('*.[0-9]*')]\n"
        "print(json.dumps([[socket.gethostname(), rank, *own, sys.argv[1:]], files]))"
    )
    options = ["--env", f"A=b c=$HOME `touch {tmp_path}/owned`", "--env", "MLX_LOCAL_RANK=3"]
    options += ["--env", "MLX_METAL_FAST_SYNCH=0"]
    done = three_hosts[0].run([*words("host-a,host-b:2,host-c", *options, backend=backend), *code, *hostile])
    assert done.returncode == 0, done.stderr
    assert "nothing reads MLX_LOCAL_RANK" in done.stderr and "FAST_SYNCH" not in done.stderr
    found = {tag: json.loads(lines[0]) for tag, lines in tagged(done.stdout).items()}
    names = ["host-a", "host-b", "host-b", "host-c"]
    assert {tag: told for tag, (told, _) in found.items()} == {
        f"{i} {n}": [n, i, options[1][2:], "3", "0", hostile] for i, n in enumerate(names)
    }
    assert not (tmp_path / "owned").exists() and nothing_left(three_hosts)
    # In /tmp they have a process id for a name, and mpirun ends with status 213 where a killed one left the same.
    folders = {Path(folder) for _, files in found.values() for folder in files}
    assert len(folders) == (3 if backend == "mpi" else 0), done.stdout
    wait_for(lambda: not any(folder.parent.exists() for folder in folders))


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_status_is_the_worst_ranks_and_a_death_ends_the_others(three_hosts: list[Machine], backend: str) -> None:
    code = python("time.sleep(0.3); sys.exit({0: 0, 1: 7}[rank]) if rank < 2 else time.sleep(1000)")
    done = three_hosts[0].run([*words(three_hosts, backend=backend), *code])  # long before rank 2 would end
    assert done.returncode == 7 and "ended with status 7" in done.stderr
    wait_for(lambda: nothing_left(three_hosts))


def test_a_rank_killed_by_a_signal_is_told_as_a_shell_tells_it(three_hosts: list[Machine]) -> None:
    done = three_hosts[0].run(
        [*words(three_hosts[:2]), *python("os.kill(os.getpid(), 11) if rank else time.sleep(1000)")]
    )
    assert done.returncode == 128 + 11 and "rank 1 on host-b was ended by SIGSEGV" in done.stderr


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.long("mpirun")
def test_input_goes_to_rank_0_alone_and_output_keeps_its_lines(three_hosts: list[Machine], backend: str) -> None:
    text = "".join(f"line {number} é\n" for number in range(20_000)) + "no end"
    code = python(
        "data = sys.stdin.read(); print(rank, len(data)); sys.stdout.write(data if rank == 0 else ''); print('\\nto err', file=sys.stderr)"
    )
    done = three_hosts[0].run([*words(three_hosts[:2], backend=backend), *code], stdin=None, input=text)
    lines = tagged(done.stdout)
    assert lines["0 host-a"] == [f"0 {len(text)}", *text.splitlines()] and lines["1 host-b"] == ["1 0"]
    assert tagged(done.stderr)["1 host-b"] == ["", "to err"]


@pytest.mark.long
def test_a_command_that_is_not_there_or_a_host_that_does_not_answer_is_one_line(three_hosts: list[Machine]) -> None:
    done = three_hosts[0].run([*words(three_hosts[:2]), "no-such-command"])
    assert done.returncode == 127 and "no-such-command: No such file" in done.stderr
    done = three_hosts[0].run([*words("host-a,10.77.0.99"), "true"])
    assert done.returncode == 1 and done.stderr.count("\n") == 1 and "lost: 10.77.0.99" in done.stderr
    done = three_hosts[0].run([*words("host-a,nowhere"), "true"])
    assert done.returncode != 0 and "nowhere" in done.stderr and "Traceback" not in done.stderr
    done = three_hosts[0].run([*words("host-a,nowhere", "--sync", "configs"), "true"])
    last = done.stderr.splitlines()[-1]
    assert done.returncode == 2 and last.startswith("error: --sync configs: rsync to nowhere failed: ")


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--", "train.py"], "--hostfile FILE or --hosts"),
        (["--hosts", "a", "train.py"], "comes after --"),
        (["--hosts", "a", "x", "--", "train.py"], "comes after --"),
        (["--hosts", "a;b", "--"], "cannot be a host's name"),
        (["--hosts", "-oProxyCommand=x", "--"], "expected one argument|cannot be a host's name"),
        (["--hosts", "a", "--max-restarts", "-1", "--"], "max-restarts"),
        (["--hosts", "a", "--silent-seconds", "nan", "--"], "silent-seconds"),
        (["--hosts", "a", "--env", "A", "--"], "NAME=VALUE"),
        (["--hosts", "a,b", "--backend", "jaccl", "--"], "jaccl wants"),
        (["--hosts", "a", "--unknown", "--"], "unrecognized"),
        (["--hostfile", "/nowhere", "--"], "/nowhere"),
        (["--hosts", "a,b", "--role", "primary", "--backend", "mpi", "--"], "mpirun reaches"),
        (["--hosts", "10.99.99.1,10.99.99.2", "--role", "primary", "--"], "0 of the hosts"),
        (["--hosts", "a,b", "--role", "primary", "--max-restarts", "1", "--"], "--max-restarts needs ssh"),
        (["--hosts", "a", "--key", "k", "--"], "--key is for --role"),
    ],
)
def test_a_wrong_command_line_is_one_line(capsys: pytest.CaptureFixture[str], arguments: list[str], told: str) -> None:
    assert command_module.main(arguments) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ") and error.count("\n") == 1
    assert pytest.importorskip("re").search(told, error), error


# ---- Ending


STUBBORN = """
signal.signal(signal.SIGINT, signal.SIG_IGN); signal.signal(signal.SIGTERM, signal.SIG_IGN)
subprocess.Popen(['sleep', '1000'])
print('ready', flush=True)
time.sleep(1000)
"""


@pytest.mark.parametrize(
    ("backend", "how"),
    [("ring", "once"), ("mpi", "once"), ("ring", "twice"), ("mpi", "killed")],
    ids=["ring", "mpirun", "twice", "killed"],
)
@pytest.mark.long("twice", "mpirun")
def test_ctrl_c_or_a_killed_launcher_leaves_no_process_on_any_host(
    three_hosts: list[Machine], backend: str, how: str
) -> None:
    process = three_hosts[0].start([*words(three_hosts, backend=backend), *python(STUBBORN)])
    assert process.stdout is not None
    for _ in three_hosts:
        line = process.stdout.readline()
        assert "ready" in line, process.communicate(timeout=120)
    wait_for(lambda: all(any("sleep 1000" in line for line in host.processes().values()) for host in three_hosts))
    launch = next(pid for pid, line in three_hosts[0].processes().items() if f"{ROOT}/launch" in line)
    began = time.monotonic()
    three_hosts[0].signal(launch, signal.SIGKILL if how == "killed" else signal.SIGINT)
    if how == "twice":
        time.sleep(0.1)
        three_hosts[0].signal(launch, signal.SIGINT)
    _, errors = process.communicate(timeout=120)
    wait_for(lambda: nothing_left(three_hosts))
    print(f"{backend} {how}: {time.monotonic() - began:.1f} s")  # 2 to 3 where nothing else runs
    assert "Traceback" not in errors
    assert process.returncode == (130 if how != "killed" else -signal.SIGKILL)


def test_a_reader_that_has_seen_enough_ends_the_launch(three_hosts: list[Machine]) -> None:
    command = shlex.join([*words(three_hosts[:2]), "yes"])
    done = three_hosts[0].run(["sh", "-c", f"{command} | head -n 3"])
    assert len(done.stdout.splitlines()) == 3 and "Traceback" not in done.stderr
    wait_for(lambda: nothing_left(three_hosts))


# ---- Training


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.long("mpirun")
def test_two_hosts_train_what_one_trains(three_hosts: list[Machine], tmp_path: Path, backend: str) -> None:
    settings = tiny.settings(tmp_path, train__steps=6)
    config = ["--config", str(tiny.config_file(tmp_path))]
    tiny.train(tmp_path, [*settings, "run.name=alone"])
    # As Debian has it: to itself a machine is a loopback address.
    (tmp_path / "hosts").write_text(f"127.0.1.1 host-a\n{three_hosts[1].address} host-b\n")
    three_hosts[0].run(["mount", "--bind", tmp_path / "hosts", "/etc/hosts"])
    done = three_hosts[0].run(
        [
            *words(three_hosts[:2], backend=backend),
            "train.py",
            *config,
            *settings,
            "run.name=together",
            "plan.shares=[5,3]",
        ]
    )
    three_hosts[0].run(["umount", "/etc/hosts"])
    assert done.returncode == 0, done.stdout + done.stderr
    runs = tmp_path / "runs"
    assert tiny.difference(runs / "alone", runs / "together") <= rounding.limit_of(runs / "alone")
    hosts = {record["host"] for rank in (0, 1) for record in tiny.steps_of(runs / "together", rank)}
    assert hosts == {"host-a", "host-b"}
    rates = []
    for rank, other in ((0, three_hosts[1]), (1, three_hosts[0])):  # the network as each rank saw it
        log = list(read_records(runs / "together/logs" / f"rank-{rank:03d}.jsonl"))
        network = next(record for record in log if record["kind"] == "network")
        assert network["bytes_sent"] > 0
        rates.append(network["bytes_per_second"])  # None of a rank that only waited for the other in that step
        trips = [link["round_trip_seconds"] for link in network["connections"] if link["peer"] == other.address]
        assert all(0 < trip < 1 for trip in trips) and (trips or backend == "mpi"), network
    assert any(rates) and all(rate is None or rate > 0 for rate in rates), rates


@pytest.mark.long
def test_machines_started_by_hand_train_together(three_hosts: list[Machine], tmp_path: Path) -> None:
    settings = [*tiny.settings(tmp_path, train__steps=3), "--config", str(tiny.config_file(tmp_path)), "run.name=hand"]
    settings.append("strategy=synchronous")  # each step on both
    key = str(tmp_path / "key")  # the primary makes it, the secondary waits for it
    hands = [
        host.start([*words(three_hosts[:2], "--role", role, "--key", key), "train.py", *settings])
        for host, role in zip(three_hosts, ("primary", "secondary"), strict=False)
    ]
    for hand in hands:
        output, errors = hand.communicate(timeout=120)
        assert hand.returncode == 0, output + errors
    assert len(tiny.steps_of(tmp_path / "runs" / "hand", 1)) == 3
    wrong = three_hosts[1].run([*words(three_hosts[:2], "--role", "primary"), "train.py"])
    assert wrong.returncode == 2 and "is the primary" in wrong.stderr


# ---- Pure: what is started, what is wrong


def work_of(backend: str, hosts: tuple[Host, ...], **more: Any) -> list[Any]:
    folders = [f"/f{i}" for i in range(len(hosts))]
    return processes_of(Job(hosts, backend, ("train.py", "a=b"), **more), folders)


def test_the_contract_of_every_backend() -> None:
    hosts = (Host("a", 1, ("10.0.0.1", "10.1.0.1"), (None, "d1")), Host("b", 2, ("10.0.0.2",), ("d0", None)))
    (first, files), (second, _) = work_of("ring", hosts, connections_per_ip=2)
    ports = [["10.0.0.1:32323", "10.0.0.1:32324", "10.1.0.1:32325", "10.1.0.1:32326"]]
    ports += [["10.0.0.2:32327", "10.0.0.2:32328"], ["10.0.0.2:32329", "10.0.0.2:32330"]]
    assert json.loads(files["hosts.json"]) == ports
    assert [p["environment"]["MLX_RANK"] for p in (*first, *second)] == ["0", "1", "2"]
    assert second[0]["environment"]["MLX_HOSTFILE"] == "/f1/hosts.json"
    assert first[0]["command"] == [sys.executable, "train.py", "a=b"]

    (first, _), (second, _) = work_of("nccl", hosts, environment={"CUDA_VISIBLE_DEVICES": "5"})
    names = ("NCCL_HOST_IP", "NCCL_PORT", "MLX_WORLD_SIZE", "MLX_RANK", "CUDA_VISIBLE_DEVICES")
    assert [second[1]["environment"][name] for name in names] == ["10.0.0.1", "32323", "3", "2", "5"]
    (_, _), (second, _) = work_of("nccl", hosts)
    assert [process["environment"]["CUDA_VISIBLE_DEVICES"] for process in second] == ["0", "1"]

    (first, files), _ = work_of("jaccl", hosts)
    assert json.loads(files["hosts.json"]) == [[None, "d1"], ["d0", None]]
    assert first[0]["environment"]["MLX_JACCL_COORDINATOR"] == "10.0.0.1:32323"
    assert first[0]["environment"]["MLX_IBV_DEVICES"] == "/f0/hosts.json"

    (first, files), (second, _) = work_of("mpi", hosts, connections_per_ip=2, mpi_arguments=("--verbose",))
    assert files["hostfile"] == "a slots=1\nb slots=2\n" and second == []
    command = first[0]["command"]
    assert command[-3:] == [sys.executable, "train.py", "a=b"] and "--verbose" in command
    assert command[command.index("btl_tcp_links") + 1] == "2"

    [([alone], files)] = work_of("ring", hosts[:1])
    assert not files and "MLX_HOSTFILE" not in alone["environment"], "a ring of one is no ring"


def test_job_files_start_the_same_command(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    hostile = ["a b", "x=y", "$(touch owned)", "'"]
    command = [
        "--env",
        "A=b c",
        "--directory",
        str(tmp_path),
        "--python",
        sys.executable,
        "--",
        "sh",
        "-c",
        "true",
        *hostile,
    ]
    assert command_module.main(["--hosts", "a:2,b:2", "--emit", "hostfile", "--no-preflight", *command]) == 0
    assert capsys.readouterr().out == "a slots=2\nb slots=2\n"
    assert command_module.main(["--hosts", "a:2,b:2", "--emit", "mpijob", *command]) == 0
    job = json.loads(capsys.readouterr().out)["spec"]
    launch = job["mpiReplicaSpecs"]["Launcher"]["template"]["spec"]["containers"][0]
    assert launch["command"][-7:] == ["sh", "-c", "true", *hostile] and launch["command"][2] == "4"
    assert {"name": "A", "value": "b c"} in launch["env"] and job["mpiReplicaSpecs"]["Worker"]["replicas"] == 2
    assert job["mpiReplicaSpecs"]["Launcher"]["replicas"] == 1 and job["slotsPerWorker"] == 2
    assert command_module.main(["--hosts", "a:2,b:1", "--emit", "mpijob", *command]) == 2
    assert "1 to 2 slots" in capsys.readouterr().err
    assert command_module.main(["--hosts", "a:2,b:1", "--emit", "slurm", *command]) == 2
    assert "1 to 2 slots" in capsys.readouterr().err
    show = ["--env", "A=b c", "--directory", str(tmp_path), "--python", sys.executable, "--"]
    show += [*python("import json; print(json.dumps([os.environ['A'], os.getcwd(), sys.argv[1:]]))"), *hostile]
    assert command_module.main(["--hosts", "localhost:2", "--emit", "slurm", *show]) == 0
    script = capsys.readouterr().out
    assert "#SBATCH --nodes=1\n#SBATCH --ntasks-per-node=2\n" in script
    # The script is run here, without Slurm: mpirun then takes the slots of this machine.
    done = subprocess.run(
        ["bash", "-s"], input=script.replace("--map-by", "-n 2 --map-by"), capture_output=True, text=True
    )
    assert [json.loads(line) for line in done.stdout.splitlines()] == [["b c", str(tmp_path), hostile]] * 2, done.stderr


def test_the_command_that_goes_on() -> None:
    command = ("train.py", "--config", "x.yaml", "train.beta=0.2", "run.name=y", "plan.shares=[3,1]")
    assert resume_command(command, "runs/y", True) == (
        "train.py", "--resume", "runs/y", "train.beta=0.2", "plan.shares=[3,1]",
    )  # fmt: skip
    assert resume_command(command, "runs/y", False)[3:] == (
        "train.beta=0.2", "plan.shares=null", "plan.micro_batch_sizes=null",
    )  # fmt: skip


def test_a_restart_is_given_what_the_user_allowed_and_the_runs_folder_cannot(tmp_path: Path) -> None:
    own = tmp_path / "own.yaml"
    own.write_text("model: {path: m, trust_remote_code: true}\ndata: {train: d}\nrun: {sinks: [wandb, tensorboard]}\n")
    assert resume_command(("train.py", "--config", str(own)), "runs/y", True)[3:] == (
        "model.trust_remote_code=true", "run.sinks=[wandb,tensorboard]",
    )  # fmt: skip
    given = ("train.py", "--config", str(own), "run.sinks=[]", "model.trust_remote_code=false", "run.dir=x")
    assert resume_command(given, "runs/y", True)[3:] == ("run.sinks=[]", "model.trust_remote_code=false")
    own.write_text(
        "model: {path: m}\ndata: {train: d}\nrollouts: {rounds: 2}\n"
        "evaluate: {judge: 'judges:score', judge_prompt: 'a: #1.txt'}\n"
    )
    words = resume_command(("train.py", "--config", str(own)), "runs/y", True)[3:]
    assert words == ("evaluate.judge=judges:score", "evaluate.judge_prompt=a: #1.txt")
    assert load.resume(own, list(words)) == load.load(own), "a run's folder has the same settings"


def test_only_starts_that_bring_nothing_wait() -> None:
    assert [supervisor.pause_seconds(n) for n in (0, 1, 2, 3, 4, 6, 7, 10_000)] == [0, 0, 1, 2, 4, 16, 30, 30]


def test_faults_are_told_apart() -> None:
    def found(hosts: dict[str, HostState] | None = None, **changes: Any) -> Fault | None:
        seen = {"a": HostState("a", 99.0), "b": HostState("b", 99.0)} | (hosts or {})
        ranks = [RankState(0, "a", beats=True), RankState(1, "b", beats=True)]
        for name, (rank, value) in changes.items():
            setattr(ranks[rank], name, value)
        return diagnose(100.0, seen, ranks, silent_seconds=10, wedged_seconds=30)

    assert found() is None
    assert found(status=(1, 0)) is None, "a rank that is done"
    fault = found(status=(1, -9))
    assert fault and (fault.kind, fault.hosts) == ("died", ("b",)) and "SIGKILL" in fault.message
    fault = found({"b": HostState("b", 89.0)})
    assert fault and (fault.kind, fault.hosts) == ("silent", ("b",)) and "11.0 s" in fault.message
    assert found({"b": HostState("b", 89.0)}, status=(1, 0)) is None, "it has nothing left to say"
    fault = found({"b": HostState("b", 99.0, closed=True)})
    assert fault and fault.kind == "lost"
    fault = found(stopped_since=(1, 89.0))
    assert fault and (fault.kind, fault.hosts) == ("stopped", ("b",)) and found(stopped_since=(1, 91.0)) is None
    hangs: dict[str, Any] = {"passing": (1, "step 7"), "passing_since": (1, 69.0)}
    fault = found(**hangs)
    assert fault and (fault.kind, fault.hosts) == ("hung", ("b",)) and "31.0 s (step 7)" in fault.message
    assert found(**hangs, passes=(1, 2)) is None, "of two passes that take so long"
    assert found(**hangs, waiting=(1, "the sum"), waiting_since=(1, 99.0)) is None, "in it, it waits for others"
    late: dict[str, Any] = {"waiting": (0, "the sum"), "waiting_since": (0, 69.0)}
    fault = found(**late)
    assert fault and (fault.kind, fault.hosts) == ("late", ("b",)) and "rank 1 on b did not come" in fault.message
    ranks = [RankState(i, h, waiting=w, waiting_since=69.0, beats=True) for i, h, w in ((0, "a", "x"), (1, "b", "x"))]
    seen = {"a": HostState("a", 99.0), "b": HostState("b", 99.0)}
    fault = diagnose(100.0, seen, ranks, 10, 30)
    assert fault and fault.kind == "wedged" and set(fault.hosts) == {"a", "b"} and "network" in fault.message
    assert common_wait_seconds(100.0, ranks) == 31.0
    busy = RankState(2, "c", beats=True)
    assert common_wait_seconds(100.0, [*ranks, busy]) == common_wait_seconds(100.0, []) == 0.0
    fault = cut_between(["a", "b"], ["b"], 31.0)
    assert (fault.kind, fault.hosts) == ("wedged", ("b",)) and "b and a do not reach each other" in fault.message
    ranks[1].waiting = "y"
    fault = diagnose(100.0, seen, ranks, 10, 30)
    assert fault and "different things" in fault.message
    assert diagnose(100.0, seen, ranks, 10, 32) is None
    assert [rank.rank for rank in stragglers(100.0, [ranks[0], RankState(1, "b", beats=True)], 20)] == [1]
    assert exit_status(-9) == 137 and exit_status(3) == 3
    started = [
        RankState(-1, "a"),
        RankState(0, "a", status=0, ended_at=89.0),
        RankState(1, "b", status=0, ended_at=80.0),
    ]
    fault = diagnose(100.0, seen, started, 10, 30)
    assert fault and (fault.kind, fault.hosts) == ("hung", ("a",)) and "mpirun on a goes on 11.0 s" in fault.message
    assert diagnose(100.0, seen, started, 12, 30) is None, "it may take a while to end"
    assert diagnose(100.0, seen, [*started, RankState(2, "b")], 10, 30) is None, "a rank lives"
