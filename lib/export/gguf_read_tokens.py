"""Token ids of texts by a GGUF file, as llama.cpp makes them of its tokens, kinds, merges and scores."""

from __future__ import annotations

import heapq
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import regex

from lib.export.gguf_reader import GgufModel
from lib.export.gguf_splitters import KNOWN

CONTROL, USER_DEFINED, UNKNOWN = 3, 4, 2  # gguf.TokenType
PHI3 = ("phi-3", "phi3")  # in a model's name: its special tokens swallow the white space behind them
NEVER_STRIP = ("<unk>", "<s>", "<|endoftext|>")  # but not these


@dataclass(frozen=True)
class GgufTokens:
    """The tokenizer of a file.

    Raises:
        KeyError: of a splitter that is not among those known here.
    """

    model: GgufModel

    def __call__(self, text: str) -> list[int]:
        """The ids of a text, without what opens or closes one; special tokens in it are taken as such."""
        ids: list[int] = []
        is_first = True  # or stands behind a special token
        for part in self._special.split(text) if self._special is not None else [text]:
            if part in self._special_ids:
                ids.append(self._special_ids[part])
                is_first = True
            elif part:
                ids += self._ids(part, is_first)
                is_first = False
        return ids

    @cached_property
    def _special_ids(self) -> dict[str, int]:
        kinds = self.model.field("tokenizer.ggml.token_type")
        return {
            token: index
            for index, (token, kind) in enumerate(zip(self._tokens, kinds, strict=True))
            if kind in (CONTROL, USER_DEFINED, UNKNOWN)
        }

    @cached_property
    def _special(self) -> regex.Pattern[str] | None:
        """The special tokens, the longest first."""
        if not self._special_ids:
            return None
        name = str(self.model.field("general.name", "")).lower()
        parts = sorted(self._special_ids, key=len, reverse=True)
        strip = [part for part in parts if any(each in name for each in PHI3) and part not in NEVER_STRIP]
        kinds = ((strip, r"\s*"), ([part for part in parts if part not in strip], ""))
        patterns = [f"({'|'.join(map(regex.escape, some))}){space}" for some, space in kinds if some]
        return regex.compile(f"(?|{'|'.join(patterns)})")  # the group is the first one in each branch

    @cached_property
    def _is_sentencepiece(self) -> bool:
        return bool(self.model.field("tokenizer.ggml.model") == "llama")

    @cached_property
    def _tokens(self) -> list[str]:
        tokens: list[str] = self.model.field("tokenizer.ggml.tokens")
        return tokens

    @cached_property
    def _id_of(self) -> dict[str, int]:
        return {token: index for index, token in enumerate(self._tokens)}

    def _ids(self, text: str, is_first: bool) -> list[int]:
        """The ids of a text without special tokens."""
        if self._is_sentencepiece:
            space = " " if is_first and self.model.field("tokenizer.ggml.add_space_prefix", True) else ""
            symbols = merged(list((space + text).replace(" ", "▁")), self._score)
            return [index for symbol in symbols for index in self._of_symbol(symbol)]
        splitter = KNOWN[self.model.field("tokenizer.ggml.pre")].splitter
        words = [text]
        for pattern in splitter.patterns:
            words = [part for word in words for part in _pieces(pattern, word)]
        ids = []
        for word in words:
            spelt = "".join(BYTES[byte] for byte in word.encode())
            is_whole = splitter.ignores_merges and spelt in self._id_of
            symbols = [spelt] if is_whole else merged(list(spelt), self._rank)
            ids += [index for symbol in symbols for index in self._of_symbol(symbol)]
        return ids

    def _score(self, left: str, right: str) -> float | None:
        """How soon SentencePiece makes one token of two, the lowest first; None where there is no such token."""
        index = self._id_of.get(left + right)
        return None if index is None else -self._scores[index]

    @cached_property
    def _scores(self) -> list[float]:
        scores: list[float] = self.model.field("tokenizer.ggml.scores")
        return scores

    def _rank(self, left: str, right: str) -> float | None:
        return self._ranks.get((left, right))

    @cached_property
    def _ranks(self) -> dict[tuple[str, str], int]:
        merges = (merge.partition(" ") for merge in self.model.field("tokenizer.ggml.merges", []))
        return {(left, right): rank for rank, (left, _, right) in enumerate(merges)}

    def _of_symbol(self, symbol: str) -> list[int]:
        """A symbol's id, or those of its bytes, of which a small vocabulary may lack some."""
        if symbol in self._id_of:
            return [self._id_of[symbol]]
        spelt = [f"<0x{byte:02X}>" for byte in symbol.encode()] if self._is_sentencepiece else list(symbol)
        return [self._id_of[byte] for byte in spelt if byte in self._id_of]


def merged(symbols: list[str], place: Callable[[str, str], float | None]) -> list[str]:
    """Symbols with neighbours merged, again and again those of the lowest place, the leftmost first."""
    following = [*range(1, len(symbols)), -1]
    before = [*range(-1, len(symbols) - 1)]
    queue: list[tuple[float, int, str]] = []

    def offer(left: int) -> None:
        right = following[left] if left >= 0 else -1
        if right >= 0 and (at := place(symbols[left], symbols[right])) is not None:
            heapq.heappush(queue, (at, left, symbols[left] + symbols[right]))

    for left in range(len(symbols) - 1):
        offer(left)
    while queue:
        _, left, text = heapq.heappop(queue)
        right = following[left]
        if not symbols[left] or right < 0 or symbols[left] + symbols[right] != text:
            continue  # one of the two was merged with another since
        symbols[left], symbols[right] = text, ""
        following[left] = following[right]
        if following[right] >= 0:
            before[following[right]] = left
        offer(before[left])
        offer(left)
    return [symbol for symbol in symbols if symbol]


def _pieces(pattern: str, text: str) -> list[str]:
    """A text cut into the matches of a pattern and what lies between them."""
    pieces, end = [], 0
    for match in regex.finditer(pattern, text):
        pieces += [text[end : match.start()], match.group()]
        end = match.end()
    return [piece for piece in [*pieces, text[end:]] if piece]


def _printable() -> dict[int, str]:
    """GPT-2's letter for each byte: itself where it is printable, else one from 256 on."""
    kept = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    letters = {byte: chr(byte) for byte in kept}
    rest = [byte for byte in range(256) if byte not in letters]
    return letters | {byte: chr(256 + number) for number, byte in enumerate(rest)}


BYTES = _printable()
