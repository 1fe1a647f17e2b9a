"""Authenticated connections: who is let in, what travels, and that every wait ends."""

import queue
import socket
import threading
import time

import pytest

from lib.distributed import connection
from lib.distributed.connection import Channel, Listener, connect, new_key
from lib.errors import UserError

KEY = new_key()


def echo(channel: Channel) -> None:
    while (message := channel.receive()) is not None:
        channel.send(message)


def test_messages_travel_both_ways() -> None:
    with Listener("127.0.0.1", 0, KEY, echo) as listener:
        channel = connect(*listener.address, KEY, 5)
        for message in ({"text": "ä\n"}, {"numbers": [1, 2.5, None]}, {"long": "x" * 2**21}):
            channel.send(message)
            assert channel.receive(5) == message
        assert channel.receive(0.01) is None
        channel.close()


def test_an_end_is_noticed_on_both_sides() -> None:
    ended: queue.SimpleQueue[str] = queue.SimpleQueue()

    def wait(channel: Channel) -> None:
        try:
            channel.receive()
        except EOFError:
            ended.put("end")

    listener = Listener("127.0.0.1", 0, KEY, wait)
    first, second = (connect(*listener.address, KEY, 5) for _ in range(2))
    first.close()
    assert ended.get(timeout=5) == "end"
    listener.close()
    with pytest.raises(EOFError):
        second.receive(5)
    with pytest.raises(ConnectionError):
        for _ in range(3):
            second.send({})
            time.sleep(0.05)


def test_a_wrong_key_is_refused_by_both_ends() -> None:
    with Listener("127.0.0.1", 0, KEY, echo) as listener:
        host, port = listener.address
        with pytest.raises(UserError, match=f"{host}:{port} does not have the key"):
            connect(host, port, new_key(), 5)
        connect(host, port, KEY, 5).close()


def test_a_silent_stranger_delays_no_peer_and_is_closed(monkeypatch) -> None:
    monkeypatch.setattr(connection, "PROOF_SECONDS", 0.3)
    with Listener("127.0.0.1", 0, KEY, echo) as listener, socket.create_connection(listener.address, 5) as stranger:
        channel = connect(*listener.address, KEY, 5)
        channel.send({"served": True})
        assert channel.receive(5) == {"served": True}
        while stranger.recv(1024):  # the challenge, then the end
            pass


def test_a_message_too_large_or_not_json_ends_the_connection(monkeypatch) -> None:
    listener = Listener("127.0.0.1", 0, KEY, lambda channel: channel._messages.send_bytes(b"[1]"))
    with listener, pytest.raises(EOFError):
        connect(*listener.address, KEY, 5).receive(5)
    monkeypatch.setattr(connection, "MOST_MESSAGE_BYTES", 100)
    with Listener("127.0.0.1", 0, KEY, echo) as listener:
        channel = connect(*listener.address, KEY, 5)
        with pytest.raises(ValueError, match="larger than 100 bytes"):
            channel.send({"text": "x" * 100})
        channel._messages.send_bytes(b"x" * 101)
        with pytest.raises(EOFError):
            channel.receive(5)


def test_connect_waits_for_a_listener_until_its_limit() -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    with pytest.raises(ConnectionError, match=f"127.0.0.1:{port} did not answer within 0.3 s"):
        connect("127.0.0.1", port, KEY, 0.3)
    listeners: list[Listener] = []
    timer = threading.Timer(0.5, lambda: listeners.append(Listener("127.0.0.1", port, KEY, echo)))
    timer.start()
    connect("127.0.0.1", port, KEY, 20).close()
    timer.join()
    with pytest.raises(UserError, match=f"cannot listen at 127.0.0.1:{port}"):
        Listener("127.0.0.1", port, KEY, echo)
    listeners[0].close()
