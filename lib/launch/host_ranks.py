"""The ranks of one host, started once by its agent: their output, their heartbeats, their end."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
import os
import shutil
import signal
import subprocess
import time
import zlib
from collections import deque
from pathlib import Path
from typing import Any

from lib.distributed.heartbeat import ADDRESS, SECONDS, agent_folder
from lib.launch import agent_messages
from lib.system import network, out_of_memory
from lib.telemetry.log_tail import Tail

CHUNK_BYTES = 2**16
LOG_BYTES = 2**18  # of a log, sent at a time
LAST_LINES = 40  # of a rank's output, in which MLX may have told why it ended
EXIT_SECONDS = 0.02  # between looks whether a rank has ended


class Look:
    """What was seen of a rank, for the case that it is ended for its memory and cannot tell."""

    def __init__(self) -> None:
        self.lines: deque[str] = deque(maxlen=LAST_LINES)
        self.facts: dict[str, Any] = {}  # of its heart's last beat
        self.groups = ""
        self.kills: dict[str, int] = {}  # by the kernel, before it began
        self.held_bytes = 0
        self.is_over = False

    def at_living(self, pid: int) -> None:
        groups = out_of_memory.control_groups(pid)
        self.kills = {**out_of_memory.kernel_kills(groups), **self.kills}  # who is counted first counts
        self.groups = groups
        with contextlib.suppress(OSError, IndexError, ValueError):
            pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
            self.held_bytes = pages * os.sysconf("SC_PAGE_SIZE") or self.held_bytes

    def ran_out(self, status: int | None) -> str | None:
        """What shows that the rank ran out of memory, with what is known; its run's folder keeps it for the next start.

        status: of its end; None where only its parent knows it.
        """
        if self.facts.get("ended"):
            return None
        killed = out_of_memory.has_killed(self.kills, out_of_memory.kernel_kills(self.groups))
        why = out_of_memory.evidence(-signal.SIGKILL if status is None else status, list(self.lines), killed)
        if why is None:
            return None
        if self.held_bytes:
            why += f"; it held {self.held_bytes / 1e9:.4g} GB when last seen"
        if self.facts.get("run") and self.facts.get("micro_batch_size"):
            note = {"evidence": why, **{name: self.facts.get(name) for name in ("rank", *out_of_memory.NOTED)}}
            file = Path(self.facts["run"]) / out_of_memory.NOTE.format(host=self.facts["machine"])
            with contextlib.suppress(OSError):
                file.write_text(json.dumps(note) + "\n")
            why += f", with micro-batches of {self.facts['micro_batch_size']}; the next start takes half there"
        return why


class Ranks:
    """The ranks of this host, started once."""

    def __init__(self, writer: asyncio.StreamWriter, address: str, sends_logs: bool, host: str):
        self.writer, self.address, self.sends_logs, self.host = writer, address, sends_logs, host
        self.followed: set[int] = set()  # ranks whose logs are sent
        self.typed_all = asyncio.Event()
        self.processes: dict[int | None, asyncio.subprocess.Process] = {}  # None: mpirun
        self.pids: dict[int, int] = {}  # of every rank of this host, whoever started it
        self.exits: list[tuple[int | None, int]] = []  # statuses of those that have ended
        self.folder = Path(agent_folder())
        self.folder.mkdir(mode=0o700)
        self.server: asyncio.Server | None = None
        self.tasks: set[asyncio.Future[None]] = set()
        self.ending = asyncio.Event()
        self.looks: dict[int, Look] = {}  # at every rank of this host
        self.typed: asyncio.Future[asyncio.StreamWriter] = asyncio.get_running_loop().create_future()  # rank 0's input

    def say(self, kind: str, **fields: Any) -> None:
        """With the start that it is about: of an earlier one the launcher wants to hear no more."""
        write_message(self.writer, kind, start=self.address, **fields)

    async def listen(self, files: dict[str, str]) -> None:
        """Writes what the ranks read, and hears what they say of themselves."""
        for name, text in files.items():
            (self.folder / name).write_text(text)
        self.server = await asyncio.start_unix_server(
            self._accept, self.folder / "agent", limit=agent_messages.LINE_BYTES
        )

    async def start(
        self,
        rank: int | None,
        command: list[str],
        environment: dict[str, str],
        directory: str,
        spare: asyncio.subprocess.Process | None,
    ) -> None:
        """Starts a process, or gives its work to a spare one."""
        try:
            if spare is not None:
                process = spare
                assert process.stdin is not None
                work = {
                    "command": command[1:],
                    "environment": {**environment, ADDRESS: self.address, network.HOST: self.host},
                }
                process.stdin.write(json.dumps(work).encode() + b"\n")
                if rank != 0:
                    process.stdin.close()
            else:
                process = await open_process(command, environment, directory, rank == 0)
        except OSError as error:
            self.say("output", rank=rank, stream="stderr", text=f"{command[0]}: {error.strerror}")
            self.exits.append((rank, 127))
            self.say("exit", rank=rank, status=127)
            return
        self.processes[rank] = process
        if rank is not None:
            self.pids[rank] = process.pid
        if rank == 0 and process.stdin is not None:
            self.typed.set_result(process.stdin)
        assert process.stdout is not None and process.stderr is not None
        relays = [self._relay(process.stdout, rank, "stdout"), self._relay(process.stderr, rank, "stderr")]
        self._task(self._see_off(rank, process, asyncio.gather(*relays)))

    async def _see_off(self, rank: int | None, process: asyncio.subprocess.Process, relays: Any) -> None:
        status = await _exit_of(process)
        # What it left in its pipes; a child of it that lives on holds them open, and is not waited for.
        with contextlib.suppress(asyncio.TimeoutError):
            await asyncio.wait_for(relays, 1.0)
        if rank is not None:
            self.look(rank, process.pid, status)
        else:
            self.look_at_gone()
        self.exits.append((rank, status))
        self.say("exit", rank=rank, status=status)
        signal_group(process.pid, signal.SIGKILL)

    async def _relay(self, reader: asyncio.StreamReader, rank: int | None, stream: str) -> None:
        """Passes on whole lines, and a last one without its end."""
        rest = b""
        while chunk := await reader.read(CHUNK_BYTES):
            *lines, rest = (rest + chunk).split(b"\n")
            if len(rest) > CHUNK_BYTES:
                lines, rest = [*lines, rest], b""
            for line in lines:
                self._pass_on(rank, stream, line)
            await self.writer.drain()
        if rest:
            self._pass_on(rank, stream, rest)

    def _pass_on(self, rank: int | None, stream: str, line: bytes) -> None:
        text = line.decode(errors="replace")
        if rank is not None:
            self.looks.setdefault(rank, Look()).lines.append(text)
        self.say("output", rank=rank, stream=stream, text=text)

    def look(self, rank: int, pid: int, status: int | None = None) -> None:
        """Looks at a rank: what it holds while it lives; and, once, whether it ran out of memory when it is gone."""
        look = self.looks.setdefault(rank, Look())
        if status is None and process_state(pid) != "gone":
            look.at_living(pid)
        elif not look.is_over:
            look.is_over = True
            if (why := look.ran_out(status)) is not None:
                self.say("memory", rank=rank, text=why)

    def look_at_gone(self) -> None:
        """The same for all ranks that mpirun started; how they ended it tells nobody."""
        for rank, pid in self.pids.items():
            if rank not in self.processes:
                self.look(rank, pid)

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """A rank's heart, or the output of one that mpirun started."""
        try:
            hello = json.loads(await reader.readline())  # like all that comes here, of this folder's owner alone
            if hello["kind"] == "input":  # not by mpirun, which loses what comes after 64 kB
                self.typed.set_result(writer)
                await self.typed_all.wait()
            elif hello["kind"] == "output":
                self.pids[hello["rank"]] = hello["pid"]
                await self._task(self._relay(reader, hello["rank"], hello["stream"]))
            else:
                while line := await reader.readline():
                    facts = json.loads(line)
                    self.pids[facts["rank"]] = facts["pid"]
                    self.looks.setdefault(facts["rank"], Look()).facts = facts
                    self.look(facts["rank"], facts["pid"])
                    if self.sends_logs and "run" in facts and facts["rank"] not in self.followed:
                        self.followed.add(facts["rank"])
                        self._task(self._send_log(facts["rank"], facts["run"]))
                    self.say("beat", **facts)
        except (ValueError, KeyError, TypeError, ConnectionError):
            pass  # a rank that died in the middle of a word: its exit tells more
        finally:
            writer.close()

    async def _send_log(self, rank: int, run: str) -> None:
        """Sends what a rank records as it is written, to its end: whoever looks at the run on the launching machine sees it."""
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
                    self.say("log", rank=rank, run=run, offset=0 if begins else before, packed=packed)
                    await self.writer.drain()  # between two pieces, output and beats have their turn
            if self.ending.is_set():
                await asyncio.sleep(0.02)
            elif not is_over:
                with contextlib.suppress(asyncio.TimeoutError):
                    await asyncio.wait_for(self.ending.wait(), SECONDS)

    async def end(self, number: int, grace_seconds: float) -> None:
        """Signals every rank, and kills what is left after the grace. mpirun is told first: it ends its ranks itself."""
        for rank, process in self.processes.items():
            if process.returncode is None:
                signal_group(process.pid, number if rank is not None else signal.SIGTERM)
                if number != signal.SIGKILL:
                    signal_group(process.pid, signal.SIGCONT)  # who is stopped hears it then
        deadline = time.monotonic() + grace_seconds
        while time.monotonic() < deadline and self._left():
            await asyncio.sleep(0.02)
        for pid in self._left():
            signal_group(pid, signal.SIGKILL)
        while self._left() and time.monotonic() < deadline + 2:
            await asyncio.sleep(0.02)
        self.ending.set()

    def _left(self) -> list[int]:
        started = [process.pid for process in self.processes.values() if process.returncode is None]
        return started + [pid for pid in self.pids.values() if pid not in started and process_state(pid) != "gone"]

    async def type(self, text: str | None) -> None:
        """Hands input on to rank 0; None ends it."""
        writer = await self.typed
        with contextlib.suppress(ConnectionError):
            if text is None:
                writer.close()
                self.typed_all.set()
            else:
                writer.write(base64.b64decode(text))
                await writer.drain()
        self.say("typed")

    def clear(self) -> None:
        """Removes what was written for them."""
        if self.server is not None:
            self.server.close()
        for folder in (self.folder, self.address):
            shutil.rmtree(folder, ignore_errors=True)

    def _task(self, work: Any) -> asyncio.Future[None]:
        """Work that is done before the launcher hears that all has ended."""
        task = asyncio.ensure_future(work)
        self.tasks.add(task)
        task.add_done_callback(self.tasks.discard)
        return task


def write_message(writer: asyncio.StreamWriter, kind: str, **fields: Any) -> None:
    writer.write(agent_messages.encoded(kind, **fields))


async def open_process(
    command: list[str], environment: dict[str, str], directory: str, has_input: bool
) -> asyncio.subprocess.Process:
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
    """A process's status, as soon as it ended: its own wait() may last until its children let go of its pipes, too."""
    while (status := process.returncode) is None:
        await asyncio.sleep(EXIT_SECONDS)
    return status


def process_state(pid: int) -> str:
    """running, stopped (by a signal, or in a debugger) or gone."""
    try:
        letter = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        if Path("/proc/self").exists():
            return "gone"
        told = subprocess.run(["ps", "-o", "state=", "-p", str(pid)], capture_output=True, text=True).stdout.strip()
        letter = told[:1] or "Z"
    except ProcessLookupError:
        return "gone"
    return {"T": "stopped", "t": "stopped", "Z": "gone", "X": "gone"}.get(letter, "running")


def signal_group(pid: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(os.getpgid(pid), number)
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, number)  # its first process is gone, a child lives
