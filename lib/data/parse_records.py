"""One record ➜ its prompt and completions, not yet tokenised; or why it cannot be used.

How a record is read follows from its columns, and is found once for each set of them: our own columns first, then the
published formats (known_formats.py). A column that means something and would be lost makes the record unusable, unless
data.ignore names it.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import NamedTuple

from lib.config.schema import DataSettings
from lib.data import known_formats
from lib.data.known_formats import Draft, Has, is_transcript, transcript
from lib.data.messages import (
    check_answer,
    check_completion,
    check_messages,
    check_tools,
    check_unicode,
    learnt_part,
    parse_json_text,
)
from lib.data.record_formats import JSON, Chat, Columns, Message, Plain, RecordKind, Tokens, Unusable, name_of_type

# What other data sets call our columns: only used to suggest the setting in an error.
OTHER_NAMES = {
    "prompt": ("question", "instruction", "input", "query", "problem", "context"),
    "chosen": ("preferred", "response_chosen", "answer_chosen", "better", "accepted", "positive"),
    "rejected": ("dispreferred", "response_rejected", "answer_rejected", "worse", "negative"),
    "completion": ("answer", "response", "output", "solution", "target"),
    "messages": ("dialogue", "dialog", "chat", "turns"),
    "text": ("content", "document"),
    "label": ("rating", "feedback", "is_good", "desirable", "thumbs_up"),
}
# The word that gives a column its meaning, where it would be lost.
MEANT_BY = {
    "system_prompt": "data.system=system_prompt",
    "functions": "data.tools=functions",
    "label": "train.loss=kto",
    "kto_tag": "train.loss=kto",
}
# What a conversation's columns say besides it.
TEMPLATE_ARGUMENTS = "chat_template_kwargs"


class Reader(NamedTuple):
    """How records that have the same columns are read."""

    name: str
    """For people: `prompt + chosen + rejected`, or `Alpaca (instruction, input, output)`."""
    read: Callable[[JSON], Draft]
    lost: tuple[str, ...] = ()
    """Columns that mean something and that nothing reads."""
    is_chat: bool = False
    """Whether a system prompt, tools or template arguments make a conversation of any text."""


def parse(record: JSON, settings: DataSettings, kind: RecordKind) -> Tokens | Plain | Chat:
    """The record's prompt and completions: two for preferences (chosen, rejected), one for SFT, none for a prompt.

    Unpaired feedback is one completion with its label. Raises Unusable. Of several forms in one record the first
    wins: token ids; prompt and completion; messages; a published format; text; and for SFT the better answer of a pair.
    """
    columns, readers = _readers(settings, kind)
    if (names := _token_columns(record, kind)) is not None:
        tokens = _parse_tokens(record, names)
        return tokens if kind != "unpaired" else replace(tokens, label=_label(record.get(columns.label)))
    present = tuple([name for name, value in record.items() if value is not None])
    if present not in readers:
        readers[present] = _reader(frozenset(present), columns, kind)
    reader = readers[present]
    if reader is None:
        raise Unusable(_missing(record, columns, kind))
    for name in reader.lost:
        if _says_something(record[name]):
            meant = f"set {MEANT_BY[name]}, or " if name in MEANT_BY else ""
            raise Unusable(
                f"column {name!r} would be lost: {reader.name} does not read it; {meant}leave it out with "
                f"data.ignore=[{name}]"
            )
    draft = reader.read(record)
    label = None
    if kind == "unpaired":
        label = _label(draft.label if draft.label is not None else record.get(columns.label))
    if len(draft.completions) == 2 and draft.completions[0] == draft.completions[1]:
        raise Unusable(f"{draft.names[0]!r} is equal to {draft.names[1]!r}: nothing to prefer")
    if not reader.is_chat and (plain := _plain(draft, reader.name, label)):
        return plain
    return _chat(draft, record, reader, columns, kind, label)


def is_pair(record: JSON, settings: DataSettings) -> bool:
    """Whether the columns of a record are a pair's, and none is a label."""
    columns, there = Columns.of(settings), frozenset(name for name, value in record.items() if value is not None)
    has_label = columns.label in there or _find(there, columns, "unpaired") is not None
    return not has_label and _find(there, columns, "preference") is not None


