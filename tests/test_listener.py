"""The listener on real sockets, without a model: what is parsed, of whom, how much of it, and who may stay connected."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import hashlib
import itertools
import re
import signal
import socket
import ssl
from asyncio import selector_events, sslproto
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import h11
import httpx2
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lib.config.serve_settings import ServeSettings
from lib.serve import command, http_protocol, tls_listener
from lib.serve.api_keys import Keys
from lib.serve.backend_pool import Pool
from lib.serve.feedback import Feedback
from lib.serve.gateway import Gateway
from lib.serve.openai_requests import RequestError
from lib.serve.tls_listener import Listener
from tests.hostile import head
from tests.served import certificate

Connect = Callable[..., Awaitable[tuple[asyncio.StreamReader, asyncio.StreamWriter]]]
KEYS = Keys(tuple((name, hashlib.sha256(name.encode()).digest()) for name in ("alice", "bob")))


async def read(owner: str, kind: str, body: bytes) -> Any:
    """Instead of an answer, what came of the body."""
    if body.startswith(b"wait"):
        await asyncio.sleep(3600)
    raise RequestError(418, f"{owner} sent {len(body)} bytes, {hashlib.sha256(body).hexdigest()[:8]}")


@contextlib.asynccontextmanager
async def listening(**words: Any) -> AsyncIterator[Connect]:
    """A gateway without a backend, for as long as it is needed; gives how one connects to it."""
    async with serving(**words) as (connect, _, _):
        yield connect


@contextlib.asynccontextmanager
async def serving(name: str = "tiny", **words: Any) -> AsyncIterator[tuple[Connect, Listener, asyncio.Task[None]]]:
    """The same with its listener, and the task that serves until it is told to end."""
    own = ServeSettings(**{"drain_seconds": 0.0, **words})
    feedback = Feedback(own, Path(own.feedback), "chat") if own.feedback else None
    pool, client = Pool([], own.max_queue), httpx2.AsyncClient()
    gateway = Gateway(own, name, read, pool, client, KEYS, lambda *a, **b: None, feedback)
    door = command.bind("127.0.0.1", 0)
    port = door.getsockname()[1]
    listener = command._listener(gateway, own)
    task = asyncio.create_task(listener.serve([door]))

    async def connect(tls: ssl.SSLContext | None = None) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        return await asyncio.open_connection("127.0.0.1", port, ssl=tls, server_hostname=tls and "localhost")

    try:
        yield connect, listener, task
    finally:
        listener.should_exit = listener.force_exit = True
        await task


async def heard(reader: asyncio.StreamReader, seconds: float = 20.0) -> bytes:
    """All that comes until the connection ends."""
    said = b""
    async with asyncio.timeout(seconds):
        with contextlib.suppress(ConnectionError):
            while block := await reader.read(65536):
                said += block
    return said


async def asked(connect: Connect, *parts: bytes, tls: ssl.SSLContext | None = None) -> bytes:
    """The answer to these bytes, sent one part after the other, over a connection that ends then."""
    reader, writer = await connect(tls)
    hearing = asyncio.create_task(heard(reader))
    with contextlib.suppress(ConnectionError):
        for part in parts:
            writer.write(part)
            await writer.drain()
            await asyncio.sleep(0)
    said = await hearing
    writer.transport.abort()
    return said


@settings(max_examples=12)
@given(st.binary(min_size=1, max_size=5000), st.lists(st.integers(1, 6000), max_size=5), st.booleans(), st.data())
def test_a_body_comes_whole_however_it_is_cut(body: bytes, cuts: list[int], chunked: bool, data: st.DataObject) -> None:
    if chunked:
        sizes = data.draw(st.lists(st.integers(1, 2000), min_size=1, max_size=9))
        chunks, rest = [], body
        while rest:
            size = sizes[len(chunks) % len(sizes)] + 8 * len(chunks)
            chunks.append(b"%x\r\n%s\r\n" % (len(rest[:size]), rest[:size]))
            rest = rest[size:]
        sent = head("alice", "Transfer-Encoding: chunked", "Connection: close") + b"".join(chunks) + b"0\r\n\r\n"
    else:
        sent = head("alice", f"Content-Length: {len(body)}", "Connection: close") + body
    places = [0, *sorted(cut for cut in cuts if cut < len(sent)), len(sent)]
    parts = [sent[start:end] for start, end in zip(places, places[1:], strict=False)]

    async def story() -> bytes:
        async with listening() as connect:
            return await asked(connect, *parts)

    said = asyncio.run(story())
    if body.startswith(b"wait"):
        return
    assert b" 418 " in said and f"sent {len(body)} bytes, {hashlib.sha256(body).hexdigest()[:8]}".encode() in said


def test_nothing_is_parsed_of_a_strangers_body(monkeypatch: pytest.MonkeyPatch) -> None:
    """And the answer is read all the same, by one who sends to the end before it reads."""
    parsed: list[int] = []
    receive = h11.Connection.receive_data

    def counting(self: h11.Connection, data: bytes) -> None:
        parsed.append(len(data))
        receive(self, data)

    monkeypatch.setattr(h11.Connection, "receive_data", counting)
    start, flood = head(None, "Transfer-Encoding: chunked"), b"1\r\nx\r\n" * 20_000

    async def story() -> bytes:
        async with listening() as connect:
            return await asked(connect, start, *[flood] * 5)

    said = asyncio.run(story())
    assert said.startswith(b"HTTP/1.1 401 ") and b"connection: close" in said
    assert sum(parsed) == len(start)


GET = b"GET /v1/models HTTP/1.1\r\nHost: a\r\nAuthorization: Bearer alice\r\n"
LAST = GET + b"Connection: close\r\n\r\n"


@pytest.mark.parametrize(
    ("parts", "statuses"),
    [
        ([LAST], [200]),
        ([GET + b"\r\n" + GET + b"\r\n" + LAST], [200, 200, 200]),
        ([bytes([byte]) for byte in LAST], [200]),
        ([GET + b"Content-Length: 3\r\n\r\nabc", LAST], [200]),  # a body that nobody asked for ends the connection
        ([GET + b"".join(b"X-%d: y\r\n" % number for number in range(100)) + b"\r\n"], [431]),
        ([GET + b"X: " + b"y" * 20_000], [431]),
        ([b"\n\n"], [400]),
        ([head("alice", "Transfer-Encoding: chunked"), *[b"1\r\nx\r\n" * 1000] * 4], [400]),
        ([head("alice", "Transfer-Encoding: chunked"), b"1;" + b"x" * 100_000], [400]),
        ([head("alice", "Transfer-Encoding: chunked"), b"3\r\nabcd\r\n"], [400]),
        ([head("alice", "Transfer-Encoding: chunked"), b"3\r\nabc\r\n0\r\n", *[b"a: b\r\n"] * 999], [400]),
        ([head("alice", "Transfer-Encoding: chunked"), b"3\r\nabc\r\n0\r\na: b\r\n\r\n" + LAST], [418, 200]),
        ([head("alice", "Content-Length: 2000000"), b"x" * 500_000], [413]),
        ([head("alice", "Content-Length: 5"), b"{"], [408]),
        ([head("alice", "Transfer-Encoding: chunked"), b"4000\r\n%s\r\n" % (b"x" * 0x4000) * 80], [413]),
    ],
)
def test_what_is_said_to_what_is_sent(parts: list[bytes], statuses: list[int]) -> None:
    async def story() -> bytes:
        async with listening(read_seconds=1.0) as connect:
            return await asked(connect, *parts)

    said = asyncio.run(story())
    assert [int(status) for status in re.findall(rb"HTTP/1\.1 (\d+)", said)] == statuses, said


def test_who_asks_for_another_protocol_is_answered_by_this_one(caplog: pytest.LogCaptureFixture) -> None:
    async def story() -> bytes:
        async with listening() as connect:
            return await asked(connect, GET + b"Connection: upgrade, close\r\nUpgrade: websocket\r\n\r\n")

    assert asyncio.run(story()).startswith(b"HTTP/1.1 200 ")
    assert not [record for record in caplog.records if record.name.startswith("uvicorn")]


@pytest.mark.parametrize("tls", [False, True])
def test_idle_connections_make_room(tls: bool, tmp_path: Path) -> None:
    """Of 30 that say nothing, 10 stay at a time, and none of them for long; who asks is answered."""
    trusted, words = certificate(tmp_path)
    own = {key.removeprefix("serve."): value for key, value in (word.split("=") for word in words)} if tls else {}

    async def story() -> None:
        limits: dict[str, Any] = {"max_connections": 10, "max_connections_per_address": 8, "read_seconds": 2.0}
        async with listening(**own, **limits) as connect:
            silent = [await connect() for _ in range(30)]
            hearing = [asyncio.create_task(heard(reader)) for reader, _ in silent]
            said = await asked(connect, LAST, tls=trusted if tls else None)
            assert said.startswith(b"HTTP/1.1 200 ")
            done = sum(task.done() for task in hearing)
            assert done >= 30 - 8
            assert set(await asyncio.gather(*hearing)) == {b""}  # in the end all are closed, unheard
            for _, writer in silent:
                writer.transport.abort()

    asyncio.run(story())


async def until_done(tasks: list[asyncio.Task[bytes]], count: int) -> None:
    """Returns when so many of the tasks are done, and no more of them."""
    async with asyncio.timeout(60):
        while sum(task.done() for task in tasks) < count:
            await asyncio.sleep(0.02)
    await asyncio.sleep(0.1)
    assert sum(task.done() for task in tasks) == count


LABEL = b"POST /v1/feedback HTTP/1.1\r\nHost: a\r\nAuthorization: Bearer alice\r\nContent-Type: application/json\r\n"
HALF = b"Content-Length: 60\r\n\r\n{"


@pytest.mark.parametrize("sent", [GET + b"\r\n", LABEL + HALF, head("alice", "Content-Length: 60") + b"{"])
def test_no_key_keeps_every_place_of_its_address(sent: bytes, tmp_path: Path) -> None:
    """Neither between two requests nor in the middle of bodies: somebody who takes a while to ask is answered."""

    async def story() -> None:
        limits: dict[str, Any] = {"max_connections": 20, "max_connections_per_address": 10}
        async with listening(**limits, feedback=str(tmp_path / "labels")) as connect:
            held = [await connect() for _ in range(10)]
            for reader, writer in held:
                writer.write(sent)
                if sent.startswith(b"GET"):
                    await reader.readuntil(b"}]}")
            await asyncio.sleep(0.2)
            reader, writer = await connect()
            newer = [await connect() for _ in range(3)]
            writer.write(LAST.replace(b"alice", b"bob"))
            assert (await heard(reader)).startswith(b"HTTP/1.1 200 ")
            for _, each in [*held, *newer]:
                each.transport.abort()

    asyncio.run(story())


@pytest.mark.parametrize("ends", [False, True])
def test_who_reads_no_answer_keeps_no_place(ends: bool) -> None:
    """After it the connection closes, or the client has said that he hears no more; but most of it is on its way."""

    async def story() -> None:
        limits: dict[str, Any] = {"max_connections": 2, "max_connections_per_address": 2, "write_seconds": 1.0}
        name = "x" * 60_000  # asyncio takes all of it for its client, the system does not
        async with serving(name, **limits) as (connect, listener, _):
            _, writer = await connect()
            host, port = writer.get_extra_info("peername")[:2]
            writer.transport.abort()
            held = [socket.socket() for _ in range(2)]
            for one in held:
                one.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
                one.setsockopt(socket.IPPROTO_TCP, socket.TCP_MAXSEG, 536)
                one.connect((host, port))
                one.sendall(GET + b"\r\n" if ends else LAST)
            await asyncio.sleep(1.0)
            if ends:
                for one in held:
                    one.shutdown(socket.SHUT_WR)
                await asyncio.sleep(0.2)
            assert (await asked(connect, LAST.replace(b"alice", b"bob"))).startswith(b"HTTP/1.1 200 ")
            async with asyncio.timeout(10):
                while listener.server_state.connections:
                    await asyncio.sleep(0.05)
            for one in held:
                one.close()

    asyncio.run(story())


def test_a_costly_key_exchange_is_refused(tmp_path: Path) -> None:
    """A stranger who computes nothing offers a field of 8,192 bits alone (RFC 7919); TLS 1.3's hello, RFC 8446, 4.1.2."""

    def sized(data: bytes, size: int = 2) -> bytes:
        return len(data).to_bytes(size, "big") + data

    def extension(number: int, data: bytes) -> bytes:
        return number.to_bytes(2, "big") + sized(data)

    group = b"\x01\x04"  # ffdhe8192
    extensions = extension(10, sized(group)) + extension(13, sized(b"\x08\x04\x04\x03"))
    extensions += extension(43, sized(b"\x03\x04", 1)) + extension(51, sized(group + sized(b"\x7f" * 1024)))
    hello = b"\x03\x03" + bytes(32) + sized(b"", 1) + sized(b"\x13\x01") + b"\x01\x00" + sized(extensions)
    trusted, words = certificate(tmp_path)
    own = {key.removeprefix("serve."): value for key, value in (word.split("=") for word in words)}

    async def story() -> None:
        async with listening(**own) as connect:
            reader, writer = await connect()
            writer.write(b"\x16\x03\x01" + sized(b"\x01" + sized(hello, 3)))
            assert (await heard(reader))[:1] in (b"", b"\x15"), "no hello of the server, but an alert or nothing"
            writer.transport.abort()
            assert (await asked(connect, LAST, tls=trusted)).startswith(b"HTTP/1.1 200 ")

    asyncio.run(story())


