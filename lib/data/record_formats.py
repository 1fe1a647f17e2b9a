"""What a record becomes before it is tokenised, and what is said of one that cannot be used.

A record becomes one of three forms, whatever its columns were called:

    Tokens   prompt_ids and completion ids, taken as they are
    Plain    a prompt string and completion strings
    Chat     the messages before the answer, and for each answer the messages that follow

known_formats.py recognises a data set's format by its columns, messages.py checks conversations, and parse_records.py
puts both together. A record that fits no form raises Unusable with the reason; the caller names the line.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, TypedDict, cast

from lib.config.settings import DataSettings

RecordKind = Literal["preference", "unpaired", "sft", "prompt", "group"]
JSON = dict[str, Any]
"""A record as its file has it: any columns."""


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
    columns: str
    label: bool | None = None
    """Unpaired feedback: whether the completion is desirable; None for any other record."""
    learnt: list[bool] | None = None
    """Of the only completion's tokens, which are trained on (completion_mask); None for all."""


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

    A message's content is a string, or None beside tool_calls. The arguments of a call are an object, never JSON text.

    Args:
        prompt: may be empty, where the first message is learnt (data.learn=all).
        completions: each ends with an assistant's message; mostly that is all of it.
        learnt: of each completion's messages, which are trained on; None for the assistant's last one alone.
        tools: definitions of the functions that the model may call, as the chat template takes them.
        template_arguments: further arguments of the chat template, the record's own.
    """

    prompt: list[Message]
    completions: tuple[list[Message], ...]
    columns: str
    learnt: tuple[tuple[bool, ...], ...] | None = None
    tools: list[JSON] | None = None
    template_arguments: JSON = field(default_factory=dict)
    label: bool | None = None


# A longer record is an error in the file; it is never in memory as a whole.
LINE_BYTES = 8 * 2**20
# Column of what a program can check an answer by.
ANSWER = "answer"
# Columns of tokenised records; the last ones say something of each completion's tokens.
TOKEN_COLUMNS = ("prompt_ids", "chosen_ids", "rejected_ids", "completion_ids", "completion_mask", "rewards", "logps")


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
        return cls(
            data.prompt,
            data.chosen,
            data.rejected,
            data.completion,
            data.messages,
            data.text,
            data.label,
            data.system,
            data.tools,
            data.ignore,
            data.learn,
        )

    @property
    def are_named(self) -> bool:
        """Whether the user named the column of a text: then no format is guessed."""
        return self[:6] != ("prompt", "chosen", "rejected", "completion", "messages", "text")


def name_of_type(value: object) -> str:
    """A JSON type in words."""
    if value is None:
        return "null"
    names = {
        str: "a string",
        list: "a list",
        dict: "an object",
        bool: "a boolean",
        int: "a number",
        float: "a number",
    }
    return names.get(type(value), f"a {type(value).__name__}")


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


def role_of(name: str, where: str) -> str:
    """The role that a speaker's name means. Raises Unusable."""
    role = ROLES.get(name) or ROLES.get(name.strip().lower())
    if role is None:
        known = "system, developer, user, assistant, tool"
        raise Unusable(f"{where} has the unknown role {name!r}; call it one of {known}")
    return role


# The value of these keywords of JSON Schema is data, in which null means null.
SCHEMA_DATA = ("default", "const", "enum", "examples")


def check_messages(value: object, name: str, ignore: Collection[str] = ()) -> list[Message]:
    """The messages of a column: roles by their usual names, contents strings, the arguments of calls objects.

    A message keeps the other fields that it has, unless `ignore` names them. Raises Unusable.
    """
    if not isinstance(value, list):
        raise Unusable(f"column {name!r} is {name_of_type(value)}, not a string or a list of messages")
    if not value:
        raise Unusable(f"{name!r} is an empty list of messages")
    messages: list[Message] = []
    for index, message in enumerate(value):
        if not isinstance(message, dict):
            raise Unusable(f"{name}[{index}] is {name_of_type(message)}, not a message {{role, content}}")
        content = message.get("content")
        # What nearly every message is: these two strings alone.
        if len(message) == 2 and type(content) is str and type(message.get("role")) is str:
            role = role_of(message["role"], f"{name}[{index}]")
            message = message if role == message["role"] else {"role": role, "content": content}
            check_unicode(content, name)
            messages.append(cast(Message, message))
        else:
            messages.append(_message(message, f"{name}[{index}]", ignore))
    return messages


