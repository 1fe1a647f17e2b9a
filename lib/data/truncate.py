"""What is kept of an example that is longer than data.max_length.

Of text, a prompt loses its beginning. A chat loses whole messages: the oldest of those between the system prompt and
the last question, and is rendered again, so that it begins and ends as its template has it. Only where these are too
long by themselves is the last question cut, at its beginning; and a completion at its end. Of a completion of several
messages the end goes before the question's beginning. A chat's tokens are never cut at the prompt's beginning: the
model would see no system prompt, or half a definition of a tool.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from lib.data.record_formats import Chat, Message

LEAST_REST = 8  # a chat's answer keeps an eighth of max_length, or all of it where it is shorter


def prompt_room(prompt: int, longest: int, max_length: int) -> int:
    """Tokens that a prompt of so many may keep beside the longest completion: at least a quarter of max_length."""
    return max(max_length - longest, min(prompt, max(1, max_length // 4)))


def truncate(
    prompt: list[int], completions: list[list[int]], max_length: int, bos_token_id: int | None
) -> tuple[list[int], list[list[int]], bool]:
    """Fit prompt + each completion into max_length tokens: (prompt, completions, whether anything was cut).

    The prompt is cut first, at its beginning (the last question is at its end), except for a leading BOS, without
    which many models fail. A quarter of max_length is kept for it: a completion longer
    than the rest is cut at its end, and then has no end token, because it does not end there. All completions
    of an example share one prompt.
    """
    longest = max(map(len, completions))
    if len(prompt) + longest <= max_length:
        return prompt, completions, False
    kept = prompt_room(len(prompt), longest, max_length)
    if kept < len(prompt):
        has_bos = prompt[0] == bos_token_id
        prompt = prompt[:has_bos] + prompt[len(prompt) - kept + has_bos :]
    return prompt, [completion[: max_length - kept] for completion in completions], True


def most_of_prompt(longest: int, max_length: int) -> int:
    """Tokens that a chat's prompt may have at most, so that its answer is not cut to nothing."""
    return max_length - min(longest, max(1, max_length // LEAST_REST))


def shortened(chat: Chat, size: Callable[[Chat], int], longest: int, max_length: int) -> Chat | None:
    """The chat with what is kept of its prompt; the completions' ends are cut by what they are then too long.

    None where what cannot be cut of the prompt, its system prompt and tools, leaves too little for an answer.

    size: tokens of a chat's prompt. longest: tokens of the longest completion.
    """

    def fits(room: int) -> Callable[[Chat], bool]:
        return lambda other: size(other) <= room

    most = fits(most_of_prompt(longest, max_length))
    if any(len(answer) > 1 for answer in chat.completions):
        whole = _without_oldest(chat, fits(max_length - longest))
        if whole is not None:
            return whole
        return chat if most(chat) else shorten(chat, most)
    room = fits(prompt_room(size(chat), longest, max_length))
    if room(chat):
        return chat
    if (shorter := shorten(chat, room)) is not None:
        return shorter
    last = _last_exchange(chat)
    return last if most(last) else shorten(last, most)


def shorten(chat: Chat, fits: Callable[[Chat], bool]) -> Chat | None:
    """The chat with as much of its prompt as fits; None where not even its last question's end does.

    fits: whether a chat's prompt is short enough; it is asked some ten times.
    """
    if (without := _without_oldest(chat, fits)) is not None:
        return without
    chat = _last_exchange(chat)
    index = _last_question(chat.prompt)
    content = chat.prompt[index].get("content") if index is not None else None
    if index is None or not isinstance(content, str):
        return None
    words = [at for at in range(1, len(content)) if content[at - 1].isspace() and not content[at].isspace()]
    starts = words or list(range(1, len(content)))  # some languages write without spaces

    def cut(number: int) -> Chat:
        return _with_question(chat, index, content[starts[number] :])

    count = _first(len(starts), lambda number: fits(cut(number)))
    return cut(count) if count < len(starts) else None


def _without_oldest(chat: Chat, fits: Callable[[Chat], bool]) -> Chat | None:
    """The chat without as many of its oldest exchanges as have to go; None where that does not do."""
    without = [_without(chat, start) for start in _exchanges(chat.prompt)]
    count = _first(len(without), lambda index: fits(without[index]))
    return without[count] if count < len(without) else None


def _last_exchange(chat: Chat) -> Chat:
    """The chat with its system prompt and its last question alone."""
    exchanges = _exchanges(chat.prompt)
    return _without(chat, exchanges[-1]) if exchanges else chat


def _first(count: int, holds: Callable[[int], bool]) -> int:
    """The first of `count` numbers for which `holds`, which does for all that follow; `count` where it never does."""
    low, high = 0, count
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if holds(middle) else (middle + 1, high)
    return low


def _last_question(messages: list[Message]) -> int | None:
    return next((i for i in reversed(range(len(messages))) if messages[i]["role"] == "user"), None)


def _exchanges(messages: list[Message]) -> list[int]:
    """Where the user speaks, after the first time: what lies before, but for system prompts, may be left out."""
    asked = [index for index, message in enumerate(messages) if message["role"] == "user"]
    return asked[1:]


def _without(chat: Chat, start: int) -> Chat:
    """The chat without what comes before message `start`, but for the system prompts that open it."""
    first = next(i for i, message in enumerate(chat.prompt) if message["role"] == "user")
    kept = [message for message in chat.prompt[:first] if message["role"] in ("system", "developer")]
    return dataclasses.replace(chat, prompt=[*kept, *chat.prompt[start:]])


def _with_question(chat: Chat, index: int, content: str) -> Chat:
    prompt = list(chat.prompt)
    prompt[index] = {**prompt[index], "content": content}  # type: ignore[typeddict-item]
    return dataclasses.replace(chat, prompt=prompt)
