"""One HTTP request and its answer: reading the body, sending the answer, and noticing that the client has gone."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Coroutine, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from starlette.datastructures import Headers
from starlette.types import Message, Receive, Scope, Send

from lib.serve.openai_requests import RequestError

JSON_HEADERS = {"content-type": "application/json"}
LINGER_SECONDS = 1.0  # for a client that still sends to read why it was refused


class ClientGone(Exception):
    """The client has gone: there is nobody to answer."""


class Client(Protocol):
    """The other end of a connection (lib/serve/http_protocol.py)."""

    body_fault: str | None  # why no more of a body can be read

    def recognise(self, owner: str) -> None:
        """It brought a key of this owner's."""

    def rest(self) -> None:
        """Nobody works for it for a while: it may be closed to make room for another."""

    def work(self) -> None:
        """Somebody works for it again."""

    def ignore(self) -> None:
        """Nothing more of what it sends is read."""

    def abort(self) -> None:
        """Cuts it off; closing would wait for one that does not read."""

    async def pause(self, seconds: float) -> None:
        """Waits so long, or until it has left."""

    @property
    def has_left(self) -> bool:
        """It has closed the connection: nobody is there to answer."""


@dataclass
class Exchange:
    """One request, and how far its answer is."""

    scope: Scope
    receive: Receive
    send: Send
    headers: Headers
    id: str
    is_whole: bool = False  # all of the request has been read
    is_last: bool = False  # of its connection
    owner: str = ""
    since: float = field(default_factory=time.monotonic)
    status: int = 0  # of the answer; 0: not begun
    has_content: bool = False  # something of the answer has been sent
    is_stream: bool = False
    record: dict[str, object] = field(default_factory=dict)  # for the log

    def __post_init__(self) -> None:
        self.is_whole = "transfer-encoding" not in self.headers and self.headers.get("content-length", "0") == "0"

    @property
    def client(self) -> Client:
        client: Client = self.scope["state"]["client"]
        return client

    @property
    def seconds(self) -> float:
        return time.monotonic() - self.since

    async def pause(self, seconds: float) -> None:
        """Waits, for as long as the client does.

        Raises:
            ClientGone: it has closed the connection.
        """
        await (self.client.pause(seconds) if seconds else asyncio.sleep(0))
        if self.client.has_left:
            raise ClientGone("before it was answered")


async def read_body(exchange: Exchange, max_bytes: int, limit_seconds: float) -> bytes:
    """The whole body.

    Raises:
        RequestError: it is too large, too slow, in chunks that are none, or not JSON by its own word (which makes a
            browser ask first).
        ClientGone: the connection ended in its middle.
    """
    too_large = RequestError(413, f"the body has more than {max_bytes} bytes", "request_too_large")
    if exchange.headers.get("content-type", "").partition(";")[0].strip().lower() != "application/json":
        raise RequestError(415, "the content-type has to be application/json", "unsupported_media_type")
    length = exchange.headers.get("content-length", "0")
    if not length.isdecimal() or int(length) > max_bytes:
        raise too_large
    parts, size = [], 0
    exchange.client.rest()
    try:
        async with asyncio.timeout(limit_seconds):
            while True:
                message = await exchange.receive()
                if message["type"] == "http.disconnect":
                    raise ClientGone("in the middle of its body")
                if exchange.client.body_fault is not None:
                    raise RequestError(400, f"the body cannot be read: {exchange.client.body_fault}", "invalid_body")
                parts.append(message.get("body", b""))
                size += len(parts[-1])
                if size > max_bytes:
                    raise too_large
                if not message.get("more_body"):
                    exchange.is_whole = True
                    return b"".join(parts)
                await asyncio.sleep(0)  # others come in between two pieces
    except TimeoutError:
        raise RequestError(408, f"the body was not there after {limit_seconds:g} s", "timeout") from None
    finally:
        exchange.client.work()


async def while_listening(receive: Receive, work: Coroutine[Any, Any, None]) -> None:
    """Does something for a client for as long as it listens.

    Raises:
        ClientGone: it left; the work is cancelled.
    """
    task, gone = asyncio.ensure_future(work), asyncio.ensure_future(_disconnect(receive))
    try:
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientGone("before the answer's end")
        task.result()
    finally:
        for one in (task, gone):
            one.cancel()
        await asyncio.gather(task, gone, return_exceptions=True)


async def _disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def send_refusal(exchange: Exchange, status: int, headers: Mapping[str, str], body: bytes) -> None:
    """Sends a whole answer to a request whose rest is not read, and closes the connection."""
    exchange.client.ignore()
    exchange.is_last = True
    await exchange.send(start_of_answer(status, {**headers, "content-length": str(len(body))}))
    await exchange.send({"type": "http.response.body", "body": body, "more_body": True})
    if not exchange.is_whole:  # closed while the client sends, the connection would lose the answer
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(LINGER_SECONDS):
                await _disconnect(exchange.receive)
    await exchange.send({"type": "http.response.body", "body": b""})


async def send_answer(exchange: Exchange, status: int, headers: Mapping[str, str], body: bytes) -> None:
    """Sends a whole answer."""
    await exchange.send(start_of_answer(status, {**headers, "content-length": str(len(body))}))
    await exchange.send({"type": "http.response.body", "body": body})


def start_of_answer(status: int, headers: Mapping[str, str]) -> Message:
    """The message that begins an answer."""
    encoded = [(name.encode(), value.encode("latin-1")) for name, value in headers.items()]
    return {"type": "http.response.start", "status": status, "headers": encoded}
