"""What `make doctor` tries on this machine: one function for each check, each with its limit and its remedy."""

from __future__ import annotations

import contextlib
import functools
import io
import json
import os
import platform
import re
import shlex
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import NamedTuple, TypedDict

from lib.config import settings
from lib.errors import UserError
from lib.launch import host_facts
from lib.launch.job import ROOT
from lib.launch.preflight_verdicts import FULL_DISK_ACCESS, NOT_PERMITTED, PRIVATE_FOLDER, gigabytes
from lib.launch.ssh import ssh_remedy
from lib.system import hardware, metal, mpi_and_blas, os_commands

SETUP = "make -B setup"
LEAST_PYTHON = (3, 11)
FREE_BYTES = 2 * 10**9  # with less, even the quickstart is tight
SYSTEM_BYTES = 8 * 2**30  # what macOS wants for itself beside wired memory
LAUNCHED = ("OMPI_COMM_WORLD", "PMIX_", "MLX_RANK", "MLX_HOSTFILE", "MLX_WORLD_SIZE", "MLX_IBV_DEVICES", "TANDEM_")


class Result(NamedTuple):
    """What a check found. status: ok, note (training goes on, but it is worth knowing), failed."""

    status: str
    message: str
    remedy: str = ""  # a command
    note: str = ""  # what to know of it


class MLXProbe(TypedDict, total=False):
    """What MLX computes on, how fast, and how much memory it may have; empty until it is known."""

    device: str
    name: str
    dtype: str
    flops_per_second: float
    limit_bytes: int | None


class Ended(NamedTuple):
    """How a process ended; status None: it was killed at its limit."""

    status: int | None
    output: str
    last_line: str  # that says why, of its standard error, or else of its output


class Check(NamedTuple):
    """One thing to try: its name, whether training here needs it, its limit, and how."""

    name: str
    needed: bool
    limit_seconds: float
    examine: Callable[[float], Result | None]  # the limit ➜ what was found; None: there is no such thing here


def all_checks() -> list[Check]:
    """In the order of the page. `compute` comes before `memory`, which reports what MLX said there."""
    probe: MLXProbe = {}
    return [
        Check("python", True, 10, check_python),
        Check("packages", True, 10, check_packages),
        Check("compute", True, 120, functools.partial(check_compute, probe)),
        Check("memory", True, 20, functools.partial(check_memory, probe)),
        Check("wired limit", False, 10, check_wired_limit),
        Check("mpi", False, 45, check_mpi),
        Check("ring", False, 45, check_ring),
        Check("display", False, 20, check_display),
        Check("power", False, 10, check_power),
        Check("disk", True, 20, check_disk),
        Check("folder", False, 5, check_folder),
        Check("ssh", False, 20, check_ssh),
        Check("calibration", False, 10, check_calibration),
    ]


def check_python(limit_seconds: float) -> Result:
    """Python's version, and that it is the one of .venv."""
    version = platform.python_version()
    if sys.version_info < LEAST_PYTHON:
        return Result("failed", f"{version}, and 3.11 is the oldest that will do", "make setup PYTHON=python3.12")
    if hardware.is_translated():
        message = f"{version} for Intel, under Rosetta: MLX finds no GPU so"
        return Result("failed", message, "make -B setup PYTHON=/opt/homebrew/bin/python3", "or python.org's Python")
    if Path(sys.prefix).resolve() != (ROOT / ".venv").resolve():
        return Result("note", f"{version}, not this project's environment ({sys.prefix})", "make setup")
    return Result("ok", f"{version} {platform.machine()}, in .venv")


def check_packages(limit_seconds: float) -> Result:
    """The packages' versions, against constraints.txt."""
    wanted = pinned((ROOT / "constraints.txt").read_text(encoding="utf-8"))
    differ, there = [], []
    for name in host_facts.PACKAGES:
        try:
            version = metadata.version(name)
        except metadata.PackageNotFoundError:
            differ.append(f"{name} is missing")
            continue
        there.append(f"{name} {version}")
        if version != wanted.get(name, version):
            differ.append(f"{name} {version} (constraints.txt: {wanted[name]})")
    if not differ:
        return Result("ok", ", ".join(there))
    is_missing = any(one.endswith("is missing") for one in differ)
    return Result("failed" if is_missing else "note", ", ".join(differ), SETUP)


def check_compute(probe: MLXProbe, limit_seconds: float) -> Result:
    """MLX in a process of its own, which alone ends where it crashes or hangs. Fills in `probe`."""
    ran = run([sys.executable, "-m", "lib.doctor", "probe"], limit_seconds)
    if ran.status != 0:
        return Result("failed", ran.last_line or f"MLX ended with status {ran.status}", SETUP)
    probe.update(json.loads(ran.output.splitlines()[-1]))
    kinds = {"metal": "Metal", "cuda": "CUDA", "cpu": "BLAS on the CPU"}
    rate = f"{probe['flops_per_second'] / 1e9:,.0f} GFLOP/s of {probe['dtype']}"
    message = f"{kinds[probe['device']]}, {probe['name']}: {rate}"
    if probe["device"] == "cpu" and os_commands.is_mac():
        return Result("note", f"{message}; this Mac's GPU is not used", "make -B setup EXTRA=metal")
    if "slow BLAS" in ran.last_line:
        return Result("note", f"{message}; {ran.last_line.removeprefix('warning: ')}", SETUP)
    return Result("ok", message)


