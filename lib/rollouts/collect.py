"""The answers of a round: sampled and judged by all ranks from the work queue, kept readable in the run's folder.

    rounds/0003/samples.jsonl    every answer: its prompt, tokens, log-probabilities, and the policy that wrote it
    rounds/0003/scores.jsonl     what the judge made of each
    rounds/0003/pairs.jsonl      the pairs that are trained, as data.train of any run could name them

Each file is whole or absent; before, the work queue's journal (samples.jsonl.partial) has what is finished. So nothing
is sampled twice where a run goes on after a fault. Rank 0 makes the files, and every disk gets them. `draw` begins a
round's journals, `collect` finishes them, makes the files and the pairs.
"""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, TypeVar

import mlx.core as mx
import numpy as np
from pydantic import Field, FiniteFloat, TypeAdapter
from typing_extensions import TypedDict

from lib.config.settings import Config
from lib.data.prompts import Prompts, asked_of, columns_of
from lib.data.tokenizer import stamp_of
from lib.distributed.work_queue import Lines, ServedQueue, WorkQueue, open_queue
from lib.distributed.world import World
from lib.errors import UserError
from lib.evaluate.judges import Judge, Question, scores_of, text_of
from lib.evaluate.sample import Prompt, Sampler
from lib.evaluate.score_file import FileJob, key_of, pull, work_on
from lib.rollouts.pairs import Answer, Group, Pair, pairs_of
from lib.system import files
from lib.system.terminal import Terminal

ASK_SECONDS = 0.25  # between two questions whether a chunk is still wanted: a message to rank 0 each
SAMPLES, SCORES, PAIRS = "samples.jsonl", "scores.jsonl", "pairs.jsonl"
SHOWN_CHARACTERS = 400  # of each text of an example
PIECE_BYTES = 2**24  # of a file, in one collective
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
    """The lines of a file of a round.

    Raises:
        UserError: one is not what a round writes.
    """
    adapter = TypeAdapter(kind)
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            try:
                yield adapter.validate_json(line)
            except ValueError:
                raise UserError(f"{path}:{number}: not what a round writes; {REMEDY}") from None


@dataclass(frozen=True)
class Policy:
    """Which weights draw a round's answers: their digest, and the last round that they have learnt (`SampleLine`)."""

    digest: str
    version: int


@dataclass(frozen=True)
class Collected:
    """The answers of a round, the same on every rank, and this rank's seconds of sampling and judging.

    Args:
        version: of the policy that drew them.
    """

    version: int
    groups: list[Group]
    pairs: list[Pair]
    seconds: dict[str, float]


