"""A run's records in bounded memory, as its logs grow: curves, events, and the figures that follow from them.

    run = Run(Path("runs/NAME"))
    while run.read():                            # False: all that was written has been read
        ...
    run.curve(0, "loss"), run.events, figures(run, time.time())

A log may have millions of records. It is read by byte offset, and records become buckets: while there are few a bucket
is a record, later the mean, least and greatest value of 2, 4, 8, ... records (as much as a screen can show). Of a long log the
first look takes records at even distances, so that there is something to see at once; the whole is read after it.
"""

from __future__ import annotations

import json
import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from lib.config import Config, Cost
from lib.performance import hosts_cost
from lib.tail import Tail

COLUMNS: tuple[str, ...] = ("step", "time", "pairs", "tokens", "loss", "kl", "reward_accuracy", "reward_margin")
COLUMNS += ("grad_norm", "learning_rate", "step_seconds", "compute_seconds", "sync_seconds", "wait_seconds")
COLUMNS += ("peak_memory_bytes", "bytes_sent", "skipped")
INDEX = {name: index for index, name in enumerate(COLUMNS)}
CAPACITY = 1024  # buckets, at least, once there are so many records
RECENT = 20  # records behind the figures of the moment
GLANCE_BYTES = 2**24  # of a longer log the first look takes samples
GLANCE_RECORDS = 1500
LINE_BYTES = 2**13  # most step records are shorter
STEP = b'{"kind": "step", '
SILENT_SECONDS = 60.0

Who = tuple[int, str]  # rank and host


class Series:
    """Step records of one rank as buckets: for every column its sum, count, least and greatest value; never a mean of means."""

    def __init__(self, capacity: int = CAPACITY):
        self.capacity, self.width = capacity, 1  # records in a bucket
        empty = np.empty((0, len(COLUMNS)))
        self.sums, self.counts, self.least, self.greatest = empty, empty, empty, empty
        self.rest = empty  # the records of the last bucket, which is not full
        self.totals, self.count = np.zeros(len(COLUMNS)), 0
        self.recent: deque[np.ndarray] = deque(maxlen=RECENT)

    def append(self, rows: np.ndarray) -> None:
        """rows: float64 [N, len(COLUMNS)], NaN for what a record does not have."""
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
        """Means, least and greatest values, each [buckets, len(COLUMNS)], the unfinished bucket included."""
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
        self.series: dict[Who, Series] = {}
        self.events: list[dict[str, Any]] = []  # all records but steps
        self.length = 0  # when it was opened
        self.glance: Log | None = None  # what the first look at a long log gave

    def read(self) -> bool:
        """Takes in the next piece; False where there is nothing new."""
        if self.tail.offset == 0 and self.glance is None:
            self.length = _size(self.tail.path)
            if self.length > GLANCE_BYTES:
                self.glance = _glance(self.tail.path, self.length)
                return True
        begins, lines = self.tail.read()
        if begins:
            self.series, self.events = {}, []
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
        rows: dict[Who, list[list[Any]]] = {}
        for record in _parse(lines):
            kind, step, time = record.get("kind"), record.get("step"), record.get("time")
            if kind is None or not isinstance(time, int | float):
                continue  # somebody else's record
            if kind == "step" and isinstance(step, int):
                who = (record.get("rank", 0), record.get("host", ""))
                rows.setdefault(who, []).append([record.get(name) for name in COLUMNS])
            elif kind != "step":
                self.events.append(record)
        for who, table in rows.items():
            self.series.setdefault(who, Series()).append(_numbers(table))


