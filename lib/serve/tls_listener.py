"""The HTTP listener: uvicorn with limits on slow or hostile clients, and an end that loses no request."""

from __future__ import annotations

import asyncio
import signal
from types import FrameType
from typing import Any

import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from lib.config.serve_settings import ServeSettings
from lib.serve.event_log import Log
from lib.serve.gateway import Gateway

LAST_WORDS_SECONDS = 2.0  # for what was on its way when the listener closed


def protocol(settings: ServeSettings) -> type[H11Protocol]:
    """HTTP/1.1 with a limit on connections, on the time for headers, and on the time to read an answer's end."""

    class Protocol(H11Protocol):
        def __init__(self, *arguments: Any, **options: Any):
            super().__init__(*arguments, **options)
            self.app_state = {**self.app_state, "abort": self._abort}
            self.waiting_for_headers: asyncio.TimerHandle | None = None

        def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
            super().connection_made(transport)
            if len(self.connections) > settings.max_connections:
                self._abort()
            self._await_headers()

        def data_received(self, data: bytes) -> None:
            # What is no part of a request that is being answered has to become one, in time: headers, byte by byte,
            # or the rest of a body that was refused already.
            self._await_headers()
            super().data_received(data)
            if self.cycle is not None and not self.cycle.response_complete:
                self._stop_waiting()

        def connection_lost(self, exc: Exception | None) -> None:
            self._stop_waiting()
            super().connection_lost(exc)

        def timeout_keep_alive_handler(self) -> None:
            super().timeout_keep_alive_handler()
            self.loop.call_later(settings.write_seconds, self._abort)

        def _await_headers(self) -> None:
            if self.waiting_for_headers is None:
                self.waiting_for_headers = self.loop.call_later(settings.read_seconds, self._abort)

        def _stop_waiting(self) -> None:
            if self.waiting_for_headers is not None:
                self.waiting_for_headers.cancel()
                self.waiting_for_headers = None

        def _abort(self) -> None:
            self.transport.abort()

    return Protocol


class Listener(uvicorn.Server):
    """Takes requests until a signal: then readiness turns off, requests under way are finished, and it closes."""

    def __init__(self, uvicorn_config: uvicorn.Config, gateway: Gateway, settings: ServeSettings, log: Log):
        super().__init__(uvicorn_config)
        self.gateway, self.settings, self.log = gateway, settings, log
        self.loop = asyncio.get_running_loop()
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

    async def shutdown(self, sockets: Any = None) -> None:
        """Closes the listener first; requests that were on their way still arrive, and are refused."""
        for server in self.servers:
            server.close()
        deadline = self.loop.time() + LAST_WORDS_SECONDS
        while self.server_state.connections and not self.force_exit and self.loop.time() < deadline:
            await asyncio.sleep(0.05)
        await super().shutdown(sockets)
