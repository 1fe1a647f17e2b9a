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

from lib.distributed.connection import Channel, Listener, connect
from lib.errors import Stopped, UserError

CLOSE_SECONDS = 2.0  # for secondaries to close first: the port is then free for rank 0 at once

Note = Callable[[str], None]  # prints a line for the person who waits


def run_key(key: bytes, number: str) -> bytes:
    """The key of a run, from that of its owner and the primary's number."""
    return hmac.new(key, number.encode(), hashlib.sha256).hexdigest().encode()


def wait_as_primary(names: Sequence[str], port: int, key: bytes, limit_seconds: float, note: Note) -> bytes:
    """Waits for the other machines of the run; returns its key when all are there.

    Args:
        names: of all machines, this one's first.

    Raises Stopped: a machine did not come in time. UserError: the port is taken.
    """
    number, connected, is_complete = secrets.token_hex(16), set[str](), threading.Event()

    def accept(channel: Channel) -> None:
        message = channel.receive(CLOSE_SECONDS) or {}
        name = str(message.get("here"))
        if message.get("hosts") != list(names) or name not in names[1:]:
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

    deadline = time.monotonic() + limit_seconds
    with Listener("", port, key, accept):
        while missing := ", ".join(name for name in names[1:] if name not in connected):
            if time.monotonic() > deadline:
                raise Stopped(f"{missing} did not come within {limit_seconds:.0f} s (--wedged-seconds)")
            time.sleep(0.1)
        note("all hosts are there")
        is_complete.set()
        until = time.monotonic() + CLOSE_SECONDS
        while connected and time.monotonic() < until:
            time.sleep(0.05)
    return run_key(key, number)


def wait_as_secondary(
    names: Sequence[str], here: str, address: str, port: int, key: bytes, limit_seconds: float
) -> bytes:
    """Waits at the primary until all machines are there; returns the run's key.

    Raises Stopped: the primary or another machine did not come in time. UserError: the keys differ, or the machines
    were given different hosts.
    """
    deadline = time.monotonic() + limit_seconds
    while (left := deadline - time.monotonic()) > 0:
        try:
            channel = connect(address, port, key, left)
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
            return run_key(key, str(message["go"]))
    raise Stopped(f"{names[0]}, the primary, or another host did not come in time; port {port} has to be open there")
