"""The rendezvous of machines that people start by hand (./launch --role): each waits until all are there.

The primary listens at --starting-port, where its rank 0 will listen: a firewall that lets ranks through lets this
through. Each secondary connects and sends its name. Once all are there the primary sends `go`, and each starts its
ranks; MLX's ring would have given up on a machine that comes 20 seconds late.
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
    """A machine did not connect in time; the message says which."""


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
    """Listens for the secondaries, and sends `go` when all are connected."""
    connected: dict[str, asyncio.StreamWriter] = {}
    changed = asyncio.Event()

    async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Keeps a secondary's connection: it counts as there while that is open."""
        message = _read(await reader.readline())
        name = message.get("here")
        if message.get("hosts") != names or name not in names[1:]:
            if message:  # else it is no secondary's connection
                await _send(writer, error=f"the primary was started with the hosts {', '.join(names)}; give the same")
            writer.close()
            return
        connected[name] = writer
        changed.set()
        await reader.read()  # until it closes
        if connected.get(name) is writer:
            del connected[name]
        writer.close()
        changed.set()

    try:
        server = await asyncio.start_server(accept, None, port, limit=LINE_BYTES, reuse_address=True)
    except OSError as error:
        raise UserError(
            f"port {port} cannot be listened at ({error.strerror}): an earlier launch may live on; "
            f"end it, or give every machine --starting-port {port + 1000}"
        ) from None
    try:
        async for left_seconds in _reminders(deadline, changed):
            missing = [name for name in names[1:] if name not in connected]
            if not missing:
                break
            note(f"waiting for {', '.join(missing)}, {left_seconds:.0f} s at most; there: {command}")
        else:
            raise Absent(f"{', '.join(missing)} did not come within the time of --wedged-seconds")
        note("all hosts are there")
        writers = list(connected.values())
        await asyncio.gather(*(_send(writer, go=True) for writer in writers))
        until = time.monotonic() + CLOSE_SECONDS
        while connected and time.monotonic() < until:
            await asyncio.sleep(0.01)
    finally:
        server.close()
        for writer in connected.values():
            writer.close()


async def _secondary(hosts: Sequence[Host], here: Host, port: int, deadline: float, command: str, note: Note) -> None:
    """Connects to the primary, again and again until it is there, and waits for `go`."""
    names, reminded = [host.name for host in hosts], -REMIND_SECONDS
    joined = False
    while (now := time.monotonic()) < deadline:
        if now - reminded >= REMIND_SECONDS and not joined:
            note(f"waiting for {names[0]}, the primary, {deadline - now:.0f} s at most; there: {command}")
            reminded = now
        with contextlib.suppress(OSError, TimeoutError):
            address = await asyncio.to_thread(hostfile.address, hosts[0], hosts)
            # Not wait_for: before Python 3.12 it loses a Ctrl-C that comes just when the connection is refused.
            async with asyncio.timeout(RETRY_SECONDS):
                reader, writer = await asyncio.open_connection(address, port, limit=LINE_BYTES)
            try:
                await _send(writer, hosts=names, here=here.name)
                if not joined:
                    note(f"{names[0]} is there; it says when all are")
                joined = True
                async with asyncio.timeout(deadline - time.monotonic()):
                    message = _read(await reader.readline())
            finally:
                writer.close()
            if "error" in message:
                raise UserError(str(message["error"]))
            if message.get("go"):
                return
            joined = False  # the primary has ended; it may be started again
        await asyncio.sleep(RETRY_SECONDS)
    who = "the others" if joined else f"{names[0]}, the primary,"
    raise Absent(
        f"{who} did not come within the time of --wedged-seconds; port {port} there has to be open for this machine"
    )


async def _reminders(deadline: float, changed: asyncio.Event) -> AsyncIterator[float]:
    """The seconds that are left: at first, after every change, and every REMIND_SECONDS; ends at the deadline."""
    while (left := deadline - time.monotonic()) > 0:
        changed.clear()
        yield left
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(min(REMIND_SECONDS, left)):
                await changed.wait()


async def _send(writer: asyncio.StreamWriter, **fields: object) -> None:
    with contextlib.suppress(OSError):
        writer.write(json.dumps(fields).encode() + b"\n")
        await writer.drain()


def _read(line: bytes) -> dict[str, object]:
    """The message of a line; {} where it is cut off or not ours."""
    try:
        message = json.loads(line)
    except ValueError:
        return {}
    return message if isinstance(message, dict) else {}
