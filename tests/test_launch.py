"""./launch: what it reads, what it starts, how a rank's end shows, and going on after a fault. Ranks here are real ones."""

import dataclasses
import json
import os
import socket
import subprocess
import time

import pytest

from lib.errors import UserError
from lib.launch import command, hostfile, launcher, rank_commands, ssh
from tests import tiny
from tests.cluster import Host
from tests.tiny import ROOT


def launch(*words: str, timeout: float = 300) -> subprocess.CompletedProcess[str]:
    return subprocess.run(["./launch", *words], cwd=ROOT, capture_output=True, text=True, timeout=timeout)


def test_words_before_the_script_are_the_launchers() -> None:
    for words in ("--hosts a,b train.py --dry-run", "--hosts a,b -- train.py --dry-run"):
        assert command.parse(words.split()).command == ["train.py", "--dry-run"]


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--hosts", "a", "--hostfile", "b"], "give --hostfile FILE or --hosts A,B"),
        (["--hosts", "a", "--starting-port", "80"], "--starting-port 80 is not in 1024 to 65000"),
        (["--hosts", "a", "--role", "primary", "--max-restarts", "1"], "--max-restarts needs ssh"),
        (["--hosts", "a", "--max-restarts", "-1"], "--max-restarts -1 is below 0"),
        (["--hosts", "a", "--silent-seconds", "0"], "--silent-seconds 0 is not above 0"),
        (["--hosts", "a", "--wedged-seconds", "nan"], "--wedged-seconds nan is not above 0"),
        (["--hosts", "a", "word"], "the command comes after --"),
    ],
)
def test_wrong_words_are_named(words: list[str], says: str) -> None:
    with pytest.raises(UserError, match=says):
        command.parse(words)


def test_a_ring_has_an_address_for_every_rank() -> None:
    ring = rank_commands.Job(hostfile.from_words("10.0.0.1:2,10.0.0.2:1").hosts, "ring", ("train.py",))
    commands = rank_commands.rank_commands(ring)
    assert [one.environment["MLX_RANK"] for one in commands] == ["0", "1", "2"]
    assert json.loads(commands[0].files["hosts.json"]) == [["10.0.0.1:32323"], ["10.0.0.1:32324"], ["10.0.0.2:32325"]]
    assert rank_commands.ports_of(ring) == {"10.0.0.1": [32323, 32324], "10.0.0.2": [32325]}
    unequal = hostfile.parse("10.0.0.1\nb ips=10.0.0.2 ips=10.1.0.2", "f").hosts  # MLX wants as many of each
    one, _ = rank_commands.rank_commands(dataclasses.replace(ring, hosts=unequal))
    assert json.loads(one.files["hosts.json"]) == [["10.0.0.1:32323"], ["10.0.0.2:32324"]]


def test_a_resumed_run_keeps_its_settings_and_plans_again_for_another_world() -> None:
    typed = ("train.py", "--config", "x.yaml", "train.beta=0.2", "run.name=a", "plan.shares=[1,2]")
    common = ("train.py", "--resume", "runs/a", "train.beta=0.2")
    assert rank_commands.resume_command(typed, "runs/a", same_world=True) == (*common, "plan.shares=[1,2]")
    anew = (*common, "plan.shares=null", "plan.micro_batch_sizes=null")
    assert rank_commands.resume_command(typed, "runs/a", same_world=False) == anew


def test_a_path_in_the_home_is_copied_to_the_other_hosts_home(tmp_path, monkeypatch) -> None:
    here, there = tmp_path / "ada", tmp_path / "bea"
    for home in (here, there):
        (home / "data").mkdir(parents=True)
    (here / "data/new.txt").write_text("of ada")
    os.utime(here / "data/new.txt", (1e9, 1e9))
    (there / "data/own.txt").write_text("of bea")
    monkeypatch.setenv("HOME", str(here))
    monkeypatch.setattr(ssh, "ssh_command", lambda _: ["env", f"HOME={there}", "sh", "-c"])
    began = time.time()
    ssh.copy_to_hosts(rank_commands.Job(hostfile.from_words("mac-b").hosts, "ring", ("train.py",)), ["~/data"])
    assert (there / "data/new.txt").read_text() == "of ada" and (there / "data/own.txt").exists()
    assert (there / "data/new.txt").stat().st_mtime >= began - 1, "by the clock of the host that receives it"


# Runs train.py; under jaccl it imitates it over MLX's ring, until step 20 is saved, when RDMA crashes.
IMITATION = f"""
import json, os, runpy, sys, threading, time
from pathlib import Path
sys.path.insert(0, {str(ROOT)!r})
if os.environ.pop("MLX_IBV_DEVICES", None):
    port = int(os.environ.pop("MLX_JACCL_COORDINATOR").rpartition(":")[2]) + 10
    file = Path(sys.argv[0]).with_name(f"ring-{{os.environ['MLX_RANK']}}.json")
    file.write_text(json.dumps([[f"127.0.0.1:{{port + rank}}"] for rank in range(2)]))
    os.environ["MLX_HOSTFILE"] = str(file)
    run = next(Path(word[8:]) for word in sys.argv if word.startswith("run.dir=")) / "rdma"
    def die():
        while not list(run.glob("checkpoints/step-*20")): time.sleep(0.01)
        os.abort()
    threading.Thread(target=die, daemon=True).start()
sys.argv[0] = {str(ROOT / "train.py")!r}
runpy.run_path(sys.argv[0], run_name="__main__")
"""


