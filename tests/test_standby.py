"""Standbys as their agent has them, and ranks whose agent is gone."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from lib.launch.host_ranks import Ranks, open_process, process_state
from lib.launch.remote_process import close_pipes
from lib.launch.standby_process import READY, Standby

from lib.distributed.heartbeat import ADDRESS, FOLDER
from lib.launch import host_ranks
from lib.system import os_commands
from tests.tiny import ROOT

# Slow to get ready; then it becomes what the second line says.
CODE = """
import json, os, sys, time
expected = json.loads(sys.stdin.readline())
time.sleep({seconds})
print("ready", flush=True)
work = json.loads(sys.stdin.readline())
folder = os.path.basename(work["environment"]["TANDEM_AGENT_FOLDER"])
print(expected["command"], expected["local_ranks"], work["command"], folder[:6])
"""


class Messages:
    """What an agent sends."""

    def __init__(self) -> None:
        self.messages: list[dict[str, Any]] = []

    def write(self, line: bytes) -> None:
        self.messages.append(json.loads(line))

    async def drain(self) -> None:
        return


async def played(agent: Messages, command: list[str], standby: Standby | None = None) -> list[dict[str, Any]]:
    """Runs a command as rank 1, by itself or in a standby; returns what its agent has sent when it has ended."""
    ranks = Ranks(agent, os.environ[ADDRESS], False, "here")  # type: ignore[arg-type]
    try:
        await ranks.listen({})
        taken = await standby.taken() if standby is not None else None
        unsaid = READY if standby is not None and not standby.is_ready else b""
        await ranks.start({"rank": 1, "command": command, "environment": {}}, "/", taken, unsaid)
        async with asyncio.timeout(60):
            while not ranks.exits:
                await asyncio.sleep(0.02)
    finally:
        ranks.clear()
        close_pipes(ranks.processes[1])
    return agent.messages


@pytest.fixture(autouse=True)
def address(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(ADDRESS, f"/tmp/tandem-test-{os.getpid()}")


@pytest.mark.parametrize("seconds", [0.0, 1.0], ids=["ready", "half ready"])
def test_a_standby_is_taken_as_far_as_it_is(tmp_path: Path, seconds: float) -> None:
    async def play() -> list[dict[str, Any]]:
        process = await open_process([sys.executable, "-c", CODE.format(seconds=seconds)], {}, str(tmp_path), True)
        standby = Standby(process, ["expected"], 2)
        if not seconds:
            await standby.getting_ready
        said = await played(Messages(), ["python", "train.py"], standby)
        assert standby.is_ready == (not seconds)
        return said

    said = asyncio.run(play())
    assert [one["text"] for one in said if one["kind"] == "output"] == ["['expected'] 2 ['train.py'] tandem"]
    assert [one["status"] for one in said if one["kind"] == "exit"] == [0]


def test_what_an_ended_rank_left_in_its_pipes_is_sent_however_slow_the_connection() -> None:
    class Slow(Messages):
        async def drain(self) -> None:
            await asyncio.sleep(0.8)

    lines = "import os, sys; os.write(1, b''.join(b'%d\\n' % n for n in range(40000)))"  # four pieces
    said = asyncio.run(played(Slow(), [sys.executable, "-c", lines]))
    assert [one["text"] for one in said if one["kind"] == "output"] == [str(number) for number in range(40000)]
    assert said[-1]["kind"] == "exit", "after all of it"


def test_the_last_beat_comes_before_the_exit_that_it_explains(monkeypatch: pytest.MonkeyPatch) -> None:
    take_beats = Ranks._take_beats

    class Late:
        """A connection that a busy agent comes to when it has seen the process end."""

        def __init__(self, reader: asyncio.StreamReader):
            self.reader = reader

        async def readline(self) -> bytes:
            line = await self.reader.readline()
            await asyncio.sleep(0.4 if b"not finite" in line else 0)
            return line

    monkeypatch.setattr(Ranks, "_take_beats", lambda ranks, reader: take_beats(ranks, Late(reader)))  # type: ignore[arg-type]
    beat = {"rank": 1, "waiting": None, "seconds": 0, "passing": None, "passing_seconds": 0, "passes": 1}
    code = f"""
