"""What a record becomes before it is tokenised: Tokens, Plain or Chat, whatever its columns were called.

A record that fits no form raises Unusable with the reason; the caller names the line.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, TypedDict, cast

from lib.config.settings import DataSettings

RecordKind = Literal["preference", "unpaired", "sft", "prompt", "group"]
JSON = dict[str, Any]  # A record as its file has it: any columns


class Message(TypedDict):
    """One message of a chat; it may have other fields, which only its chat template knows."""

    role: str
    content: Any


class Unusable(ValueError):
    """A record that cannot be trained on; the message is the reason, without the place."""


class Unwanted(Unusable):
    """A record that a filter leaves out; nothing is wrong with it."""


@dataclass(frozen=True)
class Tokens:
    """A record that came tokenised."""

    prompt: list[int]
    completions: tuple[list[int], ...]
    columns: str  # What it was read from, for people
    label: bool | None = None  # Of unpaired feedback: whether the completion is desirable
    learnt: tuple[list[bool], ...] | None = None  # Of each completion's tokens, which are trained on; None for all
    vocabulary: str = ""  # the digest of the vocabulary that its ids are of, where it is known


@dataclass(frozen=True)
class Plain:
    """Strings; `prompt` is None for plain text, which is all completion."""

    prompt: str | None
    completions: tuple[str, ...]
    columns: str
    label: bool | None = None


@dataclass(frozen=True)
class Chat:
    """A conversation: the messages of the prompt, and for each completion the messages that follow it.

    A content is a string, or None beside tool_calls. The arguments of a call are an object, never JSON text.
    """

    prompt: list[Message]  # Empty where the first message is learnt (data.learn=all)
    completions: tuple[list[Message], ...]  # Each ends with an assistant's message; mostly that is all of it
    columns: str
    learnt: tuple[tuple[bool, ...], ...] | None = None
    """Of each completion's messages, which are trained on; None for the last one alone."""
    tools: list[JSON] | None = None
    """Definitions of the functions that the model may call, as the chat template takes them."""
    template_arguments: JSON = field(default_factory=dict)  # Further arguments of the chat template, the record's own
    label: bool | None = None


Record = Tokens | Plain | Chat
VOCABULARY = "ids_of_vocabulary"  # column of Tokens.vocabulary
ANSWER = "answer"  # column of what a program can check an answer by


class Columns(NamedTuple):
    """What the settings say of columns: the name of each, those to ignore, and which messages are learnt."""

    prompt: str
    chosen: str
    rejected: str
    completion: str
    messages: str
    text: str
    label: str
    system: str
    tools: str
    ignore: tuple[str, ...]
    learn: str

    @classmethod
    def of(cls, data: DataSettings) -> Columns:
        return cls(*(getattr(data, name) for name in cls._fields))

    @property
    def are_named(self) -> bool:
        """Whether the user named the column of a text: then no published format is guessed."""
        return self[:6] != self._fields[:6]


NAMES_OF_TYPES = {str: "a string", list: "a list", dict: "an object", bool: "a boolean", int: "a number"}


def name_of_type(value: object) -> str:
    """A JSON type in words."""
    return "null" if value is None else NAMES_OF_TYPES.get(type(value), f"a {type(value).__name__}")


# Who speaks, by the names that other formats have; capitals do not count.
ROLES = {
    **dict.fromkeys(("user", "human", "prompter", "customer", "question", "instruction"), "user"),
    **dict.fromkeys(("assistant", "gpt", "chatgpt", "model", "bot", "chatbot", "ai", "claude", "llm"), "assistant"),
    **dict.fromkeys(("bard", "bing", "answer", "response", "function_call", "tool_call"), "assistant"),
    **dict.fromkeys(("tool", "function", "observation", "ipython", "tool_result"), "tool"),
    **dict.fromkeys(("function_response", "tool_response"), "tool"),
    "system": "system",
    "developer": "developer",
}
CALLERS = ("function_call", "tool_call")  # ShareGPT's speakers whose text is a call


def check_json(value: Any, name: str, default: Any = None) -> Any:
    """The value, which templates write as text or JSON: parquet has bytes and dates, JSON half surrogate pairs."""
    try:
        (value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=default)).encode()
    except TypeError as error:
        raise Unusable(f"{name!r} has a value that JSON does not have: {error}") from error
    except UnicodeEncodeError as error:
        raise Unusable(f"{name!r} has half a surrogate pair") from error
    return value


