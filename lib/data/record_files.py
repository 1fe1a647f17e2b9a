"""Files of records ➜ records: JSON lines (plain or gzip), a JSON list, CSV, parquet and Arrow.

A line that cannot be read gives Unusable with the reason, so that the caller can name the line.
"""

from __future__ import annotations

import csv
import difflib
import gzip
import hashlib
import itertools
import json
import os.path
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any, cast

from lib.config import read_file
from lib.data.record_formats import JSON, Unusable, name_of_type
from lib.errors import UserError

ENDINGS = (".jsonl", ".json", ".ndjson", ".jsonl.gz", ".json.gz", ".csv", ".tsv", ".parquet", ".arrow")
LINE_BYTES = 8 * 2**20  # a longer record is an error in the file

Line = tuple[int, int, bytes, JSON | Unusable]
"""Number from 1, offset in bytes, raw line (empty where the file has no lines of JSON), record."""


def read(path: str) -> Iterator[tuple[int, JSON | Unusable]]:
    """Yield (line, record) in a file's order; a broken line yields the reason in the record's place. Lines count from
    1: text lines of JSON lines and CSV, rows of tables, items of a list. A file that is damaged in the middle yields
    the reason there, and ends. Raises UserError: the file cannot be opened."""
    require(Path(path))
    for line, _, _, record in scan(Path(path)):
        yield line, record


def cached(cache_dir: str, what: str, key: str) -> Path:
    """The file or folder of data.cache_dir that keeps what is known by a key."""
    return Path(cache_dir) / f"{what}-{hashlib.sha256(key.encode()).hexdigest()[:24]}"


def require(file: Path) -> None:
    """Raises UserError where there is no such file, with a guess at what was meant."""
    if not os.path.exists(file):  # noqa: PTH110  (which takes a name of 5,000 letters)
        beside = [other.name for other in file.parent.iterdir()] if file.parent.is_dir() else []
        near = difflib.get_close_matches(file.name, beside, 1)
        hint = f"; did you mean {file.parent / near[0]}?" if near else f" (looked from {Path.cwd()})"
        raise UserError(f"{file} does not exist{hint}")
    if file.is_dir():
        raise UserError(f"{file} is a folder; name a file: *{', *'.join(ENDINGS)}")
    read_file.require_regular(file, "data file")


def scan(file: Path) -> Iterator[Line]:
    """Every line of a file in its order, without a second one in memory. Raises UserError: it cannot be read."""
    line = 0
    try:
        for line, *content in _lines_of(file):
            yield line, *content  # type: ignore[misc]
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        why = f"the gzip stream is cut short or damaged, or it is none ({error}); copy the file again"
        yield line + 1, 0, b"", Unusable(why)
    except (csv.Error, UnicodeDecodeError) as error:
        yield line + 1, 0, b"", Unusable(f"broken CSV: {error}")
    except OSError as error:
        raise UserError(f"{file} cannot be read: {error.strerror or error}") from error


def _lines_of(file: Path) -> Iterator[Line]:
    if file.suffix in (".parquet", ".arrow"):
        yield from ((line, 0, b"", record) for line, record in read_parquet(file))
    elif file.suffix in (".csv", ".tsv"):  # the first line names the columns; an empty field is none
        with file.open(encoding="utf-8-sig", newline="") as text:
            rows = csv.DictReader(text, delimiter="\t" if file.suffix == ".tsv" else ",")
            for row in rows:  # a column without a name is the index that pandas writes
                record = {name: value for name, value in row.items() if value and name != ""}
                why = Unusable("more fields than columns are named")
                yield rows.line_num, 0, b"", why if None in record else record
    else:
        with cast(IO[bytes], gzip.open(file) if file.suffix == ".gz" else file.open("rb")) as stream:
            start = stream.read(64).removeprefix(b"\xef\xbb\xbf").lstrip() if ".json" in file.suffixes else b""
            stream.seek(0)
            yield from _scan_list(stream) if start.startswith(b"[") else _scan_lines(stream)


