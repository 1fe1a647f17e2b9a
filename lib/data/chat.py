"""What of a conversation does not reach its text: a template that drops it would train on something else in silence.

Most of it shows in the text. But a thinking of "2+2=4" may be dropped, and stand in the answer all the same. So what
may stand elsewhere is changed, and rendered once more: a text that stays as it was does not have it.
"""

from __future__ import annotations

import bisect
import dataclasses
import datetime
import itertools
import json
import os.path
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple, cast

import jinja2

from lib.config import read_file
from lib.config.settings import DataSettings
from lib.data.record_formats import JSON, Chat, Message, Unusable
from lib.data.tokenizer import TextTokens, Tokenizer
from lib.errors import UserError

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

    Tools that a template does not show are no error: lib/data/inspect.py says so at the start.
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
TURN_MARKS = re.compile(
    r"<[|｜][^\s'\"{}<>]{1,40}[|｜]>|\[/?[A-Z_]{3,20}\]|<(?:start|end)_of_turn>|<\|[a-z_]+>|<[a-z_]+\|>"
)
STRFTIME = re.compile(r"strftime_now\(\s*(['\"])(.*?)\1\s*\)")
MARKS = re.compile(r"\{%-?\s*generation\s*-?%\}")


class Conversation(NamedTuple):
    """Messages, with what else the template is given."""

    messages: list[Message]
    tools: list[JSON] | None
    arguments: JSON


class Rendering(NamedTuple):
    """A chat's texts: the prompt as inference sends it, and the whole conversation with each completion."""

    prompt: str
    wholes: list[str]
    chat: Chat
    """As it was rendered: with what the template does not take put where it does."""


def template_of(settings: DataSettings) -> str | None:
    """The text of data.chat_template=FILE; None where the model's own template is used.

    Raises:
        UserError: the file cannot be read.
    """
    if isinstance(settings.chat_template, bool):
        return None
    try:
        return read_file.read_text(Path(settings.chat_template), "data.chat_template")
    except OSError as error:
        raise UserError(f"data.chat_template={settings.chat_template}: cannot be read: {error}") from None


def _with_date(template: str, date: datetime.date) -> str:
    """A template whose strftime_now("...") says this date: else tomorrow's tokens would be others."""
    return STRFTIME.sub(lambda match: json.dumps(date.strftime(match[2])), template)


def arguments_at_inference(settings: DataSettings, template: str) -> JSON:
    """What a prompt without an answer is rendered with: no thinking, unless data.chat_template_kwargs wants it.

    template: its text, or any that has it in it: the day is given to a template that asks for one.
    """
    date = {"date_string": settings.template_date.strftime("%d %b %Y")} if "date_string" in template else {}
    return {"enable_thinking": False, **date, **settings.chat_template_kwargs}


