"""The process that renders for lib/data/template_process.py: `python -m lib.data.template_worker BYTES`.

A line of JSON for each question, {"date", "options", "conversations"}, and one for its answer: {"texts", "marked"},
{"refused", "is_template"} with what the template raised, or {"has_memory": false}. BYTES is what it may take beyond
what it has at its start, where the system has such a limit (not on macOS).
"""

from __future__ import annotations

import datetime
import json
import os
import sys
from typing import Any

from transformers.utils.chat_template_utils import _compile_jinja_template, render_jinja_template

from lib.system.limits import limit_memory

LONGEST_COMPLAINT = 2000  # letters


def main() -> None:
    """Renders until standard input ends."""
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what a library prints is no answer
    limit_memory(int(sys.argv[1]))
    _say(answers, {})
    for line in sys.stdin.buffer:
        try:
            answer = _answer(json.loads(line))
        except MemoryError:
            answer = {"has_memory": False}
        _say(answers, answer)


def _answer(asked: dict[str, Any]) -> dict[str, Any]:
    """A question's answer."""
    is_template = False
    try:
        compiled: Any = _compile_jinja_template(asked["options"]["chat_template"])  # kept by its text
        is_template = True
        if asked["date"] is not None:
            date = datetime.date.fromisoformat(asked["date"])
            compiled.globals["strftime_now"] = lambda format: date.strftime(format)
        made: Any = render_jinja_template(asked["conversations"], **asked["options"])
        texts, marked = made
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
