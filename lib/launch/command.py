"""Hosts and a command ➜ ranks that are started, watched, ended and started again.

    ./launch --hostfile hostfile -- train.py --config configs/X.yaml train.beta=0.2
    ./launch --hosts mac-a,mac-b --backend mpi --max-restarts 3 -- train.py
    ./launch --hostfile hostfile --preflight-only --json             is all well? starts nothing
    ./launch --hostfile hostfile --role secondary -- train.py        without ssh: by hand, on each machine
    ./launch --emit hostfile > hostfile                              the machines that answer over ssh

Before a start every host is checked (lib/launch/preflight.py); lib/launch/launcher.py
starts the ranks, watches them, and starts them again.
"""

from __future__ import annotations

import argparse
import asyncio
import difflib
import os
import shlex
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from lib.config import command_line, load, train_arguments
from lib.errors import UserError
from lib.launch import agent_link, discovery, hostfile, job_files, preflight, rendezvous, topology
from lib.launch.agent_link import is_this_machine
from lib.launch.hostfile import Host, Hosts
from lib.launch.launcher import MAC_RESTARTS, supervise
from lib.launch.rank_console import Console
from lib.launch.ranks import ROOT, Launching, as_command
from lib.system import terminal

ROLES = ("primary", "secondary")


# Names that people set and that nothing reads, with what does what they hope for.
FOLKLORE = {
    "MLX_METAL_PREALLOCATE": "MLX allocates as it needs; nothing to set",
    "MLX_MAX_MEMORY_GB": "MLX limits memory by mx.set_memory_limit; lower train.global_batch_size or plan.micro_batch_sizes",
    "MLX_LOCAL_RANK": "the launcher sets MLX_RANK",
    "MLX_GLOBAL_RANK": "the launcher sets MLX_RANK",
}


# ---- The command line


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command line; returns the exit status: the worst rank's, 2 for wrong input, 1 where preflight fails."""
    try:
        options = _parse(sys.argv[1:] if arguments is None else list(arguments))
        if options.emit == "hostfile" and options.preflight:
            return _emit_hostfile(options)
        launching = _launching(options)
        if options.emit:
            print(_emitted(launching, options.emit), end="")
            return 0
        if launching.directory == str(ROOT):  # elsewhere there may be other files
            _check_command(launching.command)
        if options.sync:
            _sync(launching, options.sync)
        here = _this_host(launching, options.role) if options.role else None
        if here is None and (options.preflight or options.preflight_only):
            passed = preflight.run(launching, options.json, options.min_mbit, options.max_round_trip_ms)
            if options.preflight_only or not passed:
                return 0 if passed else 1
    except UserError as error:
        terminal.error(str(error))
        return 2
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    launching = replace(launching, environment={**_shown(launching), **launching.environment})
    console = Console(lambda: os.kill(os.getpid(), signal.SIGINT))
    try:
        if here is not None and len(launching.hosts) > 1:
            commands = _by_hand(sys.argv[1:] if arguments is None else arguments)
            port, limit_seconds = launching.starting_port, launching.wedged_seconds
            asyncio.run(rendezvous.gather(launching.hosts, here, port, limit_seconds, commands, console.note))
        return asyncio.run(supervise(launching, console, options.max_restarts, options.restart_with, here))
    except UserError as error:  # an address that does not resolve
        console.note(f"error: {error}")
        return 2
    except rendezvous.Absent as error:
        console.note(str(error))
        return 1
    except KeyboardInterrupt:  # while others are waited for
        return 128 + signal.SIGINT
    finally:
        console.close()


def _by_hand(arguments: Sequence[str]) -> tuple[str, str]:
    """What one types on the primary, and on a secondary: the words of this launch, with the other role."""
    words = list(arguments)
    cut = words.index("--") if "--" in words else len(words)
    before, place = words[:cut], next(i for i, word in enumerate(words) if word.partition("=")[0] == "--role")
    del before[place : place + (1 if "=" in words[place] else 2)]
    primary, secondary = (shlex.join(["./launch", "--role", role, *before, *words[cut:]]) for role in ROLES)
    return primary, secondary


def _shown(launching: Launching) -> dict[str, str]:
    """How many columns a rank's line has before it is wrapped: those of our terminal, less the line's tag."""
    width = terminal.Voice().width
    tag = max(len(f"[{launching.size - 1} {host.name}] ") for host in launching.hosts)
    return {} if width is None or width - tag < terminal.NARROW else {"TANDEM_COLUMNS": str(width - tag)}


