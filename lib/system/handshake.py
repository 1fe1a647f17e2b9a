"""Connections whose two ends prove to each other that they know a run's secret, which itself never travels.

    caller ➜ listener    GREETING, a nonce
    listener ➜ caller    a nonce, HMAC-SHA256(secret, "listener", purpose, both nonces)
    caller ➜ listener             HMAC-SHA256(secret, "caller", purpose, both nonces)

Both nonces are fresh, so nothing that was heard once opens anything again; the words "listener" and "caller" keep a
proof from being sent back to whom it came from, and the purpose keeps it from being shown at another door. What is sent
afterwards over a Channel carries a code of its own (HMAC-SHA256 by a key of this connection and direction, over the
message's number and its text): who sits between can read it, and neither change nor repeat nor leave out a message
unnoticed.

The steps are written once, as generators that know no socket; `Listener` and `connect` drive them, and over asyncio
`StreamListener` and `over_streams`. Only the standard library is imported: the agent, which has to be there in a tenth
of a second, imports this.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import hmac
import os
import selectors
import socket
import time
from collections import Counter
from collections.abc import Callable, Coroutine, Generator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeVar

Key = TypeVar("Key")

GREETING = b"tandem handshake 1\n"
NONCE_BYTES = PROOF_BYTES = 32
STRANGER_SECONDS = 5.0  # for all steps together, of whoever connects
STRANGERS = 64  # that a listener hears out at a time; one more pushes out the first of the address that has most
MESSAGE_BYTES = 2**28  # of one message


class NotTrusted(ConnectionError):
    """The other end does not know the secret, or what came from it was changed on its way."""


class Keys(NamedTuple):
    """Of one connection: by which this end seals what it sends, and checks what it receives."""

    sending: bytes
    receiving: bytes


# What to send, and how many bytes to receive then: as long as it goes on; the keys at its end.
Steps = Generator[tuple[bytes, int], bytes, Keys]


def calling(secret: bytes, purpose: str) -> Steps:
    """The steps of the end that connects.

    Raises:
        NotTrusted: the listener does not know the secret, or listens for another purpose.
    """
    mine = os.urandom(NONCE_BYTES)
    answer = yield GREETING + mine, NONCE_BYTES + PROOF_BYTES
    nonces = mine + answer[:NONCE_BYTES]
    if not hmac.compare_digest(answer[NONCE_BYTES:], _code(secret, "listener", purpose, nonces)):
        raise NotTrusted("what listens there does not know this run's secret")
    yield _code(secret, "caller", purpose, nonces), 0
    return Keys(_code(secret, "from caller", purpose, nonces), _code(secret, "from listener", purpose, nonces))


def answering(secret: bytes, purpose: str) -> Steps:
    """The steps of the end that listens.

    Raises:
        NotTrusted: the caller speaks otherwise, does not know the secret, or calls for another purpose.
    """
    hello = yield b"", len(GREETING) + NONCE_BYTES
    if not hello.startswith(GREETING):
        raise NotTrusted("who connected is no part of this run")
    mine = os.urandom(NONCE_BYTES)
    nonces = hello[len(GREETING) :] + mine
    proof = yield mine + _code(secret, "listener", purpose, nonces), PROOF_BYTES
    if not hmac.compare_digest(proof, _code(secret, "caller", purpose, nonces)):
        raise NotTrusted("who connected does not know this run's secret")
    return Keys(_code(secret, "from listener", purpose, nonces), _code(secret, "from caller", purpose, nonces))


def derived(secret: bytes, what: str) -> bytes:
    """A secret of its own for one use, 32 bytes; from it nobody gets back to the first one."""
    return hmac.digest(secret, what.encode(), hashlib.sha256)


def _code(secret: bytes, who: str, purpose: str, nonces: bytes) -> bytes:
    return hmac.digest(secret, b"\0".join((GREETING, who.encode(), purpose.encode(), nonces)), hashlib.sha256)


# ---- Messages


@dataclass
class Seals:
    """What a connection's messages are sealed with: a message is its length (4 bytes), its code (32), its text."""

    keys: Keys
    sent: int = 0
    received: int = 0

    def sealed(self, text: bytes) -> bytes:
        """The next message as it travels.

        Raises:
            ValueError: it is longer than MESSAGE_BYTES.
        """
        if len(text) > MESSAGE_BYTES:
            raise ValueError(f"a message of {len(text):,} bytes; at most {MESSAGE_BYTES:,} are sent at a time")
        head = len(text).to_bytes(4, "big")
        code = self._seal(self.keys.sending, self.sent, text)
        self.sent += 1
        return head + code + text

    def length(self, head: bytes) -> int:
        """The bytes that follow a message's first four.

        Raises:
            NotTrusted: more than any message has.
        """
        length = int.from_bytes(head, "big")
        if length > MESSAGE_BYTES:
            raise NotTrusted(f"a message of {length:,} bytes, more than {MESSAGE_BYTES:,}: it was changed on its way")
        return PROOF_BYTES + length

    def opened(self, rest: bytes) -> bytes:
        """The text of the next message, from what follows its first four bytes.

        Raises:
            NotTrusted: it is not what the other end sent next.
        """
        code, text = rest[:PROOF_BYTES], rest[PROOF_BYTES:]
        if not hmac.compare_digest(code, self._seal(self.keys.receiving, self.received, text)):
            raise NotTrusted("a message was changed on its way")
        self.received += 1
        return text

    def _seal(self, key: bytes, number: int, text: bytes) -> bytes:
        return hmac.digest(key, number.to_bytes(8, "big") + text, hashlib.sha256)


