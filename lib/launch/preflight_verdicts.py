"""What hosts' facts mean for a run: pure functions from facts to findings, each fault with the command that fixes it.

A remedy is one command that any shell takes as it stands, zsh too: what else one should know of it is in `note`.
"""

from __future__ import annotations

import itertools
import math
import re
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple, TypedDict

from lib.launch import ssh
from lib.launch.host_facts import CalibrationState, Digest, Disk, Load, Memory
from lib.launch.hostfile import Host
from lib.launch.job import ROOT, Job
from lib.launch.link_probe import LinkReport
from lib.launch.run_needs import Needs

HEADROOM_BYTES = 2**26  # on a run's disk, besides its checkpoints
# What macOS's privacy protection keeps from programs that ssh started, wherever it is in a path.
PRIVATE_FOLDER = re.compile(r"(/Users/[^/]+)/((?:Desktop|Documents|Downloads|Library/Mobile Documents)(?:/.*)?)$")
NOT_PERMITTED = re.compile(r"operation not permitted", re.IGNORECASE)  # EPERM, in the words of zsh, Python, rsync
FULL_DISK_ACCESS = (
    "or, on that Mac: System Settings, General, Sharing, Remote Login, Allow full disk access for remote users"
)


@dataclass(frozen=True)
class Finding:
    """What a check found on a host. status: ok, told (worth knowing), failed."""

    host: str
    check: str
    status: str
    message: str = ""
    remedy: str = ""  # the command that fixes it
    note: str = ""  # what to know of that command, or what else would do


class Verdict(NamedTuple):
    """What a fact means: a finding without its host and check."""

    status: str
    message: str
    remedy: str = ""
    note: str = ""


class Clock(TypedDict):
    """A host's clock against this machine's."""

    ahead_seconds: float
    unsure_seconds: float  # of that


class OwnFacts(TypedDict):
    """This machine's project, packages and files, which the other hosts' should equal."""

    project: dict[str, str | None]
    packages: dict[str, str]
    files: dict[str, Digest]


@dataclass(frozen=True)
class Context:
    """What facts are compared with: this machine's own, and what the run needs."""

    here: OwnFacts
    needs: Needs
    job: Job
    model_bytes: int
    systems: Mapping[str, str] = field(default_factory=dict)  # of every host that answered, e.g. Linux, Darwin
    free_bytes: float = math.inf  # of memory, of all hosts that answered together; infinite where one does not say

    def is_mac(self, host: Host) -> bool:
        return self.systems.get(host.name) == "Darwin"

    def again(self, *options: str) -> str:
        """The launcher's own command line, with further options."""
        words = list(self.job.typed or ("--hosts", ",".join(f"{host.name}:{host.slots}" for host in self.job.hosts)))
        cut = words.index("--") if "--" in words else len(words)
        return shlex.join(["./launch", *words[:cut], *options, *words[cut:]])

    def there(self, host: Host, command: str) -> str:
        """A command in the project's folder on a host."""
        return f"ssh {host.name} {shlex.quote(f'cd {shlex.quote(self.job.directory)} && {command}')}"


def findings_of(hosts: Sequence[Host], answers: Mapping[str, Mapping[str, Any]], context: Context) -> list[Finding]:
    """What each host's facts mean."""
    memory = [answers[host.name]["memory"].get("free_bytes") for host in hosts if answers[host.name]["memory"]]
    context = replace(context, free_bytes=math.inf if None in memory else sum(memory))
    findings = []
    for host in hosts:
        for check, (fact, verdicts_of) in FACT_CHECKS.items():
            answer = answers[host.name][fact]
            if answer is None:  # not asked
                continue
            if isinstance(answer, dict) and "error" in answer:
                error = str(answer["error"])
                slow = Verdict("failed", error, f"ssh {host.name} uptime", "does it answer, is it overloaded")
                verdicts = [refused(host, error, context) or slow]
            else:
                verdicts = verdicts_of(host, answer, context)
            findings += [Finding(host.name, check, *verdict) for verdict in verdicts or [Verdict("ok", "")]]
    return findings


def _check_ssh(host: Host, unreached: Mapping[str, str], context: Context) -> list[Verdict]:
    return [
        Verdict("failed", f"from there to {other}: {error}", f"ssh -t {host.name} {shlex.quote(remedy)}", note)
        for other, error in unreached.items()
        for remedy, note in [ssh.ssh_remedy(other, error, context.is_mac(host))]
    ]