def test_addresses_take_turns_to_be_listened_to() -> None:
    """Or whoever opens hundreds of connections would have each new one of others wait for all of them."""

    async def story() -> None:
        async with serving() as (_, listener, _):
            pairs = [socket.socketpair() for _ in range(7)]
            for (_, accepted), address in zip(pairs, ["a", "a", "a", "a", "b", "c", "b"], strict=True):
                accepted.setblocking(False)
                connection = listener.connections.take(address)
                assert connection is not None
                listener.silent[accepted] = asyncio.get_running_loop().call_later(99, lambda: None)
                listener._hear(accepted, connection)
            heard_of = [one[1].address for _ in pairs if (one := listener._next_speaking())]
            assert heard_of == ["a", "b", "c", "a", "b", "a", "a"]
            for one in itertools.chain.from_iterable(pairs):
                one.close()

    asyncio.run(story())


def test_who_left_before_its_turn_costs_nothing() -> None:
    async def story() -> None:
        door = socket.create_server(("127.0.0.1", 0))
        for sent, is_gone in ((b"GET / HTTP/1.1\r\n\r\n", False), (b"", False), (b"", True)):
            client = socket.create_connection(door.getsockname())
            accepted, _ = door.accept()
            client.sendall(sent)
            if is_gone:
                client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
                client.close()
            await asyncio.sleep(0.05)
            assert tls_listener.has_left(accepted) == is_gone
            accepted.close()
            client.close()
        door.close()

    asyncio.run(story())


