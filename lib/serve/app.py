"""The HTTP application: OpenAI's routes over one generator, for uvicorn.

A request is read and checked whole before it may wait for the generator. Each key has a limited number of requests in
flight and waiting. When a client leaves, its request ends at the next token.
"""

from __future__ import annotations

import asyncio
import json
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
from lib.serve.api_keys import KeyFile
from lib.serve.feedback import Feedback, Label
from lib.serve.generation import Generation, Generator, Piece, ServedModel
from lib.serve.requests import JSON, ChatRequest, RequestError, TextRequest, parse

CLIENT_LEFT = 499  # nginx's status of a client that closed the connection
READ_SECONDS = 10.0  # for a request's body to come
MOST_BODY_BYTES = 1_000_000
BUCKETS_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)
OPEN_PATHS = ("/healthz", "/readyz")
COMPLETION_PATHS = ("/v1/chat/completions", "/v1/completions")
PATHS = (*OPEN_PATHS, *COMPLETION_PATHS, "/v1/models", "/v1/feedback", "/metrics")
REQUEST_ID = re.compile(r"[A-Za-z0-9._-]{1,64}")


class Server:
    """The routes. name: the one model that clients may ask for; without keys, clients have to call the server localhost
    or by its address; log writes one record."""

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
            *(Route(path, self.complete, methods=["POST"]) for path in COMPLETION_PATHS),
            Route("/v1/models", self.models),
            Route("/v1/models/{name:path}", self.models),
            Route("/metrics", self.show_metrics),
            *(Route(path, self.health) for path in OPEN_PATHS),
        ]
        if self.feedback is not None:
            routes.append(Route("/v1/feedback", self.label, methods=["POST"]))
        middleware = [Middleware(self.gate)]
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

    async def show_metrics(self, request: Request) -> Response:
        return PlainTextResponse(generate_latest(self.metrics.registry))

    async def label(self, request: Request) -> Response:
        assert self.feedback is not None
        label = parse(Label, await self._body(request))
        await asyncio.to_thread(self.feedback.take, request.state.owner, label)
        self.metrics.labels.labels(str(label.label).lower()).inc()
        return JSONResponse({"id": label.id, "label": label.label})

    async def complete(self, request: Request) -> Response:
        body = await self._body(request)
        wanted: ChatRequest | TextRequest
        wanted = parse(ChatRequest, body) if "chat" in request.url.path else parse(TextRequest, body)
        self._require_model(wanted.model)
        prompt = await asyncio.to_thread(self._prompt_ids, wanted)
        most = min(wanted.answer_tokens or self.settings.max_tokens, self.model.context_tokens - len(prompt))
        pieces: asyncio.Queue[Piece] = asyncio.Queue()
        generation = Generation(request.state.owner, prompt, most, wanted, pieces.put_nowait)
        answer = Completion(wanted, self.name, len(prompt))
        answered = self._answered(request, generation, pieces, answer)
        if wanted.stream:
            events = answer.events(answered)
            return StreamingResponse(events, media_type="text/event-stream", headers={"cache-control": "no-cache"})
        async for _ in answered:
            pass
        return JSONResponse(answer.whole())

    # ---- One completion

    def _require_model(self, name: str | None) -> None:
        if name not in (None, self.name):
            message = f"the model {name!r} does not exist; this server has {self.name}"
            raise RequestError(404, message, "model_not_found", "model")

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

    def _prompt_ids(self, wanted: ChatRequest | TextRequest) -> list[int]:
        """A request's token ids. Raises RequestError: the template does not take a message, or a limit is exceeded."""
        model, limits, answer_tokens = self.model, self.settings, wanted.answer_tokens or 1
        name = "messages" if isinstance(wanted, ChatRequest) else "prompt"
        if max(map(int, wanted.logit_bias or ()), default=0) >= model.vocab_size:
            message = f"logit_bias goes beyond the vocabulary of {model.vocab_size}"
            raise RequestError(400, message, "invalid_value", "logit_bias")
        if answer_tokens > limits.max_tokens:
            message = f"max_tokens is {answer_tokens}, but at most {limits.max_tokens} are allowed"
            raise RequestError(400, message, "invalid_value", "max_tokens")
        try:
            prompt = model.prompt_ids(wanted)
        except UserError as error:
            raise RequestError(400, str(error), "invalid_prompt", name) from None
        if not prompt or max(prompt) >= model.vocab_size:
            raise RequestError(400, "the prompt has no tokens, or some that the model lacks", "invalid_prompt")
        most = min(limits.max_prompt_tokens, model.context_tokens - answer_tokens)
        if len(prompt) > most:
            message = f"the prompt has {len(prompt)} tokens; at most {most} with an answer of {answer_tokens}"
            raise RequestError(400, message, "context_length_exceeded", name)
        return prompt

    async def _answered(
        self, request: Request, generation: Generation, pieces: asyncio.Queue[Piece], answer: Completion
    ) -> AsyncIterator[Piece]:
        """The pieces of an answer as they come, until it ends, its time is over, or its client leaves. Raises
        RequestError: the time is over, the client left, or generation failed."""
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
            seconds, usage = time.monotonic() - started, answer.usage
            metrics.seconds.observe(seconds)
            for kind in ("prompt", "completion"):
                metrics.tokens.labels(kind).inc(usage[f"{kind}_tokens"])
            record = {"id": request.state.id, "answer": answer.id, "owner": generation.owner, "outcome": outcome}
            record |= {"prompt_tokens": usage["prompt_tokens"], "tokens": usage["completion_tokens"]}
            self.log("request", **record, seconds=round(seconds, 3), stream=bool(answer.request.stream))

    def _remember(self, owner: str, answer: Completion) -> None:
        """Keeps an answer for a label, where training renders such a request as it was served."""
        if self.feedback is None or answer.is_chat != self.model.encoder.template.is_used:
            return
        if answer.pieces.finish_reason != "length" and (row := answer.row()) is not None:
            self.feedback.remember(owner, row)

    # ---- Around all routes

    def gate(self, app: ASGIApp) -> ASGIApp:
        """ASGI middleware: keys, requests in flight, the id of a request, and its count."""

        async def gated(scope: Scope, receive: Receive, send: Send) -> None:
            request = Request(scope)
            path, client_id = request.url.path, request.headers.get("x-request-id", "")
            id = client_id if REQUEST_ID.fullmatch(client_id) else f"req-{secrets.token_hex(8)}"

            async def sending(message: Message) -> None:
                if message["type"] == "http.response.start":
                    MutableHeaders(scope=message)["x-request-id"] = id
                    self.metrics.requests.labels(path if path in PATHS else "other", message["status"]).inc()
                await send(message)

            try:
                owner = "" if path in OPEN_PATHS else self._owner(request)
                counts, limit = path in COMPLETION_PATHS, self.settings.max_requests_per_key
                if counts and self.in_flight[owner] >= limit:
                    raise RequestError(429, f"{limit} requests of this key are in flight; try again", "queue_full")
                scope.setdefault("state", {}).update(owner=owner, id=id)
                self.in_flight[owner] += counts  # until the last byte of the answer
                try:
                    await app(scope, receive, sending)
                finally:
                    self.in_flight[owner] -= counts
            except RequestError as error:
                await response_of(error)(scope, receive, sending)

        return gated

    def _owner(self, request: Request) -> str:
        """The name of the key that a request brings. Raises RequestError: it has none, or an unknown one."""
        if self.keys is None:
            return "local"
        scheme, _, key = request.headers.get("authorization", "").partition(" ")
        owner = self.keys.owner(key.strip()) if scheme.lower() == "bearer" else None
        if owner is None:
            raise RequestError(401, "no valid API key; send Authorization: Bearer KEY", "invalid_api_key")
        return owner


