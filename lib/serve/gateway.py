"""The ASGI application before the backends: who may come in, what may be asked, who waits, what is told afterwards.

A request is read and judged whole before it may wait for a backend, so that nothing malformed, too large, too slow or
unauthorised ever occupies one. From there on it is one task, which ends when the client goes, a limit is reached, or
the last byte is sent, and the backend's slot with it.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import ipaddress
import json
import re
import secrets
import time
import traceback
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx2
import prometheus_client as prometheus
from starlette.datastructures import Headers
from starlette.types import Message, Receive, Scope, Send

from lib.config.schema import ServeSettings
from lib.serve import openai_requests
from lib.serve.api_keys import Keys
from lib.serve.backend_pool import Backend, Pool, QueueFull
from lib.serve.backend_process import SECRET_HEADER
from lib.serve.openai_requests import Ask, Kind, Limits, RequestError

ATTEMPTS = 2  # a request of which nothing was answered yet may try another backend once
REQUEST_ID = re.compile(r"[A-Za-z0-9._-]{1,64}")
SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)
STREAM_HEADERS = {"content-type": "text/event-stream", "cache-control": "no-cache", "x-accel-buffering": "no"}
JSON_HEADERS = {"content-type": "application/json"}


Log = Callable[..., None]


class BackendLost(Exception):
    """A backend did not answer as it should; the request may be tried on another."""


class ClientGone(Exception):
    """Nobody is there any more to be answered."""


class Metrics:
    """What Prometheus asks for, in a registry of its own."""

    def __init__(self, pool: Pool) -> None:
        self.registry = prometheus.CollectorRegistry()
        options: dict[str, Any] = {"registry": self.registry}
        self.requests = prometheus.Counter("tandem_requests", "Requests answered", ["path", "status"], **options)
        self.seconds = prometheus.Histogram(
            "tandem_request_seconds", "Whole requests for completions", buckets=SECONDS, **options
        )
        self.first_token = prometheus.Histogram(
            "tandem_first_token_seconds", "From a request to its first token", buckets=SECONDS, **options
        )
        self.queue_seconds = prometheus.Histogram(
            "tandem_queue_seconds", "Waiting for a backend", buckets=SECONDS, **options
        )
        self.tokens = prometheus.Counter("tandem_tokens", "Tokens read and generated", ["kind"], **options)
        self.lost = prometheus.Counter(
            "tandem_backend_failures", "Requests that a backend failed", ["backend"], **options
        )
        waiting = prometheus.Gauge("tandem_queue_length", "Requests that wait for a backend", **options)
        waiting.set_function(lambda: pool.queue_length)
        told: dict[str, tuple[str, Callable[[Backend], float]]] = {
            "in_flight": ("Requests on a backend", lambda backend: backend.in_flight),
            "up": ("Whether a backend takes requests", lambda backend: backend.is_up),
            "restarts": ("Starts of a backend after the first", lambda backend: backend.restarts),
            "tokens_per_second": ("Measured speed", lambda backend: backend.tokens_per_second or 0.0),
        }
        for name, (meaning, value) in told.items():
            gauge = prometheus.Gauge(f"tandem_backend_{name}", meaning, ["backend"], **options)
            for backend in pool.backends:
                gauge.labels(backend.name).set_function(functools.partial(value, backend))

    def text(self) -> bytes:
        return prometheus.generate_latest(self.registry)


@dataclass
class Exchange:
    """One request and what has become of it."""

    scope: Scope
    receive: Receive
    send: Send
    headers: Headers
    id: str
    owner: str = ""
    since: float = field(default_factory=time.monotonic)
    status: int = 0  # of the answer; 0: not begun
    is_told: bool = False  # something of the answer is with the client
    is_stream: bool = False
    record: dict[str, Any] = field(default_factory=dict)  # for the log

    @property
    def seconds(self) -> float:
        return time.monotonic() - self.since


class Gateway:
    """The application."""

    def __init__(
        self,
        settings: ServeSettings,
        limits: Limits,
        count_tokens: Callable[[str], int] | None,
        pool: Pool,
        client: httpx2.AsyncClient,
        keys: Keys | None,
        log: Log,
    ):
        self.settings, self.limits, self.count_tokens = settings, limits, count_tokens
        self.pool, self.client, self.keys, self.log = pool, client, keys, log
        self.metrics = Metrics(pool)
        self.created = int(time.time())
        self.is_draining = False  # leave me: to those who balance loads
        self.is_closed = False  # to everybody
        self.active = 0
        self.routes: dict[str, dict[str, Callable[[Exchange], Coroutine[Any, Any, None]]]] = {
            "/healthz": {"GET": self._healthz},
            "/readyz": {"GET": self._readyz},
            "/metrics": {"GET": self._metrics},
            "/v1/models": {"GET": self._models},
            f"/v1/models/{limits.model}": {"GET": self._model},
            "/v1/chat/completions": {"POST": lambda exchange: self._complete(exchange, "chat")},
            "/v1/completions": {"POST": lambda exchange: self._complete(exchange, "text")},
        }

    # ---- Every request ------------------------------------------------------------------------------------------------

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        headers = Headers(scope=scope)
        given = headers.get("x-request-id", "")
        exchange = Exchange(
            scope, receive, send, headers, given if REQUEST_ID.fullmatch(given) else f"req-{secrets.token_hex(8)}"
        )
        exchange.send = self._sender(exchange, send)
        self.active += 1
        try:
            try:
                await self._route(exchange)
            except RequestError as error:
                exchange.record["error"] = error.message
                await self._refuse(exchange, error)
            except ClientGone:
                raise
            except Exception as error:  # ours to mend; the client learns no more than that
                exchange.record["error"] = repr(error)
                self.log("fault", request_id=exchange.id, traceback=traceback.format_exc())
                await self._refuse(exchange, RequestError(500, "an internal error", "internal_error"))
        except ClientGone as gone:
            exchange.record["gone"] = str(gone)
            self._abort(exchange)
        finally:
            self.active -= 1
            self._note(exchange)

    async def _route(self, exchange: Exchange) -> None:
        path, method = exchange.scope["path"], exchange.scope["method"]
        is_open = path in ("/healthz", "/readyz")
        if not is_open:
            self._admit(exchange)
        methods = self.routes.get(path)
        if methods is None:
            is_model = path.startswith("/v1/models/")
            raise RequestError(
                404,
                "the model does not exist" if is_model else "there is nothing at this address",
                "model_not_found" if is_model else "not_found",
            )
        if method not in methods:
            raise RequestError(405, f"{path} takes {', '.join(methods)}", "method_not_allowed")
        if self.is_closed and not is_open:
            raise RequestError(503, "the server is shutting down", "shutting_down", retry_seconds=5)
        await methods[method](exchange)

    def _admit(self, exchange: Exchange) -> None:
        """Who asks. Without keys it is somebody on this machine, and no web page that goes by a name of its own.

        Raises:
            RequestError: it has no key of ours.
        """
        if self.keys is None:
            host = exchange.headers.get("host", "")
            if not _is_local_name(host):
                # A page may have its own name resolve to 127.0.0.1 (DNS rebinding), and then read what we answer.
                raise RequestError(
                    403, f"without keys this server answers to localhost alone, not {host[:100]!r}", "wrong_host"
                )
            exchange.owner = "local"
            return
        scheme, _, key = exchange.headers.get("authorization", "").partition(" ")
        owner = self.keys.owner(key.strip()) if scheme.lower() == "bearer" else None
        if owner is None:
            raise RequestError(401, "no valid API key: send it as `Authorization: Bearer KEY`", "invalid_api_key")
        exchange.owner = exchange.record["key"] = owner

    def _sender(self, exchange: Exchange, send: Send) -> Send:
        """`send` with the headers that every answer has, and with a limit on how long the client may not read."""

        async def sending(message: Message) -> None:
            if message["type"] == "http.response.start":
                exchange.status = message["status"]
                extra = [(b"x-request-id", exchange.id.encode())]
                if self.is_draining:
                    extra.append((b"connection", b"close"))
                message = {**message, "headers": [*message["headers"], *extra]}
            try:
                async with asyncio.timeout(self.settings.write_seconds):
                    await send(message)
            except TimeoutError:
                raise ClientGone(f"it read nothing for {self.settings.write_seconds:g} s") from None

        return sending

    def _abort(self, exchange: Exchange) -> None:
        """Cuts the connection; closing it would wait for a client that does not read."""
        abort = exchange.scope.get("state", {}).get("abort")
        if abort is not None:
            abort()

    async def _refuse(self, exchange: Exchange, error: RequestError) -> None:
        if exchange.status:  # too late for a status: the stream's last event says it, and no [DONE] follows
            if exchange.is_stream:
                await exchange.send({"type": "http.response.body", "body": b"data: " + error.body + b"\n\n"})
            return
        headers = dict(JSON_HEADERS)
        if error.status == 401:
            headers["www-authenticate"] = "Bearer"
        if error.retry_seconds is not None:
            headers["retry-after"] = str(error.retry_seconds)
        await _answer(exchange, error.status, headers, error.body)

    def _note(self, exchange: Exchange) -> None:
        path = exchange.scope["path"]
        known = path if path in self.routes else "other"
        status = exchange.status or 499
        self.metrics.requests.labels(known, str(status)).inc()
        if known in ("/healthz", "/readyz", "/metrics") and status == 200:
            return
        client = exchange.scope.get("client")
        self.log(
            "request",
            request_id=exchange.id,
            method=exchange.scope["method"],
            path=known,
            status=status,
            seconds=round(exchange.seconds, 4),
            client=client[0] if client else None,
            **exchange.record,
        )

    # ---- What is no completion ----------------------------------------------------------------------------------------

    async def _healthz(self, exchange: Exchange) -> None:
        await _answer(exchange, 200, JSON_HEADERS, b'{"status": "ok"}')

    async def _readyz(self, exchange: Exchange) -> None:
        state = "draining" if self.is_draining else "ready" if self.pool.is_ready else "no backend is up"
        body = json.dumps({"status": state}).encode()
        await _answer(exchange, 200 if state == "ready" else 503, JSON_HEADERS, body)

    async def _metrics(self, exchange: Exchange) -> None:
        await _answer(exchange, 200, {"content-type": prometheus.CONTENT_TYPE_LATEST}, self.metrics.text())

    async def _models(self, exchange: Exchange) -> None:
        await _answer(exchange, 200, JSON_HEADERS, json.dumps({"object": "list", "data": [self._card()]}).encode())

    async def _model(self, exchange: Exchange) -> None:
        await _answer(exchange, 200, JSON_HEADERS, json.dumps(self._card()).encode())

    def _card(self) -> dict[str, Any]:
        return {"id": self.limits.model, "object": "model", "created": self.created, "owned_by": "tandem"}

    # ---- Completions --------------------------------------------------------------------------------------------------

    async def _complete(self, exchange: Exchange, kind: Kind) -> None:
        request = openai_requests.parse(kind, await self._body(exchange))
        ask = openai_requests.ask(kind, request, self.limits, await self._tokens(request.texts()))
        exchange.is_stream = exchange.record["stream"] = ask.stream
        try:
            await _while_listening(exchange.receive, self._serve(exchange, ask))
        finally:
            self.metrics.seconds.observe(exchange.seconds)

    async def _body(self, exchange: Exchange) -> bytes:
        """The whole body.

        Raises:
            RequestError: it is too large, too slow, or not JSON by its own word (which makes a browser ask first).
            ClientGone: the connection ended in its middle.
        """
        most = self.settings.max_body_bytes
        too_large = RequestError(413, f"the body has more than {most} bytes", "request_too_large")
        if exchange.headers.get("content-type", "").partition(";")[0].strip().lower() != "application/json":
            raise RequestError(415, "the content-type has to be application/json", "unsupported_media_type")
        length = exchange.headers.get("content-length", "0")
        if not length.isdecimal() or int(length) > most:
            raise too_large
        parts, size = [], 0
        try:
            async with asyncio.timeout(self.settings.read_seconds):
                while True:
                    message = await exchange.receive()
                    if message["type"] == "http.disconnect":
                        raise ClientGone("in the middle of its body")
                    parts.append(message.get("body", b""))
                    size += len(parts[-1])
                    if size > most:
                        raise too_large
                    if not message.get("more_body"):
                        return b"".join(parts)
        except TimeoutError:
            raise RequestError(
                408, f"the body was not there after {self.settings.read_seconds:g} s", "timeout"
            ) from None

    async def _tokens(self, texts: Sequence[str]) -> int:
        """Tokens of all texts; their bytes, which are never fewer, where there is no tokenizer."""
        text = "".join(texts)
        size = len(text.encode())
        if self.count_tokens is None:
            return size
        # Long ones on a thread: a megabyte takes half a second, during which nobody else would be served.
        return self.count_tokens(text) if size < 4096 else await asyncio.to_thread(self.count_tokens, text)

    async def _serve(self, exchange: Exchange, ask: Ask) -> None:
        """Finds a backend and hands its answer on; a second one where the first failed before it said anything."""
        for attempt in range(1, ATTEMPTS + 1):
            backend = await self._slot(exchange)
            since = time.monotonic()
            try:
                async with asyncio.timeout(self.settings.request_seconds):
                    if ask.stream:
                        await self._stream(exchange, ask, backend)
                    else:
                        await self._whole(exchange, ask, backend)
                return
            except TimeoutError:
                raise RequestError(504, f"not done after {self.settings.request_seconds:g} s", "timeout") from None
            except (BackendLost, httpx2.HTTPError) as error:
                reason = str(error) or type(error).__name__
                self.metrics.lost.labels(backend.name).inc()
                self.log("backend", backend=backend.name, state="failed", reason=reason, request_id=exchange.id)
                self.pool.set_up(backend, False)
                if exchange.is_told or attempt == ATTEMPTS:
                    raise RequestError(
                        502, "the backend was lost in the middle of the answer", "backend_lost"
                    ) from None
            finally:
                self.pool.give_back(backend, exchange.owner, time.monotonic() - since)

    async def _slot(self, exchange: Exchange) -> Backend:
        since = time.monotonic()
        try:
            backend = await self.pool.take(exchange.owner, self.settings.queue_seconds)
        except QueueFull as full:
            message = f"{self.pool.max_queue} requests wait already; try again in {full.retry_seconds} s"
            raise RequestError(429, message, "queue_full", retry_seconds=full.retry_seconds) from None
        except TimeoutError:
            message = f"no backend was free in {self.settings.queue_seconds:g} s"
            raise RequestError(503, message, "busy", retry_seconds=self.pool.retry_seconds()) from None
        waited = time.monotonic() - since
        self.metrics.queue_seconds.observe(waited)
        exchange.record |= {"backend": backend.name, "queue_seconds": round(waited, 4)}
        return backend

    async def _stream(self, exchange: Exchange, ask: Ask, backend: Backend) -> None:
        """Hands the backend's events on as they come."""
        # Closed on every way out: the backend stops generating when its connection ends.
        async with contextlib.aclosing(self._events(exchange, ask, backend)) as blocks:
            async for events in blocks:
                passed = [event for event in events if self._is_for_client(event, ask)]
                if not passed:
                    continue
                if not exchange.status:
                    await exchange.send(_start(200, STREAM_HEADERS))
                exchange.is_told = exchange.is_told or any(openai_requests.data_of(event) for event in passed)
                body = b"".join(openai_requests.renamed(event, ask.model) + b"\n\n" for event in passed)
                await exchange.send({"type": "http.response.body", "body": body, "more_body": True})
        await exchange.send({"type": "http.response.body", "body": b""})

    def _is_for_client(self, event: bytes, ask: Ask) -> bool:
        data = openai_requests.data_of(event)
        return data is None or ask.include_usage or not openai_requests.is_usage(data)

    async def _whole(self, exchange: Exchange, ask: Ask, backend: Backend) -> None:
        """Collects the backend's answer, and sends it when it is whole."""
        if ask.is_streamed_upstream:
            async with contextlib.aclosing(self._events(exchange, ask, backend)) as blocks:
                found = [events async for events in blocks]
            datas = [data for events in found for event in events if (data := openai_requests.data_of(event))]
            answer = json.dumps(openai_requests.assemble(data for data in datas if data != b"[DONE]")).encode()
        else:
            async with self._post(ask, backend) as response:
                answer = await response.aread()
            usage = json.loads(answer)["usage"]
            self._count(exchange, usage)
            backend.count(usage["completion_tokens"], time.monotonic())
        exchange.is_told = True
        await _answer(exchange, 200, JSON_HEADERS, openai_requests.renamed(answer, ask.model))

    async def _events(self, exchange: Exchange, ask: Ask, backend: Backend) -> AsyncGenerator[list[bytes], None]:
        """The events of a backend's stream, as many at a time as came together, the last being [DONE].

        Raises:
            BackendLost: the stream broke off.
        """
        rest, is_first = b"", True
        async with self._post(ask, backend) as response:
            async for block in response.aiter_raw():
                events, rest = openai_requests.split(rest + block)
                datas = [data for event in events if (data := openai_requests.data_of(event))]
                backend.count(len(datas), time.monotonic())
                if datas and is_first:
                    is_first = False
                    self.metrics.first_token.observe(exchange.seconds)
                    exchange.record["first_token_seconds"] = round(exchange.seconds, 4)
                for data in datas[-2:]:
                    if openai_requests.is_usage(data):
                        self._count(exchange, json.loads(data)["usage"])
                yield events
                if datas and datas[-1] == b"[DONE]":
                    return
        raise BackendLost("its stream broke off")

    @contextlib.asynccontextmanager
    async def _post(self, ask: Ask, backend: Backend) -> AsyncIterator[httpx2.Response]:
        """Asks a backend.

        Raises:
            BackendLost: it cannot generate any more.
            RequestError: it refuses what it was asked.
        """
        path = "/v1/chat/completions" if ask.kind == "chat" else "/v1/completions"
        silence = self.settings.stall_seconds if ask.is_streamed_upstream else self.settings.request_seconds
        timeout = httpx2.Timeout(silence, connect=10.0)
        headers = {SECRET_HEADER: backend.secret}
        async with self.client.stream(
            "POST", backend.url + path, json=ask.body, headers=headers, timeout=timeout
        ) as response:
            if response.status_code != 200:
                text = (await response.aread()).decode(errors="replace")[:500]
                # It answers 404 to whatever went wrong, in the request or in itself.
                if response.status_code not in (400, 404) or "generation thread died" in text:
                    raise BackendLost(f"it answers {response.status_code}: {text}")
                with contextlib.suppress(ValueError, KeyError, TypeError):
                    text = json.loads(text)["error"]
                raise RequestError(400, f"the model cannot take this: {text}", "invalid_request")
            yield response

    def _count(self, exchange: Exchange, usage: dict[str, Any]) -> None:
        for kind in ("prompt_tokens", "completion_tokens"):
            self.metrics.tokens.labels(kind).inc(usage[kind])
            exchange.record[kind] = usage[kind]


async def _while_listening(receive: Receive, work: Coroutine[Any, Any, None]) -> None:
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


async def _answer(exchange: Exchange, status: int, headers: dict[str, str], body: bytes) -> None:
    await exchange.send(_start(status, {**headers, "content-length": str(len(body))}))
    await exchange.send({"type": "http.response.body", "body": body})


def _start(status: int, headers: dict[str, str]) -> Message:
    encoded = [(name.encode(), value.encode("latin-1")) for name, value in headers.items()]
    return {"type": "http.response.start", "status": status, "headers": encoded}


def _is_local_name(host: str) -> bool:
    """Whether a Host header is an address, or localhost: what no page on the web can call itself."""
    name = host.rpartition(":")[0] if re.search(r":\d+$", host) else host
    if name.lower() == "localhost":
        return True
    try:
        ipaddress.ip_address(name.strip("[]"))
    except ValueError:
        return False
    return True
