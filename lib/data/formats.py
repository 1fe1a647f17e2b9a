"""Formats of data sets, recognised by their columns: a record ➜ Tokens, Plain or Chat.

A format names the columns that it needs. What it reads of a record is a Draft, the prompt and answers wherever the
record had them; the second half of this file checks drafts and makes records of them.
"""

from __future__ import annotations

import functools
import json
import math
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any, Literal, NamedTuple

from lib.config.settings import DataSettings
from lib.data.record_formats import (
    JSON,
    VOCABULARY,
    Chat,
    Columns,
    Message,
    Plain,
    Record,
    RecordKind,
    Tokens,
    Unusable,
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

    prompt: object = None  # a string or messages; None: all of it is in `completions`
    completions: tuple[Any, ...] = ()  # One answer, or the better and the worse one
    names: tuple[str, ...] = ()  # The column of each completion, for errors
    tools: object = None
    is_text: bool = False  # All of it is learnt: there is no prompt, and no conversation


Has = Literal["pair", "answer", "label", "prompt"]


class Format(NamedTuple):
    """How records with these columns are read."""

    name: str  # Of a published format; empty for columns that data.prompt, data.chosen, ... name.
    has: Has
    needs: tuple[str, ...]
    read: Callable[[JSON], Draft]  # Raises Unusable
    uses: tuple[str, ...] = ()  # Columns that it reads besides, where they are there


# ---- Published formats


def _best_and_worst(prompt: str, column: str, text: str, score: str, sign: int) -> Callable[[JSON], Draft]:
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


def _by_number(prompt: str, names: tuple[str, str], column: str, of_first: tuple[int, ...]) -> Callable[[JSON], Draft]:
    """Two answers and a number: which is better. of_first: the numbers of the first and the second; () for the sign."""

    def read(record: JSON) -> Draft:
        number = record[column]
        if not _is_finite(number) or (number not in of_first if of_first else number == 0):
            raise Unusable(f"column {column!r} is {number!r}, which prefers neither: nothing to prefer")
        order = names if (number == of_first[0] if of_first else number < 0) else names[::-1]
        return Draft(_nvidia_turns(record[prompt]), (record[order[0]], record[order[1]]), order)

    return read


def _is_finite(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _answers_behind(prompt: str, *names: str) -> Callable[[JSON], Draft]:
    return lambda record: Draft(_nvidia_turns(record[prompt]), tuple(record[name] for name in names), names)


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
    return check_unicode(record[name], name)


def _messages_of(turns: list[Any]) -> list[JSON]:
    pairs = [(("user", question), ("assistant", answer)) for question, answer in turns]
    return [{"role": role, "content": text} for pair in pairs for role, text in pair]


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
        {"role": "assistant" if speaker == "Assistant" else "user", "content": text.strip()}
        for speaker, text in zip(pieces[::2], pieces[1::2], strict=True)
    ]
    return turns[:-1] if turns[-1] == {"role": "assistant", "content": ""} else turns


PAIR, LABEL, ALPACA = ("chosen", "rejected"), "kto_tag", ("input", "history")
OUTPUTS = ("input", "preferred_output", "non_preferred_output")


def _preferred(name: str, prompt: str, one: str, other: str, number: str, *of_first: int) -> Format:
    """A published format of two answers and a number that prefers one."""
    read = _by_number(prompt, (one, other), number, of_first)
    return Format(name, "pair", (prompt, one, other, number), read)


def _ranked(name: str, prompt: str, column: str, text: str, score: str, sign: int) -> Format:
    return Format(name, "pair", (prompt, column), _best_and_worst(prompt, column, text, score, sign))


# The first one whose columns are all there is taken.
PUBLISHED = (
    Format("OpenAI preference", "pair", OUTPUTS, _openai_preference),
    _ranked("UltraFeedback", "instruction", "completions", "response", "overall_score", 1),
    _ranked("Nectar", "prompt", "answers", "answer", "rank", -1),
    _preferred("HelpSteer2 preference", "prompt", "response_1", "response_2", "preference_strength"),
    _preferred("HelpSteer3", "context", "response1", "response2", "overall_preference"),
    _preferred("SHP", "history", "human_ref_A", "human_ref_B", "labels", 1, 0),
    _preferred("PKU-SafeRLHF", "prompt", "response_0", "response_1", "better_response_id", 0, 1),
    Format("ShareGPT pairs", "pair", ("conversations", *PAIR), _sharegpt_pair),
    Format("orca_dpo_pairs", "pair", ("question", *PAIR), _answers_behind("question", *PAIR)),
    Format("Alpaca pairs", "pair", ("instruction", *PAIR), _alpaca(*PAIR), ALPACA),
    Format("distilabel pairs", "pair", ("input", *PAIR), _answers_behind("input", *PAIR)),
    Format("Alpaca KTO", "label", ("instruction", "output", LABEL), _alpaca("output"), ALPACA),
    Format("ShareGPT KTO", "label", ("conversations", LABEL), _conversation_in("conversations")),
    Format("OpenAI messages KTO", "label", ("messages", LABEL), _conversation_in("messages")),
    Format("ShareGPT", "answer", ("conversations",), _conversation_in("conversations")),
    Format("Capybara, LMSYS-Chat", "answer", ("conversation",), _capybara),
    Format("Alpaca", "answer", ("instruction", "output"), _alpaca("output"), ALPACA),
    Format("Dolly", "answer", ("instruction", "response"), _dolly, ("context",)),
    Format("HelpSteer", "answer", ("prompt", "response", "helpfulness"), _answers_behind("prompt", "response")),
)


# ---- Which format a record has

# Columns that mean something where no format reads them, and the setting that does, if one does.
MEANINGFUL = {
    "system": None,
    "system_prompt": "data.system=system_prompt",
    "tools": None,
    "functions": "data.tools=functions",
    "label": "train.loss=kto",
    LABEL: "train.loss=kto",
    **dict.fromkeys(("input", "weight", "history", "context", "images", "image")),
}
TEMPLATE_ARGUMENTS = "chat_template_kwargs"  # column of further arguments of the chat template


@functools.cache
def _named(columns: Columns) -> dict[str, Format]:
    """The formats of the columns that the settings name."""
    prompt, chosen, rejected, completion, messages, text = columns[:6]

    def form(has: Has, asked: str | None, *names: str) -> Format:
        """Answers behind a prompt's column, or each a whole conversation: messages, or a transcript."""

        def read(record: JSON) -> Draft:
            if asked is not None:
                given = record[asked] if columns.are_named else transcript(record[asked])
                return Draft(given, tuple(record[name] for name in names), names)
            answers = tuple(transcript(record[name]) for name in names)
            if any(isinstance(answer, str) for answer in answers):
                raise Unusable(_missing(record, columns, "preference", (prompt,)))
            return Draft(None, answers, names)

        return Format("", has, names if asked is None else (asked, *names), read)

    def plain(record: JSON) -> Draft:
        return Draft(None, (_text_in(record, text),), ("text",), is_text=True)

    return {
        "pair": form("pair", prompt, chosen, rejected),
        "whole pair": form("pair", None, chosen, rejected),
        "answer": form("answer", prompt, completion),
        "answer behind messages": form("answer", messages, completion),
        "conversation": Format("", "answer", (messages,), _conversation_in(messages)),
        "text": Format("", "answer", (text,), plain),
        "chosen": form("pair", prompt, chosen),
        "whole chosen": form("pair", None, chosen),
        "prompt": form("prompt", prompt),
    }


def _candidates(there: frozenset[str], columns: Columns, kind: RecordKind) -> Iterator[Format]:
    """The formats that may be meant by these columns, the likeliest first."""
    named = _named(columns)
    own = [named["answer"], named["answer behind messages"]]
    own += [named["conversation"]] if columns.completion not in there else []
    known = () if columns.are_named else PUBLISHED
    pairs, answers, labels = ([form for form in known if form.has == has] for has in ("pair", "answer", "label"))
    if kind == "preference":
        yield from (named["pair"], *pairs, named["whole pair"])
    elif kind == "unpaired":
        yield from (*own, *answers) if columns.label in there else labels
    elif kind == "prompt":
        published = next((form for form in (*pairs, *answers, *labels) if there.issuperset(form.needs)), None)
        reads_prompt = published is not None and columns.prompt in published.needs
        yield from () if reads_prompt else (named["prompt"],)
        yield from (*([published] if published else []), *own, named["whole pair"])
    elif columns.completion in there:
        yield from own
    else:
        yield from (*own, *pairs, *answers, named["text"], named["chosen"], named["whole chosen"])


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
    beside = () if form is _named(columns)["text"] else (columns.system, columns.tools, TEMPLATE_ARGUMENTS)
    extras = tuple(name for name in beside if name in there and name not in (*used, *columns.ignore))
    lost = there & MEANINGFUL.keys() - {*used, *extras, *columns.ignore}
    if kind == "prompt":
        lost -= {columns.label, LABEL, "weight"}
    title = f"{form.name} ({', '.join((*used, *extras))})" if form.name else " + ".join((*used, *extras))
    title += " (preference records: the other completion is not used)" * is_half
    known = {*form.needs, *used, *extras, *columns.ignore, *MEANINGFUL, VOCABULARY, *[columns.rejected] * is_half}
    return Reader(title, form, tuple(sorted(lost)), bool(extras), tuple(name for name in names if name not in known))


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
    others = "".join(f" or {name!r}" for name in (columns.messages, columns.text) if "completion" in absent)
    where = f"(columns: {', '.join(map(str, record)) or 'none'})"
    why = f"no column {next(iter(absent.values()))!r}{others * (kind == 'sft')} {where}"
    present = tuple(name for name, value in record.items() if value is not None)
    if kind == "preference" and {columns.label, LABEL} & set(present):
        return f"{why}; labelled answers are not pairs: train.loss=kto"
    if kind == "preference" and (other := reader_of(present, columns, "sft")) and other.form.has == "answer":
        return f"{why}; {other.form.name or 'this'} has one answer a record, not a pair: train.loss=sft"
    return f"{why}; name yours with {' '.join(f'data.{role}=COLUMN' for role in absent)}"


# ---- A record's form


def parse(record: JSON, settings: DataSettings, kind: RecordKind) -> Record:
    """The record's prompt and completions: (chosen, rejected), one for SFT or a label, none for a prompt.

    The first form wins: token ids; prompt and completion; messages; a published format; text; for SFT a pair's better.
    """
    columns = Columns.of(settings)
    if (names := _token_columns(record, kind)) is not None:
        tokens = _parse_tokens(record, names)
        return tokens if kind != "unpaired" else replace(tokens, label=_label(record, columns.label))
    reader = reader_of(tuple([name for name, value in record.items() if value is not None]), columns, kind)
    if reader is None:
        raise Unusable(_missing(record, columns, kind))
    for name in reader.lost:
        if _says_something(record[name]):
            meant = f"set {MEANINGFUL[name]}, or " if MEANINGFUL[name] else ""
            raise Unusable(
                f"column {name!r} would be lost: {reader.name} does not read it; {meant}leave it out with "
                f"data.ignore=[{name}]"
            )
    for name in reader.unread:
        if _is_media(name, record[name]):
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
        prompt = check_unicode(draft.prompt, "prompt") if isinstance(draft.prompt, str) else None
        return Plain(prompt, tuple(map(check_completion, draft.completions, draft.names)), reader.name, label)
    return _chat(draft, record, reader.name, columns, kind, label)


def parse_rows(record: JSON, settings: DataSettings, kind: RecordKind) -> list[Record]:
    """The rows of a record: one; of a pair two, where labels are wanted: chosen is desirable, rejected is not."""
    columns = Columns.of(settings)
    there = tuple(name for name, value in record.items() if value is not None)
    is_pair = {"chosen_ids", "rejected_ids"} <= set(there) or (
        reader_of(there, columns, "unpaired") is None and reader_of(there, columns, "preference") is not None
    )
    if kind != "unpaired" or settings.label in record or not is_pair:
        return [parse(record, settings, kind)]
    pair = parse(record, settings, "preference")
    title = f"{pair.columns} (each pair gives two rows: chosen is desirable, rejected is not)"
    rows: list[Record] = []
    for k, label in enumerate((True, False)):
        parts: JSON = {"completions": pair.completions[k : k + 1], "columns": title, "label": label}
        if not isinstance(pair, Plain) and pair.learnt is not None:
            parts["learnt"] = pair.learnt[k : k + 1]
        rows.append(replace(pair, **parts))
    return rows


def rows_of(record: JSON | Unusable, settings: DataSettings, kind: RecordKind) -> Sequence[Record | Unusable]:
    """The form of each row that a record gives, or why it has none."""
    try:
        return [record] if isinstance(record, Unusable) else parse_rows(record, settings, kind)
    except Unusable as why:
        return [why]


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
        if not isinstance(ids, list):
            why = f"column {name!r} is {name_of_type(ids)}, not a list of token ids"
            raise Unusable(why if name in record else f"no column {name!r}")
        for index, token in enumerate(ids):
            if type(token) is not int or token < 0:
                raise Unusable(f"{name}[{index}] is {json.dumps(token, default=str)}, not a token id")
        if not ids and name != "prompt_ids":
            raise Unusable(f"empty completion: {name!r} has no tokens")
    title, learnt = " + ".join(("prompt_ids", *names)), []
    for name in names:
        of_mask = name.replace("_ids", "_mask")
        mask = record.get(of_mask)
        if mask is None:
            mask = [True] * len(record[name])
        elif (
            not isinstance(mask, list) or len(mask) != len(record[name]) or not {0, 1}.issuperset(mask) or 1 not in mask
        ):
            raise Unusable(f"{of_mask} is not a list of 0 and 1, one for each of {name}, with a 1 for what is learnt")
        else:
            title += f" + {of_mask}"
        learnt.append([*map(bool, mask)])
    masks = None if all(map(all, learnt)) else tuple(learnt)
    return Tokens(
        record["prompt_ids"],
        tuple(record[name] for name in names),
        title,
        learnt=masks,
        vocabulary=str(record.get(VOCABULARY) or ""),
    )


def _label(record: JSON, column: str) -> bool:
    """Whether a completion is desirable. Raises Unusable."""
    if record.get(column) not in (True, False):  # 1 and 0, too
        if column not in record:
            raise Unusable(f"no column {column!r}; name yours with data.label=COLUMN")
        raise Unusable(f"column {column!r} is {json.dumps(record[column], default=str)}, not true or false")
    return bool(record[column])


# ---- Conversations


def _chat(draft: Draft, record: JSON, name: str, columns: Columns, kind: RecordKind, label: bool | None) -> Chat:
    """A draft as messages."""
    learnt: tuple[list[bool], ...] = ()
    completions: tuple[list[Message], ...] = ()
    if not draft.completions:
        prompt = _opened(record, _as_messages(draft.prompt, "user", "prompt", columns), columns)
    elif len(draft.completions) == 1 and draft.prompt is None:
        messages = _opened(record, check_messages(draft.completions[0], draft.names[0], columns.ignore), columns)
        if kind == "prompt":
            is_answered = messages[-1]["role"] == "assistant" and len(messages) > 1
            prompt = messages[:-1] if is_answered else messages
        elif len(messages) < 2:
            raise Unusable(f"column {draft.names[0]!r} has one message; it needs a prompt and an answer")
        else:
            learn = columns.learn if kind == "sft" else "last"
            prompt, completion, flags = learnt_part(messages, learn, draft.names[0])
            completions, learnt = (completion,), (flags,)
    else:
        prompt, answers, common = _answers(draft, columns)
        if any("weight" in message for part in (prompt, *answers) for message in part):
            raise Unusable("'weight' of a message is for SFT on conversations; leave it out with data.ignore=[weight]")
        prompt = _opened(record, prompt, columns)
        if kind != "prompt":
            completions = answers
            learnt = tuple(
                [message["role"] == "assistant" and i >= common for i, message in enumerate(answer)]
                for answer in answers
            )
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
    return Chat(
        prompt,
        completions,
        name,
        None if all(flags == [True] for flags in learnt) else tuple(map(tuple, learnt)),
        None if columns.tools in columns.ignore else check_tools(tools, columns.tools),
        _template_arguments(record, columns),
        label,
    )


def _opened(record: JSON, messages: list[Message], columns: Columns) -> list[Message]:
    """Messages behind the system prompt of its own column; one that both have stands there once."""
    system = record.get(columns.system)
    if columns.system in columns.ignore or not _says_something(system):
        return messages
    opening = _text_in(record, columns.system)
    if messages and messages[0]["role"] in ("system", "developer"):
        if messages[0]["content"] == opening:
            return messages
        raise Unusable(
            f"column {columns.system!r} says something else than the conversation's own system message; leave it "
            f"out with data.ignore=[{columns.system}]"
        )
    return [{"role": "system", "content": opening}, *messages]


def _as_messages(value: object, role: str, name: str, columns: Columns) -> list[Message]:
    if not isinstance(value, str):
        return check_messages(value, name, columns.ignore)
    checked = check_unicode(value, name) if role == "user" else check_completion(value, name)
    return [{"role": role, "content": checked}]


def _answers(draft: Draft, columns: Columns) -> tuple[list[Message], tuple[list[Message], ...], int]:
    """The messages of the prompt, those of each completion, and how many of these the completions have in common.

    Of two whole conversations the common leading messages are the prompt, and a prompt's column has to be among them.
    """
    both = zip(draft.completions, draft.names, strict=True)
    answers = [_as_messages(said, "assistant", name, columns) for said, name in both]
    are_whole = all(answer[0]["role"] != "assistant" for answer in answers)
    if draft.prompt is None or isinstance(draft.prompt, str) and are_whole:
        shortest = min(map(len, answers)) - 1  # one message at least is left of each
        alike = [all(answer[i] == answers[0][i] for answer in answers) for i in range(shortest)]
        length = common = alike.index(False) if False in alike else shortest
        # A prompt is what a model is asked: the completions begin where an assistant speaks.
        while length and any(answer[length]["role"] != "assistant" for answer in answers):
            length -= 1
        prompt = answers[0][:length]
        asked = draft.prompt.strip() if isinstance(draft.prompt, str) else ""
        if asked and not any(asked in str(message["content"]) for message in prompt):
            raise Unusable(f"column {columns.prompt!r} is not in the conversation of {draft.names[0]!r}")
        if not prompt:
            raise Unusable(f"{' and '.join(map(repr, draft.names))} have no first message in common: no prompt")
        return prompt, tuple(answer[length:] for answer in answers), common - length
    prompt, rests = _as_messages(draft.prompt, "user", "prompt", columns), []
    for answer, name in zip(answers, draft.names, strict=True):
        is_whole = answer[0]["role"] != "assistant"
        if is_whole and answer[: len(prompt)] != prompt or len(answer) == len(prompt) * is_whole:
            raise Unusable(f"{name!r} has {len(answer)} messages that do not begin with the prompt")
        rests.append(answer[len(prompt) * is_whole :])
    return prompt, tuple(rests), 0


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
    present = tuple(name for name, value in record.items() if value is not None)
    reader = None if _token_columns(record, kind) is not None else reader_of(present, Columns.of(settings), kind)
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
