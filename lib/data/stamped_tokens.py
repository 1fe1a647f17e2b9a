"""Token ids that a run wrote beside its texts, and whose they are: to another tokenizer they are another text."""

from __future__ import annotations

import functools
import hashlib
import json
from dataclasses import dataclass
from typing import Any

from lib.data.record_formats import Tokens
from lib.data.text_tokens import Tokenizer
from lib.errors import UserError

VOCABULARY = "ids_of_vocabulary"  # the column


@dataclass(frozen=True)
class StampedTokens(Tokens):
    """A record that came tokenised, with the digest of the vocabulary that its ids are of."""

    vocabulary: str = ""


def digest_of(tokenizer: Tokenizer) -> str:
    """A digest of all tokens and their ids; empty where a tokenizer does not tell them."""
    known: Any = tokenizer  # hashed as any object is, though its protocol does not say so
    return _digest_of(known)


@functools.lru_cache(maxsize=4)
def _digest_of(tokenizer: Any) -> str:
    tell = getattr(tokenizer, "get_vocab", None)
    return "" if tell is None else hashlib.sha256(json.dumps(sorted(tell().items())).encode()).hexdigest()[:16]


def stamp_of(tokenizer: Tokenizer) -> dict[str, str]:
    """The column that says whose ids a record has."""
    digest = digest_of(tokenizer)
    return {VOCABULARY: digest} if digest else {}


def require_own(record: object, tokenizer: Tokenizer | None, place: str) -> None:
    """Makes sure that a record's ids mean to this tokenizer what they meant to the one that wrote them.

    Raises:
        UserError: they are of another vocabulary.
    """
    if not isinstance(record, StampedTokens) or tokenizer is None:
        return
    if digest_of(tokenizer) not in ("", record.vocabulary):
        where = f"{place}: " if ":" in place else ""
        raise UserError(
            f"{where}its token ids are of another tokenizer than the model's; leave the columns ending in _ids out of "
            "the file, and its texts are read"
        )