class ChatTemplate:
    """A tokenizer's chat template, or that of data.chat_template=FILE.

    Args:
        settings: data.chat_template, data.chat_template_kwargs, data.template_date.

    Raises:
        UserError: the file of data.chat_template cannot be read, or is not a template; data.chat_template_kwargs has
            what is not a template's to know.
    """

    def __init__(self, tokenizer: Tokenizer, settings: DataSettings) -> None:
        self.tokenizer, self.settings = tokenizer, settings
        if reserved := RESERVED & settings.chat_template_kwargs.keys():
            raise UserError(f"data.chat_template_kwargs: {min(reserved)!r} is no argument of a template")
        own = template_of(settings)
        stored = getattr(tokenizer, "chat_template", None)
        has_template = getattr(tokenizer, "has_chat_template", stored is not None)
        self.is_used = own is not None or (bool(settings.chat_template) and has_template)
        # Some models have several, by name: that of tools is taken where there are any.
        named = {"default": own or stored} if own is not None or not isinstance(stored, dict) else stored
        self._named = {name: _with_date(str(text), settings.template_date) for name, text in named.items()}
        self._texts = [str(text) for text in named.values()]
        self.text = self._named.get("default", next(iter(self._named.values())))
        self.arguments_without_answer = arguments_at_inference(settings, " ".join(self._texts))
        """What a prompt alone is rendered with."""
        if self.is_used and own is not None:
            self._require_template()

    def _require_template(self) -> None:
        """Raises UserError where the file of data.chat_template is no template."""
        from transformers.utils.chat_template_utils import render_jinja_template

        try:
            jinja2.Environment(extensions=["jinja2.ext.loopcontrols"]).lex(self.text)
            render_jinja_template([[{"role": "user", "content": "a"}]], chat_template=self.text)
        except jinja2.TemplateSyntaxError as error:
            raise UserError(f"data.chat_template: not a template: {error}") from None
        except Exception:  # it may refuse this conversation
            return

    @property
    def has_marks(self) -> bool:
        """Whether it says by `{% generation %}` what the model writes."""
        return MARKS.search(self.text) is not None

    def fingerprint(self) -> str:
        """What decides the text of a conversation."""
        return json.dumps(
            [self._texts, self.arguments_without_answer, self.settings.template_date], sort_keys=True, default=str
        )

    def arguments(self, chat: Chat) -> JSON:
        """What the template is given for a chat: thinking only where its answer thinks, unless it is set."""
        thinks = any(has_reasoning(message) for answer in chat.completions for message in answer)
        if not thinks and not chat.template_arguments:
            return self.arguments_without_answer
        default = {**self.arguments_without_answer, "enable_thinking": thinks}
        return {**default, **self.settings.chat_template_kwargs, **chat.template_arguments}

    def render(self, chats: Sequence[Chat]) -> list[Rendering | Unusable]:
        """Texts of each chat, or why there are none."""
        chats = [self._fold_system(chat) if self.refuses_system else chat for chat in chats]
        arguments = [self.arguments(chat) for chat in chats]
        both = list(zip(chats, arguments, strict=True))
        prompts = self.texts([Conversation(chat.prompt, chat.tools, given) for chat, given in both], True)
        wholes = iter(
            self.texts(
                [
                    Conversation([*chat.prompt, *answer], chat.tools, given)
                    for chat, given in both
                    for answer in chat.completions
                ],
                False,
            )
        )
        made = [
            _rendering(chat, prompt, [next(wholes) for _ in chat.completions])
            for chat, prompt in zip(chats, prompts, strict=True)
        ]
        lost = iter(self._lost([rendered for rendered in made if isinstance(rendered, Rendering)]))
        result: list[Rendering | Unusable] = []
        for chat, rendered in zip(chats, made, strict=True):
            is_whole = isinstance(rendered, Rendering) and next(lost) is None
            if reserved := RESERVED & chat.template_arguments.keys():
                result.append(Unusable(f"chat_template_kwargs: {min(reserved)!r} is no argument of a template"))
            else:
                result.append(rendered if is_whole else self._render_adapted(chat, rendered))
        return result

    def _lost(self, made: Sequence[Rendering]) -> list[str | None]:
        """What of each chat does not reach its text, in words; None for nothing. Some are rendered once more."""
        lost = [lost_of_chat(one.chat, one.prompt, one.wholes) for one in made]
        asked = [(i, change) for i, one in enumerate(made) if lost[i] is None for change in changes(one.chat)]
        conversations = []
        for i, change in asked:
            chat = made[i].chat
            given = self.arguments(chat)
            conversations.append(Conversation([*chat.prompt, *change.messages], chat.tools, given))
        for (i, change), text in zip(asked, self.texts(conversations, False), strict=True):
            if text == made[i].wholes[change.completion]:
                lost[i] = lost[i] or change.name
        return lost

    def texts(self, conversations: Sequence[Conversation], add_generation_prompt: bool) -> list[str | Unusable]:
        """Text of each conversation, or Unusable; those that share tools and arguments go in one call."""
        result: list[str | Unusable] = [""] * len(conversations)  # of no messages: nothing
        groups: dict[str, list[int]] = {}
        for index, (messages, tools, arguments) in enumerate(conversations):
            if not messages:
                continue
            key = "" if arguments is self.arguments_without_answer and not tools else repr((tools, arguments))
            groups.setdefault(key, []).append(index)
        for indices in groups.values():
            _, tools, arguments = conversations[indices[0]]
            options = {**arguments, "tokenize": False, "add_generation_prompt": add_generation_prompt}
            options["chat_template"] = self.text
            if tools:
                options |= {"tools": tools, "chat_template": self._named.get("tool_use", self.text)}
            made = self._apply([conversations[index].messages for index in indices], options)
            for index, text in zip(indices, made, strict=True):
                result[index] = text
        return result

    def _apply(self, conversations: list[list[Message]], options: JSON) -> list[str | Unusable]:
        try:
            texts = self.tokenizer.apply_chat_template(conversations, **options)
            if isinstance(texts, list) and len(texts) == len(conversations):
                return texts
        except Exception:  # One conversation that the template refuses: find it below.
            pass
        return [self._apply_once(conversation, options) for conversation in conversations]

    def _apply_once(self, conversation: list[Message], options: JSON) -> str | Unusable:
        try:
            return str(self.tokenizer.apply_chat_template(conversation, **options))
        except Exception as error:  # A template raises whatever its author chose.
            return Unusable(f"the chat template refuses the conversation: {' '.join(str(error).split())}")

    # ---- What a template does not take, put where it does

    def _render_adapted(self, chat: Chat, first: Rendering | Unusable) -> Rendering | Unusable:
        """A chat that was refused or lost something, with the same content in another form; `first` where none does."""
        if isinstance(first, Rendering):
            added = self._with_thinking(first)
            if added is not first and lost_of_chat(added.chat, added.prompt, added.wholes) is None:
                return added
        best = first  # of two failures the one that says more
        for adapted in _adaptations(chat):
            given = self.arguments(adapted)
            (prompt,) = self.texts([Conversation(adapted.prompt, adapted.tools, given)], True)
            wholes = [Conversation([*adapted.prompt, *answer], adapted.tools, given) for answer in adapted.completions]
            rendered = _rendering(adapted, prompt, self.texts(wholes, False))
            if isinstance(rendered, Rendering) and self._lost([rendered]) == [None]:
                return rendered
            best = rendered if isinstance(best, Unusable) else best
        if isinstance(best, Unusable):
            return first if isinstance(first, Unusable) else best
        return Unusable(
            f"the chat template leaves out {self._lost([best])[0]}; take it out of the data, or give a template that "
            "keeps it with data.chat_template=FILE"
        )

    def _with_thinking(self, made: Rendering) -> Rendering:
        """With the answers' thinking, where the prompt opens a block for it and the template drops it from all answers.

        DeepSeek-R1's and QwQ's do: they are made for prompts alone. What the model writes goes on from the prompt:
        its thinking, the closing mark, and its answer.
        """
        opened = OPENED_THINKING.search(made.prompt)
        if opened is None:
            return made
        chat, wholes = made.chat, list(made.wholes)
        conversations = [[*chat.prompt, *answer] for answer in chat.completions]
        for k, messages in enumerate(conversations):
            answer = messages[-1]
            thinking = next((answer.get(name) for name in REASONING if answer.get(name)), inline_reasoning(answer))
            other = with_other_thinking(answer)
            if len(chat.completions[k]) > 1 or not isinstance(thinking, str) or other is None or "tool_calls" in answer:
                continue
            bare: Message = {"role": "assistant", "content": SENTINEL}
            given = self.arguments(chat)
            asked = [Conversation([*chat.prompt, message], chat.tools, given) for message in (other, bare)]
            changed, whole = self.texts(asked, False)
            if changed != wholes[k] or isinstance(whole, Unusable) or SENTINEL not in whole:
                continue
            content = INLINE_THINKING.sub("", str(answer.get("content") or ""), count=1)
            suffix = whole.partition(SENTINEL)[2]
            line = opened[2]
            inline = inline_reasoning(answer) is not None
            gap = "" if inline else 2 * line
            wholes[k] = f"{made.prompt}{thinking.strip()}{line}</{opened[1]}>{gap}{content}{suffix}"
        return made if wholes == made.wholes else made._replace(wholes=wholes)

    @cached_property
    def refuses_system(self) -> bool:
        """Whether the template takes a question, and refuses or leaves out a system prompt before it."""
        if not self.is_used:
            return False
        question: Message = {"role": "user", "content": "a"}
        system: Message = {"role": "system", "content": SENTINEL}
        alone, both = self.texts(
            [
                Conversation(messages, None, self.arguments_without_answer)
                for messages in ([question], [system, question])
            ],
            True,
        )
        return isinstance(alone, str) and (isinstance(both, Unusable) or SENTINEL not in both)

    @staticmethod
    def _fold_system(chat: Chat) -> Chat:
        return dataclasses.replace(chat, prompt=_fold_system(chat.prompt))

    @cached_property
    def marks(self) -> frozenset[str]:
        """What the template writes around a question and an answer: <|im_start|>, [INST] and the like."""
        if not self.is_used:
            return frozenset()
        turns: list[Message] = [{"role": "user", "content": SENTINEL}, {"role": "assistant", "content": SENTINEL}]
        texts = self.texts([Conversation(turns[:1], None, self.arguments_without_answer)], True)
        texts += self.texts([Conversation(turns, None, self.arguments_without_answer)], False)
        return frozenset(mark for text in texts if isinstance(text, str) for mark in TURN_MARKS.findall(text))

    def is_rendered(self, prompt: str) -> bool:
        """Whether a text is one of the template's already: it begins with a mark, or a BOS token and a mark."""
        bos = getattr(self.tokenizer, "bos_token", None) or ""
        text = prompt.lstrip()
        mark = TURN_MARKS.match(text.removeprefix(bos).lstrip())
        return mark is not None and mark[0] in self.marks

    # ---- Where things are in a rendering

    def place_of(self, conversation: Conversation, index: int, whole: str) -> tuple[int, int] | None:
        """Where message `index`'s content begins and ends in the text of the conversation, by rendering it once more.

        None where the content is not text, or the template writes another text around it.
        """
        messages = list(conversation.messages)
        content = messages[index].get("content")
        if not isinstance(content, str) or not content.strip():
            return None
        messages[index] = {**messages[index], "content": SENTINEL}  # type: ignore[typeddict-item]
        (other,) = self.texts([conversation._replace(messages=messages)], False)
        if isinstance(other, Unusable) or other.count(SENTINEL) != 1:
            return None
        before, after = other.split(SENTINEL)
        if not whole.startswith(before) or not whole.endswith(after) or len(before) + len(after) > len(whole):
            return None
        return len(before), len(whole) - len(after)

    def marked(self, conversation: Conversation) -> list[tuple[int, int]]:
        """Begin and end of each part of the text that the template marks as the model's; none where it refuses it."""
        from transformers.utils.chat_template_utils import render_jinja_template

        inner: Any = getattr(self.tokenizer, "_tokenizer", self.tokenizer)
        messages: list[Any] = [{k: v for k, v in m.items() if v is not None} for m in conversation.messages]
        options: Any = {"tools": conversation.tools or None, "return_assistant_tokens_mask": True}
        given = {**options, **inner.special_tokens_map, **conversation.arguments}
        try:
            rendered: Any = render_jinja_template([messages], chat_template=self.text, **given)
        except Exception:  # a template raises whatever its author chose
            return []
        return [(begin, end) for begin, end in rendered[1][0]]


