"""./launch --emit hostfile: machines that answer over ssh ➜ the host file that ./launch reads.

Candidates are the names of ~/.ssh/config, machines that announce ssh by mDNS, and the neighbours on a Thunderbolt
bridge; or the machines that were named. Each is asked for its facts over ssh, all at once, each for a few seconds.
"""

from __future__ import annotations

import contextlib
import json
import re
import shlex
import shutil
import socket
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from lib.errors import shown
from lib.launch.hostfile import NAME, Host, to_text
from lib.system import os_commands

BROWSE_SECONDS = 3.0  # machines announce themselves at once; dns-sd never ends by itself
ASK_SECONDS = 10.0
CONNECT_SECONDS = 5
AT_ONCE = 32
MOST_FILES = 50  # that ~/.ssh/config may include
REMEDIES = {  # by ssh's error message
    "Permission denied": "ssh-copy-id {name}",
    "Host key verification failed": "ssh {name} once, to accept its key",
    "Could not resolve": "give its address in ~/.ssh/config or /etc/hosts",
}
# For any POSIX shell: a fact a line.
QUESTION = r"""
echo "host=$(hostname)"
echo "system=$(uname -sm)"
if [ "$(uname -s)" = Darwin ]; then
  echo "chip=$(sysctl -n machdep.cpu.brand_string)"
  echo "memory=$(sysctl -n hw.memsize)"
  ifconfig | sed -n 's/^.*inet \([0-9.]*\) .*/address=\1/p'
  ifconfig bridge0 2>/dev/null | sed -n 's/^.*inet \([0-9.]*\) .*/bridge=\1/p'
else
  echo "chip=$(sed -n 's/^model name.*: //p' /proc/cpuinfo | head -n 1)"
  echo "memory=$(sed -n 's/^MemTotal: *\([0-9]*\) kB/\1000/p' /proc/meminfo)"
  PATH="$PATH:/usr/sbin:/sbin"
  ip -4 -o address 2>/dev/null | sed -n 's/^.*inet \([0-9.]*\)\/.*/address=\1/p'
  ip -4 -o address 2>/dev/null | sed -n 's/^.*thunderbolt[0-9]* *inet \([0-9.]*\)\/.*/bridge=\1/p'
fi
echo "gpus=$(nvidia-smi -L 2>/dev/null | grep -c '^GPU ')"
[ -x "$1/.venv/bin/python" ] && echo "project=yes"
echo "end=yes"
"""


@dataclass(frozen=True)
class Machine:
    """A machine that answered."""

    name: str  # what ssh calls it
    host: str  # what it calls itself
    addresses: tuple[str, ...]  # IPv4, those of the loopback left out
    bridge: str | None  # its address on the Thunderbolt bridge
    description: str
    gpus: int
    has_project: bool


Run = Callable[[Sequence[str], float], os_commands.Completed]  # a command and its limit in seconds


def hostfile_text(named: Sequence[Host], directory: str, note: Callable[[str], None]) -> str | None:
    """The host file of the machines that answer; None where none does.

    Args:
        named: ask these and no others; their slots are kept. Empty: this machine, and all that can be found.
        directory: the project's folder on the hosts.
        note: prints what a person should know: who did not answer and why, who lacks the project.
    """
    run, here = os_commands.run, socket.gethostname()
    own = [] if named else [here]
    names = [host.name for host in named] or [name for name in candidates(run, Path.home()) if name not in own]
    if names:
        note(f"asking {', '.join(names)} ({ASK_SECONDS:.0f} s at most)")
    with ThreadPoolExecutor(AT_ONCE) as pool:
        asking = pool.map(lambda name: ask_machine(name, directory, run, name in (here, "localhost")), [*own, *names])
        answers = list(asking)
    machines = distinct(machine for machine in answers if isinstance(machine, Machine))
    for answer in answers:
        if isinstance(answer, str):
            note(f"left out: {answer}")
    for machine in machines:
        if not machine.has_project:
            note(
                f"{machine.name} has no {directory}/.venv: ./launch --sync . copies the project there, then make setup"
            )
    if not named and len(machines) == 1:
        note("no other machine answers; ./launch --emit hostfile --hosts A,B asks those that you name")
    slots = {host.name: host.slots for host in named}
    return text_of(machines, slots) if machines else None


def candidates(run: Run, home: Path) -> list[str]:
    """Names that ssh may know, each once: of its configuration, by mDNS, and of neighbours on a Thunderbolt bridge."""
    with ThreadPoolExecutor() as pool:
        looks = [pool.submit(look, run) for look in (_avahi, _dns_sd, _neighbours)]
        names = [*configured(home / ".ssh" / "config"), *(name for look in looks for name in look.result())]
    return [name for name in dict.fromkeys(names) if NAME.fullmatch(name) and name != "localhost"]


def ask_machine(name: str, directory: str, run: Run, is_here: bool) -> Machine | str:
    """A machine's facts, or why there are none, with the remedy."""
    words = ["sh", "-c", QUESTION, "sh", directory]
    if not is_here:
        options = ["-o", "BatchMode=yes", "-o", f"ConnectTimeout={CONNECT_SECONDS}"]
        words = ["ssh", "-T", *options, "--", name, shlex.join(words)]
    done = run(words, ASK_SECONDS)
    facts = [shown(line).partition("=")[::2] for line in done.output.splitlines() if "=" in line]
    fact = dict(facts)
    if {"end", "host"} <= fact.keys():
        addresses = tuple(value for key, value in facts if key == "address" and not value.startswith("127."))
        memory = f"{int(fact['memory']) / 1e9:.0f} GB" if fact.get("memory", "").isdecimal() else ""
        described = ", ".join(part for part in (fact.get("chip", ""), memory, fact.get("system", "")) if part.strip())
        gpus = int(fact["gpus"]) if fact.get("gpus", "").isdecimal() else 0
        return Machine(name, fact["host"], addresses, fact.get("bridge"), described, gpus, "project" in fact)
    if done.status is None:
        return f"{name}: no answer within {ASK_SECONDS:.0f} s"
    error = shown((done.errors.strip().splitlines() or ["no shell that answers"])[-1].strip())
    remedy = next((text.format(name=name) for pattern, text in REMEDIES.items() if pattern in error), None)
    return f"{name}: {error}" + (f"; {remedy}" if remedy else "")


