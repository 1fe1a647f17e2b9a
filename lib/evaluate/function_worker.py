"""The process that calls a judge's function: `python -m lib.evaluate.function_worker MODULE:FUNCTION SECONDS`.

Reads a line of JSON for each question, {"prompt", "completions", "record"}, and writes one: {"made": what the function
returned}, or {"fault": what it raised}. What the function prints goes to the standard error output. A call ends the
process after SECONDS and some more, should the one that asked be gone.
"""

from __future__ import annotations

import importlib
import json
import math
import os
import signal
import sys
from typing import Any

GRACE_SECONDS = 5


def main(name: str, limit_seconds: float) -> int:
    """Serves until the input ends; 1 where there is no such function."""
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    module, _, function = name.partition(":")

    def say(**line: Any) -> None:
        answers.write(json.dumps(line, default=str) + "\n")
        answers.flush()

    try:
        call = getattr(importlib.import_module(module), function)
    except Exception as error:  # whatever the user's module raises
        say(fault=f"{type(error).__name__}: {error}")
        return 1
    say(made=None)
    for line in sys.stdin:
        asked = json.loads(line)
        signal.alarm(math.ceil(limit_seconds) + GRACE_SECONDS)
        try:
            made = call(asked["prompt"], asked["completions"], asked["record"])
            say(made=[float(score) for score in made] if isinstance(made, list | tuple) else repr(made))
        except Exception as error:  # whatever the user's function raises
            say(fault=f"{type(error).__name__}: {error}")
        signal.alarm(0)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], float(sys.argv[2])))
