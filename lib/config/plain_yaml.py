"""YAML of people, as one reads it: files may come from anybody."""

from __future__ import annotations

import re
from typing import Any

import yaml

DEEPEST = 20  # nested levels


class PlainLoader(yaml.SafeLoader):
    """YAML without what only an attack needs: aliases of lists and mappings, deep nesting, values that are none."""

    depth = 0

    def compose_node(self, parent: Any, index: Any) -> Any:
        is_alias, mark = self.check_event(yaml.AliasEvent), self.peek_event().start_mark
        self.depth += 1
        if self.depth > DEEPEST:
            raise yaml.MarkedYAMLError(problem=f"nested more than {DEEPEST} levels deep", problem_mark=mark)
        node = super().compose_node(parent, index)
        self.depth -= 1
        if is_alias and not isinstance(node, yaml.ScalarNode):
            raise yaml.MarkedYAMLError(problem="an alias of a list or a mapping; write it out", problem_mark=mark)
        return node

    def construct_object(self, node: Any, deep: bool = False) -> Any:
        try:
            return super().construct_object(node, deep)
        except (ValueError, OverflowError) as error:  # 2026-13-45, !!int x, an integer of 5,000 digits
            fault = str(error).partition(";")[0]
            raise yaml.MarkedYAMLError(problem=fault, problem_mark=node.start_mark) from None
        except (AttributeError, LookupError):  # PyYAML's own mistakes: !!bool maybe, !!int "", !!timestamp x
            if not isinstance(node, yaml.ScalarNode):
                raise
            fault = f"{node.value[:60]!r} is no {node.tag.rpartition(':')[2]}"
            raise yaml.MarkedYAMLError(problem=fault, problem_mark=node.start_mark) from None


CARD_BYTES = 2**20  # of a README.md that are read: what is said in its front matter is at its beginning


def front_matter(card: str) -> Any:
    """The YAML that a README.md begins with, between two lines `---`; None where it has none, or that is no YAML."""
    front = re.match(r"---\r?\n(.*?)\n---", card, re.DOTALL)
    try:
        return yaml.load(front[1], Loader=PlainLoader) if front else None
    except yaml.YAMLError:
        return None