import json, os, socket
agent = socket.socket(socket.AF_UNIX)
agent.connect(os.environ["TANDEM_AGENT_FOLDER"] + "/agent")
agent.sendall(b'{{"kind": "beat"}}\\n')
for why in ["", "not finite"]:
    agent.sendall(json.dumps({{**{beat!r}, "pid": os.getpid(), "diverged": why}}).encode() + b"\\n")
os._exit(1)
"""
    said = asyncio.run(played(Messages(), [sys.executable, "-c", code]))
    assert [one.get("diverged", one["kind"]) for one in said] == ["", "not finite", "exit"]


def test_a_standby_that_is_gone_is_none(tmp_path: Path) -> None:
    async def play() -> None:
        for code in ("print('no')", "input(); raise SystemExit(1)"):
            standby = Standby(await open_process([sys.executable, "-c", code], {}, str(tmp_path), True), [], 1)
            await standby.getting_ready
            assert not standby.is_ready and await standby.taken() is None
            close_pipes(standby.process)

    asyncio.run(play())


@pytest.fixture
def short() -> Iterator[Path]:
    """A folder whose path leaves room for a socket's name: 104 bytes on macOS."""
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        yield Path(folder)


def test_a_rank_ends_when_its_agent_is_gone(short: Path) -> None:
    """Killed without a word, an agent ends nobody. The rank would train on, alone, and keep the run's folder."""
    listen = "import socket, sys, time; s = socket.socket(socket.AF_UNIX); s.bind(sys.argv[1]); s.listen(); "
    agent = subprocess.Popen(
        [sys.executable, "-c", listen + "print(flush=True); c = s.accept()[0]; time.sleep(600)", f"{short}/agent"],
        stdout=subprocess.PIPE,
    )
    assert agent.stdout is not None
    agent.stdout.readline()
    beats = "from lib.distributed import heartbeat; import time; heartbeat.start(0); print(flush=True); time.sleep(600)"
    rank = subprocess.Popen(
        [sys.executable, "-c", beats],
        cwd=ROOT,
        env={**os.environ, ADDRESS: "/nowhere", FOLDER: str(short)},
        stdout=subprocess.PIPE,
    )
    try:
        assert rank.stdout is not None
        rank.stdout.readline()
        time.sleep(0.2)
        assert rank.poll() is None
        agent.send_signal(signal.SIGKILL)
        assert rank.wait(60) == 1
    finally:
        for process in (agent, rank):
            process.kill()
            process.wait()


@pytest.mark.parametrize("is_left", [True, False], ids=["folder left", "no folder"])
def test_a_rank_whose_agent_was_killed_before_its_first_beat_ends(short: Path, is_left: bool) -> None:
    if is_left:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as agent:
            agent.bind(f"{short}/agent")
            agent.listen()
    code = "from lib.distributed import heartbeat; heartbeat.start(0); print('goes on')"
    variables = {**os.environ, ADDRESS: "/nowhere", FOLDER: str(short)}
    rank = subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=variables, capture_output=True, text=True)
    assert (rank.returncode, rank.stdout) == ((1, "") if is_left else (0, "goes on\n")), rank.stderr


def test_a_process_is_gone_only_where_the_kernel_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """A Mac tells the state of a process by `ps`, which may fail or be late where many processes want the cores."""
    monkeypatch.setattr(host_ranks, "Path", lambda path: Path(f"/nowhere{path}"))  # a system without /proc
    said = {"letter": ""}
    monkeypatch.setattr(os_commands, "output", lambda command: said["letter"])
    with subprocess.Popen(["sleep", "100"]) as process:
        assert process_state(process.pid) == "running"
        said["letter"] = "T+\n"
        assert process_state(process.pid) == "stopped"
        process.kill()
    said["letter"] = ""
    assert process_state(process.pid) == "gone"
