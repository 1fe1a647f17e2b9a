"""The HTTP application: OpenAI's routes over one generator, for uvicorn.

A request is read and checked whole before it may wait for the generator. Each key has a limited number of requests in
flight and waiting. A client that leaves ends its request at the next token.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import ipaddress
import json
import math
import re
import secrets
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from prometheus_client import CollectorRegistry, Gauge, Histogram, generate_latest
from prometheus_client import Counter as CounterMetric
from starlette.applications import Starlette
from starlette.datastructures import MutableHeaders
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from lib.config.settings import ServeSettings
from lib.errors import UserError
from lib.serve.feedback import Feedback, Label
from lib.serve.generation import Generation, Generator, Piece, Token
from lib.serve.keys import KeyFile
from lib.serve.model import ServedModel
from lib.serve.requests import JSON, ChatRequest, RequestError, TextRequest, parse

LOOK_SECONDS = 0.5  # between two looks at whether a client is still there
CLIENT_LEFT = 499  # nginx's status of a client that closed the connection
BUCKETS_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)
OPEN_PATHS = ("/healthz", "/readyz")
COMPLETION_PATHS = ("/v1/chat/completions", "/v1/completions")
PATHS = (*OPEN_PATHS, *COMPLETION_PATHS, "/v1/models", "/v1/feedback", "/metrics")
REQUEST_ID = re.compile(r"[A-Za-z0-9._-]{1,64}")


@dataclass
class Server:
    """The routes.

    Args:
        name: the one model that clients may ask for.
        keys: None: every client that reaches the server may ask.
        log: writes one record.
        vocab_size, context_tokens: of the model; None: unknown.
    """

    settings: ServeSettings
    name: str
    generator: Generator
    model: ServedModel
    keys: KeyFile | None
    feedback: Feedback | None
    log: Callable[..., None]
    vocab_size: int | None = None
    context_tokens: int | None = None
    draining: bool = False
    in_flight: Counter[str] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        self.metrics = Metrics(self)
        self.slots = asyncio.Semaphore(self.settings.concurrency)

    def app(self) -> Starlette:
        routes = [
            Route("/v1/chat/completions", self.chat, methods=["POST"]),
            Route("/v1/completions", self.text, methods=["POST"]),
            Route("/v1/models", self.list_models),
            Route("/v1/models/{name:path}", self.show_model),
            Route("/metrics", self.show_metrics),
            Route("/healthz", self.health),
            Route("/readyz", self.ready),
        ]
        if self.feedback is not None:
            routes.append(Route("/v1/feedback", self.label, methods=["POST"]))
        origins = [*self.settings.cors_origins]
        cors = Middleware(CORSMiddleware, allow_origins=origins, allow_methods=["*"], allow_headers=["*"])
        handlers: dict[Any, Any] = {
            RequestError: lambda request, error: response_of(error),
            HTTPException: lambda request, error: response_of(
                RequestError(error.status_code, f"{request.url.path}: {error.detail}")
            ),
        }
        return Starlette(
            routes=routes,
            middleware=[*([cors] if origins else []), Middleware(Gate, server=self)],
            exception_handlers=handlers,
        )

    # ---- Who may ask

    @contextlib.contextmanager
    def admitted(self, request: Request) -> Iterator[str]:
        """The name of a request's key; a completion counts as its key's until the last byte of its answer.

        Raises:
            RequestError: it has no known key, or too many requests are in flight.
        """
        path, settings = request.url.path, self.settings
        owner = "" if path in OPEN_PATHS else self.owner(request)
        if path not in COMPLETION_PATHS:
            yield owner
            return
        if self.draining:
            raise RequestError(503, "the server is ending", "draining", retry_seconds=5)
        limit = settings.max_requests_per_key
        if self.in_flight[owner] >= limit or self.in_flight.total() >= settings.max_queue:
            message = f"{limit} requests of this key, or {settings.max_queue} of all, are in flight; try again"
            raise RequestError(429, message, "queue_full", retry_seconds=2)
        self.in_flight[owner] += 1
        try:
            yield owner
        finally:
            self.in_flight[owner] -= 1
            self.in_flight += Counter()  # drops zeros

    def owner(self, request: Request) -> str:
        """The name of the key that a request brings.

        Raises:
            RequestError: it has none that is known.
        """
        if self.keys is None:
            host = request.url.hostname or ""
            if not _is_local_name(host):
                raise RequestError(403, f"this server has no keys and is not called {host}; use localhost")
            return "local"
        scheme, _, key = request.headers.get("authorization", "").partition(" ")
        owner = self.keys.owner(key.strip()) if scheme.lower() == "bearer" else None
        if owner is None:
            raise RequestError(401, "no valid API key; send Authorization: Bearer KEY", "invalid_api_key")
        return owner

    # ---- Routes

    async def health(self, request: Request) -> Response:
        return PlainTextResponse("ok\n")

    async def ready(self, request: Request) -> Response:
        is_ready = self.generator.is_ready.is_set() and not self.draining
        return PlainTextResponse("ready\n" if is_ready else "not ready\n", 200 if is_ready else 503)

    async def list_models(self, request: Request) -> Response:
        return JSONResponse({"object": "list", "data": [self._description()]})

    async def show_model(self, request: Request) -> Response:
        self._require_model(request.path_params["name"])
        return JSONResponse(self._description())

    def _description(self) -> JSON:
        return {"id": self.name, "object": "model", "created": self.metrics.started, "owned_by": "tandem"}

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
        return await self._complete(request, ChatRequest)

    async def text(self, request: Request) -> Response:
        return await self._complete(request, TextRequest)

    # ---- One completion

    async def _body(self, request: Request) -> bytes:
        """A request's body, within its limits of bytes and time."""
        most, body = self.settings.max_body_bytes, bytearray()
        try:
            async with asyncio.timeout(self.settings.read_seconds):
                async for chunk in request.stream():
                    body += chunk
                    if len(body) > most:
                        raise RequestError(413, f"the body has more than serve.max_body_bytes={most}", "too_large")
        except TimeoutError:
            raise RequestError(408, f"the body did not come within {self.settings.read_seconds:g} s") from None
        except ClientDisconnect:
            raise RequestError(CLIENT_LEFT, "the client left") from None
        return bytes(body)

    async def _complete(self, request: Request, kind: type[ChatRequest] | type[TextRequest]) -> Response:
        asked = parse(kind, await self._body(request))
        generation, pieces = await self._generation(request.state.owner, asked)
        answer = Completion(asked, self.name, len(generation.prompt))
        events = self._events(request, generation, pieces, answer)
        if asked.stream:
            stream = events_of(events, answer, asked.wants_usage)
            return StreamingResponse(stream, media_type="text/event-stream", headers={"cache-control": "no-cache"})
        async for _ in events:
            pass
        return JSONResponse(answer.whole())

    async def _generation(
        self, owner: str, asked: ChatRequest | TextRequest
    ) -> tuple[Generation, asyncio.Queue[Piece]]:
        """A request for the generator, and the queue of its pieces.

        Raises:
            RequestError: another model, a message that the template does not take, or beyond a limit.
        """
        settings = self.settings
        self._require_model(asked.model)
        sampling, logprobs = asked.sampling(self.vocab_size), asked.logprobs_count
        if (asked.answer_tokens or 0) > settings.max_tokens:
            message = f"max_tokens is {asked.answer_tokens}, but at most {settings.max_tokens} are allowed"
            raise RequestError(400, message, "invalid_value", "max_tokens")
        try:
            prompt = await asyncio.to_thread(self.model.prompt_ids, asked)
        except UserError as error:
            raise RequestError(400, str(error), "invalid_prompt", "messages") from None
        if not prompt or max(prompt) >= (self.vocab_size or math.inf):
            message = f"the prompt has {len(prompt)} tokens, the largest id {max(prompt, default=0)}; the model cannot"
            raise RequestError(400, f"{message} read it", "invalid_prompt", "messages")
        most = settings.max_prompt_tokens
        room = (self.context_tokens or 2**31) - len(prompt)
        if len(prompt) > most or room < (asked.answer_tokens or 1):
            message = f"the prompt has {len(prompt)} tokens; at most {most}, and with the answer {self.context_tokens}"
            raise RequestError(400, message, "context_length_exceeded", "messages")
        pieces: asyncio.Queue[Piece] = asyncio.Queue()
        max_tokens = min(asked.answer_tokens or settings.max_tokens, room)
        arguments = (sampling, asked.stops, logprobs, asked.tool_definitions, pieces.put_nowait)
        return Generation(owner, prompt, max_tokens, *arguments), pieces

    async def _events(
        self, request: Request, generation: Generation, pieces: asyncio.Queue[Piece], answer: Completion
    ) -> AsyncIterator[Piece]:
        """The pieces of an answer as they come, until it ends, its time is over, or its client leaves.

        Raises:
            RequestError: the time is over, the client left, or generation failed.
        """
        started = looked = time.monotonic()
        outcome = "cancelled"
        try:
            async with asyncio.timeout(self.settings.request_seconds), self.slots:
                self.metrics.queue_seconds.observe(time.monotonic() - started)
                self.generator.submit(generation)
                while outcome == "cancelled":
                    piece = await _next(pieces)
                    if time.monotonic() - looked > LOOK_SECONDS:
                        looked = time.monotonic()
                        if await request.is_disconnected():
                            raise RequestError(CLIENT_LEFT, "the client left")
                    if piece is None:
                        continue
                    if piece.finish_reason == "error":
                        outcome = "error"
                        raise RequestError(500, "generation failed; the server's log has the reason", "failed")
                    if not answer.count:
                        self.metrics.first_token.observe(time.monotonic() - started)
                    answer.add(piece)
                    outcome = piece.finish_reason or outcome
                    self._remember(generation.owner, answer)
                    yield piece
        except TimeoutError:
            raise RequestError(504, f"not done after {self.settings.request_seconds:g} s", "timeout") from None
        finally:
            generation.is_cancelled = True
            seconds, prompt_tokens = time.monotonic() - started, len(generation.prompt)
            self.metrics.seconds.observe(seconds)
            self.metrics.tokens.labels("prompt").inc(prompt_tokens)
            self.metrics.tokens.labels("completion").inc(answer.count)
            record = {"id": request.state.id, "answer": answer.id, "owner": generation.owner, "outcome": outcome}
            record |= {"stream": bool(answer.asked.stream), "seconds": round(seconds, 3)}
            self.log("request", prompt_tokens=prompt_tokens, tokens=answer.count, **record)

    def _remember(self, owner: str, answer: Completion) -> None:
        """Keeps an answer that ended for a label, where training renders such a request as it was served."""
        if self.feedback is None or answer.is_chat != self.model.has_template:
            return
        if answer.pieces.finish_reason not in (None, "length") and (row := answer.row()) is not None:
            self.feedback.remember(owner, row)


