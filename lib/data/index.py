"""The index of a file: where each record is, and hashes of its prompt and completions.

JSON lines are read where they are; what cannot be read from the middle (gzip, parquet) is unpacked once into JSON
lines. One pass over a file checks every record and writes the index: a row of `ENTRY` for each usable one, in a file
that is memory-mapped afterwards. It is kept in data.cache_dir. One process of a host makes it while the others wait,
and it is made again when the file has changed.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import shutil
import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Annotated

import numpy as np
from pydantic import Field, TypeAdapter
from typing_extensions import TypedDict  # which pydantic reads on Python 3.11

from lib.config import read_file
from lib.config.schema import DataSettings
from lib.data import parse_records, record_files
from lib.data.record_formats import Chat, Columns, Message, Plain, RecordKind, Tokens, Unusable
from lib.errors import UserError
from lib.system import files

# Larger sources are read as they are needed, smaller ones whole.
STREAMED_BYTES = 64 * 2**20
# Unusable records that are named in memory; all are in the index's folder.
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


Count = Annotated[int, Field(ge=0)]


class Seen(TypedDict):
    """The records of one format."""

    count: Count
    first: Count
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
    unusable_names: Path
    """All of them, a line each."""


def index(
    file: Path, settings: DataSettings, kind: RecordKind, tell: Callable[[str], None] = lambda text: None
) -> Index:
    """The index of a file, made where there is none, or the file has changed.

    Raises:
        UserError: the file cannot be read, or has no records; the index's folder is a link.
        OSError: data.cache_dir is full or not writable.
    """
    key = hashlib.sha256(repr((str(file.resolve()), kind, Columns.of(settings), VERSION)).encode()).hexdigest()[:24]
    folder = Path(settings.cache_dir) / f"index-{key}"
    now = file.stat()
    is_long = now.st_size > STREAMED_BYTES

    def waiting() -> None:
        if is_long:
            tell(f"another process indexes {file}: waiting for it")

    with locked(folder.with_suffix(".lock"), waiting):
        files.make_own(folder)
        meta = _read_meta(folder)
        if meta is None or not _is_of(meta, file, now, folder):
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
        meta["formats"],
        meta["unusable"],
        meta["unusable_count"],
        folder / UNUSABLE,
    )


class Meta(TypedDict):
    """index.json: what an index says of itself."""

    file: str
    size: int
    modified_ns: int
    changed_ns: int
    inode: int
    content: str
    """sha256 of the whole file."""
    unpacked: bool
    bytes: Count
    count: Count
    digest: str
    formats: dict[str, Seen]
    unusable: list[str]
    unusable_count: Count


_META = TypeAdapter(Meta)
VERSION = 6  # of what an index holds
META, ENTRIES, LINES, UNUSABLE = "index.json", "entries.bin", "lines.jsonl", "unusable.txt"


def _read_meta(folder: Path) -> Meta | None:
    """What an index says of itself; None where there is none, part of it is lost, or somebody wrote something else."""
    try:
        meta = _META.validate_python(read_file.read_object(folder / META, "the index's"), strict=True)
        sizes = {ENTRIES: meta["count"] * ENTRY.itemsize} | ({LINES: meta["bytes"]} if meta["unpacked"] else {})
        for name, size in sizes.items():
            read_file.require_regular(folder / name, "the index's")
            if (folder / name).stat().st_size != size:
                return None
        is_one = (not meta["unusable_count"] or meta["unusable"]) and bool(meta["formats"]) == bool(meta["count"])
        return meta if is_one and all(seen["first"] < meta["count"] for seen in meta["formats"].values()) else None
    except (OSError, ValueError, UserError):
        return None


def _is_of(meta: Meta, file: Path, now: os.stat_result, folder: Path) -> bool:
    """Whether an index is of the file as it is now.

    A modification time can be put back, and a change time cannot. But that one is new for a link or a copy as well:
    then the file is read once more, and what is the same keeps its index.
    """
    if (meta["size"], meta["modified_ns"]) != (now.st_size, now.st_mtime_ns):
        return False
    if (meta["changed_ns"], meta["inode"]) == (now.st_ctime_ns, now.st_ino):
        return True
    if meta["content"] != _content(file):
        return False
    _write_meta(folder, {**meta, "changed_ns": now.st_ctime_ns, "inode": now.st_ino})
    return True


def _content(file: Path) -> str:
    """sha256 of a whole file.

    Raises:
        UserError: it cannot be read.
    """
    try:
        with file.open("rb") as stream:
            return hashlib.file_digest(stream, "sha256").hexdigest()
    except OSError as error:
        raise UserError(f"{file} cannot be read: {error.strerror or error}") from error


def _write_meta(folder: Path, meta: Meta) -> None:
    files.write_atomically(folder / META, json.dumps(meta, indent=2) + "\n", durable=False)  # made again if lost


def _build(file: Path, seen: os.stat_result, folder: Path, settings: DataSettings, kind: RecordKind) -> Meta:
    """Indexes a file in one pass: checks every record, and enters the usable ones."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    unpacks = file.suffix in (".gz", ".parquet")
    digest, formats, named = hashlib.sha256(), dict[str, Seen](), list[str]()
    count = unusable_count = written = 0
    with contextlib.ExitStack() as stack:
        entries = stack.enter_context((folder / ENTRIES).open("wb"))
        unusable = stack.enter_context((folder / UNUSABLE).open("w", encoding="utf-8"))
        lines: IO[bytes] | None = stack.enter_context((folder / LINES).open("wb")) if unpacks else None
        for line, offset, raw, record in record_files.scan(file, settings, kind):
            try:
                if isinstance(record, Unusable):
                    raise record
                parsed = parse_records.parse_rows(record, settings, kind)
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
            for row in parsed:
                label = -1 if row.label is None else int(row.label)
                entries.write(_ENTRY_STRUCT.pack(offset, len(raw), line, *keys_of(row), *sizes_of(row), label))
                formats.setdefault(row.columns, {"count": 0, "first": count})["count"] += 1
                count += 1
            digest.update(raw)
    meta: Meta = {
        "file": str(file),
        "size": seen.st_size,
        "modified_ns": seen.st_mtime_ns,
        "changed_ns": seen.st_ctime_ns,
        "inode": seen.st_ino,
        "content": _content(file),
        "unpacked": unpacks,
        "bytes": written,
        "count": count,
        "digest": digest.hexdigest(),
        "formats": formats,
        "unusable": named,
        "unusable_count": unusable_count,
    }
    after = file.stat()
    if (after.st_size, after.st_mtime_ns) != (seen.st_size, seen.st_mtime_ns):
        raise UserError(f"{file} changed while it was indexed; start again once nobody writes to it")
    _write_meta(folder, meta)  # last: where it is, the index is whole
    return meta


@contextlib.contextmanager
def locked(path: Path, waiting: Callable[[], None] = lambda: None) -> Iterator[None]:
    """One process of a host at a time; the lock of one that dies is free again.

    Raises:
        UserError: it is not our own (`files.open_own`).
        OSError: it cannot be made.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with files.open_own(path) as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            waiting()
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield
