"""Argument parsers whose error messages are one line."""

from __future__ import annotations

import argparse
import difflib
from typing import Any, NoReturn

from lib.config import help, unknown_names
from lib.errors import UserError

UNKNOWN_OPTIONS = "unrecognized arguments: "  # what argparse writes before them


class Parser(argparse.ArgumentParser):
    """A parser whose error messages are one line, with a hint, raised as UserError."""

    settings_place: str = ""  # where key=value words go, if not beside the options

    def __init__(self, **options: Any):
        formatter = argparse.RawDescriptionHelpFormatter
        super().__init__(**{"formatter_class": formatter, "allow_abbrev": False, **options})

    def error(self, message: str) -> NoReturn:
        hint, words = "--help lists the options", message.removeprefix(UNKNOWN_OPTIONS).split()
        unknown = [word.partition("=")[0] for word in words if word.startswith("-")]
        if message.startswith(UNKNOWN_OPTIONS) and unknown:
            options = [name for name in self._option_string_actions if name.startswith("--")]
            if close := difflib.get_close_matches(unknown[0], options, n=1, cutoff=0.75):
                hint = f"did you mean {close[0]}?"
            elif self.settings_place or any(action.dest == "overrides" for action in self._actions):
                names, settings = [name.lstrip("-").replace("-", "_") for name in unknown], help.known_settings()
                hints = [unknown_names.of_setting(name, settings) for name in names]
                meant = "".join(said for said in hints if "--help" not in said) or hints[0]
                hint = f"settings are words without dashes, as train.beta=0.2{self.settings_place}{meant}"
        raise UserError(f"{message}; {hint}")
