"""What each strategy would give, predicted from the hosts' curves and the link. Pure functions."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from lib.config.schema import SyncSettings
from lib.model.partition import ModelShape
from lib.plan.calibration import BatchCurve, CurveChoice, CurveKey, HostCalibration, Link, choose_curves
from lib.plan.cluster_plan import SHOWN_ALONE, ClusterPlan, Prediction, RankPlan
from lib.plan.divide_work import plan_cluster
from lib.plan.memory_fitting import MemoryEstimates
from lib.plan.run_facts import RankHost, RunFacts
from lib.plan.shares import equal_shares, solo_pairs_per_second
from lib.plan.strategy import Merging

MESSAGE_BYTES = 2**23  # by which links are compared: the activations of 1,000 tokens of a large model
MEETING_BYTES = 4096  # of each of the two sums in which ranks tell each other how far they are, before they merge


@dataclass(frozen=True)
class Cluster:
    """The hosts of a run, with their curves as they are while all work, and what is known of the run."""

    hosts: Sequence[RankHost]
    run: RunFacts
    speeds: Sequence[float] | None = None  # of the hosts beside each other, for where no curves compare them
    memory_estimates: MemoryEstimates | None = None  # where the model's dimensions are known

    @property
    def names(self) -> list[str]:
        """Each rank's host."""
        return [host.name for host in self.hosts]

    @property
    def calibrations(self) -> list[HostCalibration | None]:
        """Each rank's."""
        return [host.calibration for host in self.hosts]

    def choose(self, key: CurveKey, require_calibration: bool) -> CurveChoice:
        """Curves of all hosts, with the time of typical rows and the memory of the longest."""
        choice, of_longest = (
            choose_curves(
                self.names,
                self.calibrations,
                key.at_length(length),
                versions=self.run.versions,
                device_names=[host.device_name for host in self.hosts],
                published=self.run.published,
                require_calibration=require_calibration,
            )
            for length in (key.sequence_length, self.run.longest)
        )
        if choice.curves is None or of_longest.curves is None:
            return choice
        pairs = zip(choice.curves, of_longest.curves, strict=True)
        return replace(choice, curves=tuple(_with_memory_of(curve, other) for curve, other in pairs))

    def of_this_model(self, key: CurveKey) -> list[BatchCurve | None]:
        """Each host's own curve of this very model, where it has one."""
        own: list[BatchCurve | None] = []
        for host in self.hosts:
            alone = replace(self, hosts=[host], run=replace(self.run, published=()))
            choice = alone.choose(key, require_calibration=False)
            own.append(choice.curves[0] if choice.curves and measured_for(key, choice) else None)
        return own

    @property
    def link_is_known(self) -> bool:
        """Whether some host's calibration has the backend that carries the gradients."""
        return bool(self._links())

    def sum_seconds(self, size_bytes: float) -> float:
        """One sum over the slowest link; 0 for a single host, and where nothing was measured."""
        sums = (link.seconds(size_bytes) for link in self._links() if link.operation == "all_sum")
        return max(sums, default=0.0) * (len(self.hosts) > 1)

    def sum_seconds_in_pass(self, size_bytes: float) -> float:
        """`sum_seconds` within a pass. Over NCCL what was measured as latency is the host's, which runs ahead there."""
        host_seconds = min((link.latency_seconds for link in self._links() if link.backend == "nccl"), default=0.0)
        return max(0.0, self.sum_seconds(size_bytes) - host_seconds)

    def link_between(self, rank: int) -> Link | None:
        """A rank's link to the next one, one way; None where none was measured.

        A sum over n ranks passes 2 (n - 1) / n of its bytes over every link of a ring: where no ping-pong was measured,
        the slower host's sums say what a message takes.
        """
        pair = {self.hosts[rank].name, self.hosts[rank + 1].name}
        links = [
            link
            for one in self.calibrations[rank : rank + 2]
            for link in (one.links if one else ())
            if link.backend == self.run.backend
        ]
        direct = [link for link in links if link.operation == "ping_pong" and set(link.peers) == pair]
        if direct:
            return max(direct, key=lambda link: link.seconds(MESSAGE_BYTES))
        one_way = []
        for link in links:
            passes = 2 * (max(2, len(link.peers)) - 1)
            bandwidth = link.bandwidth_bytes_per_second * passes / max(2, len(link.peers))
            changed = {"latency_seconds": link.latency_seconds / passes, "bandwidth_bytes_per_second": bandwidth}
            if link.operation == "all_sum":
                one_way.append(link.model_copy(update={**changed, "transfers": ()}))
        return max(one_way, key=lambda link: link.seconds(MESSAGE_BYTES), default=None)

    def _links(self) -> list[Link]:
        return [link for one in self.calibrations if one for link in one.links if link.backend == self.run.backend]


