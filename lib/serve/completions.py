"""A completion from its request to its last byte: checked, given a backend, forwarded there, handed on.

A request takes a place before its body is read. It is read and checked whole before it may wait for a backend, so that
nothing malformed, too large, too slow or unauthorised ever occupies one. From there on it is one task, which ends when
the client goes, a limit is reached, or the last byte is sent. The backend's slot is given back when the backend is done
with the request, which one that is stopped may be later.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import secrets
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field

import httpx2

from lib.config.serve_settings import ServeSettings
from lib.serve import openai_answers
from lib.serve.backend_link import ID_HEADER, OWNER_HEADER, SECRET_HEADER
from lib.serve.backend_pool import Backend, Place, Pool, QueueFull, slots_of
from lib.serve.event_log import Log
from lib.serve.feedback import Feedback
from lib.serve.http_exchange import JSON_HEADERS, Exchange, read_body, send_answer, start_of_answer, while_listening
from lib.serve.openai_answers import Usage
from lib.serve.openai_requests import BackendRequest, Kind, RequestError
from lib.serve.prometheus_metrics import Metrics

ATTEMPTS = 2  # a request of which nothing was answered yet may try another backend once
LOGPROBS_SLOTS = 2  # that an answer with log-probabilities counts as more: each of its tokens is put into words
STREAM_HEADERS = {"content-type": "text/event-stream", "cache-control": "no-cache", "x-accel-buffering": "no"}


class BackendLost(Exception):
    """A backend did not answer as it should.

    Args:
        may_retry: whether the request may be tried on another one, which it would not end as well.
    """

    def __init__(self, message: str, may_retry: bool = True):
        super().__init__(message)
        self.may_retry = may_retry


Read = Callable[[str, Kind, bytes], Awaitable[BackendRequest]]  # of an owner's body what a backend gets


@dataclass
class Attempt:
    """One request on one backend."""

    backend: Backend
    owner: str
    most_tokens: int  # of prompt and answer
    slots: int  # of its owner's, that it counts as
    slots_when_read: int  # the same once its prompt is read
    tokens: int = 0  # of the answer, so far
    since: float = field(default_factory=time.monotonic)
    id: str = field(default_factory=lambda: secrets.token_hex(8))
    is_over: bool = False  # for the backend, too
    whole: asyncio.Task[bytes] | None = None  # an answer that is no stream, and may come when nobody waits for it


class Completions:
    """Answers requests for completions by the backends of a pool."""

    def __init__(
        self,
        settings: ServeSettings,
        read: Read,
        pool: Pool,
        client: httpx2.AsyncClient,
        metrics: Metrics,
        log: Log,
        feedback: Feedback | None = None,
    ):
        self.settings, self.read = settings, read
        self.pool, self.client, self.metrics, self.log = pool, client, metrics, log
        self.feedback = feedback
        self.stopping: set[asyncio.Task[None]] = set()

    async def complete(self, exchange: Exchange, kind: Kind) -> None:
        """Answers one request, or raises what is wrong with it.

        Raises:
            RequestError: it is malformed, beyond a limit, or no backend could answer it.
            ClientGone: the client left before the answer's end.
        """
        try:
            with self.pool.place(exchange.owner) as place:
                body = await read_body(exchange, self.settings.max_body_bytes, self.settings.read_seconds)
                await while_listening(exchange.receive, self._answer(exchange, kind, body, place))
        except QueueFull as full:
            message = f"{self.pool.max_queue} requests wait already; try again in {full.retry_seconds} s"
            raise RequestError(429, message, "queue_full", retry_seconds=full.retry_seconds) from None
        finally:
            self.metrics.seconds.observe(exchange.seconds)

    async def _answer(self, exchange: Exchange, kind: Kind, body: bytes, place: Place) -> None:
        """Has a backend answer; a second one where the first failed before it answered anything."""
        since = time.monotonic()
        request = await self.read(exchange.owner, kind, body)
        exchange.record["parse_seconds"] = round(time.monotonic() - since, 4)
        exchange.is_stream = exchange.record["stream"] = request.stream
        for number in range(1, ATTEMPTS + 1):
            expected = self.pool.expected_tokens(exchange.owner, request.max_tokens)
            more = 0 if request.is_streamed else LOGPROBS_SLOTS
            slots = more + slots_of(request.prompt_tokens + expected)
            most_tokens = request.prompt_tokens + request.max_tokens
            backend = await self._take_slot(exchange, slots, most_tokens)
            attempt = Attempt(backend, exchange.owner, most_tokens, slots, more + slots_of(expected))
            place.has_backend = True
            try:
                async with asyncio.timeout(self.settings.request_seconds):
                    if request.stream:
                        await self._stream(exchange, request, attempt)
                    else:
                        await self._whole(exchange, request, attempt)
                return
            except TimeoutError:
                raise RequestError(504, f"not done after {self.settings.request_seconds:g} s", "timeout") from None
            except (BackendLost, httpx2.HTTPError) as error:
                # The backend is looked at before it gets another; one that is silent may still be at it.
                attempt.is_over = not isinstance(error, httpx2.ReadTimeout)
                backend, reason = attempt.backend, str(error) or type(error).__name__
                self.metrics.lost.labels(backend.name).inc()
                self.log("backend", backend=backend.name, state="failed", reason=reason, request_id=exchange.id)
                self.pool.set_up(backend, False)
                may_retry = not isinstance(error, BackendLost) or error.may_retry
                if exchange.has_content or number == ATTEMPTS or not may_retry:
                    raise RequestError(
                        502, "the backend was lost in the middle of the answer", "backend_lost"
                    ) from None
            finally:
                self._give_back(attempt)

    def _give_back(self, attempt: Attempt) -> None:
        """Gives a slot back: at once where the backend is done with the request, else when it is."""

        def give_back(is_abandoned: bool) -> None:
            seconds = time.monotonic() - attempt.since
            if attempt.tokens:  # what was left before says nothing
                self.pool.has_answered(attempt.owner, attempt.tokens)
            slots, tokens = attempt.slots, attempt.most_tokens
            self.pool.give_back(attempt.backend, attempt.owner, seconds, is_abandoned, slots, tokens)

        async def later() -> None:
            try:
                await self._stop(attempt)
            finally:
                give_back(is_abandoned=True)

        if attempt.is_over:
            give_back(is_abandoned=False)
            return
        task = asyncio.create_task(later())
        self.stopping.add(task)
        task.add_done_callback(self.stopping.discard)

    async def _stop(self, attempt: Attempt) -> None:
        """Has a backend stop a request, and waits until nothing is left of it.

        A server that runs already cannot be asked. It stops a stream, whose connection is closed by now, at the next
        token, and anything else not at all, so the rest of that is waited for.
        """
        backend = attempt.backend
        if not backend.secret:
            if attempt.whole is not None:
                await asyncio.gather(attempt.whole, return_exceptions=True)
            return
        if attempt.whole is not None:
            attempt.whole.cancel()
        try:
            headers, seconds = {SECRET_HEADER: backend.secret}, self.settings.stall_seconds
            await self.client.delete(f"{backend.url}/requests/{attempt.id}", headers=headers, timeout=seconds)
        except httpx2.HTTPError as error:
            reason = f"it does not stop a request: {str(error) or type(error).__name__}"
            self.log("backend", backend=backend.name, state="failed", reason=reason)
            self.pool.set_up(backend, False)

    async def _take_slot(self, exchange: Exchange, slots: int, tokens: int) -> Backend:
        since = time.monotonic()
        try:
            backend = await self.pool.take(exchange.owner, self.settings.queue_seconds, slots, tokens)
        except TimeoutError:
            message = f"no backend was free in {self.settings.queue_seconds:g} s"
            raise RequestError(503, message, "busy", retry_seconds=self.pool.retry_seconds()) from None
        waited = time.monotonic() - since
        self.metrics.queue_seconds.observe(waited)
        exchange.record |= {"backend": backend.name, "queue_seconds": round(waited, 4)}
        return backend

    async def _stream(self, exchange: Exchange, request: BackendRequest, attempt: Attempt) -> None:
        """Hands the backend's events on as they arrive."""
        kept = openai_answers.Assembly()  # for a label that may come
        # Closed on every way out: the backend stops generating when its connection ends.
        async with contextlib.aclosing(self._events(exchange, request, attempt)) as blocks:
            async for events in blocks:
                if self.feedback is not None:
                    kept.add(events)
                    if attempt.is_over:  # before the client knows, who may label it
                        self.feedback.remember(exchange.owner, request, kept.answer())
                passed = [event for event in events if self._is_for_client(event, request)]
                if not passed:
                    continue
                if not exchange.status:
                    await exchange.send(start_of_answer(200, STREAM_HEADERS))
                exchange.has_content = exchange.has_content or any(openai_answers.data_of(event) for event in passed)
                body = b"".join(openai_answers.for_clients(event, request.model) + b"\n\n" for event in passed)
                await exchange.send({"type": "http.response.body", "body": body, "more_body": True})
        await exchange.send({"type": "http.response.body", "body": b""})

    def _is_for_client(self, event: bytes, request: BackendRequest) -> bool:
        data = openai_answers.data_of(event)
        return data is None or request.include_usage or not openai_answers.is_usage(data)

    async def _whole(self, exchange: Exchange, request: BackendRequest, attempt: Attempt) -> None:
        """Collects the backend's answer, and sends it when it is whole."""
        if request.is_streamed:
            assembly = openai_answers.Assembly()
            async with contextlib.aclosing(self._events(exchange, request, attempt)) as blocks:
                async for events in blocks:
                    assembly.add(events)
            whole = assembly.answer()
            answer = json.dumps(whole).encode()
        else:
            attempt.whole = asyncio.create_task(self._fetch(request, attempt))
            answer = await asyncio.shield(attempt.whole)
            attempt.is_over = True
            usage = openai_answers.usage_of(answer)
            whole = {} if self.feedback is None else json.loads(answer)
            self._note_usage(exchange, usage, attempt)
            attempt.backend.count(attempt.tokens, time.monotonic())
        if self.feedback is not None:
            self.feedback.remember(exchange.owner, request, whole)
        exchange.has_content = True
        await send_answer(exchange, 200, JSON_HEADERS, openai_answers.for_clients(answer, request.model))

    async def _fetch(self, request: BackendRequest, attempt: Attempt) -> bytes:
        """A backend's whole answer."""
        async with self._post(request, attempt) as response:
            return await response.aread()

    async def _events(
        self, exchange: Exchange, request: BackendRequest, attempt: Attempt
    ) -> AsyncGenerator[list[bytes], None]:
        """The events of a backend's stream, as many at a time as came together, the last being [DONE].

        Raises:
            BackendLost: the stream broke off.
        """
        rest, is_first, backend = b"", True, attempt.backend
        async with self._post(request, attempt) as response:
            async for block in response.aiter_raw():
                events, rest = openai_answers.split(rest + block)
                datas = [data for event in events if (data := openai_answers.data_of(event))]
                backend.count(len(datas), time.monotonic())
                attempt.tokens += len(datas)
                if datas and is_first:
                    is_first = False
                    self.pool.has_read(attempt.owner, attempt.slots, attempt.slots_when_read)
                    attempt.slots = attempt.slots_when_read
                    self.metrics.first_token.observe(exchange.seconds)
                    exchange.record["first_token_seconds"] = round(exchange.seconds, 4)
                if datas and openai_answers.is_death(datas[-1]):
                    raise _died()
                if datas and openai_answers.is_failure(datas[-1]):
                    attempt.is_over = True
                    raise _failure()
                for data in datas[-2:]:
                    if openai_answers.is_usage(data):
                        self._note_usage(exchange, json.loads(data)["usage"], attempt)
                attempt.is_over = bool(datas) and datas[-1] == b"[DONE]"
                yield events
                if attempt.is_over:
                    return
        raise BackendLost("its stream broke off")

    @contextlib.asynccontextmanager
    async def _post(self, request: BackendRequest, attempt: Attempt) -> AsyncIterator[httpx2.Response]:
        """Sends a backend the request.

        Raises:
            BackendLost: it cannot generate any more.
            RequestError: it refuses what it was asked.
        """
        path = "/v1/chat/completions" if request.kind == "chat" else "/v1/completions"
        backend = attempt.backend
        read_seconds = self.settings.stall_seconds if request.is_streamed else self.settings.request_seconds
        timeout = httpx2.Timeout(read_seconds, connect=10.0)
        headers = {SECRET_HEADER: backend.secret, ID_HEADER: attempt.id, "content-type": "application/json"}
        headers |= {OWNER_HEADER: attempt.owner} if backend.secret else {}  # others' servers need no names
        async with self.client.stream(
            "POST", backend.url + path, content=request.content, headers=headers, timeout=timeout
        ) as response:
            if response.status_code != 200:
                answer = await response.aread()
                if openai_answers.is_failure(answer):
                    attempt.is_over = True
                    raise _failure()
                if openai_answers.is_death(answer):
                    raise _died()
                text = answer.decode(errors="replace")[:500]
                # It answers 404 to whatever went wrong, in the request or in itself.
                if "generation thread died" in text:
                    raise _died()
                if response.status_code not in (400, 404):
                    raise BackendLost(f"it answers {response.status_code}: {text}")
                with contextlib.suppress(ValueError, KeyError, TypeError):
                    text = json.loads(text)["error"]
                raise RequestError(400, f"the model cannot take this: {text}", "invalid_request")
            yield response

    def _note_usage(self, exchange: Exchange, usage: Usage, attempt: Attempt) -> None:
        attempt.tokens = usage["completion_tokens"]  # of a tool's call there is one event, whatever it has
        for kind, tokens in (
            ("prompt_tokens", usage["prompt_tokens"]),
            ("completion_tokens", usage["completion_tokens"]),
        ):
            self.metrics.tokens.labels(kind).inc(tokens)
            exchange.record[kind] = tokens


def _died() -> BackendLost:
    return BackendLost("the thread that generates has ended", may_retry=False)


def _failure() -> RequestError:
    return RequestError(500, "the answer could not be made of what the model wrote", "answer_failed")
