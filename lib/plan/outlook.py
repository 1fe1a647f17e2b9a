"""What a run will take, before it starts: the whole wall time, with start, reference and evaluation, and memory."""

from __future__ import annotations

from dataclasses import dataclass

from lib.plan.plan import ClusterPlan, StagePlan
from lib.plan.speeds import BACKWARD
from lib.system.hardware import Device

START_SECONDS: dict[Device, float] = {"cpu": 6.0, "metal": 8.0, "cuda": 20.0}  # imports, data, weights, first kernels
TOKEN_SECONDS: dict[Device, float] = {"cpu": 0.004, "metal": 0.01, "cuda": 0.01}  # of a batch of answers, at least


@dataclass(frozen=True)
class Work:
    """What a run does."""

    steps: int
    rows: int  # of the training data
    held_out: int  # rows, at each evaluation
    evaluations: int
    answer_tokens: int  # generated one after another at each evaluation: batches of answers times their length
    method: str
    asks_reference: bool


@dataclass(frozen=True)
class Outlook:
    """Seconds of a run's parts, and what they rest on."""

    start: float
    training: float
    reference: float
    evaluation: float
    basis: str

    @property
    def total(self) -> float:
        return self.start + self.training + self.reference + self.evaluation


def outlook(plan: ClusterPlan, work: Work, device: Device, measured: float | None = None) -> Outlook | None:
    """The time that a run takes; None where nothing is known of its speed.

    A forward pass alone takes its part of a step's operations. The reference is asked once for each row.

    measured: seconds of a step, where one was tried.
    """
    step = measured or plan.basis.step_seconds
    if step is None:
        return None
    # A step that was tried has asked the reference for its rows.
    passes = 1 + BACKWARD[work.method] + (measured is not None and work.asks_reference)
    a_row = step / plan.global_batch_size / passes
    asked = work.held_out + (0 if measured else min(work.rows, work.steps * plan.global_batch_size))
    return Outlook(
        start=START_SECONDS[device],
        training=work.steps * step,
        reference=work.asks_reference * asked * a_row,
        evaluation=work.evaluations * (work.held_out * a_row + work.answer_tokens * TOKEN_SECONDS[device]),
        basis="a step that was tried"
        if measured
        else "curves"
        if plan.calibrated
        else "matrix products, no calibration",
    )


def memory_text(plan: ClusterPlan) -> str:
    """What the fullest rank holds and may hold, e.g. "3.1 of 16 GB"; empty where nothing is known."""
    held = []
    for rank in plan.ranks:
        needed, limit = rank.planned_bytes, rank.memory_bytes
        if rank.part is not None:
            besides = 0 if isinstance(rank.part, StagePlan) else rank.part.activation_bytes or 0
            needed, limit = rank.part.needed_bytes + besides, rank.part.memory_bytes
        if needed and limit:
            held.append((needed / limit, f"{needed / 1e9:.3g} of {limit / 1e9:.3g} GB"))
    return max(held)[1] if held else ""
