"""The listener: uvicorn on connections that count from their first packet on, and an end that loses no request.

asyncio's own listener says nothing of a connection before its TLS handshake is over, which may be never. Here a
connection costs a socket and no more until something comes over it, and then waits for its turn.
"""

from __future__ import annotations

import asyncio
import functools
import select
import signal
import socket
from collections import deque
from types import FrameType

import uvicorn

from lib.config.serve_settings import ServeSettings
from lib.serve.connections import Connection, Connections
from lib.serve.event_log import Log
from lib.serve.gateway import Gateway
from lib.serve.http_protocol import Protocol

LAST_ACCEPTING_SECONDS = 0.2  # at the end, for all whom the system has connected
LAST_WORDS_SECONDS = 2.0  # for what was on its way when the listener closed
BACKLOG = 4096  # connections that wait to be accepted; systems make it less
ACCEPTED_AT_ONCE = 256  # of these, before others are served, or as many as this takes:
ACCEPTING_SECONDS = 0.002  # where each has to make room for itself among a thousand addresses
WELCOMED_AT_ONCE = {"http": 2, "https": 1}  # of those that say something; a handshake takes a millisecond or two
SWEEP_SECONDS = 0.02  # between two looks at all of those for one that has left
NO_FILES_SECONDS = 0.1  # until it is tried again where the system has no file for a connection


Speaking = tuple[socket.socket, Connection]


