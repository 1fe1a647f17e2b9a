"""What somebody else's patterns and templates may take: so many seconds and bytes, and then one clear line."""

from __future__ import annotations

import random
import re
import sys

import pytest

from lib.errors import UserError
from lib.evaluate.judges import extract
from lib.system import limits, patterns

TEXTS = ["", "It is 12.", "a\nb \n\n", "1,200 of 3\u2028x", "ä\ud800é", "x" * 5000, "\r\n \t"]
PATTERNS = [r"([^\s].*?)\s*$", r"(\d+)\.", r"\d+", r"(a)|(b)", r"^", r"(?i)IT", r"\s(\S+)$"]


def test_the_worker_finds_what_re_finds() -> None:
    for pattern in PATTERNS:
        for text in TEXTS:
            matches = list(re.finditer(pattern, text, re.MULTILINE))
            wanted = matches[-1].group(min(1, matches[-1].re.groups)) if matches else None
            assert patterns.last_match(pattern, text) == wanted, (pattern, text)
            assert patterns.is_match(pattern, text) == (re.fullmatch(pattern, text) is not None)


def test_a_group_that_took_no_part_is_no_answer() -> None:
    assert extract("(a)|b", "ab") is None and extract("(a)|b", "ba") == "a"


def test_a_search_without_end_ends_and_the_next_one_works(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(patterns, "SECONDS", 0.3)
    with pytest.raises(UserError, match=r"'\(a\+\)\+\$' takes more than 0.3 s on a text of 41 letters"):
        patterns.last_match("(a+)+$", "a" * 40 + "b")
    with pytest.raises(UserError, match="is no regular expression: .*unterminated"):
        patterns.last_match("(", "a")
    monkeypatch.setattr(patterns, "SECONDS", 60.0)
    assert patterns.last_match("(a+)$", "aab a") == "a"


def test_a_worker_that_is_gone_is_said_and_another_one_starts() -> None:
    assert patterns.is_match("a", "a")
    process = patterns._searcher()._process
    assert process is not None
    process.kill()
    process.wait()
    with pytest.raises(UserError, match="takes more than"):
        patterns.is_match("a", "a")
    assert patterns.is_match("a", "a")


def test_a_block_that_takes_too_long_ends_whatever_it_catches() -> None:
    with pytest.raises(UserError, match=r"it takes more than 0.1 s"), limits.limited_time(0.1, "it"):
        while True:
            try:
                random.random()
            except Exception:
                continue
    with limits.limited_time(60, "it"):
        value = sum(range(10))
    assert value == 45


@pytest.mark.skipif(sys.platform != "linux", reason="macOS limits no addresses")
def test_memory_is_limited_for_a_while() -> None:
    with pytest.raises(MemoryError), limits.limited_memory(2**28):
        bytearray(2**30)
    assert len(bytearray(2**28 + 1)) == 2**28 + 1
