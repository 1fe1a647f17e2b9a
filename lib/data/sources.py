"""The records of a source as one numbered list that is never in memory; which of them are a data set's rows.

A source is a file, a folder or a glob of them, or a data set of the Hugging Face hub. Each file has an index in
data.cache_dir, made in one pass that checks every record; by it a record is read from the disk when it is asked for.
"""

from __future__ import annotations

import bisect
import contextlib
import fcntl
import functools
import glob
import hashlib
import itertools
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from lib.config.settings import DataSettings
from lib.data import hub, record_files
from lib.data.record_formats import (
    JSON,
    Chat,
    Columns,
    Plain,
    Record,
    RecordKind,
    Tokens,
    Unusable,
    rows_of,
    unread_columns,
)
from lib.errors import UserError
from lib.system import files

Tell = Callable[[str], None]
STREAMED_BYTES = 64 * 2**20  # larger sources are read as they are needed, smaller ones whole
NAMED = 20  # unusable records of a file that are named
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
"""A row: where its line is in the file, and its length, in bytes; its line number; hashes of its prompt, and of prompt
and completions; characters (token ids, where it came tokenised) of its prompt and completions; 1 for a desirable
completion, 0 for another, -1 without a label. A pair that is read as two labelled rows has two entries."""


def silent(text: str) -> None:
    """Tells no one."""


# ---- What a record is, whatever its form


def keys_of(record: Record) -> tuple[int, int]:
    """64-bit hashes: of the prompt, and of the prompt with its completions."""
    if isinstance(record, Tokens):
        prompt, rest = repr(record.prompt), f"{record.completions!r}{record.learnt or ''}"
    elif isinstance(record, Plain):
        prompt, rest = record.prompt or "", "\0".join(record.completions)
    else:
        prompt, rest = _text_of_chat(record)
    if record.label is not None:  # the same answer, called good here and bad there, is two records
        rest += f"\0{record.label}"
    # Plain text has no prompt: all of it is what it is about.
    texts = (prompt, f"{prompt}\0{rest}") if prompt else (rest, rest)
    of_prompt, of_all = (hashlib.blake2b(text.encode(), digest_size=8).digest() for text in texts)
    return int.from_bytes(of_prompt, "little"), int.from_bytes(of_all, "little")


def _text_of_chat(chat: Chat) -> tuple[str, str]:
    """All that is trained of a conversation, as text: what is asked, and what is learnt."""
    dumped = functools.partial(json.dumps, sort_keys=True, default=str)
    extras, bare = [extra for extra in (chat.tools, chat.template_arguments) if extra], {"role", "content"}
    if not chat.prompt:  # its first message is learnt (data.learn=all)
        return "", dumped([*extras, chat.completions, chat.learnt])
    only = chat.prompt[0]
    # A prompt is the same one whether it came as a string or as the user's only message.
    is_plain = len(chat.prompt) == 1 and only["role"] == "user" and only.keys() == bare and not extras
    prompt = only["content"] if is_plain else dumped((*chat.prompt, *extras))
    if all(len(answer) == 1 and answer[0].keys() == bare for answer in chat.completions):
        return prompt, "\0".join(answer[0]["content"] for answer in chat.completions)
    return prompt, dumped([chat.completions, chat.learnt])


def sizes_of(record: Record) -> list[int]:
    """Characters (or token ids) of the prompt and of both completions; 0 for a completion that is not there."""
    if not isinstance(record, Chat):
        return [*map(len, (record.prompt or "", *record.completions)), 0, 0][:3]
    sizes = [len(json.dumps(record.tools)) if record.tools else 0, 0, 0]
    for k, messages in enumerate((record.prompt, *record.completions)):
        fields = (field for message in messages for name, field in message.items() if field and name != "role")
        sizes[k] += sum(len(field if isinstance(field, str) else json.dumps(field)) for field in fields)
    return sizes


# ---- One file's index

