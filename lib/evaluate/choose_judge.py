"""Which judge evaluate.judge means."""

from __future__ import annotations

import re

from lib.config.evaluate_settings import REWARD_MODEL
from lib.config.schema import Config
from lib.evaluate import reward_model
from lib.evaluate.function_judge import FunctionJudge
from lib.evaluate.judges import Checker, CommandJudge, Judge, PythonJudge, extract, same_number
from lib.evaluate.model_judge import ModelGrader, ModelJudge

PYTHON = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*")  # module:function
SERVERS = ("http://", "https://")


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
    if judge in ("regex", "json_schema"):
        return FunctionJudge(f"lib.evaluate.checks:{judge}", f"evaluate.judge={judge}", settings.evaluate.judge_seconds)
    if judge.startswith(REWARD_MODEL):
        return reward_model.RewardModel(settings)
    if judge.startswith(SERVERS):
        return ModelJudge(settings)
    if PYTHON.fullmatch(judge):
        return PythonJudge(judge)
    return CommandJudge(judge, settings.sync.timeout_seconds)


def scorer_of(settings: Config) -> Judge:
    """The same, of any number of answers, each with a score of its own: a served model grades each.

    Raises:
        UserError: there is none of that name.
    """
    judge = settings.evaluate.judge
    return ModelGrader(settings) if judge is not None and judge.startswith(SERVERS) else judge_of(settings)


def guarded_scorer_of(settings: Config, setting: str) -> Judge:
    """The same, in which a Python function has a process of its own, and evaluate.judge_seconds for each prompt.

    setting: that named it, for errors.

    Raises:
        UserError: there is none of that name.
    """
    judge = settings.evaluate.judge
    if judge is not None and PYTHON.fullmatch(judge) and not judge.startswith(REWARD_MODEL):
        return FunctionJudge(judge, f"{setting}={judge}", settings.evaluate.judge_seconds)
    return scorer_of(settings)
