"""A web server whose connections are bounded, in number and in how long they may say nothing."""

from __future__ import annotations

import contextlib
import socket
import threading
from typing import Any

from werkzeug.serving import ThreadedWSGIServer, WSGIRequestHandler

CONNECTIONS = 256  # at a time
SILENT_SECONDS = 10.0  # in the middle of a request, then its connection is closed


class _Handler(WSGIRequestHandler):
    timeout = SILENT_SECONDS


class BoundedServer(ThreadedWSGIServer):
    """Werkzeug's server of a thread for each connection, of which there are CONNECTIONS at most.

    One more takes the place of the oldest: a page's own connections last for as long as an answer.
    """

    def __init__(self, host: str, port: int, app: Any, fd: int):
        super().__init__(host, port, app, handler=_Handler, fd=fd)
        self._open: dict[socket.socket, None] = {}  # in the order in which they came
        self._lock = threading.Lock()

    def process_request(self, request: Any, client_address: Any) -> None:
        with self._lock:
            if len(self._open) >= CONNECTIONS:
                oldest = next(iter(self._open))
                del self._open[oldest]
                with contextlib.suppress(OSError):  # it has hung up
                    oldest.shutdown(socket.SHUT_RDWR)  # which ends its thread
            self._open[request] = None
        super().process_request(request, client_address)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            with self._lock:
                self._open.pop(request, None)
