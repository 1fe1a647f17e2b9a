"""The process that searches for lib/system/patterns.py: `python -m lib.system.pattern_worker BYTES SECONDS`.

A question is [pattern, text, is_full]; its answer {"found": ...}, or {"fault": ...} where that is no pattern. BYTES is
what it may take beyond what it has at its start, SECONDS what a search may take.
"""

from __future__ import annotations

import re
import sys
from typing import Any

from lib.system.limits import limit_memory
from lib.system.worker_loop import Answer, answer_questions


def found(pattern: str, text: str, is_full: bool) -> bool | str | None:
    """Whether the pattern matches all of the text; else the first group of its last match, or None."""
    if is_full:
        return re.fullmatch(pattern, text) is not None
    last: re.Match[str] | None = None
    for last in re.finditer(pattern, text, re.MULTILINE):
        pass
    return None if last is None else last.group(min(1, last.re.groups))


def answer(asked: list[Any]) -> dict[str, Any]:
    """What a question gets."""
    try:
        return {"found": found(*asked)}
    except (re.error, RecursionError, OverflowError) as error:
        return {"fault": f"{type(error).__name__}: {error}"}


def prepare() -> Answer:
    limit_memory(int(sys.argv[1]))
    return answer


if __name__ == "__main__":
    answer_questions(prepare, float(sys.argv[2]))
