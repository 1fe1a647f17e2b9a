"""mlx-lm without what it needs for texts alone, until a text comes: commands start in a third of the time.

mlx-lm imports transformers and huggingface_hub when it is imported itself, which is 1.2 of a rank's 1.7 seconds of CPU
time. It takes four names from them, and uses these only where there is a tokenizer, or a model to download. `install`
gives its modules stand-ins for those names; the first use of one imports the real module. Nobody else sees a stand-in:
other modules and threads import as ever, also while mlx-lm is imported.

mlx-lm also limits the process to 2048 open files when it is imported, and 4096 at most. That fails where fewer are
allowed (a container, a cluster), and takes away where more are. For its modules `resource` is a stand-in as well.
"""

from __future__ import annotations

import builtins
import functools
import importlib
import importlib.abc
import importlib.util
import resource
import sys
from collections.abc import Mapping, Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType, SimpleNamespace
from typing import Any, Union

# Where these modules import these names, they are late; what else they import comes at once.
IMPORTERS = ("mlx_lm.generate", "mlx_lm.tuner.datasets", "mlx_lm.utils")
LATE = {
    "huggingface_hub": ("snapshot_download",),
    "transformers": ("PreTrainedTokenizer",),
    "mlx_lm.tokenizer_utils": ("TokenizerWrapper", "load"),
}


class LateName:
    """A class or function of a module that is imported when it is called, asked for an attribute, or inherited from."""

    def __init__(self, module: str, name: str):
        self._late = (module, name)

    def _real(self) -> Any:
        module, name = self._late
        return getattr(importlib.import_module(module), name)

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        return self._real()(*arguments, **options)

    def __getattr__(self, name: str) -> Any:
        if _is_asked_of_any(name):
            raise AttributeError(name)
        return getattr(self._real(), name)

    def __instancecheck__(self, instance: object) -> bool:
        return isinstance(instance, self._real())

    def __subclasscheck__(self, subclass: type) -> bool:
        return issubclass(subclass, self._real())

    def __mro_entries__(self, bases: tuple[object, ...]) -> tuple[type, ...]:
        return (self._real(),)

    def __or__(self, other: Any) -> Any:  # in an annotation
        return Union[self, other]  # noqa: UP007

    def __ror__(self, other: Any) -> Any:
        return Union[other, self]  # noqa: UP007


def _is_asked_of_any(name: str) -> bool:
    """Whether typing looks for this attribute in whatever comes to it, and does without."""
    return name.startswith("__") and name.endswith("__")


class LateFinder(importlib.abc.MetaPathFinder):
    """Finds the modules of IMPORTERS as Python does, and gives each an import of its own."""

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name not in IMPORTERS:
            return None
        others = [finder for finder in sys.meta_path if finder is not self]
        found = (finder.find_spec(name, path, target) for finder in others if hasattr(finder, "find_spec"))
        spec = next((one for one in found if one is not None), None)
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module
            spec.loader.exec_module = functools.partial(_execute, execute)  # type: ignore[method-assign]
        return spec


def _execute(execute: Any, module: ModuleType) -> None:
    vars(module)["__builtins__"] = {**vars(builtins), "__import__": _import}  # where Python looks for both
    execute(module)


def _import(
    name: str,
    globals: Mapping[str, Any] | None = None,
    locals: Mapping[str, Any] | None = None,
    fromlist: Sequence[str] | None = (),
    level: int = 0,
) -> Any:
    """As Python's own `__import__`, except for names that are late, of a module that nobody has imported yet."""
    package = str((globals or {}).get("__package__"))
    module = importlib.util.resolve_name("." * level + name, package) if level else name
    if module == "resource":
        return SimpleNamespace(**{**vars(resource), "setrlimit": raise_limit})
    if fromlist and module not in sys.modules and {*fromlist} <= {*LATE.get(module, ())}:
        return SimpleNamespace(**{one: LateName(module, one) for one in fromlist})
    return builtins.__import__(name, globals, locals, fromlist or (), level)


def raise_limit(which: int, wanted: tuple[int, int]) -> None:
    """As `resource.setrlimit`, but it lowers no limit, and asks for no more than the system allows."""
    soft, hard = resource.getrlimit(which)
    allowed = wanted[0] if hard == resource.RLIM_INFINITY else min(wanted[0], hard)
    if soft != resource.RLIM_INFINITY and soft < allowed:
        resource.setrlimit(which, (allowed, hard))


def install() -> None:
    """Makes an import of mlx-lm that comes after it a quick one; lib/__init__.py calls it before any other import."""
    sys.meta_path.insert(0, LateFinder())
