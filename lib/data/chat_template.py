"""Conversations ➜ text, through a model's chat template: the same in training, evaluation, sampling and serving."""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

from lib.config import read_file
from lib.config.schema import DataSettings
from lib.data import template_process
from lib.data.lost_text import (
    INLINE_THINKING,
    REASONING,
    SENTINEL,
    changes,
    has_reasoning,
    inline_reasoning,
    lost_of_chat,
    with_other_thinking,
)
from lib.data.record_formats import JSON, Chat, Message, Unusable
from lib.data.text_tokens import Tokenizer
from lib.errors import UserError

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
LARGEST_TEMPLATE = 2**20  # bytes
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
        return read_file.read_text(Path(settings.chat_template), "data.chat_template", LARGEST_TEMPLATE)
    except OSError as error:
        raise UserError(f"data.chat_template={settings.chat_template}: cannot be read: {error}") from None


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
        # Some models have several, by name: transformers takes that of tools where there are any.
        named = {"default": own or stored} if own is not None or not isinstance(stored, dict) else stored
        self._texts = [str(text) for text in named.values()]
        self.text = str(named.get("default", self._texts[0]))
        self._options: JSON = {"tokenize": False} | ({} if own is None else {"chat_template": own})
        self.arguments_without_answer = arguments_at_inference(settings, " ".join(self._texts))
        """What a prompt alone is rendered with."""
        for text in self._texts if self.is_used else ():
            template_process.pin_date(text, settings.template_date)
        if self.is_used:
            template_process.install()
            self._try_it()

    def _try_it(self) -> None:
        """Renders one question, before there is anything to lose.

        Raises:
            UserError: that takes too much memory, or too long, or data.chat_template is no template.
        """
        question: Message = {"role": "user", "content": "a"}
        try:
            options = {**self.arguments_without_answer, **self._options, "add_generation_prompt": True}
            self.tokenizer.apply_chat_template([question], **options)
        except UserError:
            raise
        except template_process.NoTemplate as error:
            if "chat_template" in self._options:
                raise UserError(f"data.chat_template: not a template: {error}") from None
        except Exception:  # it may refuse this one
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
            options = {**arguments, **self._options, "add_generation_prompt": add_generation_prompt}
            if tools:
                options["tools"] = tools
            made = self._apply([conversations[index].messages for index in indices], options)
            for index, text in zip(indices, made, strict=True):
                result[index] = text
        return result

    def _apply(self, conversations: list[list[Message]], options: JSON) -> list[str | Unusable]:
        try:
            texts = self.tokenizer.apply_chat_template(conversations, **options)
            if isinstance(texts, list) and len(texts) == len(conversations):
                return texts
        except UserError:
            raise
        except Exception:  # One conversation that the template refuses: find it below.
            pass
        return [self._apply_once(conversation, options) for conversation in conversations]

    def _apply_once(self, conversation: list[Message], options: JSON) -> str | Unusable:
        try:
            return str(self.tokenizer.apply_chat_template(conversation, **options))
        except UserError:
            raise
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
        inner: Any = getattr(self.tokenizer, "_tokenizer", self.tokenizer)
        messages: list[Any] = [{k: v for k, v in m.items() if v is not None} for m in conversation.messages]
        options: Any = {"tools": conversation.tools or None, "return_assistant_tokens_mask": True}
        given = {**options, **inner.special_tokens_map, **conversation.arguments}
        try:
            _, marked = template_process.render([messages], self.text, **given)
        except template_process.Refused:
            return []
        return [(begin, end) for begin, end in marked[0]]


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
        {**message, "content": None} if message.get("tool_calls") and message.get("content") == "" else message  # type: ignore[misc]
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
