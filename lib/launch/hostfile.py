"""Host files: the machines of a run, in any of these forms. A slot is room for one rank.

    mac-a:1                                       NAME:SLOTS
    mac-b slots=1 user=ada port=2222              Open MPI's form; hostfile.example lists the further keys
    [{"ssh": "mac-a", "ips": ["10.0.0.1"]}]       MLX's list, as mlx.distributed_config writes it
    {"backend": "ring", "envs": ["MLX_METAL_FAST_SYNCH=1"], "hosts": [{"ssh": "mac-a"}]}       MLX's object

A name is what `ssh` takes: a single word, which neither ssh nor a shell can take for an option or a command.
"""

from __future__ import annotations

import contextlib
import dataclasses
import ipaddress
import json
import re
import shlex
import socket
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

from pydantic import AfterValidator, ConfigDict, Field, ValidationError
from pydantic.dataclasses import dataclass

from lib.config import read_file
from lib.errors import UserError
from lib.system.network import likeliest_first

BACKENDS = ("ring", "mpi", "jaccl", "jaccl-ring", "nccl")
MOST_SLOTS = 1024
SSH_SECONDS = 5  # for ssh to read its own configuration
NAME = re.compile(r"([A-Za-z_][A-Za-z0-9_.-]{0,31}@)?[A-Za-z0-9]([A-Za-z0-9_.-]{0,251}[A-Za-z0-9])?")
# What a file may set: numbers and devices. Others (PYTHONPATH, LD_PRELOAD, NCCL_NET_PLUGIN ...) can run code.
VARIABLES_OF_A_FILE = re.compile(
    r"MLX_(METAL_FAST_SYNCH|MAX_(OPS|MB)_PER_BUFFER|ENABLE_TF32|DISABLE_COMPILE|BFS_MAX_WIDTH|RING_VERBOSE)|"
    r"CUDA_VISIBLE_DEVICES|NCCL_((SOCKET|IB|P2P|SHM|NVLS)_[A-Z_]+|DEBUG)|(OMP|OPENBLAS|VECLIB)_(NUM|MAXIMUM)_THREADS"
    r"|OPENBLAS_CORETYPE|TOKENIZERS_PARALLELISM|(HF_HUB|TRANSFORMERS)_OFFLINE|OMPI_MCA_btl_tcp_if_include"
)
KEYS = {"ssh": "name", "ips": "addresses", "env": "environment", "envs": "environment"}  # in a file: here
RULES = {  # what a value that is not allowed is, behind the value
    "name": "cannot be a host's name: letters, digits, dots, dashes and underlines, perhaps after user@",
    "slots": f"slots; a host takes 1 to {MOST_SLOTS} ranks (leave out a host that takes none)",
    "addresses": 'are not IPv4 addresses, the only kind that MLX\'s ring speaks: ["10.0.0.1"]',
    "rdma": "is not a list of devices towards each host: null, a name as rdma_en5, or a list of names",
    "port": "is not a port of ssh, 1 to 65535",
    "directory": "is not a folder's whole path",
    "python": "is not the whole path of a Python",
    "environment": "are not variables that a host file may set, NAME=VALUE each; give others by --env",
    "map": "are not paths HERE:THERE",
}


def _matches(pattern: str | re.Pattern[str]) -> AfterValidator:
    def check(text: str) -> str:
        assert re.fullmatch(pattern, text)
        return text

    return AfterValidator(check)


Device = Annotated[str, _matches(r"[A-Za-z0-9_.-]+")]
Devices = Device | Annotated[list[Device], Field(min_length=1)] | None  # one RDMA device, several, or none
Address = Annotated[str, AfterValidator(lambda text: str(ipaddress.IPv4Address(text)))]
Folder = Annotated[str, _matches(r"/[^\0\n:]*")]


