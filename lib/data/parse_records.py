"""One record ➜ its prompt and completions, not yet tokenised; or why it cannot be used.

column_readers.py finds what each column of a record is; here strings and messages become one of the three forms of
record_formats.py. A column that means something and would be lost makes the record unusable (data.ignore).
"""

from __future__ import annotations

import json
from dataclasses import replace

from lib.config.schema import DataSettings
from lib.data import known_formats
from lib.data.column_readers import TEMPLATE_ARGUMENTS, Reader, find, listed, missing, reader_of
from lib.data.known_formats import Draft
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
from lib.data.stamped_tokens import VOCABULARY, StampedTokens

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
        name = columns.label if columns.label in record else known_formats.LABEL
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