async def _report_leaving(request: Request, pieces: asyncio.Queue[Piece]) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass
    pieces.put_nowait(Piece(finish_reason="left"))


# ---- Answers


class Completion:
    """An answer; `pieces` is what came of it so far."""

    def __init__(self, request: ChatRequest | TextRequest, model: str, prompt_tokens: int) -> None:
        self.request, self.is_chat = request, isinstance(request, ChatRequest)
        self.id = f"{'chatcmpl' if self.is_chat else 'cmpl'}-{secrets.token_hex(12)}"
        self.head = {"id": self.id, "created": int(time.time()), "model": model}
        self.prompt_tokens, self.pieces = prompt_tokens, Piece()

    @property
    def usage(self) -> JSON:
        prompt, count = self.prompt_tokens, self.pieces.count
        return {"prompt_tokens": prompt, "completion_tokens": count, "total_tokens": prompt + count}

    def whole(self) -> JSON:
        """The JSON of an answer that has ended."""
        content = {"message": self.message()} if self.is_chat else {"text": self.pieces.text}
        return self._body("chat.completion", self.pieces, **content) | {"usage": self.usage}

    def message(self) -> JSON:
        piece = self.pieces
        message: JSON = {"role": "assistant", "content": piece.text or None}
        message |= {"reasoning_content": piece.reasoning} if piece.reasoning else {}
        calls = [{key: call[key] for key in ("id", "type", "function")} for call in piece.tool_calls]
        return message | ({"tool_calls": calls} if calls else {})

    def _body(self, kind: str, piece: Piece, **content: object) -> JSON:
        logprobs = None if self.request.logprobs_count is None else {"content": piece.logprobs}
        choice = {"index": 0, "finish_reason": piece.finish_reason, "logprobs": logprobs, **content}
        return {**self.head, "object": kind if self.is_chat else "text_completion", "choices": [choice]}

    def _event(self, piece: Piece, is_first: bool) -> JSON:
        if not self.is_chat:
            return self._body("", piece, text=piece.text)
        delta: JSON = {"role": "assistant", "content": ""} if is_first else {}
        delta |= {"content": piece.text} if piece.text else {}
        delta |= {"reasoning_content": piece.reasoning} if piece.reasoning else {}
        delta |= {"tool_calls": piece.tool_calls} if piece.tool_calls else {}
        return self._body("chat.completion.chunk", piece, delta=delta)

    async def events(self, pieces: AsyncIterator[Piece]) -> AsyncIterator[str]:
        """Server-sent events, the last one [DONE]; an error in the middle is an event, too."""
        is_first = True
        try:
            async for piece in pieces:
                content = piece.text, piece.reasoning, piece.tool_calls, piece.logprobs, piece.finish_reason
                if is_first or any(content):
                    yield f"data: {json.dumps(self._event(piece, is_first))}\n\n"
                    is_first = False
            if (self.request.stream_options or {}).get("include_usage"):
                usage = {**self.head, "object": "chat.completion.chunk", "choices": [], "usage": self.usage}
                yield f"data: {json.dumps(usage)}\n\n"
            yield "data: [DONE]\n\n"
        except RequestError as error:
            yield f"data: {json.dumps(error.body)}\n\n"

    def row(self) -> JSON | None:
        """A training record without its label; None where the answer is empty."""
        row: JSON = {"id": self.id, "model": self.head["model"], "finish_reason": self.pieces.finish_reason}
        if isinstance(self.request, TextRequest):
            text = self.pieces.text
            return row | {"prompt": self.request.text, "completion": text} if text.strip() else None
        message = {key: value for key, value in self.message().items() if value}
        if message.keys() == {"role"}:
            return None
        is_text = message.keys() == {"role", "content"}
        row |= {"prompt": [each.fields() for each in self.request.messages]}
        row |= {"completion": message["content"] if is_text else [message]}
        return row | ({"tools": self.request.tool_definitions} if self.request.tool_definitions else {})


