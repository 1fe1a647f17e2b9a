"""Formats of data sets, recognised by their columns: a record ➜ Tokens, Plain or Chat.

A format names the columns that it needs. What it reads of a record is a Draft, the prompt and answers wherever the
record had them; the second half of this file checks drafts and makes records of them.
"""

from __future__ import annotations

import functools
import json
import math
import re
from collections.abc import Callable, Iterator
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
    listed,
    name_of_type,
    parse_json_text,
)


class Draft(NamedTuple):
    """What a record says, unchecked. A value that is a list is a list of messages."""

    prompt: object = None
    """A string or messages; None: the whole conversation is in `completions`, or all of it is text."""
    completions: tuple[Any, ...] = ()
    """One answer, or the better and the worse one."""
    names: tuple[str, ...] = ()
    """The column of each completion, for errors."""
    tools: object = None
    is_text: bool = False
    """All of it is learnt: there is no prompt, and no conversation."""


Has = Literal["pair", "answer", "label", "prompt"]


class Format(NamedTuple):
    """How records with these columns are read."""

    name: str
    """Of a published format; empty for columns that data.prompt, data.chosen, ... name."""
    has: Has
    needs: tuple[str, ...]
    read: Callable[[JSON], Draft]
    """Raises Unusable."""
    uses: tuple[str, ...] = ()
    """Columns that it reads besides, where they are there."""


# ---- Published formats


def _best_and_worst(prompt: str, column: str, text: str, score: str, sign: int) -> Callable[[JSON], Draft]:
    """A list of answers with a number each, higher (sign 1) or lower (-1) for better ones."""

    def read(record: JSON) -> Draft:
        items = record[column]
        if not isinstance(items, list) or not all(isinstance(item, dict) for item in items):
            raise Unusable(f"column {column!r} is not a list of answers")
        scored = [item for item in items if _is_finite(item.get(score)) and item.get(text) is not None]
        if len(scored) < 2:
            raise Unusable(f"{column!r} has {len(scored)} answers with a {score}; a pair takes two")
        best = max(scored, key=lambda item: sign * item[score])
        worst = min(scored, key=lambda item: sign * item[score])
        if best[score] == worst[score]:
            raise Unusable(f"every answer in {column!r} has {score} {best[score]}: nothing to prefer")
        return Draft(transcript(record[prompt]), (best[text], worst[text]), (f"{column}.{text}",) * 2)

    return read


def _by_number(prompt: str, names: tuple[str, str], column: str, of_first: tuple[int, ...]) -> Callable[[JSON], Draft]:
    """Two answers and a number: which is better. of_first: the numbers of the first and the second; () for the sign."""

    def read(record: JSON) -> Draft:
        number = record[column]
        if not _is_finite(number) or (of_first and number not in of_first):
            wanted = "not 0 or 1" if of_first else "not a number that prefers one"
            raise Unusable(f"column {column!r} is {number!r}, {wanted}")
        if not of_first and number == 0:
            raise Unusable(f"{column!r} is 0, a tie: nothing to prefer")
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
    given, names = record["input"], ("preferred_output", "non_preferred_output")
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


def _both(record: JSON, first: str, second: str, between: str) -> Any:
    """The text of a column, with that of a second one behind it where it says anything."""
    if not record.get(second):
        return record[first]
    for name in (first, second):
        if not isinstance(record[name], str):
            raise Unusable(f"column {name!r} is {name_of_type(record[name])}, not a string")
    return f"{record[first]}{between}{record[second]}" if record[second].strip() else record[first]


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


