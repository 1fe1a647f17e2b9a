"""Chats ➜ their text, through the tokenizer's chat template.

A template that leaves out part of a message is refused: it would train on something else in silence.
"""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import jinja2

from lib.config import read_file
from lib.config.settings import DataSettings
from lib.data.record_formats import JSON, REASONING, TURN_MARKS, Chat, Message, Unusable
from lib.data.tokenizer import Tokenizer
from lib.errors import UserError

# Stands for a text whose place in a rendering is looked for: no template trims, splits or escapes it.
SENTINEL = "qZ7sentinelZ7q"
# Of a message: what is looked for by itself, what only tells which call is meant, and what no template shows.
FIELDS = frozenset({"role", "content", "tool_calls", "tool_call_id", "name", "weight", *REASONING})
NOTHING: tuple[object, ...] = ("", [], {}, False)  # what a field may hold unseen
INLINE_THINKING = re.compile(
    r"\s*(?:<(?:seed:|mm:)?think>|\[THINK\])(.*?)(?:</(?:seed:|mm:)?think>|\[/THINK\])", re.DOTALL
)
# An opening and a closing mark of thinking, in the templates that there are, with nothing between them.
EMPTY_THINKING = re.compile(
    r"\s*(?:<(seed:)?think>\s*</(?:seed:)?think>|</think>|\[THINK\]\s*\[/THINK\]|<\|channel>thought\s*<channel\|>"
    r"|<\|think:start\|>\s*<\|think:end\|>|<\|START_THINKING\|>\s*<\|END_THINKING\|>"
    r"|<\|inner_prefix\|>\s*<\|inner_suffix\|>|<\|think_start\|>\s*<\|think_end\|>|<mm:think>\s*</mm:think>)"
)
OPENED_THINKING = re.compile(r"<((?:seed:|mm:)?think)>(\n?)$")
# What the rendering itself is asked for: an argument of this name would not reach the template.
RESERVED = frozenset(
    {"conversation", "messages", "tools", "tokenize", "add_generation_prompt", "chat_template", "return_dict"}
    | {"continue_final_message", "return_assistant_tokens_mask", "return_tensors", "padding", "truncation"}
)
STRFTIME = re.compile(r"strftime_now\(\s*(['\"])(.*?)\1\s*\)")


# ---- What of a chat is not in its text


def inline_reasoning(message: Message) -> str | None:
    """The thinking that an answer's content begins with, without its marks; None where there is none."""
    content = message.get("content")
    match = INLINE_THINKING.match(content) if isinstance(content, str) else None
    return match[1] if match else None


def reasoning_of(message: Message) -> str | None:
    """An answer's thinking, of its own field or within its content; None or blank where it does not think."""
    fields = (value for name in REASONING if (value := message.get(name)))
    return next((str(value) for value in fields), inline_reasoning(message))


def has_reasoning(message: Message) -> bool:
    """Whether a message brings thinking of its own, in a field or within its content."""
    return reasoning_of(message) is not None


def lost(message: Message, text: str, is_earlier: bool = False) -> str | None:
    """What of a message is not in its conversation's text, in words; None for nothing. is_earlier: of an answer in the
    prompt, whose thinking need not be shown again."""
    content, role = message.get("content"), message["role"]
    if role != "assistant":
        if isinstance(content, str) and not _is_in(content.strip(), text):
            return f"the content of a message from {role!r}"
        others = ((name, value) for name, value in message.items() if name not in FIELDS and value not in NOTHING)
        return next((_field(name, role) for name, value in others if not _is_in(str(value), text)), None)
    parts: list[tuple[str, str]] = []
    if not is_earlier:
        names = [repr(name) for name in REASONING if isinstance(message.get(name), str)]
        parts.append(((*names, "the thinking in its content")[0], (reasoning_of(message) or "").strip()))
    if isinstance(content, str):
        parts.append(("the answer's content", INLINE_THINKING.sub("", content, count=1).strip()))
    calls: Any = message.get("tool_calls") or ()
    functions = [call.get("function") or call for call in calls]
    arguments = [(str(function.get("name")), function.get("arguments")) for function in functions]
    parts += [(f"the call of {name!r}", name) for name, _ in arguments]
    rest = text
    # Each found part is taken out, the longest first: what is said twice has to stand there twice.
    for name, part in sorted(parts, key=lambda part: -len(part[1])):
        if part not in rest:
            return name
        rest = rest.replace(part, "", 1) if part and not is_earlier else rest
    # Where a result names its function, too, a call that is left out is missed by its arguments.
    for name, given in arguments:
        written = given if isinstance(given, str) else json.dumps(given, ensure_ascii=False)
        if not all(_is_in(value, text) for value in re.findall(r'"(\w[\w ,.:-]*)"', written)):
            return f"the arguments of the call of {name!r}"
    return None


