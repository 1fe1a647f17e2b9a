"""Chats ➜ token ids and what of them is learnt, through the tokenizer's chat template.

The prompt is rendered as inference sends it, the whole conversation once more, and a completion is what the whole has
behind the prompt. A template that leaves out part of a message is refused: it would train on something else in silence.
"""

from __future__ import annotations

import bisect
import itertools
import json
import os.path
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
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
# Of a message: what is looked for by itself, what only tells which call is meant, and what no template shows.
FIELDS = frozenset({"role", "content", "tool_calls", "tool_call_id", "name", "weight", *REASONING})
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
TURN_MARKS = re.compile(
    r"<[|｜][^\s'\"{}<>]{1,40}[|｜]>|\[/?[A-Z_]{3,20}\]|<(?:start|end)_of_turn>|<\|[a-z_]+>|<[a-z_]+\|>"
)
# What the rendering itself is asked for: an argument of this name would not reach the template.
RESERVED = frozenset(
    {"conversation", "messages", "tools", "tokenize", "add_generation_prompt", "chat_template", "return_dict"}
    | {"continue_final_message", "return_assistant_tokens_mask", "return_tensors", "padding", "truncation"}
)
STRFTIME = re.compile(r"strftime_now\(\s*(['\"])(.*?)\1\s*\)")
GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")
HEADER_CHARACTERS = 12  # of a prompt's end, that tell it from other text


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
    """What of a message is not in its conversation's text, in words; None for nothing.

    is_earlier: of an answer in the prompt, whose thinking need not be shown again.
    """
    content, role = message.get("content"), message["role"]
    if role != "assistant":
        if isinstance(content, str) and not _is_said(content.strip(), text):
            return f"the content of a message from {role!r}"
        others = ((name, value) for name, value in message.items() if name not in FIELDS and _says_something(value))
        return next((_field(name, role) for name, value in others if not _is_said(str(value), text)), None)
    parts: list[tuple[str, str]] = []
    if not is_earlier:
        names = [repr(name) for name in REASONING if isinstance(message.get(name), str)]
        parts.append(((*names, "the thinking in its content")[0], (reasoning_of(message) or "").strip()))
    if isinstance(content, str):
        parts.append(("the answer's content", INLINE_THINKING.sub("", content, count=1).strip()))
    calls: Any = message.get("tool_calls") or ()
    called = [str((call.get("function") or call).get("name")) for call in calls]
    parts += [(f"the call of {name!r}", name) for name in called]
    # Each found part is taken out, the longest first: what is said twice has to stand there twice.
    for name, part in sorted(parts, key=lambda part: -len(part[1])):
        if part not in text:
            return name
        text = text.replace(part, "", 1) if part and not is_earlier else text
    return None


def _field(name: str, role: str) -> str:
    return f"{name!r} of a message from {role!r} (or leave it out with data.ignore=[{name}])"


def _says_something(value: object) -> bool:
    return value not in ("", [], {}) and value is not False


def _is_said(said: str, text: str) -> bool:
    """Whether a text has this in it: as it is, as a JSON string, or with other white space."""
    if said in text or json.dumps(said, ensure_ascii=False)[1:-1] in text:
        return True
    return "".join(said.split()) in "".join(text.split())


def _with(message: Message, **fields: Any) -> Message:
    return cast(Message, {**message, **fields})


