"""How another host is reached: the command lines of ssh, and what to do where they fail."""

from __future__ import annotations

import contextlib
import re
import shlex
import socket
from collections.abc import Sequence

from lib.environment import ROOT
from lib.errors import UserError
from lib.launch import hostfile
from lib.launch.hostfile import Host
from lib.launch.job import Job
from lib.system import network

CONNECT_SECONDS = 10
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


def remedy(
    host: Host, error: str, directory: str = str(ROOT), sync: str = "./launch --sync . ..."
) -> tuple[str, str, str]:
    """What ssh, or the program that it started, failed at, the command that helps, and what to know of that command.
    error: its last line; directory: the project's folder there; sync: the command that copies it."""
    name, there = host.name.rpartition("@")[2], shlex.quote(directory)
    start = "start sshd there: sudo systemctl start ssh; on a Mac: System Settings, General, Sharing, Remote Login"
    other_python = "or name the Python there: --python, or python= in the host file"
    reach = "is it on, awake, on this network, and the name right in the host file, /etc/hosts or ~/.ssh/config"
    table = [
        ("operation not permitted", "project", typed(host, f"ls -ld {there}"), FULL_DISK_ACCESS),
        (r"\bcd:|can't cd", "project", sync, "or name the folder there: --directory"),
        ("permission denied", "ssh", f"ssh-copy-id {host.name}", ""),
        ("host key", "ssh", typed(host, "true"), "compare the key with the host's own, then accept it"),
        ("refused", "ssh", f"nc -z {name} {host.port or 22}", start),
        ("resolve", "ssh", f"ping -c 3 {name}", reach),
        ("not found|no such file|no module|error", "packages", typed(host, f"cd {there} && make setup"), other_python),
        ("", "ssh", f"ping -c 3 {name}", reach),
    ]
    return next(row[1:] for row in table if re.search(row[0], error, re.IGNORECASE))
