"""Files that survive a crash and a power cut: whole or absent, and on the disk rather than in its cache."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import glob
import os
from collections.abc import Iterator
from pathlib import Path
from typing import IO

from lib.errors import UserError


def flush(descriptor: int) -> None:
    """Returns when what was written to an open file is on its disk.

    macOS's fsync hands the data to the drive, which may keep it in a cache that a power cut empties, and write in
    another order. fcntl's F_FULLFSYNC asks the drive to empty that cache (Apple's manual page fsync(2)). Some file
    systems there (network shares, exFAT) do not know it.

    Raises:
        OSError: the disk is full or broken.
    """
    full = getattr(fcntl, "F_FULLFSYNC", None)  # macOS's alone
    if full is not None:
        try:
            fcntl.fcntl(descriptor, full)
            return
        except OSError as error:
            if error.errno not in (errno.ENOTSUP, errno.EINVAL, errno.ENOTTY, errno.ENODEV):
                raise
    os.fsync(descriptor)


def flush_path(path: Path) -> None:
    """The same of a file, or of a folder, whose new names then outlast a power cut."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        flush(descriptor)
    finally:
        os.close(descriptor)


def write_atomically(path: Path, content: bytes | str, durable: bool = True) -> None:
    """Writes a file at once, as `replacing` does.

    Raises:
        OSError: the disk is full or cannot be written; the old content is still there.
    """
    with replacing(path, durable) as file:
        file.write(content.encode("utf-8") if isinstance(content, str) else content)


def write_changed(path: Path, text: str) -> None:
    """The same, unless the file has this text already: then there is nothing to wait for.

    Raises:
        OSError: as `write_atomically`.
    """
    encoded = text.encode()
    with contextlib.suppress(OSError):
        is_file = path.is_file() and not path.is_symlink()
        if is_file and path.stat().st_size == len(encoded) and path.read_bytes() == encoded:
            return
    write_atomically(path, encoded)


@contextlib.contextmanager
def replacing(path: Path, durable: bool = True) -> Iterator[IO[bytes]]:
    """A file to write; when the block ends it takes the place of `path`, and not at all where the block raises.

    So a reader, or who comes after a crash, finds the old content or the new, never a part. The folder is made where it
    is missing. durable: the content is on the disk then.

    Raises:
        OSError: the disk is full or cannot be written; the old content is still there.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_name(f"{path.name}.{os.getpid()}.unfinished")
    unfinished.unlink(missing_ok=True)  # of a process that was killed
    try:
        with unfinished.open("xb") as file:
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
    """Makes sure that an output takes the place of no file.

    Raises:
        UserError: there is one.
    """
    if path.exists():
        raise UserError(f"{path} is there already; remove it, or give another name")


def sweep_unfinished(path: Path) -> None:
    """Removes what processes that were killed while they replaced `path` left beside it; for its only writer."""
    for left in path.parent.glob(f"{glob.escape(path.name)}.*.unfinished"):
        left.unlink(missing_ok=True)


def is_litter(name: str) -> bool:
    """Whether a file or folder of that name is no content: Finder's notes, macOS's forks, caches of downloads."""
    return name in (".DS_Store", ".cache", ".localized", "__MACOSX", "Icon\r") or name.startswith("._")
