"""How another host is reached: the command lines of ssh and rsync, and what to do where they fail."""

from __future__ import annotations

import contextlib
import itertools
import re
import shlex
import shutil
import socket
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from lib.environment import ROOT
from lib.errors import UserError
from lib.launch import hostfile
from lib.launch.hostfile import Host
from lib.launch.job import Job
from lib.system import network

CONNECT_SECONDS = 10
NOT_COPIED = (".git", ".venv", "runs", "__pycache__", ".*_cache")  # of the project
FULL_DISK_ACCESS = (
    "macOS keeps Desktop, Documents and Downloads from what ssh starts: move it to the home folder, or there: System "
    "Settings, General, Sharing, Remote Login, Allow full disk access for remote users"
)


def remote_command(job: Job, host: Host, module: str, options: Sequence[str] = ()) -> list[str]:
    """The command line that runs a module of this project on a host, over ssh, with further options of ssh."""
    start = shlex.join([job.python_of(host), "-m", *module.split()])
    *words, end, name = ssh_command(host)
    return [*words, *options, end, name, f"cd {shlex.quote(job.directory_of(host))} && exec {start}"]


def ssh_command(host: Host) -> list[str]:
    """ssh to a host: it never asks, notices a dead host, and takes nothing in the name for an option. It shares no
    connection of the user's: behind one that died every new session would hang."""
    options = ["BatchMode=yes", f"ConnectTimeout={CONNECT_SECONDS}", "ServerAliveInterval=5", "ServerAliveCountMax=3"]
    options += ["ControlMaster=no", "ControlPath=none", *([f"Port={host.port}"] if host.port else [])]
    return ["ssh", "-T", *(word for option in options for word in ("-o", option)), "--", host.name]


def typed(host: Host, command: str) -> str:
    """A command on a host, as a person types it here."""
    return f"ssh {f'-p {host.port} ' if host.port else ''}{host.name} {shlex.quote(command)}"


def rsync(host: Host, source: Path | str, target: str, shell: str = "") -> str:
    """The command that copies a file, or a folder's content, to a host. macOS's rsync has no --mkpath."""
    shell = shell or (f"ssh -p {host.port}" if host.port else "")
    slash, above = ("/", target) if Path(source).is_dir() else ("", str(Path(target).parent))
    words = ["rsync", "-a", "--checksum", f"--rsync-path=mkdir -p {shlex.quote(above)} && rsync"]
    words += ["-e", shell] if shell else []
    words += [f"--exclude={name}" for name in NOT_COPIED] if Path(source) == ROOT else []
    return shlex.join([*words, f"{source}{slash}", f"{host.name}:{shlex.quote(target + slash)}"])


def copy_to_hosts(job: Job, paths: Sequence[str]) -> None:
    """Copies paths to every other host. Of `.`, the project, runs and environments are left out, and set up there.
    Raises UserError: rsync is missing, or it or the setup fails on a host."""
    if shutil.which("rsync") is None:
        raise UserError("--sync needs rsync; install it (apt-get install rsync, brew install rsync)")
    for host, path in itertools.product(job.hosts, paths):
        source = Path(path).resolve()
        target = job.path_on(host, source)
        if is_this_machine(host) and target == str(source):
            continue
        setup = f"cd {shlex.quote(target)} && ([ -x .venv/bin/python ] || make setup)"
        steps = [shlex.split(rsync(host, source, target, shlex.join(ssh_command(host)[:-2])))]
        steps += [[*ssh_command(host), setup]] if source == ROOT else []
        for words in steps:
            done = subprocess.run(words, capture_output=True, text=True, stdin=subprocess.DEVNULL)
            if done.returncode:
                why = (done.stderr.strip().splitlines() or [f"status {done.returncode}"])[0]
                raise UserError(f"--sync {path}: {words[0]} to {host.name} failed: {why}")
        print(f"launch: {path} copied to {host.name}", file=sys.stderr)


def is_this_machine(host: Host) -> bool:
    """Whether a host's name means the machine that this runs on, and no other user or sshd there."""
    if "@" in host.name or host.port:
        return False
    if host.name in ("localhost", socket.gethostname(), network.own_name()):
        return True
    with contextlib.suppress(OSError, UserError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.bind((hostfile.address(host), 0))  # only an own address can be bound
        return True
    return False


def remedy(host: Host, error: str, directory: str = str(ROOT)) -> tuple[str, str, str]:
    """What ssh, or the program that it started, failed at, the command that helps, and what to know of that command.
    error: its last line; directory: the project's folder there."""
    name, there = host.name.rpartition("@")[2], shlex.quote(directory)
    start = "start sshd there: sudo systemctl start ssh; on a Mac: System Settings, General, Sharing, Remote Login"
    other_python = "or name the Python there: --python, or python= in the host file"
    reach = "is it on, awake, on this network, and the name right in the host file, /etc/hosts or ~/.ssh/config"
    table = [
        ("operation not permitted", "project", typed(host, f"ls -ld {there}"), FULL_DISK_ACCESS),
        (r"\bcd:|can't cd", "project", rsync(host, ROOT, directory), "or name the folder there: --directory"),
        ("permission denied", "ssh", f"ssh-copy-id {host.name}", ""),
        ("host key", "ssh", typed(host, "true"), "compare the key with the host's own, then accept it"),
        ("refused", "ssh", f"nc -z {name} {host.port or 22}", start),
        ("resolve", "ssh", f"ping -c 3 {name}", reach),
        ("not found|no such file|no module|error", "packages", typed(host, f"cd {there} && make setup"), other_python),
        ("", "ssh", f"ping -c 3 {name}", reach),
    ]
    return next(row[1:] for row in table if re.search(row[0], error, re.IGNORECASE))
