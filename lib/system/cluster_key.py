"""A key that people put on each of their machines: a file of one line, which no other user may read."""

from __future__ import annotations

import os
import secrets
from pathlib import Path

from lib.errors import UserError

VARIABLE = "TANDEM_KEY_FILE"
USUAL = Path("~/.config/tandem/key")
LEAST_CHARACTERS = 32  # of a key: what can be guessed offline is none


def usual() -> Path:
    """Where this user's key is, unless a command or TANDEM_KEY_FILE names another place."""
    return Path(os.environ.get(VARIABLE) or USUAL)


def read(path: Path) -> bytes:
    """The key in a file. Raises UserError: it is not there, or no key, or others may read it."""
    remedy = f"copy it from the machine that has it (scp), or make one: openssl rand -hex 32 > {path}; chmod 600 {path}"
    file = path.expanduser()
    try:
        mode, text = file.stat().st_mode & 0o777, file.read_bytes().strip()
    except OSError as error:
        raise UserError(f"key file {path}: {error.strerror}; {remedy}") from None
    if mode & 0o077:
        raise UserError(f"key file {path}: others may read or change it (mode {mode:04o}); chmod 600 {path}")
    if len(text) < LEAST_CHARACTERS or b"\n" in text:
        wanted = f"it holds {len(text)} characters, not one line of {LEAST_CHARACTERS} or more"
        raise UserError(f"key file {path}: {wanted}; {remedy}")
    return text


def make(path: Path) -> bool:
    """Makes a key where there is none; whether it did. Of two processes at the same time one makes it. Raises
    UserError: it cannot be written."""
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
