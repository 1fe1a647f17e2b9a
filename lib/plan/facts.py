"""What a plan rests on: the settings, the run, and every rank's host.

lib/training/run_plan.py gathers them. Where a host has no curve of this model, all are compared by their
matrix-product rates, and the first steps of the run correct the shares.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import geometric_mean

import numpy as np

from lib.config.settings import Config
from lib.model.partition import ModelShape
from lib.plan.calibration import MEMORY_HEADROOM, BatchCurve, CurveKey, HostCalibration, Link, nearest_curve
from lib.plan.memory import MemoryModel, block_weights
from lib.plan.shares import DEFAULT_MICRO_BATCH_SIZE, TooLarge
from lib.system.hardware import Device

DIVIDED = ("pipelined", "sharded")
ASSUMED_LINK = Link(backend="ring", latency_seconds=5e-4, bandwidth_bytes_per_second=1.1e8)  # where none is measured
MESSAGE_BYTES = 2**23  # by which links are compared: the activations of 1,000 tokens of a large model
SAME_SPEED = 1.15  # ratio of two matrix-product rates below which they are equal
USUAL_MEMORY_SPEED: dict[Device, float] = {"cpu": 3e9, "metal": 2e11, "cuda": 1e12}  # bytes a second, as MLX reaches
UNKNOWN_BYTES = 10**18  # of a host whose memory is not known
CORRECTION = (0.8, 1.5)  # measured over planned peak memory: beyond it something else was measured


@dataclass(frozen=True)
class RankHost:
    """What is known of one rank's host. Ranks that share a host have its name in common."""

    name: str
    calibration: HostCalibration | None = None
    device_name: str | None = None  # the chip, for hosts without a calibration
    device: Device = "metal"  # what MLX computes on there
    gflops: float | None = None  # of matrix products, measured as the run started
    memory_bytes: int | None = None  # that the rank may use

    @property
    def room_bytes(self) -> float:
        """What may be planned for: as much as is needed, where the memory is not known."""
        return (1 - MEMORY_HEADROOM) * (self.memory_bytes or UNKNOWN_BYTES)


