"""Trainings on the ranks of `mpirun -n N pytest`, each of which runs these lines."""

import contextlib
import json
import os
import socket
from pathlib import Path
from typing import Any

import pytest

import train as script
from lib.config import load
from lib.distributed.world import World
from tests import tiny


def train(world: World, folder: Path, words: list[str], name: str, resume: bool = False) -> Path:
    """A run in this process, finished on all ranks; with a world of one each rank trains by itself."""
    script.train(load.load(None, [*words, f"run.name={name}"]), world, resume=resume, dry_run=False)
    world.gather_text("finished")
    return folder / "runs" / name


two = pytest.mark.mpi(min_size=2, max_size=2)  # what a third rank changes is seen without it


def ring_of(folder: Path, ranks: int) -> list[dict[str, str]]:
    """The environment of each rank of MLX's ring on this machine, as a launcher makes it."""
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(ranks)]
        addresses = [[f"127.0.0.1:{one.getsockname()[1]}"] for one in sockets]
    (folder / "hosts.json").write_text(json.dumps(addresses))
    known = {name: value for name, value in os.environ.items() if "OMPI" not in name and "PMIX" not in name}
    return [known | {"MLX_RANK": str(rank), "MLX_HOSTFILE": str(folder / "hosts.json")} for rank in range(ranks)]


def settings(world: World, folder: Path, *words: str, shape: dict[str, Any] | None = None, **changes: Any) -> list[str]:
    """The same words on every rank; rank 0 writes the files, before anyone reads them. shape: of the model."""
    mine: list[str] = []
    if world.rank == 0:
        mine = tiny.settings(folder, **changes)
        tiny.model_folder(folder / "model", **(shape or {}))
    return [*world.broadcast_value(mine), *words]
