"""A whole file scored or answered by ranks that hold parts of one model: all work at the same rows at the same time.

What a chunk of rows comes to is what one rank would make of it (lib/evaluate/batch_inference.py), to rounding. Rank 0
keeps the journal. Between chunks of a group ranks do not synchronise: those of a pipeline work at several at a time.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import mlx.core as mx
import mlx.nn as nn

from lib.config.schema import Config
from lib.distributed.work_queue import Journal, Lines
from lib.distributed.world import World, host_names
from lib.evaluate.batch_inference import FileFigures
from lib.model import adapter_files, adapters, load
from lib.model.partition import Division, Part
from lib.system.terminal import Terminal
from lib.training import divided_world
from lib.training.checkpoint import file_sha256
from lib.training.divided_world import pipelined, sharded
from lib.training.run_facts import sharded_plan, stage_blocks

CHUNKS = 16  # of a group: between groups the ranks synchronise, and what is finished is kept

Parts = Division | tuple[int, ...]  # of every block, or each rank's blocks


def divides(settings: Config, world: World) -> bool:
    """Whether the ranks are to hold parts of one model."""
    return settings.strategy in ("sharded", "pipelined") and world.size > 1


def parts_of_model(settings: Config, world: World) -> tuple[Parts | None, World]:
    """What each rank holds of a model as strategy has it, and the world of these ranks; None: all of it.

    Raises:
        AgreedError: the model cannot be divided so.
    """
    if not divides(settings, world):
        return None, world
    if settings.strategy == "pipelined":
        blocks = stage_blocks(settings, world, host_names(world))
        return blocks, pipelined(world, blocks)
    division = sharded_plan(settings, world, host_names(world)).division
    assert division is not None
    return division, sharded(world, division)


@dataclass(frozen=True)
class DividedModel:
    """A rank's part of a model, and of its reference: a model, what the policy was before training, or nothing."""

    model: nn.Module
    reference: nn.Module | dict[str, mx.array] | None
    world: World
    digests: tuple[str, ...]  # of the files that they are made of

    @classmethod
    def load(cls, settings: Config, run: Path | None, with_reference: bool, world: World) -> DividedModel:
        """run: the folder of an adapter, or None.

        Raises:
            AgreedError: the model, the adapter or the reference cannot be read or divided.
        """
        parts, world = parts_of_model(settings, world)
        adapter = run or (Path(settings.model.adapter) if settings.model.adapter else None)
        start: dict[str, mx.array] = {}
        with world.agreeing("loading the model"):
            model = load.load(settings.model, settings.train.seed, lazy=True)
            if adapter is not None:
                adapters.make_trainable(model, settings.model, settings.train.seed)
                start = adapter_files.trainable(model)
            if run is not None:
                adapter_files.load_trained(model, run, "--run")
            digests = [load.fingerprint(settings.model, settings.train.seed)]
            digests += [file_sha256(adapter / adapter_files.ADAPTER_WEIGHTS)] if adapter else []
        world = divided_world.divided(model, parts, world, settings.metal.wired)
        model.eval()
        if not with_reference:
            return cls(model, None, world, tuple(digests))
        if settings.model.reference == "initial":
            return cls(model, _own_part(start, model, world), world, tuple(digests))
        reference = divided_world.load_reference(settings, world)
        digests.append(load.reference_fingerprint(settings.model, settings.train.seed))
        return cls(model, reference.eval(), world, tuple(digests))


def _own_part(whole: Mapping[str, mx.array], model: nn.Module, world: World) -> dict[str, mx.array]:
    """What a rank holds of arrays that are trained."""
    own = {}
    for name in adapter_files.trainable(model):
        part = world.part(name)
        own[name] = mx.contiguous(part.of(whole[name], world.rank)) if isinstance(part, Part) else whole[name]
        mx.eval(own[name])
    return own


def in_step(
    kind: str,
    key: str,
    total: int,
    out: Path,
    settings: Config,
    world: World,
    do: Callable[[Sequence[range]], list[Lines]],
) -> FileFigures | None:
    """Lines for all rows, in order, into `out`; what an earlier try finished is taken.

    Args:
        key: digest of all that the lines depend on.
        total: rows.
        do: makes lines for some chunks of rows, on all ranks at once; rank 0's are kept.

    Returns:
        On rank 0, the figures for people and machines; elsewhere nothing.

    Raises:
        AgreedError: a row cannot be read, or a disk written, on any rank.
    """
    size, say, began = settings.evaluate.batch_size, Terminal(silent=world.rank != 0), time.perf_counter()
    chunks, journal = -(-total // size), None
    with world.agreeing(f"opening {out}"):
        if world.rank == 0:
            journal = Journal(out, key, chunks)
    left: list[int] = json.loads(world.broadcast_text(json.dumps(journal.missing if journal else [])))
    if len(left) < chunks:
        say.line(f"{chunks - len(left):,} of {chunks:,} chunks are there already")
    with say.counting(kind, total) as progress:
        for start in range(0, len(left), CHUNKS):
            group = left[start : start + CHUNKS]
            made = do([range(chunk * size, min((chunk + 1) * size, total)) for chunk in group])
            with world.agreeing("keeping what is finished"):
                if journal is not None:
                    for chunk, lines in zip(group, made, strict=True):
                        journal.add(chunk, lines)
            progress(min((chunks - len(left) + start + len(group)) * size, total))
    with world.agreeing(f"writing {out}, for which the rows are kept"):
        if journal is not None:
            journal.finish(out)
    if world.rank:
        return None
    seconds, rows = time.perf_counter() - began, total - min((chunks - len(left)) * size, total)
    say.line(f"{out}: {total:,} rows in {seconds:.1f} s ({rows / seconds:.1f} rows/s)")
    by_rank = {"all together": len(left)}
    return FileFigures(rows=total, scored=rows, seconds=seconds, rows_per_second=rows / seconds, chunks_by_rank=by_rank)
