"""What the records of a run hold: one definition for those who write them and those who show them.

Every record has `kind`, `time`, `rank` and `host`. Its kind says which of the other fields it has.
"""

from __future__ import annotations

from typing import Required

from pydantic import FiniteFloat, PositiveInt
from typing_extensions import TypedDict  # pydantic needs it from there before Python 3.12


class RankRecord(TypedDict, total=False):
    """One rank in a plan."""

    host: Required[str]
    micro_batch_sizes: list[object] | None


class PlanRecord(TypedDict, total=False):
    """A plan, as the records `start` and `plan` have it."""

    strategy: str | None
    reason: str | None
    shares: list[int] | None
    blocks: list[int] | None  # of each rank of a pipeline
    ranks: list[RankRecord] | None
    global_batch_size: PositiveInt | None
    predicted_step_seconds: FiniteFloat | None
    predicted_pairs_per_second: FiniteFloat | None
    solo_sum_pairs_per_second: FiniteFloat | None
    calibrated: object
    warnings: list[str] | None
    curves: list[object] | None  # of lib/plan/calibration.py, one a rank


class SettingsRecord(TypedDict, total=False):
    """The settings that a run was started with, section by section."""

    model: dict[str, object] | None
    train: dict[str, object] | None
    data: dict[str, object] | None
    cost: dict[str, object] | None


class SampleRecord(TypedDict, total=False):
    """A question with its answers before and after training."""

    prompt: Required[str]
    before: str | None
    after: str | None


class AnswersRecord(TypedDict, total=False):
    """What is known of the answers of a round (lib/rollouts/pairs.py)."""

    samples: int
    failed: int
    pairs: int
    score: FiniteFloat | None
    accepted: FiniteFloat
    duplicates: FiniteFloat
    tokens: FiniteFloat
    entropy: FiniteFloat
    kl: FiniteFloat | None


class ExampleRecord(TypedDict):
    """A pair of a round, as text."""

    prompt: str
    chosen: str
    rejected: str


class Record(PlanRecord, total=False):
    """One line of a rank's log that is not a measurement: `start`, `plan`, `merge`, `evaluation`, `checkpoint`, ..."""

    kind: str
    time: float  # Unix seconds
    rank: int
    host: str
    step: int | None
    steps: PositiveInt | list[int] | None  # of the run; in a merge, of each rank
    # start
    resumed_from_step: int | None
    resumes: list[list[int]] | None
    resume_ids: list[str] | None
    plan: PlanRecord | None
    config: SettingsRecord | None
    commit: object
    platform: object
    versions: dict[str, object] | None
    memory_limit_bytes: FiniteFloat | None
    quantised_products: list[object] | None  # how lib/model/quantised.py multiplies by each kind of weights
    # plan
    first_step: int | None
    # merge
    method: object
    pairs: list[int] | None
    bytes_sent: FiniteFloat | None
    error: FiniteFloat | None
    # warning
    text: str | None
    # samples
    samples: list[SampleRecord] | None
    # evaluation; end: of the weights that the run's folder holds
    loss: FiniteFloat | None
    kl: FiniteFloat | None
    reward_accuracy: FiniteFloat | None
    reward_margin: FiniteFloat | None
    exact_match: FiniteFloat | None
    held_out_score: FiniteFloat | None
    evaluation_seconds: FiniteFloat
    # round: of the rank, its seconds; the rest is the same on all
    round: int
    staleness: int  # rounds that were learnt between the drawing of the answers and the training on them
    undone: bool
    why: list[str]
    held_out: dict[str, FiniteFloat | None]
    answers: AnswersRecord
    examples: list[ExampleRecord]
    sampling_seconds: FiniteFloat
    waiting_seconds: FiniteFloat  # for what other ranks draw
    judging_seconds: FiniteFloat
    training_seconds: FiniteFloat
    round_seconds: FiniteFloat
    # end
    final_step: int | None  # whose weights the run's folder holds
