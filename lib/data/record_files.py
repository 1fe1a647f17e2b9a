"""Files of records: JSON lines (plain or gzip) and parquet ➜ records, line by line.

A line that cannot be read gives Unusable with the reason, so that the caller can name the line.
"""

from __future__ import annotations

import difflib
import gzip
import json
import shlex
import zlib
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, cast

from lib.config import read_file
from lib.config.settings import DataSettings
from lib.data.formats import columns_read
from lib.data.record_formats import ANSWER, JSON, LINE_BYTES, TOKEN_COLUMNS, Columns, RecordKind, Unusable, name_of_type
from lib.errors import UserError

if TYPE_CHECKING:
    pass

BATCH_ROWS = 1024


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
    """A value of parquet without the fields that are null: each object of a column has the fields of all of them.

    Items of lists stay: a list has only what was written.
    """
    if isinstance(value, dict):
        return {name: _without_nulls(item) for name, item in value.items() if item is not None}
    return [_without_nulls(item) for item in value] if isinstance(value, list) else value


# What a compressed file begins with, and what to do with it.
PACKED = {
    b"\x1f\x8b": "compressed by gzip, and its name does not say so: mv FILE FILE.gz",
    b"BZh": "compressed by bzip2, and of compressed files .gz is read: bunzip2 FILE",
    b"\x28\xb5\x2f\xfd": "compressed by zstd, and of compressed files .gz is read: unzstd FILE",
    b"\xfd7zXZ": "compressed by xz, and of compressed files .gz is read: unxz FILE",
    b"PK\x03\x04": "a zip archive, and of compressed files .gz is read: unzip FILE",
}


def require(file: Path) -> None:
    """Raises UserError where there is no such file (with a guess at what was meant), or it is a CSV file."""
    try:
        exists = file.exists()
    except OSError as error:  # a name of 5,000 letters
        raise UserError(f"data file {str(file)[:200]}: {error.strerror}") from None
    if not exists:
        near = difflib.get_close_matches(file.name, _names_beside(file), 1)
        if file.is_symlink():
            raise UserError(f"{file} is a link to {file.readlink()}, which does not exist; link it anew")
        hint = f"; did you mean {file.parent / near[0]}?" if near else f" (looked from {Path.cwd()})"
        raise UserError(f"{file} does not exist{hint}")
    read_file.require_regular(file, "data file")
    if file.suffix in (".csv", ".tsv"):
        tabs = ', delimiter="\\t"' if file.suffix == ".tsv" else ""
        code = f"import csv, json, sys; [print(json.dumps(row)) for row in csv.DictReader(open(sys.argv[1]){tabs})]"
        source, target = (shlex.quote(str(name)) for name in (file, file.with_suffix(".jsonl")))
        kind = file.suffix[1:].upper()
        raise UserError(
            f"{file}: {kind} is not read; JSON lines are made of it by: python3 -c '{code}' {source} > {target}"
        )


def read(path: str, settings: DataSettings, kind: RecordKind = "preference") -> Iterator[tuple[int, JSON | Unusable]]:
    """Yield (line, record) in a file's order; a broken line yields the reason in the record's place.

    Lines count from 1: the text line of JSON lines (blank lines are no records), the row of parquet. A file that is
    damaged in the middle yields the reason there, and ends. Raises UserError where the file cannot be opened.
    """
    file = Path(path)
    if file.is_dir():
        raise UserError(f"{path} is a folder; name a file: .jsonl, .jsonl.gz or .parquet")
    require(file)
    for line, _, _, record in scan(file, settings, kind, with_raw=False):
        yield line, record


def scan(
    file: Path, settings: DataSettings, kind: RecordKind, with_raw: bool = True
) -> Iterator[tuple[int, int, bytes, JSON | Unusable]]:
    """Yield (line, offset in bytes, raw line, record) in a file's order; of parquet each row as a line of JSON."""
    try:
        if file.suffix == ".parquet":
            for line, record in read_parquet(file, _columns_wanted(settings, kind)):
                values = {} if isinstance(record, Unusable) else {k: v for k, v in record.items() if v is not None}
                yield line, 0, json.dumps(values, default=str).encode() if with_raw else b"", record
        elif file.suffix == ".gz":
            with gzip.open(file, "rb") as stream:
                yield from scan_json_lines(cast(IO[bytes], stream))
        else:
            with file.open("rb") as stream:
                yield from scan_json_lines(stream)
    except OSError as error:
        raise UserError(f"{file} cannot be read: {error.strerror or str(error).splitlines()[0]}") from error


def _columns_wanted(settings: DataSettings, kind: RecordKind) -> set[str] | None:
    """The columns of parquet that are read; None for all: a judge gets the whole record, whatever it looks at."""
    if kind in ("prompt", "group"):
        return None
    return {*columns_read(Columns.of(settings)), *TOKEN_COLUMNS, ANSWER}


def refusal(first: str, count: int, usable: int = 1) -> str:
    """What is said of records that cannot be used; first: `file:line: why`. usable: how many can be."""
    total = f"; {count:,} records in all cannot be used" if count > 1 else ""
    if not usable:
        return f"{first}; none of its {count:,} records can be used: fix the file"
    return f"{first}{total}; fix the file, or leave them out with data.skip_invalid=true"


def nothing_in(path: str, first: str, count: int) -> str:
    """What is said of a source without a usable record."""
    if count:
        return f"{path}: none of its {count:,} records can be used, the first: {first}"
    return f"{path} is empty: it has no records; name another file"


def _names_beside(file: Path) -> list[str]:
    try:
        return [other.name for other in file.parent.iterdir()]
    except OSError:
        return []


def scan_json_lines(stream: IO[bytes]) -> Iterator[tuple[int, int, bytes, JSON | Unusable]]:
    """Yield (line, offset in bytes, raw line, record); a damaged gzip stream yields its reason, and ends."""
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
                offset += size
                continue
            if line == 1 and raw.startswith(read_file.UTF_16):
                yield line, offset, b"", Unusable("UTF-16, where UTF-8 is read: iconv -f UTF-16 -t UTF-8 FILE > NEW")
                return
            packed = next((why for begins, why in PACKED.items() if line == 1 and raw.startswith(begins)), None)
            if packed is not None:
                yield line, offset, b"", Unusable(packed)
                return
            if line == 1 and raw.startswith(b"\xef\xbb\xbf"):
                raw, offset, size = raw[3:], offset + 3, size - 3
            if raw.strip():
                yield line, offset, raw, parse_json(raw)
            offset += size
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        why = f"the gzip stream is cut short or damaged ({error}); copy the file again"
        if line == 0 and isinstance(error, gzip.BadGzipFile):
            why = "not gzip, whatever its name says; take .gz off the name"
        yield line + 1, offset, b"", Unusable(why)


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
    except Unusable as unusable:
        return unusable
    except UnicodeDecodeError as error:
        return Unusable(f"not valid UTF-8: byte 0x{raw[error.start]:02x} at column {error.start + 1}")
    except json.JSONDecodeError as error:
        if raw.strip() == b"[":
            return Unusable("a list begins here, and every line has to hold one {...}: jq -c '.[]' FILE makes them")
        return Unusable(f"broken JSON at column {error.colno}: {error.msg}")
    except (ValueError, RecursionError) as error:
        return Unusable(f"broken JSON: {error}")
    if not isinstance(record, dict):
        made = ": jq -c '.[]' FILE makes them" if isinstance(record, list) else ""
        return Unusable(f"{name_of_type(record)} instead of a JSON object; every line holds one {{...}}{made}")
    return record
