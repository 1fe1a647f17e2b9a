"""Logs that grow, read by byte offset: only what is new, whatever their size; and copies of them on another machine.

No package is imported: a host's agent reads its ranks' logs by this.
"""

from __future__ import annotations

import contextlib
import os
import re
from pathlib import Path

from lib.system import files

PIECE_BYTES = 2**22
LONGEST_LINE = 2**24  # bytes: no record is as long, but a log may be somebody else's


class Tail:
    """The whole lines of a file, a piece at a time; from the start again, where it was replaced or truncated."""

    def __init__(self, path: Path):
        self.path, self.offset = Path(path), 0  # of the next line
        self._file: tuple[int, int] | None = None

    def read(self, limit_bytes: int = PIECE_BYTES) -> tuple[bool, bytes]:
        """Whether this is the beginning of the file, and its next whole lines: nothing where there are none yet.

        A piece is cut after its last line's end, so half a line waits for its other half; a line longer than the limit
        comes whole, and with one that is too long all is passed over that is there.
        """
        try:
            with self.path.open("rb") as file:
                status = os.fstat(file.fileno())
                if (status.st_dev, status.st_ino) != self._file or status.st_size < self.offset:
                    self._file, self.offset = (status.st_dev, status.st_ino), 0
                file.seek(self.offset)
                piece = file.read(limit_bytes)
                while piece and b"\n" not in piece and (more := file.read(limit_bytes)):
                    if len(piece) >= LONGEST_LINE:
                        self.offset, piece = status.st_size, b""
                        break
                    piece += more
        except OSError:  # not there yet, or no longer, or its disk is away
            return False, b""
        lines = piece[: piece.rfind(b"\n") + 1]
        begins = self.offset == 0 and bool(lines)
        self.offset += len(lines)
        return begins, lines


class Copy:
    """The logs of one host's ranks on the machine that launched them, below the run's own: `logs/HOST/rank-001.jsonl`.

    Where both see the same disk nothing is copied.
    """

    def __init__(self, logs: Path, host: str):
        self.logs, self.folder = logs, logs / re.sub(r"[^\w-]", "_", host)
        self._is_here: dict[int, bool] = {}

    def write(self, rank: int, offset: int, lines: bytes) -> None:
        """Writes what a rank's log has at `offset`; at 0 the copy starts again.

        Raises:
            OSError: the disk is full or not writable.
            UserError: what is there is a link or no file: the folder may be somebody else's.
        """
        name = f"rank-{int(rank):03d}.jsonl"
        if offset == 0:
            self._is_here[rank] = _holds(self.logs / name, lines)
        if self._is_here.get(rank, True):
            return
        copy = self.folder / name
        for folder in (self.logs, self.folder):
            files.make_own(folder)
        if offset == 0:  # renamed into place, so that whoever reads the copy sees that it is another file
            files.write_atomically(copy, lines, durable=False)
            return
        with files.open_own(copy, os.O_RDWR) as file:
            file.seek(offset)
            while lines:  # a disk that is nearly full takes part of it, without a word
                lines = lines[file.write(lines) :]


def _holds(path: Path, lines: bytes) -> bool:
    with contextlib.suppress(FileNotFoundError), files.open_own(path, os.O_RDONLY) as file:
        return file.read(len(lines)) == lines
    return False
