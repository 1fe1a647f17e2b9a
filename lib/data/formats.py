"""Formats of data sets as they are published: recognised by their columns, read into one shape.

A format names the columns that it needs and those that it may use besides. What it makes of a record is a Draft: the
prompt and answers wherever the record had them, not yet checked. Nothing here knows what is trained on it.
"""

from __future__ import annotations

import difflib
import json
import math
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple

from lib.config.settings import DataSettings
from lib.data.record_formats import (
    JSON,
    VOCABULARY,
    Chat,
    Columns,
    Message,
    Plain,
    RecordKind,
    StampedTokens,
    Tokens,
    Unusable,
    check_answer,
    check_completion,
    check_messages,
    check_tools,
    check_unicode,
    learnt_part,
    name_of_type,
    parse_json_text,
)


class Draft(NamedTuple):
    """What a record says, unchecked. A value that is a list is a list of messages."""

    prompt: object = None
    """A string or messages; None: the whole conversation is in `completions`, or all of it is text."""
    completions: tuple[object, ...] = ()
    """One answer, or the better and the worse one."""
    names: tuple[str, ...] = ()
    """The column of each completion, for errors."""
    system: object = None
    tools: object = None
    history: tuple[tuple[object, object], ...] = ()
    """Earlier questions and answers."""
    is_text: bool = False
    """All of it is learnt: there is no prompt, and nobody answers."""
    name: str = ""
    """What the record turned out to be, where its columns alone do not say."""


Has = Literal["pair", "answer", "label"]


@dataclass(frozen=True)
class KnownFormat:
    """A published format.

    Args:
        has: a better and a worse answer a record, one answer, or one with a label.
        needs: columns that it is recognised by.
        uses: columns that it reads where they are there; `system` and `tools` besides, which are everybody's.
        read: a record's draft; raises Unusable.
    """

    name: str
    has: Has
    needs: tuple[str, ...]
    uses: tuple[str, ...]
    read: Callable[[JSON], Draft]


def recognise(columns: frozenset[str], has: Has) -> KnownFormat | None:
    """The first known format of that kind whose columns are all there."""
    return next((known for known in KNOWN_FORMATS if known.has == has and columns.issuperset(known.needs)), None)


# ---- Two answers


def _openai_preference(record: JSON) -> Draft:
    given = record["input"]
    if not isinstance(given, dict) or given.get("messages") is None:
        raise Unusable("column 'input' is not an object with messages")
    answers = (record["preferred_output"], record["non_preferred_output"])
    tools = given.get("tools") or record.get("tools")
    names = ("preferred_output", "non_preferred_output")
    return Draft(given["messages"], answers, names, tools=tools)


def _ultrafeedback(record: JSON) -> Draft:
    """The answer with the highest overall score against the one with the lowest."""
    return Draft(record["instruction"], *_best_and_worst(record, "completions", "response", "overall_score", 1))


def _nectar(record: JSON) -> Draft:
    """The answer of the first rank against the one of the last."""
    return Draft(transcript(record["prompt"]), *_best_and_worst(record, "answers", "answer", "rank", -1))


def _best_and_worst(record: JSON, column: str, text: str, score: str, sign: int) -> tuple[tuple[Any, ...], Any]:
    """Texts of a list's best and worst items, by a number that is higher (sign 1) or lower (-1) for better ones."""
    items = record[column]
    if not isinstance(items, list) or not items or not all(isinstance(item, dict) for item in items):
        raise Unusable(f"column {column!r} is not a list of answers")
    scored = [item for item in items if _is_finite(item.get(score)) and item.get(text) is not None]
    if len(scored) < 2:
        raise Unusable(f"{column!r} has {len(scored)} answers with a {score}; a pair takes two")
    best = max(scored, key=lambda item: sign * item[score])
    worst = min(scored, key=lambda item: sign * item[score])
    if best[score] == worst[score]:
        raise Unusable(f"every answer in {column!r} has {score} {best[score]}: nothing to prefer")
    return (best[text], worst[text]), (f"{column}.{text}",) * 2


