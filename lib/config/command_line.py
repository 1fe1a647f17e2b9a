"""Parsers of command lines whose error messages are one line; train.py's, and the configuration that it names."""

from __future__ import annotations

import argparse
import difflib
import time
from pathlib import Path
from typing import Any, NoReturn

import yaml

from lib.config import help, load, read_file, unknown_names
from lib.config.settings import Config
from lib.errors import UserError

QUICKSTART = "configs/quickstart.yaml"
UNKNOWN_OPTIONS = "unrecognized arguments: "  # what argparse writes before them


class Parser(argparse.ArgumentParser):
    """A parser whose error messages are one line, with a hint, raised as UserError."""

    settings_place: str = ""  # where key=value words go, if not beside the options

    def __init__(self, **options: Any):
        formatter = argparse.RawDescriptionHelpFormatter
        super().__init__(**{"formatter_class": formatter, "allow_abbrev": False, **options})

    def error(self, message: str) -> NoReturn:
        hint, words = "--help lists the options", message.removeprefix(UNKNOWN_OPTIONS).split()
        unknown = [word.partition("=")[0] for word in words if word.startswith("-")]
        if message.startswith(UNKNOWN_OPTIONS) and unknown:
            options = [name for name in self._option_string_actions if name.startswith("--")]
            if close := difflib.get_close_matches(unknown[0], options, n=1, cutoff=0.75):
                hint = f"did you mean {close[0]}?"
            elif self.settings_place or any(action.dest == "overrides" for action in self._actions):
                names = [name.lstrip("-").replace("-", "_") for name in unknown]
                hints = [unknown_names.hint_for_setting(name) for name in names]
                meant = "".join(said for said in hints if "--help" not in said) or hints[0]
                hint = f"settings are words without dashes, as train.beta=0.2{self.settings_place}{meant}"
        raise UserError(f"{message}; {hint}")


# ---- train.py


def train_options(arguments: list[str] | None, description: str | None) -> argparse.Namespace:
    """The command's words; raises UserError for an option that does not exist."""
    parser = Parser(prog="train.py", description=description, epilog=help.help_text())
    add = parser.add_argument
    add("--config", metavar="FILE", help=f"settings as YAML (default: {QUICKSTART})")
    add("--resume", metavar="RUN", help="folder of a run to go on with")
    add("--dry-run", action="store_true", help="print the plan and what would be trained; write nothing")
    add("--measure", action="store_true", help="a dry run that tries three steps, to time them")
    add("overrides", nargs="*", metavar="key=value", help="settings that overrule the file")
    options = parser.parse_intermixed_args(arguments)
    options.dry_run = options.dry_run or options.measure
    if options.resume and options.config:
        raise UserError("--resume takes the run's own config.yaml; leave --config out (key=value words may follow)")
    return options


def train_config(options: argparse.Namespace, warns: bool = False) -> Config:
    """The configuration that the command line names, with a name for the run; raises UserError."""
    if options.resume is None:
        if warns and (warning := quickstart_rest(options)):
            print(warning, flush=True)
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


def quickstart_rest(options: argparse.Namespace) -> str:
    """A warning where the user's model or data are trained by the rest of the quickstart's settings, else nothing."""
    given = {word.partition("=")[0] for word in options.overrides}
    if options.config or given.isdisjoint({"model.path", "data.train"}):
        return ""
    tree = yaml.safe_load(Path(QUICKSTART).read_text(encoding="utf-8"))
    settings = {f"{section}.{name}": value for section in tree for name, value in tree[section].items()}
    rest = ", ".join(f"{key}={value}" for key, value in settings.items() if key not in given)
    return f"warning: without --config the rest is the quickstart's: {rest}; yours: --config configs/one-machine.yaml"


def decided(plan: Path) -> str:
    """The strategy of a run's first plan."""
    try:
        return read_file.read_object(plan, "the run's")["strategy"]
    except (OSError, UserError, KeyError):
        return "auto"
