"""The agent of one host: starts its ranks, reports their output and their state to the launcher, and ends them.

    python -m lib.agent                          the launcher starts this on every host, over ssh
    python -m lib.agent rank -- COMMAND ...      what mpirun starts for each rank: joins its output to this host's agent

The launcher's messages (lib/launch/agent_messages.py) come in on the standard input, and the answers leave on
the standard output; no word of a command ever passes a shell. When the input ends, or the launcher is silent for too
long, every rank of this host is ended: a launcher that is killed, or a cable that is cut, leaves no process behind.

Only the standard library is imported: an agent is there in a tenth of a second.
"""

from __future__ import annotations

import asyncio
import errno
import json
import os
import platform
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

from lib.distributed.heartbeat import ADDRESS, FOLDER, SECONDS, agent_folder
from lib.launch import agent_messages
from lib.launch.agent_messages import PING_SECONDS, RankProcess, Start
from lib.launch.host_ranks import LAST_WORDS_SECONDS, Ranks, open_process, write_message
from lib.launch.patience import Load, Punctuality, silence_limit
from lib.launch.standby_process import READY, Standby
from lib.system import handshake, network, os_commands

LOOK_SECONDS = 0.1  # between looks at the ranks; on a Mac, where each is a program that is run, SECONDS
PROBES = 8  # one after the other, of so many addresses of a host, by those that ask it at all
PROBE = "whether hosts reach each other"
HOST_FILE = "host"  # in the agent's folder: the name that the launcher fixed for this machine