def _check_project(host: Host, theirs: Mapping[str, str | None], context: Context) -> list[Verdict]:
    own = context.here["project"]
    differ = sorted(name for name in {**own, **theirs} if own.get(name) != theirs.get(name))
    to = f"{host.name}:{shlex.quote(context.job.directory)}"
    here = shlex.quote(str(ROOT))
    copy = (
        f"rsync -a --checksum --delete --exclude='._*' --exclude=__pycache__"
        f" --include='*/' --include='*.py' --exclude='*' {here}/lib/ {to}/lib/"
        f" && rsync -a --checksum {here}/train.py {to}/"
    )
    return [Verdict("failed", f"{_few(differ)} not as on this machine", copy)] if differ else []


def _check_packages(host: Host, theirs: Mapping[str, str], context: Context) -> list[Verdict]:
    differ = [
        f"{name} {theirs.get(name)} (here {version})"
        for name, version in context.here["packages"].items()
        if theirs.get(name) != version
    ]
    python = context.here["packages"].get("python")
    wanted = f" PYTHON=python{python}" if theirs.get("python") != python else ""
    remedy = context.there(host, f"make -B setup{wanted}")
    return [Verdict("failed", _few(differ), remedy)] if differ else []


def _check_files(host: Host, theirs: Mapping[str, Digest], context: Context) -> list[Verdict]:
    verdicts: list[Verdict] = []
    for path, own in context.here["files"].items():
        if own is None:
            look = f"ls -l {shlex.quote(str(Path(path).parent))}"
            verdicts.append(
                Verdict("failed", f"{path} is not on this machine", look, "correct the path in the configuration")
            )
        elif faults := [one["fault"] for one in (theirs[path], own) if isinstance(one, dict)]:
            verdicts.append(unreadable(host, path, faults[0], context))
        elif theirs[path] != own:
            source = (ROOT / path).resolve()
            target = path if Path(path).is_absolute() else f"{context.job.directory}/{path}"
            slash, delete = ("/", " --delete") if source.is_dir() else ("", "")
            # --checksum: rsync takes files of one size and second for equal.
            making = shlex.quote(ssh.rsync_with_folder(target if slash else str(Path(target).parent)))
            litter = " --exclude=.DS_Store --exclude='._*' --exclude=.cache" if slash else ""
            to = f"{host.name}:{shlex.quote(f'{target}{slash}')}"
            copy = f"rsync -a --checksum {making}{delete}{litter} {shlex.quote(f'{source}{slash}')} {to}"
            wrong = "is missing" if theirs[path] is None else "differs from the one here"
            verdicts.append(Verdict("failed", f"{path} {wrong}", copy))
    return verdicts


def _check_models(host: Host, theirs: Mapping[str, bool], context: Context) -> list[Verdict]:
    command = Path(context.job.python).parent / "hf"
    return [
        Verdict(
            "failed", f"{name} is not in the hub's cache", f"ssh {host.name} {command} download {shlex.quote(name)}"
        )
        for name, there in theirs.items()
        if not there
    ]


def _check_memory(host: Host, memory: Memory, context: Context) -> list[Verdict]:
    # Weights, and for full training their gradients in float32 and Adam's two moments; activations come on top.
    whole = context.model_bytes * (5 if context.needs.method == "full" else 1.3)
    needed, free = whole * host.slots, memory["free_bytes"]
    if free is None or free >= needed:
        return [Verdict("ok", f"{gigabytes(free)} free" if free else "")]
    ranks = sum(one.slots for one in context.job.hosts)
    if context.needs.strategy in ("auto", "sharded", "pipelined") and ranks > 1 and context.free_bytes >= whole:
        return [Verdict("ok", f"{gigabytes(free)} free, for a part of the model: all of it wants {gigabytes(whole)}")]
    if memory.get("has_gpu_memory"):
        return [
            Verdict("told", f"{gigabytes(free)} of main memory free, the model wants {gigabytes(needed)} of the GPU")
        ]
    message = (
        f"{gigabytes(free)} free, {gigabytes(needed)} wanted for the weights of {host.slots} ranks and their training"
    )
    look = f"ssh {host.name} 'ps aux | sort -rnk4 | head -3'"
    return [Verdict("failed", message, look, "end what takes most, or take fewer slots")]


