"""What hosts' facts mean for a run: pure functions from facts to findings, each fault with the command that mends it.

A remedy is one command that any shell takes as it stands, zsh too: what is to be said of it stands beside it, in `note`.
"""

from __future__ import annotations

import itertools
import re
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lib.launch import agent_link
from lib.launch.hostfile import Host
from lib.launch.ranks import ROOT, Launching

HEADROOM = 2**26  # bytes on a run's disk, besides its checkpoints


# What macOS's privacy protection keeps from programs that ssh started, wherever it is in a path.
PRIVATE = re.compile(r"(/Users/[^/]+)/((?:Desktop|Documents|Downloads|Library/Mobile Documents)(?:/.*)?)$")
REFUSED = re.compile(r"operation not permitted", re.IGNORECASE)  # EPERM, in the words of zsh, Python, rsync
ALLOW = "or, on that Mac: System Settings, General, Sharing, Remote Login, Allow full disk access for remote users"


@dataclass(frozen=True)
class Finding:
    """What a check found on a host. status: ok, told (worth knowing), failed."""

    host: str
    check: str
    status: str
    message: str = ""
    remedy: str = ""  # the command that mends it
    note: str = ""  # what to know of that command, or what else would do


@dataclass(frozen=True)
class Needs:
    """What the run will want of every host."""

    files: tuple[str, ...] = ()  # models and data, to be the same everywhere
    models: tuple[str, ...] = ()  # by hub name
    run_dir: str | None = None
    calibration_dir: str | None = None
    require_calibration: bool = False
    method: str = "lora"
    checkpoints: int = 0


@dataclass(frozen=True)
class Context:
    """What facts are judged by: this machine's own, and what the run wants."""

    here: Mapping[str, Any]  # this machine's project, packages and files
    needs: Needs
    launching: Launching
    model_bytes: int
    systems: Mapping[str, str] = field(default_factory=dict)  # of every host that answered, e.g. Linux, Darwin

    def is_mac(self, host: Host) -> bool:
        return self.systems.get(host.name) == "Darwin"

    def again(self, *options: str) -> str:
        """The launcher's own command line, with further options."""
        words = list(
            self.launching.typed or ("--hosts", ",".join(f"{host.name}:{host.slots}" for host in self.launching.hosts))
        )
        cut = words.index("--") if "--" in words else len(words)
        return shlex.join(["./launch", *words[:cut], *options, *words[cut:]])

    def there(self, host: Host, command: str) -> str:
        """A command in the project's folder on a host."""
        return f"ssh {host.name} {shlex.quote(f'cd {shlex.quote(self.launching.directory)} && {command}')}"


Verdicts = list[tuple[str, ...]]  # status, message, remedy, note


def judge(hosts: Sequence[Host], answers: Mapping[str, Mapping[str, Any]], context: Context) -> list[Finding]:
    """What each host's facts mean."""
    found = []
    for host in hosts:
        for check, (fact, verdicts_of) in JUDGES.items():
            answer = answers[host.name][fact]
            if answer is None:  # not asked
                continue
            if isinstance(answer, dict) and "error" in answer:
                slow = ("failed", answer["error"], f"ssh {host.name} uptime", "does it answer, is it overloaded")
                verdicts = [refused(host, str(answer["error"]), context) or slow]
            else:
                verdicts = verdicts_of(host, answer, context)
            found += [Finding(host.name, check, *verdict) for verdict in verdicts or [("ok", "", "")]]
    return found


def _judge_ssh(host: Host, unreached: Mapping[str, str], context: Context) -> Verdicts:
    return [
        ("failed", f"from there to {other}: {said}", f"ssh -t {host.name} {shlex.quote(remedy)}", note)
        for other, said in unreached.items()
        for remedy, note in [mend_ssh(other, said, context.is_mac(host))]
    ]


def _judge_project(host: Host, theirs: Mapping[str, str | None], context: Context) -> Verdicts:
    own = context.here["project"]
    differ = sorted(name for name in {**own, **theirs} if own.get(name) != theirs.get(name))
    to = f"{host.name}:{shlex.quote(context.launching.directory)}"
    here = shlex.quote(str(ROOT))
    copy = (
        f"rsync -a --checksum --delete --exclude='._*' --include='*.py' --exclude='*' {here}/lib/ {to}/lib/"
        f" && rsync -a --checksum {here}/train.py {to}/"
    )
    return [("failed", f"{_few(differ)} not as on this machine", copy)] if differ else []


