"""Answers of a model to prompts, sampled many at a time, with the log-probability of every token.

What a call of `Sampler.sample` gives follows from the model, its prompts, the settings and the seed, to the last bit:
from who samples, and from other calls, it does not. So ranks that pull the same chunks of prompts, in whatever order,
make the same samples as one rank. The numbers that decide a token follow from (seed, prompt, k, position) alone; in
another chunk the logits may be rounded otherwise, which changes a token as rarely as rounding does.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx.utils import tree_map
from mlx_lm.models.cache import make_prompt_cache

from lib.data.tokenizer import Tokenizer
from lib.distributed.world import World
from lib.errors import Stopped
from lib.model.continuations import PromptArrays, RowArrays, cannot_continue, next_logits
from lib.rollouts.draw import draw, uniforms
from lib.rollouts.rectangles import Rectangles

BLOCK = 16  # tokens between two looks at what was drawn: until then nothing waits for the device
PREFILL_TOKENS = 2048  # of a prompt in one pass, where prompts are answered one after the other
ROOM = 4  # new prompts begin once this part of the batch is free: laying it out anew costs about a token


@dataclass(frozen=True)
class Prompt:
    """What is answered."""

    id: int
    """Its row in the file of prompts."""
    tokens: list[int]
    """At least one."""


@dataclass(frozen=True)
class Sample:
    """One answer, and the policy's log-probabilities."""

    prompt_id: int
    k: int
    """Its number among the answers to this prompt, from 0."""
    prompt_tokens: list[int]
    tokens: list[int]
    """With the end token, where it was drawn; up to the token that completes a stop string."""
    logps: list[float]
    """float32, nats, one a token: of softmax(logits / temperature), before top_p leaves tokens out."""
    finish: Literal["stop", "length"]
    text: str
    """Without the end token, and without a stop string and what follows it."""


class Sampling(Protocol):
    """The settings: rollouts.* has them by these names."""

    @property
    def samples(self) -> int:
        """K, the answers to each prompt."""

    @property
    def temperature(self) -> float:
        """0 takes the likeliest token, always."""

    @property
    def top_p(self) -> float: ...
    @property
    def max_tokens(self) -> int: ...
    @property
    def stop(self) -> Sequence[str]: ...
    @property
    def batch_size(self) -> int:
        """The most answers that are written at the same time; never less than those to one prompt."""


@dataclass
class Answer:
    """One that is being written."""

    prompt: Prompt
    k: int
    numbers: np.ndarray
    """float32: what decides its tokens."""
    tokens: list[int] = field(default_factory=list)
    logps: list[float] = field(default_factory=list)
    finish: Literal["stop", "length"] | None = None


