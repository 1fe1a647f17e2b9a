"""What is known of each machine's speed: batch curves, the files that keep them, which of them to plan with.

`calibration/HOST.json` is one `HostCalibration`: the machine's identity and its curves, each for one model,
method, dtype and sequence length. `calibration/published/*.json` has the same form for figures that others
published: they name no model, so they compare machines and predict no times; any measurement overrules them.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from lib.config import read_file
from lib.config.schema import Config
from lib.environment import ROOT
from lib.errors import UserError
from lib.model.quantised_products import DequantiseFrom, Product, go_by
from lib.system import files, network
from lib.system.hardware import Machine

FOLDER = ROOT / "calibration"
MEMORY_HEADROOM = 0.1  # of the limit, kept free: a longer row than the probe's, fragmentation, the system's own


LARGEST_FILE = 2**24  # bytes
LARGEST_BATCH = 2**20  # pairs: every smaller size is looked at
PositiveInt = Annotated[int, Field(gt=0)]
PositiveFloat = Annotated[float, Field(gt=0, allow_inf_nan=False)]


class _Record(BaseModel):
    """Frozen, and tolerant of keys that a newer version wrote."""

    model_config = ConfigDict(frozen=True, extra="ignore")


class BatchPoint(_Record):
    """One measured micro-batch: forward and backward over `batch_size` pairs."""

    batch_size: Annotated[int, Field(gt=0, le=LARGEST_BATCH)]
    seconds_median: PositiveFloat
    seconds_spread: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 0.0  # between the quartiles
    pairs_per_second: PositiveFloat
    peak_memory_bytes: PositiveInt | None = None

    @model_validator(mode="before")
    @classmethod
    def _rate_follows_from_time(cls, point: object) -> object:
        """The file has the rate for its readers only: it is computed from the time again."""
        match point:
            case {"batch_size": int(pairs), "seconds_median": int() | float() as seconds, **rest} if seconds > 0:
                return {
                    **rest,
                    "batch_size": pairs,
                    "seconds_median": seconds,
                    "pairs_per_second": pairs / seconds,
                }
        return point


class CurveKey(_Record):
    """What a curve was measured with; two curves are comparable when their keys agree."""

    model: str  # as the configuration names it
    method: Literal["lora", "dora", "full"]
    dtype: str
    sequence_length: PositiveInt  # tokens that the model sees, prompt and completion, as padded
    gradient_checkpointing: bool = False
    records: Literal["preference", "unpaired", "sft", "group"] = "preference"  # a pair is two rows of the model's

    def __str__(self) -> str:
        kind = {"preference": "", "unpaired": ", unpaired", "sft": ", SFT", "group": ", groups"}[self.records]
        recomputed = ", gradient checkpointing" if self.gradient_checkpointing else ""
        return f"{self.model}, {self.method}, {self.dtype}, {self.sequence_length} tokens{kind}{recomputed}"

    def at_length(self, sequence_length: int) -> CurveKey:
        """The same, for rows of another length."""
        return self.model_copy(update={"sequence_length": sequence_length})


class BatchCurve(_Record):
    """Time and memory against micro-batch size, on one machine."""

    points: tuple[BatchPoint, ...]
    memory_limit_bytes: PositiveInt | None = None  # what a process may use there
    key: CurveKey | None = None  # None: published without saying for which model
    step_overhead_seconds: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 0.0  # once a step: the update, ...
    outside_blocks: Annotated[float, Field(ge=0, lt=1)] | None = None  # share of a micro-batch's time: head, loss, ...
    gradient_bytes: PositiveInt | None = None  # what a step's collective carries
    reference_pairs_per_second: PositiveFloat | None = None
    generation_tokens_per_second: PositiveFloat | None = None
    slowdown_together: PositiveFloat | None = None  # time while all ranks work, over the time alone
    quick: bool = False
    source: str = "measured"
    measured_at: str | None = None  # ISO 8601
    versions: dict[str, str] = {}  # of mlx, mlx-lm, ...
    note: str = ""
    max_pairs: PositiveInt | None = None  # of a micro-batch, whatever was measured: larger ones ran out of memory

    @model_validator(mode="after")
    def _is_a_curve(self) -> BatchCurve:
        sizes = [point.batch_size for point in self.points]
        if len(sizes) < 2:
            raise ValueError(f"a curve needs at least 2 batch sizes and has {len(sizes)}; calibrate again")
        if sizes != sorted(set(sizes)):
            raise ValueError(f"batch sizes {sizes} do not rise; calibrate again")
        if len({point.peak_memory_bytes is None for point in self.points}) > 1:
            raise ValueError("peak_memory_bytes is given for some batch sizes only; calibrate again")
        return self

    @classmethod
    def from_rates(
        cls,
        pairs_per_second: Mapping[int, float],
        peak_memory_bytes: Mapping[int, int] | None = None,
        memory_limit_bytes: int | None = None,
    ) -> BatchCurve:
        """The curve of {batch size: pairs/s}."""
        points = [
            {
                "batch_size": size,
                "seconds_median": size / rate,
                "peak_memory_bytes": peak_memory_bytes[size] if peak_memory_bytes else None,
            }
            for size, rate in sorted(pairs_per_second.items())
        ]
        return cls.model_validate({"points": points, "memory_limit_bytes": memory_limit_bytes})

    def seconds(self, batch_sizes: np.ndarray) -> np.ndarray:
        """tau(b), float64, linear between measured sizes.

        Below the smallest measured size its time stands (a smaller batch takes no longer); above the largest
        its rate goes on, which is only a guess: the planner never goes there.
        """
        sizes = np.array([point.batch_size for point in self.points], dtype=np.float64)
        times = np.array([point.seconds_median for point in self.points])
        seconds: np.ndarray = np.interp(batch_sizes, sizes, times) * np.maximum(1.0, batch_sizes / sizes[-1])
        return seconds

    @property
    def best_point(self) -> BatchPoint:
        """The fastest of the measured sizes that fit; where none does, the smallest."""
        fitting = [point for point in self.points if point.batch_size <= self.max_batch_size]
        return max(fitting or self.points[:1], key=lambda point: point.pairs_per_second)

    @property
    def max_batch_size(self) -> int:
        """The largest micro-batch that was measured and fits; 0 when not even the smallest fits.

        Fits: its peak memory, linear between measured sizes, is at most 1 - MEMORY_HEADROOM of the limit.
        """
        largest = min(self.points[-1].batch_size, self.max_pairs or self.points[-1].batch_size)
        peaks = [point.peak_memory_bytes for point in self.points]
        if self.memory_limit_bytes is None or peaks[0] is None:
            return largest
        sizes = np.arange(1, largest + 1)
        rising_peaks = np.maximum.accumulate(np.array(peaks, dtype=np.float64))
        peak = np.interp(sizes, [point.batch_size for point in self.points], rising_peaks)
        return int(np.sum(peak <= (1 - MEMORY_HEADROOM) * self.memory_limit_bytes))

    def at_length(self, sequence_length: int) -> BatchCurve:
        """This curve for rows of another length: time in proportion to tokens, memory too if that is more."""
        assert self.key is not None
        ratio = sequence_length / self.key.sequence_length
        points = [
            {
                "batch_size": point.batch_size,
                "seconds_median": point.seconds_median * ratio,
                "seconds_spread": point.seconds_spread * ratio,
                "peak_memory_bytes": point.peak_memory_bytes and math.ceil(point.peak_memory_bytes * max(1.0, ratio)),
            }
            for point in self.points
        ]
        return BatchCurve.model_validate(
            {
                **self.model_dump(),
                "points": points,
                "key": {**self.key.model_dump(), "sequence_length": sequence_length},
            }
        )


class Transfer(_Record):
    """One message size on a link."""

    bytes: PositiveInt
    seconds_median: PositiveFloat


class Link(_Record):
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


class Ceiling(_Record):
    """The largest micro-batch for runs with this key: larger ones ran out of memory (lib/plan/memory_ceilings.py)."""

    key: CurveKey
    max_pairs: Annotated[int, Field(ge=0)]  # 0: not even one, without gradient checkpointing
    measured_at: str | None = None  # ISO 8601
    note: str = ""


class MeasuredProduct(_Record):
    """From how many tokens on this host multiplies faster by dequantised weights (lib/model/quantised_products.py)."""

    product: Product
    dequantise_from: DequantiseFrom
    measured_at: str | None = None  # ISO 8601
    versions: dict[str, str] = {}


class HostCalibration(_Record):
    """The content of calibration/HOST.json."""

    machine: Machine
    curves: tuple[BatchCurve, ...]
    gflops: PositiveFloat | None = None  # matrix multiplication
    memory_bytes_per_second: PositiveFloat | None = None
    links: tuple[Link, ...] = ()
    ceilings: tuple[Ceiling, ...] = ()
    quantised_products: tuple[MeasuredProduct, ...] = ()
    measured_at: str | None = None  # the machine's own rates
    versions: dict[str, str] = {}
    source: str = "measured"
    note: str = ""


# ------------------------------------------------------------------------------------------------------------
# Files


def read_calibration(path: Path) -> HostCalibration:
    """Reads and checks one file.

    Raises:
        UserError: it is missing, no file or too large, not JSON, or holds values that cannot be (a time of 0, one
            point): one line with the file, the key and the remedy.
    """
    remedy = f"delete {path.name} and run make calibrate"
    try:
        text = read_file.read_text(path, "calibration", LARGEST_FILE)  # its folder may be somebody else's
    except FileNotFoundError:
        raise UserError(f"calibration {path} does not exist; make calibrate writes it") from None
    except OSError as error:
        raise UserError(f"calibration {path} cannot be read: {error.strerror}") from None
    try:
        return HostCalibration.model_validate(json.loads(text))
    except json.JSONDecodeError as error:
        raise UserError(f"{path}:{error.lineno}: not valid JSON ({error.msg}); {remedy}") from None
    except ValidationError as error:
        first = error.errors()[0]
        key = ".".join(map(str, first["loc"])) or "the file"
        message = first["msg"].removeprefix("Value error, ")
        value = first["input"]
        shown = f", not {repr(value)[:60]}" if isinstance(value, int | float | str) else ""
        raise UserError(f"{path}: {key}: {message[0].lower()}{message[1:]}{shown}; {remedy}") from None
    except (ValueError, RecursionError, OverflowError) as error:  # numbers of thousands of digits, lists without end
        raise UserError(f"{path}: cannot be read ({error}); {remedy}") from None


def own_calibration(folder: Path, hosts: list[str], rank: int) -> HostCalibration | None:
    """What is on file for this rank of a world: its host's HOST.json, or None where there is none.

    Of several ranks on one host, the n-th may have HOST-n.json, made with all of them at work.

    Raises:
        UserError: as read_calibration.
    """
    path = own_file(folder, hosts, rank)
    return read_calibration(path) if path.exists() else None


def use_quantised_products(measured: Iterable[MeasuredProduct]) -> None:
    """Lets this process's quantised layers go by what was measured on its host."""
    go_by({one.product: one.dequantise_from for one in measured})