def _message(message: JSON, where: str, ignore: Collection[str]) -> Message:
    """A message with more than a role and a text."""
    # A file that was parquet once has null for each field that a message lacks; templates ask whether one is there.
    fields = {key: item for key, item in message.items() if item is not None and key not in ignore}
    if "role" not in fields and "from" in fields:
        fields = _from_sharegpt(fields, where)
    role = fields.get("role")
    if not isinstance(role, str):
        raise Unusable(f"{where} has no 'role' and 'content' (it has: {', '.join(map(str, message)) or 'none'})")
    fields["role"] = role_of(role, where)
    if "function_call" in fields:  # OpenAI's, before tools
        fields["tool_calls"] = [{"type": "function", "function": fields.pop("function_call")}]
    calls = _check_calls(fields.pop("tool_calls", None), f"{where}.tool_calls")
    content = fields.pop("content", None)
    if isinstance(content, list):
        content = _text_of_parts(content, f"{where}.content")
    elif content is None and not calls:
        raise Unusable(f"{where} has no content and no tool_calls (it has: {', '.join(message)})")
    elif content is not None and not isinstance(content, str):
        raise Unusable(f"{where}.content is {name_of_type(content)}, not a string")
    for key, item in fields.items():
        check_unicode(key, f"a field of {where}")
        if isinstance(item, str | list | dict):
            text = item if isinstance(item, str) else json.dumps(item, ensure_ascii=False, default=str)
            check_unicode(text, f"{where}.{key}")
    if fields.get("weight", 1) not in (0, 1):
        raise Unusable(f"{where}.weight is {json.dumps(fields['weight'], default=str)}, not 0 or 1")
    checked = {"role": fields.pop("role"), "content": check_unicode(content or "", where) if content else content}
    return cast(Message, checked | ({"tool_calls": calls} if calls else {}) | fields)


def _from_sharegpt(fields: JSON, where: str) -> JSON:
    """A message {from, value} as {role, content}."""
    speaker, value = fields.pop("from"), fields.pop("value", None)
    if not isinstance(speaker, str):
        raise Unusable(f"{where}.from is {name_of_type(speaker)}, not a string")
    if not isinstance(value, str):
        raise Unusable(f"{where}.value is {name_of_type(value)}, not a string")
    if speaker not in ("function_call", "tool_call"):
        return {"role": speaker, "content": value} | fields
    calls = parse_json_text(value, f"{where}.value")
    return {"role": speaker, "tool_calls": calls if isinstance(calls, list) else [calls]} | fields


