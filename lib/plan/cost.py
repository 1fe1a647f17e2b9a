"""What a run will take, before it starts, and what it costs: time, memory, energy, electricity and rent."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypedDict

from lib.config.settings import CostSettings
from lib.plan.plan import ClusterPlan
from lib.plan.speeds import BACKWARD
from lib.system.hardware import Device

START_SECONDS: dict[Device, float] = {"cpu": 6.0, "metal": 8.0, "cuda": 20.0}  # imports, data, weights, first kernels
TOKEN_SECONDS: dict[Device, float] = {"cpu": 0.004, "metal": 0.01, "cuda": 0.01}  # of a batch of answers, at least


class RunCost(TypedDict):
    """What all hosts of a run cost together, in the currency of the settings, and each."""

    hours: float
    energy_kwh: float
    electricity: float
    rent: float
    cost: float
    hosts: list[dict[str, Any]]  # host, and the same sums


def calculate_training_cost(total_examples: int, throughput: float, cost_per_hour: float = 0.0) -> dict[str, float]:
    """Time and cost of training on `total_examples` at `throughput` examples a second, by the hour."""
    hours = total_examples / throughput / 3600
    found = {"total_examples": total_examples, "throughput_ex_per_sec": throughput, "estimated_time_hours": hours}
    return {**found, "estimated_cost_usd": hours * cost_per_hour}


def hosts_cost(hosts: Sequence[str], seconds: float, cost: CostSettings) -> RunCost | None:
    """What hosts that are held for `seconds` cost, each and together; None without any price.

    A host pays while it waits, too. A host of several ranks is named several times and pays once.
    """
    if not (cost.watts or cost.rent_per_hour):
        return None
    hours, sums = seconds / 3600, {"energy_kwh": 0.0, "electricity": 0.0, "rent": 0.0, "cost": 0.0}
    each: list[dict[str, Any]] = []
    for host in dict.fromkeys(hosts):
        watts, rent = (s.get(host, 0.0) if isinstance(s, dict) else s for s in (cost.watts, cost.rent_per_hour))
        energy, rented = watts / 1000 * hours, rent * hours
        electricity = energy * cost.price_per_kwh
        of_host = dict(zip(sums, (energy, electricity, rented, electricity + rented), strict=True))
        sums = {name: total + of_host[name] for name, total in sums.items()}
        each.append({"host": host, **of_host})
    return RunCost(hours=hours, hosts=each, **sums)  # type: ignore[typeddict-item]


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

    measured: seconds of a step, where one was tried: it has asked the reference for its rows.
    """
    step = measured or plan.basis.step_seconds
    if step is None:
        return None
    passes = 1 + BACKWARD[work.method] + (measured is not None and work.asks_reference)
    a_row = step / plan.global_batch_size / passes
    asked = work.held_out + (0 if measured else min(work.rows, work.steps * plan.global_batch_size))
    basis = "a step that was tried" if measured else "curves" if plan.calibrated else "matrix products, no calibration"
    evaluation = work.evaluations * (work.held_out * a_row + work.answer_tokens * TOKEN_SECONDS[device])
    reference = work.asks_reference * asked * a_row
    return Outlook(START_SECONDS[device], work.steps * step, reference, evaluation, basis)


def memory_text(plan: ClusterPlan) -> str:
    """What the fullest rank holds and may hold, e.g. "3.1 of 16 GB"; empty where nothing is known."""
    held = [
        (rank.planned_bytes / rank.memory_bytes, f"{rank.planned_bytes / 1e9:.3g} of {rank.memory_bytes / 1e9:.3g} GB")
        for rank in plan.ranks
        if rank.planned_bytes and rank.memory_bytes
    ]
    return max(held)[1] if held else ""
