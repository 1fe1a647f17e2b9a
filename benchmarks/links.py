"""What a message between ranks takes: `all_sum` as training calls it, and mpi4py's ping-pong."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import mlx.core as mx
import numpy as np

from lib.distributed.world import World
from lib.plan.calibration import Link, Transfer, time_now

SIZES = [2**exponent for exponent in range(10, 27, 2)]  # 1 kB to 64 MB
QUICK_BYTES = 2**22  # where quick measuring ends, unless messages are fast: only larger ones then tell the bandwidth
FAST_SECONDS = 0.02
DISTINCT = 0.1  # of the largest message's time, that it takes longer than the smallest: less is noise


def measure_links(world: World, hosts: Sequence[str], backend: str, quick: bool) -> list[Link]:
    """The links that this rank is part of. hosts: one name a rank."""
    links = [all_sum(world, hosts, backend, quick)]
    if backend == "mpi":
        links += ping_pong(world, hosts, quick)
    return links


def all_sum(world: World, hosts: Sequence[str], backend: str, quick: bool) -> Link:
    """All ranks' `World.all_sum` of each size."""
    transfers: list[Transfer] = []
    once = 0.0
    for size in SIZES:
        if quick and size > QUICK_BYTES and once > FAST_SECONDS:
            break
        array = mx.ones((size // 4,))
        mx.eval(array)

        def send(array: mx.array = array) -> None:
            world.all_sum(array, "a message")

        send()
        # The mean over ranks, so that all repeat it equally often.
        once = world.all_sum(mx.array(_seconds(send, 1)[0]), "the time of a message").item() / world.size
        seconds = _seconds(send, max(3, min(50, int(0.2 / once))))
        transfers.append(Transfer(bytes=size, seconds_median=float(np.median(seconds))))
    return fit(transfers, backend=backend, peers=tuple(hosts))


def ping_pong(world: World, hosts: Sequence[str], quick: bool) -> list[Link]:
    """One way between rank 0 and each other rank, one pair of them after the other."""
    from mpi4py import MPI  # after MLX, which has to be the one to initialise MPI

    links = []
    for other in range(1, world.size):
        peer = {0: other, other: 0}.get(world.rank)
        if peer is None:
            continue
        transfers = []
        for size in SIZES:
            if quick and size > QUICK_BYTES:
                break
            buffer = np.zeros(size, np.uint8)

            def there_and_back(buffer: np.ndarray = buffer, peer: int = peer) -> None:
                if world.rank == 0:
                    MPI.COMM_WORLD.Send(buffer, peer)
                MPI.COMM_WORLD.Recv(buffer, peer)
                if world.rank != 0:
                    MPI.COMM_WORLD.Send(buffer, peer)

            there_and_back()
            seconds = _seconds(there_and_back, 20 if size < 2**20 else 5)
            transfers.append(Transfer(bytes=size, seconds_median=float(np.median(seconds)) / 2))
        links.append(fit(transfers, backend="mpi", operation="ping_pong", peers=(hosts[0], hosts[other])))
    return links


def fit(transfers: Sequence[Transfer], **known: Any) -> Link:
    """Latency: the smallest message's time. Bandwidth: the largest's bytes over what it takes longer.

    A message that took longer than a larger one was disturbed, and counts as no slower than that. Where all take as long,
    the largest one's bytes over its time are what the link has at least.
    """
    times = np.minimum.accumulate([transfer.seconds_median for transfer in transfers][::-1])[::-1].tolist()
    smallest, largest = transfers[0], transfers[-1]
    longer = times[-1] - times[0]
    if longer < DISTINCT * times[-1]:
        bandwidth = largest.bytes / times[-1]
    else:
        bandwidth = (largest.bytes - smallest.bytes) / longer
    undisturbed = [t.model_copy(update={"seconds_median": s}) for t, s in zip(transfers, times, strict=True)]
    return Link(
        latency_seconds=times[0],
        bandwidth_bytes_per_second=bandwidth,
        transfers=tuple(undisturbed),
        measured_at=time_now(),
        **known,
    )


def _seconds(send: Callable[[], None], times: int) -> list[float]:
    seconds = []
    for _ in range(times):
        began = time.perf_counter()
        send()
        seconds.append(time.perf_counter() - began)
    return seconds
