"""Whether a round is kept, and what looks like a judge that is gamed: pure functions of the rounds' figures."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from lib.rollouts.pairs import SampleFigures

HELD_OUT = {"exact_match": "held-out exact match", "held_out_score": "held-out score"}  # by what a round is judged
GROWTH = 1.5  # times the tokens of the first round's answers: they grow
LEAST_PAIRS = 16  # of unequal lengths, of which a share means something
MOSTLY = 0.8  # of the pairs
FOLLOWS = 0.8  # correlation of scores and lengths: two thirds of the differences of scores are those of length
LONGER = 1.2  # times the tokens of the rejected answers: length itself may be what is preferred
LEAST_FALL = 0.05  # of a held-out figure, where there is no rollouts.tolerance: less may be chance
LEAST_ENTROPY = 0.1  # of the first round's: nearly every answer is the same then


@dataclass(frozen=True)
class RoundFigures:
    """What is known of a finished round.

    Args:
        held_out: after it, by the names of HELD_OUT; before the first round there is one with number 0.
    """

    number: int
    held_out: Mapping[str, float]
    samples: SampleFigures | None = None
    undone: bool = False


def losses_of(rounds: Sequence[RoundFigures], latest: Mapping[str, float], tolerance: float | None) -> list[str]:
    """Why a round is to be undone: each held-out figure that is below the best kept one by more than the tolerance.

    rounds: those before it.
    """
    if tolerance is None:
        return []
    losses = []
    for name, shown in HELD_OUT.items():
        kept = [(one.held_out[name], -one.number) for one in rounds if not one.undone and name in one.held_out]
        if not kept or name not in latest:
            continue
        best, number = max(kept)
        if latest[name] < best - tolerance:
            losses.append(f"{shown} {best:.4g} (after round {-number}) ➜ {latest[name]:.4g}")
    return losses


def warnings_of(rounds: Sequence[RoundFigures], tolerance: float | None) -> list[str]:
    """What in the last of these rounds looks as if the judge were gamed, or the policy collapsed.

    rounds: all so far.
    """
    sampled = [one for one in rounds if one.samples is not None]
    if not sampled:
        return []
    first, last = sampled[0].samples, sampled[-1].samples
    assert first is not None and last is not None
    warnings = []
    if last.tokens >= GROWTH * first.tokens:
        warnings.append(
            f"answers grow: {first.tokens:.4g} ➜ {last.tokens:.4g} tokens since round {sampled[0].number}; "
            "the judge may prefer length"
        )
    if _prefers_length(last):
        warnings.append(
            f"the judge prefers the longer answer in {last.longer_chosen:.0%} of the pairs "
            f"({last.chosen_tokens:.4g} against {last.rejected_tokens:.4g} tokens)"
        )
    if last.pairs >= LEAST_PAIRS and (last.length_correlation or 0) >= FOLLOWS:
        warnings.append(
            f"the judge's scores follow length: their correlation is {last.length_correlation:.2f} among the answers "
            "to a prompt"
        )
    if last.entropy < LEAST_ENTROPY * first.entropy:
        warnings.append(
            f"the policy collapses: its entropy went from {first.entropy:.3g} to {last.entropy:.3g} nats a token since "
            f"round {sampled[0].number}, and {last.duplicates:.0%} of the answers are duplicates"
        )
    return warnings + _rising_while_falling(rounds, tolerance)


def _prefers_length(samples: SampleFigures) -> bool:
    share, chosen, rejected = samples.longer_chosen, samples.chosen_tokens, samples.rejected_tokens
    if share is None or chosen is None or rejected is None or samples.pairs < LEAST_PAIRS:
        return False
    return share >= MOSTLY and chosen >= LONGER * rejected


def _rising_while_falling(rounds: Sequence[RoundFigures], tolerance: float | None) -> list[str]:
    """The judge's scores rise while a held-out figure falls."""
    last, warnings = rounds[-1], []
    least_fall = LEAST_FALL if tolerance is None else tolerance
    assert last.samples is not None
    for name, shown in HELD_OUT.items():
        known = [one for one in rounds[:-1] if name in one.held_out]
        if not known or name not in last.held_out:
            continue
        best = max(known, key=lambda one: one.held_out[name])
        # What was drawn in the round after it is what that policy wrote.
        drawn = next((one.samples for one in rounds if one.number == best.number + 1), None)
        fell = best.held_out[name] - last.held_out[name]
        if drawn is None or drawn.score is None or last.samples.score is None or fell <= least_fall:
            continue
        if last.samples.score > drawn.score:
            warnings.append(
                f"rewards rise while held-out falls: the judge's mean score {drawn.score:.4g} ➜ "
                f"{last.samples.score:.4g} since round {best.number + 1}, {shown} {best.held_out[name]:.4g} ➜ "
                f"{last.held_out[name]:.4g}"
            )
    return warnings
