"""Which judge evaluate.judge means."""

from __future__ import annotations

import re

from lib.config.schema import Config
from lib.evaluate.judges import Checker, CommandJudge, Judge, PythonJudge, extract, same_number
from lib.evaluate.model_judge import ModelJudge

PYTHON = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*")  # module:function


def judge_of(settings: Config) -> Judge:
    """The judge that evaluate.judge names.

    Raises:
        UserError: there is none of that name.
    """
    judge, pattern = settings.evaluate.judge, settings.evaluate.answer_pattern
    if judge is None:
        return Checker(lambda text, answer: extract(pattern, text) == answer)
    if judge == "exact":
        return Checker(lambda text, answer: text.strip() == answer)
    if judge == "number":
        return Checker(same_number)
    if judge.startswith(("http://", "https://")):
        return ModelJudge(settings)
    if PYTHON.fullmatch(judge):
        return PythonJudge(judge)
    return CommandJudge(judge, settings.sync.timeout_seconds)