def _field(name: str, role: str) -> str:
    return f"{name!r} of a message from {role!r} (or leave it out with data.ignore=[{name}])"


def _is_in(part: str, text: str) -> bool:
    """Whether a text has this in it: as it is, as a JSON string, or with other white space."""
    is_literal = part in text or json.dumps(part, ensure_ascii=False)[1:-1] in text
    return is_literal or "".join(part.split()) in "".join(text.split())


def assistant_message(text: str) -> Message:
    return {"role": "assistant", "content": text}


# ---- The template


class Rendering(NamedTuple):
    """A chat's texts: the prompt as inference sends it, and the whole conversation with each completion."""

    prompt: str
    wholes: list[str]
    chat: Chat  # As it was rendered: with what the template does not take put where it does


def template_of(settings: DataSettings) -> str | None:
    """The text of data.chat_template=FILE; None without. Raises UserError: the file cannot be read."""
    if isinstance(settings.chat_template, bool):
        return None
    try:
        return read_file.read_text(Path(settings.chat_template), "data.chat_template")
    except OSError as error:
        raise UserError(f"data.chat_template={settings.chat_template}: cannot be read: {error}") from None


class ChatTemplate:
    """A tokenizer's chat template, or that of data.chat_template=FILE. Raises UserError: it cannot be used."""

    def __init__(self, tokenizer: Tokenizer, settings: DataSettings) -> None:
        self.tokenizer, self.settings = tokenizer, settings
        if reserved := RESERVED & settings.chat_template_kwargs.keys():
            raise UserError(f"data.chat_template_kwargs: {min(reserved)!r} is no argument of a template")
        own, stored = template_of(settings), getattr(tokenizer, "chat_template", None)
        has_template = getattr(tokenizer, "has_chat_template", stored is not None)
        self.is_used = own is not None or (bool(settings.chat_template) and has_template)
        # Some models have several, by name: that of tools is taken where there are any.
        named = stored if own is None and isinstance(stored, dict) else {"default": own or stored}
        # A template's strftime_now("...") says the day of the settings: else tomorrow's tokens would be others.
        day, self._texts = settings.template_date, [str(text) for text in named.values()]
        dated = [STRFTIME.sub(lambda match: json.dumps(day.strftime(match[2])), text) for text in self._texts]
        self._named = dict(zip(named, dated, strict=True))
        self.text = self._named.get("default", next(iter(self._named.values())))
        date = {"date_string": day.strftime("%d %b %Y")} if any("date_string" in text for text in self._texts) else {}
        # What a prompt alone is rendered with: no thinking, unless data.chat_template_kwargs wants it.
        self.arguments_without_answer: JSON = {"enable_thinking": False, **date, **settings.chat_template_kwargs}
        if own is not None:
            try:
                self.text_of([{"role": "user", "content": "a"}])
            except jinja2.TemplateSyntaxError as error:
                raise UserError(f"data.chat_template: not a template: {error}") from None

    def fingerprint(self) -> str:
        """What decides the text of a conversation."""
        parts = [self._texts, self.arguments_without_answer, self.settings.template_date]
        return json.dumps(parts, sort_keys=True, default=str)

    def arguments(self, chat: Chat) -> JSON:
        """What the template is given for a chat: thinking only where its answer thinks, unless it is set."""
        thinks = any(has_reasoning(message) for answer in chat.completions for message in answer)
        default = {**self.arguments_without_answer, "enable_thinking": thinks}
        return {**default, **self.settings.chat_template_kwargs, **chat.template_arguments}

    def apply(self, chat: Chat, messages: Sequence[Message], is_prompt: bool = False) -> str:
        """The text of messages with a chat's tools and arguments, "" without any. Raises Unusable: it refuses them."""
        if not messages:
            return ""
        options = {**self.arguments(chat), "tokenize": False, "add_generation_prompt": is_prompt}
        options["chat_template"] = self.text
        if chat.tools:
            options |= {"tools": chat.tools, "chat_template": self._named.get("tool_use", self.text)}
        try:
            return self.tokenizer.apply_chat_template(list(messages), **options)
        except jinja2.TemplateSyntaxError:
            raise
        except Exception as error:  # a template raises whatever its author chose
            raise Unusable(f"the chat template refuses the conversation: {' '.join(str(error).split())}") from None

    def apply_or_none(self, chat: Chat, messages: Sequence[Message], is_prompt: bool = False) -> str | None:
        """`apply`, or None where the template refuses the messages."""
        try:
            return self.apply(chat, messages, is_prompt)
        except Unusable:
            return None

    def text_of(self, messages: Sequence[Any], is_prompt: bool = False, tools: Any = None, **arguments: Any) -> str:
        """The text of messages alone, to see what the template makes of them; "" where it refuses them."""
        return self.apply_or_none(Chat([], (), "", None, tools, arguments), messages, is_prompt) or ""

    def render(self, chat: Chat) -> Rendering:
        """The texts of a chat, adapted to the template where it does not take it as it is. Raises Unusable."""
        if reserved := RESERVED & chat.template_arguments.keys():
            raise Unusable(f"chat_template_kwargs: {min(reserved)!r} is no argument of a template")
        losses, refusals = list[Unusable](), list[Unusable]()
        for form in itertools.chain([chat], _adaptions(chat)):
            try:
                prompt = self.apply(form, form.prompt, is_prompt=True)
                wholes = [self.apply(form, [*form.prompt, *answer]) for answer in form.completions]
            except Unusable as why:
                refusals.append(why)
                continue
            rendering = Rendering(prompt, wholes, form)
            missing = self._lost(rendering)
            if missing is not None and OPENED_THINKING.search(prompt):
                rendering = self._with_thinking(rendering)
                missing = self._lost(rendering)
            if missing is None:
                return rendering
            remedy = "take it out of the data, or give a template that keeps it with data.chat_template=FILE"
            losses.append(Unusable(f"the chat template leaves out {missing}; {remedy}"))
        raise losses[0] if losses else refusals[-1]

    def _lost(self, rendering: Rendering) -> str | None:
        """What of a chat's messages is not in its texts, in words. Tools are not looked for."""
        chat, prompt, wholes = rendering.chat, rendering.prompt, rendering.wholes
        names, rest = list[str | None](), prompt
        for message in sorted(chat.prompt, key=lambda message: -len(str(message.get("content")))):
            names.append(lost(message, rest, is_earlier=True))
            rest = rest.replace(str(message.get("content") or "").strip(), "", 1)  # shorter ones have to stand apart
        for answer, whole in zip(chat.completions, wholes, strict=True):
            names += [lost(message, whole.removeprefix(prompt)) for message in answer]
            for index, message in enumerate(every := [*chat.prompt, *answer]):
                fields = message if message["role"] == "assistant" else {}
                for name in [name for name in fields if name == "tool_calls" or name not in FIELDS]:
                    without = {key: item for key, item in fields.items() if key != name}
                    others = [*every[:index], without, *every[index + 1 :]]
                    if fields[name] not in NOTHING and self.apply_or_none(chat, others) == whole:
                        names.append(_field(name, "assistant"))
        return next((name for name in names if name is not None), None)

    def _with_thinking(self, rendering: Rendering) -> Rendering:
        """With the answers' thinking, where the prompt opens a block for it and the template drops it from all answers.
        DeepSeek-R1's and QwQ's do: they are made for prompts alone."""
        chat, prompt, wholes = rendering.chat, rendering.prompt, [*rendering.wholes]
        opened = OPENED_THINKING.search(prompt)
        plain = self.apply_or_none(chat, [*chat.prompt, assistant_message(SENTINEL)]) or ""
        for k, answer in enumerate(chat.completions):
            thinking = (reasoning_of(answer[-1]) or "").strip()
            if opened is None or len(answer) > 1 or not thinking or "tool_calls" in answer[0] or SENTINEL not in plain:
                continue
            content = INLINE_THINKING.sub("", str(answer[0].get("content") or ""), count=1)
            gap = "" if inline_reasoning(answer[0]) is not None else 2 * opened[2]
            wholes[k] = f"{prompt}{thinking}{opened[2]}</{opened[1]}>{gap}{content}{plain.partition(SENTINEL)[2]}"
        return rendering._replace(wholes=wholes)

    @cached_property
    def turns(self) -> str:
        """A question and an answer as the template writes them; "" where there is none."""
        turns = [{"role": "user", "content": SENTINEL}, assistant_message(SENTINEL)]
        return self.text_of(turns) if self.is_used else ""

    @cached_property
    def marks(self) -> frozenset[str]:
        """What the template writes around system prompt, question and answer: <|im_start|>, [INST] and the like."""
        opened = self.text_of([{"role": role, "content": SENTINEL} for role in ("system", "user")])
        return frozenset(TURN_MARKS.findall(f"{self.turns} {opened}"))

    @cached_property
    def header(self) -> str:
        """What the template writes behind a prompt for its answer: <|im_start|>assistant, ASSISTANT: and the like."""
        asked, told = (self.text_of([{"role": "user", "content": SENTINEL}], each) for each in (self.is_used, False))
        told = told.removesuffix(getattr(self.tokenizer, "eos_token", "") or "")  # Phi-3 ends a question with it
        header = EMPTY_THINKING.sub("", asked[len(told) :] if asked.startswith(told) else "").strip()
        return OPENED_THINKING.sub("", header).rstrip()

    def first_mark(self, text: str) -> str:
        """The mark of a turn, of this template or another, that a text begins with, behind BOS; "" without one."""
        bos = getattr(self.tokenizer, "bos_token", None) or ""
        lead = re.split(TURN_MARKS, self.turns, maxsplit=1)[0]  # of GLM [gMASK]<sop>
        text = text.lstrip() if self.turns.count(bos) > 1 else text.lstrip().removeprefix(bos)  # SmolLM2's opens turns
        mark = TURN_MARKS.match(text.removeprefix("<s>").removeprefix(lead).lstrip())
        return mark[0] if mark else ""

    def is_rendered(self, text: str) -> bool:
        """Whether a text is one of the template's already: it begins with a mark of it, or ends with a header."""
        return self.first_mark(text) in self.marks or self.ends_with_header(text)

    def ends_with_header(self, text: str) -> bool:
        """Whether a text ends as a prompt does: with the header of an answer, and perhaps a block of thinking."""
        bare = OPENED_THINKING.sub("", EMPTY_THINKING.sub("", text[-200:]).rstrip()).rstrip()
        end = self.header or self.turns.partition(SENTINEL)[2].partition(SENTINEL)[0].strip()  # Mistral's is [/INST]
        return bool(end) and bare.endswith(end)

    # ---- Where things are in a rendering

    def place_of(self, chat: Chat, messages: Sequence[Message], index: int, whole: str) -> tuple[int, int] | None:
        """Begin and end of message `index`'s content in the whole text, by rendering it again; None where unclear."""
        content = messages[index].get("content")
        if not isinstance(content, str) or not content.strip():
            return None
        others = [*messages[:index], messages[index] | {"content": SENTINEL}, *messages[index + 1 :]]
        before, mark, after = (self.apply_or_none(chat, others) or "").partition(SENTINEL)
        is_clear = mark and SENTINEL not in after and whole.startswith(before) and whole.endswith(after)
        return (len(before), len(whole) - len(after)) if is_clear and len(before) + len(after) <= len(whole) else None

    def marked(self, chat: Chat, messages: Sequence[Message]) -> list[tuple[int, int]]:
        """Begin and end of each part of the text that the template marks as the model's; none where it refuses it."""
        from transformers.utils.chat_template_utils import render_jinja_template

        inner: Any = getattr(self.tokenizer, "_tokenizer", self.tokenizer)
        arguments: Any = {"tools": chat.tools or None, "return_assistant_tokens_mask": True}
        arguments |= {**inner.special_tokens_map, **self.arguments(chat)}
        bare: Any = [{k: v for k, v in message.items() if v is not None} for message in messages]
        try:
            rendered: Any = render_jinja_template([bare], chat_template=self.text, **arguments)
        except Exception:  # a template raises whatever its author chose
            return []
        return [(begin, end) for begin, end in rendered[1][0]]


