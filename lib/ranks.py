"""All ranks of a world, started once on their hosts: what is started where, the agents that do it, and what comes back.

On every host an agent (lib/agent.py) starts the ranks and passes on what they say; it is reached over ssh, or directly
on this machine. What the ranks wait for comes in beside their output, and lib/watch.py says what is wrong with it.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import functools
import io
import itertools
import json
import os
import queue
import secrets
import shlex
import signal
import socket
import subprocess
import sys
import threading
import time
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.text import Text

from lib import channel, hostfile, network, reach, topology, watch
from lib.config import UserError
from lib.hostfile import Host
from lib.tail import Copy
from lib.terminal import Voice, folded

ROOT = Path(__file__).resolve().parent.parent
COLOURS = (36, 35, 32)  # that can be read on light and on dark, and are not an error's
TICK_SECONDS = 0.03
PING_SECONDS = 1.0
CONNECT_SECONDS = 10
SETTLE_SECONDS = 0.5  # after a death, for the others to tell why they end
PREPARE_SECONDS = 60.0  # for a process to import and read everything
PREPARE_AFTER_SECONDS = 1.0  # the ranks that are about to train come first


@dataclass(frozen=True)
class Launching:
    """What the command line asks for."""

    hosts: tuple[Host, ...]
    backend: str
    command: tuple[str, ...]
    environment: Mapping[str, str] = field(default_factory=dict)
    directory: str = str(ROOT)
    python: str = sys.executable
    connections_per_ip: int = 1
    starting_port: int = 32323
    mpi_arguments: tuple[str, ...] = ()
    nice: int | None = None
    silent_seconds: float = 10.0
    wedged_seconds: float = 600.0
    typed: tuple[str, ...] = ()  # the launcher's own words, to be printed again

    @property
    def size(self) -> int:
        return sum(host.slots for host in self.hosts)


@dataclass(frozen=True)
class Outcome:
    """How one start of all ranks ended."""

    status: int
    fault: watch.Fault | None = None
    run: str | None = None  # folder to resume from
    interrupted: bool = False
    rejoined: bool = False  # ended at a checkpoint, because a host that was missing is back
    reached: tuple[Host, ...] | None = None  # hosts that take connections from each other, where that was the fault


# ---- What is started where: pure


def processes_of(launching: Launching, folders: Sequence[str]) -> list[tuple[list[dict[str, Any]], dict[str, str]]]:
    """For every host its processes, and the files that they read in that host's folder.

    Contracts: MLX_HOSTFILE and MLX_RANK (ring); MLX_IBV_DEVICES, MLX_JACCL_COORDINATOR and MLX_RANK (jaccl), and
    MLX_JACCL_RING (jaccl-ring); NCCL_HOST_IP, NCCL_PORT, MLX_WORLD_SIZE and MLX_RANK (nccl); Open MPI's own (mpi).
    lib/runtime.py reads them.
    """
    hosts, port = launching.hosts, launching.starting_port
    environment = {"PYTHONUNBUFFERED": "1", **launching.environment}
    command = as_command(launching)
    if launching.backend == "mpi":
        return _mpi(launching, folders[0], environment, command)
    common: dict[str, str] = {}
    files: dict[str, str] = {}
    listed = ""  # the variable that names the file
    if launching.size > 1 and launching.backend == "ring":
        ring: list[list[str]] = []
        for host in hosts:
            for _ in range(host.slots):
                ring.append([])
                for link in host.addresses or (hostfile.address(host, hosts),):
                    for _ in range(launching.connections_per_ip):
                        ring[-1].append(f"{link}:{port}")
                        port += 1
        files, listed = {"hosts.json": json.dumps(ring)}, "MLX_HOSTFILE"
    elif launching.size > 1 and launching.backend in topology.RDMA_BACKENDS:
        files, listed = {"hosts.json": json.dumps(topology.rdma_matrix(hosts))}, "MLX_IBV_DEVICES"
        common = {"MLX_JACCL_COORDINATOR": f"{hostfile.address(hosts[0], hosts)}:{port}"}
        if launching.backend == "jaccl-ring":
            common["MLX_JACCL_RING"] = "1"
    elif launching.size > 1:
        common = {
            "NCCL_HOST_IP": hostfile.address(hosts[0], hosts),
            "NCCL_PORT": str(port),
            "MLX_WORLD_SIZE": str(launching.size),
        }
    found, rank = [], 0
    for host, folder in zip(hosts, folders, strict=True):
        processes = []
        for local_rank in range(host.slots):
            own = {"MLX_RANK": str(rank)} if launching.size > 1 else {}
            if listed:
                own[listed] = f"{folder}/hosts.json"
            if launching.backend == "nccl":
                own["CUDA_VISIBLE_DEVICES"] = str(local_rank)
            # The user's own come last: who sets CUDA_VISIBLE_DEVICES means it.
            variables = {**common, **own, **environment}
            processes.append({"rank": rank, "command": command, "environment": variables})
            rank += 1
        found.append((processes, files))
    return found


def _mpi(
    launching: Launching, folder: str, environment: dict[str, str], command: list[str]
) -> list[tuple[list[dict[str, Any]], dict[str, str]]]:
    """The first host's agent starts mpirun, and mpirun a rank of ours on every slot, joined to its host's agent."""
    words = [
        str(Path(launching.python).parent / "mpirun"),
        "--hostfile",
        f"{folder}/hostfile",
        "-n",
        str(launching.size),
    ]
    # Without "slot", a default policy of :oversubscribe puts all ranks on the first host.
    words += ["--map-by", "slot:oversubscribe", "--bind-to", "none", "--wdir", launching.directory]
    if launching.connections_per_ip > 1:
        words += ["--mca", "btl_tcp_links", str(launching.connections_per_ip)]
    for name in (*environment, "TANDEM_AGENT"):
        words += ["-x", name]
    words += [*launching.mpi_arguments, launching.python, "-m", "lib.agent", "rank", "--"]
    allowed = {f"{prefix}_ALLOW_RUN_AS_ROOT{suffix}": "1" for prefix in ("OMPI", "PRTE") for suffix in ("", "_CONFIRM")}
    files = {"hostfile": hostfile.to_text(launching.hosts)}
    first = {"rank": None, "command": [*words, *command], "environment": {**allowed, **environment}}
    return [([first] if index == 0 else [], files) for index in range(len(launching.hosts))]


def resumed(command: Sequence[str], run: str, same_world: bool) -> tuple[str, ...]:
    """The command that goes on with a run: its own settings are in its folder, what was changed beside them stays."""
    kept = [word for word in command[1:] if "=" in word and not word.startswith(("-", "run."))]
    if not same_world:  # shares were given for other ranks: plan again
        kept = [word for word in kept if not word.startswith(("plan.shares=", "plan.micro_batch_sizes="))]
        kept += ["plan.shares=null", "plan.micro_batch_sizes=null"]
    return (command[0], "--resume", run, *kept)


def as_command(launching: Launching) -> list[str]:
    """The user's command, a Python script or module (-m NAME) after the interpreter."""
    words = list(launching.command)
    return [launching.python, *words] if words[0].endswith(".py") or words[0] == "-m" else words


