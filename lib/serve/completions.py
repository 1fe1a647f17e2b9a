"""A completion from its request to its last byte: checked, given a backend, forwarded there, handed on.

A request is read and checked whole before it may wait for a backend, so that nothing malformed, too large, too slow or
unauthorised ever occupies one. From there on it is one task, which ends when the client goes, a limit is reached, or
the last byte is sent, and the backend's slot with it.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence

import httpx2

from lib.config.serve_settings import ServeSettings
from lib.serve import openai_answers, openai_requests
from lib.serve.backend_pool import Backend, Pool, QueueFull
from lib.serve.backend_process import SECRET_HEADER
from lib.serve.event_log import Log
from lib.serve.feedback import Feedback
from lib.serve.http_exchange import JSON_HEADERS, Exchange, read_body, send_answer, start_of_answer, while_listening
from lib.serve.openai_answers import Usage
from lib.serve.openai_requests import JSON, BackendRequest, Kind, Limits, RequestError
from lib.serve.prometheus_metrics import Metrics

ATTEMPTS = 2  # a request of which nothing was answered yet may try another backend once
STREAM_HEADERS = {"content-type": "text/event-stream", "cache-control": "no-cache", "x-accel-buffering": "no"}


class BackendLost(Exception):
    """A backend did not answer as it should; the request may be tried on another."""


class Completions:
    """Answers requests for completions by the backends of a pool."""

    def __init__(
        self,
        settings: ServeSettings,
        limits: Limits,
        count_tokens: Callable[[str], int] | None,
        pool: Pool,
        client: httpx2.AsyncClient,
        metrics: Metrics,
        log: Log,
        feedback: Feedback | None = None,
    ):
        self.settings, self.limits, self.count_tokens = settings, limits, count_tokens
        self.pool, self.client, self.metrics, self.log = pool, client, metrics, log
        self.feedback = feedback

    async def complete(self, exchange: Exchange, kind: Kind) -> None:
        """Answers one request, or raises what is wrong with it.

        Raises:
            RequestError: it is malformed, beyond a limit, or no backend could answer it.
            ClientGone: the client left before the answer's end.
        """
        body = await read_body(exchange, self.settings.max_body_bytes, self.settings.read_seconds)
        parsed = openai_requests.parse(kind, body)
        prompt_tokens = await self._count_tokens(parsed.texts())
        request = openai_requests.backend_request(kind, parsed, self.limits, prompt_tokens)
        exchange.is_stream = exchange.record["stream"] = request.stream
        try:
            await while_listening(exchange.receive, self._serve(exchange, request))
        finally:
            self.metrics.seconds.observe(exchange.seconds)

    async def _count_tokens(self, texts: Sequence[str]) -> int:
        """Tokens of all texts; their bytes, which are never fewer, where there is no tokenizer."""
        text = "".join(texts)
        size = len(text.encode())
        if self.count_tokens is None:
            return size
        # Long ones on a thread: a megabyte takes half a second, during which nobody else would be served.
        return self.count_tokens(text) if size < 4096 else await asyncio.to_thread(self.count_tokens, text)

    async def _serve(self, exchange: Exchange, request: BackendRequest) -> None:
        """Has a backend answer; a second one where the first failed before it answered anything."""
        for attempt in range(1, ATTEMPTS + 1):
            backend = await self._take_slot(exchange)
            since = time.monotonic()
            try:
                async with asyncio.timeout(self.settings.request_seconds):
                    if request.stream:
                        await self._stream(exchange, request, backend)
                    else:
                        await self._whole(exchange, request, backend)
                return
            except TimeoutError:
                raise RequestError(504, f"not done after {self.settings.request_seconds:g} s", "timeout") from None
            except (BackendLost, httpx2.HTTPError) as error:
                reason = str(error) or type(error).__name__
                self.metrics.lost.labels(backend.name).inc()
                self.log("backend", backend=backend.name, state="failed", reason=reason, request_id=exchange.id)
                self.pool.set_up(backend, False)
                if exchange.has_content or attempt == ATTEMPTS:
                    raise RequestError(
                        502, "the backend was lost in the middle of the answer", "backend_lost"
                    ) from None
            finally:
                self.pool.give_back(backend, exchange.owner, time.monotonic() - since)

    async def _take_slot(self, exchange: Exchange) -> Backend:
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

    async def _stream(self, exchange: Exchange, request: BackendRequest, backend: Backend) -> None:
        """Hands the backend's events on as they arrive."""
        kept: list[bytes] = []  # for a label that may come
        # Closed on every way out: the backend stops generating when its connection ends.
        async with contextlib.aclosing(self._events(exchange, request, backend)) as blocks:
            async for events in blocks:
                if self.feedback is not None:
                    kept += events
                    if (
                        kept and openai_answers.data_of(kept[-1]) == b"[DONE]"
                    ):  # before the client knows, who may label it
                        self.feedback.remember(exchange.owner, request, _assembled(kept))
                passed = [event for event in events if self._is_for_client(event, request)]
                if not passed:
                    continue
                if not exchange.status:
                    await exchange.send(start_of_answer(200, STREAM_HEADERS))
                exchange.has_content = exchange.has_content or any(openai_answers.data_of(event) for event in passed)
                body = b"".join(openai_answers.renamed(event, request.model) + b"\n\n" for event in passed)
                await exchange.send({"type": "http.response.body", "body": body, "more_body": True})
        await exchange.send({"type": "http.response.body", "body": b""})

    def _is_for_client(self, event: bytes, request: BackendRequest) -> bool:
        data = openai_answers.data_of(event)
        return data is None or request.include_usage or not openai_answers.is_usage(data)

    async def _whole(self, exchange: Exchange, request: BackendRequest, backend: Backend) -> None:
        """Collects the backend's answer, and sends it when it is whole."""
        if request.is_streamed_upstream:
            async with contextlib.aclosing(self._events(exchange, request, backend)) as blocks:
                whole = _assembled([event async for block in blocks for event in block])
            answer = json.dumps(whole).encode()
        else:
            async with self._post(request, backend) as response:
                answer = await response.aread()
            whole = json.loads(answer)
            usage = whole["usage"]
            self._note_usage(exchange, usage)
            backend.count(usage["completion_tokens"], time.monotonic())
        if self.feedback is not None:
            self.feedback.remember(exchange.owner, request, whole)
        exchange.has_content = True
        await send_answer(exchange, 200, JSON_HEADERS, openai_answers.renamed(answer, request.model))

    async def _events(
        self, exchange: Exchange, request: BackendRequest, backend: Backend
    ) -> AsyncGenerator[list[bytes], None]:
        """The events of a backend's stream, as many at a time as came together, the last being [DONE].

        Raises:
            BackendLost: the stream broke off.
        """
        rest, is_first = b"", True
        async with self._post(request, backend) as response:
            async for block in response.aiter_raw():
                events, rest = openai_answers.split(rest + block)
                datas = [data for event in events if (data := openai_answers.data_of(event))]
                backend.count(len(datas), time.monotonic())
                if datas and is_first:
                    is_first = False
                    self.metrics.first_token.observe(exchange.seconds)
                    exchange.record["first_token_seconds"] = round(exchange.seconds, 4)
                for data in datas[-2:]:
                    if openai_answers.is_usage(data):
                        self._note_usage(exchange, json.loads(data)["usage"])
                yield events
                if datas and datas[-1] == b"[DONE]":
                    return
        raise BackendLost("its stream broke off")

    @contextlib.asynccontextmanager
    async def _post(self, request: BackendRequest, backend: Backend) -> AsyncIterator[httpx2.Response]:
        """Sends a backend the request.

        Raises:
            BackendLost: it cannot generate any more.
            RequestError: it refuses what it was asked.
        """
        path = "/v1/chat/completions" if request.kind == "chat" else "/v1/completions"
        read_seconds = self.settings.stall_seconds if request.is_streamed_upstream else self.settings.request_seconds
        timeout = httpx2.Timeout(read_seconds, connect=10.0)
        headers = {SECRET_HEADER: backend.secret}
        async with self.client.stream(
            "POST", backend.url + path, json=request.body, headers=headers, timeout=timeout
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

    def _note_usage(self, exchange: Exchange, usage: Usage) -> None:
        for kind, tokens in (
            ("prompt_tokens", usage["prompt_tokens"]),
            ("completion_tokens", usage["completion_tokens"]),
        ):
            self.metrics.tokens.labels(kind).inc(tokens)
            exchange.record[kind] = tokens


def _assembled(events: Sequence[bytes]) -> JSON:
    """The whole answer, from a stream's events."""
    datas = [data for event in events if (data := openai_answers.data_of(event))]
    return openai_answers.assemble(data for data in datas if data != b"[DONE]")
