"""The part of Go's text/template that our Modelfiles use, rendered: to compare with the chat template it stands for.

Text, {{ value }}, if / else if / else, range with an index; values are .Name, $.Name, $name, strings, numbers and calls
of eq, and, not, len and slice (https://pkg.go.dev/text/template).
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

ACTION = re.compile(r"\{\{(.*?)\}\}", re.DOTALL)
WORD = re.compile(r'"(?:[^"\\]|\\.)*"|[()]|[^\s()]+')
FUNCTIONS: dict[str, Callable[..., Any]] = {
    "eq": lambda one, other: one == other,
    "and": lambda *values: next((value for value in values if not value), values[-1]),
    "not": lambda value: not value,
    "len": len,
    "slice": lambda values, start: values[start:],
}


@dataclass(frozen=True)
class Range:
    """{{ range $i, $m := .Messages }} ... {{ end }}"""

    names: list[str]
    over: str
    body: list[Node]


@dataclass(frozen=True)
class If:
    """{{ if }} ... {{ else if }} ... {{ else }} ... {{ end }}: each condition with its part; "true" stands for else."""

    parts: list[tuple[str, list[Node]]] = field(default_factory=list)


@dataclass(frozen=True)
class Value:
    """{{ value }}"""

    expression: str


Node = str | Value | If | Range


def literal(text: str) -> str:
    """A text as a template that renders to it: braces that would open an action stand in strings."""
    return re.sub(r"\{\{+|\{$", lambda match: '{{ "' + match.group() + '" }}', text)


def render(template: str, values: Mapping[str, Any]) -> str:
    """A template with values: `System`, `Messages` with `Role` and `Content` each.

    Raises:
        ValueError: the template has what is not known here.
    """
    parts = ACTION.split(template)  # text, action, text ...
    if "{{" in "".join(parts[::2]):
        raise ValueError("an action has no end")
    nodes, word = _nodes(iter(enumerate(parts)))
    if word:
        raise ValueError(f"{{{{ {word} }}}} has no beginning")
    return _rendered(nodes, {"$": values}, values)


def _nodes(parts: Iterator[tuple[int, str]]) -> tuple[list[Node], str]:
    """Nodes up to an action that ends them, and that action; empty at the template's end."""
    nodes: list[Node] = []
    for index, part in parts:
        word = part.strip()
        if index % 2 == 0:
            nodes.append(part)
        elif word.startswith("range "):
            names, _, over = word.removeprefix("range ").partition(":=")
            body, end = _nodes(parts)
            if end != "end":
                raise ValueError("range has no end")
            nodes.append(Range([name.strip() for name in names.split(",")], over, body))
        elif word.startswith("if "):
            nodes.append(_if(word.removeprefix("if "), parts))
        elif word == "end" or word == "else" or word.startswith("else "):
            return nodes, word
        else:
            nodes.append(Value(word))
    return nodes, ""


def _if(condition: str, parts: Iterator[tuple[int, str]]) -> If:
    found = If()
    while True:
        body, end = _nodes(parts)
        found.parts.append((condition, body))
        if end == "end":
            return found
        if not end.startswith("else"):
            raise ValueError("if has no end")
        condition = end.removeprefix("else").strip().removeprefix("if ") or "true"


def _rendered(nodes: list[Node], names: Mapping[str, Any], dot: Any) -> str:
    text = ""
    for node in nodes:
        match node:
            case str():
                text += node
            case Value(expression):
                text += str(_value(expression, names, dot))
            case If(parts):
                text += next((_rendered(body, names, dot) for test, body in parts if _value(test, names, dot)), "")
            case Range(own, over, body):
                for index, item in enumerate(_value(over, names, dot)):
                    text += _rendered(body, {**names, **dict(zip(own, (index, item), strict=True))}, item)
    return text


def _value(expression: str, names: Mapping[str, Any], dot: Any) -> Any:
    words = WORD.findall(expression)
    value = _call(words, names, dot)
    if words:
        raise ValueError(f"{expression.strip()} is not a value known here")
    return value


def _call(words: list[str], names: Mapping[str, Any], dot: Any) -> Any:
    """Takes a value, or a function with all that follows it, off the words."""
    if words and words[0] in FUNCTIONS:
        function = FUNCTIONS[words.pop(0)]
        arguments = []
        while words and words[0] != ")":
            arguments.append(_operand(words, names, dot))
        return function(*arguments)
    return _operand(words, names, dot)


def _operand(words: list[str], names: Mapping[str, Any], dot: Any) -> Any:
    if not words:
        raise ValueError("a value is missing")
    word = words.pop(0)
    if word == "(":
        value = _call(words, names, dot)
        if not words or words.pop(0) != ")":
            raise ValueError("a bracket is not closed")
        return value
    if word == "true" or word.isdigit() or word.startswith('"'):
        return json.loads(word)
    name, _, attribute = word.partition(".")
    if name and name not in names:
        raise ValueError(f"{word} is not a value known here")
    holder = names[name] if name else dot
    return holder[attribute] if attribute else holder