def parse_json_text(text: str, name: str) -> Any:
    """What the JSON in a string says. Raises Unusable."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise Unusable(f"{name} is a string that is not JSON: {str(error).splitlines()[0]}") from None


def check_messages(value: object, name: str, ignore: Collection[str] = ()) -> list[Message]:
    """The messages of a column: roles by their usual names, contents strings. Raises Unusable."""
    if not isinstance(value, list):
        raise Unusable(f"column {name!r} is {name_of_type(value)}, not a string or a list of messages")
    if not value:
        raise Unusable(f"{name!r} is an empty list of messages")
    return [_message(message, f"{name}[{index}]", ignore) for index, message in enumerate(value)]


def _message(message: object, where: str, ignore: Collection[str]) -> Message:
    if not isinstance(message, dict):
        raise Unusable(f"{where} is {name_of_type(message)}, not a message {{role, content}}")
    # A file that was parquet once has null for each field that a message lacks; templates ask whether one is there.
    fields = {key: item for key, item in message.items() if item is not None and key not in ignore}
    if "role" not in fields and "from" in fields:  # ShareGPT's {from, value}
        fields = {"role": fields.pop("from"), "content": fields.pop("value", None)} | fields
        if fields["role"] in CALLERS and isinstance(fields["content"], str):
            calls = parse_json_text(fields.pop("content"), f"{where}.value")
            fields["tool_calls"] = calls if isinstance(calls, list) else [calls]
    if not isinstance(name := fields.pop("role", None), str):
        raise Unusable(f"{where} has no 'role' and 'content' (it has: {', '.join(map(str, message))})")
    if (role := ROLES.get(name.strip().lower())) is None:
        known = "system, developer, user, assistant, tool"
        raise Unusable(f"{where} has the unknown role {name!r}; call it one of {known}")
    if "function_call" in fields:  # OpenAI's, before tools
        fields["tool_calls"] = [{"type": "function", "function": fields.pop("function_call")}]
    calls = _check_calls(fields.pop("tool_calls", None), f"{where}.tool_calls")
    content = fields.pop("content", None)
    if isinstance(content, list):
        content = "".join(_text_of_part(part, f"{where}.content[{i}]") for i, part in enumerate(content))
    if content is None and not calls:
        raise Unusable(f"{where} has no content and no tool_calls (it has: {', '.join(map(str, message))})")
    if content is not None and not isinstance(content, str):
        raise Unusable(f"{where}.content is {name_of_type(content)}, not a string")
    for other in {"train", "training", "loss_weight"} & fields.keys():  # axolotl's and LLaMA-Factory's names
        fields["weight"] = fields.pop(other)
    if fields.get("weight", 1) not in (0, 1):
        raise Unusable(f"{where}.weight is {json.dumps(fields['weight'], default=str)}, not 0 or 1")
    check_json([content, fields], where, default=str)
    head: JSON = {"role": role, "content": content}
    return cast(Message, head | ({"tool_calls": calls} if calls else {}) | fields)


def _text_of_part(part: object, where: str) -> str:
    kind, text = (part.get("type"), part.get("text")) if isinstance(part, dict) else (name_of_type(part), None)
    if kind not in ("text", "input_text", "output_text") or not isinstance(text, str):
        raise Unusable(f"{where} is of type {kind!r}, and only text is trained on")
    return text


def _functions(value: object, where: str, what: str) -> Iterator[tuple[str, JSON, JSON]]:
    """Place, whole and function {name, ...} of calls or definitions: in a list, or the JSON text of one."""
    value = parse_json_text(value, where) if isinstance(value, str) and value.strip() else value
    if value and not isinstance(value, list | str):
        raise Unusable(f"{where} is {name_of_type(value)}, not a list of {what}")
    for index, item in enumerate(value if isinstance(value, list) else ()):
        place = f"{where}[{index}]"
        item = parse_json_text(item, place) if isinstance(item, str) and what == "tools" else item
        function = item.get("function", item) if isinstance(item, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise Unusable(f"{place} has no function with a name")
        yield place, item, function


def _check_calls(value: object, where: str) -> list[JSON]:
    """Tool calls with a name and an object of arguments each."""
    calls = []
    for place, call, function in _functions(value, where, "calls"):
        arguments = function.get("arguments")
        if isinstance(arguments, str):
            arguments = parse_json_text(arguments.strip() or "{}", f"{place}.arguments")
        arguments = {} if arguments is None else arguments
        if not isinstance(arguments, dict):
            raise Unusable(f"{place}.arguments is {name_of_type(arguments)}, not an object")
        others = {} if function is call else {key: item for key, item in call.items() if item is not None}
        calls.append(others | {"type": "function", "function": {**function, "arguments": arguments}})
    return cast(list[JSON], check_json(calls, where))


def check_tools(value: object, name: str) -> list[JSON] | None:
    """The definitions of tools, a list or its JSON text, as OpenAI has them; None for none. Raises Unusable."""
    tools = []
    for _, tool, function in _functions(value, name, "tools"):
        tools.append(_without_nulls({"type": "function", "function": tool} if function is tool else tool))
    return check_json(tools, name) or None


def _without_nulls(schema: Any) -> Any:
    """A JSON Schema without the keywords that are null, but for those whose value is data."""
    if isinstance(schema, list):
        return [_without_nulls(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    kept = {key: item for key, item in schema.items() if item is not None or key in ("default", "const")}
    data = ("default", "const", "enum", "examples")
    return {key: item if key in data else _without_nulls(item) for key, item in kept.items()}
