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
import difflib
import shlex
import signal
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from lib.config import command_line, load, train_arguments
from lib.environment import ROOT
from lib.errors import Stopped, UserError
from lib.launch import discovery, hostfile, launcher, preflight, role_start, scheduler_jobs, ssh
from lib.launch import job as jobs
from lib.launch.hostfile import Host
from lib.launch.job import Job
from lib.launch.launcher import MAC_RESTARTS
from lib.system import key_file, terminal

ROLES = ("primary", "secondary")
LIMITS = {
    "max_restarts": (0, 10**6),
    "starting_port": (1024, 65000),
    "silent_seconds": (3, 10**6),
    "wedged_seconds": (1, 10**6),
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command line; returns the exit status: the worst rank's, 2 for wrong input, 1 where preflight fails."""
    words = sys.argv[1:] if arguments is None else list(arguments)
    try:
        options = parse(words)
        if options.emit == "hostfile" and options.preflight:
            return _emit_hostfile(options)
        job = job_of(options)
        if options.emit:
            text = hostfile.to_text(job.hosts) if options.emit == "hostfile" else None
            print(text or scheduler_jobs.job_file(job, options.emit), end="")
            return 0
        job = checked(job)
        if options.sync:
            ssh.copy_to_hosts(job, options.sync)
        here = this_host(job, options.role) if options.role else None
        if here is None and (options.preflight or options.preflight_only):
            passed = preflight.run(job, options.typed, options.json)
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
    console = launcher.Console()
    key = _wait_for_others(job, here, options, console.note) if here and len(job.hosts) > 1 else None

    def way_on(run: str) -> str:
        before = options.typed[: options.typed.index("--")] if "--" in options.typed else options.typed
        resumed = jobs.resume_command(job.command, run, same_world=True)
        return f"go on with: {shlex.join(['./launch', *before, '--', *resumed])}"

    return launcher.supervise(job, console, options.max_restarts, way_on, here, key)


def _wait_for_others(job: Job, here: Host, options: argparse.Namespace, note: Callable[[str], None]) -> bytes:
    """The run's key, when people have started all machines."""
    names, limit, port = [host.name for host in job.hosts], job.wedged_seconds, job.starting_port
    is_primary = here == job.hosts[0]
    path = (options.key or key_file.usual()).expanduser()
    if is_primary and key_file.make(path):
        note(f"made {path}: copy it to the other machines, e.g. scp {path} MACHINE:{path}")
    key = key_file.read(path)
    others = ", ".join(names[1:] if is_primary else names[:1])
    other = "secondary" if is_primary else "primary"
    note(f"waiting for {others}, {limit:.0f} s at most; type the same there, with --role {other}")
    if is_primary:
        return role_start.wait_as_primary(names, port, key, limit, note)
    return role_start.wait_as_secondary(names, here.name, hostfile.address(job.hosts[0]), port, key, limit)


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """The options, with `command`: the words after --, and `typed`: all words.

    Raises UserError: a word is unknown, a value is out of its limits, or two options do not go together.
    """
    words = list(arguments)
    script = next((index for index, word in enumerate(words) if word.endswith(".py")), None)
    if "--" not in words and script is not None:  # `./launch --hosts a,b train.py --config X` is as clear
        words.insert(script, "--")
    cut = words.index("--") if "--" in words else len(words)
    options = _parser().parse_args(words[:cut])
    if options.command:
        raise UserError(f"{options.command[0]!r}: the command comes after --, e.g. ./launch --hosts a,b -- train.py")
    options.command, options.typed = words[cut + 1 :] or ["train.py"], words
    searches = options.emit == "hostfile" and options.preflight and options.hostfile is None and options.hosts is None
    if (options.hostfile is None) == (options.hosts is None) and not searches:
        raise UserError("give --hostfile FILE or --hosts A,B (one of them); hostfile.example shows a file")
    for name, (least, most) in LIMITS.items():
        number = getattr(options, name)
        if number is not None and not least <= number <= most:
            raise UserError(f"--{name.replace('_', '-')} {number:g} is not in {least} to {most}")
    if options.role and options.max_restarts:
        raise UserError("--max-restarts needs ssh, to start all machines again; with --role start them again by hand")
    if options.key and not options.role:
        raise UserError("--key is for --role: with ssh, every start has a key of its own")
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
    copied = "first copy this (`.`: the project) to every host, by rsync"
    add("--sync", action="append", default=[], metavar="PATH", help=copied)
    add("--role", choices=ROLES, help="without ssh: start this machine's ranks only, the same command on each")
    key = f"with --role: the key by which machines know each other, the same on all (default: {key_file.usual()})"
    add("--key", type=Path, metavar="FILE", help=key)
    ports = "the first port that ranks listen at (default: %(default)s)"
    add("--starting-port", type=int, default=32323, metavar="PORT", help=ports)
    add("--mpi-arg", action="append", default=[], metavar="WORD", help="a further word for mpirun")
    emitted = (
        "print a file and start nothing. hostfile: the machines that answer over ssh, those of --hosts or all that "
        "are found (~/.ssh/config, mDNS, Thunderbolt; with --no-preflight none is asked); slurm, mpijob: the job"
    )
    add("--emit", choices=("hostfile", "slurm", "mpijob"), help=emitted)
    add("--directory", help="the project's folder on the hosts (default: as here)")
    add("--python", help="the interpreter on the hosts (default: as here)")
    add("command", nargs="*", help="after --: train.py and its words")
    return parser


def job_of(options: argparse.Namespace) -> Job:
    """What the options ask for. Raises UserError: the hosts are wrong, or the backend cannot connect them."""
    listed = hostfile.read(options.hostfile) if options.hostfile else hostfile.from_words(options.hosts)
    backend = options.backend or listed.backend or "ring"
    for host in listed.hosts if backend in jobs.RDMA_BACKENDS else ():
        if host.slots != 1 or len(host.rdma) != len(listed.hosts):
            write = f"mlx.distributed_config --over thunderbolt --backend {backend} writes such a host file"
            raise UserError(
                f"{backend} wants one rank a host, and rdma=DEVICE towards each; {host.name} differs; {write}"
            )
    for host in listed.hosts if backend == "mpi" else ():
        if host.port or host.directory or host.python or host.environment or host.map:
            raise UserError(
                f"--backend mpi starts {host.name} by mpirun, which has one path and Python for all hosts, and ssh's "
                "own port (~/.ssh/config); --backend ring takes what the host file says of each"
            )
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
    )


