"""A few hosts on one Linux machine: each has its own network, name, processes, sshd, and its own disk at one path.

    with cluster(hosts=2, quotas=(1.0, 0.3), rate="200mbit") as hosts:
        hosts[0].run(["ssh", hosts[1].name, "hostname"])

Nothing outside the new namespaces changes: the switch has one of its own, and `/etc/hosts`, ssh's configuration, `/run`
and each host's disk are mounts that only that host sees. A host ends, with all its processes, when its first process
does, and that one ends when this process does, however it does. What the hosts share with us is the rest of the file
system: the interpreter and the project are at the same place everywhere, as on machines that were set up alike.
"""

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

CGROUP = Path("/sys/fs/cgroup/cpu")
PERIOD_MICROSECONDS = 10_000  # short: within a step the slower host is slower all the time
TOOLS = {"sshd": "openssh-server", "ssh-keygen": "openssh-client", "ip": "iproute2", "tc": "iproute2"}
TOOLS |= {"unshare": "util-linux", "nsenter": "util-linux", "mount": "util-linux"}
PATH = f"{os.environ.get('PATH', os.defpath)}:/usr/sbin:/sbin"

# A host's first process. bash buries the orphans that come to it; at the end of its input it ends, and all with it.
HOST = """
set -e
mount -t tmpfs -o mode=755 tmpfs /run
mkdir /run/sshd
mount --bind "$1/hosts" /etc/hosts
mount --bind "$1/ssh_config" /etc/ssh/ssh_config
mount --bind "$1/$2" "$1/disk"
# What a person's shells do at their start is no test's business: pyenv's waits a minute for a lock that a killed one left.
for start in ~/.bashrc ~/.bash_profile ~/.profile; do [ ! -f "$start" ] || mount --bind /dev/null "$start"; done
hostname "$2"
# Open MPI names a folder in /tmp, which hosts share here, by its process id alone.
echo $((RANDOM + 300)) > /proc/sys/kernel/ns_last_pid
ip link set lo up
echo ready
read -r
ip address add "$3/24" dev eth0
ip link set eth0 up
"$(command -v sshd)" -f "$1/sshd_config" -E "$1/$2.sshd.log" -o PidFile=none
echo ready
while read -r; do :; done
"""
SWITCH = """
set -e
ip link set lo up
ip link add bridge type bridge forward_delay 0
ip link set bridge up
echo ready
while read -r; do :; done
"""


class Unavailable(RuntimeError):
    """A cluster cannot be built here; the message says why."""


