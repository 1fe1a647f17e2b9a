"""Argument parsers whose error messages are one line."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from typing import Any, NoReturn

from lib.config import hints
from lib.config.help import known_settings
from lib.errors import UserError

UNKNOWN_OPTIONS = "unrecognized arguments: "  # what argparse writes before them


class Parser(argparse.ArgumentParser):
    """A parser whose error messages are one line, with a hint, raised as UserError."""

    arguments: Sequence[str] | None = None  # of the whole command line
    settings_place: str | None = None  # where key=value words go, if not beside the options

    def __init__(self, **options: Any):
        formatter = argparse.RawDescriptionHelpFormatter
        super().__init__(**{"formatter_class": formatter, "allow_abbrev": False, **options})

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        if self.arguments is None:
            self.arguments = list(sys.argv[1:] if args is None else args)
        return super().parse_known_args(args, namespace)

    def error(self, message: str) -> NoReturn:
        hint = ""
        if message.startswith(UNKNOWN_OPTIONS):
            words = message.removeprefix(UNKNOWN_OPTIONS).split()
            hint = next((self._hint(word) for word in words if word.startswith("-")), "")
        raise UserError(f"{message}; {hint or '--help lists the options'}")

    def _hint(self, word: str) -> str:
        option, _, value = word.partition("=")
        following = list(self.arguments or ())
        following = following[following.index(word) + 1 :][:1] if word in following else []
        shown = value or next((text for text in following if not text.startswith("-") and "=" not in text), None)
        takes_settings = self.settings_place or any(action.dest == "overrides" for action in self._actions)
        options = [name for name in self._option_string_actions if name.startswith("--")]
        hint = hints.of_option(option, shown, known_settings() if takes_settings else [], options)
        is_setting = hint and self.settings_place and not hint.startswith("did you mean --")
        return f"{hint}, {self.settings_place}" if is_setting else hint
