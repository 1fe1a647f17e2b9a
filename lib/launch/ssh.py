"""Other hosts: the command lines of ssh, what to do where they fail, and the project, models and data copied there."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shlex
import socket
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from lib.environment import ROOT
from lib.errors import UserError
from lib.launch import hostfile, receiver
from lib.launch.hostfile import Host
from lib.launch.rank_commands import Job
from lib.system import network, os_commands, terminal

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


NOT_COPIED = re.compile(r"\.git|\.venv|runs|build|__pycache__|\..*_cache")  # of the project
INSTALL_SECONDS = 1800.0
# What ssh starts has none of a person's PATH: also Homebrew's, python.org's and uv's.
PYTHONS = "python3 python3.1? /opt/homebrew/bin/python3.1? /usr/local/bin/python3.1? ~/.local/bin/python3.1?"
PYTHONS += " /Library/Frameworks/Python.framework/Versions/*/bin/python3 ~/.local/share/uv/python/*/bin/python3"
# Newer than what it was made from: nothing to do. An environment elsewhere that has MLX is its owner's.
INSTALLED = '[ -L .venv ] && exit 0; for made in .venv/installed-*; do [ "$made" -nt pyproject.toml ] && '
INSTALLED += '[ "$made" -nt constraints.txt ] && exit 0; done'


def copy_to_hosts(job: Job, paths: Sequence[str]) -> None:
    """Copies paths to every other host. Of `.`, the project, runs and environments are left out, and it is installed
    there. Raises UserError: a path does not exist, or copying or installing fails on a host."""
    for path in paths:
        source = Path(path).expanduser().resolve()
        named = path if path.startswith("~") and source != ROOT else str(source)  # a home is each host's
        digests = {name: receiver.sha256(file) or "" for name, file in _files(source).items()}
        if not digests:
            raise UserError(f"--sync {source}: no file is there")
        with ThreadPoolExecutor(len(job.hosts)) as pool:
            list(pool.map(lambda host: _copy(job, host, named, source, digests), job.hosts))  # noqa: B023


def _files(source: Path) -> dict[str, Path]:
    """What is copied of a file or folder, by its path in the folder."""
    if source.is_file():
        return {source.name: source}
    inside_source: dict[str, Path] = {}
    for folder, inside, names in os.walk(source):
        if source == ROOT:
            inside[:] = [name for name in inside if not NOT_COPIED.fullmatch(name)]
        paths = [Path(folder, name) for name in names if source != ROOT or not NOT_COPIED.fullmatch(name)]
        inside_source |= {path.relative_to(source).as_posix(): path for path in paths if path.is_file()}
    return inside_source


def _copy(job: Job, host: Host, named: str, source: Path, digests: Mapping[str, str]) -> None:
    target = job.path_on(host, named)
    if is_this_machine(host) and target == named:
        return
    folder, base = (Path(target).parent, source.parent) if source.is_file() else (Path(target), source)
    if source.is_file() and Path(target).name != source.name:
        raise UserError(f"--sync {source}: it has another name on {host.name}; sync its folder")
    text = Path(receiver.__file__).read_text(encoding="utf-8")
    words = [*ssh_command(host), _by_python(host, ["-c", text, str(folder)])]
    with tempfile.TemporaryFile("w+") as errors:
        process = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors)
        assert process.stdin is not None and process.stdout is not None
        differ: list[str] = []
        with contextlib.suppress(BrokenPipeError), process.stdin:
            process.stdin.write(json.dumps(digests).encode() + b"\n")
            process.stdin.flush()
            answers = (line.decode(errors="replace") for line in process.stdout)
            answer = next((line for line in answers if line.startswith(receiver.MARK)), f"{receiver.MARK}[]")
            differ = json.loads(answer.removeprefix(receiver.MARK))
            with tarfile.open(fileobj=process.stdin, mode="w|", encoding="utf-8", dereference=True) as archive:
                for name in differ:
                    archive.add(base / name, name)
        if process.wait() != 0:
            errors.seek(0)
            raise _fault(source, host, errors.read(), process.returncode)
    size = sum((base / name).stat().st_size for name in differ)
    _note(f"{source.name}: {len(differ)} files, {terminal.size_text(size)}, copied to {host.name}")
    if source == ROOT:
        _install(job, host, target)


def _install(job: Job, host: Host, folder: str) -> None:
    """Installs the project where it was not, or from other requirements."""
    install = _by_python(host, ["-P", "lib/system/installation.py"])
    began, python = time.monotonic(), job.python_of(host)
    test = f"{INSTALLED}; {install}"
    if python != f"{folder}/.venv/bin/python":
        test = f"{shlex.quote(python)} -c 'import mlx.core' && exit 0; {test}"
    command = f"cd {shlex.quote(folder)} && exec sh -c {shlex.quote(test)}"
    done = os_commands.run([*ssh_command(host), command], INSTALL_SECONDS)
    if done.status != 0:
        raise _fault(ROOT, host, done.errors or f"not installed within {INSTALL_SECONDS:.0f} s", done.status)
    if (seconds := time.monotonic() - began) > 5:
        _note(f"installed on {host.name} in {seconds:.0f} s")


def _by_python(host: Host, words: Sequence[str]) -> str:
    """A command of a shell that runs words by the first Python there that is new enough."""
    test, needed = "import sys; sys.exit(sys.version_info < (3, 11))", "a Python from 3.11 on is needed there"
    configured = shlex.quote(host.python or "")
    command = f'for python in {configured} {PYTHONS}; do "$python" -c {shlex.quote(test)} 2>/dev/null && '
    command += f'exec "$python" {shlex.join(words)}; done; echo "error: {needed}" >&2; exit 2'
    return f"exec sh -c {shlex.quote(command)}"


def _fault(source: Path, host: Host, errors: str, status: int | None) -> UserError:
    lines = [line.strip() for line in errors.splitlines() if line.strip()] or ["no reason was given"]
    why = next((line for line in reversed(lines) if re.search("error", line, re.IGNORECASE)), lines[-1])
    steps = remedy(host, why)[1:] if status == 255 else ()  # of ssh itself
    return UserError("; ".join(filter(None, [f"--sync {source}: on {host.name}: {why}", *steps])))


def _note(text: str) -> None:
    print(f"launch: {text}", file=sys.stderr, flush=True)
