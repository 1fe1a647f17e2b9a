"""The words of ./launch: parsed, checked, and turned into a job."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from lib.config import command_line
from lib.errors import UserError
from lib.launch import hostfile, topology
from lib.launch.hostfile import Hosts
from lib.launch.job import ROOT, Job
from lib.launch.supervisor import MAC_RESTARTS
from lib.system import key_file

ROLES = ("primary", "secondary")
LIMITS = {
    "max_restarts": (0, 10**6),
    "connections_per_ip": (1, 16),
    "starting_port": (1024, 65000),
    "min_mbit": (0, 10**9),
    "max_round_trip_ms": (0, 10**9),
}

# Variables that people set and that nothing reads, with what to do instead.
UNREAD_VARIABLES = {
    "MLX_METAL_PREALLOCATE": "MLX allocates as it needs; nothing to set",
    "MLX_MAX_MEMORY_GB": "MLX limits memory by mx.set_memory_limit; lower train.global_batch_size or "
    "plan.micro_batch_sizes",
    "MLX_LOCAL_RANK": "the launcher sets MLX_RANK",
    "MLX_GLOBAL_RANK": "the launcher sets MLX_RANK",
}


def parse(arguments: list[str], description: str | None = None) -> argparse.Namespace:
    """The options, with `command`: the words after --, and `typed`: all words.

    Args:
        description: what --help prints before the options.

    Raises:
        UserError: a word is unknown, a value is out of its limits, or two options do not go together.
    """
    cut = arguments.index("--") if "--" in arguments else len(arguments)
    options = _parser(description).parse_args(arguments[:cut])  # what follows is not ours, whatever it looks like
    if options.command:
        raise UserError(f"{options.command[0]!r}: the command comes after --, e.g. ./launch --hosts a,b -- train.py")
    options.command, options.typed = arguments[cut + 1 :] or ["train.py"], arguments
    _check(options)
    if options.role:
        options.max_restarts = 0
    return options


def _parser(description: str | None) -> command_line.Parser:
    parser = command_line.Parser(
        prog="launch",
        description=description,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.settings_place = "after --, behind train.py"
    _add_hosts_and_checks(parser)
    _add_restarts_and_ranks(parser)
    parser.add_argument("command", nargs="*", help="after --: train.py and its words")
    return parser


def _add_hosts_and_checks(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--hostfile", metavar="FILE", type=Path, help="the hosts: NAME:SLOTS or NAME slots=N a line, or MLX's JSON")
    add("--hosts", metavar="A:1,B:1", help="the hosts, here instead of in a file")
    add("--backend", choices=hostfile.BACKENDS, help="default: the host file's, else ring")
    add("--preflight-only", action="store_true", help="check every host, start nothing")
    slow_link = "preflight: fail links below X Mbit/s (default: %(default)g)"
    add("--min-mbit", type=float, default=100.0, metavar="X", help=slow_link)
    late_link = "preflight: fail links whose round trip takes more than X ms (default: %(default)g)"
    add("--max-round-trip-ms", type=float, default=50.0, metavar="X", help=late_link)
    add("--json", action="store_true", help="print preflight's findings as JSON")
    add("--no-preflight", dest="preflight", action="store_false", help="start without checking")


def _add_restarts_and_ranks(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    restarts = (
        "after a fault, go on from what the ranks kept, at most N times "
        f"(default: {MAC_RESTARTS} where a host is a Mac, else 0)"
    )
    add("--max-restarts", type=int, metavar="N", help=restarts)
    survivors = "after a fault: go on with the hosts that answer, or wait for all (default: %(default)s)"
    add("--restart-with", choices=("survivors", "all"), default="survivors", help=survivors)
    silent = "give up a host that is silent, or a rank that is stopped, for S seconds (default: %(default)g)"
    add("--silent-seconds", type=float, default=10.0, metavar="S", help=silent)
    wedged = "give up ranks that wait for each other, or compute one pass, for S seconds (default: %(default)g)"
    add("--wedged-seconds", type=float, default=600.0, metavar="S", help=wedged)
    add("--env", action="append", default=[], metavar="NAME=VALUE", help="a variable for every rank")
    copied = "first copy this (`.`: the project) to every host, by rsync"
    add("--sync", action="append", default=[], metavar="PATH", help=copied)
    add("--role", choices=ROLES, help="without ssh: start this machine's ranks only, the same command on each")
    key = f"with --role: the key by which machines know each other, the same on all (default: {key_file.usual()})"
    add("--key", type=Path, metavar="FILE", help=key)
    add("--nice", type=int, metavar="N", help="priority of the ranks; below 0 needs root or sudo")
    connections = "connections between neighbours (default: %(default)s)"
    add("--connections-per-ip", type=int, default=1, metavar="N", help=connections)
    add(
        "--starting-port",
        type=int,
        default=32323,
        metavar="PORT",
        help="the first port that ranks listen at (default: %(default)s)",
    )
    add("--mpi-arg", action="append", default=[], metavar="WORD", help="a further word for mpirun")
    emitted = (
        "print a file and start nothing. hostfile: the machines that answer over ssh, those of --hosts or all that "
        "are found (~/.ssh/config, mDNS, Thunderbolt; with --no-preflight nobody is asked); slurm, mpijob: the job"
    )
    add("--emit", choices=("hostfile", "slurm", "mpijob"), help=emitted)
    add("--directory", help="the project's folder on the hosts (default: as here)")
    add("--python", help="the interpreter on the hosts (default: as here)")


def _check(options: argparse.Namespace) -> None:
    searches = options.emit == "hostfile" and options.preflight and options.hostfile is None and options.hosts is None
    if (options.hostfile is None) == (options.hosts is None) and not searches:
        raise UserError("give --hostfile FILE or --hosts A,B (one of them); hostfile.example shows a file")
    for name, (least, most) in LIMITS.items():
        number = getattr(options, name)
        if number is not None and not least <= number <= most:
            raise UserError(f"--{name.replace('_', '-')} {number} is not in {least} to {most}")
    if options.role and options.max_restarts:  # each machine would go on alone
        raise UserError(
            "--max-restarts needs ssh, to start all machines again; with --role start them again by hand, --resume"
        )
    if options.key and not options.role:
        raise UserError("--key is for --role: with ssh, every start has a secret of its own")
    for name in ("silent_seconds", "wedged_seconds"):
        if not 1 <= getattr(options, name) < float("inf"):
            raise UserError(f"--{name.replace('_', '-')} {getattr(options, name):g} is not at least 1")


def hosts_of(options: argparse.Namespace) -> Hosts:
    """The hosts of --hostfile or --hosts.

    Raises:
        UserError: something in them is wrong.
    """
    return hostfile.read(options.hostfile) if options.hostfile else hostfile.from_words(options.hosts)


def job_of(options: argparse.Namespace) -> Job:
    """What the options ask for.

    Raises:
        UserError: the hosts are wrong, or the backend cannot connect them.
    """
    listed = hosts_of(options)
    environment = {**listed.environment, **hostfile.environment(options.env, "--env")}
    for name in environment.keys() & UNREAD_VARIABLES.keys():
        print(f"launch: nothing reads {name}: {UNREAD_VARIABLES[name]}", file=sys.stderr)
    backend = options.backend or listed.backend or "ring"
    if backend in topology.RDMA_BACKENDS and (wanted := topology.rdma_fault(backend, listed.hosts)) is not None:
        raise UserError(
            f"{backend} wants {wanted}; mlx.distributed_config --over thunderbolt --backend {backend} "
            "writes such a host file"
        )
    return Job(
        hosts=listed.hosts,
        backend=backend,
        command=tuple(options.command),
        environment=environment,
        directory=options.directory or str(ROOT),
        python=options.python or (f"{options.directory}/.venv/bin/python" if options.directory else sys.executable),
        connections_per_ip=options.connections_per_ip,
        starting_port=options.starting_port,
        mpi_arguments=tuple(options.mpi_arg),
        nice=options.nice,
        silent_seconds=options.silent_seconds,
        wedged_seconds=options.wedged_seconds,
        typed=tuple(options.typed),
    )