def checked(job: Job) -> Job:
    """Checks here, once, what every rank would check: that the script exists and the settings are right.

    Returns:
        The job; where hosts differ in their paths, the configuration's whole paths are words of its command, in which
        they can differ by host.

    Raises UserError: the script is missing, or a setting is wrong.
    """
    words, script = job.command, ROOT / job.command[0]
    if job.directory != str(ROOT):  # elsewhere there may be other files
        return job
    if words[0].endswith(".py") and not script.is_file():
        near = difflib.get_close_matches(words[0], [path.name for path in ROOT.glob("*.py")], n=1)
        raise UserError(f"{script} does not exist" + (f"; did you mean {near[0]}?" if near else ""))
    if script != ROOT / "train.py" or "--help" in words:
        return job
    options = train_arguments.parse(list(words[1:]), None)
    if options.resume is not None:  # the run may be on other hosts only
        return job
    config = load.load(ROOT / (options.config or train_arguments.QUICKSTART), options.overrides)
    if not any(host.map or host.directory for host in job.hosts):
        return job
    named = {
        f"{room}.{key}": value
        for room, values in config.model_dump().items()
        if isinstance(values, dict)
        for key, value in values.items()
    }
    paths = [f"{key}={value}" for key, value in named.items() if isinstance(value, str) and value.startswith("/")]
    given = {word.partition("=")[0] for word in words}
    return replace(job, command=(*words, *(word for word in paths if word.partition("=")[0] not in given)))


def this_host(job: Job, role: str) -> Host:
    """The host whose ranks are this machine's, where people start each machine by hand.

    Raises UserError: the backend needs a starter, or this machine is not the host that it should be.
    """
    if job.backend == "mpi":
        raise UserError("--role is for ring, jaccl and nccl: mpirun reaches the other hosts over ssh")
    mine = [host for host in job.hosts if ssh.is_this_machine(host)]
    if len(mine) != 1 or (mine[0] == job.hosts[0]) != (role == "primary"):
        names, here = ", ".join(host.name for host in job.hosts), ", ".join(host.name for host in mine) or "none"
        raise UserError(f"--role {role}: of the hosts {names} this machine is {here}; the first is the primary")
    return mine[0]


def _emit_hostfile(options: argparse.Namespace) -> int:
    """Prints the host file of the machines that answer; the exit status is 1 where none does."""
    named = job_of(options).hosts if options.hostfile or options.hosts else ()

    def note(line: str) -> None:
        print(f"launch: {line}", file=sys.stderr, flush=True)

    text = discovery.hostfile_text(named, options.directory or str(ROOT), note)
    if text is None:
        terminal.error(f"none of {', '.join(host.name for host in named)} answers; ssh to one of them by hand first")
        return 1
    print(text, end="")
    return 0
