"""The ASGI application before the backends: who may come in, which route answers, what is logged afterwards."""

from __future__ import annotations

import asyncio
import functools
import ipaddress
import json
import re
import secrets
import time
import traceback
from collections.abc import Callable, Coroutine
from typing import Any

import httpx2
from starlette.datastructures import Headers
from starlette.middleware.cors import CORSMiddleware
from starlette.types import Message, Receive, Scope, Send

from lib.config.serve_settings import ServeSettings
from lib.serve import openai_requests, prometheus_metrics
from lib.serve.api_keys import Keys
from lib.serve.backend_pool import Pool
from lib.serve.completions import Completions, Read
from lib.serve.connections import PROBE_DELAY_SECONDS, STRANGERS_SECONDS, Pace
from lib.serve.event_log import Log, SparingLog
from lib.serve.feedback import LABEL_BYTES, Feedback, Label
from lib.serve.http_exchange import JSON_HEADERS, ClientGone, Exchange, read_body, send_answer, send_refusal
from lib.serve.openai_requests import RequestError
from lib.system.network import network_of

COMPLETIONS = ("/v1/chat/completions", "/v1/completions")
ASKED_METHOD = "access-control-request-method"  # of a browser that asks before it sends
STRANGERS = "everybody without a key"  # no address, and no key's name: it has spaces
REQUEST_ID = re.compile(r"[A-Za-z0-9._-]{1,64}")


