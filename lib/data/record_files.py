"""Files of records ➜ records: JSON lines (plain or gzip), a JSON list, CSV and parquet.

A line that cannot be read gives Unusable with the reason, so that the caller can name the line.
"""

from __future__ import annotations

import csv
import difflib
import gzip
import json
import os.path
import zlib
from collections.abc import Collection, Iterable, Iterator
from pathlib import Path
from typing import IO, Any, cast

from lib.config import read_file
from lib.config.settings import DataSettings
from lib.data.formats import columns_read
from lib.data.record_formats import ANSWER, JSON, LINE_BYTES, Columns, RecordKind, Unusable, name_of_type
from lib.errors import UserError

ENDINGS = (".jsonl", ".json", ".ndjson", ".jsonl.gz", ".json.gz", ".csv", ".tsv", ".parquet")
BATCH_ROWS = 1024
# What a file begins with that is no text, and what to do with it.
OTHER_CONTENTS = {
    b"\x1f\x8b": "compressed by gzip, and its name does not say so: mv FILE FILE.gz",
    b"BZh": "compressed by bzip2, and of compressed files .gz is read: bunzip2 FILE",
    b"\x28\xb5\x2f\xfd": "compressed by zstd, and of compressed files .gz is read: unzstd FILE",
    b"\xfd7zXZ": "compressed by xz, and of compressed files .gz is read: unxz FILE",
    b"PK\x03\x04": "a zip archive, and of compressed files .gz is read: unzip FILE",
    **dict.fromkeys(read_file.UTF_16, "UTF-16, where UTF-8 is read: iconv -f UTF-16 -t UTF-8 FILE > NEW"),
}

Line = tuple[int, int, bytes, JSON | Unusable]
"""Number from 1, offset in bytes, raw line (nothing where the file has no lines of JSON), record."""


def read(path: str, settings: DataSettings, kind: RecordKind = "preference") -> Iterator[tuple[int, JSON | Unusable]]:
    """Yield (line, record) in a file's order; a broken line yields the reason in the record's place.

    Lines count from 1: the text line of JSON lines and CSV (blank lines are no records), the row of parquet, the item
    of a list. A file that is damaged in the middle yields the reason there, and ends.

    Raises:
        UserError: the file cannot be opened.
    """
    require(Path(path))
    for line, _, _, record in scan(Path(path), settings, kind):
        yield line, record


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


def scan(file: Path, settings: DataSettings, kind: RecordKind) -> Iterator[Line]:
    """Every line of a file in its order, without a second one in memory.

    Raises:
        UserError: the file cannot be read.
    """
    try:
        if file.suffix == ".parquet":
            yield from ((line, 0, b"", record) for line, record in read_parquet(file, _columns_wanted(settings, kind)))
        elif file.suffix in (".csv", ".tsv"):
            with file.open(encoding="utf-8-sig", newline="") as text:
                yield from _scan_csv(text, "\t" if file.suffix == ".tsv" else ",")
        else:
            with gzip.open(file) if file.suffix == ".gz" else file.open("rb") as stream:
                is_list = ".json" in file.suffixes and _begins_with_bracket(cast(IO[bytes], stream))
                yield from (_scan_list if is_list else _scan_lines)(cast(IO[bytes], stream))
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        yield 1, 0, b"", Unusable(f"the gzip stream is damaged, or it is none ({error}); copy the file again")
    except OSError as error:
        raise UserError(f"{file} cannot be read: {error.strerror or error}") from error


def _columns_wanted(settings: DataSettings, kind: RecordKind) -> Collection[str] | None:
    """The columns of parquet that are read; None for all: a judge gets the whole record, whatever it looks at."""
    return None if kind in ("prompt", "group") else columns_read(Columns.of(settings)) | {ANSWER}


def _begins_with_bracket(stream: IO[bytes]) -> bool:
    try:
        while (start := stream.read(1)).isspace() or start in (b"\xef", b"\xbb", b"\xbf"):
            continue
    finally:
        stream.seek(0)
    return start == b"["


def _scan_list(stream: IO[bytes]) -> Iterator[Line]:
    """The items of a file that is one JSON list."""
    try:
        items = json.load(stream)
    except ValueError as error:
        yield 1, 0, b"", Unusable(f"broken JSON: {error}")
        return
    for number, item in enumerate(items, 1):
        is_object = isinstance(item, dict)
        yield number, 0, b"", item if is_object else Unusable(f"{name_of_type(item)} instead of a JSON object")


def _scan_csv(text: IO[str], delimiter: str) -> Iterator[Line]:
    """The rows of CSV, whose first line names the columns; an empty field is none."""
    reader = csv.DictReader(text, delimiter=delimiter, restkey="", strict=True)
    try:
        for row in reader:
            record = {name: value for name, value in row.items() if value}
            yield reader.line_num, 0, b"", Unusable("more fields than columns are named") if "" in record else record
    except (csv.Error, UnicodeDecodeError) as error:
        yield reader.line_num + 1, 0, b"", Unusable(f"broken CSV: {error}")


