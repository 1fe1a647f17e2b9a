"""Kinds of chats, and what another trainer makes of them against ours."""

from typing import Any

from lib.config.settings import DataSettings
from lib.data.chat import has_reasoning, lost
from lib.data.encode import Encoder
from lib.data.record_formats import Chat, Tokens, Unusable
from tests import chat_models

SYSTEM = {"role": "system", "content": "You are terse."}
USER = {"role": "user", "content": "What is 12 + 30?"}
TURNS = [USER, {"role": "assistant", "content": "It is 42."}, {"role": "user", "content": "And 2 * 21?"}]
CITY = {"type": "object", "properties": {"city": {"type": "string", "description": "Its name."}}, "required": ["city"]}
WEATHER_OF = {"name": "get_weather", "description": "The weather of a place.", "parameters": CITY}
TOOLS = [{"type": "function", "function": WEATHER_OF}]
CALL = {"id": "call12345", "type": "function", "function": {"name": "get_weather", "arguments": {"city": "Oslo"}}}
WEATHER = {"role": "user", "content": "How is the weather in Oslo?"}
RESULT = {"role": "tool", "name": "get_weather", "tool_call_id": "call12345", "content": "rain, 8 degrees"}


def _said(text: str, **fields: Any) -> list[dict[str, Any]]:
    return [{"role": "assistant", "content": text, **fields}]


def _thought(text: str, thinking: str) -> list[dict[str, Any]]:
    return _said(text, reasoning_content=thinking)


def rows() -> dict[str, dict[str, Any]]:
    """By kind: prompt, completions (chosen, rejected), tools, chat_template_kwargs."""
    call_only = [{"role": "assistant", "tool_calls": [CALL]}]
    plain: dict[str, tuple[list[Any], list[Any], list[Any]]] = {
        "single": ([USER], _said("The answer is 42."), _said("Blue.")),
        "system": ([SYSTEM, USER], _said("42."), _said("Blue.")),
        "turns": (TURNS, _said("Also 42."), _said("Blue.")),
        "system and turns": ([SYSTEM, *TURNS], _said("Also 42."), _said("Blue.")),
        "leading space": ([USER], _said(" 42"), _said("  Blue")),
        "leading line break": ([USER], _said("\n42"), _said("\nBlue")),
        "leading line breaks": ([USER], _said("\n\n42"), _said("\n\n\nBlue")),
        "trailing space": ([USER], _said("42 "), _said("Blue  ")),
        "trailing line break": ([USER], _said("42\n"), _said("Blue\n\n")),
        "code": ([USER], _said("```python\nprint(12 + 30)\n```"), _said("    indented = True\n\tx")),
        "unicode": ([{"role": "user", "content": "Grüße? 漢字"}], _said("Ünïcödé, 漢字 и 🦊."), _said("🦊🦊")),
        "several lines": ([USER], _said("One.\n\nTwo.\n\n- a\n- b\n"), _said("One.\nTwo.")),
        "begins like a tag": ([USER], _said("<b>42</b>"), _said("<Blue")),
        "the word assistant": ([USER], _said("assistant"), _said("user")),
        "one letter": ([USER], _said("a"), _said("b")),
        "digits": ([USER], _said("42"), _said("7")),
        "the question's words": ([USER], _said("What is 12 + 30?"), _said("12 + 30")),
        "spaces in the question": ([{"role": "user", "content": "  What?\n\n"}], _said("That."), _said("This.")),
        "long": ([USER], _said("Well, it is 42. " * 40), _said("No. " * 40)),
        "thinking": ([USER], _thought("It is 42.", "12 + 30 makes 42"), _thought("Blue.", "a guess of mine")),
        "thinking in turns": (TURNS, _thought("Also 42.", "2 * 21 makes 42"), _thought("Blue.", "a guess of mine")),
        "thinking in the text": (
            [USER],
            _said("<think>\n12 + 30 makes 42\n</think>\n\nIt is 42."),
            _said("<think>\na guess\n</think>\n\nBlue."),
        ),
    }
    with_tools: dict[str, tuple[list[Any], list[Any], list[Any]]] = {
        "tools, none called": ([WEATHER], _said("I cannot see it."), _said("Rain.")),
        "tool call": ([WEATHER], _said("", tool_calls=[CALL]), _said("Rain.")),
        "tool call, no content": ([WEATHER], call_only, _said("Rain.")),
        "tool call, said too": ([WEATHER], _said("I look.", tool_calls=[CALL]), _said("Rain.")),
        "tool result": ([WEATHER, *call_only, RESULT], _said("Rain, 8 degrees."), _said("Sun.")),
    }
    found = {}
    for kind, (prompt, *completions) in (plain | with_tools).items():
        given = {"enable_thinking": any(map(has_reasoning, sum(completions, []))), "date_string": "26 Jul 2024"}
        row = {"prompt": prompt, "completions": completions, "tools": TOOLS if kind in with_tools else None}
        found[kind] = {**row, "chat_template_kwargs": given}
    return found