@dataclass(frozen=True)
class PlanFacts:
    """All that a plan depends on."""

    settings: Config
    hosts: Sequence[RankHost]
    key: CurveKey  # with the length of a typical row, for times
    longest: int  # tokens of the longest row, for memory
    backend: str  # that carries the gradients
    steps: int  # of the whole run
    published: Sequence[HostCalibration] = ()  # figures of chips
    shape: ModelShape | None = None  # of the model; None: its blocks cannot be divided
    memory: MemoryModel | None = None  # None: nothing is known of the model's dimensions, and it cannot be cut
    usual_gflops: float | None = None  # of every rank, where none differs: for the run's expected time alone

    @property
    def names(self) -> list[str]:
        return [host.name for host in self.hosts]

    @property
    def batch_size(self) -> int:
        return self.settings.train.global_batch_size

    @property
    def item_bytes(self) -> int:
        """Of one number between two blocks: full training computes in float32."""
        assert self.memory is not None
        return 4 if self.settings.model.method == "full" else self.memory.shape.other_bytes

    def can_divide(self, strategy: str) -> bool:
        """Whether the model's family can be divided so, and there are hosts to divide it among."""
        return len(self.hosts) > 1 and (self.shape if strategy == "sharded" else self.memory) is not None

    def tokens(self, pairs: int) -> tuple[float, float]:
        """Of a micro-batch of typical rows: those that go through the blocks, with padding; and through the head."""
        if self.memory is not None and self.memory.typical is not None:
            batch = self.memory.typical.batch(pairs, self.memory.training.shared_prompts)
            return float(batch.tokens), float(batch.scored)
        tokens = pairs * self.key.sequence_length * (2.0 if self.key.records == "preference" else 1.0)
        return tokens, tokens

    # ---- Links

    def _links(self, ranks: slice = slice(None)) -> list[Link]:
        every = [link for host in self.hosts[ranks] if host.calibration for link in host.calibration.links]
        return [link for link in every if link.backend == self.backend]

    @property
    def link_is_measured(self) -> bool:
        return bool(self._links())

    def sum_seconds(self, size_bytes: float) -> float:
        """One sum over the slowest link; 0 for a single host, and where nothing was measured."""
        sums = (link.seconds(size_bytes) for link in self._links() if link.operation == "all_sum")
        return max(sums, default=0.0) * (len(self.hosts) > 1)

    def link_between(self, rank: int) -> Link | None:
        """A rank's link to the next one, one way: as measured, else assumed; None within a host."""
        links, pair = self._links(slice(rank, rank + 2)), {self.hosts[rank].name, self.hosts[rank + 1].name}
        candidates = [link for link in links if link.operation == "ping_pong" and set(link.peers) == pair]
        candidates = candidates or [link.one_way for link in links if link.operation == "all_sum"]
        usual = None if len(pair) == 1 else ASSUMED_LINK
        return max(candidates, key=lambda link: link.seconds(MESSAGE_BYTES), default=usual)

    # ---- Speeds

    def rates(self) -> list[float | None]:
        """Each host's GFLOP/s in matrix products: as measured now of all, else as calibrated."""
        now = [host.gflops for host in self.hosts]
        if all(now):
            return now
        return [(host.calibration and host.calibration.gflops) or host.gflops for host in self.hosts]

    def memory_speed(self, rank: int) -> float:
        """Bytes a second of a host's memory: as calibrated, else as published, else as is usual."""
        host = self.hosts[rank]
        published = {chip.machine.device_name: chip.memory_bytes_per_second for chip in self.published}
        measured = host.calibration and host.calibration.memory_bytes_per_second
        return measured or published.get(host.device_name or "") or USUAL_MEMORY_SPEED[host.device]

    def relative_speeds(self) -> list[float] | None:
        """The ranks' relative speeds, where no curves compare them; None where all are equal, or one is not known."""
        rates = [rate for rate in self.rates() if rate]
        if len(rates) < len(self.hosts):
            return None
        named = list(zip(rates, self.names, strict=True))
        means = [geometric_mean(rate for rate, host in named if host == name) for name in self.names]
        return means if max(means) > SAME_SPEED * min(means) else None

    def measured_curves(self, key: CurveKey) -> list[BatchCurve | None]:
        """Each host's curve of this very model, with the times of typical rows and the memory of the longest."""
        return [self._measured_curve(host.calibration.curves if host.calibration else (), key) for host in self.hosts]

    def _measured_curve(self, curves: Sequence[BatchCurve], key: CurveKey) -> BatchCurve | None:
        typical, longest = nearest_curve(curves, key), nearest_curve(curves, key.at_length(self.longest))
        if typical is None or longest is None:
            return None
        typical, longest = typical.at_length(key.sequence_length), longest.at_length(self.longest)
        peaks = [{"peak_memory_bytes": longest.peak_bytes(point.batch_size)} for point in typical.points]
        points = tuple(p.model_copy(update=peak) for p, peak in zip(typical.points, peaks, strict=True))
        return typical.model_copy(update={"points": points, "memory_limit_bytes": longest.memory_limit_bytes})

    # ---- Memory

    def needed_bytes(self, rank: int, pairs: int, key: CurveKey) -> int | None:
        """A micro-batch by the formula, corrected by what a rank's own curve measured; None: nothing is known."""
        if self.memory is None:
            return None
        planned = self.memory.bytes(pairs, self.hosts[rank].device, key.gradient_checkpointing).total
        return round(self._correction(rank, key) * planned)

    def _correction(self, rank: int, key: CurveKey) -> float:
        """Measured over planned, of this model on this host, with or without checkpointing."""
        calibration, device = self.hosts[rank].calibration, self.hosts[rank].device
        for recomputes in (key.gradient_checkpointing, not key.gradient_checkpointing):
            measured = key.model_copy(update={"gradient_checkpointing": recomputes})
            curve = nearest_curve(calibration.curves if calibration else (), measured)
            if curve and curve.key and self.memory and curve.key.sequence_length >= self.memory.rows.seen:
                size, peak = curve.points[-1].batch_size, curve.points[-1].peak_memory_bytes
                if peak:
                    planned = self.memory.bytes(size, device, recomputes).total
                    return float(np.clip(peak / planned, *CORRECTION))
        return 1.0

    def default_size(self, rank: int, key: CurveKey) -> int:
        """Pairs of a rank's micro-batches where nothing was measured; raises TooLarge: one pair does not fit."""
        host = self.hosts[rank]
        if self.memory is None:
            return DEFAULT_MICRO_BATCH_SIZE
        for pairs in range(min(self.batch_size, self.memory.most_pairs(host.device)), 0, -1):
            if (self.needed_bytes(rank, pairs, key) or 0) <= host.room_bytes:
                return pairs
        raise TooLarge(host.name, 1, self.needed_bytes(rank, 1, key) or 0, host.memory_bytes or 0)


