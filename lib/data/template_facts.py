"""What a chat template does with system prompts, thinking, tools and earlier turns, found by rendering small chats."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from rich.text import Text

from lib.data.chat_template import OPENED_THINKING, ChatTemplate, Conversation
from lib.data.dataset import Example
from lib.data.record_formats import JSON, Message, Unusable
from lib.data.text_tokens import Tokenizer
from lib.data.tokenize import Encoder

WORDS = {name: f"qZ7{name}Z7q" for name in ("system", "thinking", "tool", "call", "first", "second")}


@dataclass(frozen=True)
class TemplateFacts:
    """What becomes of the parts of a chat."""

    system: str
    thinking: str
    tools: str
    history: str
    end: str

    def __str__(self) -> str:
        return (
            f"chat template: system prompts {self.system}; thinking {self.thinking}; tools {self.tools}; "
            f"earlier turns {self.history}; turns end with {self.end}"
        )


def facts_of(encoder: Encoder) -> TemplateFacts | None:
    """What the encoder's template does; None where it uses none."""
    template = encoder.template
    if not template.is_used:
        return None
    return TemplateFacts(
        "open the first question" if template.refuses_system else "have a turn of their own",
        _thinking(template),
        _tools(template),
        _history(template),
        " or ".join(encoder.tokenizer.decode([token]) for token in sorted(encoder.end_ids)),
    )


def _text(template: ChatTemplate, messages: list[Message], is_prompt: bool, tools: Any = None, **given: Any) -> str:
    """The rendering; nothing where it is refused."""
    arguments: JSON = {**template.arguments_without_answer, **given}
    (text,) = template.texts([Conversation(messages, tools, arguments)], is_prompt)
    return "" if isinstance(text, Unusable) else text


def _said(role: str, name: str, **fields: Any) -> Message:
    return {"role": role, "content": WORDS[name], **fields}  # type: ignore[typeddict-item]


def _thinking(template: ChatTemplate) -> str:
    question = _said("user", "first")
    thought = _said("assistant", "second", reasoning_content=WORDS["thinking"])
    off, on = (_text(template, [question], True, enable_thinking=thinks) for thinks in (False, True))
    is_kept = WORDS["thinking"] in _text(template, [question, thought], False, enable_thinking=True)
    if OPENED_THINKING.search(off):
        return "always opened by the prompt"
    if off != on:
        return "off, unless an answer thinks or data.chat_template_kwargs.enable_thinking=true"
    return "kept where an answer has it" if is_kept else "unknown to it"


def _tools(template: ChatTemplate) -> str:
    definition = {"name": WORDS["tool"], "description": "d", "parameters": {"type": "object", "properties": {}}}
    tools = [{"type": "function", "function": definition}]
    call = {"id": "call12345", "type": "function", "function": {"name": WORDS["call"], "arguments": {}}}
    question: Message = _said("user", "first")
    without: Any = {"role": "assistant", "tool_calls": [call]}
    answers: list[Any] = [without, {**without, "content": ""}]  # each is what some templates want
    is_defined = WORDS["tool"] in _text(template, [question], True, tools)
    is_called = any(WORDS["call"] in _text(template, [question, answer], False, tools) for answer in answers)
    if is_defined and is_called:
        return "known"
    return "defined, but no calls of them" if is_defined else "calls alone" if is_called else "unknown to it"


def _history(template: ChatTemplate) -> str:
    turns = [_said("user", "first"), _said("assistant", "second")]
    thought = [turns[0], _said("assistant", "second", reasoning_content=WORDS["thinking"])]
    later = [*turns, _said("user", "first")]
    short = _text(template, turns, False)
    is_last, is_earlier = (
        WORDS["thinking"] in _text(template, messages, False, enable_thinking=True)
        for messages in (thought, [*thought, *turns])
    )
    if is_last and not is_earlier:
        return "lose their thinking"
    until = short.find(WORDS["second"])
    is_kept = until >= 0 and _text(template, later, False).startswith(short[:until])
    return "stay as they were" if is_kept else "are written differently from the last one"


def picture(example: Example, tokenizer: Tokenizer, k: int, colour: str) -> Text:
    """A row as the model sees it: the prompt dim, learnt tokens in colour within ⟦⟧, others of the completion plain."""
    text = Text(tokenizer.decode(example.prompt_ids.tolist()), style="dim")
    ids = example.completions[k].tolist()
    mask = [True] * len(ids) if example.learnt is None else example.learnt[k].tolist()
    start = 0
    for index in range(1, len(ids) + 1):
        if index == len(ids) or mask[index] != mask[start]:
            piece = tokenizer.decode(ids[start:index])
            text.append(f"⟦{piece}⟧" if mask[start] else piece, style=colour if mask[start] else "not dim")
            start = index
    return text