def _helpsteer2(record: JSON) -> Draft:
    """Its preference is negative where the first response is the better one."""
    return _by_sign(_nvidia_turns(record["prompt"]), record, ("response_1", "response_2"), "preference_strength")


def _helpsteer3(record: JSON) -> Draft:
    """Its preference is negative where the first response is the better one."""
    return _by_sign(record["context"], record, ("response1", "response2"), "overall_preference")


def _by_sign(prompt: object, record: JSON, names: tuple[str, str], column: str) -> Draft:
    preference = record[column]
    if isinstance(preference, bool) or not isinstance(preference, int | float):
        raise Unusable(f"column {column!r} is {name_of_type(preference)}, not a number")
    if not _is_finite(preference):
        raise Unusable(f"column {column!r} is {preference}, which prefers nothing")
    if preference == 0:
        raise Unusable(f"{column!r} is 0, a tie: nothing to prefer")
    return _ordered(prompt, record, names, first_is_better=preference < 0)


def _is_finite(value: object) -> bool:
    """Whether it is a number that can be compared: JSON and parquet may have NaN, which is neither more nor less."""
    return isinstance(value, int | float) and -math.inf < value < math.inf


def _shp(record: JSON) -> Draft:
    """Its label is 1 where A is the better answer."""
    if record["labels"] not in (0, 1):
        raise Unusable(f"column 'labels' is {record['labels']!r}, not 0 or 1")
    return _ordered(record["history"], record, ("human_ref_A", "human_ref_B"), record["labels"] == 1)


def _safe_rlhf(record: JSON) -> Draft:
    if record["better_response_id"] not in (0, 1):
        raise Unusable(f"column 'better_response_id' is {record['better_response_id']!r}, not 0 or 1")
    names = ("response_0", "response_1")
    return _ordered(record["prompt"], record, names, record["better_response_id"] == 0)


def _ordered(prompt: object, record: JSON, names: tuple[str, str], first_is_better: bool) -> Draft:
    names = names if first_is_better else (names[1], names[0])
    return Draft(prompt, (record[names[0]], record[names[1]]), names)


def _pair_after(question: str) -> Callable[[JSON], Draft]:
    """A pair whose prompt is in a column of this name."""
    return lambda record: Draft(record[question], (record["chosen"], record["rejected"]), ("chosen", "rejected"))


def _alpaca_pair(record: JSON) -> Draft:
    answers = (record["chosen"], record["rejected"])
    return Draft(_instruction(record), answers, ("chosen", "rejected"), history=_history(record))


def _sharegpt_pair(record: JSON) -> Draft:
    """Each answer is one message {from, value}."""
    answers = tuple([message] if isinstance(message := record[name], dict) else message for name in PAIR)
    return Draft(record["conversations"], answers, PAIR)


PAIR = ("chosen", "rejected")


# ---- One answer


def _alpaca(record: JSON) -> Draft:
    return Draft(_instruction(record), (record["output"],), ("output",), history=_history(record))


def _dolly(record: JSON) -> Draft:
    prompt = _both(record, "instruction", "context", "\n\n")
    return Draft(prompt, (record["response"],), ("response",))


def _helpsteer(record: JSON) -> Draft:
    return Draft(_nvidia_turns(record["prompt"]), (record["response"],), ("response",))


def _sharegpt(record: JSON) -> Draft:
    return Draft(None, (record["conversations"],), ("conversations",))


def _capybara(record: JSON) -> Draft:
    """A conversation of {input, output} turns; also one of messages."""
    turns = record["conversation"]
    if isinstance(turns, list) and all(isinstance(turn, dict) and "input" in turn for turn in turns):
        turns = _messages_of((turn["input"], turn.get("output")) for turn in turns)
    return Draft(None, (turns,), ("conversation",))


def _instruction(record: JSON) -> object:
    """Alpaca's prompt: the instruction, and on a new line its input (LLaMA-Factory, data/README.md)."""
    return _both(record, "instruction", "input", "\n")