def _scan_list(stream: IO[bytes]) -> Iterator[Line]:
    """The items of a file that is one JSON list."""
    try:
        items = json.load(stream)
    except ValueError as error:
        items = [Unusable(f"broken JSON: {error}")]
    for number, item in enumerate(items, 1):
        is_record = isinstance(item, dict | Unusable)
        yield number, 0, b"", item if is_record else Unusable(f"{name_of_type(item)} instead of a JSON object")


def _scan_lines(stream: IO[bytes]) -> Iterator[Line]:
    end = 0
    for line, raw in enumerate(iter(lambda: stream.readline(LINE_BYTES), b""), 1):
        start, end = end, end + len(raw)
        if len(raw) == LINE_BYTES and not raw.endswith(b"\n"):  # never in memory as a whole
            while not raw.endswith(b"\n") and (raw := stream.readline(LINE_BYTES)):
                end += len(raw)
            yield line, start, b"", Unusable(f"a line of {end - start:,} bytes: is a line break missing?")
        elif (text := raw.removeprefix(b"\xef\xbb\xbf") if line == 1 else raw).strip():
            yield line, end - len(text), text, parse_json(text)


def _unique(pairs: list[tuple[str, object]]) -> JSON:
    """An object's fields, of which JSON's reader would silently keep the last of each name."""
    fields = dict(pairs)
    if len(fields) != len(pairs):
        names = [name for name, _ in pairs]
        raise Unusable(f"key {max(names, key=names.count)!r} is there twice in one object; keep one")
    return fields


DECODER = json.JSONDecoder(object_pairs_hook=_unique)  # made once, and not for every line


def parse_json(raw: bytes) -> JSON | Unusable:
    """A line's record, or why there is none."""
    try:
        record = DECODER.decode(raw.decode("utf-8").rstrip())
    except Unusable as why:
        return why
    except UnicodeDecodeError as error:
        hint = "; of UTF-16: iconv -f UTF-16 -t UTF-8 FILE > NEW" if raw.startswith(read_file.UTF_16) else ""
        return Unusable(f"not valid UTF-8: byte 0x{raw[error.start]:02x} at column {error.start + 1}{hint}")
    except json.JSONDecodeError as error:
        return Unusable(f"broken JSON at column {error.colno}: {error.msg}")
    except (ValueError, RecursionError) as error:
        return Unusable(f"broken JSON: {error}")
    if not isinstance(record, dict):
        return Unusable(f"{name_of_type(record)} instead of a JSON object; every line holds one {{...}}")
    return record


def read_parquet(file: Path) -> Iterator[tuple[int, JSON | Unusable]]:
    """Yield (row, record) of parquet or Arrow, rows counted from 1."""
    import pyarrow

    line = 0
    try:
        for line, record in enumerate(itertools.chain.from_iterable(_batches(file)), 1):
            yield line, {name: _without_nulls(value) for name, value in record.items()}
    except (pyarrow.ArrowException, OSError, ValueError, OverflowError, RecursionError) as error:
        if isinstance(error, OSError) and error.errno:  # of the disk, not of the file's content
            raise
        yield (
            line + 1,
            Unusable(f"not a readable {file.suffix[1:]} file: {(str(error).splitlines() or ['damaged'])[0]}"),
        )


def _batches(file: Path) -> Iterator[list[JSON]]:
    import pyarrow.parquet

    if file.suffix == ".arrow":  # of a folder that datasets' save_to_disk wrote
        with pyarrow.OSFile(str(file)) as source:
            yield from (batch.to_pylist() for batch in pyarrow.ipc.open_stream(source))
    else:
        with pyarrow.parquet.ParquetFile(file) as table:
            for group in range(table.metadata.num_row_groups):  # Arrow joins no nested columns of two groups
                yield from (batch.to_pylist() for batch in table.iter_batches(1024, row_groups=[group]))


def _without_nulls(value: Any) -> Any:
    """A value of parquet without the fields that are null: each object of a column has the fields of all of them."""
    if isinstance(value, dict):
        return {name: _without_nulls(item) for name, item in value.items() if item is not None}
    return [_without_nulls(item) for item in value] if isinstance(value, list) else value