# ---- A host's agent, at the other end of ssh


class Link:
    """The connection to one host's agent; it lasts over many starts."""

    def __init__(self, host: Host, process: asyncio.subprocess.Process, hello: Mapping[str, Any], is_local: bool):
        self.process, self.is_local = process, is_local
        self.name, self.machine = host.name, str(hello["host"])  # what we call it, and what it calls itself
        self.identity = str(hello["identity"])  # of the machine: two may have one name
        self.system = str(hello["system"])  # Darwin, Linux
        self.closed = False
        self.hear: Callable[[str, dict[str, Any]], None] = lambda kind, words: None
        self.questions: dict[int, asyncio.Future[Any]] = {}
        self.numbers = itertools.count()
        self.tasks = [asyncio.ensure_future(self._read()), asyncio.ensure_future(self._ping())]

    def send(self, kind: str, **fields: Any) -> None:
        if self.process.stdin is not None and not self.process.stdin.is_closing():
            self.process.stdin.write(channel.encoded(kind, **fields))

    async def ask(self, question: str, limit_seconds: float, **fields: Any) -> Any:
        """The agent's answer.

        Raises:
            ConnectionError: there is none, or a refusal.
        """
        number, answer = next(self.numbers), asyncio.get_running_loop().create_future()
        self.questions[number] = answer
        self.send("ask", question=question, number=number, **fields)
        try:
            return await asyncio.wait_for(answer, 0.0 if self.closed else limit_seconds)
        except TimeoutError:
            raise ConnectionError(f"{self.name}: no answer") from None
        finally:
            self.questions.pop(number, None)

    async def close(self) -> None:
        """Ends the agent, which ends whatever it started."""
        if self.process.stdin is not None:
            self.process.stdin.close()
        try:
            await asyncio.wait_for(self.process.wait(), 3)
        except TimeoutError:
            kill(self.process)
            await self.process.wait()
        self.drop()

    def drop(self) -> None:
        """Ends our end of the connection at once, whoever still holds the other one open."""
        kill(self.process)
        for task in self.tasks:
            task.cancel()
        close_pipes(self.process)

    async def _read(self) -> None:
        """Takes in what the agent says, to the end of it; what else comes through is passed on as text, in bounds."""
        assert self.process.stdout is not None
        texts = channel.ForeignTexts()
        try:
            async for line in channel.lines(self.process.stdout):
                messages, foreign = channel.decoded(line)
                for message in messages:
                    if not self._take(dict(message)):
                        foreign = foreign or json.dumps(message)
                if (text := texts.shown(foreign)) is not None:
                    self.hear("foreign", {"text": text})
        finally:
            self.closed = True
            for answer in self.questions.values():
                if not answer.done():
                    answer.set_exception(ConnectionError(f"{self.name}: its agent is gone"))
            self.hear("closed", {})

    def _take(self, message: dict[str, Any]) -> bool:
        """Whether it was a message of an agent's."""
        try:
            kind = message.pop("kind")
            if kind != "answer":
                self.hear(kind, message)
            elif (answer := self.questions.get(message["number"])) is not None and not answer.done():
                if "error" in message:
                    answer.set_exception(ConnectionError(f"{self.name}: {message['error']}"))
                else:
                    answer.set_result(message["answer"])
        except (LookupError, TypeError, ValueError, AttributeError, zlib.error):  # it lacks what its kind has
            return False
        return True

    async def _ping(self) -> None:
        """An agent that hears nothing for too long ends its ranks."""
        while not self.closed:
            self.send("ping")
            await asyncio.sleep(PING_SECONDS)


