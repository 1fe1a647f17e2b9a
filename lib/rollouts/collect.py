"""The answers of a round: sampled and judged by all ranks from the work queue, kept readable in the run's folder.

    rounds/0003/samples.jsonl    every answer: its prompt, tokens, log-probabilities, and the policy that wrote it
    rounds/0003/scores.jsonl     what the judge made of each
    rounds/0003/pairs.jsonl      the pairs that are trained, as data.train of any run could name them

Each file is whole or absent; before, the work queue's journal (samples.jsonl.partial) has what is finished. So nothing
is sampled twice where a run goes on after a fault. Rank 0 makes the files, and every disk gets them.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar

import mlx.core as mx
import numpy as np
from pydantic import FiniteFloat, TypeAdapter

from lib.config.settings import Config
from lib.data.prompts import Prompts, columns_of
from lib.data.record_formats import VOCABULARY
from lib.data.tokenizer import vocabulary_digest
from lib.distributed.work_queue import Lines, WorkQueue, open_queue
from lib.distributed.world import World
from lib.errors import UserError
from lib.evaluate.judges import Judge, question_of, scores_of
from lib.evaluate.sampler import Prompt, Sampler
from lib.evaluate.score_file import FileJob, is_on_rank_0, key_of, pull
from lib.rollouts.pairs import Answer, Group, Pair, pairs_of
from lib.system import files
from lib.system.terminal import Terminal

ASK_SECONDS = 0.25  # between two questions whether a chunk is still wanted: a message to rank 0 each
SAMPLES, SCORES, PAIRS = "samples.jsonl", "scores.jsonl", "pairs.jsonl"
WHAT = {SAMPLES: "answered", SCORES: "judged"}
OF_SAMPLE = ("prompt_id", "k", "text", "finish", "tokens", "logps")
REMEDY = "remove the folder, and what was drawn is drawn again"


@dataclass(frozen=True)
class ScoreLine:
    """A line of scores.jsonl."""

    prompt_id: int
    k: int
    score: FiniteFloat | None
    fault: str


Line = TypeVar("Line", Answer, ScoreLine)


def lines_of(path: Path, kind: type[Line]) -> list[Line]:
    """The lines of a file of a round. Raises UserError: one is not what a round writes."""
    adapter, lines = TypeAdapter(kind), list[Line]()
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            try:
                lines.append(adapter.validate_json(line))
            except ValueError:
                raise UserError(f"{path}:{number}: not what a round writes; {REMEDY}") from None
    return lines


@dataclass(frozen=True)
class Collector:
    """Makes the answers, scores and pairs of rounds. keeps_disk: whether this rank is the one that keeps the run's
    files on its disk."""

    config: Config
    folder: Path
    world: World
    keeps_disk: bool
    sampler: Sampler
    prompts: Prompts
    judge: Judge
    say: Terminal

    def folder_of(self, number: int) -> Path:
        return self.folder / "rounds" / f"{number:04d}"

    def _rows(self, number: int) -> list[int]:
        return self.prompts.of_round(number, self.config.rollouts.prompts, self.config.train.seed)

    def _job(self, number: int, name: str, policy: str) -> FileJob | None:
        """The making of a round's file by all ranks; None where it is there."""
        rollouts, evaluate, out = self.config.rollouts, self.config.evaluate, self.folder_of(number) / name
        journal = out.with_name(f"{name}.partial")
        if is_on_rank_0(out, self.world):
            if self.world.rank == 0:  # a process may have been killed before its journal went
                journal.unlink(missing_ok=True)
            return None
        key = key_of(policy, number, self.prompts.digest, rollouts.model_dump(), self.config.train.seed)
        if name == SCORES:
            judge = evaluate.model_dump(include={"judge", "judge_model", "judge_prompt", "answer_pattern"})
            key = key_of(key, rollouts.judge, judge)
        if self.world.rank == 0 and first_of(journal).get("key", key) != key:  # the run went back behind the round
            self.say.warning(f"{journal} is of other weights or settings, and is made again")
            journal.unlink()
        size = max(1, rollouts.batch_size // rollouts.samples)  # prompts that a rank takes at a time
        return FileJob(f"round {number}: prompts {WHAT[name]}", key, rollouts.prompts, out, size)

    def draw(self, number: int, policy: str) -> None:
        """samples.jsonl of a round, drawn by all ranks with the weights that they have. policy: their digest."""
        if (job := self._job(number, SAMPLES, policy)) is None:
            return
        rows, queue, world = self._rows(number), open_queue(self.world, job.out, job.key, job.chunks), self.world

        def lines(part: range) -> Lines | None:
            passes = len(part) * self.config.rollouts.samples
            is_wanted = (lambda: True) if world.divides_model else _watch(queue, part.start // job.chunk_rows)
            prompts = [Prompt(rows[i], self.prompts.ids[rows[i]]) for i in part]
            with world.workers.together("answers of a round", passes):
                samples = self.sampler.sample(prompts, (self.config.train.seed, number), is_wanted)
            if len(samples) < passes:
                return None
            written = list[str]()
            for sample in samples:
                facts = {"round": number, "policy": policy, "place": self.prompts.records.location(sample.prompt_id)}
                facts |= {name: getattr(sample, name) for name in OF_SAMPLE}
                written.append(json.dumps(facts, ensure_ascii=False))
            return written

        pull(job, world, lines, queue=queue)

    def _judged(self, number: int) -> Callable[[range], Lines]:
        """A function that gives lines of scores.jsonl for some of a round's prompts."""
        rows, count = self._rows(number), self.config.rollouts.samples
        with self.world.agreeing("reading the answers of a round"):
            texts = [answer.text for answer in self._lines(number, SAMPLES, Answer)]

        def lines(part: range) -> Lines:
            source = self.prompts.records, self.config.data, self.sampler.tokenizer
            questions = [question_of(rows[i], texts[i * count : (i + 1) * count], *source) for i in part]
            return [
                json.dumps({"prompt_id": rows[i], "k": k, "score": of.score, "fault": of.fault}, ensure_ascii=False)
                for i, of_row in zip(part, scores_of(self.judge, questions), strict=True)
                for k, of in enumerate(of_row)
            ]

        return lines

    def _lines(self, number: int, name: str, kind: type[Line]) -> list[Line]:
        """The lines of a round's file: of each prompt, in the order of k."""
        path, samples = self.folder_of(number) / name, range(self.config.rollouts.samples)
        lines = lines_of(path, kind)
        if [(line.prompt_id, line.k) for line in lines] != [(row, k) for row in self._rows(number) for k in samples]:
            raise UserError(f"{path} has not {len(samples)} answers to each prompt, in their order; {REMEDY}")
        return lines

    def collect(self, number: int, policy: str) -> tuple[list[Group], list[Pair]]:
        """A round's scored answers and their pairs, on every rank. policy: digest of the weights that drew them."""
        folder, count = self.folder_of(number), self.config.rollouts.samples
        spread(folder / SAMPLES, self.world, self.keeps_disk)
        if (job := self._job(number, SCORES, policy)) is not None:
            pull(job, self.world, self._judged(number), needs_model=False)
        spread(folder / SCORES, self.world, self.keeps_disk)
        with self.world.agreeing("reading the scores of a round"):
            samples, scores = self._lines(number, SAMPLES, Answer), self._lines(number, SCORES, ScoreLine)
        answers = [replace(answer, score=of.score) for answer, of in zip(samples, scores, strict=True)]
        groups = [
            Group(row, self.prompts.ids[row], answers[i * count : (i + 1) * count])
            for i, row in enumerate(self._rows(number))
        ]
        pairs = [pair for group in groups for pair in pairs_of(group, self.config.rollouts)]
        if self.keeps_disk and self.config.record_kind == "preference" and not (folder / PAIRS).exists():
            files.write_atomically(folder / PAIRS, "".join(self._pair_line(pair) + "\n" for pair in pairs))
        return groups, pairs

    def _pair_line(self, pair: Pair) -> str:
        record = {
            "prompt_id": pair.prompt_id,
            "k": [pair.chosen.k, pair.rejected.k],
            "scores": [pair.chosen.score, pair.rejected.score],
            **columns_of(self.prompts.records[pair.prompt_id], self.config.data, self.sampler.tokenizer),
            "chosen": pair.chosen.text,
            "rejected": pair.rejected.text,
            VOCABULARY: vocabulary_digest(self.sampler.tokenizer),
            "prompt_ids": pair.prompt_tokens,
            "chosen_ids": pair.chosen.tokens,
            "rejected_ids": pair.rejected.tokens,
        }
        return json.dumps(record, ensure_ascii=False)


def _watch(queue: WorkQueue, chunk: int) -> Callable[[], bool]:
    """A function, cheap to call, that says whether no other rank has finished a chunk that is in hand."""
    last, wanted = time.monotonic(), True

    def is_wanted() -> bool:
        nonlocal last, wanted
        if wanted and time.monotonic() - last > ASK_SECONDS:
            wanted, last = queue.is_wanted(chunk), time.monotonic()
        return wanted

    return is_wanted


def first_of(path: Path) -> dict[str, object]:
    """The first line's object; empty where there is none."""
    try:
        with path.open("rb") as file:
            return dict(json.loads(file.readline()))
    except (OSError, ValueError, TypeError):
        return {}


def spread(path: Path, world: World, keeps_disk: bool) -> None:
    """Gives rank 0's file to every disk that lacks it. Raises AgreedError: a disk is full or not writable."""
    if not any(world.gather_text("" if path.exists() else "missing", f"who has {path.name}")):
        return
    content = path.read_bytes() if world.rank == 0 else b""
    size = int(world.broadcast_text(str(len(content))))
    array = world.broadcast({"content": mx.array(np.frombuffer(content or bytes(size), np.uint8))})["content"]
    with world.agreeing(f"keeping {path.name}"):
        if world.rank and keeps_disk and not path.exists():
            files.write_atomically(path, np.array(array).tobytes())
