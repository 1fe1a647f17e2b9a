"""The link between two hosts, measured over TCP: one listens and echoes, the other times messages there and back."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Mapping
from typing import Any, TypedDict

ROUND_TRIPS = 20


class LinkReport(TypedDict, total=False):
    """What was asked of one end of a link: the listener's port, or the link's measurements; or an error."""

    error: str
    port: int
    address: str  # at which the other host was reached
    round_trip_seconds: float  # the median
    bytes_per_second: float


def answer(question: Mapping[str, Any]) -> LinkReport:
    """Listens at the port {"listen": PORT}, or measures the link to {"address": ADDRESS, "port": PORT}."""
    try:
        if "listen" in question:
            return {"port": listen(question["listen"])}
        return measure(question["address"], question["port"])
    except OSError as error:
        return {"error": error.strerror or str(error)}


def listen(port: int) -> int:
    """Listens, and answers every message with as many bytes; returns the port."""
    listener = socket.socket()
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    listener.bind(("", port))
    listener.listen()

    def echo(connection: socket.socket) -> None:
        with connection, contextlib.suppress(OSError, ValueError):
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            while header := _receive(connection, 8):
                connection.sendall(_receive(connection, int(header)))

    def accept() -> None:
        while True:
            connection, _ = listener.accept()
            threading.Thread(target=echo, args=(connection,), daemon=True).start()

    threading.Thread(target=accept, daemon=True).start()
    return int(listener.getsockname()[1])


def measure(address: str, port: int) -> LinkReport:
    """The link to a listener: the median round trip, and the bytes per second, there and back."""
    with socket.create_connection((address, port), timeout=3) as connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

        def there_and_back(size: int) -> float:
            began = time.perf_counter()
            connection.sendall(f"{size:8d}".encode() + b"x" * size)
            _receive(connection, size)
            return time.perf_counter() - began

        trips = sorted(there_and_back(8) for _ in range(ROUND_TRIPS))
        size = 2**14
        seconds = there_and_back(size)
        while seconds < 0.1 and size < 2**24:  # long enough to measure, and never long on a slow link
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