def _plain(draft: Draft, name: str, label: bool | None) -> Plain | None:
    """A draft that is strings alone."""
    prompt, texts = draft.prompt, [text for text in draft.completions if type(text) is str]
    if len(texts) < len(draft.completions) or draft.history:
        return None
    if type(prompt) is str:
        return Plain(check_unicode(prompt, "prompt"), tuple(map(check_completion, texts, draft.names)), name, label)
    return Plain(None, tuple(map(check_completion, texts, draft.names)), name, label) if draft.is_text else None


Readers = dict[tuple[str, ...], "Reader | None"]
_kept: dict[tuple[int, RecordKind], tuple[DataSettings, Columns, Readers]] = {}


def _readers(settings: DataSettings, kind: RecordKind) -> tuple[Columns, Readers]:
    """How records were read so far, by the columns that they have, under these settings."""
    kept = _kept.get((id(settings), kind))
    if kept is None or kept[0] is not settings:
        if len(_kept) >= 64:
            _kept.clear()
        kept = _kept[id(settings), kind] = settings, Columns.of(settings), {}
    if len(kept[2]) > 4096:  # every record has other columns
        kept[2].clear()
    return kept[1], kept[2]


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
    for name in ("prompt_ids", *names):
        ids = record.get(name)
        if ids is None:
            raise Unusable(f"no column {name!r} (columns: {_list(record)})")
        if not isinstance(ids, list):
            raise Unusable(f"column {name!r} is {name_of_type(ids)}, not a list of token ids")
        for index, token in enumerate(ids):
            if type(token) is not int or token < 0:
                raise Unusable(f"{name}[{index}] is {json.dumps(token, default=str)}, not a token id")
        if not ids and name != "prompt_ids":
            raise Unusable(f"empty completion: {name!r} has no tokens")
    completions = tuple(record[name] for name in names)
    return Tokens(record["prompt_ids"], completions, " + ".join(("prompt_ids", *names)))


# ---- How records with these columns are read


def _reader(there: frozenset[str], columns: Columns, kind: RecordKind) -> Reader | None:
    """How records are read that have values in these columns; None where they cannot be."""
    found = _find(there, columns, kind)
    if found is None:
        return None
    used = found.columns
    beside = () if used == (columns.text,) else (columns.system, columns.tools, TEMPLATE_ARGUMENTS)
    extras = tuple(name for name in beside if name in there and name not in (*used, *columns.ignore))
    lost = there.intersection(known_formats.MEANINGFUL).difference(used, extras, columns.ignore)
    if kind == "prompt":
        lost -= {columns.label, "kto_tag", "weight"}
    name = "OpenAI fine-tuning" if used == (columns.messages,) and columns.tools in extras else found.name
    told = f"{name} ({', '.join((*used, *extras))})" if name else " + ".join((*used, *extras))
    if kind == "sft" and found.has == "pair":
        told += " (preference records: the other completion is not used)"
    return Reader(told, _limited(found, kind), tuple(sorted(lost)), bool(extras))


class Found(NamedTuple):
    """A format that fits."""

    has: Has
    columns: tuple[str, ...]
    """Those that it reads."""
    read: Callable[[JSON], Draft]
    name: str = ""
    """Of a published format."""


def _find(there: frozenset[str], columns: Columns, kind: RecordKind) -> Found | None:
    """The format of records that have values in these columns."""
    pair, answer, label = [_published(there, columns, has) for has in ("pair", "answer", "label")]
    own = _own_answer(there, columns)
    if kind == "preference":
        return _own_pair(there, columns, (columns.prompt,)) or pair or _own_pair(there, columns, ())
    if kind == "unpaired":
        found = (own or answer) if columns.label in there else None
        return found._replace(columns=(*found.columns, columns.label)) if found else label
    if kind == "prompt":
        published = pair or answer or label
        if columns.prompt in there and (published is None or columns.prompt not in published.columns):
            return Found("answer", (columns.prompt,), lambda record: Draft(_text(record, columns.prompt, columns)))
        return published or own or _own_pair(there, columns, ())
    if columns.completion in there:
        return own
    return own or pair or answer or _own_text(there, columns) or _own_chosen(there, columns)


