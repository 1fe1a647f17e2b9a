"""The process in which a judge's function runs, and the functions that Tandem brings: regex and json_schema.

A function takes (prompt, completions, record) and returns a score for each completion; None: it has none for this one.
This module imports nothing heavy: the process has to start quickly.
"""

from __future__ import annotations

import json
import math
import os
import pkgutil
import re
import reprlib
import signal
import sys
from collections.abc import Mapping, Sequence, Set
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

ANSWER = "answer"  # the record's column by which completions are checked
FENCED = re.compile(r"\s*```(?:json)?\s*\n(.*)\n\s*```\s*", re.DOTALL)  # how models write JSON
LONGEST_FAULT = 2000  # characters
GRACE_SECONDS = 5.0  # after the limit, in case that the parent process died


def serve_function(name: str, limit_seconds: float, pipe: Connection) -> None:
    """Answers {"prompt", "completions", "record"} with (whether this process is over, {"scores", "returned"} or
    {"fault"}), until the pipe closes."""
    os.setsid()  # killed with all that it started; Ctrl-C reaches the parent alone
    sys.stdout = sys.stderr  # the parent's standard output is for its results
    sys.path.insert(0, str(Path.cwd()))
    answer: dict[str, Any] = {}
    function = None
    while True:
        try:
            if function is None:
                function = pkgutil.resolve_name(name)
            else:
                question = json.loads(pipe.recv())
                signal.setitimer(signal.ITIMER_REAL, limit_seconds + GRACE_SECONDS)
                returned = function(*question.values())
                scores = scores_in(returned, len(question["completions"]))
                answer = {"scores": scores, "returned": reprlib.repr(returned)}
        except EOFError:
            return
        except Exception as error:  # a user's module or function may raise anything
            answer = {"fault": f"{type(error).__name__}: {error}"[:LONGEST_FAULT]}
        signal.setitimer(signal.ITIMER_REAL, 0)
        pipe.send((function is None, answer))


def scores_in(returned: Any, count: int) -> list[float] | None:
    """`count` scores in their order, NaN for None and for what is not finite; None where it is anything else."""
    if isinstance(returned, str | bytes | Mapping | Set):  # a set has no order
        return None
    try:
        scores = [math.nan if score is None else float(score) for score in returned]
    except (ValueError, TypeError, OverflowError):
        return None
    return [score if math.isfinite(score) else math.nan for score in scores] if len(scores) == count else None


def regex(prompt: object, completions: Sequence[str], record: dict[str, Any]) -> list[float]:
    """1 where the regular expression in the record's answer matches somewhere in the completion."""
    try:
        pattern = re.compile(str(_answer_of(record)), re.MULTILINE)
    except re.error as error:
        raise ValueError(f"{ANSWER!r} is no regular expression: {error}") from None
    return [float(pattern.search(text) is not None) for text in completions]


def json_schema(prompt: object, completions: Sequence[str], record: dict[str, Any]) -> list[float]:
    """1 where the completion is JSON, bare or fenced, that fits the schema in the record's answer."""
    try:
        from jsonschema import SchemaError, validators
    except ImportError:
        raise ValueError("json_schema needs the package jsonschema: pip install jsonschema") from None
    schema = _answer_of(record)
    try:
        schema = json.loads(schema) if isinstance(schema, str) else schema
        validator = validators.validator_for(schema)
        validator.check_schema(schema)
    except (ValueError, SchemaError) as error:
        raise ValueError(f"{ANSWER!r} is no JSON schema: {str(error).partition(chr(10))[0]}") from None
    scores = []
    for text in completions:
        fenced = FENCED.fullmatch(text)
        try:
            scores.append(float(validator(schema).is_valid(json.loads(fenced[1] if fenced else text))))
        except (ValueError, RecursionError):
            scores.append(0.0)
    return scores


def _answer_of(record: dict[str, Any]) -> Any:
    if record.get(ANSWER) is None:
        raise ValueError(f"no {ANSWER!r} to check completions by (columns: {', '.join(record)})")
    return record[ANSWER]
