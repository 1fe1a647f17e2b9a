"""What a plan rests on: each rank's host, and the run itself."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from lib.model.partition import ModelShape
from lib.plan.calibration import CurveKey, HostCalibration
from lib.plan.memory import MemoryModel, Rows
from lib.system.hardware import Device


@dataclass(frozen=True)
class RankHost:
    """What is known of one rank's host. Ranks that share a host have its name in common."""

    name: str
    calibration: HostCalibration | None = None
    device_name: str | None = None  # the chip, for hosts without a calibration
    device: Device | None = None  # what MLX computes on there
    gflops: float | None = None  # of matrix products, measured as the run started
    memory_bytes: int | None = None  # that the rank may use


@dataclass(frozen=True)
class RunFacts:
    """What is known of a run beside its settings and its hosts."""

    key: CurveKey  # with the length of a typical row, for times
    longest: int  # tokens of the longest row, for memory
    backend: str  # that carries the gradients
    versions: Mapping[str, str] = field(default_factory=dict)  # of the packages now, e.g. {"mlx": "0.32.4"}
    published: Sequence[HostCalibration] = ()  # figures of chips
    dataset_size: int | None = None  # pairs; with train.epochs, the length of the run
    shape: ModelShape | None = None  # of the model; None: its blocks cannot be divided
    block_shape: ModelShape | None = None  # of the model; None: it cannot be cut between its blocks
    memory_model: MemoryModel | None = None  # None: nothing is known of the model's dimensions
    typical_rows: Rows | None = None  # rows of mean sizes; None: all are as long as the key says
    left_blocks: tuple[int, ...] = ()  # of each rank, where a pipelined run goes on whose cut had moved
    moved_at: int | None = None  # then, after which step
