"""Formats of records, recognised by their columns: a record ➜ Tokens, Plain or Chat.

First what a record becomes, and its messages; then the published formats, each of which reads a Draft, the prompt and
answers wherever the record had them; then how drafts are checked. A record that fits no form raises Unusable with the
reason; the caller names the line.
"""

from __future__ import annotations

import functools
import json
import math
import re
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, NamedTuple, TypedDict, cast, get_args

from lib.config.settings import Column, DataSettings

RecordKind = Literal["preference", "unpaired", "sft", "prompt", "group"]
JSON = dict[str, Any]  # A record as its file has it: any columns


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
    columns: str  # What it was read from, for people
    label: bool | None = None  # Of unpaired feedback: whether the completion is desirable
    learnt: tuple[list[bool], ...] | None = None  # Of each completion's tokens, which are trained on; None for all
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
    """A conversation: the messages of the prompt, and for each completion the messages that follow it.

    A content is a string, or None beside tool_calls. The arguments of a call are an object, never JSON text.
    """

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
        return cls(*map(data.column, get_args(Column)), data.ignore, data.learn)

    @property
    def are_named(self) -> bool:
        """Whether the user named the column of a text: then no published format is guessed."""
        return self[:6] != self._fields[:6]


NAMES_OF_TYPES = {str: "a string", list: "a list", dict: "an object", bool: "a boolean", int: "a number"}


def name_of_type(value: object) -> str:
    """A JSON type in words."""
    return "null" if value is None else NAMES_OF_TYPES.get(type(value), f"a {type(value).__name__}")


# Who speaks, by the names that other formats have; capitals do not count.
ROLES = {
    **dict.fromkeys(("user", "human", "prompter", "customer", "question", "instruction"), "user"),
    **dict.fromkeys(("assistant", "gpt", "chatgpt", "model", "bot", "chatbot", "ai", "claude", "llm"), "assistant"),
    **dict.fromkeys(("bard", "bing", "answer", "response", "function_call", "tool_call"), "assistant"),
    **dict.fromkeys(("tool", "function", "observation", "ipython", "tool_result"), "tool"),
    **dict.fromkeys(("function_response", "tool_response"), "tool"),
    "system": "system",
    "developer": "developer",
}
CALLERS = ("function_call", "tool_call")  # ShareGPT's speakers whose text is a call


def check_json(value: Any, name: str, default: Any = None) -> Any:
    """The value, which templates write as text or JSON: parquet has bytes and dates, JSON half surrogate pairs."""
    try:
        (value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=default)).encode()
    except TypeError as error:
        raise Unusable(f"{name!r} has a value that JSON does not have: {error}") from error
    except UnicodeEncodeError as error:
        raise Unusable(f"{name!r} has half a surrogate pair") from error
    return value


