"""How much of prompts a backend reads at a time: who generates, or has a short prompt, waits for no long one.

mlx-lm's batch generator makes one token of every answer, then reads a step of every prompt. With steps of a fixed size
the prompts of one client decide how long everybody's next token takes. Here the time that a step may take follows from
what a token takes: the tokens of a step are as many as were read in that time before, of all prompts together.
"""

from __future__ import annotations

from typing import Any

from mlx_lm.generate import BatchGenerator

FIRST_TOKENS = 128  # of a step, before anything was measured: of a large model on a slow machine they take long
LEAST_TOKENS, MOST_TOKENS = 64, 2048  # of a step: fewer waste what a pass over the weights costs
BESIDE_ANSWERS = 2.0  # a step's time in that of a token, while answers are generated
ALONE = 8.0  # the same while there are none: whoever comes meanwhile waits for a step
LEAST_SECONDS = 1e-4  # that a step counts as
SMOOTHING = 0.3  # weight of the newest measurement


def step_tokens(token_seconds: float | None, tokens_per_second: float | None, is_generating: bool) -> int:
    """The tokens of all prompts together that one step reads.

    Args:
        token_seconds: that one token of every answer takes; None: not known yet.
        tokens_per_second: of prompts, read so far; None: not known yet.
    """
    if token_seconds is None or tokens_per_second is None:
        return FIRST_TOKENS
    seconds = token_seconds * (BESIDE_ANSWERS if is_generating else ALONE)
    return max(LEAST_TOKENS, min(MOST_TOKENS, int(seconds * tokens_per_second)))


def smoothed(before: float | None, newest: float) -> float:
    """A measurement over time."""
    return newest if before is None else before + SMOOTHING * (newest - before)


class Batches(BatchGenerator):  # type: ignore[misc]
    """mlx-lm's, at this pace. Of several prompts each gets an equal part of a step."""

    token_seconds: float | None = None
    tokens_per_second: float | None = None
    _has_read: bool = False  # in the last step

    @property
    def prefill_step_size(self) -> int:
        """The tokens of each prompt that a step reads."""
        tokens = step_tokens(self.token_seconds, self.tokens_per_second, len(self._generation_batch) > 0)
        return max(1, tokens // max(1, len(self._currently_processing)))

    @prefill_step_size.setter
    def prefill_step_size(self, tokens: int) -> None:
        """mlx-lm's own is not needed."""

    def _next(self) -> Any:
        counters = self._counters
        steps, read = counters.generation_steps, counters.prompt_tokens
        decode_seconds, prompt_seconds = counters.decode_time, counters.prompt_time
        made = super()._next()
        # MLX computes the next tokens while a step reads: what that takes is in the step's time, not in theirs.
        is_generating, has_read = counters.generation_steps > steps, counters.prompt_tokens > read
        if is_generating and not self._has_read:
            self.token_seconds = smoothed(self.token_seconds, counters.decode_time - decode_seconds)
        if has_read:
            seconds = counters.prompt_time - prompt_seconds - (self.token_seconds or 0.0) * is_generating
            rate = (counters.prompt_tokens - read) / max(seconds, LEAST_SECONDS)
            self.tokens_per_second = smoothed(self.tokens_per_second, rate)
        self._has_read = has_read
        return made
