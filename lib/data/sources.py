"""The records of a source as one numbered list that is never in memory; which of them are a data set's rows.

A source is a file, a folder or a glob of them, or a data set of the Hugging Face hub. Each file has an index
(index.py), by which a record is read from the disk when it is asked for.
"""

from __future__ import annotations

import bisect
import contextlib
import dataclasses
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

import numpy as np
from typing_extensions import TypedDict  # which pydantic reads on Python 3.11

from lib.config.settings import DataSettings
from lib.data import formats, hub, record_files
from lib.data.record_formats import JSON, Chat, Columns, Message, Plain, RecordKind, Tokens, Unusable
from lib.errors import UserError
from lib.system import files

# Larger sources are read as they are needed, smaller ones whole.
STREAMED_BYTES = 64 * 2**20
# Unusable records of a file that are named.
NAMED = 20
# A record: where its line is in the file, and its length, in bytes; its line number, from 1; hashes of its prompt, and
# of prompt and completions; characters (token ids, where it came tokenised) of its prompt and of each completion; 1 for
# a desirable completion, 0 for another, -1 for a record without a label. A pair that is read as two labelled rows has
# two entries.
ENTRY = np.dtype(
    [
        ("offset", "<i8"),
        ("size", "<u4"),
        ("line", "<u4"),
        ("prompt_key", "<u8"),
        ("content_key", "<u8"),
        ("pieces", "<u4", (3,)),
        ("label", "<i1"),
    ]
)


_ENTRY_STRUCT = struct.Struct("<qIIQQ3Ib")  # the same, to write one quickly
assert _ENTRY_STRUCT.size == ENTRY.itemsize


# ---- What a record is, whatever its form


def keys_of(record: Tokens | Plain | Chat) -> tuple[int, int]:
    """64-bit hashes: of the prompt, and of the prompt with its completions."""
    if isinstance(record, Tokens):
        prompt, rest = repr(record.prompt), f"{record.completions!r}{record.learnt or ''}"
    elif isinstance(record, Plain):
        prompt, rest = record.prompt or "", "\0".join(record.completions)
    else:
        prompt, rest = _text_of_chat(record)
    if record.label is not None:  # the same answer, called good here and bad there, is two records
        rest += f"\0{record.label}"
    if not prompt:  # plain text: all of it is what it is about
        key = _hash(rest.encode())
        return key, key
    encoded = prompt.encode()
    return _hash(encoded), _hash(encoded + b"\0" + rest.encode())


def _text_of_chat(chat: Chat) -> tuple[str, str]:
    """All that is trained of a conversation, as text: what is asked, and what is learnt."""
    messages = chat.prompt
    if not messages:  # its first message is learnt (data.learn=all): as of plain text, all of it is what it is about
        return "", json.dumps([*_extras(chat), chat.completions, chat.learnt], sort_keys=True, default=str)
    only = messages[0] if len(messages) == 1 else None
    # A prompt is the same one whether it came as a string or as the user's only message.
    is_plain = only is not None and only["role"] == "user" and only.keys() == _PLAIN and not _extras(chat)
    asked = (*messages, *_extras(chat))
    prompt = only["content"] if is_plain and only else json.dumps(asked, sort_keys=True, default=str)
    if all(len(answer) == 1 and answer[0].keys() == _PLAIN for answer in chat.completions):
        return prompt, "\0".join(answer[0]["content"] for answer in chat.completions)
    return prompt, json.dumps([chat.completions, chat.learnt], sort_keys=True, default=str)


_PLAIN = {"role", "content"}


def _extras(chat: Chat) -> list[object]:
    """What is rendered besides the messages."""
    return [extra for extra in (chat.tools, chat.template_arguments) if extra]


def _hash(text: bytes) -> int:
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little")


def sizes_of(record: Tokens | Plain | Chat) -> tuple[int, int, int]:
    """Characters (or token ids) of the prompt and of each completion; 0 for a completion that is not there."""
    if isinstance(record, Tokens):
        pieces = [len(record.prompt), *map(len, record.completions)]
    elif isinstance(record, Plain):
        pieces = [len(record.prompt or ""), *map(len, record.completions)]
    else:
        extras = len(json.dumps(_extras(record))) if record.tools else 0
        pieces = [sum(map(_characters, record.prompt)) + extras]
        pieces += [sum(map(_characters, answer)) for answer in record.completions]
    prompt, first, second = [*pieces, 0, 0][:3]
    return prompt, first, second


def _characters(message: Message) -> int:
    if len(message) == 2:  # a role and a content, which is a string
        return len(message["content"])
    return sum(len(field if isinstance(field, str) else json.dumps(field)) for field in message.values() if field)


# ---- One file's index

META, ENTRIES, LINES = "index.json", "entries.bin", "lines.jsonl"
VERSION = 7  # of what an index holds


class Seen(TypedDict):
    """The records of one format."""

    count: int
    first: int
    """The first one's number in the index."""