def _limited(found: Found, kind: RecordKind) -> Callable[[JSON], Draft]:
    """What a kind of training takes of a draft: no answer behind a prompt, or of a pair the better one."""
    read = found.read
    if kind == "prompt":
        return lambda record: draft if (draft := read(record)).prompt is None else draft._replace(completions=())
    if kind == "sft" and found.has == "pair":
        return lambda record: (draft := read(record))._replace(completions=draft.completions[:1], names=draft.names[:1])
    return read


def _published(there: frozenset[str], columns: Columns, has: Has) -> Found | None:
    """A published format; none where the user has named a column."""
    known = None if columns.are_named else known_formats.recognise(there, has)
    if known is None:
        return None
    used = (*known.needs, *(name for name in known.uses if name in there))
    return Found(has, used, known.read, known.name)


def _own_answer(there: frozenset[str], columns: Columns) -> Found | None:
    """Our columns of one answer: behind a prompt, or at the end of a conversation."""
    if columns.completion not in there:
        if columns.messages not in there:
            return None
        names = (columns.messages,)
        return Found("answer", names, lambda record: Draft(None, (record[columns.messages],), names))
    asked = columns.messages if columns.messages in there and columns.prompt not in there else columns.prompt
    if asked not in there:
        return None

    def read(record: JSON) -> Draft:
        return Draft(_text(record, asked, columns), (_text(record, columns.completion),), ("completion",))

    return Found("answer", (asked, columns.completion), read)


def _own_pair(there: frozenset[str], columns: Columns, prompt: tuple[str, ...]) -> Found | None:
    """Our columns of a pair; without a prompt's column the answers have to be whole conversations."""
    names = (columns.chosen, columns.rejected)
    if not there.issuperset((*prompt, *names)):
        return None

    def read(record: JSON) -> Draft:
        pair = (_text(record, columns.chosen), _text(record, columns.rejected))
        if prompt:
            return Draft(_text(record, columns.prompt, columns), pair, names)
        name = f"Anthropic hh-rlhf ({', '.join(names)})" if is_transcript(pair[0]) else ""
        return Draft(None, tuple([_conversation(text, record, columns) for text in pair]), names, name=name)

    return Found("pair", (*prompt, *names), read)


def _own_chosen(there: frozenset[str], columns: Columns) -> Found | None:
    """For SFT: the better answer of a pair."""
    if columns.chosen not in there:
        return None
    has_prompt, names = columns.prompt in there, (columns.chosen,)

    def read(record: JSON) -> Draft:
        chosen = _text(record, columns.chosen)
        if has_prompt:
            return Draft(_text(record, columns.prompt, columns), (chosen,), names)
        return Draft(None, (_conversation(chosen, record, columns),), names)

    return Found("pair", names, read)


def _own_text(there: frozenset[str], columns: Columns) -> Found | None:
    if columns.text not in there:
        return None

    def read(record: JSON) -> Draft:
        text = record[columns.text]
        if not isinstance(text, str):
            raise Unusable(f"column {columns.text!r} is {name_of_type(text)}, not a string")
        return Draft(None, (text,), ("text",), is_text=True)

    return Found("answer", (columns.text,), read)


def _text(record: JSON, column: str, columns: Columns | None = None) -> object:
    """A column's string or list; given `columns`, a transcript as messages, unless the user has named columns."""
    value = record[column]
    if not isinstance(value, str | list):
        raise Unusable(f"column {column!r} is {name_of_type(value)}, not a string or a list of messages")
    return transcript(value) if columns is not None and not columns.are_named else value


def _conversation(value: object, record: JSON, columns: Columns) -> object:
    """A whole conversation: messages, or a transcript."""
    if isinstance(value, str) and not is_transcript(value):
        raise Unusable(_missing(record, columns, "preference", columns.prompt))
    return transcript(value)


# ---- Conversations


