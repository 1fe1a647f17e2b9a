"""What can go wrong with a run on hosts of tests/cluster.py, as benchmarks/chaos.py makes it happen: one function a kind.

Where something can be done from outside it is: signals, cables, firewalls, disks, memory limits of the kernel. What has to
happen at a moment that only a rank knows (inside a merge, an evaluation, a step) is done by code that every Python of the
run imports at its start, `sitecustomize`, on a word in a file of its host.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import random
import re
import signal
import struct
import subprocess
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.cluster import Host
from tests.tiny import ROOT

SYNCHRONOUS = ("synchronous", "sharded", "pipelined")
STRATEGIES = (*SYNCHRONOUS, "independent")
SILENT_SECONDS = 1.0  # of the launch: the least that there is
AWAY_SECONDS = 4.0  # that a host stays away, and a disk or a link is slow, once that was noticed or is in force
DISK_BYTES = 256 * 2**20  # of each host's runs
SLOW_DISK = 200_000  # bytes a second
ORDER_SECONDS = 120.0  # for an evaluation or a merge to come
WEAK_LINK = 1e6  # bits a second
MEMORY = Path("/sys/fs/cgroup/memory")
RESTARTS = r"launch: (died|diverged|silent|lost|stopped|late|wedged|hung): "
BACK = r"|launch: a host is back"
STAYS_NAN = r"launch: not started again: the updates are not finite"

# Every Python of the run imports this. A word in the file "order" of the host is what is to happen, at the next moment for
# it: "merge" and "evaluation" end the process in the middle of one, "nan" makes the gradients of a step NaN, once (the word
# is taken away), "nan-stays" as long as the word is there. At SIGUSR1 the process takes memory without an end.
CUSTOMIZE = """
import importlib.abc, importlib.machinery, os, signal, sys

ORDER = os.environ.get("CHAOS_ORDER", "")

def ordered(word, once=True):
    try:
        with open(ORDER) as file:
            there = file.read() == word
    except OSError:
        return False
    if there and once:
        os.unlink(ORDER)
    return there

def ends(inside, word):
    def call(*arguments, **named):
        result = inside(*arguments, **named)
        if ordered(word):
            os.kill(os.getpid(), signal.SIGKILL)
        return result
    return call

def poisons(sums):
    def call(world, gradients, *rest, **named):
        if ordered("nan") or ordered("nan-stays", once=False):
            from mlx.utils import tree_map
            gradients = tree_map(lambda g: g * float("nan"), gradients)
        return sums(world, gradients, *rest, **named)
    return call

CHANGED = {
    "lib.distributed.compression": [("sum_gradients", poisons)],
    "lib.training.local_sgd": [("example_weights", lambda inside: ends(inside, "merge"))],
    "lib.evaluate.held_out_metrics": [("policy_logps", lambda inside: ends(inside, "evaluation"))],
}

class Finder(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name not in CHANGED:
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path, target)
        run = spec.loader.exec_module
        def run_and_change(module):
            run(module)
            for attribute, change in CHANGED[name]:
                setattr(module, attribute, change(getattr(module, attribute)))
        spec.loader.exec_module = run_and_change
        return spec

sys.meta_path.insert(0, Finder())

def take_memory(number, frame):
    held = []
    while True:
        held.append(bytearray(b"1" * 2**20))

if ORDER:
    signal.signal(signal.SIGUSR1, take_memory)
