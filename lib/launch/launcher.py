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
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO, TextIO

from lib.distributed import connection
from lib.distributed.heartbeat import WATCHER, Watcher
from lib.environment import ROOT
from lib.errors import UserError, shown
from lib.launch import job as jobs
from lib.launch import ssh
from lib.launch.hostfile import Host
from lib.launch.job import RDMA_BACKENDS, Job, RankCommand
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
MAC_RESTARTS = 3  # by default where a host is a Mac: a lit display may end a rank at any time (lib/system/metal.py)
MPI_TAG = re.compile(r"\[[^\]]*?,(\d+)\]<(?:stdout|stderr)>: ?")
MPI_FAILED = re.compile(r"process rank (\d+) with PID|Process name: \[[^\]]*,(\d+)\]")  # in mpirun's last words

Interrupts = queue.SimpleQueue[int]  # numbers of signals


class Console:
    """Writes whole lines, each after its rank and host; or keeps them, for a check whose output matters if it fails."""

    def __init__(self, lines: list[str] | None = None) -> None:
        """lines: takes the ranks' lines, and nothing is written."""
        self.lines, self._lock = lines, threading.Lock()

    def output(self, rank: int | None, host: str, stream: TextIO, text: str) -> None:
        """Writes a line of a rank; None: of mpirun."""
        if self.lines is not None:
            self.lines.append(text)
            return
        try:
            with self._lock:
                print(f"[{'mpirun' if rank is None else rank} {host}]", shown(text), file=stream, flush=True)
        except (OSError, ValueError):  # `| head` has ended
            os.kill(os.getpid(), signal.SIGINT)

    def note(self, text: str) -> None:
        """Writes a line of the launcher itself."""
        if self.lines is None:
            with self._lock, contextlib.suppress(OSError, ValueError):
                print(f"launch: {shown(text)}", file=sys.stderr, flush=True)


@dataclass(frozen=True)
class Fault:
    """Why a world cannot go on. kind: died, refused, lost, stopped, hung, late, wedged."""

    kind: str
    message: str
    hosts: tuple[str, ...]
    status: int = 1


@dataclass(frozen=True)
class Outcome:
    """How a start ended."""

    status: int
    fault: Fault | None = None
    run: str | None = None  # the folder to resume from
    diverged: str | None = None  # why another start would end the same
    is_interrupted: bool = False
    has_mac: bool = False


class RankLink:
    """A rank's process, as this machine sees it."""

    def __init__(self, command: RankCommand, words: Sequence[str], console: Console, hosts: Sequence[str]):
        """Starts it by these words; hosts: of each rank. Raises UserError: there is no such program on this machine."""
        self.command, self.host, self._console, self._hosts = command, command.host.name, console, hosts
        self._failed_rank = command.rank  # with mpirun: of those that it started
        self.lost_another = False  # it ended because another rank was gone
        self.system: str | None = None  # Linux, Darwin; None until it has answered
        self._last_words = ""  # before it has answered
        pipe = subprocess.PIPE
        try:  # in a session of its own: Ctrl-C is the launcher's to hand on
            self.process = subprocess.Popen(
                words, stdin=pipe, stdout=pipe, stderr=pipe, cwd=ROOT, start_new_session=True
            )
        except OSError as error:
            raise UserError(
                f"{words[0]} does not start on this machine: {error.strerror}; --python names another"
            ) from None
        pipes = ((self.process.stdout, sys.stdout), (self.process.stderr, sys.stderr))
        self._threads = [threading.Thread(target=self._read, args=pair, daemon=True) for pair in pipes]
        for thread in self._threads:
            thread.start()

    def send(self, line: str) -> None:
        """Sends a line, if the process is still there."""
        with contextlib.suppress(OSError, ValueError):
            assert self.process.stdin is not None
            self.process.stdin.write(line.encode() + b"\n")
            self.process.stdin.flush()

    def failure(self) -> Fault:
        """Why it ended, where its status is not 0."""
        rank, status = self._failed_rank, self.process.returncode
        who, host = ("mpirun", self.host) if rank is None else (f"rank {rank}", self._hosts[rank])
        if self.system is None:
            why = self._last_words or f"status {status}"
            remedy = "; ".join(filter(None, ssh.remedy(self.command.host, why)[1:]))
            return Fault("refused", f"{who} on {self.host} does not start: {why}; {remedy}", (self.host,))
        if status == 255:
            message = f"the connection to {self.host} ended ({who}): it is off, or its sshd was stopped"
            return Fault("lost", message, (self.host,))
        status = 128 - status if status < 0 else status
        is_signal = status - 128 in set(signal.Signals)
        how = f"was ended by {signal.Signals(status - 128).name}" if is_signal else f"ended with status {status}"
        return Fault("died", f"{who} on {host} {how}", (host,), status)

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
                self._last_words = text.strip() or self._last_words
                continue
            self.lost_another |= out_of_memory.NOTICED in text
            rank, host = self.command.rank, self.host
            if tag := MPI_TAG.match(text):
                rank, text = int(tag[1]), text[tag.end() :]
                host = self._hosts[rank]
            elif rank is None and (failed := MPI_FAILED.search(text)) is not None:
                self._failed_rank = int(failed[1] or failed[2])
            self._console.output(rank, host, stream, text)


