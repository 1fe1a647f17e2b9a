"""Requests of lm-evaluation-harness, done by all ranks: rank 0 tells what is asked, and all pull chunks of it.

A prompt runs once for all its continuations. What a chunk comes to depends on the chunk alone, not on who does it.
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypedDict

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx_lm.generate import BatchGenerator
from mlx_lm.sample_utils import make_sampler

from lib.config.schema import Config
from lib.data.batch import collate
from lib.data.dataset import Example
from lib.data.order import micro_batches
from lib.data.tokenizer import TextTokens, Tokenizer
from lib.distributed.work_queue import Lines
from lib.distributed.world import World
from lib.errors import AgreedError
from lib.evaluate import batch_inference
from lib.model.logps import greedy_logps
from lib.model.token_stream import arrays_of
from lib.system import out_of_memory, records
from lib.training import reference_model

CHECK_EVERY = 8  # tokens between two looks for a stop text


class Scored(NamedTuple):
    """A context with continuations: how likely is each?"""

    context: list[int]
    continuations: list[list[int]]


class Generated(NamedTuple):
    """A context to go on from, until one of some texts comes; temperature 0 is greedy."""

    context: list[int]
    until: list[str]
    max_tokens: int
    temperature: float


class Asked(TypedDict, total=False):
    """What rank 0 tells the others: the work, or how it ended."""

    kind: str
    items: list[Any]
    error: str | None  # why it ended before its time


class HarnessWorker:
    """Does chunks of the work: log-probabilities of continuations, and answers.

    Args:
        folder: where rank 0 keeps what is finished.
        digest: of the model, so that what is finished is taken up by the same one only.
    """

    def __init__(
        self, model: nn.Module, tokenizer: Tokenizer, settings: Config, world: World, folder: Path, digest: str
    ):
        self.model, self.tokenizer, self.settings, self.world = model, tokenizer, settings, world
        self.folder, self.digest = folder, digest
        self.seconds = 0.0  # of all that was asked
        self._listens = True  # whether the other ranks wait for what is asked next
        self.multiple, self.shares_prompts, _ = reference_model.layout(model, settings.data, world.alone())

    def ask(self, kind: str, items: Sequence[Any]) -> list[Any]:
        """On rank 0: one result for each item, made by all ranks."""
        began = time.perf_counter()
        self.world.broadcast_text(json.dumps(Asked(kind=kind, items=list(items))))
        self._listens = False  # an error in the work is every rank's
        results = self._work(kind, items)
        self._listens = True
        self.seconds += time.perf_counter() - began
        return results

    def end(self, error: str | None = None) -> None:
        """On rank 0: nothing more will be asked."""
        if self._listens:
            self.world.broadcast_text(json.dumps(Asked(error=error)))

    def follow(self) -> None:
        """On all other ranks: works until nothing more is asked.

        Raises:
            AgreedError: rank 0 ended with an error.
        """
        while "kind" in (asked := json.loads(self.world.broadcast_text(""))):
            self._work(asked["kind"], asked["items"])
        if asked["error"] is not None:
            raise AgreedError(asked["error"])

    def _work(self, kind: str, items: Sequence[Any]) -> list[Any]:
        if not items:
            return []
        key = batch_inference.key_of(kind, items, self.digest)
        path = self.folder / f"{kind}-{key[:16]}.jsonl"
        do = {"scores": self.score, "answers": self.write}[kind]
        if not json.loads(self.world.broadcast_text(json.dumps(path.exists()))):
            with self.world.agreeing("keeping what is finished"):
                if self.world.rank == 0:
                    self.folder.mkdir(parents=True, exist_ok=True)
            batch_inference.pull(
                kind, key, items, path, self.settings, self.world, lambda rows: do([items[row] for row in rows])
            )
        if self.world.rank:
            return []
        return records.read_lines(path)

    def score(self, items: Sequence[Sequence[Any]]) -> Lines:
        """For each context a line: [log-probability, whether greedy decoding writes it] of every continuation."""
        results: list[list[tuple[float, bool]]] = [[] for _ in items]
        by_count: dict[int, list[int]] = {}  # a batch has as many continuations in each row
        for index, (_, continuations) in enumerate(items):
            by_count.setdefault(len(continuations), []).append(index)
        for indices in by_count.values():
            examples = [_example(index, *items[index]) for index in indices]
            for index, scored in zip(indices, self._scored(examples), strict=True):
                results[index] = scored
        return [json.dumps(result) for result in results]

    def _scored(self, examples: Sequence[Example]) -> list[list[tuple[float, bool]]]:
        lengths = np.array([len(e.prompt_ids) + max(map(len, e.completions)) for e in examples])
        scored: list[list[tuple[float, bool]]] = [[] for _ in examples]

        def of(indices: Sequence[int]) -> list[tuple[list[float], list[bool]]]:
            batch = collate([examples[i] for i in indices], self.multiple, self.shares_prompts)
            logps, are_greedy = greedy_logps(self.model, arrays_of(batch.inputs))
            return list(zip(logps.tolist(), are_greedy.tolist(), strict=True))[: len(indices)]

        mx.eval(self.model.state)
        for part in micro_batches(np.argsort(lengths, kind="stable"), self.settings.evaluate.batch_size):
            rows = part.tolist()
            for start, made in out_of_memory.in_pieces(rows, of):
                for index, (logps, are_greedy) in zip(rows[start:], made, strict=False):
                    scored[index] = list(zip(logps, are_greedy, strict=True))
        return scored

    def write(self, items: Sequence[Sequence[Any]]) -> Lines:
        """For each context its answer, up to the first of its stop texts."""
        asked = [Generated(*item) for item in items]
        seed = batch_inference.key_of(self.settings.train.seed, items)
        mx.random.seed(int(seed[:8], 16))
        generator = BatchGenerator(self.model, stop_tokens=[[token] for token in self.tokenizer.eos_token_ids])
        samplers = [make_sampler(temp=one.temperature) for one in asked]
        uids = generator.insert([one.context for one in asked], [one.max_tokens for one in asked], samplers=samplers)
        rows = {uid: row for row, uid in enumerate(uids)}
        ids: list[list[int]] = [[] for _ in asked]
        while responses := generator.next_generated():
            stopped = []
            for response in responses:
                made, until = ids[rows[response.uid]], asked[rows[response.uid]].until
                if response.finish_reason != "stop":
                    made.append(response.token)
                if response.finish_reason is None and len(made) % CHECK_EVERY == 0:
                    text = self._text(made)
                    stopped += [response.uid] if any(stop and stop in text for stop in until) else []
            if stopped:
                generator.remove(stopped)
        generator.close()
        return [
            json.dumps(cut(self._text(made), one.until), ensure_ascii=False)
            for made, one in zip(ids, asked, strict=True)
        ]

    def _text(self, ids: list[int]) -> str:
        inner = TextTokens(self.tokenizer).inner
        return str(inner.decode(ids, skip_special_tokens=True))


def cut(text: str, until: Sequence[str]) -> str:
    """A text before the first of some others in it."""
    return text[: min((text.find(stop) for stop in until if stop and stop in text), default=len(text))]


def _example(row: int, context: Sequence[int], continuations: Sequence[Sequence[int]]) -> Example:
    return Example(row, np.array(context, np.int32), tuple(np.array(ids, np.int32) for ids in continuations))
