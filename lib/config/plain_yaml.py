"""YAML of people, whose mistakes have a line."""

from __future__ import annotations

import re
from typing import Any

import yaml


class PlainLoader(yaml.SafeLoader):
    """PyYAML's safe loader, whose own errors of values (2026-13-45, !!int x) name their line."""

    def construct_object(self, node: Any, deep: bool = False) -> Any:
        try:
            return super().construct_object(node, deep)
        except (ValueError, OverflowError, AttributeError, LookupError) as error:
            raise yaml.MarkedYAMLError(problem=str(error), problem_mark=node.start_mark) from None


def front_matter(card: str) -> Any:
    """The YAML that a README.md begins with, between two lines `---`; None where it has none, or it is not YAML."""
    front = re.match(r"---\r?\n(.*?)\n---", card, re.DOTALL)
    try:
        return yaml.load(front[1], Loader=PlainLoader) if front else None
    except yaml.YAMLError:
        return None
