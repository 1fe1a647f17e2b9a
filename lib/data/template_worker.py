"""The process that renders for lib/data/template_process.py: `python -m lib.data.template_worker BYTES SECONDS`.

A question is {"date", "options", "conversations"}; its answer {"texts", "marked"}, or {"refused", "is_template"} with
what the template raised. BYTES is what it may take beyond what it has at its start, where the system has such a limit
(not on macOS); SECONDS is what an answer may take.
"""

from __future__ import annotations

import datetime
import functools
import importlib
import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

from lib.system.limits import limit_memory
from lib.system.worker_loop import Answer, answer_questions

LONGEST_COMPLAINT = 2000  # letters


def prepare() -> Answer:
    """What answers, once transformers is imported.

    Raises:
        AttributeError: this version of it renders in another way.
    """
    transformers = _rendering()
    answer = functools.partial(_answer, transformers._compile_jinja_template, transformers.render_jinja_template)
    limit_memory(int(sys.argv[1]))
    return answer


def _rendering() -> Any:
    """transformers' module of chat templates, without the rest of the package: that takes three times as long to come
    in, which every start and restart of a rank would wait for."""
    name = "transformers.utils.chat_template_utils"
    found = importlib.util.find_spec("transformers")
    assert found is not None and found.origin is not None
    folder = Path(found.origin).parent
    packages = {"transformers": folder, "transformers.utils": folder / "utils"}
    for package, place in packages.items():
        sys.modules[package] = ModuleType(package)
        sys.modules[package].__path__ = [str(place)]
    try:
        return importlib.import_module(name)
    except ImportError:  # a version of it that needs more
        for package in [one for one in sys.modules if one.partition(".")[0] == "transformers"]:
            del sys.modules[package]
        return importlib.import_module(name)


def _answer(compiled_of: Callable[[str], Any], render: Callable[..., Any], asked: dict[str, Any]) -> dict[str, Any]:
    """A question's answer."""
    is_template = False
    try:
        compiled = compiled_of(asked["options"]["chat_template"])  # kept by its text
        is_template = True
        if asked["date"] is not None:
            date = datetime.date.fromisoformat(asked["date"])
            compiled.globals["strftime_now"] = lambda format: date.strftime(format)
        texts, marked = render(asked["conversations"], **asked["options"])
    except MemoryError:
        raise
    except Exception as error:  # a template raises whatever its author chose
        return {"refused": str(error)[:LONGEST_COMPLAINT], "is_template": is_template}
    return {"texts": texts, "marked": marked}


if __name__ == "__main__":
    answer_questions(prepare, float(sys.argv[2]))