class Sampler:
    """Samples answers; made once, so that what is compiled serves every call.

    Args:
        compiled: whether a step is traced once for every shape of the batch; by default on a GPU.
        world: whose ranks hold consecutive blocks of the model, if they do: all sample the same at the same time.

    Attributes:
        why_alone: why this model's prompts are answered one after the other; None where they are not.
    """

    def __init__(
        self,
        model: nn.Module,
        tokenizer: Tokenizer,
        settings: Sampling,
        compiled: bool | None = None,
        world: World = World(),  # noqa: B008  (frozen)
    ):
        self.model, self.tokenizer, self.settings, self.world = model, tokenizer, settings, world
        # To try it, ranks with unlike blocks would have to fail alike.
        self.why_alone = "it is pipelined" if world.divides_model else cannot_continue(model)
        self.end_tokens = sorted(tokenizer.eos_token_ids)
        self.step: Callable[[RowArrays, PromptArrays, mx.array], tuple[RowArrays, mx.array]] = self._step
        if mx.default_device() == mx.gpu if compiled is None else compiled:
            self.step = mx.compile(self._step, inputs=[model.state])

    def sample(
        self, prompts: Sequence[Prompt], seed: Sequence[int], is_wanted: Callable[[], bool] = lambda: True
    ) -> Iterator[Sample]:
        """`settings.samples` answers to each prompt: those of a prompt together and in order, prompts as they end.

        seed: whole numbers that no other call for the same prompts has, e.g. train.seed and the round. is_wanted: asked
        every few tokens; once it says no, nothing more comes.

        Raises:
            Stopped: a probability is not finite.
        """
        assert all(prompt.tokens for prompt in prompts), "nothing comes before the first token of an empty prompt"
        was_training = self.model.training
        self.model.eval()
        try:
            if self.why_alone is None:
                yield from self._together(prompts, seed, is_wanted)
            else:
                for prompt in prompts:
                    yield from self._alone(prompt, seed, is_wanted)
        finally:
            self.model.train(was_training)

    def _step(self, rows: RowArrays, prompts: PromptArrays, numbers: mx.array) -> tuple[RowArrays, mx.array]:
        logits, rows = next_logits(self.model, rows, prompts)
        tokens, logps = self._draw(logits, numbers)
        return {**rows, "tokens": tokens}, logps

    def _draw(self, logits: mx.array, numbers: mx.array) -> tuple[mx.array, mx.array]:
        tokens, logps = draw(logits, numbers, self.settings.temperature, self.settings.top_p)
        if self.world.divides_model:
            mx.eval(tokens, logps)  # first all ranks pass through the model, then they hear what the last one drew
            tokens, logps = self.world.workers.decide(tokens), self.world.workers.decide(logps)
        return tokens, logps

    # ---- All prompts together; where answers end, other prompts begin

    def _together(
        self, prompts: Sequence[Prompt], seed: Sequence[int], is_wanted: Callable[[], bool]
    ) -> Iterator[Sample]:
        size, samples = self.settings.batch_size, self.settings.samples
        waiting, groups = deque(prompts), list[list[Answer]]()  # under way, as they began
        batch, answers = Rectangles(self.model), list[Answer]()  # the rows of the batch
        while (waiting or groups) and is_wanted():
            live = [i for i, answer in enumerate(answers) if answer.finish is None]
            free, begun = size - len(live), list[list[Answer]]()
            if waiting and (not live or free >= max(samples, size // ROOM)):
                begun = [
                    self._begin(waiting.popleft(), seed) for _ in range(min(len(waiting), max(1, free // samples)))
                ]
            if begun or batch.would_shrink(len(live)):
                new = [answer for group in begun for answer in group]
                logits = batch.lay_out(live, [group[0].prompt.tokens for group in begun], samples)
                answers = [answers[i] for i in live] + new
                groups += begun
                if logits is not None:
                    numbers = mx.array(np.stack([answer.numbers[0] for answer in new]))
                    tokens, logps = self._draw(mx.repeat(logits, samples, axis=0), numbers)
                    batch.set_tokens(tokens)
                    self._take(new, np.array(tokens)[None], np.array(logps)[None])
            batch.widen(BLOCK)
            drawn = []
            for numbers in self._numbers(answers, batch.count):
                batch.rows, logps = self.step(batch.rows, batch.prompts, numbers)
                batch.column += 1
                mx.async_eval(batch.rows, logps)
                drawn.append((batch.rows["tokens"], logps))
            if drawn:
                self._take(answers, *(np.array(mx.stack(each)) for each in zip(*drawn, strict=True)))
            over = [group for group in groups if all(answer.finish for answer in group)]
            groups = [group for group in groups if not all(answer.finish for answer in group)]
            for group in over:
                yield from map(self._finished, group)

    # ---- One prompt after the other, by the model's own cache

    def _alone(self, prompt: Prompt, seed: Sequence[int], is_wanted: Callable[[], bool]) -> Iterator[Sample]:
        """For layers whose state is their own affair: K rows of one length, so that nothing is padded."""
        answers, cache = self._begin(prompt, seed), make_prompt_cache(self.model)
        *before, last = prompt.tokens
        for start in range(0, len(before), PREFILL_TOKENS):
            self.model(mx.array([before[start : start + PREFILL_TOKENS]]), cache=cache)
            mx.eval([each.state for each in cache])
        for each in cache if before else ():
            each.state = tree_map(self._for_each_sample, each.state)
        tokens = mx.full((len(answers),), last, dtype=mx.int32)
        while any(answer.finish is None for answer in answers):
            if not is_wanted():
                return
            drawn = []
            for numbers in self._numbers(answers, len(answers)):
                tokens, logps = self._draw(self.model(tokens[:, None], cache=cache)[:, -1], numbers)
                mx.async_eval(tokens, logps)
                drawn.append((tokens, logps))
            self._take(answers, *(np.array(mx.stack(each)) for each in zip(*drawn, strict=True)))
        yield from map(self._finished, answers)

    def _for_each_sample(self, state: object) -> object:
        is_batch = isinstance(state, mx.array) and state.ndim > 0
        return mx.repeat(state, self.settings.samples, axis=0) if is_batch else state

    # ---- What was drawn

    def _begin(self, prompt: Prompt, seed: Sequence[int]) -> list[Answer]:
        count = self.settings.max_tokens + BLOCK  # a row may be drawn on until the next look at it
        samples = range(self.settings.samples)
        return [Answer(prompt, k, uniforms(seed, prompt.id, k, count)) for k in samples]

    def _numbers(self, answers: Sequence[Answer], rows: int) -> list[mx.array]:
        """What decides the next tokens, at most BLOCK, of every row: float32 [rows] each; none where all are over."""
        left = [self.settings.max_tokens - len(answer.tokens) for answer in answers if answer.finish is None]
        count = min(BLOCK, max(left, default=0))
        numbers = np.zeros((rows, count), np.float32)
        for row, answer in zip(numbers, answers, strict=False):
            if answer.finish is None:
                row[:] = answer.numbers[len(answer.tokens) : len(answer.tokens) + count]
        return list(mx.array(numbers.T))

    def _take(self, answers: Sequence[Answer], tokens: np.ndarray, logps: np.ndarray) -> None:
        """Adds what was drawn to the answers that are not over, up to where they end. tokens, logps: [n, rows]."""
        is_end = np.isin(tokens, self.end_tokens)
        until_end = np.where(is_end.any(axis=0), is_end.argmax(axis=0) + 1, len(tokens) + 1)
        for row, answer in enumerate(answers):
            if answer.finish is not None:
                continue
            before = len(answer.tokens)
            count = min(len(tokens), self.settings.max_tokens - before, int(until_end[row]))
            if not np.isfinite(logps[:count, row]).all():
                raise Stopped(f"the model's probabilities behind prompt {answer.prompt.id} are not finite")
            answer.tokens += tokens[:count, row].tolist()
            answer.logps += logps[:count, row].tolist()
            if (cut := self._stopped_at(answer, before)) is not None:
                del answer.tokens[cut:], answer.logps[cut:]
                answer.finish = "stop"
            elif count == until_end[row]:
                answer.finish = "stop"
            elif len(answer.tokens) == self.settings.max_tokens:
                answer.finish = "length"

    def _stopped_at(self, answer: Answer, before: int) -> int | None:
        """How many of its tokens complete a stop string, which the first `before` do not; None where none do."""
        if not self.settings.stop:
            return None
        tokens = self._without_end(answer.tokens)
        reach = max(len(stop.encode()) for stop in self.settings.stop)  # the most tokens that a stop string comes in
        if self._stop_in(self.tokenizer.decode(tokens[max(0, before - reach - 1) :])) is None:
            return None
        lengths = range(before + 1, len(tokens) + 1)
        return next((n for n in lengths if self._stop_in(self.tokenizer.decode(tokens[:n])) is not None), None)

    def _stop_in(self, text: str) -> int | None:
        """Where the first stop string begins."""
        return min((at for stop in self.settings.stop if (at := text.find(stop)) >= 0), default=None)

    def _without_end(self, tokens: list[int]) -> list[int]:
        return tokens[:-1] if tokens and tokens[-1] in self.end_tokens else tokens

    def _finished(self, answer: Answer) -> Sample:
        text = self.tokenizer.decode(self._without_end(answer.tokens))
        prompt, finish = answer.prompt, answer.finish or "length"
        return Sample(
            prompt.id, answer.k, prompt.tokens, answer.tokens, answer.logps, finish, text[: self._stop_in(text)]
        )
