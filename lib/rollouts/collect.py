"""The answers of a round: sampled and judged by all ranks from the work queue, kept readable in the run's folder.

    rounds/0003/samples.jsonl    every answer: its prompt, tokens, log-probabilities, and the policy that wrote it
    rounds/0003/scores.jsonl     what the judge made of each
    rounds/0003/pairs.jsonl      the pairs that are trained, as data.train of any run could name them

Each file is whole or absent; before, the work queue's journal (samples.jsonl.partial) has what is finished. So nothing
is sampled twice where a run goes on after a fault. Rank 0 makes the files, and every disk gets them.
"""

from __future__ import annotations

import json
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, NamedTuple, TypeVar

import mlx.core as mx
import numpy as np
from pydantic import Field, FiniteFloat, TypeAdapter
from typing_extensions import TypedDict

from lib.config.settings import Config
from lib.data.prompts import Prompts, asked_of, columns_of
from lib.data.record_formats import VOCABULARY
from lib.data.tokenizer import Tokenizer, vocabulary_digest
from lib.distributed.work_queue import Lines, WorkQueue, work
from lib.distributed.world import World
from lib.errors import UserError
from lib.evaluate.judges import Judge, Question, scores_of, text_of
from lib.evaluate.sample import Prompt, Sampler
from lib.evaluate.score_file import FileJob, key_of, pull
from lib.rollouts.pairs import Answer, Group, Pair, pairs_of
from lib.system import files
from lib.system.terminal import Terminal

ASK_SECONDS = 0.25  # between two questions whether a chunk is still wanted: a message to rank 0 each
SAMPLES, SCORES, PAIRS = "samples.jsonl", "scores.jsonl", "pairs.jsonl"
WHAT = {SAMPLES: "answered", SCORES: "judged"}
SHOWN_CHARACTERS = 400  # of each text of an example
REMEDY = "remove the folder, and what was drawn is drawn again"


class SampleLine(TypedDict):
    """A line of samples.jsonl. version: the last round that the policy has learnt, and that was kept; 0 before it."""

    round: int
    prompt_id: int
    k: int
    policy: str
    version: int
    place: str
    text: str
    finish: str
    tokens: Annotated[list[Annotated[int, Field(ge=0, lt=2**31)]], Field(min_length=1)]
    logps: list[FiniteFloat]


class ScoreLine(TypedDict):
    """A line of scores.jsonl."""

    prompt_id: int
    k: int
    score: FiniteFloat | None
    fault: str


Line = TypeVar("Line", SampleLine, ScoreLine)


def lines_of(path: Path, kind: type[Line]) -> Iterator[Line]:
    """The lines of a file of a round. Raises UserError: one is not what a round writes."""
    adapter = TypeAdapter(kind)
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            try:
                yield adapter.validate_json(line)
            except ValueError:
                raise UserError(f"{path}:{number}: not what a round writes; {REMEDY}") from None


class Collected(NamedTuple):
    """The answers of a round, the same on every rank. version: of the policy that drew them (`SampleLine`)."""

    version: int
    groups: list[Group]
    pairs: list[Pair]


class Judging:
    """A thread that judges chunks of a round's answers while the ranks train."""

    def __init__(self, queue: WorkQueue, scores: Callable[[int], Lines]):
        self.queue, self.scores, self.ended = queue, scores, False
        self.fault: BaseException | None = None
        self.thread = threading.Thread(target=self._work, name="judging", daemon=True)
        self.thread.start()

    def _work(self) -> None:
        try:
            work(self.queue, self._scores)
        except BaseException as error:  # raised again by `join`
            self.fault = error

    def _scores(self, chunk: int) -> Lines:
        if self.ended:
            raise UserError("the run has ended")
        return self.scores(chunk)

    def join(self) -> None:
        """Waits until no chunk is left to begin. Raises UserError: the judge failed."""
        self.thread.join()
        if self.fault is not None:
            raise self.fault


