"""Bodies in chunks: whatever comes, and however it is cut, the content is h11's, or there is none."""

from __future__ import annotations

import re

import h11
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lib.serve.chunked_body import BYTES_OF_CHUNK, CHUNKS_AT_ONCE, FREE_CHUNKS, ChunkedBody, FalseChunk, take_end

HEAD = b"POST / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n"
EXTENSIONS = st.sampled_from([b"", b"", b";a", b';a="b c"', b" ", b"\t;x=y", b";\x00", b"; a\n"])
TRAILERS = st.sampled_from([b"\r\n", b"\r\n", b"A: b\r\n\r\n", b"A : b\r\n\r\n", b"\n\r\n", b"\r\nGET"])


def ours(sent: bytes, cuts: list[int]) -> bytes | None:
    """The content, of a stream that comes in pieces; None where it is refused, or does not end."""
    body, held, content = ChunkedBody(), bytearray(), b""
    places = [0, *sorted(cut for cut in cuts if cut < len(sent)), len(sent)]
    try:
        for begin, end in zip(places, places[1:], strict=False):
            held += sent[begin:end]
            before = -1
            while len(held) != before and not body.has_content_ended:
                before = len(held)
                content += body.take(held)
            if body.has_content_ended and (last := take_end(held)) is not None:
                return content if theirs(last) == b"" else None  # h11 reads that itself
    except FalseChunk:
        return None
    return None


def theirs(sent: bytes) -> bytes | None:
    """The same by h11."""
    connection, content = h11.Connection(h11.SERVER), b""
    connection.receive_data(HEAD + sent)
    try:
        while True:
            event = connection.next_event()
            if isinstance(event, h11.Data):
                content += event.data
            elif isinstance(event, h11.EndOfMessage):
                return content
            elif event is h11.NEED_DATA:
                return None
    except h11.RemoteProtocolError:
        return None


@st.composite
def streams(draw: st.DrawFn) -> bytes:
    """Chunks, most of them as they should be."""
    sent = b""
    for content in draw(st.lists(st.binary(min_size=1, max_size=40), max_size=6)):
        size = len(content) + draw(st.sampled_from([0] * 12 + [1, -1]))
        digits = draw(st.sampled_from(["%x", "%X", "%04x"])) % size
        line_end = draw(st.sampled_from([b"\r\n"] * 9 + [b"\n"]))
        sent += digits.encode() + draw(EXTENSIONS) + b"\r\n" + content + line_end
    return sent + draw(st.sampled_from([b"0", b"0", b"000", b"0;a"])) + b"\r\n" + draw(TRAILERS)


@given(streams(), st.lists(st.integers(1, 300), max_size=6))
def test_the_content_is_h11s_or_there_is_none(sent: bytes, cuts: list[int]) -> None:
    mine, exact = ours(sent, cuts), theirs(sent)
    assert mine is None or mine == exact
    if exact is not None and not re.search(rb";|(?<!\r)\n", sent):  # not all of what may stand behind a size is taken
        assert mine == exact


def test_a_chunk_of_its_own_for_each_byte_is_taken_for_a_while() -> None:
    few, many = b"1\r\nx\r\n" * FREE_CHUNKS, b"1\r\nx\r\n" * 4 * FREE_CHUNKS
    assert ours(few + b"0\r\n\r\n", []) == b"x" * FREE_CHUNKS
    assert ours(many + b"0\r\n\r\n", []) is None
    long = b"%x\r\n%s\r\n" % (BYTES_OF_CHUNK, b"y" * BYTES_OF_CHUNK)
    assert ours(long * 3 * FREE_CHUNKS + b"0\r\n\r\n", [7, 99]) == b"y" * BYTES_OF_CHUNK * 3 * FREE_CHUNKS
    body, held = ChunkedBody(), bytearray(few)
    assert body.take(held) == b"x" * CHUNKS_AT_ONCE, "others have a turn in between"


@pytest.mark.parametrize(
    "sent", [b"1" * 300, b"x\r\n", b"-1\r\n", b"123456789\r\n", b"1;" + b"a" * 300, b"2\r\nabc\r\n"]
)
def test_what_is_no_chunk_is_refused_at_once(sent: bytes) -> None:
    with pytest.raises(FalseChunk):
        ChunkedBody().take(bytearray(sent))


def test_trailers_without_end_are_refused() -> None:
    assert take_end(bytearray(b"0\r\nA: b\r\n")) is None
    with pytest.raises(FalseChunk):
        take_end(bytearray(b"0\r\n" + b"A: b\r\n" * 1000))
