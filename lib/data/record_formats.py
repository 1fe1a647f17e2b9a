"""Formats of records, recognised by their columns: a record ➜ Tokens, Plain or Chat.

A format reads a Draft, the prompt and answers wherever the record had them; then drafts are checked. A record that
fits no form raises Unusable with the reason; the caller names the line.
"""

from __future__ import annotations

import ast
import functools
import itertools
import json
import math
import os.path
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Annotated, Any, Literal, NamedTuple, get_args

from annotated_types import Ge, Le
from pydantic import Strict, TypeAdapter, ValidationError

from lib.config.settings import Column, DataSettings

RecordKind = Literal["preference", "unpaired", "sft", "prompt", "group"]
JSON = dict[str, Any]  # A record as its file has it: any columns
Message = dict[str, Any]  # of a chat: `role`, `content`, and other fields, which only its chat template knows


class Unusable(ValueError):
    """A record that cannot be trained on; the message is the reason, without the place."""


class Unwanted(Unusable):
    """A record that a filter leaves out; nothing is wrong with it."""


@dataclass(frozen=True)
class Tokens:
    """Token ids of a record: it came tokenised, or was encoded."""

    prompt: list[int]
    completions: Sequence[list[int]]
    columns: str = ""  # What it was read from, for people
    label: bool | None = None  # Of unpaired feedback: whether the completion is desirable
    learnt: Sequence[list[bool]] | None = None  # Of each completion's tokens, which are trained on; None for all
    vocabulary: str = ""  # the digest of the vocabulary that its ids are of, where it is known


@dataclass(frozen=True)
class Plain:
    """Strings; `prompt` is None for plain text, which is all completion."""

    prompt: str | None
    completions: tuple[str, ...]
    columns: str
    label: bool | None = None


@dataclass(frozen=True)
class Chat:
    """A conversation: the messages of the prompt, and for each completion the messages that follow it. A content is a
    string, or None beside tool_calls. The arguments of a call are an object, never JSON text."""

    prompt: list[Message]  # Empty where the first message is learnt (data.learn=all)
    completions: tuple[list[Message], ...]  # Each ends with an assistant's message; mostly that is all of it
    columns: str
    learnt: tuple[tuple[bool, ...], ...] | None = None
    """Of each completion's messages, which are trained on; None for the last one alone."""
    tools: list[JSON] | None = None
    """Definitions of the functions that the model may call, as the chat template takes them."""
    template_arguments: JSON = field(default_factory=dict)  # Further arguments of the chat template, the record's own
    label: bool | None = None


Record = Tokens | Plain | Chat
VOCABULARY = "ids_of_vocabulary"  # column of Tokens.vocabulary
ANSWER = "answer"  # column of what a program can check an answer by
TEMPLATE_ARGUMENTS = "chat_template_kwargs"  # column of further arguments of the chat template


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
        fields: list[Any] = [*map(data.column, get_args(Column)), data.ignore, data.learn]
        return cls(*fields)

    @property
    def are_named(self) -> bool:
        """Whether the user named the column of a text: then no published format is guessed."""
        return self[:6] != self._fields[:6]


# What chat templates write around a turn, and the same with what may follow it before an answer.
TURN_MARKS = re.compile(
    r"<[|｜][^\s'\"{}<>]{1,40}[|｜]>|\[/?[A-Z_]{3,20}\]|<(?:start|end)_of_turn>|<\|[a-z_]+>|<[a-z_]+\|>"
)
HEADERS = re.compile(rf"(?:{TURN_MARKS.pattern})(?:(?:assistant|model|ai|bot)\b)?\n*")
OPENING = re.compile(rf"(?:<s>|<bos>)?\s*(?:{TURN_MARKS.pattern})")
NAMES_OF_TYPES = {str: "a string", list: "a list", dict: "an object", bool: "a boolean", int: "a number"}


def name_of_type(value: object) -> str:
    """A JSON type in words."""
    return "null" if value is None else NAMES_OF_TYPES.get(type(value), f"a {type(value).__name__}")


# ---- Messages and tools

# Who speaks, by the names that other formats have; capitals do not count.
SPEAKERS = {
    "user": "user human prompter customer question instruction",
    "assistant": "assistant gpt chatgpt model bot chatbot ai claude llm "
    "bard bing answer response function_call tool_call",
    "tool": "tool function observation ipython tool_result function_response tool_response",
    "system": "system",
    "developer": "developer",
}
ROLES = {name: role for role, names in SPEAKERS.items() for name in names.split()}
LISTED = re.compile(r"\s*\[\s*\{\s*(['\"])(?:role|content|from|value)\1\s*:")  # messages as text
# Fields in which messages carry their thinking; transformers gives templates all of them where a message has one.
REASONING = ("reasoning_content", "reasoning", "thinking")
CALLERS = ("function_call", "tool_call")  # ShareGPT's speakers whose text is a call


def check_json(value: Any, name: str) -> Any:
    """The value, which templates write as text or JSON: parquet has bytes and dates, JSON half surrogate pairs."""
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except TypeError as error:
        raise Unusable(f"{name!r} has a value that JSON does not have: {error}") from error
    except UnicodeEncodeError as error:
        raise Unusable(f"{name!r} has half a surrogate pair") from error
    return value


