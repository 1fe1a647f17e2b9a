"""mlx-lm's adapter: the arrays of a checkpoint and adapter_config.json, for `mlx_lm.load(model, adapter_path=...)`."""

from __future__ import annotations

from pathlib import Path

import mlx.nn as nn

from lib.errors import UserError
from lib.export import mlx_reader
from lib.export.form import ExportOptions, Reading
from lib.export.trained_run import TrainedRun
from lib.model.adapter_files import save_trained

READER = "mlx_lm.load"


def check(run: TrainedRun, options: ExportOptions, prove: bool) -> None:
    """Raises UserError where there is no stored base that the adapter could be loaded onto."""
    require_stored_base(run)
    if options.type is not None or options.dequantize:
        raise UserError("--to mlx keeps the adapter as it was trained, in float32; leave --type and --dequantize out")


def require_stored_base(run: TrainedRun) -> None:
    """Raises:
    UserError: the run drew its base model's weights, so that nobody has them.
    """
    if run.settings.model.random_init:
        raise UserError(
            f"{run.folder}: model.random_init drew the base model's weights, an adapter alone is of no use; "
            "take --to fused"
        )


def write(run: TrainedRun, folder: Path, options: ExportOptions) -> None:
    """Writes adapters.safetensors and adapter_config.json; ranks that differ are padded, since mlx-lm knows one."""
    save_trained(run.model(), run.settings.model, folder)


def stored_model(run: TrainedRun, options: ExportOptions) -> nn.Module | None:
    return None


def read_logps(run: TrainedRun, folder: Path, options: ExportOptions) -> Reading:
    return Reading(mlx_reader.logps(run.base, run.rows, run.settings.model.trust_remote_code, adapter=folder))