class Gate:
    """ASGI middleware around all routes: keys, requests in flight, the id of a request, and its count."""

    def __init__(self, app: ASGIApp, server: Server) -> None:
        self.app, self.server = app, server

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        request = Request(scope)
        given = request.headers.get("x-request-id", "")
        id = given if REQUEST_ID.fullmatch(given) else f"req-{secrets.token_hex(8)}"

        async def sending(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message)["x-request-id"] = id
                path = request.url.path if request.url.path in PATHS else "other"
                self.server.metrics.requests.labels(path, message["status"]).inc()
            await send(message)

        try:
            with self.server.admitted(request) as owner:
                scope.setdefault("state", {}).update(owner=owner, id=id)
                await self.app(scope, receive, sending)
        except RequestError as error:
            await response_of(error)(scope, receive, sending)


def response_of(error: RequestError) -> Response:
    """OpenAI's JSON of an error."""
    headers = {} if error.retry_seconds is None else {"retry-after": str(error.retry_seconds)}
    return JSONResponse(error.body, error.status, headers)


class Completion:
    """OpenAI's JSON of one answer, whole or event by event."""

    def __init__(self, asked: ChatRequest | TextRequest, model: str, prompt_tokens: int) -> None:
        self.asked, self.is_chat = asked, isinstance(asked, ChatRequest)
        self.id = f"{'chatcmpl' if self.is_chat else 'cmpl'}-{secrets.token_hex(12)}"
        self.head = {"id": self.id, "created": int(time.time()), "model": model}
        self.prompt_tokens, self.pieces = prompt_tokens, Piece()

    def add(self, piece: Piece) -> None:
        self.pieces.add(piece)

    @property
    def count(self) -> int:
        """Tokens so far."""
        return self.pieces.count

    def usage(self) -> JSON:
        count = self.count
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": count,
            "total_tokens": self.prompt_tokens + count,
        }

    def whole(self) -> JSON:
        """Of an answer that has ended."""
        piece = self.pieces
        choice: JSON = {"index": 0, "finish_reason": piece.finish_reason, "logprobs": self._logprobs(piece.tokens)}
        if not self.is_chat:
            body = {"object": "text_completion", "choices": [choice | {"text": piece.text}]}
        else:
            body = {"object": "chat.completion", "choices": [choice | {"message": self.message()}]}
        return {**self.head, **body, "usage": self.usage()}

    def message(self) -> JSON:
        piece = self.pieces
        message: JSON = {"role": "assistant", "content": piece.text or None}
        message |= {"reasoning_content": piece.reasoning} if piece.reasoning else {}
        return message | ({"tool_calls": _calls(piece.tool_calls, self.id)} if piece.tool_calls else {})

    def event(self, piece: Piece, is_first: bool) -> JSON:
        choice: JSON = {"index": 0, "finish_reason": piece.finish_reason, "logprobs": self._logprobs(piece.tokens)}
        if not self.is_chat:
            return {**self.head, "object": "text_completion", "choices": [choice | {"text": piece.text}]}
        delta: JSON = {"role": "assistant", "content": ""} if is_first else {}
        delta |= {"content": piece.text} if piece.text else {}
        delta |= {"reasoning_content": piece.reasoning} if piece.reasoning else {}
        if piece.tool_calls:
            first = len(self.pieces.tool_calls) - len(piece.tool_calls)
            calls = _calls(piece.tool_calls, self.id, first)
            delta["tool_calls"] = [{"index": first + i, **call} for i, call in enumerate(calls)]
        return {**self.head, "object": "chat.completion.chunk", "choices": [choice | {"delta": delta}]}

    def _logprobs(self, tokens: list[Token]) -> JSON | None:
        if self.asked.logprobs_count is None:
            return None

        def entry(text: str, logprob: float) -> JSON:
            return {"token": text, "logprob": logprob, "bytes": list(text.encode())}

        content = [
            entry(token.text, token.logprob) | {"top_logprobs": [entry(*other) for other in token.top]}
            for token in tokens
        ]
        return {"content": content}

    def row(self) -> JSON | None:
        """A training record without its label; None where nothing was answered."""
        row: JSON = {"id": self.id, "model": self.head["model"], "finish_reason": self.pieces.finish_reason}
        if isinstance(self.asked, TextRequest):
            text = self.pieces.text
            return row | {"prompt": self.asked.text, "completion": text} if text.strip() else None
        message = {key: value for key, value in self.message().items() if value}
        if message.keys() == {"role"}:
            return None
        is_text = message.keys() == {"role", "content"}
        row |= {"prompt": [each.fields() for each in self.asked.messages]}
        row |= {"completion": message["content"] if is_text else [message]}
        return row | ({"tools": self.asked.tool_definitions} if self.asked.tool_definitions else {})


