"""Which hosts take connections from each other at the run's ports, and at which of their addresses."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from lib.errors import UserError
from lib.launch import hostfile, topology
from lib.launch.hostfile import Host
from lib.launch.topology import Pair

if TYPE_CHECKING:
    from lib.launch.agent_link import Link
    from lib.launch.job import Job


PROBE_SECONDS = 1.2  # for a host to take a connection: the kernel asks once more after a second


async def addresses_of(host: Host, hosts: Sequence[Host]) -> list[str]:
    """Where a host may be reached, best first: at the address of the host file, and at what its name resolves to.

    In a ring of cables the first one is known to the host before it alone; by its name, ssh reaches it from anywhere.
    """
    found = []
    for one in (host, replace(host, addresses=())):
        try:  # on a thread: a name may take seconds to look up
            found.append(await asyncio.get_running_loop().run_in_executor(None, hostfile.address, one, hosts))
        except UserError:
            continue
    return list(dict.fromkeys(found))


async def first_address(link: Link, other: Host, hosts: Sequence[Host], port: int, seconds: float) -> str | None:
    """The first address at which a host that listens takes a connection from another one, whose agent is asked."""
    for address in await addresses_of(other, hosts):
        try:
            await link.ask("probe", seconds + 1.0, address=address, port=port, seconds=seconds)
        except ConnectionError:
            continue
        return address
    return None


async def reach_each_other(
    job: Job, links: Mapping[str, Link], hosts: Sequence[Host], seconds: float = PROBE_SECONDS
) -> tuple[Host, ...] | None:
    """As many of the hosts as can run together, at ports of the run where no rank listens now.

    seconds: for one to take a connection. A host of a ring that the one before it reaches at another address than the
    first of the host file gets that address. None where a host cannot listen, so that nothing is known.
    """
    port = job.starting_port
    try:
        await asyncio.gather(
            *(links[host.name].ask("listen", seconds + 1.0, port=port + place) for place, host in enumerate(hosts))
        )
    except ConnectionError:
        return None

    async def probed(pairs: Sequence[Pair]) -> dict[Pair, str]:
        asked = [first_address(links[hosts[i].name], hosts[j], hosts, port + j, seconds) for i, j in pairs]
        found = zip(pairs, await asyncio.gather(*asked), strict=True)
        return {pair: address for pair, address in found if address is not None}

    everyone = range(len(hosts))
    wanted = topology.pairs_of(job.backend, len(hosts))
    reached = await probed(wanted)
    if len(reached) < len(wanted):  # somebody is cut off: who reaches whom besides?
        reached |= await probed([pair for pair in itertools.permutations(everyone, 2) if pair not in wanted])
    if job.backend == "ring":
        ring = topology.largest_ring(len(hosts), reached)
        return _placed([hosts[place] for place in ring], ring, reached)
    kept: list[int] = []
    for place in everyone:
        pairs = [pair for pair in itertools.permutations([*kept, place], 2) if pair in wanted]
        if all(pair in reached for pair in pairs):
            kept.append(place)
    return tuple(hosts[place] for place in kept)


def _placed(hosts: Sequence[Host], ring: Sequence[int], reached: Mapping[Pair, str]) -> tuple[Host, ...]:
    """The hosts of a ring, each at an address at which the one before it reaches it."""
    if len(ring) < 2:
        return tuple(hosts)
    found = [reached[ring[index - 1], place] for index, place in enumerate(ring)]
    if all(not host.addresses or host.addresses[0] == address for host, address in zip(hosts, found, strict=True)):
        return tuple(hosts)
    # MLX wants as many connections to either neighbour: where one has a single address, so have all.
    return tuple(replace(host, addresses=(address,)) for host, address in zip(hosts, found, strict=True))
