"""Texts ➜ token ids, whole or as the continuation of another text."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Sequence
from functools import cached_property
from typing import Any, Protocol, TypeVar

from lib.errors import UserError
from lib.system.limits import within

Made = TypeVar("Made")


class Tokenizer(Protocol):
    """What is needed of a transformers tokenizer, or of mlx-lm's TokenizerWrapper around one."""

    @property
    def eos_token_ids(self) -> Collection[int]:
        """mlx-lm's wrapper alone has them: greedy answers end there."""

    def encode(self, text: str, **options: Any) -> list[int]: ...
    def decode(self, ids: list[int]) -> str: ...
    def apply_chat_template(self, conversation: Any, **options: Any) -> Any: ...


def is_panic(error: BaseException) -> bool:
    """Whether the tokenizers library gave up: what it raises then is no Exception, and has no name to import."""
    return type(error).__name__ == "PanicException"


def limited(texts: Sequence[str], do: Callable[[Sequence[str]], Made]) -> Made:
    """What a tokenizer makes of texts: it splits them by patterns of its own, which may be slow on some, or never end.

    Raises:
        UserError: it takes too long, or gives up.
    """
    seconds = LEAST_SECONDS + sum(map(len, texts)) / LETTERS_PER_SECOND
    where = f"of which the first begins with {texts[0][:40]!r}"
    try:
        return within(seconds, f"the model's tokenizer, on {len(texts):,} texts, {where},", lambda: do(texts))
    except BaseException as error:
        if not is_panic(error):
            raise
        raise UserError(f"the model's tokenizer gives up on one of {len(texts):,} texts, {where}: {error}") from None


