"""What is known of each machine's speed: batch curves, the files that keep them, and the curve that a plan uses.

`calibration/HOST.json` is one `HostCalibration`. `calibration/published/` has the same form for published figures: they
name no model, so they compare machines and predict no times; any measurement overrules them.
"""

from __future__ import annotations

import hashlib
import json
import math
import subprocess
import sys
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Literal

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, ValidationError, computed_field, model_validator

from lib.config.settings import ModelSettings
from lib.errors import UserError
from lib.system import files
from lib.system.hardware import Machine

ROOT = Path(__file__).resolve().parent.parent.parent
FOLDER = ROOT / "calibration"
MEMORY_HEADROOM = 0.1  # of the limit, kept free: a longer row than the probe's, fragmentation, the system's own
PositiveInt = Annotated[int, Field(gt=0)]
PositiveFloat = Annotated[float, Field(gt=0, allow_inf_nan=False)]
NonNegative = Annotated[float, Field(ge=0, allow_inf_nan=False)]


class Stored(BaseModel):
    """A part of a calibration file; keys that another version wrote are left out."""

    model_config = ConfigDict(frozen=True, extra="ignore")


class BatchPoint(Stored):
    """One measured micro-batch: forward and backward over `batch_size` pairs."""

    batch_size: Annotated[int, Field(gt=0, le=2**20)]  # every smaller size is looked at
    seconds_median: PositiveFloat
    seconds_spread: NonNegative = 0.0  # between the quartiles
    peak_memory_bytes: PositiveInt | None = None

    @computed_field  # type: ignore[prop-decorator]
    @property
    def pairs_per_second(self) -> float:
        return self.batch_size / self.seconds_median


class CurveKey(Stored):
    """What a curve was measured with; two curves are comparable when their keys agree."""

    model: str  # as the configuration names it
    method: Literal["lora", "dora", "full"]
    dtype: str
    sequence_length: PositiveInt  # tokens that the model sees, prompt and completion, as padded
    gradient_checkpointing: bool = False
    records: Literal["preference", "unpaired", "sft", "group"] = "preference"  # a pair is two rows of the model's

    def __str__(self) -> str:
        kind = "" if self.records == "preference" else f", {self.records}"
        recomputed = ", gradient checkpointing" if self.gradient_checkpointing else ""
        return f"{self.model}, {self.method}, {self.dtype}, {self.sequence_length} tokens{kind}{recomputed}"

    def at_length(self, sequence_length: int) -> CurveKey:
        return self.model_copy(update={"sequence_length": sequence_length})


class BatchCurve(Stored):
    """Time and memory against micro-batch size, on one machine."""

    points: tuple[BatchPoint, ...]
    memory_limit_bytes: PositiveInt | None = None  # what a process may use there
    key: CurveKey | None = None  # None: published without saying for which model
    step_overhead_seconds: NonNegative = 0.0  # once a step: the update, ...
    gradient_bytes: PositiveInt | None = None  # what a step's collective carries
    slowdown_together: PositiveFloat | None = None  # time while all ranks work, over the time alone
    quick: bool = False
    source: str = "measured"
    measured_at: str | None = None  # ISO 8601
    versions: dict[str, str] = {}  # of mlx, mlx-lm, ...
    note: str = ""

    @model_validator(mode="after")
    def _is_a_curve(self) -> BatchCurve:
        sizes = [point.batch_size for point in self.points]
        if len(sizes) < 2 or sizes != sorted(set(sizes)):
            raise ValueError(f"a curve needs at least 2 rising batch sizes and has {sizes}")
        if len({point.peak_memory_bytes is None for point in self.points}) > 1:
            raise ValueError("peak_memory_bytes is given for some batch sizes only")
        return self

    @classmethod
    def from_rates(
        cls, pairs_per_second: Mapping[int, float], peaks: Mapping[int, int] | None = None, limit: int | None = None
    ) -> BatchCurve:
        """The curve of {batch size: pairs/s}. peaks, limit: of memory, in bytes."""
        points = [
            BatchPoint(batch_size=size, seconds_median=size / rate, peak_memory_bytes=(peaks or {}).get(size))
            for size, rate in sorted(pairs_per_second.items())
        ]
        return cls(points=tuple(points), memory_limit_bytes=limit)

    def seconds(self, batch_sizes: np.ndarray) -> np.ndarray:
        """tau(b), float64, linear between measured sizes; below them the smallest's time, above the largest's rate."""
        sizes = np.array([point.batch_size for point in self.points], dtype=np.float64)
        times = np.array([point.seconds_median for point in self.points])
        return np.interp(batch_sizes, sizes, times) * np.maximum(1.0, batch_sizes / sizes[-1])

    @property
    def best_point(self) -> BatchPoint:
        """The fastest of the measured sizes that fit; where none does, the smallest."""
        fitting = (point for point in self.points if point.batch_size <= self.max_batch_size)
        return max(fitting, key=lambda point: point.pairs_per_second, default=self.points[0])

    @property
    def max_batch_size(self) -> int:
        """The largest measured micro-batch whose peak, linear between sizes, leaves MEMORY_HEADROOM; 0: none."""
        largest = self.points[-1].batch_size
        peaks = [point.peak_memory_bytes for point in self.points]
        if self.memory_limit_bytes is None or peaks[0] is None:
            return largest
        rising_peaks = np.maximum.accumulate(np.array(peaks, dtype=np.float64))
        peak = np.interp(np.arange(1, largest + 1), [point.batch_size for point in self.points], rising_peaks)
        return int(np.sum(peak <= (1 - MEMORY_HEADROOM) * self.memory_limit_bytes))

    def peak_bytes(self, batch_size: int) -> int | None:
        """Peak memory of a micro-batch; None: not measured. Beyond measured sizes it grows as between them."""
        if self.points[0].peak_memory_bytes is None:
            return None
        sizes = [point.batch_size for point in self.points]
        peaks = [point.peak_memory_bytes or 0 for point in self.points]
        slope = max(0.0, (peaks[-1] - peaks[0]) / (sizes[-1] - sizes[0]))
        return int(np.interp(batch_size, sizes, peaks) + max(0, batch_size - sizes[-1]) * slope)

    def scaled(self, time: float, memory: float, **changed: object) -> BatchCurve:
        """The curve with other times and peaks, and other changes."""
        points = []
        for point in self.points:
            update: dict[str, object] = {"seconds_median": point.seconds_median * time}
            update["seconds_spread"] = point.seconds_spread * time
            update["peak_memory_bytes"] = point.peak_memory_bytes and math.ceil(point.peak_memory_bytes * memory)
            points.append(point.model_copy(update=update))
        return self.model_copy(update={"points": tuple(points), **changed})

    def slowed(self, factor: float, ranks_sharing_memory: int = 1) -> BatchCurve:
        """The curve of a host that takes `factor` times as long."""
        limit = self.memory_limit_bytes and self.memory_limit_bytes // ranks_sharing_memory
        overhead = self.step_overhead_seconds * factor
        return self.scaled(factor, 1.0, memory_limit_bytes=limit, step_overhead_seconds=overhead)

    def at_length(self, sequence_length: int) -> BatchCurve:
        """This curve for rows of another length: time in proportion to tokens, memory too if that is more."""
        assert self.key is not None
        ratio = sequence_length / self.key.sequence_length
        return self.scaled(ratio, max(1.0, ratio), key=self.key.at_length(sequence_length))