def agent_words(launching: Launching, host: Host) -> list[str]:
    """The command line that starts a host's agent: directly on this machine, else over ssh."""
    if is_local(launching, host):
        return [launching.python, "-m", "lib.agent"]
    return remote_words(launching, host, "lib.agent")


def is_local(launching: Launching, host: Host) -> bool:
    """Whether a host is this machine, and works in this very folder."""
    return is_this_machine(host) and launching.directory == str(ROOT)


def run_here(launching: Launching, run: str) -> Path:
    """Where this machine keeps a run that the hosts have at `run`: at the same place in the project, or the same path."""
    folder = Path(run)
    inside = folder.is_relative_to(launching.directory)
    return ROOT / folder.relative_to(launching.directory) if inside else folder


def remote_words(launching: Launching, host: Host, module: str) -> list[str]:
    """The command line that runs a module of ours on a host, over ssh."""
    start = shlex.join([launching.python, "-m", module])
    return [*ssh_words(host), f"cd {shlex.quote(launching.directory)} && exec {start}"]


def ssh_words(host: Host) -> list[str]:
    """ssh that never asks, notices a dead host, and takes nothing in the name for an option."""
    options = ["BatchMode=yes", f"ConnectTimeout={CONNECT_SECONDS}", "ServerAliveInterval=5", "ServerAliveCountMax=3"]
    return ["ssh", "-T", *(word for option in options for word in ("-o", option)), "--", host.name]


def rsync_making(folder: str) -> str:
    """rsync's option that makes a folder at the other end first. macOS's rsync has no --mkpath."""
    return f"--rsync-path=mkdir -p {shlex.quote(folder)} && rsync"


