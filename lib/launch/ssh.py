"""How another host is reached: the command lines of ssh and rsync, and which host is this machine."""

from __future__ import annotations

import shlex
import socket

from lib.errors import UserError
from lib.launch import hostfile
from lib.launch.hostfile import Host
from lib.launch.job import Job
from lib.system import network

CONNECT_SECONDS = 10


def remote_command(job: Job, host: Host, module: str) -> list[str]:
    """The command line that runs a module of ours on a host, over ssh."""
    start = shlex.join([job.python, "-m", module])
    return [*ssh_command(host), f"cd {shlex.quote(job.directory)} && exec {start}"]


def ssh_command(host: Host) -> list[str]:
    """ssh to a host: it never asks, notices a dead host, and takes nothing in the name for an option."""
    options = ["BatchMode=yes", f"ConnectTimeout={CONNECT_SECONDS}", "ServerAliveInterval=5", "ServerAliveCountMax=3"]
    return ["ssh", "-T", *(word for option in options for word in ("-o", option)), "--", host.name]


def rsync_with_folder(folder: str) -> str:
    """rsync's option that makes a folder at the other end first. macOS's rsync has no --mkpath."""
    return f"--rsync-path=mkdir -p {shlex.quote(folder)} && rsync"


def is_this_machine(host: Host) -> bool:
    """Whether a host's name means the machine that this runs on, and no other user there."""
    if "@" in host.name:
        return False
    if host.name in ("localhost", socket.gethostname(), network.own_name()):
        return True
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.bind((hostfile.address(host), 0))  # only an own address can be bound
    except (OSError, UserError):
        return False
    return True
