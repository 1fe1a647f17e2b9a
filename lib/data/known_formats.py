"""Formats of data sets as they are published: recognised by their columns, read into one shape.

A format names the columns that it needs and those that it may use besides. What it makes of a record is a Draft: the
prompt and answers wherever the record had them, not yet checked. Nothing here knows what is trained on it.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from lib.data.record_formats import JSON, Columns, Unusable, name_of_type


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
