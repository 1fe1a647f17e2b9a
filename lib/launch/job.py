"""A job: which command runs on which hosts, and by which variables and files its ranks find each other. Pure.

Contracts: MLX_HOSTFILE and MLX_RANK (ring); MLX_IBV_DEVICES, MLX_JACCL_COORDINATOR and MLX_RANK (jaccl), with
MLX_JACCL_RING (jaccl-ring); NCCL_HOST_IP, NCCL_PORT, MLX_WORLD_SIZE and MLX_RANK (nccl); Open MPI's own (mpi).
"""

from __future__ import annotations

import itertools
import json
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from lib.environment import ROOT
from lib.launch import hostfile
from lib.launch.hostfile import Devices, Host

RDMA_BACKENDS = ("jaccl", "jaccl-ring")  # over Thunderbolt 5; the second without a cable between every two
FOLDER = "{folder}"  # in commands and variables of a RankCommand: where its files are on the host


@dataclass(frozen=True)
class Job:
    """What ./launch was asked for; directory and python: of the hosts that name no other."""

    hosts: tuple[Host, ...]
    backend: str
    command: tuple[str, ...]
    environment: Mapping[str, str] = field(default_factory=dict)
    directory: str = str(ROOT)
    python: str = sys.executable
    starting_port: int = 32323
    mpi_arguments: tuple[str, ...] = ()
    silent_seconds: float = 10.0
    wedged_seconds: float = 600.0

    @property
    def size(self) -> int:
        """Ranks in all."""
        return sum(host.slots for host in self.hosts)

    @property
    def host_names(self) -> list[str]:
        """Of every rank."""
        return [host.name for host in self.hosts for _ in range(host.slots)]

    def directory_of(self, host: Host) -> str:
        """The project's folder on a host."""
        return host.directory or self.directory

    def python_of(self, host: Host) -> str:
        """The interpreter on a host."""
        return host.python or (f"{host.directory}/.venv/bin/python" if host.directory else self.python)

    def path_on(self, host: Host, word: Path | str) -> str:
        """Where a path of this machine, or that of a word `setting=path`, is on a host."""
        word = str(word)
        for here, there in [(str(ROOT), self.directory_of(host)), *(pair.split(":") for pair in host.map)]:
            if here != there:
                word = re.sub(rf"(?<![\w/.-]){re.escape(here)}(?![\w.-])", lambda _: there, word)  # noqa: B023
        return word


@dataclass(frozen=True)
class RankCommand:
    """A process to start on a host; rank None: mpirun, or a host where mpirun starts the ranks."""

    host: Host
    rank: int | None
    command: tuple[str, ...]  # empty: start nothing, but hold the connection
    environment: Mapping[str, str]
    files: Mapping[str, str] = field(default_factory=dict)  # text by name


def full_command(job: Job, host: Host | None = None) -> list[str]:
    """The command of a host's ranks: the user's, behind the interpreter if it is a script or module (-m NAME)."""
    words = [job.path_on(host, word) if host else word for word in job.command]
    python = job.python_of(host) if host else job.python
    return [python, *words] if words[0].endswith(".py") or words[0] == "-m" else words


def resume_command(command: Sequence[str], run: str, same_world: bool) -> tuple[str, ...]:
    """The command that resumes a run. The run's folder has its settings; those that were given beside them are kept."""
    kept = [word for word in command[1:] if "=" in word and not word.startswith(("-", "run.dir=", "run.name="))]
    if not same_world:  # shares were given for other ranks: plan again
        kept = [word for word in kept if not word.startswith(("plan.shares=", "plan.micro_batch_sizes="))]
        kept += ["plan.shares=null", "plan.micro_batch_sizes=null"]
    return (command[0], "--resume", run, *kept)


