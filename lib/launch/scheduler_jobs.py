"""Job files that run the same training under a scheduler: Slurm, and Kubernetes' MPI operator.

We write the file and never schedule: the ranks learn their world from Open MPI, as without a scheduler.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping
from pathlib import Path

from lib.errors import UserError
from lib.launch import job as jobs
from lib.launch.job import Job


def job_file(job: Job, kind: str) -> str:
    """The file of a job for `slurm` or `mpijob`.

    Raises:
        UserError: the hosts have unequal slots, which neither can ask for.
    """
    slots = sorted({host.slots for host in job.hosts})
    if len(slots) > 1:
        raise UserError(
            f"--emit {kind}: hosts have {slots[0]} to {slots[-1]} slots, but a job has as many on every node"
        )
    variables = {"PYTHONUNBUFFERED": "1", **job.environment}
    return {"slurm": _slurm, "mpijob": _mpijob}[kind](job, slots[0], variables)


def _slurm(job: Job, slots: int, variables: dict[str, str]) -> str:
    """An sbatch script; mpirun takes nodes and tasks from Slurm."""
    lines = [
        "#!/bin/bash",
        "#SBATCH --job-name=tandem",
        f"#SBATCH --nodes={len(job.hosts)}",
        f"#SBATCH --ntasks-per-node={slots}",
        "#SBATCH --output=tandem-%j.log",
        "#SBATCH --signal=B:TERM@60",
        "",
        "set -euo pipefail",
        f"cd {shlex.quote(job.directory)}",
        *(f"export {name}={shlex.quote(value)}" for name, value in variables.items()),
        # Slurm's own task launcher would start ranks that know no Open MPI.
        f"exec {shlex.quote(_mpirun(job))} --map-by slot:oversubscribe --bind-to none \\",
        *(f"  -x {name} \\" for name in variables),
        f"  {shlex.join(jobs.full_command(job))}",
    ]
    return "\n".join(lines) + "\n"


def _mpijob(job: Job, slots: int, variables: dict[str, str]) -> str:
    """An MPIJob (kubeflow.org/v2beta1) with a worker a host, as JSON, which is YAML; the user names the image."""
    words = [_mpirun(job), "-n", str(len(job.hosts) * slots), "--map-by", "slot:oversubscribe", "--bind-to", "none"]
    words += ["--wdir", job.directory, *(word for name in variables for word in ("-x", name))]
    container = {"name": "tandem", "image": "IMAGE-WITH-TANDEM", "workingDir": job.directory}
    environment = [{"name": name, "value": value} for name, value in variables.items()]
    launcher = {**container, "command": [*words, *jobs.full_command(job)], "env": environment}

    def replicas(count: int, of: Mapping[str, object]) -> dict[str, object]:
        return {"replicas": count, "template": {"spec": {"containers": [of]}}}

    specs = {"Launcher": replicas(1, launcher), "Worker": replicas(len(job.hosts), {**container})}
    policy = {"slotsPerWorker": slots, "runPolicy": {"cleanPodPolicy": "Running"}, "mpiReplicaSpecs": specs}
    whole = {"apiVersion": "kubeflow.org/v2beta1", "kind": "MPIJob", "metadata": {"name": "tandem"}, "spec": policy}
    return json.dumps(whole, indent=2) + "\n"


def _mpirun(job: Job) -> str:
    return str(Path(job.python).parent / "mpirun")
