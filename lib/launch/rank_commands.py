"""A job: which command runs on which hosts, and by which variables and files its ranks find each other. Pure.

Contracts: MLX_HOSTFILE and MLX_RANK (ring); MLX_IBV_DEVICES, MLX_JACCL_COORDINATOR and MLX_RANK (jaccl), with
MLX_JACCL_RING (jaccl-ring); NCCL_HOST_IP, NCCL_PORT, MLX_WORLD_SIZE and MLX_RANK (nccl); Open MPI's own (mpi).
"""

from __future__ import annotations

import itertools
import json
import re
import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from lib.environment import ROOT
from lib.errors import UserError
from lib.launch import hostfile
from lib.launch.hostfile import Host

RDMA_BACKENDS = ("jaccl", "jaccl-ring")  # over Thunderbolt 5; the second without a cable between every two
FOLDER = "{folder}"  # in commands and variables of a RankCommand: where its files are on the host


@dataclass(frozen=True)
class Job:
    """What ./launch was asked for; directory and python: of the hosts that name no other; typed: all its words."""

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
    typed: tuple[str, ...] = ()

    @property
    def host_names(self) -> list[str]:
        """Of every rank."""
        return [host.name for host in self.hosts for _ in range(host.slots)]

    @property
    def size(self) -> int:
        """Ranks in all."""
        return len(self.host_names)

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

    def full_command(self, host: Host | None = None) -> list[str]:
        """The command of a host's ranks: the user's, after the interpreter if it is a script or module (-m NAME)."""
        words = [self.path_on(host, word) if host else word for word in self.command]
        python = self.python_of(host) if host else self.python
        return [python, *words] if words[0].endswith(".py") or words[0] == "-m" else words

    def launch_line(self, *options: str, command: Sequence[str] | None = None) -> str:
        """The launcher's command line, with further options, or for another command."""
        cut = self.typed.index("--") if "--" in self.typed else len(self.typed)
        rest = self.typed[cut:] if command is None else ["--", *command]
        return shlex.join(["./launch", *self.typed[:cut], *options, *rest])


def resume_command(command: Sequence[str], run: str, same_world: bool) -> tuple[str, ...]:
    """The command that resumes a run. The run's folder has its settings; those that were given beside them are kept."""
    overrides = [word for word in command[1:] if "=" in word and not word.startswith(("-", "run.dir=", "run.name="))]
    if not same_world:  # shares were given for other ranks: plan again
        overrides = [word for word in overrides if not word.startswith(("plan.shares=", "plan.micro_batch_sizes="))]
        overrides += ["plan.shares=null", "plan.micro_batch_sizes=null"]
    return (command[0], "--resume", run, *overrides)


# ---- How ranks find each other


@dataclass(frozen=True)
class RankCommand:
    """A process to start on a host; rank None: mpirun, or a host where mpirun starts the ranks."""

    host: Host
    rank: int | None
    command: tuple[str, ...]  # empty: start nothing, but hold the connection
    environment: Mapping[str, str]
    files: Mapping[str, str] = field(default_factory=dict)  # text by name


def ring_addresses(job: Job, host: Host) -> tuple[str, ...]:
    """A host's addresses in a ring: MLX wants as many of each host. Raises UserError: its name does not resolve."""
    count = min(max(1, len(each.addresses)) for each in job.hosts)
    return host.addresses[:count] or (hostfile.address(host, job.hosts),)


def ports_of(job: Job) -> dict[str, list[int]]:
    """The ports at which each host's ranks will listen; with ring, one for each address of every rank."""
    if job.backend == "ring":
        counts = [host.slots * max(1, len(host.addresses)) for host in job.hosts]
    else:
        counts = [int(job.backend != "mpi" and host == job.hosts[0]) for host in job.hosts]
    ports = itertools.count(job.starting_port)
    return {host.name: [next(ports) for _ in range(count)] for host, count in zip(job.hosts, counts, strict=True)}


def rank_commands(job: Job) -> list[RankCommand]:
    """The processes of a start, in rank order; with mpi: mpirun on the first host, and a connection to each other one.
    Raises UserError: the name of a host does not resolve to an IPv4 address."""
    variables_of_all = {"PYTHONUNBUFFERED": "1", **job.environment}
    if job.backend == "mpi":
        files = {"hostfile": hostfile.to_text(job.hosts)}
        mpirun = RankCommand(job.hosts[0], None, tuple(_mpirun(job, variables_of_all)), variables_of_all, files)
        return [mpirun, *(RankCommand(host, None, (), {}) for host in job.hosts[1:])]
    common, files = _addresses(job) if job.size > 1 else ({}, {})
    commands: list[RankCommand] = []
    for host in job.hosts:
        for local_rank in range(host.slots):
            variables = {**common, "MLX_RANK": str(len(commands))} if job.size > 1 else {}
            if job.backend == "nccl":
                variables["CUDA_VISIBLE_DEVICES"] = str(local_rank)
            variables |= hostfile.environment(host.environment, host.name) | variables_of_all  # --env wins
            commands.append(RankCommand(host, len(commands), tuple(job.full_command(host)), variables, files))
    return commands


