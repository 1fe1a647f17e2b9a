"""How long a sign of life may take before its sender is given up: the limits that a user sets, and what load adds.

A host whose cores are wanted by others answers late, and is not dead. Two things are known of it. Its messages have
come so late in the last minute: `LATE_TIMES` as much is added to the limit for silence. And so many processes want each
of its cores, as it reports itself: that multiplies the limits for work, which are those for passes through the model,
waits for other ranks, and connections. On hosts that are punctual and have a core for each process, all limits are the
user's own.

Only the standard library is imported: a host's agent is there in a tenth of a second.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections import deque
from pathlib import Path

LATE_TIMES = 3.0  # of the usual lateness; a machine that is busier than before is later than before
LEAST_SILENCE_SECONDS = 10.0  # --silent-seconds may be less; words that a slow link may keep back get this long
MOST_TIMES = 5.0  # of a limit: beyond, a host that dies slowly would never be given up
WINDOW_SECONDS = 60.0  # that lateness is remembered
USUAL_FROM = 3  # so many late messages in the window: one or two are a cable that was out, or a lid that was closed
LEAST_SECONDS = 0.05  # what comes later than it should by less is punctual
SMOOTH_SECONDS = 5.0  # over which the load is averaged
MOST_LOAD = 10.0


class Punctuality:
    """When messages came that should come at least every so often, and how late they usually are."""

    def __init__(self, every_seconds: float, now: float):
        self.every_seconds = every_seconds
        self.last = now
        self._late: deque[tuple[float, float]] = deque()  # when, and by how much

    def note(self, now: float) -> None:
        """Counts a message that came."""
        late = now - self.last - self.every_seconds
        self.last = now
        if late > LEAST_SECONDS:
            self._late.append((now, late))

    def excuse(self, seconds: float) -> None:
        """Leaves out a time in which the receiver itself did not look: what came then may be unread."""
        self.last += seconds

    def usual_lateness(self, now: float) -> float:
        """Seconds: the third longest delay of the last minute; 0 if there were fewer."""
        while self._late and self._late[0][0] < now - WINDOW_SECONDS:
            self._late.popleft()
        longest = sorted((late for _, late in self._late), reverse=True)
        return longest[USUAL_FROM - 1] if len(longest) >= USUAL_FROM else 0.0


def silence_limit(limit_seconds: float, usual_lateness: float) -> float:
    """Seconds without a message after which its sender is given up."""
    return min(limit_seconds + LATE_TIMES * usual_lateness, MOST_TIMES * limit_seconds)


def work_limit(limit_seconds: float, load: float) -> float:
    """Seconds that work may take where so many processes want each core, of which it gets a fair share."""
    return limit_seconds * min(max(1.0, load), MOST_LOAD)


class Load:
    """How many processes want each core of this machine, averaged over some seconds."""

    def __init__(self) -> None:
        self.cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        self.average = os.getloadavg()[0] / self.cores
        self._looked = time.monotonic()

    def look(self) -> float:
        """The average, with what is seen now. macOS tells an average of a minute alone."""
        now = time.monotonic()
        weight = min(1.0, (now - self._looked) / SMOOTH_SECONDS)
        self._looked = now
        self.average += weight * (self._wanting() / self.cores - self.average)
        return self.average

    def _wanting(self) -> float:
        with contextlib.suppress(OSError, ValueError, IndexError):
            # "3/412": of all threads, this one among them
            running = Path("/proc/loadavg").read_text(encoding="utf-8").split()[3]
            return int(running.partition("/")[0]) - 1
        return os.getloadavg()[0]
