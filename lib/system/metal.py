"""What is particular to a Mac's GPU: the watchdog of a lit display, wired memory, and how long an evaluation may take.

macOS ends GPU work that keeps a lit display waiting (mlx#3267: LoRA training dies with "Impacting Interactivity", or
the Mac restarts). With the display asleep it does not. AGX_RELAX_CDM_CTXSTORE_TIMEOUT, which the GPU's driver reads,
was enough on some Macs and not on others; shorter evaluations make it less likely.

Everything that asks macOS is a function of its own here, and gives nothing elsewhere. Only the standard library is
imported before something is asked: train.py --help needs this module, too.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import json
import sys
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from lib.errors import UserError
from lib.system import os_commands

if TYPE_CHECKING:
    import argparse

    from lib.config.metal_settings import MetalSettings
    from lib.config.schema import Config


ASK_SECONDS = 15.0  # system_profiler takes one or two
SLEEP_SECONDS = 1.0  # for a display to go dark
WATCHDOG_RELAXED = "AGX_RELAX_CDM_CTXSTORE_TIMEOUT"
WIRED_FROM = 0.5  # of the memory: what is smaller stays in memory by itself
# The time of a pass through the model; of training adapters, or all weights; and of computing blocks twice.
FORWARD = 1.0
ADAPTERS, FULL, AGAIN = 2.0, 3.0, 1.0
MATMUL_PART = 0.6  # of the matmul rate, that training reaches
RATE_WIDTH = 2048  # of the matrices whose product measures it


# ---- What is asked of macOS ------------------------------------------------------------------------------------------


def lit_displays() -> list[str]:
    """The displays of this Mac that are awake, by name; none where that is not known.

    From system_profiler. IODisplayWrangler, IODisplayConnect and AppleBacklightDisplay do not exist on Apple silicon,
    and what CoreGraphics says depends on the session and on the programs that run in it.
    """
    command = ["system_profiler", "SPDisplaysDataType", "-json"]
    return lit(os_commands.output(command, ASK_SECONDS)) if os_commands.is_mac() else []


def sleep_displays() -> bool:
    """Puts this Mac's displays to sleep, until somebody touches it; whether they are. The Mac stays awake."""
    if not os_commands.is_mac():
        return False
    os_commands.output(["pmset", "displaysleepnow"], ASK_SECONDS)
    time.sleep(SLEEP_SECONDS)
    return not lit_displays()


# ---- Decisions: pure -------------------------------------------------------------------------------------------------


def lit(profile: str) -> list[str]:
    """Names of the displays that are on, from what system_profiler prints of displays as JSON."""
    try:
        displays = [one for gpu in json.loads(profile)["SPDisplaysDataType"] for one in gpu.get("spdisplays_ndrvs", [])]
    except (ValueError, KeyError, TypeError, AttributeError):
        return []
    return [
        str(display.get("_name", "display"))
        for display in displays
        if display.get("spdisplays_online") == "spdisplays_yes" and display.get("spdisplays_asleep") != "spdisplays_yes"
    ]


def advice(hosts: Sequence[str], displays: Sequence[Sequence[str]]) -> str | None:
    """One line about hosts whose displays are lit, None if there are none."""
    lit_hosts = {host: names for host, names in zip(hosts, displays, strict=True) if names}
    if not lit_hosts:
        return None
    named = "; ".join(f"{host}: {', '.join(names)}" for host, names in lit_hosts.items())
    return (
        f"a display is on ({named}), for whose sake macOS may end the training (mlx#3267); put it to sleep "
        "(metal.display=sleep does, or pmset displaysleepnow there), or say metal.display=ignore"
    )


def wires(setting: str, model_bytes: int, memory_bytes: int | None) -> bool:
    """Whether to keep what MLX holds wired. Kernel panics were reported with it (mlx#3186), and none without.

    setting: always, never, or auto: where the model takes half of the memory, and would be swapped.
    """
    return setting == "always" or (
        setting == "auto" and memory_bytes is not None and model_bytes >= WIRED_FROM * memory_bytes
    )


def most_rows(micro_batch_size: int, seconds_per_row: float | None, limit_seconds: float | None) -> int:
    """Rows of one evaluation: the whole micro-batch if it ends in time, else a power of two of them, one at least.

    A power of two, so that a rate that varies a little does not bring new shapes, each of which is compiled.
    """
    if limit_seconds is None or seconds_per_row is None or micro_batch_size * seconds_per_row <= limit_seconds:
        return micro_batch_size
    rows = 1
    while 2 * rows < micro_batch_size and 2 * rows * seconds_per_row <= limit_seconds:
        rows *= 2
    return rows


