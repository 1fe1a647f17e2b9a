"""A job: which command runs on which hosts, and how, as the words of ./launch ask for it."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from lib.environment import ROOT
from lib.launch.hostfile import Host


@dataclass(frozen=True)
class Job:
    """What ./launch was asked for."""

    hosts: tuple[Host, ...]
    backend: str
    command: tuple[str, ...]
    environment: Mapping[str, str] = field(default_factory=dict)
    directory: str = str(ROOT)  # of the project, on the hosts
    python: str = sys.executable  # on the hosts
    connections_per_ip: int = 1
    starting_port: int = 32323
    mpi_arguments: tuple[str, ...] = ()
    nice: int | None = None
    silent_seconds: float = 10.0
    wedged_seconds: float = 600.0
    typed: tuple[str, ...] = ()  # the words after ./launch, to be printed again

    @property
    def size(self) -> int:
        """Ranks in all."""
        return sum(host.slots for host in self.hosts)


def ports_of(job: Job) -> dict[str, list[int]]:
    """The ports that each host's ranks will listen at."""
    if job.backend == "ring":
        counts = [host.slots * max(1, len(host.addresses)) * job.connections_per_ip for host in job.hosts]
    else:
        counts = [1 if job.backend != "mpi" and index == 0 else 0 for index in range(len(job.hosts))]
    first = itertools.accumulate([job.starting_port, *counts[:-1]])
    return {
        host.name: list(range(start, start + count))
        for host, start, count in zip(job.hosts, first, counts, strict=True)
    }


def next_port(job: Job) -> int:
    """The first port beyond those where its ranks listen."""
    return max(itertools.chain.from_iterable(ports_of(job).values()), default=job.starting_port - 1) + 1


def full_command(job: Job) -> list[str]:
    """The command of every rank: the user's, behind the interpreter if it is a Python script or module (-m NAME)."""
    words = list(job.command)
    return [job.python, *words] if words[0].endswith(".py") or words[0] == "-m" else words


def resume_command(command: Sequence[str], run: str, same_world: bool) -> tuple[str, ...]:
    """The command that resumes a run. The run's folder has its settings; those that were given beside them are kept."""
    kept = [word for word in command[1:] if "=" in word and not word.startswith(("-", "run.dir=", "run.name="))]
    if not same_world:  # shares were given for other ranks: plan again
        kept = [word for word in kept if not word.startswith(("plan.shares=", "plan.micro_batch_sizes="))]
        kept += ["plan.shares=null", "plan.micro_batch_sizes=null"]
    return (command[0], "--resume", run, *kept)


def local_run_folder(job: Job, run: str) -> Path:
    """Where this machine keeps a run that the hosts have at `run`: the same place in the project, or the same path."""
    folder = Path(run)
    inside = folder.is_relative_to(job.directory)
    return ROOT / folder.relative_to(job.directory) if inside else folder