@pytest.mark.long
def test_rdma_that_is_not_there_or_dies_ends_on_ring_with_the_same_weights(tmp_path) -> None:
    own = {"ssh": "localhost", "ips": ["127.0.0.1"], "rdma": [None, "rdma_en5"]}
    other = {"ssh": socket.gethostname(), "ips": ["127.0.0.1"], "rdma": ["rdma_en5", None]}
    (tmp_path / "hosts.json").write_text(json.dumps([own, other]))
    (tmp_path / "train.py").write_text(IMITATION)
    settings = [*tiny.settings(tmp_path), "train.steps=24", "checkpoint.every=4", "strategy=synchronous"]
    settings += ["--config", str(tiny.config_file(tmp_path))]
    words = ["--hostfile", str(tmp_path / "hosts.json"), "--no-preflight", "--backend"]
    port, script = ["--starting-port", "32523"], str(tmp_path / "train.py")
    assert launch(*words, "ring", *port, "--", "train.py", *settings, "run.name=whole").returncode == 0
    for name, program in (("missing", "train.py"), ("rdma", script)):
        done = launch(*words, "jaccl", *port, "--", program, *settings, f"run.name={name}")
        assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
        assert done.stderr.count("launch: jaccl failed: this run goes on over ring") == 1, done.stderr
        assert ("does not come up" in done.stderr) == (name == "missing") and "Traceback" not in done.stderr
        assert tiny.difference(tmp_path / "runs/whole", tmp_path / "runs" / name) == 0.0


def test_a_port_whose_packets_are_dropped_is_told_from_an_address_that_is_lost(monkeypatch) -> None:
    monkeypatch.setattr(launcher, "is_local", lambda *_: True)
    with socket.create_server(("127.0.0.1", 0), backlog=0) as full, socket.create_server(("127.0.0.1", 0)) as sshd:
        waiting, port = (
            [socket.create_connection(full.getsockname(), 1)],
            full.getsockname()[1],
        )  # Linux drops what follows
        host = hostfile.Host("a", addresses=("127.0.0.1",), port=sshd.getsockname()[1])
        ring = rank_commands.Job((host,), "ring", ("train.py",), starting_port=port)
        assert f"a firewall drops what comes to port {port} of 127.0.0.1" in launcher.dropped_text(ring)
    assert waiting and not launcher.dropped_text(ring), "a port that refuses is there"


def test_ranks_find_each_other_and_a_failed_ranks_status_is_the_launchers(tmp_path) -> None:
    script = tmp_path / "rank.py"
    script.write_text(
        "import sys, time, mlx.core as mx\nworld = mx.distributed.init()\n"
        "print('size', world.size(), world.rank(), flush=True)\ntime.sleep(300 * (world.rank() == 0)) or sys.exit(7)\n"
    )
    done = launch("--hosts", "localhost:2", "--no-preflight", "--max-restarts", "0", "--", str(script))
    assert done.returncode == 7, "and rank 0, which would have slept for five minutes, was ended"
    assert "size 2 0" in done.stdout and "size 2 1" in done.stdout, "each rank's line, by the ring's numbers"


@pytest.mark.long
def test_a_killed_rank_goes_on_from_the_newest_checkpoint(tmp_path) -> None:
    run, killer = tmp_path / "run", tmp_path / "train.py"
    killer.write_text(
        f"import os, runpy, signal, sys, threading, time\nfrom pathlib import Path\nsys.path.insert(0, {str(ROOT)!r})\n"
        f"def kill():\n    while not list(Path({str(run)!r}).glob('checkpoints/step-*4')): time.sleep(0.01)\n"
        "    os.kill(os.getpid(), signal.SIGKILL)\n"
        "if '--resume' not in sys.argv and os.environ['MLX_RANK'] == '1':\n"
        "    threading.Thread(target=kill, daemon=True).start()\n"
        f"sys.argv[0] = {str(ROOT / 'train.py')!r}\nrunpy.run_path(sys.argv[0], run_name='__main__')\n"
    )
    settings = [f"run.dir={tmp_path}", "run.name=run", "train.steps=30", "checkpoint.every=4", "strategy=synchronous"]
    done = launch("--hosts", "localhost:2", "--no-preflight", "--max-restarts", "1", "--", str(killer), *settings)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert "launch: died: rank 1 on localhost was ended by SIGKILL" in done.stderr, done.stderr[-3000:]
    assert [row["step"] for row in tiny.steps_of(run)] == list(range(1, 31)), "each step, and so each row, exactly once"
    starts = tiny.records(run, "start")
    assert len(starts) == 2 and starts[1]["time"] > starts[0]["time"]


def test_hosts_are_checked_and_train_together(three_hosts: list[Host]) -> None:
    names = ",".join(host.name for host in three_hosts[:2])
    words = ["./launch", "--hosts", names, "--preflight-only", "--json", "--"]
    done = three_hosts[0].run([*words, "train.py"])
    assert json.loads(done.stdout), done.stderr