def expected_seconds(parameters: int, tokens: float, passes: float, flops_per_second: float) -> float:
    """Of a row of so many tokens, before one was measured: each parameter is a product and a sum for each token."""
    return 2.0 * parameters * tokens * passes / (MATMUL_PART * flops_per_second)


class Pace:
    """How many rows this rank evaluates at once: on Metal no more than end within metal.evaluation_seconds.

    The first steps go by an estimate, later ones by what was measured.
    """

    def __init__(
        self, limit_seconds: float | None = None, seconds_per_row: float | None = None, is_fixed: bool = False
    ):
        self.limit_seconds, self.seconds_per_row, self.is_fixed = limit_seconds, seconds_per_row, is_fixed
        self.traces = 0

    def most_rows(self, micro_batch_size: int) -> int:
        return most_rows(micro_batch_size, self.seconds_per_row, self.limit_seconds)

    def observe(self, rows: int, seconds: float, traces: int = 0) -> None:
        """Learns from a step: its rows on this rank, their seconds, the shapes so far. One that compiled is ignored."""
        if rows and traces == self.traces and not self.is_fixed:
            self.seconds_per_row = seconds / rows
        self.traces = traces


def training_passes(method: str, is_checkpointed: bool) -> float:
    """What training takes, in forward passes."""
    return (FULL if method == "full" else ADAPTERS) + AGAIN * is_checkpointed


# ---- On the machine itself -------------------------------------------------------------------------------------------


def relaxes(options: argparse.Namespace) -> bool:
    """Whether train.py's command line lets the watchdog be relaxed, to be known before MLX comes in; True elsewhere."""
    if not os_commands.is_mac():
        return True
    from lib.config import train_arguments

    with contextlib.suppress(UserError, OSError):  # reported once the ranks are connected
        return train_arguments.read_config(options).metal.relax_watchdog
    return True


def attend_displays(settings: MetalSettings, is_first_here: bool, only_look: bool) -> list[str]:
    """This Mac's lit displays that someone should know of: put to sleep if that is wanted, none if nobody cares.

    is_first_here: of this machine's ranks one does it. only_look: nothing is changed.
    """
    if settings.display == "ignore" or not is_first_here or not uses_metal():
        return []
    names = lit_displays()
    if names and settings.display == "sleep" and not only_look and sleep_displays():
        return []
    return names


def keep_wired(setting: str, model_bytes: int) -> bool:
    """Keeps what MLX holds in memory, if `wires` says so, and otherwise keeps others from it; whether it is kept."""
    if not uses_metal():
        return False
    import mlx.core as mx

    from lib.system import hardware

    if wires(setting, model_bytes, hardware.host_memory_bytes()):
        mx.set_wired_limit(int(mx.device_info()["max_recommended_working_set_size"]))
        return True
    # These wire all that there is while they generate; the server is imported by nobody but a backend.
    for name in ("mlx_lm.utils", "mlx_lm.generate", *({"mlx_lm.server"} & sys.modules.keys())):
        importlib.import_module(name).maybe_set_recommended_wired_limit = lambda: None  # type: ignore[attr-defined]
    mx.set_wired_limit(0)
    return False


def pace(config: Config, model: Any, tokens: float, passes: float, world: Any) -> Pace:
    """The pace at which a rank takes rows of so many tokens through a model; without a limit where there is no Metal.

    Ranks that share one model evaluate the same rows together: there all keep the slowest Mac's estimate.
    """
    limit_seconds, is_shared = config.metal.evaluation_seconds, world.workers.size < world.size
    if limit_seconds is None or not (is_shared or uses_metal()):
        return Pace()
    seconds = 0.0
    if uses_metal():
        from mlx_lm.utils import get_total_parameters

        seconds = expected_seconds(get_total_parameters(model), tokens, passes, matmul_rate())
    if is_shared:
        seconds = max(float(text) for text in world.gather_text(repr(seconds), "the ranks' estimates"))
    return Pace(limit_seconds, seconds, is_fixed=is_shared)


@functools.cache
def matmul_rate() -> float:
    """Multiplications and additions a second of a product of bfloat16 matrices, of MLX's default device; quickly."""
    import mlx.core as mx

    a = mx.random.normal((RATE_WIDTH, RATE_WIDTH)).astype(mx.bfloat16)
    mx.eval(a @ a)
    best = float("inf")
    for _ in range(3):
        began = time.perf_counter()
        mx.eval(a @ a)
        best = min(best, time.perf_counter() - began)
    return 2.0 * RATE_WIDTH**3 / best


def uses_metal() -> bool:
    """Whether MLX computes on a Mac's GPU."""
    if not os_commands.is_mac():
        return False
    from lib.system import hardware

    return hardware.mlx_device()[0] == "metal"
