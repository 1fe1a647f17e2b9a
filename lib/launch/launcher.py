"""A job from its first start to its last: ranks are started, watched, ended, and started again on hosts that answer.

Each rank is one process here: lib/launch/rank_process.py, directly or through ssh. Its output comes back on its pipes,
and its heartbeats (lib/distributed/heartbeat.py) on a connection that ssh forwards to this machine.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import re
import shlex
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO, TextIO

from lib.distributed import connection
from lib.distributed.heartbeat import WATCHER, Watcher
from lib.environment import ROOT
from lib.errors import UserError, shown
from lib.launch import hostfile, ssh
from lib.launch import rank_commands as jobs
from lib.launch.hostfile import Host
from lib.launch.rank_commands import RDMA_BACKENDS, Job, RankCommand
from lib.launch.rank_process import HELLO
from lib.system import os_commands, out_of_memory

LOOK_SECONDS = 0.1
PING_SECONDS = 1.0
END_SECONDS = 2.0  # between asking a rank to end and killing it
# A Mac whose RDMA process was killed may refuse RDMA until its next boot (mlx#3910).
RDMA_END_SECONDS = 30.0
AGREED_SECONDS = 2.0  # that the other ranks have to end by themselves where one ended with an error
SILENT_TIMES = 3.0  # a rank ends where its launcher was silent for so many times --silent-seconds
PROBE_SECONDS = 8.0
NO_ANSWER_SECONDS = 120.0  # while no host answers, which may be the network of this machine
# Ends that say nothing of RDMA; a crash, as MLX has where an RDMA device fails under it, does.
KILLS = (signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
MAC_RESTARTS = 3  # by default where a host is a Mac: a lit display may end a rank at any time (lib/system/metal.py)
MPI_TAG = re.compile(r"\[[^\]]*?,(\d+)\]<(?:stdout|stderr)>: ?")
MPI_FAILED = re.compile(r"process rank (\d+) with PID|Process name: \[[^\]]*,(\d+)\]")  # in mpirun's last words

# Prints the addresses at which a port does not answer, `dropped:` before those where sshd does. To refuse is to answer.
REACH = """import socket, sys
def answers(port):
    try:
        socket.create_connection((address, int(port)), 1).close()
    except OSError as error:
        return isinstance(error, ConnectionRefusedError)
    return True
