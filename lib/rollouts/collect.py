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
import functools
import json
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue
from typing import Annotated, NotRequired, TypeVar

import mlx.core as mx
import numpy as np
from pydantic import Field, FiniteFloat, TypeAdapter
from typing_extensions import TypedDict

from lib.config import read_file
from lib.config.settings import Config, RolloutSettings
from lib.data.prompts import Prompts, asked_of, columns_of
from lib.data.record_formats import Unusable
from lib.data.tokenizer import ModelLimits, stamp_of
from lib.distributed.work_queue import Lines, ServedQueue, WorkQueue, open_queue, work
from lib.distributed.world import World
from lib.errors import UserError
from lib.evaluate.judges import Judge, Question, scores_of, text_of
from lib.evaluate.sample import Prompt, Sampler
from lib.evaluate.score_file import key_of, pull
from lib.rollouts.pairs import Answer, Group, Pair, pairs_of
from lib.system import files
from lib.system.terminal import Terminal

Scoring = Callable[[], Lines]  # of a chunk's answers

ASK_SECONDS = 0.25  # between two questions whether a chunk is still wanted: a message to rank 0 each


class JudgingThread:
    """Judges chunks in a thread, one after the other, and hands in their scores."""

    def __init__(self, scores: WorkQueue):
        self.seconds = 0.0
        self._scores = scores
        self._waiting: SimpleQueue[tuple[int, Scoring] | None] = SimpleQueue()
        self._ends = False
        self._fault: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="judging", daemon=True)
        self._thread.start()

    def add(self, chunk: int, judge: Scoring) -> None:
        """Judges a chunk, when those before it are done.

        Raises:
            UserError: the judge failed on a chunk before it.
        """
        if self._fault is not None:
            raise self._fault
        self._waiting.put((chunk, judge))

    def end(self) -> None:
        """Judges nothing after the chunk in hand."""
        self._ends = True
        self._waiting.put(None)

    def join(self) -> None:
        """Returns when the chunk in hand is judged, after `end`.

        Raises:
            UserError: the judge failed on a chunk.
        """
        self._thread.join()
        if self._fault is not None:
            raise self._fault

    def _run(self) -> None:
        try:
            while (item := self._waiting.get()) is not None and not self._ends:
                (chunk, judge), began = item, time.perf_counter()
                lines = judge()
                self.seconds += time.perf_counter() - began
                self._scores.finish(chunk, lines)
        except BaseException as fault:  # raised by the thread that waits for it
            self._fault = fault


@dataclass
class Drawing:
    """The drawing of a round, which this rank takes part in; its judging goes on behind it.

    Args:
        samples, scores: the queues of what the two journals lack.
        thread: None where the judge computes on the device of the model.
        sampling_seconds: of this rank; waiting_seconds: in which others still drew, and it had nothing to do.
    """

    samples: WorkQueue
    scores: WorkQueue
    thread: JudgingThread | None
    sampling_seconds: float = 0.0
    waiting_seconds: float = 0.0

    @property
    def judging_seconds(self) -> float:
        """Of this rank, so far."""
        return self.thread.seconds if self.thread else 0.0

    def is_wanted(self, chunk: int) -> Callable[[], bool]:
        """Says, asked as often as one likes, whether a chunk in hand is still to be drawn."""
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
            self.thread.end()

    def close(self, timeout_seconds: float) -> None:
        """Ends, with what is finished in the journals. timeout_seconds: the longest wait for the other ranks.

        Raises:
            UserError: the judge failed on a chunk.
        """
        self.end()
        with contextlib.ExitStack() as stack:
            stack.callback(self.scores.close, timeout_seconds)
            stack.callback(self.samples.close, timeout_seconds)
            if self.thread is not None:
                self.thread.join()


SAMPLES, SCORES, PAIRS = "samples.jsonl", "scores.jsonl", "pairs.jsonl"
LONGEST_LINE = 2**27  # letters of a file of a round
SHOWN_CHARACTERS = 400  # of each text of an example
PIECE_BYTES = 2**24  # of a file, in one collective


class SampleLine(TypedDict):
    """A line of samples.jsonl."""

    round: int
    prompt_id: int
    k: int
    policy: str
    version: NotRequired[int]  # earlier releases wrote none
    place: str
    text: str
    finish: str
    tokens: Annotated[list[Annotated[int, Field(ge=0, lt=2**31)]], Field(min_length=1)]
    logps: list[FiniteFloat]