def _chat(draft: Draft, record: JSON, reader: Reader, columns: Columns, kind: RecordKind, label: bool | None) -> Chat:
    """A draft as messages."""
    opening = _opening(draft, record, columns)
    learnt: tuple[list[bool], ...] = ()
    completions: tuple[list[Message], ...] = ()
    if kind == "prompt":
        prompt = _join(opening, _prompt_alone(draft, columns), columns)
    elif len(draft.completions) == 1 and (draft.prompt is None or draft.history):
        conversation = _join(opening, _whole(draft, columns), columns)
        if len(conversation) < 2:
            raise Unusable(f"column {draft.names[0]!r} has one message; it needs a prompt and an answer")
        learn = columns.learn if kind == "sft" else "last"
        prompt, completion, flags = learnt_part(conversation, learn, draft.names[0])
        completions, learnt = (completion,), (flags,)
    else:
        prompt, completions = _answers(draft, columns)
        prompt = _join(opening, prompt, columns)
        learnt = tuple([message["role"] == "assistant" for message in answer] for answer in completions)
        for message in (*prompt, *(message for answer in completions for message in answer)):
            if "weight" in message:
                raise Unusable(
                    "'weight' of a message is for SFT on conversations; leave it out with data.ignore=[weight]"
                )
    for answer, name in zip(completions, draft.names, strict=kind != "prompt"):
        if prompt and prompt[-1]["role"] == answer[0]["role"] == "assistant":
            raise Unusable("the prompt ends with an assistant message; it has to end before the answer")
        if columns.learn != "all" or kind != "sft":
            check_answer(answer[-1], name)
    tools = draft.tools if draft.tools is not None else record.get(columns.tools)
    return Chat(
        prompt,
        completions,
        draft.name or reader.name,
        None if all(flags == [True] for flags in learnt) else tuple(map(tuple, learnt)),
        None if columns.tools in columns.ignore else check_tools(tools, columns.tools),
        _template_arguments(record, columns),
        label,
    )


def _opening(draft: Draft, record: JSON, columns: Columns) -> list[Message]:
    """The system prompt and the history that have columns of their own, as messages."""
    opening: list[Message] = []
    system = draft.system if draft.system is not None else record.get(columns.system)
    if columns.system not in columns.ignore and _says_something(system):
        if not isinstance(system, str):
            raise Unusable(f"column {columns.system!r} is {name_of_type(system)}, not a string")
        opening.append({"role": "system", "content": check_unicode(system, columns.system)})
    for question, answer in draft.history:
        opening += check_messages(
            [{"role": "user", "content": question}, {"role": "assistant", "content": answer}], "history"
        )
    return opening


def _join(opening: list[Message], messages: list[Message], columns: Columns) -> list[Message]:
    """Messages behind their opening; a system prompt that both have stands there once."""
    if opening and opening[0]["role"] == "system" and messages and messages[0]["role"] in ("system", "developer"):
        if messages[0]["content"] != opening[0]["content"]:
            raise Unusable(
                f"column {columns.system!r} says something else than the conversation's own system message; leave it "
                f"out with data.ignore=[{columns.system}]"
            )
        opening = opening[1:]
    return [*opening, *messages] if opening else messages


def _prompt_alone(draft: Draft, columns: Columns) -> list[Message]:
    """The prompt; of a whole conversation, what comes before its last answer."""
    if draft.prompt is not None:
        return _asked(draft.prompt, columns)
    if len(draft.completions) > 1:
        return _answers(draft, columns)[0]
    messages = check_messages(draft.completions[0], draft.names[0], columns.ignore)
    return messages[:-1] if messages[-1]["role"] == "assistant" and len(messages) > 1 else messages


def _whole(draft: Draft, columns: Columns) -> list[Message]:
    """A draft's one conversation, from its first message to its last."""
    if draft.prompt is None:
        return check_messages(draft.completions[0], draft.names[0], columns.ignore)
    return [*_asked(draft.prompt, columns), *_said(draft.completions[0], draft.names[0], columns)]


def _asked(prompt: object, columns: Columns) -> list[Message]:
    if isinstance(prompt, str):
        return [{"role": "user", "content": check_unicode(prompt, "prompt")}]
    return check_messages(prompt, "prompt", columns.ignore)


def _said(completion: object, name: str, columns: Columns) -> list[Message]:
    if isinstance(completion, str):
        return [{"role": "assistant", "content": check_completion(completion, name)}]
    return check_messages(completion, name, columns.ignore)