def own_file(folder: Path, hosts: list[str], rank: int) -> Path:
    """The file that this rank of a world goes by, whether it exists or not."""
    host = hosts[rank]
    plain, numbered = folder / f"{host}.json", folder / f"{host}-{hosts[:rank].count(host)}.json"
    if hosts.count(host) > 1 and numbered.exists():
        return numbered
    # Measured beside another machine of this name, which is not in this world.
    beside = folder / f"{host}-{network.machine_id()[: network.ID_DIGITS]}.json"
    return beside if beside.exists() and not plain.exists() else plain


def write_calibration(path: Path, calibration: HostCalibration) -> None:
    """Writes one file so that a reader sees the old or the new content, never half of it."""
    files.write_atomically(path, calibration.model_dump_json(indent=2, exclude_defaults=True) + "\n")


def read_published(folder: Path = FOLDER / "published") -> dict[str, HostCalibration]:
    """Published calibrations by file name, e.g. "m4-max"."""
    paths = (path for path in sorted(folder.glob("*.json")) if not files.is_litter(path.name))
    return {path.stem: read_calibration(path) for path in paths}


# ------------------------------------------------------------------------------------------------------------
# Which curves to plan with


@dataclass(frozen=True)
class CurveChoice:
    """Comparable curves of all hosts, or None; and what they are, as the plan prints it."""

    curves: tuple[BatchCurve, ...] | None
    reason: str
    warnings: tuple[str, ...] = ()


