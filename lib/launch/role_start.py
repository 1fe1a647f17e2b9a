"""The start of machines that people start by hand (./launch --role): each waits until all are there.

The primary listens at --starting-port, where its rank 0 will listen: a firewall that lets ranks through lets this
through. Both ends prove that they have the same key file; all derive the run's key from it and a number of the primary.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from lib.distributed.connection import Channel, Listener, connect
from lib.errors import Stopped, UserError
from lib.launch import hostfile
from lib.launch.hostfile import Host
from lib.system import key_file

REMIND_SECONDS = 30.0
CLOSE_SECONDS = 2.0  # for secondaries to close first: the port is then free for rank 0 at once


def key_of(path: Path, is_primary: bool, limit_seconds: float, note: Callable[[str], None]) -> bytes:
    """The key that people put on each machine; the primary makes one where there is none, a secondary waits for it.

    Raises:
        UserError: it is no key, or none came in time.
    """
    if is_primary and key_file.make(path):
        note(f"made {path}: copy it to the other machines, e.g. scp {path} MACHINE:{path}")
    deadline = time.monotonic() + limit_seconds
    if not path.expanduser().exists():
        note(f"waiting for {path}, {limit_seconds:.0f} s at most: the primary makes it; copy it here")
    while not path.expanduser().exists() and time.monotonic() < deadline:
        time.sleep(0.5)
    return key_file.read(path)


def gather(
    hosts: Sequence[Host],
    here: Host,
    port: int,
    key: bytes,
    limit_seconds: float,
    commands: tuple[str, str],
    note: Callable[[str], None],
) -> bytes:
    """Waits until all hosts are there; returns the key of this run, the same on all of them.

    Args:
        hosts: of the launch, the primary first.
        here: the one that this machine is.
        commands: what one types on the primary, and on a secondary.
        note: prints a line for the person who waits.

    Raises:
        Stopped: a machine did not come in time.
        UserError: the port is taken, the keys differ, or the machines were given different hosts.
    """
    names = [host.name for host in hosts]
    if here == hosts[0]:
        number = _primary(names, port, key, limit_seconds, commands[1], note)
    else:
        note(f"waiting for {names[0]}, the primary, {limit_seconds:.0f} s at most; there: {commands[0]}")
        number = _secondary(names, here.name, (hostfile.address(hosts[0], hosts), port), key, limit_seconds)
    return hmac.new(key, number.encode(), hashlib.sha256).hexdigest().encode()


def _primary(
    names: Sequence[str], port: int, key: bytes, limit_seconds: float, command: str, note: Callable[[str], None]
) -> str:
    number, connected, is_complete = secrets.token_hex(16), set[str](), threading.Event()

    def accept(channel: Channel) -> None:
        message = channel.receive(CLOSE_SECONDS) or {}
        name = str(message.get("here"))
        if message.get("hosts") != names or name not in names[1:]:
            channel.send({"error": f"the primary was started with the hosts {', '.join(names)}; give the same"})
            return
        connected.add(name)
        try:
            while not is_complete.wait(0.1):
                if channel.receive(0.1) is not None:  # EOFError: it left
                    return
            channel.send({"go": number})
            channel.receive(CLOSE_SECONDS)
        finally:
            connected.discard(name)

    deadline, reminded = time.monotonic() + limit_seconds, 0.0
    try:
        listener = Listener("", port, key, accept)
    except UserError:
        raise UserError(
            f"port {port} is taken: end the earlier launch, or give --starting-port {port + 1000} on all"
        ) from None
    with listener:
        while missing := [name for name in names[1:] if name not in connected]:
            now = time.monotonic()
            if now > deadline:
                raise Stopped(f"{', '.join(missing)} did not come within {limit_seconds:.0f} s (--wedged-seconds)")
            if now - reminded > REMIND_SECONDS:
                reminded = now
                note(f"waiting for {', '.join(missing)}, {deadline - now:.0f} s at most; there: {command}")
            time.sleep(0.1)
        note("all hosts are there")
        is_complete.set()
        until = time.monotonic() + CLOSE_SECONDS
        while connected and time.monotonic() < until:
            time.sleep(0.05)
    return number


def _secondary(names: Sequence[str], here: str, address: tuple[str, int], key: bytes, limit_seconds: float) -> str:
    deadline = time.monotonic() + limit_seconds
    while (left := deadline - time.monotonic()) > 0:
        try:
            channel = connect(*address, key, left)
            try:
                channel.send({"hosts": list(names), "here": here})
                message = channel.receive(max(0.0, deadline - time.monotonic())) or {}
            finally:
                channel.close()
        except (ConnectionError, EOFError):
            time.sleep(0.5)
            continue
        if "error" in message:
            raise UserError(str(message["error"]))
        if "go" in message:
            return str(message["go"])
    port = address[1]
    raise Stopped(f"{names[0]}, the primary, or another host did not come in time; port {port} has to be open there")