def is_this_machine(host: Host) -> bool:
    """Whether a host's name means the machine that this runs on, and no other user there."""
    if "@" in host.name:
        return False
    if host.name in ("localhost", socket.gethostname(), network.own_name()):
        return True
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.bind((hostfile.address(host), 0))  # only an own address can be bound
    except (OSError, UserError):
        return False
    return True


async def connect(launching: Launching, host: Host) -> Link:
    """Starts a host's agent.

    Raises:
        ConnectionError: it did not answer; what ssh said, in one line.
    """
    # On a thread: the name of a host that is away may take seconds to look up, in which the others are not pinged.
    words, is_here = await asyncio.to_thread(lambda: (agent_words(launching, host), is_local(launching, host)))
    process = await asyncio.create_subprocess_exec(
        *words,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        cwd=ROOT,
        start_new_session=True,  # a Ctrl-C is ours to hand on
        limit=channel.LINE_BYTES,
    )
    assert process.stdout is not None and process.stderr is not None
    hello = None
    try:
        with contextlib.suppress(asyncio.TimeoutError):
            hello = await asyncio.wait_for(first_words(process.stdout, "host"), CONNECT_SECONDS + 2)
    finally:
        told = await last_words(process) if hello is None else ""
    if hello is None:
        raise ConnectionError(f"{host.name}: {told}")
    return Link(host, process, hello, is_here)


async def first_words(stream: asyncio.StreamReader, key: str) -> dict[str, Any] | None:
    """The first JSON object with a `key` that a host says, None if it says none; what its login shell prints is passed over."""
    async for line in channel.lines(stream):
        _, brace, rest = line.partition(b"{")
        with contextlib.suppress(ValueError, RecursionError):
            words: dict[str, Any] = json.loads(brace + rest)
            if key in words:
                return words
    return None


# ---- One start of all ranks


class Console:
    """Writes whole lines, each with its rank and host before it, from a thread: a terminal that stands still stops nobody."""

    def __init__(self, stopped: Any):
        self.lines: queue.SimpleQueue[tuple[Any, str] | None] = queue.SimpleQueue()
        self.colour = Voice().is_live and not os.environ.get("NO_COLOR")
        self.width = Voice(stderr=True).width
        for output in (sys.stdout, sys.stderr):  # a letter that this terminal does not have ends no training
            if isinstance(output, io.TextIOWrapper):
                output.reconfigure(errors="replace")
        self.thread = threading.Thread(target=self._write, args=(stopped,), daemon=True)
        self.thread.start()

    def output(self, rank: int | None, host: str, stream: str, text: str) -> None:
        tag = f"[{'mpirun' if rank is None else rank} {host}]"
        if self.colour:
            tag = f"\033[{COLOURS[(rank or 0) % len(COLOURS)]}m{tag}\033[0m"
        self.lines.put((sys.stderr if stream == "stderr" else sys.stdout, f"{tag} {text}\n"))

    def note(self, text: str) -> None:
        wrapped = folded(Text(text), Text("launch: "), self.width)
        self.lines.put((sys.stderr, "".join(f"{line.plain}\n" for line in wrapped)))

    def close(self) -> None:
        self.lines.put(None)
        self.thread.join(2)

    def _write(self, stopped: Any) -> None:
        while (line := self.lines.get()) is not None:
            try:
                line[0].write(line[1])
                line[0].flush()
            except (OSError, ValueError):  # `| head` has seen enough
                stopped()
                return


class Quiet(Console):
    """Keeps the lines instead: for a check, whose output is nobody's business until it fails."""

    def __init__(self, lines: list[str]):
        self.kept = lines

    def output(self, rank: int | None, host: str, stream: str, text: str) -> None:
        self.kept.append(text)

    def note(self, text: str) -> None:
        pass