@dataclass(frozen=True)
class Index:
    """One file, where its records are, and what its checks gave."""

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
    formats: dict[str, Seen]
    """What its records were recognised as."""
    unusable: list[str]
    """`file:line: why`, the first few."""
    unusable_count: int


def index(
    file: Path, settings: DataSettings, kind: RecordKind, tell: Callable[[str], None] = lambda text: None
) -> Index:
    """The index of a file, made where there is none, or the file has changed.

    Raises:
        UserError: the file cannot be read.
        OSError: data.cache_dir is full or not writable.
    """
    key = hashlib.sha256(repr((str(file.resolve()), kind, Columns.of(settings), VERSION)).encode()).hexdigest()[:24]
    folder = Path(settings.cache_dir) / f"index-{key}"
    now = file.stat()
    stamp = [now.st_size, now.st_mtime_ns, now.st_ctime_ns]
    is_long = now.st_size > STREAMED_BYTES

    def waiting() -> None:
        if is_long:
            tell(f"another process indexes {file}: waiting for it")

    with locked(folder.with_suffix(".lock"), waiting):
        meta = _read_meta(folder)
        if meta is None or meta["stamp"] != stamp:
            again = "" if meta is None else ", which has changed since it was indexed"
            if meta is not None or is_long:
                tell(f"indexing {file}{again} ({now.st_size / 1e6:,.0f} MB)")
            meta = _build(file, stamp, folder, settings, kind)
    return Index(
        file,
        folder / LINES if meta["unpacked"] else file,
        np.memmap(folder / ENTRIES, ENTRY, "r") if meta["count"] else np.zeros(0, ENTRY),
        None if meta["unpacked"] else (now.st_size, now.st_mtime_ns),
        meta["digest"],
        meta["formats"],
        meta["unusable"],
        meta["unusable_count"],
    )


def _read_meta(folder: Path) -> JSON | None:
    """What an index says of itself; None where there is none, or part of it is lost."""
    try:
        meta: JSON = json.loads((folder / META).read_text(encoding="utf-8"))
        sizes = {ENTRIES: meta["count"] * ENTRY.itemsize} | ({LINES: meta["bytes"]} if meta["unpacked"] else {})
        return meta if all((folder / name).stat().st_size == size for name, size in sizes.items()) else None
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _build(file: Path, stamp: list[int], folder: Path, settings: DataSettings, kind: RecordKind) -> JSON:
    """Indexes a file in one pass: checks every record, and enters the usable ones."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    unpacks = file.suffix in (".gz", ".parquet")
    digest, seen_formats, named = hashlib.sha256(), dict[str, Seen](), list[str]()
    count = unusable_count = written = 0
    with (folder / ENTRIES).open("wb") as entries, (folder / LINES).open("wb") as lines:
        for line, offset, raw, record in record_files.scan(file, settings, kind):
            try:
                if isinstance(record, Unusable):
                    raise record
                parsed = formats.parse_rows(record, settings, kind)
            except Unusable as why:
                unusable_count += 1
                named += [f"{file}:{line}: {why}"] if len(named) < NAMED else []
                continue
            if unpacks:
                raw = raw if raw.endswith(b"\n") else raw + b"\n"
                offset = written
                written += lines.write(raw)
            for row in parsed:
                label = -1 if row.label is None else int(row.label)
                entries.write(_ENTRY_STRUCT.pack(offset, len(raw), line, *keys_of(row), *sizes_of(row), label))
                seen_formats.setdefault(row.columns, {"count": 0, "first": count})["count"] += 1
                count += 1
            digest.update(raw)
    meta = {
        "stamp": stamp,
        "unpacked": unpacks,
        "bytes": written,
        "count": count,
        "digest": digest.hexdigest(),
        "formats": seen_formats,
        "unusable": named,
        "unusable_count": unusable_count,
    }
    after = file.stat()
    if [after.st_size, after.st_mtime_ns, after.st_ctime_ns] != stamp:
        raise UserError(f"{file} changed while it was indexed; start again when it is complete")
    files.write_atomically(folder / META, json.dumps(meta) + "\n")  # last: where it is, the index is whole
    return meta


@contextlib.contextmanager
def locked(path: Path, waiting: Callable[[], None] = lambda: None) -> Iterator[None]:
    """One process of a host at a time; the lock of one that dies is free again.

    Raises:
        OSError: it cannot be made.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a", encoding="utf-8") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            waiting()
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield


ENDINGS = (".jsonl", ".json", ".ndjson", ".gz", ".parquet")
OPEN_FILES = 64


def files_of(source: str, settings: DataSettings, tell: Callable[[str], None] = lambda text: None) -> list[Path]:
    """The files of a source, in the same order on every host.

    Raises:
        UserError: there is none.
    """
    if source.startswith(hub.PREFIX):
        lock = Path(settings.cache_dir) / f"hub-{hashlib.sha256(source.encode()).hexdigest()[:24]}.lock"
        with locked(lock, lambda: tell(f"another process fetches {source}: waiting for it")):
            return hub.fetch(source, settings, tell)
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
        raise UserError(record_files.refusal(first, unusable, sum(len(index.entries) for index in indices)))
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
