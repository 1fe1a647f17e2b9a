"""What of an export goes to the hub: its files, none of which may be a secret or somebody's data."""

from __future__ import annotations

import fnmatch
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from lib.errors import UserError
from lib.system.files import is_litter

SECRET_NAMES = (
    *(
        ".env",
        ".env.*",
        "*.env",
        ".netrc",
        ".npmrc",
        ".pypirc",
        ".git-credentials",
        "credentials*",
        "secrets*",
        "token",
    ),
    *("*.pem", "*.key", "*.p12", "*.pfx", "*.kdbx", "*.keystore", "id_rsa*", "id_dsa*", "id_ecdsa*", "id_ed25519*"),
)
# By what they look like, whoever gave them: Hugging Face, OpenAI and Anthropic, GitHub, GitLab, Amazon, Google, Slack.
SECRET_TEXTS = {
    "a Hugging Face token": rb"\bhf_[A-Za-z0-9]{30,}",
    "an API key": rb"\bsk-[A-Za-z0-9_-]{20,}",
    "a GitHub token": rb"\b(?:gh[pousr]_[A-Za-z0-9]{36}|github_pat_[A-Za-z0-9_]{40,})",
    "a GitLab token": rb"\bglpat-[A-Za-z0-9_-]{20,}",
    "an Amazon key": rb"\b(?:AKIA|ASIA)[0-9A-Z]{16}\b",
    "a Google key": rb"\bAIza[0-9A-Za-z_-]{35}",
    "a Slack token": rb"\bxox[abprs]-[0-9A-Za-z-]{10,}",
    "a private key": rb"-----BEGIN [A-Z ]*PRIVATE KEY-----",
}
DATA_NAMES = ("*.jsonl", "*.ndjson", "*.parquet", "*.csv", "*.tsv", "*.arrow", "*.xlsx", "*.db", "*.sqlite", "*.log")
COMPRESSED = (".gz", ".zst", ".bz2", ".xz", ".zip")
WEIGHTS = (".safetensors", ".gguf")


@dataclass(frozen=True)
class SentFile:
    """A file that goes to the hub.

    Args:
        name: there, with / between folders.
    """

    path: Path
    name: str
    bytes: int


def files_to_send(folder: Path) -> list[SentFile]:
    """The files of an export, by name.

    Raises:
        UserError: one of them is a secret, has one in it, or is data; names it. Or there is none.
    """
    found = []
    for path in sorted(folder.rglob("*")):
        name = path.relative_to(folder).as_posix()
        if any(is_litter(part) for part in Path(name).parts):
            continue
        if path.is_symlink():
            raise UserError(f"--push: {path} is a link, and what it points to is none of the export; remove it")
        if path.is_file():
            _require_harmless(path, name)
            found.append(SentFile(path, name, path.stat().st_size))
    if not found:
        raise UserError(f"--push: {folder} has no files")
    return found


def _require_harmless(path: Path, name: str) -> None:
    plain = path.name.lower()
    for end in COMPRESSED:
        plain = plain.removesuffix(end)
    if _named(path.name.lower(), SECRET_NAMES):
        raise UserError(f"--push: {path} is a secret by its name; nothing was sent. Remove it")
    if _named(plain, DATA_NAMES):
        raise UserError(f"--push: {path} is data by its name; nothing was sent. An export has none: remove it")
    if name.endswith(WEIGHTS):
        return
    content = path.read_bytes()
    for what, pattern in SECRET_TEXTS.items():
        if match := re.search(pattern, content):
            line = content.count(b"\n", 0, match.start()) + 1
            raise UserError(
                f"--push: {path}:{line} holds {what}; nothing was sent. Remove it, and revoke it if it was real"
            )
    if plain.endswith(".json") and isinstance(_json(content), list):
        raise UserError(f"--push: {path} is a list of records; nothing was sent. An export has none: remove it")


def _named(name: str, patterns: Sequence[str]) -> bool:
    return any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)


def _json(content: bytes) -> object:
    try:
        return json.loads(content)
    except (ValueError, RecursionError):
        return None