def _answers(draft: Draft, columns: Columns) -> tuple[list[Message], tuple[list[Message], ...]]:
    """The messages of the prompt, and those of each completion.

    A completion may be a whole conversation. Of two of them the common leading messages are the prompt, and a prompt's
    column has to be among these: else it would be dropped without a word.
    """
    answers = [_said(said, name, columns) for said, name in zip(draft.completions, draft.names, strict=True)]
    are_whole = all(answer[0]["role"] != "assistant" for answer in answers)
    if draft.prompt is None or isinstance(draft.prompt, str) and are_whole:
        length = _common_length(answers)
        prompt = answers[0][:length]
        if isinstance(draft.prompt, str):
            asked = draft.prompt.strip()
            if not any(asked in str(message["content"]) for message in prompt):
                raise Unusable(f"column {columns.prompt!r} is not in the conversation of {draft.names[0]!r}")
        if not prompt:
            raise Unusable(f"{draft.names[0]!r} and {draft.names[1]!r} have no first message in common: no prompt")
        return prompt, tuple([answer[length:] for answer in answers])
    prompt, rests = _asked(draft.prompt, columns), []
    for answer, name in zip(answers, draft.names, strict=True):
        is_whole = answer[0]["role"] != "assistant"
        if is_whole and answer[: len(prompt)] != prompt or len(answer) == len(prompt) * is_whole:
            raise Unusable(f"{name!r} has {len(answer)} messages that do not begin with the prompt")
        rests.append(answer[len(prompt) * is_whole :])
    return prompt, tuple(rests)


def _common_length(conversations: list[list[Message]]) -> int:
    """How many leading messages all have; one message at least is left of each."""
    shortest = min(map(len, conversations)) - 1
    first = conversations[0]
    return next((i for i in range(shortest) if any(other[i] != first[i] for other in conversations)), shortest)


def _label(value: object) -> bool:
    """Whether a completion is desirable. Raises Unusable."""
    if value not in (True, False):  # 1 and 0, too
        raise Unusable(f"the label is {json.dumps(value, default=str)}, not true or false")
    return bool(value)


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


# ---- What is said of other columns


def _missing(record: JSON, columns: Columns, kind: RecordKind, *wanted: str) -> str:
    """Names the columns that are missing, those that are there, and what to type."""
    roles = {
        "preference": ("chosen", "rejected", "prompt"),
        "unpaired": ("label", "completion", "prompt"),
        "sft": ("completion", "messages", "text"),
        "prompt": ("prompt",),
    }[kind]
    if kind == "sft" and columns.completion in record:
        roles = ("completion", "prompt")
    names = {role: getattr(columns, role) for role in roles}
    if null := next((name for name in names.values() if name in record and record[name] is None), None):
        return f"column {null!r} is null"
    missing = {role: name for role, name in names.items() if name not in record or name in wanted}
    shown = list(missing.values())[:1] if kind != "sft" else list(missing.values())
    told = f"no column {' or '.join(map(repr, shown))} (columns: {_list(record)})"
    there = frozenset(name for name, value in record.items() if value is not None)
    if kind == "preference" and _find(there, columns, "unpaired"):
        return f"{told}; labelled answers are not pairs: train.loss=kto"
    if kind == "preference" and (found := _find(there, columns, "sft")) and found.has == "answer":
        return f"{told}; {found.name or 'this'} has one answer a record, not a pair: train.loss=sft"
    guesses = {role: _guess(role, name, record) for role, name in missing.items()}
    if kind == "sft" and "prompt" not in missing:
        best = next((role for role, guess in guesses.items() if guess), "completion")
        guesses = {best: guesses[best]}
        if best == "completion" and columns.prompt not in record:
            guesses["prompt"] = _guess("prompt", columns.prompt, record)
    words = " ".join(f"data.{role}={guess or 'COLUMN'}" for role, guess in guesses.items())
    return f"{told}; did you mean {words}?" if all(guesses.values()) else f"{told}; name yours with {words}"


def _guess(role: str, column: str, record: JSON) -> str | None:
    """The column that is meant by its usual names, or by a slip of the pen."""
    near = [alias for alias in OTHER_NAMES[role] if alias in record]
    near = near or difflib.get_close_matches(column, [str(name) for name in record], 1, cutoff=0.8)
    return near[0] if near else None


def _list(names: Iterable[object]) -> str:
    return ", ".join(str(name) for name in names) or "none"
