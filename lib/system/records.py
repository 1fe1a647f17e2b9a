"""The records of a run: one JSON object a line, one file a rank, flushed as they happen. All that a person sees of a
run comes from them: the console and the trackers subscribe, the dashboard reads the files."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import math
import os
import re
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from io import FileIO
from pathlib import Path
from typing import Any, NamedTuple

from lib.system import files

PIECE_BYTES = 2**20  # of a log, in one collective
Record = dict[str, Any]  # one line of a log; docs/runs.md has a table of the kinds and their fields
PlanRecord = Record  # a plan, as the records `start` and `plan` have it
SettingsRecord = Record  # the settings that a run was started with, section by section
Subscriber = Callable[[Record], str | None]  # takes each record as it is made; returns a warning
Ranks = Any  # a World, as far as it gathers and broadcasts texts


# ---- Writing


class Arithmetic(NamedTuple):
    """The cost of a rank's tokens: 4 operations a parameter and token with adapters, 6 with all weights (NeMo)."""

    flops_per_token: float = 0.0
    matrix_flops_per_second: float | None = None  # measured, of the rank's device

    def rates(self, tokens: float, computed_tokens: float, seconds: float) -> dict[str, float]:
        """Rates of real tokens, and of computed ones (with padding); of the measured rate the computed ones' share."""
        rates = {"computed_tokens_per_second": computed_tokens / seconds}
        for name, count in (("tflops", tokens), ("computed_tflops", computed_tokens)) if self.flops_per_token else ():
            rates[name] = self.flops_per_token * count / seconds / 1e12
        if self.flops_per_token and self.matrix_flops_per_second:
            rates["matrix_rate_share"] = 1e12 * rates["computed_tflops"] / self.matrix_flops_per_second
        return rates


class PerformanceTracker:
    """Writes one rank's records and sums up what it did. Every record has `kind`, `time`, `rank` and `host`."""

    def __init__(self, log_path: Path, rank: int = 0, host: str = "localhost", subscribers: Sequence[Subscriber] = ()):
        self.log_path, self.rank, self.host, self.subscribers = Path(log_path), rank, host, list(subscribers)
        self.examples, self.seconds, self.peak_memory_bytes = 0, 0.0, 0
        self.parts = {"compute_seconds": 0.0, "sync_seconds": 0.0, "wait_seconds": 0.0, "tokens": 0, "padded_tokens": 0}
        self.arithmetic = Arithmetic()
        self._file: FileIO | None = None
        self._unwritten = b""  # for want of room on the disk
        self._copies = LogCopies(self.log_path)

    def record(self, kind: str, **fields: Any) -> Record:
        """Appends one record and flushes it. While the disk is full it is kept in memory. Raises OSError: the disk is
        full at the first record, or not writable."""
        entry: Record = {"kind": kind, "time": time.time(), "rank": self.rank, "host": self.host} | fields
        faults = [fault for take in self.subscribers if (fault := take(entry)) is not None]
        line, had_room = dumps(entry).encode() + b"\n", not self._unwritten
        if is_first := self._file is None:
            self.log_path.parent.mkdir(parents=True, exist_ok=True)
            self._file = self.log_path.open("ab", buffering=0)
            self._copies.began = self._file.tell(), line
        self._unwritten += line
        try:
            self.flush()
        except OSError as error:
            if is_first or error.errno not in (errno.ENOSPC, errno.EDQUOT):
                raise
            if had_room:
                text = f"warning: {self.log_path}: {error.strerror}; records are kept in memory until there is room"
                print(text, file=sys.stderr, flush=True)
        for fault in faults:
            self.record("warning", step=entry.get("step", 0) or 0, text=fault)
        return entry

    def flush(self) -> None:
        """Writes what was kept in memory. Raises OSError: there is still no room for it."""
        try:
            while self._unwritten and self._file is not None:
                self._unwritten = self._unwritten[self._file.write(self._unwritten) :]
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
        rate = batch_size / batch_time if batch_time > 0 else 0.0
        step = {"step": batch_num, "pairs": batch_size, "step_seconds": batch_time, "pairs_per_second": rate}
        if "padded_tokens" in fields and batch_time > 0:
            fields |= self.arithmetic.rates(fields["tokens"], fields["padded_tokens"], batch_time)
        return self.record("step", **step, loss=loss, kl=kl, **fields)

    def log_merge(self, step: int, merged: Mapping[str, Any]) -> None:
        """Records a round's end: what this rank waited for the others counts as its time, and so does the merge."""
        self.seconds += merged["waited_seconds"] + merged["seconds"]
        self.parts["wait_seconds"] += merged["waited_seconds"]
        self.parts["sync_seconds"] += merged["seconds"]
        self.record("merge", step=step, **merged)

    def gather(self, world: Ranks, everything: bool = False) -> None:
        """Brings the other ranks' logs to rank 0's machine, as `logs/HOST/rank-001.jsonl`; all ranks call it.
        everything: all that is left of the logs, instead of one piece."""
        self._copies.gather(world, self.host, everything)

    def get_average_throughput(self) -> float:
        """Pairs a second over all logged batches; 0 before the first."""
        return self.examples / self.seconds if self.seconds else 0.0

    def totals(self) -> dict[str, object]:
        """What this rank did in all logged steps."""
        totals = {"rank": self.rank, "host": self.host, "pairs": self.examples, "seconds": self.seconds, **self.parts}
        return {**totals, **self.arithmetic._asdict(), "peak_memory_bytes": self.peak_memory_bytes}

    def close(self) -> None:
        """Writes what was kept in memory and closes the log."""
        if self._file is not None:
            self.flush()
            self._file.close()
            self._file = None


# ---- Logs that grow, and copies of them on another machine


