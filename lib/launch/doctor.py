"""Can this machine train? One page that tries each part that training uses, each with ok or its remedy.

    make doctor                      the page; attach it to a report. It names this host, and nobody
    make doctor ARGS="--json"        the same for programs

Exit status: 0 if training can run here, 1 if something that it needs is broken, 2 for words that it does not know. What
only several machines need (MPI, the ring, ssh) or what only slows (a battery) does not change it. Every check has its
limit in seconds.
"""

from __future__ import annotations

import argparse
import contextlib
import getpass
import io
import json
import os
import platform
import re
import shlex
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from typing import Any, NamedTuple

from rich.text import Text

from lib import errors as errors_module
from lib.config import command_line, schema
from lib.launch import host_facts
from lib.launch.ranks import ROOT
from lib.launch.verdicts import ALLOW, PRIVATE, REFUSED, mend_ssh
from lib.system import hardware, metal, mpi_and_blas, network, os_commands, terminal

SETUP = "make -B setup"
LEAST_PYTHON = (3, 11)
FREE_BYTES = 2 * 10**9  # with less, even the quickstart is tight
SYSTEM_BYTES = 8 * 2**30  # what macOS wants for itself beside wired memory
STYLES = {"ok": "green", "note": "bold magenta", "failed": "bold red"}
LAUNCHED = ("OMPI_COMM_WORLD", "PMIX_", "MLX_RANK", "MLX_HOSTFILE", "MLX_WORLD_SIZE", "MLX_IBV_DEVICES", "TANDEM_")


class Result(NamedTuple):
    """What a check found. status: ok, note (training goes on, but it is worth knowing), failed."""

    status: str
    message: str
    remedy: str = ""  # a command
    note: str = ""  # what to know of it


@dataclass(frozen=True)
class Checked:
    """A result under its name. needed: training on this machine alone needs it."""

    check: str
    status: str
    message: str
    remedy: str
    note: str
    needed: bool
    seconds: float


class Run(NamedTuple):
    """How a process ended; status None: it was killed at its limit."""

    status: int | None
    output: str
    last_line: str  # of what it said on its standard error, or else its output


class Check(NamedTuple):
    """One thing to try: its name, whether training here needs it, its limit, and how."""

    name: str
    needed: bool
    limit_seconds: float
    examine: Callable[[float], Result | None]  # the limit ➜ what was found; None: there is no such thing here


# ---- The checks ------------------------------------------------------------------------------------------------------


