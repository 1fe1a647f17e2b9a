"""A run's records in bounded memory, as its logs grow: curves and events.

    run = RunHistory(Path("runs/NAME"))
    while run.read():                            # False: all that was written has been read
        ...
    run.curve((0, "host"), "loss"), run.events

A log may have millions of records. It is read by byte offset, and records become buckets: while there are few a bucket
is a record, later the mean, least and greatest value of 2, 4, 8, ... records (as much as a screen can show). Of a long
log the first look takes records at even distances, so that there is something to see at once; then the whole is read.
"""

from __future__ import annotations

import contextlib
import json
import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeGuard

import numpy as np
from pydantic import TypeAdapter, ValidationError

from lib.system.records import Record, Tail

JSON = dict[str, Any]  # a record that nobody has looked at yet

COLUMNS: tuple[str, ...] = ("step", "time", "pairs", "tokens", "loss", "kl", "reward_accuracy", "reward_margin")
COLUMNS += ("grad_norm", "learning_rate", "step_seconds", "compute_seconds", "sync_seconds", "wait_seconds")
COLUMNS += ("peak_memory_bytes", "bytes_sent", "skipped")
INDEX = {name: index for index, name in enumerate(COLUMNS)}
# Of the records of the network and of sensors, which come every few seconds as long as a run goes on.
MEASURES: tuple[str, ...] = ("step", "time", "bytes_per_second", "round_trip_seconds", "retransmits")
MEASURES += ("temperature_celsius", "power_watts", "speed_limit")
CAPACITY = 1024  # buckets, at least, once there are so many records
RECENT = 20  # records behind the figures of the moment
EVENT_BYTES = 2**25  # of events' lines that are kept of a log; of more some are left out
GLANCE_BYTES = 2**24  # of a longer log the first look takes samples
GLANCE_RECORDS = 1500
LINE_BYTES = 2**13  # most step records are shorter
STEP = b'{"kind": "step", '
SILENT_SECONDS = 60.0
LATE_SECONDS = 20.0  # into a run every rank has written a record, here or elsewhere
LATEST_TIME = 1e11  # whoever says to be of the year 5138 is none of ours
SENSORS = {"temperature_celsius", "power_watts", "speed_limit"}


Who = tuple[int, str]  # rank and host
Warned = tuple[float, int | None, str]  # time, step and text


