"""Whatever ranks do together, and however it ends, no rank is left waiting: a few random runs; benchmarks/fuzz.py plays many."""

from pathlib import Path

import pytest

from lib.distributed.world import World
from tests.fuzzing import make_case, play


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("seed", range(4))
def test_no_rank_is_left_waiting(world: World, folder: Path, seed: int) -> None:
    play(make_case(seed, world.size), world, folder)