@dataclass(frozen=True, config=ConfigDict(extra="forbid"))
class Host:
    """One machine: what `ssh` calls it, how many ranks it takes, where the others reach it, and where all is on it."""

    name: Annotated[str, _matches(NAME)]
    slots: Annotated[int, Field(ge=1, le=MOST_SLOTS)] = 1
    addresses: tuple[Address, ...] = ()  # one for every link; empty where only the name is known
    rdma: tuple[Devices, ...] = ()  # jaccl: towards every host of the file
    index: int | None = dataclasses.field(default=None, compare=False)  # in the file; the others' `rdma` is by it
    port: Annotated[int, Field(ge=1, le=65535)] | None = None  # of its sshd
    directory: Folder | None = None  # of the project
    python: Annotated[str, _matches(r"/[^\0\n]*python[\d.]*")] | None = None
    environment: tuple[Annotated[str, _matches(rf"(?:{VARIABLES_OF_A_FILE.pattern})=[^\0\n]*")], ...] = ()
    map: tuple[Annotated[str, _matches(r"/[^\0\n:]*:/[^\0\n:]*")], ...] = ()  # HERE:THERE, by which its paths differ

    def __hash__(self) -> int:
        return hash(self.name)


@dataclass(frozen=True)
class Hosts:
    """A host file's content, in its order: the first host has rank 0."""

    hosts: tuple[Host, ...]
    backend: str | None = None
    environment: Mapping[str, str] = dataclasses.field(default_factory=dict)

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
    names = [host.name for host in listed.hosts]
    if twice := [name for index, name in enumerate(names) if name in names[:index]]:
        raise UserError(f"{source} names {twice[0]} twice; name it once, with as many slots as it takes ranks")
    hosts = tuple(dataclasses.replace(host, index=index) for index, host in enumerate(listed.hosts))
    return dataclasses.replace(listed, hosts=hosts)


def from_words(words: str) -> Hosts:
    """The hosts of a command line, e.g. "mac-a:1,mac-b:2".

    Raises:
        UserError: as `read`.
    """
    return (
        Hosts(_from_lines(words, "--hosts")) if words[:1] in ("[", "{") else parse(words.replace(",", "\n"), "--hosts")
    )


def to_text(hosts: Sequence[Host]) -> str:
    """Open MPI's form, which `read` takes as well."""
    return "".join(f"{host.name} slots={host.slots}\n" for host in hosts)


