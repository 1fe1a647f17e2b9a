"""The last check before a run: all ranks add up a number over the backend that the run will use.

python -m lib.launch.sum_check        started for every rank, as a run is; exit status 1 where the sum is wrong
"""

from __future__ import annotations

import os
import sys

LIMIT_SECONDS = 10.0  # for the world to connect


def main() -> int:
    """One rank's part: adds up a number that each rank has its own of; returns the exit status."""
    from lib.system import mpi_and_blas

    launch = mpi_and_blas.launch_environment()
    mpi_and_blas.prepare()
    import mlx.core as mx

    from lib.distributed import world as distributed

    world = distributed.start(launch, timeout_seconds=LIMIT_SECONDS)
    wanted = int(os.environ["TANDEM_RANKS"])
    if world.size != wanted:
        print(f"a world of {world.size} ranks, not {wanted}")
        return 1
    total = world.all_sum(mx.array([2**world.rank % 97, 1], dtype=mx.int32), "the check's sum").tolist()
    if total != [sum(2**rank % 97 for rank in range(wanted)), wanted]:
        print(f"the sum over {wanted} ranks is {total}")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
