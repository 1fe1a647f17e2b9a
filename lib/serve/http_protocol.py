"""HTTP/1.1 by uvicorn and h11, which parse no more at a time than a hostile client may cost the others.

h11 is exact and slow: 30 microseconds for a piece of one byte, so a quarter of a megabyte of them keeps the event loop
for a second. So a request's headers are parsed when they are all there, and are few; and its body only when the
application asks for it, which it does for somebody who may send one: in pieces that are neither short nor long, however
they come. What comes after a refusal is thrown away unparsed.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
from typing import Any

import h11
from uvicorn.protocols.http.flow_control import FlowControl
from uvicorn.protocols.http.h11_impl import H11Protocol

from lib.config.serve_settings import ServeSettings
from lib.serve.chunked_body import SIZE, ChunkedBody, FalseChunk, take_end
from lib.serve.connections import Connection, Connections
from lib.serve.http_exchange import LINGER_SECONDS

HEAD_END = re.compile(rb"\n\r?\n")
HEAD_BYTES = 16 * 1024  # of a request line and its headers
HEAD_LINES = 64
HELD_BYTES = 64 * 1024  # received and not parsed
PIECE_BYTES = 64 * 1024  # of a body that are parsed at once, at most
LEAST_BYTES = 4 * 1024  # the same at least, but for its end
MOST_FRAMING = 2  # times what a body may have, of one in chunks with all that is around them


class _Flow(FlowControl):
    """uvicorn's flow control, in which `receive()` asks us for the body."""

    def __init__(self, transport: asyncio.Transport, protocol: Protocol):
        super().__init__(transport)
        self._protocol = protocol

    def pause_reading(self) -> None:
        """Nothing: what is held is limited anyway."""

    def resume_reading(self) -> None:
        self._protocol.give_body()