class Agent:
    """What the launcher can ask of this host: to start its ranks and to end them, as often as it likes."""

    def __init__(self, writer: asyncio.StreamWriter):
        self.writer = writer
        self.address = ""  # of the newest start
        self.ranks: Ranks | None = None
        self.standbys: dict[int, Standby] = {}  # by index among this host's ranks
        self.preparing: asyncio.Future[None] | None = None
        self.listener: handshake.StreamListener | None = None
        self.closing: asyncio.Future[None] | None = None
        self.changing_listener = asyncio.Lock()  # over a slow link questions come in heaps
        self.launcher = Punctuality(PING_SECONDS, time.monotonic())
        self.load = Load()
        self.silent_seconds = 60.0
        self.end_seconds = 1.0
        self.has_priority = False

    async def start(self, request: Start) -> None:
        """Starts this host's processes; the `files` that they read are in a folder of their own."""
        await self._change_listener()
        self._set_priority(request.nice)
        if self.ranks is not None:
            self.ranks.clear()
        elif request.awake and os_commands.is_mac():  # a Mac that sleeps is a rank that is lost
            subprocess.Popen(["caffeinate", "-is", "-w", str(os.getpid())])
        address = request.address
        self.address, self.ranks = address, None
        self.silent_seconds, self.end_seconds = request.silent_seconds, max(self.end_seconds, request.end_seconds)
        # Open MPI names its folder by a process id alone, and does not start where a killed mpirun left one.
        os.environ.pop(FOLDER, None)  # of a launch from which this one was started
        os.environ.update({ADDRESS: address, network.HOST: request.host, "PRTE_MCA_prte_tmpdir_base": address})
        try:
            self.ranks = Ranks(self.writer, address, request.sends_logs, request.host)
            await self.ranks.listen({**request.files, HOST_FILE: request.host})
        except OSError as error:
            named_twice = isinstance(error, FileExistsError)  # its folder has this machine's name
            why = "the host file names this machine twice" if named_twice else str(error)
            write_message(self.writer, "warning", text=f"no ranks are started: {why}")
            status = 2 if named_twice else 1
            for process in request.processes:
                write_message(self.writer, "exit", start=address, rank=process["rank"], status=status)
            return
        if self.preparing is not None:  # no more of them now: those that are half ready are taken as they are
            self.preparing.cancel()
            await asyncio.wait([self.preparing])
        for index, process in enumerate(request.processes):
            standby = self.standbys.pop(index, None)
            taken = await standby.taken() if standby is not None else None
            unsaid = READY if standby is not None and not standby.is_ready else b""
            await self.ranks.start(process, request.directory, taken, unsaid)

    async def prepare(
        self, processes: list[RankProcess], directory: str, expected: list[str], nice: int | None
    ) -> None:
        """Has a standby for each process that may be started later: it has imported and read what `expected` needs."""
        self._set_priority(nice)
        for index, process in enumerate(processes):
            if index in self.standbys and self.standbys[index].lives:
                continue
            command = [process["command"][0], "-m", "lib.launch.standby"]
            opened = await open_process(command, process["environment"], directory, True)
            self.standbys[index] = standby = Standby(opened, expected, len(processes))
            await asyncio.wait([standby.getting_ready])

    async def answer(self, question: str, **fields: Any) -> int | str:
        """Answers a question of the launcher's: who is ready, who lives here, or whether a connection can be made."""
        if question == "prepare":
            if self.preparing is None or self.preparing.done():
                self.preparing = asyncio.ensure_future(self.prepare(**fields))
            await asyncio.wait([self.preparing])
            return sum(standby.is_ready for standby in self.standbys.values())
        if question == "listen":  # at a port of the run's, which a firewall may refuse
            port, token, seconds = int(fields["port"]), bytes.fromhex(fields["token"]), float(fields["seconds"])
            listener = handshake.StreamListener(token, PROBE, _nothing_more)
            await self._change_listener(listener, port)
            self.closing = asyncio.ensure_future(self._close_later(listener, PROBES * (seconds + 1.0)))
            return port
        if question == "lives":  # the agent of an earlier start; one that was killed leaves its folder
            is_own = self.ranks is not None and self.ranks.folder == Path(fields["folder"])
            return not is_own and _listens(fields["folder"])
        async with asyncio.timeout(fields["seconds"]):
            reader, writer = await asyncio.open_connection(fields["address"], fields["port"])
            steps = handshake.calling(bytes.fromhex(fields["token"]), PROBE)
            await handshake.over_streams(steps, reader, writer)
        writer.close()
        return "reached"

    async def _change_listener(self, instead: handshake.StreamListener | None = None, port: int = 0) -> None:
        """Gives the port back, one that is about to be taken as well: a rank may want it next."""
        async with self.changing_listener:
            if self.listener is not None:
                listener, self.listener = self.listener, None
                await listener.close()
            if instead is not None:
                await instead.start(port)
                self.listener = instead

    async def _close_later(self, listener: handshake.StreamListener, seconds: float) -> None:
        """Gives the port back where nobody asks for it: a launcher may end in the middle of its questions."""
        await asyncio.sleep(seconds)
        if self.listener is listener:
            await self._change_listener()

    async def watch(self) -> None:
        """Reports that this host lives, and which ranks are stopped or gone; returns when the launcher is silent."""
        pause_seconds = SECONDS if os_commands.is_mac() else LOOK_SECONDS
        while True:
            if self.ranks is not None:
                self.ranks.hang_up_on_strangers()
                states = self.ranks.states()
                # The exits once more: a line can be lost to somebody who writes into the same stream.
                self.ranks.report("alive", states=states, exits=self.ranks.exits, load=round(self.load.look(), 2))
            before = time.monotonic()
            await asyncio.sleep(pause_seconds)
            now = time.monotonic()
            self.launcher.excuse(max(0.0, now - before - pause_seconds - SECONDS))  # this process was not there
            limit = silence_limit(self.silent_seconds, self.launcher.usual_lateness(now))
            if now - self.launcher.last > limit:
                return

    async def end(self, number: int, grace_seconds: float) -> None:
        """Ends the ranks, and says so."""
        address, ranks = self.address, self.ranks
        if ranks is not None:
            await ranks.end(number, grace_seconds)
            if ranks.tasks:  # last lines and exits are sent before; who still holds a pipe open is not waited for
                await asyncio.wait(ranks.tasks, timeout=LAST_WORDS_SECONDS)
        write_message(self.writer, "ended", start=address)

    async def close(self) -> None:
        """Ends everything that was started here, and removes its files."""
        if self.preparing is not None:
            self.preparing.cancel()
            await asyncio.wait([self.preparing])
        for standby in self.standbys.values():
            standby.end()
        if self.ranks is not None:
            await self.ranks.end(signal.SIGTERM, self.end_seconds)
            self.ranks.clear()

    def _set_priority(self, nice: int | None) -> None:
        """Sets the priority of this process, which all that it starts has as well."""
        if nice is None or self.has_priority:
            return
        self.has_priority = True
        try:
            os.setpriority(os.PRIO_PROCESS, 0, nice)
        except PermissionError:
            command = ["sudo", "-n", "renice", "-n", str(nice), "-p", str(os.getpid())]
            if shutil.which("sudo") is None or subprocess.run(command, capture_output=True).returncode:
                text = f"--nice {nice} needs root or sudo without a password; goes on at usual priority"
                write_message(self.writer, "warning", text=text)


