"""Copies of ranks' logs on the launching machine."""

from __future__ import annotations

import contextlib
import re
from pathlib import Path

from lib.system import files


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
            folder.mkdir(parents=True, exist_ok=True)
        if offset == 0:  # renamed into place, so that whoever reads the copy sees that it is another file
            files.write_atomically(copy, lines, durable=False)
            return
        with copy.open("r+b", buffering=0) as file:
            file.seek(offset)
            while lines:  # a disk that is nearly full takes part of it, without a word
                lines = lines[file.write(lines) :]


def _holds(path: Path, lines: bytes) -> bool:
    with contextlib.suppress(FileNotFoundError), path.open("rb") as file:
        return file.read(len(lines)) == lines
    return False
