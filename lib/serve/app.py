"""The HTTP application: OpenAI's routes over one generator, for uvicorn.

A request is read and checked whole before it may wait for the generator. Each key has a limited number of requests in
flight and waiting. When a client leaves, its request ends at the next token.
"""

from __future__ import annotations

import asyncio
import re
import secrets
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable
from typing import Any

from prometheus_client import CollectorRegistry, Gauge, Histogram, generate_latest
from prometheus_client import Counter as CounterMetric
from starlette.applications import Starlette
from starlette.datastructures import MutableHeaders
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from lib.config.settings import ServeSettings
from lib.errors import UserError
from lib.serve.completions import Completion
from lib.serve.feedback import Feedback, Label
from lib.serve.generation import Generation, Generator, Piece
from lib.serve.keys import KeyFile
from lib.serve.model import ServedModel
from lib.serve.requests import ChatRequest, RequestError, TextRequest, parse

CLIENT_LEFT = 499  # nginx's status of a client that closed the connection
READ_SECONDS = 10.0  # for a request's body to come
MOST_BODY_BYTES = 1_000_000
BUCKETS_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)
OPEN_PATHS = ("/healthz", "/readyz")
COMPLETION_PATHS = ("/v1/chat/completions", "/v1/completions")
PATHS = (*OPEN_PATHS, *COMPLETION_PATHS, "/v1/models", "/v1/feedback", "/metrics")
REQUEST_ID = re.compile(r"[A-Za-z0-9._-]{1,64}")


