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
    require_stored_base(run)
    if options.type is not None or options.dequantize:
        raise UserError("--to mlx keeps the adapter as it was trained, in float32; leave --type and --dequantize out")


def require_stored_base(run: TrainedRun) -> None:
    """Raises UserError where the run drew its base model's weights, so that no file has them."""
    if run.settings.model.random_init:
        raise UserError(
            f"{run.folder}: model.random_init drew the base model's weights, an adapter alone is of no use; "
            "take --to fused"
        )


def write(run: TrainedRun, folder: Path, options: ExportOptions) -> None:
    """Writes adapters.safetensors and adapter_config.json; ranks that differ are padded, since mlx-lm knows one."""
    save_trained(run.model(), run.settings.model, folder)
    if (chat := run.chat_form()) is not None:
        write_template(folder, chat)


def read(run: TrainedRun, folder: Path, options: ExportOptions) -> Reading:
    return Reading("mlx_lm.load", mlx_logps(run.base, run, adapter=folder))