def parse_json_text(text: str, name: str) -> Any:
    """What the JSON in a string says. Raises Unusable."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise Unusable(f"{name} is a string that is not JSON: {str(error).splitlines()[0]}") from None


def check_messages(value: object, name: str, ignore: Collection[str] = ()) -> list[Message]:
    """The messages of a column: roles by their usual names, contents strings. Raises Unusable."""
    if not isinstance(value, list):
        raise Unusable(f"column {name!r} is {name_of_type(value)}, not a string or a list of messages")
    if not value:
        raise Unusable(f"{name!r} is an empty list of messages")
    return [_message(message, f"{name}[{index}]", ignore) for index, message in enumerate(value)]


def _message(message: object, where: str, ignore: Collection[str]) -> Message:
    if not isinstance(message, dict):
        raise Unusable(f"{where} is {name_of_type(message)}, not a message {{role, content}}")
    # A file that was parquet once has null for each field that a message lacks; templates ask whether one is there.
    fields = {key: item for key, item in message.items() if item is not None and key not in ignore}
    if "role" not in fields and "from" in fields:  # ShareGPT's {from, value}
        fields = {"role": fields.pop("from"), "content": fields.pop("value", None)} | fields
        if fields["role"] in CALLERS and isinstance(fields["content"], str):
            calls = parse_json_text(fields.pop("content"), f"{where}.value")
            fields["tool_calls"] = calls if isinstance(calls, list) else [calls]
    if not isinstance(name := fields.pop("role", None), str):
        raise Unusable(f"{where} has no 'role' and 'content' (it has: {', '.join(map(str, message))})")
    if (role := ROLES.get(name.strip().lower())) is None:
        known = "system, developer, user, assistant, tool"
        raise Unusable(f"{where} has the unknown role {name!r}; call it one of {known}")
    if "function_call" in fields:  # OpenAI's, before tools
        fields["tool_calls"] = [{"type": "function", "function": fields.pop("function_call")}]
    calls = _check_calls(fields.pop("tool_calls", None), f"{where}.tool_calls")
    content = fields.pop("content", None)
    if isinstance(content, list):
        content = "".join(_text_of_part(part, f"{where}.content[{i}]") for i, part in enumerate(content))
    if content is None and not calls:
        raise Unusable(f"{where} has no content and no tool_calls (it has: {', '.join(map(str, message))})")
    if content is not None and not isinstance(content, str):
        raise Unusable(f"{where}.content is {name_of_type(content)}, not a string")
    for other in {"train", "training", "loss_weight"} & fields.keys():  # axolotl's and LLaMA-Factory's names
        fields["weight"] = fields.pop(other)
    if fields.get("weight", 1) not in (0, 1):
        raise Unusable(f"{where}.weight is {json.dumps(fields['weight'], default=str)}, not 0 or 1")
    check_json([content, fields], where, default=str)
    head: JSON = {"role": role, "content": content}
    return cast(Message, head | ({"tool_calls": calls} if calls else {}) | fields)


def _text_of_part(part: object, where: str) -> str:
    kind, text = (part.get("type"), part.get("text")) if isinstance(part, dict) else (name_of_type(part), None)
    if kind not in ("text", "input_text", "output_text") or not isinstance(text, str):
        raise Unusable(f"{where} is of type {kind!r}, and only text is trained on")
    return text


def _functions(value: object, where: str, what: str) -> Iterator[tuple[str, JSON, JSON]]:
    """Place, whole and function {name, ...} of calls or definitions: in a list, or the JSON text of one."""
    value = parse_json_text(value, where) if isinstance(value, str) and value.strip() else value
    if value and not isinstance(value, list | str):
        raise Unusable(f"{where} is {name_of_type(value)}, not a list of {what}")
    for index, item in enumerate(value if isinstance(value, list) else ()):
        place = f"{where}[{index}]"
        item = parse_json_text(item, place) if isinstance(item, str) and what == "tools" else item
        function = item.get("function", item) if isinstance(item, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise Unusable(f"{place} has no function with a name")
        yield place, item, function


def _check_calls(value: object, where: str) -> list[JSON]:
    """Tool calls with a name and an object of arguments each."""
    calls = []
    for place, call, function in _functions(value, where, "calls"):
        arguments = function.get("arguments")
        if isinstance(arguments, str):
            arguments = parse_json_text(arguments.strip() or "{}", f"{place}.arguments")
        arguments = {} if arguments is None else arguments
        if not isinstance(arguments, dict):
            raise Unusable(f"{place}.arguments is {name_of_type(arguments)}, not an object")
        others = {} if function is call else {key: item for key, item in call.items() if item is not None}
        calls.append(others | {"type": "function", "function": {**function, "arguments": arguments}})
    return cast(list[JSON], check_json(calls, where))


def check_tools(value: object, name: str) -> list[JSON] | None:
    """The definitions of tools, a list or its JSON text, as OpenAI has them; None for none. Raises Unusable."""
    tools = []
    for _, tool, function in _functions(value, name, "tools"):
        tools.append(_without_nulls({"type": "function", "function": tool} if function is tool else tool))
    return check_json(tools, name) or None


def _without_nulls(schema: Any) -> Any:
    """A JSON Schema without the keywords that are null, but for those whose value is data."""
    if isinstance(schema, list):
        return [_without_nulls(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    kept = {key: item for key, item in schema.items() if item is not None or key in ("default", "const")}
    data = ("default", "const", "enum", "examples")
    return {key: item if key in data else _without_nulls(item) for key, item in kept.items()}


# ---- What a format reads of a record


class Draft(NamedTuple):
    """What a record says, unchecked. A value that is a list is a list of messages."""

    prompt: object  # a string or messages; None: all of it is in `completions`
    completions: tuple[Any, ...]  # One answer, or the better and the worse one
    names: tuple[str, ...]  # The column of each completion, for errors
    tools: object = None
    is_text: bool = False  # All of it is learnt: there is no prompt, and no conversation


class Format(NamedTuple):
    """How records with these columns are read."""

    name: str  # Of a published format; empty for columns that data.columns names.
    has: Literal["pair", "answer", "label", "prompt"]
    needs: tuple[str, ...]
    read: Callable[[JSON], Draft]  # Raises Unusable
    uses: tuple[str, ...] = ()  # Columns that it reads besides, where they are there


# ---- Published formats


def transcript(text: Any) -> Any:
    """Anthropic's "\\n\\nHuman: ... \\n\\nAssistant: ..." as messages; anything else as it is."""
    if not isinstance(text, str) or not text.startswith("\n\nHuman:") or "\n\nAssistant:" not in text:
        return text
    return _turns(re.split(r"\n\n(Human|Assistant):", text)[1:])


