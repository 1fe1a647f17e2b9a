"""Machines that people start by hand (./launch --role) wait for each other here, and say for whom.

The primary listens at the launch's first port, where its rank 0 will listen: whatever lets ranks through lets this
through. Each secondary says who it is there. Once all are there the primary says go, and each starts its ranks; MLX's
ring would have given up on a machine that comes 20 seconds late.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections.abc import AsyncIterator, Callable, Sequence

from lib.errors import UserError
from lib.launch import hostfile
from lib.launch.hostfile import Host

RETRY_SECONDS = 1.0  # between a secondary's attempts to reach the primary
REMIND_SECONDS = 30.0
CLOSE_SECONDS = 2.0  # for secondaries to close first: the port is then free for rank 0 at once
LINE_BYTES = 2**16


Note = Callable[[str], None]


class Absent(RuntimeError):
    """Somebody did not come in time; the message says who."""


async def gather(
    hosts: Sequence[Host], here: Host, port: int, limit_seconds: float, commands: tuple[str, str], note: Note
) -> None:
    """Waits until all hosts are there; returns on all of them at about the same time.

    Args:
        hosts: of the launch, the primary first.
        here: the one that this machine is.
        port: at which the primary listens.
        limit_seconds: of waiting.
        commands: what one types on the primary, and on a secondary.
        note: prints a line for the person who waits.

    Raises:
        Absent: the limit has passed.
        UserError: the port is taken, or the machines were given different hosts.
    """
    deadline = time.monotonic() + limit_seconds
    if here == hosts[0]:
        await _primary(hosts, port, deadline, commands[1], note)
    else:
        await _secondary(hosts, here, port, deadline, commands[0], note)


async def _primary(hosts: Sequence[Host], port: int, deadline: float, command: str, note: Note) -> None:
    names = [host.name for host in hosts]
    came: dict[str, asyncio.StreamWriter] = {}
    changed = asyncio.Event()

    async def greet(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Keeps a secondary's connection: it is there as long as that is open."""
        words = _read(await reader.readline())
        name = words.get("here")
        if words.get("hosts") != names or name not in names[1:]:
            if words:  # else somebody else's connection
                await _say(writer, error=f"the primary was started with the hosts {', '.join(names)}; give the same")
            writer.close()
            return
        came[name] = writer
        changed.set()
        await reader.read()  # until it closes
        if came.get(name) is writer:
            del came[name]
        writer.close()
        changed.set()

    try:
        server = await asyncio.start_server(greet, None, port, limit=LINE_BYTES, reuse_address=True)
    except OSError as error:
        raise UserError(
            f"port {port} cannot be listened at ({error.strerror}): an earlier launch may live on; "
            f"end it, or give every machine --starting-port {port + 1000}"
        ) from None
    try:
        async for left_seconds in _reminders(deadline, changed):
            missing = [name for name in names[1:] if name not in came]
            if not missing:
                break
            note(f"waiting for {', '.join(missing)}, {left_seconds:.0f} s at most; there: {command}")
        else:
            raise Absent(f"{', '.join(missing)} did not come within the time of --wedged-seconds")
        note("all hosts are there")
        writers = list(came.values())
        await asyncio.gather(*(_say(writer, go=True) for writer in writers))
        until = time.monotonic() + CLOSE_SECONDS
        while came and time.monotonic() < until:
            await asyncio.sleep(0.01)
    finally:
        server.close()
        for writer in came.values():
            writer.close()


async def _secondary(hosts: Sequence[Host], here: Host, port: int, deadline: float, command: str, note: Note) -> None:
    names, reminded = [host.name for host in hosts], -REMIND_SECONDS
    joined = False
    while (now := time.monotonic()) < deadline:
        if now - reminded >= REMIND_SECONDS and not joined:
            note(f"waiting for {names[0]}, the primary, {deadline - now:.0f} s at most; there: {command}")
            reminded = now
        with contextlib.suppress(OSError, TimeoutError):
            address = await asyncio.to_thread(hostfile.address, hosts[0], hosts)
            connecting = asyncio.open_connection(address, port, limit=LINE_BYTES)
            reader, writer = await asyncio.wait_for(connecting, RETRY_SECONDS)
            try:
                await _say(writer, hosts=names, here=here.name)
                if not joined:
                    note(f"{names[0]} is there; it says when all are")
                joined = True
                words = _read(await asyncio.wait_for(reader.readline(), deadline - time.monotonic()))
            finally:
                writer.close()
            if "error" in words:
                raise UserError(str(words["error"]))
            if words.get("go"):
                return
            joined = False  # the primary has ended; it may be started again
        await asyncio.sleep(RETRY_SECONDS)
    who = "the others" if joined else f"{names[0]}, the primary,"
    raise Absent(
        f"{who} did not come within the time of --wedged-seconds; port {port} there has to be open for this machine"
    )


async def _reminders(deadline: float, changed: asyncio.Event) -> AsyncIterator[float]:
    """The seconds that are left: at first, whenever something has changed, and once in a while; ends at the deadline."""
    while (left := deadline - time.monotonic()) > 0:
        changed.clear()
        yield left
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(changed.wait(), min(REMIND_SECONDS, left))


async def _say(writer: asyncio.StreamWriter, **words: object) -> None:
    with contextlib.suppress(OSError):
        writer.write(json.dumps(words).encode() + b"\n")
        await writer.drain()


def _read(line: bytes) -> dict[str, object]:
    """The words of a line; none where it is cut or not ours."""
    try:
        words = json.loads(line)
    except ValueError:
        return {}
    return words if isinstance(words, dict) else {}