@dataclass(frozen=True)
class RoundsPlan:
    """The rounds of independent ranks, as planned, and what a merge is predicted to take; 0 where nobody knows."""

    merging: Merging
    merge_seconds: float
    is_summed: bool  # on its way; else everybody gets everybody's whole


PASSES_OF_ALL = 45
"""How often a block reads or writes a number for every token and hidden unit, which no division makes fewer.

Forward and backward: 10 for two norms, 12 for residual sums, 5 for what adapters read, 18 for their gradients.
"""


def predict_sharded(
    plan: ClusterPlan,
    shape: ModelShape,
    curves: Sequence[BatchCurve | None],
    tokens_of: Callable[[int], int],
    sum_seconds: Callable[[float], float] | None,
    head_is_frozen: bool,
    memory_rates: Sequence[float | None],
) -> Prediction:
    """What a divided model gives: each rank's part of the compute, and a block's four sums, two of them backward.

    A rank computes its heads and columns, and its part of the head: rows of the vocabulary, positions beside a frozen
    head, or all of one that is trained. What every rank does for all hidden units is bound by memory: norms, residual
    sums, adapters' inputs and their gradients. A sum carries a number for every token and hidden unit, and nobody goes
    on before it: their times add up. What the sums of the adapters' whole halves cost is left out. Of a mixture of
    experts, all are counted as if they ran.

    Args:
        plan: of plan_sharded.
        curves: one a rank, of the whole model on its host, or None.
        tokens_of: a micro-batch of so many pairs, that go through the blocks.
        sum_seconds: one sum of so many bytes over the slowest link; None if no link is measured.
        memory_rates: bytes/s read and written on each rank's host, or None; then what all do is not counted.
    """
    assert plan.division is not None
    ranks, sizes = len(plan.ranks), np.array(plan.ranks[0].micro_batch_sizes)
    rows, weights = plan.division.vocabulary, plan.division.weights
    head = shape.vocabulary * shape.hidden_size
    of_head = [own / sum(rows) for own in rows] if rows else [1.0] * ranks  # held; beside a frozen one less is computed
    computed = [own / sum(weights) for own in weights] if head_is_frozen and not rows else of_head

    def fractions(of_head: Sequence[float]) -> list[float]:
        parts = zip(plan.parts, of_head, strict=True)
        return [
            (part.share * shape.divided_parameters + own * head) / (shape.divided_parameters + head)
            for part, own in parts
        ]

    messages = np.array([tokens_of(size) for size in sizes.tolist()]) * shape.hidden_size * shape.other_bytes
    per_batch = 4 * shape.blocks + bool(rows) + (bool(rows) or head_is_frozen)  # the embedding; what the head's gives
    known = [curve for curve in curves if curve is not None]
    seconds, solo = None, None
    if len(known) == ranks:
        passes = PASSES_OF_ALL * shape.blocks * float(messages.sum())
        computes = []
        for fraction, one, rate in zip(fractions(computed), known, memory_rates, strict=True):
            alone = float(one.seconds(sizes).sum())
            of_all = min(passes / rate, alone) if rate else 0.0
            computes.append(fraction * (alone - of_all) + of_all + one.step_overhead_seconds)
        if all(curve.max_batch_size for curve in known):  # else some host does nothing alone
            solo = sum(map(solo_pairs_per_second, known))
        if sum_seconds is not None:
            seconds = max(computes) + per_batch * sum(sum_seconds(float(size)) for size in messages)
    # Of a block's activations every rank keeps its two inputs and their norms; the rest are of heads and columns.
    own = 2 * (shape.heads + shape.kv_heads) * shape.head_dim + 3 * (shape.mlp_columns or shape.expert_columns)
    kept_by_all = 4 * shape.hidden_size / (4 * shape.hidden_size + own)
    needed = []
    for part, fraction, curve in zip(plan.parts, fractions(of_head), curves, strict=True):
        peak = peak_bytes(curve, int(sizes.max())) if curve else None
        whole = sum(part.divided_bytes for part in plan.parts) + part.whole_bytes
        measured = max(0.0, (peak or 0) - whole) * (fraction + (1 - fraction) * kept_by_all)
        activations = measured if peak else part.activation_bytes or 0
        needed.append(part.needed_bytes + round(activations))
    return Prediction(
        "sharded, "
        + " + ".join(f"{part.share:.0%}" for part in plan.parts[:SHOWN_ALONE])
        + " + ..." * (ranks > SHOWN_ALONE),
        tuple(rank.host for rank in plan.ranks),
        seconds,
        plan.global_batch_size / seconds / solo if seconds and solo else None,
        plan.strategy == "sharded",
        max(needed),
        float(per_batch * messages.sum() * 2 * (ranks - 1) / ranks),
    )


