"""The records of a source as one numbered list that is never in memory; which of them are a data set's rows.

A source is a file, a folder or a glob of them, or a data set of the Hugging Face hub. Each file has an index
(index.py), by which a record is read from the disk when it is asked for.
"""

from __future__ import annotations

import bisect
import dataclasses
import glob
import itertools
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import numpy as np

from lib.config.schema import DataSettings
from lib.data import hub_datasets, record_files
from lib.data.index import ENTRY, Index, index, locked
from lib.data.record_formats import JSON, RecordKind
from lib.errors import UserError

ENDINGS = (".jsonl", ".json", ".ndjson", ".gz", ".parquet")
OPEN_FILES = 64


def files_of(source: str, settings: DataSettings, tell: Callable[[str], None] = lambda text: None) -> list[Path]:
    """The files of a source, in the same order on every host.

    Raises:
        UserError: there is none.
    """
    if source.startswith(hub_datasets.PREFIX):
        lock = hub_datasets.folder_of(source, settings).with_suffix(".lock")
        with locked(lock, lambda: tell(f"another process fetches {source}: waiting for it")):
            return hub_datasets.fetch(source, settings, tell)
    path = Path(source)
    if path.is_dir():
        files = [file for file in path.rglob("*") if _is_data(file.relative_to(path)) and file.is_file()]
        if not files:
            raise UserError(f"{source} is a folder without records; it should hold files named *{', *'.join(ENDINGS)}")
        return sorted(files)
    if not path.exists() and glob.has_magic(source):
        matched = [Path(name) for name in glob.glob(source, recursive=True)]  # noqa: PTH207  (absolute ones, too)
        if not (files := [file for file in matched if file.is_file()]):
            raise UserError(f"{source}: no file matches (looked from {Path.cwd()})")
        return sorted(files)
    record_files.require(path)
    return [path]


def _is_data(relative: Path) -> bool:
    return relative.suffix in ENDINGS and not any(part.startswith(".") for part in relative.parts)


def weights_of(train: str | Mapping[str, float]) -> dict[str, float]:
    """Sources and how often each of their rows is taken in an epoch."""
    return {train: 1.0} if isinstance(train, str) else dict(train)


def is_held_out(key: int, holdout: float) -> bool:
    """Whether a prompt belongs to the held-out part: decided by its hash alone, so other rows change nothing."""
    return key < hash_limit(holdout)


def hash_limit(fraction: float) -> int:
    """What this fraction of all 64-bit hashes is below."""
    return int(fraction * 2**64)


