"""Commands that are killed at moments of their lives, given again until they end, and compared with one that nobody killed.

A story knows a command, how it is given again, and what it leaves. Its first life is whole: it tells what the end is, and
which moments there are (tests/dies.py). Moments are drawn by kind, so that the one rename of a checkpoint is as likely as
its hundred writes. Lives begin as programs, and most, because it is so much quicker, as forks (tests/forked.py). tests/test_kills.py plays a few, benchmarks/kill_resume.py a thousand.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import math
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from lib.system import mpi_and_blas
from tests import tiny
from tests.dies import Death
from tests.forked import ForkedLife, Forks

Life = subprocess.Popen[bytes] | ForkedLife
MARK = "KILLED_IN"  # a variable of all processes of a life: its folder
PROGRAM_EVERY = 10  # so many lives there are for one that begins as a program
LIFE_SECONDS = 240.0  # no life is longer
ORPHAN_SECONDS = 30.0  # after a death, all else of the command has ended


@dataclass(frozen=True)
class Story:
    """A command, and what it leaves in a folder of its own.

    Args:
        command: program and words for a life in this folder; None where nothing is left to do.
        outcome: what the end left there, to be compared.
        ranks: how many processes of it there are.
        environment: beside that of this process; such a command always begins as a program.
        constants: of modules, which make a life short: as tests/dies.py takes them.
        drive: what uses the command while it lives, and ends it; by default it ends by itself.
        fault: what no death may leave behind in the folder; None where all is well.
    """

    command: Callable[[Path], list[str] | None]
    outcome: Callable[[Path], object]
    ranks: int = 1
    environment: Mapping[str, str] = field(default_factory=dict)
    constants: Mapping[str, int] = field(default_factory=dict)
    drive: Callable[[Path, Life], None] | None = None
    fault: Callable[[Path], str | None] = lambda folder: None

    def can_fork(self) -> bool:
        """Whether a fork is as good as a program: modules read variables while they are imported."""
        return not self.environment


@dataclass(frozen=True)
class Kill:
    """One that came, for a person; is_fork: how the life had begun."""

    moment: str
    is_fork: bool


@dataclass
class Case:
    """What became of a command that was killed, and given again, until it ended."""

    story: str
    kills: list[Kill] = field(default_factory=list)
    fault: str | None = None

    @property
    def moments(self) -> str:
        return "; ".join(kill.moment for kill in self.kills)


class Fault(Exception):
    """What no kill may bring about."""


# ---- Lives


@dataclass
class Whole:
    """A life that nobody ended: what there is at its end, the moments of each rank, and how long it took."""

    outcome: object
    words: list[Counter[str]]
    seconds: float

    @classmethod
    def of(cls, story: Story, folder: Path, forks: Forks | None = None) -> Whole:
        """Begins as lives mostly do. Raises Fault where the command fails."""
        forks = forks if story.can_fork() else None
        began = time.monotonic()
        if not live(story, folder, nobody_dies(story, folder), None, forks):
            raise Fault("the command without a kill was killed")
        seconds = time.monotonic() - began
        return cls(_outcome(story, folder), words_of(story, folder), seconds)


def words_of(story: Story, folder: Path) -> list[Counter[str]]:
    """How often each moment came in the last life in a folder, by rank."""
    traces = [trace_of(folder, rank) for rank in range(story.ranks)]
    return [Counter(trace.read_text().splitlines() if trace.exists() else ()) for trace in traces]


def play(
    name: str,
    story: Story,
    whole: Whole,
    folder: Path,
    rng: random.Random,
    ends: float = math.inf,
    forks: Forks | None = None,
) -> Case:
    """Kills a command again and again, until it ends by itself; from `ends` on (time.monotonic) nobody kills it.

    Args:
        forks: what lives begin from, but for one in PROGRAM_EVERY.
    """
    case = Case(name)
    folder.mkdir(parents=True)
    words = whole.words
    try:
        while True:
            source = forks if story.can_fork() and rng.randrange(PROGRAM_EVERY) else None
            deaths, strike = _chosen(story, words, whole.seconds, folder, rng)
            if time.monotonic() > ends:
                deaths, strike = nobody_dies(story, folder), None
            began = time.monotonic()
            if live(story, folder, deaths, strike, source):
                break
            moment = _moment(deaths, strike, folder, time.monotonic() - began)
            case.kills.append(Kill(moment, is_fork=source is not None))
            # A life that goes on has moments of its own, at which the next one may be killed.
            words = [a | b for a, b in zip(words, words_of(story, folder), strict=True)]
        if (outcome := _outcome(story, folder)) != whole.outcome:
            case.fault = f"its end differs: {difference(whole.outcome, outcome)}"
    except Fault as fault:
        case.fault = str(fault)
    return case


def _outcome(story: Story, folder: Path) -> object:
    """What an end left. Raises Fault where something of it is missing or unreadable."""
    try:
        return story.outcome(folder)
    except (OSError, ValueError, KeyError) as error:
        raise Fault(f"its end cannot be read: {type(error).__name__}: {error}") from None


def _chosen(
    story: Story, words: list[Counter[str]], seconds: float, folder: Path, rng: random.Random
) -> tuple[list[Death], tuple[float, str] | None]:
    """How the next life ends: a death for each rank, at most one of which comes; or after so many seconds, and who.

    words, seconds: the moments of each rank that are known, and how long a whole life takes.
    """
    deaths = nobody_dies(story, folder)
    if rng.random() < 1 / 6:  # at any time, so mostly while it starts
        return deaths, (rng.uniform(0, seconds), rng.choice(("one", "all")))
    unlucky = rng.randrange(story.ranks)
    often = words[unlucky]
    word = rng.choice(sorted(often))
    whom = "self" if story.ranks == 1 else rng.choice(("self", "self", "parent", "both"))
    delay = 0.0 if rng.random() < 0.5 else rng.choice((0.0003, 0.003, 0.03, 0.3)) * rng.random()
    count = round(often[word] ** rng.random())  # a life that goes on has fewer of each left
    deaths[unlucky] = dataclasses.replace(deaths[unlucky], word=word, count=count, delay=delay, whom=whom)
    return deaths, None


def nobody_dies(story: Story, folder: Path) -> list[Death]:
    """What each rank of a life without a kill is given."""
    traces = [trace_of(folder, rank) for rank in range(story.ranks)]
    return [Death(root=str(folder), trace=str(trace), constants=dict(story.constants)) for trace in traces]


def trace_of(folder: Path, rank: int) -> Path:
    return folder.with_name(f"{folder.name}.trace-{rank}")  # beside it: of no interest to the command


def _moment(deaths: list[Death], strike: tuple[float, str] | None, folder: Path, seconds: float) -> str:
    """Where a life ended, for a person."""
    if strike is not None:
        return f"{strike[1]} after {seconds:.1f} s"
    rank, death = next((rank, death) for rank, death in enumerate(deaths) if death.word is not None)
    who = f" rank {rank}" if len(deaths) > 1 else ""
    return f"{death.word} {death.count}{f' + {death.delay * 1e3:.1f} ms' if death.delay else ''}, {death.whom}{who}"


def live(
    story: Story, folder: Path, deaths: list[Death], strike: tuple[float, str] | None, forks: Forks | None = None
) -> bool:
    """One life of a command; whether it ended by itself.

    Args:
        strike: after so many seconds one process of it, or all.
        forks: what it begins from; by default it is a program, under mpirun where it has several ranks.

    Raises:
        Fault: it failed, hung, or left a process behind.
    """
    folder.mkdir(parents=True, exist_ok=True)
    words = story.command(folder)
    if words is None:
        return True
    output = folder.with_name(f"{folder.name}.said")
    output.write_text("")
    for rank in range(story.ranks):
        trace_of(folder, rank).unlink(missing_ok=True)  # the last life's
    mark = {MARK: f"{folder}/"}
    if forks is None:
        process: Life = _program(words, deaths, output, {**os.environ, **story.environment, **mark})
    else:
        process = forks.begin(words, deaths, output, mark)
    user = threading.Thread(target=story.drive or (lambda *_: None), args=(folder, process))
    user.start()
    try:
        struck = _ended(process, folder, strike)
    finally:
        left = _await_all(folder, process)
        user.join()
    text = _essence(output.read_text(errors="replace"))
    if left:
        how = (
            [f"after {strike[0]:.3f} s, {strike[1]}"] if strike else [death.to_json() for death in deaths if death.word]
        )
        raise Fault(f"it left processes behind, killed {how}: {left[0][:300]}")
    if (fault := story.fault(folder)) is not None:
        raise Fault(fault)
    if process.returncode == 0:  # before its death, perhaps
        return True
    if not struck and not any(_came(death) for death in deaths):
        raise Fault(f"it ended with status {process.returncode}: {text}")
    return False


def _program(
    words: list[str], deaths: Sequence[Death], output: Path, environment: dict[str, str]
) -> subprocess.Popen[bytes]:
    """A life that begins as a user begins it."""
    ranks = [[sys.executable, "-m", "tests.dies", death.to_json(), *words] for death in deaths]
    command = ranks[0]
    if len(ranks) > 1:
        command = [str(mpi_and_blas.mpirun_path())]
        environment |= {"OMPI_MCA_mpi_yield_when_idle": "1"}  # others, who play cases as well, want the cores
        for rank in ranks:
            command += [*([":"] if rank is not ranks[0] else []), "-n", "1", *rank]
    with output.open("a") as said:
        return subprocess.Popen(
            command, cwd=tiny.ROOT, stdout=said, stderr=said, env=environment, start_new_session=True
        )


def _essence(said: str) -> str:
    """What a command said of why it ended."""
    lines = said.splitlines()
    first = next((n for n, line in enumerate(lines) if line.startswith(("error: ", "stopped: ", "Traceback"))), None)
    return "\n".join(lines[-20:] if first is None else lines[first : first + 40])[-2500:]


def _ended(process: Life, folder: Path, strike: tuple[float, str] | None) -> bool:
    """Waits for a life's end; whether it was brought about from outside."""
    try:
        process.wait(LIFE_SECONDS if strike is None else strike[0])
        return False
    except subprocess.TimeoutExpired:
        if strike is None:
            raise Fault(f"it was not over after {LIFE_SECONDS:g} s") from None
    pids = [pid for pid, _ in processes(folder, process.pid)]
    for pid in pids if strike[1] == "all" else [process.pid]:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(ORPHAN_SECONDS)
    return True


