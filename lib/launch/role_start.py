"""The start of machines that people start by hand (./launch --role): each waits until all are there.

The primary listens at --starting-port, where its rank 0 will listen: a firewall that lets ranks through lets this
through. Both ends prove that they have the same key file; all derive the run's key from it and a number of the primary.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import secrets
import threading
import time
from collections.abc import Callable
from pathlib import Path

from lib.distributed.connection import Channel, Listener, connect
from lib.errors import Stopped, UserError
from lib.launch import hostfile
from lib.launch.hostfile import Host
from lib.launch.job import Job
from lib.system import key_file

CLOSE_SECONDS = 2.0  # for secondaries to close first: the port is then free for rank 0 at once


def wait_for_others(job: Job, here: Host, path: Path, note: Callable[[str], None]) -> bytes:
    """The run's key, when people have started all machines; path: of the key by which machines know each other.

    Raises Stopped: a machine did not come within the job's wedged_seconds. UserError: keys or hosts differ.
    """
    names, path, is_primary = [host.name for host in job.hosts], path.expanduser(), here == job.hosts[0]
    if is_primary and key_file.make(path):
        note(f"made {path}: copy it to the other machines, e.g. scp {path} MACHINE:{path}")
    key, other = key_file.read(path), "secondary" if is_primary else "primary"
    others = ", ".join(names[1:] if is_primary else names[:1])
    note(f"waiting for {others}, {job.wedged_seconds:.0f} s at most; type the same there, with --role {other}")
    number = _wait_as_primary(job, names, key) if is_primary else _wait_as_secondary(job, names, here.name, key)
    note("all hosts are there")
    return hmac.new(key, number.encode(), hashlib.sha256).hexdigest().encode()


def _wait_as_primary(job: Job, names: list[str], key: bytes) -> str:
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

    deadline = time.monotonic() + job.wedged_seconds
    with Listener("", job.starting_port, key, accept):
        while missing := ", ".join(name for name in names[1:] if name not in connected):
            if time.monotonic() > deadline:
                raise Stopped(f"{missing} did not come within {job.wedged_seconds:.0f} s (--wedged-seconds)")
            time.sleep(0.1)
        is_complete.set()
        until = time.monotonic() + CLOSE_SECONDS
        while connected and time.monotonic() < until:
            time.sleep(0.05)
    return number


def _wait_as_secondary(job: Job, names: list[str], here: str, key: bytes) -> str:
    message, limit = {}, job.wedged_seconds
    with contextlib.suppress(ConnectionError, EOFError):
        channel = connect(hostfile.address(job.hosts[0]), job.starting_port, key, limit)
        channel.send({"hosts": names, "here": here})
        message = channel.receive(limit) or {}
        channel.close()
    if "error" in message:
        raise UserError(str(message["error"]))
    if "go" not in message:
        why = f"port {job.starting_port} has to be open there"
        raise Stopped(f"{names[0]}, the primary, or another host did not come in {limit:.0f} s, or left; {why}")
    return str(message["go"])