def _nvidia_turns(text: Any) -> Any:
    """HelpSteer's turns, between lines "<extra_id_1>Assistant" and "<extra_id_1>User", as messages."""
    if not isinstance(text, str) or "<extra_id_1>" not in text:
        return text
    return _turns(["User", *re.split(r"\n?<extra_id_1>(User|Assistant)\n", text)])


def _turns(pieces: list[str]) -> list[JSON]:
    """Messages of speaker, text, speaker, text, ...; without an assistant's turn at the end that is empty."""
    turns = [
        {"role": "assistant" if speaker == "Assistant" else "user", "content": said.strip()}
        for speaker, said in zip(pieces[::2], pieces[1::2], strict=True)
    ]
    return turns[:-1] if turns[-1] == {"role": "assistant", "content": ""} else turns


def _ranked(prompt: str, column: str, text: str, score: str, sign: int) -> Callable[[JSON], Draft]:
    """A list of answers with a number each, higher (sign 1) or lower (-1) for better ones."""

    def read(record: JSON) -> Draft:
        items = record[column] if isinstance(record[column], list) else []
        items = [item for item in items if isinstance(item, dict) and item.get(text) is not None]
        ranked = sorted((item for item in items if _is_finite(item.get(score))), key=lambda item: -sign * item[score])
        if not ranked or ranked[0][score] == ranked[-1][score]:
            raise Unusable(f"{column!r} has no two answers with another {score}: nothing to prefer")
        worst = next(item for item in ranked if item[score] == ranked[-1][score])
        return Draft(transcript(record[prompt]), (ranked[0][text], worst[text]), (f"{column}.{text}",) * 2)

    return read


def _preferred(name: str, prompt: str, first: str, second: str, column: str, of_first: tuple[int, ...] = ()) -> Format:
    """Two answers and a number: which is better. of_first: the numbers of the first and the second; () for the sign."""

    def read(record: JSON) -> Draft:
        number = record[column]
        if not _is_finite(number) or (number not in of_first if of_first else number == 0):
            raise Unusable(f"column {column!r} is {number!r}, which prefers neither: nothing to prefer")
        is_first = number == of_first[0] if of_first else number < 0
        return _behind(prompt, *((first, second) if is_first else (second, first)))(record)

    return Format(name, "pair", (prompt, first, second, column), read)