@dataclass(frozen=True)
class Policy:
    """Which weights draw a round's answers.

    Args:
        digest: of the weights.
        version: the last round that they have learnt, and that was kept; 0 before the first.
    """

    digest: str
    version: int


@dataclass(frozen=True)
class Collected:
    """The answers of a round, the same on every rank, and this rank's seconds of sampling and judging.

    Args:
        version: of the policy that drew them; None where an earlier release did.
    """

    version: int | None
    groups: list[Group]
    pairs: list[Pair]
    seconds: dict[str, float]


class ScoreLine(TypedDict):
    """A line of scores.jsonl."""

    prompt_id: int
    k: int
    score: FiniteFloat | None
    fault: str


Line = TypeVar("Line", SampleLine, ScoreLine)


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
    limits: ModelLimits

    def folder_of(self, number: int) -> Path:
        return self.folder / "rounds" / f"{number:04d}"

    def _rows(self, number: int) -> list[int]:
        return self.prompts.of_round(number, self.config.rollouts.prompts, self.config.train.seed)

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
        if world.rank == 0:
            for name, key in zip((SAMPLES, SCORES), keys, strict=True):
                _drop_of_another(folder / name, key, self.say)
        samples = open_queue(world, folder / SAMPLES, keys[0], chunks, repeats=waits)
        scores = open_queue(world, folder / SCORES, keys[1], chunks, repeats=False)
        drawing = Drawing(samples, scores, JudgingThread(scores) if self.judges_beside else None)
        with self.say.counting(f"round {number}: prompts answered", len(rows)) as progress:
            if isinstance(samples, ServedQueue):
                samples.report = lambda done, by_rank: progress(min(done * self.chunk_rows, len(rows)))

            def lines_of(chunk: int) -> Lines | None:
                taken, part = time.perf_counter(), rows[chunk * self.chunk_rows : (chunk + 1) * self.chunk_rows]
                is_wanted = (lambda: True) if world.divides_model else drawing.is_wanted(chunk)
                answers = self._samples(number, policy, part, is_wanted)
                drawing.sampling_seconds += time.perf_counter() - taken
                is_own = not world.divides_model or chunk % world.size == world.rank
                if answers is not None and is_own and drawing.thread is not None:
                    drawing.thread.add(chunk, functools.partial(self._scores, self._asked(part, answers)))
                return None if answers is None else [json.dumps(line, ensure_ascii=False) for line in answers]

            began = time.perf_counter()
            if world.divides_model:
                self._work_together(samples, lines_of)
            else:
                work(samples, lines_of)
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
        self._make(folder / SAMPLES, keys[0], rows, _missing)
        with self.world.agreeing("reading the answers of a round"):
            answers = _by_prompt(folder / SAMPLES, rows, self.config.rollouts, self.limits)

        def scores(part: range) -> Lines:
            began, taken = time.perf_counter(), [rows[i] for i in part]
            lines = self._scores(self._asked(taken, [answer for row in taken for answer in answers[row]]))
            seconds["judging_seconds"] += time.perf_counter() - began
            return lines

        self._make(folder / SCORES, keys[1], rows, scores)
        with self.world.agreeing("reading the scores of a round"):
            groups = self._groups(folder, rows, answers)
        pairs = [pair for group in groups for pair in pairs_of(group, self.config.rollouts)]
        if self.keeps_disk and self.config.record_kind == "preference" and not (folder / PAIRS).exists():
            text = "".join(line + "\n" for line in map(self._pair_line, pairs))
            files.write_atomically(folder / PAIRS, text)
        version = answers[rows[0]][0].get("version")
        return Collected(version, groups, pairs, seconds)

    def _work_together(self, samples: WorkQueue, do: Callable[[int], Lines | None]) -> None:
        """Chunk after chunk by ranks that hold parts of the model, all at the same one."""
        world, served = self.world, samples if isinstance(samples, ServedQueue) else None
        left = json.loads(world.broadcast_text(json.dumps(list(served.fresh) if served else [])))
        for chunk in left:
            with world.agreeing("answering prompts"):
                with world.workers.together("answers of a round", self.chunk_rows * self.config.rollouts.samples):
                    lines = do(chunk)
                if served is not None and lines is not None:
                    served.finish(chunk, lines)
                    if served.fault:
                        raise UserError(served.fault)

    @property
    def chunk_rows(self) -> int:
        """Prompts that a rank takes at a time."""
        return max(1, self.config.rollouts.batch_size // self.config.rollouts.samples)

    def _keys(self, number: int, policy: str) -> tuple[str, str]:
        """Digests of all that samples.jsonl and scores.jsonl of a round depend on."""
        rollouts, seed = self.config.rollouts, self.config.train.seed
        of_samples = key_of(policy, number, self.prompts.digest, rollouts.model_dump(), seed)
        of_judge = self.config.evaluate.model_dump(include={"judge", "judge_model", "judge_prompt", "answer_pattern"})
        return of_samples, key_of(of_samples, rollouts.judge, of_judge)

    def _make(self, out: Path, key: str, rows: Sequence[int], do: Callable[[range], Lines]) -> None:
        """A file of lines for all of a round's prompts, on every disk; what is there is taken."""
        if not _is_on_rank_0(out, self.world):
            if self.world.rank == 0:
                _drop_of_another(out, key, self.say)
            what = f"round {out.parent.name.lstrip('0')}: prompts {'answered' if out.name == SAMPLES else 'judged'}"
            pull(what, key, rows, out, self.config, self.world, do, self.chunk_rows)
        elif self.world.rank == 0:  # a process was killed before its journal went
            out.with_name(f"{out.name}.partial").unlink(missing_ok=True)
        spread(out, self.world, self.keeps_disk)

    def _samples(
        self, number: int, policy: Policy, rows: Sequence[int], is_wanted: Callable[[], bool]
    ) -> list[SampleLine] | None:
        """A line for each answer to some prompts; None once they are not wanted."""
        prompts = [Prompt(row, self.prompts.prompt_ids(row)) for row in rows]
        seed = (self.config.train.seed, number)
        lines: dict[tuple[int, int], SampleLine] = {}
        for drawn in self.sampler.sample(prompts, seed, is_wanted):
            lines[drawn.prompt_id, drawn.k] = {
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
        wanted = [(row, k) for row in rows for k in range(self.config.rollouts.samples)]
        return [lines[one] for one in wanted] if len(lines) == len(wanted) else None

    def _asked(self, rows: Sequence[int], answers: Sequence[SampleLine]) -> list[tuple[Question, list[SampleLine]]]:
        """What the judge is asked about some prompts, with the lines of their answers."""
        asked = []
        of_row = {row: [answer for answer in answers if answer["prompt_id"] == row] for row in rows}
        for row in rows:
            record = self.prompts.record(row)
            texts = [answer["text"] for answer in of_row[row]]
            prompt = asked_of(record, self.config.data, self.sampler.tokenizer)
            question = Question(self.prompts.location(row), prompt, texts, record)
            asked.append((question, of_row[row]))
        return asked

    def _scores(self, asked: Sequence[tuple[Question, list[SampleLine]]]) -> Lines:
        """A line for each answer to some prompts."""
        lines = []
        for (_, answers), scores in zip(asked, scores_of(self.judge, [one for one, _ in asked]), strict=True):
            for answer, scored in zip(answers, scores, strict=True):
                line: ScoreLine = {
                    "prompt_id": answer["prompt_id"],
                    "k": answer["k"],
                    "score": scored.score,
                    "fault": scored.fault,
                }
                lines.append(json.dumps(line, ensure_ascii=False))
        return lines

    def _groups(self, folder: Path, rows: Sequence[int], answers: dict[int, list[SampleLine]]) -> list[Group]:
        scores = {(one["prompt_id"], one["k"]): one["score"] for one in lines_of(folder / SCORES, ScoreLine)}
        try:
            return [
                Group(
                    row,
                    self.prompts.prompt_ids(row),
                    [
                        Answer(one["k"], one["text"], one["tokens"], one["logps"], one["finish"], scores[row, one["k"]])
                        for one in answers[row]
                    ],
                )
                for row in rows
            ]
        except KeyError as error:
            raise UserError(f"{folder}: prompt {error} of the round is missing; {_REMEDY}") from None

    def examples(self, pairs: Sequence[Pair]) -> list[dict[str, str]]:
        """A few pairs as text, for people."""
        shown = []
        for pair in pairs[: self.config.evaluate.samples]:
            record = self.prompts.record(pair.prompt_id)
            prompt = asked_of(record, self.config.data, self.sampler.tokenizer)
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
    try:
        for path in (folder / SAMPLES, folder / f"{SAMPLES}.partial"):
            if path.exists():
                with path.open(encoding="utf-8") as file:
                    first = json.loads(file.readline(LONGEST_LINE))
                    if "count" not in first:
                        return str(first["policy"])
                    rest = iter(lambda: file.readline(LONGEST_LINE), "")
                    chunks = [json.loads(line) for line in rest if line.endswith("\n")]
                if len(chunks) == first["count"]:
                    return str(json.loads(chunks[0]["lines"][0])["policy"])
    except (OSError, ValueError, KeyError, IndexError, TypeError, RecursionError):
        pass
    return ""


def _missing(part: range) -> Lines:
    raise UserError("answers of a round that is trained already are missing; put them back, or start a new run")


def _is_on_rank_0(path: Path, world: World) -> bool:
    return bool(int(world.broadcast_text(str(int(world.rank == 0 and path.exists())))))


_REMEDY = "remove the folder, and what was drawn is drawn again"


def lines_of(path: Path, kind: type[Line]) -> Iterator[Line]:
    """The lines of a file of a round.

    Raises:
        UserError: one is not what a round writes.
    """
    adapter = TypeAdapter(kind)
    with path.open("rb") as file:
        for number, line in enumerate(iter(lambda: file.readline(LONGEST_LINE), b""), 1):
            try:
                yield adapter.validate_json(line)
            except ValueError:
                raise UserError(f"{path}:{number}: not what a round writes; {_REMEDY}") from None


def samples_in(path: Path, limits: ModelLimits, most_tokens: int) -> Iterator[SampleLine]:
    """The lines of samples.jsonl, which other programs may have written.

    Raises:
        UserError: one is not what a round of this run writes.
    """
    read_file.require_regular(path, "the run's")
    for number, read in enumerate(lines_of(path, SampleLine), 1):
        try:
            limits.check_ids([read["tokens"]])
        except Unusable as why:
            raise UserError(f"{path}:{number}: not what a round of this run writes: {why}; {_REMEDY}") from None
        count = len(read["tokens"])
        if len(read["logps"]) != count or count > most_tokens:
            raise UserError(f"{path}:{number}: not what a round of this run writes; {_REMEDY}")
        yield read


def _by_prompt(
    path: Path, rows: Sequence[int], rollouts: RolloutSettings, limits: ModelLimits
) -> dict[int, list[SampleLine]]:
    """The lines of samples.jsonl by prompt, in the order of k.

    Raises:
        UserError: as `samples_in`, or they are not those of these prompts.
    """
    answers: dict[int, list[SampleLine]] = {}
    for read in samples_in(path, limits, rollouts.max_tokens):
        answers.setdefault(read["prompt_id"], []).append(read)
    for row in rows:
        if [one["k"] for one in answers.get(row, [])] != list(range(rollouts.samples)):
            raise UserError(f"{path}: prompt {row} has not {rollouts.samples} answers in their order; {_REMEDY}")
    return answers


def _drop_of_another(out: Path, key: str, say: Terminal) -> None:
    """Removes a journal that belongs to other weights or settings: the run went back behind the round."""
    journal = out.with_name(f"{out.name}.partial")
    try:
        with journal.open("rb") as file:
            header = json.loads(file.readline(LONGEST_LINE) or b"{}")
    except (OSError, ValueError, RecursionError):
        return
    if not isinstance(header, dict) or header.get("key", key) != key:
        say.warning(f"{journal} is of other weights or settings, and is made again")
        journal.unlink()


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
        writes = world.rank and keeps_disk and not path.exists()
        pieces = []
        for start in range(0, size, PIECE_BYTES):
            count = min(PIECE_BYTES, size - start)
            mine = content[start : start + count] if world.rank == 0 else np.zeros(count, np.uint8)
            piece = np.array(world.broadcast({"piece": mx.array(mine)})["piece"])
            if writes:
                pieces.append(piece.tobytes())
        if writes:
            files.write_atomically(path, b"".join(pieces))
    if not path.exists():
        raise UserError(f"{path} is not there, though another rank of this disk keeps it")
