"""What is started where: the command line's wishes and the hosts ➜ every host's processes, and the files that they read."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lib.launch import hostfile, topology
from lib.launch.hostfile import Host

ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class Launching:
    """What the command line asks for."""

    hosts: tuple[Host, ...]
    backend: str
    command: tuple[str, ...]
    environment: Mapping[str, str] = field(default_factory=dict)
    directory: str = str(ROOT)
    python: str = sys.executable
    connections_per_ip: int = 1
    starting_port: int = 32323
    mpi_arguments: tuple[str, ...] = ()
    nice: int | None = None
    silent_seconds: float = 10.0
    wedged_seconds: float = 600.0
    typed: tuple[str, ...] = ()  # the launcher's own words, to be printed again

    @property
    def size(self) -> int:
        return sum(host.slots for host in self.hosts)


# ---- What is started where: pure


def processes_of(launching: Launching, folders: Sequence[str]) -> list[tuple[list[dict[str, Any]], dict[str, str]]]:
    """For every host its processes, and the files that they read in that host's folder.

    Contracts: MLX_HOSTFILE and MLX_RANK (ring); MLX_IBV_DEVICES, MLX_JACCL_COORDINATOR and MLX_RANK (jaccl), and
    MLX_JACCL_RING (jaccl-ring); NCCL_HOST_IP, NCCL_PORT, MLX_WORLD_SIZE and MLX_RANK (nccl); Open MPI's own (mpi).
    lib/system/mpi_and_blas.py reads them.
    """
    hosts, port = launching.hosts, launching.starting_port
    environment = {"PYTHONUNBUFFERED": "1", **launching.environment}
    command = as_command(launching)
    if launching.backend == "mpi":
        return _mpi(launching, folders[0], environment, command)
    common: dict[str, str] = {}
    files: dict[str, str] = {}
    listed = ""  # the variable that names the file
    if launching.size > 1 and launching.backend == "ring":
        ring: list[list[str]] = []
        for host in hosts:
            for _ in range(host.slots):
                ring.append([])
                for link in host.addresses or (hostfile.address(host, hosts),):
                    for _ in range(launching.connections_per_ip):
                        ring[-1].append(f"{link}:{port}")
                        port += 1
        files, listed = {"hosts.json": json.dumps(ring)}, "MLX_HOSTFILE"
    elif launching.size > 1 and launching.backend in topology.RDMA_BACKENDS:
        files, listed = {"hosts.json": json.dumps(topology.rdma_matrix(hosts))}, "MLX_IBV_DEVICES"
        common = {"MLX_JACCL_COORDINATOR": f"{hostfile.address(hosts[0], hosts)}:{port}"}
        if launching.backend == "jaccl-ring":
            common["MLX_JACCL_RING"] = "1"
    elif launching.size > 1:
        common = {
            "NCCL_HOST_IP": hostfile.address(hosts[0], hosts),
            "NCCL_PORT": str(port),
            "MLX_WORLD_SIZE": str(launching.size),
        }
    found, rank = [], 0
    for host, folder in zip(hosts, folders, strict=True):
        processes = []
        for local_rank in range(host.slots):
            own = {"MLX_RANK": str(rank)} if launching.size > 1 else {}
            if listed:
                own[listed] = f"{folder}/hosts.json"
            if launching.backend == "nccl":
                own["CUDA_VISIBLE_DEVICES"] = str(local_rank)
            # The user's own come last: who sets CUDA_VISIBLE_DEVICES means it.
            variables = {**common, **own, **environment}
            processes.append({"rank": rank, "command": command, "environment": variables})
            rank += 1
        found.append((processes, files))
    return found


def _mpi(
    launching: Launching, folder: str, environment: dict[str, str], command: list[str]
) -> list[tuple[list[dict[str, Any]], dict[str, str]]]:
    """The first host's agent starts mpirun, and mpirun a rank of ours on every slot, joined to its host's agent."""
    words = [
        str(Path(launching.python).parent / "mpirun"),
        "--hostfile",
        f"{folder}/hostfile",
        "-n",
        str(launching.size),
    ]
    # Without "slot", a default policy of :oversubscribe puts all ranks on the first host.
    words += ["--map-by", "slot:oversubscribe", "--bind-to", "none", "--wdir", launching.directory]
    if launching.connections_per_ip > 1:
        words += ["--mca", "btl_tcp_links", str(launching.connections_per_ip)]
    for name in (*environment, "TANDEM_AGENT"):
        words += ["-x", name]
    words += [*launching.mpi_arguments, launching.python, "-m", "lib.agent", "rank", "--"]
    allowed = {f"{prefix}_ALLOW_RUN_AS_ROOT{suffix}": "1" for prefix in ("OMPI", "PRTE") for suffix in ("", "_CONFIRM")}
    files = {"hostfile": hostfile.to_text(launching.hosts)}
    first = {"rank": None, "command": [*words, *command], "environment": {**allowed, **environment}}
    return [([first] if index == 0 else [], files) for index in range(len(launching.hosts))]


def resumed(command: Sequence[str], run: str, same_world: bool) -> tuple[str, ...]:
    """The command that goes on with a run: its own settings are in its folder, what was changed beside them stays."""
    kept = [word for word in command[1:] if "=" in word and not word.startswith(("-", "run."))]
    if not same_world:  # shares were given for other ranks: plan again
        kept = [word for word in kept if not word.startswith(("plan.shares=", "plan.micro_batch_sizes="))]
        kept += ["plan.shares=null", "plan.micro_batch_sizes=null"]
    return (command[0], "--resume", run, *kept)


def as_command(launching: Launching) -> list[str]:
    """The user's command, a Python script or module (-m NAME) after the interpreter."""
    words = list(launching.command)
    return [launching.python, *words] if words[0].endswith(".py") or words[0] == "-m" else words