def address(host: Host, peers: Sequence[Host] = ()) -> str:
    """The IPv4 address at which other hosts reach this one: given in the file, or what ssh's name for it resolves to.

    A machine's own name may be a loopback address to itself (Debian writes 127.0.1.1 into /etc/hosts): then it is the
    address from which this machine would send to the first of its peers.

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
    outside = next((each for each in resolved if not each.startswith("127.")), None)
    return outside or _address_towards(peers) or resolved[0]


def _address_towards(peers: Sequence[Host]) -> str | None:
    """The address of this machine on the way to the first peer that is another machine; None where there is none."""
    for peer in peers:
        with contextlib.suppress(OSError, UserError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect((address(peer), 9))  # nothing is sent
            if not (mine := str(probe.getsockname()[0])).startswith("127."):
                return mine
    return None


def _ssh_name(name: str) -> str:
    """The HostName that ~/.ssh/config gives a name; the name itself where ssh is missing."""
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        ssh = subprocess.run(["ssh", "-G", "--", name], capture_output=True, text=True, timeout=SSH_SECONDS)
        if hostname := re.search(r"^hostname (\S+)$", ssh.stdout, re.MULTILINE):
            return hostname[1]
    return name.rpartition("@")[2]


# ---- The forms of a host file


def _from_lines(text: str, source: str) -> tuple[Host, ...]:
    hosts = []
    for number, line in enumerate(text.splitlines(), 1):
        words, where = line.partition("#")[0].split(), f"{source}, line {number}"
        if not words:
            continue
        if words[0].count(":") > 1 or words[0].startswith("["):
            raise UserError(
                f"{where}: {_short(words[0])} looks like IPv6, which MLX's ring does not speak; give IPv4 or a name"
            )
        name, separator, slots = words[0].partition(":")
        entry: dict[str, Any] = {"name": name, **({"slots": slots} if separator else {})}
        for word in words[1:]:
            key, equals, value = word.partition("=")
            is_list = key in ("env", "map", "ips")
            if not equals or key not in _KEYS_OF_A_LINE or (key in entry and not is_list):
                raise UserError(
                    f"{where}: {_short(line)} is neither NAME:SLOTS nor NAME slots=SLOTS (one host a line; further "
                    f"keys: {', '.join(_KEYS_OF_A_LINE)})"
                )
            entry[key] = [*entry.get(key, []), value] if is_list else value
        hosts.append(_host(entry, where))
    return tuple(hosts)


def _from_json(text: str, source: str) -> Hosts:
    try:
        tree = json.loads(text)
    except (ValueError, RecursionError) as error:
        form = 'MLX\'s form is [{"ssh": "NAME", "ips": ["10.0.0.1"]}]'
        raise UserError(f"{source} is not JSON: {error}; {form}") from None
    tree = {"hosts": tree} if isinstance(tree, list) else tree
    if unknown := tree.keys() - {"backend", "envs", "hosts"}:
        raise UserError(f"{source}: unknown {_short(min(unknown))}; the keys are backend, envs, hosts")
    if not isinstance(tree.get("hosts"), list):
        raise UserError(f'{source} has no list "hosts"')
    if (backend := tree.get("backend") or None) not in (None, *BACKENDS):
        raise UserError(f"{source}: backend {_short(backend)} is not one of {', '.join(BACKENDS)}")
    hosts = []
    for index, entry in enumerate(tree["hosts"]):
        where = f"{source}, host {index}"
        if not isinstance(entry, dict) or "ssh" not in entry:
            raise UserError(f'{where}: {_short(entry)} is not of the form {{"ssh": "NAME", "ips": ["10.0.0.1"]}}')
        hosts.append(_host(entry, where))
    variables = environment(tree.get("envs") or [], source)
    for name, value in variables.items():
        if not VARIABLES_OF_A_FILE.fullmatch(name):
            raise UserError(
                f"{source}: envs sets {name}, which a host file may not, as some variables run code; take it out, and "
                f"give --env {shlex.quote(f'{name}={value}')}"
            )
    return Hosts(tuple(hosts), backend, variables)


def _host(entry: Mapping[str, Any], where: str) -> Host:
    values = {KEYS.get(key, key): value for key, value in entry.items() if key != "user"}
    if "user" in entry:
        values["name"] = f"{entry['user']}@{values['name']}"
    values = {key: value for key, value in values.items() if value is not None}
    try:
        host = Host(**values)
    except (ValidationError, TypeError) as error:
        key = str(error.errors()[0]["loc"][0]) if isinstance(error, ValidationError) else ""
        if key not in RULES:
            raise UserError(f"{where}: unknown {_short(key)}; the keys are {', '.join(_KEYS_OF_AN_OBJECT)}") from None
        raise UserError(
            f"{where}: {key + ' ' if key in ('addresses', 'rdma') else ''}{_short(values[key])} {RULES[key]}"
        ) from None
    if host.addresses:
        return host
    with contextlib.suppress(ValueError):
        return dataclasses.replace(host, addresses=(str(ipaddress.IPv4Address(host.name.rpartition("@")[2])),))
    return host


_KEYS_OF_A_LINE = ("slots", "user", "port", "directory", "python", "env", "map", "ips")
_KEYS_OF_AN_OBJECT = ("ssh", "ips", "rdma", *_KEYS_OF_A_LINE[:-1])


def environment(words: Any, source: str) -> dict[str, str]:
    """Variables from a list of NAME=VALUE.

    Raises:
        UserError: a word is of another form.
    """
    if not isinstance(words, list) or not all(isinstance(word, str) for word in words):
        raise UserError(f"{source}: variables are a list of NAME=VALUE")
    for word in words:
        if not re.fullmatch(r"[A-Za-z_]\w*=[^\0\n]*", word, re.ASCII):
            raise UserError(f"{source}: {_short(word)} is not of the form NAME=VALUE")
    return dict(word.split("=", 1) for word in words)


def _short(value: Any) -> str:
    """A user's own words in a message of one line, with nothing in them that a terminal would obey."""
    text = ascii(value)
    return text if len(text) <= 60 else text[:57] + "..."
