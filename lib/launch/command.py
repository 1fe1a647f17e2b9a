"""Hosts and a command ➜ ranks that are started, watched, ended and started again.

    ./launch --hostfile hostfile -- train.py --config configs/X.yaml train.beta=0.2
    ./launch --hosts mac-a,mac-b --backend mpi --max-restarts 3 -- train.py
    ./launch --hostfile hostfile --preflight-only --json             checks all hosts, starts nothing
    ./launch --hostfile hostfile --role secondary -- train.py        without ssh: by hand, on each machine
    ./launch --emit hostfile > hostfile                              the machines that answer over ssh

Before a start every host is checked (lib/launch/preflight.py); lib/launch/supervisor.py starts the ranks, watches them,
and starts them again.
"""

from __future__ import annotations

import argparse
import asyncio
import difflib
import os
import shlex
import signal
import socket
import sys
from collections.abc import Sequence
from dataclasses import replace

from lib.config import load, train_arguments
from lib.errors import UserError
from lib.launch import discovery, hostfile, preflight, rendezvous, scheduler_jobs
from lib.launch import options as launch_options
from lib.launch.copy_to_hosts import copy_to_hosts
from lib.launch.hostfile import Host
from lib.launch.job import ROOT, Job, full_command
from lib.launch.options import ROLES
from lib.launch.rank_console import Console
from lib.launch.ssh import is_this_machine
from lib.launch.supervisor import supervise
from lib.system import key_file, terminal


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command line; returns the exit status: the worst rank's, 2 for wrong input, 1 where preflight fails."""
    words = sys.argv[1:] if arguments is None else list(arguments)
    try:
        options = launch_options.parse(words, __doc__)
        if options.emit == "hostfile" and options.preflight:
            return _emit_hostfile(options)
        job = launch_options.job_of(options)
        if options.emit:
            print(_emitted(job, options.emit), end="")
            return 0
        if job.directory == str(ROOT):  # elsewhere there may be other files
            _check_command(job.command)
        if options.sync:
            copy_to_hosts(job, options.sync)
        here = _this_host(job, options.role) if options.role else None
        if here is None and (options.preflight or options.preflight_only):
            passed = preflight.run(job, options.json, options.min_mbit, options.max_round_trip_ms)
            if options.preflight_only or not passed:
                return 0 if passed else 1
    except UserError as error:
        terminal.error(str(error))
        return 2
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    job = replace(job, environment={**_columns(job), **job.environment})
    console = Console(lambda: os.kill(os.getpid(), signal.SIGINT))
    try:
        secret = None
        if here is not None and len(job.hosts) > 1:
            path = options.key or key_file.usual()
            key = rendezvous.key_of(path, here == job.hosts[0], job.wedged_seconds, console.note)
            meeting = rendezvous.Meeting(job.starting_port, job.wedged_seconds, key, path)
            secret = asyncio.run(rendezvous.gather(job.hosts, here, meeting, role_commands(words), console.note))
        return asyncio.run(supervise(job, console, options.max_restarts, options.restart_with, here, secret))
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


def role_commands(arguments: Sequence[str]) -> tuple[str, str]:
    """What one types on the primary, and on a secondary: the words of this launch, with the other role."""
    words = list(arguments)
    cut = words.index("--") if "--" in words else len(words)
    before, index = words[:cut], next(i for i, word in enumerate(words) if word.partition("=")[0] == "--role")
    del before[index : index + (1 if "=" in words[index] else 2)]
    primary, secondary = (shlex.join(["./launch", "--role", role, *before, *words[cut:]]) for role in ROLES)
    return primary, secondary


def _columns(job: Job) -> dict[str, str]:
    """The variable that says at how many columns a rank wraps a line: those of our terminal, less the line's tag."""
    width = terminal.Terminal().width
    tag = max(len(f"[{job.size - 1} {host.name}] ") for host in job.hosts)
    return {} if width is None or width - tag < terminal.NARROW else {"TANDEM_COLUMNS": str(width - tag)}


def _check_command(words: Sequence[str]) -> None:
    """Checks here, once, what every rank would check: that the script exists and the settings are right.

    Raises:
        UserError: the script is missing, or a setting is wrong.
    """
    script = ROOT / words[0]
    if words[0].endswith(".py") and not script.is_file():
        near = difflib.get_close_matches(words[0], [path.name for path in ROOT.glob("*.py")], n=1)
        raise UserError(f"{script} does not exist" + (f"; did you mean {near[0]}?" if near else ""))
    if script == ROOT / "train.py" and "--help" not in words:
        options = train_arguments.parse(list(words[1:]), None)
        if options.resume is None:  # with --resume: the run may be on other hosts only
            load.load(ROOT / (options.config or train_arguments.QUICKSTART), options.overrides)


def _emit_hostfile(options: argparse.Namespace) -> int:
    """Prints the host file of the machines that answer; the exit status is 1 where none does."""
    named = launch_options.hosts_of(options).hosts if options.hostfile or options.hosts else ()
    text = discovery.hostfile_text(
        named, options.directory or str(ROOT), lambda line: print(f"launch: {line}", file=sys.stderr, flush=True)
    )
    if text is None:
        terminal.error(f"none of {', '.join(host.name for host in named)} answers; ssh to one of them by hand first")
        return 1
    print(text, end="")
    return 0


def _emitted(job: Job, kind: str) -> str:
    """A host file, or a job file for somebody else's scheduler.

    Raises:
        UserError: the scheduler cannot run it.
    """
    if kind == "hostfile":
        return hostfile.to_text(job.hosts)
    write = {"slurm": scheduler_jobs.slurm, "mpijob": scheduler_jobs.mpijob}[kind]
    environment = {"PYTHONUNBUFFERED": "1", **job.environment}
    return write(job.hosts, full_command(job), environment, job.directory, job.python)


def _this_host(job: Job, role: str) -> Host:
    """The host whose ranks are this machine's, where people start each machine by hand.

    Raises:
        UserError: the backend needs a starter, or this machine is not the host that it should be.
    """
    if job.backend == "mpi":
        raise UserError("--role is for ring, jaccl and nccl: mpirun reaches the other hosts over ssh")
    mine = [host for host in job.hosts if is_this_machine(host)]
    if len(mine) != 1:
        names = ", ".join(host.name for host in job.hosts)
        raise UserError(
            f"--role {role}: this machine ({socket.gethostname()}) is {len(mine)} of the hosts {names}, not one"
        )
    if (mine[0] == job.hosts[0]) != (role == "primary"):
        raise UserError(
            f"--role {role}: the first host, {job.hosts[0].name}, is the primary; this machine is {mine[0].name}"
        )
    return mine[0]