def _parsed(value: Any, name: str) -> Any:
    """The value, or what its JSON text says."""
    try:
        return json.loads(value) if isinstance(value, str) and value.strip() else value
    except (ValueError, RecursionError) as error:
        raise Unusable(f"{name} is a string that is not JSON: {str(error).splitlines()[0]}") from None


def _listed(value: Any, name: str) -> Any:
    """The value, or the messages whose JSON, or whose repr of Python, it is: CSV and pandas have no lists."""
    if not isinstance(value, str) or not LISTED.match(value):
        return value
    try:
        return ast.literal_eval(value) if LISTED.match(value)[1] == "'" else json.loads(value)  # type: ignore[index]
    except (ValueError, SyntaxError, RecursionError, MemoryError):
        raise Unusable(f"{name!r} holds messages as text that is neither JSON nor Python; write them as JSON") from None


def check_messages(value: object, name: str, ignore: Collection[str] = ()) -> list[Message]:
    """The messages of a column: roles by their usual names, contents strings. Raises Unusable."""
    if not isinstance(value, list):
        other = "" if isinstance(value, str) else "a string or "
        raise Unusable(f"column {name!r} is {name_of_type(value)}, not {other}a list of messages")
    if not value:
        raise Unusable(f"{name!r} is an empty list of messages")
    return [_message(message, f"{name}[{index}]", ignore) for index, message in enumerate(value)]


def _message(message: object, where: str, ignore: Collection[str]) -> Message:
    if not isinstance(message, dict):
        raise Unusable(f"{where} is {name_of_type(message)}, not a message {{role, content}}")
    # A file that was parquet once has null for each field that a message lacks; templates ask whether one is there.
    # Thinking that is blank is none: templates ask whether it is there, and would open a block for it.
    left_out = {*ignore, *(key for key in REASONING if not str(message.get(key) or "").strip())}
    fields = {key: item for key, item in message.items() if item is not None and key not in left_out}
    columns = f"(it has: {', '.join(map(str, message))})"
    if "role" not in fields and "from" in fields:  # ShareGPT's {from, value}
        fields = {"role": fields.pop("from"), "content": fields.pop("value", None)} | fields
        if fields["role"] in CALLERS and isinstance(fields["content"], str):
            calls = _parsed(fields.pop("content"), f"{where}.value")
            fields["tool_calls"] = calls if isinstance(calls, list) else [calls]
    name, content = fields.pop("role", None), fields.pop("content", None)
    if not isinstance(name, str):
        raise Unusable(f"{where} has no 'role' and 'content' {columns}")
    if (role := ROLES.get(name.strip().lower())) is None:
        raise Unusable(
            f"{where} has the unknown role {name!r}; call it one of system, developer, user, assistant, tool"
        )
    if "function_call" in fields:  # OpenAI's, before tools
        fields["tool_calls"] = [fields.pop("function_call")]
    calls = _check_calls(fields.pop("tool_calls", None), f"{where}.tool_calls")
    if isinstance(content, list):
        content = "".join(_text_of_part(part, f"{where}.content[{i}]") for i, part in enumerate(content))
    if content is None and not calls:
        raise Unusable(f"{where} has no content and no tool_calls {columns}")
    if not isinstance(content, str | None):
        raise Unusable(f"{where}.content is {name_of_type(content)}, not a string")
    for other in filter(fields.__contains__, ("train", "training", "loss_weight")):  # axolotl's, LLaMA-Factory's
        fields["weight"] = fields.pop(other)
    if fields.get("weight", 1) not in (0, 1):
        raise Unusable(f"{where}.weight is {json.dumps(fields['weight'], default=str)}, not 0 or 1")
    head: JSON = {"role": role, "content": content} | ({"tool_calls": calls} if calls else {})
    return check_json(head | fields, where)


def _text_of_part(part: object, where: str) -> str:
    kind, text = (part.get("type"), part.get("text")) if isinstance(part, dict) else (name_of_type(part), None)
    if kind not in ("text", "input_text", "output_text") or not isinstance(text, str):
        raise Unusable(f"{where} is of type {kind!r}, and only text is trained on")
    return text