META, ENTRIES, LINES = "index.json", "entries.bin", "lines.jsonl"
VERSION = 15  # of what an index holds


@dataclass(frozen=True)
class Index:
    """One file, where its records are, and what its checks gave."""

    file: Path  # As the user knows it
    lines: Path  # Where the lines are: the file itself, or what it was unpacked to
    entries: np.ndarray  # ENTRY [n], memory-mapped
    stamp: list[int]  # Size and time of the last change (ns) of `lines`
    digest: str  # sha256 of the usable records' lines
    formats: dict[str, list[int]]  # What its records were recognised as: how many, and the first one's number
    unread: list[str]  # Columns that nothing reads
    unusable: list[tuple[int, str]]  # Lines and reasons, the first few
    unusable_count: int


def _stamp(file: Path) -> list[int]:
    about = file.stat()
    return [about.st_size, about.st_mtime_ns]


def index(file: Path, cache_dir: str, columns: Columns, kind: RecordKind, tell: Tell) -> Index:
    """The index of a file, made where there is none, or the file has changed. Raises UserError: the file cannot be
    read. OSError: data.cache_dir is full or not writable."""
    stamp = [*_stamp(file), file.stat().st_ctime_ns]
    folder = record_files.cached(cache_dir, "index", repr((str(file.resolve()), kind, columns, VERSION)))
    tell = tell if stamp[0] > STREAMED_BYTES else silent
    with locked(folder, tell, f"indexes {file}"):
        meta = _stored(folder, stamp)
        if meta is None:
            tell(f"indexing {file} ({stamp[0] / 1e6:,.0f} MB)")
            meta = _build(file, stamp, folder, columns, kind)
    lines = folder / LINES if meta["sizes"][LINES] else file
    entries = np.memmap(folder / ENTRIES, ENTRY, "r") if meta["sizes"][ENTRIES] else np.zeros(0, ENTRY)
    return Index(file, lines, entries, _stamp(lines), **meta["facts"])


def _stored(folder: Path, stamp: list[int]) -> JSON | None:
    """What was stored of a file; None where that is not whole, or the file has changed."""
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        meta: JSON = json.loads((folder / META).read_text(encoding="utf-8"))
        sizes = {name: (folder / name).stat().st_size for name in (ENTRIES, LINES)}
        return meta if (meta["stamp"], meta["sizes"]) == (stamp, sizes) else None
    return None


def _build(file: Path, stamp: list[int], folder: Path, columns: Columns, kind: RecordKind) -> JSON:
    """Indexes a file in one pass: checks every record, and enters the usable ones."""
    folder.mkdir(parents=True, exist_ok=True)
    digest, formats, unread = hashlib.sha256(), dict[str, list[int]](), dict[str, None]()
    unusable, unusable_count, count = list[tuple[int, str]](), 0, 0
    with (folder / ENTRIES).open("wb") as entries, (folder / LINES).open("wb") as lines:
        for line, offset, raw, record in record_files.scan(file):
            rows = rows_of(record, columns, kind)
            if isinstance(record, Unusable) or isinstance(rows[0], Unusable):
                unusable_count += 1
                if len(unusable) < NAMED:
                    unusable.append((line, str(rows[0])))
                continue
            unread |= dict.fromkeys(unread_columns(record, columns, kind))
            if file.suffix == ".gz" or not raw:
                values = {name: value for name, value in record.items() if value is not None}
                raw = (raw.rstrip(b"\n") or json.dumps(values, default=str).encode()) + b"\n"
                offset = lines.tell()
                lines.write(raw)
            for row in rows:
                assert not isinstance(row, Unusable)
                label = -1 if row.label is None else int(row.label)
                entry = (offset, len(raw), line, *keys_of(row), sizes_of(row), label)
                entries.write(np.array(entry, ENTRY).tobytes())
                formats.setdefault(row.columns, [0, count])[0] += 1
                count += 1
            digest.update(raw)
        sizes = {ENTRIES: entries.tell(), LINES: lines.tell()}
    if [*_stamp(file), file.stat().st_ctime_ns] != stamp:
        raise UserError(f"{file} changed while it was indexed; start again when it is complete")
    facts: JSON = {"digest": digest.hexdigest(), "formats": formats, "unread": [*unread]}
    facts |= {"unusable": unusable, "unusable_count": unusable_count}
    meta: JSON = {"stamp": stamp, "sizes": sizes, "facts": facts}
    files.write_atomically(folder / META, json.dumps(meta) + "\n")  # last: where it is, the index is whole
    return meta