@dataclass
class Host:
    """One machine of the cluster."""

    name: str
    address: str
    disk: Path  # the same path on every host, another folder on each
    outside: Path  # where this process finds that folder
    cgroup: Path | None
    _pid: int  # of its first process, as this process sees it
    _port: str  # of the switch
    _switch: int  # the switch's first process

    def words(self, command: Sequence[str | Path]) -> list[str]:
        """A command line that runs `command` on this host."""
        enter = ["nsenter", f"--target={self._pid}", "--net", "--uts", "--mount", "--pid", f"--wd={Path.cwd()}", "--"]
        join = ["sh", "-c", f'echo $$ > "{self.cgroup}/cgroup.procs"; exec "$@"', "sh"] if self.cgroup else []
        return [*join, *enter, *map(str, command)]

    def run(self, command: Sequence[str | Path], timeout: float = 200, **options: Any) -> Any:
        """`subprocess.run` on this host, output captured as text."""
        defaults: dict[str, Any] = {"capture_output": True, "text": True, "stdin": subprocess.DEVNULL}
        return subprocess.run(self.words(command), timeout=timeout, **{**defaults, **options})

    def start(self, command: Sequence[str | Path], **options: Any) -> subprocess.Popen[Any]:
        """`subprocess.Popen` on this host, in a session of its own so that it can be signalled alone."""
        defaults: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        return subprocess.Popen(self.words(command), start_new_session=True, **{**defaults, **options})

    def processes(self) -> dict[int, str]:
        """Process id, as seen on this host, and command line of all that run here; kernel, sshd and shell left out."""
        found = {}
        for entry in Path("/proc", str(self._pid), "root", "proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):  # it has ended
                words = (entry / "cmdline").read_bytes().decode(errors="replace").replace("\n", " ").replace("\0", " ")
                if words.strip() and entry.name != "1" and "sshd" not in words.split()[0]:
                    found[int(entry.name)] = words.strip()
        return found

    def signal(self, pid: int, number: signal.Signals) -> None:
        """Sends a signal to a process of this host, by its id there."""
        self.run(["kill", f"-{number.value}", str(pid)])

    def unplug(self) -> None:
        """Takes the cable out: packets to and from this host are lost, nobody is told."""
        _in_network(self._switch, ["ip", "link", "set", self._port, "down"])

    def plug_in(self) -> None:
        _in_network(self._switch, ["ip", "link", "set", self._port, "up"])

    def shape(self, rate: str) -> None:
        """Limits what this host sends, e.g. "200mbit"."""
        limit = ["tbf", "rate", rate, "burst", "64kb", "latency", "50ms"]
        _check(self.words(["tc", "qdisc", "replace", "dev", "eth0", "root", *limit]))


def unavailable(quotas: bool = False) -> str | None:
    """Why no cluster can be built here; None where it can."""
    if sys.platform != "linux":
        return "namespaces are Linux's"
    if os.geteuid() != 0:
        return "namespaces with a network want root"
    missing = sorted({package for tool, package in TOOLS.items() if shutil.which(tool, path=PATH) is None})
    if missing:
        return f"apt-get install {' '.join(missing)} is wanted"
    try:
        _check(["unshare", "--net", "--uts", "--mount", "--pid", "--fork", "ip", "link", "add", "p", "type", "veth"])
    except Unavailable as error:
        return f"namespaces may not be made here: {error}"
    if quotas and not os.access(CGROUP / "cpu.cfs_quota_us", os.W_OK):
        return f"{CGROUP} (cgroup version 1) is not writable, so no host can be made slower"
    return None


@contextlib.contextmanager
def cluster(
    hosts: int = 2, quotas: Sequence[float | None] | None = None, rate: str | None = None
) -> Iterator[list[Host]]:
    """Builds the hosts `host-a`, `host-b`, ... and takes them down again. quotas: cores' worth of CPU time of each, e.g.
    (1.0, 0.3); rate: of what each sends, in tc's words. Raises Unavailable: it cannot be built here."""
    if reason := unavailable(quotas is not None):
        raise Unavailable(reason)
    with contextlib.ExitStack() as undo:
        folder = Path(undo.enter_context(tempfile.TemporaryDirectory(prefix="tandem-cluster-")))
        names = [f"host-{chr(ord('a') + index)}" for index in range(hosts)]
        addresses = [f"10.77.0.{index + 1}" for index in range(hosts)]
        _write_configuration(folder, dict(zip(names, addresses, strict=True)))
        switch, switch_pid = _first_process(undo, ["--net"], SWITCH)
        _answer(switch, "the switch")
        built = []
        for index, (name, address) in enumerate(zip(names, addresses, strict=True)):
            cgroup = _cgroup(undo, name, None if quotas is None else quotas[index])
            namespaces = ["--net", "--uts", "--mount", "--propagation=private"]
            first, pid = _first_process(undo, namespaces, HOST, str(folder), name, address)
            if cgroup is not None:
                (cgroup / "cgroup.procs").write_text(str(pid))
            _answer(first, name)
            port = f"port{index}"
            _in_network(switch_pid, ["ip", "link", "add", port, "type", "veth", "peer", "eth0", "netns", str(pid)])
            _in_network(switch_pid, ["ip", "link", "set", port, "master", "bridge", "up"])
            first.stdin.write(b"go on\n")  # type: ignore[union-attr]
            first.stdin.flush()  # type: ignore[union-attr]
            _answer(first, name)
            host = Host(name, address, folder / "disk", folder / name, cgroup, pid, port, switch_pid)
            if rate is not None:
                host.shape(rate)
            built.append(host)
        yield built


def _write_configuration(folder: Path, addresses: dict[str, str]) -> None:
    for name in ["disk", *addresses]:
        (folder / name).mkdir()
    lines = ["127.0.0.1 localhost", *(f"{address} {name}" for name, address in addresses.items())]
    (folder / "hosts").write_text("\n".join(lines) + "\n")
    for key in ("key", "host_key"):
        _check(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(folder / key)])
    host_key = (folder / "host_key.pub").read_text().strip()
    (folder / "known_hosts").write_text("".join(f"{n},{a} {host_key}\n" for n, a in addresses.items()))
    (folder / "sshd_config").write_text(
        f"HostKey {folder}/host_key\nAuthorizedKeysFile {folder}/key.pub\nStrictModes no\nPermitRootLogin yes\n"
        "PasswordAuthentication no\nKbdInteractiveAuthentication no\nUsePAM no\nUseDNS no\nMaxStartups 100\n"
    )
    (folder / "ssh_config").write_text(
        f"Host {' '.join([*addresses, *addresses.values()])}\n  IdentityFile {folder}/key\n  IdentitiesOnly yes\n"
        f"  UserKnownHostsFile {folder}/known_hosts\n  StrictHostKeyChecking yes\n  User root\n"
    )


