"""The HTTP application: OpenAI's routes over one generator, for uvicorn.

A request is read and checked whole before it may wait for the generator. Each key has a limited number of requests in
flight and waiting. A client that leaves ends its request at the next token.
"""

from __future__ import annotations

import asyncio
import hashlib
import ipaddress
import json
import secrets
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from typing import Any

from prometheus_client import CollectorRegistry, Gauge, Histogram, generate_latest
from prometheus_client import Counter as CounterMetric
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route

from lib.config.settings import ServeSettings
from lib.errors import UserError
from lib.serve.feedback import Feedback, Label
from lib.serve.generation import Generation, Generator, Piece, Token
from lib.serve.keys import KeyFile
from lib.serve.requests import JSON, ChatRequest, RequestError, TextRequest, parse

LOOK_SECONDS = 0.5  # between two looks at whether a client is still there
Prompt = Callable[[ChatRequest | TextRequest], list[int]]  # raises UserError for what the template does not take


@dataclass
class Server:
    """What the routes need.

    Args:
        name: the one model that clients may ask for.
        prompt: a request's token ids, by the code that renders training rows.
        keys: None: everybody who reaches the server may ask.
        log: writes one record.
    """

    settings: ServeSettings
    name: str
    generator: Generator
    prompt: Prompt
    keys: KeyFile | None
    feedback: Feedback | None
    log: Callable[..., None]
    vocab_size: int | None = None
    context_tokens: int | None = None
    draining: bool = False
    in_flight: Counter[str] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        self.metrics = Metrics()
        self.slots = asyncio.Semaphore(self.settings.concurrency)

    # ---- Routes

    def app(self) -> Starlette:
        routes = [
            Route("/v1/chat/completions", self.chat, methods=["POST"]),
            Route("/v1/completions", self.text, methods=["POST"]),
            Route("/v1/feedback", self.label, methods=["POST"]),
            Route("/v1/models", self.models),
            Route("/metrics", self.show_metrics),
            Route("/healthz", self.health),
            Route("/readyz", self.ready),
        ]
        cors = Middleware(
            CORSMiddleware, allow_origins=[*self.settings.cors_origins], allow_methods=["*"], allow_headers=["*"]
        )
        handlers: dict[Any, Any] = {RequestError: _answer_error, HTTPException: _answer_http_error}
        return Starlette(
            routes=routes, middleware=[cors] if self.settings.cors_origins else [], exception_handlers=handlers
        )

    async def health(self, request: Request) -> Response:
        return PlainTextResponse("ok\n")

    async def ready(self, request: Request) -> Response:
        is_ready = self.generator.is_ready.is_set() and not self.draining
        return PlainTextResponse("ready\n" if is_ready else "not ready\n", 200 if is_ready else 503)

    async def models(self, request: Request) -> Response:
        self.owner(request)
        return JSONResponse({"object": "list", "data": [{"id": self.name, "object": "model", "owned_by": "tandem"}]})

    async def show_metrics(self, request: Request) -> Response:
        self.owner(request)
        self.metrics.in_flight.set(self.in_flight.total())
        self.metrics.generated.set(self.generator.tokens_generated)
        return PlainTextResponse(generate_latest(self.metrics.registry))

    async def label(self, request: Request) -> Response:
        owner = self.owner(request)
        if self.feedback is None:
            raise RequestError(404, "there is no such address; serve.feedback=FILE makes it")
        label = parse(Label, await self._body(request))
        await asyncio.to_thread(self.feedback.take, owner, label)
        return JSONResponse({"id": label.id, "label": label.label})

    async def chat(self, request: Request) -> Response:
        return await self._complete(request, ChatRequest)

    async def text(self, request: Request) -> Response:
        return await self._complete(request, TextRequest)

    # ---- One completion

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
        return bytes(body)

    async def _complete(self, request: Request, kind: type[ChatRequest] | type[TextRequest]) -> Response:
        started, owner = time.monotonic(), self.owner(request)
        if self.draining:
            raise RequestError(503, "the server is ending", "draining", retry_seconds=5)
        limit = self.settings.max_requests_per_key
        if self.in_flight[owner] >= limit or self.in_flight.total() >= self.settings.max_queue:
            message = f"{limit} requests of this key, or {self.settings.max_queue} of all, are in flight; try again"
            raise RequestError(429, message, "queue_full", retry_seconds=2)
        self.in_flight[owner] += 1
        is_handed_over = False
        try:
            asked = parse(kind, await self._body(request))
            generation, pieces = await self._generation(owner, asked)
            answer = Answer(asked, self.name, len(generation.prompt))
            record = {"owner": owner, "prompt_tokens": len(generation.prompt), "stream": bool(asked.stream)}
            events = self._events(request, generation, pieces, answer, record | {"started": started})
            if asked.stream:
                is_handed_over = True
                stream = events_of(events, answer, asked.wants_usage)
                return StreamingResponse(stream, media_type="text/event-stream", headers={"cache-control": "no-cache"})
            async for piece in events:
                answer.add(piece)
            return JSONResponse(answer.whole())
        finally:
            if not is_handed_over:
                self._leave(owner)

    def _leave(self, owner: str) -> None:
        self.in_flight[owner] -= 1
        self.in_flight += Counter()  # drops zeros

    async def _generation(
        self, owner: str, asked: ChatRequest | TextRequest
    ) -> tuple[Generation, asyncio.Queue[Piece]]:
        """A request for the generator, within the limits.

        Raises:
            RequestError: another model, a message that the template does not take, or beyond a limit.
        """
        settings = self.settings
        if asked.model not in (None, self.name):
            message = f"the model {asked.model!r} does not exist; this server has {self.name}"
            raise RequestError(404, message, "model_not_found", "model")
        sampling, logprobs = asked.sampling(self.vocab_size), asked.logprobs_count
        if (asked.answer_tokens or 0) > settings.max_tokens:
            message = f"max_tokens is {asked.answer_tokens}, but at most {settings.max_tokens} are allowed"
            raise RequestError(400, message, "invalid_value", "max_tokens")
        try:
            prompt = await asyncio.to_thread(self.prompt, asked)
        except UserError as error:
            raise RequestError(400, str(error), "invalid_prompt", "messages") from None
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
        self,
        request: Request,
        generation: Generation,
        pieces: asyncio.Queue[Piece],
        answer: Answer,
        record: JSON,
    ) -> AsyncIterator[Piece]:
        """The pieces of an answer as they come, until it ends, its time is over, or its client leaves.

        Raises:
            RequestError: the time is over, or generation failed.
        """
        started, count = record.pop("started"), 0
        outcome = "cancelled"
        try:
            async with asyncio.timeout(self.settings.request_seconds):
                async with self.slots:
                    self.generator.submit(generation)
                    looked = time.monotonic()
                    while True:
                        piece = await _next(pieces)
                        if time.monotonic() - looked > LOOK_SECONDS:
                            looked = time.monotonic()
                            if await request.is_disconnected():
                                raise RequestError(499, "the client left")
                        if piece is None:
                            continue
                        count += piece.count
                        if count == piece.count > 0:
                            self.metrics.first_token.observe(time.monotonic() - started)
                        if piece.finish_reason == "error":
                            raise RequestError(500, "generation failed; the server's log has the reason", "failed")
                        outcome = piece.finish_reason or outcome
                        yield piece
                        if piece.finish_reason is not None:
                            break
            if self.feedback is not None and outcome != "length" and (row := answer.row()) is not None:
                self.feedback.remember(generation.owner, row)
        except TimeoutError:
            raise RequestError(504, f"not done after {self.settings.request_seconds:g} s", "timeout") from None
        finally:
            generation.is_cancelled = True
            seconds = time.monotonic() - started
            self.metrics.requests.labels(outcome).inc()
            self.metrics.tokens.labels("prompt").inc(len(generation.prompt))
            self.metrics.tokens.labels("completion").inc(count)
            self.metrics.seconds.observe(seconds)
            self.log("request", id=answer.id, outcome=outcome, tokens=count, seconds=round(seconds, 3), **record)
            if record["stream"]:
                self._leave(generation.owner)


