"""A run's model in a form that other programs read, proven by reading it back.

    python -m lib.export runs/NAME --to mlx                     the adapter of a checkpoint, for mlx_lm
    python -m lib.export runs/NAME --to fused [--dequantize]    the whole model, for mlx_lm and transformers
    python -m lib.export runs/NAME --to peft                    the adapter, for peft and what loads its adapters
    python -m lib.export runs/NAME --to gguf [--type q8_0]      the whole model in one file, for llama.cpp
    python -m lib.export runs/NAME --to ollama                  the same with a Modelfile, for `ollama create`
    python -m lib.export runs/NAME --to FORM --push OWNER/NAME  any of them, and to the Hugging Face hub
    python -m lib.export FOLDER --push OWNER/NAME               an export that was written before

The log-probabilities of what was written, on held-out rows, have to be the run's. Only then does the folder get its
name; tandem_export.json in it holds the figures.
"""

from __future__ import annotations

import argparse
import json
import shutil
import typing
from collections.abc import Sequence
from pathlib import Path

from lib.config import command_line
from lib.errors import UserError
from lib.export import card, fuse, gguf, hub_upload, ollama, peft
from lib.export.trained_run import ExportOptions, WeightType, open_run, prove
from lib.system import files, mpi_and_blas
from lib.system.terminal import Terminal

FORMS = {  # what checks, writes and reads one
    "mlx": (peft.check_mlx, peft.write_mlx, peft.read_mlx),
    "fused": (fuse.check, fuse.write, fuse.read),
    "peft": (peft.check, peft.write, peft.read),
    "gguf": (gguf.check, gguf.write, gguf.read),
    "ollama": (ollama.check, ollama.write, gguf.read),
}
FACTS = "tandem_export.json"


@mpi_and_blas.reported
def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command line; returns the exit status: 0 done, 2 wrong input, 1 the export is not the run's model."""
    options = _parse(arguments)
    terminal = Terminal()
    is_export = (Path(options.run) / FACTS).is_file()
    if is_export and (options.push is None or options.to is not None):
        raise UserError(f"{options.run} is an export; --push OWNER/NAME sends it as it is, --to takes a run")
    folder = Path(options.run) if is_export else _export(options, terminal)
    if options.push is not None and options.dry_run:
        for path in sorted(path for path in folder.rglob("*") if path.is_file()):
            terminal.line(f"{path.relative_to(folder)}  {path.stat().st_size:,} bytes")
        terminal.line(f"nothing was sent to {options.push}: --dry-run")
    elif options.push is not None:
        terminal.line(f"{hub_upload.push(folder, options.push, options.private)}: complete", "bold")
    return 0


def _export(options: argparse.Namespace, terminal: Terminal) -> Path:
    """Writes the export and returns its folder, which is whole or absent."""
    to = options.to or "mlx"
    (check, write, read), wanted = FORMS[to], ExportOptions(options.type, options.dequantize)
    rows = options.rows * options.prove
    run = open_run(Path(options.run), options.checkpoint, options.overrides, rows, terminal.line)
    name = to if run.checkpoint == "final" else f"{to}-{run.checkpoint.replace(' ', '-')}"
    target = Path(options.out) if options.out else run.folder / "export" / name
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise UserError(f"{target} exists already; give another folder by --out, or remove it")
    check(run, wanted)
    if run.settings.model.attention_window is not None:
        terminal.labelled("warning", "model.attention_window is no part of an export: its reader attends to all tokens")
    unfinished, figures, proven = target.with_name(f".{target.name}.unfinished"), None, "not proven (--no-proof)"
    shutil.rmtree(unfinished, ignore_errors=True)  # of a process that was killed
    try:
        unfinished.mkdir(parents=True)
        with terminal.doing("writing"):
            write(run, unfinished, wanted)
        if options.prove:
            with terminal.doing("reading it back"):
                figures, proven = prove(run, read(run, unfinished, wanted))
        card.write(run, unfinished, to, proven)
        base = card.base_of(run.settings.model.path)[0]
        facts = {"form": to, "run": run.folder.resolve().name, "checkpoint": run.checkpoint, "base_model": base}
        facts |= {"type": wanted.type, "dequantized": wanted.dequantize, "proof": figures}
        (unfinished / FACTS).write_text(json.dumps(facts, indent=2) + "\n", encoding="utf-8")
        for path in [*sorted(unfinished.rglob("*")), target.parent]:
            files.flush_path(path)
        unfinished.rename(target)
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)
    terminal.line(f"{target}: {to} of {run.folder}, {run.checkpoint}", "bold")
    terminal.line(proven)
    terminal.record({"folder": str(target), **facts})
    return target


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = command_line.Parser(prog="python -m lib.export", description=__doc__)
    add = parser.add_argument
    add("run", metavar="RUN", help="folder of a run; with --push also of an export")
    add("--to", choices=sorted(FORMS), help="the form (default, with --push: mlx)")
    add("--out", metavar="FOLDER", help="where it goes (default: RUN/export/FORM)")
    add("--checkpoint", default="final", metavar="WHICH", help="final, best (held-out loss), last, or a step")
    add("--type", choices=typing.get_args(WeightType), help="of the stored weights (default: the base model's)")
    add("--dequantize", action="store_true", help="store the weights of a quantised base model as plain ones")
    add("--rows", type=int, default=16, metavar="N", help="held-out sequences that the proof compares (default: 16)")
    add("--no-proof", dest="prove", action="store_false", help="write without reading it back")
    add("--push", metavar="OWNER/NAME", help="send the export to the Hugging Face hub, with its card")
    add("--private", action="store_true", help="with --push: only for those whom the owner lets in")
    add("--dry-run", action="store_true", help="with --push: list what would be sent, send nothing")
    add("overrides", nargs="*", default=[], metavar="key=value", help="settings of the run, where files have moved")
    options = parser.parse_intermixed_args(arguments)
    if options.rows < 1:
        raise UserError(f"--rows {options.rows}: a proof needs at least one; --no-proof goes without")
    if options.push is None and (options.private or options.dry_run or options.to is None):
        raise UserError(f"--to: give the form, one of {', '.join(sorted(FORMS))}, or --push OWNER/NAME")
    if options.push is not None and not card.HUB_NAME.fullmatch(options.push):
        raise UserError(f"--push {options.push}: give OWNER/NAME, as in --push ann/model")
    return options
