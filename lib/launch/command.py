"""Hosts and a command ➜ ranks that are started, watched, ended and started again.

    ./launch --hostfile hostfile -- train.py --config configs/X.yaml train.beta=0.2
    ./launch --hosts mac-a,mac-b --backend mpi --max-restarts 3 -- train.py
    ./launch --hostfile hostfile --preflight-only --json             checks all hosts, starts nothing
    ./launch --hostfile hostfile --role secondary -- train.py        without ssh: by hand, on each machine
    ./launch --emit hostfile > hostfile                              the machines that answer over ssh

Before a start every host is checked (lib/launch/preflight.py); lib/launch/launcher.py starts and watches the ranks.
"""

from __future__ import annotations

import argparse
import contextlib
import difflib
import hashlib
import hmac
import math
import secrets
import signal
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from lib.config import command_line, load
from lib.distributed.connection import Channel, Listener, connect
from lib.environment import ROOT
from lib.errors import Stopped, UserError
from lib.launch import discovery, hostfile, launcher, preflight, ssh
from lib.launch.hostfile import Host
from lib.launch.launcher import MAC_RESTARTS
from lib.launch.rank_commands import RDMA_BACKENDS, Job, scheduler_file
from lib.system import cluster_key, terminal

CLOSE_SECONDS = 2.0  # for secondaries to close first: the port is then free for rank 0 at once


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command line; returns the exit status: the worst rank's, 2 for wrong input, 1 where preflight fails."""
    try:
        options = parse(sys.argv[1:] if arguments is None else arguments)
        if options.emit == "hostfile" and options.preflight:
            named = job_of(options).hosts if options.hostfile or options.hosts else ()
            print(discovery.hostfile_text(named, options.directory or str(ROOT), launcher.Console().note), end="")
            return 0
        job = job_of(options)
        if options.emit:
            emitted = hostfile.to_text(job.hosts) if options.emit == "hostfile" else scheduler_file(job, options.emit)
            print(emitted, end="")
            return 0
        job = checked(job)
        if options.sync:
            ssh.copy_to_hosts(job, options.sync)
        here = this_host(job, options.role) if options.role else None
        if here is None and (options.preflight or options.preflight_only):
            passed = preflight.run(job, options.json)
            if options.preflight_only or not passed:
                return 0 if passed else 1
        return _train(job, options, here)
    except UserError as error:
        terminal.error(str(error))
        return 2
    except Stopped as error:
        terminal.error(str(error), "stopped")
        return 1
    except KeyboardInterrupt:
        return 128 + signal.SIGINT


def _train(job: Job, options: argparse.Namespace, here: Host | None) -> int:
    width = terminal.Terminal().width
    tag = max(len(f"[{job.size - 1} {host.name}] ") for host in job.hosts)
    if width is not None and width - tag >= terminal.NARROW:
        job = replace(job, environment={"TANDEM_COLUMNS": str(width - tag), **job.environment})
    console, key = launcher.Console(), None
    if here is not None and len(job.hosts) > 1:
        key = wait_for_others(job, here, options.key or cluster_key.usual(), console.note)
    return launcher.supervise(job, console, options.max_restarts, here, key)


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """The options, with `command`: the words after --, and `typed`: all words. Raises UserError: a word is unknown, a
    value is out of its limits, or two options do not go together."""
    words = list(arguments)
    script = next((index for index, word in enumerate(words) if word.endswith(".py")), None)
    if "--" not in words and script is not None:  # `./launch --hosts a,b train.py --config X` is as clear
        words.insert(script, "--")
    cut = words.index("--") if "--" in words else len(words)
    options = _parser().parse_args(words[:cut])
    if options.command:
        raise UserError(f"{options.command[0]!r}: the command comes after --, e.g. ./launch --hosts a,b -- train.py")
    options.command, options.typed = words[cut + 1 :] or ["train.py"], words
    if (first := options.command[0]).startswith("-") and first != "-m":
        raise UserError(f"{first!r} behind --: name what to start, e.g. ./launch --hosts a,b -- train.py {first} ...")
    searches = options.emit == "hostfile" and options.preflight and options.hostfile is None and options.hosts is None
    if (options.hostfile is None) == (options.hosts is None) and not searches:
        raise UserError("give --hostfile FILE or --hosts A,B (one of them); hostfile.example shows a file")
    if not 1024 <= options.starting_port <= 65000:
        raise UserError(f"--starting-port {options.starting_port} is not in 1024 to 65000")
    if (options.max_restarts or 0) < 0:
        raise UserError(f"--max-restarts {options.max_restarts} is below 0")
    for name in ("silent", "wedged"):
        if not 0 < (seconds := getattr(options, f"{name}_seconds")) < math.inf:
            raise UserError(f"--{name}-seconds {seconds:g} is not above 0")
    if options.role and options.max_restarts:
        raise UserError("--max-restarts needs ssh, to start all machines again; with --role start them again by hand")
    return options


