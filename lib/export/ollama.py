"""A folder that `ollama create` takes: one GGUF file and a Modelfile with the chat template in Ollama's language."""

from __future__ import annotations

import dataclasses
import itertools
import os
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from lib.errors import UserError
from lib.export import gguf
from lib.export.gguf import FILE
from lib.export.proof import ExportOptions, Reading
from lib.export.trained_run import ChatForm, TrainedRun

MODELFILE = "Modelfile"


def check(run: TrainedRun, options: ExportOptions) -> None:
    """Raises UserError for what GGUF has not, and for a chat template that Ollama's language cannot express."""
    gguf.check(run, options)
    modelfile(run)


def write(run: TrainedRun, folder: Path, options: ExportOptions) -> None:
    """Writes model.gguf and the Modelfile."""
    gguf.write(run, folder, options)
    (folder / MODELFILE).write_text(modelfile(run), encoding="utf-8")


def read(run: TrainedRun, folder: Path, options: ExportOptions) -> Reading:
    return gguf.read(run, folder, options)


def modelfile(run: TrainedRun) -> str:
    """The Modelfile (docs/modelfile.md of Ollama): FROM, TEMPLATE, and where generation stops.

    Raises:
        UserError: the chat template cannot be said in it.
    """
    chat = run.chat_form()
    if chat is None:
        raise UserError(f"--to ollama: {run.base} has no tokenizer, and Ollama reads texts; take --to gguf")
    lines = [f"# {run.folder.resolve().name}, {run.checkpoint}. ollama create NAME -f {MODELFILE}", f"FROM ./{FILE}"]
    template, notes = _template(run, chat)
    lines += [*(f"# {note}" for note in notes), f"TEMPLATE {quoted(template)}"]
    ends = sorted(chat.tokenizer.decode([index]) for index in chat.end_ids)
    return "\n".join([*lines, *(f"PARAMETER stop {quoted(end)}" for end in ends)]) + "\n"


def quoted(text: str) -> str:
    """A value in the Modelfile's quotation marks.

    Raises:
        UserError: it has what its parser would take for its end, or leave out.
    """
    lost = next((letter for letter in text if not letter.isprintable() and letter not in "\n\t\r"), None)
    if '"""' in text or lost is not None:
        what = 'three quotation marks (""")' if lost is None else f"the character U+{ord(lost):04X}"
        raise UserError(f"--to ollama: the chat template has {what}, which a Modelfile cannot hold; take --to gguf")
    return f'"""{text}"""'


def _template(run: TrainedRun, chat: ChatForm) -> tuple[str, list[str]]:
    """The chat template in Ollama's language, and what to know of it.

    Raises:
        UserError: it has no shape that this language can express.
    """
    if chat.template is None:
        return "{{ .Prompt }}", []
    facts = gguf.tokenizer_facts(run)
    bos = chat.tokenizer.bos_token if facts is not None and facts.adds_bos else None
    try:
        shape = shape_of(chat.render, bos or "")
    except NoShapeError as error:
        raise UserError(
            f"--to ollama: the chat template cannot be written in Ollama's language: {error}; "
            "take --to gguf, whose file holds the template itself"
        ) from None
    notes = []
    if shape.system_goes is None:
        notes.append("The chat template takes no system message: one that is sent is left out.")
    if not keeps_white_space(chat.render):
        notes.append("The chat template strips white space around messages; Ollama's language cannot.")
    return shape.go_template(), notes


# ---- The shape of a chat template ----
#
# A Jinja template is a program; Ollama's templates are Go's. Most models' templates put the same texts around every
# message of a role. These texts are found by rendering conversations of known words, and written as a Go template.
# Unless the shape renders many conversations as the model's own template does, there is no such shape.

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

    def text(self, messages: Messages) -> str:
        """A conversation that ends with the user's turn, as this shape renders it."""
        system = "\n\n".join(message["content"] for message in messages if message["role"] == "system")
        last = max(index for index, message in enumerate(messages) if message["role"] == "user")
        target = {"first": 1, "last": last}.get(self.system_goes or "", -1) if system else -1
        text = "" if system and self.system_goes in ("alone", "first") else self.head
        for index, message in enumerate(messages):
            before, behind = {"user": self.user, "assistant": self.assistant, "system": self.system}[message["role"]]
            if message["role"] == "system":
                if self.system_goes == "alone":
                    text += f"{before}{message['content']}{behind}"
                continue
            if index == target:
                before = f"{self.system[0]}{system}{self.system[1]}"
            text += f"{before}{message['content']}{behind}"
        return text + self.answer

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
    for messages in _conversations(with_system=shape.system_goes is not None):
        theirs = _without(bos, render(messages, True))
        ours = shape.text(messages)
        if ours != theirs:
            at = len(os.path.commonprefix([ours, theirs]))
            raise NoShapeError(
                f"of a conversation of {len(messages)} messages it makes {theirs[max(0, at - 20) : at + 20]!r}, where "
                f"the texts around other messages give {ours[max(0, at - 20) : at + 20]!r}"
            )
    return shape


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


def literal(text: str) -> str:
    """A text as a template that renders to it: braces that would open an action stand in strings."""
    return re.sub(r"\{\{+|\{$", lambda match: '{{ "' + match.group() + '" }}', text)