def _rendering(chat: Chat, prompt: str | Unusable, wholes: list[str | Unusable]) -> Rendering | Unusable:
    texts = [text for text in wholes if isinstance(text, str)]
    if isinstance(prompt, str) and len(texts) == len(wholes):
        return Rendering(prompt, texts, chat)
    return next(text for text in (prompt, *wholes) if isinstance(text, Unusable))


def _adaptations(chat: Chat) -> Iterator[Chat]:
    """The chat in other forms, one after the other, each with what the ones before changed."""
    changes: list[Callable[[list[Message]], list[Message]]] = [
        _developer_as_system,
        _fold_system,
        _without_empty_content,
        _with_content,
        _arguments_as_text,
    ]
    for change in changes:
        prompt = change(chat.prompt)
        of_prompt = change in (_developer_as_system, _fold_system)
        completions = [*chat.completions] if of_prompt else [*map(change, chat.completions)]
        if prompt != chat.prompt or completions != list(chat.completions):
            chat = dataclasses.replace(chat, prompt=prompt, completions=tuple(completions))
            yield chat


def _developer_as_system(messages: list[Message]) -> list[Message]:
    """A developer's instructions as a system prompt, for templates that do not know that role."""
    return [{**message, "role": "system"} if message["role"] == "developer" else message for message in messages]


