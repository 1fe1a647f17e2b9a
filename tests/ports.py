"""Ports for tests."""

import contextlib
import random
import socket


def free_port() -> int:
    """A free port, below those that the kernel gives to connections: it stays free."""
    while True:
        port = random.SystemRandom().randint(10_000, 30_000)
        with contextlib.suppress(OSError), socket.create_server(("127.0.0.1", port)):
            return port