def _check_disk(host: Host, disk: Disk, context: Context) -> list[Verdict]:
    needs, folder = context.needs, shlex.quote(disk["folder"])
    needed = context.model_bytes * (3 if needs.method == "full" else 0.15) * needs.checkpoints + HEADROOM_BYTES
    if disk["fault"]:
        message = f"{disk['folder']}: {disk['fault']}"
        if NOT_PERMITTED.search(str(disk["fault"])) and PRIVATE_FOLDER.match(disk["folder"]):
            return [unreadable(host, disk["folder"], disk["fault"], context)]
        remedy = f"ssh -t {host.name} {shlex.quote(f'sudo chown -R $USER {folder}')}"
        return [Verdict("failed", message, remedy, "or another folder: run.dir=ELSEWHERE")]
    if disk["free_bytes"] >= needed:
        return [Verdict("ok", f"{gigabytes(disk['free_bytes'])} free")]
    free = gigabytes(disk["free_bytes"])
    message = f"{free} free at {disk['folder']}, {needs.checkpoints} checkpoints want {gigabytes(needed)}"
    look = f"ssh {host.name} {shlex.quote(f'du -sh {folder}')}"
    return [Verdict("failed", message, look, "remove old runs, or take another folder: run.dir=ELSEWHERE")]


def _check_ports(host: Host, taken: Sequence[int], context: Context) -> list[Verdict]:
    if not taken:
        return []
    free = context.job.starting_port + 1000
    message = f"port {', '.join(map(str, taken))} is taken"
    who = f"ssh {host.name} lsof -nP -i :{taken[0]}"
    return [
        Verdict(
            "failed", message, context.again("--starting-port", str(free)), f"or end what listens there; {who} names it"
        )
    ]


def _check_calibration(host: Host, kept: CalibrationState, context: Context) -> list[Verdict]:
    day = str(kept.get("measured_at"))[:10]
    if kept["there"] and kept["fresh"]:
        return [Verdict("ok", day)]
    message = f"measured {day}, too old or with other versions" if kept["there"] else "none yet"
    status = "failed" if context.needs.require_calibration else "told"
    return [Verdict(status, f"{message}; shares start equal", context.there(host, "make calibrate"))]


def _check_clock(host: Host, clock: Clock, context: Context) -> list[Verdict]:
    message = f"{clock['ahead_seconds']:+.1f} s from this machine's"
    if abs(clock["ahead_seconds"]) < 2 + clock["unsure_seconds"]:
        return [Verdict("ok", message)]
    command = "sudo sntp -sS time.apple.com" if context.is_mac(host) else "sudo timedatectl set-ntp true"
    return [Verdict("told", f"{message}: times in the logs will not fit", f"ssh -t {host.name} {command}")]


def _check_load(host: Host, load: Load, _: Context) -> list[Verdict]:
    message = f"{load['average']:.1f} on {load['cpus']} cores"
    if training := load.get("training"):
        process, words = training
        message += f", and a training runs there already, process {process}: {words}"
        return [Verdict("told", message, f"ssh {host.name} kill -INT {process}", "or wait for its end")]
    if load["average"] <= 0.5 * load["cpus"]:
        return [Verdict("ok", message)]
    return [Verdict("told", f"{message}: somebody else computes there", f"ssh -t {host.name} top")]


def _check_rdma(host: Host, listed: Mapping[str, Sequence[str]], _: Context) -> list[Verdict]:
    wanted = {device for entry in host.rdma for device in (entry if isinstance(entry, list) else [entry]) if device}
    missing = sorted(wanted - set(listed["devices"]))
    note = "in macOS Recovery, then reboot"
    return [Verdict("failed", f"no {', '.join(missing)}", "rdma_ctl enable", note)] if missing else []


def _check_system(host: Host, system: str, context: Context) -> list[Verdict]:
    """A Mac and a Linux box speak one protocol over MLX's own ring, and nothing else is promised of them."""
    if len(set(context.systems.values())) < 2 or context.job.backend == "ring":
        return [Verdict("ok", system)]
    names = {"Darwin": "macOS"}
    mixed = " and ".join(sorted(names.get(one, one) for one in set(context.systems.values())))
    reasons = {
        "mpi": "its Open MPI is not made for hosts of unlike systems",
        "jaccl": "it is RDMA between Macs",
        "jaccl-ring": "it is RDMA between Macs",
        "nccl": "it is for NVIDIA GPUs",
    }
    why = reasons.get(context.job.backend, "")
    message = f"{names.get(system, system)} in a world of {mixed}: only the ring backend is promised there ({why})"
    return [Verdict("failed", message, context.again("--backend", "ring"))]


