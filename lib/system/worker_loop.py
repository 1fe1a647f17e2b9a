"""What a process of lib/system/worker_process.py does: it answers a line of JSON by a line of JSON, again and again.

The first line that it writes says that it is ready, {}, or why it never will be, {"fault": ...}.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import signal
import sys
from collections.abc import Callable
from typing import Any, TypeAlias

START_SECONDS = 120.0  # until a process is ready, on a busy machine
GRACE_SECONDS = 5  # beyond a limit; whoever asked keeps to the limit itself
OUT_OF_MEMORY = 71  # exit status

Answer: TypeAlias = Callable[[Any], Any]


def answer_questions(prepare: Callable[[], Answer], seconds: float) -> None:
    """Answers until standard input ends. What is printed goes to the standard error output, at once.

    Standard input and output are for questions and answers alone: what answers finds nothing to read there, nor do the
    commands that it runs, which would wait for more, or take the next question.

    The kernel ends this process where an answer takes longer than it may. Whoever asked does so earlier; but it may be
    gone, and nobody else would. A MemoryError ends the process too: what is still held would be missing for the next
    question.

    Args:
        prepare: returns what answers, when it is ready.
        seconds: for an answer.
    """
    questions, answers = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    os.dup2(2, 1)
    sys.stdout = sys.stderr  # of which every line is written when it is complete: this process may be killed

    def say(answer: Any) -> None:
        text = json.dumps(answer, ensure_ascii=False, default=str)
        answers.write(text.encode("utf-8", "surrogatepass") + b"\n")
        answers.flush()

    try:
        signal.alarm(_whole(START_SECONDS))
        try:
            answer = prepare()
        except MemoryError:
            raise
        except Exception as error:  # of a module that is the user's, or of another version than we know
            say({"fault": f"{type(error).__name__}: {error}"})
            sys.exit(1)
        say({})
        signal.alarm(0)
        for line in questions:
            signal.alarm(_whole(seconds))
            say(answer(json.loads(line)))
            signal.alarm(0)
    except MemoryError:
        os._exit(OUT_OF_MEMORY)
    except BrokenPipeError:  # nobody waits for the answer
        with contextlib.suppress(OSError):
            answers.close()


def _whole(seconds: float) -> int:
    """Seconds of an alarm, of which the kernel knows only whole ones."""
    return math.ceil(seconds) + GRACE_SECONDS
