"""The connection to one host's agent, directly or over ssh; it lasts over many starts."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import os
import shlex
import signal
import socket
import subprocess
import zlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from lib.errors import UserError
from lib.launch import agent_messages, hostfile, topology
from lib.launch.hostfile import Host
from lib.launch.ranks import ROOT, Launching
from lib.system import network

PING_SECONDS = 1.0
CONNECT_SECONDS = 10


# ---- A host's agent, at the other end of ssh


class Link:
    """The connection to one host's agent; it lasts over many starts."""

    def __init__(self, host: Host, process: asyncio.subprocess.Process, hello: Mapping[str, Any], is_local: bool):
        self.process, self.is_local = process, is_local
        self.name, self.machine = host.name, str(hello["host"])  # what we call it, and what it calls itself
        self.identity = str(hello["identity"])  # of the machine: two may have one name
        self.system = str(hello["system"])  # Darwin, Linux
        self.closed = False
        self.hear: Callable[[str, dict[str, Any]], None] = lambda kind, words: None
        self.questions: dict[int, asyncio.Future[Any]] = {}
        self.numbers = itertools.count()
        self.tasks = [asyncio.ensure_future(self._read()), asyncio.ensure_future(self._ping())]

    def send(self, kind: str, **fields: Any) -> None:
        if self.process.stdin is not None and not self.process.stdin.is_closing():
            self.process.stdin.write(agent_messages.encoded(kind, **fields))

    async def ask(self, question: str, limit_seconds: float, **fields: Any) -> Any:
        """The agent's answer.

        Raises:
            ConnectionError: there is none, or a refusal.
        """
        number, answer = next(self.numbers), asyncio.get_running_loop().create_future()
        self.questions[number] = answer
        self.send("ask", question=question, number=number, **fields)
        try:
            return await asyncio.wait_for(answer, 0.0 if self.closed else limit_seconds)
        except TimeoutError:
            raise ConnectionError(f"{self.name}: no answer") from None
        finally:
            self.questions.pop(number, None)

    async def close(self) -> None:
        """Ends the agent, which ends whatever it started."""
        if self.process.stdin is not None:
            self.process.stdin.close()
        try:
            await asyncio.wait_for(self.process.wait(), 3)
        except TimeoutError:
            kill(self.process)
            await self.process.wait()
        self.drop()

    def drop(self) -> None:
        """Ends our end of the connection at once, whoever still holds the other one open."""
        kill(self.process)
        for task in self.tasks:
            task.cancel()
        close_pipes(self.process)

    async def _read(self) -> None:
        """Takes in what the agent says, to the end of it; what else comes through is passed on as text, in bounds."""
        assert self.process.stdout is not None
        texts = agent_messages.ForeignTexts()
        try:
            async for line in agent_messages.lines(self.process.stdout):
                messages, foreign = agent_messages.decoded(line)
                for message in messages:
                    if not self._take(dict(message)):
                        foreign = foreign or json.dumps(message)
                if (text := texts.shown(foreign)) is not None:
                    self.hear("foreign", {"text": text})
        finally:
            self.closed = True
            for answer in self.questions.values():
                if not answer.done():
                    answer.set_exception(ConnectionError(f"{self.name}: its agent is gone"))
            self.hear("closed", {})

    def _take(self, message: dict[str, Any]) -> bool:
        """Whether it was a message of an agent's."""
        try:
            kind = message.pop("kind")
            if kind != "answer":
                self.hear(kind, message)
            elif (answer := self.questions.get(message["number"])) is not None and not answer.done():
                if "error" in message:
                    answer.set_exception(ConnectionError(f"{self.name}: {message['error']}"))
                else:
                    answer.set_result(message["answer"])
        except (LookupError, TypeError, ValueError, AttributeError, zlib.error):  # it lacks what its kind has
            return False
        return True

    async def _ping(self) -> None:
        """An agent that hears nothing for too long ends its ranks."""
        while not self.closed:
            self.send("ping")
            await asyncio.sleep(PING_SECONDS)


def agent_words(launching: Launching, host: Host) -> list[str]:
    """The command line that starts a host's agent: directly on this machine, else over ssh."""
    if is_local(launching, host):
        return [launching.python, "-m", "lib.agent"]
    return remote_words(launching, host, "lib.agent")