@pytest.mark.parametrize("has_tls", [False, True])
@pytest.mark.parametrize(
    "request_bytes",
    [
        b"GET /v1/models HTTP/1.1\r\nHost: a\r\n\r\n",
        b"GARBAGE\r\n\r\n",
        b"",
        b"GET /healthz HTTP/1.1\r\nHost: a\r\n\r\n",
    ],
)
def test_nothing_is_left_of_a_connection_that_ended(request_bytes: bytes, has_tls: bool, tmp_path: Path) -> None:
    """No timer keeps it: of some thousand in a second Python's collector would look through them all, again and again."""
    trusted, words = certificate(tmp_path) if has_tls else (None, [])
    own = {key.removeprefix("serve."): value for key, value in (word.split("=") for word in words)}
    own |= dict.fromkeys(("write_seconds", "read_seconds", "idle_seconds"), 3000.0)

    async def story() -> None:
        async with listening(**own) as connect:
            writers = []
            for _ in range(120):  # more than the refusals that go out at once
                _, writer = await connect(trusted)
                writer.write(request_bytes)
                await writer.drain()
                writers.append(writer)
            await asyncio.sleep(0.1)
            for number, writer in enumerate(writers):
                client = writer.get_extra_info("socket")  # none any more where its connection is closed already
                if number % 2 and client is not None:  # by a reset
                    client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
                writer.transport.abort()
            writers.clear()
            del writer, _, client
            await asyncio.sleep(0.5)
            gc.collect()
            kept = (http_protocol.Protocol, selector_events._SelectorSocketTransport, sslproto.SSLProtocol)
            assert not [one for one in gc.get_objects() if isinstance(one, kept)]

    asyncio.run(story())


