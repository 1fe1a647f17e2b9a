"""The link between two hosts, measured over TCP: one listens and echoes, the other times messages there and back."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Mapping
from typing import Any, TypedDict

from lib.system import handshake

ROUND_TRIPS = 20
MOST_BYTES = 2**24  # of one message
CONNECT_SECONDS = 3.0
PURPOSE = "the measurement of a link"


class LinkReport(TypedDict, total=False):
    """What was asked of one end of a link: the listener's port, or the link's measurements; or an error."""

    error: str
    port: int
    address: str  # at which the other host was reached
    round_trip_seconds: float  # the median
    bytes_per_second: float


def answer(question: Mapping[str, Any]) -> LinkReport:
    """Listens at the port {"listen": PORT}, or measures the link to {"address": ADDRESS, "port": PORT}.

    Both ends prove themselves by the question's "token", hexadecimal digits.
    """
    try:
        token = bytes.fromhex(question["token"])
        if "listen" in question:
            return {"port": listen(question["listen"], token)}
        return measure(question["address"], question["port"], token)
    except OSError as error:
        return {"error": error.strerror or str(error)}


def listen(port: int, token: bytes) -> int:
    """Listens, and answers every message with as many bytes to who knows the token; returns the port."""
    listener = handshake.Listener(socket.create_server(("", port)), token, PURPOSE)

    def echo(connection: socket.socket) -> None:
        with connection, contextlib.suppress(OSError, ValueError):
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            while (header := _receive(connection, 8)) and int(header) <= MOST_BYTES:
                connection.sendall(_receive(connection, int(header)))

    def accept() -> None:
        while True:
            connection = listener.accept().connection
            threading.Thread(target=echo, args=(connection,), daemon=True).start()

    threading.Thread(target=accept, daemon=True).start()
    return listener.port


def measure(address: str, port: int, token: bytes) -> LinkReport:
    """The link to a listener: the median round trip, and the bytes per second, there and back."""
    with handshake.connect((address, port), token, PURPOSE, CONNECT_SECONDS).connection as connection:
        connection.settimeout(CONNECT_SECONDS)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

        def there_and_back(size: int) -> float:
            began = time.perf_counter()
            connection.sendall(f"{size:8d}".encode() + b"x" * size)
            _receive(connection, size)
            return time.perf_counter() - began

        trips = sorted(there_and_back(8) for _ in range(ROUND_TRIPS))
        size = 2**14
        seconds = there_and_back(size)
        while seconds < 0.1 and size < MOST_BYTES:  # long enough to measure, and never long on a slow link
            size *= 4
            seconds = there_and_back(size)
    return {"round_trip_seconds": trips[len(trips) // 2], "bytes_per_second": 2 * size / seconds}


def _receive(connection: socket.socket, size: int) -> bytes:
    parts, left = [], size
    while left:
        part = connection.recv(min(left, 2**20))
        if not part:
            return b""
        parts.append(part)
        left -= len(part)
    return b"".join(parts)
