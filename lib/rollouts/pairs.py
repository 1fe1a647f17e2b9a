"""Scored answers ➜ pairs or groups, the figures of a round, and whether a round is kept: pure functions."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, NamedTuple

from pydantic import Field, FiniteFloat

from lib.config.settings import RolloutSettings
from lib.data.groups import Group as SampledGroup
from lib.data.groups import teaches


@dataclass(frozen=True)
class Answer:
    """One answer that was drawn, a line of samples.jsonl, with its score."""

    prompt_id: int
    k: int
    text: str
    finish: str
    tokens: Annotated[list[Annotated[int, Field(ge=0, lt=2**31)]], Field(min_length=1)]  # the end token included
    logps: list[FiniteFloat]  # of the tokens, under the policy that drew them, in nats
    score: float | None = None  # None where the judge failed on it


class Group(NamedTuple):
    """The answers to one prompt."""

    prompt_id: int
    prompt_tokens: list[int]
    answers: list[Answer]


class Pair(NamedTuple):
    """A better and a worse answer to one prompt."""

    prompt_id: int
    prompt_tokens: list[int]
    chosen: Answer
    rejected: Answer


def pairs_of(group: Group, settings: RolloutSettings) -> list[Pair]:
    """The pairs that a prompt's answers make; none where all scores are the same: one of the best and one of the worst
    answers, of equal scores the first that was drawn; with a margin every two whose scores differ by it. An answer that
    was drawn several times counts once. With `mask_truncated` one that rollouts.max_tokens cut does not count."""
    cut = "length" if settings.mask_truncated else None
    graded = [(answer, answer.score) for answer in group.answers if answer.score is not None and answer.finish != cut]
    distinct = {tuple(answer.tokens): (answer, score) for answer, score in reversed(graded)}
    scored = sorted(distinct.values(), key=lambda each: each[0].k)
    if not settings.margin and scored:
        scored = [max(scored, key=lambda each: each[1]), min(scored, key=lambda each: each[1])]
    return [
        Pair(group.prompt_id, group.prompt_tokens, better, worse)
        for (better, high), (worse, low) in itertools.permutations(scored, 2)
        if high > low and high - low >= settings.margin
    ]


def groups_of(groups: Sequence[Group], settings: RolloutSettings) -> list[SampledGroup]:
    """What train.loss=grpo learns from: the answers that have a score; nothing where no prompt teaches anything.
    `filter_groups` leaves out the prompts whose scores agree, `mask_truncated` the tokens of answers that were cut."""
    sampled, masks = list[SampledGroup](), settings.mask_truncated
    for group in groups:
        answers = group.answers
        scored = [answer for answer in answers if answer.score is not None]
        differ = len({answer.score for answer in scored}) > 1
        if scored and (differ or not settings.filter_groups):
            mask = [[answer.finish != "length"] * len(answer.tokens) for answer in answers] if masks else None
            tokens, rewards, logps = zip(*((of.tokens, of.score, of.logps) for of in answers), strict=True)
            made = SampledGroup.model_construct(prompt_ids=group.prompt_tokens, completion_ids=[*tokens])
            sampled.append(made.model_copy(update={"rewards": [*rewards], "logps": [*logps], "completion_mask": mask}))
    return sampled if any(map(teaches, sampled)) else []


def why_nothing(groups: Sequence[Group], settings: RolloutSettings) -> str:
    """Why a round's answers teach nothing, and how many of them were cut."""
    answers = [answer for group in groups for answer in group.answers]
    cut = sum(answer.finish == "length" for answer in answers)
    count = f"{cut:,} of {len(answers):,} answers were cut by rollouts.max_tokens={settings.max_tokens}"
    named = f"; {count}" if cut else ""
    if all(answer.score is None for answer in answers):
        return f"the judge scored none of the {len(answers):,} answers{named}"
    if settings.mask_truncated and cut == len(answers):
        return f"{count}, and rollouts.mask_truncated=true leaves those out"
    return f"no prompt has answers of different scores to learn from{named}"


@dataclass(frozen=True)
class SampleFigures:
    """What is to be watched of a round's answers; None where nothing was scored, or made pairs."""

    prompts: int
    samples: int
    failed: int  # answers on which the judge failed
    pairs: int
    score: float | None  # their mean
    accepted: float  # the part of the prompts whose answers made a pair
    duplicates: float  # the part of the answers that was drawn before, to the same prompt
    tokens: float  # of an answer, the mean
    unended: float  # the part of the answers that max_tokens cut
    entropy: float  # of the policy, in nats a token: the mean of -log p over what it drew


