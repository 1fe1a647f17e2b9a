"""What a run will want of every host, read off its configuration: files, models, room on disk, ports."""

from __future__ import annotations

import contextlib
import glob
from dataclasses import dataclass
from pathlib import Path

from lib.config import train_arguments
from lib.data.sources import weights_of
from lib.launch.job import ROOT, Job
from lib.system import files


@dataclass(frozen=True)
class Needs:
    """What the run will want of every host."""

    files: tuple[str, ...] = ()  # models and data, to be the same everywhere
    models: tuple[str, ...] = ()  # by hub name
    run_dir: str | None = None
    calibration_dir: str | None = None
    require_calibration: bool = False
    method: str = "lora"
    strategy: str = "auto"
    checkpoints: int = 0


def needs_of(job: Job) -> Needs:
    """What the run's configuration asks for; of a command that is not train.py nothing is known.

    Raises:
        UserError: the configuration is wrong.
    """
    if Path(job.command[0]).name != "train.py":
        return Needs()
    with contextlib.chdir(ROOT):
        options = train_arguments.parse(list(job.command[1:]), None)
        config = train_arguments.read_config(options)
    own_file = None if options.resume else options.config or train_arguments.QUICKSTART
    local_sources = [name for name in weights_of(config.data.train) if not glob.has_magic(name) and "://" not in name]
    paths = [own_file, *local_sources, config.data.valid, config.evaluate.answers, config.model.adapter]
    models = [config.model.path, *([] if config.model.reference == "initial" else [config.model.reference])]
    local = [
        path for path in models if (ROOT / path).exists() or path.startswith((".", "/", "~")) or path.count("/") > 1
    ]
    return Needs(
        files=tuple(dict.fromkeys([*(path for path in paths if path), *local])),
        models=tuple(path for path in models if path not in local),
        run_dir=config.run.dir,
        calibration_dir=config.plan.calibration_dir,
        require_calibration=config.plan.require_calibration,
        method=config.model.method,
        strategy=config.strategy,
        checkpoints=config.checkpoint.keep + 1,
    )


def model_bytes(needs: Needs) -> int:
    """The size of the model's weights, where this machine has them; else 0."""
    folders = [ROOT / Path(path).expanduser() for path in needs.files]
    weights = (file for folder in folders if folder.is_dir() for file in folder.glob("*.safetensors"))
    return sum(file.stat().st_size for file in weights if not files.is_litter(file.name))
