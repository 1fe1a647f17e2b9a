"""The ranks of one host, started once by its agent: their output, their heartbeats, their end."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import errno
import json
import os
import shutil
import signal
import stat
import subprocess
import time
import zlib
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

from lib.distributed.heartbeat import ADDRESS, FOLDER, SECONDS, agent_folder
from lib.launch import agent_messages, mpirun_ports
from lib.launch.agent_messages import Beat, RankProcess
from lib.launch.memory_watch import MemoryWatch
from lib.system import network, os_commands
from lib.system.records import Tail

CHUNK_BYTES = 2**16
LOG_BYTES = 2**18  # of a log, sent at a time
POLL_SECONDS = 0.02  # between looks whether a rank has ended
QUIET_SECONDS, QUIET_LOOKS = 0.5, 2  # without output of one that has ended: nothing is left of it
KILLED_SECONDS = 2.0  # for the kernel to end who is killed: to give much memory back takes a while
LAST_WORDS_SECONDS = 1.0  # for what ranks that have ended still say
LEFT_SECONDS = 60.0  # at most for what it left, which may be much, and the connection slow


class Ranks:
    """The ranks of this host, started once."""

    def __init__(self, writer: asyncio.StreamWriter, address: str, sends_logs: bool, host: str):
        self.writer, self.address, self.sends_logs, self.host = writer, address, sends_logs, host
        self.followed: set[int] = set()  # ranks whose logs are sent
        self.input_ended = asyncio.Event()
        self.processes: dict[int | None, asyncio.subprocess.Process] = {}  # None: mpirun
        self.pids: dict[int, int] = {}  # of every rank of this host, whoever started it
        self.exits: list[tuple[int | None, int]] = []  # statuses of those that have ended
        self.folder = Path(agent_folder())
        own_folder(Path(address))  # before its name can be read off the other's: mpirun keeps its files there
        self.folder.mkdir(mode=0o700)
        self.server: asyncio.Server | None = None
        self.relayed_bytes = self.sending = 0  # of output so far; how many streams wait for the connection now
        self.tasks: set[asyncio.Future[None]] = set()
        self.ending = asyncio.Event()
        self.memory: dict[int, MemoryWatch] = {}  # of every rank of this host
        self.said_all: dict[int, asyncio.Event] = {}  # by rank that beats: its last beat was taken
        self.mpi_connections: set[str] = set()  # of mpirun with its own processes
        self.has_strangers = False
        self.input: asyncio.Future[asyncio.StreamWriter] = asyncio.get_running_loop().create_future()  # rank 0's

    def report(self, kind: str, **fields: Any) -> None:
        """Sends the launcher a message that names this start: those of an earlier start it drops."""
        write_message(self.writer, kind, start=self.address, **fields)

    async def listen(self, files: dict[str, str]) -> None:
        """Writes the files that the ranks read, and listens for their heartbeats."""
        for name, text in files.items():
            (self.folder / name).write_text(text, encoding="utf-8")
        self.server = await asyncio.start_unix_server(
            self._accept, self.folder / "agent", limit=agent_messages.LINE_BYTES
        )

    async def start(
        self, work: RankProcess, directory: str, standby: asyncio.subprocess.Process | None, unsaid: bytes = b""
    ) -> None:
        """Starts a process, or gives its work to a standby.

        unsaid: what the standby still has to say, in a first line that is for nobody else.
        """
        rank, command, environment = work["rank"], work["command"], work["environment"]
        try:
            if standby is not None:
                process = standby
                assert process.stdin is not None
                variables = {**environment, ADDRESS: self.address, network.HOST: self.host, FOLDER: str(self.folder)}
                line = json.dumps({"command": command[1:], "environment": variables})
                process.stdin.write(line.encode() + b"\n")
                if rank != 0:
                    process.stdin.close()
            else:
                own = (
                    {FOLDER: str(self.folder)} if rank is not None else {}
                )  # not mpirun's: its ranks are elsewhere as well
                process = await open_process(command, {**environment, **own}, directory, rank == 0)
        except OSError as error:
            self.report("output", rank=rank, stream="stderr", text=f"{command[0]}: {error.strerror}")
            self.exits.append((rank, 127))
            self.report("exit", rank=rank, status=127)
            return
        self.processes[rank] = process
        if rank is not None:
            self.pids[rank] = process.pid
        if rank == 0 and process.stdin is not None:
            self.input.set_result(process.stdin)
        assert process.stdout is not None and process.stderr is not None
        relays = [self._relay(process.stdout, rank, "stdout", unsaid), self._relay(process.stderr, rank, "stderr")]
        self._task(self._await_end(rank, process, asyncio.gather(*relays, return_exceptions=True)))

    async def _await_end(
        self, rank: int | None, process: asyncio.subprocess.Process, relays: asyncio.Future[Any]
    ) -> None:
        """Waits for a process to end; reports how it did, and ends what it started."""
        status = await _exit_of(process)
        # What it left in its pipes; a child of it that lives on holds them open, and is not waited for.
        quiet, deadline = 0, time.monotonic() + LEFT_SECONDS
        while quiet < QUIET_LOOKS and not relays.done() and time.monotonic() < deadline:
            before = self.relayed_bytes
            await asyncio.wait([relays], timeout=QUIET_SECONDS)
            quiet = quiet + 1 if self.relayed_bytes == before and not self.sending else 0
        relays.cancel()
        # What it said last, in its heartbeat, may be why it ended.
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(QUIET_SECONDS * QUIET_LOOKS):
                for said in [said for one, said in self.said_all.items() if rank in (one, None)]:
                    await said.wait()
        if rank is not None:
            self.check_memory(rank, process.pid, status)
        else:
            self.check_memory_of_mpi_ranks()
        self.exits.append((rank, status))
        self.report("exit", rank=rank, status=status)
        signal_group(process.pid, signal.SIGKILL)

    async def _relay(self, reader: asyncio.StreamReader, rank: int | None, stream: str, unsaid: bytes = b"") -> None:
        """Reports whole lines, and a last one without its end; not a first one that is `unsaid`."""
        rest = b""
        while chunk := await reader.read(CHUNK_BYTES):
            self.relayed_bytes += len(chunk)
            *lines, rest = (rest + chunk).split(b"\n")
            if len(rest) > CHUNK_BYTES:
                lines, rest = [*lines, rest], b""
            for line in lines:
                if not unsaid or line != unsaid:
                    self._report_line(rank, stream, line)
                unsaid = b""
            self.sending += 1
            try:
                await self.writer.drain()  # over a slow link it takes its time
            finally:
                self.sending -= 1
        if rest:
            self._report_line(rank, stream, rest)

    def _report_line(self, rank: int | None, stream: str, line: bytes) -> None:
        text = line.decode(errors="replace")
        if rank is not None:
            self.memory.setdefault(rank, MemoryWatch()).lines.append(text)
        self.report("output", rank=rank, stream=stream, text=text)

    def check_memory(self, rank: int, pid: int, status: int | None = None) -> None:
        """Notes what a living rank holds; of one that is gone, reports once whether it ran out of memory."""
        watch = self.memory.setdefault(rank, MemoryWatch())
        if status is None and process_state(pid) != "gone":
            watch.see_alive(pid)
        elif not watch.is_over:
            watch.is_over = True
            if (evidence := watch.ran_out(status)) is not None:
                self.report("memory", rank=rank, text=evidence)

    def states(self) -> dict[int, str]:
        """Of every rank, as the system has it; what shows that one ran out of memory is reported before it is gone."""
        states = {rank: process_state(pid) for rank, pid in self.pids.items()}
        self.check_memory_of_mpi_ranks()  # after that look: a rank may end between the two
        return states

    def check_memory_of_mpi_ranks(self) -> None:
        """The same for all ranks that mpirun started: it does not say how each of them ended."""
        for rank, pid in self.pids.items():
            if rank not in self.processes:
                self.check_memory(rank, pid)

    def hang_up_on_strangers(self) -> None:
        """Keeps mpirun, and what it started on this host, from waiting for who connects to it and says nothing."""
        servers = {mpirun_ports.parent_of(pid) for rank, pid in self.pids.items() if rank not in self.processes}
        if (mpirun := self.processes.get(None)) is not None and mpirun.returncode is None:
            servers.add(mpirun.pid)
        count = sum(mpirun_ports.hang_up_on_strangers(pid, self.mpi_connections) for pid in servers - {0, 1})
        if count and not self.has_strangers:
            self.has_strangers = True
            text = "somebody connects to mpirun's ports on this host; every such connection is shut down"
            write_message(self.writer, "warning", text=text)

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Serves one connection: the heartbeat of a rank, or the input or output of one that mpirun started."""
        try:
            hello = json.loads(await reader.readline())  # like all that comes here, of this folder's owner alone
            if hello["kind"] == "input":  # not by mpirun, which loses what comes after 64 kB
                self.input.set_result(writer)
                await self.input_ended.wait()
            elif hello["kind"] == "output":
                self.pids[hello["rank"]] = hello["pid"]
                await self._task(self._relay(reader, hello["rank"], hello["stream"]))
            else:
                await self._take_beats(reader)
        except (ValueError, KeyError, TypeError, ConnectionError):
            pass  # a rank that died in the middle of a line: its exit says more
        finally:
            writer.close()

    async def _take_beats(self, reader: asyncio.StreamReader) -> None:
        said_all = asyncio.Event()
        try:
            while line := await reader.readline():
                beat: Beat = json.loads(line)
                self.said_all[beat["rank"]] = said_all
                self._take_beat(beat)
        finally:
            said_all.set()

    def _take_beat(self, beat: Beat) -> None:
        rank, pid = beat["rank"], beat["pid"]
        self.pids[rank] = pid
        self.memory.setdefault(rank, MemoryWatch()).facts = beat
        self.check_memory(rank, pid)
        if self.sends_logs and "run" in beat and rank not in self.followed:
            self.followed.add(rank)
            self._task(self._send_log(rank, beat["run"]))
        self.report("beat", **beat)

    async def _send_log(self, rank: int, run: str) -> None:
        """Sends a rank's log as it is written, to its end: the dashboard on the launching machine shows it."""
        tail = Tail(Path(run) / "logs" / f"rank-{rank:03d}.jsonl")
        is_over = False
        while not is_over:
            is_over = process_state(self.pids[rank]) == "gone"
            lines = b"more"
            while lines:
                before = tail.offset
                begins, lines = tail.read(LOG_BYTES)
                if lines:
                    packed = base64.b64encode(zlib.compress(lines, 1)).decode()
                    self.report("log", rank=rank, run=run, offset=0 if begins else before, packed=packed)
                    await self.writer.drain()  # between two pieces, output and beats have their turn
            if self.ending.is_set():
                await asyncio.sleep(POLL_SECONDS)
            elif not is_over:
                with contextlib.suppress(asyncio.TimeoutError):
                    async with asyncio.timeout(SECONDS):
                        await self.ending.wait()

    async def end(self, number: int, grace_seconds: float) -> None:
        """Signals every process, and kills what is left after the grace. mpirun ends its ranks by itself."""
        for rank, process in self.processes.items():
            if process.returncode is None:
                signal_group(process.pid, number if rank is not None else signal.SIGTERM)
                if number != signal.SIGKILL:
                    signal_group(process.pid, signal.SIGCONT)  # who is stopped receives it then
        deadline = time.monotonic() + grace_seconds
        while time.monotonic() < deadline and self._left():
            await asyncio.sleep(POLL_SECONDS)
        for pid in self._left():
            signal_group(pid, signal.SIGKILL)
        while self._left() and time.monotonic() < deadline + KILLED_SECONDS:
            await asyncio.sleep(POLL_SECONDS)
        self.ending.set()

    def _left(self) -> list[int]:
        started = [process.pid for process in self.processes.values() if process.returncode is None]
        return started + [pid for pid in self.pids.values() if pid not in started and process_state(pid) != "gone"]

    async def type(self, text: str | None) -> None:
        """Hands input on to rank 0; None ends it."""
        writer = await self.input
        with contextlib.suppress(ConnectionError):
            if text is None:
                writer.close()
                self.input_ended.set()
            else:
                writer.write(base64.b64decode(text))
                await writer.drain()
        self.report("typed")  # the launcher may send the next piece

    def clear(self) -> None:
        """Removes the files that were written for the ranks."""
        if self.server is not None:
            self.server.close()
        for folder in (self.folder, self.address):
            shutil.rmtree(folder, ignore_errors=True)

    def _task(self, work: Coroutine[Any, Any, None]) -> asyncio.Future[None]:
        """Starts work that is done before the launcher is told that all has ended."""
        task = asyncio.ensure_future(work)
        self.tasks.add(task)
        task.add_done_callback(self.tasks.discard)
        return task


