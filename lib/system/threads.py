"""Threads of this process's matrix products on a CPU: one, or all cores where that is faster."""

from __future__ import annotations

import os

from lib.system import hardware, mpi_and_blas

WORTH = 1.2  # times as fast have all cores to be: one thread leaves the others to reading, saving and other programs
LOOKS = 2  # at each number of threads, in turn, so that another program's burst does not decide
LOOK_SECONDS = 0.15


def choose(stored: int | None, is_alone: bool, may_measure: bool) -> int | None:
    """Sets the threads of MLX's BLAS for this run; None where there is nothing to set (GPU, macOS, the user's number).
    stored: what a run that is resumed was started with; taken again, up to the cores that there are. is_alone: no other
    rank shares this machine's cores. may_measure: False where timings may decide nothing (plan.replan=false): one
    thread."""
    cores = mpi_and_blas.own_cores()
    if mpi_and_blas.AUTOMATIC not in os.environ or hardware.mlx_device()[0] != "cpu":
        return None
    if mpi_and_blas.set_blas_threads(1) is None:
        return None
    threads = 1
    if is_alone and stored is not None:
        threads = min(stored, cores)
    elif is_alone and may_measure and cores > 1:
        rates: dict[int, list[float]] = {1: [], cores: []}
        for count in (1, cores) * LOOKS:
            mpi_and_blas.set_blas_threads(count)
            rates[count].append(hardware.quick_gflops(LOOK_SECONDS))
        threads = cores if min(rates[cores]) > WORTH * max(rates[1]) else 1
    mpi_and_blas.set_blas_threads(threads)
    return threads
