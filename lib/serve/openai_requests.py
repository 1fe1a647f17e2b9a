"""OpenAI's chat and text completions: what a request may ask for, and what a backend is asked for then.

Only what is known goes through, each value within the limits that mlx_lm.server relies on but does not check: there a
`stop` that is no string, a `top_k` or a token id beyond the vocabulary ends the thread that generates for everybody,
an image's URL is fetched, and `model`, `adapters` and `draft_model` load whatever they name. What a client may say but
would not get is refused, never ignored.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Any, Literal, TypeVar

import pydantic_core
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from lib.config.section import Fraction

Kind = Literal["chat", "text"]
JSON = dict[str, Any]  # an object, as OpenAI's clients and mlx_lm.server write it
TOP_LOGPROBS = 10
MOST_VALUES = 50_000  # in a body: 10,000 messages have 40,000
MOST_KEYS = 5_000  # of an object, where each wrong one is noted
DEEPEST = 64


class RequestError(Exception):
    """A request that gets no answer: the HTTP status, and OpenAI's words for what is wrong."""

    def __init__(
        self,
        status: int,
        message: str,
        code: str | None = None,
        param: str | None = None,
        retry_seconds: int | None = None,
    ):
        super().__init__(message)
        # A client's own words are in some of them.
        self.status, self.message, self.code, self.param = status, message[:500], code, param and param[:100]
        self.retry_seconds = retry_seconds

    @property
    def body(self) -> bytes:
        """OpenAI's JSON of an error."""
        kind = {401: "authentication_error", 429: "rate_limit_error"}.get(self.status)
        kind = kind or ("invalid_request_error" if self.status < 500 else "server_error")
        return json.dumps(
            {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}
        ).encode()


class Part(BaseModel):
    """Something that clients send."""

    # Strict: "1" is no number. Unknown keys are refused.
    model_config = ConfigDict(frozen=True, strict=True, extra="forbid")


SomePart = TypeVar("SomePart", bound=Part)


class Text(Part):
    """A piece of a message's content; images would be fetched from wherever they say."""

    type: Literal["text"]
    text: str


class Function(Part):
    """What a tool call calls."""

    name: str
    arguments: str


class ToolCall(Part):
    """A call that the assistant made earlier in the conversation."""

    id: str | None = None
    type: Literal["function"] = "function"
    index: int | None = None
    function: Function