@contextlib.contextmanager
def locked(path: Path, tell: Tell, doing: str) -> Iterator[None]:
    """One process of a host at a time makes what `path` keeps; the lock of one that dies is free again."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.with_suffix(".lock").open("a", encoding="utf-8") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            tell(f"another process {doing}: waiting for it")
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield


# ---- Which files


def files_of(source: str, cache_dir: str, tell: Tell = silent) -> list[Path]:
    """The files of a source, in the same order on every host. Raises UserError: there is none."""
    if source.startswith(hub.PREFIX):
        with locked(record_files.cached(cache_dir, "hub", source), tell, f"fetches {source}"):
            return hub.fetch(source, cache_dir, tell)
    path = Path(source)
    if path.is_dir():
        matched = [file for file in path.rglob("*") if hub.is_data(file.relative_to(path).as_posix())]
    elif path.exists() or not glob.has_magic(source):
        record_files.require(path)
        return [path]
    else:
        matched = [*map(Path, glob.glob(source, recursive=True))]  # noqa: PTH207
    if paths := sorted(file for file in matched if file.is_file()):
        return paths
    raise UserError(f"{source}: no file (*{', *'.join(record_files.ENDINGS)}) is there (looked from {Path.cwd()})")


def weights_of(train: str | Mapping[str, float]) -> dict[str, float]:
    """Sources and how often each of their rows is taken in an epoch."""
    return {train: 1.0} if isinstance(train, str) else dict(train)


def with_splits(settings: DataSettings, tell: Tell = silent, holds_out: bool = True) -> DataSettings:
    """The settings with the files of data.train's folders whose names say train, valid or test. Train is trained, or
    what has no such name; valid is held out, unless settings say what is; the rest is left."""
    held_out = dict[str, float]()
    trained, weights = dict[str, float](), weights_of(settings.train)
    for source, weight in weights.items():
        parts: dict[str | None, list[Path]] = {"train": [], None: [], "validation": [], "test": []}
        for path in files_of(source, settings.cache_dir) if Path(source).is_dir() else ():
            parts[hub.split_of(path.relative_to(source).as_posix())].append(path)
        train = parts.pop("train") or parts.pop(None)
        if not any(parts.values()):
            trained[source] = weight
            continue
        if not train:
            raise UserError(f"{source}: its files are called valid or test; name those to train with data.train=FILE")
        valid = parts.pop("validation") if holds_out and not (settings.valid or settings.holdout) else []
        uses = {"trained": train, "held out": valid, "left": [*itertools.chain(*parts.values())]}
        names = (", ".join(str(path.relative_to(source)) for path in paths) for paths in uses.values())
        tell(f"{source}: {', '.join(f'{name} is {use}' for use, name in zip(uses, names, strict=True) if name)}")
        trained |= dict.fromkeys(map(str, train), weight)
        held_out |= dict.fromkeys(map(str, valid), 1.0)
    if trained == weights:
        return settings
    return settings.model_copy(update={"train": trained, "valid": held_out or settings.valid})


def unweighted(train: str | Mapping[str, float], what: str) -> list[str]:
    """The names of sources. Raises UserError: one has a weight, and `what` they hold are not repeated."""
    weights = weights_of(train)
    if any(weight != 1 for weight in weights.values()):
        raise UserError(f"data.train={weights}: {what} have no weights; name the files without")
    return [*weights]


# ---- Records of many files


class Records:
    """The usable records of some files, numbered in the files' order, each read from the disk when it is asked for."""

    segments: np.ndarray | None = None  # Bounds of records that have to be read together; None: each is by itself

    def __init__(self, indices: Sequence[Index]):
        self.indices = list(indices)
        self.starts = [0, *itertools.accumulate(len(index.entries) for index in self.indices)]
        self.digests = [f"{index.digest} {len(index.entries)}" for index in self.indices]
        self.formats = "; ".join(dict.fromkeys(name for index in self.indices for name in index.formats))
        self.unusable = [f"{index.file}:{line}: {why}" for index in self.indices for line, why in index.unusable]
        self.unusable_count = sum(index.unusable_count for index in self.indices)

    def __len__(self) -> int:
        return self.starts[-1]

    def column(self, name: str) -> np.ndarray:
        """A field of every entry, [n, ...]."""
        return np.concatenate([index.entries[name] for index in self.indices])

    def _place(self, number: int) -> tuple[Index, np.void]:
        which = bisect.bisect_right(self.starts, number) - 1
        return self.indices[which], self.indices[which].entries[number - self.starts[which]]

    def location(self, number: int) -> str:
        """`file:line` of a record."""
        return f"{self._place(number)[0].file}:{self.line(number)}"

    def line(self, number: int) -> int:
        """A record's line in its file, from 1."""
        return int(self._place(number)[1]["line"])

    def label(self, number: int) -> bool | None:
        """Whether the completion of a record is desirable; None for a record without a label."""
        return {0: False, 1: True}.get(int(self._place(number)[1]["label"]))

    def only(self, rows: np.ndarray) -> Records:
        """Some records alone, ascending by number, and numbered anew."""
        both = zip(self.indices, self.by_file(rows), strict=True)
        return Records([replace(index, entries=index.entries[numbers]) for index, numbers in both])

    def by_file(self, rows: np.ndarray) -> list[np.ndarray]:
        """Of some records, ascending by number, the numbers inside of each file."""
        parts = np.split(rows, np.searchsorted(rows, self.starts[1:-1]))
        return [part - start for part, start in zip(parts, self.starts, strict=False)]

    def __getitem__(self, number: int) -> JSON:
        """One record. Raises UserError: the file is no longer what was indexed."""
        index, entry = self._place(number)
        with contextlib.suppress(FileNotFoundError), index.lines.open("rb") as file:
            file.seek(int(entry["offset"]))
            record = record_files.parse_json(file.read(int(entry["size"])))
            if _stamp(index.lines) == index.stamp and isinstance(record, dict):
                return record
        raise UserError(
            f"{self.location(number)} is no longer what was indexed; put the file back as it was, or start a new run "
            "on what it is now"
        )


