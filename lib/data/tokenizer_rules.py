"""What a tokenizer.json that anybody may have made could do with a short text: make a long one of it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pydantic_core

from lib.errors import UserError

LARGEST_TOKENIZER = 2**28  # bytes; models' tokenizers have 30 million

MOST_RULES = 64  # models have a handful
MOST_GROWTH = 100  # letters that are made of one
LONGEST_PADDING = 2**20  # tokens


class Rule(NamedTuple):
    """A replacement: of a text; where there is none, by a pattern that may match anything."""

    replaced: str | None
    content: str


def require_bounded(folder: Path) -> None:
    """Makes sure that a tokenizer takes memory as its texts do.

    A file that is not there, or no tokenizer's, is for its loader to report.

    Raises:
        UserError: its tokenizer.json is too large, pads texts to a great length, or replaces letters by long ones.
    """
    path = folder / "tokenizer.json"
    try:
        size = path.stat().st_size
        stored = pydantic_core.from_json(path.read_bytes()) if size <= LARGEST_TOKENIZER else None
    except (OSError, ValueError):
        return
    fault = f"has {size:,} bytes" if size > LARGEST_TOKENIZER else _fault(stored if isinstance(stored, dict) else {})
    if fault is not None:
        raise UserError(f"model.path {folder}: its tokenizer.json {fault}, as no model's does; copy the model again")


def _fault(stored: dict[str, Any]) -> str | None:
    """What no tokenizer does, in words."""
    padding = stored.get("padding")
    strategy = padding.get("strategy") if isinstance(padding, dict) else None
    length = strategy.get("Fixed") if isinstance(strategy, dict) else None
    if isinstance(length, int) and length > LONGEST_PADDING:
        return f"pads every text to {length:,} tokens"
    for section in ("normalizer", "decoder"):
        rules = list(_rules(stored.get(section)))
        if len(rules) > MOST_RULES:
            return f"has {len(rules):,} rules of replacement in its {section}"
        letters = {letter for rule in rules for letter in (*rule.content[:MOST_GROWTH], rule.replaced or "a")}
        if any(grows(rules, text) for text in letters):
            return f"replaces a letter by more than {MOST_GROWTH} in its {section}"
    return None


def _rules(part: Any) -> Iterator[Rule]:
    """The replacements of a normalizer or a decoder, in their order."""
    if not isinstance(part, dict):
        return
    for name in ("normalizers", "decoders"):
        for step in part[name] if isinstance(part.get(name), list) else ():
            yield from _rules(step)
    if isinstance(content := part.get("content"), str):
        pattern = part.get("pattern")
        replaced = pattern.get("String") if isinstance(pattern, dict) else None
        yield Rule(replaced if isinstance(replaced, str) else None, content)


def grows(rules: Sequence[Rule], text: str) -> bool:
    """Whether a text becomes more than MOST_GROWTH times as long."""
    most = MOST_GROWTH * max(1, len(text))
    for replaced, content in rules:
        count = len(text) if replaced is None else text.count(replaced)
        if len(text) + count * (len(content) - len(replaced or " ")) > most:
            return True
        if replaced is not None:
            text = text.replace(replaced, content)
        elif len(content) > 1:
            text = content * len(text)
    return False