def _both(record: JSON, first: str, second: str, between: str) -> object:
    """The text of a column, with that of a second one behind it where it says anything."""
    if record.get(second) is None or record[second] == "":
        return record[first]
    for name in (first, second):
        if not isinstance(record[name], str):
            raise Unusable(f"column {name!r} is {name_of_type(record[name])}, not a string")
    return f"{record[first]}{between}{record[second]}" if record[second].strip() else record[first]


def _history(record: JSON) -> tuple[tuple[object, object], ...]:
    """LLaMA-Factory's history: pairs of a question and an answer."""
    history = record.get("history") or []
    if not isinstance(history, list) or not all(isinstance(turn, list) and len(turn) == 2 for turn in history):
        raise Unusable("column 'history' is not a list of [question, answer]")
    return tuple((question, answer) for question, answer in history)


def _messages_of(turns: Any) -> list[JSON]:
    pairs = [(("user", question), ("assistant", answer)) for question, answer in turns]
    return [{"role": role, "content": text} for pair in pairs for role, text in pair]


# ---- One answer and a label


# LLaMA-Factory's column of labels.
LABEL = "kto_tag"


def _messages(record: JSON) -> Draft:
    return Draft(None, (record["messages"],), ("messages",))


# ---- Conversations in one string


def transcript(text: object) -> object:
    """Anthropic's "\\n\\nHuman: ... \\n\\nAssistant: ..." as messages; an empty turn at the end is left out.

    Anything else is returned as it is.
    """
    if not is_transcript(text):
        return text
    return _turns(re.split(r"\n\n(Human|Assistant):", str(text))[1:], "Human")


def is_transcript(text: object) -> bool:
    return isinstance(text, str) and text.startswith("\n\nHuman:") and "\n\nAssistant:" in text


def _nvidia_turns(text: object) -> object:
    """HelpSteer's turns, between lines "<extra_id_1>Assistant" and "<extra_id_1>User", as messages."""
    if not isinstance(text, str) or "<extra_id_1>" not in text:
        return text
    return _turns(["User", *re.split(r"\n?<extra_id_1>(User|Assistant)\n", text)], "User")


def _turns(pieces: list[str], user: str) -> list[JSON]:
    """Messages of speaker, text, speaker, text, ...; without an assistant's turn at the end that is empty."""
    turns = [
        {"role": "user" if speaker == user else "assistant", "content": text.strip()}
        for speaker, text in zip(pieces[::2], pieces[1::2], strict=True)
    ]
    is_open = turns[-1] == {"role": "assistant", "content": ""}
    return turns[:-1] if is_open else turns


KNOWN_FORMATS = (
    KnownFormat(
        "OpenAI preference", "pair", ("input", "preferred_output", "non_preferred_output"), (), _openai_preference
    ),
    KnownFormat("UltraFeedback", "pair", ("instruction", "completions"), (), _ultrafeedback),
    KnownFormat("Nectar", "pair", ("prompt", "answers"), (), _nectar),
    KnownFormat(
        "HelpSteer2 preference", "pair", ("prompt", "response_1", "response_2", "preference_strength"), (), _helpsteer2
    ),
    KnownFormat("HelpSteer3", "pair", ("context", "response1", "response2", "overall_preference"), (), _helpsteer3),
    KnownFormat("SHP", "pair", ("history", "human_ref_A", "human_ref_B", "labels"), (), _shp),
    KnownFormat("PKU-SafeRLHF", "pair", ("prompt", "response_0", "response_1", "better_response_id"), (), _safe_rlhf),
    KnownFormat("ShareGPT pairs", "pair", ("conversations", *PAIR), (), _sharegpt_pair),
    KnownFormat("orca_dpo_pairs", "pair", ("question", *PAIR), (), _pair_after("question")),
    KnownFormat("Alpaca pairs", "pair", ("instruction", *PAIR), ("input", "history"), _alpaca_pair),
    KnownFormat("distilabel pairs", "pair", ("input", *PAIR), (), _pair_after("input")),
    KnownFormat("Alpaca KTO", "label", ("instruction", "output", LABEL), ("input", "history"), _alpaca),
    KnownFormat("ShareGPT KTO", "label", ("conversations", LABEL), (), _sharegpt),
    KnownFormat("OpenAI messages KTO", "label", ("messages", LABEL), (), _messages),
    KnownFormat("ShareGPT", "answer", ("conversations",), (), _sharegpt),
    KnownFormat("Capybara, LMSYS-Chat", "answer", ("conversation",), (), _capybara),
    KnownFormat("Alpaca", "answer", ("instruction", "output"), ("input", "history"), _alpaca),
    KnownFormat("Dolly", "answer", ("instruction", "response"), ("context",), _dolly),
    KnownFormat("HelpSteer", "answer", ("prompt", "response", "helpfulness"), (), _helpsteer),
)
# What a record may say besides its prompt and answers. Where such a column has a value that no format reads, training
# on the record would lose it.
MEANINGFUL = (
    "system",
    "system_prompt",
    "tools",
    "functions",
    "label",
    LABEL,
    "input",
    "weight",
    "history",
    "context",
    "images",
    "image",
)


