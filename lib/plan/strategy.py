"""Which strategy replicas take, and how often independent ones merge: pure functions.

Independent replicas merge as often as takes MERGE_COST of the time, and at least LEAST_MERGES times a run. The more
often they merge, the nearer they stay to one machine's result. A merge's time is predicted from a calibrated link, or
measured in the first rounds.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from lib.config.schema import Config

MERGE_COST = 0.01  # of the time of a run
LEAST_MERGES = 8  # in a run; after each step, where it has fewer
FIRST_STEPS = 2  # global batches of the first rounds, where what a merge costs is still to be measured


@dataclass(frozen=True)
class Merging:
    """How often independent ranks merge."""

    steps_per_round: int  # global batches from one merge to the next, to begin with
    merges: int  # in the whole run, if it stays so
    reason: str


def choose_strategy(config: Config, world_size: int) -> tuple[str, str]:
    """The strategy of ranks that all can hold the whole model, and why.

    What the settings name is taken. `auto` is independent, unless a setting asks for what only synchronous steps have.
    """
    if config.strategy != "auto":
        return config.strategy, "as strategy has it"
    if world_size == 1:
        return "synchronous", "one rank"
    if config.plan.shares is not None:
        return "synchronous", "since plan.shares divides every step (strategy=independent takes shares, too)"
    if config.reference_sync_steps is not None:
        name = "rollouts.reference_every" if config.rollouts.rounds else "train.reference_sync_steps"
        return "synchronous", f"since with {name} all ranks follow one policy"
    return "independent", "as every host can hold the model"


def longest_round(steps: int) -> int:
    """The longest round, in steps, with which a run of `steps` has LEAST_MERGES merges, or one after each step."""
    return max(1, math.ceil(steps / (LEAST_MERGES - 1)) - 1)


def steps_per_round(steps: int, merge_seconds: float, step_seconds: float) -> int:
    """The fewest global batches of a round with which merges take at most MERGE_COST of the time; LEAST_MERGES stands.

    Args:
        steps: of the whole run.
        merge_seconds: what a round's end takes; `step_seconds`: a global batch, without it.
    """
    enough = math.ceil(merge_seconds * (1 / MERGE_COST - 1) / step_seconds - 1e-9)
    return min(max(1, enough), longest_round(steps))


def plan_merging(
    config: Config, steps: int, steps_per_epoch: int, merge_seconds: float | None, step_seconds: float | None
) -> Merging:
    """How often independent ranks merge: as the settings say, else as predicted, else as will be measured.

    Args:
        steps: of the whole run.
        merge_seconds, step_seconds: as calibrated for this model and link; None where that is not known.
    """
    given, batch_size = config.independent.pairs_per_round, config.train.global_batch_size
    size = math.ceil(given / batch_size) if given is not None else steps_per_epoch
    if config.independent.merge == "none":
        return Merging(size, 0, "never, as independent.merge=none has it")
    if given is not None:
        return _merging(size, steps, "as independent.pairs_per_round has it")
    if merge_seconds is not None and step_seconds:
        size = steps_per_round(steps, merge_seconds, step_seconds)
        part = merge_seconds / (merge_seconds + size * step_seconds)
        least = f", at least {LEAST_MERGES} merges a run" * (part > MERGE_COST)
        cost = f"a merge is predicted to take {merge_seconds:.2g} s, {part:.2%} of the time{least}"
        return _merging(size, steps, cost)
    if measures_merges(config):
        size = min(FIRST_STEPS, longest_round(steps))
        often = f"as often as costs {MERGE_COST:.0%} of the time, at least {LEAST_MERGES} times"
        return Merging(size, math.ceil(steps / size), f"{_every(size)} until the first merges are timed, then {often}")
    fixed = "plan.replan=false" if config.plan.shares is None else "plan.shares"
    return _merging(longest_round(steps), steps, f"what a merge costs is not calibrated, and with {fixed} not measured")


def measures_merges(config: Config) -> bool:
    """Whether rounds get as long as measured timings ask for. Otherwise the same run gives the same bits again."""
    is_open = config.independent.pairs_per_round is None and config.independent.merge != "none"
    return is_open and config.plan.replan and config.plan.shares is None


def default_merge(config: Config) -> str:
    """The merge method where the settings name none.

    In rounds as short as planned here, the mean of LoRA's factors is as good as the best adapter of the mean product,
    with far less arithmetic. Rounds that a user chose may be so long that it is not.
    """
    return "svd" if config.model.method == "lora" and config.independent.pairs_per_round is not None else "average"


def _merging(size: int, steps: int, reason: str) -> Merging:
    merges = math.ceil(steps / size)
    return Merging(size, merges, f"{_every(size)} ({merges:,} merge{'s' * (merges != 1)}): {reason}")


def _every(size: int) -> str:
    return "after every step" if size == 1 else f"every {size:,} steps"
