"""Job files that run the same training under a scheduler: Slurm, and Kubernetes' MPI operator.

We write the file and never schedule: the ranks learn their world from Open MPI, as without a scheduler.
"""

from __future__ import annotations

import json
import shlex
from pathlib import Path

from lib.errors import UserError
from lib.launch import job as jobs
from lib.launch.job import Job


def job_file(job: Job, kind: str) -> str:
    """The file of a job for `slurm` or `mpijob`.

    Raises UserError: the hosts have unequal slots, which neither can ask for.
    """
    slots = {host.slots for host in job.hosts}
    if len(slots) > 1:
        raise UserError(f"--emit {kind}: hosts have {min(slots)} to {max(slots)} slots; a job has as many on each")
    variables = {"PYTHONUNBUFFERED": "1", **job.environment}
    words = [str(Path(job.python).parent / "mpirun"), "--map-by", "slot:oversubscribe", "--bind-to", "none"]
    words += [word for name in variables for word in ("-x", name)]
    make = {"slurm": _slurm, "mpijob": _mpijob}[kind]
    return make(job, slots.pop(), words, variables)


def _slurm(job: Job, slots: int, mpirun: list[str], variables: dict[str, str]) -> str:
    """An sbatch script; mpirun takes nodes and tasks from Slurm, whose own task launcher knows no Open MPI."""
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
  {shlex.join(jobs.full_command(job))}
"""


def _mpijob(job: Job, slots: int, mpirun: list[str], variables: dict[str, str]) -> str:
    """An MPIJob (kubeflow.org/v2beta1) with a worker a host, as JSON, which is YAML; the user names the image."""
    words = [*mpirun, "-n", str(len(job.hosts) * slots), "--wdir", job.directory, *jobs.full_command(job)]
    worker = {"name": "tandem", "image": "IMAGE-WITH-TANDEM", "workingDir": job.directory}
    environment = [{"name": name, "value": value} for name, value in variables.items()]
    launcher = {**worker, "command": words, "env": environment}
    specs = {
        kind: {"replicas": count, "template": {"spec": {"containers": [container]}}}
        for kind, count, container in (("Launcher", 1, launcher), ("Worker", len(job.hosts), worker))
    }
    policy = {"slotsPerWorker": slots, "runPolicy": {"cleanPodPolicy": "Running"}, "mpiReplicaSpecs": specs}
    whole = {"apiVersion": "kubeflow.org/v2beta1", "kind": "MPIJob", "metadata": {"name": "tandem"}, "spec": policy}
    return json.dumps(whole, indent=2) + "\n"