def _said(text: str) -> Message:
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
        given, stored = template_of(settings), getattr(tokenizer, "chat_template", None)
        has_template = getattr(tokenizer, "has_chat_template", stored is not None)
        self.is_used = given is not None or (bool(settings.chat_template) and has_template)
        # Some models have several, by name: that of tools is taken where there are any.
        named = stored if given is None and isinstance(stored, dict) else {"default": given or stored}
        # A template's strftime_now("...") says the day of the settings: else tomorrow's tokens would be others.
        day, self._texts = settings.template_date, [str(text) for text in named.values()]
        dated = [STRFTIME.sub(lambda match: json.dumps(day.strftime(match[2])), text) for text in self._texts]
        self._named = dict(zip(named, dated, strict=True))
        self.text = self._named.get("default", next(iter(self._named.values())))
        date = {"date_string": day.strftime("%d %b %Y")} if any("date_string" in text for text in self._texts) else {}
        # What a prompt alone is rendered with: no thinking, unless data.chat_template_kwargs wants it.
        self.arguments_without_answer: JSON = {"enable_thinking": False, **date, **settings.chat_template_kwargs}
        if given is not None:
            try:
                jinja2.Environment(extensions=["jinja2.ext.loopcontrols"]).lex(self.text)
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
            return str(self.tokenizer.apply_chat_template(list(messages), **options))
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
        for form in (chat, *_adaptions(chat)):
            try:
                prompt = self.apply(form, form.prompt, is_prompt=True)
                wholes = [self.apply(form, [*form.prompt, *answer]) for answer in form.completions]
            except Unusable as why:
                refusals.append(why)
                continue
            made = Rendering(prompt, wholes, form)
            missing = self._lost(made)
            if missing is not None and OPENED_THINKING.search(prompt):
                made = self._with_thinking(made)
                missing = self._lost(made)
            if missing is None:
                return made
            remedy = "take it out of the data, or give a template that keeps it with data.chat_template=FILE"
            losses.append(Unusable(f"the chat template leaves out {missing}; {remedy}"))
        raise (losses + refusals)[0]

    def _lost(self, made: Rendering) -> str | None:
        """What of a chat's messages is not in its texts, in words. Tools are not looked for."""
        found = [lost(message, made.prompt, is_earlier=True) for message in made.chat.prompt]
        for answer, whole in zip(made.chat.completions, made.wholes, strict=True):
            found += [lost(message, whole.removeprefix(made.prompt)) for message in answer]
            for index, message in enumerate(answer):
                for name, value in message.items():
                    if message["role"] == "assistant" and name not in FIELDS and _says_something(value):
                        without = cast(Message, {key: item for key, item in message.items() if key != name})
                        messages = [*made.chat.prompt, *answer[:index], without, *answer[index + 1 :]]
                        is_lost = self.apply_or_none(made.chat, messages) == whole
                        found.append(_field(name, "assistant") if is_lost else None)
        return next((name for name in found if name is not None), None)

    def _with_thinking(self, made: Rendering) -> Rendering:
        """With the answers' thinking, where the prompt opens a block for it and the template drops it from all answers.

        DeepSeek-R1's and QwQ's do: they are made for prompts alone.
        """
        opened, wholes = OPENED_THINKING.search(made.prompt), list(made.wholes)
        for k, answer in enumerate(made.chat.completions):
            thinking = (reasoning_of(answer[-1]) or "").strip()
            whole = self.apply_or_none(made.chat, [*made.chat.prompt, _said(SENTINEL)]) or ""
            if opened is None or len(answer) > 1 or not thinking or "tool_calls" in answer[0] or SENTINEL not in whole:
                continue
            content = INLINE_THINKING.sub("", str(answer[0].get("content") or ""), count=1)
            gap = "" if inline_reasoning(answer[0]) is not None else 2 * opened[2]
            suffix = whole.partition(SENTINEL)[2]
            wholes[k] = f"{made.prompt}{thinking}{opened[2]}</{opened[1]}>{gap}{content}{suffix}"
        return made._replace(wholes=wholes)

    @cached_property
    def marks(self) -> frozenset[str]:
        """What the template writes around a question and an answer: <|im_start|>, [INST] and the like."""
        turns: list[Message] = [{"role": "user", "content": SENTINEL}, _said(SENTINEL)]
        return frozenset(TURN_MARKS.findall(self.text_of(turns) if self.is_used else ""))

    def is_rendered(self, prompt: str) -> bool:
        """Whether a text is one of the template's already: it begins with a mark, or a BOS token and a mark."""
        bos = getattr(self.tokenizer, "bos_token", None) or ""
        mark = TURN_MARKS.match(prompt.lstrip().removeprefix(bos).lstrip())
        return mark is not None and mark[0] in self.marks

    # ---- Where things are in a rendering

    def place_of(self, chat: Chat, messages: Sequence[Message], index: int, whole: str) -> tuple[int, int] | None:
        """Begin and end of message `index`'s content in the whole text, by rendering it again; None where unclear."""
        content = messages[index].get("content")
        if not isinstance(content, str) or not content.strip():
            return None
        others = [*messages[:index], _with(messages[index], content=SENTINEL), *messages[index + 1 :]]
        before, found, after = (self.apply_or_none(chat, others) or "").partition(SENTINEL)
        is_clear = found and SENTINEL not in after and whole.startswith(before) and whole.endswith(after)
        return (len(before), len(whole) - len(after)) if is_clear and len(before) + len(after) <= len(whole) else None

    def marked(self, chat: Chat, messages: Sequence[Message]) -> list[tuple[int, int]]:
        """Begin and end of each part of the text that the template marks as the model's; none where it refuses it."""
        from transformers.utils.chat_template_utils import render_jinja_template

        inner: Any = getattr(self.tokenizer, "_tokenizer", self.tokenizer)
        given: Any = {"tools": chat.tools or None, "return_assistant_tokens_mask": True}
        given |= {**inner.special_tokens_map, **self.arguments(chat)}
        bare: Any = [{k: v for k, v in message.items() if v is not None} for message in messages]
        try:
            rendered: Any = render_jinja_template([bare], chat_template=self.text, **given)
        except Exception:  # a template raises whatever its author chose
            return []
        return [(begin, end) for begin, end in rendered[1][0]]


