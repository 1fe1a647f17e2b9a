"""Answers ➜ scores: a judge that fails on an answer leaves that one out, and says why."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from lib.errors import UserError
from lib.evaluate.function_judge import FunctionJudge
from lib.evaluate.judges import Judge, NoScores, Question


@dataclass(frozen=True)
class Scored:
    """What a judge makes of one answer: a score, or why there is none."""

    score: float | None
    fault: str = ""


def require_scores(judge: Judge, question: Question) -> None:
    """Makes sure that a function gives scores, before a round of answers is sampled for it.

    What it raises may be about this answer alone, and so may a score that is None: that is left to the round.

    Raises:
        NoScores: it gives something else.
    """
    if isinstance(judge, FunctionJudge):
        try:
            judge([question])
        except NoScores:
            raise
        except UserError:
            return


def scores_of(judge: Judge, questions: Sequence[Question]) -> list[list[Scored]]:
    """A score for each completion of each question.

    Where a judge fails on several questions it is asked for each, and where it fails on one for each of its answers.

    Raises:
        UserError: it fails on every answer to several questions, so nothing is wrong with the answers.
    """
    try:
        return [[_scored(score) for score in of_texts] for of_texts in judge(questions)]
    except UserError as error:
        fault = error
    scored = [_each(judge, question) for question in questions]
    if all(one.score is None for of_question in scored for one in of_question):
        raise UserError(f"no answer is scored: {fault}") from None
    return scored


def _each(judge: Judge, question: Question) -> list[Scored]:
    """The scores of one question's answers, each by itself where they cannot be had together."""
    try:
        (of_texts,) = judge([question])
        return [_scored(score) for score in of_texts]
    except UserError as error:
        if len(question.completions) == 1:
            return [Scored(None, str(error))]
    return [_each(judge, replace(question, completions=[text]))[0] for text in question.completions]


def _scored(score: float) -> Scored:
    return Scored(score) if math.isfinite(score) else Scored(None, "the judge gave no verdict")