for address in sys.argv[3:]:
    if not answers(sys.argv[1]):
        print("dropped:" * answers(sys.argv[2]) + address)"""

Interrupts = queue.SimpleQueue[int]  # numbers of signals


class Console:
    """Writes whole lines, each after its rank and host; with `lines`, keeps them there instead."""

    def __init__(self, lines: list[str] | None = None) -> None:
        self.lines, self._lock = lines, threading.Lock()

    def output(self, who: str, stream: TextIO, text: str) -> None:
        """Writes a line of a rank, or of mpirun."""
        if self.lines is not None:
            self.lines.append(text)
        elif not self._write(f"[{who}] {shown(text)}", stream):  # `| head` has ended
            os.kill(os.getpid(), signal.SIGINT)

    def note(self, text: str) -> None:
        """Writes a line of the launcher itself."""
        self._write(f"launch: {shown(text)}", sys.stderr)

    def _write(self, line: str, stream: TextIO) -> bool:
        with contextlib.suppress(OSError, ValueError), self._lock:
            print(line, file=stream, flush=True)
            return True
        return False


@dataclass(frozen=True)
class Outcome:
    """How a start ended. kind: done, interrupted; or why not: died, refused, lost, stopped, hung, late, wedged."""

    kind: str = "done"
    status: int = 0
    message: str = ""
    hosts: tuple[str, ...] = ()  # at fault
    run: str | None = None  # the folder to resume from
    has_mac: bool = False


class RankLink:
    """A rank's process, as this machine sees it."""

    def __init__(self, command: RankCommand, words: Sequence[str], console: Console, hosts: Sequence[str]):
        """Starts it by these words; hosts: of each rank. Raises UserError: there is no such program on this machine."""
        self.command, self._console, self._hosts = command, console, hosts
        self._failed_rank = command.rank  # with mpirun: of those that it started
        self.lost_another = False  # it ended because another rank was gone
        self.system: str | None = None  # Linux, Darwin; None until it has answered
        self._last_line = ""  # before it has answered
        pipe = subprocess.PIPE
        try:  # in a session of its own: the launcher receives Ctrl-C and ends its ranks
            self.process = subprocess.Popen(
                words, stdin=pipe, stdout=pipe, stderr=pipe, cwd=ROOT, start_new_session=True
            )
        except OSError as error:
            remedy = "--python names another"
            raise UserError(f"{words[0]} does not start on this machine: {error.strerror}; {remedy}") from None
        pipes = ((self.process.stdout, sys.stdout), (self.process.stderr, sys.stderr))
        self._threads = [threading.Thread(target=self._read, args=pair, daemon=True) for pair in pipes]
        for thread in self._threads:
            thread.start()

    def send(self, line: str) -> None:
        """Sends a line, if the process is still there."""
        with contextlib.suppress(OSError, ValueError):
            assert self.process.stdin is not None
            os.write(self.process.stdin.fileno(), line.encode() + b"\n")  # Python 3.13 prints what a buffer keeps

    def failure(self) -> Outcome:
        """Why it ended, where its status is not 0."""
        rank, status, host = self._failed_rank, self.process.returncode, self.command.host.name
        who = "mpirun" if rank is None else f"rank {rank}"
        if self.system is None:
            why = self._last_line or f"status {status}"
            remedy = "; ".join(filter(None, ssh.remedy(self.command.host, why)[1:]))
            return Outcome("refused", 1, f"{who} on {host} does not start: {why}; {remedy}", (host,))
        if status == 255:
            why = "it is off, or its sshd was stopped"
            return Outcome("lost", 1, f"the connection to {host} ended ({who}): {why}", (host,))
        status, host = 128 - status if status < 0 else status, host if rank is None else self._hosts[rank]
        how = f"ended with status {status}"
        if status - 128 in set(signal.Signals):
            how = f"was ended by {signal.Signals(status - 128).name}"
        return Outcome("died", status, f"{who} on {host} {how}", (host,))

    def close(self) -> None:
        """Kills what is left of it on this machine, and waits for its last lines."""
        if self.process.poll() is None:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        for thread in self._threads:
            thread.join(0.5)

    def _read(self, pipe: IO[bytes], stream: TextIO) -> None:
        for line in pipe:
            text = line.decode(errors="replace").rstrip("\r\n")
            if self.system is None:
                if HELLO in text:
                    self.system = text.partition(HELLO)[2].strip()
                self._last_line = text.strip() or self._last_line
                continue
            self.lost_another |= out_of_memory.NOTICED in text
            rank, who = self.command.rank, f"mpirun {self.command.host.name}"
            if tag := MPI_TAG.match(text):
                rank, text = int(tag[1]), text[tag.end() :]
            elif rank is None and (failed := MPI_FAILED.search(text)):
                self._failed_rank = int(failed[1] or failed[2])
            self._console.output(who if rank is None else f"{rank} {self._hosts[rank]}", stream, text)