class Answer:
    """OpenAI's JSON of one answer, whole or event by event."""

    def __init__(self, asked: ChatRequest | TextRequest, model: str, prompt_tokens: int) -> None:
        self.asked, self.is_chat = asked, isinstance(asked, ChatRequest)
        self.id = f"{'chatcmpl' if self.is_chat else 'cmpl'}-{secrets.token_hex(12)}"
        self.head = {"id": self.id, "created": int(time.time()), "model": model}
        self.prompt_tokens, self.pieces = prompt_tokens, Piece()

    def add(self, piece: Piece) -> None:
        self.pieces.add(piece)

    def usage(self) -> JSON:
        count = self.pieces.count
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


async def events_of(pieces: AsyncIterator[Piece], answer: Answer, wants_usage: bool) -> AsyncIterator[str]:
    """Server-sent events, the last one [DONE]; an error in the middle is an event, too."""
    is_first = True
    try:
        async for piece in pieces:
            answer.add(piece)
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
    """What /metrics tells."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        registry = self.registry
        self.requests = CounterMetric("tandem_requests", "Requests by outcome", ["outcome"], registry=registry)
        self.tokens = CounterMetric("tandem_tokens", "Tokens of prompts and completions", ["kind"], registry=registry)
        self.seconds = Histogram("tandem_request_seconds", "Seconds of a request", registry=registry)
        self.first_token = Histogram("tandem_first_token_seconds", "Seconds to the first token", registry=registry)
        self.in_flight = Gauge("tandem_in_flight", "Requests in flight and waiting", registry=registry)
        self.generated = Gauge("tandem_generated_tokens", "Tokens generated since the start", registry=registry)


async def _answer_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, RequestError)
    headers = {} if error.retry_seconds is None else {"retry-after": str(error.retry_seconds)}
    return JSONResponse(error.body, error.status, headers)


async def _answer_http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    return JSONResponse(RequestError(error.status_code, f"{request.url.path}: {error.detail}").body, error.status_code)
