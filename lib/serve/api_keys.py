"""API keys: shown once when made, kept as hashes, looked up by them.

A file has one key a line, `NAME sha256:HEX`. A key is 256 random bits, which nobody can guess whatever the hash costs,
so a plain SHA-256 is as safe here as a slow password hash, and a request does not have to wait for it. How long a
look-up takes tells of hashes alone, from which nobody gets to a key, and it does not grow with the number of keys: who
has none would make everybody wait for it.
"""

from __future__ import annotations

import functools
import hashlib
import os
import re
import secrets
import stat
from dataclasses import dataclass
from pathlib import Path

from lib.config import read_file
from lib.errors import UserError

LARGEST_FILE = 2**24  # bytes: a hundred thousand keys
LINE = re.compile(r"(?P<name>[A-Za-z0-9][A-Za-z0-9._@-]{0,63})\s+sha256:(?P<digest>[0-9a-f]{64})")


@dataclass(frozen=True)
class Keys:
    """The keys of a file: (name, SHA-256 of the key), in its order."""

    digests: tuple[tuple[str, bytes], ...]

    def owner(self, key: str) -> str | None:
        """The name that a key belongs to, or None."""
        return self._owners.get(_digest(key))

    @functools.cached_property
    def _owners(self) -> dict[bytes, str]:
        return {digest: name for name, digest in self.digests}


def read(path: Path) -> Keys:
    """Reads a file of hashed keys.

    Raises:
        UserError: it cannot be read, others may change it, or it has a line of another form; a line's content is never
            shown.
    """
    try:
        lines = read_file.read_text(path, "serve.keys", LARGEST_FILE).splitlines()
        facts = path.stat()
    except OSError as error:
        raise UserError(
            f"serve.keys {path} cannot be read: {error.strerror}; "
            f"python -m lib.server --make-key NAME --keys {path} makes it"
        ) from None
    if facts.st_mode & 0o022 or facts.st_uid not in (0, os.geteuid()):
        owner = f"mode {stat.S_IMODE(facts.st_mode):04o}, of user {facts.st_uid}"
        raise UserError(f"serve.keys {path}: others may write a key of theirs into it ({owner}); chmod go-w, chown it")
    digests: dict[str, bytes] = {}
    for number, line in enumerate(lines, 1):
        if not line.strip() or line.startswith("#"):
            continue
        match = LINE.fullmatch(line.strip())
        if match is None:
            raise UserError(f"{path}:{number}: not of the form `NAME sha256:HEX`; keys themselves do not belong here")
        if match["name"] in digests:
            raise UserError(f"{path}:{number}: {match['name']} is there twice; remove one")
        digests[match["name"]] = bytes.fromhex(match["digest"])
    return Keys(tuple(digests.items()))


def make(name: str, path: Path) -> str:
    """Adds a new key to a file, which only its owner may read, and returns the key: it is written down nowhere.

    Raises:
        UserError: the name is malformed or taken, or the file cannot be written.
    """
    key = f"sk-{secrets.token_urlsafe(32)}"
    line = f"{name} sha256:{_digest(key).hex()}"
    if LINE.fullmatch(line) is None:
        raise UserError(f"--make-key {name}: a name has up to 64 letters, digits, dots, dashes, underlines and @")
    if path.exists() and path.stat().st_size and name in dict(read(path).digests):
        raise UserError(f"--make-key {name}: {path} has a key of that name; remove its line first to replace it")
    try:
        old = path.read_bytes() if path.exists() else b""
        begin = "\n" if old and not old.endswith(b"\n") else ""  # a last line that an editor left without its end
        with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600), "w", encoding="utf-8") as file:
            file.write(f"{begin}{line}\n")
    except OSError as error:
        raise UserError(f"--keys {path} cannot be written: {error.strerror}") from None
    return key


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogatepass")).digest()
