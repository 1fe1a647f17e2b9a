"""A body that comes in chunks ➜ its content (RFC 9112, section 7.1).

h11 takes 30 microseconds for a chunk, whatever is in it, and a client may send each byte in one of its own. Here it is
one, and the chunks of a body are few for its bytes.
"""

from __future__ import annotations

import re

SIZE = re.compile(rb"([0-9A-Fa-f]{1,8})(?:;[\t\x20-\x7e\x80-\xff]*)?[ \t]*\r\n")
SIZE_BYTES = 256  # of a chunk's size with all that may stand behind it
END = re.compile(rb"\r\n\r\n")  # of the last chunk, which has no content, and of the trailers behind it
END_BYTES = 4096
CHUNKS_AT_ONCE = 256
CONTENT_BYTES = 64 * 1024  # at once
FREE_CHUNKS = 1024  # of a body, and one more for each so many bytes of it
BYTES_OF_CHUNK = 16


class FalseChunk(ValueError):
    """What came is no chunk, or one of too many."""


class ChunkedBody:
    """One body; `has_content_ended` when only the last chunk is left, which has none."""

    def __init__(self) -> None:
        self.bytes = self._chunks = 0  # that were taken
        self._left = 0  # bytes of the chunk that has begun
        self._is_inside = self.has_content_ended = False

    def take(self, held: bytearray) -> bytes:
        """Takes what it can off the beginning of what has come, some chunks at most; returns their content.

        Raises:
            FalseChunk: it is none, or they are too many for so few bytes.
        """
        at, size, parts = 0, 0, []
        for _ in range(CHUNKS_AT_ONCE):
            if not self._is_inside:
                begins = SIZE.match(held, at, at + SIZE_BYTES)
                if begins is None:
                    if len(held) - at >= SIZE_BYTES or held.find(b"\n", at) >= 0:
                        raise FalseChunk("a chunk without a size")
                    break
                self._left = int(begins[1], 16)
                if self._left == 0:
                    self.has_content_ended = True
                    break
                self._chunks += 1
                self._is_inside, at = True, begins.end()
            piece = held[at : at + min(self._left, CONTENT_BYTES - size)]
            parts.append(piece)
            at, size, self._left = at + len(piece), size + len(piece), self._left - len(piece)
            line_end = held[at : at + 2]
            if self._left or line_end in (b"", b"\r"):  # the rest comes later
                break
            if line_end != b"\r\n":
                raise FalseChunk("a chunk that is longer than it says")
            self._is_inside, at = False, at + 2
        del held[:at]
        self.bytes += at
        if self._chunks > FREE_CHUNKS + self.bytes // BYTES_OF_CHUNK:
            raise FalseChunk(f"{self._chunks:,} chunks in {self.bytes:,} bytes; send larger ones")
        return b"".join(parts)


def take_end(held: bytearray) -> bytes | None:
    """Takes the last chunk and the trailers off the beginning of what has come; None where they are not whole yet.

    Raises:
        FalseChunk: they are too long.
    """
    end = END.search(held, 0, END_BYTES)
    if end is None:
        if len(held) >= END_BYTES:
            raise FalseChunk("trailers that are too long")
        return None
    taken = bytes(held[: end.end()])
    del held[: end.end()]
    return taken