# ---- Adaptions: the same content in a form that a template takes


def _with_text_arguments(message: Message) -> Message:
    calls = message.get("tool_calls") or []
    functions = [call["function"] for call in calls]
    texts = [{**function, "arguments": json.dumps(function.get("arguments"))} for function in functions]
    changed = [{**call, "function": function} for call, function in zip(calls, texts, strict=True)]
    return message | {"tool_calls": changed} if calls else message


# In this order, each on top of the ones before. For templates that do not know the role of a developer; that take calls
# with an empty content for an answer without calls; that add the content of calls, or their arguments, to their text.
ADAPTIONS: tuple[Callable[[Message], Message], ...] = (
    lambda message: message | {"role": "system"} if message["role"] == "developer" else message,
    lambda message: message | {"content": message.get("content") or None} if message.get("tool_calls") else message,
    lambda message: message | {"content": ""} if message.get("content") is None else message,
    _with_text_arguments,
)


def _adaptions(chat: Chat) -> Iterator[Chat]:
    """The chat in other forms, one after the other, each with what the ones before changed."""
    for number, change in enumerate(ADAPTIONS):
        completions = chat.completions if number == 0 else tuple([*map(change, one)] for one in chat.completions)
        forms = [replace(chat, prompt=[*map(change, chat.prompt)], completions=completions)]
        if number == 0 and [message["role"] for message in forms[0].prompt[:2]] == ["system", "user"]:
            system, question, *rest = forms[0].prompt  # Gemma and Mistral v0.3 were taught them in one message
            question = question | {"content": f"{system['content']}\n\n{question['content']}"}
            forms.append(replace(forms[0], prompt=[question, *rest]))
        for form in forms:
            if form != chat:
                chat = form
                yield chat