def columns_read(columns: Columns) -> frozenset[str]:
    """Every column that any format may look at."""
    known = {name for known in KNOWN_FORMATS for name in (*known.needs, *known.uses)}
    return frozenset({*known, *MEANINGFUL, *columns[:9], "chat_template_kwargs"})


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
    columns: tuple[str, ...] = ()
    """Those that it reads."""


def reader_of(there: frozenset[str], columns: Columns, kind: RecordKind) -> Reader | None:
    """How records are read that have values in these columns; None where they cannot be."""
    found = find(there, columns, kind)
    if found is None:
        return None
    used = found.columns
    beside = () if used == (columns.text,) else (columns.system, columns.tools, TEMPLATE_ARGUMENTS)
    extras = tuple(name for name in beside if name in there and name not in (*used, *columns.ignore))
    lost = there.intersection(MEANINGFUL).difference(used, extras, columns.ignore)
    if kind == "prompt":
        lost -= {columns.label, LABEL, "weight"}
    name = "OpenAI fine-tuning" if used == (columns.messages,) and columns.tools in extras else found.name
    told = f"{name} ({', '.join((*used, *extras))})" if name else " + ".join((*used, *extras))
    if kind == "sft" and found.has == "pair":
        told += " (preference records: the other completion is not used)"
    return Reader(told, _limited(found, kind), tuple(sorted(lost)), bool(extras), (*used, *extras))


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
    known = None if columns.are_named else recognise(there, has)
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
    if kind == "preference" and there.intersection((columns.label, LABEL)):
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


# The word that gives a column its meaning, where it would be lost.
MEANT_BY = {
    "system_prompt": "data.system=system_prompt",
    "functions": "data.tools=functions",
    "label": "train.loss=kto",
    "kto_tag": "train.loss=kto",
}


def parse(record: JSON, settings: DataSettings, kind: RecordKind) -> Tokens | Plain | Chat:
    """The record's prompt and completions: two for preferences (chosen, rejected), one for SFT, none for a prompt.

    Unpaired feedback is one completion with its label. Raises Unusable. Of several forms in one record the first
    wins: token ids; prompt and completion; messages; a published format; text; and for SFT the better answer of a pair.
    """
    columns, readers = _readers(settings, kind)
    if (names := _token_columns(record, kind)) is not None:
        tokens = _parse_tokens(record, names)
        if isinstance(record.get(VOCABULARY), str):
            tokens = StampedTokens(**vars(tokens), vocabulary=record[VOCABULARY])
        if kind == "unpaired":
            if record.get(columns.label) is None:
                raise Unusable(missing(record, columns, kind))
            return replace(tokens, label=_label(record[columns.label], columns.label))
        return tokens
    present = tuple([name for name, value in record.items() if value is not None])
    if present not in readers:
        readers[present] = reader_of(frozenset(present), columns, kind)
    reader = readers[present]
    if reader is None:
        raise Unusable(missing(record, columns, kind))
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
        name = columns.label if columns.label in record else LABEL
        label = _label(record[name], name)
    if len(draft.completions) == 2 and draft.completions[0] == draft.completions[1]:
        raise Unusable(f"{draft.names[0]!r} is equal to {draft.names[1]!r}: nothing to prefer")
    if not reader.is_chat and (plain := _plain(draft, reader.name, label)):
        return plain
    return _chat(draft, record, reader, columns, kind, label)


