"""mlx-lm's adapter: the arrays of a checkpoint and adapter_config.json, for `mlx_lm.load(model, adapter_path=...)`."""

from __future__ import annotations

from pathlib import Path

from lib.errors import UserError
from lib.export.fuse import write_template
from lib.export.proof import ExportOptions, Reading, mlx_logps
from lib.export.trained_run import TrainedRun
from lib.model.adapter_files import save_trained


def check(run: TrainedRun, options: ExportOptions) -> None:
    """Raises UserError where there is no stored base that the adapter could be loaded onto."""
    if run.settings.model.random_init:
        raise UserError(f"{run.folder}: model.random_init drew the base model's weights; take --to fused")
    if options.type is not None or options.dequantize:
        raise UserError("an adapter is stored as it was trained, in float32; leave --type and --dequantize out")


def write(run: TrainedRun, folder: Path, options: ExportOptions) -> None:
    """Writes adapters.safetensors and adapter_config.json."""
    save_trained(run.model(), run.settings.model, folder)
    write_template(folder, run.chat_form())


def read(run: TrainedRun, folder: Path, options: ExportOptions) -> Reading:
    return Reading("mlx_lm.load", mlx_logps(run.base, run, adapter=folder))