# ---- Adaptions: the same content in a form that a template takes


def _fold_system(messages: list[Message]) -> list[Message]:
    """A leading system prompt as the beginning of the first question: where Gemma and Mistral v0.3 were taught it."""
    if [message["role"] for message in messages[:2]] != ["system", "user"]:
        return messages
    return [_with(messages[1], content=f"{messages[0]['content']}\n\n{messages[1]['content']}"), *messages[2:]]


def _with_text_arguments(message: Message) -> Message:
    calls = cast(list[JSON], message.get("tool_calls") or [])
    functions = [call["function"] for call in calls]
    texts = [{**function, "arguments": json.dumps(function.get("arguments"))} for function in functions]
    changed = [{**call, "function": function} for call, function in zip(calls, texts, strict=True)]
    return _with(message, tool_calls=changed) if calls else message


# In this order, each on top of the ones before. For templates that do not know the role of a developer; that take calls
# with an empty content for an answer without calls; that add the content of calls, or their arguments, to their text.
ADAPTIONS: tuple[Callable[[Message], Message], ...] = (
    lambda message: _with(message, role="system") if message["role"] == "developer" else message,
    lambda message: _with(message, content=message.get("content") or None) if message.get("tool_calls") else message,
    lambda message: _with(message, content="") if message.get("content") is None else message,
    _with_text_arguments,
)


def _adaptions(chat: Chat) -> Iterator[Chat]:
    """The chat in other forms, one after the other, each with what the ones before changed."""
    for number, change in enumerate(ADAPTIONS):
        completions = chat.completions if number == 0 else tuple([*map(change, one)] for one in chat.completions)
        changed = replace(chat, prompt=[*map(change, chat.prompt)], completions=completions)
        for form in (changed, replace(changed, prompt=_fold_system(changed.prompt))) if number == 0 else (changed,):
            if form != chat:
                chat = form
                yield chat


# ---- Where completions begin and end, and what of them is learnt


@dataclass(frozen=True)
class Encoded:
    """Token ids of an example."""

    prompt: list[int]
    completions: list[list[int]]
    learnt: list[list[bool]] | None = None  # Of each completion's tokens, which are trained on; None for all


