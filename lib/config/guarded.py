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
    if wanted := allowed(config, overrides, uses):
        defaults = _defaults()
        faults = "; ".join(f"{key}={value} {GUARDED[key]}" for key, value in wanted.items())
        raise UserError(
            f"{path}: {faults}. A run's folder cannot allow that: if you want it, give the same on the "
            f"command line, else {' '.join(f'{key}={_as_word(defaults[key])}' for key in wanted)}"
        )


def allowed(config: Config, overrides: Sequence[str], uses: Sequence[str]) -> dict[str, str]:
    """What a configuration sets beyond the words, of all that a run's folder may not decide: as one would type it.

    uses: as `require_own` has it.
    """
    given, defaults = {word.partition("=")[0] for word in overrides}, _defaults()
    values = {key: functools.reduce(getattr, key.split("."), config) for key in GUARDED if key.startswith(tuple(uses))}
    return {
        key: _as_word(value)
        for key, value in values.items()
        if key not in given and value != defaults[key] and value not in HARMLESS.get(key, ())
    }


def _defaults() -> dict[str, Any]:
    return {setting.key: setting.default for setting in settings()}


def _as_word(value: Any) -> str:
    """A setting's value as one would type it."""
    if isinstance(value, tuple):
        return f"[{','.join(map(str, value))}]"
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)
