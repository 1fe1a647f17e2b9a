"""A folder that `ollama create` takes: one GGUF file and a Modelfile with the chat template in Ollama's language.

Ollama's templates are Go's, chat templates are Jinja's. Most put the same texts around every message of a role: these
are read off conversations of known words, and written as a Go template. Unless they render many conversations as the
model's own template does, it is refused.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from lib.errors import UserError
from lib.export import gguf
from lib.export.trained_run import ExportOptions, TrainedRun

MODELFILE = "Modelfile"
ROLES = {"S": "system", "U": "user", "A": "assistant"}
Messages = list[dict[str, str]]
Render = Callable[[Messages], str]  # with the opening of an answer at its end


def check(run: TrainedRun, options: ExportOptions) -> None:
    """Raises UserError for what GGUF has not, and for a chat template that Ollama's language cannot express."""
    gguf.check(run, options)
    modelfile(run)


def write(run: TrainedRun, folder: Path, options: ExportOptions) -> None:
    """Writes model.gguf and the Modelfile."""
    gguf.write(run, folder, options)
    (folder / MODELFILE).write_text(modelfile(run), encoding="utf-8")


def modelfile(run: TrainedRun) -> str:
    """The Modelfile: FROM, TEMPLATE, where generation stops. Raises UserError: the chat template cannot be said in
    it."""
    if (chat := run.chat_form()) is None:
        raise UserError(f"--to ollama: {run.base} has no tokenizer, and Ollama reads texts; take --to gguf")
    lines = [f"# {run.folder.resolve().name}, {run.checkpoint}. ollama create NAME -f {MODELFILE}"]
    template = "{{ .Prompt }}"
    if chat.template is not None:
        tokenizer = gguf.tokenizer_of(chat, run.settings.model.path)
        bos = chat.tokenizer.bos_token if tokenizer is not None and tokenizer.adds["bos_token"] else ""
        try:
            shape = shape_of(lambda messages: chat.render(messages).removeprefix(bos))
        except ValueError as error:
            raise UserError(
                f"--to ollama: the chat template cannot be written in Ollama's language: {error}; "
                "take --to gguf, whose file holds the template itself"
            ) from None
        template = shape.go_template()
        if shape.system_goes is None:
            lines.append("# The chat template takes no system message: one that is sent is left out.")
    ends = sorted(chat.tokenizer.decode([index]) for index in chat.end_ids)
    lines += [f"FROM ./{gguf.FILE}", f"TEMPLATE {_quoted(template)}"]
    return "\n".join([*lines, *(f"PARAMETER stop {_quoted(end)}" for end in ends)]) + "\n"


def _quoted(text: str) -> str:
    """A value in the Modelfile's quotation marks; UserError where its parser would end it early or drop a character."""
    if '"""' in text or any(not letter.isprintable() and letter not in "\n\t\r" for letter in text):
        raise UserError(
            f"--to ollama: a Modelfile cannot hold three quotation marks or a control character, which the chat "
            f"template has: {ascii(text)[:60]}; take --to gguf"
        )
    return f'"""{text}"""'


