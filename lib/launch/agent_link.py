"""The connection to one host's agent, directly or over ssh; it lasts over many starts."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import time
import zlib
from collections.abc import Callable
from typing import Any, cast

from lib.distributed import heartbeat
from lib.launch import agent_messages, remote_process, ssh
from lib.launch.agent_messages import Hello, Message
from lib.launch.hostfile import Host
from lib.launch.job import ROOT, Job
from lib.launch.patience import Punctuality

END_SECONDS = 3.0  # for an agent whose input has ended


class Link:
    """The connection to one host's agent; it lasts over many starts."""

    def __init__(self, host: Host, process: asyncio.subprocess.Process, hello: Hello, is_local: bool):
        self.process, self.is_local = process, is_local
        self.name, self.machine = host.name, hello["host"]  # what we call it, and what it calls itself
        self.identity = hello["identity"]  # of the machine: two may have one name
        self.system = hello["system"]  # Darwin, Linux
        self.closed = False
        self.punctuality = Punctuality(heartbeat.SECONDS, time.monotonic())  # of its messages
        self.on_message: Callable[[str, Message], None] = lambda kind, fields: None
        self.questions: dict[int, asyncio.Future[Any]] = {}
        self.numbers = itertools.count()
        self.tasks = [asyncio.ensure_future(self._read()), asyncio.ensure_future(self._ping())]

    def send(self, kind: str, **fields: Any) -> None:
        """Sends the agent a message, if it is still there."""
        if self.process.stdin is not None and not self.process.stdin.is_closing():
            self.process.stdin.write(agent_messages.encoded(kind, **fields))

    async def ask(self, question: str, limit_seconds: float, **fields: Any) -> Any:
        """The agent's answer.

        Raises:
            ConnectionError: there is none in time, or it is an error.
        """
        number, answer = next(self.numbers), asyncio.get_running_loop().create_future()
        self.questions[number] = answer
        self.send("ask", question=question, number=number, **fields)
        try:
            async with asyncio.timeout(0.0 if self.closed else limit_seconds):
                return await answer
        except TimeoutError:
            raise ConnectionError(f"{self.name}: no answer") from None
        finally:
            self.questions.pop(number, None)

    async def close(self) -> None:
        """Ends the agent, which ends whatever it started."""
        if self.process.stdin is not None:
            self.process.stdin.close()
        try:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(END_SECONDS):
                    await self.process.wait()
        finally:
            self.drop()
        with contextlib.suppress(TimeoutError):  # what was killed is reaped
            async with asyncio.timeout(END_SECONDS):
                await self.process.wait()

    def drop(self) -> None:
        """Closes our end of the connection at once, whoever still holds the other one open."""
        remote_process.kill(self.process)
        for task in self.tasks:
            task.cancel()
        remote_process.close_pipes(self.process)

    async def _read(self) -> None:
        """Receives the agent's messages, to the end; other text that comes through is shown, in bounds."""
        assert self.process.stdout is not None
        texts = agent_messages.ForeignTexts()
        try:
            async for line in agent_messages.lines(self.process.stdout):
                messages, foreign = agent_messages.decoded(line)
                for message in messages:
                    if not self._take(dict(message)):
                        foreign = foreign or json.dumps(message)
                if (text := texts.shown(foreign)) is not None:
                    self.on_message("foreign", {"text": text})
        finally:
            self.closed = True
            for answer in self.questions.values():
                if not answer.done():
                    answer.set_exception(ConnectionError(f"{self.name}: its agent is gone"))
            self.on_message("closed", {})

    def _take(self, message: Message) -> bool:
        """Handles a message; returns whether it was an agent's."""
        try:
            kind = message.pop("kind")
            if kind != "answer":
                self.on_message(kind, message)
            elif (answer := self.questions.get(message["number"])) is not None and not answer.done():
                if "error" in message:
                    answer.set_exception(ConnectionError(f"{self.name}: {message['error']}"))
                else:
                    answer.set_result(message["answer"])
        except (LookupError, TypeError, ValueError, AttributeError, zlib.error):  # it lacks what its kind has
            return False
        return True

    async def _ping(self) -> None:
        """Sends a sign of life: an agent that receives nothing for too long ends its ranks."""
        while not self.closed:
            self.send("ping")
            await asyncio.sleep(agent_messages.PING_SECONDS)


def agent_command(job: Job, host: Host) -> list[str]:
    """The command line that starts a host's agent: directly on this machine, else over ssh."""
    if is_local(job, host):
        return [job.python, "-m", "lib.agent"]
    return ssh.remote_command(job, host, "lib.agent")


def is_local(job: Job, host: Host) -> bool:
    """Whether a host is this machine, and has the project in this very folder."""
    return ssh.is_this_machine(host) and job.directory == str(ROOT)


async def connect(job: Job, host: Host) -> Link:
    """Starts a host's agent.

    Raises:
        ConnectionError: it did not answer; the message is ssh's, in one line.
    """
    # On a thread: the name of a host that is away may take seconds to look up, in which the others are not pinged.
    command, is_here = await asyncio.to_thread(lambda: (agent_command(job, host), is_local(job, host)))
    process = await remote_process.start(command)
    assert process.stdout is not None
    hello = None
    try:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(ssh.CONNECT_SECONDS + 2):
                hello = await remote_process.first_object(process.stdout, "host")
    finally:
        error = await remote_process.last_error_line(process) if hello is None else ""
    if hello is None:
        raise ConnectionError(f"{host.name}: {error}")
    return Link(host, process, cast(Hello, hello), is_here)
