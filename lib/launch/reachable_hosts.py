"""Which hosts take connections from each other at the run's ports, and at which of their addresses."""

from __future__ import annotations

import asyncio
import itertools
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace

from lib.errors import UserError
from lib.launch import hostfile, topology
from lib.launch.agent_link import Link
from lib.launch.hostfile import Host
from lib.launch.job import Job
from lib.launch.topology import Pair

PROBE_SECONDS = 1.2  # for a host to take a connection: the kernel asks once more after a second


@dataclass(frozen=True)
class Door:
    """Where a host listens, what the two ends prove themselves by, and how long the one that connects may take."""

    port: int
    token: str
    seconds: float


async def addresses_of(host: Host, hosts: Sequence[Host]) -> list[str]:
    """Where a host may be reached, best first: at the address of the host file, and at what its name resolves to.

    In a ring of cables the first one is known to the host before it alone; by its name, ssh reaches it from anywhere.
    """
    addresses = []
    for one in (host, replace(host, addresses=())):
        try:  # on a thread: a name may take seconds to look up
            addresses.append(await asyncio.get_running_loop().run_in_executor(None, hostfile.address, one, hosts))
        except UserError:
            continue
    return list(dict.fromkeys(addresses))


async def first_address(link: Link, other: Host, hosts: Sequence[Host], door: Door) -> str | None:
    """The first address at which a host that listens takes a connection from another one, whose agent is asked."""
    for address in await addresses_of(other, hosts):
        try:
            await link.ask("probe", door.seconds + 1.0, address=address, **asdict(door))
        except ConnectionError:
            continue
        return address
    return None


async def reach_each_other(
    job: Job,
    links: Mapping[str, Link],
    hosts: Sequence[Host],
    seconds: float = PROBE_SECONDS,
    first_port: int | None = None,
) -> tuple[Host, ...] | None:
    """As many of the hosts as can run together, at ports where no rank listens now.

    A host of a ring that the one before it reaches at another address than the first of the host file gets that
    address. None where a host cannot listen, so that nothing is known.

    Args:
        seconds: for one to take a connection.
        first_port: by default the run's own: its ranks listen there while they start.
    """
    token, port = secrets.token_hex(32), job.starting_port if first_port is None else first_port
    doors = [Door(port + index, token, seconds) for index in range(len(hosts))]
    try:
        await asyncio.gather(
            *(
                links[host.name].ask("listen", seconds + 1.0, **asdict(door))
                for host, door in zip(hosts, doors, strict=True)
            )
        )
    except ConnectionError:
        return None

    async def probed(pairs: Sequence[Pair]) -> dict[Pair, str]:
        probes = [first_address(links[hosts[i].name], hosts[j], hosts, doors[j]) for i, j in pairs]
        answers = zip(pairs, await asyncio.gather(*probes), strict=True)
        return {pair: address for pair, address in answers if address is not None}

    everyone = range(len(hosts))
    wanted = topology.pairs_of(job.backend, len(hosts))
    reached = await probed(wanted)
    # A host is cut off: look for another order of hosts. At the same time it would be sooner by a limit, and a link of
    # 1 Mbit/s that a long sum holds up would be taken for a cut one.
    if len(reached) < len(wanted):
        reached |= await probed([pair for pair in itertools.permutations(everyone, 2) if pair not in wanted])
    if job.backend == "ring":
        ring = topology.largest_ring(len(hosts), reached)
        return _placed([hosts[index] for index in ring], ring, reached)
    kept: list[int] = []
    for index in everyone:
        pairs = [pair for pair in itertools.permutations([*kept, index], 2) if pair in wanted]
        if all(pair in reached for pair in pairs):
            kept.append(index)
    return tuple(hosts[index] for index in kept)


def _placed(hosts: Sequence[Host], ring: Sequence[int], reached: Mapping[Pair, str]) -> tuple[Host, ...]:
    """The hosts of a ring, each at an address at which the one before it reaches it."""
    if len(ring) < 2:
        return tuple(hosts)
    addresses = [reached[ring[position - 1], index] for position, index in enumerate(ring)]
    if all(not host.addresses or host.addresses[0] == address for host, address in zip(hosts, addresses, strict=True)):
        return tuple(hosts)
    # MLX wants as many connections to either neighbour: where one has a single address, so have all.
    return tuple(replace(host, addresses=(address,)) for host, address in zip(hosts, addresses, strict=True))