def _is_finite(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _behind(prompt: str, *names: str, turns: Callable[[Any], Any] = _nvidia_turns) -> Callable[[JSON], Draft]:
    """Answers to a prompt's column."""
    return lambda record: Draft(turns(record[prompt]), tuple(record[name] for name in names), names)


def _conversation_in(name: str) -> Callable[[JSON], Draft]:
    return lambda record: Draft(None, (record[name],), (name,))


def _openai_preference(record: JSON) -> Draft:
    given, names = record["input"], OUTPUTS[1:]
    if not isinstance(given, dict) or given.get("messages") is None:
        raise Unusable("column 'input' is not an object with messages")
    tools = given.get("tools") or record.get("tools")
    return Draft(given["messages"], (record[names[0]], record[names[1]]), names, tools)


def _sharegpt_pair(record: JSON) -> Draft:
    """Each answer is one message {from, value}."""
    answers = tuple([record[name]] if isinstance(record[name], dict) else record[name] for name in PAIR)
    return Draft(record["conversations"], answers, PAIR)


def _alpaca(*names: str) -> Callable[[JSON], Draft]:
    """The instruction, and on a new line its input; before it the history (LLaMA-Factory, data/README.md)."""

    def read(record: JSON) -> Draft:
        asked, answers = _both(record, "instruction", "input", "\n"), tuple(record[name] for name in names)
        history = record.get("history") or []
        if not isinstance(history, list) or not all(isinstance(turn, list) and len(turn) == 2 for turn in history):
            raise Unusable("column 'history' is not a list of [question, answer]")
        if not history:
            return Draft(asked, answers, names)
        messages = [*_messages_of(history), {"role": "user", "content": asked}]
        if len(names) > 1:
            return Draft(messages, answers, names)
        return Draft(None, ([*messages, {"role": "assistant", "content": answers[0]}],), names)

    return read


def _capybara(record: JSON) -> Draft:
    """A conversation of {input, output} turns; also one of messages."""
    turns = record["conversation"]
    if isinstance(turns, list) and all(isinstance(turn, dict) and "input" in turn for turn in turns):
        turns = _messages_of([(turn["input"], turn.get("output")) for turn in turns])
    return Draft(None, (turns,), ("conversation",))


def _dolly(record: JSON) -> Draft:
    return Draft(_both(record, "instruction", "context", "\n\n"), (record["response"],), ("response",))


def _both(record: JSON, first: str, second: str, between: str) -> Any:
    """The text of a column, with that of a second one behind it where it says anything."""
    if not record.get(second):
        return record[first]
    texts = [_text_in(record, name) for name in (first, second)]
    return between.join(texts) if texts[1].strip() else texts[0]


def _text_in(record: JSON, name: str) -> str:
    if not isinstance(record[name], str):
        raise Unusable(f"column {name!r} is {name_of_type(record[name])}, not a string")
    return str(check_json(record[name], name))


def _messages_of(turns: list[Any]) -> list[JSON]:
    pairs = [(("user", question), ("assistant", answer)) for question, answer in turns]
    return [{"role": role, "content": text} for pair in pairs for role, text in pair]


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
    Format("ShareGPT pairs", "pair", ("conversations", *PAIR), _sharegpt_pair),
    Format("orca_dpo_pairs", "pair", ("question", *PAIR), _behind("question", *PAIR)),
    Format("Alpaca pairs", "pair", ("instruction", *PAIR), _alpaca(*PAIR), ALPACA),
    Format("distilabel pairs", "pair", ("input", *PAIR), _behind("input", *PAIR)),
    Format("Alpaca KTO", "label", ("instruction", "output", LABEL), _alpaca("output"), ALPACA),
    Format("ShareGPT KTO", "label", ("conversations", LABEL), _conversation_in("conversations")),
    Format("OpenAI messages KTO", "label", ("messages", LABEL), _conversation_in("messages")),
    Format("ShareGPT", "answer", ("conversations",), _conversation_in("conversations")),
    Format("Capybara, LMSYS-Chat", "answer", ("conversation",), _capybara),
    Format("Alpaca", "answer", ("instruction", "output"), _alpaca("output"), ALPACA),
    Format("Dolly", "answer", ("instruction", "response"), _dolly, ("context",)),
    Format("HelpSteer", "answer", ("prompt", "response", "helpfulness"), _behind("prompt", "response")),
)


# ---- Which format a record has

# Columns that mean something where no format reads them, and the setting that does, if one does.
MEANINGFUL = {
    "system": None,
    "system_prompt": "data.columns={system: system_prompt}",
    "tools": None,
    "functions": "data.columns={tools: functions}",
    "label": "train.loss=kto",
    LABEL: "train.loss=kto",
    **dict.fromkeys(("input", "weight", "history", "context", "images", "image")),
}
TEMPLATE_ARGUMENTS = "chat_template_kwargs"  # column of further arguments of the chat template


def _candidates(there: frozenset[str], columns: Columns, kind: RecordKind) -> Iterator[Format]:
    """The formats that may be meant by these columns, the likeliest first."""
    prompt, chosen, rejected, completion, messages, text = columns[:6]

    def form(has: Any, asked: str, *names: str) -> Format:
        turns: Callable[[Any], Any] = (lambda text: text) if columns.are_named else transcript
        return Format("", has, (asked, *names), _behind(asked, *names, turns=turns))

    def whole(*names: str) -> Format:
        """Answers that are a whole conversation each: messages, or a transcript."""

        def read(record: JSON) -> Draft:
            answers = tuple(transcript(record[name]) for name in names)
            if any(isinstance(answer, str) for answer in answers):
                raise Unusable(_missing(record, columns, "preference", (prompt,)))
            return Draft(None, answers, names)

        return Format("", "pair", names, read)

    ours = [form("answer", prompt, completion), form("answer", messages, completion)]
    if completion not in there:
        ours = [Format("", "answer", (messages,), _conversation_in(messages))]
    published = () if columns.are_named else PUBLISHED
    pairs, answers, labels = ([known for known in published if known.has == has] for has in ("pair", "answer", "label"))
    if kind == "preference":
        yield from (form("pair", prompt, chosen, rejected), *pairs, whole(chosen, rejected))
    elif kind == "unpaired":
        yield from (*ours, *answers) if columns.label in there else labels
    elif kind == "prompt":
        fit = [known for known in (*pairs, *answers, *labels) if there.issuperset(known.needs)][:1]
        reads_prompt = any(prompt in known.needs for known in fit)
        yield from (*fit, *ours) if reads_prompt else (form("prompt", prompt), *fit, *ours)
        yield whole(chosen, rejected)
    else:
        yield from ours
        if completion not in there:
            plain = Format("", "answer", (text,), lambda r: Draft(None, (_text_in(r, text),), ("text",), is_text=True))
            yield from (*pairs, *answers, plain, form("pair", prompt, chosen), whole(chosen))