"""


class NotThereError(RuntimeError):
    """What a fault is for is not there at this moment: a start is under way."""


class Launch:
    """The launcher on its own host, and the lines that it writes."""

    def __init__(self, host: Host, command: list[str]):
        self.host, self.command = host, command
        self.lines: list[tuple[float, str]] = []
        self.start(command)

    def start(self, command: list[str]) -> None:
        self.process = self.host.start(command)
        for stream in (self.process.stdout, self.process.stderr):
            threading.Thread(target=self._read, args=(stream,), daemon=True).start()

    def _read(self, stream: Any) -> None:
        for line in stream:
            self.lines.append((time.monotonic(), line.rstrip()))

    def first(self, pattern: str, since: float) -> float | None:
        """When a line that matches came, after `since`."""
        return next((at for at, line in list(self.lines) if at >= since and re.search(pattern, line)), None)

    def resume(self, run: Path) -> None:
        """Gives the command again, with --resume, as a person would."""
        self.process.wait()
        cut = self.command.index("--")
        self.start([*self.command[: cut + 1], "train.py", "--resume", str(run)])

    def pid(self) -> int | None:
        """Its process, as its host counts."""
        return next((pid for pid, line in running(self.host) if f"{ROOT}/launch" in line), None)


@dataclass
class Scene:
    """A run that trains, and what a fault needs to know of it."""

    hosts: list[Host]  # that train
    disks: list[Path]  # their runs', as we reach them
    run: Path  # on any of the hosts
    rng: random.Random
    launch: Launch = field(init=False)
    victims: set[str] = field(default_factory=set)  # hosts that the last fault was made on
    torn: int = -1  # step of a checkpoint that was torn
    memory: list[Path] = field(default_factory=list)  # control groups that were made

    def disk(self, host: Host) -> Path:
        return self.disks[self.hosts.index(host)]

    def other(self, host: Host) -> Host:
        """Another host, for the same fault."""
        other = self.rng.choice([one for one in self.hosts if one is not host])
        self.victims.add(other.name)
        return other

    def logs(self) -> list[Path]:
        return [log for disk in self.disks for log in sorted((disk / "runs/run/logs").glob("rank-*.jsonl"))]

    def newest_step(self) -> int:
        """The last step of any log, read from its end."""
        newest = 0
        for log in self.logs():
            with contextlib.suppress(FileNotFoundError), log.open("rb") as file:
                file.seek(max(0, log.stat().st_size - 20_000))
                for line in file.read().split(b"\n"):
                    found = re.match(rb'\{"kind": "step".*?"step": (\d+)', line)
                    newest = max(newest, int(found[1]) if found else 0)
        return newest

    def resumed_step(self) -> int | None:
        """The checkpoint from which the run last went on, by the log that was written last, whatever its clock says."""
        for log in sorted(self.logs(), key=lambda path: path.stat().st_mtime, reverse=True):
            starts = [line for line in log.read_bytes().split(b"\n") if line.startswith(b'{"kind": "start"')]
            if starts:
                step: int | None = json.loads(starts[-1]).get("resumed_from_step")
                return step
        return None

    def order(self, host: Host, word: str) -> Path:
        path = host.outside / "order"
        path.write_text(word)
        return path

    def rank(self, host: Host) -> int | None:
        """The process that owns the run's folder on this host's disk, if it lives."""
        with contextlib.suppress(OSError, ValueError):
            pid = int((self.disk(host) / "runs/run/.lock").read_text())
            if re.search(rb"train\.py|lib\.launch\.standby", Path(f"{host.root}/proc/{pid}/cmdline").read_bytes()):
                return pid
        return None

    def kill(self, host: Host, number: signal.Signals = signal.SIGKILL) -> int:
        """Signals the rank of a host; returns its process."""
        pid = self.owner(host)
        host.signal(pid, number)
        return pid

    def owner(self, host: Host) -> int:
        """The same process, which has to be there."""
        if (pid := self.rank(host)) is None:
            raise NotThereError(f"no rank on {host.name}")
        return pid

    def await_order(self, host: Host, word: str) -> None:
        """Gives an order, and waits until a rank of the host has obeyed it."""
        path = host.outside / "order"
        path.write_text(word)
        if not self.wait(lambda: not path.exists(), ORDER_SECONDS):
            path.unlink(missing_ok=True)
            raise NotThereError(f"no {word} on {host.name} in {ORDER_SECONDS:g} s")

    def wait(self, condition: Callable[[], Any], seconds: float, pause_seconds: float = 0.01) -> bool:
        deadline = time.monotonic() + seconds
        while not (there := bool(condition())) and time.monotonic() < deadline:
            time.sleep(pause_seconds)
        return there


def running(host: Host) -> list[tuple[int, str]]:
    """Process id there, and command line, of all that runs on a host; quicker than Host.processes."""
    found = []
    for folder in Path(f"{host.root}/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            found.append((int(folder.name), (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode()))
    return found


Undo = Callable[[], object]


def nothing() -> None:
    """Nothing is left to undo."""


# ---- Kinds. Each brings its fault about on a host, and returns what puts that right again


def kill(scene: Scene, host: Host) -> Undo:
    scene.kill(host)
    return nothing


def stop(scene: Scene, host: Host) -> Undo:
    pid = scene.kill(host, signal.SIGSTOP)
    return lambda: host.signal(pid, signal.SIGCONT)


def pause(scene: Scene, host: Host) -> Undo:
    pid = scene.kill(host, signal.SIGSTOP)
    time.sleep(SILENT_SECONDS / 3)
    host.signal(pid, signal.SIGCONT)
    return nothing


def cut(scene: Scene, host: Host) -> Undo:
    host.unplug()
    return host.plug_in


def ports(scene: Scene, host: Host) -> Undo:
    host.only_ssh()
    return lambda: host.only_ssh(False)


def torn(scene: Scene, host: Host) -> Undo:
    scene.kill(host)
    folders = [disk / "runs/run/checkpoints" for disk in scene.disks]
    newest = max(path.name for folder in folders for path in folder.glob("step-*"))
    torn_on = 0
    for folder in folders:  # at once, before a start looks for it, and after the last one was made
        path = folder / newest / "optimizer.safetensors"
        with contextlib.suppress(FileNotFoundError):  # the other disks may not have it yet
            path.write_bytes(path.read_bytes()[: scene.rng.randrange(1, path.stat().st_size)])
            torn_on += 1
    for disk in scene.disks:  # else the run goes on from what is newer
        for path in (disk / "runs/run/recent").glob("step-*"):
            path.write_bytes(path.read_bytes()[: scene.rng.randrange(1, path.stat().st_size)])
    if torn_on == len(folders):  # else a disk may get it now, and whole
        scene.torn = int(newest.removeprefix("step-"))
    return nothing


def launcher(scene: Scene, host: Host) -> Undo:
    pid = scene.launch.pid()
    if pid is None:
        raise NotThereError("no launcher")
    scene.launch.host.signal(pid, signal.SIGKILL)
    return nothing


def full(scene: Scene, host: Host) -> Undo:
    host.run(["sh", "-c", f"cat /dev/zero > {host.disk}/mnt/filler"])
    return lambda: (scene.disk(host) / "filler").unlink()


def nan(scene: Scene, host: Host) -> Undo:
    scene.order(host, "nan")
    return nothing


def nan_stays(scene: Scene, host: Host) -> Undo:
    order = scene.order(host, "nan-stays")
    return lambda: order.unlink(missing_ok=True)


def two(scene: Scene, host: Host) -> Undo:
    other = scene.other(host)
    first, second = (scene.rng.choice((kill, stop, cut)) for _ in range(2))
    undos = [first(scene, host)]
    with contextlib.suppress(NotThereError):  # the first was quicker than this
        undos.append(second(scene, other))
    return lambda: [undo() for undo in undos]


def recovery(scene: Scene, host: Host) -> Undo:
    """A rank is killed, and another one while all start again."""
    began = time.monotonic()
    scene.kill(host)
    other = scene.other(host)
    former = scene.rank(other)
    scene.wait(lambda: scene.launch.first(r"launch: start ", began), 30)
    time.sleep(scene.rng.uniform(0, 0.5))
    scene.wait(lambda: (found := scene.rank(other)) and found != former, 5)
    with contextlib.suppress(NotThereError):  # it was quicker
        scene.kill(other)
    return nothing


def in_checkpoint(scene: Scene, host: Host) -> Undo:
    folder = scene.disk(host) / "runs/run/checkpoints"
    scene.wait(lambda: list(folder.glob(".unfinished-*")), 20, 0.001)
    scene.kill(host)
    return nothing


def in_evaluation(scene: Scene, host: Host) -> Undo:
    scene.await_order(host, "evaluation")
    return nothing


def in_merge(scene: Scene, host: Host) -> Undo:
    scene.await_order(host, "merge")
    return nothing


def clock(scene: Scene, host: Host) -> Undo:
    """The host's time of day jumps, by up to a day, and stays where it is until its next jump."""
    set_clock(host, scene.rng.uniform(-86_400, 86_400))
    return nothing


