"""How records are read that have the same columns: found once for each set of them, and what is said where it is not.

Our own columns come first, then the published formats (known_formats.py), unless the user has named a column.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable
from typing import NamedTuple

from lib.data import known_formats
from lib.data.known_formats import Draft, Has, is_transcript, transcript
from lib.data.record_formats import JSON, Columns, RecordKind, Unusable, name_of_type

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


def reader_of(there: frozenset[str], columns: Columns, kind: RecordKind) -> Reader | None:
    """How records are read that have values in these columns; None where they cannot be."""
    found = find(there, columns, kind)
    if found is None:
        return None
    used = found.columns
    beside = () if used == (columns.text,) else (columns.system, columns.tools, TEMPLATE_ARGUMENTS)
    extras = tuple(name for name in beside if name in there and name not in (*used, *columns.ignore))
    lost = there.intersection(known_formats.MEANINGFUL).difference(used, extras, columns.ignore)
    if kind == "prompt":
        lost -= {columns.label, known_formats.LABEL, "weight"}
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


def find(there: frozenset[str], columns: Columns, kind: RecordKind) -> Found | None:
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
            return Found("answer", (columns.prompt,), lambda record: Draft(_prompt(record, columns.prompt, columns)))
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

    names = (columns.completion,)

    def read(record: JSON) -> Draft:
        return Draft(_prompt(record, asked, columns), (record[columns.completion],), names)

    return Found("answer", (asked, columns.completion), read)


def _own_pair(there: frozenset[str], columns: Columns, prompt: tuple[str, ...]) -> Found | None:
    """Our columns of a pair; without a prompt's column the answers have to be whole conversations."""
    names = (columns.chosen, columns.rejected)
    if not there.issuperset((*prompt, *names)):
        return None

    def read(record: JSON) -> Draft:
        pair = (record[columns.chosen], record[columns.rejected])
        if prompt:
            return Draft(_prompt(record, columns.prompt, columns), pair, names)
        name = f"Anthropic hh-rlhf ({', '.join(names)})" if is_transcript(pair[0]) else ""
        return Draft(None, tuple([_conversation(text, record, columns) for text in pair]), names, name=name)

    return Found("pair", (*prompt, *names), read)


def _own_chosen(there: frozenset[str], columns: Columns) -> Found | None:
    """For SFT: the better answer of a pair."""
    if columns.chosen not in there:
        return None
    has_prompt, names = columns.prompt in there, (columns.chosen,)

    def read(record: JSON) -> Draft:
        chosen = record[columns.chosen]
        if has_prompt:
            return Draft(_prompt(record, columns.prompt, columns), (chosen,), names)
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


def _prompt(record: JSON, column: str, columns: Columns) -> object:
    """A prompt's column; a transcript as messages, unless the user has named columns."""
    value = record[column]
    return transcript(value) if type(value) is str and not columns.are_named and value.startswith("\n\n") else value


def _conversation(value: object, record: JSON, columns: Columns) -> object:
    """A whole conversation: messages, or a transcript."""
    if isinstance(value, str) and not is_transcript(value):
        raise Unusable(missing(record, columns, "preference", columns.prompt))
    return transcript(value)


# ---- What is said of other columns


def missing(record: JSON, columns: Columns, kind: RecordKind, *wanted: str) -> str:
    """Names the columns that are absent, those that are there, and what to type."""
    roles = {
        "preference": ("chosen", "rejected", "prompt"),
        "unpaired": ("label", "completion", "prompt"),
        "sft": ("completion", "messages", "text"),
        "prompt": ("prompt",),
    }[kind]
    if kind == "sft" and columns.completion in record:
        roles = ("completion", "prompt")
    if kind == "unpaired" and "completion_ids" in record:
        roles = ("label",)
    names = {role: getattr(columns, role) for role in roles}
    if null := next((name for name in names.values() if name in record and record[name] is None), None):
        return f"column {null!r} is null"
    absent = {role: name for role, name in names.items() if name not in record or name in wanted}
    shown = list(absent.values())[:1] if kind != "sft" else list(absent.values())
    told = f"no column {' or '.join(map(repr, shown))} (columns: {listed(record)})"
    there = frozenset(name for name, value in record.items() if value is not None)
    if kind == "preference" and there.intersection((columns.label, known_formats.LABEL)):
        return f"{told}; labelled answers are not pairs: train.loss=kto"
    if kind == "preference" and (found := find(there, columns, "sft")) and found.has == "answer":
        return f"{told}; {found.name or 'this'} has one answer a record, not a pair: train.loss=sft"
    guesses = {role: _guess(role, name, record) for role, name in absent.items()}
    if kind == "sft" and "prompt" not in absent:
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


def listed(names: Iterable[object]) -> str:
    return ", ".join(str(name) for name in names) or "none"