class Start:
    """One start of all ranks of a job."""

    def __init__(self, job: Job, console: Console, here: Host | None = None, key: bytes | None = None):
        """Nothing is started yet.

        Args:
            here: start the ranks of this host alone, without ssh.
            key: of the run; a new one without it.
        """
        self.job, self.console, self._here = job, console, here
        self._key = key or connection.new_key()
        self.links: list[RankLink] = []

    def run(self, interrupts: Interrupts) -> Outcome:
        """Starts all ranks and waits until they have ended. Raises UserError: the name of a host does not resolve."""
        commands = jobs.rank_commands(self.job)
        watcher = Watcher("127.0.0.1", 0, self._key, self.job.host_names)
        fault, number = None, 0
        try:
            for command in commands:
                if self._here is None or command.host == self._here:
                    self._start(command, watcher.address[1])
            fault, number = self._watch(watcher, interrupts)
        finally:
            self._end(number or signal.SIGTERM, interrupts)
            run, diverged = self._run_folder(watcher), watcher.fact("diverged")
            watcher.close()
        status = 128 + number if number else fault.status if fault else 0
        has_mac = any(link.system == "Darwin" for link in self.links)
        return Outcome(status, fault, run, diverged, bool(number), has_mac)

    def _start(self, command: RankCommand, port: int) -> None:
        words = [self.job.python, "-m", "lib.launch.rank_process"]
        if self._here is None and not is_local(self.job, command.host):
            is_first = all(link.host != command.host.name for link in self.links)
            forward = ["-R", f"127.0.0.1:{port}:127.0.0.1:{port}"] if is_first else []
            words = ssh.remote_command(self.job, command.host, "lib.launch.rank_process", forward)
        secret = {connection.KEY_VARIABLE: self._key.decode(), WATCHER: f"127.0.0.1:{port}"}
        link = RankLink(command, words, self.console, self.job.host_names)
        self.links.append(link)
        order = {
            "command": command.command,
            "environment": {**command.environment, **secret},
            "files": command.files,
            "silent_seconds": max(SILENT_TIMES * self.job.silent_seconds, ssh.CONNECT_SECONDS),
        }
        link.send(json.dumps(order))

    def _watch(self, watcher: Watcher, interrupts: Interrupts) -> tuple[Fault | None, int]:
        """Waits until all ranks have ended: with the first fault, or the number of the signal that ended the wait."""
        pinged = awake_since = looked = time.monotonic()
        names, silent = self.job.host_names, self.job.silent_seconds
        while True:
            with contextlib.suppress(queue.Empty):
                return None, interrupts.get(timeout=LOOK_SECONDS)
            now = time.monotonic()
            if now - looked > silent / 2:  # this process was stopped, or its machine slept
                awake_since = now
            looked = now
            if now - pinged > PING_SECONDS:
                pinged = now
                for link in self.links:
                    link.send("ping")
            if (fault := self._failure()) is not None:
                return fault, 0
            if not any(link.process.poll() is None and link.command.command for link in self.links):
                return None, 0
            if now - awake_since > silent and (silence := watcher.silence(silent, self.job.wedged_seconds)) is not None:
                hosts = {names[rank] for rank in silence.ranks if rank < len(names)}
                return Fault(silence.kind, silence.text, tuple(sorted(hosts))), 0

    def _failure(self) -> Fault | None:
        """The first fault of a process that ended. Where ranks ended with an error, the others end by themselves."""
        failed = [link for link in self.links if link.process.poll()]
        if not failed:
            return None
        if all(0 < link.process.returncode < 128 for link in failed):
            deadline = time.monotonic() + AGREED_SECONDS
            while time.monotonic() < deadline and any(link.process.poll() is None for link in self.links):
                time.sleep(LOOK_SECONDS)
            failed = [link for link in self.links if link.process.poll()]
        # A killed rank makes the others end with status 1: the signal is the cause.
        return max(failed, key=lambda link: (link.process.returncode >= 128, not link.lost_another)).failure()

    def _run_folder(self, watcher: Watcher) -> str | None:
        """The run's folder as its ranks reported it; below the project, which may differ by host, relative."""
        run = watcher.fact("run")
        for directory in map(self.job.directory_of, self.job.hosts):
            if run and Path(run).is_relative_to(directory):
                return str(Path(run).relative_to(directory))
        return run

    def _end(self, number: int, interrupts: Interrupts) -> None:
        """Ends every rank on every host; a second interrupt kills at once."""
        grace_seconds = RDMA_END_SECONDS if self.job.backend in RDMA_BACKENDS else END_SECONDS
        for link in self.links:
            link.send(f"end {int(number)} {grace_seconds}")
        deadline = time.monotonic() + grace_seconds + 2.0
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
    job: Job,
    console: Console,
    restarts: int | None,
    way_on: Callable[[str], str],
    here: Host | None = None,
    key: bytes | None = None,
) -> int:
    """Runs a job, again after faults; returns its exit status. here, key: as Start has them.

    Args:
        restarts: at most; None for 3 where a host is a Mac, else 0.
        way_on: how a person goes on, of a run's folder.

    Raises UserError: at the first start, the name of a host does not resolve.
    """
    interrupts, everyone, run, starts, diverged = take_signals(), job.hosts, None, 1, None
    while True:
        outcome = Start(job, console, here, key).run(interrupts)
        broken = time.monotonic()
        run = outcome.run or run
        if outcome.fault is not None:
            console.note(f"{outcome.fault.kind}: {outcome.fault.message}")
        if outcome.is_interrupted or outcome.status == 0:
            return outcome.status
        if restarts is None:
            restarts = MAC_RESTARTS if outcome.has_mac and here is None else 0
        is_wrong_input = outcome.status == 2 and starts == 1  # later it may be a disk that is full for a while
        if outcome.diverged and diverged:
            console.note("not started again: the updates are not finite, as before; lower train.learning_rate")
            return outcome.status
        diverged = outcome.diverged
        if not is_wrong_input and here is None and rdma_failed(job, outcome):
            console.note(f"{job.backend} failed: this run goes on over ring")
            job, restarts = replace(job, backend="ring"), restarts + 1
        if is_wrong_input or starts > restarts:
            if run is not None and not is_wrong_input:
                console.note(way_on(run))
            return outcome.status
        hosts = answering_hosts(job, everyone, console, interrupts)
        if not interrupts.empty():
            return 128 + interrupts.get()
        if not hosts:
            console.note(f"no host answers; {way_on(run) if run else 'nothing was saved'}")
            return outcome.status
        starts += 1
        command = jobs.resume_command(job.command, run, hosts == everyone) if run is not None else job.command
        job = replace(job, hosts=hosts, command=command)
        without = ", ".join(host.name for host in everyone if host not in hosts)
        where = f"on {len(hosts)} of {len(everyone)} hosts" + (f" (without {without})" if without else "")
        whence = f", going on with {run}" if run else ""
        console.note(f"start {starts}, {time.monotonic() - broken:.1f} s later, {where}{whence}")


def rdma_failed(job: Job, outcome: Outcome) -> bool:
    """Whether RDMA itself may be what failed: no rank was ended by a signal, refused to start or lost its host."""
    fault = outcome.fault
    if job.backend not in RDMA_BACKENDS or fault is None or fault.kind in ("refused", "lost"):
        return False
    return fault.kind != "died" or fault.status < 128


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
        if there:
            return there
        if time.monotonic() > deadline or not interrupts.empty():
            return ()
        missing = ", ".join(host.name for host in hosts if host not in there)
        console.note(f"waiting for {missing}, {max(0.0, deadline - time.monotonic()):.0f} s at most")
        time.sleep(2.0)


def is_local(job: Job, host: Host) -> bool:
    """Whether a host is this machine, and has the project in this very folder."""
    return ssh.is_this_machine(host) and job.directory_of(host) == str(ROOT)
