"""The process that calls a judge's function: `python -m lib.evaluate.function_worker MODULE:FUNCTION SECONDS`.

A question is {"prompt", "completions", "record"}; its answer {"scores", "made": what the function returned, shortened},
where the scores, and each of them, may be null, or {"fault": what it raised}. SECONDS is what a call may take.
"""

from __future__ import annotations

import functools
import importlib
import reprlib
import sys
from collections.abc import Callable
from typing import Any

from lib.evaluate.scores import scores_or_none_in
from lib.system.worker_loop import Answer, answer_questions

LONGEST_COMPLAINT = 2000  # letters


def prepare() -> Answer:
    """What answers, once the function's module is imported."""
    module, _, function = sys.argv[1].partition(":")
    return functools.partial(_answer, getattr(importlib.import_module(module), function))


def _answer(call: Callable[..., Any], asked: dict[str, Any]) -> dict[str, Any]:
    try:
        made = call(asked["prompt"], asked["completions"], asked["record"])
        return {"scores": scores_or_none_in(made, len(asked["completions"])), "made": reprlib.repr(made)}
    except Exception as error:  # whatever the user's function raises
        return {"fault": f"{type(error).__name__}: {error}"[:LONGEST_COMPLAINT]}


if __name__ == "__main__":
    answer_questions(prepare, float(sys.argv[2]))
