"""How much of prompts a backend reads at a time: who generates, or has a short prompt, waits for no long one.

mlx-lm's batch generator makes one token of every answer, then reads a step of every prompt. With steps of a fixed size
the prompts of one client decide how long everybody's next token takes. Here the time that a step may take follows from
what a token takes: the tokens of a step are as many as were read in that time before, of all prompts together. Where
even a few take longer, as behind a long beginning that each has to look at, tokens are made without, until the time
that went into reading is that part again.
"""

from __future__ import annotations

import itertools
import math
import time
from collections import deque
from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx
from mlx_lm.generate import BatchGenerator, PromptProcessingBatch
from mlx_lm.models.cache import BatchRotatingKVCache

from lib.serve.intake import Intake

FIRST_TOKENS = 128  # of a step, before anything was measured: of a large model on a slow machine they take long
LEAST_TOKENS = {mx.DeviceType.cpu: 4, mx.DeviceType.gpu: 64}  # of a step; a GPU reads fewer in no shorter time
MOST_TOKENS = 2048
AT_ONCE_TOKENS = 64  # of all prompts together that a step of those of the first lane reads, at least
LANE_TOKENS = (AT_ONCE_TOKENS, 512)  # of a prompt in the first lane, and in the second; longer ones have the third
PASSED_STEPS = 4  # in a row that other lanes' shorter prompts are read, while these wait
BESIDE_ANSWERS = 1.0  # a step's time in that of a token, while answers are generated
ALONE = 8.0  # the same while there are none: whoever comes meanwhile waits for a step
LOOK_STEPS = 32  # that read, in a row, after which two tokens are made without, to see what they take
SMOOTHING = 0.3  # weight of the newest measurement


def step_tokens(token_seconds: float | None, tokens_per_second: float | None, is_generating: bool, least: int) -> int:
    """The tokens of all prompts together that one step reads.

    Args:
        token_seconds: that one token of every answer takes; None: not known yet.
        tokens_per_second: of prompts, read so far; None: not known yet.
    """
    if token_seconds is None or tokens_per_second is None:
        return FIRST_TOKENS
    seconds = token_seconds * (BESIDE_ANSWERS if is_generating else ALONE)
    return max(least, min(MOST_TOKENS, int(seconds * tokens_per_second)))


def smoothed(before: float | None, newest: float) -> float:
    """A measurement over time."""
    return newest if before is None else before + SMOOTHING * (newest - before)


_make_mask = BatchRotatingKVCache.make_mask


def mend_window_caches() -> None:
    """Mends a fault of mlx-lm 0.32, in what a batch of prompts attends to in a model with an attention window.

    After a step of one token for every row its cache is a ring. The next step of several tokens puts that in order, but
    only once the mask is made for the ring: a row loses its oldest token. Steps of 2,048 hardly ever come to that.
    """

    def make_mask(cache: Any, tokens: int, *arguments: Any, **options: Any) -> mx.array:
        if tokens > 1 and cache.keys is not None:
            cache._temporal_order()
        return _make_mask(cache, tokens, *arguments, **options)

    BatchRotatingKVCache.make_mask = make_mask  # type: ignore[method-assign, assignment]


@dataclass
class Lane:
    """Prompts that are read together, as a batch generator holds them; and how fast, in tokens a second."""

    most_tokens: float  # of each
    batch: PromptProcessingBatch
    processing: list[Any] = field(default_factory=list)
    waiting: deque[Any] = field(default_factory=deque)
    tokens_per_second: float | None = None
    passed_steps: int = 0  # in a row that shorter ones were read, while these waited

    @property
    def has_some(self) -> bool:
        return bool(self.processing or self.waiting)

    def has_next(self, room: int) -> bool:
        """Whether a prompt is read but for its last token: it is answered from now on.

        Args:
            room: how many of those that wait can be taken up.
        """
        held = [segments for segments, *_ in self.processing]
        held += [one[1] for one in itertools.islice(self.waiting, max(0, room))]
        return any(len(segments) == len(segments[0]) == 1 for segments in held)