class Listener(uvicorn.Server):
    """Takes requests until a signal: then readiness turns off, requests under way are finished, and it closes."""

    def __init__(self, uvicorn_config: uvicorn.Config, gateway: Gateway, settings: ServeSettings, log: Log):
        super().__init__(uvicorn_config)
        self.gateway, self.settings, self.log = gateway, settings, log
        self.loop = asyncio.get_running_loop()
        self.connections = Connections(settings.max_connections, settings.most_of_address)
        self.listening: list[socket.socket] = []
        self.silent: dict[socket.socket, asyncio.TimerHandle] = {}  # connections that have said nothing, and their ends
        self.speaking: dict[str, deque[Speaking]] = {}  # those that wait to be listened to, by address, the next first
        self.next_sweep = 0.0  # by the loop's clock
        self.is_welcoming = False  # some of them, in the next pass of the loop
        self.welcoming: set[asyncio.Task[None]] = set()
        self.draining: asyncio.Task[None] | None = None

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """A first signal drains; a second one ends at once."""
        self.loop.call_soon_threadsafe(self._end, signal.Signals(sig).name)

    def _end(self, why: str) -> None:
        if self.draining is None:
            self.draining = asyncio.create_task(self._drain(why))
        else:
            self.should_exit = self.force_exit = True

    async def _drain(self, why: str) -> None:
        """Answers new requests for serve.drain_seconds more, while load balancers turn away; then begins none."""
        self.gateway.is_draining = True
        self.log("drain", reason=why, active=self.gateway.active)
        await asyncio.sleep(self.settings.drain_seconds)
        self.gateway.is_closed = True
        while self.gateway.active:
            await asyncio.sleep(0.05)
        self.should_exit = True

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Takes connections from now on."""
        self.servers = []
        self.listening = sockets or []
        for listening in self.listening:
            listening.setblocking(False)
            self.loop.add_reader(listening, self._accept, listening)
        self.started = True

    def _accept(self, listening: socket.socket) -> bool:
        """Counts those who wait, which costs little: left to the system, they would fill its queue for all others.

        Returns whether more may wait.
        """
        until = self.loop.time() + ACCEPTING_SECONDS
        for _ in range(ACCEPTED_AT_ONCE):
            if self.loop.time() > until:
                break
            try:
                accepted, address = listening.accept()
            except BlockingIOError:
                return False
            except (InterruptedError, ConnectionAbortedError):  # one of them is gone
                continue
            except OSError:  # no files, or no memory: those who wait are taken when there are some
                self.loop.remove_reader(listening)
                self.loop.call_later(NO_FILES_SECONDS, self._accept_again, listening)
                return False
            if has_left(accepted):
                accepted.close()
                continue
            if self.loop.time() > self.next_sweep and self.connections.is_full(address[0]):
                self._sweep()
            connection = self.connections.take(address[0])
            if connection is None:
                accepted.close()
                continue
            accepted.setblocking(False)
            connection.close = functools.partial(self._close_silent, accepted)
            self.silent[accepted] = self.loop.call_later(self.settings.read_seconds, self._leave, accepted, connection)
            # By its number: asyncio would put the socket itself into words, addresses and all, for an error of its own.
            self.loop.add_reader(accepted.fileno(), self._hear, accepted, connection)
        return True

    def _sweep(self) -> None:
        """Closes those that have left and are not listened to yet: no other one has to go for a new one then."""
        self.next_sweep = self.loop.time() + SWEEP_SECONDS
        for accepted, connection in [one for waiting in self.speaking.values() for one in waiting]:
            if not connection.is_over and has_left(accepted):
                self.connections.leave(connection)
                connection.close()

    def _close_silent(self, accepted: socket.socket) -> None:
        self.silent.pop(accepted).cancel()
        self.loop.remove_reader(accepted.fileno())
        accepted.close()

    def _leave(self, accepted: socket.socket, connection: Connection) -> None:
        self.connections.leave(connection)
        self._close_silent(accepted)

    def _hear(self, accepted: socket.socket, connection: Connection) -> None:
        """Lines up a connection over which something came, if only its end."""
        self.silent.pop(accepted).cancel()
        self.loop.remove_reader(accepted.fileno())
        connection.close = accepted.close
        self.connections.hear(connection)
        self.speaking.setdefault(connection.address, deque()).append((accepted, connection))
        if not self.is_welcoming:
            self.is_welcoming = True
            self.loop.call_soon(self._welcome_some)

    def _welcome_some(self) -> None:
        """Listens to the next few, and to more when everybody else has had a turn."""
        for _ in range(WELCOMED_AT_ONCE["http" if self.config.ssl is None else "https"]):
            if (one := self._next_speaking()) is None:
                break
            accepted, connection = one
            task = asyncio.create_task(self._welcome(accepted, connection))
            connection.close = task.cancel
            self.welcoming.add(task)
            task.add_done_callback(self.welcoming.discard)
        self.is_welcoming = bool(self.speaking)
        if self.is_welcoming:
            self.loop.call_soon(self._welcome_some)

    def _next_speaking(self) -> Speaking | None:
        """The next one that is still there; addresses take turns, or who opens many would keep others waiting."""
        while self.speaking:
            address = next(iter(self.speaking))
            waiting = self.speaking.pop(address)
            accepted, connection = waiting.popleft()
            if waiting:
                self.speaking[address] = waiting
            if connection.is_over:  # closed, to make room for another one
                continue
            if not has_left(accepted):
                return accepted, connection
            self.connections.leave(connection)
            accepted.close()
        return None

    def _accept_again(self, listening: socket.socket) -> None:
        if listening in self.listening:
            self.loop.add_reader(listening, self._accept, listening)

    async def _welcome(self, accepted: socket.socket, connection: Connection) -> None:
        """Makes a connection of HTTP of one of TCP, after the TLS handshake if there is to be one."""

        def protocol() -> Protocol:
            return Protocol(
                connection,
                self.connections,
                self.settings,
                config=self.config,
                server_state=self.server_state,
                app_state={},
            )

        limit = None if self.config.ssl is None else self.settings.read_seconds
        try:
            await self.loop.connect_accepted_socket(
                protocol, accepted, ssl=self.config.ssl, ssl_handshake_timeout=limit, ssl_shutdown_timeout=limit
            )
        except (OSError, asyncio.CancelledError):  # no handshake, in time, or at all; or its place is another's
            self.connections.leave(connection)
            accepted.close()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Closes the listener first; requests that were on their way still arrive, and are refused."""
        for listening in self.listening:
            self.loop.remove_reader(listening)
            until = self.loop.time() + LAST_ACCEPTING_SECONDS
            while self._accept(listening) and self.loop.time() < until:
                pass  # who is connected already, for all that a client knows, is listened to
            listening.close()
        self.listening = []
        deadline = self.loop.time() + LAST_WORDS_SECONDS
        while (
            (self.silent or self.speaking or self.welcoming or self.server_state.connections)
            and not self.force_exit
            and self.loop.time() < deadline
        ):
            await asyncio.sleep(0.05)
        for accepted in list(self.silent):
            self._close_silent(accepted)
        await super().shutdown(sockets)


def has_left(accepted: socket.socket) -> bool:
    """Whether the other end has closed a connection already, as far as the system tells without reading from it."""
    poll = select.poll()
    # Linux's POLLRDHUP; macOS' POLLHUP says the same there, and only to who asks. Errors and resets are told unasked.
    poll.register(accepted, select.POLLHUP | getattr(select, "POLLRDHUP", 0))
    return bool(poll.poll(0))
