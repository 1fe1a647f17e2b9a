"""The project, models and data on the other hosts: copied where they differ, and the project installed there.

All that a host needs is sshd and a Python from 3.11 on.
"""

from __future__ import annotations

import json
import os
import re
import shlex
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
from lib.launch import receiver
from lib.launch.hostfile import Host
from lib.launch.job import Job
from lib.launch.ssh import is_this_machine, ssh_command
from lib.system import os_commands, terminal

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
    words = [*ssh_command(host), _by_python(job, host, ["-c", text, str(folder)])]
    with tempfile.TemporaryFile("w+") as errors:
        process = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors)
        assert process.stdin is not None and process.stdout is not None
        differ: list[str] = []
        try:
            process.stdin.write(json.dumps(digests).encode() + b"\n")
            process.stdin.flush()
            answers = (line.decode(errors="replace") for line in process.stdout)
            answer = next((line for line in answers if line.startswith(receiver.MARK)), f"{receiver.MARK}[]")
            differ = json.loads(answer.removeprefix(receiver.MARK))
            with tarfile.open(fileobj=process.stdin, mode="w|", encoding="utf-8", dereference=True) as archive:
                for name in differ:
                    archive.add(base / name, name)
            process.stdin.close()
        except BrokenPipeError:
            pass
        if process.wait() != 0:
            errors.seek(0)
            raise _fault(source, host, errors.read())
    size = sum((base / name).stat().st_size for name in differ)
    _note(f"{source.name}: {len(differ)} files, {terminal.size_text(size)}, copied to {host.name}")
    if source == ROOT:
        _install(job, host, target)


def _install(job: Job, host: Host, folder: str) -> None:
    """Installs the project where it was not, or from other requirements."""
    install = _by_python(job, host, ["-P", "lib/system/installation.py"])
    began, python = time.monotonic(), job.python_of(host)
    test = f"{INSTALLED}; {install}"
    if python != f"{folder}/.venv/bin/python":
        test = f"{shlex.quote(python)} -c 'import mlx.core' && exit 0; {test}"
    command = f"cd {shlex.quote(folder)} && exec sh -c {shlex.quote(test)}"
    done = os_commands.run([*ssh_command(host), command], INSTALL_SECONDS)
    if done.status != 0:
        raise _fault(ROOT, host, done.errors or f"not installed within {INSTALL_SECONDS:.0f} s")
    if (seconds := time.monotonic() - began) > 5:
        _note(f"installed on {host.name} in {seconds:.0f} s")


def _by_python(job: Job, host: Host, words: Sequence[str]) -> str:
    """A command of a shell that runs words by the first Python there that is new enough."""
    test, needed = "import sys; sys.exit(sys.version_info < (3, 11))", "a Python from 3.11 on is needed there"
    configured = shlex.quote(host.python or "")
    command = f'for python in {configured} {PYTHONS}; do "$python" -c {shlex.quote(test)} 2>/dev/null && '
    command += f'exec "$python" {shlex.join(words)}; done; echo "error: {needed}" >&2; exit 2'
    return f"exec sh -c {shlex.quote(command)}"


def _fault(source: Path, host: Host, errors: str) -> UserError:
    lines = [line.strip() for line in errors.splitlines() if line.strip()] or ["no reason was given"]
    why = next((line for line in reversed(lines) if re.search("error", line, re.IGNORECASE)), lines[-1])
    return UserError(f"--sync {source}: on {host.name}: {why}")


def _note(text: str) -> None:
    print(f"launch: {text}", file=sys.stderr, flush=True)