def _glance(path: Path, length: int) -> Log:
    """A log as samples at even distances, with its beginning and its end whole."""
    seen = Log(path)
    with path.open("rb") as file:
        seen._take(file.read(LINE_BYTES * 8).splitlines()[:-1])
        begun = file.tell()
        places = np.linspace(begun, length - LINE_BYTES * 16, GLANCE_RECORDS, dtype=np.int64)
        samples = []
        for place in places:
            file.seek(place)
            lines = file.read(LINE_BYTES).split(b"\n")
            samples += [line for line in lines[1:-1] if line.startswith(STEP)][:1]
        seen._take(samples)
        file.seek(length - LINE_BYTES * 16)
        seen._take(file.read().split(b"\n")[1:-1])
    return seen


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return 0


def _parse(lines: list[bytes]) -> list[dict[str, Any]]:
    """Records of lines, at once where all are whole; a line that is none is left out."""
    try:
        found = json.loads(b"[" + b",".join(lines) + b"]")
    except ValueError:
        found = []
        for line in lines:
            try:
                found.append(json.loads(line))
            except ValueError:
                continue
    return [record for record in found if isinstance(record, dict)]


def _numbers(table: list[list[Any]]) -> np.ndarray:
    try:
        return np.array(table, dtype=np.float64)
    except (TypeError, ValueError):  # somebody else's records
        return np.array([[_number(value) for value in row] for row in table], dtype=np.float64)


def _number(value: Any) -> float:
    return float(value) if isinstance(value, int | float) else math.nan


# ---- A run: all its logs


@dataclass(frozen=True)
class Curve:
    """One quantity of one rank over its steps; all arrays have the same length."""

    steps: np.ndarray
    values: np.ndarray  # means of buckets
    least: np.ndarray
    greatest: np.ndarray
    width: int  # records in a bucket; 1: every record


class Run:
    """A run's folder, read as it grows: its ranks' logs, and copies of those of other hosts."""

    def __init__(self, folder: Path):
        self.folder = Path(folder)
        self.logs: dict[Path, Log] = {}
        self.version = 0  # changes with what there is to see

    @property
    def name(self) -> str:
        return self.folder.resolve().name

    def read(self) -> bool:
        """Takes in a piece of every log; False where there was nothing new in any."""
        logs = self.folder / "logs"
        for path in (*logs.glob("rank-*.jsonl"), *logs.glob("*/rank-*.jsonl")):
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
    def events(self) -> list[dict[str, Any]]:
        """All records but steps, by time; of two copies of one file each record once."""
        found = {(e["time"], e["kind"], e.get("rank"), e.get("host")): e for log in self._shown() for e in log.events}
        return sorted(found.values(), key=lambda event: event["time"])

    @property
    def series(self) -> dict[Who, Series]:
        """Step records by rank and host, in the order of ranks; of two copies of one file the longer."""
        found: dict[Who, Series] = {}
        for log in self._shown():
            for who, one in log.series.items():
                if who not in found or one.count > found[who].count:
                    found[who] = one
        return dict(sorted(found.items()))

    def curve(self, who: Who, name: str, over: str | None = None) -> Curve:
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
            return Curve(steps, values, least[keep, column], greatest[keep, column], series.width)
        below = means[keep, INDEX[over]]
        ratio = np.divide(values, below, out=np.full(len(values), np.nan), where=below > 0)
        return Curve(steps, ratio, ratio, ratio, series.width)

    def _shown(self) -> list[Log]:
        return [log.shown() for _, log in sorted(self.logs.items())]


def _resumes(events: Sequence[dict[str, Any]], rank: int) -> list[tuple[float, float]]:
    """When the run was taken up again, and this rank's last step that lived on."""
    found = []
    for event in events:
        if event["kind"] == "start" and event.get("rank") == 0 and event.get("resumed_from_step") is not None:
            steps = (event.get("resumes") or [[event["resumed_from_step"]]])[-1]
            found.append((event["time"], steps[1 + rank] if 1 + rank < len(steps) else steps[0]))
    return found


# ---- What follows from the records