def choose_curves(
    hosts: Sequence[str],
    calibrations: Sequence[HostCalibration | None],
    key: CurveKey,
    *,
    versions: Mapping[str, str],
    device_names: Sequence[str | None] | None = None,
    published: Sequence[HostCalibration] = (),
    require_calibration: bool = False,
) -> CurveChoice:
    """The best curves that every host has: shares compare hosts, so all must be measured with the same model.

    In this order: this model, method and dtype (at the nearest sequence length, scaled by tokens); another
    model or method that all hosts were measured with; published figures of one source for their chips; none,
    which means equal shares. `reason` and `warnings` say which it was.

    Args:
        hosts, calibrations, device_names: one a rank; device_names (the chips) serve hosts without a file.
        versions: of the packages now, e.g. {"mlx": "0.32.4"}.

    Raises:
        UserError: require_calibration, and a host has no curve for this model, or has one of other versions.
    """
    measured = [nearest_curve(c.curves if c else (), key) for c in calibrations]
    missing = [host for host, curve in zip(hosts, measured, strict=True) if curve is None]
    if not missing:
        curves = tuple(curve for curve in measured if curve is not None)
        warnings = _other_versions(hosts, curves, versions)
        if require_calibration and warnings:
            raise UserError(f"plan.require_calibration: {warnings[0]}")
        scaled = [
            f"{host} from {curve.key.sequence_length} tokens"
            for host, curve in zip(hosts, curves, strict=True)
            if curve.key and curve.key.sequence_length != key.sequence_length
        ]
        reason = f"curves measured for {key}" + (f", scaled by tokens: {', '.join(scaled)}" if scaled else "")
        return CurveChoice(tuple(curve.at_length(key.sequence_length) for curve in curves), reason, warnings)

    lacking = f"no calibration of {', '.join(_once(missing))} for {key}; run make calibrate there"
    if require_calibration:
        raise UserError(f"plan.require_calibration: {lacking}")

    if other := _common_key(calibrations, key):
        curves = tuple(next(k for k in c.curves if k.key == other) for c in calibrations if c)
        warnings = (
            f"{lacking}; planned from another measurement ({other}), which compares the hosts but whose "
            "seconds are not this run's",
            *_other_versions(hosts, curves, versions),
        )
        return CurveChoice(curves, f"curves measured for {other}", warnings)

    known = {c.machine.device_name: c for c in published}
    chips = [
        c.machine.device_name if c else name
        for c, name in zip(calibrations, device_names or [None] * len(hosts), strict=True)
    ]
    figures = [known[chip] for chip in chips if chip in known]
    if len(figures) == len(hosts) and len({c.source for c in figures}) == 1:
        warnings = (f"{lacking}; planned from published figures, which compare the chips only",)
        return CurveChoice(tuple(c.curves[0] for c in figures), f"figures published in {figures[0].source}", warnings)

    return CurveChoice(None, f"{lacking}; until then the shares are equal")


