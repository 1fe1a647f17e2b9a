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
import re
import socket
from collections.abc import Mapping, Sequence
from dataclasses import field, replace
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError
from pydantic.dataclasses import dataclass

from lib.config import read_file
from lib.errors import UserError
from lib.system import network, os_commands

Backend = Literal["ring", "mpi", "jaccl", "jaccl-ring", "nccl"]
BACKENDS = get_args(Backend)
NAME = re.compile(r"([A-Za-z_][A-Za-z0-9_.-]{0,31}@)?[A-Za-z0-9]([A-Za-z0-9_.-]{0,251}[A-Za-z0-9])?")
# What a file may set: numbers and devices. Others (PYTHONPATH, LD_PRELOAD, NCCL_NET_PLUGIN ...) can run code.
VARIABLES_OF_A_FILE = re.compile(
    r"(MLX_(METAL_FAST_SYNCH|MAX_(OPS|MB)_PER_BUFFER|ENABLE_TF32|DISABLE_COMPILE|BFS_MAX_WIDTH|RING_VERBOSE)|"
    r"CUDA_VISIBLE_DEVICES|NCCL_((SOCKET|IB|P2P|SHM|NVLS)_[A-Z_]+|DEBUG)|(OMP|OPENBLAS|VECLIB)_(NUM|MAXIMUM)_THREADS"
    r"|OPENBLAS_CORETYPE|TOKENIZERS_PARALLELISM|(HF_HUB|TRANSFORMERS)_OFFLINE|OMPI_MCA_btl_tcp_if_include)=[^\0\n]*"
)
KEYS = {"ssh": "name", "ips": "addresses", "env": "environment", "envs": "environment"}  # in a file: here
LISTS = ("env", "map", "ips")  # keys of a line that may stand there several times


def _matching(pattern: str | re.Pattern[str], rule: str) -> AfterValidator:
    def check(text: str) -> str:
        if not re.fullmatch(pattern, text):
            raise ValueError(rule)
        return text

    return AfterValidator(check)


Name = Annotated[str, _matching(NAME, "no host's name: letters, digits, dots, dashes, underlines, and user@ before")]
Device = Annotated[str, _matching(r"[A-Za-z0-9_.-]+", "no device's name, as rdma_en5")]
Devices = Device | Annotated[list[Device], Field(min_length=1)] | None  # one RDMA device, several, or none
Address = Annotated[str, AfterValidator(lambda text: str(ipaddress.IPv4Address(text)))]
Folder = Annotated[str, _matching(r"/[^\0\n:]*", "not a folder's whole path")]
Python = Annotated[str, _matching(r"/[^\0\n]*python[\d.]*", "not the whole path of a Python")]
Variable = Annotated[
    str, _matching(VARIABLES_OF_A_FILE, "not a NAME=VALUE that a host file may set; give it by --env NAME=VALUE")
]
Mapped = Annotated[str, _matching(r"/[^\0\n:]*:/[^\0\n:]*", "not paths HERE:THERE")]


@dataclass(frozen=True, config=ConfigDict(extra="forbid"))
class Host:
    """One machine: what `ssh` calls it, how many ranks it takes, where the others reach it, and where all is on it."""

    name: Name
    slots: Annotated[int, Field(ge=1, le=1024)] = 1
    addresses: tuple[Address, ...] = ()  # one for every link; empty where only the name is known
    rdma: tuple[Devices, ...] = ()  # jaccl: towards every host of the file
    index: int | None = field(default=None, compare=False)  # in the file; the others' `rdma` is by it
    port: Annotated[int, Field(ge=1, le=65535)] | None = None  # of its sshd
    directory: Folder | None = None  # of the project
    python: Python | None = None
    environment: tuple[Variable, ...] = ()
    map: tuple[Mapped, ...] = ()  # by which its paths differ

    def __hash__(self) -> int:
        return hash(self.name)


@dataclasses.dataclass(frozen=True)
class Hosts:
    """A host file's content, in its order: the first host has rank 0."""

    hosts: tuple[Host, ...]
    backend: str | None = None
    environment: Mapping[str, str] = field(default_factory=dict)


class JsonFile(BaseModel, extra="forbid"):
    """MLX's object."""

    hosts: list[dict[str, Any]]
    backend: Backend | None = None
    envs: list[Variable] = []


def read(path: Path) -> Hosts:
    """Reads a host file. Raises UserError: it cannot be read, or something in it is wrong: one line that says where,
    and the remedy."""
    try:
        return parse(read_file.read_text(path, "host file"), f"host file {path}")
    except OSError as error:
        remedy = "hostfile.example shows one, and ./launch --hosts A,B needs none"
        raise UserError(f"host file {path}: {error.strerror}; {remedy}") from None


def from_words(words: str) -> Hosts:
    """The hosts of a command line, e.g. "mac-a:1,mac-b:2". Raises UserError: as `read`."""
    return parse(words.replace(",", "\n"), "--hosts")