@dataclass
class Drawing:
    """The drawing of a round, which this rank takes part in; a thread judges what was drawn, chunk after chunk.

    Args:
        samples, scores: the queues of what the two journals lack.
        thread: None where the judge computes on the device of the model.
        sampling_seconds: of this rank; waiting_seconds: in which others still drew, and it had nothing to do.
    """

    samples: WorkQueue
    scores: WorkQueue
    thread: ThreadPoolExecutor | None
    sampling_seconds: float = 0.0
    waiting_seconds: float = 0.0
    judging_seconds: float = 0.0
    judged: list[Future[None]] = field(default_factory=list)

    def judge(self, chunk: int, scores: Callable[[], Lines]) -> None:
        """Judges a chunk, when those before it are done.

        Raises:
            UserError: the judge failed on a chunk before it.
        """
        for future in self.judged:
            if future.done():
                future.result()

        def work() -> None:
            began = time.perf_counter()
            lines = scores()
            self.judging_seconds += time.perf_counter() - began
            self.scores.finish(chunk, lines)

        if self.thread is not None:
            self.judged.append(self.thread.submit(work))

    def is_wanted(self, chunk: int) -> Callable[[], bool]:
        """A function, cheap to call, that says whether a chunk in hand is still to be drawn."""
        asked, wanted = time.monotonic(), True

        def is_wanted() -> bool:
            nonlocal asked, wanted
            if wanted and time.monotonic() - asked > ASK_SECONDS:
                wanted, asked = self.samples.is_wanted(chunk), time.monotonic()
            return wanted

        return is_wanted

    def end(self) -> None:
        """Judges nothing after the chunk in hand, and does not wait for that."""
        if self.thread is not None:
            self.thread.shutdown(wait=False, cancel_futures=True)

    def close(self, timeout_seconds: float) -> None:
        """Ends, with what is finished in the journals. timeout_seconds: the longest wait for the other ranks.

        Raises:
            UserError: the judge failed on a chunk.
        """
        self.end()
        with contextlib.ExitStack() as stack:
            stack.callback(self.scores.close, timeout_seconds)
            stack.callback(self.samples.close, timeout_seconds)
            for future in self.judged:
                if not future.cancelled():
                    future.result()


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

    def folder_of(self, number: int) -> Path:
        return self.folder / "rounds" / f"{number:04d}"

    @property
    def chunk_rows(self) -> int:
        """Prompts that a rank takes at a time."""
        return max(1, self.config.rollouts.batch_size // self.config.rollouts.samples)

    def _rows(self, number: int) -> list[int]:
        return self.prompts.of_round(number, self.config.rollouts.prompts, self.config.train.seed)

    def _keys(self, number: int, policy: str) -> dict[str, str]:
        """Digests of all that samples.jsonl and scores.jsonl of a round depend on."""
        rollouts, seed = self.config.rollouts, self.config.train.seed
        of_samples = key_of(policy, number, self.prompts.digest, rollouts.model_dump(), seed)
        of_judge = self.config.evaluate.model_dump(include={"judge", "judge_model", "judge_prompt", "answer_pattern"})
        return {SAMPLES: of_samples, SCORES: key_of(of_samples, rollouts.judge, of_judge)}

    def draw(self, number: int, policy: Policy, waits: bool) -> Drawing | None:
        """A round's answers, drawn by all ranks with the weights that they have; None where they are there already.

        A thread judges what this rank has drawn, unless the judge computes on the device of the model. It goes on until
        the drawing is closed, which `collect` does.

        waits: for what other ranks draw, of which this one then takes a part; else it returns when nothing is left to
        begin.

        Raises:
            UserError, AgreedError: the judge scores nothing, a disk is full, or rank 0 is gone.
        """
        world, folder, rows = self.world, self.folder_of(number), self._rows(number)
        if _is_on_rank_0(folder / SAMPLES, world):
            return None
        keys, chunks = self._keys(number, policy.digest), -(-len(rows) // self.chunk_rows)
        queues = []
        for name, key in keys.items():
            self._drop_journal_of_another(folder / name, key)
            queues.append(open_queue(world, folder / name, key, chunks, repeats=waits and name == SAMPLES))
        samples, scores = queues
        drawing = Drawing(samples, scores, ThreadPoolExecutor(1, "judging") if self.judges_beside else None)
        with self.say.counting(f"round {number}: prompts answered", len(rows)) as progress:
            if isinstance(drawing.samples, ServedQueue):
                drawing.samples.report = lambda done, by_rank: progress(min(done * self.chunk_rows, len(rows)))

            def lines(chunk: int) -> Lines | None:
                taken, part = time.perf_counter(), rows[chunk * self.chunk_rows : (chunk + 1) * self.chunk_rows]
                is_wanted = (lambda: True) if world.divides_model else drawing.is_wanted(chunk)
                answers = self._samples(number, policy, part, is_wanted)
                drawing.sampling_seconds += time.perf_counter() - taken
                if answers is None:
                    return None
                if not world.divides_model or chunk % world.size == world.rank:
                    drawing.judge(chunk, lambda: self._scores(part, answers))
                return [json.dumps(line, ensure_ascii=False) for line in answers]

            began = time.perf_counter()
            work_on(drawing.samples, world, lines)
            drawing.waiting_seconds = time.perf_counter() - began - drawing.sampling_seconds
        return drawing

    def collect(self, number: int, policy: str, drawing: Drawing | None) -> Collected:
        """A round's answers with their scores, and their pairs.

        policy: digest of the weights that drew them. drawing: the round's, if this process began it.

        Raises:
            UserError, AgreedError: the judge scores nothing, a disk is full, or rank 0 is gone.
        """
        folder, rows, keys = self.folder_of(number), self._rows(number), self._keys(number, policy)
        seconds = {"sampling_seconds": 0.0, "waiting_seconds": 0.0, "judging_seconds": 0.0}
        if drawing is not None:
            with self.world.agreeing("judging"):
                drawing.close(self.world.timeout_seconds)
            seconds = {name: getattr(drawing, name) for name in seconds}
        self._make(number, SAMPLES, keys, _missing)
        with self.world.agreeing("reading the answers of a round"):
            answers = _by_prompt(folder / SAMPLES, rows, self.config.rollouts.samples)

        def scores(part: range) -> Lines:
            began, taken = time.perf_counter(), [rows[i] for i in part]
            lines = self._scores(taken, [answer for row in taken for answer in answers[row]])
            seconds["judging_seconds"] += time.perf_counter() - began
            return lines

        self._make(number, SCORES, keys, scores)
        with self.world.agreeing("reading the scores of a round"):
            groups = self._groups(folder / SCORES, answers)
        pairs = [pair for group in groups for pair in pairs_of(group, self.config.rollouts)]
        if self.keeps_disk and self.config.record_kind == "preference" and not (folder / PAIRS).exists():
            files.write_atomically(folder / PAIRS, "".join(self._pair_line(pair) + "\n" for pair in pairs))
        return Collected(answers[rows[0]][0]["version"], groups, pairs, seconds)

    def _make(self, number: int, name: str, keys: dict[str, str], do: Callable[[range], Lines]) -> None:
        """A file of lines for all of a round's prompts, on every disk; what is there is taken."""
        out, rows = self.folder_of(number) / name, self._rows(number)
        if not _is_on_rank_0(out, self.world):
            self._drop_journal_of_another(out, keys[name])
            what = f"round {number}: prompts {'answered' if name == SAMPLES else 'judged'}"
            pull(FileJob(what, keys[name], len(rows), out, self.chunk_rows), self.world, do, needs_model=False)
        elif self.world.rank == 0:  # a process was killed before its journal went
            out.with_name(f"{out.name}.partial").unlink(missing_ok=True)
        spread(out, self.world, self.keeps_disk)

    def _drop_journal_of_another(self, out: Path, key: str) -> None:
        """Removes a journal that belongs to other weights or settings: the run went back behind the round."""
        journal = out.with_name(f"{out.name}.partial")
        if self.world.rank == 0 and _first_of(journal).get("key", key) != key:
            self.say.warning(f"{journal} is of other weights or settings, and is made again")
            journal.unlink()

    def _samples(
        self, number: int, policy: Policy, rows: Sequence[int], is_wanted: Callable[[], bool]
    ) -> list[SampleLine] | None:
        """A line for each answer to some prompts; None once they are not wanted."""
        prompts = [Prompt(row, self.prompts.prompt_ids(row)) for row in rows]
        passes = len(rows) * self.config.rollouts.samples
        with self.world.workers.together("answers of a round", passes):
            samples = self.sampler.sample(prompts, (self.config.train.seed, number), is_wanted)
        if len(samples) < passes:
            return None
        return [
            {
                "round": number,
                "prompt_id": drawn.prompt_id,
                "k": drawn.k,
                "policy": policy.digest,
                "version": policy.version,
                "place": self.prompts.location(drawn.prompt_id),
                "text": drawn.text,
                "finish": drawn.finish,
                "tokens": drawn.tokens,
                "logps": drawn.logps,
            }
            for drawn in samples
        ]

    def _scores(self, rows: Sequence[int], answers: Sequence[SampleLine]) -> Lines:
        """A line for each answer to some prompts, by prompt."""
        questions = []
        for row in rows:
            record, texts = self.prompts.record(row), [one["text"] for one in answers if one["prompt_id"] == row]
            prompt = asked_of(record, self.config.data, self.sampler.tokenizer)
            questions.append(Question(self.prompts.location(row), prompt, texts, record))
        scored = [score for of_question in scores_of(self.judge, questions) for score in of_question]
        lines: list[ScoreLine] = [
            {"prompt_id": answer["prompt_id"], "k": answer["k"], "score": of_answer.score, "fault": of_answer.fault}
            for answer, of_answer in zip(answers, scored, strict=True)
        ]
        return [json.dumps(line, ensure_ascii=False) for line in lines]

    def _groups(self, path: Path, answers: dict[int, list[SampleLine]]) -> list[Group]:
        scores = {(one["prompt_id"], one["k"]): one["score"] for one in lines_of(path, ScoreLine)}
        if missing := [row for row in answers if any((row, one["k"]) not in scores for one in answers[row])]:
            raise UserError(f"{path}: prompt {missing[0]} of the round is missing; {REMEDY}")
        return [
            Group(
                row,
                self.prompts.prompt_ids(row),
                [
                    Answer(one["k"], one["text"], one["tokens"], one["logps"], one["finish"], scores[row, one["k"]])
                    for one in of_row
                ],
            )
            for row, of_row in answers.items()
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
            **stamp_of(self.sampler.tokenizer),
            "prompt_ids": pair.prompt_tokens,
            "chosen_ids": pair.chosen.tokens,
            "rejected_ids": pair.rejected.tokens,
        }
        return json.dumps(record, ensure_ascii=False)


def policy_of(folder: Path) -> str:
    """Digest of the policy that drew a round's answers; nothing where they are not complete."""
    whole, journal = folder / SAMPLES, folder / f"{SAMPLES}.partial"
    try:
        if whole.exists():
            return str(_first_of(whole).get("policy", ""))
        with journal.open(encoding="utf-8") as file:
            header, *chunks = [json.loads(line) for line in file if line.endswith("\n")]
        return str(json.loads(chunks[0]["lines"][0])["policy"]) if len(chunks) == header["count"] else ""
    except (OSError, ValueError, KeyError, IndexError, TypeError):
        return ""


def _first_of(path: Path) -> dict[str, object]:
    """The first line's object; empty where there is none."""
    try:
        with path.open("rb") as file:
            first = json.loads(file.readline())
    except (OSError, ValueError):
        return {}
    return first if isinstance(first, dict) else {}


def _missing(part: range) -> Lines:
    raise UserError("answers of a round that is trained already are missing; put them back, or start a new run")


def _is_on_rank_0(path: Path, world: World) -> bool:
    return bool(int(world.broadcast_text(str(int(world.rank == 0 and path.exists())))))


def _by_prompt(path: Path, rows: Sequence[int], samples: int) -> dict[int, list[SampleLine]]:
    """The lines of samples.jsonl by prompt, in the order of k.

    Raises:
        UserError: a line is not what a round writes, or they are not those of these prompts.
    """
    answers: dict[int, list[SampleLine]] = {row: [] for row in rows}
    for line in lines_of(path, SampleLine):
        answers.setdefault(line["prompt_id"], []).append(line)
    for row, of_row in answers.items():
        is_whole = all(len(one["logps"]) == len(one["tokens"]) for one in of_row)
        if row not in rows or not is_whole or [one["k"] for one in of_row] != list(range(samples)):
            raise UserError(f"{path}: prompt {row} has not {samples} answers in their order; {REMEDY}")
    return answers


def spread(path: Path, world: World, keeps_disk: bool) -> None:
    """Gives rank 0's file to every disk that lacks it.

    Raises:
        AgreedError: a disk is full or not writable.
    """
    if not any(world.gather_text("" if path.exists() else "missing", f"who has {path.name}")):
        return
    content = np.frombuffer(path.read_bytes(), np.uint8) if world.rank == 0 else np.zeros(0, np.uint8)
    size = int(world.broadcast({"size": mx.array(len(content))})["size"].item())
    with world.agreeing(f"keeping {path.name}"):
        pieces = []
        for start in range(0, size, PIECE_BYTES):
            count = min(PIECE_BYTES, size - start)
            part = content[start : start + count] if world.rank == 0 else np.zeros(count, np.uint8)
            pieces.append(np.array(world.broadcast({"piece": mx.array(part)})["piece"]).tobytes())
        if world.rank and keeps_disk and not path.exists():
            files.write_atomically(path, b"".join(pieces))
    if not path.exists():
        raise UserError(f"{path} is not there, though another rank of this disk keeps it")
