"""Generation: one thread with mlx-lm's batched generator, which requests join and leave while others are answered."""

from __future__ import annotations

import contextlib
import functools
import queue
import threading
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx
from mlx_lm.generate import BatchGenerator, StopSequences, TextStateMachine, make_text_state_machine
from mlx_lm.models.cache import LRUPromptCache, can_trim_prompt_cache, trim_prompt_cache
from mlx_lm.sample_utils import apply_min_p, apply_top_k, apply_top_p, greedy_sampler, make_logits_processors

IDLE_SECONDS = 0.2  # between two looks at whether the server ends
PROMPT_CACHE_ENTRIES = 16
SHARED_SAMPLERS = 64


@dataclass(frozen=True)
class SamplingOptions:
    """How tokens are drawn; the names are those of OpenAI's and mlx-lm's parameters."""

    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    logit_bias: dict[int, float] = field(default_factory=dict)
    repetition_penalty: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0

    def sampler(self) -> Callable[[mx.array], mx.array]:
        """Draws tokens, int [B], of log-probabilities [B, V]; with a seed the same ones whatever else is answered.

        Requests without a seed share the sampler of their parameters: mlx-lm calls it once for the whole batch.
        """
        if self.temperature == 0:
            return greedy_sampler
        parameters = (self.temperature, self.top_p, self.top_k, self.min_p)
        return shared_sampler(*parameters) if self.seed is None else make_sampler(*parameters, seed=self.seed)

    def processors(self) -> list[Any]:
        """mlx-lm's logits processors."""
        return make_logits_processors(
            self.logit_bias or None,
            self.repetition_penalty or None,
            presence_penalty=self.presence_penalty or None,
            frequency_penalty=self.frequency_penalty or None,
        )


def make_sampler(
    temperature: float, top_p: float, top_k: int, min_p: float, seed: int | None = None
) -> Callable[[mx.array], mx.array]:
    """A sampler; with a seed it draws from a stream of random numbers that is its alone."""
    keys = None if seed is None else [mx.random.key(seed)]

    def draw(logprobs: mx.array) -> mx.array:
        if 0 < top_p < 1:
            logprobs = apply_top_p(logprobs, top_p)
        if min_p:
            logprobs = apply_min_p(logprobs, min_p)
        if 0 < top_k < logprobs.shape[-1]:
            logprobs = apply_top_k(logprobs, top_k)
        if keys is None:
            return mx.random.categorical(logprobs / temperature)
        keys[0], key = mx.random.split(keys[0])
        return mx.random.categorical(logprobs / temperature, key=key)

    return draw


shared_sampler = functools.lru_cache(SHARED_SAMPLERS)(make_sampler)


@dataclass(frozen=True)
class Token:
    """A token of an answer, with its log-probability in nats and the likeliest tokens at its position."""

    text: str
    logprob: float
    top: list[tuple[str, float]]


@dataclass
class Piece:
    """A part of an answer, as it is generated.

    Args:
        finish_reason: stop, length or tool_calls, of the last piece alone; `error` where generation failed.
    """

    text: str = ""
    reasoning: str = ""
    tool_calls: list[dict[str, Any]] = field(default_factory=list)
    tokens: list[Token] = field(default_factory=list)
    count: int = 0
    finish_reason: str | None = None

    def add(self, piece: Piece) -> None:
        """Appends what follows."""
        self.text += piece.text
        self.reasoning += piece.reasoning
        self.tool_calls += piece.tool_calls
        self.tokens += piece.tokens
        self.count += piece.count
        self.finish_reason = piece.finish_reason


@dataclass(eq=False)
class Generation:
    """A request under way.

    Args:
        owner: whose prompt cache it uses.
        prompt: token ids.
        stop: strings that end the answer and are no part of it.
        top_logprobs: likeliest tokens to tell of each token; None for no log-probabilities.
        put: takes the pieces of one step, in the generating thread.
    """

    owner: str
    prompt: list[int]
    max_tokens: int
    sampling: SamplingOptions
    stop: tuple[str, ...]
    top_logprobs: int | None
    tools: list[dict[str, Any]] | None
    put: Callable[[Piece], None]
    is_cancelled: bool = False


