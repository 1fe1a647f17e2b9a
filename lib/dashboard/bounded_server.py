"""A web server whose connections are bounded, in number and in how long they may say nothing."""

from __future__ import annotations

import threading
from typing import Any

from werkzeug.serving import ThreadedWSGIServer, WSGIRequestHandler

CONNECTIONS = 256  # at a time; one more is closed
SILENT_SECONDS = 10.0  # in the middle of a request, then its connection is closed


class _Handler(WSGIRequestHandler):
    timeout = SILENT_SECONDS


class BoundedServer(ThreadedWSGIServer):
    """Werkzeug's server of a thread for each connection, of which there are CONNECTIONS at most."""

    def __init__(self, host: str, port: int, app: Any, fd: int):
        super().__init__(host, port, app, handler=_Handler, fd=fd)
        self._places = threading.BoundedSemaphore(CONNECTIONS)

    def process_request(self, request: Any, client_address: Any) -> None:
        if self._places.acquire(blocking=False):
            super().process_request(request, client_address)
        else:
            self.shutdown_request(request)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._places.release()