class Examination:
    """The checks of this machine; those that come later use what `compute` found."""

    def __init__(self) -> None:
        self.probe: dict[str, Any] = {}  # what MLX computes on, its rate and limit

    def checks(self) -> list[Check]:
        """In the order of the page."""
        return [
            Check("python", True, 10, self.python),
            Check("packages", True, 10, self.packages),
            Check("compute", True, 120, self.compute),
            Check("memory", True, 20, self.memory),
            Check("wired limit", False, 10, self.wired_limit),
            Check("mpi", False, 45, self.mpi),
            Check("ring", False, 45, self.ring),
            Check("display", False, 20, self.display),
            Check("power", False, 10, self.power),
            Check("disk", True, 20, self.disk),
            Check("folder", False, 5, self.folder),
            Check("ssh", False, 20, self.ssh),
            Check("calibration", False, 10, self.calibration),
        ]

    def python(self, limit_seconds: float) -> Result:
        version = platform.python_version()
        if sys.version_info < LEAST_PYTHON:
            return Result("failed", f"{version}, and 3.11 is the oldest that will do", "make setup PYTHON=python3.12")
        if hardware.is_translated():
            message = f"{version} for Intel, under Rosetta: MLX finds no GPU so"
            return Result("failed", message, "make -B setup PYTHON=/opt/homebrew/bin/python3", "or python.org's Python")
        if Path(sys.prefix).resolve() != (ROOT / ".venv").resolve():
            return Result("note", f"{version}, not this project's environment ({sys.prefix})", "make setup")
        return Result("ok", f"{version} {platform.machine()}, in .venv")

    def packages(self, limit_seconds: float) -> Result:
        wanted = pinned((ROOT / "constraints.txt").read_text())
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

    def compute(self, limit_seconds: float) -> Result:
        """MLX in a process of its own: what crashes or hangs there ends that one."""
        ran = run([sys.executable, "-m", "lib.doctor", "probe"], limit_seconds)
        if ran.status != 0:
            return Result("failed", ran.last_line or f"MLX ended with status {ran.status}", SETUP)
        self.probe = json.loads(ran.output.splitlines()[-1])
        kinds = {"metal": "Metal", "cuda": "CUDA", "cpu": "BLAS on the CPU"}
        rate = f"{self.probe['flops_per_second'] / 1e9:,.0f} GFLOP/s of {self.probe['dtype']}"
        message = f"{kinds[self.probe['device']]}, {self.probe['name']}: {rate}"
        if self.probe["device"] == "cpu" and os_commands.is_mac():
            return Result("note", f"{message}; this Mac's GPU is not used", "make -B setup EXTRA=metal")
        if "slow BLAS" in ran.last_line:
            return Result("note", f"{message}; {ran.last_line.removeprefix('warning: ')}", SETUP)
        return Result("ok", message)

    def memory(self, limit_seconds: float) -> Result:
        total, free = hardware.host_memory_bytes(), hardware.free_memory_bytes()
        parts = [f"{_gb(total)} in all" if total else "", f"{_gb(free)} free" if free else ""]
        parts.append(f"MLX may have {_gb(self.probe['limit_bytes'])}" if self.probe.get("limit_bytes") else "")
        message = ", ".join(filter(None, parts)) or "the system does not tell"
        if free is not None and free < FREE_BYTES:
            look = "ps aux | sort -rnk4 | head -5"
            return Result("note", message, look, "end what takes most of it")
        return Result("ok", message)

    def wired_limit(self, limit_seconds: float) -> Result | None:
        if not os_commands.is_mac():
            return None
        limit, total = hardware.wired_limit_bytes(), hardware.host_memory_bytes()
        if limit is None:
            return Result("ok", "the system's own")
        if total and limit > total - SYSTEM_BYTES:
            message = f"{_gb(limit)} of {_gb(total)}: a Mac out of memory panics"
            return Result("note", message, f"sudo sysctl iogpu.wired_limit_mb={(total - SYSTEM_BYTES) // 2**20}")
        return Result("ok", f"{_gb(limit)}, set by hand until the next boot")

    def mpi(self, limit_seconds: float) -> Result:
        try:
            words = [str(mpi_and_blas.mpirun_path()), "-n", "2"]
        except errors_module.UserError as error:
            return Result("failed", str(error), SETUP)
        set_by_hand = os.environ.get("MLX_MPI_LIBNAME")
        with contextlib.redirect_stderr(io.StringIO()):  # what it says of BLAS, `compute` has said
            mpi_and_blas.prepare()
        ran = run(
            [*words, sys.executable, "-m", "lib.launch.host_facts", "all-sum"], limit_seconds, {"TANDEM_RANKS": "2"}
        )
        if ran.status == 0:
            return Result("ok", "two ranks added up")
        note = f"or unset MLX_MPI_LIBNAME, which is {set_by_hand}" if set_by_hand else ""
        return Result("failed", ran.last_line or _late(limit_seconds), SETUP, note or "./launch uses ring, not MPI")

    def ring(self, limit_seconds: float) -> Result:
        with tempfile.TemporaryDirectory() as folder:
            listed = Path(folder) / "hosts.json"
            listed.write_text(json.dumps([[f"127.0.0.1:{port}"] for port in free_ports(2)]))
            words = [sys.executable, "-m", "lib.launch.host_facts", "all-sum"]
            common = {"TANDEM_RANKS": "2", "MLX_HOSTFILE": str(listed)}
            ends: dict[int, Run] = {}

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
        why = next((end.last_line for end in bad if end.last_line), _late(limit_seconds))
        return Result("failed", why, SETUP, "is a firewall on")

    def display(self, limit_seconds: float) -> Result | None:
        if not os_commands.is_mac():
            return None
        names = metal.lit(
            os_commands.output(["system_profiler", "SPDisplaysDataType", "-json"], limit_seconds=limit_seconds)
        )
        if not names:
            return Result("ok", "none is lit")
        message = f"{', '.join(names)} lit: macOS may end long GPU work for its sake (mlx#3267)"
        return Result("note", message, "pmset displaysleepnow")

    def power(self, limit_seconds: float) -> Result | None:
        power = hardware.power()
        if power is None:
            return None
        if power.saves_power:
            mend = "sudo pmset -a lowpowermode 0" if os_commands.is_mac() else "powerprofilesctl set balanced"
            return Result("note", power.text, mend)
        return Result("note" if power.on_battery else "ok", power.text, "", "plug it in" if power.on_battery else "")

    def disk(self, limit_seconds: float) -> Result:
        folder = schema.RunSettings().dir
        found = host_facts.disk(str(ROOT / folder)) or {}
        where = found["folder"]
        if found["fault"]:
            mend = f"sudo chown -R $USER {shlex.quote(where)}"
            return Result("failed", f"{where}: {found['fault']}", mend, "or another folder: run.dir=ELSEWHERE")
        message = f"{_gb(found['free_bytes'])} free for {folder}"
        if found["free_bytes"] < FREE_BYTES:
            return Result("note", message, f"du -sh {shlex.quote(where)}", "or another folder: run.dir=ELSEWHERE")
        return Result("ok", message)

    def folder(self, limit_seconds: float) -> Result | None:
        inside = PRIVATE.match(str(ROOT)) if os_commands.is_mac() else None
        if inside is None:
            return Result("ok", str(ROOT)) if os_commands.is_mac() else None
        message = f"{ROOT}: macOS keeps {Path(inside[2]).parts[0]} from what ssh starts"
        return Result(
            "note", message, f"mv {shlex.quote(str(ROOT))} ~/{shlex.quote(ROOT.name)}", f"then make setup; {ALLOW}"
        )

    def ssh(self, limit_seconds: float) -> Result:
        """As a launch reaches a host: no password, and the project's interpreter at the other end."""
        options = ["BatchMode=yes", f"ConnectTimeout={limit_seconds / 2:.0f}", "LogLevel=ERROR"]
        options += ["StrictHostKeyChecking=no", "UserKnownHostsFile=/dev/null"]  # ourselves, under whatever name
        words = ["ssh", "-T", *(word for option in options for word in ("-o", option)), "localhost"]
        started = f"cd {shlex.quote(str(ROOT))} && exec {shlex.quote(sys.executable)} -c 'print(2 + 2)'"
        ran = run([*words, started], limit_seconds)
        if ran.status == 0 and ran.output.strip().endswith("4"):
            return Result("ok", "this machine, without a password")
        message = ran.last_line or _late(limit_seconds)
        if REFUSED.search(message):
            return Result("note", f"{message}: macOS keeps this folder from what ssh starts", "", ALLOW)
        if ran.status == 127 and "ssh" in message:
            return Result("note", message, "sudo apt-get install openssh-client", "only several machines need it")
        if "refused" in message:
            start = "sudo systemsetup -setremotelogin on" if os_commands.is_mac() else "sudo systemctl start ssh"
            return Result("note", message, start, "only several machines need it")
        mend, note = mend_ssh("localhost", message, os_commands.is_mac())
        return Result("note", message, mend, "; ".join(filter(None, [note, "only several machines need it"])))

    def calibration(self, limit_seconds: float) -> Result:
        kept = host_facts.calibrated(str(ROOT / schema.PlanSettings().calibration_dir)) or {}
        if not kept.get("there"):
            return Result("note", "none yet: shares between hosts are estimated", "make calibrate")
        day = str(kept["measured_at"])[:10]
        if not kept["fresh"]:
            return Result("note", f"measured {day}, too old or with other versions", "make calibrate")
        return Result("ok", f"measured {day}")


