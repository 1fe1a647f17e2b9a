"""A folder that `ollama create` takes: one GGUF file and a Modelfile with the chat template in Ollama's language."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import mlx.nn as nn

from lib.data.chat_template import ChatTemplate
from lib.data.tokenizer import load_tokenizer_of
from lib.errors import UserError
from lib.export import gguf_model
from lib.export.chat_shape import NoShapeError, Render, keeps_white_space, shape_of
from lib.export.form import ExportOptions, Reading
from lib.export.gguf_file import FILE
from lib.export.trained_run import TrainedRun

READER = gguf_model.READER
MODELFILE = "Modelfile"


def check(run: TrainedRun, options: ExportOptions, prove: bool) -> None:
    """Raises UserError for what GGUF has not, and for a chat template that Ollama cannot be told."""
    gguf_model.check(run, options, prove)
    modelfile(run)


def write(run: TrainedRun, folder: Path, options: ExportOptions) -> None:
    """Writes model.gguf and the Modelfile."""
    gguf_model.write(run, folder, options)
    (folder / MODELFILE).write_text(modelfile(run), encoding="utf-8")


def stored_model(run: TrainedRun, options: ExportOptions) -> nn.Module:
    return gguf_model.stored_model(run, options)


def read_logps(run: TrainedRun, folder: Path, options: ExportOptions) -> Reading:
    return gguf_model.read_logps(run, folder, options)


def modelfile(run: TrainedRun) -> str:
    """The Modelfile (docs/modelfile.md of Ollama): FROM, TEMPLATE, and where generation stops.

    Raises:
        UserError: the chat template cannot be said in it.
    """
    tokenizer: Any = load_tokenizer_of(run.settings.model)
    if tokenizer is None:
        raise UserError(f"--to ollama: {run.base} has no tokenizer, and Ollama reads texts; take --to gguf")
    lines = [f"# {run.folder.resolve().name}, {run.checkpoint}. ollama create NAME -f {MODELFILE}", f"FROM ./{FILE}"]
    template, notes = _template(run, tokenizer)
    lines += [*(f"# {note}" for note in notes), f"TEMPLATE {quoted(template)}"]
    ends = sorted(tokenizer.decode([index]) for index in tokenizer.eos_token_ids)
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


def _template(run: TrainedRun, tokenizer: Any) -> tuple[str, list[str]]:
    """The chat template in Ollama's language, and what to know of it.

    Raises:
        UserError: it has no shape that this language can say.
    """
    chat = ChatTemplate(tokenizer, run.settings.data)
    if not chat.is_used:
        return "{{ .Prompt }}", []
    render = rendering(tokenizer, chat)
    facts = gguf_model.tokenizer_facts(run)
    bos = tokenizer.bos_token if facts is not None and facts.adds_bos else None
    try:
        shape = shape_of(render, bos or "")
    except NoShapeError as error:
        raise UserError(
            f"--to ollama: the chat template cannot be said in Ollama's language: {error}; "
            "take --to gguf, whose file holds the template itself"
        ) from None
    notes = []
    if shape.system_goes is None:
        notes.append("The chat template takes no system message: one that is sent is left out.")
    if not keeps_white_space(render):
        notes.append("The chat template strips white space around messages; Ollama's language cannot.")
    return shape.go_template(), notes


def rendering(tokenizer: Any, chat: ChatTemplate) -> Render:
    """Renders messages as the run did, with the template's arguments at inference."""
    options = {"tokenize": False, "chat_template": chat.text, **chat.arguments_without_answer}
    return lambda messages, answer: str(
        tokenizer.apply_chat_template(messages, add_generation_prompt=answer, **options)
    )
