"""Checks whose time has no bound: a regular expression, a JSON schema. A process of their own runs them.

Each is a function as lib/evaluate/function_judge.py calls them: (prompt, completions, record) ➜ a score for each
completion.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from typing import Any

ANSWER = "answer"  # what a record holds to check completions by
FENCED = re.compile(r"\s*```(?:json)?\s*\n(.*)\n\s*```\s*", re.DOTALL)  # how models write JSON


def regex(prompt: object, completions: Sequence[str], record: dict[str, Any]) -> list[float]:
    """1 where the regular expression that is the record's answer matches somewhere in the completion.

    Raises:
        ValueError: it is none.
    """
    try:
        pattern = re.compile(str(_answer(record)), re.MULTILINE)
    except re.error as error:
        raise ValueError(f"{ANSWER!r} is no regular expression: {error}") from None
    return [float(pattern.search(text) is not None) for text in completions]


def json_schema(prompt: object, completions: Sequence[str], record: dict[str, Any]) -> list[float]:
    """1 where the completion is JSON, bare or fenced, that fits the schema that is the record's answer.

    Raises:
        ValueError: there is no such package, or the answer is no schema.
    """
    try:
        from jsonschema import SchemaError, validators
    except ImportError:
        raise ValueError("json_schema needs the package jsonschema: pip install jsonschema") from None
    schema = _answer(record)
    try:
        schema = json.loads(schema) if isinstance(schema, str) else schema
        kind = validators.validator_for(schema)
        kind.check_schema(schema)
    except (ValueError, SchemaError) as error:
        raise ValueError(f"{ANSWER!r} is no JSON schema: {str(error).partition(chr(10))[0]}") from None
    return [float(_fits(text, kind(schema).is_valid)) for text in completions]


def _fits(text: str, is_valid: Callable[[object], bool]) -> bool:
    fenced = FENCED.fullmatch(text)
    try:
        return bool(is_valid(json.loads(fenced[1] if fenced else text)))
    except (ValueError, RecursionError):
        return False


def _answer(record: dict[str, Any]) -> Any:
    if record.get(ANSWER) is None:
        raise ValueError(f"no {ANSWER!r} to check completions by (columns: {', '.join(record)})")
    return record[ANSWER]