class Server:
    """The routes.

    Args:
        name: the one model that clients may ask for.
        keys: None: a client needs none, and has to call the server localhost or by its address.
        log: writes one record.
    """

    def __init__(
        self,
        settings: ServeSettings,
        name: str,
        generator: Generator,
        model: ServedModel,
        keys: KeyFile | None,
        feedback: Feedback | None,
        log: Callable[..., None],
    ) -> None:
        self.settings, self.name, self.generator, self.model = settings, name, generator, model
        self.keys, self.feedback, self.log = keys, feedback, log
        self.in_flight: Counter[str] = Counter()  # requests by key
        self.slots = asyncio.Semaphore(settings.concurrency)
        self.metrics = Metrics(self.in_flight, settings.concurrency)

    def app(self) -> Starlette:
        routes = [
            Route("/v1/chat/completions", self.chat, methods=["POST"]),
            Route("/v1/completions", self.text, methods=["POST"]),
            Route("/v1/models", self.models),
            Route("/v1/models/{name:path}", self.models),
            Route("/metrics", self.show_metrics),
            *(Route(path, self.health) for path in OPEN_PATHS),
        ]
        if self.feedback is not None:
            routes.append(Route("/v1/feedback", self.label, methods=["POST"]))
        middleware = [Middleware(Gate, server=self)]
        if self.keys is None:  # a web page under another name reaches no server of this machine
            hosts = ["localhost", "127.0.0.1", "[::1]", self.settings.host]
            middleware.insert(0, Middleware(TrustedHostMiddleware, allowed_hosts=hosts))
        if origins := [*self.settings.cors_origins]:
            cors = Middleware(CORSMiddleware, allow_origins=origins, allow_methods=["*"], allow_headers=["*"])
            middleware.insert(0, cors)

        def not_served(request: Request, error: Any) -> Response:
            return response_of(RequestError(error.status_code, f"{request.url.path}: {error.detail}"))

        handlers: dict[Any, Any] = {RequestError: lambda _, error: response_of(error), HTTPException: not_served}
        return Starlette(routes=routes, middleware=middleware, exception_handlers=handlers)

    # ---- Routes

    async def health(self, request: Request) -> Response:
        return PlainTextResponse("ok\n")

    async def models(self, request: Request) -> Response:
        """The one model, in a list or by its name."""
        model = {"id": self.name, "object": "model", "created": self.metrics.started, "owned_by": "tandem"}
        if "name" not in request.path_params:
            return JSONResponse({"object": "list", "data": [model]})
        self._require_model(request.path_params["name"])
        return JSONResponse(model)

    def _require_model(self, name: str | None) -> None:
        if name not in (None, self.name):
            message = f"the model {name!r} does not exist; this server has {self.name}"
            raise RequestError(404, message, "model_not_found", "model")

    async def show_metrics(self, request: Request) -> Response:
        return PlainTextResponse(generate_latest(self.metrics.registry))

    async def label(self, request: Request) -> Response:
        assert self.feedback is not None
        label = parse(Label, await self._body(request))
        await asyncio.to_thread(self.feedback.take, request.state.owner, label)
        self.metrics.labels.labels(str(label.label).lower()).inc()
        return JSONResponse({"id": label.id, "label": label.label})

    async def chat(self, request: Request) -> Response:
        return await self._complete(request, parse(ChatRequest, await self._body(request)))

    async def text(self, request: Request) -> Response:
        return await self._complete(request, parse(TextRequest, await self._body(request)))

    # ---- One completion

    async def _body(self, request: Request) -> bytes:
        """A request's body, within its limits of bytes and time."""
        body = bytearray()
        try:
            async with asyncio.timeout(READ_SECONDS):
                async for chunk in request.stream():
                    body += chunk
                    if len(body) > MOST_BODY_BYTES:
                        raise RequestError(413, f"the body has more than {MOST_BODY_BYTES:,} bytes")
        except TimeoutError:
            raise RequestError(408, f"the body did not come within {READ_SECONDS:g} s") from None
        except ClientDisconnect:
            raise RequestError(CLIENT_LEFT, "the client left") from None
        return bytes(body)

    async def _complete(self, request: Request, asked: ChatRequest | TextRequest) -> Response:
        self._require_model(asked.model)
        prompt = await self._prompt(asked)
        room = self.model.context_tokens - len(prompt)
        pieces: asyncio.Queue[Piece] = asyncio.Queue()
        generation = Generation(
            owner=request.state.owner,
            prompt=prompt,
            max_tokens=min(asked.answer_tokens or self.settings.max_tokens, room),
            sampling=asked,
            stops=asked.stops,
            top_logprobs=asked.logprobs_count,
            tools=asked.tool_definitions,
            put=pieces.put_nowait,
        )
        answer = Completion(asked, self.name, len(prompt))
        answered = self._answered(request, generation, pieces, answer)
        if asked.stream:
            events = answer.events(answered)
            return StreamingResponse(events, media_type="text/event-stream", headers={"cache-control": "no-cache"})
        async for _ in answered:
            pass
        return JSONResponse(answer.whole())

    async def _prompt(self, asked: ChatRequest | TextRequest) -> list[int]:
        """A request's token ids. Raises RequestError: the template does not take a message, or a limit is exceeded."""
        model, most, wanted = self.model, self.settings.max_prompt_tokens, asked.answer_tokens or 1
        if max(map(int, asked.logit_bias or ()), default=0) >= model.vocab_size:
            message = f"logit_bias goes beyond the vocabulary of {model.vocab_size}"
            raise RequestError(400, message, "invalid_value", "logit_bias")
        if wanted > self.settings.max_tokens:
            message = f"max_tokens is {wanted}, but at most {self.settings.max_tokens} are allowed"
            raise RequestError(400, message, "invalid_value", "max_tokens")
        try:
            prompt = await asyncio.to_thread(model.prompt_ids, asked)
        except UserError as error:
            raise RequestError(400, str(error), "invalid_prompt", "messages") from None
        if not prompt or max(prompt) >= model.vocab_size:
            raise RequestError(400, "the prompt has no tokens, or some that the model lacks", "invalid_prompt")
        if len(prompt) > most or len(prompt) + wanted > model.context_tokens:
            message = f"the prompt has {len(prompt)} tokens; at most {most}, with the answer {model.context_tokens}"
            raise RequestError(400, message, "context_length_exceeded", "messages")
        return prompt

    async def _answered(
        self, request: Request, generation: Generation, pieces: asyncio.Queue[Piece], answer: Completion
    ) -> AsyncIterator[Piece]:
        """The pieces of an answer as they come, until it ends, its time is over, or its client leaves.

        Raises RequestError: the time is over, the client left, or generation failed.
        """
        started, outcome, metrics = time.monotonic(), "cancelled", self.metrics
        leaving = asyncio.create_task(_report_leaving(request, pieces))
        try:
            async with asyncio.timeout(self.settings.request_seconds), self.slots:
                metrics.queue_seconds.observe(time.monotonic() - started)
                self.generator.submit(generation)
                while answer.pieces.finish_reason is None:
                    piece = await pieces.get()
                    while not pieces.empty():  # all that came since
                        piece.add(pieces.get_nowait())
                    if piece.finish_reason == "left":
                        raise RequestError(CLIENT_LEFT, "the client left")
                    if piece.finish_reason == "error":
                        outcome = "error"
                        raise RequestError(500, "generation failed; the server's log has the reason", "failed")
                    if not answer.pieces.count:
                        metrics.first_token.observe(time.monotonic() - started)
                    answer.pieces.add(piece)
                    if piece.finish_reason is not None:
                        outcome = piece.finish_reason
                        self._remember(generation.owner, answer)
                    yield piece
        except TimeoutError:
            raise RequestError(504, f"not done after {self.settings.request_seconds:g} s", "timeout") from None
        finally:
            leaving.cancel()
            generation.is_cancelled = True
            counts = {"prompt": len(generation.prompt), "completion": answer.pieces.count}
            for kind, count in counts.items():
                metrics.tokens.labels(kind).inc(count)
            seconds = time.monotonic() - started
            metrics.seconds.observe(seconds)
            record = {"id": request.state.id, "answer": answer.id, "owner": generation.owner, "outcome": outcome}
            record |= {"prompt_tokens": counts["prompt"], "tokens": counts["completion"], "seconds": round(seconds, 3)}
            self.log("request", stream=bool(answer.request.stream), **record)

    def _remember(self, owner: str, answer: Completion) -> None:
        """Keeps an answer for a label, where training renders such a request as it was served."""
        if self.feedback is None or answer.is_chat != self.model.has_template:
            return
        if answer.pieces.finish_reason != "length" and (row := answer.row()) is not None:
            self.feedback.remember(owner, row)


