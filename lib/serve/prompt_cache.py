"""A backend's cache of prompts: mlx_lm.server's, in which what was read for one key's owner is used for no other.

How soon an answer begins would tell one what another has asked, a token at a time.
"""

from __future__ import annotations

import itertools
from collections import Counter, deque
from typing import Any, SupportsIndex, overload

from mlx_lm.models.cache import PromptTrieResult, can_trim_prompt_cache, trim_prompt_cache
from mlx_lm.server import LRUPromptCache


class OwnedTokens(list[int]):
    """The tokens of a prompt and its answer, and for whom they are read; so are parts of them."""

    def __init__(self, tokens: list[int], owner: str):
        super().__init__(tokens)
        self.owner = owner

    @overload
    def __getitem__(self, index: SupportsIndex) -> int: ...

    @overload
    def __getitem__(self, index: slice) -> OwnedTokens: ...

    def __getitem__(self, index: SupportsIndex | slice) -> int | OwnedTokens:
        if isinstance(index, slice):
            return OwnedTokens(super().__getitem__(index), self.owner)
        return super().__getitem__(index)


def common_prefix(one: list[int], other: list[int]) -> int:
    """How many tokens two lists have in common, from their beginning; compared a part at a time, as Python does it."""
    least, most = 0, min(len(one), len(other))
    while least < most:
        middle = (least + most + 1) // 2
        if one[least:middle] == other[least:middle]:
            least = middle
        else:
            most = middle - 1
    return least


class Order(LRUPromptCache.CacheOrder):  # type: ignore[misc]
    """mlx_lm.server's order of age, but of the owner who has most goes the oldest: nobody pushes out all others."""

    def pop(self) -> tuple[Any, OwnedTokens]:
        counts: Counter[str] = Counter()
        tokens: Counter[str] = Counter()
        for (_, owner), each in itertools.chain(*self._lrus.values()):
            counts[owner] += 1
            tokens[owner] += len(each)
        greedy = max(counts, key=lambda owner: (counts[owner], tokens[owner]))
        of_owner = LRUPromptCache.CacheOrder(self._ordering)
        for kind, ages in self._lrus.items():
            of_owner._lrus[kind] = deque(one for one in ages if one[0][1] == greedy)
        model, oldest = of_owner.pop()
        self.remove(model, oldest)
        return model, oldest


class PromptCache(LRUPromptCache):  # type: ignore[misc]
    """mlx_lm.server's, one for each owner, that always leaves a token to read.

    Of a prompt that it has seen to its last token mlx_lm.server's leaves nothing, and a request for nothing would end
    the thread that generates for everybody. Whoever continues an answer that was cut off sends such a prompt.
    Its way down a tree of long prompts takes the square of their length, half a second for some of 8,000 tokens, while
    nobody is answered; here the few that are held are compared one by one.
    """

    def __init__(self, *arguments: Any, **options: Any):
        super().__init__(*arguments, **options)
        self._trie.search = self._search  # type: ignore[method-assign]
        self._lru = Order()

    def _search(self, model: Any, tokens: list[int]) -> PromptTrieResult:
        """As mlx_lm.server's: an equal one; else the longest that these go on from, and the shortest of the nearest."""
        tokens = list(tokens)
        held = [list(each) for ages in self._lru._lrus.values() for whose, each in ages if whose == model]
        if tokens in held:
            return PromptTrieResult(model, tokens, None, None, 0)
        common = [common_prefix(each, tokens) for each in held]
        nearest = max(common, default=0)
        begun = [each for each, count in zip(held, common, strict=True) if count == len(each) > 1]
        longer = [each for each, count in zip(held, common, strict=True) if count == nearest > 0]
        shorter = max(begun, key=len, default=None)
        return PromptTrieResult(model, None, shorter, min(longer, key=len, default=None), nearest)

    def fetch_nearest_cache(self, model: Any, tokens: OwnedTokens) -> Any:  # type: ignore[override]
        cache, rest = super().fetch_nearest_cache((model, tokens.owner), tokens)
        if rest or not tokens:
            return cache, rest
        if not can_trim_prompt_cache(cache):
            return None, tokens
        trim_prompt_cache(cache, 1)
        return cache, tokens[-1:]

    def insert_cache(  # type: ignore[override]
        self, model: Any, tokens: OwnedTokens, prompt_cache: list[Any], *, cache_type: str = "assistant"
    ) -> None:
        super().insert_cache((model, tokens.owner), tokens, prompt_cache, cache_type=cache_type)