class Message(Part):
    """A message; keys with the value null, as clients echo them, are taken as absent."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | Annotated[list[Text], Field(fail_fast=True)] | None = None
    name: str | None = None
    tool_calls: Annotated[list[ToolCall], Field(fail_fast=True)] | None = None
    tool_call_id: str | None = None
    reasoning: str | None = None
    refusal: None = None
    annotations: None = None
    audio: None = None
    function_call: None = None

    def upstream(self) -> JSON:
        """As mlx_lm.server takes it: content as one string."""
        message: JSON = self.model_dump(exclude_none=True, exclude={"content"})
        content = self.content
        message["content"] = content if isinstance(content, str) else "".join(part.text for part in content or ())
        return message


class Tool(Part):
    """A function that the model may call."""

    class Signature(Part):
        """Name, meaning and JSON schema."""

        name: str
        description: str | None = None
        parameters: JSON | None = None

    type: Literal["function"]
    function: Signature


class StreamOptions(Part):
    """What a stream has besides its tokens."""

    include_usage: bool | None = None


class TextFormat(Part):
    """The only response format there is."""

    type: Literal["text"]


class _Request(Part):
    """The keys of both kinds of completion. Null means absent, as with OpenAI."""

    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Fraction | None = None
    top_k: Annotated[int, Field(ge=0)] | None = None
    min_p: Fraction | None = None
    repetition_penalty: Annotated[float, Field(ge=0, le=10)] | None = None
    presence_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    frequency_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    logit_bias: (
        dict[Annotated[str, Field(pattern=r"^[0-9]{1,9}$")], Annotated[float, Field(ge=-100, le=100)]] | None
    ) = None
    seed: Annotated[int, Field(ge=0, lt=2**63)] | None = None
    stop: (
        Annotated[str, Field(min_length=1, max_length=256)]
        | Annotated[list[Annotated[str, Field(min_length=1, max_length=256)]], Field(max_length=4)]
        | None
    ) = None
    n: Literal[1] | None = None
    # Labels, which change no answer.
    user: str | None = None
    metadata: dict[str, str] | None = None

    @field_validator("temperature", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty")
    @classmethod
    def _tiny_is_zero(cls, value: float | None) -> float | None:
        """So that 1 / temperature, and log(min_p), stay finite."""
        return value if value is None or abs(value) > 1e-6 else 0.0

    def upstream(self) -> JSON:
        """The body for a backend, without its limits."""
        names = {"temperature", "top_p", "top_k", "min_p", "stop", "logit_bias"}
        names |= {"repetition_penalty", "presence_penalty", "frequency_penalty"}
        return self.model_dump(include=names, exclude_none=True)


class ChatRequest(_Request):
    """POST /v1/chat/completions."""

    messages: Annotated[list[Message], Field(min_length=1, fail_fast=True)]
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=TOP_LOGPROBS)] | None = None
    tools: Annotated[list[Tool], Field(fail_fast=True)] | None = None
    tool_choice: Literal["auto", "none"] | None = None
    parallel_tool_calls: Literal[True] | None = None
    response_format: TextFormat | None = None
    store: Literal[False] | None = None
    modalities: tuple[Literal["text"]] | None = None

    def upstream(self) -> JSON:
        body = super().upstream() | {"messages": [message.upstream() for message in self.messages]}
        if self._tools():
            body["tools"] = self._tools()
        if self.logprobs:
            body |= {"logprobs": True, "top_logprobs": self.top_logprobs or -1}
        return body

    @model_validator(mode="after")
    def _top_logprobs_are_logprobs(self) -> ChatRequest:
        if self.top_logprobs and not self.logprobs:
            raise ValueError("top_logprobs needs logprobs to be true")
        return self

    def _tools(self) -> list[JSON]:
        return [] if self.tool_choice == "none" else [tool.model_dump(exclude_none=True) for tool in self.tools or ()]


class TextRequest(_Request):
    """POST /v1/completions."""

    prompt: Annotated[str, Field(min_length=1)] | tuple[Annotated[str, Field(min_length=1)]]
    best_of: Literal[1] | None = None
    echo: Literal[False] | None = None
    logprobs: None = None
    suffix: None = None

    def upstream(self) -> JSON:
        return super().upstream() | {"prompt": self.prompt if isinstance(self.prompt, str) else self.prompt[0]}


@dataclass(frozen=True)
class Limits:
    """What a model and its server allow; None: not known."""

    model: str  # the one name that clients may use
    max_prompt_tokens: int
    max_tokens: int
    vocab_size: int | None = None
    context_tokens: int | None = None  # of prompt and completion


@dataclass(frozen=True)
class BackendRequest:
    """A request that may go to a backend.

    Args:
        content: its body, as JSON.
        is_streamed: whether a backend streams it. A server that runs already notices that nobody listens only when it
            writes, so whole answers are asked for as streams, too; but its streams have no log-probabilities.
        prompt_tokens: as the model will see them.
        max_tokens: of the answer.
    """

    kind: Kind
    content: bytes
    stream: bool
    include_usage: bool
    model: str
    is_streamed: bool = True
    prompt_tokens: int = 0
    max_tokens: int = 0

    @property
    def body(self) -> JSON:
        body: JSON = json.loads(self.content)
        return body


def parse(kind: Kind, raw: bytes) -> ChatRequest | TextRequest:
    """A request's body.

    Raises:
        RequestError: it is no JSON object, or a key or value is not one that is served; names the first of them.
    """
    if kind == "text":
        return read(TextRequest, raw)
    request = read(ChatRequest, raw)
    calls = (call for message in request.messages for call in message.tool_calls or ())
    _limit({"arguments": [_tree_of(call.function.arguments) for call in calls]})  # which a backend reads, too
    return request


def read(model: type[SomePart], raw: bytes) -> SomePart:
    """A body as what it should be.

    Raises:
        RequestError: it is no JSON object, or a key or value is not one that is served; names the first of them.
    """
    try:
        tree = pydantic_core.from_json(raw, allow_inf_nan=False)
    except ValueError as error:
        raise RequestError(400, f"the body is not JSON: {error}", "invalid_json") from None
    if not isinstance(tree, dict):
        raise RequestError(400, "the body has to be a JSON object", "invalid_json")
    _limit(tree)
    try:
        return model.model_validate_json(raw)  # as JSON, where a list may be a tuple and lone surrogates cannot be
    except ValidationError as error:
        raise _refusal(error) from None


def _tree_of(arguments: str) -> Any:
    """What is in a string of JSON; nothing where it is none, which the model's template finds."""
    with contextlib.suppress(ValueError):
        return pydantic_core.from_json(arguments)
    return None