class Transfer(Stored):
    """One message size on a link."""

    bytes: PositiveInt
    seconds_median: PositiveFloat


class Link(Stored):
    """A message's cost over one backend, fitted: latency + bytes / bandwidth."""

    backend: Literal["ring", "mpi", "jaccl", "nccl"]
    operation: Literal["all_sum", "ping_pong"] = "all_sum"  # ping_pong: one way
    peers: tuple[str, ...] = ()  # hosts of all ranks, in their order
    latency_seconds: PositiveFloat
    bandwidth_bytes_per_second: PositiveFloat
    transfers: tuple[Transfer, ...] = ()
    measured_at: str | None = None

    def seconds(self, size_bytes: float) -> float:
        """One message of that size: linear between measured sizes, beyond them by latency and bandwidth."""
        sizes = [transfer.bytes for transfer in self.transfers]
        if sizes and sizes[0] <= size_bytes <= sizes[-1]:
            return float(np.interp(size_bytes, sizes, [transfer.seconds_median for transfer in self.transfers]))
        return self.latency_seconds + size_bytes / self.bandwidth_bytes_per_second

    @property
    def one_way(self) -> Link:
        """Of a sum: what it says of one message, as it passes 2 (n - 1) / n of its bytes over each of n links."""
        ranks = max(2, len(self.peers))
        passes = 2 * (ranks - 1)
        bandwidth = self.bandwidth_bytes_per_second * passes / ranks
        return Link(
            backend=self.backend, latency_seconds=self.latency_seconds / passes, bandwidth_bytes_per_second=bandwidth
        )


class HostCalibration(Stored):
    """The content of calibration/HOST.json."""

    machine: Machine
    curves: tuple[BatchCurve, ...]
    gflops: PositiveFloat | None = None  # matrix multiplication
    memory_bytes_per_second: PositiveFloat | None = None
    links: tuple[Link, ...] = ()
    measured_at: str | None = None  # the machine's own rates
    versions: dict[str, str] = {}
    source: str = "measured"
    note: str = ""


# ---- Files


def read_calibration(path: Path) -> HostCalibration:
    """Reads and checks one file; raises UserError with the file, the key and the versions that wrote it."""
    try:
        stored = json.loads(path.read_text(encoding="utf-8"))
        return HostCalibration.model_validate(stored)
    except FileNotFoundError:
        raise UserError(f"calibration {path} does not exist; make calibrate writes it") from None
    except ValidationError as error:
        first, versions = error.errors()[0], stored.get("versions") if isinstance(stored, dict) else None
        by = ", ".join(f"{name} {version}" for name, version in (versions or {}).items())
        why = f"{'.'.join(map(str, first['loc']))}: {first['msg']}" + f" (written with {by})" * bool(by)
    except (OSError, ValueError, RecursionError) as error:
        why = f"cannot be read ({error})"
    raise UserError(f"{path}: {why}; delete {path.name} and run make calibrate")


