"""The dashboard's threads are bounded, whoever connects and whatever their answers wait for."""

from __future__ import annotations

import itertools
import socket
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from lib.dashboard import bounded_server
from lib.dashboard.bounded_server import BoundedServer

ASKING = b"GET / HTTP/1.0\r\n\r\n"


class Pages:
    """An application whose answers wait, and how many of them are under way."""

    def __init__(self) -> None:
        self.released, self.lock, self.now, self.most = threading.Event(), threading.Lock(), 0, 0

    def __call__(self, environ: Any, start_response: Callable[..., Any]) -> list[bytes]:
        with self.lock:
            self.now += 1
            self.most = max(self.most, self.now)
        self.released.wait(30)
        with self.lock:
            self.now -= 1
        start_response("200 OK", [])
        return [b"a page"]


@pytest.fixture
def pages(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Pages, Callable[..., socket.socket]]]:
    """The application, and what connects to its server from an address, of which there are three at a time."""
    monkeypatch.setattr(bounded_server, "CONNECTIONS", 3)
    monkeypatch.setattr(bounded_server, "PUSHED_OUT_SECONDS", 0.2)
    app = Pages()
    with socket.create_server(("127.0.0.1", 0)) as listener:
        server, ports = BoundedServer("127.0.0.1", 0, app, fd=listener.fileno()), itertools.count(1)

        def connect(address: str, said: bytes = b"") -> socket.socket:
            ours, theirs = socket.socketpair()
            ours.settimeout(30)
            ours.sendall(said)
            server.process_request(theirs, (address, next(ports)))
            return ours

        yield app, connect
        app.released.set()
        server.server_close()


def is_closed(connection: socket.socket) -> bool:
    """Whether the other end hung up; with what it had not read it is a reset."""
    try:
        return connection.recv(1) == b""
    except ConnectionResetError:
        return True


def test_the_oldest_of_the_address_that_has_most_makes_room(pages: Any) -> None:
    app, connect = pages
    alone, first, second, _ = (connect(one) for one in ("10.0.0.2", "2001:db8::1", "2001:db8::2", "10.0.0.3"))
    assert is_closed(first)
    app.released.set()
    for connection in (alone, second):
        connection.sendall(ASKING)
        assert b"200 OK" in connection.recv(100)


def test_answers_whose_askers_were_pushed_out_count_until_they_end(pages: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    app, connect = pages
    asking = [connect("10.0.0.1", ASKING) for _ in range(8)]
    assert app.most <= 3 and sum(map(is_closed, asking[:5])) == 5
    monkeypatch.setattr(bounded_server, "PUSHED_OUT_SECONDS", 30.0)
    app.released.set()
    monkeypatch.setattr(bounded_server, "PUSHED_OUT_SECONDS", 30.0)  # a busy machine ends threads late
    assert b"200 OK" in connect("10.0.0.1", ASKING).recv(100)


def test_who_was_answered_makes_no_room_and_a_thread_that_does_not_start_takes_none(
    pages: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    app, connect = pages
    app.released.set()
    monkeypatch.setattr(bounded_server, "PUSHED_OUT_SECONDS", 30.0)

    def no_thread(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", no_thread)
        for _ in range(4):
            with pytest.raises(RuntimeError, match="new thread"):
                connect("10.0.0.1")
    for _ in range(3):
        assert b"200 OK" in connect("10.0.0.1", ASKING).recv(100)
    waiting = [connect("10.0.0.1") for _ in range(4)]
    assert is_closed(waiting[0])
    waiting[3].sendall(ASKING)
    assert b"200 OK" in waiting[3].recv(100)
