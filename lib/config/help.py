"""The reference of all settings, and their types."""

from __future__ import annotations

import functools
import types
import typing
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