# ---- Pure ------------------------------------------------------------------------------------------------------------


def pinned(constraints: str) -> dict[str, str]:
    """Versions by package name."""
    return dict(re.findall(r"^([\w.-]+)==([^\s;]+)", constraints, re.MULTILINE))


def shortened(text: str, home: str, user: str) -> str:
    """A text without the name of who sits here: the home folder is ~, and user@ and /Users/NAME lose it."""
    text = text.replace(home, "~") if len(home) > 1 else text
    return re.sub(r"(/Users|/home)/[^/\s'\":]+", "~", re.sub(rf"\b{re.escape(user)}@", "", text))


def telling_line(text: str) -> str:
    """The line of a program's last words that says why: an error's, else the last one (mpirun ends with its own remarks)."""
    lines = [line.strip() for line in text.splitlines() if line.strip(" -=*\t")]
    errors = [line for line in lines if re.match(r"(\w+\.)*(\w*Error|error|fatal)\b:? ", line)]
    return (errors or lines or [""])[-1]


def can_train(found: Sequence[Checked]) -> bool:
    """Whether everything that training on this machine needs is there."""
    return not any(one.status == "failed" and one.needed for one in found)


def _gb(size: float) -> str:
    return f"{size / 1e9:.1f} GB"


def _late(limit_seconds: float) -> str:
    return f"no answer within {limit_seconds:g} s"


