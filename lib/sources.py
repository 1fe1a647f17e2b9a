"""Files of records as one numbered list that is never in memory: what is where, and a few hashes of each record.

A source is a file, a folder or a glob of them. JSON lines are read where they lie; what cannot be read from the middle
(gzip, parquet, a stream from afar) is unpacked once into JSON lines on the disk. One pass over a file checks every record
and writes its index: a row of `ENTRY` for each usable one, in a file that is memory-mapped afterwards. All of it lies in
data.cache_dir, is made by one process of a host while the others wait for it, and is made anew when the file has changed.
"""

from __future__ import annotations

import bisect
import contextlib
import fcntl
import glob
import hashlib
import itertools
import json
import os
import shutil
import struct
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import numpy as np

from lib import records, spool
from lib.config import Data, UserError
from lib.records import Chat, Kind, Plain, Tokens, Unusable

ENDINGS = (".jsonl", ".json", ".ndjson", ".gz", ".parquet")
# Larger sources are read as they are needed, smaller ones whole.
STREAMED_BYTES = 64 * 2**20
OPEN_FILES = 64
# Unusable records that are named in memory; all are in the index's folder.
NAMED = 20

ENTRY = np.dtype(
    [
        ("offset", "<i8"),
        ("size", "<u4"),
        ("line", "<u4"),
        ("prompt_key", "<u8"),
        ("content_key", "<u8"),
        ("pieces", "<u4", (3,)),
    ]
)
"""A record: where its line is in the file, in bytes; its line for people, from 1; hashes of its prompt, and of all that is
learnt from; and characters (token ids, of a record that came tokenised) of its prompt and of each completion."""

_pack = struct.Struct("<qIIQQ3I").pack
assert struct.calcsize("<qIIQQ3I") == ENTRY.itemsize


def files_of(source: str, settings: Data, tell: Callable[[str], None] = lambda text: None) -> list[Path]:
    """The files of a source, in the same order everywhere: one file, all of a folder, what a glob matches, a hub's data set.

    Raises:
        UserError: there is none.
    """
    if source.startswith(spool.PREFIX):
        lock = spool.folder_of(source, settings).with_suffix(".lock")
        with locked(lock, lambda: tell(f"another process fetches {source}: waiting for it")):
            return spool.fetch(source, settings, tell)
    path = Path(source)
    if path.is_dir():
        found = [file for file in path.rglob("*") if _is_data(file.relative_to(path)) and file.is_file()]
        if not found:
            raise UserError(f"{source} is a folder without records; it should hold files named *{', *'.join(ENDINGS)}")
        return sorted(found)
    if not path.exists() and glob.has_magic(source):
        matched = [Path(name) for name in glob.glob(source, recursive=True)]  # noqa: PTH207  (absolute ones, too)
        if not (found := [file for file in matched if file.is_file()]):
            raise UserError(f"{source}: no file matches (looked from {Path.cwd()})")
        return sorted(found)
    records.require(path)
    return [path]


def _is_data(relative: Path) -> bool:
    return relative.suffix in ENDINGS and not any(part.startswith(".") for part in relative.parts)


def sizes(files: Sequence[Path]) -> int:
    """Bytes of all files."""
    return sum(file.stat().st_size for file in files)


def weights_of(train: str | Mapping[str, float]) -> dict[str, float]:
    """Sources and how often each of their rows is taken in an epoch."""
    return {train: 1.0} if isinstance(train, str) else dict(train)


# ---- What a record is, whatever its form


def keys_of(record: Tokens | Plain | Chat) -> tuple[int, int]:
    """64-bit hashes: of the prompt, and of the prompt with its completions."""
    if isinstance(record, Tokens):
        prompt, rest = repr(record.prompt), repr(record.completions)
    elif isinstance(record, Plain):
        prompt, rest = record.prompt or "", "\0".join(record.completions)
    else:
        messages = record.prompt
        only = messages[0]
        # A prompt is the same one whether it came as a string or as the user's only message.
        plain = len(messages) == 1 and only.get("role") == "user" and isinstance(only["content"], str)
        prompt = only["content"] if plain else json.dumps(messages, sort_keys=True, default=str)
        rest = "\0".join(answer["content"] for answer in record.completions)
    if not prompt:  # plain text: all of it is what it is about
        key = _hash(rest.encode())
        return key, key
    encoded = prompt.encode()
    return _hash(encoded), _hash(encoded + b"\0" + rest.encode())


def _hash(text: bytes) -> int:
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little")