class ChatTokens:
    """Chats ➜ token ids. end_ids: generation stops there. eos_token_id: ends a turn that the template leaves open."""

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
        """Ids of each chat; or why there are none. The tokenizer is asked for all of them at once."""
        result: list[Encoded | Unusable] = [Encoded([], [])] * len(chats)
        usable: list[tuple[int, Rendering, list[tuple[str, int]]]] = []
        for number, chat in enumerate(chats):
            try:
                made = self.template.render(chat)
                usable.append((number, made, [self._place_of_completion(made, k) for k in range(len(made.wholes))]))
            except Unusable as why:
                result[number] = why
        prompts = self.tokens.ids([made.prompt for _, made, _ in usable])
        behind = iter(self.tokens.behind([place for _, _, places in usable for place in places]))
        for (number, made, places), prompt in zip(usable, prompts, strict=True):
            ids = [next(behind) for _ in places]
            try:
                result[number] = self._as_marked(made) or self._encoded(made, places, prompt, ids)
            except Unusable as why:
                result[number] = why
        return result

    def _encoded(
        self, made: Rendering, places: list[tuple[str, int]], prompt: list[int], ids: list[list[int]]
    ) -> Encoded:
        finished = [self._finish(made, k, places[k][1], ids[k]) for k in range(len(ids))]
        learnt = [mask or [True] * len(completion) for completion, mask in finished]
        return Encoded(prompt, [ids for ids, _ in finished], None if all(map(all, learnt)) else learnt)

    # ---- Where a completion begins

    def _place_of_completion(self, made: Rendering, k: int) -> tuple[str, int]:
        """The text of completion k's whole conversation, and where in it the completion begins."""
        chat, whole = made.chat, made.wholes[k]
        answer = chat.completions[k]
        if whole.startswith(made.prompt):
            return whole, len(made.prompt)
        place = self.template.place_of(chat, [*chat.prompt, *answer], len(chat.prompt), whole)
        if place is not None:
            low, high = place
            stop = high + self._end_of_turn(whole[high:]) if len(answer) == 1 else len(whole)
            return whole[:stop], self._behind_header(made.prompt, whole, low)
        # A call without a text, or an answer that the template takes apart: what a plain answer has before it.
        other = self.template.apply_or_none(chat, [*chat.prompt, _said(SENTINEL)]) or SENTINEL
        before = other.partition(SENTINEL)[0]
        is_before = before and whole.startswith(before)
        start = self._behind_header(made.prompt, whole, len(before)) if is_before else self._common(made.prompt, whole)
        return whole, start

    def _end_of_turn(self, behind: str) -> int:
        """Where in the text behind an answer the first token that ends the turn ends; all of it, where none does."""
        ends = [self.tokens.special.get(token, "") for token in self.end_ids]
        return min((behind.find(text) + len(text) for text in ends if text and text in behind), default=len(behind))

    def _common(self, prompt: str, whole: str) -> int:
        """Where the first token of the whole begins that is not the prompt's."""
        of_prompt, (of_whole, begins) = self.tokens.ids([prompt])[0], self.tokens.starts(whole)
        count = len(os.path.commonprefix([of_prompt, of_whole]))
        return begins[count] if count < len(begins) else len(whole)

    def _behind_header(self, prompt: str, whole: str, start: int) -> int:
        """Where the model's own begins, of a whole that leaves the prompt's text before the answer's `start`.

        That is behind the prompt's end, where the whole has it further on; else with a header that the prompt does not
        have, unless that says no more than that there is no thinking.
        """
        common, end = self._common(prompt, whole[:start]), prompt[-HEADER_CHARACTERS:]
        at = whole.rfind(end, 0, start) + len(end)
        if end in whole[:start] and at > common:
            return at
        header = whole[common:start]
        is_header = any(mark in header for mark in self.tokens.special.values())
        return common if is_header and not EMPTY_THINKING.search(header) else start

    # ---- Where it ends, and what of it is learnt

    def _finish(self, made: Rendering, k: int, start: int, ids: list[int]) -> tuple[list[int], list[bool] | None]:
        """A completion up to its end of turn, and which of its tokens are learnt, None for all. Raises Unusable."""
        answer, learnt = made.chat.completions[k], _learnt(made.chat, k)
        is_whole = all(learnt) and not all(map(_is_model, answer))  # data.learn=all: every token, headers, too
        if not is_whole and (len(answer) > 1 or not all(learnt)):
            return self._finish_turns(made, k, ids)
        ids = self._ended(ids)
        written = start if is_whole else _written_by_template(made.wholes[k], start, answer[0])
        if written == start:
            return ids, None
        count = len(ids) - len(self._ended(self.tokens.behind([(made.wholes[k], written)])[0]))
        return ids, [index >= count for index in range(len(ids))]

    def _ended(self, ids: list[int]) -> list[int]:
        """Up to the first token of the trailing ones that ends the turn; with one, where the template wrote none."""
        for written in self._written_behind:
            if ids[-len(written) :] == written:
                ids = ids[: -len(written)]
        return ended(ids, self.end_ids, self.tokens, self.eos_token_id)

    def _finish_turns(self, made: Rendering, k: int, ids: list[int]) -> tuple[list[int], list[bool]]:
        """A completion of several messages: up to the last token that is learnt. Raises Unusable."""
        every, begins = self.tokens.starts(made.wholes[k])
        first = len(every) - len(ids)
        if every[first:] != ids:
            raise Unusable("its turns cannot be separated: the prompt's end and the answer's begin share a token")
        spans = self._spans(made, k)
        learnt = [any(low <= at < high for low, high in spans) for at in begins]
        for _, high in spans:  # and where generation stops, if only special tokens stand between it and the text
            behind = bisect.bisect_left(begins, high)
            is_end = [token in self.end_ids or not self._is_filler(token) for token in every[behind:]]
            end = behind + is_end.index(True) if True in is_end else len(every)
            if end < len(every) and every[end] in self.end_ids:
                learnt[behind : end + 1] = [True] * (end + 1 - behind)
        learnt = learnt[first:]
        if not any(learnt):
            raise Unusable("none of its tokens is learnt")
        length = len(learnt) - learnt[::-1].index(True)
        if length == len(ids) and ids[-1] not in self.end_ids:
            return [*ids, self.eos_token_id], [*learnt, True]
        return ids[:length], learnt[:length]

    def _is_filler(self, token: int) -> bool:
        return self.tokens.is_blank(token) or token in self.tokens.special

    def _as_marked(self, made: Rendering) -> Encoded | None:
        """A conversation of which is learnt what the template marks as the model's; None where it marks nothing."""
        chat = made.chat
        if not GENERATION.search(self.template.text) or chat.learnt is None or len(made.wholes) != 1:
            return None
        messages, wanted = [*chat.prompt, *chat.completions[0]], [*[False] * len(chat.prompt), *_learnt(chat, 0)]
        if not all(map(_is_model, itertools.compress(messages, wanted))):
            return None
        spans = self.template.marked(chat, messages)
        of_model = list(itertools.compress(wanted, map(_is_model, messages)))
        if all(of_model):
            of_model = [True] * len(spans)  # Phi-3's template marks an end of the text, too
        ids, begins = self.tokens.starts(made.wholes[0])
        learnt = [False] * len(ids)
        for low, high in itertools.compress(spans, of_model if len(spans) == len(of_model) else ()):
            first, last = bisect.bisect_right(begins, low) - 1, bisect.bisect_left(begins, high)
            learnt[first:last] = [True] * (last - first)
        if not any(learnt):
            return None
        start, stop = learnt.index(True), len(learnt) - learnt[::-1].index(True)
        mask = learnt[start:stop]
        return Encoded(ids[:start], [ids[start:stop]], None if all(mask) else [mask])

    def _spans(self, made: Rendering, k: int) -> list[tuple[int, int]]:
        """Begin and end in the text of what the model writes in learnt messages, by rendering what comes before."""
        chat, whole, spans = made.chat, made.wholes[k], list[tuple[int, int]]()
        messages = [*chat.prompt, *chat.completions[k]]
        for index in itertools.compress(range(len(chat.prompt), len(messages)), _learnt(chat, k)):
            low, high = self.template.place_of(chat, messages, index, whole) or (-1, -1)
            if high < 0 or messages[index].get("tool_calls"):
                high = self._end_of(self.template.apply(chat, messages[: index + 1]), whole)
            header = self.template.apply_or_none(chat, messages[:index], is_prompt=_is_model(messages[index]))
            if header is not None and whole.startswith(header):
                low = _written_by_template(whole, len(header), messages[index])
            if low < 0 or high <= low:
                raise Unusable(
                    f"message {index + 1}: the chat template writes it differently once others follow, so that its "
                    "tokens cannot be found; data.learn=last learns the last answer alone"
                )
            spans.append((low, high))
        return spans

    def _end_of(self, until: str, whole: str) -> int:
        """Where in the whole the last message of the text `until` ends, without the end of its turn."""
        common = len(os.path.commonprefix([until, whole]))
        ids, begins = self.tokens.starts(whole[:common])
        while ids and (ids[-1] in self.end_ids or self._is_filler(ids[-1])):
            common = begins[-1]
            ids, begins = ids[:-1], begins[:-1]
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
        arguments = {"enable_thinking": thinks, **self.template.settings.chat_template_kwargs}
        text = self.template.text_of([{"role": "user", "content": "a"}, _said(SENTINEL)], **arguments)
        return self.tokens.ids([text.partition(SENTINEL)[2]])[0]