def slow_disk(scene: Scene, host: Host) -> Undo:
    host.slow_disk(SLOW_DISK)
    return lambda: host.slow_disk(None)


def slow_link(scene: Scene, host: Host) -> Undo:
    host.weaken(WEAK_LINK)
    return lambda: host.weaken(None)


MOVES = itertools.count(1)  # over all runs: hosts that one has moved are in the next one under their new names


def moved(scene: Scene, host: Host) -> Undo:
    """A host goes away, and comes back under another name and address."""
    host.unplug()
    number = next(MOVES)

    def come_back() -> None:
        host.move(f"cafe-{number}", f"10.77.0.{100 + number % 150}")
        host.plug_in()

    return come_back


GROUPS = itertools.count(1)


def memory(scene: Scene, host: Host) -> Undo:
    """A rank wants more memory than its control group has: the kernel ends it."""
    pid = scene.owner(host)
    group = MEMORY / f"tandem-{os.getpid()}-{next(GROUPS)}"
    group.mkdir()
    scene.memory.append(group)
    host.run(["sh", "-c", f'echo {pid} > "{group}/cgroup.procs"'])  # written there: it is that host's number
    (group / "memory.limit_in_bytes").write_text(str(2**27))
    time.sleep(0.7)  # until its agent has seen it there
    host.signal(pid, signal.SIGUSR1)
    # As a person would after the cause is gone: what the host remembers of it would halve its micro-batches for good.
    return lambda: subprocess.run(["rm", "-rf", str(host.outside / "calibration")], check=True)