def chat_of(row: dict[str, Any]) -> Chat:
    """A row as the parser of records gives it."""
    return Chat(row["prompt"], tuple(row["completions"]), "prompt + chosen + rejected", tools=row["tools"])


def encoder_of(tokenizer: Any, about: dict[str, Any], **settings: Any) -> Encoder:
    """Our encoder, with the ends that a model's folder gives."""
    from mlx_lm.tokenizer_utils import TokenizerWrapper

    wrapped = TokenizerWrapper(tokenizer, eos_token_ids=chat_models.end_ids(tokenizer, about))
    return Encoder(wrapped, DataSettings(train="-", **settings), None)


def encode(encoder: Encoder, chat: Chat) -> Tokens | Unusable:
    """A chat's ids, or why there are none."""
    try:
        return encoder.encoded(chat)
    except Unusable as why:
        return why


def differences(name: str, tokenizer: Any, about: dict[str, Any], golden: dict[str, Any]) -> dict[str, str]:
    """Kinds of rows that differ from TRL's ids, and how."""
    encoder, found = encoder_of(tokenizer, about), {}
    for kind, row in rows().items():
        if why := _difference(row, encode(encoder, chat_of(row)), golden[f"{name} {kind}"], tokenizer, encoder):
            found[kind] = why
    return found


def _difference(row: dict[str, Any], ours: Any, theirs: dict[str, Any], tokenizer: Any, encoder: Encoder) -> str:
    if "error" in theirs:
        return ""  # nothing to compare with
    if isinstance(ours, Unusable):
        both = zip(row["completions"], theirs["wholes"], strict=True)
        prompt = tokenizer.decode(theirs["prompt"])
        behind = [(answer, tokenizer.decode(whole).removeprefix(prompt)) for answer, whole in both]
        loses = any(lost(message, text) for answer, text in behind for message in answer)
        loses |= any(lost(one, prompt, is_earlier=True) for one in row["prompt"] if one["role"] == "assistant")
        return "" if loses else f"refused: {ours}"
    if ours.prompt != theirs["prompt"]:
        return f"prompt {tokenizer.decode(ours.prompt)[-60:]!r}, not {tokenizer.decode(theirs['prompt'])[-60:]!r}"
    for answer, own, whole in zip(row["completions"], ours.completions, theirs["wholes"], strict=True):
        if any(lost(message, tokenizer.decode(whole)) for message in answer):
            continue  # the other side loses what is learnt here
        common = next((i for i, (a, b) in enumerate(zip(ours.prompt, whole, strict=False)) if a != b), len(ours.prompt))
        wanted = up_to_end(whole, encoder, common)
        spelt = tokenizer.decode(wanted)
        if spelt.startswith(tokenizer.decode(ours.prompt)) and whole[: len(ours.prompt)] != ours.prompt:
            # A token of the whole reaches over the prompt's end, as no token does that is made one by one.
            is_right = tokenizer.decode(ours.prompt + own) == spelt
        elif whole[: len(ours.prompt)] == ours.prompt:
            wanted = wanted[len(ours.prompt) :]
            is_right = own == wanted
        else:
            text = (answer[0].get("content") or "").strip() or "get_weather"
            # Command-R+ writes on behind the turn's end, which is no part of the answer.
            is_right = tokenizer.decode(own) in spelt and text in tokenizer.decode(own)
        if not is_right:
            return f"{tokenizer.decode(own)[:70]!r}, not {tokenizer.decode(wanted)[-70:]!r}"
        if sum(token in encoder.end_ids for token in own) != 1:
            return f"not one end of turn: {tokenizer.decode(own)[-60:]!r}"
    return ""


def up_to_end(ids: list[int], encoder: Encoder, prompt: int) -> list[int]:
    """Without what a template writes behind the last turn's end; with that end, where there is none.

    The row's own texts have no such token in them.
    """
    ends = [i for i in range(prompt, len(ids)) if ids[i] in encoder.end_ids]
    while len(ends) > 1 and not tokens_between(ids[ends[-2] + 1 : ends[-1]], encoder):
        ends.pop()  # Phi-3's template writes two
    return ids[: ends[-1] + 1] if ends else [*ids, encoder._eos_token_id]


def tokens_between(ids: list[int], encoder: Encoder) -> bool:
    return any(encoder.tokenizer.decode([token]).strip() for token in ids)