def _functions(value: object, where: str, what: str) -> Iterator[tuple[str, JSON, JSON]]:
    """Place, whole and function {name, ...} of calls or definitions: in a list, or the JSON text of one."""
    items = _parsed(value, where) or []
    if not isinstance(items, list):
        raise Unusable(f"{where} is {name_of_type(items)}, not a list of {what}")
    for index, item in enumerate(items):
        place = f"{where}[{index}]"
        item = _parsed(item, place)
        function = item.get("function", item) if isinstance(item, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise Unusable(f"{place} has no function with a name")
        yield place, item, function


def _check_calls(value: object, where: str) -> list[JSON]:
    """Tool calls with a name and an object of arguments each."""
    calls = list[JSON]()
    for place, call, function in _functions(value, where, "calls"):
        arguments = _parsed(function.get("arguments"), f"{place}.arguments") or {}
        if not isinstance(arguments, dict):
            raise Unusable(f"{place}.arguments is {name_of_type(arguments)}, not an object")
        others = {} if function is call else {key: item for key, item in call.items() if item is not None}
        calls.append(others | {"type": "function", "function": {**function, "arguments": arguments}})
    return check_json(calls, where)


def check_tools(value: object, name: str) -> list[JSON] | None:
    """The definitions of tools, a list or its JSON text, as OpenAI has them; None for none. Raises Unusable."""
    each = _functions(value, name, "tools")
    tools = [_without_nulls({"type": "function", "function": tool} if of is tool else tool) for _, tool, of in each]
    return check_json(tools, name) or None


def _without_nulls(schema: Any) -> Any:
    """A JSON Schema without the keywords that are null, but for those whose value is data."""
    if isinstance(schema, list):
        return [_without_nulls(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    return {
        key: item if key in ("default", "const", "enum", "examples") else _without_nulls(item)
        for key, item in schema.items()
        if item is not None or key in ("default", "const")
    }


# ---- Published formats


class Draft(NamedTuple):
    """What a record says, unchecked. A value that is a list is a list of messages."""

    prompt: object  # a string or messages; None: all of it is in `completions`
    completions: tuple[Any, ...]  # One answer, or the better and the worse one
    names: tuple[str, ...]  # The column of each completion, for errors
    tools: object = None


Read = Callable[[JSON], Draft]  # Raises Unusable


class Format(NamedTuple):
    """How records with these columns are read."""

    name: str  # Of a published format; empty for columns that data.columns names.
    has: Literal["pair", "answer", "label", "prompt", "text"]
    needs: tuple[str, ...]
    read: Read
    uses: tuple[str, ...] = ()  # Columns that it reads besides, where they are there


def transcript(text: Any) -> Any:
    """Anthropic's "\\n\\nHuman: ... \\n\\nAssistant: ..." and HelpSteer's "<extra_id_1>User\\n..." as messages.
    Anything else as it is. An assistant's turn at the end that is empty is none."""
    if not isinstance(text, str):
        return text
    if re.match(r"\s*Human:", text) and "\n\nAssistant:" in text:
        pieces = re.split(r"\n\n(Human|Assistant):", f"\n\n{text.lstrip()}")[1:]
    elif "<extra_id_1>" in text:
        pieces = ["User", *re.split(r"\n?<extra_id_1>(User|Assistant)\n", text)]
    else:
        return text
    turns = [
        {"role": ROLES[name.lower()], "content": turn.strip()}
        for name, turn in zip(pieces[::2], pieces[1::2], strict=True)
    ]
    return turns[:-1] if turns[-1] == {"role": "assistant", "content": ""} else turns


def _exchanges(pairs: Iterable[Sequence[Any]]) -> list[JSON]:
    """Messages of question, answer, question, answer, ..."""
    roles = itertools.cycle(("user", "assistant"))
    return [{"role": role, "content": text} for role, text in zip(roles, itertools.chain(*pairs), strict=False)]


def _is_finite(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _ranked(prompt: str, column: str, text: str, score: str, sign: int) -> Read:
    """A list of answers with a number each, higher (sign 1) or lower (-1) for better ones."""

    def read(record: JSON) -> Draft:
        items = record[column] if isinstance(record[column], list) else []
        items = [i for i in items if isinstance(i, dict) and i.get(text) is not None and _is_finite(i.get(score))]
        best, worst = (pick(items, key=lambda item: sign * item[score], default=JSON()) for pick in (max, min))
        if best.get(score) == worst.get(score):
            raise Unusable(f"{column!r} has no two answers with another {score}: nothing to prefer")
        return Draft(record[prompt], (best[text], worst[text]), (f"{column}.{text}",) * 2)

    return read


def _preferred(name: str, prompt: str, first: str, second: str, column: str, of_first: tuple[int, ...] = ()) -> Format:
    """Two answers and a number: which is better. of_first: the numbers of the first and the second; () for the sign."""

    def read(record: JSON) -> Draft:
        number = record[column]
        if not _is_finite(number) or (number not in of_first if of_first else number == 0):
            raise Unusable(f"column {column!r} is {number!r}, which prefers neither: nothing to prefer")
        is_first = number == of_first[0] if of_first else number < 0
        return _answers_to(prompt, *((first, second) if is_first else (second, first)))(record)

    return Format(name, "pair", (prompt, first, second, column), read)


def _answers_to(prompt: str, *names: str) -> Read:
    return lambda record: Draft(record[prompt], tuple(record[name] for name in names), names)


def _conversation_in(name: str) -> Read:
    """Messages, or Capybara's turns of {input, output}."""

    def read(record: JSON) -> Draft:
        turns = _listed(record[name], name)
        if isinstance(turns, list) and all(isinstance(turn, dict) and "input" in turn for turn in turns):
            turns = _exchanges((turn["input"], turn.get("output")) for turn in turns)
        return Draft(None, (turns,), (name,))

    return read


def _openai_preference(record: JSON) -> Draft:
    question, names = record["input"], OUTPUTS[1:]
    if not isinstance(question, dict) or question.get("messages") is None:
        raise Unusable("column 'input' is not an object with messages")
    tools = question.get("tools") or record.get("tools")
    return Draft(question["messages"], tuple(map(record.get, names)), names, tools)


def _instruction(detail: str, between: str, *names: str) -> Read:
    """The instruction, and its detail behind it; before it the history (LLaMA-Factory, data/README.md)."""

    def read(record: JSON) -> Draft:
        question, answers = record["instruction"], tuple(record[name] for name in names)
        if record.get(detail):
            texts = [_text_in(record, name) for name in ("instruction", detail)]
            question = between.join(texts) if texts[1].strip() else texts[0]
        history = record.get("history") or []
        if not isinstance(history, list) or not all(isinstance(turn, list) and len(turn) == 2 for turn in history):
            raise Unusable("column 'history' is not a list of [question, answer]")
        if history and len(names) == 1:
            return Draft(None, (_exchanges([*history, (question, *answers)]),), names)
        return Draft(_exchanges([*history, (question,)]) if history else question, answers, names)

    return read


def _text_in(record: JSON, name: str) -> str:
    if not isinstance(record[name], str):
        raise Unusable(f"column {name!r} is {name_of_type(record[name])}, not a string")
    return check_json(record[name], name)


PAIR, LABEL, ALPACA = ("chosen", "rejected"), "kto_tag", ("input", "history")
OUTPUTS = ("input", "preferred_output", "non_preferred_output")
ULTRAFEEDBACK = _ranked("instruction", "completions", "response", "overall_score", 1)

# The first one whose columns are all there is taken.
PUBLISHED = (
    Format("OpenAI preference", "pair", OUTPUTS, _openai_preference),
    Format("UltraFeedback", "pair", ("instruction", "completions"), ULTRAFEEDBACK),
    Format("Nectar", "pair", ("prompt", "answers"), _ranked("prompt", "answers", "answer", "rank", -1)),
    _preferred("HelpSteer2 preference", "prompt", "response_1", "response_2", "preference_strength"),
    _preferred("HelpSteer3", "context", "response1", "response2", "overall_preference"),
    _preferred("SHP", "history", "human_ref_A", "human_ref_B", "labels", (1, 0)),
    _preferred("PKU-SafeRLHF", "prompt", "response_0", "response_1", "better_response_id", (0, 1)),
    Format("ShareGPT pairs", "pair", ("conversations", *PAIR), _answers_to("conversations", *PAIR)),
    Format("orca_dpo_pairs", "pair", ("question", *PAIR), _answers_to("question", *PAIR)),
    Format("Alpaca pairs", "pair", ("instruction", *PAIR), _instruction("input", "\n", *PAIR), ALPACA),
    Format("distilabel pairs", "pair", ("input", *PAIR), _answers_to("input", *PAIR)),
    Format("Alpaca KTO", "label", ("instruction", "output", LABEL), _instruction("input", "\n", "output"), ALPACA),
    Format("ShareGPT KTO", "label", ("conversations", LABEL), _conversation_in("conversations")),
    Format("OpenAI messages KTO", "label", ("messages", LABEL), _conversation_in("messages")),
    Format("ShareGPT", "answer", ("conversations",), _conversation_in("conversations")),
    Format("Capybara, LMSYS-Chat", "answer", ("conversation",), _conversation_in("conversation")),
    Format("Alpaca", "answer", ("instruction", "output"), _instruction("input", "\n", "output"), ALPACA),
    Format("Dolly", "answer", ("instruction", "response"), _instruction("context", "\n\n", "response"), ("context",)),
    Format("HelpSteer", "answer", ("prompt", "response", "helpfulness"), _answers_to("prompt", "response")),
)


# ---- Which format a record has

# Columns that mean something where no format reads them, and the setting that does, if one does.
MEANINGFUL = {
    "system_prompt": "data.columns={system: system_prompt}",
    "functions": "data.columns={tools: functions}",
    "label": "train.loss=kto",
    LABEL: "train.loss=kto",
    **dict.fromkeys(("system", "tools", "input", "weight", "history", "context", "images", "image")),
}


def _candidates(names: tuple[str, ...], columns: Columns, kind: RecordKind) -> Iterator[Format]:
    """The formats that may be meant by these columns, the likeliest first."""
    prompt, chosen, rejected, completion, messages, text = columns[:6]

    def whole(*conversations: str) -> Format:
        """Answers that are a whole conversation each: messages, or a transcript."""

        def read(record: JSON) -> Draft:
            answers = tuple(transcript(_listed(record[name], name)) for name in conversations)
            if not any(isinstance(answer, str) for answer in answers):
                return Draft(None, answers, conversations)
            # Of rendered texts the prompt is what they have in common, up to the last header of an answer.
            both = [text if isinstance(text, str) else "" for text in map(record.get, (chosen, rejected))]
            common = os.path.commonprefix(both)
            mark = OPENING.match(common)
            headers = HEADERS.finditer(common, mark.end() + 1) if mark else ()  # that mark alone may be BOS
            if not (length := max((header.end() for header in headers), default=0)):
                raise Unusable(_missing(record, columns, "preference"))
            return Draft(answers[0][:length], tuple(answer[length:] for answer in answers), conversations)

        return Format("", "pair", conversations, read)

    def ours(has: Any, *used: str) -> Format:
        return Format("", has, used, _answers_to(*used))

    single = [Format("", "answer", (messages,), _conversation_in(messages))]
    if completion in names:
        single = [ours("answer", prompt, completion), ours("answer", messages, completion)]
    published = () if columns.are_named else PUBLISHED
    pairs, answers, labels = ([form for form in published if form.has == has] for has in ("pair", "answer", "label"))
    if kind == "preference":
        yield from (ours("pair", prompt, chosen, rejected), *pairs, whole(chosen, rejected))
    elif kind == "unpaired":
        yield from (*single, *answers) if columns.label in names else labels
    elif kind == "prompt":
        yield from (form for form in (*pairs, *answers) if prompt in form.needs)
        yield from (ours("prompt", prompt), *pairs, *answers, *labels, *single, whole(chosen, rejected))
    else:
        yield from single
        if completion not in names:
            plain = Format("", "text", (text,), lambda record: Draft(None, (_text_in(record, text),), (text,)))
            yield from (*pairs, *answers, plain, ours("pair", prompt, chosen), whole(chosen))


class Reader(NamedTuple):
    """How records that have the same columns are read."""

    name: str  # For people: `prompt + chosen + rejected`, or `Alpaca (instruction, input, output)`
    form: Format
    is_chat: bool  # Whether a system prompt, tools or template arguments make a conversation of any text
    unread: tuple[str, ...]  # Columns that nothing reads and data.ignore does not name


@functools.lru_cache(4096)
def reader_of(names: tuple[str, ...], columns: Columns, kind: RecordKind) -> Reader | None:
    """How records are read that have values in these columns; None where they cannot be."""
    form = next((form for form in _candidates(names, columns, kind) if {*names}.issuperset(form.needs)), None)
    if form is None:
        return None
    used, is_half = [*form.needs, *(name for name in form.uses if name in names)], kind == "sft" and form.has == "pair"
    if kind == "unpaired" and form.has == "answer":
        used.append(columns.label)
    beside = () if form.has == "text" else (columns.system, columns.tools, TEMPLATE_ARGUMENTS)
    extras = [name for name in beside if name in names and name not in (*used, *columns.ignore)]
    read = {*used, *extras, *columns.ignore, VOCABULARY, *[columns.rejected] * is_half}
    read |= {columns.label, LABEL, "weight"} if kind == "prompt" else set()
    shown = [*(form.needs[-1:] if is_half and not form.name else used), *extras]
    title = f"{form.name} ({', '.join(shown)})" if form.name else " + ".join(shown)
    title += " (preference records: the other completion is not used)" * is_half
    return Reader(title, form, bool(extras), tuple(name for name in names if name not in read))


def _present(record: JSON) -> tuple[str, ...]:
    """The columns that have values."""
    return tuple([name for name, value in record.items() if value is not None])


WANTED: dict[str, tuple[str, ...]] = {
    "preference": ("chosen", "rejected", "prompt"),
    "unpaired": ("label", "completion", "prompt"),
    "sft": ("completion", "prompt"),
    "prompt": ("prompt",),
}


def _missing(record: JSON, columns: Columns, kind: RecordKind) -> str:
    """Names the columns that are absent, those that are there, and what to type."""
    present = _present(record)
    absent = [role for role in WANTED[kind] if getattr(columns, role) not in present]
    first = getattr(columns, absent[0])
    if first in record:
        return f"column {first!r} is null"
    others = f" or {columns.messages!r} or {columns.text!r}" if kind == "sft" and absent[0] == "completion" else ""
    why = f"no column {first!r}{others} (columns: {', '.join(map(str, record)) or 'none'})"
    if kind == "preference" and {columns.label, LABEL} & {*present}:
        return f"{why}; labelled answers are not pairs: train.loss=kto"
    if kind == "preference" and (other := reader_of(present, columns, "sft")) and other.form.has != "pair":
        return f"{why}; {other.form.name or 'this'} has one answer a record, not a pair: train.loss=sft"
    return f"{why}; name yours with data.columns={{{', '.join(f'{role}: COLUMN' for role in absent)}}}"


# ---- A record's form


def parse(record: JSON, columns: Columns, kind: RecordKind) -> Record:
    """The record's prompt and completions: (chosen, rejected), one for SFT or a label, none for a prompt. The first
    form wins: token ids; prompt and completion; messages; a published format; text; for SFT a pair's better."""
    if (names := _token_columns(record, kind)) is not None:
        tokens = _parse_tokens(record, names)
        for name in record.keys() - {*columns[:6], *columns.ignore}:
            _require_no_media(name, record[name])
        return tokens if kind != "unpaired" else replace(tokens, label=_label(record, columns.label))
    reader = reader_of(_present(record), columns, kind)
    if reader is None:
        raise Unusable(_missing(record, columns, kind))
    for name in reader.unread:
        if name not in MEANINGFUL:
            _require_no_media(name, record[name])
        elif _says_something(record[name]):  # it changes what its row means
            setting = f"set {MEANINGFUL[name]}, or " if MEANINGFUL[name] else ""
            how = f"{reader.name} does not read it; {setting}leave it out with data.ignore=[{name}]"
            raise Unusable(f"column {name!r} would be lost: {how}")
    draft, label = reader.form.read(record), None
    asked = _listed(draft.prompt, "prompt")
    listed = tuple(map(_listed, draft.completions, draft.names))
    # Messages beside a plain question are turns where they hold it, or are the model's; else the answer is that text.
    if not isinstance(asked, str) or all(
        repr(asked)[1:-1] in str(of) or "'assistant'" in str(of).partition("}")[0] for of in listed
    ):
        draft = draft._replace(prompt=asked, completions=listed)
    if kind == "unpaired":
        label = _label(record, columns.label if columns.label in record else LABEL)
    if len(draft.completions) == 2 and draft.completions[0] == draft.completions[1]:
        raise Unusable(f"{draft.names[0]!r} is equal to {draft.names[1]!r}: nothing to prefer")
    most = 0 if kind == "prompt" and draft.prompt is not None else 1 if kind == "sft" else None
    prompt = draft.prompt if columns.are_named else transcript(draft.prompt)
    completions = draft.completions[:most]
    if prompt != draft.prompt:  # "\n\nAssistant: Yes." begins with "Yes."
        completions = tuple(text.strip() if isinstance(text, str) else text for text in completions)
    draft = draft._replace(prompt=prompt, completions=completions, names=draft.names[:most])
    is_plain = reader.form.has == "text" or isinstance(prompt, str)
    if is_plain and not reader.is_chat and all(isinstance(text, str) for text in draft.completions):
        text = None if prompt is None else check_json(prompt, "prompt")
        return Plain(text, tuple(map(_check_completion, draft.completions, draft.names)), reader.name, label)
    return _chat(draft, record, reader.name, columns, kind, label)


def rows_of(record: JSON | Unusable, columns: Columns, kind: RecordKind) -> Sequence[Record | Unusable]:
    """The form of each row that a record gives, or why it has none. It gives one; of a pair two, where labels are
    wanted: chosen is desirable, rejected is not."""
    try:
        if isinstance(record, Unusable):
            return [record]
        names = () if kind != "unpaired" or columns.label in record else _present(record)
        is_pair = reader_of(names, columns, "preference") and not reader_of(names, columns, "unpaired")
        if not is_pair and not {"chosen_ids", "rejected_ids"} <= {*names}:
            return [parse(record, columns, kind)]
        pair = parse(record, columns, "preference")
    except Unusable as why:
        return [why]
    title = f"{pair.columns} (each pair gives two rows: chosen is desirable, rejected is not)"
    learnt, rows = getattr(pair, "learnt", None), list[Record]()
    for k, label in enumerate((True, False)):
        changes: JSON = {"completions": pair.completions[k : k + 1], "columns": title, "label": label}
        rows.append(replace(pair, **changes, **({"learnt": learnt[k : k + 1]} if learnt else {})))
    return rows


def _token_columns(record: JSON, kind: RecordKind) -> tuple[str, ...] | None:
    """The columns of a tokenised record's completions; None where it is none."""
    if kind == "preference" and ("chosen_ids" in record or "rejected_ids" in record):
        return ("chosen_ids", "rejected_ids")
    if kind in ("sft", "unpaired") and "completion_ids" in record:
        return ("completion_ids",)
    if kind == "sft" and "chosen_ids" in record:
        return ("chosen_ids",)
    return () if kind == "prompt" and "prompt_ids" in record else None


TOKEN_IDS = TypeAdapter(list[Annotated[int, Strict(), Ge(0)]])
MASK = TypeAdapter(
    list[Annotated[int, Strict(), Ge(0), Le(1)] | Annotated[bool, Strict()]]
)  # of tokens, what is learnt


def checked(form: TypeAdapter[Any], value: object, name: str) -> Any:
    """A value that has a form. Raises Unusable, which names the place in it."""
    try:
        return form.validate_python(value)
    except ValidationError as error:
        fault = error.errors()[0]
        if fault["type"] == "missing":
            reads = "groups of prompt_ids, completion_ids and rewards"
            raise Unusable(f"no column {fault['loc'][0]!r}: train.loss=grpo reads {reads}") from None
        where = (name or str(fault["loc"][0]), *(f"[{part}]" for part in fault["loc"] if isinstance(part, int)))
        raise Unusable(f"{''.join(where)}: {fault['msg']}, not {repr(fault['input'])[:40]}") from None


def _parse_tokens(record: JSON, names: tuple[str, ...]) -> Tokens:
    title, masks = ["prompt_ids", *names], list[list[bool]]()
    prompt, *completions = (checked(TOKEN_IDS, record.get(name), name) for name in title)
    for name, ids in zip(names, completions, strict=True):
        if not ids:
            raise Unusable(f"empty completion: {name!r} has no tokens")
        bits, of_mask = [True] * len(ids), name.replace("_ids", "_mask")
        if record.get(of_mask) is not None:
            bits = [*map(bool, checked(MASK, record[of_mask], of_mask))]
            title.append(of_mask)
        if len(bits) != len(ids) or not any(bits):
            raise Unusable(
                f"{of_mask} has {len(bits)} bits for {len(ids)} tokens of {name}, or no 1 for what is learnt"
            )
        masks.append(bits)
    learnt = None if all(map(all, masks)) else tuple(masks)
    return Tokens(prompt, tuple(completions), " + ".join(title), None, learnt, str(record.get(VOCABULARY) or ""))


def _label(record: JSON, column: str) -> bool:
    """Whether a completion is desirable. Raises Unusable."""
    if column not in record:
        raise Unusable(f"no column {column!r}; name yours with data.columns={{label: COLUMN}}")
    value = record[column]
    if isinstance(value, str):  # CSV has texts alone
        value = {"true": True, "1": True, "false": False, "0": False}.get(value.strip().lower())
    if value not in (True, False):  # 1 and 0, too
        raise Unusable(f"column {column!r} is {json.dumps(record[column], default=str)}, not true or false")
    return bool(value)


def answer_text(record: Mapping[str, Any]) -> str | None:
    """What a program can check an answer by; None where that is blank, or neither text nor a number."""
    answer = record.get(ANSWER)
    if isinstance(answer, float):  # pandas writes 72.0 for 72 where other rows have none
        answer = int(answer) if answer.is_integer() else answer if math.isfinite(answer) else None
    is_written = isinstance(answer, str | int | float) and not isinstance(answer, bool)
    return str(answer).strip() or None if is_written else None


# ---- Conversations

Learnt = tuple[tuple[bool, ...], ...]  # of each completion's messages, which are learnt
Parts = tuple[list[Message], tuple[list[Message], ...], Learnt]  # of a chat: prompt, completions, what is learnt


def _chat(draft: Draft, record: JSON, name: str, columns: Columns, kind: RecordKind, label: bool | None) -> Chat:
    """A draft as messages."""
    learn = columns.learn if kind == "sft" else "last"
    if draft.prompt is None and len(draft.completions) == 1:
        whole = _opened(record, check_messages(draft.completions[0], draft.names[0], columns.ignore), columns)
        is_answered = whole[-1]["role"] == "assistant" and len(whole) > 1
        parts: Parts = (whole[:-1] if is_answered else whole, (), ())
        prompt, completions, learnt = parts if kind == "prompt" else _split(whole, learn, draft.names[0])
    else:
        prompt, completions, learnt = _answers(draft, columns)
        if completions and any("weight" in message for part in (prompt, *completions) for message in part):
            raise Unusable("'weight' of a message is for SFT on conversations; leave it out with data.ignore=[weight]")
        prompt = _opened(record, prompt, columns)
        if kind == "prompt":
            completions = learnt = ()
    for answer, of_answer in zip(completions, draft.names, strict=False):
        if prompt and prompt[-1]["role"] == answer[0]["role"] == "assistant":
            raise Unusable("the prompt ends with an assistant message; it has to end before the answer")
        last = answer[-1]
        if learn != "all" and last["role"] != "assistant":
            raise Unusable(f"the last message of {of_answer!r} is from {last['role']!r}, not from 'assistant'")
        if learn != "all" and not (last["content"] or "").strip() and not last.get("tool_calls"):
            raise Unusable(f"empty completion: {of_answer!r} is blank")
    tools = draft.tools if draft.tools is not None else record.get(columns.tools)
    tools = None if columns.tools in columns.ignore else check_tools(tools, columns.tools)
    masks = None if all(flags == (True,) for flags in learnt) else learnt
    return Chat(prompt, completions, name, masks, tools, _template_arguments(record, columns), label)


def _opened(record: JSON, messages: list[Message], columns: Columns) -> list[Message]:
    """Messages behind the system prompt of its own column; one that both have stands there once."""
    if columns.system in columns.ignore or not _says_something(record.get(columns.system)):
        return messages
    opening = _text_in(record, columns.system)
    if not messages or messages[0]["role"] not in ("system", "developer"):
        return [{"role": "system", "content": opening}, *messages]
    if messages[0]["content"] == opening:
        return messages
    raise Unusable(
        f"column {columns.system!r} says something else than the conversation's own system message; leave it "
        f"out with data.ignore=[{columns.system}]"
    )


def _as_messages(value: object, role: str, name: str, columns: Columns) -> list[Message]:
    if not isinstance(value, str):  # of ShareGPT's pairs one message
        return check_messages([value] if isinstance(value, dict) else value, name, columns.ignore)
    return [{"role": role, "content": check_json(value, name) if role == "user" else _check_completion(value, name)}]


def _check_completion(text: str, name: str) -> str:
    if not text.strip():
        raise Unusable(f"empty completion: {name!r} is blank")
    return check_json(text, name)


def _split(messages: list[Message], learn: str, name: str) -> Parts:
    """A conversation's messages before the first learnt one, those up to the last, and which of these are learnt.
    learn: see data.learn. Weights 0 and 1 of messages (OpenAI's) decide, where there are any. Raises Unusable."""
    if len(messages) < 2:
        raise Unusable(f"column {name!r} has one message; it needs a prompt and an answer")
    if learn != "all" and messages[-1]["role"] != "assistant":
        raise Unusable(
            f"{name!r} ends with a message of {messages[-1]['role']!r}, and no answer follows it: give it one, or end "
            "the conversation with the assistant's last message"
        )
    weights = [message.pop("weight", None) for message in messages]
    is_by_turn = learn == "assistant" or any(weight is not None for weight in weights)
    learnt = [
        (learn == "all" or (message["role"] == "assistant" if is_by_turn else message is messages[-1])) and weight != 0
        for message, weight in zip(messages, weights, strict=True)
    ]
    if not any(learnt):
        raise Unusable(f"nothing of {name!r} is learnt: every message that could be has weight 0")
    first, last = bounds_of(learnt)
    return messages[:first], (messages[first:last],), (tuple(learnt[first:last]),)


def bounds_of(flags: list[bool]) -> tuple[int, int]:
    """The bounds of a list from its first true flag to its last, as for a slice; there is one."""
    return flags.index(True), len(flags) - flags[::-1].index(True)


def _answers(draft: Draft, columns: Columns) -> Parts:
    """The messages of the prompt, those of each completion, and which of these are learnt: the model's. Of two whole
    conversations the common leading messages are the prompt, and a prompt's column has to be among them."""
    both = zip(draft.completions, draft.names, strict=True)
    answers = [_as_messages(answer, "assistant", name, columns) for answer, name in both]
    are_whole = answers and all(answer[0]["role"] != "assistant" for answer in answers)
    has_prompt = draft.prompt is not None and not (isinstance(draft.prompt, str) and are_whole)
    if has_prompt:
        prompt, first_learnt = _as_messages(draft.prompt, "user", "prompt", columns), 0
    else:
        prompt, first_learnt = _common_prompt(answers, draft, columns)
    rests, learnt = list[list[Message]](), list[tuple[bool, ...]]()
    for answer, name in zip(answers, draft.names, strict=True):
        start = 0 if has_prompt and answer[0]["role"] == "assistant" else len(prompt)
        if answer[:start] != prompt[:start] or len(answer) == start:
            raise Unusable(f"{name!r} has {len(answer)} messages that do not begin with the prompt")
        rests.append(answer[start:])
        learnt.append(tuple(m["role"] == "assistant" and i >= first_learnt for i, m in enumerate(rests[-1])))
    return prompt, tuple(rests), tuple(learnt)


def _common_prompt(answers: list[list[Message]], draft: Draft, columns: Columns) -> tuple[list[Message], int]:
    """The prompt of whole conversations, and how many messages behind it they have in common, which are not learnt."""
    shortest = min(map(len, answers)) - 1  # one message at least is left of each
    different = (i for i in range(shortest) if any(answer[i] != answers[0][i] for answer in answers))
    length = common = next(different, shortest)
    # A prompt is what a model is asked: the completions begin where an assistant speaks.
    while length and any(answer[length]["role"] != "assistant" for answer in answers):
        length -= 1
    prompt, question = answers[0][:length], draft.prompt.strip() if isinstance(draft.prompt, str) else ""
    if question and not any(question in str(message["content"]) for message in prompt):
        raise Unusable(f"column {columns.prompt!r} is not in the conversation of {draft.names[0]!r}")
    if not prompt:
        raise Unusable(f"{' and '.join(map(repr, draft.names))} have no first message in common: no prompt")
    return prompt, common - length


def _template_arguments(record: JSON, columns: Columns) -> JSON:
    value = record.get(TEMPLATE_ARGUMENTS)
    if TEMPLATE_ARGUMENTS in columns.ignore or not value:
        return {}
    value = _parsed(value, TEMPLATE_ARGUMENTS)
    if not isinstance(value, dict):
        raise Unusable(f"column {TEMPLATE_ARGUMENTS!r} is {name_of_type(value)}, not an object")
    return {name: item for name, item in value.items() if item is not None}


# ---- Columns that nothing reads

MEDIA_NAMES = re.compile(r"(^|_)(image|img|picture|photo|pixel|video|audio|speech|sound)s?($|_)", re.IGNORECASE)
MEDIA_FILES = re.compile(
    r"^data:(image|video|audio)/|^(iVBORw0KGgo|/9j/4|R0lGOD|UklGR)[\w+/]*=*$|"
    r"\.(png|jpe?g|webp|gif|bmp|tiff?|heic|avif|svg|mp4|mov|avi|mkv|webm|m4v|mpe?g|wav|mp3|m4a|aac|flac|opus|ogg|aiff?)"
    r"(\?\S*)?$",
    re.IGNORECASE,
)


def _says_something(value: object) -> bool:
    return bool(value.strip()) if isinstance(value, str) else value not in (None, [], {})


def _require_no_media(name: str, value: object) -> None:
    if _is_media(name, value):
        raise Unusable(f"column {name!r} holds media, which is not trained on: data.ignore=[{name}] leaves it out")


def unread_columns(record: JSON, columns: Columns, kind: RecordKind) -> list[str]:
    """The columns of a record that hold text, lists or objects, and that neither its format nor data.ignore names."""
    if _token_columns(record, kind) is not None or (reader := reader_of(_present(record), columns, kind)) is None:
        return []
    texts = {name: record[name] for name in reader.unread if name not in MEANINGFUL}
    return [name for name, text in texts.items() if isinstance(text, str | list | dict) and _says_something(text)]


def _is_media(name: str, value: object) -> bool:
    if isinstance(value, list):
        return any(_is_media(name, item) for item in value[:8])
    if isinstance(value, dict):  # a file's {path, bytes}, or a content part {type, url}
        kind = value.get("type")
        of_type = (isinstance(kind, str) and _is_media(kind, kind)) or "sampling_rate" in value  # a decoded sound
        return of_type or {*value} == {"bytes", "path"} or any(_is_media("", item) for item in value.values())
    is_file = isinstance(value, str) and MEDIA_FILES.search(value) is not None
    is_named = MEDIA_NAMES.search(name) is not None and not isinstance(value, int) and bool(value)  # image_id is none
    return isinstance(value, bytes) or is_file or is_named
