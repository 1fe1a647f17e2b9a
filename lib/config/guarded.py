"""Settings that count only where the user gave them: on the command line, or in a --config file of their own.

A run's folder may be somebody else's. What in its config.yaml would run code, send texts away or open a door to this
machine is refused by every command that would act on it, until the command line says the same.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lib.config.help import settings
from lib.config.schema import Config
from lib.errors import UserError

GUARDED: dict[str, str] = {
    "model.trust_remote_code": "runs code that comes with the model",
    "evaluate.judge": "may run a command or code, or send texts away",
    "evaluate.judge_prompt": "has a file's text sent to the judge",
    "rollouts.judge": "may run a command or code, or send texts away",
    "run.sinks": "sends figures and settings away",
    "serve.host": "opens the server to other machines",
    "serve.keys": "says who may use the server",
    "serve.hostfile": "starts commands on other hosts",
    "serve.backends": "sends prompts to other servers",
    "serve.cors_origins": "lets web pages call the server",
    "serve.tls_certificate": "says who the server is",
    "serve.tls_key": "says who can read its traffic",
    "serve.feedback": "writes a file",
}
CHECKS = ("exact", "number", "regex", "json_schema")
HARMLESS: dict[str, tuple[Any, ...]] = {
    "evaluate.judge": CHECKS,
    "rollouts.judge": CHECKS,
    "run.sinks": (("tensorboard",),),  # files in the run's own folder
}


def require_own(config: Config, path: Path, overrides: Sequence[str], uses: Sequence[str]) -> None:
    """Makes sure that the words say themselves what a run's folder may not decide.

    Args:
        config: what the run's file at `path` says.
        uses: beginnings of the settings that the command would act on.

    Raises:
        UserError: the file sets what the words do not; names all of it, and what to type.
    """
    given = {word.partition("=")[0] for word in overrides}
    defaults = {setting.key: setting.default for setting in settings()}
    faults, remedies = [], []
    for key, what in GUARDED.items():
        value = functools.reduce(getattr, key.split("."), config)
        if key in given or value == defaults[key] or value in HARMLESS.get(key, ()) or not key.startswith(tuple(uses)):
            continue
        faults.append(f"{key}={_as_word(value)} {what}")
        remedies.append(f"{key}={_as_word(defaults[key])}")
    if faults:
        raise UserError(
            f"{path}: {'; '.join(faults)}. A run's folder cannot allow that: if you want it, give the same on the "
            f"command line, else {' '.join(remedies)}"
        )


def _as_word(value: Any) -> str:
    """A setting's value as one would type it."""
    if isinstance(value, tuple):
        return f"[{','.join(map(str, value))}]"
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)