class Reader(NamedTuple):
    """How records that have the same columns are read."""

    name: str  # For people: `prompt + chosen + rejected`, or `Alpaca (instruction, input, output)`
    form: Format
    lost: tuple[str, ...]  # Columns that mean something and that nothing reads
    is_chat: bool  # Whether a system prompt, tools or template arguments make a conversation of any text
    unread: tuple[str, ...]  # Other columns, which nothing reads and data.ignore does not name


@functools.lru_cache(4096)
def reader_of(names: tuple[str, ...], columns: Columns, kind: RecordKind) -> Reader | None:
    """How records are read that have values in these columns; None where they cannot be."""
    there = frozenset(names)
    form = next((form for form in _candidates(there, columns, kind) if there.issuperset(form.needs)), None)
    if form is None:
        return None
    used = (*form.needs, *(name for name in form.uses if name in there))
    is_half = kind == "sft" and form.has == "pair"
    if is_half and not form.name:
        used = form.needs[-1:]
    if kind == "unpaired" and form.has == "answer":
        used = (*used, columns.label)
    is_text = form.needs == (columns.text,) and kind == "sft"
    beside = () if is_text else (columns.system, columns.tools, TEMPLATE_ARGUMENTS)
    extras = tuple(name for name in beside if name in there and name not in (*used, *columns.ignore))
    lost = there & MEANINGFUL.keys() - {*used, *extras, *columns.ignore}
    if kind == "prompt":
        lost -= {columns.label, LABEL, "weight"}
    title = f"{form.name} ({', '.join((*used, *extras))})" if form.name else " + ".join((*used, *extras))
    title += " (preference records: the other completion is not used)" * is_half
    known = {*form.needs, *used, *extras, *columns.ignore, *MEANINGFUL, VOCABULARY, *[columns.rejected] * is_half}
    return Reader(title, form, tuple(sorted(lost)), bool(extras), tuple(name for name in names if name not in known))


def _names_there(record: JSON) -> tuple[str, ...]:
    return tuple([name for name, value in record.items() if value is not None])


WANTED: dict[str, tuple[str, ...]] = {
    "preference": ("chosen", "rejected", "prompt"),
    "unpaired": ("label", "completion", "prompt"),
    "sft": ("completion", "prompt"),
    "prompt": ("prompt",),
}


def _missing(record: JSON, columns: Columns, kind: RecordKind, wanted: tuple[str, ...] = ()) -> str:
    """Names the columns that are absent, those that are there, and what to type."""
    names = {role: getattr(columns, role) for role in WANTED[kind]}
    if null := next((name for name in names.values() if name in record and record[name] is None), None):
        return f"column {null!r} is null"
    absent = {role: name for role, name in names.items() if name not in record or name in wanted}
    others = f" or {columns.messages!r} or {columns.text!r}" if kind == "sft" and "completion" in absent else ""
    why = f"no column {next(iter(absent.values()))!r}{others} (columns: {', '.join(map(str, record)) or 'none'})"
    present = _names_there(record)
    if kind == "preference" and {columns.label, LABEL} & set(present):
        return f"{why}; labelled answers are not pairs: train.loss=kto"
    if kind == "preference" and (other := reader_of(present, columns, "sft")) and other.form.has == "answer":
        return f"{why}; {other.form.name or 'this'} has one answer a record, not a pair: train.loss=sft"
    return f"{why}; name yours with data.columns={{{', '.join(f'{role}: COLUMN' for role in absent)}}}"


# ---- A record's form