@dataclass(frozen=True)
class RankFigures:
    """One rank, now: means over its last records."""

    rank: int
    host: str
    share: int | None  # pairs a step
    step: int
    heard_seconds: float  # since its last record
    pairs_per_second: float
    planned_pairs_per_second: float | None
    compute_seconds: float
    sync_seconds: float
    wait_seconds: float
    peak_memory_bytes: float
    memory_limit_bytes: float | None
    bytes_per_second: float | None  # sent while it syncs
    temperature_celsius: float | None = None
    power_watts: float | None = None


@dataclass(frozen=True)
class Figures:
    """A run, now."""

    state: str  # waiting, running, silent, finished
    strategy: str | None
    reason: str | None
    step: int
    steps: int | None
    latest: dict[str, float | None]  # of the newest step
    held_out: dict[str, Any]  # of the newest evaluation
    pairs_per_second: float
    planned_pairs_per_second: float | None
    efficiency: float | None  # eta; None where the hosts were never measured
    busy: float | None  # part of their time that ranks compute
    elapsed_seconds: float
    left_seconds: float | None
    cost: dict[str, Any] | None  # so far
    cost_at_end: dict[str, Any] | None
    restarts: int
    warnings: int
    ranks: list[RankFigures] = field(default_factory=list)


def figures(run: Run, now: float) -> Figures:
    """Everything that a person asks first. now: Unix seconds."""
    events, series = run.events, run.series
    starts = [event for event in events if event["kind"] == "start"]
    start = starts[-1] if starts else {}
    plans = [start.get("plan"), *(event for event in events if event["kind"] == "plan")]
    plan: dict[str, Any] = next((plan for plan in reversed(plans) if plan), {})
    hosts = [rank["host"] for rank in plan.get("ranks", [])]
    # Who is in the run now: as the plan has them, wherever a rank was before.
    present = {who: one for who, one in series.items() if not hosts or who in list(enumerate(hosts))} or series
    ranks = [_rank_figures(who, one, plan, events, now) for who, one in present.items()]
    step = max((rank.step for rank in ranks), default=0)
    first, last = _span(events, series)
    ended = bool(starts) and any(event["kind"] == "end" and event["time"] > start["time"] for event in events)
    pace = max((_seconds_a_record(one) for one in present.values()), default=0.0)
    silent = now - last > max(SILENT_SECONDS, 20 * pace)
    speed = sum(rank.pairs_per_second for rank in ranks)
    solo, steps = plan.get("solo_sum_pairs_per_second"), start.get("steps")
    left = None
    if steps and pace and not ended:
        apart = plan.get("strategy") == "independent"  # then each rank counts steps of its own, but all count pairs
        done = sum(one.totals[INDEX["pairs"]] for one in present.values()) / plan.get("global_batch_size", 1)
        left = max(0.0, steps - (done if apart else step)) * pace / (max(len(present), 1) if apart else 1)
    elapsed = (last if ended or silent else max(now, last)) - first if last else 0.0
    costs = _cost(hosts or [who[1] for who in series], start)
    seconds = np.array([[rank.compute_seconds, rank.sync_seconds, rank.wait_seconds] for rank in ranks])
    newest = max(present.values(), key=lambda one: one.recent[-1][INDEX["time"]], default=None)
    row = newest.recent[-1] if newest else np.full(len(COLUMNS), np.nan)
    evaluations = [event for event in events if event["kind"] == "evaluation" and event.get("rank") == 0]
    return Figures(
        state="finished" if ended else "waiting" if not last else "silent" if silent else "running",
        strategy=plan.get("strategy"),
        reason=plan.get("reason"),
        step=step,
        steps=steps,
        latest={name: _or_none(row[index]) for name, index in INDEX.items()},
        held_out=evaluations[-1] if evaluations else {},
        pairs_per_second=speed,
        planned_pairs_per_second=plan.get("predicted_pairs_per_second") if plan.get("calibrated") else None,
        efficiency=speed / solo if solo and plan.get("calibrated") and speed else None,
        busy=float(seconds[:, 0].sum() / seconds.sum()) if len(seconds) and seconds.sum() > 0 else None,
        elapsed_seconds=elapsed,
        left_seconds=left,
        cost=costs(elapsed),
        cost_at_end=costs(elapsed + (left or 0.0)),
        restarts=max(0, sum(event.get("rank") == 0 for event in starts) - 1),
        warnings=sum(event["kind"] == "warning" for event in events),
        ranks=ranks,
    )


