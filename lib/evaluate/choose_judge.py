"""Which judge evaluate.judge means."""

from __future__ import annotations

from lib.config.schema import Config
from lib.evaluate import reward_model
from lib.evaluate.function_judge import FunctionJudge
from lib.evaluate.judge_checks import kind_of, require_judge
from lib.evaluate.judges import Checker, CommandJudge, Judge, PythonJudge, extract, same_number
from lib.evaluate.model_judge import ModelGrader, ModelJudge


def judge_of(settings: Config) -> Judge:
    """The judge that evaluate.judge names.

    Raises:
        UserError: there is none of that name.
    """
    judge, pattern = settings.evaluate.judge, settings.evaluate.answer_pattern
    require_judge(settings.evaluate, judge, "evaluate.judge")
    if judge is None:
        return Checker(lambda text, answer: extract(pattern, text) == answer)
    if judge == "exact":
        return Checker(lambda text, answer: text.strip() == answer)
    if judge == "number":
        return Checker(same_number)
    kind = kind_of(judge)
    if kind == "check":
        return FunctionJudge(f"lib.evaluate.checks:{judge}", f"evaluate.judge={judge}", settings.evaluate.judge_seconds)
    if kind == "reward":
        return reward_model.RewardModel(settings)
    if kind == "server":
        return ModelJudge(settings)
    if kind == "function":
        return PythonJudge(judge)
    return CommandJudge(judge, settings.sync.timeout_seconds)


def scorer_of(settings: Config) -> Judge:
    """The same, of any number of answers, each with a score of its own: a served model grades each.

    Raises:
        UserError: there is none of that name.
    """
    require_judge(settings.evaluate, settings.evaluate.judge, "evaluate.judge")
    return ModelGrader(settings) if kind_of(settings.evaluate.judge) == "server" else judge_of(settings)


def guarded_scorer_of(settings: Config, setting: str) -> Judge:
    """The same, in which a Python function has a process of its own, and evaluate.judge_seconds for each prompt.

    setting: that named it, for errors.

    Raises:
        UserError: there is none of that name.
    """
    judge = settings.evaluate.judge
    if judge is not None and kind_of(judge) == "function":
        return FunctionJudge(judge, f"{setting}={judge}", settings.evaluate.judge_seconds)
    scorer = scorer_of(settings)
    if isinstance(scorer, ModelGrader):
        scorer.require_server()
    return scorer