def sharded_tokens(run: RunFacts, pairs: int) -> int:
    """Tokens of a micro-batch through the blocks, rows as long as a typical one, padded as they will be."""
    if run.typical_rows is not None and run.memory_model is not None:
        return run.typical_rows.batch(pairs, run.memory_model.training.shared_prompts).tokens
    return pairs * run.key.sequence_length * (2 if run.key.records == "preference" else 1)


def measured_for(key: CurveKey, choice: CurveChoice) -> bool:
    """Whether every host's curve was measured with this very model."""
    return choice.curves is not None and all(
        curve.key is not None and curve.key.at_length(key.sequence_length) == key and curve.source == "measured"
        for curve in choice.curves
    )


def at_work_together(
    hosts: Sequence[str], calibrations: Sequence[HostCalibration | None]
) -> tuple[list[HostCalibration | None], tuple[str, ...]]:
    """Curves as they are when all ranks work: slower as measured, else by the number that share a machine.

    A rank's own file (HOST-0.json, ...; its machine is not called HOST) stands as it is. On CUDA every rank
    has a GPU of its own.
    """
    if len(hosts) == 1:
        return list(calibrations), ()
    ranks_of = Counter(hosts)
    together: list[HostCalibration | None] = []
    warnings = []
    for host, calibration in zip(hosts, calibrations, strict=True):
        if calibration is not None:
            own = calibration.machine.host != host or calibration.machine.device == "cuda"
            sharing = 1 if own else ranks_of[host]
            curves = [slower(curve, curve.slowdown_together or sharing, sharing) for curve in calibration.curves]
            rate = calibration.gflops and calibration.gflops / sharing
            calibration = calibration.model_copy(update={"curves": tuple(curves), "gflops": rate})
            if sharing > 1 and any(curve.slowdown_together is None for curve in curves):
                warnings.append(
                    f"{sharing} ranks share {host}, which was measured for one: each is taken to have "
                    f"1/{sharing} of its speed and memory; {host}-0.json, ... would say what each has"
                )
        together.append(calibration)
    return together, tuple(dict.fromkeys(warnings))


def slower(curve: BatchCurve, factor: float, ranks_sharing_memory: int = 1) -> BatchCurve:
    """The curve of a host that takes `factor` times as long."""
    points = [
        point.model_copy(
            update={
                "seconds_median": point.seconds_median * factor,
                "seconds_spread": point.seconds_spread * factor,
                "pairs_per_second": point.pairs_per_second / factor,
            }
        )
        for point in curve.points
    ]
    limit = curve.memory_limit_bytes and curve.memory_limit_bytes // ranks_sharing_memory
    overhead = curve.step_overhead_seconds * factor
    changed = {"points": tuple(points), "memory_limit_bytes": limit, "step_overhead_seconds": overhead}
    return curve.model_copy(update=changed)


def _with_memory_of(curve: BatchCurve, longest: BatchCurve) -> BatchCurve:
    """The curve's times, with the peak memory and the limit of the longest rows' curve."""
    if longest.memory_limit_bytes is None or longest.points[0].peak_memory_bytes is None:
        return curve
    sizes = np.array([point.batch_size for point in longest.points], dtype=np.float64)
    peaks = np.array([point.peak_memory_bytes for point in longest.points], dtype=np.float64)
    a_pair_more = (peaks[-1] - peaks[0]) / (sizes[-1] - sizes[0])
    points = []
    for point in curve.points:
        beyond = max(0.0, point.batch_size - sizes[-1])
        peak = float(np.interp(point.batch_size, sizes, peaks)) + beyond * max(0.0, a_pair_more)
        points.append(point.model_copy(update={"peak_memory_bytes": int(peak)}))
    return curve.model_copy(update={"points": tuple(points), "memory_limit_bytes": longest.memory_limit_bytes})


def compressed_bytes(size_bytes: float, sync: SyncSettings) -> float:
    """What float32 values of that size are on their way (lib/distributed/compression.py)."""
    factor = {"none": 1.0, "bf16": 0.5, "int8": 0.25 * (1 + 4 / 256), "topk": 2 * sync.topk_fraction}
    return size_bytes * factor[sync.compression]