@dataclass(frozen=True)
class Collector:
    """Makes the answers, scores and pairs of rounds.

    Args:
        keeps_disk: whether this rank is the one that keeps the run's files on its disk.
        judges_beside: whether the judge does not need the device of the model, so that it may score meanwhile.
    """

    config: Config
    folder: Path
    world: World
    keeps_disk: bool
    sampler: Sampler
    prompts: Prompts
    judge: Judge
    judges_beside: bool
    say: Terminal
    seconds: defaultdict[str, float] = field(
        default_factory=lambda: defaultdict(float)
    )  # of this rank, of a round, by what it did

    def folder_of(self, number: int) -> Path:
        return self.folder / "rounds" / f"{number:04d}"

    def _rows(self, number: int) -> list[int]:
        return self.prompts.of_round(number, self.config.rollouts.prompts, self.config.train.seed)

    def _job(self, number: int, name: str, policy: str) -> FileJob | None:
        """The making of a round's file by all ranks; None where it is there."""
        rollouts, evaluate, out = self.config.rollouts, self.config.evaluate, self.folder_of(number) / name
        journal, rows = out.with_name(f"{name}.partial"), self._rows(number)
        if is_on_rank_0(out, self.world):
            if self.world.rank == 0:  # a process may have been killed before its journal went
                journal.unlink(missing_ok=True)
            return None
        key = key_of(policy, number, self.prompts.digest, rollouts.model_dump(), self.config.train.seed)
        if name == SCORES:
            judge = evaluate.model_dump(include={"judge", "judge_model", "judge_prompt", "answer_pattern"})
            key = key_of(key, rollouts.judge, judge)
        if self.world.rank == 0 and _first_of(journal).get("key", key) != key:  # the run went back behind the round
            self.say.warning(f"{journal} is of other weights or settings, and is made again")
            journal.unlink()
        size = max(1, rollouts.batch_size // rollouts.samples)  # prompts that a rank takes at a time
        return FileJob(f"round {number}: prompts {WHAT[name]}", key, len(rows), out, size)

    def draw(self, number: int, policy: str, version: int) -> None:
        """samples.jsonl of a round, drawn by all ranks with the weights that they have. policy: their digest."""
        if (job := self._job(number, SAMPLES, policy)) is None:
            return
        rows, queue, began, before = (
            self._rows(number),
            job.open(self.world),
            time.perf_counter(),
            self.seconds["sampling"],
        )

        def lines(part: range) -> Lines | None:
            taken = time.perf_counter()
            is_wanted = (lambda: True) if self.world.divides_model else _watch(queue, part.start // job.chunk_rows)
            answers = self._samples(number, policy, version, [rows[i] for i in part], is_wanted)
            self.seconds["sampling"] += time.perf_counter() - taken
            return None if answers is None else [json.dumps(line, ensure_ascii=False) for line in answers]

        pull(job, self.world, lines, queue=queue)
        self.seconds["waiting"] += time.perf_counter() - began - (self.seconds["sampling"] - before)

    def judge_beside(self, number: int, policy: str) -> Judging | None:
        """Begins to judge a round's answers beside training; None where the judge computes on the model's device."""
        job = self._job(number, SCORES, policy) if self.judges_beside else None
        if job is None:
            return None
        spread(self.folder_of(number) / SAMPLES, self.world, self.keeps_disk)
        lines = self._judged(number)
        return Judging(job.open(self.world, repeats=False), lambda chunk: lines(job.rows_of(chunk)))

    def _judged(self, number: int) -> Callable[[range], Lines]:
        """A function that gives lines of scores.jsonl for some of a round's prompts."""
        rows, count = self._rows(number), self.config.rollouts.samples
        with self.world.agreeing("reading the answers of a round"):
            texts = [one["text"] for one in self._lines(number, SAMPLES, SampleLine)]

        def lines(part: range) -> Lines:
            began = time.perf_counter()
            each = [(rows[i], texts[i * count : (i + 1) * count]) for i in part]
            questions = [question_of(self.prompts, *one, self.config, self.sampler.tokenizer) for one in each]
            scored = [
                ScoreLine(prompt_id=row, k=k, score=one.score, fault=one.fault)
                for (row, _), of_row in zip(each, scores_of(self.judge, questions), strict=True)
                for k, one in enumerate(of_row)
            ]
            self.seconds["judging"] += time.perf_counter() - began
            return [json.dumps(line, ensure_ascii=False) for line in scored]

        return lines

    def _lines(self, number: int, name: str, kind: type[Line]) -> list[Line]:
        """The lines of a round's file: of each prompt, in the order of k."""
        path, samples = self.folder_of(number) / name, range(self.config.rollouts.samples)
        lines = list(lines_of(path, kind))
        if [(one["prompt_id"], one["k"]) for one in lines] != [(row, k) for row in self._rows(number) for k in samples]:
            raise UserError(f"{path} has not {len(samples)} answers to each prompt, in their order; {REMEDY}")
        return lines

    def collect(self, number: int, policy: str, judging: Judging | None) -> Collected:
        """A round's answers with their scores, and their pairs.

        policy: digest of the weights that drew them. judging: the round's, if this process began it.
        """
        folder, rows, rollouts = self.folder_of(number), self._rows(number), self.config.rollouts
        spread(folder / SAMPLES, self.world, self.keeps_disk)
        if judging is not None:
            with self.world.agreeing("judging"):
                judging.join()
        if (job := self._job(number, SCORES, policy)) is not None:
            queue = judging.queue if judging is not None else None
            pull(job, self.world, self._judged(number), needs_model=False, queue=queue)
        spread(folder / SCORES, self.world, self.keeps_disk)
        with self.world.agreeing("reading the scores of a round"):
            samples, scores = self._lines(number, SAMPLES, SampleLine), self._lines(number, SCORES, ScoreLine)
        each = [
            Answer(one["k"], one["text"], one["tokens"], one["logps"], one["finish"], scored["score"])
            for one, scored in zip(samples, scores, strict=True)
        ]
        count = rollouts.samples
        of_prompts = [(row, each[i * count : (i + 1) * count]) for i, row in enumerate(rows)]
        groups = [Group(row, self.prompts.prompt_ids(row), of_row) for row, of_row in of_prompts]
        pairs = [pair for group in groups for pair in pairs_of(group, rollouts)]
        if self.keeps_disk and self.config.record_kind == "preference" and not (folder / PAIRS).exists():
            files.write_atomically(folder / PAIRS, "".join(self._pair_line(pair) + "\n" for pair in pairs))
        return Collected(samples[0]["version"], groups, pairs)

    def _samples(
        self, number: int, policy: str, version: int, rows: Sequence[int], is_wanted: Callable[[], bool]
    ) -> list[SampleLine] | None:
        """A line for each answer to some prompts; None once they are not wanted."""
        prompts = [Prompt(row, self.prompts.prompt_ids(row)) for row in rows]
        passes = len(rows) * self.config.rollouts.samples
        with self.world.workers.together("answers of a round", passes):
            samples = self.sampler.sample(prompts, (self.config.train.seed, number), is_wanted)
        if len(samples) < passes:
            return None
        return [
            SampleLine(
                round=number,
                prompt_id=drawn.prompt_id,
                k=drawn.k,
                policy=policy,
                version=version,
                place=self.prompts.location(drawn.prompt_id),
                text=drawn.text,
                finish=str(drawn.finish),
                tokens=drawn.tokens,
                logps=drawn.logps,
            )
            for drawn in samples
        ]

    def examples(self, pairs: Sequence[Pair]) -> list[dict[str, str]]:
        """A few pairs as text, for people."""
        shown = []
        for pair in pairs[: self.config.evaluate.samples]:
            prompt = asked_of(self.prompts.record(pair.prompt_id), self.config.data, self.sampler.tokenizer)
            texts = {"prompt": text_of(prompt), "chosen": pair.chosen.text, "rejected": pair.rejected.text}
            shown.append({name: text[:SHOWN_CHARACTERS] for name, text in texts.items()})
        return shown

    def _pair_line(self, pair: Pair) -> str:
        record = {
            "prompt_id": pair.prompt_id,
            "k": [pair.chosen.k, pair.rejected.k],
            "scores": [pair.chosen.score, pair.rejected.score],
            **columns_of(self.prompts.record(pair.prompt_id), self.config.data, self.sampler.tokenizer),
            "chosen": pair.chosen.text,
            "rejected": pair.rejected.text,
            VOCABULARY: vocabulary_digest(self.sampler.tokenizer),
            "prompt_ids": pair.prompt_tokens,
            "chosen_ids": pair.chosen.tokens,
            "rejected_ids": pair.rejected.tokens,
        }
        return json.dumps(record, ensure_ascii=False)


def question_of(prompts: Prompts, row: int, texts: Sequence[str], config: Config, tokenizer: Tokenizer) -> Question:
    """What a judge is asked about some answers to a prompt."""
    record = prompts.record(row)
    return Question(prompts.location(row), asked_of(record, config.data, tokenizer), texts, record)


def policy_of(folder: Path) -> str:
    """Digest of the policy that drew a round's answers; nothing where they are not there."""
    return str(_first_of(folder / SAMPLES).get("policy", ""))


def _watch(queue: WorkQueue, chunk: int) -> Callable[[], bool]:
    """A function, cheap to call, that says whether no other rank has finished a chunk that is in hand."""
    asked, wanted = time.monotonic(), True

    def is_wanted() -> bool:
        nonlocal asked, wanted
        if wanted and time.monotonic() - asked > ASK_SECONDS:
            wanted, asked = queue.is_wanted(chunk), time.monotonic()
        return wanted

    return is_wanted


def _first_of(path: Path) -> dict[str, object]:
    """The first line's object; empty where there is none."""
    try:
        with path.open("rb") as file:
            first = json.loads(file.readline())
    except (OSError, ValueError):
        return {}
    return first if isinstance(first, dict) else {}


def is_on_rank_0(path: Path, world: World) -> bool:
    return bool(json.loads(world.broadcast_text(json.dumps(path.exists()))))


def spread(path: Path, world: World, keeps_disk: bool) -> None:
    """Gives rank 0's file to every disk that lacks it. Raises AgreedError: a disk is full or not writable."""
    if not any(world.gather_text("" if path.exists() else "missing", f"who has {path.name}")):
        return
    own = path.read_bytes() if world.rank == 0 else b""
    size = int(world.broadcast_text(str(len(own))))
    content = mx.array(np.frombuffer(own or bytes(size), np.uint8))
    content = np.array(world.broadcast({"content": content})["content"])
    with world.agreeing(f"keeping {path.name}"):
        if world.rank and keeps_disk and not path.exists():
            files.write_atomically(path, content.tobytes())
