"""The files of a round, rounds/NNNN/ in the run's folder, and how they are read: nothing in them is taken unchecked.

    samples.jsonl    every answer: its prompt, tokens, log-probabilities, and the policy that wrote it
    scores.jsonl     what the judge made of each
    pairs.jsonl      the pairs that are trained, as data.train of any run could name them
    round.json       what the round came to

A run reads them again where it goes on after a fault, and an export where it proves its weights.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

from pydantic import Field, FiniteFloat, NonNegativeInt, TypeAdapter, ValidationError

from lib.data.model_limits import ModelLimits
from lib.data.record_formats import Unusable
from lib.errors import UserError
from lib.rollouts.pairs import SampleFigures

SAMPLES, SCORES, PAIRS, ROUND = "samples.jsonl", "scores.jsonl", "pairs.jsonl", "round.json"
REMEDY = "remove the folder, and what was drawn is drawn again"
Line = TypeVar("Line")


@dataclass(frozen=True)
class SampleLine:
    """A line of samples.jsonl."""

    round: NonNegativeInt
    prompt_id: NonNegativeInt
    k: NonNegativeInt
    policy: str
    place: str
    text: str
    finish: Literal["stop", "length"]
    tokens: Annotated[list[NonNegativeInt], Field(min_length=1)]
    logps: list[FiniteFloat]


@dataclass(frozen=True)
class ScoreLine:
    """A line of scores.jsonl."""

    prompt_id: NonNegativeInt
    k: NonNegativeInt
    score: FiniteFloat | None
    fault: str


@dataclass(frozen=True)
class Verdict:
    """round.json, as far as it is read again."""

    round: NonNegativeInt
    undone: bool
    held_out: Mapping[str, float | None]
    samples: SampleFigures


_SAMPLE, _SCORE, _VERDICT = TypeAdapter(SampleLine), TypeAdapter(ScoreLine), TypeAdapter(Verdict)


def read_samples(path: Path, limits: ModelLimits) -> Iterator[SampleLine]:
    """The lines of samples.jsonl.

    Raises:
        UserError: one is not what a round writes, or of another model.
    """
    for place, line in _lines(path, _SAMPLE):
        try:
            limits.check_ids([line.tokens])
        except Unusable as why:
            raise UserError(f"{place}: {why}; {REMEDY}") from None
        if len(line.logps) != len(line.tokens):
            raise UserError(f"{place}: {len(line.tokens)} tokens and {len(line.logps)} logps; {REMEDY}")
        yield line


def samples_by_prompt(
    path: Path, rows: Sequence[int], samples: int, limits: ModelLimits
) -> dict[int, list[SampleLine]]:
    """The answers to each of some prompts, in the order of k.

    Raises:
        UserError: a line is not what a round writes, or the prompts are not those of the round.
    """
    answers: dict[int, list[SampleLine]] = {}
    for line in read_samples(path, limits):
        answers.setdefault(line.prompt_id, []).append(line)
    for row in rows:
        found = [line.k for line in answers.get(row, [])]
        if found != list(range(samples)):
            raise UserError(f"{path}: {len(found)} answers to prompt {row}, not {samples} in their order; {REMEDY}")
    return answers


def read_scores(path: Path) -> dict[tuple[int, int], float | None]:
    """The score of each answer, by (prompt_id, k); None where the judge failed on it.

    Raises:
        UserError: a line is not what a round writes.
    """
    return {(line.prompt_id, line.k): line.score for _, line in _lines(path, _SCORE)}


def _lines(path: Path, kind: TypeAdapter[Line]) -> Iterator[tuple[str, Line]]:
    """`file:line` and what stands there."""
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            try:
                read = kind.validate_json(line, strict=True)
            except ValidationError as error:
                raise UserError(f"{path}:{number}: not what a round writes: {_first(error)}; {REMEDY}") from None
            yield f"{path}:{number}", read


def verdict_of(path: Path, text: str) -> Verdict:
    """What round.json says.

    Raises:
        UserError: it is not what a round writes.
    """
    try:
        return _VERDICT.validate_json(text, strict=True)
    except ValidationError as error:
        raise UserError(f"{path} is not what a round writes: {_first(error)}; start a new run") from None


def _first(error: ValidationError) -> str:
    """The first fault, in words."""
    fault: Any = error.errors(include_url=False, include_context=False)[0]
    place = ".".join(map(str, fault["loc"]))
    return f"{place}: {fault['msg']}" if place else str(fault["msg"])