class Gateway:
    """The application."""

    def __init__(
        self,
        settings: ServeSettings,
        model: str,
        read: Read,
        pool: Pool,
        client: httpx2.AsyncClient,
        keys: Keys | None,
        log: Log,
        feedback: Feedback | None = None,
    ):
        self.settings, self.model, self.pool, self.log = settings, model, pool, log
        self.sparing_log = SparingLog(log)
        self.use_keys(keys)
        self.cors = self._cors()
        self.metrics, self.feedback = prometheus_metrics.Metrics(pool), feedback
        completions = Completions(settings, read, pool, client, self.metrics, log, feedback)
        self.created = int(time.time())
        self.is_draining = False  # load balancers are told to go elsewhere
        self.is_closed = False  # every new request is refused
        self.active = 0  # requests with a key that are answered, and not refused
        self.pace, self.turns = Pace(), Pace()  # of refusals, and of answers that take no place
        self.probes = Pace(PROBE_DELAY_SECONDS)  # of whoever asks whether this server is up
        self.routes: dict[str, dict[str, Callable[[Exchange], Coroutine[Any, Any, None]]]] = {
            "/healthz": {"GET": self._healthz},
            "/readyz": {"GET": self._readyz},
            "/metrics": {"GET": self._metrics},
            "/v1/models": {"GET": self._models},
            f"/v1/models/{model}": {"GET": self._model},
            COMPLETIONS[0]: {"POST": lambda exchange: completions.complete(exchange, "chat")},
            COMPLETIONS[1]: {"POST": lambda exchange: completions.complete(exchange, "text")},
        }
        if feedback is not None:
            self.routes["/v1/feedback"] = {"POST": lambda exchange: self._label(exchange, feedback)}

    def use_keys(self, keys: Keys | None) -> None:
        """Lets the owners of these keys in, and nobody else from now on; None: whoever is on this machine."""
        self.keys = keys
        self.pool.is_shared = keys is not None and len(keys.digests) > 1

    # ---- Every request

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        headers = Headers(scope=scope)
        given = headers.get("x-request-id", "")
        exchange = Exchange(
            scope, receive, send, headers, given if REQUEST_ID.fullmatch(given) else f"req-{secrets.token_hex(8)}"
        )
        exchange.send = self._sender(exchange, send)
        try:
            try:
                await exchange.pause(0)  # the loop learns meanwhile who has left already, and costs no more
                await self._route(exchange)
            except RequestError as error:
                exchange.record["error"] = error.message
                await self._refuse(exchange, error)
            except ClientGone:
                raise
            except Exception as error:  # a fault of ours; the client learns no more than that
                exchange.record["error"] = repr(error)
                self.log("fault", request_id=exchange.id, traceback=traceback.format_exc())
                await self._refuse(exchange, RequestError(500, "an internal error", "internal_error"))
        except ClientGone as gone:
            exchange.record["gone"] = str(gone)
            exchange.client.abort()
        finally:
            self._log(exchange)

    async def _route(self, exchange: Exchange) -> None:
        path, method = exchange.scope["path"], exchange.scope["method"]
        if self.cors is not None:
            if method == "OPTIONS" and "origin" in exchange.headers and ASKED_METHOD in exchange.headers:
                await self._preflight(exchange, self.cors)
                return
            exchange.send = functools.partial(self.cors.send, send=exchange.send, request_headers=exchange.headers)
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
        if is_open:  # not counted: whoever polls would keep the server from its end
            await self._in_turn(exchange)
            await methods[method](exchange)
            return
        if self.is_closed:
            raise RequestError(503, "the server is shutting down", "shutting_down", retry_seconds=5)
        self.active += 1
        try:
            if path not in COMPLETIONS:
                await self._in_turn(exchange)
            await methods[method](exchange)
        finally:
            self.active -= 1

    def _cors(self) -> CORSMiddleware | None:
        """What browsers are told: pages that are named may call, and no others."""
        # Inside of this application: around it, it would answer at any pace, and wait for ever for who reads nothing.
        if not self.settings.cors_origins:
            return None
        methods, headers = ["GET", "POST"], ["authorization", "content-type", "x-request-id"]
        return CORSMiddleware(self, self.settings.cors_origins, allow_methods=methods, allow_headers=headers)

    async def _preflight(self, exchange: Exchange, cors: CORSMiddleware) -> None:
        """Answers a browser that asks, before a request and without its key, whether a page may send it.

        Raises:
            RequestError: it may not.
        """
        answer = cors.preflight_response(exchange.headers)
        if answer.status_code != 200:
            raise RequestError(400, bytes(answer.body).decode(), "cors_refused")
        await self._in_turn(exchange)
        await answer(exchange.scope, exchange.receive, exchange.send)

    async def _in_turn(self, exchange: Exchange) -> None:
        """Waits where somebody asks too often for what takes no place, and so waits for nobody."""
        if delay := self._delay_seconds(self.turns if exchange.owner else self.probes, exchange):
            exchange.client.rest()
            await exchange.pause(delay)
            exchange.client.work()

    def _delay_seconds(self, pace: Pace, exchange: Exchange) -> float:
        """How long the owner of the key waits, or whoever is where somebody without one is, and all of these."""
        if exchange.owner:
            return pace.delay_seconds(exchange.owner)
        return max(pace.delay_seconds(_network(exchange)), pace.delay_seconds(STRANGERS, STRANGERS_SECONDS))

    def _admit(self, exchange: Exchange) -> None:
        """Notes who asks. Without keys it has to be somebody on this machine, and no web page under a name of its own.

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
        exchange.client.recognise(owner)
        exchange.owner = exchange.record["key"] = owner

    def _sender(self, exchange: Exchange, send: Send) -> Send:
        """`send` with the headers that every answer has, and with a limit on how long the client may not read."""

        async def sending(message: Message) -> None:
            if message["type"] == "http.response.start":
                exchange.status = message["status"]
                extra = [(b"x-request-id", exchange.id.encode())]
                if self.is_draining or exchange.is_last or not exchange.is_whole:
                    extra.append((b"connection", b"close"))
                message = {**message, "headers": [*message["headers"], *extra]}
            try:
                async with asyncio.timeout(self.settings.write_seconds):
                    await send(message)
            except TimeoutError:
                raise ClientGone(f"it read nothing for {self.settings.write_seconds:g} s") from None

        return sending

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
        delay = self._delay_seconds(self.pace, exchange) if error.status < 500 else 0.0
        if exchange.is_whole and exchange.owner and not delay:
            await send_answer(exchange, error.status, headers, error.body)
            return
        exchange.client.ignore()
        await exchange.pause(delay)
        await send_refusal(exchange, error.status, headers, error.body)

    def _log(self, exchange: Exchange) -> None:
        path = exchange.scope["path"]
        known = path if path in self.routes else "other"
        status = exchange.status or 499
        self.metrics.requests.labels(known, str(status)).inc()
        if status == 200 and (known in ("/healthz", "/readyz", "/metrics") or exchange.scope["method"] == "OPTIONS"):
            return  # they ask again and again, and change nothing
        client = exchange.scope.get("client")
        costs = status == 200 and known in COMPLETIONS
        sort = (exchange.owner or _network(exchange), status)
        together = None if exchange.owner else (STRANGERS, status)
        log = self.log if costs else functools.partial(self.sparing_log, sort, together=together)
        log(
            "request",
            request_id=exchange.id,
            method=exchange.scope["method"],
            path=known,
            status=status,
            seconds=round(exchange.seconds, 4),
            client=client[0] if client else None,
            **exchange.record,
        )

    # ---- Routes other than completions

    async def _healthz(self, exchange: Exchange) -> None:
        await send_answer(exchange, 200, JSON_HEADERS, b'{"status": "ok"}')

    async def _readyz(self, exchange: Exchange) -> None:
        state = "draining" if self.is_draining else "ready" if self.pool.is_ready else "no backend is up"
        body = json.dumps({"status": state}).encode()
        await send_answer(exchange, 200 if state == "ready" else 503, JSON_HEADERS, body)

    async def _metrics(self, exchange: Exchange) -> None:
        await send_answer(exchange, 200, {"content-type": prometheus_metrics.CONTENT_TYPE}, self.metrics.text())

    async def _label(self, exchange: Exchange, feedback: Feedback) -> None:
        given = openai_requests.read(Label, await read_body(exchange, LABEL_BYTES, self.settings.read_seconds))
        await feedback.take(exchange.owner, given)
        exchange.record["label"] = given.label
        self.metrics.labels.labels(str(given.label).lower()).inc()
        body = json.dumps({"object": "feedback", "id": given.id, "label": given.label}).encode()
        await send_answer(exchange, 200, JSON_HEADERS, body)

    async def _models(self, exchange: Exchange) -> None:
        await send_answer(exchange, 200, JSON_HEADERS, json.dumps({"object": "list", "data": [self._card()]}).encode())

    async def _model(self, exchange: Exchange) -> None:
        await send_answer(exchange, 200, JSON_HEADERS, json.dumps(self._card()).encode())

    def _card(self) -> dict[str, object]:
        return {"id": self.model, "object": "model", "created": self.created, "owned_by": "tandem"}


def _network(exchange: Exchange) -> str:
    """Where a request comes from."""
    return network_of((exchange.scope.get("client") or ("", 0))[0])


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
