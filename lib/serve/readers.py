"""The processes that read bodies, and whose body is next: small ones never wait for large ones, nobody for one key."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import os
import signal
import subprocess
import sys
from dataclasses import dataclass

from lib.errors import Stopped
from lib.launch.job import ROOT
from lib.serve.event_log import Log
from lib.serve.openai_requests import JSON, BackendRequest, Kind, RequestError
from lib.serve.request_reading import Told

SMALL_BYTES = 16 * 1024  # a body of this size is read in a few milliseconds
READ_SECONDS = 20.0  # what takes longer is not read
START_SECONDS = 120.0
END_SECONDS = 5.0  # of a killed process
REMEMBERED = 4096  # keys


class ReaderLost(Exception):
    """The process ended, or was too slow."""


@dataclass(eq=False)
class _Body:
    number: int
    owner: str
    kind: Kind
    raw: bytes
    answer: asyncio.Future[BackendRequest]


class Reader:
    """One process, that reads one body at a time; of those that wait, the key's that had its turn longest ago."""

    def __init__(self, told: Told, log: Log):
        self.told, self.log = told, log
        self._process: asyncio.subprocess.Process | None = None
        self._waiting: list[_Body] = []
        self._turns: dict[str, int] = {}  # by owner: when it had its last one
        self._numbers = itertools.count(1)
        self._wake = asyncio.Event()

    async def read(self, owner: str, kind: Kind, raw: bytes) -> BackendRequest:
        """As `Readers.read`."""
        one = _Body(next(self._numbers), owner, kind, raw, asyncio.get_running_loop().create_future())
        self._waiting.append(one)
        self._wake.set()
        try:
            return await one.answer
        finally:
            if one in self._waiting:
                self._waiting.remove(one)

    async def run(self) -> None:
        """Reads until it is cancelled."""
        try:
            while True:
                await self._wake.wait()
                self._wake.clear()
                while self._waiting:
                    await self._serve(self._next())
        finally:
            await self._kill()

    def _next(self) -> _Body:
        one = min(self._waiting, key=lambda one: (self._turns.get(one.owner, 0), one.number))
        self._waiting.remove(one)
        self._turns.pop(one.owner, None)
        self._turns[one.owner] = next(self._numbers)
        while len(self._turns) > REMEMBERED:
            del self._turns[next(iter(self._turns))]
        return one

    async def _serve(self, one: _Body) -> None:
        try:
            await self.start()
            async with asyncio.timeout(READ_SECONDS):
                answer = await self._ask(one)
            result: BackendRequest | RequestError = answer
        except RequestError as error:
            result = error
        except TimeoutError:
            result = RequestError(400, f"the body could not be read in {READ_SECONDS:g} s", "too_complex")
            await self._lose(f"a body of {len(one.raw)} bytes took longer than {READ_SECONDS:g} s")
        except (OSError, ReaderLost, Stopped) as error:  # once it could do its work, so what is wrong may pass
            result = RequestError(503, "the body could not be read", "reader_lost", retry_seconds=5)
            await self._lose(str(error))
        if one.answer.done():
            return
        if isinstance(result, RequestError):
            one.answer.set_exception(result)
        else:
            one.answer.set_result(result)

    async def _ask(self, one: _Body) -> BackendRequest:
        assert self._process is not None and self._process.stdin is not None
        self._process.stdin.write(json.dumps({"kind": one.kind, "bytes": len(one.raw)}).encode() + b"\n" + one.raw)
        await self._process.stdin.drain()
        fields, content = await self._answer()
        if "error" in fields:
            raise RequestError(*fields["error"])
        return BackendRequest(kind=one.kind, content=content, model=self.told.limits["model"], **fields)

    async def _answer(self) -> tuple[JSON, bytes]:
        assert self._process is not None and self._process.stdout is not None
        line = await self._process.stdout.readline()
        if not line:
            raise ReaderLost("its process ended")
        fields: JSON = json.loads(line)
        with contextlib.suppress(asyncio.IncompleteReadError):
            return fields, await self._process.stdout.readexactly(fields.pop("bytes"))
        raise ReaderLost("its process ended")

    async def start(self) -> None:
        """Starts the process, where there is none.

        Raises:
            Stopped: it cannot do its work.
        """
        if self._process is not None:
            return
        self._process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "lib.serve.request_reading"),
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,  # Ctrl-C is for the gateway, which finishes what it is doing
        )
        assert self._process.stdin is not None
        self._process.stdin.write(self.told.line())
        try:
            async with asyncio.timeout(START_SECONDS):
                fields, _ = await self._answer()
        except BaseException:  # the server's end among them, which the process would learn from a broken pipe
            await self._kill()
            raise
        if "failed" in fields:
            raise Stopped(fields["failed"])

    async def _lose(self, reason: str) -> None:
        self.log("reader", state="lost", reason=reason)
        await self._kill()

    async def _kill(self) -> None:
        process, self._process = self._process, None
        if process is not None and process.stdin is not None:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL)
            process.stdin.close()
            with contextlib.suppress(TimeoutError):  # a pipe that is open when the event loop ends prints a traceback
                await asyncio.wait_for(process.wait(), END_SECONDS)


class Readers:
    """A process for small bodies, from the start on, and one for large ones, from the first of them on."""

    def __init__(self, told: Told, log: Log):
        self.small, self.large = Reader(told, log), Reader(told, log)

    async def run(self) -> None:
        """Reads until it is cancelled.

        Raises:
            Stopped: a process cannot do its work, from the start on.
        """
        try:
            await self.small.start()
        except (TimeoutError, OSError, ReaderLost) as error:
            raise Stopped(f"the process that reads requests does not start: {error or type(error).__name__}") from None
        running = [asyncio.create_task(reader.run()) for reader in (self.small, self.large)]
        try:
            ended, _ = await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
            for task in ended:
                task.result()
        finally:
            for task in running:
                task.cancel()
            await asyncio.gather(*running, return_exceptions=True)

    async def read(self, owner: str, kind: Kind, raw: bytes) -> BackendRequest:
        """What a backend is asked for by a body.

        Raises:
            RequestError: the body is malformed, or beyond a limit, or took too long to read.
        """
        reader = self.small if len(raw) <= SMALL_BYTES else self.large
        return await reader.read(owner, kind, raw)
