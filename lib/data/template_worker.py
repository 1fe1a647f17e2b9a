"""The process that renders for lib/data/template_process.py: `python -m lib.data.template_worker BYTES`.

A line of JSON for each question, {"date", "options", "conversations"}, and one for its answer: {"texts", "marked"},
{"refused", "is_template"} with what the template raised, or {"has_memory": false}. BYTES is what it may take beyond
what it has at its start, where the system has such a limit (not on macOS).
"""

from __future__ import annotations

import datetime
import importlib
import importlib.util
import json
import os
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

from lib.system.limits import limit_memory

LONGEST_COMPLAINT = 2000  # letters


def main() -> None:
    """Renders until standard input ends."""
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what a library prints is no answer
    transformers = _rendering()
    limit_memory(int(sys.argv[1]))
    _say(answers, {})
    for line in sys.stdin.buffer:
        try:
            answer = _answer(transformers, json.loads(line))
        except MemoryError:
            answer = {"has_memory": False}
        _say(answers, answer)


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


def _answer(transformers: Any, asked: dict[str, Any]) -> dict[str, Any]:
    """A question's answer."""
    is_template = False
    try:
        compiled = transformers._compile_jinja_template(asked["options"]["chat_template"])  # kept by its text
        is_template = True
        if asked["date"] is not None:
            date = datetime.date.fromisoformat(asked["date"])
            compiled.globals["strftime_now"] = lambda format: date.strftime(format)
        texts, marked = transformers.render_jinja_template(asked["conversations"], **asked["options"])
    except MemoryError:
        raise
    except Exception as error:  # a template raises whatever its author chose
        return {"refused": str(error)[:LONGEST_COMPLAINT], "is_template": is_template}
    return {"texts": texts, "marked": marked}


def _say(answers: Any, answer: dict[str, Any]) -> None:
    answers.write(json.dumps(answer, ensure_ascii=False).encode("utf-8", "surrogatepass") + b"\n")
    answers.flush()


if __name__ == "__main__":
    main()