def calibration_path(folder: Path, hosts: Sequence[str], rank: int) -> Path:
    """The file of a rank, there or not: HOST.json; of several ranks on one host HOST-n.json, where that is there."""
    host = hosts[rank]
    numbered = folder / f"{host}-{hosts[:rank].count(host)}.json"
    return numbered if hosts.count(host) > 1 and numbered.exists() else folder / f"{host}.json"


def read_of_rank(folder: Path, hosts: Sequence[str], rank: int) -> HostCalibration | None:
    """The calibration of this rank's host; None where there is no file."""
    path = calibration_path(folder, hosts, rank)
    return read_calibration(path) if path.exists() else None


def write_calibration(path: Path, calibration: HostCalibration) -> None:
    files.write_atomically(path, calibration.model_dump_json(indent=2, exclude_defaults=True) + "\n")


def read_published(folder: Path = FOLDER / "published") -> dict[str, HostCalibration]:
    """Published calibrations by name, e.g. "m4-max"; then chips' data sheets, which have rates and no curves."""
    paths = [path for path in sorted(folder.glob("[!.]*.json")) if path.name != "chips.json"]
    published = {path.stem: read_calibration(path) for path in paths}
    chips = json.loads((folder / "chips.json").read_text(encoding="utf-8"))["chips"] if paths else []
    return published | {chip.machine.host: chip for chip in map(HostCalibration.model_validate, chips)}


# ---- Which curves to plan with, and what to measure


def nearest_curve(curves: Sequence[BatchCurve], key: CurveKey) -> BatchCurve | None:
    """The curve of the same model, method and dtype whose sequence length is nearest, by ratio."""
    lengths = [
        (abs(math.log(curve.key.sequence_length / key.sequence_length)), curve.key.sequence_length, index)
        for index, curve in enumerate(curves)
        if curve.key and curve.key.at_length(key.sequence_length) == key
    ]
    return curves[min(lengths)[2]] if lengths else None


def curve_key(
    model: ModelSettings, record_kind: Literal["preference", "unpaired", "sft", "group"], folder: Path, length: int
) -> CurveKey:
    """The key of the curve that a run with these settings needs. The model goes by its folder's name and a digest of
    what its speed depends on: its architecture and which layers are trained. So two hosts may keep it in different
    places, and two models may both be "model"."""
    text = (folder / "config.json").read_text(encoding="utf-8")
    stored = json.loads(text)  # model_folder.resolve has read it
    trained = model.model_dump(include={"rank", "keys", "blocks"} if model.method != "full" else {"blocks"})
    digest = hashlib.sha256(f"{text} {sorted(trained.items())}".encode()).hexdigest()[:8]
    as_stored = "float32" if model.random_init else stored.get("torch_dtype") or stored.get("dtype")
    dtype = model.dtype or str(as_stored or "float32")
    if quantization := stored.get("quantization"):
        dtype = f"{quantization.get('bits', 4)}-bit"
    return CurveKey(
        model=f"{Path(model.path).name} {digest}",
        method=model.method,
        dtype=dtype,
        sequence_length=length,
        gradient_checkpointing=bool(model.gradient_checkpointing),
        records=record_kind,
    )


def time_now() -> str:
    """For `measured_at`: ISO 8601 with its zone."""
    return datetime.now(UTC).isoformat(timespec="seconds")


def is_fresh(
    measured_at: str | None, written_with: Mapping[str, str], versions: Mapping[str, str], max_age_days: float
) -> bool:
    """Whether a measurement was made with these versions, at most so long ago."""
    try:
        age = datetime.now(UTC) - datetime.fromisoformat(measured_at or "")
    except (ValueError, TypeError):  # not a time, or one without its zone
        return False
    return dict(written_with) == dict(versions) and -1 < age.total_seconds() < max_age_days * 86_400


class HardwareCalibrator:
    """Measures this machine: HardwareCalibrator().calibrate()["gflops"]; config: whose model and data."""

    def __init__(self, config: Path | str | None = None, overrides: Sequence[str] = (), quick: bool = True) -> None:
        self.folder = ROOT if config is None else Path.cwd()  # where the configuration's paths start
        self.arguments = [*(["--config", str(config)] if config else []), *["--quick"] * quick, *overrides]

    def calibrate(self) -> dict[str, object]:
        """What benchmarks/calibrate.py prints as its last line (docs/runs.md); UserError where it fails."""
        command = [sys.executable, str(ROOT / "benchmarks" / "calibrate.py"), *self.arguments]
        done = subprocess.run(command, cwd=self.folder, capture_output=True, text=True, check=False)
        if done.returncode:
            raise UserError(
                (done.stderr.strip() or f"status {done.returncode}").splitlines()[-1].removeprefix("error: ")
            )
        print(done.stderr, end="", file=sys.stderr)  # a warning says why a rate is None
        return json.loads(done.stdout.strip().splitlines()[-1])