def ports_of(job: Job) -> dict[str, list[int]]:
    """The ports that each host's ranks will listen at."""
    if job.backend == "ring":
        counts = [host.slots * max(1, len(host.addresses)) for host in job.hosts]
    else:
        counts = [1 if job.backend != "mpi" and index == 0 else 0 for index in range(len(job.hosts))]
    first = itertools.accumulate(counts, initial=job.starting_port)
    return {
        host.name: list(range(start, start + count))
        for host, start, count in zip(job.hosts, first, counts, strict=False)
    }


def rank_commands(job: Job) -> list[RankCommand]:
    """The processes of a start, in rank order; with mpi: mpirun on the first host, and a connection to each other one.

    Raises UserError: the name of a host does not resolve to an IPv4 address.
    """
    given = {"PYTHONUNBUFFERED": "1", **job.environment}
    if job.backend == "mpi":
        files = {"hostfile": hostfile.to_text(job.hosts)}
        mpirun = RankCommand(job.hosts[0], None, tuple(_mpirun(job, given)), given, files)
        return [mpirun, *(RankCommand(host, None, (), {}) for host in job.hosts[1:])]
    common, files = _addresses(job)
    commands: list[RankCommand] = []
    for host in job.hosts:
        for local_rank in range(host.slots):
            variables = {**common, "MLX_RANK": str(len(commands))} if job.size > 1 else {}
            if job.backend == "nccl":
                variables["CUDA_VISIBLE_DEVICES"] = str(local_rank)
            variables |= hostfile.environment(host.environment, host.name) | given  # --env wins
            commands.append(RankCommand(host, len(commands), tuple(full_command(job, host)), variables, files))
    return commands


def _addresses(job: Job) -> tuple[dict[str, str], dict[str, str]]:
    """Where ranks find each other: variables for all of them, and the file that one of these names."""
    hosts = job.hosts
    if job.size == 1:
        return {}, {}
    if job.backend == "ring":
        return {"MLX_HOSTFILE": f"{FOLDER}/hosts.json"}, {"hosts.json": json.dumps(_ring(job))}
    first = hostfile.address(hosts[0], hosts)
    if job.backend in RDMA_BACKENDS:
        variables = {"MLX_JACCL_COORDINATOR": f"{first}:{job.starting_port}"}
        variables |= {"MLX_IBV_DEVICES": f"{FOLDER}/hosts.json"}
        variables |= {"MLX_JACCL_RING": "1"} if job.backend == "jaccl-ring" else {}
        return variables, {"hosts.json": json.dumps(rdma_matrix(hosts))}
    return {"NCCL_HOST_IP": first, "NCCL_PORT": str(job.starting_port), "MLX_WORLD_SIZE": str(job.size)}, {}


def _ring(job: Job) -> list[list[str]]:
    """For every rank the ADDRESS:PORT at which it listens: one for each address of its host."""
    ring: list[list[str]] = []
    ports = itertools.count(job.starting_port)
    for host in job.hosts:
        addresses = host.addresses or (hostfile.address(host, job.hosts),)
        ring += [[f"{address}:{next(ports)}" for address in addresses] for _ in range(host.slots)]
    return ring


def _mpirun(job: Job, environment: Mapping[str, str]) -> list[str]:
    words = [str(Path(job.python).parent / "mpirun"), "--hostfile", f"{FOLDER}/hostfile", "-n", str(job.size)]
    # Without "slot", a default policy of :oversubscribe puts all ranks on the first host.
    words += ["--map-by", "slot:oversubscribe", "--bind-to", "none", "--wdir", job.directory, "--output", "tag"]
    for name in (*environment, "TANDEM_KEY", "TANDEM_HEARTBEAT"):
        words += ["-x", name]
    return [*words, *job.mpi_arguments, *full_command(job)]


# ---- RDMA


def rdma_matrix(hosts: Sequence[Host]) -> list[list[Devices]]:
    """Each host's devices towards each other host: null, a name, or a list of names, one for every cable.

    A host file lists them by its own order; of hosts that go on without the others only their columns remain.
    """
    columns = [index if host.index is None else host.index for index, host in enumerate(hosts)]
    return [[host.rdma[column] if column < len(host.rdma) else None for column in columns] for host in hosts]
