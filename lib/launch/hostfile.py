"""Host files: the hosts of a run and their slots, in any of these forms. A slot is room for one rank.

    mac-a:1                         host:slots
    mac-b slots=1                   Open MPI's
    [{"ssh": "mac-a", "ips": ["10.0.0.1"]}, ...]                        MLX's list, as mlx.distributed_config writes it
    {"backend": "ring", "envs": ["MLX_METAL_FAST_SYNCH=1"], "hosts": [{"ssh": ...}, ...]}    MLX's object

A name is what `ssh` takes, perhaps with `user@`. It is a single word of letters, digits, dots, dashes and underlines,
so that neither ssh nor a shell can take it for an option or a command.
"""

from __future__ import annotations

import contextlib
import ipaddress
import json
import re
import shlex
import socket
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from lib.config import read_file
from lib.errors import UserError
from lib.system.network import likeliest_first

BACKENDS = ("ring", "mpi", "jaccl", "jaccl-ring", "nccl")
MOST_SLOTS = 1024
SSH_SECONDS = 5  # for ssh to read its own configuration
NAME = re.compile(r"([A-Za-z_][A-Za-z0-9_.-]{0,31}@)?[A-Za-z0-9]([A-Za-z0-9_.-]{0,251}[A-Za-z0-9])?")
DEVICE = re.compile(r"[A-Za-z0-9_.-]+")
VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
# What a file's `envs` may set: numbers and names of devices, by which no code is found (PYTHONPATH, LD_PRELOAD,
# NCCL_NET_PLUGIN, MLX_MPI_LIBNAME ...) and no check is left out. A host file may be somebody else's.
OF_A_FILE = (
    *("MLX_METAL_FAST_SYNCH", "MLX_MAX_OPS_PER_BUFFER", "MLX_MAX_MB_PER_BUFFER", "MLX_ENABLE_TF32"),
    *("MLX_DISABLE_COMPILE", "MLX_BFS_MAX_WIDTH", "MLX_RING_VERBOSE", "CUDA_VISIBLE_DEVICES"),
    *("NCCL_SOCKET_IFNAME", "NCCL_SOCKET_FAMILY", "NCCL_IB_HCA", "NCCL_IB_DISABLE", "NCCL_IB_GID_INDEX"),
    *("NCCL_P2P_DISABLE", "NCCL_SHM_DISABLE", "NCCL_NVLS_ENABLE", "NCCL_DEBUG"),
    *("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "OPENBLAS_CORETYPE", "VECLIB_MAXIMUM_THREADS"),
    *("TOKENIZERS_PARALLELISM", "HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE", "OMPI_MCA_btl_tcp_if_include"),
)


Devices = str | list[str] | None  # one RDMA device, several, or none


@dataclass(frozen=True)
class Host:
    """One machine: what `ssh` calls it, how many ranks it takes, and where the others reach it."""

    name: str
    slots: int = 1
    addresses: tuple[str, ...] = ()  # IPv4, one for every link; empty where only the name is known
    rdma: tuple[Devices, ...] = ()  # jaccl: towards every host of the file
    index: int | None = field(default=None, compare=False)  # in the file, by which the others' `rdma` names it


@dataclass(frozen=True)
class Hosts:
    """A host file's content, in its order: the first host has rank 0."""

    hosts: tuple[Host, ...]
    backend: str | None = None
    environment: Mapping[str, str] = field(default_factory=dict)

    @property
    def size(self) -> int:
        """Ranks in all."""
        return sum(host.slots for host in self.hosts)


def read(path: Path) -> Hosts:
    """Reads a host file.

    Raises:
        UserError: it cannot be read, or something in it is wrong: one line that says where, and the remedy.
    """
    try:
        text = read_file.read_text(path, "host file")
    except OSError as error:
        raise UserError(
            f"host file {path}: {error.strerror}; hostfile.example shows one, and ./launch --hosts A,B needs none"
        ) from None
    return parse(text, f"host file {path}")


def parse(text: str, source: str) -> Hosts:
    """The hosts that a text in any of the forms names; `source` says where it is from.

    Raises:
        UserError: as `read`.
    """
    listed = _from_json(text, source) if text.lstrip()[:1] in ("[", "{") else Hosts(_from_lines(text, source))
    if not listed.hosts:
        raise UserError(f"{source} names no host; one line for each: NAME slots=1")
    for index, host in enumerate(listed.hosts):
        if host.name in (other.name for other in listed.hosts[:index]):
            raise UserError(f"{source} names {host.name} twice; name it once, with as many slots as it takes ranks")
    return replace(listed, hosts=tuple(replace(host, index=index) for index, host in enumerate(listed.hosts)))


def from_words(words: str) -> Hosts:
    """The hosts of a command line, e.g. "mac-a:1,mac-b:2".

    Raises:
        UserError: as `read`.
    """
    if words.lstrip()[:1] in ("[", "{"):  # no JSON: IPv6, or the content of a file
        _from_lines(words, "--hosts")
        raise UserError(f"--hosts {_short(words)}: give NAME:SLOTS,NAME:SLOTS; a JSON file goes to --hostfile")
    return parse("\n".join(words.split(",")), "--hosts")


def to_text(hosts: Sequence[Host]) -> str:
    """Open MPI's form, which `read` takes as well."""
    return "".join(f"{host.name} slots={host.slots}\n" for host in hosts)


def address(host: Host, peers: Sequence[Host] = ()) -> str:
    """The IPv4 address at which other hosts reach this one: given in the file, or what ssh's name for it resolves to.

    A machine's own name may be a loopback address to itself (Debian writes 127.0.1.1 into /etc/hosts), which is of no
    use to its peers: then it is the address from which this machine would send to the first of them.

    Raises:
        UserError: the name does not resolve to an IPv4 address.
    """
    if host.addresses:
        return host.addresses[0]
    name = _ssh_name(host.name)
    try:
        resolved = likeliest_first([str(info[4][0]) for info in socket.getaddrinfo(name, None, socket.AF_INET)])
    except (OSError, UnicodeError):
        raise UserError(
            f"host {host.name}: {name} does not resolve to an IPv4 address; fix the name, add it to /etc/hosts, "
            'or give the address in the host file: {"ssh": "' + host.name + '", "ips": ["10.0.0.1"]}'
        ) from None
    return next((one for one in resolved if not one.startswith("127.")), None) or _towards(peers) or resolved[0]


def _towards(peers: Sequence[Host]) -> str | None:
    """The address of this machine on the way to the first peer that is another machine; None where there is none."""
    for peer in peers:
        with contextlib.suppress(OSError, UserError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect((address(peer), 9))  # nothing is sent
            if not (own := str(probe.getsockname()[0])).startswith("127."):
                return own
    return None


def _ssh_name(name: str) -> str:
    """The HostName that ~/.ssh/config gives a name; the name itself where ssh is missing."""
    try:
        ssh = subprocess.run(["ssh", "-G", "--", name], capture_output=True, text=True, timeout=SSH_SECONDS)
    except (OSError, subprocess.SubprocessError):
        return name.rpartition("@")[2]
    hostname = re.search(r"^hostname (\S+)$", ssh.stdout, re.MULTILINE)
    return hostname[1] if hostname else name.rpartition("@")[2]


# ---- The forms of a host file


def _from_lines(text: str, source: str) -> tuple[Host, ...]:
    hosts = []
    for number, line in enumerate(text.splitlines(), 1):
        words = line.partition("#")[0].split()
        if not words:
            continue
        where = f"{source}, line {number}"
        name, separator, slots = words[0].partition(":")
        if words[0].count(":") > 1 or words[0].startswith("["):
            raise UserError(
                f"{where}: {words[0]!r} looks like IPv6, which MLX's ring does not speak; give IPv4 or a name"
            )
        for word in words[1:]:
            key, equals, value = word.partition("=")
            if key != "slots" or not equals or separator:
                raise UserError(f"{where}: {_short(line)} is neither NAME:SLOTS nor NAME slots=SLOTS (one host a line)")
            separator, slots = equals, value
        hosts.append(Host(_name(name, where), _slots(slots, where) if separator else 1, _own_address(name)))
    return tuple(hosts)


def _from_json(text: str, source: str) -> Hosts:
    try:
        tree = json.loads(text, object_pairs_hook=lambda pairs: _unique(pairs, source))
    except (ValueError, RecursionError) as error:
        if isinstance(error, UserError):
            raise
        raise UserError(
            f'{source} is not JSON: {error}; MLX\'s form is [{{"ssh": "NAME", "ips": ["10.0.0.1"]}}]'
        ) from None
    if isinstance(tree, list):
        tree = {"hosts": tree}
    _known(tree, ("backend", "envs", "hosts"), source)
    if not isinstance(tree.get("hosts"), list):
        raise UserError(f'{source} has no list "hosts"')
    backend = tree.get("backend") or None
    if backend is not None and backend not in BACKENDS:
        raise UserError(f"{source}: backend {_short(backend)} is not one of {', '.join(BACKENDS)}")
    hosts = []
    for index, entry in enumerate(tree["hosts"]):
        where = f"{source}, host {index}"
        if not isinstance(entry, dict) or not isinstance(entry.get("ssh"), str):
            raise UserError(f'{where}: {_short(entry)} is not of the form {{"ssh": "NAME", "ips": ["10.0.0.1"]}}')
        _known(entry, ("ssh", "ips", "rdma", "slots"), where)
        addresses, rdma = entry.get("ips") or [], entry.get("rdma") or []
        if not isinstance(addresses, list) or not isinstance(rdma, list):
            raise UserError(f"{where}: ips and rdma are lists")
        for devices in rdma:
            if not all(isinstance(name, str) and DEVICE.fullmatch(name) for name in _listed(devices)):
                raise UserError(
                    f"{where}: rdma has {_short(devices)}; it is null, a device as rdma_en5, or a list of them"
                )
        for one in addresses:
            if not _is_ipv4(one):
                raise UserError(f"{where}: {_short(one)} is not an IPv4 address, the only kind that MLX's ring speaks")
        name = _name(entry["ssh"], where)
        slots = _slots(str(entry.get("slots", 1)), where)
        hosts.append(Host(name, slots, tuple(addresses) or _own_address(name), tuple(rdma)))
    variables = environment(tree.get("envs") or [], source)
    for name, value in variables.items():
        if name not in OF_A_FILE:
            raise UserError(
                f"{source}: envs sets {name}, which a host file may not, as some variables run code; take it out, and "
                f"give --env {shlex.quote(f'{name}={value}')}"
            )
    return Hosts(tuple(hosts), backend, variables)


def environment(words: Any, source: str) -> dict[str, str]:
    """Variables from a list of NAME=VALUE.

    Raises:
        UserError: a word is of another form.
    """
    if not isinstance(words, list) or not all(isinstance(word, str) for word in words):
        raise UserError(f"{source}: variables are a list of NAME=VALUE")
    variables = {}
    for word in words:
        name, equals, value = word.partition("=")
        if not VARIABLE.fullmatch(name) or not equals or "\0" in value or "\n" in value:
            raise UserError(f"{source}: {_short(word)} is not of the form NAME=VALUE")
        variables[name] = value
    return variables


def _name(name: str, where: str) -> str:
    if not NAME.fullmatch(name):
        raise UserError(
            f"{where}: {_short(name)} cannot be a host's name: letters, digits, dots, dashes and underlines, "
            "perhaps after user@"
        )
    return name


def _slots(text: str, where: str) -> int:
    if not (text.isascii() and text.isdecimal()) or not 1 <= int(text.lstrip("0")[:9] or 0) <= MOST_SLOTS:
        raise UserError(
            f"{where}: {_short(text)} slots; a host takes 1 to {MOST_SLOTS} ranks (leave out a host that takes none)"
        )
    return int(text.lstrip("0"))


def _own_address(name: str) -> tuple[str, ...]:
    host = name.rpartition("@")[2]
    return (host,) if _is_ipv4(host) else ()


def _is_ipv4(text: Any) -> bool:
    try:
        return isinstance(text, str) and bool(ipaddress.IPv4Address(text))
    except ValueError:
        return False


def _known(tree: Any, keys: tuple[str, ...], where: str) -> None:
    if not isinstance(tree, dict):
        raise UserError(f"{where} is not an object")
    unknown = [key for key in tree if key not in keys]
    if unknown:
        raise UserError(f"{where}: unknown {', '.join(map(_short, unknown))}; the keys are {', '.join(keys)}")


def _unique(pairs: list[tuple[str, Any]], source: str) -> dict[str, object]:
    keys = [key for key, _ in pairs]
    repeated = [key for index, key in enumerate(keys) if key in keys[:index]]
    if repeated:
        raise UserError(f"{source}: {_short(repeated[0])} is there twice in one object")
    return dict(pairs)


def _listed(devices: Any) -> list[Any]:
    """The names of an entry of `rdma`; of an empty list one that is none."""
    return [] if devices is None else devices or [None] if isinstance(devices, list) else [devices]


def _short(value: Any) -> str:
    """A user's own words in a message of one line, with nothing in them that a terminal would obey."""
    text = ascii(value)
    return text if len(text) <= 60 else text[:57] + "..."
