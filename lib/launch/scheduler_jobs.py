"""Job files that run the same training under a scheduler: Slurm, and Kubernetes' MPI operator.

We write the file and never schedule: the ranks learn their world from Open MPI, as without a scheduler.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path

from lib.errors import UserError
from lib.launch.hostfile import Host


def slurm(
    hosts: Sequence[Host], command: Sequence[str], environment: Mapping[str, str], directory: str, python: str
) -> str:
    """An sbatch script: as many nodes as hosts, as many tasks as slots; mpirun takes both from Slurm.

    Raises:
        UserError: the hosts have unequal slots, which one Slurm job cannot ask for.
    """
    slots = sorted({host.slots for host in hosts})
    if len(slots) > 1:
        raise UserError(
            f"--emit slurm: hosts have {slots[0]} to {slots[-1]} slots; one Slurm job has as many tasks on every node"
        )
    mpirun = Path(python).parent / "mpirun"
    lines = [
        "#!/bin/bash",
        "#SBATCH --job-name=tandem",
        f"#SBATCH --nodes={len(hosts)}",
        f"#SBATCH --ntasks-per-node={slots[0]}",
        "#SBATCH --output=tandem-%j.log",
        "#SBATCH --signal=B:TERM@60",
        "",
        "set -euo pipefail",
        f"cd {shlex.quote(directory)}",
        *(f"export {name}={shlex.quote(value)}" for name, value in environment.items()),
        # Slurm's own task launcher would start ranks that know no Open MPI.
        f"exec {shlex.quote(str(mpirun))} --map-by slot:oversubscribe --bind-to none \\",
        *(f"  -x {name} \\" for name in environment),
        f"  {shlex.join(command)}",
    ]
    return "\n".join(lines) + "\n"


def mpijob(
    hosts: Sequence[Host], command: Sequence[str], environment: Mapping[str, str], directory: str, python: str
) -> str:
    """An MPIJob (kubeflow.org/v2beta1) with a worker a host, as JSON, which is YAML; the image is for the user to name.

    Raises:
        UserError: the hosts have unequal slots, which one MPIJob cannot ask for.
    """
    slots = sorted({host.slots for host in hosts})
    if len(slots) > 1:
        raise UserError(f"--emit mpijob: hosts have {slots[0]} to {slots[-1]} slots; one MPIJob has one slotsPerWorker")
    words = [str(Path(python).parent / "mpirun"), "-n", str(len(hosts) * slots[0]), "--map-by", "slot:oversubscribe"]
    words += ["--bind-to", "none", "--wdir", directory]
    words += [*(word for name in environment for word in ("-x", name)), *command]
    variables = [{"name": name, "value": value} for name, value in environment.items()]

    def replica(count: int, own: Mapping[str, object]) -> dict[str, object]:
        container = {"name": "tandem", "image": "IMAGE-WITH-TANDEM", "workingDir": directory, **own}
        return {"replicas": count, "template": {"spec": {"containers": [container]}}}

    job = {
        "apiVersion": "kubeflow.org/v2beta1",
        "kind": "MPIJob",
        "metadata": {"name": "tandem"},
        "spec": {
            "slotsPerWorker": slots[0],
            "runPolicy": {"cleanPodPolicy": "Running"},
            "mpiReplicaSpecs": {
                "Launcher": replica(1, {"command": words, "env": variables}),
                "Worker": replica(len(hosts), {}),
            },
        },
    }
    return json.dumps(job, indent=2) + "\n"
