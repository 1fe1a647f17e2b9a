"""This host on its network: its name, its addresses, and how its connections do.

Only the standard library is imported: the agent, which has to be there in a tenth of a second, imports this.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import ipaddress
import json
import os
import re
import socket
import stat
import struct
from collections.abc import Sequence
from pathlib import Path
from typing import TypedDict

from lib.system import os_commands

HOST = "TANDEM_HOST"  # the name that the launcher fixed for this host
ID_DIGITS = 4  # of a machine's id, behind a name that two machines have


# Places in Linux's struct tcp_info (linux/tcp.h): tcpi_rtt in microseconds, and tcpi_total_retrans.
ROUND_TRIP, RETRANSMITS, INFO_BYTES = 68, 100, 104


# ---- Names


def host_name() -> str:
    """This host in plan, logs and calibration: the name that its launcher fixed for the run, else its own."""
    return os.environ.get(HOST) or own_name()


@functools.cache
def own_name() -> str:
    """This machine's name, without its domain, the same for as long as this process lives.

    On a Mac it is the one of System Settings ➜ Sharing: what gethostname says there is whatever the network calls it.
    """
    name = ""
    if os_commands.is_mac():
        for kind in ("LocalHostName", "ComputerName"):
            name = name or os_commands.output(["scutil", "--get", kind]).strip()
        name = re.sub(r"[^A-Za-z0-9-]+", "-", name).strip("-")
    return name or socket.gethostname().split(".")[0]


@functools.cache
def machine_id() -> str:
    """Eight hexadecimal digits that tell this machine from another of its name; the same after a restart."""
    identity = ""
    if os_commands.is_mac():
        registry = os_commands.output(["ioreg", "-rd1", "-c", "IOPlatformExpertDevice"])
        identity = next(iter(re.findall(r'"IOPlatformUUID"\s*=\s*"([^"]+)"', registry)), "")
    for path in (Path("/etc/machine-id"), Path("/var/lib/dbus/machine-id")):
        with contextlib.suppress(OSError):
            identity = identity or path.read_text(encoding="utf-8").strip()
    return hashlib.sha256(identity.encode()).hexdigest()[:8]  # the id itself stays private


def distinct_names(machines: Sequence[tuple[str, str]]) -> list[str]:
    """A name for each (name, machine id): two machines of one name get the first digits of their ids behind it."""
    ids: dict[str, set[str]] = {}
    for name, identity in machines:
        ids.setdefault(name, set()).add(identity)
    return [name if len(ids[name]) == 1 else f"{name}-{identity[:ID_DIGITS]}" for name, identity in machines]


# ---- Addresses


def is_link_local(address: str) -> bool:
    """Whether an address holds on one cable only (169.254.0.0/16, fe80::/10): a system gives it to itself."""
    with contextlib.suppress(ValueError):
        return ipaddress.ip_address(address.partition("%")[0]).is_link_local
    return False


def likeliest_first(addresses: Sequence[str]) -> list[str]:
    """Addresses in an order that is the same on every host; loopback and link-local ones, of no use to others, last."""

    def unlikely(address: str) -> int:
        with contextlib.suppress(ValueError):
            if ipaddress.ip_address(address.partition("%")[0]).is_loopback:
                return 2
        return int(is_link_local(address))

    return sorted(set(addresses), key=lambda address: (unlikely(address), address))


def own_addresses() -> list[str]:
    """By which others may reach this host, the likeliest last: names, what the ring uses, the way out."""
    named: list[str] = []
    with contextlib.suppress(OSError):
        named = [str(info[4][0]) for info in socket.getaddrinfo(socket.gethostname(), None, socket.AF_INET)]
    addresses = ["127.0.0.1", socket.gethostname(), *reversed(likeliest_first(named))]
    with contextlib.suppress(OSError, ValueError, KeyError, IndexError, TypeError):
        ring = json.loads(Path(os.environ["MLX_HOSTFILE"]).read_text(encoding="utf-8"))
        addresses += [address.rpartition(":")[0] for address in ring[int(os.environ.get("MLX_RANK", 0))]]
    with contextlib.suppress(OSError):
        addresses.append(address_towards("192.0.2.1"))
    return list(dict.fromkeys(addresses))


def address_towards(other: str) -> str:
    """This host's address on the way to another, of which nothing is asked.

    Raises:
        OSError: there is no way.
    """
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((other, 9))  # nothing is sent; the system says by which address it would be
        return str(probe.getsockname()[0])


# ---- Connections


class Connection(TypedDict):
    """A TCP connection of this process."""

    peer: str
    round_trip_seconds: float  # smoothed
    retransmits: int  # since it began


def connections() -> list[Connection]:
    """Every TCP connection that this process has open, on Linux; elsewhere, and over backends that bypass TCP, none."""
    connected: list[Connection] = []
    folder = Path("/proc/self/fd")
    for path in folder.iterdir() if folder.exists() and hasattr(socket, "TCP_INFO") else ():
        with contextlib.suppress(OSError, ValueError):  # closed meanwhile, or not connected
            if not stat.S_ISSOCK(os.fstat(int(path.name)).st_mode):
                continue
            with socket.socket(fileno=os.dup(int(path.name))) as copy:
                if copy.family not in (socket.AF_INET, socket.AF_INET6) or copy.type != socket.SOCK_STREAM:
                    continue
                peer = copy.getpeername()[0]
                trip, retransmits = _tcp_info(copy, ROUND_TRIP, RETRANSMITS)
            connected.append({"peer": peer, "round_trip_seconds": trip / 1e6, "retransmits": retransmits})
    return sorted(connected, key=lambda one: one["peer"])


def _tcp_info(connection: socket.socket, *places: int) -> list[int]:
    info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, INFO_BYTES)
    return [struct.unpack_from("=I", info, place)[0] for place in places]