@dataclass(frozen=True)
class ChatShape:
    """The texts that a chat template puts around messages."""

    head: str  # before a conversation; where a system message has a place before all others, only without one
    user: tuple[str, str]  # before and behind a message of that role
    assistant: tuple[str, str]
    answer: str  # before the answer that the model is to write
    system: tuple[str, str] = ("", "")
    # A message of its own, or into the first or the last message of the user, then with `system` around it and in place
    # of the text before that message; None: the template takes none.
    system_goes: Literal["alone", "first", "last"] | None = None

    def text(self, messages: Messages) -> str:
        """A conversation that ends with the user's turn, as this shape renders it."""
        system = "".join(message["content"] for message in messages if message["role"] == "system")
        target = {"first": 1, "last": len(messages) - 1}.get(self.system_goes or "", -1) if system else -1
        text = "" if system and self.system_goes in ("alone", "first") else self.head
        for index, message in enumerate(messages):
            before, behind = {"user": self.user, "assistant": self.assistant, "system": self.system}[message["role"]]
            if index == target:
                before = f"{self.system[0]}{system}{self.system[1]}"
            if message["role"] != "system" or self.system_goes == "alone":
                text += f"{before}{message['content']}{behind}"
        return text + self.answer

    def go_template(self) -> str:
        """As a template of Ollama's."""
        before, behind = map(_literal, self.user)
        head, opened, closed = map(_literal, (self.head, *self.system))
        if self.system_goes in ("first", "last"):
            # The system message is the first of all, so that the first of the user's has index 1.
            here = "(eq $i 1)" if self.system_goes == "first" else "(eq (len (slice $.Messages $i)) 1)"
            with_system = f"{opened}{{{{ $.System }}}}{closed}"
            before = f"{{{{ if and $.System {here} }}}}{with_system}{{{{ else }}}}{before}{{{{ end }}}}"
        branches = [("user", before, behind), ("assistant", *map(_literal, self.assistant))]
        if self.system_goes == "alone":
            branches.insert(0, ("system", opened, closed))
        roles = "{{ else ".join(
            f'if eq .Role "{role}" }}}}{before}{{{{ .Content }}}}{behind}' for role, before, behind in branches
        )
        if head and self.system_goes in ("alone", "first"):
            head = f"{{{{ if not .System }}}}{head}{{{{ end }}}}"
        end = "{{ end }}{{ end }}"
        return f"{head}{{{{ range $i, $m := .Messages }}}}{{{{ {roles}{end}{_literal(self.answer)}"


def shape_of(render: Render) -> ChatShape:
    """The shape of a chat template, as conversations of three and two turns have it. Raises ValueError: it has none.
    Where a message's closing ends and the next one's opening begins does not matter: they always stand together."""
    first, question, answer, next_question, next_answer, last = _texts(render, "UAUAU")
    if question != next_question or answer != next_answer:
        raise ValueError("the texts around messages change from turn to turn")
    closed = os.path.commonprefix([question, last])
    opened = os.path.commonprefix([first[::-1], answer[::-1]])[::-1]
    assistant = question.removeprefix(closed), answer.removesuffix(opened)
    shape = ChatShape(first.removesuffix(opened), (opened, closed), assistant, last.removeprefix(closed))
    shape = _with_system(shape, render)
    for roles in ("U", "UAU", "UAUAU", "UAUAUAU", *(("SU", "SUAU", "SUAUAU") if shape.system_goes else ())):
        if shape.text(_conversation(roles)) != render(_conversation(roles)):
            raise ValueError(f"a conversation of {len(roles)} messages has other texts around them than a longer one")
    return shape


def _with_system(shape: ChatShape, render: Render) -> ChatShape:
    """The shape with the place and the texts of a system message, where the template takes one."""
    try:
        before, between = _texts(render, "SUAU")[:2]
    except ValueError:
        try:  # into the last message of the user
            _, _, before, between, _ = _texts(render, "SUAU", order=[1, 2, 0, 3])
        except ValueError:
            return shape
        return replace(shape, system=(before.removeprefix(shape.assistant[1]), between), system_goes="last")
    goes: Literal["alone", "first"] = "alone" if between.endswith(shape.user[0]) else "first"
    return replace(
        shape, system=(before, between.removesuffix(shape.user[0]) if goes == "alone" else between), system_goes=goes
    )


def _conversation(roles: str) -> Messages:
    """Messages of roles, each with a word of its own."""
    return [{"role": ROLES[role], "content": f"Word{index}of{role}"} for index, role in enumerate(roles)]


def _texts(render: Render, roles: str, order: list[int] | None = None) -> list[str]:
    """The texts around the contents of a conversation's messages in this order. Raises ValueError: there are none."""
    messages = _conversation(roles)
    try:
        text = render(messages)
    except Exception as error:  # a template raises what it likes
        raise ValueError(f"it does not take a conversation of {len(roles)} messages: {error}") from None
    contents = [messages[index]["content"] for index in order or range(len(messages))]
    pattern = "|".join(map(re.escape, contents))
    if re.findall(pattern, text) != contents:
        raise ValueError("it leaves out messages, repeats them or puts them in another order")
    return re.split(pattern, text)


def _literal(text: str) -> str:
    """A text as a template that renders to it: braces that would open an action stand in strings."""
    return re.sub(r"\{\{+|\{$", lambda match: '{{ "' + match.group() + '" }}', text)
