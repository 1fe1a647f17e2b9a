"""What is finished of an output so far, on the disk: a line for each chunk of its rows, in the order of their ends."""

from __future__ import annotations

import json
import os
from pathlib import Path

import numpy as np

from lib.errors import UserError
from lib.system import files

LONGEST_LINE = 2**28  # bytes of a chunk's line: a journal may be somebody else's
Lines = list[str]  # of the output, without their line feeds


class Journal:
    """Finished chunks in the order in which they came, one JSON line each, behind a line that says what they are of."""

    def __init__(self, path: Path, key: str, chunks: int):
        """Goes on with what is there, if it is of the same key; a line that was cut off goes.

        Raises:
            UserError: it is of another key, or no journal: a file of the user's; or a link (`files.open_own`).
            OSError: the disk is full or not writable.
        """
        self.path = path
        self.offsets = np.full(chunks, -1, np.int64)  # of each chunk's line, in bytes
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = files.open_own(path)
        end = self._read(json.dumps({"key": key, "chunks": chunks}).encode() + b"\n")
        self._file.truncate(end)
        self._file.seek(end)

    def _read(self, header: bytes) -> int:
        with self.path.open("rb") as file:
            first = file.readline(len(header))
            if first != header and header.startswith(first):  # nothing yet, or it was cut off
                self._file.truncate(0)
                self._file.write(header)
                return len(header)
            if first != header:
                raise UserError(
                    f"{self.path} is of another model, data or settings, or something else; "
                    "remove it, or give another name for the output"
                )
            end = file.tell()
            while (chunk := _chunk_of(file.readline(LONGEST_LINE), len(self.offsets))) is not None:
                self.offsets[chunk] = end
                end = file.tell()
            return end

    @property
    def done(self) -> np.ndarray:
        """bool [chunks]."""
        return self.offsets >= 0

    def put(self, chunk: int, lines: Lines) -> None:
        """Keeps a chunk's lines.

        Raises:
            OSError: the disk is full.
        """
        place = self._file.seek(0, os.SEEK_END)
        rest = json.dumps({"chunk": chunk, "lines": lines}).encode() + b"\n"
        try:
            while rest:  # a disk that is nearly full takes part of it, without a word
                rest = rest[self._file.write(rest) :]
        except OSError:
            self._file.truncate(place)  # else another chunk's line would go on where this one broke off
            raise
        self.offsets[chunk] = place

    def finish(self, out: Path) -> None:
        """Writes all lines in the order of the input, whole or not at all; the journal goes."""
        with self.path.open("rb") as file, files.replacing(out) as whole:
            for place in self.offsets.tolist():
                file.seek(place)
                whole.writelines(line.encode() + b"\n" for line in json.loads(file.readline())["lines"])
        self.close()
        self.path.unlink()

    def close(self) -> None:
        """Lets the file go; it stays on the disk."""
        self._file.close()


def opened_journal(out: Path, key: str, chunks: int) -> Journal:
    """What is finished of an output so far; what a killed process left of it otherwise goes.

    Raises:
        UserError: the output is there, or the journal is of another model, data or settings.
        OSError: it cannot be written.
    """
    partial = out.with_name(f"{out.name}.partial")
    files.sweep_unfinished(out)
    if not out.exists():
        return Journal(partial, key, chunks)
    if partial.exists():  # of a process that was killed between the two: the output is whole, and is written once more
        journal = Journal(partial, key, chunks)
        if journal.done.all():
            return journal
        journal.close()
    raise UserError(f"{out} is there already; remove it, or give another name")


def _chunk_of(line: bytes, chunks: int) -> int | None:
    """Which of so many chunks a journal's line is of; None where it was cut off, or is another's."""
    try:
        read = json.loads(line) if line.endswith(b"\n") else None
    except (ValueError, RecursionError):
        return None
    chunk, lines = (read.get("chunk"), read.get("lines")) if isinstance(read, dict) else (None, None)
    is_whole = isinstance(lines, list) and all(isinstance(text, str) and _is_unicode(text) for text in lines)
    return chunk if is_whole and type(chunk) is int and 0 <= chunk < chunks else None


def _is_unicode(text: str) -> bool:
    """Whether it can be written: JSON can spell half a surrogate pair."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True