class Batches(BatchGenerator):  # type: ignore[misc]
    """mlx-lm's, at this pace. Of several prompts each gets an equal part of a step.

    Short and long ones are read apart, a step of these or of those: a row of a batch costs what its longest one does.
    Only the shortest are read without a look at the time, so few tokens in a step that answers are held up little.
    """

    token_seconds: float | None = None
    plain_seconds: float | None = None  # from token to token, while nothing is read and nobody comes or goes
    _ahead_seconds: float = 0.0  # that reading all but the shortest took beyond its part of the time
    _steps_read: int = 0  # since the last measurement of a token's time
    _steps_plain: int = 0  # that read nothing, in a row
    _rests: bool = False  # this step reads nothing
    _is_first: bool = True  # of the steps that generate: it compiles kernels
    _row_tokens: int | None = None  # that this step reads of each prompt

    def __init__(self, *arguments: Any, intake: Intake | None = None, **options: Any):
        super().__init__(*arguments, **options)
        self.intake = intake or Intake()
        self._ended_at: float | None = None  # the last step
        self._joined: set[int] = set()  # rows, since then
        self.lanes = [
            Lane(most, PromptProcessingBatch.empty(self.model, self.sampler, MOST_TOKENS))
            for most in (*LANE_TOKENS, math.inf)
        ]
        self.lane = self.lanes[0]
        self._prompt_batch = self.lane.batch
        self._currently_processing, self._unprocessed_sequences = self.lane.processing, self.lane.waiting

    def _use(self, lane: Lane) -> None:
        """Has mlx-lm's generator work on these prompts from now on."""
        self.lane.batch, self.lane.processing = self._prompt_batch, self._currently_processing
        self.lane.waiting = self._unprocessed_sequences
        self.lane = lane
        self._prompt_batch, self._currently_processing = lane.batch, lane.processing
        self._unprocessed_sequences = lane.waiting

    @property
    def prefill_step_size(self) -> int:
        """The tokens of each prompt that a step reads: the same of all, since a row costs what the longest one does."""
        if self._row_tokens is None:
            self._row_tokens = self._row_tokens_now()
        return self._row_tokens

    @prefill_step_size.setter
    def prefill_step_size(self, tokens: int) -> None:
        """mlx-lm's own is not needed."""

    def _row_tokens_now(self) -> int:
        rows = max(1, len(self._currently_processing))
        if self._rests:
            return 0
        least, is_generating = LEAST_TOKENS[mx.default_device().type], len(self._generation_batch) > 0
        tokens = step_tokens(self.token_seconds, self.lane.tokens_per_second, is_generating, least)
        if self.lane is not self.lanes[0]:
            return max(1, tokens // rows)
        shortest = min((len(segments[0]) for segments, *_ in self._currently_processing), default=0)
        return max(1, tokens // rows, min(shortest, AT_ONCE_TOKENS // rows))

    def _make_batch(self, n: int) -> PromptProcessingBatch:
        """As mlx-lm's, which asks for a step's tokens before these prompts are among those that it is of."""
        made = super()._make_batch(n)
        self._row_tokens = None
        return made

    def insert_segments(
        self,
        segments: Any,
        max_tokens: Any = None,
        caches: Any = None,
        all_tokens: Any = None,
        *rest: Any,
        **options: Any,
    ) -> list[int]:
        """As mlx-lm's; each prompt goes to those of its kind, by all tokens that its row has before an answer."""
        uids: list[int] = super().insert_segments(segments, max_tokens, caches, all_tokens, *rest, **options)
        for uid, tokens in zip(uids, all_tokens or [[]] * len(uids), strict=True):
            self.intake.under_way[uid] = getattr(tokens, "owner", "")
        self._joined |= set(uids)
        self._use(self.lane)
        for one in [self.lane.waiting.pop() for _ in uids][::-1]:
            tokens = len(one[4]) + sum(map(len, one[1]))
            next(lane for lane in self.lanes if tokens <= lane.most_tokens).waiting.append(one)
        return uids

    def remove(self, uids: Any, return_prompt_caches: bool = False) -> dict[int, Any]:
        """As mlx-lm's."""
        before = self.lane
        caches: dict[int, Any] = {}
        for lane in self.lanes:
            self._use(lane)
            caches |= super().remove(uids, return_prompt_caches)
        self._use(before)
        for uid in uids:
            self.intake.under_way.pop(uid, None)
        return caches

    def extract_cache(self, uids: Any) -> dict[int, Any]:
        """As mlx-lm's."""
        before = self.lane
        caches: dict[int, Any] = {}
        for lane in self.lanes:
            self._use(lane)
            caches |= super().extract_cache(uids)
        self._use(before)
        return caches

    @property
    def prompt_cache_nbytes(self) -> int:
        """As mlx-lm's."""
        total = int(super().prompt_cache_nbytes)
        for lane in self.lanes:
            if lane is not self.lane:
                caches = [cache for sequence in lane.waiting for cache in sequence[3]] + list(lane.batch.prompt_cache)
                total += sum(cache.nbytes for cache in caches)
        return total

    def _choose(self) -> None:
        """Which prompts the next step takes up, and whether it reads of them."""
        self._use(self.lane)
        is_generating = len(self._generation_batch) > 0
        room = self.completion_batch_size - len(self._generation_batch)
        for lane in self.lanes:
            if lane.has_next(min(room, self.prefill_batch_size - len(lane.processing))):
                self._use(lane)
                self._rests = True
                return
        held = [lane for lane in self.lanes if lane.has_some] or self.lanes[:1]
        is_ahead = is_generating and self._ahead_seconds > 0
        due = [lane for lane in held if lane is self.lanes[0] or not is_ahead]
        passed = [lane for lane in due if lane.passed_steps >= PASSED_STEPS]
        self._use((passed[-1:] or due or held)[0])
        self._rests = is_generating and (self._steps_read >= LOOK_STEPS or not due)
        if not self._rests:
            for lane in self.lanes:
                if lane is self.lane or not lane.has_some:
                    lane.passed_steps = 0
                elif lane.most_tokens > self.lane.most_tokens:
                    lane.passed_steps += 1

    def _next(self) -> Any:
        self._choose()
        self._row_tokens = None
        counters = self._counters
        steps, read = counters.generation_steps, counters.prompt_tokens
        decode_seconds, prompt_seconds = counters.decode_time, counters.prompt_time
        since = time.perf_counter() if self._ended_at is None else self._ended_at
        prompts, answers = super()._next()
        ended = {one.uid for one in answers if one.finish_reason is not None}
        moved = {one.uid for one in prompts if one.end_of_prompt or self.lane is self.lanes[0]}
        if self._rests:
            prompts = [one for one in prompts if one.end_of_prompt]
        is_generating, has_read = counters.generation_steps > steps, counters.prompt_tokens > read
        self._note(
            counters.decode_time - decode_seconds if is_generating else None,
            (counters.prompt_tokens - read, counters.prompt_time - prompt_seconds) if has_read else None,
        )
        now = time.perf_counter()
        if is_generating:
            paced = 0.0 if self.lane is self.lanes[0] else counters.prompt_time - prompt_seconds
            self._charge(self._joined | moved | ended, now - since - paced, has_read)
        else:
            self.intake.pay(now - since)  # nobody waited for a token
        for uid in ended:
            self.intake.under_way.pop(uid, None)
        self._joined, self._ended_at = set(), now if len(self._generation_batch) else None
        return prompts, answers

    def _charge(self, uids: Collection[int], seconds: float, has_read: bool) -> None:
        """Charges rows that came, went or are short, with what a step took beyond a token; and all have one token more.

        Args:
            seconds: of the step and all since the one before it, without what the other lanes' pace holds to its part.
            has_read: of any lane.
        """
        if not uids and not has_read:
            before = seconds if self.plain_seconds is None else self.plain_seconds
            # Of longer ones a tenth: what makes them longer is mostly what others do meanwhile on the machine.
            self.plain_seconds = smoothed(before, before + (seconds - before) * (0.1 if seconds > before else 1.0))
        if self.plain_seconds is None:
            return
        under_way = self.intake.under_way
        self.intake.charge([under_way[uid] for uid in uids if uid in under_way], max(0.0, seconds - self.plain_seconds))
        self.intake.pay(BESIDE_ANSWERS * self.plain_seconds)

    def _note(self, decode_seconds: float | None, read: tuple[int, float] | None) -> None:
        """Takes in what a step took: to make tokens, if it did, and to read: how many tokens, and how long."""
        if self.token_seconds is not None and decode_seconds is not None:
            self._ahead_seconds = max(0.0, self._ahead_seconds - BESIDE_ANSWERS * self.token_seconds)
        if read is None:
            # MLX computes the next tokens while a step reads: what they take is in that step's time, not in theirs.
            self._steps_plain += 1
            if decode_seconds is not None and self._steps_plain > 1 and not self._is_first:
                self.token_seconds, self._steps_read = smoothed(self.token_seconds, decode_seconds), 0
            self._is_first = self._is_first and decode_seconds is None
            return
        tokens, seconds = read
        if self.token_seconds is not None and self.lane is not self.lanes[0]:
            # Where nobody was answered it counts for who is next.
            self._ahead_seconds = max(0.0, seconds - (1 + BESIDE_ANSWERS) * self.token_seconds)
        if decode_seconds is not None and self.token_seconds is not None:
            self.token_seconds = min(self.token_seconds, seconds)  # it takes no longer than both together
            without = seconds - self.token_seconds
            seconds = without if without > seconds / 4 else seconds  # of two times nearly alike no difference is known
        if seconds > 0:
            self.lane.tokens_per_second = smoothed(self.lane.tokens_per_second, tokens / seconds)
        self._steps_read, self._steps_plain = self._steps_read + 1, 0
