"""This host on its network: its name and its addresses. Only the standard library is imported: the agent has to be
there in a tenth of a second."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import ipaddress
import json
import os
import re
import socket
from collections.abc import Sequence
from pathlib import Path

from lib.system import os_commands

HOST = "TANDEM_HOST"  # the name that the launcher fixed for this host
ID_DIGITS = 4  # of a machine's id, behind a name that two machines have


def host_name() -> str:
    """This host in plan, logs and calibration: the name that its launcher fixed for the run, else its own."""
    return os.environ.get(HOST) or own_name()


@functools.cache
def own_name() -> str:
    """This machine's name, without its domain, the same for as long as this process lives. On a Mac it is the one of
    System Settings ➜ Sharing: what gethostname says there is whatever the network calls it."""
    name = os_commands.output(["scutil", "--get", "LocalHostName"]) if os_commands.is_mac() else ""
    return re.sub(r"[^A-Za-z0-9-]+", "-", name.strip()).strip("-") or socket.gethostname().split(".")[0]


@functools.cache
def machine_id() -> str:
    """Eight hexadecimal digits that tell this machine from another of its name; the same after a restart."""
    identity = ""
    if os_commands.is_mac():
        registry = os_commands.output(["ioreg", "-rd1", "-c", "IOPlatformExpertDevice"])
        identity = next(iter(re.findall(r'"IOPlatformUUID"\s*=\s*"([^"]+)"', registry)), "")
    else:
        with contextlib.suppress(OSError):
            identity = Path("/etc/machine-id").read_text(encoding="utf-8").strip()
    return hashlib.sha256(identity.encode()).hexdigest()[:8]  # the id itself stays private


def distinct_names(machines: Sequence[tuple[str, str]]) -> list[str]:
    """A name for each (name, machine id): two machines of one name get the first digits of their ids behind it."""
    ids: dict[str, set[str]] = {}
    for name, identity in machines:
        ids.setdefault(name, set()).add(identity)
    return [name if len(ids[name]) == 1 else f"{name}-{identity[:ID_DIGITS]}" for name, identity in machines]


def likeliest_first(addresses: Sequence[str]) -> list[str]:
    """Addresses in an order that is the same on every host; loopback and link-local ones, of no use to others, last."""

    def unlikely(address: str) -> int:
        with contextlib.suppress(ValueError):
            parsed = ipaddress.ip_address(address.partition("%")[0])
            return 2 if parsed.is_loopback else int(parsed.is_link_local)
        return 0

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
    with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect(("192.0.2.1", 9))  # nothing is sent; the system says by which address it would be
        addresses.append(str(probe.getsockname()[0]))
    return list(dict.fromkeys(addresses))
