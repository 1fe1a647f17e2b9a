"""What can be known of a judge before a model has answered anything: whether there is one of that name.

A run asks its judge when the first answers are written, perhaps after an hour. So a name that means nothing is refused
when the data are read, in a dry run too. Nothing is started or loaded here.
"""

from __future__ import annotations

import difflib
import importlib.machinery
import re
import shlex
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Literal
from urllib.parse import urlsplit

from lib.config.evaluate_settings import REWARD_MODEL, EvaluateSettings
from lib.config.schema import Config
from lib.data.prompts import Prompts
from lib.data.record_formats import ANSWER
from lib.errors import UserError
from lib.system.model_folder import resolve

JudgeKind = Literal["check", "reward", "server", "function", "command"]
CHECKS = ("exact", "number", "regex", "json_schema")
JUDGES = f"a judge is {', '.join(CHECKS)}, reward:PATH, MODULE:FUNCTION, an http address, or a command with its path"
SERVERS = ("http://", "https://")
FUNCTION = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*")  # module:function


def kind_of(judge: str | None) -> JudgeKind:
    """What evaluate.judge or rollouts.judge means; None is the check by evaluate.answer_pattern."""
    if judge is None or judge in CHECKS:
        return "check"
    if judge.startswith(REWARD_MODEL):
        return "reward"
    if judge.startswith(SERVERS):
        return "server"
    return "function" if FUNCTION.fullmatch(judge) else "command"


def require_judges(config: Config, data: object, held_out: Prompts | None) -> None:
    """Makes sure that a round's answers, and those to held-out prompts, have a judge.

    Raises:
        UserError: they have none.
    """
    if not isinstance(data, Prompts):
        return
    of_rounds = "evaluate.judge" if config.rollouts.judge is None else "rollouts.judge"
    judge = config.evaluate.judge if config.rollouts.judge is None else config.rollouts.judge
    asked = [(of_rounds, judge, data)]
    asked += [] if held_out is None else [("evaluate.judge", config.evaluate.judge, held_out)]
    for setting, name, prompts in asked:
        require_judge(config.evaluate, name, setting)
        require_answers(name, setting, prompts)


def require_judge(settings: EvaluateSettings, judge: str | None, setting: str) -> None:
    """Makes sure that there is a judge of that name. setting: that gave it, for errors.

    Raises:
        UserError: there is none.
    """
    name = f"{setting}={judge}"
    if judge is None:
        return
    if judge == "json_schema" and _is_missing("jsonschema"):
        raise UserError(f"{name}: json_schema needs the package jsonschema: pip install jsonschema")
    checks: dict[JudgeKind, Callable[[], None]] = {
        "reward": lambda: _require_model(judge.removeprefix(REWARD_MODEL), name),
        "server": lambda: _require_served(settings, judge, name),
        "function": lambda: _require_module(judge.partition(":")[0], name),
        "command": lambda: _require_command(judge, name),
    }
    checks.get(kind_of(judge), lambda: None)()


def require_answers(judge: str | None, setting: str, prompts: Prompts) -> None:
    """Makes sure that a check has something to check by.

    Raises:
        UserError: no record has an answer.
    """
    if kind_of(judge) == "check" and all(prompts.record(row).get(ANSWER) is None for row in range(len(prompts))):
        raise UserError(
            f"{prompts.location(0)}: no {ANSWER!r} to check completions by, nor in any other record of {prompts.path}; "
            f"add it, or set {setting}"
        )


def _require_model(path: str, name: str) -> None:
    try:
        resolve(path)
    except UserError as error:
        raise UserError(f"{name}: {str(error).removeprefix('model.path ')}") from None


def _require_served(settings: EvaluateSettings, address: str, name: str) -> None:
    try:
        parts = urlsplit(address)
        has_host = parts.hostname is not None and parts.port != 0
    except ValueError:
        has_host = False
    if not has_host:
        raise UserError(f"{name} is no address; give one like http://HOST:8080/v1")
    if settings.judge_model is None:
        raise UserError(f"{name} needs evaluate.judge_model, the name of a model that it serves")
    if settings.judge_prompt is not None and not Path(settings.judge_prompt).is_file():
        raise UserError(f"evaluate.judge_prompt={settings.judge_prompt}: no such file")


def _require_module(module: str, name: str) -> None:
    package = module.partition(".")[0]  # a part of it is found by running its code: that is for the judge itself
    if _is_missing(package):
        raise UserError(
            f"{name}: ModuleNotFoundError: No module named {package!r}; give module:function, importable from this "
            "folder"
        )


def _is_missing(package: str) -> bool:
    """Whether there is no such package or module, here or in this folder."""
    if package in sys.builtin_module_names or package in sys.modules:
        return False
    return importlib.machinery.PathFinder.find_spec(package, [str(Path.cwd()), *sys.path]) is None


def _require_command(command: str, name: str) -> None:
    try:
        words = shlex.split(command)
    except ValueError as error:
        raise UserError(f"{name}: no command: {str(error).lower()}") from None
    if not words:
        raise UserError(f"{name} names nothing; leave it out, or name a judge")
    if shutil.which(words[0]) is None:
        near = difflib.get_close_matches(command, CHECKS, 1)
        raise UserError(
            f"{name}: cannot be started: no command {words[0]!r} here; {f'did you mean {near[0]}?' if near else JUDGES}"
        )
