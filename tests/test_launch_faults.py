"""Faults of ranks and hosts under ./launch, over real ssh between hosts in network namespaces."""

import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import sysconfig
import time
from pathlib import Path
from typing import Any

import pytest

from tests import tiny
from tests.cluster import PATH, Host
from tests.tiny import ROOT, wait_for

pytestmark = pytest.mark.long
LIMIT_SECONDS = 120.0
SCRIPT = f"""
import os, sys, time
sys.path.insert(0, {str(ROOT)!r})
from lib.distributed import heartbeat
heartbeat.start(int(os.environ.get("MLX_RANK", os.environ.get("OMPI_COMM_WORLD_RANK", "0"))))
heartbeat.report(run="runs/of-a-test")
print("rank is up", *sys.argv[1:], flush=True)
if "work=hangs" in sys.argv:
    with heartbeat.phase("a step", 3.0):
        time.sleep(600)
elif "work=compiles" in sys.argv:
    with heartbeat.phase("compiling", 180.0):
        time.sleep(8)
else:
    time.sleep(2 if "--resume" in sys.argv and "work=long" not in sys.argv else 600)
"""


@pytest.fixture
def hosts(three_hosts: list[Host]) -> list[Host]:
    return three_hosts[:2]


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "rank_of_a_test.py"
    path.write_text(SCRIPT)
    return path


def launched(hosts: list[Host], script: Path, *options: str, work: str = "") -> subprocess.Popen[Any]:
    """A launch that may restart once, with a rank up on each host; options come after the defaults.

    work: what the ranks do, also after a restart; by default they end soon after a restart.
    """
    names = ",".join(host.name for host in hosts)
    words = ["./launch", "--hosts", names, "--no-preflight", "--max-restarts", "1", "--silent-seconds", "4", *options]
    launch = hosts[0].start([*words, "--", script, *([f"work={work}"] if work else [])], stderr=subprocess.STDOUT)
    wait_for(lambda: all(ranks(host, script) for host in hosts))
    time.sleep(2.0)  # each rank has sent a report
    return launch


def ranks(host: Host, script: Path) -> list[int]:
    return [pid for pid, line in host.processes().items() if re.match(rf"\S*python\S* {script}", line)]


def signal_launcher(host: Host, number: signal.Signals) -> None:
    for pid, line in host.processes().items():
        if re.match(r"\S*python\S* \./launch", line):
            host.signal(pid, number)


@pytest.mark.parametrize("backend", ["ring", "mpi"])
@pytest.mark.parametrize(
    ("number", "fault"),
    [
        (signal.SIGKILL, "died: rank 1 on host-b was ended by SIGKILL"),
        (signal.SIGSTOP, "stopped: rank 1 on host-b sent nothing"),
    ],
)
def test_a_killed_or_stopped_rank_is_named_and_all_start_again(
    hosts: list[Host], script: Path, backend: str, number: signal.Signals, fault: str
) -> None:
    launch = launched(hosts, script, "--backend", backend)
    hosts[1].signal(ranks(hosts[1], script)[0], number)
    output = launch.communicate(timeout=LIMIT_SECONDS)[0]
    assert launch.returncode == 0, output
    assert f"launch: {fault}" in output, output
    assert "on 2 of 2 hosts, going on with runs/of-a-test" in output, output
    assert "[1 host-b] rank is up --resume runs/of-a-test" in output, output
    assert not ranks(hosts[0], script) and not ranks(hosts[1], script)


def test_the_others_go_on_without_a_host_that_is_cut_off(hosts: list[Host], script: Path) -> None:
    launch = launched(hosts, script)
    hosts[1].unplug()
    try:
        output = launch.communicate(timeout=LIMIT_SECONDS)[0]
        assert launch.returncode == 0, output
        assert "on 1 of 2 hosts (without host-b)" in output, output
        assert "rank is up --resume runs/of-a-test plan.shares=null" in output, output
        wait_for(lambda: not ranks(hosts[1], script))  # its launcher is silent
    finally:
        hosts[1].plug_in()