def figures_of(groups: Sequence[Group], pairs: Sequence[Pair]) -> SampleFigures:
    """The figures of a round's answers, each a sum over a count."""
    answers = [answer for group in groups for answer in group.answers]
    scores = [answer.score for answer in answers if answer.score is not None]
    tokens = sum(len(answer.tokens) for answer in answers)
    distinct = sum(len({tuple(answer.tokens) for answer in group.answers}) for group in groups)
    return SampleFigures(
        prompts=len(groups),
        samples=len(answers),
        failed=len(answers) - len(scores),
        pairs=len(pairs),
        score=sum(scores) / len(scores) if scores else None,
        accepted=len({pair.prompt_id for pair in pairs}) / len(groups),
        duplicates=(len(answers) - distinct) / len(answers),
        tokens=tokens / len(answers),
        unended=sum(answer.finish == "length" for answer in answers) / len(answers),
        entropy=-sum(sum(answer.logps) for answer in answers) / max(tokens, 1),
    )


HELD_OUT = {"exact_match": "held-out exact match", "held_out_score": "held-out score"}  # by what a round is judged
GROWTH = 1.5  # times the tokens of the first round's answers: they grow
LEAST_ENTROPY = 0.1  # of the first round's: nearly every answer is the same then


@dataclass(frozen=True)
class RoundFigures:
    """The figures of a finished round. held_out: after it, by the names of HELD_OUT; before the first round there is
    one with number 0."""

    round: int
    held_out: Mapping[str, float | None]
    samples: SampleFigures | None = None
    undone: bool = False


def line_of(round_: RoundFigures, settings: RolloutSettings) -> str:
    """The figures of a round's answers in a line."""
    figures = round_.samples
    assert figures is not None
    cut = round(figures.unended * figures.samples)
    texts = [
        f"{figures.samples:,} answers",
        "none is scored" if figures.score is None else f"mean score {figures.score:.4g}",
        f"{figures.failed:,} left out by the judge" if figures.failed else "",
        f"{cut:,} cut by rollouts.max_tokens={settings.max_tokens}" if cut else "",
        f"{figures.pairs:,} pairs of {figures.accepted:.0%} of the prompts",
        f"{figures.tokens:.4g} tokens an answer",
        f"{figures.duplicates:.0%} duplicates, entropy {figures.entropy:.3g}",
    ]
    return ", ".join(filter(None, texts))


def losses_of(rounds: Sequence[RoundFigures], latest: Mapping[str, float | None], tolerance: float | None) -> list[str]:
    """Why a round is to be undone: each held-out figure that is below the best valid one by more than the tolerance.
    rounds: those before it."""
    losses: list[str] = []
    for name, shown in HELD_OUT.items() if tolerance is not None else ():
        values = [(value, -of.round) for of in rounds if not of.undone and (value := of.held_out.get(name)) is not None]
        best, before = max(values, default=(-math.inf, 0))
        if (after := latest.get(name)) is not None and after < best - (tolerance or 0.0):
            losses.append(f"{shown} {best:.4g} (after round {-before}) ➜ {after:.4g}")
    return losses


def warnings_of(rounds: Sequence[RoundFigures]) -> list[str]:
    """What in the last of all rounds so far looks as if the judge were gamed, or the policy collapsed."""
    sampled = [(of.round, of.samples) for of in rounds if of.samples is not None]
    if not sampled:
        return []
    (since, first), (_, last) = sampled[0], sampled[-1]
    warnings = []
    if last.tokens >= GROWTH * first.tokens:
        grown = f"{first.tokens:.4g} ➜ {last.tokens:.4g} tokens since round {since}"
        warnings.append(f"answers grow: {grown}; the judge may prefer length")
    if last.entropy < LEAST_ENTROPY * first.entropy:
        entropy = f"its entropy went from {first.entropy:.3g} to {last.entropy:.3g} nats a token since round {since}"
        warnings.append(f"the policy collapses: {entropy}, and {last.duplicates:.0%} of the answers are duplicates")
    return warnings