def open_records(paths: Sequence[Path], settings: DataSettings, kind: RecordKind, tell: Tell) -> Records:
    """The records of these files, each indexed. Raises UserError: none; unusable ones without data.skip_invalid."""
    columns = Columns.of(settings)
    records = Records([index(file, settings.cache_dir, columns, kind, tell) for file in paths])
    name = ", ".join(map(str, paths[:3]))
    require_usable(name, records.unusable, records.unusable_count, len(records), settings.skip_invalid)
    return records


def require_usable(name: str, unusable: Sequence[str], count: int, usable: int, skip_invalid: bool) -> None:
    """Raises UserError where records are unusable, unless data.skip_invalid leaves them out; or where none is left.
    unusable: `file:line: why`, of `count` records the first few."""
    if unusable and not usable:
        raise UserError(f"{unusable[0]}; none of its {count:,} records can be used: fix the file")
    if unusable and not skip_invalid:
        total = f"; {count:,} records in all cannot be used" if count > 1 else ""
        raise UserError(f"{unusable[0]}{total}; fix the file, or leave them out with data.skip_invalid=true")
    if not usable:
        raise UserError(f"{name} is empty: it has no records; name another file")


# ---- Which records are rows


def open_sources(
    train: str | Mapping[str, float], settings: DataSettings, kind: RecordKind, held_out: bool | None, tell: Tell
) -> tuple[Records, np.ndarray]:
    """The records of some sources, and the numbers of those that are a data set's rows, int64 [n]. Duplicates go first,
    then the other side of the holdout, then each source's rows are repeated by its weight: 2.5 takes all of them twice,
    and half of them, chosen by hash, once more. held_out: the side of data.holdout, True for the held-out rows, which
    are not repeated; None for all rows. Raises UserError: no row is left; as `open_records`."""
    weights, holdout = weights_of(train), settings.holdout
    paths = [files_of(source, settings.cache_dir, tell) for source in weights]
    records = open_records(list(itertools.chain(*paths)), settings, kind, tell)
    prompt_keys, content_keys = records.column("prompt_key"), records.column("content_key")
    rows = np.arange(len(records))
    if settings.deduplicate:
        rows = np.sort(np.unique(content_keys, return_index=True)[1])
    if held_out is not None:
        rows = rows[is_held_out(prompt_keys[rows], holdout) == held_out]
    if not len(rows):
        raise UserError(
            f"{' + '.join(weights)}: of {len(records):,} records none is {'held out' if held_out else 'left'} "
            f"(data.holdout={holdout:g}); set another data.holdout, or name held-out records with data.valid=FILE"
        )
    if held_out or all(weight == 1 for weight in weights.values()):
        return records, rows
    ends = [records.starts[end] for end in itertools.accumulate(map(len, paths))]
    chosen = []
    for part, weight in zip(np.split(rows, np.searchsorted(rows, ends[:-1])), weights.values(), strict=True):
        # The hashes are mixed anew (the end of SplitMix64): the holdout took its part by the same ones.
        keys = content_keys[part]
        keys = (keys ^ (keys >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        keys = (keys ^ (keys >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        once_more = is_held_out(keys ^ (keys >> np.uint64(31)), weight % 1)
        chosen += [part] * int(weight) + [part[once_more]]
    return records, np.concatenate(chosen)


def require_apart(settings: DataSettings, kind: RecordKind, tell: Tell) -> None:
    """Counts and names rows of data.valid that are rows of data.train, too. Raises UserError: all of them are."""
    train, valid = settings.train, settings.valid
    if valid is None:  # data.holdout parts prompts
        return
    (trained, numbers), (records, rows) = (open_sources(of, settings, kind, None, silent) for of in (train, valid))
    fields = [(records.column(name)[rows], trained.column(name)[numbers]) for name in ("prompt_key", "content_key")]
    has_prompt, is_trained = (np.isin(*each) for each in fields)
    has_prompt &= fields[0][0] != fields[1][0]  # plain text has no prompt
    name = " + ".join(weights_of(valid))
    if is_trained.all():
        raise UserError(
            f"{name}: all {len(rows):,} held-out rows are training rows of {' + '.join(weights_of(train))}, too; name "
            "others with data.valid=FILE, or hold some out with data.holdout=0.1"
        )
    for numbers, what in ((rows[has_prompt], "have a prompt of"), (rows[is_trained], "are rows of")):
        if len(numbers):
            places = ", ".join(map(records.location, numbers[:5])) + ", ..." * (len(numbers) > 5)
            tell(f"{name}: {len(numbers):,} of {len(rows):,} held-out rows {what} the training data ({places})")


def is_held_out(prompt_keys: np.ndarray, holdout: float) -> np.ndarray:
    """Whether each prompt, uint64 [n], is held out: by its hash alone, so that other rows change nothing."""
    return np.asarray(prompt_keys < np.uint64(int(holdout * 2**64)))