def _parser() -> command_line.Parser:
    parser = command_line.Parser(prog="launch", description=__doc__)
    parser.settings_place = " after --, behind train.py"
    add = parser.add_argument
    add("--hostfile", metavar="FILE", type=Path, help="the hosts: NAME:SLOTS or NAME slots=N a line, or MLX's JSON")
    add("--hosts", metavar="A:1,B:1", help="the hosts, here instead of in a file")
    add("--backend", choices=hostfile.BACKENDS, help="default: the host file's, else ring")
    add("--preflight-only", action="store_true", help="check every host, start nothing")
    add("--json", action="store_true", help="print preflight's findings as JSON")
    add("--no-preflight", dest="preflight", action="store_false", help="start without checking")
    default = f"(default: {MAC_RESTARTS} where a host is a Mac, else 0)"
    restarts = f"after a fault, go on from the newest checkpoint, at most N times {default}"
    add("--max-restarts", type=int, metavar="N", help=restarts)
    silent = "give up a rank that sends nothing for S seconds (default: %(default)g)"
    add("--silent-seconds", type=float, default=10.0, metavar="S", help=silent)
    wedged = "give up ranks that wait for each other for S seconds (default: %(default)g)"
    add("--wedged-seconds", type=float, default=600.0, metavar="S", help=wedged)
    add("--env", action="append", default=[], metavar="NAME=VALUE", help="a variable for every rank")
    copied = "first copy this to every host, where it differs; `.`: the project, which is installed there"
    add("--sync", action="append", default=[], metavar="PATH", help=copied)
    add(
        "--role",
        choices=("primary", "secondary"),
        help="without ssh: start this machine's ranks only, the same command on each",
    )
    key = f"with --role: the key by which machines know each other, the same on all (default: {cluster_key.usual()})"
    add("--key", type=Path, metavar="FILE", help=key)
    ports = "the first port that ranks listen at (default: %(default)s)"
    add("--starting-port", type=int, default=32323, metavar="PORT", help=ports)
    add("--mpi-arg", action="append", default=[], metavar="WORD", help="a further word for mpirun")
    answering = "those of --hosts or all that are found (~/.ssh/config, mDNS, Thunderbolt)"
    emitted = f"print a file and start nothing. hostfile: the machines that answer over ssh, {answering}; else: a job"
    add("--emit", choices=("hostfile", "slurm", "mpijob"), help=emitted)
    add("--directory", help="the project's folder on the hosts (default: as here)")
    add("--python", help="the interpreter on the hosts (default: as here)")
    add("command", nargs="*", help="after --: train.py and its words")
    return parser


def job_of(options: argparse.Namespace) -> Job:
    """What the options ask for. Raises UserError: the hosts are wrong, or the backend cannot connect them."""
    listed = hostfile.read(options.hostfile) if options.hostfile else hostfile.from_words(options.hosts)
    backend = options.backend or listed.backend or "ring"
    for host in listed.hosts:
        if backend in RDMA_BACKENDS and (host.slots != 1 or len(host.rdma) != len(listed.hosts)):
            wanted = f"{backend} wants one rank a host, and rdma=DEVICE towards each; {host.name} differs"
            raise UserError(f"{wanted}; mlx.distributed_config --over thunderbolt --backend {backend} writes it")
        if backend == "mpi" and (host.port or host.directory or host.python or host.environment or host.map):
            same = "has one path, Python and environment for all hosts, and ssh's own port (~/.ssh/config)"
            raise UserError(f"{host.name}: mpirun {same}; --backend ring takes what the host file says of each")
    return Job(
        hosts=listed.hosts,
        backend=backend,
        command=tuple(options.command),
        environment={**listed.environment, **hostfile.environment(options.env, "--env")},
        directory=options.directory or str(ROOT),
        python=options.python or (f"{options.directory}/.venv/bin/python" if options.directory else sys.executable),
        starting_port=options.starting_port,
        mpi_arguments=tuple(options.mpi_arg),
        silent_seconds=options.silent_seconds,
        wedged_seconds=options.wedged_seconds,
        typed=tuple(options.typed),
    )