def prepared(facts: PlanFacts) -> tuple[PlanFacts, tuple[str, ...]]:
    """The facts with calibrations as they hold while all ranks work, and warnings of each change. Curves are slower as
    measured, else by the number of ranks that share a machine; HOST-0.json, ... (whose machine is not called HOST)
    stand as they are, and on CUDA every rank has its own GPU."""
    hosts, warnings, names, settings = [], list[str](), facts.names, facts.settings
    for host in facts.hosts:
        if (stored := host.calibration) is not None:
            is_shared = stored.machine.host == host.name and stored.machine.device != "cuda"
            sharing, is_alone = names.count(host.name) if is_shared else 1, len(names) == 1
            curves = tuple(
                curve.slowed(1.0 if is_alone else curve.slowdown_together or sharing, sharing)
                for curve in stored.curves
            )
            if sharing > 1 and any(curve.slowdown_together is None for curve in curves):
                warnings.append(
                    f"{sharing} ranks share {host.name}, which was measured for one: each is planned with 1/{sharing} "
                    f"of its speed and memory; {host.name}-0.json, ... would say what each has"
                )
            limits = [size for size in (host.memory_bytes, *(curve.memory_limit_bytes for curve in curves)) if size]
            rates = {"curves": curves, "gflops": stored.gflops and stored.gflops / sharing}
            host = replace(host, calibration=stored.model_copy(update=rates), memory_bytes=min(limits, default=None))
        hosts.append(host)
    by_host = {"plan.memory_limit_gb": settings.plan.memory_limit_gb, "cost.watts": settings.cost.watts}
    for setting, values in {**by_host, "cost.rent_per_hour": settings.cost.rent_per_hour}.items():
        if isinstance(values, dict) and (strangers := values.keys() - set(names)):
            warnings.append(f"{setting}: no host of this run is called {', '.join(sorted(strangers))}")
    return replace(facts, hosts=hosts), tuple(dict.fromkeys(warnings))


BACKWARD = {"lora": 1.0, "dora": 1.0, "full": 2.0}  # times the forward pass's operations
# Tokens at which a device does half of its matrix-product rate. One H200 did 156 to 375 of 620 TFLOP/s at 512 tokens of
# an 8B model's shapes; smaller devices are busy with fewer.
HALF_RATE_TOKENS: dict[Device, int] = {"cpu": 32, "metal": 64, "cuda": 768}
# Of a block's forward pass, however few its tokens: kernels start one after another. An H200 took 98 to 152 ms for
# the step of SmolLM2's 30 blocks with LoRA, whose products last 10.
LEAST_BLOCK_SECONDS: dict[Device, float] = {"cpu": 0.0, "metal": 0.0, "cuda": 0.002}
PASSES_OF_ALL = 45
"""How often a block reads or writes a number for every token and hidden unit, which no division makes fewer.

Forward and backward: 10 for two norms, 12 for residual sums, 5 for what adapters read, 18 for their gradients.
"""
PASSES_OF_COLUMNS = 12  # the same of the MLP's columns
PASSES_OF_LOGITS: dict[Device, int] = {"cpu": 6, "metal": 2, "cuda": 2}  # of the vocabulary, for every scored token
EQUAL_GFLOPS = 1e3  # where no host's rate is known


