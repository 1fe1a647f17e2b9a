"""The settings of what is particular to Macs."""

from __future__ import annotations

from typing import Literal

from lib.config.section import PositiveFloat, Section


class MetalSettings(Section):
    """What is particular to Macs; elsewhere nothing here has an effect."""

    display: Literal["advise", "sleep", "ignore"] = "advise"
    """A display that is on, for whose sake macOS may end GPU work (mlx#3267): say so at the start, put it to sleep then
    (pmset displaysleepnow), or leave it."""
    relax_watchdog: bool = True
    """Set AGX_RELAX_CDM_CTXSTORE_TIMEOUT=1 before MLX comes in: macOS then waits longer for the GPU, and a display may
    stutter. What the environment says comes first."""
    evaluation_seconds: PositiveFloat | None = 2.0
    """Most seconds of one evaluation: a micro-batch that would take longer is evaluated in pieces, with the same
    result; null for never."""
    wired: Literal["auto", "always", "never"] = "auto"
    """Keep in memory what MLX holds, so that macOS compresses none of it; kernel panics were reported with it
    (mlx#3186). `auto`: where the model takes half of the memory or more."""