def _listens(folder: str) -> bool:
    """Whether the agent that has this folder lives, be it stopped."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as call:
        call.setblocking(False)
        return call.connect_ex(f"{folder}/agent") in (0, errno.EAGAIN)


async def _nothing_more(channel: handshake.StreamChannel) -> None:
    """Another host's agent reaches this one: that is all it wanted to know."""


async def serve() -> None:
    """Does what the launcher asks for until its messages end."""
    loop = asyncio.get_running_loop()
    reader = asyncio.StreamReader(limit=agent_messages.LINE_BYTES)
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    transport, protocol = await loop.connect_write_pipe(asyncio.streams.FlowControlMixin, sys.stdout)
    writer = asyncio.StreamWriter(transport, protocol, None, loop)
    agent = Agent(writer)
    for number in (signal.SIGINT, signal.SIGHUP):  # ssh is gone: so is the input
        loop.add_signal_handler(number, lambda: None)
    loop.add_signal_handler(signal.SIGTERM, reader.feed_eof)
    write_message(writer, "hello", host=network.own_name(), identity=network.machine_id(), system=platform.system())

    under_way: set[asyncio.Future[None]] = set()

    def in_background(work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.ensure_future(work)
        under_way.add(task)
        task.add_done_callback(under_way.discard)

    async def answer(number: int, question: str, **fields: Any) -> None:
        try:
            write_message(writer, "answer", number=number, answer=await agent.answer(question, **fields))
        except (OSError, TimeoutError, LookupError, TypeError) as error:
            write_message(writer, "answer", number=number, error=str(error) or "timed out")

    async def take(kind: str, **fields: Any) -> None:
        if kind == "start":
            await agent.start(Start(**fields))
        elif kind == "ask":
            in_background(answer(**fields))
        elif kind == "typed" and agent.ranks is not None:
            in_background(agent.ranks.type(fields["text"]))
        elif kind == "end":
            in_background(agent.end(**fields))

    async def take_all() -> None:
        texts = agent_messages.ForeignTexts()
        async for line in agent_messages.lines(reader):
            agent.launcher.note(time.monotonic())
            messages, foreign = agent_messages.decoded(line)
            for message in messages:
                try:
                    await take(**message)
                except (LookupError, TypeError) as error:  # it lacks what its kind has, or has more
                    foreign = foreign or f"{message['kind']}: {error}"
            if (text := texts.shown(foreign)) is not None:
                write_message(writer, "warning", text=f"its agent did not understand: {text}")

    taking, watching = asyncio.ensure_future(take_all()), asyncio.ensure_future(agent.watch())
    try:
        await asyncio.wait({taking, watching}, return_when=asyncio.FIRST_COMPLETED)
    finally:
        await agent.close()
        os._exit(0)  # the output may be a connection that nobody reads any more


def become_rank(command: list[str]) -> None:
    """Joins this process's output to the agent's socket, and becomes the command."""
    rank = int(os.environ["OMPI_COMM_WORLD_RANK"])
    own_host = Path(agent_folder()) / HOST_FILE
    os.environ[network.HOST] = own_host.read_text(encoding="utf-8")  # mpirun hands on the first host's
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


def main() -> int:
    """Serves the launcher, or with `rank -- COMMAND` becomes a rank of this host."""
    if sys.argv[1:3] == ["rank", "--"]:
        become_rank(sys.argv[3:])
    else:
        asyncio.run(serve())
    return 0
