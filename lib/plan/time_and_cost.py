"""What a run will take, before it starts, and what it costs: time, memory, energy, electricity and rent."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from lib.config.settings import CostSettings
from lib.plan.facts import BACKWARD
from lib.plan.plan import ClusterPlan
from lib.system.hardware import Device

START_SECONDS: dict[Device, float] = {"cpu": 5.0, "metal": 8.0, "cuda": 20.0}  # imports, data, weights, first kernels
TOKEN_SECONDS: dict[Device, float] = {"cpu": 0.004, "metal": 0.01, "cuda": 0.01}  # of a batch of answers, at least


def calculate_training_cost(total_examples: int, throughput: float, cost_per_hour: float = 0.0) -> dict[str, float]:
    """Time and cost of training on `total_examples` at `throughput` examples a second, by the hour."""
    hours = total_examples / throughput / 3600
    return {
        "total_examples": total_examples,
        "throughput_ex_per_sec": throughput,
        "estimated_time_hours": hours,
        "estimated_cost_usd": hours * cost_per_hour,
    }


def hosts_cost(hosts: Sequence[str], seconds: float, cost: CostSettings) -> dict[str, Any] | None:
    """What hosts that are held for `seconds` cost, each (`hosts`) and together; None without any price. A host pays
    while it waits, too. A host of several ranks is named several times and pays once."""
    if not (cost.watts or cost.rent_per_hour):
        return None
    hours, each = seconds / 3600, []
    for host in dict.fromkeys(hosts):
        watts, rent = (s.get(host, 0.0) if isinstance(s, dict) else s for s in (cost.watts, cost.rent_per_hour))
        energy, rented = watts / 1000 * hours, rent * hours
        electricity = energy * cost.price_per_kwh
        sums = {"energy_kwh": energy, "electricity": electricity, "rent": rented, "cost": electricity + rented}
        each.append({"host": host, **sums})
    return {"hours": hours, "hosts": each, **{name: sum(of_host[name] for of_host in each) for name in sums}}


@dataclass(frozen=True)
class Work:
    """What a run does."""

    steps: int
    reference_rows: int  # distinct training rows whose reference is computed
    held_out: int  # rows
    evaluation_passes: int  # over the held-out rows, beside the reference's
    answer_tokens: int  # generated one after another in all: batches of answers times their length
    answered_rows: float = 0.0  # whose prompts are answered: in tokens, so many rows


@dataclass(frozen=True)
class Pace:
    """Seconds of what a run repeats, and what they rest on."""

    step: float  # without its rows' reference
    row: float  # a forward pass alone, of a row that is trained
    held_out_row: float
    answer_token: float  # of a batch of answers
    basis: str
    trial: float = 0.0  # of what was tried, which the run tries as well


def pace_of(plan: ClusterPlan, method: str, device: Device, tried: float | None, asks_reference: bool) -> Pace | None:
    """By a step that was tried (its seconds, with its rows' reference where steps ask it), else by curves or matrix
    products; None where nothing is known of the speed. A forward pass alone takes its part of a step's operations."""
    step = tried or plan.basis.step_seconds
    if step is None:
        return None
    basis = "a step that was tried" if tried else "curves" if plan.calibrated else "matrix products, no calibration"
    with_reference = bool(tried) and asks_reference
    forward = step / (1 + BACKWARD[method] + with_reference)
    row = forward / plan.global_batch_size
    return Pace(step - with_reference * forward, row, row, TOKEN_SECONDS[device], basis)


def outlook(pace: Pace, work: Work, device: Device) -> dict[str, float]:
    """Seconds of a run's parts: start, training, reference and evaluation. The reference is asked once for each row."""
    held_out = work.held_out * pace.held_out_row
    answers = work.answered_rows * pace.row + work.answer_tokens * pace.answer_token
    return {
        "start": START_SECONDS[device] + pace.trial,
        "training": work.steps * pace.step,
        "reference": work.reference_rows * pace.row + (held_out if work.reference_rows else 0.0),
        "evaluation": work.evaluation_passes * held_out + answers,
    }


def memory_text(plan: ClusterPlan) -> str:
    """What the fullest rank holds and may hold, e.g. "3.1 of 16 GB"; empty where nothing is known."""
    held = [
        (rank.planned_bytes / rank.memory_bytes, f"{rank.planned_bytes / 1e9:.3g} of {rank.memory_bytes / 1e9:.3g} GB")
        for rank in plan.ranks
        if rank.planned_bytes and rank.memory_bytes
    ]
    return max(held)[1] if held else ""
