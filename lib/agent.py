"""One host's end of a launch: starts its ranks, passes on what they say, and ends them.

    python -m lib.agent                          the launcher starts this on every host, over ssh
    python -m lib.agent rank -- COMMAND ...      what mpirun starts for each rank: joins its output to this host's agent

The launcher's words come in on the standard input, one JSON object a line, and the answers leave on the standard
output; no word of a command ever passes a shell. When the input ends, or the launcher is silent for too long, every
rank of this host is ended: a launcher that is killed, or a cable that is cut, leaves no process behind.

Only the standard library is imported: an agent is there in a tenth of a second.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
import os
import platform
import shutil
import signal
import socket
import subprocess
import sys
import time
import zlib
from collections import deque
from pathlib import Path
from typing import Any

from lib import channel, network, os_commands, out_of_memory
from lib.heartbeat import ADDRESS, SECONDS, agent_folder
from lib.tail import Tail

CHUNK_BYTES = 2**16
LOG_BYTES = 2**18  # of a log, sent at a time
HOST_FILE = "host"  # in the agent's folder: the name that the launcher fixed for this machine
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
        _say(self.writer, kind, start=self.address, **fields)

    async def listen(self, files: dict[str, str]) -> None:
        """Writes what the ranks read, and hears what they say of themselves."""
        for name, text in files.items():
            (self.folder / name).write_text(text)
        self.server = await asyncio.start_unix_server(self._accept, self.folder / "agent", limit=channel.LINE_BYTES)

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
                process = await _open(command, environment, directory, rank == 0)
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
        _signal_group(process.pid, signal.SIGKILL)

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
        if status is None and _state(pid) != "gone":
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
            is_over = _state(self.pids[rank]) == "gone"
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
                _signal_group(process.pid, number if rank is not None else signal.SIGTERM)
                if number != signal.SIGKILL:
                    _signal_group(process.pid, signal.SIGCONT)  # who is stopped hears it then
        deadline = time.monotonic() + grace_seconds
        while time.monotonic() < deadline and self._left():
            await asyncio.sleep(0.02)
        for pid in self._left():
            _signal_group(pid, signal.SIGKILL)
        while self._left() and time.monotonic() < deadline + 2:
            await asyncio.sleep(0.02)
        self.ending.set()

    def _left(self) -> list[int]:
        started = [process.pid for process in self.processes.values() if process.returncode is None]
        return started + [pid for pid in self.pids.values() if pid not in started and _state(pid) != "gone"]

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


class Agent:
    """What the launcher can ask of this host: a start of its ranks and their end, as often as it likes."""

    def __init__(self, writer: asyncio.StreamWriter):
        self.writer = writer
        self.address = ""  # of the newest start
        self.ranks: Ranks | None = None
        self.spares: dict[int, asyncio.subprocess.Process] = {}  # by place among this host's ranks
        self.preparing: asyncio.Future[None] | None = None
        self.listener: asyncio.Server | None = None
        self.heard = time.monotonic()
        self.silent_seconds = 60.0
        self.end_seconds = 1.0
        self.is_nice = False

    async def start(
        self,
        address: str,
        processes: list[dict[str, Any]],
        files: dict[str, str],
        directory: str,
        silent_seconds: float,
        nice: int | None,
        awake: bool,
        sends_logs: bool,
        host: str,
        end_seconds: float,
    ) -> None:
        """Starts processes, each of which has the name `host` for this machine, after writing the `files` that they read into a folder of their own."""
        self._stop_listening()
        self._be_nice(nice)
        if self.ranks is None:
            if awake and os_commands.is_mac():  # a Mac that sleeps is a rank that is lost
                subprocess.Popen(["caffeinate", "-is", "-w", str(os.getpid())])
        else:
            self.ranks.clear()
        self.address, self.ranks = address, None
        self.silent_seconds, self.end_seconds = silent_seconds, max(self.end_seconds, end_seconds)
        # Open MPI names its folder by a process id alone, and does not start where a killed mpirun left that one behind.
        os.environ.update({ADDRESS: address, network.HOST: host, "PRTE_MCA_prte_tmpdir_base": address})
        try:
            self.ranks = Ranks(self.writer, address, sends_logs, host)
            await self.ranks.listen({**files, HOST_FILE: host})
        except OSError as error:
            named_twice = isinstance(error, FileExistsError)  # its folder has this machine's name
            told = "the host file names this machine twice" if named_twice else str(error)
            _say(self.writer, "warning", text=f"no ranks are started: {told}")
            for process in processes:
                _say(self.writer, "exit", start=address, rank=process["rank"], status=2 if named_twice else 1)
            return
        for place, process in enumerate(processes):
            spare = self.spares.pop(place, None)
            if spare is not None and spare.returncode is not None:
                spare = None
            await self.ranks.start(process["rank"], process["command"], process["environment"], directory, spare)

    async def prepare(
        self, processes: list[dict[str, Any]], directory: str, expected: list[str], nice: int | None
    ) -> None:
        """Has a process ready for each that may be started later: it has imported and read what `expected` wants."""
        self._be_nice(nice)
        for place, process in enumerate(processes):
            if place in self.spares and self.spares[place].returncode is None:
                continue
            spare = await _open([process["command"][0], "-m", "lib.spare"], process["environment"], directory, True)
            try:
                assert spare.stdin is not None and spare.stdout is not None
                spare.stdin.write(json.dumps({"command": expected}).encode() + b"\n")
                if await spare.stdout.readline() == b"ready\n":
                    self.spares[place] = spare
            finally:
                if self.spares.get(place) is not spare:
                    _signal_group(spare.pid, signal.SIGKILL)

    async def answer(self, question: str, **words: Any) -> Any:
        """What the launcher wants to know: whether spares are ready, or how the network is."""
        if question == "prepare":
            if self.preparing is None or self.preparing.done():
                self.preparing = asyncio.ensure_future(self.prepare(**words))
            await self.preparing
            return len(self.spares)
        if question == "listen":  # at a port of the run's, which a firewall may refuse
            self._stop_listening()
            self.listener = await asyncio.start_server(lambda _, writer: writer.close(), port=words["port"])
            return words["port"]
        reached = asyncio.open_connection(words["address"], words["port"])
        _, writer = await asyncio.wait_for(reached, words["seconds"])
        writer.close()
        return "reached"

    def _stop_listening(self) -> None:
        if self.listener is not None:
            self.listener.close()
            self.listener = None

    async def watch(self) -> None:
        """Tells that this host lives, and which of its ranks are stopped or gone; ends them if the launcher is silent."""
        while True:
            if self.ranks is not None:
                self.ranks.look_at_gone()
                states = {rank: _state(pid) for rank, pid in self.ranks.pids.items()}
                # The exits once more: a line can be lost to somebody who writes into the same stream.
                self.ranks.say("alive", states=states, exits=self.ranks.exits)
            await asyncio.sleep(SECONDS)
            if time.monotonic() - self.heard > self.silent_seconds:
                return

    async def end(self, number: int, grace_seconds: float) -> None:
        address, ranks = self.address, self.ranks
        if ranks is not None:
            await ranks.end(number, grace_seconds)
            if ranks.tasks:  # the last lines and exits are told before; who still holds a pipe open is not waited for
                await asyncio.wait(ranks.tasks, timeout=1.0)
        _say(self.writer, "ended", start=address)

    async def close(self) -> None:
        """Leaves nothing behind."""
        if self.preparing is not None:
            self.preparing.cancel()
            await asyncio.wait([self.preparing])
        for spare in self.spares.values():
            if spare.returncode is None:
                _signal_group(spare.pid, signal.SIGKILL)
        if self.ranks is not None:
            await self.ranks.end(signal.SIGTERM, self.end_seconds)
            self.ranks.clear()

    def _be_nice(self, nice: int | None) -> None:
        """What this process starts from now on has its priority."""
        if nice is None or self.is_nice:
            return
        self.is_nice = True
        try:
            os.setpriority(os.PRIO_PROCESS, 0, nice)
        except PermissionError:
            asked = ["sudo", "-n", "renice", "-n", str(nice), "-p", str(os.getpid())]
            if shutil.which("sudo") is None or subprocess.run(asked, capture_output=True).returncode:
                told = f"--nice {nice} needs root or sudo without a password; goes on at usual priority"
                _say(self.writer, "warning", text=told)


async def serve() -> None:
    """Obeys the launcher until its words end."""
    loop = asyncio.get_running_loop()
    reader = asyncio.StreamReader(limit=channel.LINE_BYTES)
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    transport, protocol = await loop.connect_write_pipe(asyncio.streams.FlowControlMixin, sys.stdout)
    writer = asyncio.StreamWriter(transport, protocol, None, loop)
    agent = Agent(writer)
    for number in (signal.SIGINT, signal.SIGHUP):  # ssh is gone: so is the input
        loop.add_signal_handler(number, lambda: None)
    loop.add_signal_handler(signal.SIGTERM, reader.feed_eof)
    _say(writer, "hello", host=network.own_name(), identity=network.machine_id(), system=platform.system())

    under_way: set[asyncio.Future[None]] = set()

    def meanwhile(work: Any) -> None:
        task = asyncio.ensure_future(work)
        under_way.add(task)
        task.add_done_callback(under_way.discard)

    async def answer(number: int, question: str, **words: Any) -> None:
        try:
            _say(writer, "answer", number=number, answer=await agent.answer(question, **words))
        except (OSError, TimeoutError, LookupError, TypeError) as error:
            _say(writer, "answer", number=number, error=str(error) or "timed out")

    async def take(kind: str, **words: Any) -> None:
        if kind == "start":
            await agent.start(**words)
        elif kind == "ask":
            meanwhile(answer(**words))
        elif kind == "typed" and agent.ranks is not None:
            meanwhile(agent.ranks.type(words["text"]))
        elif kind == "end":
            meanwhile(agent.end(**words))

    async def obey() -> None:
        texts = channel.ForeignTexts()
        async for line in channel.lines(reader):
            agent.heard = time.monotonic()
            messages, foreign = channel.decoded(line)
            for message in messages:
                try:
                    await take(**message)
                except (LookupError, TypeError) as error:  # it lacks what its kind has, or has more
                    foreign = foreign or f"{message['kind']}: {error}"
            if (text := texts.shown(foreign)) is not None:
                _say(writer, "warning", text=f"its agent did not understand: {text}")

    obeying, watching = asyncio.ensure_future(obey()), asyncio.ensure_future(agent.watch())
    try:
        await asyncio.wait({obeying, watching}, return_when=asyncio.FIRST_COMPLETED)
    finally:
        await agent.close()
        os._exit(0)  # the output may be a connection that nobody reads any more


def _say(writer: asyncio.StreamWriter, kind: str, **fields: Any) -> None:
    writer.write(channel.encoded(kind, **fields))


async def _open(
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
        limit=channel.LINE_BYTES,
    )


async def _exit_of(process: asyncio.subprocess.Process) -> int:
    """A process's status, as soon as it ended: its own wait() may last until its children let go of its pipes, too."""
    while (status := process.returncode) is None:
        await asyncio.sleep(EXIT_SECONDS)
    return status


def _state(pid: int) -> str:
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


def _signal_group(pid: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(os.getpgid(pid), number)
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, number)  # its first process is gone, a child lives


def become_rank(command: list[str]) -> None:
    """Joins this process's output to the agent's socket, and becomes the command."""
    rank = int(os.environ["OMPI_COMM_WORLD_RANK"])
    os.environ[network.HOST] = (Path(agent_folder()) / HOST_FILE).read_text()  # mpirun hands on the first host's
    for descriptor, stream in enumerate(("stdin", "stdout", "stderr")):
        if descriptor == 0 and rank > 0:
            continue
        joined = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        joined.connect(f"{agent_folder()}/agent")
        kind = "input" if descriptor == 0 else "output"
        joined.sendall(json.dumps({"kind": kind, "rank": rank, "stream": stream, "pid": os.getpid()}).encode() + b"\n")
        os.dup2(joined.fileno(), descriptor)
        joined.close()
    try:
        os.execvp(command[0], command)
    except OSError as error:
        print(f"{command[0]}: {error.strerror}", file=sys.stderr)
        sys.exit(127)


if __name__ == "__main__":
    if sys.argv[1:3] == ["rank", "--"]:
        become_rank(sys.argv[3:])
    else:
        asyncio.run(serve())
