"""./launch --sync PATH: copies the project, a model or data to the same place on every host, by rsync."""

from __future__ import annotations

import shlex
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from lib.errors import UserError
from lib.launch import ssh
from lib.launch.job import ROOT, Job


def copy_to_hosts(job: Job, paths: Sequence[str]) -> None:
    """Copies paths to the same place on every other host. Of `.`, the project, runs and environments are left out.

    Raises:
        UserError: rsync is missing, or fails on a host.
    """
    if shutil.which("rsync") is None:
        raise UserError("--sync needs rsync; install it (apt-get install rsync, brew install rsync)")
    for host in job.hosts:
        for path in paths:
            source = Path(path).resolve()
            is_project = source == ROOT
            target = job.directory if is_project else str(source)
            if ssh.is_this_machine(host) and target == str(source):
                continue
            excluded = [".git", ".venv", "runs", "__pycache__", ".*_cache"] if is_project else []
            # rsync takes files of one size and second for equal; a model of 100 GB is not read twice for that.
            slash = "/" if source.is_dir() else ""
            words = ["rsync", "-a", ssh.rsync_with_folder(target if slash else str(Path(target).parent))]
            words += [*(["--checksum"] if is_project else []), *(f"--exclude={name}" for name in excluded)]
            words += ["-e", shlex.join(ssh.ssh_command(host)[:-2])]
            done = subprocess.run(
                [*words, "--", f"{source}{slash}", f"{host.name}:{target}{slash}"], capture_output=True, text=True
            )
            if done.returncode:
                errors = done.stderr.strip().splitlines()
                why = errors[0] if errors else done.returncode
                raise UserError(f"--sync {path}: rsync to {host.name} failed: {why}")
        print(f"launch: {', '.join(paths)} copied to {host.name}", file=sys.stderr)