# ---- Trying ----------------------------------------------------------------------------------------------------------


def run(words: Sequence[str], limit_seconds: float, extra: Mapping[str, str] | None = None) -> Run:
    """Runs a command of its own session in the project's folder, without what a launcher said to this process."""
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(LAUNCHED)}
    try:
        process = subprocess.Popen(
            words,
            cwd=ROOT,
            env={**inherited, **(extra or {})},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            start_new_session=True,
        )
    except OSError as error:
        return Run(127, "", f"{words[0]}: {error.strerror}")
    status: int | None
    try:
        output, errors = process.communicate(timeout=limit_seconds)
        status = process.returncode
    except subprocess.TimeoutExpired:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)
        output, errors = process.communicate()
        status = None
    return Run(status, output, telling_line(errors) or telling_line(output))


def free_ports(count: int) -> list[int]:
    """Ports of the loopback at which nobody listens."""
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(count)]
        return [one.getsockname()[1] for one in sockets]


def attempt(check: Check) -> Checked | None:
    """A check's result, within its limit; a fault of the check itself is its result."""
    found: list[Result | None] = []

    def examine() -> None:
        try:
            found.append(check.examine(check.limit_seconds))
        except Exception as error:  # a page with a hole says more than none
            found.append(Result("failed", f"{type(error).__name__}: {error}".splitlines()[0]))

    began = time.monotonic()
    thread = threading.Thread(target=examine, daemon=True)
    thread.start()
    thread.join(check.limit_seconds + 2)  # what it starts has its own limit
    result = found[0] if found else Result("failed", _late(check.limit_seconds))
    if result is None:
        return None
    message, remedy, note = (shortened(part, str(Path.home()), getpass.getuser()) for part in result[1:])
    seconds = round(time.monotonic() - began, 2)
    return Checked(check.name, result.status, message, remedy, note, check.needed, seconds)


def probe() -> int:
    """What MLX computes on and how fast; in a process of its own, the last line of its output."""
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
    message = {
        "device": device,
        "name": str((facts.get("device_name") if device != "cpu" else None) or hardware.processor_name()),
        "dtype": str(dtype).rpartition(".")[2],
        "flops_per_second": 2 * size**3 / best,
        "limit_bytes": hardware.memory_limit_bytes(),
    }
    print(json.dumps(message))
    return 0


# ---- The page --------------------------------------------------------------------------------------------------------


def show(say: terminal.Voice, one: Checked) -> None:
    """A check's line, and under it its remedy in one piece, to be copied."""
    lead = Text.assemble((f"  {one.check:<13}", "dim"), (f"{one.status:<8}", STYLES[one.status]))
    say.line(one.message or "-", lead=lead)
    if one.status != "ok" and one.remedy:
        say.console.print(Text(f"    {one.remedy}"), soft_wrap=True)
    if one.status != "ok" and one.note:
        say.line(f"({one.note})", lead="    ")


def main(arguments: Sequence[str] | None = None) -> int:
    """Prints the page; returns the exit status."""
    words = sys.argv[1:] if arguments is None else list(arguments)
    if words == ["probe"]:
        return probe()
    parser = command_line.Parser(
        prog="doctor", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", action="store_true", help="the page as one JSON object")
    try:
        options = parser.parse_args(words)
    except errors_module.UserError as error:
        terminal.error(str(error))
        return 2
    say = terminal.Voice(silent=options.json)
    header = {"host": network.own_name(), "os": hardware.operating_system(), "processor": hardware.processor_name()}
    say.line(f"{header['host']}: {header['processor']}, {header['os']}", "bold")
    found = []
    for check in Examination().checks():
        if (one := attempt(check)) is not None:
            found.append(one)
            show(say, one)
    passed, failed = can_train(found), [one.check for one in found if one.status == "failed" and not one.needed]
    if options.json:
        print(json.dumps({**header, "can_train": passed, "checks": [asdict(one) for one in found]}))
        return 0 if passed else 1
    verdict = "training can run here" if passed else "training cannot run here"
    if passed and failed:
        verdict += f"; on several machines or ranks it needs what failed: {', '.join(failed)}"
    say.line(verdict, "bold")
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())
