"""What a run costs: time, energy, electricity and rent of its hosts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypedDict

from lib.config.settings import CostSettings


class HostCost(TypedDict):
    """What one host costs; money in the currency of the settings."""

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
    """Time and cost of training on `total_examples` at `throughput` examples a second, by the hour.

    The hourly price may be any sum of rent and electricity; `hosts_cost` works it out from the settings.
    """
    assert total_examples >= 0 and throughput > 0, (total_examples, throughput)
    hours = total_examples / throughput / 3600
    return {
        "total_examples": total_examples,
        "throughput_ex_per_sec": throughput,
        "estimated_time_hours": hours,
        "estimated_cost_usd": hours * cost_per_hour,
    }


def hosts_cost(hosts: Sequence[str], seconds: float, cost: CostSettings) -> RunCost | None:
    """Energy, electricity and rent of hosts held for `seconds`, each and together; None without any price.

    A host pays while it waits, too. A host of several ranks is named several times and pays once.
    """
    if not (cost.watts or cost.rent_per_hour):
        return None
    hours = seconds / 3600
    each: list[HostCost] = []
    for host in dict.fromkeys(hosts):
        energy_kwh = _of_host(cost.watts, host) / 1000 * hours
        electricity, rent = energy_kwh * cost.price_per_kwh, _of_host(cost.rent_per_hour, host) * hours
        each.append(
            HostCost(host=host, energy_kwh=energy_kwh, electricity=electricity, rent=rent, cost=electricity + rent)
        )
    return RunCost(
        hours=hours,
        energy_kwh=sum(host["energy_kwh"] for host in each),
        electricity=sum(host["electricity"] for host in each),
        rent=sum(host["rent"] for host in each),
        cost=sum(host["cost"] for host in each),
        hosts=each,
    )


def _of_host(setting: float | dict[str, float], host: str) -> float:
    return setting.get(host, 0.0) if isinstance(setting, dict) else setting