class Series:
    """Step records of one rank as buckets: sum, count, least and greatest value of every column; no mean of means."""

    def __init__(self, capacity: int = CAPACITY, columns: Sequence[str] = COLUMNS):
        self.capacity, self.width = capacity, 1  # records in a bucket
        self.index = {name: index for index, name in enumerate(columns)}
        empty = np.empty((0, len(columns)))
        self.sums, self.counts, self.least, self.greatest = empty, empty, empty, empty
        self.rest = empty  # the records of the last bucket, which is not full
        self.totals, self.count = np.zeros(len(columns)), 0
        self.recent: deque[np.ndarray] = deque(maxlen=RECENT)

    def append(self, rows: np.ndarray) -> None:
        """rows: float64 [N, columns], NaN for what a record does not have."""
        self.recent.extend(rows[-RECENT:])
        self.totals, self.count = self.totals + np.nansum(rows, axis=0), self.count + len(rows)
        self.rest = np.concatenate([self.rest, rows])
        while len(self.rest) >= self.width:
            buckets = min(len(self.rest) // self.width, 2 * self.capacity - len(self.sums))
            whole, self.rest = np.split(self.rest, [buckets * self.width])
            new = _bucketed(whole.reshape(buckets, self.width, -1))
            self._set([np.concatenate(both) for both in zip(self._buckets(), new, strict=True)])
            if len(self.sums) == 2 * self.capacity:
                sums, counts, least, greatest = (old.reshape(self.capacity, 2, -1) for old in self._buckets())
                together = sums.sum(axis=1), counts.sum(axis=1)
                self._set([*together, np.fmin.reduce(least, axis=1), np.fmax.reduce(greatest, axis=1)])
                self.width *= 2

    def table(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Means, least and greatest values, each [buckets, columns], the unfinished bucket included."""
        last = _bucketed(self.rest[None]) if len(self.rest) else [part[:0] for part in self._buckets()]
        sums, counts, least, greatest = (np.concatenate(both) for both in zip(self._buckets(), last, strict=True))
        return np.divide(sums, counts, out=np.full(sums.shape, np.nan), where=counts > 0), least, greatest

    def _buckets(self) -> list[np.ndarray]:
        return [self.sums, self.counts, self.least, self.greatest]

    def _set(self, buckets: Sequence[np.ndarray]) -> None:
        self.sums, self.counts, self.least, self.greatest = buckets


def _bucketed(records: np.ndarray) -> list[np.ndarray]:
    """[buckets, records, columns] ➜ sums, counts, least and greatest, each [buckets, columns]."""
    sums, counts = np.nansum(records, axis=1), (~np.isnan(records)).sum(axis=1)
    return [sums, counts, np.fmin.reduce(records, axis=1), np.fmax.reduce(records, axis=1)]


class Log:
    """One file of records."""

    def __init__(self, path: Path):
        self.tail = Tail(path)
        self.series: dict[Who, Series] = {}  # steps
        self.measured: dict[Who, Series] = {}  # the network, sensors
        self.events: list[Record] = []  # all others
        self.event_bytes: list[int] = []  # of each one's line
        self.length = 0  # when it was opened
        self.glance: Log | None = None  # what the first look at a long log gave

    def read(self) -> bool:
        """Takes in the next piece; False where there is nothing new."""
        if self.tail.offset == 0 and self.glance is None:
            self.length = _size(self.tail.path)
            if self.length > GLANCE_BYTES and (glance := _glance(self.tail.path, self.length)):
                self.glance = glance
                return True
        begins, lines = self.tail.read()
        if begins:
            self.series, self.measured, self.events, self.event_bytes = {}, {}, [], []
            self.length = _size(self.tail.path)  # it may have been cut back
        if not lines:
            return False
        self._take(lines.splitlines())
        if self.glance is not None and self.tail.offset >= self.length:
            self.glance = None
        return True

    def shown(self) -> Log:
        """What there is to see: the samples, until all that was there at the beginning has been read."""
        return self.glance or self

    def _take(self, lines: list[bytes]) -> None:
        steps: dict[Who, list[list[Any]]] = {}
        measured: dict[Who, list[list[Any]]] = {}
        for record, size in _parse(lines):
            kind, step, time = record.get("kind"), record.get("step"), record.get("time")
            rank, host = record.get("rank", 0), record.get("host", "")
            if not (isinstance(time, int | float) and 0 <= time < LATEST_TIME):
                continue  # somebody else's record
            if not (isinstance(rank, int) and isinstance(host, str)):
                continue
            if kind == "step" and isinstance(step, int) and 0 <= step < 2**53:
                steps.setdefault((rank, host), []).append([record.get(name) for name in COLUMNS])
            elif kind in ("network", "sensors"):
                measured.setdefault((rank, host), []).append(_measures(record))
            elif kind != "step" and _is_event(record):
                self.events.append(record)
                self.event_bytes.append(size)
        if sum(self.event_bytes) > EVENT_BYTES:
            self._thin()
        for who, table in steps.items():
            self.series.setdefault(who, Series()).append(_numbers(table))
        for who, table in measured.items():
            self.measured.setdefault(who, Series(CAPACITY // 4, MEASURES)).append(_numbers(table))

    def _thin(self) -> None:
        """Leaves out every second event of the kind that takes most, until a quarter of the room is free."""
        while sum(self.event_bytes) > 0.75 * EVENT_BYTES:
            taken: dict[str, list[int]] = {}
            for place, event in enumerate(self.events):
                taken.setdefault(event["kind"], []).append(place)
            most = max(taken.values(), key=lambda places: sum(self.event_bytes[place] for place in places))
            left_out = set(most[1::2] if len(most) > 1 else most)
            kept = [place for place in range(len(self.events)) if place not in left_out]
            self.events = [self.events[place] for place in kept]
            self.event_bytes = [self.event_bytes[place] for place in kept]


def _measures(record: JSON) -> list[Any]:
    """A row of MEASURES. Of a rank's connections the slowest round trip, and what all together sent again."""
    links = record.get("connections")
    links = [link for link in links if isinstance(link, dict)] if isinstance(links, list) else []
    links = [link for link in links if not str(link.get("peer")).startswith(("127.", "::1"))]  # mpirun's own, for one
    trips, again = ([_number(link.get(name)) for link in links] for name in ("round_trip_seconds", "retransmits"))
    row = {**record, "round_trip_seconds": max(trips, default=None), "retransmits": sum(again) if again else None}
    return [row.get(name) for name in MEASURES]


def _glance(path: Path, length: int) -> Log | None:
    """A log as samples at even distances, with its beginning and its end whole; None where it is gone by now."""
    seen = Log(path)
    with contextlib.suppress(OSError), path.open("rb") as file:
        seen._take(file.read(LINE_BYTES * 8).splitlines()[:-1])
        begun = file.tell()
        offsets = np.linspace(begun, length - LINE_BYTES * 16, GLANCE_RECORDS, dtype=np.int64)
        samples = []
        for offset in offsets:
            file.seek(offset)
            lines = file.read(LINE_BYTES).split(b"\n")
            samples += [line for line in lines[1:-1] if line.startswith(STEP)][:1]
        seen._take(samples)
        file.seek(length - LINE_BYTES * 16)
        seen._take(file.read().split(b"\n")[1:-1])
        return seen
    return None


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0


def _parse(lines: list[bytes]) -> list[tuple[JSON, int]]:
    """Records of lines and their bytes, at once where all are whole; a line that is none is left out."""
    try:
        values = json.loads(b"[" + b",".join(lines) + b"]")
    except (ValueError, RecursionError):
        values = []
    if len(values) != len(lines):  # one is none, or several
        values = [_value(line) for line in lines]
    return [(value, len(line)) for value, line in zip(values, lines, strict=True) if isinstance(value, dict)]


def _value(line: bytes) -> Any:
    try:
        return json.loads(line)
    except (ValueError, RecursionError):
        return None


def _numbers(table: list[list[Any]]) -> np.ndarray:
    try:
        return np.array(table, dtype=np.float64)
    except (TypeError, ValueError, OverflowError):  # somebody else's records
        return np.array([[_number(value) for value in row] for row in table], dtype=np.float64)


def _number(value: Any) -> float:
    return float(value) if isinstance(value, int | float) and abs(value) < 1e300 else math.nan


_EVENTS = TypeAdapter(Record)


def _is_event(record: JSON) -> TypeGuard[Record]:
    """Whether a record has what the pages rely on; where it has anything else in its place, it is somebody else's."""
    try:
        _EVENTS.validate_python(record, strict=True)
    except ValidationError:
        return False
    return isinstance(record.get("kind"), str)


# ---- A run: all its logs


@dataclass(frozen=True)
class MetricCurve:
    """One quantity of one rank over its steps; all arrays have the same length."""

    steps: np.ndarray
    values: np.ndarray  # means of buckets
    least: np.ndarray
    greatest: np.ndarray
    width: int  # records in a bucket; 1: every record


class RunHistory:
    """A run's folder, read as it grows: its ranks' logs, and copies of those of other hosts."""

    def __init__(self, folder: Path):
        self.folder = Path(folder)
        self.logs: dict[Path, Log] = {}
        self.version = 0  # changes with what there is to see
        self._events: tuple[int, list[Record]] | None = None  # of which version

    @property
    def name(self) -> str:
        return self.folder.resolve().name

    def read(self) -> bool:
        """Takes in a piece of every log; False where there was nothing new in any."""
        logs = self.folder / "logs"
        with contextlib.suppress(OSError):  # the folder is removed at this moment
            for path in (*logs.glob("rank-*.jsonl"), *logs.glob("*/rank-*.jsonl")):
                if not path.is_file():  # a pipe waits for a writer
                    continue
                if path not in self.logs and path.parent.name != "discarded":
                    self.logs[path] = Log(path)
        new = [log.read() for log in self.logs.values()]
        self.version += any(new)
        return any(new)

    @property
    def is_sampled(self) -> bool:
        """Whether a long log has not been read to its end yet."""
        return any(log.glance is not None for log in self.logs.values())

    @property
    def events(self) -> list[Record]:
        """All records that are no measurements, by time; of two copies of one file each record once."""
        if self._events is None or self._events[0] != self.version:
            every = [event for log in self._shown() for event in log.events]
            distinct = {(e["time"], e["kind"], e.get("rank"), e.get("host"), e.get("text")): e for e in every}
            self._events = self.version, sorted(distinct.values(), key=lambda event: event["time"])
        return self._events[1]

    @property
    def series(self) -> dict[Who, Series]:
        """Step records by rank and host, in the order of ranks; of two copies of one file the longer."""
        return _longest([log.series for log in self._shown()])

    @property
    def measured(self) -> dict[Who, Series]:
        """Records of the network and of sensors, as `series`."""
        return _longest([log.measured for log in self._shown()])

    def curve(self, who: Who, name: str, over: str | None = None) -> MetricCurve:
        """A column over the steps; divided by another one, as the mean of the one over the mean of the other.

        Steps that a crash undid are left out, where a host that was lost still has them.
        """
        series = self.series[who]
        means, least, greatest = series.table()
        keep = np.ones(len(means), bool)
        for time, step in _resumes(self.events, who[0]):
            keep &= ~((means[:, INDEX["time"]] < time) & (greatest[:, INDEX["step"]] > step))
        steps, column = greatest[keep, INDEX["step"]], INDEX[name]
        values = means[keep, column]
        if over is None:
            return MetricCurve(steps, values, least[keep, column], greatest[keep, column], series.width)
        below = means[keep, INDEX[over]]
        ratio = np.divide(values, below, out=np.full(len(values), np.nan), where=below > 0)
        return MetricCurve(steps, ratio, ratio, ratio, series.width)

    def measure(self, who: Who, name: str) -> tuple[np.ndarray, np.ndarray]:
        """When, in Unix seconds, and how much: one of MEASURES as a rank recorded it, without gaps."""
        series = self.measured[who]
        means, _, greatest = series.table()
        # What was sent again is counted since a process began, so its mean would say nothing.
        values = (greatest if name == "retransmits" else means)[:, series.index[name]]
        known = np.isfinite(values)
        return means[known, series.index["time"]], values[known]

    def _shown(self) -> list[Log]:
        return [log.shown() for _, log in sorted(self.logs.items())]


def _longest(copies: Sequence[dict[Who, Series]]) -> dict[Who, Series]:
    every = [(who, one) for each in copies for who, one in each.items()]
    return dict(sorted(sorted(every, key=lambda pair: pair[1].count), key=lambda pair: pair[0]))


def _resumes(events: Sequence[Record], rank: int) -> list[tuple[float, float]]:
    """When the run was taken up again, and this rank's last step that lived on."""
    resumes: list[tuple[float, float]] = []
    for event in events:
        if event["kind"] == "start" and event.get("rank") == 0 and (step := event.get("resumed_from_step")) is not None:
            steps = (event.get("resumes") or [[step]])[-1]
            resumes.append((event["time"], steps[1 + rank] if 1 + rank < len(steps) else steps[0]))
    return resumes


def runs_in(folder: Path) -> list[Path]:
    """The runs of a folder that have logs, the newest first."""
    by_time = []
    for path in Path(folder).glob("*/logs"):
        with contextlib.suppress(OSError):  # removed at this moment
            by_time.append((path.stat().st_mtime, path.parent))
    return [path for _, path in sorted(by_time, reverse=True)]
