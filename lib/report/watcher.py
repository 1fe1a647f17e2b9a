"""The logs of the runs that somebody looks at, read in a thread as they grow."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from pathlib import Path

from lib.report.history import RunHistory, runs_in

POLL_SECONDS = 0.5  # between looks at the logs
LISTED_RUNS = 40


class Watcher:
    """Reads the logs of the runs that somebody looks at, in a thread, so that a page never waits for a disk."""

    def __init__(self, folder: Path, given: Sequence[Path] = ()):
        self.folder, self.given = folder, [Path(path) for path in given]
        self.runs: dict[str, RunHistory] = {}  # by folder
        self.lock = threading.Lock()
        self.ended = threading.Event()
        self.thread = threading.Thread(target=self._watch, name="logs", daemon=True)
        self.thread.start()

    def listed(self) -> list[Path]:
        """Runs to choose from: those given, or the newest of the folder."""
        return self.given or runs_in(self.folder)[:LISTED_RUNS]

    def look(self, folder: str) -> RunHistory | None:
        """A run that is watched from now on; None where it is none of those listed."""
        if folder not in self.runs and folder not in map(str, self.listed()):
            return None
        with self.lock:
            if folder not in self.runs:
                self.runs[folder] = RunHistory(Path(folder))
                self.runs[folder].read()  # a first piece at once, the rest in the thread
            return self.runs[folder]

    def close(self) -> None:
        self.ended.set()
        self.thread.join()

    def _watch(self) -> None:
        while not self.ended.wait(POLL_SECONDS):
            for run in list(self.runs.values()):
                busy = True
                while busy and not self.ended.is_set():
                    started = time.perf_counter()
                    with self.lock:
                        busy = run.read()
                    # Half of one core at most: this may be a machine that trains.
                    self.ended.wait(time.perf_counter() - started if run.is_sampled else 0)
