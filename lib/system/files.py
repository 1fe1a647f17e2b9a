"""Files that survive a crash and a power cut: whole or absent, and on the disk rather than in its cache."""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Iterator
from pathlib import Path
from typing import IO

from lib.errors import UserError


def flush(descriptor: int) -> None:
    """Returns when what was written to an open file is on its disk. macOS's fsync leaves the data in the drive's cache;
    fcntl's F_FULLFSYNC empties that (Apple's manual page fsync(2)). Some file systems there (network shares, exFAT) do
    not know it."""
    full = getattr(fcntl, "F_FULLFSYNC", None)  # macOS's alone
    if full is not None:
        with contextlib.suppress(OSError):
            fcntl.fcntl(descriptor, full)
            return
    os.fsync(descriptor)


def flush_path(path: Path) -> None:
    """The same of a file, or of a folder, whose new names then outlast a power cut."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        flush(descriptor)
    finally:
        os.close(descriptor)


def write_atomically(path: Path, content: bytes | str, durable: bool = True) -> None:
    """Writes a file at once, as `replacing` does."""
    with replacing(path, durable) as file:
        file.write(content.encode("utf-8") if isinstance(content, str) else content)


def write_changed(path: Path, text: str) -> None:
    """The same, unless the file has this text already: then there is nothing to wait for."""
    with contextlib.suppress(OSError):
        if path.read_bytes() == text.encode():
            return
    write_atomically(path, text)


@contextlib.contextmanager
def replacing(path: Path, durable: bool = True) -> Iterator[IO[bytes]]:
    """A file to write; when the block ends it takes the place of `path`, and not at all where the block raises. The
    folder is made where it is missing. durable: the content is on the disk then. Raises OSError: the disk is full or
    cannot be written; the old content is still there."""
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_name(f"{path.name}.{os.getpid()}.unfinished")
    try:
        with unfinished.open("wb") as file:
            yield file
            file.flush()
            if durable:
                flush(file.fileno())
        unfinished.replace(path)
    except BaseException as error:
        with contextlib.suppress(OSError):
            unfinished.unlink()
        if isinstance(error, OSError) and error.filename is None:  # a write that fails knows no name
            error.filename = str(path)
        raise
    if durable:
        flush_path(path.parent)


def require_absent(path: Path) -> None:
    """Raises UserError where an output would take the place of a file."""
    if path.exists():
        raise UserError(f"{path} is there already; remove it, or give another name")


def is_litter(name: str) -> bool:
    """Whether a file or folder of that name is no content: Finder's notes, macOS's forks, caches of downloads."""
    return name in (".DS_Store", ".cache", ".localized", "__MACOSX", "Icon\r") or name.startswith("._")
