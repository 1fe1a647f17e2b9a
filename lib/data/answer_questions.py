"""Prompts whose answers a program can check."""

from __future__ import annotations

from dataclasses import dataclass

from lib.config.schema import Config
from lib.data import tokenizer as tokenizer_module
from lib.data.asked import ids_of, last_text, shown
from lib.data.model_limits import NO_LIMITS, ModelLimits
from lib.data.parse_records import parse
from lib.data.record_files import read
from lib.data.record_formats import ANSWER, Unusable
from lib.data.text_tokens import Tokenizer
from lib.data.tokenize import Encoder
from lib.errors import UserError


@dataclass(frozen=True)
class Question:
    """A prompt whose answer a program can check."""

    prompt: str
    prompt_ids: list[int]
    answer: str


def load_questions(settings: Config, tokenizer: Tokenizer | None, limits: ModelLimits = NO_LIMITS) -> list[Question]:
    """The records of evaluate.answers, at most evaluate.answers_limit. limits: of the model that answers.

    Raises:
        UserError: a record without a prompt or an answer, or a prompt that the model cannot answer; a model without a
            tokenizer.
    """
    path = settings.evaluate.answers
    if path is None:
        return []
    if tokenizer is None:
        raise UserError(f"evaluate.answers={path} needs a tokenizer, but model.path {settings.model.path} has none")
    encoder = Encoder(tokenizer, settings.data, tokenizer_module.vocabulary(settings.model)["eos_token_id"])
    encoder.stop_generation()
    questions = []
    for line, record in read(path, settings.data):
        if isinstance(record, ValueError):
            raise UserError(f"{path}:{line}: {record}")
        answer = record.get(ANSWER)
        if not isinstance(answer, str | int | float):
            raise UserError(
                f"{path}:{line}: a question needs {settings.data.prompt!r} and {ANSWER!r}; it has {', '.join(record)}"
            )
        try:
            parsed = parse(record, settings.data, "prompt")
            ids = ids_of(parsed, encoder)
            limits.check_ids([ids])
            limits.check_answer(len(ids), settings.evaluate.max_tokens, "evaluate.max_tokens")
            said = last_text(shown(parsed, record.get(settings.data.prompt), tokenizer))
        except Unusable as why:
            raise UserError(f"{path}:{line}: {why}") from None
        questions.append(Question(said, ids, str(answer).strip()))
        if len(questions) == settings.evaluate.answers_limit:
            break
    if not questions:
        raise UserError(f"evaluate.answers={path} has no records")
    return questions