def sizes_of(record: Tokens | Plain | Chat) -> tuple[int, int, int]:
    """Characters (or token ids) of the prompt and of each completion; 0 for a completion that is not there."""
    if isinstance(record, Tokens):
        pieces = [len(record.prompt), *map(len, record.completions)]
    elif isinstance(record, Plain):
        pieces = [len(record.prompt or ""), *map(len, record.completions)]
    else:
        pieces = [sum(len(str(message["content"])) for message in record.prompt)]
        pieces += [len(answer["content"]) for answer in record.completions]
    prompt, first, second = [*pieces, 0, 0][:3]
    return prompt, first, second


def is_held_out(key: int, holdout: float) -> bool:
    """Whether a prompt belongs to the held-out part: decided by its hash alone, so other rows change nothing."""
    return key < int(holdout * 2**64)


# ---- One file's index


@dataclass(frozen=True)
class Index:
    """One file, its records' places, and what was found out on the way."""

    file: Path
    """As the user knows it."""
    lines: Path
    """Where the lines are: the file itself, or what it was unpacked to."""
    entries: np.ndarray
    """ENTRY [n], memory-mapped."""
    stamp: tuple[int, int] | None
    """Size and modification time (ns) of the file that was indexed; None where it was unpacked."""
    digest: str
    """sha256 of the usable records' lines."""
    columns: str
    unusable: list[str]
    """`file:line: why`, the first few."""
    unusable_count: int
    unusable_names: Path
    """All of them, a line each."""


def index(file: Path, settings: Data, kind: Kind, tell: Callable[[str], None] = lambda text: None) -> Index:
    """The index of a file, made if there is none, or the file is another than it was.

    Raises:
        UserError: the file cannot be read, or has no records.
        OSError: data.cache_dir is full or not writable.
    """
    names = [getattr(settings, name) for name in records.OTHER_NAMES]
    key = hashlib.sha256(repr((str(file.resolve()), kind, names, VERSION)).encode()).hexdigest()[:24]
    folder = Path(settings.cache_dir) / f"index-{key}"
    now = file.stat()
    is_long = now.st_size > STREAMED_BYTES

    def waiting() -> None:
        if is_long:
            tell(f"another process indexes {file}: waiting for it")

    with locked(folder.with_suffix(".lock"), waiting):
        meta = _read_meta(folder)
        if meta is None or [meta["size"], meta["modified_ns"]] != [now.st_size, now.st_mtime_ns]:
            again = "" if meta is None else ", which has changed since it was indexed"
            if meta is not None or is_long:
                tell(f"indexing {file}{again} ({now.st_size / 1e6:,.0f} MB)")
            meta = _build(file, now, folder, settings, kind)
    return Index(
        file,
        folder / LINES if meta["unpacked"] else file,
        np.memmap(folder / ENTRIES, ENTRY, "r") if meta["count"] else np.zeros(0, ENTRY),
        None if meta["unpacked"] else (meta["size"], meta["modified_ns"]),
        meta["digest"],
        meta["columns"],
        meta["unusable"],
        meta["unusable_count"],
        folder / UNUSABLE,
    )


VERSION = 1  # of what an index holds
META, ENTRIES, LINES, UNUSABLE = "index.json", "entries.bin", "lines.jsonl", "unusable.txt"


def _read_meta(folder: Path) -> dict[str, Any] | None:
    """What an index says of itself; None where there is none, or part of it is lost."""
    try:
        meta: dict[str, Any] = json.loads((folder / META).read_text())
        whole = (folder / ENTRIES).stat().st_size == meta["count"] * ENTRY.itemsize
        return meta if whole and (not meta["unpacked"] or (folder / LINES).stat().st_size == meta["bytes"]) else None
    except (OSError, ValueError, KeyError):
        return None


