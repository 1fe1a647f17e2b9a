"""What a model can look up: token ids inside of its vocabulary, positions inside of its table of positions.

MLX does not check an index. Beyond a table's last row it reads whatever lies there in memory, and a gradient writes
there. So every id and every length is checked where it comes in: in files, prompts, and answers to be written.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from lib.data.record_formats import Unusable

LARGEST_ID = 2**31  # ids are int32


@dataclass(frozen=True)
class ModelLimits:
    """The limits of one model, or of all that see the same rows.

    Args:
        vocab_size: ids from there on are refused; None takes any.
        positions: rows of a table of learned positions; None for a model without one, which takes any length.
    """

    vocab_size: int | None = None
    positions: int | None = None

    def check_ids(self, pieces: Iterable[Sequence[int]]) -> None:
        """Raises Unusable where a token, 0 or more, has no row in the model's embedding."""
        limit = min(self.vocab_size or LARGEST_ID, LARGEST_ID)
        largest = max(map(max, filter(None, pieces)), default=0)
        if largest >= limit:
            raise Unusable(f"token id {largest} is not below the vocabulary's size, {limit}")

    def check_row(self, tokens: int, remedy: str | None = None) -> None:
        """Raises Unusable for a row with too many tokens. The last one is predicted: it needs no position."""
        if self.positions is not None and tokens - 1 > self.positions:
            remedy = remedy or f"set data.max_length={self.positions}"
            raise Unusable(
                f"a row of {tokens} tokens is longer than the {self.positions} positions of the model's table; {remedy}"
            )

    def check_answer(self, prompt_tokens: int, max_tokens: int, setting: str) -> None:
        """Raises Unusable for a prompt whose answer, of max_tokens by that setting, would end beyond the table."""
        if self.positions is None or prompt_tokens + max_tokens - 1 <= self.positions:
            return
        room = self.positions + 1 - prompt_tokens
        remedy = f"set {setting}={room} or less" if room > 0 else "leave it out"
        raise Unusable(
            f"a prompt of {prompt_tokens} tokens and {setting}={max_tokens} are more than the {self.positions} "
            f"positions of the model's table; {remedy}"
        )

    def row_tokens(self, max_length: int) -> int:
        """The most tokens of a row, by data.max_length and by the table."""
        return max_length if self.positions is None else min(max_length, self.positions + 1)


NO_LIMITS = ModelLimits()