def parse(record: JSON, settings: DataSettings, kind: RecordKind) -> Record:
    """The record's prompt and completions: (chosen, rejected), one for SFT or a label, none for a prompt.

    The first form wins: token ids; prompt and completion; messages; a published format; text; for SFT a pair's better.
    """
    columns = Columns.of(settings)
    if (names := _token_columns(record, kind)) is not None:
        tokens = _parse_tokens(record, names)
        return tokens if kind != "unpaired" else replace(tokens, label=_label(record, columns.label))
    reader = reader_of(_names_there(record), columns, kind)
    if reader is None:
        raise Unusable(_missing(record, columns, kind))
    for name in filter(lambda name: _says_something(record[name]), reader.lost):
        meant = f"set {MEANINGFUL[name]}, or " if MEANINGFUL[name] else ""
        raise Unusable(
            f"column {name!r} would be lost: {reader.name} does not read it; {meant}leave it out with "
            f"data.ignore=[{name}]"
        )
    for name in filter(lambda name: _is_media(name, record[name]), reader.unread):
        raise Unusable(f"column {name!r} holds media, which is not trained on: data.ignore=[{name}] leaves it out")
    draft, label = reader.form.read(record), None
    if kind == "unpaired":
        label = _label(record, columns.label if columns.label in record else LABEL)
    if len(draft.completions) == 2 and draft.completions[0] == draft.completions[1]:
        raise Unusable(f"{draft.names[0]!r} is equal to {draft.names[1]!r}: nothing to prefer")
    if kind == "prompt" and draft.prompt is not None:
        draft = draft._replace(completions=(), names=())
    if kind == "sft":  # of a pair the better one
        draft = draft._replace(completions=draft.completions[:1], names=draft.names[:1])
    is_plain = draft.is_text or isinstance(draft.prompt, str)
    if is_plain and not reader.is_chat and all(isinstance(text, str) for text in draft.completions):
        prompt = check_json(draft.prompt, "prompt") if isinstance(draft.prompt, str) else None
        return Plain(prompt, tuple(map(_check_completion, draft.completions, draft.names)), reader.name, label)
    return _chat(draft, record, reader.name, columns, kind, label)


def rows_of(record: JSON | Unusable, settings: DataSettings, kind: RecordKind) -> Sequence[Record | Unusable]:
    """The form of each row that a record gives, or why it has none.

    It gives one; of a pair two, where labels are wanted: chosen is desirable, rejected is not.
    """
    try:
        if isinstance(record, Unusable):
            return [record]
        if kind != "unpaired" or settings.column("label") in record or not _is_pair(record, Columns.of(settings)):
            return [parse(record, settings, kind)]
        pair = parse(record, settings, "preference")
    except Unusable as why:
        return [why]
    title = f"{pair.columns} (each pair gives two rows: chosen is desirable, rejected is not)"
    rows: list[Record] = []
    for k, label in enumerate((True, False)):
        parts: JSON = {"completions": pair.completions[k : k + 1], "columns": title, "label": label}
        if not isinstance(pair, Plain) and pair.learnt is not None:
            parts["learnt"] = pair.learnt[k : k + 1]
        rows.append(replace(pair, **parts))
    return rows


def _is_pair(record: JSON, columns: Columns) -> bool:
    """Whether a record has two answers, and nothing that is read as one with a label."""
    there = _names_there(record)
    is_known = [reader_of(there, columns, kind) is not None for kind in ("unpaired", "preference")]
    return {"chosen_ids", "rejected_ids"} <= set(there) or is_known == [False, True]


def _token_columns(record: JSON, kind: RecordKind) -> tuple[str, ...] | None:
    """The columns of a tokenised record's completions; None where it is none."""
    if kind == "preference" and ("chosen_ids" in record or "rejected_ids" in record):
        return ("chosen_ids", "rejected_ids")
    if kind in ("sft", "unpaired") and "completion_ids" in record:
        return ("completion_ids",)
    if kind == "sft" and "chosen_ids" in record:
        return ("chosen_ids",)
    return () if kind == "prompt" and "prompt_ids" in record else None


def _parse_tokens(record: JSON, names: tuple[str, ...]) -> Tokens:
    title, learnt = " + ".join(("prompt_ids", *names)), []
    for name in ("prompt_ids", *names):
        ids, of_mask = record.get(name), name.replace("_ids", "_mask")
        if not isinstance(ids, list):
            why = f"column {name!r} is {name_of_type(ids)}, not a list of token ids"
            raise Unusable(why if name in record else f"no column {name!r}")
        for index, token in enumerate(ids):
            if type(token) is not int or token < 0:
                raise Unusable(f"{name}[{index}] is {json.dumps(token, default=str)}, not a token id")
        if name == "prompt_ids":
            continue
        if not ids:
            raise Unusable(f"empty completion: {name!r} has no tokens")
        mask = record.get(of_mask)
        title += "" if mask is None else f" + {of_mask}"
        mask = [1] * len(ids) if mask is None else mask
        if not isinstance(mask, list) or len(mask) != len(ids) or not {0, 1}.issuperset(mask) or 1 not in mask:
            raise Unusable(f"{of_mask} is not a list of 0 and 1, one for each of {name}, with a 1 for what is learnt")
        learnt.append([*map(bool, mask)])
    masks = None if all(map(all, learnt)) else tuple(learnt)
    completions, vocabulary = tuple(record[name] for name in names), str(record.get(VOCABULARY) or "")
    return Tokens(record["prompt_ids"], completions, title, learnt=masks, vocabulary=vocabulary)


