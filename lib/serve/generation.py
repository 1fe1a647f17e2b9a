"""The served model, and generation: one thread with mlx-lm's batched generator, which requests join and leave.

Prompts are rendered by the code that renders training rows.
"""

from __future__ import annotations

import contextlib
import functools
import json
import queue
import secrets
import threading
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx.utils import tree_flatten, tree_unflatten
from mlx_lm.generate import BatchGenerator, StopSequences, TextStateMachine, make_text_state_machine
from mlx_lm.models.cache import LRUPromptCache, can_trim_prompt_cache, trim_prompt_cache
from mlx_lm.sample_utils import apply_min_p, apply_top_k, apply_top_p, greedy_sampler, make_logits_processors
from mlx_lm.tuner.utils import load_adapters
from mlx_lm.utils import load_model

from lib.config.settings import DataSettings, ModelSettings
from lib.data.encode import Encoder, chat_ids
from lib.data.record_formats import Plain
from lib.data.tokenizer import LARGEST_ID, load_tokenizer_of, stored_config, vocabulary
from lib.errors import UserError
from lib.model.load import compute_type
from lib.serve.requests import JSON, ChatRequest, CompletionRequest, SamplingParameters, TextRequest
from lib.system import model_folder

IDLE_SECONDS = 0.2  # between two looks at whether the server ends
PROMPT_CACHE_ENTRIES = 16
Sampler = Callable[[mx.array], mx.array]  # tokens, int [B], of log-probabilities [B, V]


class ServedModel:
    """A model of a folder, with a run's adapter where `run` names one; fuse: fused into the weights, in memory. data:
    of the run: the chat template and its arguments. Raises UserError: the model has no tokenizer, or data.chat_template
    cannot be read."""

    def __init__(self, settings: ModelSettings, data: DataSettings, folder: Path, run: Path | None, fuse: bool) -> None:
        self.settings, self.folder, self.run, self.fuse = settings, folder, run, fuse
        self.tokenizer: Any = load_tokenizer_of(settings)
        if self.tokenizer is None:
            raise UserError(f"model.path {settings.path}: the model has no tokenizer, and requests are texts")
        self.encoder = Encoder(self.tokenizer, data, None)
        self.computes = compute_type(settings)
        self.vocab_size = vocabulary(settings).vocab_size or LARGEST_ID
        self.context_tokens = model_folder.context_tokens(stored_config(settings)) or LARGEST_ID

    def load(self) -> tuple[Any, Any, list[int]]:
        """The model, the tokenizer, and the tokens that end an answer: the end of turn of training among them."""
        model, _ = load_model(self.folder, lazy=True, trust_remote_code=self.settings.trust_remote_code)
        if self.run is not None:
            load_adapters(model, str(self.run))
        if self.fuse:
            fused = [(name, layer.fuse()) for name, layer in model.named_modules() if hasattr(layer, "fuse")]
            model.update_modules(tree_unflatten(fused))
        if dtype := self.settings.dtype or ("float32" if self.computes.is_float32 else None):
            model.set_dtype(getattr(mx, dtype))
        model.eval()
        mx.eval([array for _, array in tree_flatten(model.parameters())])
        return model, self.tokenizer, sorted(self.encoder.end_ids)

    def prompt_ids(self, request: ChatRequest | TextRequest) -> list[int]:
        """A request's token ids, as a training row's prompt has them. Raises UserError: the template does not take a
        message or tools; names which."""
        if isinstance(request, TextRequest):
            return self.encoder.encode_plain(Plain(request.text, (), "")).prompt
        tools = request.tool_definitions
        if request.messages[-1].role == "assistant":
            raise UserError("the last message is from 'assistant'; a conversation ends before the answer")
        messages = [message.fields() for message in request.messages]
        ids = chat_ids(self.encoder, messages, tools)
        text, bare = self.tokenizer.decode(ids), ""
        if tools:  # whose names the question may have, too
            with contextlib.suppress(UserError):
                bare = self.tokenizer.decode(chat_ids(self.encoder, messages))
        names = (tool["function"]["name"] for tool in tools or ())
        if lost := [name for name in names if text.count(name) <= bare.count(name)]:
            raise UserError(f"the chat template leaves out tools ({', '.join(lost)}); ask without them")
        return ids


# ---- Samplers


def sampler_of(sampling: SamplingParameters) -> Sampler:
    """Greedy without a temperature; with a seed the same tokens again, whatever else is answered. Requests without a
    seed share the sampler of their parameters: mlx-lm calls it once for the whole batch."""
    if not sampling.temperature:
        return greedy_sampler
    make = make_sampler if sampling.seed is not None else shared_sampler
    top_p, top_k, min_p = sampling.top_p or 1.0, sampling.top_k or 0, sampling.min_p or 0.0
    return make(sampling.temperature, top_p, top_k, min_p, sampling.seed)