class TextTokens:
    """A tokenizer, asked for the ids of texts alone: no special tokens that open or close one.

    Raises:
        UserError: in every method that makes ids, as `limited`.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        # mlx-lm's wrapper passes attributes on, but cannot be called; the tokenizer inside it can.
        self.inner: Any = tokenizer if callable(tokenizer) else getattr(tokenizer, "_tokenizer", None)
        self._is_fast = self.inner is not None and getattr(self.inner, "is_fast", False)
        self._heads: dict[str, list[int]] = {}
        self._is_blank: dict[int, bool] = {}

    def ids(self, texts: Sequence[str]) -> list[list[int]]:
        """Ids of each text."""
        return limited(texts, self._ids) if texts else []

    def _ids(self, texts: Sequence[str]) -> list[list[int]]:
        if self._is_plain:
            made = self.inner.backend_tokenizer.encode_batch_fast(list(texts), add_special_tokens=False)
            return [encoding.ids for encoding in made]
        if self._is_fast:
            return self._through_transformers(list(texts))
        return [list(self.tokenizer.encode(text, add_special_tokens=False)) for text in texts]

    def _through_transformers(self, texts: list[str]) -> list[list[int]]:
        options = {"add_special_tokens": False, "return_attention_mask": False, "verbose": False}
        found: list[list[int]] = self.inner(texts, **options)["input_ids"]
        return found

    @cached_property
    def _is_plain(self) -> bool:
        """Whether transformers does nothing of its own around the tokenizers library, which alone is quicker.

        It is without truncation and padding from the first call through transformers on.
        """
        if not self._is_fast or not hasattr(getattr(self.inner, "backend_tokenizer", None), "encode_batch_fast"):
            return False
        theirs = self._through_transformers([SPECIMEN])
        alone = self.inner.backend_tokenizer.encode_batch_fast([SPECIMEN], add_special_tokens=False)
        return [encoding.ids for encoding in alone] == theirs

    def starts(self, text: str) -> tuple[list[int], list[int]]:
        """Ids of a text, and for each the character that it begins at.

        A tokenizer that knows no offsets (not a "fast" one) is asked by prefixes, which takes longer.
        """
        if self._is_fast:
            options = {"add_special_tokens": False, "return_offsets_mapping": True, "verbose": False}
            made = limited([text], lambda texts: self.inner(texts[0], **options))
            return made["input_ids"], [start for start, _ in made["offset_mapping"]]
        ids, begins = self.ids([text])[0], [0]
        for count in range(1, len(ids)):
            begins.append(max(begins[-1], len(self.tokenizer.decode(ids[:count]))))
        return ids, begins[: len(ids)]

    def behind(self, texts: Sequence[tuple[str, int]]) -> list[list[int]]:
        """Of each (text, start): the ids that stand behind text[:start] in the tokens of the whole text.

        Where a token reaches over `start`, the rest is tokenised as a continuation: a model that was given text[:start]
        goes on from these tokens, not from others. Nothing merges over a special token, so that the text from the last
        of them before `start` on is enough.
        """
        cuts = [self._last_special(text, start) for text, start in texts]
        heads = dict.fromkeys(text[cut:start] for (text, start), cut in zip(texts, cuts, strict=True))
        missing = [head for head in heads if head not in self._heads]
        self._heads |= zip(missing, self.ids(missing), strict=True)
        tails = self.ids([text[cut:] for (text, _), cut in zip(texts, cuts, strict=True)])
        found = []
        for (text, start), cut, ids in zip(texts, cuts, tails, strict=True):
            head = self._heads[text[cut:start]]
            found.append(ids[len(head) :] if ids[: len(head)] == head else self.continued([text[start:]])[0])
        if len(self._heads) > 4096:
            self._heads.clear()
        return found

    def continued(self, texts: Sequence[str]) -> list[list[int]]:
        """Ids of each text as the continuation of another."""
        anchor_ids, anchor = self._anchor
        if not anchor:
            return self.ids(texts)
        anchored = self.ids([anchor + text for text in texts])
        assert all(ids[: len(anchor_ids)] == anchor_ids for ids in anchored)
        return [ids[len(anchor_ids) :] for ids in anchored]

    def is_blank(self, token: int) -> bool:
        """Whether a token is nothing but white space."""
        if token not in self._is_blank:
            self._is_blank[token] = not self.tokenizer.decode([token]).strip() and token not in self.special
        return self._is_blank[token]

    @cached_property
    def special(self) -> dict[int, str]:
        """The special tokens, by id."""
        added = getattr(self.tokenizer, "added_tokens_decoder", {})
        return {index: token.content for index, token in added.items() if token.special}

    @cached_property
    def opening(self) -> list[int]:
        """The special tokens that the tokenizer puts before a text (BOS, mostly)."""
        with_special = list(self.tokenizer.encode("a"))
        plain = self.ids(["a"])[0]
        bos_token_id = getattr(self.tokenizer, "bos_token_id", None)
        if not plain:
            return with_special[:1] if with_special[:1] == [bos_token_id] else []
        starts = range(len(with_special) - len(plain) + 1)
        return with_special[: next((i for i in starts if with_special[i : i + len(plain)] == plain), 0)]

    def _last_special(self, text: str, start: int) -> int:
        """Where the last special token that lies wholly before `start` begins, if it is near; else 0."""
        if self._special_pattern is None:
            return 0
        last, search_from = 0, max(0, start - NEAR)
        for match in self._special_pattern.finditer(text, search_from, start):
            last = match.start()
        return last

    @cached_property
    def _special_pattern(self) -> re.Pattern[str] | None:
        """Special tokens that the tokenizer splits a text at, whatever stands around them, longest first."""
        if not self._is_fast:
            return None
        added = getattr(self.tokenizer, "added_tokens_decoder", {}).values()
        template = str(getattr(self.tokenizer, "chat_template", None))
        named = set(getattr(self.tokenizer, "all_special_tokens", ()))
        # Of thousands of reserved ones those that stand in texts of this model are enough, and quick to find.
        texts = {
            token.content
            for token in added
            if not token.single_word and not token.normalized and (token.content in template or token.content in named)
        }
        every = [token.content for token in added]
        alone = [text for text in texts if not any(text in other and text != other for other in every)]
        return re.compile("|".join(map(re.escape, sorted(alone, key=len, reverse=True)))) if alone else None

    @cached_property
    def _anchor(self) -> tuple[list[int], str]:
        """A text to put before a continuation, and its ids, for tokenizers that open every text with a space.

        SentencePiece in Llama 2's style turns both "a" and the "a" in " a" into "▁a": tokenised apart, a
        completion would begin with a space that it does not have. After a line break, which nothing merges
        with there, it does not.
        """
        anchor, letter, both = self.ids(["\n", "a", "\na"])
        is_needed = anchor + letter != both and both[: len(anchor)] == anchor and len(anchor) > 0
        return (anchor, "\n") if is_needed else ([], "")


# Text of many kinds: where two tokenizers are to be told apart, its tokens have to do.
SPECIMEN = "The quick brown fox jumps over 13 lazy dogs. Ünïcödé, 漢字, кириллица;\n\tdef f(x): return x ** 2  # 🦊"
# Characters before a completion in which its last special token is looked for.
NEAR = 400
# The time that a tokenizer may take: one that is slow makes a million tokens a second.
LEAST_SECONDS = 30.0
LETTERS_PER_SECOND = 100_000