def parse(text: str, source: str) -> Hosts:
    """The hosts that a text in any of the forms names; `source` says where it is from. Raises UserError: as `read`."""
    if re.match(r"\s*(\{|\[\s*[]\[{\"])", text):  # [::1] is none
        try:
            file = JsonFile.model_validate_json(text if text.lstrip()[0] == "{" else f'{{"hosts": {text}}}')
        except ValidationError as error:
            raise _fault(error, source) from None
        hosts = [_host(entry, f"{source}, host {index}") for index, entry in enumerate(file.hosts)]
        backend, variables = file.backend, environment(file.envs, source)
    else:
        lines = enumerate((line.partition("#")[0] for line in text.splitlines()), 1)
        hosts = [_of_line(line, f"{source}, line {number}") for number, line in lines if line.strip()]
        backend, variables = None, {}
    if not hosts:
        raise UserError(f"{source} names no host; one line for each: NAME slots=1")
    names = [host.name for host in hosts]
    if twice := [name for index, name in enumerate(names) if name in names[:index]]:
        raise UserError(f"{source} names {twice[0]} twice; name it once, with as many slots as it takes ranks")
    return Hosts(tuple(replace(host, index=index) for index, host in enumerate(hosts)), backend, variables)


def _of_line(line: str, where: str) -> Host:
    words = [
        re.sub('"([^"]*)"', r"\1", word) for word in re.findall(r'(?:"[^"]*"|\S)+', line)
    ]  # folders may have spaces
    if words[0].count(":") > 2 or "::" in words[0] or words[0].startswith("["):
        raise UserError(f"{where}: {_short(words[0])}: MLX's ring speaks no IPv6; give an IPv4 address or a name")
    name, separator, slots = words[0].partition(":")
    entry: dict[str, Any] = {"ssh": name, **({"slots": slots} if separator else {})}
    for word in words[1:]:
        key, equals, value = word.partition("=")
        if not equals or (key in entry and key not in LISTS):
            raise UserError(f"{where}: {_short(line)} is neither NAME:SLOTS nor NAME slots=SLOTS (one host a line)")
        entry[key] = [*entry.get(key, []), value] if key in LISTS else value
    return _host(entry, where)


def _host(entry: Mapping[str, Any], where: str) -> Host:
    values = {KEYS.get(key, key): value for key, value in entry.items() if key != "user" and value is not None}
    if "user" in entry:
        values["name"] = f"{entry['user']}@{values.get('name')}"
    try:
        host = Host(**values)
    except ValidationError as error:
        raise _fault(error, where) from None
    with contextlib.suppress(ValueError):
        own = str(ipaddress.IPv4Address(host.name.rpartition("@")[2]))
        return host if host.addresses else replace(host, addresses=(own,))
    return host


def _fault(error: ValidationError, where: str) -> UserError:
    """The first of the faults that pydantic found."""
    fault = error.errors()[0]
    place, why = ".".join(map(str, fault["loc"])), fault["msg"].removeprefix("Value error, ")
    keys = "; the keys are ssh, ips, rdma, slots, user, port, directory, python, env, map"
    return UserError(f"{where}: {place} {_short(fault['input'])}: {why}{keys * ('unexpected' in fault['type'])}")


def environment(words: Sequence[str], source: str) -> dict[str, str]:
    """Variables from a list of NAME=VALUE. Raises UserError: a word is of another form."""
    for word in words:
        if not re.fullmatch(r"[A-Za-z_]\w*=[^\0\n]*", word, re.ASCII):
            raise UserError(f"{source}: {_short(word)} is not of the form NAME=VALUE")
    return dict(word.split("=", 1) for word in words)


def _short(value: Any) -> str:
    """A user's own words in a message of one line, with nothing in them that a terminal would obey."""
    text = ascii(value)
    return text if len(text) <= 60 else text[:57] + "..."


# ---- Names and addresses


def to_text(hosts: Sequence[Host]) -> str:
    """Open MPI's form, which `read` takes as well."""
    return "".join(f"{host.name} slots={host.slots}\n" for host in hosts)


def address(host: Host, peers: Sequence[Host] = ()) -> str:
    """The IPv4 address at which other hosts reach this one: given in the file, or what ssh's name for it resolves to. A
    machine's own name may be a loopback address to itself (Debian writes 127.0.1.1 into /etc/hosts): then it is the
    address from which this machine would send to one of its peers. Raises UserError: the name does not resolve to an
    IPv4 address."""
    if host.addresses:
        return host.addresses[0]
    name = host.name.rpartition("@")[2]
    if hostname := re.search(r"^hostname (\S+)$", os_commands.output(["ssh", "-G", "--", host.name]), re.MULTILINE):
        name = hostname[1]
    try:
        infos = socket.getaddrinfo(name, None, socket.AF_INET)
    except (OSError, UnicodeError):
        raise UserError(
            f"host {host.name}: {name} does not resolve to an IPv4 address; fix the name, add it to /etc/hosts, "
            f"or give the address in the host file: {host.name} ips=10.0.0.1"
        ) from None
    resolved = network.likeliest_first([str(info[4][0]) for info in infos])
    candidates = list(resolved)
    for peer in peers if resolved[0].startswith("127.") else ():
        with contextlib.suppress(OSError, UserError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect((address(peer), 9))  # nothing is sent
            candidates.append(str(probe.getsockname()[0]))
    return next((each for each in candidates if not each.startswith("127.")), resolved[0])