def _rank_figures(
    who: Who, series: Series, plan: dict[str, Any], events: Sequence[dict[str, Any]], now: float
) -> RankFigures:
    rank, host = who
    rows = np.array(series.recent)
    mean = {name: _or_none(_mean(rows[:, index])) or 0.0 for name, index in INDEX.items()}
    shares, step_seconds = plan.get("shares") or [], plan.get("predicted_step_seconds")
    share = shares[rank] if rank < len(shares) else None
    own = [event for event in events if event.get("rank") == rank and event.get("host") == host]
    limit = next((e["memory_limit_bytes"] for e in reversed(own) if e.get("memory_limit_bytes")), None)
    sensed: dict[str, Any] = next((e for e in reversed(events) if e["kind"] == "sensors" and e["host"] == host), {})
    return RankFigures(
        rank=rank,
        host=host,
        share=share,
        step=int(rows[-1, INDEX["step"]]),
        heard_seconds=now - rows[-1, INDEX["time"]],
        pairs_per_second=mean["pairs"] / mean["step_seconds"] if mean["step_seconds"] else 0.0,
        planned_pairs_per_second=share / step_seconds if plan.get("calibrated") and share and step_seconds else None,
        compute_seconds=mean["compute_seconds"],
        sync_seconds=mean["sync_seconds"],
        wait_seconds=mean["wait_seconds"],
        peak_memory_bytes=_or_none(np.fmax.reduce(rows[:, INDEX["peak_memory_bytes"]])) or 0.0,
        memory_limit_bytes=limit,
        bytes_per_second=mean["bytes_sent"] / mean["sync_seconds"] if mean["sync_seconds"] else None,
        temperature_celsius=sensed.get("temperature_celsius"),
        power_watts=sensed.get("power_watts"),
    )


def _seconds_a_record(series: Series) -> float:
    """From one record to the next, evaluations and checkpoints between them included."""
    times = [row[INDEX["time"]] for row in series.recent]
    return (times[-1] - times[0]) / (len(times) - 1) if len(times) > 1 else 0.0


def _span(events: Sequence[dict[str, Any]], series: dict[Who, Series]) -> tuple[float, float]:
    """The times of the first and the last record; zeros where there is none."""
    times = [event["time"] for event in (*events[:1], *events[-1:])]
    times += [row[INDEX["time"]] for one in series.values() for row in (one.table()[0][0], one.recent[-1])]
    return (min(times), max(times)) if times else (0.0, 0.0)


def _cost(hosts: Sequence[str], start: dict[str, Any]) -> Any:
    settings = Cost(**start.get("config", {}).get("cost", {})) if start else Cost()
    return lambda seconds: hosts_cost(hosts, seconds, settings)


def _mean(values: np.ndarray) -> float:
    known = values[~np.isnan(values)]
    return float(known.mean()) if len(known) else math.nan


def _or_none(value: float) -> float | None:
    return float(value) if math.isfinite(value) else None


def runs_in(folder: Path) -> list[Path]:
    """The runs of a folder that have logs, the newest first."""
    found = [path.parent for path in Path(folder).glob("*/logs") if path.is_dir()]
    return sorted(found, key=lambda path: path.joinpath("logs").stat().st_mtime, reverse=True)


def config_of(run: Run) -> Config | None:
    """The settings that a run was started with, as its records have them."""
    starts = [event for event in run.events if event["kind"] == "start" and event.get("config")]
    return Config.model_validate(starts[-1]["config"]) if starts else None
