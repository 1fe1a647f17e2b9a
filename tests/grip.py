"""What a module of another project holds: its attributes and those of its classes, by identity."""

import importlib
import types
from typing import Any


def identities(module: str) -> dict[str, Any]:
    """The attributes of a module, and of its project's classes there, by dotted name."""
    found: dict[str, Any] = {}
    loaded = importlib.import_module(module)
    for name, value in vars(loaded).items():
        if name.startswith("__") or isinstance(value, types.ModuleType):
            continue
        found[name] = value
        if isinstance(value, type) and value.__module__.split(".")[0] == module.split(".")[0]:
            found.update({f"{name}.{key}": part for key, part in vars(value).items() if callable(part)})
    return found


def changes(before: dict[str, Any], after: dict[str, Any]) -> list[str]:
    """Names whose value is another object than before; new names of a module count as well."""
    return sorted(name for name in before.keys() | after.keys() if before.get(name) is not after.get(name))
