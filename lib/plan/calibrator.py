"""A calibration of this machine, and whether one is still fresh."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path

from lib.errors import UserError
from lib.plan.calibration import ROOT


def time_now() -> str:
    """For `measured_at`: ISO 8601 with its zone."""
    return datetime.now(UTC).isoformat(timespec="seconds")


def is_fresh(
    measured_at: str | None, made_with: Mapping[str, str], versions: Mapping[str, str], max_age_days: float
) -> bool:
    """Whether a measurement was made with these versions, at most so long ago."""
    if measured_at is None or dict(made_with) != dict(versions):
        return False
    try:
        age = datetime.now(UTC) - datetime.fromisoformat(measured_at)
    except (ValueError, TypeError):  # not a time, or one without its zone
        return False
    return -1 < age.total_seconds() < max_age_days * 86_400


class HardwareCalibrator:
    """Measures this machine.

    hardware = HardwareCalibrator().calibrate()
    hardware["device_name"], hardware["optimal_batch_size"], hardware["gflops"]
    """

    def __init__(self, config: Path | str | None = None, overrides: Sequence[str] = (), quick: bool = True) -> None:
        """config: whose model and data; by default the quickstart's."""
        self.folder = ROOT if config is None else Path.cwd()  # where the configuration's paths start
        self.arguments = [*(["--config", str(config)] if config else []), *(["--quick"] if quick else [])]
        self.arguments += overrides

    def calibrate(self) -> dict[str, object]:
        """Runs benchmarks/calibrate.py, which measures what is stale and keeps it in calibration/HOST.json.

        Returns:
            Its last line: device_name, device ("metal", "cuda" or "cpu"), optimal_batch_size (pairs a
            micro-batch), gflops, pairs_per_second, gpu_cores, memory_bytes, file, and more.

        Raises:
            UserError: the configuration or model cannot be used, or too few measurements succeeded.
        """
        script = ROOT / "benchmarks" / "calibrate.py"
        done = subprocess.run(
            [sys.executable, str(script), *self.arguments],
            cwd=self.folder,
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode:
            lines = done.stderr.strip().splitlines() or [f"benchmarks/calibrate.py ended with status {done.returncode}"]
            raise UserError(lines[-1].removeprefix("error: "))
        hardware: dict[str, object] = json.loads(done.stdout.strip().splitlines()[-1])
        return hardware
