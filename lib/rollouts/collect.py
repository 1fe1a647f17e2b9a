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
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, TypeVar

import mlx.core as mx
import numpy as np
from pydantic import Field, FiniteFloat, TypeAdapter
from typing_extensions import TypedDict

from lib.config import read_file
from lib.config.rollout_settings import RolloutSettings
from lib.config.schema import Config
from lib.data.model_limits import ModelLimits
from lib.data.prompts import Prompts
from lib.data.record_formats import Unusable
from lib.distributed.world import World
from lib.errors import UserError
from lib.evaluate.batch_inference import key_of, prompt_of, pull
from lib.evaluate.judges import Judge, Question
from lib.evaluate.model_judge import text_of
from lib.evaluate.work_queue import Lines
from lib.rollouts.judged import scores_of
from lib.rollouts.pairs import Answer, Group, Pair, pairs_of
from lib.rollouts.sampler import Prompt, Sampler
from lib.system import files
from lib.training.progress_display import RunConsole

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


@dataclass(frozen=True)
class Collector:
    """Makes the answers, scores and pairs of rounds.

    Args:
        keeps_disk: whether this rank is the one that keeps the run's files on its disk.
    """

    config: Config
    folder: Path
    world: World
    keeps_disk: bool
    sampler: Sampler
    prompts: Prompts
    judge: Judge
    say: RunConsole
    limits: ModelLimits

    def folder_of(self, number: int) -> Path:
        return self.folder / "rounds" / f"{number:04d}"

    def collect(self, number: int, policy: str) -> tuple[list[Group], list[Pair], dict[str, float]]:
        """A round's answers and their pairs, on every rank; and this rank's seconds of sampling and judging.

        policy: digest of the weights that sample.

        Raises:
            UserError, AgreedError: the judge scores nothing, a disk is full, or rank 0 is gone.
        """
        rollouts, folder = self.config.rollouts, self.folder_of(number)
        rows = self.prompts.of_round(number, rollouts.prompts, self.config.train.seed)
        seconds = {"sampling_seconds": 0.0, "judging_seconds": 0.0}

        def timed(what: str, do: Callable[[list[int]], Lines]) -> Callable[[range], Lines]:
            def lines(part: range) -> Lines:
                began = time.perf_counter()
                made = do([rows[i] for i in part])
                seconds[what] += time.perf_counter() - began
                return made

            return lines

        key = key_of(policy, number, self.prompts.digest, rollouts.model_dump(), self.config.train.seed)
        drawn = timed("sampling_seconds", lambda part: self._samples(number, policy, part))
        self._make(folder / SAMPLES, key, rows, drawn)
        with self.world.agreeing("reading the answers of a round"):
            answers = _by_prompt(folder / SAMPLES, rows, rollouts, self.limits)
        of_judge = self.config.evaluate.model_dump(include={"judge", "judge_model", "judge_prompt", "answer_pattern"})
        scored = timed("judging_seconds", lambda part: self._scores(part, answers))
        self._make(folder / SCORES, key_of(key, rollouts.judge, of_judge), rows, scored)
        with self.world.agreeing("reading the scores of a round"):
            groups = self._groups(folder, rows, answers)
        pairs = [pair for group in groups for pair in pairs_of(group, rollouts)]
        if self.keeps_disk and self.config.record_kind == "preference" and not (folder / PAIRS).exists():
            text = "".join(line + "\n" for line in map(self._pair_line, pairs))
            files.write_atomically(folder / PAIRS, text)
        return groups, pairs, seconds

    def _make(self, out: Path, key: str, rows: Sequence[int], do: Callable[[range], Lines]) -> None:
        """A file of lines for all of a round's prompts, on every disk; what is there is taken."""
        world, rollouts = self.world, self.config.rollouts
        if not int(world.broadcast_text(str(int(world.rank == 0 and out.exists())))):
            if world.rank == 0:
                _drop_of_another(out, key, self.say)
            chunk_rows = max(1, rollouts.batch_size // rollouts.samples)
            what = f"round {out.parent.name.lstrip('0')}: prompts {'answered' if out.name == SAMPLES else 'judged'}"
            pull(what, key, rows, out, self.config, world, do, chunk_rows)
        spread(out, world, self.keeps_disk)

    def _samples(self, number: int, policy: str, rows: list[int]) -> Lines:
        """A line for each answer to some prompts."""
        prompts = [Prompt(row, self.prompts.prompt_ids(row)) for row in rows]
        seed = (self.config.train.seed, number)
        lines: dict[tuple[int, int], str] = {}
        for drawn in self.sampler.sample(prompts, seed):
            line: SampleLine = {
                "round": number,
                "prompt_id": drawn.prompt_id,
                "k": drawn.k,
                "policy": policy,
                "place": self.prompts.location(drawn.prompt_id),
                "text": drawn.text,
                "finish": drawn.finish,
                "tokens": drawn.tokens,
                "logps": drawn.logps,
            }
            lines[drawn.prompt_id, drawn.k] = json.dumps(line, ensure_ascii=False)
        return [lines[row, k] for row in rows for k in range(self.config.rollouts.samples)]

    def _scores(self, rows: list[int], answers: dict[int, list[SampleLine]]) -> Lines:
        """A line for each answer to some prompts."""
        questions = []
        for row in rows:
            record = self.prompts.record(row)
            texts = [answer["text"] for answer in answers[row]]
            questions.append(Question(self.prompts.location(row), prompt_of(record, self.config.data), texts, record))
        lines = []
        for row, of_question in zip(rows, scores_of(self.judge, questions), strict=True):
            for answer, scored in zip(answers[row], of_question, strict=True):
                line: ScoreLine = {
                    "prompt_id": row,
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
            prompt = text_of(prompt_of(self.prompts.record(pair.prompt_id), self.config.data))
            texts = {"prompt": prompt, "chosen": pair.chosen.text, "rejected": pair.rejected.text}
            shown.append({name: text[:SHOWN_CHARACTERS] for name, text in texts.items()})
        return shown

    def _pair_line(self, pair: Pair) -> str:
        record = {
            "prompt_id": pair.prompt_id,
            "k": [pair.chosen.k, pair.rejected.k],
            "scores": [pair.chosen.score, pair.rejected.score],
            "prompt": prompt_of(self.prompts.record(pair.prompt_id), self.config.data),
            "chosen": pair.chosen.text,
            "rejected": pair.rejected.text,
            "prompt_ids": pair.prompt_tokens,
            "chosen_ids": pair.chosen.tokens,
            "rejected_ids": pair.rejected.tokens,
        }
        return json.dumps(record, ensure_ascii=False)


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
    """The lines of samples.jsonl, which may be somebody else's.

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


def _drop_of_another(out: Path, key: str, say: RunConsole) -> None:
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
