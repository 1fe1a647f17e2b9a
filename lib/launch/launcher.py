"""A job from its first start to its last: ranks are started, watched, ended, and started again on hosts that answer.

Each rank is one process here: lib/launch/rank_process.py, directly or through ssh. Its output comes back on its pipes,
and its heartbeats (lib/distributed/heartbeat.py) on a connection that ssh forwards to this machine.
"""

from __future__ import annotations

import collections
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
from collections.abc import Callable, Mapping, Sequence
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
from lib.system import mlx_failures
from lib.system.terminal import Terminal

LOOK_SECONDS = 0.1
PING_SECONDS = 1.0
END_SECONDS = 2.0  # between asking a rank to end and killing it
# A Mac whose RDMA process was killed may refuse RDMA until its next boot (mlx#3910).
RDMA_END_SECONDS = 30.0
AGREED_SECONDS = 2.0  # that the other ranks have to end by themselves where one ended with an error
SILENT_TIMES = 3.0  # a rank ends where its launcher was silent for so many times --silent-seconds
PROBE_SECONDS = 8.0
NO_ANSWER_SECONDS = 120.0  # while no host answers, which may be the network of this machine
LONG_START_SECONDS = 60.0  # a start that lasted longer was no failure of the start itself
MOST_PAUSE_SECONDS = 30.0
COPY_SECONDS = 10.0  # between two copies of other hosts' logs
MAC_RESTARTS = 3  # by default where a host is a Mac: a lit display may end a rank at any time (lib/system/metal.py)
MPI_TAG = re.compile(r"\[[^\]]*?,(\d+)\]<(?:stdout|stderr)>: ?")
MPI_FAILED = re.compile(r"process rank (\d+) with PID|Process name: \[[^\]]*,(\d+)\]")  # in mpirun's last words
COLOURS = (36, 35, 32)


class Console:
    """Writes whole lines, each after its rank and host, from a thread: a terminal that is stopped stops no rank."""

    def __init__(self) -> None:
        self._lines: queue.SimpleQueue[tuple[TextIO, str] | None] = queue.SimpleQueue()
        self._is_coloured = Terminal().is_live and not os.environ.get("NO_COLOR")
        self._thread = threading.Thread(target=self._write, daemon=True)
        self._thread.start()

    def output(self, rank: int | None, host: str, stream: TextIO, text: str) -> None:
        """Writes a line of a rank; None: of mpirun."""
        tag = f"[{'mpirun' if rank is None else rank} {host}]"
        if self._is_coloured:
            tag = f"\033[{COLOURS[(rank or 0) % len(COLOURS)]}m{tag}\033[0m"
        self._lines.put((stream, f"{tag} {shown(text)}\n"))

    def note(self, text: str) -> None:
        """Writes a line of the launcher itself."""
        self._lines.put((sys.stderr, f"launch: {shown(text)}\n"))

    def close(self) -> None:
        """Waits a moment until all is written."""
        self._lines.put(None)
        self._thread.join(2)

    def _write(self) -> None:
        while (line := self._lines.get()) is not None:
            try:
                line[0].write(line[1])
                line[0].flush()
            except (OSError, ValueError):  # `| head` has ended
                os.kill(os.getpid(), signal.SIGINT)
                return


