"""Parquet ➜ records, in memory that does not follow from what the file says of itself.

A page of parquet can say in a few bytes that one text of megabytes stands in a million rows. So texts that a file keeps
once are kept once here as well, and are counted before they become Python's; row groups that declare much more than
their bytes can hold are refused, and so are pages that are larger than their row group declares (parquet_pages.py).
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from lib.data.parquet_pages import Chunk, FalsePage, FooterOnly, HonestPages, PageWanted
from lib.data.record_formats import JSON, LINE_BYTES, Unusable
from lib.errors import UserError

if TYPE_CHECKING:
    import pyarrow
    import pyarrow.parquet

BATCH_ROWS = 1024
PLAIN_BYTES = 2**28  # of a column's part of a row group: so much it may always declare
PLAIN_VALUES = 2**25
PLAIN_ROWS = 2**20
MOST_ROWS = 100  # of a byte, of all columns that are read
MOST_EXPANSION = 1000  # times its compressed bytes: zstd makes a third of that of text that repeats itself


def read_parquet(file: Path | IO[bytes], known: Collection[str] | None = None) -> Iterator[tuple[int, JSON | Unusable]]:
    """Yield (row, record); the columns that are not `known` are named, and not read."""
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError as error:
        raise UserError(f"{file}: reading parquet needs pyarrow; run pip install pyarrow") from error
    line, unpacked = 0, 0
    try:
        with _opened(file) as raw:
            footer = FooterOnly(raw)
            with pyarrow.parquet.ParquetFile(footer, pre_buffer=False) as table:
                names, metadata = table.schema_arrow.names, table.metadata
                wanted = [name for name in names if known is None or name in known]
                _check_columns(table, footer, wanted)
        if (why := _expansion(metadata, wanted)) is not None:
            yield 1, Unusable(why)
            return
        packed = sum(column.total_compressed_size for _, _, column in _columns(metadata, wanted))
        if metadata.num_rows > max(PLAIN_ROWS, MOST_ROWS * packed):
            yield 1, Unusable(f"{metadata.num_rows:,} rows in {packed:,} bytes: no data has")
            return
        # Not read in advance: a row group may be of any size.
        options = {"read_dictionary": _kept_once(metadata, wanted), "pre_buffer": False, "buffer_size": 2**20}
        with _opened(file) as raw, _of_pages(raw, metadata, wanted, options) as table:
            for batch in _batches(table, wanted, _batch_rows(metadata, wanted)):
                unpacked += sum(map(_bytes, batch.columns))
                if unpacked > max(PLAIN_BYTES, MOST_EXPANSION * packed):
                    why = f"{unpacked:,} bytes up to row {line + batch.num_rows:,} come of {packed:,} in the file"
                    yield line + 1, Unusable(f"{why}: no data does")
                    return
                for values in _rows(batch, wanted):
                    line += 1
                    yield line, values if isinstance(values, Unusable) else dict.fromkeys(names) | values
    except FalsePage as lie:
        yield line + 1, Unusable(f"{lie}: no data does")
    except (pyarrow.ArrowException, OSError, RecursionError, UnicodeDecodeError) as error:
        if isinstance(error, OSError) and error.errno:  # of the disk, not of the file's content
            raise
        yield line + 1, Unusable(f"not a readable parquet file: {(str(error).splitlines() or ['damaged'])[0]}")


def _opened(file: Path | IO[bytes]) -> contextlib.AbstractContextManager[IO[bytes]]:
    """The file, to be read from its beginning; one that was open stays so."""
    if isinstance(file, Path):
        return file.open("rb")
    file.seek(0)
    return contextlib.nullcontext(file)


def _of_pages(
    file: IO[bytes], metadata: pyarrow.parquet.FileMetaData, wanted: Collection[str], options: dict[str, Any]
) -> pyarrow.parquet.ParquetFile:
    """The same file, none of whose pages is larger than the footer says.

    Raises:
        FalsePage: when such a page is read.
    """
    import pyarrow.parquet

    chunks = []
    for group, path, column in _columns(metadata, wanted):
        begin, dictionary = column.data_page_offset, column.dictionary_page_offset
        if dictionary is not None and 0 < dictionary < begin:  # the first page, as Arrow finds it
            begin = dictionary
        name, end = f"{path!r} of row group {group}", begin + column.total_compressed_size
        chunks.append(Chunk(name, begin, end, column.total_uncompressed_size, column.num_values))
    return pyarrow.parquet.ParquetFile(HonestPages(file, chunks), **options)


def _batches(table: pyarrow.parquet.ParquetFile, wanted: list[str], rows: int) -> Iterator[pyarrow.RecordBatch]:
    """So many rows at once, of one row group: Arrow joins no nested columns of two."""
    for group in range(table.metadata.num_row_groups):
        yield from table.iter_batches(batch_size=rows, row_groups=[group], columns=wanted)


def _batch_rows(metadata: pyarrow.parquet.FileMetaData, wanted: Collection[str]) -> int:
    """So many rows at once that texts which each repeat the one before (DELTA_BYTE_ARRAY) fit when written out."""
    longest = [
        column.total_uncompressed_size  # of one text, at most
        for _, _, column in _columns(metadata, wanted)
        if "DELTA_BYTE_ARRAY" in column.encodings
    ]
    return max(1, min(BATCH_ROWS, PLAIN_BYTES // max(1, max(longest)))) if longest else BATCH_ROWS


def _expansion(metadata: pyarrow.parquet.FileMetaData, wanted: Collection[str]) -> str | None:
    """Why a file would take more memory than one may expect of its size; None where it would not."""
    for group, path, column in _columns(metadata, wanted):
        packed = max(column.total_compressed_size, 1)
        what = f"{path!r} of row group {group}"
        if column.total_uncompressed_size > max(PLAIN_BYTES, MOST_EXPANSION * packed):
            return f"{what} declares {column.total_uncompressed_size:,} bytes in {packed:,}: no data does"
        if column.num_values > max(PLAIN_VALUES, MOST_EXPANSION * packed):
            return f"{what} declares {column.num_values:,} values in {packed:,} bytes: no data does"
    return None


def _kept_once(metadata: pyarrow.parquet.FileMetaData, wanted: Collection[str]) -> list[str]:
    """The columns of texts that the file keeps in dictionaries."""
    return sorted(
        {
            path
            for _, path, column in _columns(metadata, wanted)
            if column.physical_type == "BYTE_ARRAY" and any("DICTIONARY" in name for name in column.encodings)
        }
    )


def _columns(
    metadata: pyarrow.parquet.FileMetaData, wanted: Collection[str]
) -> Iterator[tuple[int, str, pyarrow.parquet.ColumnChunkMetaData]]:
    """Each wanted column of each row group: the group, its path, what the footer says. `_check_columns` comes first."""
    for group in range(metadata.num_row_groups):
        for index, path in _paths(metadata, wanted):
            yield group, path, metadata.row_group(group).column(index)


def _check_columns(table: pyarrow.parquet.ParquetFile, footer: FooterOnly, wanted: Collection[str]) -> None:
    """Has Arrow look at what the footer says of each column where its errors become Python's: on the way to a page.

    What it finds wrong when `RowGroupMetaData.column` asks for the same (histograms of a wrong length, an encrypted
    column) is an exception of C++ that ends the process (pyarrow 26).

    Raises:
        ArrowException, OSError: it found something.
    """
    footer.is_read = True
    for group in range(table.metadata.num_row_groups):
        for index, _ in _paths(table.metadata, wanted):
            with contextlib.suppress(PageWanted):
                next(table.reader.iter_batches(1, row_groups=[group], column_indices=[index], use_threads=False), None)


def _paths(metadata: pyarrow.parquet.FileMetaData, wanted: Collection[str]) -> list[tuple[int, str]]:
    """Index and path of the wanted columns, by the schema: that is what is read, whatever a column calls itself."""
    paths = [metadata.schema.column(index).path for index in range(metadata.num_columns)]
    return [(i, path) for i, path in enumerate(paths) if path in wanted or path.partition(".")[0] in wanted]


def _rows(batch: pyarrow.RecordBatch, names: list[str]) -> Iterator[JSON | Unusable]:
    """The rows of a batch; of one that is too long the reason. Few become Python's at once, where they are long."""
    size = sum(_bytes(column) for column in batch.columns)
    if size > LINE_BYTES and batch.num_rows > 1:
        half = batch.num_rows // 2
        yield from _rows(batch.slice(0, half), names)
        yield from _rows(batch.slice(half), names)
        return
    if size > LINE_BYTES:
        yield Unusable(f"a row of {size:,} bytes, more than {LINE_BYTES:,}")
        return
    for row in range(batch.num_rows):
        try:
            yield {name: _without_nulls(batch.column(i)[row].as_py()) for i, name in enumerate(names)}
        except UnicodeDecodeError as error:
            yield Unusable(f"not valid UTF-8 at byte {error.start + 1} of a string")
        except (ValueError, OverflowError, ArithmeticError) as error:  # a date of the year 200,000
            yield Unusable(f"a value that Python has no type for: {error}")


def _bytes(array: pyarrow.Array) -> int:
    """What an array's values take where each is written out."""
    import pyarrow
    import pyarrow.compute as compute

    kind = array.type
    if pyarrow.types.is_dictionary(kind):
        lengths = compute.binary_length(array.dictionary)
        return compute.sum(lengths.take(array.indices)).as_py() or 0
    if pyarrow.types.is_struct(kind):
        return sum(map(_bytes, array.flatten()))
    if isinstance(array, pyarrow.MapArray):
        return _bytes(array.keys) + _bytes(array.items)
    if pyarrow.types.is_list(kind) or pyarrow.types.is_large_list(kind) or pyarrow.types.is_fixed_size_list(kind):
        return _bytes(array.flatten())
    size: int = array.nbytes
    return size


def _without_nulls(value: Any) -> Any:
    """A value of parquet without the fields that are null: each object of a column has the fields of all of them.

    Items of lists stay: a list has only what was written.
    """
    if isinstance(value, dict):
        return {name: _without_nulls(item) for name, item in value.items() if item is not None}
    return [_without_nulls(item) for item in value] if isinstance(value, list) else value