async def events_of(pieces: AsyncIterator[Piece], answer: Completion, wants_usage: bool) -> AsyncIterator[str]:
    """Server-sent events, the last one [DONE]; an error in the middle is an event, too."""
    is_first = True
    try:
        async for piece in pieces:
            says_something = piece.text or piece.reasoning or piece.tool_calls or piece.tokens
            if is_first or says_something or piece.finish_reason:
                yield f"data: {json.dumps(answer.event(piece, is_first))}\n\n"
                is_first = False
        if wants_usage:
            usage = {**answer.head, "object": "chat.completion.chunk", "choices": [], "usage": answer.usage()}
            yield f"data: {json.dumps(usage)}\n\n"
        yield "data: [DONE]\n\n"
    except RequestError as error:
        yield f"data: {json.dumps(error.body)}\n\n"


async def _next(pieces: asyncio.Queue[Piece]) -> Piece | None:
    """All that has come since the last call, as one piece; None where nothing comes for a while."""
    try:
        async with asyncio.timeout(LOOK_SECONDS):
            piece = await pieces.get()
    except TimeoutError:
        return None
    while not pieces.empty():
        piece.add(pieces.get_nowait())
    return piece


def _is_local_name(host: str) -> bool:
    """Whether a request names the server by an address: no web page can have it do so under the page's own name."""
    try:
        return bool(host == "localhost" or ipaddress.ip_address(host.strip("[]")))
    except ValueError:
        return False