def ended(ids: list[int], end_ids: set[int], tokens: TextTokens, eos_token_id: int) -> list[int]:
    """Up to the first of the trailing tokens, blanks between them, that is an end; with one, where there is none."""
    cut, index = None, len(ids)
    while index > 0 and (ids[index - 1] in end_ids or tokens.is_blank(ids[index - 1])):
        index -= 1
        cut = index + 1 if ids[index] in end_ids else cut
    return ids[:cut] if cut is not None else [*ids, eos_token_id]


def _written_by_template(whole: str, start: int, message: Message) -> int:
    """Where the block of no thinking ends that a template puts before an answer; `start` where there is none."""
    content, match = message.get("content"), EMPTY_THINKING.match(whole, start)
    if match is None or has_reasoning(message) or not isinstance(content, str):
        return start
    behind = whole[match.end() :]
    for text in filter(None, (content, content.lstrip())):
        before, found, _ = behind.partition(text)
        if found and not before.strip():
            return match.end() + len(before)
    return match.end()


def _learnt(chat: Chat, k: int) -> Sequence[bool]:
    """Of a completion's messages, which are learnt."""
    return chat.learnt[k] if chat.learnt is not None else [False] * (len(chat.completions[k]) - 1) + [True]


def _is_model(message: Message) -> bool:
    return message["role"] == "assistant"