class Generator(threading.Thread):
    """Answers requests with one model.

    Args:
        load: gives mlx-lm's model and tokenizer, and the tokens that end an answer.
        concurrency: requests that are decoded at once; more wait.

    `deliver` takes a function that passes on the pieces of one step: a server has its event loop call it.
    """

    def __init__(self, load: Callable[[], tuple[Any, Any, list[int]]], concurrency: int) -> None:
        super().__init__(daemon=True, name="generation")
        self._load, self._concurrency = load, concurrency
        self.deliver: Callable[[Callable[[], None]], None] = lambda pass_on: pass_on()
        self._queue: queue.Queue[Generation] = queue.Queue()
        self._answers: dict[int, _Answer] = {}
        self._ends = False
        self.is_ready = threading.Event()
        self.failure: BaseException | None = None

    def submit(self, request: Generation) -> None:
        self._queue.put(request)

    def close(self) -> None:
        """Ends the thread; requests under way end with `error`."""
        self._ends = True
        self.join(30)

    def run(self) -> None:
        try:
            self.model, self.tokenizer, self.end_ids = self._load()
            self.is_ready.set()
            self._generate()
        except BaseException as error:  # the server reports it and ends
            self.failure = error
            traceback.print_exc()
            self.is_ready.set()
        finally:
            left = [answer.request for answer in self._answers.values()]
            while not self._queue.empty():
                left.append(self._queue.get())
            self.deliver(functools.partial(_pass_on, [(request, Piece(finish_reason="error")) for request in left]))

    def _generate(self) -> None:
        stops = StopSequences([(token,) for token in self.end_ids])
        batch = BatchGenerator(self.model, completion_batch_size=self._concurrency)
        cache = LRUPromptCache(PROMPT_CACHE_ENTRIES)
        while not self._ends:
            self._take_in(batch, cache, stops)
            gone = [uid for uid, answer in self._answers.items() if answer.request.is_cancelled]
            if gone:
                batch.remove(gone)
                for uid in gone:
                    del self._answers[uid]
            if not self._answers:
                continue
            pieces: list[tuple[Generation, Piece]] = []
            for response in batch.next()[1]:
                answer = self._answers.get(response.uid)
                if answer is None:
                    continue
                piece = self._piece_of(answer, response)
                pieces.append((answer.request, piece))
                is_over = piece.finish_reason is not None
                if is_over and response.finish_reason is None:  # by a stop string, or an error
                    batch.remove([response.uid])
                if is_over:
                    del self._answers[response.uid]
                    if response.finish_reason is not None:
                        cache.insert_cache(answer.request.owner, list(response.all_tokens), response.prompt_cache)
            self.deliver(functools.partial(_pass_on, pieces))
        batch.close()

    def _piece_of(self, answer: _Answer, response: Any) -> Piece:
        """A token's piece; an answer of which no text can be made ends, and the others go on."""
        try:
            return answer.piece_of(response)
        except Exception:  # e.g. a padded vocabulary's id, which the tokenizer lacks
            traceback.print_exc()
            return Piece(finish_reason="error")

    def _take_in(self, batch: BatchGenerator, cache: LRUPromptCache, stops: StopSequences) -> None:
        """Inserts the requests that came; waits for one where none is under way."""
        with contextlib.suppress(queue.Empty):
            while True:
                request = self._queue.get(timeout=None if self._answers else IDLE_SECONDS, block=not self._answers)
                if not request.is_cancelled:
                    self._insert(request, batch, cache, stops)

    def _insert(self, request: Generation, batch: BatchGenerator, cache: LRUPromptCache, stops: StopSequences) -> None:
        known, rest = cache.fetch_nearest_cache(request.owner, request.prompt)
        if known is not None and not rest:  # one token has to be read, to know what follows it
            can_trim = can_trim_prompt_cache(known)
            if can_trim:
                trim_prompt_cache(known, 1)
            known, rest = (known, request.prompt[-1:]) if can_trim else (None, request.prompt)
        (uid,) = batch.insert(
            [list(rest)],
            max_tokens=[request.max_tokens],
            caches=None if known is None else [known],
            all_tokens=[request.prompt[: len(request.prompt) - len(rest)]],
            samplers=[request.sampling.sampler()],
            logits_processors=[request.sampling.processors()],
            stop_sequences=[stops],
        )
        self._answers[uid] = _Answer(request, self.tokenizer)