def _parse(arguments: list[str]) -> argparse.Namespace:
    parser = command_line.Parser(
        prog="launch", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.settings_place = "after --, behind train.py"
    add = parser.add_argument
    add("--hostfile", metavar="FILE", type=Path, help="the hosts: NAME:SLOTS or NAME slots=N a line, or MLX's JSON")
    add("--hosts", metavar="A:1,B:1", help="the hosts, here instead of in a file")
    add("--backend", choices=hostfile.BACKENDS, help="default: the host file's, else ring")
    add("--preflight-only", action="store_true", help="check every host, start nothing")
    add(
        "--min-mbit", type=float, default=100.0, metavar="X", help="preflight: the slowest link that will do, in Mbit/s"
    )
    add("--max-round-trip-ms", type=float, default=50.0, metavar="X", help="preflight: the slowest answer that will do")
    add("--json", action="store_true", help="what preflight finds, as JSON")
    add("--no-preflight", dest="preflight", action="store_false", help="start without checking")
    add(
        "--max-restarts",
        type=int,
        metavar="N",
        help=f"after a fault, go on from the last checkpoint so often (default: {MAC_RESTARTS} where a host is a Mac, else 0)",
    )
    add(
        "--restart-with",
        choices=("survivors", "all"),
        default="survivors",
        help="the hosts that answer, or wait for all",
    )
    add(
        "--silent-seconds",
        type=float,
        default=10.0,
        metavar="S",
        help="a host that says nothing, or a rank that is stopped, so long is given up",
    )
    add(
        "--wedged-seconds",
        type=float,
        default=600.0,
        metavar="S",
        help="so is a wait for other ranks that takes so long",
    )
    add("--env", action="append", default=[], metavar="NAME=VALUE", help="a variable for every rank")
    add(
        "--sync",
        action="append",
        default=[],
        metavar="PATH",
        help="first copy this (`.`: the project) to every host, by rsync",
    )
    add(
        "--role",
        choices=ROLES,
        help="without ssh: start this machine's ranks only, the same command on each",
    )
    add("--nice", type=int, metavar="N", help="priority of the ranks; below 0 needs root or sudo")
    add("--connections-per-ip", type=int, default=1, metavar="N", help="connections between neighbours")
    add("--starting-port", type=int, default=32323, metavar="PORT", help="the first port that ranks listen at")
    add("--mpi-arg", action="append", default=[], metavar="WORD", help="a further word for mpirun")
    add(
        "--emit",
        choices=("hostfile", "slurm", "mpijob"),
        help="print a file and start nothing. hostfile: the machines that answer over ssh, those of --hosts or all that "
        "are found (~/.ssh/config, mDNS, Thunderbolt; with --no-preflight nobody is asked); slurm, mpijob: the job",
    )
    add("--directory", help="the project's folder on the hosts (default: as here)")
    add("--python", help="the interpreter on the hosts (default: as here)")
    add("command", nargs="*", help="after --: train.py and its words")
    cut = arguments.index("--") if "--" in arguments else len(arguments)
    options = parser.parse_args(arguments[:cut])  # what follows is not ours, whatever it looks like
    if options.command:
        raise UserError(f"{options.command[0]!r}: the command comes after --, e.g. ./launch --hosts a,b -- train.py")
    options.command, options.typed = arguments[cut + 1 :] or ["train.py"], arguments
    searches = options.emit == "hostfile" and options.preflight and options.hostfile is None and options.hosts is None
    if (options.hostfile is None) == (options.hosts is None) and not searches:
        raise UserError("give --hostfile FILE or --hosts A,B (one of them); hostfile.example shows a file")
    for name, least, most in (
        ("max_restarts", 0, 10**6),
        ("connections_per_ip", 1, 16),
        ("starting_port", 1024, 65000),
    ):
        number = getattr(options, name)
        if number is not None and not least <= number <= most:
            raise UserError(f"--{name.replace('_', '-')} {number} is not in {least} to {most}")
    if options.role and options.max_restarts:  # each machine would go on alone
        raise UserError(
            "--max-restarts needs ssh, to start all machines again; with --role start them again by hand, --resume"
        )
    if options.role:
        options.max_restarts = 0
    for name in ("silent_seconds", "wedged_seconds"):
        if not 1 <= getattr(options, name) < float("inf"):
            raise UserError(f"--{name.replace('_', '-')} {getattr(options, name):g} is not at least 1")
    return options


def _check_command(words: Sequence[str]) -> None:
    """Says here and once what every rank would say: that a script is missing, or a setting wrong.

    Raises:
        UserError: so.
    """
    script = ROOT / words[0]
    if words[0].endswith(".py") and not script.is_file():
        near = difflib.get_close_matches(words[0], [path.name for path in ROOT.glob("*.py")], n=1)
        raise UserError(f"{script} does not exist" + (f"; did you mean {near[0]}?" if near else ""))
    if script == ROOT / "train.py" and "--help" not in words:
        options = train_arguments.parse(list(words[1:]), None)
        if options.resume is None:  # a run may lie on other hosts only
            load.load(ROOT / (options.config or train_arguments.QUICKSTART), options.overrides)


def _emit_hostfile(options: argparse.Namespace) -> int:
    """Prints the host file of the machines that answer; the exit status is 1 where none does."""
    named = _hosts(options).hosts if options.hostfile or options.hosts else ()
    text = discovery.emitted(
        named, options.directory or str(ROOT), lambda line: print(f"launch: {line}", file=sys.stderr, flush=True)
    )
    if text is None:
        terminal.error(f"none of {', '.join(host.name for host in named)} answers; ssh to one of them by hand first")
        return 1
    print(text, end="")
    return 0


def _hosts(options: argparse.Namespace) -> Hosts:
    return hostfile.read(options.hostfile) if options.hostfile else hostfile.from_words(options.hosts)


def _launching(options: argparse.Namespace) -> Launching:
    found = _hosts(options)
    environment = {**found.environment, **hostfile.environment(options.env, "--env")}
    for name in environment.keys() & FOLKLORE.keys():
        print(f"launch: nothing reads {name}: {FOLKLORE[name]}", file=sys.stderr)
    backend = options.backend or found.backend or "ring"
    hosts = found.hosts
    if backend in topology.RDMA_BACKENDS and (wanted := topology.rdma_fault(backend, hosts)) is not None:
        raise UserError(
            f"{backend} wants {wanted}; mlx.distributed_config --over thunderbolt --backend {backend} writes such a host file"
        )
    return Launching(
        hosts,
        backend,
        tuple(options.command),
        environment,
        options.directory or str(ROOT),
        options.python or (f"{options.directory}/.venv/bin/python" if options.directory else sys.executable),
        options.connections_per_ip,
        options.starting_port,
        tuple(options.mpi_arg),
        options.nice,
        options.silent_seconds,
        options.wedged_seconds,
        tuple(options.typed),
    )


def _emitted(launching: Launching, kind: str) -> str:
    """A host file, or a job file for somebody else's scheduler.

    Raises:
        UserError: the scheduler cannot run it.
    """
    if kind == "hostfile":
        return hostfile.to_text(launching.hosts)
    write = {"slurm": job_files.slurm, "mpijob": job_files.mpijob}[kind]
    environment = {"PYTHONUNBUFFERED": "1", **launching.environment}
    return write(launching.hosts, as_command(launching), environment, launching.directory, launching.python)


def _sync(launching: Launching, paths: Sequence[str]) -> None:
    """Copies paths to the same place on every other host, whatever is not kept in git or is big left out of `.`.

    Raises:
        UserError: rsync is missing, or fails on a host.
    """
    if shutil.which("rsync") is None:
        raise UserError("--sync needs rsync; install it (apt-get install rsync, brew install rsync)")
    for host in launching.hosts:
        for path in paths:
            source = Path(path).resolve()
            whole = source == ROOT
            target = launching.directory if whole else str(source)
            if is_this_machine(host) and target == str(source):
                continue
            left_out = [".git", ".venv", "runs", "__pycache__", ".*_cache"] if whole else []
            # rsync takes files of one size and second for equal; a model of 100 GB is not read twice for that.
            slash = "/" if source.is_dir() else ""
            words = ["rsync", "-a", agent_link.rsync_making(target if slash else str(Path(target).parent))]
            words += [*(["--checksum"] if whole else []), *(f"--exclude={name}" for name in left_out)]
            words += ["-e", shlex.join(agent_link.ssh_words(host)[:-2])]
            done = subprocess.run(
                [*words, "--", f"{source}{slash}", f"{host.name}:{target}{slash}"], capture_output=True, text=True
            )
            if done.returncode:
                told = done.stderr.strip().splitlines()
                raise UserError(f"--sync {path}: rsync to {host.name} failed: {told[0] if told else done.returncode}")
        print(f"launch: {', '.join(paths)} copied to {host.name}", file=sys.stderr)


def _this_host(launching: Launching, role: str) -> Host:
    """The host whose ranks are this machine's, where people start each machine by hand.

    Raises:
        UserError: the backend needs a starter, or this machine is not the host that it should be.
    """
    if launching.backend == "mpi":
        raise UserError("--role is for ring, jaccl and nccl: mpirun reaches the other hosts over ssh")
    mine = [host for host in launching.hosts if is_this_machine(host)]
    if len(mine) != 1:
        names = ", ".join(host.name for host in launching.hosts)
        raise UserError(
            f"--role {role}: this machine ({socket.gethostname()}) is {len(mine)} of the hosts {names}, not one"
        )
    if (mine[0] == launching.hosts[0]) != (role == "primary"):
        raise UserError(
            f"--role {role}: the first host, {launching.hosts[0].name}, is the primary; this machine is {mine[0].name}"
        )
    return mine[0]