def _fold_system(messages: list[Message]) -> list[Message]:
    """A leading system prompt as the beginning of the first question: where Gemma and Mistral v0.3 were taught it."""
    if len(messages) < 2 or messages[0]["role"] != "system" or messages[1]["role"] != "user":
        return messages
    system, question = messages[0]["content"], messages[1]["content"]
    if not isinstance(system, str) or not isinstance(question, str):
        return messages
    return [{**messages[1], "content": f"{system}\n\n{question}"}, *messages[2:]]  # type: ignore[list-item]


def _with_content(messages: list[Message]) -> list[Message]:
    """Calls without content get an empty one, which some templates add to their text."""
    empty = [message.get("content") is None for message in messages]
    return [
        {**message, "content": ""} if is_empty else message  # type: ignore[misc]
        for message, is_empty in zip(messages, empty, strict=True)
    ]


def _without_empty_content(messages: list[Message]) -> list[Message]:
    """Calls without an empty content, which some templates take for an answer without calls."""
    return [
        {**message, "content": None}  # type: ignore[misc]
        if message.get("tool_calls") and message.get("content") == ""
        else message
        for message in messages
    ]


def _arguments_as_text(messages: list[Message]) -> list[Message]:
    """A call's arguments as JSON text, which some templates add to theirs."""

    def as_text(call: Any) -> Any:
        function = call.get("function") if isinstance(call, dict) else None
        if not isinstance(function, dict) or isinstance(function.get("arguments"), str):
            return call
        return {**call, "function": {**function, "arguments": json.dumps(function.get("arguments"))}}

    return [
        {**message, "tool_calls": [as_text(call) for call in message["tool_calls"]]}  # type: ignore
        if isinstance(message.get("tool_calls"), list)
        else message
        for message in messages
    ]