def _addresses(job: Job) -> tuple[dict[str, str], dict[str, str]]:
    """Where ranks find each other: variables for all of them, and the file that one of these names."""
    hosts = job.hosts
    if job.backend == "ring":
        ring: list[list[str]] = []  # of every rank the ADDRESS:PORT at which it listens, for each address of its host
        for host in hosts:
            addresses, ports = ring_addresses(job, host), iter(ports_of(job)[host.name])
            ring += [[f"{address}:{next(ports)}" for address in addresses] for _ in range(host.slots)]
        return {"MLX_HOSTFILE": f"{FOLDER}/hosts.json"}, {"hosts.json": json.dumps(ring)}
    first = hostfile.address(hosts[0], hosts)
    if job.backend == "nccl":
        return {"NCCL_HOST_IP": first, "NCCL_PORT": str(job.starting_port), "MLX_WORLD_SIZE": str(job.size)}, {}
    variables = {"MLX_JACCL_COORDINATOR": f"{first}:{job.starting_port}", "MLX_IBV_DEVICES": f"{FOLDER}/hosts.json"}
    variables |= {"MLX_JACCL_RING": "1"} if job.backend == "jaccl-ring" else {}
    # Devices towards each other host, in the file's order: of hosts that go on without others their columns remain.
    columns = [index if host.index is None else host.index for index, host in enumerate(hosts)]
    return variables, {"hosts.json": json.dumps([[host.rdma[column] for column in columns] for host in hosts])}


def _mpirun(job: Job, environment: Mapping[str, str]) -> list[str]:
    words = [str(Path(job.python).parent / "mpirun"), "--hostfile", f"{FOLDER}/hostfile", "-n", str(job.size)]
    # Without "slot", a default policy of :oversubscribe puts all ranks on the first host.
    words += ["--map-by", "slot:oversubscribe", "--bind-to", "none", "--wdir", job.directory, "--output", "tag"]
    words += [word for name in (*environment, "TANDEM_KEY", "TANDEM_HEARTBEAT") for word in ("-x", name)]
    return [*words, *job.mpi_arguments, *job.full_command()]


# ---- Job files of schedulers: we write them and never schedule


def scheduler_file(job: Job, kind: str) -> str:
    """The file of a job: `slurm`, an sbatch script; or `mpijob`, a kubeflow.org/v2beta1 MPIJob with a worker a host, as
    JSON, which is YAML; the user names its image. The ranks learn their world from Open MPI. Raises UserError: the
    hosts have unequal slots, which neither can ask for."""
    slots, *others = sorted({host.slots for host in job.hosts})
    if others:
        raise UserError(f"--emit {kind}: hosts have {slots} to {others[-1]} slots; a job has as many on each")
    variables = {"PYTHONUNBUFFERED": "1", **job.environment}
    # Without Slurm's own task launcher, which knows no Open MPI: mpirun takes nodes and tasks from Slurm.
    mpirun = [str(Path(job.python).parent / "mpirun"), "--map-by", "slot:oversubscribe", "--bind-to", "none"]
    mpirun += [word for name in variables for word in ("-x", name)]
    if kind == "slurm":
        exports = "".join(f"export {name}={shlex.quote(value)}\n" for name, value in variables.items())
        return f"""#!/bin/bash
#SBATCH --job-name=tandem
#SBATCH --nodes={len(job.hosts)}
#SBATCH --ntasks-per-node={slots}
#SBATCH --output=tandem-%j.log
#SBATCH --signal=B:TERM@60

set -euo pipefail
cd {shlex.quote(job.directory)}
{exports}exec {shlex.join(mpirun)} \\
  {shlex.join(job.full_command())}
"""
    worker = {"name": "tandem", "image": "IMAGE-WITH-TANDEM", "workingDir": job.directory}
    words = [*mpirun, "-n", str(job.size), "--wdir", job.directory, *job.full_command()]
    launcher = {**worker, "command": words, "env": [{"name": name, "value": text} for name, text in variables.items()]}
    specs = {
        name: {"replicas": count, "template": {"spec": {"containers": [container]}}}
        for name, count, container in (("Launcher", 1, launcher), ("Worker", len(job.hosts), worker))
    }
    policy = {"slotsPerWorker": slots, "runPolicy": {"cleanPodPolicy": "Running"}, "mpiReplicaSpecs": specs}
    whole = {"apiVersion": "kubeflow.org/v2beta1", "kind": "MPIJob", "metadata": {"name": "tandem"}, "spec": policy}
    return json.dumps(whole, indent=2) + "\n"