def _limit(tree: JSON) -> None:
    """Raises RequestError where checking a body could take long: of too many values, or too deep."""
    level: list[Any] = [tree]
    count = 0
    for _ in range(DEEPEST):
        count += len(level)
        if any(len(part) > MOST_KEYS for part in level if isinstance(part, dict)):
            raise RequestError(400, f"an object of the body has more than {MOST_KEYS} keys", "too_complex")
        if count > MOST_VALUES:
            raise RequestError(400, f"the body has more than {MOST_VALUES} values", "too_complex")
        parts = (part.values() if isinstance(part, dict) else part for part in level if isinstance(part, dict | list))
        level = [value for part in parts for value in part]
        if not level:
            return
    raise RequestError(400, f"the body is nested more than {DEEPEST} deep", "too_complex")


def backend_request(
    kind: Kind, request: ChatRequest | TextRequest, limits: Limits, prompt_tokens: int
) -> BackendRequest:
    """What a backend is asked for, within the limits.

    Args:
        prompt_tokens: of the prompt, as the model will see it.

    Raises:
        RequestError: another model, or beyond a limit; with the numbers.
    """
    if request.model not in (None, limits.model):
        raise RequestError(
            404,
            f"the model {request.model!r} does not exist; this server has {limits.model}",
            "model_not_found",
            "model",
        )
    if prompt_tokens > limits.max_prompt_tokens:
        raise too_long(f"the prompt has {prompt_tokens} tokens, but at most {limits.max_prompt_tokens} are allowed")
    asked_tokens = isinstance(request, ChatRequest) and request.max_completion_tokens or request.max_tokens
    max_tokens = asked_tokens or limits.max_tokens
    if max_tokens > limits.max_tokens:
        raise RequestError(
            400,
            f"max_tokens is {max_tokens}, but at most {limits.max_tokens} are allowed",
            "invalid_value",
            "max_tokens",
        )
    if limits.context_tokens is not None:
        room = limits.context_tokens - prompt_tokens
        if room < (asked_tokens or 1):
            raise too_long(
                f"{prompt_tokens} tokens of prompt and {asked_tokens or 1} of completion are more than "
                f"the model's {limits.context_tokens}"
            )
        max_tokens = min(max_tokens, room)
    for name, ids in (("top_k", [request.top_k or 0]), ("logit_bias", [int(key) for key in request.logit_bias or ()])):
        if max(ids, default=0) >= (limits.vocab_size or 1):
            size = limits.vocab_size or "unknown"
            raise RequestError(400, f"{name} goes beyond the vocabulary, whose size is {size}", "invalid_value", name)
    if request.seed is not None and request.temperature:
        # Such a request is not batched: it waits in silence for all others on its backend, and they for it.
        raise RequestError(400, "a seed is for temperature 0 only, where it changes nothing", "invalid_value", "seed")
    body = request.upstream() | {"model": "default_model", "max_tokens": max_tokens}
    options = request.stream_options
    wants_usage = bool(options and options.include_usage)
    is_streamed = not body.get("logprobs")
    if is_streamed:
        body |= {"stream": True, "stream_options": {"include_usage": True}}
    elif request.stream:
        raise RequestError(
            400, "logprobs come with whole answers only; set stream to false", "invalid_value", "logprobs"
        )
    content = json.dumps(body, ensure_ascii=False, separators=(",", ":")).encode()
    stream = bool(request.stream)
    return BackendRequest(kind, content, stream, wants_usage, limits.model, is_streamed, prompt_tokens, max_tokens)


def too_long(message: str) -> RequestError:
    """A prompt beyond what a model or its server takes."""
    return RequestError(400, message, "context_length_exceeded", "messages")


def _refusal(error: ValidationError) -> RequestError:
    # Of a value that may be one of several types, each type complains: the one that came furthest is meant.
    fault = max(error.errors(include_url=False, include_context=False), key=lambda fault: len(fault["loc"]))
    place = ".".join(_places(fault["loc"]))
    if fault["type"] == "extra_forbidden":
        return RequestError(400, f"{place} is not a parameter of this server", "unknown_parameter", place)
    if fault["type"] == "missing":
        return RequestError(400, f"{place} is missing", "missing_parameter", place)
    why = fault["msg"].removeprefix("Value error, ")
    return RequestError(400, f"{place or 'the request'}: {why[0].lower()}{why[1:]}", "invalid_value", place or None)


def _places(loc: tuple[int | str, ...]) -> Iterator[str]:
    """A fault's place without pydantic's own words for the branches of a union."""
    for part in loc:
        if isinstance(part, int) or part.isidentifier() and part not in ("str",):
            yield str(part)