def _label(record: JSON, column: str) -> bool:
    """Whether a completion is desirable. Raises Unusable."""
    if column not in record:
        raise Unusable(f"no column {column!r}; name yours with data.columns={{label: COLUMN}}")
    if record[column] not in (True, False):  # 1 and 0, too
        raise Unusable(f"column {column!r} is {json.dumps(record[column], default=str)}, not true or false")
    return bool(record[column])


# ---- Conversations

Learnt = tuple[tuple[bool, ...], ...]  # of each completion's messages, which are learnt


def _chat(draft: Draft, record: JSON, name: str, columns: Columns, kind: RecordKind, label: bool | None) -> Chat:
    """A draft as messages."""
    completions: tuple[list[Message], ...] = ()
    learnt: Learnt = ()
    if not draft.completions:
        prompt = _opened(record, _as_messages(draft.prompt, "user", "prompt", columns), columns)
    elif len(draft.completions) == 1 and draft.prompt is None:
        prompt = _opened(record, check_messages(draft.completions[0], draft.names[0], columns.ignore), columns)
        if kind != "prompt":
            prompt, completions, learnt = _split(prompt, columns.learn if kind == "sft" else "last", draft.names[0])
        elif prompt[-1]["role"] == "assistant" and len(prompt) > 1:
            prompt = prompt[:-1]
    else:
        prompt, completions, learnt = _answers(draft, columns)
        if any("weight" in message for part in (prompt, *completions) for message in part):
            raise Unusable("'weight' of a message is for SFT on conversations; leave it out with data.ignore=[weight]")
        prompt = _opened(record, prompt, columns)
        completions, learnt = ((), ()) if kind == "prompt" else (completions, learnt)
    for answer, of_answer in zip(completions, draft.names, strict=False):
        if prompt and prompt[-1]["role"] == answer[0]["role"] == "assistant":
            raise Unusable("the prompt ends with an assistant message; it has to end before the answer")
        last = answer[-1]
        if columns.learn == "all" and kind == "sft":
            continue
        if last["role"] != "assistant":
            raise Unusable(f"the last message of {of_answer!r} is from {last['role']!r}, not from 'assistant'")
        if not (last["content"] or "").strip() and not last.get("tool_calls"):
            raise Unusable(f"empty completion: {of_answer!r} is blank")
    tools = draft.tools if draft.tools is not None else record.get(columns.tools)
    tools = None if columns.tools in columns.ignore else check_tools(tools, columns.tools)
    masks = None if all(flags == (True,) for flags in learnt) else learnt
    return Chat(prompt, completions, name, masks, tools, _template_arguments(record, columns), label)


def _opened(record: JSON, messages: list[Message], columns: Columns) -> list[Message]:
    """Messages behind the system prompt of its own column; one that both have stands there once."""
    system = record.get(columns.system)
    if columns.system in columns.ignore or not _says_something(system):
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
    if not isinstance(value, str):
        return check_messages(value, name, columns.ignore)
    return [{"role": role, "content": check_json(value, name) if role == "user" else _check_completion(value, name)}]


def _check_completion(text: str, name: str) -> str:
    if not text.strip():
        raise Unusable(f"empty completion: {name!r} is blank")
    return str(check_json(text, name))


def _split(messages: list[Message], learn: str, name: str) -> tuple[list[Message], tuple[list[Message], ...], Learnt]:
    """A conversation's messages before the first learnt one, those up to the last, and which of these are learnt.

    learn: see data.learn. Weights 0 and 1 of messages (OpenAI's) decide, where there are any. Raises Unusable.
    """
    if len(messages) < 2:
        raise Unusable(f"column {name!r} has one message; it needs a prompt and an answer")
    if learn != "all" and messages[-1]["role"] != "assistant":
        raise Unusable(
            f"{name!r} ends with a message of {messages[-1]['role']!r}, and no answer follows it: give it one, or end "
            "the conversation with the assistant's last message"
        )
    bare: list[Any] = [{key: item for key, item in message.items() if key != "weight"} for message in messages]
    weights: list[Any] = [message.get("weight") for message in messages]
    by_role = learn == "assistant" or any(weight is not None for weight in weights)
    learnt = [
        weight != 0 and (learn == "all" or (message["role"] == "assistant" if by_role else i == len(bare) - 1))
        for i, (message, weight) in enumerate(zip(bare, weights, strict=True))
    ]
    if not any(learnt):
        raise Unusable(f"nothing of {name!r} is learnt: every message that could be has weight 0")
    first, last = learnt.index(True), len(learnt) - learnt[::-1].index(True)
    return bare[:first], (bare[first:last],), (tuple(learnt[first:last]),)


