"""The rendezvous of machines that people start by hand (./launch --role): each waits until all are there.

The primary listens at --starting-port, where its rank 0 will listen: a firewall that lets ranks through lets this
through. Each secondary connects, both prove that they have the same key (lib/system/handshake.py), and it sends its
name. Once all are there the primary sends `go`, from which all derive this run's secret, and each starts its ranks.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import secrets
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lib.errors import UserError
from lib.launch import hostfile
from lib.launch.hostfile import Host
from lib.system import handshake, key_file
from lib.system.handshake import NotTrusted, StreamChannel

RETRY_SECONDS = 1.0  # between a secondary's attempts to reach the primary
REMIND_SECONDS = 30.0
CLOSE_SECONDS = 2.0  # for secondaries to close first: the port is then free for rank 0 at once
PURPOSE = "machines that people start by hand"
SAME_KEY = "copy the primary's key file to this machine (scp)"
RUN = "the secret of run "  # and a number that is used once: the ranks' secret is derived from it
KEY_SECONDS = 0.5  # between looks for a key that somebody is to copy here


Note = Callable[[str], None]


class Absent(RuntimeError):
    """A machine did not connect in time; the message says which."""


@dataclass(frozen=True)
class Meeting:
    """Where and how long machines wait for each other, and how they know each other."""

    port: int  # at which the primary listens
    limit_seconds: float
    key: bytes  # that people put on each machine
    key_path: Path  # of it, for messages


def key_of(path: Path, is_primary: bool, limit_seconds: float, note: Note) -> bytes:
    """The key that people put on each machine; the primary makes one where there is none, a secondary waits for it.

    Raises:
        UserError: it is no key, or none came in time.
    """
    if is_primary and key_file.make(path):
        note(f"made {path}: copy it to the other machines, e.g. scp {path} MACHINE:{path}")
    deadline, is_told = time.monotonic() + limit_seconds, False
    while not path.expanduser().exists() and time.monotonic() < deadline:
        if not is_told:
            note(f"waiting for {path}, {limit_seconds:.0f} s at most: the primary makes it; copy it here")
            is_told = True
        time.sleep(KEY_SECONDS)
    return key_file.read(path)


async def gather(hosts: Sequence[Host], here: Host, meeting: Meeting, commands: tuple[str, str], note: Note) -> bytes:
    """Waits until all hosts are there; gives all of them, at about the same time, the secret of this run.

    Args:
        hosts: of the launch, the primary first.
        here: the one that this machine is.
        commands: what one types on the primary, and on a secondary.
        note: prints a line for the person who waits.

    Raises:
        Absent: the limit has passed.
        UserError: the port is taken, or the machines were given different hosts.
    """
    if here == hosts[0]:
        number = await _primary(hosts, meeting, commands[1], note)
    else:
        number = await _secondary(hosts, here, meeting, commands[0], note)
    return handshake.derived(meeting.key, RUN + number)


async def _primary(hosts: Sequence[Host], meeting: Meeting, command: str, note: Note) -> str:
    """Listens for the secondaries, and sends `go` when all are connected."""
    names = [host.name for host in hosts]
    port, deadline, number = meeting.port, time.monotonic() + meeting.limit_seconds, secrets.token_hex(16)
    connected: dict[str, StreamChannel] = {}
    changed = asyncio.Event()

    async def accept(channel: StreamChannel) -> None:
        """Keeps a secondary's connection: it counts as there while that is open."""
        message = await _receive(channel)
        name = message.get("here")
        if message.get("hosts") != names or name not in names[1:]:
            await _send(channel, error=f"the primary was started with the hosts {', '.join(names)}; give the same")
            return
        connected[name] = channel
        changed.set()
        try:
            await channel.reader.read()  # until it closes
        finally:
            if connected.get(name) is channel:
                del connected[name]
            changed.set()

    listener = handshake.StreamListener(meeting.key, PURPOSE, accept)
    try:
        await listener.start(port)
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
        await asyncio.gather(*(_send(channel, go=number) for channel in list(connected.values())))
        until = time.monotonic() + CLOSE_SECONDS
        while connected and time.monotonic() < until:
            await asyncio.sleep(0.01)
        return number
    finally:
        await listener.close()


async def _secondary(hosts: Sequence[Host], here: Host, meeting: Meeting, command: str, note: Note) -> str:
    """Connects to the primary, again and again until it is there, and waits for `go`."""
    names, reminded = [host.name for host in hosts], -REMIND_SECONDS
    port, deadline = meeting.port, time.monotonic() + meeting.limit_seconds
    joined = is_told = False
    while (now := time.monotonic()) < deadline:
        if now - reminded >= REMIND_SECONDS and not joined:
            note(f"waiting for {names[0]}, the primary, {deadline - now:.0f} s at most; there: {command}")
            reminded = now
        with contextlib.suppress(OSError, TimeoutError):
            address = await asyncio.to_thread(hostfile.address, hosts[0], hosts)
            # Not wait_for: before Python 3.12 it loses a Ctrl-C that comes just when the connection is refused.
            async with asyncio.timeout(RETRY_SECONDS):
                reader, writer = await asyncio.open_connection(address, port)
            try:
                channel = await handshake.over_streams(handshake.calling(meeting.key, PURPOSE), reader, writer)
                await _send(channel, hosts=names, here=here.name)
                if not joined:
                    note(f"{names[0]} is there; it says when all are")
                joined = True
                async with asyncio.timeout(deadline - time.monotonic()):
                    message = await _receive(channel)
            except ConnectionError as error:
                joined = False  # the primary has ended; it may be started again
                if isinstance(error, NotTrusted) and not is_told:
                    is_told = True
                    note(f"what listens at {address}:{port} has another key than {meeting.key_path}; {SAME_KEY}")
                raise
            finally:
                writer.close()
            if "error" in message:
                raise UserError(str(message["error"]))
            if isinstance(number := message.get("go"), str):
                return number
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


async def _send(channel: StreamChannel, **fields: object) -> None:
    with contextlib.suppress(OSError):
        await channel.send(json.dumps(fields).encode())


async def _receive(channel: StreamChannel) -> dict[str, Any]:
    message: dict[str, Any] = json.loads(await channel.receive())
    return message