class Tail:
    """The whole lines of a file, a piece at a time; from the start again, where it was replaced or truncated."""

    def __init__(self, path: Path):
        self.path, self.offset = Path(path), 0  # of the next line
        self._file: tuple[int, int] | None = None

    def read(self, limit_bytes: int = 4 * PIECE_BYTES) -> tuple[bool, bytes]:
        """Whether this is the beginning of the file, and its next whole lines: nothing where there are none yet."""
        try:
            with self.path.open("rb") as file:
                status = os.fstat(file.fileno())
                if (status.st_dev, status.st_ino) != self._file or status.st_size < self.offset:
                    self._file, self.offset = (status.st_dev, status.st_ino), 0
                file.seek(self.offset)
                piece = file.read(limit_bytes)
                if b"\n" not in piece:
                    piece += file.readline()
        except OSError:  # not there yet, or no longer, or its disk is away
            return False, b""
        lines = piece[: piece.rfind(b"\n") + 1]
        begins = self.offset == 0 and bool(lines)
        self.offset += len(lines)
        return begins, lines


class LogCopies:
    """The logs of ranks on other machines, as copies below rank 0's own: `logs/HOST/rank-001.jsonl`."""

    def __init__(self, log_path: Path):
        self.log_path = log_path
        self.began = 0, b""  # where in the log this process began, and its first line: rank 0 looks for it
        self._missed: list[int] | None = None  # ranks whose logs rank 0's machine does not have
        self._tail = Tail(log_path)

    def gather(self, world: Ranks, host: str, everything: bool) -> None:
        """Copies the next piece of every log that rank 0's machine lacks; all ranks call it."""
        if self._missed is None:
            offset, line = self.began
            facts = json.dumps([offset, len(line), hashlib.sha256(line).hexdigest()])
            ranks = enumerate(map(json.loads, world.gather_text(facts, "the beginning of every rank's log")))
            missed = [rank for rank, began in ranks if not self._has(rank, *began)] if world.rank == 0 else []
            self._missed = json.loads(world.broadcast_text(json.dumps(missed)))
        while self._missed:
            piece = ""
            if world.rank in self._missed:
                begins, lines = self._tail.read(PIECE_BYTES)
                piece = json.dumps([host, begins, lines.decode("latin-1")]) if lines else ""
            pieces = world.gather_text(piece, "every rank's records")
            for rank, text in enumerate(pieces if world.rank == 0 else ()):
                if text:
                    self._write(rank, *json.loads(text))
            if not everything or not any(pieces):
                return

    def _has(self, rank: int, offset: int, length: int, digest: str) -> bool:
        """Whether this machine has the log that a rank's process wrote."""
        with contextlib.suppress(OSError), (self.log_path.parent / f"rank-{rank:03d}.jsonl").open("rb") as file:
            file.seek(offset)
            return hashlib.sha256(file.read(length)).hexdigest() == digest
        return False

    def _write(self, rank: int, host: str, begins: bool, lines: str) -> None:
        copy = self.log_path.parent / re.sub(r"[^\w-]", "_", host) / f"rank-{rank:03d}.jsonl"
        with contextlib.suppress(OSError):  # without room a copy has a gap, and the rank still has its log
            copy.parent.mkdir(parents=True, exist_ok=True)
            with copy.open("wb" if begins else "ab") as file:
                file.write(lines.encode("latin-1"))


# ---- Reading, and going back


def read_records(path: Path) -> Iterator[Record]:
    """The whole records of a log; a last line that a crash cut short is left out."""
    with path.open("rb") as file:
        yield from (record for line in file if (record := _record_of(line)) is not None)


def _record_of(line: bytes) -> Record | None:
    with contextlib.suppress(ValueError):
        record = json.loads(line)
        if isinstance(record, dict) and "kind" in record and isinstance(record.get("step"), int | None):
            return record
    return None


def rewind(path: Path, step: int) -> int:
    """Cuts a log back to a checkpoint's step; what is cut goes to `discarded/` beside it. How many lines were cut."""
    lines, whole = path.read_bytes().splitlines(keepends=True), 0
    for line in lines:
        entry = _record_of(line)
        if entry is None or not line.endswith(b"\n") or (entry.get("step") or 0) > step or entry["kind"] == "end":
            break
        whole += 1
    if whole < len(lines):
        discarded = path.parent / "discarded" / path.name
        discarded.parent.mkdir(exist_ok=True)
        with discarded.open("ab") as log:
            log.write(b"".join(lines[whole:]).removesuffix(b"\n") + b"\n")
        files.write_atomically(path, b"".join(lines[:whole]))
    return len(lines) - whole


def first_missed(path: Path, resumes: Sequence[Sequence[int]], ids: Sequence[str], index: int = 0) -> int:
    """The last step of a log that belongs to the history which a resumed run goes on with: a host that was lost and is
    back still has the steps that the others undid without it. resumes: one entry a resume: its step and, where ranks
    count their own steps, every rank's. ids: of each resume. index: of this log's steps in such an entry."""
    start = Record()
    for entry in read_records(path):
        start = entry if entry["kind"] == "start" else start
    own, own_ids = start.get("resumes") or [], start.get("resume_ids") or []
    common = len(os.path.commonprefix([list(own_ids), list(ids)]))
    undone = [*resumes[common:], *own[common:]] or resumes[-1:]
    return min(resume[index] if index < len(resume) else resume[0] for resume in undone)


# ---- JSON that every reader accepts: it has no NaN


def dumps(value: Any, indent: int | None = None) -> str:
    """A value as JSON text; figures that are not finite become null."""
    return json.dumps(_finite(value), indent=indent, allow_nan=False)


def read_lines(path: Path) -> list[Any]:
    """The values of a file with one a line."""
    with path.open("rb") as file:
        return [json.loads(line) for line in file]


def _finite(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return value