def nearest_curve(curves: Sequence[BatchCurve], key: CurveKey) -> BatchCurve | None:
    """The curve of the same model, method and dtype whose sequence length is nearest, by ratio."""
    same = [
        (abs(math.log(curve.key.sequence_length / key.sequence_length)), curve.key.sequence_length, curve)
        for curve in curves
        if curve.key and curve.key.at_length(key.sequence_length) == key
    ]
    return min(same, key=lambda entry: entry[:2])[2] if same else None


def _common_key(calibrations: Sequence[HostCalibration | None], key: CurveKey) -> CurveKey | None:
    """The key that all hosts have a curve for and that is most like `key`."""
    keys = [{curve.key for curve in c.curves if curve.key} if c else set() for c in calibrations]
    return nearest_key(set.intersection(*keys), key) if keys else None


def nearest_key(keys: Collection[CurveKey], key: CurveKey) -> CurveKey | None:
    """Of several, the one that is most like `key`; None of none."""

    def distance(other: CurveKey) -> tuple[bool | float | str, ...]:
        lengths = abs(math.log(other.sequence_length / key.sequence_length))
        differs = [getattr(other, n) != getattr(key, n) for n in ("model", "method", "dtype", "gradient_checkpointing")]
        return (*differs, lengths, str(other))

    return min(keys, key=distance, default=None)


def _other_versions(hosts: Sequence[str], curves: Sequence[BatchCurve], versions: Mapping[str, str]) -> tuple[str, ...]:
    warnings = []
    for host, curve in zip(hosts, curves, strict=True):
        changed = [f"{p} {old} (now {versions[p]})" for p, old in curve.versions.items() if versions.get(p, old) != old]
        if changed:
            warnings.append(f"calibration of {host} was made with {', '.join(changed)}; run make calibrate there")
    return tuple(_once(warnings))


def _once(words: Sequence[str]) -> list[str]:
    return list(dict.fromkeys(words))


# ------------------------------------------------------------------------------------------------------------
# What to measure


def curve_key(config: Config, model_folder: Path, sequence_length: int) -> CurveKey:
    """The key of the curve that a run with this configuration needs.

    The model goes by its folder's name and a digest of what its speed depends on: its architecture and which
    layers are trained. So two hosts may keep it in different places, and two models may both be "model".

    Raises:
        UserError: the folder's config.json cannot be read.
    """
    try:
        text = (model_folder / "config.json").read_text(encoding="utf-8")
        stored = json.loads(text)
    except (OSError, ValueError) as error:
        raise UserError(f"model.path {config.model.path}: config.json cannot be read: {error}") from None
    trained = config.model.model_dump(
        include={"rank", "keys", "blocks"} if config.model.method != "full" else {"blocks"}
    )
    digest = hashlib.sha256(f"{text} {sorted(trained.items())}".encode()).hexdigest()[:8]
    if quantization := stored.get("quantization"):
        dtype = f"{quantization.get('bits', 4)}-bit"
    else:
        as_stored = "float32" if config.model.random_init else stored.get("torch_dtype") or stored.get("dtype")
        dtype = config.model.dtype or str(as_stored or "float32")
    return CurveKey(
        model=f"{Path(config.model.path).name} {digest}",
        method=config.model.method,
        dtype=dtype,
        sequence_length=sequence_length,
        gradient_checkpointing=bool(config.model.gradient_checkpointing),
        records=config.record_kind,
    )
