"""The shape of a chat template: the texts around messages, found by rendering conversations of known words.

A Jinja template is a program; Ollama's templates are Go's. What most models' templates do is put the same texts
around every message of a role. Those texts are read off here, written as a Go template, and this is rendered beside
the model's own on many conversations: unless all are equal, there is no such shape.
"""

from __future__ import annotations

import dataclasses
import itertools
import os
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal

from lib.export import go_template
from lib.export.go_template import literal

Messages = list[dict[str, str]]
Render = Callable[[Messages, bool], str]  # whether it ends with what stands before an answer


class NoShapeError(ValueError):
    """Why a chat template has no shape that a Modelfile can say."""


@dataclass(frozen=True)
class ChatShape:
    """The texts around messages.

    Args:
        head: before a conversation; where a system message has a place before all others, only where there is none.
        system, user, assistant: before and behind a message of that role.
        answer: before the answer that the model is to write.
        system_goes: a message of its own, or into the first or the last message of the user, then with `system`
            around it and in place of what stands before that message; None: the template takes none.
    """

    head: str
    user: tuple[str, str]
    assistant: tuple[str, str]
    answer: str
    system: tuple[str, str] = ("", "")
    system_goes: Literal["alone", "first", "last"] | None = None

    def go_template(self) -> str:
        """As a template of Ollama's."""
        before, behind = map(literal, self.user)
        if self.system_goes in ("first", "last"):
            # The system message is the first of all, so that the first of the user's has index 1.
            here = "(eq $i 1)" if self.system_goes == "first" else "(eq (len (slice $.Messages $i)) 1)"
            opened, closed = map(literal, self.system)
            before = (
                f"{{{{ if and $.System {here} }}}}{opened}{{{{ $.System }}}}{closed}{{{{ else }}}}{before}{{{{ end }}}}"
            )
        branches = [("user", before, behind), ("assistant", *map(literal, self.assistant))]
        if self.system_goes == "alone":
            branches.insert(0, ("system", *map(literal, self.system)))
        roles = "{{ else ".join(
            f'if eq .Role "{role}" }}}}{before}{{{{ .Content }}}}{behind}' for role, before, behind in branches
        )
        head, answer = literal(self.head), literal(self.answer)
        if head and self.system_goes in ("alone", "first"):
            head = f"{{{{ if not .System }}}}{head}{{{{ end }}}}"
        return f"{head}{{{{ range $i, $m := .Messages }}}}{{{{ {roles}{{{{ end }}}}{{{{ end }}}}{answer}"


def shape_of(render: Render, bos: str) -> ChatShape:
    """The shape of a chat template.

    Args:
        render: the template; it may raise on messages that it does not take.
        bos: a text at the very start that the shape leaves out, since the tokenizer puts it there; or empty.

    Raises:
        NoShapeError: it has none.
    """
    shape = _read_off(lambda messages, answer: _without(bos, render(messages, answer)))
    template = shape.go_template()
    for messages in _conversations(with_system=shape.system_goes is not None):
        theirs = _without(bos, render(messages, True))
        ours = go_template.render(template, as_values(messages))
        if ours != theirs:
            at = len(os.path.commonprefix([ours, theirs]))
            raise NoShapeError(
                f"of a conversation of {len(messages)} messages it makes {theirs[max(0, at - 20) : at + 20]!r}, where "
                f"the texts around other messages give {ours[max(0, at - 20) : at + 20]!r}"
            )
    return shape


def as_values(messages: Messages) -> dict[str, object]:
    """What Ollama gives a template of a conversation."""
    system = "\n\n".join(message["content"] for message in messages if message["role"] == "system")
    named = [{"Role": message["role"], "Content": message["content"]} for message in messages]
    return {"System": system, "Messages": named}


def keeps_white_space(render: Render) -> bool:
    """Whether white space around a message's content stays."""
    return "  spaces \n" in render([{"role": "user", "content": "  spaces \n"}], True)


def _conversations(with_system: bool) -> Iterator[Messages]:
    """Conversations that end with the user's turn, of one to four turns."""
    for turns, system in itertools.product(range(1, 5), (False, True) if with_system else (False,)):
        yield _conversation("SUAUAUAU"[: 2 * turns] if system else "UAUAUAU"[: 2 * turns - 1])


def _conversation(roles: str) -> Messages:
    """Messages of roles, each with a word of its own."""
    names = {"S": "system", "U": "user", "A": "assistant"}
    return [{"role": names[role], "content": f"Word{index}of{role}"} for index, role in enumerate(roles)]


def _read_off(render: Render) -> ChatShape:
    """The texts around messages, as conversations of three and two turns have them."""
    first, asked, answered, asked_again, answered_again, last = _texts(render, "UAUAU")
    if asked != asked_again or answered != answered_again:
        raise NoShapeError("the texts around messages change from turn to turn")
    closed = _closing(render, "U")
    if not (asked.startswith(closed) and last.startswith(closed)):
        closed = os.path.commonprefix([asked, last])
    opened = answered.removeprefix(_closing(render, "UA"))
    if not first.endswith(opened):
        opened = os.path.commonprefix([first[::-1], answered[::-1]])[::-1]
    shape = ChatShape(
        head=first.removesuffix(opened),
        user=(opened, closed),
        assistant=(asked.removeprefix(closed), answered.removesuffix(opened)),
        answer=last.removeprefix(closed),
    )
    try:
        texts = _texts(render, "SUAU")
        before, between = texts[:2]
        goes: Literal["alone", "first", "last"] = "alone" if between.endswith(opened) else "first"
    except NoShapeError:
        try:  # into the last message of the user
            _, _, before, between, _ = _texts(render, "SUAU", order="UASU")
        except NoShapeError:
            return shape
        before, goes = before.removeprefix(shape.assistant[1]), "last"
    behind = between.removesuffix(opened) if goes == "alone" else between
    return dataclasses.replace(shape, system=(before, behind), system_goes=goes)


def _closing(render: Render, roles: str) -> str:
    """What stands behind the last of some messages, where no answer is to follow; empty where there is no such text."""
    messages = _conversation(roles)
    try:
        return render(messages, False).partition(messages[-1]["content"])[2]
    except Exception:  # a template raises what it likes
        return ""


def _texts(render: Render, roles: str, order: str | None = None) -> list[str]:
    """The texts before, between and behind the contents of a conversation's messages.

    order: in which the contents stand, where that is not the messages' own.

    Raises:
        NoShapeError: the template does not take them, or has a content not just once.
    """
    messages = _conversation(roles)
    try:
        text = render(messages, True)
    except Exception as error:  # a template raises what it likes
        raise NoShapeError(f"it does not take a conversation of {len(roles)} messages: {error}") from None
    contents = [message["content"] for message in messages]
    if order is not None:
        contents = contents[1:-1] + [contents[0], contents[-1]]
    texts = re.split("|".join(map(re.escape, contents)), text)
    if re.findall("|".join(map(re.escape, contents)), text) != contents:
        raise NoShapeError("it leaves out messages, repeats them or puts them in another order")
    return texts


def _without(bos: str, text: str) -> str:
    return text.removeprefix(bos)
