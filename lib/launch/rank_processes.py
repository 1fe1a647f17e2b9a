"""The processes of a world: for every host the commands, variables and files by which its ranks find each other. Pure.

Contracts: MLX_HOSTFILE and MLX_RANK (ring); MLX_IBV_DEVICES, MLX_JACCL_COORDINATOR and MLX_RANK (jaccl), and
MLX_JACCL_RING (jaccl-ring); NCCL_HOST_IP, NCCL_PORT, MLX_WORLD_SIZE and MLX_RANK (nccl); Open MPI's own (mpi).
lib/system/mpi_and_blas.py reads them.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from lib.launch import hostfile, topology
from lib.launch.agent_messages import RankProcess
from lib.launch.job import Job, full_command

HostWork = tuple[list[RankProcess], dict[str, str]]  # a host's processes; files that they read: text by name


def processes_of(job: Job, folders: Sequence[str]) -> list[HostWork]:
    """For every host its processes, and the files that they read in that host's folder."""
    if job.backend == "mpi":
        return _mpirun(job, folders[0])
    common, file_variable, files = _addresses(job)
    command = full_command(job)
    work: list[HostWork] = []
    rank = 0
    for host, folder in zip(job.hosts, folders, strict=True):
        processes: list[RankProcess] = []
        for local_rank in range(host.slots):
            own = {"MLX_RANK": str(rank)} if job.size > 1 else {}
            if file_variable:
                own[file_variable] = f"{folder}/hosts.json"
            if job.backend == "nccl":
                own["CUDA_VISIBLE_DEVICES"] = str(local_rank)
            # The user's own come last: who sets CUDA_VISIBLE_DEVICES means it.
            variables = {**common, **own, **_environment(job)}
            processes.append({"rank": rank, "command": command, "environment": variables})
            rank += 1
        work.append((processes, files))
    return work


def _environment(job: Job) -> dict[str, str]:
    return {"PYTHONUNBUFFERED": "1", **job.environment}


def _addresses(job: Job) -> tuple[dict[str, str], str, dict[str, str]]:
    """Where ranks find each other: variables for all of them, the variable that names a file, and that file."""
    hosts, port = job.hosts, job.starting_port
    if job.size == 1:
        return {}, "", {}
    if job.backend == "ring":
        return {}, "MLX_HOSTFILE", {"hosts.json": json.dumps(_ring(job))}
    first = hostfile.address(hosts[0], hosts)
    if job.backend in topology.RDMA_BACKENDS:
        files = {"hosts.json": json.dumps(topology.rdma_matrix(hosts))}
        ring = {"MLX_JACCL_RING": "1"} if job.backend == "jaccl-ring" else {}
        return {"MLX_JACCL_COORDINATOR": f"{first}:{port}", **ring}, "MLX_IBV_DEVICES", files
    return {"NCCL_HOST_IP": first, "NCCL_PORT": str(port), "MLX_WORLD_SIZE": str(job.size)}, "", {}


def _ring(job: Job) -> list[list[str]]:
    """For every rank the ADDRESS:PORT at which it listens: one for each connection of each address of its host."""
    ring: list[list[str]] = []
    port = job.starting_port
    for host in job.hosts:
        addresses = host.addresses or (hostfile.address(host, job.hosts),)
        for _ in range(host.slots):
            listeners = [address for address in addresses for _ in range(job.connections_per_ip)]
            ring.append([f"{address}:{port + index}" for index, address in enumerate(listeners)])
            port += len(listeners)
    return ring


def _mpirun(job: Job, folder: str) -> list[HostWork]:
    """The first host's agent starts mpirun, and mpirun a rank of ours on every slot, joined to its host's agent."""
    environment = _environment(job)
    mpirun = str(Path(job.python).parent / "mpirun")
    words = [mpirun, "--hostfile", f"{folder}/hostfile", "-n", str(job.size)]
    # Without "slot", a default policy of :oversubscribe puts all ranks on the first host.
    words += ["--map-by", "slot:oversubscribe", "--bind-to", "none", "--wdir", job.directory]
    if job.connections_per_ip > 1:
        words += ["--mca", "btl_tcp_links", str(job.connections_per_ip)]
    for name in (*environment, "TANDEM_AGENT"):
        words += ["-x", name]
    words += [*job.mpi_arguments, job.python, "-m", "lib.agent", "rank", "--", *full_command(job)]
    allowed = {f"{prefix}_ALLOW_RUN_AS_ROOT{suffix}": "1" for prefix in ("OMPI", "PRTE") for suffix in ("", "_CONFIRM")}
    files = {"hostfile": hostfile.to_text(job.hosts)}
    starter: RankProcess = {"rank": None, "command": words, "environment": {**allowed, **environment}}
    return [([starter] if index == 0 else [], files) for index in range(len(job.hosts))]