def _pass_on(pieces: list[tuple[Generation, Piece]]) -> None:
    for request, piece in pieces:
        request.put(piece)


class _Answer:
    """What has been generated for a request: tokens become text, reasoning and tool calls."""

    def __init__(self, request: Generation, tokenizer: Any) -> None:
        self.request, self.tokenizer = request, tokenizer
        self.detokenizer = tokenizer.detokenizer
        state = "normal"
        if tokenizer.has_thinking:
            opened = tokenizer.rfind_think_start(request.prompt) > tokenizer.rfind_think_end(request.prompt)
            state = "reasoning" if opened else state
        self._state = make_text_state_machine(tokenizer).make_state(tokenizer.response_initial_state or state)
        self._name = self._state[0]
        self._call, self._held, self._has_called = "", "", False

    def piece_of(self, response: Any) -> Piece:
        """Takes in a token; returns what it completes."""
        piece = Piece(count=1, finish_reason=response.finish_reason)
        if response.finish_reason != "stop":
            self.detokenizer.add_token(response.token)
            if self.request.top_logprobs is not None:
                piece.tokens.append(self._token(response))
        if response.finish_reason is not None:
            self.detokenizer.finalize()
        self._split(self.detokenizer.last_segment, piece)
        if response.finish_reason is not None:
            self._state, rest, name = TextStateMachine.flush(self._state)
            self._route(piece, [(name or self._name, rest)])
            if self._call:
                self._finish_call(piece)
        self._cut_at_stop(piece, is_last=response.finish_reason is not None)
        if piece.finish_reason == "stop" and self._has_called:
            piece.finish_reason = "tool_calls"
        return piece

    def _token(self, response: Any) -> Token:
        logprobs = response.logprobs
        count = self.request.top_logprobs or 0
        top = mx.argpartition(-logprobs, kth=count)[:count].tolist() if count else []
        top = sorted(((self.tokenizer.decode([token]), logprobs[token].item()) for token in top), key=lambda t: -t[1])
        return Token(self.tokenizer.decode([response.token]), logprobs[response.token].item(), top)

    def _split(self, text: str, piece: Piece) -> None:
        self._state, segments = TextStateMachine.split(self._state, text)
        self._route(piece, segments)

    def _route(self, piece: Piece, segments: list[tuple[str, str]]) -> None:
        for name, text in segments:
            if self._name == "tool" and name != "tool":
                self._finish_call(piece)
            self._name = name
            if name == "tool":
                self._call += text
            elif name == "reasoning":
                piece.reasoning += text
            else:
                piece.text += text

    def _finish_call(self, piece: Piece) -> None:
        """A call as its model's parser reads it; text that it cannot read is part of the answer."""
        try:
            parsed = self.tokenizer.tool_parser(self._call, self.request.tools)
            piece.tool_calls += parsed if isinstance(parsed, list) else [parsed]
            self._has_called = True
        except Exception:  # a model may write anything between the marks of a call
            piece.text += self._call
        self._call = ""

    def _cut_at_stop(self, piece: Piece, is_last: bool) -> None:
        """Ends the text at the first stop string; holds back text that may become the beginning of one."""
        if not self.request.stop:
            return
        text = self._held + piece.text
        places = [place for stop in self.request.stop if (place := text.find(stop)) >= 0]
        if places:
            piece.text, self._held, piece.finish_reason = text[: min(places)], "", "stop"
            return
        longest = max(
            (n for stop in self.request.stop for n in range(1, len(stop)) if text.endswith(stop[:n])), default=0
        )
        kept = 0 if is_last else longest
        piece.text, self._held = text[: len(text) - kept], text[len(text) - kept :]