def _first_process(
    undo: contextlib.ExitStack, namespaces: list[str], script: str, *words: str
) -> tuple[subprocess.Popen[bytes], int]:
    """Starts a namespace's first process; it is ended, and waited for, when `undo` closes."""
    process = subprocess.Popen(
        ["unshare", *namespaces, "--pid", "--fork", "--mount-proc", "--kill-child", "bash", "-c", script, "-", *words],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env={"PATH": PATH, "HOME": os.environ.get("HOME", "/root"), "LANG": "C.UTF-8"},
        start_new_session=True,  # a Ctrl-C at the terminal is for the tests, not for the cluster
    )

    def end() -> None:
        process.kill()
        process.communicate()

    undo.callback(end)
    for _ in range(500):
        with contextlib.suppress(OSError):
            if found := Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split():
                return process, int(found[0])
        time.sleep(0.01)
    raise Unavailable("unshare started nothing within 5 s")


def _answer(process: subprocess.Popen[bytes], name: str) -> None:
    assert process.stdout is not None and process.stderr is not None
    if process.stdout.readline() != b"ready\n":
        process.kill()
        raise Unavailable(f"{name} could not be set up: {process.stderr.read().decode().strip()}")


def _cgroup(undo: contextlib.ExitStack, name: str, quota: float | None) -> Path | None:
    """A control group that gets `quota` cores' worth of CPU time."""
    if quota is None:
        return None
    cgroup = CGROUP / f"tandem-{os.getpid()}-{name}"
    cgroup.mkdir()

    def remove() -> None:
        for _ in range(200):  # its processes are being ended
            with contextlib.suppress(OSError):
                cgroup.rmdir()
                return
            time.sleep(0.02)

    undo.callback(remove)
    (cgroup / "cpu.cfs_period_us").write_text(str(PERIOD_MICROSECONDS))
    (cgroup / "cpu.cfs_quota_us").write_text(str(int(quota * PERIOD_MICROSECONDS)))
    return cgroup


def _in_network(pid: int, command: list[str]) -> None:
    """Runs a command in the network of the switch, or of a host, by the id of its first process."""
    _check(["nsenter", f"--target={pid}", "--net", "--", *command])


def _check(command: list[str]) -> str:
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "PATH": PATH})
    if done.returncode:
        raise Unavailable(f"{' '.join(command)}: {done.stderr.strip()}")
    return done.stdout