class Start:
    """One start of all ranks of a job; with `here`, of that host's alone, without ssh. key: of the run."""

    def __init__(self, job: Job, console: Console, here: Host | None = None, key: bytes | None = None):
        self.job, self.console, self._here = job, console, here
        self._key = key or connection.new_key()
        self.links: list[RankLink] = []

    def run(self, interrupts: Interrupts) -> Outcome:
        """Starts all ranks and waits until they have ended. Raises UserError: the name of a host does not resolve."""
        commands = jobs.rank_commands(self.job)
        watcher = Watcher("127.0.0.1", 0, self._key, self.job.host_names)
        outcome = Outcome()
        try:
            for command in commands:
                if self._here is None or command.host == self._here:
                    self._start(command, watcher.address[1])
            outcome = self._watch(watcher, interrupts)
        finally:
            self._end(outcome.status - 128 if outcome.kind == "interrupted" else signal.SIGTERM, interrupts)
            run = watcher.fact("run")
            watcher.close()
        for directory in map(self.job.directory_of, self.job.hosts):  # below the project, which may differ by host
            if run and Path(run).is_relative_to(directory):
                run = str(Path(run).relative_to(directory))
        has_mac = any(link.system == "Darwin" for link in self.links)
        return replace(outcome, run=run, has_mac=has_mac)

    def _start(self, command: RankCommand, port: int) -> None:
        words = [self.job.python, "-m", "lib.launch.rank_process"]
        if self._here is None and not is_local(self.job, command.host):
            is_first = all(link.command.host != command.host for link in self.links)
            forward = ["-R", f"127.0.0.1:{port}:127.0.0.1:{port}"] if is_first else []
            words = ssh.remote_command(self.job, command.host, "lib.launch.rank_process", forward)
        secret = {connection.KEY_VARIABLE: self._key.decode(), WATCHER: f"127.0.0.1:{port}"}
        order = {
            "command": command.command,
            "environment": {**command.environment, **secret},
            "files": command.files,
            "silent_seconds": max(SILENT_TIMES * self.job.silent_seconds, ssh.CONNECT_SECONDS),
        }
        self.links.append(RankLink(command, words, self.console, self.job.host_names))
        self.links[-1].send(json.dumps(order))

    def _watch(self, watcher: Watcher, interrupts: Interrupts) -> Outcome:
        """Waits until all ranks have ended, for the first fault, or for a signal."""
        pinged = awake_since = looked = time.monotonic()
        names, silent = self.job.host_names, self.job.silent_seconds
        while True:
            with contextlib.suppress(queue.Empty):
                return Outcome("interrupted", 128 + interrupts.get(timeout=LOOK_SECONDS))
            now = time.monotonic()
            if now - looked > silent / 2:  # this process was stopped, or its machine slept
                awake_since = now
            looked = now
            if now - pinged > PING_SECONDS:
                pinged = now
                for link in self.links:
                    link.send("ping")
            if failed := self._failed():
                # A killed rank makes the others end with status 1: the signal is the cause.
                return max(failed, key=lambda link: (link.process.returncode >= 128, not link.lost_another)).failure()
            if not any(link.process.poll() is None and link.command.command for link in self.links):
                return Outcome()
            if now - awake_since > silent and (silence := watcher.silence(silent, self.job.wedged_seconds)) is not None:
                hosts = tuple(names[rank] for rank in silence.ranks if rank < len(names))
                return Outcome(silence.kind, 1, silence.text, hosts)

    def _failed(self) -> list[RankLink]:
        """The processes that failed. Where ranks ended with an error, the others end by themselves."""
        deadline = time.monotonic() + AGREED_SECONDS
        while failed := [link for link in self.links if link.process.poll()]:
            is_agreed = all(0 < link.process.returncode < 128 for link in failed)
            is_running = any(link.process.poll() is None for link in self.links)
            if not (is_agreed and is_running and time.monotonic() < deadline):
                break
            time.sleep(LOOK_SECONDS)
        return failed

    def _end(self, number: int, interrupts: Interrupts) -> None:
        """Ends every rank on every host; a second interrupt kills at once."""
        grace_seconds = RDMA_END_SECONDS if self.job.backend in RDMA_BACKENDS else END_SECONDS
        order, deadline = f"end {int(number)} {grace_seconds}", time.monotonic() + grace_seconds + 2.0
        for link in self.links:
            link.send(order)
        while time.monotonic() < deadline and any(link.process.poll() is None for link in self.links):
            if not interrupts.empty():
                interrupts.get()
                for link in self.links:
                    link.send(f"end {int(signal.SIGKILL)} 0")
                deadline = min(deadline, time.monotonic() + 1.0)
            time.sleep(LOOK_SECONDS / 2)
        for link in self.links:
            link.close()


# ---- From start to start