def set_clock(host: Host, seconds: float) -> None:
    """Sets the offset that tests/clock.c adds on this host."""
    path = host.outside / "clock"
    path.touch()
    with path.open("r+b") as file:  # never truncated: it is mapped
        file.write(struct.pack("q", int(seconds * 1e9)))


@dataclass(frozen=True)
class Kind:
    """A kind of fault.

    noticed: the line that tells it; None where nobody has to. ends_ranks: whether they are started again. lasts_seconds: once
    it was noticed, or is in force. ends_launch: a person gives the command again.
    """

    bring: Callable[[Scene, Host], Undo]
    noticed: str | None = RESTARTS + BACK
    ends_ranks: bool = True
    lasts_seconds: float = 0.0
    ends_launch: bool = False
    strategies: tuple[str, ...] = STRATEGIES


KINDS = {
    "kill": Kind(kill),
    "stop": Kind(stop),
    "cut": Kind(cut, lasts_seconds=AWAY_SECONDS),
    "ports": Kind(ports, lasts_seconds=AWAY_SECONDS),
    "torn": Kind(torn),
    "launcher": Kind(launcher, None, ends_launch=True),
    "two": Kind(two, lasts_seconds=AWAY_SECONDS),
    "recovery": Kind(recovery),
    "checkpoint": Kind(in_checkpoint),
    "evaluation": Kind(in_evaluation, strategies=SYNCHRONOUS),
    "merge": Kind(in_merge, strategies=("independent",)),
    "moved": Kind(moved, lasts_seconds=AWAY_SECONDS),
    "memory": Kind(memory),
    "nan-stays": Kind(nan_stays, STAYS_NAN, ends_launch=True, strategies=SYNCHRONOUS),
    "pause": Kind(pause, None, ends_ranks=False),
    "full": Kind(full, r"cannot be written|No space left", ends_ranks=False),
    "nan": Kind(nan, "not finite", ends_ranks=False),
    "clock": Kind(clock, None, ends_ranks=False),
    "slow-disk": Kind(slow_disk, None, ends_ranks=False, lasts_seconds=AWAY_SECONDS),
    "slow-link": Kind(slow_link, None, ends_ranks=False, lasts_seconds=AWAY_SECONDS),
}


def unavailable(kind: str) -> str | None:
    """Why a kind cannot be made here, None where it can."""
    wanted = {
        "memory": (MEMORY / "memory.limit_in_bytes", "the memory controller of control groups, version 1"),
        "slow-disk": (
            Path("/sys/fs/cgroup/blkio/blkio.throttle.write_bps_device"),
            "blkio of control groups, version 1",
        ),
        "slow-link": (Path("/dev/net/tun"), "a TAP device"),
    }
    path, what = wanted.get(kind, (Path("/"), ""))
    return None if path.exists() else f"{path} is missing: {what}"