PAIR, LABEL = ("chosen", "rejected"), "kto_tag"
HELPSTEER2, HELPSTEER3, SHP = ("response_1", "response_2"), ("response1", "response2"), ("human_ref_A", "human_ref_B")
SAFE, STRENGTH, PREFERENCE = ("response_0", "response_1"), "preference_strength", "overall_preference"
OUTPUTS, ALPACA = ("input", "preferred_output", "non_preferred_output"), ("input", "history")
# The first one whose columns are all there is taken.
PUBLISHED = (
    Format("OpenAI preference", "pair", OUTPUTS, _openai_preference),
    Format(
        "UltraFeedback",
        "pair",
        ("instruction", "completions"),
        _best_and_worst("instruction", "completions", "response", "overall_score", 1),
    ),
    Format("Nectar", "pair", ("prompt", "answers"), _best_and_worst("prompt", "answers", "answer", "rank", -1)),
    Format(
        "HelpSteer2 preference",
        "pair",
        ("prompt", *HELPSTEER2, STRENGTH),
        _by_number("prompt", HELPSTEER2, STRENGTH, ()),
    ),
    Format(
        "HelpSteer3", "pair", ("context", *HELPSTEER3, PREFERENCE), _by_number("context", HELPSTEER3, PREFERENCE, ())
    ),
    Format("SHP", "pair", ("history", *SHP, "labels"), _by_number("history", SHP, "labels", (1, 0))),
    Format(
        "PKU-SafeRLHF",
        "pair",
        ("prompt", *SAFE, "better_response_id"),
        _by_number("prompt", SAFE, "better_response_id", (0, 1)),
    ),
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
    Format(
        "Dolly",
        "answer",
        ("instruction", "response"),
        lambda record: Draft(_both(record, "instruction", "context", "\n\n"), (record["response"],), ("response",)),
        ("context",),
    ),
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
TOKEN_COLUMNS = ("prompt_ids", "chosen_ids", "rejected_ids", "completion_ids")
MASKS = ("chosen_mask", "rejected_mask", "completion_mask")


def columns_read(columns: Columns) -> frozenset[str]:
    """Every column that any format may look at."""
    known = {name for form in PUBLISHED for name in (*form.needs, *form.uses)}
    others = (*MEANINGFUL, *columns[:9], TEMPLATE_ARGUMENTS, *TOKEN_COLUMNS, *MASKS, VOCABULARY, "rewards", "logps")
    return frozenset({*known, *others})


@functools.cache
def _named(columns: Columns) -> dict[str, Format]:
    """The formats of the columns that the settings name."""
    prompt, chosen, rejected, completion, messages, text = columns[:6]

    def asked(record: JSON) -> object:
        return record[prompt] if columns.are_named else transcript(record[prompt])

    def whole(record: JSON, name: str) -> object:
        """A conversation: messages, or a transcript."""
        value = transcript(record[name])
        if isinstance(value, str):
            raise Unusable(_missing(record, columns, "preference", (prompt,)))
        return value

    def plain(record: JSON) -> Draft:
        if not isinstance(record[text], str):
            raise Unusable(f"column {text!r} is {name_of_type(record[text])}, not a string")
        return Draft(None, (record[text],), ("text",), is_text=True)

    def form(has: Has, needs: tuple[str, ...], read: Callable[[JSON], Draft]) -> Format:
        return Format("", has, needs, read)

    pair, said = (chosen, rejected), (completion,)
    return {
        "pair": form("pair", (prompt, *pair), lambda r: Draft(asked(r), tuple(r[name] for name in pair), pair)),
        "whole pair": form("pair", pair, lambda r: Draft(None, tuple(whole(r, name) for name in pair), pair)),
        "answer": form("answer", (prompt, *said), lambda r: Draft(asked(r), (r[completion],), said)),
        "answer behind messages": form(
            "answer", (messages, *said), lambda r: Draft(r[messages], (r[completion],), said)
        ),
        "conversation": form("answer", (messages,), _conversation_in(messages)),
        "text": form("answer", (text,), plain),
        "chosen": form("pair", (prompt, chosen), lambda r: Draft(asked(r), (r[chosen],), (chosen,))),
        "whole chosen": form("pair", (chosen,), lambda r: Draft(None, (whole(r, chosen),), (chosen,))),
        "prompt": form("prompt", (prompt,), lambda r: Draft(asked(r))),
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

    name: str
    """For people: `prompt + chosen + rejected`, or `Alpaca (instruction, input, output)`."""
    form: Format
    lost: tuple[str, ...]
    """Columns that mean something and that nothing reads."""
    is_chat: bool
    """Whether a system prompt, tools or template arguments make a conversation of any text."""
    unread: tuple[str, ...]
    """Other columns, which nothing reads and data.ignore does not name."""


@functools.lru_cache(4096)
def reader_of(names: tuple[str, ...], columns: Columns, kind: RecordKind) -> Reader | None:
    """How records are read that have values in these columns; None where they cannot be."""
    there = frozenset(names)
    form = next((form for form in _candidates(there, columns, kind) if there.issuperset(form.needs)), None)
    if form is None:
        return None
    used = (*form.needs, *(name for name in form.uses if name in there))
    if form.has == "pair" and kind == "sft" and not form.name:
        used = form.needs[-1:]
    if kind == "unpaired" and form.has == "answer":
        used = (*used, columns.label)
    beside = () if form is _named(columns)["text"] else (columns.system, columns.tools, TEMPLATE_ARGUMENTS)
    extras = tuple(name for name in beside if name in there and name not in (*used, *columns.ignore))
    lost = there & MEANINGFUL.keys() - {*used, *extras, *columns.ignore}
    if kind == "prompt":
        lost -= {columns.label, LABEL, "weight"}
    told = f"{form.name} ({', '.join((*used, *extras))})" if form.name else " + ".join((*used, *extras))
    if kind == "sft" and form.has == "pair":
        told += " (preference records: the other completion is not used)"
    known = {*form.needs, *used, *extras, *columns.ignore, *MEANINGFUL, VOCABULARY}
    known |= {columns.rejected} if kind == "sft" and form.has == "pair" else set()
    return Reader(told, form, tuple(sorted(lost)), bool(extras), tuple(name for name in names if name not in known))


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
    told = f"no column {next(iter(absent.values()))!r}{others * (kind == 'sft')} (columns: {listed(record)})"
    present = tuple(name for name, value in record.items() if value is not None)
    if kind == "preference" and {columns.label, LABEL} & set(present):
        return f"{told}; labelled answers are not pairs: train.loss=kto"
    if kind == "preference" and (other := reader_of(present, columns, "sft")) and other.form.has == "answer":
        return f"{told}; {other.form.name or 'this'} has one answer a record, not a pair: train.loss=sft"
    return f"{told}; name yours with {' '.join(f'data.{role}=COLUMN' for role in absent)}"


# ---- A record's form


def parse(record: JSON, settings: DataSettings, kind: RecordKind) -> Record:
    """The record's prompt and completions: two for preferences (chosen, rejected), one for SFT, none for a prompt.

    Unpaired feedback is one completion with its label. Raises Unusable. Of several forms in one record the first
    wins: token ids; prompt and completion; messages; a published format; text; and for SFT the better answer of a pair.
    """
    columns = Columns.of(settings)
    if (names := _token_columns(record, kind)) is not None:
        tokens = _parse_tokens(record, names)
        if kind != "unpaired":
            return tokens
        if record.get(columns.label) is None:
            raise Unusable(
                f"no column {columns.label!r} (columns: {listed(record)}); name yours with data.label=COLUMN"
            )
        return replace(tokens, label=_label(record[columns.label], columns.label))
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
        name = columns.label if columns.label in record else LABEL
        label = _label(record[name], name)
    if len(draft.completions) == 2 and draft.completions[0] == draft.completions[1]:
        raise Unusable(f"{draft.names[0]!r} is equal to {draft.names[1]!r}: nothing to prefer")
    if kind == "prompt" and draft.prompt is not None:
        draft = draft._replace(completions=(), names=())
    if kind == "sft":  # of a pair the better one
        draft = draft._replace(completions=draft.completions[:1], names=draft.names[:1])
    if not reader.is_chat and (plain := _plain(draft, reader.name, label)):
        return plain
    return _chat(draft, record, reader.name, columns, kind, label)


def parse_rows(record: JSON, settings: DataSettings, kind: RecordKind) -> list[Record]:
    """The rows that a record gives: one; of a pair two, where labels are wanted: chosen is desirable, rejected is not.

    Raises Unusable, as `parse`.
    """
    columns = Columns.of(settings)
    there = tuple(name for name, value in record.items() if value is not None)
    is_pair = {"chosen_ids", "rejected_ids"} <= set(there) or (
        reader_of(there, columns, "unpaired") is None and reader_of(there, columns, "preference") is not None
    )
    if kind != "unpaired" or settings.label in record or not is_pair:
        return [parse(record, settings, kind)]
    pair = parse(record, settings, "preference")
    told = f"{pair.columns} (each pair gives two rows: chosen is desirable, rejected is not)"
    rows: list[Record] = []
    for k, label in enumerate((True, False)):
        parts: JSON = {"completions": pair.completions[k : k + 1], "columns": told, "label": label}
        if not isinstance(pair, Plain) and pair.learnt is not None:
            parts["learnt"] = pair.learnt[k : k + 1]
        rows.append(replace(pair, **parts))
    return rows


def _plain(draft: Draft, name: str, label: bool | None) -> Plain | None:
    """A draft that is strings alone."""
    if not all(isinstance(text, str) for text in draft.completions):
        return None
    if not isinstance(draft.prompt, str) and not draft.is_text:
        return None
    prompt = check_unicode(draft.prompt, "prompt") if isinstance(draft.prompt, str) else None
    return Plain(prompt, tuple(map(check_completion, draft.completions, draft.names)), name, label)


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
            if name not in record:
                raise Unusable(f"no column {name!r} (columns: {listed(record)})")
            raise Unusable(f"column {name!r} is {name_of_type(ids)}, not a list of token ids")
        for index, token in enumerate(ids):
            if type(token) is not int or token < 0:
                raise Unusable(f"{name}[{index}] is {json.dumps(token, default=str)}, not a token id")
        if not ids and name != "prompt_ids":
            raise Unusable(f"empty completion: {name!r} has no tokens")
    columns, learnt = " + ".join(("prompt_ids", *names)), []
    for name in names:
        of_mask = name.replace("_ids", "_mask")
        mask = record.get(of_mask)
        if mask is None:
            learnt.append([True] * len(record[name]))
            continue
        if not isinstance(mask, list) or any(bit not in (0, 1) for bit in mask) or len(mask) != len(record[name]):
            raise Unusable(f"{of_mask} is not a list of 0 and 1, one for each of {name}")
        if not any(mask):
            raise Unusable(f"{of_mask} has no 1: no token is learnt")
        columns += f" + {of_mask}"
        learnt.append([*map(bool, mask)])
    stamp = record.get(VOCABULARY)
    return Tokens(
        record["prompt_ids"],
        tuple(record[name] for name in names),
        columns,
        learnt=None if all(map(all, learnt)) else tuple(learnt),
        vocabulary=stamp if isinstance(stamp, str) else "",
    )


# ---- Conversations


def _chat(draft: Draft, record: JSON, name: str, columns: Columns, kind: RecordKind, label: bool | None) -> Chat:
    """A draft as messages."""
    learnt: tuple[list[bool], ...] = ()
    completions: tuple[list[Message], ...] = ()
    if not draft.completions:
        prompt = _as_messages(draft.prompt, "user", "prompt", columns)
    elif len(draft.completions) == 1 and draft.prompt is None:
        conversation = check_messages(draft.completions[0], draft.names[0], columns.ignore)
        if kind == "prompt":
            is_answered = conversation[-1]["role"] == "assistant" and len(conversation) > 1
            prompt = conversation[:-1] if is_answered else conversation
        else:
            conversation = _opened(record, conversation, columns)
            if len(conversation) < 2:
                raise Unusable(f"column {draft.names[0]!r} has one message; it needs a prompt and an answer")
            prompt, completion, flags = learnt_part(
                conversation, columns.learn if kind == "sft" else "last", draft.names[0]
            )
            completions, learnt = (completion,), (flags,)
    else:
        prompt, completions, common = _answers(draft, columns)
        for message in (*prompt, *(message for answer in completions for message in answer)):
            if "weight" in message:
                raise Unusable(
                    "'weight' of a message is for SFT on conversations; leave it out with data.ignore=[weight]"
                )
        learnt = tuple(
            [message["role"] == "assistant" and i >= common for i, message in enumerate(answer)]
            for answer in completions
        )
        completions = completions if kind != "prompt" else ()
    if kind == "prompt" or draft.prompt is not None or len(draft.completions) > 1:
        prompt = _opened(record, prompt, columns)
    for answer, of_answer in zip(completions, draft.names, strict=False):
        if prompt and prompt[-1]["role"] == answer[0]["role"] == "assistant":
            raise Unusable("the prompt ends with an assistant message; it has to end before the answer")
        if columns.learn != "all" or kind != "sft":
            _check_answer(answer[-1], of_answer)
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


def _check_answer(message: Message, name: str) -> None:
    if message["role"] != "assistant":
        raise Unusable(f"the last message of {name!r} is from {message['role']!r}, not from 'assistant'")
    if not (message["content"] or "").strip() and not message.get("tool_calls"):
        raise Unusable(f"empty completion: {name!r} is blank")


def _opened(record: JSON, messages: list[Message], columns: Columns) -> list[Message]:
    """Messages behind the system prompt of its own column; one that both have stands there once."""
    system = record.get(columns.system)
    if columns.system in columns.ignore or not _says_something(system):
        return messages
    if not isinstance(system, str):
        raise Unusable(f"column {columns.system!r} is {name_of_type(system)}, not a string")
    if messages and messages[0]["role"] in ("system", "developer"):
        if messages[0]["content"] == system:
            return messages
        raise Unusable(
            f"column {columns.system!r} says something else than the conversation's own system message; leave it "
            f"out with data.ignore=[{columns.system}]"
        )
    return [{"role": "system", "content": check_unicode(system, columns.system)}, *messages]


def _as_messages(value: object, role: str, name: str, columns: Columns) -> list[Message]:
    if not isinstance(value, str):
        return check_messages(value, name, columns.ignore)
    checked = check_unicode(value, name) if role == "user" else check_completion(value, name)
    return [{"role": role, "content": checked}]


def _answers(draft: Draft, columns: Columns) -> tuple[list[Message], tuple[list[Message], ...], int]:
    """The messages of the prompt, those of each completion, and how many of these the completions have in common.

    A completion may be a whole conversation. Of two of them the common leading messages are the prompt, and a prompt's
    column has to be among these: else it would be dropped without a word.
    """
    answers = [
        _as_messages(said, "assistant", name, columns)
        for said, name in zip(draft.completions, draft.names, strict=True)
    ]
    are_whole = all(answer[0]["role"] != "assistant" for answer in answers)
    if draft.prompt is None or isinstance(draft.prompt, str) and are_whole:
        shortest = min(map(len, answers)) - 1  # one message at least is left of each
        alike = [all(answer[i] == answers[0][i] for answer in answers) for i in range(shortest)]
        length = common = alike.index(False) if False in alike else shortest
        # A prompt is what a model is asked: the completions begin where an assistant speaks.
        while length and any(answer[length]["role"] != "assistant" for answer in answers):
            length -= 1
        prompt = answers[0][:length]
        if isinstance(draft.prompt, str):
            asked = draft.prompt.strip()
            if not any(asked in str(message["content"]) for message in prompt):
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