@dataclass(frozen=True)
class HostSpeeds:
    """Seconds of the run's model on each host."""

    facts: PlanFacts
    memory: MemoryModel
    curves: tuple[BatchCurve, ...]  # of this model, one a rank; or none
    rates: tuple[float, ...]  # of matrix products, GFLOP/s; or none

    @classmethod
    def of(cls, facts: PlanFacts) -> HostSpeeds:
        assert facts.memory is not None
        curves = tuple(curve for curve in facts.measured_curves(facts.key) if curve is not None)
        rates = tuple(rate for rate in facts.rates() if rate)
        ranks = len(facts.hosts)
        return cls(facts, facts.memory, curves * (len(curves) == ranks), rates * (len(rates) == ranks))

    @property
    def source(self) -> str:
        """Where they come from, as the plan says it."""
        by_rates = "by the hosts' matrix-product rates" if self.rates else ""
        return "by the hosts' curves" if self.curves else by_rates or "as if all were equal: none is measured"

    @property
    def are_measured(self) -> bool:
        return bool(self.curves or self.rates)

    def parts(self, rank: int, pairs: float) -> tuple[float, float]:
        """Forward seconds of one (mean) block and of the head, for a micro-batch of so many pairs."""
        block, head = self._by_formula(rank, pairs)
        if not self.curves:
            return block, head
        scale = float(self.curves[rank].seconds(np.array([pairs]))[0]) / self._whole(
            block, head, self.facts.key.gradient_checkpointing
        )
        return block * scale, head * scale

    def whole_curves(self, turned_on: bool) -> list[BatchCurve]:
        """Times of the whole model on each host. turned_on: gradient checkpointing. Empty where nothing is known."""
        checkpointing = turned_on or self.facts.key.gradient_checkpointing
        ranks = range(len(self.facts.hosts) if self.are_measured else 0)
        if self.curves:
            once = [self.parts(rank, 1) for rank in ranks]
            ratios = [self._whole(*parts, turned_on) / self._whole(*parts, False) for parts in once]
            return [curve.slowed(ratio) for curve, ratio in zip(self.curves, ratios, strict=True)]
        curves = []
        for rank in ranks:
            sizes = {*range(1, DEFAULT_MICRO_BATCH_SIZE + 1), self.facts.batch_size}
            least, rates = LEAST_BLOCK_SECONDS[self.facts.hosts[rank].device], dict[int, float]()
            for size in sizes:
                block, head = self._by_formula(rank, size)
                rates[size] = size / self._whole(max(block, least), head, checkpointing)
            curves.append(BatchCurve.from_rates(rates))
        return curves

    def _whole(self, block: float, head: float, checkpointing: bool) -> float:
        """Seconds forward and backward, from those of one block's and the head's forward pass."""
        blocks = block * self.memory.shape.blocks
        return (blocks + head) * (1 + BACKWARD[self.facts.settings.model.method]) + checkpointing * blocks

    def _by_formula(self, rank: int, pairs: float) -> tuple[float, float]:
        shape, device = self.memory.shape, self.facts.hosts[rank].device
        whole = int(np.ceil(pairs))
        tokens, scored = (count / whole * pairs for count in self.facts.tokens(whole))
        sparse = shape.expert_blocks / shape.blocks
        weights = (1 - sparse) * block_weights(shape, False) + sparse * block_weights(shape, True, active=True)
        rate = (self.rates[rank] if self.rates else EQUAL_GFLOPS) * 1e9 / (1 + HALF_RATE_TOKENS[device] / tokens)
        bandwidth = self.facts.memory_speed(rank) * (1 + BACKWARD[self.facts.settings.model.method])
        columns = max(shape.mlp_columns, shape.experts_per_token * shape.expert_columns)
        numbers = PASSES_OF_ALL * shape.hidden_size + PASSES_OF_COLUMNS * columns
        return (
            tokens * (2 * weights / rate + numbers * self.facts.item_bytes / bandwidth),
            scored * shape.vocabulary * (2 * shape.hidden_size / rate + 4 * PASSES_OF_LOGITS[device] / bandwidth),
        )
