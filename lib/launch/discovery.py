"""./launch --emit hostfile: machines that answer over ssh ➜ the host file that ./launch reads.

Candidates are the names of ~/.ssh/config, machines that announce ssh by mDNS, and the neighbours on a Thunderbolt
bridge; or the machines that were named. Each is asked for its facts over ssh, all at once, each for a few seconds.
"""

from __future__ import annotations

import contextlib
import re
import shlex
import socket
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from lib.errors import Stopped, shown
from lib.launch import ssh
from lib.launch.hostfile import NAME, Host, to_text
from lib.system import os_commands

BROWSE_SECONDS = 3.0  # machines announce themselves at once; dns-sd never ends by itself
ASK_SECONDS = 10.0
# For any POSIX shell: a fact a line.
QUESTION = r"""
echo "host=$(hostname) $( (cat /etc/machine-id || ioreg -rd1 -c IOPlatformExpertDevice | grep UUID) 2>/dev/null)"
if [ "$(uname -s)" = Darwin ]; then
  echo "chip=$(sysctl -n machdep.cpu.brand_string), $(($(sysctl -n hw.memsize) / 1000000000)) GB, $(uname -sm)"
  ifconfig bridge0 2>/dev/null | sed -n 's/^.*inet \([0-9.]*\) .*/bridge=\1/p'
else
  kilobytes=$(sed -n 's/^MemTotal: *\([0-9]*\) kB/\1/p' /proc/meminfo)
  echo "chip=$(sed -n 's/^model name.*: //p' /proc/cpuinfo | head -n 1), $((kilobytes / 976563)) GB, $(uname -sm)"
  PATH="$PATH:/usr/sbin:/sbin"
  ip -4 -o address 2>/dev/null | sed -n 's/^.*thunderbolt[0-9]* *inet \([0-9.]*\)\/.*/bridge=\1/p'
fi
echo "gpus=$(nvidia-smi -L 2>/dev/null | grep -c '^GPU ')"
[ -x "$1/.venv/bin/python" ] && echo "project=yes"
echo "end=yes"
"""
# What finds neighbours, and a machine's names and addresses in what it prints.
TOOLS = (
    (("avahi-browse", "-rpt", "_ssh._tcp"), r"^=;[^;]*;IPv4;[^;]*;[^;]*;[^;]*;([^;]*);([^;]*);"),
    (("dns-sd", "-B", "_ssh._tcp", "local"), r"^\s*\S+\s+Add\s+\S+\s+\S+\s+\S+\s+_ssh\._tcp\.\s+(.+?)\s*$"),
    (("arp", "-an"), r"\(([\d.]+)\) at (?!ff:ff)[0-9a-fA-F]+:\S+(?: \[\w+\])? on (?:bridge0|thunderbolt\d+)\b"),
)


def hostfile_text(named: Sequence[Host], directory: str, note: Callable[[str], None]) -> str:
    """The host file of the machines that answer, each under the first of its names. named: ask these and no others, and
    keep their slots; empty: this machine, and all that can be found. directory: the project's folder on the hosts.
    note: prints who did not answer and why, and who lacks the project. Raises Stopped: no machine answers."""
    here = socket.gethostname()
    names = [host.name for host in named] or list(dict.fromkeys([here, *candidates(Path.home())]))
    note(f"asking {', '.join(names)} ({ASK_SECONDS:.0f} s at most)")
    with ThreadPoolExecutor(len(names)) as pool:
        answers = list(pool.map(lambda name: ask_machine(name, directory, name in (here, "localhost")), names))
    machines: dict[str, dict[str, str]] = {}
    for facts in answers:
        if error := facts.get("error"):
            note(f"left out: {error}")
        elif machines.setdefault(facts["host"], facts) is facts and "project" not in facts:
            copy = "./launch --sync . copies the project there, then make setup"
            note(f"{facts['name']} has no {directory}/.venv: {copy}")
    if not machines:
        raise Stopped(f"none of {', '.join(names)} answers; ssh to one of them by hand first")
    return text_of(list(machines.values()), {host.name: host.slots for host in named})


def candidates(home: Path) -> list[str]:
    """Names that ssh may know, each once: of its configuration, by mDNS, and of neighbours on a Thunderbolt bridge."""
    names = configured(home / ".ssh" / "config")
    with ThreadPoolExecutor() as pool:
        outputs = pool.map(lambda tool: os_commands.run(tool[0], BROWSE_SECONDS).output, TOOLS)
    for (words, pattern), output in zip(TOOLS, outputs, strict=True):
        announced = [name for match in re.finditer(pattern, output, re.MULTILINE) for name in match.groups()]
        if words[0] == "dns-sd":  # the machine that people call "Anna's Mac" is Annas-Mac.local
            announced = [name.replace("'", "").replace(" ", "-") + ".local" for name in announced]
        names += announced
    return [name for name in dict.fromkeys(names) if NAME.fullmatch(name) and name != "localhost"]


def ask_machine(name: str, directory: str, is_here: bool) -> dict[str, str]:
    """A machine's facts: `name` as ssh calls it, and what QUESTION prints; or an `error`, with the remedy."""
    words = ["sh", "-c", QUESTION, "sh", directory]
    done = os_commands.run(words if is_here else [*ssh.ssh_command(Host(name)), shlex.join(words)], ASK_SECONDS)
    facts = dict(shown(line).partition("=")[::2] for line in done.output.splitlines() if "=" in line)
    if {"end", "host", "chip", "gpus"} <= facts.keys():
        return {"name": name, **facts}
    if done.status is None:
        return {"error": f"{name}: no answer within {ASK_SECONDS:.0f} s"}
    error = shown((done.errors.strip().splitlines() or ["no shell that answers"])[-1].strip())
    return {"error": f"{name}: {error}; {'; '.join(filter(None, ssh.remedy(Host(name), error, directory)[1:]))}"}


def text_of(machines: Sequence[dict[str, str]], slots: dict[str, int]) -> str:
    """A host file, with the addresses on the Thunderbolt bridge where all machines are on one."""
    on_bridge = len(machines) > 1 and all("bridge" in facts for facts in machines)
    text = ""
    for facts in machines:
        line = to_text([Host(facts["name"], slots.get(facts["name"]) or max(1, int(facts["gpus"] or 0)))]).rstrip()
        text += line + (f" ips={facts['bridge']}" if on_bridge else "") + f"    # {facts['chip']}\n"
    return text


def configured(path: Path, depth: int = 4) -> list[str]:
    """The names that an ssh configuration has a Host entry for, patterns left out, with what it includes."""
    names: list[str] = []
    with contextlib.suppress(OSError):
        for line in path.read_text(errors="replace", encoding="utf-8").splitlines():
            key, *words = re.split(r"[\s=]+", line.partition("#")[0].strip())
            words = [word.strip('"') for word in words]
            if key.lower() == "host":
                names += [word for word in words if not re.search(r"[*?!]", word)]
            for word in words if key.lower() == "include" and depth else ():
                pattern = path.parent / Path(word).expanduser()
                for included in sorted(pattern.parent.glob(pattern.name)):
                    names += configured(included, depth - 1)
    return names