def _check_calls(value: object, where: str) -> list[JSON]:
    """Tool calls with a name and an object of arguments each."""
    value = parse_json_text(value, where) if isinstance(value, str) and value else value
    if not value:
        return []
    if not isinstance(value, list):
        raise Unusable(f"{where} is {name_of_type(value)}, not a list of calls")
    calls = []
    for index, call in enumerate(value):
        function = call.get("function", call) if isinstance(call, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise Unusable(f"{where}[{index}] has no function with a name")
        arguments = function.get("arguments")
        if isinstance(arguments, str):
            arguments = parse_json_text(arguments, f"{where}[{index}].arguments") if arguments.strip() else {}
        arguments = {} if arguments is None else arguments
        if not isinstance(arguments, dict):
            raise Unusable(f"{where}[{index}].arguments is {name_of_type(arguments)}, not an object")
        checked: JSON = {"type": "function", "function": {**function, "arguments": arguments}}
        if function is not call:
            checked = {key: item for key, item in call.items() if item is not None} | checked
        calls.append(checked)
    _check_json(calls, where)
    return calls


def _text_of_parts(parts: Sequence[object], where: str) -> str:
    """The texts of a content's parts, joined."""
    texts = []
    for index, part in enumerate(parts):
        kind = part.get("type") if isinstance(part, dict) else name_of_type(part)
        text = part.get("text") if isinstance(part, dict) else None
        if kind not in ("text", "input_text", "output_text") or not isinstance(text, str):
            raise Unusable(f"{where}[{index}] is of type {kind!r}, and only text is trained on")
        texts.append(text)
    return "".join(texts)


def check_tools(value: object, name: str) -> list[JSON] | None:
    """The definitions of tools, from a list or its JSON text; None where there is none. Raises Unusable.

    A bare function {name, description, parameters} becomes {type: function, function: ...}, as OpenAI has it. Nulls
    that only say that a keyword is not there are dropped.
    """
    if isinstance(value, str):
        value = parse_json_text(value, name) if value.strip() else None
    if not value:
        return None
    if not isinstance(value, list):
        raise Unusable(f"{name!r} is {name_of_type(value)}, not a list of tools")
    tools = []
    for index, tool in enumerate(value):
        tool = parse_json_text(tool, f"{name}[{index}]") if isinstance(tool, str) else tool
        function = tool.get("function", tool) if isinstance(tool, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise Unusable(f"{name}[{index}] is no function with a name")
        tools.append(_without_nulls(tool if function is not tool else {"type": "function", "function": tool}))
    _check_json(tools, name)
    return tools


def _without_nulls(schema: Any) -> Any:
    """A schema without the keywords that are null."""
    if isinstance(schema, list):
        return [_without_nulls(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    kept = {key: item for key, item in schema.items() if item is not None or key in ("default", "const")}
    return {key: item if key in SCHEMA_DATA else _without_nulls(item) for key, item in kept.items()}


def parse_json_text(text: str, name: str) -> Any:
    """What the JSON in a string says. Raises Unusable."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise Unusable(f"{name} is a string that is not JSON: {str(error).splitlines()[0]}") from None


def learnt_part(messages: list[Message], learn: str, name: str) -> tuple[list[Message], list[Message], list[bool]]:
    """A conversation's messages before the first one that is learnt, those up to the last learnt one, and which of
    these are learnt.

    learn: see data.learn. Weights 0 and 1 of messages (OpenAI's) decide, where there are any. Raises Unusable.
    """
    if learn != "all" and messages[-1]["role"] != "assistant":
        raise Unusable(
            f"{name!r} ends with a message of {messages[-1]['role']!r}, and no answer follows it: give it one, or end "
            "the conversation with the assistant's last message"
        )
    has_weights = any("weight" in message for message in messages)
    if learn == "all":
        learnt = [True] * len(messages)
    elif learn == "assistant" or has_weights:
        learnt = [message["role"] == "assistant" for message in messages]
    else:
        learnt = [False] * (len(messages) - 1) + [True]
    if has_weights:
        learnt = [
            is_learnt and message.get("weight", 1) == 1 for is_learnt, message in zip(learnt, messages, strict=True)
        ]
        messages = [cast(Message, {k: v for k, v in message.items() if k != "weight"}) for message in messages]
    if not any(learnt):
        raise Unusable(f"nothing of {name!r} is learnt: every message that could be has weight 0")
    first, last = learnt.index(True), len(learnt) - learnt[::-1].index(True)
    return messages[:first], messages[first:last], learnt[first:last]


def check_answer(message: Message, name: str) -> Message:
    """An assistant's message that says something. Raises Unusable."""
    if message["role"] != "assistant":
        raise Unusable(f"the last message of {name!r} is from {message['role']!r}, not from 'assistant'")
    if not (message["content"] or "").strip() and not message.get("tool_calls"):
        raise Unusable(f"empty completion: {name!r} is blank")
    return message


def check_completion(text: str, name: str) -> str:
    if not text.strip():
        raise Unusable(f"empty completion: {name!r} is blank")
    return check_unicode(text, name)


def _check_json(value: object, name: str) -> None:
    """Templates write it as JSON, which has no bytes and no dates; parquet has. Raises Unusable."""
    try:
        text = json.dumps(value, ensure_ascii=False)
    except TypeError as error:
        raise Unusable(f"{name!r} has a value that JSON does not have: {error}") from error
    check_unicode(text, name)


def check_unicode(text: str, name: str) -> str:
    """JSON can spell half a surrogate pair, which no tokenizer takes."""
    if not text.isascii():
        try:
            text.encode("utf-8")
        except UnicodeEncodeError as error:
            raise Unusable(f"{name!r} has half a surrogate pair at character {error.start + 1}") from error
    return text


VOCABULARY = "ids_of_vocabulary"  # the column


@dataclass(frozen=True)
class StampedTokens(Tokens):
    """A record that came tokenised, with the digest of the vocabulary that its ids are of."""

    vocabulary: str = ""