def parse_rows(record: JSON, settings: DataSettings, kind: RecordKind) -> list[Tokens | Plain | Chat]:
    """The rows that a record gives: one; of a pair two, where labels are wanted: chosen is desirable, rejected is not.

    Raises Unusable, as `parse`.
    """
    if kind != "unpaired" or settings.label in record or not _is_pair(record, settings):
        return [parse(record, settings, kind)]
    pair = parse(record, settings, "preference")
    columns = f"{pair.columns} (each pair gives two rows: chosen is desirable, rejected is not)"
    rows: list[Tokens | Plain | Chat] = []
    for index, label in enumerate((True, False)):
        parts: JSON = {"completions": pair.completions[index : index + 1], "columns": columns, "label": label}
        if isinstance(pair, Chat) and pair.learnt is not None:
            parts["learnt"] = pair.learnt[index : index + 1]
        rows.append(replace(pair, **parts))
    return rows


def _is_pair(record: JSON, settings: DataSettings) -> bool:
    """Whether a record is a pair, and nothing with a label."""
    there = frozenset(name for name, value in record.items() if value is not None)
    columns = Columns.of(settings)
    if there.issuperset(("chosen_ids", "rejected_ids")):
        return True
    return find(there, columns, "unpaired") is None and find(there, columns, "preference") is not None


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
            is_null = name in record
            raise Unusable(f"column {name!r} is null" if is_null else f"no column {name!r} (columns: {listed(record)})")
        if not isinstance(ids, list):
            raise Unusable(f"column {name!r} is {name_of_type(ids)}, not a list of token ids")
        for index, token in enumerate(ids):
            if type(token) is not int or token < 0:
                raise Unusable(f"{name}[{index}] is {json.dumps(token, default=str)}, not a token id")
        if not ids and name != "prompt_ids":
            raise Unusable(f"empty completion: {name!r} has no tokens")
    completions = tuple(record[name] for name in names)
    columns = " + ".join(("prompt_ids", *names))
    mask = record.get("completion_mask") if names == ("completion_ids",) else None
    if mask is None:
        return Tokens(record["prompt_ids"], completions, columns)
    if not isinstance(mask, list) or any(bit not in (0, 1) for bit in mask) or len(mask) != len(completions[0]):
        raise Unusable("completion_mask is not a list of 0 and 1, one for each of completion_ids")
    if not any(mask):
        raise Unusable("completion_mask has no 1: no token is learnt")
    return Tokens(record["prompt_ids"], completions, f"{columns} + completion_mask", learnt=[*map(bool, mask)])


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
        prompt, completions, common = _answers(draft, columns)
        prompt = _join(opening, prompt, columns)
        learnt = tuple(
            [message["role"] == "assistant" and i >= common for i, message in enumerate(answer)]
            for answer in completions
        )
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


