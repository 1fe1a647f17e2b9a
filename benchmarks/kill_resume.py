"""Kills commands at random moments, gives them again, and compares every bit of their end with one that nobody killed.

    python benchmarks/kill_resume.py --kills 1000          about an hour on two idle cores: 3 to 4 s for each
    python benchmarks/kill_resume.py --only pipelined      one of the stories of tests/kill_stories.py; --list names them
    python benchmarks/kill_resume.py --quick               about two minutes

Training on one rank and in every strategy, rounds, evaluation of files by one and two ranks, pairs that are made, exports, a
download from a stand-in of a hub, and a server with its clients. Most deaths come at a moment that a whole life has shown: just before
a rename, a flush, a lock ..., or up to 0.3 s after it; one in six at any time. It is SIGKILL for one rank, for the launcher, or for
both. After each death all processes of the command have to be gone, and a port free; at the end weights, losses, rows, outputs
and the names of all files have to be those of the whole life. The last line is one JSON object; exit status 1 where one differs.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import contextlib
import io
import json
import os
import random
import shutil
import sys
import tempfile
import threading
import time
from collections import Counter
from dataclasses import asdict, dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[0] = str(ROOT)

from lib import environment

environment.enter()

from rich.console import Console  # noqa: E402
from rich.table import Table  # noqa: E402

from lib.system import mpi_and_blas  # noqa: E402

mpi_and_blas.prepare()

from tests import test_hub  # noqa: E402
from tests.forked import Forks  # noqa: E402
from tests.kill_stories import hub_files, stories  # noqa: E402
from tests.kills import Case, Fault, Story, Whole, play  # noqa: E402

CAN_FORK = sys.platform == "linux"  # Metal does not survive a fork


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", nargs="+", metavar="TEXT", help="stories with one of these in their names")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="after that nothing is killed any more")
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1, help="commands at once")
    parser.add_argument("--list", action="store_true", help="name the stories")
    parser.add_argument("--quick", action="store_true", help="30 kills")
    options = parser.parse_args()
    test_hub.REPOSITORIES["kills"] = (hub_files(), {})
    began, wanted = time.monotonic(), 30 if options.quick else options.kills
    with tempfile.TemporaryDirectory(prefix="kills-") as name, test_hub.served() as hub:
        folder = Path(name).resolve()
        with contextlib.redirect_stdout(io.StringIO()):
            all_ = stories(folder / "base", hub)
        wanted_names = [name for name in all_ if any(text in name for text in options.only or [""])]
        if options.list or not wanted_names:
            print("\n".join(all_))
            return 0 if options.list else 2
        campaign = Campaign({name: all_[name] for name in wanted_names}, folder, options.seed, wanted)
        campaign.run(options.workers, began + options.seconds)
    return show(campaign.cases, time.monotonic() - began, options.seed)


class Campaign:
    """Cases of all stories, until so many kills.

    Args:
        folder: for all of their files.
        wanted: kills.
    """

    def __init__(self, all_: dict[str, Story], folder: Path, seed: int, wanted: int):
        self.stories, self.folder, self.seed, self.wanted = all_, folder, seed, wanted
        self.cases: list[Case] = []
        self._begun: Counter[str] = Counter()  # cases by story
        self._wholes: dict[str, Whole | str] = {}
        self._lock = threading.Lock()
        self._locks = {name: threading.Lock() for name in all_}

    @property
    def kills(self) -> int:
        return sum(len(case.kills) for case in self.cases)

    def run(self, workers: int, ends: float) -> None:
        with concurrent.futures.ThreadPoolExecutor(workers) as pool:
            for done in [pool.submit(self._work, worker, ends) for worker in range(workers)]:
                done.result()

    def _work(self, worker: int, ends: float) -> None:
        """Cases, one after the other; their forks have a parent of their own."""
        folder = self.folder / f"worker-{worker}"
        folder.mkdir()
        with contextlib.closing(Forks(folder)) if CAN_FORK else contextlib.nullcontext() as forks:
            while self.kills < self.wanted and time.monotonic() < ends:
                name, number = self._next()
                case = self._play(name, number, ends, forks)
                self.cases.append(case)
                what = "FELL" if case.fault else "same"
                print(f"{self.kills:5} kills  {what}  {name}: {case.moments} {case.fault or ''}", flush=True)

    def _next(self) -> tuple[str, int]:
        """The story with the fewest kills, and the number of this case of it."""
        with self._lock:
            kills = Counter(dict.fromkeys(self.stories, 0))
            for case in self.cases:
                kills[case.story] += len(case.kills)
            name = min(kills, key=lambda name: (kills[name] + self._begun[name], self._begun[name]))
            self._begun[name] += 1
            return name, self._begun[name]

    def _play(self, name: str, number: int, ends: float, forks: Forks | None) -> Case:
        story, index = self.stories[name], list(self.stories).index(name)
        with self._locks[name]:
            if name not in self._wholes:
                try:
                    self._wholes[name] = Whole.of(story, self.folder / f"whole-{index}", forks)
                except Fault as fault:
                    self._wholes[name] = f"its whole life: {fault}"
        whole = self._wholes[name]
        if isinstance(whole, str):
            return Case(name, fault=whole)
        folder = self.folder / f"case-{index}-{number}"
        case = play(name, story, whole, folder, random.Random(f"{self.seed} {name} {number}"), ends, forks)
        shutil.rmtree(folder, ignore_errors=True)
        return case


@dataclass
class Row:
    """What a story came to."""

    cases: int = 0
    kills: int = 0
    of_programs: int = 0  # kills of lives that began as programs
    differ: int = 0


def show(cases: list[Case], seconds: float, seed: int) -> int:
    """The table, and the line of JSON; the exit status."""
    rows: dict[str, Row] = {}
    for case in cases:
        row = rows.setdefault(case.story, Row())
        row.cases += 1
        row.kills += len(case.kills)
        row.of_programs += sum(not kill.is_fork for kill in case.kills)
        row.differ += case.fault is not None
    table = Table(title=f"{sum(row.kills for row in rows.values())} kills")
    for column in ("story", "cases", "kills", "of programs", "differ"):
        table.add_column(column, justify="left" if column == "story" else "right")
    for name, row in rows.items():
        table.add_row(name, *map(str, asdict(row).values()))
    Console().print(table)
    for case in cases:
        if case.fault:
            print(f"{case.story}, killed at {case.moments}: {case.fault}")
    sums = {key: sum(asdict(row)[key] for row in rows.values()) for key in asdict(Row())}
    stories_ = {name: asdict(row) for name, row in rows.items()}
    print(json.dumps({**sums, "seconds": round(seconds, 1), "seed": seed, "stories": stories_}))
    return 1 if sums["differ"] else 0


if __name__ == "__main__":
    sys.exit(main())
