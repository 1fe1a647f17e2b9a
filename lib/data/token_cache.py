"""Tokenised records in memory-mapped files that all processes of a host share."""

from __future__ import annotations

import contextlib
import fcntl
import itertools
import mmap
import os
import struct
import threading
import zlib
from pathlib import Path
from typing import IO

import numpy as np

from lib.data.dataset import Pieces
from lib.data.index import locked
from lib.system import files

_CELL = struct.Struct("<IIq4I")  # segment + 1 (0: not there), crc32, offset in tokens, tokens of up to four pieces


class TokenCache:
    """Tokenised records in memory-mapped files that all processes of a host read, and add to.

    A table has a cell for each record; tokens are in segments, and to each of these one process at a time appends. A
    cell is written after its tokens, and has their checksum: a half-written one counts as missing.

    Raises:
        UserError: the folder or a file in it is not our own (`files.open_own`).
        OSError: the disk is full or not writable.
    """

    def __init__(self, folder: Path, count: int, pieces: int):
        self.folder, self.pieces = folder, pieces
        files.make_own(folder)
        self._table_file = files.open_own(folder / "table.bin")
        with locked(folder / ".lock"):
            if self._table_file.seek(0, os.SEEK_END) != count * _CELL.size:
                self._table_file.truncate(count * _CELL.size)  # sparse
        self._table = mmap.mmap(self._table_file.fileno(), 0, prot=mmap.PROT_READ)
        self._segments: dict[int, mmap.mmap] = {}
        self._read_bytes: dict[int, int] = {}
        self._own: tuple[int, IO[bytes]] | None = None
        self._end = 0
        self._lock = threading.Lock()

    def get(self, number: int) -> Pieces | None:
        """int32 arrays of a record's pieces; None where they are not there."""
        segment, crc, offset, *sizes = _CELL.unpack_from(self._table, number * _CELL.size)
        if not segment:
            return None
        sizes = sizes[: self.pieces]
        start, end = 4 * offset, 4 * (offset + sum(sizes))
        with self._lock:
            mapped = self._segments.get(segment)
            if mapped is None or len(mapped) < end:
                mapped = self._map(segment)
            if mapped is None or len(mapped) < end:
                return None
            raw = mapped[start:end]
            self._release(segment, mapped, end - start)
        if zlib.crc32(raw, number & 0xFFFFFFFF) != crc:
            return None
        tokens = np.frombuffer(raw, "<i4").astype(np.int32, copy=False)
        ends = list(itertools.accumulate(sizes))
        return [tokens[b - size : b] for b, size in zip(ends, sizes, strict=True)]

    def put(self, number: int, pieces: Pieces) -> None:
        """Keeps a record's pieces.

        Raises:
            UserError: a segment is not our own (`files.open_own`).
            OSError: the disk is full.
        """
        raw = np.concatenate(pieces).astype("<i4", copy=False).tobytes()
        sizes = [*map(len, pieces), 0, 0, 0][:4]
        with self._lock:
            segment, file = self._own or self._claim()
            # Written, not stored through the map: a full disk is then an error, and no signal that kills.
            os.pwrite(file.fileno(), raw, self._end)
            cell = _CELL.pack(segment, zlib.crc32(raw, number & 0xFFFFFFFF), self._end // 4, *sizes)
            os.pwrite(self._table_file.fileno(), cell, number * _CELL.size)
            self._end += len(raw)

    def _path_of(self, segment: int) -> Path:
        return self.folder / f"segment-{segment:05d}.bin"

    def _map(self, segment: int) -> mmap.mmap | None:
        with contextlib.suppress(OSError, ValueError), files.open_own(self._path_of(segment), os.O_RDONLY) as file:
            self._segments[segment] = mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ)
        return self._segments.get(segment)

    def _release(self, segment: int, mapped: mmap.mmap, size: int) -> None:
        """Pages that were read stay in the system's cache, but do not count as this process's for ever."""
        self._read_bytes[segment] = self._read_bytes.get(segment, 0) + size
        if self._read_bytes[segment] > 2**24 and hasattr(mapped, "madvise"):
            mapped.madvise(mmap.MADV_DONTNEED)
            self._read_bytes[segment] = 0

    def _claim(self) -> tuple[int, IO[bytes]]:
        """A segment that no living process appends to."""
        for segment in itertools.count(1):
            file = files.open_own(self._path_of(segment))
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                file.close()
                continue
            break
        self._own, self._end = (segment, file), -(-file.seek(0, os.SEEK_END) // 4) * 4
        return self._own
