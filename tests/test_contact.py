"""What a host's system knows of another one: whether packets come from there, and whether it answers a call."""

from __future__ import annotations

import contextlib
import errno
import socket
import time
from collections.abc import Iterator

import pytest

from lib.distributed import heartbeat
from lib.system import network

needs_tcp_info = pytest.mark.skipif(not hasattr(socket, "TCP_INFO"), reason="only Linux says when something came")


@pytest.fixture
def pair() -> Iterator[tuple[socket.socket, socket.socket]]:
    with (
        socket.create_server(("127.0.0.1", 0)) as listener,
        socket.create_connection(listener.getsockname()) as one,
        listener.accept()[0] as other,
    ):
        yield one, other


@contextlib.contextmanager
def answering_nobody() -> Iterator[tuple[str, int]]:
    """An address where calls are passed over, as by a firewall or a cable that is out: its queue is full."""
    with socket.socket() as listener, contextlib.ExitStack() as stack:
        listener.bind(("127.0.0.1", 0))
        listener.listen(0)
        for _ in range(3):
            caller = stack.enter_context(socket.socket())
            caller.setblocking(False)
            caller.connect_ex(listener.getsockname())
        time.sleep(0.05)
        yield listener.getsockname()


def refusing() -> tuple[str, int]:
    """An address where nobody listens: its system says so."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        address: tuple[str, int] = listener.getsockname()
    return address


def test_a_system_answers_whether_or_not_anybody_listens() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener, answering_nobody() as silent:
        there, refused = listener.getsockname(), refusing()
        began = time.monotonic()
        assert network.answering([silent, there, refused], 0.3) == {there, refused}
        assert time.monotonic() - began >= 0.3, "the third was given its time"
        assert network.answering([silent], 0.0) == set() == network.answering([], 0.3)


def test_an_answer_that_comes_late_counts_once_it_is_there() -> None:
    """Over a link that has become slow: until its queue has room, a listener answers nobody."""
    with socket.socket() as listener, contextlib.closing(network.Calls()) as calls, contextlib.ExitStack() as stack:
        listener.bind(("127.0.0.1", 0))
        listener.listen(0)
        address = listener.getsockname()
        for _ in range(3):
            caller = stack.enter_context(socket.socket())
            caller.setblocking(False)
            caller.connect_ex(address)
        time.sleep(0.05)
        assert calls.answered([address], 0.1, 60.0) == set() == calls.answered([address], 0.1, 60.0)
        assert len(calls._open) == 2
        listener.settimeout(10)
        for _ in range(3):
            stack.enter_context(listener.accept()[0])
        deadline, heard = time.monotonic() + 20, set[object]()
        while not heard and time.monotonic() < deadline:  # the system asks again after a second
            heard = {*calls.answered([address], 0.3, 60.0)}
        assert heard == {address} and not calls._open
        with answering_nobody() as silent:
            assert calls.answered([silent], 0.1, 60.0) == set() and len(calls._open) == 1
            assert calls.answered([silent], 0.1, 0.0) == set() and len(calls._open) == 1, "the old one is given up"
            assert calls.answered([], 0.1, 60.0) == set() and not calls._open, "nobody asks any more"


@pytest.mark.parametrize("error", [errno.ENETUNREACH, errno.EADDRNOTAVAIL])
def test_a_call_that_this_system_cannot_make_is_not_answered(error: int, monkeypatch: pytest.MonkeyPatch) -> None:
    class Unreachable(socket.socket):
        def connect_ex(self, address: object) -> int:
            return error

    monkeypatch.setattr(socket, "socket", Unreachable)
    assert network.answering([("192.0.2.1", 9)], 0.1) == set()


@needs_tcp_info
def test_contact_is_the_last_packet_over_all_connections(pair: tuple[socket.socket, socket.socket]) -> None:
    one, other = pair
    with socket.create_server(("127.0.0.1", 0)) as listener, socket.create_connection(listener.getsockname()) as idle:
        time.sleep(0.2)
        before = network.contact([one, idle])
        other.sendall(b"x")
        one.recv(1)
        after, of_the_idle = network.contact([idle, one]), network.contact([idle])
    assert before and after and of_the_idle
    assert after.silent_seconds < before.silent_seconds <= of_the_idle.silent_seconds
    assert of_the_idle.silent_seconds >= 0.2 and 0 < after.round_trip_seconds < 10


def test_nothing_is_known_of_closed_connections_or_where_the_system_does_not_say(
    pair: tuple[socket.socket, socket.socket], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert network.contact([]) is None
    closed = pair[0].dup()
    closed.close()
    assert network.contact([closed]) is None
    monkeypatch.delattr(socket, "TCP_INFO", raising=False)  # macOS
    assert network.contact([pair[0]]) is None


@needs_tcp_info
def test_a_beat_tells_of_neighbours_that_do_not_answer_and_of_those_that_only_compute(
    pair: tuple[socket.socket, socket.socket], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(heartbeat, "_neighbours", [])
    monkeypatch.setattr(heartbeat, "_facts", {"rank": 0})
    monkeypatch.setattr(heartbeat, "LOOK_SECONDS", 0.1)
    with socket.create_server(("127.0.0.1", 0)) as computes, answering_nobody() as behind_a_firewall:
        cut: socket.socket
        with socket.create_server(("127.0.0.1", 0)) as cut:
            answered = cut.getsockname()
            heartbeat.watch(
                {1: ([pair[0]], computes.getsockname()), 2: ([pair[0]], answered), 3: ([pair[0]], behind_a_firewall)}
            )
        monkeypatch.setattr(heartbeat._calls, "answered", lambda addresses, *seconds: {computes.getsockname()})
        time.sleep(0.2)
        heartbeat._heard()
        heard = heartbeat._heard()
        monkeypatch.setattr(heartbeat._calls, "answered", lambda *_: set())
        time.sleep(0.1)
        later = heartbeat._heard()
    assert later[1]["seconds"] + 0.1 <= later[2]["seconds"] and later[1]["calls"] == 1, "it answered since"
    assert heard[1]["seconds"] == 0.0 and heard[1]["calls"] == 0, "its system answers"
    assert heard[2]["seconds"] >= 0.2 and heard[2]["calls"] == 2, "it answered before"
    assert heard[3]["calls"] == 0, "it never answered: some firewalls pass over calls"
    for neighbour in heartbeat._neighbours:
        for connection in neighbour.connections:
            connection.close()


def test_nobody_is_watched_where_nobody_listens(
    pair: tuple[socket.socket, socket.socket], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(heartbeat, "_neighbours", [])
    monkeypatch.setattr(heartbeat, "_facts", {})
    heartbeat.watch({1: ([pair[0]], refusing())})
    assert not heartbeat._neighbours