def response_of(error: RequestError) -> Response:
    """OpenAI's JSON of an error."""
    return JSONResponse(error.body, error.status, {"retry-after": "2"} if error.status in (429, 503) else {})


class Metrics:
    """The figures of /metrics, in Prometheus's format."""

    def __init__(self, in_flight: Counter[str], concurrency: int) -> None:
        self.started, self.registry = int(time.time()), CollectorRegistry()

        def counter(name: str, meaning: str, *labels: str) -> CounterMetric:
            return CounterMetric(f"tandem_{name}", meaning, labels, registry=self.registry)

        def histogram(name: str, meaning: str) -> Histogram:
            return Histogram(f"tandem_{name}_seconds", meaning, buckets=BUCKETS_SECONDS, registry=self.registry)

        self.requests = counter("requests", "Requests answered", "path", "status")
        self.tokens = counter("tokens", "Tokens read and generated", "kind")
        self.labels = counter("labels", "Labels of completions", "label")
        self.seconds = histogram("request", "Completions, from their wait to their end")
        self.first_token = histogram("first_token", "From a request to its first token")
        self.queue_seconds = histogram("queue", "Wait for a place in the batch")
        total = Gauge("tandem_in_flight", "Requests in flight and waiting", registry=self.registry)
        total.set_function(in_flight.total)
        waiting = Gauge("tandem_queue_length", "Requests that wait", registry=self.registry)
        waiting.set_function(lambda: max(0, in_flight.total() - concurrency))