def test_a_keys_requests_do_not_shut_out_another_key() -> None:
    async def story() -> None:
        async with listening(max_queue=4) as connect:
            body = b"wait"
            greedy = [
                asyncio.create_task(asked(connect, head("alice", "Content-Length: 4", "Connection: close") + body))
                for _ in range(8)
            ]
            await until_done(greedy, 4)  # four places, four refusals
            assert all(b" 429 " in task.result() for task in greedy if task.done())
            said = await asked(connect, head("bob", "Content-Length: 1", "Connection: close") + b"x")
            assert b" 418 " in said and b"bob sent 1 bytes" in said
            await until_done(greedy, 5)  # the newest of alice's made room
            for task in greedy:
                task.cancel()
            await asyncio.gather(*greedy, return_exceptions=True)

    asyncio.run(story())


def test_whoever_polls_keeps_no_gateway_from_its_end() -> None:
    """Answers that wait for their turn are nobody's loss; a request that was taken is waited for."""

    async def story() -> None:
        async with serving() as (connect, listener, task):

            async def poll(request: bytes) -> None:
                while not task.done():
                    with contextlib.suppress(OSError, asyncio.IncompleteReadError):
                        reader, writer = await connect()
                        while True:
                            writer.write(request)
                            await reader.readuntil(b"\r\n\r\n")
                    await asyncio.sleep(0.01)

            probe = b"GET /healthz HTTP/1.1\r\nHost: a\r\n\r\n"
            polling = [
                asyncio.create_task(poll(request)) for request in [probe, GET.replace(b"alice", b"") + b"\r\n"] * 30
            ]
            half = head("alice", "Content-Length: 1", "Connection: close")
            reader, writer = await connect()
            writer.write(half)
            await asyncio.sleep(1.0)
            listener.handle_exit(signal.SIGTERM, None)
            await asyncio.sleep(0.5)
            assert not task.done() and listener.gateway.active == 1
            writer.write(b"x")
            assert b" 418 " in await heard(reader)
            await asyncio.wait_for(task, 20)
            for one in polling:
                one.cancel()
            await asyncio.gather(*polling, return_exceptions=True)

    asyncio.run(story())


def test_who_is_connected_at_the_end_is_still_answered() -> None:
    """Its request comes when it comes: the connection was made, and a client takes that for a server that is there."""

    async def story() -> None:
        async with serving(drain_seconds=0.2) as (connect, listener, task):
            slow, silent = await connect(), await connect()
            listener.handle_exit(signal.SIGTERM, None)
            while listener.listening:
                await asyncio.sleep(0.01)
            await asyncio.sleep(0.4)
            slow[1].write(LAST)
            said = await heard(slow[0])
            assert said.startswith(b"HTTP/1.1 503 ") and b"shutting_down" in said and b"\r\nretry-after: " in said
            await asyncio.wait_for(task, 20)  # and is not kept by who says nothing
            assert await heard(silent[0]) == b""

    asyncio.run(story())