def test_a_verdict_says_how_the_others_go_on_when_a_cable_is_pulled(hosts: list[Host], tmp_path) -> None:
    (tmp_path / "hostfile").write_text("host-a\nhost-b\n")
    trials = f"verdict.Trials(Path({str(tmp_path)!r}), None, Path({str(tmp_path / 'hostfile')!r}))"
    code = f"from pathlib import Path; from lib.launch import verdict; print(verdict.cable({trials}))"
    part = hosts[0].start([sys.executable, "-u", "-c", code])
    try:
        wait_for(lambda: ">>> Pull" in part.stdout.readline())  # type: ignore[union-attr]
        hosts[1].unplug()
        output, errors = part.communicate(timeout=LIMIT_SECONDS)
    finally:
        hosts[1].plug_in()
    assert re.search(r"stopped: rank 1 on host-b .* on 1 of 2 hosts .*; 20 further steps", output), output + errors


def test_a_ring_whose_own_cable_is_out_takes_the_next_address(hosts: list[Host], tmp_path) -> None:
    ends = [["netns", str(host._pid)] for host in hosts]
    subprocess.run(["ip", "link", "add", "cable", *ends[0], "type", "veth", "peer", "cable", *ends[1]], check=True)
    for index, host in enumerate(hosts, 1):
        host.run(["ip", "address", "add", f"10.88.0.{index}/24", "dev", "cable"])
        host.run(["ip", "link", "set", "cable", "up"])
    (tmp_path / "hostfile").write_text("host-a ips=10.88.0.1\nhost-b ips=10.88.0.2\n")
    settings = tiny.settings(tmp_path, train__steps=120, checkpoint__every=10, evaluate__answers="null")
    words = ["./launch", "--hostfile", tmp_path / "hostfile", "--no-preflight", "--max-restarts", "1"]
    words += ["--wedged-seconds", "8", "--", "train.py", *settings, "strategy=synchronous", "run.name=a"]
    launch = hosts[0].start(words, stderr=subprocess.STDOUT)
    wait_for(lambda: any(tmp_path.glob("runs/a/checkpoints/step-*")) or launch.poll() is not None)
    hosts[0].run(["ip", "link", "delete", "cable"])
    output = launch.communicate(timeout=LIMIT_SECONDS)[0]
    assert "launch: no answer at 10.88.0.1, 10.88.0.2: the ring takes the next address" in output, output
    assert launch.returncode == 0 and "on 2 of 2 hosts, going on with" in output, output


def test_a_host_that_is_back_joins_at_the_next_start(hosts: list[Host], script: Path) -> None:
    launch = launched(hosts, script, "--max-restarts", "2", work="long")
    before = ranks(hosts[0], script)
    hosts[1].unplug()
    try:
        wait_for(lambda: ranks(hosts[0], script) not in ([], before))
    finally:
        hosts[1].plug_in()
    wait_for(lambda: not ranks(hosts[1], script))
    hosts[0].signal(ranks(hosts[0], script)[0], signal.SIGKILL)
    wait_for(lambda: bool(ranks(hosts[0], script) and ranks(hosts[1], script)))
    signal_launcher(hosts[0], signal.SIGINT)
    output = launch.communicate(timeout=LIMIT_SECONDS)[0]
    starts = re.findall(r"launch: start (\d), .* on (\d) of 2 hosts", output)
    assert starts == [("2", "1"), ("3", "2")], output


