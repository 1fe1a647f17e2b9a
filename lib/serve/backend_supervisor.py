"""Supervises a backend: starts it, asks it for a token before it gets requests, watches it, starts it again.

A backend that died, falls silent or fails a request is taken out of the pool at once. It comes back when it answers
again; one of ours that does not is killed and started anew, after a pause that doubles from failure to failure.
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
import json
import os
import secrets
import shlex
import signal
import subprocess
import sys
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx2

from lib.errors import Stopped
from lib.launch import ssh
from lib.launch.hostfile import Host
from lib.launch.job import ROOT
from lib.serve.backend_link import LISTENS, ROOM_PATH, SECRET_HEADER
from lib.serve.backend_pool import Backend, Pool
from lib.serve.event_log import Log

HEALTH_EVERY_SECONDS = 2.0
HEALTH_SECONDS = 10.0
EXIT_SECONDS = 0.1  # between looks whether a backend's process has ended
OUTPUT_SECONDS = 0.5  # until what an ended process has printed is read
STEADY_SECONDS = 60.0  # up for so long, and the failures before are forgotten
LONGEST_PAUSE_SECONDS = 30.0
PROBE = {"prompt": "1", "max_tokens": 1, "temperature": 0.0}


@dataclass(frozen=True)
class Recipe:
    """How a backend of ours is started: the options of lib/serve/backend_process.py, and the host (None: this one)."""

    words: tuple[str, ...]
    host: Host | None = None

    def command(self, control: Path) -> list[str]:
        """The command line; over ssh, with a connection of its own, which `control` names for `forward_command`."""
        words = [sys.executable, "-m", "lib.serve.backend_process", *self.words]
        if self.host is None:
            return words
        *options, end, name = ssh.ssh_command(self.host)
        return [
            *options,
            *("-M", "-S", str(control), "-o", "ControlPersist=no", "-o", "StreamLocalBindUnlink=yes"),
            *(end, name, f"cd {shlex.quote(str(ROOT))} && exec {shlex.join(words)}"),
        ]

    def forward_command(self, control: Path, here: Path, there: str) -> list[str]:
        """The command line that makes a socket here, which leads through that connection to one on the host."""
        assert self.host is not None
        *options, end, name = ssh.ssh_command(self.host)
        return [*options, "-S", str(control), "-O", "forward", "-L", f"{here}:{there}", end, name]


def pause_seconds(failures: int) -> float:
    """How long to wait before the next start, after so many failures in a row."""
    return min(0.5 * 2.0 ** min(failures, 10), LONGEST_PAUSE_SECONDS)


class Process:
    """A backend's process, and the last lines that it printed."""

    def __init__(self, process: asyncio.subprocess.Process):
        self.process = process
        self.last_lines: collections.deque[str] = collections.deque(maxlen=3)
        self.listens_at: asyncio.Future[str] = asyncio.get_running_loop().create_future()  # where it says so
        self.reading = asyncio.create_task(self._read())
        self.ended = asyncio.create_task(self._end())

    @classmethod
    async def start(cls, command: Sequence[str], told: dict[str, str | None]) -> Process:
        """Starts it, and tells it what is for nobody else's eyes, as a line on its standard input."""
        process = await asyncio.create_subprocess_exec(
            *command,
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # Ctrl-C is for the gateway, which lets it finish what it is doing
        )
        assert process.stdin is not None
        process.stdin.write(json.dumps(told).encode() + b"\n")
        return cls(process)

    async def _read(self) -> None:
        assert self.process.stdout is not None
        rest = b""
        while block := await self.process.stdout.read(65536):
            *lines, rest = (rest + block).split(b"\n")
            rest = rest[-65536:]
            for line in (line.decode(errors="replace") for line in lines if line.strip()):
                self.last_lines.append(line[:400])
                _, is_told, path = line.partition(LISTENS)  # behind what a login shell may have left
                if is_told and not self.listens_at.done():
                    self.listens_at.set_result(path)
        if rest.strip():
            self.last_lines.append(rest.decode(errors="replace")[:400])

    async def _end(self) -> None:
        while self.process.returncode is None:  # wait() may last until its children let go of its output, too
            await asyncio.sleep(EXIT_SECONDS)
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(asyncio.shield(self.reading), OUTPUT_SECONDS)

    async def stop(self) -> None:
        """Ends it and what it started (mlx_lm.fuse), whatever they are doing."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid, signal.SIGKILL)
        if self.process.stdin is not None:
            self.process.stdin.close()
        await self.ended
        # A pipe that is open when the event loop ends prints a traceback.
        await asyncio.wait([self.reading], timeout=OUTPUT_SECONDS)
        self.reading.cancel()


class Fault(Exception):
    """Why a backend cannot take requests."""


class Keeper:
    """Supervises one backend; `run()` never returns."""

    def __init__(
        self,
        backend: Backend,
        recipe: Recipe | None,
        pool: Pool,
        client: httpx2.AsyncClient,
        log: Log,
        start_seconds: float,
        stall_seconds: float,
        socket: Path | None = None,
    ):
        """socket: where a backend of ours is reached; None for one that runs already."""
        self.backend, self.recipe, self.pool, self.client, self.log = backend, recipe, pool, client, log
        self.start_seconds, self.stall_seconds, self.socket = start_seconds, stall_seconds, socket
        self.process: Process | None = None
        self.was_ever_up = False

    async def run(self) -> None:
        """Starts, watches and restarts until it is cancelled; then ends what it started.

        Raises:
            Stopped: a backend on this machine never came up, or a command does not start: what was asked for cannot
                work.
        """
        failures = 0
        try:
            while True:
                up_seconds, reason = await self._one_life()
                if self.recipe is not None and self.recipe.host is None and not self.was_ever_up:
                    raise Stopped(f"the backend {self.backend.name} does not start: {reason}")
                failures = 1 if up_seconds >= STEADY_SECONDS else failures + 1
                pause = pause_seconds(failures)
                self.log("backend", backend=self.backend.name, state="dead", reason=reason, restart_seconds=pause)
                await asyncio.sleep(pause)
                self.backend.restarts += 1
        finally:
            self.pool.set_up(self.backend, False)
            await self._stop()

    async def _one_life(self) -> tuple[float, str]:
        """From a start until it has to be started again: the seconds that it was up, and why it is over."""
        clock, up_seconds = self.pool.clock, 0.0
        if self.recipe is not None and (why := await self._start(self.recipe)) is not None:
            return 0.0, why
        fault = await self._fault(self._until_it_answers(), self.start_seconds)
        while fault is None:
            self.was_ever_up = True
            self.pool.set_up(self.backend, True)
            self.log("backend", backend=self.backend.name, state="up", room_tokens=self.backend.room_tokens)
            since = clock()
            reason = await self._fault(self._watch(), None)
            up_seconds += clock() - since
            self.pool.set_up(self.backend, False)
            self.log("backend", backend=self.backend.name, state="down", reason=reason)
            fault = await self._fault(self._until_it_answers(), self.stall_seconds)
        await self._stop()
        return up_seconds, fault

    async def _start(self, recipe: Recipe) -> str | None:
        """Starts a process of ours: None, or why there is none, which may pass: no memory for it, a disk that is away.

        Raises:
            Stopped: it is the first start.
        """
        assert self.socket is not None
        self.backend.secret = secrets.token_hex(16)
        told = {"secret": self.backend.secret, "socket": str(self.socket) if recipe.host is None else None}
        command = recipe.command(self._control)
        try:
            for old in (self.socket, self._control):
                old.unlink(missing_ok=True)
            self.process = await Process.start(command, told)
        except OSError as error:
            why = f"{command[0]} cannot be started: {error.strerror or error}"
            if self.backend.restarts == 0:
                raise Stopped(why) from None
            return why
        return None

    @property
    def _control(self) -> Path:
        """Of ssh's connection to the backend's host."""
        assert self.socket is not None
        return self.socket.with_suffix(".ssh")

    async def _forward(self, recipe: Recipe) -> None:
        """Makes the socket here lead to the one that a backend on another host has made there."""
        assert self.process is not None and self.socket is not None
        there = await asyncio.shield(self.process.listens_at)
        forwarding = await asyncio.create_subprocess_exec(
            *recipe.forward_command(self._control, self.socket, there),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )
        output, _ = await forwarding.communicate()
        if forwarding.returncode:
            raise Fault(f"ssh does not forward a socket: {output.decode(errors='replace').strip()[-200:]}")

    async def _stop(self) -> None:
        if self.process is not None:
            await self.process.stop()
            self.process = None

    async def _fault(self, work: Coroutine[Any, Any, None], seconds: float | None) -> str | None:
        """Does something with the backend while its process lives: None, or why that was not possible."""
        task = asyncio.ensure_future(work)
        try:
            ended = {self.process.ended} if self.process is not None else set()
            await asyncio.wait({task, *ended}, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
            if self.process is not None and self.process.ended.done():
                output = " / ".join(self.process.last_lines) or "no word"
                return f"its process ended with status {self.process.process.returncode}: {output}"
            if not task.done():
                return f"no answer in {seconds:g} seconds"
            task.result()
            return None
        except (Fault, httpx2.HTTPError, OSError) as error:
            return str(error) or type(error).__name__
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    async def _until_it_answers(self) -> None:
        """Returns once it generated a token."""
        if self.recipe is not None and self.recipe.host is not None and self.socket and not self.socket.exists():
            await self._forward(self.recipe)
        headers = {SECRET_HEADER: self.backend.secret}
        while True:
            try:
                # First whether it listens, in time: loading the model may take any.
                await self.client.get(f"{self.backend.url}/health", headers=headers, timeout=HEALTH_SECONDS)
                answer = await self.client.post(
                    f"{self.backend.url}/v1/completions", json=PROBE, headers=headers, timeout=None
                )
            except httpx2.TransportError:
                await asyncio.sleep(0.1 if self.recipe is not None else 1.0)
                continue
            if answer.status_code != 200:
                raise Fault(f"asked for a token, it answers {answer.status_code}: {answer.text[:200]}")
            break
        if self.recipe is not None:
            self.backend.room_tokens = await self._room(headers)

    async def _room(self, headers: dict[str, str]) -> int | None:
        """For how many tokens it has memory, by its own word; None where it says none, as one of an older version."""
        answer = await self.client.get(f"{self.backend.url}{ROOM_PATH}", headers=headers, timeout=HEALTH_SECONDS)
        with contextlib.suppress(ValueError, KeyError, TypeError):
            return int(answer.json()["tokens"])
        return None

    async def _watch(self) -> None:
        """Returns never; raises when a request failed, or its generating thread is dead."""
        headers = {SECRET_HEADER: self.backend.secret}
        while True:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self.backend.failed.wait(), HEALTH_EVERY_SECONDS)
                raise Fault("a request failed on it")
            answer = await self.client.get(f"{self.backend.url}/health", headers=headers, timeout=HEALTH_SECONDS)
            if answer.status_code != 200:
                raise Fault(f"its health is {answer.status_code}")
