"""A run's model in a form that other programs read, proven by reading it back.

    python -m lib.export runs/NAME --to mlx                     the adapter of a checkpoint, for mlx_lm
    python -m lib.export runs/NAME --to fused [--dequantize]    the whole model, for mlx_lm and transformers
    python -m lib.export runs/NAME --to peft                    the adapter, for peft and what loads its adapters

What was written is loaded by its own reader, whose log-probabilities on held-out rows have to be the run's. Only then
does the folder get its name; tandem_export.json in it holds the figures.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import os
import shutil
import typing
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import ModuleType

from lib.config import command_line
from lib.distributed.world import World
from lib.errors import UserError
from lib.export import fused, mlx_adapter, peft_adapter, proof
from lib.export.form import ExportOptions, Form, WeightType
from lib.export.trained_run import TrainedRun, open_run
from lib.system import command_errors, files
from lib.training.progress_display import RunConsole

FORMS: dict[str, ModuleType] = {"mlx": mlx_adapter, "fused": fused, "peft": peft_adapter}
FACTS = "tandem_export.json"


@command_errors.reported
def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command line; returns the exit status: 0 done, 2 wrong input, 1 the export is not the run's model."""
    options = _parse(arguments)
    say = RunConsole(World())
    form = typing.cast(Form, FORMS[options.to])
    wanted = ExportOptions(type=options.type, dequantize=options.dequantize, peft_python=options.peft_python)
    run = open_run(
        Path(options.run), options.checkpoint, options.overrides, options.rows if options.prove else 0, say.line
    )
    target = Path(options.out) if options.out else _default_target(run, options.to)
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise UserError(f"{target} exists already; give another folder by --out, or remove it")
    form.check(run, wanted, options.prove)
    if run.settings.model.attention_window is not None:
        say.labelled("warning", "model.attention_window is no part of an export: its reader attends to all tokens")
    with _whole_or_absent(target) as folder:
        with say.doing("writing"):
            form.write(run, folder, wanted)
        with say.doing(f"reading it back, by {form.READER}"):
            proven = proof.prove(form, run, folder, wanted) if options.prove else None
        facts = _facts(options.to, run, wanted, proven)
        (folder / FACTS).write_text(json.dumps(facts, indent=2) + "\n")
    say.line(f"{target}: {options.to} of {run.folder}, {run.checkpoint}", "bold")
    say.line(str(proven) if proven else "not proven, as asked for: nothing has read what was written")
    say.record({"folder": str(target), **facts})
    return 0


def _default_target(run: TrainedRun, to: str) -> Path:
    """runs/NAME/export/peft, or peft-step-40."""
    return run.folder / "export" / (to if run.checkpoint == "final" else f"{to}-{run.checkpoint.replace(' ', '-')}")


def _facts(to: str, run: TrainedRun, wanted: ExportOptions, proven: proof.Proof | None) -> dict[str, object]:
    """What tandem_export.json holds."""
    return {
        "form": to,
        "run": run.folder.resolve().name,
        "checkpoint": run.checkpoint,
        "base_model": run.settings.model.path,
        "type": wanted.type,
        "dequantized": wanted.dequantize,
        "proof": None if proven is None else dataclasses.asdict(proven),
    }


@contextlib.contextmanager
def _whole_or_absent(target: Path) -> Iterator[Path]:
    """An empty folder beside `target`, which takes that name once everything in it is on the disk.

    Raises:
        OSError: the disk is full or not writable; nothing is left of it.
    """
    unfinished = target.with_name(f".{target.name}.{os.getpid()}.unfinished")
    try:
        unfinished.mkdir(parents=True)
        yield unfinished
        for path in sorted(unfinished.rglob("*")):
            files.flush_path(path)
        files.flush_path(unfinished)
        if target.exists():
            target.rmdir()  # empty
        unfinished.rename(target)
        files.flush_path(target.parent)
    except OSError as error:
        free = shutil.disk_usage(next(path for path in unfinished.parents if path.exists())).free
        raise OSError(
            None, f"cannot be written, {free:,} bytes are free there ({error.strerror or error})", str(target)
        ) from None
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = command_line.Parser(
        prog="python -m lib.export",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("run", metavar="RUN", help="folder of a run")
    parser.add_argument("--to", choices=sorted(FORMS), required=True, help="the form")
    parser.add_argument("--out", metavar="FOLDER", help="where it goes (default: RUN/export/FORM)")
    parser.add_argument(
        "--checkpoint",
        default="final",
        metavar="WHICH",
        help="final (what the run ended with), best (by held-out loss), last, or a step (default: final)",
    )
    parser.add_argument(
        "--type", choices=typing.get_args(WeightType), help="type of the stored weights (default: the base model's)"
    )
    parser.add_argument(
        "--dequantize", action="store_true", help="store the weights of a quantised base model as plain ones"
    )
    parser.add_argument(
        "--rows", type=int, default=16, metavar="N", help="held-out sequences that the proof compares (default: 16)"
    )
    parser.add_argument(
        "--peft-python", metavar="PYTHON", help="a Python that has peft, transformers and torch (default: this one)"
    )
    parser.add_argument("--no-proof", dest="prove", action="store_false", help="write without reading it back")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="settings of the run, where files have moved")
    options = parser.parse_intermixed_args(arguments)
    if options.rows < 1:
        raise UserError(f"--rows {options.rows}: a proof needs at least one; --no-proof goes without")
    return options