# Characters of a prompt's end that tell it from other text.
HEADER = 12


@dataclass(frozen=True)
class Encoded:
    """Token ids of an example."""

    prompt: list[int]
    completions: list[list[int]]
    learnt: list[list[bool]] | None = None
    """Of each completion's tokens, which are trained on; None for all."""


class ChatTokens:
    """Chats ➜ token ids, through the chat template.

    Args:
        end_ids: tokens at which generation stops.
        eos_token_id: ends a turn that the template leaves open.
    """

    def __init__(self, template: ChatTemplate, tokens: TextTokens, end_ids: set[int], eos_token_id: int) -> None:
        self.template, self.tokens, self.eos_token_id = template, tokens, eos_token_id
        self._known_ends = end_ids

    @cached_property
    def end_ids(self) -> set[int]:
        """Tokens at which generation has to stop: those that are known, or else the template's own end of a turn."""
        special = [token for token in self._suffix(thinks=False) if token in self.tokens.special]
        is_known = bool(self._known_ends & set(special))
        return self._known_ends if is_known else self._known_ends | set(special[-1:])

    def encode(self, chats: Sequence[Chat]) -> list[Encoded | Unusable]:
        """Ids of each chat; or why there are none."""
        renderings = self.template.render(chats)
        prompts = iter(self.tokens.ids([made.prompt for made in renderings if isinstance(made, Rendering)]))
        result: list[Encoded | Unusable] = []
        places: list[tuple[int, list[tuple[str, int]]]] = []
        for index, made in enumerate(renderings):
            if isinstance(made, Unusable):
                result.append(made)
                continue
            result.append(Encoded(next(prompts), []))
            try:
                places.append((index, [self._place_of_completion(made, k) for k in range(len(made.wholes))]))
            except Unusable as why:
                result[index] = why
        behind = iter(self.tokens.behind([place for _, of_chat in places for place in of_chat]))
        for index, of_chat in places:
            made, encoded = renderings[index], result[index]
            assert isinstance(made, Rendering) and isinstance(encoded, Encoded)
            ids = [next(behind) for _ in of_chat]
            try:
                if (marked := self._as_marked(made)) is not None:
                    result[index] = marked
                    continue
                finished = [self._finish(made, k, start, ids[k]) for k, (_, start) in enumerate(of_chat)]
            except Unusable as why:
                result[index] = why
                continue
            learnt = None
            if any(mask is not None for _, mask in finished):
                learnt = [mask or [True] * len(completion) for completion, mask in finished]
            result[index] = Encoded(encoded.prompt, [completion for completion, _ in finished], learnt)
        return result

    # ---- Where a completion begins

    def _place_of_completion(self, made: Rendering, k: int) -> tuple[str, int]:
        """The text of completion k's whole conversation, and where in it the completion begins. Raises Unusable."""
        answer, whole = made.chat.completions[k], made.wholes[k]
        if whole.startswith(made.prompt):
            return whole, len(made.prompt)
        place = self._place(made, k, len(made.chat.prompt))
        if place is not None:
            low, high = place
            stop = high + self._end_of_turn(whole[high:]) if len(answer) == 1 else len(whole)
            return whole[:stop], self._behind_header(made.prompt, whole, low)
        # A call without a text, or an answer that the template takes apart: what a plain answer has before it.
        plain: Message = {"role": "assistant", "content": SENTINEL}
        given = self.template.arguments(made.chat)
        (other,) = self.template.texts([Conversation([*made.chat.prompt, plain], made.chat.tools, given)], False)
        before = "" if isinstance(other, Unusable) else other.partition(SENTINEL)[0]
        if before and whole.startswith(before):
            return whole, self._behind_header(made.prompt, whole, len(before))
        return whole, self._common(made.prompt, whole)

    def _end_of_turn(self, behind: str) -> int:
        """Where in the text behind an answer the first token that ends the turn ends; all of it, where none does."""
        ends = [self.tokens.special.get(token, "") for token in self.end_ids]
        found = [behind.find(text) + len(text) for text in ends if text and text in behind]
        return min(found, default=len(behind))

    def _common(self, prompt: str, whole: str) -> int:
        """Where the first token of the whole begins that is not the prompt's."""
        of_prompt, (of_whole, begins) = self.tokens.ids([prompt])[0], self.tokens.starts(whole)
        count = next(
            (i for i, (a, b) in enumerate(zip(of_prompt, of_whole, strict=False)) if a != b),
            min(len(of_prompt), len(of_whole)),
        )
        return begins[count] if count < len(begins) else len(whole)

    def _behind_header(self, prompt: str, whole: str, start: int) -> int:
        """Where the model's own begins, of a whole that leaves the prompt's text before the answer's `start`.

        That is behind the prompt's end, where the whole has it, too, further on; else with a header that the prompt
        does not have (the mark of a response, say), unless that says no more than that there is no thinking.
        """
        common = self._common(prompt, whole[:start])
        ends = (at for at in range(start, common, -1) if whole.endswith(prompt[-HEADER:], 0, at))
        again = next(ends, None)
        if again is not None:
            return again
        header = whole[common:start]
        is_header = any(mark in header for mark in self.tokens.special.values())
        return common if is_header and not EMPTY_THINKING.search(header) else start

    def _place(self, made: Rendering, k: int, index: int) -> tuple[int, int] | None:
        """Where message `index` of the whole conversation stands in its text."""
        chat = made.chat
        conversation = Conversation([*chat.prompt, *chat.completions[k]], chat.tools, self.template.arguments(chat))
        return self.template.place_of(conversation, index, made.wholes[k])

    # ---- Where it ends, and what of it is learnt

    def _finish(self, made: Rendering, k: int, start: int, ids: list[int]) -> tuple[list[int], list[bool] | None]:
        """A completion up to its end of turn, and which of its tokens are learnt, None for all. Raises Unusable."""
        answer = made.chat.completions[k]
        learnt = self._learnt(made.chat, k)
        is_whole = all(learnt) and not all(map(_is_model, answer))  # data.learn=all: every token, headers, too
        if not is_whole and (len(answer) > 1 or not all(learnt)):
            return self._finish_turns(made, k, start, ids)
        ids = self._ended(ids)
        written = start if is_whole else self._written_by_template(made.wholes[k], start, answer[0])
        if written == start:
            return ids, None
        count = len(ids) - len(self._ended(self.tokens.behind([(made.wholes[k], written)])[0]))
        return ids, [index >= count for index in range(len(ids))]

    def _written_by_template(self, whole: str, start: int, message: Message) -> int:
        """Where the block of no thinking ends that a template puts before an answer; `start` where there is none."""
        content = message.get("content")
        match = EMPTY_THINKING.match(whole, start)
        if match is None or has_reasoning(message) or not isinstance(content, str):
            return start
        behind = whole[match.end() :]
        for text in (content, content.lstrip()):
            at = behind.find(text) if text else -1
            if at >= 0 and not behind[:at].strip():
                return match.end() + at
        return match.end()

    def _ended(self, ids: list[int]) -> list[int]:
        """Up to the first token of the trailing ones that ends the turn; with one, where the template wrote none."""
        for written in self._written_behind:
            if ids[-len(written) :] == written:
                ids = ids[: -len(written)]
        return ended(ids, self.end_ids, self.tokens, self.eos_token_id)

    def _finish_turns(self, made: Rendering, k: int, start: int, ids: list[int]) -> tuple[list[int], list[bool]]:
        """A completion of several messages: up to the last token that is learnt. Raises Unusable."""
        whole = made.wholes[k]
        every, begins = self.tokens.starts(whole)
        first = len(every) - len(ids)
        if every[first:] != ids:
            raise Unusable("its turns cannot be told apart: the prompt's end and the answer's begin share a token")
        spans = self._spans(made, k)
        mask = [any(low <= at < high for low, high in spans) for at in begins]
        learnt = self._with_ends(every, begins, mask, [high for _, high in spans])[first:]
        if not any(learnt):
            raise Unusable("none of its tokens is learnt")
        length = len(learnt) - learnt[::-1].index(True)
        ids, learnt = ids[:length], learnt[:length]
        if length == len(every) - first and ids[-1] not in self.end_ids:
            return [*ids, self.eos_token_id], [*learnt, True]
        return ids, learnt

    def _with_ends(self, ids: list[int], begins: list[int], mask: list[bool], ends: list[int]) -> list[bool]:
        """Learns the token that ends a turn, too, where nothing but special tokens stands between it and the text.

        Only tokens at which generation stops: gpt-oss ends earlier turns with another, which answers must not end with.
        """
        mask = list(mask)
        for end in ends:
            first = index = bisect.bisect_left(begins, end)
            while index < len(ids) and ids[index] not in self.end_ids:
                if not (self.tokens.is_blank(ids[index]) or ids[index] in self.tokens.special):
                    break
                index += 1
            if index < len(ids) and ids[index] in self.end_ids:
                mask[first : index + 1] = [True] * (index + 1 - first)
        return mask

    def _learnt(self, chat: Chat, k: int) -> Sequence[bool]:
        """Of a completion's messages, which are learnt."""
        if chat.learnt is not None:
            return chat.learnt[k]
        return [index == len(chat.completions[k]) - 1 for index in range(len(chat.completions[k]))]

    def _as_marked(self, made: Rendering) -> Encoded | None:
        """A conversation of which is learnt what the template marks as the model's; what comes before is the prompt.

        None where the template marks nothing, or not message by message, or where others' messages are learnt, too.
        """
        chat = made.chat
        if not self.template.has_marks or chat.learnt is None or len(made.wholes) != 1:
            return None
        (whole,) = made.wholes
        messages = [*chat.prompt, *chat.completions[0]]
        wanted = [*[False] * len(chat.prompt), *self._learnt(chat, 0)]
        if any(is_learnt and not _is_model(message) for message, is_learnt in zip(messages, wanted, strict=True)):
            return None
        spans = self.template.marked(Conversation(messages, chat.tools, self.template.arguments(chat)))
        of_model = [is_learnt for message, is_learnt in zip(messages, wanted, strict=True) if _is_model(message)]
        if all(of_model):
            of_model = [True] * len(spans)  # Phi-3's template marks an end of the text, too
        if len(spans) != len(of_model):
            return None
        ids, begins = self.tokens.starts(whole)
        learnt = [False] * len(ids)
        for low, high in itertools.compress(spans, of_model):
            first, last = bisect.bisect_right(begins, low) - 1, bisect.bisect_left(begins, high)
            learnt[first:last] = [True] * (last - first)
        if not any(learnt):
            return None
        start, stop = learnt.index(True), len(learnt) - learnt[::-1].index(True)
        mask = learnt[start:stop]
        return Encoded(ids[:start], [ids[start:stop]], None if all(mask) else [mask])

    def _spans(self, made: Rendering, k: int) -> list[tuple[int, int]]:
        """Begin and end in the text of what the model writes in learnt messages, by rendering what comes before."""
        chat, whole = made.chat, made.wholes[k]
        messages = [*chat.prompt, *chat.completions[k]]
        given = self.template.arguments(chat)
        spans = []
        for index, is_learnt in enumerate(self._learnt(chat, k), len(chat.prompt)):
            if not is_learnt:
                continue
            before = Conversation(messages[:index], chat.tools, given)
            (header,) = self.template.texts([before], messages[index]["role"] == "assistant")
            place = self._place(made, k, index)
            if isinstance(header, str) and whole.startswith(header):
                low = self._written_by_template(whole, len(header), messages[index])
            elif place is not None:
                low = place[0]
            else:
                raise Unusable(
                    f"message {index + 1}: the chat template writes it differently once others follow, so that its "
                    "tokens cannot be told; data.learn=last learns the last answer alone"
                )
            spans.append((low, self._end_of(messages, index, whole, low, place, before)))
        return spans

    def _end_of(
        self,
        messages: list[Message],
        index: int,
        whole: str,
        low: int,
        place: tuple[int, int] | None,
        before: Conversation,
    ) -> int:
        """Where the text of message `index` ends, without the end of its turn. Raises Unusable."""
        if place is not None and not messages[index].get("tool_calls"):
            return place[1]
        (until,) = self.template.texts([before._replace(messages=messages[: index + 1])], False)
        if isinstance(until, Unusable):
            raise until
        common = len(os.path.commonprefix([until, whole]))
        ids, begins = self.tokens.starts(whole[:common])
        while ids and (ids[-1] in self.end_ids or self.tokens.is_blank(ids[-1]) or ids[-1] in self.tokens.special):
            common = begins[-1]
            ids, begins = ids[:-1], begins[:-1]
        if common <= low:
            raise Unusable(
                f"message {index + 1}: the chat template writes it differently once others follow, so that its tokens "
                "cannot be told; data.learn=last learns the last answer alone"
            )
        return common

    @cached_property
    def _written_behind(self) -> list[list[int]]:
        """What the template writes behind an answer's end of turn, as Command-R7B's opens another turn; mostly none."""
        found = []
        for suffix in (self._suffix(thinks=True), self._suffix(thinks=False)):
            end = next((i for i, token in enumerate(suffix) if token in self.end_ids), len(suffix))
            behind = suffix[end + 1 :]
            if not all(token in self.end_ids or self.tokens.is_blank(token) for token in behind):
                found.append(behind)
        return found

    def _suffix(self, thinks: bool) -> list[int]:
        """What stands behind a plain answer."""
        messages: list[Message] = [{"role": "user", "content": "a"}, {"role": "assistant", "content": SENTINEL}]
        arguments = self.template.arguments(Chat([], (), ""))
        if "enable_thinking" not in self.template.settings.chat_template_kwargs:
            arguments["enable_thinking"] = thinks
        (text,) = self.template.texts([Conversation(messages, None, arguments)], False)
        return [] if isinstance(text, Unusable) else self.tokens.ids([text.partition(SENTINEL)[2]])[0]


def ended(ids: list[int], end_ids: set[int], tokens: TextTokens, eos_token_id: int) -> list[int]:
    """Up to the first of the trailing tokens, blanks between them, that is an end; with one, where there is none."""
    cut, index = None, len(ids)
    while index > 0 and (ids[index - 1] in end_ids or tokens.is_blank(ids[index - 1])):
        index -= 1
        cut = index + 1 if ids[index] in end_ids else cut
    return ids[:cut] if cut is not None else [*ids, eos_token_id]


def _is_model(message: Message) -> bool:
    return message["role"] == "assistant"
