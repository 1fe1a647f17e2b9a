"""What a record becomes before it is tokenised, and what is said of one that cannot be used.

A record becomes one of three forms, whatever its columns were called:

    Tokens   prompt_ids and completion ids, taken as they are
    Plain    a prompt string and completion strings
    Chat     the messages before the answer, and for each answer the messages that follow

known_formats.py recognises a data set's format by its columns, messages.py checks conversations, and parse_records.py
puts both together. A record that fits no form raises Unusable with the reason; the caller names the line.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, TypedDict

from lib.config.schema import DataSettings

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
