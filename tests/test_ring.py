"""MLX's ring as shipped: its ranks start in any order, and a lost one ends the others."""

import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from tests.ranks import ring_of
from tests.tiny import ROOT

RANK = """
import sys, time
from lib.system import mpi_and_blas
launch = mpi_and_blas.launch_environment()
mpi_and_blas.prepare()
import mlx.core as mx
from lib.distributed.world import start
world = start(launch)
assert world.all_sum(mx.array([1.0, world.rank]), "a sum").tolist() == [3.0, 3.0]
assert world.gather_text(f"ä{world.rank}") == ["ä0", "ä1", "ä2"]
assert world.gather_text("x" * (world.rank + 1)) == ["x", "xx", "xxx"]
assert world.broadcast_text("y" * 3000 * (world.rank == 0)) == "y" * 3000
assert [parts[0].item() for parts in world.gather_arrays([mx.array(world.rank)], "arrays")] == [0, 1, 2]
print("met", flush=True)
while "lost" in sys.argv:
    time.sleep(0.01)
    world.all_sum(mx.array(1.0), "a sum")
"""


def start_ring(folder: Path, order: list[int], *words: str, pause: float = 0.0) -> dict[int, subprocess.Popen[str]]:
    processes, environments = {}, ring_of(folder, len(order))
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, "cwd": ROOT}
    for rank in order:
        processes[rank] = subprocess.Popen([sys.executable, "-c", RANK, *words], env=environments[rank], **pipes)
        time.sleep(pause)
    return processes


@pytest.mark.parametrize("order", [[0, 1, 2], [2, 0, 1]])
def test_ranks_of_a_ring_exchange_whatever_order_they_start_in(tmp_path, order: list[int]) -> None:
    for process in start_ring(tmp_path, order, pause=0.5).values():
        out, error = process.communicate(timeout=120)
        assert (process.returncode, out) == (0, "met\n"), error


def test_a_killed_rank_ends_the_others(tmp_path) -> None:
    ring = start_ring(tmp_path, [0, 1, 2], "lost")
    for process in ring.values():
        assert process.stdout is not None and process.stdout.readline() == "met\n"
    ring[1].kill()
    for rank in (0, 2):
        _, error = ring[rank].communicate(timeout=120)
        assert ring[rank].returncode == 1 and "[ring]" in error, error
    ring[1].communicate()