def supervise(
    job: Job, console: Console, restarts: int | None, here: Host | None = None, key: bytes | None = None
) -> int:
    """Runs a job, again after faults, `restarts` times at most; returns its exit status. here, key: as Start has them.
    Raises UserError: at the first start, the name of a host does not resolve."""
    interrupts, everyone, first_command = take_signals(), job.hosts, job.command
    starts, run = 1, None
    while True:
        outcome = Start(job, console, here, key).run(interrupts)
        broken, run = time.monotonic(), outcome.run or run
        if outcome.kind in ("done", "interrupted"):
            return outcome.status
        console.note(f"{outcome.kind}: {outcome.message}")
        if outcome.status == 2 and starts == 1:  # wrong input; later it may be a disk that is full for a while
            return outcome.status
        if restarts is None:
            restarts = MAC_RESTARTS if outcome.has_mac and here is None else 0
        is_killed = outcome.status - 128 in KILLS or outcome.kind in ("refused", "lost")
        if here is None and job.backend in RDMA_BACKENDS and not is_killed:
            console.note(f"{job.backend} failed: this run goes on over ring")
            job, restarts = replace(job, backend="ring"), restarts + 1
        way_on = "nothing was saved"
        if run is not None:
            way_on = f"go on with: {job.launch_line(command=jobs.resume_command(first_command, run, same_world=True))}"
        hosts = answering_hosts(job, everyone, console, interrupts) if starts <= restarts else ()
        if not interrupts.empty():
            return 128 + interrupts.get()
        if not hosts:
            if outcome.kind in ("stopped", "wedged") and (why := dropped_text(job)):
                console.note(why)
            console.note(way_on)
            return outcome.status
        starts += 1
        command = jobs.resume_command(job.command, run, hosts == everyone) if run is not None else job.command
        job = over_answering_addresses(replace(job, hosts=hosts, command=command), console)
        without = ", ".join(host.name for host in everyone if host not in hosts)
        where = f"on {len(hosts)} of {len(everyone)} hosts" + (f" (without {without})" if without else "")
        whence = f", going on with {run}" if run else ""
        console.note(f"start {starts}, {time.monotonic() - broken:.1f} s later, {where}{whence}")


def take_signals() -> Interrupts:
    """The signals that end the job, as they come. Under nohup the training outlives its terminal."""
    interrupts: Interrupts = queue.SimpleQueue()
    hangups = [signal.SIGHUP] if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN else []
    for number in (signal.SIGINT, signal.SIGTERM, *hangups):
        signal.signal(number, lambda number, _: interrupts.put(number))
    return interrupts


def answering_hosts(job: Job, hosts: tuple[Host, ...], console: Console, interrupts: Interrupts) -> tuple[Host, ...]:
    """The hosts that answer over ssh, in their order; waits where there is none."""
    deadline = time.monotonic() + NO_ANSWER_SECONDS

    def answers(host: Host) -> bool:
        return is_local(job, host) or os_commands.run([*ssh.ssh_command(host), "true"], PROBE_SECONDS).status == 0

    while True:
        with ThreadPoolExecutor(len(hosts)) as pool:
            there = tuple(host for host, is_there in zip(hosts, pool.map(answers, hosts), strict=True) if is_there)
        if there or time.monotonic() > deadline or not interrupts.empty():
            return there
        console.note(f"no host answers; waiting {max(0.0, deadline - time.monotonic()):.0f} s at most")
        time.sleep(2.0)


def unanswered(job: Job) -> list[str]:
    """By host, what REACH prints of its addresses on the host before it."""

    def of_host(before: Host, host: Host) -> str:
        addresses = host.addresses or (hostfile.address(host, job.hosts),)
        words = [job.python_of(before), "-c", REACH, f"{job.starting_port}", f"{host.port or 22}", *addresses]
        words = words if is_local(job, before) else [*ssh.ssh_command(before), shlex.join(words)]
        return os_commands.run(words, PROBE_SECONDS + len(addresses)).output

    with ThreadPoolExecutor(len(job.hosts)) as pool:
        return list(pool.map(of_host, (job.hosts[-1], *job.hosts[:-1]), job.hosts))


def dropped_text(job: Job) -> str:
    """Where packets of ranks are lost that those of ssh are not; "" for nowhere."""
    where = ", ".join(re.findall(r"dropped:(\S+)", " ".join(unanswered(job))))
    return where and f"a firewall drops what comes to port {job.starting_port} of {where}: docs/setup.md, Firewalls"


def over_answering_addresses(job: Job, console: Console) -> Job:
    """The job whose ring uses the addresses of its host file at which the host before still reaches a host: a cable may
    be out that ssh does not need. Hosts that are left with none are reached by their names' addresses."""
    own = {address for host in job.hosts for address in host.addresses if job.backend == "ring" and len(job.hosts) > 1}
    gone = own and own & {*" ".join(unanswered(job)).split()}
    if not gone:
        return job
    console.note(f"no answer at {', '.join(sorted(gone))}: the ring takes the next address")
    hosts = (replace(host, addresses=tuple(a for a in host.addresses if a not in gone)) for host in job.hosts)
    return replace(job, hosts=tuple(hosts))


def is_local(job: Job, host: Host) -> bool:
    """Whether a host is this machine, and has the project in this very folder."""
    return ssh.is_this_machine(host) and job.directory_of(host) == str(ROOT)