def make_sampler(temperature: float, top_p: float, top_k: int, min_p: float, seed: int | None) -> Sampler:
    """A sampler; with a seed it draws from a stream of random numbers of its own."""
    keys = [] if seed is None else [mx.random.key(seed)]

    def draw(logprobs: mx.array) -> mx.array:
        if top_p < 1:
            logprobs = apply_top_p(logprobs, top_p)
        if min_p:
            logprobs = apply_min_p(logprobs, min_p)
        if 0 < top_k < logprobs.shape[-1]:
            logprobs = apply_top_k(logprobs, top_k)
        key = None
        if keys:
            keys[0], key = mx.random.split(keys[0])
        return mx.random.categorical(logprobs / temperature, key=key)

    return draw


shared_sampler = functools.lru_cache(64)(make_sampler)


# ---- The generator


@dataclass
class Piece:
    """A part of an answer. finish_reason: stop, length or tool_calls of the last piece; error, left where it broke."""

    text: str = ""
    reasoning: str = ""
    tool_calls: list[JSON] = field(default_factory=list)  # as OpenAI streams them
    logprobs: list[JSON] = field(default_factory=list)  # of each token, in nats, as OpenAI has them
    count: int = 0  # tokens
    finish_reason: str | None = None

    def add(self, piece: Piece) -> None:
        """Appends the next piece."""
        for name in ("text", "reasoning", "tool_calls", "logprobs", "count"):
            setattr(self, name, getattr(self, name) + getattr(piece, name))
        self.finish_reason = piece.finish_reason


@dataclass(eq=False)
class Generation:
    """A request under way."""

    owner: str  # whose prompt cache it uses
    prompt: list[int]  # token ids
    max_tokens: int
    request: CompletionRequest
    put: Callable[[Piece], None]  # takes the pieces of the answer
    is_cancelled: bool = False


class Generator(threading.Thread):
    """Answers requests with one model, `concurrency` at once. load: gives mlx-lm's model and tokenizer, and the tokens
    that end an answer. deliver: calls a function with arguments where pieces are wanted: a server has its event loop do
    so. on_failure: is called when generation ends by an error, which `failure` then is."""

    def __init__(self, load: Callable[[], tuple[Any, Any, list[int]]], concurrency: int) -> None:
        super().__init__(daemon=True, name="generation")
        self._load, self._concurrency = load, concurrency
        self.deliver: Callable[..., Any] = lambda call, *arguments: call(*arguments)
        self.on_failure: Callable[[], None] = lambda: None
        self._queue: queue.Queue[Generation] = queue.Queue()
        self._answers: dict[int, AnswerText] = {}
        self._ends = False
        self.is_ready = threading.Event()
        self.failure: BaseException | None = None

    def submit(self, generation: Generation) -> None:
        self._queue.put(generation)

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
        left = [answer.generation for answer in self._answers.values()]
        while not self._queue.empty():
            left.append(self._queue.get())
        with contextlib.suppress(RuntimeError):  # the event loop has ended
            self.deliver(_put, [(generation, Piece(finish_reason="error")) for generation in left])
        self.is_ready.set()
        if self.failure is not None:
            self.on_failure()
        mx.clear_streams()  # else MLX ends them after this thread, and a process that exits meanwhile is aborted

    def _generate(self) -> None:
        batch = BatchGenerator(self.model, completion_batch_size=self._concurrency)
        cache = LRUPromptCache(PROMPT_CACHE_ENTRIES)
        while not self._ends:
            with contextlib.suppress(queue.Empty):
                while True:  # all that came; it waits where there is no answer under way
                    timeout = None if self._answers else IDLE_SECONDS
                    generation = self._queue.get(timeout=timeout, block=not self._answers)
                    if not generation.is_cancelled:
                        self._insert(generation, batch, cache)
            if gone := [uid for uid, answer in self._answers.items() if answer.generation.is_cancelled]:
                batch.remove(gone)
                for uid in gone:
                    del self._answers[uid]
            if self._answers:
                self._step(batch, cache)
        batch.close()

    def _step(self, batch: BatchGenerator, cache: LRUPromptCache) -> None:
        """Delivers the next token of every answer, all in one call; finished prompts go to the cache."""
        pieces: list[tuple[Generation, Piece]] = []
        for response in batch.next()[1]:
            if (answer := self._answers.get(response.uid)) is None:
                continue
            try:
                piece = answer.piece_of(response)
            except Exception:  # e.g. a padded vocabulary's id, which the tokenizer lacks: the other answers go on
                traceback.print_exc()
                piece = Piece(finish_reason="error")
            pieces.append((answer.generation, piece))
            if piece.finish_reason is not None:
                del self._answers[response.uid]
                if response.finish_reason is None:  # by a stop string, or an error
                    batch.remove([response.uid])
                else:
                    cache.insert_cache(answer.generation.owner, list(response.all_tokens), response.prompt_cache)
        self.deliver(_put, pieces)

    def _insert(self, generation: Generation, batch: BatchGenerator, cache: LRUPromptCache) -> None:
        prompt, sampling = generation.prompt, generation.request
        cached, rest = cache.fetch_nearest_cache(generation.owner, prompt)
        if cached is not None and not rest:  # the last token has to be read again, to know what follows it
            if can_trim_prompt_cache(cached):
                trim_prompt_cache(cached, 1)
                rest = prompt[-1:]
            else:
                cached, rest = None, prompt
        processors = make_logits_processors(
            {int(token): value for token, value in (sampling.logit_bias or {}).items()} or None,
            sampling.repetition_penalty,
            presence_penalty=sampling.presence_penalty or None,
            frequency_penalty=sampling.frequency_penalty or None,
        )
        (uid,) = batch.insert(
            [list(rest)],
            max_tokens=[generation.max_tokens],
            caches=None if cached is None else [cached],
            all_tokens=[prompt[: len(prompt) - len(rest)]],
            samplers=[sampler_of(sampling)],
            logits_processors=[processors],
            stop_sequences=[StopSequences([(token,) for token in self.end_ids])],
        )
        self._answers[uid] = AnswerText(generation, self.tokenizer)