def test_a_rank_that_hangs_is_named_and_one_that_compiles_is_left(hosts: list[Host], script: Path) -> None:
    hangs = launched(hosts, script, "--max-restarts", "0", work="hangs")
    output = hangs.communicate(timeout=LIMIT_SECONDS)[0]
    assert hangs.returncode == 1 and "hangs in a step for" in output, output
    typed = re.escape("go on with: ./launch --hosts host-a,host-b --no-preflight")
    assert re.search(rf"{typed} .* --resume runs/of-a-test", output), output
    compiles = launched(hosts, script, work="compiles")  # for longer than --silent-seconds
    output = compiles.communicate(timeout=LIMIT_SECONDS)[0]
    assert compiles.returncode == 0 and "launch:" not in output, output


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT])
def test_no_rank_outlives_its_launcher(hosts: list[Host], script: Path, number: signal.Signals) -> None:
    launch = launched(hosts, script)
    signal_launcher(hosts[0], number)
    wait_for(lambda: not ranks(hosts[0], script) and not ranks(hosts[1], script))
    launch.communicate(timeout=LIMIT_SECONDS)
    assert launch.returncode in (128 + number, -number)


# A person on a host: a user with a home there, and a key that opens the other hosts. What root keeps in its home, as pyenv's
# Pythons, others may read on this host alone.
PERSON = """
set -e
chmod 755 "$4"
mkdir -p /run/upper /run/work
mount -t overlay overlay -o lowerdir=/root,upperdir=/run/upper,workdir=/run/work /root
chmod 755 /root
{ cat /etc/passwd; echo "$1:*:$2:$2::$3:/bin/sh"; } > /run/passwd
mount --bind /run/passwd /etc/passwd
mkdir -p "$3/.ssh"
cp "$4/key" "$3/.ssh/id_ed25519"
echo "IdentityFile ~/.ssh/id_ed25519" > "$3/.ssh/config"
"$5" -m venv --without-pip "$3/python"
echo "$6" > "$(echo "$3"/python/lib/python*/site-packages)/of_the_tests.pth"
"""


def person(host: Host, name: str, number: int, home: str) -> Path:
    """The home, as this process sees it, of a user who owns all that is in it once `owned` was called."""
    base = Path(sys.base_prefix, "bin", f"python3.{sys.version_info.minor}")
    words = [name, number, host.disk / home, host.outside.parent, base, sysconfig.get_path("purelib")]
    done = host.run(["sh", "-c", PERSON, "-", *map(str, words)])
    if "overlay" in done.stderr:
        pytest.skip(done.stderr)
    assert done.returncode == 0, done.stderr
    return host.outside / home


