"""A web server whose connections are bounded, in number and in how long they may say nothing."""

from __future__ import annotations

import contextlib
import socket
import threading
from typing import Any

from werkzeug.serving import ThreadedWSGIServer, WSGIRequestHandler

from lib.system.handshake import to_push_out
from lib.system.network import network_of

CONNECTIONS = 256  # at a time
SILENT_SECONDS = 10.0  # in the middle of a request, then its connection is closed
PUSHED_OUT_SECONDS = 1.0  # until the thread of a connection that made room has ended


class _Handler(WSGIRequestHandler):
    timeout = SILENT_SECONDS


class BoundedServer(ThreadedWSGIServer):
    """Werkzeug's server of a thread for each connection, of which there are CONNECTIONS at most.

    One more takes the place of the oldest of the address that has most: a page's own connections last for as long as
    an answer. Where all threads compute answers, whose askers may be gone, it is closed.
    """

    def __init__(self, host: str, port: int, app: Any, fd: int):
        super().__init__(host, port, app, handler=_Handler, fd=fd)
        self._open: dict[socket.socket, str] = {}  # its network, in the order in which they came
        self._lock = threading.Lock()
        self._room = threading.BoundedSemaphore(CONNECTIONS)

    def process_request(self, request: Any, client_address: Any) -> None:
        if not self._room.acquire(blocking=False):
            self._push_out()
            if not self._room.acquire(timeout=PUSHED_OUT_SECONDS):
                self.shutdown_request(request)
                return
        with self._lock:
            self._open[request] = network_of(str(client_address[0]))
        try:
            super().process_request(request, client_address)
        except BaseException:  # the system has no thread left
            self._leave(request)
            raise

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._leave(request)

    def _push_out(self) -> None:
        with self._lock:
            if self._open:
                oldest = to_push_out(self._open)
                del self._open[oldest]
                with contextlib.suppress(OSError):  # it has hung up
                    oldest.shutdown(socket.SHUT_RDWR)  # which ends its thread, or its answer

    def _leave(self, request: Any) -> None:
        with self._lock:
            self._open.pop(request, None)
        self._room.release()
