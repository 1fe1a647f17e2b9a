"""Prompts whose answers a program can check."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from lib.config.schema import Config  # noqa: E402
from lib.data import tokenizer as models  # noqa: E402
from lib.data.record_files import read  # noqa: E402
from lib.data.tokenize import encode_prompt  # noqa: E402
from lib.errors import UserError  # noqa: E402


@dataclass(frozen=True)
class Question:
    """A prompt whose answer a program can check."""

    prompt: str
    prompt_ids: list[int]
    answer: str


# ---- Answers -----------------------------------------------------------------------------------------------------------


def load_questions(settings: Config, tokenizer: Any) -> list[Question]:
    """The records of evaluate.answers, at most evaluate.answers_limit.

    Raises:
        UserError: a record without a prompt or an answer, or a model without a tokenizer.
    """
    path = settings.evaluate.answers
    if path is None:
        return []
    if tokenizer is None:
        raise UserError(f"evaluate.answers={path} needs a tokenizer, but model.path {settings.model.path} has none")
    questions = []
    for line, record in read(path, settings.data):
        if isinstance(record, ValueError):
            raise UserError(f"{path}:{line}: {record}")
        prompt, answer = record.get(settings.data.prompt), record.get("answer")
        if not isinstance(prompt, str | list) or not isinstance(answer, str | int | float):
            raise UserError(
                f"{path}:{line}: a question needs {settings.data.prompt!r} and 'answer'; it has {', '.join(record)}"
            )
        shown = prompt if isinstance(prompt, str) else str(prompt[-1].get("content"))
        questions.append(
            Question(
                shown,
                encode_prompt(prompt, settings.data, tokenizer, models.vocabulary(settings.model)["eos_token_id"]),
                str(answer).strip(),
            )
        )
        if len(questions) == settings.evaluate.answers_limit:
            break
    if not questions:
        raise UserError(f"evaluate.answers={path} has no records")
    return questions