def own_folder(path: Path) -> None:
    """Makes a folder that nobody else can look into, or finds it so: agents on one machine share it.

    Raises:
        OSError: it is there, and not this user's alone.
    """
    with contextlib.suppress(FileExistsError):
        path.mkdir(mode=0o700)
    found = path.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or stat.S_IMODE(found.st_mode) & 0o077:
        raise PermissionError(errno.EPERM, "somebody else made it; start again", str(path))


def write_message(writer: asyncio.StreamWriter, kind: str, **fields: Any) -> None:
    """Sends the launcher a message."""
    writer.write(agent_messages.encoded(kind, **fields))


async def open_process(
    command: list[str], environment: dict[str, str], directory: str, has_input: bool
) -> asyncio.subprocess.Process:
    """Starts a process in a session of its own, with pipes for what it writes."""
    return await asyncio.create_subprocess_exec(
        *command,
        stdin=subprocess.PIPE if has_input else subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env={**os.environ, **environment},
        cwd=directory,
        start_new_session=True,  # its children are ended with it
        limit=agent_messages.LINE_BYTES,
    )


async def _exit_of(process: asyncio.subprocess.Process) -> int:
    """A process's status, as soon as it has ended: its own wait() may last until its children close its pipes, too."""
    while (status := process.returncode) is None:
        await asyncio.sleep(POLL_SECONDS)
    return status


def process_state(pid: int) -> str:
    """running, stopped (by a signal, or in a debugger) or gone."""
    try:
        letter = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[0]
    except FileNotFoundError:
        if Path("/proc/self").exists():
            return "gone"
        letter = os_commands.output(["ps", "-o", "state=", "-p", str(pid)]).strip()[:1] or _letter_of_kernel(pid)
    except ProcessLookupError:
        return "gone"
    return {"T": "stopped", "t": "stopped", "Z": "gone", "X": "gone"}.get(letter, "running")


def _letter_of_kernel(pid: int) -> str:
    """Where ps says nothing, be it that it failed or was late: whether there is such a process. "R" or "Z"."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return "Z"
    except PermissionError:  # it is somebody else's now
        pass
    return "R"


def signal_group(pid: int, number: int) -> None:
    """Sends a signal to a process and to all that it started, also where it has ended itself."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(os.getpgid(pid), number)
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, number)  # its first process is gone, a child lives