def taken_once_more(keys: np.ndarray, fraction: float) -> np.ndarray:
    """Which records this fraction of a weight takes, by their hashes: uint64 [n] ➜ bool [n].

    The hashes are mixed anew (the end of SplitMix64). Plain text is held out by the same ones, so that a fraction of
    what the holdout left would otherwise be taken from its upper end alone.
    """
    mixed = (keys ^ (keys >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    below: np.ndarray = (mixed ^ (mixed >> np.uint64(31))) < np.uint64(hash_limit(fraction))
    return below


# ---- Records of many files


class Records:
    """The usable records of some files, numbered in the files' order, each read from the disk when it is asked for."""

    def __init__(self, indices: Sequence[Index]):
        self.indices = list(indices)
        self.starts = [0, *itertools.accumulate(len(index.entries) for index in self.indices)]
        self._files: dict[int, tuple[int, tuple[int, int]]] = {}  # descriptors, the last used last; size and mtime

    def __len__(self) -> int:
        return self.starts[-1]

    def column(self, name: str) -> np.ndarray:
        """A field of every entry, [n, ...]."""
        parts = [index.entries[name] for index in self.indices]
        whole: np.ndarray = np.concatenate(parts) if parts else np.zeros(0, ENTRY)[name]
        return whole

    def location(self, number: int) -> str:
        """`file:line` of a record."""
        return f"{self.indices[bisect.bisect_right(self.starts, number) - 1].file}:{self.line(number)}"

    def line(self, number: int) -> int:
        """A record's line in its file, from 1."""
        which = bisect.bisect_right(self.starts, number) - 1
        return int(self.indices[which].entries["line"][number - self.starts[which]])

    def lines_of_files(self, rows: np.ndarray) -> list[np.ndarray]:
        """The lines of some records, ascending by number: int64 [n] for each file."""
        return [index.entries["line"][own] for index, own in zip(self.indices, self._by_file(rows), strict=True)]

    def only(self, rows: np.ndarray) -> Records:
        """Some records alone, ascending by number, and numbered anew."""
        own = zip(self.indices, self._by_file(rows), strict=True)
        return Records([dataclasses.replace(index, entries=index.entries[numbers]) for index, numbers in own])

    def _by_file(self, rows: np.ndarray) -> list[np.ndarray]:
        """Numbers inside of each file."""
        parts = np.split(rows, np.searchsorted(rows, self.starts[1:-1]))
        return [part - start for part, start in zip(parts, self.starts, strict=False)]

    def label(self, number: int) -> bool | None:
        """Whether the completion of a record is desirable; None for a record without a label."""
        which = bisect.bisect_right(self.starts, number) - 1
        label = int(self.indices[which].entries["label"][number - self.starts[which]])
        return None if label < 0 else bool(label)

    def __getitem__(self, number: int) -> JSON:
        """One record.

        Raises:
            UserError: the file is no longer what was indexed.
        """
        which = bisect.bisect_right(self.starts, number) - 1
        offset, size, *_ = self.indices[which].entries[number - self.starts[which]].item()
        descriptor = self._descriptor(which)
        # Whoever wrote the index may have written anything: the file's size bounds what is read.
        is_inside = 0 <= offset <= os.fstat(descriptor).st_size - size
        record = record_files.parse_json(os.pread(descriptor, size, offset)) if is_inside else None
        if not isinstance(record, dict):
            raise UserError(f"{self.location(number)} is no longer what was indexed; {_CHANGED}")
        return record

    def _descriptor(self, which: int) -> int:
        """The open file, which has to be as it was indexed."""
        path = self.indices[which].lines
        descriptor, stamp = self._files.pop(which, (-1, (0, 0)))
        if descriptor < 0:
            if len(self._files) >= OPEN_FILES:
                os.close(self._files.pop(next(iter(self._files)))[0])
            try:
                descriptor = os.open(path, os.O_RDONLY)
            except FileNotFoundError:
                raise UserError(f"{path} is gone; put it back, or start again") from None
            opened = os.fstat(descriptor)
            stamp = self.indices[which].stamp or (opened.st_size, opened.st_mtime_ns)
        now = os.fstat(descriptor)
        self._files[which] = descriptor, stamp
        if (now.st_size, now.st_mtime_ns) != stamp:
            raise UserError(f"{path} has changed since it was indexed; {_CHANGED}")
        return descriptor

    def close(self) -> None:
        for descriptor, _ in self._files.values():
            os.close(descriptor)
        self._files.clear()

    def __del__(self) -> None:
        if not sys.is_finalizing():
            self.close()


_CHANGED = "put the file back as it was, or start a new run on what it is now"


def open_records(
    files: Sequence[Path], settings: DataSettings, kind: RecordKind, tell: Callable[[str], None] = lambda text: None
) -> Records:
    """The records of these files, each indexed.

    Raises:
        UserError: see `index`; unless settings.skip_invalid, a record is unusable: names the first, and their number.
    """
    began = time.perf_counter()
    indices = [index(file, settings, kind, tell) for file in files]
    unusable = sum(index.unusable_count for index in indices)
    first = next((index.unusable[0] for index in indices if index.unusable), "")
    if unusable and not settings.skip_invalid:
        raise UserError(record_files.refusal(first, unusable))
    records = Records(indices)
    if not len(records):
        where = ", ".join(map(str, files[:3])) + (" ..." if len(files) > 3 else "")
        raise UserError(record_files.nothing_in(where, first, unusable))
    if time.perf_counter() - began > 5:
        tell(f"indexed {len(records):,} records in {time.perf_counter() - began:.0f} s")
    return records


def chosen_rows(
    records: Records, ends: Sequence[int], weights: Sequence[float], settings: DataSettings, held_out: bool
) -> np.ndarray:
    """The records that are a data set's rows, by number: int64 [n].

    Duplicates go first (data.deduplicate), then one side of the holdout is kept, then each source's rows are repeated
    by its weight: 2.5 takes all of them twice, and half of them, chosen by hash, once more.

    ends: int [sources], the number of records up to the end of each. held_out: the held-out side; it is not repeated.
    """
    rows = np.arange(len(records))
    if settings.deduplicate:
        _, first = np.unique(records.column("content_key"), return_index=True)
        rows = np.sort(first)
    if settings.holdout:
        below = records.column("prompt_key")[rows] < np.uint64(hash_limit(settings.holdout))
        rows = rows[below == held_out]
    parts = np.split(rows, np.searchsorted(rows, ends[:-1]))
    if held_out or all(weight == 1 for weight in weights):
        return rows
    keys = records.column("content_key")
    chosen = []
    for part, weight in zip(parts, weights, strict=True):
        once_more = taken_once_more(keys[part], weight % 1)
        chosen += [part] * int(weight) + [part[once_more]]
    return np.concatenate(chosen)
