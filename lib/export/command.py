"""A run's model in a form that other programs read, proven by reading it back.

    python -m lib.export runs/NAME --to mlx                     the adapter of a checkpoint, for mlx_lm
    python -m lib.export runs/NAME --to fused [--dequantize]    the whole model, for mlx_lm and transformers
    python -m lib.export runs/NAME --to peft                    the adapter, for peft and what loads its adapters
    python -m lib.export runs/NAME --to gguf [--type q8_0]      the whole model in one file, for llama.cpp
    python -m lib.export runs/NAME --to ollama                  the same with a Modelfile, for `ollama create`
    python -m lib.export runs/NAME --to FORM --push OWNER/NAME  any of them, and to the Hugging Face hub
    python -m lib.export FOLDER --push OWNER/NAME               an export that was written before

What was written is loaded by its own reader, whose log-probabilities on held-out rows have to be the run's. Only then
does the folder get its name; tandem_export.json in it holds the figures.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import fcntl
import hashlib
import json
import os
import shutil
import typing
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import ModuleType

from lib.config import command_line, read_file
from lib.distributed.world import World
from lib.errors import UserError
from lib.export import card, fused, gguf_model, mlx_adapter, ollama, peft_adapter, proof, push
from lib.export.form import ExportOptions, Form, WeightType
from lib.export.push_checks import files_to_send
from lib.export.trained_run import TrainedRun, open_run
from lib.system import command_errors, files
from lib.system.model_folder import ADAPTER_WEIGHTS
from lib.training.progress_display import RunConsole

FORMS: dict[str, ModuleType] = {
    "mlx": mlx_adapter,
    "fused": fused,
    "peft": peft_adapter,
    "gguf": gguf_model,
    "ollama": ollama,
}
FACTS = "tandem_export.json"


@command_errors.reported
def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command line; returns the exit status: 0 done, 2 wrong input, 1 the export is not the run's model."""
    options = _parse(arguments)
    say = RunConsole(World())
    target = Path(options.run) if _is_export(Path(options.run)) else _export(options, say)
    if options.push is not None and options.dry_run:
        for line in push.describe(files_to_send(target)):
            say.line(line)
        say.line(f"nothing was sent to {options.push}: --dry-run")
    elif options.push is not None:
        say.line(f"{push.push(target, options.push, options.private, say)}: complete", "bold")
    return 0


def _export(options: argparse.Namespace, say: RunConsole) -> Path:
    """Writes the export and returns its folder; one that was written before, to be pushed, stays."""
    form = typing.cast(Form, FORMS[options.to])
    wanted = ExportOptions(type=options.type, dequantize=options.dequantize, peft_python=options.peft_python)
    run = open_run(
        Path(options.run), options.checkpoint, options.overrides, options.rows if options.prove else 0, say.line
    )
    target = Path(options.out) if options.out else _default_target(run, options.to)
    if not options.out and target.parent.is_symlink():
        raise UserError(f"{target.parent} is a link, perhaps to a folder of yours; name the export's folder by --out")
    facts = _facts(options.to, run, wanted)
    if options.push is not None and _is_export(target) and _stored_facts(target) == facts:
        if options.prove and _stored(target).get("proof") is None:
            raise UserError(f"{target} was written with --no-proof; remove it, or send it as it is by --no-proof")
        say.line(f"{target}: written before")
        return target
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
        card.write(run, folder, options.to, None if proven is None else str(proven))
        facts["proof"] = None if proven is None else dataclasses.asdict(proven)
        (folder / FACTS).write_text(json.dumps(facts, indent=2) + "\n", encoding="utf-8")
    say.line(f"{target}: {options.to} of {run.folder}, {run.checkpoint}", "bold")
    say.line(str(proven) if proven else "not proven, as asked for: nothing has read what was written")
    say.record({"folder": str(target), **facts})
    return target


def _is_export(folder: Path) -> bool:
    return (folder / FACTS).is_file()


def _stored_facts(folder: Path) -> dict[str, object]:
    """What tandem_export.json holds, without the proof."""
    return {name: value for name, value in _stored(folder).items() if name != "proof"}


def _stored(folder: Path) -> dict[str, object]:
    return read_file.read_object(folder / FACTS, "the export's")


def _default_target(run: TrainedRun, to: str) -> Path:
    """runs/NAME/export/peft, or peft-step-40."""
    return run.folder / "export" / (to if run.checkpoint == "final" else f"{to}-{run.checkpoint.replace(' ', '-')}")


def _facts(to: str, run: TrainedRun, wanted: ExportOptions) -> dict[str, object]:
    """What tandem_export.json holds, besides the proof."""
    return {
        "form": to,
        "run": run.folder.resolve().name,
        "checkpoint": run.checkpoint,
        "base_model": card.base_of(run.settings.model.path)[0],
        "type": wanted.type,
        "dequantized": wanted.dequantize,
        "weights_sha256": _sha256(run.weights / ADAPTER_WEIGHTS),
    }


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


@contextlib.contextmanager
def _whole_or_absent(target: Path) -> Iterator[Path]:
    """An empty folder beside `target`, which takes that name once everything in it is on the disk.

    What a killed process left of one goes first.

    Raises:
        OSError: the disk is full or not writable; nothing is left of it.
        UserError: another process is writing it.
    """
    unfinished = target.with_name(f".{target.name}.unfinished")
    if unfinished.is_symlink():  # of whoever the run's folder is from, perhaps to a folder of yours
        unfinished.unlink()
    unfinished.mkdir(parents=True, exist_ok=True)
    lock = os.open(unfinished, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(lock)
        raise UserError(
            f"{target}: another process is writing it; wait for it, or give another folder by --out"
        ) from None
    try:
        for left in unfinished.iterdir():
            shutil.rmtree(left) if left.is_dir() and not left.is_symlink() else left.unlink()
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
        os.close(lock)


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = command_line.Parser(
        prog="python -m lib.export",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("run", metavar="RUN", help="folder of a run; with --push also of an export")
    parser.add_argument("--to", choices=sorted(FORMS), help="the form (default, with --push: mlx)")
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
    parser.add_argument("--push", metavar="OWNER/NAME", help="send the export to the Hugging Face hub, with its card")
    parser.add_argument("--private", action="store_true", help="with --push: only for those whom the owner lets in")
    parser.add_argument("--dry-run", action="store_true", help="with --push: list what would be sent, send nothing")
    parser.add_argument(
        "overrides", nargs="*", default=[], metavar="key=value", help="settings of the run, where files have moved"
    )
    options = parser.parse_intermixed_args(arguments)
    if options.rows < 1:
        raise UserError(f"--rows {options.rows}: a proof needs at least one; --no-proof goes without")
    if options.push is None and (options.private or options.dry_run):
        raise UserError(f"--{'private' if options.private else 'dry-run'} goes with --push OWNER/NAME")
    if options.push is not None:
        push.require_name(options.push)
    is_export = _is_export(Path(options.run))
    if is_export and (options.push is None or options.to is not None):
        raise UserError(f"{options.run} is an export; --push OWNER/NAME sends it as it is, --to takes a run")
    if not is_export and options.to is None:
        if options.push is None:
            raise UserError(f"--to: give the form, one of {', '.join(sorted(FORMS))}")
        options.to = "mlx"
    return options
