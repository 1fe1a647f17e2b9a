"""Who scores completions: a check of the answer, a Python function, or a command.

A judge takes questions and returns a score for each completion of each; the higher one is better. A model that compares
two answers gives 1 and 0, or 0.5 each.
"""

from __future__ import annotations

import importlib
import json
import re
import reprlib
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from decimal import Context, Decimal, localcontext
from typing import Any, Protocol

from lib.data.record_formats import ANSWER
from lib.errors import UserError
from lib.evaluate.scores import scores_in
from lib.system import os_commands

LINE_BYTES, SCORE_BYTES = 2**20, 2**10  # of what a command may write: in all, and for each score
DIGITS = r"(?:\d{1,3}(?:,\d{2,3})*,\d{3}(?!\d)|\d+)"  # 1,200 and 1,00,000; "3,4" has 3 and 4
DECIMAL = rf"(?:{DIGITS}(?:\.\d+)?|\.\d+)(?:[eE][-+]?\d+)?"
NUMBER = rf"(?<![\d.])((?:(?<![\w)])[-+])?{DECIMAL})(?:/({DECIMAL}))?"  # "10-5" has 10 and 5; "3/4" is one
MINUS = "\N{MINUS SIGN}"


@dataclass(frozen=True)
class Question:
    """A prompt with the completions to score.

    Args:
        place: file:line, for errors.
        record: the whole record of the prompt, e.g. with its `answer`.
    """

    place: str
    prompt: Any
    completions: Sequence[str]
    record: Mapping[str, Any]


class NoScores(UserError):
    """What a judge gave is no list with a score, or None, for each completion."""


class Judge(Protocol):
    """Scores completions."""

    looks_at_order: bool
    """Whether the order of completions may change the scores, so that both orders have to be asked."""

    def __call__(self, questions: Sequence[Question]) -> list[list[float]]:
        """A score for each completion of each question.

        Raises:
            UserError: a record lacks what the judge needs, or what the judge did wrong.
        """


def extract(pattern: str, text: str) -> str | None:
    """The first group (the whole, where there is none) of the pattern's last match, or None.

    Raises:
        UserError: the search takes too long.
    """
    found = None
    for found in re.finditer(pattern, text, re.MULTILINE):
        pass
    if found is None:
        return None
    return str(found[1] if found.re.groups else found[0]).strip()


def same_number(text: str, answer: str) -> bool:
    """Whether the last number of a text is the answer's, however it is written: 1,200 and 1200.0 are one."""
    return number_of(text) is not None and number_of(text) == number_of(answer)


def number_of(text: str) -> Decimal | None:
    """The last number of a text, a fraction to 50 digits; None where there is none, or none that is finite."""
    found = re.findall(NUMBER, text.replace(MINUS, "-"))
    if not found:
        return None
    with localcontext(Context(prec=50, traps=[])):
        above, below = (Decimal(part.replace(",", "")) for part in (found[-1][0], found[-1][1] or "1"))
        number = above / below if found[-1][1] else above
    return number if number.is_finite() else None


@dataclass(frozen=True)
class Checker:
    """1 for a right answer, 0 for a wrong one: completions are compared with the record's `answer`."""

    is_right: Callable[[str, str], bool]
    looks_at_order = False

    def __call__(self, questions: Sequence[Question]) -> list[list[float]]:
        return [
            [float(self.is_right(text, answer)) for text in question.completions]
            for question in questions
            for answer in [_answer_of(question)]
        ]


def _answer_of(question: Question) -> str:
    answer = question.record.get(ANSWER)
    if not isinstance(answer, str | int | float):
        raise UserError(
            f"{question.place}: no {ANSWER!r} to check completions by "
            f"(columns: {', '.join(question.record)}); add it, or set evaluate.judge"
        )
    return str(answer).strip()


class PythonJudge:
    """A function of an importable module: (prompt, completions, record) ➜ a score for each completion."""

    looks_at_order = True

    def __init__(self, name: str):
        module, _, function = name.partition(":")
        self.name = f"evaluate.judge={name}"
        try:
            self.function = getattr(importlib.import_module(module), function)
        except (ImportError, AttributeError) as error:
            raise UserError(f"{self.name}: {error}; give module:function, importable from this folder") from None

    def __call__(self, questions: Sequence[Question]) -> list[list[float]]:
        scores = []
        for question in questions:
            try:
                made = self.function(question.prompt, list(question.completions), dict(question.record))
            except Exception as error:  # whatever the user's function raises
                raise UserError(f"{self.name}: {question.place}: {type(error).__name__}: {error}") from error
            if (of_texts := scores_in(made, len(question.completions))) is None:
                wanted = f"a list of {len(question.completions)} scores"
                raise NoScores(f"{self.name}: {question.place}: returned {reprlib.repr(made)}; it has to be {wanted}")
            scores.append(of_texts)
        return scores


@dataclass(frozen=True)
class CommandJudge:
    """A command that reads {"prompt", "completions", "record"} a line, and writes a list of scores a line."""

    command: str
    timeout_seconds: float
    looks_at_order = True

    def __call__(self, questions: Sequence[Question]) -> list[list[float]]:
        name = f"evaluate.judge={self.command}"
        asked = [
            {"prompt": question.prompt, "completions": question.completions, "record": question.record}
            for question in questions
        ]
        text = "".join(json.dumps(question) + "\n" for question in asked)
        done = os_commands.run(shlex.split(self.command), self.timeout_seconds, text=text)
        if done.status is None:
            raise UserError(f"{name}: no answer within {self.timeout_seconds:g} s (sync.timeout_seconds)")
        if done.status:
            said = done.errors.strip().splitlines()
            raise UserError(f"{name}: ended with status {done.status}: {said[-1] if said else 'it said nothing'}")
        answers = done.output.splitlines()
        scores = [
            scores_in(_json(line), len(question.completions))
            for line, question in zip(answers, questions, strict=False)
        ]
        if len(answers) != len(questions) or None in scores:
            raise UserError(
                f"{name}: wrote {len(answers)} lines for {len(questions)} questions; "
                "each has to be a list of a score for each completion"
            )
        return [of_texts for of_texts in scores if of_texts is not None]


def _json(line: str) -> Any:
    try:
        return json.loads(line)
    except ValueError:
        return None
