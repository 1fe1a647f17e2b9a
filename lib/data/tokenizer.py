"""The tokenizer of a model's folder, and the ids that the model knows."""

from __future__ import annotations

import functools
import hashlib
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, TypeAlias

from lib.config.settings import ModelSettings
from lib.data.record_formats import JSON, Unusable
from lib.errors import UserError
from lib.system.model_folder import end_ids, resolve, why_unreadable

LARGEST_ID = 2**31  # ids are int32


@dataclass(frozen=True)
class Vocabulary:
    """What a model, or all that see the same rows, knows of ids and positions."""

    eos_token_id: int | None = None
    vocab_size: int | None = None  # ids from there on are refused; None takes any
    positions: int | None = None  # rows of a table of learned positions; None for a model without one
    context: int | None = None  # max_position_embeddings: what the model was made for

    def check_ids(self, pieces: Iterable[Sequence[int]]) -> None:
        """Raises Unusable where a token, 0 or more, has no row in the model's embedding."""
        limit, largest = self.vocab_size or LARGEST_ID, max(map(max, filter(None, pieces)), default=0)
        if largest >= limit:
            raise Unusable(f"token id {largest} is not below the vocabulary's size, {limit}")

    def check_row(self, tokens: int, remedy: str | None = None) -> None:
        """Raises Unusable for a row with too many tokens. The last one is predicted: it needs no position."""
        if self.positions is not None and tokens - 1 > self.positions:
            raise Unusable(
                f"a row of {tokens} tokens is longer than the {self.positions} positions of the model's table; "
                f"{remedy or f'set data.max_length={self.positions}'}"
            )

    def check_answer(self, prompt_tokens: int, max_tokens: int, setting: str) -> None:
        """Raises Unusable for a prompt whose answer, of max_tokens by that setting, would end beyond the table."""
        if self.positions is None or prompt_tokens + max_tokens - 1 <= self.positions:
            return
        room = self.positions + 1 - prompt_tokens
        raise Unusable(
            f"a prompt of {prompt_tokens} tokens and {setting}={max_tokens} are more than the {self.positions} "
            f"positions of the model's table; {f'set {setting}={room} or less' if room > 0 else 'leave it out'}"
        )

    def row_tokens(self, max_length: int) -> int:
        """The most tokens of a row, by data.max_length and by the table."""
        return max_length if self.positions is None else min(max_length, self.positions + 1)


NO_LIMITS = Vocabulary()
Tokenizer: TypeAlias = Any  # of transformers, or mlx-lm's TokenizerWrapper around one


