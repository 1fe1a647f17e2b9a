"""The settings of rounds: sampling from the model, judging, and training on what it wrote."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Literal

from pydantic import Field, model_validator

from lib.config.evaluate_settings import REWARD_MODEL
from lib.config.section import Fraction, Natural, NonNegative, Positive, PositiveFloat, Section, Size
from lib.config.train_settings import TrainSettings


class RolloutSettings(Section):
    """Rounds, in which the model answers prompts, a judge scores the answers, and what was better is preferred."""

    rounds: Natural = 0
    """Rounds of the run; 0 trains on the records of data.train as they are. With rounds data.train holds prompts, and
    what the judge needs beside them, e.g. an answer."""
    prompts: Positive = 256
    """Prompts of one round: each round takes others, until all had their turn."""
    samples: Annotated[Size, Field(ge=2, le=1024)] = 8
    """Answers to each prompt."""
    steps: Positive | None = None
    """Optimizer steps of one round; by default as many as one global batch for each train.global_batch_size prompts."""
    temperature: PositiveFloat = 1.0
    """Temperature that answers are drawn at."""
    top_p: Annotated[Fraction, Field(gt=0)] = 1.0
    """Draw among the likeliest tokens that have this probability together."""
    max_tokens: Size = 256
    """Longest answer, in tokens."""
    stop: tuple[str, ...] = ()
    """Texts that end an answer, e.g. ["\\n\\n"], besides the model's end tokens."""
    batch_size: Size = 64
    """Answers that a rank draws at a time. Ranks take the prompts of a round in chunks of about so many answers."""
    judge: str | None = None
    """Who scores the answers, as evaluate.judge says; by default evaluate.judge, which scores the held-out ones."""
    pairs: Literal["best_worst", "margin"] = "best_worst"
    """Which answers to a prompt become pairs: the best and the worst, or all whose scores differ by rollouts.margin."""
    margin: NonNegative = 0.0
    """Least difference of two scores that makes a pair; answers of equal scores never do."""
    filter_groups: bool = False
    """Of grpo: leave out prompts whose answers all have the same score. They have no advantage, only a pass each, and
    with train.beta the divergence from the reference (DAPO)."""
    mask_truncated: bool = False
    """Learn nothing from answers that rollouts.max_tokens cut: they are in no pair; of a group of grpo their scores
    count, and their tokens do not."""
    reference_every: Positive | None = None
    """Rounds after which the reference becomes the policy; by default it stays what it was before training."""
    overlap: bool = False
    """Draw the next round's answers before a round is learnt from: a judge in another process or on another machine
    scores them meanwhile, and no rank waits for another's last answers. They are of the policy before that round."""
    tolerance: NonNegative | None = 0.05
    """A round is undone after which the exact match of evaluate.answers, or the mean score of the held-out prompts
    (data.valid, data.holdout), is lower than the best so far by more than this; null for never."""
    after_undone: Literal["continue", "stop"] = "continue"
    """What follows a round that is undone: the next one, from the weights before it, or the end of the run."""

    @model_validator(mode="after")
    def _settings_agree(self) -> RolloutSettings:
        if self.pairs == "margin" and not self.margin:
            raise ValueError("rollouts.pairs=margin needs rollouts.margin, the least difference of scores, e.g. 0.5")
        if "" in self.stop:
            raise ValueError("rollouts.stop has an empty text, at which every answer would end; leave it out")
        return self


INSTEAD = {
    "train.reference_sync_steps": "rollouts.reference_every moves the reference",
    "train.patience": "rollouts.tolerance and rollouts.after_undone end a run",
    "evaluate.every": "every round ends with an evaluation",
    "data.streaming": "prompts are kept in memory",
}


def why_no_rounds(
    rollouts: RolloutSettings,
    train: TrainSettings,
    strategy: str,
    merge: str | None,
    judge: str | None,
    given: Mapping[str, bool],
) -> str | None:
    """Why these settings allow no rounds, which bring their own data, steps and evaluations; None where they do.

    merge: independent.merge. judge: evaluate.judge. given: settings beside those of `train` that are not for rounds,
    and whether they are set.
    """
    if train.record_kind not in ("preference", "group"):
        return (
            f"rollouts.rounds makes pairs or groups of the model's answers, which train.loss={train.loss_name} does "
            "not take; take a preference loss, e.g. sigmoid, or grpo"
        )
    of_train = {
        "train.steps": train.steps is not None,
        "train.epochs": train.epochs != 1,
        "train.patience": train.patience is not None,
        "train.reference_sync_steps": train.reference_sync_steps is not None,
    }
    for name in (name for name, is_given in (of_train | dict(given)).items() if is_given):
        why = INSTEAD.get(name, "a run has rollouts.rounds times rollouts.steps of them")
        return f"{name} is not for rounds: {why}; leave it out"
    if train.record_kind == "group" and train.temperature != rollouts.temperature:
        return (
            f"train.temperature={train.temperature:g} has to be rollouts.temperature={rollouts.temperature:g}, at "
            f"which the answers are drawn; set train.temperature={rollouts.temperature:g}"
        )
    if rollouts.filter_groups and train.record_kind != "group":
        return (
            f"rollouts.filter_groups is for train.loss=grpo, not {train.loss_name}: answers of equal scores make no "
            "pair; leave it out"
        )
    if train.max_completion_length not in (None, rollouts.max_tokens):
        return (
            f"train.max_completion_length={train.max_completion_length} has to be rollouts.max_tokens="
            f"{rollouts.max_tokens}, the most that an answer has"
        )
    if merge in ("none", "stack"):
        return (
            f"independent.merge={merge} is not for rounds, in which all ranks sample from one adapter of one rank; "
            "take average or svd"
        )
    if strategy == "sharded":
        return "strategy=sharded is not for rounds: ranks draw with whole models, or pipelined; take pipelined"
    judge = rollouts.judge or judge
    if rollouts.overlap and judge is not None and judge.startswith(REWARD_MODEL):
        return (
            f"rollouts.overlap=true has answers judged while the ranks learn, and {judge} needs the same devices; "
            "leave rollouts.overlap out, or serve that model and name its address"
        )
    return None