def _scan_lines(stream: IO[bytes]) -> Iterator[Line]:
    line = offset = 0
    try:
        while raw := stream.readline(LINE_BYTES + 1):
            line += 1
            size = len(raw)
            if size > LINE_BYTES and not raw.endswith(b"\n"):  # never in memory as a whole
                while not raw.endswith(b"\n") and (raw := stream.readline(LINE_BYTES)):
                    size += len(raw)
                why = f"a line of {size:,} bytes, more than {LINE_BYTES:,}: is a line break missing?"
                yield line, offset, b"", Unusable(why)
            elif line == 1 and (why := next((w for begin, w in OTHER_CONTENTS.items() if raw.startswith(begin)), "")):
                yield line, offset, b"", Unusable(why)
                return
            elif (text := raw.removeprefix(b"\xef\xbb\xbf") if line == 1 else raw).strip():
                yield line, offset + size - len(text), text, parse_json(text)
            offset += size
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        yield line + 1, offset, b"", Unusable(f"the gzip stream is cut short or damaged ({error}); copy the file again")


def _unique(pairs: list[tuple[str, object]]) -> JSON:
    """An object's fields, of which JSON's reader would silently keep the last of each name."""
    fields = dict(pairs)
    if len(fields) != len(pairs):
        twice = next(name for number, (name, _) in enumerate(pairs) if name in dict(pairs[:number]))
        raise Unusable(f"key {twice!r} is there twice in one object; keep one")
    return fields


DECODER = json.JSONDecoder(object_pairs_hook=_unique)  # made once, and not for every line


def parse_json(raw: bytes) -> JSON | Unusable:
    """A line's record, or why there is none."""
    try:
        record = DECODER.decode(raw.decode("utf-8").rstrip())
    except Unusable as why:
        return why
    except UnicodeDecodeError as error:
        return Unusable(f"not valid UTF-8: byte 0x{raw[error.start]:02x} at column {error.start + 1}")
    except json.JSONDecodeError as error:
        return Unusable(f"broken JSON at column {error.colno}: {error.msg}")
    except (ValueError, RecursionError) as error:
        return Unusable(f"broken JSON: {error}")
    if not isinstance(record, dict):
        return Unusable(f"{name_of_type(record)} instead of a JSON object; every line holds one {{...}}")
    return record


def read_parquet(file: Path | IO[bytes], known: Collection[str] | None = None) -> Iterator[tuple[int, JSON | Unusable]]:
    """Yield (row, record), rows counted from 1; columns that are not `known` are null, and not read."""
    import pyarrow
    import pyarrow.parquet

    line = 0
    try:
        with pyarrow.parquet.ParquetFile(file) as table:
            names = table.schema_arrow.names
            wanted = [name for name in names if known is None or name in known]
            for group in range(table.metadata.num_row_groups):  # Arrow joins no nested columns of two groups
                for batch in table.iter_batches(BATCH_ROWS, row_groups=[group], columns=wanted):
                    for row in range(batch.num_rows):
                        line += 1
                        yield line, _row(batch, row, names, wanted)
    except (pyarrow.ArrowException, OSError, RecursionError, UnicodeDecodeError) as error:
        if isinstance(error, OSError) and error.errno:  # of the disk, not of the file's content
            raise
        yield line + 1, Unusable(f"not a readable parquet file: {(str(error).splitlines() or ['damaged'])[0]}")


def _row(batch: Any, row: int, names: list[str], wanted: list[str]) -> JSON | Unusable:
    try:
        values = {name: _without_nulls(batch.column(i)[row].as_py()) for i, name in enumerate(wanted)}
    except UnicodeDecodeError as error:
        return Unusable(f"not valid UTF-8 at byte {error.start + 1} of a string")
    except (ValueError, OverflowError, ArithmeticError) as error:  # a date of the year 200,000
        return Unusable(f"a value that Python has no type for: {error}")
    return dict.fromkeys(names) | values


def _without_nulls(value: Any) -> Any:
    """A value of parquet without the fields that are null: each object of a column has the fields of all of them."""
    if isinstance(value, dict):
        return {name: _without_nulls(item) for name, item in value.items() if item is not None}
    return [_without_nulls(item) for item in value] if isinstance(value, list) else value


def refusal(skipped: Iterable[str], count: int, usable: int = 1) -> str:
    """What is said of records that cannot be used; skipped: `file:line: why`. usable: how many can be."""
    first = next(iter(skipped))
    if not usable:
        return f"{first}; none of its {count:,} records can be used: fix the file"
    total = f"; {count:,} records in all cannot be used" if count > 1 else ""
    return f"{first}{total}; fix the file, or leave them out with data.skip_invalid=true"