def _judge_packages(host: Host, theirs: Mapping[str, str], context: Context) -> Verdicts:
    differ = [
        f"{name} {theirs.get(name)} (here {version})"
        for name, version in context.here["packages"].items()
        if theirs.get(name) != version
    ]
    python = context.here["packages"].get("python")
    wanted = f" PYTHON=python{python}" if theirs.get("python") != python else ""
    mend = context.there(host, f"make -B setup{wanted}")
    return [("failed", _few(differ), mend)] if differ else []


def _judge_files(host: Host, theirs: Mapping[str, Any], context: Context) -> Verdicts:
    verdicts: Verdicts = []
    for path, own in context.here["files"].items():
        if own is None:
            look = f"ls -l {shlex.quote(str(Path(path).parent))}"
            verdicts.append(("failed", f"{path} is not on this machine", look, "correct the path in the configuration"))
        elif faults := [one["fault"] for one in (theirs[path], own) if isinstance(one, dict)]:
            verdicts.append(unreadable(host, path, faults[0], context))
        elif theirs[path] != own:
            source = (ROOT / path).resolve()
            target = path if Path(path).is_absolute() else f"{context.launching.directory}/{path}"
            slash, delete = ("/", " --delete") if source.is_dir() else ("", "")
            # --checksum: rsync takes files of one size and second for equal.
            making = shlex.quote(agent_link.rsync_making(target if slash else str(Path(target).parent)))
            litter = " --exclude=.DS_Store --exclude='._*' --exclude=.cache" if slash else ""
            copy = f"rsync -a --checksum {making}{delete}{litter} {shlex.quote(f'{source}{slash}')} {host.name}:{shlex.quote(f'{target}{slash}')}"
            wrong = "is missing" if theirs[path] is None else "differs from the one here"
            verdicts.append(("failed", f"{path} {wrong}", copy))
    return verdicts


def _judge_models(host: Host, theirs: Mapping[str, bool], context: Context) -> Verdicts:
    command = Path(context.launching.python).parent / "hf"
    return [
        ("failed", f"{name} is not in the hub's cache", f"ssh {host.name} {command} download {shlex.quote(name)}")
        for name, there in theirs.items()
        if not there
    ]


def _judge_memory(host: Host, memory: Mapping[str, Any], context: Context) -> Verdicts:
    # Weights, and for full training their gradients in float32 and Adam's two moments; activations come on top.
    needed = context.model_bytes * (5 if context.needs.method == "full" else 1.3) * host.slots
    free = memory["free_bytes"]
    if free is None or free >= needed:
        return [("ok", f"{_gb(free)} free" if free else "", "")]
    message = f"{_gb(free)} free, {_gb(needed)} wanted for the weights of {host.slots} ranks and their training"
    look = f"ssh {host.name} 'ps aux | sort -rnk4 | head -3'"
    return [("failed", message, look, "end what takes most, or take fewer slots")]


def _judge_disk(host: Host, disk: Mapping[str, Any], context: Context) -> Verdicts:
    needs, folder = context.needs, shlex.quote(disk["folder"])
    needed = context.model_bytes * (3 if needs.method == "full" else 0.15) * needs.checkpoints + HEADROOM
    if disk["fault"]:
        message = f"{disk['folder']}: {disk['fault']}"
        if REFUSED.search(str(disk["fault"])) and PRIVATE.match(disk["folder"]):
            return [unreadable(host, disk["folder"], disk["fault"], context)]
        mend = f"ssh -t {host.name} {shlex.quote(f'sudo chown -R $USER {folder}')}"
        return [("failed", message, mend, "or another folder: run.dir=ELSEWHERE")]
    if disk["free_bytes"] >= needed:
        return [("ok", f"{_gb(disk['free_bytes'])} free", "")]
    message = f"{_gb(disk['free_bytes'])} free at {disk['folder']}, {needs.checkpoints} checkpoints want {_gb(needed)}"
    look = f"ssh {host.name} {shlex.quote(f'du -sh {folder}')}"
    return [("failed", message, look, "remove old runs, or take another folder: run.dir=ELSEWHERE")]