def _answers(draft: Draft, columns: Columns) -> tuple[list[Message], tuple[list[Message], ...], Learnt]:
    """The messages of the prompt, those of each completion, and which of these are learnt: the model's.

    Of two whole conversations the common leading messages are the prompt, and a prompt's column has to be among them.
    """
    both = zip(draft.completions, draft.names, strict=True)
    answers, common = [_as_messages(said, "assistant", name, columns) for said, name in both], 0
    are_whole = all(answer[0]["role"] != "assistant" for answer in answers)
    if draft.prompt is None or isinstance(draft.prompt, str) and are_whole:
        shortest = min(map(len, answers)) - 1  # one message at least is left of each
        alike = [all(answer[i] == answers[0][i] for answer in answers) for i in range(shortest)]
        length = common = alike.index(False) if False in alike else shortest
        # A prompt is what a model is asked: the completions begin where an assistant speaks.
        while length and any(answer[length]["role"] != "assistant" for answer in answers):
            length -= 1
        common, prompt = common - length, answers[0][:length]
        asked = draft.prompt.strip() if isinstance(draft.prompt, str) else ""
        if asked and not any(asked in str(message["content"]) for message in prompt):
            raise Unusable(f"column {columns.prompt!r} is not in the conversation of {draft.names[0]!r}")
        if not prompt:
            raise Unusable(f"{' and '.join(map(repr, draft.names))} have no first message in common: no prompt")
        rests = [answer[length:] for answer in answers]
    else:
        prompt, rests = _as_messages(draft.prompt, "user", "prompt", columns), []
        for answer, name in zip(answers, draft.names, strict=True):
            start = len(prompt) if answer[0]["role"] != "assistant" else 0
            if answer[:start] != prompt[:start] or len(answer) == start:
                raise Unusable(f"{name!r} has {len(answer)} messages that do not begin with the prompt")
            rests.append(answer[start:])
    learnt = [tuple(m["role"] == "assistant" and i >= common for i, m in enumerate(rest)) for rest in rests]
    return prompt, tuple(rests), tuple(learnt)


def _template_arguments(record: JSON, columns: Columns) -> JSON:
    value = record.get(TEMPLATE_ARGUMENTS)
    if TEMPLATE_ARGUMENTS in columns.ignore or not value:
        return {}
    value = parse_json_text(value, TEMPLATE_ARGUMENTS) if isinstance(value, str) else value
    if not isinstance(value, dict):
        raise Unusable(f"column {TEMPLATE_ARGUMENTS!r} is {name_of_type(value)}, not an object")
    return {name: item for name, item in value.items() if item is not None}


def _says_something(value: object) -> bool:
    return bool(value.strip()) if isinstance(value, str) else value is not None and value != [] and value != {}


# ---- Columns that nothing reads

MEDIA_NAMES = re.compile(r"^(image|img|picture|photo|video|audio|speech|sound)s?($|_)", re.IGNORECASE)
MEDIA_FILES = re.compile(
    r"\.(png|jpe?g|webp|gif|bmp|tiff?|heic|mp4|mov|avi|mkv|webm|wav|mp3|m4a|flac|opus|ogg)$", re.IGNORECASE
)


def unread_columns(record: JSON, settings: DataSettings, kind: RecordKind) -> list[str]:
    """The columns of a record that hold text, lists or objects, and that neither its format nor data.ignore names."""
    is_tokenised = _token_columns(record, kind) is not None
    reader = None if is_tokenised else reader_of(_names_there(record), Columns.of(settings), kind)
    unread = reader.unread if reader else ()
    return [name for name in unread if isinstance(record[name], str | list | dict) and _says_something(record[name])]


def _is_media(name: str, value: object) -> bool:
    if isinstance(value, list):
        return bool(value) and _is_media(name, value[0])
    if isinstance(value, dict):  # a file's {path, bytes}, or a content part {type, url}
        kind = value.get("type")
        return any(_is_media("", item) for item in value.values()) or (isinstance(kind, str) and _is_media(kind, 1))
    is_file = isinstance(value, str) and MEDIA_FILES.search(value) is not None
    return isinstance(value, bytes) or is_file or (MEDIA_NAMES.match(name) is not None and bool(value))