class Attempt:
    """All ranks, started once."""

    def __init__(
        self,
        launching: Launching,
        console: Console,
        here: Host | None = None,
        links: dict[str, Link] | None = None,
        spares: bool | None = False,
    ):
        """Says what is to be started, and how.

        Args:
            here: the only host whose ranks are started, where people start the others.
            links: agents that are there from an earlier attempt, by host; those that answer are there for the next one.
                By default all are ended with this one.
            spares: whether the hosts get processes ready for another attempt; None: where one of them is a Mac.
        """
        self.launching, self.console = launching, console
        self.hosts_to_start = [here] if here else list(launching.hosts)
        self.links: dict[str, Link] = {} if links is None else links
        self.keeps_links, self.spares = links is not None, spares
        self.address = ""
        self.hosts: dict[str, watch.HostSeen] = {}
        self.ranks: dict[int, watch.RankSeen] = {}
        self.ended: dict[str, asyncio.Event] = {}
        self.systems: dict[str, str] = {}  # by host, once all of them have answered: Darwin, Linux
        self.first: int = -1 if launching.backend == "mpi" else 0
        self.run: str | None = None
        self.checkpoint: int | None = None
        self.back = asyncio.Event()  # a host that was missing could take part again
        self.named: set[int] = set()
        self.typed = threading.Event()
        self.takes_input = False
        self.copies: dict[str, Copy | None] = {}  # of other hosts' logs; None where they cannot be written
        self.asked: list[asyncio.Future[Any]] = []
        self.look: asyncio.Future[tuple[Host, ...] | None] | None = None  # at who reaches whom
        self.reached: tuple[Host, ...] | None = None

    async def go(self, interrupts: asyncio.Queue[int]) -> Outcome:
        """Starts, watches, and ends all ranks."""
        new = [host for host in self.hosts_to_start if host.name not in self.links]
        reaching = asyncio.gather(*(connect(self.launching, host) for host in new), return_exceptions=True)
        interrupt = asyncio.ensure_future(interrupts.get())
        early: set[asyncio.Future[Any]] = {reaching, interrupt}
        await asyncio.wait(early, return_when=asyncio.FIRST_COMPLETED)
        if interrupt.done():
            reaching.cancel()
            await asyncio.gather(reaching, return_exceptions=True)
            return Outcome(128 + interrupt.result(), interrupted=True)
        interrupt.cancel()
        reached = reaching.result()
        self.links.update({link.name: link for link in reached if isinstance(link, Link)})
        failed = [str(error) for error in reached if isinstance(error, BaseException)]
        try:
            if failed:
                fault = watch.Fault("lost", "; ".join(failed), tuple({host.name for host in new} - self.links.keys()))
                self._tell(fault)
                return Outcome(1, fault)
            self.systems = {link.name: link.system for link in self._own_links()}
            if (refused := topology.refusal(self.launching.backend, self.systems)) is not None:
                fault = watch.Fault("refused", refused, tuple(self.systems))
                self._tell(fault)
                return Outcome(2, fault)
            if self.spares is None:
                self.spares = "Darwin" in self.systems.values()
            self._start()
            return await self._watch(interrupts)
        finally:
            for asked in self.asked:
                asked.cancel()
            if not self.keeps_links:
                await asyncio.gather(*(link.close() for link in self.links.values()))

    def _start(self) -> None:
        # Not in TMPDIR, which may differ: mpirun's ranks look for their host's agent where the first host has its own.
        self.address = f"/tmp/tandem-{secrets.token_hex(8)}"
        folders = {link.name: f"{self.address}-{link.machine}" for link in self.links.values()}
        hosts = self.launching.hosts
        work = processes_of(self.launching, [folders.get(host.name, "") for host in hosts])
        of_host = dict(zip((host.name for host in hosts), work, strict=True))
        links = self._own_links()
        names = network.distinct_names([(link.machine, link.identity) for link in links])
        now = time.monotonic()
        for link, name in zip(links, names, strict=True):
            processes, files = of_host[link.name]
            self.hosts[link.name] = watch.HostSeen(link.name, now, closed=link.closed)
            self.ended[link.name] = asyncio.Event()
            for process in processes:
                rank = self.first if process["rank"] is None else process["rank"]
                self.ranks[rank] = watch.RankSeen(rank, link.name)
            link.hear = functools.partial(self._hear, link.name)
            link.send(
                "start",
                address=self.address,
                processes=processes,
                files=files,
                directory=self.launching.directory,
                silent_seconds=max(5.0, self.launching.silent_seconds),
                nice=self.launching.nice,
                awake=True,
                sends_logs=not link.is_local,
                host=name,
                end_seconds=topology.end_seconds(self.launching.backend, is_fault=True),
            )
        self.takes_input = True

    def _own_links(self) -> list[Link]:
        return [self.links[host.name] for host in self.hosts_to_start if host.name in self.links]

    def type(self, text: str | None) -> None:
        """Hands input on to rank 0."""
        if (link := self.links.get(self.launching.hosts[0].name)) is not None:
            link.send("typed", text=text)

    async def _watch(self, interrupts: asyncio.Queue[int]) -> Outcome:
        limits = self._limits
        checkpoint = None
        while any(rank.status is None for rank in self._started()):
            now = time.monotonic()
            fault = watch.diagnose(now, self.hosts, list(self.ranks.values()), *limits)
            if fault is not None:
                return await self._fail(fault, interrupts)
            for rank in watch.stragglers(now, list(self.ranks.values()), max(5.0, self.launching.silent_seconds)):
                if rank.rank not in self.named:
                    self.named.add(rank.rank)
                    self.console.note(f"rank {rank.rank} on {rank.host} lets the others wait")
            if self.run is not None and self.spares and not self.asked:
                self.asked = [
                    asyncio.ensure_future(self._prepare(self.links[host.name], host, self.run))
                    for host in self.launching.hosts
                ]
            if (suspected := self._look_between(now)) is not None:
                return await self._fail(suspected, interrupts)
            if not self.back.is_set() or not all(asked.done() for asked in self.asked):
                checkpoint = self.checkpoint
            elif self.checkpoint != checkpoint:
                self.console.note(f"a host is back: all go on together from the checkpoint of step {self.checkpoint}")
                interrupted = await self._end(signal.SIGTERM, interrupts)
                return Outcome(130 if interrupted else 0, None, self.run, interrupted, rejoined=True)
            try:
                number = await asyncio.wait_for(interrupts.get(), TICK_SECONDS)
            except TimeoutError:
                continue
            self.console.note("ending every rank (once more: at once)")
            await self._end(signal.SIGINT, interrupts)
            return Outcome(128 + number, None, self.run, interrupted=True)
        fault = watch.diagnose(time.monotonic(), self.hosts, list(self.ranks.values()), *limits)
        await self._end(signal.SIGTERM, interrupts)  # nothing is left but last lines under way
        if fault is not None:
            self._tell(fault)
        return Outcome(self._worst(), fault, self.run)

    @property
    def _limits(self) -> tuple[float, float]:
        return self.launching.silent_seconds, self.launching.wedged_seconds

    def _look_between(self, now: float) -> watch.Fault | None:
        """Where all ranks wait, whether their hosts still reach each other: none has to wait for the limit to know."""
        waited, limit = watch.common_wait_seconds(now, list(self.ranks.values())), self.launching.silent_seconds
        if len(self.hosts_to_start) < 2 or self.launching.backend != "ring" or self.run is None or waited <= limit / 2:
            self.look = None
        elif self.look is None:
            hosts = self.launching.hosts
            looking = reach.reach_each_other(self.launching, self.links, hosts, max(reach.PROBE_SECONDS, limit / 2))
            self.look = asyncio.ensure_future(looking)
        elif self.look.done() and (reached := self.look.result()) is not None and len(reached) < len(self.hosts):
            self.reached = reached
            cut_off = [name for name in self.hosts if name not in {host.name for host in reached}]
            return watch.cut_between(list(self.hosts), cut_off, waited)
        return None

    async def _prepare(self, link: Link, host: Host, run: str) -> None:
        await asyncio.sleep(PREPARE_AFTER_SECONDS)
        await prepared(self.launching, link, host, run)

    async def _fail(self, fault: watch.Fault, interrupts: asyncio.Queue[int]) -> Outcome:
        by_itself = any(rank.status is not None and 0 < rank.status < 128 for rank in self._started())
        if fault.kind == "died" and by_itself:  # the others may be about to tell more, and to end by themselves
            deadline = time.monotonic() + SETTLE_SECONDS
            while time.monotonic() < deadline and any(rank.status is None for rank in self._started()):
                await asyncio.sleep(0.02)
        elif fault.kind == "died" and self.first == -1 and len(self.hosts) > 1:  # of other hosts only their agents know
            await asyncio.sleep(SETTLE_SECONDS)
        if fault.kind == "died" and any(rank.memory for rank in self.ranks.values()):
            fault = watch.diagnose(time.monotonic(), self.hosts, list(self.ranks.values()), *self._limits) or fault
        status = self._worst() or 1
        self._tell(fault)
        if fault.kind in ("lost", "silent"):  # its agent ends its ranks by itself
            for name in fault.hosts:
                self._give_up(name)
        # A stopped process hears no other signal until it is continued, which an agent does after any other.
        is_stopped = fault.kind == "stopped" and self.launching.backend not in topology.RDMA_BACKENDS
        number = signal.SIGKILL if is_stopped else signal.SIGTERM
        interrupted = await self._end(number, interrupts, is_fault=True)
        return Outcome(status, fault, self.run, interrupted, reached=self.reached)

    def _give_up(self, name: str) -> None:
        self.hosts[name].closed = True
        self.links[name].drop()
        if self.keeps_links:
            del self.links[name]

    def _tell(self, fault: watch.Fault) -> None:
        self.console.note(f"{fault.kind}: {fault.message}")

    async def _end(self, number: signal.Signals, interrupts: asyncio.Queue[int], is_fault: bool = False) -> bool:
        """Ends every rank on every host; an interrupt kills at once. Returns whether there was one."""
        links = self._own_links()
        grace_seconds = topology.end_seconds(self.launching.backend, is_fault)
        for link in links:
            link.send("end", number=int(number), grace_seconds=grace_seconds)
        alive = [self.ended[link.name] for link in links if not self.hosts[link.name].closed]
        ended = asyncio.ensure_future(_all_set(alive))
        again = asyncio.ensure_future(interrupts.get())
        limit = grace_seconds + 1.0
        waits: set[asyncio.Future[Any]] = {ended, again}
        await asyncio.wait(waits, timeout=limit, return_when=asyncio.FIRST_COMPLETED)
        interrupted = again.done()
        if interrupted:
            for link in links:
                link.send("end", number=int(signal.SIGKILL), grace_seconds=0.0)
            await asyncio.wait({ended}, timeout=1.0)
        again.cancel()
        ended.cancel()
        for link in self._own_links() if self.keeps_links else []:
            if link.closed or not self.ended[link.name].is_set():  # who does not answer is connected anew, if at all
                self._give_up(link.name)
        return interrupted

    def _started(self) -> list[watch.RankSeen]:
        """The processes whose end ends the attempt: the ranks, or mpirun."""
        return [self.ranks[-1]] if self.first == -1 else list(self.ranks.values())

    def _worst(self) -> int:
        return max((watch.exit_status(rank.status or 0) for rank in self._started()), default=1)

    def _hear(self, host: str, kind: str, words: dict[str, Any]) -> None:
        """Takes in what a host's agent says."""
        if kind == "foreign":  # no sign that the agent lives
            self.console.note(f"{host} says: {words['text']}")
            return
        self.hosts[host].heard = time.monotonic()
        if kind == "output":
            self.console.output(words["rank"], host, words["stream"], words["text"])
            if words["rank"] is not None and (cause := watch.cause_of(words["text"])) is not None:
                self.ranks.setdefault(words["rank"], watch.RankSeen(words["rank"], host)).cause = cause
        elif kind == "warning":
            self.console.note(f"{host}: {words['text']}")
        elif kind == "closed":
            self.hosts[host].closed = True
            self.ended[host].set()
        elif words.pop("start", None) != self.address:
            return  # of an earlier start
        elif kind == "memory":
            self.ranks.setdefault(words["rank"], watch.RankSeen(words["rank"], host)).memory = words["text"]
        elif kind == "exit":
            self._note_exit(**words)
        elif kind == "alive":
            self._note_states(host, words["states"])
            for rank, status in words["exits"]:
                self._note_exit(rank, status)
        elif kind == "beat":
            self._note_beat(host, words)
        elif kind == "log":
            self._copy_log(host, **words)
        elif kind == "typed":
            self.typed.set()
        elif kind == "ended":
            self.ended[host].set()

    def _copy_log(self, host: str, rank: int, run: str, offset: int, packed: str) -> None:
        """Puts what a rank of another host records where the dashboard of this machine looks for it."""
        if host not in self.copies:
            self.copies[host] = Copy(run_here(self.launching, run) / "logs", self.links[host].machine)
        copy = self.copies[host]
        if copy is not None:
            try:
                copy.write(rank, offset, zlib.decompress(base64.b64decode(packed)))
            except OSError as error:
                self.console.note(f"the logs of {host} are not copied to {copy.logs}: {error.strerror}")
                self.copies[host] = None

    def _note_exit(self, rank: int | None, status: int) -> None:
        self.ranks[self.first if rank is None else rank].status = status

    def _note_states(self, host: str, states: dict[str, str]) -> None:
        for rank, state in states.items():
            seen = self.ranks.setdefault(int(rank), watch.RankSeen(int(rank), host))
            if state != "stopped":
                seen.stopped_since = None
                if state == "gone" and self.first == -1:
                    seen.status = 0  # how it ended is mpirun's to tell
            elif seen.stopped_since is None:
                seen.stopped_since = time.monotonic()

    def _note_beat(self, host: str, facts: dict[str, Any]) -> None:
        seen = self.ranks.setdefault(facts["rank"], watch.RankSeen(facts["rank"], host))
        seen.beats, seen.waiting = True, facts["waiting"]
        now = time.monotonic()
        seen.waiting_since, seen.passing_since = now - facts["seconds"], now - facts["passing_seconds"]
        seen.passing, seen.passes = facts["passing"], facts["passes"]
        if facts["rank"] == 0:
            self.run, self.checkpoint = facts.get("run"), facts.get("checkpoint")