# Check ➜ the fact that it looks at, and what that means.
FACT_CHECKS: dict[str, tuple[str, Callable[[Host, Any, Context], list[Verdict]]]] = {
    "system": ("system", _check_system),
    "ssh": ("ssh_to", _check_ssh),
    "project": ("project", _check_project),
    "packages": ("packages", _check_packages),
    "files": ("files", _check_files),
    "models": ("models", _check_models),
    "memory": ("memory", _check_memory),
    "disk": ("disk", _check_disk),
    "ports": ("ports", _check_ports),
    "calibration": ("calibration", _check_calibration),
    "clock": ("clock", _check_clock),
    "load": ("load", _check_load),
    "rdma": ("rdma", _check_rdma),
}


def refused(host: Host, error: str, context: Context) -> Verdict | None:
    """The verdict where macOS keeps the project's folder from ssh; None where something else is wrong."""
    if NOT_PERMITTED.search(error) is None:
        return None
    inside = PRIVATE_FOLDER.match(context.job.directory)
    named = re.search(r"/Users/[^'\":]+", error)
    return unreadable(host, named[0] if named and not inside else context.job.directory, error, context)


def unreadable(host: Host, path: str, error: str, context: Context) -> Verdict:
    """The verdict on a path that a host's system keeps from this user, or from ssh."""
    inside = PRIVATE_FOLDER.match(path)
    if inside is None:
        return Verdict("failed", f"{path}: {error}", f"ssh {host.name} ls -ld {shlex.quote(path)}", FULL_DISK_ACCESS)
    message = f"{path}: {error}; macOS keeps {Path(inside[2]).parts[0]} from what ssh starts"
    target = f"{inside[1]}/{Path(path).name}"
    if path != context.job.directory:
        note = f"type it in Terminal on {host.name}, and name {target} in the configuration; {FULL_DISK_ACCESS}"
        return Verdict("failed", message, f"mv {shlex.quote(path)} {shlex.quote(target)}", note)
    copy = ssh.project_copy_command(host, target)
    note = f"then make setup there, and launch with --directory {target}; {FULL_DISK_ACCESS}"
    return Verdict("failed", message, copy, note)


def links_to_measure(job: Job, reached: Sequence[Host]) -> list[tuple[Host, Host]]:
    """The pairs (one, other) of hosts where `one` has to reach `other`.

    Over MLX's ring every host connects to the next one alone, and where addresses are given they may be those of the
    cable between the two, which nobody else sees: MLX's configurator gives each Mac of a Thunderbolt ring the addresses
    that face its previous neighbour. Hosts that are only named are asked for every pair: another host may be the
    neighbour after a restart.
    """
    hosts = job.hosts
    if job.backend != "ring" or not all(host.addresses for host in hosts):
        return list(itertools.combinations(reached, 2))
    neighbours = [(host, hosts[(index + 1) % len(hosts)]) for index, host in enumerate(hosts)]
    if len(hosts) == 2:
        neighbours = neighbours[:1]
    return [(one, other) for one, other in neighbours if one in reached and other in reached and one != other]


def link_findings(
    links: Mapping[tuple[str, str], LinkReport],
    floor_bytes_per_second: float,
    ceiling_seconds: float,
    context: Context,
) -> list[Finding]:
    """Every measured pair of hosts against the floor, as findings of the first of the pair."""
    findings = []
    for (one, other), link in links.items():
        if "error" in link:
            message, where = f"to {other}: {link['error']}", link.get("address") or other.rpartition("@")[2]
            look = f"ssh {one} ping -c 3 {where}"
            findings.append(Finding(one, "links", "failed", message, look, "is a firewall on, a cable out"))
            continue
        rate, trip = link["bytes_per_second"], link["round_trip_seconds"]
        message = f"to {other}: {rate * 8 / 1e6:,.0f} Mbit/s, {trip * 1e3:.2f} ms"
        if rate >= floor_bytes_per_second and trip <= ceiling_seconds:
            findings.append(Finding(one, "links", "ok", message))
            continue
        # With room for what a link does a minute later, and nothing about what is good enough.
        accepted: list[str] = []
        if rate < floor_bytes_per_second:
            accepted += ["--min-mbit", f"{rate * 8e-6 / 2:.1f}"]
        if trip > ceiling_seconds:
            accepted += ["--max-round-trip-ms", str(math.ceil(trip * 1e3 * 2))]
        accept = context.again(*accepted)
        findings.append(Finding(one, "links", "failed", message, accept, "accepts it; better a cable than Wi-Fi"))
    return findings


def _few(names: Sequence[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def gigabytes(size: float) -> str:
    """Bytes in GB, with one digit after the point."""
    return f"{size / 1e9:.1f} GB"
