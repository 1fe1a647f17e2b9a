"""A Mac's GPU: the watchdog of a lit display, and wired memory. Elsewhere everything here does nothing.

macOS ends GPU work that keeps a lit display waiting (mlx#3267). AGX_RELAX_CDM_CTXSTORE_TIMEOUT, which
`mpi_and_blas.prepare` sets, was enough on some Macs and not on others.
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence

from lib.system import hardware, os_commands

COMMAND_SECONDS = 15.0  # system_profiler takes one or two
SLEEP_SECONDS = 1.0  # for a display to go dark
YES = "spdisplays_yes"
WIRED_FROM = 0.5  # of the memory: what is smaller stays in memory by itself


def uses_metal() -> bool:
    """Whether MLX computes on a Mac's GPU."""
    return os_commands.is_mac() and hardware.mlx_device()[0] == "metal"


def lit_displays() -> list[str]:
    """The displays of this Mac that are awake, by name; none where that is not known."""
    if not os_commands.is_mac():
        return []
    profile = os_commands.output(["system_profiler", "SPDisplaysDataType", "-json"], COMMAND_SECONDS)
    try:
        gpus = json.loads(profile)["SPDisplaysDataType"]
        displays = [display for gpu in gpus for display in gpu.get("spdisplays_ndrvs", [])]
        lit = [d for d in displays if (d.get("spdisplays_online"), d.get("spdisplays_asleep") == YES) == (YES, False)]
        return [str(display.get("_name", "display")) for display in lit]
    except (ValueError, KeyError, TypeError, AttributeError):
        return []


def attend_displays(setting: str, is_first_here: bool, only_look: bool) -> list[str]:
    """This Mac's lit displays, once they were put to sleep where `setting`, metal.display, is sleep. is_first_here: of
    this machine's ranks one does it. only_look: nothing is changed."""
    if setting == "ignore" or not is_first_here or not uses_metal():
        return []
    names = lit_displays()
    if names and setting == "sleep" and not only_look:
        os_commands.output(["pmset", "displaysleepnow"], COMMAND_SECONDS)
        time.sleep(SLEEP_SECONDS)
        names = lit_displays()
    return names


def advice(hosts: Sequence[str], displays: Sequence[Sequence[str]]) -> str | None:
    """One line about hosts whose displays are lit; None if there are none."""
    lit_hosts = {host: names for host, names in zip(hosts, displays, strict=True) if names}
    if not lit_hosts:
        return None
    named = "; ".join(f"{host}: {', '.join(names)}" for host, names in lit_hosts.items())
    return (
        f"a display is on ({named}), and macOS may end training to keep it responsive (mlx#3267); put it to sleep "
        "(metal.display=sleep does, or pmset displaysleepnow there), or say metal.display=ignore"
    )


def keep_wired(model_bytes: int) -> bool:
    """Keeps what MLX holds in memory where the model takes half of that, and would be swapped; whether it is kept."""
    if not uses_metal():
        return False
    import mlx.core as mx

    is_wired = model_bytes >= WIRED_FROM * (hardware.host_memory_bytes() or 2**60)
    mx.set_wired_limit(int(mx.device_info()["max_recommended_working_set_size"]) if is_wired else 0)
    return is_wired
