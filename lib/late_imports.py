"""mlx-lm without what it needs for texts alone, until a text comes: commands start in a third of the time.

mlx-lm imports transformers and huggingface_hub when it is imported itself, which is 1.2 of a rank's 1.7 seconds of CPU
time. It takes four names from them, and uses these only where there is a tokenizer, or a model to download. `install`
gives it stand-ins for those names; the first use of one imports the real module. Nobody else sees a stand-in.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import importlib.abc
import importlib.util
import sys
from collections.abc import Iterator, Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any, Union

# While these modules are executed, these names of those modules are late; any other name of them is imported at once.
IMPORTERS = ("mlx_lm", "mlx_lm.tuner.datasets")
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
        return getattr(_real_module(module), name)

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


class LateModule(ModuleType):
    """Stands in sys.modules for a module of LATE; what is asked for anything else leaves the place to the real one."""

    def __getattr__(self, name: str) -> Any:
        if name in LATE[self.__name__]:
            return LateName(self.__name__, name)
        if _is_asked_of_any(name):
            raise AttributeError(name)
        return getattr(_real_module(self.__name__), name)


def _is_asked_of_any(name: str) -> bool:
    """Whether typing and import look for this attribute in whatever comes to them, and do without."""
    return name.startswith("__") and name.endswith("__")


def _real_module(name: str) -> ModuleType:
    if isinstance(sys.modules.get(name), LateModule):
        del sys.modules[name]
    return importlib.import_module(name)


class LateFinder(importlib.abc.MetaPathFinder):
    """Finds the modules of IMPORTERS as Python does, and lets each see the stand-ins while it is executed."""

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
    with _stand_ins():
        execute(module)


@contextlib.contextmanager
def _stand_ins() -> Iterator[None]:
    stand_ins = {name: LateModule(name) for name in LATE if name not in sys.modules}
    sys.modules.update(stand_ins)
    try:
        yield
    finally:
        for name, module in stand_ins.items():
            if sys.modules.get(name) is module:
                del sys.modules[name]


def install() -> None:
    """Makes an import of mlx-lm that comes after it a quick one; lib/__init__.py calls it before any other import."""
    sys.meta_path.insert(0, LateFinder())