def check_memory(probe: MLXProbe, limit_seconds: float) -> Result:
    """Memory in all, what is free, and what MLX may have."""
    total, free = hardware.host_memory_bytes(), hardware.free_memory_bytes()
    parts = [f"{gigabytes(total)} in all" if total else "", f"{gigabytes(free)} free" if free else ""]
    parts.append(f"MLX may have {gigabytes(limit)}" if (limit := probe.get("limit_bytes")) else "")
    message = ", ".join(filter(None, parts)) or "the system does not tell"
    if free is not None and free < FREE_BYTES:
        look = "ps aux | sort -rnk4 | head -5"
        return Result("note", message, look, "end what takes most of it")
    return Result("ok", message)


def check_wired_limit(limit_seconds: float) -> Result | None:
    """On a Mac: how much memory the GPU may wire."""
    if not os_commands.is_mac():
        return None
    limit, total = hardware.wired_limit_bytes(), hardware.host_memory_bytes()
    if limit is None:
        return Result("ok", "the system's own")
    if total and limit > total - SYSTEM_BYTES:
        message = f"{gigabytes(limit)} of {gigabytes(total)}: a Mac out of memory panics"
        return Result("note", message, f"sudo sysctl iogpu.wired_limit_mb={(total - SYSTEM_BYTES) // 2**20}")
    return Result("ok", f"{gigabytes(limit)}, set by hand until the next boot")


def check_mpi(limit_seconds: float) -> Result:
    """Two ranks that mpirun starts add up a number."""
    try:
        words = [str(mpi_and_blas.mpirun_path()), "-n", "2"]
    except UserError as error:
        return Result("failed", str(error), SETUP)
    set_by_hand = os.environ.get("MLX_MPI_LIBNAME")
    with contextlib.redirect_stderr(io.StringIO()):  # what it says of BLAS, `compute` has said
        mpi_and_blas.prepare()
    ran = run([*words, sys.executable, "-m", "lib.launch.sum_check"], limit_seconds, {"TANDEM_RANKS": "2"})
    if ran.status == 0:
        return Result("ok", "two ranks added up")
    note = f"or unset MLX_MPI_LIBNAME, which is {set_by_hand}" if set_by_hand else ""
    return Result("failed", ran.last_line or late(limit_seconds), SETUP, note or "./launch uses ring, not MPI")