def predict_replicas(
    plan: ClusterPlan, apart: ClusterPlan, sync_seconds: float, rounds: RoundsPlan, sync: SyncSettings
) -> tuple[Prediction, ...]:
    """Both strategies, equal shares, and the fastest hosts each alone; nothing without curves.

    apart: the plan of independent ranks, without a sync.
    """
    solo = plan.solo_sum_pairs_per_second
    if solo is None or plan.predicted_step_seconds is None:
        return ()
    hosts = [rank.host for rank in plan.ranks]
    batch, size = plan.global_batch_size, len(plan.ranks)
    # One message of all that is trained, as a ring algorithm sends it.
    message = compressed_bytes(max((curve.gradient_bytes or 0 for curve in plan.curves if curve), default=0), sync)
    to_sum = message * (2 * (size - 1) / size if sync.compression in ("none", "bf16") else size - 1)

    def prediction(
        name: str, ranks: Sequence[RankPlan], seconds: float, chosen: bool = False, bytes_sent: float = 0.0
    ) -> Prediction:
        return Prediction(
            name,
            tuple(rank.host for rank in ranks),
            seconds,
            batch / seconds / solo,
            chosen,
            _peak_memory(plan, ranks),
            bytes_sent if message or len(ranks) == 1 else None,
        )

    alone = [
        prediction(
            f"{rank.host} alone" if hosts.count(rank.host) == 1 else f"rank {rank.rank} ({rank.host}) alone",
            [rank],
            plan_cluster([rank.host], batch, curves=[plan.curves[rank.rank]]).predicted_step_seconds or 0.0,
        )
        for rank in sorted(plan.ranks, key=lambda rank: -(rank.solo_pairs_per_second or 0.0))[:SHOWN_ALONE]
    ]
    if len(hosts) == 1:
        return (replace(alone[0], chosen=True),)
    equal = plan_cluster(
        hosts,
        batch,
        shares=equal_shares(batch, len(hosts)),
        curves=plan.curves,
        sync_seconds=sync_seconds,
    )
    working = [rank for rank in plan.ranks if rank.share]
    seconds = plan.predicted_step_seconds - plan.sync_seconds + (sync_seconds if len(working) > 1 else 0.0)
    together = prediction(f"synchronous, {_sum_of(plan.shares)}", working, seconds, False, to_sum)
    # A merge's message is as large as a step's.
    merges = 1 / rounds.merging.steps_per_round if rounds.merging.merges else 0.0  # a step
    working = [rank for rank in apart.ranks if rank.share]
    seconds = independent_seconds(apart, working) + rounds.merge_seconds * merges
    to_merge = (to_sum if rounds.is_summed else message * (size - 1)) * merges
    in_rounds = prediction(f"independent, {_sum_of(apart.shares)}", working, seconds, False, to_merge)
    first, second = (in_rounds, together) if plan.strategy == "independent" else (together, in_rounds)
    return (
        replace(first, chosen=True),
        second,
        prediction("synchronous, equal shares", plan.ranks, equal.predicted_step_seconds or 0.0, False, to_sum),
        *alone,
    )


def _sum_of(shares: Sequence[int]) -> str:
    return " + ".join(map(str, shares[:SHOWN_ALONE])) + (" + ..." if len(shares) > SHOWN_ALONE else "")


def independent_seconds(plan: ClusterPlan, working: Sequence[RankPlan]) -> float:
    """A global batch's time where each rank goes through its steps at its own pace."""
    speeds = []
    for rank in working:
        curve = plan.curves[rank.rank]
        assert curve is not None and rank.predicted_compute_seconds is not None
        speeds.append(rank.share / (rank.predicted_compute_seconds + curve.step_overhead_seconds))
    return plan.global_batch_size / sum(speeds)


def _peak_memory(plan: ClusterPlan, ranks: Sequence[RankPlan]) -> int | None:
    """The largest peak of these ranks' micro-batches, in bytes; None where it was not measured."""
    peaks = []
    for rank in ranks:
        curve = plan.curves[rank.rank]
        peak = peak_bytes(curve, max(rank.micro_batch_sizes, default=1)) if curve else None
        if peak is None:
            return None
        peaks.append(peak)
    return max(peaks)


def peak_bytes(curve: BatchCurve, micro_batch_size: int) -> int | None:
    """The peak memory of a micro-batch, in bytes; None where it was not measured.

    Beyond the measured sizes it grows as between them.
    """
    if curve.points[0].peak_memory_bytes is None:
        return None
    sizes = [point.batch_size for point in curve.points]
    peaks = [point.peak_memory_bytes or 0 for point in curve.points]
    beyond = max(0, micro_batch_size - sizes[-1])
    slope = (peaks[-1] - peaks[0]) / (sizes[-1] - sizes[0]) if len(sizes) > 1 else peaks[0] / sizes[0]
    return int(np.interp(micro_batch_size, sizes, peaks) + beyond * max(0.0, slope))