class Channel:
    """A connection of one process to another that knows the same secret, and the messages over it."""

    def __init__(self, connection: socket.socket, keys: Keys):
        self.connection, self._seals = connection, Seals(keys)
        connection.settimeout(None)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)  # messages are short, and waited for

    def send(self, text: bytes) -> None:
        self.connection.sendall(self._seals.sealed(text))

    def receive(self) -> bytes:
        """The next message.

        Raises:
            ConnectionError: the other end is gone (ConnectionResetError), or what came is not its (NotTrusted).
            TimeoutError: `connection` has a time limit, and it has passed.
        """
        return self._seals.opened(self._exactly(self._seals.length(self._exactly(4))))

    def close(self) -> None:
        self.connection.close()

    def _exactly(self, count: int) -> bytes:
        received = bytearray()
        while len(received) < count:
            piece = self.connection.recv(min(count - len(received), 2**20))
            if not piece:
                raise ConnectionResetError("the other end is gone")
            received += piece
        return bytes(received)


def connect(address: tuple[str, int], secret: bytes, purpose: str, seconds: float) -> Channel:
    """A channel to a listener, after at most so many seconds.

    Raises:
        NotTrusted: what listens there does not know the secret.
        OSError: nothing listens there, or it does not answer in time.
    """
    deadline = time.monotonic() + seconds
    connection = socket.create_connection(address, seconds)
    try:
        steps, received = calling(secret, purpose), b""
        sent, wanted = next(steps)
        while True:
            connection.sendall(sent)
            received = b""
            while len(received) < wanted:
                connection.settimeout(max(deadline - time.monotonic(), 0.001))
                piece = connection.recv(wanted - len(received))
                if not piece:
                    raise ConnectionResetError("what listens there hung up")
                received += piece
            sent, wanted = steps.send(received)
    except StopIteration as end:
        return Channel(connection, end.value)
    except BaseException:
        connection.close()
        raise


# ---- Listening


def to_push_out(strangers: Mapping[Key, str]) -> Key:
    """Who makes room for one more: of the network that has most strangers, the one that came first.

    So who comes from elsewhere is heard out, however often somebody connects.

    strangers: the network of each, in the order in which they came.
    """
    ((fullest, _),) = Counter(strangers.values()).most_common(1)
    return next(key for key, network in strangers.items() if network == fullest)


@dataclass
class _Stranger:
    """Somebody who has connected and proven nothing yet."""

    connection: socket.socket
    network: str
    steps: Steps
    wanted: int
    until: float
    received: bytearray = field(default_factory=bytearray)


class Listener:
    """Accepts whoever proves that they know the secret; nobody else costs more than a place among the strangers.

    All strangers are heard out at the same time, so one that says nothing, or says it slowly, delays nobody.
    """

    def __init__(self, listening: socket.socket, secret: bytes, purpose: str):
        """Takes a listening socket over, to be closed by `close`."""
        self._listening, self._secret, self._purpose = listening, secret, purpose
        self._strangers: dict[int, _Stranger] = {}  # by file descriptor, in the order in which they came
        self._closed = False
        self._selector = selectors.DefaultSelector()
        listening.setblocking(False)
        self._selector.register(listening, selectors.EVENT_READ)

    @property
    def port(self) -> int:
        return int(self._listening.getsockname()[1])

    def accept(self, seconds: float | None = None) -> Channel:
        """The next one that proves it; waits without end, or so many seconds.

        Raises:
            TimeoutError: nobody came in time.
            OSError: `close` was called.
        """
        deadline = float("inf") if seconds is None else time.monotonic() + seconds
        while (now := time.monotonic()) < deadline:
            for key, _ in self._selector.select(min(0.5, deadline - now)):
                if self._closed:
                    break
                if key.fileobj is self._listening:
                    self._admit()
                elif key.fd in self._strangers and (channel := self._hear(self._strangers[key.fd])) is not None:
                    return channel
            if self._closed:
                self._end()
                raise OSError("the listener is closed")
            for stranger in [one for one in self._strangers.values() if one.until < time.monotonic()]:
                self._drop(stranger)
        raise TimeoutError

    def close(self) -> None:
        """Ends the listening, also that of another thread, in half a second at most."""
        self._closed = True
        with contextlib.suppress(OSError):
            self._listening.shutdown(socket.SHUT_RDWR)  # on Linux wakes the thread that waits
        self._listening.close()

    def __enter__(self) -> Listener:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
        self._end()

    def _admit(self) -> None:
        try:
            connection, address = self._listening.accept()
        except OSError:  # it has hung up already, or this process has no descriptor left: then one gives its back
            if self._strangers:
                self._push_out()
            time.sleep(0.01)
            return
        if len(self._strangers) >= STRANGERS:
            self._push_out()
        connection.setblocking(False)
        steps = answering(self._secret, self._purpose)
        _, wanted = next(steps)
        until = time.monotonic() + STRANGER_SECONDS
        self._strangers[connection.fileno()] = _Stranger(connection, str(address[0]), steps, wanted, until)
        self._selector.register(connection, selectors.EVENT_READ)

    def _hear(self, stranger: _Stranger) -> Channel | None:
        """Takes what a stranger sent: a channel once all is proven."""
        try:
            piece = stranger.connection.recv(stranger.wanted - len(stranger.received))
            stranger.received += piece
            if not piece:
                raise ConnectionResetError
            if len(stranger.received) < stranger.wanted:
                return None
            sent, stranger.wanted = stranger.steps.send(bytes(stranger.received))
            stranger.received.clear()
            if stranger.connection.send(sent) < len(sent):  # some bytes into an empty buffer: it never blocks
                raise ConnectionResetError
        except BlockingIOError:
            return None
        except StopIteration as end:
            self._forget(stranger)
            return Channel(stranger.connection, end.value)
        except OSError:
            self._drop(stranger)
        return None

    def _push_out(self) -> None:
        networks = {descriptor: one.network for descriptor, one in self._strangers.items()}
        self._drop(self._strangers[to_push_out(networks)])

    def _forget(self, stranger: _Stranger) -> None:
        self._strangers.pop(stranger.connection.fileno())
        self._selector.unregister(stranger.connection)

    def _drop(self, stranger: _Stranger) -> None:
        self._forget(stranger)
        stranger.connection.close()

    def _end(self) -> None:
        with contextlib.suppress(OSError, KeyError, ValueError, RuntimeError):  # another thread is ending it as well
            for stranger in list(self._strangers.values()):
                self._drop(stranger)
            self._selector.close()


