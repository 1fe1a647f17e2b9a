"""Text, JSON and YAML files of a user, or one clear line."""

from __future__ import annotations

import json
import re
import stat
from pathlib import Path
from typing import Any

import yaml

from lib.errors import UserError

MANIFEST = "manifest.json"  # of a checkpoint, which has a config.yaml as a run has
UTF_16 = (b"\xff\xfe", b"\xfe\xff")  # how such a file begins


def require_regular(path: Path, what: str) -> None:
    """Raises UserError for a pipe, a device or a socket: reading one may never end. An absent file passes."""
    if path.exists() and not stat.S_ISREG(path.stat().st_mode) and not path.is_dir():
        raise UserError(f"{what} {path} is a pipe or a device, not a file; copy it into one")


def read_text(path: Path, what: str) -> str:
    """The UTF-8 text of a file; raises UserError where it is none, or no regular file, and OSError."""
    require_regular(path, what)
    data = path.read_bytes()
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError:
        hint = ", but UTF-16: iconv -f UTF-16 -t UTF-8 FILE > NEW" if data.startswith(UTF_16) else ""
        raise UserError(f"{what} {path} is not UTF-8 text{hint}") from None


def read_object(path: Path, what: str) -> dict[str, Any]:
    """The JSON object of a file; raises as `read_text`, and UserError where it is none."""
    text = read_text(path, what)
    try:
        stored = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise UserError(f"{what} {path} is not JSON ({error}); copy it again") from None
    if not isinstance(stored, dict):
        raise UserError(f"{what} {path} holds no JSON object; copy it again")
    return stored


def front_matter(card: str) -> Any:
    """The YAML that a README.md begins with, between two lines `---`; None where it has none, or it is not YAML."""
    front = re.match(r"---\r?\n(.*?)\n---", card, re.DOTALL)
    try:
        return yaml.safe_load(front[1]) if front else None
    except (yaml.YAMLError, ValueError, LookupError):
        return None