def _judge_ports(host: Host, taken: Sequence[int], context: Context) -> Verdicts:
    if not taken:
        return []
    free = context.launching.starting_port + 1000
    message = f"port {', '.join(map(str, taken))} is taken"
    who = f"ssh {host.name} lsof -nP -i :{taken[0]}"
    return [
        ("failed", message, context.again("--starting-port", str(free)), f"or end what listens there; {who} names it")
    ]


def _judge_calibration(host: Host, kept: Mapping[str, Any], context: Context) -> Verdicts:
    if kept["there"] and kept["fresh"]:
        return [("ok", kept["measured_at"][:10], "")]
    message = f"measured {kept['measured_at'][:10]}, too old or with other versions" if kept["there"] else "none yet"
    status = "failed" if context.needs.require_calibration else "told"
    return [(status, f"{message}; shares start equal", context.there(host, "make calibrate"))]


def _judge_clock(host: Host, clock: Mapping[str, float], context: Context) -> Verdicts:
    message = f"{clock['ahead_seconds']:+.1f} s from this machine's"
    if abs(clock["ahead_seconds"]) < 2 + clock["unsure_seconds"]:
        return [("ok", message, "")]
    mend = "sudo sntp -sS time.apple.com" if context.is_mac(host) else "sudo timedatectl set-ntp true"
    return [("told", f"{message}: times in the logs will not fit", f"ssh -t {host.name} {mend}")]


def _judge_load(host: Host, load: Mapping[str, Any], _: Context) -> Verdicts:
    message = f"{load['average']:.1f} on {load['cpus']} cores"
    if load.get("training"):
        process, words = load["training"]
        message += f", and a training runs there already, process {process}: {words}"
        return [("told", message, f"ssh {host.name} kill -INT {process}", "or wait for its end")]
    if load["average"] <= 0.5 * load["cpus"]:
        return [("ok", message, "")]
    return [("told", f"{message}: somebody else computes there", f"ssh -t {host.name} top")]


def _judge_rdma(host: Host, message: Mapping[str, Any], _: Context) -> Verdicts:
    wanted = {device for entry in host.rdma for device in (entry if isinstance(entry, list) else [entry]) if device}
    missing = sorted(wanted - set(message["devices"]))
    note = "in macOS Recovery, then reboot"
    return [("failed", f"no {', '.join(missing)}", "rdma_ctl enable", note)] if missing else []


def _judge_system(host: Host, system: str, context: Context) -> Verdicts:
    """A Mac and a Linux box speak one protocol over MLX's own ring, and nothing else is promised of them."""
    if len(set(context.systems.values())) < 2 or context.launching.backend == "ring":
        return [("ok", system, "")]
    names = {"Darwin": "macOS"}
    found = " and ".join(sorted(names.get(one, one) for one in set(context.systems.values())))
    reasons = {
        "mpi": "its Open MPI is not made for hosts of unlike systems",
        "jaccl": "it is RDMA between Macs",
        "jaccl-ring": "it is RDMA between Macs",
        "nccl": "it is for NVIDIA GPUs",
    }
    why = reasons.get(context.launching.backend, "")
    message = f"{names.get(system, system)} in a world of {found}: only the ring backend is promised there ({why})"
    return [("failed", message, context.again("--backend", "ring"), "")]


# Check ➜ the fact it judges.
JUDGES: dict[str, tuple[str, Callable[[Host, Any, Context], Verdicts]]] = {
    "system": ("system", _judge_system),
    "ssh": ("ssh_to", _judge_ssh),
    "project": ("project", _judge_project),
    "packages": ("packages", _judge_packages),
    "files": ("files", _judge_files),
    "models": ("models", _judge_models),
    "memory": ("memory", _judge_memory),
    "disk": ("disk", _judge_disk),
    "ports": ("ports", _judge_ports),
    "calibration": ("calibration", _judge_calibration),
    "clock": ("clock", _judge_clock),
    "load": ("load", _judge_load),
    "rdma": ("rdma", _judge_rdma),
}


def refused(host: Host, said: str, context: Context) -> tuple[str, ...] | None:
    """The verdict where macOS keeps the project's folder from ssh; None where something else is wrong."""
    if REFUSED.search(said) is None:
        return None
    inside = PRIVATE.match(context.launching.directory)
    named = re.search(r"/Users/[^'\":]+", said)
    return unreadable(host, named[0] if named and not inside else context.launching.directory, said, context)


