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
    """Returns when what was written to an open file is on its disk. macOS's fsync leaves the data in the drive's cache,
    which F_FULLFSYNC empties, where the file system (no network share, no exFAT) knows it."""
    with contextlib.suppress(OSError, AttributeError):
        fcntl.fcntl(descriptor, fcntl.F_FULLFSYNC)  # type: ignore[attr-defined, unused-ignore]
        return
    os.fsync(descriptor)


def flush_path(path: Path) -> None:
    """The same of a file, or of a folder, whose new names then outlast a power cut."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        flush(descriptor)
    finally:
        os.close(descriptor)


def write_atomically(path: Path, content: bytes | str) -> None:
    """Writes a file at once, as `replacing` does."""
    with replacing(path) as file:
        file.write(content.encode("utf-8") if isinstance(content, str) else content)


@contextlib.contextmanager
def replacing(path: Path, durable: bool = True) -> Iterator[IO[bytes]]:
    """A file to write; when the block ends it takes the place of `path`, and not at all where the block raises. The
    folder is made where it is missing. durable: the content is on the disk then."""
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
