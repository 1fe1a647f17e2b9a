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
import json
import os
import platform
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from lib.distributed.heartbeat import ADDRESS, SECONDS, agent_folder
from lib.launch import agent_messages
from lib.launch.host_ranks import Ranks, open_process, process_state, signal_group, write_message
from lib.system import network, os_commands

HOST_FILE = "host"  # in the agent's folder: the name that the launcher fixed for this machine


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
            write_message(self.writer, "warning", text=f"no ranks are started: {told}")
            for process in processes:
                write_message(self.writer, "exit", start=address, rank=process["rank"], status=2 if named_twice else 1)
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
            spare = await open_process(
                [process["command"][0], "-m", "lib.launch.standby"], process["environment"], directory, True
            )
            try:
                assert spare.stdin is not None and spare.stdout is not None
                spare.stdin.write(json.dumps({"command": expected}).encode() + b"\n")
                if await spare.stdout.readline() == b"ready\n":
                    self.spares[place] = spare
            finally:
                if self.spares.get(place) is not spare:
                    signal_group(spare.pid, signal.SIGKILL)

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
                states = {rank: process_state(pid) for rank, pid in self.ranks.pids.items()}
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
        write_message(self.writer, "ended", start=address)

    async def close(self) -> None:
        """Leaves nothing behind."""
        if self.preparing is not None:
            self.preparing.cancel()
            await asyncio.wait([self.preparing])
        for spare in self.spares.values():
            if spare.returncode is None:
                signal_group(spare.pid, signal.SIGKILL)
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
                write_message(self.writer, "warning", text=told)


async def serve() -> None:
    """Obeys the launcher until its words end."""
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

    def meanwhile(work: Any) -> None:
        task = asyncio.ensure_future(work)
        under_way.add(task)
        task.add_done_callback(under_way.discard)

    async def answer(number: int, question: str, **words: Any) -> None:
        try:
            write_message(writer, "answer", number=number, answer=await agent.answer(question, **words))
        except (OSError, TimeoutError, LookupError, TypeError) as error:
            write_message(writer, "answer", number=number, error=str(error) or "timed out")

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
        texts = agent_messages.ForeignTexts()
        async for line in agent_messages.lines(reader):
            agent.heard = time.monotonic()
            messages, foreign = agent_messages.decoded(line)
            for message in messages:
                try:
                    await take(**message)
                except (LookupError, TypeError) as error:  # it lacks what its kind has, or has more
                    foreign = foreign or f"{message['kind']}: {error}"
            if (text := texts.shown(foreign)) is not None:
                write_message(writer, "warning", text=f"its agent did not understand: {text}")

    obeying, watching = asyncio.ensure_future(obey()), asyncio.ensure_future(agent.watch())
    try:
        await asyncio.wait({obeying, watching}, return_when=asyncio.FIRST_COMPLETED)
    finally:
        await agent.close()
        os._exit(0)  # the output may be a connection that nobody reads any more


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


def main() -> int:
    """Obeys the launcher, or with `rank -- COMMAND` becomes a rank of this host."""
    if sys.argv[1:3] == ["rank", "--"]:
        become_rank(sys.argv[3:])
    else:
        asyncio.run(serve())
    return 0