class Protocol(H11Protocol):
    """One connection.

    Applications find it as `client` in the scope's state: `recognise()` says whose key came over it, `rest()` and
    `work()` whether somebody works for it, `ignore()` ends the reading of a request that is refused, and `abort()` cuts
    it off. Where `body_fault` is told, `receive()` gives no more of the body.
    """

    def __init__(self, connection: Connection, connections: Connections, settings: ServeSettings, **options: Any):
        super().__init__(**options)
        self.conn = h11.Connection(h11.SERVER, HEAD_BYTES)
        self.app_state = {**self.app_state, "client": self}
        self.place, self.places, self.settings = connection, connections, settings
        self.held = bytearray()
        self.searched = 0  # of what is held, for the headers' end
        self.rest_of_body = 0
        self.chunks: ChunkedBody | None = None  # where the body comes in some
        self.content = bytearray()  # of them, not parsed yet
        self.body_fault: str | None = None  # why no more of it can be read
        self.is_body_wanted = self.is_ignored = self.is_turned_away = self.is_paused = False
        self.ignored_bytes = 0
        self.lost = asyncio.Event()
        self.waiting_for_headers: asyncio.TimerHandle | None = None
        self.cut_off: asyncio.TimerHandle | None = None

    # ---- For applications

    def recognise(self, owner: str) -> None:
        self.places.recognise(self.place, owner)

    def rest(self) -> None:
        self.places.is_idle(self.place)

    def work(self) -> None:
        self.places.is_busy(self.place)

    def ignore(self) -> None:
        self.is_ignored = True
        self.held.clear()
        self.content.clear()
        self._resume()
        self.places.is_idle(self.place)

    def abort(self) -> None:
        if not self.is_turned_away and not self.is_lost:  # else it is closed a little later, or long ago
            if self.cycle is not None:  # uvicorn would warn that it was not answered
                self.cycle.disconnected = True
            self.transport.abort()

    @property
    def is_lost(self) -> bool:
        return self.lost.is_set()

    async def pause(self, seconds: float) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self.lost.wait()

    @property
    def has_left(self) -> bool:
        return self.is_lost or (self.transport.is_closing() and not self.is_turned_away)

    # ---- For asyncio and uvicorn

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.flow = _Flow(transport, self)
        self.place.close = transport.abort
        self._await_headers()

    def connection_lost(self, exc: Exception | None) -> None:
        self.lost.set()
        # What is due later would keep all this in memory until then, as would a TLS transport that was not closed.
        self._stop_waiting()
        self._unset_keepalive_if_required()
        if self.cut_off is not None:
            self.cut_off.cancel()
        self.places.leave(self.place)
        super().connection_lost(exc)
        self.transport.close()

    def eof_received(self) -> None:
        """The transport closes now: nobody is answered who has said that he hears no more."""
        self._close_in_time()

    def data_received(self, data: bytes) -> None:
        if self.is_ignored:
            self.ignored_bytes += len(data)
            if self.ignored_bytes > self.settings.max_body_bytes:
                self.transport.abort()
            return
        self.held += data
        if self.conn.their_state is h11.IDLE:
            self._read_head()
        elif self.is_body_wanted:
            self.give_body()
        if len(self.held) > HELD_BYTES and not self.is_ignored:
            if self.conn.their_state is not h11.SEND_BODY:  # a next request, before the answer to this one
                self.transport.abort()
            elif not self.is_paused:
                self.is_paused = True
                self.transport.pause_reading()

    def give_body(self) -> None:
        """Parses the next piece of the body, or remembers that it is wanted."""
        if self.conn.their_state is not h11.SEND_BODY or self.is_ignored or self.body_fault is not None:
            return
        self.is_body_wanted = True
        try:
            piece = self._piece() if self.chunks is None else self._piece_of(self.chunks)
        except FalseChunk as fault:
            self.body_fault = str(fault)
            self.cycle.message_event.set()
        else:
            if piece:
                self.is_body_wanted = False
                super().data_received(piece)
        self._resume()

    def _piece(self) -> bytes:
        """What is parsed next of a body whose length is known; nothing where it has to come first."""
        if len(self.held) < min(LEAST_BYTES, self.rest_of_body):
            return b""
        piece = bytes(self.held[: min(PIECE_BYTES, self.rest_of_body)])
        del self.held[: len(piece)]
        self.rest_of_body -= len(piece)
        return piece

    def _piece_of(self, chunks: ChunkedBody) -> bytes:
        """The same of one in chunks, as a chunk: of those that were there, or the last one.

        Raises:
            FalseChunk: something else came.
        """
        if not chunks.has_content_ended:
            self.content += chunks.take(self.held)
            if chunks.bytes > MOST_FRAMING * self.settings.max_body_bytes:
                raise FalseChunk(f"more than {MOST_FRAMING * self.settings.max_body_bytes:,} bytes of chunks")
            is_all = not self.held or SIZE.match(self.held) is None
            if not chunks.has_content_ended and is_all and len(self.content) < LEAST_BYTES:
                return b""
        if self.content:
            piece = b"%x\r\n%s\r\n" % (len(self.content), self.content)
            self.content.clear()
            return piece
        return take_end(self.held) or b"" if chunks.has_content_ended else b""

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self.transport.is_closing():
            self._close_in_time()
        else:
            self.places.is_idle(self.place)
            if self.conn.their_state is h11.SEND_BODY:  # an answer that did not wait for the body
                self.ignore()
                self._cut_off_after(LINGER_SECONDS)
            elif self.held and self.conn.their_state is h11.IDLE:
                self._read_head()

    def send_400_response(self, msg: str) -> None:
        """As uvicorn's, but for a client that still sends, from which a close would take the answer."""
        self._turn_away(b"400 Bad Request")

    def _should_upgrade(self) -> bool:
        """Never, and without uvicorn's advice in the log to install what it would take: a server may pass over it."""
        return False

    def timeout_keep_alive_handler(self) -> None:
        super().timeout_keep_alive_handler()
        self._close_in_time()

    def _close_in_time(self) -> None:
        """A transport that closes waits for ever for a client that does not read what it still has for him."""
        self.places.is_idle(self.place)
        self._cut_off_after(self.settings.write_seconds)

    def _cut_off_after(self, seconds: float) -> None:
        if self.cut_off is not None:
            seconds = min(seconds, self.cut_off.when() - self.loop.time())
            self.cut_off.cancel()
        if not self.is_lost:
            self.cut_off = self.loop.call_later(seconds, self.transport.abort)

    # ---- The headers of a request

    def _read_head(self) -> None:
        """Parses a request's headers once they are all there, in time."""
        self._await_headers()
        self._unset_keepalive_if_required()
        end = HEAD_END.search(self.held, max(0, self.searched - 2))
        size = end.end() if end else len(self.held)
        if size > HEAD_BYTES or self.held.count(b"\n", 0, size) > HEAD_LINES + 2:
            self._turn_away(b"431 Request Header Fields Too Large")
            return
        self.searched = len(self.held)
        if end is None:
            return
        head = bytes(self.held[:size])
        del self.held[:size]
        self.searched = 0
        self.is_body_wanted, self.body_fault = False, None
        self._stop_waiting()
        self.places.is_busy(self.place)
        super().data_received(head)
        if self.conn.their_state is h11.SEND_BODY:
            headers = dict(self.headers)
            self.chunks = ChunkedBody() if b"transfer-encoding" in headers else None
            self.rest_of_body = int(headers.get(b"content-length", b"0"))

    def _turn_away(self, status: bytes) -> None:
        """Answers what is no request, and closes."""
        self.is_turned_away = True
        self.ignore()
        self.transport.write(b"HTTP/1.1 %s\r\ncontent-length: 0\r\nconnection: close\r\n\r\n" % status)
        if self.cycle is not None and not self.cycle.response_complete:  # of its body: the application hears no more
            self.cycle.disconnected = True
            self.cycle.message_event.set()
        self._cut_off_after(LINGER_SECONDS)

    def _await_headers(self) -> None:
        if self.waiting_for_headers is None:
            self.waiting_for_headers = self.loop.call_later(self.settings.read_seconds, self.transport.abort)

    def _stop_waiting(self) -> None:
        if self.waiting_for_headers is not None:
            self.waiting_for_headers.cancel()
            self.waiting_for_headers = None

    def _resume(self) -> None:
        if self.is_paused and len(self.held) <= HELD_BYTES:
            self.is_paused = False
            self.transport.resume_reading()
