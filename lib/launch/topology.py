"""What each backend asks of the hosts: who reaches whom, over which devices, on which systems. Pure functions."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence

from lib.launch.hostfile import Devices, Host

RDMA_BACKENDS = ("jaccl", "jaccl-ring")  # over Thunderbolt 5; the second without a cable between every two
END_SECONDS = 2.0  # between asking a rank to end and killing it
FAULT_END_SECONDS = 0.5  # the same where the world is broken: nothing that a rank could still do will last
# A Mac whose RDMA process was killed may refuse RDMA until its next boot (exo#1889, mlx#3910), and taking down a large
# model was seen to last 4 s, once more than 5 (omlx#2184): these are given time to end by themselves.
RDMA_END_SECONDS = 30.0


Pair = tuple[int, int]  # from which host to which, by their indices


def end_seconds(backend: str, is_fault: bool) -> float:
    """How long ranks may take to end before they are killed."""
    if backend in RDMA_BACKENDS:
        return RDMA_END_SECONDS
    return FAULT_END_SECONDS if is_fault else END_SECONDS


def pairs_of(backend: str, count: int) -> list[Pair]:
    """Which hosts connect to which before a run begins.

    In a ring each to the next one, at the address that faces it; over RDMA all to the first, which coordinates them. Of
    the other backends any may connect to any.
    """
    if backend == "ring":
        return [(index, (index + 1) % count) for index in range(count)] if count > 1 else []
    if backend in RDMA_BACKENDS:
        return [(index, 0) for index in range(1, count)]
    return list(itertools.permutations(range(count), 2))


def largest_ring(count: int, reached: Mapping[Pair, str]) -> list[int]:
    """Indices of as many hosts as form a ring, in order: each reaches the next one, the last one the first.

    Of several such rings, one that begins with the first host that can be in any.
    """
    best = list(range(count))[:1]
    for first in range(count):
        longest = {first: [first]}  # of the ways from the first host, by where they end
        for index in range(first + 1, count):
            before = [way for last, way in longest.items() if (last, index) in reached]
            if before:
                longest[index] = [*max(before, key=len), index]
        closed = [way for last, way in longest.items() if (last, first) in reached]
        best = max([best, *closed], key=len)
    return best


def in_ring_order(first: Host, hosts: Sequence[Host]) -> tuple[Host, ...]:
    """The hosts as they follow each other round the ring, from one of them on: their cables stay where they are."""
    names = [host.name for host in hosts]
    start = names.index(first.name)
    return (*hosts[start:], *hosts[:start])


def led_by(hosts: Sequence[Host], ring: Sequence[Host]) -> tuple[Host, ...]:
    """The ring from its first member on that is one of these hosts; as it is, where none is."""
    names = {host.name for host in hosts}
    return next((in_ring_order(host, ring) for host in ring if host.name in names), tuple(ring))


def rdma_matrix(hosts: Sequence[Host]) -> list[list[Devices]]:
    """Each host's devices towards each other host: null, a name, or a list of names, one for every cable.

    A host file lists them by its own order; of hosts that go on without the others only their columns remain.
    """
    columns = [index if host.index is None else host.index for index, host in enumerate(hosts)]
    return [[host.rdma[column] if column < len(host.rdma) else None for column in columns] for host in hosts]


def rdma_fault(backend: str, hosts: Sequence[Host]) -> str | None:
    """Why MLX could not connect these hosts over RDMA; None if it can.

    A mesh needs a device between every two hosts; a ring needs as many towards the next host as towards the one before.
    """
    for host in hosts:
        if host.slots != 1:
            return f"one rank a host, but {host.name} has slots={host.slots}"
    matrix, count = rdma_matrix(hosts), len(hosts)
    for index, host in enumerate(hosts):
        if _cables(matrix[index][index]):
            return f"no device from a host to itself, but {host.name} has {matrix[index][index]!r}"
    # MLX takes a mesh where there is one, unless the ring is asked for by name.
    ring = sorted({*pairs_of("ring", count), *((other, one) for one, other in pairs_of("ring", count))})
    wanted = ring if backend == "jaccl-ring" else list(itertools.permutations(range(count), 2))
    if missing := [pair for pair in wanted if not _cables(matrix[pair[0]][pair[1]])]:
        names = ", ".join(f"{hosts[one].name} to {hosts[other].name}" for one, other in missing[:3])
        more = f" and {len(missing) - 3} more" if len(missing) > 3 else ""
        kind = "each neighbour of the ring" if backend == "jaccl-ring" else "every other host"
        return f"a device towards {kind}, and none is listed for {names}{more}"
    if backend == "jaccl-ring" and len({_cables(matrix[one][other]) for one, other in ring}) > 1:
        counts = ", ".join(f"{hosts[i].name} to {hosts[j].name}: {_cables(matrix[i][j])}" for i, j in ring[:4])
        return f"as many devices between all neighbours of the ring ({counts})"
    return None


def _cables(devices: Devices) -> int:
    """How many devices an entry of the matrix names."""
    return len(devices) if isinstance(devices, list) else int(devices is not None)


def refusal(backend: str, systems: Mapping[str, str]) -> str | None:
    """Why hosts of these systems cannot be of one world over a backend; None if they can.

    systems: what the kernel of each host calls itself, by host: "Darwin" or "Linux".
    """
    macs = [name for name, system in systems.items() if system == "Darwin"]
    others = [name for name, system in systems.items() if system and system != "Darwin"]
    if backend in RDMA_BACKENDS and others:
        why = f"{backend} is RDMA over Thunderbolt between Macs"
    elif backend == "nccl" and macs:
        why = "nccl is for NVIDIA GPUs, which no Mac has"
    elif backend == "mpi" and macs and others:
        why = "mpirun starts hosts of one system only"
    else:
        return None
    systems_of = "; ".join(
        f"{', '.join(names)}: {kind}" for names, kind in ((macs, "macOS"), (others, "Linux")) if names
    )
    return f"--backend {backend}: {why} ({systems_of}); give --backend ring, which joins any machines"
