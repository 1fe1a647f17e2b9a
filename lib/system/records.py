"""JSON that every reader accepts, and files with one JSON value a line.

Python writes NaN and Infinity, which JSON does not have: they become null.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any


def dumps(value: Any, indent: int | None = None) -> str:
    """A value as JSON text; figures that are not finite become null."""
    return json.dumps(_finite(value), indent=indent, allow_nan=False)


def read_lines(path: Path) -> list[Any]:
    """The values of a file with one a line. Text may hold what str.splitlines() takes for a line's end."""
    with path.open("rb") as file:
        return [json.loads(line) for line in file]


def _finite(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return value
