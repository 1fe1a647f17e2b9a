"""Authenticated TCP connections between the processes of a run: JSON messages, after both ends proved the run's key.

The proof is the HMAC challenge of `multiprocessing.connection`; the key itself never travels. Messages are neither
encrypted nor signed: docs/security.md shows how hosts are joined by a private link.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import socket
import threading
import time
from collections.abc import Callable
from multiprocessing import AuthenticationError
from multiprocessing.connection import Connection, answer_challenge, deliver_challenge
from typing import Any

from lib.errors import UserError

KEY_VARIABLE = "TANDEM_KEY"
PROOF_SECONDS = 5.0
RETRY_SECONDS = 0.2
MOST_MESSAGE_BYTES = 64 * 2**20
# A host that is switched off closes nothing: the system notices after IDLE + COUNT x INTERVAL seconds.
KEEPALIVE = {"TCP_KEEPIDLE": 10, "TCP_KEEPALIVE": 10, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 4}


def new_key() -> bytes:
    """A key for one run: 32 random bytes, as 64 hexadecimal digits."""
    return secrets.token_hex(32).encode()


def run_key() -> bytes | None:
    """The key that the launcher gave this run's processes in TANDEM_KEY; None without a launcher."""
    return os.environ.get(KEY_VARIABLE, "").encode() or None


class Channel:
    """A connection whose ends know the same key. One thread may send while another one receives."""

    def __init__(self, connection: socket.socket):
        connection.settimeout(None)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for option, value in KEEPALIVE.items():
            if hasattr(socket, option):
                connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)
        self._socket = connection
        self._messages = Connection(os.dup(connection.fileno()))
        self._sending = threading.Lock()

    def send(self, message: dict[str, Any]) -> None:
        """Sends a message of at most 64 MiB of JSON. Raises ConnectionError: the peer left. Raises ValueError: the
        message is too large."""
        text = json.dumps(message).encode()
        if len(text) > MOST_MESSAGE_BYTES:
            raise ValueError(f"a message of {len(text):,} bytes is larger than {MOST_MESSAGE_BYTES:,} bytes")
        try:
            with self._sending:
                self._messages.send_bytes(text)
        except OSError as error:
            raise ConnectionError(f"the peer left ({error})") from None

    def receive(self, timeout_seconds: float | None = None) -> dict[str, Any] | None:
        """The next message; None when none came in time. Without a limit it waits until the peer leaves. Raises
        EOFError: the peer left, or sent something else than a message."""
        try:
            if not self._messages.poll(timeout_seconds):
                return None
            return dict(json.loads(self._messages.recv_bytes(MOST_MESSAGE_BYTES)))
        except (OSError, ValueError, TypeError, RecursionError) as error:
            raise EOFError(f"the peer left ({error})") from None

    def close(self) -> None:
        """Ends the connection, also for a thread that receives."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()
        with self._sending:
            self._messages.close()

    def prove(self, key: bytes, challenges_first: bool) -> None:
        """Both ends prove that they know the key; the connection ends after PROOF_SECONDS without a proof. Raises
        AuthenticationError: the other end has another key. Raises OSError, EOFError: it left, or took too long."""
        limit = threading.Timer(PROOF_SECONDS, self._socket.shutdown, [socket.SHUT_RDWR])
        limit.daemon = True
        limit.start()
        try:
            for step in (deliver_challenge, answer_challenge)[:: 1 if challenges_first else -1]:
                step(self._messages, key)
        finally:
            limit.cancel()
            limit.join()


class Listener(contextlib.AbstractContextManager["Listener"]):
    """Calls `on_connection` for each process that proves the key, in a thread of this connection; then closes it."""

    def __init__(self, host: str, port: int, key: bytes, on_connection: Callable[[Channel], None]):
        """Listens at once; port 0 is any free one, host "" every IPv4 address of this machine. Raises UserError: the
        port is taken, or the address is not this machine's."""
        try:
            self._listening = socket.create_server((host, port), backlog=128)
        except OSError as error:
            raise UserError(f"cannot listen at {host or '*'}:{port}: {error.strerror}; give another port") from None
        self._listening.settimeout(RETRY_SECONDS)  # closing a socket wakes no thread that accepts, on macOS
        self.address: tuple[str, int] = self._listening.getsockname()[:2]
        self._key, self._on_connection = key, on_connection
        self._closed = threading.Event()
        self._channels: set[Channel] = set()
        self._thread = threading.Thread(target=self._accept, name="listener", daemon=True)
        self._thread.start()

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Stops listening, and ends all connections."""
        self._closed.set()
        self._thread.join()
        for channel in list(self._channels):
            channel.close()

    def _accept(self) -> None:
        with self._listening:
            while not self._closed.is_set():
                try:
                    connection, _ = self._listening.accept()
                except TimeoutError:
                    continue
                except OSError:  # the caller hung up already, or this process has no free descriptor
                    time.sleep(RETRY_SECONDS)
                    continue
                threading.Thread(target=self._serve, args=(Channel(connection),), name="peer", daemon=True).start()

    def _serve(self, channel: Channel) -> None:
        self._channels.add(channel)
        try:
            with contextlib.suppress(AuthenticationError, OSError, EOFError):
                channel.prove(self._key, challenges_first=True)
                self._on_connection(channel)
        finally:
            self._channels.discard(channel)
            channel.close()


def connect(host: str, port: int, key: bytes, timeout_seconds: float) -> Channel:
    """A channel to a listener; tries again until the limit. Raises UserError: what listens there has another key.
    Raises ConnectionError: nothing listens there, or it did not answer in time."""
    deadline = time.monotonic() + timeout_seconds
    while True:
        try:
            channel = Channel(socket.create_connection((host, port), max(deadline - time.monotonic(), 0.1)))
            try:
                channel.prove(key, challenges_first=False)
            except BaseException:
                channel.close()
                raise
            return channel
        except AuthenticationError:
            why = f"does not have the key of this run ({KEY_VARIABLE}); is it of another run?"
            raise UserError(f"{host}:{port} {why}") from None
        except (OSError, EOFError) as error:
            if time.monotonic() + RETRY_SECONDS >= deadline:
                why = str(error) or "it hung up"
                raise ConnectionError(f"{host}:{port} did not answer within {timeout_seconds:g} s ({why})") from None
            time.sleep(RETRY_SECONDS)
