"""OpenAI's chat and text completions: what a request may ask for. Anything else is refused by name, never ignored."""

from __future__ import annotations

from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from lib.config.settings import Fraction

JSON = dict[str, Any]
Text = Annotated[str, Field(min_length=1)]
Count = Annotated[int, Field(ge=1)]
Penalty = Annotated[float, Field(ge=-2, le=2)]
TokenId = Annotated[str, Field(pattern=r"^[0-9]{1,9}$")]


class RequestError(Exception):
    """A request without an answer: the HTTP status, and OpenAI's JSON of what is wrong."""

    def __init__(self, status: int, message: str, code: str | None = None, param: str | None = None) -> None:
        super().__init__(message)
        self.status = status
        kind = {401: "authentication_error", 429: "rate_limit_error"}.get(status)
        kind = kind or ("invalid_request_error" if status < 500 else "server_error")
        self.body = {"error": {"message": message[:500], "type": kind, "param": param and param[:100], "code": code}}


class RequestPart(BaseModel):
    """A part of a request. Strict: "1" is not a number; unknown keys are refused. Null means absent, as with OpenAI."""

    model_config = ConfigDict(frozen=True, strict=True, extra="forbid")


SomePart = TypeVar("SomePart", bound=RequestPart)


class TextPart(RequestPart):
    type: Literal["text"]
    text: str


class FunctionPart(RequestPart):
    """A function that the model may call, or, with `arguments` as JSON text, one that it called."""

    name: str
    arguments: str | None = None
    description: str | None = None
    parameters: JSON | None = None
    strict: bool | None = None


class ToolPart(RequestPart):
    type: Literal["function"] = "function"
    function: FunctionPart
    id: str | None = None
    index: int | None = None


class RequestMessage(RequestPart):
    """A message. Empty fields that clients echo from an answer are accepted."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[TextPart] | None = None
    name: str | None = None
    tool_calls: list[ToolPart] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    refusal: None = None
    annotations: Annotated[list[Any], Field(max_length=0)] | None = None
    audio: None = None
    function_call: None = None

    def fields(self) -> JSON:
        """The message as a training record has it."""
        message = self.model_dump(exclude_none=True, exclude={"reasoning", "annotations"})
        if isinstance(self.content, list):
            message["content"] = "".join(part.text for part in self.content)
        if self.reasoning and not self.reasoning_content:
            message["reasoning_content"] = self.reasoning
        return message


class SamplingParameters(RequestPart):
    """How tokens are drawn, by mlx-lm's names."""

    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Fraction | None = None
    top_k: Annotated[int, Field(ge=0)] | None = None
    min_p: Fraction | None = None
    repetition_penalty: Annotated[float, Field(gt=0, le=10)] | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    logit_bias: dict[TokenId, Annotated[float, Field(ge=-100, le=100)]] | None = None
    seed: Annotated[int, Field(ge=0, lt=2**63)] | None = None


class CompletionRequest(SamplingParameters):
    """The keys of both kinds of completion."""

    model: str | None = None
    stream: bool | None = None
    stream_options: dict[Literal["include_usage"], bool] | None = None
    max_tokens: Count | None = None
    stop: Text | list[Text] | None = None
    n: Literal[1] | None = None
    user: str | None = None
    metadata: dict[str, str] | None = None

    @property
    def stops(self) -> tuple[str, ...]:
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())

    @property
    def answer_tokens(self) -> int | None:
        """The longest answer that the client wants."""
        return getattr(self, "max_completion_tokens", None) or self.max_tokens

    @property
    def logprobs_count(self) -> int | None:
        """Likeliest tokens to report; None: no log-probabilities."""
        return (getattr(self, "top_logprobs", None) or 0) if getattr(self, "logprobs", None) else None

    @property
    def tool_definitions(self) -> list[JSON] | None:
        tools = getattr(self, "tools", None) if getattr(self, "tool_choice", None) != "none" else None
        return [tool.model_dump(exclude_none=True) for tool in tools] if tools else None


class ChatRequest(CompletionRequest):
    messages: Annotated[list[RequestMessage], Field(min_length=1)]
    max_completion_tokens: Count | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    tools: list[ToolPart] | None = None
    tool_choice: Literal["auto", "none"] | None = None
    parallel_tool_calls: Literal[True] | None = None
    response_format: dict[Literal["type"], Literal["text"]] | None = None
    store: Literal[False] | None = None
    modalities: tuple[Literal["text"]] | None = None

    @model_validator(mode="after")
    def _require_logprobs(self) -> ChatRequest:
        if self.top_logprobs and not self.logprobs:
            raise ValueError("top_logprobs needs logprobs to be true")
        return self


class TextRequest(CompletionRequest):
    prompt: Text | tuple[Text]
    best_of: Literal[1] | None = None
    echo: Literal[False] | None = None
    logprobs: None = None
    suffix: None = None

    @property
    def text(self) -> str:
        return "".join(self.prompt)  # of a list its only prompt


def parse(model: type[SomePart], raw: bytes) -> SomePart:
    """Checks a body. Raises RequestError: the body is not JSON, or a key or value is not served; names the first of
    them."""
    try:
        return model.model_validate_json(raw)
    except ValidationError as error:
        # Each type that a value may have complains: the deepest complaint is meant.
        fault = max(error.errors(include_url=False, include_context=False), key=lambda fault: len(fault["loc"]))
    # Without pydantic's names of the branches of a union.
    place = ".".join(str(part) for part in fault["loc"] if str(part).replace("_", "a").isalnum() and part != "str")
    why = fault["msg"].removeprefix("Value error, ")
    texts = {"json_invalid": f"the body is not JSON: {why}", "missing": f"{place} is missing"}
    texts["extra_forbidden"] = f"{place} is not a parameter of this server"
    message = texts.get(fault["type"], f"{place or 'the body'}: {why[0].lower()}{why[1:]}")
    raise RequestError(400, message, fault["type"], place or None)