async def _report_leaving(request: Request, pieces: asyncio.Queue[Piece]) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass
    pieces.put_nowait(Piece(finish_reason="left"))


class Gate:
    """ASGI middleware around all routes: keys, requests in flight, the id of a request, and its count."""

    def __init__(self, app: ASGIApp, server: Server) -> None:
        self.app, self.server = app, server

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        server, request = self.server, Request(scope)
        path, given = request.url.path, request.headers.get("x-request-id", "")
        id = given if REQUEST_ID.fullmatch(given) else f"req-{secrets.token_hex(8)}"

        async def sending(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message)["x-request-id"] = id
                server.metrics.requests.labels(path if path in PATHS else "other", message["status"]).inc()
            await send(message)

        try:
            owner = "" if path in OPEN_PATHS else self.owner(request)
            counts, limit = path in COMPLETION_PATHS, server.settings.max_requests_per_key
            if counts and server.in_flight[owner] >= limit:
                raise RequestError(429, f"{limit} requests of this key are in flight; try again", "queue_full")
            scope.setdefault("state", {}).update(owner=owner, id=id)
            server.in_flight[owner] += counts  # until the last byte of the answer
            try:
                await self.app(scope, receive, sending)
            finally:
                server.in_flight[owner] -= counts
        except RequestError as error:
            await response_of(error)(scope, receive, sending)

    def owner(self, request: Request) -> str:
        """The name of the key that a request brings. Raises RequestError: it has none that is known."""
        if self.server.keys is None:
            return "local"
        scheme, _, key = request.headers.get("authorization", "").partition(" ")
        owner = self.server.keys.owner(key.strip()) if scheme.lower() == "bearer" else None
        if owner is None:
            raise RequestError(401, "no valid API key; send Authorization: Bearer KEY", "invalid_api_key")
        return owner


def response_of(error: RequestError) -> Response:
    """OpenAI's JSON of an error."""
    return JSONResponse(error.body, error.status, {"retry-after": "2"} if error.status in (429, 503) else {})


class Metrics:
    """The figures of /metrics, in Prometheus's format."""

    def __init__(self, in_flight: Counter[str], concurrency: int) -> None:
        self.started = int(time.time())
        self.registry = registry = CollectorRegistry()
        self.requests = CounterMetric("tandem_requests", "Requests answered", ["path", "status"], registry=registry)
        self.tokens = CounterMetric("tandem_tokens", "Tokens read and generated", ["kind"], registry=registry)
        self.labels = CounterMetric("tandem_labels", "Labels of completions", ["label"], registry=registry)
        self.seconds = self._histogram("tandem_request_seconds", "Completions, from their wait to their end")
        self.first_token = self._histogram("tandem_first_token_seconds", "From a request to its first token")
        self.queue_seconds = self._histogram("tandem_queue_seconds", "Wait for a place in the batch")
        total = Gauge("tandem_in_flight", "Requests in flight and waiting", registry=registry)
        total.set_function(lambda: in_flight.total())
        waiting = Gauge("tandem_queue_length", "Requests that wait", registry=registry)
        waiting.set_function(lambda: max(0, in_flight.total() - concurrency))

    def _histogram(self, name: str, meaning: str) -> Histogram:
        return Histogram(name, meaning, buckets=BUCKETS_SECONDS, registry=self.registry)