def _put(pieces: list[tuple[Generation, Piece]]) -> None:
    for generation, piece in pieces:
        generation.put(piece)


class AnswerText:
    """Turns the tokens of an answer into text, reasoning and tool calls."""

    def __init__(self, generation: Generation, tokenizer: Any) -> None:
        self.generation, self.tokenizer, self.detokenizer = generation, tokenizer, tokenizer.detokenizer
        prompt, self._request = generation.prompt, generation.request
        thinks = tokenizer.has_thinking and tokenizer.rfind_think_start(prompt) > tokenizer.rfind_think_end(prompt)
        start = tokenizer.response_initial_state or ("reasoning" if thinks else "normal")
        self._state = make_text_state_machine(tokenizer).make_state(start)
        self._kind = self._state[0]  # normal, reasoning or tool
        self._call, self._held, self._call_count = "", "", 0

    def piece_of(self, response: Any) -> Piece:
        """Takes in a token; returns the text that it completes."""
        piece, is_last = Piece(count=1, finish_reason=response.finish_reason), response.finish_reason is not None
        if response.finish_reason != "stop":
            self.detokenizer.add_token(response.token)
            if (count := self._request.logprobs_count) is not None:
                top = mx.argpartition(-response.logprobs, kth=count)[:count].tolist() if count else []
                entries = [self._entry(token, response.logprobs) for token in [response.token, *top]]
                likeliest = sorted(entries[1:], key=lambda entry: -entry["logprob"])
                piece.logprobs.append(entries[0] | {"top_logprobs": likeliest})
        if is_last:
            self.detokenizer.finalize()
        self._state, segments = TextStateMachine.split(self._state, self.detokenizer.last_segment)
        self._route(piece, segments)
        if is_last:
            self._state, rest, kind = TextStateMachine.flush(self._state)
            self._route(piece, [(kind or self._kind, rest), ("normal", "")])
        self._cut_at_stop(piece, is_last)
        if piece.finish_reason == "stop" and self._call_count:
            piece.finish_reason = "tool_calls"
        return piece

    def _entry(self, token: int, logprobs: mx.array) -> JSON:
        text = self.tokenizer.decode([token])
        return {"token": text, "logprob": logprobs[token].item(), "bytes": list(text.encode())}

    def _route(self, piece: Piece, segments: list[tuple[str, str]]) -> None:
        for kind, text in segments:
            if self._kind == "tool" and kind != "tool":
                self._finish_call(piece)
            self._kind = kind
            if kind == "tool":
                self._call += text
            elif kind == "reasoning":
                piece.reasoning += text
            else:
                piece.text += text

    def _finish_call(self, piece: Piece) -> None:
        """Parses a call by the model's parser; text that it cannot parse is part of the answer."""
        try:
            parsed = self.tokenizer.tool_parser(self._call, self._request.tool_definitions)
            for call in parsed if isinstance(parsed, list) else [parsed]:
                arguments = call.get("arguments", {})
                text = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
                named = {"index": self._call_count, "id": call.get("id") or f"call_{secrets.token_hex(12)}"}
                function = {"name": call.get("name", ""), "arguments": text}
                piece.tool_calls.append({**named, "type": "function", "function": function})
                self._call_count += 1
        except Exception:  # a model may write anything between the marks of a call
            piece.text += self._call
        self._call = ""

    def _cut_at_stop(self, piece: Piece, is_last: bool) -> None:
        """Ends the text at the first stop string; holds back text that may become the beginning of one."""
        stops, text = self._request.stops, self._held + piece.text
        if positions := [position for stop in stops if (position := text.find(stop)) >= 0]:
            piece.text, self._held, piece.finish_reason = text[: min(positions)], "", "stop"
            return
        begun = (n for stop in stops for n in range(1, len(stop)) if text.endswith(stop[:n]))
        end = len(text) - (0 if is_last else max(begun, default=0))
        piece.text, self._held = text[:end], text[end:]