def _build(file: Path, seen: os.stat_result, folder: Path, settings: Data, kind: Kind) -> dict[str, Any]:
    """One pass over a file: every record checked, the usable ones entered."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    unpacks = file.suffix in (".gz", ".parquet")
    digest, columns, named = hashlib.sha256(), dict[str, None](), list[str]()
    count = unusable_count = written = 0
    with contextlib.ExitStack() as stack:
        entries = stack.enter_context((folder / ENTRIES).open("wb"))
        unusable = stack.enter_context((folder / UNUSABLE).open("w", encoding="utf-8"))
        lines: IO[bytes] | None = stack.enter_context((folder / LINES).open("wb")) if unpacks else None
        for line, offset, raw, record in records.scan(file, settings):
            try:
                if isinstance(record, Unusable):
                    raise record
                parsed = records.parse(record, settings, kind)
            except Unusable as why:
                unusable_count += 1
                unusable.write(f"{file}:{line}: {why}\n")
                if len(named) < NAMED:
                    named.append(f"{file}:{line}: {why}")
                continue
            if lines is not None:
                raw = raw if raw.endswith(b"\n") else raw + b"\n"
                offset = written
                written += lines.write(raw)
            entries.write(_pack(offset, len(raw), line, *keys_of(parsed), *sizes_of(parsed)))
            digest.update(raw)
            columns[parsed.columns] = None
            count += 1
    meta = {
        "file": str(file),
        "size": seen.st_size,
        "modified_ns": seen.st_mtime_ns,
        "unpacked": unpacks,
        "bytes": written,
        "count": count,
        "digest": digest.hexdigest(),
        "columns": "; ".join(columns),
        "unusable": named,
        "unusable_count": unusable_count,
    }
    after = file.stat()
    if (after.st_size, after.st_mtime_ns) != (seen.st_size, seen.st_mtime_ns):
        raise UserError(f"{file} changed while it was indexed; start again once nobody writes to it")
    unfinished = folder / f".{META}"
    unfinished.write_text(json.dumps(meta, indent=2) + "\n")
    unfinished.replace(folder / META)  # last: where it is, the index is whole
    return meta


@contextlib.contextmanager
def locked(path: Path, waiting: Callable[[], None] = lambda: None) -> Iterator[None]:
    """One process of a host at a time; the lock of one that dies is free again."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            waiting()
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield


# ---- Many files


class Records:
    """The usable records of some files, numbered in the files' order; a record is read from the disk when it is asked for."""

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

    def place(self, number: int) -> str:
        """`file:line` of a record."""
        return f"{self.indices[bisect.bisect_right(self.starts, number) - 1].file}:{self.line(number)}"

    def line(self, number: int) -> int:
        """A record's line in its file, from 1."""
        which = bisect.bisect_right(self.starts, number) - 1
        return int(self.indices[which].entries["line"][number - self.starts[which]])

    def __getitem__(self, number: int) -> dict[str, Any]:
        """One record.

        Raises:
            UserError: the file is no longer what was indexed.
        """
        which = bisect.bisect_right(self.starts, number) - 1
        offset, size, *_ = self.indices[which].entries[number - self.starts[which]].item()
        raw = os.pread(self._descriptor(which), size, offset)
        record = records.parse_json(raw) if len(raw) == size else None
        if not isinstance(record, dict):
            raise UserError(f"{self.place(number)} is no longer what was indexed; {_CHANGED}")
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
            found = os.fstat(descriptor)
            stamp = self.indices[which].stamp or (found.st_size, found.st_mtime_ns)
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
    files: Sequence[Path], settings: Data, kind: Kind, tell: Callable[[str], None] = lambda text: None
) -> Records:
    """The records of these files, each indexed.

    Raises:
        UserError: see `index`; and unless settings.skip_invalid, when a record is unusable: it names the first and counts.
    """
    began = time.perf_counter()
    indices = [index(file, settings, kind, tell) for file in files]
    unusable = sum(index.unusable_count for index in indices)
    first = next((index.unusable[0] for index in indices if index.unusable), "")
    if unusable and not settings.skip_invalid:
        raise UserError(records.refusal(first, unusable))
    found = Records(indices)
    if not len(found):
        where = ", ".join(map(str, files[:3])) + (" ..." if len(files) > 3 else "")
        raise UserError(records.nothing_in(where, first, unusable))
    if time.perf_counter() - began > 5:
        tell(f"indexed {len(found):,} records in {time.perf_counter() - began:.0f} s")
    return found


def chosen_rows(
    found: Records, ends: Sequence[int], weights: Sequence[float], settings: Data, held_out: bool
) -> np.ndarray:
    """The records that are a data set's rows, by number: int64 [n].

    Duplicates go first (data.deduplicate), then one side of the holdout is kept, then each source's rows are repeated
    by its weight: 2.5 takes all of them twice, and half of them, chosen by hash, once more.

    ends: int [sources], the number of records up to the end of each. held_out: the held-out side; it is not repeated.
    """
    rows = np.arange(len(found))
    if settings.deduplicate:
        _, first = np.unique(found.column("content_key"), return_index=True)
        rows = np.sort(first)
    if settings.holdout:
        below = found.column("prompt_key")[rows] < np.uint64(int(settings.holdout * 2**64))
        rows = rows[below == held_out]
    parts = np.split(rows, np.searchsorted(rows, ends[:-1]))
    if held_out or all(weight == 1 for weight in weights):
        return rows
    keys = found.column("content_key")
    chosen = []
    for part, weight in zip(parts, weights, strict=True):
        once_more = keys[part] < np.uint64(int(weight % 1 * 2**64))
        chosen += [part] * int(weight) + [part[once_more]]
    return np.concatenate(chosen)