def check_ring(limit_seconds: float) -> Result:
    """Two ranks add up a number over MLX's ring, on the loopback."""
    with tempfile.TemporaryDirectory() as folder:
        listed = Path(folder) / "hosts.json"
        listed.write_text(json.dumps([[f"127.0.0.1:{port}"] for port in free_ports(2)]), encoding="utf-8")
        words = [sys.executable, "-m", "lib.launch.sum_check"]
        common = {"TANDEM_RANKS": "2", "MLX_HOSTFILE": str(listed)}
        ends: dict[int, Ended] = {}

        def rank(number: int) -> None:
            ends[number] = run(words, limit_seconds, {**common, "MLX_RANK": str(number)})

        threads = [threading.Thread(target=rank, args=(number,), daemon=True) for number in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    bad = [end for end in ends.values() if end.status != 0]
    if not bad:
        return Result("ok", "two ranks added up over the loopback")
    why = next((end.last_line for end in bad if end.last_line), late(limit_seconds))
    return Result("failed", why, SETUP, "is a firewall on")


def check_display(limit_seconds: float) -> Result | None:
    """On a Mac: whether a display is lit."""
    if not os_commands.is_mac():
        return None
    names = metal.lit(
        os_commands.output(["system_profiler", "SPDisplaysDataType", "-json"], limit_seconds=limit_seconds)
    )
    if not names:
        return Result("ok", "none is lit")
    message = f"{', '.join(names)} lit: macOS may end long GPU work for its sake (mlx#3267)"
    return Result("note", message, "pmset displaysleepnow")


def check_power(limit_seconds: float) -> Result | None:
    """Whether a battery or a mode that saves power slows this machine."""
    power = hardware.power()
    if power is None:
        return None
    if power.saves_power:
        remedy = "sudo pmset -a lowpowermode 0" if os_commands.is_mac() else "powerprofilesctl set balanced"
        return Result("note", power.text, remedy)
    return Result("note" if power.on_battery else "ok", power.text, "", "plug it in" if power.on_battery else "")


def check_disk(limit_seconds: float) -> Result:
    """Room in the runs' folder, and that it can be written."""
    folder = settings.RunSettings().dir
    disk = host_facts.disk(str(ROOT / folder))
    assert disk is not None
    where = disk["folder"]
    if disk["fault"]:
        remedy = f"sudo chown -R $USER {shlex.quote(where)}"
        return Result("failed", f"{where}: {disk['fault']}", remedy, "or another folder: run.dir=ELSEWHERE")
    message = f"{gigabytes(disk['free_bytes'])} free for {folder}"
    if disk["free_bytes"] < FREE_BYTES:
        return Result("note", message, f"du -sh {shlex.quote(where)}", "or another folder: run.dir=ELSEWHERE")
    return Result("ok", message)


def check_folder(limit_seconds: float) -> Result | None:
    """On a Mac: whether ssh may read the project's folder."""
    inside = PRIVATE_FOLDER.match(str(ROOT)) if os_commands.is_mac() else None
    if inside is None:
        return Result("ok", str(ROOT)) if os_commands.is_mac() else None
    message = f"{ROOT}: macOS keeps {Path(inside[2]).parts[0]} from what ssh starts"
    return Result(
        "note",
        message,
        f"mv {shlex.quote(str(ROOT))} ~/{shlex.quote(ROOT.name)}",
        f"then make setup; {FULL_DISK_ACCESS}",
    )


def check_ssh(limit_seconds: float) -> Result:
    """As a launch reaches a host: no password, and the project's interpreter at the other end."""
    options = ["BatchMode=yes", f"ConnectTimeout={limit_seconds / 2:.0f}", "LogLevel=ERROR"]
    options += ["StrictHostKeyChecking=no", "UserKnownHostsFile=/dev/null"]  # ourselves, under whatever name
    words = ["ssh", "-T", *(word for option in options for word in ("-o", option)), "localhost"]
    started = f"cd {shlex.quote(str(ROOT))} && exec {shlex.quote(sys.executable)} -c 'print(2 + 2)'"
    ran = run([*words, started], limit_seconds)
    if ran.status == 0 and ran.output.strip().endswith("4"):
        return Result("ok", "this machine, without a password")
    message = ran.last_line or late(limit_seconds)
    if NOT_PERMITTED.search(message):
        return Result("note", f"{message}: macOS keeps this folder from what ssh starts", "", FULL_DISK_ACCESS)
    if ran.status == 127 and "ssh" in message:
        return Result("note", message, "sudo apt-get install openssh-client", "only several machines need it")
    if "refused" in message:
        start = "sudo systemsetup -setremotelogin on" if os_commands.is_mac() else "sudo systemctl start ssh"
        return Result("note", message, start, "only several machines need it")
    remedy, note = ssh_remedy("localhost", message, os_commands.is_mac())
    return Result("note", message, remedy, "; ".join(filter(None, [note, "only several machines need it"])))


def check_calibration(limit_seconds: float) -> Result:
    """Whether this host is calibrated, lately and with these versions."""
    kept = host_facts.calibrated(str(ROOT / settings.PlanSettings().calibration_dir))
    if kept is None or not kept["there"]:
        return Result("note", "none yet: shares between hosts are estimated", "make calibrate")
    day = str(kept.get("measured_at"))[:10]
    if not kept.get("fresh"):
        return Result("note", f"measured {day}, too old or with other versions", "make calibrate")
    return Result("ok", f"measured {day}")


def probe_mlx() -> MLXProbe:
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
    return {
        "device": device,
        "name": str((facts.get("device_name") if device != "cpu" else None) or hardware.processor_name()),
        "dtype": str(dtype).rpartition(".")[2],
        "flops_per_second": 2 * size**3 / best,
        "limit_bytes": hardware.memory_limit_bytes(),
    }


def pinned(constraints: str) -> dict[str, str]:
    """Versions by package name."""
    return dict(re.findall(r"^([\w.-]+)==([^\s;]+)", constraints, re.MULTILINE))


def telling_line(text: str) -> str:
    """The line of a program's output that says why: an error's, else the last (mpirun ends with its own remarks)."""
    lines = [line.strip() for line in text.splitlines() if line.strip(" -=*\t")]
    errors = [line for line in lines if re.match(r"(\w+\.)*(\w*Error|error|fatal)\b:? ", line)]
    return (errors or lines or [""])[-1]


def late(limit_seconds: float) -> str:
    """The message of a check that did not end in time."""
    return f"no answer within {limit_seconds:g} s"


def run(command: Sequence[str], limit_seconds: float, extra: Mapping[str, str] | None = None) -> Ended:
    """Runs a command in the project's folder, without the variables that a launcher set for this process."""
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(LAUNCHED)}
    done = os_commands.run(command, limit_seconds, ROOT, {**inherited, **(extra or {})})
    return Ended(done.status, done.output, telling_line(done.errors) or telling_line(done.output))


def free_ports(count: int) -> list[int]:
    """Ports of the loopback at which nobody listens."""
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(count)]
        return [one.getsockname()[1] for one in sockets]
