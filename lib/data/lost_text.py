"""What of a conversation does not reach its text: a template that drops it would train on something else in silence.

Most of it shows in the text. But a thinking of "2+2=4" may be dropped, and stand in the answer all the same. So what
may stand elsewhere is changed, and rendered once more: a text that stays as it was does not have it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, cast

from lib.data.record_formats import Chat, Message

# Stands for a text whose place in a rendering is looked for: no template trims, splits or escapes it.
SENTINEL = "qZ7sentinelZ7q"
# Fields in which messages carry their thinking; transformers gives templates all of them where a message has one.
REASONING = ("reasoning_content", "reasoning", "thinking")
FIELDS = frozenset({"role", "content", "tool_calls", "tool_call_id", "name", "weight", *REASONING})
"""Of a message: what is looked for by itself, what only tells which call is meant, and what no template shows."""
INLINE_THINKING = re.compile(
    r"\s*(?:<(?:seed:|mm:)?think>|\[THINK\])(.*?)(?:</(?:seed:|mm:)?think>|\[/THINK\])", re.DOTALL
)


def inline_reasoning(message: Message) -> str | None:
    """The thinking that an answer's content begins with, without its marks; None where there is none."""
    content = message.get("content")
    match = INLINE_THINKING.match(content) if isinstance(content, str) else None
    return match[1] if match else None


def has_reasoning(message: Message) -> bool:
    """Whether a message brings thinking of its own, in a field or within its content."""
    return any(message.get(name) for name in REASONING) or inline_reasoning(message) is not None


def lost_of_chat(chat: Chat, prompt: str, wholes: Sequence[str]) -> str | None:
    """What of a chat's messages is not in its texts, in words; None for nothing.

    Tools that a template does not show are no error: lib/data/template_facts.py says so at the start.
    """
    for message in chat.prompt:
        is_answer = message["role"] == "assistant"
        if (name := (lost_of_earlier if is_answer else _lost_of_others)(message, prompt)) is not None:
            return name
    for answer, whole in zip(chat.completions, wholes, strict=True):
        for message in answer:
            is_answer = message["role"] == "assistant"
            if (name := (lost if is_answer else _lost_of_others)(message, whole)) is not None:
                return name
    return None


class Change(NamedTuple):
    """A chat's completion with one thing changed, which its text has to show."""

    name: str
    """Of the thing, for errors."""
    completion: int
    messages: list[Message]


def changes(chat: Chat) -> Iterator[Change]:
    """The changes of a chat's answers that show whether a template has the thing, or something else like it."""
    for k, answer in enumerate(chat.completions):
        for index, message in enumerate(answer):
            if len(message) > 2 or inline_reasoning(message) is not None:
                for name, changed in _changes_of(message) if message["role"] == "assistant" else ():
                    yield Change(name, k, [*answer[:index], changed, *answer[index + 1 :]])


def _changes_of(message: Message) -> Iterator[tuple[str, Message]]:
    """An answer with other thinking, with another content beside its calls, and without each field of its own."""
    if (thought := with_other_thinking(message)) is not None:
        fields = [repr(name) for name in REASONING if message.get(name)]
        yield (*fields, "the thinking in its content")[0], thought
    content = message.get("content")
    if message.get("tool_calls") and isinstance(content, str):
        match = INLINE_THINKING.match(content)
        begin = match.end() if match else 0
        if content[begin:].strip():
            yield "the answer's content", _with(message, "content", content[:begin] + SENTINEL)
    for name, value in message.items():
        if name not in FIELDS and value not in ("", [], {}) and value is not False:
            without = cast(Message, {key: item for key, item in message.items() if key != name})
            yield f"{name!r} of a message from 'assistant' (or leave it out with data.ignore=[{name}])", without


def with_other_thinking(message: Message) -> Message | None:
    """An answer that thinks something that stands nowhere else; None for one that does not think."""
    fields = [name for name in REASONING if isinstance(text := message.get(name), str) and text.strip()]
    if fields:
        return cast(Message, {**message, **dict.fromkeys(fields, SENTINEL)})
    inline, content = inline_reasoning(message), message.get("content")
    if inline is None or not inline.strip() or not isinstance(content, str):
        return None
    return _with(message, "content", content.replace(inline.strip(), SENTINEL, 1))


def _with(message: Message, name: str, value: str) -> Message:
    return cast(Message, {**message, name: value})


def lost_of_earlier(message: Message, text: str) -> str | None:
    """`lost` of an answer in the prompt, whose thinking need not be shown again."""
    content = message.get("content")
    said = INLINE_THINKING.sub("", content, count=1) if isinstance(content, str) else content
    without = {key: item for key, item in message.items() if key not in REASONING} | {"content": said}
    return lost(cast(Message, without), text)


def _lost_of_others(message: Message, text: str) -> str | None:
    """What of a question, an instruction or a tool's result is not in a text, in words; None for nothing."""
    content = message.get("content")
    if isinstance(content, str) and not _is_said(content.strip(), text):
        return f"the content of a message from {message['role']!r}"
    if len(message) > 2:
        for name, value in message.items():
            if name not in FIELDS and value not in ("", [], {}) and not _is_said(str(value), text):
                return f"{name!r} of a message from {message['role']!r} (or leave it out with data.ignore=[{name}])"
    return None


def _is_said(said: str, text: str) -> bool:
    """Whether a text has this in it: as it is, as a JSON string, or with other white space."""
    if said in text or json.dumps(said, ensure_ascii=False)[1:-1] in text:
        return True
    return "".join(said.split()) in "".join(text.split())


def lost(message: Message, whole: str) -> str | None:
    """What of an answer's thinking, content and calls is not in its conversation's text, in words; None for nothing."""
    if message["role"] != "assistant":
        return None
    for name in REASONING:
        text = message.get(name)
        if isinstance(text, str) and text.strip() not in whole:
            return repr(name)
    content, inline = message.get("content"), inline_reasoning(message)
    if inline is not None and inline.strip() not in whole:
        return "the thinking in its content"
    if isinstance(content, str):
        said = content if inline is None else INLINE_THINKING.sub("", content, count=1)
        if said.strip() not in whole:
            return "the answer's content"
    calls: Any = message.get("tool_calls") or ()
    for call in calls:
        called = (call.get("function") or call).get("name") if isinstance(call, dict) else None
        if isinstance(called, str) and called not in whole:
            return f"the call of {called!r}"
    return None
