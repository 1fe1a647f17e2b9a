"""API keys: shown once when made, kept as hashes. A file has one key a line, `NAME sha256:HEX`.

A key is 256 random bits, so a plain SHA-256 protects it as well as a slow password hash.
"""

from __future__ import annotations

import hashlib
import os
import re
import secrets
from pathlib import Path

from lib.errors import UserError

LINE = re.compile(r"(?P<name>[A-Za-z0-9][A-Za-z0-9._@-]{0,63})\s+sha256:(?P<digest>[0-9a-f]{64})")


class KeyFile:
    """The keys of a file, read at each request: a changed line counts at once. Raises UserError: as `read`."""

    def __init__(self, path: Path) -> None:
        self.path, self._owners = path, read(path)

    def owner(self, key: str) -> str | None:
        """The name that a key belongs to, or None."""
        try:
            self._owners = read(self.path) if self.path.exists() else {}
        except UserError as error:  # valid keys stay so until the line is corrected
            print(f"warning: {error}", flush=True)
        return self._owners.get(_digest(key))


def read(path: Path) -> dict[str, str]:
    """Names by the SHA-256 of their keys, in hex. Raises UserError: the file cannot be read, or a line has another
    form; a line's content is never shown."""
    try:
        lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError as error:
        remedy = f"python -m lib.server --make-key NAME --keys {path} makes it"
        raise UserError(f"serve.keys {path} cannot be read: {error.strerror}; {remedy}") from None
    owners: dict[str, str] = {}
    for number, line in enumerate(lines, 1):
        if line.strip() and not line.startswith("#"):
            match = LINE.fullmatch(line.strip())
            if match is None or match["name"] in owners.values():
                wanted = "`NAME sha256:HEX`, each name once; keys themselves do not belong here"
                raise UserError(f"{path}:{number}: not of the form {wanted}")
            owners[match["digest"]] = match["name"]
    return owners


def make(name: str, path: Path) -> str:
    """Adds a new key to a file, which only its owner may read, and returns the key: it is written nowhere else. Raises
    UserError: the name is malformed or taken, or the file cannot be written."""
    key = f"sk-{secrets.token_urlsafe(32)}"
    line = f"{name} sha256:{_digest(key)}"
    if LINE.fullmatch(line) is None:
        raise UserError(f"--make-key {name}: a name has up to 64 letters, digits, dots, dashes, underlines and @")
    if path.exists() and name in read(path).values():
        raise UserError(f"--make-key {name}: {path} has a key of that name; remove its line first to replace it")
    try:
        with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600), "w", encoding="utf-8") as file:
            file.write(f"\n{line}\n" if path.stat().st_size else f"{line}\n")  # after a last line without an end, too
    except OSError as error:
        raise UserError(f"--keys {path} cannot be written: {error.strerror}") from None
    return key


def _digest(key: str) -> str:
    return hashlib.sha256(key.encode("utf-8", "surrogatepass")).hexdigest()