# ---- Pure: the host file, and what the tools print


def distinct(machines: Iterable[Machine]) -> list[Machine]:
    """Each machine once, under the first of its names."""
    kept: dict[tuple[str, frozenset[str]], Machine] = {}
    for machine in machines:
        kept.setdefault((machine.host, frozenset(machine.addresses)), machine)
    return list(kept.values())


def text_of(machines: Sequence[Machine], slots: dict[str, int]) -> str:
    """A host file: lines; or MLX's JSON where all are on one Thunderbolt bridge, whose addresses only that form has."""
    counts = [slots.get(machine.name) or max(1, machine.gpus) for machine in machines]
    if len(machines) > 1 and all(machine.bridge for machine in machines):
        entries = [
            {"ssh": machine.name, "ips": [machine.bridge], "slots": count}
            for machine, count in zip(machines, counts, strict=True)
        ]
        return json.dumps(entries, indent=2) + "\n"
    lines = [to_text([Host(machine.name, count)]).rstrip() for machine, count in zip(machines, counts, strict=True)]
    width = max(len(line) for line in lines)
    described = (f"{line:{width}}    # {machine.description}" for line, machine in zip(lines, machines, strict=True))
    return "".join(f"{line.rstrip()}\n" for line in described)


def configured(path: Path, most: int = MOST_FILES) -> list[str]:
    """The names that an ssh configuration has a Host entry for, patterns left out, with what it includes."""
    try:
        lines = path.read_text(errors="replace", encoding="utf-8").splitlines()
    except OSError:
        return []
    names: list[str] = []
    for line in lines:
        key, _, rest = re.sub(r"\s*=\s*|\s+", " ", line.partition("#")[0].strip(), count=1).partition(" ")
        words = [word.strip('"') for word in rest.split()]
        if key.lower() == "host":
            names += [word for word in words if not re.search(r"[*?!]", word)]
        elif key.lower() == "include" and most > 0:
            for word in words:
                pattern = Path(word).expanduser()
                base = pattern if pattern.is_absolute() else path.parent / pattern
                with contextlib.suppress(ValueError, OSError):
                    for included in sorted(base.parent.glob(base.name)):
                        names += configured(included, most // 2)
    return names


def machines_of_avahi(output: str) -> list[tuple[str, str]]:
    """Host name and IPv4 address of each machine, from `avahi-browse -rpt _ssh._tcp`."""
    rows = (line.split(";") for line in output.splitlines() if line.startswith("="))
    return [(row[6], row[7]) for row in rows if len(row) > 8 and row[2] == "IPv4"]


def instances_of_dns_sd(output: str) -> list[str]:
    """The instances that `dns-sd -B` lists: names for people, with blanks in them."""
    return re.findall(r"^\s*\S+\s+Add\s+\S+\s+\S+\s+\S+\s+_ssh\._tcp\.\s+(.+?)\s*$", output, re.MULTILINE)


def host_of_dns_sd(output: str) -> str | None:
    """The host name that `dns-sd -L` resolves an instance to."""
    name = re.search(r"can be reached at (\S+?)\.?:\d+ ", output)
    return name[1] if name else None


def neighbours_of_arp(output: str) -> list[str]:
    """Addresses of the neighbours on a Thunderbolt bridge, from `arp -an`."""
    rows = re.findall(r"\((\d+\.\d+\.\d+\.\d+)\) at (\S+)(?: \[\w+\])? on (\S+)", output)
    is_bridge = re.compile(r"bridge0|thunderbolt\d+")
    return [
        address
        for address, hardware, interface in rows
        if is_bridge.fullmatch(interface) and ":" in hardware and hardware.lower() != "ff:ff:ff:ff:ff:ff"
    ]


# ---- Asking the system's own tools


def _avahi(run: Run) -> list[str]:
    if shutil.which("avahi-browse") is None:
        return []
    machines = machines_of_avahi(run(["avahi-browse", "-rpt", "_ssh._tcp"], BROWSE_SECONDS).output)
    return [name if _resolves(name) else address for name, address in machines]


def _dns_sd(run: Run) -> list[str]:
    if shutil.which("dns-sd") is None:
        return []
    instances = dict.fromkeys(instances_of_dns_sd(run(["dns-sd", "-B", "_ssh._tcp", "local"], BROWSE_SECONDS).output))
    with ThreadPoolExecutor(AT_ONCE) as pool:
        looks = pool.map(lambda one: run(["dns-sd", "-L", one, "_ssh._tcp", "local"], BROWSE_SECONDS).output, instances)
        return [name for output in looks if (name := host_of_dns_sd(output)) is not None]


def _neighbours(run: Run) -> list[str]:
    return neighbours_of_arp(run(["arp", "-an"], BROWSE_SECONDS).output) if shutil.which("arp") else []


def _resolves(name: str) -> bool:
    try:
        return bool(socket.getaddrinfo(name, None, socket.AF_INET))
    except (OSError, UnicodeError):
        return False
