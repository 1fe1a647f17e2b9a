"""OpenAI's chat and text completions: what a request may ask for. Anything else is refused by name, never ignored."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from lib.config.settings import Fraction
from lib.serve.generation import SamplingOptions

JSON = dict[str, Any]
TOP_LOGPROBS = 20


class RequestError(Exception):
    """A request without an answer: the HTTP status, and OpenAI's words for what is wrong."""

    def __init__(
        self,
        status: int,
        message: str,
        code: str | None = None,
        param: str | None = None,
        retry_seconds: int | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.message, self.code, self.param = status, message[:500], code, param and param[:100]
        self.retry_seconds = retry_seconds

    @property
    def body(self) -> JSON:
        """OpenAI's JSON of an error."""
        kind = {401: "authentication_error", 429: "rate_limit_error"}.get(self.status)
        kind = kind or ("invalid_request_error" if self.status < 500 else "server_error")
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}


class RequestPart(BaseModel):
    """Something that clients send. Strict: "1" is not a number; unknown keys are refused."""

    model_config = ConfigDict(frozen=True, strict=True, extra="forbid")


SomePart = TypeVar("SomePart", bound=RequestPart)


class TextPart(RequestPart):
    """A piece of a message's content."""

    type: Literal["text"]
    text: str


class CalledFunction(RequestPart):
    """What a tool call calls."""

    name: str
    arguments: str


class ToolCall(RequestPart):
    """A call that the assistant made earlier in the conversation."""

    id: str | None = None
    type: Literal["function"] = "function"
    index: int | None = None
    function: CalledFunction


class RequestMessage(RequestPart):
    """A message. Fields that clients echo from an answer are taken where they say nothing."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[TextPart] | None = None
    name: str | None = None
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    refusal: None = None
    annotations: Annotated[list[Any], Field(max_length=0)] | None = None
    audio: None = None
    function_call: None = None

    def fields(self) -> JSON:
        """As a training record has it."""
        message = self.model_dump(exclude_none=True, exclude={"reasoning", "annotations"})
        if isinstance(self.content, list):
            message["content"] = "".join(part.text for part in self.content)
        if self.reasoning and not self.reasoning_content:
            message["reasoning_content"] = self.reasoning
        return message


class Signature(RequestPart):
    """Name, meaning and JSON schema of a function."""

    name: str
    description: str | None = None
    parameters: JSON | None = None
    strict: bool | None = None


class RequestTool(RequestPart):
    """A function that the model may call."""

    type: Literal["function"]
    function: Signature


class StreamOptions(RequestPart):
    """What a stream has besides its tokens."""

    include_usage: bool | None = None


class TextFormat(RequestPart):
    """The only response format there is."""

    type: Literal["text"]


class CompletionRequest(RequestPart):
    """The keys of both kinds of completion. Null means absent, as with OpenAI."""

    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Fraction | None = None
    top_k: Annotated[int, Field(ge=0)] | None = None
    min_p: Fraction | None = None
    repetition_penalty: Annotated[float, Field(gt=0, le=10)] | None = None
    presence_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    frequency_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    logit_bias: (
        dict[Annotated[str, Field(pattern=r"^[0-9]{1,9}$")], Annotated[float, Field(ge=-100, le=100)]] | None
    ) = None
    seed: Annotated[int, Field(ge=0, lt=2**63)] | None = None
    stop: Annotated[str, Field(min_length=1)] | list[Annotated[str, Field(min_length=1)]] | None = None
    n: Literal[1] | None = None
    # Labels, which change no answer.
    user: str | None = None
    metadata: dict[str, str] | None = None

    @property
    def stops(self) -> tuple[str, ...]:
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())

    @property
    def answer_tokens(self) -> int | None:
        """Longest answer that is asked for."""
        return self.max_tokens

    @property
    def logprobs_count(self) -> int | None:
        """Likeliest tokens to tell; None for no log-probabilities."""
        return None

    @property
    def tool_definitions(self) -> list[JSON] | None:
        return None

    @property
    def wants_usage(self) -> bool:
        return bool(self.stream_options and self.stream_options.include_usage)

    def sampling(self, vocab_size: int | None) -> SamplingOptions:
        """Raises RequestError for a token beyond the vocabulary."""
        bias = {int(token): value for token, value in (self.logit_bias or {}).items()}
        if vocab_size is not None and max(bias, default=0) >= vocab_size:
            raise RequestError(
                400, f"logit_bias goes beyond the vocabulary of {vocab_size}", "invalid_value", "logit_bias"
            )
        penalties = ("repetition_penalty", "presence_penalty", "frequency_penalty")
        names = ("temperature", "top_p", "top_k", "min_p", "seed", *penalties)
        given = {name: value for name in names if (value := getattr(self, name)) is not None}
        return SamplingOptions(**given, logit_bias=bias)


class ChatRequest(CompletionRequest):
    """POST /v1/chat/completions."""

    messages: Annotated[list[RequestMessage], Field(min_length=1)]
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=TOP_LOGPROBS)] | None = None
    tools: list[RequestTool] | None = None
    tool_choice: Literal["auto", "none"] | None = None
    parallel_tool_calls: Literal[True] | None = None
    response_format: TextFormat | None = None
    store: Literal[False] | None = None
    modalities: tuple[Literal["text"]] | None = None

    @property
    def answer_tokens(self) -> int | None:
        return self.max_completion_tokens or self.max_tokens

    @property
    def logprobs_count(self) -> int | None:
        if self.top_logprobs and not self.logprobs:
            raise RequestError(400, "top_logprobs needs logprobs to be true", "invalid_value", "top_logprobs")
        return (self.top_logprobs or 0) if self.logprobs else None

    @property
    def tool_definitions(self) -> list[JSON] | None:
        if self.tool_choice == "none" or not self.tools:
            return None
        return [tool.model_dump(exclude_none=True) for tool in self.tools]


class TextRequest(CompletionRequest):
    """POST /v1/completions."""

    prompt: Annotated[str, Field(min_length=1)] | tuple[Annotated[str, Field(min_length=1)]]
    best_of: Literal[1] | None = None
    echo: Literal[False] | None = None
    logprobs: None = None
    suffix: None = None

    @property
    def text(self) -> str:
        return self.prompt if isinstance(self.prompt, str) else self.prompt[0]


def parse(model: type[SomePart], raw: bytes) -> SomePart:
    """A body as what it should be.

    Raises:
        RequestError: it is not a JSON object, or a key or value is not served; names the first of them.
    """
    try:
        if not isinstance(json.loads(raw), dict):
            raise RequestError(400, "the body has to be a JSON object", "invalid_json")
    except (ValueError, RecursionError) as error:
        raise RequestError(400, f"the body is not JSON: {error}", "invalid_json") from None
    try:
        return model.model_validate_json(raw)
    except ValidationError as error:
        raise _refusal(error) from None


def _refusal(error: ValidationError) -> RequestError:
    """Of a value that may be one of several types, each type complains: the deepest complaint is meant."""
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
        if isinstance(part, int) or (part.isidentifier() and part not in ("str",)):
            yield str(part)