def _came(death: Death) -> bool:
    """Whether a death's word was reached."""
    trace = Path(death.trace)
    return death.word is not None and trace.exists() and trace.read_text().split("\n").count(death.word) >= death.count


def _await_all(folder: Path, process: Life) -> list[str]:
    """What is left of a command after a while; it is ended then."""
    deadline = time.monotonic() + ORPHAN_SECONDS
    while True:
        process.poll()
        left = processes(folder, process.pid)
        if not left:
            return []
        if time.monotonic() > deadline:
            for pid, _ in left:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            process.wait(ORPHAN_SECONDS)
            return [command for _, command in left]
        time.sleep(0.05)


def processes(folder: Path, group: int) -> list[tuple[int, str]]:
    """Id and command of what is in a group of processes, or has this folder among its words or variables."""
    with_variables = "-E" if sys.platform == "darwin" else "e"
    command = ["ps", "-A", "-ww", "-o", "pid=,pgid=,stat=,command=", with_variables]
    told = subprocess.run(command, capture_output=True, text=True, errors="replace").stdout
    found = []
    for line in told.splitlines():
        pid, theirs, state, command = [*line.split(None, 3), ""][:4]
        is_of_it = int(theirs) == group or f"{folder}/" in command or f'{folder}"' in command
        if is_of_it and not state.startswith("Z") and int(pid) != os.getpid():
            found.append((int(pid), command))
    return found


def difference(one: object, other: object) -> str:
    """The first place at which two outcomes differ."""
    if isinstance(one, dict) and isinstance(other, dict):
        for key in sorted(one.keys() | other.keys()):
            if one.get(key) != other.get(key):
                return f"{key}: {difference(one.get(key), other.get(key))}"
    if isinstance(one, list) and isinstance(other, list):
        for index, pair in enumerate(zip(one, other, strict=False)):
            if pair[0] != pair[1]:
                return f"{index}: {difference(*pair)}"
        return (
            f"{len(one)} items, and {len(other)}: {[item for item in one + other if (item in one) != (item in other)]}"
        )
    return f"{str(one)[:200]} is {str(other)[:200]}"


def digests(folder: Path) -> dict[str, str]:
    """What is in every file of a folder."""
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    return {str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}
