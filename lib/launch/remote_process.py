"""A process of ours on a host, directly or over ssh: started, its first answer, and ended with all that it started."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import subprocess
from collections.abc import Sequence

from lib.errors import UserError
from lib.launch import agent_messages, topology
from lib.launch.agent_messages import Message
from lib.launch.job import ROOT


async def start(command: Sequence[str]) -> asyncio.subprocess.Process:
    """Starts a command in a session of its own, with pipes to all that it reads and writes.

    Raises:
        UserError: there is no such program on this machine.
    """
    try:
        return await asyncio.create_subprocess_exec(
            *command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            cwd=ROOT,
            start_new_session=True,  # a Ctrl-C is ours to hand on
            limit=agent_messages.LINE_BYTES,
        )
    except OSError as error:
        remedy = "" if command[0] == "ssh" else "; --python names the interpreter, --directory the project's folder"
        raise UserError(f"{command[0]} does not start on this machine: {error.strerror}{remedy}") from None


async def first_object(stream: asyncio.StreamReader, key: str) -> Message | None:
    """The first JSON object with this key in a stream, or None; what a login shell prints is passed over."""
    async for line in agent_messages.lines(stream):
        _, brace, rest = line.partition(b"{")
        with contextlib.suppress(ValueError, RecursionError):
            message: Message = json.loads(brace + rest)
            if key in message:
                return message
    return None


def kill(process: asyncio.subprocess.Process) -> None:
    """Ends a process that leads a session, and what it started, which would hold its pipes (ssh's ProxyCommand).

    asyncio's own kill() may reap a process that has just ended, and then fail because it is gone.
    """
    if process.returncode is None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)


def close_pipes(process: asyncio.subprocess.Process) -> None:
    """Closes a process's pipes, which would outlast the event loop where a child of it holds them."""
    process._transport.close()  # type: ignore[attr-defined]


async def last_error_line(process: asyncio.subprocess.Process) -> str:
    """Ends a process; returns the last line that it wrote to its standard error."""
    assert process.stderr is not None
    kill(process)
    lines: list[str] = []
    with contextlib.suppress(asyncio.TimeoutError):  # somebody whom it started, in a session of his own, has its pipes
        async with asyncio.timeout(topology.END_SECONDS):
            read = await process.stderr.read()
        lines = read.decode(errors="replace").strip().splitlines()
        async with asyncio.timeout(topology.END_SECONDS):
            await process.wait()
    close_pipes(process)
    return lines[-1] if lines else "no answer"
