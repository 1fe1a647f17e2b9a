"""train.py's command line: which configuration, which run, and what the words overrule."""

from __future__ import annotations

import argparse
import time
from pathlib import Path

from lib.config import command_line, help, load, read_file
from lib.config.settings import Config
from lib.errors import UserError

QUICKSTART = "configs/quickstart.yaml"


def parse(arguments: list[str] | None, description: str | None) -> argparse.Namespace:
    """The command's words; raises UserError for an option that does not exist."""
    parser = command_line.Parser(prog="train.py", description=description, epilog=help.help_text())
    parser.add_argument("--config", metavar="FILE", help=f"settings as YAML (default: {QUICKSTART})")
    parser.add_argument("--resume", metavar="RUN", help="folder of a run to go on with")
    parser.add_argument(
        "--dry-run", action="store_true", help="print the plan and what would be trained; write nothing"
    )
    parser.add_argument("--measure", action="store_true", help="a dry run that tries three steps, to time them")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="settings that overrule the file")
    options = parser.parse_intermixed_args(arguments)
    options.dry_run = options.dry_run or options.measure
    if options.resume and options.config:
        raise UserError("--resume takes the run's own config.yaml; leave --config out (key=value words may follow)")
    return options


def read_config(options: argparse.Namespace) -> Config:
    """The configuration that the command line names, with a name for the run; raises UserError."""
    if options.resume is None:
        path = Path(options.config or QUICKSTART)
        config = load.load(path, options.overrides)
        run = {"name": config.run.name or f"{path.stem}-{time.strftime('%Y%m%d-%H%M%S')}"}
        return config.model_copy(update={"run": config.run.model_copy(update=run)})
    folder = Path(options.resume)
    path = folder / "config.yaml"
    if not path.is_file():
        raise UserError(f"--resume {folder}: no run there (it has no config.yaml); runs are folders in run.dir")
    if (folder / read_file.MANIFEST).exists():  # a run in it would write over the checkpoint
        above = folder.resolve().parents[1]
        raise UserError(f"--resume {folder}: a checkpoint of run {above}; --resume {above} goes on from its newest")
    config = load.resume(path, options.overrides)
    if config.strategy == "auto":  # decided once: what a link or a host is like today changes nothing
        config = load.with_strategy(config, decided(path.with_name("plan.json")))
    # A link to a run: its name is where that leads to. A link above it stays: other hosts may have a folder there.
    if folder.name in ("", "..") or folder.is_symlink():
        folder = folder.resolve()
    is_dir = Path(config.run.dir).resolve() == folder.parent.resolve()
    same = {"run.name": config.run.name == folder.name, "run.dir": is_dir}
    for word in options.overrides:
        if not same.get(word.partition("=")[0], True):
            raise UserError(f"{word}: --resume goes on in {folder}; copy the folder, then --resume the copy")
    run = {"name": folder.name, "dir": str(folder.parent)}
    return config.model_copy(update={"run": config.run.model_copy(update=run)})


def decided(plan: Path) -> str:
    """The strategy of a run's first plan."""
    try:
        return str(read_file.read_object(plan, "the run's")["strategy"])
    except (OSError, UserError, KeyError):
        return "auto"