class TextTokens:
    """A tokenizer, asked for the ids of texts alone: no special tokens that open or close one."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        # mlx-lm's wrapper passes attributes on, but cannot be called; the tokenizer inside it can.
        self.inner: Any = tokenizer if callable(tokenizer) else getattr(tokenizer, "_tokenizer", None)
        self.is_fast = self.inner is not None and getattr(self.inner, "is_fast", False)
        self._is_blank: dict[int, bool] = {}
        self._kept = functools.lru_cache(maxsize=64)(self._ask)  # a prompt is asked for with each of its completions
        if self.is_fast:
            self.ids("")  # transformers sets it up when it is first asked, which no two threads may do at once

    def _ask(self, text: str) -> tuple[int, ...]:
        if not self.is_fast:
            return tuple(self.tokenizer.encode(text, add_special_tokens=False))
        options = {"add_special_tokens": False, "return_attention_mask": False, "verbose": False}
        return tuple(self.inner(text, **options)["input_ids"])

    def ids(self, text: str) -> list[int]:
        """Ids of a text."""
        return list(self._kept(text))

    def starts(self, text: str) -> tuple[list[int], list[int]]:
        """Ids of a text, and for each the character that it begins at; a slow tokenizer is asked by prefixes."""
        if self.is_fast:
            options = {"add_special_tokens": False, "return_offsets_mapping": True, "verbose": False}
            encoding = self.inner(text, **options)
            return encoding["input_ids"], [start for start, _ in encoding["offset_mapping"]]
        ids, begins = self.ids(text), [0]
        for count in range(1, len(ids)):
            begins.append(max(begins[-1], len(self.tokenizer.decode(ids[:count]))))
        return ids, begins[: len(ids)]

    def behind(self, text: str, start: int) -> list[int]:
        """The ids that stand behind text[:start] in the tokens of the whole text. Where a token reaches over `start`,
        the rest is tokenised as a continuation, as a model goes on from there."""
        head, ids = self.ids(text[:start]), self.ids(text)
        return ids[len(head) :] if ids[: len(head)] == head else self.continued(text[start:])

    def continued(self, text: str) -> list[int]:
        """Ids of a text as the continuation of another."""
        for anchor in self._anchors:
            before, ids = self.ids(anchor), self.ids(anchor + text)
            if ids[: len(before)] == before:  # "\n" and "\n42" may share a token
                return ids[len(before) :]
        return self.ids(text)

    def is_blank(self, token: int) -> bool:
        """Whether a token is nothing but white space."""
        if token not in self._is_blank:
            self._is_blank[token] = not self.tokenizer.decode([token]).strip() and token not in self.special
        return self._is_blank[token]

    @cached_property
    def added(self) -> dict[int, Any]:
        """The tokens that were added to the vocabulary, by id."""
        return getattr(self.tokenizer, "added_tokens_decoder", {})

    @cached_property
    def special(self) -> dict[int, str]:
        """The special ones of them."""
        return {index: token.content for index, token in self.added.items() if token.special}

    @cached_property
    def opening(self) -> list[int]:
        """The special tokens that the tokenizer puts before a text (BOS, mostly)."""
        with_special = list(self.tokenizer.encode("a"))
        plain = self.ids("a")
        bos_token_id = getattr(self.tokenizer, "bos_token_id", None)
        if not plain:
            return with_special[:1] if with_special[:1] == [bos_token_id] else []
        starts = range(len(with_special) - len(plain) + 1)
        return with_special[: next((i for i in starts if with_special[i : i + len(plain)] == plain), 0)]

    @cached_property
    def _anchors(self) -> tuple[str, ...]:
        """Texts to put before a continuation, where SentencePiece opens every text with a space."""
        return () if self.ids("\n") + self.ids("a") == self.ids("\na") else ("\n", "a")


# Text of many kinds: where two tokenizers are to be distinguished, its tokens have to do.
SPECIMEN = "The quick brown fox jumps over 13 lazy dogs. Ünïcödé, 漢字, кириллица;\n\tdef f(x): return x ** 2  # 🦊"


def load_tokenizer_of(settings: ModelSettings) -> Tokenizer | None:
    """mlx-lm's tokenizer of the model's folder, None without. Raises UserError: its files cannot be loaded."""
    folder = resolve(settings.path, settings.revision)
    names = ("tokenizer.json", "tokenizer.model", "tokenizer_config.json", "vocab.json", "tiktoken.model")
    if not any((folder / name).exists() for name in names):
        return None
    from mlx_lm.utils import load_tokenizer  # not before mpi_and_blas.prepare

    try:
        return load_tokenizer(
            folder, {"trust_remote_code": settings.trust_remote_code}, eos_token_ids=sorted(end_ids(folder)) or None
        )
    except Exception as error:  # transformers raises whatever its parser met
        raise UserError(
            f"model.path {settings.path}: its tokenizer cannot be loaded: {why_unreadable(folder, error)}"
        ) from None


def stored_config(settings: ModelSettings) -> JSON:
    """The model's config.json."""
    return json.loads((resolve(settings.path, settings.revision) / "config.json").read_text(encoding="utf-8"))


def vocabulary(settings: ModelSettings) -> Vocabulary:
    """From the model's config.json; of several eos_token_ids the first."""
    stored = stored_config(settings)
    text = {**stored, **(stored.get("text_config") or {})}  # models that also see pictures keep these one level down
    end = text.get("eos_token_id")
    end = next(iter(end), None) if isinstance(end, list) else end
    return Vocabulary(end, text.get("vocab_size"), context=text.get("max_position_embeddings"))


@functools.lru_cache(maxsize=4)
def vocabulary_digest(tokenizer: Tokenizer) -> str:
    """Of all tokens and their ids, in the column VOCABULARY; empty where a tokenizer does not tell them."""
    tokens: Any = getattr(tokenizer, "get_vocab", dict)()
    return hashlib.sha256(json.dumps(sorted(tokens.items())).encode()).hexdigest()[:16] if tokens else ""


def require_own(record: object, tokenizer: Tokenizer | None, place: str) -> None:
    """Raises UserError: a record's ids are of another tokenizer's vocabulary."""
    stored = getattr(record, "vocabulary", "")
    if stored and tokenizer and vocabulary_digest(tokenizer) not in ("", stored):
        raise UserError(
            f"{place}: its token ids are of another tokenizer than the model's; leave the columns ending in _ids out "
            "of the file, and its texts are read"
        )
