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
    """The command's words.

    Raises:
        UserError: an option that does not exist.
    """

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
    """The configuration that the command line names, with a name for the run.

    Raises:
        UserError: a wrong key or value, a run that cannot be resumed, or a change that a resumed run may not make.
    """
    if options.resume is None:
        path = Path(options.config or QUICKSTART)
        config = load.load(path, options.overrides)
        run = {"name": config.run.name or f"{path.stem}-{time.strftime('%Y%m%d-%H%M%S')}"}
    else:
        path = Path(options.resume) / "config.yaml"
        if Path(options.resume).name == path.name and Path(options.resume).is_file():
            raise UserError(f"--resume {options.resume}: a file; give the run's folder, --resume {path.parent.parent}")
        if not path.is_file():
            raise UserError(
                f"--resume {options.resume}: no run there (it has no config.yaml); runs are folders in run.dir"
            )
        _require_run(Path(options.resume))
        config = load.resume(path, options.overrides)
        if config.strategy == "auto":  # decided once: what a link or a host is like today changes nothing
            config = load.with_strategy(config, decided(path.with_name("plan.json")))
        folder = Path(options.resume)
        # A link to a run: its name is where that leads to. A link above it stays: other hosts may have a folder there.
        if folder.name in ("", "..") or folder.is_symlink():
            folder = folder.resolve()
        run = {"name": folder.name, "dir": str(folder.parent)}
        _require_same_folder(folder, config, options.overrides)
    return config.model_copy(update={"run": config.run.model_copy(update=run)})


def _require_run(folder: Path) -> None:
    """Refuses a checkpoint's folder: a run in it would write over the checkpoint."""
    if not (folder / read_file.MANIFEST).exists():
        return
    above = [place.parents[1] for place in (folder.absolute(), folder.resolve()) if len(place.parents) > 1]
    run = next((place for place in above if (place / "config.yaml").is_file()), None)
    if run is None:
        raise UserError(f"--resume {folder}: a checkpoint, not a run; give the folder of its run")
    raise UserError(f"--resume {folder}: a checkpoint of run {run}; --resume {run} goes on from its newest")


def _require_same_folder(folder: Path, config: Config, words: list[str]) -> None:
    """Refuses words that would put a resumed run elsewhere; its config.yaml may say so of one that was moved."""
    given = {word.partition("=")[0]: word for word in words}
    same = {
        "run.name": config.run.name == folder.name,
        "run.dir": Path(config.run.dir).resolve() == folder.parent.resolve(),
    }
    for key, is_same in same.items():
        if key in given and not is_same:
            raise UserError(f"{given[key]}: --resume goes on in {folder}; copy the folder, then --resume the copy")


def decided(plan: Path) -> str:
    """The strategy of a run's first plan."""
    try:
        return str(read_file.read_object(plan, "the run's")["strategy"])
    except (OSError, UserError, KeyError):
        return "auto"
