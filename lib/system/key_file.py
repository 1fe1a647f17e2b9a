"""A key that people put on each of their machines: a file of one line, which no other user may read."""

from __future__ import annotations

import os
import secrets
import stat
from pathlib import Path

from lib.errors import UserError

VARIABLE = "TANDEM_KEY_FILE"
USUAL = Path("~/.config/tandem/key")
LEAST_CHARACTERS = 32  # of a key: what can be guessed offline is none


def usual() -> Path:
    """Where this user's key is, unless a command or TANDEM_KEY_FILE names another place."""
    return Path(os.environ.get(VARIABLE) or USUAL)


def read(path: Path) -> bytes:
    """The key in a file.

    Raises:
        UserError: it is not there, or no key, or others may read it.
    """
    try:
        with path.expanduser().open("rb") as file:
            found = os.fstat(file.fileno())
            text = file.read(4096).strip() if stat.S_ISREG(found.st_mode) else b""
    except OSError as error:
        raise UserError(f"key file {path}: {error.strerror}; {remedy(path)}") from None
    if found.st_mode & 0o077:
        mode = stat.S_IMODE(found.st_mode)
        raise UserError(f"key file {path}: others may read or change it (mode {mode:04o}); chmod 600 {path}")
    if len(text) < LEAST_CHARACTERS or b"\n" in text:
        raise UserError(
            f"key file {path}: it holds {len(text)} characters, not one line of {LEAST_CHARACTERS} or more; "
            f"{remedy(path)}"
        )
    return text


def make(path: Path) -> bool:
    """Makes a key where there is none; whether it did. Of two processes at the same time one makes it.

    Raises:
        UserError: it cannot be written.
    """
    path = path.expanduser()
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    except FileExistsError:
        return False
    except OSError as error:
        raise UserError(f"key file {path}: it cannot be made: {error.strerror}; give another by --key FILE") from None
    with os.fdopen(descriptor, "w", encoding="utf-8") as file:
        file.write(secrets.token_hex(32) + "\n")
    return True


def remedy(path: Path) -> str:
    """How every machine comes to the same key."""
    return f"copy it from the machine that has it (scp), or make one: openssl rand -hex 32 > {path}; chmod 600 {path}"