def unreadable(host: Host, path: str, said: str, context: Context) -> tuple[str, ...]:
    """The verdict on a path that a host's system keeps from this user, or from ssh."""
    inside = PRIVATE.match(path)
    if inside is None:
        return ("failed", f"{path}: {said}", f"ssh {host.name} ls -ld {shlex.quote(path)}", ALLOW)
    message = f"{path}: {said}; macOS keeps {Path(inside[2]).parts[0]} from what ssh starts"
    target = f"{inside[1]}/{Path(path).name}"
    if path != context.launching.directory:
        note = f"type it in Terminal on {host.name}, and name {target} in the configuration; {ALLOW}"
        return ("failed", message, f"mv {shlex.quote(path)} {shlex.quote(target)}", note)
    making, here = shlex.quote(agent_link.rsync_making(target)), shlex.quote(f"{ROOT}/")
    copy = f"rsync -a {making} --exclude=.git --exclude=.venv --exclude=runs {here} {host.name}:{shlex.quote(target)}/"
    note = f"then make setup there, and launch with --directory {target}; {ALLOW}"
    return ("failed", message, copy, note)


def links_to_measure(launching: Launching, reached: Sequence[Host]) -> list[tuple[Host, Host]]:
    """The pairs (one, other) of hosts where `one` has to reach `other`.

    Over MLX's ring every host connects to the next one alone, and where addresses are given they may be those of the cable
    between the two, which nobody else sees: MLX's configurator gives each Mac of a Thunderbolt ring the addresses that
    face its previous neighbour. Hosts that are only named are asked for every pair: another host may be the neighbour
    after a restart.
    """
    hosts = launching.hosts
    if launching.backend != "ring" or not all(host.addresses for host in hosts):
        return list(itertools.combinations(reached, 2))
    neighbours = [(host, hosts[(index + 1) % len(hosts)]) for index, host in enumerate(hosts)]
    if len(hosts) == 2:
        neighbours = neighbours[:1]
    return [(one, other) for one, other in neighbours if one in reached and other in reached and one != other]


def judge_links(
    links: Mapping[tuple[str, str], Mapping[str, Any]],
    floor_bytes_per_second: float,
    ceiling_seconds: float,
    context: Context,
) -> list[Finding]:
    """Every measured pair of hosts against the floor, as findings of the first of the pair."""
    found = []
    for (one, other), link in links.items():
        if "error" in link:
            message, where = f"to {other}: {link['error']}", link.get("address") or other.rpartition("@")[2]
            look = f"ssh {one} ping -c 3 {where}"
            found.append(Finding(one, "links", "failed", message, look, "is a firewall on, a cable out"))
            continue
        rate, trip = link["bytes_per_second"], link["round_trip_seconds"]
        message = f"to {other}: {rate * 8 / 1e6:,.0f} Mbit/s, {trip * 1e3:.2f} ms"
        if rate >= floor_bytes_per_second and trip <= ceiling_seconds:
            found.append(Finding(one, "links", "ok", message))
            continue
        least, most = max(1, int(rate * 8e-6 * 0.9)), max(1, int(trip * 1e3 * 2))
        accept = context.again("--min-mbit", str(least), "--max-round-trip-ms", str(most))
        found.append(Finding(one, "links", "failed", message, accept, "accepts it; better a cable than Wi-Fi"))
    return found


def mend_ssh(host: str, said: str, is_mac: bool = False) -> tuple[str, str]:
    """The command that makes ssh reach a host, from what it said, and what to know of it.

    is_mac: the command is typed on a Mac.
    """
    if "Permission denied" in said:
        return f"ssh-copy-id {host}", ""
    if "host key" in said.lower():
        return f"ssh {host} true", "compare the key with the host's own, then accept it"
    name = host.rpartition("@")[2]
    if "refused" in said:
        start = "start sshd there: sudo systemctl start ssh; on a Mac: System Settings, General, Sharing, Remote Login"
        return f"nc -z {name} 22", start
    if "resolve" in said:
        look = f"dscacheutil -q host -a name {name}" if is_mac else f"getent hosts {name}"
        return look, "correct the name in the host file, or add it to /etc/hosts or ~/.ssh/config"
    return f"ping -c 3 {name}", "is it on, awake, and on this network"


def _few(names: Sequence[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def _gb(size: float) -> str:
    return f"{size / 1e9:.1f} GB"