def test_hosts_of_other_users_folders_and_pythons_train_resume_and_export(hosts: list[Host]) -> None:
    disk, known = hosts[0].disk, hosts[0].outside.parent / "known_hosts"
    known.write_text(known.read_text() + f"[host-b]:2222 {(known.with_name('host_key.pub')).read_text()}")
    sshd = [shutil.which("sshd", path=PATH) or "sshd", "-D", "-p", "2222", "-o", "PidFile=none"]
    daemon = hosts[1].start([*sshd, "-f", str(known.with_name("sshd_config"))])
    ada, bea = person(hosts[0], "ada", 2001, "home/ada"), person(hosts[1], "bea", 2002, "Users/bea")
    ignored = shutil.ignore_patterns(".git", ".venv", "runs", "build", "__pycache__", ".*_cache")
    shutil.copytree(ROOT, ada / "tandem", ignore=ignored)
    (ada / "tandem/.venv").symlink_to("../python")
    settings = tiny.settings(ada / "sets", train__steps=30, checkpoint__every=4, evaluate__answers="null")
    settings += [f"model.path={tiny.stored_model(ada / 'sets')}", "model.random_init=false"]
    settings = [word.replace(str(hosts[0].outside), str(disk)) for word in settings if "dir=" not in word]
    (bea / "tandem/lib").mkdir(parents=True)
    (bea / "tandem/lib/of_yesterday.py").touch()
    python = os.environ.get("OTHER_PYTHON", f"{disk}/Users/bea/python/bin/python")  # e.g. of a venv of Python 3.13
    differs = f"user=bea port=2222 directory={disk}/Users/bea/tandem python={python} env=OMP_NUM_THREADS=1"
    maps = f"map={disk}/home/ada/sets/stored:{disk}/Users/bea/llm map={disk}/home/ada/sets:{disk}/Users/bea/data"
    (ada / "tandem/hostfile").write_text(f"host-a\nhost-b {differs} {maps}\n")
    for host, home, number in zip(hosts, (ada, bea), (2001, 2002), strict=True):
        host.run(["chown", "-R", f"{number}:{number}", host.disk / home.relative_to(host.outside)])

    def launched_by_ada(*words: str) -> subprocess.Popen[Any]:
        there = f"cd tandem && exec .venv/bin/python -X dev launch --hostfile hostfile {shlex.join(words)}"
        return hosts[0].start(["ssh", "ada@host-a", there], stderr=subprocess.STDOUT)

    copied = ["--sync", ".", "--sync", f"{disk}/home/ada/sets/stored", "--sync", f"{disk}/home/ada/sets"]
    config = ["--", "train.py", "--config", "configs/quickstart.yaml", *settings, "strategy=synchronous", "run.name=a"]
    launch = launched_by_ada(*copied, "--max-restarts", "0", *config)
    run = bea / "tandem/runs/a"
    wait_for(lambda: bool(list(run.glob("checkpoints/step-*8"))) or launch.poll() is not None)
    trains = [pid for pid, line in hosts[1].processes().items() if line.startswith(f"{python} train.py")]
    for pid in trains:
        hosts[1].signal(pid, signal.SIGKILL)
    output = launch.communicate(timeout=LIMIT_SECONDS)[0]
    assert "launch: died: rank 1 on bea@host-b was ended by SIGKILL" in output and trains, output
    link = r"links +(ok|note) +host-a: to bea@host-b: ring over 10.77.0.1 and 10.77.0.2: [\d.]+ MB/s, [\d.]+ ms"
    assert re.search(link, output), output
    assert f"{disk}/Users/bea/llm" in (run / "config.yaml").read_text(), "its model, at its place"
    assert not (bea / "tandem/lib/of_yesterday.py").exists() and (bea / "data/train.jsonl").stat().st_uid == 2002
    resumed = launched_by_ada("--", "train.py", "--resume", "runs/a")
    output = resumed.communicate(timeout=LIMIT_SECONDS)[0]
    daemon.terminate()
    assert resumed.returncode == 0 and "BrokenPipe" not in output, output
    assert [step["step"] for step in tiny.steps_of(ada / "tandem/runs/a")] == list(range(1, 31)), "each step once"
    exported = hosts[0].run(["ssh", "ada@host-a", "cd tandem && .venv/bin/python -m lib.export runs/a --to mlx"])
    assert exported.returncode == 0 and (ada / "tandem/runs/a/export/mlx/adapters.safetensors").exists(), exported


def test_machines_that_are_started_by_hand_wait_for_each_other(hosts: list[Host], script: Path) -> None:
    key = hosts[0].disk / "key"
    words = ["./launch", "--hosts", "host-a,host-b", "--key", str(key), "--wedged-seconds", "60", "--role"]
    command = ["--", script, "--resume", "runs/of-a-test"]
    primary = hosts[0].start([*words, "primary", *command], stderr=subprocess.STDOUT)
    wait_for((hosts[0].outside / "key").exists)
    (hosts[1].outside / "key").touch(mode=0o600)
    (hosts[1].outside / "key").write_bytes((hosts[0].outside / "key").read_bytes())
    secondary = hosts[1].start([*words, "secondary", *command], stderr=subprocess.STDOUT)
    for process, tag in ((primary, "[0 host-a]"), (secondary, "[1 host-b]")):
        output = process.communicate(timeout=LIMIT_SECONDS)[0]
        assert process.returncode == 0 and f"{tag} rank is up" in output, output
