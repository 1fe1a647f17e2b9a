"""A Python function that scores completions, in a process of its own and within a time limit."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from lib.errors import UserError
from lib.evaluate.judges import NoScores, Question
from lib.system.worker_process import Ended, NotStarted, WorkerProcess


class FunctionJudge:
    """Asks MODULE:FUNCTION, as (prompt, completions, record) ➜ a score for each completion.

    A function that takes too long is ended, and started again for the next question. What it prints is shown.

    Args:
        name: MODULE:FUNCTION, importable from this folder. shown: as the user named the judge.
        limit_seconds: for the completions of one question.

    Raises:
        UserError: it cannot be imported.
    """

    looks_at_order = True

    def __init__(self, name: str, shown: str, limit_seconds: float):
        self.name, self.limit_seconds = shown, limit_seconds
        path = os.pathsep.join([str(Path.cwd()), *filter(None, sys.path)])
        self._process = WorkerProcess(
            [sys.executable, "-m", "lib.evaluate.function_worker", name, str(limit_seconds)],
            environment={**os.environ, "PYTHONPATH": path},
            shows_errors=True,
        )
        try:
            self._process.start()
        except NotStarted as error:
            raise UserError(f"{shown}: {error}; give module:function, importable from this folder") from None

    def __call__(self, questions: Sequence[Question]) -> list[list[float]]:
        return [self._scores(question) for question in questions]

    def _scores(self, question: Question) -> list[float]:
        """A score for each completion.

        Raises:
            UserError: none comes in time, the process ends, or the function raises, or has none for a completion.
            NoScores: it returns something else.
        """
        asked = {"prompt": question.prompt, "completions": list(question.completions), "record": question.record}
        where = f"{self.name}: {question.place}"
        try:
            answer = self._process.ask(json.dumps(asked, default=str).encode(), self.limit_seconds)
        except TimeoutError:
            raise UserError(f"{where}: no answer within {self.limit_seconds:g} s (evaluate.judge_seconds)") from None
        except (NotStarted, Ended) as error:
            raise UserError(f"{where}: {error}") from None
        if "fault" in answer:
            raise UserError(f"{where}: {answer['fault']}")
        returned = f"{where}: returned {answer['made']}; it has to be a list of {len(question.completions)} scores"
        scores: list[float | None] | None = answer["scores"]
        if scores is None:
            raise NoScores(returned)
        known = [score for score in scores if score is not None]
        if len(known) < len(scores):
            raise UserError(returned)
        return known
