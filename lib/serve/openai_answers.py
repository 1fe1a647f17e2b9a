"""What a backend answers, and what clients get of it: server-sent events, renamed, split, and put together."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from typing import Any, TypedDict

BACKEND_MODEL = (
    b'"model": "default_model"'  # as mlx_lm.server answers; inside of a JSON string its quotes would be escaped
)
CACHED = re.compile(rb', "prompt_tokens_details": \{"cached_tokens": \d+\}')  # likewise
FAILURE = b'{"error": "the answer could not be made of what the model wrote"}'  # an event in the place of the rest
DEATH = b'{"error": "the thread that generates has ended"}'  # likewise, and in the place of all further answers
LAST_USAGE = re.compile(rb'"usage": (\{[^{}]*(?:\{[^{}]*\}[^{}]*)?\})\}\s*$')
HEADER = ("id", "object", "created", "model", "system_fingerprint")  # of an answer, the same in each of its events


class Usage(TypedDict):
    """Tokens of a request."""

    prompt_tokens: int
    completion_tokens: int


class Event(TypedDict, total=False):
    """One event of a stream."""

    id: str
    object: str
    created: int
    model: str
    system_fingerprint: str
    choices: list[dict[str, Any]]  # of chat: with a "delta"
    usage: Usage


def for_clients(event: bytes, model: str) -> bytes:
    """A backend's answer, under the name that clients know, and without what it had read already for others.

    How much of a prompt is known from before would tell one key, token by token, what another has asked. A comment,
    which counts what is left to read, is an empty one.
    """
    if event.startswith(b":"):
        return b":"
    return CACHED.sub(b"", event.replace(BACKEND_MODEL, b'"model": ' + json.dumps(model).encode()))


def data_of(event: bytes) -> bytes | None:
    """The data of a server-sent event; None for a comment."""
    return event[6:] if event.startswith(b"data: ") else None


def is_usage(data: bytes) -> bool:
    """Whether an event has the usage, and no token."""
    return b'"choices": [], "usage": {' in data


def is_death(data: bytes) -> bool:
    """Whether an event says that the backend generates no more, for anybody: one of its requests may be why."""
    return data == DEATH


def is_failure(data: bytes) -> bool:
    """Whether an event says that no more of the answer follows, by a fault that is the request's alone."""
    return data == FAILURE


class Assembly:
    """A whole answer that is made of a stream's events as they come: of a long one, not all of them at its end."""

    def __init__(self) -> None:
        self._head: dict[str, object] = {}
        self._texts: dict[str, list[str]] = {"content": [], "reasoning": [], "text": []}
        self._calls: list[dict[str, object]] = []
        self._finish_reason: str | None = None
        self._usage: Usage | None = None

    def add(self, events: Iterable[bytes]) -> None:
        """Takes in more of the stream."""
        for data in map(data_of, events):
            if data and data != b"[DONE]":
                self._add(json.loads(data))

    def _add(self, event: Event) -> None:
        self._head = self._head or {key: event[key] for key in HEADER}  # type: ignore[literal-required]
        self._usage = event.get("usage") or self._usage
        for choice in event["choices"]:
            self._finish_reason = choice["finish_reason"] or self._finish_reason
            piece = choice.get("delta", choice)
            for key, parts in self._texts.items():
                parts.append(piece.get(key) or "")
            self._calls += ({key: call[key] for key in call if key != "index"} for call in piece.get("tool_calls", ()))

    def answer(self) -> dict[str, Any]:
        """The answer, of a stream that has ended."""
        text = {key: "".join(parts) for key, parts in self._texts.items()}
        whole: dict[str, object] = {"index": 0, "finish_reason": self._finish_reason, "logprobs": None}
        head = dict(self._head)
        if head["object"] == "text_completion":
            whole["text"] = text["text"]
        else:
            head["object"] = "chat.completion"
            message: dict[str, object] = {"role": "assistant", "content": text["content"] or None}
            message |= {"reasoning": text["reasoning"]} if text["reasoning"] else {}
            message |= {"tool_calls": self._calls} if self._calls else {}
            whole["message"] = message
        return head | {"choices": [whole], "usage": self._usage}


def usage_of(answer: bytes) -> Usage:
    """The usage of a backend's whole answer: from its end alone, since log-probabilities make the rest long."""
    found = LAST_USAGE.search(answer[-1000:])
    usage: Usage = json.loads(found[1]) if found else json.loads(answer)["usage"]
    return usage


def split(buffer: bytes) -> tuple[list[bytes], bytes]:
    """The whole server-sent events at a buffer's beginning, and what is left of it."""
    *events, rest = buffer.split(b"\n\n")
    return events, rest