def kill(process: asyncio.subprocess.Process) -> None:
    """Ends a process that leads a session of its own, and what it started, which would hold its pipes (ssh's ProxyCommand).

    asyncio's own kill() may reap a process that has just ended, and then wonder where it is.
    """
    if process.returncode is None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)


def close_pipes(process: asyncio.subprocess.Process) -> None:
    """Closes a process's pipes, which else outlast the event loop where a child of it has them: the loop complains."""
    process._transport.close()  # type: ignore[attr-defined]


async def last_words(process: asyncio.subprocess.Process) -> str:
    """Ends a process; returns the last line that it wrote to its standard error."""
    assert process.stderr is not None
    kill(process)
    lines: list[str] = []
    with contextlib.suppress(asyncio.TimeoutError):  # somebody whom it started, in a session of his own, has its pipes
        read = await asyncio.wait_for(process.stderr.read(), topology.END_SECONDS)
        lines = read.decode(errors="replace").strip().splitlines()
        await asyncio.wait_for(process.wait(), topology.END_SECONDS)
    close_pipes(process)
    return lines[-1] if lines else "no answer"


async def prepared(launching: Launching, link: Link, host: Host, run: str) -> None:
    """Has a host keep a process ready for each of its ranks, to go on with a run. Those that mpirun starts cannot be kept."""
    command = as_command(launching)
    if launching.backend == "mpi" or len(command) < 2 or not command[1].endswith(".py"):
        return
    processes = []
    for place in range(host.slots):
        devices = {"CUDA_VISIBLE_DEVICES": str(place)} if launching.backend == "nccl" else {}
        environment = {**devices, "PYTHONUNBUFFERED": "1", **launching.environment}
        processes.append({"command": command, "environment": environment})
    with contextlib.suppress(ConnectionError):
        expected = resumed(launching.command, run, same_world=True)
        words = {"processes": processes, "directory": launching.directory, "expected": expected, "nice": launching.nice}
        await link.ask("prepare", PREPARE_SECONDS, **words)


async def _all_set(events: Sequence[asyncio.Event]) -> None:
    for event in events:
        await event.wait()