def _calls(calls: list[JSON], id: str, first: int = 0) -> list[JSON]:
    """A model's calls as OpenAI has them: with an id, arguments as JSON text."""
    named = []
    for index, call in enumerate(calls, first):
        arguments = call.get("arguments", {})
        text = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
        call_id = call.get("id") or f"call_{hashlib.sha256(f'{id} {index}'.encode()).hexdigest()[:24]}"
        named.append({"id": call_id, "type": "function", "function": {"name": call.get("name", ""), "arguments": text}})
    return named


class Metrics:
    """The figures of /metrics, in Prometheus's format."""

    def __init__(self, server: Server) -> None:
        self.started = int(time.time())
        self.registry = registry = CollectorRegistry()
        self.requests = CounterMetric("tandem_requests", "Requests answered", ["path", "status"], registry=registry)
        self.tokens = CounterMetric("tandem_tokens", "Tokens read and generated", ["kind"], registry=registry)
        self.labels = CounterMetric("tandem_labels", "Labels of completions", ["label"], registry=registry)
        self.seconds = self._histogram("tandem_request_seconds", "Completions, from their place to their end")
        self.first_token = self._histogram("tandem_first_token_seconds", "From a request to its first token")
        self.queue_seconds = self._histogram("tandem_queue_seconds", "Wait for a place in the batch")
        in_flight = Gauge("tandem_in_flight", "Requests in flight and waiting", registry=registry)
        in_flight.set_function(lambda: server.in_flight.total())
        length = Gauge("tandem_queue_length", "Requests that wait", registry=registry)
        length.set_function(lambda: max(0, server.in_flight.total() - server.settings.concurrency))
        up = Gauge("tandem_up", "Whether the model is loaded", registry=registry)
        up.set_function(lambda: server.generator.is_ready.is_set())

    def _histogram(self, name: str, meaning: str) -> Histogram:
        return Histogram(name, meaning, buckets=BUCKETS_SECONDS, registry=self.registry)
