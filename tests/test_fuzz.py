"""Whatever ranks do together, and however it ends, no rank is left waiting: a few random runs; benchmarks/fuzz.py plays many."""

from pathlib import Path

import pytest

from lib.sync import World
from tests.fuzzing import full_disk, make_case, play
from tests.test_world import folder, world  # noqa: F401


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("seed", range(6))
def test_no_rank_is_left_waiting(world: World, folder: Path, seed: int) -> None:  # noqa: F811
    play(make_case(seed, world.size), world, folder)


def test_a_rank_that_fails_by_itself_ends_all() -> None:
    """Its log finds no room: the others, who wait for it in a collective, are ended by the launcher."""
    told = full_disk(0, 2)
    assert "status 2" in told and "File too large" in told, told
