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
from dataclasses import dataclass
from pathlib import Path

from lib.distributed.connection import Channel, Listener, connect
from lib.errors import Stopped, UserError
from lib.system import key_file

REMIND_SECONDS = 30.0
CLOSE_SECONDS = 2.0  # for secondaries to close first: the port is then free for rank 0 at once

Note = Callable[[str], None]  # prints a line for the person who waits


def key_of(path: Path, is_primary: bool, limit_seconds: float, note: Note) -> bytes:
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


@dataclass(frozen=True)
class Rendezvous:
    """Where machines wait for each other: the names of all, the primary first; its address and port; for how long."""

    names: Sequence[str]
    address: str
    port: int
    key: bytes
    limit_seconds: float

    def wait_for_all(self, here: str, command: str, note: Note) -> bytes:
        """Returns the key of this run, the same on all machines, when all are there.

        Args:
            here: the name of this machine.
            command: what one types on the machines that are waited for.

        Raises:
            Stopped: a machine did not come in time.
            UserError: the port is taken, the keys differ, or the machines were given different hosts.
        """
        if here == self.names[0]:
            number = self._primary(command, note)
        else:
            note(f"waiting for {self.names[0]}, the primary, {self.limit_seconds:.0f} s at most; there: {command}")
            number = self._secondary(here)
        return hmac.new(self.key, number.encode(), hashlib.sha256).hexdigest().encode()

    def _primary(self, command: str, note: Note) -> str:
        number, connected, is_complete = secrets.token_hex(16), set[str](), threading.Event()
        names, others = list(self.names), self.names[1:]

        def accept(channel: Channel) -> None:
            message = channel.receive(CLOSE_SECONDS) or {}
            name = str(message.get("here"))
            if message.get("hosts") != names or name not in others:
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

        deadline, reminded = time.monotonic() + self.limit_seconds, 0.0
        try:
            listener = Listener("", self.port, self.key, accept)
        except UserError:
            other = f"--starting-port {self.port + 1000}"
            raise UserError(f"port {self.port} is taken: end the earlier launch, or give {other} on all") from None
        with listener:
            while missing := ", ".join(name for name in others if name not in connected):
                now = time.monotonic()
                if now > deadline:
                    raise Stopped(f"{missing} did not come within {self.limit_seconds:.0f} s (--wedged-seconds)")
                if now - reminded > REMIND_SECONDS:
                    reminded = now
                    note(f"waiting for {missing}, {deadline - now:.0f} s at most; there: {command}")
                time.sleep(0.1)
            note("all hosts are there")
            is_complete.set()
            until = time.monotonic() + CLOSE_SECONDS
            while connected and time.monotonic() < until:
                time.sleep(0.05)
        return number

    def _secondary(self, here: str) -> str:
        deadline = time.monotonic() + self.limit_seconds
        while (left := deadline - time.monotonic()) > 0:
            try:
                channel = connect(self.address, self.port, self.key, left)
                try:
                    channel.send({"hosts": list(self.names), "here": here})
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
        raise Stopped(
            f"{self.names[0]}, the primary, or another host did not come in time; port {self.port} has to be open there"
        )