def is_local(launching: Launching, host: Host) -> bool:
    """Whether a host is this machine, and works in this very folder."""
    return is_this_machine(host) and launching.directory == str(ROOT)


def run_here(launching: Launching, run: str) -> Path:
    """Where this machine keeps a run that the hosts have at `run`: at the same place in the project, or the same path."""
    folder = Path(run)
    inside = folder.is_relative_to(launching.directory)
    return ROOT / folder.relative_to(launching.directory) if inside else folder


def remote_words(launching: Launching, host: Host, module: str) -> list[str]:
    """The command line that runs a module of ours on a host, over ssh."""
    start = shlex.join([launching.python, "-m", module])
    return [*ssh_words(host), f"cd {shlex.quote(launching.directory)} && exec {start}"]


def ssh_words(host: Host) -> list[str]:
    """ssh that never asks, notices a dead host, and takes nothing in the name for an option."""
    options = ["BatchMode=yes", f"ConnectTimeout={CONNECT_SECONDS}", "ServerAliveInterval=5", "ServerAliveCountMax=3"]
    return ["ssh", "-T", *(word for option in options for word in ("-o", option)), "--", host.name]


def rsync_making(folder: str) -> str:
    """rsync's option that makes a folder at the other end first. macOS's rsync has no --mkpath."""
    return f"--rsync-path=mkdir -p {shlex.quote(folder)} && rsync"


def is_this_machine(host: Host) -> bool:
    """Whether a host's name means the machine that this runs on, and no other user there."""
    if "@" in host.name:
        return False
    if host.name in ("localhost", socket.gethostname(), network.own_name()):
        return True
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.bind((hostfile.address(host), 0))  # only an own address can be bound
    except (OSError, UserError):
        return False
    return True


async def connect(launching: Launching, host: Host) -> Link:
    """Starts a host's agent.

    Raises:
        ConnectionError: it did not answer; what ssh said, in one line.
    """
    # On a thread: the name of a host that is away may take seconds to look up, in which the others are not pinged.
    words, is_here = await asyncio.to_thread(lambda: (agent_words(launching, host), is_local(launching, host)))
    process = await asyncio.create_subprocess_exec(
        *words,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        cwd=ROOT,
        start_new_session=True,  # a Ctrl-C is ours to hand on
        limit=agent_messages.LINE_BYTES,
    )
    assert process.stdout is not None and process.stderr is not None
    hello = None
    try:
        with contextlib.suppress(asyncio.TimeoutError):
            hello = await asyncio.wait_for(first_words(process.stdout, "host"), CONNECT_SECONDS + 2)
    finally:
        told = await last_words(process) if hello is None else ""
    if hello is None:
        raise ConnectionError(f"{host.name}: {told}")
    return Link(host, process, hello, is_here)


async def first_words(stream: asyncio.StreamReader, key: str) -> dict[str, Any] | None:
    """The first JSON object with a `key` that a host says, None if it says none; what its login shell prints is passed over."""
    async for line in agent_messages.lines(stream):
        _, brace, rest = line.partition(b"{")
        with contextlib.suppress(ValueError, RecursionError):
            words: dict[str, Any] = json.loads(brace + rest)
            if key in words:
                return words
    return None


def kill(process: asyncio.subprocess.Process) -> None:
    """Ends a process that leads a session of its own, and what it started, which would hold its pipes (ssh's ProxyCommand).

    asyncio's own kill() may reap a process that has just ended, and then wonder where it is.
    """
    if process.returncode is None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)


def close_pipes(process: asyncio.subprocess.Process) -> None:
    """Closes a process's pipes, which else outlast the event loop where a child of it has them: the loop complains."""
    process._transport.close()  # type: ignore[attr-defined]


async def last_words(process: asyncio.subprocess.Process) -> str:
    """Ends a process; returns the last line that it wrote to its standard error."""
    assert process.stderr is not None
    kill(process)
    lines: list[str] = []
    with contextlib.suppress(asyncio.TimeoutError):  # somebody whom it started, in a session of his own, has its pipes
        read = await asyncio.wait_for(process.stderr.read(), topology.END_SECONDS)
        lines = read.decode(errors="replace").strip().splitlines()
        await asyncio.wait_for(process.wait(), topology.END_SECONDS)
    close_pipes(process)
    return lines[-1] if lines else "no answer"