class Quiet(Console):
    """Keeps the ranks' lines instead: for a check, whose output matters only if it fails."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def output(self, rank: int | None, host: str, stream: TextIO, text: str) -> None:
        self.lines.append(text)

    def note(self, text: str) -> None:
        pass


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

    def __init__(
        self,
        command: RankCommand,
        words: Sequence[str],
        order: Mapping[str, object],
        console: Console,
        hosts: Sequence[str],
    ):
        """Starts it.

        Args:
            hosts: the name of each rank's host.

        Raises:
            UserError: there is no such program on this machine.
        """
        self.command, self.host, self._console, self._hosts = command, command.host.name, console, hosts
        self._failed_rank: int | None = None  # of those that mpirun started
        self.lost_another = False  # it ended because another rank was gone
        self.system: str | None = None  # Linux, Darwin; None until it has answered
        self._before_hello: collections.deque[str] = collections.deque(maxlen=5)
        try:
            self.process = subprocess.Popen(
                words,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                cwd=ROOT,
                start_new_session=True,  # Ctrl-C is the launcher's to hand on
            )
        except OSError as error:
            raise UserError(f"{words[0]} does not start on this machine: {error.strerror}") from None
        assert self.process.stdout is not None and self.process.stderr is not None
        pipes = ((self.process.stdout, sys.stdout), (self.process.stderr, sys.stderr))
        self._threads = [threading.Thread(target=self._read, args=pair, daemon=True) for pair in pipes]
        for thread in self._threads:
            thread.start()
        self.send(json.dumps(order))

    def send(self, line: str) -> None:
        """Sends a line, if the process is still there."""
        with contextlib.suppress(OSError, ValueError):
            assert self.process.stdin is not None
            self.process.stdin.write(line.encode() + b"\n")
            self.process.stdin.flush()

    def failure(self, status: int) -> Fault:
        """Why it ended with this status, which is not 0."""
        rank = self._failed_rank if self.command.rank is None else self.command.rank
        who, host = ("mpirun", self.host) if rank is None else (f"rank {rank}", self._hosts[rank])
        if self.system is None:
            why = next((line for line in reversed(self._before_hello) if line.strip()), f"status {status}")
            return Fault("refused", f"{who} on {self.host} does not start: {why}", (self.host,))
        if status == 255:
            message = f"the connection to {self.host} ended ({who}): it is off, or its sshd was stopped"
            return Fault("lost", message, (self.host,))
        number = status - 128
        if status < 0 or number in set(signal.Signals):
            name = signal.Signals(abs(status) if status < 0 else number).name
            return Fault(
                "died", f"{who} on {host} was ended by {name}", (host,), status if status > 0 else 128 - status
            )
        return Fault("died", f"{who} on {host} ended with status {status}", (host,), status)

    def close(self) -> None:
        """Kills what is left of it on this machine, and waits for its last lines."""
        if self.process.poll() is None:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        for thread in self._threads:
            thread.join(0.5)
        with contextlib.suppress(OSError):
            assert self.process.stdin is not None
            self.process.stdin.close()

    def _read(self, pipe: IO[bytes], stream: TextIO) -> None:
        for line in pipe:
            text = line.decode(errors="replace").rstrip("\r\n")
            if self.system is None:
                with contextlib.suppress(ValueError, LookupError, TypeError):
                    hello = json.loads(text[text.find("{") :])
                    self.system = str(hello["system"]) if HELLO in hello else None
                    continue
                self._before_hello.append(text)
                continue
            self.lost_another |= mlx_failures.NOTICED in text
            if tag := MPI_TAG.match(text):
                rank = int(tag[1])
                self._console.output(rank, self._hosts[rank], stream, text[tag.end() :])
            else:
                if self.command.rank is None and (failed := MPI_FAILED.search(text)) is not None:
                    self._failed_rank = int(failed[1] or failed[2])
                self._console.output(self.command.rank, self.host, stream, text)


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
        self._hosts = [host.name for host in job.hosts for _ in range(host.slots)]  # by rank
        self.links: list[RankLink] = []
        self.watcher: Watcher | None = None

    def run(self, interrupts: queue.SimpleQueue[int]) -> Outcome:
        """Starts all ranks and waits until they have ended.

        Raises:
            UserError: the name of a host does not resolve.
        """
        commands = jobs.rank_commands(self.job)
        self.watcher = Watcher("127.0.0.1", 0, self._key)
        fault, number = None, 0
        try:
            for command in commands:
                if self._here is None or command.host == self._here:
                    self._start(command)
            fault, number = self._watch(interrupts)
        finally:
            self._end(number or signal.SIGTERM, interrupts)
            reports = [state.report for state in self.watcher.states.copy().values()]
            self.watcher.close()
        status = 128 + number if number else fault.status if fault else 0
        facts = {name: text for report in reports for name in ("run", "diverged") if (text := report.get(name))}
        has_mac = any(link.system == "Darwin" for link in self.links)
        return Outcome(status, fault, facts.get("run"), facts.get("diverged"), bool(number), has_mac)

    def _start(self, command: RankCommand) -> None:
        assert self.watcher is not None
        port = self.watcher.address[1]
        is_here = self._here is not None or is_local(self.job, command.host)
        words = [self.job.python, "-m", "lib.launch.rank_process"]
        if not is_here:
            is_first = all(link.host != command.host.name for link in self.links)
            forward = ["-R", f"127.0.0.1:{port}:127.0.0.1:{port}"] if is_first else []
            words = ssh.remote_command(self.job, command.host, "lib.launch.rank_process", forward)
        secret = {"TANDEM_KEY": self._key.decode(), WATCHER: f"127.0.0.1:{port}"}
        order = {
            "command": command.command,
            "environment": {**command.environment, **secret},
            "files": command.files,
            "nice": self.job.nice,
            "silent_seconds": max(SILENT_TIMES * self.job.silent_seconds, ssh.CONNECT_SECONDS),
        }
        self.links.append(RankLink(command, words, order, self.console, self._hosts))

    def _watch(self, interrupts: queue.SimpleQueue[int]) -> tuple[Fault | None, int]:
        """Waits until all ranks have ended: with the first fault, or the number of the signal that ended the wait."""
        pinged = awake_since = looked = time.monotonic()
        copying = LogCopies(self.job, self.console)
        while True:
            with contextlib.suppress(queue.Empty):
                return None, interrupts.get(timeout=LOOK_SECONDS)
            now = time.monotonic()
            if now - looked > self.job.silent_seconds / 2:  # this process was stopped, or its machine slept
                awake_since = now
            looked = now
            if now - pinged > PING_SECONDS:
                pinged = now
                for link in self.links:
                    link.send("ping")
            if (fault := self._failure()) is not None:
                return fault, 0
            working = [link for link in self.links if link.process.poll() is None and link.command.command]
            if not working:
                copying.finish(self._run_folder(), self.links)
                return None, 0
            if now - awake_since > self.job.silent_seconds and (fault := self._silence(now)) is not None:
                return fault, 0
            copying.begin(self._run_folder(), self.links)

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
        cause = max(failed, key=lambda link: (link.process.returncode >= 128, not link.lost_another))
        return cause.failure(cause.process.returncode)

    def _silence(self, now: float) -> Fault | None:
        """What is wrong with ranks that have not ended."""
        assert self.watcher is not None
        states = {rank: state for rank, state in self.watcher.states.copy().items() if state.is_connected}
        if stopped := self.watcher.stopped(self.job.silent_seconds):
            seconds = now - states[stopped[0]].reported_at if stopped[0] in states else self.job.silent_seconds
            return self._fault("stopped", stopped, f"sent nothing for {seconds:.0f} s: stopped, asleep or cut off")
        if hanging := self.watcher.hanging():
            report = states[hanging[0]].report if hanging[0] in states else {}
            text = f"hangs in {report.get('phase')} for {report.get('silent_seconds', 0):.0f} s"
            return self._fault("hung", hanging, text)
        waits = {
            rank: state.report
            for rank, state in states.items()
            if state.report.get("is_wait") and state.report["silent_seconds"] > self.job.wedged_seconds
        }
        if not waits:
            return None
        longest = max(waits, key=lambda rank: float(waits[rank]["silent_seconds"]))
        text = f"waits for {waits[longest]['phase']} for {waits[longest]['silent_seconds']:.0f} s"
        late = [rank for rank, state in states.items() if not state.report.get("is_wait")]
        if late:
            names = ", ".join(f"rank {rank} on {self._host_of(rank)}" for rank in late)
            fault = self._fault("late", [longest], f"{text}: {names} did not come to it")
            return replace(fault, hosts=tuple(sorted({self._host_of(rank) for rank in late})))
        return self._fault("wedged", [longest], f"{text}, as all ranks do: the network refuses their ports")

    def _fault(self, kind: str, ranks: Sequence[int], text: str) -> Fault:
        names = ", ".join(f"rank {rank} on {self._host_of(rank)}" for rank in ranks)
        return Fault(kind, f"{names} {text}", tuple({self._host_of(rank) for rank in ranks}))

    def _host_of(self, rank: int) -> str:
        return self._hosts[rank] if rank < len(self._hosts) else "?"

    def _run_folder(self) -> str | None:
        states = self.watcher.states.copy().values() if self.watcher is not None else ()
        return next((str(state.report["run"]) for state in states if state.report.get("run")), None)

    def _end(self, number: int, interrupts: queue.SimpleQueue[int]) -> None:
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


class LogCopies:
    """Copies of other hosts' logs on this machine, for the dashboard: below the run's, `logs/HOST/rank-001.jsonl`."""

    def __init__(self, job: Job, console: Console):
        self._job, self._console = job, console
        self._thread: threading.Thread | None = None
        self._next = time.monotonic() + COPY_SECONDS

    def begin(self, run: str | None, links: Sequence[RankLink]) -> None:
        """Copies in the background, if it is time."""
        is_busy = self._thread is not None and self._thread.is_alive()
        if run is not None and not is_busy and time.monotonic() > self._next:
            self._next = time.monotonic() + COPY_SECONDS
            self._thread = threading.Thread(target=self._copy, args=(run, links), daemon=True)
            self._thread.start()

    def finish(self, run: str | None, links: Sequence[RankLink]) -> None:
        """Copies what is there at the end."""
        if self._thread is not None:
            self._thread.join(COPY_SECONDS)
        if run is not None:
            self._copy(run, links)

    def _copy(self, run: str, links: Sequence[RankLink]) -> None:
        inside = Path(run).is_relative_to(self._job.directory)
        logs = (ROOT / Path(run).relative_to(self._job.directory) if inside else Path(run)) / "logs"
        for host in {link.command.host for link in links}:
            ranks = [link.command.rank for link in links if link.command.host == host]
            is_shared = any((logs / f"rank-{rank or 0:03d}.jsonl").exists() for rank in ranks)  # one disk of both
            if is_local(self._job, host) or is_shared or not logs.parent.is_dir():
                continue
            with contextlib.suppress(OSError, subprocess.SubprocessError):
                folder = logs / re.sub(r"[^\w-]", "_", host.name)
                folder.mkdir(parents=True, exist_ok=True)
                words = [
                    "rsync",
                    "-a",
                    "--include=rank-*.jsonl",
                    "--exclude=*",
                    "-e",
                    shlex.join(ssh.ssh_command(host)[:-2]),
                ]
                words += ["--", f"{host.name}:{shlex.quote(run)}/logs/", f"{folder}/"]
                subprocess.run(words, capture_output=True, timeout=COPY_SECONDS)


# ---- From start to start


def supervise(
    job: Job,
    console: Console,
    max_restarts: int | None = None,
    restart_with: str = "survivors",
    way_on: Callable[[str], str] = "go on with --resume {}".format,
    here: Host | None = None,
    key: bytes | None = None,
) -> int:
    """Runs a job, again after faults; returns its exit status.

    Args:
        max_restarts: None for 3 where a host is a Mac, else 0.
        restart_with: "all" waits for every host before another start; "survivors" goes on with those that answer.
        way_on: the sentence that says how to go on with a run's folder.
        here, key: as Start has them.

    Raises:
        UserError: at the first start, the name of a host does not resolve.
    """
    interrupts = take_signals()
    everyone, run, restarts, short_starts, diverged = job.hosts, None, 0, 0, None
    while True:
        began = time.monotonic()
        outcome = Start(job, console, here, key).run(interrupts)
        broken = time.monotonic()
        run = outcome.run or run
        if outcome.fault is not None:
            console.note(f"{outcome.fault.kind}: {outcome.fault.message}")
        if outcome.is_interrupted or outcome.status == 0:
            return outcome.status
        if max_restarts is None:
            max_restarts = MAC_RESTARTS if outcome.has_mac and here is None else 0
        is_wrong_input = outcome.status == 2 and restarts == 0  # later it may be a disk that is full for a while
        if outcome.diverged and diverged:
            console.note("not started again: the updates are not finite, as before; lower train.learning_rate")
            is_wrong_input = True
        diverged = outcome.diverged
        if is_wrong_input or restarts >= max_restarts:
            if run is not None and not is_wrong_input:
                console.note(way_on(run))
            return outcome.status
        restarts += 1
        short_starts = short_starts + 1 if broken - began < LONG_START_SECONDS else 0
        pause_seconds = min(2.0 ** (short_starts - 2), MOST_PAUSE_SECONDS) if short_starts > 2 else 0.0
        with contextlib.suppress(queue.Empty):
            if pause_seconds:
                return 128 + interrupts.get(timeout=pause_seconds)
        again = _next_job(job, everyone, run, restart_with == "all", console, interrupts)
        if not interrupts.empty():
            return 128 + interrupts.get()
        if again is None:
            console.note(f"no host answers; {way_on(run) if run else 'nothing was saved'}")
            return outcome.status
        without = ", ".join(host.name for host in everyone if host not in again.hosts)
        where = f"on {len(again.hosts)} of {len(everyone)} hosts" + (f" (without {without})" if without else "")
        whence = f", going on with {run}" if run else ""
        console.note(f"start {restarts + 1}, {time.monotonic() - broken:.1f} s later, {where}{whence}")
        job = again


def _next_job(
    job: Job,
    everyone: tuple[Host, ...],
    run: str | None,
    all_of_them: bool,
    console: Console,
    interrupts: queue.SimpleQueue[int],
) -> Job | None:
    """The job on the hosts that answer, from the newest checkpoint of the run; None where no host answers."""
    hosts = answering_hosts(job, everyone, all_of_them, console, interrupts)
    command = jobs.resume_command(job.command, run, hosts == everyone) if run else job.command
    return replace(job, hosts=hosts, command=command) if hosts else None


def take_signals() -> queue.SimpleQueue[int]:
    """The signals that end the job, as they come. Under nohup the training outlives its terminal."""
    interrupts: queue.SimpleQueue[int] = queue.SimpleQueue()
    hangups = [signal.SIGHUP] if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN else []
    for number in (signal.SIGINT, signal.SIGTERM, *hangups):
        signal.signal(number, lambda number, _: interrupts.put(number))
    return interrupts


def answering_hosts(
    job: Job, hosts: tuple[Host, ...], all_of_them: bool, console: Console, interrupts: queue.SimpleQueue[int]
) -> tuple[Host, ...]:
    """The hosts that answer over ssh, in their order; all of them where they are wanted, or RDMA needs them."""
    limit_seconds = job.wedged_seconds if all_of_them else NO_ANSWER_SECONDS
    deadline = time.monotonic() + limit_seconds
    while True:
        with ThreadPoolExecutor(len(hosts)) as pool:
            answers = list(pool.map(lambda host: is_local(job, host) or _answers(host), hosts))
        there = tuple(host for host, answered in zip(hosts, answers, strict=True) if answered)
        is_whole = job.backend not in RDMA_BACKENDS or len(there) < 2 or jobs.rdma_fault(job.backend, there) is None
        if len(there) == len(hosts) or (there and not all_of_them and is_whole):
            return there
        if time.monotonic() > deadline or not interrupts.empty():
            return there if is_whole and not all_of_them else ()
        missing = ", ".join(host.name for host in hosts if host not in there)
        console.note(f"waiting for {missing}, {max(0.0, deadline - time.monotonic()):.0f} s at most")
        time.sleep(2.0)


def is_local(job: Job, host: Host) -> bool:
    """Whether a host is this machine, and has the project in this very folder."""
    return ssh.is_this_machine(host) and job.directory == str(ROOT)


def _answers(host: Host) -> bool:
    try:
        done = subprocess.run([*ssh.ssh_command(host), "true"], capture_output=True, timeout=PROBE_SECONDS)
    except (OSError, subprocess.SubprocessError):
        return False
    return done.returncode == 0
