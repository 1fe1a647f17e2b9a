"""Data sets in the shapes in which they are published: what is recognised, what it becomes, and what stops the run.

Every record here was written for these tests, in the columns and the nesting of the data set that its test names.
"""

import json
import math
from dataclasses import replace
from typing import Any

import pytest

from lib.config.settings import DataSettings
from lib.data import record_formats, sources
from lib.data.record_formats import Chat, Columns, Plain, RecordKind, Tokens, Unusable, parse
from tests import tiny


def read(record: dict[str, Any], kind: RecordKind = "preference", **settings: Any) -> Tokens | Plain | Chat:
    return parse(record, Columns.of(DataSettings(train="-", **settings)), kind)


def reason(record: dict[str, Any], kind: RecordKind = "preference", **settings: Any) -> str:
    with pytest.raises(Unusable) as error:
        read(record, kind, **settings)
    return str(error.value)


def user(text: Any, **fields: Any) -> dict[str, Any]:
    return {"role": "user", "content": text, **fields}


def assistant(text: Any, **fields: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": text, **fields}


def system(text: str) -> dict[str, Any]:
    return {"role": "system", "content": text}


WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "Today's weather in a town",
        "parameters": {"type": "object", "properties": {"town": {"type": "string"}}, "required": ["town"]},
    },
}
CALL = {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": {"town": "Bonn"}}}
RESULT = {"role": "tool", "tool_call_id": "c1", "content": '{"sky": "grey"}'}

# ---- Every format: its records as they are published, the name that it is told by, and what becomes of them.

PUBLISHED = [json.loads(line) for line in (tiny.ROOT / "tests/golden/formats.jsonl").read_text().splitlines()]
PAIRS = {case["name"]: case["record"] for case in PUBLISHED if case["kind"] == "pair"}
SINGLE = {case["name"]: case["record"] for case in PUBLISHED if case["kind"] == "single"}
ALPACA, OPENAI = SINGLE["Alpaca"], SINGLE["OpenAI"]
ASKED = [user("Name a river.")]
TURNS = [user("Name a river."), assistant("The Rhine."), user("Where?")]
BARE_CALL = {"type": "function", "function": {"name": "weather", "arguments": {"town": "Bonn"}}}


def of_kind(kind: str) -> pytest.MarkDecorator:
    cases = [case for case in PUBLISHED if case["kind"] == kind]
    return pytest.mark.parametrize("case", cases, ids=lambda case: case["name"])


def as_chat(parsed: Tokens | Plain | Chat) -> Chat:
    """A record's messages, whichever form it has."""
    assert not isinstance(parsed, Tokens)
    if isinstance(parsed, Chat):
        return parsed
    assert parsed.prompt is not None
    answers = tuple([assistant(text)] for text in parsed.completions)
    return Chat([user(parsed.prompt)], answers, parsed.columns, label=parsed.label)  # type: ignore[list-item, arg-type]


@of_kind("pair")
def test_published_pairs_are_read_whole_and_told_by_name(case: dict[str, Any]) -> None:
    chat, answers = as_chat(read(case["record"])), [[assistant(text)] for text in case["answers"]]
    assert (chat.columns, chat.prompt, list(chat.completions)) == (case["columns"], case["prompt"], answers)
    assert chat.learnt is None and not chat.tools
    assert as_chat(read(case["record"], "prompt")).prompt == case["prompt"]
    alone = as_chat(read(case["record"], "sft"))
    assert alone.prompt == case["prompt"] and alone.completions == (answers[0],)


@of_kind("single")
def test_published_answers_are_read_whole_and_told_by_name(case: dict[str, Any]) -> None:
    record, chat = case["record"], as_chat(read(case["record"], "sft"))
    assert (chat.columns, chat.prompt) == (case["columns"], case["prompt"])
    assert chat.completions == ([assistant(case["answers"][0])],) and chat.learnt is None
    assert chat.tools == ([WEATHER] if "tools" in record else None)
    assert as_chat(read(record, "prompt")).prompt == case["prompt"]
    assert "train.loss=sft" in reason(record)


@of_kind("labelled")
def test_labelled_answers_are_recognised(case: dict[str, Any]) -> None:
    record = case["record"]
    column = "label" if "label" in record else "kto_tag"
    for value, label in ((True, True), (False, False), (1, True), (0, False)):
        chat = as_chat(read(record | {column: value}, "unpaired"))
        assert chat.label is label and chat.columns == case["columns"]
        assert chat.prompt == ASKED and chat.completions == ([assistant("The Rhine.")],)
    for value in (2, "yes", [], -1):
        said = f"column {column!r} is {json.dumps(value)}, not true or false"
        assert said in reason(record | {column: value}, "unpaired")
    assert "label" in reason({k: v for k, v in record.items() if k != column}, "unpaired")
    # With another loss the label would be lost, and that is said.
    assert f"column '{column}' would be lost" in reason(record, "sft")
    assert f"set train.loss=kto, or leave it out with data.ignore=[{column}]" in reason(record, "sft")
    assert as_chat(read(record, "sft", ignore=[column])).prompt == ASKED
    assert "labelled answers are not pairs: train.loss=kto" in reason(record)


# ---- Which answer is the better one


@pytest.mark.parametrize(
    "record, change",
    [
        (PAIRS["HelpSteer2"], {"preference_strength": -1}),
        (PAIRS["HelpSteer3"], {"overall_preference": 3}),
        (PAIRS["SHP"], {"labels": 1}),
        (PAIRS["PKU-SafeRLHF"], {"better_response_id": 1}),
    ],
    ids=lambda value: next(iter(value)),
)
def test_the_direction_of_a_preference_decides_which_is_chosen(record: dict[str, Any], change: dict[str, Any]) -> None:
    chosen, rejected = as_chat(read(record)).completions
    assert as_chat(read(record | change)).completions == (rejected, chosen)


ONE_ANSWER = PAIRS["UltraFeedback"] | {"completions": PAIRS["UltraFeedback"]["completions"][:1]}
NO_RANKS = {"prompt": "a", "answers": [{"answer": "b", "rank": math.nan}, {"answer": "c", "rank": 1}]}


@pytest.mark.parametrize(
    "record, words",
    [
        (PAIRS["HelpSteer2"] | {"preference_strength": 0}, "'preference_strength' is 0, which prefers neither"),
        (PAIRS["HelpSteer3"] | {"overall_preference": "1"}, "'overall_preference' is '1', which prefers"),
        (PAIRS["SHP"] | {"labels": 2}, "'labels' is 2, which prefers neither"),
        (PAIRS["PKU-SafeRLHF"] | {"better_response_id": -1}, "'better_response_id' is -1"),
        (ONE_ANSWER, "'completions' has no two answers with another overall_score"),
        (NO_RANKS, "'answers' has no two answers with another rank"),
        (PAIRS["Nectar"] | {"answers": []}, "'answers' has no two answers"),
        (PAIRS["Alpaca pairs"] | {"input": 3}, "'input' is a number, not a string"),
        (PAIRS["orca_dpo_pairs"] | {"system": ["a"]}, "'system' is a list, not a string"),
        (PAIRS["OpenAI preference"] | {"input": {"messages": None}}, "'input' is not an object with messages"),
        (PAIRS["hh-rlhf"] | {"rejected": "no transcript"}, "no column 'prompt' (columns: chosen, rejected)"),
        (PAIRS["hh-rlhf"] | {"rejected": PAIRS["hh-rlhf"]["chosen"]}, "'chosen' is equal to 'rejected'"),
        (PAIRS["hh-rlhf"] | {"rejected": "\n\nHuman: Else?\n\nAssistant: Yes."}, "no first message in common"),
    ],
)
def test_a_record_without_a_preference_says_why(record: dict[str, Any], words: str) -> None:
    assert words in reason(record)


# ---- Nothing is lost without a word


@pytest.mark.parametrize(
    "record, kind, column",
    [
        (PAIRS["orca_dpo_pairs"] | {"history": [["a", "b"]]}, "preference", "history"),
        (PAIRS["orca_dpo_pairs"] | {"input": "x"}, "preference", "input"),
        (PAIRS["orca_dpo_pairs"] | {"label": 0}, "preference", "label"),
        ({"prompt": "a", "chosen": "b", "rejected": "c", "context": "d"}, "preference", "context"),
        ({"prompt": "a", "completion": "b", "weight": 0.5}, "sft", "weight"),
        ({"text": "a", "system": "b"}, "sft", "system"),
        ({"text": "a", "label": 0}, "sft", "label"),
        ({"messages": [user("a"), assistant("b")], "images": ["x.png"]}, "sft", "images"),
        ({"prompt": "a", "input": "b"}, "prompt", "input"),
        ({"instruction": "a", "context": "c", "output": "b"}, "sft", "context"),
    ],
)
def test_a_column_that_would_be_lost_stops_the_run(record: dict[str, Any], kind: RecordKind, column: str) -> None:
    said = reason(record, kind)
    assert f"column {column!r} would be lost" in said and f"data.ignore=[{column}]" in said
    without = {name: value for name, value in record.items() if name != column}
    assert read(record, kind, ignore=[column]) == read(without, kind)
    for nothing in (None, "", " \n", [], {}):
        assert replace(read(record | {column: nothing}, kind), columns="") == replace(read(without, kind), columns="")


def test_a_named_column_wins_over_every_format() -> None:
    record = ALPACA | {"question": "Which?", "answer": "This."}
    named = read(record, "sft", columns={"prompt": "question", "completion": "answer"}, ignore=["input"])
    assert named == Plain("Which?", ("This.",), "question + answer")
    # The text of a transcript stays a text.
    parsed = read({"ask": "\n\nHuman: a\n\nAssistant:", "chosen": "b", "rejected": "c"}, columns={"prompt": "ask"})
    assert isinstance(parsed, Plain) and parsed.prompt == "\n\nHuman: a\n\nAssistant:"
    system_prompt = {"prompt": "a", "completion": "b", "system_prompt": "Be brief."}
    assert "set data.columns={system: system_prompt}, or" in reason(system_prompt, "sft")
    as_system = as_chat(read(system_prompt, "sft", columns={"system": "system_prompt"}))
    assert as_system.prompt == [system("Be brief."), user("a")]


def test_two_system_prompts_have_to_agree() -> None:
    record = {"messages": [system("Be brief."), *TURNS, assistant("In Europe.")], "system": "Be brief."}
    assert as_chat(read(record, "sft")).prompt == [system("Be brief."), *TURNS]
    assert "says something else than the conversation's own" in reason(record | {"system": "Be long."}, "sft")
    assert as_chat(read(record | {"system": "Be long."}, "sft", ignore=["system"])).prompt[0] == system("Be brief.")


# ---- What is learnt of a conversation

LONG = [system("Be brief."), user("a"), assistant("b"), user("c"), assistant("d")]


@pytest.mark.parametrize(
    "weights, learn, first, learnt",
    [
        ({}, "last", 4, None),
        ({}, "assistant", 2, (True, False, True)),
        ({}, "all", 0, (True,) * 5),
        ({2: 0}, "last", 4, None),
        ({2: 1, 4: 1}, "last", 2, (True, False, True)),
        ({4: 0}, "last", 2, None),
        ({2: 0, 4: 1}, "assistant", 4, None),
        ({1: 0, 2: 1}, "all", 0, (True, False, True, True, True)),
    ],
)
def test_what_is_learnt_of_a_conversation(
    weights: dict[int, int], learn: str, first: int, learnt: tuple[bool, ...] | None
) -> None:
    messages = [message | ({"weight": weights[i]} if i in weights else {}) for i, message in enumerate(LONG)]
    chat = as_chat(read({"messages": messages}, "sft", learn=learn))
    count = 1 if learnt is None else len(learnt)
    assert chat.prompt == LONG[:first] and chat.completions == (LONG[first : first + count],)
    assert chat.learnt == (None if learnt is None else (learnt,))


@pytest.mark.parametrize(
    "messages, learn, words",
    [
        ([*LONG, user("e")], "last", "ends with a message of 'user', and no answer follows it: give it one"),
        ([*LONG, user("e")], "assistant", "ends with a message of 'user'"),
        ([user("a"), assistant("b", weight=0)], "last", "nothing of 'messages' is learnt: every message"),
        ([user("a"), assistant("b", weight=0.5)], "last", "messages[1].weight is 0.5, not 0 or 1"),
        ([user("a"), assistant(" ")], "assistant", "empty completion"),
        ([user("a"), assistant(None)], "last", "messages[1] has no content and no tool_calls"),
        ([user({"text": "a"}), assistant("b")], "last", "messages[0].content is an object, not a string"),
        ([user("a"), assistant("b", reasoning_content="\ud800")], "last", "half a surrogate pair"),
    ],
)
def test_a_conversation_that_cannot_be_learnt_says_why(messages: list[Any], learn: str, words: str) -> None:
    assert words in reason({"messages": messages}, "sft", learn=learn)


def test_pairs_that_differ_before_their_last_message_share_what_is_common() -> None:
    first = [user("a"), assistant("b"), user("c"), assistant("d")]
    second = [user("a"), assistant("x"), user("c"), assistant("y")]
    chat = as_chat(read({"chosen": first, "rejected": second}))
    assert chat.prompt == [user("a")] and chat.completions == (first[1:], second[1:])
    assert chat.learnt == ((True, False, True), (True, False, True))
    longer = as_chat(read({"chosen": first[:2], "rejected": second}))
    assert longer.completions == (first[1:2], second[1:]) and longer.learnt == ((True,), (True, False, True))
    # Questions that differ: the answer before them is the same in both, and nothing is learnt of it.
    other = [user("a"), assistant("b"), user("x"), assistant("y")]
    asked = as_chat(read({"chosen": first, "rejected": other}))
    assert asked.prompt == [user("a")] and asked.completions == (first[1:], other[1:])
    assert asked.learnt == ((False, False, True),) * 2


def test_a_completion_may_be_several_messages() -> None:
    steps = [assistant(None, tool_calls=[CALL]), RESULT, assistant("It is grey.")]
    chat = as_chat(read({"prompt": "The weather?", "completion": steps, "tools": [WEATHER]}, "sft"))
    assert chat.prompt == [user("The weather?")] and chat.completions == (steps,)
    assert chat.learnt == ((True, False, True),) and chat.tools == [WEATHER]
    weighted = {"prompt": [user("a", weight=1)], "chosen": "b", "rejected": "c"}
    assert "'weight' of a message is for SFT" in reason(weighted)


# ---- Messages and tools


def test_messages_in_every_spelling_become_the_same() -> None:
    expected, messages = as_chat(read(OPENAI, "sft")), OPENAI["messages"]
    parts = [{"content": [{"type": "text", "text": m["content"]}]} if m.get("content") else {} for m in messages]
    spellings = [
        {"messages": [m | {"content": m.get("content")} for m in messages]},
        {"messages": [m | {"name": None, "function_call": None} for m in messages]},
        {"messages": [m | part for m, part in zip(messages, parts, strict=True)]},
        {"tools": json.dumps([WEATHER])},
        {"tools": [json.dumps(WEATHER)]},
        {"tools": [WEATHER["function"]]},
    ]
    for change in spellings:
        chat = as_chat(read(OPENAI | change, "sft"))
        assert (chat.prompt, chat.completions, chat.tools) == (expected.prompt, expected.completions, expected.tools)
    older = {"role": "assistant", "function_call": {"name": "weather", "arguments": '{"town": "Bonn"}'}}
    result = {"role": "function", "name": "weather", "content": "x"}
    chat = as_chat(read({"messages": [user("a"), older, result, assistant("b")]}, "sft"))
    assert chat.prompt[1] == assistant(None, tool_calls=[BARE_CALL]) and chat.prompt[2]["role"] == "tool"


PICTURE = {"type": "image_url", "image_url": {"url": "x"}}


def calling(call: dict[str, Any]) -> dict[str, Any]:
    return {"messages": [user("a"), assistant(None, tool_calls=[call])]}


@pytest.mark.parametrize(
    "change, words",
    [
        ({"tools": "[{"}, "tools is a string that is not JSON"),
        ({"tools": {"name": "f"}}, "tools is an object, not a list of tools"),
        ({"tools": [{"type": "web_search"}]}, "tools[0] has no function with a name"),
        ({"tools": [{"name": "f", "description": "\ud800"}]}, "'tools' has half a surrogate pair"),
        (calling({"name": "f", "arguments": {"a": "\ud800"}}), "'messages[1].tool_calls' has half a surrogate pair"),
        (calling({"function": {"name": "f", "arguments": "{"}}), "arguments is a string that is not JSON"),
        (
            {"messages": [user([PICTURE]), assistant("b")]},
            "messages[0].content[0] is of type 'image_url', and only text",
        ),
        ({"chat_template_kwargs": 3}, "'chat_template_kwargs' is a number, not an object"),
    ],
)
def test_what_is_no_message_or_tool_is_named(change: dict[str, Any], words: str) -> None:
    assert words in reason({"messages": [user("a"), assistant("b")]} | change, "sft")


def test_an_unknown_speaker_is_named() -> None:
    record = {"conversations": [{"from": "narrator", "value": "a"}, {"from": "gpt", "value": "b"}]}
    assert "conversations[0] has the unknown role 'narrator'" in reason(record, "sft")
    assert "conversations[0] has no content" in reason({"conversations": [{"from": "human"}]}, "sft")
    calls = [{"from": "human", "value": "a"}, {"from": "function_call", "value": "weather"}]
    assert "conversations[1].value is a string that is not JSON" in reason({"conversations": calls}, "sft")


def test_a_row_has_template_arguments_of_its_own() -> None:
    own = {"enable_thinking": False, "other": None}
    record = {"messages": [user("a"), assistant("b")], "chat_template_kwargs": own}
    assert as_chat(read(record, "sft")).template_arguments == {"enable_thinking": False}
    assert as_chat(read(record, "sft", ignore=["chat_template_kwargs"])).template_arguments == {}


# ---- Duplicates

WEIGHTED = assistant("b", weight=0)


def test_rows_are_the_same_only_where_all_that_is_trained_is() -> None:
    base = {"messages": [user("a"), assistant("b", tool_calls=[CALL]), RESULT, assistant("d")]}
    rows: list[tuple[dict[str, Any], dict[str, Any]]] = [
        (base, {}),
        (base | {"tools": [WEATHER]}, {}),
        (base | {"system": "Be brief."}, {}),
        (base | {"chat_template_kwargs": {"enable_thinking": False}}, {}),
        (base, {"learn": "assistant"}),
        (base, {"learn": "all"}),
        ({"messages": [user("a"), *[assistant("b"), user("c")] * 2, assistant("d")]}, {"learn": "assistant"}),
        (
            {"messages": [user("a"), assistant("b"), user("c"), WEIGHTED, user("c"), assistant("d")]},
            {"learn": "assistant"},
        ),
        ({"messages": [user("a"), assistant("b", tool_calls=[BARE_CALL]), RESULT, assistant("d")]}, {}),
        ({"messages": [user("a"), assistant("b", tool_calls=[CALL])]}, {}),
        ({"messages": [user("a"), assistant("b", tool_calls=[CALL], reasoning_content="c")]}, {}),
        ({"messages": [user("a"), assistant("b")]}, {}),
    ]
    keys = [sources.keys_of(read(row, "sft", **settings))[1] for row, settings in rows]
    assert len(set(keys)) == len(keys)
    plain = {"prompt": "a", "completion": "b"}
    assert sources.keys_of(read(plain, "sft")) == sources.keys_of(read(rows[-1][0], "sft"))
    labelled = [sources.keys_of(read(plain | {"label": label}, "unpaired"))[1] for label in (True, False)]
    assert len({*labelled, keys[-1]}) == 3


# ---- Messages that lead


@pytest.mark.parametrize(
    "record, kind, words",
    [
        ({"conversations": []}, "preference", "ShareGPT has one answer a record, not a pair: train.loss=sft"),
        ({"mesages": [user("a")]}, "sft", "no column 'completion' or 'messages' or 'text'"),
        ({"convos": 1}, "sft", "name yours with data.columns={completion: COLUMN, prompt: COLUMN}"),
        ({"ask": "a"}, "preference", "name yours with data.columns={chosen: COLUMN, rejected: COLUMN, prompt: COLUMN}"),
        ({"prompt": "a", "completion": "b", "labl": True}, "unpaired", "name yours with data.columns={label: COLUMN}"),
    ],
)
def test_other_columns_are_told_with_the_words_to_type(record: dict[str, Any], kind: RecordKind, words: str) -> None:
    assert words in reason(record, kind) and f"(columns: {', '.join(record)})" in reason(record, kind)


def test_the_document_names_every_format() -> None:
    document = (tiny.ROOT / "docs" / "data.md").read_text()
    for known in record_formats.PUBLISHED:
        assert known.name in document, known.name
        assert all(f"`{column}`" in document for column in (*known.needs, *known.uses)), known.name
