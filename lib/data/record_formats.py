"""One record ➜ its prompt and completions, not yet tokenised; or why it cannot be used.

A record becomes one of three forms, whatever its columns were called:

    Tokens   prompt_ids and completion ids, taken as they are
    Plain    a prompt string and completion strings
    Chat     the messages before the answer, and one assistant message an answer

A record that fits none of them raises Unusable with the reason, so that the caller can name the line.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Any, Literal, TypedDict, cast

from lib.config.schema import DataSettings

RecordKind = Literal["preference", "unpaired", "sft", "prompt"]
JSON = dict[str, Any]
"""A record as its file has it: any columns."""


class Message(TypedDict):
    """One message of a chat; it may have other fields, which only its chat template knows."""

    role: str
    content: Any


# What other data sets call our columns: only used to suggest the setting in an error.
OTHER_NAMES = {
    "prompt": ("question", "instruction", "input", "query", "problem", "context"),
    "chosen": ("preferred", "response_chosen", "answer_chosen", "better", "accepted", "positive"),
    "rejected": ("dispreferred", "response_rejected", "answer_rejected", "worse", "negative"),
    "completion": ("answer", "response", "output", "solution", "target"),
    "messages": ("conversations", "conversation", "chat"),
    "text": ("content", "document"),
    "label": ("rating", "feedback", "is_good", "desirable", "thumbs_up"),
}


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

    Args:
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


# Column of what a program can check an answer by.
ANSWER = "answer"
TOKEN_COLUMNS = ("prompt_ids", "chosen_ids", "rejected_ids", "completion_ids")


def parse(record: JSON, settings: DataSettings, kind: RecordKind) -> Tokens | Plain | Chat:
    """The record's prompt and completions: two for preferences (chosen, rejected), one for SFT, none for a prompt.

    Unpaired feedback is one completion with its label.

    Raises Unusable. Columns that no setting names are ignored. Of several forms in one record the first wins:
    token ids; prompt and completion; messages; text; and for SFT on preference records prompt and chosen.
    """
    if kind == "prompt":
        return _parse_prompt(record, settings)
    if kind == "preference":
        if "chosen_ids" in record or "rejected_ids" in record:
            return _parse_tokens(record, ("chosen_ids", "rejected_ids"))
        return _parse_pair(record, settings)
    if kind == "unpaired":
        return _parse_labelled(record, settings)
    if "completion_ids" in record:
        return _parse_tokens(record, ("completion_ids",))
    if "chosen_ids" in record:
        return _parse_tokens(record, ("chosen_ids",))
    if settings.completion in record:
        prompt = _get(record, settings, "prompt")
        completion = _get(record, settings, "completion")
        return _join(prompt, (completion,), ("completion",), f"{settings.prompt} + {settings.completion}")
    if settings.messages in record:
        return _parse_messages(_get(record, settings, "messages"), settings)
    if settings.text in record:
        text = _get(record, settings, "text")
        if not isinstance(text, str):
            raise Unusable(f"column {settings.text!r} is {name_of_type(text)}, not a string")
        return Plain(None, (_check_completion(text, "text"),), settings.text)
    if settings.chosen in record:
        return _parse_chosen(record, settings)
    raise Unusable(_missing(record, settings, "completion", "messages", "text"))


def parse_rows(record: JSON, settings: DataSettings, kind: RecordKind) -> list[Tokens | Plain | Chat]:
    """The rows that a record gives: one; of a pair two, where labels are wanted: chosen is desirable, rejected is not.

    Raises Unusable, as `parse`.
    """
    names = (("chosen_ids", "rejected_ids"), (settings.chosen, settings.rejected))
    if kind != "unpaired" or settings.label in record or not any(record.keys() >= {*pair} for pair in names):
        return [parse(record, settings, kind)]
    pair = parse(record, settings, "preference")
    columns = f"{pair.columns} (each pair gives two rows: chosen is desirable, rejected is not)"
    rows: list[Tokens | Plain | Chat] = []
    for index, label in enumerate((True, False)):
        parts: JSON = {"completions": pair.completions[index : index + 1], "columns": columns, "label": label}
        if isinstance(pair, Chat) and pair.learnt is not None:
            parts["learnt"] = pair.learnt[index : index + 1]
        rows.append(replace(pair, **parts))
    return rows


def _parse_prompt(record: JSON, settings: DataSettings) -> Tokens | Plain | Chat:
    """The prompt alone; of a conversation, what comes before its last answer."""
    if "prompt_ids" in record:
        return _parse_tokens(record, ())
    if settings.prompt not in record and isinstance(record.get(settings.messages), list):
        messages = _check_messages(record[settings.messages], "messages")
        messages = messages[:-1] if messages[-1]["role"] == "assistant" and len(messages) > 1 else messages
        return Chat(messages, (), settings.messages)
    return _join(_get(record, settings, "prompt"), (), (), settings.prompt)


def _parse_tokens(record: JSON, names: tuple[str, ...]) -> Tokens:
    for name in ("prompt_ids", *names):
        ids = record.get(name)
        if ids is None:
            raise Unusable(f"no column {name!r} (columns: {_list(record)})")
        if not isinstance(ids, list):
            raise Unusable(f"column {name!r} is {name_of_type(ids)}, not a list of token ids")
        for index, token in enumerate(ids):
            if type(token) is not int or token < 0:
                raise Unusable(f"{name}[{index}] is {json.dumps(token, default=str)}, not a token id")
        if not ids and name != "prompt_ids":
            raise Unusable(f"empty completion: {name!r} has no tokens")
    completions = tuple(record[name] for name in names)
    return Tokens(record["prompt_ids"], completions, " + ".join(("prompt_ids", *names)))


def _parse_pair(record: JSON, settings: DataSettings) -> Plain | Chat:
    chosen, rejected = _get(record, settings, "chosen"), _get(record, settings, "rejected")
    if chosen == rejected:
        raise Unusable(f"{settings.chosen!r} is equal to {settings.rejected!r}: nothing to prefer")
    prompt = record.get(settings.prompt)
    if isinstance(chosen, list) and isinstance(rejected, list) and not _is_answer(chosen):
        common = _common_prompt(_check_messages(chosen, "chosen"), _check_messages(rejected, "rejected"))
        if prompt is not None:
            _check_contained(prompt, common, settings)
        answers = ([chosen[-1]], [rejected[-1]])
        return _join(common, answers, ("chosen", "rejected"), f"{settings.chosen} + {settings.rejected}")
    prompt = _get(record, settings, "prompt")
    columns = f"{settings.prompt} + {settings.chosen} + {settings.rejected}"
    return _join(prompt, (chosen, rejected), ("chosen", "rejected"), columns)


def _parse_labelled(record: JSON, settings: DataSettings) -> Tokens | Plain | Chat:
    """A completion that somebody called good or bad."""
    if settings.label not in record:
        raise Unusable(_missing(record, settings, "label"))
    label = record[settings.label]
    if label not in (True, False):  # 1 and 0, too
        raise Unusable(f"column {settings.label!r} is {json.dumps(label, default=str)}, not true or false")
    if "completion_ids" in record:
        return replace(_parse_tokens(record, ("completion_ids",)), label=bool(label))
    prompt, completion = _get(record, settings, "prompt"), _get(record, settings, "completion")
    columns = f"{settings.prompt} + {settings.completion} + {settings.label}"
    return replace(_join(prompt, (completion,), ("completion",), columns), label=bool(label))


def _parse_chosen(record: JSON, settings: DataSettings) -> Plain | Chat:
    """SFT on a preference record: the chosen completion."""
    chosen = _get(record, settings, "chosen")
    note = f"{settings.chosen} (preference records: the other completion is not used)"
    if isinstance(chosen, list) and not _is_answer(chosen):
        messages = _check_messages(chosen, "chosen")
        return _join(messages[:-1], (messages[-1:],), ("chosen",), note)
    return _join(_get(record, settings, "prompt"), (chosen,), ("chosen",), note)


def _parse_messages(value: object, settings: DataSettings) -> Plain | Chat:
    messages = _check_messages(value, "messages")
    if len(messages) < 2:
        raise Unusable(f"column {settings.messages!r} has one message; it needs a prompt and an answer")
    return _join(messages[:-1], (messages[-1:],), ("messages",), settings.messages)


def _is_answer(messages: list[object]) -> bool:
    """One message without a conversation before it."""
    return len(messages) == 1


def _common_prompt(chosen: list[Message], rejected: list[Message]) -> list[Message]:
    """The messages before the last, which must be the same in both."""
    if chosen[:-1] != rejected[:-1]:
        raise Unusable("chosen and rejected differ before their last message")
    return chosen[:-1]


def _check_contained(prompt: object, common: list[Message], settings: DataSettings) -> None:
    """A prompt column beside whole conversations has to be part of them, or it would be dropped without a word."""
    if isinstance(prompt, str):
        fits = any(prompt.strip() in str(message.get("content")) for message in common)
    else:
        fits = _check_messages(prompt, "prompt") == common
    if not fits:
        raise Unusable(f"column {settings.prompt!r} is not in the conversation of {settings.chosen!r}")


def _join(prompt: object, completions: tuple[object, ...], names: tuple[str, ...], columns: str) -> Plain | Chat:
    """Strings stay strings; as soon as one side is a list of messages, both are messages."""
    texts = [completion for completion in completions if isinstance(completion, str)]
    if isinstance(prompt, str) and len(texts) == len(completions):
        _check_unicode(prompt, "prompt")
        return Plain(prompt, tuple(map(_check_completion, texts, names)), columns)
    if isinstance(prompt, str):
        _check_unicode(prompt, "prompt")
        messages: list[Message] = [{"role": "user", "content": prompt}]
    else:
        messages = _check_messages(prompt, "prompt")
    if messages[-1]["role"] == "assistant":
        raise Unusable("the prompt ends with an assistant message; it has to end before the answer")
    answers = (_answer(messages, *answer) for answer in zip(completions, names, strict=True))
    return Chat(messages, tuple([answer] for answer in answers), columns)


def _answer(prompt: list[Message], completion: object, name: str) -> Message:
    if isinstance(completion, str):
        return {"role": "assistant", "content": _check_completion(completion, name)}
    messages = _check_messages(completion, name)
    if len(messages) > 1 and messages[:-1] != prompt:
        raise Unusable(f"{name!r} has {len(messages)} messages that do not begin with the prompt")
    answer = messages[-1]
    if answer["role"] != "assistant":
        raise Unusable(f"the last message of {name!r} is from {answer['role']!r}, not from 'assistant'")
    if not isinstance(answer["content"], str):
        raise Unusable(f"the content of {name!r} is {name_of_type(answer['content'])}, not a string")
    _check_completion(answer["content"], name)
    return answer


def _check_messages(value: object, name: str) -> list[Message]:
    if not isinstance(value, list):
        raise Unusable(f"{name!r} is {name_of_type(value)}, not a string or a list of messages")
    if not value:
        raise Unusable(f"{name!r} is an empty list of messages")
    messages = []
    for index, message in enumerate(value):
        if not isinstance(message, dict):
            raise Unusable(f"{name}[{index}] is {name_of_type(message)}, not a message {{role, content}}")
        if not isinstance(message.get("role"), str) or "content" not in message:
            raise Unusable(f"{name}[{index}] has no 'role' and 'content' (it has: {_list(message)})")
        if isinstance(message["content"], str):
            _check_unicode(message["content"], name)
        # Parquet fills the fields that a message lacks with None, and chat templates ask whether one is
        # defined.
        known = {key: item for key, item in message.items() if item is not None or key == "content"}
        messages.append(cast(Message, known))
    return messages


def _check_completion(text: str, name: str) -> str:
    if not text.strip():
        raise Unusable(f"empty completion: {name!r} is blank")
    return _check_unicode(text, name)


def _check_unicode(text: str, name: str) -> str:
    """JSON can spell half a surrogate pair, which no tokenizer takes."""
    if not text.isascii():
        try:
            text.encode("utf-8")
        except UnicodeEncodeError as error:
            raise Unusable(f"{name!r} has half a surrogate pair at character {error.start + 1}") from error
    return text


def _get(record: JSON, settings: DataSettings, name: str) -> Any:
    column = getattr(settings, name)
    if column not in record:
        raise Unusable(_missing(record, settings, name))
    value = record[column]
    if not isinstance(value, str | list):
        raise Unusable(f"column {column!r} is {name_of_type(value)}, not a string or a list of messages")
    return value


def _missing(record: JSON, settings: DataSettings, *names: str) -> str:
    """Names the columns that are missing, those that are there, and the setting to change."""
    wanted = " or ".join(repr(getattr(settings, name)) for name in names)
    hint = f"name yours with data.{names[0]}=COLUMN"
    for name in names:
        column = getattr(settings, name)
        aliases = [alias for alias in OTHER_NAMES[name] if alias in record]
        near = aliases or difflib.get_close_matches(column, [str(key) for key in record], 1)
        if near:
            hint = f"did you mean data.{name}={near[0]}?"
            break
    if names == ("chosen",) or names == ("rejected",):
        hint = "rows with labels are for train.loss=kto" if settings.label in record else hint
        hint += "; without pairs, train.loss=sft"
    elif len(names) > 1 and settings.prompt not in record and "question" in record:
        hint = hint.rstrip("?") + " data.prompt=question?"
    return f"no column {wanted} (columns: {_list(record)}); {hint}"


def _list(names: Iterable[object]) -> str:
    return ", ".join(str(name) for name in names) or "none"


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