# ---- The same over asyncio


class StreamChannel:
    """A Channel whose two directions are asyncio's streams."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, keys: Keys):
        self.reader, self.writer, self._seals = reader, writer, Seals(keys)

    async def send(self, text: bytes) -> None:
        self.writer.write(self._seals.sealed(text))
        await self.writer.drain()

    async def receive(self) -> bytes:
        """The next message.

        Raises:
            ConnectionError: the other end is gone, or what came is not its (NotTrusted).
        """
        try:
            length = self._seals.length(await self.reader.readexactly(4))
            return self._seals.opened(await self.reader.readexactly(length))
        except asyncio.IncompleteReadError:
            raise ConnectionResetError("the other end is gone") from None


async def over_streams(steps: Steps, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> StreamChannel:
    """A channel after `calling` or `answering`, within STRANGER_SECONDS; closes the connection where there is none.

    Raises:
        NotTrusted: the other end does not know the secret.
        OSError: it is gone, or does not go on in time.
    """
    try:
        async with asyncio.timeout(STRANGER_SECONDS):
            sent, wanted = next(steps)
            while True:
                writer.write(sent)
                await writer.drain()
                sent, wanted = steps.send(await reader.readexactly(wanted))
    except StopIteration as end:
        return StreamChannel(reader, writer, end.value)
    except asyncio.IncompleteReadError:
        writer.close()
        raise ConnectionResetError("the other end hung up") from None
    except BaseException:
        writer.close()
        raise


class StreamListener:
    """Hands every connection that is proven to a coroutine, which closes it; strangers as `Listener` has them."""

    def __init__(self, secret: bytes, purpose: str, serve: Callable[[StreamChannel], Coroutine[Any, Any, None]]):
        self._secret, self._purpose, self._serve = secret, purpose, serve
        self._strangers: dict[asyncio.StreamWriter, str] = {}  # with their networks, in the order in which they came
        self._tasks: set[asyncio.Future[None]] = set()
        self._server: asyncio.Server | None = None

    async def start(self, port: int) -> None:
        """Begins to listen.

        Raises:
            OSError: the port is taken.
        """
        self._server = await asyncio.start_server(self._begin, None, port, reuse_address=True)

    async def close(self) -> None:
        """Ends the listening, and every connection under way."""
        if self._server is not None:
            self._server.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _begin(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        # A task of our own: asyncio's would print a traceback where it is cancelled (before Python 3.12).
        self._tasks.add(task := asyncio.ensure_future(self._prove(reader, writer)))
        task.add_done_callback(self._tasks.discard)

    async def _prove(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if len(self._strangers) >= STRANGERS:
            longest = to_push_out(self._strangers)
            del self._strangers[longest]
            longest.close()
        self._strangers[writer] = str((writer.get_extra_info("peername") or ("",))[0])
        try:
            channel = await over_streams(answering(self._secret, self._purpose), reader, writer)
            self._strangers.pop(writer, None)
            await self._serve(channel)
        except OSError:  # it is a stranger, or gone
            pass
        finally:
            self._strangers.pop(writer, None)
            writer.close()
