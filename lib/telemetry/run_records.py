"""The records of a run: one JSON object a line, one file a rank, flushed as they happen."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import itertools
import json
import os
import sys
import threading
import time
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from io import FileIO
from pathlib import Path
from typing import IO, Annotated, Any, Protocol, cast

from pydantic import Field, TypeAdapter, ValidationError

from lib.system import files
from lib.system.hardware import sensors
from lib.system.network import connections
from lib.system.records import dumps
from lib.telemetry.log_tail import LONGEST_LINE, Copy, Tail
from lib.telemetry.record_types import Record
from lib.telemetry.trackers import Feed

NETWORK_SECONDS = 10.0  # between records of the network
SENSORS_SECONDS = 15.0  # between records of temperature and power
PIECE_BYTES = 2**20  # of a log, in one collective at the end of a run
MOVED_BYTES = (
    2**30
)  # what is cut of a log is copied up to so much: millions of steps; a file of somebody else's may be larger
_HISTORY = TypeAdapter(tuple[list[Annotated[list[int], Field(min_length=1)]], list[str]])
GATHERED_PIECES = 64  # the most collectives at the end of a run


class Ranks(Protocol):
    """What is needed of a World."""

    @property
    def rank(self) -> int: ...
    def gather_long_text(self, text: str, what: str) -> list[str]: ...
    def broadcast_text(self, text: str) -> str: ...


class PerformanceTracker:
    """Writes one rank's records and sums up what it did.

    Every record has `kind`, `time` (Unix seconds), `rank` and `host`.
    lib/telemetry/record_types.py says what records of a kind hold.
    """

    def __init__(self, log_path: Path, rank: int = 0, host: str = "localhost", feed: Feed | None = None):
        self.log_path, self.rank, self.host, self.feed = Path(log_path), rank, host, feed
        self.examples = 0
        self.seconds = 0.0
        self.parts = {"compute_seconds": 0.0, "sync_seconds": 0.0, "wait_seconds": 0.0}
        self.peak_memory_bytes = 0
        self._file: FileIO | None = None
        self._bytes_sent, self._sync_seconds = 0, 0.0  # since the network's last record
        self._network_logged, self._sensed = -NETWORK_SECONDS, -SENSORS_SECONDS
        self._sensors: dict[str, float] = {}  # what the last look at them found, if it is not written yet
        self._unwritten = b""  # for want of room on the disk
        self._began = 0, b""  # where in the log this process began, and its first line
        self._missed: list[int] | None = None  # ranks whose logs rank 0's machine does not have
        self._tail, self._copies = Tail(self.log_path), dict[int, Copy]()

    def record(self, kind: str, **fields: Any) -> Record:
        """Appends one record and flushes it. While the disk is full it is kept in memory.

        Raises:
            OSError: the disk is full at the first record, or not writable.
        """
        known = {"kind": kind, "time": time.time(), "rank": self.rank, "host": self.host}
        entry = cast(Record, known | fields)
        if self.feed is not None:
            self.feed.take(entry)
        if self._file is None:
            self.log_path.parent.mkdir(parents=True, exist_ok=True)
            self._file = self.log_path.open("ab", buffering=0)
            line = dumps(entry)
            self._began = self._file.tell(), line.encode()
            self._write(line)
        else:
            self._append(entry)
        self._record_faults(entry.get("step", 0) or 0)
        return entry

    def _record_faults(self, step: int) -> None:
        while self.feed is not None and self.feed.faults:
            self.record("warning", step=step, text=self.feed.faults.pop(0))

    def _append(self, entry: Record) -> None:
        had_room = not self._unwritten
        try:
            self._write(dumps(entry))
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT):  # of the disk, or of this user
                raise
            if had_room:
                text = f"warning: {self.log_path}: {error.strerror}; records are kept in memory until there is room"
                print(text, file=sys.stderr, flush=True)

    def _write(self, line: str = "") -> None:
        assert self._file is not None
        self._unwritten += f"{line}\n".encode() if line else b""
        while self._unwritten:
            self._unwritten = self._unwritten[self._file.write(self._unwritten) :]

    @property
    def has_unwritten(self) -> bool:
        """Whether records wait in memory for room on the disk."""
        return bool(self._unwritten)

    def flush(self) -> None:
        """Writes what was kept in memory.

        Raises:
            OSError: there is still no room for it.
        """
        try:
            self._write()
        except OSError as error:
            raise OSError(error.errno, error.strerror, str(self.log_path)) from None

    def log_batch(
        self, batch_num: int, batch_size: int, batch_time: float, loss: float | None, kl: float | None, **fields: Any
    ) -> Record:
        """Records one step: `batch_num` is the step, `batch_size` this rank's pairs, `batch_time` its seconds."""
        self.examples += batch_size
        self.seconds += batch_time
        self.parts = {name: seconds + fields.get(name, 0.0) for name, seconds in self.parts.items()}
        self.peak_memory_bytes = max(self.peak_memory_bytes, fields.get("peak_memory_bytes", 0))
        self._log_network(batch_num, fields.get("bytes_sent", 0), fields.get("sync_seconds", 0.0))
        self._log_sensors(batch_num)
        rate = batch_size / batch_time if batch_time > 0 else 0.0
        return self.record(
            "step",
            step=batch_num,
            pairs=batch_size,
            step_seconds=batch_time,
            pairs_per_second=rate,
            loss=loss,
            kl=kl,
            **fields,
        )

    def log_merge(self, step: int, merged: Mapping[str, Any]) -> None:
        """Records a round's end: what this rank waited for the others counts as its time, and so does the merge."""
        self.seconds += merged["waited_seconds"] + merged["seconds"]
        self.parts["wait_seconds"] += merged["waited_seconds"]
        self.parts["sync_seconds"] += merged["seconds"]
        self._log_network(step, merged["bytes_sent"], merged["seconds"])
        self.record("merge", step=step, **merged)

    def _log_network(self, step: int, bytes_sent: int, sync_seconds: float) -> None:
        """Every ten seconds: what the syncs of these steps saw of the network, and the kernel of every connection."""
        self._bytes_sent += bytes_sent
        self._sync_seconds += sync_seconds
        if not self._bytes_sent or time.monotonic() - self._network_logged < NETWORK_SECONDS:
            return
        rate = self._bytes_sent / self._sync_seconds if self._sync_seconds else None
        links = connections()
        self.record("network", step=step, bytes_sent=self._bytes_sent, bytes_per_second=rate, connections=links)
        self._bytes_sent, self._sync_seconds, self._network_logged = 0, 0.0, time.monotonic()

    def _log_sensors(self, step: int) -> None:
        """Reads the sensors once in a while, in a thread: on some systems that runs a command, and no step waits."""
        if self._sensors:
            self.record("sensors", step=step, **self._sensors)
            self._sensors = {}
        if time.monotonic() - self._sensed >= SENSORS_SECONDS:
            self._sensed = time.monotonic()
            threading.Thread(target=self._look_at_sensors, name="sensors").start()

    def _look_at_sensors(self) -> None:
        self._sensors = sensors()

    def gather(self, world: Ranks, everything: bool = False) -> None:
        """Brings the other ranks' logs to rank 0's machine, as `logs/HOST/rank-001.jsonl`.

        All ranks call it. Nothing travels where ranks share a disk, or a launcher copies already.

        everything: all that is left of the logs, instead of one piece.
        """
        if self._missed is None:
            offset, line = self._began
            facts = json.dumps([offset, len(line), hashlib.sha256(line).hexdigest()])
            ranks = enumerate(map(json.loads, world.gather_long_text(facts, "where every rank's log began")))
            missed = [rank for rank, began in ranks if not self._has(rank, *began)] if world.rank == 0 else []
            self._missed = json.loads(world.broadcast_text(json.dumps(missed)))
        for _ in range(GATHERED_PIECES if everything else 1):
            if not self._missed:
                return
            piece = ""
            if self.rank in self._missed:
                before = self._tail.offset
                begins, lines = self._tail.read(PIECE_BYTES if everything else PIECE_BYTES // 8)
                piece = json.dumps([self.host, 0 if begins else before, lines.decode("latin-1")]) if lines else ""
            pieces = world.gather_long_text(piece, "every rank's records")
            if world.rank == 0:
                self._keep(pieces)
            if not any(pieces):
                return

    def _has(self, rank: int, offset: int, length: int, digest: str) -> bool:
        """Whether this machine has the log that a rank's process wrote, its own or a copy."""
        name = f"rank-{rank:03d}.jsonl"
        for path in (self.log_path.parent / name, *self.log_path.parent.glob(f"*/{name}")):
            with contextlib.suppress(OSError), path.open("rb") as file:
                file.seek(offset)
                if hashlib.sha256(file.read(length)).hexdigest() == digest:
                    return True
        return False

    def _keep(self, pieces: Sequence[str]) -> None:
        for rank, piece in enumerate(pieces):
            if piece:
                host, offset, lines = json.loads(piece)
                with contextlib.suppress(OSError):  # without room a copy has a gap, and the rank still has its log
                    copy = self._copies.setdefault(rank, Copy(self.log_path.parent, host))
                    copy.write(rank, offset, lines.encode("latin-1"))

    def get_average_throughput(self) -> float:
        """Pairs a second over all logged batches; 0 before the first."""
        return self.examples / self.seconds if self.seconds else 0.0

    def totals(self) -> dict[str, object]:
        """What this rank did in all logged steps."""
        did = {"pairs": self.examples, "seconds": self.seconds, **self.parts}
        return {"rank": self.rank, "host": self.host, **did, "peak_memory_bytes": self.peak_memory_bytes}

    def close(self, step: int = 0) -> None:
        """Closes the sinks and the log; step: the last."""
        if self.feed is not None:
            self.feed.close()
        if self._file is not None:
            self._record_faults(step)
            self.flush()
            self._file.close()
            self._file = None


def read_records(path: Path) -> Iterator[Record]:
    """The whole records of a log; a last line that a crash cut short is left out, and what is no record.

    One after the other: all of them together may take more memory than there is.
    """
    with path.open("rb") as file:
        yield from (record for line in lines_of(file) if (record := _record_of(line)) is not None)


def lines_of(file: IO[bytes]) -> Iterator[bytes]:
    """The lines of a log, which may be somebody else's: up to one that is too long, behind which there is no log."""
    return itertools.takewhile(lambda line: len(line) < LONGEST_LINE, _pieces_of(file))


def _pieces_of(file: IO[bytes]) -> Iterator[bytes]:
    """The lines of a log; one that is too long in pieces."""
    return iter(lambda: file.readline(LONGEST_LINE), b"")


def _record_of(line: bytes) -> Record | None:
    if not line.startswith(b"{"):
        return None
    try:
        record = json.loads(line)
    except (ValueError, RecursionError):
        return None
    is_record = isinstance(record, dict) and isinstance(record.get("kind"), str)
    return cast(Record, record) if is_record and isinstance(record.get("step"), int | None) else None


def rewind(path: Path, step: int) -> int:
    """Cuts a log back to a checkpoint's step, so that it holds the history of the weights that training goes on with.

    What is cut (steps that a crash undid, and half a line, maybe) is kept beside it in `discarded/`. A line that is no
    record, or too long for one, is cut with all that follows: nobody reads beyond it. Returns the number of lines cut.
    Of more than MOVED_BYTES no copy is made: the log goes there as it is, by a name of its own, and counts as one line.
    """
    with path.open("rb") as file:
        pieces, kept_bytes = _pieces_of(file), 0
        for piece in pieces:
            entry = _record_of(piece)
            is_whole = piece.endswith(b"\n") and len(piece) < LONGEST_LINE
            if entry is None or not is_whole or (entry.get("step") or 0) > step or entry["kind"] == "end":
                break
            kept_bytes += len(piece)
        else:
            return 0
        discarded = path.parent / "discarded" / path.name
        discarded.parent.mkdir(exist_ok=True)
        is_moved = os.fstat(file.fileno()).st_size - kept_bytes > MOVED_BYTES
        cut = 1 if is_moved else _append(discarded, itertools.chain([piece], pieces))
        file.seek(0)
        with files.replacing(path) as shortened:
            while piece := file.read(min(kept_bytes, PIECE_BYTES)):
                kept_bytes -= shortened.write(piece)
            if is_moved:
                path.rename(next(name for n in itertools.count(1) if not (name := Path(f"{discarded}.{n}")).exists()))
    return cut


def _append(discarded: Path, pieces: Iterable[bytes]) -> int:
    """Adds what is cut of a log to a file, whose last line is whole then; returns the number of lines."""
    lines, is_end = 0, True
    with discarded.open("ab") as file:
        for piece in pieces:
            file.write(piece)
            lines += (is_end := piece.endswith(b"\n"))
        if not is_end:
            file.write(b"\n")
    return lines + (not is_end)


def first_missed(path: Path, resumes: Sequence[Sequence[int]], ids: Sequence[str], place: int = 0) -> int:
    """The last step of a log that belongs to the history which a resumed run goes on with.

    A host that was lost and is back still has the steps that the others undid without it. Two hosts that were lost in
    turn each went on alone from the last step that they had in common: each has its own steps in its own log, and only
    one of the two histories goes on.

    Args:
        resumes: one entry a resume: its step and, where ranks count their own steps, every rank's.
        ids: of each resume, drawn when it happened.
        place: index of this log's steps in such an entry.
    """
    starts = deque((entry for entry in read_records(path) if entry["kind"] == "start"), maxlen=1)
    own, own_ids = _history_of(starts[0]) if starts else ([], [])
    common = sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], zip(own_ids, ids, strict=False)))
    undone = [*resumes[common:], *own[common:]] or resumes[-1:]
    return min(resume[place] if place < len(resume) else resume[0] for resume in undone)


def _history_of(start: Record) -> tuple[list[list[int]], list[str]]:
    """The resumes of a start's record and their ids; none where it is somebody else's."""
    own = start.get("resumes") or []
    ids = start.get("resume_ids", [""] * len(own) if isinstance(own, list) else None) or []
    try:
        return _HISTORY.validate_python((own, ids))
    except ValidationError:
        return [], []
