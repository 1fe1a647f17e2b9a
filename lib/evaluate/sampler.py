"""Answers of a model to prompts, many at a time, with the log-probability of every token.

The numbers that decide a token follow from (seed, prompt, k, position) alone, so ranks that take the same prompts
together, in whatever order, make the same samples as one rank. Caches, padding and top-p are mlx-lm's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, TypeVar

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx.utils import tree_map
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.sample_utils import apply_top_p

from lib.config.settings import RolloutSettings
from lib.data.order import micro_batches
from lib.data.tokenizer import Tokenizer
from lib.distributed.world import World
from lib.errors import Stopped
from lib.model.layout import layout_of
from lib.model.stream_trial import rounding_tolerance
from lib.system import out_of_memory

BLOCK = 8  # tokens between two looks at what was drawn: until then nothing waits for the device
PREFILL_TOKENS = 16384  # of prompts in one pass
MOST_ROUNDING = 0.3  # of the logits' norm: an H200's kernels for batches differ by a tenth from those for one row

T = TypeVar("T")


class Prompt(NamedTuple):
    """What is answered. id: its row in the file of prompts; tokens: at least one."""

    id: int
    tokens: list[int]


@dataclass
class Sample:
    """One answer, while it grows and when it is finished."""

    prompt_id: int
    k: int  # its number among the answers to this prompt, from 0
    prompt_tokens: list[int]
    tokens: list[int] = field(default_factory=list)  # up to the end token, or to what completes a stop string
    logps: list[float] = field(default_factory=list)  # nats, of softmax(logits / temperature), before top_p
    finish: Literal["stop", "length"] | None = None
    text: str = ""  # without the end token, and without a stop string and what follows it


@dataclass(frozen=True)
class GreedySampling:
    """The likeliest token, always; with a temperature, drawn ones. batch_size: the most answers at the same time."""

    max_tokens: int
    samples: int = 1
    temperature: float = 0.0
    top_p: float = 1.0
    stop: tuple[str, ...] = ()
    batch_size: int = 32


def in_batches(
    lengths: Sequence[int] | np.ndarray,
    batch_size: int,
    do: Callable[[Sequence[int]], Iterable[T]],
    can_halve: bool = True,
) -> list[T]:
    """What `do` makes of rows, given by index in batches of about one length, which halve where memory is short; rows
    of which it makes nothing are left out."""
    results: dict[int, T] = {}
    for part in micro_batches(np.argsort(lengths, kind="stable"), batch_size):
        rows = part.tolist()
        for start, made in out_of_memory.in_pieces(rows, do, can_halve):
            results |= zip(rows[start:], made, strict=False)
    return [results[row] for row in range(len(lengths)) if row in results]


def uniforms(seed: Sequence[int], prompt_id: int, k: int, count: int) -> np.ndarray:
    """One number in [0, 1) for each position of the k-th sample of a prompt: float32 [count], multiples of 2^-23. They
    follow from these arguments alone (Philox, Salmon et al. 2011), and a longer row begins with the shorter one."""
    generator = np.random.Philox(np.random.SeedSequence([*seed, prompt_id, k]))
    return (generator.random_raw(count) >> np.uint64(41)).astype(np.float32) * np.float32(2.0**-23)


def draw(logits: mx.array, numbers: mx.array, temperature: float, top_p: float) -> tuple[mx.array, mx.array]:
    """The tokens drawn from logits [B, V], int32 [B], and their log-probabilities, float32 [B]. numbers: float32 [B],
    in [0, 1): the token is the first whose cumulative probability exceeds its row's. The log-probabilities are those of
    softmax(logits / temperature), before top_p (nucleus sampling, arXiv:1904.09751, section 3.1) leaves tokens out: the
    ratio in GRPO's loss compares them with a pass that has no top_p. A temperature of 0 takes the likeliest token; its
    log-probability is that at temperature 1."""
    logps = logits.astype(mx.float32) / (temperature or 1.0)
    logps = logps - mx.logsumexp(logps, axis=-1, keepdims=True)
    if temperature:
        weights = mx.exp(apply_top_p(logps, top_p) if top_p < 1 else logps)
        cumulative = mx.cumsum(weights, axis=-1)
        chosen = mx.argmax((cumulative > numbers[:, None] * cumulative[:, -1:]) & (weights > 0), axis=-1)
    else:
        chosen = mx.argmax(logps, axis=-1)
    return chosen.astype(mx.int32), mx.take_along_axis(logps, chosen[:, None], axis=-1).squeeze(-1)


class Sampler:
    """Samples answers. world: whose ranks hold parts of the model, if they do: all sample the same at the same time.
    pads: whether prompts of several lengths are answered together."""

    def __init__(
        self,
        model: nn.Module,
        tokenizer: Tokenizer,
        settings: RolloutSettings | GreedySampling,
        world: World = World(),  # noqa: B008  (frozen)
    ):
        self.model, self.tokenizer, self.settings, self.world = model, tokenizer, settings, world
        self.end_tokens = sorted(tokenizer.eos_token_ids)
        layout, self.pads = layout_of(model), not world.divides_model  # whose ranks would have to fail alike
        if self.pads and layout.pads_prompts is None:
            layout.pads_prompts = self._can_pad()
        self.pads = bool(self.pads and layout.pads_prompts)

    def _can_pad(self) -> bool:
        """Whether mlx-lm's batched caches serve this family: recurrent layers and soft caps need not. It is tried."""
        prompts = [np.random.default_rng(i).integers(0, 16, count).tolist() for i, count in enumerate((5, 3))]
        was_training = self.model.training
        self.model.eval()
        try:
            plain = mx.concatenate([self.model(mx.array([ids]))[:, -1] for ids in prompts]).astype(mx.float32)
            error, allowed = self._prefill_error(prompts, plain), rounding_tolerance(self.model)
            if allowed < error < np.inf:
                rounding = self._prefill_error(prompts[1:] * 2, plain[1:])  # of a batch, without padding
                allowed = max(allowed, min(2 * rounding, MOST_ROUNDING))
        except Exception:  # a family's own code, handed what it does not expect, may raise anything
            return False
        finally:
            self.model.train(was_training)
        return bool(error <= allowed or not np.isfinite(error))

    def _prefill_error(self, prompts: Sequence[list[int]], plain: mx.array) -> float:
        """By how much of their norm the logits of a batch of prompts differ from those of each alone, [B, V]."""
        error = self._prefill(prompts)[0][:: self.settings.samples].astype(mx.float32) - plain
        return float((mx.linalg.norm(error) / mx.linalg.norm(mx.broadcast_to(plain, error.shape))).item())

    def sample(
        self, prompts: Sequence[Prompt], seed: Sequence[int] = (), is_wanted: Callable[[], bool] = lambda: True
    ) -> list[Sample]:
        """`settings.samples` answers to each prompt, in the order of the prompts; fewer once they are not wanted. seed:
        whole numbers that no other call for the same prompts has, e.g. train.seed and the round. is_wanted: asked every
        few tokens. Raises Stopped: a probability is not finite. OutOfMemory: one prompt's answers do not fit."""
        assert all(prompt.tokens for prompt in prompts), "nothing comes before the first token of an empty prompt"
        was_training, size = self.model.training, max(1, self.settings.batch_size // self.settings.samples)
        before = -np.array([len(prompt.tokens) for prompt in prompts])  # the longest first
        samples: dict[int, list[Sample]] = {}
        self.model.eval()
        mx.eval(self.model.state)
        try:
            # Of exactly one length, where rows cannot be padded.
            for same in [np.arange(len(prompts))] if self.pads else [before == one for one in np.unique(before)]:
                rows = np.arange(len(prompts))[same].tolist()
                do = lambda part, of=rows: self._batch([prompts[of[i]] for i in part], seed, is_wanted)  # noqa: E731
                made = in_batches(before[rows], size, do, can_halve=not self.world.divides_model)
                samples |= zip(rows, made, strict=False)
        finally:
            self.model.train(was_training)
        return [sample for i in range(len(prompts)) for sample in samples.get(i, [])]

    def _batch(
        self, prompts: Sequence[Prompt], seed: Sequence[int], is_wanted: Callable[[], bool]
    ) -> list[list[Sample]]:
        """The answers to prompts that are answered together; none once they are not wanted."""
        most, count = self.settings.max_tokens, self.settings.samples
        answers = [Sample(prompt.id, k, prompt.tokens) for prompt in prompts for k in range(count)]
        numbers = mx.array(np.stack([uniforms(seed, answer.prompt_id, answer.k, most) for answer in answers]))
        logits, cache = self._prefill([prompt.tokens for prompt in prompts])
        live, position = answers, 1
        tokens, logps = self._draw(logits, numbers[:, 0])
        self._take(live, tokens[None], logps[None])
        while rows := [i for i, answer in enumerate(live) if answer.finish is None]:
            if not is_wanted():
                return []
            if len(rows) < len(live):
                left = mx.array(rows)
                live, tokens, numbers = [live[i] for i in rows], tokens[left], numbers[left]
                self._select(cache, left)
            drawn = []
            for column in range(position, min(position + BLOCK, most)):
                tokens, logps = self._draw(self.model(tokens[:, None], cache=cache)[:, -1], numbers[:, column])
                mx.async_eval(tokens, logps)
                drawn.append((tokens, logps))
            position += len(drawn)
            self._take(live, *(mx.stack(each) for each in zip(*drawn, strict=True)))
        for answer in answers:
            text = self.tokenizer.decode(self._without_end(answer.tokens))
            answer.text = text[: self._stop_in(text)]
        return [answers[start : start + count] for start in range(0, len(answers), count)]

    def _prefill(self, prompts: Sequence[list[int]]) -> tuple[mx.array, list[Any]]:
        """The logits behind each prompt, a row for each of its samples, [B, V], and the caches of these rows."""
        cache = make_prompt_cache(self.model)
        if self.pads:
            cache = [layer.merge([layer] * len(prompts)) for layer in cache]  # empty ones
        before = [len(prompt) - 1 for prompt in prompts]
        width = max(before)
        tokens = np.zeros((len(prompts), width), np.int32)
        for row, prompt in zip(tokens, prompts, strict=True):
            row[: len(prompt) - 1] = prompt[:-1]
        padding = [width - count for count in before]
        if any(padding):
            for layer in cache:
                layer.prepare(lengths=before, right_padding=padding)
        step = max(1, PREFILL_TOKENS // len(prompts))
        for start in range(0, width, step):
            self.model(mx.array(tokens[:, start : start + step]), cache=cache)
            mx.eval([layer.state for layer in cache])
        if any(padding):
            for layer in cache:
                layer.finalize()
        logits = self.model(mx.array([prompt[-1:] for prompt in prompts]), cache=cache)[:, -1]
        rows = mx.repeat(mx.arange(len(prompts)), self.settings.samples)
        self._select(cache, rows)
        return logits[rows], cache

    def _select(self, cache: Sequence[Any], rows: mx.array) -> None:
        """Keeps some rows of the caches, each as often as it is named."""
        for layer in cache:
            if self.pads:
                layer.filter(rows)
            else:
                layer.state = tree_map(lambda x: x[rows] if isinstance(x, mx.array) and x.ndim else x, layer.state)

    def _draw(self, logits: mx.array, numbers: mx.array) -> tuple[mx.array, mx.array]:
        tokens, logps = draw(logits, numbers, self.settings.temperature, self.settings.top_p)
        if self.world.divides_model:
            mx.eval(tokens, logps)  # first all ranks pass through the model, then they receive what the last one drew
            tokens, logps = self.world.workers.decide(tokens), self.world.workers.decide(logps)
        return tokens, logps

    def _take(self, answers: Sequence[Sample], tokens: mx.array, logps: mx.array) -> None:
        """Adds what was drawn to the answers that are not over, up to where they end. tokens, logps: [n, rows]."""
        drawn, logps_drawn = np.array(tokens), np.array(logps)
        is_end = np.isin(drawn, self.end_tokens)
        until_end = np.where(is_end.any(axis=0), is_end.argmax(axis=0) + 1, len(drawn))
        for row, answer in enumerate(answers):
            before, count = len(answer.tokens), int(until_end[row])
            if not np.isfinite(logps_drawn[:count, row]).all():
                raise Stopped(f"the model's probabilities behind prompt {answer.prompt_id} are not finite")
            answer.tokens += drawn[:count, row].tolist()
            answer.logps += logps_drawn[:count, row].tolist()
            if (cut := self._stopped_at(answer.tokens, before)) is not None:
                del answer.tokens[cut:], answer.logps[cut:]
            if cut is not None or is_end[:, row].any():
                answer.finish = "stop"
            elif len(answer.tokens) == self.settings.max_tokens:
                answer.finish = "length"

    def _stopped_at(self, drawn: list[int], before: int) -> int | None:
        """How many of an answer's tokens complete a stop string, which the first `before` do not; None: none do."""
        if not self.settings.stop:
            return None
        tokens = self._without_end(drawn)
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
