"""A Python function that scores completions, in a process of its own and within a time limit."""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lib.errors import UserError
from lib.evaluate.judges import Question, scores_in

START_SECONDS = 60.0  # for the imports of the function's module


class FunctionJudge:
    """Asks MODULE:FUNCTION, as (prompt, completions, record) ➜ a score for each completion.

    A function that takes too long is ended, and started again for the next question.

    Args:
        name: MODULE:FUNCTION, importable from this folder. shown: as the user named the judge.
        limit_seconds: for the completions of one question.

    Raises:
        UserError: it cannot be imported.
    """

    looks_at_order = True

    def __init__(self, name: str, shown: str, limit_seconds: float):
        self.function, self.name, self.limit_seconds = name, shown, limit_seconds
        self._process: subprocess.Popen[bytes] | None = None
        self._rest = b""
        self._start()

    def __call__(self, questions: Sequence[Question]) -> list[list[float]]:
        return [self._scores(question) for question in questions]

    def _scores(self, question: Question) -> list[float]:
        asked = {"prompt": question.prompt, "completions": list(question.completions), "record": question.record}
        if self._process is None:
            self._start()
        answer = self._ask(json.dumps(asked, default=str).encode() + b"\n", self.limit_seconds, question.place)
        if "fault" in answer:
            raise UserError(f"{self.name}: {question.place}: {answer['fault']}")
        scores = scores_in(answer["made"], len(question.completions))
        if scores is None:
            wanted = f"a list of {len(question.completions)} scores"
            raise UserError(f"{self.name}: {question.place}: returned {answer['made']!r}; it has to be {wanted}")
        return scores

    def _start(self) -> None:
        path = os.pathsep.join([str(Path.cwd()), *filter(None, sys.path)])
        self._process = subprocess.Popen(
            [sys.executable, "-m", "lib.evaluate.function_worker", self.function, str(self.limit_seconds)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": path},
            start_new_session=True,  # what it starts itself ends with it
        )
        self._rest = b""
        answer = self._ask(b"", START_SECONDS, "its start")
        if "fault" in answer:
            self.close()
            raise UserError(f"{self.name}: {answer['fault']}; give module:function, importable from this folder")

    def _ask(self, line: bytes, seconds: float, place: str) -> dict[str, Any]:
        """The line of JSON that comes back.

        Raises:
            UserError: none comes in time, or the process has ended.
        """
        assert self._process is not None and self._process.stdin is not None
        try:
            self._process.stdin.write(line)
            self._process.stdin.flush()
        except BrokenPipeError:
            pass  # it has ended, which reading shows
        answer = self._read(time.monotonic() + seconds)
        if answer is None:
            self.close()
            raise UserError(f"{self.name}: {place}: no answer within {seconds:g} s (evaluate.judge_seconds)")
        if not answer:
            status = self._process.wait()
            self.close()
            raise UserError(f"{self.name}: {place}: its process ended with status {status}")
        made: dict[str, Any] = json.loads(answer)
        return made

    def _read(self, deadline: float) -> bytes | None:
        """A line, empty at the end of the process's output; None where none comes until then."""
        assert self._process is not None and self._process.stdout is not None
        with selectors.DefaultSelector() as selector:
            selector.register(self._process.stdout, selectors.EVENT_READ)
            while b"\n" not in self._rest:
                if not selector.select(max(0.0, deadline - time.monotonic())):
                    return None
                piece = os.read(self._process.stdout.fileno(), 2**16)
                if not piece:
                    return b""
                self._rest += piece
        line, _, self._rest = self._rest.partition(b"\n")
        return line

    def close(self) -> None:
        """Ends the process, and what it started."""
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.communicate()
            self._process = None

    def __del__(self) -> None:
        if getattr(self, "_process", None) is not None and not sys.is_finalizing():
            self.close()