def checked(job: Job) -> Job:
    """Checks here, once, what every rank would check: that the script exists and the settings are right. Returns the
    job; where hosts differ in their paths, the configuration's whole paths are words of its command, in which they can
    differ by host. Raises UserError: the script is missing, or a setting is wrong."""
    words, script = job.command, ROOT / job.command[0]
    if job.directory != str(ROOT):  # elsewhere there may be other files
        return job
    if words[0].endswith(".py") and not script.is_file():
        near = difflib.get_close_matches(words[0], [path.name for path in ROOT.glob("*.py")], n=1)
        raise UserError(f"{script} does not exist" + (f"; did you mean {near[0]}?" if near else ""))
    if script != ROOT / "train.py" or "--help" in words:
        return job
    options = command_line.train_options(list(words[1:]), None)
    if options.resume is not None:  # the run may be on other hosts only
        return job
    config = load.load(ROOT / (options.config or command_line.QUICKSTART), options.overrides)
    if any(host.map or host.directory for host in job.hosts):
        overridden = {word.partition("=")[0] for word in words}
        sections = ((name, section) for name, section in config.model_dump().items() if isinstance(section, dict))
        paths = {f"{name}.{key}": value for name, section in sections for key, value in section.items()}
        is_path = {key: isinstance(value, str) and value.startswith("/") for key, value in paths.items()}
        words += tuple(f"{key}={value}" for key, value in paths.items() if is_path[key] and key not in overridden)
    return replace(job, command=words)


# ---- --role: machines that people start by hand wait for each other. The primary listens at --starting-port, where
# its rank 0 will listen: a firewall that lets ranks through lets this through. All derive the run's key from the key
# file, which both ends prove to have, and a number of the primary.


def this_host(job: Job, role: str) -> Host:
    """The host whose ranks are this machine's, where people start each machine by hand. Raises UserError: the backend
    needs a starter, or this machine is not the host that it should be."""
    if job.backend == "mpi":
        raise UserError("--role is for ring, jaccl and nccl: mpirun reaches the other hosts over ssh")
    local = [host for host in job.hosts if ssh.is_this_machine(host)]
    if len(local) != 1 or (local[0] == job.hosts[0]) != (role == "primary"):
        names, here = ", ".join(host.name for host in job.hosts), ", ".join(host.name for host in local) or "none"
        raise UserError(f"--role {role}: of the hosts {names} this machine is {here}; the first is the primary")
    return local[0]


def wait_for_others(job: Job, here: Host, path: Path, note: Callable[[str], None]) -> bytes:
    """The run's key, when people have started all machines; path: of the key by which machines know each other. Raises
    Stopped: a machine did not come within the job's wedged_seconds. UserError: keys or hosts differ."""
    names, path, is_primary = [host.name for host in job.hosts], path.expanduser(), here == job.hosts[0]
    if is_primary and cluster_key.make(path):
        note(f"made {path}: copy it to the other machines, e.g. scp {path} MACHINE:{path}")
    key, other = cluster_key.read(path), "secondary" if is_primary else "primary"
    others = ", ".join(names[1:] if is_primary else names[:1])
    note(f"waiting for {others}, {job.wedged_seconds:.0f} s at most; type the same there, with --role {other}")
    number = _wait_as_primary(job, names, key) if is_primary else _wait_as_secondary(job, names, here.name, key)
    note("all hosts are there")
    return hmac.new(key, number.encode(), hashlib.sha256).hexdigest().encode()


def _wait_as_primary(job: Job, names: list[str], key: bytes) -> str:
    number, connected, is_complete = secrets.token_hex(16), set[str](), threading.Event()

    def accept(channel: Channel) -> None:
        message = channel.receive(CLOSE_SECONDS) or {}
        name = str(message.get("here"))
        if message.get("hosts") != names or name not in names[1:]:
            channel.send({"error": f"the primary was started with the hosts {', '.join(names)}; give the same"})
            return
        connected.add(name)
        try:
            while not is_complete.wait(0.1):
                if channel.receive(0.1) is not None:  # EOFError: it left
                    return
            channel.send({"go": number})
            channel.receive(CLOSE_SECONDS)
        finally:
            connected.discard(name)

    deadline = time.monotonic() + job.wedged_seconds
    with Listener("", job.starting_port, key, accept):
        while missing := ", ".join(name for name in names[1:] if name not in connected):
            if time.monotonic() > deadline:
                raise Stopped(f"{missing} did not come within {job.wedged_seconds:.0f} s (--wedged-seconds)")
            time.sleep(0.1)
        is_complete.set()
        until = time.monotonic() + CLOSE_SECONDS
        while connected and time.monotonic() < until:
            time.sleep(0.05)
    return number


def _wait_as_secondary(job: Job, names: list[str], here: str, key: bytes) -> str:
    message, limit = {}, job.wedged_seconds
    with contextlib.suppress(ConnectionError, EOFError):
        channel = connect(hostfile.address(job.hosts[0]), job.starting_port, key, limit)
        channel.send({"hosts": names, "here": here})
        message = channel.receive(limit) or {}
        channel.close()
    if "error" in message:
        raise UserError(str(message["error"]))
    if "go" not in message:
        why = f"port {job.starting_port} has to be open there"
        raise Stopped(f"{names[0]}, the primary, or another host did not come in {limit:.0f} s, or left; {why}")
    return message["go"]