def _answers(draft: Draft, columns: Columns) -> tuple[list[Message], tuple[list[Message], ...], int]:
    """The messages of the prompt, those of each completion, and how many of these the completions have in common.

    A completion may be a whole conversation. Of two of them the common leading messages are the prompt, and a prompt's
    column has to be among these: else it would be dropped without a word.
    """
    answers = [_said(said, name, columns) for said, name in zip(draft.completions, draft.names, strict=True)]
    are_whole = all(answer[0]["role"] != "assistant" for answer in answers)
    if draft.prompt is None or isinstance(draft.prompt, str) and are_whole:
        length = common = _common_length(answers)
        # A prompt is what a model is asked: the completions begin where an assistant speaks.
        while length and any(answer[length]["role"] != "assistant" for answer in answers):
            length -= 1
        prompt = answers[0][:length]
        if isinstance(draft.prompt, str):
            asked = draft.prompt.strip()
            if not any(asked in str(message["content"]) for message in prompt):
                raise Unusable(f"column {columns.prompt!r} is not in the conversation of {draft.names[0]!r}")
        if not prompt:
            raise Unusable(f"{draft.names[0]!r} and {draft.names[1]!r} have no first message in common: no prompt")
        return prompt, tuple([answer[length:] for answer in answers]), common - length
    prompt, rests = _asked(draft.prompt, columns), []
    for answer, name in zip(answers, draft.names, strict=True):
        is_whole = answer[0]["role"] != "assistant"
        if is_whole and answer[: len(prompt)] != prompt or len(answer) == len(prompt) * is_whole:
            raise Unusable(f"{name!r} has {len(answer)} messages that do not begin with the prompt")
        rests.append(answer[len(prompt) * is_whole :])
    return prompt, tuple(rests), 0


def _common_length(conversations: list[list[Message]]) -> int:
    """How many leading messages all have; one message at least is left of each."""
    shortest = min(map(len, conversations)) - 1
    first = conversations[0]
    return next((i for i in range(shortest) if any(other[i] != first[i] for other in conversations)), shortest)


def _label(value: object, column: str) -> bool:
    """Whether a completion is desirable. Raises Unusable."""
    if value not in (True, False):  # 1 and 0, too
        raise Unusable(f"column {column!r} is {json.dumps(value, default=str)}, not true or false")
    return bool(value)


def _template_arguments(record: JSON, columns: Columns) -> JSON:
    value = record.get(TEMPLATE_ARGUMENTS)
    if TEMPLATE_ARGUMENTS in columns.ignore or not value:
        return {}
    value = parse_json_text(value, TEMPLATE_ARGUMENTS) if isinstance(value, str) else value
    if not isinstance(value, dict):
        raise Unusable(f"column {TEMPLATE_ARGUMENTS!r} is {name_of_type(value)}, not an object")
    check_unicode(json.dumps(value, ensure_ascii=False, default=str), TEMPLATE_ARGUMENTS)
    return {name: item for name, item in value.items() if item is not None}


def _says_something(value: object) -> bool:
    return bool(value.strip()) if isinstance(value, str) else value is not None and value != [] and value != {}


# ---- Columns that nothing reads

MEDIA_NAMES = re.compile(r"^(image|img|picture|photo|video|audio|speech|sound)s?($|_)", re.IGNORECASE)
MEDIA_FILES = re.compile(r"\.(png|jpe?g|webp|gif|bmp|mp4|mov|avi|webm|wav|mp3|flac|ogg)$", re.IGNORECASE)


def unread_columns(record: JSON, settings: DataSettings, kind: RecordKind) -> list[str]:
    """The columns of a record that hold text, lists or objects, and that neither its format nor data.ignore names.

    Raises:
        Unusable: such a column holds media: training on the rest would teach answers to what the model did not see.
    """
    columns, _ = _readers(settings, kind)
    if _token_columns(record, kind) is not None:
        return []
    present = frozenset(name for name, value in record.items() if value is not None)
    reader = reader_of(present, columns, kind)
    if reader is None:
        return []
    told = {*reader.columns, *columns.ignore, *MEANINGFUL}
    unread = [name for name in record if name not in told and isinstance(record[name], str | list | dict | bytes)]
    for name in unread:
        if _is_media(name, record[name]):
            raise Unusable(f"column {name!r} holds media, which is not trained on: data.ignore=[{name}] leaves it out")
    return [name for name in unread if _says_something(record[name])]


def _is_media(name: str, value: object) -> bool:
    if isinstance(value, list):
        return bool(value) and _is_media(name, value[0])
    if isinstance(value, dict):
        return isinstance(value.get("bytes"), bytes) or _is_media(name, value.get("path"))
    is_file = isinstance(value, str) and MEDIA_FILES.search(value) is not None
    return isinstance(value, bytes) or is_file or (MEDIA_NAMES.match(name) is not None and bool(value))
