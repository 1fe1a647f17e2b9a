"""The reference of all settings, their types, and what to type instead of a name from another trainer or version.

lib/config/unknown_names.txt has those names. None is accepted as a setting: each has one name, in settings.py.
"""

from __future__ import annotations

import difflib
import functools
import types
import typing
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

from pydantic import BaseModel

from lib.config.settings import Config


class Setting(NamedTuple):
    """One setting, as its definition in lib/config/settings.py says."""

    key: str  # dotted
    annotation: Any  # its type, without limits
    default: Any
    meaning: str  # in one line


def settings(section: type[BaseModel] = Config, prefix: str = "") -> list[Setting]:
    """Every setting, in the order of definition."""
    defined = []
    for name, field in section.model_fields.items():
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
            defined += settings(field.annotation, f"{prefix}{name}.")
        else:
            default = field.get_default(call_default_factory=True) if not field.is_required() else "(required)"
            meaning = " ".join((field.description or "").split())  # wrapped in the source
            defined.append(Setting(prefix + name, _strip(field.annotation), default, meaning))
    return defined


@functools.cache
def setting_types() -> dict[str, Any]:
    """The type of every setting, by its dotted key."""
    return {setting.key: setting.annotation for setting in settings()}


def known_settings() -> tuple[str, ...]:
    """The dotted keys of all settings."""
    return tuple(setting_types())


@functools.cache
def help_text(only: str = "") -> str:
    """The reference of all settings, or of one section, as `--help` prints it."""
    lines, section = [], ""
    for key, annotation, default, meaning in settings():
        if not key.startswith(only):
            continue
        if "." in key and key.split(".")[0] != section:
            section = key.split(".")[0]
            lines.append(f"\n{section}: {Config.model_fields[section].annotation.__doc__}")
        shown = "null" if default is None else default
        lines.append(f"  {key}={shown}  <{_type_name(annotation)}>\n      {meaning}")
    return "\n".join(lines)


def _strip(annotation: Any) -> Any:
    return typing.get_args(annotation)[0] if typing.get_origin(annotation) is Annotated else annotation


def type_parts(annotation: Any) -> list[Any]:
    annotation = _strip(annotation)
    if typing.get_origin(annotation) in (typing.Union, types.UnionType):
        return [part for choice in typing.get_args(annotation) for part in type_parts(choice)]
    return [annotation]


def accepts(annotation: Any, kind: type) -> bool:
    return kind in type_parts(annotation)


def _type_name(annotation: Any) -> str:
    names = []
    for part in type_parts(annotation):
        if typing.get_origin(part) is Literal:
            names.append("|".join(typing.get_args(part)))
        elif typing.get_origin(part) is tuple:
            names.append(f"list of {_type_name(typing.get_args(part)[0])}")
        else:
            names.append("null" if part is type(None) else getattr(typing.get_origin(part) or part, "__name__", "any"))
    return " or ".join(names)


# ---- What to type instead of a name that is unknown here

WORDS: dict[str, tuple[str, str]] = {}  # a foreign name ➜ the word to type, with {} for its value, and what differs
NOTHING: dict[str, str] = {}  # a foreign name ➜ why there is nothing to set
VALUES: dict[tuple[str, str], str] = {}  # a setting and a foreign value ➜ the value here
REMOVED: dict[str, str] = {}  # a setting of an earlier version ➜ what to do instead

for _line in Path(__file__).with_name("unknown_names.txt").read_text(encoding="utf-8").splitlines():
    _word, _, _rest = _line.partition(" < ")
    _names, _, _note = _rest.partition(" | ")
    _key, _, _text = _word.partition(": ")
    for _name in _names.split() if not _line.startswith("#") else ():
        if _key == "removed":
            REMOVED[_name] = _text
        elif _text and "=" not in _key:
            VALUES[_key, _name] = _text
        elif _word == "-":
            NOTHING[_name] = _note
        else:
            WORDS[_name] = _word, _note


def normalised(name: str) -> str:
    """A name as the table has it: --Batch-Size, train.batch_size ➜ batch_size."""
    return name.lstrip("-").replace("-", "_").rpartition(".")[2].lower()


def hint_for_setting(key: str, known: Sequence[str]) -> str:
    """What follows "unknown setting KEY": the setting that is meant, or those that there are."""
    section, _, leaf = key.rpartition(".")
    if key in known:
        return f"; write {key}=VALUE, in a file {leaf}: below {section}:"
    if key in REMOVED:
        return f", which an earlier version had; {REMOVED[key]}"
    if (name := normalised(key)) in WORDS:
        word, note = WORDS[name]
        setting = word.partition("=")[0] if "{" in word or "..." in word else word
        return f"; did you mean {setting}?" + (f" ({note})" if note else "")
    if name in NOTHING:
        return f"; leave it out: {NOTHING[name]}"
    if close := closest(key, [*known, *{k.partition(".")[0] for k in known}]):
        return f"; did you mean {close}?"
    siblings = [k.rpartition(".")[2] for k in known if section and k.startswith(f"{section}.")]
    return f"; {section} has {', '.join(siblings)}" if siblings else "; --help lists the settings"


def hint_for_value(key: str, value: object) -> str:
    """What follows a value that a setting does not have: what it is called here."""
    meant = VALUES.get((key, str(value).lower()))
    return f"; here: {meant}" if meant else ""


def closest(key: str, known: Sequence[str]) -> str | None:
    """The setting whose name is nearest: in the same section, as a whole, or under any section."""
    section, _, leaf = key.rpartition(".")
    leaves = {name.rpartition(".")[2]: name for name in reversed(known)}
    if leaf in leaves and leaves[leaf] != key:
        return leaves[leaf]
    siblings = {name.removeprefix(f"{section}."): name for name in known if section and name.startswith(f"{section}.")}
    whole = {} if siblings else {name: name for name in known}
    for names, name in ((siblings, leaf), (whole, key), (leaves, leaf)):
        if close := difflib.get_close_matches(name, names, n=1, cutoff=0.65):
            return names[close[0]]
    return None
