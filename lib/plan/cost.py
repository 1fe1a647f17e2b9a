"""What a run costs: time, energy, electricity and rent of its hosts, in the currency of the settings."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypedDict

from lib.config.settings import CostSettings


class HostCost(TypedDict):
    """What one host costs."""

    host: str
    energy_kwh: float
    electricity: float
    rent: float
    cost: float


class RunCost(TypedDict):
    """What all hosts of a run cost together, and each."""

    hours: float
    energy_kwh: float
    electricity: float
    rent: float
    cost: float
    hosts: list[HostCost]


def calculate_training_cost(total_examples: int, throughput: float, cost_per_hour: float = 0.0) -> dict[str, float]:
    """Time and cost of training on `total_examples` at `throughput` examples a second, by the hour."""
    hours = total_examples / throughput / 3600
    return {
        "total_examples": total_examples,
        "throughput_ex_per_sec": throughput,
        "estimated_time_hours": hours,
        "estimated_cost_usd": hours * cost_per_hour,
    }


def hosts_cost(hosts: Sequence[str], seconds: float, cost: CostSettings) -> RunCost | None:
    """What hosts that are held for `seconds` cost, each and together; None without any price.

    A host pays while it waits, too. A host of several ranks is named several times and pays once.
    """
    if not (cost.watts or cost.rent_per_hour):
        return None
    hours = seconds / 3600
    each: list[HostCost] = []
    for host in dict.fromkeys(hosts):
        watts, rent = (s.get(host, 0.0) if isinstance(s, dict) else s for s in (cost.watts, cost.rent_per_hour))
        energy, rented = watts / 1000 * hours, rent * hours
        electricity = energy * cost.price_per_kwh
        each.append(
            HostCost(host=host, energy_kwh=energy, electricity=electricity, rent=rented, cost=electricity + rented)
        )
    return RunCost(
        hours=hours,
        energy_kwh=sum(host["energy_kwh"] for host in each),
        electricity=sum(host["electricity"] for host in each),
        rent=sum(host["rent"] for host in each),
        cost=sum(host["cost"] for host in each),
        hosts=each,
    )
