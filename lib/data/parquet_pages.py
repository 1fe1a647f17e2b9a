"""Headers of parquet's pages, held to what the file's footer declares before a reader makes room for them.

A page's header says how many bytes it unpacks to, and readers believe it. The footer, which is read first, says as much
of a whole column of a row group. A page that says more is a lie, and may be of 2 GB. The format:
github.com/apache/parquet-format, PageHeader, in Thrift's compact protocol.
"""

from __future__ import annotations

import bisect
import io
import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import IO, Any

HEADER_BYTES = 2**20  # of a page's header; statistics are in it
DEEPEST = 8  # structures within a header
TYPE, UNPACKED, PACKED = 1, 2, 3  # the fields of a header
OF_KIND = {0: 5, 2: 7, 3: 8}  # by the page's type (data, dictionary, data of version 2): where its own header is
VALUES = 1
BITS = {4: 16, 5: 32, 6: 64}  # of Thrift's integers: of a number of more, a reader takes these alone
BEHIND_BYTES = 100  # old writers leave a page's header out of what the footer says, and Arrow reads so much more


class FalsePage(ValueError):
    """A page is larger than the footer says of its whole column."""


class PageWanted(Exception):
    """A page was to be read of a file of which only the footer is."""


@dataclass
class Chunk:
    """A column of a row group in the file.

    Args:
        name: for people.
        next: where its next page begins.
        end: behind its last page.
        unpacked_bytes, values: what the footer declares.
    """

    name: str
    next: int
    end: int
    unpacked_bytes: int
    values: int


class _Wrapped(io.RawIOBase):
    """A file that is read from the same places as another."""

    def __init__(self, file: IO[bytes]):
        self._file = file

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        return self._file.seek(offset, whence)

    def tell(self) -> int:
        return self._file.tell()


class FooterOnly(_Wrapped):
    """A file of parquet of which nothing can be read once its footer was."""

    is_read = False

    def read(self, size: int = -1) -> bytes:
        """Raises PageWanted where the footer was read before."""
        if self.is_read:
            raise PageWanted
        return self._file.read(size)


class HonestPages(_Wrapped):
    """A file of parquet in which every page is within what its footer declares.

    Args:
        file: is read from the same places as this.
        chunks: all that will be read.

    Raises:
        FalsePage: two of them are at the same place.
    """

    def __init__(self, file: IO[bytes], chunks: Sequence[Chunk]):
        super().__init__(file)
        self._chunks = sorted(chunks, key=lambda chunk: (chunk.next, chunk.end))
        for one, other in itertools.pairwise(self._chunks):
            if one.end > other.next:  # what is read of the one would be looked at as the other's pages
                raise FalsePage(f"{one.name} and {other.name} are at the same place")
        self._starts = [chunk.next for chunk in self._chunks]

    def read(self, size: int = -1) -> bytes:
        """Raises FalsePage where a page begins in these bytes that is larger than it may be."""
        at = self._file.tell()
        data = self._file.read(size)
        first = max(bisect.bisect_right(self._starts, at) - 1, 0)
        for chunk in self._chunks[first : bisect.bisect_left(self._starts, at + len(data))]:
            while at <= chunk.next < min(at + len(data), chunk.end):
                self._pass(chunk, at, data)
        return data

    def _pass(self, chunk: Chunk, at: int, data: bytes) -> None:
        """Looks at a chunk's next page, whose header begins in these bytes, and goes to the one after it."""
        try:
            header, end = struct(data, chunk.next - at)
        except IndexError:  # it goes on behind them
            before = self._file.tell()
            self._file.seek(chunk.next)
            header, end = _whole(self._file.read(HEADER_BYTES), chunk)
            self._file.seek(before)
            end += chunk.next - at
        unpacked, packed = header.get(UNPACKED), header.get(PACKED)
        values: Any
        kind, values = header.get(TYPE), 0
        if isinstance(kind, int) and isinstance(own := header.get(OF_KIND.get(kind, -1)), dict):
            values = own.get(VALUES)
        if not isinstance(unpacked, int) or not isinstance(packed, int) or not isinstance(values, int) or packed < 0:
            raise FalsePage(f"{chunk.name} has a page without a size")
        if packed > chunk.end + BEHIND_BYTES - (at + end):
            raise FalsePage(f"a page of {chunk.name} ends behind it")
        if not 0 <= unpacked <= chunk.unpacked_bytes:
            raise FalsePage(f"a page of {chunk.name} says {unpacked:,} bytes, all of it {chunk.unpacked_bytes:,}")
        # A dictionary may have more values than rows, and each takes a bit at least.
        if not 0 <= values <= max(chunk.values, 8 * unpacked):
            raise FalsePage(f"a page of {chunk.name} says {values:,} values, all of it {chunk.values:,}")
        chunk.next = at + end + packed


def _whole(data: bytes, chunk: Chunk) -> tuple[dict[int, Any], int]:
    try:
        return struct(data, 0)
    except IndexError:
        raise FalsePage(f"{chunk.name} has a page whose header does not end") from None


def struct(data: bytes, at: int, depth: int = 0) -> tuple[dict[int, Any], int]:
    """A structure of Thrift's compact protocol: its fields by number, and where it ends; texts and lists are skipped.

    Raises:
        IndexError: it goes on behind the data.
        FalsePage: it is none.
    """
    fields: dict[int, Any] = {}
    number = 0
    while kind := data[at]:
        delta, at = kind >> 4, at + 1
        if delta:
            number += delta
        else:
            number, at = _number(data, at)
        if number in fields or not 0 < number < 2**15:  # of which a reader may take another, or a part of the number
            raise FalsePage(f"a field {number} that is twice there, or none")
        fields[number], at = _value(data, at, kind & 15, depth)
    return fields, at + 1


def _value(data: bytes, at: int, kind: int, depth: int) -> tuple[Any, int]:
    if depth > DEEPEST:
        raise FalsePage(f"structures and lists nested more than {DEEPEST} deep")
    if kind in (1, 2):
        return kind == 1, at
    if kind == 3:
        return data[at], at + 1
    if kind in BITS:
        number, at = _number(data, at)
        if not -(2 ** (BITS[kind] - 1)) <= number < 2 ** (BITS[kind] - 1):
            raise FalsePage(f"a number of more than {BITS[kind]} bits")
        return number, at
    if kind == 7:
        return None, at + 8
    if kind == 8:
        size, at = _varint(data, at)
        return None, at + size
    if kind in (9, 10):
        head, at = data[at], at + 1
        count, at = (head >> 4, at) if head >> 4 < 15 else _varint(data, at)
        if count > len(data) - at:  # each takes a byte at least
            raise IndexError
        for _ in range(count):
            _, at = _value(data, at + (head & 15 in (1, 2)), head & 15, depth + 1)
        return None, at
    if kind == 12:
        return struct(data, at, depth + 1)
    raise FalsePage(f"a field of the unknown type {kind}")


def _number(data: bytes, at: int) -> tuple[int, int]:
    """A signed integer, in zigzag."""
    value, at = _varint(data, at)
    return (value >> 1) ^ -(value & 1), at


def _varint(data: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte, at = data[at], at + 1
        value |= (byte & 127) << shift
        if byte < 128:
            return value, at
        shift += 7
        if shift > 63:
            raise FalsePage("a number of more than 64 bits")
